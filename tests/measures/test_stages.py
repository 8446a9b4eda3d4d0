"""Plateaus and drops of curves: planted ones, none where there are none, laws, what is said, and of runs; emergence of skills."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from richter import runs
from richter.core import SelectionError
from richter.measures.inflections import NoisyCurve, _minorant, bent, binned, fewest, knots, pieces
from richter.measures.ramps import fitted
from richter.measures.stages import Stages, agreement, emergence, find, matched, stages_of
from richter.report import figures
from richter.report.html import report
from richter.report.query import Query
from richter.report.shelf import Chosen, Shelf
from richter.report.views import tabs


def fall(t: Any, middle: float, width: float) -> Any:
    """A step from 1 to 0."""
    return 0.5 - 0.5 * np.tanh((t - middle) / (2 * width))


T = np.linspace(0, 1000, 300)
TIMES = (300.0, 700.0)
PLANTED = 0.6 * fall(T, TIMES[0], 15) + 0.4 * fall(T, TIMES[1], 30)
CONVEX = {"flat": 0 * T + 1, "a line": 1 - T / 2000, "an exponential": np.exp(-T / 100),
          "two of them": np.exp(-T / 10) + np.exp(-T / 300),
          "a power law": (1 + T) ** -0.5, "with an offset": (1 + T / 50) ** -1.5 + 0.3}


def noisy(y: np.ndarray, size: float, seed: int) -> np.ndarray:
    return y + size * np.random.default_rng(seed).standard_normal(y.shape)


# ------------------------------------------------------------------------------------------------------------- what was planted

def test_planted_stages_without_noise() -> None:
    seen = find(T, PLANTED)
    assert len(seen) == 2
    for drop, time, levels in zip(seen.drops, TIMES, ((1.0, 0.4), (0.4, 0.0)), strict=True):
        assert abs(drop.time - time) < 0.5
        assert (drop.before, drop.after) == pytest.approx(levels, abs=0.01)
        assert drop.start < drop.time < drop.end
        assert drop.ended
    assert [p.level for p in seen.plateaus] == pytest.approx([1.0, 0.4, 0.0], abs=0.02)
    np.testing.assert_allclose([d.end - d.start for d in seen.drops], [2 * math.log(9) * 15, 2 * math.log(9) * 30], rtol=0.1)


@pytest.mark.parametrize(("points", "noise"), [(60, 0.03), (300, 0.05), (3000, 0.1)])
def test_planted_times_lie_in_their_intervals(points: int, noise: float) -> None:
    """Of 20 curves with other noise: both stages in each, and at least 36 of 40 times within two of their standard errors."""
    t = np.linspace(0, 1000, points)
    y = 0.6 * fall(t, TIMES[0], 15) + 0.4 * fall(t, TIMES[1], 30)
    seen = [find(t, noisy(y, noise, seed)) for seed in range(20)]
    assert [len(s) for s in seen] == [2] * 20
    inside = [d.interval[0] <= time <= d.interval[1] for s in seen for d, time in zip(s.drops, TIMES, strict=True)]
    assert sum(inside) >= 36
    assert max(d.error for s in seen for d in s.drops) < 60  # and the intervals are not empty words


@pytest.mark.long
def test_planted_times_lie_in_their_intervals_over_many_seeds() -> None:
    for points, noise, at_least in ((60, 0.05, 0.9), (300, 0.1, 0.9), (3000, 0.2, 0.9), (100_000, 0.5, 0.9)):
        t = np.linspace(0, 1000, points)
        y = 0.6 * fall(t, TIMES[0], 15) + 0.4 * fall(t, TIMES[1], 30)
        inside = []
        for seed in range(100):
            for d in find(t, noisy(y, noise, seed)).drops:
                time = min(TIMES, key=lambda v: abs(v - d.time))
                inside.append(d.interval[0] <= time <= d.interval[1])
        assert len(inside) >= 170
        assert np.mean(inside) >= at_least, (points, noise, np.mean(inside))


def test_stages_decades_apart_in_a_million_points() -> None:
    """The time it takes is bounded, and a drop at step 200 of a million is seen as sharply as the last."""
    t = np.arange(1_000_000)
    times = (200.0, 5_000.0, 300_000.0)
    y = sum(fall(t, time, time / 40) for time in times)
    seen = find(t, noisy(np.asarray(y), 0.05, 0))
    assert len(seen) == 3
    for drop, time in zip(seen.drops, times, strict=True):
        assert drop.interval[0] <= time <= drop.interval[1]
        assert drop.error < 0.05 * time


def test_a_sudden_drop_is_seen_to_a_step() -> None:
    t = np.arange(100_000)
    seen = find(t, noisy(np.where(t < 61_803, 1.0, 0.5), 0.05, 1))
    assert len(seen) == 1
    assert abs(seen.drops[0].time - 61_802.5) < 5
    assert seen.drops[0].error < 20


def test_a_drop_that_has_not_ended() -> None:
    t = np.linspace(0, 310, 100)
    (drop,) = find(t, noisy(fall(t, 300, 10), 0.01, 0)).drops
    assert not drop.ended
    assert "still falling" in str(drop)


# --------------------------------------------------------------------------------------------------------- where there are none

@pytest.mark.parametrize("points", [40, 300, 500, 3000])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_drop_among_the_last_points(points: int, noise: float) -> None:
    """Also where they are in one bin with others. Of a single point nobody knows whether it is a slip."""
    x = np.arange(points)
    y = noise * np.random.default_rng(points).standard_normal(points)
    assert len(find(x, y + (x < points - 1))) == 0
    (drop,) = find(x, y + (x < points - 3)).drops
    assert abs(drop.time - (points - 3.5)) <= max(1.0, 3 * drop.error)
    assert drop.after == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize("name", CONVEX)
def test_convex_curves_have_no_stages(name: str) -> None:
    assert len(find(T, CONVEX[name])) == 0
    assert sum(len(find(T, noisy(CONVEX[name], 0.05, seed))) for seed in range(20)) == 0


@pytest.mark.parametrize("points", [12, 30, 100])
def test_coarse_power_laws_have_no_stages(points: int) -> None:
    t = np.linspace(0, 1000, points)
    for y in ((1 + t) ** -0.5, np.exp(-t / 30), 1 / (1 + t)):
        assert len(find(t, y)) == 0


@pytest.mark.long
@pytest.mark.parametrize("points", [12, 20, 40, 100, 300, 3000])
def test_how_often_noise_alone_shows_a_stage(points: int) -> None:
    """One in a hundred at most, as ``level`` says: of 400, up to 8 (at a rate of .01, more in 2 % of cases). Heavy tails: 4 %."""
    t = np.arange(points)
    assert sum(len(find(t, np.random.default_rng(seed).standard_normal(points))) > 0 for seed in range(400)) <= 8
    assert sum(len(find(t, np.random.default_rng(seed).standard_t(3, points))) > 0 for seed in range(400)) <= 16


def test_level_is_a_knob() -> None:
    """A weak drop: certain enough for one level, and not for another."""
    y = noisy(1 - 0.25 * (T > 500), 0.15, 3)
    assert len(find(T, y, level=0.2)) > len(find(T, y, level=1e-12))


def test_least_is_a_knob() -> None:
    y = 1.0 * fall(T, 300, 15) + 0.1 * fall(T, 700, 15)
    assert len(find(T, y)) == 2
    assert len(find(T, y, least=0.2)) == 1


def test_a_linear_model_has_no_stages_and_a_diagonal_network_has() -> None:
    """The loss of modes, sum c_k exp(-2 r_k t), falls ever more slowly; with two layers from small weights it falls in stages."""
    t, rates = np.linspace(0, 60, 400), np.array([4.0, 1.0, 0.3])
    linear = np.exp(-2 * rates[:, None] * t).sum(0)
    learned = 1 / (1 + (1e4 - 1) * np.exp(-2 * rates[:, None] * t))
    deep = ((1 - learned) ** 2).sum(0)
    assert len(find(t, linear)) == 0
    seen = find(t, deep)
    assert len(seen) == 3
    half = np.log((1e4 - 1) * (math.sqrt(2) - 1)) / (2 * rates)  # where (1 - learned)^2 = 1/2
    assert agreement(seen.times, half).worst < 0.1
    assert agreement(seen.times, half).rank == 1


def test_logarithmic_time_shows_the_modes_of_a_linear_model_but_no_power_law() -> None:
    t = np.geomspace(1, 1e6, 300)
    y = sum(np.exp(-t / tau) for tau in (30.0, 3e3, 3e5))
    assert len(find(t, y)) == 0
    seen = find(t, y, time="log")
    assert len(seen) == 3
    np.testing.assert_allclose(np.log10(seen.times), np.log10(math.log(2) * np.array([30.0, 3e3, 3e5])), atol=0.1)
    assert len(find(t, 3 * t**-0.3 + 0.1, time="log")) == 0
    assert len(find(np.append(0, t), np.append(y[0], y), time="log")) == 3  # step 0 has no logarithm, and is left out


def test_logarithmic_values_show_later_drops() -> None:
    y = 10.0 ** -(3 - fall(T, 300, 15) - fall(T, 500, 15) - fall(T, 700, 15))
    assert len(find(T, y)) == 2  # the last is too small
    seen = find(T, y, scale="log")
    assert len(seen) == 3
    np.testing.assert_allclose(seen.times, [300, 500, 700], atol=3)
    np.testing.assert_allclose([(d.before, d.after) for d in seen.drops], [(1, 0.1), (0.1, 0.01), (0.01, 0.001)], rtol=0.05)


def test_a_spike_and_a_rise_are_no_stages() -> None:
    spike = np.exp(-T / 200) + np.where((T > 500) & (T < 540), 0.5, 0.0)
    assert len(find(T, spike)) == 0
    hill = 1 - fall(T, 300, 20) * 0.5 - 0.5 * (1 - fall(T, 600, 20)) * 0.8
    assert len(find(T, hill)) == 0


# -------------------------------------------------------------------------------------------------------------------------- laws

@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
@given(st.integers(0, 10**6), st.floats(0.01, 100), st.floats(-10, 10), st.floats(0.01, 100), st.floats(-100, 100))
def test_scaling_and_shifting(seed: int, a: float, b: float, stretch: float, delay: float) -> None:
    """Loss a y + b at times stretch t + delay: the same stages there."""
    y = noisy(PLANTED, 0.03, seed)
    one, other = find(T, y), find(stretch * T + delay, a * y + b)
    assert len(one) == len(other)
    for d, e in zip(one.drops, other.drops, strict=True):
        for name in ("time", "start", "end"):
            assert getattr(e, name) == pytest.approx(stretch * getattr(d, name) + delay, abs=1e-3 * stretch)
        assert e.error == pytest.approx(stretch * d.error, rel=1e-3)
        assert (e.before, e.after) == pytest.approx((a * d.before + b, a * d.after + b), abs=1e-4 * a)


def test_order_of_columns_kind_of_numbers_and_the_global_state_change_nothing() -> None:
    y = noisy(PLANTED, 0.05, 0)
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    assert find(T, y) == find(list(T), list(y)) == find(T, y)
    np.testing.assert_array_equal(state, np.random.get_state()[1])  # noqa: NPY002


# ------------------------------------------------------------------------------------------------------------------ slow oracles

def line_misfit(c: NoisyCurve, a: int, b: int) -> float:
    A = np.column_stack([np.ones(b - a), c.t[a:b]]) / c.s[a:b, None]
    x = np.linalg.lstsq(A, c.y[a:b] / c.s[a:b], rcond=None)[0]
    return float(((A @ x - c.y[a:b] / c.s[a:b]) ** 2).sum())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.1, 20))
def test_pieces_against_every_partition(seed: int, penalty: float) -> None:
    draw = np.random.default_rng(seed)
    n = 9
    c = NoisyCurve(np.sort(draw.random(n)) * 10 + np.arange(n), draw.standard_normal(n).cumsum(), 0.1 + draw.random(n))
    best = min((sum(line_misfit(c, a, b) + penalty for a, b in itertools.pairwise((0, *cuts, n))), (0, *cuts, n))
               for k in range(5) for cuts in itertools.combinations(range(1, n), k)
               if all(b - a >= 2 for a, b in itertools.pairwise((0, *cuts, n))))
    mine = pieces(c, penalty)
    cost = sum(line_misfit(c, a, b) + penalty for a, b in itertools.pairwise(mine))
    assert cost == pytest.approx(best[0], rel=1e-8, abs=1e-8)


def test_pieces_against_ruptures() -> None:
    """An outside reference, where it is installed: its exact search with the rows weighted by hand."""
    rpt = pytest.importorskip("ruptures")
    c = binned(T, noisy(PLANTED, 0.05, 0))
    rows = np.column_stack([c.y, np.ones_like(c.t), c.t]) / c.s[:, None]
    for penalty in (5.0, 20.0, 100.0):
        assert pieces(c, penalty)[1:] == rpt.Pelt(model="linear", min_size=2, jump=1).fit(rows).predict(pen=penalty)


def test_curvature_of_prescribed_sign_against_quadratic_programming() -> None:
    from scipy.optimize import LinearConstraint, minimize
    c = binned(T, noisy(PLANTED, 0.1, 2))
    at = knots(c, [0, 40, 70, 100, 130, len(c.t)])
    structure = ((1, 4),)
    chi, y = bent(c, at, structure)
    hats = np.column_stack([np.interp(c.t, at, row) for row in np.eye(len(at))]) / c.s[:, None]
    slopes = np.diff(np.eye(len(at)), axis=0) / np.diff(at)[:, None]
    sign = np.ones(len(at) - 2)
    sign[1:4] = -1
    bends = sign[:, None] * np.diff(slopes, axis=0) * 1e2
    oracle = minimize(lambda v: ((hats @ v - c.y / c.s) ** 2).sum(), y + 0.01 * np.cos(np.arange(len(at))), method="SLSQP",
                      jac=lambda v: 2 * hats.T @ (hats @ v - c.y / c.s),
                      constraints=LinearConstraint(bends, 0, np.inf), options={"ftol": 1e-13, "maxiter": 500})
    assert (bends @ y >= -1e-9).all()
    assert chi == pytest.approx(((hats @ y - c.y / c.s) ** 2).sum(), rel=1e-8)
    assert chi <= oracle.fun * (1 + 1e-8)
    assert chi == pytest.approx(oracle.fun, rel=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=3, max_size=12))
def test_the_greatest_convex_minorant_against_all_chords(y: list[float]) -> None:
    """At each point the lowest of all chords over it."""
    t, v = np.arange(len(y), dtype=float), np.array(y)
    hull = _minorant(t, v)
    mine = np.interp(t, t[hull], v[hull])
    for i in range(len(y)):
        chords = [v[a] + (v[b] - v[a]) * (i - a) / (b - a) for a in range(i) for b in range(i + 1, len(y))]
        assert mine[i] == pytest.approx(min([v[i], *chords]), abs=1e-9)


def test_the_step_against_least_squares() -> None:
    """The mean of its probabilities is the best fit, and their spread its standard error, where noise is small."""
    from scipy.optimize import curve_fit
    t, draw = np.linspace(0, 100, 64), np.random.default_rng(4)
    s = np.full(64, 0.02)
    y = 0.3 + 0.7 * fall(t, 42, 6) + s * draw.standard_normal(64)
    best, covariance = curve_fit(lambda t, a, b, m, w: a + b * fall(t, m, w), t, y, (0.3, 0.7, 40, 5), s, absolute_sigma=True)
    step = fitted(NoisyCurve(t, y, s))
    assert step.time == pytest.approx(best[2], abs=0.1)
    assert step.width == pytest.approx(best[3], rel=0.05)
    assert (step.after, step.before) == pytest.approx((best[0], best[0] + best[1]), abs=0.01)
    spread = math.sqrt(step.error**2 - (t[1] - t[0]) ** 2 / 12)
    assert spread == pytest.approx(math.sqrt(covariance[2, 2]), rel=0.4)


def test_fewest_needs_its_bar() -> None:
    c = binned(T, noisy(PLANTED, 0.05, 0))
    assert [len(fewest(c, bar).structure) for bar in (30.0, 1e9)] == [2, 0]


# ----------------------------------------------------------------------------------------------------------- words, and bad input

def test_no_drop_begins_above_the_end_of_the_one_before() -> None:
    """Each drop is fitted by itself, on a line of its own; the levels that are told fall all the same, and lie on the curve."""
    t = np.arange(200.0)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        falls = zip(rng.uniform(0.4, 1, 2), (70, 140), rng.uniform(2, 6, 2), strict=True)
        y = 0.1 + sum(a / (1 + np.exp((t - m) / s)) for a, m, s in falls) + 0.2 * np.exp(-t / rng.uniform(50, 200))
        y = y + 0.02 * rng.standard_normal(200)
        stages = find(t, y)
        assert len(stages) == 2
        first, second = stages.drops
        assert second.before <= first.after
        if second.before == first.after:
            assert y[(t > 70) & (t < 140)].min() < first.after < y[(t > 70) & (t < 140)].max()
        assert min(first.height, second.height) > 0


def test_the_words() -> None:
    assert str(find(T, PLANTED)).startswith("2 stages: 1 to 0.4 at step 300 (")
    assert str(find(T, 1 * fall(T, 300, 15))).startswith("1 stage: ")
    assert str(find(T, CONVEX["a power law"])) == (
        "no stages: from step 0 to 1,000 the fall never accelerates by more than the noise explains")
    assert find(T, 0 * T).drops == ()
    record = find(T, PLANTED).to_json()
    assert [round(d["time"]) for d in record["drops"]] == [300, 700]
    assert record["words"].startswith("2 stages")
    assert len(record["plateaus"]) == 3


BAD: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "short": (range(11), range(11), {}, "a curve of 11 points is too short to tell a stage from noise: it needs at least 12"),
    "nan": (T, np.where(T > 500, np.nan, 1.0), {}, "150 of 300 values are NaN or infinite, and a stage could be a gap"),
    "unsorted": (T[::-1], PLANTED, {}, "steps must be finite and increase from point to point"),
    "twice": (np.floor(T / 10), PLANTED, {}, "remove duplicates"),
    "shapes": (T, PLANTED[:10], {}, "steps of shape (300,) with values of shape (10,): give one value for every step"),
    "negative values": (T, PLANTED - 1, {"scale": "log"}, "have no logarithm: give values above 0, or leave scale='linear'"),
    "negative steps": (T - 5, PLANTED, {"time": "log"}, "steps down to -5 have no logarithm: give values above 0"),
    "scale": (T, PLANTED, {"scale": "cubic"}, "scale='cubic': use 'linear' or 'log'"),
    "level": (T, PLANTED, {"level": 0.0}, "level=0.0: give a share above 0 and below 1"),
    "least": (T, PLANTED, {"least": 2}, "least=2: give a share above 0 and below 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_curves_are_refused(case: str) -> None:
    steps, values, options, words = BAD[case]
    with pytest.raises(SelectionError) as error:
        find(steps, values, **options)
    assert words in str(error.value)


def test_a_matrix_is_no_curve() -> None:
    with pytest.raises(SelectionError, match=r"values of shape \(2, 300\): give one curve at a time"):
        find(T, np.stack([PLANTED, PLANTED]))


# --------------------------------------------------------------------------------------------------------------------- emergence

def test_emergence_of_skills() -> None:
    times = np.array([100.0, 300.0, 700.0])
    skills = 2.0 * (1 - np.stack([fall(T, time, 20) for time in times]))
    seen = emergence(T, skills)
    np.testing.assert_allclose(seen.times, times, atol=0.2)
    assert (np.abs(seen.times - times) < seen.errors).all()
    np.testing.assert_allclose(seen.finals, 2.0, rtol=1e-4)
    np.testing.assert_allclose(emergence(T, skills, share=0.9, final=2.0).times, times + 20 * math.log(9), atol=0.5)
    np.testing.assert_allclose(emergence(T, skills[0]).times, times[:1], atol=0.2)
    late = emergence(T, skills, final=[2, 2, 5])
    assert late.times[2] == math.inf
    assert str(late).startswith("at 50% of the last value: 1: step ")
    assert str(late).endswith("3: not by step 1,000")


def test_emergence_under_noise_lies_within_its_errors() -> None:
    y = np.stack([noisy(1 - fall(T, 400, 20), 0.1, seed) for seed in range(100)])
    seen = emergence(T, y)
    assert np.mean(np.abs(seen.times - 400) < 2 * seen.errors) >= 0.9
    assert seen.errors.max() < 40


def test_emergence_interpolates_exactly() -> None:
    t = np.arange(1.0, 21)
    assert emergence(t, np.arange(20) / 19, final=1.0).times[0] == pytest.approx(1 + 19 / 2)
    t = 2.0 ** np.arange(20)
    assert emergence(t, np.arange(20) / 19, final=1.0, time="log").times[0] == pytest.approx(2 ** (19 / 2))


@settings(max_examples=20, deadline=None)
@given(st.floats(0.1, 10), st.floats(0.1, 10), st.integers(0, 1000))
def test_emergence_scales(a: float, stretch: float, seed: int) -> None:
    y = noisy(1 - fall(T, 400, 20), 0.05, seed)
    one, other = emergence(T, y), emergence(stretch * T, a * y)
    np.testing.assert_allclose(other.times, stretch * one.times, rtol=1e-9)
    np.testing.assert_allclose(other.errors, stretch * one.errors, rtol=1e-6)


def test_bad_emergence_is_refused() -> None:
    with pytest.raises(SelectionError, match=r"a curve that ends at .* never reaches a share of it.*loss\[0\] - loss"):
        emergence(T, PLANTED - 1)
    with pytest.raises(SelectionError, match="share=1"):
        emergence(T, PLANTED, share=1)
    with pytest.raises(SelectionError, match="time='square'"):
        emergence(T, PLANTED, time="square")  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match="a curve of 5 points is too short"):
        emergence(T[:5], PLANTED[:5])
    with pytest.raises(SelectionError, match=r"curves \[skill, t\], or one curve \[t\]"):
        emergence(T, PLANTED[None, None])
    with pytest.raises(SelectionError, match=r"final of shape \(3,\) for 2 curves: give one value for each"):
        emergence(T, np.stack([PLANTED, PLANTED]), final=[1.0, 1.0, 1.0])


# --------------------------------------------------------------------------------------------------------------------- agreement

@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1, 1e6), min_size=2, max_size=8, unique=True), st.randoms())
def test_agreement_against_its_definition(times: list[float], random: Any) -> None:
    shuffled = list(times)
    random.shuffle(shuffled)
    a = agreement(shuffled, times)
    np.testing.assert_allclose(a.decades, [math.log10(x / y) for x, y in zip(shuffled, times, strict=True)], atol=1e-12)
    assert a.rank == pytest.approx(kendalltau(shuffled, times).statistic)
    assert agreement(times, times).worst == 0
    assert agreement(times, times).rank == 1
    assert agreement(10 * np.array(times), times).typical == pytest.approx(1)
    np.testing.assert_array_equal(matched(shuffled, times), times)


def test_agreement_counts_what_is_missing() -> None:
    a = agreement([10, math.inf, 1000], [10, 100, 100])
    assert a.missing == 1
    assert a.worst == pytest.approx(1)
    assert str(a) == "off by 0.5 decades typically, 1 at worst, 1 of 3 without a time; order as predicted"
    assert str(agreement([10, 5], [10, 20])).endswith("order by Kendall -1.00")
    assert math.isnan(agreement([10], [20]).rank)
    np.testing.assert_array_equal(matched([100, 1e5], [90, 1000, 2e5]), [100, np.nan, 1e5])
    with pytest.raises(SelectionError, match="assign them with matched"):
        agreement([1, 2], [1, 2, 3])
    with pytest.raises(SelectionError, match="the logarithm of their ratio"):
        agreement([math.nan], [1.0])
    with pytest.raises(SelectionError, match="measured times must be finite and above 0"):
        matched([0.0], [1.0])
    for within in (0.0, -1.0, math.nan):
        with pytest.raises(SelectionError, match="give a number of decades above 0"):
            matched([1.0], [1.0], within)


# --------------------------------------------------------------------------------------------------------------------------- runs

def test_stages_of_a_run(tmp_path: Path) -> None:
    with runs.create(tmp_path / "run") as w:
        for i, step in enumerate(range(300)):
            loss = 1 + PLANTED[i] if i != 7 else math.nan
            w.scalars(step, {"loss": loss, "val_loss": 10.0 ** (3 * PLANTED[i]), "accuracy": 0.5})
        w.scalars(300, {"late_loss": 1.0})
    seen = stages_of(runs.load(tmp_path / "run"))
    assert set(seen) == {"loss", "val_loss"}
    assert all(isinstance(s, Stages) for s in seen.values())
    step = 299 / 1000  # the steps are numbers of points here
    np.testing.assert_allclose(seen["loss"].times, np.array(TIMES) * step, atol=0.5)
    np.testing.assert_allclose(seen["val_loss"].times, np.array(TIMES) * step, atol=0.5)  # in its logarithm, as it falls by 1000
    assert len(stages_of(runs.load(tmp_path / "run"), scale="linear")["val_loss"]) == 1


# --------------------------------------------------------------------------------------------------------- report and dashboard

@pytest.fixture
def staged(tmp_path: Path) -> Path:
    for name, delay in (("one", 0), ("other", 40)):
        with runs.create(tmp_path / name) as w:
            for i in range(300):
                w.scalars(i, {"loss": 1 + 0.6 * fall(i, 90 + delay, 5) + 0.4 * fall(i, 210, 9), "accuracy": i / 300})
            w.finish()
    return tmp_path


def test_the_loss_panel_of_the_report_shows_stages(staged: Path) -> None:
    page = report([runs.load(staged / "one")], staged / "report.html").read_text()
    assert "loss: 2 stages: 2 to 1.4 at step 90 (" in page
    assert "Pale bars: plateaus" in page
    both = report([runs.load(staged / "one"), runs.load(staged / "other")], staged / "both.html").read_text()
    assert "other: loss: 2 stages: 2 to 1.4 at step 130 (" in both


def test_marks_of_the_loss_panel(staged: Path) -> None:
    loss, accuracy = sorted(figures.scalars(runs.load(staged / "one")).axes[:2], key=lambda ax: ax.get_title(), reverse=True)
    drops = [line for line in loss.get_lines() if line.get_gid() == "drop"]
    assert [round(float(np.asarray(line.get_xdata())[0])) for line in drops] == [90, 210]
    levels = [float(np.asarray(line.get_ydata())[0]) for line in loss.get_lines() if line.get_gid() == "plateau"]
    assert levels == pytest.approx([2.0, 1.4, 1.0], abs=0.02)
    assert [t.get_text() for t in loss.texts] == ["90", "210"]
    assert len(accuracy.get_lines()) == 1
    many = {str(i): runs.load(staged / "one") for i in range(figures.MARKED + 1)}
    assert not any(line.get_gid() for line in figures.scalars(many, ["loss"]).axes[0].get_lines())


def test_the_dashboard_answers_with_stages(staged: Path) -> None:
    curves = next(v for v in tabs() if v.name == "curves")
    chosen = Chosen(Shelf(staged), ["one", "other"])
    with chosen:
        seen = curves.answer(chosen, Query([("scalar", "loss"), ("scalar", "accuracy")]))["curves"]
    assert {(c["run"], c["measure"]): c["stages"] and c["stages"]["words"][:9] for c in seen} == {
        ("one", "loss"): "2 stages:", ("one", "accuracy"): None, ("other", "loss"): "2 stages:", ("other", "accuracy"): None}
    assert [round(d["time"]) for c in seen if c["stages"] and c["run"] == "other" for d in c["stages"]["drops"]] == [130, 210]


def test_losses_without_stages_or_numbers_are_shown_all_the_same(tmp_path: Path) -> None:
    strange = {"huge": lambda i: 1e300 * (-1) ** i, "flat": lambda i: 0.0, "tiny": lambda i: 1e-300 * (i % 3),
               "nan": lambda i: math.nan, "down": lambda i: -1e10 * i}
    with runs.create(tmp_path / "strange") as w:
        for i in range(60):
            w.scalars(i, {f"{name}_loss": value(i) for name, value in strange.items()})
    seen = stages_of(runs.load(tmp_path / "strange"))
    assert set(seen) == {f"{name}_loss" for name in strange if name != "nan"}
    assert all(len(s) == 0 for s in seen.values())
    assert "flat_loss: no stages" in report([runs.load(tmp_path / "strange")], tmp_path / "report.html").read_text()


def test_a_drop_that_lies_between_two_points_is_located() -> None:
    """The loss of a contrastive training, which falls within the first three points."""
    loss = [5.14, 4.79, 4.18, 4.17, 3.96, 3.98, 3.95, 3.95, 3.87, 3.88, 3.86, 3.84, 3.84, 3.86, 3.84,
            3.82, 3.82, 3.82, 3.83, 3.83, 3.82, 3.81, 3.81, 3.81, 3.81, 3.81, 3.81, 3.81, 3.8, 3.8,
            3.79, 3.79, 3.8, 3.82, 3.81, 3.79, 3.79, 3.79, 3.79, 3.8, 3.8, 3.79, 3.79, 3.8, 3.8,
            3.79, 3.78, 3.78, 3.78, 3.78, 3.79, 3.79, 3.79, 3.79, 3.79, 3.78, 3.78, 3.78, 3.78, 3.79]
    seen = find(5 * np.arange(60), loss)
    assert len(seen)
    assert seen.drops[0].time < 20
