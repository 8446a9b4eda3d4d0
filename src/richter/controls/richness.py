"""Knobs that make training lazier or richer, for any model: scales of weights, targets, inputs and outputs, an initial function
of zero, and training of the last layer alone.  [layerwise, Sec. 6.3.1, Table 6.1]

    knobs = Scales(weight=5.0, target=3.0)                          # grokking: a lazy start
    model, y = knobs.model(model), knobs.targets(y)
    knobs = Scales(target=1 / 100, zero=True)                       # lazy: small targets, from a zero function
    with last_layer_only(model) as parameters:                      # a linear model on fixed features
        optimiser = torch.optim.SGD(parameters, lr=0.1)

Each knob is also a separate function or module (``scale_weights_``, ``Scaled``, ``FromZero``, ``last_layer_only``); ``Scales``
combines several. A knob at its neutral position leaves the model unchanged, bit for bit.
"""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from richter.controls.groups import owners
from richter.controls.layerwise import frozen
from richter.core import SelectionError, matches, unknown
from richter.core.modules import unwrap


@dataclass(frozen=True)
class Scales:
    """Scales of weights, targets, inputs and outputs, which decide how rich a training is; the default changes nothing.

    | knob | richer when | in a scalar linear network (``theory.scalar_network``) |
    |---|---|---|
    | ``weight``, multiplies every initial weight matrix | small | Sigma_0 falls with its square |
    | ``target``, multiplies the labels | large | S grows |
    | ``input``, multiplies the model's inputs | small | S, the ratio of label and input, grows |
    | ``output``, multiplies the model's outputs | small | Z grows |
    | ``zero``, f(theta) - f(theta_0) in place of f | | S_0 = 0: a small target is then always lazy |
    """

    weight: float = 1.0
    target: float = 1.0
    input: float = 1.0
    output: float = 1.0
    zero: bool = False

    def __post_init__(self) -> None:
        for name in ("weight", "target", "input", "output"):
            _positive(getattr(self, name), f"Scales: {name}")

    def model(self, model: nn.Module) -> nn.Module:
        """Scale the model's weights in place, and wrap the model in modules for the other knobs that are set; otherwise the same
        object is returned. Call it once, before training."""
        if self.weight != 1:
            scale_weights_(model, self.weight)
        turned: nn.Module = FromZero(model) if self.zero else model
        return turned if self.input == self.output == 1 else Scaled(turned, self.input, self.output)

    def targets(self, y: Tensor) -> Tensor:
        """Multiply labels [n, k] of a squared loss by ``target``. Class ids have no scale: make them one-hot first."""
        if self.target == 1:
            return y
        if not y.is_floating_point():
            raise SelectionError(f"Scales(target={self.target:g}): y is of {y.dtype}, and class ids cannot be scaled. Give "
                                 f"targets of a squared loss, e.g. torch.nn.functional.one_hot(y).float().")
        return y * self.target


def scale_weights_(model: nn.Module, scale: float | Mapping[str, float]) -> nn.Module:
    """Multiply, in place, every parameter with two or more dimensions (matrices, convolutions, embeddings; not biases and gains).

    >>> scale_weights_(model, 5.0)
    >>> scale_weights_(model, {"0": 5.0, "h.*.attn": 0.1})           # by layer or pattern; others are unchanged
    The last matching pattern decides. A shared weight is scaled once, as that of the first of its layers.
    """
    layers = owners(model)
    by_pattern = dict(scale) if isinstance(scale, Mapping) else {"*": scale}
    for pattern, factor in by_pattern.items():
        _positive(factor, "scale_weights_: the scale" if not isinstance(scale, Mapping) else
                  f"scale_weights_: the scale of {pattern!r}")
        if not any(matches(name, pattern) for name in layers):
            raise unknown("the model", "layer", str(pattern), layers)
    with torch.no_grad():
        for name, own in layers.items():
            factor = next((by_pattern[pattern] for pattern in reversed(by_pattern) if matches(name, pattern)), 1.0)
            for p in own if factor != 1 else ():
                if p.dim() >= 2:
                    p.mul_(factor)
    return model


class Scaled(nn.Module):
    """The module output * model(input * x). The scales are settings, like the p of dropout, and not in the state_dict."""

    def __init__(self, model: nn.Module, input: float = 1.0, output: float = 1.0) -> None:
        super().__init__()
        _positive(input, "Scaled: input")
        _positive(output, "Scaled: output")
        self.model, self.input, self.output = model, float(input), float(output)

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        if self.input != 1:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                what = f"is of {x.dtype}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
                raise SelectionError(f"Scaled(input={self.input:g}): the first input {what}, and has no scale. Token ids are "
                                     f"scaled where they become vectors: scale_weights_(model, {{'<embedding>': "
                                     f"{self.input:g}}}).")
            x = self.input * x
        f = self.model(x, *more, **named)
        return f if self.output == 1 else self.output * _tensor(f, "Scaled(output=...)")

    def extra_repr(self) -> str:
        """Scales as text for the module's repr."""
        return f"input={self.input:g}, output={self.output:g}"


class FromZero(nn.Module):
    """The module f(theta) - f(theta_0): the model minus a frozen copy of its current state, so training starts from a zero
    function.

    The copy is ``start``. It is not trained, moves with the model between devices, and is in the state_dict. In training it sees
    the same batches (batch statistics) and the same random numbers (dropout), so that the difference is zero there too.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.start = model, copy.deepcopy(unwrap(model))
        self.start.requires_grad_(False)

    def forward(self, *given: Any, **named: Any) -> Tensor:
        if self.training:  # the model draws the same random numbers as without its copy, and the copy draws these too
            with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                start = self.start(*given, **named)
        else:
            start = self.start(*given, **named)
        return _tensor(self.model(*given, **named), "FromZero") - start


def last_layer_only(model: nn.Module, layer: str | None = None) -> AbstractContextManager[list[nn.Parameter]]:
    """Context in which only the last layer requires gradients: a linear model on the features of the other layers. It yields the
    layer's parameters, for an optimiser. The last layer is the last of ``named_modules()`` that owns trained parameters, unless
    ``layer`` names it."""
    trained = [name for name, own in owners(model).items() if any(p.requires_grad for p in own)]
    if layer is None and not trained:
        raise SelectionError("last_layer_only: no parameter of the model asks for gradients (requires_grad), so that none of its "
                             "layers is known as the last that is trained. Name it: last_layer_only(model, 'head').")
    return frozen(model, but=trained[-1] if layer is None else layer)


def _positive(value: Any, what: str) -> None:
    """Raise an error unless a value is a positive finite number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise SelectionError(f"{what} is {value!r}: a finite number above 0 is needed; 1 changes nothing.")


def _tensor(f: Any, what: str) -> Tensor:
    """Return the model's output if it is a tensor; otherwise raise an error."""
    if not isinstance(f, Tensor):
        raise SelectionError(f"{what}: the model returns a {type(f).__name__}, and one tensor is needed. Wrap the part of it "
                             f"that returns its outputs.")
    return f
