"""What measures are made of, each computed once: statistics of weights, moments over examples, kernels over pairs.

How chunks combine: a moment is a sum over examples and positions, divided once at the end; it is kept in a few groups
of examples, so that every measure can be computed again with one group left out (the jackknife). A kernel is a block of
pairs; leaving examples out is leaving out its rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from richter.instrument.captures import LayerCapture, map_gradient


class Factor:
    """A weight matrix W [r, d_in] and what is asked of it again and again: M = W W^T and M^2."""

    def __init__(self, W: Float[Tensor, "r d_in"]) -> None:
        self.W = W

    @cached_property
    def M(self) -> Float[Tensor, "r r"]:
        return self.W @ self.W.T

    @cached_property
    def M2(self) -> Float[Tensor, "r r"]:
        return self.M @ self.M


@dataclass(frozen=True)
class Sketched:
    """A moment from random outputs: its mean, and two of it from independent halves of them."""

    mean: Tensor
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class FeatureMatrix:
    """W^T K W (K = I when None), kept in factors: the d_in x d_in matrix is formed only by ``dense()``."""

    factor: Factor
    K: Float[Tensor, "r r"] | None = None
    halves: tuple[Tensor, Tensor] | None = None  # of a sketched K: the noise of the two is independent

    def dense(self) -> Float[Tensor, "d_in d_in"]:
        W = self.factor.W
        return W.T @ W if self.K is None else W.T @ self.K @ W

    def diagonal(self) -> Float[Tensor, d_in]:
        W = self.factor.W
        return (W * (W if self.K is None else self.K @ W)).sum(0)

    def total(self) -> float:
        """The sum of all entries."""
        u = self.factor.W.sum(1)
        return (u @ (u if self.K is None else self.K @ u)).item()

    def inner(self, other: FeatureMatrix) -> float:
        """<A, B> = Tr(A^T B) by cyclic permutation, on the side of the outputs."""
        A, B = self.K, other.K
        if self.factor is not other.factor:
            N = self.factor.W @ other.factor.W.T
            left = N if A is None else A @ N
            return (left * (N if B is None else N @ B)).sum().item()
        if A is None or B is None:
            K = A if B is None else B
            return (self.factor.M.square().sum() if K is None else (K * self.factor.M2).sum()).item()
        left = A @ self.factor.M
        return (left * (left if B is A else B @ self.factor.M).T).sum().item()

    @cached_property
    def norm(self) -> float:
        """|A|; of a sketch without the noise's share, which squaring would leave in."""
        if self.halves is not None:
            first, second = (FeatureMatrix(self.factor, K) for K in self.halves)
            return max(first.inner(second), 0.0) ** 0.5
        return max(self.inner(self), 0.0) ** 0.5


def feature_matrix(factor: Factor, K: Tensor | Sketched | None = None) -> FeatureMatrix:
    return FeatureMatrix(factor, K.mean, (K.first, K.second)) if isinstance(K, Sketched) else FeatureMatrix(factor, K)


@dataclass(frozen=True)
class OfWeight:
    """A statistic of the matrices now and then: compute(W, W0). ``initial``: it needs W0; ``project``: as in Moment."""

    name: str
    compute: Callable[[Tensor, Any], Any]
    initial: bool = False
    project: bool = False


@dataclass(frozen=True)
class Moment:
    """block(capture) is summed over examples and positions and divided by their number. With ``project`` it is kept in
    an orthonormal basis of the columns of W and W0, which loses nothing that is later multiplied by W or W0."""

    name: str
    block: Callable[[LayerCapture], Tensor]
    project: bool = False
    initial: bool = False  # needs h0, g0: what the initial network reads and asks on the same examples
    reads: bool = True  # needs h; saves unfolding patches where it does not
    halves: bool = False  # random outputs give it as Sketched, for what squares it
    gradient: bool = False  # a gradient in the weight itself: see weight_gradient


@dataclass(frozen=True)
class Gram:
    """A kernel "n v n v" over the probe's kernel examples, for each module and for the whole model."""

    name: str


@dataclass(frozen=True)
class OfProbe:
    """Something of the probe alone: its labels, in the same order as a Gram's rows; its weight decay."""

    name: str


@dataclass(frozen=True)
class Derived:
    """A function of other statistics, computed once for all measures that need it."""

    name: str
    compute: Callable[..., Any]
    needs: tuple[Statistic, ...]
    leaving: Callable[..., Sequence[Any]] | None = None  # (*needs, groups): all values with one group left out, at once


Statistic = OfWeight | Moment | Gram | OfProbe | Derived


