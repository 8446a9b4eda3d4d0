"""Outcome, meaning and reason of a claim, from its record."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import tiny
from richter.core import Interval
from richter.experiments import outcomes
from richter.experiments.frame import Experiment
from richter.testing import check_experiment

FAILS = [{"text": "a wrong rule", "value": 0.1, "outcome": "fails"}]


def record(value: float | None = 0.95, interval: list[float] | None = None, n: int = 5, **changes: Any) -> dict[str, Any]:
    """Record of a claim over seeds whose bar is at least 0.9; with n = 0 of a claim about one number."""
    seeds = {"over": "seed", "by": "median", "n": n, "interval": interval or [value, value]} if n else {}
    return {"text": "x", "value": value, "expect": [0.9, None], "controls": FAILS, **seeds, **changes}


@pytest.mark.parametrize(("c", "more", "word"), [
    (record(), {}, "reproduced"), (record(n=0), {}, "reproduced"), (record(), {"partial": True}, "partly reproduced"),
    (record(), {"reason": "misprint"}, "reproduced after correction"),
    (record(), {"reason": "misprint", "partial": True}, "reproduced after correction"),
    (record(interval=[0.8, 0.99]), {}, "undecided"),  # the interval crosses the bar
    (record(n=4), {}, "undecided"),  # too few seeds
    (record(0.5), {}, "undecided"),  # no second route
    (record(0.5), {"second": "a derivation"}, "contradicted"),
    (record(0.5, n=4), {"second": "a derivation"}, "undecided"),
    (record(0.5, n=0), {"second": "a derivation"}, "undecided"),
    (record(0.5, [0.4, 0.91]), {"second": "a derivation"}, "undecided"),
    (record(0.5, controls=[]), {"second": "a derivation"}, "undecided"),
    (record(0.5, controls=[*FAILS, {"text": "y", "value": 1.0, "outcome": "holds"}]), {"second": "a derivation"}, "undecided"),
    (record(0.5, controls=[{"text": "y", "value": None, "outcome": "invalid"}]), {"second": "a derivation"}, "undecided"),
    (record(0.5), {"direction": Interval(low=0.0)}, "direction only"),
    (record(0.5, [-0.1, 0.6]), {"direction": Interval(low=0.0)}, "undecided"),
    (record(0.5, n=3), {"direction": Interval(low=0.0)}, "undecided"),
    (record(None), {"second": "a derivation"}, "undecided"),
    (record(0.9, by="each", interval=[0.6, 0.98], n=10), {}, "reproduced"),
    (record(0.8, by="each", interval=[0.5, 0.95], n=10), {"second": "a derivation"}, "undecided"),
    (record(0.1, by="each", interval=[0.0, 0.4], n=10), {"second": "a derivation"}, "contradicted")])
def test_the_outcome_follows_from_the_numbers(c: dict[str, Any], more: dict[str, Any], word: str) -> None:
    assert outcomes.outcome(c, "exact", **more) == word


@pytest.mark.parametrize("protocol", ["reduced: half", "stand-in: other data", "unstated: the rate"])
def test_nothing_but_the_exact_protocol_contradicts(protocol: str) -> None:
    assert outcomes.outcome(record(0.5), protocol, second="a derivation") == "undecided"
    assert outcomes.lacking(record(0.5), protocol, "a derivation") == [f"the protocol is {protocol.partition(':')[0]}"]


@pytest.mark.parametrize(("c", "beaten", "words"), [
    (record(), (), "specific"), (record(controls=[]), (), "not tested"), (record(), ["chance"], "shared: chance"),
    (record(controls=[*FAILS, {"text": "luck", "value": 0.9, "outcome": "fails on average"}]), (), "shared: luck"),
    (record(controls=[{"text": "luck", "value": None, "outcome": "invalid"}]), (), "not tested")])
def test_the_meaning_follows_from_the_rivals(c: dict[str, Any], beaten: list[str], words: str) -> None:
    assert str(outcomes.meaning(c, beaten)) == words


@pytest.mark.parametrize(("c", "protocol", "declared", "why"), [
    (record(), "exact", "", ""), (record(), "exact", "misprint", "misprint"),
    (record(interval=[0.8, 0.99]), "exact", "", "seed spread"),
    (record(0.5), "exact", "", "ours may be wrong"), (record(0.5), "reduced: half", "", "scale"),
    (record(interval=[0.8, 0.99]), "reduced: half", "", "seed spread"),
    (record(0.5), "reduced: half", "optimiser detail", "optimiser detail"),
    (record(0.5), "unstated: rate", "", "unstated setting"),
    (record(0.5), "stand-in: MNIST", "", "data not available")])
def test_a_reason_is_declared_or_follows(c: dict[str, Any], protocol: str, declared: str, why: str) -> None:
    word = outcomes.outcome(c, protocol, reason=declared)
    assert outcomes.reason(c, word, protocol, declared) == why


def experiment(protocol: Any = "exact", partial: Any = None, **changes: Any) -> Experiment:
    words: dict[str, Any] = {"says": "The sum is n (n - 1) / 2.", **changes}
    first, second = tiny.EXPERIMENT.claims
    return dataclasses.replace(tiny.EXPERIMENT, protocol=protocol, partial=partial or {},
                               claims=(dataclasses.replace(first, **words), dataclasses.replace(second, own=True)))


@pytest.mark.parametrize(("e", "sentence"), [
    (experiment(says=""), "does not say what the paper claims: give it says="),
    (experiment(says="x" * 161), "says 161 characters"),
    (experiment("nearly"), "protocol 'nearly' for Fig. 99: give the experiment or the claim protocol="),
    (experiment("reduced"), "after 'reduced' say what differs from the paper"),
    (experiment({"Fig. 1": "exact"}), "protocol '' for Fig. 99"),
    (experiment(reason="bad luck"), "the reason 'bad luck'; known are misprint, unstated setting"),
    (experiment(rival="chance"), "names a rival, which only claims with own=True do"),
    (experiment(own=True, second="a test"), "reason, second and direction are for claims of the paper"),
    (experiment(partial={"Fig. 1": "half"}), "partial='Fig. 1' is not a place")])
def test_what_the_ledger_says_is_checked(e: Experiment, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as raised:
        check_experiment(e, tmp_path, run=False)
    assert sentence in str(raised.value)
    check_experiment(experiment(), tmp_path, run=False)
    check_experiment(experiment({"Fig. 99": "reduced: 30 of 60 steps"}), tmp_path, run=False)
