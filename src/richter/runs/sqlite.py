"""A run in SQLite: its tables, how the file is opened, the class that reads it and the class that writes it.

Every write is one transaction: after a crash the file holds all writes that returned, and no half of another. Rows are appended
as blocks to ``recent`` (one page or a few for each write, however many curves there are) and moved in bulk to ``chunks``, where a
curve lies in few pieces; of rows for the same step the one that was written last counts.

Every row of a small table has a checksum, and so has every block of rows. The ledger says of each table how many rows it has and
what their sums add up to, so that a row that a damaged tree hides, or shows twice or as it once was, is noticed as well. Sums
guard against accidents. Whoever makes a file to do harm can compute them, so nothing else is trusted for their sake.
"""

from __future__ import annotations

import contextlib
import json
import operator
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from richter.core import Mark, Row, StoreError
from richter.runs import format as blocks
from richter.runs import place as files
from richter.runs.format import MARKS, Columns, plain_text, whole_step
from richter.runs.place import DATABASE, LOCK, Place, bound, explained, own, to_read

Kind = Literal["row", "scalar"]  # a number that was measured, or one of the user's own
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
# the columns of each table that its sums are over, and what they hold (letters of TYPES); bytes are summed on their own
COLUMNS = {"meta": ("id, key, value", "itt"),
           "sessions": ("id, begun, ended, how, provenance", "inn?t"),
           "series": ("id, kind, layer, name, chunks, merged, tip", "itttiii"),
           "notes": ("id, text", "it"),
           "snapshots": ("id, at, seconds, passes, examples, notes", "innnnt"),
           "arrays": ("id, layer, name, step, form, dtype, shape, object, body", "ittittt?s"),
           "claims": ("id, name, record", "itt"),
           "figures": ("id, name, kind, body", "itti")}
# what makes a row take the place of another
KEYS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "meta": operator.itemgetter(1), "sessions": operator.itemgetter(0), "series": operator.itemgetter(1, 2, 3),
    "notes": operator.itemgetter(1), "snapshots": operator.itemgetter(0), "arrays": operator.itemgetter(1, 2, 3),
    "claims": operator.itemgetter(1), "figures": operator.itemgetter(1, 2)}
CHUNK = "id, first, last, points, body"
# what a column must hold, by a letter: a file of unknown origin can hold anything anywhere
TYPES: Mapping[str, set[type]] = {"i": {int}, "s": {int, type(None)}, "n": {int, float, type(None)}, "t": {str},
                                  "?": {str, type(None)}, "b": {bytes}}
TAIL = 2 ** 62  # where the end of the blocks is written down: behind the last, on its page
CURVE = 2 ** 32  # numbers of the chunks of one curve: its own times this, and on
FEW = 16  # chunks of a curve before they are put together
RECENT = 30_000  # rows before they are moved,
BLOCKS = 2_000  # or writes: each is read on its own
ROW = 8  # bytes of a row at least
OFTEN = 2  # times that a page may be read in one state of a file: only the ledger is, more than once
WRAP = 2 ** 64
APPEND = "INSERT OR REPLACE INTO recent (id, data) VALUES (?, ?), (?, CASE WHEN (SELECT data FROM ledger) = ? THEN ? END)"
CODES = {mark: code for code, mark in enumerate(MARKS)}


# --------------------------------------------------------------------------------------------------------------- sums


def data_sum(data: bytes) -> int:
    """Checksum of bytes, as a number that SQLite can hold."""
    return int.from_bytes(_digest(data), "little", signed=True)


def row_sum(table: str, *values: int | float | str | None) -> int:
    """Checksum of one row: the values as SQLite gives them back."""
    return data_sum(repr((table, *values)).encode("utf-8", "backslashreplace"))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()


