"""Figs 1.1 to 1.5 of [layerwise]: diagonalised features, inductive bias by intensity, benign and malignant overfitting; with Eqs
1.26 and 1.36 and the two phases of Sec. 1.6.1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, band, caption, label, line, panels, points, styled
from richter.theory.linear_models import SineModel, diagonalise, learnability, learned, noise_time, simulate_flow, spiked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Vector = NDArray[np.float64]
Form = Literal["own", "text", "one", "flat", "ridge"]
TIMES = np.geomspace(0.1, 3000, 40)
GRID = np.linspace(0, 1, 801)


@dataclass(frozen=True)
class LayerwiseFig1_3Settings:
    """``form`` chooses the wrong form of a statement in controls."""

    d: int = 5
    n: int = 100
    p: int = 2000
    noise: float = 0.3
    draws: int = 100
    seeds: tuple[int, ...] = tuple(range(10))
    form: Form = "own"


def work(t: Task[LayerwiseFig1_3Settings], run: Writer) -> Mapping[str, ArrayLike]:
    return {**diagonal(t), **bias(t), **overfitting(t), **spikes(t)}


def diagonal(t: Task[LayerwiseFig1_3Settings]) -> dict[str, ArrayLike]:
    """Fig. 1.1 and Eq. 1.26: intensities of the text's case, and modes under gradient flow with and without their own rates."""
    draw = np.random.default_rng((t.seed, 1))
    S = np.array([[1.5, 0.5], [0.5, 1.5]])
    sample = draw.standard_normal((20_000, 2)) @ np.linalg.cholesky(S).T
    features = diagonalise(sample)
    A = draw.standard_normal((4, 4))
    covariance, w = A @ A.T / 4 + 0.1 * np.eye(4), draw.standard_normal(4)
    rho, U = np.linalg.eigh(covariance)
    times = np.array([0.5, 2.0, 8.0])
    flow = U.T @ np.asarray(simulate_flow(covariance, w, times))  # weights along the eigenvectors
    modes = {name: np.asarray(learned(r, U.T @ w, times)) for name, r in (("own", rho), ("flat", np.full(4, rho.mean())))}
    return {"intensity": features.intensity, "raw": (sample**2).mean(0),
            **{f"modes_{name}": np.abs(v - flow).max() / np.abs(w).max() for name, v in modes.items()}}


def bias(t: Task[LayerwiseFig1_3Settings]) -> dict[str, ArrayLike]:
    """Fig. 1.2: four points fitted by ten sines of falling and of rising intensity; the mean frequency of what is learned."""
    draw, k = np.random.default_rng((t.seed, 2)), np.arange(1, 11.0)
    x, y = draw.random(4), draw.standard_normal(4)
    fits = [np.asarray(SineModel(k ** (2 * alpha)).fit(x, y)) for alpha in (-4, 4)]
    return {"frequency": [float(k @ c**2 / (c @ c)) for c in fits], "fits": fits, "four_x": x, "four_y": y}


def overfitting(t: Task[LayerwiseFig1_3Settings]) -> dict[str, ArrayLike]:
    """Figs 1.3, 1.5, Eq. 1.36 and the phases, with the text's intensities of the tail and with small ones."""
    s, out, v = t.settings, dict[str, ArrayLike](), np.zeros(t.settings.p)
    for name, tail in (("text", s.n / (s.p - s.d)), ("own", 1 / (s.p - s.d))):
        draw = np.random.default_rng((t.seed, 3))
        rho = spiked(s.d, s.p, tail)
        model, x, noise = SineModel(rho), draw.random(s.n), s.noise * draw.standard_normal(s.n)
        errors = []
        for mode in (1, 10):
            target = v.copy()
            target[mode - 1] = math.sqrt(0.5)
            y = np.asarray(model(target, x)) + noise
            fit = np.asarray(model.fit(x, y))
            errors.append(model.error(fit, target))
            out |= {f"gap_{mode}_{name}": np.abs(np.asarray(model(fit, x)) - y).max(), f"fit_{mode}_{name}": model(fit, GRID),
                    f"first_{mode}_{name}": model(np.where(np.arange(s.p) < s.d, fit, 0), GRID)}
            if mode == 1:
                fits = [np.asarray(model(model.fit(x, y, T), x)) for T in TIMES]
                out[f"left_{name}"] = left = np.array([np.mean((f - y) ** 2) for f in fits])
                half = s.noise**2 / 2  # the signal is gone; half of the noise is left
                out[f"half_{name}"] = np.exp(np.interp(-np.log(half), -np.log(left), np.log(TIMES)))
        L, kappa = learnability(rho, s.n)
        out |= {f"errors_{name}": errors, f"head_{name}": L[0], f"kappa_{name}": kappa, f"simulated_{name}": heads(t, rho),
                f"time_{name}": math.log(2) / 2 * noise_time(rho, s.d, s.n)}
    return out


