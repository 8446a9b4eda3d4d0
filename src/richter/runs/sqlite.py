"""What is appended to the tables of a run, with its sums: SQL that writes, for SQLite, inside the transaction of somebody else.

Rows are appended as blocks to ``recent`` (one page or a few for each write, however many curves there are) and moved in bulk to
``chunks``, where a curve lies in few pieces; of rows for the same step the one that was written last counts.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from richter.core import StoreError
from richter.runs import blocks
from richter.runs.blocks import TABLES, WRAP, Columns, Ledger, Tail, Tally, data_sum, row_sum
from richter.runs.format import typed

# -------------------------------------------------------------------------------------------------------- sql_contents
# What the tables of a run hold, each answer checked by its sums (``sums.py``) before it is given: SQL that reads, for SQLite.

TAIL = 2 ** 62  # where the end of the blocks is written down: behind the last, on its page
CURVE = 2 ** 32  # numbers of the chunks of one curve: its own times this, and on
SEVERAL = 20  # curves are asked for together from so many on
Ask = Callable[..., list[Any]]

# the columns of each table that its sums are over, and what they hold (letters of questions.TYPES); bytes are summed on their own
COLUMNS = {"meta": ("id, key, value", "itt"),
           "sessions": ("id, begun, ended, how, provenance", "inn?t"),
           "series": ("id, kind, layer, name, chunks, merged, tip", "itttiii"),
           "notes": ("id, text", "it"),
           "snapshots": ("id, at, seconds, passes, examples, notes", "innnnt"),
           "arrays": ("id, layer, name, step, form, dtype, shape, object, body", "ittittt?s"),
           "claims": ("id, name, record", "itt"),
           "figures": ("id, name, kind, body", "itti")}
CHUNK = "id, first, last, points, body"


class Curve(NamedTuple):
    """One curve: its number and names, how many chunks it has (the first of them merged from many), and their sums together."""

    number: int
    kind: str
    layer: str
    name: str
    chunks: int = 0
    merged: int = 0
    tip: int = 0

    @property
    def sum(self) -> int:
        return row_sum("series", *self)


class Contents:
    """``ask(question, values, kinds)`` answers from a state of the file that does not change while ``moment`` is held."""

    def __init__(self, folder: Path, ask: Ask) -> None:
        self.folder, self._ask = folder, ask
        self._tables: dict[str, list[Any]] = {}  # as they are in this state of the file
        self._curves: list[Curve] | None = None
        self._arrays: dict[tuple[str, str], list[Any]] | None = None
        self._pending: tuple[Tail, list[bytes]] | None = None
        self._read: dict[int, Columns] | None = None

    def changed(self) -> None:
        """The file may be in another state."""
        self._tables, self._curves, self._arrays, self._pending, self._read = {}, None, None, None, None

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except StoreError as why:
            if str(self.folder) in str(why):
                raise
            raise StoreError(f"the run {self.folder} is damaged: {why}. What is damaged is not shown; the rest can be read as "
                             f"before.") from why

    # ---------------------------------------------------------------------------------------------------- small tables

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
            with self._damage():
                rows, written = self._ask(f"SELECT {columns}, sum FROM {name} ORDER BY id", (), kinds + "i"), self.ledger()
                for row in rows:
                    if row_sum(name, *row[:-1]) != row[-1]:
                        raise StoreError(f"a row of {name} is not what was written")
                if Tally(len(rows), sum(row[-1] for row in rows) % WRAP) != written.tallies[name]:
                    raise StoreError(f"{written.tallies[name].number} rows of {name} were written, and others are there")
            self._tables[name] = rows
        return self._tables[name]

    def data(self, table: str, row: int, body: int) -> bytes:
        """The bytes of an array or a picture."""
        with self._damage():
            rows = self._ask(f"SELECT bytes FROM {table} WHERE id = ?", (row,), "b")
            if len(rows) != 1 or data_sum(rows[0][0]) != body:
                raise StoreError(f"the bytes of one of its {table} are not what was written")
            return bytes(rows[0][0])

    def curves(self) -> list[Curve]:
        if self._curves is None:
            curves = [Curve._make(row[:-1]) for row in self.table("series")]
            if any(not 0 < c.number < 2 ** 31 for c in curves):
                raise StoreError(f"the run {self.folder} has curves with numbers that none has. It is damaged.")
            self._curves = curves
        return self._curves

    def arrays(self, layer: str, name: str) -> list[Any]:
        """The rows of the arrays of this name, without their sums; a run may have tens of thousands of others."""
        if self._arrays is None:
            self._arrays = {}
            for row in self.table("arrays"):
                self._arrays.setdefault(row[1:3], []).append(row[:-1])
        return self._arrays.get((layer, name), [])

    # ----------------------------------------------------------------------------------------------------------- rows

    def recent(self) -> tuple[Tail, list[bytes]]:
        """What was appended and not yet put to its curves."""
        if self._pending is None:
            with self._damage():
                *written, end = self._ask("SELECT id, data FROM recent ORDER BY id", (), "ib") or [(0, b"")]
                tail = Tail.unpacked(end[1])
                seen = Tail.empty(tail.base)
                for number, body in written:
                    seen = seen.after(body)
                    if number != seen.last:
                        raise StoreError("some of its last rows are not there")
                if end[0] != TAIL or seen != tail or tail.last < self.ledger().last:
                    raise StoreError("its last rows are not what was written")
                self._pending = tail, [body for _, body in written]
        return self._pending

    def _recent_rows(self) -> dict[int, Columns]:
        if self._read is None:
            bodies = self.recent()[1]
            with self._damage():
                self._read = blocks.by_curve(blocks.unpack_all(bodies))
        return self._read

    def chunks(self, curves: Sequence[Curve]) -> dict[int, list[Any]]:
        """Of each curve all its chunks: number, first and last step, rows and sum."""
        if len(curves) < SEVERAL:
            lines = [line for c in curves for line in self._ask(
                f"SELECT {CHUNK} FROM chunks WHERE id BETWEEN ? AND ? ORDER BY id",
                (c.number * CURVE, c.number * CURVE + CURVE - 1), "iiiii")]
        else:
            numbers = ", ".join(str(c.number) for c in curves)
            lines = self._ask(f"SELECT {CHUNK} FROM chunks WHERE id >> 32 IN ({numbers}) ORDER BY id", (), "iiiii")
        kept: dict[int, list[Any]] = {c.number: [] for c in curves}
        for line in lines:
            if line[0] >> 32 not in kept:  # a damaged tree gives what was not asked for
                raise StoreError("its rows are not in their places")
            kept[line[0] >> 32].append(line)
        for c in curves:
            mine = kept[c.number]
            if len(mine) != c.chunks or [line[0] for line in mine] != [c.number * CURVE + i for i in range(c.chunks)] \
                    or sum(row_sum("chunks", *line) for line in mine) % WRAP != c.tip % WRAP:
                raise StoreError(f"rows of {c.name!r} of layer {c.layer!r} are not there, or not what was written")
        return kept

    def chunk(self, line: Sequence[int]) -> Columns:
        (data,), *_ = self._ask("SELECT data FROM chunks WHERE id = ?", line[:1], "b") or [(b"",)]
        if data_sum(data) != line[4]:
            raise StoreError("a block of its rows is not what was written")
        c = blocks.unpack(data)
        if (c.series is not None) or (len(c.step), int(c.step[0]), int(c.step[-1])) != (line[3], line[1], line[2]):
            raise StoreError("a block of its rows is not where it belongs")
        return c

    def pieces(self, curve: Curve, start: int = 0) -> tuple[list[Any], list[Columns]]:
        """The chunks of a curve from one on, and their rows."""
        with self._damage():
            lines = self.chunks([curve])[curve.number][start:]
            return lines, [self.chunk(line) for line in lines]

    def rows(self, curves: Iterable[Curve], steps: Sequence[int] = (), after: int | None = None) -> dict[int, Columns]:
        """Of each curve by step, the latest for each; ``steps``: of these only; ``after``: of later ones only."""
        wanted, result = list(curves), {}
        with self._damage():
            kept, recent = self.chunks(wanted), self._recent_rows()
            for c in wanted:
                lines = [line for line in kept[c.number] if (not steps or any(line[1] <= s <= line[2] for s in steps))
                         and (after is None or line[2] > after)]
                mine = [self.chunk(line) for line in lines] + ([recent[c.number]] if c.number in recent else [])
                columns = blocks.latest(blocks.joined(mine)) if mine else blocks.NONE
                if steps:
                    columns = columns.taken(np.isin(columns.step, steps))
                elif after is not None:
                    columns = columns.taken(columns.step > after)
                result[c.number] = columns
        return result

    def extent(self, curves: Sequence[Curve]) -> tuple[int, int] | None:
        """The first and last step of these curves."""
        with self._damage():
            recent = self._recent_rows()
            ends = [step for lines in self.chunks(curves).values() for line in lines for step in line[1:3]]
            ends += [int(step) for c in curves if c.number in recent for step in (recent[c.number].step.min(),
                                                                                  recent[c.number].step.max())]
        return (min(ends), max(ends)) if ends else None


# --------------------------------------------------------------------------------------------------------- sql_packing

FEW = 16  # chunks of a curve before they are put together
APPEND = "INSERT OR REPLACE INTO recent (id, data) VALUES (?, ?), (?, CASE WHEN (SELECT data FROM ledger) = ? THEN ? END)"
# by what a row is replaced, of all but series
KEYS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "meta": lambda row: row[1], "sessions": lambda row: row[0], "notes": lambda row: row[1], "snapshots": lambda row: row[0],
    "arrays": lambda row: tuple(row[1:4]), "claims": lambda row: row[1], "figures": lambda row: tuple(row[1:3])}


class Packing:
    """Keeps in memory what is needed to write without reading: numbers of names, sums, and the blocks that are not yet moved.
    ``load`` brings that in line with the file."""

    def __init__(self, folder: Path, connection: Callable[[], sqlite3.Connection]) -> None:
        self.folder, self._connection = folder, connection
        self._contents = Contents(folder, self.ask)

    def ask(self, question: str, values: Sequence[Any] = (), kinds: str = "") -> list[Any]:
        return typed(self.folder, self._connection().execute(question, values).fetchall(), kinds)

    def load(self) -> None:
        self._contents.changed()
        ledger = self._contents.ledger()
        self.tallies, self._ledger, self.ours = dict(ledger.tallies), ledger.packed(), False
        self.curves = {(c.kind, c.layer, c.name): c for c in self._contents.curves()}
        self.series = {key: c.number for key, c in self.curves.items()}
        self.keys = {table: {key(row): (row[0], row[-1]) for row in self._contents.table(table)} for table, key in KEYS.items()}
        self._top = {table: max((row for row, _ in known.values()), default=0) for table, known in self.keys.items()}
        self.notes = {text: number for text, (number, _) in self.keys["notes"].items()}
        self.tail, self.bodies = self._contents.recent()
        self.recent = sum(blocks.head(body)[1] for body in self.bodies)
        self._dirty = False

    def in_line(self) -> bool:
        """Is the file as we left it? Another process may write it as well, where locks do not hold or somebody has deleted the
        file of ours."""
        ends = self.ask("SELECT data FROM ledger UNION ALL SELECT data FROM recent WHERE id = ?", (TAIL,))
        return ends == [(self._ledger,), (self.tail.packed(),)]

    def begin(self) -> None:
        """The first lines of a new file."""
        self.tallies, self.tail, self._dirty = {table: Tally() for table in TABLES}, Tail.empty(0), True
        self._ledger, self.ours = b"", False
        self._write_tail()
        self.flush()

    def flush(self) -> None:
        """At the end of a transaction: the ledger says what was written. As long as nobody else writes it, it is ours."""
        if self._dirty or not self.ours:
            before, self._ledger = self._ledger, Ledger(self.tallies, self.tail.last).packed()
            self._connection().execute("INSERT OR REPLACE INTO ledger VALUES (1, ?)", (self._ledger,))
            self._dirty, self.ours = False, self.ours or self._ledger != before

    # ---------------------------------------------------------------------------------------------------- small tables

    def put(self, table: str, key: Any, *values: Any, number: int | None = None, data: bytes | None = None) -> int:
        """A row (of its number, or the next one), in place of that with the same key; returns its number. Values are of the
        types that SQLite gives back."""
        known = self.keys[table]
        old = known.get(key)
        row = number if number is not None else old[0] if old else self._top[table] + 1
        entry, more = [row, *values, row_sum(table, row, *values)], ", bytes" * (data is not None)
        places = ", ".join("?" * (len(entry) + bool(more)))
        self._connection().execute(f"INSERT OR REPLACE INTO {table} ({COLUMNS[table][0]}, sum{more}) VALUES ({places})",
                                   entry + [data] * bool(more))
        tally = self.tallies[table].minus(old[1]) if old else self.tallies[table]
        self.tallies[table], known[key], self._dirty = tally.plus(entry[-1]), (row, entry[-1]), True
        self._top[table] = max(self._top[table], row)
        return row

    def drop(self, table: str, condition: str = "1", *values: Any) -> None:
        """Rows that meet a condition; what is left is added up anew."""
        self._connection().execute(f"DELETE FROM {table} WHERE {condition}", values)
        left = {KEYS[table](row): (row[0], row[-1]) for row in self.ask(f"SELECT {COLUMNS[table][0]}, sum FROM {table}")}
        self.tallies[table] = Tally(len(left), sum(total for _, total in left.values()) % WRAP)
        self.keys[table], self._dirty = left, True

    def number(self, kind: str, layer: str, name: str) -> int:
        """Of a curve, which is made if it is new."""
        key = kind, layer, name
        if key not in self.series:
            self._put_curve(Curve(len(self.series) + 1, *key))
        return self.series[key]

    def note(self, text: str) -> int:
        if text not in self.notes:
            self.notes[text] = self.put("notes", text, text, number=len(self.notes) + 1)
        return self.notes[text]

    def _put_curve(self, c: Curve) -> None:
        key = c.kind, c.layer, c.name
        tally = self.tallies["series"].minus(self.curves[key].sum) if key in self.curves else self.tallies["series"]
        self._connection().execute(f"INSERT OR REPLACE INTO series ({COLUMNS['series'][0]}, sum) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                                   (*c, c.sum))
        self.tallies["series"], self.curves[key], self.series[key], self._dirty = tally.plus(c.sum), c, c.number, True

    # ----------------------------------------------------------------------------------------------------------- rows

    def append(self, body: bytes, count: int) -> bool:
        """A block of rows, and behind it the new end: one statement. False, and nothing was written, if the ledger is not what we
        have left there."""
        tail = self.tail.after(body)
        try:
            self._connection().execute(APPEND, (tail.last, body, TAIL, self._ledger, tail.packed()))
        except sqlite3.IntegrityError:  # no end is none that can be written
            return False
        self.tail = tail
        self.bodies.append(body)
        self.recent += count
        return True

    def _write_tail(self) -> None:
        self._connection().execute("INSERT OR REPLACE INTO recent (id, data) VALUES (?, ?)", (TAIL, self.tail.packed()))

    def settle(self) -> None:
        """Move all blocks to their curves."""
        if self.bodies:
            moved = blocks.by_curve(blocks.unpack_all(self.bodies))
            for c in [c for c in self.curves.values() if c.number in moved]:
                self._put_curve(self._longer(c, blocks.latest(moved[c.number])))
            self._connection().execute("DELETE FROM recent")
            self.tail, self.bodies, self.recent, self._dirty = Tail.empty(self.tail.last), [], 0, True
            self._write_tail()

    def _longer(self, c: Curve, rows: Columns) -> Curve:
        """A curve with one more chunk. When there are many that are small, they become one."""
        if c.chunks - c.merged < FEW:
            return c._replace(chunks=c.chunks + 1, tip=_added(c.tip, self._put_chunk(c, c.chunks, rows)))
        small, pieces = self._contents.pieces(c, c.merged)
        whole = blocks.latest(blocks.joined([*pieces, rows]))
        tip = _added(c.tip, *(-row_sum("chunks", *line) for line in small))
        self._connection().execute("DELETE FROM chunks WHERE id BETWEEN ? AND ?", (small[0][0], small[-1][0]))
        return c._replace(chunks=c.merged + 1, merged=c.merged + 1, tip=_added(tip, self._put_chunk(c, c.merged, whole)))

    def _put_chunk(self, c: Curve, place: int, rows: Columns) -> int:
        data = blocks.pack(rows)
        line = c.number * CURVE + place, int(rows.step[0]), int(rows.step[-1]), len(rows.step), data_sum(data)
        self._connection().execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?)", (*line, data))
        return row_sum("chunks", *line)

    def forget(self, after: int) -> None:
        """Rows of later steps; a curve that had some is written anew."""
        self.settle()
        for c in list(self.curves.values()):
            lines, pieces = self._contents.pieces(c)
            if any(line[2] > after for line in lines):
                rows = blocks.latest(blocks.joined(pieces))
                rows = rows.taken(rows.step <= after)
                self._connection().execute("DELETE FROM chunks WHERE id BETWEEN ? AND ?", (lines[0][0], lines[-1][0]))
                empty = c._replace(chunks=0, merged=0, tip=0)
                self._put_curve(self._longer(empty, rows) if len(rows.step) else empty)

    def clear(self) -> None:
        """All rows and curves."""
        for table in ("chunks", "recent", "series", "notes"):
            self._connection().execute(f"DELETE FROM {table}")
        self.tail, self.tallies["series"], self.tallies["notes"], self._dirty = Tail.empty(self.tail.last), Tally(), Tally(), True
        self._write_tail()
        self.flush()
        self.load()


def _added(tip: int, *sums: int) -> int:
    """Modulo 2^64, as a number that SQLite can hold."""
    total = (tip + sum(sums)) % WRAP
    return total - WRAP if total >= WRAP // 2 else total


def or_null(value: float) -> float | None:
    """SQLite has no NaN."""
    return None if math.isnan(value) else value


def columns(series: Sequence[int], step: Sequence[int], value: Sequence[float], error: Sequence[float],
            note: Sequence[int], mark: Mapping[int, int]) -> Columns:
    """Of lists; ``mark``: by row, of those that have one."""
    marks = None
    if mark:
        marks = np.zeros(len(step), np.int64)
        marks[list(mark)] = list(mark.values())
    return Columns(np.array(series, np.int64), np.array(step, np.int64), np.array(value), np.array(error),
                   np.array(note, np.int64) if any(note) else None, marks)
