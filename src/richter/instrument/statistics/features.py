"""Features: what a layer reads, a row for each example. FEATURES is the rows; CLASSES the class means, and how the examples lie
about them; SAMPLE the means and products of features, targets and outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from richter.core import WHOLE, Mark, Remark, show_bytes
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import (
    APART,
    NO_LABELS,
    Derived,
    Gathering,
    Group,
    Missing,
    Place,
    Reading,
    Remembered,
    Simple,
    Statistic,
    Wants,
)
from richter.instrument.statistics.outputs import settling
from richter.instrument.statistics.variants import HeldOut
from richter.instrument.subject import Subject
from richter.instrument.survey.survey import MapInfo
from richter.linalg import eigh

NO_FEATURES = "it reads indices, which are no features"


@dataclass(frozen=True)
class Features(Statistic):
    """Phi "n (s d_in)" in float64: what each dense or grouped map reads on every example, positions side by side,
    masked ones zero."""

    name: str

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        maps = _readable(subject)
        numbers = sum(subject.survey.maps[k].positions * subject.matrices.pair(k)[0].shape[1] for k in maps)
        return Wants(tuple(maps), backward=False, reads=True, held=8 * subject.probe.n * numbers,
                     what=f"what {len(maps)} layers read on {subject.probe.n} examples")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Features(subject, {k: {} for k in _readable(subject)}, {"examples": subject.groups})


def _readable(subject: Subject) -> list[str]:
    """Maps that read vectors, not indices of a table."""
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
            raise Missing(APART if place not in self.subject.maps else NO_FEATURES)
        if place in self.subject.masks.refused:
            raise Missing(self.subject.masks.refused[place], Mark.REFUSED)
        rows = [h for _, h in sorted(self.rows[place].items())]
        if sum(map(len, rows)) != self.subject.probe.n or len({h.shape[1] for h in rows}) != 1:
            raise Missing("not every example reads as much in this layer, so its features are no matrix")
        Phi = torch.cat(rows)
        return Phi if without is None else Phi[torch.arange(len(Phi)) % self.subject.groups != without[1]]


FEATURES = Features("features")


# ---------------------------------------------------------------------------------------------------------------- rows
# Which layers read features, a row for each example: the last layer, or any other that reads one position. Tokens count as
# examples where each has outputs of its own.

SHARE = 4  # of memory=, one part in so many is for features
SEVERAL = "{number} layers write the outputs ({names}), so the last layer is ambiguous: choose one with layers="
POSITIONS = ("it reads {positions} position{s} of each example, and the outputs are [{shape}]: features are the inputs behind "
             "one row of outputs. A layer behind Flatten(), or behind a mean over positions, has some")
UNREACHED = "only {rows} of {all} examples reach this layer, so the others have no features"
PARTLY = "some outputs of an example count and others do not, so the outputs of different examples span different spaces"
NOT_FINITE = "it reads NaN or Inf, so its averages are undefined"
NO_CLASSES = "the targets are not classes (one-hot up to a factor), and only classes collapse"


class FeatureRows(NamedTuple):
    """Some rows of one map, beside the outputs and targets."""

    Phi: Float[Tensor, "m p"]
    F: Float[Tensor, "m k"]
    Y: Float[Tensor, "m k"]
    group: Int[Tensor, " m"]


def one_hot(Y: Float[Tensor, "n k"]) -> bool:
    """Return whether each example has one positive target, equal for all examples, and the others are 0."""
    if not Y.numel() or Y.shape[1] < 2:
        return False
    top = Y.max()
    return bool(top > 0) and bool(((Y == 0) | (top == Y)).all()) and bool(((Y != 0).sum(1) == 1).all())


def features_of(info: MapInfo) -> int:
    """p: how many numbers a map reads at a position."""
    return info.shape[0] * info.shape[2] if info.kind == "grouped" else info.shape[-1]


@dataclass(frozen=True, eq=False)
class Layers:
    """The maps of a model that read features, on a probe."""

    subject: Subject
    held: Callable[[int, int, int], int]  # bytes that are kept of a map: of features, outputs and rows

    @property
    def tokens(self) -> int:
        """How many outputs of an example stand for tokens of their own; 1: the example has one."""
        shape = self.subject.survey.shape
        return shape[0] if len(shape) == 2 else 1

    @property
    def C(self) -> int:
        """Number of outputs per token."""
        return self.subject.survey.outputs // self.tokens

    @cached_property
    def targets(self) -> Float[Tensor, "m k"]:
        """Targets of all rows that count."""
        Y = self.subject.targets.Y
        assert Y is not None  # or it would not be planned
        return Y.reshape(-1, self.C)[self.counted.flatten().to(Y.device)]

    @cached_property
    def one_hot(self) -> bool:
        """Return whether the targets are one-hot."""
        return one_hot(self.targets)

    @property
    def whole(self) -> Bool[Tensor, "n t k"]:
        """Mask of the outputs that count."""
        shape, counted = (self.subject.probe.n, self.tokens, self.C), self.subject.targets.counted
        return torch.ones(1, dtype=torch.bool).expand(shape) if counted is None else counted.reshape(shape).cpu()

    @cached_property
    def counted(self) -> Bool[Tensor, "n t"]:
        """Examples, or tokens of them, that have a label and are not masked."""
        return self.whole.all(2)

    @property
    def lacking(self) -> str:
        """Why no layer has features beside outputs and targets; "" if some may."""
        if self.subject.targets.Y is None:
            return NO_LABELS
        return PARTLY if bool((self.whole.any(2) != self.counted).any()) else ""

    @cached_property
    def reasons(self) -> dict[str, str]:
        """Why a map has no features, by its name; "" if it has."""
        survey, reasons, room = self.subject.survey, {}, self.subject.memory // SHARE
        for name in sorted(self.subject.maps, key=lambda k: k not in survey.readouts):  # the last layer first
            info, need = survey.maps[name], self.bytes(name)
            if info.kind == "lookup":
                reasons[name] = NO_FEATURES
            elif info.positions != self.tokens:
                reasons[name] = POSITIONS.format(positions=info.positions, s="s" * (info.positions > 1),
                                                 shape=", ".join(map(str, ("n", *survey.shape))))
            elif need > room:
                reasons[name] = (f"memory= has no room for the products of its {self.width(name)} features ({show_bytes(need)}; "
                                 f"one part in {SHARE} is for features)")
            else:
                reasons[name], room = "", room - need
        return reasons

    @property
    def names(self) -> list[str]:
        return [k for k in self.subject.maps if not self.reasons[k]]

    def width(self, name: str) -> int:
        """Number of features that a map reads per example or token."""
        return features_of(self.subject.survey.maps[name])

    def bytes(self, name: str) -> int:
        """Bytes that the statistic holds for a map."""
        return self.held(self.width(name), self.C, self.subject.probe.n * self.tokens)

    def named(self, place: str) -> str:
        """The map that is meant; the whole model stands for its last layer."""
        subject = self.subject
        if place == WHOLE:
            last = sorted(subject.survey.readouts & set(subject.survey.maps))
            if len(last) != 1:
                raise Missing(SEVERAL.format(number=len(last), names=", ".join(last) or "none is a linear map"))
            place = last[0]
        if place not in subject.maps:
            raise Missing(APART)
        if self.reasons[place]:
            raise Missing(self.reasons[place])
        if place in subject.masks.refused:
            raise Missing(subject.masks.refused[place], Mark.REFUSED)
        return place

    def parts(self, reading: Reading) -> Iterator[tuple[str, FeatureRows]]:
        """Inputs that each map reads of these examples, in float64; maps that they do not reach are left out."""
        subject, keep = self.subject, self.counted[reading.rows].flatten()
        assert reading.Y is not None
        group = torch.tensor(reading.examples).repeat_interleave(self.tokens)[keep] % subject.groups
        F, Y = (t.reshape(-1, self.C)[keep.to(t.device)].to(subject.home, torch.float64) for t in (reading.f, reading.Y))
        for name in self.names:
            h = reading.read(name)
            if h is not None and h.shape[1] == self.tokens:
                Phi = h.detach().reshape(len(keep), -1)[keep.to(h.device)].to(subject.home, torch.float64)
                yield name, FeatureRows(Phi, F, Y, group)


class _OfLayers(Gathering):
    """Sums gathered over the rows of each map."""

    def __init__(self, layers: Layers) -> None:
        self.layers, self.groups, self.remark = layers, {"examples": layers.subject.groups}, settling(layers.subject)
        self.broken: set[str] = set()  # maps that read what is not finite

    def add(self, reading: Reading) -> None:
        for name, part in self.layers.parts(reading):
            if not torch.isfinite(part.Phi).all():
                self.broken.add(name)
            self.put(name, part, reading.rows.start)

    def put(self, name: str, part: FeatureRows, start: int) -> None:
        """Add the features of some examples of a layer; ``start`` is the place of the first."""
        raise NotImplementedError

    def name(self, place: str) -> str:
        """Map whose features a place shares; raise ``Missing`` if they were not finite."""
        name = self.layers.named(place)
        if name in self.broken:
            raise Missing(NOT_FINITE)
        return name

    def check(self, rows: int) -> None:
        """Raise ``Missing`` unless every example reached the layer."""
        if rows != len(self.layers.targets):
            raise Missing(UNREACHED.format(rows=rows, all=len(self.layers.targets)))


@dataclass(frozen=True)
class OfRows(Statistic):
    """A statistic of the rows of each map, beside targets and outputs."""

    name: str
    gathering: Callable[[Layers], Gathering]
    held: Callable[[int, int, int, int], int]  # bytes, from the numbers of groups, features, outputs and rows
    what: str
    of_classes: bool = False
    place: Place = "read"

    def _layers(self, subject: Subject) -> Layers:
        """Layers whose features are gathered."""
        return Layers(subject, partial(self.held, subject.groups))

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        layers = self._layers(subject)
        return layers.lacking or (NO_CLASSES if self.of_classes and not layers.one_hot else self)

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        layers = self._layers(subject)
        return Wants(tuple(layers.names), outputs=True, backward=False, reads=True, held=sum(map(layers.bytes, layers.names)),
                     what=f"{self.what} of the features of {len(layers.names)} layers")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return self.gathering(self._layers(subject))


# ------------------------------------------------------------------------------------------------------------- classes
# Class means of features, and how the examples lie about them: CLASSES. Two passes: the means first, then what is centred on
# them, of all examples and again with each group left out.

NO_FRAME = "the class means could not be decomposed: there are none, or they are beyond the range of floating point numbers"


@dataclass(eq=False)
class Classes:
    """The means of the classes that have examples, and how rows lie about them in the span of the means, added up over rows."""

    present: Int[Tensor, " c"]  # the numbers of these classes
    counts: Int[Tensor, " c"]
    means: Float[Tensor, "c p"]
    classes: int  # of which some may have no example
    weight: Float[Tensor, "classes p"] | None = None  # of the last layer; None: this is not what it reads
    others: int = 0  # rows that the last layer gives another class than the nearest mean
    n: int = 0

    def __post_init__(self) -> None:
        """Singular values above rounding, and right singular vectors, of the m_i: S_b = V^T (s^2/C) V."""
        self.m = self.means - self.means.mean(0)
        _, s, V = torch.linalg.svd(self.m, full_matrices=False)
        least = max(self.m.shape) * torch.finfo(s.dtype).eps * max(s[0].item(), self.means.norm(dim=1).max().item())
        self.s, self.V = s[s > least], V[s > least]
        self.squares = torch.zeros_like(self.s)  # sum over the rows of <v_k, Phi - mu_i>^2

    @property
    def norms(self) -> Float[Tensor, " c"]:
        """Norms |m_i| of the centred class means; zero where they are rounding errors."""
        size, least = self.m.norm(dim=1), 1e-14 * self.means.norm(dim=1).max()
        return torch.where(size > least, size, 0.0)

    def nearest(self, rows: Float[Tensor, "n p"]) -> Int[Tensor, " n"]:
        """Nearest class mean, argmin_i |Phi - mu_i|. |Phi|^2 is left out, and the mean of the means is subtracted, so that no
        digits are lost."""
        return self.present[((rows - self.means.mean(0)) @ self.m.T - self.m.square().sum(1) / 2).argmax(1)]

    def add(self, rows: Float[Tensor, "n p"], ids: Int[Tensor, " n"], guesses: Int[Tensor, " n"]) -> None:
        place = torch.searchsorted(self.present, ids)
        self.squares += ((rows - self.means[place]) @ self.V.T).square().sum(0)
        self.others += int((self.nearest(rows) != guesses).sum())
        self.n += len(rows)

    def merge(self, other: Classes) -> None:
        self.squares, self.others, self.n = self.squares + other.squares, self.others + other.others, self.n + other.n

    @property
    def within(self) -> Float[Tensor, " r"]:
        """Within-class scatter v_k^T S_W v_k along each direction v_k."""
        return self.squares / self.n


class ClassMeans(_OfLayers):
    """Class means in the first pass, and Classes in the second."""

    def __init__(self, layers: Layers) -> None:
        super().__init__(layers)
        self.sums: dict[str, Tensor] = {}  # "(group class) p", by map
        self.counts: dict[str, Tensor] = {}  # "(group class)"
        self.about: dict[str, list[Classes | None]] = {}  # of all rows, then without each group: the second pass

    def put(self, name: str, part: FeatureRows, start: int) -> None:
        """Add some examples to the class means, or in the second pass to the scatter about them."""
        ids, group = part.Y.argmax(1), part.group.to(part.Y.device)
        if self.about:
            guesses = part.F.argmax(1)
            for g, about in enumerate(self.about.get(name, ()), -1):
                keep = group != g
                if about is not None:
                    about.add(part.Phi[keep], ids[keep], guesses[keep])
            return
        size = self.groups["examples"] * self.layers.C
        if name not in self.sums:
            self.sums[name], self.counts[name] = part.Phi.new_zeros(size, part.Phi.shape[1]), ids.new_zeros(size)
        place = group * self.layers.C + ids
        self.sums[name].index_add_(0, place, part.Phi)
        self.counts[name] += place.bincount(minlength=size)

    def merge(self, other: ClassMeans) -> None:
        """Add the sums of another process: of the first pass, or of the second, which all begin with the same means."""
        self.broken |= other.broken
        for name in other.sums if not self.about else ():
            self.sums[name] = self.sums[name] + other.sums[name] if name in self.sums else other.sums[name]
            self.counts[name] = self.counts[name] + other.counts[name] if name in self.counts else other.counts[name]
        for name, sets in self.about.items():
            for about, others in zip(sets, other.about[name], strict=True):
                if about is not None and others is not None:
                    about.merge(others)

    def again(self) -> bool:
        if self.about:
            return False
        groups = self.groups["examples"]
        for name in self.sums.keys() - self.broken:
            sums, counts = (t.unflatten(0, (groups, -1)) for t in (self.sums[name], self.counts[name]))
            self.about[name] = [_classes(sums, counts, left) for left in range(-1, groups if groups > 1 else 0)]
        return bool(self.about)

    def value(self, place: str, without: Group | None = None) -> Classes:
        name, subject = self.name(place), self.layers.subject
        self.check(int(self.counts[name].sum()) if name in self.counts else 0)
        about = self.about[name][0 if without is None else 1 + without[1]]
        if about is None:
            raise Missing(NO_FRAME)
        W = subject.matrices.pair(name)[0]
        about.weight = W.to(about.V) if name in subject.survey.readouts and len(W) == self.layers.C else None
        return about


def _classes(sums: Float[Tensor, "g c p"], counts: Int[Tensor, "g c"], left: int) -> Classes | None:
    """Without one group; None if nothing is left, or its class means have no singular values."""
    keep = torch.arange(len(counts), device=counts.device) != left
    number, total = counts[keep].sum(0), sums[keep].sum(0)
    present = number.nonzero()[:, 0]
    try:
        means = total[present] / number[present, None]
        return Classes(present, number[present], means, len(number)) if len(present) else None
    except torch.linalg.LinAlgError:
        return None


CLASSES = OfRows("class_means", ClassMeans, lambda groups, p, C, rows: 8 * (3 * groups + 4) * C * p, "class means", True)


# ------------------------------------------------------------------------------------------------------------- scatter
# Means and products of rows that come in parts, and of all but each part.

REMAINING = 1e-3  # of a sum of squares: where less is left by a subtraction, too many digits are lost


@dataclass(frozen=True, eq=False)
class Scatter:
    """Rows Z as their number, their mean and the sum of products about it. Parts add up without subtracting large sums from each
    other, so that rows which hardly differ have a small scatter that is right."""

    n: int
    mean: Float[Tensor, " d"]
    about: Float[Tensor, "d d"]

    @classmethod
    def of(cls, Z: Float[Tensor, "n d"]) -> Scatter:
        """Count, mean and centred scatter matrix of some rows."""
        Z = Z.double()
        mean = Z.mean(0)
        Z = Z - mean
        return cls(len(Z), mean, Z.T @ Z)

    def __add__(self, other: Scatter) -> Scatter:
        n, step = self.n + other.n, other.mean - self.mean
        return Scatter(n, self.mean + step * (other.n / n),
                       self.about + other.about + torch.outer(step, step) * (self.n * other.n / n))

    def __sub__(self, part: Scatter) -> Scatter:
        """Subtract the scatter of some of the rows; accurate unless the remaining share is small."""
        n, step = self.n - part.n, part.mean - self.mean
        about = torch.addr(self.about - part.about, step, step, alpha=-part.n * self.n / n)
        return Scatter(n, self.mean - step * (part.n / n), about)

    @cached_property
    def covariance(self) -> Float[Tensor, "d d"]:
        """Covariance, the mean of (z - mean)(z - mean)^T."""
        return self.about / self.n

    @cached_property
    def second(self) -> Float[Tensor, "d d"]:
        """Second moments, the mean of z z^T."""
        return self.covariance + torch.outer(self.mean, self.mean)


def _whole(parts: Sequence[Scatter]) -> Scatter:
    """Sum of several scatters."""
    return functools.reduce(Scatter.__add__, parts)


def scatter_without_each(parts: Sequence[Scatter]) -> list[Scatter]:
    """Scatter of all rows without each of two or more parts: by subtraction, or summed anew if it would lose digits."""
    whole = _whole(parts)
    least = REMAINING * whole.about.trace()
    return [rest if (rest := whole - part).about.trace() > least else _whole([*parts[:i], *parts[i + 1:]])
            for i, part in enumerate(parts)]


# ------------------------------------------------------------------------------------------------------------- samples
# Features, targets and outputs of some examples: FeatureMoments are their means and products; and the statistic that
# gathers it, SAMPLE. Where there are fewer examples than features the rows themselves are kept (SampleRows), which are smaller.

ROWS = 4096  # that are multiplied at a time
DIGITS = 32  # what differs by less than so many roundings of its own numbers is the same


@dataclass(frozen=True, eq=False)
class FeatureMoments:
    """Means and products of features Phi [n, p], targets Y [n, C] and outputs F [n, C], side by side. Brackets <a|b> are means
    over the examples."""

    scatter: Scatter  # of [Phi, Y, F]
    p: int
    one_hot: bool  # are the targets classes?
    rounding: float = torch.finfo(torch.float64).eps  # of one number of features and outputs
    basis: Float[Tensor, "all p"] | None = None  # orthonormal columns in which Phi is written, where all would be too many

    @property
    def n(self) -> int:
        """Number of rows."""
        return self.scatter.n

    @property
    def C(self) -> int:
        """Number of targets."""
        return (len(self.scatter.mean) - self.p) // 2

    @property
    def features(self) -> int:
        """Number of features after the projection on the basis, if there is one."""
        return self.p if self.basis is None else len(self.basis)

    def _at(self, name: str) -> slice:
        """Columns of features, targets or outputs in the joint scatter matrix."""
        return {"Phi": slice(self.p), "Y": slice(self.p, self.p + self.C), "F": slice(self.p + self.C, None)}[name]

    def mean(self, a: str) -> Float[Tensor, " a"]:
        """Mean of a = "Phi", "Y" or "F" over the rows."""
        return self.scatter.mean[self._at(a)]

    def second(self, a: str, b: str) -> Float[Tensor, "a b"]:
        """Second moments, the mean of a b^T over the rows."""
        return self.scatter.second[self._at(a), self._at(b)]

    def covariance(self, a: str, b: str) -> Float[Tensor, "a b"]:
        """Covariance of a and b over the rows."""
        return self.scatter.covariance[self._at(a), self._at(b)]

    @property
    def varied(self) -> bool:
        """Do the features differ from example to example?"""
        return bool(self.covariance("Phi", "Phi").trace() > (DIGITS * self.rounding) ** 2 * self.second("Phi", "Phi").trace())

    @cached_property
    def whitening(self) -> Float[Tensor, "C r"]:
        """Matrix B with <FB|FB> = 1: the r outputs FB span the outputs. Outputs of any scale count alike; outputs that depend on
        others up to rounding are dropped."""
        G = self.second("F", "F")
        size = G.diagonal().sqrt()
        scale = torch.where(size > 0, 1 / torch.where(size > 0, size, 1.0), 0.0)
        values, vectors = eigh(scale[:, None] * G * scale)
        least = max(DIGITS * len(G) * torch.finfo(torch.float64).eps, (DIGITS * self.rounding) ** 2) * values[-1]
        real = (values > least) & (values > 0)
        return scale[:, None] * vectors[:, real] / values[real].sqrt()

    @cached_property
    def spectrum(self) -> tuple[Float[Tensor, " p"], Float[Tensor, "p r"]]:
        """Eigenvalues of <Phi|Phi>, the largest first, zero where they are rounding, and the vectors of the others."""
        values, vectors = (t.flip(-1) for t in eigh(self.second("Phi", "Phi")))
        real = values > self.p * torch.finfo(torch.float64).eps * values[:1].clamp(min=0)
        return torch.where(real, values, 0.0), vectors[:, real]

    Phi = None  # rows are not kept

    def sample(self, basis: Tensor | None = None) -> FeatureMoments:
        """Return these moments; there are no single rows to take."""
        return self


@dataclass(frozen=True, eq=False)
class SampleRows:
    """A sample as rows: features, targets and outputs side by side."""

    Z: Float[Tensor, "n d"]
    p: int
    one_hot: bool
    rounding: float = torch.finfo(torch.float64).eps

    @property
    def Phi(self) -> Float[Tensor, "n p"]:
        """Features, one row per example or token."""
        return self.Z[:, :self.p]

    def sample(self, basis: Float[Tensor, "p r"] | None = None) -> FeatureMoments:
        """``basis``: orthonormal columns in which the features are written."""
        Z = self.Z if basis is None else torch.cat([self.Phi @ basis, self.Z[:, self.p:]], 1)
        p = self.p if basis is None else basis.shape[1]
        return FeatureMoments(_whole([Scatter.of(part) for part in Z.split(ROWS)]), p, self.one_hot, self.rounding, basis)


def paired(fit: SampleRows | FeatureMoments,
           aside: SampleRows | FeatureMoments | None = None) -> tuple[FeatureMoments, FeatureMoments]:
    """Fitting and evaluation sample; equal if there is no held-out one. If there are fewer examples than features, both are
    written in a basis of the examples' span, which loses nothing."""
    given = [fit] if aside is None else [fit, aside]
    rows = [s.Phi for s in given if s.Phi is not None]
    few = len(rows) == len(given) and sum(map(len, rows)) < fit.p
    basis = torch.linalg.qr(torch.cat(rows).T)[0] if few else None
    samples = [s.sample(basis) for s in given]
    return samples[0], samples[-1]


