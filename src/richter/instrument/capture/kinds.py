"""What an object that hangs on a model holds, by its kind, and how that is put back in place: the object stays the same one."""

from __future__ import annotations

import array
import collections
import functools
import io
import operator
import random
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from richter.instrument.capture.originals import Budget, Original, size_of

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
