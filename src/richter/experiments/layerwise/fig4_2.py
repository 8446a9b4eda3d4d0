"""Table 4.1 and Figures 4.2, 4.3 and C.1 of [layerwise]: how the loss of very many skills falls with time, data, parameters and
compute, with every skill followed by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.theory.flows import flow
from richter.theory.multilinear import Exponents, Multilinear

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Vector = NDArray[np.float64]
Resource = Literal["time", "data", "parameters", "compute"]
RESOURCES: tuple[Resource, ...] = ("time", "data", "parameters", "compute")


@dataclass(frozen=True)
class LayerwiseFig4_2Settings:
    """``first`` and ``last`` (a power of the number of skills) say which skills emerge in the range that is fitted. Claims
    choose ``corrected``, ``exponent``, ``constant``, ``optimal`` and ``size``."""

    skills: int = 100_000
    alphas: tuple[float, ...] = (0.1, 0.3, 0.6, 0.9)
    target: float = 5.0
    initial: float = 0.01
    first: float = 30.0
    last: float = 0.55
    points: int = 16
    examples: int = 400_000  # that are drawn for each amount of data: many small sets, or few large ones
    small: int = 50_000  # skills, and basis functions, of Fig. C.1
    corrected: bool = True
    exponent: Literal["own", "compute", "time"] = "own"
    constant: Literal["own", "one"] = "own"
    optimal: Literal["own", "half"] = "own"
    size: Literal["best", "fixed"] = "best"


class Simulation:
    """Flows of single skills: a_k and b_k follow the flow of their loss, which is the same flow for all in units of the
    skill's own share of time. Data sets are sampled."""

    def __init__(self, alpha: float, skills: int, target: float, initial: float) -> None:
        powers = np.arange(1, skills + 1, dtype=float) ** -(1 + alpha)
        self.P, self.S, self.steps = powers / powers.sum(), target, np.cumsum(powers) / powers.sum()
        self.y = np.concatenate([[0.0], np.geomspace(1e-6, 60.0, 6000)])

        def velocity(state: Vector) -> Vector:
            a, b = state
            return (target - a * b) * np.array([b, a])

        self.R = np.array([a * b for a, b in flow(velocity, np.full(2, math.sqrt(initial)), self.y.tolist())])

    def half(self) -> float:
        """The share times time at which a skill is half learned."""
        return float(np.interp(self.S / 2, self.R, self.y))

    def in_time(self, T: float, N: int | None = None) -> float:
        """Loss after time T with the first N basis functions."""
        P = self.P[:N]
        return float(P @ (self.S - np.interp(P * T, self.y, self.R)) ** 2 + self.S**2 * (1 - P.sum())) / 2

    def in_data(self, D: int, draws: int, rng: np.random.Generator) -> float:
        """The mean over data sets, each skill learned that was seen once."""
        drawn = (np.searchsorted(self.steps, rng.random(D)).clip(max=len(self.P) - 1) for _ in range(draws))
        seen = [self.P[np.unique(skills)].sum() for skills in drawn]
        return self.S**2 / 2 * (1 - float(np.mean(seen)))

    def in_parameters(self, N: int) -> float:
        """Loss after infinite time with the first N basis functions."""
        return self.S**2 / 2 * float(self.P[N:].sum())


