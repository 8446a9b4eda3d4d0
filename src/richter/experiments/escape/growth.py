"""Section 3 of [escape]: along an escape direction the norm of the weights follows a law, in either convention for the speed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.theory import escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Vector = NDArray[np.float64]
STEPS = 20  # from one time to the next


@dataclass(frozen=True)
class EscapeGrowthSettings:
    """Gaussian inputs and targets, half a mean squared error. The weights start at c rho with c = ``start`` and are followed
    until they are ``times`` as large. ``speed`` chooses the sphere whose speed a law gets: its own, of radius sqrt(L) or 1,
    or the other. ``along`` is the direction."""

    n: int = 20
    d: int = 3
    outputs: int = 3
    depths: tuple[int, ...] = (2, 3, 4, 5)
    width: int = 8
    restarts: int = 8
    steps: int = 1500
    start: float = 0.005
    times: float = 3.0
    points: int = 12
    seeds: tuple[int, ...] = tuple(range(10))
    speed: Literal["own", "other"] = "own"
    along: Literal["escape", "random"] = "escape"


def times_until(s: EscapeGrowthSettings, speed: float, depth: int) -> Vector:
    """Times up to where c is ``times`` its start."""
    if depth == 2:
        last = math.log(s.times) / speed
    else:
        last = (s.start ** (2 - depth) - (s.times * s.start) ** (2 - depth)) / ((depth - 2) * speed)
    return np.linspace(0, last, s.points)


def norms_along_flow(weights: list[Tensor], X: Tensor, y: Tensor, start: float, t: Vector, own: bool) -> Vector:
    """|theta| at these times of a network that starts at ``start`` times these weights and follows the gradient flow of its loss,
    or of L_0 alone; by Runge and Kutta's method in steps of one length, which pass over kinks of ReLUs."""
    def velocity(theta: Tensor) -> Tensor:
        theta = theta.detach().requires_grad_()
        h, rest = X, theta
        for i, w in enumerate(weights):
            h = h.relu() if i else h
            h, rest = h @ rest[:w.numel()].reshape(w.shape).T, rest[w.numel():]
        loss = (h - y).square().sum() / (2 * len(X)) if own else -(h * y).sum() / len(X)
        return -torch.autograd.grad(loss, theta)[0]

    theta = start * torch.cat([w.flatten() for w in weights])
    norms = [float(theta.norm())]
    for dt in np.diff(t) / STEPS:
        for _ in range(STEPS):
            a = velocity(theta)
            b = velocity(theta + dt / 2 * a)
            c = velocity(theta + dt / 2 * b)
            theta = theta + dt / 6 * (a + 2 * b + 2 * c + velocity(theta + dt * c))
        norms.append(float(theta.norm()))
    return np.array(norms)


def work(t: Task[EscapeGrowthSettings], run: Writer) -> Mapping[str, ArrayLike]:
    """The norm from integrating L_0 and the loss, and both laws with both speeds, relative to the start."""
    s, L = t.settings, t.depth
    draw = np.random.default_rng((t.seed, L))
    X, y = (torch.from_numpy(draw.standard_normal((s.n, k))) for k in (s.d, s.outputs))
    G = escape.pull(y)
    best = escape.fastest(X, G, L, width=s.width, restarts=s.restarts, steps=s.steps, seed=1000 * t.seed)
    W = [torch.as_tensor(w) for w in best.weights]
    fast = best.speed
    if s.along == "random":  # of the same norms, and with the speed that it has itself
        W = [w.norm() * (z := torch.from_numpy(draw.standard_normal(w.shape))) / z.norm() for w in W]
        fast = abs(escape.speed(W, X, G))
    times, first = times_until(s, fast, L), s.start * math.sqrt(L)
    unit = L ** (-L / 2) * fast  # the speed on the sphere of radius 1
    linear, near = (norms_along_flow(W, X, y, s.start, times, own) for own in (False, True))
    run.progress(1.0)
    out: dict[str, ArrayLike] = {"t": times, "linear": linear / first, "trained": near / first, "residual": best.residual,
                                 "norms": [float(np.linalg.norm(np.asarray(w))) for w in best.weights]}
    for name, v in (("own", fast), ("other", unit)):
        out[f"c_{name}"] = np.asarray(escape.growth(s.start, v, L, times)) / s.start
    for name, v in (("own", unit), ("other", fast)):
        out[f"norm_{name}"] = law(first, v, L, times) / first
    return out


