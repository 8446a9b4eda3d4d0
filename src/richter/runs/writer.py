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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.core import WHOLE, Row, StoreError
from richter.instrument.snapshot import Snapshot
from richter.runs import arrays, lock
from richter.runs.format import DATABASE, LOCK, OBJECTS, RECENT, SETTLE, begun, close, explained, writable
from richter.runs.provenance import plain, provenance
from richter.runs.reader import Run

ENDED = "UPDATE sessions SET ended = ?, how = ? WHERE id = ?"


def create(path: str | os.PathLike[str], settings: Any = None, *, seeds: Mapping[str, int] | None = None,
           resume: bool = False) -> Writer:
    """A new run in an empty or new folder; with ``resume`` the one that is there goes on (or a new one begins).

    >>> run = richter.runs.create("runs/first", Settings(lr=0.1))
    >>> run.scalars(0, loss=2.3); run.finish()
    """
    folder, kept = Path(_text(os.fspath(path))), plain(settings)
    meta = {"settings": kept, "seeds": plain(seeds or {}, "seeds")}
    if "\0" in str(folder):
        raise StoreError(f"{str(folder)!r} cannot be the name of a folder. Choose another.")
    with explained(folder, "made"):
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"{folder} is a file; a run is a folder. Choose another name.")
        others = folder.exists() and any(f.name not in (LOCK, OBJECTS) for f in folder.iterdir())
        if others and not (folder / DATABASE).exists():
            raise StoreError(f"the folder {folder} holds other files and no run. Runs get a folder of their own: choose a new "
                             f"name.")
        folder.mkdir(parents=True, exist_ok=True)
        handle = lock.take(folder / LOCK)
    if handle is None and folder.resolve() in _open:
        raise StoreError(f"this process is already writing the run {folder}. Close the earlier Observer or writer first "
                         f"(watch.close()), then go on with resume=True.")
    if handle is None:
        raise StoreError(f"another process is writing the run {folder}. A run has one writer; choose another name, or wait.")
    with contextlib.ExitStack() as undo:
        undo.callback(lock.let_go, handle)
        if begun(folder):  # nothing in the file is changed before it is clear that it goes on
            with contextlib.closing(Run(folder)) as old:
                if old.sessions:
                    _check_same(old, resume, kept if settings is not None else None)
                    meta = {}
        database = writable(folder)
        undo.callback(database.close)
        with explained(folder, "made"):
            arrays.tidy(folder / OBJECTS)
        writer = Writer(folder, database, handle, meta)
        undo.pop_all()
    return writer


