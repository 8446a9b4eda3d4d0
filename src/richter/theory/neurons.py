"""A sum of neurons on data: how those that sleep turn and grow against a residual that does not change, and where those that are
awake settle. What alternating flows are made of (`richter.theory.alternating`).  [agf]"""

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
from richter.theory.stepping import Growth, Step, gradient, unit

Neuron = Callable[[Tensor, Tensor], Tensor]  # (parameters [p], inputs [n, ...]) -> outputs [n, c]
NONE, ROUNDING = 1e-8, 1e-15  # utilities below this share of the first ones are none; slopes below the other are rounding
PAIRS = 16  # of parameters, by which a neuron is seen to be a quadratic form of them
TURN = 0.25  # a step changes nothing by more: parts that shrink count when they grow again, and longer steps shrink them too much
SHORT = 0.1  # a short step, as a share of the longest
STEPS = 100_000  # between two jumps
SETTLING, SETTLED = 300, 5e-3  # steps of active neurons, until none changes faster than this, in units of the labels' pull
ONWARD, ROUNDS = 10.0, 30  # how long they flow on from a minimum that has a slope, in these units, and how many times
DENSE, FLAT = 600, 1e-6  # parameters up to which the loss has a matrix of second derivatives; what is flat in it
CONE = 0.1  # of a gradient: where it is linear to this, two directions lie in one cone, but for few examples
VANISHED, AGAIN = 1e-3, 4.0  # an active neuron of this share of the norm it woke to, or of so many times its start, sleeps again


class Asleep(NamedTuple):
    """Directions on the unit sphere, and accumulated utilities."""

    directions: Float[Tensor, "H p"]
    accumulated: Float[Tensor, " H"]


class Settled(NamedTuple):
    """Active neurons at a minimum of the loss."""

    theta: Float[Tensor, "H p"]
    gone: Bool[Tensor, " H"]  # those that the flow drove to zero, as they were when they vanished
    left: float  # of the gradient, in units of the first loss over the norm of a neuron


