"""Losses of joint-embedding self-supervised learning: embeddings ``z1`` and ``z2`` [n, d] of two views of the same n examples.

    barlow_twins(z1, z2)                                # the form that theory.self_supervised solves
    barlow_twins(z1, z2, off_diagonal=0.0051, standardise=True)     # the published one
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

Embeddings = Float[Tensor, "n d"]


def barlow_twins(z1: Embeddings, z2: Embeddings, off_diagonal: float = 1.0, standardise: bool = False) -> Float[Tensor, ""]:
    """|C - 1|^2 with C = (z1^T z2 + z2^T z1) / 2n, and ``off_diagonal`` as the weight of its entries off the diagonal.
    ``standardise``: every dimension of a view gets mean zero and variance one over the batch."""
    _check(z1, z2)
    if standardise:
        z1, z2 = ((z - z.mean(0)) / z.std(0, correction=0) for z in (z1, z2))
    C = z1.T @ z2 / len(z1)
    apart = (C + C.T) / 2 - torch.eye(C.shape[0], dtype=C.dtype, device=C.device)
    squares = apart.square()
    return off_diagonal * squares.sum() + (1 - off_diagonal) * squares.diagonal().sum()


def vicreg(z1: Embeddings, z2: Embeddings, invariance: float = 25.0, variance: float = 25.0,
           covariance: float = 1.0) -> Float[Tensor, ""]:
    """Distance of the views, hinge of the standard deviation below 1 in each dimension, and squared covariances of different
    dimensions.  [vicreg, Eqs. 1-6]"""
    _check(z1, z2)
    hinge = off = z1.new_zeros(())
    for z in (z1, z2):
        z = z - z.mean(0)
        hinge = hinge + F.relu(1 - (z.square().sum(0) / (len(z) - 1) + 1e-4).sqrt()).mean() / 2
        C = z.T @ z / (len(z) - 1)
        off = off + (C.square().sum() - C.diagonal().square().sum()) / z.shape[1]
    return invariance * F.mse_loss(z1, z2) + variance * hinge + covariance * off


def simclr(z1: Embeddings, z2: Embeddings, temperature: float = 0.5) -> Float[Tensor, ""]:
    """NT-Xent: cross-entropy of finding the other view of each example among all other views, by cosine.  [simclr, Eq. 1]"""
    _check(z1, z2)
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    likeness = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    n = len(z1)
    other = torch.arange(2 * n, device=z.device).roll(n)
    return F.cross_entropy(likeness, other)


def _check(z1: Embeddings, z2: Embeddings) -> None:
    """Raise an error unless both embeddings are [n, d] of the same shape with two examples or more."""
    if z1.shape != z2.shape or z1.dim() != 2:
        raise ValueError(f"z1 is {tuple(z1.shape)} and z2 {tuple(z2.shape)}: embeddings [n, d] of two views of the same examples "
                         f"are needed.")
    if len(z1) < 2:
        raise ValueError("the batch has one example: joint-embedding losses compare examples, and need two at least.")
