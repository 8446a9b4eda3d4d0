"""Self-supervised learning, one dimension at a time: the linearised Barlow Twins model and its kernel form.  [ssl]

An embedding f(x) = W x with W [d, m] is trained on positive pairs (x_i, x_i'), i = 1..n, by gradient flow on
    L = |C - 1|^2,    C = W Gamma W^T,    Gamma = sum_i (x_i x_i'^T + x_i' x_i^T) / 2n = V diag(gamma) V^T.
The first d modes are learned, largest gamma first. Mode j has the singular value s_j, and its share q_j = gamma_j s_j^2, the
eigenvalue of C, is a logistic curve:
    q_j(t) = 1 / (1 + (1 / q_j(0) - 1) e^(-8 gamma_j t)),    L = sum_j (1 - q_j)^2.
From small random weights the same curves hold with s_j(0) = |R_jj| of W(0) V = Q R, because a mode that is learned blocks its
direction for later ones. The final W = Q diag(gamma^(-1/2)) V^T has the least norm of all that reach zero loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike, to_tensor
from richter.theory.arrays import SYMMETRIC, Times, joint_embedding, like, normal, ordinary, read, times_from_zero, whole
from richter.theory.flows import Method, follow
from richter.theory.frame import Theory

ROUNDING = 1e-9  # relative to the largest eigenvalue; smaller ones are rounding errors


def pair_covariance(x: ArrayLike, x2: ArrayLike) -> Array:
    """Gamma = sum_i (x_i x_i'^T + x_i' x_i^T) / 2n of positive pairs [n, m], without centring."""
    a, b = _pairs(x, x2)
    return like((a.T @ b + b.T @ a) / (2 * len(a)), x)


# ------------------------------------------------------------------------------------------------ the linear model


@dataclass(frozen=True)
class LinearBarlowTwins:
    """The flow of W [d, m] from ``W0`` under ``Gamma`` [m, m]. Curves are exact if W0 is aligned with Gamma's eigenvectors; from
    small weights of any other kind their error vanishes with the size of the weights. ``rate`` is the 4 of the gradient; tests
    perturb it.

    >>> model = LinearBarlowTwins(pair_covariance(x, x2), W0)
    >>> model.predict(t), model.step_times, model.final          # [d, t], [d], [d, m]
    """

    Gamma: ArrayLike
    W0: ArrayLike
    rate: float = field(default=4.0, kw_only=True)

    def __post_init__(self) -> None:
        self._start  # noqa: B018  raises an error if the numbers are invalid

    def predict(self, t: Times) -> Array:
        """Singular values s_j(t) [d, t], in the order in which the modes are learned."""
        return like((self._share(t) / self._start[0][:, None]).sqrt(), self.Gamma)

    def eigenvalues(self, t: Times) -> Array:
        """Eigenvalues gamma_j s_j^2 of C [d, t]; each rises to 1."""
        return like(self._share(t), self.Gamma)

    def loss(self, t: Times) -> Array:
        """L(t) [t]: it falls from d to 0, by one for each mode."""
        return like((1 - self._share(t)).square().sum(0), self.Gamma)

    @cached_property
    def step_times(self) -> Array:
        """Times at which the modes are half learned [d]; 0 for a mode that starts with more than half."""
        gamma, _, _, q = self._start
        return like((-torch.logit(q.clamp(max=0.5)) / (2 * self.rate * gamma)).clamp(min=0), self.Gamma)

    @cached_property
    def final(self) -> Array:
        """W at the end [d, m]: the solution of zero loss with the least norm, sum_j 1 / gamma_j."""
        gamma, V, Q, _ = self._start
        return like((Q / gamma.sqrt()) @ V.T, self.Gamma)

    def simulate(self, t: Times, method: Method = "flow", lr: float | None = None) -> Array:
        """Return s_j(t) [d, t] by integrating the flow of all weights, or by gradient descent with steps of ``lr``."""
        return simulate_barlow_twins(self.Gamma, self.W0, t, method=method, lr=lr)

    @cached_property
    def _start(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(gamma [d], V [m, d], Q [d, d], q(0) [d])."""
        G, W = joint_embedding(self.Gamma, self.W0)
        gamma, V = leading(G, len(W))
        Q, R = torch.linalg.qr(W @ V)
        s = R.diagonal().abs()
        lost = (s <= len(W) * torch.finfo(W.dtype).eps * s.max()).nonzero().flatten().tolist()
        if not s.any() or lost:
            raise SelectionError(f"W0 has no component along mode {lost[0] if lost else 0} (counted from 0, largest eigenvalue "
                                 f"first) that earlier modes leave free, so the flow never learns it. Start from small random "
                                 f"weights.")
        return gamma, V, Q * torch.where(R.diagonal() < 0, -1.0, 1.0), gamma * s.square()

    def _share(self, t: Times) -> Float[Tensor, "d t"]:
        gamma, _, _, q = self._start
        decay = torch.exp(-2 * self.rate * gamma[:, None] * times_from_zero(t).to(gamma.device))
        q = q[:, None]
        return q / (q + (1 - q) * decay)


