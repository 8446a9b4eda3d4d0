"""Kernel ridge regression: min_f sum_i w_i |y_i - f(x_i)|^2 + ridge |f|^2, f = sum_j A_j k(., x_j) + b.

Dense: one Cholesky factor of H = K + ridge / w. The leave-one-out prediction for a point (without all its copies) is exact and
almost free. With Q = H^-1 - u u^T / (1^T u), u = H^-1 1 (Q = H^-1 without b),

    f^-(x_i) = y_i - A_i / Q_ii

It needs only diagonal entries of H^-1, and those of the last m points come from the last m x m block of the factor alone.
If memory is too small: conjugate gradients, preconditioned by a Nystrom approximation, on blocks of K in float32.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import MemoryBudgetError, RichterError, show_bytes
from richter.core.values import progress
from richter.learners.kernel import Kernel
from richter.learners.problem import FitProblem


class SingularKernelError(RichterError, ArithmeticError, ValueError):
    """The kernel matrix cannot be inverted to working precision."""


@dataclass(frozen=True)
class Solution:
    """The function f(x) = sum_j A_j k(x, x_j) + b."""

    A: Float[Tensor, "n c"]
    b: Float[Tensor, " c"]
    left_out: Tensor | None = None  # "rows c": leave-one-out predictions of rows
    judged: Tensor | None = None  # indices of these rows


def solve(K: Float[Tensor, "n n"], data: FitProblem, ridge: float, *, intercept: bool, judged: int = 0,
          final: bool = False) -> Solution:
    """Solve by Cholesky, with leave-one-out predictions for rows of the last ``judged`` points. K is overwritten. ``final`` is
    ignored here; approximate solvers use it."""
    n = len(K)
    K.diagonal().add_(ridge / data.w)
    L, info = torch.linalg.cholesky_ex(K)
    # rounding error of a pivot; the sign of a smaller one is arbitrary
    rounding = 10 * n * torch.finfo(K.dtype).eps * K.diagonal().max()
    if info.item() or L.diagonal().min().square() <= rounding:
        raise SingularKernelError(
            f"the kernel matrix of {n} distinct rows is singular to working precision with ridge={ridge:g}: more than one "
            f"function fits the data equally well, and rounding would choose. Give a larger ridge (e.g. "
            f"{max(1e-8 * K.diagonal().mean().item(), 10 * ridge):.1g}), or ridge=None to have one chosen.")
    y = torch.cat([data.y, torch.ones_like(data.y[:, :1])], 1) if intercept else data.y
    A, b = torch.cholesky_solve(y, L), data.y.new_zeros(data.y.shape[1])
    if intercept:
        A, u = A[:, :-1], A[:, -1]
        b = A.sum(0) / u.sum()
        A = A - u[:, None] * b
    if not judged:
        return Solution(A, b)
    tail = slice(n - judged, n)
    Q = torch.cholesky_inverse(L[tail, tail].contiguous()).diagonal()
    if intercept:
        Q = Q - u[tail].square() / u.sum()
    rows = (data.point >= n - judged).nonzero()[:, 0]
    point = data.point[rows]
    return Solution(A, b, data.y[point] - A[point] / Q[point - (n - judged), None], rows)


class KernelBlocks:
    """K + ridge / w as an operator: row blocks of the lower triangle. ``memory`` decides how many are stored (in the precision of
    u); the others are recomputed for each product. Sums over blocks are in float64."""

    def __init__(self, kernel: Kernel, u: Float[Tensor, "n d"], shift: Float[Tensor, " n"], memory: int) -> None:
        self.kernel, self.u, self.shift, self.n = kernel, u, shift, len(u)
        working = 6 * u.element_size() * self.n  # bytes per row while a block is computed
        self.step = max(1, min(self.n, memory // 4 // working, max(64, 2 ** 20 // self.n)))
        starts = range(0, self.n, self.step)
        sizes = [len(range(*self._rows(i).indices(self.n))) * self._rows(i).stop for i in starts]
        room = (memory - self.step * working) // u.element_size()
        ends = list(itertools.accumulate(sizes))
        count = bisect.bisect_right(ends, room)
        # a single array, because thousands of arrays would fragment the memory
        store = u.new_empty(ends[count - 1] if count else 0)
        self.kept: dict[int, Tensor] = {}
        for i, size, end in zip(starts, sizes[:count], ends, strict=False):
            self.kept[i] = store[end - size:end].view(-1, self._rows(i).stop).copy_(self._block(i))

    def _rows(self, i: int) -> slice:
        """Rows of the block that starts at i."""
        return slice(i, min(i + self.step, self.n))

    def _block(self, i: int) -> Tensor:
        """Kernel of these rows with all rows up to their end."""
        rows = self._rows(i)
        return self.kernel.values(self.kernel.geometry(self.u[rows], self.u[:rows.stop]))

    def __matmul__(self, v: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        # "c n" layout takes a fifth of the time
        small, out = v.T.contiguous().to(self.u.dtype), (self.shift[:, None] * v).T.contiguous()
        for i in range(0, self.n, self.step):
            K = self.kept[i] if i in self.kept else self._block(i)
            last = i + len(K)
            out[:, i:last] += (K @ small[:, :last].T).T
            if i:
                out[:, :i] += small[:, i:last] @ K[:, :i]
        return out.T


def nystrom(kernel: Kernel, u: Float[Tensor, "n d"], shift: Float[Tensor, " n"], rank: int) -> Callable[[Tensor], Tensor]:
    """Make v -> (C C^T + shift)^-1 v, where C C^T is the Nystrom approximation of K from the first ``rank`` points, a random
    sample because points are in random order."""
    s, exact = u[:rank], u[:rank].double()
    K = kernel.values(kernel.geometry(exact, exact))
    K.diagonal().add_(1e-6 * K.diagonal().mean())
    L = torch.linalg.cholesky(K)
    C = u.new_empty(len(u), rank)
    inner = torch.eye(rank, dtype=torch.float64, device=u.device)
    for i in range(0, len(u), step := min(rank, 512)):
        K = kernel.values(kernel.geometry(u[i:i + step], s))
        C[i:i + step] = torch.linalg.solve_triangular(L, K.double().T, upper=False).T
        part = C[i:i + step].double()  # exactly as stored; with another rounding the inverse below would not be positive
        inner.addmm_(part.T / shift[i:i + step], part)
    factor = torch.linalg.cholesky(inner)

    def apply(v: Tensor) -> Tensor:
        scaled = v / shift[:, None]
        t = inner.new_zeros(rank, v.shape[1])
        for part, rows in zip(C.split(step), scaled.split(step), strict=True):
            t += part.double().T @ rows  # in float64, because all but a millionth cancels where K is large
        t = torch.cholesky_solve(t, factor)
        return scaled - torch.cat([part.double() @ t for part in C.split(step)]) / shift[:, None]

    return apply


def solve_blocks(kernel: Kernel, data: FitProblem, u: Float[Tensor, "n d"], ridge: float, *, intercept: bool, memory: int,
                 tolerance: float = 1e-4, most: int = 500) -> Solution:
    """Solve by conjugate gradients, for all outputs (and the ones of the intercept) at once."""
    if ridge <= 0:
        raise SingularKernelError(f"ridge={ridge:g}: {len(data)} distinct rows do not fit memory={show_bytes(memory)} as a dense "
                                  f"system, and the iterative one needs a positive ridge.")
    shift = ridge / data.w
    y = (torch.cat([data.y, torch.ones_like(data.y[:, :1])], 1) if intercept else data.y).double()
    n, c = y.shape
    size = u.element_size()
    rank = min(n, 2000, max(16, min(memory // (24 * size * n), int((memory / 512) ** 0.5))))
    others = 80 * n * c + 40 * u.numel() + size * n * rank + 64 * rank * rank  # vectors, copies of inputs, and the preconditioner
    if others + 8 * size * n > memory:
        raise MemoryBudgetError(f"memory={show_bytes(memory)} cannot hold one row of the kernel of {n} points and what solves a "
                                f"system with {c} outputs. The smallest that works is {show_bytes(others + 8 * size * n)}.")
    H, P = KernelBlocks(kernel, u, shift, memory - others), nystrom(kernel, u, shift, rank)
    v, residual, steps = conjugate_gradients(H, P, y, tolerance, most)
    if not residual <= 10 * tolerance:
        raise SingularKernelError(f"conjugate gradients left a residual of {residual:.1e} of the targets after {steps} steps, "
                                  f"with ridge={ridge:g} on {n} points. A larger ridge, or more memory=, makes the system "
                                  f"easier.")
    if not intercept:
        return Solution(v, y.new_zeros(c))
    A, one = v[:, :-1], v[:, -1]
    b = A.sum(0) / one.sum()
    return Solution(A - one[:, None] * b, b)


def conjugate_gradients(H: KernelBlocks, P: Callable[[Tensor], Tensor], y: Float[Tensor, "n c"], tolerance: float,
                        most: int) -> tuple[Float[Tensor, "n c"], float, int]:
    """Return H^-1 y with the preconditioner P in at most ``most`` steps, the largest remaining residual relative to y, and the
    number of steps."""
    v, r = torch.zeros_like(y), y.clone()
    z = P(r)
    p, rz, first = z, (r * z).sum(0), r.norm(dim=0)
    residual, steps = 1.0, 0
    with progress(total=most, title=f"kernel system of {len(y)} points") as bar:
        for _ in range(most):
            Hp = H @ p
            curvature = (p * Hp).sum(0)
            if not (curvature >= 0).all():  # rounding errors, where K is large compared with the ridge; or NaN
                break
            alpha = rz / curvature.clamp(min=1e-300)
            v += alpha * p
            r -= alpha * Hp
            residual, steps = (r.norm(dim=0) / first.clamp(min=1e-300)).max().item(), steps + 1
            bar.set_postfix_str(f"residual {residual:.1e}")
            bar.update()
            if residual <= tolerance:
                break
            z = P(r)
            rz, old = (r * z).sum(0), rz
            p = z + rz / old.clamp(min=1e-300) * p
    return v, residual, steps