def heads(t: Task[LayerwiseFig1_3Settings], rho: Vector) -> float:
    """Mean share of the preferred coefficients that interpolations learn, over Gaussian eigenfunctions."""
    s, draw, shares = t.settings, np.random.default_rng((t.seed, 4)), []
    for _ in range(max(1, s.draws // 10)):
        e = draw.standard_normal((s.n, s.p))
        inverse = np.linalg.inv((e * rho) @ e.T)
        shares.append(np.einsum("nk,nm,mk->k", e[:, : s.d], inverse, e[:, : s.d]) * rho[: s.d])
    return float(np.mean(shares))


def spikes(t: Task[LayerwiseFig1_3Settings]) -> dict[str, ArrayLike]:
    """Fig. 1.4: the squared norm of fits of 50 random labels by ever more sines."""
    draw = np.random.default_rng((t.seed, 5))
    x, y = draw.random(50), draw.standard_normal(50)
    return {"norms": [float(np.sum(np.square(SineModel(np.ones(p)).fit(x, y)))) for p in (100, 400, 2000)]}


# ------------------------------------------------------------------------------------------------ claims


def name_of(r: Results) -> str:
    return "text" if r.settings.form == "text" else "own"


def intensities(r: Results) -> float:
    """Largest error of the intensities of the text's case."""
    seen = r["raw" if r.settings.form == "one" else "intensity"]
    return float(np.abs(seen - [2, 1]).max())


def frequency(r: Results) -> float:
    falling, rising = r["frequency"][0]
    return float(falling / rising if r.settings.form == "one" else rising / falling)


def error(mode: int) -> Callable[[Results], float]:
    def value(r: Results) -> float:
        other = {1: 10, 10: 1}[mode] if r.settings.form == "one" else mode
        return float(r[f"errors_{name_of(r)}"][0][0 if other == 1 else 1])
    return value


@styled
def draw_diagonal(results: Results) -> Figure:
    figure, (ax,) = panels(1, across=1)
    points(ax, [1, 2], results["intensity"], COLOURS[0], "diagonalised")
    points(ax, [1.1, 2.1], results["raw"], COLOURS[1], "as given", "s")
    line(ax, [1, 2], [2, 1], label="eigenvalues of the covariance")
    label(ax, "feature", "intensity", legend=True)
    caption(figure, "Two features of equal size that overlap become orthogonal ones with the intensities 2 and 1.")
    return figure


@styled
def draw_bias(results: Results) -> Figure:
    figure, (ax,) = panels(1, across=1)
    r, k = results.where(seed=results.distinct("seed")[0]), np.arange(1, 11)
    for colour, c, name in zip(COLOURS, r["fits"][0], ("falling", "rising"), strict=False):
        line(ax, GRID, math.sqrt(2) * np.sin(2 * np.pi * np.outer(GRID, k)) @ c, colour, f"{name} intensities")
    points(ax, r["four_x"][0], r["four_y"][0], "#222222", "examples")
    label(ax, "x", "f(x)", legend=True)
    caption(figure, "The same functions with opposite intensities fit four points by low or by high frequencies.")
    return figure


def drawing(mode: int, sentence: str) -> Callable[[Results], Figure]:
    @styled
    def draw(results: Results) -> Figure:
        figure, (ax,) = panels(1, across=1)
        r = results.where(seed=results.distinct("seed")[0])
        line(ax, GRID, np.sin(2 * np.pi * mode * GRID), label="target")
        line(ax, GRID, r[f"fit_{mode}_own"][0], COLOURS[0], "interpolation")
        line(ax, GRID, r[f"first_{mode}_own"][0], COLOURS[1], "its first d features", "--")
        label(ax, "x", "f(x)", legend=True)
        caption(figure, sentence)
        return figure
    return draw


@styled
def draw_spikes(results: Results) -> Figure:
    figure, (ax,) = panels(1, across=1)
    band(ax, [100, 400, 2000], results["norms"])
    label(ax, "features p", "squared norm of the fit", log="xy")
    caption(figure, "The more sines fit 50 random labels, the sharper and the smaller the fitted function.")
    return figure


@styled
def draw_phases(results: Results) -> Figure:
    figure, (ax,) = panels(1, across=1)
    for colour, name, text in ((COLOURS[0], "own", "tail 1 / (p - d)"), (COLOURS[1], "text", "tail n / (p - d), the text's")):
        band(ax, TIMES, results[f"left_{name}"], colour, text)
    label(ax, "time", "training error", log="xy", legend=True)
    caption(figure, "With a small tail the signal is fitted at a time of 1, the noise at n. With the text's there is one phase.")
    return figure


TEXT, ONE = Control("the text's intensities n / (p - d) of the tail", {"form": "text"}), {"form": "one"}
PLACES = ("Fig. 1.1", "Fig. 1.2", "Fig. 1.3", "Fig. 1.4", "Fig. 1.5", "Eq. 1.26", "Eq. 1.36", "Sec. 1.6.1")
BENIGN = "After training, the function interpolates noisy examples and still follows the target between them."
MALIGNANT = "A target that the preferred features cannot express is missed, although every example is fitted."
CHECK = "independent check, ten seeds"
EXPERIMENT = Experiment(
    name="layerwise_fig1_3", ref=Ref("layerwise", "Fig. 1.3"), title="what linear models prefer, and what they fit last",
    places=PLACES, smoke=LayerwiseFig1_3Settings(draws=10), paper=LayerwiseFig1_3Settings(), work=work, over=("seed",),
    analysis=("form",), start={"seeds": (0,), "draws": 1, "p": 200},
    figures={"layerwise_fig1_1": draw_diagonal, "layerwise_fig1_2": draw_bias, "layerwise_fig1_3": drawing(1, BENIGN),
             "layerwise_fig1_4": draw_spikes, "layerwise_fig1_5": drawing(10, MALIGNANT), "layerwise_sec_1_6_1": draw_phases},
    protocol={"Fig. 1.1": "exact", "Eq. 1.26": "exact", "Fig. 1.2": "unstated: the four points", "Eq. 1.36": "exact",
              "Fig. 1.3": "unstated: the noise (here 0.3), and a tail of 1 / (p - d)", "Fig. 1.4": "unstated: the inputs",
              "Fig. 1.5": "unstated: the noise (here 0.3), and a tail of 1 / (p - d)",
              "Sec. 1.6.1": "unstated: the noise (here 0.3)"},
    claims=(
        Claim("largest error of the intensities of the text's two features", intensities, Interval(high=0.06),
              Control("second moments of the features as given", ONE), over="seed", paper="2 and 1",
              source="eigenvalues of the covariance; sampling error of 20,000 draws", places=("Fig. 1.1",),
              says="Sec. 1.5.3: features of covariance [[1.5, 0.5], [0.5, 1.5]] have the intensities 2 and 1."),
        Claim("mean frequency learned with rising over that with falling intensities", frequency, Interval(low=1.3),
              Control("the two models exchanged", ONE), over="seed", paper="higher", places=("Fig. 1.2",),
              source="independent check: 7.05 over 2.69", says="Fig. 1.2: models fit by the frequencies of large intensity."),
        Claim("error of the interpolation, target among the preferred features", error(1), Interval(high=0.05),
              (Control("a target among the others", ONE), TEXT), over="seed", paper="closely resembles the target",
              source=CHECK, places=("Fig. 1.3",),
              says="Fig. 1.3: the interpolation of noisy labels closely resembles the target."),
        Claim("norm of the fit with 2,000 sines over that with 400", lambda r: float(
              r["norms"][0][2 if r.settings.form != "one" else 0] / r["norms"][0][1]), Interval(high=0.2),
              Control("100 sines over 400", ONE), over="seed", paper="sharper with more features", source=f"{CHECK}: .081 / 8.3",
              places=("Fig. 1.4",), says="Fig. 1.4: with more features the fit of random labels becomes a sum of narrow spikes."),
        Claim("error of the interpolation, target among the other features", error(10), Interval(0.45, 0.7),
              Control("a target among the preferred", ONE), over="seed", paper="differs from the target", source=CHECK,
              places=("Fig. 1.5",), says="Fig. 1.5: the interpolation misses a target that is not among preferred features."),
        Claim("largest error of modes under gradient flow, over the weights", lambda r: float(
              r["modes_flat" if r.settings.form == "flat" else "modes_own"].max()), Interval(high=1e-8),
              Control("one rate for all modes", {"form": "flat"}), paper="exact", source="an identity", places=("Eq. 1.26",),
              says="Eq. 1.26: gradient flow learns each diagonalised feature alone, at the rate rho_k."),
        Claim("learnability of the preferred features, in simulation", lambda r: float(r[f"simulated_{name_of(r)}"].mean()),
              Interval(low=0.95), TEXT, paper="about 1, with a tail of n / (p - d)",
              source="Eq. 1.35: 0.990 with a tail of 1 / (p - d), and 0.506 with the text's", places=("Eq. 1.36",),
              says="Eq. 1.36: with tail intensities n / (p - d) the first d features have a learnability of about 1 (corrected: "
                   "1 / (p - d)).", reason="misprint"),
        Claim("largest |simulated - predicted learnability| of the preferred features", lambda r: float(max(
              abs(r[f"simulated_{name}"].mean() - (1.0 if r.settings.form == "one" else r[f"head_{name}"][0]))
              for name in ("own", "text"))), Interval(high=0.05), Control("1 for both tails", ONE), paper="Eq. 1.35",
              source="finite size, as in the independent check", places=("Eq. 1.36",),
              says="Eq. 1.35: the learnability is rho / (rho + kappa), and sums to the number of examples."),
        Claim("time at which half of the noise is fitted, over log(2)/2 n / sum of tail intensities", lambda r: float(
              r["half_own"][0] / (math.log(2) / 2 if r.settings.form == "one" else r["time_own"][0])), Interval(0.6, 1.6),
              Control("the time 1 of the signal", ONE), over="seed", paper="(p - d) / n", own=True,
              source="Gram matrix of the tail", places=("Sec. 1.6.1",)),
        Claim("time at which half of the noise is fitted with the text's tail, over (p - d) / n", lambda r: float(
              r["half_text"][0] / ((r.settings.p - r.settings.d) / r.settings.n if r.settings.form != "one" else r.settings.n)),
              Interval(0.3, 3), Control("a time of n", ONE), over="seed", paper="1",
              source="Sec. 1.6.1: signal for times well below (p - d) / n, noise later", places=("Sec. 1.6.1",),
              second="theory.linear_models.noise_time: n examples see the sum of the tail, (p - d) rho / n = 1",
              differs="(p - d) / n is the time of one mode on endless data; n examples see the sum of the tail's "
                      "intensities, and fit the noise at a time of 1, with the signal. A tail of 1 / (p - d) has two phases",
              says="Sec. 1.6.1: the signal is fitted at times between 1 and (p - d) / n, the noise later."),
    ))
