"""Fewer points and smaller pictures that look the same: extremes are kept, nothing is averaged, nothing is invented."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from richter.core import SelectionError
from richter.runs import Series


def thin(series: Series, points: int) -> Series:
    """At most ``points`` of the points: the first, the last, and the lowest and highest of each of equally many between.

    A curve drawn through them covers the same pixels as the whole one. A stretch without a number keeps one point of it.
    """
    if points < 4:
        raise SelectionError(f"points={points}: a curve keeps at least 4 points, its ends and its extremes.")
    n = len(series.step)
    if n <= points:
        return series
    inner, width = series.value[1:-1], -(-(n - 2) // ((points - 2) // 2))
    low = _first(np.argmin, np.where(np.isnan(inner), np.inf, inner), width, np.inf)
    high = _first(np.argmax, np.where(np.isnan(inner), -np.inf, inner), width, -np.inf)
    kept = np.unique(np.concatenate([[0, n - 1], 1 + low, 1 + high]))
    return Series(series.step[kept], series.value[kept], series.error[kept])


def _first(which: Callable[..., Any], values: NDArray[np.float64], width: int, fill: float) -> NDArray[np.int64]:
    """Where the extreme of each bucket of ``width`` values is. Of equal ones it is the first, hence never the filling."""
    buckets = np.pad(values, (0, -len(values) % width), constant_values=fill).reshape(-1, width)
    return np.arange(len(buckets)) * width + which(buckets, axis=1)


def shrink(matrix: NDArray[Any], size: int) -> NDArray[Any]:
    """At most [size, size]: of each block of entries the one with the largest magnitude."""
    for axis in (0, 1):
        block = -(-matrix.shape[axis] // size)
        if block > 1:
            rest = -matrix.shape[axis] % block
            padded = np.pad(matrix, [(0, rest if a == axis else 0) for a in (0, 1)], mode="edge")
            parts = np.moveaxis(padded, axis, 0).reshape(-1, block, matrix.shape[1 - axis])
            best = np.abs(np.nan_to_num(parts)).argmax(1)[:, None]
            matrix = np.moveaxis(np.take_along_axis(parts, best, 1)[:, 0], 0, axis)
    return matrix
