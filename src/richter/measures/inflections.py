"""The curve with the fewest inflections that agrees with a noisy one: where its fall accelerates for certain. Needs no torch.

The loss of a linear model under gradient flow is a mixture of decaying exponentials, and so are power laws: all of these are
convex, they fall ever more slowly. A drop after a plateau is not: the fall accelerates (concave) and slows down again (convex).
So curves are fitted with the signs of their curvature prescribed: convex all along is the curve without a stage, and each further
stage is one more concave stretch. A stretch stays only if the fit without it is worse by more than noise explains.

    few = binned(steps, values)                # at most 256 points with the noise of each, whatever the length of the curve
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
Structure = tuple[tuple[int, int], ...]  # of every drop: the flattest piece before it, and its steepest
BINS = 256  # points to which a curve is reduced
WINDOW = 61  # neighbours whose median deviation is the noise of a point
MAD = 0.6744897501960817  # the median of |z| for a standard normal z
CUT = 3.0  # standard deviations from the median of five neighbours beyond which a point is moved to there
FLOOR = 1e-6  # of the range of the curve: noise is not taken to be smaller
LEAST = 1e-150  # of what has no range: squares of it are numbers


class Curve(NamedTuple):
    """A curve of few points, each with the standard deviation of its noise."""

    t: Numbers
    y: Numbers
    s: Numbers


class Shape(NamedTuple):
    """A polyline through ``t, y``: convex up to the flattest piece before a drop, concave up to its steepest, and so on."""

    t: Numbers
    y: Numbers
    structure: Structure
    evidence: tuple[float, ...]  # of each drop: by how much chi^2 is worse without it
    curve: Curve


def bar(n: int, level: float) -> float:
    """By how much chi^2 must be worse without a drop, so that a convex curve of n points with normal noise shows one in less than
    a share ``level`` of cases. From simulation (the tests repeat it): chi^2 has the tail exp(-x/2), and from few points the noise
    itself is uncertain."""
    return (30.0 + 2 * math.log(0.01 / level)) * (1 + 12 / n)


# ----------------------------------------------------------------------------------------------------- few points, and noise

def binned(t: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"], most: int = BINS) -> Curve:
    """Means of at most ``most`` bins, half of them equally wide and half equally wide in log(t - t_0). Points that stand out by
    more than their noise explains are moved to where it does."""
    t, y = np.asarray(t, np.float64), np.asarray(y, np.float64)
    count = np.ones(len(t))
    if len(t) > most:
        u = np.round((t - t[0]) / (t[-1] - t[0]), 12)  # of a point at an edge, rounding does not decide
        edges = np.union1d(np.linspace(0, 1, most // 2 + 1), np.round(np.geomspace(max(u[1], 1e-12), 1, most // 2 - 1), 12))
        starts = np.flatnonzero(np.diff(np.searchsorted(edges[:-1], u, side="right"), prepend=-1))
        count = np.diff(starts, append=len(t)).astype(np.float64)
        t, y = (np.add.reduceat(column, starts) / count for column in (t, y))
    s = np.maximum(_noise(t, y, count), max(FLOOR * float(np.ptp(y)), LEAST))
    middle = median_filter(y, 5, mode="nearest")  # leaves what falls all the time as it is
    return Curve(t, middle + np.clip(y - middle, -CUT * s, CUT * s), s)


def _noise(t: Numbers, y: Numbers, count: Numbers) -> Numbers:
    """From how far each point is off the line through its neighbours, by medians over a window."""
    step = np.diff(t)
    left = step[1:] / (step[1:] + step[:-1])
    off = y[1:-1] - left * y[:-2] - (1 - left) * y[2:]
    size = np.abs(off) / np.sqrt(1 / count[1:-1] + left**2 / count[:-2] + (1 - left)**2 / count[2:])
    half = min(WINDOW, len(size)) // 2
    padded = np.pad(size, half, mode="reflect") if half else size
    local = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), 1) / MAD
    return np.concatenate([local[:1], local, local[-1:]]) / np.sqrt(count)


def pieces(curve: Curve, penalty: float, least: int = 2) -> list[int]:
    """Where the straight pieces begin that fit a curve best (the last number is its length): the smallest sum of chi^2 and of a
    ``penalty`` for each piece, exactly, by optimal partitioning."""
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

def knots(curve: Curve, cuts: Sequence[int]) -> Numbers:
    """The ends of a polyline's pieces: both points at each cut, so that it can also jump there."""
    inner = sorted({i for cut in cuts[1:-1] for i in (cut - 1, cut)} - {0, len(curve.t) - 1})
    return curve.t[[0, *inner, len(curve.t) - 1]]


