"""``nn.Embedding``: a linear map of one-hot inputs, stored as indices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from richter.layers import LinearMap, View, register
from richter.layers.linear import positions


def indices(m: nn.Module, x: Tensor) -> Tensor:
    """Map [n, ...] to [n, s]; the padding index becomes -1, because its row has no gradient."""
    x = x.reshape(x.shape[0], x.shape[1:].numel()) if x.dim() else x.reshape(1, 1)
    padding = getattr(m, "padding_idx", None)
    return x if padding is None else torch.where(x == padding, -1, x)


LOOKUP: View = {"": LinearMap(matrix=lambda m, w: w.T, inputs=indices, outputs=lambda m, z: positions(z), kind="lookup")}
register(nn.Embedding, LOOKUP)
