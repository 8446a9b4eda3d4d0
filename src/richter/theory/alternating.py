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
from jaxtyping import Float
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

    directions: NDArray[np.float64]
    accumulated: NDArray[np.float64]


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
    system = _System(neuron, x_, y_, degree, lr, theta_ / size[:, None])
    needed = -size.log() if abs(degree - 2) < 1e-6 else (size ** (2 - degree) - 1) / (degree - 2)
    return _alternate(system, theta_, needed.numpy(), tolerance, jumps, theta)


def _alternate(system: _System, theta: Tensor, needed: NDArray[np.float64], tolerance: float, jumps: int | None, kind: ArrayLike
               ) -> Learned:
    size = theta.norm(dim=1, keepdim=True)
    asleep = _Asleep((theta / size).numpy(), np.zeros(len(theta)))
    sleeping, active = np.ones(len(theta), dtype=bool), torch.zeros_like(theta)
    times, levels = list[float](), [system.loss(active)]
    order, utilities, after = list[int](), list[float](), list[Array]()
    time, limit = 0.0, len(theta) if jumps is None else jumps
    with progress(total=limit, title="alternating flows", unit="jumps") as bar:
        while sleeping.any() and levels[-1] > tolerance * levels[0] and len(times) < limit:
            residual = system.y - system.outputs(active)
            woken = system.climb(asleep, sleeping, residual, needed, size[:, 0].numpy())
            if woken is None:
                break
            elapsed, asleep, first = woken
            direction = torch.from_numpy(asleep.directions[first])
            time += elapsed
            sleeping[first] = False
            utilities.append(float(system.utility(direction[None], residual)[0]))
            active[first] = direction
            active = system.settle(active, ~sleeping, tolerance)
            times.append(time)
            levels.append(system.loss(active))
            order.append(int(first))
            on_sphere = torch.from_numpy(asleep.directions)
            after.append(like(torch.where(torch.from_numpy(sleeping)[:, None], on_sphere, active), kind))
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
    sample: Float[Tensor, "H p"]  # directions at the start

    def outputs(self, theta: Float[Tensor, "H p"]) -> Float[Tensor, "n c"]:
        return vmap(self.neuron, (0, None))(theta, self.x).sum(0)

    def loss(self, theta: Float[Tensor, "H p"]) -> float:
        return float((self.y - self.outputs(theta)).square().sum() / (2 * len(self.y)))

    def utility(self, theta: Float[Tensor, "H p"], residual: Float[Tensor, "n c"]) -> Float[Tensor, " H"]:
        """E<f_i, r> of each neuron."""
        return vmap(self._one, (0, None))(theta, residual)

    def _one(self, theta: Tensor, residual: Tensor) -> Tensor:
        return (self.neuron(theta, self.x) * residual).sum() / len(self.y)

    def climb(self, asleep: _Asleep, sleeping: NDArray[np.bool_], residual: Tensor, needed: NDArray[np.float64],
              size: NDArray[np.float64]) -> tuple[float, _Asleep, int] | None:
        """Follow dormant directions until the first has accumulated what it needs: the time that takes, directions and
        accumulated utilities then, and who it is. None where no utility is positive."""
        who = np.flatnonzero(sleeping)
        rest = torch.from_numpy(needed[who])
        d, S = torch.from_numpy(asleep.directions[who]), torch.from_numpy(asleep.accumulated[who])
        first = torch.from_numpy(size[who])
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
            d, S = _unit(d + step * (turn + turn_after) / 2), S + min(1.0, float(share.min())) * gained
            time += min(1.0, float(share.min())) * step
            if float(share.min()) <= 1:
                out = _Asleep(asleep.directions.copy(), asleep.accumulated.copy())
                out.directions[who], out.accumulated[who] = d.numpy(), S.numpy()
                return time, out, int(who[int(share.argmin())])
        raise FlowError(f"after {STEPS} steps no dormant neuron has woken: the largest utility is "
                        f"{float(gain.max()) / self.degree:.3g}. Take fewer jumps=.")

    def _velocity(self, d: Float[Tensor, "h p"], S: Float[Tensor, " h"], first: Float[Tensor, " h"],
                  residual: Float[Tensor, "n c"]) -> tuple[Float[Tensor, "h p"], Float[Tensor, " h"]]:
        """How dormant directions turn, and what their neurons accumulate: lr |theta|^(k-2) (1 - d d^T) grad U, and lr k U."""
        slope = vmap(grad(self._one), (0, None))(d, residual)
        along = (slope * d).sum(1)  # k U, by Euler
        return self.lr * self._size(S, first)[:, None] * (slope - along[:, None] * d), self.lr * along

    def _size(self, S: Float[Tensor, " h"], first: Float[Tensor, " h"]) -> Float[Tensor, " h"]:
        """|theta|^(k-2) of dormant neurons, 1 at most."""
        k = self.degree
        return 1 / (first ** (2 - k) - (k - 2) * S).clamp(min=1.0) if k > 2 + 1e-6 else torch.ones_like(S)

    @cached_property
    def pull(self) -> float:
        """How fast directions of norm 1 turn at most, about: the largest gradient of the first utility over those at the start.
        Near a saddle of the utility nothing seems to move, but what leaves it grows at this rate."""
        slope = vmap(grad(self._one), (0, None))(self.sample, self.y)
        return self.lr * float(slope.norm(dim=1).max())

    def settle(self, theta: Float[Tensor, "H p"], awake: NDArray[np.bool_], tolerance: float) -> Float[Tensor, "H p"]:
        """All active neurons at a minimum of the loss, from where they are: L-BFGS, to gradients of ``tolerance``."""
        from scipy.optimize import minimize
        rows = torch.from_numpy(np.flatnonzero(awake))
        first = theta[rows].numpy().reshape(-1)

        def value(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            with torch.enable_grad():
                own = torch.from_numpy(flat.copy()).reshape(len(rows), -1).requires_grad_()
                loss = (self.y - self.outputs(own)).square().sum() / (2 * len(self.y))
                (g,) = torch.autograd.grad(loss, own)
            return loss.item(), g.numpy().reshape(-1)

        done = minimize(value, first, jac=True, method="L-BFGS-B",
                        options={"maxiter": 2_000, "maxfun": 4_000, "ftol": 1e-13, "gtol": tolerance * self.loss(0 * theta)})
        out = theta.clone()
        out[rows] = torch.from_numpy(done.x).reshape(len(rows), -1)
        return out


def _unit(d: Float[Tensor, "h p"]) -> Float[Tensor, "h p"]:
    return d / d.norm(dim=1, keepdim=True)
