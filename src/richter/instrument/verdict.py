"""Is my network lazy or rich, which layers learn, and what should I turn? A verdict with its evidence.

First whether there is a training to speak of (training.py), then lazy, probably lazy, uncertain, amplified or rich from
``linearisation_gap`` and ``feature_change_cka`` of the last measurement, and each layer from its ``function_change`` (regime.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from richter.core import WHOLE, Mark, Row, SelectionError
from richter.core.values import NO_HIDDEN, NO_MAP, few_of
from richter.instrument.snapshot import Snapshot, shown
from richter.instrument.training import (
    ADVANCED,
    GAP,
    LARGE_OUTPUTS,
    MOVED,
    TURN,
    Course,
    Failed,
    Margin,
    course,
    failed,
    layer_regime,
    regime,
    regime_margin,
    row_of,
    unmoved,
    value,
)
from richter.measures.cards import CARDS, MINIMUM

# ------------------------------------------------------------------------------------------------------------ evidence
# What speaks for a verdict: losses, accuracies, kernels and features at convergence, each in a line.

def numbers(c: Course, failure: Failed | None) -> list[str]:
    """What the rules have read; of a training that failed, also what its numbers would say: they do not count."""
    lines = []
    first, now = c.before("probe_loss"), c.now("probe_loss")
    if math.isfinite(now):
        lines.append(f"loss of the probe: {f'{first:.3g} -> ' if math.isfinite(first) else ''}{now:.3g}")
    first, now = c.before("probe_accuracy"), c.now("probe_accuracy")
    if math.isfinite(now):
        guess = "" if c.labels is None else f" (guessing: {c.labels.chance:.3g})"
        lines.append(f"accuracy on the probe: {f'{first:.3g} -> ' if math.isfinite(first) else ''}{now:.3g}{guess}")
    if c.loss is not None and c.loss.lost is None:
        lines.append(f"{c.loss.name} as logged: {c.loss.first:.3g} -> {c.loss.smoothed:.3g} (smoothed)")
    G, F = value(c.last, GAP), value(c.last, TURN)
    if failure is not None and failure.word in ("early", "stale") and math.isfinite(G) and math.isfinite(F):
        so_far = "so far" if failure.word == "early" else f"then, at step {c.last.step}"
        lines.append(f"{so_far}: {regime(G, F)} ({GAP} {G:.3g}, {TURN} {F:.3g})")
    return lines


def changes(c: Course) -> list[str]:
    """What the kernel of the whole model did between the first and the last measurement."""
    changes = []
    for measure in ("tangent_cka", "tangent_stable_rank"):
        a, b = (None if snap is None else row_of(snap, measure) for snap in (c.first, c.last))
        if a is not None and b is not None and math.isfinite(a.value) and math.isfinite(b.value):
            factor = f" (x{b.value / a.value:.1f})" if a.value else ""
            changes.append(f"{CARDS[measure].title}: {a.value:.3g} -> {b.value:.3g}{factor}, {_against_noise(a, b)}")
    return changes


def _against_noise(a: Row, b: Row) -> str:
    """Is the difference more than two standard errors? Where one of these is missing, nobody knows."""
    noise = math.hypot(a.error, b.error)
    if not math.isfinite(noise):
        return "no error bar"
    return "beyond probe noise" if abs(b.value - a.value) > 2 * noise else f"within probe noise ({noise:.2g})"


def counted(last: Snapshot) -> list[str]:
    """How many features the last layer reads, where that was measured. Few is no praise."""
    kappa = value(last, "kappa_cka")
    known = [f"{v:.3g} {word}" for measure, word in (("deff_intensity", "strong"), ("deff_utilisation", "used"))
             if math.isfinite(v := value(last, measure))]
    lines = []
    if math.isfinite(kappa):
        few = f"as few as the outputs need (below {MINIMUM:g})" if kappa < MINIMUM else "more than the outputs need"
        lines.append(f"features of the last layer: kappa_cka {kappa:.3g}, {few}{''.join(f', {k}' for k in known)}. Whether they "
                     f"are good ones this does not say: a network that knows random labels by heart may have as few")
    elif known:
        lines.append(f"features of the last layer: {', '.join(known)}")
    nc1 = value(last, "nc1")
    if math.isfinite(nc1):
        lines.append(f"{CARDS['nc1'].title}: {nc1:.3g} (0 where the examples of a class have become one point)")
    return lines


def converged(last: Snapshot) -> list[str]:
    """What features at convergence say, where they were measured, and whether there is convergence."""
    rows = [r for r in last.rows if r.measure == "fact"]
    known = [r for r in rows if math.isfinite(r.value)]
    if not known:
        return [f"features at convergence: {rows[0].note}"] if rows else []
    low, high = min(known, key=lambda r: r.value), max(known, key=lambda r: r.value)
    words = f"correlation of W^T W with FACT: {low.value:.3g} ({low.layer}) to {high.value:.3g} ({high.layer})"
    doubtful = [r for r in known if r.note]
    if doubtful:
        worst = next((r for r in doubtful if r is low), doubtful[0])
        words += f"; in {len(doubtful)} of {len(known)} layers it says little ({worst.layer}: {worst.note})"
    return [words]


# ------------------------------------------------------------------------------------------------------------- verdict

LAYER_WORDS = {"rich": "learned features", "probably rich": "probably learned features", "uncertain": "between lazy and rich",
               "lazy": "lazy: stayed near its initial function", "frozen": "frozen: did not move",
               "read-out": "read-out: not judged", "unknown": "cannot be told"}
BESIDE = ("weight_change", "c_uc_ratio", "nfc", "cnfc")  # of a layer: evidence, no verdict
REGIMES = {
    "lazy": "the network still is its linearisation at the start, and its features did not turn: it works like a fixed kernel",
    "probably lazy": "the network is near its linearisation at the start, and its features hardly turned",
    "uncertain": "the numbers lie between those of lazy and of rich trainings",
    "amplified": "the network left its linearisation, but its features are the initial ones: what was there grew",
    "rich": "the network left its linearisation, and its features turned",
}
KNOWN = ("If they were trained before (a new head on known features), leave their scale alone, and train longer or with a larger "
         "learning rate.")
LINEAR = 1e-3  # of a model without a hidden layer: rounding that hides no larger gap


class Watched(Protocol):
    """An Observer or a Run: something with measurements. It may also have ``ends`` (the first and the last of them), ``names``
    and ``scalar(name)`` (what was logged), ``last`` (the step it has come to) and ``failures``."""

    @property
    def snapshots(self) -> Sequence[Snapshot]: ...


@dataclass(frozen=True)
class Magnitude:
    """log10(G / (1 - G)) of the linearisation gap G: 0 where half of what the network did is not in its linearisation."""

    value: float
    error: float | None
    bound: bool  # clipped at the end of its scale, or G is below what rounding lets one see
    step: int | None

    def __str__(self) -> str:
        if self.bound:
            return f"{'at least' if self.value >= 3 else 'at most'} {self.value:.2g}"
        return shown(Row(self.step, WHOLE, "magnitude", self.value, math.nan if self.error is None else self.error))


@dataclass(frozen=True)
class LayerVerdict:
    """What one layer did, and the numbers that say so."""

    layer: str
    verdict: str  # a key of LAYER_WORDS
    evidence: dict[str, float]

    def __str__(self) -> str:
        return f"{self.words} ({self.numbers})" if self.numbers else self.words

    @property
    def words(self) -> str:
        return LAYER_WORDS[self.verdict]

    @property
    def numbers(self) -> str:
        return ", ".join(f"{k} {v:.3g}" for k, v in self.evidence.items())


@dataclass(frozen=True)
class Diagnosis:
    """A verdict for the whole model and for each layer, with evidence and advice. ``print`` it.

    ``word``: diverged, untrained, collapsed, not learning, early or stale, if one of these ended it; else lazy, probably lazy,
    uncertain, amplified, rich; linear of a model that is its own linearisation whatever its weights are; or unknown, where the
    numbers it needs are missing."""

    word: str
    verdict: str  # the word and a sentence
    step: int | None  # of the measurement that it is of
    magnitude: Magnitude | None  # only of a training that did not fail
    margin: Margin | None  # how near another verdict is; None: the rule has no edge
    layers: tuple[LayerVerdict, ...]
    remarks: tuple[str, ...]  # what else is to be known: a given start, frozen layers, how old the measurement is
    unknown: tuple[str, ...]  # what it cannot tell
    evidence: tuple[str, ...]
    advice: tuple[str, ...]

    def __str__(self) -> str:
        width = max((len(v.layer) for v in self.layers), default=0)
        head = [f"Magnitude: {self.magnitude}"] if self.magnitude else []
        return "\n".join([*head, f"Verdict: {self.verdict}", f"  {self.measured}",
                          *(f"  {v.layer.ljust(width)}  {v}" for v in self.layers),
                          *(f"{title}: {line}" for title, lines in self.sections for line in lines)])

    @property
    def measured(self) -> str:
        """When, and how sure, in a line."""
        when = "a measurement without a step" if self.step is None else f"measured at step {self.step:,}"
        return when + (f"; margin: {self.margin}" if self.margin else "")

    @property
    def sections(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """What stands below the verdict, in the order in which it is read."""
        return ("Remark", self.remarks), ("Cannot tell", self.unknown), ("Evidence", self.evidence), ("Advice", self.advice)

    def to_json(self) -> dict[str, Any]:
        """For machines. ``magnitude`` and ``margin`` are None where there is none."""
        m, edge = self.magnitude, self.margin
        return {"word": self.word, "verdict": self.verdict, "step": self.step, "measured": self.measured,
                "magnitude": None if m is None else {"value": m.value, "error": m.error, "bound": m.bound, "text": str(m)},
                "margin": None if edge is None or not math.isfinite(edge.value) else {
                    "number": edge.number, "value": edge.value, "edge": edge.edge, "distance": edge.distance,
                    "errors": edge.errors, "beyond": edge.other, "text": str(edge)},
                "remarks": list(self.remarks), "unknown": list(self.unknown), "evidence": list(self.evidence),
                "advice": list(self.advice),
                "layers": {v.layer: {"verdict": v.verdict, **v.evidence} for v in self.layers}}


def diagnose(subject: Snapshot | Watched) -> Diagnosis:
    """Read a Snapshot (measured with ``initial=``), an Observer or a Run: verdict, evidence, advice.

    Whether anything was learned is read from the probe's labels in the first and the last measurement, and from the scalar that
    is the training's loss: ``loss``, ``train_loss``, ``training_loss`` or ``loss_train``, also spelt as ``train/loss``."""
    snapshots = [subject] if isinstance(subject, Snapshot) else getattr(subject, "ends", None)  # of a Run: others are not read
    if snapshots is None and (snapshots := getattr(subject, "snapshots", None)) is None:
        raise SelectionError(f"diagnose takes a Snapshot, an Observer or a Run, not {type(subject).__name__}.")
    failures = [str(failure) for failure in getattr(subject, "failures", ())]  # what could not be measured or written
    if not snapshots:
        raise SelectionError(". ".join(["nothing has been measured yet: call the Observer in the training loop first",
                                        *failures]) + ".")
    c = course(subject, snapshots)
    failure = failed(c)
    past = unmoved(c.last) and (failure is None or failure.word != "untrained")  # of layers that have moved since
    layers = () if past else tuple(_layer(c.last, name, failure is None) for name in _judged(c.last))
    evidence = [*numbers(c, failure), *changes(c), *converged(c.last), *counted(c.last), *failures]
    word, sentence, margin, advice = _failure(failure) if failure is not None else _regime(c, layers)
    magnitude = _magnitude(c.last) if failure is None and word in REGIMES else None
    return Diagnosis(word, sentence, c.last.step, magnitude, margin, layers, tuple(_remarks(c, layers, word, margin)),
                     tuple(_unknown(c, word)), tuple(evidence), tuple(advice))


