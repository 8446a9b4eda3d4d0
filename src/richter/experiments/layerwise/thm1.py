"""Theorem 1 of [layerwise] and the three regimes of Figure 6.2: a linear network of one input and one output in closed form, from
lazy to rich."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.theory.scalar_network import ScalarNetwork

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Form = Literal["own", "printed", "unit"]
FORMS: dict[Form, tuple[float, bool]] = {"own": (2.0, True), "printed": (4.0, True), "unit": (2.0, False)}  # rate; is v in it?
FLOWS = ((0.3, 2.0, 1.0, 1.0), (1.0, -1.5, 2.0, 1.0), (0.5, 1.0, 3.0, 0.5), (1.0, 0.2, 4.0, 2.0), (0.1, 3.0, 1.0, 1.0))
# size of the weights, S, Z, v


@dataclass(frozen=True)
class LayerwiseThm1Settings:
    """The three regimes have ``units`` units. Claims choose ``form``, ``end``, ``weights``, ``target``, ``zeroed`` and
    ``wide``."""

    units: int = 100
    widths: tuple[int, ...] = (100, 1000, 10_000)
    seeds: tuple[int, ...] = tuple(range(10))
    form: Form = "own"
    end: Literal["own", "bound"] = "own"  # of gamma_plus: itself, or the bound S / Sigma_0
    weights: float = 0.01
    target: float = 1e-3
    zeroed: bool = True
    wide: Literal["root", "mean"] = "root"  # the output over sqrt(p) or over p


def work(t: Task[LayerwiseThm1Settings], run: Writer) -> Mapping[str, ArrayLike]:
    errors: dict[Form, list[float]] = {form: [] for form in FORMS}
    ends = []
    for size, S, Z, v in FLOWS:
        drawn = ScalarNetwork.drawn(20, weights=size, seed=t.seed)
        network = ScalarNetwork(drawn.a0, drawn.b0, S, Z, v)
        times = [*np.linspace(0, 3, 13), 20 * Z / v]
        *flow, gamma = network.simulate(times)
        for form, (rate, varied) in FORMS.items():
            closed = replace(network, rate=rate, variance=v if varied else 1.0).predict(times)
            errors[form].append(max(relative(a, b) for a, b in zip(closed, (*flow, gamma), strict=True)))
        last = float(gamma[-1])
        ends.append((network.gamma_plus / last - 1, network.bound / last - 1))
    run.progress(0.9)
    s = t.settings
    rows = {f"error_{form}": np.array(rows) for form, rows in errors.items()}
    wide = {f"gamma_{wide}": np.array([ScalarNetwork.drawn(p, scale=math.sqrt(p) if wide == "root" else p, seed=t.seed).gamma_plus
                                       for p in s.widths]) for wide in ("root", "mean")}
    return {**rows, "ends": np.array(ends), **wide}


def relative(a: ArrayLike, b: ArrayLike) -> float:
    """Relative distance |a - b| / |b|."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max())


def small(s: LayerwiseThm1Settings, seed: int) -> ScalarNetwork:
    """Network of panel a of Figure 6.2."""
    return ScalarNetwork.drawn(s.units, weights=s.weights, seed=seed)


