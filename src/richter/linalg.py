"""Shared linear algebra: largest eigenvalues by Lanczos, sums with groups of rows left out, random rotations, similarity of
features, and statistics of kernel matrices. Symmetric matrices may be given by their products alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from richter.core import SelectionError, likeness
from richter.core.arrays import Array, ArrayLike, like, to_tensor

DENSE = 64  # rows up to which computing all eigenvalues is as fast as computing one
MANY = 512  # rows up to which computing all eigenvectors is as fast as computing many
ALONE = 2 ** 13  # entries of a matrix up to which numpy multiplies without starting other threads


def product(A: NDArray[Any], B: NDArray[Any]) -> NDArray[Any]:
    """Multiply numpy arrays, large ones in torch, whose threads also train. Numpy's own threads stay busy while they wait for
    work, and slow the training down: that was half the time of a snapshot of a small network."""
    if max(A.size, B.size) <= ALONE:
        return np.asarray(A @ B)
    return torch.matmul(torch.from_numpy(A), torch.from_numpy(B)).numpy()  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------ largest eigenvalues


def eigh(K: Float[Tensor, "n n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, "n n"]]:
    """Eigenvalues of a symmetric matrix, smallest first, and its eigenvectors. torch's method (divide and conquer) fails on some
    nearly zero matrices, e.g. of dead units; then another LAPACK method is used."""
    try:
        values, vectors = torch.linalg.eigh(K)
    except torch.linalg.LinAlgError:
        from scipy.linalg import eigh as relatively_robust
        both = relatively_robust(K.detach().double().cpu().numpy(), driver="evr")
        values, vectors = (torch.from_numpy(np.ascontiguousarray(z)).to(K) for z in both)
    return values, vectors


class Lanczos(NamedTuple):
    """A largest eigenvalue and its vector, the orthonormal Lanczos basis, and the eigenvectors in this basis, the one of the
    largest eigenvalue last."""

    value: float
    vector: NDArray[Any]  # "n"
    basis: NDArray[Any]  # "k n"
    turns: NDArray[Any]  # "k k"


def lanczos(times: Callable[[NDArray[Any]], NDArray[Any]], start: NDArray[Any], tolerance: float = 1e-12, of_value: float = 0.0,
            centred: bool = False) -> Lanczos:
    """Largest eigenvalue of a symmetric positive semi-definite matrix A given by its products, or of C A C with C = I - 11^T/n if
    ``centred``. Lanczos with full re-orthogonalisation (also against 1) runs until the residual, which bounds the error, is below
    ``tolerance`` relative to it. If only the value is needed, it stops when the error of the value (squared residual over the gap
    to the next eigenvalue) is below ``of_value``. In numpy, whose small operations are faster than torch's."""
    n, first = len(start), int(centred)
    most, again = min(n, 300), start.dtype == np.float64  # orthogonalised twice if rounding errors would matter
    V = np.empty((first + most + 1, n), start.dtype)  # unused pages take no memory
    V[:first] = n ** -0.5
    w = start - (V[:first] @ start) @ V[:first]
    np.divide(w, _length(w), out=V[first])
    alpha: list[float] = []
    beta: list[float] = []
    for step in range(1, most + 1):
        basis = V[:first + step]
        w = times(basis[-1])
        along = product(basis, w)
        alpha.append(float(along[-1]))
        w = w - product(along, basis)
        if again:
            w -= product(product(basis, w), basis)
        size = _length(w)
        # a convergence test costs as much as a product
        if step < 3 or step % 4 == 0 or step == most or size <= 1e-14 * abs(alpha[0]):
            values, turns = np.linalg.eigh(np.diag(alpha) + np.diag(beta, 1) + np.diag(beta, -1) if beta else np.diag(alpha))
            top, residual = float(values[-1]), size * abs(float(turns[-1, -1]))
            gap = top - float(values[-2]) if step > 1 else 0.0
            error = residual * residual / gap if gap > residual else residual
            if residual <= max(tolerance, 1e-14) * abs(top) or error <= of_value * abs(top):
                break
        beta.append(size)
        np.divide(w, size, out=V[first + step])
    turns = turns.astype(start.dtype)
    return Lanczos(top, product(turns[:, -1], basis[first:]), basis[first:], turns)


