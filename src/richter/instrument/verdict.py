"""Is my network lazy or rich, which layers learn, and what should I turn? A verdict with its evidence.

The rules of training.py come first: is there a training to judge? Then ``linearisation_gap`` (G: is the network still its
linearisation at initialisation?) and ``feature_change_cka`` (F: did its features change?) of the last measurement give the word,
and ``function_change`` the word of each layer.
"""

from __future__ import annotations

import contextlib
import html
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from richter.core import WHOLE, Mark, Row, SelectionError
from richter.core.values import NO_HIDDEN, NO_MAP, REFERENCE_COPY, ZERO_START, few_of
from richter.instrument.snapshot import Snapshot, shown
from richter.instrument.training import (
    ADVANCED,
    GAP,
    LARGE_OUTPUTS,
    MOVED,
    TURN,
    Course,
    Judgement,
    Margin,
    course,
    failed,
    unmoved,
    value,
)
from richter.measures.cards import CARDS, MINIMUM

# -------------------------------------------------------------------------------------------------------------- regime

LOW, HIGH = -math.inf, math.inf
BANDS = {  # word: from where to where (without the end) G lies, and F; the first that fits
    "lazy": ((LOW, 0.05), (LOW, 0.02)),
    "probably lazy": ((LOW, 0.1), (LOW, 0.05)),
    "amplified": ((0.5, HIGH), (LOW, 0.05)),
    "rich": ((0.5, HIGH), (0.1, HIGH)),
    "uncertain": ((LOW, HIGH), (LOW, HIGH)),
}
LEARNED = 0.5  # function_change from which on a layer (probably) learned features
NEAR = "behaves like its linear approximation at initialisation"
FAR = f"no longer {NEAR}"
MEANINGS = {
    "lazy": f"the network still {NEAR}, and its hidden representations did not change: it works like a fixed kernel",
    "probably lazy": f"the network nearly {NEAR}, and its hidden representations hardly changed",
    "amplified": f"the network {FAR}, but its hidden representations are the initial ones: what was there grew",
    "rich": f"the network {FAR}, and its hidden representations changed",
}
LAYER_BANDS = ((0.15, "lazy"), (0.5, "uncertain"), (1.0, "probably rich"))  # below so much; from the last edge on it is rich
LAYER_WORDS = {"rich": "learned features", "probably rich": "probably learned features", "uncertain": "between lazy and rich",
               "lazy": "lazy: stayed near its initial function", "frozen": "frozen: did not move",
               "read-out": "read-out: not judged", "zero start": "began at zero: no initial function to compare with",
               "reference": "frozen reference copy: not judged", "unknown": "not judged"}
GENERALISE = ("the network fits its examples without a rule that others share: train on more data, use weight decay, "
              "augmentation or a smaller network, and look whether labels belong to their examples.")
BESIDE = ("weight_change", "c_uc_ratio", "nfc", "cnfc")  # numbers of a layer that are evidence, and give no verdict
MEMORISED = "the network knows the examples of the probe by heart, and held-out ones no better than by guessing"
LINEAR = 1e-3  # the largest gap of a model without a hidden layer that may be rounding


def regime(G: float, F: float, changes: Sequence[float] = ()) -> str:
    """The word for a training with a linearisation gap G, a change of features F, and these changes of its layers' functions.

    G >= 1/2 is a magnitude of 0 or more. A training is rich or amplified only with such a gap, rich only if a layer learned
    features, and lazy only if none did. So the word contradicts neither the sign of the magnitude nor the words of the layers."""
    word = next(word for word, (g, f) in BANDS.items() if g[0] <= G < g[1] and f[0] <= F < f[1])
    if not len(changes):
        return word
    learned = max(changes) >= LEARNED
    return "uncertain" if (word == "rich" and not learned) or (word in ("lazy", "probably lazy") and learned) else word


