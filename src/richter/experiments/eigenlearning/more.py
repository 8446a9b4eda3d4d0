"""More is better [eigenlearning]: errors of kernel and random-feature regression by their spectrum, and at the best ridge;
fitting ratios of power laws."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.kernels import infinite
from richter.report.drawing import COLOURS, band, caption, label, line, panels, points, styled
from richter.tasks import cifar10
from richter.theory import eigenlearning as eigen

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Vector = NDArray[np.float64]
Form = Literal["own", "fixed", "kernel", "scaled", "zero", "noiseless"]
FIXED = 1e-3
FITS = ((1.17, 1.14), (1.22, 1.20), (1.12, 1.36), (1.5, 1.2), (2.0, 1.8))
NOISES = (0.0, 1.0, 5.0)
VEHICLES = (0, 1, 7, 8, 9)
NOISE = 0.5


@dataclass(frozen=True)
class EigenlearningMoreSettings:
    """``features``: random features. ``form`` chooses rivals."""

    n: int = 64
    modes: int = 400
    trials: int = 12
    features: tuple[float, ...] = (16, 32, 64, 128, 512, math.inf)
    images: int = 700
    train: tuple[int, ...] = (48, 96)
    widths: tuple[int, ...] = (24, 96, 384, 1536)
    splits: int = 4
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    form: Form = "own"


def work(t: Task[EigenlearningMoreSettings], run: Writer) -> Mapping[str, ArrayLike]:
    return {**gaussian(t), **images(t)}


def gaussian(t: Task[EigenlearningMoreSettings]) -> dict[str, ArrayLike]:
    """Simulated and predicted test errors over numbers of features, at the best and at a fixed ridge."""
    s, i = t.settings, np.arange(1, t.settings.modes + 1.0)
    lam, v2, out = i**-1.5, i**-1.5, dict[str, list[float]]()
    for k in s.features:
        for name, ridge in (("best", eigen.optimal_ridge(lam, v2, s.n, NOISE, k)), ("fixed", FIXED)):
            risk = eigen.random_features(lam, v2, s.n, k, ridge, NOISE)
            scaled = eigen.random_features(lam, v2, s.n, k, ridge * s.n, NOISE)
            kernel = eigen.krr(lam, v2, s.n, ridge, NOISE)
            test, train, _ = eigen.simulate(lam, v2, s.n, k, ridge, NOISE, trials=s.trials, seed=t.seed)
            for key, value in (("test", test), ("train", train), ("own", risk.test), ("scaled", scaled.test),
                               ("kernel", kernel.test)):
                out.setdefault(f"{key}_{name}", []).append(value)
    return dict(out)


def images(t: Task[EigenlearningMoreSettings]) -> dict[str, ArrayLike]:
    """Random ReLU features on photographs, vehicles against animals: a shallow network of which the last layer is trained."""
    s, draw = t.settings, np.random.default_rng((t.seed, 1))
    data = cifar10(s.images, 10, seed=t.seed, flat=True)
    x, y = data.x.double().numpy(), np.isin(data.y.numpy(), VEHICLES) - 0.5
    ridges = np.geomspace(1e-3, 1e2, 11)
    K = np.asarray(infinite.nngp(x, depth=1))
    lam, v2, _ = eigen.modes(K, y)
    seen = np.zeros((len(s.train), len(s.widths) + 1, len(ridges)))
    for _ in range(s.splits):
        order = draw.permutation(len(x))
        for a, n in enumerate(s.train):
            rows, rest = order[:n], order[n:]
            for b, k in enumerate((*s.widths, math.inf)):
                if math.isfinite(k):
                    h = np.maximum(x @ draw.standard_normal((x.shape[1], int(k))) / math.sqrt(x.shape[1]), 0) / math.sqrt(k)
                    gram = h @ h.T
                else:
                    gram = K
                values, U = np.linalg.eigh(gram[np.ix_(rows, rows)])
                across, target = gram[np.ix_(rest, rows)] @ U, U.T @ y[rows]
                for c, ridge in enumerate(ridges):
                    f = across @ (target / (np.maximum(values, 0) + ridge))
                    seen[a, b, c] += np.mean((f - y[rest]) ** 2) / s.splits / 0.25
    told = [[[eigen.unseen(eigen.random_features(lam, v2, n, k, ridge), n, len(x)) / 0.25 for ridge in ridges]
             for k in (*s.widths, math.inf)] for n in s.train]
    return {"images": seen, "images_told": told}


# ------------------------------------------------------------------------------------------------ claims


def form(r: Results) -> str:
    return "fixed" if r.settings.form == "fixed" else "best"


def grid(r: Results) -> float:
    """Largest ratio of the error at a larger n or k to that before, by theory."""
    i, sizes = np.arange(1, 401.0), (16, 32, 64, 128, 256)
    lam, v2 = i**-1.5, i**-1.5
    table = np.array([[eigen.random_features(lam, v2, n, k, FIXED if form(r) == "fixed" else eigen.optimal_ridge(
        lam, v2, n, NOISE, k), NOISE).test for k in (*sizes, math.inf)] for n in sizes])
    return float(max((table[1:] / table[:-1]).max(), (table[:, 1:] / table[:, :-1]).max()))


def simulated(r: Results) -> float:
    """Largest |predicted / simulated - 1| over k, the simulation averaged over seeds."""
    name = r.settings.form if r.settings.form in ("scaled", "kernel") else "own"
    return float(np.abs(r[f"{name}_best"][0] / r["test_best"].mean(0) - 1).max())


def falling(r: Results) -> float:
    """Simulated error at the largest k over the smallest of all finite k."""
    test = r[f"test_{form(r)}"].mean(0)
    return float((test[1:] / test[:-1]).max())


def infinite_over_finite(r: Results) -> float:
    test = r["test_best"].mean(0)
    return float(test[2] / test[:-1].min() if r.settings.form == "kernel" else test[-1] / test[:-1].min())


def peak(r: Results) -> float:
    test = r["test_best" if r.settings.form == "zero" else "test_fixed"].mean(0)
    return float(test[r.settings.features.index(r.settings.n)] / test[-1])


def on_images(r: Results) -> float:
    """Largest ratio of the error at a larger n or k to that before, at the best ridge of each (or the smallest ridge)."""
    table = r["images"].mean(0)
    best = table[..., 0] if form(r) == "fixed" else table.min(2)
    return float(max((best[1:] / best[:-1]).max(), (best[:, 1:] / best[:, :-1]).max()))


def told(r: Results) -> float:
    """Median over n and k of |predicted / measured - 1| on images, at the smallest ridge, where k matters most."""
    guess = r["images_told"].mean(0)
    if r.settings.form == "kernel":
        guess = np.broadcast_to(guess[:, -1:], guess.shape)
    return float(np.median(np.abs(guess / r["images"].mean(0) - 1)[:, :-1, 0]))


def root(r: Results) -> float:
    """Largest |root - fitting ratio of the numerical optimum| over exponents and noises."""
    errors = []
    for alpha, beta in FITS:
        lam, v2, count = eigen.power_law(alpha, beta)
        base = eigen.krr(lam, v2, 2000, 0.0, multiplicity=count).test
        for noise in NOISES:
            ridge = eigen.optimal_ridge(lam, v2, 2000, noise * base, multiplicity=count)
            seen = eigen.krr(lam, v2, 2000, ridge, noise * base, multiplicity=count).fitting_ratio
            guess = {"zero": 0.0, "noiseless": eigen.fitting_ratio(alpha, beta)}.get(r.settings.form)
            errors.append(abs((eigen.fitting_ratio(alpha, beta, noise) if guess is None else guess) - seen))
    return max(errors)


def parabola(r: Results) -> float:
    """Smallest excess of the error over its bound 1 + C (sqrt R - sqrt R*)^2, C = (1 - 1 / alpha)^2."""
    least = math.inf
    R = np.linspace(0, 0.99, 100) ** 2
    for alpha in np.linspace(1.05, 3, 12):
        for beta in np.linspace(1.02, 2 * alpha + 0.9, 12):
            for noise in NOISES:
                best = eigen.fitting_ratio(alpha, beta, noise)
                errors, least_error = (np.asarray(eigen.risk_at_ratio(v, 1000, alpha, beta, noise)) for v in (R, [best]))
                ratio = errors / least_error
                C = (1 - 1 / alpha) ** 2 * (6 if r.settings.form == "scaled" else 1)
                least = min(least, float((ratio - 1 - C * (np.sqrt(R) - math.sqrt(best)) ** 2).min()))
    return least


def threshold(r: Results) -> float:
    """Share of power laws on which interpolation is numerically the best exactly if the corollary says so."""
    right = []
    for alpha, beta in FITS:
        lam, v2, count = eigen.power_law(alpha, beta)
        base = eigen.krr(lam, v2, 2000, 0.0, multiplicity=count).test
        for noise in (0.0, 0.5, 3.0):
            best = eigen.optimal_ridge(lam, v2, 2000, noise * base, multiplicity=count) == 0
            guess = noise == 0 if r.settings.form == "zero" else eigen.interpolation_is_optimal(alpha, beta, noise)
            right.append(best == guess)
    return float(np.mean(right))


# ------------------------------------------------------------------------------------------------ drawings


@styled
def draw_features(results: Results) -> Figure:
    figure, (left, right) = panels(2, across=2)
    k = [4 * results.settings.features[-2] if math.isinf(v) else v for v in results.settings.features]
    for colour, name, text in ((COLOURS[0], "best", "best ridge"), (COLOURS[1], "fixed", "ridge .001")):
        points(left, k, results[f"test_{name}"], colour, f"simulated, {text}")
        line(left, k, results[f"own_{name}"][0], colour, "predicted")
    label(left, "features k (last: infinity)", "test error", "Gaussian", log="xy", legend=True)
    widths = [*results.settings.widths, 4 * results.settings.widths[-1]]
    for a, n in enumerate(results.settings.train):
        band(right, widths, results["images"][:, a].min(-1), COLOURS[a], f"measured, n = {n}")
        line(right, widths, results["images_told"].mean(0)[a].min(-1), COLOURS[a], "predicted", "--")
    label(right, "hidden units (last: infinity)", "test error / variance", "CIFAR-10, best ridge", log="x", legend=True)
    caption(figure, "At the best ridge more features always help. At a fixed ridge the error peaks where k = n.")
    return figure


@styled
def draw_ratio(results: Results) -> Figure:
    figure, (ax,) = panels(1, across=1)
    noise = np.geomspace(0.01, 30, 60)
    for colour, (alpha, beta) in zip(COLOURS, FITS, strict=False):
        line(ax, noise, [eigen.fitting_ratio(alpha, beta, float(s)) for s in noise], colour, f"alpha {alpha}, beta {beta}")
    label(ax, "relative noise", "best train error / test error", log="x", legend=True)
    caption(figure, "With little noise it is best to interpolate; the more noise, the larger the best train error.")
    return figure


THEORY = "a theorem, and an independent check"
FIX = Control("a fixed ridge", {"form": "fixed"})
EXPERIMENT = Experiment(
    name="eigenlearning_more", ref=Ref("eigenlearning", "Thm. 1"), title="more examples and features help at the best ridge",
    places=("Sec. 2, 3", "Thm. 1", "Thm. 2", "Cor. 1"), data=("cifar10",), smoke=EigenlearningMoreSettings(),
    paper=EigenlearningMoreSettings(n=256, modes=2000, features=(16, 64, 128, 256, 512, 2048, math.inf), images=2000,
                                    train=(64, 256), widths=(64, 256, 1024, 4096)),
    work=work, over=("seed",), analysis=("form",), reduced="64 examples of 400 modes; 700 images of CIFAR-10",
    start={"seeds": (0,), "trials": 1, "modes": 300, "splits": 1, "images": 300, "widths": (16, 32)},
    figures={"eigenlearning_thm_1": draw_features, "eigenlearning_thm_2": draw_ratio},
    protocol={"Sec. 2, 3": "reduced: 2,000 modes of 10,000", "Thm. 1": "reduced: 2,000 images", "Thm. 2": "exact",
              "Cor. 1": "exact"},
    claims=(
        Claim("largest |predicted / simulated test error - 1| at the best ridge, over numbers of features", simulated,
              Interval(high=0.05), (Control("the ridge times n", {"form": "scaled"}), Control("the kernel in place of features",
              {"form": "kernel"})), paper="agree", source="independent check: 5 % with 60 trials", places=("Sec. 2, 3",),
              says="Two equations give the error of random-feature regression from the spectrum."),
        Claim("largest error with more examples or features over that with fewer, theory at the best ridge", grid,
              Interval(high=0.9999), FIX, paper="below 1", source=THEORY, places=("Thm. 1",),
              says="Thm. 1: at the best ridge the test error falls with more examples and more features."),
        Claim("largest simulated error with more features over that with fewer, best ridge", falling, Interval(high=1.0), FIX,
              paper="below 1", source=THEORY, places=("Thm. 1",),
              says="Thm. 1: at the best ridge the test error falls with more features."),
        Claim("simulated error of infinitely many features over the best finite number", infinite_over_finite,
              Interval(high=1.0), Control("as many features as examples", {"form": "kernel"}), paper="below 1", source=THEORY,
              places=("Thm. 1",), says="Thm. 1: infinitely many features are best."),
        Claim("simulated error at k = n over that of infinite k, at a ridge of .001", peak, Interval(low=1.5),
              Control("the best ridge", {"form": "zero"}), paper="a peak", source="independent check: 4.82 over 1.02",
              places=("Thm. 1",), says="At a fixed small ridge the error has a peak at k = n (double descent)."),
        Claim("images: largest error with more examples or hidden units over that with fewer, best ridge", on_images,
              Interval(high=1.0), FIX, paper="below 1", source=THEORY, places=("Thm. 1",),
              says="More random ReLU features and more images help on CIFAR-10 at the best ridge."),
        Claim("images: median |predicted / measured error - 1| at a ridge of .001, last layer of a shallow network", told,
              Interval(high=0.1), Control("the infinite network for all widths", {"form": "kernel"}), own=True,
              source="10 %, as for kernels on digits", places=("Sec. 2, 3",)),
        Claim("largest |root - fitting ratio of the numerical optimum|", root, Interval(high=1e-3),
              (Control("zero", {"form": "zero"}), Control("the root without noise", {"form": "noiseless"})), paper="equal",
              source="independent check", places=("Thm. 2",),
              says="Thm. 2: the best train error over test error in closed form."),
        Claim("smallest excess of the error over 1 + C (sqrt R - sqrt R*)^2", parabola, Interval(low=-1e-9),
              Control("six times C", {"form": "scaled"}), paper="at least 0", source="independent check on a grid",
              places=("Thm. 2",), says="Thm. 2: away from the best ratio the error grows at least quadratically."),
        Claim("share of power laws on which the threshold says when interpolation is best", threshold, Interval(low=0.999),
              Control("only without noise", {"form": "zero"}), paper="all", source="independent check", places=("Cor. 1",),
              says="Cor. 1: interpolation is optimal iff the noise is at most (beta - alpha) / (alpha (alpha - 1))."),
    ))
