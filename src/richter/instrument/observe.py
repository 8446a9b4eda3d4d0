"""Measure a model once (``measure``) or while it trains (``Observer``), without changing the training by one bit."""

from __future__ import annotations

import contextlib
import html
import math
import operator
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from richter.core import WHOLE, CaptureError, Failure, RichterError, SelectionError, StoreError, parse_bytes, unknown
from richter.core.values import SMALL
from richter.instrument import evaluate
from richter.instrument.capture import Output, quiet, unwrap, weight_bytes
from richter.instrument.cotangents import Cotangents, Function, as_cotangents
from richter.instrument.evaluate import CostPlan, Evaluation, Plan, cost_plan
from richter.instrument.fitting import CURVE, LEAST, Due, Part, When, announcement, fitted, least_examples, on_ranks
from richter.instrument.fitting import whole_step_of as _whole_step
from richter.instrument.keepsakes import Keepsakes
from richter.instrument.probe import Probe
from richter.instrument.record import Record, is_new, open_run, passes_by, survives
from richter.instrument.snapshot import Series, Snapshot, unknown_row
from richter.instrument.stability import stable_rate
from richter.instrument.statistics.frame import OutOfRange
from richter.instrument.stream import check_initial, check_weights
from richter.instrument.subject import Subject
from richter.instrument.survey import MOST_DOUBTS, Doubt
from richter.measures import LIGHT
from richter.measures.measure import Measure, resolve
from richter.runs import Writer

if TYPE_CHECKING:
    import pandas

Layers = str | Sequence[str] | Callable[[str], bool] | None  # names or patterns of layers, or a rule


# --------------------------------------------------------------------------------------------------------- measurement

STARTING = ("weight_change", "probe_loss", "probe_accuracy", "output_spread", "output_rms")  # measured of the initial network too


