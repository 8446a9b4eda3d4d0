"""Random matrix theory of the centred NFC at the start, for one hidden quadratic layer: f(x) = a . (W x)^2.  [nfa, App. E, F]

W [k,d] is N(0, 1/k), a is N(0, 1), phi(Z) = Tr(Z) / d. The data enter by M = X^T diag(y) X, A = M^2 and B = X^T X, the
network by R = W^T diag(a^2) W. Under squared loss and zero outputs the correlation of the two second derivatives is

    phi(A R A R B R) / sqrt(phi(A R A R) phi(A R B R A R B R)),

and R is asymptotically free of {A, B}, so each of the three words is a polynomial in the moments m_p = phi(R^p). The factor
2 of d(h^2) = 2 h is left out, as in the paper: it multiplies the words by 64, 16 and 256, and cancels. The centred _Z is
Z - phi(Z).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import ndtri
from torch import Tensor

from richter.core import Prediction, Ref, SelectionError
from richter.core.arrays import Array, ArrayLike
from richter.theory.arrays import column, like, normal, read, whole
from richter.theory.frame import Theory

GAUSSIAN = (1.0, 3.0, 15.0, 105.0)  # E a^2, E a^4, E a^6, E a^8 of read-outs a ~ N(0, 1)


@dataclass(frozen=True)
class CentredNFC(Prediction):
    """A predicted centred NFC: value = numerator / sqrt(denominator1 denominator2)."""

    numerator: float
    denominator1: float
    denominator2: float


# ------------------------------------------------------------------------------------------------ predict


def centred_nfc(X: ArrayLike, y: ArrayLike, moments: ArrayLike | Sequence[float]) -> CentredNFC:
    """Predict the centred NFC as t -> 0 of a network whose R has the ``moments`` m_1..m_4: ``moments(width, d)`` in the limit of
    large n, d and width, or ``sampled_moments(width, d)``.  [nfa, Eq. (8) with exponents +1/2, (18), (20), (26) corrected]"""
    X_, y_ = read(X=(X, "n d"), y=(column(y), "n"))
    M, B = X_.T @ (y_[:, None] * X_), X_.T @ X_
    size = M.abs().max().item(), B.abs().max().item()
    if min(size) == 0:
        nan = float("nan")
        return CentredNFC(nan, Ref("nfa", "App. E"), 0.0, 0.0, 0.0)
    M, B = M / size[0], B / size[1]  # eighth powers of the data would overflow
    A = M @ M
    words = numerator(A, B, moments), denominator1(A, moments), denominator2(A, B, moments)
    a, b = size[0] ** 2, size[1]
    return CentredNFC(words[0] / math.sqrt(words[1] * words[2]), Ref("nfa", "App. E"),
                      words[0] * a**2 * b, words[1] * a**2, words[2] * a**2 * b**2)


def predict(X: ArrayLike, y: ArrayLike, width: int, *, readout: Sequence[float] = GAUSSIAN) -> CentredNFC:
    """Predict the centred NFC of the networks that ``simulate`` draws, with the moments of R as n, d and width grow in
    proportion. ``readout``: E a^2 to E a^8 of the read-outs."""
    (X_,) = read(X=(X, "n d"))
    return centred_nfc(X, y, moments(width, X_.shape[1], readout=readout))


def numerator(A: Array, B: Array, moments: ArrayLike | Sequence[float]) -> float:
    """Return phi(A R A R B R) = phi(A)^2 phi(B) m3 + 2 phi(A) m1 m2 phi(_A _B) + phi(B) m1 m2 phi(_A^2) + m1^3 phi(_A^2 _B)
    for R free of {A, B}; _A = A - phi(A).  [nfa, Eq. (18)]"""
    t, (m1, m2, m3, _) = _traces(A, B), _four(moments)
    return t.A**2 * t.B * m3 + 2 * t.A * m1 * m2 * t.AB + t.B * m1 * m2 * t.AA + m1**3 * t.AAB


def denominator1(A: Array, moments: ArrayLike | Sequence[float]) -> float:
    """Return phi(A R A R) = phi(A^2) m1^2 + phi(A)^2 m2 - phi(A)^2 m1^2 for R free of A.  [nfa, Eq. (20)]"""
    t, (m1, m2, _, _) = _traces(A, A), _four(moments)
    return (t.AA + t.A**2) * m1**2 + t.A**2 * m2 - t.A**2 * m1**2


def denominator2(A: Array, B: Array, moments: ArrayLike | Sequence[float]) -> float:
    """Return phi(A R B R A R B R) for R free of {A, B}.  [nfa, Eq. (26), corrected]

    m1^4 phi((_A _B)^2) + 2 m1^2 (m2 - m1^2) phi(_A _B)^2 + 2 m1^2 m2 [phi(B) phi(_A^2 _B) + phi(A) phi(_A _B^2)]
    + 4 phi(A) phi(B) m1 m3 phi(_A _B) + phi(A)^2 phi(B)^2 m4 + phi(A)^2 phi(_B^2) m2^2 + phi(B)^2 phi(_A^2) m2^2.
    The paper prints the last term as tr[_A]^2 tr[B^2] tr[R^2]^2, which is zero. It follows correctly from Eq. (25).
    """
    t, (m1, m2, m3, m4) = _traces(A, B), _four(moments)
    return (m1**4 * t.ABAB + 2 * m1**2 * (m2 - m1**2) * t.AB**2
            + 2 * m1**2 * m2 * (t.B * t.AAB + t.A * t.ABB)
            + 4 * t.A * t.B * m1 * m3 * t.AB + t.A**2 * t.B**2 * m4
            + t.A**2 * t.BB * m2**2 + t.B**2 * t.AA * m2**2)


def alternating_word(C: Sequence[ArrayLike], R: Sequence[ArrayLike]) -> float:
    """Return phi(C1 R1 C2 R2 ...) of up to four centred C (phi(C) = 0) and as many R that are free of them.  [nfa, Eqs.
    (10)-(13)]

    Four: r1 r2 r3 r4 phi(C1 C2 C3 C4) + r1 r3 phi(_R2 _R4) phi(C1 C2) phi(C3 C4) + r2 r4 phi(_R1 _R3) phi(C2 C3) phi(C1 C4),
    r = phi(R). Up to three: the product of all r times phi(C1 C2 ...). The R may have another size than the C.
    """
    if not 1 <= len(C) <= 4 or len(R) != len(C):
        raise SelectionError(f"alternating_word of {len(C)} C and {len(R)} R: one to four are needed, as many of each.")
    c = read(**{f"C{i + 1}": (Z, "d d") for i, Z in enumerate(C)})
    for i, Z in enumerate(c):
        if abs(_phi(Z)) > 1e-8 * Z.norm().item() / math.sqrt(len(Z)):
            raise SelectionError(f"C{i + 1} has phi = {_phi(Z):.3g}; the identities are for centred ones: subtract phi(C) I.")
    big = read(**{f"R{i + 1}": (Z, "p p") for i, Z in enumerate(R)})
    r = [_phi(Z) for Z in big]
    if len(c) == 1:
        return 0.0
    if len(c) < 4:
        return math.prod(r) * _phi(torch.linalg.multi_dot(c))

    def pair(i: int, j: int) -> float:
        return _phi(c[i] @ c[j])

    def joint(i: int, j: int) -> float:
        """phi(_R_i _R_j)"""
        return _phi(big[i] @ big[j]) - r[i] * r[j]

    return (math.prod(r) * _phi(torch.linalg.multi_dot(c)) + r[0] * r[2] * joint(1, 3) * pair(0, 1) * pair(2, 3)
            + r[1] * r[3] * joint(0, 2) * pair(1, 2) * pair(0, 3))


def moments(width: int, d: int, order: int = 4, *, readout: Sequence[float] | None = None) -> np.ndarray:
    """Return m_1..m_order of R as width and d grow in proportion: 1, 4, 25, 202 for width = d.

    R is a free compound Poisson element with free cumulants kappa_p = (d/width)^(p-1) E a^(2p), E a^(2p) = (2p-1)!!, and
    m_p = sum_s kappa_s [z^(p-s)] (1 + sum_q m_q z^q)^s.  [Marchenko and Pastur 1967; Nica and Speicher 2006, Lectures 11, 12]
    ``readout``: E a^2, E a^4, ... of read-outs that are not N(0, 1).
    """
    whole(width=width, d=d, order=order)
    if readout is not None and len(readout) < order:
        raise SelectionError(f"readout has {len(readout)} entries; E a^2 to E a^{2 * order} are needed for m_1 to m_{order}.")
    series = np.zeros(order + 1)
    series[0] = 1.0
    for p in range(1, order + 1):
        power = np.ones(1)
        for s in range(1, p + 1):
            power = np.convolve(power, series)[:order + 1]
            kappa = (d / width) ** (s - 1) * (math.prod(range(1, 2 * s, 2)) if readout is None else readout[s - 1])
            series[p] += kappa * power[p - s]  # power holds m_q for q < p only, because s >= 1
    return series[1:]


def sampled_moments(width: int, d: int, networks: int = 30, seed: int = 0) -> np.ndarray:
    """Return m_1..m_4 of R, averaged over random networks.

    The read-outs a are stratified: one from each of (networks width) intervals of equal probability, in random order. With
    independent draws, the tails of a^4..a^8 alone would cause an error of 2 % in m_2 and 10 % in m_4 at width 512 and 30
    networks. """
    whole(width=width, d=d, networks=networks)
    whole(0, seed=seed)
    draw = np.random.default_rng((seed, 12))
    size = networks * width
    chance = (draw.permutation(size) + draw.uniform(size=size)) / size
    readouts = ndtri(chance.clip(1e-300, 1 - 1e-16)).reshape(networks, width, 1)
    total = np.zeros(4)
    for a in readouts:
        V = draw.standard_normal((width, d)) * (a / math.sqrt(width))  # R = V^T V
        R = V.T @ V if d <= width else V @ V.T  # the same traces
        R2 = R @ R
        total += np.array([np.trace(R), np.trace(R2), (R * R2).sum(), (R2 * R2).sum()]) / d
    return total / networks


def expected_second_derivatives(X: ArrayLike, y: ArrayLike, width: int, *, fourth: float = 3.0) -> tuple[Array, Array]:
    """Return E[W'^T W'] = M^2 and E[W'^T K W'] = (3/k) Tr(B) M^2 + (1 + 5/k) M B M over random networks, exact at every width k
    and data size. These are half of d^2/dt^2, without the 2 of d(h^2) (with it: times 4 and 16).  [nfa, Prop. 8, corrected]

    The paper prints 3 Tr(B) M^2 + 6 M B M, which holds for k = 1 only. In E[R B R] = sum_{s,t} E[a_s^2 a_t^2 w_s (w_s . B w_t)
    w_t^T] the k terms s = t give (3/k)(Tr(B) + 2 B), and the k(k-1) terms s != t, missing in the paper, give (1 - 1/k) B. The 3
    is ``fourth``, E a^4 of the read-outs.
    """
    X_, y_ = read(X=(X, "n d"), y=(column(y), "n"))
    whole(width=width)
    M, B = X_.T @ (y_[:, None] * X_), X_.T @ X_
    agop_dd = fourth / width * B.trace() * M @ M + (1 + (2 * fourth - 1) / width) * M @ B @ M
    return like(M @ M, X), like(agop_dd, X)


@dataclass(frozen=True)
class _Traces:
    """phi of A, B and of products of the centred matrices: AAB is phi(_A _A _B)."""

    A: float
    B: float
    AA: float
    AB: float
    BB: float
    AAB: float
    ABB: float
    ABAB: float


def _traces(A: Array, B: Array) -> _Traces:
    """Normalised traces of products of two matrices, raw and centred."""
    A_, B_ = read(A=(A, "d d"), B=(B, "d d"))
    d = len(A_)
    eye = torch.eye(d, dtype=A_.dtype, device=A_.device)
    P, Q = A_ - _phi(A_) * eye, B_ - _phi(B_) * eye
    PQ = P @ Q

    def product(Z: Float[Tensor, "d d"], V: Float[Tensor, "d d"]) -> float:
        """phi(Z V)"""
        return ((Z * V.T).sum() / d).item()

    return _Traces(_phi(A_), _phi(B_), product(P, P), product(P, Q), product(Q, Q), product(P, PQ), product(PQ, Q),
                   product(PQ, PQ))


def _phi(Z: Float[Tensor, "d d"]) -> float:
    """Normalised trace, Tr Z / d."""
    return (Z.trace() / len(Z)).item()


def _four(moments: ArrayLike | Sequence[float]) -> list[float]:
    """First four moments."""
    (m,) = read(moments=(moments, "order"))
    if len(m) < 4:
        raise SelectionError(f"moments has {len(m)} entries; m_1 to m_4 of R are needed: moments(width, d).")
    return m[:4].tolist()


# ------------------------------------------------------------------------------------------------ simulate


def simulate(X: ArrayLike, y: ArrayLike, width: int, seed: int = 0) -> CentredNFC:
    """Measure one random network f(x) = a . (W x)^2 / 2; the half cancels the 2 of d(h^2). Its initial outputs are subtracted, so
    the residual is -y. W' and df/dh come from autograd, and the three traces from W'^T W' and W'^T K W'."""
    X_, y_ = read(X=(X, "n d"), y=(column(y), "n"))
    whole(width=width)
    whole(0, seed=seed)
    draw = np.random.default_rng((seed, 11))
    W = torch.from_numpy(draw.standard_normal((width, X_.shape[1])) / math.sqrt(width)).to(X_).requires_grad_()
    a = torch.from_numpy(draw.standard_normal(width)).to(X_)
    F, G = _first_moment(X_, y_, W, a)
    top, low1, low2 = ((U * V).sum().item() for U, V in ((F, G), (F, F), (G, G)))
    value = ((F / F.norm()) * (G / G.norm())).sum().item()
    d = X_.shape[1]
    return CentredNFC(value, Ref("nfa", "App. E"), top / d, low1 / d, low2 / d)


