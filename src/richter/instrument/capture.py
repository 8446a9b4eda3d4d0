"""The only file that hooks or intercepts anything: one forward pass of a model that remembers what every linear map
read and where its output stands in the graph, so that any number of backward passes can ask for ``g``.

    with quiet(model):
        seen = forward(model, x, state_of(model))
        g = seen.backward(V)          # d <V, f> / dz for every call of every map

Weights are replaced for the pass by aliases (same memory, no hooks, all requiring a gradient) and buffers by copies:
the model's own parameters, gradients, buffers and hooks are never touched.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from richter.core import CaptureError, SelectionError
from richter.layers import LinearMap, View, view_of
from richter.layers.attention import attention_in_parts, split, whole
from richter.layers.embedding import LOOKUP

Inputs = Any  # a tensor, or a tuple or dict of tensors, examples first
Output = Callable[[Any], Tensor]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Call:
    """One application of a linear map: what it read, and the place in the graph that it wrote."""

    name: str
    map: LinearMap
    module: nn.Module
    weight: Tensor
    read: Tensor
    edge: GradientEdge
    shape: torch.Size  # of what it wrote
    version: int  # of `read`: an in-place change afterwards must not go unnoticed

    def inputs(self, rows: Tensor | None = None) -> Tensor:
        """h [b, s, d_in] as the layer saw it (b is its own first axis, not yet the examples); of some ``rows`` of b."""
        if self.read._version != self.version:
            raise CaptureError(f"layer {self.name!r}: its input was changed in place after it was read, so what it read "
                               f"is lost. Replace the in-place operation, or leave the layer out with layers=....")
        read = self.read if rows is None else self.read[rows]
        return read if self.map.kind == "diagonal" else self.map.inputs(self.module, read)


@dataclass(frozen=True)
class Pass:
    """One forward pass: outputs ``f`` with their graph, and every call of every linear map in it."""

    f: Tensor
    calls: list[Call]
    aliases: State
    skips: bool = False  # what backward passes to the calls do not need: there are no gradients of weights
    differentiates: bool = False  # the model itself does, inside its forward pass

    def backward(self, V: Tensor, also: Sequence[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
        """d <V, f> / dz for each call, and the same derivative in the tensors of ``also``; zero where unused."""
        assert not (also and self.skips)
        places: list[Any] = [*(c.edge for c in self.calls), *also]
        if not places:
            return [], []
        found = torch.autograd.grad(self.f, places, grad_outputs=V.to(self.f.dtype).reshape(self.f.shape),
                                    retain_graph=True, allow_unused=True)
        cut = len(self.calls)
        g = [self.f.new_zeros(c.shape) if d is None else d.to_dense() if d.is_sparse else d
             for c, d in zip(self.calls, found[:cut], strict=True)]
        return g, [torch.zeros_like(t) if d is None else d.to_dense() if d.is_sparse else d
                   for t, d in zip(also, found[cut:], strict=True)]


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel, DataParallel and torch.compile."""
    if not isinstance(model, nn.Module):
        raise SelectionError(f"the model is a {type(model).__name__}; a torch.nn.Module is needed.")
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod") and isinstance(model._orig_mod, nn.Module):
            model = model._orig_mod
        else:
            return model


def state_of(model: nn.Module, initial: Mapping[str, Tensor] | None = None, copied: Collection[str] | None = None) -> State:
    """Aliases of all parameters and copies of all buffers; values from ``initial`` where it is given. Parameters in
    ``copied`` (None: all of them) are copied too, because the forward pass writes into them."""
    state: State = {}
    shared: dict[int, Tensor] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) not in shared:
            value = p.detach() if initial is None else initial[name].detach().to(p.device, p.dtype)
            if copied is None or name in copied or value.is_inference():
                value = value.clone()
            shared[id(p)] = value.requires_grad_() if value.is_floating_point() else value
        state[name] = shared[id(p)]
    for name, b in model.named_buffers(remove_duplicate=False):
        value = initial[name].to(b.device) if initial is not None and name in initial else b
        state[name] = value.detach().clone()
    return state


