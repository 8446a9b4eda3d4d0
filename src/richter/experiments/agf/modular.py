"""Quadratic networks on modular addition: Fourier components of the template, the largest first.  [agf, Sec. 6]"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize

from richter.experiments.agf.staircases import Numbers, crossings, descend, draw_staircase, even_times, relative_error
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, band, caption, label, line, panels, points, styled
from richter.theory import agf, alternating

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES = 2_000  # of a training, evenly in time
CLEAR = 0.01  # frequencies are separated where the predicted staircase comes so near to the level between them


@dataclass(frozen=True)
class AgfModularSettings:
    """A template of ``p`` numbers with two frequencies, whose sizes change places with the seed, and random phases. Neurons start
    with norm ``alpha``. Descent in short steps for the flow. Jumps are those of the algorithm, one for each neuron that wakes."""

    p: int = 10
    frequencies: tuple[int, int] = (1, 3)
    sizes: tuple[float, float] = (4.0, 10.0)
    neurons: int = 16
    alpha: float = 1e-3
    lr: float = 1e-3
    counts: tuple[int, ...] = (4, 5, 6, 7)  # neurons for a template of one frequency
    restarts: int = 8
    enough: int = 6
    order: Literal["sizes", "index"] = "sizes"  # by which frequencies are said to come
    times: Literal["agf", "evenly"] = "agf"  # evenly from the first to the last jump
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def wave(p: int, frequency: int, size: float, phase: float) -> Numbers:
    """Cosine with a Fourier coefficient of this size."""
    return 2 / p * size * np.cos(2 * np.pi * frequency * np.arange(p) / p + phase)


def work(t: Task[AgfModularSettings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    draw = np.random.default_rng((t.seed, 25))
    sizes = s.sizes if t.seed % 2 == 0 else s.sizes[::-1]
    parts = [wave(s.p, k, size, draw.uniform(0, 2 * np.pi)) for k, size in zip(s.frequencies, sizes, strict=True)]
    x, y = (np.asarray(a) for a in agf.modular_pairs(sum(parts)))
    targets = [np.asarray(agf.modular_pairs(part)[1]) for part in parts]
    theta = draw.standard_normal((s.neurons, 3 * s.p))
    theta *= s.alpha / np.linalg.norm(theta, axis=1, keepdims=True)
    neuron, given = alternating.layers("square", theta, x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of merged jumps: their times are compared all the same
        learned = agf.alternating_flows(neuron, *given, tolerance=0.02)
    times, stairs = np.asarray(learned.staircase.times), np.asarray(learned.staircase.levels)
    run.progress(0.4)
    every = max(1, int(1.3 * times[-1] / s.lr / SAMPLES))
    loss, kept = descend("square", theta, x, y, s.lr, every * SAMPLES, every)
    grid = np.arange(len(loss), dtype=float) * every * s.lr
    shares = [[(((x @ w[:, :2 * s.p].T) ** 2 @ w[:, 2 * s.p:]) * target).sum() / (target**2).sum() for target in targets]
              for w in kept]
    seen = crossings(grid, loss, stairs)
    levels = np.asarray(agf.modular(sum(parts)).levels) * s.p / 2  # of E|y - f|^2 / 2
    middle = plateau(np.asarray(grid, dtype=np.float64), loss, float(levels[1]))
    even = even_times(seen[np.isfinite(seen)])
    return {**{name: padded(values, s.neurons) for name, values in (("seen", seen), ("agf", times), ("evenly", even),
                                                                    ("stairs", stairs))},
            "t": grid, "loss": loss, "shares": shares, "sizes": sizes, "plateau": middle, "levels": levels,
            "separated": np.abs(stairs / levels[1] - 1).min() < CLEAR,
            "residuals": [residual(s, count, t.seed) for count in s.counts]}


def plateau(t: Numbers, loss: Numbers, level: float) -> float:
    """The loss where it falls most slowly in log t, among losses within a fifth of this level."""
    near = np.flatnonzero((np.abs(loss / level - 1) < 0.2) & (t > 0))
    if len(near) < 3:
        return float("nan")
    slope = np.abs(np.gradient(loss[near], np.log(t[near])))
    return float(loss[near[int(slope.argmin())]])


def padded(values: Numbers, neurons: int) -> Numbers:
    """Values padded with NaN to one length."""
    return np.concatenate([values, np.full(2 * neurons + 1 - len(values), np.nan)])[:2 * neurons + 1]


def residual(s: AgfModularSettings, count: int, seed: int) -> float:
    """The least loss of so many neurons on a template of one frequency, in units of that of none: the best of restarts."""
    draw = np.random.default_rng((seed, count, 26))
    x, y = (np.asarray(a) for a in agf.modular_pairs(wave(s.p, 1, 10.0, draw.uniform(0, 2 * np.pi))))

    def value(flat: Numbers) -> tuple[float, Numbers]:
        own = flat.reshape(count, -1)
        z = x @ own[:, :2 * s.p].T
        r = y - z**2 @ own[:, 2 * s.p:]
        slopes = np.concatenate([(2 * z * (r @ own[:, 2 * s.p:].T)).T @ x, (z**2).T @ r], 1)
        return float((r * r).sum() / (y * y).sum()), -2 * slopes.reshape(-1) / float((y * y).sum())

    best = [minimize(value, 0.3 * draw.standard_normal(3 * s.p * count), jac=True, method="L-BFGS-B",
                     options={"maxiter": 3_000, "maxfun": 4_000, "ftol": 1e-18, "gtol": 1e-12}).fun for _ in range(s.restarts)]
    return float(min(best))


def ordered(r: Results) -> float:
    """The share of seeds in which half of each frequency is there in the order of the sizes; or of the frequencies."""
    right = []
    for _, one in r:
        half = np.array([np.argmax(share >= 0.5) if share.max() >= 0.5 else len(share) for share in one["shares"].T])
        keys = -one["sizes"] if r.settings.order == "sizes" else np.arange(len(half))
        right.append(np.array_equal(np.argsort(half), np.argsort(keys)))
    return float(np.mean(right))


def time_error(r: Results) -> float:
    """The median relative error of the times of the algorithm's jumps."""
    return float(np.nanmedian(relative_error(r[r.settings.times], r["seen"])))


