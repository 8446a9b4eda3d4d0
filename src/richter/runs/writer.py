"""Writing of runs: each call is one transaction, and its data are safe from a crash of this process once it has returned."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

from numpy.typing import ArrayLike

from richter.core import WHOLE, Failure, RichterWarning, Row, StoreError
from richter.instrument.snapshot import Snapshot
from richter.runs import format as arrays
from richter.runs import place as lock
from richter.runs.format import plain, plain_text, provenance, whole_step, worded
from richter.runs.place import DATABASE, LOCK, OBJECTS, Lock, explained, gone, identity, regular, sync
from richter.runs.reader import Run
from richter.runs.sqlite import Appender, begun

PATIENCE = 10.0  # seconds that the end of a program waits for a writing thread
SYNC = 30.0  # seconds after which the disk is asked to store what was written


def create(path: str | os.PathLike[str], settings: Any = None, *, seeds: Mapping[str, int] | None = None,
           resume: bool = False, overwrite: bool = False) -> Writer:
    """Create a run in an empty or new folder. If there is a run already, the new one is in the next free folder, ``path-2``, and
    a warning says so. ``resume`` continues the existing run instead (or creates a new one), and ``overwrite`` deletes it.

    >>> run = richter.runs.create("runs/first", Settings(lr=0.1))
    >>> run.scalars(0, loss=2.3); run.finish()
    """
    folder, record = Path(plain_text(os.fspath(path))), plain(settings)
    meta = {"settings": record, "seeds": plain(seeds or {}, "seeds")}
    if "\0" in str(folder):
        raise StoreError(f"{str(folder)!r} cannot be the name of a folder. Choose another.")
    if resume and overwrite:
        raise StoreError(f"resume=True continues the run {folder}, and overwrite=True deletes it. Give one of them.")
    with explained(folder, "made"):
        _check_folder(folder)
        if overwrite:
            _delete(folder)
        elif not resume:
            folder = _free(folder)
        folder.mkdir(parents=True, exist_ok=True)
        here = identity(os.stat(folder))
        held = lock.take(regular(folder / LOCK))
        if held is None and folder.resolve() in _open:  # an interrupt may have left a writer that nobody can reach
            gc.collect()
            held = lock.take(regular(folder / LOCK))
    if held is None and folder.resolve() in _open:
        raise StoreError(f"this process is already writing the run {folder}. Close the earlier Observer or writer first "
                         f"(watch.close()), then go on with resume=True.")
    if held is None:
        raise StoreError(f"another process is writing the run {folder}. A run has one writer; choose another name, or wait.")
    with contextlib.ExitStack() as undo:
        undo.callback(held.release)
        if begun(folder):  # the file is changed only after it is clear that the run continues
            with contextlib.closing(Run(folder)) as old:
                if old.sessions:
                    _check_same(old, record if settings is not None else None)
                    meta = {}
        database = undo.enter_context(contextlib.closing(Appender(folder, here)))
        if identity(os.stat(folder)) != here:
            raise gone(folder, "another run is in its place")
        with explained(folder, "made"):
            database.place.tidy()
        writer = Writer(folder, database, held, meta)
        undo.pop_all()
    return writer


class Writer:
    """The single writer of a run. ``.run`` reads it."""

    def __init__(self, folder: Path, database: Appender, held: Lock, meta: Mapping[str, Any]) -> None:
        self.path, self._database, self._lock, self._process = folder, database, held, os.getpid()
        self.closed, self._synced = False, time.monotonic()
        _hear_exits()
        self._guard = threading.RLock()
        self._begins = time.time(), json.dumps(provenance())
        self._deferred: Callable[[], object] | None = None
        self._labels: Any = None  # class labels of the last snapshot
        if meta:
            self._database.begin(meta, *self._begins)
        self.run = Run(folder)
        self.listener: Callable[[float], None] | None = None  # called with the share of work that is done
        self.observer: object = None  # the Observer that writes its measurements here; at most one
        self._last_progress = 0.0
        _open[folder.resolve()] = self
        # a program that ends normally has finished or failed; a killed one records nothing and counts as interrupted
        self._ending = weakref.finalize(self, _end, database, held, self._guard, os.getpid(), _last_error())

    @property
    def begun(self) -> bool:
        """Whether anything was written. Until then a resumed run is unchanged, with its earlier command and end."""
        return self._database.session is not None and self._deferred is None

    def defer(self, work: Callable[[], object]) -> None:
        """Do this work together with the next write, if there is one."""
        self._deferred = work

    # ------------------------------------------------------------------------------------------------------ writing

    def rows(self, rows: Iterable[Row]) -> None:
        """Write numbers of layers. A step that is written again replaces the old values."""
        written = list(rows)
        with self._transaction("written"):
            self._database.rows("row", written)

    def snapshot(self, snap: Snapshot) -> None:
        """Write all rows of a measurement, its cost and its matrices in one transaction."""
        step, notes = whole_step(snap.step), json.dumps(plain(snap.notes, "notes"))
        rows = [r if r.step == step else replace(r, step=step) for r in snap.rows]
        matrices = [(layer, name, step, arrays.encode(a)) for (layer, name), a in snap.arrays.items()]
        labels = None if snap.labels is None else snap.labels.to_json()  # labels of the probe, equal in every snapshot
        cost = [None if number != number else number for number in (float(snap.seconds), float(snap.passes))]  # SQLite has no NaN
        with self._transaction("written"):
            if labels is not None and labels != self._labels:
                self._put_meta("about", {**self.run.about, "labels": labels})
                self._labels = labels
            self._database.rows("row", rows)
            self._database.put("snapshots", time.time(), *cost, int(snap.examples), notes, number=step)
            self._put_arrays(matrices)

    def scalars(self, step: int, values: Mapping[str, float] | None = None, **more: float) -> None:
        """Write scalars of the user: loss, accuracy, learning rate."""
        scalars = {**(values or {}), **more}
        if "step" in scalars:
            raise StoreError("a scalar cannot be called 'step', which is the name of the step column. Choose another name.")
        plain_numbers = type(step) is int and abs(step) < 2 ** 62 and all(type(v) is float for v in scalars.values())
        with self._writing():
            # fast path, called at every training step; it takes half the time
            if not (plain_numbers and self.begun and self._database.scalars(step, scalars)):
                self.scalar_rows(Row(step, "", name, value) for name, value in scalars.items())

    def scalar_rows(self, rows: Iterable[Row]) -> None:
        """Write scalars of many steps (with empty layers) in one transaction."""
        written = list(rows)
        with self._transaction("written"):
            self._database.rows("scalar", written)

    def failures(self, failures: Iterable[Failure]) -> None:
        """Replace the record of failed measurements and writes, with reasons (``run.failures``)."""
        record = [failure.to_json() for failure in failures]
        with self._transaction("written"):
            self._put_meta("failures", record)

    def array(self, name: str, values: ArrayLike, *, layer: str = WHOLE, step: int = 0, eigen: float | None = None) -> None:
        """Write a spectrum, matrix or kernel. ``eigen``: store a symmetric positive semi-definite matrix by its leading
        eigenpairs, up to this share of its trace (0.9999 makes no visible difference)."""
        self.arrays({name: values}, layer=layer, step=step, eigen=eigen)

    def arrays(self, values: Mapping[str, ArrayLike], *, layer: str = WHOLE, step: int = 0, eigen: float | None = None) -> None:
        """Write several arrays, all or none."""
        encoded = [(layer, name, whole_step(step), arrays.encode(v, eigen)) for name, v in values.items()]
        with self._transaction("written"):
            self._put_arrays(encoded)

    def claim(self, name: str, record: Mapping[str, Any]) -> None:
        """Write the record of a claim."""
        with self._transaction("written"):
            self._database.put("claims", plain_text(name), json.dumps(plain(record, "record")))

    def figure(self, name: str, kind: str, data: bytes) -> None:
        """Write a figure; ``kind`` is svg, pdf or png."""
        if kind not in ("svg", "pdf", "png"):
            raise StoreError(f"a figure of kind {kind!r} cannot be stored: use svg, pdf or png.")
        if not isinstance(data, bytes):
            raise StoreError(f"a figure is stored as bytes, not as {type(data).__name__}.")
        with self._transaction("written"):
            self._database.put("figures", plain_text(name), kind, data=data)

    def progress(self, share: float) -> None:
        """Report the share of work that is done, 0 to 1, for progress bars and lists of runs. Cheap enough for every step."""
        if (now := time.monotonic()) - self._last_progress > 0.5:
            self._last_progress = now
            self.describe(progress=round(share, 4))
            if self.listener is not None:
                self.listener(share)

    def clear(self) -> None:
        """Delete everything except the settings, because the work starts again."""
        self._labels = None
        with self._transaction("cleared"):
            self._database.clear()

    def forget(self, after: int) -> None:
        """Delete the data of later steps, because training went back to a checkpoint."""
        last = whole_step(after)
        with self._transaction("cleared"):
            self._database.forget(last)
            if failures := self.run.failures:
                left = [f if (f.last or 0) <= last else replace(f, last=last) for f in failures if (f.first or 0) <= last]
                self._put_meta("failures", [failure.to_json() for failure in left])

    def describe(self, **facts: Any) -> None:
        """Store facts about the run: model, parameters, examples, ... (``run.about``)."""
        with self._transaction("written"):
            self._put_meta("about", plain({**self.run.about, **facts}))

    def keep_state(self, write: Callable[[Path], object], key: Literal["initial", "previous"] = "initial") -> str:
        """Store the initial state, or the state that the last snapshot hands on, and return its digest: ``write(path)`` writes a
        safetensors file. The previous state is dropped."""
        with self._writing():
            before = self.run.state_name("previous")
            with self._transaction("written"):
                name = self._database.place.keep_object(write)
                self._put_meta(key, name)
            if before is not None and before not in (self.run.state_name("initial"), self.run.state_name("previous")):
                self._database.place.drop_object(before)  # equal states are one object
        return name

    def sync(self) -> None:
        """Make the data written so far survive a power cut, and not only the end of this process. It is called by the first write
        that comes ``SYNC`` seconds after the last call, and when the run is closed."""
        with self._writing():
            self._sync()

    def finish(self, how: str = "finished") -> None:
        """End the run normally. Without this call, a run whose process has ended is shown as interrupted."""
        self.close(how)

    def close(self, how: str | None = None) -> None:
        """Close the run; it can be resumed."""
        with self._guard:
            if os.getpid() != self._process or not self._ending.alive:
                return
            try:
                if how is not None and not self.closed:
                    with self._transaction("ended"):
                        self._database.settle()
                        self._database.end(how)
            finally:
                try:
                    self._let_go()
                except BaseException:  # an interrupt, after which the run must not stay locked
                    self._let_go()
                    raise

    def _let_go(self) -> None:
        """Close everything and release the lock; each step may be repeated."""
        ours, self.closed = False, True
        with contextlib.suppress(StoreError):
            self._database.place.check()
            ours = True
        self.run.close()  # it reopens on the next access
        self._database.close()
        if ours:
            with contextlib.suppress(OSError):
                sync(self.path)
        self._lock.release()
        for folder in [folder for folder, writer in _open.items() if writer is self]:
            del _open[folder]
        self._ending.detach()

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise StoreError(f"the writer of the run {self.path} cannot be copied or pickled: a run has one writer. Hand over its "
                         f"path; other processes read it with richter.runs.load, or write runs of their own.")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            return self.finish()
        self.close(_how(error if error is not None else kind()))

    # ------------------------------------------------------------------------------------------------------- inside

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Prevent writes by other threads inside, and raise an error if data would be lost."""
        global _exit
        if os.getpid() != self._process:  # before taking the guard, which in a child process may belong to a thread of the parent
            raise StoreError(f"the run {self.path} is written by the process that opened it, not by a fork of it. Pass the "
                             f"numbers to that process, or give this process its own run.")
        with self._guard:
            _exit = None
            if self.closed:
                raise StoreError(f"the run {self.path} was closed; richter.runs.create(..., resume=True) opens it again.")
            self._database.check()
            if time.monotonic() - self._synced > SYNC:
                self._sync()
            yield

    def _sync(self) -> None:
        """Ask the disk to store what was written."""
        with explained(self.path, "written"):
            sync(self.path)
        self._synced = time.monotonic()

    @contextlib.contextmanager
    def _transaction(self, done: str) -> Iterator[None]:
        """Context of a transaction; the first one begins the session."""
        with self._writing():
            if self._database.session is None:
                self._database.begin({}, *self._begins)
            if (work := self._deferred) is not None:
                self._deferred = None
                try:
                    work()
                except BaseException:
                    self._deferred = work
                    raise
            with self._database.transaction(done):
                yield

    def _put_meta(self, key: str, value: Any) -> None:
        """Store the value of a key of the run."""
        self._database.put("meta", key, json.dumps(value))

    def _put_arrays(self, encoded: Iterable[tuple[str, str, int, arrays.Encoded]]) -> None:
        """Write arrays, large ones as separate files."""
        encoded = list(encoded)
        text = {key: plain_text(key) for key in dict.fromkeys(key for layer, name, _, _ in encoded for key in (layer, name))}
        for layer, name, step, e in encoded:
            large = len(e.data) >= arrays.LARGE
            stored = self._database.place.keep_object(partial(arrays.to_file, e=e)) if large else None
            self._database.put("arrays", text[layer], text[name], step, e.form, e.dtype, json.dumps(e.shape), stored,
                               data=None if large else e.data)


