"""Fewer points, digits and pixels with the same look: extremes are kept, and nothing is averaged or interpolated."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from richter.core import SelectionError
from richter.report.plotdata import CurveData
from richter.runs import Series

Curve = TypeVar("Curve", Series, CurveData)


def thin(curve: Curve, points: int, linear: float | None = None) -> Curve:
    """Keep at most ``points`` points: the first, the last, and the lowest and highest of each stretch between them.

    A stretch has a bounded width, so the curve covers the same pixels. It has a bounded number of points, so a magnified part
    does too. ``linear``: the axis is linear up to this step and logarithmic above. A stretch without a finite value keeps one
    point. """
    if points < 4:
        raise SelectionError(f"points={points}: a curve needs at least 4 points, its ends and its extremes.")
    n = len(curve.step)
    if n <= points:
        return curve
    step, value = curve.step[1:-1].astype(np.float64), curve.value[1:-1]
    starts = _stretches(step if linear is None else np.arcsinh(step / linear), (points - 2) // 2)
    low = _first(np.minimum, np.where(np.isnan(value), np.inf, value), starts)
    high = _first(np.maximum, np.where(np.isnan(value), -np.inf, value), starts)
    indices = np.unique(np.concatenate([[0, n - 1], 1 + low, 1 + high]))
    return type(curve)(*(column[indices] for column in curve))


def _stretches(place: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Starts of at most ``most`` stretches: half of them at equal distances, the others after equal numbers of points."""
    n, wide = len(place), (most + 1) // 2
    span = max(place[-1] - place[0], np.finfo(np.float64).tiny)
    strip = np.maximum.accumulate(np.clip((place - place[0]) / span * wide, 0, wide - 1).astype(np.int64))
    many = ((np.arange(most - wide) + 0.5) * n / max(1, most - wide)).astype(np.int64)  # between the strips, if steps are even
    return np.union1d(np.flatnonzero(np.diff(strip, prepend=-1)), many)


def _first(least: np.ufunc, values: NDArray[np.float64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of the extreme of each stretch; of equal values, the first."""
    sizes = np.diff(starts, append=len(values))
    extreme = np.flatnonzero(values == np.repeat(least.reduceat(values, starts), sizes))
    return extreme[np.unique(np.searchsorted(starts, extreme, side="right"), return_index=True)[1]]


def numbers(values: NDArray[np.float64]) -> list[float | None]:
    """Round to 7 digits, more than a screen shows. Values that are not finite become None."""
    with np.errstate(all="ignore"):
        scale = 10.0 ** (6 - np.floor(np.log10(np.abs(values))))
        short = np.round(values * scale) / scale
    short = np.where(np.isfinite(short), short, values)
    return [v if ok else None for v, ok in zip(short.tolist(), np.isfinite(short), strict=True)]


def shrink(matrix: NDArray[Any], size: int) -> NDArray[Any]:
    """Reduce to at most [size, size]: of each block, keep the entry with the largest magnitude.

    A mean would make a diagonal k times fainter (k of the k x k entries of a block), cancel entries of different signs, and show
    numbers that do not occur in the matrix. With the largest entry, a single large entry stays visible.
    """
    for axis in (0, 1):
        block = -(-matrix.shape[axis] // size)
        if block > 1:
            parts = [np.moveaxis(matrix, axis, 0)[i:i + block] for i in range(0, matrix.shape[axis], block)]
            low, high = (np.stack([extreme.reduce(part) for part in parts], axis) for extreme in (np.fmin, np.fmax))
            matrix = np.where(np.abs(low.astype(np.float64)) > np.abs(high.astype(np.float64)), low, high)
    return matrix
