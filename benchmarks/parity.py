"""What multitask sparse parity and its theory cost, as ratios within one run: making a batch against a training step of an MLP of
width 1,000 on it, and loss curves of 10^6 skills at 200 times against one pass over as many numbers. What is compared takes turns
on one thread, and processor time is told: machines are shared."""

from __future__ import annotations

import argparse
import resource
import statistics

import numpy as np
import torch
from slo import Work, turns

from richter import tasks
from richter.models import mlp
from richter.theory.multilinear import Multilinear

BATCH, WIDTH, SKILLS, TIMES = 4000, 1000, 10**6, 200
STEP, PASS = "a training step", "one pass over 10^6 x 200 numbers"
GOALS = {"making a batch": (STEP, 0.03), "loss curve of 10^6 skills at 200 times": (PASS, 10.0)}


def batches() -> dict[str, Work]:
    task = tasks.multitask_parity()
    stream, model = task.stream(BATCH), mlp([task.inputs, WIDTH, 1], seed=0)
    optimiser = torch.optim.SGD(model.parameters(), 0.05)
    x, y, _ = next(stream)

    def step() -> None:
        optimiser.zero_grad()
        ((model(x) - y).square().mean() / 2).backward()
        optimiser.step()

    def plain() -> None:
        """As one would write it: a random number for each bit."""
        skill = torch.multinomial(task.frequencies, BATCH, replacement=True)
        bits = torch.randint(2, (BATCH, task.bits))
        relevant = bits.gather(1, task.positions[skill])
        torch.cat([torch.nn.functional.one_hot(skill, task.skills), bits], 1).float()
        (5 * (1 - 2 * (relevant.sum(1) % 2))).float()

    return {STEP: step, "making a batch": lambda: [next(stream) for _ in range(10)], "the same by torch.randint": lambda:
            [plain() for _ in range(10)]}


def curves() -> dict[str, Work]:
    T, numbers = np.geomspace(1, 1e8, TIMES), np.random.default_rng(0).random(SKILLS)

    def one_pass() -> None:
        for _ in range(TIMES):
            (2 * numbers).sum()

    return {PASS: one_pass, "loss curve of 10^6 skills at 200 times": lambda: Multilinear(0.6, SKILLS).loss(T=T)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for work, each in ((batches(), {"making a batch": 10, "the same by torch.randint": 10}), (curves(), {})):
        times = turns(work, given.rounds)
        base = next(iter(work))
        for name, rows in times.items():
            ratio = statistics.median(a / b for a, b in zip(rows, times[base], strict=True)) / each.get(name, 1)
            goal = GOALS.get(name, (base, float("nan")))[1]
            verdict = "" if name not in GOALS else f"{goal:g} {'met' if ratio <= goal else 'MISSED'}"
            print(f"{name:<44} {1e3 * statistics.median(rows) / each.get(name, 1):>9.2f} ms {ratio:>8.4f} {verdict}", flush=True)
    print(f"largest memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
