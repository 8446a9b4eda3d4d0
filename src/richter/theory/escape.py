"""Escape of a deep ReLU network from the origin: along low-rank directions, faster and faster.  [escape]

    f(x) = W_L relu(W_{L-1} ... relu(W_1 x)),     loss = C(f),   G = dC/df at f = 0  (half a mean squared error: G = -y / n).

Close to the origin the loss is C(0) + L_0, where L_0 = sum_n G_n . f(x_n) has degree L in the weights. An *escape direction* rho,
on the sphere |rho|^2 = L, is preserved by the flow: grad L_0(rho) = -s rho. Its *speed* is s = -L_0(rho), and every layer has
norm 1. Along it weights c rho grow by dc/dt = s c^(L-1). From most initial weights the flow turns to a fast direction before it
grows. At the fastest direction deep layers are nearly rank one: the share of squares outside the first singular value falls at
least like l^(-1/2), so s_1 / s_2 grows at least like l^(1/4). The constants are unknown, and the first two layers may not follow
this law. Compare speeds of networks of different depth only on this sphere, of radius sqrt(L).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike, to_tensor
from richter.core.modules import chain
from richter.core.values import progress
from richter.theory.arrays import (
    BIASES,
    Times,
    above_zero,
    columns,
    in_units,
    joint_norm,
    like,
    normal,
    read,
    relu_layers,
    relu_network,
    times_from_zero,
    whole,
)
from richter.theory.flows import FlowError, flow
from richter.theory.frame import Theory
from richter.theory.relative_steps import Path as Path
from richter.theory.relative_steps import follow

FIRST, SETTLES = 0.3, 60  # step sizes 0.3 / (1 + t / 60), decreasing because a constant step oscillates about a kink
ROUNDING = 1e-12  # relative to the largest speed that the data allow; a smaller speed counts as zero
PATIENCE = 20_000  # gradient evaluations of a flow that slides along a kink of a ReLU, which no step size resolves
QUIET = (nn.Identity, nn.Flatten, nn.Dropout)  # modules that leave a network in eval mode unchanged, or only reshape its inputs
START = "a start (at the origin itself nothing moves)"

# ------------------------------------------------------------------------------------------------ predict


class Layer(NamedTuple):
    """Shares of squares (0 to 1) of one layer outside its first singular value, and s_1 / s_2."""

    weights: float  # share outside the first singular value of W_l
    activations: float  # share outside the first singular value of relu(z_l) over the data
    cut: float  # share of z_l that the relu removes
    ratio: float  # s_1 / s_2 of W_l


@dataclass(frozen=True)
class Direction:
    """An escape direction: weights W_1..W_L with |W_1|^2 + ... = L, its speed, and how exactly it is one."""

    weights: list[Array] = field(repr=False)
    speed: float
    residual: float  # |grad L_0 + s rho| / (s sqrt(L)); 0, except on a kink of a ReLU, where the gradient is no criterion
    speeds: Array = field(repr=False)  # speeds of all restarts, fastest first

    def norm(self, t: Times, start: float) -> Array:
        """Return |theta| at these times along this direction, from |theta| = ``start`` at time 0.

        >>> direction.norm([0.0, 1.0], start=0.01)
        """
        above_zero(START, start=start)
        depth = len(self.weights)
        return like(math.sqrt(depth) * to_tensor(growth(start / math.sqrt(depth), self.speed, depth, t)), self.weights)


def growth(c0: float, speed: float, depth: int, t: Times, *, power: float = 1.0) -> Array:
    """Return c(t) of weights c rho: (c0^(2-L) - (L-2) s t)^(-1/(L-2)), or c0 exp(s t) for two layers. It diverges at a finite
    time, after which there is no prediction. ``power`` multiplies the speed; tests perturb it."""
    whole(2, depth=depth)
    above_zero(START, c0=c0)
    if not (isinstance(speed, Real) and isinstance(power, Real) and math.isfinite(power * speed)):
        raise SelectionError(f"speed={speed!r}, power={power!r}: a finite speed is needed.")
    times, rate = times_from_zero(t), power * speed
    if depth == 2:
        c = c0 * torch.exp(rate * times)
        if not torch.isfinite(c).all():
            raise SelectionError(f"t contains {times.max().item():g}: at the speed {speed:g} weights are then beyond what a "
                                 f"float holds, and long before that the loss is no longer that of the origin. Ask for "
                                 f"earlier times.")
        return like(c, t)
    # log of 1 / (time of divergence)
    hurry = math.log((depth - 2) * abs(rate)) + (depth - 2) * math.log(c0) if rate else -math.inf
    passed = times.log() + hurry  # logarithm of the elapsed share of that time
    if rate > 0 and (passed >= 0).any():
        raise SelectionError(f"t contains {times.max().item():g}: from c0={c0:g} at the speed {speed:g} weights are infinite at "
                             f"t = {math.exp(-hurry):g}, and long before that the loss is no longer that of the origin. Ask for "
                             f"earlier times.")
    left = torch.log1p(-passed.exp()) if rate > 0 else torch.logaddexp(passed, torch.zeros_like(passed))
    return like(c0 * torch.exp(-left / (depth - 2)), t)


def pull(y: ArrayLike) -> Array:
    """Return G = -y / n [n, c], the gradient of half a mean squared error at zero outputs."""
    (y_,) = read(y=(columns(y), "n c"))
    return like(-y_ / len(y_), y)


def speed(weights: Sequence[ArrayLike], X: ArrayLike, G: ArrayLike) -> float:
    """Return -L_0 = -sum_n G_n . f(x_n) of the weights W_1..W_L [d_out, d_in], scaled to the sphere |theta|^2 = L."""
    W, X_, G_ = relu_network(weights, X, G)
    size = joint_norm(W) / math.sqrt(len(W))
    if not size:
        raise SelectionError("all weights are zero: the origin has no direction, and no speed. Give weights that are not.")
    X_, G_, unit = _in_units(X_, G_)
    return -float(_potential([w / size for w in W], X_, G_)) * unit


def weights_of(model: nn.Module, X: Tensor) -> list[Tensor]:
    """Return W_1..W_L of a model that is a chain of linear layers without biases, with ReLUs between them. The chain is verified
    on the inputs ``X``.

    >>> speed(weights_of(model, x), x, pull(y))
    """
    if not isinstance(model, nn.Module):
        raise SelectionError(f"model is a {type(model).__name__}; an nn.Module is needed.")
    try:
        stages = chain(model, X)
    except RuntimeError as error:
        raise SelectionError(f"the {type(model).__name__} does not run on X, of shape {tuple(X.shape)} and {X.dtype}: {error}. "
                             f"Inputs as it is trained on are needed.") from error
    W = list[Tensor]()
    for i, stage in enumerate(stages):
        after = [m for m in stage.after if not isinstance(m, QUIET)]
        wanted = [nn.ReLU] if i < len(stages) - 1 else []
        if not isinstance(stage.module, nn.Linear) or [type(m) for m in after] != wanted:
            seen = " -> ".join(type(m).__name__ for m in (stage.module, *stage.after))
            raise SelectionError(f"{stage.name!r} is {seen}: the theory is of linear layers with a ReLU behind each but "
                                 f"the last.")
        if stage.module.bias is not None:
            raise SelectionError(f"{stage.name!r} has a bias: {BIASES}")
        W.append(stage.module.weight.detach())
    return W


def fastest(X: ArrayLike, G: ArrayLike, depth: int, *, width: int = 32, restarts: int = 24, steps: int = 1500, seed: int = 0
            ) -> Direction:
    """Search the fastest escape direction of a network of ``depth`` layers with ``width`` hidden units: gradient steps on the
    sphere with decreasing step sizes, from all restarts at once. The result is a local optimum. The speeds of all restarts show
    how often the search finds it.

    >>> direction = fastest(x, pull(y), depth=4)
    >>> direction.speed, [layer.ratio for layer in layers(direction.weights, x)]
    """
    whole(2, depth=depth)
    whole(width=width, restarts=restarts, steps=steps)
    whole(0, seed=seed)
    X_, G_ = read(X=(X, "n d"), G=(columns(G), "n c"))
    if not (X_.any() and G_.any()):
        raise SelectionError(f"{'G' if X_.any() else 'X'} is zero: nothing pulls the network away from the origin, and there is "
                             f"no escape direction. Labels that are centred, or all alike, may have become zero.")
    X_, G_, unit = _in_units(X_, G_)
    sizes = [X_.shape[1], *[width] * (depth - 1), G_.shape[1]]
    W = _on_sphere([normal(restarts, d_out, d_in, seed=seed + k).to(X_) for k, (d_in, d_out) in enumerate(pairwise(sizes))])
    best, speeds = W, -_potential(W, X_, G_)
    for t in progress(range(steps), title="escape direction"):
        gradient = _on_sphere(_gradient(W, X_, G_))
        share = FIRST / (1 + t / SETTLES)
        W = _on_sphere([(1 - share) * w - share * g for w, g in zip(W, gradient, strict=True)])
        now = -_potential(W, X_, G_)
        better = now > speeds
        best = [torch.where(better[:, None, None], w, b) for w, b in zip(W, best, strict=True)]
        speeds = torch.where(better, now, speeds)
    first = int(speeds.argmax())
    if not speeds[first] > ROUNDING * (X_.norm(dim=1) * G_.norm(dim=1)).sum():
        raise SelectionError(f"of {restarts} restarts none found a direction along which the loss falls: the fastest has the "
                             f"speed {speeds[first].item() * unit:.3g}. Examples that are equal and pull against each "
                             f"other leave none; otherwise take more restarts= or a larger width=.")
    rho = [b[first] for b in best]
    gradient = _gradient([b[first:first + 1] for b in best], X_, G_)
    off = sum(float((g[0] + speeds[first] * w).square().sum()) for g, w in zip(gradient, rho, strict=True))
    return Direction([like(w, X) for w in rho], float(speeds[first]) * unit, math.sqrt(off / depth) / float(speeds[first]),
                     like(speeds.sort(descending=True).values * unit, X))


def layers(weights: Sequence[ArrayLike], X: ArrayLike) -> list[Layer]:
    """Measure how close each layer is to rank one; see ``Layer``."""
    W, h = relu_layers(weights, X)
    out = []
    for i, w in enumerate(in_units(w)[0] for w in W):  # shares and ratios do not depend on units
        z = in_units(h)[0] @ w.T
        h = z.relu() if i < len(W) - 1 else z
        s = torch.linalg.svdvals(w)
        ratio = math.inf if len(s) < 2 or not s[1] else float(s[0] / s[1])
        out.append(Layer(_besides(s), _besides(torch.linalg.svdvals(h)), _share((z - h).square().sum(), z.square().sum()), ratio))
    return out


def bound(layer: int) -> float:
    """Return l^(1/4); s_1 / s_2 of deep layers l = 1, 2, ... grows at least in proportion to it.  [Thm. 3.1]"""
    whole(layer=layer)
    return layer ** 0.25


# ------------------------------------------------------------------------------------------------ simulate


def simulate_growth(weights: Sequence[ArrayLike], X: ArrayLike, G: ArrayLike, start: float, t: Times) -> Array:
    """Return |theta| at these times by integrating the flow of L_0. The weights are rescaled to norm ``start``."""
    W, x, g = relu_network(weights, X, G)
    first, count = in_units(torch.nn.utils.parameters_to_vector(W))[0], 0
    above_zero(START, start=start)
    if not first.any():
        raise SelectionError("all weights are zero: the origin has no direction, and nothing moves there. Give weights that are "
                             "not.")

    def velocity(state: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if count > PATIENCE:
            raise FlowError(f"after {PATIENCE:,} gradients the flow has not come to t = {times[-1]:g}: it slides along a kink of "
                            f"a ReLU, where no step is short enough. Start from an escape direction, as `fastest` finds it.")
        with torch.enable_grad():
            theta = state.clone().requires_grad_()
            h, rest = x, theta
            for w in W:
                h = h.relu() if rest is not theta else h
                h, rest = h @ rest[:w.numel()].reshape(w.shape).T, rest[w.numel():]
            return -torch.autograd.grad((g * h).sum(), theta)[0]

    times = times_from_zero(t).tolist()
    states = flow(velocity, start * first / first.norm(), times, rtol=1e-12, atol=1e-14 * start)
    return like(x.new_tensor([joint_norm([state]) for state in states]), X)


def predict_growth(weights: Sequence[ArrayLike], X: ArrayLike, G: ArrayLike, start: float, t: Times, *, power: float = 1.0
                   ) -> Array:
    """Return |theta| at these times by ``growth``, for weights that are an escape direction."""
    above_zero(START, start=start)
    fast, depth = speed(weights, X, G), len(weights)
    return like(math.sqrt(depth) * to_tensor(growth(start / math.sqrt(depth), fast, depth, t, power=power)), X)


# ------------------------------------------------------------------------------------------------ parts


def _potential(W: list[Tensor], X: Tensor, G: Tensor) -> Tensor:
    """Return L_0 = sum_n G_n . f(x_n) of one network, or of several networks stacked along a first axis of the weights."""
    return (_outputs(W, X) * G).sum((-2, -1))


def _outputs(W: list[Tensor], X: Tensor) -> Tensor:
    """Outputs of a bias-free ReLU network."""
    h = X
    for i, w in enumerate(W):
        h = h @ w.mT
        h = h.relu() if i < len(W) - 1 else h
    return h


def _gradient(W: list[Tensor], X: Tensor, G: Tensor) -> list[Tensor]:
    """Gradient of the homogeneous loss L_0 with respect to the weights."""
    with torch.enable_grad():
        own = [w.detach().requires_grad_() for w in W]
        return list(torch.autograd.grad(_potential(own, X, G).sum(), own))


def _on_sphere(W: list[Tensor]) -> list[Tensor]:
    """Scale each of several networks to |theta|^2 = L; all-zero weights are unchanged."""
    size = torch.stack([w.square().sum((-2, -1)) for w in W]).sum(0).sqrt() / math.sqrt(len(W))
    size = torch.where(size > 0, size, torch.ones_like(size))
    return [w / size[..., None, None] for w in W]


def _in_units(X: Tensor, G: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return X and G in units of their own, and the product of the units, to which speeds are proportional."""
    (x, x_unit), (g, g_unit) = in_units(X), in_units(G)
    if not 0 < x_unit * g_unit < math.inf:
        raise SelectionError(f"X and G are of sizes {x_unit:.1g} and {g_unit:.1g}: speeds go with their product, which is no "
                             f"number of float64. Give them in other units.")
    return x, g, x_unit * g_unit


