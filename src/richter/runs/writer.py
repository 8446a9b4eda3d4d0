"""Writing a run: each call is one transaction, and what returned is safe from a crash of this process."""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.core import WHOLE, Row, StoreError
from richter.runs import arrays, lock
from richter.runs.format import DATABASE, LOCK, OBJECTS, RECENT, SETTLE, explained, writable
from richter.runs.provenance import plain, provenance
from richter.runs.reader import Run
from richter.snapshot import Snapshot

ENDED = "UPDATE sessions SET ended = ?, how = ? WHERE id = ?"
EIGEN = 0.9999  # the share of the trace that a matrix kept by eigenpairs has by default


def create(path: str | os.PathLike[str], settings: Any = None, *, seeds: Mapping[str, int] | None = None,
           resume: bool = False) -> Writer:
    """A new run in an empty or new folder; with ``resume`` the one that is there goes on (or a new one begins).

    >>> run = richter.runs.create("runs/first", Settings(lr=0.1))
    >>> run.scalars(0, loss=2.3); run.finish()
    """
    folder = Path(path)
    exists = (folder / DATABASE).exists()
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file; a run is a folder. Choose another name.")
    if not exists and folder.is_dir() and any(f.name not in (LOCK, OBJECTS) for f in folder.iterdir()):
        raise StoreError(f"the folder {folder} holds other files and no run. Runs get a folder of their own: choose a new name.")
    with explained(folder, "made"):
        folder.mkdir(parents=True, exist_ok=True)
        handle = lock.take(folder / LOCK)
    if handle is None:
        raise StoreError(f"another process is writing the run {folder}. A run has one writer; choose another name, or wait.")
    try:
        database = writable(folder)
        fresh = not database.execute("SELECT count(*) FROM sessions").fetchone()[0]
        if not fresh and not resume:
            database.close()
            raise StoreError(f"there is already a run in {folder}. Pass resume=True to continue it, or choose another name.")
        kept = plain(settings)
        if not fresh and settings is not None and (old := Run(folder).settings) != kept:
            database.close()
            raise StoreError(f"the run {folder} was begun with other settings: {_difference(old, kept)}. A resumed run keeps its "
                             f"settings; choose another name for these.")
    except BaseException:
        os.close(handle)
        raise
    meta = {"settings": kept, "settings_class": type(settings).__name__, "seeds": dict(seeds or {})}
    return Writer(folder, database, handle, meta if fresh else {})


