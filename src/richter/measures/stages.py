"""Learning in stages: plateaus and drops of a loss curve, emergence times of skills, and their agreement with predictions.
Numbers in, numbers out; needs no torch.

    seen = find(steps, loss)                   # a curve of any length, with noise
    seen.drops[0].time, seen.drops[0].error    # 302.1, 1.9
    str(seen)                                  # "2 stages: 1 to 0.402 at step 302 (298 to 306); ..."
    stages_of(run)                             # of the losses that a run logged, by their names
    emergence(steps, skills)                   # times at which several rising curves reach half of their last values
    agreement(measured, predicted)             # errors in decades, and whether the order is right

A drop is a fall that accelerates after a slower phase. Under gradient flow the loss of a linear model (a kernel, a network that
stays lazy) never accelerates: it is a mixture of decaying exponentials, which is convex, and so are power laws. Stages are
therefore evidence of nonlinear training, or of an outside change such as a schedule or other data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression, linear_sum_assignment

from richter.core import SelectionError
from richter.measures.inflections import MAD, Numbers, Shape, bar, binned, excursion, fewest
from richter.measures.ramps import SPAN, located

LEVEL = 0.01  # probability that a convex curve with noise shows a stage
LEAST = 0.02  # relative to the range of the curve; smaller drops do not count
FEWEST = 12  # smallest number of points of a curve
BLUR = 0.05  # relative to a drop's duration: uncertainty of the end of a plateau
LEVELS = 50  # ratio of the largest to the smallest loss above which the logarithm of a curve is analysed

Scale = Literal["linear", "log"]


@dataclass(frozen=True)
class Plateau:
    """A phase of slow change before a drop, or after the last one."""

    start: float
    end: float
    level: float  # median of the curve there
    error: float  # its standard error


@dataclass(frozen=True)
class Drop:
    """A fall that is faster than the phase before."""

    time: float  # half way from ``before`` to ``after``
    error: float  # its standard error, from noise, the distance of points, and the uncertainty of the plateau's end
    start: float  # times at a tenth and at nine tenths of the way
    end: float
    before: float  # the plateaus before and after, extrapolated to ``time``
    after: float
    evidence: float  # increase of chi^2 without this drop
    ended: bool = True  # False if the curve ends during the fall

    @property
    def height(self) -> float:
        """Fall of the curve."""
        return self.before - self.after

    @property
    def interval(self) -> tuple[float, float]:
        """Time of the drop minus and plus two standard errors."""
        return self.time - 2 * self.error, self.time + 2 * self.error

    def __str__(self) -> str:
        low, high = (max(0.0, v) for v in self.interval)
        going = "" if self.ended else ", and still falling"
        return f"{self.before:.3g} to {self.after:.3g} at step {_step(self.time)} ({_step(low)} to {_step(high)}){going}"


@dataclass(frozen=True)
class Stages:
    """The plateaus and the drops of a curve, in order of time."""

    drops: tuple[Drop, ...]
    plateaus: tuple[Plateau, ...]
    first: float  # first and last step of the curve
    last: float

    def __len__(self) -> int:
        return len(self.drops)

    @property
    def times(self) -> Float[np.ndarray, " drop"]:
        """Times of all drops."""
        return np.array([drop.time for drop in self.drops])

    def __str__(self) -> str:
        if not self.drops:
            return (f"no stages: from step {_step(self.first)} to {_step(self.last)} the fall never accelerates by more than the "
                    f"noise explains")
        return f"{len(self)} stage{'s' * (len(self) > 1)}: {'; '.join(map(str, self.drops))}"

    def to_json(self) -> dict[str, Any]:
        drops = [{"time": d.time, "low": d.interval[0], "high": d.interval[1], "start": d.start, "end": d.end, "before": d.before,
                  "after": d.after, "words": str(d)} for d in self.drops]
        return {"words": str(self), "drops": drops,
                "plateaus": [{"start": p.start, "end": p.end, "level": p.level, "error": p.error} for p in self.plateaus]}


# --------------------------------------------------------------------------------------------------------- stages of a curve

def find(steps: ArrayLike, values: ArrayLike, *, time: Scale = "linear", scale: Scale = "linear", level: float = LEVEL,
         least: float = LEAST) -> Stages:
    """Find the stages of a falling curve. ``level``: the probability that a convex curve with normal noise shows one. ``least``:
    the share of the curve's range by which a plateau must stand above the line under it.

    ``scale="log"`` analyses the logarithm of the values, so that later and smaller drops count as much as the first. With
    ``time="log"`` a drop is a fall that accelerates in log(step): this includes each decaying exponential of a linear model, but
    not power laws.
    """
    t, y = _curve(steps, values)
    if y.ndim > 1:
        raise SelectionError(f"values of shape {y.shape}: give one curve at a time. For the emergence times of several skills "
                             f"use emergence.")
    for name, kind in (("time", time), ("scale", scale)):
        if kind not in ("linear", "log"):
            raise SelectionError(f"{name}={kind!r}: use 'linear' or 'log'.")
    for name, share in (("level", level), ("least", least)):
        if not 0 < share < 1:
            raise SelectionError(f"{name}={share!r}: give a share above 0 and below 1.")
    if time == "log" and t[0] == 0:
        t, y = t[1:], y[1:]  # step 0 has no logarithm
    for name, kind, column in (("steps", time, t), ("values", scale, y)):
        if kind == "log" and not column.min() > 0:
            raise SelectionError(f"{name} down to {column.min():g} have no logarithm: give values above 0, or leave "
                                 f"{'time' if name == 'steps' else 'scale'}='linear'.")
    _enough(t)
    if np.ptp(y) <= 1e-12 * np.abs(y).max():
        return Stages((), (), float(t[0]), float(t[-1]))
    # avoids overflow of squares of huge values
    unit = 2.0 ** math.floor(math.log2(np.abs(y).max())) if scale == "linear" else 1.0
    x, z = np.log(t) if time == "log" else t, np.log(y) if scale == "log" else y / unit
    curve = binned(x, z)
    drops = _drops(x, z, fewest(curve, bar(len(curve.t), level), least), least)
    plateaus = [_back(plateau, time, scale, unit) for plateau in _plateaus(x, z, drops)]
    return Stages(tuple(_back(drop, time, scale, unit) for drop in drops), tuple(plateaus), float(t[0]), float(t[-1]))


def stages_of(run: Any, **options: Any) -> dict[str, Stages]:
    """Stages of every curve of a run (``richter.runs.load``) with ``loss`` in its name and enough points. If a loss falls by more
    than a factor of 50, its logarithm is analysed, unless ``scale`` is given."""
    stages_by_name = {name: stages_in(run.scalars(name), **options) for name in run.scalar_names if is_loss(name)}
    return {name: stages for name, stages in stages_by_name.items() if stages is not None}


def is_loss(name: str) -> bool:
    """Return whether a scalar's name says that it is a loss."""
    return "loss" in name.lower()