def _besides(s: Float[Tensor, " r"]) -> float:
    """Share of the squared singular values that is not in the first."""
    return _share(s[1:].square().sum(), s.square().sum())


def _share(part: Tensor, whole: Tensor) -> float:
    """part / whole; 0 if whole is 0."""
    return float(part / whole) if whole > 0 else 0.0


# ------------------------------------------------------------------------------------------------ theories


def predict_speed(X: ArrayLike, y: ArrayLike, depth: int, *, power: float = 1.0) -> float:
    """Speed at which a network of small weights leaves the origin: that of the fastest direction."""
    return power * fastest(X, pull(y), depth, width=8, restarts=8, steps=600).speed


def simulate_speed(X: ArrayLike, y: ArrayLike, depth: int) -> float:
    """Return the largest growth rate over several trainings from small weights, each when its loss has fallen by 1e-5: how fast
    c = |theta| / sqrt(L) grows in a step, (change of c) / (change of t) / c^(L-1)."""
    whole(2, depth=depth)
    x, y_ = read(X=(X, "n d"), y=(columns(y), "n c"))
    d, k, speeds = x.shape[1], y_.shape[1], list[float]()
    for seed in range(4):
        W = [1e-6 * normal(o, i, seed=seed).to(x) / math.sqrt(i) for i, o in pairwise([d, *[8] * (depth - 1), k])]
        path = follow(W, X, y, 900)
        loss, t, c = (to_tensor(column) for column in (path.loss, path.time, path.norm))
        c = c / math.sqrt(depth)
        for at in (loss < (1 - 1e-5) * loss[0]).nonzero()[:1, 0].tolist():  # initial weights with all units off never leave
            speeds.append(float((c[at] - c[at - 1]) / (t[at] - t[at - 1]) / c[at - 1] ** (depth - 1)))
    if not speeds:
        raise FlowError("no training from small weights left the origin: all their units are off. Give other data.")
    return max(speeds)


