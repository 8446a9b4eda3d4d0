"""Fully connected linear networks: singular directions, one after the other, also where moments do not commute.  [agf, Sec. 4]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from richter.experiments.agf.staircases import (
    Numbers,
    crossings,
    draw_staircase,
    even_times,
    plateaus,
    relative_error,
    times_around,
)
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.linalg import haar
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.theory import agf

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("commuting", "other")


@dataclass(frozen=True)
class AgfLinearSettings:
    """E[y x^T] has singular values that fall by a factor of about 1.6, E[x x^T] eigenvalues from .7 to 1.4: along the same
    directions (commuting), or along random ones (other)."""

    d: int = 5
    width: int = 12
    log: float = 32.0  # log(1/alpha); float64 ends near 36
    times: Literal["agf", "evenly", "reversed"] = "agf"
    levels: Literal["agf", "white"] = "agf"  # as if inputs were white
    seeds: tuple[int, ...] = tuple(range(10))
    kinds: ClassVar = KINDS


def problem(s: AgfLinearSettings, kind: str, seed: int) -> tuple[Numbers, Numbers]:
    """Second moments E[x x^T] and E[y x^T] of a linear problem."""
    draw = np.random.default_rng((seed, 22))
    strengths = 4 * 1.6 ** -(np.arange(s.d) + draw.uniform(-0.15, 0.15, s.d))
    V, U = haar(s.d, draw), haar(s.d, draw)
    axes = V if kind == "commuting" else haar(s.d, draw)
    return (axes * draw.uniform(0.7, 1.4, s.d)) @ axes.T, (U * strengths) @ V.T


def work(t: Task[AgfLinearSettings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    Sxx, Syx = problem(s, t.kind, t.seed)
    stairs = agf.linear(Sxx, Syx)
    times, levels = np.asarray(stairs.times), np.asarray(stairs.levels)
    grid = times_around(times, 1.3 * times[-1])
    loss = np.asarray(agf.simulate_linear(Sxx, Syx, s.width, s.log, grid, seed=t.seed))
    seen = crossings(grid, loss, levels)
    white = np.linalg.svd(Syx, compute_uv=False) ** 2
    return {"seen": seen, "agf": times, "evenly": even_times(seen), "reversed": times[0] + times[-1] - times[::-1],
            "plateaus": plateaus(grid, loss, seen)[:-1], "levels_agf": levels[1:-1],
            "levels_white": np.cumsum(white[::-1])[::-1][1:] / 2, "t": np.linspace(0, grid[-1], 1_000), "first": levels[0],
            "loss": np.interp(np.linspace(0, grid[-1], 1_000), grid, loss)}


def late(r: Results, kind: str) -> float:
    """The largest relative error of a jump time but the first."""
    here = r.where(kind=kind)
    return float(relative_error(here[r.settings.times], here["seen"])[:, 1:].max())


def first(r: Results, kind: str) -> float:
    """Largest relative error of the first jump time."""
    here = r.where(kind=kind)
    return float(relative_error(here[r.settings.times], here["seen"])[:, 0].max())


def level(r: Results, kind: str) -> float:
    """The largest relative error of a level between two jumps."""
    here = r.where(kind=kind)
    return float(relative_error(here[f"levels_{r.settings.levels}"], here["plateaus"]).max())


@styled
def draw(results: Results) -> Figure:
    figure, (*stairs, right) = panels(3, across=3)
    for ax, kind in zip(stairs, KINDS, strict=True):
        _, one = next(iter(results.where(kind=kind)))
        draw_staircase(ax, one["t"], one["loss"], one["agf"], np.concatenate([[one["first"]], one["levels_agf"], [0.0]]),
                       "gradient flow", "alternating flows")
        label(ax, "time / log(1/alpha)", "loss",
              "moments commute" if kind == "commuting" else "moments do not commute", legend=True)
    for colour, kind in zip(COLOURS, KINDS, strict=False):
        here = results.where(kind=kind)
        points(right, np.arange(1, results.settings.d + 1), here["seen"] / here["agf"], colour, kind)
    line(right, [1, results.settings.d], [1, 1], label="as predicted")
    label(right, "mode", "jump time / predicted", legend=True)
    caption(figure, "The loss of a linear network from weights of size exp(-32) is the staircase that alternating flows predict; "
                    "the first jump is late by a few per cent.")
    return figure


EVENLY = Control("as many jumps, evenly from the first to the last of the flow", {"times": "evenly"})
REVERSED = Control("the same gaps in the opposite order", {"times": "reversed"})
LARGE = Control("larger weights: log(1/alpha) = 2", {"log": 2.0})
WHITE = Control("levels as if inputs were white", {"levels": "white"})
SEEN = "independent check: 3 % for the first jump and 0 to 1 % for later ones (commuting), 3 to 9 % and 0 to 4 % (others)"


def of_kind(kind: str, words: str, place: str) -> tuple[Claim, Claim, Claim]:
    """Claims on moments that commute, or on others."""
    return (Claim(f"{words}: largest relative error of a jump time behind the first", lambda r: late(r, kind),
                  Interval(high=0.05), (EVENLY, REVERSED), places=(place,), source=f"bar set with the task; {SEEN}", over="seed",
                  says=f"AGF tells when a linear network learns each singular mode, here where {words}."),
            Claim(f"{words}: relative error of the first jump time", lambda r: first(r, kind), Interval(high=0.10), LARGE,
                  places=(place,), source=f"bar set with the task; {SEEN}", over="seed",
                  says=f"AGF tells when a linear network learns its first singular mode, here where {words}."),
            Claim(f"{words}: largest relative error of a level between jumps", lambda r: level(r, kind), Interval(high=1e-3),
                  WHITE, places=(place,), source="independent check: three to four digits", over="seed",
                  says=f"AGF tells the loss of a linear network on every plateau, here where {words}."))


EXPERIMENT = Experiment(
    name="agf_linear", ref=Ref("agf", "Sec. 4"), title="linear networks of two layers learn singular directions in jumps",
    smoke=AgfLinearSettings(seeds=(0, 1, 2)), paper=AgfLinearSettings(), over=("kind", "seed"), analysis=("times", "levels"),
    work=work, figures={"agf_linear": draw},
    places=("Sec. 4", "Conjecture 4.1"), start={"seeds": (0,), "log": 2.0}, reduced="three of ten problems", quick=True,
    missing=dict.fromkeys(("Sec. 4", "Conjecture 4.1"), "the paper's own problems are not known to us: random ones of 5 modes"),
    protocol="unstated: the paper's problems are not known here; random ones of 5 modes",
    claims=(*of_kind("commuting", "moments commute", "Sec. 4"), *of_kind("other", "moments do not commute", "Conjecture 4.1")))
