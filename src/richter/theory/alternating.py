"""Alternating gradient flows of any network of neurons: dormant neurons become active one after the other.  [agf]

A network f(x) = sum_i f_i(x; theta_i) whose neurons have degree k >= 2 in their parameters follows the gradient flow of
E|y - f|^2 / 2 from |theta_i| ~ alpha. A *dormant* neuron sees a residual r that does not change. Its direction climbs the
*utility* U(theta; r) = E<f_i(x; theta), r(x)> on the sphere, and its norm reaches 1 when the *accumulated utility*
S_i = int k U dt reaches c_i = -log|theta_i(0)| (k = 2) or (|theta_i(0)|^(2-k) - 1) / (k - 2). The first neuron to reach it
becomes *active*. All active neurons then go to a minimum of the loss, in a negligible time, r changes, and the next phase begins.
The loss is a staircase. Dormant neurons of degree 2 turn together with the active ones, at the same speed, however small they
are. The norm 1 is close to the final norm if targets are of order 1. Otherwise use ``unit``, which scales like |y|^(1/k).
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

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike, to_tensor
from richter.core.values import progress
from richter.theory.arrays import Times, above_zero, like, normal, read, times_from_zero, two_layers, whole
from richter.theory.flows import descend, flow
from richter.theory.frame import Theory
from richter.theory.neurons import AGAIN, Asleep, Neuron, Neurons

Activation = Literal["linear", "relu", "square"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"linear": lambda z: z, "relu": torch.relu, "square": torch.square}
SCALES = (0.5, 2.0, 3.0)  # scales at which a neuron is evaluated to find its degree
OFTEN = 10  # maximum number of jumps per neuron: a neuron that was driven to zero may become active again
FINEST = 36.0  # for a larger log(1 / alpha), float64 cannot hold dormant neurons next to active ones
MERGED, SEEN = 1.1, 0.01  # jumps closer than MERGED count as one; drops below the share SEEN of the first loss are ignored


class Staircase(NamedTuple):
    """A loss that falls from ``levels[k]`` to ``levels[k + 1]`` at ``times[k]``."""

    times: Array  # [k]
    levels: Array  # [k + 1]

    def loss(self, t: ArrayLike) -> Array:
        """Return the level at these times."""
        times, levels = to_tensor(self.times, "times"), to_tensor(self.levels, "levels")
        (t_,) = read(t=(to_tensor(t, "t").reshape(-1), "t"))
        return like(levels[torch.searchsorted(times, t_.to(times.device), right=True)], self.times)


@dataclass(frozen=True)
class Learned:
    """Result of ``alternating_flows``: the staircase, and the neurons that became active."""

    staircase: Staircase
    order: list[int]  # the neuron that becomes active at each jump
    utilities: list[float]  # its utility at that time, for its direction on the unit sphere
    parameters: list[Array] = field(repr=False)  # all neurons after each jump [H, p]; dormant ones on the unit sphere
    degree: float
    again: list[tuple[int, ...]]  # neurons that each jump drove to zero and that are dormant again
    left: list[float]  # gradient norm left at each level, in units of the first loss over the norm of a neuron: its accuracy
    lr: float = 1.0

    @property
    def separations(self) -> NDArray[np.float64]:
        """Time from each jump to the next [k - 1], in units of the durations of both (``separations``)."""
        return separations(_numbers(self.staircase.times), np.array(self.utilities), self.degree, self.lr)


def separations(times: NDArray[np.float64], utilities: NDArray[np.float64], degree: float, lr: float = 1.0
                ) -> NDArray[np.float64]:
    """Return (t_{j+1} - t_j) / (1 / kU_j + 1 / kU_{j+1}). A neuron of utility U grows from a tenth to nine tenths of its final
    value within about 2.2 / kU (a logistic curve for k = 2), so two jumps with a value below 1.1 count as one."""
    takes = 1 / (lr * degree * utilities)
    return np.diff(times) / (takes[:-1] + takes[1:])


def warn_of_merging(times: NDArray[np.float64], levels: NDArray[np.float64], apart: NDArray[np.float64]) -> None:
    """Warn about the first two consecutive jumps that merge into one, if both lower the loss by more than the share ``SEEN``."""
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
    """Return k with f(x; c theta) = c^k f(x; theta), from the outputs at three scales; raise an error if there is no such k."""
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
                      tolerance: float = 1e-6, keep: bool = True, unit: float = 1.0) -> Learned:
    """Compute the staircase of the network sum_i neuron(theta_i, x) with initial parameters ``theta`` [H, p] on the data ``x``
    [n, d], ``y`` [n, c], for the loss mean_n |y - f|^2 / 2 and gradient flow at the rate ``lr``. It ends when all neurons are
    active,
    when no neuron has a positive utility, when the loss is below ``tolerance`` times the first one, or after ``jumps`` jumps. A
    neuron whose norm falls to zero becomes dormant again. ``keep=False`` is a control: at each jump dormant neurons lose their
    directions and their accumulated utility, and start again. ``unit``: the norm at which a neuron becomes active, of the order
    of its final norm. Levels are exact to ``tolerance`` times the first loss, and ``.left`` is the remaining gradient norm.

    >>> relu = lambda theta, x: (x @ theta[:-1]).relu()[:, None] * theta[-1]
    >>> learned = alternating_flows(relu, 1e-3 * torch.randn(20, d + 1), x, y)
    >>> learned.staircase.times, learned.staircase.levels, learned.order
    """
    theta_, x_, y_ = read(theta=(theta, "H p"), x=(x, "n d"), y=(y, "n c"))
    if not (x_.any() and y_.any()):
        raise SelectionError(f"{'y' if x_.any() else 'x'} is zero: nothing is to be learned, and every neuron sleeps for ever.")
    above_zero(lr=lr, tolerance=tolerance, unit=unit)
    if jumps is not None:
        whole(jumps=jumps)
    size = theta_.norm(dim=1)
    if not ((size > 0) & (size < unit)).all():
        raise SelectionError(f"initial neurons have norms from {size.min().item():g} to {size.max().item():g}: they sleep where "
                             f"they are above 0 and well below {unit:g}. Scale them down.")
    starts = theta_ / size[:, None]
    outputs = _outputs(neuron, starts, x_, y_).flatten(1).norm(dim=1)  # the weights of one layer may start at zero
    degree = degree_of(neuron, starts[outputs.argmax()] if outputs.any() else normal(theta_.shape[1]).to(theta_), x_)
    system = Neurons(neuron, x_, y_, degree, lr, starts, size, unit)
    if not (np.isfinite(system.first) and system.first > 0):
        raise SelectionError(f"the loss without any neuron is {system.first:g}: y has entries up to {float(y_.abs().max()):g}, "
                             f"whose squares are no numbers of float64. Give y in other units.")
    if not system.higher and float(system.needed.max()) > FINEST:
        warnings.warn(f"neurons start with norms down to {float(size.min()):.2g}, and log({unit:g} / norm) is above {FINEST:g}: "
                      f"what dormant directions keep of later features is then below the rounding of float64, and late jumps are "
                      f"wrong or not seen. Take norms of 1e-15 or more.", stacklevel=2)
    learned = _alternate(system, tolerance, jumps, keep, theta_, theta)
    warn_of_merging(_numbers(learned.staircase.times), _numbers(learned.staircase.levels), learned.separations)
    return learned


def _outputs(neuron: Neuron, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the outputs of all neurons [H, n, c]; check that they are numbers in the shape of the targets."""
    if not callable(neuron):
        raise SelectionError(f"neuron={neuron!r}: a function of (parameters [p], inputs [n, d]) is needed.")
    one = neuron(theta[0], x)
    if not isinstance(one, Tensor) or one.shape != y.shape:
        shape = list(one.shape) if isinstance(one, Tensor) else type(one).__name__
        raise SelectionError(f"the neuron returns {shape} and y has shape {list(y.shape)}: outputs [n, c] for targets [n, c] are "
                             f"needed. A single output is a column: (...)[:, None].")
    outputs = vmap(neuron, (0, None))(theta, x)
    if not torch.isfinite(outputs).all():
        raise SelectionError("the neuron's outputs contain NaN or Inf on these data, at initial directions of norm 1.")
    return outputs


