"""Example 1 of [escape]: eight points on a circle with alternating labels. The fastest way from the origin has a first layer of
rank two: low rank is a matter of deeper layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.theory import escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Vector = NDArray[np.float64]
RANK_ONE, RANK_TWO = math.sqrt(2) - 1, 0.5
LARGEST = 1e8  # the ratio of singular values of a layer that has but one


@dataclass(frozen=True)
class EscapeCircleSettings:
    """Search by ``theory.escape.fastest`` from ``restarts`` starts, of which the best counts; ``width`` units in both hidden
    layers. ``angles`` is the number of angles in the scan over first layers of one row. ``first`` is the first layer whose
    speed is read."""

    width: int = 24
    restarts: int = 40
    steps: int = 1500
    angles: int = 3601
    seeds: tuple[int, ...] = tuple(range(10))
    first: Literal["own", "other"] = "own"


def circle() -> tuple[Vector, Vector]:
    """Inputs X [8, 2] on a circle, and gradients G [8, 1] of alternating sign."""
    angles = np.arange(8) * np.pi / 4
    return np.stack([np.cos(angles), np.sin(angles)], 1), np.tile([1.0, -1.0], 4)[:, None]


def two_rows() -> list[Vector]:
    """relu((|u.x| - |v.x|) / 4) with u and v along the diagonals; every layer has norm 1."""
    u, v = np.array([1.0, 1.0]) / math.sqrt(2), np.array([-1.0, 1.0]) / math.sqrt(2)
    return [np.stack([u, -u, v, -v]) / 2, np.array([[1.0, 1.0, -1.0, -1.0]]) / 2, np.ones((1, 1))]


def scan(X: Vector, G: Vector, count: int) -> Vector:
    """The speed of a network whose layers have rank one, by the angle of its first row; the better sign of its output."""
    rows = np.linspace(0, 2 * np.pi, count)
    speeds = np.maximum(np.stack([np.cos(rows), np.sin(rows)], 1) @ X.T, 0) @ G[:, 0]
    return np.abs(speeds)


def work(t: Task[EscapeCircleSettings], run: Writer) -> Mapping[str, ArrayLike]:
    s, (X, G) = t.settings, circle()
    best = escape.fastest(X, G, 3, width=s.width, restarts=s.restarts, steps=s.steps, seed=1000 * t.seed)
    run.progress(1.0)
    values = [np.linalg.svd(np.asarray(W), compute_uv=False) for W in best.weights]
    return {"scan": scan(X, G, s.angles), "explicit": abs(escape.speed(two_rows(), X, G)), "speed": best.speed,
            "speeds": np.asarray(best.speeds), "ratio": np.array([v[0] / v[1] if len(v) > 1 else LARGEST for v in values]),
            "norms": np.array([np.linalg.norm(np.asarray(W)) for W in best.weights]),
            "explicit_values": np.linalg.svd(two_rows()[0], compute_uv=False)}


def off(r: Results, own: str, other: str, value: float) -> float:
    """|speed - what it should be|, of the network that is read."""
    return float(abs(r[own if r.settings.first == "own" else other].max() - value))


@styled
def draw(results: Results) -> Figure:
    figure, (left, right) = panels(2, across=2)
    degrees = np.linspace(0, 360, results["scan"].shape[1])
    line(left, degrees, results["scan"][0], label="layers of rank one")
    line(left, [0, 360], [RANK_TWO] * 2, COLOURS[1], "first layer of rank two", "--")
    label(left, "angle of the first layer's row (degrees)", "speed", legend=True)
    ranked = np.sort(results["speeds"], axis=1)[:, ::-1]
    points(right, np.arange(1, ranked.shape[1] + 1), ranked, label="found by the search")
    line(right, [1, ranked.shape[1]], [RANK_TWO] * 2, COLOURS[1], "rank two: 1/2", "--")
    line(right, [1, ranked.shape[1]], [RANK_ONE] * 2, label="rank one: sqrt(2) - 1")
    label(right, "restart, the fastest first", "speed", legend=True)
    caption(figure, "No network with layers of rank one is as fast as one whose first layer has two directions; a part of the "
                    "restarts finds it.")
    return figure


OTHER = Control("the speed of the other first layer", {"first": "other"})
NARROW = Control("hidden layers of one unit, which have rank one", {"width": 1})
EXPERIMENT = Experiment(
    name="escape_circle", ref=Ref("escape", "Example 1"),
    title="eight points on a circle are left fastest by a first layer of rank two",
    smoke=EscapeCircleSettings(seeds=(0, 1)), paper=EscapeCircleSettings(), over=("seed",), analysis=("first",), work=work,
    start={"seeds": (0,), "restarts": 2, "steps": 2},
    figures={"escape_example1": draw}, reduced="2 seeds of 10 of the search",
    protocol="exact",
    claims=(
        Claim("|best speed of layers of rank one - 0.414214|", lambda r: off(r, "scan", "explicit", RANK_ONE),
              Interval(high=1e-6), OTHER, paper="sqrt(2) - 1", source="the example; a scan over 3,601 angles meets the best one",
              says="On the circle of Example 1 first layers of rank one have escape speed sqrt(2) - 1 at most."),
        Claim("|speed with a first layer of rank two - 0.500000|", lambda r: off(r, "explicit", "scan", RANK_TWO),
              Interval(high=1e-6), OTHER, paper="1/2", source="the example, by an explicit network",
              says="On the circle of Example 1 a first layer of rank two has escape speed 1/2."),
        Claim("speed that the search finds", lambda r: float(r["speed"].mean()), Interval(0.49, RANK_TWO + 1e-9), NARROW,
              over="seed", paper="1/2", source="definitions: above 0.49, and no more than the best",
              says="The fastest escape direction on the circle has speed 1/2."),
        Claim("s1/s2 of the first layer that the search finds", lambda r: float(r["ratio"][:, 0].mean()), Interval(1.0, 1.1),
              NARROW, over="seed", paper="rank two: both singular values are sqrt(1/2)", source="definitions: 0.709 and 0.707",
              says="The first layer of the fastest escape direction on the circle has rank two: both singular values are "
                   "sqrt(1/2)."),
    ))
