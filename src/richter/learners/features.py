"""Feature matrices of fitted kernel machines in closed form: for f(x) = sum_j A_j k(x, x_j), without any array of size (n, c, d).

    AGOP = 1/n sum_i sum_c grad f_c(x_i) grad f_c(x_i)^T          FACT = sum_i sum_c A_ic grad f_c(x_i) x_i^T

They belong to a function of its inputs with known coefficients A. For a layer of a network, the statistics and measures of the
same names in ``richter.instrument`` and ``richter.measures`` use captured inputs and gradients.

FACT is -1/(n lambda) sum_i grad l_i x_i^T at the solution of kernel ridge (or logistic) regression, where the residual is
ridge A; it equals the metric M at a fixed point.  [fact, Sec. 1; theory/FACT: both families of kernels]

With grad_x k(x_i, x_j) = a_ij x_j + b_ij x_i, P = b A and weights w of the examples,

    sum_i w_i sum_c grad f_c grad f_c^T = X^T [ (A A^T) o (a^T w a) + S + S^T + diag(w |P|^2) ] X,   S_ji = a_ij w_i A_j . P_i

which takes n^3 + n^2 (c + d) operations and n^2 numbers. The gradients themselves, row by row, take n^2 c d operations. The
cheaper way is used, provided that the kernel has slopes a and b, that memory suffices, and that no two inputs nearly coincide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import SelectionError, parse_bytes
from richter.core.arrays import Array, ArrayLike, like, to_tensor
from richter.learners.kernel import Geometry, Kernel, along_x
from richter.learners.metric import between, checked_metric, left, power, root, stretch

Features = Literal["agop", "agop_centred", "fact", "fact_geometric"]
FEATURES: tuple[Features, ...] = ("agop", "agop_centred", "fact", "fact_geometric")
Pairs = Callable[[slice], Geometry]  # maps a slice of rows to their geometry with all rows


def agop(kernel: Kernel, x: ArrayLike, coefficients: ArrayLike, metric: ArrayLike = None, *, weights: ArrayLike = None,
         centred: bool = False, memory: str | float = "1GiB") -> Array:
    """Average gradient outer product [d, d] of the kernel machine f(x) = sum_j A_j k_M(x, x_j), over its own points x [n, d] with
    coefficients A [n, c] (or [n]). ``weights`` [n]: weights of the points. ``centred``: subtract the mean gradient of each output
    first.

    >>> agop(Laplace(3.0), X, A, metric=M)
    Gradients are with respect to the machine's inputs. For a layer of a network, the measure ``nfc`` uses the AGOP with respect
    to the layer's inputs, W^T K W: ``richter.measure(model, probe, ["nfc"])``.
    """
    X, A, R = _inputs(x, coefficients, metric)
    w = torch.ones(len(X), dtype=X.dtype, device=X.device) if weights is None else to_tensor(weights, "weights").to(X)
    if w.shape != (len(X),) or (w < 0).any() or not w.any():
        raise SelectionError(f"weights of shape {tuple(w.shape)}: one number of at least 0 for each of {len(X)} rows is needed, "
                             f"and not only zeros.")
    u = stretch(X, R)
    G = gradient_outer(kernel, u, A, w, geometry_of(kernel, u), centred=centred, memory=parse_bytes(memory))
    return like(between(G, R), x)


def fact(kernel: Kernel, x: ArrayLike, coefficients: ArrayLike, metric: ArrayLike = None, *,
         memory: str | float = "1GiB") -> Array:
    """FACT matrix [d, d] of the kernel machine f(x) = sum_j A_j k_M(x, x_j) with points x [n, d] and coefficients A [n, c] (or
    [n]). It equals the metric M at a fixed point. Elsewhere it is neither symmetric nor positive; FACT M is symmetric for every
    kernel with
    slopes.

    >>> fact(Laplace(3.0), X, A, metric=M)
    The coefficients of a fit are its residuals over the ridge, so neither labels nor ridge are needed. The measure ``fact`` is
    the correlation of W^T W with the FACT matrix of a network's layer, from the gradient of its loss:
    ``richter.measure(model, probe, ["fact"])``.
    """
    X, A, R = _inputs(x, coefficients, metric)
    u = stretch(X, R)
    return like(left(R, residual_outer(kernel, u, X, A, geometry_of(kernel, u), parse_bytes(memory))), x)


def geometry_of(kernel: Kernel, u: Float[Tensor, "n d"]) -> Pairs:
    """Function from rows to the kernel's geometry between them and all points."""
    return lambda rows: kernel.geometry(u[rows], u)


