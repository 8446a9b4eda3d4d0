"""Figure 17 of [nfa], on Fashion-MNIST in the place of SVHN: SLO lifts the correlations of a network that starts large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike

from richter.controls import SLO
from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.training import Curves, accuracy, descend, linears, one_hot
from richter.instrument.probe import Probe
from richter.models import mlp
from richter.runs import Writer
from richter.tasks import fashion_mnist

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Settings:
    """Four hidden layers at torch's initial scale; C_0 = 2.5 and 0.4 elsewhere, eps = 0.2; full batches."""

    n: int = 4_000
    width: int = 256
    hidden: int = 4
    steps: int = 3_000
    descent: float = 0.2
    lr: float = 0.3
    first: float = 2.5
    others: float = 0.4
    eps: float = 0.2
    exchanged: bool = False
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Task:
    settings: Settings
    method: str
    seed: int


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = fashion_mnist(s.n, 2_000, flat=True, seed=t.seed)
    y = one_hot(data.y)
    model = mlp([784, *[s.width] * s.hidden, 10], bias=False, seed=t.seed)
    speeds = [s.first, *[s.others] * s.hidden]
    optimiser: torch.optim.Optimizer = SLO(
        [{"params": [p], "speed": c} for p, c in zip(model.parameters(), speeds, strict=True)], lr=s.lr, eps=s.eps) \
        if (t.method == "slo") != s.exchanged else torch.optim.SGD(model.parameters(), lr=s.descent)
    curves = Curves(model, Probe(data.x[:256], y[:256]), ("nfc", "cnfc", "c_uc_ratio"), linears(model)[:1], run)
    due = {s.steps} | {round(v) for v in np.geomspace(1, max(1, s.steps), 8)}
    descend(model, data.x, y, optimiser, s.steps, run, curves.when(due))
    W = next(model.parameters()).detach().double().numpy()
    return {**curves.arrays(), "diagonal": (W * W).sum(0), "accuracy": accuracy(model, data.x_test, data.y_test)}


def gain(name: str) -> Claim:
    """SLO's final value in the first layer over plain descent's."""
    def value(r: Results) -> float:
        final = {method: np.mean([arrays[name][-1, 0] for _, arrays in r.where(method=method)]) for method in ("slo", "gd")}
        return float(final["slo"] - final["gd"])
    return Claim(f"{name} of the first layer: SLO over descent", value, Interval(low=0.0),
                 Control("plain descent and SLO exchanged", {"exchanged": True}), paper="above 0",
                 source="the paper's text, App. L")


def draw(results: Results) -> Figure:
    from matplotlib.figure import Figure

    from richter.report.figures import COLOURS
    figure = Figure(figsize=(9, 3), layout="constrained")
    for ax, name in zip(figure.subplots(1, 3), ("nfc", "cnfc", "c_uc_ratio"), strict=True):
        for k, method in enumerate(("slo", "gd")):
            for _, arrays in results.where(method=method):
                ax.plot(arrays["steps"], arrays[name][:, 0], "o-", color=COLOURS[k], markersize=3, label=method)
        ax.set(title=name, xscale="log", xlabel="step")
        ax.legend(frameon=False)
    return figure


EXPERIMENT = Experiment(
    name="nfa_fig17", ref=Ref("nfa", "Fig. 17"), title="limited speeds lift the first layer's correlations on images",
    smoke=Settings(n=1_000, steps=300), paper=Settings(seeds=(0, 1, 2)), work=work, data=("fashion_mnist",),
    tasks=lambda s: [Task(replace(s, seeds=()), method, seed) for method in ("slo", "gd") for seed in s.seeds],
    figures={"nfa_fig17": draw}, start={"steps": 1, "n": 128},
    reduced="Fashion-MNIST in the place of SVHN, which cannot be had here; 1,000 images, 300 steps, one seed",
    claims=(gain("nfc"), gain("cnfc"), gain("c_uc_ratio")))
