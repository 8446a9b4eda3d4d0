"""Save and restore what modules keep beside their parameters and buffers, so that a measurement changes nothing in the model.

Everything that can be reached from the attributes of modules and of their classes is restored in place: nested containers,
tensors, arrays, random generators, caches and other objects, closures, default arguments, and the positions of iterators and
files. Every object keeps its identity, and only changed contents are written. During a measurement an iterator is replaced by a
copy at the same position. An iterator that cannot be copied (a generator, an epoch of a DataLoader) is replaced by an object that
raises.

Global variables, files on disk, the inside of objects of compiled extensions, and what runs beside or around a model
(``LEFT_ALONE``: loggers, threads, queues of processes, optimisers, trainers) are not restored.

``copy.deepcopy`` of the attributes is not enough, and can give wrong numbers: a forward pass that reads what a hook has just
written would read the copy, while the hook writes into the original. ``deepcopy`` also shares closures, default arguments,
classes and weak references with the original, fails for generators and tensors inside a graph, and copies data sets of any size.

The cost is bounded. At most ``VISITS`` objects are looked into: objects near the modules first, items of long containers last.
Numbers and strings do not count, and a container is one object of any length. If a list of a million pairs hangs on a model, the
list is restored, but a change inside a pair is not. Tensors and arrays are copied up to ``BACKUP_BYTES``. A larger array is
read-only during a measurement; a larger tensor that was written into is an error afterwards.
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
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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


class CopyBudget:
    """Number of bytes that may still be copied."""

    def __init__(self, left: int = BACKUP_BYTES) -> None:
        self.left = left

    def allows(self, size: int) -> bool:
        """Return whether a copy of this many bytes fits, and if so, subtract them from the budget."""
        if size > self.left:
            return False
        self.left -= size
        return True


class Original:
    """State of a tensor. With a copy, every change is detected; without one, changes that torch counts are."""

    def __init__(self, tensor: Tensor, copied: bool) -> None:
        self.tensor, self.version = tensor, _version(tensor)
        self.requires_grad, self.grad_fn = tensor.requires_grad, tensor.grad_fn
        self.alias = tensor.detach()  # where its numbers lie; the tensor may be given others (.data, set_, resize_)
        self.place, self.copy = _place(tensor), self.alias.clone() if copied and not tensor.is_meta else None

    def changed(self) -> bool:
        """Return whether the tensor was written to or moved, or its values differ from the copy, if there is one."""
        moved = _version(self.tensor) != self.version or _place(self.tensor) != self.place
        return moved or (self.copy is not None and not same_bits(self.tensor.detach(), self.copy))

    def restore(self) -> bool:
        """Restore the tensor. Return whether its numbers and its place in the graph are as before."""
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
    """States of tensors, with copies if the total size is at most ``BACKUP_BYTES``."""
    copied = sum(map(size_of, tensors.values())) <= BACKUP_BYTES
    return {label: Original(t, copied) for label, t in tensors.items()}


def changed(tensors: Mapping[str, Original]) -> list[str]:
    """Names of the tensors that have changed."""
    return [label for label, original in tensors.items() if original.changed()]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether all bits are equal. NaN equals the same NaN. Quantized, meta and mkldnn tensors count as equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_quantized or a.is_meta or a.is_mkldnn:
        return True
    return all(p.shape == q.shape and torch.equal(_bits(p), _bits(q)) for p, q in zip(_parts(a), _parts(b), strict=True))


def fingerprint(t: Tensor) -> int:
    """Checksum of the bits of a tensor: another one if a number changes, whether torch counts the change or not."""
    if t.is_quantized or t.is_meta or t.is_mkldnn or t.is_nested:
        return 0
    checksum = 0
    for part in _parts(t.detach()):
        checksum = zlib.crc32(_bits(part).cpu().contiguous().numpy().data, checksum)
    return checksum


def _parts(t: Tensor) -> list[Tensor]:
    """Dense tensors that store the numbers."""
    if t.layout is torch.strided or t.is_mkldnn:
        return [t]
    t = t if t.layout is torch.sparse_coo else t.to_sparse_coo()
    return [t._indices(), t._values()]


def _bits(t: Tensor) -> Tensor:
    """View a tensor as integers of the same size, for comparisons bit by bit."""
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    return t.resolve_neg().view(INTEGERS[t.element_size()])


def _version(t: Tensor) -> int | None:
    """Return the count of in-place writes to a tensor; inference tensors have none."""
    return None if t.is_inference() else t._version


def _place(t: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Address, shape and strides of a dense tensor."""
    return (t.data_ptr(), t.shape, t.stride()) if t.layout is torch.strided and not t.is_meta else None