class Ledger(NamedTuple):
    """How many rows each table has and what their sums add up to, and the last block of rows there was when it was written."""

    tallies: Mapping[str, tuple[int, int]]
    last: int

    def packed(self) -> bytes:
        data = struct.pack(f"<{2 * len(COLUMNS)}Qq", *(n for table in COLUMNS for n in self.tallies[table]), self.last)
        return data + _digest(data)

    @classmethod
    def unpacked(cls, data: bytes) -> Ledger:
        if len(data) != 16 * len(COLUMNS) + 16 or _digest(data[:-8]) != data[-8:]:
            raise StoreError("its ledger is not what was written")
        *flat, last = struct.unpack(f"<{2 * len(COLUMNS)}Qq", data[:-8])
        return cls({table: (flat[2 * i], flat[2 * i + 1]) for i, table in enumerate(COLUMNS)}, last)


class Tail(NamedTuple):
    """The end of the blocks that were appended: the number of the block before the first, of the last, and the sum of the last,
    into which go those of all before it."""

    base: int
    last: int
    sum: bytes

    @classmethod
    def empty(cls, base: int) -> Tail:
        return cls(base, base, _digest(base.to_bytes(8, "little", signed=True)))

    def after(self, body: bytes) -> Tail:
        """The end when one more block is appended."""
        return Tail(self.base, self.last + 1, _digest(self.sum + body))

    def packed(self) -> bytes:
        return struct.pack("<qq8s", *self)

    @classmethod
    def unpacked(cls, data: bytes) -> Tail:
        if len(data) != 24:
            raise StoreError("the end of its rows is not what was written")
        return cls(*struct.unpack("<qq8s", data))


class Curve(NamedTuple):
    """One curve: its number and names, how many chunks it has (the first of them merged from many), and their sums together."""

    number: int
    kind: str
    layer: str
    name: str
    chunks: int = 0
    merged: int = 0
    tip: int = 0


# ------------------------------------------------------------------------------------------------------------ opening


def opened(folder: Path) -> sqlite3.Connection:
    """The database of a run, for reading."""
    if not (folder / DATABASE).is_file():
        raise StoreError(f"{folder} holds no run (there is no {DATABASE} in it). `richter runs FOLDER` lists those of a store.")
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(contextlib.closing(to_read(folder / DATABASE)))
        if not _has_tables(connection):
            raise StoreError(f"the run {folder} is just being made. Wait a moment." if files.held(folder / LOCK) else
                             f"the run {folder} was never begun: its process ended before the first write. Delete it.")
        _check(connection, folder)
        connection.execute("PRAGMA query_only=ON")
        undo.pop_all()
    return connection


def begun(folder: Path) -> bool:
    """Is there a run? One whose process ended before its first write is none."""
    with explained(folder, "read"):
        if not (folder / DATABASE).is_file():
            return False
        with contextlib.closing(to_read(folder / DATABASE)) as connection:
            return _has_tables(connection)


def to_write(place: Place) -> tuple[sqlite3.Connection, sqlite3.Connection]:
    """The database of a run that this process alone writes; it is made if need be. The second connection only reads, and is
    closed after the first: until then SQLite removes no log (``Appender.close``)."""
    folder, path = place.path, own(place.path / DATABASE)
    with contextlib.ExitStack() as undo:
        anchor = undo.enter_context(contextlib.closing(files.only_reading(path)))
        connection = undo.enter_context(contextlib.closing(files.connection_to(path)))
        place.check()
        if _has_tables(connection):
            anchor.execute("PRAGMA schema_version").fetchall()  # from here on it holds a log
            _check(connection, folder)  # before anything in the file is changed
            bound(connection)
            ((verdict, *_),) = connection.execute("PRAGMA quick_check(1)").fetchall()
            connection.set_progress_handler(None, 0)
            if verdict != "ok":  # a page that two trees take for their own would be written by both
                raise StoreError(f"the run {folder} is damaged ({str(verdict).strip()}) and is not written on. Choose another "
                                 f"name; what can be read of it is read as before.")
        connection.execute("PRAGMA journal_mode=WAL")  # others can read meanwhile, where the file system knows such logs
        connection.execute("PRAGMA synchronous=NORMAL")  # a killed process loses nothing; a power cut what ``sync`` has not seen
        connection.execute("PRAGMA foreign_keys=OFF")
        anchor.execute("PRAGMA schema_version").fetchall()
        if not _has_tables(connection):
            for statement in ("BEGIN IMMEDIATE", *SCHEMA.strip().split("\n"), f"PRAGMA application_id={APPLICATION}",
                              f"PRAGMA user_version={FORMAT}"):
                connection.execute(statement)
            connection.execute("INSERT INTO ledger VALUES (1, ?)", (Ledger(dict.fromkeys(COLUMNS, (0, 0)), 0).packed(),))
            connection.execute("INSERT INTO recent VALUES (?, ?)", (TAIL, Tail.empty(0).packed()))
            connection.execute("COMMIT")
        if files.beside(path)[0].exists():
            place.hold(files.beside(path)[0].name)
        undo.pop_all()
    return connection, anchor


