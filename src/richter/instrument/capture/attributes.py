"""What modules keep beside their parameters and buffers, put back in place after a measurement.

Everything is put back that can be reached from the attributes of modules and of their classes: containers of all kinds, however
nested, tensors, arrays, random streams, caches and other objects, closures, default arguments, the place of iterators and of
files. Objects stay the same ones; only what changed is written. During a measurement an iterator is replaced by another one at
the same place; one that cannot be copied (a generator, an epoch of a DataLoader) by one that refuses.

Not put back: global variables, what is written to disk or sent away, the inside of objects of compiled extensions, and what runs
beside a model or around it (``LEFT_ALONE``: loggers, threads, queues of processes, optimisers, trainers). ``copy.deepcopy`` of
the attributes does less: it does not copy closures, default arguments, classes and weak references, it cannot copy generators and
tensors inside a graph, and a hook that refers to the original of a copied attribute would see other contents than its module.

The cost is bounded. ``VISITS`` objects are looked into: those nearest to the modules first, those in long containers last.
Numbers and strings do not count, and a container is one object however long it is: if a data set of a million pairs hangs on a
model, the list of pairs is put back, but not what a forward pass changes inside a pair. Tensors and arrays are copied up to
``BACKUP_BYTES``. A larger array is read-only during a measurement; a larger tensor that was written into is an error afterwards.
"""

from __future__ import annotations

import array
import contextlib
import functools
import io
import itertools
import operator
import random
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.utils.data
from torch import Tensor, nn

from richter.core import CaptureError, DisturbedError

# ----------------------------------------------------------------------------------------------------------- originals
# Tensors as they were: any changed bit is seen, and put back in place.

BACKUP_BYTES = 2**28  # of copies that are kept beside one kind of tensors (weights, gradients, attributes) during a measurement
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numbers of that many bytes, bit by bit


T = TypeVar("T")


def cached(function: Callable[[type], T]) -> Callable[[type], T]:
    """A cache that type checkers let classes into."""
    return functools.lru_cache(4096)(function)


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
        """Put it back; is it as it was, numbers, version, place in the graph and all?"""
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


def originals(tensors: Mapping[str, Tensor]) -> dict[str, Original]:
    """Tensors as they are now, with copies if all together are small enough."""
    copied = sum(map(size_of, tensors.values())) <= BACKUP_BYTES
    return {label: Original(t, copied) for label, t in tensors.items()}


def changed(tensors: Mapping[str, Original]) -> list[str]:
    return [label for label, original in tensors.items() if original.changed()]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Are they equal to the last bit? NaN equals the same NaN. Tensors that cannot be looked into count as equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_quantized or a.is_meta or a.is_mkldnn:
        return True
    return all(p.shape == q.shape and torch.equal(_bits(p), _bits(q)) for p, q in zip(_parts(a), _parts(b), strict=True))


def _parts(t: Tensor) -> list[Tensor]:
    """The tensors in which its numbers lie."""
    if t.layout is torch.strided or t.is_mkldnn:
        return [t]
    t = t if t.layout is torch.sparse_coo else t.to_sparse_coo()
    return [t._indices(), t._values()]


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
    """``finish`` puts things back, however the block ends. The sentences that it returns are an error, or notes of the error that
    is on its way."""
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
# What an object that hangs on a model holds, by its kind, and how that is put back in place.

HEAP_TYPE = 1 << 9  # of a type's __flags__: it was made by a class statement
# What runs beside the model, or around it: it acts on being changed, and no forward pass owns it.
LEFT_ALONE = ("accelerate.", "asyncio.", "concurrent.", "contextvars.", "enum.", "importlib.", "inspect.", "lightning.",
              "logging.", "mlflow.", "multiprocessing.", "pathlib.", "pytorch_lightning.", "re.", "richter.instrument.capture.",
              "socket.", "sqlite3.", "subprocess.", "threading.", "tokenizers.", "torch._dynamo.", "torch.cuda.",
              "torch.distributed.", "torch.fx.", "torch.optim.", "torch.utils.tensorboard.", "typing.", "wandb.", "weakref.")
