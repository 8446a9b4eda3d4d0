"""All SQL of a run, for SQLite: its tables and their version, what is appended, what is read (the interface: ``database.py``).

Rows are appended to ``recent`` (a few pages for each write, however many curves there are) and moved in bulk to ``rows``,
where a curve lies in one piece; a step that is written again replaces the earlier row. NaN is NULL, and so is the mark of a
number that is exact, as most are.
"""

from __future__ import annotations

import contextlib
import operator
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from richter.core import Mark, Row, StoreError
from richter.runs import lock
from richter.runs.database import Kind
from richter.runs.format import DATABASE, LOCK, begin_log, bound, connection_to, end_log, explained, guarded, own, to_read
from richter.runs.provenance import plain_text, whole_step
from richter.runs.questions import Questions

# ------------------------------------------------------------------------------------------------ the tables, their version

APPLICATION = 0x52434854  # "RCHT", in the file's header
FORMAT = 2
SCHEMA = """
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
SCHEMAS = {1: SCHEMA.replace(", mark TEXT", ""), FORMAT: SCHEMA}  # of every format there was
RECENT = 30_000  # rows before they are moved

# all rows as they stand, or some series or steps of them: the latest of what was written for a step
LATEST = """SELECT series, step, value, error, note, mark, max(id) FROM (
    SELECT series, step, value, error, note, mark, 0 AS id FROM rows {where} UNION ALL
    SELECT series, step, value, error, note, mark, id FROM recent {where}) GROUP BY series, step"""
NAMED = f"""SELECT step, layer, name, value, error, coalesce(text, ''), coalesce(mark, 'exact') FROM ({LATEST}) AS latest
    JOIN series ON series.id = latest.series LEFT JOIN notes ON notes.id = note
    WHERE kind IN ({{kinds}}) ORDER BY kind, step, series.id"""


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


# from one format to the next: what turns a file of format k into one of format k + 1, inside a transaction
MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {1: _add_marks}


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
    theirs = connection.execute("SELECT type, coalesce(sql, '') FROM sqlite_master").fetchall()
    if sorted((str(kind), _plain(str(sql))) for kind, sql in theirs if (kind, sql) != ("index", "")) != ours:
        raise StoreError(f"the database of the run {folder} has other tables, views or triggers than Richter writes. It is "
                         f"damaged, or was made to do harm; it was not read.")


def _plain(sql: str) -> str:
    return re.sub(r"\s+", " ", sql).strip().rstrip(";")


# ------------------------------------------------------------------------------------------------------------ opening


def begun(folder: Path) -> bool:
    """Is there a run? One whose process ended before its first write is none."""
    with explained(folder, "read"):
        if not (folder / DATABASE).is_file():
            return False
        with contextlib.closing(to_read(folder / DATABASE)[0]) as connection:
            return _has_tables(connection)


def _has_tables(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])


def _to_write(folder: Path) -> sqlite3.Connection:
    """The database of a run that this process alone writes; made, or brought to today's format, if need be."""
    connection = connection_to(own(folder / DATABASE))
    try:
        guarded(connection)
        if _has_tables(connection):
            _check(connection, folder)  # before anything in the file is changed
        begin_log(connection)
        if not _has_tables(connection):
            for statement in ("BEGIN IMMEDIATE", *SCHEMA.strip().split("\n"), f"PRAGMA application_id={APPLICATION}",
                              f"PRAGMA user_version={FORMAT}", "COMMIT"):
                connection.execute(statement)
        migrate(connection)
        _check(connection, folder)
    except BaseException:
        connection.close()
        raise
    return connection


