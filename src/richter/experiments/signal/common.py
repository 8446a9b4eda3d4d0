"""Shared parts of the experiments of [signal]: image sets by name, bias-free He networks, their training, and profiles of
alignment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from richter.experiments.kit import Writer
from richter.experiments.rivals import shuffled
from richter.experiments.training import Step, epochs, linears
from richter.instrument.observe import Measurement
from richter.instrument.probe import Probe
from richter.models import mlp
from richter.tasks import cifar10, fashion_mnist, mnist
from richter.tasks.images import Split

SETS = {"mnist": mnist, "fashion_mnist": fashion_mnist, "cifar10": cifar10}
PANELS = {"mnist": "a: MNIST", "fashion_mnist": "b: Fashion-MNIST", "cifar10": "c: CIFAR-10"}


def images(name: str, n: int, seed: int, labels: str = "own") -> Split:
    """Standardised flat images; with ``labels="shuffled"`` the training labels are in a random order."""
    data = SETS[name](n, flat=True, seed=seed)
    return data._replace(y=shuffled(data.y, seed + 1)) if labels == "shuffled" else data


def he(widths: Sequence[int], seed: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Bias-free network with weights N(0, 2/fan_in)."""
    model = mlp(widths, activation, bias=False, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw) * (2 / p.shape[1]) ** 0.5)
    return model


def fit(model: nn.Module, data: Split, lr: float, count: int, run: Writer, *, batch: int = 128, seed: int = 0,
        after: Step | None = None) -> None:
    """Train on cross-entropy by SGD with momentum 0.9 and weight decay 1e-4, which the paper does not state."""
    optimiser = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    epochs(model, data.x, data.y, optimiser, count, run, batch=batch, seed=seed, loss=F.cross_entropy, after=after)


def balanced(x: Tensor, y: Tensor, n: int) -> Probe:
    """Probe of the first n/10 examples of each class."""
    rows = torch.cat([(y == c).nonzero()[:n // 10, 0] for c in range(10)])
    return Probe(x[rows], y[rows], kernel_examples=n)


def profile(model: nn.Module, probe: Probe, errors: bool = True) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """``tangent_cka`` of every layer, and its standard errors (NaN without ``errors``, which cost as much again)."""
    snap = Measurement(model, probe, ["tangent_cka"], errors=errors).take()
    layers = linears(model)
    return np.array([snap.value("tangent_cka", k) for k in layers]), np.array([snap.error("tangent_cka", k) for k in layers])