# ------------------------------------------------------------------------------------------------------------- the model

Judged = tuple[str, str, Margin | None, list[str]]


def _failure(f: Failed) -> Judged:
    return f.word, f.sentence, f.margin, list(f.advice)


def _regime(c: Course, layers: Sequence[LayerVerdict]) -> Judged:
    gap, turn = row_of(c.last, GAP), row_of(c.last, TURN)
    if gap is not None and turn is not None and NO_HIDDEN in turn.note and gap.mark is Mark.BOUND and gap.value < LINEAR:
        return _linear(gap)
    if gap is None or turn is None or not (math.isfinite(gap.value) and math.isfinite(turn.value)):
        return "unknown", f"cannot be told: {_missing(c.last)}", None, []
    word = regime(gap.value, turn.value)
    if gap.mark is Mark.BOUND and word != regime(0.0, turn.value):  # anything below it would be as likely
        return "unknown", f"cannot be told: {GAP} is {gap.note}. Measure a copy in double precision.", None, []
    margin = regime_margin(gap.value, turn.value, gap.error, turn.error)
    given = ", relative to the given start" if c.begun_trained else ""
    sentence = f"{word}{given}. {REGIMES[word].capitalize()} ({GAP} {gap.value:.3g}, {TURN} {turn.value:.3g})."
    return word, sentence, margin, _advice(c, word, layers)


