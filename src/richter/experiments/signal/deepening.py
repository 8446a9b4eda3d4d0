"""The networks of Figure 7 of [signal]: alignment of every layer at many times of training, for two depths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike

from richter.experiments.signal.networks import balanced, he, images
from richter.experiments.training import accuracy, linears
from richter.instrument.observe import Observer
from richter.runs import Writer


@dataclass(frozen=True)
class Settings:
    """Standardised pixels, bias-free He networks, cross-entropy, SGD with momentum 0.9 and weight decay 1e-4, batches of 128;
    alignment on 100 class-balanced training images. The paper does not state the weight decay."""

    n: int = 10_000
    depths: tuple[int, ...] = (10, 30)
    widths: tuple[int, ...] = (256, 100)
    rates: tuple[float, ...] = (0.003, 0.004)
    epochs: int = 30
    measured: int = 16  # times during training
    shuffled: bool = False  # the labels
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Task:
    settings: Settings
    depth: int
    width: int
    lr: float
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, depths=(), widths=(), rates=(), seeds=())
    return [Task(alone, depth, width, lr, seed) for depth, width, lr in zip(s.depths, s.widths, s.rates, strict=True)
            for seed in s.seeds]


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = images("fashion_mnist", s.n, t.seed, "shuffled" if s.shuffled else "own")
    draw = torch.Generator().manual_seed(t.seed)
    model = he([784, *[t.width] * (t.depth - 1), 10], t.seed)
    optimiser = torch.optim.SGD(model.parameters(), lr=t.lr, momentum=0.9, weight_decay=1e-4)
    watch = Observer(model, balanced(data.x, data.y, 100), run=run, measures=["tangent_cka"], when=[], budget=None, matrices=0,
                     on_error="raise")
    batches = -(-s.n // 128)
    due = {round(v) for v in np.geomspace(1, max(1, s.epochs * batches), s.measured)}
    losses, step = [F.cross_entropy(model(data.x[:1000]), data.y[:1000]).item()], 0
    watch(0, loss=losses[0])
    for _ in range(s.epochs):
        for rows in torch.randperm(s.n, generator=draw).split(128):
            loss = F.cross_entropy(model(data.x[rows]), data.y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            step += 1
            if step in due:
                watch(step, loss=loss.detach())
                watch.now(step)
                losses.append(loss.item())
            run.progress(step / (s.epochs * batches))
    A = np.array([[snap.value("tangent_cka", k) for k in linears(model)] for snap in watch.snapshots])
    return {"steps": [snap.step for snap in watch.snapshots], "alignment": A, "losses": losses,
            "accuracy": accuracy(model, data.x_test, data.y_test),
            "peak": 1 + int(A[-1].argmax()), "growth": A[-1].max() / A[0].max(), "last": A[-1, -1] / A[-1].max()}
