"""What failed while a model was watched: each reason once, with the steps at which it was seen and how often."""

from __future__ import annotations

import operator
import re
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import NoneType
from typing import Any

MOST = 100  # different reasons that are told apart: a training of days does not fill the memory with them
LONGEST = 800  # characters of a reason
OTHERS = "failures of further kinds, which are not told apart"


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
        """As it is kept with a run."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Any) -> Failure:
        """What ``to_json`` wrote, also in a later version. ValueError for anything else: runs come from strangers."""
        step = (int, NoneType)
        kinds: dict[str, tuple[type, ...]] = {"reason": (str,), "first": step, "last": step, "times": (int,)}
        if not isinstance(record, dict) or any(type(record.get(k)) not in kind for k, kind in kinds.items()):
            raise ValueError(f"a failure is a record of a reason, its steps and how often it was seen, not {str(record)[:80]!r}")
        return cls(**{k: record[k] for k in kinds})


def note_failure(failures: list[Failure], step: Any, reason: str) -> Failure:
    """Add one to those that are known. Reasons that differ in their numbers alone are one reason. Returns the entry."""
    at = _whole(step)
    reason = reason.encode("utf-8", "replace").decode()[:LONGEST]
    place = next((i for i, known in enumerate(failures) if alike(known.reason) == alike(reason)), None)
    if place is None and len(failures) >= MOST:
        return note_failure(failures, step, OTHERS) if reason != OTHERS else _added(failures, Failure(OTHERS, at, at))
    if place is None:
        return _added(failures, Failure(reason, at, at))
    known = failures[place]
    failures[place] = replace(known, first=at if known.first is None else known.first, last=known.last if at is None else at,
                              times=known.times + 1)
    return failures[place]


@lru_cache(4 * MOST)
def alike(reason: str) -> str:
    """The reason without its numbers, except those of names in quotes."""
    return re.sub(r"('[^']*')|0x[0-9a-fA-F]+|[-+]?\d[\d.,]*(?:e[-+]?\d+)?", lambda m: m[1] or "#", reason)


def _added(failures: list[Failure], failure: Failure) -> Failure:
    failures.append(failure)
    return failure


def _whole(step: Any) -> int | None:
    try:
        return operator.index(step)
    except Exception:  # whatever was given: this is the place where wrong arguments end
        return None
