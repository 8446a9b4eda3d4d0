"""Predicted and measured learning curves of kernels on images [eigenlearning]: kernels of infinite networks, a Laplace kernel,
and tangent kernels of a network before and after training, on examples that it was not trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from richter import kernels, tasks
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.kernels import infinite
from richter.learners import Laplace
from richter.models import mlp
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.theory import eigenlearning as eigen

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Form = Literal["own", "law", "first"]
KERNELS = ("laplace", "nngp", "ntk", "untrained", "trained")
CLASSES = 10


@dataclass(frozen=True)
class EigenlearningCurvesSettings:
    """``population``: all examples of a kernel; ``sizes``: how many are drawn. ``form`` chooses rivals."""

    sets: tuple[str, ...] = ("digits", "mnist", "fashion_mnist", "cifar10")
    population: int = 1000
    sizes: tuple[int, ...] = (16, 32, 64, 128, 256)
    trials: int = 3
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    form: Form = "own"


def work(t: Task[EigenlearningCurvesSettings], run: Writer) -> Mapping[str, ArrayLike]:
    s, out = t.settings, dict[str, list[Any]]()
    x, ids = examples(t.set, s.population + 500, t.seed)
    model = mlp([x.shape[1], 128, CLASSES], seed=t.seed).double()
    trained = fitted(model, x[s.population:], ids[s.population:])
    x, ids = x[: s.population], ids[: s.population]
    y = torch.eye(CLASSES, dtype=torch.float64)[ids] - 1 / CLASSES
    for name in KERNELS:
        K = kernel(name, x, model, trained)
        for key, value in curve(K / K.diagonal().mean(), y, s, np.random.default_rng((t.seed, 7))).items():
            out.setdefault(key, []).append(value)
    return dict(out)


def examples(name: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return n flat images, standardised, and their classes."""
    if name == "digits":
        data = tasks.digits(seed=seed)
        x, ids = torch.cat([data.x, data.x_test]), torch.cat([data.y, data.y_test])
        return x[:n].double(), ids[:n]
    load = {"mnist": tasks.mnist, "fashion_mnist": tasks.fashion_mnist, "cifar10": tasks.cifar10}[name]
    data = load(n, 10, seed=seed, flat=True)
    return data.x.double(), data.y


def fitted(model: torch.nn.Module, x: Tensor, ids: Tensor, steps: int = 150) -> torch.nn.Module:
    """Return a copy of the network after a short training on these examples."""
    import copy
    model = copy.deepcopy(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(x), ids)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


def kernel(name: str, x: Tensor, model: torch.nn.Module, trained: torch.nn.Module) -> Tensor:
    if name == "laplace":
        return torch.as_tensor(Laplace().fitted(x)(x))
    if name in ("nngp", "ntk"):
        return torch.as_tensor(getattr(infinite, name)(x, depth=2, weight_var=2.0, bias_var=0.1))
    return torch.as_tensor(kernels.ntk(model if name == "untrained" else trained, x)).double() / CLASSES


def curve(K: Tensor, y: Tensor, s: EigenlearningCurvesSettings, draw: np.random.Generator) -> dict[str, NDArray[np.float64]]:
    """Return predicted and measured errors [ridges, sizes] at ridge 0 and at the best ridge."""
    M, spectrum = len(K), eigen.modes(K, y)
    told, seen = np.zeros((2, len(s.sizes))), np.zeros((2, len(s.sizes)))
    for j, n in enumerate(s.sizes):
        best = min(eigen.optimal_ridge(*spectrum[:2], n, population=M), 1e6)
        for i, ridge in enumerate((1e-8, max(best, 1e-8))):
            told[i, j] = eigen.unseen(eigen.krr(*spectrum[:2], n, ridge), n, M)
            for _ in range(s.trials):
                rows, rest = torch.from_numpy(draw.permutation(M)).split([n, M - n])
                L = torch.linalg.cholesky(K[rows][:, rows] + ridge * torch.eye(n, dtype=torch.float64))
                f = K[rest][:, rows] @ torch.cholesky_solve(y[rows], L)
                seen[i, j] += (f - y[rest]).square().sum(1).mean().item() / s.trials
    return {"told": told / 0.9, "seen": seen / 0.9}