def _linear(gap: Row) -> Judged:
    """One layer of weights between inputs and outputs. Of two there is a difference: a deep linear network has both regimes."""
    return "linear", (f"linear: neither lazy nor rich. The model has no hidden layer and is linear in its weights, so it is its "
                      f"own linearisation, whatever training does ({GAP} {gap.value:.2g}): there are no features that it could "
                      f"learn."), None, ["to learn features, give the model a hidden layer."]


def _missing(snap: Snapshot) -> str:
    """Why there is no verdict: each number that is missing, with its reason."""
    reasons = []
    for name in (GAP, TURN):
        row = row_of(snap, name)
        if row is None:
            reasons.append(f"{name} was not measured")
        elif not math.isfinite(row.value):
            reasons.append(f"there is no {name}{f' ({row.note})' if row.note else ''}")
    if any(NO_HIDDEN in reason for reason in reasons):
        return (" and ".join(reasons) + ". Without a hidden layer there are no features to learn; what is not in the "
                "linearisation is what follows the one layer.")
    if unrecognised := _unrecognised(snap):
        return (" and ".join(reasons) + f". The weights of {few_of(unrecognised)} are not used as linear maps that Richter "
                f"knows, so what these layers read is not known. Products of a weight, or of a multiple of it, by F.linear, "
                f"matmul, einsum or a convolution are known; richter.layers.register adds others.")
    known = {r.measure for r in snap.rows if math.isfinite(r.value)} & {"weight_change", "c_uc_ratio"}
    hint = (". How far the weights moved is below, but weights may move far in a lazy network and little in a rich one" if known
            else ". The weights at initialisation are needed: pass initial=state_dict to richter.measure, or watch from the "
                 "first step with an Observer")
    return " and ".join(reasons) + hint + "."


