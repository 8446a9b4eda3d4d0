"""Iterators that a model keeps can only be moved on, and what is inside a table cannot be reached: forward passes get another
one, at the same place."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch.utils.data

from richter.core import CaptureError
from richter.instrument.capture.kinds import left_alone, slots

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