def simulate_second_derivatives(X: ArrayLike, y: ArrayLike, width: int) -> tuple[Array, Array]:
    """Means of W'^T W' and W'^T K W' over random networks, without sampling. Every weight takes the three nodes of Gauss-Hermite
    quadrature, which is exact because no weight occurs with a power above 5. For small networks only."""
    X_, y_ = read(X=(X, "n d"), y=(column(y), "n"))
    whole(width=width)
    d, weights = X_.shape[1], width * (X_.shape[1] + 1)
    if weights > 10:
        raise SelectionError(f"width={width} and d={d} make {weights} weights, and 3^{weights} networks to go through. Take "
                             f"width (d + 1) <= 10.")
    node, chance = (-math.sqrt(3), 0.0, math.sqrt(3)), (1 / 6, 2 / 3, 1 / 6)
    F, G = X_.new_zeros(d, d), X_.new_zeros(d, d)
    for picks in itertools.product(range(3), repeat=weights):
        values = X_.new_tensor([node[i] for i in picks])
        W = (values[:width * d].reshape(width, d) / math.sqrt(width)).requires_grad_()
        share = math.prod(chance[i] for i in picks)
        F_one, G_one = _first_moment(X_, y_, W, values[width * d:])
        F, G = F + share * F_one, G + share * G_one
    return like(F, X), like(G, X)


