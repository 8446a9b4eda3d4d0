"""Modes that grow by feedback, each independently: the parts of diagonal and linear networks.  [layerwise, Sec. 3.4, Thm. 1]

A mode has weights a and b (numbers, or vectors over hidden units), a strength theta = a . b and a target S:
    a' = v b (S - theta),   b' = v a (S - theta).
Every a + b grows by sqrt(gamma), and every a - b shrinks by it: theta = (plus gamma - minus / gamma) / 2 with
plus = |a(0) + b(0)|^2 / 2 and minus = |a(0) - b(0)|^2 / 2. gamma is that of Theorem 1; with a(0) = b(0), minus = 0 and theta is
the sigmoid of Eq. 3.9. Time may run backwards too: the time at which theta has a given share of S has a closed form.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from richter.core import SelectionError
from richter.core.arrays import Array, ArrayLike, like


@dataclass(frozen=True)
class Growth:
    """Growth of all modes; ``variance`` = v. ``rate`` is the 2 of the time constant 2 v R; tests perturb it."""

    plus: Float[Tensor, " m"]
    minus: Float[Tensor, " m"]
    target: Float[Tensor, " m"]
    variance: Float[Tensor, " m"]
    rate: float = 2.0

    @classmethod
    def start(cls, a: Float[Tensor, "m p"], b: Float[Tensor, "m p"], target: Float[Tensor, " m"], variance: Float[Tensor, " m"],
              rate: float = 2.0) -> Growth:
        """Make the growth of modes from the two layers' weights, one row per mode."""
        plus, minus = ((a + sign * b).square().sum(1) / 2 for sign in (1, -1))
        return cls(plus, minus, target, variance, rate)

    def gamma(self, t: Float[Tensor, " t"]) -> Float[Tensor, "m t"]:
        """Return gamma by Eq. 6.12, corrected, in sums of positive terms. For a target below zero it is the inverse of gamma for
        -S and b -> -b, which exchanges ``plus`` and ``minus``."""
        grows, shrinks, S, R = (z[:, None] for z in self._upward)
        time = self.rate * self.variance[:, None] * t
        E = torch.exp(-R * time)
        moved = torch.where(R > 0, -torch.expm1(-R * time) / R, time)  # (1 - E) / R
        gap = torch.where(R > 0, grows * shrinks / (R + S), 0.0)  # R - S
        gamma = (1 + E + (shrinks + S) * moved) / (2 * E + (gap + grows) * moved)
        return torch.where(self.target[:, None] < 0, 1 / gamma, gamma)

    def strength(self, t: Float[Tensor, " t"]) -> Float[Tensor, "m t"]:
        """Return theta at these times."""
        gamma = self.gamma(t)
        return times(self.plus[:, None], gamma) / 2 - times(self.minus[:, None], 1 / gamma) / 2

    def reach(self, x: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Return the time of theta = S / (1 + e^-x). It is negative if that was before the start, NaN if the curve never has this
        value, and infinite if it is never reached (no target, or a start from which all growth ends at zero)."""
        grows, shrinks, S, R = self._upward
        x = x.to(S.device)
        theta, left = S * torch.sigmoid(x), S * torch.sigmoid(-x)
        r = torch.hypot((grows * shrinks).sqrt(), theta)
        ahead = (1 + shrinks / (R + S)) * left * (1 + (S + theta) / (R + r))
        grown = (theta + r - grows) / grows  # gamma - 1
        when = torch.log1p(2 * R * grown / ahead) / (self.rate * self.variance * R)
        return torch.where((S > 0) & (grows > 0), when, math.inf)

    @property
    def _upward(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(plus, minus, |S|, R), with the first two exchanged where S < 0, so that the target is above zero."""
        down, S = self.target < 0, self.target.abs()
        grows, shrinks = torch.where(down, self.minus, self.plus), torch.where(down, self.plus, self.minus)
        return grows, shrinks, S, torch.hypot(grows.sqrt() * shrinks.sqrt(), S)


def times(weights: Tensor, factor: Tensor) -> Tensor:
    """Multiply, with 0 where the weights are 0, because the factor may then be infinite."""
    return torch.where(weights == 0, 0.0, weights * factor)


# ------------------------------------------------------------------------------------------------ times and stages


class Staged(ABC):
    """Base of models whose modes rise one by one: when each mode emerges, how long it takes, and how far stages overlap. A model
    defines its own times (``_reach``), the number of modes, and the kind of array of the results."""

    @abstractmethod
    def _reach(self, x: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Return the times at which modes have the share 1 / (1 + e^-x) of their targets; negative if before the start, NaN if
        the curve never has this value, infinite if it is never reached."""

    @property
    @abstractmethod
    def _count(self) -> int:
        """Number of modes."""

    @property
    @abstractmethod
    def _kind(self) -> ArrayLike:
        """An array whose kind (numpy or torch, device) the results get."""

    def emergent_time(self, eps: float) -> Array:
        """Time at which each mode has the share ``eps`` of its target [m]; 0 if it starts with more, infinite if it never has it.
        [Eq. 3.12]"""
        when = self._reach(_logit(eps, self._count))
        return like(when.nan_to_num(nan=0.0, posinf=math.inf).clamp(min=0), self._kind)

    def saturation_time(self, eps: float) -> Array:
        """Time from the share ``eps``, below 1/2, to 1 - ``eps`` of each mode [m]; infinite if it never gets there.  [Eq.
        3.12]"""
        x = _logit(eps, self._count, below=0.5)
        late, early = self._reach(-x), self._reach(x)
        return like(torch.where(torch.isfinite(late), late - early, math.inf), self._kind)

    @cached_property
    def stage_eps(self) -> Array:
        """eps [m - 1] with saturation_time(eps)_i = emergent_time(eps)_(i+1) - emergent_time(eps)_i: the overlap of a mode and
        the next. It is 0 if they are far apart, 1/2 if they coincide, and NaN if the mode is never learned or starts beyond its
        target. For small weights it goes to 0, unless there is no hidden layer.  [Eq. 3.13, corrected]
        At this eps the next mode has the share eps when this one has 1 - eps. The first time increases with eps, the second
        decreases, and bisection finds the crossing. From a(0) = b(0) with equal S and start it is
        1 / (1 + (S / theta(0) - 1)^((v_i - v_j) / (v_i + v_j))), j = i + 1.
        """
        half = self._reach(torch.zeros(self._count, dtype=torch.float64))
        low, high = (torch.full_like(half[1:], end) for end in (-700.0, 700.0))
        for _ in range(100):
            x = (low + high) / 2
            later = self._reach(torch.cat([x[:1], x]))[1:] > self._reach(torch.cat([-x, -x[-1:]]))[:-1]
            low, high = torch.where(later, low, x), torch.where(later, x, high)
        known = torch.isfinite(half[:-1]) & ~torch.isnan(half[1:])
        return like(torch.where(known, torch.sigmoid(high), math.nan), self._kind)

    def stage_like(self, eps: float = 0.05) -> Bool[Array, " pairs"]:
        """Whether each mode is learned before the next emerges, up to ``eps`` [m - 1].  [Eq. 3.14]"""
        _logit(eps, 1, below=0.5)
        return self.stage_eps < eps


def _logit(eps: float, modes: int, below: float = 1.0) -> Float[Tensor, " m"]:
    """Logit of eps, one per mode; raise an error unless it is a share."""
    if not (isinstance(eps, (int, float, np.number)) and 0 < eps < below):
        raise SelectionError(f"eps={eps!r}: a share of the target between 0 and {below:g} is needed, e.g. 0.05.")
    return torch.full((modes,), math.log(float(eps) / (1 - float(eps))), dtype=torch.float64)