def _length(w: NDArray[Any]) -> float:
    """Euclidean norm of a vector."""
    return math.sqrt(float(w @ w))


def anywhere(n: int, like: Tensor) -> Float[Tensor, " n"]:
    """Return a fixed vector that is unlikely to be orthogonal to an eigenvector."""
    return torch.arange(1, n + 1, dtype=like.dtype, device=like.device).square().sin()


MODEST = 1e6  # numbers up to this size, and down to its inverse, can be squared and summed in single precision without scaling
VALUE = 1e-12  # relative error of a largest eigenvalue by Lanczos


class Rough(NamedTuple):
    """A matrix divided by ``scale``, in single precision."""

    matrix: NDArray[np.float32]  # "n n"
    scale: float


def rough(K: Float[Tensor, "n n"]) -> Rough | None:
    """Convert a symmetric positive semi-definite matrix to single precision; None if it is zero or not finite."""
    scale = K.diagonal().max().item()
    if not 0 < scale < math.inf:
        return None
    scale = scale if not 1 / MODEST < scale < MODEST else 1.0
    return Rough((K if scale == 1 else K / scale).float().cpu().numpy(), scale)


class Leading(NamedTuple):
    """The largest eigenvalue of a symmetric matrix, Ritz vectors "m n" of the largest ones, and the matrix in single precision;
    None for a zero matrix."""

    value: float
    vectors: NDArray[np.float32] | None = None
    rough: Rough | None = None


def leading(K: Float[Tensor, "n n"], centred: bool = False, most: int = 6, roughly: Rough | None = None) -> Leading:
    """Largest eigenvalue of a symmetric positive semi-definite matrix, or of C K C with C = I - 11^T/n. Small matrices: all
    eigenvalues. Others: Lanczos, first in single precision (on ``roughly``, if given) and from there in double precision. The
    value is exact to VALUE; at most ``most`` Ritz vectors are returned, in single precision."""
    if len(K) <= DENSE:
        rows = K.mean(0, keepdim=True) * centred
        values, vectors = eigh(K - rows - rows.T + rows.mean())
        return Leading(values[-1].item(), vectors[:, -most:].T.float().cpu().numpy(), roughly or rough(K))
    roughly = roughly or rough(K)
    if roughly is None:
        return Leading(K.diagonal().max().item())
    pair = lanczos(partial(product, roughly.matrix), anywhere(len(K), torch.empty(0, dtype=torch.float64)).float().numpy(), 1e-5,
                    centred=centred)
    exact = lanczos(partial(product, K.double().cpu().numpy()), pair.vector.astype(np.float64), of_value=VALUE, centred=centred)
    return Leading(exact.value, product(pair.turns[:, -most:].T, pair.basis), roughly)


def top_eigenvalue(K: Float[Tensor, "n n"]) -> float:
    """Largest eigenvalue of a symmetric positive semi-definite matrix."""
    return torch.linalg.eigvalsh(K)[-1].item() if len(K) <= EXACT else leading(K, most=1).value


def leading_eigenpairs(K: Float[Tensor, "n n"], most: int,
                       noise: float = 1e-12) -> tuple[Float[Tensor, " r"], Float[Tensor, "n r"]]:
    """Return the ``most`` largest eigenvalues of a symmetric positive semi-definite matrix and their vectors, without those below
    ``noise`` times the largest. A few of a large matrix are computed by Lanczos, otherwise all."""
    if len(K) <= MANY or most > len(K) // 8 or not K.any():  # Lanczos cannot start from zeros
        values, vectors = eigh(K)
    else:
        from scipy.sparse.linalg import eigsh
        start = anywhere(len(K), K).cpu().numpy()
        values, vectors = (torch.as_tensor(a, device=K.device) for a in eigsh(K.cpu().numpy(), most, v0=start))
    order = values.argsort(descending=True)[:most]
    order = order[values[order] > noise * values.max().clamp(min=0)]
    return values[order], vectors[:, order]


