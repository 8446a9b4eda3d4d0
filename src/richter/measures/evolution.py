"""Evolution of the tangent kernel, compared with the initial one and with that of the last snapshot.

K is each output's own kernel K^cc, all outputs together, over the probe's kernel examples.  [rapid, Sec. 2 and 7]
"""

from __future__ import annotations

import math

import torch

from richter.core import Card, Mark, Ref, Remark
from richter.instrument.statistics import SAME_OUTPUT, SINCE_INITIAL, SINCE_PREVIOUS, STEP, Evolved, Initial, Previous
from richter.instrument.statistics.per_output import SameOutput
from richter.linalg import quotient
from richter.measures.cards import EVOLUTION, POSITIVE, UNIT
from richter.measures.measure import Measure

ROUNDING = 1e-12  # an alignment closer to 1 counts as 1


def norm(e: Evolved) -> float:
    """Norm of the tangent kernel relative to the initial one, |K| / |K0|.  [rapid, Fig. 1C]"""
    return quotient(e.now, e.then)


def rotation(e: Evolved) -> float:
    """Return 1 - <K, K0> / (|K| |K0|) as (|K - K0|^2 - (|K| - |K0|)^2) / (2 |K| |K0|), which avoids cancellation for small
    rotations."""
    turned = quotient(e.apart ** 2 - (e.now - e.then) ** 2, 2 * e.now * e.then)
    return turned if math.isnan(turned) else min(1.0, max(0.0, turned))


def distance(e: Evolved) -> float:
    """Relative distance of the tangent kernel from the initial one, |K - K0| / |K0|."""
    return quotient(e.apart, e.then)


def velocity(e: Evolved, step: float, before: float) -> float:
    """Return |K - K'| / (|K'| steps), with K' at the last snapshot."""
    return quotient(e.apart, e.then * max(0.0, float(step) - float(before)))


def later(e: Evolved, step: float, before: float) -> Remark:
    """Mark the value undefined if the run went back to an earlier step."""
    return Remark() if step > before else Remark(Mark.UNDEFINED, f"the last snapshot is from step {before:g}, and this one from "
                                                                 f"step {step:g}: no time has passed between them")


def effective_gamma(now: SameOutput, then: SameOutput) -> float:
    """Feature learning rate at which optimal feature evolution has the measured alignment, averaged over outputs; kernels in
    units of |K0^cc|, as in the paper.  [rapid, Eq. 20]"""
    keep = (now.energy > 0) & (now.norm > 0) & (then.norm > 0)
    A, a = (s.quadratic[keep] / (s.norm[keep] * s.energy[keep]) for s in (now, then))
    rate = -a + A * torch.sqrt((1 - a * a).clamp(min=0) / torch.where(A < 1 - ROUNDING, 1 - A * A, math.nan))
    return now.mean((rate / now.energy[keep]).cpu().numpy(), keep.cpu().numpy()) if bool(keep.any()) else math.nan


def reachable(now: SameOutput, then: SameOutput) -> Remark:
    """Mark the value undefined if the kernel equals y y^T, which no finite rate reaches."""
    value = effective_gamma(now, then)
    return Remark(Mark.UNDEFINED, "the kernel equals y y^T, which no finite rate reaches") if not math.isfinite(value) \
        and bool(((now.energy > 0) & (now.norm > 0)).any()) else Remark()


MEASURES = (
    Measure("kernel_norm", norm, (SINCE_INITIAL,), card=Card(
        "kernel norm |K|/|K0|", "The norm of the tangent kernel relative to initialisation.",
        panel=EVOLUTION, bounds=POSITIVE, ref=Ref("rapid", "Fig. 1"))),
    Measure("kernel_rotation", rotation, (SINCE_INITIAL,), card=Card(
        "kernel rotation",
        "How far the tangent kernel has rotated since initialisation, independent of its norm: 0 if it is frozen.",
        rich="up", panel=EVOLUTION, bounds=UNIT, ref=Ref("rapid", "Fig. 1"))),
    Measure("kernel_distance", distance, (SINCE_INITIAL,), card=Card(
        "kernel distance |K-K0|/|K0|", "How far the tangent kernel is from its initial value: 0 if it is frozen.",
        rich="up", panel=EVOLUTION, bounds=POSITIVE, ref=Ref("rapid", "Fig. 1"))),
    Measure("kernel_velocity", velocity, (SINCE_PREVIOUS, STEP, Previous(STEP)), remark=later, card=Card(
        "kernel velocity per step", "The relative change of the tangent kernel per step since the last snapshot.",
        panel=EVOLUTION, bounds=POSITIVE, ref=Ref("rapid", "Sec. 2"))),
    Measure("effective_gamma", effective_gamma, (SAME_OUTPUT, Initial(SAME_OUTPUT)), remark=reachable, card=Card(
        "effective gamma",
        "How strongly features were learned: the rate at which optimal feature evolution would reach this alignment.",
        rich="up", panel=EVOLUTION, ref=Ref("rapid", "Eq. 20"))),
)
