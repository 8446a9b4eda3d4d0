"""Statistics of the weights, now and at initialisation (OfWeight), and feature matrices W^T K W: the neural feature matrix,
average gradient outer products, their centred forms; pairs of them, also with each group of examples left out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
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
    Simple,
    Stack,
    Statistic,
    Wants,
    finite,
)
from richter.instrument.statistics.moments import (
    PROJECTED_PTK_COVARIANCE,
    PTK_CHANGE,
    Bases,
    Sketched,
    Through,
    bases_of,
    shares,
    total,
)
from richter.instrument.stream import steps
from richter.instrument.subject import Subject
from richter.linalg import MODEST

NOT_MOVED = "0/0: the weights (or their backward signals) have not moved from the initial ones"
TILE = 2 ** 22  # entries of a matrix in double precision at a time
ISOTROPIC = 1e-6  # of a moment: what is nearer to a multiple of the identity is one
SIDE_BY_SIDE = 12  # products of a matrix with itself and with moments that are held side by side
SINGLE = 128  # rows up to which double precision costs nothing
REMAINING = 1e-6  # of |G|^2: where leaving a group out leaves less, too many digits are lost
TOLD = 1e-4  # of <F, G> / (|F| |G|): groups whose leaving out changes it by less are not told apart in single precision

Parts = Sequence[tuple[Tensor, Tensor, int]]  # of each group: the sums of both halves of the outputs, and how many positions
Sizes = list[tuple[float, float]]  # <F, G> and |F| |G| in each case

# ------------------------------------------------------------------------------------------------------------- factors


class Factor:
    """A weight matrix W [r, d_in], or its change W - W0, with quantities that are used often, such as M = W W^T. A large matrix
    (of a vocabulary) is not copied; it is read in tiles in double precision."""

    def __init__(self, W: Float[Tensor, "r d_in"], W0: Float[Tensor, "r d_in"] | None = None) -> None:
        self.large, self.shape = W.numel() > TILE, W.shape
        self._now, self._then = (W, W0) if self.large or W0 is None else (W - W0, None)

    def tiles(self) -> Iterator[Float[Tensor, "r c"]]:
        """Some columns after others; of a small one all at once."""
        for some in steps(self.shape[1], max(1, TILE // self.shape[0])) if self.large else ():
            tile = self._now[:, some].double()
            yield tile if self._then is None else tile - self._then[:, some].double()
        if not self.large:
            yield self._now

    @property
    def W(self) -> Float[Tensor, "r d_in"]:
        """Weight, with its columns in tiles if it is large."""
        return torch.cat(list(self.tiles()), 1) if self.large else self._now

    def like(self, K: Tensor) -> Tensor:
        """A moment in the precision of W, and where it is."""
        return K.to(self._now.device, torch.float64 if self.large else self._now.dtype)

    def times(self, other: Factor) -> Float[Tensor, "r q"]:
        """W V^T, for the weight V of another factor."""
        return functools.reduce(Tensor.add_, (A @ B.T for A, B in zip(self.tiles(), other.tiles(), strict=True)))

    @cached_property
    def size(self) -> float:
        """Frobenius norm |W|."""
        return math.hypot(*(A.norm().item() for A in self.tiles()))

    @cached_property
    def M(self) -> Float[Tensor, "r r"]:
        """Gram matrix W W^T of the rows."""
        return self.times(self)

    @cached_property
    def square(self) -> float:
        """Squared norm |W^T W|^2 = |W W^T|^2."""
        return self.M.square().sum().item()

    @property
    def unit(self) -> Float[Tensor, "r r"]:
        """Identity matrix, in place of a moment of signals."""
        return self.like(torch.eye(self.shape[0]))

    def matrix(self, K: Tensor | None, halves: tuple[Tensor, Tensor] | None = None) -> FeatureMatrix:
        """Feature matrix W^T K W; ``halves`` are the K of both halves of random outputs, for its error."""
        return FeatureMatrix(self, K, halves)

    def without_each(self, parts: Parts) -> Sizes | None:
        """<F, G> and |F| |G| with each group left out of K = (sum of all groups) / (positions). Standard errors need few digits:
        single precision, if it tells the groups apart. None where a group is nearly all there is."""
        if self.M.dtype == torch.float64 and len(self.M) > SINGLE:
            sizes = self._without_each(parts, torch.float32)
            cosines = [inner / size for inner, size in sizes or ()]
            if cosines and max(cosines) - min(cosines) > TOLD * max(map(abs, cosines)):
                return sizes
        return self._without_each(parts, self.M.dtype)

    def _without_each(self, parts: Parts, dtype: torch.dtype) -> Sizes | None:
        """From K_g M of every group g: <F, G> = <K M, M>, and |G|^2 = Tr(K M K M). The two halves of a sketch stand for the two
        K."""
        M, halved = self.M, parts[0][0] is not parts[0][1]
        by = math.sqrt(self.square)  # |M| = |F|
        scale = max(A.diagonal().max().item() for A, _, _ in parts)  # no entry is larger
        if not (0 < by < math.inf and 0 < scale < math.inf):
            return None
        scale = scale if not 1 / MODEST < scale < MODEST else 1.0
        unit = (M / by).to(dtype)

        def products(sums: Iterable[Tensor]) -> tuple[list[Tensor], Tensor]:
            each = [(A if scale == 1 else A.to(M) / scale).to(unit) @ unit for A in sums]
            return each, total(each)

        first, whole = products(A for A, _, _ in parts)
        second, other = products(B for _, B, _ in parts) if halved else (first, whole)
        square = whole.flatten().dot(other.T.flatten()).item()
        number, flat = sum(n for _, _, n in parts), unit.flatten()
        sizes = []
        for a, b, (_, _, n) in zip(first, second, parts, strict=True):
            left = whole - a
            right = other - b if halved else left
            rest = left.flatten().dot(right.T.flatten()).item()
            if rest <= REMAINING * abs(square):
                return None
            inner = left.flatten().dot(flat).item()
            inner = (inner + right.flatten().dot(flat).item()) / 2 if halved else inner
            size = by * by * scale / (number - n)
            sizes.append((inner * size, rest ** 0.5 * size))
        return sizes

    def with_each_moved(self, parts: Parts) -> Sizes:
        """<F, G> and |F| |G| with a share of half the difference of both halves added in one group."""
        M, M2 = self.M, (self.M @ self.M).flatten()
        A, B = (total([part[half] for part in parts]).to(M) for half in (0, 1))  # type: ignore[misc]
        MA, MB = M @ A, M @ B
        square = (MA * MB.T).sum().item()
        both = ((MA + MB) @ M).flatten()
        steps = torch.stack([(a - b).to(M).flatten() / 2 for a, b, _ in parts])
        return _moved(parts, self.square ** 0.5, ((A + B).flatten() @ M2 / 2).item(), square, steps @ M2, steps @ both)


class Projected:
    """A factor V = now W + change (W - W0) of a map that writes more than it reads: its moments arrive as products with W and
    W - W0, and the d_in x d_in matrix itself is the smaller one."""

    def __init__(self, bases: Bases, through: Through, name: str, now: float, change: float) -> None:
        self.bases, self.through, self.name, self.weights, self.shape = bases, through, name, (now, change), through.shape

    @cached_property
    def gram(self) -> Float[Tensor, "r r"]:
        """Gram matrix of the basis, in place of the identity."""
        return self.bases.gram(self.name)

    @property
    def unit(self) -> Float[Tensor, "r r"]:
        """Gram matrix of the basis, in place of the identity."""
        return self.gram

    def like(self, K: Tensor) -> Tensor:
        """Convert a matrix to the device and precision of the factor."""
        return K.to(self.gram)

    def formed(self, sums: Sequence[Float[Tensor, "r r"]]) -> Float[Tensor, "g d"]:
        """V^T K V of each K, flattened, in the precision of the matrices."""
        return self.through.blocks(sums, *self.weights).flatten(1).to(self.gram)

    @cached_property
    def identity(self) -> Float[Tensor, " d"]:
        """V^T V of the basis V, flattened."""
        return self.formed([self.gram])[0]

    def matrix(self, K: Tensor | None, halves: tuple[Tensor, Tensor] | None = None) -> FeatureMatrix:
        """Feature matrix that is formed, because the map has few inputs."""
        return Formed(self, K, halves)

    def without_each(self, parts: Parts) -> Sizes | None:
        """<F, G> and |F| |G| with each group left out, from the inner products of the groups' own matrices."""
        F, halved = self.identity, parts[0][0] is not parts[0][1]
        first = self.formed([A for A, _, _ in parts])
        second = self.formed([B for _, B, _ in parts]) if halved else first
        inner = ((first + second) @ F / 2 if halved else first @ F).cpu()
        squares, norm = (first @ second.T).cpu(), F.norm().item()
        number, left = sum(n for _, _, n in parts), 1 - torch.eye(len(parts), dtype=squares.dtype)
        return [((keep @ inner).item() / (number - n), norm * max((keep @ squares @ keep).item(), 0.0) ** 0.5 / (number - n))
                for keep, (_, _, n) in zip(left, parts, strict=True)]

    def with_each_moved(self, parts: Parts) -> Sizes:
        """<F, G> and |F| |G| with a share of half the difference of both halves added in one group."""
        F = self.identity
        A, B = self.formed([total([part[half] for part in parts]) for half in (0, 1)])  # type: ignore[misc]
        steps = self.formed([(a - b) / 2 for a, b, _ in parts])
        return _moved(parts, F.norm().item(), ((A + B) @ F / 2).item(), (A @ B).item(), steps @ F, steps @ (A + B))


