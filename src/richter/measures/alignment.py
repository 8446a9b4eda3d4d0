"""How a layer's tangent kernel stands to the labels.  [rapid, Sec. 2; signal, Sec. 1 and 4]"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Interval, Ref
from richter.instrument.statistics import LABELS, TANGENT_KERNEL, Derived
from richter.kernels.spectra import anywhere, centre, top_eigenpair, top_eigenvalue
from richter.measures import Measure, quotient


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
    y = Y.T[:, :, None]
    return SameOutput((y.mT @ K @ y)[:, 0, 0], torch.stack([Kc.norm() for Kc in K]), (Y * Y).sum(0))


def of_diagonal_leaving(K: Float[Tensor, "v n n"], Y: Float[Tensor, "n v"], groups: int) -> list[SameOutput]:
    """The same with each group of examples left out, from sums over blocks: no submatrix is copied."""
    inside = torch.nn.functional.one_hot(torch.arange(len(Y)) % groups, groups).to(Y)  # row, group
    mine = inside * Y.T[:, :, None]
    quadratic = _without_each(mine.mT @ K @ mine)
    square = _without_each(torch.stack([inside.T @ (Kc * Kc) @ inside for Kc in K]))
    energy = (mine * mine).sum(1)
    return [SameOutput(quadratic[:, g], square[:, g].clamp(min=0).sqrt(), energy.sum(1) - energy[:, g]) for g in range(groups)]


def _without_each(blocks: Float[Tensor, "v g g"]) -> Float[Tensor, "v g"]:
    """The sum of all blocks without the row and the column of each group."""
    return blocks.sum((1, 2))[:, None] - blocks.sum(1) - blocks.sum(2) + blocks.diagonal(dim1=1, dim2=2)


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
    """The same with each group of examples left out, from sums over blocks of the whole kernel: no submatrix is copied."""
    K, y, example = flat(K, labels)
    inside = torch.nn.functional.one_hot(example % groups, groups).to(K)  # row, group
    keep = 1 - inside.T
    squares = _without_each((inside.T @ (K * K) @ inside)[None])[0]
    size = keep.sum(1)
    K1, Y = (keep @ K) * keep, (y - ((keep @ y) / size)[:, None]) * keep
    norms = (squares - 2 * K1.square().sum(1) / size + (K1.sum(1) / size) ** 2).clamp(min=0).sqrt()
    quadratics, energies = (Y * (Y @ K)).sum(1), Y.square().sum(1)
    tops = _top_leaving(K, keep)
    return [CentredKernel(*(t[g].item() for t in (quadratics, norms, tops, energies))) for g in range(groups)]


def _top_leaving(K: Float[Tensor, "r r"], keep: Float[Tensor, "g r"], steps: int = 20) -> Float[Tensor, " g"]:
    """The largest eigenvalue of the centred kernel of each set of rows: Lanczos on all sets side by side, from the whole
    kernel's vector."""
    def centred(X: Tensor) -> Tensor:
        return (X - ((X * keep).sum(1) / keep.sum(1))[:, None]) * keep

    def unit(X: Tensor) -> tuple[Tensor, Tensor]:
        size = X.norm(dim=1)
        return X / torch.where(size > 0, size, 1.0)[:, None], size

    start = top_eigenpair(lambda q: _centred(K @ _centred(q)), anywhere(len(K), K), 1e-2)[1]
    X = unit(centred(start.expand_as(keep)))[0]
    Q, most = X[:, None], min(steps, len(K))  # set, vector, row
    T = K.new_zeros(len(keep), most, most)
    for j in range(most):
        W = centred(Q[:, -1] @ K)
        T[:, j, j] = (W * Q[:, -1]).sum(1)
        for _ in range(2):
            W = W - ((Q @ W[:, :, None]).mT @ Q)[:, 0]
        X, size = unit(W)
        size = torch.where(size > 1e-13 * T[:, 0, 0].abs(), size, 0.0)
        if j % 4 == 3 or j + 1 == most or not size.any():
            values, vectors = torch.linalg.eigh(T[:, :j + 1, :j + 1])
            off = size * vectors[:, -1, -1].abs()  # |K u - top u|; the error is about its square
            if j + 1 == most or bool((off <= 1e-4 * values[:, -1].abs()).all()):
                break
        T[:, j, j + 1] = T[:, j + 1, j] = size
        Q = torch.cat([Q, (X * (size > 0)[:, None])[:, None]], 1)
    return values[:, -1]


def _centred(q: Tensor) -> Tensor:
    return q - q.mean()


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
