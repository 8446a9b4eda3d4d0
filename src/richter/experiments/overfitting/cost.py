"""Cost of overfitting in kernel ridge regression [overfitting]: the agnostic bound, effective ranks, and classes of spectra."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.theory import eigenlearning, overfitting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Vector = NDArray[np.float64]
Form = Literal["own", "two", "mean", "cut", "whole", "n"]
ALPHAS = (1.2, 1.5, 2.0, 3.0)
KINDS = {"power law 1.3": "tempered", "power law 2": "tempered", "1 / (i log^2 i)": "benign", "exp(-i)": "catastrophic",
         "exp(-sqrt i)": "catastrophic"}
POWERS = (0.5, 1.05, 1.5, 2.0, 2.5)  # log n / log d of inner-product kernels; the first hump is a little above 1


@dataclass(frozen=True)
class OverfittingCostSettings:
    """``form`` chooses rivals."""

    n: int = 50
    modes: int = 1500
    trials: int = 30
    dimension: int = 2000
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    form: Form = "own"


def work(t: Task[OverfittingCostSettings], run: Writer) -> Mapping[str, ArrayLike]:
    s, draw = t.settings, np.random.default_rng(t.seed)
    i = np.arange(1, s.modes + 1.0)
    lam = i ** -draw.uniform(1.1, 2.5)
    E0 = overfitting.bound(lam, s.n)
    costs = []
    for _ in range(6):  # sparse and dense targets, with little and much noise
        power = draw.random(s.modes) ** draw.uniform(1, 12) * i ** -draw.uniform(0, 2)
        costs.append(overfitting.cost(lam, power, s.n, power.sum() * draw.choice([0, 0.01, 1.0])))
    # outside of the kernel's space: constant power up to the last mode; and as few as five examples
    outside = overfitting.cost(lam, np.ones(s.modes) / s.modes, s.n, 0.1)
    few = [overfitting.cost(lam, i**-1.2, n, 0.3) / overfitting.bound(lam, n) for n in (2, 5, 10)]
    low, high = overfitting.bounds(lam, s.n)
    pure = overfitting.cost(lam, 0 * i, s.n, 1.0)
    return {"E0": E0, "costs": costs, "outside": outside, "few": few, "pure": pure, "low": low, "high": high,
            "measured": measured(t, lam), "alpha": lam[0] / lam[1]}


def measured(t: Task[OverfittingCostSettings], lam: Vector) -> float:
    """Test error of ridgeless regression on pure noise of variance 1, over Gaussian designs."""
    return overfitting.simulate_bound(lam[:600], t.settings.n, draws=t.settings.trials, seed=t.seed)


# ------------------------------------------------------------------------------------------------ spectra


def spectrum(kind: str, m: int) -> Vector:
    i = np.arange(1, m + 1.0)
    if kind.startswith("power law"):
        return i ** -float(kind.split()[-1])
    slow = 1 / ((i + 1) * np.log(i + 1) ** 2)
    return {"1 / (i log^2 i)": slow, "exp(-i)": np.exp(-i), "exp(-sqrt i)": np.exp(-np.sqrt(i))}[kind]


def named(r: Results) -> float:
    """Share of spectra whose class is right."""
    m = {"exp(-i)": 400, "exp(-sqrt i)": 20_000}
    right = []
    for kind, known in KINDS.items():
        lam = spectrum(kind, m.get(kind, 100_000))
        seen = overfitting.classify(lam)
        guess = seen.kind
        if r.settings.form == "whole":  # the largest cost at one size as the rival: below 1.2 benign, above 5 catastrophic
            E0 = overfitting.bound(lam, 50)
            guess = "benign" if E0 < 1.2 else "catastrophic" if E0 > 5 else "tempered"
        right.append(guess == known)
    return float(np.mean(right))


def limits(r: Results) -> float:
    """Largest relative error of E_0 -> alpha on power laws with 1,000 examples; the rival cuts the spectrum at 2,000 modes."""
    errors = []
    for alpha in ALPHAS:
        lam, _, count = eigenlearning.power_law(alpha, 1.5)
        E0 = overfitting.bound(np.arange(1, 2001.0) ** -alpha, 1000) if r.settings.form == "cut" else overfitting.bound(
            lam, 1000, multiplicity=count)
        errors.append(abs(E0 / alpha - 1))
    return max(errors)


def blocks(d: int) -> tuple[Vector, Vector]:
    """Eigenvalues and multiplicities of an inner-product kernel on the sphere: about d^-k, d^k / k! times."""
    k = np.arange(5.0)
    return np.power(float(d), -k), np.array([math.comb(d, j) for j in range(5)], dtype=float)


def steps(d: int) -> Vector:
    """E_0 of the block spectrum with d^l examples."""
    lam, count = blocks(d)
    return np.array([overfitting.bound(lam, round(d**power), multiplicity=count) for power in POWERS])


def between(r: Results) -> float:
    """Largest E_0 between integers, over the smallest at an integer."""
    E0 = steps(r.settings.dimension)
    inner, whole = E0[[0, 2, 4]] - 1, E0[[1, 3]] - 1
    return float(whole.max() / inner.max() if r.settings.form == "whole" else inner.max() / whole.min())


# ------------------------------------------------------------------------------------------------ drawings


@styled
def draw_bound(results: Results) -> Figure:
    figure, (ax,) = panels(1, across=1)
    E0 = np.repeat(results["E0"], results["costs"].shape[1])
    points(ax, E0, results["costs"].reshape(-1), COLOURS[0], "random targets")
    points(ax, results["E0"], results["pure"], COLOURS[1], "pure noise", "s")
    line(ax, [1, E0.max()], [1, E0.max()], label="E_0")
    label(ax, "E_0 of the spectrum", "cost of overfitting", legend=True)
    caption(figure, "No target costs more than E_0, and pure noise costs exactly that.")
    return figure


@styled
def draw_blocks(results: Results) -> Figure:
    figure, (ax,) = panels(1, across=1)
    powers, d = np.linspace(0.3, 2.7, 60), results.settings.dimension
    lam, count = blocks(d)
    line(ax, powers, [overfitting.bound(lam, max(2, round(d**p)), multiplicity=count) for p in powers], COLOURS[0])
    label(ax, "log n / log d", "E_0")
    caption(figure, "An inner-product kernel overfits at integer powers of the dimension, and benignly between them.")
    return figure


EXACT = "a theorem; rounding errors only"
EXPERIMENT = Experiment(
    name="overfitting_cost", ref=Ref("overfitting", "Thm. 1"), title="what fitting the noise costs at most",
    places=("Thm. 1", "Sec. 3", "Thms. 2-5", "Thm. 6", "Inner-product kernels"),
    smoke=OverfittingCostSettings(), paper=OverfittingCostSettings(trials=300), work=work, over=("seed",), analysis=("form",),
    start={"seeds": (0,), "trials": 1}, figures={"overfitting_thm_1": draw_bound, "overfitting_inner_product": draw_blocks},
    protocol="exact",
    claims=(
        Claim("largest cost over E_0, random spectra, targets and noises", lambda r: float(
              (r["costs"] / (r["costs"].mean() if r.settings.form == "mean" else r["E0"][:, None])).max()),
              Interval(high=1 + 1e-9), Control("the mean cost as bound", {"form": "mean"}), paper="at most 1", source=EXACT,
              places=("Thm. 1",),
              says="Thm. 1: the cost of overfitting is at most E_0 for every target and noise."),
        Claim("largest |cost of pure noise / E_0 - 1|", lambda r: float(np.abs(
              r["pure"] / (r["E0"] if r.settings.form != "two" else r["E0"] ** 2) - 1).max()), Interval(high=1e-8),
              Control("E_0 squared", {"form": "two"}), paper="0", source=EXACT, places=("Thm. 1",),
              says="Thm. 1 is tight: pure noise costs E_0."),
        Claim("test error of interpolated noise over E_0, simulated designs", lambda r: float(
              r["measured"][0] / (r["E0"][0] if r.settings.form != "two" else r["E0"][0] ** 2)), Interval(0.85, 1.15),
              Control("E_0 squared", {"form": "two"}), over="seed", by="mean", own=True,
              source="independent check: within 1 % at n = 100; 600 modes here", places=("Thm. 1",)),
        Claim("largest cost over E_0, a target outside of the kernel's space and 2 to 10 examples", lambda r: float(max(
              (r["outside"] / (r["costs"].mean() if r.settings.form == "mean" else r["E0"])).max(), r["few"].max())),
              Interval(high=1 + 1e-9), Control("the mean cost as bound", {"form": "mean"}), paper="at most 1", source=EXACT,
              places=("Sec. 3",), says="The bound is agnostic: it needs no consistency and no target in the kernel's space."),
        Claim("largest excess of the lower bound over E_0, or of E_0 over the upper bound", lambda r: float(max(
              (r["low"] / (r["E0"] if r.settings.form != "n" else 1.0)).max(), (r["E0"] / r["high"]).max())),
              Interval(high=1 + 1e-9), Control("1 in the place of E_0", {"form": "n"}), paper="at most 1", source=EXACT,
              places=("Thms. 2-5",), says="Effective ranks bound E_0 from below and from above."),
        Claim("share of five spectra whose class is found", named, Interval(low=0.99),
              Control("E_0 at one size, 50 examples", {"form": "whole"}), paper="all", source="Thm. 6", places=("Thm. 6",),
              says="Thm. 6: power laws are tempered, exponential spectra catastrophic, 1 / (i log^2 i) benign."),
        Claim("largest |E_0 / alpha - 1| on power laws with 1,000 examples", limits, Interval(high=2e-3),
              Control("the spectrum cut at 2,000 modes", {"form": "cut"}), paper="E_0 -> alpha", places=("Thm. 6",),
              source="independent check: 1.1994 to 2.9985", says="On power laws i^-alpha, E_0 goes to alpha."),
        Claim("largest E_0 - 1 between integer powers of d, over the smallest at one", between, Interval(high=0.4),
              Control("integers and the others exchanged", {"form": "whole"}), paper="benign between integers",
              source="independent check: .054 over .212", places=("Inner-product kernels",),
              says="Inner-product kernels overfit benignly for n = d^l with l not an integer."),
    ))
