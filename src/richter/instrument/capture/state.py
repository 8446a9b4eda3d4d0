"""Inputs and outputs of a forward pass: weights as aliases, so that the model's own are never touched; examples,
which are counted, chosen, moved, copied and passed on; and the one tensor that counts as the output."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from richter.core import DivergedError, SelectionError
from richter.layers import View, view_of

TILE = 2 ** 20  # numbers of a large weight at a time
Inputs = Any  # a tensor, or a tuple or dict of tensors, examples first
Output = Callable[[Any], Tensor]  # picks the tensor from what a model returns


class State(dict[str, Tensor]):
    """Weights of a model, by the names of its parameters and buffers, and where they stand in it. ``like``: other weights of the
    same model, which know its modules already."""

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor], like: State | None = None) -> None:
        super().__init__(weights)
        self.model = model
        modules = dict(model.named_modules(remove_duplicate=False))
        if like is None:
            self.named: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
            views = {module: (name, view_of(name, module)) for module, name in self.named.items()}
            self.views: dict[nn.Module, tuple[str, View]] = {module: view for module, view in views.items() if view[1]}
        else:
            self.named, self.views = like.named, like.views
        self.parametrised = [module for module in modules.values() if parametrize.is_parametrized(module)]
        self.places: list[tuple[dict[str, Any], str, Tensor]] = []
        self.shared: list[tuple[str, Tensor]] = []  # those that have their memory from the model's own parameters
        self.volatile: set[int] = set()  # ids of the buffers that a forward pass writes into
        self.dtypes: set[torch.dtype] = set()  # of the weights, and of what passes compute
        self.precision = torch.get_default_dtype()
        for name, weight in self.items():
            owner, _, attribute = name.rpartition(".")
            module = modules[owner]
            own = attribute in module._parameters
            box: dict[str, Any] = module._parameters if own else module._buffers
            self.places.append((box, attribute, weight))
            if weight.is_floating_point():
                self.computes_in(weight.dtype)
            if own and not isinstance(weight, nn.Parameter):  # torch asks: a slice of a ParameterList wraps anything else anew
                vars(weight).update(vars(box[attribute]), _is_param=True)  # and models read what they have written on them
            if own and weight.layout is torch.strided and weight.data_ptr() == box[attribute].data_ptr():
                self.shared.append((name, box[attribute]))

    def computes_in(self, dtype: torch.dtype) -> None:
        """Keep ``precision`` the coarsest dtype: a softmax in single precision rounds a network in double precision too."""
        if dtype not in self.dtypes:
            self.dtypes.add(dtype)
            self.precision = max(self.dtypes, key=lambda d: torch.finfo(d).eps)

    def exchanged(self, others: Mapping[int, Tensor]) -> State:
        """Copy with some weights replaced; keys are the ids of the replaced weights."""
        result = State(self.model, {name: others.get(id(weight), weight) for name, weight in self.items()}, like=self)
        result.volatile = {id(others[key]) if key in others else key for key in self.volatile}
        return result

    @contextlib.contextmanager
    def in_place(self, fresh: bool = False) -> Iterator[None]:
        """Context in which the model has these weights and no module hook is called. ``fresh``: buffers that passes write into
        are copies, so that every pass starts from the same numbers."""
        own = [(box, attribute, box[attribute]) for box, attribute, _ in self.places]
        try:
            for box, attribute, weight in self.places:
                box[attribute] = weight.clone() if fresh and id(weight) in self.volatile else weight
            yield
        finally:
            for box, attribute, value in own:
                box[attribute] = value

    def accumulated(self) -> dict[int, Tensor]:
        """Remove and return what was added to ``.grad`` of the weights, by their id."""
        sums: dict[int, Tensor] = {}
        for weight in self.values():
            if weight.requires_grad and weight.is_leaf and weight.grad is not None:
                sums[id(weight)] = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
                weight.grad = None
        return sums


def state_of(model: nn.Module, initial: Mapping[str, Tensor] | None = None, copied: Collection[str] | None = None,
             like: State | None = None) -> State:
    """Aliases of all parameters (the same memory, no hooks, all requiring a gradient) and copies of all buffers; values from
    ``initial`` where it is given. Parameters in ``copied`` (None: all of them) are copied too, because the forward pass writes
    into them. ``like``: other weights of this model."""
    state: dict[str, Tensor] = {}
    aliases: dict[int, Tensor] = {}  # one for each parameter, under however many names
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) not in aliases:
            value = p.detach() if initial is None else initial[name].detach().to(p.device, p.dtype)
            if copied is None or name in copied or value.is_inference():
                value = value.clone()
            aliases[id(p)] = value.requires_grad_() if value.is_floating_point() else value
        state[name] = aliases[id(p)]
    for name, b in model.named_buffers(remove_duplicate=False):
        value = initial[name].to(b.device) if initial is not None and name in initial else b
        state[name] = value.detach().clone()
    result = State(model, state, like)
    result.volatile = {id(state[name]) for name, _ in model.named_buffers(remove_duplicate=False) if copied and name in copied}
    return result


class Own(State):
    """The parameters of a model themselves, as in training, and copies of its buffers. Copies stand for parameters that a pass
    writes into (they are not in ``shared``), that are frozen, or whose gradients a hook of the user's would hear of."""

    def __init__(self, state: State) -> None:
        own = {id(state[name]): p for name, p in state.shared if p.requires_grad and not p._backward_hooks}
        for weight in state.values():
            if id(weight) not in own:
                copy = weight.detach().clone()
                own[id(weight)] = nn.Parameter(copy) if weight.requires_grad else copy
        buffers = {name: b.detach().clone() for name, b in state.model.named_buffers(remove_duplicate=False)}
        super().__init__(state.model, {name: own[id(weight)] for name, weight in state.items()} | buffers)

    def accumulated(self) -> dict[int, Tensor]:
        """Nothing: what lies in ``.grad`` is the user's."""
        return {}


