"""Convolutions: each patch is an independent input, z[p] = W patch[p] + b for every stride, padding, dilation, group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from richter.layers import LinearMap, View, register


def unfold(x: Tensor, size: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """Patches [n, positions, channels * prod(size)] of a padded signal [n, channels, *space], any number of axes."""
    n, channels, axes = x.shape[0], x.shape[1], len(size)
    for axis, (k, step, gap) in enumerate(zip(size, stride, dilation, strict=True)):
        x = x.unfold(2 + axis, gap * (k - 1) + 1, step)[..., ::gap]  # one new axis at the end for each spatial axis
    order = (0, *range(2, 2 + axes), 1, *range(2 + axes, 2 + 2 * axes))
    return x.permute(order).reshape(n, -1, channels * x.shape[2 + axes:].numel())


def patches(m: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    if x.dim() == len(m.kernel_size) + 1:
        x = x.unsqueeze(0)
    mode, pad = "constant" if m.padding_mode == "zeros" else m.padding_mode, m._reversed_padding_repeated_twice
    if len(pad) == 4 and mode == "constant" and pad[::2] == pad[1::2] and x.dtype in (torch.float32, torch.float64):
        return F.unfold(x, m.kernel_size, m.dilation, (pad[2], pad[0]), m.stride).transpose(1, 2)  # two to four times faster
    if any(pad):  # also what padding="same" comes to
        x = F.pad(x, pad, mode=mode)
    return unfold(x, m.kernel_size, m.stride, m.dilation)


def pixels(z: Tensor, axes: int) -> Tensor:
    """[n, c, *space] -> [n, positions, c]."""
    if z.dim() == axes + 1:
        z = z.unsqueeze(0)
    return z.flatten(2).transpose(1, 2)


def view(name: str, m: nn.Module) -> View:
    assert isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    axes, r = len(m.kernel_size), m.groups
    if r == 1:
        return {"": LinearMap(matrix=lambda m, w: w.flatten(1), inputs=patches, outputs=lambda m, z: pixels(z, axes))}
    return {"": LinearMap(
        matrix=lambda m, w: w.reshape(r, w.shape[0] // r, -1),
        inputs=lambda m, x: (lambda u: u.reshape(*u.shape[:2], r, -1))(patches(m, x)),
        outputs=lambda m, z: (lambda u: u.reshape(*u.shape[:2], r, -1))(pixels(z, axes)),
        kind="grouped")}


for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register(kind, view)
