"""The curve with the fewest inflections that fits a noisy one: where its fall accelerates beyond doubt. Needs no torch.

The loss of a linear model under gradient flow is a mixture of decaying exponentials. Such mixtures and power laws are convex:
they fall more and more slowly. A drop after a plateau is not convex: the fall accelerates (concave) and slows down again
(convex). So curves are fitted with prescribed signs of their curvature. A convex curve has no stage, and each further stage adds
one concave stretch. A stretch is kept only if the fit without it is worse by more than noise explains.

    few = binned(steps, values)                # at most 256 points with the noise of each, for a curve of any length
    shape = fewest(few, bar(len(few.t), 0.01)) # a polyline, and which of its pieces are flattest and steepest
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.ndimage import median_filter
from scipy.optimize import nnls

Numbers = NDArray[np.float64]
Structure = tuple[tuple[int, int], ...]  # for each drop: the index of the flattest piece before it, and of its steepest piece
BINS = 256  # points to which a curve is reduced
WINDOW = 61  # number of neighbours whose median deviation estimates the noise of a point
MAD = 0.6744897501960817  # median of |z| for a standard normal z
CUT = 3.0  # standard deviations from the median of five neighbours at which outliers are clipped
FLOOR = 1e-6  # smallest noise, relative to the range of the curve
LEAST = 1e-150  # smallest noise of a constant curve, whose square is still representable


class NoisyCurve(NamedTuple):
    """A curve with few points, each with the standard deviation of its noise."""

    t: Numbers
    y: Numbers
    s: Numbers


class Shape(NamedTuple):
    """A polyline through ``t, y``: convex up to the flattest piece before a drop, concave up to its steepest piece, and so on."""

    t: Numbers
    y: Numbers
    structure: Structure
    evidence: tuple[float, ...]  # for each drop: the increase of chi^2 without it
    curve: NoisyCurve


def bar(n: int, level: float) -> float:
    """Threshold for the increase of chi^2 without a drop, so that a convex curve of n points with normal noise shows a drop in
    less than a share ``level`` of cases. It comes from simulation, repeated by the tests: chi^2 has the tail exp(-x/2), and with
    few points the noise itself is uncertain."""
    return (30.0 + 2 * math.log(0.01 / level)) * (1 + 12 / n)


# ----------------------------------------------------------------------------------------------------- binning and noise

def binned(t: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"], most: int = BINS) -> NoisyCurve:
    """Average in at most ``most`` bins, half of them of equal width and half of equal width in log(t - t_0). Outliers are clipped
    to the range that their noise explains."""
    t, y = np.asarray(t, np.float64), np.asarray(y, np.float64)
    count = np.ones(len(t))
    if len(t) > most:
        u = np.round((t - t[0]) / (t[-1] - t[0]), 12)  # rounded, so that a point at an edge always falls into the same bin
        edges = np.union1d(np.linspace(0, 1, most // 2 + 1), np.round(np.geomspace(max(u[1], 1e-12), 1, most // 2 - 1), 12))
        starts = np.flatnonzero(np.diff(np.searchsorted(edges[:-1], u, side="right"), prepend=-1))
        count = np.diff(starts, append=len(t)).astype(np.float64)
        t, y = (np.add.reduceat(column, starts) / count for column in (t, y))
    s = np.maximum(_noise(t, y, count), max(FLOOR * float(np.ptp(y)), LEAST))
    middle = median_filter(y, 5, mode="nearest")  # leaves a monotonic curve unchanged
    return NoisyCurve(t, middle + np.clip(y - middle, -CUT * s, CUT * s), s)


def _noise(t: Numbers, y: Numbers, count: Numbers) -> Numbers:
    """Estimate the noise of each point from its distance to the line through its neighbours, by medians over a window."""
    step = np.diff(t)
    left = step[1:] / (step[1:] + step[:-1])
    off = y[1:-1] - left * y[:-2] - (1 - left) * y[2:]
    size = np.abs(off) / np.sqrt(1 / count[1:-1] + left**2 / count[:-2] + (1 - left)**2 / count[2:])
    half = min(WINDOW, len(size)) // 2
    padded = np.pad(size, half, mode="reflect") if half else size
    local = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), 1) / MAD
    return np.concatenate([local[:1], local, local[-1:]]) / np.sqrt(count)


def pieces(curve: NoisyCurve, penalty: float, least: int = 2) -> list[int]:
    """Split a curve into straight pieces that fit best; return their starts and the curve's length. The sum of chi^2 and a
    ``penalty`` per piece is minimised exactly, by optimal partitioning."""
    n, w = len(curve.t), curve.s**-2.0
    x, y = (curve.t - curve.t[0]) / (curve.t[-1] - curve.t[0]), curve.y - curve.y.mean()
    sums = np.cumsum(np.pad(w * np.stack([np.ones(n), x, y, x * x, x * y, y * y]), ((0, 0), (1, 0))), 1)
    best, begins = np.full(n + 1, np.inf), np.zeros(n + 1, np.int64)
    best[0] = 0.0
    for end in range(least, n + 1):
        W, X, Y, XX, XY, YY = sums[:, end, None] - sums[:, :end - least + 1]
        spread = np.maximum(XX - X * X / W, np.finfo(np.float64).tiny)
        costs = best[:end - least + 1] + np.maximum(YY - Y * Y / W - (XY - X * Y / W)**2 / spread, 0.0) + penalty
        begins[end] = np.argmin(costs)
        best[end] = costs[begins[end]]
    cuts = [n]
    while cuts[-1] > 0:
        cuts.append(int(begins[cuts[-1]]))
    return cuts[::-1]


# ----------------------------------------------------------------------------------------- polylines of prescribed curvature

def knots(curve: NoisyCurve, cuts: Sequence[int]) -> Numbers:
    """Return the ends of a polyline's pieces, with both points at each cut, so that it can jump there."""
    inner = sorted({i for cut in cuts[1:-1] for i in (cut - 1, cut)} - {0, len(curve.t) - 1})
    return curve.t[[0, *inner, len(curve.t) - 1]]


