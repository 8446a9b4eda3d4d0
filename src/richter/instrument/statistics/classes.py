"""Class means of features, and how the examples lie about them: CLASSES. Two passes: the means first, then what is centred on
them, of all examples and again with each group left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from richter.core import Remark
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import Gathering, Group, Missing, Place, Statistic, Wants
from richter.instrument.statistics.norms import settling
from richter.instrument.statistics.rows import NOT_FINITE, UNREACHED, Layers, Part, lacking

if TYPE_CHECKING:
    from richter.instrument.statistics.passes import Reading
    from richter.instrument.subject import Subject

NO_CLASSES = "the targets are no classes (one number of each example the same, the others 0), and only classes collapse"

NO_FRAME = "the class means could not be decomposed: there are none, or they are beyond the range of floating point numbers"


@dataclass(frozen=True, eq=False)
class Centres:
    """The means of the classes that have examples, and how they lie about their own mean."""

    present: Int[Tensor, " c"]  # the numbers of these classes
    counts: Int[Tensor, " c"]
    means: Float[Tensor, "c p"]

    @property
    def m(self) -> Float[Tensor, "c p"]:
        """From their mean."""
        return self.means - self.means.mean(0)

    @property
    def norms(self) -> Float[Tensor, " c"]:
        """|m_i|; zero where it is rounding."""
        size, least = self.m.norm(dim=1), 1e-14 * self.means.norm(dim=1).max()
        return torch.where(size > least, size, 0.0)

    def frame(self) -> tuple[Float[Tensor, " r"], Float[Tensor, "r p"]]:
        """Singular values above rounding, and right singular vectors, of the m_i: S_b = V^T (s^2/C) V."""
        _, s, V = torch.linalg.svd(self.m, full_matrices=False)
        least = max(self.m.shape) * torch.finfo(s.dtype).eps * max(s[0].item(), self.means.norm(dim=1).max().item())
        return s[s > least], V[s > least]

    def nearest(self, rows: Float[Tensor, "n p"]) -> Int[Tensor, " n"]:
        """argmin_i |Phi - mu_i|: without |Phi|^2, which is the same for all, and about the mean of the means: no digits are
        lost."""
        m = self.m
        return self.present[((rows - self.means.mean(0)) @ m.T - m.square().sum(1) / 2).argmax(1)]


@dataclass(eq=False)
class About:
    """What is centred on class means, in the span of these; added up over rows."""

    centres: Centres
    s: Float[Tensor, " r"]
    V: Float[Tensor, "r p"]
    squares: Float[Tensor, " r"]  # sum over the rows of <v_k, Phi - mu_i>^2
    others: int = 0  # rows that the last layer gives another class than the nearest mean
    n: int = 0

    @classmethod
    def of(cls, centres: Centres) -> About:
        s, V = centres.frame()
        return cls(centres, s, V, torch.zeros_like(s))

    def add(self, rows: Float[Tensor, "n p"], ids: Int[Tensor, " n"], guesses: Int[Tensor, " n"]) -> None:
        place = torch.searchsorted(self.centres.present, ids)
        self.squares += ((rows - self.centres.means[place]) @ self.V.T).square().sum(0)
        self.others += int((self.centres.nearest(rows) != guesses).sum())
        self.n += len(rows)

    def merge(self, other: About) -> None:
        self.squares, self.others, self.n = self.squares + other.squares, self.others + other.others, self.n + other.n

    @property
    def within(self) -> Float[Tensor, " r"]:
        """v_k^T S_W v_k."""
        return self.squares / self.n

    @property
    def mismatch(self) -> float:
        return self.others / self.n


@dataclass(frozen=True, eq=False)
class Classes:
    """What is known of the classes in the features of a layer."""

    about: About
    classes: int  # of which some may have no example
    weight: Float[Tensor, "classes p"] | None  # of the last layer; None: this is not what it reads


@dataclass(frozen=True)
class ClassMeans(Statistic):
    """Of what a map reads."""

    name: str
    place: Place = "read"

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        if lacking(subject):
            return lacking(subject)
        return self if self._layers(subject).one_hot else NO_CLASSES

    def _layers(self, subject: Subject) -> Layers:
        return Layers(subject, lambda p, C, rows: 8 * (3 * subject.groups + 4) * C * p)

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        layers = self._layers(subject)
        return Wants(tuple(layers.names), outputs=True, backward=False, reads=True, held=sum(map(layers.bytes, layers.names)),
                     what=f"class means of the features of {len(layers.names)} layers")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _ClassMeans(self._layers(subject), {"examples": subject.groups}, settling(subject))


@dataclass
class _ClassMeans(Gathering):
    layers: Layers
    groups: Mapping[str, int]
    remark: Remark
    sums: dict[str, Tensor] = field(default_factory=dict)  # "group class p", by map
    counts: dict[str, Tensor] = field(default_factory=dict)  # "group class"
    about: dict[str, list[About | None]] = field(default_factory=dict)  # of all rows, then without each group: the second pass
    broken: set[str] = field(default_factory=set)

    def add(self, reading: Reading) -> None:
        for name, part in self.layers.parts(reading):
            if not torch.isfinite(part.Phi).all():
                self.broken.add(name)
            ids, group = part.Y.argmax(1), part.group.to(part.Y.device)
            if name in self.about:
                self._centred(self.about[name], part, ids, group)
            elif not self.about:
                self._summed(name, part, ids, group)

    def _summed(self, name: str, part: Part, ids: Tensor, group: Tensor) -> None:
        groups, C = self.groups["examples"], self.layers.C
        if name not in self.sums:
            self.sums[name] = part.Phi.new_zeros(groups * C, part.Phi.shape[1])
            self.counts[name] = ids.new_zeros(groups * C)
        place = group * C + ids
        self.sums[name].index_add_(0, place, part.Phi)
        self.counts[name] += place.bincount(minlength=groups * C)

    def _centred(self, sets: list[About | None], part: Part, ids: Tensor, group: Tensor) -> None:
        guesses = part.F.argmax(1)
        for g, about in enumerate(sets, -1):
            keep = group != g
            if about is not None:
                about.add(part.Phi[keep], ids[keep], guesses[keep])

    def merge(self, other: _ClassMeans) -> None:
        """Sums after the first pass; after the second, which every rank begins with the same means, what was centred on them."""
        self.broken |= other.broken
        for name in other.sums if not self.about else ():
            self.sums[name] = self.sums[name] + other.sums[name] if name in self.sums else other.sums[name]
            self.counts[name] = self.counts[name] + other.counts[name] if name in self.counts else other.counts[name]
        for name, sets in self.about.items():
            for mine, theirs in zip(sets, other.about[name], strict=True):
                if mine is not None and theirs is not None:
                    mine.merge(theirs)

    def again(self) -> bool:
        if self.about:
            return False
        groups = self.groups["examples"]
        for name in self.sums.keys() - self.broken:
            sums, counts = (t.unflatten(0, (groups, -1)) for t in (self.sums[name], self.counts[name]))
            left_out = range(-1, groups if groups > 1 else 0)
            self.about[name] = [_about(sums, counts, g) for g in left_out]
        return bool(self.about)

    def value(self, place: str, without: Group | None = None) -> Classes:
        name = self.layers.named(place)
        if name in self.broken:
            raise Missing(NOT_FINITE)
        rows, subject = int(self.counts[name].sum()) if name in self.counts else 0, self.layers.subject
        if rows != len(self.layers.targets):
            raise Missing(UNREACHED.format(rows=rows, all=len(self.layers.targets)))
        about = self.about[name][0 if without is None else 1 + without[1]]
        if about is None:
            raise Missing(NO_FRAME)
        last = name in subject.survey.readouts and len(subject.pair(name)[0]) == self.layers.C
        return Classes(about, self.layers.C, subject.pair(name)[0].to(about.V) if last else None)


def _about(sums: Float[Tensor, "g c p"], counts: Int[Tensor, "g c"], left: int) -> About | None:
    """Without one group; None if nothing is left, or its class means have no singular values."""
    keep = torch.arange(len(counts), device=counts.device) != left
    number, total = counts[keep].sum(0), sums[keep].sum(0)
    present = number.nonzero()[:, 0]
    try:
        return About.of(Centres(present, number[present], total[present] / number[present, None])) if len(present) else None
    except torch.linalg.LinAlgError:
        return None


CLASSES = ClassMeans("class_means")