def _first_moment(X: Float[Tensor, "n d"], y: Float[Tensor, " n"], W: Float[Tensor, "k d"], a: Float[Tensor, " k"]
                  ) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d d"]]:
    """Return W'^T W' and W'^T K W' of f = a . (W x)^2 / 2 at the residual -y."""
    with torch.enable_grad():
        h = X @ W.T
        f = h.square() @ a / 2
        (J,) = torch.autograd.grad(f.sum(), h, retain_graph=True)
        # passing y as a cotangent; f - (f(0) + y) as a number would lose y beside a large f
        (W_dot,) = torch.autograd.grad(f, W, grad_outputs=y)
    response = J @ W_dot
    return W_dot.T @ W_dot, response.T @ response


# ------------------------------------------------------------------------------------------------ theories


def _generic() -> list[tuple[Any, ...]]:
    """Data for which every term of the words counts."""
    d = 512
    return [(normal(d, d) * torch.linspace(0.2, 2, d, dtype=torch.float64) / math.sqrt(d), normal(d, seed=2) + 0.5, d)]


THEORIES = (
    Theory("freeprob.centred_nfc", ref=Ref("nfa", "App. E, Eq. (8)"),
           title="the early centred correlation of one quadratic layer, by free probability",
           predict=predict, simulate=simulate, cases=_generic, tolerance=0.03, perturb={"readout": (1.0, 3.0, 15.0, 143.0)},
           seeds=(0, 1, 2)),  # 143 gives a fourth moment of R of 240 instead of 202
    Theory("freeprob.expected_second_derivatives", ref=Ref("nfa", "Prop. 8, corrected"),
           title="the mean early growth of NFM and AGOP over random networks of one quadratic layer, at every width",
           predict=expected_second_derivatives, simulate=simulate_second_derivatives,
           cases=lambda: [(normal(3, 2), normal(3, seed=1), width) for width in (1, 2)], tolerance=1e-10,
           perturb={"fourth": 3.001}),
)
