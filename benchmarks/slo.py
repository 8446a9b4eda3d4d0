"""What speed limits cost, as ratios to torch.optim.SGD in the same run: a step of the optimiser alone, a whole training step, and
training with speeds that follow a measurement. What is compared takes turns on one thread, and medians of processor time are
told: machines are shared."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import richter
from richter.controls import SLO, AdaptiveSLO, slo_groups
from richter.core import DataError
from richter.models import mlp, vgg11
from richter.workflows.nfc_by_layer import nfc_by_layer

Work = Callable[[], object]


@dataclass(frozen=True)
class Line:
    what: str
    against: str
    seconds: float
    base: float
    ratios: list[float]
    goal: float | None

    def __str__(self) -> str:
        ratio, (low, _, high) = statistics.median(self.ratios), statistics.quantiles(self.ratios, n=4)
        goal = "" if self.goal is None else f"{self.goal:.2f} {'met' if ratio <= self.goal else 'MISSED'}"
        return (f"{self.what:<62} {1e3 * self.seconds:>8.2f} {self.against:<14} {1e3 * self.base:>8.2f} {ratio:>7.2f}"
                f"   {low:.2f} to {high:.2f}   {goal}")


def turns(work: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each, one after the other, round by round; every other round backwards."""
    for run in work.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in work}
    for k in range(rounds):
        for name in list(work)[::1 if k % 2 else -1]:
            begun = time.process_time()
            work[name]()
            times[name].append(time.process_time() - begun)
    return times


def lines(work: dict[str, Work], against: str, rounds: int, goals: dict[str, float], each: int = 1) -> list[Line]:
    """``each``: steps in one piece of work; seconds are told for one."""
    times = turns(work, rounds)
    return [Line(name, against, statistics.median(times[name]) / each, statistics.median(times[against]) / each,
                 [a / b for a, b in zip(times[name], times[against], strict=True)], goals.get(name))
            for name in work if name != against]


def optimisers(rounds: int) -> list[Line]:
    """The step alone, 9 million parameters in 18 tensors."""
    def params() -> list[nn.Parameter]:
        found = [nn.Parameter(torch.randn(shape)) for _ in range(9) for shape in ((1000, 1000), (1000,))]
        for p in found:
            p.grad = torch.randn_like(p)
        return found

    momentum = functools.partial(torch.optim.SGD, momentum=0.9, foreach=True)
    plain = lines({"SGD": torch.optim.SGD(params(), 1e-3, foreach=True).step,
                   "SLO, step alone": SLO(params(), 1e-3).step,
                   "SLO with weight decay, step alone": SLO(params(), 1e-3, weight_decay=0.1).step},
                  "SGD", rounds, {"SLO, step alone": 2.0})
    based = lines({"SGD, momentum": momentum(params(), 1e-3).step,
                   "SLO on momentum, step alone": SLO(params(), 1e-3, base=momentum).step}, "SGD, momentum", rounds, {})
    return plain + based


def images() -> tuple[Tensor, Tensor]:
    """Fashion-MNIST where it has been fetched; else digits, enlarged to its size."""
    try:
        data = richter.tasks.fashion_mnist(n=10000, n_test=100)
        return data.x.flatten(1), data.y
    except DataError:
        data = richter.tasks.digits(seed=0)
        return F.interpolate(data.x.reshape(-1, 1, 8, 8), (28, 28)).flatten(1), data.y


def training(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int = 1, batch: int = 128) -> Work:
    draw = torch.Generator().manual_seed(0)

    def work() -> None:
        for _ in range(steps):
            rows = torch.randint(len(x), (batch,), generator=draw)
            optimiser.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()

    return work


def whole_steps(rounds: int) -> list[Line]:
    x, y = images()
    pictures = torch.randn(256, 3, 32, 32)

    def dense() -> nn.Module:
        return mlp([784, 256, 256, 256, 10], seed=0)

    def cnn() -> nn.Module:
        torch.manual_seed(0)
        return vgg11(width=0.125)

    found = lines({"SGD": training(m := dense(), torch.optim.SGD(m.parameters(), 1e-3, foreach=True), x, y),
                   "SLO, training an MLP 784-256x3-10": training(m := dense(), SLO(m.parameters(), 1e-3), x, y),
                   "SLO by layer, training the same": training(m := dense(), SLO(slo_groups(m, {"0": 2.0}), 1e-3), x, y)},
                  "SGD", 20 * rounds, {"SLO, training an MLP 784-256x3-10": 1.15, "SLO by layer, training the same": 1.15})
    name = "SLO, training a CNN (VGG-11, an eighth of the channels)"
    y = torch.arange(256) % 10
    return found + lines({"SGD": training(m := cnn(), torch.optim.SGD(m.parameters(), 1e-3, foreach=True), pictures, y),
                          name: training(m := cnn(), SLO(m.parameters(), 1e-3), pictures, y)}, "SGD", rounds, {name: 1.15})


def adaptive(rounds: int, every: int = 20) -> list[Line]:
    """A round is as many steps as there are from one measurement to the next."""
    x, y = images()

    def work(n: int | None) -> Work:
        model = mlp([784, 256, 256, 256, 10], seed=0)
        if n is None:
            return training(model, torch.optim.SGD(model.parameters(), 1e-3, foreach=True), x, y, every)
        rich = nfc_by_layer(model, richter.Probe(x[:n], y[:n]))
        return training(model, AdaptiveSLO(slo_groups(model), 1e-4, rich, every=every), x, y, every)

    names = {n: f"adaptive SLO, nfc of {n} examples every {every} steps, the MLP" for n in (64, 128)}
    compared = {"SGD": work(None), **{name: work(n) for n, name in names.items()}}
    return lines(compared, "SGD", rounds, dict.fromkeys(names.values(), 1.3), every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="turns that each of the compared has")
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"one thread, medians of {rounds} turns or more")
    print(f"{'':<62} {'ms':>8} {'against':<14} {'ms':>8} {'ratio':>7}   {'quartiles':<12}   goal")
    for part in (optimisers, whole_steps, adaptive):
        for line in part(rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