def between(G: float, F: float, changes: Sequence[float] = ()) -> str:
    """Say why a training with these numbers is uncertain: which of its numbers speak for rich, and which do not."""
    learned = max(changes, default=0.0) >= LEARNED
    (gap, _), (turn, _) = BANDS["rich"]
    far, turned = gap <= G, turn <= F
    if far and turned:
        return (f"the network {FAR}, and its hidden representations changed, but no layer's function changed by {LEARNED:g} or "
                f"more, so that no layer is known to have learned features")
    if far:
        layers = ", and the functions of layers changed" if learned else ""
        return (f"the network {FAR}{layers}, but its hidden representations hardly turned: by less than the {turn:g} from "
                f"which on a training is called rich; in wide networks and on easy data they turn as little where features are "
                f"learned")
    if turned:
        return (f"the hidden representations changed, but the network left its linear approximation at initialisation in part "
                f"at most: the gap is below the {gap:g} from which on a training is called rich")
    if learned and regime(G, F) != "uncertain":
        return (f"gap and representations are those of a lazy network, but the function of a layer changed by {LEARNED:g} or "
                f"more")
    return ("the network is between lazy and rich: it left its linear approximation at initialisation in part, and its hidden "
            "representations turned little")


def regime_margin(G: float, F: float, G_error: float = math.nan, F_error: float = math.nan,
                  changes: Sequence[float] = ()) -> Margin | None:
    """The smallest change of one of the two numbers, the other as it is, that gives another word: in standard errors where both
    have them, else in the numbers. None if no change of one number gives another word."""
    word = regime(G, F, changes)
    margins = []
    for i, (name, number, error) in enumerate(((GAP, G, G_error), (TURN, F, F_error))):
        for edge in sorted({edge for band in BANDS.values() for edge in band[i] if math.isfinite(edge)}):
            beyond = edge if number < edge else math.nextafter(edge, LOW)
            other = regime(beyond, F, changes) if name == GAP else regime(G, beyond, changes)
            if other != word:
                margins.append(Margin(name, number, edge, other, error if math.isfinite(error) else None))
    comparable = all(m.errors is not None for m in margins)
    return min(margins, key=lambda m: m.errors or 0.0 if comparable else m.distance, default=None)


def layer_regime(r: float) -> str:
    """The word for a layer whose function changed by r, relative to what it was."""
    if math.isnan(r):
        return "unknown"
    return "frozen" if r == 0 else next((word for edge, word in LAYER_BANDS if r < edge), "rich")


# ------------------------------------------------------------------------------------------------------------- verdict

class Watched(Protocol):
    """An Observer or a Run: something with measurements. It may also have ``ends`` (the first and the last of them), ``names``
    and ``scalar(name)`` (what was logged), ``last`` (the step it has come to), ``failures``, and ``catch_up()``, which measures
    that step."""

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
    """The word for one layer, and the numbers behind it."""

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


