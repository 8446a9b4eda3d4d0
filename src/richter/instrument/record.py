"""The record of an Observer (scalars, snapshots and failures, in memory and in its run), and how its run is opened."""

from __future__ import annotations

import atexit
import contextlib
import errno
import math
import operator
import os
import re
import sqlite3
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from numbers import Integral
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from richter.core import (
    DisturbedError,
    DivergedError,
    Failure,
    MemoryBudgetError,
    RichterWarning,
    Row,
    SelectionError,
    StoreError,
)
from richter.core.values import DEVICE_LOST, NO_MEMORY
from richter.instrument.snapshot import Series, Snapshot
from richter.runs import Writer, create
from richter.runs.format import plain_text, whole_step
from richter.runs.place import refused_by_disk

if TYPE_CHECKING:
    import pandas

    from richter.instrument.observe import Observer

BLOCK = 10_000  # scalars that are written at once when the disk has room again
PATIENCE = 20  # a refused write is tried again after so many times the seconds that it took: it stays below 5 % of the time
EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EROFS}
PACKAGE = str(Path(__file__).parents[1])


# -------------------------------------------------------------------------------------------------------------- record

class Record:
    """The scalars and failures of an Observer, and all that its run has not taken yet. The caller holds a lock."""

    def __init__(self, writer: Writer | None) -> None:
        self.writer = writer
        self.failures: list[Failure] = [] if writer is None else writer.run.failures
        self.resumed = None if writer is None else writer.run.last  # the last step of a run that is resumed
        self.calls: list[dict[str, float]] = []  # scalars, if there is no run
        self.rows: list[Row] = []  # scalars that wait for the disk
        self.snapshots: list[Snapshot] = []  # snapshots that wait
        self._state: dict[str, Tensor] = {}  # what the last snapshot that waits hands on to the next measurement
        self._untold = False  # are there failures that the run does not know?
        self._again = 0.0  # when writing may be tried again
        self._warned: set[str] = set()
        self._callers: set[int] = set()  # threads

    # ------------------------------------------------------------------------------------------------------- writing

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Keep scalars in the run, or in memory if there is none. If the disk refuses them, they wait, and an error is raised."""
        if self.writer is None:
            self.calls.append({"step": step, **values})
            return
        begun = time.monotonic()
        try:
            if self.rows:  # behind those that wait: a later value of a step replaces an earlier one
                self._wait(rows=_rows(step, values))
            else:
                self.writer.scalars(step, values)
        except StoreError as why:
            if refused_by_disk(why) or self.writer.closed:
                self._wait(rows=_rows(step, values))
                self._again = time.monotonic() + PATIENCE * (time.monotonic() - begun)
            raise
        if self._waits and time.monotonic() >= self._again:
            self.flush()

    def snapshot(self, snap: Snapshot, state: dict[str, Tensor]) -> None:
        """Write a snapshot, and the ``state`` that it hands on to the next one. If the disk refuses it, it waits without its
        matrices, which may be large; they are drawn again with the next measurement."""
        if self.writer is None:
            return
        try:
            if self.snapshots:
                self._wait(snapshots=[replace(snap, arrays={})], state=state)
            else:
                self.writer.snapshot(snap)
                self._hand_on(self.writer, state)
        except StoreError as why:
            if refused_by_disk(why):
                self._wait(snapshots=[replace(snap, arrays={})], state=state)
            raise
        if self._waits:
            self.flush()

    def flush(self) -> None:
        """Write everything that waits, the oldest first. What is refused keeps waiting, and an error is raised."""
        if self.writer is None:
            return
        begun = time.monotonic()
        try:
            while self.rows:
                self.writer.scalar_rows(self.rows[:BLOCK])
                del self.rows[:BLOCK]
            while self.snapshots:
                self.writer.snapshot(self.snapshots[0])
                del self.snapshots[0]
            self._hand_on(self.writer, self._state)
            if self._untold:
                self.writer.failures(self.failures)
                self._untold = False
            atexit.unregister(self._last_try)
        finally:
            now = time.monotonic()
            self._again = now + PATIENCE * (now - begun) if self._waits else 0.0

    @property
    def _waits(self) -> bool:
        """Return whether anything waits to be written."""
        return bool(self.rows or self.snapshots or self._state or self._untold)

    def _wait(self, rows: Sequence[Row] = (), snapshots: Sequence[Snapshot] = (), state: dict[str, Tensor] | None = None) -> None:
        """Keep rows, snapshots or a state until the disk takes them."""
        if not self.rows and not self.snapshots:
            atexit.register(self._last_try)
        self.rows += rows
        self.snapshots += snapshots
        self._state = self._state if state is None else state

    def _hand_on(self, writer: Writer, state: dict[str, Tensor]) -> None:
        """Store the state that the next measurement reads."""
        if state:
            writer.keep_state(lambda path: save_file(state, path), "previous")
        self._state = {}

    def _last_try(self) -> None:
        """Write what waits when the process ends without a word."""
        if self.writer is not None and not self.writer.closed:
            with contextlib.suppress(Exception):
                self.flush()

    # ------------------------------------------------------------------------------------------------------ warnings

    def failed(self, step: Any, what: str, why: BaseException) -> None:
        """Note a failure, here and in the run; warn, if its reason has not been seen before."""
        reason = f"{what} ({type(why).__name__}: {why})"
        note_failure(self.failures, step, reason)
        self._untold = self.writer is not None
        if self.writer is not None and not self.writer.closed and not refused_by_disk(why) and time.monotonic() >= self._again:
            with contextlib.suppress(Exception):  # then it waits
                self.flush()
        self._warn(alike(reason), f"step {step}: {reason}. Training goes on, and it is tried again when the next measurement is "
                                  f"due; watch.failures has what failed. With on_error='raise' this is an error.")

    def look_back(self, step: int | None, last: int | None) -> None:
        """Warn if steps go back behind the last call or the end of the resumed run, because new data then replace older ones.
        Each thread has its own order of steps."""
        self._callers.add(threading.get_ident())
        resumed = last is None
        last = self.resumed if resumed else last
        if not isinstance(step, Integral) or not isinstance(last, Integral) or step >= last or len(self._callers) > 1:
            return
        if resumed:
            self._warn("back", f"step {step} comes after step {last}, with which the resumed run ends. Each step that is "
                               f"measured or logged again replaces what was there; the others stay, unless "
                               f"watch.writer.forget({step}) drops them. Does training go on from the checkpoint of this step?")
        else:
            self._warn("back", f"step {step} comes after step {last}: do steps begin again in every epoch? Each step that is "
                               f"measured or logged again replaces what was there, the initial one too. Count on: "
                               f"watch(epoch * len(loader) + step).")

    def looks_new(self, step: int, last: int | None) -> None:
        """Warn that a resumed run's model looks newly initialised."""
        self._warn("new", f"step {step}: the run is resumed after step {last}, but the model looks newly initialised, not "
                          f"trained so far. Load its checkpoint before the first call; a training that begins again is another "
                          f"run.")

    def _warn(self, key: str, text: str) -> None:
        """Warn once for each key, at the user's line that called Richter."""
        if key in self._warned:
            return
        self._warned.add(key)
        frame, level = sys._getframe(), 1
        while frame.f_back is not None and frame.f_code.co_filename.startswith((PACKAGE, contextlib.__file__)):
            frame, level = frame.f_back, level + 1
        warnings.warn(text, RichterWarning, stacklevel=level)

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def names(self) -> list[str]:
        """The names of the scalars."""
        stored = [] if self.writer is None else self.writer.run.scalar_names
        waiting = [r.measure for r in self.rows] + [name for call in self.calls for name in call if name != "step"]
        return list(dict.fromkeys([*stored, *waiting]))

    def curve(self, name: str) -> Series:
        """One scalar over time; a later value of a step replaces an earlier one."""
        values: dict[int, float] = {}
        if self.writer is not None and name in self.writer.run.scalar_names:
            stored = self.writer.run.scalars(name)
            values = dict(zip(stored.step.tolist(), stored.value.tolist(), strict=True))
        values |= {int(r.step or 0): r.value for r in self.rows if r.measure == name}
        values |= {int(call["step"]): call[name] for call in self.calls if name in call}
        steps = sorted(values)
        return Series(np.array(steps, np.int64), np.array([values[s] for s in steps], np.float64), np.full(len(steps), np.nan))

    @property
    def table(self) -> pandas.DataFrame:
        """All scalars: a column for each name."""
        import pandas as pd
        if self.writer is None:
            return pd.DataFrame(self.calls)
        if not self.rows:
            return self.writer.run.scalar_frame
        curves = {name: self.curve(name) for name in self.names}
        return pd.DataFrame({k: pd.Series(c.value, c.step) for k, c in curves.items()}).rename_axis("step").reset_index()


