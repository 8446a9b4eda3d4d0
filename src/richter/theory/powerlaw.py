"""Skills whose frequencies fall like a power, P(k) = A k^-(alpha + 1) for k = 1..n_s, and sums over very many of them.

A sum over skills of a smooth function of k is taken at few points: one for each of the first thousand skills, then fourteen for
each block of skills whose ends differ by 3 %, with weights that sum a polynomial of degree thirteen exactly over the whole
numbers of the block. A million skills are 4,300 points; a loss is right to 1e-12 of itself until it is 1e-20 of what it was at
the start (a test compares with the plain sum).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from richter.core import SelectionError
from richter.theory.arrays import whole

Vector = NDArray[np.float64]
NODES = 14  # points of a block
WIDTH = 0.03  # of a block, relative to where it begins
FIRST = 1000  # skills that are taken one by one; then blocks are longer than twice their points
CHUNK = 2**21  # numbers that are held at a time
TAIL = 12  # standard deviations of a count that are summed, at either side

Values = Float[Tensor, "..."]
Fraction = Callable[[Values], Values]  # what is not yet learned, (S - R) / S, by share times time


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
        """The constant of P(k) = A k^-(alpha + 1), so that they sum to 1."""
        from scipy.special import zeta
        return float(1 / (zeta(1 + self.alpha, 1) - zeta(1 + self.alpha, self.skills + 1)))

    def frequency(self, k: ArrayLike) -> Vector:
        return np.minimum(1.0, self.A * np.asarray(k, dtype=np.float64) ** -(1 + self.alpha))  # a single skill may round above 1

    def beyond(self, N: int) -> float:
        """The sum of P(k) over k > N."""
        from scipy.special import zeta
        s = 1 + self.alpha
        return float(self.A * (zeta(s, N + 1) - zeta(s, self.skills + 1))) if self.skills > N else 0.0

    def points(self, N: int) -> tuple[Vector, Vector]:
        """(P, P times weight) at the points that stand for skills 1..N."""
        k, weight = grouped(min(N, self.skills))
        P = self.frequency(k)
        return P, P * weight


@lru_cache(maxsize=128)
def grouped(N: int) -> tuple[Vector, Vector]:
    """Points k and weights w with sum_k F(k) over 1..N = sum w F(k)."""
    k, w = [np.arange(1, min(N, FIRST) + 1, dtype=np.float64)], [np.ones(min(N, FIRST))]
    start = FIRST + 1
    while start <= N:
        stop = min(N, math.floor(start * (1 + WIDTH)))
        points, weights = _block(start, stop)
        k.append(points)
        w.append(weights)
        start = stop + 1
    return np.concatenate(k), np.concatenate(w)


@lru_cache(maxsize=4096)
def _block(first: int, last: int) -> tuple[Vector, Vector]:
    """Chebyshev's points of the block, and the sums over its whole numbers of the polynomials that are 1 at one and 0 at the
    others; a block of few numbers is those."""
    count = last - first + 1
    if count <= NODES:
        return np.arange(first, last + 1, dtype=np.float64), np.ones(count)
    angle = np.pi * (np.arange(NODES) + 0.5) / NODES
    centre, half = (first + last) / 2, count / 2
    inside = np.arccos((np.arange(first, last + 1) - centre) / half)
    sums = np.array([np.cos(m * inside).sum() for m in range(NODES)])
    sums[0] /= 2
    return centre + half * np.cos(angle), 2 / NODES * np.cos(np.outer(angle, np.arange(NODES))) @ sums


# ------------------------------------------------------------------------------------------------ sums over skills


def remaining(law: PowerLaw, left: Fraction, T: Float[Tensor, " t"], D: float, N: int) -> Float[Tensor, " t"]:
    """sum_k P(k) E[(S - R_k)^2] / S^2 at times T: of skills 1..N, over data sets of D examples; 1 for each skill that was never
    seen, and for those beyond N."""
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
    """sum_i weight_i left(share_i T)^2, a bounded number of them at a time."""
    share, weight = share.to(T.device), weight.to(T.device)
    parts = [weight @ left(_product(share[:, None], t)).square() for t in T.split(max(1, CHUNK // max(1, len(share))))]
    return torch.cat(parts)


def _over_counts(left: Fraction, P: Vector, weighted: Vector, T: Float[Tensor, " t"], D: float) -> Float[Tensor, " t"]:
    """The same over counts d of a skill, binomial in D and P: those within twelve deviations of the mean."""
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
    """share T, 0 where the share is 0, also at the end of time."""
    return torch.where(share == 0, 0.0, share * T)
