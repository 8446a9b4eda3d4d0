"""Linear algebra that several parts share: largest eigenvalues by Lanczos, traces and norms by Hutch++, sums with groups of rows
left out, means and products of rows that come in parts, random rotations. Symmetric matrices may be given by their products
alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

DENSE = 256  # rows up to which all eigenvalues of a matrix are as quick as one

# ------------------------------------------------------------------------------------------------ largest eigenvalues


def eigh(K: Float[Tensor, "n n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, "n n"]]:
    """Eigenvalues of a symmetric matrix, the smallest first, and vectors. torch's method (divide and conquer) gives up on some
    matrices that are zero nearly everywhere, as those of dead units are; then LAPACK's other one is asked."""
    try:
        values, vectors = torch.linalg.eigh(K)
    except torch.linalg.LinAlgError:
        from scipy.linalg import eigh as relatively_robust
        both = relatively_robust(K.detach().double().cpu().numpy(), driver="evr")
        values, vectors = (torch.from_numpy(np.ascontiguousarray(z)).to(K) for z in both)
    return values, vectors


def top_eigenpair(times: Callable[[Tensor], Tensor], start: Float[Tensor, " n"],
                  tolerance: float = 1e-12) -> tuple[float, Tensor, Tensor]:
    """The largest eigenvalue of a symmetric positive semi-definite matrix given by its products, its vector, and the basis
    in which it was found: Lanczos with full re-orthogonalisation, until the residual (which bounds the error) is below
    ``tolerance`` of it."""
    Q = [start / start.norm()]
    alpha: list[float] = []
    beta: list[float] = []
    top, y = 0.0, torch.ones(1, dtype=torch.float64)
    most = min(len(start), 300)
    for step in range(1, most + 1):
        w = times(Q[-1])
        alpha.append((w @ Q[-1]).item())
        basis = torch.stack(Q)
        for _ in range(2):
            w = w - basis.T @ (basis @ w)
        size = w.norm().item()
        if step % 4 == 0 or step == most or size <= 1e-14 * abs(alpha[0]):  # looking costs as much as a product
            a, b = torch.tensor(alpha, dtype=torch.float64), torch.tensor(beta, dtype=torch.float64)
            values, vectors = torch.linalg.eigh(torch.diag(a) + torch.diag(b, 1) + torch.diag(b, -1))
            top, y = values[-1].item(), vectors[:, -1]
            if size * abs(y[-1].item()) <= max(tolerance, 1e-14) * abs(top):
                break
        beta.append(size)
        Q.append(w / size)
    basis = torch.stack(Q[:len(y)]).T
    return top, basis @ y.to(start), basis


def anywhere(n: int, like: Tensor) -> Float[Tensor, " n"]:
    """A fixed vector that is unlikely to be orthogonal to an eigenvector."""
    return torch.arange(1, n + 1, dtype=like.dtype, device=like.device).square().sin()


def top_eigenvalue(K: Float[Tensor, "n n"]) -> float:
    """The largest eigenvalue of a symmetric positive semi-definite matrix: dense for small ones, else by Lanczos."""
    if len(K) <= DENSE:
        return torch.linalg.eigvalsh(K)[-1].item()
    return top_eigenpair(lambda q: K @ q, anywhere(len(K), K))[0]


def leading_eigenpairs(K: Float[Tensor, "n n"], most: int,
                       noise: float = 1e-12) -> tuple[Float[Tensor, " r"], Float[Tensor, "n r"]]:
    """The largest eigenvalues of a symmetric positive semi-definite matrix and their vectors: at most so many, and those that
    stand above ``noise`` times the largest. Of a large matrix few are found by Lanczos."""
    if len(K) <= 2 * DENSE or most > len(K) // 8 or not K.any():  # Lanczos has nothing to begin with
        values, vectors = eigh(K)
    else:
        from scipy.sparse.linalg import eigsh
        start = anywhere(len(K), K).cpu().numpy()
        values, vectors = (torch.as_tensor(a, device=K.device) for a in eigsh(K.cpu().numpy(), most, v0=start))
    order = values.argsort(descending=True)[:most]
    order = order[values[order] > noise * values.max().clamp(min=0)]
    return values[order], vectors[:, order]


