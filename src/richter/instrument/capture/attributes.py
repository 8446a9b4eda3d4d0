"""Everything that modules keep beside their parameters and buffers, put back after a measurement, in place.

Remembered is what can be reached from the attributes of modules and of their classes: containers of all kinds and however nested,
tensors, arrays, random streams, caches and other objects, closures, default arguments, the place of iterators and of files that
are read. Objects stay the same ones; only what was changed is written. For the time of a measurement an iterator is replaced by
another one at the same place; one that cannot be doubled (a generator, an epoch of a DataLoader) by one that refuses.

Not remembered: global variables, what is written to disk or sent away, the inside of objects of compiled extensions, and what
runs beside a model or around it (``kinds.LEFT_ALONE``: loggers, threads, queues of processes, optimisers, trainers).

What it costs is bounded. ``VISITS`` objects are looked into, those nearest to the modules first, and those in long containers
last; numbers and strings do not count, and a container is one object however long it is: of a data set of a million pairs that
hangs on a model, which pairs it has is put back, but not what a forward pass changes inside a pair. Tensors and arrays are copied
up to ``originals.BACKUP_BYTES``. A larger array cannot be written into while a measurement is under way; that a larger tensor was
written into is an error afterwards.
"""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import io
import operator
import random
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data
from torch import Tensor, nn

from richter.core import CaptureError, DisturbedError

# ----------------------------------------------------------------------------------------------------------- originals
# Tensors as they were: seen to have changed, by any bit, and put back in place.

BACKUP_BYTES = 2**28  # of copies that are kept beside one kind of tensors (weights, gradients, attributes) during a measurement
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numbers of that many bytes, bit by bit


class Budget:
    """Bytes that may still be copied."""

    def __init__(self, left: int = BACKUP_BYTES) -> None:
        self.left = left

    def allows(self, size: int) -> bool:
        if size > self.left:
            return False
        self.left -= size
        return True


class Original:
    """A tensor as it is now. With a copy, every change is seen and put back; without, those that torch counts are seen."""

    def __init__(self, tensor: Tensor, copied: bool) -> None:
        self.tensor, self.version = tensor, _version(tensor)
        self.requires_grad, self.grad_fn = tensor.requires_grad, tensor.grad_fn
        self.alias = tensor.detach()  # where its numbers lie; the tensor may be given others (.data, set_, resize_)
        self.place, self.copy = _place(tensor), self.alias.clone() if copied and not tensor.is_meta else None

    def changed(self) -> bool:
        moved = _version(self.tensor) != self.version or _place(self.tensor) != self.place
        return moved or (self.copy is not None and not same_bits(self.tensor.detach(), self.copy))

    def restore(self) -> bool:
        """Is it as it was, numbers, version, place in the graph and all? Call it when it has changed."""
        t = self.tensor
        with torch.inference_mode(t.is_inference()), torch.no_grad():
            if _place(t) != self.place:
                t.data = self.alias
            if self.copy is not None:
                (t.data if t.layout is torch.strided else t).copy_(self.copy)  # .data of a sparse tensor has indices of its own
            if t.grad_fn is not self.grad_fn and self.grad_fn is None and not t._is_view():
                t.detach_()
            if t.is_leaf and t.requires_grad != self.requires_grad:
                t.requires_grad_(self.requires_grad)
        if self.version is not None and hasattr(torch._C._autograd, "_unsafe_set_version_counter"):
            torch._C._autograd._unsafe_set_version_counter((t,), (self.version,))  # a graph of the user's may have saved it
        return self.copy is not None and t.grad_fn is self.grad_fn


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Are they equal to the last bit? NaN equals the same NaN. What cannot be looked into counts as equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_quantized or a.is_meta or a.is_mkldnn:
        return True
    return all(p.shape == q.shape and torch.equal(_bits(p), _bits(q)) for p, q in zip(_parts(a), _parts(b), strict=True))


def _parts(t: Tensor) -> list[Tensor]:
    """The tensors in which its numbers lie."""
    if t.layout is torch.sparse_coo:
        return [t._indices(), t._values()]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices(), t.values()]
    return [t.ccol_indices(), t.row_indices(), t.values()] if t.layout in (torch.sparse_csc, torch.sparse_bsc) else [t]


def _bits(t: Tensor) -> Tensor:
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    return t.resolve_neg().view(INTEGERS[t.element_size()])


