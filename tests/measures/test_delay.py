"""Late generalisation from curves of accuracy: each of its states on curves that are made so, what is said, and on runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from richter import runs
from richter.core import SelectionError
from richter.measures.delay import delay, delay_of
from richter.report.html import report
from richter.report.query import Query
from richter.report.shelf import Chosen, Shelf
from richter.report.views import tabs

STEPS = np.arange(0, 2001, 10)


def rising(middle: float, low: float = 0.1, high: float = 1.0, width: float = 0.05) -> np.ndarray:
    """A curve that rises at ``middle`` within a share ``width`` of it."""
    return low + (high - low) / (1 + np.exp(-(STEPS - middle) / (width * middle)))


FITTED = rising(50)
CASES = {
    "ended": (FITTED, rising(1000, high=0.9)),
    "together": (FITTED, rising(55, high=0.9)),
    "overfitted": (FITTED, rising(60, high=0.4)),
    "rising": (FITTED, 0.1 + 0.6 * STEPS / 2000),
    "unsolved": (rising(50, high=0.9), rising(1000)),
}


@pytest.mark.parametrize("state", CASES)
def test_each_state(state: str) -> None:
    train, test = CASES[state]
    late = delay(STEPS, train, test)
    assert late.state == state
    assert late.late == (state in ("ended", "rising"))
    assert (late.train_solved is None) == (state == "unsolved")
    if state == "ended":
        at = STEPS[np.argmax(train >= 0.99)]
        near = STEPS[np.argmax(test >= 0.95 * test.max())]
        assert (late.train_solved, late.test_solved, late.delay) == (at, near, near - at)
        assert abs(late.test_best - 0.9) < 1e-6
    if state in ("overfitted", "unsolved"):
        assert late.delay is None


def test_the_words() -> None:
    assert str(delay(STEPS, *CASES["ended"])) == (  # the logistic curve is at .855 = .95 x .9 for step 1141
        "training solved at step 70 with a test accuracy of 0.1 then; test near its best (0.9) at step 1150, 1080 later: late "
        "generalisation")
    assert "no overfitting, and no delay (best 0.9)" in str(delay(STEPS, *CASES["together"]))
    assert ("it has overfitted. These curves cannot say whether late generalisation will follow"
            in str(delay(STEPS, *CASES["overfitted"])))
    assert "perhaps not complete: the curve ends at step 2000" in str(delay(STEPS, *CASES["rising"]))
    assert ("the training set is not solved: its accuracy has reached 0.9 by step 2000. A delay of the test accuracy (1) "
            "cannot be measured yet" in str(delay(STEPS, *CASES["unsolved"])))
    late = delay(STEPS[20:], *(c[20:] for c in CASES["ended"]))
    assert "training solved by step 200, the first of the curve," in str(late)


def test_a_curve_that_is_cut_off_is_not_ended() -> None:
    """What is known at each moment: overfitted at first, then rising, and ended only when it has stayed for a while."""
    train, test = CASES["ended"]
    states = [delay(STEPS[:n], train[:n], test[:n]).state for n in range(5, len(STEPS) + 1)]
    assert list(dict.fromkeys(states)) == ["unsolved", "overfitted", "rising", "ended"]
    assert states == sorted(states, key=["unsolved", "overfitted", "rising", "ended"].index)  # none is taken back


def test_one_point_that_stands_out_decides_nothing() -> None:
    train, test = CASES["overfitted"]
    spiked = test.copy()
    spiked[120] = 0.95
    assert delay(STEPS, train, spiked).state == "overfitted"


@settings(max_examples=30, deadline=None)
@given(st.floats(1.0, 1e6), st.sampled_from(sorted(CASES)))
def test_the_unit_of_time_does_not_matter(unit: float, state: str) -> None:
    a, b = delay(STEPS, *CASES[state]), delay(unit * STEPS, *CASES[state])
    assert a.state == b.state
    if a.delay is not None and b.delay is not None:
        assert math.isclose(unit * a.delay, b.delay, rel_tol=1e-9, abs_tol=1e-6)


@pytest.mark.parametrize(("knob", "value", "state"), [
    ("solved", 0.85, "unsolved"), ("gap", 0.95, "ended"), ("rise", 0.9, "ended"), ("share", 0.2, "ended"),
    ("rest", 3.0, "ended")])
def test_every_knob_does_something(knob: str, value: float, state: str) -> None:
    assert delay(STEPS, *CASES[state]) != delay(STEPS, *CASES[state], **{knob: value})


@pytest.mark.parametrize(("given_", "sentence"), [
    (([0, 1, 2], [0.1] * 3, [0.1] * 3), "a curve of 3 points is too short to measure a delay: it needs at least 5"),
    ((range(6), [0.5] * 6, [0.5] * 5), r"steps of shape \(6,\) with accuracies of shapes"),
    ((range(6), [50.0] * 6, [0.5] * 6), "shares between 0 and 1, without NaN: divide percentages by 100"),
    ((range(6), [0.5] * 6, [math.nan] * 6), "shares between 0 and 1, without NaN"),
    (([0, 1, 1, 2, 3], [0.5] * 5, [0.5] * 5), "steps must be finite and increase from point to point")])
def test_bad_input(given_: Any, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        delay(*given_)
    with pytest.raises(SelectionError, match=r"gap=0.0: give a share of the examples above 0"):
        delay(STEPS, *CASES["ended"], gap=0.0)
    with pytest.raises(SelectionError, match=r"rest=-1: give a share of the delay, 0 or more"):
        delay(STEPS, *CASES["ended"], rest=-1)


def logged(folder: Path, state: str, names: tuple[str, str] = ("train_accuracy", "test_accuracy"), factor: float = 1.0) -> Any:
    with runs.create(folder) as writer:
        for step, a, b in zip(STEPS.tolist(), *CASES[state], strict=True):
            writer.scalars(step, **dict(zip(names, (factor * a, factor * b), strict=True)))
    return runs.load(folder)


def test_of_a_run_and_in_its_report(tmp_path: Path) -> None:
    run = logged(tmp_path / "a", "ended")
    assert delay_of(run) == delay(STEPS, *CASES["ended"])
    assert f"{delay_of(run)}." in report([run], tmp_path / "a.html").read_text()
    assert delay_of(logged(tmp_path / "b", "together", ("train_acc", "val_acc"))) is not None
    other = logged(tmp_path / "c", "together", ("loss", "lr"))
    assert delay_of(other) is None
    assert delay_of(logged(tmp_path / "d", "ended", factor=100.0)) is None  # percentages
    (panel,) = [view for view in tabs() if view.name == "verdict"]
    assert panel.answer(Chosen(Shelf(tmp_path), ["a"]), Query())["remarks"] == [f"{delay_of(run)}."]
    assert "training solved" not in report([other], tmp_path / "b.html").read_text()


def test_one_training_point_that_stands_out_decides_nothing() -> None:
    spiked = rising(50, high=0.9)
    spiked[2] = 0.995
    late = delay(STEPS, spiked, rising(1000, high=0.4))
    assert late.state == "unsolved"
    assert abs(late.train_best - 0.9) < 1e-6
    spiked = rising(400)
    spiked[2] = 0.995
    assert delay(STEPS, spiked, rising(1000, high=0.9)) == delay(STEPS, rising(400), rising(1000, high=0.9))


def test_points_that_scatter_are_no_late_generalisation() -> None:
    """The best of many is far above all of them."""
    for seed in range(20):
        scattered = (0.3 + 0.08 * np.random.default_rng(seed).standard_normal(len(STEPS))).clip(0, 1)
        assert delay(STEPS, FITTED, scattered).state == "overfitted"
        late = (rising(1000, high=0.9) + 0.08 * np.random.default_rng(seed).standard_normal(len(STEPS))).clip(0, 1)
        assert delay(STEPS, FITTED, late).state == "ended"


def test_what_falls_back_at_once_has_not_stayed() -> None:
    test = np.full(len(STEPS), 0.3)
    test[100:104] = 0.9
    assert delay(STEPS, FITTED, test).state == "rising"
    test[100:150] = 0.9
    assert delay(STEPS, FITTED, test).state == "ended"


def test_a_small_gap_and_a_later_best_are_told_as_they_are() -> None:
    late = delay(STEPS, FITTED, 0.76 * rising(50, low=0) + 0.23 * rising(1000, low=0))
    assert late.state == "together"
    assert late.delay == late.test_solved - late.train_solved > 0  # type: ignore[operator]
    assert f"no overfitting; near its best (0.99) at step {late.test_solved:g}, {late.delay:g} later" in str(late)