BOUND = (types.BuiltinMethodType, types.MethodWrapperType)  # itertools.count().__next__, [].append
ABSENT = object()


class Kept(NamedTuple):
    """What one object holds. ``restore`` puts it back, and returns a sentence if it cannot."""

    restore: Callable[[], str | None] | None = None
    values: Collection[Any] = ()
    keys: Collection[Any] | None = None  # of the values; None: they are counted
    put: Callable[[Any, Any], None] | None = None  # replaces the value under a key
    lend: Callable[[], None] | None = None  # called before the first forward pass


Keeper = Callable[..., Kept]  # of an object, and of the bytes that may still be copied
NOTHING = Kept()


def same(a: Collection[Any], b: Collection[Any]) -> bool:
    """Are these the same objects, in the same order?"""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def contents(read: Callable[[Any], tuple[Any, Any]], write: Callable[..., Any], put: Callable[..., Any]) -> Keeper:
    """A keeper of objects that refer to others. ``read`` gives their keys (or None) and values; ``write`` puts all back."""
    def keep(thing: Any, _: Budget | None = None) -> Kept:
        found = read(thing)
        keys, values = None if found[0] is None else list(found[0]), list(found[1])

        def restore() -> None:
            keys_now, values_now = read(thing)
            if not (same(values_now, values) and (keys is None or same(keys_now, keys))):
                write(thing, keys, values)

        return Kept(restore, values, keys, functools.partial(put, thing))
    return keep


def state(read: Callable[[Any], Any], write: Callable[[Any, Any], Any]) -> Keeper:
    """A keeper of objects with a state that can be read and written."""
    def keep(thing: Any, _: Budget | None = None) -> Kept:
        before = read(thing)

        def restore() -> None:
            write(thing, before)

        return Kept(restore)
    return keep


def parts(*names: str) -> Keeper:
    """A keeper of objects that refer to the same others for ever."""
    return lambda thing, _: Kept(values=[getattr(thing, name) for name in names])


def _base(box: dict[Any, Any]) -> Any:
    """Its methods, past those that a subclass overrides."""
    return OrderedDict if isinstance(box, OrderedDict) else dict


def _read_dict(box: dict[Any, Any]) -> tuple[Any, Any]:
    return _base(box).keys(box), _base(box).values(box)


def _write_dict(box: dict[Any, Any], keys: list[Any], values: list[Any]) -> None:
    base, before = _base(box), dict(zip(keys, values, strict=True))
    for key in [key for key in base.keys(box) if key not in before]:
        base.pop(box, key)
    for key, value in before.items():  # not emptied and filled: another thread may read what nobody has changed
        if base.get(box, key, ABSENT) is not value:
            base.__setitem__(box, key, value)
    if not same(base.keys(box), keys):  # something was taken out and came back at the end
        for key, value in before.items():
            base.pop(box, key)
            base.__setitem__(box, key, value)


keep_dict = contents(_read_dict, _write_dict, lambda box, key, value: _base(box).__setitem__(box, key, value))
keep_list = contents(lambda box: (None, list.copy(box)), lambda box, _, values: list.__setitem__(box, slice(None), values),
                     list.__setitem__)
keep_set = contents(lambda box: (None, list(set.__iter__(box))),  # not emptied and filled: the others stay in their order
                    lambda box, _, values: (set.intersection_update(box, values), set.update(box, values)), lambda *_: None)
keep_deque = contents(lambda box: (None, list(deque.__iter__(box))),
                      lambda box, _, values: (deque.clear(box), deque.extend(box, values)), deque.__setitem__)


def _own_dict(thing: Any) -> dict[str, Any]:
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except Exception:  # it is somebody's proxy
        return {}
    return attributes if type(attributes) is dict else {}


@cached
def slots(kind: type) -> tuple[Any, ...]:
    return tuple(place for base in kind.__mro__ if base.__flags__ & HEAP_TYPE and "__slots__" in vars(base)
                 for place in vars(base).values() if isinstance(place, types.MemberDescriptorType))