def written(model: nn.Module, x: Inputs, output: Output | None = None) -> set[str]:
    """Names of the parameters that a forward pass changes in place (``max_norm`` of an embedding, a hand-made
    projection): rehearsed on copies, so that nothing of the model's own is touched."""
    state = state_of(model, copied=None)
    before = {name: t._version for name, t in state.items()}
    forward(model, x, state, output=output, record=False)
    return {name for name, t in state.items() if t._version != before[name]}


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def to_device(x: Inputs, device: torch.device) -> Inputs:
    """Move a tensor, or a tuple, list or dict of tensors; tensors made in inference mode are copied out of it."""
    if isinstance(x, Tensor):
        return (x.clone() if x.is_inference() else x.detach()).to(device)
    if isinstance(x, Mapping):
        return {k: to_device(v, device) for k, v in x.items()}
    return tuple(to_device(v, device) for v in x) if isinstance(x, (tuple, list)) else x


def pick(found: Any, output: Output | None = None) -> Tensor:
    """The tensor that counts as the model's output."""
    if output is not None:
        if not callable(output):
            raise SelectionError(f"output={output!r}: a function that picks the tensor is needed, e.g. output=lambda out: "
                                 f"out['logits'].")
        found = output(found)
        if not isinstance(found, Tensor):
            raise SelectionError(f"output= returned {type(found).__name__}, not a tensor. "
                                 f"Return one floating point tensor with the examples first.")
        return found
    if isinstance(found, Tensor):
        return found
    if isinstance(found, Mapping):
        if isinstance(found.get("logits"), Tensor):
            return found["logits"]
        tensors = {k: v for k, v in found.items() if isinstance(v, Tensor)}
        if len(tensors) == 1:
            return next(iter(tensors.values()))
        raise SelectionError(f"the model returned a dict with {sorted(map(str, found))}, and which of them is the output "
                             f"is not known. Say so: output=lambda out: out['...'].")
    if isinstance(found, (tuple, list)) and found and isinstance(found[0], Tensor):
        return found[0]
    raise SelectionError(f"the model returned {type(found).__name__}, not a tensor. "
                         f"Say which tensor is its output: output=lambda out: ....")


def arguments(model: nn.Module, x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a probe's inputs are passed: a tuple as positions, a dict by keyword when forward takes these names."""
    if isinstance(x, Mapping):
        accepted = inspect.signature(model.forward).parameters
        by_name = all(k in accepted for k in x) or any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        return ((), dict(x)) if by_name else ((x,), {})
    return (tuple(x), {}) if isinstance(x, (tuple, list)) else ((x,), {})


_OF_TORCH = set(vars(nn.Module()))  # parameters, buffers, modules, hooks: handled by their owners


@contextlib.contextmanager
def quiet(model: nn.Module, mode: str = "eval", seed: int = 0) -> Iterator[None]:
    """Everything a measurement could disturb, put back afterwards whatever happens in between: random streams,
    train/eval flags, what modules keep in their attributes, autocast, gradient and inference mode. Compiled code runs
    eagerly inside."""
    if mode not in ("eval", "train"):
        raise SelectionError(f"mode={mode!r}: choose 'eval' (default) or 'train'.")
    modules = list(model.modules())
    attributes = [dict(vars(m)) for m in modules]  # `training` is one of them
    containers = [(box, box.copy()) for was in attributes for name, box in was.items()
                  if type(box) in (list, dict, set) and name not in _OF_TORCH]  # what a model remembers
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    kinds = {"cpu"} | {p.device.type for p in model.parameters()}
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002  the global streams themselves
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices))
            stack.callback(_BASE_SEED.reset, _BASE_SEED.set(seed))
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for m in modules:
                m.training = mode == "train"  # not m.train(): some models act on being switched
            yield
    finally:
        for m, was in zip(modules, attributes, strict=True):
            now = vars(m)
            for name in now.keys() - was.keys():
                del now[name]
            now.update({name: value for name, value in was.items() if now.get(name) is not value})
        for box, before in containers:
            box.clear()
            box.extend(before) if isinstance(box, list) else box.update(before)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)


_BASE_SEED: contextvars.ContextVar[int] = contextvars.ContextVar("richter_seed", default=0)


def _seed(seed: int, devices: Sequence[int]) -> None:
    """Seed the streams of the CPU and of these GPUs; torch.manual_seed would seed every device there is."""
    torch.default_generator.manual_seed(seed)
    for i in devices:
        torch.cuda.default_generators[i].manual_seed(seed)


