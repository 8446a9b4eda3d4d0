"""What the tables of a run hold, each answer checked by its sums (``sums.py``) before it is given: SQL that reads, for SQLite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from richter.core import StoreError
from richter.runs import blocks
from richter.runs.blocks import Columns
from richter.runs.sums import WRAP, Ledger, Tail, Tally, data_sum, row_sum

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