def _alternate(system: Neurons, tolerance: float, jumps: int | None, keep: bool, theta: Tensor, kind: ArrayLike) -> Learned:
    """Alternate between growth of sleeping neurons and descent of the active ones, until the loss is small or jumps are over."""
    asleep = Asleep(system.start, torch.zeros_like(system.size))
    sleeping, active = torch.ones_like(system.size, dtype=torch.bool), torch.zeros_like(system.start)
    rests = torch.zeros_like(system.size)
    times, levels = list[float](), [system.loss(active)]
    order, utilities, after, again, left = list[int](), list[float](), list[Array](), list[tuple[int, ...]](), list[float]()
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
            utilities.append(float(system.utility(asleep.directions[first], residual)))
            rests[first] = system.rest(asleep.directions[first], residual)
            if not times:
                _compare_norms(system, first, float(rests[first]))
            active[first] = rests[first] * asleep.directions[first]
            settled, before = system.settle(active, ~sleeping, rests, tolerance), active
            gone, active = settled.gone, torch.where(settled.gone[:, None], 0.0, settled.theta)
            kept = ~sleeping & ~gone
            asleep = system.carried(asleep, before[kept], active[kept], residual)
            asleep = system.returned(asleep, gone, settled.theta, system.y - system.outputs(active))
            sleeping = sleeping | gone
            if gone.any() and not system.higher and float(system.needed.max()) > FINEST / 2:
                warnings.warn(f"neuron {int(gone.nonzero()[0])} sleeps again, and started with a norm below 1e-8: what it would "
                              f"wake by is a square of that, below the rounding of float64, so that later jumps may be missing. "
                              f"Take norms of 1e-8 or more.", stacklevel=3)
            times.append(time)
            levels.append(system.loss(active))
            order.append(first)
            again.append(tuple(gone.nonzero()[:, 0].tolist()))
            left.append(settled.left)
            after.append(like(torch.where(sleeping[:, None], asleep.directions, active), kind))
            asleep = asleep if keep else Asleep(system.start, torch.zeros_like(system.size))
            bar.update(1)
    if not times:
        raise SelectionError("no neuron has a direction of positive utility from where it starts: none wakes, and the loss stays "
                             "where it is. Take more neurons, or other initial directions.")
    stairs = Staircase(*(like(torch.tensor(a, dtype=torch.float64).to(theta.device), kind) for a in (times, levels)))
    return Learned(stairs, order, utilities, after, system.degree, again, left, system.lr)