@dataclass(frozen=True, repr=False)
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
    unknown: tuple[str, ...]  # what it cannot tell: "whether ..."
    evidence: tuple[str, ...]
    advice: tuple[str, ...]

    def __str__(self) -> str:
        width = max((len(v.layer) for v in self.layers), default=0)
        head = [f"Magnitude: {self.magnitude}"] if self.magnitude else []
        return "\n".join([*head, f"Verdict: {self.verdict}", f"  {self.measured}",
                          *(f"  {v.layer.ljust(width)}  {v}" for v in self.layers), *self.lines])

    def __repr__(self) -> str:
        at = "" if self.step is None else f" at step {self.step}"
        return f"Diagnosis({self.word!r}{f', magnitude {self.magnitude}' if self.magnitude else ''}{at})"

    def _repr_html_(self) -> str:
        """The verdict, what each layer did, and evidence and advice."""
        def cell(text: object) -> str:
            return f"<td style='text-align:left'>{html.escape(str(text))}</td>"

        head = f" (magnitude {html.escape(str(self.magnitude))})" if self.magnitude else ""
        layers = "".join(f"<tr>{cell(v.layer)}{cell(v.words)}{cell(v.numbers)}</tr>" for v in self.layers)
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self.lines)
        return (f"<p><b>{html.escape(self.verdict)}</b>{head}<br>{html.escape(self.measured)}</p><table>{layers}</table>"
                f"<ul>{lines}</ul>")

    @property
    def measured(self) -> str:
        """Step and margin, in a line."""
        when = "a measurement without a step" if self.step is None else f"measured at step {self.step:,}"
        return when + (f"; {self.margin}" if self.margin else "")

    @property
    def lines(self) -> list[str]:
        """The lines below the verdict, in the order in which they are read."""
        sections = {"Remark:": self.remarks, "Cannot tell": self.unknown, "Evidence:": self.evidence, "Advice:": self.advice}
        return [f"{title} {line}" for title, lines in sections.items() for line in lines]

    def to_json(self) -> dict[str, Any]:
        """Return a record for machines. ``magnitude`` and ``margin`` are None where there is none."""
        m, edge = self.magnitude, self.margin
        return {"word": self.word, "verdict": self.verdict, "step": self.step, "measured": self.measured,
                "magnitude": None if m is None else {"value": m.value, "error": m.error, "bound": m.bound, "text": str(m)},
                "margin": None if edge is None or not math.isfinite(edge.value) else {
                    "number": edge.number, "value": edge.value, "edge": edge.edge, "distance": edge.distance,
                    "errors": edge.errors, "beyond": edge.other, "text": str(edge)},
                "remarks": list(self.remarks), "unknown": list(self.unknown), "evidence": list(self.evidence),
                "advice": list(self.advice),
                "layers": {v.layer: {"verdict": v.verdict, **v.evidence} for v in self.layers}}


def diagnose(subject: Snapshot | Watched | str | os.PathLike[str]) -> Diagnosis:
    """Read a Snapshot (measured with ``initial=``), an Observer, a Run or its folder: verdict, evidence, advice.

    Whether anything was learned is read from the probe's labels in the first and the last measurement, and from the scalar that
    is the training's loss: ``loss``, ``train_loss``, ``training_loss`` or ``loss_train``, also spelt as ``train/loss``. An
    Observer whose last step was not measured in full measures it first."""
    if isinstance(subject, (str, os.PathLike)):
        from richter.runs.reader import Run
        with contextlib.closing(Run(subject)) as run:
            return diagnose(run)
    if (catch_up := getattr(subject, "catch_up", None)) is not None:
        catch_up()
    snapshots = [subject] if isinstance(subject, Snapshot) else getattr(subject, "ends", None)  # of a Run: others are not read
    if snapshots is None and (snapshots := getattr(subject, "snapshots", None)) is None:
        raise SelectionError(f"diagnose takes a Snapshot, an Observer, a Run or the folder of one, not {type(subject).__name__}.")
    failures = [str(failure) for failure in getattr(subject, "failures", ())]  # what could not be measured or written
    if not snapshots:
        raise SelectionError(". ".join(["nothing has been measured yet: call the Observer in the training loop first",
                                        *failures]) + ".")
    c = course(subject, snapshots)
    failure = failed(c)
    past = unmoved(c.last) and (failure is None or failure.word != "untrained")  # layers have moved since
    layers = () if past else tuple(_layer(c.last, name, failure is None) for name in _judged(c.last))
    j = failure or _judgement(c, layers)
    m = c.last.get("magnitude")
    magnitude = None
    if failure is None and j.word in (*BANDS, "memorised") and m is not None and math.isfinite(m.value):
        magnitude = Magnitude(m.value, m.error if math.isfinite(m.error) else None, m.mark is Mark.BOUND, c.last.step)
    return Diagnosis(j.word, j.sentence, c.last.step, magnitude, j.margin, layers, tuple(_remarks(c, layers, j)),
                     tuple(_unknown(c, j.word)), (*_evidence(c, failure), *failures), j.advice)