def _rows(step: int, values: Mapping[str, float]) -> list[Row]:
    """Scalars of one step as rows."""
    return [Row(whole_step(step), "", plain_text(name), value) for name, value in values.items()]


# ------------------------------------------------------------------------------------------------------------ failures

MOST = 100  # different reasons that are told apart: a training of days does not fill the memory with them
LONGEST = 800  # characters of a reason
OTHERS = "failures of further kinds, which are not told apart"


def note_failure(failures: list[Failure], step: Any, reason: str) -> None:
    """Add a failure to those that are known. Reasons that differ in their numbers alone are one reason."""
    try:
        at = operator.index(step)
    except Exception:  # whatever was given: this is the place where wrong arguments end
        at = None
    reason = reason.encode("utf-8", "replace").decode()[:LONGEST]
    places = {alike(failure.reason): i for i, failure in enumerate(failures)}
    if alike(reason) not in places and len(failures) >= MOST:
        reason = OTHERS
    if (i := places.get(alike(reason))) is None:
        failures.append(Failure(reason, at, at))
        return
    before = failures[i]
    failures[i] = replace(before, first=at if before.first is None else before.first, last=before.last if at is None else at,
                          times=before.times + 1)


@lru_cache(4 * MOST)
def alike(reason: str) -> str:
    """Return the reason with its numbers replaced, except those of names in quotes."""
    return re.sub(r"('[^']*')|0x[0-9a-fA-F]+|[-+]?\d[\d.,]*(?:e[-+]?\d+)?", lambda m: m[1] or "#", reason)


