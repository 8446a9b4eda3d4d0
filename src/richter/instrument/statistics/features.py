"""What a layer reads, example by example: Features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Mark, Remark
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import APART, Gathering, Group, Missing, Statistic, Wants

if TYPE_CHECKING:
    from richter.instrument.statistics.passes import Reading
    from richter.instrument.subject import Subject


@dataclass(frozen=True)
class Features(Statistic):
    """Phi "n (s d_in)" in float64: what each dense or grouped map reads on every example, positions side by side,
    masked ones zero."""

    name: str

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        maps = _readable(subject)
        numbers = sum(subject.survey.maps[k].positions * subject.pair(k)[0].shape[1] for k in maps)
        return Wants(tuple(maps), backward=False, reads=True, held=8 * subject.probe.n * numbers,
                     what=f"what {len(maps)} layers read on {subject.probe.n} examples")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Features(subject, {k: {} for k in _readable(subject)}, {"examples": subject.groups})


def _readable(subject: Subject) -> list[str]:
    """An index that a lookup reads is no feature."""
    return [k for k in subject.maps if subject.survey.maps[k].kind != "lookup"]


@dataclass
class _Features(Gathering):
    subject: Subject
    rows: dict[str, dict[int, Tensor]]  # by map, then by the first example of a chunk
    groups: Mapping[str, int]
    remark: Remark = field(default_factory=Remark)

    def add(self, reading: Reading) -> None:
        for name, rows in self.rows.items():
            h = reading.read(name)
            if h is not None:
                rows[reading.rows.start] = h.detach().to(self.subject.home, torch.float64).flatten(1)

    def merge(self, other: _Features) -> None:
        for name, rows in self.rows.items():
            rows.update(other.rows[name])

    def value(self, place: str, without: Group | None = None) -> Float[Tensor, "n d"]:
        if place not in self.rows:
            raise Missing(APART if place not in self.subject.maps else "it reads indices, which are no features")
        if place in self.subject.refused:
            raise Missing(self.subject.refused[place], Mark.REFUSED)
        rows = self.rows[place]
        sizes = {h.shape[1] for h in rows.values()}
        if sum(map(len, rows.values())) != self.subject.probe.n or len(sizes) != 1:
            raise Missing("not every example reads as much in this layer, so its features are no matrix")
        Phi = torch.cat([rows[i] for i in sorted(rows)])
        return Phi if without is None else Phi[torch.arange(len(Phi)) % self.subject.groups != without[1]]


FEATURES = Features("features")
