"""The smallest network that learns the parity of three bits: three ReLU units with shared weights.  [layerwise, App. C.4]

    f = -2 alpha^2 h_1 + beta^2 h_2 + gamma^2 h_3 + c,   h_1 = relu(x_2 - x_1 - x_3),  h_2 = relu(1 + x_2 - x_1 - x_3),
                                                          h_3 = relu(x_1 - x_2 + x_3 - 1),

on all eight inputs, with the loss mean (f - y)^2 / 2, y = S (-1)^(x_1 + x_2 + x_3). It fits at alpha = beta = gamma = sqrt(2 S),
c = -S. Each unit is a mode with its own near-sigmoid curve, so their sum saturates later than one sigmoid would.
Eqs. C.15-C.18 are printed with all signs reversed, with (2, 5) for the (4, 7) of beta, and without the factor 4 between the
squares and c; that form is named "text". c does not grow first: the targets sum to 0, so c follows the units, and ends at -S.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Ref, SelectionError, unknown
from richter.core.arrays import Array, ArrayLike, like
from richter.theory.arrays import normal, read, times_from_zero
from richter.theory.flows import flow
from richter.theory.frame import Theory

Form = Literal["corrected", "text"]


class UnitModes(NamedTuple):
    """R / S of the three units [3, t], whose sum is the skill strength, and the loss [t]."""

    strength: Array
    loss: Array


def velocities(states: ArrayLike, target: float, lr: float = 1.0, *, form: Form = "corrected") -> Array:
    """Return d/dt of (alpha^2, beta^2, gamma^2, c) at states [n, 4] of these numbers.  [Eqs. C.15-C.18, corrected]"""
    (z,) = read(states=(states, "n four"))
    if z.shape[1] != 4 or bool((z[:, :3] < 0).any()):
        raise SelectionError(f"states of shape {tuple(z.shape)}, squares from {z[:, :3].min().item():g} on: rows (alpha^2, "
                             f"beta^2, gamma^2, c) are needed, squares from 0 on.")
    if form not in EQUATIONS:
        raise unknown("the network of three units", "form", form, EQUATIONS)
    return like(lr * torch.stack(EQUATIONS[form](*z.unbind(1), target), 1), states)


def _corrected(a: Any, b: Any, g: Any, c: Any, S: float) -> list[Any]:
    """Right-hand side of the equations, corrected."""
    return [a * (S - 2 * a + 2 * b + c), b * (S + 4 * a - 7 * b - 5 * c) / 2, g * (S - g - c) / 2,
            (2 * a - 5 * b - g - 8 * c) / 8]


def _text(a: Any, b: Any, g: Any, c: Any, S: float) -> list[Any]:
    """Right-hand side of the equations as printed in the paper."""
    return [2 * a * (-S + 2 * a - 2 * b - c), -b * (S + 2 * a - 5 * b - 5 * c), -g * (S - g - c), -(2 * a - 5 * b - g - 8 * c)]


EQUATIONS: dict[str, Callable[..., list[Any]]] = {"corrected": _corrected, "text": _text}


def simulate_velocities(states: ArrayLike, target: float, lr: float = 1.0) -> Array:
    """Return the same velocities from the network itself: weights, biases, ReLU, and autograd's gradient of its loss."""
    (z,) = read(states=(states, "n four"))
    rows = []
    for row in z:
        p = torch.cat([row[:3].sqrt(), row[3:]]).requires_grad_(True)
        (slope,) = torch.autograd.grad((_network(p) - _targets(target)).square().mean() / 2, p)
        v = -lr * slope
        rows.append(torch.cat([2 * p.detach()[:3] * v[:3], v[3:]]))
    return like(torch.stack(rows), states)


def modes(t: Sequence[float] | Array, target: float, initial: float = 0.01, lr: float = 1.0) -> UnitModes:
    """Return strengths over S of the three units, and the loss, along the flow from alpha = beta = gamma = ``initial``, c = 0."""
    if not (initial > 0 and target > 0):
        raise SelectionError(f"initial={initial!r}, target={target!r}: both above 0 are needed; from 0 the units never leave.")

    path = flow(lambda z: lr * np.array(_corrected(z[0], z[1], z[2], z[3], target)), np.array([initial**2] * 3 + [0.0]),
                times_from_zero(t).tolist())
    z = torch.from_numpy(np.stack(path, 1))
    h, y = _units(), _targets(target)
    parts = torch.tensor([[-2.0], [1.0], [1.0]], dtype=torch.float64) * z[:3]
    strength = parts * (h @ y)[:, None] / (8 * target**2)
    loss = (h.T @ parts + z[3] - y[:, None]).square().mean(0) / 2
    return UnitModes(like(strength, t), like(loss, t))


def _inputs() -> Float[Tensor, "8 3"]:
    """All eight corners of the cube {0, 1}^3."""
    return torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 3)


def _targets(S: float) -> Float[Tensor, " 8"]:
    """Parity of the corners times S."""
    return S * (-1.0) ** _inputs().sum(1)


def _units() -> Float[Tensor, "3 8"]:
    """Return h_1, h_2, h_3 on the eight inputs, the outputs of the units for alpha = beta = gamma = 1."""
    x1, x2, x3 = _inputs().T
    return torch.relu(torch.stack([x2 - x1 - x3, 1 + x2 - x1 - x3, x1 - x2 + x3 - 1]))


def _network(p: Float[Tensor, " 4"]) -> Float[Tensor, " 8"]:
    """Outputs of the network on all corners.  [Eqs. C.8, C.9]"""
    a, b, g, c = p
    W = torch.stack([torch.stack([-a, a, -a]), torch.stack([-b, b, -b]), torch.stack([g, -g, g])])
    hidden = torch.relu(_inputs() @ W.T + torch.stack([torch.zeros_like(a), b, -g]))
    return hidden @ torch.stack([-2 * a, b, g]) + c


def _cases() -> list[tuple[Tensor, float]]:
    """Cases (initial weights and target) on which theory and simulation are compared."""
    return [(torch.cat([normal(5, 3, seed=1).square(), normal(5, 1, seed=2)], 1), 1.0),
            (torch.cat([normal(4, 3, seed=3).abs(), normal(4, 1, seed=4)], 1), 5.0)]


THEORIES = (
    Theory("three_units.velocities", ref=Ref("layerwise", "App. C.4"),
           title="how the squared weights of a three-unit network of parity move",
           predict=velocities, simulate=simulate_velocities, cases=_cases, tolerance=1e-8, perturb={"form": "text"}),
)
