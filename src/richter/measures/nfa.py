"""Neural feature correlations: does W^T W look like the average gradient outer product?  [nfa, Sec. 1]"""

from __future__ import annotations

import math

from torch import Tensor

from richter.core import Interval, Mark, Ref, Remark
from richter.instrument.statistics import (
    AGOP,
    CENTRED_AGOP,
    CENTRED_NFM,
    CENTRED_PAIR,
    DOUBLE_CENTRED_PAIR,
    NFM,
    NFM_AND_AGOP,
    OWN_CHANGE,
    OWN_WEIGHT,
    PTK_CENTRED_PAIR,
    Factor,
    FeatureMatrix,
    Pair,
)
from richter.linalg import quotient
from richter.measures.measure import Measure


def correlation(p: Pair) -> float:
    """<F, G> / (|F| |G|) in the Frobenius inner product, F = W^T W and G = W^T K W.  [nfa, Eq. NFC]"""
    return p.inner / p.size if p.size else math.nan


def pearson(A: FeatureMatrix, B: FeatureMatrix) -> float:
    """The cosine after subtracting from each matrix the mean of its entries.  [nfa, App. L]"""
    d = A.factor.shape[1] ** 2
    a, b = A.total(), B.total()
    spread = [max(M.norm ** 2 - t * t / d, 0.0) for M, t in ((A, a), (B, b))]
    if any(v <= 1e-12 * M.norm ** 2 for v, M in zip(spread, (A, B), strict=True)):
        return math.nan  # a constant matrix, up to rounding
    size = spread[0] * spread[1]
    root = math.sqrt(size) if 1e-290 < size < 1e290 else math.sqrt(spread[0]) * math.sqrt(spread[1])
    return (A.inner(B) - a * b / d) / root


def diagonal_pearson(A: FeatureMatrix, B: FeatureMatrix) -> float:
    """The Pearson correlation of the diagonals: do both matrices weigh the inputs alike?  [nfa, Fig. 16]"""
    a, b = A.diagonal(), B.diagonal()
    if any((d - d.mean()).norm() <= 1e-12 * d.norm() for d in (a, b)):
        return math.nan  # constant, up to rounding
    a, b = a - a.mean(), b - b.mean()
    return quotient((a @ b).item(), (a.norm() * b.norm()).item())


def energy_ratio(p: Pair, q: Pair) -> float:
    """<F_p, G_p> / <F_q, G_q>: how much of the uncentred correlation the change of the weights carries.  [nfa, Fig. 4, 5]"""
    return p.inner / q.inner if q.inner else math.nan


def relative_change(change: Factor, weight: Factor) -> float:
    """|W - W0|_F / |W|_F.  [nfa, Fig. 14]"""
    return change.size / weight.size if weight.size else math.nan


def trivial(p: Pair) -> Remark:
    """With K = c I the two matrices are the same up to a factor, whatever was learned."""
    text = "trivial: the outputs read this layer directly, so its value is 1 by definition"
    return Remark(Mark.TRIVIAL, text) if p.G.isotropic else Remark()


def both(p: Pair) -> dict[str, Tensor]:
    """The matrices themselves."""
    return {"nfm": p.F.dense(), "agop": p.G.dense()}


UNIT = Interval(0.0, 1.0)
MEASURES = (
    Measure("nfc", correlation, (NFM_AND_AGOP,), ref=Ref("nfa", "Eq. (NFC)"), bounds=UNIT, remark=trivial, arrays=both),
    Measure("cnfc", correlation, (CENTRED_PAIR,), ref=Ref("nfa", "Eq. (C-NFC)"), bounds=UNIT, remark=trivial),
    Measure("double_centred_nfc", correlation, (DOUBLE_CENTRED_PAIR,), ref=Ref("nfa", "App. D"), bounds=UNIT),
    Measure("ptk_centred_nfc", correlation, (PTK_CENTRED_PAIR,), ref=Ref("nfa", "App. D"), bounds=UNIT),
    Measure("c_uc_ratio", energy_ratio, (CENTRED_PAIR, NFM_AND_AGOP), ref=Ref("nfa", "Fig. 4"), bounds=Interval(low=0.0)),
    Measure("dc_c_ratio", energy_ratio, (DOUBLE_CENTRED_PAIR, CENTRED_PAIR), ref=Ref("nfa", "Fig. 5"),
            bounds=Interval(low=0.0)),
    Measure("weight_change", relative_change, (OWN_CHANGE, OWN_WEIGHT), ref=Ref("nfa", "Fig. 14"), bounds=Interval(low=0.0)),
    Measure("nfc_pearson", pearson, (NFM, AGOP), ref=Ref("nfa", "App. L"), bounds=Interval(-1.0, 1.0)),
    Measure("cnfc_pearson", pearson, (CENTRED_NFM, CENTRED_AGOP), ref=Ref("nfa", "App. L"), bounds=Interval(-1.0, 1.0)),
    Measure("nfc_diagonal", diagonal_pearson, (NFM, AGOP), ref=Ref("nfa", "Fig. 16"), bounds=Interval(-1.0, 1.0)),
    Measure("cnfc_diagonal", diagonal_pearson, (CENTRED_NFM, CENTRED_AGOP), ref=Ref("nfa", "Fig. 16"),
            bounds=Interval(-1.0, 1.0)),
)
