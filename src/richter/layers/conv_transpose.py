"""Transposed convolutions: every input pixel writes a patch, patch[p] = W x[p], and overlapping patches are summed. The backward
signal of a patch is the patch of the output's backward signal at the same place."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from richter.layers import LinearMap, View, register
from richter.layers.conv import pixels, unfold

TransposedConvolution = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def written(m: nn.Module, z: Tensor) -> Tensor:
    """Return the output pixels that each input pixel writes, [n, positions, channels * prod(size)]."""
    assert isinstance(m, TransposedConvolution)
    if z.dim() == len(m.kernel_size) + 1:
        z = z.unsqueeze(0)
    padding: tuple[int, ...] = m.padding  # type: ignore[assignment]
    pad = [p for p in reversed(padding) for _ in range(2)]
    return unfold(F.pad(z, pad) if any(pad) else z, m.kernel_size, m.stride, m.dilation)


def view(name: str, m: nn.Module) -> View:
    assert isinstance(m, TransposedConvolution)
    axes, r = len(m.kernel_size), m.groups
    if any(more >= step for more, step in zip(m.output_padding, m.stride, strict=True)):
        return {}  # some patches of the output have no input, and cannot be recognised from the output alone
    if r == 1:
        return {"": LinearMap(matrix=lambda m, w: w.flatten(1).T, inputs=lambda m, x: pixels(x, axes), outputs=written)}
    return {"": LinearMap(
        matrix=lambda m, w: w.reshape(r, w.shape[0] // r, -1).mT,
        inputs=lambda m, x: pixels(x, axes).unflatten(2, (r, -1)),
        outputs=lambda m, z: written(m, z).unflatten(2, (r, -1)),
        kind="grouped")}


for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    register(kind, view)
