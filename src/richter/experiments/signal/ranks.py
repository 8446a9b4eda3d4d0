"""The networks of Figures 19 to 23 of [signal]: with clean labels, some random ones and random ones only, and what is measured
of the kernels and the Fisher information of their layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from richter.experiments.signal.networks import fit, he
from richter.experiments.training import accuracy, linears
from richter.instrument.observe import Measurement
from richter.instrument.probe import Probe
from richter.kernels import ntk
from richter.runs import Writer
from richter.tasks import fashion_mnist

MEASURES = ("tangent_cka", "tangent_stable_rank", "tangent_correlation", "fisher_stable_rank", "fisher_correlation")
CONDITIONS: dict[str, tuple[float, float]] = {  # learning rate, share of random labels
    "fast": (0.01, 0.0), "slow": (0.001, 0.0), "noisy": (0.001, 0.2), "random": (0.01, 1.0)}


@dataclass(frozen=True)
class Settings:
    """Bias-free He networks of depth 8 and width 64 on standardised images; cross-entropy, SGD with momentum 0.9, batches of 128.
    Kernels are of 100 class-balanced training images, with the labels that were trained on."""

    n: int = 2_000
    depth: int = 8
    width: int = 64
    epochs: int = 40
    probe: int = 100
    eigenvalues: int = 200
    subject: Literal["trained", "untrained", "matrices"] = "trained"  # what claims are read from; matrices: random ones
    measure: Literal["own", "other"] = "own"  # the tangent kernel's correlation in the place of the Fisher's, or the other way
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Task:
    settings: Settings
    condition: str
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, subject="trained", measure="own", seeds=())
    return [Task(alone, condition, seed) for condition in CONDITIONS for seed in s.seeds]


def partly_random(y: Tensor, share: float, seed: int) -> Tensor:
    """Some of the labels drawn anew."""
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.rand(len(y), generator=draw) < share
    return torch.where(chosen, torch.randint(10, y.shape, generator=draw), y)


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    lr, share = CONDITIONS[t.condition]
    data = fashion_mnist(s.n, flat=True, seed=t.seed)
    rows = torch.cat([(data.y == c).nonzero()[:s.probe // 10, 0] for c in range(10)])  # the same in every condition
    data = data._replace(y=partly_random(data.y, share, t.seed + 1))
    model = he([784, *[s.width] * (s.depth - 1), 10], t.seed)
    before = layerwise(model, data.x[rows], data.y[rows], s)
    fit(model, data, lr, s.epochs, run, seed=t.seed)
    after = layerwise(model, data.x[rows], data.y[rows], s)
    with torch.no_grad():
        loss = F.cross_entropy(model(data.x), data.y).item()
    return {**{k: np.stack([before[k], after[k]]) for k in before}, "accuracy": accuracy(model, data.x_test, data.y_test),
            "loss": loss, "matrices": random_matrices(t.seed)}


def layerwise(model: nn.Module, x: Tensor, y: Tensor, s: Settings) -> dict[str, NDArray[np.float64]]:
    """Every measure of every layer, and the leading eigenvalues of its centred kernel over the largest."""
    layers = linears(model)
    snap = Measurement(model, Probe(x, y, kernel=None), MEASURES, errors=False).take()
    spectra = []
    for K in (ntk(model, x, outputs="full", per_layer=True)[k] for k in layers):
        K = torch.as_tensor(K).double().reshape(K.shape[0] * K.shape[1], -1)
        K = K - K.mean(0) - K.mean(1)[:, None] + K.mean()
        values = torch.linalg.eigvalsh(K).flip(0)[:s.eigenvalues]
        spectra.append((values / values[0]).clamp(min=1e-12).numpy())
    return {**{m: np.array([snap.value(m, k) for k in layers]) for m in MEASURES}, "spectra": np.array(spectra)}


def random_matrices(seed: int, draws: int = 300) -> NDArray[np.float64]:
    """Stable ranks of a tangent kernel and of the Fisher information, of Gaussian gradients and random probabilities."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(draws):
        Psi = torch.randn(4, 6, generator=draw, dtype=torch.float64)
        p = (3 * torch.randn(2, 3, generator=draw, dtype=torch.float64)).softmax(1)
        H = torch.block_diag(*(torch.diag(q) - torch.outer(q, q) for q in p))
        ranks = []
        for M in (Psi.T @ Psi, Psi @ H @ Psi.T):
            e = torch.linalg.eigvalsh(M)
            ranks.append((e.square().sum() / e[-1] ** 2).item())
        rows.append(ranks)
    return np.array(rows)