def stages_in(series: Sequence[Any], **options: Any) -> Stages | None:
    """Stages of a curve as runs store it, steps and values; None if it has too few numbers."""
    t, y = (np.asarray(column, np.float64) for column in series[:2])
    finite = np.isfinite(y)
    t, y = t[finite], y[finite]
    if len(t) < FEWEST:
        return None
    wide = y.min() > 0 and y.max() > LEVELS * y.min()
    return find(t, y, **{"scale": "log" if wide else "linear", **options})


def _drops(x: Numbers, z: Numbers, shape: Shape, least: float) -> list[Drop]:
    """Fit each drop as a smooth step on a line, to the points between the middles of its plateaus."""
    feet = [excursion(shape.t, shape.y, shape.structure, j)[1:] for j in range(len(shape.structure))]
    room, lows = least * float(np.ptp(shape.y)), np.minimum.accumulate(shape.y)
    drops = []
    for j, (a, b, c) in enumerate(feet):
        after = shape.t[feet[j + 1][1]] if j + 1 < len(feet) else shape.t[-1]
        left, right = _window(shape.curve.t, *map(float, (shape.t[a], shape.t[b], shape.t[c], after)))
        # these are means of bins, and the first and last bins contain further points
        first, last = shape.curve.t[0], shape.curve.t[-1]
        step = located(x, z, (float(x[0]) if left <= first else left, float(x[-1]) if right >= last else right))
        if lows[b] - step.after < max(room, (step.before - step.after) / 2):  # a spike ends at the level where it began
            continue
        if (x > step.time - SPAN / 2 * step.width).sum() < 2:  # a single last point may be an outlier
            continue
        ended = shape.structure[j][1] < len(shape.t) - 2
        drops.append(Drop(step.time, math.hypot(step.error, BLUR * SPAN * step.width), step.time - SPAN / 2 * step.width,
                          step.time + SPAN / 2 * step.width, step.before, step.after, shape.evidence[j], ended))
    return _falling(x, z, drops)


