"""A sum of neurons on data: how those that sleep turn and grow against a residual that does not change, and where those that are
awake settle. What alternating flows are made of (`richter.theory.alternating`).  [agf]"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad, vmap

from richter.theory.flows import FlowError

Neuron = Callable[[Tensor, Tensor], Tensor]  # (parameters [p], inputs [n, ...]) -> outputs [n, c]
NONE, ROUNDING = 1e-8, 1e-13  # utilities below this share of the first ones are none; slopes below the other are rounding
TURN = 0.25  # a step changes nothing by more: parts that shrink count when they grow again, and longer steps shrink them too much
FINE, ROUGH = 3e-4, 30.0  # the error of a step, and by how much that of a short one may be larger
SHORT = 0.1  # a short step, as a share of the longest
STEPS = 100_000  # between two jumps
SETTLING, SETTLED = 300, 5e-3  # steps of active neurons, until none changes faster than this, in units of the labels' pull
VANISHED, AGAIN = 1e-3, 4.0  # an active neuron of this norm, or of so many times that of its start, is asleep again


class Asleep(NamedTuple):
    """Directions on the unit sphere, and accumulated utilities."""

    directions: Float[Tensor, "H p"]
    accumulated: Float[Tensor, " H"]


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

    @property
    def higher(self) -> bool:
        """Is the degree above 2?"""
        return self.degree > 2 + 1e-6

    @cached_property
    def needed(self) -> Float[Tensor, " H"]:
        """c_i: the accumulated utility at which each wakes."""
        return self.rising(self.size)

    def rising(self, norms: Float[Tensor, " h"]) -> Float[Tensor, " h"]:
        """The accumulated utility from these norms to 1."""
        k = self.degree
        return (norms ** (2 - k) - 1) / (k - 2) if self.higher else -norms.log()

    @cached_property
    def smallest(self) -> Float[Tensor, " H"]:
        """Norms below which active neurons have vanished."""
        return (AGAIN * self.size).clamp(min=VANISHED, max=0.5)

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
            d = _unit(slope + 1e-9 * steepest * d)
        return abs(self.lr) * steepest

    # -------------------------------------------------------------------------------------------- asleep

    def climb(self, asleep: Asleep, sleeping: Bool[Tensor, " H"], residual: Float[Tensor, "n c"]
              ) -> tuple[float, Asleep, int] | None:
        """Follow dormant directions, by a Runge-Kutta method of order five, until the first has accumulated what it needs: the
        time that takes, directions and accumulated utilities then, and who it is. None where no utility is positive."""
        who = sleeping.nonzero()[:, 0]
        climbing = _Climbing(self, who, residual, self.pull_of(residual))
        state = torch.cat([asleep.directions[who], asleep.accumulated[who, None]], 1)
        step = _Step(state, climbing.velocity(state), climbing.longest(state, climbing.velocity(state)))
        time = 0.0
        for _ in range(STEPS):
            if climbing.still(step.state, step.speed):
                return None
            longest = climbing.longest(step.state, step.speed)
            before, step = step, step.advanced(climbing.velocity, climbing.error, longest, SHORT * longest)
            if (part := climbing.waking(before, step)) is not None:
                share, first = part
                d, S = climbing.parts(before.between(step, share))
                now = Asleep(asleep.directions.index_copy(0, who, d), asleep.accumulated.index_copy(0, who, S))
                return time + share * step.length, now, int(who[first])
            time += step.length
        raise FlowError(f"after {STEPS} steps no dormant neuron has woken: the largest utility is "
                        f"{float(step.speed[:, -1].max()) / self.lr / self.degree:.3g}. Ask for fewer jumps.")

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

    def settle(self, theta: Float[Tensor, "H p"], awake: Bool[Tensor, " H"], tolerance: float
               ) -> tuple[Float[Tensor, "H p"], Bool[Tensor, " H"]]:
        """All active neurons at a minimum of the loss, to gradients of ``tolerance``, by the flow from where they are; and those
        that it drove to zero, as they were when they vanished."""
        out, gone = theta.clone(), torch.zeros_like(awake)
        while (awake & ~gone).any():
            kept = (awake & ~gone).nonzero()[:, 0]
            out[kept] = self._flowed(out[kept], self.smallest[kept])
            vanished = out[kept].norm(dim=1) <= self.smallest[kept]
            if not vanished.any():
                out[kept] = self._polished(out[kept], tolerance)
                break
            gone[kept[vanished]] = True
        return out, gone

    def _flowed(self, theta: Float[Tensor, "h p"], smallest: Float[Tensor, " h"]) -> Float[Tensor, "h p"]:
        """Down the loss until it has settled nearly, or until one has vanished."""
        def velocity(state: Float[Tensor, "h p"]) -> Float[Tensor, "h p"]:
            return -grad(self.cost)(state)

        def error(off: Float[Tensor, "h p"]) -> float:
            return float((off.norm(dim=1) / (1e-2 + theta.norm(dim=1))).max())

        pull = self.pull / abs(self.lr)
        step = _Step(theta, velocity(theta), 0.01 / pull)
        for _ in range(SETTLING):
            norms, speeds = step.state.norm(dim=1), step.speed.norm(dim=1)
            if (norms <= smallest).any() or (speeds <= SETTLED * pull * norms).all():
                break
            step = step.advanced(velocity, error, 10 / pull, shortest=5e-3 / pull)
        return step.state

    def _polished(self, theta: Float[Tensor, "h p"], tolerance: float) -> Float[Tensor, "h p"]:
        """The minimum that is near, by L-BFGS."""
        from scipy.optimize import minimize
        gtol = 1e-3 * tolerance * float(self.y.square().sum()) / (2 * len(self.y))
        done = minimize(self._downhill, theta.cpu().numpy().reshape(-1), args=(theta,), jac=True, method="L-BFGS-B",
                        options={"maxiter": 2_000, "maxfun": 4_000, "ftol": 1e-15, "gtol": gtol})
        return torch.from_numpy(done.x).to(theta).reshape(theta.shape)

    def _downhill(self, flat: NDArray[np.float64], like: Float[Tensor, "h p"]) -> tuple[float, NDArray[np.float64]]:
        """The loss of active neurons, and its gradient."""
        with torch.enable_grad():
            own = torch.from_numpy(flat.copy()).to(like).reshape(like.shape).requires_grad_()
            loss = self.cost(own)
            (g,) = torch.autograd.grad(loss, own)
        return loss.item(), g.cpu().numpy().reshape(-1)


@dataclass(frozen=True)
class _Climbing:
    """Dormant neurons against a residual. A state is their directions and, in the last column, what they have accumulated."""

    system: Neurons
    who: Tensor
    residual: Float[Tensor, "n c"]
    pull: float

    def parts(self, state: Float[Tensor, "h q"]) -> tuple[Float[Tensor, "h p"], Float[Tensor, " h"]]:
        return _unit(state[:, :-1]), state[:, -1]

    def velocity(self, state: Float[Tensor, "h q"]) -> Float[Tensor, "h q"]:
        """lr |theta|^(k-2) (1 - d d^T) grad U, and lr k U."""
        d, S = self.parts(state)
        slope = self.system.slopes(d, self.residual)
        along = (slope * d).sum(1)  # k U, by Euler
        turn = self.norms(S)[:, None] * (slope - along[:, None] * d)
        return self.system.lr * torch.cat([turn, along[:, None]], 1)

    def norms(self, S: Float[Tensor, " h"]) -> Float[Tensor, " h"]:
        """|theta|^(k-2), 1 at most."""
        k = self.system.degree
        return 1 / (self.system.size[self.who] ** (2 - k) - (k - 2) * S).clamp(min=1.0) if self.system.higher \
            else torch.ones_like(S)

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
        """Does no neuron gain, and none turn? One that loses is at an unstable place, and leaves it however slowly it moves."""
        gain, turn, _ = self.rates(state, speed)
        none = NONE * self.system.pull
        return bool((gain <= none).all() and (turn <= torch.where(gain < -none, ROUNDING * self.system.pull, none)).all())

    def waking(self, before: _Step, after: _Step) -> tuple[float, int] | None:
        """The first, among those that gain, that has what it needs within a step: at which share of it, and which one."""
        needed = self.system.needed[self.who]
        able = ((after.state[:, -1] >= needed) & (after.speed[:, -1] > 0)).nonzero()[:, 0].tolist()
        shares = [(before.share(after, i, float(needed[i])), i) for i in able]
        return min(shares, default=None)


@dataclass(frozen=True)
class _Step:
    """Where a flow is, how fast, and by which step it came; the next one is of the length ``wanted``."""

    state: Tensor
    speed: Tensor
    wanted: float
    length: float = 0.0

    def advanced(self, velocity: Callable[[Tensor], Tensor], error: Callable[[Tensor], float], longest: float,
                 shortest: float) -> _Step:
        """The Runge-Kutta method of Bogacki and Shampine, of order three. A step whose error is above ``FINE`` is repeated, a
        short one only above ``ROUGH`` times that: where gradients jump, as those of ReLU do, errors fall like its length."""
        k1, h = self.speed, min(self.wanted, longest)
        while True:
            k2 = velocity(self.state + h / 2 * k1)
            k3 = velocity(self.state + 3 * h / 4 * k2)
            state = self.state + h * (2 * k1 + 3 * k2 + 4 * k3) / 9
            k4 = velocity(state)
            off = error(h * (-5 / 72 * k1 + k2 / 12 + k3 / 9 - k4 / 8)) / FINE
            if off <= (1 if h > shortest else ROUGH) or h < 1e-6 * shortest:
                return _Step(state, k4, h * min(3.0, 0.9 * max(off, 1e-6) ** (-1 / 3)), h)
            h *= max(0.2, 0.9 * off ** (-1 / 3)) if math.isfinite(off) else 0.2

    def between(self, other: _Step, share: float) -> Tensor:
        """The state at this share of the step to the other, by Hermite's cubic."""
        s, h = share, other.length
        return ((1 + 2 * s) * (1 - s) ** 2 * self.state + s * (1 - s) ** 2 * h * self.speed
                + s * s * (3 - 2 * s) * other.state + s * s * (s - 1) * h * other.speed)

    def share(self, other: _Step, i: int, level: float) -> float:
        """Where the last number of row ``i`` comes to this level."""
        from scipy.optimize import brentq
        ends = _Step(self.state[i, -1], self.speed[i, -1], 0.0), _Step(other.state[i, -1], other.speed[i, -1], 0.0, other.length)
        if float(self.state[i, -1]) >= level:
            return 0.0
        return float(brentq(lambda s: float(ends[0].between(ends[1], s)) - level, 0.0, 1.0))


def _unit(d: Float[Tensor, "h p"]) -> Float[Tensor, "h p"]:
    return d / d.norm(dim=1, keepdim=True)
