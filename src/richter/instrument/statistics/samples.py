"""What is known of the features, targets and outputs of some examples: Sample, their means and products; and the statistic that
gathers it, SAMPLE. Where there are fewer examples than features the rows themselves are kept (Rows), which are smaller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import WHOLE, Remark
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.elsewhere import HeldOut
from richter.instrument.statistics.frame import Derived, Gathering, Group, Missing, Place, Remembered, Simple, Statistic, Wants
from richter.instrument.statistics.norms import settling
from richter.instrument.statistics.rows import NOT_FINITE, UNREACHED, Layers, lacking
from richter.instrument.statistics.scatter import Scatter, scatter_without_each
from richter.linalg import eigh

if TYPE_CHECKING:
    from richter.instrument.statistics.passes import Reading
    from richter.instrument.subject import Subject

ROWS = 4096  # that are multiplied at a time
DIGITS = 32  # what differs by less than so many roundings of its own numbers is the same


@dataclass(frozen=True, eq=False)
class Sample:
    """Means and products of features Phi [n, p], targets [n, C] and outputs F [n, C], side by side. Brackets <a|b> are means over
    the examples."""

    scatter: Scatter  # of [Phi, targets, F]
    p: int
    one_hot: bool  # are the targets classes?
    rounding: float = torch.finfo(torch.float64).eps  # of one number of features and outputs
    basis: Float[Tensor, "all p"] | None = None  # orthonormal columns in which Phi is written, where all would be too many

    @property
    def n(self) -> int:
        return self.scatter.n

    @property
    def C(self) -> int:
        return (len(self.scatter.mean) - self.p) // 2

    @property
    def features(self) -> int:
        return self.p if self.basis is None else len(self.basis)

    @property
    def _phi(self) -> slice:
        return slice(self.p)

    @property
    def _targets(self) -> slice:
        return slice(self.p, self.p + self.C)

    @property
    def _outputs(self) -> slice:
        return slice(self.p + self.C, None)

    @property
    def second(self) -> Float[Tensor, "d d"]:
        return self.scatter.second

    @property
    def phi_phi(self) -> Float[Tensor, "p p"]:
        return self.second[self._phi, self._phi]

    @property
    def phi_targets(self) -> Float[Tensor, "p C"]:
        return self.second[self._phi, self._targets]

    @property
    def phi_outputs(self) -> Float[Tensor, "p C"]:
        return self.second[self._phi, self._outputs]

    @property
    def target_power(self) -> Float[Tensor, " C"]:
        """|f*_j|^2."""
        return self.second.diagonal()[self._targets]

    @property
    def phi_mean(self) -> Float[Tensor, " p"]:
        return self.scatter.mean[self._phi]

    @property
    def phi_covariance(self) -> Float[Tensor, "p p"]:
        return self.scatter.covariance[self._phi, self._phi]

    @property
    def phi_output_covariance(self) -> Float[Tensor, "p C"]:
        return self.scatter.covariance[self._phi, self._outputs]

    @property
    def output_covariance(self) -> Float[Tensor, "C C"]:
        return self.scatter.covariance[self._outputs, self._outputs]

    @property
    def class_shares(self) -> Float[Tensor, " C"]:
        """Of all examples, the share of each class."""
        means = self.scatter.mean[self._targets]
        return means / means.sum()

    @property
    def varied(self) -> bool:
        """Do the features differ from example to example?"""
        return bool(self.phi_covariance.trace() > (DIGITS * self.rounding) ** 2 * self.phi_phi.trace())

    @cached_property
    def whitening(self) -> Float[Tensor, "C r"]:
        """B with <FB|FB> = 1: r outputs FB that span what the outputs span. Columns of any scale count alike; what is left of an
        output that the others give but for rounding is none."""
        G = self.second[self._outputs, self._outputs]
        size = G.diagonal().sqrt()
        scale = torch.where(size > 0, 1 / torch.where(size > 0, size, 1.0), 0.0)
        values, vectors = eigh(scale[:, None] * G * scale)
        least = max(DIGITS * len(G) * torch.finfo(torch.float64).eps, (DIGITS * self.rounding) ** 2) * values[-1]
        real = (values > least) & (values > 0)
        return scale[:, None] * vectors[:, real] / values[real].sqrt()

    @cached_property
    def spectrum(self) -> tuple[Float[Tensor, " p"], Float[Tensor, "p r"]]:
        """Eigenvalues of <Phi|Phi>, the largest first, zero where they are rounding, and the vectors of the others."""
        values, vectors = (t.flip(-1) for t in eigh(self.phi_phi))
        real = values > self.p * torch.finfo(torch.float64).eps * values[:1].clamp(min=0)
        return torch.where(real, values, 0.0), vectors[:, real]


@dataclass(frozen=True, eq=False)
class Rows:
    """The same, example by example: features, targets and outputs side by side."""

    Z: Float[Tensor, "n d"]
    p: int
    one_hot: bool
    rounding: float = torch.finfo(torch.float64).eps

    @property
    def n(self) -> int:
        return len(self.Z)

    def sample(self, basis: Float[Tensor, "p r"] | None = None) -> Sample:
        """``basis``: orthonormal columns in which the features are written."""
        Z = self.Z if basis is None else torch.cat([self.Z[:, :self.p] @ basis, self.Z[:, self.p:]], 1)
        first, *others = (Scatter.of(part) for part in Z.split(ROWS))
        p = self.p if basis is None else basis.shape[1]
        return Sample(sum(others, start=first), p, self.one_hot, self.rounding, basis)


def paired(fit: Rows | Sample, aside: Rows | Sample | None = None) -> tuple[Sample, Sample]:
    """A sample on which features are fitted and the one on which they are evaluated, the same if there is no other. Features are
    written in a basis of what all examples span, where these are fewer than the features: nothing is lost, and less to do."""
    given = [fit] if aside is None else [fit, aside]
    rows = [s for s in given if isinstance(s, Rows)]
    basis = None
    if len(rows) == len(given) and sum(s.n for s in rows) < fit.p:
        basis = torch.linalg.qr(torch.cat([s.Z[:, :s.p] for s in rows]).T)[0]
    samples = [s.sample(basis) if isinstance(s, Rows) else s for s in given]
    return samples[0], samples[-1]


# ----------------------------------------------------------------------------------------------------------- how it is gathered


@dataclass(frozen=True)
class Samples(Statistic):
    """What is known of what a map reads, beside targets and outputs: a Sample, or the Rows where they are few."""

    name: str
    place: Place = "read"

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        return lacking(subject) or self

    def _layers(self, subject: Subject) -> Layers:
        def held(p: int, C: int, rows: int) -> int:
            return 8 * (p + 2 * C) * (2 * rows if rows < p else (2 * subject.groups + 2) * (p + 2 * C))
        return Layers(subject, held)

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        layers = self._layers(subject)
        return Wants(tuple(layers.names), outputs=True, backward=False, reads=True, held=sum(map(layers.bytes, layers.names)),
                     what=f"products of the features of {len(layers.names)} layers")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Samples(self._layers(subject), {"examples": subject.groups}, settling(subject))


@dataclass
class Sums:
    """The scatter of rows that come a few at a time: they wait until they are as many as columns, because adding up two scatters
    costs as much as some rows."""

    settled: Scatter | None = None
    waiting: list[Tensor] = field(default_factory=list)

    def add(self, Z: Float[Tensor, "n d"]) -> None:
        self.waiting.append(Z)
        if sum(map(len, self.waiting)) >= Z.shape[1]:
            self._settle(Scatter.of(torch.cat(self.waiting)))
            self.waiting = []

    def _settle(self, part: Scatter) -> None:
        self.settled = part if self.settled is None else self.settled + part

    def merge(self, other: Sums) -> None:
        self._settle(other.total)

    def join(self, other: Sums) -> None:
        """The same, and rows that wait go on waiting."""
        if other.settled is not None:
            self._settle(other.settled)
        for Z in other.waiting:
            self.add(Z)

    @property
    def total(self) -> Scatter:
        if self.waiting:
            self._settle(Scatter.of(torch.cat(self.waiting)))
            self.waiting = []
        assert self.settled is not None  # it is made when the first rows come
        return self.settled


@dataclass
class _Samples(Gathering):
    layers: Layers
    groups: Mapping[str, int]
    remark: Remark
    rows: dict[str, dict[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)  # by map and first example: rows, groups
    sums: dict[str, dict[int, Sums]] = field(default_factory=dict)  # by map and group
    broken: set[str] = field(default_factory=set)  # maps that read what is not finite

    def add(self, reading: Reading) -> None:
        for name, part in self.layers.parts(reading):
            Z = torch.cat([part.Phi, part.Y, part.F], 1)
            if not torch.isfinite(part.Phi).all():
                self.broken.add(name)
            if self._few(name):
                self.rows.setdefault(name, {})[reading.rows.start] = (Z, part.group)
                continue
            for g in range(self.groups["examples"]):
                mine = Z[(part.group == g).to(Z.device)]
                if len(mine):
                    self.sums.setdefault(name, {}).setdefault(g, Sums()).add(mine)

    def _few(self, name: str) -> bool:
        return len(self.layers.targets) < self.layers.width(name)

    def merge(self, other: _Samples) -> None:
        for name, rows in other.rows.items():
            self.rows.setdefault(name, {}).update(rows)
        for name, sums in other.sums.items():
            for g, part in sums.items():
                self.sums.setdefault(name, {}).setdefault(g, Sums()).merge(part)
        self.broken |= other.broken

    def value(self, place: str, without: Group | None = None) -> Rows | Sample:
        name = self.layers.named(place)
        if name in self.broken:
            raise Missing(NOT_FINITE)
        left, common = None if without is None else without[1], self._common(name)
        if self._few(name):
            parts = [part for _, part in sorted(self.rows.get(name, {}).items())]
            Z, group = (torch.cat(t) for t in zip(*parts, strict=True)) if parts else (torch.zeros(0, 0), torch.zeros(0))
            self._check(name, len(Z))
            return Rows(Z if left is None else Z[(group != left).to(Z.device)], *common)
        self._check(name, sum(s.total.n for s in self.sums.get(name, {}).values()))
        first, *others = (s.total for g, s in sorted(self.sums[name].items()) if g != left)
        return Sample(sum(others, start=first), *common)

    def leaving(self, place: str, kind: str) -> Sequence[Rows | Sample]:
        """Sums without each group from those of the groups before and behind it."""
        name = self.layers.named(place)
        sums = self.sums.get(name, {})
        if len(sums) < max(2, self.groups[kind]) or name in self.broken:
            return super().leaving(place, kind)
        return [Sample(s, *self._common(name)) for s in scatter_without_each([s.total for _, s in sorted(sums.items())])]

    def _common(self, name: str) -> tuple[int, bool, float]:
        return self.layers.width(name), self.layers.one_hot, torch.finfo(self.layers.subject.source.dtype).eps

    def _check(self, name: str, rows: int) -> None:
        if rows != len(self.layers.targets):
            raise Missing(UNREACHED.format(rows=rows, all=len(self.layers.targets)))


SAMPLE = Samples("features_and_outputs")


@dataclass(frozen=True)
class OfLayer(Derived):
    """``compute`` of what is known of a layer's features: computed once for the last layer and for the whole model, which stands
    for it. ``held_out``: also of the probe's held-out examples, where it has some."""

    held_out: bool = False

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        needs = self.needs
        if self.held_out and subject.probe.held_out is not None and len(needs) == 1:
            needs = (*needs, HeldOut(needs[0]))
        return super(OfLayer, replace(self, needs=needs)).planned(subject, cotangents)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _OfLayer(super().begin(subject, cotangents, needs), subject)


class _OfLayer(Simple):
    def __init__(self, made: Gathering, subject: Subject) -> None:
        super().__init__(made.groups, made.remark)
        last = list(subject.survey.readouts)
        self.made, self.last = Remembered(made), last[0] if len(last) == 1 else WHOLE

    def value(self, place: str, without: Group | None = None) -> Any:
        return self.made.value(self.last if place == WHOLE else place, without)

    def leaving(self, place: str, kind: str) -> Sequence[Any]:
        return self.made.leaving(self.last if place == WHOLE else place, kind)
