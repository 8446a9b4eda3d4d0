"""Averages over examples and positions: Moment. A sum over chunks, divided once at the end, and kept in a few groups of examples,
so that every measure can be computed again with one group left out (the jackknife).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Mark, Remark
from richter.core.values import SMALL
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import (
    APART,
    GROUPS,
    NO_INITIAL,
    WITHIN,
    Below,
    Gathering,
    Group,
    Missing,
    Reading,
    Statistic,
    Wants,
    in_range,
)
from richter.instrument.stream import LayerCapture, covariance, covariances, steps
from richter.instrument.subject import Subject

# --------------------------------------------------------------------------------------------------------------- bases
# A map that writes more than it reads keeps g, the gradients of the outputs in what it writes, as products with its matrix and
# with the change of that since initialisation. They take less room, lose nothing that is later multiplied by one of the two, and
# the feature matrices lie in their moments as blocks.

ASKED = 8  # cotangents of an example, by which the form of a moment is chosen
WRITTEN = 2 ** 20  # entries of matrices that are written down side by side
TILE = 2 ** 20  # entries of a larger one that are read at a time
PRODUCTS = 20  # products of a moment with a map's matrix in a snapshot


def size(shape: Sequence[int], matrices: int, rows: int) -> int | None:
    """How many numbers of each of so many rows are kept as products with so many matrices of this shape; None where keeping the
    rows as they are takes fewer operations, with those that are made of their moment."""
    d, r = shape[0], matrices * shape[1]
    return r if shape[1] <= d and rows * r * (d + r) < d * d * (rows + PRODUCTS * d) else None


class Through:
    """A = (W / |W|, (W - W0) / |W - W0|), without W0 its first part alone: rows g [..., o] are kept as g A [..., r], and their
    moment K as A^T K A. The norms keep both parts in the range of single precision. Large matrices are read where they lie."""

    def __init__(self, W: Float[Tensor, "o i"], W0: Float[Tensor, "o i"] | None, wide: Callable[[Tensor], Tensor]) -> None:
        self.W, self.W0, self.wide, self.shape = W, W0, wide, W.shape
        norms = [torch.stack([A.norm() for A in parts]) for parts in self._tiles(wide)]  # one tile after another: they are large
        self.norms = [norm or 1.0 for norm in torch.stack(norms).norm(dim=0).tolist()]
        self._written: Tensor | None = None

    def _tiles(self, kind: Callable[[Tensor], Tensor]) -> Iterator[list[Tensor]]:
        """Yield tiles of the rows of W and of W - W0."""
        for rows in self._steps:
            W = kind(self.W[rows])
            yield [W] if self.W0 is None else [W, W - kind(self.W0[rows])]

    @cached_property
    def _steps(self) -> list[slice]:
        """Slices of columns of the size of a tile."""
        return steps(self.shape[0], max(1, TILE // self.shape[1]))

    def _scaled(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate the parts, each divided by its norm."""
        return torch.cat([A / norm for A, norm in zip(parts, self.norms, strict=True)], 1)

    def rows(self, g: Float[Tensor, "... o"]) -> Float[Tensor, "... r"]:
        """Product g A of signals with the basis, in the precision of g."""
        if len(self.norms) * self.W.numel() <= WRITTEN:
            if self._written is None or self._written.dtype != g.dtype:
                self._written = torch.cat([self._scaled(parts) for parts in self._tiles(lambda W: W.to(g))])
            return g @ self._written
        now = g @ self.W.to(g) / self.norms[0]
        if self.W0 is None:
            return now
        change = torch.zeros_like(now)
        for rows in self._steps:
            change += g[..., rows] @ (self.W[rows].to(g) - self.W0[rows].to(g)).div_(self.norms[1])
        return torch.cat([now, change], -1)

    def gram(self) -> Float[Tensor, "r r"]:
        """Gram matrix A^T A of the basis."""
        total = None
        for parts in self._tiles(self.wide):
            A = self._scaled(parts)
            total = A.T @ A if total is None else total.addmm_(A.T, A)
        assert total is not None  # a matrix has rows
        return total

    def blocks(self, sums: Sequence[Float[Tensor, "r r"]], now: float, change: float) -> Float[Tensor, "g i i"]:
        """V^T K' V of V = now W + change (W - W0), from each K = A^T K' A."""
        i, weights = self.shape[1], [c * norm for c, norm in zip((now, change), self.norms, strict=False)]
        corners = [(a * b, slice(j * i, (j + 1) * i), slice(k * i, (k + 1) * i))
                   for j, a in enumerate(weights) for k, b in enumerate(weights) if a * b]
        first, *rest = (torch.stack([K[j, k] for K in sums]).mul_(weight) for weight, j, k in corners)
        for part in rest:
            first += part
        return first