def work(t: Task[LayerwiseFig4_2Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s, rng = t.settings, np.random.default_rng((round(1000 * t.alpha), 3))
    sim = Simulation(t.alpha, s.skills, s.target, s.initial)
    k = np.geomspace(s.first, s.skills**s.last, s.points)
    P = sim.P[0] * k ** -(1 + t.alpha)
    T, D, N = sim.half() / P, np.round(1 / P).astype(int), np.round(k).astype(int)
    out: dict[str, ArrayLike] = {"x_time": T, "x_data": D, "x_parameters": N, "x_compute": k * T}
    out["time"] = np.array([sim.in_time(v) for v in T])
    run.progress(0.3)
    out["data"] = np.array([sim.in_data(int(d), int(np.clip(s.examples // d, 2, 2000)), rng) for d in D])
    run.progress(0.6)
    out["parameters"] = np.array([sim.in_parameters(int(n)) for n in N])
    sizes = np.unique(np.geomspace(5, 8 * k[-1], 250).round().astype(int))
    losses = np.array([[sim.in_time(C / n, int(n)) if 0.1 < n / m < 10 else np.inf for n in sizes]
                       for C, m in zip(k * T, k, strict=True)])
    fixed = round(math.sqrt(k[0] * k[-1]))
    out |= {"compute": losses.min(1), "best": sizes[losses.argmin(1)], "fixed": [sim.in_time(C / fixed, fixed) for C in k * T]}
    return {**out, **finite(t, run), **frontier_curves(t, sim)}


def finite(t: Task[LayerwiseFig4_2Settings], run: Writer) -> dict[str, ArrayLike]:
    """Fig. C.1: the loss of fewer skills in time, and T dL/dT in the middle."""
    s = t.settings
    sim = Simulation(t.alpha, s.small, s.target, s.initial)
    k = np.geomspace(1, s.small / 2, 40)
    T = sim.half() / (sim.P[0] * k ** -(1 + t.alpha))
    middle = sim.half() / (sim.P[0] * 250.0 ** -(1 + t.alpha))
    low, high = (sim.in_time(middle * f) for f in (0.99, 1.01))
    run.progress(0.9)
    return {"small_x": T, "small": [sim.in_time(v) for v in T], "small_slope": (high - low) / (math.log(1.01) - math.log(0.99)),
            "small_loss": sim.in_time(middle)}


def frontier_curves(t: Task[LayerwiseFig4_2Settings], sim: Simulation) -> dict[str, ArrayLike]:
    """Fig. 4.3: loss against compute for sizes from 10 to 10,000."""
    sizes = np.geomspace(10, 10_000, 7).round().astype(int)
    late = sim.half() / (sim.P[0] * sizes ** -(1.0 + t.alpha))
    T = late[:, None] * np.geomspace(1e-3, 10, 24)
    return {"sizes": sizes, "curve_x": sizes[:, None] * T,
            "curves": [[sim.in_time(v, int(n)) for v in row] for n, row in zip(sizes, T, strict=True)]}


# ------------------------------------------------------------------------------------------------ claims


def model(r: Results, skills: int | None = None) -> Multilinear:
    """Multilinear model with the settings of these results."""
    (alpha,) = r.distinct("alpha")
    s = r.settings
    return Multilinear(alpha, skills or s.skills, s.target, 1.0, s.initial)


def losses(r: Results, what: Resource) -> Vector:
    """Losses, with the finite-size correction if the claims use it."""
    name = "fixed" if what == "compute" and r.settings.size == "fixed" else what
    return np.asarray(r[name][0] + (model(r).finite_size() if r.settings.corrected else 0.0))


def slope(x: Vector, y: Vector) -> float:
    """Exponent of a power law fitted to y(x)."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def exponents(r: Results) -> Exponents:
    """Exponents of Table 4.1, or with the laws of time and compute exchanged."""
    own, s = model(r).exponents, r.settings
    if s.exponent == "compute":
        return own._replace(time=own.compute, data=own.compute, parameters=own.compute)
    return own._replace(compute=own.time) if s.exponent == "time" else own


def off(r: Results, what: tuple[Resource, ...] = RESOURCES, alphas: tuple[float, ...] = ()) -> float:
    """Largest |fitted - theoretical exponent| over resources and alphas."""
    rows = []
    for alpha in alphas or r.distinct("alpha"):
        one = r.where(alpha=alpha)
        rows += [abs(slope(one[f"x_{name}"][0], losses(one, name)) - getattr(exponents(one), name)) for name in what]
    return float(max(rows))


def raw(r: Results, alphas: tuple[float, ...]) -> float:
    """Largest error of the exponents of time, data and parameters, fitted without the finite-size correction."""
    plain = Results(replace(r.settings, corrected=False), r.tasks, [arrays for _, arrays in r])
    return off(plain, RESOURCES[:3], alphas)


def constants(r: Results) -> float:
    """Largest deviation of the losses from c x^exponent, over resources and alphas, at the larger half of x."""
    rows = []
    for alpha in r.distinct("alpha"):
        one = r.where(alpha=alpha)
        for name in RESOURCES:
            x, m = one[f"x_{name}"][0].astype(float), model(one)
            c = getattr(m.prefactors, name) if r.settings.constant == "own" else 1.0
            ratio = losses(one, name) / (c * x ** getattr(m.exponents, name))
            rows.append(np.abs(np.mean(ratio[len(x) // 2:]) - 1))
    return float(max(rows))


def best_size(r: Results) -> float:
    """Largest |fitted - theoretical exponent| of the best number of parameters in compute."""
    rows = []
    for alpha in r.distinct("alpha"):
        one = r.where(alpha=alpha)
        expected = model(one).exponents.optimal_parameters if r.settings.optimal == "own" else 0.5
        rows.append(abs(slope(one["x_compute"][0], one["best"][0]) - expected))
    return float(max(rows))


def corrected_slope(r: Results) -> float:
    """|T dL/dT over what Eq. C.2 says - 1| at the smallest alpha."""
    one = r.where(alpha=min(r.distinct("alpha")))
    m = model(one, r.settings.small)
    expected = m.exponents.time * (one["small_loss"][0] + (m.finite_size() if r.settings.corrected else 0.0))
    return float(abs(one["small_slope"][0] / expected - 1))


# ------------------------------------------------------------------------------------------------ pictures


@styled
def draw_laws(results: Results) -> Figure:
    """Figure of the scaling laws in each resource."""
    figure, axes = panels(3, across=3)
    for ax, name, letter in zip(axes, RESOURCES[:3], "abc", strict=True):
        for i, alpha in enumerate(results.distinct("alpha")):
            one = results.where(alpha=alpha)
            x, m = one[f"x_{name}"][0].astype(float), model(one)
            points(ax, x, one[name][0], COLOURS[i], f"alpha = {alpha:g}")
            law = getattr(m.prefactors, name) * x ** getattr(m.exponents, name)
            line(ax, x, law - m.finite_size(), COLOURS[i])
            line(ax, x, law / law[0] * one[name][0][0], COLOURS[i], style=":")
        label(ax, name, "loss", f"{letter}: {name}", log="xy", legend=name == "time")
    caption(figure, "The simulated loss (points) follows the power law minus the finite-size correction (lines, exponents and "
                    "constants from theory); for small alpha it leaves the plain power law (dotted).")
    return figure


@styled
def draw_frontier(results: Results) -> Figure:
    """Figure of the loss against compute, with the optimal frontier."""
    alphas = results.distinct("alpha")[-3:]
    figure, axes = panels(len(alphas), across=len(alphas))
    for ax, alpha in zip(axes, alphas, strict=True):
        one = results.where(alpha=alpha)
        m, C = model(one), np.geomspace(one["curve_x"][0].min(), one["curve_x"][0].max(), 60)
        for i, n in enumerate(one["sizes"][0]):
            line(ax, one["curve_x"][0][i], one["curves"][0][i], COLOURS[i % 7], f"N = {n}")
        line(ax, C, m.prefactors.compute * C**m.exponents.compute, style=":", label="optimal compute")
        points(ax, one["x_compute"][0], one["compute"][0], "#222222", "best N of the simulation")
        label(ax, "compute C = T N", "loss", f"alpha = {alpha:g}", log="xy", legend=ax is axes[-1])
    caption(figure, "Each size (solid) is best for one compute, where it has learned most of its skills; the lower envelope is "
                    "the law of optimal compute (dotted), with its exponent and constant.")
    return figure


@styled
def draw_correction(results: Results) -> Figure:
    """Figure of the correction for finitely many skills."""
    figure, (ax,) = panels(1, across=1)
    for i, alpha in enumerate(results.distinct("alpha")):
        one = results.where(alpha=alpha)
        x, m = one["small_x"][0], model(one, results.settings.small)
        points(ax, x, one["small"][0], COLOURS[i], f"alpha = {alpha:g}")
        law = m.prefactors.time * x**m.exponents.time
        line(ax, x, np.where(law > m.finite_size(), law - m.finite_size(), np.nan), COLOURS[i], style="--")
        line(ax, x, law / law[3] * one["small"][0][3], COLOURS[i], style=":")
    label(ax, "time", "loss", f"N = {results.settings.small:,}", log="xy", legend=True)
    caption(figure, "With the finite-size correction (dashed) the law follows the simulation (points); the plain power law "
                    "(dotted) does not for small alpha.")
    return figure


PLAIN = Control("without the finite-size correction", {"corrected": False})
CHECK = "independent check: slopes of loss + L_C within .005 of theory"
EXPERIMENT = Experiment(
    name="layerwise_fig4_2", ref=Ref("layerwise", "Fig. 4.2"), title="powers of time, data, parameters and compute",
    places=("Table 4.1", "Fig. 4.2", "Fig. 4.3", "Fig. C.1"), smoke=LayerwiseFig4_2Settings(), work=work, over=("alpha",),
    analysis=("corrected", "exponent", "constant", "optimal", "size"),
    paper=LayerwiseFig4_2Settings(skills=1_000_000, points=24, examples=4_000_000),
    start={"skills": 2000, "small": 2000, "examples": 1000},
    figures={"layerwise_fig4_2": draw_laws, "layerwise_fig4_3": draw_frontier, "layerwise_fig_c_1": draw_correction},
    reduced="10^5 skills of 10^6",
    protocol="exact",
    claims=(
        Claim("largest |fitted - theoretical exponent| of the loss plus L_C, over time, data, parameters and compute, alphas .1 "
              "to .9", off, Interval(high=0.005), (PLAIN, Control("one law, that of compute, for all", {"exponent": "compute"})),
              paper="Table 4.1", source=CHECK, places=("Table 4.1",),
              says="Table 4.1: the multilinear model has the exponents of the scaling laws in time, data, parameters and "
                   "compute."),
        Claim("largest relative deviation of the loss plus L_C from c x^exponent, with constants from theory", constants,
              Interval(high=0.02), (PLAIN, Control("without constants", {"constant": "one"})),
              source="corrections are of order 1 / k, k > 150 in the half that is averaged", places=("Table 4.1",), own=True),
        Claim("largest |fitted - theoretical exponent| without the correction, alpha = .3",
              lambda r: raw(r, (0.3,)), Interval(high=0.03), Control("one law for all", {"exponent": "compute"}),
              source="independent check, 10^6 skills", places=("Fig. 4.2",),
              differs={"smoke": "with 10^5 skills the missing ones cost more"},
              says="Fig. 4.2: learning curves follow the power laws in time, data and parameters (alpha = 0.3)."),
        Claim("largest |fitted - theoretical exponent| without the correction, alpha = .6 and .9",
              lambda r: raw(r, (0.6, 0.9)), Interval(high=0.006), Control("one law for all", {"exponent": "compute"}),
              source="independent check, 10^6 skills", places=("Fig. 4.2",),
              differs={"smoke": "with 10^5 skills the missing ones cost more"},
              says="Fig. 4.2: learning curves follow the power laws in time, data and parameters (alpha = 0.6 and 0.9)."),
        Claim("largest |fitted - theoretical exponent| of the smallest loss plus L_C in compute, over alphas",
              lambda r: off(r, ("compute",)), Interval(high=0.005),
              (Control("the law of time", {"exponent": "time"}), Control("one size for every compute", {"size": "fixed"})),
              paper="-alpha / (alpha + 2)", source=CHECK, places=("Fig. 4.3",),
              says="Fig. 4.3: the smallest loss falls with compute by the exponent -alpha / (alpha + 2)."),
        Claim("largest |fitted - theoretical exponent| of the best size in compute, over alphas", best_size, Interval(high=0.005),
              Control("the square root of compute", {"optimal": "half"}), paper="1 / (alpha + 2)",
              source="independent check: .388 for .385", places=("Fig. 4.3",),
              says="Fig. 4.3: the best size grows with compute by the exponent 1 / (alpha + 2)."),
        Claim("|T dL/dT over Eq. C.2 - 1| of 50,000 skills, alpha = .1", corrected_slope, Interval(high=0.01), PLAIN,
              paper="Eq. C.2", source="independent check: -.9430 for -.9451", places=("Fig. C.1",),
              says="Eq. C.2, corrected for a finite number of skills, predicts the slope of the loss of 50,000 skills."),
    ))