_open: weakref.WeakValueDictionary[Path, Writer] = weakref.WeakValueDictionary()  # writers of this process


def _last_error() -> BaseException | None:
    """Return the error that the interpreter last reported as unhandled; notebooks and prompts store it."""
    return getattr(sys, "last_value", None)


def _how(error: BaseException) -> str:
    """Return the status for an error: ``sys.exit()`` and ``sys.exit(0)`` count as finished."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return "finished"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {worded(error)}"[:500]


_exit: SystemExit | None = None  # the exit by which the program is ending, if known


def _hear_exits() -> None:
    """Record calls of ``sys.exit``. The interpreter stores unhandled errors but not ``sys.exit("diverged")``. A recorded exit is
    dropped when a run is written after it, because something has then caught it."""
    if hasattr(sys.exit, "heard"):
        return
    plain_exit = sys.exit

    @wraps(plain_exit)
    def heard_exit(*status: Any) -> NoReturn:
        global _exit
        _exit = SystemExit(*status)
        plain_exit(*status)

    heard_exit.heard = True  # type: ignore[attr-defined]
    sys.exit = heard_exit


def _end(database: Appender, held: Lock, guard: threading.RLock, process: int, earlier: BaseException | None) -> None:
    """Record how a run ended, as far as known, when its writer is deleted or the process ends."""
    if os.getpid() != process:  # a forked child; the run belongs to its parent
        return
    error = _exit or _last_error()
    how = "finished" if error is None or error is earlier else _how(error)
    if guard.acquire(timeout=PATIENCE):  # a daemon thread may still be writing
        if database.session is not None:
            with contextlib.suppress(StoreError), database.transaction("ended"):
                database.end(how)
        database.close()
        guard.release()
    held.release()


def _check_folder(folder: Path) -> None:
    """Raise an error if the folder is a file, or holds other things than a run."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file; a run is a folder. Choose another name.")
    if _others(folder) and not (folder / DATABASE).exists():
        raise StoreError(f"the folder {folder} contains other files and no run. A run needs its own folder: choose a new "
                         f"name.")