def _read_slots(thing: Any) -> tuple[Any, Any]:
    found = {}
    for place in slots(type(thing)):
        with contextlib.suppress(AttributeError):  # nothing was put there yet
            found[place] = place.__get__(thing)
    return found.keys(), found.values()


def _write_slots(thing: Any, places: list[Any], values: list[Any]) -> None:
    for place in _read_slots(thing)[0]:
        if place not in places:
            place.__delete__(thing)
    for place, value in zip(places, values, strict=True):
        place.__set__(thing, value)


def _read_class(kind: type) -> tuple[Any, Any]:
    own = {name: value for name, value in vars(kind).items() if not (name.startswith("__") or name == "_abc_impl")}
    return own.keys(), own.values()


def _write_class(kind: type, names: list[str], values: list[Any]) -> None:
    for name in _read_class(kind)[0]:
        if name not in names:
            type.__delattr__(kind, name)
    for name, value in zip(names, values, strict=True):
        if vars(kind).get(name, ABSENT) is not value:
            type.__setattr__(kind, name, value)


keep_attributes = contents(lambda thing: _read_dict(_own_dict(thing)),
                           lambda thing, names, values: _write_dict(_own_dict(thing), names, values),
                           lambda thing, name, value: dict.__setitem__(_own_dict(thing), name, value))
keep_slots = contents(_read_slots, _write_slots, lambda thing, place, value: place.__set__(thing, value))
keep_class = contents(_read_class, _write_class, type.__setattr__)  # ``type(self).calls += 1``
keep_factory = contents(lambda box: (["default_factory"], [box.default_factory]),  # what makes missing items of a defaultdict
                        lambda box, _, values: setattr(box, "default_factory", values[0]), setattr)


def _keep_function(function: types.FunctionType, budget: Budget) -> Kept:
    """What is kept in its closure, in the defaults of its arguments and in its attributes."""
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            cells.append((cell, cell.cell_contents))
    constant = [box for box in (function.__defaults__, function.__kwdefaults__, function.__dict__) if box]

    def restore() -> None:
        for cell, value in cells:
            cell.cell_contents = value

    def put(i: int, value: Any) -> None:
        if i < len(cells):
            cells[i][0].cell_contents = value

    return Kept(restore, [*(value for _, value in cells), *constant], None, put) if cells or constant else NOTHING


# ---------------------------------------------------------------------------------------------------- numbers, streams


def _keep_tensor(t: Tensor, budget: Budget) -> Kept:
    if t.is_meta or t.is_nested:  # there are no numbers, or none that can be reached
        return NOTHING
    original = Original(t, copied=budget.allows(size_of(t)))
    grad = t.grad if t.is_leaf and t.requires_grad else None

    def restore() -> str | None:
        if t.is_leaf and t.requires_grad and original.requires_grad and t.grad is not grad:
            t.grad = grad
        if not original.changed() or original.restore():
            return None
        return (f"a tensor of shape {list(t.shape)} that hangs on the model was changed in place by the forward pass, and cannot "
                f"be put back: it is part of an autograd graph, or too large for a copy to be kept. Keep it as a buffer, or put "
                f"a new tensor in its place instead.")

    return Kept(restore, [] if grad is None else [grad])


def _keep_array(a: np.ndarray, budget: Budget) -> Kept:  # type: ignore[type-arg]
    if a.dtype.hasobject:
        objects = a.copy()
        return Kept(lambda: np.copyto(a, objects), a.ravel().tolist())
    if not a.flags.writeable:
        return NOTHING
    if not budget.allows(a.nbytes):  # no copy: a forward pass that writes into it fails before it has
        return Kept(lambda: a.setflags(write=True), lend=lambda: a.setflags(write=False))
    shape, plain = a.shape, a.view(np.ndarray)  # past what subclasses override
    before = plain.copy()

    def restore() -> None:
        now = plain
        if a.shape != shape:
            a.resize(shape, refcheck=False)
            now = a.view(np.ndarray)
        if now.tobytes() != before.tobytes():
            np.copyto(now, before)

    return Kept(restore)


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
        file.seek(place)

    return Kept(restore)


