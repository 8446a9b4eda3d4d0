"""A linear network of one input, one output and p hidden units: the smallest that can be lazy or rich.  [layerwise, Ch. 6]

    f(x) = (x / Z) sum_i a_i b_i,   f*(x) = S x,   loss = E[(f - f*)^2] / 2,   v = E[x^2].
Gradient flow multiplies every a_i + b_i by one number and divides every a_i - b_i by it (Theorem 1):
    a_i = (a_i(0) + b_i(0)) gamma^(1/2) / 2 + (a_i(0) - b_i(0)) gamma^(-1/2) / 2,     b_i with a minus,
where gamma goes from 1 to gamma_plus at the rate 2 R v / Z, R^2 = Sigma_0^2 - S_0^2 + S^2. Units whose a_i b_i have the sign of S
are aligned, and grow; the others shrink. gamma_plus near 1: nothing but the function moves, and the network is lazy.

Eq. 6.12 is printed with the rate 4 R / Z, which belongs to a loss without its 1/2 and to v = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike, to_tensor
from richter.theory.arrays import Times, like, normal, read, times_from_zero, whole
from richter.theory.flows import flow
from richter.theory.frame import Theory

Regime = Literal["lazy", "between", "rich"]
LAZY, RICH = 1.1, 10.0  # a convention: aligned units' part of the function changes by a tenth at most, or tenfold at least

# ------------------------------------------------------------------------------------------------ predict


class Modes(NamedTuple):
    """What aligned and anti-aligned units contribute to the slope of f [t]: their sum is the slope, theta."""

    aligned: Array
    anti_aligned: Array


@dataclass(frozen=True)
class ScalarNetwork:
    """The flow from weights ``a0`` and ``b0`` [p] toward the slope ``target`` = S; ``scale`` = Z divides the output, ``variance``
    is E[x^2]. ``rate`` is the 2 of the time constant, there to be perturbed.

    >>> network = ScalarNetwork(a0, b0, target=1.0, scale=1.0)
    >>> a, b, gamma = network.predict([0.0, 1.0, 10.0])
    >>> network.gamma_plus, network.regime
    """

    a0: ArrayLike = field(repr=False)
    b0: ArrayLike = field(repr=False)
    target: float
    scale: float
    variance: float = 1.0
    rate: float = field(default=2.0, kw_only=True)

    def __post_init__(self) -> None:
        self._start  # noqa: B018  what is no network is refused here

    @classmethod
    def drawn(cls, width: int, target: float = 1.0, scale: float = 1.0, weights: float = 1.0, seed: int = 0) -> ScalarNetwork:
        """Weights N(0, ``weights``^2), one set for each seed and width.

        >>> ScalarNetwork.drawn(100, weights=0.01)                      # small weights: rich
        >>> ScalarNetwork.drawn(100, target=1e-3).balanced()            # a small target from a zero function: lazy
        >>> ScalarNetwork.drawn(10_000, scale=10_000 ** 0.5)            # many units, output / sqrt(p) (NTK): lazy
        """
        whole(width=width)
        whole(0, seed=seed)
        a0, b0 = weights * np.random.default_rng((seed, width)).standard_normal((2, width))
        return cls(a0, b0, target, scale)

    def balanced(self) -> ScalarNetwork:
        """The network with every unit a second time, b_i negated: the same weights, and a zero function at the start."""
        a, b = self._start.a, self._start.b
        return ScalarNetwork(like(torch.cat([a, a]), self.a0), like(torch.cat([b, -b]), self.a0), self.target, self.scale,
                             self.variance, rate=self.rate)

    def predict(self, t: Times) -> tuple[Array, Array, Array]:
        """(a [p, t], b [p, t], gamma [t]) at these times.  [Eqs. 6.10-6.12, corrected]"""
        gamma = self._gamma(t)
        a, b = self._start.at(gamma)
        return like(a, self.a0), like(b, self.a0), like(gamma, self.a0)

    def slope(self, t: Times) -> Array:
        """theta [t] = ((Sigma_0 + S_0) gamma - (Sigma_0 - S_0) / gamma) / 2, so that f(x) = theta x."""
        gamma = self._gamma(t)
        return like(_times(self._start.plus, gamma) / 2 - _times(self._start.minus, 1 / gamma) / 2, self.a0)

    def loss(self, t: Times) -> Array:
        """v (theta - S)^2 / 2 [t]."""
        return like(self.variance * (to_tensor(self.slope(t)) - self.target).square() / 2, self.a0)

    def modes(self, t: Times) -> Modes:
        """The parts of the slope that come from units aligned at the start (a_i b_i S > 0), and from the others."""
        a, b = self._start.at(self._gamma(t))
        chosen = to_tensor(self.aligned).bool().to(a.device)
        parts = [(a * b)[kind].sum(0) / self.scale for kind in (chosen, ~chosen)]
        return Modes(*(like(part, self.a0) for part in parts))

    @cached_property
    def aligned(self) -> Array:
        """Which units have a_i b_i S > 0 at the start [p]."""
        return like(self._start.a * self._start.b * self.target > 0, self.a0)

    @cached_property
    def gamma_plus(self) -> float:
        """gamma at the end of time: (S + R) / (Sigma_0 + S_0). Infinite where every a_i = -b_i and S >= 0, which no growth of
        a_i + b_i = 0 can reach.  [Eq. 6.14]"""
        plus, minus, S, R = self._start.plus, self._start.minus, self.target, self._R
        if S < 0:
            return minus / (R - S)  # the same, without a difference of like numbers
        if plus:
            return (S + R) / plus
        return math.inf if S or minus else 1.0

    @cached_property
    def bound(self) -> float:
        """S / Sigma_0, the target over the weights: gamma_plus is as large at least, for S > 0.  [Sec. 6.3.1]"""
        size = (self._start.plus + self._start.minus) / 2
        return self.target / size if size else math.inf

    @cached_property
    def regime(self) -> Regime:
        """"lazy" where gamma_plus or its inverse is below ``LAZY``, "rich" where it is above ``RICH``."""
        change = max(self.gamma_plus, 1 / self.gamma_plus if self.gamma_plus else math.inf)
        return "lazy" if change <= LAZY else "rich" if change >= RICH else "between"

    def simulate(self, t: Times) -> tuple[Array, Array, Array]:
        """(a [p, t], b [p, t], gamma [t]) by integrating the gradient flow of all weights."""
        return simulate(self.a0, self.b0, self.target, self.scale, t, self.variance)

    # -------------------------------------------------------------------------------------------- inside

    @cached_property
    def _start(self) -> _Start:
        a, b = _read(self.a0, self.b0, self.target, self.scale, self.variance)
        return _Start.make(a, b, self.scale)

    @cached_property
    def _R(self) -> float:
        return math.hypot(math.sqrt(self._start.plus) * math.sqrt(self._start.minus), self.target)

    def _gamma(self, t: Times) -> Float[Tensor, " t"]:
        """Eq. 6.12, corrected; in sums of positive terms, so that it keeps its digits where S is far above the weights. From a
        target below zero it is the inverse of that from -S with b -> -b, which exchanges the sums."""
        times = times_from_zero(t).to(self._start.a.device) * (self.rate * self.variance / self.scale)
        R, S = self._R, abs(self.target)
        grows, shrinks = self._start.plus, self._start.minus
        if self.target < 0:
            grows, shrinks = shrinks, grows
        E = torch.exp(-R * times)
        moved = -torch.expm1(-R * times) / R if R else times  # (1 - E) / R
        gap = grows * shrinks / (R + S) if R else 0.0  # R - S
        gamma = (1 + E + (shrinks + S) * moved) / (2 * E + (gap + grows) * moved)
        return gamma if self.target >= 0 else 1 / gamma


class _Start(NamedTuple):
    """The weights at the start, and Sigma_0 +- S_0 = sum_i (a_i +- b_i)^2 / (2 Z): as sums of squares they keep their digits."""

    a: Float[Tensor, " p"]
    b: Float[Tensor, " p"]
    plus: float
    minus: float

    @classmethod
    def make(cls, a: Float[Tensor, " p"], b: Float[Tensor, " p"], scale: float) -> _Start:
        plus, minus = (z.square().sum().item() / (2 * scale) for z in (a + b, a - b))
        return cls(a, b, plus, minus)

    def at(self, gamma: Float[Tensor, " t"]) -> tuple[Float[Tensor, "p t"], Float[Tensor, "p t"]]:
        grown = _times((self.a + self.b)[:, None], gamma.sqrt())
        shrunk = _times((self.a - self.b)[:, None], gamma.rsqrt())
        return (grown + shrunk) / 2, (grown - shrunk) / 2


def _times(weights: Tensor | float, factor: Tensor) -> Tensor:
    """Their product, 0 where the weights are 0: the factor of a sum that is zero may be infinite."""
    w = torch.as_tensor(weights, dtype=factor.dtype, device=factor.device)
    return torch.where(w == 0, 0.0, w * factor)


def _read(a0: ArrayLike, b0: ArrayLike, target: float, scale: float, variance: float) -> list[Tensor]:
    if not math.isfinite(target):
        raise SelectionError(f"target={target!r}: the slope S of the target, a finite number, is needed.")
    for name, value, why in (("scale", scale, "a network with a negative Z is the one with b0 negated"),
                             ("variance", variance, "it is the mean of x^2")):
        if not (math.isfinite(value) and value > 0):
            raise SelectionError(f"{name}={value!r}: a number above 0 is needed; {why}.")
    return read(a0=(a0, "p"), b0=(b0, "p"))


def predict(a0: ArrayLike, b0: ArrayLike, target: float, scale: float, t: Times, variance: float = 1.0, *,
            rate: float = 2.0) -> tuple[Array, Array, Array]:
    """(a [p, t], b [p, t], gamma [t]) of ``ScalarNetwork``."""
    return ScalarNetwork(a0, b0, target, scale, variance, rate=rate).predict(t)


# ------------------------------------------------------------------------------------------------ simulate


def simulate(a0: ArrayLike, b0: ArrayLike, target: float, scale: float, t: Times, variance: float = 1.0
             ) -> tuple[Array, Array, Array]:
    """(a [p, t], b [p, t], gamma [t]) by integrating a' = -dL/da and b' = -dL/db; gamma is the growth of sum (a + b)^2, or,
    where that is zero, the inverse of that of sum (a - b)^2."""
    a, b = read(a0=(a0, "p"), b0=(b0, "p"))

    def velocity(state: list[Tensor]) -> list[Tensor]:
        a, b = state
        force = (target - (a @ b) / scale) * variance / scale
        return [force * b, force * a]

    states = flow(velocity, [a, b], times_from_zero(t).tolist(), rtol=1e-12, atol=1e-14)
    A, B = (torch.stack([state[i] for state in states], 1) for i in (0, 1))
    grown, shrunk = ((A + s * B).square().sum(0) for s in (1, -1))
    first, other = ((a + s * b).square().sum() for s in (1, -1))
    gamma = grown / first if first > 0 else other / shrunk
    return like(A, a0), like(B, a0), like(gamma, a0)


# ------------------------------------------------------------------------------------------------ theories


def _cases() -> list[tuple[Any, ...]]:
    """Small and large weights, targets above, below and at zero, other variances, units that are equal, opposite, and alone."""
    t = [0.0, 0.1, 0.7, 3.0]
    a, b = normal(6, seed=1), normal(6, seed=2)
    return [(0.3 * a, 0.3 * b, 2.0, 1.0, t), (a, b, -1.5, 2.0, t), (a, b, 0.0, 1.0, t), (0.5 * a, 0.5 * b, 1.0, 3.0, t, 0.5),
            (a, b, 1e-3, 6 ** 0.5, t), (0.01 * a, 0.01 * b, 5.0, 1.0, t), (a, a, 0.5, 1.0, t), (a, -a, -0.5, 1.0, t, 2.0),
            (a, -a, 0.5, 1.0, t), (a, a, 0.0, 1.0, t), (a[:1], b[:1], 1.0, 1.0, t)]


THEORIES = (
    Theory("scalar_network.scalar_network", ref=Ref("layerwise", "Thm. 1"),
           title="weights at all times of a linear network with one input and one output, from lazy to rich",
           predict=predict, simulate=simulate, cases=_cases, tolerance=1e-8, perturb={"rate": 4.0}),
)