def share_of_even(r: Results) -> float:
    """Median time error of the algorithm over that of evenly spaced times."""
    return time_error(r) / float(np.nanmedian(relative_error(r["evenly"], r["seen"])))


def level_error(r: Results) -> float:
    """Relative error of the level of the plateau between the two frequencies. With ``order="index"`` the level is that of the
    reverse order."""
    level = r["levels"][:, 1] if r.settings.order == "sizes" else r["levels"][:, 0] - r["levels"][:, 1]
    return float(relative_error(level, r["plateau"]).max())


def remaining_loss(r: Results, fewer: int = 0) -> float:
    """Largest loss that ``enough`` neurons leave, or ``fewer`` neurons less than that."""
    return float(r["residuals"][:, r.settings.counts.index(r.settings.enough - fewer)].max())


@styled
def draw(results: Results) -> Figure:
    figure, (first, second, third) = panels(3, across=3)
    _, one = next(iter(results))
    known = np.isfinite(one["agf"])
    draw_staircase(first, one["t"], one["loss"], one["agf"][known], one["stairs"][np.isfinite(one["stairs"])], "gradient descent",
                   "alternating flows")
    for i, level in enumerate(one["levels"]):
        line(first, one["t"][[0, -1]], [level, level], COLOURS[5], "levels of the closed form" if not i else "", ":")
    label(first, "time", "loss", "one seed", legend=True)
    for i, k in enumerate(results.settings.frequencies):
        mine = [pair[1] for pair in results if pair[1]["sizes"][i] == max(pair[1]["sizes"])]
        other = [pair[1] for pair in results if pair[1]["sizes"][i] < max(pair[1]["sizes"])]
        for arrays, words, style in ((mine, "larger", "-"), (other, "smaller", "--")):
            if arrays:
                t = np.linspace(0, 1, 200)
                rows = [np.interp(t, a["t"] / a["t"][-1], a["shares"][:, i]) for a in arrays]
                band(second, t, rows, COLOURS[i], f"frequency {k}, the {words} one", style)
    label(second, "time / end", "share that is learned", legend=True)
    points(third, results.settings.counts, np.maximum(results["residuals"], 1e-20), label="best of restarts")
    label(third, "neurons for one frequency", "loss that is left", log="y")
    caption(figure, "The larger Fourier component is learned first, whichever frequency it has; the loss follows the staircase "
                    "of the algorithm, neuron by neuron; six neurons fit a frequency, and five do not.")
    return figure


