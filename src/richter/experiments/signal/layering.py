"""The networks of Figures 16 and 17 of [signal] and Algorithm 1: trained by layers, end to end, or in the last layer only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import nn

from richter.controls import layerwise
from richter.experiments.rivals import shuffled
from richter.experiments.signal.networks import balanced, profile
from richter.experiments.training import accuracy, epochs, linears
from richter.kernels import cka
from richter.models import mlp
from richter.runs import Writer
from richter.tasks import cifar10, mnist_5k
from richter.tasks.images import Split

Method = Literal["printed", "cosine", "end", "frozen", "shuffled"]


@dataclass(frozen=True)
class Settings:
    """Five layers, LeakyReLU. MNIST: 3,500 of 5,000 images; LFM stops by a tenth of them. Adam: rate 0.01 for LFM as in the
    paper, 0.001 end to end."""

    epochs: int = 8  # at most, for each layer
    end: int = 20  # epochs, end to end
    n: int = 1_000  # images of CIFAR-10
    widths: tuple[int, ...] = (32, 256)  # MNIST
    wide: tuple[int, ...] = (64, 256)  # CIFAR-10
    probe: int = 60
    subject: Literal["lfm", "end", "frozen", "shuffled"] = "lfm"  # what is called LFM by the claims
    seeds: tuple[int, ...] = (0, 1)


@dataclass(frozen=True)
class Task:
    settings: Settings
    data: str
    method: Method
    width: int
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, widths=(), wide=(), subject="lfm", seeds=())
    kinds: list[tuple[str, Method, int]] = [*(("mnist_5k", "printed", width) for width in s.widths)]
    kinds += [("mnist_5k", method, s.widths[-1]) for method in ("cosine", "end", "frozen", "shuffled")]  # type: ignore[misc]
    kinds += [("cifar10", "printed", width) for width in s.wide]
    kinds += [("cifar10", "end", s.wide[0]), ("cifar10", "frozen", s.wide[0])]
    return [Task(alone, *kind, seed) for seed in s.seeds for kind in kinds]


def trained(t: Task, data: Split, run: Writer) -> nn.Sequential:
    s = t.settings
    model = mlp([data.x.shape[1], *[t.width] * 4, 10], activation=nn.LeakyReLU, seed=t.seed)
    if t.method in ("end", "frozen"):
        with layerwise.frozen(model, linears(model) if t.method == "end" else linears(model)[-1]) as parameters:
            optimiser = torch.optim.Adam(parameters, lr=0.001 if t.method == "end" else 0.01)
            epochs(model, data.x, data.y, optimiser, s.end, run, seed=t.seed, loss=F.cross_entropy)
        return model
    kernel, target = (layerwise.cosine, 1.0) if t.method == "cosine" else (layerwise.inner, 0.5)
    y = shuffled(data.y, t.seed) if t.method == "shuffled" else data.y
    return layerwise.train(model, data.x, y, kernel=kernel, target=target, epochs=s.epochs, seed=t.seed).model


def features(model: nn.Sequential, data: Split) -> NDArray[np.float64]:
    """CKA of h h^T with the labels' Y Y^T on 500 test images, for the features h of each hidden layer."""
    out, h, Y = [], data.x_test[:500], F.one_hot(data.y_test[:500], 10).double()
    with torch.no_grad():
        for module in model:
            h = module(h)
            if isinstance(module, nn.LeakyReLU):
                out.append(float(cka(h.double() @ h.double().T, Y @ Y.T)))
    return np.array(out)


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    data = mnist_5k(test=0.3, seed=t.seed) if t.data == "mnist_5k" else cifar10(t.settings.n, 2000, flat=True, seed=t.seed)
    model = trained(t, data, run)
    probe = balanced(data.x, data.y, t.settings.probe)
    return {"accuracy": accuracy(model, data.x_test, data.y_test), "features": features(model, data),
            "profile": profile(model, probe, errors=False)[0]}
