"""One forward pass that remembers what every linear map read and where its output stands in the graph, the backward passes that
start from there, and products with the Jacobian.

Hooks on every module see the calls of known layers. A torch function mode sees all other calls of torch functions; ``HANDLERS``
says what is done with them.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from richter.core import CaptureError, RichterError
from richter.core.values import trim
from richter.instrument.capture.attributes import attributes_kept
from richter.instrument.capture.quiet import Hooking, checkpoints_called, parametrised_once, seeded, single_examples_right
from richter.instrument.capture.recompute import Again, Checkpoints, unkept
from richter.instrument.capture.state import Inputs, Output, State, arguments, count, pick, state_of
from richter.instrument.capture.uses import READERS, Reader, Scope, Use
from richter.layers import TAKEN_APART, LinearMap, View
from richter.layers.linear import rows_of

# ----------------------------------------------------------------------------------------------------------- shortcuts
# Cheaper backward passes: derivatives of activations are computed once for all of them; and where only gradients toward what
# linear maps wrote are wanted and none of weights, positions from which no output is reached are skipped.


class ParametersWanted:
    """Are gradients of parameters wanted of the next backward pass?"""

    wanted = False


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
        """Multiply the incoming gradient by the derivative saved in the forward pass."""
        return g * ctx.saved_tensors[0], None


def _itself(t: Tensor) -> Tensor:
    """Return the tensor unchanged."""
    return t


class Silent(torch.autograd.Function):
    """F.linear with a backward pass over the positions whose gradient is not zero; the others give zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parameters: ParametersWanted) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.biased = parameters, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of an embedding, computed only at positions whose incoming gradient is not zero."""
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


# --------------------------------------------------------------------------------------------------------------- calls
# What a forward pass has left: calls of linear maps, and the graph behind the outputs, from which any number of backward passes
# start.

TOGETHER = 2 ** 27  # bytes of gradients that are held at once, where they can be had one after another


@dataclass(frozen=True)
class Call:
    """One application of a linear map: its inputs, and the place of its outputs in the graph."""

    name: str
    map: LinearMap
    module: nn.Module
    weight: Tensor
    read: Tensor
    edge: GradientEdge
    shape: torch.Size  # of what it wrote
    version: int  # of `read`: an in-place change afterwards must not go unnoticed
    given: bool = False  # did a module read what depends on no weight: the model's input? (Of other uses this is not known)

    def inputs(self, rows: Tensor | None = None) -> Tensor:
        """h [b, s, d_in] as the layer saw it (b is its own first axis, not yet the examples); of some ``rows`` of b."""
        if self.read._version != self.version:
            raise CaptureError(f"layer {self.name!r}: its input was changed in place after it was read, so what it read "
                               f"is lost. Replace the in-place operation, or leave the layer out with layers=....")
        read = self.read if rows is None else self.read[rows]
        return read if self.map.kind == "diagonal" else self.map.inputs(self.module, read)

    def index(self) -> Tensor:
        """Position of each entry of the matrix in the flattened weight."""
        return index_of(self.map, self.module, self.weight.shape, self.weight.device)


def index_of(view: LinearMap, module: nn.Module, shape: torch.Size, device: torch.device) -> Tensor:
    """Position of each entry of a map's matrix in a flattened weight of this shape, in the shape of the matrix."""
    return view.matrix(module, torch.arange(shape.numel(), device=device).view(shape))


class Product(NamedTuple):
    """A product of tensors that depend on weights, with the number of calls of linear maps before it."""

    after: int
    operands: tuple[Tensor, ...]