def _judgement(c: Course, layers: Sequence[LayerVerdict]) -> Judgement:
    """The judgement of a training that did not fail."""
    gap, turn = c.last.get(GAP), c.last.get(TURN)
    if gap is None or turn is None or not math.isfinite(gap.value) or not math.isfinite(turn.value):
        if gap is None or turn is None or NO_HIDDEN not in turn.note or gap.mark is not Mark.BOUND or not gap.value < LINEAR:
            return Judgement("unknown", f"unknown: {_missing(c.last)}.")
        # one layer of weights between inputs and outputs; of two there is a difference: a deep linear network has both regimes
        return Judgement("linear", f"linear: neither lazy nor rich. The model has no hidden layer and is linear in its weights. "
                                   f"It is its own linearisation, whatever training does ({GAP} {gap.value:.2g}), and has no "
                                   f"features that it could learn.", ("to learn features, give the model a hidden layer.",))
    changes = [v.evidence[MOVED] for v in layers if MOVED in v.evidence and v.verdict not in ("read-out", "zero start")]
    word = regime(gap.value, turn.value, changes)
    if gap.mark is Mark.BOUND and word != regime(0.0, turn.value, changes):  # anything below it would be as likely
        return Judgement("unknown", f"unknown: {GAP} is {gap.note}. Measure a copy in double precision.")
    given = ", relative to the given start" if c.begun_trained else ""
    numbers = f"({GAP} {gap.value:.3g}, {TURN} {turn.value:.3g})"
    margin = regime_margin(gap.value, turn.value, gap.error, turn.error, changes)
    learned = [v.layer for v in layers if v.verdict in ("rich", "probably rich")]
    which = f" Layers that learned features: {few_of(learned, 8)}." if word == "rich" and learned else ""
    if c.memorised and c.held_out is not None and c.labels is not None:
        name, accuracy = c.held_out
        return Judgement("memorised", f"memorised{given}. {MEMORISED.capitalize()} (accuracy on the probe "
                                      f"{c.now('probe_accuracy'):.3g}, {name} {accuracy:.3g}, guessing {c.labels.chance:.3g}). "
                                      f"By its numbers it is {word} {numbers}.{which}",
                         (GENERALISE,), Margin(name, accuracy, c.guessed, word))
    meaning = MEANINGS.get(word) or between(gap.value, turn.value, changes)
    return Judgement(word, f"{word}{given}. {meaning.capitalize()} {numbers}.{which}", tuple(_advice(c, word, layers)),
                     margin)


def _missing(snap: Snapshot) -> str:
    """Why there is no verdict: each number that is missing, with its reason."""
    rows = [(name, snap.get(name)) for name in (GAP, TURN)]
    reasons = " and ".join(f"{k} was not measured" if row is None else f"there is no {k}{f' ({row.note})' if row.note else ''}"
                           for k, row in rows if row is None or not math.isfinite(row.value))
    if NO_HIDDEN in reasons:
        return (f"{reasons}. Without a hidden layer there are no features to learn; what is not in the linearisation is what "
                f"follows the one layer")
    if unrecognised := _unrecognised(snap):
        return (f"{reasons}. The weights of {few_of(unrecognised)} are not used as linear maps that Richter knows, so what these "
                f"layers read is not known. Products of a weight, or of a multiple of it, by F.linear, matmul, einsum or a "
                f"convolution are known; richter.layers.register adds others")
    if {r.measure for r in snap.rows if math.isfinite(r.value)} & {"weight_change", "c_uc_ratio"}:
        return (f"{reasons}. How far the weights moved is below, but weights may move far in a lazy network and little in a rich "
                f"one")
    return (f"{reasons}. The weights at initialisation are needed: pass initial=state_dict to richter.measure, or watch from the "
            f"first step with an Observer")


def _unrecognised(snap: Snapshot) -> list[str]:
    """Layers with weights that are used, but not as a known linear map."""
    return [name for name, note in snap.notes.items() if NO_MAP in note]


