"""Linear models with and without a hidden layer: exponential and sigmoidal learning, stages.  [layerwise, Ch. 3, A.2]

Gradient flow on E|f - f*|^2 / 2; v_i = E[x_i^2], inputs uncorrelated, targets f* = sum_i S_i x_i:
    linear model          f = sum_i theta_i x_i      theta_i = S_i (1 - e^(-v_i t))                                    [Eq. 3.10]
    diagonal network      f = sum_i a_i b_i x_i      a_i b_i = S_i / (1 + (S_i / a_i b_i(0) - 1) e^(-2 S_i v_i t))     [Eq. 3.9]
(the second for a_i = b_i at the start; otherwise Theorem 1 with p = 1, Z = 1 and v_i t for t). A network with one hidden layer
and whitened inputs, f = x^T W1 W2 and E[x y^T] = U diag(rho) V^T, has the same modes, with rho_i for S_i.  [Eq. 3.15]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike
from richter.theory.arrays import Times, first_array, like, normal, per_mode, squarable, times_from_zero
from richter.theory.deep_linear import DeepLinearNetwork as DeepLinearNetwork
from richter.theory.deep_linear import DeepModes as DeepModes
from richter.theory.flows import Method, follow
from richter.theory.frame import Theory
from richter.theory.growth import Growth, Staged
from richter.theory.growth import times as product
from richter.theory.two_layers import LinearNetwork as LinearNetwork
from richter.theory.unconstrained import UnconstrainedFeatures as UnconstrainedFeatures

# ------------------------------------------------------------------------------------------------ no hidden layer


@dataclass(frozen=True)
class LinearModel(Staged):
    """Modes theta_i that go to ``S`` [m] at the rate ``variance`` [m], from ``initial`` (zero). A single number counts for every
    mode. ``rate`` is the 1 of e^(-v t); tests perturb it.

    >>> LinearModel(S=1.0, variance=[2.0, 1.0]).predict([0.0, 1.0])          # [modes, t]
    """

    S: ArrayLike
    variance: ArrayLike
    initial: ArrayLike = 0.0
    rate: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        self._read  # noqa: B018  raises an error if the numbers are invalid

    def predict(self, t: Times) -> Array:
        """Coefficients theta of the modes at these times, [m, t].  [Eq. 3.10]"""
        S, v, first = (z[:, None] for z in self._read)
        decay = torch.expm1(-self.rate * v * times_from_zero(t).to(S.device))
        return like(first - (S - first) * decay, self._kind)

    def loss(self, t: Times) -> Array:
        """Loss sum_i v_i (theta_i - S_i)^2 / 2 at these times, [t]."""
        S, v, first = (z[:, None] for z in self._read)
        decay = torch.exp(-self.rate * v * times_from_zero(t).to(S.device))
        return like((v * ((S - first) * decay).square()).sum(0) / 2, self._kind)

    def simulate(self, t: Times, method: Method = "flow", lr: float | None = None) -> Array:
        """Return theta [m, t] by integrating the flow, or by gradient descent with steps of ``lr``."""
        return simulate_linear(self.S, self.variance, t, self.initial, method=method, lr=lr)

    @property
    def _kind(self) -> ArrayLike:
        """Array whose type results have."""
        return first_array(self.S, self.variance, self.initial)

    @cached_property
    def _read(self) -> list[Tensor]:
        """Targets, variances and initial values per mode."""
        return per_mode(S=self.S, variance=positive(self.variance), initial=self.initial)

    @property
    def _count(self) -> int:
        """Number of modes."""
        return len(self._read[0])

    def _reach(self, x: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Time at which each mode has learned the share sigmoid(x)."""
        S, v, first = self._read
        missing = torch.log1p(-first / S)  # log of the share that is not learned at the start
        when = (missing + torch.nn.functional.softplus(x.to(S.device))) / (self.rate * v)
        return torch.where(S == 0, torch.inf, when)


