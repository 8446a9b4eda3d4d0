"""The folder of a run: safe access to its files, the writer's lock, and errors as one sentence.

A folder may contain anything, because its origin is unknown, and another process may move or delete it at any moment, or begin a
run under its name. The functions here access only regular files in the run's own folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import sqlite3
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from richter.core import StoreError

try:
    import fcntl
except ImportError:  # not on Windows, where the last writer's session tells what is known
    fcntl = None  # type: ignore[assignment]

DATABASE, LOCK, OBJECTS = "run.db", "writer.lock", "objects"
NAMING = bytes.fromhex("d9d505f920a163d7")  # the end of a journal that belongs to a write to several databases
HOLLOW = 2 ** 26  # largest number of bytes of holes in a file
HOLDS = os.open in os.supports_dir_fd and os.link in os.supports_dir_fd  # not on Windows, where open files cannot be moved
FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
PATIENCE = 0.15  # seconds that a writer waits for the lock; a reader may hold it briefly to ask whether somebody writes
HINTS = {"disk is full": "The disk is full. Free some space and continue with resume=True",
         "disk I/O": "The disk refused (is it full, or gone?), or a file was cut while it was open. Continue with resume=True "
                     "when it is back",
         "readonly": "The folder is read-only. Choose another place for runs",
         "unable to open": "The folder cannot be written or does not exist. Choose another place for runs",
         "interrupted": "It needs more work than a valid file of this size: it is damaged or malicious",
         "locked": "Another process holds it. Wait for it, or look at `richter runs`",
         "codec can't": "The file is damaged",
         "Could not decode": "The file is damaged",
         "user-defined function": "The file is damaged",
         "malformed": "The file is damaged. `sqlite3 run.db .recover` may save what is left",
         "not a database": "The file is not a database"}
Stamp = list[tuple[int, ...]]


# ------------------------------------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def explained(folder: Path, done: str) -> Iterator[None]:
    """Turn errors of SQLite and of the system into one sentence with advice."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as why:  # UnicodeDecodeError if SQLite quotes invalid text
        hint = next((hint for words, hint in HINTS.items() if words in str(why)), "The cause is not known")
        raise StoreError(f"the run {folder} could not be {done}: {why}. {hint}; what was written before is intact.") from why
    except OSError as why:
        if isinstance(why, StoreError):
            raise
        if isinstance(why, FileNotFoundError) and done == "written":
            raise gone(folder, why.strerror) from why
        raise StoreError(f"the run {folder} could not be {done}: {why.strerror or why}. Choose a writable place with free "
                         f"space; what was written before is intact.") from why


def gone(folder: Path, why: str | None) -> StoreError:
    """Make the error for a write to a run whose folder was moved or replaced."""
    return StoreError(f"the run {folder} could not be written: {why}. Was it deleted or moved? Anything written now would "
                      f"be lost. Put it back, or choose another place for runs.")


def refused_by_disk(why: BaseException) -> bool:
    """Whether the disk or the system refused a write, so that it may be retried; False if the data to be written are invalid."""
    from safetensors import SafetensorError
    return isinstance(why, StoreError) and isinstance(why.__cause__, (sqlite3.Error, OSError, SafetensorError)) \
        and not isinstance(why.__cause__, StoreError)


def is_lasting(why: BaseException) -> bool:
    """Whether a run is refused because of its files, and not for a temporary reason (disk, lock, memory, time limit)."""
    return isinstance(why, StoreError) and not isinstance(why.__cause__, (OSError, sqlite3.OperationalError, MemoryError))


# -------------------------------------------------------------------------------------------------------------- files


def beside(path: Path) -> tuple[Path, Path]:
    """Return the files that SQLite reads with a database: its write-ahead log, and the journal of an interrupted write."""
    return path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-journal")


def checked(path: Path) -> Path:
    """Check a database and its companion files: no link, and no name in a journal, may lead out of the run's folder."""
    for part in (path, *beside(path), path.with_name(f"{path.name}-shm")):
        regular(part)
        if part.name.endswith("-journal") and part.is_file():
            with open(part, "rb") as f:
                f.seek(max(0, part.stat().st_size - len(NAMING)))
                if f.read() == NAMING:
                    raise StoreError(f"{part} names another file, which SQLite would delete. Richter never writes such a "
                                     f"journal, so it is malicious. Nothing was read or changed.")
    return path


