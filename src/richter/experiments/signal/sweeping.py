"""The networks of Figures 3 and 8 and Tables 1 to 3 of [signal]: depths, data, learning rates and batch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from numpy.typing import ArrayLike

from richter.experiments.signal.networks import balanced, fit, he, images, profile
from richter.experiments.training import accuracy
from richter.measures.profile import peak
from richter.runs import Writer

Subject = Literal["trained", "untrained", "shuffled", "theory", "exchanged"]
Law = Literal["balanced", "constant", "proportional"]
FASHION = "fashion_mnist"
RATES = {"mnist": {10: 0.003, 20: 0.003, 30: 0.003}, "cifar10": {10: 0.005, 20: 0.003, 30: 0.003},
         FASHION: {5: 0.003, 10: 0.003, 20: 0.004, 30: 0.004, 40: 0.002, 60: 0.0007}}  # Tables 1 to 3; 5 layers are ours


@dataclass(frozen=True)
class Settings:
    """Width 100, bias-free He networks, SGD with momentum 0.9 and weight decay 1e-4; alignment over 10 outputs on
    class-balanced training images, the last profile with standard errors."""

    n: int = 2_000
    width: int = 100
    epochs: int = 20
    depths: tuple[int, ...] = (10, 30)  # on Fashion-MNIST
    few: tuple[int, ...] = (10, 30)  # on the other sets, and for Fig. 8
    probe: int = 60  # images for the depth sweep
    probe_few: int = 60
    subject: Subject = "trained"  # what the claims are read from
    law: Law = "balanced"
    seeds: tuple[int, ...] = (0, 1)


@dataclass(frozen=True)
class Task:
    settings: Settings
    data: str
    condition: str
    labels: str
    depth: int
    probe: int
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, depths=(), few=(), probe=0, probe_few=0, subject="trained", law="balanced", seeds=())
    kinds = [(FASHION, "base", "own", s.depths, s.probe), (FASHION, "base", "shuffled", (s.few[0], s.few[-1]), s.probe_few),
             *((FASHION, condition, "own", s.few, s.probe_few) for condition in ("slow", "large")),
             *((data, "base", "own", s.few, s.probe_few) for data in ("mnist", "cifar10"))]
    return [Task(alone, data, condition, labels, depth, probe, seed) for seed in s.seeds
            for data, condition, labels, depths, probe in kinds for depth in depths]


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = images(t.data, s.n, t.seed, t.labels)
    model = he([data.x.shape[1], *[s.width] * (t.depth - 1), 10], t.seed)
    probe = balanced(data.x, data.y, t.probe)
    (initial, _), untrained = profile(model, probe, errors=False), accuracy(model, data.x_test, data.y_test)
    rate = RATES[t.data].get(t.depth, 0.003) / (4 if t.condition == "slow" else 1)
    fit(model, data, rate, s.epochs, run, batch=512 if t.condition == "large" else 128, seed=t.seed)
    values, errors = profile(model, probe)
    top = peak(values, errors)
    return {"initial": initial, "profile": values, "errors": errors, "low": top.low, "high": top.high,
            "untrained": untrained, "accuracy": accuracy(model, data.x_test, data.y_test)}
