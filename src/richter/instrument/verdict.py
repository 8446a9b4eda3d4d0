"""Is my network lazy or rich, which layers learn, and what should I turn? A verdict with its evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from richter.core import WHOLE, Card, Interval, Mark, Row, SelectionError
from richter.instrument.snapshot import Snapshot
from richter.measures.cards import CARDS

SHARE = "c_uc_ratio"  # its card says up to where a layer is lazy and from where on it is rich
WORDS = {"rich": "learned features", "between": "learned in part", "lazy": "lazy: stayed near its initial features",
         "unknown": "cannot be told"}


class Watched(Protocol):
    """An Observer or a Run: something with measurements. A Run also has ``ends``, the first and the last of them."""

    @property
    def snapshots(self) -> Sequence[Snapshot]: ...


@dataclass(frozen=True)
class LayerVerdict:
    """What one layer did, and the numbers that say so."""

    layer: str
    verdict: str  # "rich", "between", "lazy", "unknown"
    evidence: dict[str, float]

    def __str__(self) -> str:
        return f"{self.words} ({self.numbers})" if self.numbers else self.words

    @property
    def words(self) -> str:
        return WORDS[self.verdict]

    @property
    def numbers(self) -> str:
        return ", ".join(f"{k} {v:.3g}" for k, v in self.evidence.items() if math.isfinite(v))


@dataclass(frozen=True)
class Diagnosis:
    """A verdict for the whole model and for each layer, with evidence and advice. ``print`` it."""

    verdict: str
    layers: tuple[LayerVerdict, ...]
    evidence: tuple[str, ...]
    advice: tuple[str, ...]
    step: int | None  # of the last measurement

    def __str__(self) -> str:
        width = max((len(v.layer) for v in self.layers), default=0)
        return "\n".join([f"Verdict: {self.verdict}",
                          *(f"  {v.layer.ljust(width)}  {v}" for v in self.layers),
                          *(f"Evidence: {e}" for e in self.evidence), *(f"Advice: {a}" for a in self.advice)])


def diagnose(subject: Snapshot | Watched) -> Diagnosis:
    """Read a Snapshot (measured with ``initial=``), an Observer or a Run: verdict, evidence, advice."""
    snapshots = [subject] if isinstance(subject, Snapshot) else getattr(subject, "ends", None)  # of a Run: others are not read
    if snapshots is None and (snapshots := getattr(subject, "snapshots", None)) is None:
        raise SelectionError(f"diagnose takes a Snapshot, an Observer or a Run, not {type(subject).__name__}.")
    if not snapshots:
        raise SelectionError(". ".join(["nothing has been measured yet: call the Observer in the training loop first",
                                        *_failures(subject)]) + ".")
    last = snapshots[-1]
    layers = tuple(_layer(last, name) for name in last.layers if name != WHOLE and _has(last, "nfc", name))
    known = [v for v in layers if v.verdict != "unknown"]
    evidence = (*_evidence(snapshots[0], last), *_converged(last), *_failures(subject))
    return Diagnosis(_overall(known, layers), layers, evidence, tuple(_advice(known)), last.step)


def _has(snap: Snapshot, measure: str, layer: str) -> bool:
    return any(r.measure == measure and r.layer == layer for r in snap.rows)


def _layer(snap: Snapshot, name: str) -> LayerVerdict:
    rows = [snap.row(m, name) for m in (SHARE, "weight_change", "nfc", "cnfc") if _has(snap, m, name)]
    numbers = {r.measure: r.value for r in rows if r.mark is not Mark.TRIVIAL}  # what is so by definition is no evidence
    if numbers.get("weight_change") == 0:
        return LayerVerdict(name, "lazy", {"weight_change": 0.0})
    return LayerVerdict(name, _regime(numbers.get(SHARE, math.nan), CARDS[SHARE]), numbers)


def _regime(value: float, card: Card) -> str:
    """On which side of the typical values that its card gives a number lies."""
    typical = card.typical or Interval()
    if math.isnan(value):
        return "unknown"
    if typical.low <= value < typical.high:
        return "between"
    return "rich" if (value >= typical.high) == (card.rich == "up") else "lazy"


def _overall(known: Sequence[LayerVerdict], layers: Sequence[LayerVerdict]) -> str:
    if not known:
        return ("cannot be told: centred measures need the weights at initialisation. Pass initial=state_dict to "
                "richter.measure, or watch from the first step with an Observer.")
    rich = [v.layer for v in known if v.verdict == "rich"]
    lazy = [v.layer for v in known if v.verdict == "lazy"]
    if len(lazy) == len(known):
        return "lazy. No layer's features moved far from the initial ones: the network works like a fixed kernel."
    if len(rich) == len(known):
        return "rich. Every layer's features are dominated by what training wrote into its weights."
    if not rich:
        return f"between lazy and rich. No layer is dominated by what it learned; {len(lazy)} of {len(known)} are lazy."
    return (f"rich in {len(rich)} of {len(known)} layers ({', '.join(rich)})"
            + (f"; lazy in {', '.join(lazy)}." if lazy else "; the others learned in part."))


def _evidence(first: Snapshot, last: Snapshot) -> list[str]:
    """What the kernel of the whole model did between the first and the last measurement."""
    changes = []
    for measure in ("tangent_cka", "tangent_stable_rank"):
        if first is last or not _has(first, measure, WHOLE) or not _has(last, measure, WHOLE):
            continue
        a, b = first.row(measure), last.row(measure)
        if math.isfinite(a.value) and math.isfinite(b.value):
            factor = f" (x{b.value / a.value:.1f})" if a.value else ""
            changes.append(f"{CARDS[measure].title}: {a.value:.3g} -> {b.value:.3g}{factor}, {_against_noise(a, b)}")
    return changes


def _converged(last: Snapshot) -> list[str]:
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


def _failures(subject: Snapshot | Watched) -> list[str]:
    """What an Observer or a Run could not measure or write."""
    return [str(failure) for failure in getattr(subject, "failures", ())]


def _against_noise(a: Row, b: Row) -> str:
    """Is the difference more than two standard errors? Where one of these is missing, nobody knows."""
    noise = math.hypot(a.error, b.error)
    if not math.isfinite(noise):
        return "no error bar"
    return "beyond probe noise" if abs(b.value - a.value) > 2 * noise else f"within probe noise ({noise:.2g})"


def _advice(known: Sequence[LayerVerdict]) -> list[str]:
    lazy = [v.layer for v in known if v.verdict == "lazy"]
    if not known:
        return []
    if len(lazy) > len(known) / 2:
        return ["to learn features, start smaller: scale the initial weights (or the output) down by 3 to 10, or train longer "
                "with a larger learning rate, and look again at c_uc_ratio."]
    if lazy:
        return [f"{', '.join(lazy)}: scale the initial weights of these layers down, or give them a larger learning rate; if the "
                f"task does not need them, they may also be left out."]
    return ["nothing to turn for richness; to go lazier, scale the output up and the learning rate down."]