def regular(path: Path) -> Path:
    """Raise an error for links, for files that consist almost entirely of holes, and for named pipes and devices, which could
    block whoever opens them. A file that does not exist is allowed."""
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return path
    if stat.S_ISLNK(facts.st_mode):
        raise StoreError(f"{path} is a link. The files of a run must be in its own folder; nothing elsewhere is read or written.")
    if not stat.S_ISREG(facts.st_mode):
        raise StoreError(f"{path} is not a regular file. Nothing of this run was read or written; find out who put it there.")
    if _hollow(path, facts):  # a reader's work and memory depend on the size of the file
        raise StoreError(f"{path} has a size of {facts.st_size:,} bytes, but only {512 * facts.st_blocks:,} are on the disk. No "
                         f"file of a run has such holes; nothing of it was read or written.")
    return path


def _hollow(path: Path, facts: os.stat_result) -> bool:
    """Whether less than 1 % of a file is on the disk. Some file systems count blocks late, so they are asked for the first
    data."""
    least = (facts.st_size - HOLLOW) // 100
    if not 0 < 512 * getattr(facts, "st_blocks", 0) < least or not hasattr(os, "SEEK_DATA"):
        return False
    handle, end, on_disk = os.open(path, os.O_RDONLY), 0, 0
    try:
        while on_disk < least:
            begin = os.lseek(handle, end, os.SEEK_DATA)
            end = os.lseek(handle, begin, os.SEEK_HOLE)
            on_disk += end - begin
    except OSError as why:
        return why.errno == errno.ENXIO  # there are no more data
    finally:
        os.close(handle)
    return False


def objects_of(folder: Path) -> Path:
    """Return the folder of a run's objects, which may not exist yet; it must not be a link or another kind of file."""
    path = folder / OBJECTS
    try:
        mode = os.lstat(path).st_mode  # one call, because the folder may be moved at any moment
    except FileNotFoundError:
        return path
    if stat.S_ISLNK(mode):
        raise StoreError(f"{path} is a link. The objects of a run must be in its own folder; nothing elsewhere is read or "
                         f"written.")
    if not stat.S_ISDIR(mode):
        raise StoreError(f"{path} is not a folder, as the objects of a run need; find out who replaced it.")
    return path


def object_path(folder: Path, name: str) -> Path:
    """Return the file of an object after verifying its content. Its name is a digest, so it cannot lead out of the folder."""
    if not re.fullmatch(r"[0-9a-f]{64}", name):
        raise StoreError(f"{name!r} is not the name of a stored object.")
    path = objects_of(folder) / f"{name}.safetensors"
    if path.is_symlink() or not path.is_file():
        raise StoreError(f"the object {name[:12]}... of this run is missing from {path.parent}. It was deleted, or not "
                         f"copied.")
    with open(regular(path), "rb") as f:
        if hashlib.file_digest(f, "sha256").hexdigest() != name:
            raise StoreError(f"the object {name[:12]}... in {path.parent} does not have its original content. It is damaged.")
    return path


def sync(folder: Path) -> None:
    """Ask the disk to store everything written to a run, so that it survives a power cut. SQLite does this for the database
    itself; opening and closing that file here would release SQLite's locks."""
    for path in (beside(folder / DATABASE)[0], folder / OBJECTS, folder, folder.parent):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # some systems cannot open folders
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def identity(facts: os.stat_result) -> tuple[int, int]:
    """Return device and number of a file, which identify it independently of its name."""
    return facts.st_dev, facts.st_ino


def stamp(path: Path) -> Stamp:
    """Return time, size and identity of a database and of the files read with it. The stamp differs after every write or other
    change."""
    files: Stamp = []
    for end in ("", "-wal", "-journal", "-shm"):
        with contextlib.suppress(OSError, ValueError):
            facts = os.lstat(f"{path}{end}")
            if stat.S_ISREG(facts.st_mode) and (not facts.st_size or end == "-shm"):
                continue  # a reader leaves an empty log, and writes to its index
            files.append((facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_ctime_ns))
    return files


# ----------------------------------------------------------------------------------------------------------- database


