"""How a layer's tangent kernel stands to the labels.  [rapid, Sec. 2; signal, Sec. 1 and 4]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Interval, Ref
from richter.kernels.spectra import anywhere, centre, top_eigenpair, top_eigenvalue
from richter.measures import Measure, quotient
from richter.statistics import LABELS, TANGENT_KERNEL, Derived


@dataclass(frozen=True)
class Labels:
    """Targets "n v" beside a kernel's rows (NaN when the probe has none); ``keep`` is False where a row belongs to no real
    output (padding)."""

    Y: Float[Tensor, "n v"]
    keep: Tensor | None = None


@dataclass(frozen=True)
class SameOutput:
    """What is to be known of the kernels of each output c with itself and of its labels."""

    quadratic: Float[Tensor, " v"]  # y_c^T K^cc y_c
    norm: Float[Tensor, " v"]  # |K^cc|_F
    energy: Float[Tensor, " v"]  # |y_c|^2


def same_output(K: Float[Tensor, "n v n v"], labels: Labels) -> SameOutput:
    return of_diagonal(K.diagonal(dim1=1, dim2=3).permute(2, 0, 1), labels.Y)


def same_output_leaving(K: Float[Tensor, "n v n v"], labels: Labels, groups: int) -> list[SameOutput]:
    return of_diagonal_leaving(K.diagonal(dim1=1, dim2=3).permute(2, 0, 1), labels.Y, groups)


def of_diagonal(K: Float[Tensor, "v n n"], Y: Float[Tensor, "n v"]) -> SameOutput:
    return _assembled([(y @ Kc @ y, Kc.norm(), y @ y) for Kc, y in zip(K, Y.T, strict=True)])


def of_diagonal_leaving(K: Float[Tensor, "v n n"], Y: Float[Tensor, "n v"], groups: int) -> list[SameOutput]:
    """The same with each group of examples left out, from sums over blocks: no submatrix is copied."""
    inside = torch.nn.functional.one_hot(torch.arange(len(Y)) % groups, groups).to(Y)  # row, group
    left: list[list[tuple[Tensor, ...]]] = [[] for _ in range(groups)]
    for Kc, y in zip(K, Y.T, strict=True):
        mine = inside * y[:, None]
        squares, quadratics, energy = inside.T @ (Kc * Kc) @ inside, mine.T @ Kc @ mine, (mine * mine).sum(0)
        for g in range(groups):
            others = torch.arange(groups, device=Y.device) != g
            left[g].append((quadratics[others][:, others].sum(), squares[others][:, others].sum().clamp(min=0).sqrt(),
                            energy[others].sum()))
    return [_assembled(values) for values in left]


def _assembled(values: Sequence[tuple[Tensor, ...]]) -> SameOutput:
    return SameOutput(*(torch.stack(column) for column in zip(*values, strict=True)))


def tangent_alignment(c: SameOutput) -> float:
    """Mean over outputs c of y_c^T K^cc y_c / (|K^cc|_F |y_c|^2), uncentred, over outputs whose labels are not all 0.
    [rapid, Sec. 2]"""
    A = c.quadratic / (c.norm * c.energy)
    return A[(c.energy > 0) & (c.norm > 0)].mean().item()


@dataclass(frozen=True)
class CentredKernel:
    """What one global centring C = I - 11^T/(n k) leaves to be known of a kernel and its labels."""

    quadratic: float  # y~^T K y~
    norm: float  # |C K C|_F
    top: float  # largest eigenvalue of C K C
    energy: float  # |y~|^2


def flat(K: Float[Tensor, "n v n v"], labels: Labels) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel as a matrix, the labels as a vector, and the example each row belongs to; without padding. Outputs come
    first, as kernels lie in memory."""
    n, v = K.shape[:2]
    K, y = K.permute(1, 0, 3, 2).reshape(n * v, n * v), labels.Y.T.reshape(-1)
    example = torch.arange(n, device=K.device).repeat(v)
    if labels.keep is None:
        return K, y, example
    keep = labels.keep.T.reshape(-1)
    return K[keep][:, keep], y[keep], example[keep]