def forward(model: nn.Module, x: Inputs, state: State, *, output: Output | None = None,
            expand: Mapping[str, int] | None = None, silent: Collection[str] | None = None, record: bool = True,
            seed: int = 0) -> Pass:
    """Run the model on ``x`` with the weights of ``state`` and remember every call of every linear map.

    ``expand`` names maps whose output is shared by all examples (a position embedding) and the number of examples:
    the output is given an example axis, so that each example gets a gradient of its own. ``silent`` makes many backward
    passes cheaper, for what they ask of the calls alone: derivatives of activations are computed once, and those positions
    of the named linear layers are skipped of which nothing is asked. ``seed``: what the model draws (dropout in train mode)
    is the same in every pass with the same seed. Call it inside ``quiet``.
    """
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    _seed(_BASE_SEED.get() * 1_000_003 + seed, sorted(devices))
    recorder = _Recorder(model, state, expand or {}, silent)
    args, kwargs = arguments(model, copy_of(x))
    own = {name: (p, p._version) for name, p in model.named_parameters()}
    with (recorder if record else contextlib.nullcontext()), _without_checkpoints(), _parametrised_once():
        found = torch.func.functional_call(model, state, args, kwargs, tie_weights=False)
    for name, (p, version) in own.items():
        if p._version != version:
            raise CaptureError(f"the forward pass wrote into parameter {name!r} on some inputs of the probe and not on its first "
                               f"ones, on which this is rehearsed: the model's own weight has been changed by it. Write into a "
                               f"buffer instead, or put such an input first in the probe.")
    f = pick(found, output)
    if not f.is_floating_point():
        raise CaptureError(f"the model's output has dtype {f.dtype}. Richter differentiates real outputs; "
                           f"pick or convert one with output=....")
    if not f.requires_grad:
        raise CaptureError("the model's output does not depend on any parameter that autograd can follow: it was detached, or "
                           "computed under no_grad or inference_mode, or uses no weights. Measure the part that is trained.")
    aliases = {k: v for k, v in state.items() if v.requires_grad}
    return Pass(f, recorder.calls, aliases, silent is not None, recorder.differentiates)


@contextlib.contextmanager
def kept_for_backward(state: State) -> Iterator[dict[int, int]]:
    """Bytes that forward passes keep for their backward passes, by storage, without the weights."""
    kept: dict[int, int] = {}
    weights = {t.untyped_storage().data_ptr() for t in state.values()}

    def count(t: Tensor) -> Tensor:
        place = t.untyped_storage()
        if place.data_ptr() not in weights:
            kept[place.data_ptr()] = place.nbytes()
        return t

    with saved_tensors_hooks(count, lambda t: t):
        yield kept


def copy_of(x: Inputs) -> Inputs:
    """A model may write into its input; the probe's own examples stay as they are."""
    if isinstance(x, Tensor):
        return x.clone()
    if isinstance(x, Mapping):
        return {k: copy_of(v) for k, v in x.items()}
    return tuple(copy_of(v) for v in x) if isinstance(x, (tuple, list)) else x


@contextlib.contextmanager
def _parametrised_once() -> Iterator[None]:
    """Parametrised weights are computed once in a pass, and what a surrounding ``parametrize.cached()`` of the user's
    keeps is neither used nor replaced."""
    cache: dict[Any, Any] = getattr(parametrize, "_cache", {})
    before = dict(cache)
    cache.clear()
    try:
        with parametrize.cached():
            yield
    finally:
        cache.clear()
        cache.update(before)