def bent(curve: NoisyCurve, at: Numbers, structure: Structure) -> tuple[float, Numbers]:
    """Fit the best polyline with knots ``at`` whose curvature has the signs of a structure; return chi^2 and its values."""
    sign = np.ones(len(at) - 2)
    for flat, steep in structure:
        sign[flat:steep] = -1.0
    columns = _columns(curve.t, at, sign) / curve.s[:, None]
    size = np.linalg.norm(columns, axis=0)
    free, rest = nnls(columns / size, curve.y / curve.s, maxiter=100 * len(size))
    return rest * rest, _columns(at, at, sign) @ (free / size)


def _columns(t: Numbers, at: Numbers, sign: Numbers) -> Numbers:
    """Return columns for a line with coefficients of any sign, and for bends with the prescribed signs."""
    x, bends = ((v - at[0]) / (at[-1] - at[0]) for v in (t, at[1:-1]))
    one = np.ones_like(x)
    return np.column_stack([one, -one, x, -x, sign * np.maximum(x[:, None] - bends, 0.0)])


def fewest(curve: NoisyCurve, bar: float, least: float = 0.0) -> Shape:
    """Find the smallest set of drops that a curve needs. Starting with all drops of a free polyline, the least important one is
    removed repeatedly, until each remaining drop improves chi^2 by ``bar`` and stands above the line under it (``excursion``) by
    a share ``least`` of the range.
    """
    at = knots(curve, pieces(curve, 3 * math.log(len(curve.t))))  # each piece has two numbers and a place
    structure = _turns(np.diff(_free(curve, at)) / np.diff(at))
    chi, y = bent(curve, at, structure)
    bar *= max(1.0, chi / max(1, len(curve.t) - len(at)))  # misfit that no polyline explains counts as noise too
    while structure:
        fits = [min(((*bent(curve, at, fewer), fewer) for fewer in _without(structure, j)), key=lambda fit: fit[0])
                for j in range(len(structure))]
        worse = tuple(max(0.0, fit[0] - chi) for fit in fits)
        room = least * float(np.ptp(y))
        scores = [min(more / bar, excursion(at, y, structure, j)[0] / room if room else math.inf) for j, more in enumerate(worse)]
        weakest = int(np.argmin(scores))
        if scores[weakest] >= 1:
            return Shape(at, y, structure, worse, curve)
        chi, y, structure = fits[weakest]
    return Shape(at, y, (), (), curve)


def _free(curve: NoisyCurve, at: Numbers) -> Numbers:
    """Heights of the piecewise linear curve with these knots that fits best."""
    hats = np.column_stack([np.interp(curve.t, at, row) for row in np.eye(len(at))]) / curve.s[:, None]
    return np.asarray(np.linalg.lstsq(hats, curve.y / curve.s, rcond=None)[0])


def _turns(slopes: Numbers) -> Structure:
    """Return the flattest and the steepest piece of every candidate drop."""
    ends = np.append(slopes[1:], np.inf)
    steep = [i for i in range(1, len(slopes)) if slopes[i] < slopes[i - 1] and slopes[i] <= ends[i]]
    begins = [0, *steep[:-1]]
    return tuple((a + int(np.argmax(slopes[a:p])), p) for a, p in zip(begins, steep, strict=False))


def _without(structure: Structure, j: int) -> Iterator[Structure]:
    """Yield the ways to remove a drop: with the plateau before it, by merging with the drop before, or with the plateau after
    it."""
    before, (flat, steep), after = structure[:j], structure[j], structure[j + 1:]
    yield before + after
    if before:
        yield (*before[:-1], (before[-1][0], steep), *after)
    if after:
        yield (*before, (flat, after[0][1]), *after[1:])


def excursion(t: Numbers, y: Numbers, structure: Structure, j: int) -> tuple[float, int, int, int]:
    """Height of the plateau before a drop above the straight line under it, and three vertices: where this line touches the curve
    before the plateau (the foot of the previous fall), the shoulder of the drop, and its own foot.

    Shoulder and foot are where the curve is as steep as the line. Adding a line to the curve changes nothing."""
    low = structure[j - 1][1] + 1 if j else 0
    high = structure[j + 1][0] + 1 if j + 1 < len(structure) else len(t) - 1
    touching = [low + i for i in _minorant(t[low:high + 1], y[low:high + 1])]
    under = np.interp(t[low:high + 1], t[touching], y[touching])
    last = structure[j][1] - low  # the shoulder is not later than the start of the steepest piece
    shoulder = low + int(np.argmax((y[low:high + 1] - under)[:last + 1]))
    a = max(i for i in touching if i <= shoulder)
    c = min(i for i in touching if i > shoulder)
    return float(y[shoulder] - under[shoulder - low]), a, shoulder, c


def _minorant(t: Numbers, y: Numbers) -> list[int]:
    """Vertices of the greatest convex function below the points."""
    hull: list[int] = []
    for i in range(len(t)):
        while len(hull) > 1 and (y[hull[-1]] - y[hull[-2]]) * (t[i] - t[hull[-2]]) >= (y[i] - y[hull[-2]]) * (t[hull[-1]]
                                                                                                          - t[hull[-2]]):
            hull.pop()
        hull.append(i)
    return hull
