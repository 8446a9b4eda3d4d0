"""What is known of the probe alone: OfProbe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import Gathering, Group, Place, Simple, Statistic

if TYPE_CHECKING:
    from richter.instrument.subject import Subject


@dataclass(frozen=True)
class OfProbe(Statistic):
    """Something of the probe, the same for every layer: read(subject)."""

    name: str
    read: Callable[[Any], Any]
    place: Place = "any"

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _OfProbe(self, subject)


class _OfProbe(Simple):
    def __init__(self, statistic: OfProbe, subject: Subject) -> None:
        super().__init__()
        self.statistic, self.subject = statistic, subject

    def value(self, place: str, without: Group | None = None) -> Any:
        return self.statistic.read(self.subject)


WEIGHT_DECAY = OfProbe("weight_decay", lambda subject: float(subject.probe.weight_decay))