def _moved(parts: Parts, norm: float, inner: float, square: float, along: Tensor, across: Tensor) -> Sizes:
    """From sums over all groups and what each step adds to them, in first order: there and back, the second cancels."""
    number = sum(n for _, _, n in parts)
    return [((inner + share * along[g].item()) / number,
             norm * max(square + share * across[g].item(), 0.0) ** 0.5 / number) for g, share in shares(len(parts))]


# ------------------------------------------------------------------------------------------------------------- weights

@dataclass(frozen=True)
class OfWeight(Statistic):
    """A statistic of the matrices now and then: compute(W, W0). ``initial``: it needs W0; ``weights``: it is this much of W and
    this much of W - W0, and Projected where moments with ``project`` are kept as products with these; ``lying``: large matrices
    arrive as they lie, for Factors."""

    name: str
    compute: Callable[[Tensor, Any], Any]
    initial: bool = False
    weights: tuple[float, float] | None = None
    lying: bool = False
    of_examples: bool = False

    @property
    def zero(self) -> str:  # type: ignore[override]
        return NOT_MOVED if self.initial else ""

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        return Wants(alone=max((self._bytes(subject, k) for k in subject.maps), default=0), what="the weights of one layer")

    def _bytes(self, subject: Subject, name: str) -> int:
        """Bytes of a map's matrices in double precision, now, then and their difference, or of some columns of them; and of
        products with themselves."""
        rows, entries = bases_of(subject).rank(name) if self.weights else 0, subject.survey.maps[name].entries
        need = 8 * (3 * (min(entries, TILE) if self.weights or self.lying else entries) + SIDE_BY_SIDE * rows * rows)
        return need if need > SMALL else 0

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _OfWeight(self, subject)