def leading(G: Float[Tensor, "m m"], d: int) -> tuple[Float[Tensor, " d"], Float[Tensor, "m d"]]:
    """Return the ``d`` largest eigenvalues of G, which must be positive, and their eigenvectors."""
    values, vectors = (z.flip(-1) for z in torch.linalg.eigh(G))
    positive = int((values > ROUNDING * values.abs().max()).sum())
    if not positive:
        raise SelectionError(f"no eigenvalue is positive (the largest is {values[0].item():.3g}): the two views of an example "
                             f"have nothing in common, and nothing is learned. x[i] and x2[i] must be views of one example.")
    if positive < d:
        raise SelectionError(f"the embedding has {d} dimensions, but only {positive} eigenvalues are positive: the loss cannot "
                             f"reach zero, and the last {d - positive} dimensions are never learned. Take d={positive} or less.")
    return values[:d], vectors[:, :d]


# ------------------------------------------------------------------------------------------------ the kernel form


@dataclass(frozen=True)
class KernelBarlowTwins:
    """Barlow Twins model in the feature space of a kernel: ``K`` [2n, 2n] is the kernel of the n first views followed by the n
    second views of the same examples. With equal views it is kernel PCA without centring, each component scaled to variance one.

    >>> model = KernelBarlowTwins(K)
    >>> model.eigenvalues, model.embed(k, d=3)                   # [2n], [q, 3] for k(x, X) [q, 2n] of new inputs
    """

    K: ArrayLike

    def __post_init__(self) -> None:
        self._roots  # noqa: B018  raises an error if the kernel is invalid

    @property
    def contrastive(self) -> Array:
        """The contrastive kernel K^(1/2) P K^(1/2) [2n, 2n], which has Gamma's eigenvalues."""
        return like(self._contrastive, self.K)

    @cached_property
    def eigenvalues(self) -> Array:
        """Eigenvalues of the contrastive kernel [2n], largest first."""
        return like(torch.linalg.eigvalsh(self._contrastive).flip(0), self.K)

    def components(self, d: int) -> Array:
        """Coefficients A [2n, d] of the final embedding f(x) = k(x, X) A, up to a rotation that the initial weights decide."""
        whole(d=d)
        gamma, B = leading(self._contrastive, d)
        return like(self._roots[1] @ B / gamma.sqrt(), self.K)

    def embed(self, k: ArrayLike, d: int) -> Array:
        """Return the final embedding [q, d] of inputs with kernels ``k`` [q, 2n] to the pairs."""
        rows = read(k=(k, "q N"))[0]
        A = to_tensor(self.components(d), "components")
        if rows.shape[1] != len(A):
            raise SelectionError(f"k has {rows.shape[1]} columns for {len(A)} views: k(x, X) needs a column for each of the "
                                 f"first views, then one for each of the second views.")
        return like(rows @ A.to(rows.device), k)

    def linear(self, W0: ArrayLike) -> LinearBarlowTwins:
        """Return the dynamics from weights ``W0`` [d, 2n], in coordinates K^(-1/2) k(X, x) of feature space."""
        return LinearBarlowTwins(self.contrastive, W0)

    @cached_property
    def _roots(self) -> tuple[Tensor, Tensor]:
        """K^(1/2) and its pseudo-inverse [2n, 2n]."""
        (K,) = read(K=(self.K, "N N"))
        ordinary(K=K)
        if len(K) % 2:
            raise SelectionError(f"K has {len(K)} rows, but the first views and the second views make an even number.")
        if (K - K.T).norm() > SYMMETRIC * K.norm():
            raise SelectionError("K is not symmetric: the kernel of all views with each other is needed.")
        values, vectors = torch.linalg.eigh((K + K.T) / 2)
        largest = values.abs().max()
        if not largest or values[0] < -1e-6 * largest:
            raise SelectionError(f"K has the eigenvalue {values[0].item():.3g} beside {values[-1].item():.3g}: a kernel has no "
                                 f"negative eigenvalue, and is not zero.")
        real = values > ROUNDING * largest
        root = torch.where(real, values.clamp(min=0).sqrt(), 0.0)
        inverse = torch.where(real, 1 / torch.where(real, root, 1.0), 0.0)
        return (vectors * root) @ vectors.T, (vectors * inverse) @ vectors.T

    @cached_property
    def _contrastive(self) -> Float[Tensor, "N N"]:
        root, n = self._roots[0], len(self._roots[0]) // 2
        C = root[:, :n] @ root[n:] / n
        return (C + C.T) / 2


