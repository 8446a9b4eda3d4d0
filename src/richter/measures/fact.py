"""Features at convergence (FACT): W^T W compared with the matrix that the examples and the loss determine.  [fact]

Where dL/dW + lambda W = 0, a critical point of L + lambda/2 |theta|^2,

    W^T W = FACT = -(1/lambda) W^T dL/dW = -(1/(n lambda)) sum_n (grad_h l_n) h_n^T,
    W W^T = -(1/lambda) W (dL/dW)^T = -(1/(n lambda)) sum_n (W h_n) (grad_z l_n)^T,

with grad_h through this layer alone and sums over positions. Before convergence neither holds, and FACT is not symmetric.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Card, Mark, Ref, Remark, SelectionError
from richter.instrument.cotangents import loss_gradient
from richter.instrument.statistics import AGOP, MATRIX, NFM, WEIGHT_DECAY, WEIGHT_GRADIENT, FeatureMatrix, OfWeight
from richter.linalg import eigh, quotient
from richter.measures.cards import CONVERGENCE, CORRELATIONS, COSINE, POSITIVE, UNIT
from richter.measures.measure import Measure

CONVERGED = 0.1  # |dL/dW + lambda W| / |lambda W| up to which no note is added


@dataclass(frozen=True)
class Side:
    """W from one side: A with A^T A = W W^T, so that <W^T X, W^T Y> = <A X, A Y> without a d_in x d_in matrix."""

    W: Float[Tensor, "o i"]
    A: Float[Tensor, "r o"]
    AW: Float[Tensor, "r i"]


def side(W: Float[Tensor, "o i"]) -> Side:
    """Weight with the factors from which FACT is computed on its smaller side."""
    A = W.T if W.shape[1] <= W.shape[0] else torch.linalg.qr(W.T, mode="r")[1]
    return Side(W, A, A @ W)


def fact_correlation(w: Side, G: Float[Tensor, "o i"], decay: float = 0.0) -> float:
    """Cosine of W^T W and FACT = -W^T G / lambda, G = dL/dW; it does not depend on lambda > 0.  [fact]"""
    AG = w.A @ G
    size = (w.AW.norm() * AG.norm()).item()
    return quotient(-(w.AW * AG).sum().item(), size)


def fact_error(w: Side, G: Float[Tensor, "o i"], decay: float) -> float:
    """Relative distance of W^T W from FACT, |W^T W - FACT| / |W^T W|.  [fact]"""
    return quotient((w.A @ (w.W + G / decay)).norm().item(), w.AW.norm().item()) if decay else math.nan


def fact_backward(w: Side, G: Float[Tensor, "o i"], decay: float = 0.0) -> float:
    """Cosine of W W^T and -W G^T / lambda; ``w`` is the side of W^T.  [fact]"""
    return fact_correlation(w, G.T)


def fact_backward_error(w: Side, G: Float[Tensor, "o i"], decay: float) -> float:
    """Return |W W^T + W G^T / lambda| / |W W^T|; ``w`` is the side of W^T.  [fact]"""
    return fact_error(w, G.T, decay)


def fact_stationarity(W: Float[Tensor, "o i"], G: Float[Tensor, "o i"], decay: float) -> float:
    """Return |dL/dW + lambda W| / |lambda W|, which is 0 at convergence."""
    return quotient((W + G / decay).norm().item(), W.norm().item()) if decay else math.nan


def power_correlation(F: FeatureMatrix, G: FeatureMatrix, exponent: float) -> float:
    """Cosine of W^T W and AGOP^exponent, as in the neural feature ansatz.  [fact; rfm]"""
    if G.halves is not None or G.K is None:
        return math.nan
    nfm, agop = _small(F, G)
    values, vectors = eigh((agop + agop.T) / 2)
    # smaller eigenvalues are rounding errors, whose roots are not small
    least = len(values) * torch.finfo(values.dtype).eps * values[-1].clamp(min=0)
    root = (vectors * torch.where(values > least, values, 0.0).pow(exponent)) @ vectors.T
    return quotient((nfm * root).sum().item(), (nfm.norm() * root.norm()).item())


def _small(F: FeatureMatrix, G: FeatureMatrix) -> tuple[Tensor, Tensor]:
    """Return both matrices; if the map reads more than it writes, in a basis of the rows of W."""
    if F.factor.shape[1] <= F.factor.shape[0]:
        return F.dense(), G.dense()
    assert G.K is not None
    B = torch.linalg.qr(F.factor.W.T, mode="r")[1]
    return B @ B.T, B @ G.K @ B.T


def nfc_sqrt(F: FeatureMatrix, G: FeatureMatrix) -> float:
    """Cosine of W^T W and AGOP^(1/2), the power of the neural feature ansatz that some networks follow better.  [fact; rfm]"""
    return power_correlation(F, G, 0.5)


def nfc_power(exponent: float) -> Measure:
    """Make the measure ``nfc_power_<exponent>``: the cosine of W^T W and AGOP^exponent; the exponent is 1 in ``nfc`` and 1/2 in
    ``nfc_sqrt``. In a balanced deep linear network of L layers it is 1 for 1/L in the first layer, 1/(L - 1) in the second, ...

    >>> richter.measure(model, probe, ["nfc", richter.measures.nfc_power(1 / 3)])
    """
    if isinstance(exponent, bool) or not isinstance(exponent, (int, float)) or not (math.isfinite(exponent) and exponent > 0):
        raise SelectionError(f"exponent={exponent!r}: the power of the AGOP must be above 0, e.g. 1/3 for three layers.")
    power = f"power {exponent:.3g} of the AGOP"
    card = Card(f"with the {power}", f"The feature correlation with the {power}.",
                rich="up", panel=CORRELATIONS, bounds=UNIT, whole=True, ref=Ref("layerwise", "Sec. 3.5"))
    return Measure(f"nfc_power_{exponent:.6g}", functools.partial(power_correlation, exponent=float(exponent)), (NFM, AGOP),
                   remark=sketched, card=card)


NO_DECAY = "weight_decay is 0, but FACT holds with weight decay only: give the value used in training, Probe(weight_decay=)"


def needs_decay(w: object, G: Tensor, decay: float) -> Remark:
    """Remark that FACT needs weight decay, if there is none."""
    return Remark() if decay else Remark(Mark.UNDEFINED, NO_DECAY)


def unconverged(w: Side, G: Float[Tensor, "o i"], decay: float) -> Remark:
    """Note that the correlation is also defined without lambda and before convergence, but then says little."""
    if not decay:
        return Remark(text=f"{NO_DECAY}; the correlation does not depend on it, but without it convergence cannot be "
                           f"checked")
    off = fact_stationarity(w.W, G, decay)
    return Remark() if not off > CONVERGED else Remark(
        text=f"not converged: |dL/dW + decay W| is {off:.2g} of |decay W|; FACT holds at convergence, on the training examples")


def unconverged_backward(w: Side, G: Float[Tensor, "o i"], decay: float) -> Remark:
    """Remark that the weights are not stationary, for the backward form."""
    return unconverged(w, G.T, decay)


def sketched(F: FeatureMatrix, G: FeatureMatrix) -> Remark:
    """Remark that random outputs cannot give this number."""
    return Remark() if G.halves is None else Remark(
        Mark.UNDEFINED, "needs every output, because a root from random outputs is biased. Pick at most 512 with output=...")


INNER = OfWeight("inner_side", lambda W, W0: side(W))
OUTER = OfWeight("outer_side", lambda W, W0: side(W.T))
MEASURES = (
    Measure("fact", fact_correlation, (INNER, WEIGHT_GRADIENT, WEIGHT_DECAY), loss_gradient, remark=unconverged, card=Card(
        "features at convergence (fact)",
        "How far W'W has the direction of FACT, computed from the examples and the loss: 1 at convergence.",
        panel=CONVERGENCE, bounds=COSINE, ref=Ref("fact", "Theorem (FACT)"))),
    Measure("fact_backward", fact_backward, (OUTER, WEIGHT_GRADIENT, WEIGHT_DECAY), loss_gradient,
            remark=unconverged_backward, card=Card(
        "convergence, output side (fact_backward)",
        "How far WW', the output side, has the direction of FACT: 1 at convergence.",
        panel=CONVERGENCE, bounds=COSINE, ref=Ref("fact", "Theorem (FACT), backward"))),
    Measure("fact_error", fact_error, (INNER, WEIGHT_GRADIENT, WEIGHT_DECAY), loss_gradient, remark=needs_decay, card=Card(
        "|W'W - FACT| / |W'W|",
        "The relative distance between W'W and FACT, including the scale: 0 at convergence.",
        panel=CONVERGENCE, bounds=POSITIVE, ref=Ref("fact", "Theorem (FACT)"))),
    Measure("fact_backward_error", fact_backward_error, (OUTER, WEIGHT_GRADIENT, WEIGHT_DECAY), loss_gradient,
            remark=needs_decay, card=Card(
        "output side: |WW' - FACT| / |WW'|",
        "The relative distance between WW', the output side, and FACT, including the scale: 0 at convergence.",
        panel=CONVERGENCE, bounds=POSITIVE, ref=Ref("fact", "Theorem (FACT), backward"))),
    Measure("fact_stationarity", fact_stationarity, (MATRIX, WEIGHT_GRADIENT, WEIGHT_DECAY), loss_gradient,
            remark=needs_decay, card=Card(
        "gradient against decay (0: converged)",
        "How far the gradient is from balancing the weight decay: 0 at convergence, often 10 to 1000 before.",
        panel=CONVERGENCE, bounds=POSITIVE, ref=Ref("fact", "Theorem (FACT)"))),
    Measure("nfc_sqrt", nfc_sqrt, (NFM, AGOP), remark=sketched, card=Card(
        "NFC with the root of the AGOP (nfc_sqrt)",
        "The feature correlation with the square root of the AGOP, the other power of the ansatz that FACT is compared with.",
        rich="up", panel=CORRELATIONS, bounds=UNIT, whole=True, ref=Ref("fact", "the ansatz with s = 1/2"))),
)
