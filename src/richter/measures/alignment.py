"""Alignment of a layer's tangent kernel with the labels.  [rapid, Sec. 2 and 6; signal, Sec. 1 and 4]"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Card, Mark, Ref, Remark
from richter.instrument.statistics import CENTRED_KERNEL, CROSS_OUTPUT, SAME_OUTPUT, CrossOutput
from richter.instrument.statistics.kernels import CentredKernel
from richter.instrument.statistics.per_output import SameOutput
from richter.linalg import quotient
from richter.measures.cards import COUNT, POSITIVE, TANGENT, UNIT
from richter.measures.measure import Measure


def tangent_alignment(c: SameOutput) -> float:
    """Mean over outputs c of y_c^T K^cc y_c / (|K^cc|_F |y_c|^2), uncentred, over outputs with non-zero labels.
    [rapid, Sec. 2]"""
    # numpy, because its overhead is smaller for few numbers
    quadratic, norm, energy = (t.cpu().numpy() for t in (c.quadratic, c.norm, c.energy))
    defined = (energy > 0) & (norm > 0)
    aligned = np.where(defined, quadratic, 0.0) / np.where(defined, norm * energy, 1.0)
    return np.minimum(1.0, c.mean(aligned, defined))  # type: ignore[no-any-return]


def tangent_cka(c: CentredKernel) -> float:
    """Return y~^T K y~ / (|C K C|_F |y~|^2) on the (n k) x (n k) kernel.  [signal, Sec. 1]"""
    return quotient(c.quadratic, c.norm * c.energy)  # type: ignore[no-any-return]


def tangent_stable_rank(c: CentredKernel) -> float:
    """|C K C|_F^2 / |C K C|_2^2.  [signal, Sec. 4]"""
    top = c.top
    return c.norm ** 2 / top ** 2 if top else math.nan


def tangent_correlation(c: CentredKernel) -> float:
    """Return sum_i (lambda_i / lambda_1) <u_i, y~/|y~|>^2; tangent_cka = tangent_correlation / sqrt(tangent_stable_rank).
    [signal, Sec. 4]"""
    quadratic, energy = c.quadratic, c.energy
    size = c.top * energy
    return quadratic / size if size else math.nan


def specialisation_matrix(c: CrossOutput) -> Float[Tensor, "v v"]:
    """Return KSM[c, a] = A(K^cc, y_a) / mean over c' of A(K^c'c', y_a): rows are kernels, columns labels.  [rapid, Eq. 16]"""
    A = c.quadratic / (c.norm[:, None] * c.energy)
    return A / A.mean(0)


def specialisation(c: CrossOutput) -> float:
    """Mean of the diagonal of the KSM over the mean of its off-diagonal entries; 1 if all outputs share one kernel."""
    KSM, k = specialisation_matrix(c), len(c.norm)
    diagonal = KSM.diagonal().sum()
    return (diagonal / k / ((KSM.sum() - diagonal) / (k * (k - 1)))).item() if k > 1 else math.nan


ONE_OUTPUT = "there is only one output, and this measure compares the kernels of several outputs"
SAME_KERNEL = "all outputs share one kernel here, as in any read-out: 1 whatever was learned"
EQUAL = 1e-5  # relative to the kernels' size; smaller differences are rounding errors


def comparable(c: CrossOutput) -> Remark:
    """Check that several outputs have kernels and labels, and whether the kernels differ."""
    if len(c.norm) == 1:
        return Remark(Mark.UNDEFINED, ONE_OUTPUT)
    for what, sizes in (("labels", c.energy), ("a kernel", c.norm)):
        if not bool((sizes > 0).all()):
            zero = ", ".join(map(str, (sizes == 0).nonzero().flatten().tolist()[:8]))
            return Remark(Mark.UNDEFINED, f"outputs with {what} of zeros ({zero}) have no alignment: take examples of every "
                                          f"class, or other outputs with output=")
    A = c.quadratic / c.norm[:, None]
    same = all(bool((M - M.mean(0)).abs().max() <= EQUAL * M.abs().max()) for M in (c.norm, A))
    return Remark(Mark.TRIVIAL, SAME_KERNEL) if same else Remark()


def matrix(c: CrossOutput) -> dict[str, Tensor]:
    """Return the KSM as an array to be stored."""
    KSM = specialisation_matrix(c)
    return {"ksm": KSM} if len(KSM) > 1 and bool(torch.isfinite(KSM).all()) else {}


MEASURES = (
    Measure("tangent_cka", tangent_cka, (CENTRED_KERNEL,), batched=True, card=Card(
        "tangent kernel x labels (cka)",
        "How far the tangent kernel points along the labels, all outputs at once and centred: grows several times over when "
        "features are learned, interior layers most.",
        rich="up", panel=TANGENT, bounds=UNIT, ref=Ref("signal", "Eq. 6"))),
    Measure("tangent_alignment", tangent_alignment, (SAME_OUTPUT,), batched=True, card=Card(
        "tangent alignment",
        "How far the large directions of the tangent kernel align with the labels, output by output and not centred.",
        rich="up", panel=TANGENT, bounds=UNIT, ref=Ref("rapid", "Sec. 2"))),
    Measure("tangent_stable_rank", tangent_stable_rank, (CENTRED_KERNEL,), card=Card(
        "tangent stable rank", "How many directions the tangent kernel has: falls as features specialise.",
        rich="down", panel=TANGENT, bounds=COUNT, ref=Ref("signal", "Sec. 4"))),
    Measure("tangent_correlation", tangent_correlation, (CENTRED_KERNEL,), card=Card(
        "tangent correlation", "How much of the labels lies along the largest directions of the tangent kernel.",
        panel=TANGENT, bounds=UNIT, ref=Ref("signal", "Sec. 4"))),
    Measure("specialisation", specialisation, (CROSS_OUTPUT,), remark=comparable, arrays=matrix, card=Card(
        "specialisation",
        "Whether each output's kernel points along its own labels more than along those of others: 1 where outputs share one "
        "kernel.",
        rich="up", panel=TANGENT, bounds=POSITIVE, ref=Ref("rapid", "Eq. 16"))),
)