class Eigenpairs(NamedTuple):
    """Eigenpairs, largest absolute value first: ``values`` "k", ``vectors`` "k n", and |A v - lambda v| of each."""

    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "k n"]
    residuals: Float[Tensor, " k"]
    products: int  # number of matrix products, without those for the residuals


def largest_eigenpairs(times: Callable[[Tensor], Tensor], start: Float[Tensor, " n"], k: int, basis: int, tolerance: float,
                       rounds: int = 100) -> Eigenpairs:
    """Return the ``k`` eigenpairs of largest absolute value of a symmetric matrix given by its products: Lanczos with restarts
    when ``basis`` vectors are full (ARPACK)."""
    from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh
    products = 0

    def product(v: NDArray[Any]) -> NDArray[Any]:
        nonlocal products
        products += 1
        return times(torch.from_numpy(v).to(start)).cpu().numpy()  # type: ignore[no-any-return]

    v0 = start.cpu().numpy()
    A = LinearOperator((len(v0), len(v0)), product, dtype=v0.dtype)
    try:
        values, vectors = eigsh(A, k, v0=v0, ncv=basis, maxiter=rounds, tol=tolerance)
    except ArpackNoConvergence as why:
        raise ArithmeticError(f"{products} products, and {len(why.eigenvalues)} of {k} eigenpairs found") from why
    except ArpackError as why:
        if times(start).any():
            raise ArithmeticError(f"{products} products, and {why}") from why
        values, vectors = np.zeros(k), np.eye(len(v0), k, dtype=v0.dtype)
    order = np.argsort(-np.abs(values))
    V, lambdas = (torch.from_numpy(np.ascontiguousarray(z[..., order].T)).to(start.device) for z in (vectors, values))
    residuals = torch.stack([(times(v) - x.to(v) * v).norm() for v, x in zip(V, lambdas, strict=True)])
    return Eigenpairs(lambdas.double(), V, residuals.double(), products)


# ------------------------------------------------------------------------------------------------ with groups left out


def without_each(blocks: Float[Tensor, "v g g"]) -> Float[Tensor, "v g"]:
    """Sum of all blocks without the row and the column of each group."""
    return blocks.sum((1, 2))[:, None] - blocks.sum(1) - blocks.sum(2) + blocks.diagonal(dim1=1, dim2=2)


EACH = 3e-2  # error of a largest eigenvalue with a group left out, relative to the spread of these values
APART = 1e-4  # relative distance below which eigenvalues cannot be separated in single precision
EXACT = 128  # rows up to which computing all eigenvalues of every set is as fast
AT_LAST = 1024  # rows up to which all eigenvalues of every set are computed if iterations do not converge


def top_of_each(K: Float[Tensor, "r r"], keep: NDArray[np.float64], whole: Leading | None = None, centred: bool = True,
                steps: int = 50) -> list[float]:
    """Largest eigenvalue of C K C on each set of rows (``keep`` "g r" is 1 on its rows and 0 elsewhere; C removes their mean if
    ``centred``), with the few digits that standard errors need. It uses ``ritz``, started from the leading vectors of the
    ``whole`` matrix, in single precision unless the values are too close together. If it takes too many steps, all eigenvalues of
    a small matrix are computed."""
    if len(K) > EXACT:
        whole = leading(K, centred) if whole is None else whole
        if whole.vectors is None or whole.rough is None:
            return [whole.value] * len(keep)
        roughly = _ritz_on_rows(whole.rough.matrix, keep, whole.vectors, centred, steps)
        if roughly is not None and max(roughly) - min(roughly) > APART * max(roughly):
            return [value * whole.rough.scale for value in roughly]
        exactly = None if roughly is None else _ritz_on_rows(K.cpu().numpy(), keep, whole.vectors, centred, steps)
        if exactly is not None:
            return exactly
    return [_top_of_set(K, rows, centred, sure=len(K) <= AT_LAST) for rows in torch.from_numpy(keep > 0).to(K.device)]


