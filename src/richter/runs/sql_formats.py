"""The tables of a run in a SQLite file, their version, and how a run is opened to be read or written."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path

from richter.core import StoreError
from richter.runs import place as lock
from richter.runs.format import (
    DATABASE,
    LOCK,
    begin_log,
    beside,
    bound,
    connection_to,
    explained,
    guarded,
    only_reading,
    own,
    to_read,
)
from richter.runs.place import Place
from richter.runs.sqlite import Packing

APPLICATION = 0x52434854  # "RCHT", in the file's header
FORMAT = 3
# no table has an index beside itself, which could lead past a row that is there
SCHEMA = """
CREATE TABLE ledger (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE meta (id INTEGER PRIMARY KEY, key TEXT NOT NULL, value TEXT NOT NULL, sum INTEGER NOT NULL);
CREATE TABLE sessions (id INTEGER PRIMARY KEY, begun REAL NOT NULL, ended REAL, how TEXT, provenance TEXT NOT NULL, sum INTEGER NOT NULL);
CREATE TABLE series (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, layer TEXT NOT NULL, name TEXT NOT NULL, chunks INTEGER NOT NULL, merged INTEGER NOT NULL, tip INTEGER NOT NULL, sum INTEGER NOT NULL);
CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT NOT NULL, sum INTEGER NOT NULL);
CREATE TABLE chunks (id INTEGER PRIMARY KEY, first INTEGER NOT NULL, last INTEGER NOT NULL, points INTEGER NOT NULL, body INTEGER NOT NULL, data BLOB NOT NULL);
CREATE TABLE recent (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE snapshots (id INTEGER PRIMARY KEY, at REAL NOT NULL, seconds REAL, passes REAL, examples INTEGER, notes TEXT NOT NULL, sum INTEGER NOT NULL);
CREATE TABLE arrays (id INTEGER PRIMARY KEY, layer TEXT NOT NULL, name TEXT NOT NULL, step INTEGER NOT NULL, form TEXT NOT NULL, dtype TEXT NOT NULL, shape TEXT NOT NULL, object TEXT, body INTEGER, sum INTEGER NOT NULL, bytes BLOB);
CREATE TABLE claims (id INTEGER PRIMARY KEY, name TEXT NOT NULL, record TEXT NOT NULL, sum INTEGER NOT NULL);
CREATE TABLE figures (id INTEGER PRIMARY KEY, name TEXT NOT NULL, kind TEXT NOT NULL, body INTEGER NOT NULL, sum INTEGER NOT NULL, bytes BLOB NOT NULL);
"""  # noqa: E501


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _check(connection: sqlite3.Connection, folder: Path) -> None:
    """Ours, of a format that is known, and with the tables of that format: no view or trigger that somebody has added."""
    version = _version(connection)
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise StoreError(f"{folder / DATABASE} is a database, but not one of Richter's. Nothing in it was read or changed.")
    if version > FORMAT:
        raise StoreError(f"the run {folder} has format {version}, and this version of Richter reads format {FORMAT}. Update "
                         f"Richter to read it.")
    if 0 < version < FORMAT:
        raise StoreError(f"the run {folder} has format {version}, which only unreleased versions wrote, without checksums. This "
                         f"version of Richter reads format {FORMAT} only: measure again, under another name.")
    if version != FORMAT:
        raise StoreError(f"the run {folder} says it has format {version}, which never existed: it is damaged.")
    ours = sorted(("table", _plain(line)) for line in SCHEMA.strip().split("\n"))
    theirs = connection.execute("SELECT type, coalesce(sql, ''), rootpage FROM sqlite_master").fetchall()
    if sorted((str(kind), _plain(str(sql))) for kind, sql, _ in theirs if (kind, sql) != ("index", "")) != ours:
        raise StoreError(f"the database of the run {folder} has other tables, views or triggers than Richter writes. It is "
                         f"damaged, or was made to do harm; it was not read.")
    if len({root for *_, root in theirs}) < len(theirs):
        raise StoreError(f"the run {folder} is damaged: two of its tables are one. Nothing in it was read or changed.")


def _check_pages(connection: sqlite3.Connection, folder: Path) -> None:
    """Before a run is written on: a page that two trees take for their own would be written by both."""
    bound(connection)
    ((verdict, *_),) = connection.execute("PRAGMA quick_check(1)").fetchall()
    connection.set_progress_handler(None, 0)
    if verdict != "ok":
        raise StoreError(f"the run {folder} is damaged ({str(verdict).strip()}) and is not written on. Choose another name; what "
                         f"can be read of it is read as before.")


def _plain(sql: str) -> str:
    return re.sub(r"\s+", " ", sql).strip().rstrip(";")


# ------------------------------------------------------------------------------------------------------------ opening


def begun(folder: Path) -> bool:
    """Is there a run? One whose process ended before its first write is none."""
    with explained(folder, "read"):
        if not (folder / DATABASE).is_file():
            return False
        with contextlib.closing(to_read(folder / DATABASE)) as connection:
            return _has_tables(connection)


def _has_tables(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])


def to_write(place: Place) -> tuple[sqlite3.Connection, sqlite3.Connection]:
    """The database of a run that this process alone writes; made if need be. The second connection
    only reads, and is closed after the first: until then SQLite removes no log (``Place.end_log``)."""
    folder, path = place.path, own(place.path / DATABASE)
    with contextlib.ExitStack() as undo:
        anchor = undo.enter_context(contextlib.closing(only_reading(path)))
        connection = undo.enter_context(contextlib.closing(connection_to(path)))
        place.check()
        guarded(connection)
        if _has_tables(connection):
            _hold_log(anchor)
            _check(connection, folder)  # before anything in the file is changed
            _check_pages(connection, folder)
        begin_log(connection)
        _hold_log(anchor)
        if not _has_tables(connection):
            for statement in ("BEGIN IMMEDIATE", *SCHEMA.strip().split("\n"), f"PRAGMA application_id={APPLICATION}",
                              f"PRAGMA user_version={FORMAT}"):
                connection.execute(statement)
            Packing(folder, lambda: connection).begin()
            connection.execute("COMMIT")
        if (log := beside(path)[0]).exists():
            place.hold(log)
        undo.pop_all()
    return connection, anchor


def _hold_log(anchor: sqlite3.Connection) -> None:
    """A connection that has read a database with a log holds it until it is closed."""
    anchor.execute("PRAGMA schema_version").fetchall()


def opened(folder: Path) -> sqlite3.Connection:
    """The database of a run, for reading."""
    if not (folder / DATABASE).is_file():
        raise StoreError(f"{folder} holds no run (there is no {DATABASE} in it). `richter runs FOLDER` lists those of a store.")
    connection = to_read(folder / DATABASE)
    try:
        if not _has_tables(connection):
            raise StoreError(f"the run {folder} is just being made. Wait a moment." if lock.held(folder / LOCK) else
                             f"the run {folder} was never begun: its process ended before the first write. Delete it.")
        _check(connection, folder)
        connection.execute("PRAGMA query_only=ON")
    except BaseException:
        connection.close()
        raise
    return connection
