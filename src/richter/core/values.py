"""The small values that everything else speaks of: references, intervals, rows and their marks, cards, predictions."""

from __future__ import annotations

import enum
import fnmatch
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, NamedTuple

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

    def to_json(self) -> list[float | None]:
        """Its ends; None where it has none."""
        return [v if math.isfinite(v) else None for v in (self.low, self.high)]

    @classmethod
    def from_json(cls, ends: Any) -> Interval:
        if not isinstance(ends, list) or len(ends) != 2 or any(
                isinstance(v, bool) or not isinstance(v, (int, float, NoneType)) for v in ends):
            raise ValueError(f"an interval has two ends, not {str(ends)[:80]!r}")
        low, high = ends
        return cls(-math.inf if low is None else float(low), math.inf if high is None else float(high))


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
class Labels:
    """What guessing gives on the class labels of a probe."""

    count: int  # labels: of examples, or of tokens
    classes: int  # that the outputs tell apart
    frequent: float  # the share of the most frequent class: what an output that is always the same gets right
    entropy: float | None = None  # of the classes: the cross-entropy of the best guess; None if that is not the probe's loss

    @property
    def guess(self) -> float:
        """The loss of the best guess that is the same for every example."""
        return math.log(self.classes) if self.entropy is None else self.entropy

    @property
    def chance(self) -> float:
        """The accuracy of the better guess: at random, or always the most frequent class."""
        return max(1 / self.classes, self.frequent)

    @property
    def noise(self) -> float:
        """The standard deviation of an accuracy at chance."""
        return math.sqrt(self.chance * (1 - self.chance) / self.count)

    def to_json(self) -> dict[str, Any]:
        """As it is kept with a run."""
        known = {} if self.entropy is None else {"entropy": self.entropy}
        return {"count": self.count, "classes": self.classes, "frequent": self.frequent, **known}

    @classmethod
    def from_json(cls, record: Any) -> Labels | None:
        """What ``to_json`` wrote; None for anything else: runs come from strangers, and older ones have none."""
        if not isinstance(record, dict):
            return None
        count, classes, frequent = (record.get(k) for k in ("count", "classes", "frequent"))
        if type(count) is not int or type(classes) is not int or not isinstance(frequent, (int, float)):
            return None
        entropy = record.get("entropy")
        if not isinstance(entropy, (int, float)) or not 0 < entropy <= math.log(max(2, classes)) + 1e-9:
            entropy = None
        return cls(count, classes, float(frequent), entropy) if count > 0 and classes > 1 and 0 < frequent < 1 else None


@dataclass(frozen=True)
class Card:
    """What people read about a measure, wherever it is shown: in reports, on the dashboard, in lists and in verdicts."""

    title: str
    sentence: str = ""
    unit: str = ""
    rich: Literal["up", "down"] | None = None  # which way its values go when features are learned
    typical: Interval | None = None  # lazy training ends on one side of it, rich training on the other
    panel: str = ""  # the heading under which reports draw it
    range: Interval = Interval()  # the values that are possible
    whole: bool = False  # its axis shows the whole range, not only the part where the values lie
    ref: Ref | None = None

    @property
    def heading(self) -> str:
        """The title of its axis."""
        return f"{self.title} [{self.unit}]" if self.unit else self.title

    def to_json(self) -> dict[str, Any]:
        """As it is kept with a run."""
        return {"title": self.title, "sentence": self.sentence, "unit": self.unit, "rich": self.rich,
                "typical": None if self.typical is None else self.typical.to_json(), "panel": self.panel,
                "range": self.range.to_json(), "whole": self.whole, "ref": self.ref and [self.ref.paper, self.ref.place]}

    @classmethod
    def from_json(cls, record: Any) -> Card:
        """What ``to_json`` wrote, also in a later version. ValueError for anything else: runs come from strangers."""
        if not isinstance(record, dict) or not isinstance(record.get("title"), str):
            raise ValueError(f"a card is a record with a title, not {str(record)[:80]!r}")
        kinds: dict[str, type] = {"sentence": str, "unit": str, "panel": str, "whole": bool}
        fields = {k: record[k] for k in kinds if k in record}
        if wrong := [k for k, v in fields.items() if not isinstance(v, kinds[k])]:
            raise ValueError(f"the card {record['title'][:80]!r} has a {wrong[0]} that is {str(fields[wrong[0]])[:80]!r}")
        typical, ref, rich = (record.get(k) for k in ("typical", "ref", "rich"))
        if rich not in ("up", "down", None):
            raise ValueError(f"the card {record['title'][:80]!r} says that rich is {str(rich)[:80]!r}: up, down or nothing")
        if ref is not None and not (isinstance(ref, list) and len(ref) == 2 and all(isinstance(t, str) for t in ref)):
            raise ValueError(f"the card {record['title'][:80]!r} has a reference that is {str(ref)[:80]!r}")
        return cls(record["title"], **fields, rich=rich, typical=None if typical is None else Interval.from_json(typical),
                   range=Interval.from_json(record.get("range", [None, None])), ref=None if ref is None else Ref(*ref))


@dataclass(frozen=True)
class Prediction:
    """A number that a theory gives, and where the theory comes from; a theory adds the parts the number is made of."""

    value: float
    ref: Ref
