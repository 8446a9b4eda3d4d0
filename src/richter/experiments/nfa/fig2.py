"""Figures 2A, 2B, 13 and 14 of [nfa]: both correlations in the layers of a five-hidden-layer network on images, its losses and
how far its weights move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.training import Curves, accuracy, epochs, error, linears, one_hot
from richter.experiments.rivals import Rivals, milestones, shuffled
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
    stability: 1 there. The first data set is also learned with shuffled labels.

    ``labels`` and ``centred`` say which of the results claims read: the rivals are in the same runs."""

    data: tuple[str, ...] = ("mnist_5k",)
    n: int = 0  # 0: all of them
    width: int = 256
    hidden: int = 5
    rates: tuple[float, ...] = (1.0,)
    epochs: tuple[int, ...] = (40,)
    batch: int = 128
    probe: int = 500
    checkpoints: int = 2  # besides the start and epoch 5
    labels: Literal["true", "shuffled"] = "true"
    centred: Literal["cnfc", "rotated", "gaussian"] = "cnfc"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Task:
    settings: Settings
    data: str
    lr: float
    epochs: int
    labels: str
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, data=(), rates=(), epochs=(), labels="true", centred="cnfc", seeds=())
    return [Task(alone, data, lr, epochs, labels, seed) for data, lr, epochs in zip(s.data, s.rates, s.epochs, strict=True)
            for labels in (("true", "shuffled") if data == s.data[0] else ("true",)) for seed in s.seeds]


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = image_sets.mnist_5k(seed=t.seed) if t.data == "mnist_5k" else \
        getattr(image_sets, t.data)(s.n or 50_000, flat=True, seed=t.seed)
    y = one_hot(shuffled(data.y, t.seed) if t.labels == "shuffled" else data.y)
    model = mlp([data.x.shape[1], *[s.width] * s.hidden, 10], bias=False, seed=t.seed)
    hidden, seen = linears(model)[:-1], data.x[:s.probe]
    curves = Curves(model, Probe(seen, y[:s.probe]), ("nfc", "cnfc", "c_uc_ratio", "weight_change"), hidden, run)
    rivals, due = Rivals(model, seen, hidden, t.seed), {1, 5} | milestones(t.epochs, s.checkpoints)
    untrained = error(model, data.x[:5_000], y[:5_000])

    def measured(epoch: int) -> None:
        if epoch in due:
            curves.at(epoch)
            rivals.at(epoch)

    epochs(model, data.x, y, torch.optim.SGD(model.parameters(), lr=t.lr), t.epochs, run, batch=s.batch, seed=t.seed, after=measured)
    losses = run.run.scalar("loss").value if t.epochs else np.array([])
    return {**curves.arrays(), **rivals.arrays(), "loss": np.concatenate([[untrained], losses]),
            "accuracy": accuracy(model, data.x_test, data.y_test)}

PAPER = Settings(("mnist", "fashion_mnist", "cifar10"), rates=(10.0, 1.0, 0.2), epochs=(50, 10, 30), checkpoints=7, seeds=(0, 1, 2))
