"""Trainings of Fig. 2.3 of [layerwise]: a convolutional and a fully connected network, all layers, the last one alone, none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from numpy.typing import ArrayLike
from torch import nn

from richter.experiments.layerwise.metrics import Recipe, fit, indicators, numbers, read, readout
from richter.models import mlp
from richter.runs import Writer
from richter.tasks import mnist, mnist_5k
from richter.tasks.images import Split

Network = Literal["cnn", "mlp"]
Training = Literal["all", "last", "none"]
NETWORKS: tuple[Network, ...] = ("cnn", "mlp")
TRAININGS: tuple[Training, ...] = ("all", "last", "none")
RATES = {"cnn": Recipe(lr=0.2, decay=2e-3), "mlp": Recipe(lr=0.05, decay=1e-3)}


@dataclass(frozen=True)
class Settings:
    """``n``, ``n_test``: images for the convolutional network; the fully connected one has 4,000 and 1,000 of MNIST-5k.
    ``epochs``, ``every``: of both networks, and after how many the rate falls to a fifth. ``ridge``: of the last layer alone in
    the convolutional network, over the mean of |Phi|^2; there it is solved for, to which descent comes slowly.
    ``trained``, ``last``: the networks that claims say are trained by backpropagation, and in their last layer only.
    ``sample``: "_fit" where utilisation is counted on the fitting sample. ``feature``: which one is the constant, from 0."""

    n: int = 10_000
    n_test: int = 5000
    epochs: tuple[int, ...] = (12, 100)
    every: tuple[int, ...] = (5, 30)
    channels: int = 16
    hidden: int = 1024
    features: int = 1024
    width: int = 256
    networks: tuple[Network, ...] = NETWORKS
    ridge: float = 1e-6
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    trained: Training = "all"
    last: Training = "last"
    sample: Literal["_fit", ""] = "_fit"
    feature: int = 0


@dataclass(frozen=True)
class Task:
    settings: Settings
    network: Network
    training: Training
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, networks=(), seeds=(), trained="all", last="last", sample="_fit", feature=0)
    return [Task(alone, network, training, seed) for network in s.networks for training in TRAININGS for seed in s.seeds]


def cnn(s: Settings, seed: int) -> nn.Sequential:
    """Two convolutions, a hidden layer, and features of a hidden layer; torch's initial weights, and no biases at first: they
    would make all features alike."""
    c = s.channels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(1, c, 5, 2), nn.ReLU(), nn.Conv2d(c, 2 * c, 5, 2), nn.ReLU(), nn.Flatten(),
                              nn.Linear(32 * c, s.hidden), nn.ReLU(), nn.Linear(s.hidden, s.features), nn.ReLU(),
                              nn.Linear(s.features, 10))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.zero_()
    return model


def subject(t: Task) -> tuple[nn.Sequential, Split]:
    s = t.settings
    if t.network == "cnn":
        return cnn(s, t.seed), mnist(s.n, s.n_test, seed=t.seed)
    return mlp([784, *[s.width] * 3, 10], seed=t.seed), mnist_5k(seed=t.seed)


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s, (model, data) = t.settings, subject(t)
    y = indicators(data.y)
    if t.training == "last" and t.network == "cnn":
        solve(model, data.x, y, s.ridge)
    elif t.training != "none":
        k = NETWORKS.index(t.network)
        recipe = replace(RATES[t.network], epochs=s.epochs[k], every=s.every[k], last=t.training == "last")
        fit(model, data.x, y, recipe, run, seed=t.seed)
    return {**numbers(model, data.x, y, data.x_test, indicators(data.y_test)), "constants": constants(read(model, data.x)[0])}


@torch.no_grad()
def solve(model: nn.Module, x: torch.Tensor, y: torch.Tensor, ridge: float) -> None:
    """The last layer of least squares, with a penalty of ``ridge`` times the mean of |Phi|^2 on its weights."""
    Phi, last = read(model, x)[0].double(), readout(model)
    apart, mean = Phi - Phi.mean(0), y.double().mean(0)
    covariance = apart.T @ apart / len(Phi)
    penalty = ridge * Phi.square().sum(1).mean() * torch.eye(len(covariance)).to(covariance)
    W = torch.linalg.solve(covariance + penalty, apart.T @ (y.double() - mean) / len(Phi)).T
    last.weight.copy_(W)
    last.bias.copy_(mean - W @ Phi.mean(0))


def constants(Phi: torch.Tensor) -> ArrayLike:
    """|<e_k|1>| of the two strongest features, on the fitting sample."""
    Phi = Phi.double()
    rho, U = torch.linalg.eigh(Phi.T @ Phi / len(Phi))
    return ((Phi.mean(0) @ U[:, -2:]).abs() / rho[-2:].sqrt()).flip(0).numpy(force=True)
