"""Cost of overfitting: how much worse ridgeless kernel regression is than the best ridge, whatever the target.

[overfitting]
The cost is the test error at ridge 0 over the smallest one of all ridges. E_0 = n / (n - sum_i L_i^2) at ridge 0 bounds it
for every target and every noise, and is reached for pure noise: so E_0 is the cost that a spectrum admits. With effective ranks

    r_k = sum_{i > k} lambda_i / lambda_{k+1},      R_k = (sum_{i > k} lambda_i)^2 / sum_{i > k} lambda_i^2,

fitting noise is benign (E_0 -> 1), tempered (a finite limit above 1) or catastrophic (E_0 -> infinity) as n grows, if k / r_k
goes to 0, to a finite limit l (then E_0 -> 1 + l for power laws) or to infinity.

    cost(eigenvalues, power, n=200, noise=0.5)       # <= bound(eigenvalues, n=200)
    print(classify(eigenvalues))
    print(classify(modes(K, y).eigenvalues))         # of data
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike, like
from richter.theory.arrays import read, whole
from richter.theory.eigenlearning import krr, optimal_ridge, spectrum
from richter.theory.frame import Theory

Vector = NDArray[np.float64]
Kind = Literal["benign", "tempered", "catastrophic"]
TRUSTED = 0.1  # share of the eigenvalues whose effective ranks are read; sums behind the others lack too much of the tail
ENDED = 0.5  # the same where the spectrum falls below rounding errors, so that there is no more tail
FEWEST = 20  # eigenvalues below which no trend is read
FLOOR = 1e-14  # eigenvalues that are rounding errors, relative to the largest
RISING, FALLING = 0.15, -0.05  # d log l / d log k of a catastrophic and of a benign spectrum, l the local exponent less 1
NEAR = 1.5  # local exponent up to which a falling one counts as falling to 1; a larger one may settle above
SMALL = 0.03  # k / r_k below which overfitting counts as benign
WORDS = {"benign": "fitting the noise costs nothing in the end", "tempered": "fitting the noise costs a constant factor",
         "catastrophic": "fitting the noise costs the more, the more examples there are"}


def bound(eigenvalues: ArrayLike, n: float, *, multiplicity: ArrayLike | None = None) -> float:
    """Return E_0, the largest cost of overfitting over all targets and noises, with n examples.  [overfitting, Thm. 1]"""
    lam = spectrum(eigenvalues)
    _interpolates(lam, n, multiplicity)
    return krr(lam, np.zeros(len(lam)), n, 0.0, 1.0, multiplicity=multiplicity).overfitting


def cost(eigenvalues: ArrayLike, power: ArrayLike, n: float, noise: float, *, multiplicity: ArrayLike | None = None) -> float:
    """Return the test error at ridge 0 over the smallest of all ridges, with n examples.  [overfitting, Sec. 3]"""
    _interpolates(spectrum(eigenvalues), n, multiplicity)
    ridgeless = krr(eigenvalues, power, n, 0.0, noise, multiplicity=multiplicity)
    if not ridgeless.test:
        raise SelectionError("the target is zero, and so is the noise: every ridge has the error 0, and there is no cost. Give "
                             "the target's power or the noise.")
    best = optimal_ridge(eigenvalues, power, n, noise, multiplicity=multiplicity)
    if math.isinf(best):
        power_ = read(power=(power, "m"))[0]
        return ridgeless.test / (float(power_.sum()) + noise)
    return max(1.0, ridgeless.test / krr(eigenvalues, power, n, best, noise, multiplicity=multiplicity).test)


def effective_ranks(eigenvalues: ArrayLike) -> tuple[Array, Array]:
    """Return r_k and R_k for k = 0..m-1, of eigenvalues from the largest to the smallest. r_k <= R_k <= r_k^2."""
    lam = _sorted(eigenvalues)
    tail, squares = _tails(lam), _tails(lam**2)
    return tuple(like(torch.from_numpy(v), eigenvalues) for v in (tail / lam, tail**2 / squares))  # type: ignore[return-value]


def bounds(eigenvalues: ArrayLike, n: int) -> tuple[float, float]:
    """Return a lower and an upper bound of E_0 by effective ranks, the best over k.  [overfitting, Thms. 2-5]

    Upper, for k < n: 1 / ((1 - k/n)^2 (1 - n/R_k)) and 1 / ((1 - k/n)(1 - n/r_k)), where R_k > n or r_k > n; infinite if none is.
    Lower: 1 / (1 - (k+1)/n (1 + r_k/(n-k))^-2) and 1 / (1 - (n-k)^2/(n R_k) (1 + (n-k)/r_k)^-2).
    """
    whole(n=n)
    lam = _sorted(eigenvalues)
    _interpolates(lam, n, None)
    r, R = (np.asarray(v)[:n] for v in effective_ranks(lam))
    k = np.arange(n)
    above = [np.where(size > n, (1 - k / n) ** e * (1 - n / np.maximum(size, n)), 0.0).max() for size, e in ((R, 2), (r, 1))]
    below = [((k + 1) / n * (1 + r / (n - k)) ** -2.0).max(), ((n - k) ** 2 / (n * R) * (1 + (n - k) / r) ** -2.0).max()]
    return float(1 / (1 - max(below))), float(1 / max(above)) if max(above) > 0 else math.inf


# ------------------------------------------------------------------------------------------------ classes


@dataclass(frozen=True)
class OverfittingClass:
    """Class of a spectrum, with the evidence at the rank ``k``: the ``ratio`` k / r_k with the tail continued as a power law, and
    ``ratio_cut`` without what lies beyond the given eigenvalues; ``slope``: the trend of the local exponent, d log(alpha_k - 1) /
    d log k. ``limit``: of E_0 if tempered."""

    kind: Kind
    k: int
    ratio: float
    slope: float
    ratio_cut: float
    limit: float
    given: int

    def __str__(self) -> str:
        at = f"k / r_k = {self.ratio:.3g} at k = {self.k}, with a trend of k^{self.slope:+.2f}"
        end = f"; E_0 -> about {self.limit:.3g}" if self.kind == "tempered" else ""
        return (f"{self.kind}: {WORDS[self.kind]} ({at}{end}). Of {self.given} eigenvalues the first {self.k} are read; if those "
                f"beyond the {self.given} were 0, the ratio would be {self.ratio_cut:.3g}.")


def classify(eigenvalues: ArrayLike, *, trusted: int | None = None) -> OverfittingClass:
    """Return whether overfitting is benign, tempered or catastrophic, from the trend of k / r_k.  [overfitting, Thm. 6]

    The trend is that of the local exponent alpha_k of the eigenvalues: k / r_k goes where alpha_k - 1 goes. It is read over the
    last decade of ``trusted`` ranks (default: a tenth of them, because the sums behind later ranks lack the tail of the spectrum,
    and because the smallest eigenvalues of data are those of the sample). What lies beyond the given eigenvalues is continued
    as a power law with the exponent at the end of the trusted ranks.
    """
    every = _sorted(eigenvalues)
    lam = every[every > FLOOR * every[0]]
    last = int(len(lam) * (TRUSTED if len(lam) == len(every) else ENDED)) if trusted is None else trusted
    whole(trusted=last)
    if len(lam) < FEWEST or not 10 <= last < len(lam):
        raise SelectionError(f"{len(lam)} eigenvalues above rounding errors, of which {last} are to be trusted: a class is "
                             f"a limit, and at least {FEWEST} eigenvalues are needed, of which 10 or more can be trusted. Give "
                             f"more examples, or use bound(eigenvalues, n), which holds for each n.")
    before, alpha = _exponent(lam, last / 9, last / 3), _exponent(lam, last / 3, last)
    tiny = 1e-9  # exponents up to 1 belong to sums that diverge: k / r_k goes to 0
    slope = math.log(max(alpha - 1, tiny) / max(before - 1, tiny)) / math.log(3)
    tail = float(_tails(lam)[last])
    beyond = len(lam) * lam[-1] / (alpha - 1) if alpha > 1 else math.inf
    ratio, cut = last * lam[last] / (tail + beyond), last * lam[last] / tail
    kind: Kind = "tempered"
    if alpha > 1 and slope > RISING:
        kind = "catastrophic"
    elif ratio < SMALL or (slope < FALLING and alpha < NEAR):
        kind = "benign"
    return OverfittingClass(kind, last, float(ratio), slope, float(cut), 1 + float(ratio), len(lam))


def _exponent(lam: Vector, first: float, last: float) -> float:
    """Return the local exponent of the eigenvalues between two ranks, by least squares in logarithms."""
    k = np.arange(max(1, round(first)), round(last) + 1)
    return -float(np.polyfit(np.log(k), np.log(lam[k - 1]), 1)[0])


def _sorted(eigenvalues: ArrayLike) -> Vector:
    """Eigenvalues in falling order, without zeros at the end."""
    lam = spectrum(eigenvalues)
    if (np.diff(lam) > 0).any():
        raise SelectionError("eigenvalues are not sorted: ranks count them from the largest to the smallest. Sort them, e.g. "
                             "torch.linalg.eigvalsh(K).flip(0).")
    return lam[: len(lam) - int((lam[::-1] > 0).argmax())]  # without zeros at the end


def _tails(a: Vector) -> Vector:
    """Return sum_{i > k} a_i for k = 0..m-1, the smallest terms first."""
    return a[::-1].cumsum()[::-1].copy()


def _interpolates(lam: Vector, n: float, multiplicity: ArrayLike | None) -> None:
    """Raise an error unless the kernel interpolates n examples."""
    rank = (lam > 0).sum() if multiplicity is None else float(read(multiplicity=(multiplicity, "m"))[0].sum())
    if not 0 < n < rank:
        raise SelectionError(f"n={n} examples and {rank:g} eigenvalues above 0: a kernel of this rank interpolates fewer than "
                             f"{rank:g} examples only, and the cost of overfitting is that of interpolation. Take fewer "
                             f"examples, or more eigenvalues.")


# ------------------------------------------------------------------------------------------------ simulate


def predicted_bound(eigenvalues: ArrayLike, n: int, *, squared: float = 2.0) -> float:
    """Return E_0 like ``bound``. ``squared``: the 2 of sum_i L_i^2; tests perturb it."""
    lam = spectrum(eigenvalues)
    L = np.asarray(krr(lam, np.zeros(len(lam)), n, 0.0).learnability)
    return n / (n - float((L**squared).sum()))


def simulate_bound(eigenvalues: ArrayLike, n: int, *, draws: int = 200, seed: int = 0) -> float:
    """Return the mean test error of ridgeless regression on pure noise of variance 1, over random Gaussian designs: the cost that
    no target exceeds."""
    lam = read(eigenvalues=(eigenvalues, "m"))[0].cpu().numpy()
    draw, errors = np.random.default_rng(seed), []
    for _ in range(draws):
        psi = draw.standard_normal((n, len(lam))) * np.sqrt(lam)
        weights = psi.T @ np.linalg.solve(psi @ psi.T, draw.standard_normal(n))
        errors.append(1 + float(lam @ weights**2))
    return float(np.mean(errors))


THEORIES = (
    Theory("overfitting.bound", ref=Ref("overfitting", "Thm. 1"),
           title="the largest cost of interpolating noise that a spectrum admits",
           predict=predicted_bound, simulate=simulate_bound,
           cases=lambda: [(np.arange(1, 401.0) ** -1.3, 50), (np.arange(1, 401.0) ** -2, 50),
                       (np.r_[np.ones(5), np.full(395, 1e-3)], 60)],
           tolerance=0.08, perturb={"squared": 1.5}, seeds=(0, 1)),
)
