"""A record is stale when the modules that it came from have changed, or when its numbers are no longer what the code gives."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

import tiny
from richter import cli, experiments
from richter.core import Ref
from richter.experiments import keys, ledger, running
from richter.experiments.page import page
from richter.experiments.staleness import Standing, for_comparison, same, standing

TINY = dataclasses.replace(tiny.EXPERIMENT, ref=Ref("nfa", "Fig. 1"))


def checked(store: Path, scale: Any = "smoke", **changes: Any) -> dict[str, Any]:
    """A record as it is kept: through JSON."""
    return json.loads(json.dumps(running.check(TINY, scale, store, changes=changes).record))


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return checked(tmp_path_factory.mktemp("store"))


def with_value(record: dict[str, Any], value: float | None, claim: int = 0) -> dict[str, Any]:
    other = copy.deepcopy(record)
    other["claims"][claim]["value"] = value
    return other


def test_a_record_of_the_code_as_it_is(smoke: dict[str, Any]) -> None:
    assert smoke["modules"] == TINY.modules
    assert smoke["key"] == keys.key(smoke["modules"])
    state = standing(TINY, smoke, smoke)
    assert state == Standing()
    assert not state.stale
    assert str(state) == "as the code is"


def test_changed_modules_are_named(smoke: dict[str, Any]) -> None:
    record = {**smoke, "modules": {"tiny.py": "another", "gone.py": "0"}}
    state = standing(TINY, record)
    assert state.stale
    assert state.changed == ("gone.py", "tiny.py")
    assert str(state) == "stale; changed since: gone.py, tiny.py"


@pytest.mark.parametrize("value", [1e-4, None])
def test_a_changed_number_is_told(smoke: dict[str, Any], value: float | None) -> None:
    state = standing(TINY, with_value(smoke, value), smoke)
    assert state.stale
    assert str(state) == f"stale; other numbers: distance to the closed form: was {value!r}, is 0.0"
    assert standing(TINY, smoke, with_value(smoke, value)).stale


@pytest.mark.parametrize("key", ["hardware", "versions"])
def test_another_machine_is_told(smoke: dict[str, Any], key: str) -> None:
    record = {**smoke, key: {"hardware": {"processor": "Abacus", "cores": 10}, "versions": {"torch": "0.1"}}[key]}
    assert str(standing(TINY, record, smoke)) == "as the code is"  # because the numbers are the same
    told = str(standing(TINY, with_value(record, 1.0), smoke))
    assert "made on another machine, which rounds differently" in told
    assert {"hardware": "Abacus, 10 cores", "versions": "torch 0.1"}[key] in told


@pytest.mark.parametrize(("a", "b", "equal"), [
    (1.0, 1 + 0.9e-5, True), (1.0, 1 + 1.1e-5, False), (-2.0, 2.0, False), (1e-13, 3e-10, True), (0.0, 2e-9, False),
    (None, None, True), (None, 0.0, False), (0.0, None, False), (1.0, math.nan, False)])
def test_what_counts_as_the_same_number(a: float | None, b: float | None, equal: bool) -> None:
    assert same(a, b) is equal


def test_a_record_from_before_modules_were_named(smoke: dict[str, Any]) -> None:
    old = {k: v for k, v in smoke.items() if k != "modules"} | {"key": "cc660282dbcb8797"}
    state = standing(TINY, old, smoke)
    assert state.stale  # its key is not that of the code as it is
    assert not state.names_modules
    assert str(state) == "stale; made before records named their modules: it is not known whether they have changed"
    assert "other numbers" in str(standing(TINY, with_value(old, 1.0), smoke))


def test_a_record_of_the_paper_keeps_the_numbers_of_smoke(smoke: dict[str, Any], tmp_path: Path) -> None:
    ledger.keep(smoke, tmp_path)
    paper = checked(tmp_path / "store", "paper")
    ledger.keep(paper, tmp_path)
    kept = ledger.records(tmp_path)
    assert kept["nfa_tiny", "smoke"] == smoke
    assert kept["nfa_tiny", "paper"] == {**paper, "smoke": for_comparison(smoke)}
    assert not ledger.state_of(kept["nfa_tiny", "paper"], TINY, kept).stale
    kept["nfa_tiny", "smoke"] = with_value(smoke, 5.0, claim=1)
    state = ledger.state_of(kept["nfa_tiny", "paper"], TINY, kept)
    assert state.moved == ("growth of the curve: was 1.0, is 5.0",)
    assert not ledger.state_of(kept["nfa_tiny", "smoke"], TINY, kept).stale  # it is what the numbers are compared with
    ledger.keep({**paper, "key": "of other modules"}, tmp_path)
    assert "smoke" not in ledger.records(tmp_path)["nfa_tiny", "paper"]


def state_on_page(kept: dict[tuple[str, str], dict[str, Any]], scale: str) -> str:
    lines = page([TINY], kept).splitlines()
    return next(line for line in lines if line.startswith(f"| `nfa_tiny` | {scale} ")).split("|")[-2].strip()


def test_the_page_says_which_records_are_stale(smoke: dict[str, Any]) -> None:
    paper = {**smoke, "scale": "paper", "smoke": for_comparison(smoke), "date": "2026-01-01"}
    kept = {("nfa_tiny", "smoke"): smoke, ("nfa_tiny", "paper"): paper}
    assert state_on_page(kept, "smoke") == state_on_page(kept, "paper") == "as the code is"
    assert "(stale)" not in page([TINY], kept)
    moved = {**kept, ("nfa_tiny", "smoke"): with_value(smoke, 5.0)}
    assert state_on_page(moved, "paper") == "**stale**; other numbers: distance to the closed form: was 0.0, is 5.0"
    changed = {**kept, ("nfa_tiny", "paper"): {**paper, "modules": {"tiny.py": "another"}}}
    assert state_on_page(changed, "paper") == "**stale**; changed since: tiny.py"
    assert state_on_page(changed, "smoke") == "as the code is"
    for text in (page([TINY], moved), page([TINY], changed)):
        assert "(stale)" in next(line for line in text.splitlines() if line.startswith("| Fig. 1 | The sum"))


def test_the_page_does_not_pretend_to_know_old_records(smoke: dict[str, Any]) -> None:
    old = {k: v for k, v in smoke.items() if k != "modules"}
    both = {("nfa_tiny", "smoke"): old, ("nfa_tiny", "paper"): {**old, "scale": "paper"}}
    dark = "**stale**; made before records named their modules: it is not known whether they have changed"
    assert state_on_page(both, "smoke") == state_on_page(both, "paper") == dark
    again = {**both, ("nfa_tiny", "smoke"): smoke}
    assert (state_on_page(again, "paper"), state_on_page(again, "smoke")) == (dark, "as the code is")


def test_the_page_counts_what_is_stale(smoke: dict[str, Any]) -> None:
    old = {k: v for k, v in smoke.items() if k != "modules"}
    kept = {("nfa_tiny", "smoke"): smoke, ("nfa_tiny", "paper"): {**old, "scale": "paper"}}
    assert "Records at smoke scale: 1, stale: 0. Records at paper scale: 1, stale: 1." in page([TINY], kept)


def test_no_record_of_smoke_is_stale() -> None:
    kept = ledger.records()
    stale = {name: str(state) for (name, scale), record in kept.items() if scale == "smoke"
             and (state := ledger.state_of(record, experiments.get(name), kept)).stale}
    assert not stale, "run `richter check NAME --controls --record` for these"


def test_a_record_without_its_experiment(smoke: dict[str, Any]) -> None:
    assert "| its experiment is no more |" in page([], {("nfa_tiny", "smoke"): smoke})


@pytest.mark.parametrize(("kept", "told"), [
    (None, "no record at smoke scale yet"), ({}, "as the code is; the same numbers"),
    ({"modules": {"tiny.py": "another"}}, "stale; changed since: tiny.py; the same numbers"),
    ({"claims": [{"text": "growth of the curve", "value": 2.0}]}, "stale; other numbers: growth of the curve: was 2.0, is 1.0")])
def test_a_check_tells_how_the_record_stands(smoke: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str], kept: dict[str, Any] | None, told: str) -> None:
    monkeypatch.setattr("richter.experiments.names", lambda: ["nfa_tiny"])
    monkeypatch.setattr("richter.experiments.get", lambda name: TINY)
    known = {} if kept is None else {("nfa_tiny", "smoke"): {**smoke, **kept}}
    monkeypatch.setattr("richter.experiments.ledger.records", lambda: known)
    sentence = told if kept is None else f"record of {smoke['date']}: {told}"
    assert cli.main(["check", "--store", str(tmp_path)]) == 0  # a stale record is no failed claim
    assert sentence in capsys.readouterr().out.splitlines()
    assert cli.main(["check", "--store", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["ledger"] == sentence
    assert cli.main(["run", "nfa_tiny", "--set", "steps=20", "--store", str(tmp_path)]) == 0
    assert "record of" not in capsys.readouterr().out