@contextlib.contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Activation checkpointing recomputes inside backward, where the recorder is gone (and its older form cannot
    differentiate toward activations at all): during a capture the checkpointed function is simply called."""
    class Called:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return function(*args)

    def called(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    names = {"CheckpointFunction": Called, "_checkpoint_without_reentrant_generator": called}
    before = {name: getattr(checkpointing, name) for name in names if hasattr(checkpointing, name)}
    for name in before:
        setattr(checkpointing, name, names[name])
    try:
        yield
    finally:
        for name, was in before.items():
            setattr(checkpointing, name, was)


_MATMULS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
_ADDMMS = {torch.addmm, Tensor.addmm}
_DERIVATIVES = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
_CURVED = {F.gelu, F.silu, F.mish, F.softplus, F.logsigmoid}


@dataclass
class _Recorder(TorchFunctionMode):
    model: nn.Module
    state: State
    expand: Mapping[str, int]
    silent: Collection[str] | None = None
    calls: list[Call] = field(default_factory=list)
    differentiates: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        for name, t in self.state.items():
            if t.requires_grad:
                self.names.setdefault(id(t), name)
        self.modules = dict(self.model.named_modules())
        self.views: dict[nn.Module, tuple[str, View]] = {}
        for name, module in self.modules.items():
            if module not in self.views and (view := view_of(name, module)):
                self.views[module] = (name, view)
        self.path: list[nn.Module] = []  # the modules whose forward is running

    def __enter__(self) -> _Recorder:
        self.handles: list[Any] = []
        try:
            for module in self.modules.values():
                self.handles.append(module.register_forward_pre_hook(lambda m, _: self.path.append(m), prepend=True))
                # first of all hooks: a user's may change the output, and that is no longer the linear map
                self.handles.append(module.register_forward_hook(self._leave, with_kwargs=True, prepend=True))
            super().__enter__()
        except BaseException:
            self._unhook()
            raise
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            super().__exit__(*exc)
        finally:
            self._unhook()

    def _unhook(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], z: Any) -> Any:
        self.path.pop()
        if module not in self.views or not isinstance(z, Tensor):
            return None
        with torch._C.DisableTorchFunction():
            return self._module_called(module, args[0] if args else next(iter(kwargs.values())), z)

    def _module_called(self, module: nn.Module, x: Tensor, z: Tensor) -> Tensor:
        name, view = self.views[module]
        x, n = x.detach(), self.expand.get(name)
        if n is not None:
            z, x = _with_examples(z, n), _with_examples(x, n, lookup=True)
        elif z._is_view():
            z = z.clone()  # an in-place change of a view would cut the graph at the edge kept below
        for suffix, m in view.items():
            weight = getattr(module, m.weight, None)
            if weight is None or not z.requires_grad:  # a norm without affine part
                continue
            read = m.inputs(module, x).clone() if m.kind == "diagonal" else x
            self._add(f"{name}.{suffix}" if suffix and name else name or suffix, m, module, weight, read, z)
        return z

    def _add(self, name: str, m: LinearMap, module: nn.Module, weight: Tensor, x: Tensor, z: Tensor) -> None:
        self.calls.append(Call(name, m, module, weight, x, get_gradient_edge(z), z.shape, x._version))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return attention_in_parts(self._project, *args, **kwargs)
        self.differentiates |= func in _DERIVATIVES
        if self._curves(func, args, kwargs):
            return _Curved.apply(args[0], lambda x: func(x, *args[1:], **kwargs))
        z = _Silent.apply(*args) if self._skips(func, args, kwargs) else func(*args, **kwargs)
        use = self._use(func, args, kwargs) if isinstance(z, Tensor) and z.requires_grad else None
        if use is None:
            return z
        x, weight, m = use
        if z._is_view():
            z = z.clone()
        self._add(self._name(weight, m), m, self._owner(weight)[1], weight, x.detach(), z)
        return z

    def _curves(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Is this an activation with a derivative worth keeping, not in place, that autograd will ask for?"""
        if self.silent is None or func not in _CURVED or not args or not isinstance(args[0], Tensor) or not args[0].requires_grad:
            return False
        in_place = kwargs.get("inplace", False) or (len(args) > 1 and args[1] is True)
        return not in_place and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    def _skips(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Is this the product of a linear layer that is silent at most positions? Of its own parameters: through a weight that
        is computed, other maps would be asked for their share."""
        if func is not F.linear or not self.silent or not self.path or kwargs or len(args) != 3:
            return False
        computed = any(t is not None and t.grad_fn is not None for t in args[1:])
        return not computed and self.views.get(self.path[-1], ("", {}))[0] in self.silent and args[1] is self.path[-1].weight

    def _use(self, func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, LinearMap] | None:
        """A parameter used as a matrix outside its own module: (input, parameter, map), or nothing to see."""
        if func is F.linear:
            x, w = [*args, *kwargs.values()][:2]
            transposed = False
        elif func in _MATMULS and len(args) == 2:
            (x, w), transposed = args, True
        elif func in _ADDMMS and len(args) == 3:
            (_, x, w), transposed = args, True
        elif func is torch.einsum and len(args) == 3 and isinstance(args[0], str):
            equation, x, w = args
            order = _is_matrix_product(equation)
            if order is None:
                return None
            transposed = order
        elif func is F.embedding:
            x, w = [*args, *kwargs.values()][:2]
            return (x, w, LOOKUP[""]) if self._outside(w) and not any(args[2:]) and len(kwargs) == 0 else None
        else:
            return None
        if not isinstance(w, Tensor) or not isinstance(x, Tensor) or w.dim() != 2:
            return None
        base = w._base
        if base is not None and id(base) in self.names and w.shape == base.shape[::-1] \
                and w.stride() == base.stride()[::-1]:
            w, transposed = base, not transposed
        if not self._outside(w):
            return None
        return x, w, (_TRANSPOSED if transposed else _AS_IT_IS)

    def _outside(self, w: Any) -> bool:
        """Is ``w`` a parameter, and not the weight of the module whose own forward is running?"""
        if id(w) not in self.names:
            return False
        running = self.path[-1] if self.path else None
        view = self.views.get(running, ("", {}))[1] if running is not None else {}
        return not any(getattr(running, m.weight, None) is w for m in view.values())

    def _owner(self, w: Tensor) -> tuple[str, nn.Module]:
        name = self.names[id(w)].rpartition(".")[0]
        return name, self.modules[name]

    def _name(self, w: Tensor, m: LinearMap) -> str:
        """``block.proj`` for a raw parameter; a weight named "weight" goes by its module, read backwards by ``.T``."""
        parameter = self.names[id(w)]
        name, module = self._owner(w)
        if parameter.rpartition(".")[2] != "weight":
            return parameter
        known = self.views.get(module, ("", {}))[1]
        if not known or (len(known) == 1 and known.get("") is not None and m is _AS_IT_IS and known[""].kind == "dense"):
            return name
        return f"{name}.T" if m is _TRANSPOSED or (known.get("") is not None and known[""].kind == "lookup") else parameter

    def _project(self, which: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One projection of nn.MultiheadAttention, called from attention_in_parts."""
        z = F.linear(x, weight, bias)
        attention = self.path[-1] if self.path else self.model
        name = next((k for k, m in self.modules.items() if m is attention), "")
        stem = f"{name}." if name else ""
        if which == "out_proj":
            owner, m, parameter = getattr(attention, "out_proj", attention), whole("weight"), weight
        elif weight._base is not None and id(weight._base) in self.names:
            owner, m, parameter = attention, split(which), weight._base
        else:
            owner, m, parameter = attention, whole(f"{which}_proj_weight"), weight
        z = z.clone() if z._is_view() else z
        self._add(stem + which, m, owner, parameter, x.detach(), z)
        return z


class _Curved(torch.autograd.Function):
    """A function of single numbers whose derivative costs more than a product: it is computed once for all backward passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = function(x)
            ctx.save_for_backward(*torch.autograd.grad(y, x, torch.ones_like(y)))
        return y.detach()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.saved_tensors[0], None


class _Silent(torch.autograd.Function):
    """F.linear with a backward pass, to its input, over the positions of which something is asked; the others give zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weight, asked = ctx.saved_tensors[0].to(g.dtype), g.flatten(0, -2)  # autocast multiplies in a precision of its own
        rows = (asked.abs().amax(-1) != 0).nonzero()[:, 0]
        found = g.new_zeros(len(asked), weight.shape[1]).index_copy_(0, rows, asked[rows] @ weight)
        return found.view(*g.shape[:-1], -1), None, None  # no gradients of parameters: see Pass.backward


_AS_IT_IS = whole("weight")
_TRANSPOSED = LinearMap(matrix=lambda m, w: w.T, inputs=_AS_IT_IS.inputs, outputs=_AS_IT_IS.outputs)


def _is_matrix_product(equation: str) -> bool | None:
    """"nd,do->no": True (W is d_in x d_out); "nd,od->no": False; anything else: None."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if not arrow or len(operands) != 2 or len(operands[1]) != 2 or not operands[0] or not out:
        return None
    (x, w), (i, o) = operands, (operands[0][-1], out[-1])
    if x[:-1] != out[:-1] or i == o or i in x[:-1] or o in x[:-1]:
        return None
    return {i + o: True, o + i: False}.get(w)


def _with_examples(t: Tensor, n: int, lookup: bool = False) -> Tensor:
    """[1, T, ...] or [T, ...] -> [n, T, ...]: a copy for each example."""
    rank = 2 if lookup and not t.is_floating_point() else 3
    t = t if t.dim() >= rank and t.shape[0] == 1 else t.unsqueeze(0)
    return t.expand(n, *t.shape[1:]).clone()
