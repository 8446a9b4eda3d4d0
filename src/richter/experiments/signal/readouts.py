"""The networks of Figure 18 of [signal] and Table 4: random layers, the last of which is trained on what the others make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from richter.experiments.signal.networks import balanced, profile
from richter.runs import Writer
from richter.tasks import mnist


@dataclass(frozen=True)
class Settings:
    """ReLU, no biases, weights N(0, 2/fan_in), those of the last layer times a noise scale; the last layer is trained to the
    minimum of cross-entropy on fixed features (L-BFGS, all images at once). ``widths``: of Fig. 18, and a larger one of Table 4,
    whose layers are drawn, used and forgotten one after another."""

    n: int = 1_000
    n_test: int = 500
    few: int = 500  # images, to compare the widths on
    layers: int = 10
    widths: tuple[int, ...] = (256, 1024)
    noises: tuple[float, ...] = (1.0, 0.1)
    steps: int = 200
    probe: int = 60
    subject: Literal["trained", "untrained", "exchanged"] = "trained"
    seeds: tuple[int, ...] = (0, 1)


@dataclass(frozen=True)
class Task:
    settings: Settings
    width: int
    noise: float
    measured: bool  # the alignment of every layer
    n: int
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, n=0, few=0, widths=(), noises=(), subject="trained", seeds=())
    return [Task(alone, *kind, seed) for seed in s.seeds for kind in (
        *((s.widths[0], noise, True, s.n) for noise in s.noises), *((width, s.noises[0], False, s.few) for width in s.widths))]


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = mnist(t.n, s.n_test, flat=True, seed=t.seed)
    draw = torch.Generator().manual_seed(t.seed)
    h, hidden = torch.cat([data.x, data.x_test]), list[Tensor]()
    for layer in range(s.layers - 1):
        W = torch.randn(t.width, h.shape[1], generator=draw).mul_((2 / h.shape[1]) ** 0.5)
        h = torch.cat([(part @ W.T).relu_() for part in h.split(500)])
        hidden += [W] if t.measured else []
        run.progress((layer + 1) / s.layers)
    W0 = torch.randn(10, t.width, generator=draw) * (t.noise * (2 / t.width) ** 0.5)
    W = readout(h[:t.n], data.y, W0, s.steps)

    def right(last: Tensor, rows: slice, y: Tensor) -> float:
        return (h[rows] @ last.T).argmax(1).eq(y).double().mean().item()

    held = slice(t.n, None)
    out = {"train": right(W, slice(t.n), data.y), "test": right(W, held, data.y_test), "untrained": right(W0, held, data.y_test)}
    if not t.measured:
        return out
    probe = balanced(data.x, data.y, s.probe)
    before, after = (profile(network([*hidden, last]), probe, errors=False)[0] for last in (W0, W))
    return {**out, "before": before, "after": after}


def readout(h: Tensor, y: Tensor, start: Tensor, steps: int) -> Tensor:
    """The last layer after L-BFGS on the mean cross-entropy, from ``start``."""
    W = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([W], max_iter=steps, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(h @ W.T, y)
        loss.backward()
        return loss

    optimiser.step(closure)  # type: ignore[arg-type]
    return W.detach()


def network(weights: list[Tensor]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for W in weights:
        linear = nn.Linear(W.shape[1], W.shape[0], bias=False)
        linear.weight = nn.Parameter(W)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
