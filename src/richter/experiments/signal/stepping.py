"""The networks of Figure 6 and Approximation 1 of [signal]: full-batch descent, and single steps from the initial network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from richter.core.likeness import cosine
from richter.experiments.rivals import shuffled
from richter.experiments.signal.networks import SETS, balanced, he
from richter.instrument.observe import measure
from richter.instrument.probe import Probe
from richter.measures.curvature import early_step
from richter.models import vgg11
from richter.runs import Writer

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "softplus": lambda: nn.Softplus(beta=10.0)}


@dataclass(frozen=True)
class Settings:
    """Pixels in [0, 1], bias-free He networks of depth 10 and width 64, full-batch gradient descent on the mean cross-entropy;
    single steps of other rates are taken from the initial network, in float64."""

    n: int = 500
    depth: int = 10
    width: int = 64
    lr: float = 0.03  # Table 2 has 0.003 with momentum 0.9
    steps: tuple[int, ...] = (0, 1, 2, 5, 10, 20, 60, 200, 600)
    sets: tuple[str, ...] = ("mnist", "fashion_mnist", "cifar10", "vgg")
    rates: tuple[float, ...] = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)  # of single steps
    examples: int = 50  # of single steps
    labels: Literal["own", "shuffled"] = "own"  # with which the gradient is compared
    late: bool = False  # compared at the last step
    read: Literal["own", "flipped"] = "own"  # steps in which no unit switches, or those in which some do
    smooth: str = "softplus"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Task:
    settings: Settings
    data: str
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, sets=(), labels="own", late=False, read="own", smooth="softplus", seeds=())
    return [Task(alone, name, seed) for name in s.sets for seed in s.seeds]


def hidden(s: Settings) -> list[int]:
    return [s.width] * (s.depth - 1)


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    images = t.data == "vgg"
    data = SETS["cifar10" if images else t.data](s.n // 4 if images else s.n, flat=not images, seed=t.seed, standardise=False)
    model = vgg11(width=0.125, seed=t.seed) if images else he([data.x.shape[1], *hidden(s), 10], t.seed)
    x, y = data.x, data.y
    optimiser = torch.optim.SGD(model.parameters(), lr=s.lr)
    rows = []
    for step in range(max(s.steps) + 1):
        if step in s.steps:
            rows.append([correlation(model, x, y, labels) for labels in (y, shuffled(y, t.seed + 1))])
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
        run.progress(step / max(s.steps))
    found = {"correlation": np.array(rows).T}  # own and shuffled labels, by step
    return found if t.data != "fashion_mnist" else {**found, **single_steps(s, x, y, t.seed)}


def correlation(model: nn.Module, x: Tensor, y: Tensor, labels: Tensor) -> float:
    """corr(y~, w) over all outputs of all examples; with other labels than those of the loss for a rival."""
    if labels is y:
        return measure(model, Probe(x, y), "label_gradient_correlation").value("label_gradient_correlation")
    with torch.no_grad():
        w = model(x).softmax(1) - F.one_hot(y, 10)
    return cosine((F.one_hot(labels, 10) - 0.1).numpy(), w.numpy())


def single_steps(s: Settings, x: Tensor, y: Tensor, seed: int) -> dict[str, ArrayLike]:
    """From the initial network, for each activation and rate: what a step does to Psi y~ beside both orders, and flips."""
    probe = balanced(x.double(), y, s.examples)
    rows = []
    for activation in ACTIVATIONS:
        model = he([x.shape[1], *hidden(s), 10], seed, ACTIVATIONS[activation]).double()
        steps = [early_step(model, probe, lr) for lr in s.rates]
        rows.append([[e.first_order, e.approximation, e.flips, e.units] for e in steps])
    return {"single": np.array(rows)}  # activation, rate, number
