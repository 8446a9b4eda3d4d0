"""Forecasts of training curves: how often their intervals hold the loss of real trainings, when there is none, and the words."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import richter
from richter import cli
from richter.core import SelectionError
from richter.workflows import laws, trend
from richter.workflows.scaling import scaling

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "curves.py"
T = np.arange(1.0, 401.0)


@pytest.fixture(scope="module")
def curves() -> ModuleType:
    spec = importlib.util.spec_from_file_location("curves", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def real(curves: ModuleType) -> dict[str, dict[str, np.ndarray]]:
    read: dict[str, dict[str, np.ndarray]] = curves.read(curves.FILE)
    return read


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few numbers of skills: the laws are not what these tests are about."""
    monkeypatch.setattr(laws, "SKILLS", (3, 30))
    monkeypatch.setattr(laws, "ROUNDS", 1)


def noisy(y: np.ndarray, size: float = 0.02) -> np.ndarray:
    return np.asarray(y * np.exp(size * np.random.default_rng(0).standard_normal(len(y))))


# ---------------------------------------------------------------------------------------------------------------- real trainings

@pytest.mark.parametrize("rates", [True, False])
def test_intervals_hold_the_loss_of_real_trainings(curves: ModuleType, real: Any, rates: bool) -> None:
    """Forecasts of 26 curves of MLPs, CNNs and GPTs to 2 and 10 times: 90 % intervals hold 80 to 98 %; and for at least 12
    of 20 there is a forecast, whether the learning rates are known or not."""
    cases = curves.cases(real, rates=rates)
    assert len(real) >= 20
    for origin in curves.ORIGINS:
        given = {case.curve for case in cases if case.origin == origin and not case.trend.refusal}
        assert len(given) >= 12 / 20 * len(real)
    for horizon in curves.HORIZONS:
        share, number = curves.coverage(cases, horizon)
        assert number >= 60
        assert 0.80 <= share <= 0.98


def test_intervals_hold_in_families_on_which_they_were_not_calibrated(curves: ModuleType, real: Any) -> None:
    """The range of R comes from two families of networks, and the third is forecast."""
    cases = curves.cases(real)
    for horizon in curves.HORIZONS:
        families = curves.left_out(cases, horizon)
        assert set(families) == {"mlp", "cnn", "gpt"}
        assert 0.80 <= sum(share * n for share, n in families.values()) / sum(n for _, n in families.values()) <= 0.98


def test_the_range_is_that_of_the_curves(curves: ModuleType, real: Any) -> None:
    for horizon, numbers in curves.calibrated(curves.cases(real, rates=False)).items():
        np.testing.assert_allclose(trend.RANGE[horizon], numbers, rtol=0.1)


def test_the_laws_alone_forecast_no_training(curves: ModuleType, real: Any, quick: None) -> None:
    """The rival: intervals of the best law, of which hardly any hold the loss at ten times the last step."""
    held = []
    for name in ("mlp digits sgd 0.1 constant", "mlp mnist_5k adam 0.0003 constant", "cnn mnist_5k sgd 0.1 constant",
                 "gpt shakespeare adam 0.001 constant"):
        c = real[name]
        seen = scaling(c["step"][c["step"] <= 400], c["train"][c["step"] <= 400])
        _, low, high = seen.predict(c["step"][-1], seen.best, 0.9)
        held.append(low[0] <= c["train"][-3:].mean() <= high[0])
    assert sum(held) <= 2


def test_no_forecast_is_above_the_last_loss(curves: ModuleType, real: Any) -> None:
    for case in curves.cases(real, rates=False):
        if not case.trend.refusal:
            values, low, high = case.trend.predict(case.trend.last * np.geomspace(1, 10, 9))
            assert (np.diff(values) < 0).all()
            assert values[0] == pytest.approx(math.exp(case.trend.level))
            assert ((low <= values) & (values <= high)).all()


def test_every_step_and_bins_of_steps_have_one_forecast(curves: ModuleType) -> None:
    y = noisy(3 * T**-0.6, 0.1)
    every, bins = trend.forecast(T, y), trend.forecast(*trend.averaged_bins(T, y))
    assert every.slope == pytest.approx(bins.slope, rel=0.02)
    assert every.slope == pytest.approx(0.6, abs=0.1)
    np.testing.assert_allclose(every.predict(2000), bins.predict(2000), rtol=0.05)


# ------------------------------------------------------------------------------------------------------------ when there is none

REFUSED: dict[str, tuple[np.ndarray, str]] = {
    "plateau": (noisy(2.3 - 0.0003 * T), r"has fallen by \d+% only: it may be on the plateau before its first drop"),
    "a drop has begun": (noisy(2.3 / (1 + np.exp((T - 320) / 40))), "a drop has just begun .*, and where it ends"),
    "floor": (noisy(2 * np.exp(-T / 20) + 0.3), "the fall has slowed down .* its floor or a plateau before the next drop")}


