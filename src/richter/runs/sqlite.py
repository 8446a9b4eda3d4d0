"""A run in SQLite: its tables, how the file is opened, the class that reads it and the class that writes it.

Every write is one transaction: after a crash the file contains all writes that returned, and no incomplete one. Rows are appended
as blocks to ``recent`` (one or a few pages per write, for any number of curves), and moved in bulk to ``chunks``, where a curve
has few pieces. Of several rows for one step, the last one written counts.
Every row of a small table has a checksum, and so has every block of rows. The ledger stores the number of rows of each table and
the total of their checksums, so that rows that a damaged tree hides, repeats or shows in an old version are noticed too.
Checksums guard against accidents. An attacker can compute them, so nothing else relies on them.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from operator import index, itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from richter.core import Mark, Row, StoreError
from richter.runs import format as blocks
from richter.runs import place as files
from richter.runs.format import MARKS, Columns, plain_text, whole_step
from richter.runs.place import DATABASE, LOCK, RunFolder, bound, checked, explained, to_read

Kind = Literal["row", "scalar"]  # a measured number, or a scalar of the user
APPLICATION = 0x52434854  # "RCHT", in the file's header
FORMAT = 3
# no table has a separate index, because a damaged index could hide rows
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
# For each table: the columns in its checksums, their types (letters of TYPES), and the key by which a row replaces another. Bytes
# have separate checksums.
TABLES: Mapping[str, tuple[str, str, Callable[[Sequence[Any]], Any]]] = {
    "meta": ("id, key, value", "itt", itemgetter(1)),
    "sessions": ("id, begun, ended, how, provenance", "inn?t", itemgetter(0)),
    "series": ("id, kind, layer, name, chunks, merged, tip", "itttiii", itemgetter(1, 2, 3)),
    "notes": ("id, text", "it", itemgetter(1)),
    "snapshots": ("id, at, seconds, passes, examples, notes", "innnnt", itemgetter(0)),
    "arrays": ("id, layer, name, step, form, dtype, shape, object, body", "ittittt?s", itemgetter(1, 2, 3)),
    "claims": ("id, name, record", "itt", itemgetter(1)),
    "figures": ("id, name, kind, body", "itti", itemgetter(1, 2))}
CHUNK = "id, first, last, points, body"
# Types of a column, by letter. They are verified, because a file of unknown origin can contain anything.
TYPES: Mapping[str, set[type]] = {"i": {int}, "s": {int, type(None)}, "n": {int, float, type(None)}, "t": {str},
                                  "?": {str, type(None)}, "b": {bytes}}
TAIL = 2 ** 62  # number of the row that stores the end of the blocks: after the last one, on its page
CURVE = 2 ** 32  # range of chunk numbers per curve; the numbers of a curve start at its own number times this
FEW = 16  # small chunks of a curve before they are merged
RECENT = 30_000  # rows before they are moved to the chunks
BLOCKS = 2_000  # writes before they are moved, because each is read separately
ROW = 8  # smallest size of a row in bytes
OFTEN = 2  # how often a page may be read in one state of a file; only the ledger is read more than once
WRAP = 2 ** 64
APPEND = "INSERT OR REPLACE INTO recent (id, data) VALUES (?, ?), (?, CASE WHEN (SELECT data FROM ledger) = ? THEN ? END)"
CODES = {mark: code for code, mark in enumerate(MARKS)}


# --------------------------------------------------------------------------------------------------------------- sums


def data_sum(data: bytes) -> int:
    """Return the checksum of bytes, as a number that SQLite can store."""
    return int.from_bytes(_digest(data), "little", signed=True)


def row_sum(table: str, *values: int | float | str | None) -> int:
    """Return the checksum of one row, from the values as SQLite returns them."""
    return data_sum(repr((table, *values)).encode("utf-8", "backslashreplace"))


def _digest(data: bytes) -> bytes:
    """Digest of some bytes."""
    return blake2b(data, digest_size=8).digest()


class Ledger(NamedTuple):
    """Number of rows and total of their checksums for each table, and the last block of rows when the ledger was written."""

    tallies: Mapping[str, tuple[int, int]]
    last: int

    def packed(self) -> bytes:
        """Ledger as bytes with a checksum."""
        data = struct.pack(f"<{2 * len(TABLES)}Qq", *(n for table in TABLES for n in self.tallies[table]), self.last)
        return data + _digest(data)

    @classmethod
    def unpacked(cls, data: bytes) -> Ledger:
        """Ledger from bytes; raise an error if the checksum is wrong."""
        if len(data) != 16 * len(TABLES) + 16 or _digest(data[:-8]) != data[-8:]:
            raise StoreError("its ledger is not in its original state")
        *flat, last = struct.unpack(f"<{2 * len(TABLES)}Qq", data[:-8])
        return cls({table: (flat[2 * i], flat[2 * i + 1]) for i, table in enumerate(TABLES)}, last)


class Tail(NamedTuple):
    """The end of the appended blocks: the number of the block before the first, of the last one, and the checksum of the last
    one, which includes those of all before it."""

    base: int
    last: int
    sum: bytes

    @classmethod
    def empty(cls, base: int) -> Tail:
        """End of the rows before any is appended."""
        return cls(base, base, _digest(base.to_bytes(8, "little", signed=True)))

    def after(self, body: bytes) -> Tail:
        """Return the end after one more block."""
        return Tail(self.base, self.last + 1, _digest(self.sum + body))

    def packed(self) -> bytes:
        """End of the rows as bytes."""
        return struct.pack("<qq8s", *self)

    @classmethod
    def unpacked(cls, data: bytes) -> Tail:
        """End of the rows from bytes."""
        if len(data) != 24:
            raise StoreError("the end of its rows is not in its original state")
        return cls(*struct.unpack("<qq8s", data))


class StoredCurve(NamedTuple):
    """One curve: its number and names, its number of chunks (the first ones merged from many), and their total checksum."""

    number: int
    kind: str
    layer: str
    name: str
    chunks: int = 0
    merged: int = 0
    tip: int = 0


# ------------------------------------------------------------------------------------------------------------ opening


def opened(folder: Path) -> sqlite3.Connection:
    """Open the database of a run for reading."""
    if not (folder / DATABASE).is_file():
        raise StoreError(f"{folder} contains no run (there is no {DATABASE} in it). `richter runs FOLDER` lists the runs of a "
                         f"store.")
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(contextlib.closing(to_read(folder / DATABASE)))
        if not _has_tables(connection):
            raise StoreError(f"the run {folder} is just being created. Wait a moment." if files.held(folder / LOCK) else
                             f"the run {folder} was never begun: its process ended before the first write. Delete it.")
        _check(connection, folder)
        connection.execute("PRAGMA query_only=ON")
        undo.pop_all()
    return connection


def begun(folder: Path) -> bool:
    """Whether a folder contains a run. A run whose process ended before its first write does not count."""
    with explained(folder, "read"):
        if not (folder / DATABASE).is_file():
            return False
        with contextlib.closing(to_read(folder / DATABASE)) as connection:
            return _has_tables(connection)


def to_write(place: RunFolder) -> tuple[sqlite3.Connection, sqlite3.Connection]:
    """Open the database of a run that this process alone writes; create it if needed. The second connection is read-only and
    closed after the first one: until then SQLite removes no log (``Appender.close``). SQLite opens the log by its path, where
    another run may have one by now, so nothing is written before the log is verified."""
    folder, path = place.path, place.path / DATABASE
    place.make_database(_make_tables)
    place.hold(DATABASE)
    with contextlib.ExitStack() as undo:
        anchor = undo.enter_context(contextlib.closing(files.only_reading(checked(path))))
        connection = undo.enter_context(contextlib.closing(files.connection_to(path)))
        place.check()
        has_tables = _has_tables(connection)  # opens the log, if there is one
        anchor.execute("PRAGMA schema_version").fetchall()  # from here on it has a log open
        place.check()
        if has_tables:
            _check(connection, folder)  # before anything in the file is changed
            bound(connection)
            ((verdict, *_),) = connection.execute("PRAGMA quick_check(1)").fetchall()
            connection.set_progress_handler(None, 0)
            if verdict != "ok":  # e.g. a page that belongs to two trees, which both would write
                raise StoreError(f"the run {folder} is damaged ({str(verdict).strip()}), so nothing is added to it. Choose "
                                 f"another name; its readable parts can still be read.")
        ((mode,),) = connection.execute("PRAGMA journal_mode").fetchall()
        if mode != "wal":
            place.use_log(connection)
        # a killed process loses nothing; a power cut loses what ``sync`` has not stored
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=OFF")
        for each in (connection, anchor):
            each.execute("PRAGMA schema_version").fetchall()
        if connection.execute("PRAGMA journal_mode").fetchall() == [("wal",)]:  # false for file systems that do not support logs
            place.hold(files.beside(path)[0].name)
        if not has_tables:
            _make_tables(connection)
        undo.pop_all()
    return connection, anchor


def _make_tables(connection: sqlite3.Connection) -> None:
    """Create the tables of an empty run, in one transaction."""
    for statement in ("BEGIN IMMEDIATE", *SCHEMA.strip().split("\n"), f"PRAGMA application_id={APPLICATION}",
                      f"PRAGMA user_version={FORMAT}"):
        connection.execute(statement)
    connection.execute("INSERT INTO ledger VALUES (1, ?)", (Ledger(dict.fromkeys(TABLES, (0, 0)), 0).packed(),))
    connection.execute("INSERT INTO recent VALUES (?, ?)", (TAIL, Tail.empty(0).packed()))
    connection.execute("COMMIT")


def _has_tables(connection: sqlite3.Connection) -> bool:
    """Return whether the database has any table."""
    return bool(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])


def _check(connection: sqlite3.Connection, folder: Path) -> None:
    """Raise an error for a database that Richter did not write, of another format, or with added tables, views or triggers."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise StoreError(f"{folder / DATABASE} is a database that Richter did not write. Nothing in it was read or changed.")
    if version > FORMAT:
        raise StoreError(f"the run {folder} has format {version}, and this version of Richter reads format {FORMAT}. Update "
                         f"Richter to read it.")
    if 0 < version < FORMAT:
        raise StoreError(f"the run {folder} has format {version}, which only unreleased versions wrote, without checksums. This "
                         f"version of Richter reads format {FORMAT} only: measure again, under another name.")
    if version != FORMAT:
        raise StoreError(f"the run {folder} has format {version}, which does not exist: it is damaged.")
    ours = sorted(("table", statement.rstrip(";")) for statement in SCHEMA.strip().split("\n"))
    theirs = connection.execute("SELECT type, sql, rootpage FROM sqlite_master").fetchall()
    if sorted((str(kind), str(sql)) for kind, sql, _ in theirs) != ours:
        raise StoreError(f"the database of the run {folder} has tables, views or triggers that Richter does not write. It is "
                         f"damaged or malicious; it was not read.")
    if len({root for *_, root in theirs}) < len(theirs):
        raise StoreError(f"the run {folder} is damaged: two of its tables share one page. Nothing in it was read or changed.")


