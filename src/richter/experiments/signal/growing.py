"""The networks of Figures 1, 2, 9 and 10 of [signal]: profiles of alignment as they form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch.nn.functional as F
from numpy.typing import ArrayLike

from richter.experiments.signal.networks import balanced, fit, he, images, profile
from richter.experiments.training import accuracy
from richter.runs import Writer

Subject = Literal["trained", "untrained", "shuffled"]
DEEP_RATE = 0.004  # of Fig. 1, as in Table 2


@dataclass(frozen=True)
class Settings:
    """Bias-free He networks, SGD with momentum 0.9 and weight decay 1e-4, batches of 128; alignment on class-balanced training
    images. The learning rates of panels a and b of Figs 9 and 10 are not legible; those of Fig. 2 and one between are taken."""

    n: int = 2_000
    epochs: int = 10
    measured: tuple[int, ...] = (0, 1, 3, 10)  # epochs
    probe: int = 60
    depth: int = 10  # of Figs 2, 9 and 10, at this width
    width: int = 100
    deep: int = 20  # of Fig. 1
    deep_width: int = 100
    rates: tuple[float, ...] = (0.003, 0.01, 0.05)
    subject: Subject = "trained"  # what the claims are read from
    seeds: tuple[int, ...] = (0, 1)


@dataclass(frozen=True)
class Task:
    settings: Settings
    data: str
    depth: int
    width: int
    lr: float
    labels: str
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, depth=0, width=0, deep=0, deep_width=0, rates=(), subject="trained", seeds=())
    kinds = [*((data, s.deep, s.deep_width, DEEP_RATE, "own") for data in ("fashion_mnist", "cifar10")),
             ("mnist", s.depth, s.width, s.rates[0], "own"), ("mnist", s.depth, s.width, s.rates[0], "shuffled"),
             *((data, s.depth, s.width, lr, "own") for data in ("fashion_mnist", "cifar10") for lr in s.rates)]
    return [Task(alone, *kind, seed) for seed in s.seeds for kind in kinds]


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = images(t.data, s.n, t.seed, t.labels)
    model = he([data.x.shape[1], *[t.width] * (t.depth - 1), 10], t.seed)
    probe, rows, losses = balanced(data.x, data.y, s.probe), [], []

    def after(epoch: int) -> None:
        if epoch in s.measured:
            rows.append(profile(model, probe, errors=False)[0])
            losses.append(F.cross_entropy(model(data.x[:1000]), data.y[:1000]).item())

    fit(model, data, t.lr, s.epochs, run, seed=t.seed, after=after)
    return {"epochs": np.array([k for k in s.measured if k <= s.epochs]), "alignment": np.array(rows), "losses": losses,
            "accuracy": accuracy(model, data.x_test, data.y_test)}