KEEPERS: list[tuple[Any, Keeper]] = [
    (Tensor, _keep_tensor), (np.ndarray, _keep_array),
    (torch.Generator, state(torch.Generator.get_state, lambda g, now: torch.equal(g.get_state(), now) or g.set_state(now))),
    (np.random.RandomState, state(np.random.RandomState.get_state, np.random.RandomState.set_state)),
    (np.random.Generator, state(lambda g: g.bit_generator.state, lambda g, now: setattr(g.bit_generator, "state", now))),
    (np.random.BitGenerator, state(lambda bits: bits.state, lambda bits, now: setattr(bits, "state", now))),
    (random.SystemRandom, parts()), (random.Random, state(random.Random.getstate, random.Random.setstate)),
    ((bytearray, array.array), state(lambda box: box[:], lambda box, now: box == now or box.__setitem__(slice(None), now))),
    (io.IOBase, _keep_file), (dict, keep_dict), (list, keep_list), (set, keep_set), (deque, keep_deque),
    ((tuple, frozenset), lambda box, _: Kept(values=list(box))), (types.FunctionType, _keep_function),
    (BOUND, parts("__self__")), (types.MethodType, parts("__self__", "__func__")), (property, parts("fget")),
    ((staticmethod, classmethod), parts("__func__")), (functools.partial, parts("func", "args", "keywords")),
]  # fmt: skip
WHOLE = (Tensor, torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, io.IOBase,
         types.FunctionType, types.MethodType, *BOUND, staticmethod, classmethod, property)  # have no attributes of a user's


@cached
def keepers(kind: type) -> tuple[Keeper, ...]:
    """How objects of this type are kept; nothing: they do not change, or are left alone."""
    if issubclass(kind, (type, types.ModuleType, types.CodeType, BaseException)) or steps(kind) \
            or f"{kind.__module__}.".startswith(LEFT_ALONE):
        return ()
    found = [keeper for base, keeper in KEEPERS if issubclass(kind, base)][:1]
    if not (found and issubclass(kind, WHOLE)):
        found += [keep_factory] * issubclass(kind, defaultdict)
        found += [keep_attributes] * bool(kind.__dictoffset__) + [keep_slots] * bool(slots(kind))
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------- iterators
# An iterator can only be moved on, and the inside of a table cannot be reached: forward passes get a copy at the same place.

TABLES = "pandas.core.internals"  # what holds the numbers of a DataFrame or a Series


@cached
def steps(kind: type) -> bool:
    """Is it an iterator whose place can only be moved on (itertools.count, iter(list), a generator, an epoch of a DataLoader), or
    the numbers behind a table of pandas?"""
    if kind.__module__.startswith(TABLES):
        return True
    if issubclass(kind, io.IOBase) or not hasattr(kind, "__next__") or f"{kind.__module__}.".startswith(LEFT_ALONE):
        return False
    return not (kind.__dictoffset__ or slots(kind)) or issubclass(kind, torch.utils.data.dataloader._BaseDataLoaderIter)


def second(iterator: Any) -> tuple[Any, list[Any]]:
    """(a copy of an iterator at the same place, which has copies of those inside it; what they go over, which is the same)."""
    if type(iterator).__module__.startswith(TABLES):
        return iterator.copy(deep=True), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of copies of itertools, from Python 3.12
        build, arguments, *rest = iterator.__reduce__()
    inside: list[Any] = []

    def again(part: Any) -> Any:
        if steps(type(part)):
            part, more = second(part)
            inside.extend(more)
        elif isinstance(part, tuple):
            part = tuple(map(again, part))
        else:
            inside.append(part)
        return part

    copied = build(*map(again, arguments))
    if rest and rest[0] is not None:
        place = again(rest[0])
        copied.__setstate__(tuple(part.copy() if type(part) is list else part for part in place)
                            if isinstance(place, tuple) else place)
    return copied, inside


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
CONTAINERS: dict[Any, Keeper] = {dict: keep_dict, list: keep_list, set: keep_set, defaultdict: keep_dict, OrderedDict: keep_dict}
VISITS = 10_000  # objects: up to 0.2 seconds if all of them are tensors


