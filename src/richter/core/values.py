"""Small types that all other packages use: references, intervals, rows, marks, cards, failures, errors, sizes and text."""

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

WHOLE = "*"  # name of the whole model in place of a layer


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern selects a layer: by its name, by the name of a module that contains it, or with wildcards."""
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
    """Record of a paper by its short name."""
    if name not in references():
        raise unknown("the list of references", "paper", name, references())
    return references()[name]


def bibtex(names: Iterable[str]) -> str:
    """Return the BibTeX of some papers, without repetitions."""
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
        """Interval with both ends moved outwards by ``slack``."""
        return Interval(self.low - slack, self.high + slack)

    def to_json(self) -> list[float | None]:
        """Return the two ends; None for an infinite one."""
        return [v if math.isfinite(v) else None for v in (self.low, self.high)]

    @classmethod
    def from_json(cls, ends: Any) -> Interval:
        if not isinstance(ends, list) or len(ends) != 2 or any(
                isinstance(v, bool) or not isinstance(v, (int, float, NoneType)) for v in ends):
            raise ValueError(f"an interval has two ends, not {str(ends)[:80]!r}")
        low, high = ends
        return cls(-math.inf if low is None else float(low), math.inf if high is None else float(high))


class Mark(enum.Enum):
    """Kind of the number in a row, or the reason why it is missing. The words are stored in runs: do not change them."""

    EXACT = "exact"
    TRIVIAL = "trivial"  # correct, but not a finding: it has this value by definition
    ESTIMATED = "estimated"  # from a sketch or a sample
    BOUND = "bound"  # the true value lies on one side of it
    UNDEFINED = "undefined"  # 0/0, or a required input is missing
    REFUSED = "refused"  # refused, because a number would be wrong
    IDLE = "idle"  # the layer is not used, or not trained
    FAILED = "failed"


class Remark(NamedTuple):
    """Mark and note of a number, or of a missing one."""

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
    """The class labels of a probe: their number, and the accuracy of guessing."""

    count: int  # number of labels: of examples, or of tokens
    classes: int  # number of classes of the outputs
    frequent: float  # share of the most frequent class, which is the accuracy of a constant output
    # entropy of the classes, the cross-entropy of the best constant output; None if the probe has another loss
    entropy: float | None = None

    @property
    def guess(self) -> float:
        """Loss of the best constant output."""
        return math.log(self.classes) if self.entropy is None else self.entropy

    @property
    def chance(self) -> float:
        """Accuracy of the better guess: at random, or always the most frequent class."""
        return max(1 / self.classes, self.frequent)

    @property
    def noise(self) -> float:
        """Standard deviation of an accuracy at chance level."""
        return math.sqrt(self.chance * (1 - self.chance) / self.count)

    def to_json(self) -> dict[str, Any]:
        """Return the record that is stored with a run."""
        optional = {} if self.entropy is None else {"entropy": self.entropy}
        return {"count": self.count, "classes": self.classes, "frequent": self.frequent, **optional}

    @classmethod
    def from_json(cls, record: Any) -> Labels | None:
        """Read a record of ``to_json``; None for anything else, because runs may come from strangers or from older versions."""
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
    rich: Literal["up", "down"] | None = None  # direction of its values when features are learned
    typical: Interval | None = None  # lazy training ends on one side of it, rich training on the other
    panel: str = ""  # heading of the panel in reports
    bounds: Interval = Interval()  # possible values
    whole: bool = False  # whether the axis shows the whole range, and not only the values
    ref: Ref | None = None

    @property
    def heading(self) -> str:
        """Title of the axis."""
        return f"{self.title} [{self.unit}]" if self.unit else self.title

    def to_json(self) -> dict[str, Any]:
        """Return the record that is stored with a run."""
        return {"title": self.title, "sentence": self.sentence, "unit": self.unit, "rich": self.rich,
                "typical": None if self.typical is None else self.typical.to_json(), "panel": self.panel,
                "bounds": self.bounds.to_json(), "whole": self.whole, "ref": self.ref and [self.ref.paper, self.ref.place]}

    @classmethod
    def from_json(cls, record: Any) -> Card:
        """Read a record of ``to_json``, also of a later version; ValueError for anything else, because runs may come from
        strangers."""
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
                   bounds=Interval.from_json(record.get("bounds", [None, None])), ref=None if ref is None else Ref(*ref))


@dataclass(frozen=True)
class Failure:
    """A failed measurement, write or other operation, with its reason; ``print`` it."""

    reason: str
    first: int | None  # step; None if the given step is not an integer
    last: int | None
    times: int = 1

    def __str__(self) -> str:
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{steps}{f' ({self.times} times)' if self.times > 1 else ''}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Return the record that is stored with a run."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Any) -> Failure:
        """Read a record of ``to_json``, also of a later version; ValueError for anything else, because runs may come from
        strangers."""
        step = (int, NoneType)
        kinds: dict[str, tuple[type, ...]] = {"reason": (str,), "first": step, "last": step, "times": (int,)}
        if not isinstance(record, dict) or any(type(record.get(k)) not in kind for k, kind in kinds.items()):
            raise ValueError(f"a failure is a record of a reason, its steps and how often it was seen, not {str(record)[:80]!r}")
        return cls(**{k: record[k] for k in kinds})


@dataclass(frozen=True)
class Prediction:
    """A number predicted by a theory, with its reference; theories add the components of the number."""

    value: float
    ref: Ref


# -------------------------------------------------------------------------------------------------------------- errors
# Errors that Richter raises on purpose. Each says what was seen, why it matters and what to do.

class RichterWarning(UserWarning):
    """Something was left out or done in another way than asked for; the text says what and why."""


class RichterError(Exception):
    """Base class of errors that Richter raises on purpose. Each says what was seen, why it matters and what to do."""


class ProbeError(RichterError, ValueError):
    """The probe (inputs, labels, mask) cannot give a correct number."""


class SelectionError(RichterError, ValueError):
    """A layer, measure or option does not exist or is invalid."""


class DataError(RichterError, OSError):
    """A data set is missing, cannot be fetched, or has wrong contents."""


class CaptureError(RichterError, RuntimeError):
    """The model did something that would make a number wrong."""


class DisturbedError(CaptureError):
    """Weights, buffers or gradients changed during a measurement, perhaps by another thread that trains the model."""


class MixingError(CaptureError):
    """The output of one example depends on the other examples of its batch."""


class DivergedError(CaptureError):
    """Weights or outputs are NaN or infinite. The request is valid, but there is nothing to measure."""


class MemoryBudgetError(RichterError, MemoryError):
    """``memory=`` cannot hold the smallest piece of work."""


class StoreError(RichterError, OSError):
    """A run could not be written or read. Data written before are intact."""


def unknown(owner: str, what: str, name: str, known: Iterable[str], of: str = "") -> SelectionError:
    """Make the error for a name that does not exist; it lists similar and existing names."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return SelectionError(f"{owner} has no {what} {name!r}{of}. "
                          + (f"Close to it: {', '.join(map(repr, near))}. " if near else "")
                          + f"It has: {', '.join(map(repr, known)) or 'none'}.")