def _others(folder: Path) -> list[str]:
    """Names of files in a folder, but those that are left by a power cut, or a kill while the run was made."""
    left = f"{DATABASE}-", f".{DATABASE}-"
    return sorted(f.name for f in folder.iterdir() if f.name not in (LOCK, OBJECTS) and not f.name.startswith(left)
                  ) if folder.exists() else []


def _free(folder: Path) -> Path:
    """Return the folder, or if it is a run the first of folder-2, folder-3, ... that is free, with a warning."""
    candidate, i = folder, 1
    while _taken(candidate):
        i += 1
        candidate = folder.with_name(f"{folder.name}-{i}")
    if candidate != folder:
        warnings.warn(f"there is already a run in {folder}: this one is written to {candidate}. Pass resume=True to continue the "
                      f"earlier run, or overwrite=True to delete it.", RichterWarning, stacklevel=_outside())
    return candidate


def _taken(folder: Path) -> bool:
    """Whether a folder holds a run, or one that is being made. One whose process ended before its first write does not count."""
    if lock.held(folder / LOCK):
        return True
    if not begun(folder):
        return bool(_others(folder))
    with contextlib.closing(Run(folder)) as old:
        return bool(old.sessions)


def _outside() -> int:
    """Stack level of the first caller outside this package."""
    package, frame, level = str(Path(__file__).parents[1]), sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level