def size_of(t: Tensor) -> int:
    """Bytes of a tensor, with the parts of a sparse one."""
    return sum(part.numel() * part.element_size() for part in _parts(t))


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the dense parameters of a model."""
    return sum(size_of(p) for p in model.parameters() if p.layout is torch.strided)


@contextlib.contextmanager
def finished(finish: Callable[[], list[str]]) -> Iterator[None]:
    """Call ``finish`` at the end of the block. The sentences it returns are raised as a CaptureError, or are added as notes to an
    exception that ended the block."""
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


class KeptContents(NamedTuple):
    """Contents of one object. ``restore`` puts them back, and returns a sentence if that is not possible."""

    restore: Callable[[], str | None] | None = None
    values: Collection[Any] = ()
    keys: Collection[Any] | None = None  # of the values; None: they are counted
    put: Callable[[Any, Any], None] | None = None  # replaces the value under a key
    lend: Callable[[], None] | None = None  # called before the first forward pass


Keeper = Callable[..., KeptContents]  # of an object, and of the bytes that may still be copied
NOTHING = KeptContents()


def same(a: Collection[Any], b: Collection[Any]) -> bool:
    """Return whether both hold the same objects in the same order."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def contents(read: Callable[[Any], tuple[Any, Any]], write: Callable[..., Any], put: Callable[..., Any]) -> Keeper:
    """Keeper of objects that refer to others. ``read`` returns keys (or None) and values; ``write`` restores them."""
    def keep(thing: Any, _: CopyBudget | None = None) -> KeptContents:
        found = read(thing)
        keys, values = None if found[0] is None else list(found[0]), list(found[1])

        def restore() -> None:
            keys_now, values_now = read(thing)
            if not (same(values_now, values) and (keys is None or same(keys_now, keys))):
                write(thing, keys, values)

        return KeptContents(restore, values, keys, functools.partial(put, thing))
    return keep


def state(read: Callable[[Any], Any], write: Callable[[Any, Any], Any]) -> Keeper:
    """Keeper of objects whose whole state can be read and written."""
    def keep(thing: Any, _: CopyBudget | None = None) -> KeptContents:
        before = read(thing)

        def restore() -> None:
            write(thing, before)

        return KeptContents(restore)
    return keep


def parts(*names: str) -> Keeper:
    """Keeper of objects whose references never change."""
    return lambda thing, _: KeptContents(values=[getattr(thing, name) for name in names])


def _base(box: dict[Any, Any]) -> Any:
    """Class whose methods are called, because a subclass may override them."""
    return OrderedDict if isinstance(box, OrderedDict) else dict


def _read_dict(box: dict[Any, Any]) -> tuple[Any, Any]:
    """Return the keys and values of a dict without calling the overrides of a subclass."""
    return _base(box).keys(box), _base(box).values(box)


def _write_dict(box: dict[Any, Any], keys: list[Any], values: list[Any]) -> None:
    """Restore the keys and values of a dict, in their order, with as few writes as possible."""
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
    """Return the ``__dict__`` of an object; empty if it has none or is a proxy."""
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except Exception:  # it is somebody's proxy
        return {}
    return attributes if type(attributes) is dict else {}


