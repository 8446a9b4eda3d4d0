"""The folder of a run: which of its files are opened, and how; how its writer reaches them; its lock; errors in one sentence.

Whoever made a folder may have put anything into it, and at any moment somebody may move or delete it while another process begins
a run under its name. What is done here touches regular files of the run's own folder, or nothing.
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
except ImportError:  # not on Windows: there the last writer's session tells what is known
    fcntl = None  # type: ignore[assignment]

DATABASE, LOCK, OBJECTS = "run.db", "writer.lock", "objects"
NAMING = bytes.fromhex("d9d505f920a163d7")  # the end of a journal that belongs to a write to several databases
HOLLOW = 2 ** 26  # bytes of holes that any file may have
HOLDS = os.open in os.supports_dir_fd and os.link in os.supports_dir_fd  # not on Windows, which keeps open files where they are
FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
PATIENCE = 0.15  # seconds that a writer waits for the lock; a reader may hold it to ask whether somebody writes
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
Stamp = list[tuple[int, ...]]


# ------------------------------------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def explained(folder: Path, done: str) -> Iterator[None]:
    """Turn errors of SQLite and of the system into one sentence with what to do."""
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
    """The error for a write to a run that is not in its place."""
    return StoreError(f"the run {folder} could not be written: {why}. Was it deleted or moved? What is written to it now would "
                      f"be lost. Put it back, or choose another place for runs.")


def refused_by_disk(why: BaseException) -> bool:
    """Tell whether the disk or the system refused a write, so that it may be tried again; not what was to be written."""
    from safetensors import SafetensorError
    return isinstance(why, StoreError) and isinstance(why.__cause__, (sqlite3.Error, OSError, SafetensorError)) \
        and not isinstance(why.__cause__, StoreError)


def is_lasting(why: BaseException) -> bool:
    """Tell whether a run is refused for its files, and not for something that may pass: a disk, a lock, memory, a time limit."""
    return isinstance(why, StoreError) and not isinstance(why.__cause__, (OSError, sqlite3.OperationalError, MemoryError))


# -------------------------------------------------------------------------------------------------------------- files


def beside(path: Path) -> tuple[Path, Path]:
    """The files that SQLite reads with a database: its write-ahead log, and the journal of a write that was cut off."""
    return path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-journal")


def checked(path: Path) -> Path:
    """Check a database and the files beside it: neither a link nor the name in a journal leads out of the run's folder."""
    for part in (path, *beside(path), path.with_name(f"{path.name}-shm")):
        regular(part)
        if part.name.endswith("-journal") and part.is_file():
            with open(part, "rb") as f:
                f.seek(max(0, part.stat().st_size - len(NAMING)))
                if f.read() == NAMING:
                    raise StoreError(f"{part} names another file, which SQLite would delete. No journal of Richter's does; it "
                                     f"was made to do harm. Nothing was read or changed.")
    return path


def regular(path: Path) -> Path:
    """Refuse links, files that are nearly nothing but holes, and named pipes and devices, which could keep whoever opens them
    waiting for ever. A file that does not exist is fine."""
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return path
    if stat.S_ISLNK(facts.st_mode):
        raise StoreError(f"{path} is a link. The files of a run lie in its own folder; nothing elsewhere is read or written.")
    if not stat.S_ISREG(facts.st_mode):
        raise StoreError(f"{path} is no regular file. Nothing of this run was read or written; look who has put it there.")
    if _hollow(path, facts):  # what a reader may do and hold goes by the size of the file
        raise StoreError(f"{path} says it has {facts.st_size:,} bytes, and {512 * facts.st_blocks:,} are on the disk. No file of "
                         f"a run has such holes; nothing of it was read or written.")
    return path


def _hollow(path: Path, facts: os.stat_result) -> bool:
    """Tell whether less than 1 % of a file is on the disk. Some file systems count late; they are asked where the bytes are."""
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
        return why.errno == errno.ENXIO  # there are no more
    finally:
        os.close(handle)
    return False


def objects_of(folder: Path) -> Path:
    """The folder of a run's objects, which may not exist yet: no link that leads elsewhere, and no named pipe."""
    path = folder / OBJECTS
    if path.is_symlink():
        raise StoreError(f"{path} is a link. The objects of a run lie in its own folder; nothing elsewhere is read or written.")
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is no folder. The objects of a run lie in one; look who has put something else there.")
    return path