def _delete(folder: Path) -> None:
    """Delete the run in a folder, if there is one. A writer of this process is closed first."""
    if (earlier := _open.get(folder.resolve())) is not None and lock.held(folder / LOCK):
        earlier.close()
    if not (folder / DATABASE).exists():
        return
    if others := [name for name in _others(folder) if name != DATABASE]:
        raise StoreError(f"the folder {folder} holds other files beside its run ({', '.join(others[:5])}), which overwrite=True "
                         f"would delete. Move them, or choose another name.")
    if folder.is_symlink():
        raise StoreError(f"{folder} is a link, and nothing is deleted behind a link. Give the folder itself, or another name.")
    held = lock.take(regular(folder / LOCK))
    if held is None:
        raise StoreError(f"another process is writing the run {folder}, so it is not deleted. Choose another name, or wait.")
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        folder.rename(aside / folder.name)  # at once, so that no reader sees half of a run
    finally:
        held.release()
        shutil.rmtree(aside, ignore_errors=True)


def _check_same(old: Run, settings: Any) -> None:
    """Raise an error unless the settings are equal."""
    if settings is not None and json.dumps(old.settings, sort_keys=True) != json.dumps(settings, sort_keys=True):  # NaN is NaN
        raise StoreError(f"the run {old.path} was begun with other settings: {_difference(old.settings, settings)}. A resumed "
                         f"run keeps its settings; choose another name for the new ones.")


def _difference(old: Any, new: Any) -> str:
    """Sentence about the settings that differ."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return f"{old!r}, not {new!r}"
    other = [f"{k} {old.get(k)!r}, not {new.get(k)!r}" for k in {**old, **new} if old.get(k) != new.get(k)]
    return "; ".join(other)
