"""Integration of the flows of neurons: step by step or, where they are linear, in closed form.  [agf]"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

FINE, ROUGH = 3e-4, 30.0  # error per step, and the factor by which the error of a short step may be larger
# components of a direction below this are rounding errors and are set to zero, so that they cannot grow
SEED = 2 * float(np.finfo(np.float64).eps)
NEWTON = 100  # maximum number of Newton steps


@dataclass(frozen=True)
class FlowStep:
    """The state of a flow, its speed, and the step that led to it. ``wanted``: the length of the next step."""

    state: Tensor
    speed: Tensor
    wanted: float
    length: float = 0.0

    def advanced(self, velocity: Callable[[Tensor], Tensor], error: Callable[[Tensor], float], longest: float,
                 shortest: float) -> FlowStep:
        """Take a step of the Runge-Kutta method of Bogacki and Shampine, of order three. A step with an error above ``FINE`` is
        repeated, a short one only above ``ROUGH`` times that: where gradients jump, as with ReLU, errors only fall in proportion
        to the length."""
        k1, h = self.speed, min(self.wanted, longest)
        while True:
            k2 = velocity(self.state + h / 2 * k1)
            k3 = velocity(self.state + 3 * h / 4 * k2)
            state = self.state + h * (2 * k1 + 3 * k2 + 4 * k3) / 9
            k4 = velocity(state)
            off = error(h * (-5 / 72 * k1 + k2 / 12 + k3 / 9 - k4 / 8)) / FINE
            if off <= (1 if h > shortest else ROUGH) or h < 1e-6 * shortest:
                return FlowStep(state, k4, h * min(3.0, 0.9 * max(off, 1e-6) ** (-1 / 3)), h)
            h *= max(0.2, 0.9 * off ** (-1 / 3)) if math.isfinite(off) else 0.2

    def between(self, other: FlowStep, share: float) -> Tensor:
        """Return the state at a share of the step to ``other``, by cubic Hermite interpolation."""
        s, h = share, other.length
        return ((1 + 2 * s) * (1 - s) ** 2 * self.state + s * (1 - s) ** 2 * h * self.speed
                + s * s * (3 - 2 * s) * other.state + s * s * (s - 1) * h * other.speed)

    def share(self, other: FlowStep, i: int, level: float) -> float:
        """Share of the step at which the last number of row ``i`` reaches this level."""
        from scipy.optimize import brentq
        ends = (FlowStep(self.state[i, -1], self.speed[i, -1], 0.0),
                FlowStep(other.state[i, -1], other.speed[i, -1], 0.0, other.length))
        if float(self.state[i, -1]) >= level:
            return 0.0
        return float(brentq(lambda s: float(ends[0].between(ends[1], s)) - level, 0.0, 1.0))


@dataclass(frozen=True)
class LinearGrowth:
    """The flow theta' = M theta with a symmetric M, so theta(t) = exp(M t) theta(0), in the eigenvectors of M."""

    rates: Float[Tensor, " p"]
    modes: Float[Tensor, "p p"]
    parts: Float[Tensor, "h p"]  # components of each direction along the modes

    @classmethod
    def under(cls, M: Float[Tensor, "p p"], d: Float[Tensor, "h p"]) -> LinearGrowth:
        """Start at the directions ``d``."""
        rates, modes = torch.linalg.eigh((M + M.T) / 2)
        parts = d @ modes
        return cls(rates, modes, torch.where(parts.abs() < SEED, 0.0, parts))

    def logs(self, t: Float[Tensor, " h"]) -> tuple[Float[Tensor, " h"], Float[Tensor, " h"]]:
        """Return log |theta(t)| / |theta(0)|, and its growth rate."""
        twice = 2 * (self.rates * t[:, None] + self.parts.abs().log())
        return twice.logsumexp(1) / 2, (twice.softmax(1) * self.rates).sum(1)

    def directions(self, t: float) -> Float[Tensor, "h p"]:
        """Unit directions of the neurons at time t."""
        exponents = self.rates * t + self.parts.abs().log()
        return unit((exponents - exponents.amax(1, keepdim=True)).exp() * self.parts.sign() @ self.modes.T)

    def reach(self, gains: Float[Tensor, " h"], least: float) -> Float[Tensor, " h"]:
        """Return the times at which each log |theta| has grown by its gain; infinite where no component grows faster than
        ``least``. Newton's method starts from an upper bound, the time that the leading component alone would take: logs are
        convex in t."""
        alone = (gains[:, None] - self.parts.abs().log()) / self.rates
        t = torch.where((self.rates > least) & (self.parts != 0), alone, math.inf).amin(1)
        able = t.isfinite()
        for _ in range(NEWTON):
            logs, speeds = self.logs(torch.where(able, t, 0.0))
            step = torch.where(able & (speeds > 0), (logs - gains) / speeds, 0.0)
            if not (step > 1e-14 * t).any():
                break
            t = t - step.clamp(min=0.0)
        return t.clamp(min=0.0)


def unit(d: Float[Tensor, "h p"]) -> Float[Tensor, "h p"]:
    """Rows divided by their norms."""
    return d / d.norm(dim=1, keepdim=True)


def gradient(value: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Gradient of a scalar function at a point."""
    with torch.enable_grad():
        own = at.detach().requires_grad_()
        return torch.autograd.grad(value(own), own)[0]
