"""Figures 3.4 and 4.1 of [layerwise]: skills of the multilinear model rise in turn, and the loss falls by steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Writer
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.theory.emergence import crossing
from richter.theory.multilinear import Linear, Multilinear

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class LayerwiseFig3_4Settings:
    """alpha and S of the figure. The text does not give R(0); five skills come in stages only from a small one. Claims choose
    ``model``, ``rate`` and ``order``."""

    skills: int = 5
    alpha: float = 0.6
    target: float = 5.0
    initial: float = 5e-8
    eps: float = 0.05
    model: Literal["multilinear", "linear"] = "multilinear"
    rate: float = 2.0
    order: Literal["frequency", "equal"] = "frequency"


def times(s: LayerwiseFig3_4Settings) -> Vector:
    """Times up to twice that at which the last skill is half learned, dense enough to read times off."""
    last = Multilinear(s.alpha, s.skills, s.target, 1.0, s.initial).emergent_time(0.5)[-1]
    return np.linspace(0.0, 2.0 * last, 4001)


def work(s: LayerwiseFig3_4Settings, run: Writer) -> Mapping[str, ArrayLike]:
    """R_k [skills, t] of both models by integrating their flows on endless data."""
    T = times(s)
    multilinear = Multilinear(s.alpha, s.skills, s.target, 1.0, s.initial).simulate(T)
    run.progress(0.5)
    return {"T": T, "multilinear": multilinear, "linear": Linear(s.alpha, s.skills, s.target).simulate(T)}


# ------------------------------------------------------------------------------------------------ claims


def frequencies(s: LayerwiseFig3_4Settings) -> Vector:
    """Frequencies of the skills, a normalised power law."""
    P = np.arange(1.0, s.skills + 1) ** -(1 + s.alpha)
    return np.asarray(P / P.sum())


def read_off(r: Results) -> tuple[Vector, Vector]:
    """(T, R / S) of the model that is looked at."""
    return r["T"][0], r[r.settings.model][0] / r.settings.target


def when(r: Results, share: float) -> Vector:
    """The time at which each skill reaches a share."""
    T, R = read_off(r)
    return np.array([crossing(T, row, share) for row in R])


def stages(r: Results) -> float:
    """The smallest interval between the emergence of two skills, over the time in which the first of them saturates."""
    eps = r.settings.eps
    emerge, saturated = when(r, eps), when(r, 1 - eps)
    return float((np.diff(emerge) / (saturated - emerge)[:-1]).min())


def drops(r: Results) -> float:
    """Largest deviation of the fall of the loss between two emergences from P(k) S^2 / 2, relative to that."""
    s = r.settings
    T, R = read_off(r)
    P = frequencies(s)
    loss = P @ (1 - R) ** 2
    at = np.interp(when(r, s.eps), T, loss)
    return float(np.abs(-np.diff(at) / P[:-1] - 1).max())


def off(r: Results) -> float:
    """Largest distance between the integrated and the closed skill strengths, relative to the target."""
    s = r.settings
    closed = Multilinear(s.alpha, s.skills, s.target, 1.0, s.initial, rate=s.rate).skill_strength(r["T"][0])
    return float(np.abs(closed - r["multilinear"][0]).max() / s.target)


def early(r: Results) -> float:
    """The largest R / S of a skill at half the time that it takes to its half."""
    T, R = read_off(r)
    return float(max(np.interp(t / 2, T, row) for t, row in zip(when(r, 0.5), R, strict=True)))


def ratios(r: Results) -> float:
    """Largest deviation of the ratios of half-times from those of the inverse frequencies."""
    half, P = when(r, 0.5), frequencies(r.settings)
    expected = P[0] / P if r.settings.order == "frequency" else np.ones_like(P)
    return float(np.abs(half / half[0] / expected - 1).max())


# ------------------------------------------------------------------------------------------------ pictures


@styled
def draw_stages(results: Results) -> Figure:
    """Figure of the stages: skill strengths with their times, and the loss."""
    figure, (left, right) = panels(2, across=2)
    s, (T, R) = results.settings, read_off(results)
    emerge, saturated = when(results, s.eps), when(results, 1 - s.eps)
    for k, row in enumerate(R):
        line(left, T, row, COLOURS[k], f"skill {k + 1}")
        points(left, [emerge[k], saturated[k]], [s.eps, 1 - s.eps], COLOURS[k])
        line(right, [emerge[k]] * 2, [0, s.target**2 / 2], COLOURS[k], style=":")
    line(right, T, frequencies(s) @ (s.target * (1 - R)) ** 2 / 2, label="loss")
    label(left, "time", "R / S", "a: strengths; points at 0.05 and 0.95", legend=True)
    label(right, "time", "loss", "b: dotted where a skill emerges")
    caption(figure, "Each skill is learned before the next one emerges, and the loss falls by its share each time.")
    return figure


@styled
def draw_sigmoids(results: Results) -> Figure:
    """Figure of the strengths by the multilinear and the linear model."""
    figure, (left, right) = panels(2, across=2)
    s, T = results.settings, results["T"][0]
    closed: dict[str, Multilinear | Linear] = {"multilinear": Multilinear(s.alpha, s.skills, s.target, 1.0, s.initial),
                                               "linear": Linear(s.alpha, s.skills, s.target)}
    some = np.linspace(0, len(T) - 1, 24).astype(int)
    for ax, (name, model) in zip((left, right), closed.items(), strict=True):
        for k in range(s.skills):
            line(ax, T, model.skill_strength(T)[k] / s.target, COLOURS[k], f"skill {k + 1}")
            points(ax, T[some], results[name][0][k][some] / s.target, COLOURS[k])
        label(ax, "time", "R / S", "b: multilinear" if name == "multilinear" else "a linear model with the same basis",
              legend=name == "multilinear")
    caption(figure, "Closed forms (lines) and integrated flows (points): products of two weights wait and then rise, rare skills "
                    "later; single weights rise from the start.")
    return figure


LARGE = Control("from a strength of S / 20", {"initial": 0.24})
LINEAR = Control("a linear model with the same basis", {"model": "linear"})
EXPERIMENT = Experiment(
    name="layerwise_fig3_4", ref=Ref("layerwise", "Fig. 3.4"), title="skills rise in turn, and the loss falls by steps",
    places=("Fig. 3.4", "Fig. 4.1"), smoke=LayerwiseFig3_4Settings(), paper=LayerwiseFig3_4Settings(), work=work, quick=True,
    start={"skills": 2}, figures={"layerwise_fig3_4": draw_stages, "layerwise_fig4_1": draw_sigmoids},
    missing={"Fig. 4.1": "panel a, a sketch of the model"},
    protocol="exact",
    claims=(
        Claim("smallest interval between two emergences over the time in which the earlier skill saturates", stages,
              Interval(low=1.0), (LARGE, LINEAR), paper="above 1", source="the definition of stage-like training, Sec. 3.4.2",
              places=("Fig. 3.4",),
              says="The multilinear model trains in stages: skills emerge further apart than they take to saturate (eps = "
                   "0.05)."),
        Claim("largest relative deviation of a fall of the loss from P(k) S^2 / 2", drops, Interval(high=0.2), (LARGE, LINEAR),
              paper="O(eps)", source="2 eps for the skill itself and at most 2 eps for the next, eps = 0.05",
              places=("Fig. 3.4",),
              says="The loss of the multilinear model falls by P(k) S^2 / 2 with each skill, up to O(eps)."),
        Claim("largest |closed form - integrated flow| over S", off, Interval(high=1e-8),
              Control("an exponent without its 2", {"rate": 1.0}), paper="Eq. 4.11", source="an identity", places=("Fig. 4.1",),
              says="Eq. 4.11 solves the flow of the multilinear model."),
        Claim("largest R / S at half of a skill's half-time", early, Interval(high=0.05), LINEAR, paper="sigmoidal",
              source=f"a sigmoid has 1 / (1 + exp(log(S / R(0)) / 2)), far below; an exponential {1 - math.sqrt(0.5):.2f}",
              places=("Fig. 4.1",), says="Skills of the multilinear model grow as sigmoids."),
        Claim("largest deviation of ratios of half-times from P(1) / P(k)", ratios, Interval(high=1e-3),
              Control("equal times", {"order": "equal"}), paper="less frequent skills later",
              source="Lemma 1; times are read between points", places=("Fig. 4.1",),
              says="Less frequent skills come later, in proportion to 1 / P(k)."),
    ))
