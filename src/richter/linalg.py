"""Linear algebra that several parts share: largest eigenvalues by Lanczos, traces and norms by Hutch++, sums with groups of rows
left out, means and products of rows that come in parts, random rotations. Symmetric matrices may be given by their products
alone."""

from __future__ import annotations

import math
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


class Lanczos(NamedTuple):
    """A largest eigenvalue, its vector, the orthonormal basis in which it was found, and the eigenvectors in that basis, the one
    of the largest eigenvalue last."""

    value: float
    vector: Float[Tensor, " n"]
    basis: Float[Tensor, "n k"]
    turns: Float[Tensor, "k k"]


def lanczos(times: Callable[[Tensor], Tensor], start: Float[Tensor, " n"], tolerance: float = 1e-12,
            of_value: float = 0.0) -> Lanczos:
    """The largest eigenvalue of a symmetric positive semi-definite matrix given by its products: Lanczos with full
    re-orthogonalisation, until the residual (which bounds the error) is below ``tolerance`` of it; or, where the value alone is
    wanted, until its error, the residual's square over the gap to the next eigenvalue, is below ``of_value`` of it."""
    most, often = min(len(start), 300), 2 if start.dtype == torch.float64 else 1
    V = start.new_empty(most + 1, len(start))  # pages that are not written to take no memory
    torch.div(start, start.norm(), out=V[0])
    alpha: list[float] = []
    beta: list[float] = []
    for step in range(1, most + 1):
        w, basis = times(V[step - 1]), V[:step]
        alpha.append((w @ V[step - 1]).item())
        for _ in range(often):
            w = torch.addmv(w, basis.T, basis @ w, alpha=-1)
        size = w.norm().item()
        if step < 3 or step % 4 == 0 or step == most or size <= 1e-14 * abs(alpha[0]):  # looking costs as much as a product
            T = torch.diag(torch.tensor(alpha, dtype=torch.float64))
            T.diagonal(1)[:] = T.diagonal(-1)[:] = torch.tensor(beta, dtype=torch.float64)
            values, turns = torch.linalg.eigh(T)
            top, residual = values[-1].item(), size * abs(turns[-1, -1].item())
            error = _error_of(residual, top - values[-2].item() if step > 1 else 0.0)
            if residual <= max(tolerance, 1e-14) * abs(top) or error <= of_value * abs(top):
                break
        beta.append(size)
        torch.div(w, size, out=V[step])
    turns = turns.to(start)
    return Lanczos(top, turns[:, -1] @ basis, basis.T, turns)


def top_eigenpair(times: Callable[[Tensor], Tensor], start: Float[Tensor, " n"],
                  tolerance: float = 1e-12) -> tuple[float, Tensor, Tensor]:
    """The largest eigenvalue, its vector, and the basis in which it was found."""
    return lanczos(times, start, tolerance)[:3]


def _error_of(residual: float, gap: float) -> float:
    """Of a largest eigenvalue, whose vector has this residual, and from which the next one is this far."""
    return residual * residual / gap if gap > residual else residual


def anywhere(n: int, like: Tensor) -> Float[Tensor, " n"]:
    """A fixed vector that is unlikely to be orthogonal to an eigenvector."""
    return torch.arange(1, n + 1, dtype=like.dtype, device=like.device).square().sin()


VALUE = 1e-12  # the error of a largest eigenvalue by Lanczos, relative to it


class Leading(NamedTuple):
    """The largest eigenvalue of a symmetric matrix, and what the way to it has found of the vectors of the largest ones."""

    value: float
    vectors: Float[Tensor, "n m"]


def leading(K: Float[Tensor, "n n"], centred: bool = False, most: int = 6) -> Leading:
    """Of a symmetric positive semi-definite matrix, or of C K C with C = I - 11^T/n: dense for small ones, else by Lanczos,
    first in single precision and from what that finds in double. The value is right to VALUE; of the vectors at most so many are
    kept, as single precision has them."""
    if len(K) <= DENSE:
        rows = K.mean(0, keepdim=True) * centred
        values, vectors = eigh(K - rows - rows.T + rows.mean())
        return Leading(values[-1].item(), vectors[:, -most:])

    def times(A: Tensor) -> Callable[[Tensor], Tensor]:
        return (lambda q: without_mean(A @ q)) if centred else lambda q: A @ q

    scale = K.diagonal().max().item()
    if not 0 < scale < math.inf:  # nothing, or nothing that one can compute with
        return Leading(scale, K[:, :most] * 0)
    rough = (K / scale).float()
    found = lanczos(times(rough), without_mean(anywhere(len(K), rough)), tolerance=1e-5)
    vectors = found.basis @ found.turns[:, -most:]
    return Leading(lanczos(times(K), without_mean(found.vector.to(K)), of_value=VALUE).value, vectors.to(K))


