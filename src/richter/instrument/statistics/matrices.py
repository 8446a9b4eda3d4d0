"""Feature matrices of a layer, W^T K W: the neural feature matrix, average gradient outer products, and their centred forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from richter.instrument.captures import LayerCapture, covariance
from richter.instrument.statistics.derived import Derived
from richter.instrument.statistics.moments import PROJECTED_PTK_COVARIANCE, PTK_CHANGE, Sketched
from richter.instrument.statistics.weights import CHANGE, INITIAL_WEIGHT, WEIGHT, Factor, block_diagonal


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


NFM = Derived("nfm", feature_matrix, (WEIGHT,))
AGOP = Derived("agop", feature_matrix, (WEIGHT, PROJECTED_PTK_COVARIANCE))
CENTRED_NFM = Derived("centred_nfm", feature_matrix, (CHANGE,))
CENTRED_AGOP = Derived("centred_agop", feature_matrix, (CHANGE, PROJECTED_PTK_COVARIANCE))
DOUBLE_CENTRED_AGOP = Derived("double_centred_agop", feature_matrix, (CHANGE, PTK_CHANGE))
INITIAL_NFM = Derived("initial_nfm", feature_matrix, (INITIAL_WEIGHT,))
PTK_CENTRED_AGOP = Derived("ptk_centred_agop", feature_matrix, (INITIAL_WEIGHT, PTK_CHANGE))


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
