"""Convolutional tangent kernels on images [eigenlearning]: exponents of their spectra, and the train error at the best ridge;
and the cost of fitting labels with noise [overfitting]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike

from richter import tasks
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Scale, Task, Writer
from richter.kernels import infinite
from richter.report.drawing import COLOURS, band, caption, label, panels, styled
from richter.theory import eigenlearning as eigen
from richter.theory import overfitting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Form = Literal["own", "noisy", "text", "one"]
RIDGES = np.r_[1e-9, np.geomspace(1e-5, 10, 25)]
NOISE = 0.3  # share of labels that are replaced at random


@dataclass(frozen=True)
class EigenlearningImagesSettings:
    """``pixels``: height and width after averaging. ``pool``: whether the read-out takes the mean over pixels. ``form`` chooses
    rivals."""

    sets: tuple[str, ...] = ("mnist", "cifar10")
    examples: int = 240
    pixels: int = 8
    pool: bool = True
    depth: int = 3
    splits: int = 4
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    form: Form = "own"


def work(t: Task[EigenlearningImagesSettings], run: Writer) -> Mapping[str, ArrayLike]:
    s, draw = t.settings, np.random.default_rng((t.seed, 1))
    data = {"mnist": tasks.mnist, "cifar10": tasks.cifar10}[t.set](s.examples, 10, seed=t.seed)
    x = F.adaptive_avg_pool2d(data.x.double(), s.pixels)
    K = infinite.convolutional(x, depth=s.depth, weight_var=2.0, pool=s.pool)
    K = torch.as_tensor(K) / torch.as_tensor(K).diagonal().mean()
    noisy = torch.where(torch.from_numpy(draw.random(len(x)) < NOISE), torch.from_numpy(draw.integers(0, 10, len(x))), data.y)
    out: dict[str, ArrayLike] = {}
    for name, ids in (("own", data.y), ("noisy", noisy)):
        y = torch.eye(10, dtype=torch.float64)[ids] - 0.1
        fits = eigen.exponents(K, y, trials=3, seed=t.seed)
        train, test = ridge_curve(K, y, s.splits, draw)
        lam, v2, _ = eigen.modes(K, y)
        n, M = len(K) // 4, len(K)
        best = eigen.optimal_ridge(lam, v2, n, population=M)
        told = [eigen.unseen(eigen.krr(lam, v2, n, min(ridge, 1e6)), n, M) for ridge in (1e-9, best)]
        out |= {f"alpha_{name}": fits.alpha, f"beta_{name}": fits.beta, f"train_{name}": train, f"test_{name}": test,
                f"cost_told_{name}": told[0] / told[1], f"E0_{name}": overfitting.bound(np.asarray(lam), n)}
    return out


def ridge_curve(K: torch.Tensor, y: torch.Tensor, splits: int, draw: np.random.Generator
                ) -> tuple[np.ndarray, np.ndarray]:
    """Return train and test errors at all ridges, from a quarter of the examples."""
    n, train, test = len(K) // 4, np.zeros(len(RIDGES)), np.zeros(len(RIDGES))
    for _ in range(splits):
        rows, rest = torch.from_numpy(draw.permutation(len(K))).split([n, len(K) - n])
        values, U = torch.linalg.eigh(K[rows][:, rows])
        for i, ridge in enumerate(RIDGES):
            A = U @ ((U.T @ y[rows]) / (values.clamp(min=0)[:, None] + ridge))
            test[i] += (K[rest][:, rows] @ A - y[rest]).square().sum(1).mean().item() / splits
            train[i] += (K[rows][:, rows] @ A - y[rows]).square().sum(1).mean().item() / splits
    return train, test


# ------------------------------------------------------------------------------------------------ claims


def ratio(name: str) -> Callable[[Results], float]:
    """Train error over test error at the best ridge."""
    def value(r: Results) -> float:
        r, kind = r.where(set=name), "noisy" if r.settings.form == "noisy" else "own"
        best = r[f"test_{kind}"][0].argmin()
        return float(r[f"train_{kind}"][0, best] / r[f"test_{kind}"][0, best])
    return value


def gain(name: str) -> Callable[[Results], float]:
    """Ridgeless test error over that at the best ridge."""
    def value(r: Results) -> float:
        test = r.where(set=name)["test_noisy" if r.settings.form == "noisy" else "test_own"][0]
        return float(test[0] / test.min())
    return value


def cost(r: Results) -> float:
    """Largest |log(predicted / measured cost)| with noisy labels, over data sets."""
    test = r["test_noisy"]
    told = r["cost_told_noisy"] if r.settings.form == "own" else r["E0_noisy"] if r.settings.form == "text" else 1.0
    return float(np.abs(np.log(told / (test[:, 0] / test.min(1)))).max())




@styled
def draw(results: Results) -> Figure:
    sets = results.settings.sets
    figure, axes = panels(len(sets), across=2)
    for ax, name in zip(axes, sets, strict=True):
        r = results.where(set=name)
        for colour, kind in zip(COLOURS, ("own", "noisy"), strict=False):
            band(ax, r[f"train_{kind}"].mean(0) / r[f"test_{kind}"].mean(0), r[f"test_{kind}"] / 0.9, colour,
                 "labels" if kind == "own" else "30 % random labels")
        label(ax, "train error / test error", "test error / variance", name, legend=True)
    caption(figure, "On images the best train error is far below the test error; with random labels it is not.")
    return figure


NOISY = Control("30 % random labels", {"form": "noisy"})
CASES: tuple[tuple[str, str, dict[Scale, str]], ...] = (
    ("mnist", "MNIST", {}),
    ("cifar10", "CIFAR-10", {"smoke": "nothing is learned from 40 photographs of 6 x 6 pixels (test error 1.0 of the variance), "
                                      "so that the labels act like noise"}))
EXPERIMENT = Experiment(
    name="eigenlearning_images", ref=Ref("eigenlearning", "Sec. 5"), title="how well to fit images",
    data=("mnist", "cifar10"), smoke=EigenlearningImagesSettings(pixels=6, examples=160),
    paper=EigenlearningImagesSettings(examples=1000, pixels=32, pool=False, splits=10), work=work, over=("set", "seed"),
    analysis=("form",), start={"seeds": (0,), "examples": 60, "pixels": 4, "splits": 1},
    figures={"eigenlearning_sec_5": draw},
    protocol="reduced: three convolutions, 240 images of 8 x 8 pooled or 1,000 of 32 x 32 flattened; SVHN is not run",
    reduced="images of 6 x 6 pixels",
    claims=(
        *(Claim(f"{title}: train error over test error at the best ridge", ratio(name), Interval(high=0.25), NOISY,
                over="seed", paper="far below 1", source="fitting ratios of .024, .006 and 0 by the published exponents",
                differs=few, says="On image tasks convolutional tangent kernels do best with a train error far below the "
                "test error.") for name, title, few in CASES),
        *(Claim(f"{title}: ridgeless test error over that at the best ridge", gain(name), Interval(high=1.1), NOISY,
                over="seed", paper="close to 1", source="fitting ratios near 0", differs=few,
                says="On image tasks interpolation is close to optimal.") for name, title, few in CASES),
        Claim("largest |log(predicted / measured cost of overfitting)|, 30 % random labels", cost, Interval(high=0.18),
              (Control("no cost", {"form": "one"}), Control("E_0", {"form": "text"})), over="seed", own=True,
              source="20 %, twice what a prediction of one error has"),
    ))