@cached
def slots(kind: type) -> tuple[Any, ...]:
    """Descriptors of the ``__slots__`` of a class and its bases."""
    return tuple(place for base in kind.__mro__ if base.__flags__ & HEAP_TYPE and "__slots__" in vars(base)
                 for place in vars(base).values() if isinstance(place, types.MemberDescriptorType))


def _read_slots(thing: Any) -> tuple[Any, Any]:
    """Return the filled slots of an object, as descriptors and values."""
    found = {}
    for place in slots(type(thing)):
        with contextlib.suppress(AttributeError):  # nothing was put there yet
            found[place] = place.__get__(thing)
    return found.keys(), found.values()


def _write_slots(thing: Any, places: list[Any], values: list[Any]) -> None:
    """Restore the filled slots of an object."""
    for place in _read_slots(thing)[0]:
        if place not in places:
            place.__delete__(thing)
    for place, value in zip(places, values, strict=True):
        place.__set__(thing, value)


def _read_class(kind: type) -> tuple[Any, Any]:
    """Return the names and values of a class's own attributes, without special ones."""
    own = {name: value for name, value in vars(kind).items() if not (name.startswith("__") or name == "_abc_impl")}
    return own.keys(), own.values()


def _write_class(kind: type, names: list[str], values: list[Any]) -> None:
    """Restore the attributes of a class."""
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


def _keep_function(function: types.FunctionType, budget: CopyBudget) -> KeptContents:
    """Keep the closure, the default arguments and the attributes of a function."""
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

    return KeptContents(restore, [*(value for _, value in cells), *constant], None, put) if cells or constant else NOTHING


# ---------------------------------------------------------------------------------------------------- numbers, streams


def _keep_tensor(t: Tensor, budget: CopyBudget) -> KeptContents:
    """Record a tensor and its gradient, with a function that restores both."""
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

    return KeptContents(restore, [] if grad is None else [grad])


def _keep_array(a: np.ndarray, budget: CopyBudget) -> KeptContents:  # type: ignore[type-arg]
    """Record a numpy array, with a copy if the budget allows one; otherwise it is read-only during the measurement."""
    if a.dtype.hasobject:
        objects = a.copy()
        return KeptContents(lambda: np.copyto(a, objects), a.ravel().tolist())
    if not a.flags.writeable:
        return NOTHING
    if not budget.allows(a.nbytes):  # no copy: a forward pass that writes into it fails before it has
        return KeptContents(lambda: a.setflags(write=True), lend=lambda: a.setflags(write=False))
    shape, plain = a.shape, a.view(np.ndarray)  # past what subclasses override
    before = plain.copy()

    def restore() -> None:
        now = plain
        if a.shape != shape:
            a.resize(shape, refcheck=False)
            now = a.view(np.ndarray)
        if now.tobytes() != before.tobytes():
            np.copyto(now, before)

    return KeptContents(restore)


_keep_memory_file = state(lambda file: file.__getstate__(),  # __setstate__ fails while a view of the contents exists
                          lambda file, before: file.__getstate__() == before or file.__setstate__(before))
_keep_position = state(lambda file: file.tell(), lambda file, position: file.seek(position))


def _keep_file(file: Any, budget: CopyBudget) -> KeptContents:
    """Keep the position of reading, and the contents of a file in memory. Writes to disk cannot be undone."""
    if file.closed or not (file.readable() and file.seekable()):
        return NOTHING
    with contextlib.suppress(OSError):  # tell() of a text file that is being iterated
        return _keep_memory_file(file, budget) if isinstance(file, (io.StringIO, io.BytesIO)) else _keep_position(file, budget)
    return NOTHING


