"""When does a curve drop? A smooth step, ``before + (after - before) / (1 + exp(-(t - time) / width))``, is fitted to the points
around it for all times and widths at once; how probable each of them is, is the error. Needs no torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from richter.measures.inflections import Curve, Numbers, binned

SPAN = 2 * math.log(9)  # widths from a tenth of a step to nine tenths
TIMES, WIDTHS = 41, 17  # of a grid
POINTS = 64  # to which the points around a step are reduced
PASSES = 8  # finer grids, at most
NEGLIGIBLE = 1e-6  # a probability, of the largest


class Step(NamedTuple):
    """A step, and the standard error of its time."""

    time: float
    error: float
    width: float
    before: float
    after: float


def located(x: Numbers, z: Numbers, window: tuple[float, float]) -> Step:
    """The step that a curve makes between two times; where it is narrower than a bin, from the points around it alone."""
    near = 1e-9 * float(x[-1] - x[0])  # of a point at an edge, rounding does not decide
    for _ in range(PASSES):
        inside = (x >= window[0] - near) & (x <= window[1] + near)
        curve = binned(x[inside], z[inside], POINTS)
        step = fitted(curve)
        margin = 12 * max(SPAN * step.width, step.error)
        narrower = max(window[0], step.time - margin), min(window[1], step.time + margin)
        points = int(((x >= narrower[0]) & (x <= narrower[1])).sum())
        if inside.sum() <= len(curve.t) or points > 0.7 * inside.sum() or points < 24:
            break
        window = narrower
    return step


def fitted(curve: Curve) -> Step:
    """Means over the probabilities of times and widths, on grids that close in on where these are not negligible."""
    gaps, span = np.diff(curve.t), float(curve.t[-1] - curve.t[0])
    times, widths = (float(curve.t[0]), float(curve.t[-1])), (float(gaps.min()) / 10, span / 8)
    for _ in range(PASSES):
        t, w = np.linspace(*times, TIMES), np.geomspace(*widths, WIDTHS)
        chi, levels = _misfits(curve, t, w)
        scale = max(1.0, float(chi.min()) / max(1, len(curve.t) - 4))  # a step of another form is noise too
        p = np.exp(-(chi - chi.min()) / (2 * scale)) * (levels[0] > levels[1])  # down, not up
        if not p.any():
            p[:] = 1.0
        rows, columns = (np.flatnonzero((p > NEGLIGIBLE * p.max()).any(axis)) for axis in (1, 0))
        if len(rows) > TIMES / 2 and len(columns) > WIDTHS / 2:
            break
        times = float(t[max(0, rows[0] - 1)]), float(t[min(TIMES - 1, rows[-1] + 1)])
        widths = float(w[max(0, columns[0] - 1)]), float(w[min(WIDTHS - 1, columns[-1] + 1)])
    p /= p.sum()
    when = float((p * t[:, None]).sum())
    spread = float(np.sqrt((p * (t[:, None] - when)**2).sum() + (t[1] - t[0])**2 / 12))
    near = int(np.clip(np.searchsorted(curve.t, when), 1, len(gaps))) - 1
    before, after = (p * levels).sum((1, 2)).tolist()
    return Step(when, math.hypot(spread, gaps[near] / math.sqrt(12)), float(np.exp((p * np.log(w)).sum())), before, after)


def _misfits(curve: Curve, times: Numbers, widths: Numbers) -> tuple[Float[np.ndarray, "t w"], Float[np.ndarray, "2 t w"]]:
    """chi^2 of the best step with each time and width, and its levels before and after."""
    up = 0.5 + 0.5 * np.tanh((curve.t - times[:, None, None]) / (2 * widths[:, None]))  # from 0 to 1 [t, w, n]
    weight = curve.s**-2.0 / (curve.s**-2.0).sum()
    mean, y = up @ weight, float(curve.y @ weight)
    spread = (up * up) @ weight - mean**2
    change = (up @ (weight * (curve.y - y))) / np.maximum(spread, 1e-12)  # where all points are on one side there is none
    before = y - change * mean
    off = (curve.y - before[..., None] - change[..., None] * up) / curve.s
    return (off * off).sum(-1), np.stack([before, before + change])
