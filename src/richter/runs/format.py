"""The folder of a run, and how the SQLite file in it is opened without trusting whoever wrote it.

``run.db`` (with a write-ahead log; its tables are in ``sql.py``) holds everything but large arrays, which lie beside it in
``objects/`` under the SHA-256 of their bytes. Every write is one transaction: after a crash the file holds all writes that
returned, and no half of another.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from richter.core import StoreError

DATABASE, LOCK, OBJECTS = "run.db", "writer.lock", "objects"
NAMING = bytes.fromhex("d9d505f920a163d7")  # the end of a journal that belongs to a write to several databases
HOLLOW = 2 ** 26  # bytes of holes that any file may have
HINTS = {"disk is full": "The disk is full. Free some space and continue with resume=True",
         "disk I/O": "The disk refused (is it full, or gone?), or a file was cut while it was open. Continue with resume=True "
                     "when it is back",
         "readonly": "The folder is read-only. Choose another place for runs",
         "unable to open": "The folder cannot be written or does not exist. Choose another place for runs",
         "interrupted": "It asks for more work than a file of its size can: it is damaged, or was made to do harm",
         "locked": "Another process holds it. Wait for it, or look at `richter runs`",
         "codec can't": "The file is damaged",
         "Could not decode": "The file is damaged",
         "user-defined function": "The file is damaged",
         "malformed": "The file is damaged. `sqlite3 run.db .recover` may save what is left",
         "not a database": "The file is not a database"}


def connection_to(path: Path | str, **options: bool) -> sqlite3.Connection:
    """Each statement is a transaction of its own, unless one is begun; any thread may ask, one at a time."""
    return sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False, **options)


def guarded(connection: sqlite3.Connection) -> sqlite3.Connection:
    """With SQLite's own care for files of unknown origin."""
    connection.execute("PRAGMA trusted_schema=OFF")
    connection.execute("PRAGMA cell_size_check=ON")
    return connection


