"""Linear networks with one hidden layer, from any weights: which modes are learned when.  [layerwise, Sec. 3.5, A.2]

    f(x) = x^T W1 W2,   loss = E|f - y|^2 / 2,   C = E[x y^T] = U diag(rho) V^T,   E[x x^T] = I:
    W1' = (C - W1 W2) W2^T,   W2' = W1^T (C - W1 W2),   D = W1^T W1 - W2 W2^T is conserved.   [A.29]

Two kinds of weights have a closed-form solution.

    modes      x_i = u_i^T W1 and y_i = W2 v_i of different modes are orthogonal: each mode is a network of one input and one
               output (``growth``). Aligned and balanced, x_i = y_i = alpha_i r_i, alpha_i^2 is the sigmoid of Eq. 3.15.
    balanced   D = lambda I. Z = [W1; W2^T] then has Z' = (F - Z Z^T / 2) Z with F = [[lambda/2, C], [C^T, -lambda/2]], and
               Z Z^T = e^(Ft) Z0 (I + Z0^T (integral of e^(2Fs) from 0 to t) Z0)^-1 Z0^T e^(Ft), for any sizes.

For other weights the flow is integrated, and ``solution`` reports it. The paper prints alpha_i for alpha_i^2 in Eq. 3.15.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike, to_tensor
from richter.linalg import haar
from richter.theory.arrays import Times, like, linear_layers, normal, read, times_from_zero, whole
from richter.theory.flows import Method, follow
from richter.theory.frame import Theory
from richter.theory.growth import Growth, Staged
from richter.theory.growth import times as product

Solution = Literal["modes", "balanced", "integrated"]
ROUNDING = 1e-12  # relative; smaller inner products count as 0
NOTHING = 1e-15  # relative to all weights; smaller weights of a mode are rounding errors, which would grow

# ------------------------------------------------------------------------------------------------ predict


@dataclass(frozen=True)
class LinearNetwork(Staged):
    """Gradient flow from ``W1`` [d, p] and ``W2`` [p, c] to ``correlation`` = E[x y^T] [d, c]. Inputs are whitened unless
    ``covariance`` = E[x x^T] [d, d] is given (then no closed form is known). ``rate`` is the 2 of e^(2Fs); tests perturb it.

    >>> network = LinearNetwork.drawn(correlation, width=50, scale=0.01).balanced()
    >>> network.predict([0.0, 1.0]), network.emergent_time(0.5), network.solution
    """

    W1: ArrayLike = field(repr=False)
    W2: ArrayLike = field(repr=False)
    correlation: ArrayLike = field(repr=False)
    covariance: ArrayLike | None = field(default=None, repr=False)
    rate: float = field(default=2.0, kw_only=True)

    def __post_init__(self) -> None:
        self._read  # noqa: B018  raises an error if the arrays are invalid

    @classmethod
    def drawn(cls, correlation: ArrayLike, width: int, scale: float, seed: int = 0) -> LinearNetwork:
        """Draw weights from N(0, ``scale``^2), determined by the seed and the width."""
        C = to_start(correlation, scale, seed, width=width)
        draw = np.random.default_rng((seed, width))
        W1, W2 = (torch.from_numpy(scale * draw.standard_normal(s)).to(C.device) for s in ((len(C), width), (width, C.shape[1])))
        return cls(like(W1, correlation), like(W2, correlation), correlation)

    @classmethod
    def aligned(cls, correlation: ArrayLike, width: int, scale: float, seed: int = 0) -> LinearNetwork:
        """Make W1 = ``scale`` U R^T and W2 = ``scale`` R V^T, R [p, m] random and orthonormal: the start of Eq. 3.15.  [A.2.3]"""
        C = to_start(correlation, scale, seed, width=width)
        U, _, Vt = torch.linalg.svd(C, full_matrices=False)
        if width < len(Vt):
            raise SelectionError(f"width={width}: {len(Vt)} modes need as many hidden units at least, to be orthogonal.")
        R = torch.from_numpy(haar(width, np.random.default_rng((seed, width)))).to(C)[:, :len(Vt)]
        return cls(like(scale * U @ R.T, correlation), like(scale * R @ Vt, correlation), correlation)

    def balanced(self) -> LinearNetwork:
        """Return the network with the same W1 W2 and D = 0: both layers get the square roots of its singular values."""
        W1, W2 = self._read.weights
        U, s, Vt = torch.linalg.svd(W1 @ W2, full_matrices=False)
        k = min(len(s), W1.shape[1])  # the product has at most as many singular values as hidden units
        root, hidden = s[:k].clamp(min=0).sqrt(), torch.eye(W1.shape[1], dtype=s.dtype, device=s.device)[:k]
        return LinearNetwork(like(U[:, :k] * root @ hidden, self.W1), like(hidden.T @ (root[:, None] * Vt[:k]), self.W1),
                             self.correlation, self.covariance, rate=self.rate)

    def predict(self, t: Times) -> Array:
        """Return W1 W2 [t, d, c]: in closed form if ``solution`` is "modes" or "balanced", otherwise by integration like
        ``simulate``."""
        W1, W2 = self._layers(t)
        return like(W1 @ W2, self.W1)

    def layers(self, t: Times) -> tuple[Array, Array]:
        """Return W1 [t, d, p] and W2 [t, p, c], up to a rotation of the hidden units, which does not change the function."""
        W1, W2 = self._layers(t)
        return like(W1, self.W1), like(W2, self.W1)

    def modes(self, t: Times) -> Array:
        """Return u_i^T W1 W2 v_i [m, t] for the singular vectors of the correlation; the limits are its singular values."""
        W1, W2 = self._layers(t)
        U, _, V = self._modes
        return like(torch.einsum("di,tdc,ci->it", U, W1 @ W2, V), self.W1)

    def spectrum(self, t: Times) -> Array:
        """Singular values of W1 [t, min(d, p)], largest first. In greedy learning at most as many grow as there are modes."""
        return like(torch.linalg.svdvals(self._layers(t)[0]), self.W1)

    def loss(self, t: Times) -> Array:
        """Return E|f - f*|^2 / 2 [t] with the best linear function f*."""
        W1, W2 = self._layers(t)
        P, C, S = W1 @ W2, self._read.C, self._read.S
        wrong = P - (C if S is None else torch.linalg.pinv(S, hermitian=True) @ C)
        return like((wrong * (wrong if S is None else S @ wrong)).sum((1, 2)) / 2, self.W1)

    @cached_property
    def solution(self) -> Solution:
        """Method of ``predict``: "modes" or "balanced" (see the top of this file), or "integrated" if no closed form is known,
        i.e. if D is not a multiple of the identity and modes share hidden directions, or if inputs are not whitened."""
        W1, W2, S = *self._read.weights, self._read.S
        if S is not None and (S - torch.eye(len(S)).to(S)).norm() > ROUNDING * len(S) ** 0.5:
            return "integrated"
        size = W1.square().sum() + W2.square().sum()
        if self._alone is not None:
            return "modes"
        D = to_tensor(self.conserved)
        return "balanced" if (D - D.diagonal().mean() * torch.eye(len(D)).to(D)).norm() <= ROUNDING * size.cpu() else "integrated"

    @cached_property
    def conserved(self) -> Array:
        """Return the conserved quantity D = W1^T W1 - W2 W2^T [p, p].  [A.29]"""
        W1, W2 = self._read.weights
        return like(W1.T @ W1 - W2 @ W2.T, self.W1)

    # ------------------------------------------------------------------------------------------------ independent modes

    def independent(self, t: Times) -> Array:
        """Return ``modes`` [m, t] as if modes did not share hidden directions: exact if ``solution`` is "modes". For small random
        weights the relative error in the start of a mode, and so in the logarithm of its time, is of order (modes / hidden
        units)."""
        return like(self._growth.strength(times_from_zero(t).to(self._read.C.device)), self.W1)

    def simulate(self, t: Times, method: Method = "flow", lr: float | None = None) -> Array:
        """Return W1 W2 [t, d, c] by integrating the flow of both layers, or by gradient descent with steps of ``lr``."""
        return simulate(self.W1, self.W2, self.correlation, t, self.covariance, method=method, lr=lr)

    # -------------------------------------------------------------------------------------------- inside

    @cached_property
    def _read(self) -> _Read:
        """Weights, correlation and covariance as tensors, checked."""
        return _Read(*linear_layers([self.W1, self.W2], self.correlation, self.covariance))

    @cached_property
    def _modes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return U [d, m], rho [m], V [c, m] of the correlation."""
        U, rho, Vt = torch.linalg.svd(self._read.C, full_matrices=False)
        return U, rho, Vt.T

    @cached_property
    def _growth(self) -> Growth:
        """Growth of the modes."""
        (W1, W2), (U, rho, V) = self._read.weights, self._modes
        return Growth.start(U.T @ W1, (W2 @ V).T, rho, torch.ones_like(rho), self.rate)

    @property
    def _count(self) -> int:
        """Number of modes."""
        return len(self._growth.plus)

    @property
    def _kind(self) -> ArrayLike:
        """Array whose type results have."""
        return self.W1

    def _reach(self, x: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Arrival times of each mode alone."""
        return self._growth.reach(x)

    @cached_property
    def _alone(self) -> _Bases | None:
        """Bases in which modes do not interact; None if there are none."""
        W1, W2 = self._read.weights
        return next((b for b in _candidates(self._read.C, W1 @ W2) if b.orthogonal(W1, W2, self._read.C)), None)

    def _layers(self, t: Times) -> tuple[Float[Tensor, "t d p"], Float[Tensor, "t p c"]]:
        """Weights of both layers at these times."""
        times = times_from_zero(t).to(self._read.C.device)
        (W1, W2), C = self._read.weights, self._read.C
        if self.solution == "integrated":
            states = simulate_layers([W1, W2], C, times, self._read.S)
            return torch.stack([a for a, _ in states]), torch.stack([b for _, b in states])
        if self._alone is not None:
            return self._alone.layers(W1, W2, C, times, self.rate)
        return riccati(W1, W2, C, times, self.rate)


class _Read(NamedTuple):
    weights: list[Tensor]
    C: Float[Tensor, "d c"]
    S: Float[Tensor, "d d"] | None


def to_start(correlation: ArrayLike, scale: float, seed: int, **sizes: int) -> Float[Tensor, "d c"]:
    """Read the correlation for which weights are drawn, and check the other arguments."""
    (C,) = read(correlation=(correlation, "d c"))
    whole(**sizes)
    whole(0, seed=seed)
    if not (math.isfinite(scale) and scale > 0):
        raise SelectionError(f"scale={scale!r}: weights of a size above 0 are needed. From zero nothing is ever learned.")
    return C


# ------------------------------------------------------------------------------------------------ closed forms


@dataclass(frozen=True)
class _Bases:
    """Complete left and right bases in which C and W1 W2 may be diagonal."""

    U: Float[Tensor, "d d"]
    V: Float[Tensor, "c c"]

    def hidden(self, W1: Tensor, W2: Tensor) -> tuple[Float[Tensor, "n p"], Float[Tensor, "n p"]]:
        """Return x_i = u_i^T W1 and y_i = W2 v_i, with zeros where one side has no such direction."""
        X, Y = self.U.T @ W1, (W2 @ self.V).T
        n, size = max(len(X), len(Y)), torch.hypot(X.norm(), Y.norm())
        X, Y = (torch.cat([Z, Z.new_zeros(n - len(Z), Z.shape[1])]) for Z in (X, Y))
        live = torch.hypot(X.norm(dim=1), Y.norm(dim=1))[:, None] > NOTHING * size
        return X * live, Y * live

    def target(self, C: Float[Tensor, "d c"]) -> Float[Tensor, "d c"]:
        """Correlation in these bases."""
        return self.U.T @ C @ self.V

    def orthogonal(self, W1: Tensor, W2: Tensor, C: Tensor) -> bool:
        """Whether modes are independent: C is diagonal, and hidden vectors of different modes are orthogonal."""
        X, Y = self.hidden(W1, W2)
        x, y = X.norm(dim=1), Y.norm(dim=1)
        size = torch.hypot(x.norm(), y.norm())
        S = self.target(C)
        # Small numbers are accurate only to the rounding errors of large ones.
        return bool(_off_diagonal(S).norm() <= ROUNDING * C.norm()) and all(
            not (_off_diagonal(A @ B.T).abs() > ROUNDING * torch.outer(a, b) + NOTHING * size * (a[:, None] + b)).any()
            for A, B, a, b in ((X, X, x, x), (Y, Y, y, y), (X, Y, x, y)))

    def layers(self, W1: Tensor, W2: Tensor, C: Tensor, t: Float[Tensor, " t"], rate: float) -> tuple[Tensor, Tensor]:
        """Weights of both layers at these times, mode by mode."""
        X, Y = self.hidden(W1, W2)
        S = X.new_zeros(len(X))
        diagonal = self.target(C).diagonal()
        S[:len(diagonal)] = diagonal
        gamma = Growth.start(X, Y, S, torch.ones_like(S), rate).gamma(t).T[..., None]  # t n 1
        grown, shrunk = product(X + Y, gamma.sqrt()), product(X - Y, gamma.rsqrt())
        A, B = (grown + shrunk) / 2, (grown - shrunk) / 2
        return self.U @ A[:, :len(W1)], B[:, :W2.shape[1]].mT @ self.V.T


def _off_diagonal(M: Tensor) -> Tensor:
    """Matrix with zeros on its diagonal."""
    return M * (1 - torch.eye(*M.shape, dtype=M.dtype, device=M.device))


def _candidates(C: Tensor, P: Tensor) -> list[_Bases]:
    """Bases to try: singular vectors of C; and joint ones of C and P = W1 W2, which choose among those of equal singular
    values."""
    scale = C.norm() / P.norm() if P.norm() > 0 and C.norm() > 0 else C.new_ones(())
    svds = [torch.linalg.svd(M) for M in (C, C + (math.sqrt(5) - 1) / 2 * scale * P)]
    return [_Bases(U, Vt.T) for U, _, Vt in svds]


def riccati(W1: Float[Tensor, "d p"], W2: Float[Tensor, "p c"], C: Float[Tensor, "d c"], t: Float[Tensor, " t"], rate: float = 2.0
            ) -> tuple[Float[Tensor, "t d p"], Float[Tensor, "t p c"]]:
    """Return both layers, up to a rotation of the hidden units, if W1^T W1 - W2 W2^T = lambda I.

    In eigenvectors of F, with E = integral of e^(2 f s) and G = sqrt(E) Z0, the solution is T G (I + G^T G)^-1 G^T T with
    T = e^(f t) / sqrt(E), which is bounded. The middle is Q Q^T for the upper rows Q of an orthonormal basis of [G; I].
    """
    d, p = W1.shape
    imbalance = (W1.square().sum() - W2.square().sum()) / (2 * p)  # lambda / 2
    ones = torch.ones(len(C) + C.shape[1], dtype=C.dtype, device=C.device)
    ones[d:] = -1
    F = torch.diag(imbalance * ones)
    F[:d, d:], F[d:, :d] = C, C.T
    f, vectors = (z.flip(-1) for z in torch.linalg.eigh(F))  # fastest first
    # the first row needs one hidden unit, the next two, ...
    Z0 = torch.linalg.qr((vectors.T @ torch.cat([W1, W2.T])).T, mode="r")[1].T
    Z0 = torch.cat([Z0, Z0.new_zeros(len(Z0), p - Z0.shape[1])], 1) * (Z0.norm(dim=1, keepdim=True) > NOTHING * Z0.norm())
    started = t > 0
    time, still = torch.where(started, t, 1.0)[:, None], f == 0
    speed = torch.where(still, 1.0, rate * f)
    log_E = torch.where(still, time.log(), (-torch.expm1(-speed.abs() * time) / speed.abs()).log() + (speed * time).clamp(min=0))
    T = torch.where(still, time.rsqrt(), (speed / -torch.expm1(-speed * time)).sqrt())
    Z = torch.where(started[:, None, None], T[..., None] * _upper_basis(log_E / 2, Z0), Z0)
    Z = vectors @ Z
    return Z[:, :d], Z[:, d:].mT


FAR, RANGE = 40.0, 650.0  # e^-40 is below all rounding errors; e^650 is within the range of float64


def _upper_basis(logs: Float[Tensor, "t m"], Z0: Float[Tensor, "m p"]) -> Float[Tensor, "t m p"]:
    """Return the upper rows of an orthonormal basis of the columns of [e^logs Z0; I], by Householder reflections on rows sorted
    by size, so that rows of size 10^100 leave the precision of rows of size 1. For rows beyond the range of float64 only their
    order matters: where rows above 1 differ by more than e^40, this factor is used instead."""
    size = Z0.norm(dim=1)
    logs = logs + size.log()  # -inf for a row of zeros
    levels = max(1, int((logs > 0).sum(1).max()))
    above, order = logs.clamp(min=0).sort(dim=1)
    gaps = torch.diff(above, dim=1, prepend=torch.zeros_like(above[:, :1]))
    near = gaps.clamp(max=min(FAR, RANGE / levels)).cumsum(1)
    logs = torch.zeros_like(near).scatter(1, order, near) + logs.clamp(max=0)
    G = logs.exp()[..., None] * Z0 / torch.where(size > 0, size, 1.0)[:, None]
    eye = torch.eye(Z0.shape[1], dtype=Z0.dtype, device=Z0.device).expand(len(G), -1, -1)
    stacked = torch.cat([G, eye], 1)
    order = stacked.norm(dim=2).argsort(dim=1, descending=True)[..., None].expand_as(stacked)
    Q = torch.linalg.qr(stacked.gather(1, order))[0]
    return torch.zeros_like(Q).scatter(1, order, Q)[:, :len(Z0)]


def predict(W1: ArrayLike, W2: ArrayLike, correlation: ArrayLike, t: Times, *, rate: float = 2.0) -> Array:
    """Product W1 W2 [t, d, c] of ``LinearNetwork`` at these times."""
    return LinearNetwork(W1, W2, correlation, rate=rate).predict(t)


# ------------------------------------------------------------------------------------------------ simulate


def simulate(W1: ArrayLike, W2: ArrayLike, correlation: ArrayLike, t: Times, covariance: ArrayLike | None = None, *,
             method: Method = "flow", lr: float | None = None) -> Array:
    """Return W1 W2 [t, d, c] by integrating W1' = -dL/dW1 and W2' = -dL/dW2, or by gradient descent with steps of ``lr``."""
    W, C, S = linear_layers([W1, W2], correlation, covariance)
    states = simulate_layers(W, C, times_from_zero(t), S, method, lr)
    return like(torch.stack([a @ b for a, b in states]), W1)


def simulate_layers(weights: Sequence[Tensor], C: Float[Tensor, "d c"], t: Float[Tensor, " t"],
                    S: Float[Tensor, "d d"] | None = None, method: Method = "flow", lr: float | None = None
                    ) -> list[list[Tensor]]:
    """Return all layers of x^T W_1 ... W_L at these times: W_i' = (W_1 .. W_(i-1))^T (C - S W_1 .. W_L) (W_(i+1) .. W_L)^T."""

    def velocity(W: list[Tensor]) -> list[Tensor]:
        before = [torch.eye(len(C), dtype=C.dtype, device=C.device)]
        for w in W:
            before.append(before[-1] @ w)
        after = torch.eye(C.shape[1], dtype=C.dtype, device=C.device)
        force, slopes = C - (before[-1] if S is None else S @ before[-1]), []
        for i in range(len(W) - 1, -1, -1):
            slopes.append(before[i].T @ force @ after.T)
            after = W[i] @ after
        return slopes[::-1]

    return follow(velocity, [w.clone() for w in weights], t.tolist(), method, lr)


# ------------------------------------------------------------------------------------------------ theories


def _cases() -> list[tuple[Any, ...]]:
    """Aligned layers of equal and of different size; balanced ones in general position, wide, narrow and of rank one; with an
    imbalance lambda I; a correlation with equal singular values, and one of lower rank."""
    t = [0.0, 0.1, 0.7, 3.0, 12.0]
    C = normal(5, 3, seed=1)
    aligned = LinearNetwork.aligned(C, 6, 0.05)
    cases: list[tuple[Any, ...]] = [(aligned.W1, aligned.W2, C, t), (3 * aligned.W1, aligned.W2, C, t)]
    for width, target in ((7, C), (2, C), (4, C.T), (4, torch.eye(3, dtype=C.dtype)), (4, C[:, :1] @ C[:1])):
        even = LinearNetwork.drawn(target, width, 0.2, seed=2).balanced()
        cases.append((even.W1, even.W2, target, t))
    R = torch.from_numpy(haar(3, np.random.default_rng(0)))
    W2 = 0.3 * normal(2, 3, seed=4)
    root = torch.linalg.cholesky(W2 @ W2.T + 0.5 * torch.eye(2, dtype=C.dtype)).T  # W1^T W1 = W2 W2^T + 0.5 I
    return [*cases, (R[:, :2] @ root, W2, normal(3, 3, seed=5), t)]


THEORIES = (
    Theory("two_layers.linear_network", ref=Ref("layerwise", "Eq. 3.15, App. A.2.3"),
           title="the function of a two-layer linear network at all times, aligned or balanced",
           predict=predict, simulate=simulate, cases=_cases, tolerance=1e-8, perturb={"rate": 2.001}),
)
