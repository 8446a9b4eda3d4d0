"""The folder of a run, and how the SQLite file in it is opened without trusting whoever wrote it.

``run.db`` (with a write-ahead log; its tables are in ``sql.py``) holds everything but large arrays, which lie beside it in
``objects/`` under the SHA-256 of their bytes. Every write is one transaction: after a crash the file holds all writes that
returned, and no half of another.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import errno
import hashlib
import importlib.metadata
import itertools
import json
import math
import operator
import os
import platform
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.core import SelectionError, StoreError

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


# ---------------------------------------------------------------------------------------------------------- provenance
# What a run should say of itself: versions, revision, hardware, the command; and settings, steps and names as plain data, which
# refuses the rest in a sentence; and such records read back.

DEPTH = 100  # of settings within settings that are written,
DEEPEST = 400  # and of what is read: Python itself follows up to a thousand calls
HALVES = re.compile(r"\\u[dD][89a-fA-F]")  # of characters: where one stands alone, no text can be made of it
PACKAGES = ("richter", "torch", "numpy", "transformers", "scikit-learn")


def provenance() -> dict[str, Any]:
    """Of this process, now."""
    return {"command": [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else [], "python": platform.python_version(),
            "versions": versions(), "revision": revision(), "hardware": hardware(), "pid": os.getpid(), "host": platform.node()}


def versions() -> dict[str, str]:
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def revision(folder: Path | None = None, *only: str) -> str | None:
    """The git revision of a folder (the working one), with + when files differ from it (``only``: these); None outside a
    repository."""
    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=5, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    return None if head is None else head + ("+" if git("status", "--porcelain", "--untracked-files=no", "--", *only) else "")


def hardware() -> dict[str, Any]:
    """Processor, cores, memory, and the GPU if torch is at work and sees one. Never loads torch itself."""
    facts: dict[str, Any] = {"machine": platform.machine(), "processor": _processor(), "cores": os.cpu_count()}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def plain(settings: Any, where: str = "settings", depth: int = 0) -> Any:
    """A dataclass or mapping of settings as what JSON can hold; what it cannot is refused, not turned into text."""
    if depth > DEPTH:
        raise StoreError(f"{where[:60]}... is nested more than {DEPTH} deep, or holds itself. The record of a run cannot.")
    inside = partial(plain, depth=depth + 1)
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return {f.name: inside(getattr(settings, f.name), f"{where}.{f.name}") for f in dataclasses.fields(settings)}
    if isinstance(settings, Mapping):
        record = {inside(str(k), f"a key of {where}"): inside(v, f"{where}[{k!r}]") for k, v in settings.items()}
        if len(record) < len(settings):
            raise StoreError(f"{where} has keys that are the same as text: {list(settings)}. A record keeps them as text.")
        return record
    if isinstance(settings, (set, frozenset)):
        return sorted((inside(v, f"{where}[{v!r}]") for v in settings), key=json.dumps)  # the order of a set is not its own
    if isinstance(settings, (list, tuple)):
        return [inside(v, f"{where}[{i}]") for i, v in enumerate(settings)]
    if isinstance(settings, enum.Enum):
        return plain(settings.value, where)
    if isinstance(settings, (str, Path)):
        if not _is_utf8(text := str.__str__(settings) if isinstance(settings, str) else str(settings)):
            raise StoreError(f"{where} is {text!r}, which holds what is no character of UTF-8. The record of a run cannot.")
        return text
    if settings is None or isinstance(settings, (bool, int, float)):
        return settings
    if hasattr(settings, "item") and getattr(settings, "ndim", -1) == 0:  # a number of numpy or torch
        return plain(settings.item(), where)
    if isinstance(settings, argparse.Namespace):
        return plain(vars(settings), where)
    raise StoreError(f"{where} is a {type(settings).__name__}, which cannot be kept in the record of a run. Settings are "
                     f"numbers, texts, lists and dataclasses of them.")


def parsed(text: Any) -> Any:
    """The record that a run of unknown origin holds as text; none that whoever works with it could not."""
    try:
        value = json.loads(text)
        if HALVES.search(text):
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, TypeError, RecursionError) as why:
        raise StoreError(f"a record of this run is damaged: {why}.") from why
    level, depth = [value], 0
    while level:
        inside = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list)))
        level, depth = list(itertools.chain.from_iterable(inside)), depth + 1
        if depth > DEEPEST:
            raise StoreError(f"a record of this run is damaged: it is nested more than {DEEPEST} deep.")
    return value


def worded(error: BaseException) -> str:
    """An error in one line, whatever its class makes of ``str``."""
    try:
        text = str(error)
    except Exception as why:
        text = f"(its text could not be made: {type(why).__name__})"
    return f"{type(error).__name__}: {text}"


def whole_step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise StoreError(f"step={step!r}: what is written to a run has a whole number as its step.") from None
    if not -2 ** 63 <= number < 2 ** 63:
        raise StoreError(f"step={step!r}: a step has at most 64 bits.")
    return number


def plain_text(text: Any) -> str:
    """Of exactly the class ``str``, so that it is the same when it is read."""
    if not isinstance(text, str) or not _is_utf8(text):
        raise StoreError(f"{text!r}: names and notes of a run are text, of characters that UTF-8 has.")
    return str.__str__(text)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------- questions
# Questions to a database of unknown origin: each comes to an end, and each answer is of the types that it should be of.

ROW = 8  # bytes of a row at least
OFTEN = 2  # times that a page may be read in one state of a file: only the ledger is, more than once
# what a column must hold, by a letter: a file of unknown origin can hold anything anywhere
TYPES: Mapping[str, set[type]] = {"i": {int}, "s": {int, type(None)}, "n": {int, float, type(None)}, "t": {str},
                                  "?": {str, type(None)}, "b": {bytes}, "o": {bytes, type(None)}}


def typed(folder: Path, rows: list[Any], kinds: str) -> list[Any]:
    """``kinds``: a letter of TYPES for each column."""
    for column, kind in enumerate(kinds):
        if other := {type(row[column]) for row in rows} - TYPES[kind]:
            raise StoreError(f"the run {folder} holds {other.pop().__name__} where something else belongs. It is damaged.")
    return rows


class Account:
    """What has been read of one state of a file. Every page belongs to one row, so that all answers together hold no more than
    the file does; in one that was made to do harm many rows lead to the same pages, and a small file to more than there is
    memory."""

    def __init__(self) -> None:
        self.read = 0

    def fetched(self, cursor: sqlite3.Cursor, size: int) -> list[Any]:
        """All rows of an answer; ``size``: that of the file."""
        rows = []
        for row in cursor:
            rows.append(row)
            self.read += ROW + sum(len(value) for value in row if isinstance(value, (str, bytes)))
            if self.read > OFTEN * size:
                raise sqlite3.DatabaseError("interrupted, more was read than the file can hold")
        return rows


class Questions:
    """``opened(folder)`` gives the connection. It is opened at once, so that an error comes where it belongs, and again by the
    first question after ``close``, or after the file has changed in a way that SQLite does not see."""

    def __init__(self, folder: Path, opened: Callable[[Path], sqlite3.Connection]) -> None:
        self.folder, self.guard, self._opened = folder, threading.RLock(), opened
        self._connection: sqlite3.Connection | None = None
        self.times = 0  # that it was opened
        self._account = Account()
        self._stamp: Stamp = []
        self._version = 0
        self._connected()

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            with explained(self.folder, "read"):
                self._stamp = stamp(self.folder / DATABASE)
                connection = self._opened(self.folder)
                self._connection, self._version = connection, _version(connection)
            self.times += 1
        return self._connection

    def look(self) -> None:
        """Before a transaction. SQLite sees what its own writers do. What else is done to the file (cut, replaced, written by
        other programs) would be hidden by what is known of it already, so that it is opened anew; so is a copy that others went
        on behind."""
        with self.guard, explained(self.folder, "read"):
            now = stamp(self.folder / DATABASE)
            if self._connection is not None and now != self._stamp:
                version = _version(self._connection)
                if version == self._version:
                    self.close()
                self._stamp, self._version = now, version

    @property
    def asking(self) -> bool:
        """Is a transaction open?"""
        return self._connection is not None and self._connection.in_transaction

    def close(self) -> None:
        with self.guard:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def ask(self, question: str, values: Sequence[Any] = (), kinds: str = "") -> list[Any]:
        """``kinds``: a letter of TYPES for each column."""
        with self.guard, explained(self.folder, "read"):
            connection = self._connected()
            size = bound(connection)
            if not connection.in_transaction:
                self._account = Account()
            try:
                rows = self._account.fetched(connection.execute(question, values), size)
            except (OverflowError, UnicodeEncodeError) as why:
                raise SelectionError(f"no run can hold what was asked for ({', '.join(map(repr, values))}): {why}.") from why
        return typed(self.folder, rows, kinds)


def _version(connection: sqlite3.Connection) -> int:
    """Differs when another connection has written to the file."""
    return int(connection.execute("PRAGMA data_version").fetchone()[0])


# -------------------------------------------------------------------------------------------------------------- arrays
# Arrays as bytes and back: compressed where that pays, symmetric positive semi-definite ones as leading eigenpairs, and
# large ones as files named by their content.

LARGE = 2 ** 20  # bytes; above, an array is a file of its own
MOST = 2 ** 32  # bytes; no array of a run is larger, so that a small file cannot ask for all the memory there is
SAMPLE = 2 ** 15  # bytes that are deflated to see whether it pays
KINDS = "biufc"  # booleans, integers, floats, complex: never objects
DTYPE = re.compile(rf"[<|][{KINDS}](1|2|4|8|16|32)")
DIMENSIONS = 32


class Encoded(NamedTuple):
    """How an array is kept: ``form`` is plain, zlib, eigen (values and vectors), or half and half-zlib (the lower triangle of a
    symmetric matrix)."""

    form: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode(values: ArrayLike, keep: float | None = None) -> Encoded:
    """``keep``: a symmetric positive semi-definite matrix by its leading eigenpairs, up to that share of its trace."""
    a = _as_array(values)
    if a.dtype.kind not in KINDS:
        raise StoreError(f"arrays of numbers can be stored; this one has dtype {a.dtype}.")
    if not _fits(a.shape, a.dtype.itemsize):
        raise StoreError(f"an array of shape {a.shape} and dtype {a.dtype} is too large for a run, which keeps up to 4 GiB and "
                         f"{DIMENSIONS} dimensions in one. Store a part of it, or keep it elsewhere.")
    if keep is not None:
        if not 0 < keep <= 1:
            raise StoreError(f"eigen={keep!r}: the share of the trace to keep is above 0 and at most 1.")
        if a.dtype.kind != "f":
            raise StoreError(f"only a matrix of real floating-point numbers is kept by eigenpairs; this one has dtype {a.dtype}. "
                             f"Store it whole (eigen=None).")
        eigenvalues, vectors = leading(a, keep)
        if a.dtype.itemsize > 2 and len(eigenvalues) * (len(a) + 1) < a.size:  # half precision would spoil the vectors
            packed = np.concatenate([eigenvalues[:, None], vectors.T], 1).astype(a.dtype)
            return Encoded("eigen", a.dtype.newbyteorder("<").str, a.shape, _deflated(_bytes(packed), a.dtype.itemsize))
    half = a.ndim == 2 and a.shape[0] == a.shape[1] > 1 and np.array_equal(a, a.T)
    raw = _bytes(a[np.tri(len(a), dtype=bool)] if half else a)
    deflated = _pays(raw, a.dtype.itemsize)
    form = ("half-zlib" if deflated else "half") if half else "zlib" if deflated else "plain"
    return Encoded(form, a.dtype.newbyteorder("<").str, a.shape, _deflated(raw, a.dtype.itemsize) if deflated else raw)


def decode(form: str, dtype: str, shape: tuple[int, ...], data: bytes) -> NDArray[Any]:
    kind = _kind(dtype, shape)
    try:
        if form == "plain":
            return _array(data, kind, shape)
        if form == "zlib":
            return _array(_unshuffled(_inflated(data, math.prod(shape) * kind.itemsize), kind.itemsize), kind, shape)
        if form in ("half", "half-zlib") and len(shape) == 2 and shape[0] == shape[1]:
            entries = decode("zlib" if form == "half-zlib" else "plain", dtype, (shape[0] * (shape[0] + 1) // 2,), data)
            whole, lower = np.empty(shape, kind), np.tri(shape[0], dtype=bool)  # not before it is known that there is so much
            whole[lower] = whole.T[lower] = entries
            return whole
        if form == "eigen":
            values, vectors = eigenpairs(dtype, shape, data)
            return ((vectors * values) @ vectors.T).astype(kind)
    except MemoryError:
        raise StoreError(f"an array of dtype {dtype} and shape {shape} is larger than the memory that is free.") from None
    raise StoreError(f"an array of form {form!r} is nothing that Richter writes.")


def eigenpairs(dtype: str, shape: tuple[int, ...], data: bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    """Values [r] and vectors [d, r] of a matrix that is kept by them, without forming it."""
    kind = _kind(dtype, shape)
    if kind.kind != "f" or len(shape) != 2 or shape[0] != shape[1]:
        raise StoreError(f"eigenpairs of an array of dtype {dtype!r} and shape {shape} are nothing that Richter writes.")
    d = shape[0]
    raw = _unshuffled(_inflated(data, (d + 1) * d * kind.itemsize), kind.itemsize)
    if len(raw) % ((d + 1) * kind.itemsize):
        raise StoreError("a stored matrix is damaged: its eigenpairs have the wrong size.")
    packed = np.frombuffer(raw, kind).reshape(-1, d + 1)
    return packed[:, 0].copy(), packed[:, 1:].T.copy()


def leading(a: NDArray[Any], share: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """The largest eigenvalues [r] and their vectors [d, r] that make up ``share`` of the trace."""
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise StoreError(f"only a symmetric matrix has eigenpairs to keep; this array has shape {a.shape}.")
    if a.dtype.kind == "c" or not np.isfinite(a).all():
        raise StoreError("only a real matrix without NaN and infinity has eigenpairs to keep; store it whole (eigen=None).")
    a = a.astype(np.float64)
    if not np.allclose(a, a.T, rtol=1e-4, atol=1e-6 * np.abs(a).max(initial=0)):
        raise StoreError(f"only a symmetric matrix has eigenpairs to keep; this array of shape {a.shape} is not symmetric.")
    values, vectors = np.linalg.eigh(a / 2 + a.T / 2)
    values, vectors = values[::-1], vectors[:, ::-1]
    total = np.cumsum(values.clip(0))
    if -values.clip(max=0).sum() > 1e-5 * total[-1:].sum():  # more than the rounding of single precision leaves
        raise StoreError("a matrix with negative eigenvalues cannot be kept by its leading ones; store it whole (eigen=None).")
    rank = int(np.searchsorted(total, share * total[-1], side="left")) + 1 if len(total) and total[-1] > 0 else 0
    return values[:rank], vectors[:, :rank]


def object_path(folder: Path, name: str, verify: bool = True) -> Path:
    """Where an object lies; its name is a digest, so it cannot lead out of the folder, and its content is checked."""
    if not re.fullmatch(r"[0-9a-f]{64}", name):
        raise StoreError(f"{name!r} is not the name of a stored object.")
    path = own_folder(folder) / f"{name}.safetensors"
    if path.is_symlink() or not path.is_file():
        raise StoreError(f"the object {name[:12]}... of this run is missing from {folder}. It was deleted, or not copied along.")
    if verify:
        with open(regular(path), "rb") as f:
            if digest_of(f) != name:
                raise StoreError(f"the object {name[:12]}... in {folder} has other content than was written. It is damaged.")
    return path


def to_file(path: Path, e: Encoded) -> None:
    from safetensors.numpy import save_file
    save_file({"data": np.frombuffer(e.data, np.uint8)}, path,
              metadata={"form": e.form, "dtype": e.dtype, "shape": json.dumps(e.shape)})


def from_file(path: Path) -> bytes:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file
    try:
        return load_file(path)["data"].tobytes()
    except (SafetensorError, KeyError, OSError, ValueError, TypeError) as why:
        raise StoreError(f"the stored array {path} cannot be read: {why}.") from why


def _as_array(values: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as why:
        raise StoreError(f"a {type(values).__name__} that is no array of numbers cannot be stored as one: {why}.") from why


def _fits(shape: tuple[int, ...], itemsize: int) -> bool:
    return len(shape) <= DIMENSIONS and math.prod(max(k, 1) for k in shape) * itemsize <= MOST


def _kind(dtype: str, shape: tuple[int, ...]) -> np.dtype[Any]:
    """The announced dtype, if arrays of it and of this shape are written at all."""
    try:
        kind = np.dtype(dtype) if DTYPE.fullmatch(dtype) else None
    except TypeError:
        kind = None  # e.g. a float of 8 bits
    if kind is None or any(k < 0 for k in shape) or not _fits(shape, kind.itemsize):
        raise StoreError(f"an array of dtype {dtype!r} and shape {shape} is nothing that Richter writes.")
    return kind


def _bytes(a: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(a, a.dtype.newbyteorder("<")).tobytes()


def _pays(raw: bytes, itemsize: int) -> bool:
    """Does deflating save a fifth? The last bits of measured numbers are noise, and packing noise costs more time than it saves
    room. Of a large array a piece from the middle tells."""
    start = max(0, len(raw) // 2 - SAMPLE // 2) // itemsize * itemsize
    sample = raw[start:start + SAMPLE // itemsize * itemsize]
    return len(_deflated(sample, itemsize)) < 0.8 * len(sample)


def _deflated(raw: bytes, itemsize: int) -> bytes:
    """Bytes of equal weight side by side (exponents with exponents), then deflated."""
    return zlib.compress(np.frombuffer(raw, np.uint8).reshape(-1, itemsize).T.tobytes(), 1)


def _unshuffled(raw: bytes, itemsize: int) -> bytes:
    if len(raw) % itemsize:
        raise StoreError("a stored array is damaged: its bytes are no whole number of entries.")
    return np.frombuffer(raw, np.uint8).reshape(itemsize, -1).T.tobytes()


def _inflated(data: bytes, most: int) -> bytes:
    """Never more than was announced, and the whole stream, whose end holds its checksum."""
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(data, most + 1)
    except zlib.error as why:
        raise StoreError(f"a stored array is damaged: {why}.") from why
    if not stream.eof:
        raise StoreError("a stored array is damaged: its bytes end too early, or are more than its shape says.")
    return raw


def _array(raw: bytes, kind: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if len(raw) != math.prod(shape) * kind.itemsize:
        raise StoreError(f"a stored array is damaged: {len(raw)} bytes for shape {shape} of {kind}.")
    return np.frombuffer(raw, kind).reshape(shape).copy()
