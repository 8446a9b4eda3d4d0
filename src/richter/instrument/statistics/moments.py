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
    Gathering,
    Group,
    Missing,
    Reading,
    Statistic,
    Wants,
    in_range,
)
from richter.instrument.stream import LayerCapture, covariance, steps
from richter.instrument.subject import Subject

# --------------------------------------------------------------------------------------------------------------- bases
# What is asked of a map that writes more than it reads is kept as what is asked of its inputs: through its matrix, and through
# what was added to that since initialisation. It takes less room, nothing is lost that is later multiplied by the one or the
# other,
# and the feature matrices lie in the sums as they are.

ASKED = 8  # cotangents of an example, from which is told how a moment is kept
WRITTEN = 2 ** 20  # entries of matrices that are written down side by side
TILE = 2 ** 20  # entries of a larger one that are read at a time
PRODUCTS = 20  # of a moment with a map's matrix that are made of a snapshot's sums


def size(shape: Sequence[int], matrices: int, rows: int) -> int | None:
    """How many numbers of each of so many rows are kept where they are asked of the inputs of a map of this shape, through so
    many matrices; None where to keep them as they are takes fewer operations, with those that are made of the sums."""
    d, r = shape[0], matrices * shape[1]
    return r if shape[1] <= d and rows * r * (d + r) < d * d * (rows + PRODUCTS * d) else None


def seen(subject: Subject, name: str) -> int | None:
    """How many numbers a moment keeps of what is asked of a map at a position, where it does so through the map's matrices."""
    info, n = subject.survey.maps[name], subject.probe.n
    return size(*_matrices(subject, name), n * info.positions * min(subject.survey.outputs, ASKED))


def rank(subject: Subject, name: str) -> int:
    """The same, or all of them."""
    return seen(subject, name) or _matrices(subject, name)[0][0]


def written_bytes(subject: Subject, name: str) -> int:
    """Of a map's matrices side by side, where they are written down."""
    (o, i), matrices = _matrices(subject, name)
    return subject.itemsize * matrices * o * i if seen(subject, name) and matrices * o * i <= WRITTEN else 0


def _matrices(subject: Subject, name: str) -> tuple[tuple[int, int], int]:
    """The shape of a map's matrix, grouped ones as one, and how many there are: now, and then."""
    shape, kind = subject.survey.maps[name].shape, subject.survey.maps[name].kind
    return (shape[0] * shape[1], shape[0] * shape[2]) if kind == "grouped" else (shape[0], shape[1]), 1 + (name in subject.W0)


