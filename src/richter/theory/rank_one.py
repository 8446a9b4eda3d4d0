"""Eigenvalues and eigenvectors of diag(p) + g z z^T with full relative precision, for any sizes of p and g z z^T.

Eigenvalues c_k solve 1 + g sum_i z_i^2 / (p_i - c) = 0, one between neighbouring p_i and one above the last. Each is stored as a
distance from the nearest p_i, so that c_k - p_i never cancels. A dense solver has errors of about eps g |z|^2 instead. If
g z z^T is much larger, these exceed the small p_i.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

BITS = 63  # steps of a bisection over the bit patterns of positive float64 numbers


def eigensystem(p: Float[Tensor, " n"], z: Float[Tensor, " n"], g: float
                ) -> tuple[Float[Tensor, " n"], Float[Tensor, "n n"], Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return (c, v, d, share) for ascending p: eigenvalues, eigenvectors as columns, d = v^T z, and share_k = g d_k^2 / c_k."""
    rotation, z = _one_entry_for_each_value(p, z)
    live = g * z.square() > 0
    c, v, d, share = p.clone(), torch.eye(len(p), dtype=p.dtype, device=p.device), z.clone(), torch.zeros_like(p)
    if live.any():
        c[live], part, d[live], share[live] = _separate(p[live], z[live], g)
        v[live.nonzero(), live.nonzero().T] = part
    c, order = c.sort()
    return c, rotation @ v[:, order], d[order], share[order]


def _one_entry_for_each_value(p: Float[Tensor, " n"], z: Float[Tensor, " n"]) -> tuple[Float[Tensor, "n n"], Float[Tensor, " n"]]:
    """Return a rotation Q among equal entries of p, and Q^T z, which has one non-zero entry for each value of p."""
    Q, z, start = torch.eye(len(p), dtype=p.dtype, device=p.device), z.clone(), 0
    for count in torch.unique_consecutive(p, return_counts=True)[1].tolist():
        equal = slice(start, start + count)
        if count > 1:
            Q[equal, equal] = torch.linalg.qr(z[equal, None], mode="complete").Q
            first = Q[equal, start] @ z[equal]
            z[equal] = 0.0
            z[start] = first
        start += count
    return Q, z


def _separate(p: Float[Tensor, " n"], z: Float[Tensor, " n"], g: float
              ) -> tuple[Float[Tensor, " n"], Float[Tensor, "n n"], Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Solve the case of distinct p and non-zero z."""
    weight = g * z.square()
    gap = torch.cat([p.diff(), 2 * weight.sum()[None]])  # the last eigenvalue is at most sum(weight) above p
    middle = 1 + (weight / (p - p[:, None] - gap[:, None] / 2)).sum(1)
    near_left = middle > 0
    near_left[-1] = True
    number = torch.arange(len(p), device=p.device)
    origin = torch.where(near_left, number, (number + 1).clamp(max=len(p) - 1))
    side = torch.where(near_left, 1.0, -1.0).to(p.dtype)
    from_origin = p - p[origin][:, None]  # [k, i]
    low, high = torch.ones_like(number), (gap / 2 * (1 + 1e-15)).view(torch.int64)  # positive numbers are ordered like their bits
    for _ in range(BITS):
        x = low + (high - low) // 2
        value = 1 + (weight / (from_origin - (side * x.view(p.dtype))[:, None])).sum(1)
        below = side * value < 0
        low, high = torch.where(below, x, low), torch.where(below, high, x)
    offset = side * high.view(p.dtype)
    distance = offset[:, None] - from_origin  # c_k - p_i
    # These weights make the eigenvalues exact, and with them eigenvectors are orthogonal even for close eigenvalues.
    others = p[:, None] - p
    ratio = torch.where(others == 0, distance, distance / others)
    root = ratio.prod(0).sqrt()
    vectors = (root * z.sign() / distance).T
    largest = vectors.abs().amax(0)
    length = largest * (vectors / largest).norm(dim=0)
    c = p[origin] + offset
    return c, vectors / length, 1 / (g**0.5 * length), 1 / (c * length) / length
