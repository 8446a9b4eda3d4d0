"""How a layer's tangent kernel stands to the labels.  [rapid, Sec. 2; signal, Sec. 1 and 4]"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Interval, Ref
from richter.kernels.spectra import centre, top_eigenvalue
from richter.measures import Measure, quotient
from richter.statistics import LABELS, TANGENT_KERNEL, Derived


@dataclass(frozen=True)
class Labels:
    """Targets "n v" beside a kernel's rows; ``keep`` is False where a row belongs to no real output (padding)."""

    Y: Float[Tensor, "n v"]
    keep: Tensor | None = None


def tangent_alignment(K: Float[Tensor, "n v n v"], labels: Labels) -> float:
    """Mean over outputs c of y_c^T K^cc y_c / (|K^cc|_F |y_c|^2), uncentred, over outputs whose labels are not all 0.
    [rapid, Sec. 2]"""
    Y = labels.Y
    same = K.diagonal(dim1=1, dim2=3)  # n m v
    energy, size = (Y * Y).sum(0), same.flatten(0, 1).norm(dim=0)
    A = torch.einsum("nv,nmv,mv->v", Y, same, Y) / (size * energy)
    return A[(energy > 0) & (size > 0)].mean().item()


@dataclass(frozen=True)
class CentredKernel:
    """What one global centring C = I - 11^T/(n k) leaves to be known of a kernel and its labels."""

    quadratic: float  # y~^T K y~
    norm: float  # |C K C|_F
    top: float  # largest eigenvalue of C K C
    energy: float  # |y~|^2


def centred_kernel(K: Float[Tensor, "n v n v"], labels: Labels) -> CentredKernel:
    size = K.shape[0] * K.shape[1]
    K, y = K.reshape(size, size), labels.Y.reshape(-1)
    if labels.keep is not None:
        keep = labels.keep.reshape(-1)
        K, y = K[keep][:, keep], y[keep]
    Kc, y = centre(K), y - y.mean()
    return CentredKernel((y @ Kc @ y).item(), Kc.norm().item(), top_eigenvalue(Kc), (y @ y).item())


CENTRED_KERNEL = Derived("centred_kernel", centred_kernel, (TANGENT_KERNEL, LABELS))


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
    Measure("tangent_alignment", tangent_alignment, (TANGENT_KERNEL, LABELS), ref=Ref("rapid", "Sec. 2"), bounds=UNIT),
    Measure("tangent_cka", tangent_cka, (CENTRED_KERNEL,), ref=Ref("signal", "Eq. 6"), bounds=UNIT),
    Measure("tangent_stable_rank", tangent_stable_rank, (CENTRED_KERNEL,), ref=Ref("signal", "Sec. 4"),
            bounds=Interval(low=1.0)),
    Measure("tangent_correlation", tangent_correlation, (CENTRED_KERNEL,), ref=Ref("signal", "Sec. 4"), bounds=UNIT),
)