def _pairs(x: ArrayLike, x2: ArrayLike) -> tuple[Tensor, Tensor]:
    a, b = read(x=(x, "n m"), x2=(x2, "n m"))
    ordinary(x=a, x2=b)
    if len(a) < 2:
        raise SelectionError("there is only one positive pair, and its covariance has rank two at most. Give a batch of pairs.")
    return a, b


# ------------------------------------------------------------------------------------------------ simulate


def simulate_barlow_twins(Gamma: ArrayLike, W0: ArrayLike, t: Times, *, method: Method = "flow",
                          lr: float | None = None) -> Array:
    """Return |R_jj| [d, t] of W(t) V = Q R, where W' = -4 (W Gamma W^T - 1) W Gamma: how much of mode j is learned beside the
    modes before it."""
    G, W = joint_embedding(Gamma, W0)
    V = torch.linalg.eigh(G)[1].flip(1)[:, :len(W)]
    one = torch.eye(len(W), dtype=W.dtype, device=W.device)

    def velocity(W: Tensor) -> Tensor:
        WG = W @ G
        return -4 * (WG @ W.T - one) @ WG

    states = follow(velocity, W.clone(), times_from_zero(t).tolist(), method, lr)
    return like(torch.stack([_orthogonal_parts(state @ V) for state in states], 1), Gamma)


def _orthogonal_parts(A: Float[Tensor, "d d"]) -> Float[Tensor, " d"]:
    """Length of each column that is orthogonal to the columns before it, by Gram-Schmidt, applied twice."""
    basis: list[Tensor] = []
    lengths = []
    for a in A.T:
        for b in basis * 2:
            a = a - (a @ b) * b
        lengths.append(a.norm())
        basis.append(a / lengths[-1])
    return torch.stack(lengths)


# ------------------------------------------------------------------------------------------------ theories


def predict_barlow_twins(Gamma: ArrayLike, W0: ArrayLike, t: Times, *, rate: float = 4.0) -> Array:
    """Return s_j(t) [d, t] of ``LinearBarlowTwins``."""
    return LinearBarlowTwins(Gamma, W0, rate=rate).predict(t)


def _cases() -> Sequence[tuple[Any, ...]]:
    """Aligned weights: sizes below, at and above the final ones; Gamma with negative eigenvalues."""
    cases = []
    for seed, (d, m, size) in enumerate(((3, 5, 0.1), (2, 6, 1e-3), (4, 4, 2.0))):
        V = torch.linalg.qr(normal(m, m, seed=seed))[0]
        values = torch.linspace(1.0, -0.3 if m > d else 0.2, m, dtype=torch.float64)
        U = torch.linalg.qr(normal(d, d, seed=seed + 10))[0]
        cases.append(((V * values) @ V.T, size * (U * (1 + normal(d, seed=seed).abs())) @ V[:, :d].T, [0.0, 0.3, 1.0, 4.0, 20.0]))
    return cases


THEORIES = (
    Theory("self_supervised.linear_barlow_twins", ref=Ref("ssl", "Prop. 4.1"),
           title="modes of a linear joint-embedding model: learned one at a time, each along a logistic curve",
           predict=predict_barlow_twins, simulate=simulate_barlow_twins, cases=_cases, tolerance=1e-8, perturb={"rate": 4.001}),
)