def passes_by(why: BaseException) -> bool:
    """May an error pass by (a run that diverged, a full disk, no memory left)? Otherwise wrong arguments are to blame."""
    passing = (DisturbedError, DivergedError, sqlite3.Error, torch.cuda.OutOfMemoryError, MemoryError)
    if isinstance(why, passing) or refused_by_disk(why):
        return not isinstance(why, MemoryBudgetError)
    full = isinstance(why, OSError) and why.errno in EXHAUSTED
    return full or (isinstance(why, RuntimeError) and any(words in str(why) for words in NO_MEMORY))


def survives(why: BaseException | None) -> bool:
    """Can a model still be measured after its loop ended so? Not when memory or the device gave out, and not while the
    interpreter takes the loop down; an interrupt from the keyboard is how many trainings end."""
    if isinstance(why, (SystemExit, GeneratorExit, MemoryError, torch.cuda.OutOfMemoryError)):
        return False
    return not isinstance(why, RuntimeError) or not any(words in str(why) for words in (*NO_MEMORY, *DEVICE_LOST))


# ------------------------------------------------------------------------------------------------------------- opening

def open_run(watch: Observer, run: str | os.PathLike[str] | Writer, settings: Any, resume: bool, overwrite: bool,
             given: bool) -> None:
    """Open the run on the first rank. The other ranks get its initial weights and earlier measurements, or its error."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized() or torch.distributed.get_world_size() < 2:
        watch.writer = _opened(watch, run, settings, resume, overwrite, given)
        return
    subject, message = watch.measurement.subject, list[Any]([None])
    if torch.distributed.get_rank() == 0:
        try:
            watch.writer = _opened(watch, run, settings, resume, overwrite, given)
            message = [({k: v.cpu() for k, v in watch.initial.items()}, watch.snapshots, subject.previous)]
        except Exception as why:
            message = [why]
    torch.distributed.broadcast_object_list(message, src=0)
    if isinstance(message[0], Exception):
        raise message[0]
    initial, watch.snapshots, previous = message[0]
    watch.initial = {k: v.to(watch.initial[k].device) for k, v in initial.items()}
    subject.previous = {k: v.to(subject.home) for k, v in previous.items()}


def _opened(watch: Observer, run: str | os.PathLike[str] | Writer, settings: Any, resume: bool, overwrite: bool,
            given: bool) -> Writer:
    """The run that is written; one that was begun before hands over its initial weights and measurements."""
    writer = run if isinstance(run, Writer) else create(run, settings, resume=resume, overwrite=overwrite)
    try:
        if writer.observer is not None:
            raise SelectionError(f"another Observer writes to the run {writer.path}; their rows would replace each other. "
                                 f"Give each a run of its own.")
        kept = writer.run.initial
        if kept is not None:
            if given:
                raise SelectionError(f"the run {writer.path} has initial weights of its own; leave initial= out to resume it.")
            watch.initial = _fitting(watch.model, load_file(kept), writer.path)
        watch.snapshots = writer.run.snapshots
        if (before := writer.run.state("previous")) is not None:
            subject = watch.measurement.subject
            subject.previous = {key: t.to(subject.home) for key, t in load_file(before).items()}

        def describe() -> None:
            if kept is None:
                writer.keep_state(lambda path: save_file({k: v.contiguous() for k, v in watch.initial.items()}, path))
            writer.describe(model=type(watch.model).__name__, parameters=sum(p.numel() for p in watch.model.parameters()),
                            examples=watch.probe.n, budget=watch.budget, pretrained=watch.pretrained,
                            measures=[m.name for m in watch.measures],
                            cards={m.name: m.card.to_json() for m in watch.measures})

        if writer.begun:
            describe()
        else:
            writer.defer(describe)  # a run that goes on is as it was until something is written
        writer.observer = watch
    except BaseException:
        if writer is not run:
            writer.close()
        raise
    return writer


def _fitting(model: nn.Module, kept: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The initial weights of a run, if they are of this architecture."""
    now = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    for name in {**now, **kept}:
        shapes = [tuple(weights[name].shape) if name in weights else "none" for weights in (now, kept)]
        if shapes[0] != shapes[1]:
            raise SelectionError(f"the run {path} was begun with another architecture: {name!r} has shape {shapes[0]} in this "
                                 f"model and {shapes[1]} in the run. A run is of one model; choose another name for this one.")
    return {k: v.to(now[k].device) for k, v in kept.items()}


def is_new(model: nn.Module, initial: Mapping[str, Tensor], before: Sequence[Snapshot], now: Snapshot) -> bool:
    """Was the model of a resumed run initialised again, instead of loaded from a checkpoint? Its weights are the initial ones of
    the run, or much farther from them than when they were last measured: two random draws differ by 1.4 times their norm."""
    last, here = ([r.value for r in snap.rows if r.measure == "weight_change" and math.isfinite(r.value)]
                  for snap in (before[-1], now))
    if all(k not in initial or torch.equal(p.detach(), initial[k].to(p)) for k, p in model.named_parameters()):
        return any(last) if last else len(before) > 1
    return bool(last and here) and median(here) > 1 and median(here) > 1.3 * median(last)
