"""How an Observer's run is opened: by the first of several ranks, with the initial weights and measurements of a run that was
begun before.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import math
import os
import sqlite3
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from richter.core import DisturbedError, DivergedError, Failure, MemoryBudgetError, Row, SelectionError, StoreError
from richter.core.failures import alike, note_failure
from richter.instrument.evaluate import RichterWarning
from richter.instrument.snapshot import Snapshot
from richter.measures.cards import CARDS
from richter.runs import Series, Writer, create
from richter.runs.format import plain_text, whole_step
from richter.runs.place import refused_by_disk

if TYPE_CHECKING:
    import pandas

    from richter.instrument.observe import Observer

# ------------------------------------------------------------------------------------------------------------- keeping
# What an Observer keeps: scalars and snapshots, in memory and in its run; what the run did not take waits until it does.

BLOCK = 10_000  # scalars that are written at once when the disk has room again
PATIENCE = 20  # a refused write is tried again after so many times the seconds that it took: it stays below 5 % of the time
EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EROFS}
NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")  # in torch's words
DEVICE_LOST = ("CUDA error", "cuDNN error", "CUBLAS", "HIP error", "NCCL")  # after these nothing more can be computed there
PACKAGE = str(Path(__file__).parents[1])


class Keeping:
    """The scalars and failures of an Observer, and all that its run has not taken yet. Its caller holds a lock."""

    def __init__(self) -> None:
        self.writer: Writer | None = None
        self.failures: list[Failure] = []
        self.calls: list[dict[str, float]] = []  # scalars, if there is no run
        self.rows: list[Row] = []  # scalars that wait
        self.snapshots: list[Snapshot] = []  # that wait
        self._state: dict[str, Tensor] | None = None  # what the last snapshot hands on, if it waits
        self._untold = False  # there are failures that the run does not know
        self._again = 0.0  # when it may be tried again
        self._warned: set[str] = set()
        self._furthest: int | None = None  # the step of the last call, or the last of the run that is resumed
        self._callers: set[int] = set()  # threads

    def open(self, writer: Writer) -> None:
        self.writer, self.failures, self._furthest = writer, writer.run.failures, writer.run.last

    @property
    def waits(self) -> bool:
        return self.writer is not None and bool(self.rows or self.snapshots or self._untold or self._state is not None)

    # ------------------------------------------------------------------------------------------------------- keeping

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """In the run; in memory if there is none. What the run refuses for want of room waits, and is an error."""
        if self.writer is None:
            self.calls.append({"step": step, **values})
            return
        if self.rows:
            self._wait(step, values)  # behind those that wait: a later value of a step replaces an earlier one
        else:
            begun = time.monotonic()
            try:
                self.writer.scalars(step, values)
            except StoreError as why:
                if refused_by_disk(why) or self.writer.closed:
                    self._wait(step, values)
                    self._again = time.monotonic() + PATIENCE * (time.monotonic() - begun)
                raise
        if self.waits and time.monotonic() >= self._again:
            self.flush()

    def _wait(self, step: int, values: Mapping[str, float]) -> None:
        rows = [Row(whole_step(step), "", plain_text(name), value) for name, value in values.items()]
        if not self.rows:
            atexit.register(self._last_try)
        self.rows += rows

    def snapshot(self, snap: Snapshot, state: dict[str, Tensor]) -> None:
        """``state``: what it hands on to the next one. If the run does not take it, it waits without its matrices, which may be
        large; they are drawn again with the next measurement."""
        if self.writer is None:
            return
        if self.snapshots:
            self._delay(snap, state)
        else:
            try:
                self.writer.snapshot(snap)
                self._hand_on(state)
            except StoreError as why:
                if refused_by_disk(why):
                    self._delay(snap, state)
                raise
        if self.waits:
            self.flush()

    def _delay(self, snap: Snapshot, state: dict[str, Tensor]) -> None:
        if not self.snapshots:
            atexit.register(self._last_try)
        self.snapshots.append(replace(snap, arrays={}))
        self._state = state or None

    def _hand_on(self, state: dict[str, Tensor]) -> None:
        if state and self.writer is not None:
            self.writer.keep_state(lambda path: save_file(state, path), "previous")
        self._state = None

    def flush(self) -> None:
        """Write what waits, the oldest first. What is refused goes on waiting, and is an error."""
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
            if self._state is not None:
                self._hand_on(self._state)
            if self._untold:
                self.writer.failures(self.failures)
                self._untold = False
            atexit.unregister(self._last_try)
        finally:
            now = time.monotonic()
            self._again = now + PATIENCE * (now - begun) if self.waits else 0.0

    def _last_try(self) -> None:
        """When the process ends without a word."""
        if self.writer is not None and not self.writer.closed:
            with contextlib.suppress(Exception):
                self.flush()

    # ------------------------------------------------------------------------------------------------------ failures

    def failed(self, step: Any, what: str, why: BaseException) -> None:
        """Note it, here and in the run; warn, if this reason has not been seen before."""
        reason = f"{what} ({type(why).__name__}: {why})"
        note_failure(self.failures, step, reason)
        self._untold = self.writer is not None
        if self.writer is not None and not self.writer.closed and not refused_by_disk(why) and time.monotonic() >= self._again:
            with contextlib.suppress(Exception):  # then it waits
                self.flush()
        if alike(reason) not in self._warned:
            self._warned.add(alike(reason))
            warnings.warn(f"step {step}: {reason}. Training goes on, and it is tried again when the next measurement is due; "
                          f"watch.failures has what failed. With on_error='raise' this is an error.", RichterWarning,
                          stacklevel=_calls_above())

    def look_back(self, step: int) -> None:
        """Say that steps go back, behind the last call or the end of the resumed run. Threads have an order of their own."""
        if not isinstance(step, Integral):
            return
        first, self._callers = not self._callers, self._callers | {threading.get_ident()}
        if self._furthest is not None and step < self._furthest and len(self._callers) == 1:
            self.goes_back(step, self._furthest, resumed=first)
        self._furthest = step

    def goes_back(self, step: int, last: int, resumed: bool = False) -> None:
        """Steps go back, so that what is new takes the place of what was measured before: said once."""
        if resumed:
            self._say("back", f"step {step} comes after step {last}, with which the resumed run ends. Each step that is "
                              f"measured or logged again replaces what was there; the others stay, unless "
                              f"watch.writer.forget({step}) drops them. Does training go on from the checkpoint of this step?")
        else:
            self._say("back", f"step {step} comes after step {last}: do steps begin again in every epoch? Each step that is "
                              f"measured or logged again replaces what was there, the initial one too. Count on: "
                              f"watch(epoch * len(loader) + step).")

    def is_new(self, step: int, last: int | None) -> None:
        self._say("new", f"step {step}: the run is resumed after step {last}, but the model looks newly initialised, not trained "
                         f"so far. Load its checkpoint before the first call; a training that begins again is another run.")

    def _say(self, key: str, text: str) -> None:
        """Once."""
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, RichterWarning, stacklevel=_calls_above())

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def names(self) -> list[str]:
        """Of the scalars."""
        known = [] if self.writer is None else self.writer.run.names
        waiting = [r.measure for r in self.rows] + [name for call in self.calls for name in call if name != "step"]
        return list(dict.fromkeys([*known, *waiting]))

    def curve(self, name: str) -> Series:
        """One scalar over time; a later value of a step replaces an earlier one."""
        values: dict[int, float] = {}
        if self.writer is not None and name in self.writer.run.names:
            known = self.writer.run.scalar(name)
            values = dict(zip(known.step.tolist(), known.value.tolist(), strict=True))
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
            return self.writer.run.scalars
        waiting = pd.DataFrame([(r.step, r.measure, r.value) for r in self.rows], columns=["step", "name", "value"])
        later = waiting.drop_duplicates(["step", "name"], keep="last").pivot(index="step", columns="name", values="value")
        known = self.writer.run.scalars.set_index("step")
        names = list(dict.fromkeys([*known.columns, *waiting.name]))
        return later.combine_first(known)[names].rename_axis(columns=None).reset_index()


def _calls_above() -> int:
    """From the function that warns up to the first line that is none of ours: the one a warning names."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    return level


