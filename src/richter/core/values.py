"""The small values that everything else speaks of: references, intervals, rows and their marks, predictions."""

from __future__ import annotations

import enum
import fnmatch
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

WHOLE = "*"  # the row of a snapshot that speaks of the whole model


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


class Mark(enum.Enum):
    """What kind of number a row holds, or why it holds none. The words are kept in stores: do not change them."""

    EXACT = "exact"
    TRIVIAL = "trivial"  # right, and no finding: it has this value by definition
    ESTIMATED = "estimated"  # from a sketch or a sample
    BOUND = "bound"  # the true value lies on one side of it
    UNDEFINED = "undefined"  # 0/0, or something it needs was not given
    REFUSED = "refused"  # a number would be wrong
    IDLE = "idle"  # the layer is not used, or not trained
    FAILED = "failed"


class Remark(NamedTuple):
    """What is to be said beside a number, or in the place of one."""

    mark: Mark = Mark.EXACT
    text: str = ""


@dataclass(frozen=True)
class Row:
    """One number: which measure, of which layer, when, how sure, what is to be said about it, and what kind of number it is."""

    step: int | None
    layer: str
    measure: str
    value: float
    error: float = math.nan
    note: str = ""
    mark: Mark = Mark.EXACT

    def __iter__(self) -> Iterator[object]:
        return iter((self.step, self.layer, self.measure, self.value, self.error, self.note, self.mark.value))


@dataclass(frozen=True)
class Card:
    """What people read about a measure: its title, one sentence, its unit, which way is rich, where its values usually lie, and
    the panel of reports in which it is drawn."""

    title: str
    sentence: str = ""
    unit: str = ""
    rich: Literal["up", "down"] | None = None
    typical: Interval | None = None
    panel: str = ""


@dataclass(frozen=True)
class Prediction:
    """A number that a theory gives, and where the theory comes from; a theory adds the parts the number is made of."""

    value: float
    ref: Ref