def _top_of_set(K: Float[Tensor, "r r"], rows: Tensor, centred: bool, sure: bool) -> float:
    """Compute all eigenvalues of a set, or only the largest if that takes too long; return the largest."""
    part = K[rows][:, rows]
    if not sure:
        return leading(part, centred, most=1).value
    mean = part.mean(0, keepdim=True) * centred
    return torch.linalg.eigvalsh(part - mean - mean.T + mean.mean())[-1].item() if len(part) else 0.0


def _ritz_on_rows(K: NDArray[Any], keep: NDArray[Any], vectors: NDArray[Any], centred: bool, steps: int) -> list[float] | None:
    """Largest eigenvalues on sets of rows; None if ``steps`` steps are not enough."""
    result = ritz(lambda X: product(X.reshape(-1, len(K)), K).reshape(X.shape), keep.astype(K.dtype),
                 vectors.astype(K.dtype)[None], centred, steps)
    return result.values.tolist() if result.close else None


class Ritz(NamedTuple):
    """Largest eigenvalues on sets of rows, whether they are accurate enough, and leading vectors of each set."""

    values: NDArray[Any]  # "g"
    close: bool
    vectors: NDArray[Any]  # "g p r"


def ritz(times: Callable[[NDArray[Any]], NDArray[Any]], keep: NDArray[Any], start: NDArray[Any], centred: bool = True,
         steps: int = 50, tolerance: float = 1e-12, each: float = EACH, kept: int = 1) -> Ritz:
    """Largest eigenvalue of C K C on each set of rows ``keep`` "g r", by Rayleigh-Ritz on the vectors ``start`` "1 p r" or "g p
    r". Their residuals are added until every value is within ``tolerance`` of an eigenvalue, or within the share ``each`` of the
    spread of the values, or for ``steps`` steps. ``times`` multiplies by K."""
    means = (keep / keep.sum(1, keepdims=True))[:, :, None]

    def on_sets(X: NDArray[Any]) -> NDArray[Any]:
        return (X - X @ means if centred else X) * keep[:, None]

    Z = on_sets(start)
    KZ = on_sets(times(Z))
    for step in range(steps):
        values, basis, turns = _ritz_values(Z, KZ)
        y = (basis @ turns[:, :, -1:]).swapaxes(1, 2).astype(Z.dtype)
        R = y @ KZ - y @ Z * values[:, -1:, None].astype(Z.dtype)
        size = np.sqrt(np.einsum("gpr,gpr->g", R, R)).astype(float)
        close = _close(values, size, tolerance, each)
        if close or step == steps - 1:
            break
        R = on_sets(R / np.where(size > 0, size, 1.0)[:, None, None].astype(Z.dtype))
        Z, KZ = np.concatenate([Z, R], 1), np.concatenate([KZ, on_sets(times(R))], 1)
    return Ritz(values[:, -1], close, (basis @ turns[:, :, -kept:]).swapaxes(1, 2).astype(Z.dtype) @ Z)


