"""Trainings of ResNets and VGG networks by number of classes, for Table 2.2 and Figs 2.4 and 2.5 of [layerwise]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from richter.experiments.layerwise.metrics import Recipe, fit, indicators, numbers, read
from richter.models import resnet18, vgg16
from richter.runs import Writer
from richter.tasks import augment, cifar10, mnist
from richter.tasks.images import Split

MODELS: dict[str, Callable[..., nn.Module]] = {"resnet18": resnet18, "vgg16": vgg16}
SETS = {"mnist": mnist, "cifar10": cifar10}
SHOWN = 3  # classes of Fig. 2.5
PLANE = 40  # examples of a class that are drawn there


class Cell(NamedTuple):
    """A row of the table, or a curve of Fig. 2.4: the first so many classes."""

    model: str
    data: str
    classes: int = 10


TABLE = tuple(Cell(model, data) for data in ("mnist", "cifar10") for model in ("resnet18", "vgg16"))
FEWER = tuple(Cell("resnet18", "mnist", classes) for classes in (3, 5))


@dataclass(frozen=True)
class Settings:
    """Networks of an eighth of the width; ResNets see means of four pixels, 16 x 16. Learning rates are those of the thesis;
    a short training has a larger weight decay, 5e-3 for 1e-3. ``subject``: the networks that claims are about, trained or not.
    ``per_class``: images."""

    cells: tuple[Cell, ...] = TABLE + FEWER
    per_class: int = 100
    n_test: int = 1000
    width: float = 0.125
    rates: tuple[float, ...] = (0.05, 0.01)  # of ResNets and VGG networks
    decay: float = 5e-3
    epochs: tuple[int, ...] = (20, 32)  # of digits, and of photographs, which are learned more slowly
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    subject: Literal["", "_untrained"] = ""


@dataclass(frozen=True)
class Task:
    settings: Settings
    cell: Cell
    seed: int


def tasks(s: Settings) -> list[Task]:
    return [Task(replace(s, cells=(), seeds=(), subject=""), cell, seed) for cell in s.cells for seed in s.seeds]


def images(t: Task) -> Split:
    """32 x 32 for VGG networks, which halve their size five times; 16 x 16 for ResNets. Only the first classes."""
    s, c = t.settings, t.cell
    data = SETS[c.data](10 * s.per_class, s.n_test, seed=t.seed)

    def sized(x: Tensor) -> Tensor:
        x = augment.pad(x, (32 - x.shape[-1]) // 2, x.min().item())
        return x if c.model == "vgg16" else F.avg_pool2d(x, 2)

    rows, rows_test = data.y < c.classes, data.y_test < c.classes
    return Split(sized(data.x[rows]), data.y[rows], sized(data.x_test[rows_test]), data.y_test[rows_test])


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s, c, data = t.settings, t.cell, images(t)
    model = MODELS[c.model](c.classes, data.x.shape[1], s.width, t.seed)
    y, y_test = indicators(data.y, c.classes), indicators(data.y_test, c.classes)

    def numbers_now() -> dict[str, Any]:
        rows = numbers(model, data.x, y, data.x_test, y_test)
        return {**rows, "quality_all_fit": rows["quality_fit"].sum()}

    start = numbers_now()
    count = s.epochs[c.data == "cifar10"]
    fit(model, data.x, y, Recipe(s.rates[c.model == "vgg16"], s.decay, count, every=max(1, 5 * count // 7), batch=32), run,
        seed=t.seed)
    return {**numbers_now(), **{f"{k}_untrained": v for k, v in start.items() if np.ndim(v) == 0},
            **(plane(model, data) if c.classes == SHOWN else {})}


def plane(model: nn.Module, data: Split) -> dict[str, NDArray[np.float64]]:
    """Features in the plane of three class means, some of each class; the means themselves."""
    Phi = read(model, data.x)[0].double()
    means = torch.stack([Phi[data.y == k].mean(0) for k in range(SHOWN)])
    m = means - means.mean(0)
    axes = torch.linalg.svd(m, full_matrices=False)[2][:2]
    chosen = torch.stack([(Phi[data.y == k][:PLANE] - means.mean(0)) @ axes.T for k in range(SHOWN)])
    return {"plane": chosen.numpy(force=True), "corners": (m @ axes.T).numpy(force=True)}
