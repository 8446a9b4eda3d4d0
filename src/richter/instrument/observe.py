"""Measure a model once (``measure``) or while it trains (``Observer``), without changing the training by one bit."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral, Real
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn

from richter.core import WHOLE, CaptureError, Failure, Row, SelectionError, StoreError, parse_bytes, unknown
from richter.instrument import evaluate
from richter.instrument.capture import Output, quiet, unwrap
from richter.instrument.cotangents import Cotangents, Function, as_cotangents
from richter.instrument.evaluate import CostPlan, Evaluation, Plan, cost_plan
from richter.instrument.keepsakes import Keepsakes
from richter.instrument.probe import Probe
from richter.instrument.record import Keeping, is_new, open_run, passes_by, survives
from richter.instrument.snapshot import Snapshot
from richter.instrument.statistics.frame import OutOfRange
from richter.instrument.stream import check_initial, check_weights
from richter.instrument.subject import Subject
from richter.instrument.survey import MOST_DOUBTS, Doubt
from richter.measures import MOVEMENT
from richter.measures.measure import Measure, resolve
from richter.runs import Series, Writer

if TYPE_CHECKING:
    import pandas

# --------------------------------------------------------------------------------------------------------- measurement
# A model on a probe, to be measured again and again: what depends on the architecture alone is found out once.

class Measurement:
    """A model on a probe, to be measured again and again; options are those of ``measure``. What depends on the architecture
    alone is found out once. ``errors=False``: no standard errors, products in the model's own precision, and a plain model whose
    modules are the same is not looked at again: less work."""

    def __init__(self, model: nn.Module, probe: Probe, measures: Iterable[str | Measure] | None = None, *,
                 initial: Mapping[str, Tensor] | None = None, cotangents: Cotangents | Function | None = None,
                 layers: str | Sequence[str] | Callable[[str], bool] | None = None, memory: str | float = "2GiB",
                 output: Output | None = None, mode: str = "eval", seed: int = 0, errors: bool = True) -> None:
        self.model, self.measures, self.cotangents = unwrap(model), resolve(measures), as_cotangents(cotangents)
        self.mode, self.seed = mode, seed
        self.plans: dict[tuple[str, ...], Plan] = {}  # by the measures that are taken together
        if not isinstance(probe, Probe):
            raise SelectionError(f"measure(model, probe): probe is a {type(probe).__name__}; make one with richter.Probe(x, y).")
        chosen = [layers] if isinstance(layers, str) else layers
        if chosen is not None and not callable(chosen) and not (isinstance(chosen, (list, tuple, set))
                                                                and all(isinstance(k, str) for k in chosen)):
            raise SelectionError(f"layers={layers!r}: names or patterns of layers are needed, e.g. 'h.0.*' or ['0', '2'].")
        check_weights(self.model)
        self.initial = None if initial is None else check_initial(self.model, initial)
        self.subject = Subject(self.model, probe, self.initial, chosen, parse_bytes(memory), output, errors)

    def take(self, step: int | None = None, matrices: int = 0, only: Collection[str] | None = None) -> Snapshot:
        """Measure the model as it is now. It is left exactly as it was. ``only``: names of some of the measures."""
        begun = time.perf_counter()
        self.subject.step = step
        check_weights(self.model)
        if self.subject.initial is not None:
            check_initial(self.model, self.subject.initial)
        with quiet(self.model, self.mode, self.seed):
            if self.subject.renew():
                self.plans.clear()
            work, rows = self._evaluated(step, matrices, [m for m in self.measures if only is None or m.name in only])
            labels = None if self.subject.objective is None else self.subject.objective.labels
        seconds = time.perf_counter() - begun
        return Snapshot(tuple(rows), step, work.notes, seconds, self.subject.probe.n, seconds / self.subject.pass_seconds,
                        work.arrays, labels)

    def plan(self) -> CostPlan:
        """What ``take`` will do: steps, passes, bytes and seconds. Looks at a few examples only."""
        check_weights(self.model)
        with quiet(self.model, self.mode, self.seed):
            if self.subject.renew():
                self.plans.clear()
            return cost_plan(self.subject, self._plan(self.measures))

    def _plan(self, measures: Sequence[Measure]) -> Plan:
        """Made once for an architecture."""
        names = tuple(m.name for m in measures)
        if names not in self.plans:
            self.plans[names] = evaluate.plan(self.subject, measures, self.cotangents)
        return self.plans[names]

    def _evaluated(self, step: int | None, matrices: int, measures: Sequence[Measure]) -> tuple[Evaluation, list[Row]]:
        """Until nothing that was captured is in doubt: each time a map is, it is read in another way, or refused. What leaves the
        range of single precision is computed in double."""
        for left in range(MOST_DOUBTS, -1, -1):
            try:
                work = Evaluation(self.subject, self._plan(measures), step, matrices)
                return work, work.rows()
            except CaptureError as why:
                if not left or not (self.subject.memo.trusted or isinstance(why, Doubt)):
                    raise
                self.plans.clear()
                if isinstance(why, Doubt) and not self.subject.memo.trusted:
                    self.subject.amend(why)
                else:
                    self.subject.renew(look=True)  # what was known of the model may not hold any longer
            except OutOfRange:
                self.plans.clear()
                self.subject.widen()
        raise AssertionError("the last doubt is raised")


def plan(model: nn.Module, probe: Probe, measures: Iterable[str | Measure] | None = None, *,
         initial: Mapping[str, Tensor] | None = None, cotangents: Cotangents | Function | None = None,
         layers: str | Sequence[str] | Callable[[str], bool] | None = None, memory: str | float = "2GiB",
         output: Output | None = None, mode: str = "eval", seed: int = 0) -> CostPlan:
    """What ``richter.measure`` with the same arguments will do: which measures together, passes, bytes and seconds. Runs a few
    examples only.

    >>> print(richter.plan(model, probe))
    """
    return Measurement(model, probe, measures, initial=initial, cotangents=cotangents, layers=layers, memory=memory,
                       output=output, mode=mode, seed=seed).plan()


# ------------------------------------------------------------------------------------------------------------ schedule
# When an Observer measures: every so many steps, at some steps, by a rule; and how much of the wall time that may take, and how
# it is spread over a training: where features move is early.

Schedule = Callable[[int], bool]
When = SupportsIndex | Iterable[SupportsIndex] | Schedule  # every so many steps, these steps, or a rule


def every(k: SupportsIndex) -> Schedule:
    """Every ``k`` steps."""
    k = _whole(k)
    if k < 1:
        raise SelectionError(f"when={k}: a positive number of steps is needed.")
    return lambda step: step % k == 0


def epochs(steps_per_epoch: Any, every_epochs: int = 1) -> Schedule:
    """At the start of every epoch; ``steps_per_epoch`` is a number, or a DataLoader."""
    return every((steps_per_epoch if isinstance(steps_per_epoch, int) else len(steps_per_epoch)) * every_epochs)


def log_spaced(last: int, count: int = 20) -> Schedule:
    """0 and about ``count`` steps, evenly spaced in the logarithm up to ``last``: where features move is early."""
    if last < 1 or count < 2:
        raise SelectionError(f"log_spaced({last}, {count}): a last step and at least two points are needed.")
    chosen = {0} | {round(math.exp(math.log(last) * i / (count - 1))) for i in range(count)}
    return chosen.__contains__


PER_DECADE = 20  # steps that are due, at the beginning


def early(steps: int | None = None) -> Schedule:
    """Some 20 steps in every decade, where features move, and every hundred; of a training of so many ``steps``, every hundredth
    part of it."""
    often = 100 if steps is None else max(1, steps // 100)

    def due(step: int) -> bool:
        decade = step > 1 and int(PER_DECADE * math.log10(step)) != int(PER_DECADE * math.log10(step - 1))
        return step <= 1 or decade or step % often == 0
    return due


def schedule(when: When) -> Schedule:
    if callable(when):
        return when
    if isinstance(when, Iterable):
        return {_whole(step) for step in when}.__contains__
    return every(when)


def _whole(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise SelectionError(f"when={step!r}: a number of steps, a list of steps or a function of the step is needed.") from None


# ---------------------------------------------------------------------------------------------------------- budget

AHEAD = 20.0  # seconds of training, whose share may be spent before it is earned where nobody knows how long the training will be
RECENT = 5  # measurements from which the cost of the next is told
DECADES = 4  # of steps over which they are spread
SURE = 0.9  # of what a training will earn, as far as one can tell: its later steps may be quicker
FEW = 8  # measurements: where no more can be paid for, all are spread over the logarithm of the step


@dataclass
class Budget:
    """``share`` of wall time, None for no limit; ``steps`` of the training, if they are known.

    Then what the whole training will earn is spread over it, most of it evenly in the logarithm of the step, and up to half
    evenly in the step, where many measurements can be paid for; how long it will take is told from the steps so far. Where they
    are not known, the share of AHEAD seconds is lent, evenly in the logarithm of the step, and paid back: what is earned later
    goes there first. Steps may begin again, in every epoch say: they are counted as they come. A training that goes on at a step
    before ``steps`` ends there.
    """

    share: float | None
    steps: int | None = None
    begun: float | None = None  # when the first call came
    at: int = 0  # the step of the last
    done: int = 0  # steps since the first
    left: int = 0  # steps to come
    spent: float = 0.0
    costs: dict[bool, deque[float]] = field(  # of the last, by whether they were brief
        default_factory=lambda: {brief: deque(maxlen=RECENT) for brief in (False, True)})
    opening: float | None = None  # seconds of the first
    on_brief: float = 0.0  # seconds of what is cheap alone
    seen: tuple[tuple[int, float], ...] = ((0, 0.0), (0, 0.0))  # steps and seconds of training, at the last two doublings

    def __post_init__(self) -> None:
        if self.share is not None and not (isinstance(self.share, Real) and 0 < self.share <= 1):
            raise SelectionError(f"budget={self.share}: a share of wall time in (0, 1], or None for no limit.")
        if self.steps is not None and not (isinstance(self.steps, Integral) and self.steps > 0):
            raise SelectionError(f"steps={self.steps!r}: the number of steps of the training, a positive number, or None if it "
                                 f"is not known.")

    def come(self, step: int) -> None:
        """At every call: so far has the training come."""
        if self.begun is None:
            self.begun, self.at = time.perf_counter(), step
            self.left = 0 if self.steps is None else self.steps - step if step < self.steps else self.steps
        further = step - self.at if step >= self.at else 1
        self.at, self.done, self.left = step, self.done + further, max(0, self.left - further)

    def pay(self, seconds: float, done: bool, brief: bool) -> None:
        """A measurement that failed is paid for, and the next is expected to take as long at least."""
        self.spent += seconds
        self.on_brief += seconds if brief else 0.0
        if self.opening is None and not brief and done:
            self.opening = seconds
        else:
            self.costs[brief].append(seconds if done else max(seconds, self._expected(brief)))

    def _expected(self, brief: bool) -> float:
        """Seconds of the next measurement: the median of the last ones, of which one may have been disturbed; until there are
        some, a guess from the first, which pays for what is loaded once."""
        if self.costs[brief]:
            return statistics.median(self.costs[brief])
        return self._expected(False) / 5 if brief else (self.opening or 0.0) / 5

    @property
    def taken(self) -> float:
        """The share that was taken."""
        elapsed = 0.0 if self.begun is None else time.perf_counter() - self.begun
        return self.spent / elapsed if elapsed else 0.0

    @property
    def allows(self) -> bool:
        """Is there room for a whole measurement now, and for one more at the end?"""
        if self.share is None or self.begun is None:
            return True
        cost = self._expected(False)
        room, in_all = self._room(cost)
        return self.spent + cost <= room and self.spent + 2 * self._at_most() <= in_all

    @property
    def allows_brief(self) -> bool:
        """Is there room for what is cheap alone? It takes half of the budget at most, leaves the room of a whole measurement at
        the end, if there is any without it, and once there is room for more, that of one now."""
        if self.share is None or self.begun is None:
            return True
        cost, whole = self._expected(True), self._expected(False)
        room, in_all = self._room(cost)
        end = self.spent + self._at_most()
        kept = end + cost <= in_all or end - self.on_brief > in_all
        return kept and self.on_brief + cost <= room / 2 and (not self.costs[False] or self.spent + cost + whole <= room)

    def _at_most(self) -> float:
        """Seconds of a whole measurement that are kept for the end: where this is known, and until there was a second one, half
        of what the first took, which is more than is expected."""
        return max(self._expected(False), 0.0 if self.costs[False] or self.steps is None else (self.opening or 0.0) / 2)

    def _room(self, cost: float) -> tuple[float, float]:
        """Seconds that may have been spent by now, if a measurement of this cost is made, and, as far as one can tell, in all."""
        assert self.share is not None and self.begun is not None
        elapsed = time.perf_counter() - self.begun
        done, left, earned = self.done, self.left, self.share * (elapsed + cost)
        if self.steps is None:
            lent = self.share * AHEAD * min(1.0, math.log10(1 + done) / DECADES)
            return max(earned, lent), max(earned, self.share * AHEAD)
        if not done:
            return 0.0, math.inf
        training = self._pace(done, elapsed - self.spent) * (done + left)
        in_all = SURE * training * self.share / (1 - self.share) if self.share < 1 else math.inf
        evenly = max(0.0, 1 - FEW * cost / in_all) / 2 if in_all else 0.0
        part = (1 - evenly) * math.log1p(done) / math.log1p(done + left) + evenly * done / (done + left)
        return in_all * part, in_all

    def _pace(self, done: int, seconds: float) -> float:
        """Seconds of a step: of all so far, or of about the later half if those were quicker, because the first steps of a
        training pay for what is loaded once."""
        if done >= 2 * self.seen[1][0]:
            self.seen = self.seen[1], (done, seconds)
        before, then = self.seen[0]
        return min(seconds / done, (seconds - then) / (done - before)) if done > before else seconds / done


# ------------------------------------------------------------------------------------------------------------- observe

MATRICES = 256  # inputs; feature matrices of larger layers are not kept in a run unless asked for


def measure(model: nn.Module, probe: Probe, measures: Iterable[str | Measure] | None = None, *,
            initial: Mapping[str, Tensor] | None = None, cotangents: Cotangents | Function | None = None,
            layers: str | Sequence[str] | Callable[[str], bool] | None = None, memory: str | float = "2GiB",
            output: Output | None = None, mode: str = "eval", seed: int = 0, step: int | None = None,
            matrices: int = 0) -> Snapshot:
    """Measure ``model`` on ``probe``, layer by layer. The model is left exactly as it was.

    >>> snap = richter.measure(model, richter.Probe(x, y))
    >>> snap.value("nfc", "0"), snap.frame

    ``initial``: a state_dict at initialisation, for centred measures; ``layers``: names or patterns ("h.*.attn.*");
    ``output``: picks the tensor from what the model returns; ``memory`` bounds what is used beyond the result;
    ``mode="train"`` keeps dropout on, drawn from a generator of its own seeded by ``seed``; ``matrices``: also keep the
    feature matrices themselves (``snap.arrays["0", "nfm"]``, ``"agop"``) of layers with at most so many inputs.
    """
    return Measurement(model, probe, measures, initial=initial, cotangents=cotangents, layers=layers, memory=memory,
                       output=output, mode=mode, seed=seed).take(step, matrices)


class Observer:
    """Watch a model while it trains: call it anywhere in the loop; it measures when its schedule says so.

    >>> watch = richter.Observer(model, probe, when=50)
    >>> for step, (x, y) in enumerate(loader):
    ...     ...
    ...     watch(step, loss=loss)
    >>> watch.frame

    ``when``: every so many steps, a list of steps, or a callable (``richter.log_spaced(last)``, ``richter.epochs(loader)``); the
    first call always measures. Left out, steps are due densely at the beginning and every hundred later. ``budget``: the share
    of wall time that measuring may take; with ``steps=``, the number of steps of the training, most of it is spread over their
    logarithm, because features move early (and the share is kept in the end, not where the training stops before); else a second
    is lent. Of a step that is due and
    has no budget for everything, what is cheap is measured alone (``richter.measures.MOVEMENT``, on which a verdict rests), and
    without budget for that it is put off until there is some. The room of one measurement is kept for the end.
    ``watch.now(step)`` measures regardless, and so do ``watch.close()`` and the end of ``with Observer(...) as watch``, if the
    last step that was seen has not been measured (and not when memory or the device gave out): a verdict is of the network as
    training left it. None: no limit. ``watch.share`` is the share that was taken. (Scalars are the user's own logging and come
    on top: some 50 microseconds a call with a run, so that none is lost.)

    ``run="runs/demo"`` keeps everything on disk as it is measured: rows, scalars, the initial weights, the feature matrices of
    layers with at most ``matrices`` inputs (whenever the step has grown by a tenth), and ``settings`` (a dataclass or mapping of
    yours). ``keep_features=64``: also, at the same steps, Gram matrices of what each layer reads of so many examples, by which
    steps and runs are compared (``richter compare``); ``keep_inputs``: small pictures of these (of this shape, where inputs are
    flat). After a crash ``resume=True`` goes on with the run and its initial weights. Of several ranks the first writes.
    Everything else is as in ``richter.measure``.

    A failure does not end the training (``on_error="warn"``): weights that are NaN, a full disk, no memory, an error of the model
    on the probe are kept with their reason in ``watch.failures`` and in the run, warned of once for each reason, and measuring
    is tried again at the next step that is due; failed attempts count as spent. What the disk refuses waits in memory and is
    written when there is room again. What is wrong with the arguments is an error of the constructor or of the first call.
    ``on_error="raise"``: every failure is an error. Any thread may call: one measures at a time, and no scalar is lost.
    """

    def __init__(self, model: nn.Module, probe: Probe, *, run: str | os.PathLike[str] | Writer | None = None,
                 settings: Any = None, resume: bool = False, matrices: int | None = None,
                 keep_features: int = 0, keep_inputs: bool | tuple[int, ...] = False,
                 when: When | None = None, steps: int | None = None, measures: Iterable[str | Measure] | None = None,
                 initial: Mapping[str, Tensor] | None = None, budget: float | None = 0.05,
                 cotangents: Cotangents | Function | None = None,
                 layers: str | Sequence[str] | Callable[[str], bool] | None = None, memory: str | float = "2GiB",
                 output: Output | None = None, mode: str = "eval", seed: int = 0,
                 on_error: Literal["warn", "raise"] = "warn") -> None:
        if on_error not in ("warn", "raise"):
            raise SelectionError(f"on_error={on_error!r}: 'warn' (a failure does not end the training) or 'raise'.")
        self._budget = Budget(budget, steps)
        self.when, self.budget, self.on_error = early(steps) if when is None else schedule(when), budget, on_error
        if matrices is not None and matrices < 0:
            raise SelectionError(f"matrices={matrices}: the most inputs that a layer whose matrices are kept may have; 0: none.")
        self.matrices = matrices if matrices is not None else MATRICES if run is not None else 0
        self.measurement = Measurement(model, probe, measures, initial=initial, cotangents=cotangents, layers=layers,
                                       memory=memory, output=output, mode=mode, seed=seed)
        self.model, self.probe, self.measures = self.measurement.model, probe, self.measurement.measures
        self.keepsakes = Keepsakes(self.model, probe, keep_features, keep_inputs, layers, self.measurement.subject.memory,
                                   output) if keep_features or keep_inputs else None
        given = self.model.state_dict() if self.measurement.initial is None else self.measurement.initial
        with torch.inference_mode(False):
            self.initial = {k: v.detach().clone() for k, v in given.items() if isinstance(v, Tensor)}
        self.snapshots: list[Snapshot] = []
        self.put_off: list[int] = []  # steps that were due and had no budget
        self._keeping = Keeping()
        self._guard = threading.RLock()  # of what is kept; an RLock, because a handler of signals may call too
        self._measuring = threading.Lock()
        self._at: tuple[int, int] | None = None  # the thread that measures, and the step
        self._called = self._tried = False
        names = [m.name for m in self.measures]
        self._cheap = tuple(m for m in names if m in MOVEMENT) if set(names) - {*MOVEMENT} else ()  # what is put off last
        self._owed = False  # everything, of a step that was due
        self._missed = False  # a step that was due has nothing at all
        self._drawn: int | None = None  # the last step whose matrices were kept
        self._seen: int | None = None  # the last step of a call
        self._latest = 0  # the largest step that was measured; not of the run that is resumed
        self._untried = False  # a step was seen since everything was measured, or failed to be
        self._owns = not isinstance(run, Writer)
        if run is None and (settings is not None or resume):
            raise SelectionError("settings= and resume= are of a run on disk: say which by run='runs/...'.")
        self.writer: Writer | None = None
        if run is not None:
            open_run(self, run, settings, resume, initial is not None)
        if self.writer is not None:
            self._keeping.open(self.writer)
        self._before = tuple(self.snapshots)  # of the run that is resumed, until it is clear that the model is its own
        self.measurement.subject.initial = self.initial

    def __call__(self, step: int, **scalars: Any) -> Snapshot | None:
        """Keep the scalars, and measure if this step is due. Returns the snapshot, if one was taken."""
        with self._guard:
            first, self._called, self._seen, self._untried = not self._called, True, step, True
            self._budget.come(step)
            self._keeping.look_back(step)
            later = first and self.writer is not None and not self.writer.begun  # a failed first call changes no resumed run
        try:
            with self._guard:
                values = self._numbers(step, scalars, first)
                if not later:
                    self._keep(step, values, first)
            snap = self._attempted_alone(step)
        except Exception:
            self._seen, self._untried = (None, False) if later else (step, self._untried)  # nothing is left to measure
            raise
        with self._guard:
            self._keep(step, values if later else {}, first)
        return snap

    def _attempted_alone(self, step: int, now: bool = False) -> Snapshot | None:
        if not self._enter(step, waiting=now):
            return None
        try:
            return self._attempted(step, now)
        finally:
            self._leave()

    def now(self, step: int) -> Snapshot | None:
        """Measure at once, whatever the schedule and the budget say. None if that failed (``watch.failures`` says why)."""
        return self._attempted_alone(step, True)

    def _enter(self, step: int, waiting: bool) -> bool:
        """One thread measures at a time. What is due meanwhile is put off, unless it is the same step."""
        mine = self._at is not None and self._at[0] == threading.get_ident()  # called by the model or measure, or by a signal
        if not mine and self._measuring.acquire(blocking=waiting):
            self._at = threading.get_ident(), step
            return True
        with self._guard:
            if (waiting or self.when(step)) and self._at is not None and self._at[1] != step:
                self.put_off.append(step)
                self._owed = self._missed = True
        return False

    def _leave(self) -> None:
        self._at = None
        self._measuring.release()

    def _numbers(self, step: int, scalars: Mapping[str, Any], first: bool) -> dict[str, float]:
        """Each that is a number; what is none is a mistake that the first call shows."""
        values = {}
        for name, value in scalars.items():
            try:
                values[name] = float(value.detach() if isinstance(value, Tensor) else value)
            except Exception as why:
                self._tolerated(step, f"the scalar {name!r} was not kept", why, first)
        return values

    def _keep(self, step: int, values: Mapping[str, float], first: bool) -> None:
        if not values:
            return
        try:
            self._keeping.scalars(step, values)
        except Exception as why:
            self._tolerated(step, "not written", why, first)

    def _tolerated(self, step: int | None, what: str, why: Exception, first: bool) -> None:
        """Note the failure, or raise it: if that is asked for, and in a first call if its arguments are to blame."""
        if self.on_error == "raise" or (first and not passes_by(why)):
            raise why
        with self._guard:
            self._keeping.failed(step, what, why)

    def _attempted(self, step: int, now: bool = False) -> Snapshot | None:
        """``now``: whether this step is due or not."""
        first = not self._tried
        try:
            with self._guard:
                only = None if now else self._due(step)
                due = only is None or bool(only)
                self._tried = True
                self._untried &= only is not None  # the end measures what was put off
            return self._measured(step, now or (not only and self._draws(step)), first, only) if due else None
        except Exception as why:
            self._tolerated(step, "not measured", why, first)
        return None

    def _draws(self, step: int) -> bool:
        """Matrices are kept when the step has grown by a tenth: about 25 times in a decade, however often it is measured."""
        return self._drawn is None or step >= 1.1 * self._drawn or step < self._drawn

    def _measured(self, step: int, draws: bool, first: bool, only: Collection[str] | None = None) -> Snapshot:
        if self.writer is not None and self.writer.closed:
            raise StoreError(f"the run {self.writer.path} was closed: nothing more is measured into it. resume=True opens it.")
        start = time.perf_counter()
        self._budget.come(step)
        self._owed, self._missed, done = only is not None, False, False
        try:
            snap = self.measurement.take(step, self.matrices if draws else 0, only)
            if draws and self.keepsakes is not None:
                snap = self._with_features(snap, self.keepsakes, first)
            with self._guard:
                if self._before and is_new(self.model, self.initial, self._before, snap):
                    self._keeping.is_new(step, self._before[-1].step)
                self._before = ()
                snap = self._kept(snap, draws, first)
            done = True
        finally:
            with self._guard:
                self._budget.pay(time.perf_counter() - start, done, only is not None)  # with writing it down
        return snap

    def _with_features(self, snap: Snapshot, keepsakes: Keepsakes, first: bool) -> Snapshot:
        """With what is kept of the probe's features; that this fails costs no number."""
        try:
            arrays = keepsakes.take(() if self.writer is None else [name for _, name, _ in self.writer.run.arrays])
            if self.writer is not None and (facts := keepsakes.news(self.writer.run)):
                self.writer.describe(features=facts)
            snap = replace(snap, arrays={**snap.arrays, **arrays})
        except Exception as why:
            self._tolerated(snap.step, "features not kept", why, first)
        return snap

    def _kept(self, snap: Snapshot, draws: bool, first: bool) -> Snapshot:
        """In memory, and in the run, which also has its matrices, and what the next snapshot wants to know of this one."""
        subject = self.measurement.subject
        subject.previous = {**subject.previous, **subject.carried}  # not all is measured every time
        state = {key: value.cpu().contiguous() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                 for key, value in subject.carried.items() if isinstance(value, (Tensor, float, int))}
        try:
            self._keeping.snapshot(snap, state)
            self._drawn = snap.step if draws else self._drawn
        except Exception as why:
            self._tolerated(snap.step, "not written", why, first)
        snap = snap if self.writer is None else replace(snap, arrays={})  # they are on disk
        others = [s for s in self.snapshots if s.step != snap.step]  # a step that is measured again replaces
        if len(others) < len(self.snapshots) and snap.step is not None and snap.step < self._latest:
            self._keeping.goes_back(snap.step, self._latest)
        self._latest = max(self._latest, snap.step or 0)
        self.snapshots = sorted([*others, snap], key=lambda s: s.step or 0)
        return snap

    def _due(self, step: int) -> tuple[str, ...] | None:
        """What is measured now, by the schedule and within the budget: everything (None), what is cheap alone if there is no
        budget for more, or nothing: the step is put off."""
        due = self.when(step)
        if not self._tried:
            return None
        if not (due or self._owed):
            return ()
        if self._budget.allows:
            return None
        if self._cheap and (due or self._missed) and self._budget.allows_brief:
            return self._cheap
        if due:
            self.put_off.append(step)
        self._owed, self._missed = True, self._missed or due
        return ()

    @property
    def share(self) -> float:
        """The share of wall time that went into measuring, since the first call."""
        return self._budget.taken

    @property
    def failures(self) -> list[Failure]:
        """What could not be measured, written or kept, and why; of a resumed run also what failed before."""
        with self._guard:
            return list(self._keeping.failures)

    @property
    def frame(self) -> pandas.DataFrame:
        """All rows so far: step, layer, measure, value, error, note, mark (a word of ``richter.core.Mark``)."""
        import pandas as pd
        return pd.DataFrame([tuple(r) for s in self.snapshots for r in s.rows],
                            columns=["step", "layer", "measure", "value", "error", "note", "mark"])

    @property
    def scalars(self) -> pandas.DataFrame:
        """What was passed beside the steps: loss, accuracy, ..."""
        with self._guard:
            return self._keeping.table

    @property
    def names(self) -> list[str]:
        """Of the scalars."""
        with self._guard:
            return self._keeping.names

    def scalar(self, name: str) -> Series:
        """One scalar over time: steps and values."""
        with self._guard:
            if name not in (known := self._keeping.names):
                raise unknown("this Observer", "scalar", name, known)
            return self._keeping.curve(name)

    @property
    def last(self) -> int | None:
        """The last step of a call or a measurement."""
        steps = [self._seen, *(s.step for s in self.snapshots[-1:])]
        return max((int(s) for s in steps if s is not None), default=None)

    def curve(self, name: str, layer: str = WHOLE) -> tuple[list[int], list[float]]:
        """Steps and values of one measure of one layer, wherever it was measured."""
        having = [s for s in self.snapshots if name in s.measures] or self.snapshots
        return [s.step or 0 for s in having], [s.value(name, layer) for s in having]

    def close(self) -> None:
        """Measure, if the last step that was seen has not been; then finish the run on disk, if it is the Observer's own. The
        end of the process finishes it too, without measuring."""
        self._end(None, None, None)

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(kind, error, trace)

    def _measure_last(self, error: BaseException | None) -> None:
        """Once, if nothing was tried at the last step that was seen, or after it. After an error of the loop a failure here is
        noted only: it must not stand in the place of the error."""
        step = self._seen
        if step is None or not self._untried or not survives(error) or (self.writer is not None and self.writer.closed):
            return
        policy, self.on_error = self.on_error, self.on_error if error is None else "warn"
        try:
            self.now(step)
        finally:
            self.on_error = policy

    def _end(self, *error: Any) -> None:
        """Measure what the loop left, write what waits, then end the run as the loop ended."""
        with contextlib.ExitStack() as end:  # an interrupt of one leaves out none of the others
            if self.writer is not None and self._owns:
                end.callback(self.writer.close)
            end.callback(self._finish, *error)
            self._measure_last(error[1])

    def _finish(self, *error: Any) -> None:
        if self.writer is None:
            return
        with self._guard:
            try:
                self._ended("not written", self._keeping.flush)
            finally:
                if self._owns and self.writer.begun:  # a resumed run into which nothing was written ends as it did
                    self._ended("the end of the run was not written", partial(self.writer.__exit__, *error))

    def _ended(self, what: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as why:
            self._tolerated(self.snapshots[-1].step if self.snapshots else None, what, why, first=False)

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise SelectionError("an Observer cannot be copied or pickled: it has locks, and a run that only it writes. Copy or save "
                             "watch.model.state_dict(), and leave the Observer out; a copy of the model gets an Observer of its "
                             "own, and a training that goes on later passes run=... and resume=True.")
