"""Means and products of the model's outputs over the probe's examples: an embedding, as self-supervised learning trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch

from richter.core import Remark, show_bytes
from richter.core.values import SMALL
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.features import Scatter, scatter_without_each
from richter.instrument.statistics.frame import Gathering, Group, Missing, Place, Reading, Statistic, Wants
from richter.instrument.statistics.outputs import settling
from richter.instrument.subject import Subject

COPIES = 4  # of the products [d, d] beside those of each group, while they are added up
MASKED = "some outputs of an example are masked, so its outputs are no point of an embedding"


@dataclass(frozen=True)
class Embedding(Statistic):
    """Scatter of the outputs [n, d] over examples; several positions of an example side by side."""

    name: str
    place: Place = "model"

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        need = self._bytes(subject)
        if need > max(SMALL, subject.memory // 2):
            return (f"the products of {subject.survey.outputs:,} outputs take {show_bytes(need)}, more than half of memory=: "
                    f"pick the embedding with output=")
        return self

    def _bytes(self, subject: Subject) -> int:
        return 8 * (subject.groups + COPIES) * subject.survey.outputs ** 2

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        need = self._bytes(subject)
        return Wants(outputs=True, backward=False, held=need if need > SMALL else 0, what="products of the outputs")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Embedding(subject, {"examples": subject.groups}, settling(subject))


@dataclass
class _Embedding(Gathering):
    subject: Subject
    groups: Mapping[str, int]
    remark: Remark
    parts: dict[int, Scatter] = field(default_factory=dict)  # by group

    def add(self, reading: Reading) -> None:
        for group, rows in reading.groups():
            f = reading.f[rows].flatten(1).to(self.subject.home, torch.float64)
            if len(f):
                self._put(group, Scatter.of(f))

    def merge(self, other: _Embedding) -> None:
        for group, part in other.parts.items():
            self._put(group, part)

    def _put(self, group: int, part: Scatter) -> None:
        self.parts[group] = self.parts[group] + part if group in self.parts else part

    def value(self, place: str, without: Group | None = None) -> Scatter:
        if self.subject.targets.counted is not None:
            raise Missing(MASKED)
        return reduce(Scatter.__add__, (part for g, part in sorted(self.parts.items()) if without is None or g != without[1]))

    def leaving(self, place: str, kind: str) -> Sequence[Scatter]:
        if self.subject.targets.counted is not None:
            raise Missing(MASKED)
        return scatter_without_each([part for _, part in sorted(self.parts.items())])


EMBEDDING = Embedding("embedding")
