"""Claims over seeds, with several rivals, and what a check makes of them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from richter import cli
from richter.core import Interval, SelectionError
from richter.experiments import Task, running
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.ledger import number_of
from richter.experiments.seeds import ENOUGH, LEVEL, summary, wilson
from richter.report.claims import told
from richter.testing import check_experiment

WRONG = Control("a wrong sum", {"wrong": True})


def total(r: Results) -> float:
    """Over what it must be: 1, if the sum is right. One seed at a time, or it is none."""
    (task,) = r.tasks
    n = r.settings.steps
    return float(r["total"][0] / (n * (n - 1) / 2 * (task.seed + 1)))


def claim(**changes: Any) -> Claim:
    return dataclasses.replace(Claim("sum over what it must be", total, Interval(1 - 1e-9, 1 + 1e-9), WRONG, source="arithmetic",
                                     over="seed", own=True), **changes)


def with_claims(*claims: Claim, seeds: int = 5) -> Experiment:
    return dataclasses.replace(tiny.EXPERIMENT, smoke=tiny.Settings(seeds=tuple(range(seeds))), claims=claims)


def judged(values: list[float], expect: Interval, by: Any = "median") -> running.Finding:
    return running.Finding.over(claim(expect=expect, by=by), dict(enumerate(values)))


# ------------------------------------------------------------------------------------------------- intervals over seeds

def test_the_interval_of_a_median_is_from_order_statistics() -> None:
    values = [float(v) for v in range(1, 21)]
    assert summary(values[::-1], "median") == (10.5, Interval(6.0, 15.0), pytest.approx(0.9586, abs=1e-4))  # as in tables
    assert summary(values[:6], "median")[1:] == (Interval(1.0, 6.0), 1 - 2 / 64)
    assert summary(values[:5], "median") == (3.0, Interval(1.0, 5.0), 1 - 2 / 32)
    assert summary(values[:ENOUGH - 1], "median").coverage == 1 - 2 / 16 < 0.9
    assert summary(values[:1], "median") == (1.0, None, 0.0)


def test_the_interval_of_a_mean_is_students() -> None:
    value, interval, coverage = summary([1.0, 2.0, 3.0], "mean")
    assert (value, coverage) == (2.0, LEVEL)
    assert interval is not None
    half = 4.302652729696142 / math.sqrt(3)  # t of two degrees of freedom, from a table
    assert (interval.low, interval.high) == (pytest.approx(2 - half), pytest.approx(2 + half))


def test_the_interval_of_a_share_is_wilsons() -> None:
    assert wilson(5, 5) == Interval(pytest.approx(0.5655, abs=1e-4), 1.0)
    assert wilson(0, 5) == Interval(0.0, pytest.approx(0.4345, abs=1e-4))
    assert wilson(45, 50).low == pytest.approx(0.7864, abs=1e-4)
    assert summary([1.0, 2.0, math.nan, math.inf], "each", Interval(low=1.5)).value == 0.25


@pytest.mark.parametrize(("by", "draw"), [("median", lambda g, n: g.exponential(size=n) / math.log(2) - 1),
                                          ("mean", lambda g, n: g.standard_normal(n))])
@pytest.mark.parametrize("n", [3, 5, 9, 20])
def test_intervals_cover_as_often_as_they_say(by: Any, n: int, draw: Callable[[Any, int], Any]) -> None:
    """The true median or mean is 0."""
    g, rounds = np.random.default_rng(n), 1500
    summaries = [summary(draw(g, n).tolist(), by) for _ in range(rounds)]
    share = sum(0.0 in s.interval for s in summaries if s.interval is not None) / rounds
    coverage = summaries[0].coverage
    assert abs(share - coverage) < 4 * math.sqrt(coverage * (1 - coverage) / rounds)


# ------------------------------------------------------------------------------------------------------ their verdicts

@pytest.mark.parametrize(("values", "by", "verdict"), [
    ([0.92, 0.93, 0.94, 0.95, 0.96], "median", "holds"), ([0.92, 0.93, 0.94, 0.95, 0.96], "mean", "holds"),
    ([0.70, 0.93, 0.94, 0.95, 0.96], "median", "holds on average"), ([0.80, 0.93, 0.95, 0.95, 0.96], "mean", "holds on average"),
    ([0.92, 0.93, 0.94, 0.95], "median", "too few seeds"),  # four values cover the median with 87 % only
    ([0.95], "median", "too few seeds"), ([0.95], "mean", "too few seeds"), ([0.95, 0.9500001], "mean", "too few seeds"),
    ([0.95] * 4, "mean", "too few seeds"), ([0.5], "median", "does not hold"), ([], "each", "does not hold"),
    ([0.80, 0.81, 0.89, 0.95, 0.96], "median", "does not hold"), ([0.5, 0.93, 0.94, 0.95, 0.96], "mean", "does not hold"),
    ([0.95] * 9 + [0.1], "each", "holds"), ([0.95] * 8 + [0.1] * 2, "each", "does not hold"), ([0.95] * 5, "each", "holds"),
    ([0.95] * 4, "each", "too few seeds"), ([0.95] * 9 + [math.nan], "each", "holds"),
    ([0.95] * 9 + [math.nan], "median", "does not hold"), ([0.95] * 9 + [math.inf], "mean", "does not hold")])
def test_the_verdict_weighs_the_interval(values: list[float], by: str, verdict: str) -> None:
    assert judged(values, Interval(low=0.9), by).verdict == verdict


def test_a_claim_about_one_number_has_no_interval() -> None:
    f = running.Finding(claim(over=""), 1.0)
    assert (f.verdict, f.interval, "over" in f.record) == ("holds", None, False)


@pytest.mark.parametrize(("values", "verdict", "fails"), [
    ([0.70, 0.93, 0.94, 0.95, 0.96], "holds on average", True), ([0.95] * 5, "holds", True), ([0.95], "too few seeds", False)])
def test_a_mark_of_differing_stays_only_where_too_few_seeds_say_otherwise(values: list[float], verdict: str, fails: bool) -> None:
    f = running.Finding.over(claim(differs="it did", expect=Interval(low=0.9)), dict(enumerate(values)))
    assert (f.verdict, "remove differs" in f.failure) == (verdict, fails)


def test_no_seed_at_all_has_no_number() -> None:
    for by in ("median", "mean", "each"):
        value, interval, coverage = summary([], by, Interval(low=0.0))
        assert (math.isnan(value), interval, coverage) == (True, None, 0.0)


@pytest.mark.parametrize(("values", "by", "outcome"), [
    ([0.1, 0.2, 0.3, 0.4, 0.5], "median", "fails"), ([0.1, 0.2, 0.3, 0.4, 0.95], "median", "fails on average"),
    ([0.80, 0.81, 0.82, 0.83, 0.84], "mean", "fails"), ([0.5, 0.6, 0.95, 0.96, 0.97], "mean", "fails on average"),
    ([0.1, 0.2], "median", "fails"), ([0.1, 0.95], "median", "fails on average"), ([0.1], "mean", "fails"),
    ([0.95] * 5, "median", "holds"), ([0.1, math.nan], "median", "invalid"),
    ([0.95] * 2 + [0.1] * 3, "each", "fails"), ([0.95] * 3 + [0.1] * 2, "each", "fails on average")])
def test_a_control_is_weighed_by_its_interval_too(values: list[float], by: Any, outcome: str) -> None:
    f = running.Finding.over(claim(expect=Interval(low=0.9), by=by), dict(enumerate(values)), control=WRONG)
    assert (f.outcome, f.as_control["outcome"]) == (outcome, outcome)


def test_a_claim_whose_rival_comes_close_holds_on_average(tmp_path: Path) -> None:
    """One of five seeds of the rival lies in the bar."""
    def value(r: Results) -> float:
        (task,) = r.tasks
        return 0.0 if r.settings.wrong and task.seed else 1.0
    checked = running.with_controls(running.check(with_claims(claim(value=value)), "smoke", tmp_path), tmp_path)
    (kept,) = checked.record["claims"]
    assert (kept["verdict"], kept["controls"][0]["outcome"], checked.failed) == ("holds on average", "fails on average", False)


def test_changed_settings_may_leave_a_claim_without_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    """A claim about two seeds has none with one of them; nor may it be drawn. As the settings are, that is an error."""
    def value(r: Results) -> float:
        return float(r["total"][1])
    def draw(r: Results) -> Any:
        r["total"][1]
        return tiny.draw(r)
    e = dataclasses.replace(with_claims(claim(), claim(text="the second", value=value, over="", expect=Interval(low=0.0))),
                            figures={"nfa_fig1": draw})
    monkeypatch.setattr("richter.experiments.get", lambda name: e)
    assert cli.main(["run", "nfa_tiny", "--store", str(tmp_path)]) == 0
    capsys.readouterr()
    assert cli.main(["run", "nfa_tiny", "--set", "seeds=0", "--store", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "no number with these settings (IndexError: index 1 is out of bounds" in shown
    assert "nfa_fig1 cannot be drawn with these settings (IndexError" in shown
    broken = dataclasses.replace(e, smoke=tiny.Settings(seeds=(0,)))
    with pytest.raises(IndexError):
        running.check(broken, "smoke", tmp_path)


def test_a_claim_is_read_seed_by_seed(tmp_path: Path) -> None:
    e = with_claims(claim(was="a bar of 2, which nobody had derived"))
    checked = running.check(e, "smoke", tmp_path)
    kept = json.loads(json.dumps(checked.record))["claims"][0]
    assert kept == {
        "text": "sum over what it must be", "paper": "", "source": "arithmetic", "expect": [1 - 1e-9, 1 + 1e-9], "value": 1.0,
        "holds": True, "verdict": "holds", "was": "a bar of 2, which nobody had derived", "over": "seed", "by": "median", "n": 5,
        "values": {str(seed): 1.0 for seed in range(5)}, "interval": [1.0, 1.0], "coverage": 1 - 2 / 32}
    assert number_of(kept) == "1 [1, 1], median of 5 seeds"
    words = told("key", kept)
    assert (words.value, words.verdict, words.holds) == ("1 [1, 1], median of 5 seeds", "holds", True)
    assert words.remark == "Earlier: a bar of 2, which nobody had derived"
    check_experiment(e, tmp_path)


def test_a_claim_over_what_tasks_do_not_have(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match=r"no field 'sed'\. Close to it: 'seed'"):
        running.check(with_claims(claim(over="sed")), "smoke", tmp_path)
    with pytest.raises(SelectionError, match="no field 'sed'"):
        check_experiment(with_claims(claim(over="sed")), tmp_path, run=False)


def test_results_of_some_tasks() -> None:
    r = Results(None, [Task(tiny.Settings(), seed=seed) for seed in (3, 1, 3)], [{"a": np.ones(1)}] * 3)
    assert r.distinct("seed") == [3, 1]
    assert len(r.where(seed=3)) == 2
    with pytest.raises(SelectionError, match="no field 'sede'"):
        r.where(sede=3)


# ---------------------------------------------------------------------------------------------------------------- rivals

def test_every_rival_is_run_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    more = Control("more steps", {"steps": 31})
    e = with_claims(claim(control=(WRONG, dataclasses.replace(more, changes={"steps": 31, "wrong": True}))))
    monkeypatch.setattr("richter.experiments.names", lambda: [e.name])
    monkeypatch.setattr("richter.experiments.get", lambda name: e)
    assert cli.main(["check", "--controls", "--store", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "control: a wrong sum" in shown
    assert "control: more steps" in shown
    assert shown.count("fails, as it must") == 2
    assert "CPU-minutes, with its controls" in shown
    assert "CPU-minutes with all controls (at smoke scale at most 90)" in shown
    checked = running.with_controls(running.check(e, "smoke", tmp_path), tmp_path)
    assert [c["text"] for c in checked.record["claims"][0]["controls"]] == ["a wrong sum", "more steps"]
    assert len(checked.seconds) == 15
    assert told("", checked.record["claims"][0]).holds
    second = with_claims(claim(control=(WRONG, more)))
    monkeypatch.setattr("richter.experiments.get", lambda name: second)
    assert cli.main(["check", "--controls", "--store", str(tmp_path)]) == 1
    assert "HOLDS, and must not" in capsys.readouterr().out


@pytest.mark.parametrize(("bad", "invalid"), [(math.nan, True), (math.inf, True), (-math.inf, False)])
def test_a_control_without_a_number_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: float, invalid: bool,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    """Infinity that lies in the bar fails only because it is infinite; beyond the bar it is as good as any number there."""
    def value(r: Results) -> float:
        return bad if r.settings.wrong else 1.0
    e = with_claims(claim(value=value, over="", expect=Interval(low=0.0)))
    monkeypatch.setattr("richter.experiments.names", lambda: [e.name])
    monkeypatch.setattr("richter.experiments.get", lambda name: e)
    assert cli.main(["check", "--controls", "--store", str(tmp_path)]) == int(invalid)
    assert ("INVALID" in capsys.readouterr().out) is invalid
    if invalid:
        with pytest.raises(AssertionError, match="the control proves nothing"):
            check_experiment(e, tmp_path)


def test_one_seed_without_a_number_makes_a_control_invalid() -> None:
    f = running.Finding.over(claim(by="each"), {0: 0.0, 1: math.nan}, control=WRONG)
    assert f.invalid
    assert f.as_control == {"text": "a wrong sum", "value": 0.0, "outcome": "invalid"}
