"""Training from small weights in steps of one relative length, from saddle to saddle. A plateau then costs a hundred steps
instead of |theta|^(2-L). The networks are those of `richter.theory.escape`.  [escape]"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor, nn

from richter.core import SelectionError
from richter.core.arrays import Array, ArrayLike
from richter.core.values import progress
from richter.theory.arrays import joint_norm, like, relu_network, whole

GROWS = 1.1  # growth of a halved step, per step
SHORTEST = 1e-10  # relative to |theta|: the descent ends if even such a short step raises the loss
FAINTEST = 1e-290  # smallest gradient; smaller numbers lose digits


class Path(NamedTuple):
    """Training from small weights in steps of one relative length: the loss, |theta| and singular values after each step."""

    loss: Array  # [steps + 1]
    time: Array  # time of the gradient flow
    norm: Array
    values: list[Array]  # for each layer [steps + 1, the largest few]
    weights: list[Array]  # final weights


def follow(weights: Sequence[ArrayLike], X: ArrayLike, y: ArrayLike, steps: int, *, relative: float = 0.02, values: int = 4
           ) -> Path:
    """Run gradient descent on sum |f - y|^2 / (2n) from these weights, with steps of length ``relative`` |theta|. This is
    gradient flow at another speed: a plateau at the origin costs a hundred steps instead of |theta|^(2-L). A flow never raises
    the loss, so a step that would is halved; later steps grow again. The path ends when no step lowers the loss."""
    whole(steps=steps, values=values)
    if not (isinstance(relative, Real) and 0 < relative < 1):
        raise SelectionError(f"relative={relative!r}: the length of a step as a share of |theta|, between 0 and 1, is needed.")
    W, X_, y_ = relu_network(weights, X, y)
    rows: list[tuple[float, float, float]] = []
    singular: list[list[Tensor]] = [[] for _ in W]
    time, share = 0.0, relative
    loss, gradient = _started(W, X_, y_)
    for step in progress(range(steps + 1), title="saddle to saddle"):
        size, slope = joint_norm(W), joint_norm(gradient)
        rows.append((loss.item(), time, size))
        for kept, w in zip(singular, W, strict=True):
            kept.append(torch.linalg.svdvals(w)[:values])
        if step == steps or not slope:
            break
        while share > SHORTEST:
            moved = [w - share * size / slope * g for w, g in zip(W, gradient, strict=True)]
            after, its = _trained(moved, X_, y_)
            if after <= loss:
                break
            share /= 2
        else:
            break
        time += share * size / slope
        W, loss, gradient, share = moved, after, its, min(relative, GROWS * share)
    loss_, time_, norm_ = (like(X_.new_tensor(column), X) for column in zip(*rows, strict=True))
    return Path(loss_, time_, norm_, [like(torch.stack(kept), X) for kept in singular], [like(w, X) for w in W])


def _started(W: list[Tensor], X: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the initial loss and its gradient; raise an error if float64 cannot hold them."""
    loss, gradient = _trained(W, X, y)
    if not torch.isfinite(loss):
        raise SelectionError(f"the loss at these weights is {loss.item()}: outputs or labels are too large for float64 to hold "
                             f"their squares. Give data in other units, and start from small weights.")
    if not joint_norm(gradient) > FAINTEST:
        raise SelectionError(f"the gradient is zero at these weights, or below {FAINTEST:g}: from the origin, from two layers of "
                             f"zeros, and where all units are off, nothing moves; and products of tiny weights leave the range "
                             f"of float64. Start from small weights, but not from such small ones.")
    return loss, gradient


def _trained(W: list[Tensor], X: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return sum |f - y|^2 / (2n), and its gradient."""
    with torch.enable_grad():
        own = [w.detach().requires_grad_() for w in W]
        h = X
        for w in own[:-1]:
            h = nn.functional.relu(nn.functional.linear(h, w))
        loss = (nn.functional.linear(h, own[-1]) - y).square().sum() / (2 * len(X))
        return loss.detach(), list(torch.autograd.grad(loss, own))