def moved_in_last_place(state: State, names: Collection[str], seed: int = 2) -> State:
    """Copies of some weights in which every number is moved by about one unit in the last place, up or down at random; of large
    ones some numbers at a time."""
    eps, draw = torch.finfo(state.precision).eps, torch.Generator().manual_seed(seed)
    moved: dict[int, Tensor] = {}
    for w in {id(state[k]): state[k] for k in names}.values():
        near = torch.empty_like(w, memory_format=torch.contiguous_format, requires_grad=False)
        for there, here in zip(near.view(-1).split(TILE), w.detach().reshape(-1).split(TILE), strict=True):
            signs = torch.randint(0, 2, here.shape, generator=draw).to(w) * 2 - 1
            torch.add(here, eps * signs * here, out=there)
        moved[id(w)] = near.requires_grad_(w.requires_grad)
    return state.exchanged(moved)


def device_of(model: nn.Module) -> torch.device:
    """Device of the first parameter; the CPU if there is none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def count(x: Inputs) -> int:
    """The number of examples of a tensor, tuple or dict of tensors."""
    if isinstance(x, (dict, tuple, list)) and len(x):
        return count(next(iter(x.values() if isinstance(x, dict) else x)))
    if not isinstance(x, Tensor) or x.dim() == 0:
        raise SelectionError(f"inputs are tensors, or tuples or dicts of tensors, with the examples first; not "
                             f"{'a number' if isinstance(x, Tensor) else type(x).__name__}.")
    return x.shape[0]


def select(x: Inputs, index: slice | Tensor | Sequence[int]) -> Inputs:
    """Some examples of a tensor, or of a tuple or dict of tensors; other values are passed on."""
    if isinstance(x, Tensor):
        return x[index.to(x.device)] if isinstance(index, Tensor) else x[index]
    if isinstance(x, dict):
        return {k: select(v, index) for k, v in x.items()}
    return tuple(select(v, index) for v in x) if isinstance(x, (tuple, list)) else x


def copy_of(x: Inputs) -> Inputs:
    """Copy of the inputs, because a model may write into them."""
    return _each(x, Tensor.clone)


def to_device(x: Inputs, device: torch.device) -> Inputs:
    """Move a tensor, or a tuple, list or dict of tensors; tensors made in inference mode are copied out of it."""
    return _each(x, lambda t: (t.clone() if t.is_inference() else t.detach()).to(device))


def _each(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Inputs of the same form with a function applied to each tensor; other values are passed on."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, Mapping):
        return {k: _each(v, change) for k, v in x.items()}
    return tuple(_each(v, change) for v in x) if isinstance(x, (tuple, list)) else x


def arguments(model: nn.Module, x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of a probe's inputs as arguments of forward: a tuple by position, a dict by keyword if forward has these names."""
    x = copy_of(x)
    if isinstance(x, Mapping):
        accepted = inspect.signature(model.forward).parameters
        by_name = all(k in accepted for k in x) or any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        return ((), dict(x)) if by_name else ((x,), {})
    return (tuple(x), {}) if isinstance(x, (tuple, list)) else ((x,), {})