class Bases(dict[str, Through | None]):
    """Through which matrices g of each map is kept, made when it is first asked for; None where g is kept as it is."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.subject = subject
        self._gram: tuple[str, Tensor] | None = None  # of the map that was looked at last

    def __missing__(self, name: str) -> Through | None:
        subject = self.subject
        self[name] = Through(*subject.matrices.plain(name), subject.matrices.W.wide) if self._size(name)[1] else None
        return self[name]

    def gram(self, name: str) -> Tensor:
        """Gram matrix A^T A of the basis of a map; only the last one is held."""
        if self._gram is None or self._gram[0] != name:
            through = self[name]
            assert through is not None
            self._gram = name, through.gram()
        return self._gram[1]

    def _size(self, name: str) -> tuple[tuple[int, int], int | None]:
        """The shape of a map's matrix, grouped ones as one, and how many numbers of g are kept through it at a position."""
        info, n = self.subject.survey.maps[name], self.subject.probe.n
        groups, o, i = info.shape if info.kind == "grouped" else (1, *info.shape[:2])
        shape, rows = (groups * o, groups * i), n * info.positions * min(self.subject.survey.outputs, ASKED)
        return shape, size(shape, 1 + (name in self.subject.matrices.W0), rows)

    def rank(self, name: str) -> int:
        """How many numbers of g are kept at a position."""
        (o, _), r = self._size(name)
        return r or o

    def written_bytes(self, name: str) -> int:
        """Bytes of a map's matrices side by side, where they are written down."""
        (o, _), r = self._size(name)
        return self.subject.itemsize * r * o if r and r * o <= WRITTEN else 0


def bases_of(subject: Subject) -> Bases:
    """Bases of this measurement, made once."""
    if Bases not in subject.shared:
        subject.shared[Bases] = Bases(subject)
    return subject.shared[Bases]  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------------- moments

