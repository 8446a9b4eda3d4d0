"""FACT and the neural feature ansatz on MNIST: low while the network learns, above it where training has converged.  [fact]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.training import Curves, accuracy, linears, one_hot
from richter.instrument.probe import Probe
from richter.models import mlp
from richter.runs import Writer
from richter.tasks import images as image_sets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AT_CONVERGENCE = ("fact", "fact_error", "fact_stationarity")
ANSATZ = ("nfc", "nfc_sqrt")


@dataclass(frozen=True)
class Settings:
    """Bias-free ReLU layers, centred one-hot labels, mean squared error over examples and outputs, weight decay as the gradient
    of an L2 penalty. Adam, its learning rate falling to 0 along a cosine, so that in the end it does not matter what batches are
    drawn. Depth, loss and decay are the paper's; its width, optimiser and length are not known to us."""

    data: str = "mnist_5k"
    n: int = 1_000
    width: int = 64
    hidden: int = 5
    decay: float = 1e-4
    lr: float = 3e-3
    steps: int = 3_000
    batch: int = 0  # 0: all images
    probe: int = 1_000  # images for the ansatz; FACT has all that are trained on
    middle: float = 0.4  # of the steps: where "while it learns" is looked at
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Task:
    settings: Settings
    seed: int


def checkpoints(s: Settings) -> list[int]:
    early = (round(v) for v in np.geomspace(10, max(10, s.steps), 10) if v <= s.steps)
    return sorted({0, round(s.middle * s.steps), *early, s.steps})


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = image_sets.mnist_5k(seed=t.seed) if s.data == "mnist_5k" else \
        getattr(image_sets, s.data)(s.n, flat=True, seed=t.seed)
    x, y = data.x[:s.n], one_hot(data.y[:s.n])
    model = mlp([x.shape[1], *[s.width] * s.hidden, 10], bias=False, seed=t.seed)
    fact = Curves(model, Probe(x, y, chunk=2_000, loss=nn.MSELoss(), weight_decay=s.decay), AT_CONVERGENCE, linears(model), run)
    ansatz = Curves(model, Probe(x[:s.probe], y[:s.probe]), ANSATZ, linears(model))
    optimiser = torch.optim.Adam(model.parameters(), lr=s.lr, weight_decay=s.decay)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, s.steps))
    draw, due = torch.Generator().manual_seed(t.seed), checkpoints(s)
    for step in range(s.steps + 1):
        if step in due:
            fact.at(step)
            ansatz.at(step)
        if step == s.steps:
            break
        rows = torch.randint(len(x), (s.batch,), generator=draw) if s.batch else slice(None)
        loss = (model(x[rows]) - y[rows]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        rate.step()
        run.progress(step / s.steps)
    with torch.no_grad():
        left = (model(x) - y).square().mean().item()
    return {**ansatz.arrays(), **fact.arrays(), "loss": left, "accuracy": accuracy(model, data.x_test, data.y_test)}


def hidden(r: Results, name: str, step: int = -1) -> NDArray[np.float64]:
    """[tasks, hidden layers] at the last or another checkpoint; the read-out's ansatz is 1 by definition."""
    return r[name][:, step, :-1]


def middle(r: Results) -> int:
    s = r.settings
    return checkpoints(s).index(round(s.middle * s.steps))


def above(r: Results, name: str) -> float:
    """FACT's mean correlation over hidden layers less that of the ansatz, at the end; the smallest over seeds."""
    return float((hidden(r, "fact").mean(1) - hidden(r, name).mean(1)).min())


def draw(results: Results) -> Figure:
    """The correlations of each layer by step, and how far the gradient is from balancing the decay."""
    from matplotlib.figure import Figure

    from richter.report.figures import COLOURS
    layers, steps = results["fact"].shape[2], results["steps"][0]
    figure = Figure(figsize=(2.4 * layers, 4.6), layout="constrained")
    axes = figure.subplots(2, layers, sharex=True, sharey="row")
    for layer in range(layers):
        top, bottom = axes[:, layer]
        for k, (name, label) in enumerate((("fact", "FACT"), ("nfc", "AGOP"), ("nfc_sqrt", r"AGOP$^{1/2}$"))):
            curves = results[name][:, :, layer]
            top.plot(steps, curves.mean(0), "o-", color=COLOURS[k], markersize=3, label=label)
            top.fill_between(steps, curves.min(0), curves.max(0), color=COLOURS[k], alpha=0.2, linewidth=0)
        for k, (name, label) in enumerate((("fact_stationarity", "gradient off the decay"), ("fact_error", "error of FACT")), 3):
            bottom.plot(steps, results[name][:, :, layer].mean(0), "o-", color=COLOURS[k], markersize=3, label=label)
        top.set(title="read-out" if layer == layers - 1 else f"layer {layer + 1}", ylim=(-0.6, 1.05))
        bottom.set(xlabel="step", yscale="log")
        bottom.set_xscale("symlog", linthresh=10)
    axes[0, 0].set_ylabel("correlation with $W^T W$")
    axes[0, 0].legend(frameon=False, fontsize=8)
    axes[1, 0].legend(frameon=False, fontsize=8)
    return figure


UNTRAINED = Control("an untrained network", {"steps": 0})
SHORT = Control("a tenth of the steps", {"steps": 300})
TEXT = "the paper's text: FACT tends to 1 at convergence, above both powers of the ansatz, and is low during most of training"
EXPERIMENT = Experiment(
    name="fact_mnist", ref=Ref("fact", "MNIST"), title="FACT on MNIST rises at convergence, and ends above the ansatz",
    smoke=Settings(), paper=Settings("mnist", 60_000, 256, steps=6_000, batch=4_096, probe=2_000),
    tasks=lambda s: [Task(replace(s, seeds=()), seed) for seed in s.seeds], work=work, data=("mnist_5k",), more_data=("mnist",),
    figures={"fact_mnist": draw}, start={"n": 256, "steps": 1, "batch": 64, "probe": 64},
    reduced="1,000 of 60,000 images, width 64, one seed",
    claims=(
        Claim("largest |dL/dW + decay W| / |decay W| over layers, at the end", lambda r: r["fact_stationarity"][:, -1].max(),
              Interval(high=1.0), SHORT, paper="0 at convergence", source="a gradient of 0 gives 1"),
        Claim("mean correlation of W^T W and FACT over hidden layers, at the end", lambda r: hidden(r, "fact").mean(1).min(),
              Interval(low=0.95), UNTRAINED, paper="tends to 1", source=TEXT),
        Claim("the same, less that of the AGOP", lambda r: above(r, "nfc"), Interval(low=0.0), SHORT, paper="above 0",
              source=TEXT),
        Claim("the same, less that of the root of the AGOP", lambda r: above(r, "nfc_sqrt"), Interval(low=0.0), SHORT,
              paper="above 0", source=TEXT),
        Claim("mean correlation with FACT: at the end less at 0.4 of the steps",
              lambda r: (hidden(r, "fact") - hidden(r, "fact", middle(r))).mean(1).min(), Interval(low=0.25),
              Control("looked at in the end twice", {"middle": 1.0}), paper="low during most of training", source=TEXT),
    ))
