"""The small values that everything else uses: references, intervals, rows, marks, cards, failures, errors, sizes and text."""

from __future__ import annotations

import ctypes
import difflib
import enum
import fnmatch
import functools
import gc
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple

WHOLE = "*"  # the row of a snapshot that speaks of the whole model


def matches(name: str, pattern: str) -> bool:
    """Does a pattern name a layer: by its name, the name of a module that it is part of, or with wildcards?"""
    return name == pattern or fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


@dataclass(frozen=True)
class Ref:
    """Source of a definition: a paper and the place in it."""

    paper: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.paper}, {self.place}" if self.place else self.paper


@functools.cache
def references() -> dict[str, dict[str, Any]]:
    """Every paper by its short name: title, authors, year, venue, BibTeX."""
    return dict(json.loads(Path(__file__).with_name("references.json").read_text(encoding="utf-8")))


def reference(name: str) -> dict[str, Any]:
    if name not in references():
        raise unknown("the list of references", "paper", name, references())
    return references()[name]


def bibtex(names: Iterable[str]) -> str:
    """Return the BibTeX of some papers, each once."""
    return "\n\n".join(reference(name)["bibtex"] for name in dict.fromkeys(names))


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
        """Return its ends; None where it has none."""
        return [v if math.isfinite(v) else None for v in (self.low, self.high)]

    @classmethod
    def from_json(cls, ends: Any) -> Interval:
        if not isinstance(ends, list) or len(ends) != 2 or any(
                isinstance(v, bool) or not isinstance(v, (int, float, NoneType)) for v in ends):
            raise ValueError(f"an interval has two ends, not {str(ends)[:80]!r}")
        low, high = ends
        return cls(-math.inf if low is None else float(low), math.inf if high is None else float(high))


class Mark(enum.Enum):
    """Kind of the number in a row, or the reason why there is none. The words are kept in stores: do not change them."""

    EXACT = "exact"
    TRIVIAL = "trivial"  # right, and no finding: it has this value by definition
    ESTIMATED = "estimated"  # from a sketch or a sample
    BOUND = "bound"  # the true value lies on one side of it
    UNDEFINED = "undefined"  # 0/0, or something it needs was not given
    REFUSED = "refused"  # a number would be wrong
    IDLE = "idle"  # the layer is not used, or not trained
    FAILED = "failed"


class Remark(NamedTuple):
    """Mark and text beside a number, or in its place."""

    mark: Mark = Mark.EXACT
    text: str = ""


@dataclass(frozen=True)
class Row:
    """One number: step, layer, measure, value, standard error, note and mark."""

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
    """The class labels of a probe: their number, and what guessing gets right."""

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
        """Return the record that is kept with a run."""
        known = {} if self.entropy is None else {"entropy": self.entropy}
        return {"count": self.count, "classes": self.classes, "frequent": self.frequent, **known}

    @classmethod
    def from_json(cls, record: Any) -> Labels | None:
        """Read a record of ``to_json``; None for anything else: runs come from strangers, and older ones have none."""
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
    """Text about a measure, shown in reports, on the dashboard, in lists and in verdicts."""

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
        """Return the record that is kept with a run."""
        return {"title": self.title, "sentence": self.sentence, "unit": self.unit, "rich": self.rich,
                "typical": None if self.typical is None else self.typical.to_json(), "panel": self.panel,
                "range": self.range.to_json(), "whole": self.whole, "ref": self.ref and [self.ref.paper, self.ref.place]}

    @classmethod
    def from_json(cls, record: Any) -> Card:
        """Read a record of ``to_json``, also of a later version. ValueError for anything else: runs come from strangers."""
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
class Failure:
    """Something that was not measured, written or kept, and why; ``print`` it."""

    reason: str
    first: int | None  # step; None if what was given as one is no whole number
    last: int | None
    times: int = 1

    def __str__(self) -> str:
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{steps}{f' ({self.times} times)' if self.times > 1 else ''}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Return the record that is kept with a run."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Any) -> Failure:
        """Read a record of ``to_json``, also of a later version. ValueError for anything else: runs come from strangers."""
        step = (int, NoneType)
        kinds: dict[str, tuple[type, ...]] = {"reason": (str,), "first": step, "last": step, "times": (int,)}
        if not isinstance(record, dict) or any(type(record.get(k)) not in kind for k, kind in kinds.items()):
            raise ValueError(f"a failure is a record of a reason, its steps and how often it was seen, not {str(record)[:80]!r}")
        return cls(**{k: record[k] for k in kinds})


