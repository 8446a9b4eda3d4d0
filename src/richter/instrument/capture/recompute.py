"""Memory that a forward pass keeps for its backward passes, and gradient checkpointing: blocks that are recomputed for each of
these instead, where there is no room for them (checkpoints).

A block is run again inside a backward pass with the weights, draws and hooks of its first run; what it keeps is held until
another block is wanted. ``torch.utils.checkpoint`` would hold what a backward pass did not ask for (gradients of weights are
rarely wanted here) until the graph is let go, once for every backward pass, and would not see that a block keeps other numbers
the second time. It runs to its end: what it, or hooks of the user's inside it, put back at its end must be put back."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from richter.core import CaptureError
from richter.instrument.capture.attributes import Attributes
from richter.instrument.capture.quiet import Hooking, borrowed, checkpoints_called, compiled_eagerly, streams
from richter.instrument.capture.state import State

# ------------------------------------------------------------------------------------------------------------ likeness
# Whether tensors that are computed a second time are those of the first, which are let go: a few numbers of each are kept.

AT_ONCE = 2 ** 14  # numbers that are looked at together, in double precision
WITHIN = 100  # roundings, on devices that add up in any order


class Likeness(NamedTuple):
    """A few numbers that tell a tensor from others."""

    shape: torch.Size
    dtype: torch.dtype
    numbers: Tensor | None  # a random combination of its entries, and their norm squared; None where they are not looked at


def likeness(t: Tensor, stays: bool = False) -> Likeness:
    """Fingerprint of a tensor; with ``stays`` its numbers are known not to change, and are not read."""
    return Likeness(t.shape, t.dtype, None if stays or _scratch(t) else _numbers(t))


def _scratch(t: Tensor) -> bool:
    """Bytes that a kernel keeps for itself (an LSTM of oneDNN or cuDNN), and seeds of fused attention on a GPU that draws
    nothing: parts of them are never written."""
    seed = t.device.type != "cpu" and t.numel() <= 2 and not (t.dtype.is_floating_point or t.dtype.is_complex)
    return t.dtype in (torch.uint8, torch.uint64) or seed


def alike(first: list[Likeness], second: list[Likeness]) -> bool:
    """Return whether two lists of fingerprints are equal up to rounding."""
    def same(a: Likeness, b: Likeness) -> bool:
        if a[:2] != b[:2] or a.numbers is None or b.numbers is None:
            return a[:2] == b[:2] and a.numbers is b.numbers
        (x, squares), (y, _) = a.numbers.tolist(), b.numbers.tolist()
        return x == y or abs(x - y) <= _tolerance(a.dtype) * math.sqrt(squares)

    return len(first) == len(second) and all(map(same, first, second))


def _tolerance(dtype: torch.dtype) -> float:
    """How much the sums of two equal tensors may differ, relative to the norm: rounding differs, if coarsely, in few places."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    eps, single = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    return WITHIN * eps if eps <= single else math.sqrt(single)


@torch.no_grad()
def _numbers(t: Tensor) -> Tensor:
    """Fingerprint of a tensor of any layout and dtype: a random combination of its entries and their squared norm."""
    with torch._C.DisableTorchFunction():
        t = t.detach()
        if t.layout is not torch.strided:
            t = t.coalesce().values() if t.layout is torch.sparse_coo else t.values()
        if t.is_complex():
            t = torch.view_as_real(t.resolve_conj())
        flat = _as_it_lies(t)
        if t.dtype in (torch.float32, torch.float64) and t.device.type != "mps":  # which has no float64
            numbers = _read(flat)
            if bool(numbers.isfinite().all()):
                return numbers
        numbers = torch.zeros(2, dtype=torch.float64)
        for i, part in enumerate(flat.split(AT_ONCE)):  # in double precision, with numbers for what is none
            part = (part.cpu() if part.device.type == "mps" else part).to(torch.float64)
            part = part.nan_to_num(nan=math.pi, posinf=1e100, neginf=-1e100).clamp(-1e100, 1e100)
            numbers = numbers.to(part.device) + _read(part) * (1 + 1 / (i + 1))
        return numbers


def _read(flat: Tensor) -> Tensor:
    """A random combination of the entries and their norm squared, without a copy."""
    cut = len(flat) // AT_ONCE * AT_ONCE
    drawn = _drawn(flat.device, flat.dtype)
    rest = flat[cut:].dot(drawn[:len(flat) - cut]).double()
    sums = (flat[:cut].view(-1, AT_ONCE) @ drawn).double()
    places = 1 + 1 / torch.arange(2, len(sums) + 2, dtype=torch.float64, device=flat.device)
    return torch.stack([rest + sums.dot(places), torch.linalg.vector_norm(flat).double() ** 2])