class Measurement:
    """A model on a probe, to be measured again and again; options are those of ``measure``. The survey and the plan, which depend
    on the architecture alone, are made once. ``errors=False`` leaves out standard errors, multiplies in the model's own
    precision, and does not survey a plain model again while its modules are the same."""

    def __init__(self, model: nn.Module, probe: Probe, measures: Iterable[str | Measure] | None = None, *,
                 initial: Mapping[str, Tensor] | None = None, cotangents: Cotangents | Function | None = None,
                 layers: Layers = None, memory: str | float = "2GiB", output: Output | None = None, mode: str = "eval",
                 seed: int = 0, errors: bool = True) -> None:
        self.model, self.measures, self.cotangents = unwrap(model), resolve(measures), as_cotangents(cotangents)
        self.mode, self.seed, self.probe, self.layers = mode, seed, probe, layers
        self.plans: dict[tuple[str, ...], Plan] = {}  # by the measures that are taken together
        self.work_seconds = math.nan  # of the last measurement, without survey and plan
        if not isinstance(probe, Probe):
            raise SelectionError(f"measure(model, probe): probe is a {type(probe).__name__}; make one with richter.Probe(x, y).")
        if measures is None and probe.held_out is not None and probe.held_out.y is not None:
            self.measures = [*self.measures, *resolve(["held_out_accuracy"])]
        chosen = [layers] if isinstance(layers, str) else layers
        if chosen is not None and not callable(chosen) and not (isinstance(chosen, (list, tuple, set))
                                                                and all(isinstance(k, str) for k in chosen)):
            raise SelectionError(f"layers={layers!r}: names or patterns of layers are needed, e.g. 'h.0.*' or ['0', '2'].")
        check_weights(self.model)
        initial = None if initial is None else check_initial(self.model, initial)
        self.subject = Subject(self.model, probe, initial, chosen, parse_bytes(memory), output, errors)

    def take(self, step: int | None = None, matrices: int = 0, only: Collection[str] | None = None) -> Snapshot:
        """Measure the model as it is now. It is left exactly as it was. ``only``: names of some of the measures.

        What was captured and is in doubt is read in another way, or refused, until nothing is in doubt. What leaves the range of
        single precision is computed in double."""
        begun, subject = time.perf_counter(), self.subject
        subject.step = step
        measures = [m for m in self.measures if only is None or m.name in only]
        with self._ready():
            for left in range(MOST_DOUBTS, -1, -1):
                try:
                    work = Evaluation(subject, self._plan(measures), step, matrices)
                    surveyed = time.perf_counter()
                    rows = work.rows()
                    self.work_seconds = time.perf_counter() - surveyed
                    break
                except CaptureError as why:
                    if not left or not (subject.memo.trusted or isinstance(why, Doubt)):
                        raise
                    self.plans.clear()
                    if isinstance(why, Doubt) and not subject.memo.trusted:
                        subject.amend(why)
                    else:
                        subject.renew(look=True)  # what was known of the model may not hold any longer
                except OutOfRange:
                    self.plans.clear()
                    subject.widen()
            labels = None if subject.targets.objective is None else subject.targets.objective.labels
        seconds = time.perf_counter() - begun
        return Snapshot(tuple(rows), step, work.notes, seconds, subject.probe.n, seconds / subject.pass_seconds, work.arrays,
                        labels)

    def start(self) -> Snapshot | None:
        """Measure the network with its initial weights, as far as it tells what was learned since; None without them."""
        names = [m for m in self.measures if m.name in STARTING]
        if self.subject.initial is None or not {"probe_loss", "probe_accuracy"} & {m.name for m in names}:
            return None
        with self._ready(), contextlib.suppress(CaptureError, OutOfRange):  # it is no part of what was asked for
            subject = self.subject.initially()
            work = Evaluation(subject, evaluate.plan(subject, names, None), 0)
            return Snapshot(tuple(work.rows()), 0, work.notes, examples=subject.probe.n)
        return None

    def plan(self) -> CostPlan:
        """Plan what ``take`` will do: steps, passes, bytes and seconds. Runs a few examples only: a measurement of them says what
        it costs besides passes, except of a large model."""
        with self._ready():
            plan = cost_plan(self.subject, self._plan(self.measures))
        n = min(LEAST, self.probe.n // 2)
        if n < 2 or weight_bytes(self.model) > SMALL:
            return plan
        pilot = self.reduced(n, max(2, n // 4))
        try:
            seconds = pilot.take().seconds
        except (RichterError, RuntimeError):  # too few examples for this model
            return plan
        return replace(plan, other_seconds=max(0.0, seconds - pilot.passes() * plan.pass_seconds * n / self.probe.n))

    @property
    def pass_seconds(self) -> float:
        """Seconds of a forward-backward pass of the probe, timed after ``take``."""
        with quiet(self.model, self.mode, self.seed):
            return evaluate.pass_seconds(self.subject)

    @contextlib.contextmanager
    def _ready(self) -> Iterator[None]:
        """Keep the model undisturbed, and bring the subject up to date with it."""
        check_weights(self.model)
        if self.subject.initial is not None:
            check_initial(self.model, self.subject.initial)
        with quiet(self.model, self.mode, self.seed):
            if self.subject.renew():
                self.plans.clear()
            yield

    def passes(self, only: Collection[str] | None = None) -> float:
        """Count the forward-backward passes of the probe that ``take`` makes, at the last measurement's model."""
        return evaluate.passes(self.subject, self._plan([m for m in self.measures if only is None or m.name in only]))

    def reduced(self, examples: int, kernel_examples: int) -> Measurement:
        """Return the same measurement on some examples of its probe, class-balanced."""
        s = self.subject
        return Measurement(self.model, self.probe.part(examples, kernel_examples), self.measures, initial=s.initial,
                           cotangents=self.cotangents, layers=self.layers, memory=s.allowed, output=s.output, mode=self.mode,
                           seed=self.seed, errors=s.errors)

    def _plan(self, measures: Sequence[Measure]) -> Plan:
        """The plan of these measures, made once for an architecture."""
        names = tuple(m.name for m in measures)
        if names not in self.plans:
            self.plans[names] = evaluate.plan(self.subject, measures, self.cotangents)
        return self.plans[names]


def measure(model: nn.Module, probe: Probe, measures: Iterable[str | Measure] | None = None, *,
            initial: Mapping[str, Tensor] | None = None, cotangents: Cotangents | Function | None = None,
            layers: Layers = None, memory: str | float = "2GiB", output: Output | None = None, mode: str = "eval", seed: int = 0,
            step: int | None = None, matrices: int = 0) -> Snapshot:
    """Measure ``model`` on ``probe``, layer by layer. The model is left exactly as it was.

    >>> snap = richter.measure(model, richter.Probe(x, y))
    >>> snap.value("nfc", "0"), snap.frame

    ``initial``: a state_dict at initialisation, for centred measures; ``layers``: names or patterns ("h.*.attn.*");
    ``output``: picks the tensor from what the model returns; ``memory`` bounds what is used beyond the result;
    ``mode="train"`` keeps dropout on, drawn from a generator of its own seeded by ``seed``; ``matrices``: also keep the
    feature matrices themselves (``snap.arrays["0", "nfm"]``, ``"agop"``) of layers with at most so many inputs.
    """
    measurement = Measurement(model, probe, measures, initial=initial, cotangents=cotangents, layers=layers, memory=memory,
                              output=output, mode=mode, seed=seed)
    return replace(measurement.take(step, matrices), start=measurement.start())


def plan(model: nn.Module, probe: Probe, measures: Iterable[str | Measure] | None = None, **options: Any) -> CostPlan:
    """Plan what ``richter.measure`` with the same arguments will do: which measures together, passes, bytes and seconds. Runs a
    few examples only.

    >>> print(richter.plan(model, probe, initial=start, memory="2GiB"))
    """
    return Measurement(model, probe, measures, **options).plan()


# ------------------------------------------------------------------------------------------------------------ schedule
# When an Observer measures, and what: the rules are told in fitting.py.

PER_DECADE = 20  # steps of every decade that are due by default
EARLY = 1 / 6  # exponent by which free seconds are spent early
SURE = 0.9  # part of the budget of a whole training that is counted on: its later steps may be quicker
FEW = 8  # measurements: where the budget pays for no more, all are spread over the logarithm of the step
RECENT = 5  # measurements from which the cost of the next one is estimated
BATCH = 32  # examples of which a training step is taken to be, before any step is seen


def every(k: Any) -> Due:
    """Schedule that is due every ``k`` steps."""
    k = _whole_step(k)
    if k < 1:
        raise SelectionError(f"when={k}: a positive number of steps is needed.")
    return lambda step: step % k == 0


def due_at(when: When | None, steps: int | None) -> Due:
    """The rule that ``when`` stands for. None: PER_DECADE steps in every decade, where features move, and every hundredth step,
    or every hundredth part of a training of ``steps``."""
    if when is None:
        often = 100 if steps is None else max(1, steps // 100)

        def early(step: int) -> bool:
            decade = step > 1 and int(PER_DECADE * math.log10(step)) != int(PER_DECADE * math.log10(step - 1))
            return step <= 1 or decade or step % often == 0
        return early
    if callable(when):
        return when
    return {_whole_step(step) for step in when}.__contains__ if isinstance(when, Iterable) else every(when)


def _step(step: Any) -> int:
    """The step of a call as a whole number."""
    try:
        return operator.index(step)
    except TypeError:
        raise SelectionError(f"watch({step!r}): the step is a {type(step).__name__}, and a whole number is needed, that of the "
                             f"training step: watch(step, loss=loss).") from None


def _number(name: str, value: Any) -> float:
    """A logged scalar as a number."""
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        seen = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}, a {type(value).__name__}"
        raise SelectionError(f"watch(step, {name}=...) is {seen}, and one number is needed, which is kept with the step. Give "
                             f"{name}.mean() or {name}.item() of a tensor; text belongs into settings=.") from None


@dataclass
class Schedule:
    """Chooses what is measured at a step, so that measuring takes at most ``share`` of wall time (None: no limit), or ``free``
    seconds if that is more. Steps may begin again in every epoch: they are counted as they come. A training that goes on at a
    step before ``steps`` ends there.
    """

    when: When | None
    steps: int | None
    share: float | None
    free: float  # seconds
    light: bool  # is there a light set that is less than everything?
    put_off: list[int] = field(default_factory=list)  # steps that were due and had no budget
    tried: bool = False  # to measure, once
    owed: bool = False  # everything, of a step that was due
    missed: bool = False  # a step that was due has nothing at all
    begun: float | None = None  # seconds, when the first call came
    at: int = 0  # the step of the last call
    done: int = 0  # steps since the first call
    total: int = 0  # steps from the first call to the end
    spent: float = 0.0  # seconds
    spent_light: float = 0.0  # seconds of them on the light set
    opening: float | None = None  # seconds of the first measurement
    guess: dict[Part, float] = field(default_factory=dict)  # seconds of a measurement, before there are any
    costs: dict[Part, deque[float]] = field(  # seconds of the last ones
        default_factory=lambda: {"everything": deque(maxlen=RECENT), "light": deque(maxlen=RECENT)})
    seen: tuple[tuple[int, float], ...] = ((0, 0.0), (0, 0.0))  # steps and seconds of training, at the last two doublings

    def __post_init__(self) -> None:
        if self.share is not None and not (isinstance(self.share, Real) and 0 < self.share <= 1):
            raise SelectionError(f"budget={self.share}: a share of wall time in (0, 1], or None for no limit.")
        if not (isinstance(self.free, Real) and 0 <= self.free < math.inf):
            raise SelectionError(f"free_seconds={self.free!r}: the seconds that measuring may take in a short training, a number "
                                 f"that is not negative. For no limit at all: budget=None.")
        if self.steps is not None and not (isinstance(self.steps, Integral) and self.steps > 0):
            raise SelectionError(f"steps={self.steps!r}: the number of steps of the training, a positive number, or None if it "
                                 f"is not known.")
        self.due: Due = due_at(self.when, self.steps)

    def come(self, step: int) -> None:
        """Take note of a step, at every call."""
        if self.begun is None:
            self.begun, self.at = time.perf_counter(), step
            self.total = 0 if self.steps is None else self.steps - step if step < self.steps else self.steps
        self.done += step - self.at if step >= self.at else 1
        self.at = step

    def choose(self, step: int) -> Part:
        """Choose what is measured at this step."""
        due = self.due(step)
        if not self.tried:
            return "everything"
        if not (due or self.owed):
            return "nothing"
        if self._pays_for("everything"):
            return "everything"
        if self.light and (due or self.missed) and self._pays_for("light"):
            return "light"
        if due:
            self.postpone(step)
        return "nothing"

    def postpone(self, step: int) -> None:
        """Note that a due measurement is put off."""
        self.put_off.append(step)
        self.owed = self.missed = True

    def begin(self, step: int, part: Part) -> None:
        """Take note that a measurement begins."""
        self.come(step)
        self.owed, self.missed = part == "light", False

    def pay(self, part: Part, seconds: float, succeeded: bool) -> None:
        """Take note that a measurement has ended. One that failed counts as spent, and the next is expected to take as long."""
        self.spent += seconds
        self.spent_light += seconds if part == "light" else 0.0
        if self.opening is None and succeeded and (part == "everything" or self.guess):
            self.opening = seconds  # it pays for what is loaded once
        else:
            self.costs[part].append(seconds if succeeded else max(seconds, self.expected(part)))

    @property
    def taken(self) -> float:
        """Share of the wall time that measuring took."""
        elapsed = 0.0 if self.begun is None else time.perf_counter() - self.begun
        return self.spent / elapsed if elapsed else 0.0

    def whole(self, step_seconds: float) -> float:
        """Seconds for the whole training, as far as its length is known."""
        earned = (self.share or 0.0) * step_seconds * self.total
        return max(self.free, earned) if math.isfinite(earned) else self.free

    def _pays_for(self, part: Part) -> bool:
        """Is there budget for this part now, and for everything once more at the end?"""
        if self.share is None:
            return True
        cost, everything, light = self.expected(part), self.expected("everything"), self.expected("light")
        known = self.steps is None or bool(self.costs["everything"] or self.guess)
        # until a second one is known, half of the first is kept for the end, which is more than is expected
        last = everything if known else max(everything, (self.opening or 0.0) / 2)
        room, in_all = self._room(self.share, cost, last)
        curve = CURVE * light if self.free else 0.0
        if part == "everything":
            most = (room - curve) / 2 if self.light and self.free else room
            paid = self.spent + cost <= room and self.spent + max(cost, last) + last <= in_all
            return paid and self.spent - self.spent_light + cost <= most
        ends = self.spent + cost + last <= in_all or self.spent - self.spent_light + last > in_all
        alone = self.free > 0 and everything > (in_all - last - curve) / 2  # nothing but light measurements until the end
        return ends and self.spent + cost <= room and (alone or self.spent_light + cost <= (room + curve) / 2)

    def learn(self, part: Part, seconds: float) -> None:
        """Correct the guesses by the first measurement, without its survey."""
        ratio = self.guess["everything"] / self.guess["light"]
        light = seconds if part == "light" else min(self.guess["light"], seconds)
        self.guess = {"light": light, "everything": light * ratio if part == "light" else seconds}

    def expected(self, part: Part) -> float:
        """Seconds of the next measurement: the median of the last ones, of which one may have been disturbed. Until there are
        some, what was estimated; else a fifth of the first, which pays for what is loaded once, and of that a fifth for the
        light set."""
        if self.costs[part]:
            return statistics.median(self.costs[part])
        if self.guess and part == "everything":  # in proportion to what light measurements turn out to cost
            return self.guess[part] / self.guess["light"] * self.expected("light")
        if self.guess:
            return self.guess[part]
        return self.expected("everything") / 5 if part == "light" else (self.opening or 0.0) / 5

    def _room(self, share: float, cost: float, last: float) -> tuple[float, float]:
        """Seconds that may have been spent by now, if a measurement of this cost is made, and in the whole training, if another
        one ends it."""
        elapsed = time.perf_counter() - (self.begun or 0.0)
        done, total = self.done, max(self.done, self.total)
        if not done:
            return 0.0, math.inf
        pace = self._pace(elapsed - self.spent)
        if self.steps is None:
            earned, in_all = share * (elapsed + cost), max(share * (elapsed + cost + last), self.free)
            until = self.free / share / pace if pace > 0 else math.inf  # the step at which the share pays for more
            lent = (self.free - last) * min(1.0, math.log1p(done) / math.log1p(until)) ** EARLY if self.free else 0.0
            return max(earned, lent), in_all
        in_all = max(self.free, SURE * pace * total * share / (1 - share) if share < 1 else math.inf)
        evenly = max(0.0, 1 - FEW * cost / in_all) / 2 if in_all else 0.0
        return in_all * ((1 - evenly) * math.log1p(done) / math.log1p(total) + evenly * done / total), in_all

    def _pace(self, seconds: float) -> float:
        """Seconds per step: over all steps, or over the later half if that was quicker, because the first steps pay for one-time
        loading."""
        if self.done >= 2 * self.seen[1][0]:
            self.seen = self.seen[1], (self.done, seconds)
        before, then = self.seen[0]
        mean = seconds / self.done
        return min(mean, (seconds - then) / (self.done - before)) if self.done > before else mean


# ------------------------------------------------------------------------------------------------------------- observe

MATRICES = 256  # inputs; feature matrices of larger layers are not kept in a run unless asked for


class Observer:
    """Watch a model while it trains: call it anywhere in the loop; it measures when its schedule says so.

    >>> watch = richter.Observer(model, probe, when=50)
    >>> for step, (x, y) in enumerate(loader):
    ...     ...
    ...     watch(step, loss=loss)
    >>> watch.frame

    ``when``: every so many steps, a list of steps, or a callable (``richter.log_spaced(last)``, ``richter.epochs(loader)``); left
    out, steps are due densely at the beginning and every hundred later. The first call always measures.

    All measuring, first and last included, takes at most the share ``budget`` of the wall time, or ``free_seconds`` if that is
    more (``budget=None``: no limit). With ``steps=``, the number of steps of the training, most of it is spread over their
    logarithm, because features move early. At a due step without budget for everything the light set is measured alone
    (``richter.measures.LIGHT``, on which a verdict rests); without budget for that, the step is put off. If the budget does not
    pay for a curve of light measurements and one full one, fewer examples of the probe are measured (``watch.probe``). A line at
    the first call says so, and what a measurement costs (``announce=False``: no line). The seconds of a full measurement are kept
    for the end: ``watch.close()``, the end of ``with Observer(...) as watch`` and ``richter.diagnose(watch)`` measure the last
    step, if it has not been measured (and unless memory or the device gave out). ``watch.now(step)`` measures regardless.
    ``watch.share`` is the share that was taken.

    ``run="runs/demo"`` keeps everything on disk as it is measured: rows, scalars, the initial weights, the feature matrices of
    layers with at most ``matrices`` inputs (whenever the step has grown by a tenth), and ``settings`` (a dataclass or mapping of
    yours). ``keep_features=64``: also, at the same steps, Gram matrices of what each layer reads of so many examples, by which
    steps and runs are compared (``richter compare``); ``keep_inputs``: small pictures of these (of this shape, where inputs are
    flat). After a crash ``resume=True`` goes on with the run and its initial weights. If there is such a run already, the new one
    is ``runs/demo-2``, with a line that says so; ``overwrite=True`` deletes the earlier one. Of several ranks the first writes.
    ``pretrained``: whether the model was trained before, for the verdict (None: not known). Everything else is as in
    ``richter.measure``.

    A failure does not end the training (``on_error="warn"``): weights that are NaN, a full disk, no memory, or an error of the
    model on the probe is kept in ``watch.failures`` and in the run, with one warning for each reason, and measuring is tried
    again at the next due step. What the disk refuses waits in memory until there is room. Wrong arguments are an error of the
    constructor or of the first call. ``on_error="raise"``: every failure is an error. Any thread may call: one measures at a
    time, and no scalar is lost.
    """

    def __init__(self, model: nn.Module, probe: Probe, *, run: str | os.PathLike[str] | Writer | None = None,
                 settings: Any = None, resume: bool = False, overwrite: bool = False, matrices: int | None = None,
                 keep_features: int = 0, keep_inputs: bool | tuple[int, ...] = False,
                 when: When | None = None, steps: int | None = None, measures: Iterable[str | Measure] | None = None,
                 initial: Mapping[str, Tensor] | None = None, budget: float | None = 0.05,
                 free_seconds: float = 5.0, announce: bool = True, pretrained: bool | None = None,
                 cotangents: Cotangents | Function | None = None, layers: Layers = None, memory: str | float = "2GiB",
                 output: Output | None = None, mode: str = "eval", seed: int = 0,
                 on_error: Literal["warn", "raise"] = "warn") -> None:
        if on_error not in ("warn", "raise"):
            raise SelectionError(f"on_error={on_error!r}: 'warn' (a failure does not end the training) or 'raise'.")
        if matrices is not None and matrices < 0:
            raise SelectionError(f"matrices={matrices}: matrices are kept of layers with at most so many inputs; 0: of none.")
        self.matrices = matrices if matrices is not None else MATRICES if run is not None else 0
        self.measurement = Measurement(model, probe, measures, initial=initial, cotangents=cotangents, layers=layers,
                                       memory=memory, output=output, mode=mode, seed=seed)
        self.model, self.measures = self.measurement.model, self.measurement.measures
        self._given = probe
        self.keepsakes = Keepsakes(self.model, probe, keep_features, keep_inputs, layers, self.measurement.subject.memory,
                                   output) if keep_features or keep_inputs else None
        self._light = tuple(m.name for m in self.measures if m.name in LIGHT)
        self._schedule = s = Schedule(when, steps, budget, free_seconds, light=0 < len(self._light) < len(self.measures))
        self.when, self.budget, self.put_off, self.on_error = s.due, s.share, s.put_off, on_error
        self.announce, self.pretrained = announce, pretrained
        start = self.measurement.subject.initial or self.model.state_dict()
        with torch.inference_mode(False):
            self.initial = {k: v.detach().clone() for k, v in start.items() if isinstance(v, Tensor)}
        self.snapshots: list[Snapshot] = []
        self._guard = threading.RLock()  # of what is kept; an RLock, because a handler of signals may call too
        self._measuring = threading.Lock()
        self._at: tuple[int, int] | None = None  # the thread that measures, and the step
        self._seen: int | None = None  # the last step of a call
        self._unmeasured = False  # was a step seen since everything was measured, or failed to be?
        self._first = True  # nothing was tried yet: what is wrong with the arguments is an error
        self._drawn: int | None = None  # the last step whose matrices were kept
        if run is None and (settings is not None or resume or overwrite):
            raise SelectionError("settings=, resume= and overwrite= need a run on disk: name it with run='runs/...'.")
        self.writer: Writer | None = None
        self._owns = not isinstance(run, Writer)
        if run is not None:
            open_run(self, run, settings, resume, overwrite, initial is not None)
        self._record = Record(self.writer)
        if self.writer is not None and (n := self.writer.run.about.get("examples", probe.n)) < probe.n and self.snapshots:
            self.measurement = self.measurement.reduced(n, self.writer.run.about.get("kernel_examples", n))
        self._earlier = tuple(self.snapshots)  # of the run that is resumed, until it is clear that the model is its own
        self.measurement.subject.initial = self.initial

    @property
    def probe(self) -> Probe:
        """The examples that are measured: those of the probe that was given, or some of them, if the budget pays for no more."""
        return self.measurement.probe

    @property
    def share(self) -> float:
        """The share of wall time that went into measuring, since the first call."""
        return self._schedule.taken

    @property
    def spent(self) -> float:
        """The seconds that went into measuring."""
        return self._schedule.spent

    # ----------------------------------------------------------------------------------------------------- measuring

    def __call__(self, step: int, **scalars: Any) -> Snapshot | None:
        """Keep the scalars, and measure if this step is due. Returns the snapshot, if one was taken."""
        try:
            step = _step(step)
        except SelectionError:
            with self._tolerating(None, "a call without a step was ignored"):
                raise
            return None
        with self._guard:
            later = self._first and self.writer is not None and not self.writer.begun  # failing, it changes no resumed run
            self._schedule.come(step)
            self._record.look_back(step, self._seen)
            self._seen, self._unmeasured = step, True
        try:
            with self._guard:
                values = self._numbers(step, scalars)
                if not later:
                    self._keep(step, values)
            snap = self._attempt(step)
        except Exception:
            if later:
                self._seen, self._unmeasured = None, False  # nothing is left to measure
            raise
        if later:
            with self._guard:
                self._keep(step, values)
        return snap

    def now(self, step: int) -> Snapshot | None:
        """Measure at once, whatever the schedule and the budget say. None if that failed (``watch.failures`` says why)."""
        return self._attempt(_step(step), now=True)

    def _numbers(self, step: int, scalars: Mapping[str, Any]) -> dict[str, float]:
        """Scalars as numbers. A value that is not a number is an error in the first call, and a failure later."""
        values = {}
        for name, value in scalars.items():
            with self._tolerating(step, f"the scalar {name!r} was not kept"):
                values[name] = _number(name, value)
        return values

    def _keep(self, step: int, values: Mapping[str, float]) -> None:
        """Record scalars; a failure is noted."""
        if values:
            with self._tolerating(step, "not written"):
                self._record.scalars(step, values)

    @contextlib.contextmanager
    def _tolerating(self, step: int | None, what: str) -> Iterator[None]:
        """Note a failure. Raise it with ``on_error="raise"``, and in the first call if its arguments are to blame."""
        try:
            yield
        except Exception as why:
            if self.on_error == "raise" or (self._first and not passes_by(why)):
                raise
            with self._guard:
                self._record.failed(step, what, why)

    def _attempt(self, step: int, now: bool = False) -> Snapshot | None:
        """Measure if this step is due, or ``now``. One thread measures at a time; other measurements due meanwhile are put off,
        unless they are of the same step."""
        ours = self._at is not None and self._at[0] == threading.get_ident()  # called by the model or measure, or by a signal
        if ours or not self._measuring.acquire(blocking=now):
            with self._guard:
                if (now or self.when(step)) and self._at is not None and self._at[1] != step:
                    self._schedule.postpone(step)
            return None
        self._at = threading.get_ident(), step
        try:
            with self._tolerating(step, "not measured"):
                with self._guard:
                    part: Part = "everything" if now else self._schedule.choose(step)
                    self._schedule.tried = True
                    self._unmeasured &= part != "everything"  # the end measures what was put off
                if part != "nothing":
                    return self._measured(step, part, now)
            return None
        finally:
            self._at, self._first = None, False
            self._measuring.release()

    def _measured(self, step: int, part: Part, now: bool) -> Snapshot:
        """Measure, record the snapshot, and account for the time."""
        if self.writer is not None and self.writer.closed:
            raise StoreError(f"the run {self.writer.path} was closed: nothing more is measured into it. resume=True opens it.")
        # matrices are kept when the step has grown by a tenth: about 25 times in a decade, however often it is measured
        grown = self._drawn is None or step >= 1.1 * self._drawn or step < self._drawn
        start, succeeded, snap = time.perf_counter(), False, None
        fits = self._first and not now and self._fits
        try:
            if fits:
                part, snap = self._fitted(step)
            draws = now or (part == "everything" and grown)
            self._schedule.begin(step, part)
            if snap is None:
                snap = self.measurement.take(step, self.matrices if draws else 0, self._light if part == "light" else None)
            if fits:
                self._schedule.learn(part, self.measurement.work_seconds)
            if draws and self.keepsakes is not None:
                snap = self._with_features(snap, self.keepsakes)
            with self._guard:
                if self._earlier and is_new(self.model, self.initial, self._earlier, snap):
                    self._record.looks_new(step, self._earlier[-1].step)
                self._earlier = ()
                snap = self._kept(snap, draws)
            succeeded = True
        finally:
            with self._guard:
                self._schedule.pay(part, time.perf_counter() - start, succeeded)  # with writing it down
        if fits and self.announce:
            print(announcement(self._schedule, self.probe, self._given.n), file=sys.stderr)
        return snap

    # ------------------------------------------------------------------------------------------------- a probe that fits

    @property
    def _fits(self) -> bool:
        """Is the size of the probe to be chosen? Not of a small one, without a budget, or on ranks, which would choose apart."""
        s, n = self._schedule, self.probe.n
        return s.share is not None and s.light and n >= 2 * least_examples(self.probe) and not self._earlier and not on_ranks()

    def _fitted(self, step: int) -> tuple[Part, Snapshot | None]:
        """Choose the largest part of the probe for which the budget pays: a curve of light measurements, and everything at the
        end. Estimated from a light measurement of few examples, which is returned if they are to be all."""
        s, given, begun, least = self._schedule, self.measurement, time.perf_counter(), least_examples(self.probe)
        pilot = given.reduced(least, LEAST // 8)
        snap = pilot.take(step, only=self._light)
        if pilot.work_seconds <= s.free / 20:  # most of it may be what is loaded once
            snap = pilot.take(step, only=self._light)
        cost, seconds = pilot.work_seconds, pilot.pass_seconds / pilot.probe.n
        light, full = pilot.passes(self._light), pilot.passes()
        whole = SURE * s.whole(BATCH * seconds) - (time.perf_counter() - begun)
        n, s.guess = fitted(given.probe.n, least, cost, seconds, light, full, whole)
        kernel = given.probe.n if given.probe.kernel_examples is None else given.probe.kernel_examples
        if n < given.probe.n:
            self.measurement = given.reduced(n, max(LEAST // 8, min(kernel, n // 4)))
        if self.writer is not None:
            self.writer.describe(examples=n, kernel_examples=self.probe.kernel_examples)
        if n == least:
            self.measurement = pilot
            return "light", snap
        return ("everything" if s.guess["everything"] <= whole / 8 else "light"), None

    def _with_features(self, snap: Snapshot, keepsakes: Keepsakes) -> Snapshot:
        """Return the snapshot with the features to be stored. If reading them fails, the numbers remain."""
        with self._tolerating(snap.step, "features not kept"):
            arrays = keepsakes.take(() if self.writer is None else [name for _, name, _ in self.writer.run.arrays])
            if self.writer is not None and (facts := keepsakes.news(self.writer.run)):
                self.writer.describe(features=facts)
            return replace(snap, arrays={**snap.arrays, **arrays})
        return snap

    def _kept(self, snap: Snapshot, draws: bool) -> Snapshot:
        """Keep a snapshot in memory and, with its matrices and the state for the next measurement, in the run."""
        subject = self.measurement.subject
        subject.previous = {**subject.previous, **subject.carried}  # not all is measured every time
        state = {key: value.cpu().contiguous() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                 for key, value in subject.carried.items() if isinstance(value, (Tensor, float, int))}
        with self._tolerating(snap.step, "not written"):
            self._record.snapshot(snap, state)
            self._drawn = snap.step if draws else self._drawn
        if self.writer is not None:
            snap = replace(snap, arrays={})  # they are on disk
        others = [s for s in self.snapshots if s.step != snap.step]  # a step that is measured again replaces
        if len(others) < len(self.snapshots):
            self._record.look_back(snap.step, self.snapshots[-1].step)
        self.snapshots = sorted([*others, snap], key=lambda s: s.step or 0)
        return snap

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def failures(self) -> list[Failure]:
        """Failures to measure, write or keep something, and their reasons; of a resumed run also those before."""
        with self._guard:
            return list(self._record.failures)

    @property
    def frame(self) -> pandas.DataFrame:
        """All rows so far: step, layer, measure, value, error, note, mark (a word of ``richter.core.Mark``)."""
        import pandas as pd
        return pd.DataFrame([tuple(r) for s in self.snapshots for r in s.rows],
                            columns=["step", "layer", "measure", "value", "error", "note", "mark"])

    def value(self, measure: str, layer: str = WHOLE) -> float:
        """Return the last number of one measure of one layer; ``"*"`` is the whole model."""
        return float(self.series(measure, layer).value[-1])

    def series(self, measure: str, layer: str = WHOLE) -> Series:
        """Return one measure of one layer over time: steps, values, standard errors."""
        snapshots = self.snapshots
        if not (rows := [row for s in snapshots if (row := s.get(measure, layer)) is not None]):
            raise unknown_row("this Observer", measure, layer, ((r.measure, r.layer) for s in snapshots for r in s.rows))
        return Series.of(rows)

    def scalars(self, name: str) -> Series:
        """Return one scalar that was passed with the steps (loss, accuracy, ...): steps and values, without standard errors."""
        with self._guard:
            if name not in (names := self._record.names):
                raise unknown("this Observer", "scalar", name, names)
            return self._record.curve(name)

    @property
    def scalar_names(self) -> list[str]:
        """Names of the scalars that were passed with the steps."""
        with self._guard:
            return self._record.names

    @property
    def scalar_frame(self) -> pandas.DataFrame:
        """All scalars that were passed with the steps: one column per name, by step."""
        with self._guard:
            return self._record.table

    @property
    def last(self) -> int | None:
        """The last step of a call or a measurement."""
        steps = [self._seen, *(s.step for s in self.snapshots[-1:])]
        return max((int(s) for s in steps if s is not None), default=None)

    def __repr__(self) -> str:
        last = f", the last at step {self.snapshots[-1].step}" if self.snapshots else ""
        where = f", in {self.writer.path}" if self.writer is not None else ""
        failed = f", {len(self.failures)} failures" if self.failures else ""
        return (f"Observer({type(self.model).__name__} on {self.probe.n} examples: {len(self.snapshots)} measurements{last}, "
                f"{self.share:.1%} of wall time{failed}{where})")

    def _repr_html_(self) -> str:
        """Return one line and the last numbers."""
        last = f'<div style="max-height:24em;overflow:auto">{self.snapshots[-1]._repr_html_()}</div>' if self.snapshots else ""
        return f"<p>{html.escape(repr(self))}</p>{last}"

    def stable_rate(self) -> float | None:
        """Return the largest learning rate at which gradient descent on the probe is stable at the initial weights."""
        return stable_rate(self.model, self.initial, self.probe, self.measurement.subject.output)

    # -------------------------------------------------------------------------------------------------------- ending

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Measure the last step if needed, write what waits, then end the run as the loop ended."""
        with contextlib.ExitStack() as end:  # an interrupt of one leaves out none of the others
            if self.writer is not None and self._owns:
                end.callback(self.writer.close)
            end.callback(self._finish, kind, error, trace)
            self.catch_up(error)

    def close(self) -> None:
        """Measure, if the last step that was seen has not been; then finish the run on disk, if it is the Observer's own. The
        end of the process finishes it too, without measuring."""
        self.__exit__(None, None, None)

    def catch_up(self, error: BaseException | None = None) -> None:
        """Measure everything at the last step that was seen, unless that was done or tried. After an error of the loop a failure
        here is noted only: it must not stand in the place of the error."""
        step = self._seen
        if step is None or not self._unmeasured or not survives(error) or (self.writer is not None and self.writer.closed):
            return
        policy, self.on_error = self.on_error, self.on_error if error is None else "warn"
        try:
            self.now(step)
        finally:
            self.on_error = policy

    def _finish(self, *error: Any) -> None:
        """Write what waits, and end the run as the loop ended."""
        if self.writer is None:
            return
        step = self.snapshots[-1].step if self.snapshots else None
        with self._guard:
            try:
                with self._tolerating(step, "not written"):
                    self._record.flush()
            finally:
                if self._owns and self.writer.begun:  # a resumed run into which nothing was written ends as it did
                    with self._tolerating(step, "the end of the run was not written"):
                        self.writer.__exit__(*error)

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise SelectionError("an Observer cannot be copied or pickled: it has locks, and a run that only it writes. Copy or save "
                             "watch.model.state_dict(), and leave the Observer out; a copy of the model gets an Observer of its "
                             "own, and a training that goes on later passes run=... and resume=True.")
