"""Figures 2A, 2B, 13 and 14 of [nfa]: both correlations in the layers of a five-hidden-layer network on images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.training import Curves, accuracy, epochs, linears, one_hot
from richter.instrument.probe import Probe
from richter.models import mlp
from richter.runs import Writer
from richter.tasks import images as image_sets

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Settings:
    """Bias-free ReLU layers of torch's initial weights, inputs by one global mean and deviation, centred one-hot labels, mean
    squared error, SGD; K on 500 training images. On 5,000 images the paper's learning rate of 10 for MNIST is at the edge of
    stability: 1 there."""

    data: tuple[str, ...] = ("mnist_5k",)
    n: int = 0  # 0: all of them
    width: int = 256
    hidden: int = 5
    rates: tuple[float, ...] = (1.0,)
    epochs: tuple[int, ...] = (40,)
    batch: int = 128
    probe: int = 500
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Task:
    settings: Settings
    data: str
    lr: float
    epochs: int
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, data=(), rates=(), epochs=(), seeds=())
    return [Task(alone, data, lr, epochs, seed) for data, lr, epochs in zip(s.data, s.rates, s.epochs, strict=True)
            for seed in s.seeds]


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = image_sets.mnist_5k(seed=t.seed) if t.data == "mnist_5k" else \
        getattr(image_sets, t.data)(s.n or 50_000, flat=True, seed=t.seed)
    y = one_hot(data.y)
    model = mlp([data.x.shape[1], *[s.width] * s.hidden, 10], bias=False, seed=t.seed)
    curves = Curves(model, Probe(data.x[:s.probe], y[:s.probe]), ("nfc", "cnfc", "c_uc_ratio", "weight_change"),
                    linears(model)[:-1], run)
    due = {1, 5, t.epochs} | {round(v) for v in np.geomspace(1, max(1, t.epochs), 6)}
    epochs(model, data.x, y, torch.optim.SGD(model.parameters(), lr=t.lr), t.epochs, run, batch=s.batch, seed=t.seed,
           after=curves.when(due if t.epochs else {0}))
    return {**curves.arrays(), "accuracy": accuracy(model, data.x_test, data.y_test)}


def gaps(r: Results) -> NDArray[np.float64]:
    """C - UC of every layer, checkpoint and task."""
    return np.concatenate([(arrays["cnfc"] - arrays["nfc"]).ravel() for _, arrays in r])


def at(r: Results, name: str, epoch: int) -> NDArray[np.float64]:
    """The mean over layers at a checkpoint (-1: the last), for each task."""
    return np.array([arrays[name][-1 if epoch < 0 else list(arrays["steps"]).index(epoch)].mean()
                     if epoch in (-1, *arrays["steps"]) else np.nan for _, arrays in r])


def draw(results: Results) -> Figure:
    """UC and C of each layer by epoch, one row for each data set."""
    from matplotlib.figure import Figure

    from richter.report.figures import COLOURS
    names = list(dict.fromkeys(t.data for t in results.tasks))
    figure = Figure(figsize=(11, 2.4 * len(names) + 0.4), layout="constrained")
    axes = figure.subplots(len(names), 5, sharey=True, squeeze=False)
    for row, name in zip(axes, names, strict=True):
        for _, arrays in results.where(data=name):
            for layer, ax in enumerate(row):
                for k, (measure, label) in enumerate((("nfc", "UC"), ("cnfc", "C"))):
                    ax.plot(arrays["steps"], arrays[measure][:, layer], "o-", color=COLOURS[k], markersize=3, label=label)
                ax.set_title(f"{name}, layer {layer + 1}", fontsize=9)
                ax.set(xscale="log", ylim=(0, 1.02), xlabel="epoch")
    axes[0, 0].legend(*[v[:2] for v in axes[0, 0].get_legend_handles_labels()], frameon=False)
    return figure


def draw_movement(results: Results) -> Figure:
    """How far the weights moved, by epoch."""
    from matplotlib.figure import Figure

    from richter.report.figures import COLOURS
    names = list(dict.fromkeys(t.data for t in results.tasks))
    figure = Figure(figsize=(3.6 * len(names) + 0.4, 2.8), layout="constrained")
    for ax, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for _, arrays in results.where(data=name, seed=results.tasks[0].seed):
            for layer in range(arrays["weight_change"].shape[1]):
                ax.plot(arrays["steps"], arrays["weight_change"][:, layer], "o-", color=COLOURS[layer], markersize=3,
                        label=f"layer {layer + 1}")
        ax.set(xscale="log", xlabel="epoch", ylabel="|W - W0| / |W|", title=name)
        ax.legend(frameon=False, fontsize=8)
    return figure


FAST = Control("learning rate 10 on 5,000 images", {"rates": (10.0,)})
UNTRAINED = Control("an untrained network", {"epochs": (0,)})
BAR = "independent check of the recipe on 5,000 images, 1 seed"
NOT_ALWAYS = "at large learning rates the first layers have checkpoints with C below UC"
EXPERIMENT = Experiment(
    name="nfa_fig2", ref=Ref("nfa", "Fig. 2"), places=("Fig. 2", "Fig. 13", "Fig. 14"),
    title="the centred correlation is above the uncentred one in every layer of an MLP on images",
    smoke=Settings(),
    paper=Settings(("mnist", "fashion_mnist", "cifar10"), rates=(10.0, 1.0, 0.2), epochs=(50, 50, 150), seeds=(0, 1, 2)),
    tasks=tasks, work=work, data=("mnist_5k",), more_data=("mnist", "fashion_mnist", "cifar10"),
    figures={"nfa_fig13": draw, "nfa_fig14": draw_movement},
    start={"data": ("cifar10",), "n": 256, "rates": (0.2,), "epochs": (1,)},
    reduced="4,000 of 50,000 MNIST images, learning rate 1, one seed; CIFAR-100, SVHN, GTSRB and STL-10 cannot be had here; "
            "panels C and D of Fig. 2 are nfa_fig2c and nfa_fig2d",
    claims=(
        Claim("smallest C - UC over layers and checkpoints", lambda r: gaps(r).min(), Interval(low=0.0), FAST,
              paper="above 0", source=BAR, differs=NOT_ALWAYS),
        Claim("mean C over layers at epoch 5", lambda r: at(r, "cnfc", 5).min(), Interval(low=0.75), FAST, source=BAR,
              differs="lower at the paper's learning rates"),
        Claim("mean C over layers at the end", lambda r: at(r, "cnfc", -1).min(), Interval(low=0.75), FAST, source=BAR,
              differs="lower at the paper's learning rates"),
        Claim("mean C - mean UC at epoch 5", lambda r: (at(r, "cnfc", 5) - at(r, "nfc", 5)).min(), Interval(low=0.25), UNTRAINED,
              source=BAR, differs="smaller at the paper's learning rates"),
        Claim("mean C - mean UC at the end", lambda r: (at(r, "cnfc", -1) - at(r, "nfc", -1)).min(), Interval(low=0.25), FAST,
              source=BAR, differs="smaller at the paper's learning rates"),
        Claim("test accuracy on MNIST", lambda r: min(float(arrays["accuracy"]) for t, arrays in r if t.data.startswith("mnist")),
              Interval(low=0.92), FAST, source=BAR),
    ))