class Writer:
    """The one writer of a run. ``.run`` reads it back."""

    def __init__(self, folder: Path, database: sqlite3.Connection, handle: int, meta: Mapping[str, Any]) -> None:
        self.path, self._database, self._handle, self._process = folder, database, handle, os.getpid()
        self._guard = threading.RLock()
        self._series: dict[tuple[str, str, str], int] = {}
        self._notes: dict[str, int] = {"": 0}
        self._recent = int(database.execute("SELECT count(*) FROM recent").fetchone()[0])
        with self._transaction("begun") as db:
            self._put(db, meta)
            self._session = db.execute("INSERT INTO sessions (begun, provenance) VALUES (?, ?)",
                                       (time.time(), json.dumps(provenance()))).lastrowid
        self.run = Run(folder)
        self.listener: Callable[[float], None] | None = None  # hears how much is done
        self.observer: object = None  # who writes its measurements here: one Observer at most
        self._told = 0.0
        _open[folder.resolve()] = self
        # a program that ends without a word has finished, or failed; one that is killed says nothing and was interrupted
        self._ending = weakref.finalize(self, _end, database, handle, self._session, os.getpid(), _last_error())

    @property
    def closed(self) -> bool:
        return self._handle < 0

    # ------------------------------------------------------------------------------------------------------ writing

    def rows(self, rows: Iterable[Row]) -> None:
        """Numbers of layers. A step that is written again replaces what was there."""
        found = [(r.layer, r.measure, r.step, r.value, r.error, r.note) for r in rows]
        with self._transaction("written") as db:
            self._write(db, "row", found)

    def snapshot(self, snap: Snapshot) -> None:
        """All rows of a measurement, what it cost and its matrices, in one transaction."""
        step, notes = _step(snap.step), json.dumps(plain(snap.notes, "notes"))
        rows = [(r.layer, r.measure, step, r.value, r.error, r.note) for r in snap.rows]
        kept = [(layer, name, step, arrays.encode(_array(a))) for (layer, name), a in snap.arrays.items()]
        with self._transaction("written") as db:
            self._write(db, "row", rows)
            db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?, ?)",
                       (step, time.time(), float(snap.seconds), float(snap.passes), int(snap.examples), notes))
            self._put_arrays(db, kept)

    def scalars(self, step: int, values: Mapping[str, float] | None = None, **more: float) -> None:
        """The user's own curves: loss, accuracy, learning rate."""
        given = {**(values or {}), **more}
        if "step" in given:
            raise StoreError("a scalar cannot be called 'step': that is the column of its steps. Choose another name.")
        if not self._quickly(step, given):
            with self._transaction("written") as db:
                self._write(db, "scalar", [("", name, step, v, math.nan, "") for name, v in given.items()])

    def _quickly(self, step: int, given: Mapping[str, float]) -> bool:
        """The same in one statement, which is a transaction of its own, for names that are known: it is called at every step of
        training, and takes half the time."""
        numbers = [self._series.get(("scalar", "", name)) for name in given]
        if not given or None in numbers or self._recent + len(given) >= RECENT or self.closed or os.getpid() != self._process \
                or type(step) is not int or abs(step) >= 2 ** 62 or any(type(v) is not float for v in given.values()):
            return False
        with self._guard, explained(self.path, "written"):
            self._database.execute("INSERT INTO recent (series, step, value) VALUES " + ", ".join(["(?, ?, ?)"] * len(given)),
                                   [v for pair in zip(numbers, given.values(), strict=True) for v in (pair[0], step, pair[1])])
            self._recent += len(given)
        return True

    def array(self, name: str, values: ArrayLike, *, layer: str = WHOLE, step: int = 0, eigen: float | None = None) -> None:
        """A spectrum, matrix or kernel. ``eigen``: keep a symmetric positive semi-definite matrix by its leading
        eigenpairs, up to that share of its trace (0.9999 loses nothing that a picture shows)."""
        self.arrays({name: values}, layer=layer, step=step, eigen=eigen)

    def arrays(self, values: Mapping[str, ArrayLike], *, layer: str = WHOLE, step: int = 0, eigen: float | None = None) -> None:
        """Several at once, all or none."""
        kept = [(layer, name, _step(step), arrays.encode(_array(v), eigen)) for name, v in values.items()]
        with self._transaction("written") as db:
            self._put_arrays(db, kept)

    def claim(self, name: str, record: Mapping[str, Any]) -> None:
        with self._transaction("written") as db:
            db.execute("INSERT OR REPLACE INTO claims VALUES (?, ?)", (_text(name), json.dumps(plain(record, "record"))))

    def figure(self, name: str, kind: str, data: bytes) -> None:
        """A picture: ``kind`` is svg, pdf or png."""
        if kind not in ("svg", "pdf", "png"):
            raise StoreError(f"a figure of kind {kind!r} cannot be kept: svg, pdf or png.")
        if not isinstance(data, bytes):
            raise StoreError(f"a figure is kept as bytes, not as {type(data).__name__}.")
        with self._transaction("written") as db:
            db.execute("INSERT OR REPLACE INTO figures (name, kind, bytes) VALUES (?, ?, ?)", (_text(name), kind, data))

    def progress(self, share: float) -> None:
        """How much is done, 0 to 1: for bars and lists of runs. Cheap to call at every step."""
        if (now := time.monotonic()) - self._told > 0.5:
            self._told = now
            self.describe(progress=round(share, 4))
            if self.listener is not None:
                self.listener(share)

    def clear(self) -> None:
        """Forget everything but the settings: the work is done anew."""
        with self._transaction("cleared") as db:
            for table in ("rows", "recent", "series", "notes", "snapshots", "arrays", "claims", "figures"):
                db.execute(f"DELETE FROM {table}")
            db.execute("DELETE FROM meta WHERE key IN ('initial', 'about')")
            self._series.clear()
            self._notes, self._recent = {"": 0}, 0

    def forget(self, after: int) -> None:
        """Forget what was written for later steps: training went back to a checkpoint, and they belong to another future."""
        with self._transaction("cleared") as db:
            for table in ("rows", "recent", "snapshots", "arrays"):
                db.execute(f"DELETE FROM {table} WHERE step > ?", (_step(after),))

    def describe(self, **facts: Any) -> None:
        """What the run is of: model, parameters, examples, ... (``run.about``)."""
        with self._transaction("written") as db:
            self._put(db, {"about": plain({**self.run.about, **facts})})

    def keep_state(self, write: Callable[[Path], object]) -> str:
        """The initial state, once: ``write(path)`` puts a safetensors file there. Returns its digest."""
        with self._transaction("written") as db:
            name = arrays.keep_object(self.path / OBJECTS, write)
            self._put(db, {"initial": name})
        return name

    def finish(self, how: str = "finished") -> None:
        """The end of the run, as it should be. Without it, a run whose process has gone is shown as interrupted."""
        self.close(how)

    def close(self, how: str | None = None) -> None:
        """Let the run go; it can be resumed."""
        with self._guard:
            if os.getpid() != self._process or self._ending.detach() is None:
                return
            try:
                if how is not None:
                    with self._transaction("ended") as db:
                        self._settle(db)
                        db.execute(ENDED, (time.time(), how.encode("utf-8", "replace").decode(), self._session))
            finally:
                self.run.close()  # it opens again when it is asked
                close(self._database)
                lock.let_go(self._handle)
                self._handle = -1
                _open.pop(self.path.resolve(), None)

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
            if os.getpid() != self._process:
                raise StoreError(f"the run {self.path} is written by the process that opened it, not by one that was forked from "
                                 f"it. Hand the numbers over, or give this process a run of its own.")
            before = self._recent
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                self._series.clear()  # what was numbered in this transaction is gone
                self._notes = {"": 0}
                self._recent = before
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    def _put(self, db: sqlite3.Connection, values: Mapping[str, Any]) -> None:
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", [(k, json.dumps(v)) for k, v in values.items()])

    def _write(self, db: sqlite3.Connection, kind: str, rows: Sequence[tuple[str, str, Any, float, float, str]]) -> None:
        series, notes, index, found = self._series, self._notes, operator.index, []
        try:
            for layer, name, step, value, error, note in rows:
                found.append((series.get((kind, layer, name)) or self._number(db, kind, layer, name), index(step),
                              float(value), float(error), (notes.get(note) or self._note(db, note)) if note else None))
            db.executemany("INSERT INTO recent (series, step, value, error, note) VALUES (?, ?, ?, ?, ?)", found)
        except (TypeError, ValueError, OverflowError, RuntimeError) as why:
            for _, _, step, *_ in rows:
                _step(step)
            raise StoreError(f"{name!r} of layer {layer!r} at step {step}: {value!r} with the standard error {error!r} cannot be "
                             f"stored ({why}). Rows hold numbers.") from why
        self._recent += len(found)
        if self._recent >= RECENT:
            self._settle(db)

    def _settle(self, db: sqlite3.Connection) -> None:
        """Move what was appended to where each curve lies in one piece."""
        db.execute(SETTLE)
        db.execute("DELETE FROM recent")
        self._recent = 0

    def _number(self, db: sqlite3.Connection, kind: str, layer: str, name: str) -> int:
        key = kind, _text(layer), _text(name)
        if key not in self._series:
            db.execute("INSERT OR IGNORE INTO series (kind, layer, name) VALUES (?, ?, ?)", key)
            (self._series[key],) = db.execute("SELECT id FROM series WHERE kind = ? AND layer = ? AND name = ?", key).fetchone()
        return self._series[key]

    def _note(self, db: sqlite3.Connection, text: str) -> int:
        if text not in self._notes:
            db.execute("INSERT OR IGNORE INTO notes (text) VALUES (?)", (_text(text),))
            (self._notes[text],) = db.execute("SELECT id FROM notes WHERE text = ?", (text,)).fetchone()
        return self._notes[text]

    def _put_arrays(self, db: sqlite3.Connection, found: Iterable[tuple[str, str, int, arrays.Encoded]]) -> None:
        """Large ones as files of their own."""
        for layer, name, step, e in found:
            large = len(e.data) >= arrays.LARGE
            stored = arrays.keep_object(self.path / OBJECTS, partial(arrays.to_file, e=e)) if large else None
            db.execute("INSERT OR REPLACE INTO arrays (layer, name, step, form, dtype, shape, bytes, object) "
                       "VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (_text(layer), _text(name), step, e.form, e.dtype,
                                                           json.dumps(e.shape), None if large else e.data, stored))


