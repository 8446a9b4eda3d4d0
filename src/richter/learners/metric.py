"""Metrics of kernels: a matrix M [d, d] or its diagonal [d], which a kernel sees as x -> M^(1/2) x."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import SelectionError
from richter.core.arrays import ArrayLike, to_tensor


def root(metric: Tensor) -> Tensor:
    """Return M^(1/2): of a matrix [d,d] by its eigenvalues, with negative ones set to 0; of a diagonal [d] entry by entry."""
    if metric.dim() == 1:
        return metric.clamp(min=0).sqrt()
    return power(metric, 0.5)


def power(M: Float[Tensor, "d d"], exponent: float) -> Float[Tensor, "d d"]:
    """Return M^exponent of a symmetric matrix, with negative eigenvalues set to 0."""
    values, vectors = torch.linalg.eigh((M + M.T) / 2)
    return (vectors * values.clamp(min=0) ** exponent) @ vectors.T


def stretch(x: Float[Tensor, "... d"], R: Tensor | None) -> Float[Tensor, "... d"]:
    """Return x R, the inputs as the kernel sees them. R is the root of its metric (None: the identity)."""
    return x if R is None else x * R if R.dim() == 1 else x @ R


def left(R: Tensor | None, F: Float[Tensor, "d e"]) -> Float[Tensor, "d e"]:
    """Product R F, for a matrix or a diagonal R."""
    return F if R is None else R[:, None] * F if R.dim() == 1 else R @ F


def between(G: Tensor, R: Tensor | None) -> Tensor:
    """Product R G R, for a matrix or a diagonal R."""
    if R is None:
        return G
    if R.dim() == 1:
        return G * R * R if G.dim() == 1 else R[:, None] * G * R
    return R @ G @ R


def checked_metric(metric: ArrayLike, x: Float[Tensor, "n d"]) -> Tensor:
    """Read a metric: a diagonal [d] or a symmetric matrix [d, d] that fits the inputs."""
    M, d = to_tensor(metric, "metric").to(x), x.shape[1]
    if tuple(M.shape) not in ((d,), (d, d)):
        raise SelectionError(f"metric has shape {tuple(M.shape)} for inputs of {d} columns; [{d}] or [{d}, {d}] is needed.")
    if M.dim() == 2 and (M - M.T).norm() > 1e-8 * M.norm():
        raise SelectionError("metric is not symmetric: (x - z)^T M (x - z) sees its symmetric part only. Give (M + M^T) / 2, "
                             "or for FACT the learner's own update.")
    return M
