"""A run in SQLite: one class that appends and one that reads (the interface: ``database.py``). Statements are in the files whose
names begin with ``sql``: tables and formats, what is read and how it is checked, what is written, and here the transactions."""

from __future__ import annotations

import contextlib
import operator
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from richter.core import Mark, Row, SelectionError, StoreError
from richter.runs import blocks
from richter.runs.blocks import Columns, data_sum
from richter.runs.database import Kind, Rows
from richter.runs.format import DATABASE, Questions, explained, own, plain_text, whole_step
from richter.runs.place import Place
from richter.runs.sql_formats import begun, opened, to_write
from richter.runs.sqlite import Contents, Curve, Packing, columns, or_null

__all__ = ["Appender", "Reader", "begun"]

RECENT = 30_000  # rows before they are moved,
BLOCKS = 2_000  # or writes: each is read on its own
CODES = {mark: blocks.MARKS.index(mark.value) for mark in Mark}


# ---------------------------------------------------------------------------------------------------------- appending


class Appender:
    """The one writer of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with explained(folder, "opened for writing"), contextlib.ExitStack() as undo:
            own(folder / DATABASE)  # nothing is made beside what is refused
            self.place = Place(folder)
            undo.callback(self.place.close)
            self.connection, self.anchor = to_write(self.place)
            undo.callback(self.anchor.close)
            undo.callback(self.connection.close)
            self._packing = Packing(folder, lambda: self.connection)
            self._packing.load()
            undo.pop_all()
        self._settled = True  # no write was refused or cut off since the packing was in line with the file, which counts
        self._current = object()  # the transaction in hand

    @contextlib.contextmanager
    def transaction(self, done: str) -> Iterator[None]:
        with explained(self.folder, done):
            self._undo()  # what an interrupt has left open
            settled, self._settled, self._current = self._settled, False, (mine := object())
            try:
                self.connection.execute("BEGIN IMMEDIATE")
                if not (settled and self._packing.in_line()):
                    self._packing.load()
                yield
                self._packing.flush()
                self.connection.execute("COMMIT")
            except BaseException:
                if self._current is mine:  # not one that an interrupt cut off before its body, and that is only now collected
                    self._undo()
                raise
            self._settled = True

    def _undo(self) -> None:
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def begin(self, meta: Mapping[str, str], when: float, provenance: str) -> int:
        self.describe(meta)
        number, self._begun = len(self._packing.keys["sessions"]) + 1, (when, provenance)
        return self._packing.put("sessions", number, when, None, None, provenance, number=number)

    def end(self, session: int, when: float, how: str) -> None:
        begun, provenance = self._begun
        self._packing.put("sessions", session, begun, when, how, provenance, number=session)

    def describe(self, meta: Mapping[str, str]) -> None:
        for key, value in meta.items():
            self._packing.put("meta", key, key, value)

    def rows(self, kind: Kind, rows: Sequence[Row]) -> None:
        packing, index, exact = self._packing, operator.index, Mark.EXACT
        series, notes = packing.series, packing.notes
        numbers, steps, remarks = list[int](), list[int](), list[int]()
        values, errors = list[float](), list[float]()
        marks: dict[int, int] = {}  # by row: most have none
        try:
            for r in rows:
                if r.mark is not exact:
                    marks[len(steps)] = CODES[Mark(r.mark)]
                numbers.append(series.get((kind, r.layer, r.measure)) or self._number(kind, r.layer, r.measure))
                steps.append(index(r.step))  # type: ignore[arg-type]  # refused below, if it is none
                values.append(float(r.value))
                errors.append(float(r.error))
                remarks.append((notes.get(r.note) or packing.note(plain_text(r.note))) if r.note else 0)
            body = blocks.pack(columns(numbers, steps, values, errors, remarks, marks)) if steps else b""
        except (TypeError, ValueError, OverflowError, RuntimeError) as why:
            for other in rows:
                whole_step(other.step)
            raise StoreError(f"{r.measure!r} of layer {r.layer!r} at step {r.step}: {r.value!r} with the standard error "
                             f"{r.error!r} cannot be stored ({why}). Rows hold numbers.") from why
        if body:
            packing.append(body, len(steps))
        if packing.recent >= RECENT or len(packing.bodies) >= BLOCKS:
            packing.settle()

    def scalars(self, step: int, values: Mapping[str, float]) -> bool:
        packing = self._packing
        known = packing.series
        try:
            numbers = [known["scalar", "", name] for name in values]
        except KeyError:
            return False
        full = packing.recent + len(numbers) >= RECENT or len(packing.bodies) + 1 >= BLOCKS
        if full or not (numbers and self._settled and packing.ours):
            return False
        body = blocks.pack_step(step, numbers, values.values())
        with explained(self.folder, "written"):
            self._settled = False
            written = packing.append(body, len(numbers))
            self._settled = True
        return written

    def _number(self, kind: str, layer: str, name: str) -> int:
        return self._packing.number(kind, plain_text(layer), plain_text(name))

    def settle(self) -> None:
        self._packing.settle()

    def snapshot(self, step: int, when: float, seconds: float, passes: float, examples: int, notes: str) -> None:
        self._packing.put("snapshots", step, when, or_null(seconds), or_null(passes), examples, notes, number=step)

    def array(self, layer: str, name: str, step: int, form: str, dtype: str, shape: str, data: bytes | None,
              stored: str | None) -> None:
        key = plain_text(layer), plain_text(name), step
        self._packing.put("arrays", key, *key, form, dtype, shape, stored, None if data is None else data_sum(data), data=data)

    def claim(self, name: str, record: str) -> None:
        self._packing.put("claims", name, plain_text(name), record)

    def figure(self, name: str, kind: str, data: bytes) -> None:
        self._packing.put("figures", (name, kind), plain_text(name), kind, data_sum(data), data=data)

    def clear(self) -> None:
        for table in ("snapshots", "arrays", "claims", "figures"):
            self._packing.drop(table)
        self._packing.drop("meta", "key IN ('initial', 'previous', 'about', 'failures')")
        self._packing.clear()

    def forget(self, after: int) -> None:
        self._packing.forget(after)
        self._packing.drop("snapshots", "id > ?", after)
        self._packing.drop("arrays", "step > ?", after)

    def check(self) -> None:
        try:
            self.place.check()
        except StoreError:
            with contextlib.suppress(sqlite3.Error):  # a log without a name is lost when we are killed: into the file with it
                self.connection.execute("PRAGMA wal_checkpoint").fetchall()
            raise

    def close(self) -> None:
        self._current = object()  # one that an interrupt cut off undoes nothing any more
        self.place.end_log(self.connection, self.anchor)
        self.place.close()


# ------------------------------------------------------------------------------------------------------------ reading


class Reader:
    """A run for reading, also while another process writes it, and from a folder that is read-only."""

    def __init__(self, folder: Path) -> None:
        self._questions = Questions(folder, opened)
        self._ask, self.close = self._questions.ask, self._questions.close
        self._contents = Contents(folder, self._ask)
        self._state = 0, 0  # of the file
        self._current: object = None  # the moment in hand

    @contextlib.contextmanager
    def moment(self) -> Iterator[None]:
        with self._questions.guard:
            if self._current is not None:  # inside of another
                yield
                return
            mine = object()
            try:
                self._current = mine
                self._end()  # what an interrupt has left open
                self._questions.look()
                self._ask("BEGIN")
                state = self._questions.times, self._ask("PRAGMA data_version")[0][0]
                if state != self._state:
                    self._contents.changed()
                    self._state = state
                yield
            finally:
                if self._current is mine:  # not one that an interrupt cut off, and that is only now collected
                    self._current = None
                    self._end()

    def _end(self) -> None:
        if self._questions.asking:
            self._ask("COMMIT")

    def _table(self, name: str) -> list[Any]:
        """Without numbers and sums."""
        with self.moment():
            return [row[1:-1] for row in self._contents.table(name)]

    def _curves(self, kind: Kind) -> list[Curve]:
        with self.moment():
            return [c for c in self._contents.curves() if c.kind == kind]

    def meta(self, key: str) -> str | None:
        return dict(self._table("meta")).get(key)

    def sessions(self) -> list[tuple[float, float | None, str | None, str]]:
        return self._table("sessions")

    def series(self, kind: Kind) -> list[tuple[int, str, str]]:
        return [(c.number, c.layer, c.name) for c in self._curves(kind)]

    def number(self, kind: Kind, layer: str, name: str) -> int | None:
        return next((c.number for c in self._curves(kind) if (c.layer, c.name) == (layer, name)), None)

    def rows(self, kinds: Iterable[Kind], steps: Sequence[int] = ()) -> Rows:
        with self.moment():
            places: dict[str, int] = {kind: i for i, kind in enumerate(sorted(kinds))}
            curves = [c for c in self._contents.curves() if c.kind in places]
            found, notes = self._contents.rows(curves, steps), self.notes()
        whole = blocks.joined([found[c.number]._replace(series=np.full(len(found[c.number].step), i))
                               for i, c in enumerate(curves)])
        kind = np.array([places[c.kind] for c in curves], dtype=np.int64)
        if whole.series is None or not len(whole.series):
            return Rows([], [], [], [], [], [], [])
        whole = whole.taken(np.lexsort((whole.series, whole.step, kind[whole.series])))
        order: list[int] = whole.series.tolist()  # type: ignore[union-attr]
        return Rows(whole.step, [curves[i].layer for i in order], [curves[i].name for i in order], whole.value, whole.error,
                    self._noted(whole, notes), self.marked(whole))

    def _noted(self, c: Columns, notes: Mapping[int, str]) -> list[str]:
        return [""] * len(c.step) if c.note is None else [notes.get(n, "") for n in c.note.tolist()]

    def marked(self, c: Columns) -> list[str]:
        """The words of marks."""
        if c.mark is None:
            return [blocks.MARKS[0]] * len(c.step)
        if len(c.mark) and c.mark.max() >= len(blocks.MARKS):
            raise StoreError(f"the run {self._questions.folder} holds the mark {c.mark.max()}, and no row has such a one. It is "
                             f"damaged.")
        return [blocks.MARKS[code] for code in c.mark.tolist()]

    def curve(self, number: int, after: int | None = None) -> Columns:
        if after is not None and not -2 ** 63 <= after < 2 ** 63:
            raise SelectionError(f"no run can hold what was asked for ({after!r}): a step has at most 64 bits.")
        with self.moment():
            return self._contents.rows([c for c in self._contents.curves() if c.number == number], after=after)[number]

    def curves(self, numbers: Iterable[int]) -> dict[int, Columns]:
        with self.moment():
            wanted = set(numbers)
            return self._contents.rows([c for c in self._contents.curves() if c.number in wanted])

    def notes(self) -> dict[int, str]:
        with self.moment():
            return {number: text for number, text, _ in self._contents.table("notes")}

    def steps(self) -> list[int]:
        with self.moment():
            return [row[0] for row in self._contents.table("snapshots")]

    def last(self) -> int | None:
        with self.moment():
            rows = self._contents.extent(self._contents.curves())
            steps = [*(rows or ()), *self.steps(), *(step for _, _, step in self.arrays())]
        return max(steps, default=None)

    def ends(self) -> tuple[int, int] | None:
        with self.moment():
            return self._contents.extent(self._curves("row"))

    def costs(self, steps: Sequence[int] = ()) -> list[tuple[int, float, float, int, str]]:
        with self.moment():
            return [(step, *cost) for step, _, *cost, _ in self._contents.table("snapshots") if not steps or step in steps]

    def arrays(self) -> list[tuple[str, str, int]]:
        return sorted((row[:3] for row in self._table("arrays")), key=operator.itemgetter(2))

    def array(self, layer: str, name: str, step: int | None, data: bool = True) -> tuple[Any, Any, Any, Any, Any] | None:
        with self.moment():
            rows = [row for row in self._contents.arrays(layer, name) if step is None or row[3] == step]
            if not rows:
                return None
            number, _, _, _, *facts, stored, body = max(rows, key=operator.itemgetter(3))
            return *facts, self._contents.data("arrays", number, body) if data and body is not None else None, stored

    def claims(self) -> list[tuple[str, str]]:
        return self._table("claims")

    def figures(self) -> list[tuple[str, str]]:
        return [row[:2] for row in self._table("figures")]

    def figure(self, name: str, kind: str) -> bytes | None:
        with self.moment():
            entry = next((row for row in self._contents.table("figures") if row[1:3] == (name, kind)), None)
            return None if entry is None else self._contents.data("figures", entry[0], entry[3])