@dataclass(frozen=True)
class Pass:
    """One forward pass: outputs ``f`` with their graph, and every call of every linear map in it."""

    f: Tensor
    calls: list[Call]
    state: State
    parameters: ParametersWanted = field(default_factory=ParametersWanted)  # some steps give their gradients only where wanted
    differentiates: bool = False  # the model itself does, inside its forward pass
    adds: set[int] = field(default_factory=set)  # ids of the weights to whose .grad the model's own backward passes have added
    called: Collection[nn.Module] = ()  # modules whose forward ran
    heard: Mapping[str, list[Call]] = field(default_factory=dict)  # calls by map, for what they read; not differentiated

    @property
    def aliases(self) -> dict[str, Tensor]:
        """Weights that a gradient of the outputs can reach, by name."""
        return {k: v for k, v in self.state.items() if v.requires_grad}

    def leaves(self) -> list[Tensor]:
        """Leaves of the graph behind the outputs: weights, and tensors that the model made to be differentiated."""
        return [variable for node in self._nodes() if (variable := getattr(node, "variable", None)) is not None]

    @cached_property
    def _hidden(self) -> list[Tensor]:
        """All leaves, if an autograd.Function of the model's own is among the outputs' graph: it may add to .grad in its backward
        pass, and only when all leaves are asked for, all of a backward pass runs."""
        return self.leaves() if any(isinstance(node, BackwardCFunction) and not ours(node) for node in self._nodes()) else []

    @cached_property
    def accumulates(self) -> bool:
        """Does the model add to .grad in a backward pass of its own?"""
        if self._hidden:
            self.backward(torch.ones_like(self.f), self._hidden)
        return bool(self.adds)

    def _nodes(self) -> Iterator[Any]:
        """Nodes of the graph behind the outputs."""
        seen, todo = set(), [self.f.grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                yield node
                todo += [following for following, _ in node.next_functions]

    def backward(self, V: Tensor, also: Sequence[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
        """d <V, f> / dz for each call, and the same derivative in the tensors of ``also``; zero where unused.

        The aliases stand in the model meanwhile: a model's own autograd.Function may run its modules again in its backward pass,
        and what it adds to ``.grad`` there is part of the derivative."""
        self.parameters.wanted = bool(also)
        places: list[Any] = [*(c.edge for c in self.calls), *also]
        if not places:
            return [], []
        cut, end = len(self.calls), len(places)
        if also:
            places += self._hidden
        with self.state.in_place(), checkpoints_called():
            asked = Asked.apply(self.f, V.to(self.f.dtype).reshape(self.f.shape), not self.calls)
            gradients = torch.autograd.grad(asked, places, retain_graph=True, allow_unused=True)
        added = self.state.accumulated()
        self.adds.update(added)
        g = [self.f.new_zeros(c.shape) if d is None else _dense(d) for c, d in zip(self.calls, gradients[:cut], strict=True)]
        exact = [_dense(torch.zeros_like(t) if d is None else d) for t, d in zip(also, gradients[cut:end], strict=True)]
        return g, [d + added[id(t)] if id(t) in added else d for t, d in zip(also, exact, strict=True)] if added else exact

    def in_turns(self, V: Tensor, also: Sequence[Tensor]) -> Iterator[Tensor]:
        """d <V, f> in each of these tensors, one after another: of a large model in several backward passes, so that not all are
        held at once."""
        def groups() -> Iterator[list[Tensor]]:
            plain, some, held = replace(self, calls=[]), list[Tensor](), 0
            for t in also:
                size = t.numel() * t.element_size()
                if some and held + size > TOGETHER:
                    yield plain.backward(V, some)[1]
                    trim(held)  # or they would lie beside the next ones
                    some, held = [], 0
                some.append(t)
                held += size
            yield plain.backward(V, some)[1]
            trim(held)

        return itertools.chain.from_iterable(groups())


def _dense(d: Tensor) -> Tensor:
    """Return a dense tensor, whether the given one is sparse or not."""
    return d.to_dense() if d.is_sparse else d


# ------------------------------------------------------------------------------------------------------------ recorder


def forward(model: nn.Module, x: Inputs, state: State, *, output: Output | None = None,
            expand: Mapping[str, int] | None = None, silent: Collection[str] | None = None, record: bool = True,
            seed: int = 0, splits: Mapping[str, Mapping[str, Tensor]] | None = None,
            products: list[Product] | None = None, plain: bool = False, anew: Collection[str] = (),
            norms: Sequence[nn.Module] = ()) -> Pass:
    """Run the model on ``x`` with the weights of ``state`` and remember every call of every linear map.

    ``expand`` names maps whose output is shared by all examples (a position embedding) and the number of examples:
    the output is given an example axis, so that each example gets a gradient of its own. ``silent`` makes many backward
    passes cheaper: derivatives of activations are computed once, and in the named linear layers the positions from which no
    output is reached are skipped. ``seed``: what the model draws (dropout in train mode) is the same in every pass with it.
    ``splits``: modules that are several maps, and which outputs belong to each. ``products``: a list that gets the products of
    tensors with each other. ``plain``: attention without fused kernels, which can be differentiated but once and not forward.
    ``anew``: modules whose insides are not kept for backward passes but computed again. ``norms``: norms that use the statistics
    of these examples. Call it inside ``quiet``.
    """
    recorder = Recorder(model, state, expand or {}, silent, splits or {}, products, plain) if record else None
    args, kwargs = arguments(model, x)
    versions = [p._version for _, p in state.shared]
    with seeded(model, seed), batch_statistics(norms):
        with (attributes_kept(model), state.in_place(fresh=True), recorder or contextlib.nullcontext(), checkpoints_called(),
              single_examples_right(), parametrised_once(state.parametrised),
              Checkpoints(state, anew, recorder.begun if recorder else None) if anew else contextlib.nullcontext(),
              _noted(model, x)):
            returned = model(*args, **kwargs)
        _check_unwritten(state, versions)
        f = pick(returned, output)
    calls: list[Call] = []
    if recorder is not None:  # blocks that run again refer to it, and the graph to them: it must not refer to the graph
        calls, recorder.calls, recorder.products, recorder.scope.copies = recorder.calls, [], None, {}
    if not f.is_floating_point():
        raise CaptureError(f"the model's output has dtype {f.dtype}. Richter differentiates real outputs; "
                           f"pick or convert one with output=....")
    if not f.requires_grad:
        raise CaptureError("the model's output does not depend on any parameter that autograd can follow: it was detached, or "
                           "computed under no_grad or inference_mode, or uses no weights. Measure the part that is trained.")
    run = Pass(f, [], state)
    return run if recorder is None else replace(
        run, calls=calls, parameters=recorder.parameters, differentiates=recorder.differentiates, called=recorder.scope.called)


class ByExample(NamedTuple):
    """Derivatives that torch.func.vmap computes for each example."""

    J: dict[str, Tensor]  # d <V_v, f(x_n)> / d weight, "v n p"
    h: list[Tensor]  # what each call read, "n b s ..."
    g: list[Tensor]  # d <V_v, f(x_n)> / dz of each call, "v n b s ..."


def by_vmap(network: Any, x: Inputs, V: Float[Tensor, "v n k"], names: Sequence[str] = (),
            calls: Sequence[Call] = ()) -> ByExample:
    """Derivatives of single examples in these weights of ``network.state``, and in what these calls of one example wrote, by
    torch.func.vmap over the examples. Whatever a model raises under vmap is passed on. Call it inside ``quiet``."""
    model, state, splits = network.model, network.state, network.survey.splits
    places = {name: [(box, attribute) for box, attribute, weight in state.places if weight is state[name]] for name in names}
    leaves, spec = tree_flatten(x)
    axes = [0 if isinstance(leaf, Tensor) else None for leaf in leaves]
    variables = [*(state[name].detach() for name in names), *(c.weight.new_zeros(c.shape) for c in calls)]

    def derivatives(V_n: Tensor, *parts: Any) -> tuple[list[Tensor], list[Tensor]]:
        def outputs(*variables: Tensor) -> tuple[Tensor, list[Tensor]]:
            example = tree_unflatten([part[None] if isinstance(part, Tensor) else part for part in parts], spec)
            args, kwargs = arguments(model, example)
            shifts = Shifted(model, state, splits, calls, variables[len(names):]) if calls else None
            with (attributes_kept(model), state.in_place(fresh=True), parametrised_once(state.parametrised),
                  shifts or contextlib.nullcontext()):
                for name, weight in zip(names, variables[:len(names)], strict=True):
                    for box, attribute in places[name]:
                        box[attribute] = weight
                f = pick(model(*args, **kwargs), network.output).reshape(-1)
            return f, [] if shifts is None else shifts.reads()

        f, pull, reads = torch.func.vjp(outputs, *variables, has_aux=True)  # type: ignore[misc]
        pulled = [pull(v.to(f.dtype)) for v in V_n]
        written = [[c.map.outputs(c.module, d) for c, d in zip(calls, all_d[len(names):], strict=True)] for all_d in pulled]
        return reads, [*(torch.stack([all_d[j].reshape(-1) for all_d in pulled]) for j in range(len(names))),
                       *(torch.stack(g) for g in zip(*written, strict=True))]

    with torch.no_grad(), checkpoints_called():
        reads, pulled = torch.func.vmap(derivatives, in_dims=(1, *axes), out_dims=(0, 1))(V, *leaves)
    return ByExample(dict(zip(names, pulled, strict=False)), reads, pulled[len(names):])


def _check_unwritten(state: State, versions: Sequence[int]) -> None:
    """Raise an error if the forward pass wrote into a parameter."""
    for (name, p), version in zip(state.shared, versions, strict=True):
        if p._version != version:
            raise CaptureError(f"the forward pass wrote into parameter {name!r} on some inputs of the probe and not on its first "
                               f"ones, on which this is rehearsed (or another thread did, meanwhile). Write into a buffer "
                               f"instead, or put such an input first in the probe.")


def written(model: nn.Module, x: Inputs, output: Output | None = None) -> set[str]:
    """Names of the parameters that a forward pass changes in place (``max_norm`` of an embedding, a hand-made
    projection): rehearsed on copies, so that nothing of the model's own is touched."""
    def rehearsed() -> set[str]:
        state = state_of(model, copied=None)
        before = {name: t._version for name, t in state.items()}
        forward(model, x, state, output=output, record=False)
        return {name for name, t in state.items() if t._version != before[name]}
    return unkept(rehearsed)


RAISED = "The model raised this"


def raised_by_model(why: BaseException) -> bool:
    """Return whether the model raised the error, and not Richter's code around it."""
    return any(note.startswith(RAISED) for note in getattr(why, "__notes__", ()))


@contextlib.contextmanager
def _noted(model: nn.Module, x: Inputs) -> Iterator[None]:
    """An error that the model raises says how it was called."""
    try:
        yield
    except Exception as why:
        if not isinstance(why, RichterError):
            mode = "train" if model.training else "eval"
            why.add_note(f"{RAISED} when Richter called it on {count(x)} examples in {mode} mode, as model(x), "
                         f"model(*x) for a tuple or model(**x) for a dict. Make this call work after model.{mode}(); "
                         f"mode='train' measures a model in train mode.")
        raise


class Recorder(TorchFunctionMode, Hooking):
    """While it is entered, every call of every linear map of ``model`` is remembered, in the order in which they happen."""

    def __init__(self, model: nn.Module, state: State, expand: Mapping[str, int], silent: Collection[str] | None,
                 splits: Mapping[str, Mapping[str, Tensor]], products: list[Product] | None, plain: bool) -> None:
        super().__init__()
        self.scope, self.products, self.plain, self.silent = Scope(state), products, plain, silent
        for name, parts in splits.items():
            module = self.scope.modules[name]
            m = self.scope.views[module][1][""]
            self.scope.views[module] = (name, {part: rows_of(m, rows) for part, rows in parts.items()})
        self.parameters, self.expand, self.state = ParametersWanted(), expand, state
        self.calls: list[Call] = []
        self.differentiates = False  # does the model itself differentiate?
        self._hooks = contextlib.ExitStack()
        self._thread = 0  # that entered it: calls of the same modules by other threads are theirs
        self._repeats = False  # is a block run again?

    def __enter__(self) -> Recorder:
        self._thread = threading.get_ident()
        try:
            for module in self.scope.modules.values():
                if isinstance(module, torch.jit.ScriptModule):  # takes no hooks, and nothing inside is seen
                    continue
                self._hooks.callback(module.register_forward_pre_hook(self._begin, prepend=True).remove)
                # first of all hooks: a user's may change the output, and that is no longer the linear map; after an error too,
                # which the model may catch
                self._hooks.callback(module.register_forward_hook(
                    self._end, with_kwargs=True, prepend=True, always_call=True).remove)
            super().__enter__()
        except BaseException:
            self._hooks.close()
            raise
        return self

    def __exit__(self, *exc: Any) -> None:
        with self._hooks:
            super().__exit__(*exc)

    def begun(self) -> Again:
        """A block begins; the function that is returned gives what stands around it when it is run again."""
        return partial(self._again, list(self.scope.path))

    @contextlib.contextmanager
    def _again(self, path: list[nn.Module]) -> Iterator[None]:
        """Run a block again as the first time, without remembering its calls."""
        before = self.scope.path, self.scope.copies, self._thread, self._repeats
        self.scope.path, self.scope.copies, self._repeats = list(path), dict(self.scope.copies), True
        try:
            with self:
                yield
        finally:
            self.scope.path, self.scope.copies, self._thread, self._repeats = before

    def _begin(self, module: nn.Module, _: Any) -> None:
        """Note that a module's forward begins."""
        if self._thread == threading.get_ident():
            self.scope.path.append(module)
            self.scope.called.add(module)

    def _end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], z: Any) -> Any:
        """Note that a module's forward ends, and record the output of an embedding."""
        if self._thread != threading.get_ident():
            return None
        if not isinstance(z, Tensor) or self.transformed():
            self.scope.path.pop()
            return None
        with torch._C.DisableTorchFunction():
            use = self.scope.returned(module, z) if isinstance(module, nn.Embedding) and module not in self.scope.views else None
            self.scope.path.pop()
            if use is not None:
                return self._used(use, z)
            return self._module_called(module, args, kwargs, z) if module in self.scope.views else None

    def _module_called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor) -> Tensor:
        """A module that is known to be one or several linear maps has read its arguments and returned ``z``."""
        name, view = self.scope.views[module]
        reads = next(iter(view.values())).reads
        x = reads(*args, **kwargs) if reads else args[0] if args else next(iter(kwargs.values()))
        given, x, n = not x.requires_grad, x.detach(), self.expand.get(name)
        if n is not None:
            z, x = _with_examples(z, n), _with_examples(x, n, lookup=True)
        elif z._is_view():
            z = z.clone()  # an in-place change of a view would cut the graph at the edge kept below
        for suffix, m in view.items():
            weight = getattr(module, m.weight, None)
            if weight is None or not self.differentiable(z):  # a norm without affine part
                continue
            read = m.inputs(module, x).clone() if m.kind == "diagonal" else x
            z = self.add(Use(f"{name}.{suffix}" if suffix and name else name or suffix, m, module, weight, read), z, given)
        return z

    def transformed(self) -> bool:
        """Return whether code runs inside a transform of torch.func (vmap, grad, jvp), whose tensors are outside the pass's
        graph."""
        return torch._C._functorch.peek_interpreter_stack() is not None

    def differentiable(self, z: Tensor) -> bool:
        """Return whether a gradient can reach this output."""
        return z.requires_grad

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.transformed():
            self.differentiates = True  # or maps over an axis
            return func(*args, **(kwargs or {}))
        return self.handled(func, args, kwargs or {})

    def handled(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch function by its handler; without a handler, run it unchanged."""
        handler = HANDLERS.get(func)
        return self.called(func, args, kwargs) if handler is None else handler(self, func, args, kwargs)

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch function, and note the precision in which it computes."""
        z = func(*args, **kwargs)
        if isinstance(z, Tensor) and z.requires_grad and z.dtype not in self.state.dtypes:
            self.state.computes_in(z.dtype)
        return z

    def curved(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An activation with a derivative worth keeping, if a backward pass will need it and it is not in place."""
        x = args[0] if args else None
        in_place = kwargs.get("inplace", False) or (len(args) > 1 and args[1] is True)
        if self.silent is None or in_place or not isinstance(x, Tensor) or not x.requires_grad \
                or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return self.called(func, args, kwargs)
        return self.called(Curved.apply, (x, lambda x: func(x, *args[1:], **kwargs)), {})

    def linear(self, func: Any, args: Any, kwargs: Any) -> Any:
        """F.linear; of a layer that is silent at most positions, if its own parameters are multiplied: through a weight that is
        computed, the maps that it is computed from need their share of the gradient."""
        running = self.scope.path[-1]
        if self.silent and not kwargs and len(args) == 3 and self.scope.views.get(running, ("", {}))[0] in self.silent \
                and args[1] is running.weight and all(t is None or t.grad_fn is None for t in args[1:]):
            return self.called(Silent.apply, (*args, self.parameters), {})
        return self.read(READERS[F.linear], func, args, kwargs)

    def read(self, reader: Reader, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that may use a parameter, and record its uses."""
        z = self.called(func, args, kwargs)
        if isinstance(z, Tensor) and self.differentiable(z):
            for use in reader(self.scope, args, kwargs, z):
                z = self._used(use, z)
        return z

    def multiplied(self, operands: slice, handler: Handler, func: Any, args: Any, kwargs: Any) -> Any:
        """A function that multiplies tensors with each other."""
        if self.products is not None and not self._repeats:
            chosen = [*args, *kwargs.values()][operands]
            self.products.append(Product(len(self.calls), tuple(t for t in chosen if isinstance(t, Tensor))))
        return handler(self, func, args, kwargs)

    def attended(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run scaled dot-product attention; in plain mode by its mathematical form, which can be differentiated twice."""
        if self.plain:
            return torch.ops.aten._scaled_dot_product_attention_math(*args, **kwargs)[0]
        return self.multiplied(slice(3), Recorder.called, func, args, kwargs)

    def derived(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that differentiates inside the forward pass, and note that the model does so."""
        self.differentiates = True
        return self.called(func, args, kwargs)

    def projected(self, which: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One projection of nn.MultiheadAttention, in layers/attention.py."""
        z = F.linear(x, weight, bias)
        return self._used(self.scope.projection(which, x, weight), z) if self.differentiable(z) else z

    def owner(self, attribute: str, weight: Tensor) -> tuple[nn.Module, str] | None:
        """Module and name of the map for a weight that the running module has under ``attribute``; for a parameter of another
        module, its own name; None for other tensors."""
        running = self.scope.path[-1]
        if getattr(running, attribute, None) is weight:
            name = self.scope.named.get(running, "")
            return running, ".".join(filter(None, (name, attribute.removeprefix("weight").removeprefix("_"))))
        if id(weight) not in self.scope.names:
            return None
        parameter = self.scope.nearest(weight)
        return self.scope.modules[parameter.rpartition(".")[0]], parameter

    def gated(self, which: str, gates: View, read: Tensor, weight: Tensor, z: Tensor) -> None:
        """One weight of a recurrent layer, at all steps, in layers/recurrent.py."""
        owner = self.owner(f"weight_{which}", weight)
        assert owner is not None
        for gate, m in gates.items():
            self.add(Use(f"{owner[1]}.{gate}" if gate else owner[1], m, owner[0], weight, read.detach()), z)

    def _used(self, use: Use, z: Tensor) -> Tensor:
        """Record the uses that returned ``z``, and return a tensor of the same numbers for the model."""
        use = use._replace(read=use.read.detach())
        n = self.expand.get(self.scope.named[use.module]) if use.map.kind == "lookup" else None
        if n is not None:
            z, use = _with_examples(z, n), use._replace(read=_with_examples(use.read, n, lookup=True))
        if use.order is None:
            return self.add(use, z.clone() if z._is_view() else z)
        lengths = [z.shape[i] for i in use.order]
        written = z.permute(use.order).reshape(use.shape)
        written = self.add(use, written.clone() if written._is_view() else written)
        return written.reshape(lengths).permute([use.order.index(i) for i in range(z.dim())])

    def add(self, use: Use, z: Tensor, given: bool = False) -> Tensor:
        """Record a use that wrote ``z``, and return the tensor with which the model continues."""
        if not self._repeats:
            self.calls.append(Call(use.name, use.map, use.module, use.weight, use.read, get_gradient_edge(z), z.shape,
                                   use.read._version, given))
        return z


class Shifted(Recorder):
    """A recorder that works inside torch.func. It adds ``shifts``, which are zero, to the outputs of calls, so that derivatives
    with respect to them are the backward signals g, and it keeps the inputs of the calls."""

    def __init__(self, model: nn.Module, state: State, splits: Mapping[str, Mapping[str, Tensor]], calls: Sequence[Call],
                 shifts: Sequence[Tensor]) -> None:
        super().__init__(model, state, {}, None, splits, None, False)
        self.order = [c.name for c in calls]
        self.shifts, self.seen = list(shifts), list[Tensor]()

    def transformed(self) -> bool:
        """False: a shifted forward pass runs outside of torch.func transforms."""
        return False

    def differentiable(self, z: Tensor) -> bool:
        return True

    def gated(self, which: str, gates: View, read: Tensor, weight: Tensor, z: Tensor) -> None:
        """Raise the error for recurrent layers, which cannot be shifted."""
        raise CaptureError("a recurrent layer writes into its own memory, which cannot be shifted")

    def add(self, use: Use, z: Tensor, given: bool = False) -> Tensor:
        if use.name not in self.order:
            return z
        if len(self.seen) == len(self.order) or self.order[len(self.seen)] != use.name:
            raise CaptureError("maps are called in another order than in a pass of one example")
        shift = self.shifts[len(self.seen)]
        self.seen.append(use.read.detach() if use.map.kind == "diagonal" else use.map.inputs(use.module, use.read.detach()))
        return z + shift.to(z.dtype)

    def reads(self) -> list[Tensor]:
        """Inputs of all recorded calls, in order."""
        if len(self.seen) < len(self.order):
            raise CaptureError("maps are called less often than in a pass of one example")
        return self.seen


Handler = Callable[[Recorder, Any, Any, Any], Any]  # of a call: the function, and its arguments by position and by keyword


def _reading(reader: Reader) -> Handler:
    """Return the handler that records an operation by this reader."""
    return lambda recorder, *call: recorder.read(reader, *call)


def _multiplying(operands: slice, reader: Reader) -> Handler:
    """Return the handler of an operation whose given operands are multiplied by each other."""
    return lambda recorder, *call: recorder.multiplied(operands, _reading(reader), *call)


HANDLERS: dict[Any, Handler] = {  # function of torch -> what is done when the model calls it; all others are only called
    **{func: _reading(reader) for func, reader in READERS.items()}, **TAKEN_APART,
    **{func: _multiplying(slice(2), READERS[func]) for func in (
        torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)},
    **{func: _multiplying(slice(1, 3), READERS[func]) for func in (torch.baddbmm, Tensor.baddbmm)},
    torch.einsum: _multiplying(slice(1, None), READERS[torch.einsum]),
    F.scaled_dot_product_attention: Recorder.attended, F.linear: Recorder.linear,
    **dict.fromkeys((F.gelu, F.silu, F.mish, F.softplus, F.logsigmoid), Recorder.curved),  # derivatives cost more than a product
    **dict.fromkeys((torch.autograd.grad, torch.autograd.backward, Tensor.backward), Recorder.derived)}


def _with_examples(t: Tensor, n: int, lookup: bool = False) -> Tensor:
    """[1, T, ...] or [T, ...] -> [n, T, ...]: a copy for each example."""
    rank = 2 if lookup and not t.is_floating_point() else 3
    t = t if t.dim() >= rank and t.shape[0] == 1 else t.unsqueeze(0)
    return t.expand(n, *t.shape[1:]).clone()


# ------------------------------------------------------------------------------------------------------------ tangents

Direction = Mapping[str, Tensor]  # a change of weights, by their names
Forward = Callable[[State], Pass]  # a pass with these weights


@contextlib.contextmanager
def batch_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
    """These norms use the mean and variance of the examples in hand, and do not write them down."""
    before = [(norm, norm.training, norm.track_running_stats) for norm in norms]
    try:
        for norm in norms:
            norm.training, norm.track_running_stats = True, False  # type: ignore[assignment]
        yield
    finally:
        for norm, training, tracking in before:
            norm.training, norm.track_running_stats = training, tracking


def pushed_forward(forward: Forward, state: State, v: Direction) -> tuple[Pass, Tensor]:
    """A pass, and J v of its outputs in the shape of f, by forward mode. `forward_ad.make_dual` would first compile derivatives
    of derivatives, which half a second is spent on and none is used of."""
    with forward_ad.dual_level() as level:
        duals: dict[int, Tensor] = {}  # one for each parameter, under however many names
        for name, weight in state.items():
            if name in v and id(weight) not in duals:
                duals[id(weight)] = torch._make_dual(weight, v[name].to(weight), level=level)
        run = forward(state.exchanged(duals))
        f, tangent = forward_ad.unpack_dual(run.f)
        tangent = torch.zeros_like(f) if tangent is None else tangent.detach().clone()
    return run, tangent


def pushed_twice(forward: Forward, state: State, v: Direction) -> tuple[Pass, Tensor]:
    """Product J v by two backward passes: J^T u is linear in u, and its derivative in u is J."""
    run = forward(state)
    names = list({id(state[name]): name for name in v}.values())
    u = torch.zeros_like(run.f, requires_grad=True)
    with state.in_place():
        pulled = torch.autograd.grad(run.f, [state[name] for name in names], u, create_graph=True, allow_unused=True)
        terms = [(d * v[name].to(d)).sum() for name, d in zip(names, pulled, strict=True) if d is not None and d.requires_grad]
        tangent = torch.autograd.grad(torch.stack(terms).sum(), u, allow_unused=True)[0] if terms else None
    return run, torch.zeros_like(run.f) if tangent is None else tangent.detach()
