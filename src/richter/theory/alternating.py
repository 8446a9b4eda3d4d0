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
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from richter.core import Ref, SelectionError, unknown
from richter.core.arrays import Array, ArrayLike, to_tensor
from richter.core.progress import progress
from richter.theory.arrays import Times, like, normal, read, times_from_zero
from richter.theory.flows import descend, flow
from richter.theory.frame import Theory
from richter.theory.neurons import Asleep, Neuron, Neurons

Activation = Literal["linear", "relu", "square"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"linear": lambda z: z, "relu": torch.relu, "square": torch.square}
SCALES = (0.5, 2.0, 3.0)  # at which a neuron is tried, to find its degree
OFTEN = 10  # jumps for each neuron at most: one that was driven to zero may wake again
MERGED, SEEN = 1.1, 0.01  # jumps that are nearer than this are one; drops below this share of the first loss are not seen


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
    again: list[tuple[int, ...]]  # the neurons that each jump drove to zero, and that sleep again
    lr: float = 1.0

    @property
    def separations(self) -> NDArray[np.float64]:
        """The time from each jump to the next [k - 1], in units of what both take (``separations``)."""
        return separations(np.asarray(self.staircase.times), np.array(self.utilities), self.degree, self.lr)


def separations(times: NDArray[np.float64], utilities: NDArray[np.float64], degree: float, lr: float = 1.0
                ) -> NDArray[np.float64]:
    """(t_{j+1} - t_j) / (1 / kU_j + 1 / kU_{j+1}). A neuron of utility U goes from a tenth to nine tenths of what it comes to
    within about 2.2 / kU (k = 2: a logistic curve), so that below 1.1 two jumps are one."""
    takes = 1 / (lr * degree * utilities)
    return np.diff(times) / (takes[:-1] + takes[1:])


