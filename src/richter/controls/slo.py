"""Speed Limited Optimisation: the distance that a layer moves in a step is chosen, independent of the size of its gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from richter.controls.direction import Base, BaseDirection
from richter.controls.groups import number
from richter.core import CaptureError, SelectionError

SETTINGS = ("lr", "speed", "eps", "weight_decay", "maximize", "foreach")
LARGE = 2 ** 18  # entries above which float32 squares are summed row by row on a CPU, because one long sum loses precision


class SLO(torch.optim.Optimizer):
    """Optimiser with W <- W - lr speed g / (eps + |g|_F), with the norm of each tensor.  [nfa, Sec. 5.2, with a descent's sign]

    >>> SLO(model.parameters(), lr=0.1)
    >>> SLO(slo_groups(model, {"0": 500.0}, default=0.002), lr=0.03)                  # speeds by layer
    >>> SLO(model.parameters(), lr=0.1, base=functools.partial(torch.optim.SGD, momentum=0.9))
    A tensor moves by lr * speed in Frobenius norm if |g| is far above ``eps``, and as in gradient descent with the rate
    lr speed / eps if it is far below, so that training can converge. ``lr``, ``speed``, ``eps``, ``weight_decay`` and
    ``maximize`` may be set per parameter group.
    ``base``: makes another optimiser, whose direction at learning rate 1 replaces g. ``weight_decay`` is decoupled: W also loses
    lr weight_decay W, whatever the speed, because a decay added to g would be divided by the norm of g. ``foreach``: let torch
    batch the operations of many tensors. A gradient of zeros moves nothing, also with eps=0; NaN stays NaN. Norms are computed in
    float32 or wider.
    """

    def __init__(self, params: Iterable[Any], lr: float | Tensor, speed: float = 1.0, eps: float = 0.1, *,
                 base: Base | None = None, weight_decay: float = 0.0, maximize: bool = False, foreach: bool = True) -> None:
        self._direction: BaseDirection | None = None
        super().__init__(params, {"lr": lr, "speed": speed, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
                                  "foreach": foreach})
        if base is not None:
            self._direction = BaseDirection(base, [group["params"] for group in self.param_groups])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group after checking its settings."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except SelectionError:
            self.param_groups.pop()
            raise
        if self._direction is not None:
            self._direction.add(self.param_groups[-1]["params"])

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step. ``closure`` computes the loss and its gradients again; its loss is returned."""
        self._choose()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moves = {p: _dense(p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None}
        if self._direction is not None:  # to maximise, the base gets negative gradients
            climbing = {p for group in self.param_groups if group["maximize"] for p in group["params"]}
            moves = self._direction({p: -g if p in climbing else g for p, g in moves.items()})
        for params, settings in self._alike(moves):
            _move(params, [moves[p] for p in params], settings, along=self._direction is not None or settings["maximize"])
        return loss

    def _alike(self, moves: Collection[Tensor]) -> list[tuple[list[Tensor], dict[str, Any]]]:
        """Group parameters of one device, dtype and settings, whatever their parameter groups, so that they are updated
        together."""
        sets: dict[tuple[Any, ...], tuple[list[Tensor], dict[str, Any]]] = {}
        for group in self.param_groups:
            settings = tuple(group[k] for k in SETTINGS)
            for p in group["params"]:
                if p in moves:
                    sets.setdefault((p.device, p.dtype, *settings), ([], group))[0].append(p)
        return list(sets.values())

    def _choose(self) -> None:
        """Hook before a step, for speeds that depend on the training (AdaptiveSLO)."""

    def state_dict(self) -> dict[str, Any]:
        """Return groups with their speeds, and the base's state under ``base``."""
        state = super().state_dict()
        return state if self._direction is None else {**state, "base": self._direction.optimiser.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an SLO with the same kind of base optimiser."""
        if ("base" in state_dict) != (self._direction is not None):
            saved, given = ("has", "none was given here") if "base" in state_dict else ("has not", "one was given here")
            raise SelectionError(f"load_state_dict: the state {saved} a base optimiser, and {given}. Make SLO with the same "
                                 f"base= as the one that was saved.")
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "base"})
        if self._direction is not None:
            self._direction.optimiser.load_state_dict(state_dict["base"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_direction": self._direction}  # a copy has its own base


def _check(group: dict[str, Any]) -> None:
    """Raise an error unless the settings of a group are numbers in range and its parameters real."""
    for key in ("lr", "speed", "eps", "weight_decay"):
        number(group[key], f"SLO: {key}")
    for p in group["params"]:
        if p.is_complex():
            raise SelectionError(f"SLO: a parameter has complex dtype {p.dtype}. The speed of complex weights has no settled "
                                 f"definition; split real and imaginary parts.")


def _dense(g: Tensor) -> Tensor:
    """Return a dense gradient; raise an error for a sparse one."""
    if g.layout is not torch.strided:
        raise CaptureError(f"SLO: a gradient is sparse ({g.layout}), and the norm of a whole tensor needs all of it. Build the "
                           f"embedding with sparse=False.")
    return g


def _move(params: list[Tensor], moves: list[Tensor], group: dict[str, Any], along: bool) -> None:
    """Update p <- (1 - lr decay) p +- lr speed d / (eps + |d|) for tensors of one device and dtype; ``along`` d or against it."""
    lr, decay, foreach = group["lr"], group["weight_decay"], group["foreach"]
    size = norms(moves, foreach)
    inverse = (size + group["eps"]).reciprocal()
    if not isinstance(group["eps"], Tensor) and group["eps"] == 0:
        inverse = torch.where(size == 0, 0.0, inverse)  # NaN stays NaN
    factors = (inverse * ((lr if along else -lr) * group["speed"])).unbind()
    # factors may exceed the range of half precision, so products are rounded once, in the weights
    if params[0].dtype.itemsize < 4:
        moves = [d.float() for d in moves]
    if isinstance(decay, Tensor) or decay:
        for p in params:
            p.mul_(1 - lr * decay)
    if foreach:
        torch._foreach_addcmul_(params, moves, factors)
    else:
        for p, d, factor in zip(params, moves, factors, strict=True):
            p.addcmul_(d, factor)


def norms(tensors: Sequence[Tensor], foreach: bool = True) -> Tensor:
    """Return |d|_F of each tensor, in float32 or wider, on their device."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    if foreach and tensors[0].device.type == "cuda":
        return torch.stack(torch._foreach_norm(list(tensors), 2, wide))
    return torch.stack([_norm(d, wide) for d in tensors])


def _norm(d: Tensor, wide: torch.dtype) -> Tensor:
    """Euclidean norm, summed in a wide precision."""
    if d.dim() < 2 or d.numel() < LARGE:
        return torch.linalg.vector_norm(d, dtype=wide)
    return torch.linalg.vector_norm(torch.linalg.vector_norm(d, dim=tuple(range(1, d.dim())), dtype=wide))