def _as_it_lies(t: Tensor) -> Tensor:
    """Its entries in the order in which they lie in memory, so that nothing is copied; repeated ones once."""
    strides = t.stride()
    t = t.permute(sorted(range(t.dim()), key=lambda axis: -strides[axis]))
    for axis in range(t.dim()):
        t = t.narrow(axis, 0, min(t.shape[axis], 1)) if t.stride(axis) == 0 else t
    return t.reshape(-1)


@functools.cache
def _drawn(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Fixed random vector with which tensors are compared by their products."""
    return torch.randn(AT_ONCE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device, dtype)


# ---------------------------------------------------------------------------------------------------------------- anew

T = TypeVar("T")
Again = Callable[[], contextlib.AbstractContextManager[None]]  # around a block that is run again
PAYS = 0.8  # of what is kept: where blocks would save less, they are left as they are
ANEW = ("Its graph does not fit memory=, so it is recomputed for every backward pass. Allow more memory, or keep state between "
        "calls (a cache, a counter) out of its forward().")
HALVINGS = 8  # sizes of blocks that are tried


STALE = ("the model uses a tensor that an earlier forward pass computed from its weights and left in a place that Richter does "
         "not see (a global variable, a closure, an object of its own). Its graph is gone, so gradients through it cannot be "
         "computed. Keep such a cache as an attribute of its module, in a dict or a list, or compute it in every forward pass.")


class Wanted(BaseException):
    """Signal that the model differentiates inside its forward pass and so needs the saved tensors. Never leaves ``unkept`` or
    ``Scale``."""


# ------------------------------------------------------------------------------------------------------- blocks that run again


class Room:
    """The tensors that one block of a pass keeps: the block that was wanted last. It refers to no block, because the graph refers
    to blocks, which refer to it, and circles through a graph are never let go."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._of = -1
        self._kept: list[Tensor] = []

    def kept(self, block: CheckpointBlock) -> list[Tensor]:
        """Return the saved tensors of a block; it runs the block again unless its tensors are still held."""
        with self._lock:
            if self._of != block.number:
                self._of, self._kept = -1, []
                self._kept = block.again()
                self._of = block.number
            return self._kept


@dataclass
class CheckpointBlock:
    """One call of a module, with everything that is needed to run it again."""

    number: int  # in the pass
    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: State
    room: Room
    recorded: Again
    stay: Collection[int] = ()  # where weights lie that nobody writes into
    kept: list[Likeness] = field(default_factory=list)  # of the tensors that it keeps

    def __post_init__(self) -> None:
        self.args, self.kwargs = self._arguments()
        self.versions = [(t, t._version) for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]
        self.casts = {device: torch.get_autocast_dtype(device) for device in {"cpu", *(t.device.type for t, _ in self.versions)}
                      if torch.is_autocast_enabled(device)}
        self.drawn = streams(self.state.model)
        self.attributes = Attributes(self.module)
        self.hooks: Any = saved_tensors_hooks(self._keep, self._kept)
        self.hooks.__enter__()

    def _arguments(self) -> Any:
        """Its arguments, in lists and dicts of its own: a block may add to those that it is given, and does so again."""
        return tree_map(lambda leaf: leaf, (self.args, self.kwargs))

    def close(self) -> None:
        """Note that the first run of the block has ended."""
        self.hooks.__exit__(None, None, None)
        self.hooks = None
        self.drawn = [] if all(map(torch.equal, self.drawn, streams(self.state.model))) else self.drawn

    def _keep(self, t: Tensor) -> int:
        """Note the fingerprint of a saved tensor in place of the tensor; return its number."""
        self.kept.append(self._likeness(t))
        return len(self.kept) - 1

    def _likeness(self, t: Tensor) -> Likeness:
        """Fingerprint of a tensor: shape, dtype, and products with a random vector."""
        return likeness(t, t.layout is torch.strided and t.untyped_storage().data_ptr() in self.stay)

    def _kept(self, number: int) -> Tensor:
        """Return a saved tensor by its number; the block runs again if needed."""
        if self.hooks is not None:
            raise self.refused("it differentiates inside its forward pass")
        return self.room.kept(self)[number]

    def again(self) -> list[Tensor]:
        """Run it again; the tensors that it keeps, in the order in which it keeps them."""
        kept: list[tuple[Tensor, int]] = []  # and their versions
        second: list[Likeness] = []

        def keep(t: Tensor) -> None:
            if len(kept) >= len(self.kept):
                raise self.refused()
            second.append(self._likeness(t))
            kept.append((t.detach(), t._version))

        if any(t._version != version for t, version in self.versions):
            raise self.refused("its inputs were changed in place since")
        try:
            with (torch.enable_grad(), saved_tensors_hooks(keep, _never), self.state.in_place(), checkpoints_called(),
                  compiled_eagerly(), self.recorded(), self.attributes.in_place(), contextlib.ExitStack() as around):
                if self.drawn:
                    around.enter_context(borrowed(self.state.model, self.drawn))
                for device, dtype in self.casts.items():
                    around.enter_context(torch.autocast(device, dtype))
                args, kwargs = self._arguments()
                self.module.forward(*args, **kwargs)
        except (CaptureError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise self.refused(f"it fails the second time ({type(error).__name__}: {error})") from error
        if not alike(self.kept, second):
            raise self.refused()
        if any(t._version != version for t, version in kept):
            raise self.refused("it changes in place what its own backward pass needs")
        return [t for t, _ in kept]

    def refused(self, why: str = "it computes something else than the first time") -> CaptureError:
        """Make the error for a block that cannot be run again."""
        return CaptureError(f"module {self.name!r} cannot be run again: {why}. {ANEW}")


def _never(_: Any) -> Tensor:
    """Raise the error for a block that differentiates inside its forward pass."""
    raise CaptureError("a block differentiates inside its forward pass, and not the first time it ran. Allow more memory=.")


class Checkpoints(Hooking):
    """Around a forward pass: what modules of these names compute is not kept but computed again. ``recorded()`` is called when
    a block begins, and gives what stands around the block when it runs again."""

    def __init__(self, state: State, names: Collection[str], recorded: Callable[[], Again] | None) -> None:
        self.state, self.names, self.recorded = state, names, recorded or (lambda: contextlib.nullcontext)
        self._room, self._number, self._around = Room(), 0, contextlib.ExitStack()
        self._open: list[tuple[nn.Module, CheckpointBlock | None]] = []  # those that are running
        self._stay = {p.untyped_storage().data_ptr() for _, p in state.shared}

    def __enter__(self) -> None:
        self._around.enter_context(without_caches(self.state.model))
        for name in self.names:
            module, begin = self.state.model.get_submodule(name), functools.partial(self._begin, name)
            self._around.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)  # behind those of the user
            self._around.callback(module.register_forward_hook(self._end, prepend=True, always_call=True).remove)

    def __exit__(self, *exc: Any) -> None:
        self._around.close()
        while self._open:  # an error came between
            self._close()

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a block at a module's forward, unless it lies inside another block."""
        inside = any(block is not None for _, block in self._open)
        functional = torch._C._functorch.peek_interpreter_stack() is not None
        block = None
        if not inside and not functional and torch.is_grad_enabled():
            self._number += 1
            block = CheckpointBlock(self._number, name, module, args, kwargs, self.state, self._room, self.recorded(), self._stay)
        self._open.append((module, block))

    def _end(self, module: nn.Module, *_: Any) -> None:
        """By an error too, which the model may catch; it may have come before the block began."""
        if any(begun is module for begun, _ in self._open):
            while self._close() is not module:
                pass

    def _close(self) -> nn.Module:
        """End the innermost open module, and its block if it has one."""
        module, block = self._open.pop()
        if block is not None:
            block.close()
        return module


@contextlib.contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Context in which transformers returns no cache of keys and values, because recomputed blocks would append to it."""
    named: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in named if getattr(config, "use_cache", False) is True}
    try:
        for config in configs.values():
            config.use_cache = False
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


# ------------------------------------------------------------------------------------------------------------ what is kept


def unkept(work: Callable[[], T]) -> T:
    """Run ``work()`` with forward passes that save nothing for backward. If the model differentiates inside its forward pass, or
    uses torch.func, run it again with saved tensors."""
    working = True

    def wanted(_: Any) -> Tensor:
        raise Wanted if working else CaptureError(STALE)

    try:
        with saved_tensors_hooks(lambda _: None, wanted):
            return work()
    except (Wanted, RuntimeError):
        return work()
    finally:
        working = False


Place = Any  # a storage, weakly referred to, so that none that comes later is taken for it; of a sparse tensor an int


class Weight(NamedTuple):
    """Bytes that a forward pass saves; which blocks could be recomputed instead, and the bytes that remain, with the inner
    tensors of one block at a time."""

    kept: int = 0
    blocks: tuple[str, ...] = ()
    light: int = 0


@dataclass(eq=False)
class ModuleCall:
    """One call of a module that has parts."""

    name: str
    outer: tuple[ModuleCall, ...]  # the calls that it is part of, the innermost last
    given: set[Place]
    versions: list[tuple[weakref.ref[Tensor], int]]  # of what it is given
    written: bool = False  # was that changed in place? Then it cannot run again
    inside: set[Place] = field(default_factory=set)  # that it keeps
    size: int = 0  # of these, in bytes

    def look(self) -> None:
        """Note whether the module's inputs were changed in place, as long as they exist."""
        given = [(ref, version, t) for ref, version in self.versions if (t := ref()) is not None]
        self.written |= any(t._version != version for _, version, t in given)
        self.versions = [(ref, version) for ref, version, _ in given]


class Scale(Hooking):
    """Context that weighs what a forward pass saves, by storage and without the weights. With ``hold=False`` saved tensors are
    released, so backward passes are impossible."""

    def __init__(self, model: nn.Module, state: State, hold: bool = False) -> None:
        self.model, self.hold = model, hold
        self._weights = {StorageWeakRef(t.untyped_storage()) for t in state.values() if t.layout is torch.strided}
        self._sizes: dict[Place, int] = {}
        self._saved: list[tuple[Place, tuple[ModuleCall, ...]]] = []  # and the calls that keep it
        self._calls: list[ModuleCall] = []
        self._running: tuple[ModuleCall, ...] = ()
        self._given: list[ModuleCall] = []  # those of which something that they were given is still there
        self._open = True
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Scale:
        for name, module in self.model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if name and next(module.children(), None) is not None:
                begin, end = functools.partial(self._begin, name), functools.partial(self._end, name)
                self._stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            else:
                end = functools.partial(self._end, None)
            self._stack.callback(module.register_forward_hook(end, prepend=True, always_call=True).remove)
        self._stack.enter_context(saved_tensors_hooks(self._save, self._look))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._open = False
        self._stack.close()

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a module's forward begins, with the tensors it was given."""
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        call = ModuleCall(name, self._running, set(self._placed(given)), [(weakref.ref(t), t._version) for t in given])
        self._running += (call,)
        self._calls.append(call)
        self._given.append(call)

    def _end(self, name: str | None, *_: Any) -> None:
        """A module has ended, by an error too, which the model may catch. ``name``: of one that has parts."""
        for call in self._given:
            call.look()
        self._given = [call for call in self._given if call.versions]
        for call in reversed(self._running):
            if call.name == name:
                self._running = call.outer
                break

    def _save(self, t: Tensor) -> Tensor | None:
        """Note that autograd saves a tensor, and in which modules."""
        for place in self._placed([t]):
            self._saved.append((place, self._running))
        return t.detach() if self.hold else None  # kept as it is by the operation that made it, it would never be let go

    def _look(self, t: Tensor | None) -> Tensor:
        """Return a saved tensor, or raise an error if it was not held."""
        if t is None:
            raise Wanted if self._open else CaptureError(STALE)
        return t

    def _placed(self, tensors: Iterable[Tensor]) -> Iterator[Place]:
        """Memory addresses of these tensors, without the weights."""
        for t in tensors:
            if t.layout is not torch.strided:  # sparse: has no one storage
                self._sizes[id(t)] = 2 * t._nnz() * t.element_size()
                yield id(t)
            elif (place := StorageWeakRef(t.untyped_storage())) not in self._weights:
                self._sizes[place] = t.untyped_storage().nbytes()
                yield place

    def _size(self, places: Iterable[Place]) -> int:
        """Total bytes of some storages."""
        return sum(self._sizes[place] for place in places)

    def weight(self, reads: Iterable[Tensor]) -> Weight:
        """The weight of the pass, in which maps have read these, which are kept in any case."""
        held, total = set(self._placed(reads)), self._size({place for place, _ in self._saved})
        for place, running in self._saved:
            for call in running:
                call.inside.add(place)
        for call in self._calls:
            call.size = self._size(call.inside)
        best, least = Weight(total), PAYS * total
        written = {call.name for call in self._calls if call.written}
        for limit in (total / 2 ** k for k in range(HALVINGS)):
            names = {c.name for c in self._calls if c.size <= limit and not (c.outer and c.outer[-1].size <= limit)} - written
            light = self._light(names, held)
            if light < least:
                least, best = light, Weight(total, tuple(sorted(names)), light)
        return best

    def _light(self, names: Collection[str], held: Collection[Place]) -> int:
        """Bytes of a pass in which these blocks are computed anew, with the insides of the largest one."""
        blocks = [call for call in self._calls if call.name in names and not any(c.name in names for c in call.outer)]
        outside = (place for place, running in self._saved if not any(call.name in names for call in running))
        return self._size({*held, *outside}.union(*(block.given for block in blocks))) + max((b.size for b in blocks), default=0)