def law(start: float, unit: float, depth: int, t: Vector) -> Vector:
    """|theta|, written with the speed on the unit sphere: |theta|^(2-L) = |theta_0|^(2-L) + (2 - L) L s_1 t. NaN after it is
    infinite."""
    if depth == 2:
        return np.asarray(start * np.exp(depth * unit * t))
    left = start ** (2 - depth) + (2 - depth) * depth * unit * t
    return np.where(left > 0, np.abs(left) ** (1 / (2 - depth)), np.nan)


def off(r: Results, predicted: str, observed: str) -> float:
    """Largest relative error over depths and times; one that is infinite too early counts as off by 1."""
    name = f"{predicted}_{r.settings.speed}"
    return float(np.nan_to_num(np.abs(r[name] / r[observed] - 1), nan=1.0).max())


@styled
def draw(results: Results) -> Figure:
    depths = results.distinct("depth")
    figure, axes = panels(2, across=2)
    for ax, observed, title in zip(axes, ("linear", "trained"), ("the flow of L_0", "the network's own loss"), strict=True):
        for k, depth in enumerate(depths):
            chosen = results.where(depth=depth)
            share = chosen["t"][0] / chosen["t"][0, -1]
            line(ax, share, chosen["c_own"][0], COLOURS[k], f"{depth} layers, law")
            points(ax, share, chosen[observed], COLOURS[k])
        label(ax, "time, as a share of that to three times the norm", "norm of the weights over the first", title,
              legend=ax is axes[0])
    caption(figure, "Weights grow along an escape direction as the law says (lines), exponentially in two layers and ever faster "
                    "in more of them.")
    return figure


MIXED = Control("the speed on the other sphere, as the conventions are mixed elsewhere", {"speed": "other"})
RANDOM = Control("along a random direction, with its own speed", {"along": "random"})
EXPERIMENT = Experiment(
    name="escape_growth", ref=Ref("escape", "Sec. 3"), title="how weights grow along an escape direction",
    smoke=EscapeGrowthSettings(depths=(2, 4), seeds=(0, 1), steps=800), paper=EscapeGrowthSettings(), over=("depth", "seed"),
    analysis=("speed",), work=work,
    start={"seeds": (0,), "depths": (3,), "steps": 20}, figures={"escape_sec3": draw}, reduced="2 depths of 4, 2 seeds of 10",
    protocol="exact",
    claims=(
        Claim("largest relative error of c(t), speed on the sphere of radius sqrt(L)", lambda r: off(r, "c", "linear"),
              Interval(high=1e-3), MIXED, over="seed", paper="dc/dt = s c^(L-1)", source="definitions: 1e-3",
              says="Along an escape direction of speed s, on the sphere of radius sqrt(L), the scale grows as dc/dt = s "
                   "c^(L-1)."),
        Claim("largest relative error of |theta|(t), speed on the unit sphere", lambda r: off(r, "norm", "linear"),
              Interval(high=1e-3), MIXED, over="seed", paper="|theta|^(2-L) = |theta_0|^(2-L) + (2-L) L s_1 t",
              source="definitions: 1e-3", says="Along an escape direction |theta|^(2-L) = |theta_0|^(2-L) + (2-L) L s_1 t."),
        Claim("largest relative error of |theta|(t) of a network that follows its own loss", lambda r: off(r, "c", "trained"),
              Interval(high=1e-3), (MIXED, RANDOM), over="seed", paper="the same near the origin", source="definitions: 1e-3",
              says="Near the origin a network that follows its own loss grows by the law of the escape direction."),
    ))