@dataclass
class FeatureSums:
    """The scatter of rows that come a few at a time: they wait until they are as many as columns, because adding up two scatters
    costs as much as some rows."""

    settled: Scatter | None = None
    waiting: list[Tensor] = field(default_factory=list)

    def add(self, Z: Float[Tensor, "n d"]) -> None:
        self.waiting.append(Z)
        if sum(map(len, self.waiting)) >= Z.shape[1]:
            self._settle()

    def _settle(self, part: Scatter | None = None) -> None:
        """Add the rows that wait, or a scatter, to the total."""
        if part is None:
            part, self.waiting = Scatter.of(torch.cat(self.waiting)), []
        self.settled = part if self.settled is None else self.settled + part

    def merge(self, other: FeatureSums) -> None:
        if other.settled is not None:
            self._settle(other.settled)
        for Z in other.waiting:
            self.add(Z)

    @property
    def total(self) -> Scatter:
        """Scatter of all rows added so far."""
        if self.waiting:
            self._settle()
        assert self.settled is not None  # it is made when the first rows come
        return self.settled


class Samples(_OfLayers):
    """Joint moments of a map's inputs, targets and outputs; rows in place of moments if they are few."""

    def __init__(self, layers: Layers) -> None:
        super().__init__(layers)
        self.rows: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}  # by map and first example: rows, groups
        self.sums: dict[str, dict[int, FeatureSums]] = {}  # by map and group

    def put(self, name: str, part: FeatureRows, start: int) -> None:
        """Add the features, targets and outputs of some examples: as rows if they are few, otherwise as sums per group."""
        Z = torch.cat([part.Phi, part.Y, part.F], 1)
        if self._few(name):
            self.rows.setdefault(name, {})[start] = (Z, part.group)
            return
        for g in range(self.groups["examples"]):
            rows = Z[(part.group == g).to(Z.device)]
            if len(rows):
                self.sums.setdefault(name, {}).setdefault(g, FeatureSums()).add(rows)

    def _few(self, name: str) -> bool:
        """Return whether there are fewer rows than features, so that rows are stored in place of sums."""
        return len(self.layers.targets) < self.layers.width(name)

    def merge(self, other: Samples) -> None:
        self.broken |= other.broken
        for name, rows in other.rows.items():
            self.rows.setdefault(name, {}).update(rows)
        for name, sums in other.sums.items():
            for g, part in sums.items():
                self.sums.setdefault(name, {}).setdefault(g, FeatureSums()).merge(part)

    def value(self, place: str, without: Group | None = None) -> SampleRows | FeatureMoments:
        name, left = self.name(place), None if without is None else without[1]
        if self._few(name):
            parts = [part for _, part in sorted(self.rows.get(name, {}).items())]
            Z, group = (torch.cat(t) for t in zip(*parts, strict=True)) if parts else (torch.zeros(0, 0), torch.zeros(0))
            self.check(len(Z))
            return SampleRows(Z if left is None else Z[(group != left).to(Z.device)], *self._common(name))
        sums = self.sums.get(name, {})
        self.check(sum(s.total.n for s in sums.values()))
        return FeatureMoments(_whole([s.total for g, s in sorted(sums.items()) if g != left]), *self._common(name))

    def leaving(self, place: str, kind: str) -> Sequence[SampleRows | FeatureMoments]:
        """Samples without each group, by subtraction."""
        name = self.layers.named(place)
        sums = self.sums.get(name, {})
        if len(sums) < max(2, self.groups[kind]) or name in self.broken:
            return super().leaving(place, kind)
        return [FeatureMoments(s, *self._common(name)) for s in scatter_without_each([s.total for _, s in sorted(sums.items())])]

    def _common(self, name: str) -> tuple[int, bool, float]:
        """Number of features, whether targets are one-hot, and machine epsilon."""
        return self.layers.width(name), self.layers.one_hot, torch.finfo(self.layers.subject.network.dtype).eps


SAMPLE = OfRows("features_and_outputs", Samples, lambda groups, p, C, rows: 8 * (p + 2 * C) * (
    2 * rows if rows < p else (2 * groups + 2) * (p + 2 * C)), "products")


@dataclass(frozen=True)
class OfLayer(Derived):
    """Value of ``compute`` on a layer's features, computed once for the last layer and the whole model. ``held_out``: also on the
    probe's held-out examples, if there are any."""

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
