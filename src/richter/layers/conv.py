"""Convolutions: each patch is an independent input, z[p] = W patch[p] + b for every stride, padding, dilation, group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from richter.layers import LinearMap, View, register

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def unfold(x: Tensor, size: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """Return patches [n, positions, channels * prod(size)] of a padded signal [n, channels, *space], for any number of axes."""
    n, channels, axes = x.shape[0], x.shape[1], len(size)
    if size[-1] not in (2, 3):  # whole patches at once; for 2 or 3 numbers at a time this would be slower
        for axis, (k, step, gap) in enumerate(zip(size, stride, dilation, strict=True)):
            x = x.unfold(2 + axis, gap * (k - 1) + 1, step)[..., ::gap]  # one new axis at the end for each spatial axis
        order = (0, *range(2, 2 + axes), 1, *range(2 + axes, 2 + 2 * axes))
        return x.permute(order).reshape(n, x.shape[2:2 + axes].numel(), channels * math.prod(size))
    space = [(length - gap * (k - 1) - 1) // step + 1
             for length, k, step, gap in zip(x.shape[2:], size, stride, dilation, strict=True)]
    unfolded = x.new_empty(n, *space, channels, *size)
    for offset in itertools.product(*map(range, size)):
        entries = x  # the entry at this offset of every patch
        for axis, (o, many, step, gap) in enumerate(zip(offset, space, stride, dilation, strict=True)):
            index: tuple[Any, ...] = (slice(None),) * (2 + axis)
            entries = entries[(*index, slice(o * gap, o * gap + (many - 1) * step + 1, step))]
        place: tuple[Any, ...] = (..., *offset)
        unfolded[place] = entries.movedim(1, -1)
    return unfolded.view(n, math.prod(space), channels * math.prod(size))


def convolved(m: nn.Module, x: Tensor, w: Tensor) -> Tensor:
    """Convolve the layer's input with another matrix."""
    assert isinstance(m, CONVOLUTIONS)
    return m._conv_forward(x, w.reshape(-1, m.in_channels // m.groups, *m.kernel_size), None)


def pixels(z: Tensor, axes: int) -> Tensor:
    """[n, c, *space] -> [n, positions, c]."""
    if z.dim() == axes + 1:
        z = z.unsqueeze(0)
    return z.flatten(2).transpose(1, 2)


def convolution(size: tuple[int, ...], stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
                mode: str = "constant", apply: Callable[..., Tensor] | None = None) -> LinearMap:
    """Make the map of a call of F.conv1d, F.conv2d or F.conv3d with these arguments. Each patch is one input."""
    axes = len(size)
    stride, dilation = _each(stride, axes), _each(dilation, axes)
    if isinstance(padding, str):
        total = [gap * (k - 1) if padding == "same" else 0 for k, gap in zip(size, dilation, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in _each(padding, axes)]
    pad = [p for pair in reversed(sides) for p in pair]

    def inputs(m: nn.Module, x: Tensor) -> Tensor:
        x = x.unsqueeze(0) if x.dim() == axes + 1 else x
        u = unfold(F.pad(x, pad, mode=mode) if any(pad) else x, size, stride, dilation)
        return u if groups == 1 else u.unflatten(2, (groups, -1))

    def outputs(m: nn.Module, z: Tensor) -> Tensor:
        u = pixels(z, axes)
        return u if groups == 1 else u.unflatten(2, (groups, -1))

    return LinearMap(lambda m, w: w.flatten(1) if groups == 1 else w.reshape(groups, len(w) // groups, -1), inputs, outputs,
                     "dense" if groups == 1 else "grouped", apply=apply)


def _each(number: Any, axes: int) -> tuple[int, ...]:
    """Return one number per axis, from one number or from one for each."""
    numbers = (number,) if isinstance(number, int) else tuple(number)
    return numbers * axes if len(numbers) == 1 else numbers


def view(name: str, m: nn.Module) -> View:
    assert isinstance(m, CONVOLUTIONS)
    mode = "constant" if m.padding_mode == "zeros" else m.padding_mode
    return {"": convolution(m.kernel_size, m.stride, m.padding, m.dilation, m.groups, mode, convolved)}


for kind in CONVOLUTIONS:
    register(kind, view)