_open: weakref.WeakValueDictionary[Path, Writer] = weakref.WeakValueDictionary()  # what this process writes


def _last_error() -> BaseException | None:
    """What the interpreter last reported as unhandled; notebooks and prompts keep it."""
    return getattr(sys, "last_value", None)


def _end(database: sqlite3.Connection, handle: int, session: int | None, process: int, earlier: BaseException | None) -> None:
    """When the writer or the whole process goes: how it ended, as far as can be told."""
    if os.getpid() != process:  # a child that was forked; the run is its parent's
        return
    error = _last_error()
    how = "finished" if error is None or error is earlier else "interrupted" if isinstance(error, KeyboardInterrupt) else \
        f"failed: {type(error).__name__}: {error}"[:500]
    with contextlib.suppress(sqlite3.Error):
        database.execute(ENDED, (time.time(), how.encode("utf-8", "replace").decode(), session))
    close(database)
    lock.let_go(handle)


def _check_same(old: Run, resume: bool, settings: Any) -> None:
    """A run that was begun goes on only if that is asked for, and only with its own settings."""
    if not resume:
        raise StoreError(f"there is already a run in {old.path}. Pass resume=True to continue it, or choose another name.")
    if settings is not None and json.dumps(old.settings, sort_keys=True) != json.dumps(settings, sort_keys=True):  # NaN is NaN
        raise StoreError(f"the run {old.path} was begun with other settings: {_difference(old.settings, settings)}. A resumed "
                         f"run keeps its settings; choose another name for these.")


def _step(step: Any) -> int:
    try:
        found = operator.index(step)
    except TypeError:
        raise StoreError(f"step={step!r}: what is written to a run has a whole number as its step.") from None
    if not -2 ** 63 <= found < 2 ** 63:
        raise StoreError(f"step={step!r}: a step has at most 64 bits.")
    return found


def _text(text: Any) -> str:
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError):
        raise StoreError(f"{text!r}: names and notes of a run are text, of characters that UTF-8 has.") from None
    return str(text)


def _array(values: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as why:
        raise StoreError(f"a {type(values).__name__} that is no array of numbers cannot be stored as one: {why}.") from why


def _difference(old: Any, new: Any) -> str:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return f"{old!r}, not {new!r}"
    other = [f"{k} {old.get(k)!r}, not {new.get(k)!r}" for k in {**old, **new} if old.get(k) != new.get(k)]
    return "; ".join(other)