def _advice(c: Course, word: str, layers: Sequence[LayerVerdict]) -> list[str]:
    """Advice that fits the case: a given start has no initial scale to turn, and a frozen layer none at all."""
    large = [LARGE_OUTPUTS] if c.large_outputs else []
    if word == "rich":
        return [*large, "nothing to turn for richness: the network learns features as it is. To go lazier, scale the output up "
                        "and the learning rate down."]
    if word == "uncertain":
        return [*large, "train longer, or measure on a larger probe, before you turn anything."]
    words = {v.verdict for v in layers}
    if "frozen" in words and words <= {"frozen", "read-out", "reference", "unknown"}:
        return [*large, "only the read-out was trained: to learn features, let other layers train too."]
    frozen = ["let the frozen layers train too."] if "frozen" in words else []
    if c.begun_trained:
        return [*frozen, "to learn more features than the given ones, use a larger learning rate or train longer; the initial "
                         "scale is what was given, and is not to be turned."]
    pretrained = "" if c.pretrained is False else (
                  " If they were pretrained (a new head on pretrained layers), leave their scale alone, and train longer or with "
                  "a larger learning rate.")
    if word == "amplified":
        return [*large, *frozen, "to turn the features, train longer; if the initial weights were random, scale them (or the "
                                 f"output) down.{pretrained}"]
    return [*frozen, "to learn features, if the initial weights were random, start smaller: scale them (or the output) down by 3 "
                     f"to 10, and look again at the magnitude.{pretrained}"]


def _judged(snap: Snapshot) -> list[str]:
    """Layers with a number that says something about them."""
    layers = {r.layer for r in snap.rows if r.measure in (MOVED, "weight_change", "nfc")}
    return [name for name in snap.layers if name != WHOLE and name in layers]


def _layer(snap: Snapshot, name: str, sound: bool) -> LayerVerdict:
    """``sound``: the training did not fail. The numbers of one that did may be those of a rich layer, and mean nothing."""
    rows = [row for m in (MOVED, *BESIDE) if (row := snap.get(m, name)) is not None]
    numbers = {r.measure: r.value for r in rows if math.isfinite(r.value) and r.mark is not Mark.TRIVIAL}  # else no evidence
    note = snap.notes.get(name, "")
    if REFERENCE_COPY in note:
        return LayerVerdict(name, "reference", {})
    if numbers.get("weight_change") == 0 and not numbers.get(MOVED):
        return LayerVerdict(name, "frozen", {"weight_change": 0.0})
    if any(r.measure == MOVED and r.mark is Mark.TRIVIAL for r in rows):
        return LayerVerdict(name, "read-out", numbers)
    if ZERO_START in note:
        return LayerVerdict(name, "zero start", numbers)
    return LayerVerdict(name, layer_regime(numbers.get(MOVED, math.nan)) if sound else "unknown", numbers)


# --------------------------------------------------------------------------------------------- evidence, remarks, unknown