def _has_tables(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])


def _check(connection: sqlite3.Connection, folder: Path) -> None:
    """Refuse a database that is not Richter's, of another format, or with a table, view or trigger that somebody has added."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
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
    ours = sorted(("table", statement.rstrip(";")) for statement in SCHEMA.strip().split("\n"))
    theirs = connection.execute("SELECT type, sql, rootpage FROM sqlite_master").fetchall()
    if sorted((str(kind), str(sql)) for kind, sql, _ in theirs) != ours:
        raise StoreError(f"the database of the run {folder} has other tables, views or triggers than Richter writes. It is "
                         f"damaged, or was made to do harm; it was not read.")
    if len({root for *_, root in theirs}) < len(theirs):
        raise StoreError(f"the run {folder} is damaged: two of its tables are one. Nothing in it was read or changed.")


# ------------------------------------------------------------------------------------------------------------ reading


def typed(folder: Path, rows: list[Any], kinds: str) -> list[Any]:
    """Refuse rows that hold something of another type; ``kinds``: a letter of TYPES for each column."""
    for column, kind in enumerate(kinds):
        if other := {type(row[column]) for row in rows} - TYPES[kind]:
            raise StoreError(f"the run {folder} holds {other.pop().__name__} where something else belongs. It is damaged.")
    return rows


@contextlib.contextmanager
def damage(folder: Path) -> Iterator[None]:
    """Name the run in errors that say what is damaged."""
    try:
        yield
    except StoreError as why:
        if str(folder) in str(why):
            raise
        raise StoreError(f"the run {folder} is damaged: {why}. What is damaged is not shown; the rest can be read as "
                         f"before.") from why


class Contents:
    """The tables in one state of the file, which ``ask`` answers from. Each answer is checked by its sums before it is given."""

    def __init__(self, ask: Callable[..., list[Any]]) -> None:
        self._ask, self._tables = ask, dict[str, list[Any]]()

    @cached_property
    def ledger(self) -> Ledger:
        rows = self._ask("SELECT data FROM ledger", (), "b")
        if len(rows) != 1:
            raise StoreError("it has no ledger")
        return Ledger.unpacked(rows[0][0])

    def table(self, name: str) -> list[Any]:
        """All rows of a table by their number, the sum of each last. Whoever wants some of them chooses from all: a damaged row
        may hide from a search."""
        if name not in self._tables:
            columns, kinds = COLUMNS[name]
            rows = self._ask(f"SELECT {columns}, sum FROM {name} ORDER BY id", (), kinds + "i")
            if any(row_sum(name, *row[:-1]) != row[-1] for row in rows):
                raise StoreError(f"a row of {name} is not what was written")
            if (len(rows), sum(row[-1] for row in rows) % WRAP) != (tally := self.ledger.tallies[name]):
                raise StoreError(f"{tally[0]} rows of {name} were written, and others are there")
            self._tables[name] = rows
        return self._tables[name]

    def data(self, table: str, row: int, body: int) -> bytes:
        """The bytes of an array or a picture, or of a chunk of rows."""
        blob = "data" if table == "chunks" else "bytes"
        rows = self._ask(f"SELECT {blob} FROM {table} WHERE id = ?", (row,), "b")
        if len(rows) != 1 or data_sum(rows[0][0]) != body:
            raise StoreError(f"the bytes of one of its {table} are not what was written")
        return bytes(rows[0][0])

    @cached_property
    def arrays(self) -> dict[tuple[str, str], list[Any]]:
        """The rows of arrays by layer and name, without their sums; a run may have tens of thousands."""
        arrays: dict[tuple[str, str], list[Any]] = {}
        for row in self.table("arrays"):
            arrays.setdefault(row[1:3], []).append(row[:-1])
        return arrays

    @cached_property
    def curves(self) -> dict[tuple[str, str, str], Curve]:
        """By kind, layer and name, in the order in which they were first written."""
        curves = [Curve._make(row[:-1]) for row in self.table("series")]
        if any(not 0 < c.number < 2 ** 31 for c in curves):
            raise StoreError("it has curves with numbers that none has")
        return {(c.kind, c.layer, c.name): c for c in curves}

    def of_kind(self, kind: Kind) -> list[Curve]:
        return [c for c in self.curves.values() if c.kind == kind]

    @cached_property
    def notes(self) -> dict[int, str]:
        return {number: text for number, text, _ in self.table("notes")}

    @cached_property
    def recent(self) -> tuple[Tail, list[bytes]]:
        """The blocks that were appended and not yet put to their curves."""
        *written, end = self._ask("SELECT id, data FROM recent ORDER BY id", (), "ib") or [(0, b"")]
        tail = Tail.unpacked(end[1])
        seen, numbers = Tail.empty(tail.base), list(range(tail.base + 1, tail.base + 1 + len(written)))
        for _, body in written:
            seen = seen.after(body)
        if [number for number, _ in written] + [TAIL] != [*numbers, end[0]] or seen != tail or tail.last < self.ledger.last:
            raise StoreError("its last rows are not what was written")
        return tail, [body for _, body in written]

    @cached_property
    def _recent_rows(self) -> dict[int, Columns]:
        return blocks.by_curve(blocks.unpack(self.recent[1]))

    def chunks(self, c: Curve) -> list[Any]:
        """The chunks of a curve: number, first and last step, rows and sum."""
        first = c.number * CURVE
        lines = self._ask(f"SELECT {CHUNK} FROM chunks WHERE id BETWEEN ? AND ? ORDER BY id", (first, first + CURVE - 1), "iiiii")
        if [line[0] for line in lines] != list(range(first, first + len(lines))) or len(lines) != c.chunks \
                or sum(row_sum("chunks", *line) for line in lines) % WRAP != c.tip % WRAP:
            raise StoreError(f"rows of {c.name!r} of layer {c.layer!r} are not there, or not what was written")
        return lines

    def rows_of(self, lines: Iterable[Sequence[int]]) -> list[Columns]:
        """The rows of these chunks."""
        pieces = []
        for number, first, last, points, body in lines:
            c = blocks.unpack([self.data("chunks", number, body)])
            if (c.series is not None) or (len(c.step), int(c.step[0]), int(c.step[-1])) != (points, first, last):
                raise StoreError("a block of its rows is not where it belongs")
            pieces.append(c)
        return pieces

    def rows(self, curves: Collection[Curve], steps: Sequence[int] = (), after: int | None = None) -> dict[int, Columns]:
        """The rows of each curve by step, the latest for each; ``steps``: of these only; ``after``: of later ones only."""
        result = {}
        for c in curves:
            pieces = self.rows_of(line for line in self.chunks(c) if (not steps or any(line[1] <= s <= line[2] for s in steps))
                                  and (after is None or line[2] > after))
            pieces += [self._recent_rows[c.number]] if c.number in self._recent_rows else []
            columns = blocks.latest(blocks.joined(pieces)) if pieces else blocks.NONE
            if steps:
                columns = columns.taken(np.isin(columns.step, steps))
            elif after is not None:
                columns = columns.taken(columns.step > after)
            result[c.number] = columns
        return result

    def extent(self, curves: Collection[Curve]) -> tuple[int, int] | None:
        """The first and last step of these curves."""
        ends = [step for c in curves for line in self.chunks(c) for step in line[1:3]]
        recent = (self._recent_rows[c.number].step for c in curves if c.number in self._recent_rows)
        ends += [int(step) for steps in recent for step in (steps.min(), steps.max())]
        return (min(ends), max(ends)) if ends else None


class Reader:
    """A run for reading, also while another process writes it, and from a folder that is read-only. It is opened at once, so that
    an error comes where it belongs, and again by the next question after ``close``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._guard = folder, threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._current: object = None  # the moment in hand
        self._connected()

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            with explained(self.folder, "read"):
                self._stamp = files.stamp(self.folder / DATABASE)
                connection = opened(self.folder)
                self._contents, self._version = Contents(self._ask), _version(connection)
                self._connection = connection
        return self._connection

    @contextlib.contextmanager
    def moment(self) -> Iterator[Contents]:
        """The contents of one state of a run that may be written meanwhile, for all questions inside.

        SQLite sees what its own writers do. What else is done to the file (cut, replaced, written by other programs) would be
        hidden by what is known of it already, so that it is opened anew; so is a copy that others went on behind."""
        with self._guard:
            if self._current is not None:  # inside of another
                yield self._contents
                return
            mine = object()
            try:
                self._current = mine
                self._end()  # what an interrupt has left open
                now = files.stamp(self.folder / DATABASE)
                if self._connection is not None and now != self._stamp:
                    self._stamp = now
                    with explained(self.folder, "read"):
                        if _version(self._connection) == self._version:
                            self.close()
                self._read = 0  # bytes of all answers in this state
                self._ask("BEGIN")
                if (version := self._ask("PRAGMA data_version")[0][0]) != self._version:
                    self._contents, self._version = Contents(self._ask), version
                with damage(self.folder):
                    yield self._contents
            finally:
                if self._current is mine:  # not one that an interrupt cut off, and that is only now collected
                    self._current = None
                    self._end()

    def _end(self) -> None:
        if self._connection is not None and self._connection.in_transaction:
            self._ask("COMMIT")

    def _ask(self, question: str, values: Sequence[Any] = (), kinds: str = "") -> list[Any]:
        """All rows of an answer. Every page belongs to one row, so that all answers together hold no more than the file does; in
        one that was made to do harm many rows lead to the same pages, and a small file to more than there is memory."""
        with explained(self.folder, "read"):
            connection, rows = self._connected(), []
            most = OFTEN * bound(connection)
            for row in connection.execute(question, values):
                rows.append(row)
                self._read += ROW + sum(len(value) for value in row if isinstance(value, (str, bytes)))
                if self._read > most:
                    raise sqlite3.DatabaseError("interrupted, more was read than the file can hold")
        return typed(self.folder, rows, kinds)

    def close(self) -> None:
        with self._guard:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def _version(connection: sqlite3.Connection) -> int:
    """A number that differs when another connection has written to the file."""
    return int(connection.execute("PRAGMA data_version").fetchone()[0])


