"""How a layer's tangent kernel stands to the labels.  [rapid, Sec. 2; signal, Sec. 1 and 4]"""

from __future__ import annotations

import math

from richter.core import Interval, Ref
from richter.instrument.statistics import CENTRED_KERNEL, SAME_OUTPUT
from richter.instrument.statistics.grams import CentredKernel, SameOutput
from richter.measures.measure import Measure


def tangent_alignment(c: SameOutput) -> float:
    """Mean over outputs c of y_c^T K^cc y_c / (|K^cc|_F |y_c|^2), uncentred, over outputs whose labels are not all 0.
    [rapid, Sec. 2]"""
    A = c.quadratic / (c.norm * c.energy)
    return A[(c.energy > 0) & (c.norm > 0)].mean().item()


def tangent_cka(c: CentredKernel) -> float:
    """y~^T K y~ / (|C K C|_F |y~|^2) on the (n k) x (n k) kernel.  [signal, Sec. 1]"""
    size = c.norm * c.energy
    return c.quadratic / size if size else math.nan


def tangent_stable_rank(c: CentredKernel) -> float:
    """|C K C|_F^2 / |C K C|_2^2.  [signal, Sec. 4]"""
    top = c.top
    return c.norm ** 2 / top ** 2 if top else math.nan


def tangent_correlation(c: CentredKernel) -> float:
    """sum_i (lambda_i / lambda_1) <u_i, y~/|y~|>^2; tangent_cka = tangent_correlation / sqrt(tangent_stable_rank).
    [signal, Sec. 4]"""
    quadratic, energy = c.quadratic, c.energy
    size = c.top * energy
    return quadratic / size if size else math.nan


UNIT = Interval(0.0, 1.0)
MEASURES = (
    Measure("tangent_alignment", tangent_alignment, (SAME_OUTPUT,), ref=Ref("rapid", "Sec. 2"), bounds=UNIT),
    Measure("tangent_cka", tangent_cka, (CENTRED_KERNEL,), ref=Ref("signal", "Eq. 6"), bounds=UNIT),
    Measure("tangent_stable_rank", tangent_stable_rank, (CENTRED_KERNEL,), ref=Ref("signal", "Sec. 4"),
            bounds=Interval(low=1.0)),
    Measure("tangent_correlation", tangent_correlation, (CENTRED_KERNEL,), ref=Ref("signal", "Sec. 4"), bounds=UNIT),
)
