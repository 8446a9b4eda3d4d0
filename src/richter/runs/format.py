"""The file of a run: its tables, its version, and how it is opened without trusting whoever wrote it.

A run is a folder. ``run.db`` (SQLite, write-ahead log) holds everything but large arrays, which lie beside it in
``objects/`` under the SHA-256 of their bytes. Every write is one transaction: after a crash the file holds all writes that
returned, and no half of another. Rows are appended to ``recent`` (a few pages for each write, however many curves there are)
and moved in bulk to ``rows``, where a curve lies in one piece; a step that is written again replaces the earlier row.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from richter.core import StoreError
from richter.runs import lock

DATABASE, LOCK, OBJECTS = "run.db", "writer.lock", "objects"
APPLICATION = 0x52434854  # "RCHT", in the file's header
FORMAT = 1
NAMING = bytes.fromhex("d9d505f920a163d7")  # the end of a journal that belongs to a write to several databases

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (id INTEGER PRIMARY KEY, begun REAL NOT NULL, ended REAL, how TEXT, provenance TEXT NOT NULL);
CREATE TABLE series (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, layer TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (kind, layer, name));
CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE rows (series INTEGER NOT NULL, step INTEGER NOT NULL, value REAL, error REAL, note INTEGER, PRIMARY KEY (series, step)) WITHOUT ROWID;
CREATE TABLE recent (id INTEGER PRIMARY KEY, series INTEGER NOT NULL, step INTEGER NOT NULL, value REAL, error REAL, note INTEGER);
CREATE TABLE snapshots (step INTEGER PRIMARY KEY, at REAL NOT NULL, seconds REAL, passes REAL, examples INTEGER, notes TEXT NOT NULL);
CREATE TABLE arrays (id INTEGER PRIMARY KEY, layer TEXT NOT NULL, name TEXT NOT NULL, step INTEGER NOT NULL, form TEXT NOT NULL, dtype TEXT NOT NULL, shape TEXT NOT NULL, bytes BLOB, object TEXT, UNIQUE (layer, name, step));
CREATE TABLE claims (name TEXT PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE figures (id INTEGER PRIMARY KEY, name TEXT NOT NULL, kind TEXT NOT NULL, bytes BLOB NOT NULL, UNIQUE (name, kind));
"""  # noqa: E501

# all rows as they stand, optionally of one series: the latest of what was written for a step
LATEST = """SELECT series, step, value, error, note, max(id) FROM (
    SELECT series, step, value, error, note, 0 AS id FROM rows {where} UNION ALL
    SELECT series, step, value, error, note, id FROM recent {where}) GROUP BY series, step"""
SETTLE = """INSERT OR REPLACE INTO rows SELECT series, step, value, error, note FROM (
    SELECT series, step, value, error, note, max(id) FROM recent GROUP BY series, step)"""
RECENT = 30_000  # rows before they are moved

# from one format to the next: what turns a file of format k into one of format k + 1, inside a transaction
MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {}


def writable(folder: Path) -> sqlite3.Connection:
    """The database of a run that this process alone writes; made, or brought to today's format, if need be."""
    with explained(folder, "opened for writing"):
        connection = sqlite3.connect(_own(folder / DATABASE), timeout=30, isolation_level=None, check_same_thread=False)
        try:
            _guarded(connection)
            if began(connection):
                _check(connection, folder)  # before anything in the file is changed
            connection.execute("PRAGMA journal_mode=WAL")  # where the file system cannot, SQLite stays with a journal
            connection.execute("PRAGMA synchronous=NORMAL")  # a killed process loses nothing; a power cut the last seconds
            connection.execute("PRAGMA foreign_keys=OFF")
            if not began(connection):
                connection.execute("BEGIN IMMEDIATE")
                for statement in SCHEMA.strip().split("\n"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id={APPLICATION}")
                connection.execute(f"PRAGMA user_version={FORMAT}")
                connection.execute("COMMIT")
            migrate(connection)
            _check(connection, folder)
        except BaseException:
            connection.close()
            raise
        return connection


def close(connection: sqlite3.Connection) -> None:
    """By the writer: what is left is one file that can be read from anywhere, unless somebody reads it just now."""
    with contextlib.suppress(sqlite3.Error):
        connection.execute("PRAGMA busy_timeout=1000")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA busy_timeout=0")
        connection.execute("PRAGMA journal_mode=DELETE")
    connection.close()


def begun(folder: Path) -> bool:
    """Is there a run? One whose process ended before its first write is none."""
    with explained(folder, "read"):
        if not (folder / DATABASE).is_file():
            return False
        with contextlib.closing(_connect(_own(folder / DATABASE))) as connection:
            return began(connection)


def readable(folder: Path) -> sqlite3.Connection:
    """The database of a run for reading, also while another process writes it, and from a folder that is read-only."""
    path = folder / DATABASE
    with explained(folder, "read"):
        if not path.is_file():
            raise StoreError(f"{folder} holds no run (there is no {DATABASE} in it). `richter runs FOLDER` lists those of a "
                             f"store.")
        connection = _connect(_own(path))
        try:
            if not began(connection):
                raise StoreError(f"the run {folder} is just being made. Wait a moment." if lock.held(folder / LOCK) else
                                 f"the run {folder} was never begun: its process ended before the first write. Delete it.")
            _check(connection, folder)
            if _version(connection) < FORMAT:  # an old file is brought up to date in memory; the file stays as it is
                copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
                connection.backup(copy)
                connection.close()
                connection = _guarded(copy)
                migrate(connection)
                _check(connection, folder)
            connection.execute("PRAGMA query_only=ON")
        except BaseException:
            connection.close()
            raise
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        return connection


def _connect(path: Path) -> sqlite3.Connection:
    """Read-only. A write-ahead log in a folder that may not be written is read from a copy."""
    try:
        connection = _guarded(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=30, isolation_level=None,
                                              check_same_thread=False))
        try:
            began(connection)
        except BaseException:
            connection.close()
            raise
        return connection
    except sqlite3.OperationalError as why:
        if "unable to open" not in str(why) and "readonly" not in str(why):
            raise
    copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    with tempfile.TemporaryDirectory(prefix="richter-") as folder:
        for part in (path, *_beside(path)):
            if part.is_file():
                shutil.copyfile(_own(part), Path(folder) / part.name)
        with contextlib.closing(sqlite3.connect(Path(folder) / DATABASE)) as source:
            source.backup(copy)
    return _guarded(copy)