def object_path(folder: Path, name: str) -> Path:
    """The file of an object, its content checked. Its name is a digest, so that it cannot lead out of the folder."""
    if not re.fullmatch(r"[0-9a-f]{64}", name):
        raise StoreError(f"{name!r} is not the name of a stored object.")
    path = objects_of(folder) / f"{name}.safetensors"
    if path.is_symlink() or not path.is_file():
        raise StoreError(f"the object {name[:12]}... of this run is missing from {path.parent}. It was deleted, or not copied "
                         f"along.")
    with open(regular(path), "rb") as f:
        if hashlib.file_digest(f, "sha256").hexdigest() != name:
            raise StoreError(f"the object {name[:12]}... in {path.parent} has other content than was written. It is damaged.")
    return path


def sync(folder: Path) -> None:
    """Ask the disk to keep what was written to a run, so that a power cut leaves it. SQLite itself sees to the database; to open
    and close that file here would let go SQLite's locks."""
    for path in (beside(folder / DATABASE)[0], folder / OBJECTS, folder, folder.parent):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # some systems do not open folders
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def identity(facts: os.stat_result) -> tuple[int, int]:
    """Device and number of a file, which tell it from others whatever its name."""
    return facts.st_dev, facts.st_ino


def stamp(path: Path) -> Stamp:
    """Time, size and identity of a database and of the files read with it. The stamp differs when something was written, or
    done to them in any other way."""
    files: Stamp = []
    for end in ("", "-wal", "-journal", "-shm"):
        with contextlib.suppress(OSError, ValueError):
            facts = os.lstat(f"{path}{end}")
            if stat.S_ISREG(facts.st_mode) and (not facts.st_size or end == "-shm"):
                continue  # a reader leaves an empty log behind, and writes to the index of one
            files.append((facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_ctime_ns))
    return files


# ----------------------------------------------------------------------------------------------------------- database


def connection_to(path: Path | str, **options: bool) -> sqlite3.Connection:
    """A connection with SQLite's own care for files of unknown origin. Each statement is a transaction of its own, unless one is
    begun; any thread may ask, one at a time."""
    connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False, **options)
    connection.execute("PRAGMA trusted_schema=OFF")
    connection.execute("PRAGMA cell_size_check=ON")
    return connection


def only_reading(path: Path) -> sqlite3.Connection:
    return connection_to(f"{path.resolve().as_uri()}?mode=ro", uri=True)