# --------------------------------------------------------------------------------------------------------------- sizes
# Sizes in bytes, read and written with units.

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")  # in torch's words
DEVICE_LOST = ("CUDA error", "cuDNN error", "CUBLAS", "HIP error", "NCCL")  # after these nothing more can be computed there
SMALL = 2 ** 26  # bytes; smaller arrays do not count for memory limits


def parse_bytes(size: str | float) -> int:
    """Convert ``"2GiB"`` to 2147483648; numbers are bytes."""
    if isinstance(size, (int, float)) and not isinstance(size, bool):
        number, unit = float(size), "B"
    else:
        match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(size))
        if match is None or match[2].upper() not in _UNITS or match[1].count(".") > 1 or match[1] == ".":
            raise SelectionError(f"memory={size!r} is not a size. Write a number of bytes, or e.g. '500MB' or '2GiB'.")
        number, unit = float(match[1]), match[2].upper()
    if not (math.isfinite(number) and number > 0):
        raise SelectionError(f"memory={size!r} must be positive and finite.")
    return int(number * _UNITS[unit])


def show_bytes(size: float) -> str:
    """Write a size with a unit, rounded up so that it is valid for ``memory=``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{math.ceil(size / unit * 100) / 100:.2f}{name}"
    return f"{math.ceil(size)}B"


# --------------------------------------------------------------------------------------------------------------- freed
# Return freed memory to the system. The C library keeps memory that it may need again, in pieces that are too small for larger
# arrays, and it counts for memory limits.

@functools.cache
def _trim() -> Callable[[int], int] | None:
    """Return glibc's function for this; None on other systems."""
    try:
        return ctypes.CDLL(None).malloc_trim  # type: ignore[no-any-return]
    except (OSError, AttributeError, TypeError):
        return None


def trim(size: int) -> None:
    """Return freed memory to the system if ``size`` is large; it takes some milliseconds."""
    if size > SMALL and (call := _trim()) is not None:
        call(0)


def give_back(size: int) -> None:
    """Collect reference cycles, and return their memory to the system."""
    if size > SMALL:
        gc.collect()
    trim(size)


# ---------------------------------------------------------------------------------------------------------------- text
# Text: tables for a terminal, and sentences that are written in one place and recognised in another.

ASSUMED_LOSS = "squared error: whether it is the training's loss is not known"  # note of a loss
# Notes of outputs in eval mode, when running statistics of norms do not describe the data.
NO_DATA, FEW_BATCHES = "of its norms have seen no data", "of its norms have seen few batches"
NO_HIDDEN = "no hidden layer: every linear map reads the model's input"  # note of a missing feature change
NO_MAP = "used, but not as a linear map that Richter knows"  # note of a weight
ZERO_START = "zero-initialised: its weights began at zero"  # note of a module
REFERENCE_COPY = "frozen reference copy: its weights are the initial ones of"  # note of a module
MOVED_BUFFERS = "buffers moved besides the weights"  # note of a comparison with the initial network


def few_of(names: Sequence[str], most: int = 4) -> str:
    """List the first names, and the number of the remaining ones."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, lines: bool = True) -> str:
    """Make a text from a stranger safe for a terminal: control characters, characters that change the writing direction, and
    invalid ones are replaced by their codes. With ``lines=False`` it stays on one line."""
    escaped = HIDDEN.sub(lambda c: c[0].encode("unicode_escape", "backslashreplace").decode(), text)
    return escaped if lines else escaped.replace("\n", "\\n").replace("\t", "\\t")


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Align columns; those in ``right`` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) if i in right else cell.ljust(w)
                               for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows)


def progress(over: Iterable[Any] | None = None, *, title: str, total: float | None = None, unit: str = "it", **more: Any) -> Any:
    """Show a progress bar over ``over``, or a bar of ``total`` units, moved by ``.update()`` (it is a context manager). It
    appears after two seconds, on a terminal only, and is removed at the end."""
    from tqdm import tqdm
    return tqdm(over, desc=title, total=total, unit=unit, delay=2, leave=False, disable=None, **more)
