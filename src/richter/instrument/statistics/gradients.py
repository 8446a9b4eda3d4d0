"""The gradient in a weight itself: Gradient. Positions add up, masked ones too, and so do other uses of the same parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from richter.core import Remark
from richter.instrument.captures import map_gradient, with_siblings
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import APART, GROUPS, Gathering, Group, Missing, Statistic, Wants, in_range
from richter.instrument.statistics.moments import Sums, remark_of
from richter.instrument.statistics.weights import block_diagonal

if TYPE_CHECKING:
    from richter.instrument.statistics.passes import Reading
    from richter.instrument.subject import Subject


@dataclass(frozen=True)
class Gradient(Statistic):
    """d/dW of mean_n sum_v <V_v, f(x_n)>, in the shape of the map's own matrix (grouped ones block-diagonal)."""

    name: str

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        return cotangents.lacking(subject) or self

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        users = with_siblings(subject.survey.maps, subject.maps)
        entries = sum(subject.survey.maps[k].entries for k in users)
        return Wants(tuple(users), reads=True,  # sums, those of the chunk in hand, and what is made of them
                     held=(8 * (GROUPS + 4) + subject.itemsize * GROUPS) * entries if users else 0,
                     what=f"the gradients of {len(users)} layers")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        n, groups = subject.probe.n, subject.groups
        sizes = [len(range(g, n, groups)) if g < groups else 0 for g in range(GROUPS)]
        users = with_siblings(subject.survey.maps, subject.maps)
        return _Gradient(subject, {k: Sums(counts=list(sizes)) for k in users}, {"examples": groups},
                         remark_of(subject, cotangents))


@dataclass
class _Gradient(Gathering):
    subject: Subject
    sums: dict[str, Sums]
    groups: Mapping[str, int]
    remark: Remark

    def add(self, reading: Reading) -> None:
        """An example that does not reach the map counts as well: it asks for nothing."""
        for name, sums in self.sums.items():
            c = reading.plain(name)
            for g, mine in reading.groups() if c is not None else ():
                part = c.take(mine)  # type: ignore[union-attr]
                if part.g.shape[1]:
                    sums.add(g, map_gradient(part.kind, part.h, part.g.sum(0), part.W.shape[-1]), 0)
        if reading.last:
            for sums in self.sums.values():
                sums.settle()

    def merge(self, other: _Gradient) -> None:
        for name, sums in self.sums.items():
            theirs = other.sums[name]
            sums.merge(Sums(theirs.sums, [0] * GROUPS))  # every rank counts all examples

    def value(self, place: str, without: Group | None = None) -> Tensor:
        maps = self.subject.survey.maps
        if place not in self.sums:
            raise Missing(APART)
        mine, W = maps[place], self.subject.W[place]
        users = [place] if mine.weight is None else [k for k in self.sums if maps[k].weight == mine.weight]
        whole = W.new_zeros(int(max(maps[k].index.max() for k in users)) + 1)  # of the parameter
        for k in users:
            mean = self.sums[k].mean(None if without is None else without[1])
            if isinstance(mean, Tensor):  # an example reached it
                whole.index_add_(0, maps[k].index.to(W.device), mean.reshape(-1).to(W.device))
        if without is None:
            in_range(whole, self.subject)
        G = whole[mine.index.to(W.device)].reshape(W.shape)
        return block_diagonal(G) if mine.kind == "grouped" else G


WEIGHT_GRADIENT = Gradient("weight_gradient")
