"""Training curves of real networks, on which forecasts of ``scaling`` are validated: ``tests/data/curves.csv``.

    python benchmarks/curves.py                        # the committed file: seed 0, about half an hour on one core
    python benchmarks/curves.py --seed 1 -o other.csv  # the same networks with other initial weights, batches and splits
    python benchmarks/curves.py --judge other.csv ...  # how often intervals hold the loss, in all and of families left out

Every network takes 4,000 steps. ``train`` is the mean loss of the batches in a bin of steps (single steps up to step 20, then 5 %
of the step), ``step`` the geometric mean of the steps in it; ``test`` is the loss on 500 held-out examples after the last step of
the bin; ``rate`` is the learning rate there. A forecast is made from the first 100, 200 or 400 steps, and compared with the mean
of the bins within 8 % of 2 or 10 times that step (of the last bins at the end of the curve).
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import richter.tasks as tasks
from richter.core.values import progress
from richter.models import GPT, mlp
from richter.workflows import trend
from richter.workflows.trend import Trend

STEPS, BATCH, TESTED = 4000, 32, 500
FILE = Path(__file__).parents[1] / "tests" / "data" / "curves.csv"
SCHEDULES: dict[str, Callable[[int], float]] = {  # share of the rate at step t
    "constant": lambda t: 1.0,
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t / STEPS)),
    "root": lambda t: (1 + t / 50) ** -0.5}


class Curve(NamedTuple):
    model: str
    data: str
    optimiser: str
    rate: float
    schedule: str
    loss: str = "entropy"

    def __str__(self) -> str:
        return " ".join(str(part) for part in self if part != "entropy")


CURVES = (
    Curve("mlp", "digits", "sgd", 0.1, "constant"), Curve("mlp", "digits", "sgd", 0.02, "constant"),
    Curve("mlp", "digits", "adam", 1e-3, "constant"), Curve("mlp", "digits", "sgd", 0.1, "cosine"),
    Curve("mlp", "mnist_5k", "sgd", 0.05, "constant"), Curve("mlp", "mnist_5k", "adam", 3e-4, "constant"),
    Curve("mlp", "mnist_5k", "adam", 1e-3, "cosine"), Curve("mlp", "mnist_5k", "sgd", 0.1, "root"),
    Curve("mlp", "mnist_5k", "sgd", 0.1, "constant", "squared"), Curve("small mlp", "digits", "sgd", 0.1, "constant"),
    Curve("cnn", "mnist_5k", "sgd", 0.02, "constant"), Curve("cnn", "mnist_5k", "sgd", 0.1, "constant"),
    Curve("cnn", "mnist_5k", "adam", 1e-3, "constant"), Curve("cnn", "mnist_5k", "adam", 3e-4, "constant"),
    Curve("cnn", "mnist_5k", "sgd", 0.05, "cosine"), Curve("cnn", "mnist_5k", "adam", 1e-3, "cosine"),
    Curve("cnn", "mnist_5k", "sgd", 0.1, "root"), Curve("cnn", "mnist_5k", "sgd", 0.1, "constant", "squared"),
    Curve("gpt", "shakespeare", "adam", 1e-3, "constant"), Curve("gpt", "shakespeare", "adam", 3e-4, "constant"),
    Curve("gpt", "shakespeare", "adam", 3e-3, "constant"), Curve("gpt", "shakespeare", "sgd", 0.3, "constant"),
    Curve("gpt", "shakespeare", "adam", 1e-3, "cosine"), Curve("gpt", "shakespeare", "adam", 3e-3, "cosine"),
    Curve("gpt", "shakespeare", "adam", 3e-3, "root"), Curve("gpt", "shakespeare", "sgd", 0.3, "cosine"))


def cnn(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2),
                             nn.ReLU(), nn.Flatten(), nn.Linear(400, 10))


def task(curve: Curve, seed: int) -> tuple[nn.Module, Callable[[torch.Generator], tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Make the network, a function that draws a batch, and the examples for testing."""
    if curve.model == "gpt":
        text, held_out = tasks.shakespeare(), torch.Generator().manual_seed(seed + 1)
        return (GPT(len(text.vocabulary), 32, d=48, depth=2, seed=seed), lambda draw: text.batch(BATCH // 2, 32, draw),
                text.batch(TESTED // 32, 32, held_out, test=True))
    data = getattr(tasks, curve.data)(seed=seed)
    inputs = data.x.shape[1]
    scale = 0.3 if curve.model == "small mlp" else 1.0
    model = cnn(seed) if curve.model == "cnn" else mlp([inputs, 64, 64, 10], scale=scale, seed=seed)

    def batch(draw: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(data.x), (BATCH,), generator=draw)
        return data.x[rows], data.y[rows]

    return model, batch, (data.x_test[:TESTED], data.y_test[:TESTED])


def loss_of(curve: Curve, f: Tensor, y: Tensor) -> Tensor:
    if curve.loss == "squared":
        return (f - F.one_hot(y, f.shape[-1])).square().sum(-1).mean()
    return F.cross_entropy(f.flatten(0, -2), y.flatten())


def bins() -> list[int]:
    """Last steps of the bins."""
    ends = [*range(1, 21)]
    while ends[-1] < STEPS:
        ends.append(min(STEPS, math.ceil(1.05 * ends[-1])))
    return ends


def trained(curve: Curve, seed: int) -> Iterator[tuple[float, float, float, float]]:
    """Train, and yield (step, train, test, rate) of each bin."""
    model, batch, (x, y) = task(curve, seed)
    momentum = 0.9 if curve.model == "gpt" else 0.0
    optimiser: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=curve.rate, momentum=momentum)
    if curve.optimiser == "adam":
        optimiser = torch.optim.Adam(model.parameters(), lr=curve.rate)
    draw, ends, steps, losses = torch.Generator().manual_seed(seed), set(bins()), list[int](), list[float]()
    for step in progress(range(1, STEPS + 1), title=str(curve)):
        rate = curve.rate * SCHEDULES[curve.schedule](step - 1)
        for group in optimiser.param_groups:
            group["lr"] = rate
        inputs, labels = batch(draw)
        loss = loss_of(curve, model(inputs), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        steps.append(step)
        losses.append(loss.item())
        if step in ends:
            with torch.no_grad():
                test = loss_of(curve, model(x), y).item()
            yield float(np.exp(np.log(steps).mean())), float(np.mean(losses)), test, rate
            steps, losses = [], []


def make(path: Path, seed: int) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("curve", "step", "train", "test", "rate"))
        for curve in CURVES:
            for row in trained(curve, seed):
                table.writerow((str(curve), *(f"{v:.4g}" for v in row)))
            file.flush()


# ------------------------------------------------------------------------------------------------ how good forecasts are

ORIGINS, HORIZONS = (100, 200, 400), (2.0, 10.0)


class Case(NamedTuple):
    """A forecast, and what came."""

    curve: str
    origin: int
    horizon: float
    trend: Trend
    at: float
    truth: float

    @property
    def family(self) -> str:
        return next(word for word in ("mlp", "cnn", "gpt") if word in self.curve.split())

    @property
    def held(self) -> bool:
        _, low, high = (float(v[0]) for v in self.trend.predict(self.at, 0.9))
        return low <= self.truth <= high

    @property
    def ratio(self) -> tuple[float, float]:
        """R, with the noise in favour of either end: the fall of log loss relative to that of the power law."""
        fall, law = self.trend.level - math.log(self.truth), self.trend.slope * math.log(self.at / self.trend.last)
        return (fall + trend.NOISE * self.trend.noise) / law, (fall - trend.NOISE * self.trend.noise) / law


def read(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Read curves: by name, the columns."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = dict.fromkeys(row["curve"] for row in rows)
    return {name: {key: np.array([float(row[key]) for row in rows if row["curve"] == name])
                   for key in ("step", "train", "test", "rate")} for name in names}


def cases(curves: Mapping[str, Mapping[str, np.ndarray]], column: str = "train", rates: bool = True,
          origins: Sequence[int] = ORIGINS) -> list[Case]:
    """Forecast every curve. ``rates``: forecasts know the learning rates."""
    found = []
    for name, c in curves.items():
        for origin in origins:
            known = c["step"] <= origin
            seen = trend.forecast(c["step"][known], c[column][known], c["rate"][known] if rates else None)
            for horizon in HORIZONS:
                at = min(horizon * seen.last, float(c["step"][-1]))
                near = np.abs(np.log(c["step"] / at)) < 0.08
                found.append(Case(name, origin, horizon, seen, at, float(c[column][near].mean())))
    return found


def calibrated(some: Sequence[Case]) -> dict[float, tuple[float, float]]:
    """RANGE of these cases: the middle of R, and the factor on both sides, from its quantiles at 5 and 95 %."""
    ranges = {}
    for horizon in HORIZONS:
        ratios = np.array([case.ratio for case in some if case.horizon == horizon and not case.trend.refusal])
        # as many ratios lie outside as if the next curve were one more of these
        share = 0.05 * (1 + 1 / len(ratios)) - 1 / len(ratios)
        low = np.quantile(ratios[:, 0], max(0.0, share), method="lower")
        high = np.quantile(ratios[:, 1], min(1.0, 1 - share), method="higher")
        ranges[horizon] = math.sqrt(low * high), math.sqrt(high / low)
    return ranges


def coverage(some: Sequence[Case], horizon: float) -> tuple[float, int]:
    """Share of intervals that hold the loss, and how many there are."""
    held = [case.held for case in some if case.horizon == horizon and not case.trend.refusal]
    return float(np.mean(held)), len(held)


def left_out(some: Sequence[Case], horizon: float) -> dict[str, tuple[float, int]]:
    """Coverage in each family, with RANGE of the others."""
    shares, before = {}, dict(trend.RANGE)
    try:
        for family in ("mlp", "cnn", "gpt"):
            trend.RANGE.update(calibrated([case for case in some if case.family != family]))
            shares[family] = coverage([case for case in some if case.family == family], horizon)
    finally:
        trend.RANGE.update(before)
    return shares


def judge(paths: Sequence[Path]) -> None:
    for column, rates in (("train", True), ("train", False)):
        some = [case for path in paths for case in cases(read(path), column, rates)]
        given = [case for case in some if not case.trend.refusal]
        print(f"{column} losses, {'known' if rates else 'unknown'} rates: forecasts in {len(given)} of {len(some)} cases")
        if column == "train":
            print("  RANGE of these curves:", {h: tuple(round(v, 2) for v in r) for h, r in calibrated(some).items()})
        for horizon in HORIZONS:
            of_families = {family: coverage([c for c in some if c.family == family], horizon) for family in ("mlp", "cnn", "gpt")}
            told = [f"{family} {share:.2f} of {n}" for family, (share, n) in of_families.items()]
            told += [f"{family} left out {share:.2f}" for family, (share, _) in left_out(some, horizon).items()]
            print(f"  {horizon:g} times: {coverage(some, horizon)[0]:.2f} ({', '.join(told)})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", type=Path, default=FILE)
    parser.add_argument("--judge", type=Path, nargs="+")
    args = parser.parse_args()
    judge(args.judge) if args.judge else make(args.o, args.seed)