def _ritz_values(Z: NDArray[Any], KZ: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return Ritz values "g p" of a matrix on the span of each set's vectors "g p r", an orthonormal basis of each span, and the
    eigenvectors in it."""
    rounding = 1e-12 if Z.dtype == np.float64 else 1e-6
    squares, turns = np.linalg.eigh((Z @ Z.swapaxes(1, 2)).astype(float))
    independent = squares > rounding * squares[:, -1:]
    basis = turns * (independent / np.sqrt(np.where(independent, squares, 1.0)))[:, None]
    M = basis.swapaxes(1, 2) @ (Z @ KZ.swapaxes(1, 2)).astype(float) @ basis
    values, vectors = np.linalg.eigh((M + M.swapaxes(1, 2)) / 2)
    return values, basis, vectors


def _close(values: NDArray[Any], residuals: NDArray[Any], tolerance: float, each: float) -> bool:
    """Whether the largest eigenvalues "g p" are accurate enough."""
    tops, gaps = values[:, -1], values[:, -1] - values[:, -2] if values.shape[1] > 1 else np.zeros_like(residuals)
    errors = np.where(gaps > residuals, residuals ** 2 / np.maximum(gaps, 1e-300), residuals)
    apart = each * np.abs(tops - tops.mean()).max()
    return bool((errors <= max(apart, tolerance * np.abs(tops).max())).all())


# ------------------------------------------------------------------------------------------------ random rotations


def haar(n: int, draw: np.random.Generator) -> NDArray[np.float64]:
    """Draw a uniformly random orthogonal matrix: the Q of a Gaussian matrix, with signs from R's diagonal."""
    Q, R = np.linalg.qr(draw.standard_normal((n, n)))
    return np.asarray(Q * np.sign(np.diag(R)))


# ---------------------------------------------------------------------------------------------------------- similarity
# Similarity of two sets of features: the centred kernel alignment of their linear kernels by the debiased estimator, for all rows
# and with each group of rows left out.
#
# HSIC is estimated without bias by the inner product of Gram matrices without their diagonals, centred accordingly [Song et al.
# 2012, Eq. 5]. This is still an inner product, so the cosine is at most 1, and no shift of the features changes it. With fewer
# rows
# than features the Gram matrices are formed, otherwise products of features: |X^T Y|^2 = sum_ij K_ij L_ij.

@dataclass(frozen=True, eq=False)
class Rows:
    """Features of some rows, and the group of each row."""

    X: Float[Tensor, "n d"]
    group: Int[Tensor, " n"]
    groups: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "X", self.X - self.X.mean(0))  # changes only rounding errors

    @cached_property
    def member(self) -> Float[Tensor, "n groups"]:
        """One-hot group of each row."""
        return torch.nn.functional.one_hot(self.group, self.groups).to(self.X.device, torch.float64)

    @cached_property
    def wide(self) -> bool:
        """Whether Gram matrices need fewer multiplications per alignment than products of features."""
        n, d = self.X.shape
        return 2 * n <= 3 * d

    @cached_property
    def squares(self) -> Float[Tensor, " n"]:
        """Squared norm of each row."""
        return self.X.double().square().sum(1)

    @cached_property
    def gram(self) -> Float[Tensor, "n n"]:
        """Gram matrix of the rows with a zero diagonal."""
        return (self.X @ self.X.T).double().fill_diagonal_(0)

    @cached_property
    def sums(self) -> Float[Tensor, "n groups"]:
        """Sum over j of a group, j != i, of K_ij."""
        if self.wide:
            return self.gram @ self.member
        X = self.X.double()
        return X @ (X.T @ self.member) - self.squares[:, None] * self.member

    def products(self, other: Rows) -> Float[Tensor, " left"]:
        """Sum over i != j of K_ij L_ij: for all rows, then without each group."""
        if self.wide:
            table = self.member.T @ (self.gram * other.gram) @ self.member
            whole = table.sum()
            return torch.cat([whole[None], whole - table.sum(0) - table.sum(1) + table.diagonal()])
        parts = [(self.X[self.group == g].T @ other.X[self.group == g]).double() for g in range(self.groups)]
        total = torch.stack(parts).sum(0)
        diagonal = self.member.T @ (self.squares * other.squares)
        entries = [total.square().sum(), *((total - part).square().sum() for part in parts)]
        return torch.stack(entries) - torch.cat([diagonal.sum()[None], diagonal.sum() - diagonal])

    def hsic(self, other: Rows) -> Float[Tensor, " left"]:
        """Debiased estimate of HSIC, up to the factor 1/(n (n - 3)): for all rows, then without each group."""
        keep = torch.cat([torch.ones_like(self.member[:, :1]), 1 - self.member], 1)
        nothing = torch.zeros_like(self.sums[:, :1])
        k, l = (keep * (r.sums.sum(1, keepdim=True) - torch.cat([nothing, r.sums], 1)) for r in (self, other))  # noqa: E741
        n = keep.sum(0)
        return self.products(other) + k.sum(0) * l.sum(0) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k * l).sum(0)


