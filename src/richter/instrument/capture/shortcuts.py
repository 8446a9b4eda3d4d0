"""Cheaper backward passes: derivatives of activations are computed once for all of them; and where only gradients toward what
linear maps wrote are wanted and none of weights, positions from which no output is reached are skipped."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from richter.instrument.capture.uses import Scope

CURVED = {F.gelu, F.silu, F.mish, F.softplus, F.logsigmoid}  # derivatives that cost more than a product


class Parameters:
    """Are gradients of parameters wanted of the next backward pass?"""

    wanted = False


class Shortcuts:
    """What is computed in another way than the model says, with the same result. ``silent``: modules that are silent at most
    positions; None: no shortcut at all."""

    def __init__(self, scope: Scope, silent: Collection[str] | None) -> None:
        self.scope, self.silent, self.parameters = scope, silent, Parameters()

    def instead(self, func: Any, args: Any, kwargs: Any) -> Callable[[], Tensor] | None:
        """A cheaper way to compute ``func(*args, **kwargs)``, if there is one."""
        if self.silent is None:
            return None
        if self._curves(func, args, kwargs):
            return lambda: Curved.apply(args[0], lambda x: func(x, *args[1:], **kwargs))
        return (lambda: Silent.apply(*args, self.parameters)) if self._skips(func, args, kwargs) else None

    def _curves(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Is this an activation with a derivative worth keeping, not in place, that a backward pass will need?"""
        if func not in CURVED or not args or not isinstance(args[0], Tensor) or not args[0].requires_grad:
            return False
        in_place = kwargs.get("inplace", False) or (len(args) > 1 and args[1] is True)
        return not in_place and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    def _skips(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Is this the product of a linear layer that is silent at most positions? Of its own parameters: through a weight that
        is computed, the maps that it is computed from need their share of the gradient."""
        running = self.scope.running
        if func is not F.linear or not self.silent or running is None or kwargs or len(args) != 3:
            return False
        computed = any(t is not None and t.grad_fn is not None for t in args[1:])
        return not computed and self.scope.views.get(running, ("", {}))[0] in self.silent and args[1] is running.weight


class Curved(torch.autograd.Function):
    """A function of single numbers whose derivative costs more than a product: it is computed once for all backward passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad(), saved_tensors_hooks(Tensor.detach, _itself):  # what is kept in here is nobody else's
            x = x.detach().requires_grad_()
            y = function(x)
            ctx.save_for_backward(*torch.autograd.grad(y, x, torch.ones_like(y)))
        return y.detach()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.saved_tensors[0], None


def _itself(t: Tensor) -> Tensor:
    return t


class Silent(torch.autograd.Function):
    """F.linear with a backward pass over the positions whose gradient is not zero; the others give zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parameters: Parameters) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.biased = parameters, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), positions = ctx.saved_tensors, g.flatten(0, -2)
        live = (positions.abs().amax(-1) != 0).nonzero()[:, 0]
        positions = positions[live]
        to_input = g.new_zeros(g.shape[:-1].numel(), weight.shape[1])
        to_input.index_copy_(0, live, positions @ weight.to(g.dtype))  # autocast multiplies in a precision of its own
        to_input = to_input.view(*g.shape[:-1], weight.shape[1])
        if not ctx.parameters.wanted:
            return to_input, None, None, None
        to_weight = positions.mT @ x.flatten(0, -2)[live].to(g.dtype)
        return to_input, to_weight.to(weight.dtype), positions.sum(0).to(weight.dtype) if ctx.biased else None, None


class Asked(torch.autograd.Function):
    """A number whose gradient in the outputs is V: what grad_outputs= is for, which would have torch import sympy."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, V: Tensor, as_it_is: bool) -> Tensor:
        ctx.V, ctx.as_it_is = V, as_it_is
        return f.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None, None]:
        """A copy where it may be captured: nobody then writes into V."""
        return ctx.V if ctx.as_it_is else ctx.V * one, None, None


def ours(node: Any) -> bool:
    """Is this step of a backward pass one of these?"""
    return isinstance(node, (Curved._backward_cls, Silent._backward_cls))  # type: ignore[attr-defined]
