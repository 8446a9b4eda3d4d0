"""The tables of a run in a SQLite file, their version, every format there was and the way from each to the next; and how a run is
opened to be read or written."""

from __future__ import annotations

import contextlib
import math
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from richter.core import Mark, StoreError
from richter.runs import place as lock
from richter.runs.blocks import MARKS, data_sum, pack
from richter.runs.format import (
    DATABASE,
    LOCK,
    Account,
    begin_log,
    beside,
    bound,
    connection_to,
    explained,
    guarded,
    only_reading,
    own,
    to_read,
    typed,
)
from richter.runs.place import Place
from richter.runs.sqlite import Packing, columns

APPLICATION = 0x52434854  # "RCHT", in the file's header
FORMAT = 3
WITHOUT_SUMS = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (id INTEGER PRIMARY KEY, begun REAL NOT NULL, ended REAL, how TEXT, provenance TEXT NOT NULL);
CREATE TABLE series (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, layer TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (kind, layer, name));
CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE rows (series INTEGER NOT NULL, step INTEGER NOT NULL, value REAL, error REAL, note INTEGER, mark TEXT, PRIMARY KEY (series, step)) WITHOUT ROWID;
CREATE TABLE recent (id INTEGER PRIMARY KEY, series INTEGER NOT NULL, step INTEGER NOT NULL, value REAL, error REAL, note INTEGER, mark TEXT);
CREATE TABLE snapshots (step INTEGER PRIMARY KEY, at REAL NOT NULL, seconds REAL, passes REAL, examples INTEGER, notes TEXT NOT NULL);
CREATE TABLE arrays (id INTEGER PRIMARY KEY, layer TEXT NOT NULL, name TEXT NOT NULL, step INTEGER NOT NULL, form TEXT NOT NULL, dtype TEXT NOT NULL, shape TEXT NOT NULL, bytes BLOB, object TEXT, UNIQUE (layer, name, step));
CREATE TABLE claims (name TEXT PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE figures (id INTEGER PRIMARY KEY, name TEXT NOT NULL, kind TEXT NOT NULL, bytes BLOB NOT NULL, UNIQUE (name, kind));
"""  # noqa: E501
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
SCHEMAS = {1: WITHOUT_SUMS.replace(", mark TEXT", ""), 2: WITHOUT_SUMS, FORMAT: SCHEMA}  # of every format there was

# all rows of format 2 as they stand: the latest of what was written for a step
LATEST = """SELECT series, step, value, error, note, mark, max(id) FROM (
    SELECT series, step, value, error, note, mark, 0 AS id FROM old_rows UNION ALL
    SELECT series, step, value, error, note, mark, id FROM old_recent) GROUP BY series, step ORDER BY series, step"""


def old_mark(value: float | None, note: str | None) -> str | None:
    """The mark of a row of format 1, which kept none: its note and its value tell."""
    if note and note.startswith("trivial"):
        return Mark.TRIVIAL.value
    if value is None:
        return Mark.UNDEFINED.value
    estimated = note and re.search(r"\d random outputs of \d|\d outputs drawn of \d|estimated by products with the kernel", note)
    return Mark.ESTIMATED.value if estimated else None


def _add_marks(connection: sqlite3.Connection) -> None:
    connection.create_function("old_mark", 2, old_mark, deterministic=True)
    for table in ("rows", "recent"):
        connection.execute(f"ALTER TABLE {table} ADD COLUMN mark TEXT")
        connection.execute(f"UPDATE {table} SET mark = old_mark(value, (SELECT text FROM notes WHERE id = note)) WHERE "
                           f"(value IS NULL OR note IS NOT NULL) AND series IN (SELECT id FROM series WHERE kind = 'row')")


def _add_sums(connection: sqlite3.Connection) -> None:
    """Rows as blocks, and a sum of everything as it is now: what came before is not known to be what was written."""
    size, account = bound(connection), Account()

    def ask(question: str, kinds: str) -> list[Any]:
        return typed(Path(DATABASE).parent, account.fetched(connection.execute(question), size), kinds)

    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()]
    for table in tables:
        connection.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    for statement in SCHEMAS[3].strip().split("\n"):
        connection.execute(statement)
    to = Packing(Path(DATABASE).parent, lambda: connection)
    to.begin()
    to.load()
    for key, value in [*ask("SELECT key, value FROM old_meta", "tt"), ("migrated", "2")]:
        to.put("meta", key, key, value)
    for number, *session in ask("SELECT id, begun, ended, how, provenance FROM old_sessions ORDER BY id", "inn?t"):
        to.put("sessions", number, *session, number=number)
    for step, *cost in ask("SELECT step, at, seconds, passes, examples, notes FROM old_snapshots", "innnnt"):
        to.put("snapshots", step, *cost, number=step)
    for name, record in ask("SELECT name, record FROM old_claims ORDER BY rowid", "tt"):
        to.put("claims", name, name, record)
    for (number,) in ask("SELECT id FROM old_figures ORDER BY id", "i"):
        ((name, kind, data),) = ask(f"SELECT name, kind, bytes FROM old_figures WHERE id = {number}", "ttb")
        to.put("figures", (name, kind), name, kind, data_sum(data), data=data)
    for (number,) in ask("SELECT id FROM old_arrays ORDER BY id", "i"):
        ((*facts, data),) = ask("SELECT layer, name, step, form, dtype, shape, object, bytes FROM old_arrays "
                                f"WHERE id = {number}", "ttittt?o")
        to.put("arrays", tuple(facts[:3]), *facts, None if data is None else data_sum(data), data=data)
    _pack_rows(to, ask)
    to.flush()
    for table in tables:
        connection.execute(f"DROP TABLE old_{table}")


def _pack_rows(to: Packing, ask: Callable[[str, str], list[Any]]) -> None:
    notes = {number: to.note(text) for number, text in ask("SELECT id, text FROM old_notes ORDER BY id", "it")}
    curves = {number: to.number(*key) for number, *key in ask("SELECT id, kind, layer, name FROM old_series ORDER BY id", "ittt")}
    rows = [row for row in ask(LATEST, "iinns?") if row[0] in curves]
    if not rows:
        return
    if unknown := {row[5] for row in rows} - {None, *MARKS}:
        raise StoreError(f"the run holds the mark {unknown.pop()!r}, and no row has such a one. It is damaged.")
    marks = {i: MARKS.index(row[5]) for i, row in enumerate(rows) if row[5] is not None}
    series, step, value, error, note, _, _ = zip(*rows, strict=True)
    values, errors = ([math.nan if v is None else float(v) for v in column] for column in (value, error))
    to.append(pack(columns([curves[n] for n in series], step, values, errors, [notes.get(n, 0) for n in note], marks)), len(rows))
    to.settle()


# from one format to the next: what turns a file of format k into one of format k + 1, inside a transaction
MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {1: _add_marks, 2: _add_sums}


def migrate(connection: sqlite3.Connection) -> None:
    """Step by step to today's format, each step whole or not at all."""
    while (version := _version(connection)) < FORMAT:
        bound(connection)
        try:
            connection.execute("BEGIN IMMEDIATE")
            MIGRATIONS[version](connection)
            connection.execute(f"PRAGMA user_version={version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        finally:
            connection.set_progress_handler(None, 0)


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _check(connection: sqlite3.Connection, folder: Path) -> None:
    """Ours, of a format that is known, and with the tables of that format: no view or trigger that somebody has added."""
    version = _version(connection)
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise StoreError(f"{folder / DATABASE} is a database, but not one of Richter's. Nothing in it was read or changed.")
    if version > FORMAT:
        raise StoreError(f"the run {folder} has format {version}, and this version of Richter knows formats up to {FORMAT}. "
                         f"Update Richter to read it.")
    if version not in SCHEMAS:
        raise StoreError(f"the run {folder} says it has format {version}, which never existed: it is damaged.")
    ours = sorted(("table", _plain(line)) for line in SCHEMAS[version].strip().split("\n"))
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
    """The database of a run that this process alone writes; made, or brought to today's format, if need be. The second connection
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
        migrate(connection)
        _check(connection, folder)
        if (log := beside(path)[0]).exists():
            place.hold(log)
        undo.pop_all()
    return connection, anchor


def _hold_log(anchor: sqlite3.Connection) -> None:
    """A connection that has read a database with a log holds it until it is closed."""
    anchor.execute("PRAGMA schema_version").fetchall()


def opened(folder: Path) -> sqlite3.Connection:
    """The database of a run in today's format: an old file is brought up to date in a copy in memory, and stays as it is."""
    if not (folder / DATABASE).is_file():
        raise StoreError(f"{folder} holds no run (there is no {DATABASE} in it). `richter runs FOLDER` lists those of a store.")
    connection = to_read(folder / DATABASE)
    try:
        if not _has_tables(connection):
            raise StoreError(f"the run {folder} is just being made. Wait a moment." if lock.held(folder / LOCK) else
                             f"the run {folder} was never begun: its process ended before the first write. Delete it.")
        _check(connection, folder)
        if _version(connection) < FORMAT:
            with contextlib.closing(connection) as old:
                connection = guarded(connection_to(":memory:"))
                old.backup(connection)
            migrate(connection)
            _check(connection, folder)
        connection.execute("PRAGMA query_only=ON")
    except BaseException:
        connection.close()
        raise
    return connection