def _falling(x: Numbers, z: Numbers, drops: list[Drop]) -> list[Drop]:
    """Let no drop begin above the end of the one before: lines that are fitted to each drop by itself may cross. Both levels are
    then the median of the curve between the two times."""
    for j in range(len(drops) - 1):
        one, other = drops[j:j + 2]
        if other.before > one.after:
            low, high = sorted((min(one.end, other.start), max(one.end, other.start)))
            between = z[(x >= low) & (x <= high)]
            level = float(np.median(between)) if len(between) else (one.after + other.before) / 2
            level = min(max(level, other.after), one.before)
            drops[j:j + 2] = replace(one, after=level), replace(other, before=level)
    return drops


def _window(t: Numbers, foot: float, shoulder: float, own: float, after: float) -> tuple[float, float]:
    """Window of twice the duration of a drop and at least a dozen points on both sides, within the middles of its plateaus."""
    b, c = (int(np.searchsorted(t, v)) for v in (shoulder, own))
    left, right = (t[max(0, b - 12)], t[min(len(t) - 1, c + 12)])
    return (max((foot + shoulder) / 2, min(left, shoulder - 2 * (own - shoulder))),
            min((own + after) / 2, max(right, own + 2 * (own - shoulder))))


def _plateaus(x: Numbers, z: Numbers, drops: Sequence[Drop]) -> list[Plateau]:
    """Plateaus between the drops, with their levels."""
    begins, ends = [float(x[0]), *(d.end for d in drops)], [*(d.start for d in drops), float(x[-1])]
    plateaus = []
    for a, b in zip(begins, ends, strict=True) if drops else ():
        inside = z[(x >= a) & (x <= b)]
        if len(inside) > 1:
            spread = float(np.median(np.abs(np.diff(inside)))) / 0.6745 / math.sqrt(2)
            plateaus.append(Plateau(a, b, float(np.median(inside)), 1.2533 * spread / math.sqrt(len(inside))))
    return plateaus


def _back(stage: Any, time: Scale, scale: Scale, unit: float) -> Any:
    """Convert times and levels back from logarithms and units."""
    if time == "log":
        t = math.exp(stage.time) if isinstance(stage, Drop) else 0.0
        stage = replace(stage, start=math.exp(stage.start), end=math.exp(stage.end),
                        **({"time": t, "error": t * stage.error} if isinstance(stage, Drop) else {}))
    levels = {k: getattr(stage, k) for k in ("before", "after", "level") if hasattr(stage, k)}
    levels = {k: math.exp(v) if scale == "log" else unit * v for k, v in levels.items()}
    size = levels.get("level", 1.0) if scale == "log" else unit
    return replace(stage, **levels, **({"error": size * stage.error} if isinstance(stage, Plateau) else {}))


# ------------------------------------------------------------------------------------------------- emergence and predictions

@dataclass(frozen=True)
class EmergenceTimes:
    """Times at which each of several curves reached a share of its last value: arrays with one entry per curve."""

    times: Float[np.ndarray, " skill"]  # infinite if it never did
    errors: Float[np.ndarray, " skill"]
    finals: Float[np.ndarray, " skill"]
    share: float
    last: float

    def __str__(self) -> str:
        words = [f"{i + 1}: step {_step(t)} (±{_step(e)})" if np.isfinite(t) else f"{i + 1}: not by step {_step(self.last)}"
                 for i, (t, e) in enumerate(zip(self.times, self.errors, strict=True))]
        return f"at {self.share:.0%} of the last value: {'; '.join(words)}"


