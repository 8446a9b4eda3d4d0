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

import contextlib
import functools
import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

from torch import nn

from richter.instrument.capture.iterators import stand_in, steps
from richter.instrument.capture.kinds import (
    BOUND,
    KEEPERS,
    WHOLE,
    Keeper,
    Kept,
    keep_attributes,
    keep_class,
    keep_dict,
    keep_factory,
    keep_slots,
    left_alone,
    slots,
)
from richter.instrument.capture.originals import Budget, finished

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
