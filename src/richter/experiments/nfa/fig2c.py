"""Figures 2C and 15A of [nfa]: both correlations in the convolutions of VGG-11, patch by patch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.training import Curves, accuracy, epochs, one_hot
from richter.instrument.probe import Probe
from richter.models import vgg11
from richter.runs import Writer
from richter.tasks import cifar10

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Settings:
    """VGG-11 without batch norm, SGD on the mean squared error of centred one-hot labels."""

    n: int = 50_000
    width: float = 1.0
    lr: float = 1.0
    epochs: int = 50
    batch: int = 128
    probe: int = 256
    shuffled: bool = False  # labels
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Task:
    settings: Settings
    seed: int


def he(model: nn.Module, seed: int) -> nn.Module:
    """torchvision's initial weights for VGG: N(0, 2/fan_out) in convolutions, N(0, 0.01) in the read-out, no bias at first."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, (nn.Conv2d, nn.Linear)):
                fan = m.weight[0, 0].numel() * m.weight.shape[0] if isinstance(m, nn.Conv2d) else 2e4
                m.weight.copy_(torch.randn(m.weight.shape, generator=draw) * (2 / fan) ** 0.5)
                assert m.bias is not None
                m.bias.zero_()
    return model


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = cifar10(s.n, seed=t.seed)
    labels = data.y[torch.randperm(len(data.y), generator=torch.Generator().manual_seed(t.seed))] if s.shuffled else data.y
    y = one_hot(labels)
    model = he(vgg11(width=s.width, seed=t.seed), t.seed)
    convolutions = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    curves = Curves(model, Probe(data.x[:s.probe], y[:s.probe]), ("nfc", "cnfc", "weight_change"), convolutions, run)
    due = {1, s.epochs} | {round(v) for v in np.geomspace(1, max(1, s.epochs), 5)}
    epochs(model, data.x, y, torch.optim.SGD(model.parameters(), lr=s.lr), s.epochs, run, batch=s.batch, seed=t.seed,
           after=curves.when(due if s.epochs else {0}))
    return {**curves.arrays(), "accuracy": accuracy(model, data.x_test[:2000], data.y_test[:2000])}


def draw(results: Results) -> Figure:
    """UC and C of each convolution at the last checkpoint and by epoch, and how far the weights moved."""
    from matplotlib.figure import Figure

    from richter.report.figures import COLOURS
    figure = Figure(figsize=(10, 3), layout="constrained")
    axes = figure.subplots(1, 3)
    _, arrays = next(iter(results))
    for k, (name, label) in enumerate((("nfc", "UC"), ("cnfc", "C"))):
        axes[0].plot(np.arange(1, arrays[name].shape[1] + 1), arrays[name][-1], "o-", color=COLOURS[k], label=label)
        axes[1].plot(arrays["steps"], arrays[name].mean(1), "o-", color=COLOURS[k], label=f"{label}, mean over layers")
    for layer in range(arrays["weight_change"].shape[1]):
        axes[2].plot(arrays["steps"], arrays["weight_change"][:, layer], color=COLOURS[layer % 7], label=f"layer {layer + 1}")
    axes[0].set(xlabel="convolution", ylim=(0, 1.02), title="at the end")
    axes[1].set(xlabel="epoch", ylim=(0, 1.02))
    axes[2].set(xlabel="epoch", title="|W - W0| / |W|")
    for ax in axes:
        ax.legend(frameon=False, fontsize=7)
    return figure


UNTRAINED = Control("an untrained network", {"epochs": 0})
EXPERIMENT = Experiment(
    name="nfa_fig2c", ref=Ref("nfa", "Fig. 2C"), places=("Fig. 2C", "Fig. 15"),
    title="the centred correlation is above the uncentred one in the convolutions of VGG-11",
    smoke=Settings(n=2_000, width=0.25, epochs=8, batch=64, probe=128), paper=Settings(seeds=(0, 1, 2)),
    tasks=lambda s: [Task(replace(s, seeds=()), seed) for seed in s.seeds], work=work, data=("cifar10",),
    figures={"nfa_fig2c": draw}, start={"n": 128, "epochs": 1, "probe": 32},
    reduced="a quarter of the width, 2,000 of 50,000 images, 8 epochs, one seed",
    absent="the paper's size takes about 10 hours of two cores",
    claims=(
        Claim("mean over convolutions of C - UC at the end", lambda r: float(np.mean(
            [(arrays["cnfc"][-1] - arrays["nfc"][-1]).mean() for _, arrays in r])), Interval(low=0.0), UNTRAINED, paper="above 0",
              source="the paper's text, Sec. 3"),
        Claim("mean over convolutions of C - UC after one epoch", lambda r: float(np.mean(
            [(arrays["cnfc"][0] - arrays["nfc"][0]).mean() for _, arrays in r])), Interval(low=0.0), UNTRAINED, paper="above 0",
              source="the paper's text, Sec. 3"),
        Claim("smallest movement of a convolution's weights",
              lambda r: min(float(arrays["weight_change"][-1].min()) for _, arrays in r), Interval(low=1e-2), UNTRAINED,
              source="a network that trains moves every layer"),
    ))
