"""Training layer by layer, and with frozen layers.  [signal, App. F]

    trained = richter.controls.layerwise.train(model, x, y)         # LFM: each layer is to make its own features separate classes
    trained.model(x)                                                # the chain, with the normalisations between its layers

    with richter.controls.layerwise.frozen(model, but="4") as parameters:      # only layer "4" is trained in here
        optimiser = torch.optim.SGD(parameters, lr=0.1)
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from richter.controls.groups import owners
from richter.core import SelectionError, matches, unknown
from richter.core.modules import ChainStage, chain, evaluated
from richter.core.values import progress

Kernel = Callable[[Float[Tensor, "n d"]], Float[Tensor, "n n"]]
Optimiser = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Tensor, Tensor], Tensor]
TRAINABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
EVALUATED = 1000  # examples per batch for losses on the validation set
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


class UnitNorm(nn.Module):
    """Divide each example by its norm; examples of zeros stay zero."""

    def forward(self, x: Tensor) -> Tensor:
        norm = x.flatten(1).norm(dim=1).clamp(min=torch.finfo(x.dtype).tiny)
        return x / norm.reshape(-1, *[1] * (x.dim() - 1))


@dataclass(frozen=True)
class LayerHistory:
    """Training record of one layer: losses on training and validation examples after each epoch, and the epoch that was kept."""

    layer: str
    train: tuple[float, ...]
    validation: tuple[float, ...]
    kept: int


@dataclass(frozen=True)
class Layerwise:
    """Result of ``train``. ``model`` contains the layers of the given model, with normalisations between them."""

    model: nn.Sequential
    history: tuple[LayerHistory, ...]


def inner(h: Float[Tensor, "n d"]) -> Float[Tensor, "n n"]:
    """Return h_i . h_j, the forward kernel of Algorithm 1 (printed as a sum)."""
    return h @ h.T


def cosine(h: Float[Tensor, "n d"]) -> Float[Tensor, "n n"]:
    """Return cos(h_i, h_j): ``inner`` for features of length 1."""
    return inner(F.normalize(h))


def feature_loss(h: Float[Tensor, "n d"], y: Int[Tensor, " n"], kernel: Kernel = inner, target: float = 0.5) -> Tensor:
    """Mean over pairs of (K_ij - target [y_i = y_j])^2; the paper uses the sum."""
    return (kernel(h) - target * (y[:, None] == y[None]).to(h)).square().mean()


def train(model: nn.Module, x: Tensor, y: Tensor, *, validation: float | tuple[Tensor, Tensor] = 0.1, kernel: Kernel = inner,
          target: float = 0.5, optimiser: Optimiser = ADAM, batch: int = 128, epochs: int = 50, patience: int = 3,
          tolerance: float = 1e-3, seed: int = 0) -> Layerwise:
    """Train by layer-wise feature maximisation (LFM): one hidden layer after another, each so that the kernel of its features is
    ``target`` within a class and 0 between classes; then the last layer on cross-entropy.  [signal, Alg. 1]

    The model is a chain (``nn.Sequential``, or an equivalent module) of dense or convolutional layers, which are trained in
    place. The input of each layer is divided by its norm, example by example. A layer is trained until its loss on ``validation``
    (a share of the examples, or separate examples) has not fallen by a relative ``tolerance`` for ``patience`` epochs, or for
    ``epochs`` epochs. It keeps the weights of its best epoch. ``kernel=cosine, target=1.0`` work better than the printed
    settings. """
    stages = chain(model, x)
    _check(stages)
    _check_labels(model, x, y)
    (a, y), (b, y_held) = _split(x, y, validation, seed)
    _check_labels(model, b, y_held, "validation: ")
    y, y_held = y.long(), y_held.long()
    if batch < 1 or epochs < 0 or patience < 0:
        raise SelectionError(f"batch={batch}, epochs={epochs} and patience={patience}: a batch has one example at least, and the "
                             f"others are 0 or more.")
    plan = _Plan(optimiser, batch, epochs, patience, tolerance)
    draw = torch.Generator().manual_seed(seed)
    history, norm = list[LayerHistory](), UnitNorm()
    # for modules that draw random numbers themselves, such as dropout
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        for stage in progress(stages, title="training layer by layer", unit="layer"):
            with torch.no_grad():
                a, b = norm(a), norm(b)
            last = stage is stages[-1]
            loss: Loss = F.cross_entropy if last else (lambda h, c: feature_loss(h.flatten(1), c, kernel, target))
            history.append(_fit(stage, (a, y), (b, y_held), loss, plan, draw))
            if not last:
                a, b = _through(stage, a), _through(stage, b)
    return Layerwise(nn.Sequential(*(m for stage in stages for m in (UnitNorm(), *stage.modules))), tuple(history))


@contextmanager
def frozen(model: nn.Module, but: str | Sequence[str]) -> Iterator[list[nn.Parameter]]:
    """Context in which only the layers ``but`` (names or patterns, as in ``layers=``) require gradients; it yields their
    parameters, for an optimiser. Afterwards ``requires_grad`` of every parameter is restored."""
    layers, patterns = owners(model), [but] if isinstance(but, str) else list(but)
    for pattern in patterns:
        if not any(matches(name, pattern) for name in layers):
            raise unknown("the model", "layer", str(pattern), layers)
    if not patterns:
        raise SelectionError("frozen(model, but=[]): every layer is frozen, and nothing is left to train. Name one: "
                             f"{', '.join(map(repr, layers))}.")
    before = [(p, p.requires_grad) for p in model.parameters()]
    chosen = [p for name, own in layers.items() if any(matches(name, pattern) for pattern in patterns) for p in own]
    try:
        for p, _ in before:
            p.requires_grad_(False)
        for own in chosen:
            own.requires_grad_(True)
        yield [p for p in chosen if isinstance(p, nn.Parameter)]
    finally:
        for p, asked in before:
            p.requires_grad_(asked)


@dataclass(frozen=True)
class _Plan:
    optimiser: Optimiser
    batch: int
    epochs: int
    patience: int
    tolerance: float


def _fit(stage: ChainStage, examples: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor], loss: Loss, plan: _Plan,
         draw: torch.Generator) -> LayerHistory:
    """Train one layer until its loss on the held-out examples no longer falls, and restore its best weights."""
    (a, y), optimiser = examples, plan.optimiser(list(stage.module.parameters()))
    best, kept, weights = float("inf"), 0, copy.deepcopy(stage.module.state_dict())
    trained, validated = list[float](), list[float]()
    for epoch in range(1, plan.epochs + 1):
        total = 0.0
        for rows in torch.randperm(len(a), generator=draw).to(a.device).split(plan.batch):
            value = loss(stage(a[rows]), y[rows])
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            total += value.item() * len(rows)
        trained.append(total / len(a))
        validated.append(_loss(stage, *held_out, loss))
        if not math.isfinite(validated[-1]):
            stage.module.load_state_dict(weights)
            optimiser.zero_grad()
            raise SelectionError(f"layer {stage.name!r}: the loss on the validation examples is {validated[-1]} after epoch "
                                 f"{epoch}: examples that are not finite, or too large a learning rate. The layer has its "
                                 f"weights of {f'epoch {kept}' if kept else 'before'} again; those after it were not trained.")
        if validated[-1] < best * (1 - plan.tolerance) or epoch == 1:
            best, kept, weights = validated[-1], epoch, copy.deepcopy(stage.module.state_dict())
        elif epoch - kept >= plan.patience:
            break
    stage.module.load_state_dict(weights)
    optimiser.zero_grad()
    return LayerHistory(stage.name, tuple(trained), tuple(validated), kept)


@torch.no_grad()
def _loss(stage: ChainStage, a: Tensor, y: Tensor, loss: Loss) -> float:
    """Mean loss of a stage over all examples, in evaluation mode."""
    with evaluated(nn.ModuleList(stage.modules)):
        parts = [(loss(stage(h), c).item(), len(h)) for h, c in zip(a.split(EVALUATED), y.split(EVALUATED), strict=True)]
    return sum(value * n for value, n in parts) / len(a)


@torch.no_grad()
def _through(stage: ChainStage, a: Tensor) -> Tensor:
    """Outputs of a stage for all examples, in evaluation mode."""
    with evaluated(nn.ModuleList(stage.modules)):
        return torch.cat([stage(part) for part in a.split(EVALUATED)])


def _check(stages: Sequence[ChainStage]) -> None:
    """Raise an error unless every layer of the chain can be trained on its own."""
    for stage in stages:
        if not isinstance(stage.module, TRAINABLE):
            raise SelectionError(f"layer {stage.name!r} is a {type(stage.module).__name__}: training layer by layer is for dense "
                                 f"and convolutional layers, and normalises what they read by itself. Leave it out of the chain.")
        if not any(p.requires_grad for p in stage.module.parameters()):
            raise SelectionError(f"layer {stage.name!r} is frozen (requires_grad=False): every layer of the chain is trained "
                                 f"here. Let it ask for gradients, or give a chain without it and what it makes of the examples.")
    if len(stages) < 2:
        raise SelectionError("the model has one layer with weights, and no hidden layer: there are no features to be trained "
                             "layer by layer. Train it as it is, or add a hidden layer.")


def _check_labels(model: nn.Module, x: Tensor, y: Any, where: str = "") -> None:
    """Check labels before anything is trained, because the last layer, which needs them, is trained last."""
    if not isinstance(y, Tensor) or y.dim() != 1 or y.is_floating_point() or len(y) != len(x):
        shape = f"{tuple(y.shape)} of {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
        raise SelectionError(f"{where}y is {shape}, and x has {len(x)} examples: class ids [n] are needed, one for each example, "
                             f"because features are trained to tell classes apart.")
    with torch.no_grad(), evaluated(model):
        outputs = tuple(model(x[:1].clone()).shape)
    if len(outputs) != 2 or y.min() < 0 or y.max() >= outputs[1]:
        raise SelectionError(f"{where}y has classes from {y.min()} to {y.max()}, and outputs have shape {outputs}: outputs "
                             f"[n, classes] and ids from 0 on are needed, for the cross-entropy of the last layer.")
    if not where and len(y.unique()) < 2:
        raise SelectionError("y has one class only: there is nothing for features to tell apart.")


def _split(x: Tensor, y: Tensor, validation: float | tuple[Tensor, Tensor], seed: int
           ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and validation examples."""
    if isinstance(validation, (tuple, list)) and len(validation) == 2 and all(
            isinstance(t, Tensor) and len(t) for t in validation):
        return (x, y), (validation[0], validation[1])
    n = round(validation * len(x)) if isinstance(validation, (int, float)) and 0 < validation < 1 else 0
    if not 0 < n < len(x):
        raise SelectionError(f"validation={validation!r} of {len(x)} examples leaves {n} to stop by: a share between 0 and 1 is "
                             f"needed that leaves some on both sides, or validation=(x2, y2).")
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    return (x[rows[n:]], y[rows[n:]]), (x[rows[:n]], y[rows[:n]])
