"""Figures 2C and 15A of [nfa]: both correlations in the convolutions of VGG-11, patch by patch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.training import Curves, accuracy, epochs, error, one_hot
from richter.experiments.rivals import Rivals, milestones, shuffled
from richter.instrument.probe import Probe
from richter.models import vgg11
from richter.runs import Writer
from richter.tasks import cifar10

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Settings:
    """VGG-11 without batch norm, SGD on the mean squared error of centred one-hot labels.

    ``labels`` and ``centred`` say which of the results claims read: the rivals are in the same runs."""

    n: int = 50_000
    width: float = 1.0
    lr: float = 1.0
    epochs: int = 50
    batch: int = 128
    probe: int = 64
    checkpoints: int = 4
    labels: Literal["true", "shuffled"] = "true"
    centred: Literal["cnfc", "rotated", "gaussian"] = "cnfc"
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Task:
    settings: Settings
    labels: str
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, labels="true", centred="cnfc", seeds=())
    return [Task(alone, labels, seed) for labels in ("true", "shuffled") for seed in s.seeds]


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
    data = cifar10(s.n, 2_000, seed=t.seed)
    y = one_hot(shuffled(data.y, t.seed) if t.labels == "shuffled" else data.y)
    model = he(vgg11(width=s.width, seed=t.seed), t.seed)
    convolutions = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    seen, due = data.x[:s.probe], {1} | milestones(s.epochs, s.checkpoints)
    curves = Curves(model, Probe(seen, y[:s.probe]), ("nfc", "cnfc", "weight_change"), convolutions, run)
    rivals, untrained = Rivals(model, seen, convolutions, t.seed), error(model, data.x[:1_000], y[:1_000])

    def measured(epoch: int) -> None:
        if epoch in due:
            curves.at(epoch)
        if epoch in (1, s.epochs):
            rivals.at(epoch)

    epochs(model, data.x, y, torch.optim.SGD(model.parameters(), lr=s.lr), s.epochs, run, batch=s.batch, seed=t.seed, after=measured)
    losses = run.run.scalar("loss").value if s.epochs else np.array([])
    return {**curves.arrays(), **rivals.arrays(), "loss": np.concatenate([[untrained], losses]),
            "accuracy": accuracy(model, data.x_test, data.y_test)}


SMOKE = Settings(n=2_000, width=0.25, epochs=8, batch=64, probe=64, checkpoints=2)
PAPER = Settings(n=5_000, epochs=8)