def emergence(steps: ArrayLike, values: ArrayLike, *, share: float = 0.5, final: ArrayLike | None = None,
              time: Scale = "linear") -> EmergenceTimes:
    """Find when rising curves ``values`` [skill, t] (or one curve [t]), e.g. strengths of skills or modes, reach a ``share`` of
    their ``final`` values (default: their medians over the last tenth).

    Curves are interpolated linearly (``time="log"``: in log(step)). Noisy curves are made monotonic by isotonic regression. The
    error combines half the time from one standard deviation of the noise below to one above, and the distance of points.
    """
    t, y = _curve(steps, values)
    _enough(t)
    if y.ndim > 2:
        raise SelectionError(f"values of shape {y.shape}: give curves [skill, t], or one curve [t].")
    if not 0 < share < 1:
        raise SelectionError(f"share={share!r}: give a share of the last value above 0 and below 1.")
    if time not in ("linear", "log"):
        raise SelectionError(f"time={time!r}: use 'linear' or 'log'.")
    y = np.atleast_2d(y)
    last = np.median(y[:, -max(3, len(t) // 10):], 1)
    goals = np.asarray(last if final is None else final, np.float64)
    if goals.ndim > 1 or goals.size not in (1, len(y)):
        raise SelectionError(f"final of shape {goals.shape} for {len(y)} curves: give one value for each, or one for all.")
    finals = np.broadcast_to(goals, len(y))
    if not (finals > 0).all():
        raise SelectionError(f"a curve that ends at {finals.min():.3g} never reaches a share of it: skills that emerge rise from "
                             f"0. For a loss give what has been learned, loss[0] - loss; for a skill that is not yet learned, "
                             f"give its limit with final=.")
    both = np.array([_crossing(t, row, share * goal, time) for row, goal in zip(y, finals, strict=True)])
    return EmergenceTimes(both[:, 0], both[:, 1], np.array(finals), share, float(t[-1]))


def _crossing(t: Numbers, y: Numbers, goal: float, time: Scale) -> tuple[float, float]:
    """Time at which a curve crosses a level, and its standard error."""
    rising = np.asarray(isotonic_regression(y).x)
    if rising[-1] < goal:
        return math.inf, math.nan
    i = int(np.searchsorted(rising, goal))
    near = slice(max(0, i - 50), i + 51)
    noise = float(np.median(np.abs(np.diff(y[near], 2)))) / MAD / math.sqrt(6) if len(y[near]) > 2 else 0.0
    when, low, high = (_at(t, rising, level, time) for level in (goal, goal - noise, goal + noise))
    gap = t[i] - t[i - 1] if i else t[1] - t[0]
    return when, math.hypot((min(high, float(t[-1])) - low) / 2, gap / math.sqrt(12))


def _at(t: Numbers, rising: Numbers, level: float, time: Scale) -> float:
    i = int(np.searchsorted(rising, level))
    if i == 0 or i == len(t):
        return float(t[0]) if i == 0 else math.inf
    share = (level - rising[i - 1]) / (rising[i] - rising[i - 1])
    if time == "log" and t[i - 1] > 0:
        return float(t[i - 1] * (t[i] / t[i - 1])**share)
    return float(t[i - 1] + share * (t[i] - t[i - 1]))


@dataclass(frozen=True)
class Agreement:
    """Comparison of measured with predicted times."""

    decades: Float[np.ndarray, " skill"]  # log10(measured / predicted); NaN if one of them is missing
    rank: float  # Kendall's tau: 1 if the order is the predicted one; NaN for fewer than two times

    @property
    def typical(self) -> float:
        """Median absolute error in decades."""
        return float(np.nanmedian(np.abs(self.decades)))

    @property
    def worst(self) -> float:
        """Largest absolute error in decades."""
        return float(np.nanmax(np.abs(self.decades)))

    @property
    def missing(self) -> int:
        """Number of skills of which one of the two times is missing."""
        return int(np.isnan(self.decades).sum())

    def __str__(self) -> str:
        gone = f", {self.missing} of {len(self.decades)} without a time" if self.missing else ""
        order = "" if math.isnan(self.rank) else f"; order {'as predicted' if self.rank == 1 else f'by Kendall {self.rank:.2f}'}"
        return f"off by {self.typical:.2g} decades typically, {self.worst:.2g} at worst{gone}{order}"


def agreement(measured: ArrayLike, predicted: ArrayLike) -> Agreement:
    """Compare times of the same skills in the same order: errors in decades, and the rank correlation. Times that are NaN or
    infinite (never reached) count as missing. For stages, whose number may differ, use
    ``agreement(matched(times, predicted), predicted)``."""
    a, b = (np.atleast_1d(np.asarray(times, np.float64)) for times in (measured, predicted))
    if a.shape != b.shape or a.ndim != 1:
        raise SelectionError(f"measured times of shape {a.shape} and predicted ones of {b.shape}: give one of each for every "
                             f"skill. Stages may differ in number; assign them with matched(...).")
    both_finite = np.isfinite(a) & np.isfinite(b)
    if not both_finite.any() or not (np.minimum(a, b)[both_finite] > 0).all():
        raise SelectionError("times must be above 0, and at least one must be both measured and predicted: an error in decades "
                             "is the logarithm of their ratio.")
    decades = np.full(len(a), np.nan)
    decades[both_finite] = np.log10(a[both_finite] / b[both_finite])
    i, j = np.triu_indices(int(both_finite.sum()), 1)
    same = np.sign(a[both_finite][i] - a[both_finite][j]) * np.sign(b[both_finite][i] - b[both_finite][j])
    return Agreement(decades, float(same.mean()) if len(same) else math.nan)


def matched(measured: ArrayLike, predicted: ArrayLike, within: float = 1.0) -> Float[np.ndarray, " predicted"]:
    """Assign a measured time to each predicted one. Each is used once, and the sum of errors in decades is minimal; NaN if none
    is within ``within`` decades."""
    a, b = (np.atleast_1d(np.asarray(values, np.float64)) for values in (measured, predicted))
    for name, times in (("measured", a), ("predicted", b)):
        if not (times > 0).all() or not np.isfinite(times).all():
            raise SelectionError(f"{name} times must be finite and above 0: their logarithms are compared.")
    if not within > 0:
        raise SelectionError(f"within={within!r}: give a number of decades above 0.")
    off = np.minimum(np.abs(np.log10(a[:, None] / b)), 1e3 * within)
    assigned = np.full(len(b), np.nan)
    for i, j in zip(*linear_sum_assignment(np.where(off <= within, off, 1e3 * within)), strict=True):
        if off[i, j] <= within:
            assigned[j] = a[i]
    return assigned


def _curve(steps: ArrayLike, values: ArrayLike) -> tuple[Numbers, Numbers]:
    """Steps and values as arrays, checked."""
    t, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    if t.ndim != 1 or y.shape[-1:] != t.shape:
        raise SelectionError(f"steps of shape {t.shape} with values of shape {y.shape}: give one value for every step.")
    if not np.isfinite(t).all() or not (np.diff(t) > 0).all():
        raise SelectionError("steps must be finite and increase from point to point: sort the points, and remove "
                             "duplicates.")
    if not np.isfinite(y).all():
        raise SelectionError(f"{(~np.isfinite(y)).sum()} of {y.size} values are NaN or infinite, and a stage could be a gap. "
                             f"Leave out steps without a measurement, and everything after a loss has diverged.")
    return t, y


def _enough(t: Numbers) -> None:
    """Raise an error for too few points."""
    if len(t) < FEWEST:
        raise SelectionError(f"a curve of {len(t)} points is too short to tell a stage from noise: it needs at least {FEWEST} "
                             f"points, some of them on each plateau. Log more often.")


def _step(t: float) -> str:
    """Step as text."""
    return f"{t:,.0f}" if t >= 100 else f"{t:.3g}"