def _evidence(c: Course, failure: Judgement | None) -> list[str]:
    """The numbers that the rules have read, a line each; of a training that failed, also the word that they would give."""
    lines, last = [], c.last
    guess = "" if c.labels is None else f" (guessing: {c.labels.chance:.3g})"
    for measure, name, beside in (("probe_loss", "loss of the probe", ""), ("probe_accuracy", "accuracy on the probe", guess)):
        first, now = c.before(measure), c.now(measure)
        if math.isfinite(now):
            lines.append(_moved(f"the {name}", first, now) + beside)
    if c.held_out is not None:
        lines.append(f"{c.held_out[0]}: {c.held_out[1]:.3g}{guess}")
    if c.loss is not None and c.loss.lost is None:
        lines.append(f"{_moved(f'the logged {c.loss.name}', c.loss.first, c.loss.smoothed)} (smoothed)")
    G, F = value(last, GAP), value(last, TURN)
    if failure is not None and failure.word in ("early", "stale") and math.isfinite(G) and math.isfinite(F):
        when = "so far, its numbers are" if failure.word == "early" else f"then, at step {last.step}, its numbers were"
        lines.append(f"{when} those of a training that is {regime(G, F)} ({GAP} {G:.3g}, {TURN} {F:.3g})")
    for measure in ("tangent_cka",):
        a, b = (None if snap is None else snap.get(measure) for snap in (c.first, last))
        if a is not None and b is not None and math.isfinite(a.value) and math.isfinite(b.value):
            noise = math.hypot(a.error, b.error)  # two standard errors; where one is missing, nobody knows
            within = "no error bar" if not math.isfinite(noise) else "beyond probe noise" if abs(b.value - a.value) > 2 * noise \
                else f"within probe noise ({noise:.2g})"
            factor = f" (x{b.value / a.value:.1f})" if a.value else ""
            agreement = _moved(f"the agreement of the tangent kernel with the labels ({measure})", a.value, b.value)
            lines.append(f"{agreement}{factor}, {within}")
    return [*lines, *_converged(last), *_counted(last)]


def _moved(name: str, first: float, now: float) -> str:
    """Say whether a number rose or fell, with both values; its value alone where the first one is not known."""
    a, b = f"{first:.3g}", f"{now:.3g}"
    if not math.isfinite(first):
        return f"{name}: {b}"
    return f"{name} {'stayed' if a == b else 'rose' if now > first else 'fell'}: {a} -> {b}"


def _converged(last: Snapshot) -> list[str]:
    """Features at convergence, where they were measured, and whether there is convergence."""
    rows = [r for r in last.rows if r.measure == "fact"]
    finite = [r for r in rows if math.isfinite(r.value)]
    if not finite:
        return [f"features at convergence: {rows[0].note}"] if rows else []
    low, high = min(finite, key=lambda r: r.value), max(finite, key=lambda r: r.value)
    words = f"correlation of W^T W with FACT: {low.value:.3g} ({low.layer}) to {high.value:.3g} ({high.layer})"
    if doubtful := [r for r in finite if r.note]:
        worst = low if low.note else doubtful[0]
        words += f"; in {len(doubtful)} of {len(finite)} layers it says little ({worst.layer}: {worst.note})"
    return [words]


def _counted(last: Snapshot) -> list[str]:
    """The number of features that the last layer reads, where it was measured. Few features need not be good ones."""
    kappa, nc1 = value(last, "kappa_cka"), value(last, "nc1")
    numbers = [f"{v:.3g} {word}" for measure, word in (("deff_intensity", "strong"), ("deff_utilisation", "used"))
               if math.isfinite(v := value(last, measure))]
    lines = []
    if math.isfinite(kappa):
        few = f"as few as the outputs need (below {MINIMUM:g})" if kappa < MINIMUM else "more than the outputs need"
        lines.append(f"features of the last layer: {', '.join([f'kappa_cka {kappa:.3g}', few, *numbers])}. Whether they are good "
                     f"ones this does not say: a network that knows random labels by heart may have as few")
    elif numbers:
        lines.append(f"features of the last layer: {', '.join(numbers)}")
    if math.isfinite(nc1):
        lines.append(f"{CARDS['nc1'].title}: {nc1:.3g} (0 where the examples of a class have become one point)")
    return lines


