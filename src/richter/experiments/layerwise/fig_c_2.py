"""Figure C.2 of [layerwise]: three ReLU units learn the parity of three bits by modes that rise at different times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Writer
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.theory import three_units
from richter.theory.emergence import Emergence, crossing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Vector = NDArray[np.float64]
CHECKED = (3.05, 3.60, 4.75)  # half-times of the three modes in the independent check


@dataclass(frozen=True)
class LayerwiseFigC2Settings:
    """S of App. C.3. Claims choose ``form``, ``slow`` and ``tail``."""

    target: float = 5.0
    initial: float = 0.01
    end: float = 30.0
    points: int = 601
    states: int = 50
    form: Literal["corrected", "text"] = "corrected"
    slow: int = 2
    tail: Literal["sum", "sigmoid"] = "sum"


def work(s: LayerwiseFigC2Settings, run: Writer) -> Mapping[str, ArrayLike]:
    """Velocities of both forms and of the network itself at random states; strengths of the modes along the flow."""
    draw = np.random.default_rng(0)
    z = np.concatenate([s.target * draw.random((s.states, 3)) * 3, s.target * draw.standard_normal((s.states, 1))], 1)
    t = np.linspace(0.0, s.end, s.points)
    modes = three_units.modes(t, s.target, s.initial)
    return {"t": t, "modes": modes.strength, "loss": modes.loss, "network": three_units.simulate_velocities(z, s.target),
            "corrected": three_units.velocities(z, s.target), "text": three_units.velocities(z, s.target, form="text")}


def half(r: Results) -> Vector:
    """Time at which each mode has half of its last value."""
    return np.array([crossing(r["t"][0], row / row[-1]) for row in r["modes"][0]])


def off(r: Results) -> float:
    return float(np.abs(r[r.settings.form] - r["network"]).max() / np.abs(r["network"]).max())


def multilinear(r: Results) -> Vector:
    """R / S of the multilinear model with B^2 = 1/3 from the same start."""
    s = r.settings
    start = 4 * s.initial**2 / (8 * s.target)  # R(0) / S of the network: 2 alpha^2 + beta^2 + gamma^2 over 8 S
    return Emergence(1 / 3, target=s.target, lr=1.0, initial=start).in_time(r["t"][0], [1.0])[0]


def spread(r: Results) -> float:
    """The time to nine tenths of the skill over that to its half."""
    R = r["modes"][0].sum(0) if r.settings.tail == "sum" else multilinear(r)
    return crossing(r["t"][0], R, 0.9) / crossing(r["t"][0], R)


@styled
def draw(results: Results) -> Figure:
    figure, (left, right) = panels(2, across=2)
    t, modes, shown = results["t"][0], results["modes"][0], results["t"][0] <= 12
    for i, (row, name) in enumerate(zip(modes, ("alpha", "beta", "gamma"), strict=True)):
        line(left, t[shown], row[shown], COLOURS[i], name)
        points(left, [half(results)[i]], [row[-1] / 2], COLOURS[i])
    line(left, t[shown], modes.sum(0)[shown], label="sum")
    line(left, t[shown], multilinear(results)[shown], label="multilinear, B² = 1/3", style="--")
    label(left, "time", "R / S", "b: strengths of the modes; points at their half", legend=True)
    for form, colour in (("corrected", COLOURS[0]), ("text", COLOURS[1])):
        points(right, results["network"][0].reshape(-1), results[form][0].reshape(-1), colour, form)
    line(right, [results["network"].min(), results["network"].max()], [results["network"].min(), results["network"].max()])
    label(right, "velocity by autograd", "velocity by Eqs. C.15-C.18", "at random states", legend=True)
    caption(figure, "The three units rise at different times, so that their sum saturates later than one sigmoid. The corrected "
                    "equations are the network's gradient; the printed ones are not.")
    return figure


EXPERIMENT = Experiment(
    name="layerwise_fig_c_2", ref=Ref("layerwise", "Fig. C.2"), title="three units learn parity by three modes",
    smoke=LayerwiseFigC2Settings(), paper=LayerwiseFigC2Settings(), work=work, quick=True, start={"points": 3, "end": 0.1},
    figures={"layerwise_fig_c_2": draw}, missing={"Fig. C.2": "panel a, a sketch of the network"},
    protocol="exact",
    claims=(
        Claim("largest difference of Eqs. C.15-C.18, corrected, from the network's gradient, relative to the largest velocity",
              off, Interval(high=1e-8), Control("as printed", {"form": "text"}), paper="equal", source="an identity",
              says="Eqs. C.15 to C.18 are the gradient of the three-unit network (printed with wrong signs and indices).",
              reason="misprint"),
        Claim("largest |half-time of a mode - that of the independent check|",
              lambda r: float(np.abs(half(r) - CHECKED).max()), Interval(high=0.01),
              Control("from weights twice as large", {"initial": 0.02}), source="independent check: 3.05, 3.60, 4.75", own=True),
        Claim("half-time of gamma over that of alpha", lambda r: float(half(r)[r.settings.slow] / half(r)[0]), Interval(1.5, 2.5),
              Control("beta in the place of gamma", {"slow": 1}), paper="approximately twice", source="App. C.4: 2 when rounded",
              says="The slowest mode takes about twice as long as the fastest."),
        Claim("time to nine tenths of the skill over that to its half", spread, Interval(low=1.5),
              Control("one sigmoid, the multilinear model", {"tail": "sigmoid"}), paper="a longer tail",
              source=f"one sigmoid has {1 + math.log(9) / math.log(1e5):.2f}; the independent check 7.72 / 3.61 = 2.14, half of "
                     f"the way", says="The skill of the three-unit network has a longer tail than one sigmoid."),
    ))
