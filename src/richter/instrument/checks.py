"""What a model, its initial state and its inputs must be before anything is measured; errors say what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from richter.core import CaptureError, DivergedError, Mark, MemoryBudgetError, SelectionError, matches, show_bytes
from richter.core.modules import unwrapped_name
from richter.core.sizes import SMALL

if TYPE_CHECKING:
    from richter.instrument.subject import Subject


def finite(t: Tensor) -> bool:
    """A sum is finite only if all its terms are, and is quicker than to look at each."""
    return bool(torch.isfinite(t.sum())) or bool(torch.isfinite(t).all())


def check_weights(model: nn.Module) -> None:
    """A model that can be measured has real, finite, initialised weights."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if not dict(model.named_parameters()):
        raise SelectionError("the model has no parameters, so there is no layer to measure.")
    for name, p in tensors.items():
        name = f"{'parameter' if isinstance(p, nn.Parameter) else 'buffer'} {name!r}"
        if isinstance(p, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise CaptureError(f"{name} is not initialised yet (a lazy module): run one batch through the model first.")
        if p.device.type == "meta":
            raise CaptureError(f"{name} is on the meta device: it has a shape but no numbers. Move the model to a real device "
                               f"(model.to_empty(device=...) and load weights) first.")
        if p.is_complex():
            raise CaptureError(f"{name} has complex dtype {p.dtype}. Feature matrices of complex weights have no settled "
                               f"definition; split real and imaginary parts.")
    for name, p in model.named_parameters():
        if p.is_floating_point() and not finite(p.detach()):
            raise DivergedError(f"parameter {name!r} contains NaN or Inf: the run has diverged, and every number would be NaN. "
                                f"Look at the steps before, or lower the learning rate.")


def check_initial(model: nn.Module, initial: Any) -> dict[str, Tensor]:
    """A state_dict at initialisation that fits the (unwrapped) model."""
    if not isinstance(initial, Mapping):
        raise SelectionError(f"initial= is a {type(initial).__name__}; a state_dict of this model is needed: "
                             f"initial=copy.deepcopy(model.state_dict()), taken before training.")
    return check_state(model, initial, "initial", ", taken before training")


def check_state(model: nn.Module, state: Mapping[str, Any], called: str, when: str = "") -> dict[str, Tensor]:
    """The same of any state_dict, which errors name as the caller does."""
    own = model.state_dict()
    state = {k if k in own else unwrapped_name(k, own): v for k, v in state.items()}
    needed = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    for name, p in needed.items():
        if name not in state:
            if name in own:
                raise SelectionError(f"{called}= has no entry {name!r}. Pass a state_dict of this very model{when}.")
            continue  # a buffer that is not saved
        if not isinstance(state[name], Tensor):
            raise SelectionError(f"{called}[{name!r}] is a {type(state[name]).__name__}, not a tensor.")
        if state[name].shape != p.shape:
            raise SelectionError(f"{called}[{name!r}] has shape {tuple(state[name].shape)}, the model's is {tuple(p.shape)}: "
                                 f"it is the state of another architecture.")
        if state[name].is_floating_point() and not finite(state[name]):
            raise SelectionError(f"{called}[{name!r}] contains NaN or Inf.")
    return state


def check_inputs(x: Any, name: str = "x") -> None:
    """Tensors with as many examples each, real and finite."""
    parts = list(x.items()) if isinstance(x, Mapping) else list(enumerate(x)) if isinstance(x, (tuple, list)) else []
    for key, part in parts:
        check_inputs(part, f"{name}[{key!r}]")
    sizes = {p.shape[0] if isinstance(p, Tensor) and p.dim() else -1 for _, p in parts}
    if len(sizes) > 1:
        raise SelectionError(f"the parts of {name} have different numbers of examples ({sorted(sizes)}).")
    if isinstance(x, Tensor):
        if x.is_complex():
            raise SelectionError(f"{name} has complex dtype {x.dtype}; give real and imaginary parts as two channels.")
        if x.is_floating_point() and not finite(x):
            raise SelectionError(f"{name} contains NaN or Inf: every kernel with that example would too. Remove it.")


def check_selection(subject: Subject) -> None:
    """Is something asked for, and is it there?"""
    known = list(dict.fromkeys([*subject.survey.maps, *subject.modules]))
    if not subject.survey.maps and not subject.modules:
        raise SelectionError("no weight layer was found: the model has no parameter that a linear map, a norm or a plain "
                             "operation of its forward pass uses. Is it an empty container, or are its weights buffers?")
    if subject.layers is None or callable(subject.layers) or not len(subject.layers):
        if not subject.maps and not subject.modules:
            raise SelectionError(f"layers= selects none of: {', '.join(known)}.")
        return
    for pattern in subject.layers:
        idle = {k for k, remark in subject.survey.notes.items() if remark.mark is Mark.IDLE}
        if any(matches(k, pattern) and k not in idle for k in [*subject.maps, *subject.modules]):
            continue
        for name, remark in subject.survey.notes.items():
            if matches(name, pattern):
                raise CaptureError(f"layer {name!r} cannot be measured: {remark.text}.")
        raise SelectionError(f"layers={pattern!r} matches nothing. This model has: {', '.join(known)}. "
                             f"Patterns like 'h.*.attn.*' work too.")


def check_labels(subject: Subject) -> None:
    """Labels of every output, and random combinations of them, are large arrays: a vocabulary times a text is not small."""
    n, k = subject.probe.n, subject.survey.outputs
    need = 8 * k * n if subject.probe.y is not None else 0
    if need > max(subject.memory, SMALL):
        raise MemoryBudgetError(
            f"memory={show_bytes(subject.allowed)} cannot hold the labels of {k:,} outputs for {n} examples. The smallest that "
            f"works here is above memory='{show_bytes(need)}'; pick fewer outputs, e.g. those of the last token: "
            f"output=lambda out: out.logits[:, -1].")