class _OfWeight(Simple):
    def __init__(self, statistic: OfWeight, subject: Subject) -> None:
        super().__init__()
        self.statistic, self.subject = statistic, subject
        self.bases = None if statistic.weights is None else bases_of(subject)

    def value(self, place: str, without: Group | None = None) -> Any:
        statistic, subject, bases = self.statistic, self.subject, self.bases
        if place not in subject.maps:
            raise Missing(APART)
        through = None if bases is None else bases[place]
        W, W0 = subject.matrices.pair(place, TILE if statistic.weights or statistic.lying else None) if through is None else (
            through.W, through.W0)
        if statistic.initial and W0 is None:
            raise Missing(NO_INITIAL)
        if bases is not None and through is not None and statistic.weights is not None:
            return Projected(bases, through, place, *statistic.weights)
        return statistic.compute(W, W0)


MATRIX = OfWeight("matrix", lambda W, W0: W)
WEIGHT = OfWeight("weight", lambda W, W0: Factor(W), weights=(1, 0))
INITIAL_WEIGHT = OfWeight("initial_weight", lambda W, W0: Factor(W0), initial=True, weights=(1, -1))
CHANGE = OfWeight("change", lambda W, W0: Factor(W, W0), initial=True, weights=(0, 1))
OWN_WEIGHT = OfWeight("own_weight", lambda W, W0: Factor(W), lying=True)  # where nothing but the matrix itself is asked for
OWN_CHANGE = OfWeight("own_change", lambda W, W0: Factor(W, W0), initial=True, lying=True)