# ------------------------------------------------------------------------------------------------------------ writing


class Appender:
    """The one writer of a run. It keeps in memory what is needed to write without reading: numbers and sums of rows, and the
    blocks that are not yet moved to their curves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.session: tuple[int, float, str] | None = None  # number, begin and provenance of what this process writes
        self._ledger, self._ours, self._dirty = b"", False, False  # as we left it; nobody else writes it; it is not up to date
        with explained(folder, "opened for writing"), contextlib.ExitStack() as undo:
            own(folder / DATABASE)  # nothing is made beside what is refused
            self.place = undo.enter_context(contextlib.closing(Place(folder)))
            self.connection, self.anchor = to_write(self.place)
            undo.callback(self.anchor.close)
            undo.callback(self.connection.close)
            self._load()
            undo.pop_all()
        self._settled = True  # no write was refused or cut off since the memory was in line with the file, which counts
        self._current = object()  # the transaction in hand

    # ---------------------------------------------------------------------------------------------------- transactions

    @contextlib.contextmanager
    def transaction(self, done: str) -> Iterator[None]:
        """What is written inside is kept whole, or (whatever is raised inside) not at all; ``done`` is a word for errors."""
        with explained(self.folder, done):
            self._undo()  # what an interrupt has left open
            settled, self._settled, self._current = self._settled, False, (mine := object())
            try:
                self.connection.execute("BEGIN IMMEDIATE")
                # another process may write it as well, where locks do not hold or somebody has deleted the file of ours
                ends = "SELECT data FROM ledger UNION ALL SELECT data FROM recent WHERE id = ?"
                if not settled or self._ask(ends, (TAIL,)) != [(self._ledger,), (self._tail.packed(),)]:
                    self._load()
                yield
                if self._dirty or not self._ours:  # as long as nobody else writes the ledger, it is ours
                    tallies = {table: (len(rows), self._totals[table]) for table, rows in self._rows.items()}
                    before, self._ledger = self._ledger, Ledger(tallies, self._tail.last).packed()
                    self.connection.execute("INSERT OR REPLACE INTO ledger VALUES (1, ?)", (self._ledger,))
                    self._dirty, self._ours = False, self._ours or self._ledger != before
                self.connection.execute("COMMIT")
            except BaseException:
                if self._current is mine:  # not one that an interrupt cut off before its body, and that is only now collected
                    self._undo()
                raise
            self._settled = True

    def _undo(self) -> None:
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def _load(self) -> None:
        """Bring the memory in line with the file."""
        with damage(self.folder):
            self._contents = now = Contents(self._ask)
            self._ledger, self._ours, self._dirty = now.ledger.packed(), False, False
            self._rows = {table: {key(row): (row[0], row[-1]) for row in now.table(table)} for table, key in KEYS.items()}
            self._totals = {table: total for table, (_, total) in now.ledger.tallies.items()}
            self._top = {table: max((number for number, _ in rows.values()), default=0) for table, rows in self._rows.items()}
            self._curves, (self._tail, self._bodies) = dict(now.curves), now.recent
            self._recent = sum(blocks.head(body)[1] for body in self._bodies)

    def _ask(self, question: str, values: Sequence[Any] = (), kinds: str = "") -> list[Any]:
        return typed(self.folder, self.connection.execute(question, values).fetchall(), kinds)

    # ----------------------------------------------------------------------------------------- small tables, in a transaction

    def put(self, table: str, *values: Any, number: int | None = None, data: bytes | None = None) -> int:
        """Write a row in place of the one with the same key, and return its number. Values are of the types that SQLite gives
        back; ``data`` are the bytes of an array or a figure, whose sum goes with them."""
        if table in ("arrays", "figures"):
            values = (*values, None if data is None else data_sum(data))
        rows, key = self._rows[table], KEYS[table]((number, *values))
        old = rows.get(key)
        if number is None:
            number = old[0] if old else self._top[table] + 1
        total, more = row_sum(table, number, *values), ", bytes" * (data is not None)
        entry = [number, *values, total] + [data] * bool(more)
        self.connection.execute(f"INSERT OR REPLACE INTO {table} ({COLUMNS[table][0]}, sum{more}) "
                                f"VALUES ({', '.join('?' * len(entry))})", entry)
        self._totals[table] = (self._totals[table] + total - (old[1] if old else 0)) % WRAP
        rows[key], self._top[table], self._dirty = (number, total), max(self._top[table], number), True
        return number

    def begin(self, meta: Mapping[str, Any], when: float, provenance: str) -> None:
        """A session of a process that writes, in a transaction of its own, and (of a new run) what the run is."""
        with self.transaction("begun"):
            for key, value in meta.items():
                self.put("meta", key, json.dumps(value))
            number = len(self._rows["sessions"]) + 1
            self.put("sessions", when, None, None, provenance, number=number)
        self.session = number, when, provenance

    def end(self, how: str) -> None:
        if self.session is not None:
            number, when, provenance = self.session
            self.put("sessions", when, time.time(), how.encode("utf-8", "replace").decode(), provenance, number=number)

    def drop(self, table: str, condition: str = "1", *values: Any) -> None:
        """Delete the rows that meet a condition; those that are left are added up anew."""
        self.connection.execute(f"DELETE FROM {table} WHERE {condition}", values)
        left = {KEYS[table](row): (row[0], row[-1]) for row in self._ask(f"SELECT {COLUMNS[table][0]}, sum FROM {table}")}
        self._rows[table], self._totals[table], self._dirty = left, sum(total for _, total in left.values()) % WRAP, True

    def clear(self) -> None:
        """Forget everything but settings, seeds and sessions."""
        for table in ("snapshots", "arrays", "claims", "figures", "series", "notes"):
            self.drop(table)
        self.drop("meta", "key IN ('initial', 'previous', 'about', 'failures')")
        self.connection.execute("DELETE FROM chunks")
        self._curves = {}
        self._end_blocks()

    def forget(self, after: int) -> None:
        """Forget what was written for later steps; a curve that had some of them is written anew."""
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
        """Append rows, in a transaction; what is no number is refused before anything is kept."""
        curves, index, exact = self._curves, operator.index, Mark.EXACT
        numbers, steps, notes = list[int](), list[int](), list[int]()
        values, errors = list[float](), list[float]()
        marks = list[int]()
        try:
            for r in rows:
                marks.append(0 if r.mark is exact else CODES[Mark(r.mark)])
                numbers.append((curves.get((kind, r.layer, r.measure)) or self._new_curve(kind, r)).number)
                steps.append(index(r.step))  # type: ignore[arg-type]  # refused below, if it is none
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
        """Append scalars whose names are known, as fast as can be and in a transaction of its own. False if that cannot be done,
        and nothing was written."""
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
        """Write a block of rows, and behind it the new end, in one statement. False, and nothing was written, if the ledger is
        not what we have left there."""
        tail = self._tail.after(body)
        try:
            self.connection.execute(APPEND, (tail.last, body, TAIL, self._ledger, tail.packed()))
        except sqlite3.IntegrityError:  # no end is none that can be written
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
        """Delete all blocks; the next has the next number."""
        self.connection.execute("DELETE FROM recent")
        self._tail, self._bodies, self._recent, self._dirty = Tail.empty(self._tail.last), [], 0, True
        self.connection.execute("INSERT OR REPLACE INTO recent (id, data) VALUES (?, ?)", (TAIL, self._tail.packed()))

    def _new_curve(self, kind: Kind, r: Row) -> Curve:
        c = Curve(len(self._curves) + 1, kind, plain_text(r.layer), plain_text(r.measure))
        self._put_curve(c)
        return c

    def _put_curve(self, c: Curve) -> None:
        self.put("series", *c[1:], number=c.number)
        self._curves[c.kind, c.layer, c.name] = c

    def _longer(self, c: Curve, rows: Columns) -> Curve:
        """A curve with one more chunk. When there are many that are small, they become one."""
        tip = c.tip
        if c.chunks - c.merged >= FEW:
            small, pieces = self._pieces(c, c.merged)
            rows, tip = blocks.latest(blocks.joined([*pieces, rows])), tip - sum(row_sum("chunks", *line) for line in small)
            self._drop_chunks(small)
            c = c._replace(chunks=c.merged, merged=c.merged + 1)
        data = blocks.pack(rows)
        line = c.number * CURVE + c.chunks, int(rows.step[0]), int(rows.step[-1]), len(rows.step), data_sum(data)
        self.connection.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?)", (*line, data))
        tip = (tip + row_sum("chunks", *line) + WRAP // 2) % WRAP - WRAP // 2  # as a number that SQLite can hold
        return c._replace(chunks=c.chunks + 1, tip=tip)

    def _pieces(self, c: Curve, start: int = 0) -> tuple[list[Any], list[Columns]]:
        """The chunks of a curve from one on, and their rows."""
        with damage(self.folder):
            lines = self._contents.chunks(c)[start:]
            return lines, self._contents.rows_of(lines)

    def _drop_chunks(self, lines: list[Any]) -> None:
        self.connection.execute("DELETE FROM chunks WHERE id BETWEEN ? AND ?", (lines[0][0], lines[-1][0]))

    # ------------------------------------------------------------------------------------------------------------- end

    def check(self) -> None:
        """Refuse if what is written now would be lost, or go into another run."""
        try:
            self.place.check()
        except StoreError:
            with contextlib.suppress(sqlite3.Error):  # a log without a name is lost when we are killed: into the file with it
                self.connection.execute("PRAGMA wal_checkpoint").fetchall()
            raise

    def close(self) -> None:
        """Close the database. May be called again, and touches no file of a run that is in the place of this one by now."""
        self._current = object()  # one that an interrupt cut off undoes nothing any more
        self.place.close_database(self.connection, self.anchor)
