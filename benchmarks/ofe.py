"""What kernel dynamics cost, in units of one symmetric eigendecomposition of the same size: the closed form of optimal feature
evolution at 100 times, and 10^6 steps of kernel descent of which 200 are recorded; and how both grow with n, as a figure with
exponents. What is compared takes turns on one thread, and processor time is told: machines are shared."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from growth import exponent
from slo import Work, turns

from richter.kernels import dynamics
from richter.theory.ofe import OptimalFeatureEvolution

BASE = "one eigendecomposition"
GOALS = {"optimal feature evolution at 100 times": 3.0, "kernel descent, 10^6 steps, 200 recorded": 1.5}
SIZES = [250, 500, 1000, 2000]


def work(n: int) -> dict[str, Work]:
    draw = torch.Generator().manual_seed(0)
    J = torch.randn(n + n // 2, n, generator=draw, dtype=torch.float64)
    K, y = J.T @ J / len(J), torch.randn(n, generator=draw, dtype=torch.float64).sign()
    lr, times = 1 / (torch.linalg.eigvalsh(K)[-1].item()), torch.linspace(0, 20, 100)

    def evolve() -> None:
        evolution = OptimalFeatureEvolution(K, y, 0.1, lr)
        evolution.residual(times)
        evolution.loss(times)
        evolution.alignment(times)

    def descend() -> None:
        assert dynamics.kernel_gradient_descent(K, y, lr, 10**6, record=range(0, 10**6, 5000)).residual.shape == (200, n)

    return dict(zip((BASE, *GOALS), (lambda: torch.linalg.eigh(K), evolve, descend), strict=True))


def draw(seconds: dict[str, list[float]], file: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, ax = plt.subplots(figsize=(5.6, 3.6))
    for name, values in seconds.items():
        ax.loglog(SIZES, values, "o-", label=f"{name}: exponent {exponent(SIZES, values):.2f}")
    ax.set_xticks(SIZES, [str(n) for n in SIZES])
    ax.minorticks_off()
    ax.set_xlabel("examples n")
    ax.set_ylabel("processor seconds")
    ax.legend(frameon=False, fontsize=7)
    ax.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=Path, default=Path("ofe_growth.png"))
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in (BASE, *GOALS)}
    for n in SIZES:
        times = turns(work(n), given.rounds)
        for name, rows in times.items():
            seconds[name].append(statistics.median(rows))
            ratio = statistics.median(a / b for a, b in zip(rows, times[BASE], strict=True))
            goal = f"{GOALS[name]:.1f} {'met' if ratio <= GOALS[name] else 'MISSED'}" if n == SIZES[-1] and name in GOALS else ""
            print(f"n = {n:<5} {name:<44} {seconds[name][-1]:>8.3f} s {ratio:>6.2f} {goal}", flush=True)
    draw(seconds, given.figure)


if __name__ == "__main__":
    main()
