"""Trainings of one network towards true labels, wrong ones and the value of a digit, for Figs 3.5 and 3.6 of [layerwise]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from richter.experiments.frame import Results
from richter.experiments.layerwise.metrics import Recipe, fit, indicators, numbers, read
from richter.experiments.rivals import shuffled
from richter.measures.features import analyse
from richter.models import mlp
from richter.runs import Writer
from richter.tasks import mnist_5k

Case = Literal["classes", "tenth", "random", "no decay", "last", "none", "value", "value, last", "value, none"]


class Teaching(NamedTuple):
    """How a network is trained; the share of labels that are shuffled; is the value of a digit taught, by one output?"""

    recipe: Recipe
    noise: float = 0.0
    value: bool = False


TEACHINGS: dict[Case, Teaching] = {
    "classes": Teaching(Recipe()), "tenth": Teaching(Recipe(), 0.1), "random": Teaching(Recipe(epochs=150), 1.0),
    "no decay": Teaching(Recipe(epochs=70, decay=0.0), 1.0), "last": Teaching(Recipe(last=True)),
    "none": Teaching(Recipe(epochs=0)), "value": Teaching(Recipe(lr=0.002, epochs=40), value=True),
    "value, last": Teaching(Recipe(lr=0.002, epochs=40, last=True), value=True),
    "value, none": Teaching(Recipe(epochs=0), value=True)}


@dataclass(frozen=True)
class Settings:
    """Three hidden layers on 4,000 images of MNIST-5k."""

    cases: tuple[Case, ...]
    width: int = 256
    shortened: int = 1  # the number of epochs is divided by this
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Task:
    width: int
    shortened: int
    case: Case
    seed: int


def tasks(s: Settings) -> list[Task]:
    return [Task(s.width, s.shortened, case, seed) for case in s.cases for seed in s.seeds]


def noisy(y: Int[Tensor, " n"], share: float, seed: int) -> Int[Tensor, " n"]:
    """This share of the labels, each at a random example of theirs."""
    rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:round(share * len(y))]
    mixed = y.clone()
    mixed[rows] = shuffled(y[rows], seed + 1)
    return mixed


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    """Accuracy on the fitting sample is of the labels that were taught, that on held-out examples of the true ones."""
    data, (recipe, noise, value) = mnist_5k(seed=t.seed), TEACHINGS[t.case]
    model = mlp([784, *[t.width] * 3, 1 if value else 10], seed=t.seed)
    y, y_test = (c[:, None].float() if value else indicators(c) for c in (noisy(data.y, noise, t.seed), data.y_test))
    fit(model, data.x, y, replace(recipe, epochs=recipe.epochs // t.shortened), run, seed=t.seed)
    return {**numbers(model, data.x, y, data.x_test, y_test), **varying(*read(model, data.x), y)}


def varying(Phi: Float[Tensor, "n p"], f: Float[Tensor, "n k"], y: Float[Tensor, "n k"]) -> dict[str, float]:
    """Plain effective dimensions: ``strong``, of all intensities; and without what is constant in features and outputs:
    ``strong_varying`` of the intensities, ``used_varying`` of the utilisation."""
    parts = [part.double() for part in (Phi, y, f)]
    centred = analyse(*(part - part.mean(0) for part in parts))
    return {"strong": analyse(parts[0], parts[1] - parts[1].mean(0), parts[2]).deff_intensity,
            "strong_varying": centred.deff_intensity, "used_varying": centred.deff_utilisation}


def number(r: Results, name: str, case: Case) -> float:
    return float(np.median(r.where(case=case)[name]))