def bound(connection: sqlite3.Connection) -> int:
    """Make the next question end, whatever the file is: pages that lead to each other in circles could keep it busy for ever.
    Returns the size of the file."""
    (pages,), (size,) = connection.execute("PRAGMA page_count").fetchone(), connection.execute("PRAGMA page_size").fetchone()
    left = iter(range(20 + pages * size // 2000))  # in 100,000 operations of SQLite; an honest question takes far fewer
    connection.set_progress_handler(lambda: next(left, None) is None, 100_000)
    return int(pages * size)


def to_read(path: Path) -> sqlite3.Connection:
    """A connection that only reads; to a copy in memory, where a write-ahead log lies in a folder that may not be written."""
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
    """A folder that is held open: a name in it leads there, whatever has become of the folder's own name."""

    def __init__(self, path: Path, within: Folder | None = None) -> None:
        self.path, self.handle = path, None
        if HOLDS:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            self.handle = os.open(path, flags) if within is None else within.open(path.name, flags)

    def at(self, name: str) -> str:
        """A name for functions that take ``dir_fd=folder.handle``."""
        return name if self.handle is not None else os.fspath(self.path / name)

    def open(self, name: str, flags: int) -> int:
        return os.open(self.at(name), flags | FLAGS, 0o666, dir_fd=self.handle)  # the umask takes from that

    def stat(self, name: str) -> os.stat_result:
        return os.stat(self.at(name), dir_fd=self.handle, follow_symlinks=False)

    def names(self) -> list[str]:
        return os.listdir(self.path if self.handle is None else self.handle)

    def unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.at(name), dir_fd=self.handle)

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            os.close(handle)


class Place(Folder):
    """The folder of a run while one process writes it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.closed, self._real = False, path.resolve()
        self._files: dict[Path, tuple[int, int]] = {}
        self._last: sqlite3.Connection | None = None  # to the second name of the database, while it is closed
        with contextlib.suppress(FileExistsError):  # SQLite gives its other files the permissions of this one
            os.close(self.open(DATABASE, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        self.hold(DATABASE)

    def hold(self, name: str) -> None:
        """From here on this file must be the one that it is now."""
        self._files[self.path / name] = identity(self.stat(name))
        self.check()

    def check(self) -> None:
        """Refuse to write to a file that has no name any more: what is written there is lost."""
        for file, held in self._files.items():
            try:
                here = identity(os.stat(file))
            except OSError as why:
                raise gone(self.path, why.strerror) from why
            if here != held:
                raise gone(self.path, "another run is in its place") from FileNotFoundError(errno.ENOENT, file)

    def tidy(self) -> None:
        """Remove what a writer that was killed has left: half of an object, or a second name of the database."""
        for name in self.names():
            if name.startswith(f".{DATABASE}-"):
                self.unlink(name)
        if (self.path / OBJECTS).exists():
            with contextlib.closing(self.objects()) as objects:
                for name in objects.names():
                    if name.startswith("."):  # ours and those of safetensors
                        objects.unlink(name)

    def objects(self) -> Folder:
        """The folder of large arrays and states; it is made if need be."""
        path = objects_of(self.path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.at(OBJECTS), dir_fd=self.handle)
        return Folder(path, self)

    def keep_object(self, write: Callable[[Path], object]) -> str:
        """Keep what ``write`` puts into a file under its SHA-256: written aside, flushed, then renamed."""
        from safetensors import SafetensorError
        name = f".{secrets.token_hex(8)}.part"
        with contextlib.closing(self.objects()) as objects:
            try:
                handle = objects.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                mode = stat.S_IMODE(os.fstat(handle).st_mode)
                os.close(handle)
                write(objects.path / name)
                with open(objects.open(name, os.O_RDWR), "rb") as file:
                    if identity(os.fstat(file.fileno())) != identity(os.stat(objects.path / name)):  # written by its path
                        raise gone(self.path, "another run is in its place") from FileNotFoundError(errno.ENOENT, name)
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    os.fsync(file.fileno())
                    if HOLDS:
                        os.fchmod(file.fileno(), mode)  # safetensors has its own idea of who may read a file
                os.replace(objects.at(name), objects.at(f"{digest}.safetensors"), src_dir_fd=objects.handle,
                           dst_dir_fd=objects.handle)
                if objects.handle is not None:
                    os.fsync(objects.handle)
            except SafetensorError as why:  # its word for a full disk
                raise StoreError(f"{objects.path} could not be written: {why}. Is the disk full? What was written before is "
                                 f"intact.") from why
            finally:
                objects.unlink(name)
                (objects.path / name).unlink(missing_ok=True)  # its path may lead elsewhere by now
        return digest

    def drop_object(self, digest: str) -> None:
        with contextlib.closing(self.objects()) as objects:
            objects.unlink(f"{digest}.safetensors")

    def close_database(self, writer: sqlite3.Connection, anchor: sqlite3.Connection) -> None:
        """Leave one file that can be read from anywhere, unless somebody reads it just now, and close the folder.

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
        aside = f".{DATABASE}-{secrets.token_hex(8)}"
        try:
            with contextlib.suppress(OSError):  # some file systems have no links: there the empty log stays
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
        if identity(self.stat(aside)) != self._files[self.path / DATABASE]:
            return
        self._last = connection = connection_to(f"{(self._real / aside).as_uri()}?mode=rw", uri=True)
        for pragma in ("busy_timeout=0", "locking_mode=EXCLUSIVE", "schema_version"):
            connection.execute(f"PRAGMA {pragma}").fetchall()  # from here on nobody else has the file open
        log = f"{DATABASE}-wal"
        if identity(self.stat(aside)) == identity(self.stat(DATABASE)) and not (log in self.names() and self.stat(log).st_size):
            connection.execute("PRAGMA journal_mode=DELETE")
            self.unlink(log)
            self.unlink(f"{DATABASE}-shm")


# --------------------------------------------------------------------------------------------------------------- lock


class Lock:
    """The lock of the one writer: held while the file is open, so that the system lets it go when the process ends, however it
    ends. Any thread may release it. A forked child closes the file, and does not hold the lock with its parent.

    filelock guards its locks by one of the whole process, which stays locked when an interrupt arrives between two of its lines;
    every other thread then waits for ever. Here an interrupt leaves an open file at worst, which the next collection closes."""

    def __init__(self, handle: int) -> None:
        self._file = os.fdopen(handle, "rb", buffering=0)
        _LOCKS.add(self)

    def release(self) -> None:
        self._file.close()


_LOCKS: weakref.WeakSet[Lock] = weakref.WeakSet()


def _release_all() -> None:
    for lock in list(_LOCKS):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_all)


def take(path: Path) -> Lock | None:
    """Take the lock of the one writer, or return None if another holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | FLAGS | getattr(os, "O_NONBLOCK", 0), 0o666)  # the umask takes from that
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
    """Lock a file that is open, unless another has."""
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
    """Tell whether somebody writes, by a shared lock: readers must not take each other for a writer, and may be allowed to read
    the file only."""
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