KEEPERS: list[tuple[Any, Keeper]] = [
    (Tensor, _keep_tensor), (np.ndarray, _keep_array),
    (torch.Generator, state(torch.Generator.get_state, lambda g, now: torch.equal(g.get_state(), now) or g.set_state(now))),
    (np.random.Generator, parts("bit_generator")), (random.SystemRandom, parts()),
    ((np.random.RandomState, np.random.BitGenerator, random.Random),
     state(lambda g: g.__getstate__(), lambda g, before: g.__setstate__(before))),
    ((bytearray, array.array), state(lambda box: box[:], lambda box, now: box == now or box.__setitem__(slice(None), now))),
    (io.IOBase, _keep_file), (dict, keep_dict), (list, keep_list), (set, keep_set), (deque, keep_deque),
    ((tuple, frozenset), lambda box, _: KeptContents(values=list(box))), (types.FunctionType, _keep_function),
    (BOUND, parts("__self__")), (types.MethodType, parts("__self__", "__func__")), (property, parts("fget")),
    ((staticmethod, classmethod), parts("__func__")), (functools.partial, parts("func", "args", "keywords")),
]  # fmt: skip
WHOLE = (Tensor, torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, io.IOBase,
         types.FunctionType, types.MethodType, *BOUND, staticmethod, classmethod, property)  # have no attributes of a user's


@cached
def keepers(kind: type) -> tuple[Keeper, ...]:
    """Keepers for objects of this type; empty if such objects do not change or are left alone."""
    if issubclass(kind, (type, types.ModuleType, types.CodeType, BaseException)) or steps(kind) \
            or f"{kind.__module__}.".startswith(LEFT_ALONE):
        return ()
    found = [keeper for base, keeper in KEEPERS if issubclass(kind, base)][:1]
    if not (found and issubclass(kind, WHOLE)):
        found += [keep_factory] * issubclass(kind, defaultdict)
        found += [keep_attributes] * bool(kind.__dictoffset__) + [keep_slots] * bool(slots(kind))
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------- iterators
# The position of an iterator and the inside of a table cannot be written. Forward passes get a copy instead.

TABLES = "pandas.core.internals"  # what holds the numbers of a DataFrame or a Series


@cached
def steps(kind: type) -> bool:
    """Return whether objects of this type are replaced by a copy: iterators whose position can only advance (itertools.count,
    iter(list), a generator, an epoch of a DataLoader) and the numbers behind a table of pandas."""
    if kind.__module__.startswith(TABLES):
        return True
    if issubclass(kind, io.IOBase) or not hasattr(kind, "__next__") or f"{kind.__module__}.".startswith(LEFT_ALONE):
        return False
    return not (kind.__dictoffset__ or slots(kind)) or issubclass(kind, torch.utils.data.dataloader._BaseDataLoaderIter)


