"""What is appended to the tables of a run, with its sums: SQL that writes, for SQLite, inside the transaction of somebody else.

Rows are appended as blocks to ``recent`` (one page or a few for each write, however many curves there are) and moved in bulk to
``chunks``, where a curve lies in few pieces; of rows for the same step the one that was written last counts.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from richter.runs import blocks
from richter.runs.blocks import Columns
from richter.runs.questions import typed
from richter.runs.sql_contents import COLUMNS, CURVE, TAIL, Contents, Curve
from richter.runs.sums import TABLES, WRAP, Ledger, Tail, Tally, data_sum, row_sum

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