def passes_by(why: BaseException) -> bool:
    """Is it of the moment (a run that diverged, a full disk, no memory left), and not of what was asked for?"""
    if isinstance(why, (DisturbedError, DivergedError, sqlite3.Error, torch.cuda.OutOfMemoryError)) or refused_by_disk(why):
        return True
    if isinstance(why, MemoryError):
        return not isinstance(why, MemoryBudgetError)
    if isinstance(why, OSError):
        return why.errno in EXHAUSTED
    return isinstance(why, RuntimeError) and any(words in str(why) for words in NO_MEMORY)


def survives(why: BaseException | None) -> bool:
    """Can a model still be measured after its loop ended so? Not when memory or the device gave out, and not while the
    interpreter takes the loop down; an interrupt from the keyboard is how many trainings end."""
    if isinstance(why, (SystemExit, GeneratorExit, MemoryError, torch.cuda.OutOfMemoryError)):
        return False
    return not isinstance(why, RuntimeError) or not any(words in str(why) for words in (*NO_MEMORY, *DEVICE_LOST))


# ------------------------------------------------------------------------------------------------------------- opening

def open_run(watch: Observer, run: str | os.PathLike[str] | Writer, settings: Any, resume: bool, given: bool) -> None:
    """The first rank opens the run; the others have its initial weights and earlier measurements, or its error."""
    subject = watch.measurement.subject
    message: list[Any] = [None]
    if _rank() == 0:
        try:
            watch.writer = _opened(watch, run, settings, resume, given)
        except Exception as why:
            message = [why]
    if _ranks() > 1:
        message = [message[0] or ({k: v.cpu() for k, v in watch.initial.items()}, watch.snapshots, subject.previous)]
        torch.distributed.broadcast_object_list(message, src=0)
    if isinstance(message[0], Exception):
        raise message[0]
    if _rank() and message[0] is not None:
        initial, watch.snapshots, previous = message[0]
        watch.initial = {k: v.to(watch.initial[k].device) for k, v in initial.items()}
        subject.previous = {k: v.to(subject.home) for k, v in previous.items()}


