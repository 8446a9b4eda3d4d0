"""The neural feature matrix and the gradient outer product of one W side by side, and with each group of examples left out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core.values import SMALL
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import (
    APART,
    NO_INITIAL,
    WITHIN,
    Derived,
    DerivedGathering,
    Gathering,
    Group,
    Missing,
    Remembered,
    Simple,
    Statistic,
    Wants,
    finite,
)
from richter.instrument.statistics.moments import (
    PROJECTED_PTK_COVARIANCE,
    PTK_CHANGE,
    Bases,
    MomentGathering,
    Sketched,
    bases_of,
    rank,
    shares,
    total,
)
from richter.instrument.stream import steps
from richter.instrument.subject import Subject
from richter.linalg import MODEST

# ------------------------------------------------------------------------------------------------------------- weights
# Statistics of the weights, now and at initialisation: OfWeight, and feature matrices W^T K W: the neural feature matrix,
# average gradient outer products, and their centred forms.

NOT_MOVED = "0/0: the weights (or what is asked of them) have not moved from the initial ones"


TILE = 2 ** 22  # entries of a matrix in double precision at a time
ISOTROPIC = 1e-6  # of a moment: what is nearer to a multiple of the identity is one
SIDE_BY_SIDE = 12  # of a matrix with itself and with moments, that are held side by side


class Factor:
    """A weight matrix W [r, d_in], or the change W - W0 of one, and what is asked of it again and again: M = W W^T. A
    large one (a vocabulary's) is read where it lies, and comes in double precision some columns at a time."""

    def __init__(self, W: Float[Tensor, "r d_in"], W0: Float[Tensor, "r d_in"] | None = None) -> None:
        self.large, self.shape = W.numel() > TILE, W.shape
        self._now, self._then = (W, W0) if self.large or W0 is None else (W - W0, None)

    def tiles(self) -> Iterator[Float[Tensor, "r c"]]:
        """Some columns after others; of a small one all at once."""
        if not self.large:
            yield self._now
            return
        for some in steps(self.shape[1], max(1, TILE // self.shape[0])):
            tile = self._now[:, some].double()
            yield tile if self._then is None else tile - self._then[:, some].double()

    @property
    def W(self) -> Float[Tensor, "r d_in"]:
        return torch.cat(list(self.tiles()), 1) if self.large else self._now

    def like(self, K: Tensor) -> Tensor:
        """In the precision of W, and where it is."""
        return K.to(self._now.device, torch.float64 if self.large else self._now.dtype)

    def times(self, other: Factor) -> Float[Tensor, "r q"]:
        """W V^T of this W and another one."""
        return sum_of(A @ B.T for A, B in zip(self.tiles(), other.tiles(), strict=True))

    @cached_property
    def size(self) -> float:
        """|W|."""
        return math.hypot(*(A.norm().item() for A in self.tiles()))

    @cached_property
    def M(self) -> Float[Tensor, "r r"]:
        return self.times(self)

    @cached_property
    def square(self) -> float:
        """|W^T W|^2 = |M|^2."""
        return self.M.square().sum().item()


class Seen:
    """A matrix V = now W + change (W - W0) whose moments arrive as they are asked through W and W - W0."""

    def __init__(self, bases: Bases, name: str, now: float, change: float) -> None:
        through = bases[name]
        assert through is not None
        self.bases, self.name, self.through, self.parts, self.shape = bases, name, through, (now, change), through.shape

    @property
    def gram(self) -> Float[Tensor, "r r"]:
        """That of the identity, in the place of a moment."""
        return self.bases.gram(self.name)

    def like(self, K: Tensor) -> Tensor:
        return K.to(self.gram)

    def formed(self, K: Float[Tensor, "r r"] | None) -> Float[Tensor, "d_in d_in"]:
        """V^T K V."""
        return self.through.block(self.gram if K is None else K, *self.parts)


def sum_of(terms: Iterable[Tensor]) -> Tensor:
    """One after another."""
    return functools.reduce(Tensor.add_, terms)


@dataclass(frozen=True)
class OfWeight(Statistic):
    """A statistic of the matrices now and then: compute(W, W0). ``initial``: it needs W0; ``seen``: it is this much of W and this
    much of W - W0, and Seen where moments with ``project`` are kept as they are asked through these; ``lying``: large ones arrive
    as they lie, for Factors."""

    name: str
    compute: Callable[[Tensor, Any], Any]
    initial: bool = False
    seen: tuple[float, float] | None = None
    lying: bool = False
    of_examples: bool = False

    @property
    def zero(self) -> str:  # type: ignore[override]
        return NOT_MOVED if self.initial else ""

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        return Wants(alone=max((self._bytes(subject, k) for k in subject.maps), default=0), what="the weights of one layer")

    def _bytes(self, subject: Subject, name: str) -> int:
        """Of a map's matrices in double precision, now, then and their difference, or of some columns of them; and of products
        with themselves."""
        rows, entries = rank(subject, name) if self.seen else 0, subject.survey.maps[name].entries
        need = 8 * (3 * (min(entries, TILE) if self.seen or self.lying else entries) + SIDE_BY_SIDE * rows * rows)
        return need if need > SMALL else 0

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _OfWeight(self, subject)


class _OfWeight(Simple):
    def __init__(self, statistic: OfWeight, subject: Subject) -> None:
        super().__init__()
        self.statistic, self.subject = statistic, subject

    def value(self, place: str, without: Group | None = None) -> Any:
        if place not in self.subject.maps:
            raise Missing(APART)
        if self.statistic.initial and place not in self.subject.W0:
            raise Missing(NO_INITIAL)
        statistic, subject = self.statistic, self.subject
        if statistic.seen is not None and bases_of(subject)[place] is not None:
            return Seen(bases_of(subject), place, *statistic.seen)
        lying = (statistic.seen or statistic.lying) and subject.survey.maps[place].entries > TILE
        return statistic.compute(*(subject.plain(place) if lying else subject.pair(place)))


MATRIX = OfWeight("matrix", lambda W, W0: W)
WEIGHT = OfWeight("weight", lambda W, W0: Factor(W), seen=(1, 0))
INITIAL_WEIGHT = OfWeight("initial_weight", lambda W, W0: Factor(W0), initial=True, seen=(1, -1))
CHANGE = OfWeight("change", lambda W, W0: Factor(W, W0), initial=True, seen=(0, 1))
OWN_WEIGHT = OfWeight("own_weight", lambda W, W0: Factor(W), lying=True)  # where nothing but the matrix itself is asked for
OWN_CHANGE = OfWeight("own_change", lambda W, W0: Factor(W, W0), initial=True, lying=True)


@dataclass(frozen=True)
class FeatureMatrix:
    """W^T K W (K = I when None), kept in factors: the d_in x d_in matrix is formed only by ``dense()``."""

    factor: Factor
    K: Float[Tensor, "r r"] | None = None
    halves: tuple[Tensor, Tensor] | None = None  # of a sketched K: the noise of the two is independent

    def dense(self) -> Float[Tensor, "d_in d_in"]:
        W = self.factor.W
        return W.T @ W if self.K is None else W.T @ self.K @ W

    def diagonal(self) -> Float[Tensor, " d_in"]:
        return torch.cat([(A * (A if self.K is None else self.K @ A)).sum(0) for A in self.factor.tiles()])

    def total(self) -> float:
        """The sum of all entries."""
        u = sum_of(A.sum(1) for A in self.factor.tiles())
        return (u @ (u if self.K is None else self.K @ u)).item()

    def inner(self, other: FeatureMatrix) -> float:
        """<A, B> = Tr(A^T B) by cyclic permutation, on the side of the outputs."""
        return finite(self._inner(other))

    @cached_property
    def KM(self) -> Float[Tensor, "r r"]:
        """K M."""
        return self.factor.M if self.K is None else self.K @ self.factor.M

    def _inner(self, other: FeatureMatrix) -> float:
        A, B = self.K, other.K
        if self.factor is not other.factor:
            N = self.factor.times(other.factor)
            left = N if A is None else A @ N
            return (left * (N if B is None else N @ B)).sum().item()
        if A is None and B is None:
            return self.factor.square
        return (self.KM * other.KM.T).sum().item()

    def cosine(self, other: FeatureMatrix) -> float:
        """<A, B> / (|A| |B|); NaN if one is zero.  [nfa, Eq. NFC]"""
        size = self.norm * other.norm
        return self.inner(other) / size if size else math.nan

    @cached_property
    def norm(self) -> float:
        """|A|; of a sketch without the noise's share, which squaring would leave in."""
        if self.halves is not None:
            first, second = (replace(self, K=K, halves=None) for K in self.halves)
            return max(first.inner(second), 0.0) ** 0.5
        return max(self.inner(self), 0.0) ** 0.5

    @property
    def isotropic(self) -> bool:
        """Is K a multiple of the identity? Most are not, as their first rows show."""
        if self.K is None:
            return False
        row, size = self.K[0, 1:], ISOTROPIC * len(self.K) ** 0.5 * self.K.diagonal().abs().max()  # at least that of the multiple
        return not bool((row.abs() > size).any()) and _multiple(self.K, torch.eye(len(self.K), dtype=self.K.dtype,
                                                                                  device=self.K.device))


def _multiple(K: Tensor, other: Tensor) -> bool:
    size = K.abs().max()
    K = K / size if size > 0 else K  # its squares stay within range
    scale = (K * other).sum() / other.square().sum()
    return bool(scale) and bool((K - scale * other).norm() <= ISOTROPIC * (scale * other).norm())


@dataclass(frozen=True)
class Formed(FeatureMatrix):
    """The same of a map that writes more than it reads: the d_in x d_in matrix itself is the smaller one."""

    factor: Seen  # type: ignore[assignment]

    @cached_property
    def matrix(self) -> Float[Tensor, "d_in d_in"]:
        return self.factor.formed(self.K)

    def dense(self) -> Float[Tensor, "d_in d_in"]:
        return self.matrix

    def diagonal(self) -> Float[Tensor, " d_in"]:
        return self.matrix.diagonal()

    def total(self) -> float:
        return self.matrix.sum().item()

    def _inner(self, other: FeatureMatrix) -> float:
        return self.matrix.flatten().dot(other.dense().flatten()).item()

    @property
    def isotropic(self) -> bool:
        return self.K is not None and _multiple(self.K, self.factor.gram)


def feature_matrix(factor: Factor | Seen, K: Tensor | Sketched | None = None) -> FeatureMatrix:
    kind: Callable[..., FeatureMatrix] = Formed if isinstance(factor, Seen) else FeatureMatrix
    if isinstance(K, Sketched):
        return kind(factor, factor.like(K.mean), (factor.like(K.first), factor.like(K.second)))
    return kind(factor, None if K is None else factor.like(K))


NFM = Derived("nfm", feature_matrix, (WEIGHT,))
AGOP = Derived("agop", feature_matrix, (WEIGHT, PROJECTED_PTK_COVARIANCE))
CENTRED_NFM = Derived("centred_nfm", feature_matrix, (CHANGE,))
CENTRED_AGOP = Derived("centred_agop", feature_matrix, (CHANGE, PROJECTED_PTK_COVARIANCE))


def egop(target: Callable[[Tensor], Tensor], x: Float[Tensor, "n d"]) -> Float[Tensor, "d d"]:
    """The expected gradient outer product of a target function, mean over x of sum_o grad f_o grad f_o^T.

    >>> egop(lambda x: x[:, 0] * x[:, 1], torch.ones(4, 3))   # 11^T on the first two coordinates, 0 elsewhere
    """
    x = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        y = target(x).reshape(len(x), -1)
        G = x.new_zeros(x.shape[1], x.shape[1])
        for o in range(y.shape[1]):
            (d,) = torch.autograd.grad(y[:, o].sum(), x, retain_graph=True, allow_unused=True)
            if d is not None:
                G = G + d.T @ d
    return G / len(x)


# --------------------------------------------------------------------------------------------------------------- moved
# Feature matrices from random outputs, with what their two halves differ by added in one group of examples: the sketch's own
# error is the jackknife of these.

def formed_with_each_moved(factor: Seen, parts: Sequence[tuple[Tensor, Tensor, int]]) -> list[tuple[float, float]]:
    """<F, G> and |F| |G| with a share of half the difference of both halves added in one group."""
    F = factor.formed(None).flatten()
    A, B = (factor.formed(total([part[half] for part in parts]).to(F)).flatten() for half in (0, 1))  # type: ignore[misc]
    steps = torch.stack([factor.formed((a - b).to(F) / 2).flatten() for a, b, _ in parts])
    return _moved(parts, F.norm().item(), ((A + B) @ F / 2).item(), (A @ B).item(), steps @ F, steps @ (A + B))


def with_each_moved(factor: Factor, parts: Sequence[tuple[Tensor, Tensor, int]]) -> list[tuple[float, float]]:
    """The same on the side of the outputs."""
    M, M2 = factor.M, (factor.M @ factor.M).flatten()
    A, B = (total([part[half] for part in parts]).to(M) for half in (0, 1))  # type: ignore[misc]
    MA, MB = M @ A, M @ B
    square = (MA * MB.T).sum().item()
    both = ((MA + MB) @ M).flatten()
    steps = torch.stack([(a - b).to(M).flatten() / 2 for a, b, _ in parts])
    return _moved(parts, factor.square ** 0.5, ((A + B).flatten() @ M2 / 2).item(), square, steps @ M2, steps @ both)


def _moved(parts: Sequence[tuple[Tensor, Tensor, int]], norm: float, inner: float, square: float, along: Tensor,
           across: Tensor) -> list[tuple[float, float]]:
    """From sums over all groups and what each step adds to them, in first order: there and back, the second cancels."""
    number = sum(n for _, _, n in parts)
    return [((inner + share * along[g].item()) / number,
             norm * max(square + share * across[g].item(), 0.0) ** 0.5 / number) for g, share in shares(len(parts))]


# --------------------------------------------------------------------------------------------------------------- pairs

class Pair:
    """The neural feature matrix F = W^T W and the gradient outer product G = W^T K W of one W, and how they stand to each other:
    what several measures ask is computed once. ``known``: <F, G> and |F| |G|, where somebody has them already."""

    def __init__(self, factor: Factor | Seen, K: Tensor | Sketched | Callable[[], Any],
                 known: tuple[float, float] | None = None) -> None:
        self._factor, self._K = factor, K
        if known is None:
            known = self.F.inner(self.G), finite(self.F.norm * self.G.norm)
        self.inner, self.size = known  # <F, G> and |F| |G|

    @cached_property
    def F(self) -> FeatureMatrix:
        return feature_matrix(self._factor)

    @cached_property
    def G(self) -> FeatureMatrix:
        return feature_matrix(self._factor, self._K() if callable(self._K) else self._K)


@dataclass(frozen=True)
class OfPair(Derived):
    """A pair of a factor and a moment."""

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _OfPair(self, needs)


class _OfPair(DerivedGathering):
    def leaving(self, place: str, kind: str) -> Sequence[Any]:
        factor, moment = self.needs
        made = moment.gathering if isinstance(moment, Remembered) else moment
        parts = made.parts(place) if kind in ("examples", WITHIN) and isinstance(made, MomentGathering) else None
        if parts is None or len(parts) < 2:
            return super().leaving(place, kind)
        of = factor.value(place)
        known: Sequence[tuple[float, float]] | None
        if kind == WITHIN:
            known = formed_with_each_moved(of, parts) if isinstance(of, Seen) else with_each_moved(of, parts)
        else:
            known = formed_without_each(of, parts) if isinstance(of, Seen) else without_each_group(of, parts)
        if known is None:
            return super().leaving(place, kind)
        finite(sum(abs(inner) + size for inner, size in known))
        return [Pair(of, partial(moment.value, place, (kind, i)), sizes) for i, sizes in enumerate(known)]


def formed_without_each(factor: Seen, parts: Sequence[tuple[Tensor, Tensor, int]]) -> list[tuple[float, float]]:
    """<F, G> and |F| |G| with each group left out, from the inner products of the groups' own matrices."""
    F, halved = factor.formed(None).flatten(), parts[0][0] is not parts[0][1]
    first = torch.stack([factor.formed(A.to(F)).flatten() for A, _, _ in parts])
    second = torch.stack([factor.formed(B.to(F)).flatten() for _, B, _ in parts]) if halved else first
    inner, squares, norm = ((first + second) @ F / 2 if halved else first @ F).cpu(), (first @ second.T).cpu(), F.norm().item()
    number, left = sum(n for _, _, n in parts), 1 - torch.eye(len(parts), dtype=squares.dtype)
    return [((keep @ inner).item() / (number - n), norm * max((keep @ squares @ keep).item(), 0.0) ** 0.5 / (number - n))
            for keep, (_, _, n) in zip(left, parts, strict=True)]


SINGLE = 128  # rows up to which double precision costs nothing
REMAINING = 1e-6  # of |G|^2: where leaving a group out leaves less, too many digits are lost
TOLD = 1e-4  # of <F, G> / (|F| |G|): groups whose leaving out changes it by less are not told apart in single precision


def without_each_group(factor: Factor, parts: Sequence[tuple[Tensor, Tensor, int]]) -> list[tuple[float, float]] | None:
    """<F, G> and |F| |G| with each group left out of K = (sum of all groups) / (positions). Standard errors need few digits:
    single precision, if it tells the groups apart. None where a group is nearly all there is."""
    single = factor.M.dtype == torch.float64 and len(factor.M) > SINGLE
    known = _without_each_group(factor, parts, torch.float32) if single else None
    if known is not None:
        cosines = [inner / size for inner, size in known]
        known = known if max(cosines) - min(cosines) > TOLD * max(map(abs, cosines)) else None
    return known or _without_each_group(factor, parts, factor.M.dtype)


def _without_each_group(factor: Factor, parts: Sequence[tuple[Tensor, Tensor, int]],
                        dtype: torch.dtype) -> list[tuple[float, float]] | None:
    """From K_g M of every group g: <F, G> = <K M, M>, and |G|^2 = Tr(K M K M). The two halves of a sketch stand for the two K."""
    M, halved = factor.M, parts[0][0] is not parts[0][1]
    by = math.sqrt(factor.square)  # |M| = |F|
    scale = max(A.diagonal().max().item() for A, _, _ in parts)  # no entry is larger
    if not (0 < by < math.inf and 0 < scale < math.inf):
        return None
    scale = scale if not 1 / MODEST < scale < MODEST else 1.0
    unit = (M / by).to(dtype)

    def products(sums: Iterable[Tensor]) -> tuple[list[Tensor], Tensor]:
        mine = [(A if scale == 1 else A.to(M) / scale).to(unit) @ unit for A in sums]
        return mine, total(mine)

    first, whole = products(A for A, _, _ in parts)
    second, other = products(B for _, B, _ in parts) if halved else (first, whole)
    square = whole.flatten().dot(other.T.flatten()).item()
    number, flat = sum(n for _, _, n in parts), unit.flatten()
    known = []
    for a, b, (_, _, n) in zip(first, second, parts, strict=True):
        left = whole - a
        right = other - b if halved else left
        rest = left.flatten().dot(right.T.flatten()).item()
        if rest <= REMAINING * abs(square):
            return None
        inner = left.flatten().dot(flat).item()
        inner = (inner + right.flatten().dot(flat).item()) / 2 if halved else inner
        size = by * by * scale / (number - n)
        known.append((inner * size, rest ** 0.5 * size))
    return known


NFM_AND_AGOP = OfPair("nfm_and_agop", Pair, (WEIGHT, PROJECTED_PTK_COVARIANCE))
CENTRED_PAIR = OfPair("centred_nfm_and_agop", Pair, (CHANGE, PROJECTED_PTK_COVARIANCE))
DOUBLE_CENTRED_PAIR = OfPair("double_centred_nfm_and_agop", Pair, (CHANGE, PTK_CHANGE))
PTK_CENTRED_PAIR = OfPair("ptk_centred_nfm_and_agop", Pair, (INITIAL_WEIGHT, PTK_CHANGE))