def debiased_cka(a: Rows, b: Rows, own: Float[Tensor, " left"] | None = None) -> list[float]:
    """CKA of two sets of features of the same rows: for all rows, then without each group. NaN if features are constant.
    ``own``: b.hsic(b), if already computed.  [Kornblith et al. 2019]"""
    if a.wide != b.wide:
        raise ValueError(f"features of {a.X.shape[1]} and {b.X.shape[1]} numbers would be compared in two different ways; give "
                         f"both the same width")
    size = a.hsic(a) * (b.hsic(b) if own is None else own)
    scale = (a.squares.sum() * b.squares.sum()).item() ** 2
    return [v / math.sqrt(s) if s > 1e-24 * scale else math.nan for v, s in zip(a.hsic(b).tolist(), size.tolist(), strict=True)]


# ------------------------------------------------------------------------------------------------------------- spectra
# Statistics of any kernel matrix: alignment with labels, CKA, stable rank, power laws, specialisation.

BLOCKS = 10  # blocks of ranks for errors of exponents


def _square(K: Tensor, name: str = "K") -> Tensor:
    """Return a square matrix; otherwise raise an error."""
    if K.dim() != 2 or K.shape[0] != K.shape[1] or K.shape[0] == 0:
        raise SelectionError(f"{name} has shape {tuple(K.shape)}; give a square kernel matrix [n, n].")
    return K


def alignment(K: ArrayLike, y: ArrayLike) -> float:
    """Return A(K, y) = y^T K y / (|K|_F |y|^2), uncentred; for y [n,k] the mean over its non-zero columns.
    [rapid, Sec. 2]"""
    K = _square(to_tensor(K, "K"))
    y = to_tensor(y, "y").to(K.device)
    y = y[:, None] if y.dim() == 1 else y
    if y.dim() != 2 or y.shape[0] != K.shape[0]:
        raise SelectionError(f"y has shape {tuple(y.shape)} for a kernel of {K.shape[0]} examples; give [n] or [n, k].")
    energy = (y * y).sum(0)
    A = (y * (K @ y)).sum(0) / (K.norm() * energy)
    return A[energy > 0].mean().item()  # NaN if all columns are zero