@pytest.mark.parametrize("case", REFUSED)
def test_a_curve_that_does_not_show_what_comes_is_refused(case: str, quick: None) -> None:
    y, words = REFUSED[case]
    seen = trend.forecast(T, y)
    assert seen.refusal
    assert np.isnan(seen.predict([800.0, 4000.0])).all()
    told = str(scaling(T, y))
    assert re.search(f"No forecast: .*{words}", told)
    assert "at time 800: no forecast" in told


def test_a_learning_rate_that_decays_is_refused(quick: None) -> None:
    y, rates = noisy(3 * T**-0.6), 0.1 * np.minimum(T / 20, 1)  # a warm-up is no decay
    assert not trend.forecast(T, y, rates).refusal
    decayed = np.where(T > 300, 0.05, rates)
    seen = scaling(T, y, rates=decayed)
    assert "No forecast: the learning rate decays (from 0.1 to 0.05): what follows depends on the schedule" in str(seen)
    with pytest.raises(SelectionError, match=r"rates of shape \(3,\) for 400 points: give the learning rate at each"):
        scaling(T, y, rates=[0.1] * 3)


def test_few_points_are_refused() -> None:
    assert "log more often" in trend.forecast(T[::50], 3 * T[::50]**-0.6).refusal


def test_a_rule_that_missed_the_end_of_the_curve_is_less_sure() -> None:
    """A curve that turned at its end: its own backtest says so, and the intervals are wider by as much."""
    straight, turned = noisy(3 * T**-0.6), noisy(3 * np.where(T < 100, T**-0.3, 100**-0.3 * (T / 100)**-1.4))
    sure, unsure = trend.forecast(T, straight), trend.forecast(T, turned)
    assert sure.widening == 1.0
    test = max(unsure.backtests, key=lambda test: test.error)
    assert unsure.widening == test.error > 1
    assert not test.low <= test.measured <= test.high
    _, low, high = unsure.predict(4000)
    _, lower, higher = trend.replace(unsure, backtests=()).predict(4000)
    assert math.log(high[0] / low[0]) > unsure.widening * math.log(higher[0] / lower[0])


def test_confidence_is_a_knob() -> None:
    seen = trend.forecast(T, noisy(3 * T**-0.6))
    widths = [math.log(high[0] / low[0]) for _, low, high in (seen.predict(4000, c) for c in (0.5, 0.9, 0.99))]
    assert widths[0] < widths[1] < widths[2]


# --------------------------------------------------------------------------------------------------------------------- the words

def test_the_sentence_of_a_training(real: Any, quick: None) -> None:
    c = real["mlp digits sgd 0.1 constant"]
    known = c["step"] <= 400
    seen = scaling(c["step"][known], c["train"][known], at=[800, 4000, 8000])
    text = str(seen)
    assert "Warning: fitted to the first part of this curve, the law " in text
    assert " misses its last part by " in text
    assert "Tested on this curve: from step 196 the same rule forecast 0.0" in text
    lines = text.splitlines()[-3:]
    assert lines[0].startswith("at time 800: 0.0")
    assert "(90 %: 0.0" in lines[0]
    assert lines[2] == "at time 8e+03: no forecast, because forecasts were validated up to 10 times the last step only"
    value, low, high = (float(v[0]) for v in seen.predict(c["step"][-1], confidence=0.9))
    assert low < c["train"][-3:].mean() < high
    assert value < c["train"][known][-1]
    record = seen.to_json()
    assert record["confidence"] == 0.9
    assert record["warnings"] == seen.warnings
    assert math.isnan(record["at"][2]["loss"])
    assert "forecast" in [line.get_label() for line in seen.plot().axes[0].get_lines()]


def test_a_law_that_is_above_the_last_loss_says_so() -> None:
    x = np.geomspace(10, 1e4, 20)
    y = 3 * x**-0.5 + 0.2
    y[-1] *= 0.5
    assert "above the last loss (0.115)" in str(scaling(x, y, resource="parameters", at=[1.2e4]))


def test_the_command_reads_learning_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str], quick: None) -> None:
    y, rates = noisy(3 * T**-0.6), np.where(T > 300, 0.01, 0.1)
    file = tmp_path / "curve.csv"
    file.write_text("step,loss,lr\n" + "\n".join(f"{a},{b},{c}" for a, b, c in zip(T, y, rates, strict=True)))
    with richter.runs.create(tmp_path / "run") as run:
        for step, loss, rate in zip(T, y, rates, strict=True):
            run.scalars(int(step), loss=loss, lr=rate)
    for source in (file, tmp_path / "run"):
        assert cli.main(["scaling", str(source)]) == 0
        assert "No forecast: the learning rate decays (from 0.1 to 0.01)" in capsys.readouterr().out
