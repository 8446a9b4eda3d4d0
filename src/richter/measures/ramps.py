"""Time of a drop of a curve. A smooth step, ``before + (after - before) / (1 + exp(-(t - time) / width))``, is fitted to the
points around it for all times and widths; the error follows from their probabilities. Needs no torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from richter.measures.inflections import NoisyCurve, Numbers, binned

SPAN = 2 * math.log(9)  # duration from a tenth of a step to nine tenths, in widths
TIMES, WIDTHS = 41, 17  # points of a grid
POINTS = 64  # number of points to which the surroundings of a step are reduced
FEWEST_INSIDE = 5  # points of a step whose noise can be estimated
PASSES = 8  # maximum number of refined grids
NEGLIGIBLE = 1e-6  # relative to the largest probability


class SmoothStep(NamedTuple):
    """A smooth step, with the standard error of its time."""

    time: float
    error: float
    width: float
    before: float
    after: float


def located(x: Numbers, z: Numbers, window: tuple[float, float]) -> SmoothStep:
    """Fit the step that a curve makes between two times; if it is narrower than a bin, use only the points around it."""
    near = 1e-9 * float(x[-1] - x[0])  # so that rounding does not decide about a point at an edge
    for _ in range(PASSES):
        inside = (x >= window[0] - near) & (x <= window[1] + near)
        if inside.sum() < FEWEST_INSIDE:  # a step between two points: its neighbours say what it looks like
            inside = np.zeros(len(x), bool)
            inside[np.argsort(np.abs(x - sum(window) / 2), kind="stable")[:FEWEST_INSIDE]] = True
        curve = binned(x[inside], z[inside], POINTS)
        step = fitted(curve)
        margin = 12 * max(SPAN * step.width, step.error)
        narrower = max(window[0], step.time - margin), min(window[1], step.time + margin)
        points = int(((x >= narrower[0]) & (x <= narrower[1])).sum())
        if inside.sum() <= len(curve.t) or points > 0.7 * inside.sum() or points < 24:
            break
        window = narrower
    return step


def fitted(curve: NoisyCurve) -> SmoothStep:
    """Average over the probabilities of times and widths, on grids that are refined where these are not negligible."""
    gaps, span = np.diff(curve.t), float(curve.t[-1] - curve.t[0])
    times, widths = (float(curve.t[0]), float(curve.t[-1])), (float(gaps.min()) / 10, span / 8)
    for _ in range(PASSES):
        t, w = np.linspace(*times, TIMES), np.geomspace(*widths, WIDTHS)
        chi, levels = _misfits(curve, t, w)
        scale = max(1.0, float(chi.min()) / max(1, len(curve.t) - 4))  # misfit from another form of the step counts as noise too
        p = np.exp(-(chi - chi.min()) / (2 * scale)) * (levels[0] > levels[1])  # only steps down
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
    return SmoothStep(when, math.hypot(spread, gaps[near] / math.sqrt(12)), float(np.exp((p * np.log(w)).sum())), before, after)


def _misfits(curve: NoisyCurve, times: Numbers, widths: Numbers) -> tuple[Float[np.ndarray, "t w"], Float[np.ndarray, "2 t w"]]:
    """Return chi^2 of the best step for each time and width, and its levels before and after."""
    up = 0.5 + 0.5 * np.tanh((curve.t - times[:, None, None]) / (2 * widths[:, None]))  # from 0 to 1 [t, w, n]
    weight = curve.s**-2.0 / (curve.s**-2.0).sum()
    mean, y = up @ weight, float(curve.y @ weight)
    spread = (up * up) @ weight - mean**2
    change = (up @ (weight * (curve.y - y))) / np.maximum(spread, 1e-12)  # no change if all points are on one side
    before = y - change * mean
    off = (curve.y - before[..., None] - change[..., None] * up) / curve.s
    return (off * off).sum(-1), np.stack([before, before + change])
