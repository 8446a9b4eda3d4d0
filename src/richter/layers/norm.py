"""Normalisation layers: their affine part is a diagonal map of the normalised input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from richter.layers import LinearMap, View, register


def channels_second(z: Tensor) -> Tensor:
    """[n, c, *space] -> [n, positions, c];  [n, c] -> [n, 1, c]."""
    return z.reshape(z.shape[0], z.shape[1], z.shape[2:].numel()).transpose(1, 2)


def diagonal(normalise: Callable[[Any, Tensor], Tensor], arrange: Callable[[Any, Tensor], Tensor]) -> View:
    """Make the view of a layer that normalises without its affine part; ``arrange`` moves axes to [n, positions, d]."""
    return {"": LinearMap(matrix=lambda m, w: w.flatten(), inputs=lambda m, x: arrange(m, normalise(m, x)),
                          outputs=arrange, kind="diagonal")}


def trailing(m: nn.LayerNorm | nn.RMSNorm, z: Tensor) -> Tensor:
    """Map [n, ..., *normalized_shape] to [n, positions, d]."""
    shape = m.normalized_shape
    lead = z.shape[:z.dim() - len(shape)]
    return z.reshape(lead[0] if lead else 1, lead[1:].numel(), math.prod(shape))  # without -1, so that it works for zero examples


def batch_statistics(m: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, x: Tensor) -> Tensor:
    """Normalise by the running statistics, or by those of the batch if there are none."""
    use_batch = m.training or m.running_mean is None
    return F.batch_norm(x, None if use_batch else m.running_mean, None if use_batch else m.running_var,
                        training=use_batch, eps=m.eps)


register(nn.LayerNorm, diagonal(lambda m, x: F.layer_norm(x, m.normalized_shape, eps=m.eps), trailing))
register(nn.RMSNorm, diagonal(lambda m, x: F.rms_norm(x, m.normalized_shape, eps=m.eps), trailing))
register(nn.GroupNorm, diagonal(lambda m, x: F.group_norm(x, m.num_groups, eps=m.eps), lambda m, z: channels_second(z)))
for batch_norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
    register(batch_norm, diagonal(batch_statistics, lambda m, z: channels_second(z)))
