"""Is there a training to speak of? What is known of one, and the rules by which it has failed, in their order.

A training that diverged, did not move, collapsed, did not learn, has only begun or was last measured long ago is neither lazy nor
rich, whatever its numbers are: these rules come before any of them. With p what guessing gets right, and s the standard deviation
of an accuracy at p (``Labels``):

    diverged       a loss, weight or output that is not finite; the smoothed loss > 1.5 x first and > log(C) / 2; or the probe's
                   loss > 2 max(first, log C) with an accuracy <= p + 5 s, unless the logged loss has fallen (then training
                   works, and what it learned does not help the probe)
    untrained      no weight moved
    collapsed      outputs differ between examples by <= 1e-3 of max(their initial spread, their rms), or by < 1e-6; not if they
                   differ more than at the start and the loss has fallen (targets with a large mean)
    not learning   neither a loss < .9 x first nor an accuracy that rose by > 5 s; or no logged loss < .9 H, that of the probe in
                   [H, 1.5 log C], and an accuracy <= p + 5 s: a loss that fell to that of guessing is no learning
    early          the loss fell by less than 25 %, unless the logged loss has come to rest (losses.py) and the network is
                   better than guessing: an accuracy > p + 5 s, or a logged loss < .9 H (no classes: a loss < .9 x first)
    stale          more steps were trained after the last measurement than before it

H is the loss of the best guess that is the same for all examples: the entropy of the probe's classes (log C, if that is not
known). "Smoothed": the logged loss, exponentially, with weight max(.05, 1/k) for its k-th value. Where a number is missing, the
rules that need it say nothing. Without classes, log C and accuracies are left out. A first measurement whose norms had seen no
data, or whose buffers have moved since, says nothing of losses and outputs: guessing stands in for it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from richter.core import WHOLE, Failure, Labels, Mark, Row
from richter.core.values import ASSUMED_LOSS, FEW_BATCHES, MOVED_BUFFERS, NO_DATA
from richter.instrument.snapshot import Snapshot

# -------------------------------------------------------------------------------------------------------------- losses
# The logged loss of a training: which scalar it is, what it began with, where it is now, and whether it still falls.
#
# The loss has come to rest if it fell from the third to the last quarter of the steps by less than a tenth of its whole fall, and
# by less than a fifth even with two standard errors more. (An even fall gives .29, an exponential one .09 after three time
# constants.)

LOSSES = ("loss", "train_loss", "training_loss", "loss_train")  # names of scalars that are the training's loss, best first
MEMORY = 1000  # values of a loss that smoothing remembers: older ones weigh less than 1e-22
REST, SURELY = 0.1, 0.2  # of its whole fall: what a loss at rest falls by in its last quarter at most, and with two errors more
QUARTER = 8  # values of a loss in each of the last two quarters: with fewer it is not known whether it still falls


@dataclass(frozen=True)
class Loss:
    """What the logged loss says: its first and last value, and the smoothed one."""

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
        """Does it no longer fall? Not where that is not known."""
        return self.late < REST and self.late + 2 * self.late_error < SURELY


def loss_name(names: Iterable[str]) -> str | None:
    """Which scalar is the training's loss: ``loss``, ``train_loss``, ``train/loss``, ``Loss/train``, ...; none of validation."""
    plain = {re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_"): name for name in names}
    return next((plain[name] for name in LOSSES if name in plain), None)


def summary(name: str, steps: Sequence[int], values: Sequence[float]) -> Loss | None:
    """What a curve of losses says."""
    real = [v for v in values if math.isfinite(v)]
    lost = None
    if values and not math.isfinite(values[-1]):
        lost = next(steps[i] for i in range(len(values) - 1, -1, -1) if i == 0 or math.isfinite(values[i - 1]))
    if len(real) < 2 and lost is None:
        return None
    first = real[0] if real else math.nan
    gaps = sum(1 for s, v in zip(steps, values, strict=True) if not math.isfinite(v) and (lost is None or s < lost))
    return Loss(name, first, real[-1] if real else math.nan, _smoothed(real), lost, gaps, *_late(steps, values))


def _late(steps: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """How much of its whole fall a loss fell from the third to the last quarter of the steps, and the standard error of that:
    differences between neighbours say how much values scatter."""
    finite = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
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


def _smoothed(values: Sequence[float]) -> float:
    level, skipped = math.nan, max(0, len(values) - MEMORY)
    for k, v in enumerate(values[skipped:], skipped + 1):
        level = v if math.isnan(level) else level + max(0.05, 1 / k) * (v - level)
    return level


# -------------------------------------------------------------------------------------------------------------- regime
# Lazy or rich: the bands of two numbers, and how near the edges of these bands are.
#
# ``linearisation_gap`` (G) says whether the network still is its linearisation at the start, ``feature_change_cka`` (F) whether
# its
# features turned. Both are in [0, 1]. A layer by itself is judged by its ``function_change``.
#
#     lazy            G < .05 and F < .02          rich             G >= .1 and F >= .15
#     probably lazy   G < .1  and F < .05          uncertain        the rest
#     amplified       G >= .3 and F < .05

GAP, TURN, MOVED = "linearisation_gap", "feature_change_cka", "function_change"
GAP_EDGES, TURN_EDGES = (0.05, 0.1, 0.3), (0.02, 0.05, 0.15)
LAYER_BANDS = ((0.15, "lazy"), (0.5, "uncertain"), (1.0, "probably rich"))  # below so much; from the last edge on it is rich


@dataclass(frozen=True)
class Margin:
    """How far a number is from the nearest edge at which the verdict would be another."""

    number: str  # its name
    value: float
    edge: float
    other: str  # the verdict beyond the edge
    error: float | None = None  # standard error of the number

    @property
    def distance(self) -> float:
        return abs(self.value - self.edge)

    @property
    def errors(self) -> float | None:
        """The distance in standard errors; None where there is no error bar."""
        return None if not self.error else self.distance / self.error

    def __str__(self) -> str:
        unit = "" if self.errors is None else f", {self.errors:.2g} standard errors,"
        return f"{self.number} {self.value:.3g} is {self.distance:.2g}{unit} from {self.edge:g}; beyond: {self.other}"


def regime(G: float, F: float) -> str:
    """The word for a training whose linearisation gap is G and whose features turned by F."""
    if G < 0.05 and F < 0.02:
        return "lazy"
    if G < 0.1 and F < 0.05:
        return "probably lazy"
    if G >= 0.3 and F < 0.05:
        return "amplified"
    return "rich" if G >= 0.1 and F >= 0.15 else "uncertain"


def regime_margin(G: float, F: float, G_error: float = math.nan, F_error: float = math.nan) -> Margin:
    """The smallest change of one of the two numbers, the other as it is, that gives another word: in standard errors where both
    have them, else in the numbers."""
    word = regime(G, F)
    margins = []
    for name, value, edges, error in ((GAP, G, GAP_EDGES, G_error), (TURN, F, TURN_EDGES, F_error)):
        for edge in edges:
            beyond = edge if value < edge else math.nextafter(edge, -math.inf)
            other = regime(beyond, F) if name == GAP else regime(G, beyond)
            if other != word:
                margins.append(Margin(name, value, edge, other, error if math.isfinite(error) else None))
    return nearest(margins)


def nearest(margins: Sequence[Margin]) -> Margin:
    comparable = all(m.errors is not None for m in margins)
    return min(margins, key=lambda m: m.errors or 0.0 if comparable else m.distance)


def layer_regime(r: float) -> str:
    """The word for a layer whose function changed by r, relative to what it was."""
    if math.isnan(r):
        return "unknown"
    if r == 0:
        return "frozen"
    return next((word for edge, word in LAYER_BANDS if r < edge), "rich")


# ------------------------------------------------------------------------------------------------------------ training

RISEN, DOUBLED, FALLEN, ADVANCED, SIGMAS = 1.5, 2.0, 0.9, 0.25, 5.0
KNOWN = 0.1  # of the loss of guessing: a network that begins with less has little left to learn
SPREAD, VANISHED = 1e-3, 1e-6


@dataclass(frozen=True)
class Failed:
    """Why a training is not judged further: the word, a sentence, what to do, and how near the rule was to say nothing."""

    word: str
    sentence: str
    advice: tuple[str, ...]
    margin: Margin | None = None


@dataclass(frozen=True)
class Course:
    """What is known of a training: its first and last measurement (None: only one was made), its loss, and where it is now."""

    first: Snapshot | None
    last: Snapshot
    loss: Loss | None = None
    reached: int | None = None  # the last step that anything is known of
    lost: str = ""  # what was not finite when somebody tried to measure, after the last measurement

    @property
    def labels(self) -> Labels | None:
        return self.last.labels

    def now(self, measure: str) -> float:
        return math.nan if self.unsettled else value(self.last, measure)

    def before(self, measure: str) -> float:
        return math.nan if self.first is None or self.begun_unsettled else value(self.first, measure)

    @property
    def unsettled(self) -> bool:
        """Have norms seen so few batches that what the network answers in eval mode is not what it was trained to answer? Those
        that have seen none in all the training are not trained with batches."""
        return FEW_BATCHES in _note(self.last, "output_rms", "probe_loss")

    @property
    def begun_unsettled(self) -> bool:
        """The same of the first measurement, also because other buffers have moved since."""
        if self.first is None:
            return False
        first, last = (_note(snap, "output_rms", "probe_loss") for snap in (self.first, self.last))
        return FEW_BATCHES in first or (NO_DATA in first and first != last) or self.buffers_moved

    @property
    def buffers_moved(self) -> bool:
        """Those of no norm of torch: then the initial network is taken with the buffers of now."""
        return any(MOVED_BUFFERS in _note(self.last, m) for m in (GAP, TURN))

    @property
    def begun_with(self) -> tuple[float, str]:
        """The first loss of the probe, and its name; that of guessing, where the first measurement says nothing."""
        if self.begun_unsettled and self.labels is not None and self.labels.entropy is not None:
            return self.labels.guess, "that of guessing"
        return self.before("probe_loss"), "first"

    @property
    def begun_trained(self) -> bool:
        """Was the network better than guessing before it was trained? Only if the first measurement is of the initial weights."""
        return (self.labels is not None and self.first is not None and unmoved(self.first)
                and value(self.first, "probe_accuracy") > self.labels.chance + SIGMAS * self.labels.noise)

    @property
    def begun_knowing(self) -> bool:
        """Was there nothing left to learn on the probe, neither for the loss nor for the accuracy?"""
        return (self.begun_trained and self.labels is not None and self.before("probe_loss") < KNOWN * self.labels.guess
                and self.before("probe_accuracy") + SIGMAS * self.labels.noise >= 1)

    @property
    def large_outputs(self) -> bool:
        """Did it begin with a loss of more than twice that of guessing, although it knew nothing?"""
        return (self.labels is not None and self.first is not None and unmoved(self.first) and not self.begun_trained
                and self.before("probe_loss") > 2 * math.log(self.labels.classes))

    @property
    def ratios(self) -> list[Margin]:
        """The loss relative to the first one, as far as it is known: on the probe, and as logged."""
        (first, name), now = self.begun_with, self.now("probe_loss")
        known = []
        if first > 0 and math.isfinite(now):
            error = _error(self.last, "probe_loss") / first
            known.append(Margin(f"probe_loss / {name}", now / first, FALLEN, "early", error if math.isfinite(error) else None))
        if self.loss is not None and math.isfinite(self.loss.ratio):
            known.append(Margin(f"smoothed {self.loss.name} / first", self.loss.ratio, FALLEN, "early"))
        return known

    @property
    def risen(self) -> float:
        """By how much the accuracy rose, in standard deviations; NaN where that is not known."""
        if self.labels is None or not self.labels.noise:
            return math.nan
        before = self.labels.chance if self.begun_unsettled else self.before("probe_accuracy")
        return (self.now("probe_accuracy") - before) / self.labels.noise

    @property
    def guesses(self) -> bool:
        """Are its answers no better than guessing, by both losses and by accuracy?"""
        if self.labels is None:
            return False
        return (self.labels.guess <= self.now("probe_loss") <= RISEN * math.log(self.labels.classes)
                and (self.loss is None or self.loss.smoothed >= FALLEN * self.labels.guess)
                and self.now("probe_accuracy") <= self.labels.chance + SIGMAS * self.labels.noise)

    @property
    def finished(self) -> bool:
        """Has the logged loss come to rest, with a network that is better than guessing?"""
        if self.loss is None or not self.loss.rests:
            return False
        if self.labels is None:
            return any(m.value < FALLEN for m in self.ratios)
        return (self.now("probe_accuracy") > self.labels.chance + SIGMAS * self.labels.noise
                or self.loss.smoothed < FALLEN * self.labels.guess)

    @property
    def fallen(self) -> float:
        """By how much the loss has fallen, relative to the first one: on the probe or as logged, whichever is more."""
        return max((1 - m.value for m in self.ratios), default=math.nan)

    @property
    def known(self) -> bool:
        """Is there anything that says whether it learned?"""
        return bool(self.ratios) or math.isfinite(self.risen)


# --------------------------------------------------------------------------------------------------------------- rules

LARGE_OUTPUTS = ("the initial outputs are large: scale the initial weights of the last layer down, or all of them if they were "
                 "random.")


def diverged(c: Course) -> Failed | None:
    advice = ("use a smaller learning rate (a third to a tenth), a warm-up, or clip the gradients.",
              *((LARGE_OUTPUTS,) if c.large_outputs else ()))
    half = math.log(c.labels.classes) / 2 if c.labels is not None else -math.inf
    if c.lost:
        return Failed("diverged", f"diverged: {c.lost}", advice)
    if c.loss is not None and c.loss.lost is not None:
        return Failed("diverged", f"diverged: {c.loss.name} is not finite from step {c.loss.lost:,} on.", advice)
    if any(math.isinf(c.now(m)) for m in ("probe_loss", "output_rms", "output_spread")):
        return Failed("diverged", "diverged: the outputs on the probe are infinite.", advice)
    if c.loss is not None and c.loss.ratio > RISEN and c.loss.smoothed > half:
        margin = Margin(f"smoothed {c.loss.name} / first", c.loss.ratio, RISEN, "not learning")
        return Failed("diverged", f"diverged: {c.loss.name} rose from {c.loss.first:.3g} to {c.loss.smoothed:.3g} (smoothed).",
                      advice, margin)
    return _lost_on_probe(c, advice)


def _lost_on_probe(c: Course, advice: tuple[str, ...]) -> Failed | None:
    """The loss of the probe rose, and what it answers is no better than guessing."""
    first, now, labels = c.before("probe_loss"), c.now("probe_loss"), c.labels
    if labels is not None:
        first = max(first, math.log(labels.classes)) if math.isfinite(first) else math.nan
        if not c.now("probe_accuracy") <= labels.chance + SIGMAS * labels.noise:
            return None
    fell = c.loss is not None and max(c.loss.smoothed, c.loss.last) < FALLEN * c.loss.first
    if not (first > 0 and now > DOUBLED * first) or fell:
        return None
    margin = Margin("probe_loss / max(first, log C)" if labels else "probe_loss / first", now / first, DOUBLED, "not learning")
    return Failed("diverged", f"diverged: the loss of the probe rose to {now:.3g}, {now / first:.2g} times that of "
                              f"{'guessing or of ' if labels else ''}the start.", advice, margin)


def untrained(c: Course) -> Failed | None:
    if not unmoved(c.last):
        return None
    at = c.last.step
    if at is not None and c.reached is not None and c.reached > at:
        return Failed("stale", f"stale: measured at step {at:,} only, where the weights are the initial ones; training went on "
                               f"to step {c.reached:,}, of which nothing was measured.", (MEASURE_AGAIN,))
    later = at is not None and at > 0
    return Failed("untrained", "untrained: every weight is exactly the initial one"
                  + (f" at step {at:,}." if later else "; there is nothing to judge yet."),
                  ("no weight moved: does the optimiser hold the parameters of this model, is the learning rate 0, is "
                   "optimiser.step() called?",) if later else ("train, and measure again: watch.now(step) after the last step.",))


def collapsed(c: Course) -> Failed | None:
    spread = c.now("output_spread")
    scale = max((s for s in (c.before("output_spread"), c.now("output_rms")) if math.isfinite(s)), default=math.nan)
    grown = (c.begun_unsettled or spread > c.before("output_spread")) and any(m.value < FALLEN for m in c.ratios)
    if not (spread <= SPREAD * scale or spread < VANISHED) or (grown and spread >= VANISHED):
        return None
    margin = Margin("output_spread / max(initial spread, rms)", spread / scale, SPREAD, "no failure") if scale > 0 else None
    same = f"collapsed: all examples have the same output (they differ by {spread:.2g})"
    if c.before("output_spread") < VANISHED:
        return Failed("collapsed", f"{same}, as at the start.",
                      ("the signal dies on its way through the network: use larger initial weights, or normalisation.",), margin)
    return Failed("collapsed", f"{same}.", ("use less weight decay, or a smaller learning rate.",), margin)


def not_learning(c: Course) -> Failed | None:
    ratios = c.ratios
    if not c.known or ((any(m.value < FALLEN for m in ratios) or c.risen > SIGMAS) and not c.guesses):
        return None
    best = min((m for m in ratios if m.value >= FALLEN), key=lambda m: m.value, default=None)
    words = [*([f"{best.number} is {best.value:.3g}"] if best else []),
             *([f"the loss ({c.now('probe_loss'):.3g}) is no better than that of guessing ({c.labels.guess:.3g})"]
               if c.guesses and c.labels is not None else []),
             *([f"the accuracy changed by {c.risen:.2g} standard deviations"] if math.isfinite(c.risen) else [])]
    given = " beyond its given start" if c.begun_trained else ""
    nothing = f"{_nothing_left(c)}; " if c.begun_knowing else ""
    return Failed("not learning", f"not learning{given}: {nothing}{' and '.join(words)}.", (_unlearned(c),), best)


def _nothing_left(c: Course) -> str:
    return (f"there was nothing left to learn on this probe, where it began with a loss of {c.before('probe_loss'):.2g} and an "
            f"accuracy of {c.before('probe_accuracy'):.3g}")


ANOTHER_PROBE = ("nothing is to be turned for this: the network knew the answers before. Measure on examples that it has yet to "
                 "learn, if there are such.")


def _unlearned(c: Course) -> str:
    known = sorted(r.value for r in c.last.rows if r.measure == "weight_change" and math.isfinite(r.value))
    moved = known[len(known) // 2] if known else math.nan
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


def early(c: Course) -> Failed | None:
    best = min(c.ratios, key=lambda m: m.value, default=None)
    if best is None or c.fallen >= ADVANCED or c.finished:
        return None
    margin = Margin(best.number, best.value, 1 - ADVANCED, "no failure", best.error)
    fallen = max(0.0, 1 - best.value)
    nothing = f" {_nothing_left(c).capitalize()}." if c.begun_knowing else ""
    unlogged = "" if c.loss is not None else (" Log the loss, watch(step, loss=loss): where little can be learned, it says "
                                              "whether it still falls.")
    advice = ANOTHER_PROBE if c.begun_knowing else f"train longer before you judge.{unlogged}"
    return Failed("early", f"early: the loss has fallen by {fallen:.0%} so far, which is less than {ADVANCED:.0%}"
                           f"{_still(c)}.{nothing}", (advice,), margin)


def _still(c: Course) -> str:
    if c.loss is None or math.isnan(c.loss.late):
        return ""
    if c.loss.rests:
        return f", and {c.loss.name} no longer falls, but the network is hardly better than guessing"
    return f", and {c.loss.name} may still fall ({c.loss.late:.0%} of its fall was in its last quarter)"


def stale(c: Course) -> Failed | None:
    at, begun = c.last.step, (0 if c.first is None else c.first.step)
    if at is None or begun is None or c.reached is None or c.reached - at <= at - begun:
        return None
    return Failed("stale", f"stale: last measured at step {at:,}, and training is at step {c.reached:,}: the numbers are of long "
                           f"ago.", (MEASURE_AGAIN,))


MEASURE_AGAIN = ("measure after the last step: watch.now(step), or close the Observer (`with Observer(...) as watch` does). A "
                 "larger budget= measures more often.")
RULES: tuple[Callable[[Course], Failed | None], ...] = (diverged, untrained, collapsed, not_learning, early, stale)


def failed(c: Course) -> Failed | None:
    """The first rule that applies."""
    return next((failure for rule in RULES if (failure := rule(c)) is not None), None)


# ------------------------------------------------------------------------------------------------------------- reading

def value(snap: Snapshot, measure: str, layer: str = WHOLE) -> float:
    """NaN where there is no number, or where it is of a loss that need not be the training's."""
    row = row_of(snap, measure, layer)
    return math.nan if row is None or ASSUMED_LOSS in row.note else row.value


def _error(snap: Snapshot, measure: str) -> float:
    row = row_of(snap, measure)
    return math.nan if row is None else row.error


def row_of(snap: Snapshot, measure: str, layer: str = WHOLE) -> Row | None:
    return next((r for r in snap.rows if r.measure == measure and r.layer == layer), None)


def _note(snap: Snapshot, *measures: str) -> str:
    """Of the first of these that there is."""
    return next((row.note for m in measures if (row := row_of(snap, m)) is not None), "")


def unmoved(snap: Snapshot) -> bool:
    """Did no weight change? Known only where the initial weights are; a layer that was not used says nothing."""
    moved = [r.value for r in snap.rows if r.measure in ("weight_change", MOVED) and r.mark is not Mark.IDLE
             and math.isfinite(r.value)]
    return bool(moved) and not any(moved) and not math.isfinite(value(snap, "linearisation_gap"))


def course(subject: Any, snapshots: Sequence[Snapshot]) -> Course:
    """What is known of a Snapshot, an Observer or a Run."""
    first, last = snapshots[0], snapshots[-1]
    lost = [f for f in getattr(subject, "failures", ()) if "DivergedError" in f.reason and (f.last or 0) >= (last.step or 0)]
    words = lost[-1].reason.partition("DivergedError: ")[2] if lost else ""
    words = words.partition(": the run")[0].partition(". ")[0].rstrip(")")
    reached = getattr(subject, "last", None)
    return Course(None if first is last or first.step == last.step else first, last, _loss(subject), reached,
                  f"at step {_since(lost[-1], last)}: {words}." if lost else "")


def _since(failure: Failure, last: Snapshot) -> int | None:
    """The first step at which it was seen, if nothing was measured in between."""
    return failure.first if (failure.first or 0) >= (last.step or 0) else failure.last


def _loss(subject: Any) -> Loss | None:
    """Of at least two values that were logged; None if there is nothing of the kind."""
    name = loss_name(getattr(subject, "names", ()))
    if name is None:
        return None
    series = subject.scalar(name)
    return summary(name, series.step.tolist(), series.value.tolist())