def block_diagonal(W: Float[Tensor, "r o i"]) -> Tensor:
    """Grouped maps as one matrix on the whole input."""
    return torch.block_diag(*W)


def basis(W: Float[Tensor, "o i"], W0: Float[Tensor, "o i"] | None) -> Float[Tensor, "o r"] | None:
    """An orthonormal basis of the columns of W (and W0), where to go there, d r + r^2 operations for each g, is less than d^2."""
    columns = W if W0 is None else torch.cat([W, W0], 1)
    d, r = columns.shape
    return torch.linalg.qr(columns)[0] if r * (d + r) < d * d else None


def covariance(g: Float[Tensor, "v n s o"]) -> Float[Tensor, "o o"]:
    if g.shape[2] > g.shape[3]:
        g = g.flatten(0, 1)
        return torch.bmm(g.mT, g).sum(0)
    g = g.reshape(-1, g.shape[-1])
    return g.T @ g


def ptk_covariance(c: LayerCapture) -> Tensor:
    """sum over v, n, s of g g^T; as a moment, K = 1/(n s) sum_n J_n^T J_n.  [nfa, Sec. 1; with 1/n, so that G = W^T K W]"""
    return covariance(c.g)


def ptk_change_covariance(c: LayerCapture) -> Tensor:
    """The same of g - g0: what the outputs ask now and did not at initialisation."""
    assert c.g0 is not None
    return covariance(c.g - c.g0)


def weight_gradient(c: LayerCapture) -> Tensor:
    """sum over v, n, s of g h^T, in the shape of the map's own matrix; as a moment (over examples alone, masked positions and
    other uses of the same parameter included) d/dW of mean_n sum_v <V_v, f(x_n)>."""
    return map_gradient(c.kind, c.h, c.g.sum(0), c.W.shape[-1])


MATRIX = OfWeight("matrix", lambda W, W0: W)
WEIGHT = OfWeight("weight", lambda W, W0: Factor(W), project=True)
INITIAL_WEIGHT = OfWeight("initial_weight", lambda W, W0: Factor(W0), initial=True, project=True)
CHANGE = OfWeight("change", lambda W, W0: Factor(W - W0), initial=True, project=True)
PTK_COVARIANCE = Moment("ptk_covariance", ptk_covariance, reads=False, halves=True)
PROJECTED_PTK_COVARIANCE = Moment("projected_ptk_covariance", ptk_covariance, project=True, reads=False, halves=True)
PTK_CHANGE = Moment("ptk_change", ptk_change_covariance, project=True, initial=True, reads=False, halves=True)
WEIGHT_GRADIENT = Moment("weight_gradient", weight_gradient, gradient=True)

NFM = Derived("nfm", feature_matrix, (WEIGHT,))
AGOP = Derived("agop", feature_matrix, (WEIGHT, PROJECTED_PTK_COVARIANCE))
CENTRED_NFM = Derived("centred_nfm", feature_matrix, (CHANGE,))
CENTRED_AGOP = Derived("centred_agop", feature_matrix, (CHANGE, PROJECTED_PTK_COVARIANCE))
DOUBLE_CENTRED_AGOP = Derived("double_centred_agop", feature_matrix, (CHANGE, PTK_CHANGE))
INITIAL_NFM = Derived("initial_nfm", feature_matrix, (INITIAL_WEIGHT,))
PTK_CENTRED_AGOP = Derived("ptk_centred_agop", feature_matrix, (INITIAL_WEIGHT, PTK_CHANGE))

TANGENT_KERNEL = Gram("tangent_kernel")
LABELS = OfProbe("labels")
WEIGHT_DECAY = OfProbe("weight_decay")


def leaves(needs: Sequence[Statistic]) -> list[OfWeight | Moment | Gram | OfProbe]:
    """The statistics that touch data or weights, without repetition."""
    found: dict[str, OfWeight | Moment | Gram | OfProbe] = {}
    for s in needs:
        for leaf in leaves(s.needs) if isinstance(s, Derived) else [s]:
            found[leaf.name] = leaf
    return list(found.values())


def nfm(W: Float[Tensor, "o i"]) -> Float[Tensor, "i i"]:
    """The neural feature matrix W^T W."""
    return W.T @ W


def agop(c: LayerCapture) -> Float[Tensor, "i i"]:
    """The average gradient outer product 1/(n s) sum_{v,n,s} (W^T g)(W^T g)^T = W^T K W of one captured layer."""
    W = block_diagonal(c.W) if c.kind == "grouped" else c.W
    return covariance(c.g.flatten(3) @ W) / (c.g.shape[1] * c.g.shape[2])


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