class Through:
    """A = (W / |W|, (W - W0) / |W - W0|), without W0 its first part alone: rows g [..., o] are kept as g A [..., r], and their
    moment K as A^T K A. The norms keep both parts in the range of single precision. Large matrices are read where they lie."""

    def __init__(self, W: Float[Tensor, "o i"], W0: Float[Tensor, "o i"] | None, wide: Callable[[Tensor], Tensor]) -> None:
        self.W, self.W0, self.wide, self.shape = W, W0, wide, W.shape
        norms = [torch.stack([A.norm() for A in parts]) for parts in self._tiles(wide)]  # one tile after another: they are large
        self.norms = [norm or 1.0 for norm in torch.stack(norms).norm(dim=0).tolist()]
        self._written: Tensor | None = None

    def _tiles(self, kind: Callable[[Tensor], Tensor]) -> Iterator[list[Tensor]]:
        """Rows of W and of W - W0."""
        for rows in self._steps:
            W = kind(self.W[rows])
            yield [W] if self.W0 is None else [W, W - kind(self.W0[rows])]

    @cached_property
    def _steps(self) -> list[slice]:
        return steps(self.shape[0], max(1, TILE // self.shape[1]))

    def _scaled(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([A / norm for A, norm in zip(parts, self.norms, strict=True)], 1)

    def rows(self, g: Float[Tensor, "... o"]) -> Float[Tensor, "... r"]:
        """g A, in the precision of g."""
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
        """A^T A."""
        total = None
        for parts in self._tiles(self.wide):
            A = self._scaled(parts)
            total = A.T @ A if total is None else total.addmm_(A.T, A)
        assert total is not None  # a matrix has rows
        return total

    def block(self, K: Float[Tensor, "r r"], now: float, change: float) -> Float[Tensor, "i i"]:
        """V^T K' V of V = now W + change (W - W0), from K = A^T K' A."""
        i, weights = self.shape[1], [c * norm for c, norm in zip((now, change), self.norms, strict=False)]
        parts = [(a * b, K[j * i:(j + 1) * i, k * i:(k + 1) * i]) for j, a in enumerate(weights) for k, b in enumerate(weights)]
        first, *rest = (part * weight for weight, part in parts if weight)
        for part in rest:
            first += part
        return first


class Bases(dict[str, Through | None]):
    """By map, each made when it is first asked for; None where what is asked of a map is kept as it is."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.subject = subject
        self._gram: tuple[str, Tensor] | None = None  # of the map that was looked at last

    def __missing__(self, name: str) -> Through | None:
        self[name] = Through(*self.subject.plain(name), self.subject.widened) if seen(self.subject, name) else None
        return self[name]

    def gram(self, name: str) -> Tensor:
        """A^T A of one map after another."""
        if self._gram is None or self._gram[0] != name:
            through = self[name]
            assert through is not None
            self._gram = name, through.gram()
        return self._gram[1]


def bases_of(subject: Subject) -> Bases:
    """The bases of this measurement."""
    if Bases not in subject.shared:
        subject.shared[Bases] = Bases(subject)
    return subject.shared[Bases]  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------------- moments

FEW, MANY = 2, 2 ** 20  # examples of a group; numbers beside which a copy of a few is nothing


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Their sum, in a tensor of its own."""
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
class Sums:
    """A moment in groups of examples: sums and numbers of positions."""

    sums: list[Tensor | None] = field(default_factory=lambda: [None] * GROUPS)
    counts: list[int] = field(default_factory=lambda: [0] * GROUPS)
    chunk: list[Tensor | None] = field(default_factory=lambda: [None] * GROUPS)  # of the chunk in hand, in its own precision

    def add(self, group: int, value: Tensor, number: int, share: float = 1.0) -> None:
        before = self.chunk[group]
        self.chunk[group] = value * share if before is None else before.add_(value, alpha=share)
        self.counts[group] += number

    def settle(self) -> None:
        """The chunk is done: chunks are added up in float64."""
        for g, value in enumerate(self.chunk):
            if value is not None:
                value, before = value.cpu() if value.device.type == "mps" else value, self.sums[g]
                self.sums[g] = value.double() if before is None else before.add_(value)
        self.chunk = [None] * GROUPS

    def merge(self, other: Sums) -> None:
        for g, value in enumerate(other.sums):
            mine = self.sums[g]
            if value is not None:
                self.sums[g] = value.clone() if mine is None else mine.add_(value.to(mine.device))
            self.counts[g] += other.counts[g]

    def made(self) -> Sums:
        return self

    def mean(self, without: int | None = None) -> Tensor | None:
        chosen = [s for g, s in enumerate(self.sums) if g != without and s is not None]
        number = sum(c for g, c in enumerate(self.counts) if g != without)
        return total(chosen) / number if number and chosen else None


@dataclass
class RowSums(Sums):
    """The same, kept as the rows whose products are summed: less, where there are fewer of them than columns. They lie side by
    side, in room that is taken once: many small arrays among those of the passes would keep the system from having these back."""

    room: tuple[int, int] = (GROUPS, 0)  # groups, and rows of each that are expected
    store: Float[Tensor, "g m r"] | None = None
    filled: list[int] = field(default_factory=lambda: [0] * GROUPS)
    more: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in range(GROUPS)])  # "m r" that have no room there
    scale: float = 1.0

    def keep(self, group: int, rows: Float[Tensor, "v n s r"], number: int, scale: float) -> None:
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
        there = self.filled[group]
        return ([] if self.store is None or not there else [self.store[group, :there]]) + self.more[group]

    def merge(self, other: Sums) -> None:
        assert isinstance(other, RowSums)
        for g in range(GROUPS):
            self.more[g] += [r.clone() for r in other._rows(g)]
            self.counts[g] += other.counts[g]
        self.scale = other.scale if any(other.counts) else self.scale

    def made(self) -> Sums:
        """The sums themselves, from products in the precision of the rows."""
        sums = Sums(counts=self.counts)
        for g in range(GROUPS):
            parts = self._rows(g)
            rows = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None
            sums.chunk[g] = None if rows is None else (rows.T @ rows).mul_(self.scale)
            sums.settle()
        return sums


@dataclass
class Halves:
    """The same from even and from odd random outputs."""

    even: Sums = field(default_factory=Sums)
    odd: Sums = field(default_factory=Sums)

    def made(self) -> Halves:
        return Halves(self.even.made(), self.odd.made())

    def settle(self) -> None:
        self.even.settle()
        self.odd.settle()

    def merge(self, other: Halves) -> None:
        self.even.merge(other.even)
        self.odd.merge(other.odd)

    def mean(self, without: int | None = None) -> Sketched | None:
        first, second = self.even.mean(without), self.odd.mean(without)
        return None if first is None or second is None else Sketched((first + second) / 2, first, second)

    def moved(self, group: int, share: float) -> Sketched | None:
        """With a share of half the difference of both added in one group: that has the spread of the noise of their mean."""
        known, a, b = self.mean(), self.even.sums[group], self.odd.sums[group]
        if known is None or a is None or b is None:
            return known
        step = (a - b) * (share / 2 / sum(self.even.counts))
        return Sketched(known.mean + step, known.first + step, known.second + step)


def shares(groups: int) -> list[tuple[int, float]]:
    """Which group is moved, and how far, there and back, so that the jackknife of all values is the random outputs' noise."""
    step = math.sqrt(groups / (2 * groups - 1))
    return [(g, sign * step) for g in range(groups) for sign in (1, -1)]


@dataclass(frozen=True)
class Moment(Statistic):
    """block(capture) is summed over examples and positions and divided by their number. With ``project`` it is kept as
    it is asked through W and W - W0, where that is less, which loses nothing that is later multiplied by them."""

    name: str
    block: Callable[[LayerCapture], Tensor]
    project: bool = False
    initial: bool = False  # needs h0, g0: what the initial network reads and asks on the same examples
    reads: bool = True  # needs h; saves unfolding patches where it does not
    halves: bool = False  # random outputs give it as Sketched, for what squares it
    rows: Callable[[LayerCapture], Tensor] | None = None  # "v n s r" of which block is the sum of products, if it is one

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        return NO_INITIAL if self.initial and subject.then is None else cotangents.lacking(subject) or self

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        sizes = [self._bytes(subject, cotangents, k) for k in subject.maps]
        bases = sum(written_bytes(subject, k) for k in subject.maps) if self.project else 0
        return Wants(tuple(subject.maps), reads=self.reads, initial=self.initial,
                     held=sum(rows if rows is not None and rows < sums else sums for sums, rows in sizes)
                     + (bases if bases > SMALL else 0),
                     alone=max((sums for sums, rows in sizes if rows is not None and rows < sums), default=0),
                     what=f"the sums of {len(subject.maps)} layers")

    def _bytes(self, subject: Subject, cotangents: Cotangents, name: str) -> tuple[int, int | None]:
        """Of one map's sums, and of the rows that they are made of, where these may be kept in their place."""
        info = subject.survey.maps[name]
        r = rank(subject, name) if self.project else math.prod(info.shape[:-1])
        sums = 8 * (GROUPS + 2) * (1 + self._halved(subject, cotangents)) * r * r
        if not subject.frugal or self.rows is None:
            return sums, None
        return sums, subject.itemsize * subject.probe.n * info.positions * subject.number(cotangents, "mean") * r

    def _halved(self, subject: Subject, cotangents: Cotangents) -> bool:
        return self.halves and not cotangents.exact and subject.number(cotangents, "mean") > 1

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        number = subject.number(cotangents, "mean")

        halved = self._halved(subject, cotangents)

        def sums_of(name: str) -> Sums:
            by_sums, by_rows = self._bytes(subject, cotangents, name)
            if by_rows is None or by_rows >= by_sums:
                return Sums()
            each = subject.survey.maps[name].positions * -(-number // (1 + halved))
            return RowSums(room=(subject.groups, -(-subject.probe.n // subject.groups) * each))

        def empty(name: str) -> Sums | Halves:
            return Halves(sums_of(name), sums_of(name)) if halved else sums_of(name)
        sums = {k: empty(k) for k in subject.maps}
        groups = {"examples": subject.groups, **({WITHIN: 2 * subject.groups} if self._halved(subject, cotangents) else {})}
        return MomentGathering(self, subject, groups, number, sums, remark_of(subject, cotangents))


@dataclass
class MomentGathering(Gathering):
    statistic: Moment
    subject: Subject
    groups: Mapping[str, int]
    number: int  # of cotangents
    sums: dict[str, Sums | Halves]
    remark: Remark
    apart: set[str] = field(default_factory=set)  # maps that the initial network reaches with other positions
    asked: dict[str, Tensor] = field(default_factory=dict)  # what a few examples ask of each map: is a sum of zero one of zeros?
    made: tuple[str, Sums | Halves] | None = None  # of the map that was looked at last, where rows are kept

    def add(self, reading: Reading) -> None:
        first, statistic = reading.first, self.statistic
        bases = bases_of(self.subject) if statistic.project else None
        for name, sums in self.sums.items():
            for g, part, number in reading.parts(name, bases, statistic.initial):
                if statistic.initial and part.g0 is not None and part.g0.shape != part.g.shape:
                    self.apart.add(name)
                else:
                    self._sum(sums, part, g, number if first else 0, reading.block.start)
                    if name not in self.asked:
                        self.asked[name] = part.g[:, :FEW].clone() if part.g.numel() > MANY else part.g[:, :FEW]
        if reading.last:
            for sums in self.sums.values():
                sums.settle()

    def _sum(self, sums: Sums | Halves, part: LayerCapture, group: int, number: int, start: int) -> None:
        """Positions are counted once, not once a block of cotangents."""
        if isinstance(sums, Sums):
            self._put(sums, part, group, number, 1.0)
            return
        for half, mine in enumerate((sums.even, sums.odd)):
            rows = slice((half - start) % 2, None, 2)
            share = self.number / len(range(half, self.number, 2))  # each half stands for all
            if rows.start >= len(part.g):  # a block of one cotangent has none of the other half
                mine.counts[group] += number
                continue
            one = replace(part, g=part.g[rows], g0=None if part.g0 is None else part.g0[rows])
            self._put(mine, one, group, number, share)

    def _put(self, sums: Sums, part: LayerCapture, group: int, number: int, share: float) -> None:
        if isinstance(sums, RowSums):
            assert self.statistic.rows is not None
            sums.keep(group, self.statistic.rows(part), number, share)
            return
        sums.add(group, self.statistic.block(part), number, share)

    def _made(self, name: str) -> Sums | Halves:
        """A map's sums; if they are kept as rows, of one map at a time."""
        if self.made is None or self.made[0] != name:
            self.made = name, self.sums[name].made()
        return self.made[1]

    def parts(self, place: str) -> list[tuple[Tensor, Tensor, int]] | None:
        """Of each group: its sums from even and from odd outputs (the same twice, if there are no halves), and how many positions
        they are of. None if a group is empty."""
        sums = self._made(place)
        first, second = (sums.even, sums.odd) if isinstance(sums, Halves) else (sums, sums)
        parts = [(a, b, n) for a, b, n in zip(first.sums, second.sums, first.counts, strict=True)][:self.groups["examples"]]
        known = [(a, b, n) for a, b, n in parts if a is not None and b is not None and n]
        return known if len(known) == len(parts) else None

    def merge(self, other: MomentGathering) -> None:
        for name, sums in self.sums.items():
            sums.merge(other.sums[name])  # type: ignore[arg-type]
        self.apart |= other.apart

    def value(self, place: str, without: Group | None = None) -> Any:
        if place not in self.sums:
            raise Missing(APART)
        if place in self.subject.refused:
            raise Missing(self.subject.refused[place], Mark.REFUSED)
        if place in self.apart:
            raise Missing("the initial network sends other positions of some examples to this layer (routing), so what is asked "
                          "of them now and then cannot be subtracted")
        sums = self._made(place)
        if without is not None and without[0] == WITHIN and isinstance(sums, Halves):
            mean: Any = sums.moved(*shares(self.groups["examples"])[without[1]])
        else:
            mean = sums.mean(None if without is None else without[1])
        if mean is None:
            raise Missing("no example of the probe reached this layer", Mark.IDLE)
        if without is None:
            K = mean.mean if isinstance(mean, Sketched) else mean
            vanished = not self.statistic.initial and not K.any() and place in self.asked and bool(self.asked[place].any())
            in_range(K, self.subject, vanished=vanished)
        return mean


def remark_of(subject: Subject, cotangents: Cotangents) -> Remark:
    """What cotangents say beside every number."""
    return Remark(Mark.EXACT if cotangents.exact else Mark.ESTIMATED, cotangents.label(subject.survey.outputs))


def change(c: LayerCapture) -> Float[Tensor, "v n s o"]:
    """g - g0: what the outputs ask now and did not at initialisation."""
    assert c.g0 is not None  # a Moment with initial=True always has it
    return c.g - c.g0


def change_covariance(c: LayerCapture) -> Float[Tensor, "o o"]:
    return covariance(change(c))


# K = 1/(n s) sum_n J_n^T J_n, with 1/n, so that the AGOP is W^T K W  [nfa, Sec. 1]
PTK_COVARIANCE = Moment("ptk_covariance", lambda c: covariance(c.g), reads=False, halves=True, rows=lambda c: c.g)
PROJECTED_PTK_COVARIANCE = replace(PTK_COVARIANCE, name="projected_ptk_covariance", project=True)
PTK_CHANGE = Moment("ptk_change", change_covariance, project=True, initial=True, reads=False, halves=True, rows=change)
