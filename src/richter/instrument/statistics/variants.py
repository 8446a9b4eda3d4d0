"""A statistic of another network or of other examples: Initial(S), Previous(S), HeldOut(S).

Initial(PTK_COVARIANCE)      of the network at initialisation; gathered once and kept
Previous(MATRIX)             at the last snapshot that was recorded; kept by the Observer, and in its run
HeldOut(FEATURES)            on the examples of Probe(held_out=)
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from richter.core import SelectionError
from richter.core.arrays import fingerprint
from richter.instrument.cotangents import Cotangents, Use
from richter.instrument.statistics.frame import (
    NO_INITIAL,
    Gathering,
    Group,
    Missing,
    Place,
    Remembered,
    Simple,
    Statistic,
    gathered,
)
from richter.instrument.subject import Subject

NO_HELD_OUT = "the probe has no held-out examples: Probe(x, y, held_out=(x2, y2))"
OTHER_PROBE = ("the last snapshot is of other examples: the run was resumed with another probe, and numbers of the two cannot be "
               "compared")
NO_PREVIOUS = ("no earlier snapshot is known to compare with: it takes an Observer, and a second measurement (a run that is "
               "resumed remembers numbers and tensors)")


@dataclass(frozen=True)
class _Around(Statistic):
    """Another statistic, elsewhere."""

    statistic: Statistic
    word: ClassVar[str]

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.word}({self.statistic.name})"

    @property
    def use(self) -> Use:  # type: ignore[override]
        return self.statistic.use

    @property
    def place(self) -> Place:  # type: ignore[override]
        return self.statistic.place

    def _around(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        """Return the statistic as it can be had there."""
        inner = self.statistic.planned(subject, cotangents)
        return inner if isinstance(inner, str) else replace(self, statistic=inner)


@dataclass(frozen=True)
class Initial(_Around):
    """S of the network with its initial weights, on the same examples."""

    word = "initial"

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        return NO_INITIAL if subject.start is None else self._around(subject.initially(), cotangents)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        key = (subject.origin, self, cotangents)
        if key not in subject.kept:
            subject.kept[key] = Remembered(_Elsewhere(gathered(subject.initially(), self.statistic, cotangents)),
                                           everywhere=True)
        return subject.kept[key]


@dataclass(frozen=True)
class HeldOut(_Around):
    """S on the probe's held-out examples."""

    word = "held_out"

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        return NO_HELD_OUT if subject.probe.held_out is None else self._around(subject.on_held_out(), cotangents)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Elsewhere(gathered(subject.on_held_out(), self.statistic, cotangents), "held_out")


@dataclass(frozen=True)
class Previous(_Around):
    """S at the last snapshot that was recorded. Its values are numbers or tensors, so that a run can keep them."""

    word = "previous"

    @property
    def needs(self) -> tuple[Statistic, ...]:  # type: ignore[override]
        return (self.statistic,)  # as it is now, for the next time

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        return self._around(subject, cotangents)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Previous(subject, self.statistic, cotangents, needs[0])


class _Elsewhere(Simple):
    """A statistic that has a pass of its own. ``kind``: its examples are not the probe's, so leaving some of them out is another
    matter."""

    def __init__(self, made: Gathering, kind: str = "examples") -> None:
        super().__init__({kind if k == "examples" else k: n for k, n in made.groups.items()}, made.remark)
        self.made, self.kind = made, kind

    def value(self, place: str, without: Group | None = None) -> Any:
        mine = None if without is None else ("examples" if without[0] == self.kind else without[0], without[1])
        return self.made.value(place, mine)


class _Previous(Simple):
    def __init__(self, subject: Subject, statistic: Statistic, cotangents: Cotangents, now: Gathering) -> None:
        super().__init__()
        self.subject, self.statistic, self.now = subject, statistic, now
        self.words = [*subject.origin, statistic.name, repr(cotangents)]
        self.probe = _print_of(subject) if _of_examples(statistic) else None

    def value(self, place: str, without: Group | None = None) -> Any:
        key, probe = json.dumps([*self.words, place]), json.dumps([*self.words, place, "probe"])  # as a run keeps them
        owner = self.subject.kept.setdefault(("previous", key), self.statistic)
        if owner != self.statistic:
            raise SelectionError(f"two statistics are called {self.statistic.name!r}, so that what Previous() keeps of one would "
                                 f"be taken for the other's. Give each a name of its own.")
        self.subject.carried[key] = copy.deepcopy(self.now.value(place))  # a weight goes on being trained
        if self.probe is not None:
            self.subject.carried[probe] = self.probe
        if key not in self.subject.previous:
            raise Missing(NO_PREVIOUS)
        if self.probe is not None and int(self.subject.previous.get(probe, self.probe)) != self.probe:  # older runs keep none
            raise Missing(OTHER_PROBE)
        return self.subject.previous[key]


def _of_examples(statistic: Statistic) -> bool:
    """Does it depend on the examples of the probe, by itself or by what it is made of?"""
    return any(map(_of_examples, statistic.needs)) if statistic.needs else statistic.of_examples


def _print_of(subject: Subject) -> int:
    """A number by which the examples of the probe are known again; it fits into a float64."""
    key = ("print of the probe", subject.origin)
    if key not in subject.kept:
        subject.kept[key] = int(fingerprint((subject.x, subject.probe.y))[:12], 16)
    return int(subject.kept[key])
