"""Trainings of Figs 6.3 and 6.1 of [layerwise]: plain, with small targets, of the last layer only, and on random labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike

from richter.controls import Richness
from richter.experiments.layerwise.metrics import Recipe, fit, indicators, read, right
from richter.experiments.rivals import shuffled
from richter.kernels import cka
from richter.measures.features import analyse
from richter.models import mlp
from richter.runs import Writer
from richter.tasks import mnist

Kind = Literal["rich", "lazy", "linear", "random"]
KINDS: dict[Kind, str] = {"rich": "plain", "lazy": "targets / 100, from zero", "linear": "last layer only",
                          "random": "random labels"}
CURVES = ("quality", "utilisation", "intensity")


@dataclass(frozen=True)
class Settings:
    """Four layers, ReLU, torch's initial weights, momentum 0.9, no weight decay but for random labels, whose rate falls to a
    fifth after ``every`` epochs. ``rich``, ``lazy``, ``linear`` and ``bad`` are what claims take for them; ``trained``: False
    looks at the network before training; ``sorted_by``: how the networks that moved are told from those that did not."""

    n: int = 10_000
    width: int = 256
    alpha: float = 100.0
    lr: float = 0.05
    epochs: int = 40
    random_n: int = 2000
    random_epochs: int = 150
    every: int = 80
    decay: float = 1e-3
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    rich: Kind = "rich"
    lazy: Kind = "lazy"
    linear: Kind = "linear"
    bad: Kind = "random"
    trained: bool = True
    sorted_by: Literal["moved", "accuracy"] = "moved"


@dataclass(frozen=True)
class Task:
    settings: Settings
    kind: Kind
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, seeds=(), rich="rich", lazy="lazy", linear="linear", bad="random", trained=True, sorted_by="moved")
    return [Task(alone, kind, seed) for kind in KINDS for seed in s.seeds]


def recipe(s: Settings, kind: Kind) -> Recipe:
    if kind == "random":
        return Recipe(s.lr, s.decay, s.random_epochs, s.every)
    return Recipe(s.lr, 0.0, s.epochs, every=0, last=kind == "linear")


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    """Features of test images, of which all numbers are but ``fitted`` and ``kappa_train``."""
    s, random = t.settings, t.kind == "random"
    data = mnist(s.random_n if random else s.n, 1000, seed=t.seed, flat=True)
    labels = shuffled(data.y, t.seed) if random else data.y
    plain = mlp([784, s.width, s.width, s.width, 10], seed=t.seed)
    knobs = Richness(target=1 / s.alpha, zero=True) if t.kind == "lazy" else Richness()
    model, y, y_test = knobs.model(plain), indicators(labels), indicators(data.y_test)
    first, at_first = read(plain, data.x_test)
    start = analyse(first, y_test, at_first)
    fit(model, data.x, knobs.targets(y), recipe(s, t.kind), run, seed=t.seed)
    with torch.no_grad():
        f, f_train = model(data.x_test), model(data.x)
    last = read(plain, data.x_test)[0]
    a, inside = analyse(last, y_test, f), analyse(read(plain, data.x)[0], y, f_train)
    return {"kappa_cka": a.kappa_cka, "kappa_start": start.kappa_cka, "deff": a.deff_intensity,
            "deff_start": start.deff_intensity, "used": a.deff_utilisation, "accuracy": right(f, y_test),
            "fitted": right(f_train, y), "kappa_train": inside.kappa_cka, "moved": 1 - float(cka(first @ first.T, last @ last.T)),
            **{name: np.asarray(getattr(a, name)) for name in CURVES}}
