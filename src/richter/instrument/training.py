"""Is there a training to judge? What is known of one, and the rules by which it has failed, in their order.

A training that diverged, did not move, collapsed, did not learn, has only begun or was last measured long ago is neither lazy nor
rich, whatever its numbers are: these rules come first. With p what guessing gets right, s the standard deviation of an accuracy
at p (``Labels``), and H the loss of the best guess that is the same for all examples (the entropy of the probe's classes, or
log C):

    diverged       a loss, weight or output that is not finite; the smoothed loss > 1.5 x first and > log(C) / 2; or the probe's
                   loss > 2 max(first, log C) with an accuracy <= p + 5 s, unless the logged loss has fallen (then training
                   works, and what it learned does not help the probe)
    untrained      no weight moved
    collapsed      outputs differ between examples by <= 1e-3 of max(their initial spread, their rms), or by < 1e-6; not if they
                   differ more than at the start and the loss has fallen (targets with a large mean)
    not learning   neither a loss < .9 x first nor an accuracy that rose by > 5 s; or no logged loss < .9 H, that of the probe in
                   [H, 1.5 log C], and an accuracy <= p + 5 s: a loss that fell to that of guessing is no learning
    early          the loss fell by less than 25 %, unless the logged loss no longer falls and the network is better than
                   guessing: an accuracy > p + 5 s, or a logged loss < .9 H (no classes: a loss < .9 x first)
    stale          more steps were trained after the last measurement than before it

"Smoothed": the logged loss, exponentially, with weight max(.05, 1/k) for its k-th value. A number that is missing is NaN, and a
rule that needs it does not apply; without classes, log C and accuracies are left out. Guessing stands in for a first measurement
whose normalisation layers had seen no data, or whose buffers have moved since.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from richter.core import WHOLE, Labels, Mark
from richter.core.values import ASSUMED_LOSS, FEW_BATCHES, MOVED_BUFFERS, NO_DATA
from richter.instrument.snapshot import Snapshot

# -------------------------------------------------------------------------------------------------------------- losses
# The logged loss of a training: which scalar it is, what it began with, where it is now, and whether it still falls.

LOSSES = ("loss", "train_loss", "training_loss", "loss_train")  # names of scalars that are the training's loss, best first
ACCURACIES = tuple(f"{a}_{b}" if order else f"{b}_{a}" for order in (True, False) for a in ("test", "val", "valid", "validation",
                   "eval", "held_out") for b in ("accuracy", "acc"))  # names of scalars that are accuracies on held-out examples
MEMORY = 1000  # values of a loss that smoothing remembers: older ones weigh less than 1e-22
REST, SURELY = 0.1, 0.2  # a loss rests if its last quarter has at most this share of its whole fall; and with two errors more
QUARTER = 8  # values of a loss in each of the last two quarters: with fewer it is not known whether it still falls


@dataclass(frozen=True)
class Loss:
    """A logged loss: its first and last value, and the smoothed one."""

    name: str
    first: float
    last: float
    smoothed: float
    lost: int | None = None  # the step from which on it is not finite, if it ended so
    gaps: int = 0  # values that are not finite and were followed by finite ones
    late: float = math.nan  # by how much it fell from the third to the last quarter of the steps, as a share of its whole fall
    late_error: float = math.nan

    @property
    def ratio(self) -> float:
        return self.smoothed / self.first if self.first > 0 else math.nan

    @property
    def rests(self) -> bool:
        """Does it no longer fall? False where that is not known. (The last quarter of an even fall has .29 of it, that of an
        exponential one .09 after three time constants.)"""
        return self.late < REST and self.late + 2 * self.late_error < SURELY


def loss_name(names: Iterable[str]) -> str | None:
    """Name of the scalar that is the training's loss: ``loss``, ``train_loss``, ``train/loss``, ``Loss/train``, ..."""
    plain = {re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_"): name for name in names}
    return next((plain[name] for name in LOSSES if name in plain), None)


def summary(name: str, steps: Sequence[int], values: Sequence[float]) -> Loss | None:
    """Summarise a curve of losses; None if it has fewer than two values."""
    finite = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    lost = None
    if values and not math.isfinite(values[-1]):
        lost = next(steps[i] for i in range(len(values) - 1, -1, -1) if i == 0 or math.isfinite(values[i - 1]))
    if len(finite) < 2 and lost is None:
        return None
    gaps = sum(1 for s, v in zip(steps, values, strict=True) if not math.isfinite(v) and (lost is None or s < lost))
    first, last = (finite[0][1], finite[-1][1]) if finite else (math.nan, math.nan)
    level, skipped = math.nan, max(0, len(finite) - MEMORY)
    for k, (_, v) in enumerate(finite[skipped:], skipped + 1):
        level = v if math.isnan(level) else level + max(0.05, 1 / k) * (v - level)
    return Loss(name, first, last, level, lost, gaps, *_late(finite))


def _late(finite: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fall of a loss from the third to the last quarter of the steps, as a share of its whole fall, and its standard error, from
    the differences between neighbours."""
    if len(finite) < 2:
        return math.nan, math.nan
    begun, end = finite[0][0], finite[-1][0]
    quarters = [[v for s, v in finite if low < (s - begun) / max(1, end - begun) <= low + 0.25] for low in (0.5, 0.75)]
    if min(map(len, quarters)) < QUARTER:
        return math.nan, math.nan
    third, fourth = (sum(q) / len(q) for q in quarters)
    scatter = [sum((b - a) ** 2 for a, b in itertools.pairwise(q)) / (2 * (len(q) - 1)) / len(q) for q in quarters]
    whole = finite[0][1] - fourth
    return ((third - fourth) / whole, math.sqrt(sum(scatter)) / whole) if whole > 0 else (math.nan, math.nan)


# -------------------------------------------------------------------------------------------------------------- course

GAP, TURN, MOVED = "linearisation_gap", "feature_change_cka", "function_change"
RISEN, DOUBLED, FALLEN, ADVANCED, SIGMAS = 1.5, 2.0, 0.9, 0.25, 5.0
KNOWN = 0.1  # of the loss of guessing: a network that begins with less has little left to learn
KNOWS = 0.5  # accuracy from which on a network knows its examples, and may have memorised them
SPREAD, VANISHED = 1e-3, 1e-6


@dataclass(frozen=True)
class Margin:
    """Distance of a number from the nearest edge at which the verdict would be another."""

    number: str  # its name
    value: float
    edge: float
    other: str  # the verdict beyond the edge; "": it depends on other numbers
    error: float | None = None  # standard error of the number

    @property
    def distance(self) -> float:
        return abs(self.value - self.edge)

    @property
    def errors(self) -> float | None:
        """The distance in standard errors; None where there is no error bar."""
        return None if not self.error else self.distance / self.error

    def __str__(self) -> str:
        how = "fell below" if self.value >= self.edge else "rose to"
        away = "" if self.errors is None else f", {float(f'{self.errors:.2g}'):,g} standard errors away"
        becomes = f"become '{self.other}'" if self.other else "be another one"
        return f"the verdict would {becomes} if {self.number} ({self.value:.3g}) {how} {self.edge:g}{away}"


@dataclass(frozen=True)
class Judgement:
    """A verdict on a whole training: its word, a sentence, what to do, and how near another verdict is (None: no edge)."""

    word: str
    sentence: str
    advice: tuple[str, ...] = ()
    margin: Margin | None = None


@dataclass(frozen=True)
class Course:
    """A training as far as it is known: its first and last measurement (None: only one was made), its loss and its last step."""

    first: Snapshot | None
    last: Snapshot
    loss: Loss | None = None
    reached: int | None = None  # the last step that anything is known of
    lost: str = ""  # what was not finite when somebody tried to measure, after the last measurement
    pretrained: bool | None = None  # as the user says
    held_out: tuple[str, float] | None = None  # the accuracy on held-out examples, and its name
    stable_rate: Callable[[], float | None] | None = None  # the largest stable learning rate at the initial weights

    # ------------------------------------------------------------------------------------------------------ guessing

    @property
    def labels(self) -> Labels | None:
        return self.last.labels

    @property
    def guess(self) -> float:
        """The loss of the best guess."""
        return math.nan if self.labels is None else self.labels.guess

    @property
    def log_classes(self) -> float:
        return math.nan if self.labels is None else math.log(self.labels.classes)

    @property
    def noise(self) -> float:
        """The standard deviation of an accuracy at chance."""
        return math.nan if self.labels is None else self.labels.noise or math.nan

    @property
    def guessed(self) -> float:
        """The largest accuracy that may come of guessing."""
        return math.nan if self.labels is None else self.labels.chance + SIGMAS * self.labels.noise

    # --------------------------------------------------------------------------------------------- first and last

    def now(self, measure: str) -> float:
        return math.nan if self.unsettled else value(self.last, measure)

    def before(self, measure: str) -> float:
        return math.nan if self.first is None or self.begun_unsettled else value(self.first, measure)

    @property
    def unsettled(self) -> bool:
        """Have normalisation layers seen so few batches that the network's outputs in eval mode are not those that it was trained
        for? Layers that have seen none in all the training are not trained with batches."""
        return FEW_BATCHES in _note(self.last)

    @property
    def begun_unsettled(self) -> bool:
        """Was it so at the first measurement, or have other buffers moved since?"""
        if self.first is None:
            return False
        note = _note(self.first)
        return FEW_BATCHES in note or (NO_DATA in note and note != _note(self.last)) or self.buffers_moved

    @property
    def buffers_moved(self) -> bool:
        """Have buffers moved that are of no norm of torch? Then the initial network is taken with the buffers of now."""
        return any(MOVED_BUFFERS in row.note for m in (GAP, TURN) if (row := self.last.get(m)) is not None)

    @property
    def begun_at_start(self) -> bool:
        """Is the first measurement one of the initial weights?"""
        return self.first is not None and unmoved(self.first)

    @property
    def begun_trained(self) -> bool:
        """Was the network better than guessing before it was trained, or does the user say that it was pretrained?"""
        if self.pretrained is not None:
            return self.pretrained
        return self.first is not None and self.begun_at_start and value(self.first, "probe_accuracy") > self.guessed

    @property
    def begun_knowing(self) -> bool:
        """Was there nothing left to learn on the probe, neither for the loss nor for the accuracy?"""
        return (self.begun_trained and self.before("probe_loss") < KNOWN * self.guess
                and self.before("probe_accuracy") + SIGMAS * self.noise >= 1)

    @property
    def memorised(self) -> bool:
        """Does it know the probe, and held-out examples no better than by guessing?"""
        return (self.held_out is not None and self.held_out[1] <= self.guessed
                and self.now("probe_accuracy") > max(KNOWS, self.guessed))

    @property
    def large_outputs(self) -> bool:
        """Did it begin with a loss of more than twice that of guessing, although it knew nothing?"""
        return self.begun_at_start and not self.begun_trained and self.before("probe_loss") > 2 * self.log_classes

    # ------------------------------------------------------------------------------------------------------ learning

    @property
    def ratios(self) -> list[Margin]:
        """The loss relative to the first one, as far as it is known: on the probe, and as logged."""
        guessing = self.begun_unsettled and self.labels is not None and self.labels.entropy is not None
        first, name = (self.guess, "that of guessing") if guessing else (self.before("probe_loss"), "first")
        ratios, now = [], self.last.get("probe_loss")
        if now is not None and first > 0 and math.isfinite(self.now("probe_loss")):
            error = now.error / first
            ratios.append(Margin(f"probe_loss / {name}", now.value / first, FALLEN, "early",
                                 error if math.isfinite(error) else None))
        if self.loss is not None and math.isfinite(self.loss.ratio):
            ratios.append(Margin(f"smoothed {self.loss.name} / first", self.loss.ratio, FALLEN, "early"))
        return ratios

    @property
    def risen(self) -> float:
        """Rise of the accuracy, in standard deviations."""
        before = self.labels.chance if self.begun_unsettled and self.labels else self.before("probe_accuracy")
        return (self.now("probe_accuracy") - before) / self.noise

    @property
    def guesses(self) -> bool:
        """Are its answers no better than guessing, by both losses and by accuracy?"""
        return (self.guess <= self.now("probe_loss") <= RISEN * self.log_classes
                and (self.loss is None or self.loss.smoothed >= FALLEN * self.guess)
                and self.now("probe_accuracy") <= self.guessed)

    @property
    def finished(self) -> bool:
        """Does the logged loss no longer fall, with a network that is better than guessing?"""
        if self.loss is None or not self.loss.rests:
            return False
        if self.labels is None:
            return any(m.value < FALLEN for m in self.ratios)
        return self.now("probe_accuracy") > self.guessed or self.loss.smoothed < FALLEN * self.guess

    @property
    def fallen(self) -> float:
        """Fall of the loss relative to the first one: on the probe or as logged, whichever is more."""
        return max((1 - m.value for m in self.ratios), default=math.nan)

    @property
    def known(self) -> bool:
        """Is there anything that says whether it learned?"""
        return bool(self.ratios) or math.isfinite(self.risen)


# --------------------------------------------------------------------------------------------------------------- rules

LARGE_OUTPUTS = ("the initial outputs are large: scale the initial weights of the last layer down, or all of them if they were "
                 "random.")
ANOTHER_PROBE = ("no change is needed for this: the network knew the answers before. Measure on examples that it has yet to "
                 "learn, if there are such.")
MEASURE_AGAIN = ("measure after the last step: watch.now(step), or close the Observer (`with Observer(...) as watch` does). A "
                 "larger budget= measures more often.")


def diverged(c: Course) -> Judgement | None:
    said, margin = _not_finite(c), None
    if not said and c.loss is not None and c.loss.ratio > RISEN and not c.loss.smoothed <= c.log_classes / 2:
        said = f"{c.loss.name} rose from {c.loss.first:.3g} to {c.loss.smoothed:.3g} (smoothed)."
        margin = Margin(f"smoothed {c.loss.name} / first", c.loss.ratio, RISEN, "not learning")
    first, now, classes = c.before("probe_loss"), c.now("probe_loss"), c.labels is not None
    first = max(first, c.log_classes) if classes and math.isfinite(first) else first
    fell = c.loss is not None and max(c.loss.smoothed, c.loss.last) < FALLEN * c.loss.first
    better = classes and not c.now("probe_accuracy") <= c.guessed
    if not said and first > 0 and now > DOUBLED * first and not fell and not better:
        said = (f"the loss of the probe rose to {now:.3g}, {now / first:.2g} times that of {'guessing or of ' if classes else ''}"
                f"the start.")
        margin = Margin(f"probe_loss / {'max(first, log C)' if classes else 'first'}", now / first, DOUBLED, "not learning")
    if not said:
        return None
    rate = None if c.stable_rate is None else c.stable_rate()
    limit = "" if rate is None else (f" Gradient descent on the probe is stable up to a learning rate of about {rate:.2g} at the "
                                     f"initial weights: 2 over the largest curvature of the mean loss. This holds for full "
                                     f"batches without momentum (momentum m allows 1 + m times as much; Adam has another "
                                     f"scale), and the curvature may grow later.")
    return Judgement("diverged", f"diverged: {said}", (
        f"use a smaller learning rate (a third to a tenth), a warm-up, or clip the gradients.{limit}",
        *((LARGE_OUTPUTS,) if c.large_outputs else ())), margin)


def _not_finite(c: Course) -> str:
    if c.lost:
        return c.lost
    if c.loss is not None and c.loss.lost is not None:
        return f"{c.loss.name} is not finite from step {c.loss.lost:,} on."
    infinite = any(math.isinf(c.now(m)) for m in ("probe_loss", "output_rms", "output_spread"))
    return "the outputs on the probe are infinite." if infinite else ""


def untrained(c: Course) -> Judgement | None:
    if not unmoved(c.last):
        return None
    at = c.last.step
    if at is not None and c.reached is not None and c.reached > at:
        return Judgement("stale", f"stale: measured at step {at:,} only, where the weights are the initial ones. Training went "
                                  f"on to step {c.reached:,}, and nothing was measured since.", (MEASURE_AGAIN,))
    if at:
        return Judgement("untrained", f"untrained: every weight is exactly the initial one at step {at:,}.", (
            "no weight moved: does the optimiser hold the parameters of this model, is the learning rate 0, is optimiser.step() "
            "called?",))
    return Judgement("untrained", "untrained: every weight is exactly the initial one; there is nothing to judge yet.",
                     ("train, and measure again: watch.now(step) after the last step.",))


def collapsed(c: Course) -> Judgement | None:
    spread, before = c.now("output_spread"), c.before("output_spread")
    scale = max((s for s in (before, c.now("output_rms")) if math.isfinite(s)), default=math.nan)
    grown = (c.begun_unsettled or spread > before) and any(m.value < FALLEN for m in c.ratios)
    if not (spread <= SPREAD * scale or spread < VANISHED) or (grown and spread >= VANISHED):
        return None
    margin = Margin("output_spread / max(initial spread, rms)", spread / scale, SPREAD, "") if scale > 0 else None
    same = f"collapsed: all examples have the same output (they differ by {spread:.2g})"
    if before < VANISHED:
        return Judgement("collapsed", f"{same}, as at the start.", (
            "the signal dies on its way through the network: use larger initial weights, or normalisation.",), margin)
    return Judgement("collapsed", f"{same}.", ("use less weight decay, or a smaller learning rate.",), margin)


def not_learning(c: Course) -> Judgement | None:
    ratios = c.ratios
    learned = any(m.value < FALLEN for m in ratios) or c.risen > SIGMAS
    if not c.known or (learned and not c.guesses):
        return None
    best = min((m for m in ratios if m.value >= FALLEN), key=lambda m: m.value, default=None)
    words = [f"the loss fell by less than a tenth ({best.number} is {best.value:.3g})"] if best else []
    if c.guesses:
        words.append(f"the loss on the probe ({c.now('probe_loss'):.3g}) is no better than that of guessing ({c.guess:.3g})")
    if math.isfinite(c.risen):
        words.append(f"the accuracy changed by {c.risen:.2g} standard deviations of chance")
    given = " beyond its given start" if c.begun_trained else ""
    nothing = f"{_nothing_left(c)}; " if c.begun_knowing else ""
    return Judgement("not learning", f"not learning{given}: {nothing}{', and '.join(words)}.", (_unlearned(c),), best)


def _nothing_left(c: Course) -> str:
    return (f"there was nothing left to learn on this probe, where it began with a loss of {c.before('probe_loss'):.2g} and an "
            f"accuracy of {c.before('probe_accuracy'):.3g}")


def _unlearned(c: Course) -> str:
    changes = sorted(r.value for r in c.last.rows if r.measure == "weight_change" and math.isfinite(r.value))
    moved = changes[len(changes) // 2] if changes else math.nan
    if c.begun_knowing:
        return ANOTHER_PROBE
    if c.guesses and any(m.value < FALLEN for m in c.ratios):
        return ("the loss fell to that of one answer for every example: how frequent the classes are. Look whether labels and "
                "outputs belong together; where a class is rare, weigh it or draw it more often; else train longer.")
    if moved < 0.01:
        return f"the weights hardly moved (weight_change {moved:.2g}): use a larger learning rate, or train longer."
    how = "" if math.isnan(moved) else f" (weight_change {moved:.2g})"
    return (f"the weights moved{how} and the loss did not fall: use a smaller learning rate or less weight decay, and look "
            f"whether labels and outputs belong together.")


def early(c: Course) -> Judgement | None:
    best = min(c.ratios, key=lambda m: m.value, default=None)
    if best is None or c.fallen >= ADVANCED or c.finished:
        return None
    still = ""
    if c.loss is not None and not math.isnan(c.loss.late):
        still = (f", and the logged {c.loss.name} no longer falls, but the network is hardly better than guessing"
                 if c.loss.rests else
                 f", and the logged {c.loss.name} has not come to rest ({c.loss.late:.0%} of its fall was in its last quarter)")
    nothing = f" {_nothing_left(c).capitalize()}." if c.begun_knowing else ""
    unlogged = "" if c.loss is not None else (" Log the loss, watch(step, loss=loss): where little can be learned, it says "
                                              "whether it still falls.")
    return Judgement("early", f"early: the loss has fallen by {max(0.0, 1 - best.value):.0%} so far, which is less than "
                              f"{ADVANCED:.0%}{still}.{nothing}",
                     (ANOTHER_PROBE if c.begun_knowing else f"train longer before you judge.{unlogged}",),
                     Margin(best.number, best.value, 1 - ADVANCED, "", best.error))


def stale(c: Course) -> Judgement | None:
    at, begun = c.last.step, (0 if c.first is None else c.first.step)
    if at is None or begun is None or c.reached is None or c.reached - at <= at - begun:
        return None
    return Judgement("stale", f"stale: last measured at step {at:,}, and training is at step {c.reached:,}: the numbers are out "
                              f"of date.", (MEASURE_AGAIN,))


RULES: tuple[Callable[[Course], Judgement | None], ...] = (diverged, untrained, collapsed, not_learning, early, stale)


def failed(c: Course) -> Judgement | None:
    """The judgement of the first rule that applies."""
    return next((failure for rule in RULES if (failure := rule(c)) is not None), None)


# ------------------------------------------------------------------------------------------------------------- reading

def value(snap: Snapshot, measure: str, layer: str = WHOLE) -> float:
    """A number of a snapshot; NaN where there is none, or where it rests on a loss that need not be the training's."""
    row = snap.get(measure, layer)
    return math.nan if row is None or ASSUMED_LOSS in row.note else row.value


def _note(snap: Snapshot) -> str:
    """Note beside the network's outputs."""
    return next((row.note for m in ("output_rms", "probe_loss") if (row := snap.get(m)) is not None), "")


def unmoved(snap: Snapshot) -> bool:
    """Did no weight change? Known only where the initial weights are; a layer that was not used says nothing."""
    moved = [r.value for r in snap.rows if r.measure in ("weight_change", MOVED) and r.mark is not Mark.IDLE
             and math.isfinite(r.value)]
    return bool(moved) and not any(moved) and not math.isfinite(value(snap, GAP))


def course(subject: Any, snapshots: Sequence[Snapshot]) -> Course:
    """Read the course of a training from a Snapshot, an Observer or a Run."""
    first, last = snapshots[0], snapshots[-1]
    at, lost = last.step or 0, ""
    for f in getattr(subject, "failures", ()):
        if "DivergedError" in f.reason and (f.last or 0) >= at:
            words = f.reason.partition("DivergedError: ")[2].partition(": the run")[0].partition(". ")[0].rstrip(")")
            lost = f"at step {f.first if (f.first or 0) >= at else f.last}: {words}."  # the first, if none was measured since
    loss, name = None, loss_name(getattr(subject, "scalar_names", ()))
    if name is not None:
        series = subject.scalars(name)
        loss = summary(name, series.step.tolist(), series.value.tolist())
    begun = last.start if first is last or first.step == last.step else first
    about = getattr(subject, "about", {})
    pretrained = getattr(subject, "pretrained", about.get("pretrained") if isinstance(about, dict) else None)
    return Course(begun, last, loss, getattr(subject, "last", None), lost,
                  pretrained, _held_out(subject, last), getattr(subject, "stable_rate", None))


def _held_out(subject: Any, last: Snapshot) -> tuple[str, float] | None:
    """The accuracy on held-out examples: measured on those of the probe, or the last one that was logged."""
    if math.isfinite(measured := value(last, "held_out_accuracy")):
        return "accuracy on the held-out examples of the probe", measured
    plain = {re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_"): name for name in getattr(subject, "scalar_names", ())}
    name = next((plain[k] for k in ACCURACIES if k in plain), None)
    if name is None:
        return None
    values = [v for v in subject.scalars(name).value.tolist() if math.isfinite(v)]
    return (name, values[-1] / (100 if max(values) > 1 else 1)) if values else None