def without_mean(q: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    return q - q.mean()


def top_eigenvalue(K: Float[Tensor, "n n"]) -> float:
    """The largest eigenvalue of a symmetric positive semi-definite matrix."""
    return torch.linalg.eigvalsh(K)[-1].item() if len(K) <= DENSE else leading(K, most=1).value


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


EACH = 3e-2  # of how far largest eigenvalues with groups left out lie apart: what they may be off, each for a standard error
EXACT = 128  # rows of which all eigenvalues of every set are as quick
AT_LAST = 1024  # rows of which all eigenvalues of every set are had where the largest will not be found


def top_of_each(K: Float[Tensor, "r r"], keep: Float[Tensor, "g r"], whole: Leading | None = None, centred: bool = True,
                steps: int = 50) -> Float[Tensor, " g"]:
    """The largest eigenvalue of C K C on each set of rows (``keep`` is 1 on its rows and 0 elsewhere; C removes their mean, or
    nothing where they are not ``centred``). For standard errors, which need few digits: by Rayleigh and Ritz on what the sets
    have of the ``whole`` matrix's leading vectors, and where that is not close enough (EACH), on their residuals too, which are
    added until it is, or for so many steps: then a small matrix has all its eigenvalues computed."""
    means = keep / keep.sum(1, keepdim=True) * centred  # set, row

    def exact(some: slice) -> Float[Tensor, " g"]:
        P = torch.diag_embed(keep[some]) - keep[some, :, None] * means[some, None]
        return torch.linalg.eigvalsh(P @ K @ P.mT)[:, -1]

    if len(K) <= EXACT:
        return exact(slice(None))
    vectors = leading(K, centred).vectors if whole is None else whole.vectors

    def on_sets(X: Float[Tensor, "r g p"]) -> Float[Tensor, "r g p"]:
        return (X - torch.einsum("gr,rgp->gp", means, X)) * keep.T[:, :, None]

    def times(X: Float[Tensor, "r g p"]) -> Float[Tensor, "r g p"]:
        return on_sets((K @ X.flatten(1)).view_as(X))

    Z = on_sets(vectors[:, None].expand(-1, len(keep), -1))
    KZ = times(Z)
    for step in range(steps):
        values, y = _ritz_of_each(Z, KZ)
        R = torch.einsum("rgp,gp->rg", KZ, y) - torch.einsum("rgp,gp->rg", Z, y) * values[:, -1]
        size = R.norm(dim=0)
        if _close(values, size):
            break
        if step + 1 == steps:
            return torch.cat([exact(slice(g, g + 1)) for g in range(len(keep))]) if len(K) <= AT_LAST else values[:, -1]
        R = on_sets((R / torch.where(size > 0, size, 1.0))[:, :, None])
        Z, KZ = torch.cat([Z, R], 2), torch.cat([KZ, times(R)], 2)
    return values[:, -1]


def _ritz_of_each(Z: Float[Tensor, "r g p"], KZ: Float[Tensor, "r g p"]) -> tuple[Float[Tensor, "g p"], Float[Tensor, "g p"]]:
    """The eigenvalues of a matrix on the span of each set's vectors, and the combination of these that has the largest."""
    Z, KZ = Z.permute(1, 2, 0), KZ.permute(1, 0, 2)
    squares, turns = torch.linalg.eigh(Z @ Z.mT)
    there = squares > 1e-12 * squares[:, -1:]
    basis = turns * torch.where(there, squares, 1.0).rsqrt()[:, None] * there[:, None]
    M = basis.mT @ (Z @ KZ) @ basis
    values, vectors = torch.linalg.eigh((M + M.mT) / 2)
    return values, (basis @ vectors[:, :, -1:])[:, :, 0]


def _close(values: Float[Tensor, "g p"], residuals: Float[Tensor, " g"]) -> bool:
    """Are largest eigenvalues known well enough for how far they lie apart?"""
    tops, gaps = values[:, -1], values[:, -1] - values[:, -2] if values.shape[1] > 1 else torch.zeros_like(residuals)
    errors = torch.where(gaps > residuals, residuals.square() / gaps.clamp(min=1e-300), residuals)
    apart = EACH * (tops - tops.mean()).abs().max()
    return bool((errors <= apart.clamp(min=1e-12 * tops.abs().max())).all())


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
