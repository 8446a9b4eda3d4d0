"""The small vocabulary everything else speaks: references, intervals, rows, errors. Imports nothing of ours."""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["CaptureError", "DataError", "Interval", "MemoryBudgetError", "MixingError", "Prediction", "ProbeError", "Ref",
           "RichterError", "Row", "SelectionError", "StoreError", "matches", "parse_bytes", "show_bytes", "unknown"]

WHOLE = "*"  # the row of a snapshot that speaks of the whole model


class RichterError(Exception):
    """Base of every error Richter raises on purpose: it says what was seen, why it matters and what to do."""


class ProbeError(RichterError, ValueError):
    """The probe (inputs, labels, mask) cannot give a right number."""


class SelectionError(RichterError, ValueError):
    """A layer, measure or option that does not exist was asked for."""


class DataError(RichterError, OSError):
    """A data set is not there, cannot be fetched, or is not what it should be."""


class CaptureError(RichterError, RuntimeError):
    """The model did something under which a number would be wrong."""


class MixingError(CaptureError):
    """The output of one example depends on the other examples of its batch."""


class MemoryBudgetError(RichterError, MemoryError):
    """``memory=`` cannot hold the smallest piece of work."""


class StoreError(RichterError, OSError):
    """A run could not be written or read; what was written before is intact."""


def unknown(owner: str, what: str, name: str, known: Iterable[str], of: str = "") -> SelectionError:
    """Something was asked for by a name that does not exist: say which are close, and which there are."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return SelectionError(f"{owner} has no {what} {name!r}{of}. "
                          + (f"Close to it: {', '.join(map(repr, near))}. " if near else "")
                          + f"It has: {', '.join(map(repr, known)) or 'none'}.")


def matches(name: str, pattern: str) -> bool:
    """A layer by its name, by the name of what it is part of, or by a pattern."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


@dataclass(frozen=True)
class Ref:
    """Where a definition comes from: a source paper and the place in it."""

    paper: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.paper}, {self.place}" if self.place else self.paper


@dataclass(frozen=True)
class Interval:
    """A closed interval; ``x in Interval(0, 1)``."""

    low: float = -math.inf
    high: float = math.inf

    def __contains__(self, x: float) -> bool:
        return self.low <= x <= self.high

    def __str__(self) -> str:
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"[{self.low:g}, {self.high:g}]"
        return f">= {self.low:g}" if math.isfinite(self.low) else f"<= {self.high:g}" if math.isfinite(self.high) else "any"

    def widened(self, slack: float) -> Interval:
        return Interval(self.low - slack, self.high + slack)


@dataclass(frozen=True)
class Row:
    """One number: which measure, of which layer, when, how sure, and what is to be said about it."""

    step: int | None
    layer: str
    measure: str
    value: float
    error: float = math.nan
    note: str = ""

    def __iter__(self) -> Iterator[object]:
        return iter((self.step, self.layer, self.measure, self.value, self.error, self.note))


@dataclass(frozen=True)
class Prediction:
    """A number that a theory gives, and where the theory comes from; a theory adds the parts the number is made of."""

    value: float
    ref: Ref


_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(size: str | float) -> int:
    """``"2GiB"`` -> 2147483648; numbers are bytes."""
    if isinstance(size, (int, float)) and not isinstance(size, bool):
        number, unit = float(size), "B"
    else:
        found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(size))
        if found is None or found[2].upper() not in _UNITS or found[1].count(".") > 1 or found[1] == ".":
            raise SelectionError(f"memory={size!r} is not a size. Write a number of bytes, or e.g. '500MB' or '2GiB'.")
        number, unit = float(found[1]), found[2].upper()
    if not (math.isfinite(number) and number > 0):
        raise SelectionError(f"memory={size!r} must be positive and finite.")
    return int(number * _UNITS[unit])


def show_bytes(size: float) -> str:
    """A size a person reads, rounded up so that it can be given back as ``memory=``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{math.ceil(size / unit * 100) / 100:.2f}{name}"
    return f"{math.ceil(size)}B"