# ------------------------------------------------------------------------------------------------------------ reading


def typed(folder: Path, rows: list[Any], kinds: str) -> list[Any]:
    """Raise an error for rows with a wrong type; ``kinds``: a letter of TYPES for each column."""
    for column, kind in enumerate(kinds):
        if other := {type(row[column]) for row in rows} - TYPES[kind]:
            raise StoreError(f"the run {folder} has a {other.pop().__name__} where another type belongs. It is damaged.")
    return rows


@contextlib.contextmanager
def damage(folder: Path) -> Iterator[None]:
    """Add the name of the run to errors about damage."""
    try:
        yield
    except StoreError as why:
        if str(folder) in str(why):
            raise
        raise StoreError(f"the run {folder} is damaged: {why}. The damaged part is not shown; the rest can still be "
                         f"read.") from why


class Contents:
    """The tables in one state of the file; ``ask`` runs the queries. Every answer is verified by its checksums first."""

    def __init__(self, ask: Callable[..., list[Any]]) -> None:
        self._ask, self._tables = ask, dict[str, list[Any]]()

    @cached_property
    def ledger(self) -> Ledger:
        """Ledger of the tables, with its checksum verified."""
        rows = self._ask("SELECT data FROM ledger", (), "b")
        if len(rows) != 1:
            raise StoreError("its ledger is missing")
        return Ledger.unpacked(rows[0][0])

    def table(self, name: str) -> list[Any]:
        """Return all rows of a table by number, with their checksums last. Callers select from all rows, because a damaged row
        may be hidden from a search."""
        if name not in self._tables:
            columns, kinds, _ = TABLES[name]
            rows = self._ask(f"SELECT {columns}, sum FROM {name} ORDER BY id", (), kinds + "i")
            if any(row_sum(name, *row[:-1]) != row[-1] for row in rows):
                raise StoreError(f"a row of {name} is not in its original state")
            if (len(rows), sum(row[-1] for row in rows) % WRAP) != (tally := self.ledger.tallies[name]):
                raise StoreError(f"{tally[0]} rows of {name} were written, but the file has others")
            self._tables[name] = rows
        return self._tables[name]

    def data(self, table: str, row: int, body: int) -> bytes:
        """Return the bytes of an array, a figure, or a chunk of rows."""
        blob = "data" if table == "chunks" else "bytes"
        rows = self._ask(f"SELECT {blob} FROM {table} WHERE id = ?", (row,), "b")
        if len(rows) != 1 or data_sum(rows[0][0]) != body:
            raise StoreError(f"the bytes of one of its {table} are not in their original state")
        return bytes(rows[0][0])

    @cached_property
    def arrays(self) -> dict[tuple[str, str], list[Any]]:
        """Rows of arrays by layer and name, without their checksums; a run may have tens of thousands."""
        arrays: dict[tuple[str, str], list[Any]] = {}
        for row in self.table("arrays"):
            arrays.setdefault(row[1:3], []).append(row[:-1])
        return arrays

    @cached_property
    def curves(self) -> dict[tuple[str, str, str], StoredCurve]:
        """Curves by kind, layer and name, in the order in which they were first written."""
        curves = [StoredCurve._make(row[:-1]) for row in self.table("series")]
        if any(not 0 < c.number < 2 ** 31 for c in curves):
            raise StoreError("it has curves with invalid numbers")
        return {(c.kind, c.layer, c.name): c for c in curves}

    def of_kind(self, kind: Kind) -> list[StoredCurve]:
        """Curves of measures, or of scalars."""
        return [c for c in self.curves.values() if c.kind == kind]

    @cached_property
    def notes(self) -> dict[int, str]:
        """Notes by number."""
        return {number: text for number, text, _ in self.table("notes")}

    @cached_property
    def recent(self) -> tuple[Tail, list[bytes]]:
        """Blocks that were appended and not yet moved to their curves."""
        *written, end = self._ask("SELECT id, data FROM recent ORDER BY id", (), "ib") or [(0, b"")]
        tail = Tail.unpacked(end[1])
        computed, numbers = Tail.empty(tail.base), list(range(tail.base + 1, tail.base + 1 + len(written)))
        for _, body in written:
            computed = computed.after(body)
        if [number for number, _ in written] + [TAIL] != [*numbers, end[0]] or computed != tail or tail.last < self.ledger.last:
            raise StoreError("its last rows are not in their original state")
        return tail, [body for _, body in written]

    @cached_property
    def _recent_rows(self) -> dict[int, Columns]:
        """Rows that are not yet stored by curve."""
        return blocks.by_curve(blocks.unpack(self.recent[1]))

    def chunks(self, c: StoredCurve) -> list[Any]:
        """Return the chunks of a curve: number, first and last step, rows and checksum."""
        first = c.number * CURVE
        lines = self._ask(f"SELECT {CHUNK} FROM chunks WHERE id BETWEEN ? AND ? ORDER BY id", (first, first + CURVE - 1), "iiiii")
        if [line[0] for line in lines] != list(range(first, first + len(lines))) or len(lines) != c.chunks \
                or sum(row_sum("chunks", *line) for line in lines) % WRAP != c.tip % WRAP:
            raise StoreError(f"rows of {c.name!r} of layer {c.layer!r} are missing, or not in their original state")
        return lines

    def rows_of(self, lines: Iterable[Sequence[int]]) -> list[Columns]:
        """Return the rows of these chunks."""
        pieces = []
        for number, first, last, points, body in lines:
            c = blocks.unpack([self.data("chunks", number, body)])
            if (c.series is not None) or (len(c.step), int(c.step[0]), int(c.step[-1])) != (points, first, last):
                raise StoreError("a block of its rows is in the wrong place")
            pieces.append(c)
        return pieces

    def rows(self, curves: Collection[StoredCurve], steps: Sequence[int] = ()) -> dict[int, Columns]:
        """Return the latest rows of each curve by step; ``steps``: only these."""
        result = {}
        for c in curves:
            pieces = self.rows_of(line for line in self.chunks(c) if not steps or any(line[1] <= s <= line[2] for s in steps))
            pieces += [self._recent_rows[c.number]] if c.number in self._recent_rows else []
            columns = blocks.latest(blocks.joined(pieces))
            result[c.number] = columns.taken(np.isin(columns.step, steps)) if steps else columns
        return result

    def extent(self, curves: Collection[StoredCurve]) -> tuple[int, int] | None:
        """Return the first and last step of these curves."""
        ends = [step for c in curves for line in self.chunks(c) for step in line[1:3]]
        recent = (self._recent_rows[c.number].step for c in curves if c.number in self._recent_rows)
        ends += [int(step) for steps in recent for step in (steps.min(), steps.max())]
        return (min(ends), max(ends)) if ends else None