def _inputs(x: ArrayLike, coefficients: ArrayLike, metric: ArrayLike) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs, coefficients and the root of the metric as tensors, checked."""
    X, A = to_tensor(x, "x"), to_tensor(coefficients, "coefficients")
    A = A[:, None] if A.dim() == 1 else A
    if X.dim() != 2 or A.dim() != 2 or len(A) != len(X):
        raise SelectionError(f"x has shape {tuple(X.shape)} and coefficients {tuple(A.shape)}; [n, d] and [n, c] are needed.")
    return X, A.to(X.device), None if metric is None else root(checked_metric(metric, X))


def _slices(n: int, per_row: float, memory: int, pairs: int = 2 ** 19) -> Iterator[slice]:
    """Yield slices of rows that fit into the memory, with at most ``pairs`` pairs so that they stay in the processor's cache."""
    step = max(1, min(n, int(memory / (8 * max(per_row, 1))), max(64, pairs // n)))
    return (slice(i, min(i + step, n)) for i in range(0, n, step))


def gradient_outer(kernel: Kernel, u: Float[Tensor, "n d"], A: Float[Tensor, "n c"], w: Float[Tensor, " n"], pairs: Pairs, *,
                   centred: bool = False, diagonal: bool = False, memory: int = 2 ** 30) -> Tensor:
    """AGOP in the coordinates u that the kernel sees, with weights w; ``diagonal``: only its diagonal."""
    (n, d), c = u.shape, A.shape[1]
    cheaper, fits = n < c * d, 2 * u.element_size() * n * n <= memory
    if kernel.sloped and cheaper and fits and not _kinked(kernel, u, pairs, memory):
        G = _by_pairs(kernel, u, A, w, pairs, centred, memory)
        G = G.diagonal() if diagonal else G
    else:
        G = _by_rows(kernel, u, A, w, pairs, centred, diagonal, memory)
    return G / w.sum()


def _kinked(kernel: Kernel, u: Tensor, pairs: Pairs, memory: int) -> bool:
    """Whether two inputs are so close to a kink that squares of slopes lose too much precision in cancellation."""
    limit = (torch.finfo(u.dtype).eps / (1e-9 if u.dtype == torch.float64 else 1e-4)) ** 0.5
    return any(kernel.nearest(pairs(rows)) < limit for rows in _slices(len(u), 4 * len(u), memory // 8, len(u) ** 2))


def _by_rows(kernel: Kernel, u: Tensor, A: Tensor, w: Tensor, pairs: Pairs, centred: bool, diagonal: bool, memory: int) -> Tensor:
    """Compute sum_i w_i sum_c grad f_c grad f_c^T from the gradients themselves."""
    (n, d), c = u.shape, A.shape[1]
    total, mean = u.new_zeros(d) if diagonal else u.new_zeros(d, d), u.new_zeros(c, d)
    outputs = max(1, int(memory / (32 * n * d)))  # number of outputs at a time
    for rows in _slices(n, 4 * n + 3 * min(c, outputs) * d, memory // 2):
        g, root_w = pairs(rows), w[rows].sqrt()[:, None, None]
        for k in range(0, c, outputs):
            J = kernel.pull(u[rows], u, g, A[:, k:k + outputs]) * root_w  # "rows outputs d"
            if centred:
                mean[k:k + outputs] += (root_w * J).sum(0)
            J = J.flatten(0, 1)
            total += J.square().sum(0) if diagonal else J.T @ J
    if centred:
        total -= (mean.square().sum(0) if diagonal else mean.T @ mean) / w.sum()
    return total


def _by_pairs(kernel: Kernel, u: Tensor, A: Tensor, w: Tensor, pairs: Pairs, centred: bool, memory: int) -> Tensor:
    """Compute sum_i w_i sum_c grad f_c grad f_c^T from the slopes of pairs, by the formula at the top of this file."""
    (n, d), c = u.shape, A.shape[1]
    squares, cross = u.new_zeros(n, n), u.new_zeros(d, d)  # a^T w a, accumulated from its diagonal up
    share, mine = u.new_zeros(n), u.new_zeros(d, d)  # sum_i w_i a_ij; the term with P alone
    mean = u.new_zeros(c, d)
    for rows in _slices(n, 6 * n + 2 * c, memory // 8, n * n):
        a, b = kernel.slopes(pairs(rows), d)
        wa = w[rows, None] * a
        for k in range(0, n, step := -(-n // 4)):
            squares[:k + step, k:k + step].addmm_(a[:, :k + step].T, wa[:, k:k + step])
        share += wa.sum(0)
        if isinstance(b, Tensor) or b:
            P = along_x(a, b, A)
            mean += (w[rows, None] * P).T @ u[rows]
            cross += (u.T @ (A @ P.T).mul_(wa.T)) @ u[rows]
            mine += u[rows].T @ ((w[rows] * P.square().sum(1))[:, None] * u[rows])
    squares.mul_(A @ A.T)
    squares.diagonal().mul_(0.5)
    cross += u.T @ (squares.triu_() @ u)
    G = cross + cross.T + mine
    if centred:
        mean += (A * share[:, None]).T @ u
        G -= mean.T @ mean / w.sum()
    return G


def residual_outer(kernel: Kernel, u: Float[Tensor, "n d"], x: Float[Tensor, "n e"], A: Float[Tensor, "n c"], pairs: Pairs,
                   memory: int = 2 ** 30) -> Float[Tensor, "d e"]:
    """Return sum_i sum_c A_ic grad f_c(u_i) x_i^T, which is FACT with its left side in the coordinates that the kernel sees."""
    F = u.new_zeros(u.shape[1], x.shape[1])
    for rows in _slices(len(u), 6 * len(u), memory):
        if A.shape[1] == 1:
            J = kernel.pull(u[rows], u, pairs(rows), A)[:, 0] * A[rows]
        else:
            J = kernel.pull_weighted(u[rows], u, pairs(rows), A[rows], A)
        F += J.T @ x[rows]
    return F


def next_metric(features: Features, kernel: Kernel, u: Float[Tensor, "n d"], x: Float[Tensor, "n d"], R: Tensor | None,
                A: Float[Tensor, "n c"], w: Float[Tensor, " n"], pairs: Pairs, *, exponent: float = 1.0, diagonal: bool = False,
                memory: int = 2 ** 30) -> Tensor:
    """Return the next metric after this fit, [d, d] or its diagonal [d], not normalised. ``u`` are the inputs ``x`` times R.

    agop: AGOP^s. fact: (F F^T)^(1/2). fact_geometric: (F M^2 F^T)^(1/4), from the left singular vectors of F M."""
    if features in ("agop", "agop_centred"):
        full = R is not None and R.dim() == 2
        G = gradient_outer(kernel, u, A, w, pairs, centred=features == "agop_centred", diagonal=diagonal and not full,
                           memory=memory)
        M = between(G, R)
        if diagonal:
            return (M.diagonal() if M.dim() == 2 else M) ** exponent
        return M if exponent == 1 else power(M, exponent)
    if features == "fact":
        F = left(R, residual_outer(kernel, u, x, A, pairs, memory))
        if diagonal:
            return F.diagonal().abs() ** exponent
        U, s, _ = torch.linalg.svd(F)
        return (U * s ** exponent) @ U.T
    F = between(residual_outer(kernel, u, u, A, pairs, memory), R)  # F M
    if diagonal:
        return F.diagonal().abs().sqrt() ** exponent
    U, s, _ = torch.linalg.svd(F)
    return (U * s ** (exponent / 2)) @ U.T
