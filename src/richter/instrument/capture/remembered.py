"""Everything that modules keep beside their parameters and buffers, put back after a measurement, in place.

Remembered is what can be reached from the attributes of modules and of their classes: containers of all kinds and however nested,
tensors, arrays, random streams, caches and other objects, closures, default arguments, the place of iterators and of files that are
read. Objects stay the same ones; only what was changed is written. For the time of a measurement an iterator is replaced by another
one at the same place; one that cannot be doubled (a generator, an epoch of a DataLoader) by one that refuses to be moved on.

Not remembered: global variables, what is written to disk or sent away, the inside of objects of compiled extensions, and what runs
beside a model or around it (``kinds.LEFT_ALONE``: loggers, threads, queues of processes, optimisers, trainers).

What it costs is bounded. ``VISITS`` objects are looked into, those nearest to the modules first; numbers and strings do not count,
and a container is one object however long it is: of a data set of a million pairs that hangs on a model, which pairs it has is
put back, but not what is inside the last of them. Tensors and arrays are copied up to ``originals.BACKUP_BYTES``. A larger array cannot
be written into while a measurement is under way; that a larger tensor was written into is an error afterwards.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import nn

from richter.instrument.capture.kinds import Kept, keep_class, keep_dict, keepers, stand_in, steps
from richter.instrument.capture.originals import Budget, finished

OF_TORCH = set(vars(nn.Module())) - {"training"}  # parameters, buffers, modules, hooks: handled by their owners
VISITS = 20_000  # objects; about 50 ms


class Memory:
    """What the modules of a model keep, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self.kept: list[Kept] = []
        self._lent: list[tuple[Kept, Any, Any]] = []  # (holder, key, what stands in)
        self._doubles: dict[int, Any] = {}  # stand-ins of iterators
        self._budget, self._queue = Budget(), deque[Kept]()
        modules = list(model.modules())
        self._seen = {id(thing) for things in (modules, model.parameters(), model.buffers()) for thing in things}
        for module in modules:
            self._add_module(module)
        for kind in dict.fromkeys(base for module in modules for base in type(module).__mro__[:-1]):
            if not f"{kind.__module__}.".startswith("torch."):
                self._add(keep_class(kind))
        self._visits = 0
        while self._queue and self._visits < VISITS:
            self._look_into(self._queue.popleft())

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
        for kept in self.kept:
            if kept.restore is not None:
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
        for name in OF_TORCH:  # a forward pass may register something
            box = attributes.get(name)
            if isinstance(box, dict):
                self.kept.append(keep_dict(box))

    def _add(self, kept: Kept) -> None:
        self.kept.append(kept)
        if kept.values:
            self._queue.append(kept)

    def _look_into(self, holder: Kept) -> None:
        values: Any = holder.values
        kinds = set(map(type, values))  # often a container holds numbers alone, and then however many
        if any(map(keepers, kinds)):
            for value in values:
                if keepers(type(value)) and self._visits < VISITS:
                    self._visit(value)
        if holder.put is not None and any(steps(kind) or issubclass(kind, tuple) for kind in kinds):
            for key, value in zip(holder.keys, values, strict=True):
                double = self._double(value)
                if double is not value:
                    self._lent.append((holder, key, double))

    def _visit(self, value: Any) -> None:
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._visits += 1
            for keeper in keepers(type(value)):
                self._add(keeper(value, self._budget))

    def _double(self, value: Any) -> Any:
        """What forward passes are given instead: of an iterator, also in a tuple."""
        if steps(type(value)):
            if id(value) not in self._doubles:
                self._doubles[id(value)], inside = stand_in(value)
                self._add(Kept(values=inside))
            return self._doubles[id(value)]
        if isinstance(value, tuple) and any(steps(type(part)) for part in value):
            return tuple.__new__(type(value), [self._double(part) for part in value])
        return value


@contextlib.contextmanager
def remembered(model: nn.Module) -> Iterator[None]:
    """What the modules keep is afterwards as it was, whatever forward passes do with it in between."""
    memory = Memory(model)
    with finished(memory.restore):
        memory.lend()
        yield