def _to_read(folder: Path) -> tuple[sqlite3.Connection, bool]:
    """The database of a run in today's format, and whether it is a copy: an old file is brought up to date in memory, and stays
    as it is."""
    if not (folder / DATABASE).is_file():
        raise StoreError(f"{folder} holds no run (there is no {DATABASE} in it). `richter runs FOLDER` lists those of a store.")
    connection, copied = to_read(folder / DATABASE)
    try:
        if not _has_tables(connection):
            raise StoreError(f"the run {folder} is just being made. Wait a moment." if lock.held(folder / LOCK) else
                             f"the run {folder} was never begun: its process ended before the first write. Delete it.")
        _check(connection, folder)
        if _version(connection) < FORMAT:
            with contextlib.closing(connection) as old:
                connection, copied = guarded(connection_to(":memory:")), True
                old.backup(connection)
            migrate(connection)
            _check(connection, folder)
        connection.execute("PRAGMA query_only=ON")
    except BaseException:
        connection.close()
        raise
    return connection, copied


# ---------------------------------------------------------------------------------------------------------- appending


class Appender:
    """The one writer of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with explained(folder, "opened for writing"):
            self.connection = _to_write(folder)
        (self._recent,) = self.connection.execute("SELECT count(*) FROM recent").fetchone()
        self._series: dict[tuple[str, str, str], int] = {}  # numbers of names, as they are in the file
        self._notes: dict[str, int] = {}
        self._new_series: dict[tuple[str, str, str], int] = {}  # those of this transaction, not yet in the file
        self._new_notes: dict[str, int] = {}
        self._current = object()  # the transaction in hand

    @contextlib.contextmanager
    def transaction(self, done: str) -> Iterator[None]:
        with explained(self.folder, done):
            self._undo()  # what an interrupt in the middle of the lines below has left open
            self._new_series, self._new_notes, recent = {}, {}, self._recent
            self._current = mine = object()
            try:
                self.connection.execute("BEGIN IMMEDIATE")
                yield
                self.connection.execute("COMMIT")
            except BaseException:
                if self._current is mine:  # not one that an interrupt cut off before its body, and that is only now collected
                    self._recent = recent
                    self._undo()
                raise
            self._series |= self._new_series
            self._notes |= self._new_notes

    def _undo(self) -> None:
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def begin(self, meta: Mapping[str, str], when: float, provenance: str) -> int:
        self.describe(meta)
        added = self.connection.execute("INSERT INTO sessions (begun, provenance) VALUES (?, ?)", (when, provenance))
        return int(added.lastrowid or 0)

    def end(self, session: int, when: float, how: str) -> None:
        self.connection.execute("UPDATE sessions SET ended = ?, how = ? WHERE id = ?", (when, how, session))

    def describe(self, meta: Mapping[str, str]) -> None:
        self.connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta.items())

    def rows(self, kind: Kind, rows: Sequence[Row]) -> None:
        series, notes, exact = self._series, self._notes, Mark.EXACT
        index: Callable[[Any], int] = operator.index  # refuses half a step, and None
        entries: list[tuple[Any, ...]] = []
        marks: dict[int, str] = {}  # by row: most have none, and are written faster without
        try:
            for r in rows:
                if r.mark is not exact:
                    marks[len(entries)] = Mark(r.mark).value
                entries.append((series.get((kind, r.layer, r.measure)) or self._number(kind, r.layer, r.measure), index(r.step),
                                float(r.value), float(r.error), (notes.get(r.note) or self._note(r.note)) if r.note else None))
            if marks:
                entries = [(*entry, marks.get(i)) for i, entry in enumerate(entries)]
            names, places = (", mark", ", ?") if marks else ("", "")
            self.connection.executemany(f"INSERT INTO recent (series, step, value, error, note{names}) "
                                        f"VALUES (?, ?, ?, ?, ?{places})", entries)
        except (TypeError, ValueError, OverflowError, RuntimeError) as why:
            for other in rows:
                whole_step(other.step)
            raise StoreError(f"{r.measure!r} of layer {r.layer!r} at step {r.step}: {r.value!r} with the standard error "
                             f"{r.error!r} cannot be stored ({why}). Rows hold numbers.") from why
        self._recent += len(entries)
        if self._recent >= RECENT:
            self.settle()

    def scalars(self, step: int, values: Mapping[str, float]) -> bool:
        numbers = [self._series.get(("scalar", "", name)) for name in values]
        if not values or None in numbers or self._recent + len(values) >= RECENT or self.connection.in_transaction:
            return False
        with explained(self.folder, "written"):
            self.connection.execute("INSERT INTO recent (series, step, value) VALUES " + ", ".join(["(?, ?, ?)"] * len(values)),
                                    [v for number, value in zip(numbers, values.values(), strict=True)
                                     for v in (number, step, value)])
        self._recent += len(values)
        return True

    def _number(self, kind: str, layer: str, name: str) -> int:
        key = kind, plain_text(layer), plain_text(name)
        if key not in self._new_series:
            self.connection.execute("INSERT OR IGNORE INTO series (kind, layer, name) VALUES (?, ?, ?)", key)
            (self._new_series[key],) = self.connection.execute(
                "SELECT id FROM series WHERE kind = ? AND layer = ? AND name = ?", key).fetchone()
        return self._new_series[key]

    def _note(self, text: str) -> int:
        if text not in self._new_notes:
            self.connection.execute("INSERT OR IGNORE INTO notes (text) VALUES (?)", (plain_text(text),))
            (self._new_notes[text],) = self.connection.execute("SELECT id FROM notes WHERE text = ?", (text,)).fetchone()
        return self._new_notes[text]

    def settle(self) -> None:
        self.connection.execute("""INSERT OR REPLACE INTO rows SELECT series, step, value, error, note, mark FROM (
            SELECT series, step, value, error, note, mark, max(id) FROM recent GROUP BY series, step)""")
        self.connection.execute("DELETE FROM recent")
        self._recent = 0

    def snapshot(self, step: int, when: float, seconds: float, passes: float, examples: int, notes: str) -> None:
        self.connection.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?, ?)",
                                (step, when, seconds, passes, examples, notes))

    def array(self, layer: str, name: str, step: int, form: str, dtype: str, shape: str, data: bytes | None,
              stored: str | None) -> None:
        self.connection.execute("INSERT OR REPLACE INTO arrays (layer, name, step, form, dtype, shape, bytes, object) "
                                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                                (plain_text(layer), plain_text(name), step, form, dtype, shape, data, stored))

    def claim(self, name: str, record: str) -> None:
        self.connection.execute("INSERT OR REPLACE INTO claims VALUES (?, ?)", (plain_text(name), record))

    def figure(self, name: str, kind: str, data: bytes) -> None:
        self.connection.execute("INSERT OR REPLACE INTO figures (name, kind, bytes) VALUES (?, ?, ?)",
                                (plain_text(name), kind, data))

    def clear(self) -> None:
        self._series, self._notes, self._recent = {}, {}, 0
        for table in ("rows", "recent", "series", "notes", "snapshots", "arrays", "claims", "figures"):
            self.connection.execute(f"DELETE FROM {table}")
        self.connection.execute("DELETE FROM meta WHERE key IN ('initial', 'previous', 'about', 'failures')")

    def forget(self, after: int) -> None:
        for table in ("rows", "recent", "snapshots", "arrays"):
            self.connection.execute(f"DELETE FROM {table} WHERE step > ?", (after,))

    def close(self) -> None:
        end_log(self.connection)


# ------------------------------------------------------------------------------------------------------------ reading


class Reader:
    """A run for reading, also while another process writes it, and from a folder that is read-only."""

    def __init__(self, folder: Path) -> None:
        self._questions = Questions(folder, _to_read)
        self._ask, self.close = self._questions.ask, self._questions.close

    @contextlib.contextmanager
    def moment(self) -> Iterator[None]:
        with self._questions.guard:
            self._ask("BEGIN")
            try:
                yield
            finally:
                self._ask("COMMIT")

    def meta(self, key: str) -> str | None:
        return next((value for (value,) in self._ask("SELECT value FROM meta WHERE key = ?", (key,), "t")), None)

    def sessions(self) -> list[tuple[float, float | None, str | None, str]]:
        return self._ask("SELECT begun, ended, how, provenance FROM sessions ORDER BY id", kinds="nn?t")

    def series(self, kind: Kind) -> list[tuple[int, str, str]]:
        return self._ask("SELECT id, layer, name FROM series WHERE kind = ? ORDER BY id", (kind,), "itt")

    def number(self, kind: Kind, layer: str, name: str) -> int | None:
        rows = self._ask("SELECT id FROM series WHERE kind = ? AND layer = ? AND name = ?", (kind, layer, name), "i")
        return rows[0][0] if rows else None

    def rows(self, kinds: Iterable[Kind], steps: Sequence[int] = ()) -> list[tuple[int, str, str, float, float, str, str]]:
        some, quoted = ", ".join("?" * len(steps)), ", ".join(map(repr, kinds))
        where = f"WHERE series IN (SELECT id FROM series) AND step IN ({some})" if steps else ""  # by the key, without a scan
        return self._ask(NAMED.format(where=where, kinds=quoted), [*steps] * 2, "ittnntt")

    def curve(self, number: int, after: int | None = None) -> list[tuple[int, float, float]]:
        where, values = ("WHERE series = ?", [number]) if after is None else ("WHERE series = ? AND step > ?", [number, after])
        return [row[1:4] for row in self._ask(LATEST.format(where=where) + " ORDER BY step", values * 2, "iinn")]

    def points(self, numbers: Iterable[int]) -> list[tuple[int, int, float, float, int, str, int]]:
        where = f"WHERE series IN ({', '.join(map(str, numbers))})"  # SQLite's own row numbers
        return self._ask(f"SELECT series, step, value, error, note, coalesce(mark, 'exact'), 0 FROM rows {where} UNION ALL "
                         f"SELECT series, step, value, error, note, coalesce(mark, 'exact'), id FROM recent {where}")

    def notes(self) -> dict[int, str]:
        return dict(self._ask("SELECT id, text FROM notes", (), "it"))

    def steps(self) -> list[int]:
        return [step for (step,) in self._ask("SELECT step FROM snapshots ORDER BY step", (), "i")]

    def last(self) -> int | None:
        steps = self._ask("SELECT (SELECT max(step) FROM rows WHERE series = series.id) FROM series UNION ALL "
                          "SELECT max(step) FROM recent UNION ALL SELECT max(step) FROM snapshots UNION ALL "
                          "SELECT max(step) FROM arrays", (), "s")
        return max((step for (step,) in steps if step is not None), default=None)

    def ends(self) -> tuple[int, int] | None:
        ((first, last),) = self._ask(
            "SELECT min(a), max(b) FROM (SELECT (SELECT min(step) FROM rows WHERE series = series.id) AS a, "
            "(SELECT max(step) FROM rows WHERE series = series.id) AS b FROM series WHERE kind = 'row' UNION ALL "
            "SELECT step, step FROM recent WHERE series IN (SELECT id FROM series WHERE kind = 'row'))", (), "ss")
        return None if first is None else (first, last)

    def costs(self, steps: Sequence[int] = ()) -> list[tuple[int, float, float, int, str]]:
        only = f"WHERE step IN ({', '.join('?' * len(steps))})" if steps else ""
        return self._ask(f"SELECT step, seconds, passes, examples, notes FROM snapshots {only}", steps, "innnt")

    def arrays(self) -> list[tuple[str, str, int]]:
        return self._ask("SELECT layer, name, step FROM arrays ORDER BY step, id", (), "tti")

    def array(self, layer: str, name: str, step: int | None) -> tuple[Any, Any, Any, Any, Any] | None:
        which = "ORDER BY step DESC LIMIT 1" if step is None else "AND step = ?"
        rows = self._ask(f"SELECT form, dtype, shape, bytes, object FROM arrays WHERE layer = ? AND name = ? {which}",
                         (layer, name) if step is None else (layer, name, step))
        return rows[0] if rows else None

    def claims(self) -> list[tuple[str, str]]:
        return self._ask("SELECT name, record FROM claims ORDER BY rowid", (), "tt")

    def figures(self) -> list[tuple[str, str]]:
        return self._ask("SELECT name, kind FROM figures ORDER BY id", (), "tt")

    def figure(self, name: str, kind: str) -> bytes | None:
        return next((data for (data,) in self._ask("SELECT bytes FROM figures WHERE name = ? AND kind = ?", (name, kind), "b")),
                    None)