class RunReader:
    """A run for reading, also while another process writes it, and from a read-only folder. It is opened immediately, so that
    errors appear early, and reopened by the next query after ``close``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._guard = folder, threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._current: object = None  # token of the current moment
        self._stamp, self._version = files.Stamp(), 0  # of the file, when it was last opened
        with explained(folder, "read"):
            self._connected()

    def _connected(self) -> sqlite3.Connection:
        """Return a valid connection. SQLite notices writes by its own writers. Other changes of the file (cut, replaced, written
        by other programs) would be hidden by cached pages, so the file is reopened after them; so is an outdated copy in
        memory."""
        stamp = files.stamp(self.folder / DATABASE)
        if self._connection is not None and stamp != self._stamp and _version(self._connection) == self._version:
            self.close()
        if self._connection is None:
            connection = opened(self.folder)
            self._contents, self._version = Contents(self._ask), _version(connection)
            self._connection = connection
        self._stamp = stamp
        return self._connection

    @contextlib.contextmanager
    def moment(self) -> Iterator[Contents]:
        """Yield the contents of one state of a run that may be written meanwhile, for all queries in this context."""
        with self._guard:
            if self._current is not None:  # inside another moment
                yield self._contents
                return
            token = object()
            try:
                self._current = token
                self._end()  # a transaction that an interrupt has left open
                with explained(self.folder, "read"):
                    connection = self._connected()
                    connection.execute("BEGIN")
                    self._left = OFTEN * bound(connection)  # bytes of answers in this state
                    if (version := _version(connection)) != self._version:
                        self._contents, self._version = Contents(self._ask), version
                with damage(self.folder):
                    yield self._contents
            finally:
                if self._current is token:  # not a moment that an interrupt ended, and that is collected only now
                    self._current = None
                    self._end()

    def _end(self) -> None:
        """End a transaction that is still open."""
        if self._connection is not None and self._connection.in_transaction:
            with explained(self.folder, "read"):
                self._connection.execute("COMMIT")

    def _ask(self, question: str, values: Sequence[Any] = (), kinds: str = "") -> list[Any]:
        """Return all rows of an answer. In a valid file every page belongs to one row, so all answers together are not larger
        than the file. In a malicious file many rows may refer to the same pages, and a small file may expand beyond the
        memory."""
        rows = []
        with explained(self.folder, "read"):
            for row in self._connection.execute(question, values):  # type: ignore[union-attr]  # inside of a moment
                rows.append(row)
                self._left -= ROW + sum(len(value) for value in row if isinstance(value, (str, bytes)))
                if self._left < 0:
                    raise sqlite3.DatabaseError("interrupted, more was read than the file can hold")
        return typed(self.folder, rows, kinds)

    def close(self) -> None:
        """Close the file."""
        with self._guard:
            connection, self._connection = self._connection, None  # first: an interrupt may come when it is closed already
            if connection is not None:
                connection.close()


def _version(connection: sqlite3.Connection) -> int:
    """Return a number that changes when another connection has written to the file."""
    return int(connection.execute("PRAGMA data_version").fetchone()[0])


# ------------------------------------------------------------------------------------------------------------ writing


class Appender:
    """The single writer of a run. It keeps in memory the numbers and checksums of rows, and the blocks that are not yet moved to
    their curves, so that it can write without reading."""

    def __init__(self, folder: Path, locked: tuple[int, int]) -> None:
        self.folder = folder
        self.session: tuple[int, float, str] | None = None  # number, start and provenance of this process's session
        # as last written; whether only we write it; whether it is out of date
        self._ledger, self._ours, self._dirty = b"", False, False
        with explained(folder, "opened for writing"), contextlib.ExitStack() as undo:
            checked(folder / DATABASE)  # so that nothing is created beside an invalid file
            self.place = undo.enter_context(contextlib.closing(RunFolder(folder, locked)))
            self.connection, self.anchor = to_write(self.place)
            undo.callback(self.anchor.close)
            undo.callback(self.connection.close)
            self._load()
            undo.pop_all()
        self._settled = True  # whether memory and file agree: no write was refused or interrupted since then
        self._current = object()  # token of the current transaction

    # ---------------------------------------------------------------------------------------------------- transactions

    @contextlib.contextmanager
    def transaction(self, done: str) -> Iterator[None]:
        """Store everything that is written inside, or, after any error, nothing. ``done`` is a word for messages."""
        with explained(self.folder, done):
            self._undo()  # a transaction that an interrupt has left open
            settled, self._settled, self._current = self._settled, False, (token := object())
            try:
                self.connection.execute("BEGIN IMMEDIATE")
                # another process may write the file too, if locks do not work or somebody has deleted the lock file
                ends = "SELECT data FROM ledger UNION ALL SELECT data FROM recent WHERE id = ?"
                if not settled or self._ask(ends, (TAIL,)) != [(self._ledger,), (self._tail.packed(),)]:
                    self._load()
                yield
                if self._dirty or not self._ours:  # the ledger is up to date as long as nobody else writes it
                    tallies = {table: (len(rows), self._totals[table]) for table, rows in self._rows.items()}
                    before, self._ledger = self._ledger, Ledger(tallies, self._tail.last).packed()
                    self.connection.execute("INSERT OR REPLACE INTO ledger VALUES (1, ?)", (self._ledger,))
                    self._dirty, self._ours = False, self._ours or self._ledger != before
                self.connection.execute("COMMIT")
            except BaseException:
                if self._current is token:  # not a transaction that an interrupt ended, and that is collected only now
                    self._undo()
                raise
            self._settled = True

    def _undo(self) -> None:
        """Roll back a transaction that is still open."""
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def _load(self) -> None:
        """Update the memory from the file."""
        with damage(self.folder):
            self._contents = now = Contents(self._ask)
            self._ledger, self._ours, self._dirty = now.ledger.packed(), False, False
            self._rows = {name: {key(row): (row[0], row[-1]) for row in now.table(name)} for name, (_, _, key) in TABLES.items()}
            self._totals = {table: total for table, (_, total) in now.ledger.tallies.items()}
            self._top = {table: max((number for number, _ in rows.values()), default=0) for table, rows in self._rows.items()}
            self._curves, (self._tail, self._bodies) = dict(now.curves), now.recent
            self._recent = sum(blocks.head(body)[1] for body in self._bodies)

    def _ask(self, question: str, values: Sequence[Any] = (), kinds: str = "") -> list[Any]:
        """Rows that answer a query, with their types checked."""
        return typed(self.folder, self.connection.execute(question, values).fetchall(), kinds)

    # ----------------------------------------------------------------------------------------- small tables, in a transaction

    def put(self, table: str, *values: Any, number: int | None = None, data: bytes | None = None) -> int:
        """Write a row in place of the one with the same key, and return its number. Values have the types that SQLite returns.
        ``data``: the bytes of an array or a figure, which have their own checksum."""
        if table in ("arrays", "figures"):
            values = (*values, None if data is None else data_sum(data))
        rows, (columns, _, key_of) = self._rows[table], TABLES[table]
        old = rows.get(key := key_of((number, *values)))
        if number is None:
            number = old[0] if old else self._top[table] + 1
        total, more = row_sum(table, number, *values), ", bytes" * (data is not None)
        entry = [number, *values, total] + [data] * bool(more)
        places = ", ".join("?" * len(entry))
        self.connection.execute(f"INSERT OR REPLACE INTO {table} ({columns}, sum{more}) VALUES ({places})", entry)
        self._totals[table] = (self._totals[table] + total - (old[1] if old else 0)) % WRAP
        rows[key], self._top[table], self._dirty = (number, total), max(self._top[table], number), True
        return number

    def begin(self, meta: Mapping[str, Any], when: float, provenance: str) -> None:
        """Write a session of this process in a separate transaction and, for a new run, its metadata."""
        with self.transaction("begun"):
            for key, value in meta.items():
                self.put("meta", key, json.dumps(value))
            number = len(self._rows["sessions"]) + 1
            self.put("sessions", when, None, None, provenance, number=number)
        self.session = number, when, provenance

    def end(self, how: str) -> None:
        """Note the end of the session, and how it ended."""
        if self.session is not None:
            number, when, provenance = self.session
            self.put("sessions", when, time.time(), how.encode("utf-8", "replace").decode(), provenance, number=number)

    def drop(self, table: str, condition: str = "1", *values: Any) -> None:
        """Delete the rows that meet a condition, and recompute the totals."""
        columns, _, key = TABLES[table]
        self.connection.execute(f"DELETE FROM {table} WHERE {condition}", values)
        left = {key(row): (row[0], row[-1]) for row in self._ask(f"SELECT {columns}, sum FROM {table}")}
        self._rows[table], self._totals[table], self._dirty = left, sum(total for _, total in left.values()) % WRAP, True

    def clear(self) -> None:
        """Delete everything except settings, seeds and sessions."""
        for table in ("snapshots", "arrays", "claims", "figures", "series", "notes"):
            self.drop(table)
        self.drop("meta", "key IN ('initial', 'previous', 'about', 'failures')")
        self.connection.execute("DELETE FROM chunks")
        self._curves = {}
        self._end_blocks()

    def forget(self, after: int) -> None:
        """Delete the data of later steps; curves with such steps are rewritten."""
        self.settle()
        for c in list(self._curves.values()):
            lines, pieces = self._pieces(c)
            if any(line[2] > after for line in lines):
                rows = blocks.latest(blocks.joined(pieces))
                rows = rows.taken(rows.step <= after)
                self._drop_chunks(lines)
                empty = c._replace(chunks=0, merged=0, tip=0)
                self._put_curve(self._longer(empty, rows) if len(rows.step) else empty)
        self.drop("snapshots", "id > ?", after)
        self.drop("arrays", "step > ?", after)

    # ------------------------------------------------------------------------------------------------------------- rows

    def rows(self, kind: Kind, rows: Sequence[Row]) -> None:
        """Append rows, in a transaction; values that are not numbers raise an error first."""
        curves, exact = self._curves, Mark.EXACT
        numbers, steps, notes = list[int](), list[int](), list[int]()
        values, errors = list[float](), list[float]()
        marks = list[int]()
        try:
            for r in rows:
                marks.append(0 if r.mark is exact else CODES[Mark(r.mark)])
                numbers.append((curves.get((kind, r.layer, r.measure)) or self._new_curve(kind, r)).number)
                steps.append(index(r.step))  # type: ignore[arg-type]  # invalid steps raise an error below
                values.append(float(r.value))
                errors.append(float(r.error))
                notes.append((self._rows["notes"].get(r.note) or [self.put("notes", plain_text(r.note))])[0] if r.note else 0)
            columns = Columns(np.array(steps, np.int64), np.array(numbers, np.int64), np.array(values), np.array(errors),
                              *(np.array(column, np.int64) if any(column) else None for column in (notes, marks)))
        except (TypeError, ValueError, OverflowError, RuntimeError) as why:
            for other in rows:
                whole_step(other.step)
            raise StoreError(f"{r.measure!r} of layer {r.layer!r} at step {r.step}: {r.value!r} with the standard error "
                             f"{r.error!r} cannot be stored ({why}). Rows hold numbers.") from why
        if steps:
            self._append(blocks.pack(columns), len(steps))
        if self._recent >= RECENT or len(self._bodies) >= BLOCKS:
            self.settle()

    def scalars(self, step: int, values: Mapping[str, float]) -> bool:
        """Append scalars with known names as fast as possible, in a separate transaction. Return False if that is impossible;
        nothing was written then."""
        try:
            numbers = [self._curves["scalar", "", name].number for name in values]
        except KeyError:
            return False
        full = self._recent + len(numbers) >= RECENT or len(self._bodies) + 1 >= BLOCKS
        if full or not (numbers and self._settled and self._ours):
            return False
        with explained(self.folder, "written"):
            self._settled = False
            written = self._append(blocks.pack_step(step, numbers, values.values()), len(numbers))
            self._settled = True
        return written

    def _append(self, body: bytes, count: int) -> bool:
        """Write a block of rows, and the new end after it, in one statement. Return False, with nothing written, if the ledger is
        not in the state in which we left it."""
        tail = self._tail.after(body)
        try:
            self.connection.execute(APPEND, (tail.last, body, TAIL, self._ledger, tail.packed()))
        except sqlite3.IntegrityError:  # raised because the end would be NULL
            return False
        self._tail = tail
        self._bodies.append(body)
        self._recent += count
        return True

    def settle(self) -> None:
        """Move all blocks to their curves, where they are read fastest, in a transaction."""
        if self._bodies:
            moved = blocks.by_curve(blocks.unpack(self._bodies))
            for c in [c for c in self._curves.values() if c.number in moved]:
                self._put_curve(self._longer(c, blocks.latest(moved[c.number])))
            self._end_blocks()

    def _end_blocks(self) -> None:
        """Delete all blocks; the numbering continues."""
        self.connection.execute("DELETE FROM recent")
        self._tail, self._bodies, self._recent, self._dirty = Tail.empty(self._tail.last), [], 0, True
        self.connection.execute("INSERT OR REPLACE INTO recent (id, data) VALUES (?, ?)", (TAIL, self._tail.packed()))

    def _new_curve(self, kind: Kind, r: Row) -> StoredCurve:
        """Make a new curve for a row."""
        c = StoredCurve(len(self._curves) + 1, kind, plain_text(r.layer), plain_text(r.measure))
        self._put_curve(c)
        return c

    def _put_curve(self, c: StoredCurve) -> None:
        """Store the entry of a curve."""
        self.put("series", *c[1:], number=c.number)
        self._curves[c.kind, c.layer, c.name] = c

    def _longer(self, c: StoredCurve, rows: Columns) -> StoredCurve:
        """Add a chunk to a curve. Many small chunks are merged."""
        tip = c.tip
        if c.chunks - c.merged >= FEW:
            small, pieces = self._pieces(c, c.merged)
            rows, tip = blocks.latest(blocks.joined([*pieces, rows])), tip - sum(row_sum("chunks", *line) for line in small)
            self._drop_chunks(small)
            c = c._replace(chunks=c.merged, merged=c.merged + 1)
        data = blocks.pack(rows)
        line = c.number * CURVE + c.chunks, int(rows.step[0]), int(rows.step[-1]), len(rows.step), data_sum(data)
        self.connection.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?)", (*line, data))
        tip = (tip + row_sum("chunks", *line) + WRAP // 2) % WRAP - WRAP // 2  # wrapped to a number that SQLite can store
        return c._replace(chunks=c.chunks + 1, tip=tip)

    def _pieces(self, c: StoredCurve, start: int = 0) -> tuple[list[Any], list[Columns]]:
        """Return the chunks of a curve from one on, and their rows."""
        with damage(self.folder):
            lines = self._contents.chunks(c)[start:]
            return lines, self._contents.rows_of(lines)

    def _drop_chunks(self, lines: list[Any]) -> None:
        """Delete chunks of a curve."""
        self.connection.execute("DELETE FROM chunks WHERE id BETWEEN ? AND ?", (lines[0][0], lines[-1][0]))

    # ------------------------------------------------------------------------------------------------------------- end

    def check(self) -> None:
        """Raise an error if data written now would be lost, or go into another run."""
        try:
            self.place.check()
        except StoreError:
            # a log without a name is lost when this process is killed, so its contents are moved to the file
            with contextlib.suppress(sqlite3.Error):
                self.connection.execute("PRAGMA wal_checkpoint").fetchall()
            raise

    def close(self) -> None:
        """Close the database. It may be called repeatedly, and touches no file of another run in the same place."""
        self._current = object()  # an interrupted transaction undoes nothing from here on
        self.place.close_database(self.connection, self.anchor)
