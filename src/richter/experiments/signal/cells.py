"""The networks of Figures 4 and 11 to 15 of [signal]: one for each cell of the grids over learning rate, batch size and
optimiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import nn

from richter.experiments.signal.networks import SETS, he
from richter.experiments.training import accuracy
from richter.instrument.observe import Measurement
from richter.instrument.probe import Probe
from richter.measures.profile import peak
from richter.models import resnet18, vgg19
from richter.runs import Writer
from richter.tasks.files import cifar_binary
from richter.tasks.images import Split, split

Cell = tuple[str, str, str, float, int]  # figure, network, optimiser, learning rate, batch size
MODELS: dict[str, Callable[..., nn.Module]] = {"vgg19": vgg19, "resnet18": resnet18}
CELLS: list[Cell] = [
    *(("Fig. 12", "vgg19", "sgd", lr, 128) for lr in (0.0005, 0.001, 0.0032, 0.01)),
    *(("Fig. 13", "vgg19", "adam", lr, 128) for lr in (3.2e-5, 1e-4, 3.2e-4)),
    *(("Fig. 14", "vgg19", "sgd", 0.0032, batch) for batch in (32, 512, 2048)),  # 128 is in Fig. 12
    *(("Fig. 15", "resnet18", "sgd", lr, 128) for lr in (0.001, 0.003, 0.01, 0.02))]
HUNDRED: list[Cell] = [("Fig. 11", "vgg19", "sgd", lr, 128) for lr in (0.001, 0.003, 0.01)]


@dataclass(frozen=True)
class Settings:
    """Cross-entropy, SGD with momentum 0.9 and weight decay 1e-4 (or Adam), until the training loss is 0.1 or after so many
    epochs. Alignment over 10 outputs on class-balanced training images."""

    n: int = 2_000
    epochs: int = 60
    depth: int = 10  # of fully connected networks
    width: float = 100  # of those, or what multiplies the channels of the others
    rates: tuple[float, ...] = (0.001, 0.003, 0.01)
    batches: tuple[int, ...] = (32, 128, 512)
    probe: int = 100
    tested: int = 10_000  # test images
    cifar100: str = ""  # a folder with train.bin and test.bin, for Fig. 11
    subject: Literal["trained", "untrained", "reordered"] = "trained"  # what claims are read from
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Task:
    settings: Settings
    figure: str
    network: str
    optimiser: str
    lr: float
    batch: int
    seed: int


def tasks(s: Settings) -> list[Task]:
    """Fully connected networks."""
    return _tasks(s, [("Fig. 4", "ffnn", "sgd", lr, batch) for lr in s.rates for batch in s.batches])


def convolutional(s: Settings) -> list[Task]:
    return _tasks(s, [*CELLS, *(HUNDRED if s.cifar100 else [])])


def _tasks(s: Settings, cells: list[Cell]) -> list[Task]:
    alone = replace(s, rates=(), batches=(), subject="trained", seeds=())
    return [Task(alone, *cell, seed) for cell in cells for seed in s.seeds]


def images(t: Task) -> Split:
    s, flat = t.settings, t.network == "ffnn"
    if t.figure == "Fig. 11":
        train, test = (cifar_binary(f"{s.cifar100}/{part}.bin", classes=100) for part in ("train", "test"))
        return split(train, test, s.n, s.tested, seed=t.seed)
    return SETS["fashion_mnist" if flat else "cifar10"](s.n, s.tested, seed=t.seed, flat=flat)


def network(t: Task, data: Split) -> nn.Module:
    s = t.settings
    if t.network == "ffnn":
        return he([data.x.shape[1], *[int(s.width)] * (s.depth - 1), 10], t.seed)
    return MODELS[t.network](classes=int(data.y.max()) + 1, width=s.width, seed=t.seed)


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = images(t)
    model = network(t, data)
    rows = torch.cat([(data.y == c).nonzero()[:max(1, s.probe // (int(data.y.max()) + 1)), 0] for c in data.y.unique()])
    layers = [name for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d)) and "skip" not in name]

    def profile() -> NDArray[np.float64]:
        snap = Measurement(model, Probe(data.x[rows], data.y[rows], kernel=None), ["tangent_cka"], errors=False).take()
        return np.array([snap.value("tangent_cka", k) for k in layers])

    before = profile()
    loss, spent = train(model, data, t, run)
    A = np.stack([before, profile()])
    model.eval()
    with torch.no_grad():
        test = float(np.mean([F.cross_entropy(model(x), y).item() for x, y in zip(
            data.x_test.split(500), data.y_test.split(500), strict=True)]))
    return {"alignment": A, "height": A.max(1), "peak": peak(A[1]).layer, "loss": loss, "test_loss": test,
            "accuracy": accuracy(model, data.x_test, data.y_test), "epochs": spent}


def train(model: nn.Module, data: Split, t: Task, run: Writer) -> tuple[float, int]:
    """Until the mean loss of an epoch is 0.1; that loss, and the epochs it took."""
    options: dict[str, Any] = {"lr": t.lr} if t.optimiser == "adam" else {"lr": t.lr, "momentum": 0.9, "weight_decay": 1e-4}
    optimiser = (torch.optim.Adam if t.optimiser == "adam" else torch.optim.SGD)(model.parameters(), **options)
    draw, loss = torch.Generator().manual_seed(t.seed), float("inf")
    model.train()
    for epoch in range(t.settings.epochs):
        total = 0.0
        for rows in torch.randperm(len(data.x), generator=draw).split(t.batch):
            value = F.cross_entropy(model(data.x[rows]), data.y[rows])
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            total += value.item() * len(rows)
        loss = total / len(data.x)
        run.progress((epoch + 1) / t.settings.epochs)
        if loss <= 0.1:
            return loss, epoch + 1
    return loss, t.settings.epochs
