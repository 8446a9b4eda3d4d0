"""Statistics of the weights, now and at initialisation: OfWeight, and feature matrices W^T K W: the neural feature matrix,
average gradient outer products, and their centred forms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core.sizes import SMALL
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.bases import Bases, rank
from richter.instrument.statistics.frame import (
    APART,
    NO_INITIAL,
    Derived,
    Gathering,
    Group,
    Missing,
    Simple,
    Statistic,
    Wants,
    finite,
)
from richter.instrument.statistics.moments import PROJECTED_PTK_COVARIANCE, Sketched
from richter.instrument.stream import steps

if TYPE_CHECKING:
    from richter.instrument.subject import Subject

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
        if statistic.seen is not None and subject.bases[place] is not None:
            return Seen(subject.bases, place, *statistic.seen)
        lying = (statistic.seen or statistic.lying) and subject.survey.maps[place].entries > TILE
        return statistic.compute(*(subject.plain(place) if lying else subject.pair(place)))


def block_diagonal(W: Float[Tensor, "r o i"]) -> Tensor:
    """Grouped maps as one matrix on the whole input."""
    return torch.block_diag(*W)


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