def downscaled(s: LayerwiseThm1Settings, seed: int) -> ScalarNetwork:
    """Panel b: twice half of the units, the function zero."""
    half = ScalarNetwork.drawn(s.units // 2 if s.zeroed else s.units, target=s.target, seed=seed)
    return half.balanced() if s.zeroed else half


# ------------------------------------------------------------------------------------------------ claims


def seed_of(r: Results) -> int:
    """Seed of these results."""
    (seed,) = r.distinct("seed")
    return int(seed)


def small_gamma(r: Results) -> float:
    """gamma_plus of the network with small weights."""
    return small(r.settings, seed_of(r)).gamma_plus


def downscaled_deviation(r: Results) -> float:
    """Distance of gamma_plus from 1 in the downscaled network."""
    return abs(downscaled(r.settings, seed_of(r)).gamma_plus - 1)


def widest(r: Results) -> float:
    return float(abs(r[f"gamma_{r.settings.wide}"][0, -1] - 1))


def exponent(r: Results) -> float:
    """Exponent in the width of the root mean square of gamma_plus - 1 over seeds."""
    sizes = np.sqrt(((r[f"gamma_{r.settings.wide}"] - 1) ** 2).mean(0))
    return float(np.polyfit(np.log(r.settings.widths), np.log(sizes), 1)[0])


def off(r: Results) -> float:
    return float(np.abs(r["ends"][..., 0 if r.settings.end == "own" else 1]).max())


# ------------------------------------------------------------------------------------------------ pictures


@styled
def draw_theorem(results: Results) -> Figure:
    """Figure of the theorem's solution beside the simulated flow."""
    figure, axes = panels(3, across=3)
    times, fine = np.linspace(0, 3, 10), np.linspace(0, 3, 100)
    size, S, Z, v = FLOWS[2]
    drawn = ScalarNetwork.drawn(20, weights=size, seed=0)
    network = ScalarNetwork(drawn.a0, drawn.b0, S, Z, v)
    flow = network.simulate(times)
    for i in range(4):
        line(axes[0], fine, network.predict(fine)[0][i], COLOURS[i], "Theorem 1" if not i else "")
        points(axes[0], times, flow[0][i], COLOURS[i], "gradient flow" if not i else "")
    label(axes[0], "time", "a_i", "weights of four units", legend=True)
    points(axes[1], times, flow[2], COLOURS[0], "gradient flow")
    line(axes[1], fine, network.predict(fine)[2], label="corrected")
    line(axes[1], fine, replace(network, rate=4.0, variance=1.0).predict(fine)[2], COLOURS[1], "as printed", "--")
    label(axes[1], "time", "gamma", f"E[x²] = {v}, Z = {Z:g}", legend=True)
    for wide, colour, words in (("root", COLOURS[0], "output / sqrt(p)"), ("mean", COLOURS[1], "output / p")):
        points(axes[2], results.settings.widths, np.abs(results[f"gamma_{wide}"] - 1), colour, words)
    label(axes[2], "units p", "|gamma_plus - 1|", "lazier with width", log="xy", legend=True)
    caption(figure, "Weights follow the closed form; with the printed time constant they would arrive too early. Over sqrt(p) "
                    "the network becomes lazy as it widens, over p it does not.")
    return figure


def modes(ax: Axes, p: int, weights: float, target: float, scale: float, title: str) -> None:
    """Units with weights of one size and random signs, as in Sec. 6.2: each unit's part of the function beside what it was."""
    signs = np.where(np.arange(p) % 2, 1.0, -1.0)  # half of them aligned: a zero function
    network = ScalarNetwork(np.full(p, weights), weights * signs, target, scale)
    end = 6 * scale / math.hypot(target, p * weights**2 / scale)
    times = np.linspace(0, end, 80)
    a, b, _ = (np.asarray(z) for z in network.predict(times))
    share: NDArray[np.float64] = a * b / (a * b)[:, :1]
    chosen = np.asarray(network.aligned)
    for kind, colour, words in ((chosen, COLOURS[0], "aligned"), (~chosen, COLOURS[1], "anti-aligned")):
        line(ax, times / end, share[kind][0], colour, words)
    ax.set_yscale("log")
    ax.set_ylim(1e-3, 1e3)
    label(ax, "time, as a share of training", "a_i b_i, relative to the start", f"{title}, gamma_plus = {network.gamma_plus:.3g}",
          log="y", legend=True)


@styled
def draw_regimes(results: Results) -> Figure:
    """Figure of the regimes of training."""
    figure, axes = panels(3, across=3)
    s, p = results.settings, results.settings.widths[-1]
    modes(axes[0], s.units, s.weights, 1.0, 1.0, "a: small weights")
    modes(axes[1], s.units, 1.0, s.target, 1.0, "b: small target")
    modes(axes[2], p, 1.0, 1.0, math.sqrt(p), f"c: {p:,} units")
    caption(figure, "From small weights aligned units take over and the others die out; a small target, and many units over "
                    "sqrt(p), are reached while every unit stays what it was.")
    return figure


EXACT = "an identity; what is left is the integration of the flow"
EXPERIMENT = Experiment(
    name="layerwise_thm1", ref=Ref("layerwise", "Thm. 1"), title="a linear network of one input and one output, lazy to rich",
    places=("Thm. 1", "Fig. 6.2"), smoke=LayerwiseThm1Settings(),
    paper=LayerwiseThm1Settings(widths=(100, 1000, 10_000, 100_000), seeds=tuple(range(20))),
    work=work, over=("seed",), analysis=("form", "end", "wide", "zeroed", "weights", "target"),
    figures={"layerwise_thm1": draw_theorem, "layerwise_fig6_2": draw_regimes}, start={"seeds": (0,)},
    quick=True, reduced="10 seeds of 20, widths to 10,000 of 100,000",
    missing={"Fig. 6.2": "a sketch: drawn here from computed weights"},
    protocol="exact",
    claims=(
        Claim("largest relative error of a, b and gamma against the integrated flow, over networks with targets above and below "
              "0 and E[x^2] other than 1", lambda r: float(r[f"error_{r.settings.form}"].max()), Interval(high=1e-8),
              (Control("the printed exponent, 4 for 2", {"form": "printed"}), Control("without E[x^2]", {"form": "unit"})),
              paper="exact, with a 4", source=EXACT, places=("Thm. 1",),
              says="Theorem 1 solves the flow of a scalar linear network (printed with an exponent 4; corrected: 2).",
              reason="misprint"),
        Claim("largest |gamma_plus / gamma after a long time - 1|", off, Interval(high=1e-6),
              Control("the lower bound S / Sigma_0 for gamma_plus", {"end": "bound"}), paper="Eq. 6.14", source=EXACT,
              places=("Thm. 1",), says="Eq. 6.14: gamma goes to gamma_plus after a long time."),
        Claim("exponent of |gamma_plus - 1| in the number of units, output over sqrt(p)", exponent, Interval(-0.6, -0.4),
              Control("output over p", {"wide": "mean"}), paper="gamma_plus goes to 1",
              source="(S - S_0) / Sigma_0 with S_0 of order 1 and Sigma_0 of order sqrt(p)", places=("Thm. 1",),
              says="gamma_plus goes to 1 with the number of units, where the output is over sqrt(p)."),
        Claim("small weights: gamma_plus", small_gamma, Interval(low=100), Control("weights of size 1", {"weights": 1.0}),
              paper="large", source="Sec. 6.3.1: S / Sigma_0 = 100 and more", places=("Fig. 6.2",), over="seed",
              says="Small weights make gamma_plus large (rich dynamics)."),
        Claim("small target from a zero function: |gamma_plus - 1|", downscaled_deviation, Interval(high=1e-3),
              (Control("from a function that is not zero", {"zeroed": False}), Control("a target of 1", {"target": 1.0})),
              paper="about 1", source="1 + S / Sigma_0, Sigma_0 > 1 and S = 1e-3", places=("Fig. 6.2",), over="seed",
              says="A small target keeps gamma_plus about 1 (lazy dynamics)."),
        Claim("many units over sqrt(p): |gamma_plus - 1| of the widest", widest, Interval(high=0.03),
              Control("output over p", {"wide": "mean"}), paper="about 1",
              source="independent check: 1.008 +- 0.011 at p = 10,000", places=("Fig. 6.2",), over="seed",
              says="Many units keep gamma_plus about 1 (lazy dynamics)."),
    ))