@dataclass(frozen=True)
class Neurons:
    """sum_i neuron(theta_i, x), its loss mean_n |y - f|^2 / 2, and where its neurons start."""

    neuron: Neuron
    x: Tensor
    y: Float[Tensor, "n c"]
    degree: float
    lr: float
    start: Float[Tensor, "H p"]  # directions at the start
    size: Float[Tensor, " H"]  # and norms
    unit: float = 1.0  # the norm at which one wakes

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
        """The gradients of the utilities of several; each depends on its own parameters alone."""
        return gradient(lambda own: (vmap(self.neuron, (0, None))(own, self.x) * residual).sum() / len(self.y), theta)

    def rest(self, direction: Float[Tensor, " p"], residual: Float[Tensor, "n c"]) -> float:
        """The norm at which a neuron of this direction lowers the loss most, if its utility is positive."""
        power = self.neuron(direction, self.x).square().sum() / len(self.y)
        return float(self.utility(direction, residual) / power) ** (1 / self.degree)

    @property
    def higher(self) -> bool:
        """Is the degree above 2?"""
        return self.degree > 2 + 1e-6

    @cached_property
    def needed(self) -> Float[Tensor, " H"]:
        """c_i: the accumulated utility at which each wakes."""
        return self.rising(self.size)

    def rising(self, norms: Float[Tensor, " h"]) -> Float[Tensor, " h"]:
        """The accumulated utility from these norms to the one at which neurons wake."""
        k = self.degree
        return (norms ** (2 - k) - self.unit ** (2 - k)) / (k - 2) if self.higher else (self.unit / norms).log()

    @cached_property
    def first(self) -> float:
        """The loss without any neuron."""
        return float(self.y.square().sum()) / (2 * len(self.y))

    @cached_property
    def quadratic(self) -> bool:
        """Is the neuron a quadratic form of its parameters, as linear ones are? By f(a + b) + f(a - b) = 2 f(a) + 2 f(b)."""
        a, b = normal(2, PAIRS, self.start.shape[1]).to(self.start)
        plus, minus, one, other = (vmap(self.neuron, (0, None))(v, self.x) for v in (a + b, a - b, a, b))
        return not self.higher and bool((plus + minus - 2 * one - 2 * other).norm() < 1e-10 * plus.norm())

    @cached_property
    def pull(self) -> float:
        """That of the labels."""
        return self.pull_of(self.y)

    def pull_of(self, residual: Float[Tensor, "n c"]) -> float:
        """How fast directions of norm 1 turn at most, about: the largest gradient of the utility on the way up from the start, by
        steps that go where the gradient points."""
        d, steepest = self.start, 0.0
        for _ in range(10):
            slope = self.slopes(d, residual)
            steepest = max(steepest, float(slope.norm(dim=1).max()))
            d = unit(slope + 1e-9 * steepest * d)
        return abs(self.lr) * steepest

    # -------------------------------------------------------------------------------------------- asleep

    def climb(self, asleep: Asleep, sleeping: Bool[Tensor, " H"], residual: Float[Tensor, "n c"]
              ) -> tuple[float, Asleep, int] | None:
        """Follow dormant directions until the first has accumulated what it needs: the time that takes, directions and
        accumulated utilities then, and who it is. None where no utility becomes positive."""
        who = sleeping.nonzero()[:, 0]
        follow = self._grown if self.quadratic else self._stepped
        if (woken := follow(who, asleep.directions[who], asleep.accumulated[who], residual)) is None:
            return None
        time, d, S, first = woken
        now = Asleep(asleep.directions.index_copy(0, who, d), asleep.accumulated.index_copy(0, who, S))
        return time, now, int(who[first])

    def _grown(self, who: Tensor, d: Float[Tensor, "h p"], S: Float[Tensor, " h"], residual: Float[Tensor, "n c"]
               ) -> tuple[float, Tensor, Tensor, int] | None:
        """Of quadratic forms, in closed form."""
        growth = Growth.under(self.lr * self.slopes(torch.eye(d.shape[1]).to(d), residual), d)
        times = growth.reach((self.needed[who] - S).clamp(min=0.0), NONE * self.pull)
        first = int(times.argmin())
        if not math.isfinite(time := float(times[first])):
            return None
        logs, _ = growth.logs(times[first].expand(len(d)))
        return time, growth.directions(time), S + logs, first

    def _stepped(self, who: Tensor, d: Float[Tensor, "h p"], S: Float[Tensor, " h"], residual: Float[Tensor, "n c"]
                 ) -> tuple[float, Tensor, Tensor, int] | None:
        """By a Runge-Kutta method of order three."""
        climbing, time = _Climbing(self, who, residual, self.pull_of(residual)), 0.0
        state = torch.cat([d, S[:, None]], 1)
        speed = climbing.velocity(state)
        step = Step(state, speed, climbing.longest(state, speed))
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
        """Dormant directions, when active neurons have gone from ``before`` to ``after``. With degree 2 they turn as fast as
        those: what a direction has of active neurons in its cone goes with them, because there all follow one linear flow; the
        rest, which is small where it has turned to one, stays. With a higher degree they are too small to turn."""
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
        """Which active neurons see the data as this direction does? Gradients of utilities are linear between the two then."""
        together, own, theirs = (self.slopes(v, residual) for v in (unit(active) + d, d[None], unit(active)))
        return (together - own - theirs).norm(dim=1) <= CONE * together.norm(dim=1)

    def returned(self, asleep: Asleep, who: Bool[Tensor, " H"], vanishing: Float[Tensor, "H p"], residual: Float[Tensor, "n c"]
                 ) -> Asleep:
        """Those whose norms fell to zero sleep again, from where they had norm 1: the way down is followed back, because its time
        did not count. Their directions are then next to an unstable place, where utilities are lowest."""
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

    # -------------------------------------------------------------------------------------------- awake

    def settle(self, theta: Float[Tensor, "H p"], awake: Bool[Tensor, " H"], rests: Float[Tensor, " H"], tolerance: float
               ) -> Settled:
        """All active neurons at a minimum of the loss, by the flow from where they are: until the gradient is below a thousandth
        of ``tolerance``, or, at a minimum where the gradient jumps (a kink of ReLU), until the flow from there no longer lowers
        the loss by ``tolerance`` of the first. ``rests`` are norms to which neurons woke."""
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
        """The gradient of the loss, in units of the first loss over a norm."""
        return float(gradient(self.cost, theta).norm()) * scale / self.first

    def _flowed(self, theta: Float[Tensor, "h p"], smallest: Float[Tensor, " h"], scale: float, least: float
                ) -> Float[Tensor, "h p"]:
        """Down the loss until it has settled nearly, but for a time of ``least`` in units of the labels' pull; or until one has
        vanished."""
        def velocity(state: Float[Tensor, "h p"]) -> Float[Tensor, "h p"]:
            return -gradient(self.cost, state)

        def error(off: Float[Tensor, "h p"]) -> float:
            return float((off.norm(dim=1) / (1e-2 * scale + theta.norm(dim=1))).max())

        pull = self.pull / abs(self.lr) * scale ** (self.degree - 2)
        step, time = Step(theta, velocity(theta), 0.1 / pull), 0.0
        for _ in range(SETTLING):
            norms, speeds = step.state.norm(dim=1), step.speed.norm(dim=1)
            if (norms <= smallest).any() or (time >= least / pull and (speeds <= SETTLED * pull * norms).all()):
                break
            step = step.advanced(velocity, error, 10 / pull, shortest=5e-3 / pull)
            time += step.length
        return step.state

    def _polished(self, theta: Float[Tensor, "h p"], tolerance: float, scale: float) -> Float[Tensor, "h p"]:
        """The minimum that is near: by L-BFGS, in units of the first loss and of a norm, and then by Newton's steps."""
        from scipy.optimize import minimize

        def downhill(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            own = torch.from_numpy(scale * flat).to(theta).reshape(theta.shape)
            slope = scale / self.first * gradient(self.cost, own)
            return self.loss(own) / self.first, slope.cpu().numpy().reshape(-1)

        done = minimize(downhill, theta.cpu().numpy().reshape(-1) / scale, jac=True, method="L-BFGS-B",
                        options={"maxiter": 2_000, "maxfun": 4_000, "ftol": 1e-15, "gtol": 1e-4 * tolerance})
        return self._finished(torch.from_numpy(scale * done.x).to(theta).reshape(theta.shape), scale)

    def _finished(self, theta: Float[Tensor, "h p"], scale: float) -> Float[Tensor, "h p"]:
        """Newton's steps as long as the loss is convex and they halve the gradient: down to rounding, because with degree 2 the
        parts of dormant neurons that count later are as small as that."""
        slope = gradient(self.cost, theta)
        while slope.any() and not self.higher and theta.numel() <= DENSE:
            H = jacrev(grad(self.cost))(theta).reshape(theta.numel(), -1)
            flat = 2 * slope.norm() / scale + FLAT * H.diagonal().abs().max()  # turns of parameters that change no output
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
    """Dormant neurons against a residual. A state is their directions and, in the last column, what they have accumulated."""

    system: Neurons
    who: Tensor
    residual: Float[Tensor, "n c"]
    pull: float

    def parts(self, state: Float[Tensor, "h q"]) -> tuple[Float[Tensor, "h p"], Float[Tensor, " h"]]:
        return unit(state[:, :-1]), state[:, -1]

    def velocity(self, state: Float[Tensor, "h q"]) -> Float[Tensor, "h q"]:
        """lr |theta|^(k-2) (1 - d d^T) grad U, and lr k U."""
        d, S = self.parts(state)
        slope = self.system.slopes(d, self.residual)
        along = (slope * d).sum(1)  # k U, by Euler
        turn = self.norms(S)[:, None] * (slope - along[:, None] * d)
        return self.system.lr * torch.cat([turn, along[:, None]], 1)

    def norms(self, S: Float[Tensor, " h"]) -> Float[Tensor, " h"]:
        """|theta|^(k-2), at most as it is when they wake."""
        k = self.system.degree
        return 1 / (self.system.size[self.who] ** (2 - k) - (k - 2) * S).clamp(min=self.system.unit ** (2 - k)) \
            if self.system.higher else torch.ones_like(S)

    def error(self, off: Float[Tensor, "h q"]) -> float:
        return float(torch.maximum(off[:, :-1].norm(dim=1), off[:, -1].abs() / self.system.needed[self.who]).max())

    def rates(self, state: Float[Tensor, "h q"], speed: Float[Tensor, "h q"]) -> tuple[Tensor, Tensor, Tensor]:
        """How fast each gains, how fast it would turn with norm 1, and |theta|^(k-2)."""
        norms = self.norms(state[:, -1])
        return speed[:, -1], speed[:, :-1].norm(dim=1) / norms, norms

    def longest(self, state: Float[Tensor, "h q"], speed: Float[Tensor, "h q"]) -> float:
        """A step in which the fastest changes by ``TURN``: near a saddle of the utility nothing seems to move, but what leaves it
        grows at this rate."""
        gain, turn, norms = self.rates(state, speed)
        least = max(self.pull, NONE * self.system.pull) * float(norms.max())
        return TURN / max(float((norms * torch.hypot(gain, turn)).max()), least)

    def still(self, state: Float[Tensor, "h q"], speed: Float[Tensor, "h q"]) -> bool:
        """Does no neuron gain, and none turn? One of degree 2 that turns by more than rounding leaves a saddle of the utility,
        however slowly it moves; unless slopes are none everywhere."""
        gain, turn, _ = self.rates(state, speed)
        none = NONE * self.system.pull
        slow = none if self.system.higher or self.pull <= none else ROUNDING * self.system.pull
        return bool((gain <= none).all() and (turn <= slow).all())

    def waking(self, before: Step, after: Step) -> tuple[float, int] | None:
        """The first, among those that gain, that has what it needs within a step: at which share of it, and which one."""
        needed = self.system.needed[self.who]
        able = ((after.state[:, -1] >= needed) & (after.speed[:, -1] > 0)).nonzero()[:, 0].tolist()
        shares = [(before.share(after, i, float(needed[i])), i) for i in able]
        return min(shares, default=None)
