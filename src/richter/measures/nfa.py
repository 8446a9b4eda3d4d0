"""Neural feature correlations: similarity of W^T W and the average gradient outer product.  [nfa, Sec. 1]"""

from __future__ import annotations

import math

from torch import Tensor

from richter.core import Card, Mark, Ref, Remark
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
from richter.measures.cards import CORRELATIONS, COSINE, LEARNED, POSITIVE, UNIT
from richter.measures.measure import Measure


def correlation(p: Pair) -> float:
    """Return <F, G> / (|F| |G|) in the Frobenius inner product, F = W^T W and G = W^T K W.  [nfa, Eq. NFC]"""
    return quotient(p.inner, p.size)  # type: ignore[no-any-return]


def pearson(A: FeatureMatrix, B: FeatureMatrix) -> float:
    """Cosine of two matrices after subtracting the mean of each one's entries.  [nfa, App. L]"""
    d = A.factor.shape[1] ** 2
    a, b = A.total(), B.total()
    spread = [max(M.norm ** 2 - t * t / d, 0.0) for M, t in ((A, a), (B, b))]
    if any(v <= 1e-12 * M.norm ** 2 for v, M in zip(spread, (A, B), strict=True)):
        return math.nan  # a constant matrix, up to rounding
    size = spread[0] * spread[1]
    root = math.sqrt(size) if 1e-290 < size < 1e290 else math.sqrt(spread[0]) * math.sqrt(spread[1])
    return (A.inner(B) - a * b / d) / root


def diagonal_pearson(A: FeatureMatrix, B: FeatureMatrix) -> float:
    """Pearson correlation of the diagonals, i.e. of the weights that both matrices give to input coordinates.  [nfa, Fig. 16]"""
    a, b = A.diagonal(), B.diagonal()
    if any((d - d.mean()).norm() <= 1e-12 * d.norm() for d in (a, b)):
        return math.nan  # constant, up to rounding
    a, b = a - a.mean(), b - b.mean()
    return quotient((a @ b).item(), (a.norm() * b.norm()).item())


def energy_ratio(p: Pair, q: Pair) -> float:
    """Return <F_p, G_p> / <F_q, G_q>: the share of the uncentred correlation in the change of the weights.  [nfa, Fig. 4, 5]"""
    return quotient(p.inner, q.inner)  # type: ignore[no-any-return]


def relative_change(change: Factor, weight: Factor) -> float:
    """Relative change of the weight, |W - W0|_F / |W|_F.  [nfa, Fig. 14]"""
    return change.size / weight.size if weight.size else math.nan


def trivial(p: Pair) -> Remark:
    """Mark the value trivial: with K = c I the two matrices are proportional, whatever was learned."""
    text = "trivial: the outputs read this layer directly, so its value is 1 by definition"
    return Remark(Mark.TRIVIAL, text) if p.G.isotropic else Remark()


def both(p: Pair) -> dict[str, Tensor]:
    """Return the NFM and the AGOP as arrays to be stored, by name."""
    return {"nfm": p.F.dense(), "agop": p.G.dense()}


MEASURES = (
    Measure("nfc", correlation, (NFM_AND_AGOP,), batched=True, remark=trivial, arrays=both, card=Card(
        "feature correlation (nfc)", "How far the weights amplify the directions that the outputs use; 1: exactly those.",
        rich="up", panel=CORRELATIONS, bounds=UNIT, whole=True, ref=Ref("nfa", "Eq. (NFC)"))),
    Measure("cnfc", correlation, (CENTRED_PAIR,), batched=True, remark=trivial, card=Card(
        "centred feature correlation (cnfc)",
        "How far the change of the weights aligns with the directions that the outputs use.",
        rich="up", panel=CORRELATIONS, bounds=UNIT, whole=True, ref=Ref("nfa", "Eq. (C-NFC)"))),
    Measure("double_centred_nfc", correlation, (DOUBLE_CENTRED_PAIR,), batched=True, card=Card(
        "doubly centred (double_centred_nfc)",
        "How far the change of the weights aligns with the change of the backward signal.",
        panel=CORRELATIONS, bounds=UNIT, whole=True, ref=Ref("nfa", "App. D"))),
    Measure("ptk_centred_nfc", correlation, (PTK_CENTRED_PAIR,), batched=True, card=Card(
        "gradient-centred (ptk_centred_nfc)", "How far the initial weights align with the change of the backward signal.",
        panel=CORRELATIONS, bounds=UNIT, whole=True, ref=Ref("nfa", "App. D"))),
    Measure("c_uc_ratio", energy_ratio, (CENTRED_PAIR, NFM_AND_AGOP), batched=True, card=Card(
        "share learned (c_uc_ratio)",
        "The share of the correlation that the change of the weights carries: near 0 it comes from the initial weights.",
        rich="up", panel=LEARNED, bounds=POSITIVE, ref=Ref("nfa", "Fig. 4"))),
    Measure("dc_c_ratio", energy_ratio, (DOUBLE_CENTRED_PAIR, CENTRED_PAIR), batched=True, card=Card(
        "doubly centred share (dc_c_ratio)",
        "The share of the centred correlation that the change of the backward signal carries: small early, relevant late.",
        panel=LEARNED, bounds=POSITIVE, ref=Ref("nfa", "Fig. 5"))),
    Measure("weight_change", relative_change, (OWN_CHANGE, OWN_WEIGHT), card=Card(
        "weights moved |W-W0|/|W|", "The distance of the weights from their initial values, relative to their current norm.",
        rich="up", panel=LEARNED, bounds=POSITIVE, ref=Ref("nfa", "Fig. 14"))),
    Measure("nfc_pearson", pearson, (NFM, AGOP), card=Card(
        "Pearson of entries (nfc_pearson)",
        "The feature correlation after subtracting the mean of all entries, the convention of some published code.",
        rich="up", panel=CORRELATIONS, bounds=COSINE, ref=Ref("nfa", "App. L"))),
    Measure("cnfc_pearson", pearson, (CENTRED_NFM, CENTRED_AGOP), card=Card(
        "centred, Pearson (cnfc_pearson)", "The centred feature correlation after subtracting the mean of all entries.",
        rich="up", panel=CORRELATIONS, bounds=COSINE, ref=Ref("nfa", "App. L"))),
    Measure("nfc_diagonal", diagonal_pearson, (NFM, AGOP), card=Card(
        "correlation of diagonals (nfc_diagonal)", "Whether the weights and the outputs use the same input coordinates.",
        rich="up", panel=CORRELATIONS, bounds=COSINE, ref=Ref("nfa", "Fig. 16"))),
    Measure("cnfc_diagonal", diagonal_pearson, (CENTRED_NFM, CENTRED_AGOP), card=Card(
        "centred, diagonals (cnfc_diagonal)",
        "Whether the change of the weights and the outputs use the same input coordinates.",
        rich="up", panel=CORRELATIONS, bounds=COSINE, ref=Ref("nfa", "Fig. 16"))),
)
