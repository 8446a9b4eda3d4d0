"""A parameter, or a part of it, as it stands in a product: which entries, in which order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from richter.layers import Kind, LinearMap
from richter.layers.linear import positions

Axis = tuple[int, int]  # (length, stride)
Axes = tuple[Axis, ...]


class Key(NamedTuple):
    """Which entries of a parameter a map's matrix [groups, d_out, d_in] holds, and how it reads: two maps of one parameter are
    the same if these are."""

    kind: Kind
    offset: int
    groups: Axes
    d_out: Axes
    d_in: Axes

    @property
    def transposed(self) -> tuple[int, Axes, Axes, Axes]:
        return self.offset, self.groups, self.d_in, self.d_out

    @property
    def entries(self) -> tuple[int, Axes, Axes, Axes]:
        return self.offset, self.groups, self.d_out, self.d_in


def key_of(kind: Kind, offset: int, groups: Sequence[Axis], d_out: Sequence[Axis], d_in: Sequence[Axis]) -> Key:
    return Key(kind, offset, merged(groups), merged(d_out), merged(d_in))


def merged(axes: Sequence[Axis]) -> Axes:
    """Without axes of length one; neighbours that can be walked through as one are one."""
    result: list[Axis] = []
    for length, stride in axes:
        if length == 1:
            continue
        if result and result[-1][1] == length * stride:
            result[-1] = (result[-1][0] * length, stride)
        else:
            result.append((length, stride))
    return tuple(result)


@dataclass(frozen=True)
class Part:
    """A view of a parameter, or a multiple of one: the whole, a slice, a transpose, a reshape."""

    parameter: Tensor
    axes: Axes
    offset: int  # from the parameter's first entry, in its memory
    scale: float = 1.0  # by which it is multiplied before it is used (W / sqrt(n))

    @property
    def distinct(self) -> bool:
        """Does every entry stand in it once?"""
        reach = 0
        for length, stride in sorted((a for a in self.axes if a[0] > 1), key=lambda a: a[1]):
            if stride <= reach:
                return False
            reach += (length - 1) * stride
        return True

    def label(self) -> str | None:
        """"" for the whole parameter, "2" for its third row, "0:4", ":,0:3"; None if it is no slice of it."""
        lengths, strides = self.parameter.shape, self.parameter.stride()
        rest, first = self.offset, [0] * len(lengths)
        for i in sorted(range(len(lengths)), key=lambda i: -strides[i]):
            if lengths[i] > 1:
                first[i], rest = divmod(rest, strides[i])
        stops = self._stops(first)
        if stops is None:
            return None
        texts = [":" if (a, b, step) == (0, length, 1) else str(a) if b == a + 1 else f"{a}:{b}" + f":{step}" * (step > 1)
                 for a, (b, step), length in zip(first, stops, lengths, strict=True)]
        while texts and texts[-1] == ":":
            texts.pop()
        return ",".join(texts)

    def _stops(self, first: list[int]) -> list[tuple[int, int]] | None:
        """For each axis of the parameter, where the slice that starts at ``first`` ends, and its step."""
        lengths, strides = self.parameter.shape, self.parameter.stride()
        own = _sorted(self.axes)
        last = self.offset + sum((length - 1) * stride for length, stride in own)
        ends = [0] * len(lengths)
        for i in sorted(range(len(lengths)), key=lambda i: -strides[i]):
            if lengths[i] > 1:
                ends[i], last = divmod(last, strides[i])
        box = [(b - a + 1, stride) for a, b, stride in zip(first, ends, strides, strict=True)]
        if all(length > 0 for length, _ in box) and merged(_sorted(box)) == merged(own):
            return [(b + 1, 1) for b in ends]
        stops: dict[int, tuple[int, int]] = {}
        for length, stride in own:  # with steps: each axis is one of the parameter's
            fitting = [i for i in range(len(lengths)) if lengths[i] > 1 and stride % strides[i] == 0
                       and first[i] + (length - 1) * (stride // strides[i]) < lengths[i] and i not in stops]
            if not fitting:
                return None
            i = max(fitting, key=lambda i: strides[i])
            stops[i] = (first[i] + (length - 1) * (stride // strides[i]) + 1, stride // strides[i])
        return [stops.get(i, (first[i] + 1, 1)) for i in range(len(lengths))]


def _sorted(axes: Sequence[Axis]) -> list[Axis]:
    return sorted((a for a in axes if a[0] > 1), key=lambda a: -a[1])


def key_of_map(m: LinearMap, module: nn.Module, weight: Tensor) -> Key | None:
    """The same of a map that a file in layers/ describes; None where it copies what it re-arranges."""
    whole = torch.empty_strided(weight.shape, weight.stride(), device="meta")
    matrix = m.matrix(module, whole)
    if (matrix is not whole and matrix._base is not whole) or matrix.dim() not in (2, 3):
        return None
    axes = [*zip(matrix.shape, matrix.stride(), strict=True)]
    return key_of(m.kind, int(matrix.storage_offset()), axes[:-2], axes[-2:-1], axes[-1:])


@lru_cache(maxsize=4096)
def as_map(strides: tuple[int, ...], kind: Kind, offset: int, groups: Axes, d_out: Axes, d_in: Axes) -> LinearMap:
    """The map whose matrix [groups, d_out, d_in] are these entries of a parameter that lies in memory with ``strides``. It reads
    [..., groups, d_in] (a lookup: indices), and writes [..., groups, d_out]."""
    axes = (*groups, *d_out, *d_in)
    size, stride = [length for length, _ in axes], [step for _, step in axes]
    many = [math.prod(length for length, _ in role) for role in (groups, d_out, d_in)]
    shape = many if kind == "grouped" else many[1:]

    def matrix(m: nn.Module, w: Tensor) -> Tensor:
        if w.stride() != strides:
            w = torch.empty_strided(w.shape, strides, dtype=w.dtype, device=w.device).copy_(w)
        return w.as_strided(size, stride, w.storage_offset() + offset).reshape(shape)

    def arrange(m: nn.Module, x: Tensor) -> Tensor:
        return in_groups(x) if kind == "grouped" else positions(x)

    return LinearMap(matrix, rows if kind == "lookup" else arrange, arrange, kind)


def rows(m: nn.Module, x: Tensor) -> Tensor:
    """Indices [n, ...] -> [n, s]."""
    return x.reshape(x.shape[0], x.shape[1:].numel()) if x.dim() else x.reshape(1, 1)


def in_groups(x: Tensor) -> Tensor:
    """[n, ..., r, d] -> [n, s, r, d];  [r, d] -> [1, 1, r, d]."""
    if x.dim() < 3:
        return x[None, None]
    return x.reshape(x.shape[0], x.shape[1:-2].numel(), *x.shape[-2:])
