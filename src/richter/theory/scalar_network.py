"""A linear network with one input, one output and p hidden units: the smallest that can be lazy or rich.  [layerwise, Ch. 6]

    f(x) = (x / Z) sum_i a_i b_i,   f*(x) = S x,   loss = E[(f - f*)^2] / 2,   v = E[x^2].

Gradient flow multiplies every a_i + b_i by one number and divides every a_i - b_i by it (Theorem 1):

    a_i = (a_i(0) + b_i(0)) gamma^(1/2) / 2 + (a_i(0) - b_i(0)) gamma^(-1/2) / 2,     b_i with a minus,

where gamma goes from 1 to gamma_plus at the rate 2 R v / Z, R^2 = Sigma_0^2 - S_0^2 + S^2. Units whose a_i b_i have the sign of S
are aligned, and grow; the others shrink. If gamma_plus is near 1, the function changes but the weights hardly do: the network is
lazy. Internally, gamma is a logarithm and Sigma_0 +- S_0 are a mantissa and an exponent, so weights may have any size of float64.
Eq. 6.12 is printed with the rate 4 R / Z, which belongs to a loss without the factor 1/2 and to v = 1.
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
from richter.theory.arrays import Times, in_units, like, moving, normal, times_from_zero, whole
from richter.theory.flows import flow
from richter.theory.frame import Theory

Regime = Literal["lazy", "between", "rich"]
LAZY, RICH = 1.1, 10.0  # a convention: the aligned units' part of the function changes by at most a tenth, or at least tenfold

# ------------------------------------------------------------------------------------------------ predict


class SlopeParts(NamedTuple):
    """Contributions of aligned and anti-aligned units to the slope theta of f [t]; their sum is theta."""

    aligned: Array
    anti_aligned: Array


@dataclass(frozen=True)
class ScalarNetwork:
    """Gradient flow from weights ``a0`` and ``b0`` [p] to the slope ``target`` = S; ``scale`` = Z divides the output,
    ``variance`` is E[x^2]. ``rate`` is the 2 of the time constant; tests perturb it.

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
        self._start  # noqa: B018  raises an error if the numbers are invalid

    @classmethod
    def drawn(cls, width: int, target: float = 1.0, scale: float = 1.0, weights: float = 1.0, seed: int = 0) -> ScalarNetwork:
        """Draw weights from N(0, ``weights``^2), determined by the seed and the width.

        >>> ScalarNetwork.drawn(100, weights=0.01)                      # small weights: rich
        >>> ScalarNetwork.drawn(100, target=1e-3).balanced()            # a small target from a zero function: lazy
        >>> ScalarNetwork.drawn(10_000, scale=10_000 ** 0.5)            # many units, output / sqrt(p) (NTK): lazy
        """
        whole(width=width)
        whole(0, seed=seed)
        a0, b0 = weights * np.random.default_rng((seed, width)).standard_normal((2, width))
        return cls(a0, b0, target, scale)

    def balanced(self) -> ScalarNetwork:
        """Duplicate every unit with b_i negated, so that the initial function is zero."""
        a, b = self._start.a, self._start.b
        return ScalarNetwork(like(torch.cat([a, a]), self.a0), like(torch.cat([b, -b]), self.a0), self.target, self.scale,
                             self.variance, rate=self.rate)

    def predict(self, t: Times) -> tuple[Array, Array, Array]:
        """Return (a [p, t], b [p, t], gamma [t]) at these times.  [Eqs. 6.10-6.12, corrected]"""
        return *self.weights(t), self._growth(self._log_gamma(t), "weights(t), slope(t), loss(t) and log_gamma(t) do not need it")

    def weights(self, t: Times) -> tuple[Array, Array]:
        """Return (a [p, t], b [p, t]) at these times."""
        a, b = self._start.at(self._log_gamma(t))
        return like(a, self.a0), like(b, self.a0)

    def log_gamma(self, t: Times) -> Array:
        """Return log gamma [t], also where gamma itself leaves the range of float64."""
        return like(self._log_gamma(t), self.a0)

    def slope(self, t: Times) -> Array:
        """Return theta [t] = ((Sigma_0 + S_0) gamma - (Sigma_0 - S_0) / gamma) / 2, so that f(x) = theta x."""
        log_gamma = self._log_gamma(t)
        return self._checked("the slope", (self._start.plus.times(log_gamma) - self._start.minus.times(-log_gamma)) / 2)

    def loss(self, t: Times) -> Array:
        """Loss v (theta - S)^2 / 2 at these times, [t]."""
        return self._checked("the loss", self.variance * (to_tensor(self.slope(t)) - self.target).square() / 2)

    def modes(self, t: Times) -> SlopeParts:
        """Split the slope into the contributions of units aligned at the start (a_i b_i S > 0) and of the others."""
        a, b = (z / math.sqrt(self.scale) for z in self._start.at(self._log_gamma(t)))
        chosen = to_tensor(self.aligned).bool().to(a.device)
        return SlopeParts(*(self._checked("the slope", (a * b)[kind].sum(0)) for kind in (chosen, ~chosen)))

    @cached_property
    def aligned(self) -> Array:
        """Whether each unit has a_i b_i S > 0 at the start [p]."""
        return like(self._start.a.sign() * self._start.b.sign() * np.sign(self.target) > 0, self.a0)

    @cached_property
    def gamma_plus(self) -> float:
        """Limit of gamma: (S + R) / (Sigma_0 + S_0). It is infinite if all a_i = -b_i and S >= 0, because a_i + b_i = 0 cannot
        grow.
        [Eq. 6.14]"""
        end = torch.tensor(self._log_gamma_plus, dtype=torch.float64)
        return float(self._growth(end, "regime and log_gamma(t) do not need it"))

    @cached_property
    def bound(self) -> float:
        """Return S / Sigma_0, the target over the weights, a lower bound of gamma_plus for S > 0.  [Sec. 6.3.1]"""
        unit = max(self._start.plus.exponent, self._start.minus.exponent)
        size = (self._start.plus.over(unit) + self._start.minus.over(unit)) / 2
        try:
            return math.ldexp(self.target / size, -unit)  # never 0, because not all weights are 0
        except OverflowError:
            raise SelectionError(_beyond("S / Sigma_0", "give weights or the target in other units")) from None

    @cached_property
    def regime(self) -> Regime:
        """"lazy" if gamma_plus or its inverse is below ``LAZY``, "rich" if it is above ``RICH``, otherwise "between"."""
        change = abs(self._log_gamma_plus)
        return "lazy" if change <= math.log(LAZY) else "rich" if change >= math.log(RICH) else "between"

    def simulate(self, t: Times) -> tuple[Array, Array, Array]:
        """Return (a [p, t], b [p, t], gamma [t]) by integrating the gradient flow of all weights."""
        return simulate(self.a0, self.b0, self.target, self.scale, t, self.variance)

    # -------------------------------------------------------------------------------------------- inside

    @cached_property
    def _start(self) -> _Start:
        """Initial weights and their sums of squares."""
        a, b = _read(self.a0, self.b0, self.target, self.scale, self.variance)
        return _Start.make(a, b, self.scale)

    @cached_property
    def _unit(self) -> int:
        """Exponent of the unit of slopes: the largest of Sigma_0 +- S_0 and S."""
        return max(self._start.plus.exponent, self._start.minus.exponent, *([math.frexp(self.target)[1]] if self.target else []))

    @cached_property
    def _R(self) -> float:
        """sqrt(S^2 + Sigma_+ Sigma_-), in the unit of slopes."""
        half, odd = divmod(self._start.plus.exponent + self._start.minus.exponent, 2)
        product = self._start.plus.mantissa * self._start.minus.mantissa * 2**odd
        return math.hypot(math.ldexp(math.sqrt(product), half - self._unit), self._S)

    @cached_property
    def _S(self) -> float:
        """Absolute slope of the target, in the unit of slopes."""
        return math.ldexp(abs(self.target), -self._unit)

    @cached_property
    def _sums(self) -> tuple[_Scaled, _Scaled]:
        """Sums of squares that grow and that shrink. For a target below zero, the flow is that for -S with b -> -b, which
        exchanges the two and inverts gamma."""
        pair = self._start.plus, self._start.minus
        return pair if self.target >= 0 else pair[::-1]

    @cached_property
    def _log_gamma_plus(self) -> float:
        """log gamma at the end of training."""
        grows = self._sums[0]
        if not grows.mantissa:
            end = math.inf
        else:
            end = (math.log(self._R + self._S) if self._R else -math.inf) - grows.log(self._unit)
        return end if self.target >= 0 else -end

    def _log_gamma(self, t: Times) -> Float[Tensor, " t"]:
        """Return the logarithm of Eq. 6.12, corrected, in sums of positive terms, so that it stays precise if S is far above the
        weights."""
        R, S, (grows, shrinks) = self._R, self._S, self._sums
        times = self._scaled(times_from_zero(t).to(self._start.a.device))
        passed = R * times
        moved = torch.log(-torch.expm1(-passed)) - math.log(R) if R else torch.log(times)  # log((1 - e^-passed) / R)
        small = shrinks.over(self._unit)
        above = torch.logaddexp(torch.log1p(torch.exp(-passed)), moved + _log(small + S))
        gap = math.log1p(small / (R + S)) if R else 0.0  # R - S = grows shrinks / (R + S)
        below = torch.logaddexp(math.log(2) - passed, moved + grows.log(self._unit) + gap)
        return above - below if self.target >= 0 else below - above

    def _scaled(self, times: Tensor) -> Tensor:
        """Return rate v t / Z, in the unit of time that corresponds to the unit of slopes."""
        (over, up), (under, down) = math.frexp(self.rate * self.variance), math.frexp(self.scale)
        shift = up - down + self._unit
        half = 2.0 ** max(-1000, min(1000, shift // 2))  # two factors, each within the range of float64
        return (times * (over / under) * half * 2.0 ** max(-1000, min(1000, shift - shift // 2))).clamp(max=1e300)

    def _growth(self, log_gamma: Tensor, instead: str) -> Array:
        """Return gamma. It is unbounded only where no growth can reach the target."""
        gamma = log_gamma.exp()
        if math.isfinite(self._log_gamma_plus) and bool(((gamma == 0) | torch.isinf(gamma)).any()):
            raise SelectionError(_beyond(f"gamma, of which the logarithm comes to {log_gamma.abs().max().item():.4g},", instead))
        return like(gamma, self.a0)

    def _checked(self, name: str, values: Tensor) -> Array:
        """Return values in the type of the input; raise an error if they leave the range of float64."""
        if not torch.isfinite(values).all():
            raise SelectionError(_beyond(name, "weights(t) and log_gamma(t) do not need it; or give a larger scale"))
        return like(values, self.a0)


class _Scaled(NamedTuple):
    """A sum of squares as mantissa 2^exponent, which may exceed the range of float64."""

    mantissa: float
    exponent: int

    @classmethod
    def squares(cls, z: Tensor, scale: float) -> _Scaled:
        """Sum of squares sum_i z_i^2 / (2 scale), as mantissa and exponent."""
        z, unit = in_units(z)
        (over, up), (under, down) = math.frexp(z.square().sum().item() / 2), math.frexp(scale)
        return cls(over / under, up - down + 2 * (math.frexp(unit)[1] - 1)) if over else cls(0.0, -5000)  # smaller than any other

    def over(self, unit: int) -> float:
        """Return the number in units of 2^unit; 0 if it underflows."""
        return math.ldexp(self.mantissa, self.exponent - unit)

    def log(self, unit: int) -> float:
        """Natural logarithm, in these units."""
        return math.log(self.mantissa) + (self.exponent - unit) * math.log(2) if self.mantissa else -math.inf

    def times(self, log_factor: Tensor) -> Tensor:
        """Multiply by e^log_factor, with 0 where the sum is 0, because the factor may then be infinite."""
        return torch.exp(log_factor + self.log(0)) if self.mantissa else torch.zeros_like(log_factor)


class _Start(NamedTuple):
    """Initial weights, and Sigma_0 +- S_0 = sum_i (a_i +- b_i)^2 / (2 Z), which as sums of squares are free of cancellation."""

    a: Float[Tensor, " p"]
    b: Float[Tensor, " p"]
    plus: _Scaled
    minus: _Scaled

    @classmethod
    def make(cls, a: Float[Tensor, " p"], b: Float[Tensor, " p"], scale: float) -> _Start:
        """Make the start from both layers."""
        return cls(a, b, _Scaled.squares(a + b, scale), _Scaled.squares(a - b, scale))

    def at(self, log_gamma: Float[Tensor, " t"]) -> tuple[Float[Tensor, "p t"], Float[Tensor, "p t"]]:
        """Weights of both layers at these values of log gamma."""
        grown = _times((self.a + self.b)[:, None], log_gamma / 2)
        shrunk = _times((self.a - self.b)[:, None], -log_gamma / 2)
        return (grown + shrunk) / 2, (grown - shrunk) / 2


def _times(weights: Tensor, log_factor: Tensor) -> Tensor:
    """Multiply weights by e^log_factor, with 0 where the weights are 0, also if the factor alone overflows."""
    half = (log_factor / 2).exp()
    return torch.where(weights == 0, 0.0, weights * half * half)


def _log(x: float) -> float:
    """Natural logarithm, -inf for 0."""
    return math.log(x) if x else -math.inf


def _beyond(name: str, instead: str) -> str:
    """Sentence about a value beyond the range of float64."""
    return f"{name} leaves the range of float64, because the weights are so small or so large; {instead}."


def _read(a0: ArrayLike, b0: ArrayLike, target: float, scale: float, variance: float) -> tuple[Tensor, Tensor]:
    """Weights of both layers as tensors, after all constants are checked."""
    if not math.isfinite(target):
        raise SelectionError(f"target={target!r}: the slope S of the target, a finite number, is needed.")
    for name, value, why in (("scale", scale, "a network with a negative Z is the one with b0 negated"),
                             ("variance", variance, "it is the mean of x^2")):
        if not (math.isfinite(value) and value > 0):
            raise SelectionError(f"{name}={value!r}: a number above 0 is needed; {why}.")
    return moving(a0, b0)


def predict(a0: ArrayLike, b0: ArrayLike, target: float, scale: float, t: Times, variance: float = 1.0, *,
            rate: float = 2.0) -> tuple[Array, Array, Array]:
    """Return (a [p, t], b [p, t], gamma [t]) of ``ScalarNetwork``."""
    return ScalarNetwork(a0, b0, target, scale, variance, rate=rate).predict(t)


# ------------------------------------------------------------------------------------------------ simulate


def simulate(a0: ArrayLike, b0: ArrayLike, target: float, scale: float, t: Times, variance: float = 1.0
             ) -> tuple[Array, Array, Array]:
    """Return (a [p, t], b [p, t], gamma [t]) by integrating a' = -dL/da and b' = -dL/db. gamma is the growth of sum (a + b)^2 or,
    where that is zero, the inverse of the growth of sum (a - b)^2."""
    a, b = moving(a0, b0)
    unit = in_units(torch.cat([a, b]))[1]

    def velocity(state: list[Tensor]) -> list[Tensor]:
        a, b = state
        force = (target - (a * unit) @ (b * unit) / scale) * variance / scale
        return [force * b, force * a]

    states = flow(velocity, [a / unit, b / unit], times_from_zero(t).tolist(), rtol=1e-12, atol=1e-14)
    A, B = (torch.stack([state[i] for state in states], 1) for i in (0, 1))
    first, other = (_norms((a + s * b)[:, None] / unit) for s in (1, -1))
    gamma = (_norms(A + B) / first if first > 0 else other / _norms(A - B)).square()
    return like(A * unit, a0), like(B * unit, a0), like(gamma, a0)


def _norms(z: Float[Tensor, "p t"]) -> Float[Tensor, " t"]:
    """Euclidean norms over neurons, without overflow."""
    largest = z.abs().amax(0)
    return largest * (z / largest.clamp(min=torch.finfo(z.dtype).tiny)).norm(dim=0)


# ------------------------------------------------------------------------------------------------ theories


def _cases() -> list[tuple[Any, ...]]:
    """Small and large weights; targets above, below and at zero; other variances; equal, opposite and single units."""
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
