"""Skills with power-law frequencies, P(k) = A k^-(alpha + 1) for k = 1..n_s, and sums over millions of them.

A sum over skills of a smooth function of k is evaluated at few points: each of the first thousand skills, then fourteen points
for each block of skills whose ends differ by 3 %. The weights sum a polynomial of degree thirteen exactly over the integers of
the block. A million skills need 4,300 points and 10^8 need 6,500; the cost of a block does not depend on its length. A loss has a
relative error of 1e-12 until it is 1e-20 of its initial value (a test compares it with the plain sum).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from richter.core import SelectionError
from richter.theory.arrays import whole

Vector = NDArray[np.float64]
NODES = 14  # points per block
WIDTH = 0.03  # width of a block, relative to its start
FIRST = 1000  # skills that are summed one by one; later blocks are longer than twice their points
CHUNK = 2**21  # numbers held in memory at a time
TAIL = 12  # standard deviations of a count that are summed, on either side

Values = Float[Tensor, "..."]
Fraction = Callable[[Values], Values]  # (S - R) / S, the share not yet learned, as a function of share times time


@dataclass(frozen=True)
class PowerLaw:
    """Frequencies of skills 1..``skills``, the most frequent first.  [layerwise, Eq. 4.1]"""

    alpha: float
    skills: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise SelectionError(f"alpha={self.alpha!r}: frequencies fall like k^-(alpha + 1), and only for alpha above 0 does "
                                 f"the loss follow powers of time, data and parameters.")
        whole(skills=self.skills)

    @cached_property
    def A(self) -> float:
        """Constant of P(k) = A k^-(alpha + 1), so that the frequencies sum to 1."""
        k, weight = grouped(self.skills)
        return 1 / float(weight @ k ** -(1 + self.alpha))

    def frequency(self, k: ArrayLike) -> Vector:
        """Frequency of the k-th skill, A k^-(1 + alpha)."""
        # rounding may give a single skill more than 1
        return np.minimum(1.0, self.A * np.asarray(k, dtype=np.float64) ** -(1 + self.alpha))

    def beyond(self, N: int) -> float:
        """Sum of P(k) over k > N."""
        k, weight = grouped(self.skills, N + 1)
        return self.A * float(weight @ k ** -(1 + self.alpha))

    def points(self, N: int) -> tuple[Vector, Vector]:
        """Return (P, P times weight) at the points that represent skills 1..N."""
        k, weight = grouped(min(N, self.skills))
        P = self.frequency(k)
        return P, P * weight


@lru_cache(maxsize=128)
def grouped(N: int, first: int = 1) -> tuple[Vector, Vector]:
    """Points k and weights w with sum_k F(k) over first..N = sum w F(k)."""
    one_by_one = np.arange(first, min(N, FIRST) + 1, dtype=np.float64)
    k, w = [one_by_one], [np.ones(len(one_by_one))]
    start = FIRST + 1
    while start <= N:
        stop = math.floor(start * (1 + WIDTH))
        if stop >= first:
            points, weights = _block(max(start, first), min(stop, N))
            k.append(points)
            w.append(weights)
        start = stop + 1
    return np.concatenate(k), np.concatenate(w)


@lru_cache(maxsize=4096)
def _block(first: int, last: int) -> tuple[Vector, Vector]:
    """Chebyshev points of the block, and as weights the sums over its integers of the Lagrange polynomials of these points. A
    block with few integers consists of these."""
    count = last - first + 1
    if count <= NODES:
        return np.arange(first, last + 1, dtype=np.float64), np.ones(count)
    nodes, values, sums = _chebyshev()
    h = 2 / count
    return (first + last) / 2 + count / 2 * nodes, values @ (sums @ h ** np.arange(-1.0, NODES - 1, 2))


@cache
def _chebyshev() -> tuple[Vector, NDArray[np.float64], NDArray[np.float64]]:
    """Chebyshev points of [-1, 1]; the coefficients of the Lagrange polynomials in T_m; and the coefficients of h^-1, h, h^3, ...
    of sum_k T_m(x_k) over the points x_k = -1 + h (k + 1/2), k = 0, 1, ..., 2/h - 1.

    These sums are integrals over [-1, 1] with Euler-Maclaurin corrections, which are finitely many for a polynomial:
    sum_k T(x_k) h = int T + sum_{r >= 1} B_2r(1/2) h^2r / (2r)! [T^(2r-1)(1) - T^(2r-1)(-1)],
    T_m^(r)(1) = prod_{j < r} (m^2 - j^2) / (2j + 1),  B_2r(1/2) = -(1 - 2^(1 - 2r)) B_2r.
    """
    from scipy.special import bernoulli
    angle, m, B = np.pi * (np.arange(NODES) + 0.5) / NODES, np.arange(NODES), bernoulli(NODES)
    values = 2 / NODES * np.cos(np.outer(angle, m))
    values[:, 0] /= 2
    sums = np.zeros((NODES, NODES // 2))
    for even in range(0, NODES, 2):
        sums[even, 0] = 2 / (1 - even**2)
        for r in range(1, even // 2 + 1):
            slope = math.prod((even**2 - j**2) / (2 * j + 1) for j in range(2 * r - 1))
            sums[even, r] = -(1 - 2.0 ** (1 - 2 * r)) * B[2 * r] / math.factorial(2 * r) * 2 * slope
    return np.cos(angle), values, sums


# ------------------------------------------------------------------------------------------------ sums over skills


def remaining(law: PowerLaw, left: Fraction, T: Float[Tensor, " t"], D: float, N: int) -> Float[Tensor, " t"]:
    """Return sum_k P(k) E[(S - R_k)^2] / S^2 at times T over skills 1..N and over data sets of D examples. Skills without
    examples, and those beyond N, count as 1."""
    P, weighted = law.points(N)
    if math.isinf(D):
        total = _at_times(left, torch.from_numpy(P), torch.from_numpy(weighted), T)
    elif bool(torch.isinf(T).all()):
        unseen = (1 - P) ** D
        total = torch.full_like(T, float(weighted @ unseen))
    else:
        total = _over_counts(left, P, weighted, T, D)
    return total + law.beyond(N)


def _at_times(left: Fraction, share: Tensor, weight: Tensor, T: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
    """Return sum_i weight_i left(share_i T)^2, with a bounded number of terms in memory."""
    share, weight = share.to(T.device), weight.to(T.device)
    parts = [weight @ left(_product(share[:, None], t)).square() for t in T.split(max(1, CHUNK // max(1, len(share))))]
    return torch.cat(parts)


def _over_counts(left: Fraction, P: Vector, weighted: Vector, T: Float[Tensor, " t"], D: float) -> Float[Tensor, " t"]:
    """Sum over the counts d of a skill, which are binomial in D and P, within twelve standard deviations of the mean."""
    from scipy.stats import binom
    if int(D) != D:
        raise SelectionError(f"D={D!r}: at a finite time a set of D examples is averaged over, and D is a whole number.")
    D = int(D)
    deviation = np.sqrt(D * P * (1 - P))
    low = np.maximum(0, np.floor(D * P - TAIL * deviation - TAIL)).astype(np.int64)
    high = np.minimum(D, np.ceil(D * P + TAIL * deviation + 4 * TAIL)).astype(np.int64)
    total, begin = torch.zeros_like(T), 0
    while begin < len(P):
        spans = np.maximum.accumulate((high - low)[begin:] + 1)
        rows = max(1, int(np.sum(spans * np.arange(1, len(spans) + 1) <= CHUNK // 8)))
        part = slice(begin, begin + rows)
        d = low[part, None] + np.arange(spans[rows - 1])
        chance = np.where(d <= D, binom.pmf(np.minimum(d, D), D, P[part, None]), 0.0) * weighted[part, None]
        seen = d > 0
        total += float(chance[~seen].sum())
        total += _at_times(left, torch.from_numpy(d[seen] / D), torch.from_numpy(chance[seen]), T)
        begin += rows
    return total


def _product(share: Tensor, T: Tensor) -> Tensor:
    """Return share T; 0 where the share is 0, also for infinite T."""
    return torch.where(share == 0, 0.0, share * T)