def _unrecognised(snap: Snapshot) -> list[str]:
    """Layers with weights that are used, but not as a known linear map."""
    return [name for name, note in snap.notes.items() if NO_MAP in note]


def _magnitude(snap: Snapshot) -> Magnitude | None:
    row = row_of(snap, "magnitude")
    if row is None or not math.isfinite(row.value):
        return None
    return Magnitude(row.value, row.error if math.isfinite(row.error) else None, row.mark is Mark.BOUND, snap.step)


def _advice(c: Course, word: str, layers: Sequence[LayerVerdict]) -> list[str]:
    """What fits the case: a given start has no initial scale to turn, and a frozen layer none at all."""
    large = [LARGE_OUTPUTS] if c.large_outputs else []
    if word == "rich":
        return [*large, "nothing to turn for richness; to go lazier, scale the output up and the learning rate down."]
    if word == "uncertain":
        return [*large, "train longer, or measure on a larger probe, before you turn anything."]
    if any(v.verdict == "frozen" for v in layers) and all(v.verdict in ("frozen", "read-out", "unknown") for v in layers):
        return [*large, "only the read-out was trained: to learn features, let other layers train too."]
    frozen = ["let the frozen layers train too."] if any(v.verdict == "frozen" for v in layers) else []
    if c.begun_trained:
        return [*frozen, "to learn more features than the given ones, use a larger learning rate or train longer; the initial "
                         "scale is what was given, and is not to be turned."]
    if word == "amplified":
        return [*large, *frozen, "to turn the features, train longer; if the initial weights were random, scale them (or the "
                         f"output) down. {KNOWN}"]
    return [*frozen, "to learn features, if the initial weights were random, start smaller: scale them (or the output) down by 3 "
                     f"to 10, and look again at the magnitude. {KNOWN}"]


# ------------------------------------------------------------------------------------------------------------ the layers

def _judged(snap: Snapshot) -> list[str]:
    """Layers with a number that says something about them."""
    speaking = {r.layer for r in snap.rows if r.measure in (MOVED, "weight_change", "nfc")}
    return [name for name in snap.layers if name != WHOLE and name in speaking]