def _opened(watch: Observer, run: str | os.PathLike[str] | Writer, settings: Any, resume: bool, given: bool) -> Writer:
    """The run that is written; one that was begun before hands over its initial weights and measurements."""
    writer = run if isinstance(run, Writer) else create(run, settings, resume=resume)
    try:
        if writer.observer is not None:
            raise SelectionError(f"another Observer writes to the run {writer.path}; their rows would replace each other. "
                                 f"Give each a run of its own.")
        kept = writer.run.initial
        if kept is not None and given:
            raise SelectionError(f"the run {writer.path} has initial weights of its own; leave initial= out to resume it.")
        if kept is not None:
            watch.initial = _fitting(watch.model, load_file(kept), writer.path)
        watch.snapshots = writer.run.snapshots
        if (before := writer.run.state("previous")) is not None:
            device = watch.measurement.subject.home
            watch.measurement.subject.previous = {key: t.to(device) for key, t in load_file(before).items()}
        work = partial(_described, writer, watch, None if kept is not None else watch.initial)
        if writer.begun:
            work()
        else:
            writer.defer(work)
        writer.observer = watch
    except BaseException:
        if writer is not run:
            writer.close()
        raise
    return writer


def _described(writer: Writer, watch: Observer, initial: dict[str, Tensor] | None) -> None:
    """What the run is of; ``initial``: its initial weights, if it has none yet."""
    if initial is not None:
        writer.keep_state(lambda path: save_file({k: v.contiguous() for k, v in initial.items()}, path))
    writer.describe(model=type(watch.model).__name__, parameters=sum(p.numel() for p in watch.model.parameters()),
                    examples=watch.probe.n, budget=watch.budget, measures=[m.name for m in watch.measures],
                    cards={m.name: card.to_json() for m in watch.measures if (card := m.card or CARDS.get(m.name))})


def is_new(model: nn.Module, initial: Mapping[str, Tensor], before: Sequence[Snapshot], now: Snapshot) -> bool:
    """Was the model of a resumed run initialised again, instead of loaded from a checkpoint? Its weights are the initial ones of
    the run, or much farther from them than when they were last measured: two random draws differ by 1.4 times their norm."""
    last, here = _changes(before[-1]), _changes(now)
    if all(k not in initial or torch.equal(p.detach(), initial[k].to(p)) for k, p in model.named_parameters()):
        return any(last) if last else len(before) > 1
    return bool(last and here) and median(here) > 1 and median(here) > 1.3 * median(last)


def _changes(snap: Snapshot) -> list[float]:
    """|W - W0| / |W| of the layers, where it was measured."""
    return [r.value for r in snap.rows if r.measure == "weight_change" and math.isfinite(r.value)]


def _ranks() -> int:
    """Processes that train one model together."""
    return torch.distributed.get_world_size() if torch.distributed.is_available() and torch.distributed.is_initialized() else 1


def _rank() -> int:
    return torch.distributed.get_rank() if _ranks() > 1 else 0


def _fitting(model: nn.Module, kept: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The initial weights of a run, if they are of this architecture."""
    own = {k: tuple(v.shape) for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    other = {k: tuple(v.shape) for k, v in kept.items()}
    if own != other:
        name = next(k for k in {**own, **other} if own.get(k) != other.get(k))
        raise SelectionError(f"the run {path} was begun with another architecture: {name!r} has shape "
                             f"{own.get(name, 'none')} in this model and {other.get(name, 'none')} in the run. A run is of one "
                             f"model; choose another name for this one.")
    return {k: v.to(model.state_dict()[k].device) for k, v in kept.items()}