def connection_to(path: Path | str, **options: bool) -> sqlite3.Connection:
    """Open a connection with SQLite's safety options for files of unknown origin. Each statement is its own transaction, unless
    one is begun. Any thread may use it, one at a time."""
    connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False, **options)
    connection.execute("PRAGMA trusted_schema=OFF")
    connection.execute("PRAGMA cell_size_check=ON")
    return connection


def only_reading(path: Path) -> sqlite3.Connection:
    """Open a database for reading only."""
    return connection_to(f"{path.resolve().as_uri()}?mode=ro", uri=True)


def bound(connection: sqlite3.Connection) -> int:
    """Limit the work of the next query, because pages of a malicious file may refer to each other in circles. Returns the size of
    the file."""
    (pages,), (size,) = connection.execute("PRAGMA page_count").fetchone(), connection.execute("PRAGMA page_size").fetchone()
    left = iter(range(20 + pages * size // 2000))  # in 100,000 operations of SQLite; a normal query takes far fewer
    connection.set_progress_handler(lambda: next(left, None) is None, 100_000)
    return int(pages * size)


def to_read(path: Path) -> sqlite3.Connection:
    """Open a read-only connection; to a copy in memory, if there is a write-ahead log in a folder that is not writable."""
    try:
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(contextlib.closing(only_reading(checked(path))))
            connection.execute("PRAGMA schema_version")
            undo.pop_all()
        return connection
    except sqlite3.OperationalError as why:
        if "unable to open" not in str(why) and "readonly" not in str(why):
            raise
    copy = connection_to(":memory:")
    with tempfile.TemporaryDirectory(prefix="richter-") as folder:
        for part in (path, *beside(path)):
            if part.is_file():
                shutil.copyfile(checked(part), Path(folder) / part.name)
        with contextlib.closing(sqlite3.connect(Path(folder) / path.name)) as source:
            source.backup(copy)
    return copy


# ------------------------------------------------------------------------------------------------------------ folders


class Folder:
    """A folder that is held open: names in it stay valid, even if the folder itself is renamed."""

    def __init__(self, path: Path, within: Folder | None = None) -> None:
        self.path, self.handle = path, None
        if HOLDS:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            self.handle = os.open(path, flags) if within is None else within.open(path.name, flags)

    def at(self, name: str) -> str:
        """Return a name for functions that take ``dir_fd=folder.handle``."""
        return name if self.handle is not None else os.fspath(self.path / name)

    def open(self, name: str, flags: int) -> int:
        """Open a file of the folder, and return its handle."""
        return os.open(self.at(name), flags | FLAGS, 0o666, dir_fd=self.handle)  # the umask restricts the mode

    def stat(self, name: str) -> os.stat_result:
        """Status of a file of the folder, without following links."""
        return os.stat(self.at(name), dir_fd=self.handle, follow_symlinks=False)

    def names(self) -> list[str]:
        return os.listdir(self.path if self.handle is None else self.handle)

    def unlink(self, name: str) -> None:
        """Delete a file of the folder if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.at(name), dir_fd=self.handle)

    def close(self) -> None:
        """Close the handle of the folder."""
        handle, self.handle = self.handle, None
        if handle is not None:
            os.close(handle)


class RunFolder(Folder):
    """The folder of a run that one process writes. ``locked``: identity of the folder whose lock this process has."""

    def __init__(self, path: Path, locked: tuple[int, int]) -> None:
        super().__init__(path)
        self.closed, self._real = False, path.resolve()
        self._files: dict[Path, tuple[int, int]] = {}
        self._last: sqlite3.Connection | None = None  # to the second name of the database, while it is closed
        if identity(os.stat(path) if self.handle is None else os.fstat(self.handle)) != locked:
            self.close()
            raise gone(path, "another run is in its place")

    def make_database(self, build: Callable[[sqlite3.Connection], object]) -> None:
        """Build the database under a random name and rename it, unless it exists. SQLite deletes the log of an empty database by
        its path, where another run may have one by now."""
        with contextlib.suppress(FileNotFoundError):
            if self.stat(DATABASE).st_size:
                return
        aside = self._aside()
        os.close(self.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL))  # SQLite gives its other files the permissions of this one
        try:
            with contextlib.closing(self._connection_aside(aside)) as connection:
                connection.execute("PRAGMA journal_mode=MEMORY")
                connection.execute("PRAGMA synchronous=OFF")  # it is flushed at once, below
                build(connection)
                connection.execute("PRAGMA journal_mode=WAL").fetchall()
            handle = self.open(aside, os.O_RDWR)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            self.unlink(f"{DATABASE}-wal")  # left by a power cut
            os.replace(self.at(aside), self.at(DATABASE), src_dir_fd=self.handle, dst_dir_fd=self.handle)
        finally:
            self._drop_aside(aside)

    def use_log(self, connection: sqlite3.Connection) -> None:
        """Give the database a write-ahead log, so that others can read during writes. This writes to the file through the log at
        its path; under a second, random name there is none."""
        aside = self._aside()
        try:
            if not HOLDS:
                raise OSError
            os.link(self.at(DATABASE), self.at(aside), src_dir_fd=self.handle, dst_dir_fd=self.handle)
        except OSError:  # some file systems have no links
            connection.execute("PRAGMA journal_mode=WAL").fetchall()
            return
        try:
            with contextlib.closing(self._connection_aside(aside)) as other:
                other.execute("PRAGMA journal_mode=WAL").fetchall()
        finally:
            self._drop_aside(aside)

    def _drop_aside(self, name: str) -> None:
        """Delete a second name of the database and its logs."""
        for end in ("", "-wal", "-shm", "-journal"):
            self.unlink(f"{name}{end}")

    def _aside(self) -> str:
        """A new random name for the database while it is being made."""
        return f".{DATABASE}-{secrets.token_hex(8)}"

    def _connection_aside(self, name: str) -> sqlite3.Connection:
        """Open a connection to a file of this folder; raise an error if the folder is not in its place."""
        return connection_to(f"{(self._real / name).as_uri()}?mode=rw", uri=True)

    def hold(self, name: str) -> None:
        """Remember the identity of this file; ``check`` verifies it."""
        try:
            self._files[self.path / name] = identity(self.stat(name))
        except FileNotFoundError as why:
            raise gone(self.path, why.strerror) from why
        self.check()

    def check(self) -> None:
        """Raise an error if a file has no name any more, because data written to it would be lost."""
        for file, held in self._files.items():
            try:
                here = identity(os.stat(file))
            except OSError as why:
                raise gone(self.path, why.strerror) from why
            if here != held:
                raise gone(self.path, "another run is in its place") from FileNotFoundError(errno.ENOENT, file)

    def tidy(self) -> None:
        """Remove the remains of a killed writer: incomplete objects, or a second name of the database."""
        for name in self.names():
            if name.startswith(f".{DATABASE}-"):
                self.unlink(name)
        if (self.path / OBJECTS).exists():
            with contextlib.closing(self.objects()) as objects:
                for name in objects.names():
                    if name.startswith("."):  # temporary names of Richter and of safetensors
                        objects.unlink(name)

    def objects(self) -> Folder:
        """Open the folder of large arrays and states; create it if needed."""
        path = objects_of(self.path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.at(OBJECTS), dir_fd=self.handle)
        return Folder(path, self)

    def keep_object(self, write: Callable[[Path], object]) -> str:
        """Store the output of ``write`` as a file named by its SHA-256: written aside, flushed, then renamed."""
        from safetensors import SafetensorError
        name = f".{secrets.token_hex(8)}.part"
        with contextlib.closing(self.objects()) as objects:
            try:
                handle = objects.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                mode = stat.S_IMODE(os.fstat(handle).st_mode)
                os.close(handle)
                write(objects.path / name)
                with open(objects.open(name, os.O_RDWR), "rb") as file:
                    if identity(os.fstat(file.fileno())) != identity(os.stat(objects.path / name)):  # safetensors writes by path
                        raise gone(self.path, "another run is in its place") from FileNotFoundError(errno.ENOENT, name)
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    os.fsync(file.fileno())
                    if HOLDS:
                        os.fchmod(file.fileno(), mode)  # safetensors sets its own permissions
                os.replace(objects.at(name), objects.at(f"{digest}.safetensors"), src_dir_fd=objects.handle,
                           dst_dir_fd=objects.handle)
                if objects.handle is not None:
                    os.fsync(objects.handle)
            except SafetensorError as why:  # raised by safetensors when the disk is full
                raise StoreError(f"{objects.path} could not be written: {why}. Is the disk full? What was written before is "
                                 f"intact.") from why
            finally:
                objects.unlink(name)
                (objects.path / name).unlink(missing_ok=True)  # its path may lead elsewhere by now
        return digest

    def drop_object(self, digest: str) -> None:
        """Delete an object of the run."""
        with contextlib.closing(self.objects()) as objects:
            objects.unlink(f"{digest}.safetensors")

    def close_database(self, writer: sqlite3.Connection, anchor: sqlite3.Connection) -> None:
        """Close the database so that one file remains that can be read from anywhere (unless somebody reads it now), and close
        the folder.

        SQLite removes a log by its path, where another run may have one by now. ``anchor`` reads the same file and is closed
        last: a connection removes nothing while there is another one, and a read-only one never does. The empty log is then
        removed through the open folder, while the database is locked under a second, random name."""
        if self.closed:
            return
        if self._last is not None:  # an interrupt came in between
            self._last.close()
        with contextlib.suppress(sqlite3.Error):
            writer.execute("PRAGMA busy_timeout=1000")
            writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if not HOLDS:
                anchor.close()
                writer.execute("PRAGMA busy_timeout=0")
                writer.execute("PRAGMA journal_mode=DELETE")
        aside = self._aside()
        try:
            with contextlib.suppress(OSError):  # some file systems have no links; the empty log then stays
                os.link(self.at(DATABASE), self.at(aside), src_dir_fd=self.handle, dst_dir_fd=self.handle)
            writer.close()
            anchor.close()
            with contextlib.suppress(OSError, sqlite3.Error):
                self._remove_log(aside)
        finally:
            if self._last is not None:
                self._last.close()
            self.unlink(aside)
        self.closed = True
        self.close()

    def _remove_log(self, aside: str) -> None:
        """Remove the log of the database, if no other process has it open."""
        if identity(self.stat(aside)) != self._files[self.path / DATABASE]:
            return
        self._last = connection = self._connection_aside(aside)
        for pragma in ("busy_timeout=0", "locking_mode=EXCLUSIVE", "schema_version"):
            connection.execute(f"PRAGMA {pragma}").fetchall()  # from here on no other process has the file open
        log = f"{DATABASE}-wal"
        if identity(self.stat(aside)) == identity(self.stat(DATABASE)) and not (log in self.names() and self.stat(log).st_size):
            connection.execute("PRAGMA journal_mode=DELETE")
            self.unlink(log)
            self.unlink(f"{DATABASE}-shm")


# --------------------------------------------------------------------------------------------------------------- lock


class Lock:
    """The lock of the single writer. It is held while the file is open, so the system releases it when the process ends. Any
    thread may release it. A forked child closes the file, and does not share the lock with its parent.

    filelock guards its locks by a process-wide lock, which stays locked if an interrupt arrives between two of its lines; every
    other thread then waits for ever. Here an interrupt at worst leaves an open file, which the next garbage collection closes."""

    def __init__(self, handle: int) -> None:
        self._file = os.fdopen(handle, "rb", buffering=0)
        _LOCKS.add(self)

    def release(self) -> None:
        """Release the lock."""
        self._file.close()


_LOCKS: weakref.WeakSet[Lock] = weakref.WeakSet()


def _release_all() -> None:
    """Release all locks of this process."""
    for lock in list(_LOCKS):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_all)


def take(path: Path) -> Lock | None:
    """Take the lock of the single writer; return None if another process holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | FLAGS | getattr(os, "O_NONBLOCK", 0), 0o666)  # the umask restricts the mode
    lock, last = Lock(handle), time.monotonic() + PATIENCE
    try:
        while not _locked(handle):
            if time.monotonic() > last:
                lock.release()
                return None
            time.sleep(0.01)
    except BaseException:
        lock.release()
        raise
    return lock


def _locked(handle: int) -> bool:
    """Lock an open file; False if another process has locked it."""
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except (BlockingIOError, PermissionError):
        return False
    return True


def held(path: Path) -> bool:
    """Whether somebody writes, tested by a shared lock, because readers must not take each other for a writer, and may have
    read-only access."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY | FLAGS | getattr(os, "O_NONBLOCK", 0))
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(handle)
    return False