def warn_of_merging(times: NDArray[np.float64], levels: NDArray[np.float64], apart: NDArray[np.float64]) -> None:
    """Of the first two jumps in a row that are one, and that both lower the loss by more than ``SEEN`` of it."""
    drops = -np.diff(levels) > SEEN * levels[0]
    merged = np.flatnonzero((apart < MERGED) & drops[:-1] & drops[1:])
    if len(merged):
        j = int(merged[0])
        warnings.warn(f"jumps {j + 1} and {j + 2} come at {times[j]:.4g} and {times[j + 1]:.4g}, within {apart[j] / MERGED:.2g} "
                      f"of the time that a jump takes ({len(merged)} such pairs): the initial weights are too large for a "
                      f"plateau between them, and only the level behind them will be seen. Start from smaller weights.",
                      stacklevel=4)


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
                      tolerance: float = 1e-6, keep: bool = True) -> Learned:
    """The staircase of the network sum_i neuron(theta_i, x) with initial parameters ``theta`` [H, p] on the data ``x`` [n, d],
    ``y`` [n, c], for the loss mean_n |y - f|^2 / 2 and gradient flow at the rate ``lr``. It ends when all neurons are awake, when
    none has a positive utility, when the loss is below ``tolerance`` of the first one, or after ``jumps``. A neuron whose norm
    falls to zero sleeps again. ``keep=False`` is a rival: at each jump dormant neurons forget how they have turned and what they
    have accumulated, and begin again.

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
    if not (jumps is None or (isinstance(jumps, int) and jumps > 0)) or not lr > 0:
        raise SelectionError(f"jumps={jumps!r}, lr={lr!r}: numbers above 0 are needed (jumps=None: all there are).")
    starts = theta_ / size[:, None]
    outputs = vmap(neuron, (0, None))(starts, x_).flatten(1).norm(dim=1)  # weights of one layer may start at zero
    degree = degree_of(neuron, starts[outputs.argmax()] if outputs.any() else normal(theta_.shape[1]).to(theta_), x_)
    learned = _alternate(Neurons(neuron, x_, y_, degree, lr, starts, size), tolerance, jumps, keep, theta)
    warn_of_merging(np.asarray(learned.staircase.times), np.asarray(learned.staircase.levels), learned.separations)
    return learned


def _alternate(system: Neurons, tolerance: float, jumps: int | None, keep: bool, kind: ArrayLike) -> Learned:
    asleep = Asleep(system.start, torch.zeros_like(system.size))
    sleeping, active = torch.ones_like(system.size, dtype=torch.bool), torch.zeros_like(system.start)
    times, levels = list[float](), [system.loss(active)]
    order, utilities, after, again = list[int](), list[float](), list[Array](), list[tuple[int, ...]]()
    time, limit = 0.0, OFTEN * len(active) if jumps is None else jumps
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
            active, gone = system.settle(active, ~sleeping, tolerance)
            vanishing, active = active, torch.where(gone[:, None], 0.0, active)
            asleep, sleeping = system.returned(asleep, gone, vanishing, system.y - system.outputs(active)), sleeping | gone
            times.append(time)
            levels.append(system.loss(active))
            order.append(first)
            again.append(tuple(gone.nonzero()[:, 0].tolist()))
            after.append(like(torch.where(sleeping[:, None], asleep.directions, active), kind))
            asleep = asleep if keep else Asleep(system.start, torch.zeros_like(system.size))
            bar.update(1)
    if not times:
        raise SelectionError("no neuron has a direction of positive utility from where it starts: none wakes, and the loss stays "
                             "where it is. Take more neurons, or other initial directions.")
    stairs = Staircase(*(like(torch.tensor(a, dtype=torch.float64), kind) for a in (times, levels)))
    return Learned(stairs, order, utilities, after, system.degree, again, system.lr)


# ------------------------------------------------------------------------------------------------ two layers


def layers(activation: Activation, theta: ArrayLike, x: ArrayLike, y: ArrayLike) -> tuple[Neuron, list[Tensor]]:
    """The neuron a phi(w.x) of the parameters theta_i = (w, a) [H, d + c], and [theta, x, y] as they are read."""
    theta_, x_, y_ = read(theta=(theta, "H p"), x=(x, "n d"), y=(y, "n c"))
    d = x_.shape[1]
    if theta_.shape[1] != d + y_.shape[1]:
        raise SelectionError(f"theta has {theta_.shape[1]} numbers for each neuron; {d} weights of inputs and {y_.shape[1]} of "
                             f"outputs are needed.")
    if activation not in ACTIVATIONS:
        raise unknown("networks of two layers", "activation", activation, list(ACTIVATIONS))
    phi = ACTIVATIONS[activation]
    return lambda own, inputs: phi(inputs @ own[:d])[:, None] * own[d:], [theta_, x_, y_]


def predict(activation: Activation, theta: ArrayLike, x: ArrayLike, y: ArrayLike, t: Times, *, lr: float = 1.0) -> Array:
    """The loss of sum_i a_i phi(w_i.x) at times ``t``, from theta_i = (w_i, a_i) [H, d + c]: the staircase."""
    neuron, given = layers(activation, theta, x, y)
    return like(to_tensor(alternating_flows(neuron, *given, lr=lr).staircase.loss(times_from_zero(t))), theta)


def simulate(activation: Activation, theta: ArrayLike, x: ArrayLike, y: ArrayLike, t: Times, lr: float | None = None
             ) -> Array:
    """The same along the gradient flow of all its weights; with ``lr`` in steps of gradient descent, which kinks of ReLU do not
    slow down."""
    theta_, x_, y_ = (to_tensor(a).cpu() for a in (theta, x, y))
    W, A = theta_[:, :x_.shape[1]], theta_[:, x_.shape[1]:]
    phi = {"linear": lambda z: z, "relu": lambda z: z.clamp(min=0), "square": lambda z: z * z}[activation]
    slope = {"linear": torch.ones_like, "relu": lambda z: (z > 0).to(z), "square": lambda z: 2 * z}[activation]

    def velocity(state: list[Tensor]) -> list[Tensor]:
        z = x_ @ state[0].T
        r = (y_ - phi(z) @ state[1]) / len(y_)
        return [(slope(z) * (r @ state[1].T)).T @ x_, phi(z).T @ r]

    times = times_from_zero(t).tolist()
    states = flow(velocity, [W, A], times, rtol=1e-6, atol=1e-12) if lr is None else descend(velocity, [W, A], times, lr)
    losses = [(y_ - phi(x_ @ w.T) @ a).square().sum() / (2 * len(y_)) for w, a in states]
    return like(torch.stack(losses), theta)


def _cases() -> list[tuple[Any, ...]]:
    """A target that one neuron fits; times before the jump, and behind it."""
    x = normal(40, 3, seed=1)
    x = x @ torch.linalg.inv(torch.linalg.cholesky(x.T @ x / len(x))).T
    small = normal(2, 4, seed=2) / 2
    return [("square", 1e-2 * small, x, 2 * x[:, :1] ** 2, [1.0, 20.0])]


THEORIES = (
    Theory("alternating.two_layers", ref=Ref("agf", "Sec. 2"),
           title="the staircase of any network of two layers from small weights", predict=predict,
           simulate=simulate, cases=_cases, tolerance=1e-2, perturb={"lr": 0.25}),
)