class Writer:
    """The one writer of a run. ``.run`` reads it back."""

    def __init__(self, folder: Path, database: sqlite3.Connection, handle: int, meta: Mapping[str, Any]) -> None:
        self.path, self._database, self._handle = folder, database, handle
        self._guard = threading.RLock()
        self._series: dict[tuple[str, str, str], int] = {}
        self._notes: dict[str, int] = {"": 0}
        self._recent = int(database.execute("SELECT count(*) FROM recent").fetchone()[0])
        with self._transaction("begun") as db:
            self._put(db, meta)
            self._session = db.execute("INSERT INTO sessions (begun, provenance) VALUES (?, ?)",
                                       (time.time(), json.dumps(provenance()))).lastrowid
        self.run = Run(folder)
        # a program that ends without a word has finished, or failed; one that is killed says nothing and was interrupted
        self._ending = weakref.finalize(self, _end, database, handle, self._session, os.getpid())

    # ------------------------------------------------------------------------------------------------------ writing

    def rows(self, rows: Iterable[Row]) -> None:
        """Numbers of layers. A step that is written again replaces what was there."""
        rows = list(rows)
        with self._transaction("written") as db:
            self._write(db, "row", ((r.layer, r.measure, _step(r.step), r.value, r.error, r.note) for r in rows))

    def snapshot(self, snap: Snapshot) -> None:
        """All rows of a measurement, what it cost and its matrices, in one transaction."""
        step = _step(snap.step)
        kept = [(layer, name, self._encoded(a, EIGEN)) for (layer, name), a in snap.arrays.items()]
        with self._transaction("written") as db:
            self._write(db, "row", ((r.layer, r.measure, step, r.value, r.error, r.note) for r in snap.rows))
            db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?, ?)",
                       (step, time.time(), snap.seconds, snap.passes, snap.examples, json.dumps(dict(snap.notes))))
            for layer, name, (e, stored) in kept:
                self._put_array(db, layer, name, step, e, stored)

    def scalars(self, step: int, values: Mapping[str, float] | None = None, **more: float) -> None:
        """The user's own curves: loss, accuracy, learning rate."""
        found = {**(values or {}), **more}
        with self._transaction("written") as db:
            self._write(db, "scalar", (("", name, _step(step), float(v), math.nan, "") for name, v in found.items()))

    def array(self, name: str, values: ArrayLike, *, layer: str = WHOLE, step: int = 0, eigen: float | None = None) -> None:
        """A spectrum, matrix or kernel. ``eigen``: keep a symmetric positive semi-definite matrix by its leading
        eigenpairs, up to that share of its trace (0.9999 loses nothing that a picture shows)."""
        self.arrays({name: values}, layer=layer, step=step, eigen=eigen)

    def arrays(self, values: Mapping[str, ArrayLike], *, layer: str = WHOLE, step: int = 0, eigen: float | None = None) -> None:
        """Several at once, all or none."""
        kept = {name: self._encoded(np.asarray(v), eigen) for name, v in values.items()}
        with self._transaction("written") as db:
            for name, (e, stored) in kept.items():
                self._put_array(db, layer, name, _step(step), e, stored)

    def claim(self, name: str, record: Mapping[str, Any]) -> None:
        with self._transaction("written") as db:
            db.execute("INSERT OR REPLACE INTO claims VALUES (?, ?)", (name, json.dumps(plain(record))))

    def figure(self, name: str, kind: str, data: bytes) -> None:
        """A picture: ``kind`` is svg, pdf or png."""
        if kind not in ("svg", "pdf", "png"):
            raise StoreError(f"a figure of kind {kind!r} cannot be kept: svg, pdf or png.")
        with self._transaction("written") as db:
            db.execute("INSERT OR REPLACE INTO figures (name, kind, bytes) VALUES (?, ?, ?)", (name, kind, data))

    def describe(self, **facts: Any) -> None:
        """What the run is of: model, parameters, examples, ... (``run.about``)."""
        with self._transaction("written") as db:
            self._put(db, {"about": plain({**self.run.about, **facts})})

    def keep_state(self, write: Callable[[Path], object]) -> str:
        """The initial state, once: ``write(path)`` puts a safetensors file there. Returns its digest."""
        with explained(self.path, "written"):
            name = arrays.keep_object(self.path / OBJECTS, write)
        with self._transaction("written") as db:
            self._put(db, {"initial": name})
        return name

    def finish(self, how: str = "finished") -> None:
        """The end of the run, as it should be. Without it, a run whose process has gone is shown as interrupted."""
        self.close(how)

    def close(self, how: str | None = None) -> None:
        """Let the run go; it can be resumed."""
        with self._guard:
            if self._ending.detach() is None:
                return
            try:
                if how is not None:
                    with self._transaction("ended") as db:
                        self._settle(db)
                        db.execute(ENDED, (time.time(), how, self._session))
            finally:
                self._database.close()
                os.close(self._handle)
                self._handle = -1

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            return self.finish()
        self.close("interrupted" if issubclass(kind, KeyboardInterrupt) else f"failed: {kind.__name__}: {error}"[:500])

    # ------------------------------------------------------------------------------------------------------- inside

    @contextlib.contextmanager
    def _transaction(self, done: str) -> Iterator[sqlite3.Connection]:
        with self._guard, explained(self.path, done):
            if self._handle < 0:
                raise StoreError(f"the run {self.path} was closed; richter.runs.create(..., resume=True) opens it again.")
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                self._series.clear()  # what was numbered in this transaction is gone
                self._notes = {"": 0}
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    def _put(self, db: sqlite3.Connection, values: Mapping[str, Any]) -> None:
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", [(k, json.dumps(v)) for k, v in values.items()])

    def _write(self, db: sqlite3.Connection, kind: str, rows: Iterable[tuple[str, str, int, float, float, str]]) -> None:
        found = [(self._number(db, kind, layer, name), step, value, error, self._note(db, note) or None)
                 for layer, name, step, value, error, note in rows]
        db.executemany("INSERT INTO recent (series, step, value, error, note) VALUES (?, ?, ?, ?, ?)", found)
        self._recent += len(found)
        if self._recent >= RECENT:
            self._settle(db)

    def _settle(self, db: sqlite3.Connection) -> None:
        """Move what was appended to where each curve lies in one piece."""
        db.execute(SETTLE)
        db.execute("DELETE FROM recent")
        self._recent = 0

    def _number(self, db: sqlite3.Connection, kind: str, layer: str, name: str) -> int:
        key = kind, layer, name
        if key not in self._series:
            db.execute("INSERT OR IGNORE INTO series (kind, layer, name) VALUES (?, ?, ?)", key)
            (self._series[key],) = db.execute("SELECT id FROM series WHERE kind = ? AND layer = ? AND name = ?", key).fetchone()
        return self._series[key]

    def _note(self, db: sqlite3.Connection, text: str) -> int:
        if text not in self._notes:
            db.execute("INSERT OR IGNORE INTO notes (text) VALUES (?)", (text,))
            (self._notes[text],) = db.execute("SELECT id FROM notes WHERE text = ?", (text,)).fetchone()
        return self._notes[text]

    def _encoded(self, a: NDArray[Any], eigen: float | None) -> tuple[arrays.Encoded, str | None]:
        """With the name of its file, if it is large enough to have one."""
        e = arrays.encode(a, eigen)
        if len(e.data) < arrays.LARGE:
            return e, None
        with explained(self.path, "written"):
            return e, arrays.keep_object(self.path / OBJECTS, lambda path: arrays.to_file(path, e))

    def _put_array(self, db: sqlite3.Connection, layer: str, name: str, step: int, e: arrays.Encoded, stored: str | None) -> None:
        db.execute("INSERT OR REPLACE INTO arrays (layer, name, step, form, dtype, shape, bytes, object) "
                   "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                   (layer, name, step, e.form, e.dtype, json.dumps(e.shape), None if stored else e.data, stored))


def _end(database: sqlite3.Connection, handle: int, session: int | None, process: int) -> None:
    """When the writer or the whole process goes: how it ended, as far as can be told."""
    if os.getpid() != process:  # a child that was forked; the run is its parent's
        return
    error = getattr(sys, "last_value", None)
    how = "finished" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else \
        f"failed: {type(error).__name__}: {error}"[:500]
    with contextlib.suppress(sqlite3.Error):
        database.execute(ENDED, (time.time(), how, session))
    database.close()
    os.close(handle)


def _step(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise StoreError(f"step={step!r}: what is written to a run has a whole number as its step.") from None


def _difference(old: Any, new: Any) -> str:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return f"{old!r}, not {new!r}"
    other = [f"{k} {old.get(k)!r}, not {new.get(k)!r}" for k in {**old, **new} if old.get(k) != new.get(k)]
    return "; ".join(other)