# ----------------------------------------------------------------------------------------------------- feature matrices


@dataclass(frozen=True)
class FeatureMatrix:
    """W^T K W (K = I when None), kept in factors: the d_in x d_in matrix is formed only by ``dense()``."""

    factor: Factor
    K: Float[Tensor, "r r"] | None = None
    halves: tuple[Tensor, Tensor] | None = None  # of a sketched K: the noise of the two is independent

    def dense(self) -> Float[Tensor, "d_in d_in"]:
        """W^T K W as a matrix (K = 1 for the NFM)."""
        W = self.factor.W
        return W.T @ W if self.K is None else W.T @ self.K @ W

    def diagonal(self) -> Float[Tensor, " d_in"]:
        """Diagonal of W^T K W, without forming the matrix."""
        return torch.cat([(A * (A if self.K is None else self.K @ A)).sum(0) for A in self.factor.tiles()])

    def total(self) -> float:
        """Sum of all entries."""
        u = functools.reduce(Tensor.add_, (A.sum(1) for A in self.factor.tiles()))
        return (u @ (u if self.K is None else self.K @ u)).item()

    def inner(self, other: FeatureMatrix) -> float:
        """<A, B> = Tr(A^T B) by cyclic permutation, on the side of the outputs."""
        return finite(self._inner(other))

    @cached_property
    def KM(self) -> Float[Tensor, "r r"]:
        """Product of the covariance K of signals with M = W W^T."""
        return self.factor.M if self.K is None else self.K @ self.factor.M

    def _inner(self, other: FeatureMatrix) -> float:
        """Frobenius inner product with another feature matrix, from the small factors."""
        A, B = self.K, other.K
        if self.factor is not other.factor:
            N = self.factor.times(other.factor)
            left = N if A is None else A @ N
            return (left * (N if B is None else N @ B)).sum().item()
        return self.factor.square if A is None and B is None else (self.KM * other.KM.T).sum().item()

    def beside(self, other: FeatureMatrix) -> tuple[float, float]:
        """Inner product <A, B> with another feature matrix, and |A| |B|."""
        inner, size = self._inner(other), math.sqrt(self._square) * math.sqrt(other._square)
        finite(abs(inner) + size)
        return inner, size

    def cosine(self, other: FeatureMatrix) -> float:
        """<A, B> / (|A| |B|); NaN if one is zero.  [nfa, Eq. NFC]"""
        inner, size = self.beside(other)
        return inner / size if size else math.nan

    @property
    def norm(self) -> float:
        """Frobenius norm |W^T K W|."""
        return math.sqrt(finite(self._square))

    @cached_property
    def _square(self) -> float:
        """|A|^2; of a sketch without the noise's share, which squaring would leave in."""
        first, second = (self, self) if self.halves is None else (replace(self, K=K, halves=None) for K in self.halves)
        square = first._inner(second)
        return square if math.isnan(square) else max(square, 0.0)

    @property
    def isotropic(self) -> bool:
        """Return whether K is a multiple of the identity, from its first row where that decides."""
        if self.K is None:
            return False
        row, size = self.K[0, 1:], ISOTROPIC * len(self.K) ** 0.5 * self.K.diagonal().abs().max()  # at least that of the multiple
        return not bool((row.abs() > size).any()) and _multiple(self.K, torch.eye(len(self.K), dtype=self.K.dtype,
                                                                                  device=self.K.device))


def _multiple(K: Tensor, other: Tensor) -> bool:
    """Return whether K is a multiple of another matrix up to rounding."""
    size = K.abs().max()
    K = K / size if size > 0 else K  # its squares stay within range
    scale = (K * other).sum() / other.square().sum()
    return bool(scale) and bool((K - scale * other).norm() <= ISOTROPIC * (scale * other).norm())


@dataclass(frozen=True)
class Formed(FeatureMatrix):
    """The feature matrix of a Projected factor, which is formed."""

    factor: Projected  # type: ignore[assignment]

    @cached_property
    def matrix(self) -> Float[Tensor, "d_in d_in"]:
        """Feature matrix, formed from its factor and cached."""
        flat = self.factor.identity if self.K is None else self.factor.formed([self.K])[0]
        return flat.view(self.factor.shape[1], -1)

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
        """Return whether the covariance of signals is a multiple of the identity, so that AGOP and NFM are proportional."""
        return self.K is not None and _multiple(self.K, self.factor.gram)