def _layer(snap: Snapshot, name: str, sound: bool) -> LayerVerdict:
    """``sound``: the training did not fail. The numbers of one that did may be those of a rich layer, and mean nothing."""
    rows = [row for m in (MOVED, *BESIDE) if (row := row_of(snap, m, name)) is not None]
    numbers = {r.measure: r.value for r in rows if math.isfinite(r.value) and r.mark is not Mark.TRIVIAL}  # else no evidence
    moved = row_of(snap, MOVED, name)
    if numbers.get("weight_change") == 0 and not numbers.get(MOVED):
        return LayerVerdict(name, "frozen", {"weight_change": 0.0})
    if moved is not None and moved.mark is Mark.TRIVIAL:
        return LayerVerdict(name, "read-out", numbers)
    return LayerVerdict(name, layer_regime(numbers.get(MOVED, math.nan)) if sound else "unknown", numbers)


# ----------------------------------------------------------------------------------------- remarks, and what is not known

def _remarks(c: Course, layers: Sequence[LayerVerdict], word: str, margin: Margin | None) -> list[str]:
    remarks = []
    if c.begun_trained and c.labels is not None:
        remarks.append(f"fine-tuning: the network was not random at the start (accuracy {c.before('probe_accuracy'):.3g}, "
                       f"guessing {c.labels.chance:.3g}); everything is relative to the given start.")
    if c.large_outputs and c.labels is not None:
        remarks.append(f"large initial outputs: the loss began at {c.before('probe_loss'):.3g}, that of guessing is "
                       f"{math.log(c.labels.classes):.3g}.")
    frozen = [v.layer for v in layers if v.verdict == "frozen"]
    if frozen and word != "untrained":
        remarks.append(f"frozen: {few_of(frozen)} did not move at all ({len(frozen)} of {len(layers)} layers); either no "
                       f"gradient reached them, or they were not to train.")
    if word != "stale" and c.reached is not None and c.last.step is not None and c.reached > c.last.step:
        remarks.append(f"the training is at step {c.reached:,}; what it did after step {c.last.step:,} is not in these numbers.")
    if (unrecognised := _unrecognised(c.last)) and word in REGIMES:
        remarks.append(f"not recognised: the weights of {few_of(unrecognised)} are not used as linear maps that Richter knows. "
                       f"They count in {GAP}; what they read does not count in {TURN}.")
    if c.fallen < ADVANCED and c.finished and c.loss is not None:
        remarks.append(f"the loss fell by {max(0.0, c.fallen):.0%} only, and no longer falls ({c.loss.late:.0%} of its fall "
                       f"was in its last quarter): little was to be learned, or this is a plateau.")
    if c.loss is not None and c.loss.gaps:
        remarks.append(f"{c.loss.name} was not finite {c.loss.gaps} times, and recovered.")
    if c.unsettled:
        remarks.append("what the network answers on the probe is not judged: its norms have seen too few batches.")
    if c.begun_unsettled:
        why = "buffers of the network have moved since" if c.buffers_moved else "norms had not seen enough data"
        remarks.append(f"what the network answered in the first measurement is not compared, because {why}.")
    if margin is not None and margin.errors is not None and margin.errors < 2:
        remarks.append(f"{margin.number} is within two standard errors of {margin.edge:g}: it may as well be {margin.other}.")
    return remarks


def _unknown(c: Course, word: str) -> list[str]:
    """What the verdict cannot tell, and what would."""
    unknown = []
    if not c.known and word not in ("untrained", "diverged", "stale"):
        unknown.append("whether anything was learned: there is neither a loss that was logged, watch(step, loss=loss), nor a "
                       "first and a last measurement of a probe with labels" + (
                           ", in eval mode with norms that have seen enough data." if c.unsettled or c.begun_unsettled else "."))
    if not c.begun_trained and word in REGIMES:
        unknown.append(f"whether the network was trained before: {_start(c)}.")
    if c.buffers_moved and word not in ("untrained", "diverged", "stale"):
        unknown.append("what the buffers did that moved besides the weights: both networks are compared with those of now.")
    if word in ("rich", "amplified"):
        unknown.append("whether what was learned is good: memorised noise is rich too. Held-out examples say that.")
    return unknown


def _start(c: Course) -> str:
    """Why it is not known what the network knew at the start."""
    if c.labels is None:
        return "the probe has no class labels"
    if c.first is None or not unmoved(c.first):
        return "there is no measurement of its initial weights"
    if c.begun_unsettled:
        return "its first measurement does not say what it knew"
    return "its answers began at chance, as those of a random network do, and those of a trained one with a new head"