def _remarks(c: Course, layers: Sequence[LayerVerdict], j: Judgement) -> list[str]:
    remarks, margin = [], j.margin
    if c.begun_trained and c.labels is not None:
        how = "as you say" if c.pretrained else (f"accuracy {c.before('probe_accuracy'):.3g}, "
                                                  f"guessing {c.labels.chance:.3g}")
        remarks.append(f"fine-tuning: the network was not random at the start ({how}); everything is relative to the given "
                       f"start.")
    if c.large_outputs:
        remarks.append(f"large initial outputs: the loss began at {c.before('probe_loss'):.3g}, that of guessing is "
                       f"{c.log_classes:.3g}.")
    frozen = [v.layer for v in layers if v.verdict == "frozen"]
    if frozen and j.word != "untrained":
        remarks.append(f"frozen: {few_of(frozen)} did not move at all ({len(frozen)} of {len(layers)} layers); either no "
                       f"gradient reached them, or they were not to train.")
    readouts = {v.layer for v in layers if v.verdict == "read-out"}
    if zero := [name for name, note in c.last.notes.items() if ZERO_START in note and name not in readouts]:
        remarks.append(f"zero-initialised branches: the weights of {few_of(zero)} began at zero ({len(zero)} in all). The "
                       f"residual branches that they close were switched off at initialisation, and so they are in the linear "
                       f"approximation: layers in these branches look lazy until the branches have grown, and {GAP} counts "
                       f"that growth.")
    if references := [v.layer for v in layers if v.verdict == "reference"]:
        remarks.append(f"reference copy: {few_of(references)} are frozen at the initial weights of other layers, as in "
                       f"f(x) - f0(x); they are not meant to train.")
    if j.word != "stale" and c.reached is not None and c.last.step is not None and c.reached > c.last.step:
        remarks.append(f"the training is at step {c.reached:,}; what it did after step {c.last.step:,} is not in these numbers.")
    if (unrecognised := _unrecognised(c.last)) and j.word in BANDS:
        remarks.append(f"not recognised: the weights of {few_of(unrecognised)} are not used as linear maps that Richter knows. "
                       f"They count in {GAP}; what they read does not count in {TURN}.")
    if c.fallen < ADVANCED and c.finished and c.loss is not None:
        remarks.append(f"the loss fell by {max(0.0, c.fallen):.0%} only, and no longer falls ({c.loss.late:.0%} of its fall "
                       f"was in its last quarter): little was to be learned, or this is a plateau.")
    if c.loss is not None and c.loss.gaps:
        remarks.append(f"{c.loss.name} was not finite {c.loss.gaps} times, and recovered.")
    if c.unsettled:
        remarks.append("the network's outputs on the probe are not judged: its norms have seen too few batches.")
    if c.begun_unsettled:
        why = "buffers of the network have moved since" if c.buffers_moved else "norms had not seen enough data"
        remarks.append(f"the network's outputs in the first measurement are not compared, because {why}.")
    if margin is not None and margin.errors is not None and margin.errors < 2:
        remarks.append(f"{margin.number} is within two standard errors of {margin.edge:g}: it may as well be "
                       f"{margin.other or 'another verdict'}.")
    return remarks


def _unknown(c: Course, word: str) -> list[str]:
    """Questions that the verdict cannot answer, and why."""
    unknown = []
    ended = word in ("untrained", "diverged", "stale")
    if not c.known and not ended:
        data = ", in eval mode with norms that have seen enough data" if c.unsettled or c.begun_unsettled else ""
        unknown.append(f"whether anything was learned: there is neither a loss that was logged, watch(step, loss=loss), nor a "
                       f"first and a last measurement of a probe with labels{data}.")
    if c.pretrained is None and not c.begun_trained and word in BANDS:
        why = ("the probe has no class labels" if c.labels is None else
               "there is no measurement of its initial weights" if c.first is None else
               "its first measurement came after training had begun. Observer(pretrained=False) or True says so"
               if not c.begun_at_start else
               "the first measurement does not show what it knew" if c.begun_unsettled else
               "accuracy started at chance, which also happens with a new head on pretrained layers")
        unknown.append(f"whether the network was pretrained: {why}.")
    if c.buffers_moved and not ended:
        unknown.append("what the buffers did that moved besides the weights: both networks are compared with those of now.")
    if word in ("rich", "amplified") and c.held_out is None:
        unknown.append("whether what was learned is good: memorised noise is rich too. Held-out examples say that.")
    return unknown
