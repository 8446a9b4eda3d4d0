"""A network trained by back-propagation and a recursive feature machine find the same features in the same data.  [rfm]"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from richter.core import Interval, Ref
from richter.core.cosine import cosine
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.training import descend, epochs, one_hot
from richter.learners import Laplace, RFMRegressor
from richter.models import mlp
from richter.runs import Writer
from richter.tasks import chain_monomial
from richter.tasks import images as image_sets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[Any]


@dataclass(frozen=True)
class Settings:
    """The network: two hidden ReLU layers without biases, the first from a hundredth of torch's initial weights, so that W^T W is
    what was learned (from torch's own, W^T W of images stays mostly what it was: a cosine of 0.12 with M); gradient descent on
    the mean squared error. The machine: a Laplace kernel with the median distance as its bandwidth, M = AGOP^(1/2) divided by its
    mean diagonal. Both see the same rows."""

    images: str = "mnist_5k"
    n_chain: int = 384
    n_images: int = 2_000
    first: float = 0.01
    lr: float = 0.1
    steps: int = 400  # on the chain monomial, full batches
    epochs: int = 30  # on images, batches of 128
    iterations: int = 3
    ridge: float = 1e-3
    shuffled: bool = False  # the labels that the machine is fitted to
    chain_seeds: tuple[int, ...] = (0, 1, 2)
    image_seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Task:
    settings: Settings
    data: str
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, chain_seeds=(), image_seeds=())
    return [Task(alone, "chain", seed) for seed in s.chain_seeds] + [Task(alone, "images", seed) for seed in s.image_seeds]


def network(s: Settings, widths: list[int], seed: int) -> nn.Sequential:
    model = mlp(widths, bias=False, seed=seed)
    with torch.no_grad():
        model[0].weight.mul_(s.first)  # type: ignore[operator]
    return model


def nfm(model: nn.Sequential) -> Array:
    """W^T W of the first layer."""
    W: Tensor = model[0].weight.detach().double()  # type: ignore[operator, union-attr]
    return np.asarray((W.T @ W).numpy())


def machine(s: Settings, x: Tensor, y: Tensor, shuffled: bool, seed: int) -> tuple[Array, RFMRegressor]:
    """The metric after the last iteration."""
    X, Y = x.double().numpy(), y.double().numpy()
    if shuffled:
        Y = Y[np.random.default_rng((seed, 6)).permutation(len(Y))]
    model = RFMRegressor(Laplace().fitted(X), "agop", s.iterations, s.ridge, select="last", early_stopping=False, keep="all")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "[0-9]+ of [0-9]+ columns are constant")  # the margins of images
        model.fit(X, Y)
    return model.feature_matrix_, model


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    if t.data == "chain":
        chain = chain_monomial(s.n_chain, 32, 5, seed=t.seed, standardise=True)
        x, y, x_test, right = chain.x, chain.y, chain.x_test, chain.y_test.numpy()
        model = network(s, [x.shape[1], 128, 128, 1], t.seed)
        untrained = nfm(model)
        descend(model, x, y, torch.optim.SGD(model.parameters(), lr=s.lr), s.steps, run)
    else:
        images = getattr(image_sets, s.images)
        data = images(seed=t.seed) if s.images == "mnist_5k" else images(s.n_images, 2_000, flat=True, seed=t.seed)
        x, y, x_test, right = data.x[:s.n_images], one_hot(data.y[:s.n_images]), data.x_test, data.y_test.numpy()
        model = network(s, [x.shape[1], 256, 256, 10], t.seed)
        untrained = nfm(model)
        epochs(model, x, y, torch.optim.SGD(model.parameters(), lr=s.lr), s.epochs, run, seed=t.seed)
    M, fitted = machine(s, x, y, s.shuffled, t.seed)
    N, other = nfm(model), machine(s, x, y, True, t.seed)[0]
    with torch.no_grad():
        outputs = model(x_test).numpy()
    return {"nfm": N, "metric": M, "shuffled": other, "cosine": cosine(N, M), "pearson": pearson(N, M),
            "diagonal": pearson(N.diagonal(), M.diagonal()), "cosine_untrained": cosine(untrained, M),
            "cosine_shuffled": cosine(N, other), "network": score(outputs, right),
            "machine": [score(f, right) for f in fitted.staged_predict(x_test.double().numpy())]}


def pearson(A: Array, B: Array) -> float:
    """The correlation of all entries."""
    return float(np.corrcoef(A.ravel(), B.ravel())[0, 1])


def score(f: Array, right: Array) -> float:
    """Accuracy for class ids, the share of variance explained for numbers."""
    return float(np.mean(f.argmax(1) == right) if right.ndim == 1 else 1 - np.mean((f - right) ** 2) / np.var(right))


def mean(r: Results, data: str, name: str, less: str = "") -> float:
    chosen = r.where(data=data)
    return float((chosen[name] - (chosen[less] if less else 0)).mean())


def draw(results: Results) -> Figure:
    """Chain monomial: the matrices. Images: their diagonals, a number for each pixel."""
    from matplotlib.figure import Figure
    titles = {"nfm": "$W^T W$ of the network", "metric": "M of the machine", "shuffled": "M, shuffled labels"}
    rows = [data for data in ("chain", "images") if len(results.where(data=data))]
    figure = Figure(figsize=(7.2, 2.6 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), 3, squeeze=False)
    for row, data in zip(axes, rows, strict=True):
        chosen = results.where(data=data)
        for ax, (name, title) in zip(row, titles.items(), strict=True):
            A = chosen[name][0]
            picture = A if data == "chain" else A.diagonal().reshape(round(len(A) ** 0.5), -1)
            top = np.abs(picture).max()
            ax.imshow(picture, vmin=-top if data == "chain" else 0, vmax=top, cmap="RdBu_r" if data == "chain" else "viridis")
            ax.set(xticks=(), yticks=())
            ax.set_title(title, parse_math=True, fontsize=10)
            value = {"nfm": "", "metric": f"cosine {mean(results, data, 'cosine'):.2f}",
                     "shuffled": f"cosine {mean(results, data, 'cosine_shuffled'):.2f}"}[name]
            ax.set_xlabel(value or f"cosine {mean(results, data, 'cosine_untrained'):.2f} of M before training", fontsize=9)
        row[0].set_ylabel("chain monomial" if data == "chain" else "images: the diagonal", fontsize=10)
    return figure


UNTRAINED = Control("an untrained network", {"steps": 0, "epochs": 0})
SHUFFLED = Control("the machine fitted to shuffled labels", {"shuffled": True})
OWN = "our own bar, set before any run: the paper says 'highly correlated' of other data, no number for these is known to us"


def claims(data: str, name: str) -> tuple[Claim, ...]:
    return (
        Claim(f"{name}: cosine of W^T W and M", lambda r: mean(r, data, "cosine"), Interval(low=0.5), UNTRAINED,
              paper="highly correlated", source=OWN),
        Claim(f"{name}: Pearson correlation of W^T W and M", lambda r: mean(r, data, "pearson"), Interval(low=0.5), UNTRAINED,
              paper="highly correlated", source=OWN),
        Claim(f"{name}: cosine, less that of the untrained network", lambda r: mean(r, data, "cosine", "cosine_untrained"),
              Interval(low=0.3), UNTRAINED, source=OWN),
        Claim(f"{name}: cosine, less that of a machine for shuffled labels", lambda r: mean(r, data, "cosine", "cosine_shuffled"),
              Interval(low=0.3), SHUFFLED, source=OWN))


EXPERIMENT = Experiment(
    name="rfm_networks", ref=Ref("rfm", "networks and RFM"), title="the first layer of a network and a feature machine agree",
    smoke=Settings(), paper=Settings(images="mnist", n_images=8_000, steps=800, iterations=5, chain_seeds=(0, 1, 2, 3, 4),
                                     image_seeds=(0, 1, 2)),
    tasks=tasks, work=work, data=("mnist_5k",), more_data=("mnist",), figures={"rfm_networks": draw},
    start={"steps": 1, "epochs": 1, "iterations": 1, "n_images": 256}, reduced="2,000 in place of 8,000 images, one seed of them",
    claims=(*claims("chain", "chain monomial"), *claims("images", "MNIST"),
            Claim("MNIST: Pearson correlation of the diagonals", lambda r: mean(r, "images", "diagonal"), Interval(low=0.5),
                  UNTRAINED, source="our own bar, that of the matrices")))
