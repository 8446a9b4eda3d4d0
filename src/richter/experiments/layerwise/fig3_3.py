"""Figure 3.3 of [layerwise]: modes of a linear model rise together, those of a diagonal linear network wait and rise in turn."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.theory.linear_networks import DiagonalNetwork, LinearModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = NDArray[np.float64]
Subject = Literal["line", "network"]
SUBJECTS: tuple[Subject, Subject] = ("line", "network")
KEPT = 121  # times at which curves are kept


@dataclass(frozen=True)
class LayerwiseFig3_3Settings:
    """Gaussian inputs with these ``variances``, targets S = 1, weights ``start`` of both layers. Each step of length ``lr``
    gets ``batch`` fresh inputs. ``line`` and ``network`` choose the equations, and ``curves`` the curves, that claims
    compare; ``unit`` leaves E[x^2] out of the equations."""

    variances: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)
    start: float = 0.003
    end: float = 60.0
    lr: float = 0.02
    batch: int = 1000
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    line: Subject = "line"
    network: Subject = "network"
    curves: Subject = "network"
    unit: bool = False


def theory(s: LayerwiseFig3_3Settings, which: Subject) -> LinearModel | DiagonalNetwork:
    """Theory of the line, or of the diagonal network."""
    variance = [1.0] * len(s.variances) if s.unit else list(s.variances)
    return LinearModel(1.0, variance) if which == "line" else DiagonalNetwork(1.0, variance, s.start, s.start)


def times(s: LayerwiseFig3_3Settings) -> Curves:
    """Times that are kept."""
    return np.linspace(0, s.end, KEPT)


def work(t: Task[LayerwiseFig3_3Settings], run: Writer) -> Mapping[str, ArrayLike]:
    """Modes [m, t] of both, by stochastic gradient descent on fresh inputs, and by the integrated flow."""
    s, draw = t.settings, np.random.default_rng((t.seed, 33))
    root, steps = np.sqrt(s.variances), round(s.end / s.lr)
    theta = np.zeros(len(root))
    a, b = np.full((2, len(root)), s.start)
    due, rows = set(np.linspace(0, steps, KEPT).round().astype(int).tolist()), []
    for step in range(steps + 1):
        if step in due:
            rows.append((theta.copy(), a * b))
            run.progress(0.9 * step / steps)
        x = draw.standard_normal((s.batch, len(root))) * root
        theta = theta - s.lr * x.T @ (x @ (theta - 1)) / s.batch
        slope = x.T @ (x @ (a * b - 1)) / s.batch
        a, b = a - s.lr * slope * b, b - s.lr * slope * a
    curves = np.stack(rows, 2)  # line and network, modes, times
    flows = {f"flow_{which}": np.asarray(theory(s, which).simulate(times(s))) for which in SUBJECTS}
    return {**{f"descent_{which}": curves[i] for i, which in enumerate(SUBJECTS)}, **flows}


# ------------------------------------------------------------------------------------------------ claims


def apart(r: Results, source: str, subject: Subject, form: Subject) -> float:
    """The largest distance of the curves of one model from the equation of one."""
    predicted = np.asarray(theory(r.settings, form).predict(times(r.settings)))
    return float(np.abs(r[f"{source}_{subject}"] - predicted).max())


def first(curve: Curves, t: Curves, level: float) -> float:
    """Time at which a curve first reaches a level, by linear interpolation; the last time if it does not."""
    above = np.flatnonzero(curve >= level)
    if not len(above) or above[0] == 0:
        return float(t[-1] if not len(above) else t[0])
    i = above[0]
    return float(np.interp(level, curve[i - 1:i + 1], t[i - 1:i + 1]))


def next_mode(r: Results) -> float:
    """Share that the next mode has learned when a mode has 0.95 of its target, the largest over modes."""
    (modes,), t = r[f"descent_{r.settings.curves}"], times(r.settings)
    return max(float(np.interp(first(one, t, 0.95), t, two)) for one, two in itertools.pairwise(modes))


def wait(r: Results) -> float:
    """The time to 0.05 as a share of that to 0.95, the smallest over modes."""
    (modes,), t = r[f"descent_{r.settings.curves}"], times(r.settings)
    return min(first(one, t, 0.05) / first(one, t, 0.95) for one in modes)


# ------------------------------------------------------------------------------------------------ picture


@styled
def draw(results: Results) -> Figure:
    figure, axes = panels(2, across=2)
    s = results.settings
    fine, t = np.linspace(0, s.end, 400), times(s)
    for ax, which in zip(axes, SUBJECTS, strict=True):
        predicted = np.asarray(theory(s, which).predict(fine))
        for k, v in enumerate(s.variances):
            line(ax, fine, predicted[k], COLOURS[k])
            points(ax, t[::5], results[f"descent_{which}"][:, k, ::5], COLOURS[k], f"E[x²] = {v:g}")
    label(axes[0], "time (steps x rate)", "theta / S", "a: linear model, Eq. 3.10", legend=True)
    label(axes[1], "time (steps x rate)", "a b / S", "b: diagonal linear network, Eq. 3.9")
    caption(figure, "Lines are the equations, points stochastic gradient descent: modes of the linear model all rise from the "
                    "start, those of the network wait, and each is there before the next begins.")
    return figure


OTHER = "the other model's equation"
EXPERIMENT = Experiment(
    name="layerwise_fig3_3", ref=Ref("layerwise", "Fig. 3.3"), title="sigmoids in turn where a linear model rises at once",
    smoke=LayerwiseFig3_3Settings(seeds=(0, 1)), paper=LayerwiseFig3_3Settings(seeds=tuple(range(10))), work=work,
    over=("seed",), analysis=("line", "network", "curves", "unit"),
    figures={"layerwise_fig3_3": draw}, start={"seeds": (0,), "end": 0.4}, reduced="2 seeds of 10",
    protocol="exact",
    claims=(
        Claim("a: largest |theta/S - Eq. 3.10| along the integrated flow", lambda r: apart(r, "flow", "line", r.settings.line),
              Interval(high=1e-8), (Control(OTHER, {"line": "network"}), Control("without E[x^2]", {"unit": True})),
              paper="exact", source="an identity; independent check 5e-12", says="Eq. 3.10 solves the flow of a linear model."),
        Claim("b: largest |ab/S - Eq. 3.9| along the integrated flow",
              lambda r: apart(r, "flow", "network", r.settings.network), Interval(high=1e-8),
              (Control(OTHER, {"network": "line"}), Control("without E[x^2]", {"unit": True})),
              paper="exact", source="an identity; independent check 3e-10",
              says="Eq. 3.9 solves the flow of a diagonal linear network."),
        Claim("a: largest |theta/S - Eq. 3.10| in stochastic gradient descent",
              lambda r: apart(r, "descent", "line", r.settings.line), Interval(high=0.05),
              (Control(OTHER, {"line": "network"}), Control("without E[x^2]", {"unit": True})), paper="the curve",
              source="noise of batches, sqrt(rate x time / batch) = .035 at most, and a twentieth is the eps of Fig. 3.4",
              over="seed", says="Fig. 3.3a: a linear model under stochastic descent follows Eq. 3.10."),
        Claim("b: largest |ab/S - Eq. 3.9| in stochastic gradient descent",
              lambda r: apart(r, "descent", "network", r.settings.network), Interval(high=0.05),
              (Control(OTHER, {"network": "line"}), Control("without E[x^2]", {"unit": True})), paper="the curve",
              source="noise of batches, sqrt(rate x time / batch) = .035 at most, and a twentieth is the eps of Fig. 3.4",
              over="seed", says="Fig. 3.3b: a diagonal linear network under stochastic descent follows Eq. 3.9."),
        Claim("b: the next mode when a mode has .95 of its target, largest", next_mode, Interval(high=0.05),
              (Control("the linear model", {"curves": "line"}), Control("from large weights, 0.3", {"start": 0.3})),
              paper="negligible", source="stages apart by the eps = .05 of Fig. 3.4; Eq. 3.13, corrected, has .021", over="seed",
              says="A diagonal linear network learns its modes in turn: the next is negligible when one saturates."),
        Claim("b: time to .05 over time to .95, smallest over modes", wait, Interval(low=0.3),
              (Control("the linear model", {"curves": "line"}), Control("from large weights, 0.3", {"start": 0.3})),
              paper="delayed saturation", source="Eq. 3.12: 1 - 2 ln 19 / (ln(S/ab) + ln 19) = .6; half of it", over="seed",
              says="The modes of a diagonal linear network have a delayed saturation."),
    ))