# ------------------------------------------------------------------------------------------------ claims


def errors(r: Results, ridge: int) -> NDArray[np.float64]:
    """|log(predicted / measured)| over sets, kernels and sizes of 128 and more; or of a power law fitted to the first sizes."""
    sizes = np.array(r.settings.sizes)
    late, early = sizes >= 128, sizes < 128
    seen, told = r["seen"][:, :, ridge], r["told"][:, :, ridge]
    if r.settings.form == "law":
        x = np.log(sizes)
        told = np.exp([[np.polyval(np.polyfit(x[early], np.log(c[early]), 1), x) for c in task] for task in seen])
    elif r.settings.form == "first":
        told = np.repeat(seen[:, :, [early.sum() - 1]], len(sizes), 2)
    return np.abs(np.log(told / seen))[:, :, late]


def share(ridge: int) -> Any:
    def value(r: Results) -> float:
        return float(np.mean(errors(r, ridge) < np.log(1.1)))
    return value


def median(ridge: int) -> Any:
    def value(r: Results) -> float:
        return float(np.median(errors(r, ridge)))
    return value


def against(r: Results) -> float:
    """Median error of the prediction over that of the power law."""
    law = replace(r.settings, form="law")
    return float(np.median(errors(r, 0)) / np.median(errors(Results(law, r.tasks, [values for _, values in r]), 0)))


@styled
def draw(results: Results) -> Figure:
    sets = results.settings.sets
    figure, axes = panels(len(sets), across=2)
    for ax, name in zip(axes, sets, strict=True):
        r = results.where(set=name)
        for k, kind in enumerate(KERNELS):
            points(ax, results.settings.sizes, r["seen"][:, k, 0], COLOURS[k % len(COLOURS)], kind)
            line(ax, results.settings.sizes, r["told"][:, k, 0].mean(0), COLOURS[k % len(COLOURS)])
        label(ax, "examples", "test error / variance", name, log="xy", legend=name == sets[0])
    caption(figure, "Errors of ridgeless regression (points) lie on the curves that the spectra of the kernels predict (lines).")
    return figure


LAW = Control("the power law itself", {"form": "law"})
FIRST = Control("the last error of the first half", {"form": "first"})
EXPERIMENT = Experiment(
    name="eigenlearning_curves", ref=Ref("eigenlearning", "Learning curves"), title="learning curves from spectra, on images",
    data=("mnist", "fashion_mnist", "cifar10"), smoke=EigenlearningCurvesSettings(population=600, trials=2),
    paper=EigenlearningCurvesSettings(population=3000, sizes=(16, 32, 64, 128, 256, 512), trials=5), work=work,
    over=("set", "seed"), analysis=("form",), reduced="600 images of each set",
    start={"seeds": (0,), "sets": ("digits",), "population": 300, "trials": 1, "sizes": (16, 128)},
    figures={"eigenlearning_learning_curves": draw}, protocol="stand-in: MNIST, Fashion-MNIST and digits beside CIFAR-10",
    claims=(
        Claim("median |log(predicted / measured error)| at ridge 0, 128 examples and more", median(0), Interval(high=0.0953),
              FIRST, over="seed", own=True, source="10 %"),
        Claim("median |log(predicted / measured error)| at the best ridge, 128 examples and more", median(1),
              Interval(high=0.0953), FIRST, over="seed", own=True, source="10 %"),
        Claim("share of sets, kernels and sizes within 10 % at ridge 0", share(0), Interval(low=0.8), FIRST, over="seed",
              own=True, source="most of them; examples of 128 and more"),
        Claim("share of sets, kernels and sizes within 10 % at the best ridge", share(1), Interval(low=0.8), FIRST,
              over="seed", own=True, source="most of them; examples of 128 and more"),
        Claim("median error of the prediction at ridge 0 over that of a power law fitted to the first half of the points",
              against, Interval(high=0.99), LAW, over="seed", own=True, source="better than extrapolation",
              rival="a power law fitted to the first half of the measured points"),
    ))
