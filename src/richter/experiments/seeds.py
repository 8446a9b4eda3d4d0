"""Summary of a claim's numbers over several seeds: one number, and its interval.

>>> summary([0.91, 0.94, 0.93, 0.95, 0.92], "median")
SeedSummary(value=0.93, interval=[0.91, 0.95], coverage=0.9375)

``median``: the interval goes from one order statistic to its mirror image, the innermost pair that covers the true median
with 95 %. Fewer than six values have no such pair. Their interval goes from the smallest to the largest value, which covers
the median with 1 - 2^(1-n), 94 % for five values (the percentile bootstrap gives the same ends). ``mean``: Student's
interval. Both assume that seeds are drawn independently and alike; only Student's asks for a normal distribution. ``each``:
the share of values inside the bar, with Wilson's interval. It is shown and does not decide, because it would need 35 seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from richter.core import Interval

By = Literal["median", "mean", "each"]
WAYS: tuple[By, By, By] = ("median", "mean", "each")
LEVEL = 0.95  # of intervals, where there are values enough
ENOUGH = 5  # values; with fewer nothing is decided: the range of four covers their median with 87 % only
SHARE = 0.9  # of the values that must lie in the bar, for a claim about each; of its rivals fewer than half may

ON_AVERAGE, TOO_FEW = "holds on average", "too few seeds"  # verdicts on numbers that are in their bar


class SeedSummary(NamedTuple):
    """Summary of all values. It has no interval if there are fewer than two values or if one is not finite."""

    value: float
    interval: Interval | None
    coverage: float  # with which the interval contains what infinitely many seeds would give


def summary(values: Sequence[float], by: By, expect: Interval | None = None) -> SeedSummary:
    """Median, mean, or share of the values in ``expect``. A median or mean with NaN among the values is NaN; a share counts
    NaN as outside."""
    x = sorted(map(float, values))
    if not x:
        return SeedSummary(math.nan, None, 0.0)
    if by == "each":
        inside = sum(math.isfinite(v) and expect is not None and v in expect for v in x)
        return SeedSummary(inside / len(x), wilson(inside, len(x)), LEVEL)
    value = math.nan if any(map(math.isnan, x)) else statistics.median(x) if by == "median" else statistics.fmean(x)
    if len(x) < 2 or not all(map(math.isfinite, x)):
        return SeedSummary(value, None, 0.0)
    return SeedSummary(value, *(_of_median(x) if by == "median" else _of_mean(x)))


def wilson(inside: int, n: int) -> Interval:
    """Wilson's interval of a share."""
    from scipy.stats import binomtest  # loaded here, because it takes half a second
    return Interval(*map(float, binomtest(inside, n).proportion_ci(LEVEL, method="wilson")))


def _of_median(x: list[float]) -> tuple[Interval, float]:
    """Interval between two order statistics and its coverage, by the binomial distribution of a fair coin."""
    from scipy.special import bdtr
    n = len(x)
    rank = max([r for r in range(1, n // 2 + 1) if 2 * bdtr(r - 1, n, 0.5) <= 1 - LEVEL], default=1)
    return Interval(x[rank - 1], x[n - rank]), 1 - 2 * float(bdtr(rank - 1, n, 0.5))


def _of_mean(x: list[float]) -> tuple[Interval, float]:
    """Student's interval of the mean and its coverage."""
    from scipy.stats import t
    half = float(t.ppf((1 + LEVEL) / 2, len(x) - 1)) * statistics.stdev(x) / math.sqrt(len(x))
    return Interval(statistics.fmean(x) - half, statistics.fmean(x) + half), LEVEL
