"""Effect of each layer on the outputs in one step of gradient descent: ``layer_shares(model, x, y, lr)``.  [signal, Sec. 2.1]

With all layers except l frozen, a step of size lr changes the outputs by -lr K_l dL/df to first order, where K_l is the tangent
kernel of layer l. The layers' changes add up to that of the whole step. The actual change is computed too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from richter.controls.groups import owners
from richter.core import SelectionError
from richter.core.modules import unwrap
from richter.core.values import table
from richter.instrument.capture import differentiable_twice, quiet

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shares:
    """Effects of one step by layer: the change of the outputs [layers, n, k] with all other layers frozen, predicted to first
    order and actual. ``whole`` is the actual change [n, k] when all layers take the step."""

    layers: tuple[str, ...]
    predicted: NDArray[np.float64]
    actual: NDArray[np.float64]
    whole: NDArray[np.float64]
    gradient: NDArray[np.float64]  # dL/df [n, k]
    labels: NDArray[np.float64] | None  # centred, [n, k]; None where y are no labels of these outputs

    @property
    def error(self) -> NDArray[np.float64]:
        """Return |actual - predicted| / |predicted| of each layer, the error of the first order."""
        return np.array([_relative(a, p) for a, p in zip(self.actual, self.predicted, strict=True)])

    @property
    def share(self) -> NDArray[np.float64]:
        """Share of each layer in the first-order fall of the loss, -<dL/df, df>: |dL/dtheta_l|^2 / |dL/dtheta|^2. They sum to
        1."""
        return _parts(self.predicted, self.gradient)

    @property
    def toward_labels(self) -> NDArray[np.float64]:
        """Share of each layer in the movement along the centred labels, <Y~, df_l> / <Y~, df>. They sum to 1 and may be negative;
        NaN if y are not labels.  [signal, Eq. (5)]"""
        return np.full(len(self.layers), math.nan) if self.labels is None else _parts(self.predicted, self.labels)

    @property
    def interaction(self) -> float:
        """Return |step of all layers - sum of the layers' own steps| / |step of all|, the part due to interactions of layers."""
        return _relative(self.actual.sum(0), self.whole)

    def __str__(self) -> str:
        rows = [[k, f"{s:.3f}", f"{t:.3f}", f"{e:.2g}"]
                for k, s, t, e in zip(self.layers, self.share, self.toward_labels, self.error, strict=True)]
        return "\n".join([table([["layer", "share", "toward labels", "error"], *rows]),
                          f"{self.interaction:.2g} of the whole step comes from interactions between layers."])


def layer_shares(model: nn.Module, x: Any, y: Tensor, lr: float, loss: Loss = F.cross_entropy) -> Shares:
    """Take one step of gradient descent on ``loss(model(x), y)``, layer by layer. Return the change of the outputs predicted with
    the other layers frozen, the actual change, and each layer's share. The model is restored."""
    if not (isinstance(lr, (int, float)) and math.isfinite(lr) and lr > 0):
        raise SelectionError(f"lr={lr!r}: give a positive step size.")
    model = unwrap(model)
    layers = {name: [p for p in owned if p.requires_grad] for name, owned in owners(model).items()}
    layers = {name: owned for name, owned in layers.items() if owned}
    if not layers:
        raise SelectionError("no parameter of the model is trained (requires_grad), so a step changes nothing.")
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    with quiet(model), differentiable_twice():
        f = model(x)
        if not isinstance(f, Tensor) or f.dim() != 2:
            shape = f"shape {tuple(f.shape)}" if isinstance(f, Tensor) else f"type {type(f).__name__}"
            raise SelectionError(f"the model's output has {shape}, not [n, k]. Wrap the model in a module that "
                                 f"returns [n, k].")
        flat = [p for owned in layers.values() for p in owned]
        g = _gradient(loss, f, y)
        if not torch.isfinite(g).all():
            raise SelectionError("outputs, or the loss's gradient in them, contain NaN or Inf: inputs that are not finite, or "
                                 "weights that diverged. Look at both.")
        if not g.any():
            raise SelectionError("the loss's gradient in the outputs is 0 (cross-entropy of a single output, or labels that are "
                                 "fitted exactly), so a step changes nothing, and no layer has a share in it.")
        steps = dict(zip(flat, torch.autograd.grad(f, flat, g, retain_graph=True, materialize_grads=True), strict=True))
        predicted = [_pushed(f, owned, [-lr * steps[p] for p in owned]) for owned in layers.values()]

        def after(moved: list[Tensor]) -> Tensor:
            with torch.no_grad():
                return functional_call(model, {names[p]: p - lr * steps[p] for p in moved}, (x,)) - f

        actual, whole = [after(owned) for owned in layers.values()], after(flat)
    return Shares(tuple(layers), _array(torch.stack(predicted)), _array(torch.stack(actual)), _array(whole), _array(g),
                  _centred(f, y))


def _gradient(loss: Loss, f: Tensor, y: Tensor) -> Tensor:
    """Gradient dL/df of the loss with respect to the outputs."""
    free = f.detach().requires_grad_()
    return torch.autograd.grad(loss(free, y), free)[0]


def _pushed(f: Tensor, parameters: list[Tensor], direction: list[Tensor]) -> Tensor:
    """J v by two backward passes: J^T u is linear in u, and its gradient in u along v is J v."""
    u = torch.zeros_like(f).requires_grad_()
    pulled = torch.autograd.grad(f, parameters, u, create_graph=True, materialize_grads=True)
    differentiable = [(a, v) for a, v in zip(pulled, direction, strict=True) if a.requires_grad]
    if not differentiable:
        return torch.zeros_like(f)
    return torch.autograd.grad([a for a, _ in differentiable], u, [v for _, v in differentiable], materialize_grads=True)[0]


def _centred(f: Tensor, y: Any) -> NDArray[np.float64] | None:
    """Y~ [n, k], one mean over all entries; of class ids below 0 (examples without a label) nothing."""
    if not isinstance(y, Tensor) or len(y) != len(f):
        return None
    if y.dim() == 1 and not y.is_floating_point() and f.shape[1] > 1:
        if y.max() >= f.shape[1]:
            return None
        Y, keep = F.one_hot(y.long().clamp(min=0), f.shape[1]).double(), (y >= 0)[:, None].to(f.device)
        return _array((Y.to(f.device) - 1 / f.shape[1]) * keep)  # the mean of one 1 among k outputs
    elif y.numel() == f.numel():
        Y = y.double().reshape(f.shape)
    else:
        return None
    return _array(Y - Y.mean())


def _array(t: Tensor) -> NDArray[np.float64]:
    """Tensor as a numpy array of float64."""
    return np.asarray(t.detach().double().cpu())


def _parts(changes: NDArray[np.float64], direction: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shares of the changes along the direction of their sum."""
    along = (changes * direction).sum((1, 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(along / along.sum())


def _relative(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Relative distance |a - b| / |b|; NaN if b is zero."""
    size = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / size if size else math.nan