def _compare_norms(system: Neurons, first: int, rest: float) -> None:
    """Check that the first active neuron starts small compared with its final norm, and that this norm is of the order of
    unit."""
    start, k, needed = float(system.size.max()), system.degree, float(system.needed[first])
    if start >= rest:
        raise SelectionError(f"initial neurons have norms up to {start:.2g}, and the first that wakes comes to {rest:.2g}: none "
                             f"sleeps, because learned norms go like |y|^(1/{k:.3g}). Start from {rest / 100:.1g} or less.")
    if start > rest / (2 * AGAIN):
        warnings.warn(f"initial neurons have norms up to {start:.2g}, and the first that wakes comes to {rest:.2g}: they hardly "
                      f"sleep, and jumps are not separated. Start from {rest / 100:.1g} or less.", stacklevel=4)
    elif abs(float(system.rising(system.size.new_tensor([rest])))) > needed / 2:
        warnings.warn(f"neurons are to wake at norm {system.unit:g}, and the first comes to {rest:.2g}: times are then off by "
                      f"half or more. Give unit={rest:.1g}, or y in units in which learned norms are near 1 (they go like "
                      f"|y|^(1/{k:.3g})).", stacklevel=4)


def _numbers(a: Array) -> NDArray[np.float64]:
    """Convert to numpy, from any device."""
    return to_tensor(a).cpu().numpy()


# ------------------------------------------------------------------------------------------------ two layers


def layers(activation: Activation, theta: ArrayLike, x: ArrayLike, y: ArrayLike) -> tuple[Neuron, list[Tensor]]:
    """Return the neuron a phi(w.x) of the parameters theta_i = (w, a) [H, d + c], and [theta, x, y] as tensors."""
    given, d = two_layers(theta, x, y, activation, ACTIVATIONS)
    phi = ACTIVATIONS[activation]
    return lambda own, inputs: phi(inputs @ own[:d])[:, None] * own[d:], given


def predict(activation: Activation, theta: ArrayLike, x: ArrayLike, y: ArrayLike, t: Times, *, lr: float = 1.0) -> Array:
    """Return the loss of sum_i a_i phi(w_i.x) at times ``t``, from theta_i = (w_i, a_i) [H, d + c], by the staircase."""
    neuron, given = layers(activation, theta, x, y)
    return like(to_tensor(alternating_flows(neuron, *given, lr=lr).staircase.loss(times_from_zero(t))), theta)


SLOPES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {  # phi and phi' for the simulation
    "linear": (lambda z: z, torch.ones_like), "relu": (lambda z: z.clamp(min=0), lambda z: (z > 0).to(z)),
    "square": (lambda z: z * z, lambda z: 2 * z)}


def simulate(activation: Activation, theta: ArrayLike, x: ArrayLike, y: ArrayLike, t: Times, lr: float | None = None
             ) -> Array:
    """Return the loss along the gradient flow of all weights. With ``lr``, use steps of gradient descent, which kinks of ReLU do
    not slow down."""
    given, d = two_layers(theta, x, y, activation, SLOPES)
    theta_, x_, y_ = (a.cpu() for a in given)
    W, A = theta_[:, :d], theta_[:, d:]
    phi, slope = SLOPES[activation]

    def velocity(state: list[Tensor]) -> list[Tensor]:
        z = x_ @ state[0].T
        r = (y_ - phi(z) @ state[1]) / len(y_)
        return [(slope(z) * (r @ state[1].T)).T @ x_, phi(z).T @ r]

    times = times_from_zero(t).tolist()
    states = flow(velocity, [W, A], times, rtol=1e-6, atol=1e-12) if lr is None else descend(velocity, [W, A], times, lr)
    losses = [(y_ - phi(x_ @ w.T) @ a).square().sum() / (2 * len(y_)) for w, a in states]
    return like(torch.stack(losses).to(given[0].device), theta)


def _cases() -> list[tuple[Any, ...]]:
    """A target that one neuron fits, with times before and after the jump."""
    x = normal(40, 3, seed=1)
    x = x @ torch.linalg.inv(torch.linalg.cholesky(x.T @ x / len(x))).T
    small = normal(2, 4, seed=2) / 2
    return [("square", 1e-2 * small, x, 2 * x[:, :1] ** 2, [1.0, 20.0])]


THEORIES = (
    Theory("alternating.two_layers", ref=Ref("agf", "Sec. 2"),
           title="the staircase of any network of two layers from small weights", predict=predict,
           simulate=simulate, cases=_cases, tolerance=1e-2, perturb={"lr": 0.25}),
)
