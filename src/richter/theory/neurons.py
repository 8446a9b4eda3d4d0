"""A sum of neurons on data: how dormant neurons turn and grow while the residual is constant, and where active neurons converge.
Used by alternating gradient flows (`richter.theory.alternating`).  [agf]"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad, jacrev, vmap

from richter.theory.arrays import normal
from richter.theory.stepping import FlowStep, LinearGrowth, gradient, unit

Neuron = Callable[[Tensor, Tensor], Tensor]  # (parameters [p], inputs [n, ...]) -> outputs [n, c]
# shares of the first utilities below which utilities count as zero; slopes below ROUNDING are rounding errors
NONE, ROUNDING = 1e-8, 1e-15
PAIRS = 16  # pairs of parameters on which the neuron is tested for being a quadratic form
# largest change in one step; longer steps would shrink decaying components too much, and they matter when they grow again
TURN = 0.25
SHORT = 0.1  # a short step, as a share of the longest
STEPS = 100_000  # maximum number between two jumps
SETTLING, SETTLED = 300, 5e-3  # steps of active neurons, until none changes faster than SETTLED, in units of the labels' pull
# time for which active neurons move on from a minimum with a remaining slope, in these units, and the number of repetitions
ONWARD, ROUNDS = 10.0, 30
DENSE, FLAT = 600, 1e-6  # parameters up to which the Hessian of the loss is formed; relative size of a flat direction
CONE = 0.1  # relative deviation from linearity up to which two directions lie in one cone, except for a few examples
# an active neuron whose norm falls to this share of its activation norm, or to this multiple of its initial norm, is dormant
# again
VANISHED, AGAIN = 1e-3, 4.0


class Asleep(NamedTuple):
    """Dormant neurons: directions on the unit sphere, and accumulated utilities."""

    directions: Float[Tensor, "H p"]
    accumulated: Float[Tensor, " H"]


class Settled(NamedTuple):
    """Active neurons at a minimum of the loss."""

    theta: Float[Tensor, "H p"]
    gone: Bool[Tensor, " H"]  # neurons that the flow drove to zero, with their last values before
    left: float  # remaining gradient norm, in units of the first loss over the norm of a neuron


@dataclass(frozen=True)
class Neurons:
    """The network sum_i neuron(theta_i, x), its loss mean_n |y - f|^2 / 2, and its initial neurons."""

    neuron: Neuron
    x: Tensor
    y: Float[Tensor, "n c"]
    degree: float
    lr: float
    start: Float[Tensor, "H p"]  # initial directions
    size: Float[Tensor, " H"]  # initial norms
    unit: float = 1.0  # norm at which a neuron becomes active

    def outputs(self, theta: Float[Tensor, "H p"]) -> Float[Tensor, "n c"]:
        """Sum of all neurons' outputs."""
        return vmap(self.neuron, (0, None))(theta, self.x).sum(0)

    def cost(self, theta: Float[Tensor, "H p"]) -> Float[Tensor, ""]:
        """Half of the mean squared error, differentiable."""
        return (self.y - self.outputs(theta)).square().sum() / (2 * len(self.y))

    def loss(self, theta: Float[Tensor, "H p"]) -> float:
        """Half of the mean squared error, as a number."""
        return self.cost(theta).item()

    def utility(self, theta: Float[Tensor, " p"], residual: Float[Tensor, "n c"]) -> Float[Tensor, ""]:
        """Utility of a neuron, E<f_i, r> of its output and the residual."""
        return (self.neuron(theta, self.x) * residual).sum() / len(self.y)

    def slopes(self, theta: Float[Tensor, "H p"], residual: Float[Tensor, "n c"]) -> Float[Tensor, "H p"]:
        """Gradients of the utilities of several neurons; each depends on its own parameters alone."""
        return gradient(lambda own: (vmap(self.neuron, (0, None))(own, self.x) * residual).sum() / len(self.y), theta)

    def rest(self, direction: Float[Tensor, " p"], residual: Float[Tensor, "n c"]) -> float:
        """Norm at which a neuron of this direction lowers the loss most, if its utility is positive."""
        power = self.neuron(direction, self.x).square().sum() / len(self.y)
        return float(self.utility(direction, residual) / power) ** (1 / self.degree)

    @property
    def higher(self) -> bool:
        """Whether the degree is above 2."""
        return self.degree > 2 + 1e-6

    @cached_property
    def needed(self) -> Float[Tensor, " H"]:
        """Return c_i, the accumulated utility at which each neuron becomes active."""
        return self.rising(self.size)

    def rising(self, norms: Float[Tensor, " h"]) -> Float[Tensor, " h"]:
        """Accumulated utility needed to grow from these norms to the norm of active neurons."""
        k = self.degree
        return (norms ** (2 - k) - self.unit ** (2 - k)) / (k - 2) if self.higher else (self.unit / norms).log()

    @cached_property
    def first(self) -> float:
        """Loss without any neuron."""
        return float(self.y.square().sum()) / (2 * len(self.y))

    @cached_property
    def quadratic(self) -> bool:
        """Whether the neuron is a quadratic form of its parameters, by f(a + b) + f(a - b) = 2 f(a) + 2 f(b)."""
        a, b = normal(2, PAIRS, self.start.shape[1]).to(self.start)
        plus, minus, one, other = (vmap(self.neuron, (0, None))(v, self.x) for v in (a + b, a - b, a, b))
        return not self.higher and bool((plus + minus - 2 * one - 2 * other).norm() < 1e-10 * plus.norm())

    @cached_property
    def pull(self) -> float:
        """Pull of the labels: the largest turning speed under the residual y."""
        return self.pull_of(self.y)

    def pull_of(self, residual: Float[Tensor, "n c"]) -> float:
        """Approximate largest turning speed of directions of norm 1: the largest gradient of the utility during a climb from the
        initial directions, with steps along the gradient."""
        d, steepest = self.start, 0.0
        for _ in range(10):
            slope = self.slopes(d, residual)
            steepest = max(steepest, float(slope.norm(dim=1).max()))
            d = unit(slope + 1e-9 * steepest * d)
        return abs(self.lr) * steepest

    # ------------------------------------------------------------------------------------------------ dormant neurons

    def climb(self, asleep: Asleep, sleeping: Bool[Tensor, " H"], residual: Float[Tensor, "n c"]
              ) -> tuple[float, Asleep, int] | None:
        """Follow dormant directions until the first one has accumulated the utility that it needs. Return this time, the
        directions and accumulated utilities at that time, and the index of the neuron; None if no utility becomes positive."""
        who = sleeping.nonzero()[:, 0]
        follow = self._grown if self.quadratic else self._stepped
        if (woken := follow(who, asleep.directions[who], asleep.accumulated[who], residual)) is None:
            return None
        time, d, S, first = woken
        now = Asleep(asleep.directions.index_copy(0, who, d), asleep.accumulated.index_copy(0, who, S))
        return time, now, int(who[first])

    def _grown(self, who: Tensor, d: Float[Tensor, "h p"], S: Float[Tensor, " h"], residual: Float[Tensor, "n c"]
               ) -> tuple[float, Tensor, Tensor, int] | None:
        """Follow dormant directions of quadratic forms, in closed form."""
        growth = LinearGrowth.under(self.lr * self.slopes(torch.eye(d.shape[1]).to(d), residual), d)
        times = growth.reach((self.needed[who] - S).clamp(min=0.0), NONE * self.pull)
        first = int(times.argmin())
        if not math.isfinite(time := float(times[first])):
            return None
        logs, _ = growth.logs(times[first].expand(len(d)))
        return time, growth.directions(time), S + logs, first

    def _stepped(self, who: Tensor, d: Float[Tensor, "h p"], S: Float[Tensor, " h"], residual: Float[Tensor, "n c"]
                 ) -> tuple[float, Tensor, Tensor, int] | None:
        """Follow dormant directions with a Runge-Kutta method of order three."""
        climbing, time = _Climbing(self, who, residual, self.pull_of(residual)), 0.0
        state = torch.cat([d, S[:, None]], 1)
        speed = climbing.velocity(state)
        step = FlowStep(state, speed, climbing.longest(state, speed))
        for _ in range(STEPS):
            if climbing.still(step.state, step.speed):
                return None
            longest = climbing.longest(step.state, step.speed)
            before, step = step, step.advanced(climbing.velocity, climbing.error, longest, SHORT * longest)
            if (part := climbing.waking(before, step)) is not None:
                share, first = part
                return time + share * step.length, *climbing.parts(before.between(step, share)), first
            time += step.length
        warnings.warn(f"after {STEPS} steps no dormant neuron has woken: the largest utility is "
                      f"{float(step.speed[:, -1].max()) / self.lr / self.degree:.3g}. The staircase ends here; later jumps, if "
                      f"there are any, are not seen.", stacklevel=2)
        return None

    def carried(self, asleep: Asleep, before: Float[Tensor, "a p"], after: Float[Tensor, "a p"], residual: Float[Tensor, "n c"]
                ) -> Asleep:
        """Turn dormant directions while active neurons move from ``before`` to ``after``. With degree 2 dormant directions turn
        as fast as active neurons: the component of a direction along active neurons in its cone moves with them, because all of
        them follow one linear flow there. The remaining component is small and stays. With a higher degree dormant neurons are
        too small to turn."""
        if self.higher:
            return asleep
        directions = asleep.directions.clone()
        for j, d in enumerate(directions):
            if (near := self._in_cone(d, before, residual)).any():
                share = torch.linalg.lstsq(before[near].T, d[:, None]).solution[:, 0]
                directions[j] = d + share @ (after[near] - before[near])
        return Asleep(unit(directions), asleep.accumulated)

    def _in_cone(self, d: Float[Tensor, " p"], active: Float[Tensor, "a p"], residual: Float[Tensor, "n c"]
                 ) -> Bool[Tensor, " a"]:
        """Find the active neurons that see the data as this direction does: gradients of utilities are then linear between the
        two."""
        together, own, theirs = (self.slopes(v, residual) for v in (unit(active) + d, d[None], unit(active)))
        return (together - own - theirs).norm(dim=1) <= CONE * together.norm(dim=1)

    def returned(self, asleep: Asleep, who: Bool[Tensor, " H"], vanishing: Float[Tensor, "H p"], residual: Float[Tensor, "n c"]
                 ) -> Asleep:
        """Make neurons dormant again whose norms fell to zero, starting from their norm of 1. The flow down is followed
        backwards, because its time is negligible. Their directions are then next to an unstable point, where utilities are
        lowest."""
        directions, accumulated = asleep.directions.clone(), asleep.accumulated.clone()
        norms = vanishing[who].norm(dim=1)
        directions[who] = vanishing[who] / norms[:, None]
        accumulated[who] = self.needed[who] - self.rising(norms)
        out, back = Asleep(directions, accumulated), replace(self, lr=-self.lr)
        for i in who.nonzero()[:, 0]:
            alone = torch.zeros_like(who).index_fill(0, i, True)
            if self.utility(directions[i], residual) < 0 and (risen := back.climb(out, alone, residual)) is not None:
                out = risen[1]
        return out

    # ------------------------------------------------------------------------------------------------ active neurons

    def settle(self, theta: Float[Tensor, "H p"], awake: Bool[Tensor, " H"], rests: Float[Tensor, " H"], tolerance: float
               ) -> Settled:
        """Move all active neurons to a minimum of the loss, along the flow from their current values. Stop when the gradient is
        below a thousandth of ``tolerance``. At a minimum where the gradient jumps (a kink of ReLU), stop when the flow no longer
        lowers the loss by ``tolerance`` times the first loss. ``rests``: norms that the neurons have when they become active."""
        out, gone, level = theta.clone(), torch.zeros_like(awake), math.inf
        smallest = torch.minimum(torch.maximum(AGAIN * self.size, VANISHED * rests), rests / 2)
        fell = left = math.nan
        for _ in range(ROUNDS + len(theta)):
            kept = (awake & ~gone).nonzero()[:, 0]
            if not len(kept):
                return Settled(out, gone, 0.0)
            scale = float(rests[kept].max())
            flowed = self._flowed(out[kept], smallest[kept], scale, ONWARD if math.isfinite(level) else 0.0)
            if (vanished := flowed.norm(dim=1) <= smallest[kept]).any():
                out[kept], gone[kept[vanished]], level = flowed, True, math.inf
                continue
            fell = (level - self.loss(flowed)) / self.first
            if fell <= tolerance:
                return Settled(out, gone, left)
            polished = self._polished(flowed, tolerance, scale)
            lost = polished.norm(dim=1) <= smallest[kept]
            out[kept] = torch.where(lost[:, None], unit(flowed) * smallest[kept, None], polished)
            gone[kept[lost]] = True
            level, left = math.inf if lost.any() else self.loss(polished), self._left(polished, scale)
            if left <= 1e-3 * tolerance and not lost.any():
                return Settled(out, gone, left)
        warnings.warn(f"active neurons are not at a minimum of the loss: a gradient of {left:.2g} is left, in units of the first "
                      f"loss over their norm, and the loss still falls by {fell:.2g} of the first where {tolerance:.2g} is asked "
                      f"for. Take the level for an upper bound, or a larger tolerance.", stacklevel=2)
        return Settled(out, gone, left)

    def _left(self, theta: Float[Tensor, "h p"], scale: float) -> float:
        """Norm of the loss gradient, in units of the first loss over a norm."""
        return float(gradient(self.cost, theta).norm()) * scale / self.first

    def _flowed(self, theta: Float[Tensor, "h p"], smallest: Float[Tensor, " h"], scale: float, least: float
                ) -> Float[Tensor, "h p"]:
        """Follow the flow until the loss has nearly settled, for a time of at least ``least`` in units of the labels' pull, or
        until one neuron has vanished."""
        def velocity(state: Float[Tensor, "h p"]) -> Float[Tensor, "h p"]:
            return -gradient(self.cost, state)

        def error(off: Float[Tensor, "h p"]) -> float:
            return float((off.norm(dim=1) / (1e-2 * scale + theta.norm(dim=1))).max())

        pull = self.pull / abs(self.lr) * scale ** (self.degree - 2)
        step, time = FlowStep(theta, velocity(theta), 0.1 / pull), 0.0
        for _ in range(SETTLING):
            norms, speeds = step.state.norm(dim=1), step.speed.norm(dim=1)
            if (norms <= smallest).any() or (time >= least / pull and (speeds <= SETTLED * pull * norms).all()):
                break
            step = step.advanced(velocity, error, 10 / pull, shortest=5e-3 / pull)
            time += step.length
        return step.state

    def _polished(self, theta: Float[Tensor, "h p"], tolerance: float, scale: float) -> Float[Tensor, "h p"]:
        """Find the nearby minimum by L-BFGS, in units of the first loss and of a norm, and then by Newton steps."""
        from scipy.optimize import minimize

        def downhill(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            own = torch.from_numpy(scale * flat).to(theta).reshape(theta.shape)
            slope = scale / self.first * gradient(self.cost, own)
            return self.loss(own) / self.first, slope.cpu().numpy().reshape(-1)

        done = minimize(downhill, theta.cpu().numpy().reshape(-1) / scale, jac=True, method="L-BFGS-B",
                        options={"maxiter": 2_000, "maxfun": 4_000, "ftol": 1e-15, "gtol": 1e-4 * tolerance})
        return self._finished(torch.from_numpy(scale * done.x).to(theta).reshape(theta.shape), scale)

    def _finished(self, theta: Float[Tensor, "h p"], scale: float) -> Float[Tensor, "h p"]:
        """Take Newton steps while the loss is convex and the gradient halves, down to rounding errors. With degree 2 the
        components of dormant neurons that matter later are that small."""
        slope = gradient(self.cost, theta)
        while slope.any() and not self.higher and theta.numel() <= DENSE:
            H = jacrev(grad(self.cost))(theta).reshape(theta.numel(), -1)
            # rotations of parameters that do not change the outputs
            flat = 2 * slope.norm() / scale + FLAT * H.diagonal().abs().max()
            root, saddle = torch.linalg.cholesky_ex(H + flat * torch.eye(len(H)).to(H))
            if saddle:
                break
            after = theta - torch.cholesky_solve(slope.reshape(-1, 1), root).reshape(theta.shape)
            new = gradient(self.cost, after)
            if not new.norm() < slope.norm() / 2:
                break
            theta, slope = after, new
        return theta


@dataclass(frozen=True)
class _Climbing:
    """Dormant neurons under a residual. A state holds their directions and, in the last column, their accumulated utilities."""

    system: Neurons
    who: Tensor
    residual: Float[Tensor, "n c"]
    pull: float

    def parts(self, state: Float[Tensor, "h q"]) -> tuple[Float[Tensor, "h p"], Float[Tensor, " h"]]:
        """Split the state into unit directions and accumulated utilities."""
        return unit(state[:, :-1]), state[:, -1]

    def velocity(self, state: Float[Tensor, "h q"]) -> Float[Tensor, "h q"]:
        """Return lr |theta|^(k-2) (1 - d d^T) grad U, and lr k U."""
        d, S = self.parts(state)
        slope = self.system.slopes(d, self.residual)
        along = (slope * d).sum(1)  # k U, by Euler
        turn = self.norms(S)[:, None] * (slope - along[:, None] * d)
        return self.system.lr * torch.cat([turn, along[:, None]], 1)

    def norms(self, S: Float[Tensor, " h"]) -> Float[Tensor, " h"]:
        """Return |theta|^(k-2), capped at the value of an active neuron."""
        k = self.system.degree
        return 1 / (self.system.size[self.who] ** (2 - k) - (k - 2) * S).clamp(min=self.system.unit ** (2 - k)) \
            if self.system.higher else torch.ones_like(S)

    def error(self, off: Float[Tensor, "h q"]) -> float:
        """Largest error of a step, relative to its tolerance."""
        return float(torch.maximum(off[:, :-1].norm(dim=1), off[:, -1].abs() / self.system.needed[self.who]).max())

    def rates(self, state: Float[Tensor, "h q"], speed: Float[Tensor, "h q"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rate of accumulation, the turning rate at norm 1, and |theta|^(k-2)."""
        norms = self.norms(state[:, -1])
        return speed[:, -1], speed[:, :-1].norm(dim=1) / norms, norms

    def longest(self, state: Float[Tensor, "h q"], speed: Float[Tensor, "h q"]) -> float:
        """Length of a step in which the fastest neuron changes by ``TURN``. Near a saddle of the utility the speed is almost
        zero, but deviations grow at this rate."""
        gain, turn, norms = self.rates(state, speed)
        least = max(self.pull, NONE * self.system.pull) * float(norms.max())
        return TURN / max(float((norms * torch.hypot(gain, turn)).max()), least)

    def still(self, state: Float[Tensor, "h q"], speed: Float[Tensor, "h q"]) -> bool:
        """Whether no neuron accumulates utility and none turns. With degree 2, a neuron that turns by more than rounding leaves a
        saddle of the utility, however slowly, unless all slopes are zero."""
        gain, turn, _ = self.rates(state, speed)
        none = NONE * self.system.pull
        slow = none if self.system.higher or self.pull <= none else ROUNDING * self.system.pull
        return bool((gain <= none).all() and (turn <= slow).all())

    def waking(self, before: FlowStep, after: FlowStep) -> tuple[float, int] | None:
        """Find the first neuron that reaches its needed utility within a step: the share of the step, and its index."""
        needed = self.system.needed[self.who]
        able = ((after.state[:, -1] >= needed) & (after.speed[:, -1] > 0)).nonzero()[:, 0].tolist()
        shares = [(before.share(after, i, float(needed[i])), i) for i in able]
        return min(shares, default=None)