def positive(variance: ArrayLike) -> ArrayLike:
    """Check that every variance is above 0."""
    (v,) = per_mode(variance=variance)
    if not (v > 0).all():
        raise SelectionError(f"variance contains {v.min().item():g}: E[x_i^2] is above 0 for every mode; one that has none is no "
                             f"input. Leave it out.")
    return variance


# ------------------------------------------------------------------------------------------------ a diagonal layer


@dataclass(frozen=True)
class DiagonalNetwork(Staged):
    """Modes a_i b_i that go to ``S`` [m] from weights ``a0`` and ``b0`` [m] of any sign; ``variance`` [m] is E[x_i^2]. A single
    number counts for every mode. ``rate`` is the 2 of the time constant; tests perturb it.

    >>> network = DiagonalNetwork(S=1.0, variance=[4.0, 2.0, 1.0], a0=0.01, b0=0.01)
    >>> network.predict([0.0, 1.0]), network.emergent_time(0.05), network.stage_eps
    """

    S: ArrayLike
    variance: ArrayLike
    a0: ArrayLike
    b0: ArrayLike
    rate: float = field(default=2.0, kw_only=True)

    def __post_init__(self) -> None:
        self._growth  # noqa: B018  raises an error if the numbers are invalid

    def predict(self, t: Times) -> Array:
        """a_i b_i [m, t].  [Eq. 3.9; a0 != b0: Thm. 1]"""
        return like(self._growth.strength(self._times(t)), self._kind)

    def weights(self, t: Times) -> tuple[Array, Array]:
        """Weights a [m, t] and b [m, t] of both layers at these times."""
        _, _, a, b = self._read
        gamma = self._growth.gamma(self._times(t))
        grown, shrunk = product((a + b)[:, None], gamma.sqrt()), product((a - b)[:, None], gamma.rsqrt())
        return like((grown + shrunk) / 2, self._kind), like((grown - shrunk) / 2, self._kind)

    def loss(self, t: Times) -> Array:
        """Loss sum_i v_i (a_i b_i - S_i)^2 / 2 at these times, [t]."""
        S, v, _, _ = (z[:, None] for z in self._read)
        return like((v * (self._growth.strength(self._times(t)) - S).square()).sum(0) / 2, self._kind)

    @cached_property
    def conserved(self) -> Array:
        """Conserved quantities a_i^2 - b_i^2 [m].  [Eq. 3.8]"""
        _, _, a, b = self._read
        return like((a + b) * (a - b), self._kind)

    def simulate(self, t: Times, method: Method = "flow", lr: float | None = None) -> Array:
        """Return a_i b_i [m, t] by integrating the flow of all weights, or by gradient descent with steps of ``lr``."""
        return simulate_diagonal(self.S, self.variance, self.a0, self.b0, t, method=method, lr=lr)

    @property
    def _kind(self) -> ArrayLike:
        """Array whose type results have."""
        return first_array(self.S, self.variance, self.a0, self.b0)

    @cached_property
    def _read(self) -> list[Tensor]:
        """Targets, variances and initial weights per mode."""
        return per_mode(S=self.S, variance=positive(self.variance), a0=self.a0, b0=self.b0)

    @cached_property
    def _growth(self) -> Growth:
        """Growth of the modes; raise an error if one starts at a saddle."""
        S, v, a, b = self._read
        still = ((a == 0) & (b == 0)).nonzero().flatten().tolist()
        if still:
            raise SelectionError(f"a0 and b0 are both 0 in mode {still[0]}: there the flow starts at a saddle, which no gradient "
                                 f"leaves, and nothing is ever learned. Start from small weights, e.g. 0.01.")
        squarable("a0 or b0", torch.maximum(a.abs(), b.abs()))
        return Growth.start(a[:, None], b[:, None], S, v, self.rate)

    @property
    def _count(self) -> int:
        """Number of modes."""
        return len(self._growth.plus)

    def _reach(self, x: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Time at which each mode has learned the share sigmoid(x)."""
        return self._growth.reach(x)

    def _times(self, t: Times) -> Float[Tensor, " t"]:
        """Times as a tensor on the device of the modes."""
        return times_from_zero(t).to(self._growth.plus.device)


# ------------------------------------------------------------------------------------------------ simulate


def simulate_linear(S: ArrayLike, variance: ArrayLike, t: Times, initial: ArrayLike = 0.0, *, method: Method = "flow",
                    lr: float | None = None) -> Array:
    """Return theta [m, t] of theta_i' = v_i (S_i - theta_i)."""
    S_, v, first = per_mode(S=S, variance=variance, initial=initial)
    states = follow(lambda theta: v * (S_ - theta), first.clone(), times_from_zero(t).tolist(), method, lr)
    return like(torch.stack(states, 1), first_array(S, variance, initial))


def simulate_diagonal(S: ArrayLike, variance: ArrayLike, a0: ArrayLike, b0: ArrayLike, t: Times, *, method: Method = "flow",
                      lr: float | None = None) -> Array:
    """Return a_i b_i [m, t] of a' = -dL/da and b' = -dL/db.  [Eq. 3.6]"""
    S_, v, a, b = per_mode(S=S, variance=variance, a0=a0, b0=b0)

    def velocity(state: list[Tensor]) -> list[Tensor]:
        a, b = state
        force = v * (S_ - a * b)
        return [force * b, force * a]

    states = follow(velocity, [a.clone(), b.clone()], times_from_zero(t).tolist(), method, lr)
    return like(torch.stack([a * b for a, b in states], 1), first_array(S, variance, a0, b0))


# ------------------------------------------------------------------------------------------------ theories


def predict_linear(S: ArrayLike, variance: ArrayLike, t: Times, initial: ArrayLike = 0.0, *, rate: float = 1.0) -> Array:
    """Coefficients theta [m, t] of ``LinearModel`` at these times."""
    return LinearModel(S, variance, initial, rate=rate).predict(t)


def predict_diagonal(S: ArrayLike, variance: ArrayLike, a0: ArrayLike, b0: ArrayLike, t: Times, *, rate: float = 2.0) -> Array:
    """Coefficients a_i b_i [m, t] of ``DiagonalNetwork`` at these times."""
    return DiagonalNetwork(S, variance, a0, b0, rate=rate).predict(t)


TIMES = [0.0, 0.1, 0.7, 3.0, 20.0]


def _linear() -> list[tuple[Any, ...]]:
    """Cases (targets and variances) on which theory and simulation are compared."""
    v = normal(5, seed=1).abs() + 0.1
    return [(normal(5), v, TIMES), (1.0, v, TIMES, normal(5, seed=2)), (-2.0, 0.3, TIMES)]


def _diagonal() -> list[tuple[Any, ...]]:
    """Equal and unequal starts, large and small; targets above, below and at zero; signs that must change."""
    v, a, b = normal(6, seed=1).abs() + 0.1, normal(6, seed=2), normal(6, seed=3)
    return [(1.0, v, 0.01, 0.01, TIMES), (normal(6), v, 0.3 * a, 0.3 * b, TIMES), (0.0, v, a, b, TIMES), (2.0, 0.5, a, a, TIMES),
            (1.5, v, a, 0.0, TIMES), (-1.5, v, a, 0.0, TIMES)]


THEORIES = (
    Theory("linear_networks.linear_model", ref=Ref("layerwise", "Eq. 3.10"),
           title="modes of a linear model: each saturates from the start, at its own speed",
           predict=predict_linear, simulate=simulate_linear, cases=_linear, tolerance=1e-8, perturb={"rate": 2.0}),
    Theory("linear_networks.diagonal_network", ref=Ref("layerwise", "Eqs. 3.9, 6.12"),
           title="modes of a diagonal linear network: sigmoids, one after the other from a small start",
           predict=predict_diagonal, simulate=simulate_diagonal, cases=_diagonal, tolerance=1e-8, perturb={"rate": 2.001}),
)
