"""A function of other statistics, computed once for all measures that need it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from richter.core import Mark, Remark
from richter.instrument.cotangents import Cotangents, Use
from richter.instrument.statistics.frame import Gathering, Group, Place, Simple, Statistic, leaves

if TYPE_CHECKING:
    from richter.instrument.subject import Subject

# (subject, cotangents, why the exact form cannot be had or "") -> what stands in for it; None: nothing has to
Estimate = Callable[["Subject", Cotangents, str], Statistic | None]


@dataclass(frozen=True)
class Derived(Statistic):
    """``compute(*needs)``; ``leaving(*needs, groups)``, if there is a quicker way, all values with one group of examples left out
    at once; ``estimate`` says what stands in for it."""

    name: str
    compute: Callable[..., Any]
    needs: tuple[Statistic, ...]
    leaving: Callable[..., Sequence[Any]] | None = None
    estimate: Estimate | None = None

    @property
    def use(self) -> Use:  # type: ignore[override]
        return "kernel" if any(s.use == "kernel" for s in leaves(self.needs)) else "mean"

    @property
    def place(self) -> Place:  # type: ignore[override]
        return "module" if any(s.place == "module" for s in leaves(self.needs)) else "map"

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        plans = [s.planned(subject, cotangents) for s in self.needs]
        reason = next((p for p in plans if isinstance(p, str)), "")
        stand_in = self.estimate(subject, cotangents, reason) if self.estimate is not None else None
        return stand_in or reason or replace(self, needs=tuple(s for s in plans if not isinstance(s, str)))

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Derived(self, needs)


class _Derived(Simple):
    def __init__(self, statistic: Derived, needs: tuple[Gathering, ...]) -> None:
        super().__init__({kind: n for g in needs for kind, n in g.groups.items()}, joined([g.remark for g in needs]))
        self.statistic, self.needs = statistic, needs
        self.left_out: tuple[str, Sequence[Any]] | None = None  # of one place, by groups of examples

    def value(self, place: str, without: Group | None = None) -> Any:
        s = self.statistic
        if s.leaving is not None and without is not None and without[0] == "examples":
            if self.left_out is None or self.left_out[0] != place:
                self.left_out = place, s.leaving(*(g.value(place) for g in self.needs), self.groups["examples"])
            return self.left_out[1][without[1]]
        return s.compute(*(g.value(place, without) for g in self.needs))


def joined(remarks: Sequence[Remark]) -> Remark:
    """What is to be said of a number that is made of several: the least exact mark, and every text once."""
    marks = [r.mark for r in remarks if r.mark is not Mark.EXACT]
    return Remark(marks[0] if marks else Mark.EXACT, "; ".join(dict.fromkeys(r.text for r in remarks if r.text)))
