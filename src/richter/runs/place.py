"""The folder of a run as its writer opened it. At any moment somebody may move or delete it, and another process may begin a run
under its name: what is done here reaches the writer's own files, or nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from richter.core import StoreError
from richter.runs.format import DATABASE, OBJECTS, beside, connection_to, digest_of, gone, identity, own_folder

if TYPE_CHECKING:
    from filelock import BaseFileLock

HOLDS = os.open in os.supports_dir_fd and os.link in os.supports_dir_fd  # not on Windows, which keeps open files where they are
FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
ASIDE = f".{DATABASE}-"  # how names begin under which the database is closed


class Folder:
    """A folder that is held open: a name in it leads there, whatever has become of the folder's own name."""

    def __init__(self, path: Path, within: Folder | None = None) -> None:
        self.path, self._handle = path, None
        if HOLDS:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            self._handle = os.open(path, flags) if within is None else within.open(path.name, flags)

    def _at(self, name: str) -> str:
        return name if self._handle is not None else os.fspath(self.path / name)

    def open(self, name: str, flags: int) -> int:
        return os.open(self._at(name), flags | FLAGS, 0o666, dir_fd=self._handle)  # the umask takes from that

    def identity(self, name: str) -> tuple[int, int]:
        return identity(os.stat(self._at(name), dir_fd=self._handle, follow_symlinks=False))

    def size(self, name: str) -> int:
        """0 if there is no such file."""
        try:
            return os.stat(self._at(name), dir_fd=self._handle, follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def names(self) -> list[str]:
        return os.listdir(self.path if self._handle is None else self._handle)

    def mkdir(self, name: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._at(name), dir_fd=self._handle)

    def link(self, name: str, other: str) -> None:
        os.link(self._at(name), self._at(other), src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def replace(self, name: str, other: str) -> None:
        os.replace(self._at(name), self._at(other), src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(name), dir_fd=self._handle)

    def sync(self) -> None:
        if self._handle is not None:
            os.fsync(self._handle)

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


class Place:
    """The folder of a run, its database and the log of that, while one process writes them."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder, self._real, self.closed = path, Folder(path), path.resolve(), False
        self._files: dict[str, tuple[int, int]] = {}
        self._last: sqlite3.Connection | None = None  # under the second name, when the database is closed
        with contextlib.suppress(FileExistsError):  # SQLite gives its other files the permissions of this one
            os.close(self.folder.open(DATABASE, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        self.hold(path / DATABASE)

    def hold(self, *files: Path) -> None:
        """From here on these files must be the ones that they are now."""
        for file in files:
            self._files[os.fspath(file)] = self.folder.identity(file.name)
        self.check()

    def check(self) -> None:
        """What is written to a file that has no name any more is lost."""
        for file, known in self._files.items():
            try:
                here = identity(os.stat(file))
            except OSError as why:
                raise gone(self.path, why.strerror) from why
            if here != known:
                raise gone(self.path, "another run is in its place") from FileNotFoundError(errno.ENOENT, file)

    @property
    def ours(self) -> bool:
        """Does the name of the run still lead to it?"""
        try:
            self.check()
        except StoreError:
            return False
        return True

    def tidy(self) -> None:
        """Remove what a writer that was killed has left: half of an object, or a second name of the database."""
        for name in self.folder.names():
            if name.startswith(ASIDE):
                self.folder.unlink(name)
        if (self.path / OBJECTS).exists():
            with contextlib.closing(self.objects()) as objects:
                for name in objects.names():
                    if name.startswith("."):  # ours and those of safetensors
                        objects.unlink(name)

    def objects(self) -> Folder:
        """Of large arrays and states; made if it is not there."""
        own_folder(self.path / OBJECTS)
        self.folder.mkdir(OBJECTS)
        return Folder(self.path / OBJECTS, self.folder)

    def keep_object(self, write: Callable[[Path], object]) -> str:
        """A file under the SHA-256 of what ``write`` puts into it: written aside, flushed, then renamed."""
        from safetensors import SafetensorError
        name = f".{secrets.token_hex(8)}.part"
        with contextlib.closing(self.objects()) as objects:
            try:
                handle = objects.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                mode = stat.S_IMODE(os.fstat(handle).st_mode)
                os.close(handle)
                write(objects.path / name)
                digest = self._flushed(objects, name, mode)
                objects.replace(name, f"{digest}.safetensors")
                objects.sync()
            except SafetensorError as why:  # its word for a full disk
                raise StoreError(f"{objects.path} could not be written: {why}. Is the disk full? What was written before is "
                                 f"intact.") from why
            finally:
                objects.unlink(name)
                (objects.path / name).unlink(missing_ok=True)  # written by its path, which may lead elsewhere by now
        return digest

    def _flushed(self, objects: Folder, name: str, mode: int) -> str:
        """The digest of a file that was written by its path, if it is in this folder."""
        handle = objects.open(name, os.O_RDWR)
        with open(handle, "rb") as file:
            if identity(os.fstat(handle)) != identity(os.stat(objects.path / name)):
                raise gone(self.path, "another run is in its place") from FileNotFoundError(errno.ENOENT, name)
            digest = digest_of(file)
            os.fsync(handle)
            if HOLDS:
                os.fchmod(handle, mode)  # safetensors has its own idea of who may read a file
        return digest

    def drop_object(self, digest: str) -> None:
        with contextlib.closing(self.objects()) as objects:
            objects.unlink(f"{digest}.safetensors")

    def end_log(self, writer: sqlite3.Connection, anchor: sqlite3.Connection) -> None:
        """Close the database, and leave one file that can be read from anywhere, unless somebody reads it just now.

        SQLite removes a log by its path, where by now another run may have one. ``anchor`` reads the same file and is closed
        last: a connection removes nothing while there is another, and one that only reads never does. What is empty is then
        removed by the folder that is held, while the database is locked under a second name that nobody else knows."""
        if self.closed:
            return
        if self._last is not None:  # an interrupt came between
            self._last.close()
        with contextlib.suppress(sqlite3.Error):
            writer.execute("PRAGMA busy_timeout=1000")
            writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if not HOLDS:
                anchor.close()
                writer.execute("PRAGMA busy_timeout=0")
                writer.execute("PRAGMA journal_mode=DELETE")
        aside = f"{ASIDE}{secrets.token_hex(8)}"
        try:
            with contextlib.suppress(OSError):  # some file systems have no links: there the empty log stays
                self.folder.link(DATABASE, aside)
            writer.close()
            anchor.close()
            with contextlib.suppress(OSError, sqlite3.Error):
                self._remove_log(aside)
        finally:
            if self._last is not None:
                self._last.close()
            self.folder.unlink(aside)

    def _remove_log(self, aside: str) -> None:
        if self.folder.identity(aside) != self._files[os.fspath(self.path / DATABASE)]:
            return
        self._last = connection = connection_to(f"{(self._real / aside).as_uri()}?mode=rw", uri=True)
        connection.execute("PRAGMA busy_timeout=0")
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("PRAGMA schema_version").fetchall()  # from here on nobody else has the file open
        log, index = beside(Path(DATABASE))[0].name, f"{DATABASE}-shm"
        if not self.folder.size(log) and self.folder.identity(aside) == self.folder.identity(DATABASE):
            connection.execute("PRAGMA journal_mode=DELETE")
            self.folder.unlink(log)
            self.folder.unlink(index)

    def close(self) -> None:
        self.closed = True
        self.folder.close()


# ---------------------------------------------------------------------------------------------------------------- lock
# One writer for each run: a lock that the system lets go when the process ends, however it ends.

try:
    import fcntl
except ImportError:  # not on Windows: there the last writer's session tells what is known
    fcntl = None  # type: ignore[assignment]

PATIENCE = 0.15  # seconds; it may be a reader that asks whether somebody writes
LOCK_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def take(path: Path) -> BaseFileLock | None:
    """The lock, or None if another writer holds it. A child that is forked (a worker that loads data) does not hold it with us,
    so that it is free when we are killed; filelock sees to that, from 3.30 on."""
    from filelock import FileLock, Timeout
    # any thread may let it go; a lock that is a file of its own would outlive a killed process
    lock = FileLock(path, timeout=PATIENCE, poll_interval=0.01, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


def held(path: Path) -> bool:
    """Is somebody writing? Asked by a shared lock, which filelock does not have: readers must not take each other for a writer,
    and may be allowed to read the file only."""
    if fcntl is None:
        return False
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | LOCK_FLAGS)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
    return False