@dataclass(frozen=True)
class Prediction:
    """A number that a theory gives, and where the theory comes from; a theory adds the parts the number is made of."""

    value: float
    ref: Ref


# -------------------------------------------------------------------------------------------------------------- errors
# Every error that Richter raises on purpose: it says what was seen, why it matters and what to do.

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


class DisturbedError(CaptureError):
    """Weights, buffers or gradients changed while the model was measured, perhaps by another thread that trains it."""


class MixingError(CaptureError):
    """The output of one example depends on the other examples of its batch."""


class DivergedError(CaptureError):
    """Weights or outputs are NaN or infinite: nothing is wrong with what was asked for, but there is nothing to measure now."""


class MemoryBudgetError(RichterError, MemoryError):
    """``memory=`` cannot hold the smallest piece of work."""


class StoreError(RichterError, OSError):
    """A run could not be written or read; what was written before is intact."""


def unknown(owner: str, what: str, name: str, known: Iterable[str], of: str = "") -> SelectionError:
    """Error for a name that does not exist; it says which names are close to it, and which exist."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return SelectionError(f"{owner} has no {what} {name!r}{of}. "
                          + (f"Close to it: {', '.join(map(repr, near))}. " if near else "")
                          + f"It has: {', '.join(map(repr, known)) or 'none'}.")


# --------------------------------------------------------------------------------------------------------------- sizes
# Sizes in bytes, as people write and read them.

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

SMALL = 2 ** 26  # bytes: smaller arrays are not what a bound of memory is about


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
    """Write a size for people, rounded up so that it can be given back as ``memory=``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{math.ceil(size / unit * 100) / 100:.2f}{name}"
    return f"{math.ceil(size)}B"


# --------------------------------------------------------------------------------------------------------------- freed
# Memory that was freed, given back to the system: the C library keeps what it thinks will soon be wanted again, in pieces that
# do not serve larger arrays, and a bound of memory counts them.

@functools.cache
def _trim() -> Callable[[int], int] | None:
    """The function of glibc for this; None elsewhere."""
    try:
        return ctypes.CDLL(None).malloc_trim  # type: ignore[no-any-return]
    except (OSError, AttributeError, TypeError):
        return None


def trim(size: int) -> None:
    """Give freed memory back to the system, if ``size`` bytes are many: it takes some milliseconds."""
    if size > SMALL and (call := _trim()) is not None:
        call(0)


def give_back(size: int) -> None:
    """Give back memory that reference cycles hold, which are collected first."""
    if size > SMALL:
        gc.collect()
    trim(size)


# ---------------------------------------------------------------------------------------------------------------- text
# Text: tables for a terminal, and what is written in one place and read in another.

ASSUMED_LOSS = "squared error: whether it is the training's loss is not known"  # beside such a number
# beside what a network answers in eval mode while its norms normalise by numbers that are not the data's
NO_DATA, FEW_BATCHES = "of its norms have seen no data", "of its norms have seen few batches"
NO_HIDDEN = "no hidden layer: every linear map reads the model's input"  # in the place of a change of features
NO_MAP = "used, but not as a linear map that Richter knows"  # beside a weight
MOVED_BUFFERS = "buffers moved besides the weights"  # beside a comparison with the initial network


def few_of(names: Sequence[str], most: int = 4) -> str:
    """Name the first of them, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, lines: bool = True) -> str:
    """Make text from a stranger safe for a terminal: control characters, those that turn the direction of writing, and invalid
    ones are shown by their numbers. Without ``lines`` it stays one line."""
    seen = HIDDEN.sub(lambda c: c[0].encode("unicode_escape", "backslashreplace").decode(), text)
    return seen if lines else seen.replace("\n", "\\n").replace("\t", "\\t")


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Align columns; those in ``right`` flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) if i in right else cell.ljust(w)
                               for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows)
