"""A case without a closed form: ReLU networks on handwritten digits, by the algorithm of alternating flows.  [agf]"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike

from richter.experiments.agf.staircases import Numbers, crossings, descend, draw_staircase, plateaus, relative_error
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, caption, label, panels, points, styled
from richter.tasks import digits
from richter.theory import agf, alternating

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AgfReluSettings:
    """Three digits, 40 of each, by their first six principal components, centred and of one scale; centred one-hot targets.
    Neurons start with norm ``alpha``. Descent in steps of 0.02."""

    classes: tuple[int, ...] = (0, 1, 2)
    examples: tuple[int, ...] = (40, 40, 40)
    components: int = 6
    neurons: int = 10
    alpha: float = 1e-15
    jumps: int = 3
    lr: float = 0.02
    times: Literal["agf", "evenly", "forgetful"] = "agf"  # evenly from 0 to the last; utilities forgotten at every jump
    levels: Literal["agf", "evenly"] = "agf"  # evenly from first to last
    seeds: tuple[int, ...] = tuple(range(10))


def data(s: AgfReluSettings, seed: int) -> tuple[Numbers, Numbers]:
    """Inputs [n, components] and targets [n, classes]; other examples for another seed."""
    draw, every = np.random.default_rng((seed, 23)), digits()
    x, y = every.x.flatten(1).double().numpy(), every.y.numpy()
    rows = np.concatenate([draw.choice(np.flatnonzero(y == c), n, replace=False)
                           for c, n in zip(s.classes, s.examples, strict=True)])
    x, Y = x[rows] - x[rows].mean(0), (y[rows, None] == np.array(s.classes)).astype(float)
    x = x @ np.linalg.svd(x, full_matrices=False)[2][:s.components].T
    return x / np.sqrt((x**2).mean()), Y - Y.mean(0)


def work(t: Task[AgfReluSettings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    x, y = data(s, t.seed)
    theta = np.random.default_rng((t.seed, 24)).standard_normal((s.neurons, s.components + len(s.classes)))
    theta *= s.alpha / np.linalg.norm(theta, axis=1, keepdims=True)
    neuron, given = alternating.layers("relu", theta, x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of merged jumps: their times are compared all the same
        learned, forgetful = (agf.alternating_flows(neuron, *given, jumps=s.jumps, keep=keep) for keep in (True, False))
    times, levels = np.asarray(learned.staircase.times), np.asarray(learned.staircase.levels)
    every = max(1, int(1.5 * times[-1] / s.lr / 4_000))
    loss, _ = descend("relu", theta, x, y, s.lr, int(1.5 * times[-1] / s.lr), every)
    grid = np.arange(len(loss)) * every * s.lr
    seen = crossings(grid, loss, levels)
    ended = grid <= 1.25 * times[-1]
    steps = np.arange(1, s.jumps + 1) / s.jumps
    return {"seen": seen, "agf": times, "evenly": seen[-1] * steps, "forgetful": forgetful.staircase.times, "t": grid[::4],
            "loss": loss[::4], "plateaus": plateaus(grid[ended], loss[ended], seen), "levels_agf": levels[1:], "first": levels[0],
            "levels_evenly": levels[0] + (levels[-1] - levels[0]) * steps, "separations": learned.separations}


def time_error(r: Results) -> float:
    """The largest relative error of a jump time."""
    return float(relative_error(r[r.settings.times], r["seen"]).max())


def share_of_even(r: Results) -> float:
    """Largest time error of the algorithm over that of evenly spaced times."""
    return time_error(r) / float(relative_error(r["evenly"], r["seen"]).max())


def level_error(r: Results) -> float:
    """The largest error of a level, in units of the first loss."""
    return float(np.abs(r[f"levels_{r.settings.levels}"] - r["plateaus"]).max() / r["first"].min())


@styled
def draw(results: Results) -> Figure:
    figure, (left, right) = panels(2, across=2)
    _, one = next(iter(results))
    draw_staircase(left, one["t"], one["loss"], one["agf"], np.concatenate([one["first"][None], one["levels_agf"]]),
                   "gradient descent", "alternating flows")
    jumps = np.arange(1, results.settings.jumps + 1)
    rules = {"agf": "alternating flows", "forgetful": "utilities forgotten at jumps", "evenly": "evenly spaced"}
    for colour, (name, words) in zip(COLOURS, rules.items(), strict=False):
        points(right, jumps, results[name] / results["seen"], colour, words)
    label(right, "jump", "predicted time / that of descent", legend=True)
    right.set_xticks(jumps)
    caption(figure, "ReLU networks learn three digits one after the other, when and down to which loss the algorithm says. "
                    f"Median and range of {len(results)} seeds on the right.")
    return figure


EVENLY = Control("as many jumps, evenly from the start to the last of training", {"times": "evenly"})
FORGETFUL = Control("accumulated utilities forgotten at every jump", {"times": "forgetful"})
STEPS = Control("levels evenly from the first to the last", {"levels": "evenly"})
EXPERIMENT = Experiment(
    name="agf_relu", ref=Ref("agf", "Algorithm 1"), title="alternating flows of ReLU networks on digits, without a closed form",
    smoke=AgfReluSettings(seeds=(0, 1)), paper=AgfReluSettings(), over=("seed",), analysis=("times", "levels"), work=work,
    figures={"agf_relu": draw},
    start={"seeds": (0,), "jumps": 1}, reduced="two of ten seeds",
    tried="60, 30 and 15 examples of the digits from 1e-10: predicted jumps merge (0.7 of what they take), and times are off by "
          "16 to 29 %. A rival that knows the first and the last jump of training, and puts the second between them, is as good "
          "as the algorithm here: the three digits come nearly evenly, and the control is told the last one alone",
    missing={"Algorithm 1": "the paper's own cases without a closed form are not known to us"},
    protocol="unstated: the paper's cases are not known here; digits of scikit-learn",
    claims=(
        Claim("largest relative error of a jump time", time_error, Interval(high=0.05), (EVENLY, FORGETFUL),
              source="5 %, as asked of linear networks; for this network no bar is known", over="seed",
              says="AGF tells when each drop of the loss comes, also in ReLU networks."),
        Claim("that error in units of the one of evenly spaced jumps", share_of_even, Interval(high=0.99), EVENLY,
              source="set with the task: below even spacing", over="seed", own=True,
              rival="evenly spaced jumps"),
        Claim("largest error of a level, in units of the first loss", level_error, Interval(high=0.01), STEPS,
              source="1 %, where levels that fall evenly are wrong; for this network no bar is known", over="seed",
              was="<= 0.05, which levels that fall evenly pass too",
              says="AGF tells how large each drop of the loss is, also in ReLU networks."),
    ))