def _version(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version


def _place(t: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Where its numbers lie, and how."""
    return (t.data_ptr(), t.shape, t.stride()) if t.layout is torch.strided and not t.is_meta else None


def size_of(t: Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in _parts(t))


def weight_bytes(model: nn.Module) -> int:
    return sum(size_of(p) for p in model.parameters() if p.layout is torch.strided)


@contextlib.contextmanager
def finished(finish: Callable[[], list[str]]) -> Iterator[None]:
    """``finish`` puts things back, however the block ends. The sentences that it returns are an error, or stand below the one
    that is on its way."""
    try:
        yield
    except BaseException as error:
        try:
            sentences = finish()
        except DisturbedError as disturbed:
            if not isinstance(error, Exception):
                raise error from None
            raise disturbed from error  # whatever it looked like: that is why
        for sentence in sentences:
            error.add_note(sentence)
        raise
    sentences = finish()
    if sentences:
        raise CaptureError("\n".join(sentences))


# --------------------------------------------------------------------------------------------------------------- kinds
# What an object that hangs on a model holds, by its kind, and how that is put back in place: the object stays the same one.

HEAP_TYPE = 1 << 9  # of a type's __flags__: it was made by a class statement
# What runs beside the model, or around it: it acts on being changed, and no forward pass owns it.
LEFT_ALONE = ("accelerate", "asyncio", "concurrent", "contextvars", "enum", "importlib", "inspect", "lightning", "logging",
              "mlflow", "multiprocessing", "pathlib", "pytorch_lightning", "re", "richter.instrument.capture", "socket",
              "sqlite3", "subprocess", "threading", "tokenizers", "torch._dynamo", "torch.cuda", "torch.distributed", "torch.fx",
              "torch.optim", "torch.utils.tensorboard", "typing", "wandb", "weakref")

BOUND = (types.BuiltinMethodType, types.MethodWrapperType)  # itertools.count().__next__, [].append


class Kept(NamedTuple):
    """What one object holds: ``values`` under ``keys``. ``put`` replaces one (None: it cannot), ``restore`` puts all of them
    back, if any has changed, and gives a sentence if it cannot; ``lend`` is called before the first forward pass."""

    restore: Callable[[], str | None] | None = None
    keys: Iterable[Any] = ()
    values: Collection[Any] = ()
    put: Callable[[Any, Any], None] | None = None
    lend: Callable[[], None] | None = None


NOTHING = Kept()
Keeper = Callable[[Any, Budget], Kept]


def left_alone(kind: type) -> bool:
    name = f"{kind.__module__}."
    return any(name.startswith(f"{package}.") for package in LEFT_ALONE)


def same(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Are these the same objects, in the same order? Both have the same length."""
    return all(map(operator.is_, a, b))


# ---------------------------------------------------------------------------------------------------------- containers


def keep_dict(box: dict[Any, Any], budget: Budget | None = None) -> Kept:
    base: Any = collections.OrderedDict if isinstance(box, collections.OrderedDict) else dict  # past what subclasses override
    keys, values = list(base.keys(box)), list(base.values(box))

    def restore() -> None:
        if len(box) == len(keys) and same(base.keys(box), keys) and same(base.values(box), values):
            return
        before = dict(zip(keys, values, strict=True))  # not emptied and filled: another thread may read what nobody has changed
        for key in [key for key in base.keys(box) if key not in before]:
            base.pop(box, key)
        for key, value in before.items():
            if key not in box or base.__getitem__(box, key) is not value:
                base.__setitem__(box, key, value)
        if not same(base.keys(box), keys):  # something was taken out and came back at the end
            for key, value in before.items():
                base.pop(box, key)
                base.__setitem__(box, key, value)

    return Kept(restore, keys, values, lambda key, value: base.__setitem__(box, key, value))


def keep_factory(box: collections.defaultdict[Any, Any], budget: Budget) -> Kept:
    """What makes the missing items of a defaultdict."""
    factory = box.default_factory
    return Kept(lambda: setattr(box, "default_factory", factory), ("default_factory",), (factory,),
                lambda name, value: setattr(box, name, value))


def _keep_list(box: list[Any], budget: Budget) -> Kept:
    before = list.copy(box)

    def restore() -> None:
        if len(box) != len(before) or not same(list.__iter__(box), before):
            list.__setitem__(box, slice(None), before)

    return Kept(restore, range(len(before)), before, lambda i, value: list.__setitem__(box, i, value))


def _keep_deque(box: collections.deque[Any], budget: Budget) -> Kept:
    before, base = list(collections.deque.__iter__(box)), collections.deque

    def restore() -> None:
        if len(box) != len(before) or not same(base.__iter__(box), before):
            base.clear(box)
            base.extend(box, before)

    return Kept(restore, range(len(before)), before, lambda i, value: base.__setitem__(box, i, value))


def _keep_set(box: set[Any], budget: Budget) -> Kept:
    before = list(set.__iter__(box))

    def restore() -> None:
        if len(box) != len(before) or not same(set.__iter__(box), before):
            set.intersection_update(box, before)  # not emptied: the others stay in their order
            set.update(box, before)

    return Kept(restore, values=before)


def _keep_numbers(box: Any, budget: Budget) -> Kept:
    """A bytearray or an array.array."""
    before = box[:]

    def restore() -> None:
        if bytes(box) != bytes(before):
            box[:] = before

    return Kept(restore)


def _unchanging(box: Iterable[Any], budget: Budget) -> Kept:
    """A tuple or a frozenset: only what lies inside may change."""
    return Kept(values=list(box))


# ------------------------------------------------------------------------------------------------------------- objects


def keep_attributes(thing: Any, budget: Budget) -> Kept:
    attributes = _own_dict(thing)
    if attributes is None:
        return NOTHING
    kept = keep_dict(attributes)
    assert kept.restore is not None
    contents = kept.restore

    def restore() -> None:
        if _own_dict(thing) is not attributes:
            object.__setattr__(thing, "__dict__", attributes)
        contents()

    return kept._replace(restore=restore)


def _own_dict(thing: Any) -> dict[str, Any] | None:
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except Exception:  # it is somebody's proxy
        return None
    return attributes if type(attributes) is dict else None


def _slots(kind: type) -> tuple[Any, ...]:
    return tuple(place for base in kind.__mro__ if base.__flags__ & HEAP_TYPE and "__slots__" in vars(base)
                 for place in vars(base).values() if isinstance(place, types.MemberDescriptorType))


slots: Callable[[type], tuple[Any, ...]] = functools.lru_cache(4096)(_slots)


def keep_slots(thing: Any, budget: Budget) -> Kept:
    def read() -> dict[Any, Any]:
        values = {}
        for place in slots(type(thing)):
            try:
                values[place] = place.__get__(thing)
            except AttributeError:  # nothing was put there yet
                continue
        return values

    before = read()

    def restore() -> None:
        now = read()
        for place in now.keys() - before.keys():
            place.__delete__(thing)
        for place, value in before.items():
            if place not in now or now[place] is not value:
                place.__set__(thing, value)

    return Kept(restore, list(before), list(before.values()), lambda place, value: place.__set__(thing, value))


def _keep_function(function: types.FunctionType, budget: Budget) -> Kept:
    """What is kept in its closure, in the defaults of its arguments and in its attributes."""
    if not (function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__):
        return NOTHING
    cells = [cell for cell in function.__closure__ or () if _filled(cell)]
    before = [cell.cell_contents for cell in cells]
    inside = [function.__defaults__, function.__kwdefaults__, *([function.__dict__] if function.__dict__ else [])]

    def restore() -> None:
        for cell, value in zip(cells, before, strict=True):
            if not _filled(cell) or cell.cell_contents is not value:
                cell.cell_contents = value

    def put(i: int, value: Any) -> None:
        if i < len(cells):
            cells[i].cell_contents = value

    return Kept(restore, range(len(before) + len(inside)), [*before, *inside], put)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def keep_class(kind: type) -> Kept:
    """What is kept in the attributes of a class itself (``type(self).calls += 1``), and in its functions."""
    def own() -> dict[str, Any]:
        return {name: value for name, value in vars(kind).items() if not (name.startswith("__") or name == "_abc_impl")}

    before = own()

    def restore() -> None:
        now = own()
        for name in now.keys() - before.keys():
            type.__delattr__(kind, name)
        for name, value in before.items():
            if name not in now or now[name] is not value:
                type.__setattr__(kind, name, value)

    return Kept(restore, list(before), list(before.values()), lambda name, value: type.__setattr__(kind, name, value))


# ---------------------------------------------------------------------------------------------------- numbers, streams


def _keep_tensor(t: Tensor, budget: Budget) -> Kept:
    if t.is_meta or t.is_nested:  # there are no numbers, or none that can be reached
        return NOTHING
    original = Original(t, copied=budget.allows(size_of(t)))
    held = t.grad if t.is_leaf and t.requires_grad else None
    label = f"a tensor of shape {list(t.shape)} that hangs on the model"

    def restore() -> str | None:
        if t.is_leaf and t.requires_grad and original.requires_grad and t.grad is not held:
            t.grad = held
        if not original.changed() or original.restore():
            return None
        return (f"{label} was changed in place by the forward pass, and cannot be put back: it is part of an autograd graph, or "
                f"too large for a copy to be kept. Keep it as a buffer, or put a new tensor in its place instead.")

    return Kept(restore, values=() if held is None else (held,))


def _keep_array(a: np.ndarray, budget: Budget) -> Kept:  # type: ignore[type-arg]
    if a.dtype.hasobject:
        before = a.copy()
        return Kept(lambda: np.copyto(a, before), values=a.ravel().tolist())
    if not a.flags.writeable:
        return NOTHING
    if not budget.allows(a.nbytes):  # no copy: a forward pass that writes into it fails before it has
        return Kept(lambda: a.setflags(write=True), lend=lambda: a.setflags(write=False))
    plain, shape = a.view(np.ndarray), a.shape  # past what subclasses override
    before = plain.copy()

    def restore() -> None:
        now = plain
        if a.shape != shape:
            a.resize(shape, refcheck=False)
            now = a.view(np.ndarray)
        if now.tobytes() != before.tobytes():
            np.copyto(now, before)

    return Kept(restore)


def _keep_torch_stream(stream: torch.Generator, budget: Budget) -> Kept:
    state = stream.get_state()

    def restore() -> None:
        if not torch.equal(stream.get_state(), state):
            stream.set_state(state)

    return Kept(restore)


def _keep_numpy_stream(stream: Any, budget: Budget) -> Kept:
    if isinstance(stream, np.random.RandomState):
        state = stream.get_state()
        return Kept(lambda: stream.set_state(state))
    bits = getattr(stream, "bit_generator", stream)
    now = bits.state
    return Kept(lambda: setattr(bits, "state", now))


def _keep_python_stream(stream: random.Random, budget: Budget) -> Kept:
    if isinstance(stream, random.SystemRandom):
        return NOTHING
    state = stream.getstate()
    return Kept(lambda: stream.setstate(state))


def _keep_file(file: Any, budget: Budget) -> Kept:
    """Where reading stands; and what is written, if the file is in memory. What goes to the disk has gone."""
    if file.closed or not (file.readable() and file.seekable()):
        return NOTHING
    try:
        place = file.tell()
    except OSError:  # a text file that is being iterated
        return NOTHING
    text = file.getvalue() if isinstance(file, (io.StringIO, io.BytesIO)) else None

    def restore() -> None:
        if text is not None and file.getvalue() != text:
            file.seek(0)
            file.truncate()
            file.write(text)
        if file.tell() != place:
            file.seek(place)

    return Kept(restore)


KEEPERS: list[tuple[Any, Keeper]] = [
    (Tensor, _keep_tensor), (np.ndarray, _keep_array), (torch.Generator, _keep_torch_stream),
    ((np.random.Generator, np.random.RandomState, np.random.BitGenerator), _keep_numpy_stream),
    (random.Random, _keep_python_stream), (io.IOBase, _keep_file), (dict, keep_dict), (list, _keep_list), (set, _keep_set),
    (collections.deque, _keep_deque), ((bytearray, array.array), _keep_numbers), ((tuple, frozenset), _unchanging),
    (types.FunctionType, _keep_function), (BOUND, lambda m, _: Kept(values=(m.__self__,))),
    (types.MethodType, lambda m, _: Kept(values=(m.__self__, m.__func__))),
    ((staticmethod, classmethod), lambda m, _: Kept(values=(m.__func__,))),
    (property, lambda p, _: Kept(values=(p.fget,))),
    (functools.partial, lambda p, _: Kept(values=(p.func, p.args, p.keywords))),
]  # fmt: skip
WHOLE = (Tensor, torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, io.IOBase,
         types.FunctionType, types.MethodType, *BOUND, staticmethod, classmethod, property)


# ----------------------------------------------------------------------------------------------------------- iterators
# Iterators that a model keeps can only be moved on, and what is inside a table cannot be reached: forward passes get another
# one, at the same place.

TABLES = "pandas.core.internals"  # what holds the numbers of a DataFrame or a Series


def _steps(kind: type) -> bool:
    """Is it an iterator whose place can only be moved on (itertools.count, iter(list), a generator, an epoch of a DataLoader), or
    the numbers behind a table of pandas?"""
    if kind.__module__.startswith(TABLES):
        return True
    if issubclass(kind, io.IOBase) or not hasattr(kind, "__next__") or left_alone(kind):
        return False
    return not (kind.__dictoffset__ or slots(kind)) or issubclass(kind, torch.utils.data.dataloader._BaseDataLoaderIter)


steps: Callable[[type], bool] = functools.lru_cache(4096)(_steps)


def stand_in(iterator: Any) -> tuple[Any, list[Any]]:
    """(an iterator at the same place, which may be moved on, what else it is made of); where none can be had, one that
    refuses."""
    try:
        return _second(iterator)
    except (TypeError, NotImplementedError):
        return Refusing(iterator), []


def _second(iterator: Any) -> tuple[Any, list[Any]]:
    """Iterators inside it are doubled too; what they go over is the same."""
    if type(iterator).__module__.startswith(TABLES):
        return iterator.copy(deep=True), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of copies of itertools, from Python 3.12
        build, arguments, *rest = iterator.__reduce__()
    inside: list[Any] = []

    def again(part: Any) -> Any:
        if steps(type(part)):
            part, more = _second(part)
            inside.extend(more)
        elif isinstance(part, tuple):
            part = tuple(map(again, part))
        else:
            inside.append(part)
        return part

    doubled = build(*map(again, arguments))
    if rest and rest[0] is not None:
        state = again(rest[0])
        doubled.__setstate__(tuple(part.copy() if type(part) is list else part for part in state)
                             if isinstance(state, tuple) else state)
    return doubled, inside


class Refusing:
    """Stands for something that a forward pass can only use up."""

    def __init__(self, iterator: Any) -> None:
        self._kind = type(iterator).__name__

    def __iter__(self) -> Refusing:
        return self

    def __next__(self) -> Any:
        raise CaptureError(f"the forward pass takes from a {self._kind} that the model keeps. What is taken cannot be put back, "
                           f"and training would go on without it: nothing was taken. Keep a list or an itertools.count, or "
                           f"take from it outside the forward pass.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return next(self)


# ---------------------------------------------------------------------------------------------------------- remembered

OF_TORCH = set(vars(nn.Module())) - {"training"}  # parameters, buffers, modules, hooks: handled by their owners
LONG = 1000  # items of a container; it comes after all shorter ones
CONTAINERS = (dict, list, set, defaultdict, OrderedDict)
VISITS = 10_000  # objects: up to 0.2 seconds if all of them are tensors


def _keepers(kind: type) -> tuple[Keeper, ...]:
    """How objects of this type are kept; nothing: they do not change, or are left alone."""
    if issubclass(kind, (type, types.ModuleType, types.CodeType, BaseException)) or left_alone(kind) or steps(kind):
        return ()
    parts: list[Keeper] = [keeper for base, keeper in KEEPERS if issubclass(kind, base)][:1]
    if not (parts and issubclass(kind, WHOLE)):
        parts += [keep_factory] * issubclass(kind, defaultdict)
        parts += [keep_attributes] * bool(kind.__dictoffset__) + [keep_slots] * bool(slots(kind))
    return tuple(parts)


keepers: Callable[[type], tuple[Keeper, ...]] = functools.lru_cache(4096)(_keepers)


class Memory:
    """What the modules of a model keep, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self.kept: list[Kept] = []
        self._empty: list[dict[Any, Any] | set[Any]] = []  # hooks and the like
        self._lent: list[tuple[Kept, Any, Any]] = []  # (holder, key, what stands in)
        self._doubles: dict[int, Any] = {}  # stand-ins of iterators
        self._budget, self._visits = Budget(), 0
        self._short, self._long = deque[Kept](), deque[Kept]()  # what is still to be looked into
        modules = list(model.modules())
        self._seen = {id(thing) for things in (modules, model.parameters(), model.buffers()) for thing in things}
        for module in modules:
            self._add_module(module)
        for kind in dict.fromkeys(base for module in modules for base in type(module).__mro__[:-1]):
            if not f"{kind.__module__}.".startswith("torch."):
                self._add(keep_class(kind))
        while (self._short or self._long) and self._visits < VISITS:
            self._look_into((self._short or self._long).popleft())

    def lend(self) -> None:
        """From now on forward passes may come."""
        for holder, key, double in self._lent:
            assert holder.put is not None
            holder.put(key, double)
        for kept in self.kept:
            if kept.lend is not None:
                kept.lend()

    def restore(self) -> list[str]:
        """Put back what has changed; sentences of what cannot be."""
        sentences = []
        for box in self._empty:
            if box:
                box.clear()
        for kept in self.kept:
            assert kept.restore is not None
            try:
                sentence = kept.restore()
            except Exception as error:  # one that cannot be put back must not keep the others from it
                sentence = f"something that the model keeps in an attribute could not be put back: {error}"
            if sentence is not None:
                sentences.append(sentence)
        return sentences

    def _add_module(self, module: nn.Module) -> None:
        attributes = vars(module)
        kept = keep_dict(attributes)
        own = [(key, value) for key, value in attributes.items() if key not in OF_TORCH]
        self._seen.add(id(attributes))
        self._add(kept._replace(keys=[key for key, _ in own], values=[value for _, value in own]))
        for name in OF_TORCH & attributes.keys():  # a forward pass may register something
            box = attributes[name]
            if isinstance(box, dict) and box:
                self.kept.append(keep_dict(box))
            elif isinstance(box, (dict, set)) and not box:
                self._empty.append(box)

    def _add(self, kept: Kept) -> None:
        if kept.restore is not None:
            self.kept.append(kept)
        if kept.values:
            (self._short if len(kept.values) <= LONG else self._long).append(kept)

    def _look_into(self, holder: Kept) -> None:
        values: Any = holder.values
        kinds = set(map(type, values))  # often a container holds numbers alone, and then however many
        if not any(keepers(kind) or steps(kind) for kind in kinds):
            return
        for key, value in zip_longest(holder.keys, values):
            if self._visits >= VISITS:
                return
            if keepers(type(value)):
                self._visit(value)
            double = self._double(value)
            if double is not value and holder.put is not None:
                self._lent.append((holder, key, double))

    def _visit(self, value: Any) -> None:
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._visits += 1
            for keeper in keepers(type(value)):
                self._add(keeper(value, self._budget))

    def _double(self, value: Any) -> Any:
        """What forward passes are given instead: of an iterator, in a tuple too, and of its methods."""
        if steps(type(value)):
            if id(value) not in self._doubles:
                self._doubles[id(value)], inside = stand_in(value)
                self._add(Kept(values=inside))
            return self._doubles[id(value)]
        if issubclass(type(value), tuple) and any(steps(type(part)) for part in value):
            return tuple.__new__(type(value), [self._double(part) for part in value])
        if type(value) in BOUND and steps(type(value.__self__)):
            return getattr(self._double(value.__self__), value.__name__)
        return value


@contextlib.contextmanager
def remembered(model: nn.Module) -> Iterator[None]:
    """What the modules keep is afterwards as it was, whatever forward passes do with it in between."""
    memory = Memory(model)
    with finished(memory.restore):
        memory.lend()
        yield


class Attributes:
    """The attributes of some modules as they are now, with the items of dicts, lists and sets in them, and which buffers
    there are and which are None. The numbers in buffers belong to a State."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._own = [(vars(module), dict(vars(module))) for module in model.modules()]
        self._boxes = [(box, box.copy()) for attributes, _ in self._own for key, box in attributes.items()
                       if type(box) in CONTAINERS and key not in OF_TORCH and len(box) <= LONG]
        self._buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]

    def put_back(self) -> None:
        for attributes, before in self._own:
            if len(attributes) != len(before) or any(attributes.get(key) is not value for key, value in before.items()):
                of_torch = {key: value for key, value in attributes.items() if key in OF_TORCH}
                attributes.clear()
                attributes.update(before | of_torch)
        for buffers, earlier in self._buffers:
            if buffers.keys() != earlier.keys() or None in earlier.values():
                now = dict(buffers)
                buffers.clear()
                buffers.update({key: b if b is None else now.get(key, b) for key, b in earlier.items()})
        for box, items in self._boxes:
            if not _same_items(box, items):
                box.clear()
                box.extend(items) if isinstance(box, list) else box.update(items)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the modules have these attributes; afterwards those that they had."""
        after = Attributes(self.model)
        try:
            self.put_back()
            yield
        finally:
            after.put_back()


def _same_items(box: Any, items: Any) -> bool:
    """The very same objects?"""
    if isinstance(box, list):
        return len(box) == len(items) and all(map(operator.is_, box, items))
    if isinstance(box, set):
        return bool(box == items)
    return box.keys() == items.keys() and all(box[key] is value for key, value in items.items())


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Around one forward pass: the attributes of modules are afterwards as they were. A model that caches a tensor computed from
    its weights computes it again in the next pass, from the weights of that pass."""
    before = Attributes(model)
    try:
        yield
    finally:
        before.put_back()
