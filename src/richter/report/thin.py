"""Fewer points, digits and pixels that look the same: extremes are kept, nothing is averaged, nothing is invented."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from richter.core import SelectionError
from richter.report.plotdata import Line
from richter.runs import Series

Curve = TypeVar("Curve", Series, Line)


def thin(curve: Curve, points: int, linear: float | None = None) -> Curve:
    """At most ``points`` of the points: the first, the last, and the lowest and highest of each stretch between.

    A stretch has a bounded width, so that the whole curve covers the same pixels, and a bounded number of points, so that a part
    of it does when one looks closer. ``linear``: the axis is linear up to there and logarithmic after. A stretch without a number
    keeps one point of it.
    """
    if points < 4:
        raise SelectionError(f"points={points}: a curve keeps at least 4 points, its ends and its extremes.")
    n = len(curve.step)
    if n <= points:
        return curve
    step, value = curve.step[1:-1].astype(np.float64), curve.value[1:-1]
    starts = _stretches(step if linear is None else np.arcsinh(step / linear), (points - 2) // 2)
    low = _first(np.minimum, np.where(np.isnan(value), np.inf, value), starts)
    high = _first(np.maximum, np.where(np.isnan(value), -np.inf, value), starts)
    kept = np.unique(np.concatenate([[0, n - 1], 1 + low, 1 + high]))
    return type(curve)(*(column[kept] for column in curve))


def _stretches(place: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Where at most ``most`` stretches begin: half of them at equal distances, the others after equally many points."""
    n, wide = len(place), (most + 1) // 2
    span = max(place[-1] - place[0], np.finfo(np.float64).tiny)
    strip = np.maximum.accumulate(np.clip((place - place[0]) / span * wide, 0, wide - 1).astype(np.int64))
    many = ((np.arange(most - wide) + 0.5) * n / max(1, most - wide)).astype(np.int64)  # amid the strips, if steps are even
    return np.union1d(np.flatnonzero(np.diff(strip, prepend=-1)), many)


def _first(least: np.ufunc, values: NDArray[np.float64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the extreme of each stretch is; of equal ones, the first."""
    sizes = np.diff(starts, append=len(values))
    extreme = np.flatnonzero(values == np.repeat(least.reduceat(values, starts), sizes))
    return extreme[np.unique(np.searchsorted(starts, extreme, side="right"), return_index=True)[1]]


def numbers(values: NDArray[np.float64]) -> list[float | None]:
    """To 7 digits, which no screen shows; None for what is no number."""
    with np.errstate(all="ignore"):
        scale = 10.0 ** (6 - np.floor(np.log10(np.abs(values))))
        short = np.round(values * scale) / scale
    short = np.where(np.isfinite(short), short, values)
    return [v if ok else None for v, ok in zip(short.tolist(), np.isfinite(short), strict=True)]


def shrink(matrix: NDArray[Any], size: int) -> NDArray[Any]:
    """At most [size, size]: of each block of entries the one with the largest magnitude.

    Not the mean: it would make a diagonal k times fainter (k of the k x k entries of a block), cancel entries of different signs,
    and show numbers that are nowhere in the matrix. A single large entry stays visible, as a spike of a curve does.
    """
    for axis in (0, 1):
        block = -(-matrix.shape[axis] // size)
        if block > 1:
            parts = [np.moveaxis(matrix, axis, 0)[i:i + block] for i in range(0, matrix.shape[axis], block)]
            low, high = (np.stack([extreme.reduce(part) for part in parts], axis) for extreme in (np.fmin, np.fmax))
            matrix = np.where(np.abs(low.astype(np.float64)) > np.abs(high.astype(np.float64)), low, high)
    return matrix