def bound(connection: sqlite3.Connection) -> int:
    """The next question ends, whatever the file is: pages that lead to each other in circles could keep it busy for ever.
    Returns the size of the file."""
    (pages,), (size,) = connection.execute("PRAGMA page_count").fetchone(), connection.execute("PRAGMA page_size").fetchone()
    left = iter(range(20 + pages * size // 2000))  # in 100,000 operations of SQLite; an honest question takes far fewer
    connection.set_progress_handler(lambda: next(left, None) is None, 100_000)
    return int(pages * size)


def begin_log(connection: sqlite3.Connection) -> None:
    """By the writer: others can read meanwhile."""
    connection.execute("PRAGMA journal_mode=WAL")  # where the file system cannot, SQLite stays with a journal
    connection.execute("PRAGMA synchronous=NORMAL")  # a killed process loses nothing; a power cut what ``sync`` has not seen
    connection.execute("PRAGMA foreign_keys=OFF")


def only_reading(path: Path) -> sqlite3.Connection:
    return connection_to(f"{path.resolve().as_uri()}?mode=ro", uri=True)


def to_read(path: Path) -> sqlite3.Connection:
    """Read-only; to a copy, where a write-ahead log lies in a folder that may not be written."""
    try:
        connection = guarded(only_reading(own(path)))
        try:
            connection.execute("PRAGMA schema_version")
        except BaseException:
            connection.close()
            raise
        return connection
    except sqlite3.OperationalError as why:
        if "unable to open" not in str(why) and "readonly" not in str(why):
            raise
    return guarded(_copy_in_memory(path))


def _copy_in_memory(path: Path) -> sqlite3.Connection:
    copy = connection_to(":memory:")
    with tempfile.TemporaryDirectory(prefix="richter-") as folder:
        for part in (path, *beside(path)):
            if part.is_file():
                shutil.copyfile(own(part), Path(folder) / part.name)
        with contextlib.closing(sqlite3.connect(Path(folder) / path.name)) as source:
            source.backup(copy)
    return copy


def sync(folder: Path) -> None:
    """What was written to a run is on the disk when this returns, and not only with the system: a power cut leaves it there.
    SQLite itself sees to the database, into which the log goes; to open and close that file here would let go SQLite's locks."""
    for path in (beside(folder / DATABASE)[0], folder / OBJECTS, folder, folder.parent):
        sync_path(path)


def sync_path(path: Path) -> None:
    """A file, or the names in a folder (which some systems do not open)."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def beside(path: Path) -> tuple[Path, Path]:
    """What SQLite reads together with a database: its write-ahead log, or the journal of a write that was cut off."""
    return path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-journal")


def own(path: Path) -> Path:
    """A file of the run's own folder: neither a link nor the name in a journal leads out of it; none keeps anybody waiting."""
    for part in (path, *beside(path), path.with_name(f"{path.name}-shm")):
        regular(part)
        if part.name.endswith("-journal") and part.is_file() and _last_bytes(part) == NAMING:
            raise StoreError(f"{part} names another file, which SQLite would delete. No journal of Richter's does; it was made "
                             f"to do harm. Nothing was read or changed.")
    return path


def regular(path: Path) -> Path:
    """A file, or nothing yet: no link, and no named pipe or device, which could keep whoever opens it waiting for ever; nor one
    that is nearly nothing but holes."""
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return path
    kind = facts.st_mode
    if stat.S_ISLNK(kind):
        raise StoreError(f"{path} is a link. The files of a run lie in its own folder; nothing elsewhere is read or written.")
    if not stat.S_ISREG(kind):
        raise StoreError(f"{path} is no regular file. Nothing of this run was read or written; look who has put it there.")
    if _hollow(path, facts):  # what a reader may do and hold goes by the size of the file
        raise StoreError(f"{path} says it has {facts.st_size:,} bytes, and {512 * facts.st_blocks:,} are on the disk. No file of "
                         f"a run has such holes; nothing of it was read or written.")
    return path


def _hollow(path: Path, facts: os.stat_result) -> bool:
    """Are less than one of its hundred bytes on the disk? Some file systems count late; they are asked where the bytes are."""
    least = (facts.st_size - HOLLOW) // 100
    if not 0 < 512 * getattr(facts, "st_blocks", 0) < least or not hasattr(os, "SEEK_DATA"):
        return False
    handle, place, there = os.open(path, os.O_RDONLY), 0, 0
    try:
        while there < least:
            begin = os.lseek(handle, place, os.SEEK_DATA)
            place = os.lseek(handle, begin, os.SEEK_HOLE)
            there += place - begin
    except OSError as why:
        return why.errno == errno.ENXIO  # there are no more
    finally:
        os.close(handle)
    return False


def own_folder(folder: Path) -> Path:
    """A folder, or nothing yet: no link that leads elsewhere, and no named pipe, which would keep a sync waiting for ever."""
    if folder.is_symlink():
        raise StoreError(f"{folder} is a link. The objects of a run lie in its own folder; nothing elsewhere is read or written.")
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is no folder. The objects of a run lie in one; look who has put something else there.")
    return folder


def digest_of(f: Any) -> str:
    digest = hashlib.sha256()
    for block in iter(lambda: f.read(2 ** 20), b""):
        digest.update(block)
    return digest.hexdigest()


def identity(facts: os.stat_result) -> tuple[int, int]:
    """Which file it is, whatever its name."""
    return facts.st_dev, facts.st_ino


Stamp = list[tuple[int, ...]]


def stamp(path: Path) -> Stamp:
    """What the file system says of a database and of what is read with it: differs when something was written, or done to them
    in any other way. When each was written comes first."""
    files: Stamp = []
    for end in ("", "-wal", "-journal", "-shm"):
        with contextlib.suppress(OSError, ValueError):
            facts = os.lstat(f"{path}{end}")
            if stat.S_ISREG(facts.st_mode) and (not facts.st_size or end == "-shm"):
                continue  # a reader leaves an empty log behind, and writes to the index of one
            files.append((facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_ctime_ns))
    return files


def _last_bytes(path: Path) -> bytes:
    with open(path, "rb") as f:
        f.seek(max(0, path.stat().st_size - len(NAMING)))
        return f.read(len(NAMING))


@contextlib.contextmanager
def explained(folder: Path, done: str) -> Iterator[None]:
    """SQLite's and the system's errors in one sentence, with what to do."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as why:  # the latter where SQLite cites what is no text
        hint = next((hint for words, hint in HINTS.items() if words in str(why)), "Nothing else is known")
        raise StoreError(f"the run {folder} could not be {done}: {why}. {hint}; what was written before is intact.") from why
    except OSError as why:
        if isinstance(why, StoreError):
            raise
        if isinstance(why, FileNotFoundError) and done == "written":
            raise gone(folder, why.strerror) from why
        raise StoreError(f"the run {folder} could not be {done}: {why.strerror or why}. Choose a place with room that can be "
                         f"written; what was written before is intact.") from why


def gone(folder: Path, why: str | None) -> StoreError:
    """What is written to a run that is not in its place."""
    return StoreError(f"the run {folder} could not be written: {why}. Was it deleted or moved? What is written to it now would "
                      f"be lost. Put it back, or choose another place for runs.")


def refused_by_disk(why: BaseException) -> bool:
    """Was it the disk or the system that refused, and not what was to be written that is wrong? Then it may be tried again."""
    from safetensors import SafetensorError
    return isinstance(why, StoreError) and isinstance(why.__cause__, (sqlite3.Error, OSError, SafetensorError)) \
        and not isinstance(why.__cause__, StoreError)


def is_lasting(why: BaseException) -> bool:
    """Is a run refused for what its files are, and not for what may pass by: a disk, a lock, memory, a limit of time?"""
    return isinstance(why, StoreError) and not isinstance(why.__cause__, (OSError, sqlite3.OperationalError, MemoryError))
