"""Our own question to [nfa, Sec. 5]: on images, at equal steps, does SLO beat SGD and Adam, in test loss and in nfc?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from richter.controls import SLO, slo_groups
from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.training import Curves, accuracy
from richter.instrument.probe import Probe
from richter.models import mlp
from richter.runs import Writer
from richter.tasks import images as image_sets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("sgd", "adam", "slo")


@dataclass(frozen=True)
class Settings:
    """Cross-entropy, batches of 128, torch's initial weights, one learning rate for each method; SLO with the speeds of Fig. 17:
    2.5 in the first layer and 0.4 elsewhere."""

    data: tuple[str, ...] = ("fashion_mnist", "cifar10")
    networks: tuple[str, ...] = ("mlp", "cnn")
    n: int = 10_000
    steps: int = 800
    rates: tuple[float, ...] = (0.1, 1e-3, 0.1)  # of SGD, Adam and SLO
    first: float = 2.5
    others: float = 0.4
    eps: float = 0.2
    exchanged: bool = False  # what is called SLO is SGD, and the other way round
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True)
class Task:
    settings: Settings
    data: str
    network: str
    method: str
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, data=(), networks=(), seeds=())
    return [Task(alone, data, network, method, seed) for data in s.data for network in s.networks for method in METHODS
            for seed in s.seeds]


def network(kind: str, channels: int, size: int, seed: int) -> nn.Sequential:
    """An MLP with three hidden layers of 256, or three convolutions of 16, 32 and 64 channels with a linear read-out."""
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), *mlp([channels * size * size, 256, 256, 256, 10], seed=seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for wide in (16, 32, 64):
            layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            channels = wide
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (size // 8) ** 2, 10))


def optimiser(s: Settings, method: str, model: nn.Module) -> torch.optim.Optimizer:
    lr = dict(zip(METHODS, s.rates, strict=True))[method]
    if method == "adam":
        return torch.optim.Adam(model.parameters(), lr=lr)
    if method == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr)
    first = next(name for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d)))
    return SLO(slo_groups(model, {first: s.first}, default=s.others), lr=lr, eps=s.eps)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(np.mean([F.cross_entropy(model(a), b).item() for a, b in zip(x.split(500), y.split(500), strict=True)]))


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = getattr(image_sets, t.data)(s.n, 2_000, seed=t.seed)
    model = network(t.network, data.x.shape[1], data.x.shape[2], t.seed)
    method = {"slo": "sgd", "sgd": "slo"}.get(t.method, t.method) if s.exchanged else t.method
    moves, draw = optimiser(s, method, model), torch.Generator().manual_seed(t.seed)
    hidden = [name for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))][:-1]
    curves = Curves(model, Probe(data.x[:128], data.y[:128]), ("nfc", "cnfc", "c_uc_ratio"), hidden, run)
    for step in range(s.steps):
        rows = torch.randint(len(data.x), (128,), generator=draw)
        loss = F.cross_entropy(model(data.x[rows]), data.y[rows])
        moves.zero_grad()
        loss.backward()
        moves.step()
        run.progress(step / s.steps)
    curves.at(s.steps)
    return {**curves.arrays(), "test": loss_of(model, data.x_test, data.y_test),
            "accuracy": accuracy(model, data.x_test, data.y_test)}


def mean(r: Results, name: str, method: str) -> float:
    return float(np.mean([np.mean(arrays[name]) for _, arrays in r.where(method=method)]))


def draw(results: Results) -> Figure:
    """Test loss and nfc of each layer, by method."""
    from matplotlib.figure import Figure

    from richter.report.figures import COLOURS
    cells = list(dict.fromkeys((t.data, t.network) for t in results.tasks))
    figure = Figure(figsize=(3.2 * len(cells), 5), layout="constrained")
    axes = figure.subplots(2, len(cells), squeeze=False)
    for column, (data, kind) in enumerate(cells):
        for k, method in enumerate(METHODS):
            cell = results.where(data=data, network=kind, method=method)
            axes[0, column].plot([k] * len(cell), cell["test"], "o", color=COLOURS[k])
            layers = cell["nfc"][:, -1]
            axes[1, column].plot(np.arange(1, layers.shape[1] + 1), layers.mean(0), "o-", color=COLOURS[k], label=method)
        axes[0, column].set(title=f"{data}, {kind}", ylabel="test loss", xticks=range(3), xticklabels=METHODS)
        axes[1, column].set(xlabel="layer", ylabel="nfc", ylim=(0, 1.02))
    axes[1, 0].legend(frameon=False)
    return figure


EXCHANGED = Control("SGD and SLO exchanged", {"exchanged": True})
STILL = Control("SLO with a learning rate of a millionth", {"rates": (0.1, 1e-3, 1e-6)})
TEXT = "the paper's text, Sec. 5, carried over to images"
EXPERIMENT = Experiment(
    name="nfa_slo", ref=Ref("nfa", "Sec. 5"), title="SLO against SGD and Adam on images, at equal steps",
    smoke=Settings(n=2_000, steps=150, seeds=(0,)), paper=Settings(), tasks=tasks, work=work,
    data=("fashion_mnist", "cifar10"), figures={"nfa_slo": draw}, start={"n": 256, "steps": 1},
    reduced="2,000 images, 150 steps, one seed",
    claims=(
        Claim("mean nfc of hidden layers: SLO less SGD", lambda r: mean(r, "nfc", "slo") - mean(r, "nfc", "sgd"),
              Interval(low=0.0), EXCHANGED, source=TEXT, differs="one learning rate for each method; see the figure by layer"),
        Claim("mean share learned of hidden layers: SLO less SGD",
              lambda r: mean(r, "c_uc_ratio", "slo") - mean(r, "c_uc_ratio", "sgd"), Interval(low=0.0), EXCHANGED, source=TEXT,
              differs="one learning rate for each method; see the figure by layer"),
        Claim("mean test loss: SLO less SGD", lambda r: mean(r, "test", "slo") - mean(r, "test", "sgd"), Interval(high=0.0),
              STILL, source=TEXT, differs="with one learning rate for each method: as good for the MLPs, worse for the CNNs"),
        Claim("mean test loss: SLO less Adam", lambda r: mean(r, "test", "slo") - mean(r, "test", "adam"), Interval(high=0.0),
              STILL, source=TEXT,
              differs="with one learning rate for each method: as good for the MLPs, worse for the CNNs"),
    ))