FEW = 2  # examples of a group, which tell whether a sum of zero is one of zeros


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of some tensors, in a new tensor."""
    first = tensors[0].clone()
    for t in tensors[1:]:
        first += t
    return first


@dataclass(frozen=True)
class Sketched:
    """A moment from random outputs: its mean, and two of it from independent halves of them."""

    mean: Tensor
    first: Tensor
    second: Tensor


@dataclass
class GroupSums:
    """A moment in groups of examples: sums and numbers of positions."""

    sums: list[Tensor | None] = field(default_factory=lambda: [None] * GROUPS)
    counts: list[int] = field(default_factory=lambda: [0] * GROUPS)
    chunk: list[Tensor | None] = field(default_factory=lambda: [None] * GROUPS)  # of the chunk in hand, in its own precision

    def put(self, statistic: Moment, part: LayerCapture, group: int, number: int, share: float) -> None:
        """Add what a moment sums over a part of a chunk."""
        self.add(group, statistic.block(part), number, share)

    def add(self, group: int, value: Tensor, number: int, share: float = 1.0) -> None:
        before = self.chunk[group]
        self.chunk[group] = (value if share == 1 else value * share) if before is None else before.add_(value, alpha=share)
        self.counts[group] += number

    def settle(self) -> None:
        """Add the chunk in hand to the sums, in float64."""
        for g, value in enumerate(self.chunk):
            if value is not None:
                value, before = value.cpu() if value.device.type == "mps" else value, self.sums[g]
                self.sums[g] = value.double() if before is None else before.add_(value)
        self.chunk = [None] * GROUPS

    def merge(self, other: GroupSums) -> None:
        for g, value in enumerate(other.sums):
            before = self.sums[g]
            if value is not None:
                self.sums[g] = value.clone() if before is None else before.add_(value.to(before.device))
            self.counts[g] += other.counts[g]

    def made(self) -> GroupSums:
        return self

    def mean(self, without: int | None = None) -> Tensor | None:
        """Mean over all groups, or without one; None if nothing was added."""
        chosen = [s for g, s in enumerate(self.sums) if g != without and s is not None]
        number = sum(c for g, c in enumerate(self.counts) if g != without)
        return total(chosen) / number if number and chosen else None


@dataclass
class RowSums(GroupSums):
    """Sums that are kept as the rows whose products are summed: less, where there are fewer of them than columns. They lie side
    by side in one array: many small arrays among those of the passes would keep the system from having these back."""

    room: tuple[int, int] = (GROUPS, 0)  # groups, and rows of each that are expected
    store: Float[Tensor, "g m r"] | None = None
    filled: list[int] = field(default_factory=lambda: [0] * GROUPS)
    more: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in range(GROUPS)])  # "m r" that have no room there
    scale: float = 1.0

    def put(self, statistic: Moment, part: LayerCapture, group: int, number: int, share: float) -> None:
        """Add the rows of a capture to a group."""
        assert statistic.rows is not None
        self.keep(group, statistic.rows(part), number, share)

    def keep(self, group: int, rows: Float[Tensor, "v n s r"], number: int, scale: float) -> None:
        """Store rows of a group: in one block while there is room, then in a list."""
        flat = rows.flatten(0, -2)
        if self.store is None:
            self.store = flat.new_empty(*self.room, flat.shape[1])
        begin, end = self.filled[group], self.filled[group] + len(flat)
        if end <= self.room[1]:
            self.store[group, begin:end] = flat
            self.filled[group] = end
        else:
            self.more[group].append(flat.clone())
        self.counts[group] += number
        self.scale = scale

    def _rows(self, group: int) -> list[Tensor]:
        """Stored rows of a group."""
        filled = self.filled[group]
        return ([] if self.store is None or not filled else [self.store[group, :filled]]) + self.more[group]

    def merge(self, other: GroupSums) -> None:
        assert isinstance(other, RowSums)
        for g in range(GROUPS):
            self.more[g] += [r.clone() for r in other._rows(g)]
            self.counts[g] += other.counts[g]
        self.scale = other.scale if any(other.counts) else self.scale

    def made(self) -> GroupSums:
        """The sums themselves, from products in the precision of the rows."""
        sums = GroupSums(counts=self.counts)
        for g in range(GROUPS):
            parts = self._rows(g)
            rows = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None
            sums.chunk[g] = None if rows is None else (rows.T @ rows).mul_(self.scale)
            sums.settle()
        return sums


Halves = tuple[GroupSums, ...]  # from even and from odd random outputs; or one of all outputs


def mean_of(halves: Halves, without: int | None = None) -> Any:
    """The mean, Sketched if there are two halves; None without positions."""
    means = [m for m in (s.mean(without) for s in halves) if m is not None]
    if len(means) < len(halves):
        return None
    return Sketched((means[0] + means[1]) / 2, *means) if len(means) == 2 else means[0]


def moved_mean(halves: Halves, group: int, share: float) -> Any:
    """The mean with a share of half the difference of both halves added in one group: that has the spread of its noise."""
    mean, a, b = mean_of(halves), *(s.sums[group] for s in halves)
    if mean is None or a is None or b is None:
        return mean
    step = (a - b) * (share / 2 / sum(halves[0].counts))
    return Sketched(mean.mean + step, mean.first + step, mean.second + step)


def shares(groups: int) -> list[tuple[int, float]]:
    """Groups that are moved, and how far, there and back, so that the jackknife of all values is the random outputs' noise."""
    step = math.sqrt(groups / (2 * groups - 1))
    return [(g, sign * step) for g in range(groups) for sign in (1, -1)]