def centred_kernel(K: Float[Tensor, "n v n v"], labels: Labels) -> CentredKernel:
    K, y, _ = flat(K, labels)
    Kc, y = centre(K), y - y.mean()
    if Kc.norm() <= 1e-13 * K.norm():  # a constant kernel: what is left is rounding
        return CentredKernel(0.0, 0.0, 0.0, (y @ y).item())
    return CentredKernel((y @ Kc @ y).item(), Kc.norm().item(), top_eigenvalue(Kc), (y @ y).item())


def centred_kernel_leaving(K: Float[Tensor, "n v n v"], labels: Labels, groups: int) -> list[CentredKernel]:
    """The same with each group of examples left out, from sums over blocks of the whole kernel: no submatrix is copied.
    The eigenvalue is followed from the whole kernel's, to a residual of 1e-4 (an error of about its square): these values
    only make error bars."""
    K, y, example = flat(K, labels)
    inside = torch.nn.functional.one_hot(example % groups, groups).to(K)  # row, group
    squares = inside.T @ (K * K) @ inside
    ones, times_y = K @ inside, K @ (inside * y[:, None])  # sums over each group's columns
    start = top_eigenpair(lambda q: _centred(K @ _centred(q)), anywhere(len(K), K), 1e-4)[1]
    found = []
    for g in range(groups):
        keep = 1 - inside[:, g]
        size = keep.sum()
        K1, Ky = (ones.sum(1) - ones[:, g]) * keep, (times_y.sum(1) - times_y[:, g]) * keep
        others = torch.arange(groups, device=K.device) != g
        total = K1.sum()
        norm2 = squares[others][:, others].sum() - 2 * (K1 @ K1) / size + (total / size) ** 2
        m = (y * keep).sum() / size
        quadratic = (y * keep) @ Ky - 2 * m * Ky.sum() + m * m * total
        top, _ = top_eigenpair(lambda q, k=keep: _centred(K @ _centred(q, k), k), _centred(start, keep), 1e-4)  # type: ignore[misc]
        found.append(CentredKernel(quadratic.item(), norm2.clamp(min=0).sqrt().item(), top,
                                   (((y - m) * keep).square().sum()).item()))
    return found


def _centred(q: Tensor, keep: Tensor | None = None) -> Tensor:
    """C q on the rows that are kept, zero elsewhere."""
    return q - q.mean() if keep is None else (q - (q * keep).sum() / keep.sum()) * keep


SAME_OUTPUT = Derived("same_output", same_output, (TANGENT_KERNEL, LABELS), same_output_leaving)
CENTRED_KERNEL = Derived("centred_kernel", centred_kernel, (TANGENT_KERNEL, LABELS), centred_kernel_leaving)


def tangent_cka(c: CentredKernel) -> float:
    """y~^T K y~ / (|C K C|_F |y~|^2) on the (n k) x (n k) kernel.  [signal, Sec. 1]"""
    return quotient(c.quadratic, c.norm * c.energy)


def tangent_stable_rank(c: CentredKernel) -> float:
    """|C K C|_F^2 / |C K C|_2^2.  [signal, Sec. 4]"""
    return quotient(c.norm ** 2, c.top ** 2)


def tangent_correlation(c: CentredKernel) -> float:
    """sum_i (lambda_i / lambda_1) <u_i, y~/|y~|>^2; tangent_cka = tangent_correlation / sqrt(tangent_stable_rank).
    [signal, Sec. 4]"""
    return quotient(c.quadratic, c.top * c.energy)


UNIT = Interval(0.0, 1.0)
MEASURES = (
    Measure("tangent_alignment", tangent_alignment, (SAME_OUTPUT,), ref=Ref("rapid", "Sec. 2"), bounds=UNIT),
    Measure("tangent_cka", tangent_cka, (CENTRED_KERNEL,), ref=Ref("signal", "Eq. 6"), bounds=UNIT),
    Measure("tangent_stable_rank", tangent_stable_rank, (CENTRED_KERNEL,), ref=Ref("signal", "Sec. 4"),
            bounds=Interval(low=1.0)),
    Measure("tangent_correlation", tangent_correlation, (CENTRED_KERNEL,), ref=Ref("signal", "Sec. 4"), bounds=UNIT),
)
