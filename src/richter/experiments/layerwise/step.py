"""Trainings on a step, for Fig. 2.2 and Table 2.1 of [layerwise]: what the last layer reads before, during and after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn

from richter.experiments.layerwise.metrics import Recipe, fit, read
from richter.experiments.rivals import shuffled
from richter.measures.features import analyse
from richter.models import mlp
from richter.runs import Writer
from richter.tasks import heaviside

Training = Literal["all", "last", "shuffled", "he"]
TRAININGS: tuple[Training, ...] = ("all", "last", "shuffled", "he")
GRID = torch.linspace(-1, 1, 201)[:, None]
DRAWN = 3  # eigenfunctions


@dataclass(frozen=True)
class Settings:
    """Four linear layers with torch's initial weights; plain descent with momentum. ``trained``: the networks that claims call
    trained: all layers, the last one only, all of them with each value at a random place ("shuffled"), none ("start").
    ``initial``: those that claims call untrained; "he" has weights of variance 2/fan_in. ``first``: features that a step is made
    of. ``lr`` is .1 for the mean squared error without its 1/2."""

    n: int = 2000
    width: int = 1000
    epochs: int = 32  # of n/64 steps
    lr: float = 0.2
    middle: int = 4  # the epoch of panel b
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    trained: Literal["all", "last", "shuffled", "start"] = "all"
    initial: Literal["all", "he", "end"] = "all"
    first: int = 20


@dataclass(frozen=True)
class Task:
    settings: Settings
    training: Training
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, seeds=(), trained="all", initial="all", first=20)
    return [Task(alone, training, seed) for training in TRAININGS for seed in s.seeds]


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    """The features at the start, in the middle and at the end of training, on the examples it is trained on, and for the step,
    whatever was taught."""
    s = t.settings
    data = heaviside(s.n, seed=t.seed)
    model = mlp([1, *[s.width] * 3, 1], seed=t.seed)
    if t.training == "he":
        he_(model)
    count = 0 if t.training == "he" else s.epochs
    kept = sorted({0, min(s.middle, count), count})
    rows: list[dict[str, Any]] = []

    def after(epoch: int) -> None:
        if epoch in kept:
            rows.append(seen(model, data.x, data.y))

    taught = shuffled(data.y, t.seed) if t.training == "shuffled" else data.y
    fit(model, data.x, taught, Recipe(lr=s.lr, decay=0.0, epochs=count, every=0, batch=64, last=t.training == "last"), run,
        seed=t.seed, after=after)
    return {"epochs": np.array(kept), **{name: np.stack([row[name] for row in rows]) for name in rows[0]}}


def he_(model: nn.Module) -> None:
    """Weights of variance 2/fan_in in the place of 1/(3 fan_in); biases stay."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("weight"):
                p.mul_(6**0.5)


def seen(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    """On the examples, and on a grid for the drawing, where eigenfunctions go up as the step does."""
    Phi, f = read(model, x)
    a = analyse(Phi, y, f)
    U = torch.as_tensor(a.directions)[:, :DRAWN]
    on_grid, f_grid = read(model, GRID)
    e = on_grid.double() @ U / torch.as_tensor(a.intensity)[:DRAWN].sqrt()
    return {"quality": a.quality, "utilisation": a.utilisation, "intensity": a.intensity, "deff_quality": a.deff_quality,
            "deff_utilisation": a.deff_utilisation, "deff_intensity": a.deff_intensity, "error": (f - y).square().mean().item(),
            "power": y.square().mean().item(), "learned": f_grid[:, 0].numpy(),
            "eigenfunctions": (e * (e[100:].mean(0) - e[:100].mean(0)).sign()).numpy()}
