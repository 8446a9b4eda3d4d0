"""Distances between inputs; exactly 0 between a point and its copy."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def squared_distances(x: Float[Tensor, "n d"], z: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    """Return |x - z|^2 by one matrix product. Pairs that are so close that it would lose precision are recomputed from x - z, so
    that the distance of a point to itself or to its copy is exactly 0."""
    centre, itself = x.mean(0), z is x
    x = x - centre
    z = x if itself else z - centre
    p, q = x.square().sum(1), z.square().sum(1)
    D = torch.addmm(q.expand(len(x), len(z)), x, z.T, alpha=-2).add_(p[:, None])
    # the distance, relative to p + q, above which 11 (4) digits are correct
    close = 2.4 * p * (1e-5 if D.dtype == torch.float64 else 1e-2)
    least, nearest = D.min(1)
    near = (least <= close).nonzero()[:, 0]
    nearest = nearest[near]
    D[near, nearest] = math.inf  # for most rows this is the point itself, so that few rows remain to be checked
    crowded = (D.amin(1) <= close).nonzero()[:, 0]
    i, j = (D[crowded] <= close[crowded, None]).nonzero(as_tuple=True)
    i, j = torch.cat([near, crowded[i]]), torch.cat([nearest, j])
    for part in torch.arange(len(i), device=D.device).split(max(1, 2 ** 22 // max(1, x.shape[1]))):
        D[i[part], j[part]] = (x[i[part]] - z[j[part]]).square().sum(1)
    return D


def distances(x: Float[Tensor, "n d"], z: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    """Return |x - z|. Its gradient between a point and its copy is 0."""
    D = squared_distances(x, z)
    if not D.requires_grad:
        return D.sqrt_()
    apart = D > 0
    return torch.where(apart, torch.where(apart, D, 1.0).sqrt(), 0.0)  # the 1 is never used, and avoids a gradient of 0 x inf
