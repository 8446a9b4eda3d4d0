"""Measures of the movement of the network: linearisation gap, feature change, and its outputs. The verdict is based on them."""

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
    HeldOut,
    Moved,
    Turned,
)
from richter.instrument.statistics.outputs import Sizes
from richter.linalg import quotient
from richter.measures.cards import ANSWERS, MOVEMENT, POSITIVE, UNIT
from richter.measures.measure import Measure

FARTHEST = 3.0  # largest absolute value of the magnitude


def gap(g: Gap) -> float:
    """Return G = |df - J0 dw| / (|df| + |J0 dw|), but at least the value that rounding errors cause.  [lazy, Sec. 1]"""
    return np.minimum(1.0, quotient(np.maximum(g.rest, g.rounding), g.change + g.linear))  # type: ignore[no-any-return]


def rounded(g: Gap) -> Remark:
    """Mark the value as a bound if rounding errors hide it."""
    if not g.rest < g.rounding or not g.change + g.linear:
        return g.remark
    return Remark(Mark.BOUND, f"below {gap(g):.2g}, the gap that rounding ({g.precision}) alone causes in the change of the "
                              f"outputs")


def magnitude(g: Gap) -> float:
    """Return M = log10(G / (1 - G)), clipped to [-3, 3]."""
    G = gap(g)
    with np.errstate(divide="ignore"):
        return np.clip(np.log10(G) - np.log10(1 - G), -FARTHEST, FARTHEST)  # type: ignore[no-any-return]


def clipped(g: Gap) -> Remark:
    """Mark the value as a bound if it was clipped."""
    M = magnitude(g)
    if abs(M) < FARTHEST or math.isnan(M):
        return rounded(g)
    return Remark(Mark.BOUND, f"at {M:+.0f} or beyond")


def largest(t: Turned) -> float:
    """Change of the layer whose features have rotated most.  [cka, Sec. 3]"""
    return np.fmax.reduce([*t.layers.values()])  # type: ignore[no-any-return]


def ratio(m: Moved) -> float:
    """Relative change of a map's output, |(W - W0) h + (b - b0)| / |W0 h + b0|."""
    return quotient(m.change, m.first)


def rescaled(m: Moved) -> Remark:
    """Note that the layer is scale-invariant."""
    if m.scale == 1:
        return Remark()
    return Remark(text=f"scale-invariant layer: its weights, |W| = {1 / m.scale:.3g} |W0|, are rescaled to their initial norm")


def partial(t: Turned) -> Remark:
    """Remark of the comparison with the initial network."""
    return t.remark


def loss(a: Answers) -> float:
    """Loss of the probe."""
    return a.loss


def assumed(a: Answers) -> Remark:
    """Note that the loss of the training was not given."""
    return Remark(text=f"{ASSUMED_LOSS}; set it with Probe(loss=...)") if a.objective.assumed else Remark()


def accuracy(a: Answers) -> float:
    """Accuracy on the probe."""
    return a.right


def spread(s: Sizes) -> float:
    """Root mean squared distance of the outputs from their mean over examples."""
    return np.sqrt(s.spread)  # type: ignore[no-any-return]


def rms(s: Sizes) -> float:
    """Root mean square of the outputs."""
    return np.sqrt(s.square)  # type: ignore[no-any-return]


MEASURES = (
    Measure("magnitude", magnitude, (LINEARISATION,), batched=True, remark=clipped, card=Card(
        "magnitude",
        "log10(G / (1 - G)) of the linearisation gap G: positive when richer, negative when lazier, a unit for a factor of about "
        "ten in the scale of the outputs.",
        rich="up", panel=MOVEMENT, bounds=Interval(-3.0, 3.0), ref=Ref("lazy", "Sec. 1"))),
    Measure("linearisation_gap", gap, (LINEARISATION,), batched=True, remark=rounded, card=Card(
        "linearisation gap (G)",
        "The share of the change of the outputs that is not in the linearisation: 0 exactly lazy, towards 1 rich.",
        rich="up", panel=MOVEMENT, bounds=UNIT, whole=True, ref=Ref("lazy", "Sec. 1"))),
    Measure("feature_change_cka", largest, (FEATURE_CHANGE,), batched=True, remark=partial, card=Card(
        "feature change (F)",
        "How far the inputs of a hidden layer have rotated since initialisation, in the layer that rotated most.",
        rich="up", panel=MOVEMENT, bounds=Interval(0.0, 2.0), ref=Ref("cka", "Sec. 3"))),
    Measure("function_change", ratio, (FUNCTION_CHANGE,), batched=True, remark=rescaled, card=Card(
        "change of a layer's function",
        "The change of a layer's output that the change of its weights causes, relative to the output of its initial weights: 0 "
        "if it is frozen.",
        rich="up", typical=Interval(0.15, 1.0), panel=MOVEMENT, bounds=POSITIVE, ref=Ref("lazy", "Sec. 1"))),
    Measure("probe_loss", loss, (OUTPUTS,), batched=True, remark=assumed, card=Card(
        "loss on the probe", "The loss on the probe's examples.", panel=ANSWERS, ref=Ref("lazy", "Sec. 1"))),
    Measure("probe_accuracy", accuracy, (OUTPUTS,), batched=True, card=Card(
        "accuracy on the probe", "The share of the probe's labels with the largest output.", panel=ANSWERS, bounds=UNIT,
        whole=True, ref=Ref("lazy", "Sec. 1"))),
    Measure("held_out_accuracy", accuracy, (HeldOut(OUTPUTS),), batched=True, card=Card(
        "accuracy on held-out examples", "The share of the labels of Probe(held_out=...) with the largest output.", panel=ANSWERS,
        bounds=UNIT, whole=True, ref=Ref("lazy", "Sec. 1"))),
    Measure("output_spread", spread, (SPREAD,), batched=True, card=Card(
        "spread of outputs", "How far outputs differ between examples: near 0 the network has collapsed.", panel=ANSWERS,
        bounds=POSITIVE, ref=Ref("lazy", "Sec. 1"))),
    Measure("output_rms", rms, (SPREAD,), batched=True, card=Card(
        "size of outputs", "The root mean square of the outputs.", panel=ANSWERS, bounds=POSITIVE, ref=Ref("lazy", "Sec. 1"))),
)