def _beside(path: Path) -> tuple[Path, Path]:
    """What SQLite reads together with a database: its write-ahead log, or the journal of a write that was cut off."""
    return path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-journal")


def _own(path: Path) -> Path:
    """A file of the run's own folder: neither a link nor the name in a journal leads out of it."""
    for part in (path, *_beside(path)):
        if part.is_symlink():
            raise StoreError(f"{part} is a link. The files of a run lie in its own folder; nothing elsewhere is read or written.")
        if part.name.endswith("-journal") and part.is_file() and _end(part) == NAMING:
            raise StoreError(f"{part} names another file, which SQLite would delete. No journal of Richter's does; it was made "
                             f"to do harm. Nothing was read or changed.")
    return path


def _end(path: Path) -> bytes:
    with open(path, "rb") as f:
        f.seek(max(0, path.stat().st_size - len(NAMING)))
        return f.read(len(NAMING))


def _guarded(connection: sqlite3.Connection) -> sqlite3.Connection:
    """With SQLite's own care for files of unknown origin."""
    connection.execute("PRAGMA trusted_schema=OFF")
    connection.execute("PRAGMA cell_size_check=ON")
    return connection


def bounded(connection: sqlite3.Connection) -> None:
    """The next question ends, whatever the file is: pages that lead to each other in circles could keep it busy for ever."""
    (pages,), (size,) = connection.execute("PRAGMA page_count").fetchone(), connection.execute("PRAGMA page_size").fetchone()
    left = iter(range(20 + pages * size // 2000))  # in 100,000 operations of SQLite; an honest question takes far fewer
    connection.set_progress_handler(lambda: next(left, None) is None, 100_000)


def began(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])


def migrate(connection: sqlite3.Connection) -> None:
    """Step by step to today's format, each step whole or not at all."""
    while (version := _version(connection)) < FORMAT:
        connection.execute("BEGIN IMMEDIATE")
        try:
            MIGRATIONS[version](connection)
            connection.execute(f"PRAGMA user_version={version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _check(connection: sqlite3.Connection, folder: Path) -> None:
    """Ours, of a format that is known, and with no view or trigger that somebody has added."""
    mark = int(connection.execute("PRAGMA application_id").fetchone()[0])
    if mark != APPLICATION:
        raise StoreError(f"{folder / DATABASE} is a database, but not one of Richter's. Nothing in it was read or changed.")
    if _version(connection) > FORMAT:
        raise StoreError(f"the run {folder} has format {_version(connection)}, and this version of Richter knows formats up to "
                         f"{FORMAT}. Update Richter to read it.")
    if _version(connection) < FORMAT:
        if any(v not in MIGRATIONS for v in range(_version(connection), FORMAT)):
            raise StoreError(f"the run {folder} says it has format {_version(connection)}, which never existed: it is damaged.")
        extra = connection.execute("SELECT count(*) FROM sqlite_master WHERE type NOT IN ('table', 'index')").fetchone()[0]
    else:
        ours = {_plain(line) for line in SCHEMA.strip().split("\n")}
        theirs = [(kind, sql) for kind, sql in connection.execute("SELECT type, sql FROM sqlite_master")
                  if not (kind == "index" and sql is None)]
        extra = any(kind != "table" or _plain(sql or "") not in ours for kind, sql in theirs) or len(theirs) != len(ours)
    if extra:
        raise StoreError(f"the database of the run {folder} has other tables, views or triggers than Richter writes. It is "
                         f"damaged, or was made to do harm; it was not read.")


def _plain(sql: str) -> str:
    return re.sub(r"\s+", " ", sql).strip().rstrip(";")


@contextlib.contextmanager
def explained(folder: Path, done: str) -> Iterator[None]:
    """SQLite's and the system's errors in one sentence, with what to do."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as why:  # the latter where SQLite cites what is no text
        text = str(why)
        hints = {"disk is full": "The disk is full. Free some space and continue with resume=True",
                 "disk I/O": "The disk refused to write (is it full, or gone?). Continue with resume=True when it is back",
                 "readonly": "The folder is read-only. Choose another place for runs",
                 "unable to open": "The folder cannot be written or does not exist. Choose another place for runs",
                 "interrupted": "It asks for more work than a file of its size can: it is damaged, or was made to do harm",
                 "locked": "Another process holds it. Wait for it, or look at `richter runs`",
                 "codec can't": "The file is damaged",
                 "malformed": "The file is damaged. `sqlite3 run.db .recover` may save what is left",
                 "not a database": "The file is not a database"}
        hint = next((v for k, v in hints.items() if k in text), "Nothing else is known")
        raise StoreError(f"the run {folder} could not be {done}: {text}. {hint}; what was written before is intact.") from why
    except OSError as why:
        if isinstance(why, StoreError):
            raise
        raise StoreError(f"the run {folder} could not be {done}: {why.strerror or why}. Choose a place with room that can be "
                         f"written; what was written before is intact.") from why