def bent(curve: Curve, at: Numbers, structure: Structure) -> tuple[float, Numbers]:
    """The best polyline with knots ``at`` whose curvature has the signs of a structure: its chi^2, and its values there."""
    sign = np.ones(len(at) - 2)
    for flat, steep in structure:
        sign[flat:steep] = -1.0
    columns = _columns(curve.t, at, sign) / curve.s[:, None]
    size = np.linalg.norm(columns, axis=0)
    free, rest = nnls(columns / size, curve.y / curve.s, maxiter=100 * len(size))
    return rest * rest, _columns(at, at, sign) @ (free / size)


def _columns(t: Numbers, at: Numbers, sign: Numbers) -> Numbers:
    """A line, whose two numbers may have any sign, and bends, which have theirs."""
    x, bends = ((v - at[0]) / (at[-1] - at[0]) for v in (t, at[1:-1]))
    one = np.ones_like(x)
    return np.column_stack([one, -one, x, -x, sign * np.maximum(x[:, None] - bends, 0.0)])


def fewest(curve: Curve, bar: float, least: float = 0.0) -> Shape:
    """The fewest drops that a curve needs: from all that a free polyline has, the one that matters least is taken away, until
    each that is left makes chi^2 better by ``bar`` and stands above the line under it (``excursion``) by ``least`` of the range.
    """
    at = knots(curve, pieces(curve, 3 * math.log(len(curve.t))))  # of a piece: two numbers and a place
    structure = _turns(np.diff(_free(curve, at)) / np.diff(at))
    chi, y = bent(curve, at, structure)
    bar *= max(1.0, chi / max(1, len(curve.t) - len(at)))  # what no polyline explains is noise too
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


def _free(curve: Curve, at: Numbers) -> Numbers:
    hats = np.column_stack([np.interp(curve.t, at, row) for row in np.eye(len(at))]) / curve.s[:, None]
    return np.asarray(np.linalg.lstsq(hats, curve.y / curve.s, rcond=None)[0])


def _turns(slopes: Numbers) -> Structure:
    """The flattest and the steepest piece of everything that looks like a drop."""
    ends = np.append(slopes[1:], np.inf)
    steep = [i for i in range(1, len(slopes)) if slopes[i] < slopes[i - 1] and slopes[i] <= ends[i]]
    begins = [0, *steep[:-1]]
    return tuple((a + int(np.argmax(slopes[a:p])), p) for a, p in zip(begins, steep, strict=False))


def _without(structure: Structure, j: int) -> Iterator[Structure]:
    """The ways to take a drop away: with the plateau before it, by union with the drop before, or with the plateau after it."""
    before, (flat, steep), after = structure[:j], structure[j], structure[j + 1:]
    yield before + after
    if before:
        yield (*before[:-1], (before[-1][0], steep), *after)
    if after:
        yield (*before, (flat, after[0][1]), *after[1:])


def excursion(t: Numbers, y: Numbers, structure: Structure, j: int) -> tuple[float, int, int, int]:
    """How far the plateau before a drop stands above the straight line under it, and three vertices: where that line touches the
    curve before the plateau (the foot of what was before), the shoulder of the drop, and its own foot.

    Shoulder and foot are where the curve is as steep as the line. Nothing changes if a line is added to the curve."""
    low = structure[j - 1][1] + 1 if j else 0
    high = structure[j + 1][0] + 1 if j + 1 < len(structure) else len(t) - 1
    touching = [low + i for i in _minorant(t[low:high + 1], y[low:high + 1])]
    under = np.interp(t[low:high + 1], t[touching], y[touching])
    last = structure[j][1] - low  # the shoulder is not behind the beginning of the steepest piece
    shoulder = low + int(np.argmax((y[low:high + 1] - under)[:last + 1]))
    a = max(i for i in touching if i <= shoulder)
    c = min(i for i in touching if i > shoulder)
    return float(y[shoulder] - under[shoulder - low]), a, shoulder, c


def _minorant(t: Numbers, y: Numbers) -> list[int]:
    """The vertices of the greatest convex function below the points."""
    hull: list[int] = []
    for i in range(len(t)):
        while len(hull) > 1 and (y[hull[-1]] - y[hull[-2]]) * (t[i] - t[hull[-2]]) >= (y[i] - y[hull[-2]]) * (t[hull[-1]]
                                                                                                          - t[hull[-2]]):
            hull.pop()
        hull.append(i)
    return hull
