"""Trainings of Figure 6.5 and Table 6.1 of [layerwise]: a network on 1,000 images from five starts, lazier and richer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import nn

from richter.controls import Richness
from richter.experiments.training import accuracy, epochs
from richter.measures.features import analyse
from richter.models import mlp
from richter.runs import Writer
from richter.tasks import mnist

Name = Literal["a", "b", "c", "d", "e"]
TABLE: dict[Name, tuple[str, Richness]] = {  # Table 6.1
    "a": ("default", Richness(weight=5.0, target=3.0)),
    "b": ("weight downscaling", Richness(weight=1.0, target=3.0)),
    "c": ("target upscaling", Richness(weight=5.0, target=30.0)),
    "d": ("input downscaling", Richness(weight=5.0, target=3.0, input=0.01)),
    "e": ("output downscaling", Richness(weight=5.0, target=3.0, output=0.1))}
KNOBS: tuple[Name, ...] = ("b", "c", "d", "e")
SOLVED = 0.99  # of the training accuracy


@dataclass(frozen=True)
class Settings:
    """Adam with an L2 penalty on the mean squared error; ``grokking`` and ``richer`` are what claims take for (a) and for (b) to
    (e), ``moment`` when they look at (a)."""

    n: int = 1000
    width: int = 128
    epochs: int = 2000  # of (a)
    fewer: int = 200  # of the others
    lr: float = 1e-3
    decay: float = 1e-4
    seeds: tuple[int, ...] = (0,)
    grokking: Name = "a"
    richer: tuple[Name, ...] = KNOBS
    moment: Literal["end", "solved"] = "end"
    direction: Literal["richer", "lazier"] = "richer"  # in which the knobs of the scalar network are turned


@dataclass(frozen=True)
class Task:
    settings: Settings
    setting: Name
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, seeds=(), grokking="a", richer=(), moment="end", direction="richer")
    return [Task(alone, name, seed) for seed in s.seeds for name in TABLE]


def lecun(width: int, seed: int) -> nn.Sequential:
    """Four layers, tanh, weights N(0, 1/fan_in)."""
    model, draw = mlp([784, width, width, width, 10], nn.Tanh, seed=seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.copy_(torch.randn(p.shape, generator=draw) / math.sqrt(p.shape[1]))
    return model


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    """Accuracies by epoch; at some epochs, and when training is solved, kappa and the number of strong features."""
    s, knobs = t.settings, TABLE[t.setting][1]
    data = mnist(s.n, 1000, seed=t.seed, standardise=False, flat=True)
    plain = lecun(s.width, t.seed)
    model, y = knobs.model(plain), knobs.targets(F.one_hot(data.y, 10).float())
    last = s.epochs if t.setting == "a" else s.fewer
    looks = {round(e) for e in np.geomspace(1, last, 15)}
    curves, seen = list[tuple[float, ...]](), list[tuple[float, ...]]()

    def features() -> tuple[float, float]:
        """On the test images, for what the network says of them."""
        with torch.no_grad():
            h = plain[:-1](knobs.input * data.x_test)
            a = analyse(h, F.one_hot(data.y_test, 10).float(), plain[-1](h))
        return a.kappa_cka, a.deff_intensity

    def look(epoch: int) -> None:
        if epoch > 150 and epoch % 5 and epoch not in looks:
            return
        train, test = accuracy(model, data.x, data.y), accuracy(model, data.x_test, data.y_test)
        run.scalars(epoch, train_accuracy=train, test_accuracy=test)
        first = train >= SOLVED and not any(row[1] >= SOLVED for row in curves)
        curves.append((epoch, train, test))
        if first or epoch in looks:
            seen.append((epoch, *features()))

    optimiser = torch.optim.Adam(model.parameters(), lr=s.lr, weight_decay=s.decay, fused=True)
    epochs(model, data.x, y, optimiser, last, run, seed=t.seed, after=look)
    return {"curves": np.array(curves), "features": np.array(seen)}
