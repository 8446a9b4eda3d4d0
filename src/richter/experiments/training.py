"""Shared parts of experiments of several papers: networks with scaled initial weights, plain training loops, measures at
chosen steps, errors and labels."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from richter.experiments.kit import Writer
from richter.instrument.observe import measure
from richter.instrument.probe import Probe
from richter.instrument.snapshot import Snapshot
from richter.models import mlp

Step = Callable[[int], None]


def scaled(widths: Sequence[int], scales: Sequence[float], seed: int) -> nn.Sequential:
    """Bias-free ReLU network in float64: torch's initial weights times a scale for each layer."""
    model = mlp(widths, bias=False, seed=seed).double()
    with torch.no_grad():
        for p, scale in zip(model.parameters(), scales, strict=True):
            p.mul_(scale)
    return model


def linears(model: nn.Module) -> list[str]:
    """Names of the linear layers, in order."""
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]


class LayerCurves:
    """Measures of chosen layers at chosen steps: ``curves["nfc"]`` is [steps, layers]."""

    def __init__(self, model: nn.Module, probe: Probe, measures: Sequence[str], layers: Sequence[str], run: Writer | None = None,
                 **options: Any) -> None:
        self.model, self.probe, self.measures, self.layers, self.run = model, probe, list(measures), list(layers), run
        self.initial = {k: v.detach().clone() for k, v in model.state_dict().items()}
        self.options, self.snapshots = options, list[Snapshot]()

    def at(self, step: int) -> Snapshot:
        """Measure the model at a step, and write the snapshot to the run."""
        snap = measure(self.model, self.probe, self.measures, initial=self.initial, layers=self.layers, step=step, **self.options)
        self.snapshots.append(snap)
        if self.run is not None:
            self.run.snapshot(snap)
        return snap

    def when(self, due: Container[int]) -> Step:
        """Return a callback that measures at these steps."""
        def measured(step: int) -> None:
            if step in due:
                self.at(step)
        return measured

    @property
    def steps(self) -> list[int]:
        """Steps that were measured."""
        return [snap.step or 0 for snap in self.snapshots]

    @property
    def names(self) -> list[str]:
        """Layers as they are named in the rows; a fused qkv has three."""
        return [k for k in self.snapshots[0].layers if k != "*"]

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        return np.array([[snap.value(name, k) for k in self.names] for snap in self.snapshots])

    def arrays(self) -> dict[str, Any]:
        """Return the steps and each measure [steps, layers]."""
        return {"steps": np.array(self.steps), **{m: self[m] for m in self.measures}}


def descend(model: nn.Module, x: Tensor, y: Tensor, optimiser: torch.optim.Optimizer, steps: int, run: Writer,
            before: Step | None = None) -> None:
    """Train by full-batch descent on the mean squared error; ``before(step)`` is called before each step, and once at the
    end."""
    for step in range(steps):
        if before is not None:
            before(step)
        loss = (model(x) - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        run.progress(step / steps)
    if before is not None:
        before(steps)


def epochs(model: nn.Module, x: Tensor, y: Tensor, optimiser: torch.optim.Optimizer, count: int, run: Writer, *, batch: int = 128,
           seed: int = 0, loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss, after: Step | None = None) -> None:
    """Train on shuffled batches; ``after(epoch)`` is called after each epoch, and before the first with 0."""
    draw = torch.Generator().manual_seed(seed)
    if after is not None:
        after(0)
    for epoch in range(count):
        total = 0.0
        for rows in torch.randperm(len(x), generator=draw).split(batch):
            value = loss(model(x[rows]), y[rows])
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            total += value.item() * len(rows)
        run.scalars(epoch + 1, loss=total / len(x))
        run.progress((epoch + 1) / count)
        if after is not None:
            after(epoch + 1)


def error(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Mean squared error of a model."""
    with torch.no_grad():
        return (model(x) - y).square().mean().item()


def accuracy(model: nn.Module, x: Tensor, y: Tensor, batch: int = 1000) -> float:
    """Share of examples whose largest output is that of their class."""
    with torch.no_grad():
        return float(np.mean([(model(a).argmax(1) == b).double().mean().item() for a, b in
                              zip(x.split(batch), y.split(batch), strict=True)]))


def one_hot(y: Tensor, classes: int = 10, dtype: torch.dtype = torch.float32) -> Tensor:
    """Centred one-hot labels, as in the paper's code: 1 - 1/c and -1/c."""
    return F.one_hot(y, classes).to(dtype) - 1 / classes