class Eigenpairs(NamedTuple):
    """Of largest absolute value first: ``values`` "k", ``vectors`` "k n", and |A v - lambda v| of each."""

    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "k n"]
    residuals: Float[Tensor, " k"]
    products: int  # that they took, without those for the residuals


def largest_eigenpairs(times: Callable[[Tensor], Tensor], start: Float[Tensor, " n"], k: int, basis: int,
                       tolerance: float, rounds: int = 100) -> Eigenpairs:
    """The ``k`` eigenpairs of largest absolute value of a symmetric matrix given by its products: Lanczos with thick restarts
    (Wu and Simon) when ``basis`` vectors are full. Every new vector is made orthogonal to all before by one product with them,
    after the recurrence has taken out all but rounding; what rounding leaves is taken out at the end, by Rayleigh and Ritz on
    the vectors that were found and their products, which also give the residuals."""
    V, T = start.new_zeros(basis + 1, len(start)), torch.zeros(basis + 1, basis + 1, dtype=torch.float64)
    V[0], kept, products, often = start / start.norm(), 0, 0, max(5, basis // 10)
    for _ in range(rounds):
        for j in range(kept, basis):
            T[j, j + 1] = T[j + 1, j] = _next_vector(times(V[j]), V, T, j, kept)
            products += 1
            if j + 1 < basis and (j + 1 <= k or (j + 1 - kept) % often):
                continue  # looking takes all eigenvalues of T
            values, S = torch.linalg.eigh(T[:j + 1, :j + 1])
            order = values.abs().argsort(descending=True)
            apart = T[j, j + 1] * S[-1, order].abs()
            if bool((apart[:k] <= tolerance * values.abs().max()).all()):
                V = S[:, order[:k]].T.to(V) @ V[:j + 1]  # the basis is not held any longer
                return _ritz(times, V, products)
        keep = order[:k + (basis - k) // 2]
        V[:len(keep)], V[len(keep)] = S[:, keep].T.to(V) @ V[:basis], V[basis]
        last, kept = T[basis - 1, basis] * S[-1, keep], len(keep)
        T.zero_()
        T[range(kept), range(kept)] = values[keep]
        T[kept, :kept] = T[:kept, kept] = last
    raise ArithmeticError(f"{products} products, and residuals of {(apart[:k].max() / values.abs().max()).item():.1g}")


def _next_vector(w: Float[Tensor, " n"], V: Float[Tensor, "b n"], T: Float[Tensor, "b b"], j: int, kept: int) -> float:
    """Makes V[j + 1] of w = A V[j], sets T[j, j], and returns T[j, j + 1]. Where V already spans all that A makes of it, a random
    vector goes on, and A does not lead there: 0."""
    scale = w.norm().item()
    T[j, j] = (w @ V[j]).item()
    before = slice(0 if j == kept else j - 1, j + 1)
    w = w - T[j, before].to(V) @ V[before]
    w -= (V[:j + 1] @ w) @ V[:j + 1]
    size = w.norm().item()
    if size > 100 * torch.finfo(V.dtype).eps * scale:
        V[j + 1] = w / size
        return size
    if j + 1 < V.shape[1]:
        w = anywhere(V.shape[1], V).roll(j)
        for _ in range(3):
            w = w - (V[:j + 1] @ w) @ V[:j + 1]
            w /= w.norm()
        V[j + 1] = w
    return 0.0


def _ritz(times: Callable[[Tensor], Tensor], X: Float[Tensor, "k n"], products: int) -> Eigenpairs:
    """The eigenpairs of a matrix on the span of X."""
    X = torch.linalg.solve_triangular(torch.linalg.cholesky((X @ X.T).double()).to(X), X, upper=False)
    AX = torch.empty_like(X)
    for x, Ax in zip(X, AX, strict=True):
        Ax.copy_(times(x))
    M = (X @ AX.T).double()
    values, S = torch.linalg.eigh((M + M.T) / 2)
    order = values.abs().argsort(descending=True)
    turn, values = S[:, order].T.to(X), values[order]
    X, AX = turn @ X, turn @ AX
    AX -= values[:, None].to(X) * X
    return Eigenpairs(values, X, AX.norm(dim=1).double(), products)


# ------------------------------------------------------------------------------------------------ with groups left out


def without_each(blocks: Float[Tensor, "v g g"]) -> Float[Tensor, "v g"]:
    """The sum of all blocks without the row and the column of each group."""
    return blocks.sum((1, 2))[:, None] - blocks.sum(1) - blocks.sum(2) + blocks.diagonal(dim1=1, dim2=2)


def top_of_each(K: Float[Tensor, "r r"], keep: Float[Tensor, "g r"], steps: int = 20,
                centred: bool = True) -> Float[Tensor, " g"]:
    """The largest eigenvalue of C K C on each set of rows (``keep`` is 1 on its rows and 0 elsewhere; C removes their mean, or
    nothing where they are not ``centred``): Lanczos on all sets side by side, from the vector of the whole matrix. For standard
    errors, which need few digits: after at most ``steps`` steps it is right to about six."""
    def kept(X: Tensor) -> Tensor:
        return (X - ((X * keep).sum(1) / keep.sum(1))[:, None] * centred) * keep

    def unit(X: Tensor) -> tuple[Tensor, Tensor]:
        size = X.norm(dim=1)
        return X / torch.where(size > 0, size, 1.0)[:, None], size

    def without_mean(q: Tensor) -> Tensor:
        return q - q.mean() * centred

    start = top_eigenpair(lambda q: without_mean(K @ without_mean(q)), anywhere(len(K), K), 1e-2)[1]
    X = unit(kept(start.expand_as(keep)))[0]
    Q, most = X[:, None], min(steps, len(K))  # set, vector, row
    T = K.new_zeros(len(keep), most, most)
    for j in range(most):
        W = kept(Q[:, -1] @ K)
        T[:, j, j] = (W * Q[:, -1]).sum(1)
        for _ in range(2):
            W = W - ((Q @ W[:, :, None]).mT @ Q)[:, 0]
        X, size = unit(W)
        size = torch.where(size > 1e-13 * T[:, 0, 0].abs(), size, 0.0)
        if j % 4 == 3 or j + 1 == most or not size.any():
            values, vectors = torch.linalg.eigh(T[:, :j + 1, :j + 1])
            residual = size * vectors[:, -1, -1].abs()  # |K u - top u|; the error is about its square
            if j + 1 == most or bool((residual <= 1e-4 * values[:, -1].abs()).all()):
                break
        T[:, j, j + 1] = T[:, j + 1, j] = size
        Q = torch.cat([Q, (X * (size > 0)[:, None])[:, None]], 1)
    return values[:, -1]


# ------------------------------------------------------------------------------------------------ rows that come in parts


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
        Z = Z.double()
        mean = Z.mean(0)
        Z = Z - mean
        return cls(len(Z), mean, Z.T @ Z)

    def __add__(self, other: Scatter) -> Scatter:
        n, step = self.n + other.n, other.mean - self.mean
        return Scatter(n, self.mean + step * (other.n / n),
                       self.about + other.about + torch.outer(step, step) * (self.n * other.n / n))

    def __sub__(self, part: Scatter) -> Scatter:
        """Of the other rows; to be used where what is left is no small share."""
        n, step = self.n - part.n, part.mean - self.mean
        about = torch.addr(self.about - part.about, step, step, alpha=-part.n * self.n / n)
        return Scatter(n, self.mean - step * (part.n / n), about)

    @cached_property
    def covariance(self) -> Float[Tensor, "d d"]:
        """The mean of (z - mean)(z - mean)^T."""
        return self.about / self.n

    @cached_property
    def second(self) -> Float[Tensor, "d d"]:
        """The mean of z z^T."""
        return self.covariance + torch.outer(self.mean, self.mean)


def scatter_without_each(parts: Sequence[Scatter]) -> list[Scatter]:
    """Of all rows but those of each part, of which there are two at least: from all of them by one subtraction; added up anew
    where so little is left that it would cost digits."""
    first, *others = parts
    whole = sum(others, start=first)
    least = REMAINING * whole.about.trace()
    return [rest if (rest := whole - part).about.trace() > least else sum(others[1:], start=others[0])
            for i, part in enumerate(parts) for others in [[*parts[:i], *parts[i + 1:]]]]


# ------------------------------------------------------------------------------------------------ traces and norms by Hutch++


def span_and_rest(Y: Float[Tensor, "p n"], Z: Float[Tensor, "r n"]) -> tuple[Float[Tensor, "q n"], Float[Tensor, "r n"]]:
    """Orthonormal rows Q that span the rows of Y, and what of each row of Z lies outside of that span."""
    Q = torch.linalg.qr(Y.T)[0].T
    return Q, Z - (Z @ Q.T) @ Q


@dataclass(frozen=True)
class Sketch:
    """A symmetric matrix K, known by its products with orthonormal rows Q that span most of what it does, and with random vectors
    Z outside of that span, independent and of unit variance (Hutch++: exact on Q, sampled in the rest).

    ``keep`` selects some of the vectors Z, for estimates of the error that leave others out.
    """

    Q: Float[Tensor, "q n"]
    Z: Float[Tensor, "r n"]
    KQ: Float[Tensor, "q n"]
    KZ: Float[Tensor, "r n"]

    def trace(self, keep: Tensor | slice = slice(None)) -> float:
        """tr K = tr Q K Q^T + E z^T K z."""
        return ((self.Q * self.KQ).sum() + (self.Z * self.KZ).sum(1)[keep].mean()).item()

    def norm(self, keep: Tensor | slice = slice(None)) -> float:
        """|K|_F^2 = |K Q^T|^2 + E |K z|^2, and its root."""
        return (self.KQ.square().sum() + self.KZ.square().sum(1)[keep].mean()).sqrt().item()

    def top(self) -> tuple[float, float]:
        """The largest eigenvalue on the span of Q, which is at most that of K, and the residual |K u - top u| of its vector."""
        T = self.Q @ self.KQ.T
        values, vectors = torch.linalg.eigh((T + T.T) / 2)
        top, u = values[-1].item(), vectors[:, -1]
        return top, (u @ self.KQ - top * (u @ self.Q)).norm().item()


def sketch(times: Callable[[Tensor], Tensor], n: int, draw: torch.Generator, spanning: int = 32, sampling: int = 16) -> Sketch:
    """K from two rounds of products ``times``, which takes rows "q n" to rows "q n": ``spanning`` vectors find where K acts most,
    ``sampling`` vectors sample what is left. With ``spanning`` = n it is exact."""
    Y, Z = (torch.randn(q, n, generator=draw, dtype=torch.float64, device=draw.device) for q in (min(spanning, n), sampling))
    Q, Z = span_and_rest(times(Y), Z)
    K = times(torch.cat([Q, Z]))
    return Sketch(Q, Z, K[:len(Q)], K[len(Q):])


# ------------------------------------------------------------------------------------------------ random rotations


def haar(n: int, draw: np.random.Generator) -> NDArray[np.float64]:
    """A uniformly random orthogonal matrix: the Q of a Gaussian matrix, its signs made those of R's diagonal."""
    Q, R = np.linalg.qr(draw.standard_normal((n, n)))
    return np.asarray(Q * np.sign(np.diag(R)))