def feature_matrix(factor: Factor | Projected, K: Tensor | Sketched | None = None) -> FeatureMatrix:
    """Feature matrix W^T K W of a factor; without K the NFM, with a sketched K its mean and halves."""
    if isinstance(K, Sketched):
        return factor.matrix(factor.like(K.mean), (factor.like(K.first), factor.like(K.second)))
    return factor.matrix(None if K is None else factor.like(K))


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


# --------------------------------------------------------------------------------------------------------------- pairs

class Pair:
    """The neural feature matrix F = W^T W and the gradient outer product G = W^T K W of one W, and how they stand to each other.
    ``sizes``: <F, G> and |F| |G|, where they are known already; K is then made when somebody asks for G."""

    def __init__(self, factor: Factor | Projected, K: Any, sizes: tuple[float, float] | None = None) -> None:
        self._factor, self._K = factor, K if sizes else lambda: K
        self.inner, self.size = sizes or self.F.beside(self.G)

    @cached_property
    def F(self) -> FeatureMatrix:
        """Neural feature matrix (NFM)."""
        return feature_matrix(self._factor)

    @cached_property
    def G(self) -> FeatureMatrix:
        """Average gradient outer product (AGOP)."""
        return feature_matrix(self._factor, self._K())

    @property
    def sketched(self) -> bool:
        """Return whether the AGOP is estimated from random outputs."""
        return self.G.halves is not None

    def isotropic(self) -> Pair:
        """Pair whose K is replaced by c I."""
        K, unit = self.G.K, self._factor.unit
        assert K is not None  # G always has one
        return Pair(self._factor, unit * ((K * unit).sum() / unit.square().sum()))


class Inner(NamedTuple):
    """<F, G> and |F| |G| of a pair, with one group left out each."""

    inner: NDArray[np.float64]
    size: NDArray[np.float64]


@dataclass(frozen=True)
class OfPair(Derived):
    """A pair of a factor and a moment."""

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        direct = subject.survey.direct
        if not direct or cotangents.exact or self.needs[1] is PTK_CHANGE:
            return _OfPair(self, needs)
        return _OfDirectPair(self, needs, direct)


class _OfPair(DerivedGathering):
    def leaving(self, place: str, kind: str) -> Sequence[Any]:
        factor, left = self.needs[0].value(place), self.needs[1].leaving(place, kind)
        parts = left.parts  # type: ignore[attr-defined]
        each = factor.with_each_moved if kind == WITHIN else factor.without_each
        sizes = each(parts) if parts is not None and len(parts) > 1 else None
        if sizes is None:
            return [Pair(factor, K) for K in left]
        finite(sum(abs(inner) + size for inner, size in sizes))
        whole = Inner(*np.array(sizes).T)
        return Stack(whole, len(sizes), lambda g: Pair(factor, partial(left.__getitem__, g), sizes[g]))


class _OfDirectPair(_OfPair):
    """``direct``: maps whose moment is c I over all outputs. Random outputs only estimate that, so there it takes their place."""

    def __init__(self, statistic: OfPair, needs: tuple[Gathering, ...], direct: frozenset[str]) -> None:
        super().__init__(statistic, needs)
        self.direct = direct

    def value(self, place: str, without: Group | None = None) -> Any:
        pair = super().value(place, without)
        return pair if place not in self.direct or not pair.sketched else pair.isotropic()

    def leaving(self, place: str, kind: str) -> Sequence[Any]:
        if place in self.direct and (pair := super().value(place)).sketched:
            return [pair.isotropic()] * self.groups[kind]
        return super().leaving(place, kind)


NFM_AND_AGOP = OfPair("nfm_and_agop", Pair, (WEIGHT, PROJECTED_PTK_COVARIANCE))
CENTRED_PAIR = OfPair("centred_nfm_and_agop", Pair, (CHANGE, PROJECTED_PTK_COVARIANCE))
DOUBLE_CENTRED_PAIR = OfPair("double_centred_nfm_and_agop", Pair, (CHANGE, PTK_CHANGE))
PTK_CENTRED_PAIR = OfPair("ptk_centred_nfm_and_agop", Pair, (INITIAL_WEIGHT, PTK_CHANGE))
