"""Deep linear networks with balanced layers: one equation for each mode, and its solution.  [layerwise, Sec. 3.5]

    f(x) = x^T W_1 ... W_L,   E[x x^T] = I,   C = E[x y^T] = U diag(s) V^T,   W_i^T W_i = W_(i+1) W_(i+1)^T (never changes).
Where W_1 ... W_L = U diag(u) V^T, every layer has the singular values w = u^(1/L), and
    u' = L u^(2 - 2/L) (s - u),   w' = w^(L-1) (s - w^L).
The time from one w to another is an integral in closed form: 1 / (w^(L-1) (s - w^L)) = (w^(1-L) + w / (s - w^L)) / s, and the
second part is a sum of logarithms over the roots of unity. For one layer u is an exponential, for two layers a sigmoid
(Eq. 3.15). In deeper networks a small start costs the time w(0)^(2-L) / ((L - 2) s) instead of a logarithm, so stages are further
apart. Balanced layers have W_1 W_1^T = (P P^T)^(1/L), P = W_1 ... W_L: the neural feature matrix is the L-th root of the AGOP.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike
from richter.linalg import haar
from richter.theory.arrays import Times, first_array, like, linear_layers, normal, per_mode, times_from_zero, whole
from richter.theory.flows import Method, follow
from richter.theory.frame import Theory
from richter.theory.growth import Staged
from richter.theory.two_layers import ROUNDING, simulate_layers, to_start

# ------------------------------------------------------------------------------------------------ one mode


@dataclass(frozen=True)
class DeepModes(Staged):
    """Modes u_i that go to ``s`` [m] from ``u0`` [m] above zero, in a balanced network of ``depth`` layers. A single number
    counts for every mode. ``rate`` rescales time; tests perturb it.

    >>> DeepModes(s=[2.0, 1.0], u0=0.001, depth=3).emergent_time(0.5)
    """

    s: ArrayLike
    u0: ArrayLike
    depth: int
    rate: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        self._read  # noqa: B018  raises an error if the numbers are invalid

    def predict(self, t: Times) -> Array:
        """Strength u of each mode at these times, [m, t]."""
        s, u0 = self._read
        time = times_from_zero(t).to(s.device) * self.rate
        return like(self._arrival(time) if self.depth > 1 else u0[:, None] + (u0 - s)[:, None] * torch.expm1(-time), self._kind)

    def simulate(self, t: Times, method: Method = "flow", lr: float | None = None) -> Array:
        """Return u [m, t] by integrating w' = w^(L-1) (s - w^L), or by gradient descent with steps of ``lr``."""
        return simulate_modes(self.s, self.u0, self.depth, t, method=method, lr=lr)

    @property
    def _kind(self) -> ArrayLike:
        """Array whose type results have."""
        return first_array(self.s, self.u0)

    @cached_property
    def _read(self) -> list[Tensor]:
        """Targets and starts of the modes as tensors, checked."""
        whole(depth=self.depth)
        s, u0 = per_mode(s=self.s, u0=self.u0)
        if (s < 0).any():
            raise SelectionError(f"s contains {s.min().item():g}: singular values are 0 or more. Turn the sign of a vector.")
        if self.depth > 1 and not (u0 > 0).all():
            raise SelectionError(f"u0 contains {u0.min().item():g}: with hidden layers the solution needs a start above 0. "
                                 f"At 0 nothing is ever learned; below 0 layers are not balanced. Start from e.g. 0.001.")
        return [s, u0]

    def _reach(self, x: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Return the time at which u = s / (1 + e^-x); NaN where u starts above s and never has this share."""
        s, u0 = self._read
        x = x.to(s.device)
        if self.depth == 1:
            when = torch.log1p(-u0 / s) + torch.nn.functional.softplus(x)
        else:
            when = _elapsed(torch.sigmoid(x), torch.sigmoid(-x), s, self.depth) - self._origin
        return torch.where(s > 0, torch.where(u0 > s, math.nan, when / self.rate), math.inf)

    @property
    def _count(self) -> int:
        """Number of modes."""
        return len(self._read[0])

    @cached_property
    def _origin(self) -> Float[Tensor, " m"]:
        """Time at which each mode's solution, continued backwards, has its origin."""
        s, u0 = self._read
        return _elapsed(u0 / s, (s - u0) / s, s, self.depth)

    def _arrival(self, t: Float[Tensor, " t"]) -> Float[Tensor, "m t"]:
        """Return u at these times. The time is known as a function of u, which goes to s from either side, so it is inverted by
        bisection."""
        s, u0 = (z[:, None].expand(-1, len(t)) for z in self._read)
        goal, L = self._origin[:, None] + t, self.depth
        below = u0 < s
        first = (u0 / (s - u0).abs()).log()  # x with u / |s - u| = e^x; it increases with time
        low, high = first.clone(), torch.full_like(first, 800.0)
        for _ in range(80):
            x = (low + high) / 2
            share, left = _shares(x, below)
            early = _elapsed(share, left, s, L) < goal
            low, high = torch.where(early, x, low), torch.where(early, high, x)
        u = s * _shares(torch.where(t > 0, (low + high) / 2, first), below)[0]
        idle = (u0.pow(2 / L - 2) + (2 * L - 2) * t).pow(-L / (2 * L - 2))  # s = 0: w' = -w^(2L-1)
        return torch.where(s == 0, idle, torch.where((u0 == s) | (t == 0), u0, u))


def _shares(x: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
    """(u / s, 1 - u / s) where u / |s - u| = e^x."""
    over = 1 / -torch.expm1(-x.clamp(min=1e-300))
    return torch.where(below, torch.sigmoid(x), over), torch.where(below, torch.sigmoid(-x), -over * torch.exp(-x))


def _elapsed(share: Tensor, left: Tensor, s: Tensor, L: int) -> Tensor:
    """Integral of 1 / (w^(L-1) (s - w^L)) at w = (share s)^(1/L), up to a constant. ``left`` = 1 - share, without cancellation.

    With q = share^(1/L) it is s^(2/L - 2) times q^(2-L) / (2 - L) (the logarithm of q for L = 2) plus the integral of
    q / (1 - q^L), which is -(1/L) sum_k r_k^2 log(1 - q / r_k) over the roots r_k of unity."""
    q = share ** (1 / L)
    powers = q ** (2 - L) / (2 - L) if L != 2 else q.log()
    angles = torch.arange(1, L, dtype=q.dtype, device=q.device) * (2 * math.pi / L)
    others = torch.polar(torch.ones_like(angles), angles).reshape(-1, *[1] * q.dim())
    rest = (others**2 * (1 - q / others).log()).real.sum(0)
    # log|1 - q|: 1 - q^L = (1 - q) (1 + q + ... + q^(L-1))
    first = left.abs().log() - torch.stack([q**k for k in range(L)]).sum(0).log()
    return s ** (2 / L - 2) * (powers - (first + rest) / L)


# ------------------------------------------------------------------------------------------------ whole networks


@dataclass(frozen=True)
class DeepLinearNetwork(Staged):
    """Gradient flow from ``weights`` W_1 ... W_L, each [d_in, d_out], towards ``correlation`` = E[x y^T] [d, c], with whitened
    inputs. ``rate`` rescales time; tests perturb it.

    >>> network = DeepLinearNetwork.aligned(correlation, depth=3, width=20, scale=0.1)
    >>> network.predict([0.0, 1.0]), network.emergent_time(0.5)
    """

    weights: Sequence[ArrayLike] = field(repr=False)
    correlation: ArrayLike = field(repr=False)
    rate: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        self._read  # noqa: B018  raises an error if the weights do not make a network

    @classmethod
    def aligned(cls, correlation: ArrayLike, depth: int, width: int, scale: float, seed: int = 0) -> DeepLinearNetwork:
        """Make balanced layers with all singular values ``scale``, along the singular vectors of the correlation: U R_1^T, R_1
        R_2^T,
        ..., R_(L-1) V^T with random orthonormal R_i [p, m]."""
        C = to_start(correlation, scale, seed, width=width, depth=depth)
        U, s, Vt = torch.linalg.svd(C, full_matrices=False)
        if width < len(s) and depth > 1:
            raise SelectionError(f"width={width}: {len(s)} modes need as many hidden units at least, to be orthogonal.")
        draw = np.random.default_rng((seed, depth, width))
        ends = [U, *(torch.from_numpy(haar(width, draw)[:, :len(s)].copy()).to(C) for _ in range(depth - 1)), Vt.T]
        return cls([like(scale * a @ b.T, correlation) for a, b in itertools.pairwise(ends)], correlation)

    def predict(self, t: Times) -> Array:
        """Return W_1 ... W_L [t, d, c]: in closed form if ``solution`` is "modes", otherwise by integration like ``simulate``."""
        if self.solution == "integrated":
            return self.simulate(t)
        U, _, V = self._bases
        u = torch.as_tensor(self._modes.predict(t)).to(U)
        return like(torch.einsum("di,it,ci->tdc", U, u, V), self.weights)

    def modes(self, t: Times) -> Array:
        """Return u_i^T W_1 ... W_L v_i [m, t], which converge to the singular values of the correlation."""
        U, _, V = self._bases
        return like(torch.einsum("di,tdc,ci->it", U, torch.as_tensor(self.predict(t)).to(U), V), self.weights)

    @cached_property
    def solution(self) -> Literal["modes", "integrated"]:
        """Method of ``predict``: "modes" if layers are balanced and the product has the singular vectors of the correlation.
        Otherwise no closed form is known for three or more layers, and the flow is "integrated"."""
        W, _ = self._read
        P, size = torch.linalg.multi_dot(W) if len(W) > 1 else W[0], sum(w.square().sum().item() for w in W)
        even = all((a.T @ a - b @ b.T).norm().item() <= ROUNDING * size for a, b in itertools.pairwise(W))
        U, _, V = self._bases
        u = (U.T @ P @ V).diagonal()
        along = (P - U * u @ V.T).norm() <= ROUNDING * P.norm() and bool((u > 0).all() or len(W) == 1)
        return "modes" if even and along else "integrated"

    @cached_property
    def conserved(self) -> list[Array]:
        """Conserved quantities W_i^T W_i - W_(i+1) W_(i+1)^T of every two consecutive layers.  [A.29]"""
        W, _ = self._read
        return [like(a.T @ a - b @ b.T, self.weights) for a, b in itertools.pairwise(W)]

    def simulate(self, t: Times, method: Method = "flow", lr: float | None = None) -> Array:
        """Return W_1 ... W_L [t, d, c] by integrating the flow of all layers, or by gradient descent with steps of ``lr``."""
        return simulate(self.weights, self.correlation, t, method=method, lr=lr)

    @cached_property
    def _read(self) -> tuple[list[Tensor], Float[Tensor, "d c"]]:
        """Weights and correlation as tensors, checked."""
        return linear_layers(self.weights, self.correlation)[:2]

    @cached_property
    def _bases(self) -> tuple[Tensor, Tensor, Tensor]:
        """Singular vectors and values of the correlation."""
        U, s, Vt = torch.linalg.svd(self._read[1], full_matrices=False)
        return U, s, Vt.T

    @property
    def _count(self) -> int:
        """Number of modes."""
        return len(self._bases[1])

    @property
    def _kind(self) -> ArrayLike:
        """Array whose type results have."""
        return self.weights

    def _reach(self, x: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Arrival times of each mode alone."""
        return self._modes._reach(x)

    @cached_property
    def _modes(self) -> DeepModes:
        """Each mode alone, started from its component of the product of the weights."""
        (W, _), (U, s, V) = self._read, self._bases
        start = U.T
        for w in W:
            start = start @ w
        u0 = (start @ V).diagonal()
        if len(W) > 1 and not (u0 > 0).all():
            raise SelectionError(f"the product of the weights has {u0.min().item():.3g} along mode {int(u0.argmin())} of the "
                                 f"correlation: modes alone have a solution from starts above 0. Use simulate, or "
                                 f"DeepLinearNetwork.aligned.")
        return DeepModes(s, u0, len(W), rate=self.rate)


def predict_modes(s: ArrayLike, u0: ArrayLike, depth: int, t: Times, *, rate: float = 1.0) -> Array:
    """Strength u of each mode at these times, [m, t], by ``DeepModes``."""
    return DeepModes(s, u0, depth, rate=rate).predict(t)


def predict(weights: Sequence[ArrayLike], correlation: ArrayLike, t: Times, *, rate: float = 1.0) -> Array:
    """W_1 ... W_L [t, d, c] of ``DeepLinearNetwork``."""
    return DeepLinearNetwork(weights, correlation, rate=rate).predict(t)


# ------------------------------------------------------------------------------------------------ simulate


def simulate_modes(s: ArrayLike, u0: ArrayLike, depth: int, t: Times, *, method: Method = "flow", lr: float | None = None
                   ) -> Array:
    """Return u [m, t] of w' = w^(L-1) (s - w^L), w = u^(1/L), for L layers with equal weights."""
    s_, first = per_mode(s=s, u0=u0)
    states = follow(lambda w: w ** (depth - 1) * (s_ - w**depth), first ** (1 / depth) if depth > 1 else first.clone(),
                    times_from_zero(t).tolist(), method, lr)
    return like(torch.stack([w**depth for w in states], 1), first_array(s, u0))


def simulate(weights: Sequence[ArrayLike], correlation: ArrayLike, t: Times, *, method: Method = "flow", lr: float | None = None
             ) -> Array:
    """Return W_1 ... W_L [t, d, c] by integrating W_i' = -dL/dW_i, or by gradient descent with steps of ``lr``."""
    W, C, _ = linear_layers(weights, correlation)
    states = simulate_layers(W, C, times_from_zero(t), None, method, lr)
    return like(torch.stack([torch.linalg.multi_dot(state) if len(state) > 1 else state[0] for state in states]), weights)


# ------------------------------------------------------------------------------------------------ theories

TIMES = [0.0, 0.1, 0.7, 3.0, 20.0]


def _modes() -> list[tuple[Any, ...]]:
    """One to six layers, with starts below and above the target, far and near, and without a target."""
    s = torch.tensor([3.0, 1.0, 0.4, 0.0, 1.0], dtype=torch.float64)
    u0 = torch.tensor([0.01, 0.3, 0.8, 0.5, 1.0], dtype=torch.float64)
    return [(s, u0, depth, TIMES) for depth in (1, 2, 3, 4, 6)]


def _networks() -> list[tuple[Any, ...]]:
    """Cases (aligned networks of several depths) on which theory and simulation are compared."""
    cases = []
    for depth in (1, 2, 3, 5):
        network = DeepLinearNetwork.aligned(normal(4, 3, seed=depth), depth, 5, 0.4)
        cases.append((network.weights, network.correlation, TIMES))
    return cases


THEORIES = (
    Theory("deep_linear.modes", ref=Ref("layerwise", "Sec. 3.5"), title="a mode of a balanced deep linear network at all times",
           predict=predict_modes, simulate=simulate_modes, cases=_modes, tolerance=1e-8, perturb={"rate": 1.001}),
    Theory("deep_linear.deep_network", ref=Ref("layerwise", "Sec. 3.5"),
           title="the function of a balanced deep linear network at all times",
           predict=predict, simulate=simulate, cases=_networks, tolerance=1e-8, perturb={"rate": 1.001}),
)