def centre(K: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Centred kernel C K C, C = I - 11^T/n."""
    rows = K.mean(0, keepdim=True)
    centred = K - rows
    centred -= K.mean(1, keepdim=True) - rows.mean()
    return centred


def cka(K: ArrayLike, L: ArrayLike, debiased: bool = False) -> float:
    """Centred kernel alignment <CKC, CLC> / (|CKC| |CLC|). For few examples it is far from 0 even for unrelated kernels.
    ``debiased`` estimates each inner product without bias, from symmetric kernels, and is then about 0 (also below). NaN if a
    kernel is constant.
    [Kornblith et al. 2019; Song et al. 2012]"""
    A, B = centre(_square(to_tensor(K, "K"))), centre(_square(to_tensor(L, "L"), "L"))
    if A.shape != B.shape:
        raise SelectionError(f"kernels of {len(A)} and {len(B)} examples cannot be compared.")
    B = B.to(A.device)
    if not debiased:
        return ((A * B).sum() / (A.norm() * B.norm())).item()
    if len(A) < likeness.FEWEST:
        raise SelectionError(f"kernels of {len(A)} examples are too few for the debiased alignment, which needs "
                             f"{likeness.FEWEST}.")
    a, b = (X.diagonal().cpu().numpy()[None] for X in (A, B))
    both, own_a, own_b = (np.array([(X * Y).sum().item()]) for X, Y in ((A, B), (A, A), (B, B)))
    return float(likeness.cka(both[None], own_a, own_b, a, b, debiased=True)[0, 0])


def stable_rank(K: ArrayLike) -> float:
    """Return R(K) = |K|_F^2 / |K|_2^2 = sum lambda^2 / lambda_1^2, for the kernel as given.  [signal, Sec. 4]"""
    K = _square(to_tensor(K, "K"))
    symmetric = (K - K.T).norm() <= 1e-12 * K.norm()
    top = torch.linalg.eigvalsh(K).abs().max().item() if symmetric else torch.linalg.matrix_norm(K, 2).item()
    return ((K / top).norm() ** 2).item() if top else float("nan")


@dataclass(frozen=True)
class ExponentInterval:
    """An exponent with its 95 % interval."""

    exponent: float
    low: float
    high: float


def power_law(values: ArrayLike, first: int = 5, last: int | None = None) -> float:
    """Fit the exponent b of values_k ~ k^-b: minus the log-log slope over ranks first..last (1-based; default 0.6 of all).
    [rapid, Sec. 12]"""
    return power_law_interval(values, first, last).exponent


def power_law_interval(values: ArrayLike, first: int = 5, last: int | None = None) -> ExponentInterval:
    """Fit ``power_law`` with its 95 % interval; values [c, ranks] are c spectra, and the exponent is the mean over them.

    Neighbours in a spectrum are correlated, so the error is a jackknife over BLOCKS blocks of neighbouring values: it measures
    how much the slope depends on a part of the spectrum. With fewer values each one is a block; fewer than three have no interval
    (NaN)."""
    from scipy.special import stdtrit
    v = to_tensor(values, "values")
    v = (v if v.dim() == 2 else v.flatten()[None]).sort(dim=1, descending=True).values
    last = int(0.6 * v.shape[1]) if last is None else last
    v = v[:, max(first, 1) - 1:last]
    k = torch.arange(first, first + v.shape[1], dtype=v.dtype, device=v.device)
    keep = v > 0
    fewest = int(keep.sum(1).min()) if len(v) else 0
    if first < 1 or fewest < 2:
        raise SelectionError(f"a power law needs two positive values among ranks {first} to {last}; {fewest} found.")
    x, y = k.clamp(min=1).log().expand_as(v), torch.where(keep, v, 1.0).log()
    used = keep.any(0)
    number = (used.cumsum(0) - 1) * BLOCKS // used.sum()
    blocks = number[used].unique().tolist()
    slopes = torch.stack([_slopes(x, y, keep & (number != block)) for block in (-1, *blocks)]).mean(1)
    whole, without, g = -slopes[0].item(), -slopes[1:], len(blocks)
    half = ((g - 1) / g * (without - without.mean()).square().sum()).sqrt().item() * float(stdtrit(g - 1, 0.975))  # 95 %
    return ExponentInterval(whole, whole - half, whole + half)


def _slopes(x: Float[Tensor, "c r"], y: Float[Tensor, "c r"], keep: Bool[Tensor, "c r"]) -> Float[Tensor, " c"]:
    """Least-squares slopes over the selected ranks; NaN if fewer than two are left."""
    few = keep.sum(1, keepdim=True)
    x = (x - (x * keep).sum(1, keepdim=True) / few) * keep
    return torch.where(few[:, 0] < 2, float("nan"), (x * y).sum(1) / (x * x).sum(1))


def specialisation(K_diagonal: ArrayLike, Y: ArrayLike) -> Array:
    """Return KSM[c, c'] = A(K^cc, y^c') / mean over c'' of A(K^c''c'', y^c'): rows are kernels [k,n,n], columns labels [n,k].
    Each column has mean 1.  [rapid, Sec. 15]"""
    K = to_tensor(K_diagonal, "K_diagonal")
    y = to_tensor(Y, "Y").to(K.device)
    if K.dim() != 3 or y.dim() != 2 or K.shape[1] != K.shape[2] or y.shape != K.shape[1::-1]:
        raise SelectionError(f"kernels {tuple(K.shape)} and labels {tuple(y.shape)}: give [k, n, n] and [n, k], "
                             f"with a kernel and a column of labels for each output.")
    A = torch.einsum("na,cnm,ma->ca", y, K, y) / (K.flatten(1).norm(dim=1)[:, None] * (y * y).sum(0))
    return like(A / A.mean(0), K_diagonal, Y)


def quotient(a: Any, b: Any) -> Any:
    """Divide numbers or arrays, with NaN (no error, infinity or 0) for 0/0 and where b is 0 or infinite."""
    if not isinstance(b, np.ndarray):
        return a / b if b and math.isfinite(b) else math.nan
    defined = (b != 0) & np.isfinite(b)
    return np.where(defined, a / np.where(defined, b, 1.0), np.nan)