class Memory:
    """What the modules of a model keep, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self.kept: list[Kept] = []
        self._empty: list[dict[Any, Any] | set[Any]] = []  # hooks and the like
        self._lent: list[tuple[Callable[[Any, Any], None], Any, Any]] = []  # (put, key, what stands in)
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
        for put, key, double in self._lent:
            put(key, double)
        for kept in self.kept:
            if kept.lend is not None:
                kept.lend()

    def restore(self) -> list[str]:
        """Put back what has changed; sentences about what cannot be put back."""
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
        self._seen.add(id(attributes))
        kept = keep_dict(attributes)
        own = {key: value for key, value in attributes.items() if key not in OF_TORCH}
        self._add(kept._replace(keys=own.keys(), values=own.values()))
        for box in (attributes[name] for name in OF_TORCH & attributes.keys()):  # a forward pass may register something
            if box and type(box) in CONTAINERS:
                self.kept.append(CONTAINERS[type(box)](box))
            elif isinstance(box, (dict, set)):
                self._empty.append(box)

    def _add(self, kept: Kept) -> None:
        if kept.restore is not None:
            self.kept.append(kept)
        if kept.values:
            (self._short if len(kept.values) <= LONG else self._long).append(kept)

    def _look_into(self, holder: Kept) -> None:
        if not any(keepers(kind) or steps(kind) for kind in set(map(type, holder.values))):
            return  # often a container holds numbers alone, and then however many
        for key, value in zip(itertools.count() if holder.keys is None else holder.keys, holder.values, strict=False):
            if self._visits >= VISITS:
                return
            if id(value) not in self._seen and (found := keepers(type(value))):
                self._seen.add(id(value))
                self._visits += 1
                for keeper in found:
                    self._add(keeper(value, self._budget))
            double = self._double(value)
            if double is not value and holder.put is not None:
                self._lent.append((holder.put, key, double))

    def _double(self, value: Any) -> Any:
        """What forward passes are given instead: of an iterator, in a tuple too, and of its methods."""
        if steps(type(value)):
            if id(value) not in self._doubles:
                try:
                    self._doubles[id(value)], inside = second(value)
                except (TypeError, NotImplementedError):
                    self._doubles[id(value)], inside = Refusing(value), []
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
    """The attributes of some modules as they are now, with the items of dicts, lists and sets in them, and which buffers there
    are and which are None. The numbers in buffers belong to a State."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._kept: list[Kept] = []
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in model.modules():
            attributes = vars(module)
            self._kept.append(keep_dict(attributes))
            self._kept += [CONTAINERS[type(box)](box) for key, box in attributes.items()
                           if type(box) in CONTAINERS and key not in OF_TORCH and len(box) <= LONG]
            if isinstance(module._buffers, dict):  # not those of a scripted module
                self._buffers.append((module._buffers, dict(module._buffers)))

    def put_back(self) -> None:
        for kept in self._kept:
            assert kept.restore is not None
            kept.restore()
        for buffers, earlier in self._buffers:
            if buffers.keys() != earlier.keys() or None in earlier.values():
                now = dict(buffers)
                buffers.clear()
                buffers.update({key: b if b is None else now.get(key, b) for key, b in earlier.items()})

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the modules have these attributes; afterwards those that they had."""
        after = Attributes(self.model)
        try:
            self.put_back()
            yield
        finally:
            after.put_back()


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Around one forward pass: the attributes of modules are afterwards as they were. A model that caches a tensor computed from
    its weights computes it again in the next pass, from the weights of that pass."""
    before = Attributes(model)
    try:
        yield
    finally:
        before.put_back()