def pick(returned: Any, output: Output | None = None) -> Tensor:
    """The tensor that counts as the model's output, from what its forward returned; ``output`` is the user's own function."""
    if output is not None:
        if not callable(output):
            raise SelectionError(f"output={output!r}: a function that picks the tensor is needed, e.g. output=lambda out: "
                                 f"out['logits'].")
        f = output(returned)
        if not isinstance(f, Tensor):
            raise SelectionError(f"output= returned {type(f).__name__}, not a tensor. "
                                 f"Return one floating point tensor with the examples first.")
        return f
    if isinstance(returned, Tensor):
        return returned
    if isinstance(returned, Mapping):
        tensors = [v for v in returned.values() if isinstance(v, Tensor)]
        if isinstance(returned.get("logits"), Tensor):
            return returned["logits"]
        if len(tensors) == 1:
            return tensors[0]
        raise SelectionError(f"the model returned a dict with {sorted(map(str, returned))}, and which of them is the output "
                             f"is not known. Say so: output=lambda out: out['...'].")
    if isinstance(returned, (tuple, list)) and returned and isinstance(returned[0], Tensor):
        return returned[0]
    raise SelectionError(f"the model returned {type(returned).__name__}, not a tensor. "
                         f"Say which tensor is its output: output=lambda out: ....")


def outputs_of(model: nn.Module, x: Inputs, output: Output | None = None, graph: bool = False) -> Tensor:
    """Outputs of some examples, by default without a graph. Call it inside ``quiet``."""
    args, kwargs = arguments(model, x)
    with torch.set_grad_enabled(graph):
        return pick(model(*args, **kwargs), output)


def check_finite(f: Tensor) -> None:
    """Outputs from which statistics can be made."""
    if not torch.isfinite(f.detach().sum()) and not torch.isfinite(f).all():  # a sum is quick, and may overflow
        raise DivergedError("the model's output on the probe contains NaN or Inf, so every statistic of it would too. "
                            "Look for a diverged run, or inputs outside the range the model was trained on.")


def running_norms(model: nn.Module) -> list[tuple[_NormBase, list[str]]]:
    """Norms that keep running statistics, each with the names of its buffers."""
    return [(m, [f"{name}.{k}" if name else k for k, _ in m.named_buffers(recurse=False)]) for name, m in model.named_modules()
            if isinstance(m, _NormBase) and m.track_running_stats and m.running_mean is not None]


def understood(model: nn.Module) -> set[str]:
    """Names of buffers that the initial network takes from ``initial`` or recomputes: running statistics of norms, and buffers of
    parametrisations."""
    parts = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, ParametrizationList))
    return {k for _, buffers in running_norms(model) for k in buffers} | {
        k for k, _ in model.named_buffers(remove_duplicate=False) if k.startswith(parts)}
