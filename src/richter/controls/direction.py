"""The exact direction of another optimiser: it steps stand-ins that are at 0, with learning rate 1."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from richter.core import SelectionError

# called with (parameter groups, lr=...): an optimiser class, or functools.partial of one
Base = Callable[..., torch.optim.Optimizer]


class BaseDirection:
    """Direction d(p) of every parameter p: the step of ``base(..., lr=1)`` on a stand-in at 0 that has p's gradient.

    From 0, the displacement is the stand-in itself, without the rounding error of (p + d) - p. It equals the step of the base
    optimiser as long as this reads gradients and not weights, which is tested on a small matrix first.
    """

    def __init__(self, base: Base, groups: Sequence[Sequence[Tensor]]) -> None:
        _try(base, next((p.device for params in groups for p in params), torch.device("cpu")))
        self.standins: dict[Tensor, nn.Parameter] = {}
        self.optimiser = base([{"params": self._standing(params)} for params in groups], lr=1.0)

    def add(self, params: Sequence[Tensor]) -> None:
        self.optimiser.add_param_group({"params": self._standing(params)})

    def _standing(self, params: Sequence[Tensor]) -> list[nn.Parameter]:
        """Make zero parameters on which the base optimiser takes its steps."""
        self.standins.update({p: nn.Parameter(torch.zeros_like(p, requires_grad=False)) for p in params})
        return [self.standins[p] for p in params]

    def __call__(self, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return the displacements of the parameters that have a gradient; the base optimiser does not see the others."""
        moved = {p: self.standins[p] for p in gradients}
        try:
            for p, q in moved.items():
                q.zero_()
                q.grad = gradients[p]
            self.optimiser.step()
        finally:
            for q in moved.values():
                q.grad = None
        return {p: q.detach() for p, q in moved.items()}


def _try(base: Any, device: torch.device) -> None:
    """Check that ``base`` makes an optimiser whose step depends on gradients alone."""
    if isinstance(base, torch.optim.Optimizer) or not callable(base):
        raise SelectionError(f"base={type(base).__name__}(...): give what makes an optimiser, not one that is made: a class such "
                             f"as torch.optim.Adam, or functools.partial(torch.optim.SGD, momentum=0.9).")
    if isinstance(base, functools.partial) and "lr" in base.keywords:
        raise SelectionError(f"base= sets lr={base.keywords['lr']!r}, which would do nothing: only the base's direction is used, "
                             f"at learning rate 1, and how far to go is lr and speed of SLO. Leave lr out of base=.")
    name = getattr(getattr(base, "func", base), "__name__", type(base).__name__)
    try:
        with torch.inference_mode(False), torch.no_grad():
            near, far = (_path(base, start, device) for start in (0.0, 1.0))
    except Exception as error:
        raise SelectionError(f"base={name} could not take a step with dense gradients, no closure and lr=1 "
                             f"({type(error).__name__}: {error}). SLO needs an optimiser that can.") from error
    if not torch.allclose(near, far, rtol=0, atol=1e-9):
        raise SelectionError(f"base={name} looks at the weights and not at gradients alone (weight decay, or a step relative to "
                             f"the size of the weights), so its step has no direction of its own that could be given a speed. "
                             f"Switch that off: functools.partial(torch.optim.AdamW, weight_decay=0); SLO has a weight_decay.")


def _path(base: Base, start: float, device: torch.device) -> Tensor:
    """Take three steps of a small matrix, and return them as displacements."""
    device = torch.device("cpu") if device.type == "mps" else device  # a device with float64
    g = torch.linspace(-1.0, 2.0, 16, dtype=torch.float64, device=device).reshape(4, 4)
    q = nn.Parameter(torch.full_like(g, start))
    optimiser, path = base([{"params": [q]}], lr=1.0), []
    for k in range(3):
        q.fill_(start)
        q.grad = g.roll(k, 1)
        optimiser.step()
        path.append(q.detach() - start)
    return torch.stack(path)
