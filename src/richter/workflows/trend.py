"""Forecast of a training loss: its local power law goes on, as fast and as slow as those of real trainings did.

    trend = forecast(steps, losses)            # 400 steps
    trend.predict([800, 4000], 0.9)            # values, and the ends of their intervals; NaN if there is no forecast
    trend.refusal                              # why there is none: a plateau, a drop that has just begun, a rate that decays

No law of ``workflows.laws`` forecasts a training: a network that begins to interpolate falls faster than its power law, and one
that is limited by its size more slowly. With -m the mean slope of log loss against log step over the last factor of nine, the
forecast at h times the last step is R m log(h) below the curve. The middle of R and its 90 % range (RANGE) are those of the
training curves of ``tests/data/curves.csv`` (``benchmarks/curves.py``: MLPs, CNNs and GPTs). If the same rule missed the end of
the curve itself when it was applied to its first half or tenth, the interval is wider by as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import norm

from richter.workflows.laws import Numbers

WINDOW = 3.0  # the slope is the mean over the last two windows, each a factor of three in steps
FEWEST = 4  # points in a window
BIN = 0.05  # width of bins in log step, over which losses are averaged
FAR = 10.0  # horizon, in units of the last step, up to which forecasts were validated
RANGE = {2.0: (0.85, 2.0), 10.0: (1.3, 1.9)}  # by horizon: the middle of R, and the factor on both sides for 90 %
NOISE = 0.5  # of the scatter of bins, added at both ends for 90 %
FALLEN = 0.2  # in log loss: a curve that has fallen by less may be on its first plateau
BEGUN, SLOWED = 0.12, 0.25  # ratios of the slopes in the two windows beyond which a drop has just begun, or the fall has slowed
SIGNIFICANT = 2.0  # standard errors by which the last slope must differ from zero
DECAYED = 0.1  # a learning rate that is lower than before by this share decays


class Slope(NamedTuple):
    level: float  # log loss at the end of the window
    slope: float  # minus the slope of log loss against log step
    error: float
    noise: float  # standard deviation of a bin


class Backtest(NamedTuple):
    """Forecast from the first part of a curve by the same rule, and what was measured."""

    step: float  # where that part ends
    at: float  # step that was forecast
    value: float
    low: float  # ends of its 90 % interval
    high: float
    measured: float

    @property
    def error(self) -> float:
        """Error in half widths of the interval."""
        off, value = math.log(self.measured), math.log(self.value)
        return abs(off - value) / (math.log(self.high) - value if off > value else value - math.log(self.low))

    def __str__(self) -> str:
        return (f"from step {self.step:,.0f} the same rule forecast {self.value:.3g} ({self.low:.3g} to {self.high:.3g}) at step "
                f"{self.at:,.0f}, and {self.measured:.3g} was measured")


@dataclass(frozen=True)
class Trend:
    """The end of a training curve, and what follows if it goes on as real trainings do."""

    last: float  # step
    level: float = math.nan  # log loss there
    slope: float = math.nan
    noise: float = math.nan
    refusal: str = ""  # why there is no forecast
    backtests: tuple[Backtest, ...] = ()

    @property
    def widening(self) -> float:
        """Factor by which intervals are wider because the rule missed the end of this curve."""
        return max([1.0, *(test.error for test in self.backtests)])

    def predict(self, x: ArrayLike, confidence: float = 0.9) -> tuple[Numbers, Numbers, Numbers]:
        """Forecast the loss at steps after the last one, and the ends of its interval. NaN if there is no forecast, and beyond
        ten times the last step."""
        ratio = np.log(np.atleast_1d(np.asarray(x, np.float64)) / self.last)
        usable = (ratio >= 0) & (ratio <= math.log(FAR) + BIN) & (not self.refusal)
        z = float(norm.ppf(0.5 + confidence / 2) / norm.ppf(0.95)) * self.widening
        place = np.clip((ratio - math.log(2)) / math.log(FAR / 2), 0, 1)
        middle, factor = (RANGE[2.0][i] ** (1 - place) * RANGE[FAR][i] ** place for i in (0, 1))
        fall, reach, noise = middle * self.slope * ratio, factor**z, z * NOISE * self.noise
        logs = (self.level - fall, self.level - fall * reach - noise, self.level - fall / reach + noise)
        value, low, high = (np.where(usable, np.exp(log), np.nan) for log in logs)
        return value, low, high


def forecast(t: Numbers, y: Numbers, rates: Numbers | None = None) -> Trend:
    """Read the trend of a training curve: losses ``y`` > 0 at increasing steps ``t`` > 0, every step or some of them. ``rates``:
    the learning rate at each; after it has decayed by a tenth there is no forecast, because the curve does not show the rest of
    the schedule."""
    if rates is not None and rates[-1] < (1 - DECAYED) * rates.max():
        return Trend(float(t[-1]), refusal=f"the learning rate decays (from {rates.max():.3g} to {rates[-1]:.3g}): what follows "
                                           f"depends on the schedule to come, which the curve does not show")
    trend = _trend(t, y)
    backtests = []
    for horizon in RANGE if not trend.refusal else ():
        then = t <= t[-1] / horizon * (1 + 1e-9)
        earlier = _trend(t[then], y[then]) if then.sum() > 2 * FEWEST else None
        if earlier is not None and not earlier.refusal:
            at = min(float(t[-1]), FAR * earlier.last)
            value, low, high = (float(v[0]) for v in earlier.predict(at))
            backtests.append(Backtest(earlier.last, at, value, low, high, math.exp(trend.level)))
    return replace(trend, backtests=tuple(backtests))


def _trend(t: Numbers, y: Numbers) -> Trend:
    last = float(t[-1])
    t, y = averaged_bins(t, y)
    z = np.log(y)
    now, before = _slope(t, z, last / WINDOW, last), _slope(t, z, last / WINDOW**2, last / WINDOW)
    if now is None or before is None:
        return Trend(last, refusal=f"it needs {FEWEST} points in each of the last two factors of {WINDOW:g} in steps, and the "
                                   f"curve begins too late or has too few: log more often")
    slope = (now.slope + before.slope) / 2
    trend = Trend(last, now.level, slope, now.noise)
    fallen = float(z[:3].mean()) - now.level
    words = ""
    if fallen < FALLEN:
        words = (f"the loss has fallen by {max(0.0, 1 - math.exp(-fallen)):.0%} only: it may be on the plateau before its first "
                 f"drop, and when that comes the curve does not show")
    elif now.slope < SIGNIFICANT * now.error or now.slope < SLOWED * before.slope:
        words = (f"the fall has slowed down (slope {-now.slope:.2g} after {-before.slope:.2g} in log loss against log step): "
                 f"whether this is its floor or a plateau before the next drop the curve does not show")
    elif before.slope < BEGUN * now.slope:
        words = (f"a drop has just begun (slope {-now.slope:.2g} after {-before.slope:.2g} in log loss against log step), and "
                 f"where it ends the curve does not show")
    return replace(trend, refusal=words)


def averaged_bins(t: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
    """Average losses over bins of BIN in log step; the step of a bin is the geometric mean of its steps."""
    place = np.floor(np.log(t / t[-1]) / BIN + 1e-9).astype(int)
    starts = np.flatnonzero(np.diff(place, prepend=place[0] - 1))
    count = np.diff(starts, append=len(t))
    return np.exp(np.add.reduceat(np.log(t), starts) / count), np.add.reduceat(y, starts) / count


def _slope(t: Numbers, z: Numbers, first: float, last: float) -> Slope | None:
    """Fit a line to log loss against log step; None with too few points."""
    inside = (t >= first * (1 - 1e-9)) & (t <= last * (1 + 1e-9))
    if inside.sum() < FEWEST:
        return None
    x = np.log(t[inside] / last)
    slope, level = np.polyfit(x, z[inside], 1)
    noise = float((z[inside] - level - slope * x).std(ddof=2))
    return Slope(float(level), -float(slope), noise / float(np.sqrt(((x - x.mean()) ** 2).sum())), noise)
