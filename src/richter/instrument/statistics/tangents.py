"""What is to be known of a tangent kernel and its labels: of each output by itself (SameOutput), and after one global centring
(CentredKernel); both also with each group of examples left out. Estimates of them are in estimates.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from richter.instrument.statistics.frame import NO_LABELS, Missing
from richter.instrument.statistics.grams import Labels
from richter.kernels.spectra import anywhere, centre, top_eigenpair, top_eigenvalue


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


@dataclass(frozen=True)
class CentredKernel:
    """What one global centring C = I - 11^T/(n k) leaves to be known of a kernel and its labels. Asking for what is not known
    raises Missing."""

    norm: float  # |C K C|_F
    labelled: tuple[float, float] | None  # y~^T K y~ and |y~|^2; None without labels
    largest: float  # eigenvalue of C K C; NaN if it was not resolved
    lacking: str = ""  # why

    @property
    def top(self) -> float:
        """The largest eigenvalue of C K C."""
        if math.isnan(self.largest):
            raise Missing(self.lacking)
        return self.largest

    @property
    def quadratic(self) -> float:
        """y~^T K y~"""
        if self.labelled is None:
            raise Missing(NO_LABELS)
        return self.labelled[0]

    @property
    def energy(self) -> float:
        """|y~|^2"""
        if self.labelled is None:
            raise Missing(NO_LABELS)
        return self.labelled[1]


def flat(K: Float[Tensor, "n v n v"], labels: Labels) -> tuple[Tensor, Tensor | None, Tensor]:
    """The kernel as a matrix, the labels as a vector, and the example each row belongs to; without padding. Outputs come
    first, as kernels lie in memory."""
    n, v = K.shape[:2]
    K = K.permute(1, 0, 3, 2).reshape(n * v, n * v)
    y = None if labels.given is None else labels.given.T.reshape(-1)
    example = torch.arange(n, device=K.device).repeat(v)
    if labels.keep is None:
        return K, y, example
    keep = labels.keep.T.reshape(-1)
    return K[keep][:, keep], None if y is None else y[keep], example[keep]


def centred_kernel(K: Float[Tensor, "n v n v"], labels: Labels) -> CentredKernel:
    K, y, _ = flat(K, labels)
    Kc, y = centre(K), None if y is None else y - y.mean()
    if Kc.norm() <= 1e-13 * K.norm():  # a constant kernel: what is left is rounding
        return CentredKernel(0.0, None if y is None else (0.0, (y @ y).item()), 0.0)
    labelled = None if y is None else ((y @ Kc @ y).item(), (y @ y).item())
    return CentredKernel(Kc.norm().item(), labelled, top_eigenvalue(Kc))


def centred_kernel_leaving(K: Float[Tensor, "n v n v"], labels: Labels, groups: int) -> list[CentredKernel]:
    """The same with each group of examples left out, from sums over blocks of the whole kernel: no submatrix is copied."""
    K, y, example = flat(K, labels)
    inside = torch.nn.functional.one_hot(example % groups, groups).to(K)  # row, group
    keep = 1 - inside.T
    squares = _without_each((inside.T @ (K * K) @ inside)[None])[0]
    size = keep.sum(1)
    K1 = (keep @ K) * keep
    norms = (squares - 2 * K1.square().sum(1) / size + (K1.sum(1) / size) ** 2).clamp(min=0).sqrt()
    tops = _top_leaving(K, keep)
    labelled: list[tuple[float, float] | None] = [None] * groups
    if y is not None:
        Y = (y - ((keep @ y) / size)[:, None]) * keep
        quadratics, energies = (Y * (Y @ K)).sum(1), Y.square().sum(1)
        labelled = [(q.item(), e.item()) for q, e in zip(quadratics, energies, strict=True)]
    return [CentredKernel(norms[g].item(), labelled[g], tops[g].item()) for g in range(groups)]


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