def _cases() -> list[tuple[Any, ...]]:
    """Known directions: one positive unit in every layer, data that all lie on its side, two to four layers."""
    X = np.abs(np.asarray(normal(7, 3, seed=4))) + 0.1
    out = list[tuple[Any, ...]]()
    for depth in (2, 3, 4):
        mean = X.mean(0)
        W = [mean[None] / np.linalg.norm(mean), *[np.ones((1, 1))] * (depth - 1)]
        out.append((W, X, np.full((7, 1), -1 / 7), 0.3 * math.sqrt(depth), [0.0, 0.3, 0.5]))
    return out


def _data() -> list[tuple[Any, ...]]:
    """Cases (inputs, targets, depths) on which theory and simulation are compared."""
    X, y = np.asarray(normal(20, 3, seed=1)), np.asarray(normal(20, 2, seed=2))
    return [(X, y, depth) for depth in (2, 3)]


THEORIES = (
    Theory("escape.growth", ref=Ref("escape", "Sec. 3"),
           title="how the weights of a deep ReLU network grow along an escape direction",
           predict=predict_growth, simulate=simulate_growth, cases=_cases, tolerance=1e-8, perturb={"power": 1.01}),
    Theory("escape.speed", ref=Ref("escape", "Sec. 3"),
           title="how fast a deep ReLU network leaves the origin",
           predict=predict_speed, simulate=simulate_speed, cases=_data, tolerance=1e-3, perturb={"power": 1.01}),
)
