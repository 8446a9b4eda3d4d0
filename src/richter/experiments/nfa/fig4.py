"""Figures 4 and 11 of [nfa]: limiting the speed of layers (SLO) makes feature learning independent of the initial scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from richter.controls import SLO
from richter.core import Interval, Ref
from richter.core.cosine import cosine
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.training import Curves, descend, error, linears, scaled
from richter.instrument.probe import Probe
from richter.runs import Writer
from richter.tasks import chain_monomial

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Settings:
    """The read-out starts 100 times smaller (the paper prints 'divided by 0.01', which does not train)."""

    n: int = 256
    d: int = 32
    rank: int = 5
    width: int = 256
    steps: int = 600
    eps: float = 0.1
    speeds: tuple[float, ...] = (500.0, 0.002, 0.002)
    scales: tuple[float, ...] = (1.0, 0.1, 0.01, 0.001)
    rates: tuple[float, ...] = (0.03, 0.1, 0.2, 0.4)
    readout: float = 0.01
    exchanged: bool = False  # what is called SLO is plain descent, and the other way round
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Task:
    settings: Settings
    method: str
    scale: float
    lr: float
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, scales=(), rates=(), seeds=())
    return [Task(alone, method, scale, lr, seed) for method in ("gd", "slo")
            for scale, lr in zip(s.scales, s.rates, strict=True) for seed in s.seeds]


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = chain_monomial(s.n, s.d, s.rank, seed=t.seed, standardise=True, dtype=torch.float64)
    model = scaled([s.d, s.width, s.width, 1], [t.scale, 1.0, s.readout], t.seed)
    if (t.method == "slo") != s.exchanged:
        groups = [{"params": [p], "speed": speed} for p, speed in zip(model.parameters(), s.speeds, strict=True)]
        optimiser: torch.optim.Optimizer = SLO(groups, lr=t.lr, eps=s.eps)
    else:
        optimiser = torch.optim.SGD(model.parameters(), lr=t.lr)
    curves = Curves(model, Probe(data.x, data.y), ("nfc", "cnfc", "c_uc_ratio"), linears(model)[:1], run, matrices=s.d)
    due = {0, s.steps} | {round(v) for v in np.geomspace(1, max(1, s.steps), 12)}
    descend(model, data.x, data.y, optimiser, s.steps, run, curves.when(due))
    last, egop = curves.snapshots[-1].arrays, data.egop.numpy()
    nfm, agop = last["0", "nfm"].astype(float), last["0", "agop"].astype(float)
    return {**curves.arrays(), "nfm": nfm, "agop": agop, "nfm_egop": cosine(nfm, egop), "agop_egop": cosine(agop, egop),
            "train": error(model, data.x, data.y), "test": error(model, data.x_test, data.y_test)}


def last(r: Results, name: str, method: str, scales: Callable[[float], bool] = lambda s: True) -> NDArray[Any]:
    """The final value for each scale, averaged over seeds."""
    chosen = [scale for scale in dict.fromkeys(t.scale for t in r.tasks) if scales(scale)]
    return np.array([np.mean([arrays[name][-1, 0] if np.ndim(arrays[name]) else arrays[name]
                              for _, arrays in r.where(method=method, scale=scale)]) for scale in chosen])


def draw_curves(results: Results) -> Figure:
    """UC, C, their ratio by step; plain descent above, SLO below."""
    from matplotlib.figure import Figure

    from richter.report.figures import COLOURS
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True, sharey="col")
    for row, method in zip(axes, ("gd", "slo"), strict=True):
        for i, scale in enumerate(dict.fromkeys(t.scale for t in results.tasks)):
            for _, arrays in results.where(method=method, scale=scale):
                for ax, name in zip(row, ("nfc", "cnfc", "c_uc_ratio"), strict=True):
                    ax.plot(arrays["steps"], arrays[name][:, 0], color=COLOURS[i], label=f"scale {scale:g}")
                    ax.set_title(f"{name}, {'SLO' if method == 'slo' else 'gradient descent'}", fontsize=9)
                    ax.set_xscale("symlog", linthresh=1)
    axes[0, 0].legend(frameon=False, fontsize=8)
    return figure


def draw_matrices(results: Results) -> Figure:
    """The final NFM for each scale."""
    from richter.report.figures import side_by_side
    shown = {f"{'SLO' if t.method == 'slo' else 'GD'}, scale {t.scale:g}": arrays["nfm"] for t, arrays in results
             if t.seed == results.tasks[0].seed}
    return side_by_side(shown, title="NFM at the end")


def small(scale: float) -> bool:
    return scale <= 0.01


def largest(scale: float) -> bool:
    return scale == 1.0


EXCHANGED = Control("plain descent and SLO exchanged", {"exchanged": True})
UNTRAINED = Control("untrained networks", {"steps": 0})
BAR = "independent check of the recipe, 3 seeds"
EXPERIMENT = Experiment(
    name="nfa_fig4", ref=Ref("nfa", "Fig. 4"), places=("Fig. 4", "Fig. 11"),
    title="limited speeds make feature learning independent of the initial scale",
    smoke=Settings(), paper=Settings(seeds=(0, 1, 2)), start={"steps": 1}, tasks=tasks, work=work,
    figures={"nfa_fig4": draw_curves, "nfa_fig11": draw_matrices},
    claims=(
        Claim("SLO: smallest UC over scales", lambda r: last(r, "nfc", "slo").min(), Interval(low=0.90), EXCHANGED, source=BAR),
        Claim("SLO: smallest C/UC over scales", lambda r: last(r, "c_uc_ratio", "slo").min(), Interval(low=0.95), EXCHANGED,
              source=BAR),
        Claim("SLO: spread of UC over scales", lambda r: float(np.ptp(last(r, "nfc", "slo"))), Interval(high=0.04), EXCHANGED,
              source=BAR),
        Claim("descent at scale 1: UC", lambda r: last(r, "nfc", "gd", largest)[0], Interval(0.50, 0.70), EXCHANGED, source=BAR),
        Claim("descent at scale 1: C/UC", lambda r: last(r, "c_uc_ratio", "gd", largest)[0], Interval(high=0.05), EXCHANGED,
              source=BAR),
        Claim("descent at scales <= 0.01: smallest UC", lambda r: last(r, "nfc", "gd", small).min(), Interval(low=0.92),
              UNTRAINED, source=BAR),
        Claim("descent at scales <= 0.01: smallest C/UC", lambda r: last(r, "c_uc_ratio", "gd", small).min(), Interval(low=0.95),
              UNTRAINED, source=BAR),
        Claim("correlation of NFM and EGOP at scale 1: SLO over descent",
              lambda r: (last(r, "nfm_egop", "slo", largest) - last(r, "nfm_egop", "gd", largest))[0], Interval(low=0.25),
              EXCHANGED, source=BAR),
    ))
