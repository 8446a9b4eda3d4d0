"""What every theory does with its arguments: read arrays as float64 tensors whose axes fit, give back the kind it was given."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from richter.core import SelectionError
from richter.core.arrays import ArrayLike, to_tensor
from richter.core.arrays import like as like  # for the theories, which all give back the kind of array they are given


def read(**given: tuple[ArrayLike, str]) -> list[Tensor]:
    """``X, y = read(X=(X, "n d"), y=(y, "n"))``: real, finite, not empty, and axes of one name of one length."""
    lengths: dict[str, tuple[int, str]] = {}
    out: list[Tensor] = []
    for name, (value, axes) in given.items():
        t, wanted = to_tensor(value, name), axes.split()
        shape = f"{name} has shape {tuple(t.shape)}"
        if t.dim() != len(wanted):
            raise SelectionError(f"{shape}; [{', '.join(wanted)}] is needed.")
        for axis, length in zip(wanted, t.shape, strict=True):
            if length == 0:
                raise SelectionError(f"{shape}: it is empty along {axis!r} of [{', '.join(wanted)}].")
            seen, where = lengths.setdefault(axis, (length, name))
            if seen != length:
                raise SelectionError(f"{shape} for [{', '.join(wanted)}], so {axis} = {length}; but {axis} = {seen} in {where}.")
        out.append(t.to(out[0].device) if out else t)
    return out


def column(y: ArrayLike) -> Tensor:
    """Labels [n, 1] as [n]; of any other shape as they are."""
    t = to_tensor(y, "y")
    return t[:, 0] if t.dim() == 2 and t.shape[1] == 1 else t


def whole(least: int = 1, **given: Any) -> None:
    """Sizes and seeds are whole numbers, ``least`` at least."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise SelectionError(f"{name}={value!r}; a whole number, at least {least}, is needed.")