INDEX = Control("in the order of the frequencies", {"order": "index"})
EVENLY = Control("as many jumps, evenly from the first to the last of training", {"times": "evenly"})
LATE = ("12 % (3 to 22 % over seeds) for 5 %. The first two jumps come within 4 % in every seed; behind them neurons of one "
        "frequency wake nearly at once, and the algorithm, which wakes one at a time and lets it settle, puts them one after the "
        "other, up to hundreds of units of time apart where training has them within one")
EXPERIMENT = Experiment(
    name="agf_modular", ref=Ref("agf", "Sec. 6"),
    title="quadratic networks learn the Fourier components of modular addition by their sizes",
    smoke=AgfModularSettings(seeds=(0,)), paper=AgfModularSettings(), over=("seed",), analysis=("order", "times", "enough"),
    work=work, figures={"agf_modular": draw},
    start={"seeds": (0,), "lr": 0.1, "counts": (4, 5, 6), "restarts": 1}, reduced="one of five seeds",
    tried="coefficients of 5 and 10, with which the plateau of one seed was 8 % off, and seeds with separated jumps alone, of "
          "which one of five was left",
    missing={"Sec. 6": "p = 10 with two frequencies and 16 neurons, by descent in short steps; the paper's code has p = 20 with "
                       "three and 18 neurons, by descent with momentum from 1e-2"},
    protocol="reduced: p = 10 with 16 neurons for p = 20 with 18; short steps for momentum",
    claims=(
        Claim("share of seeds in which frequencies are learned in the order of their Fourier coefficients", ordered,
              Interval(low=0.99), INDEX, paper="all", source="the paper's result",
              says="Networks learn the Fourier components of modular addition in decreasing order of their coefficients."),
        Claim("relative error of the plateau between the two frequencies", level_error, Interval(high=5e-3), INDEX, paper="equal",
              over="seed", source="three digits, as asked; independent check: .1562 and .0313 for the same",
              says="AGF gives the loss of the plateau between two frequencies of modular addition."),
        Claim("relative error of the algorithm's jump times, median over jumps", time_error, Interval(high=0.05), EVENLY,
              source="5 %, as asked of linear networks; for this network no bar is known", over="seed",
              differs={"paper": LATE}, says="AGF tells when each drop of the loss comes in modular addition."),
        Claim("that error in units of the one of evenly spaced jumps", share_of_even, Interval(high=0.99), EVENLY,
              source="set with the task: below even spacing", over="seed", own=True,
              rival="evenly spaced jumps"),
        Claim("one frequency: share of the loss that six neurons leave", remaining_loss, Interval(high=1e-12),
              Control("five neurons", {"enough": 5}), paper="0", over="seed",
              source="independent check: 2e-30; five leave 2.94. Here the best of five comes down to 1e-6, slowly",
              says="Six neurons represent one frequency exactly: the loss that they leave is 0."),
    ))
