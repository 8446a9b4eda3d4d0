"""Alternating gradient flows of any network of neurons: they sleep, and wake one after the other.  [agf]

A network f(x) = sum_i f_i(x; theta_i) whose neurons have degree k >= 2 in their parameters follows the gradient flow of
E|y - f|^2 / 2 from |theta_i| ~ alpha. A *dormant* neuron sees a residual r that does not change. Its direction climbs the
*utility* U(theta; r) = E<f_i(x; theta), r(x)> on the sphere, and its norm reaches 1 when the *accumulated utility*
S_i = int k U dt reaches c_i = -log|theta_i(0)| (k = 2) or (|theta_i(0)|^(2-k) - 1) / (k - 2). The first that does is *active*:
all active neurons go to a minimum of the loss, in a time that does not count, r changes, and so on. The loss is a staircase.

A neuron is given as a torch function. `richter.theory.agf` has the closed forms of four networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad, vmap

from richter.core import SelectionError
from richter.core.arrays import Array, ArrayLike
from richter.core.progress import progress
from richter.theory.arrays import like, read
from richter.theory.flows import FlowError

Neuron = Callable[[Tensor, Tensor], Tensor]  # (parameters [p], inputs [n, ...]) -> outputs [n, c]
SCALES = (0.5, 2.0, 3.0)  # at which a neuron is tried, to find its degree
NONE = 1e-9  # utilities below this share of the first one are none
TURN, STEPS = 0.01, 200_000  # a step turns no direction further, and wakes none by more than this share; steps between two jumps


class Staircase(NamedTuple):
    """The loss falls from ``levels[k]`` to ``levels[k + 1]`` at ``times[k]``."""

    times: Array  # [k]
    levels: Array  # [k + 1]

    def loss(self, t: ArrayLike) -> Array:
        """The level at these times."""
        (t_,) = read(t=(np.atleast_1d(t), "t"))
        times, levels = (torch.as_tensor(np.asarray(a)) for a in (self.times, self.levels))
        return like(levels[torch.searchsorted(times, t_.cpu(), right=True)], self.times)


@dataclass(frozen=True)
class Learned:
    """What ``alternating_flows`` says: the staircase, and who woke."""

    staircase: Staircase
    order: list[int]  # the neuron that wakes at each jump
    utilities: list[float]  # its utility then, at its direction on the unit sphere
    parameters: list[Array] = field(repr=False)  # of all neurons after each jump [H, p]; those asleep on the unit sphere
    degree: float


class _Asleep(NamedTuple):
    """Directions [H, p] on the unit sphere, and accumulated utilities [H]."""

    directions: Float[Tensor, "H p"]
    accumulated: Float[Tensor, " H"]


# ------------------------------------------------------------------------------------------------ any network of neurons


def degree_of(neuron: Neuron, theta: Tensor, x: Tensor) -> float:
    """k with f(x; c theta) = c^k f(x; theta), from the outputs at three scales; refused where there is none."""
    f = neuron(theta, x)
    if not f.abs().max() > 0:
        raise SelectionError("the neuron's outputs are zero on these data, so that no degree can be seen. Give data on which it "
                             "is not zero, or other initial parameters.")
    degrees = []
    for c in SCALES:
        scaled = neuron(c * theta, x)
        share = float((scaled * f).sum() / (f * f).sum())
        off = float((scaled - share * f).norm() / scaled.norm()) if scaled.any() else math.inf
        degrees.append(math.log(share) / math.log(c) if share > 0 and off < 1e-6 else math.nan)
    if not np.ptp(degrees) < 1e-6:
        raise SelectionError(f"the neuron is not homogeneous: with parameters times {', '.join(map(str, SCALES))} its outputs "
                             f"have the degrees {', '.join(f'{d:.4g}' for d in degrees)} (nan: they are not even proportional). "
                             f"Alternating flows need one degree; leave biases out, and take activations like ReLU or squares.")
    degree = float(np.mean(degrees))
    if degree < 2 - 1e-6:
        raise SelectionError(f"the neuron has degree {degree:.4g}: with less than 2 nothing sleeps near the origin, because "
                             f"gradients there do not vanish. Neurons of two layers have 2 or more.")
    return degree


def alternating_flows(neuron: Neuron, theta: ArrayLike, x: ArrayLike, y: ArrayLike, *, jumps: int | None = None, lr: float = 1.0,
                      tolerance: float = 1e-6) -> Learned:
    """The staircase of the network sum_i neuron(theta_i, x) with initial parameters ``theta`` [H, p] on the data ``x`` [n, d],
    ``y`` [n, c], for the loss mean_n |y - f|^2 / 2 and gradient flow at the rate ``lr``. It ends when all neurons are awake, when
    none has a positive utility, when the loss is below ``tolerance`` of the first one, or after ``jumps``.

    >>> relu = lambda theta, x: (x @ theta[:-1]).relu()[:, None] * theta[-1]
    >>> learned = alternating_flows(relu, 1e-3 * torch.randn(20, d + 1), x, y)
    >>> learned.staircase.times, learned.staircase.levels, learned.order
    """
    theta_, x_, y_ = read(theta=(theta, "H p"), x=(x, "n d"), y=(y, "n c"))
    if not (x_.any() and y_.any()):
        raise SelectionError(f"{'y' if x_.any() else 'x'} is zero: nothing is to be learned, and every neuron sleeps for ever.")
    size = theta_.norm(dim=1)
    if not ((size > 0) & (size < 1)).all():
        raise SelectionError(f"initial neurons have norms from {size.min().item():g} to {size.max().item():g}: they sleep where "
                             f"they are above 0 and well below 1. Scale them down.")
    degree = degree_of(neuron, theta_[0] / size[0], x_)
    return _alternate(_System(neuron, x_, y_, degree, lr, theta_ / size[:, None], size), tolerance, jumps, theta)


def _alternate(system: _System, tolerance: float, jumps: int | None, kind: ArrayLike) -> Learned:
    asleep = _Asleep(system.start, torch.zeros_like(system.size))
    sleeping, active = torch.ones_like(system.size, dtype=torch.bool), torch.zeros_like(system.start)
    times, levels = list[float](), [system.loss(active)]
    order, utilities, after = list[int](), list[float](), list[Array]()
    time, limit = 0.0, len(active) if jumps is None else jumps
    with progress(total=limit, title="alternating flows", unit="jumps") as bar:
        while sleeping.any() and levels[-1] > tolerance * levels[0] and len(times) < limit:
            residual = system.y - system.outputs(active)
            woken = system.climb(asleep, sleeping, residual)
            if woken is None:
                break
            elapsed, asleep, first = woken
            time += elapsed
            sleeping[first] = False
            active[first] = asleep.directions[first]
            utilities.append(float(system.utility(active[first], residual)))
            active = system.settle(active, ~sleeping, tolerance)
            times.append(time)
            levels.append(system.loss(active))
            order.append(first)
            after.append(like(torch.where(sleeping[:, None], asleep.directions, active), kind))
            bar.update(1)
    if not times:
        raise SelectionError("no neuron has a direction of positive utility from where it starts: none wakes, and the loss stays "
                             "where it is. Take more neurons, or other initial directions.")
    stairs = Staircase(*(like(torch.tensor(a, dtype=torch.float64), kind) for a in (times, levels)))
    return Learned(stairs, order, utilities, after, system.degree)


@dataclass(frozen=True)
class _System:
    """A sum of neurons on data, with its loss mean_n |y - f|^2 / 2."""

    neuron: Neuron
    x: Tensor
    y: Float[Tensor, "n c"]
    degree: float
    lr: float
    start: Float[Tensor, "H p"]  # directions at the start
    size: Float[Tensor, " H"]  # and norms

    def outputs(self, theta: Float[Tensor, "H p"]) -> Float[Tensor, "n c"]:
        return vmap(self.neuron, (0, None))(theta, self.x).sum(0)

    def cost(self, theta: Float[Tensor, "H p"]) -> Float[Tensor, ""]:
        return (self.y - self.outputs(theta)).square().sum() / (2 * len(self.y))

    def loss(self, theta: Float[Tensor, "H p"]) -> float:
        return self.cost(theta).item()

    def utility(self, theta: Float[Tensor, " p"], residual: Float[Tensor, "n c"]) -> Float[Tensor, ""]:
        """E<f_i, r> of a neuron."""
        return (self.neuron(theta, self.x) * residual).sum() / len(self.y)

    def slopes(self, theta: Float[Tensor, "H p"], residual: Float[Tensor, "n c"]) -> Float[Tensor, "H p"]:
        """The gradients of the utilities of several."""
        return vmap(grad(self.utility), (0, None))(theta, residual)

    @cached_property
    def needed(self) -> Float[Tensor, " H"]:
        """c_i: the accumulated utility at which each wakes."""
        k = self.degree
        return (self.size ** (2 - k) - 1) / (k - 2) if self.higher else -self.size.log()

    @property
    def higher(self) -> bool:
        """Is the degree above 2?"""
        return self.degree > 2 + 1e-6

    def climb(self, asleep: _Asleep, sleeping: Bool[Tensor, " H"], residual: Float[Tensor, "n c"]
              ) -> tuple[float, _Asleep, int] | None:
        """Follow dormant directions until the first has accumulated what it needs: the time that takes, directions and
        accumulated utilities then, and who it is. None where no utility is positive."""
        who = sleeping.nonzero()[:, 0]
        rest, first, d, S = (z[who] for z in (self.needed, self.size, asleep.directions, asleep.accumulated))
        time = 0.0
        for _ in range(STEPS):
            turn, gain = self._velocity(d, S, first, residual)
            fastest = float(turn.norm(dim=1).max())
            if not float(gain.max()) > NONE * self.pull and fastest <= NONE * self.pull:
                return None
            step = TURN / max(fastest, float((gain.abs() / rest).max()), self.pull * float(self._size(S, first).max()))
            turn_after, gain_after = self._velocity(_unit(d + step * turn), S + step * gain, first, residual)
            gained = step * (gain + gain_after) / 2
            share = torch.where(gained > 0, (rest - S) / gained, math.inf).clamp(min=0)
            part = min(1.0, float(share.min()))
            d, S, time = _unit(d + step * (turn + turn_after) / 2), S + part * gained, time + part * step
            if part < 1 or float(share.min()) == 1:
                now = _Asleep(asleep.directions.index_copy(0, who, d), asleep.accumulated.index_copy(0, who, S))
                return time, now, int(who[share.argmin()])
        raise FlowError(f"after {STEPS} steps no dormant neuron has woken: the largest utility is "
                        f"{float(gain.max()) / self.degree:.3g}. Take fewer jumps=.")

    def _velocity(self, d: Float[Tensor, "h p"], S: Float[Tensor, " h"], first: Float[Tensor, " h"],
                  residual: Float[Tensor, "n c"]) -> tuple[Float[Tensor, "h p"], Float[Tensor, " h"]]:
        """How dormant directions turn, and what their neurons accumulate: lr |theta|^(k-2) (1 - d d^T) grad U, and lr k U."""
        slope = self.slopes(d, residual)
        along = (slope * d).sum(1)  # k U, by Euler
        return self.lr * self._size(S, first)[:, None] * (slope - along[:, None] * d), self.lr * along

    def _size(self, S: Float[Tensor, " h"], first: Float[Tensor, " h"]) -> Float[Tensor, " h"]:
        """|theta|^(k-2) of dormant neurons, 1 at most."""
        k = self.degree
        return 1 / (first ** (2 - k) - (k - 2) * S).clamp(min=1.0) if self.higher else torch.ones_like(S)

    @cached_property
    def pull(self) -> float:
        """How fast directions of norm 1 turn at most, about: the largest gradient of the first utility over those at the start.
        Near a saddle of the utility nothing seems to move, but what leaves it grows at this rate."""
        return self.lr * float(self.slopes(self.start, self.y).norm(dim=1).max())

    def settle(self, theta: Float[Tensor, "H p"], awake: Bool[Tensor, " H"], tolerance: float) -> Float[Tensor, "H p"]:
        """All active neurons at a minimum of the loss, from where they are: L-BFGS, to gradients of ``tolerance``."""
        from scipy.optimize import minimize
        first = theta[awake]

        def value(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            with torch.enable_grad():
                own = torch.from_numpy(flat.copy()).to(first).reshape(first.shape).requires_grad_()
                loss = self.cost(own)
                (g,) = torch.autograd.grad(loss, own)
            return loss.item(), g.cpu().numpy().reshape(-1)

        done = minimize(value, first.cpu().numpy().reshape(-1), jac=True, method="L-BFGS-B",
                        options={"maxiter": 2_000, "maxfun": 4_000, "ftol": 1e-13, "gtol": tolerance * self.loss(0 * theta)})
        out = theta.clone()
        out[awake] = torch.from_numpy(done.x).to(first).reshape(first.shape)
        return out


def _unit(d: Float[Tensor, "h p"]) -> Float[Tensor, "h p"]:
    return d / d.norm(dim=1, keepdim=True)