def second(iterator: Any) -> tuple[Any, list[Any]]:
    """Return a copy of an iterator, with copies of the iterators inside it, and the objects that both iterate over.

    ``copy.deepcopy`` would copy these objects too, and ``copy.copy`` would share the iterators inside."""
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
    """Replacement of an iterator that cannot be copied. Using it raises an error."""

    def __init__(self, iterator: Any) -> None:
        self._kind = type(iterator).__name__

    def __iter__(self) -> Refusing:
        return self

    def __next__(self) -> Any:
        raise CaptureError(f"the forward pass advances a {self._kind} that the model keeps. An item that is taken cannot be put "
                           "back, and training would miss it: nothing was taken. Keep a list or an itertools.count, or advance "
                           "it outside the forward pass.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return next(self)


# ---------------------------------------------------------------------------------------------------------- remembered

OF_TORCH = set(vars(nn.Module())) - {"training"}  # parameters, buffers, modules, hooks: handled by their owners
LONG = 1000  # items of a container; it comes after all shorter ones
CONTAINERS: dict[Any, Keeper] = {dict: keep_dict, list: keep_list, set: keep_set, deque: keep_deque, defaultdict: keep_dict,
                                 OrderedDict: keep_dict}
VISITS = 10_000  # objects: up to 0.2 seconds if all of them are tensors


class Memory:
    """Everything that can be reached from the attributes of a model's modules and of their classes."""

    def __init__(self, model: nn.Module) -> None:
        self.kept: list[KeptContents] = []
        self._empty: list[dict[Any, Any] | set[Any]] = []  # hooks and the like
        self._lent: list[tuple[Callable[[Any, Any], None], Any, Any]] = []  # (put, key, what stands in)
        self._doubles: dict[int, Any] = {}  # stand-ins of iterators
        self._budget, self._visits = CopyBudget(), 0
        self._short, self._long = deque[KeptContents](), deque[KeptContents]()  # what is still to be looked into
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
        """Put copies of iterators in place. Call it before the first forward pass."""
        for put, key, double in self._lent:
            put(key, double)
        for kept in self.kept:
            if kept.lend is not None:
                kept.lend()

    def restore(self) -> list[str]:
        """Restore everything that has changed. Return sentences about objects that cannot be restored."""
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
        """Record the attributes and registries (parameters, buffers, hooks) of a module."""
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

    def _add(self, kept: KeptContents) -> None:
        """Keep what restores a container, and queue its values for the search."""
        if kept.restore is not None:
            self.kept.append(kept)
        if kept.values:
            (self._short if len(kept.values) <= LONG else self._long).append(kept)

    def _look_into(self, holder: KeptContents) -> None:
        """Record the values of a container that have contents of their own, up to a maximal number of visits."""
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
        """Object that forward passes get instead of an iterator, a tuple of iterators or a method of an iterator."""
        if steps(type(value)):
            if id(value) not in self._doubles:
                try:
                    self._doubles[id(value)], inside = second(value)
                except (TypeError, NotImplementedError):
                    self._doubles[id(value)], inside = Refusing(value), []
                self._add(KeptContents(values=inside))
            return self._doubles[id(value)]
        if issubclass(type(value), tuple) and any(steps(type(part)) for part in value):
            return tuple.__new__(type(value), [self._double(part) for part in value])
        if type(value) in BOUND and steps(type(value.__self__)):
            return getattr(self._double(value.__self__), value.__name__)
        return value


@contextlib.contextmanager
def remembered(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules at the end of the block."""
    memory = Memory(model)
    with finished(memory.restore):
        memory.lend()
        yield


def containers(values: Iterable[Any]) -> Collection[Any]:
    """The containers among some values, those inside them, and so on, up to ``LONG`` items of one depth."""
    found: dict[int, Any] = {}
    level = list(values)
    while level:
        boxes = {id(box): box for box in level if type(box) in CONTAINERS and len(box) <= LONG and id(box) not in found}
        found |= boxes
        level = [item for box in boxes.values() for item in (box.values() if isinstance(box, dict) else box)]
        if len(level) > LONG:
            break
    return found.values()


class Attributes:
    """Attributes of all modules, with the items of containers in them, and the names of buffers, also of those that are None. A
    State holds the numbers in buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._kept: list[KeptContents] = []
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in model.modules():
            attributes = vars(module)
            self._kept.append(keep_dict(attributes))
            own = (value for key, value in attributes.items() if key not in OF_TORCH)
            self._kept += [CONTAINERS[type(box)](box) for box in containers(own)]
            if isinstance(module._buffers, dict):  # not those of a scripted module
                self._buffers.append((module._buffers, dict(module._buffers)))

    def put_back(self) -> None:
        """Restore all containers and the buffers of all modules."""
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
        """Give the modules these attributes inside the block, and their present ones afterwards."""
        after = Attributes(self.model)
        try:
            self.put_back()
            yield
        finally:
            after.put_back()


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of modules after one forward pass. A model that caches a tensor computed from its weights then
    computes it again in the next pass, from the weights of that pass."""
    before = Attributes(model)
    try:
        yield
    finally:
        before.put_back()