@dataclass(frozen=True)
class Moment(Statistic):
    """block(capture) is summed over examples and positions and divided by their number. With ``project`` it is kept as products
    with W and W - W0 where these are fewer, which loses nothing that is later multiplied by them."""

    name: str
    block: Callable[[LayerCapture], Tensor]
    project: bool = False
    initial: bool = False  # needs h0, g0: what the initial network reads and asks on the same examples
    reads: bool = True  # needs h; saves unfolding patches where it does not
    halves: bool = False  # random outputs give it as Sketched, for what squares it
    rows: Callable[[LayerCapture], Tensor] | None = None  # "v n s r" of which block is the sum of products, if it is one

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        """Return this statistic, or the reason why there is no number: no initial weights, or what the cotangents lack."""
        return NO_INITIAL if self.initial and subject.start is None else cotangents.lacking(subject) or self

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        sizes = [self._bytes(subject, cotangents, k) for k in subject.maps]
        bases = sum(bases_of(subject).written_bytes(k) for k in subject.maps) if self.project else 0
        return Wants(tuple(subject.maps), reads=self.reads, initial=self.initial,
                     held=sum(rows or sums for sums, rows in sizes) + (bases if bases > SMALL else 0),
                     alone=max((sums for sums, rows in sizes if rows), default=0),
                     what=f"the sums of {len(subject.maps)} layers")

    def _bytes(self, subject: Subject, cotangents: Cotangents, name: str) -> tuple[int, int]:
        """Bytes of one map's sums, and of the rows that are kept in their place; 0 where they are not."""
        info = subject.survey.maps[name]
        r = bases_of(subject).rank(name) if self.project else math.prod(info.shape[:-1])
        sums = 8 * (GROUPS + 2) * self._halves(subject, cotangents) * r * r
        if not subject.frugal or self.rows is None:
            return sums, 0
        rows = subject.itemsize * subject.probe.n * info.positions * subject.targets.number(cotangents, "mean") * r
        return sums, rows if rows < sums else 0

    def _halves(self, subject: Subject, cotangents: Cotangents) -> int:
        """2 if random outputs are added up in two halves, for a standard error; otherwise 1."""
        return 2 if self.halves and not cotangents.exact and subject.targets.number(cotangents, "mean") > 1 else 1

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        number, halves, n = subject.targets.number(cotangents, "mean"), self._halves(subject, cotangents), subject.probe.n

        def empty(name: str) -> GroupSums:
            if not subject.frugal or not self._bytes(subject, cotangents, name)[1]:
                return GroupSums()
            each = subject.survey.maps[name].positions * -(-number // halves)
            return RowSums(room=(subject.groups, -(-n // subject.groups) * each))

        groups = {"examples": subject.groups, **({WITHIN: 2 * subject.groups} if halves == 2 else {})}
        sums = {k: tuple(empty(k) for _ in range(halves)) for k in subject.maps}
        return MomentGathering(self, subject, groups, number, sums, remark_of(subject, cotangents))


@dataclass
class MomentGathering(Gathering):
    statistic: Moment
    subject: Subject
    groups: Mapping[str, int]
    number: int  # of cotangents
    sums: dict[str, Halves]
    remark: Remark
    apart: set[str] = field(default_factory=set)  # maps that the initial network reaches with other positions
    asked: dict[str, Tensor] = field(default_factory=dict)  # do a few examples ask anything of a map?
    made: tuple[str, Halves] | None = None  # of the map that was looked at last, where rows are kept

    def add(self, reading: Reading) -> None:
        statistic, bases = self.statistic, bases_of(self.subject) if self.statistic.project else None
        for name, halves in self.sums.items():
            c = reading.capture(name, bases, statistic.initial)
            if c is not None and statistic.initial and c.g0 is not None and c.g0.shape != c.g.shape:
                self.apart.add(name)
            elif c is not None:
                if name not in self.asked:
                    self.asked[name] = c.g[:, :FEW].any()
                self._groups(halves, c, reading, reading.counts(name, c.g.shape[2]))
            for sums in halves if reading.last else ():
                sums.settle()

    def _groups(self, halves: Halves, c: LayerCapture, reading: Reading, counts: Sequence[tuple[int, slice, int]]) -> None:
        """Add each group's part; sums of products come from one product over all groups."""
        rows, groups = self.statistic.rows, self.groups["examples"]
        if rows is not None and len(halves) == 1 and not isinstance(halves[0], RowSums) and len(counts) == groups:
            for g, value in enumerate(covariances(rows(c), groups, reading.rows.start)):
                halves[0].add(g, value, counts[g][2] if reading.first else 0)
            return
        for g, mine, number in counts:
            self._sum(halves, c.take(mine), g, number if reading.first else 0, reading.block.start)

    def _sum(self, halves: Halves, part: LayerCapture, group: int, number: int, start: int) -> None:
        """Positions are counted once, not once a block of cotangents. Each half stands for all."""
        if len(halves) == 1:
            halves[0].put(self.statistic, part, group, number, 1.0)
            return
        for half, sums in enumerate(halves):
            rows = slice((half - start) % 2, None, 2)
            one = replace(part, g=part.g[rows], g0=None if part.g0 is None else part.g0[rows])
            if len(one.g):
                sums.put(self.statistic, one, group, number, self.number / len(range(half, self.number, 2)))
            else:  # a block of one cotangent has none of the other half
                sums.counts[group] += number

    def _made(self, name: str) -> Halves:
        """A map's sums; if they are kept as rows, of one map at a time."""
        if self.made is None or self.made[0] != name:
            self.made = name, tuple(sums.made() for sums in self.sums[name])
        return self.made[1]

    def parts(self, place: str) -> list[tuple[Tensor, Tensor, int]] | None:
        """Sums of each group, from even and from odd outputs (the same twice, if there are no halves), and how many positions
        they are of. None if a group is empty."""
        halves, groups = self._made(place), self.groups["examples"]
        parts = [(a, b, n) for a, b, n in zip(halves[0].sums, halves[-1].sums, halves[0].counts, strict=True)
                 if a is not None and b is not None and n]
        return parts if len(parts) == groups else None

    def leaving(self, place: str, kind: str) -> LeftOut:
        return LeftOut(self, place, kind)

    def merge(self, other: MomentGathering) -> None:
        for name, halves in self.sums.items():
            for sums, others in zip(halves, other.sums[name], strict=True):
                sums.merge(others)
        self.apart |= other.apart

    def value(self, place: str, without: Group | None = None) -> Any:
        if place not in self.sums:
            raise Missing(APART)
        if place in self.subject.masks.refused:
            raise Missing(self.subject.masks.refused[place], Mark.REFUSED)
        if place in self.apart:
            raise Missing("the initial network sends other positions of some examples to this layer (routing), so its backward "
                          "signals now and then cannot be subtracted")
        halves = self._made(place)
        if without is not None and without[0] == WITHIN and len(halves) == 2:
            mean = moved_mean(halves, *shares(self.groups["examples"])[without[1]])
        else:
            mean = mean_of(halves, None if without is None else without[1])
        if mean is None:
            raise Missing("no example of the probe reached this layer", Mark.IDLE)
        if without is None:
            K = mean.mean if len(halves) == 2 else mean
            vanished = not self.statistic.initial and not K.any() and place in self.asked and bool(self.asked[place])
            in_range(K, self.subject, vanished=vanished)
            if vanished:
                raise Below
        return mean


@dataclass(frozen=True)
class LeftOut(Sequence[Any]):
    """Means with each group of a kind left out, each made when it is asked for."""

    moment: MomentGathering
    place: str
    kind: str

    def __len__(self) -> int:
        return self.moment.groups[self.kind]

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self.moment.value(self.place, (self.kind, i))

    @property
    def parts(self) -> list[tuple[Tensor, Tensor, int]] | None:
        """Sums of each group from even and from odd outputs, with the numbers of positions; None if a group is empty."""
        return self.moment.parts(self.place)


def remark_of(subject: Subject, cotangents: Cotangents) -> Remark:
    """Remark of the cotangents beside every number."""
    return Remark(Mark.EXACT if cotangents.exact else Mark.ESTIMATED, cotangents.label(subject.survey.outputs))


def change(c: LayerCapture) -> Float[Tensor, "v n s o"]:
    """g - g0: what the outputs ask now and did not at initialisation."""
    assert c.g0 is not None  # a Moment with initial=True always has it
    return c.g - c.g0


def change_covariance(c: LayerCapture) -> Float[Tensor, "o o"]:
    """Covariance of the output change of a map."""
    return covariance(change(c))


# K = 1/(n s) sum_n J_n^T J_n, with 1/n, so that the AGOP is W^T K W  [nfa, Sec. 1]
PTK_COVARIANCE = Moment("ptk_covariance", lambda c: covariance(c.g), reads=False, halves=True, rows=lambda c: c.g)
PROJECTED_PTK_COVARIANCE = replace(PTK_COVARIANCE, name="projected_ptk_covariance", project=True)
PTK_CHANGE = Moment("ptk_change", change_covariance, project=True, initial=True, reads=False, halves=True, rows=change)
