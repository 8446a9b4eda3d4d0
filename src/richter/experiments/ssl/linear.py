"""The linearised Barlow Twins model on pairs of noisy digits: modes one at a time, plateaus of the loss, and the final weights.
[ssl, Prop. 4.1]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike

from richter.experiments.agf.staircases import Numbers, draw_staircase, even_times, plateaus, times_around
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.tasks import digits
from richter.theory.self_supervised import KernelBarlowTwins, LinearBarlowTwins, pair_covariance

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SslLinearSettings:
    """Pairs are two noisy copies of a digit, in the coordinates of ``m`` principal components."""

    n: int = 512
    m: int = 12
    d: int = 6
    noise: float = 0.35
    size: float = 1e-8  # of the initial weights
    seeds: tuple[int, ...] = tuple(range(10))
    times: Literal["theory", "evenly", "reversed"] = "theory"
    kernel: Literal["pairs", "first views"] = "pairs"


def views(s: SslLinearSettings, seed: int) -> tuple[Numbers, Numbers]:
    """Draw the two views of digits [n, m]."""
    draw = np.random.default_rng((seed, 47))
    x = digits(seed=seed).x.double().numpy()[:s.n]
    x = (x - x.mean(0)) @ np.linalg.svd(x - x.mean(0), full_matrices=False)[2][:s.m].T / 8
    return tuple(x + s.noise / 8 * draw.standard_normal(x.shape) for _ in range(2))  # type: ignore[return-value]


def work(t: Task[SslLinearSettings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    x, x2 = views(s, t.seed)
    W0 = s.size * np.random.default_rng((t.seed, 48)).standard_normal((s.d, s.m))
    model = LinearBarlowTwins(pair_covariance(x, x2), W0)
    times = np.sort(model.step_times)
    grid = times_around(times, 1.3 * times[-1])
    run.progress(0.2)
    loss, weights = flow(np.asarray(model.Gamma), W0, grid)
    shares = np.linalg.eigvalsh(weights @ np.asarray(model.Gamma) @ weights.transpose(0, 2, 1))[:, ::-1]
    seen = np.array([half_time(grid, share) for share in shares.T])
    W = weights[-1]
    both = np.concatenate([x, x2])
    new = digits(seed=t.seed).x_test.double().numpy()[:50, :s.m]
    K = both @ both.T
    if s.kernel == "first views":  # the second views are forgotten: kernel PCA
        K = np.block([[x @ x.T, x @ x.T], [x @ x.T, x @ x.T]])
        both = np.concatenate([x, x])
    by_kernel, by_weights = KernelBarlowTwins(K).embed(new @ both.T, s.d), new @ np.asarray(model.final).T
    grams = by_kernel @ by_kernel.T, by_weights @ by_weights.T
    coarse = np.linspace(0, grid[-1], 1_000)
    return {"seen": seen, "theory": times, "evenly": even_times(times), "reversed": times[0] + times[-1] - times[::-1],
            "plateaus": plateaus(grid, loss, seen)[:-1], "t": coarse, "loss": np.interp(coarse, grid, loss),
            "norm": np.square(W).sum(), "least": (1 / np.linalg.eigvalsh(model.Gamma)[::-1][:s.d]).sum(), "end": loss[-1],
            "apart": np.linalg.norm(grams[0] - grams[1]) / np.linalg.norm(grams[1])}


def flow(Gamma: Numbers, W0: Numbers, times: Numbers) -> tuple[Numbers, Numbers]:
    """Integrate the flow of all weights: the losses and the weights [t, d, m] at these times."""
    from scipy.integrate import solve_ivp
    one = np.eye(len(W0))

    def velocity(_: float, w: Numbers) -> Numbers:
        W = w.reshape(W0.shape)
        return (-4 * (W @ Gamma @ W.T - one) @ W @ Gamma).ravel()

    done = solve_ivp(velocity, (0.0, times[-1]), W0.ravel(), t_eval=times, method="LSODA", rtol=1e-8, atol=1e-14)
    weights = done.y.T.reshape(-1, *W0.shape)
    return np.square(weights @ Gamma @ weights.transpose(0, 2, 1) - one).sum((1, 2)), weights


def half_time(t: Numbers, share: Numbers) -> float:
    """Time at which an eigenvalue first is 1/2, on the straight line between two points."""
    i = max(1, int(np.argmax(share >= 0.5)))
    return float(np.interp(0.5, share[i - 1:i + 1], t[i - 1:i + 1]))


def late(r: Results) -> float:
    """The largest error of a step time, relative to the measured one."""
    return float(np.abs(r[r.settings.times] / r["seen"] - 1).max())


def plateau(r: Results) -> float:
    """Distance of the loss between two steps from the number of modes that are left, median over the steps."""
    return float(np.median(np.abs(r["plateaus"] - np.arange(r.settings.d - 1, 0, -1))))


def excess(r: Results) -> float:
    """Squared norm of the final weights beyond the least one, relative to it."""
    return float((r["norm"] / r["least"] - 1).max())


@styled
def draw(results: Results) -> Figure:
    figure, (left, right) = panels(2, across=2)
    _, one = next(iter(results))
    levels = np.arange(len(one["theory"]), -1.0, -1.0)
    draw_staircase(left, one["t"], one["loss"], one["theory"], levels, "gradient flow", "theory")
    for i, (_, one) in enumerate(results):
        points(right, np.arange(1, len(one["seen"]) + 1), one["seen"] / one["theory"], COLOURS[0], "seeds" if not i else "")
    line(right, [1, results.settings.d], [1, 1], label="as predicted")
    label(right, "mode", "step time / predicted", legend=True)
    caption(figure, "The loss of a linear joint-embedding model falls by one for each dimension of the embedding, at the "
                    "predicted times.")
    return figure


LARGE = Control("large initial weights", {"size": 0.3})
EXPERIMENT = Experiment(
    name="ssl_linear", ref=Ref("ssl", "Prop. 4.1"), title="a linear joint-embedding model learns one dimension at a time",
    smoke=SslLinearSettings(seeds=(0, 1, 2, 3, 4)), paper=SslLinearSettings(), over=("seed",), analysis=("times",), work=work,
    figures={"ssl_linear": draw}, places=("Prop. 4.1", "Sec. 4.3", "Sec. 4.4"),
    start={"seeds": (0,), "d": 2, "n": 64}, reduced="five of ten seeds", quick=True,
    protocol="stand-in: noisy digits in 12 principal components for a sample of CIFAR-10",
    claims=(
        Claim("largest relative error of a step time", late, Interval(high=0.02),
              (Control("evenly spaced times", {"times": "evenly"}),
               Control("the same gaps in the opposite order", {"times": "reversed"}), LARGE), places=("Prop. 4.1",),
              says="From small random weights each mode is learned at the time that the closed form says.",
              source="independent check: at most 1 % at weights of 1e-5, where eigenvalues are apart", over="seed"),
        Claim("distance of a plateau of the loss from a whole number, median over steps", plateau, Interval(high=0.15), LARGE,
              places=("Prop. 4.1",), says="The loss falls in steps from d to 0, by one for each mode.",
              source="independent check: .001 to .1", over="seed"),
        Claim("squared norm of the final weights beyond the least of all solutions, relative", excess, Interval(high=0.05), LARGE,
              places=("Sec. 4.3",), says="From small weights the flow ends at the solution of least norm.",
              source="independent check: below 1e-4", over="seed"),
        Claim("embeddings of new digits by the kernel form, distance from the linear one", lambda r: float(r["apart"].max()),
              Interval(high=1e-8), Control("kernel PCA of the first views", {"kernel": "first views"}), places=("Sec. 4.4",),
              says="The kernel form with a linear kernel gives the embedding of the linear model.", source="an identity",
              over="seed")))
