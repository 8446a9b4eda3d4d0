"""Has the network left its linearisation, have its features turned, and what does it answer? A verdict rests on these."""

from __future__ import annotations

import math

import numpy as np

from richter.core import Card, Interval, Mark, Ref, Remark
from richter.core.values import ASSUMED_LOSS
from richter.instrument.statistics import (
    FEATURE_CHANGE,
    FUNCTION_CHANGE,
    LINEARISATION,
    OUTPUTS,
    SPREAD,
    Answers,
    Gap,
    Moved,
    Turned,
)
from richter.instrument.statistics.outputs import Sizes
from richter.linalg import quotient
from richter.measures.cards import ANSWERS, MOVEMENT, POSITIVE, UNIT
from richter.measures.measure import Measure

FARTHEST = 3.0  # of the magnitude, on both sides


def gap(g: Gap) -> float:
    """G = |df - J0 dw| / (|df| + |J0 dw|), but no less than what rounding makes of it.  [lazy, Sec. 1]"""
    return np.minimum(1.0, quotient(np.maximum(g.rest, g.rounding), g.change + g.linear))  # type: ignore[no-any-return]


def rounded(g: Gap) -> Remark:
    """Is it below what can be seen?"""
    if not g.rest < g.rounding or not g.change + g.linear:
        return g.remark
    return Remark(Mark.BOUND, f"below {gap(g):.2g}, what rounding ({g.precision}) makes of the change of the outputs")


def magnitude(g: Gap) -> float:
    """M = log10(G / (1 - G)), between -3 and 3."""
    G = float(gap(g))
    if math.isnan(G) or G in (0.0, 1.0):
        return math.nan if math.isnan(G) else math.copysign(FARTHEST, G - 0.5)
    return max(-FARTHEST, min(FARTHEST, math.log10(G / (1 - G))))


def clipped(g: Gap) -> Remark:
    """Is it farther than what is shown?"""
    M = magnitude(g)
    if abs(M) < FARTHEST or math.isnan(M):
        return rounded(g)
    return Remark(Mark.BOUND, f"at {M:+.0f} or beyond")


def largest(t: Turned) -> float:
    """The change of the layer whose features have turned most.  [cka, Sec. 3]"""
    return max(t.layers.values(), default=math.nan)


def ratio(m: Moved) -> float:
    """|(W - W0) h + (b - b0)| / |W0 h + b0|."""
    return quotient(m.change, m.first)


def rescaled(m: Moved) -> Remark:
    """Is the layer scale-invariant?"""
    if m.scale == 1:
        return Remark()
    return Remark(text=f"scale-invariant layer: its weights, |W| = {1 / m.scale:.3g} |W0|, are taken at their initial norm")


def partial(t: Turned) -> Remark:
    return t.remark


def loss(a: Answers) -> float:
    return a.loss


def assumed(a: Answers) -> Remark:
    """Nobody said which loss is trained."""
    return Remark(text=f"{ASSUMED_LOSS}; Probe(loss=...) says which it is") if a.objective.assumed else Remark()


def accuracy(a: Answers) -> float:
    return a.right


def spread(s: Sizes) -> float:
    """sqrt(mean_n |f_n - mean f|^2)."""
    return np.sqrt(s.spread)  # type: ignore[no-any-return]


def rms(s: Sizes) -> float:
    """sqrt(mean f^2)."""
    return np.sqrt(s.square)  # type: ignore[no-any-return]


MEASURES = (
    Measure("magnitude", magnitude, (LINEARISATION,), remark=clipped, card=Card(
        "magnitude",
        "log10(G / (1 - G)) of the linearisation gap G: positive when richer, negative when lazier, a unit for a factor of about "
        "ten in the scale of the outputs.",
        rich="up", panel=MOVEMENT, bounds=Interval(-3.0, 3.0), ref=Ref("lazy", "Sec. 1"))),
    Measure("linearisation_gap", gap, (LINEARISATION,), batched=True, remark=rounded, card=Card(
        "linearisation gap (G)",
        "The share of what the network did that is not in its linearisation: 0 exactly lazy, towards 1 rich.",
        rich="up", panel=MOVEMENT, bounds=UNIT, whole=True, ref=Ref("lazy", "Sec. 1"))),
    Measure("feature_change_cka", largest, (FEATURE_CHANGE,), remark=partial, card=Card(
        "feature change (F)", "How far what the layers read has turned since initialisation, in the layer where it turned most.",
        rich="up", panel=MOVEMENT, bounds=Interval(0.0, 2.0), ref=Ref("cka", "Sec. 3"))),
    Measure("function_change", ratio, (FUNCTION_CHANGE,), batched=True, remark=rescaled, card=Card(
        "change of a layer's function",
        "What the change of a layer's weights does to its output, relative to what its initial weights do: 0 if it is frozen.",
        rich="up", typical=Interval(0.15, 1.0), panel=MOVEMENT, bounds=POSITIVE, ref=Ref("lazy", "Sec. 1"))),
    Measure("probe_loss", loss, (OUTPUTS,), batched=True, remark=assumed, card=Card(
        "loss on the probe", "The loss of the probe's examples.", panel=ANSWERS, ref=Ref("lazy", "Sec. 1"))),
    Measure("probe_accuracy", accuracy, (OUTPUTS,), batched=True, card=Card(
        "accuracy on the probe", "The share of the probe's labels that have the largest output.", panel=ANSWERS, bounds=UNIT,
        whole=True, ref=Ref("lazy", "Sec. 1"))),
    Measure("output_spread", spread, (SPREAD,), batched=True, card=Card(
        "spread of outputs", "How far outputs differ from example to example: near 0 the network has collapsed.", panel=ANSWERS,
        bounds=POSITIVE, ref=Ref("lazy", "Sec. 1"))),
    Measure("output_rms", rms, (SPREAD,), batched=True, card=Card(
        "size of outputs", "The root mean square of the outputs.", panel=ANSWERS, bounds=POSITIVE, ref=Ref("lazy", "Sec. 1"))),
)
