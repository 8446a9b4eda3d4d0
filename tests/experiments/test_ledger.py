"""The ledger: lines of claims under their places, as Markdown and as data. The rules that its rows obey."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import tiny
from richter import cli, experiments
from richter.core import Interval, Ref
from richter.experiments import export, ledger, outcomes
from richter.experiments.frame import Claim, Control, Experiment
from richter.experiments.page import CELL, page

ALL, RECORDS = [experiments.get(name) for name in experiments.names()], ledger.records()
PLACES = ledger.places(ALL, RECORDS)
LINES = [line for row in PLACES for line in row.lines]
SCHEMA = json.loads((ledger.FOLDER.parent / export.SCHEMA).read_text(encoding="utf-8"))
NUMBER = Claim("a number", lambda r: 0.0, Interval(low=0.9), Control("y", {}), says="The number is 0.93.", over="seed")
FIG1 = dataclasses.replace(tiny.EXPERIMENT, ref=Ref("nfa", "Fig. 1"), reduced="half the data", claims=(NUMBER,))


def record(scale: str = "paper", **changes: Any) -> dict[str, Any]:
    claim = {"text": "a number", "paper": "0.93", "source": "definitions", "expect": [0.9, None], "value": 0.95, "holds": True,
             "verdict": "holds", "controls": [{"text": "y", "value": 0.1, "outcome": "fails"}], "over": "seed", "by": "median",
             "n": 5, "interval": [0.93, 0.96]}
    return {"experiment": "nfa_tiny", "scale": scale, "paper": "nfa", "place": "Fig. 1", "modules": FIG1.modules,
            "claims": [claim | changes], "tasks": 1, "cpu_minutes": 1.5, "memory": 2 ** 20,
            "date": "2026-01-01", "revision": "abc", "hardware": {"processor": "P", "cores": 2}, "settings": {}}


def row(e: Experiment | list[Experiment], kept: dict[Any, Any], place: str = "Fig. 1") -> ledger.LedgerPlace:
    known = {("nfa_tiny", "paper"): kept} if "scale" in kept else kept
    return next(p for p in ledger.places(e if isinstance(e, list) else [e], known) if (p.paper, p.place) == ("nfa", place))


# --------------------------------------------------------------------------------------------------------- lines and places

@pytest.mark.parametrize(("found", "outcome", "protocol"), [
    ([], "not run", "exact"), ([record()], "reproduced", "exact"), ([record("smoke")], "reproduced", "reduced"),
    ([record("smoke", value=0.5), record()], "reproduced", "exact"),
    ([record(value=0.5, interval=[0.4, 0.6], holds=False)], "undecided", "exact"),
    ([record(value=None, interval=None, holds=False)], "undecided", "exact"), ([record(n=4)], "undecided", "exact")])
def test_the_outcome_of_a_place(found: list[dict[str, Any]], outcome: str, protocol: str) -> None:
    place = row(FIG1, {(r["experiment"], r["scale"]): r for r in found})
    assert (place.outcome, place.protocol, len(place.lines)) == (outcome, protocol, 1)
    assert place.reproduced == f"{int(outcome == 'reproduced')} of 1"


def test_the_small_scale_is_a_reduced_protocol() -> None:
    assert row(FIG1, {("nfa_tiny", "smoke"): record("smoke")}).lines[0].settings == "half the data"
    bare = dataclasses.replace(FIG1, reduced="")
    assert row(bare, {("nfa_tiny", "smoke"): record("smoke")}).lines[0].settings == "steps 30 for 60"
    same = dataclasses.replace(bare, paper=bare.smoke)
    assert row(same, {("nfa_tiny", "smoke"): record("smoke")}).protocol == "exact"


def of(*lines: tuple[str, str, str]) -> str:
    """The outcome of a place with claims of these outcomes and reasons; whose: p or o."""
    meaning = outcomes.Meaning("specific")
    return ledger.LedgerPlace("nfa", "Fig. 1", "t", tuple(
        ledger.LedgerLine("s", whose == "o", {}, word, "exact", "", meaning, reason) for whose, word, reason in lines)).outcome


def test_a_place_has_the_worst_outcome_of_the_papers_claims() -> None:
    good, after = ("p", "reproduced", ""), ("p", "reproduced after correction", "misprint")
    assert of(good, ("p", "partly reproduced", ""), ("p", "direction only", "")) == "direction only"
    assert of(good, ("p", "undecided", ""), ("p", "contradicted", "")) == "contradicted"
    assert of(good, ("o", "does not hold", "")) == "reproduced"
    assert of(("o", "does not hold", "")) == ""
    assert of(after, ("p", "contradicted", "misprint")) == "reproduced after correction"  # the corrected form settles it
    assert of(good, ("p", "contradicted", "misprint")) == "contradicted"
    assert of(after, ("p", "contradicted", "ours may be wrong")) == "contradicted"


def test_a_claim_is_about_its_own_places_only() -> None:
    other = dataclasses.replace(NUMBER, text="another", places=("Fig. 8",))
    both = dataclasses.replace(FIG1, places=("Fig. 1", "Fig. 8"), claims=(NUMBER, other))
    kept = {**record(), "claims": [record()["claims"][0], record(text="another", n=4, places=["Fig. 8"])["claims"][0]]}
    assert (row(both, kept).outcome, row(both, kept, "Fig. 8").outcome) == ("reproduced", "undecided")
    alone = dataclasses.replace(both, claims=(NUMBER,))
    bare = row(alone, record(), "Fig. 8")
    assert (bare.outcome, bare.absent) == ("not run", "no claim of its own in nfa_tiny")


def test_two_experiments_may_cover_one_place() -> None:
    other = dataclasses.replace(FIG1, name="nfa_other", claims=(dataclasses.replace(NUMBER, text="another"),))
    kept = {("nfa_tiny", "paper"): record()}
    assert row([FIG1, other], kept).outcome == "not run"
    kept["nfa_other", "paper"] = {**record(text="another"), "experiment": "nfa_other"}
    assert (row([FIG1, other], kept).outcome, row([FIG1, other], kept).reproduced) == ("reproduced", "2 of 2")


def test_a_rival_that_is_not_told_apart_shares_the_claims_of_its_place() -> None:
    against = dataclasses.replace(NUMBER, text="number less that of chance", own=True, says="", rival="chance")
    both = dataclasses.replace(FIG1, claims=(NUMBER, against))
    def meaning(interval: list[float]) -> str:
        more = record(text="number less that of chance", value=interval[0], interval=interval)["claims"][0]
        return str(row(both, {**record(), "claims": [record()["claims"][0], more]}).lines[0].meaning)
    assert (meaning([0.91, 0.92]), meaning([0.5, 0.6]), meaning([0.89, 0.92])) == ("specific", "shared: chance", "shared: chance")


def test_what_is_missing_makes_a_claim_partial() -> None:
    partial = dataclasses.replace(FIG1, partial={"Fig. 1": "two of four panels"}, missing={"Fig. 1": "two panels"})
    assert (row(partial, record()).outcome, row(partial, record()).missing) == ("partly reproduced", ("two panels",))


@pytest.mark.parametrize(("place", "name"), [
    ("Fig. 13", "nfa_fig13"), ("Fig. 2C", "nfa_fig2c"), ("Fig. 1.2", "nfa_fig1_2"), ("Prop. B.1.1", "nfa_prop_b_1_1"),
    ("Theorem (FACT)", "nfa_theorem_fact"), ("MNIST", "nfa_mnist"), ("Sec. 5", "nfa_sec5")])
def test_drawings_are_named_by_their_places(place: str, name: str) -> None:
    assert ledger.figure_name("nfa", place) == name


# ------------------------------------------------------------------------------------------------------------- the rows here

def test_every_place_is_there() -> None:
    assert len(PLACES) >= 168
    assert {row.outcome for row in PLACES} <= {*outcomes.OUTCOMES, ""}
    assert {line.protocol for line in LINES if not line.own} <= set(outcomes.PROTOCOLS)
    assert {line.outcome for line in LINES if not line.own} <= set(outcomes.OUTCOMES)
    assert {line.outcome for line in LINES if line.own} <= {"holds", "holds on average", "too few seeds", "does not hold",
                                                            "not run"}


@pytest.mark.parametrize("line", [line for line in LINES if line.outcome == "contradicted"], ids=lambda line: line.says[:40])
def test_nothing_is_contradicted_against_the_rule(line: ledger.LedgerLine) -> None:
    """The rule written out again, from the record alone."""
    c = line.record
    assert line.protocol == "exact"
    assert c["n"] >= 5
    low, high = c["interval"]
    below, above = c["expect"]
    assert (below is not None and high < below) or (above is not None and low > above)
    assert c["controls"]
    assert all(control["outcome"] in ("fails", "fails on average") for control in c["controls"])
    assert len(line.second) > 20
    assert line.reason


def test_the_rule_is_not_empty_here() -> None:
    assert sum(line.outcome == "contradicted" for line in LINES) >= 1


def test_every_line_that_is_not_simply_reproduced_has_a_reason() -> None:
    assert [line.says for line in LINES if not line.own and line.outcome not in ("reproduced", "not run")
            and line.reason not in outcomes.REASONS] == []


def test_corrected_formulas_are_not_called_reproduced() -> None:
    """The places whose printed formula is wrong."""
    corrected = {("rapid", f"Eq. {n}") for n in (9, 12, 14, 20, 27, 43)} | {
        ("signal", "Thm. 1"), ("layerwise", "Thm. 1"), ("layerwise", "App. A.2.1"), ("layerwise", "Fig. C.2"),
        ("layerwise", "Alg. 1"), ("nfa", "Prop. 8"), ("rapid", "Eq. 35")}
    assert {(row.paper, row.place): row.outcome for row in PLACES if (row.paper, row.place) in corrected} == dict.fromkeys(
        corrected, "reproduced after correction")


# -------------------------------------------------------------------------------------------------------------------- the page

def test_the_ledger_in_the_documents_is_what_the_records_say() -> None:
    kept = Path(__file__).parents[2] / "docs/claims.md"
    assert kept.read_text(encoding="utf-8") == page(ALL, RECORDS), "run `make claims`"


def test_no_cell_is_long() -> None:
    cells = [cell.strip() for text in page(ALL, RECORDS).splitlines() if text.startswith("|") for cell in text.split(" | ")]
    assert [cell for cell in cells if len(cell.replace("&lt;", "<").replace("\\|", "|").strip("| ")) > CELL] == []


def test_the_page_counts_everything() -> None:
    text = page([FIG1], {("nfa_tiny", "paper"): record()})
    assert "| reproduced | 1 |  |  |  | 1 |" in text
    assert ("| Fig. 1 | The number is 0.93. | 0.95 [0.93, 0.96], median of 5 seeds, bar >= 0.9: a number | reproduced | exact "
            "| specific |  |") in text
    assert "CPU-minutes spent on them: 1.5." in text
    extra = page([tiny.EXPERIMENT], {})
    assert "| Fig. 99 | Sums of whole numbers. | not run | 0 of 1 | exact |" in extra
    assert text.count("these are replications") == 1


def test_a_stale_record_is_marked() -> None:
    assert "(stale)" in page([FIG1], {("nfa_tiny", "paper"): {**record(), "modules": {}}})
    assert "(stale)" not in page([FIG1], {("nfa_tiny", "paper"): record()})


def test_what_looks_like_a_tag_is_none() -> None:
    e = dataclasses.replace(FIG1, claims=(dataclasses.replace(NUMBER, says="<b>all</b> of `a < b`"),))
    assert "&lt;b>all&lt;/b> of `a < b`" in page([e], {("nfa_tiny", "paper"): record()})


# ------------------------------------------------------------------------------------------------------------------- the export

def test_the_export_is_as_its_schema_says() -> None:
    data = json.loads(json.dumps(export.ledger(ALL, RECORDS)))
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(data, SCHEMA)
    claims = [c for p in data["papers"] for row in p["places"] for c in row["claims"]]
    assert len(claims) == len(LINES)
    counts = Counter((c["outcome"], c["protocol"]) for c in claims if not c["own"])
    told = Counter[tuple[str, str]]()
    for p in data["papers"]:
        told.update({(n["outcome"], n["protocol"]): n["claims"] for n in p["counts"]})
    assert counts == told
    assert set(SCHEMA["$defs"]["place"]["properties"]["outcome"]["enum"]) == {*outcomes.OUTCOMES, None}
    assert set(SCHEMA["$defs"]["claim"]["properties"]["reason"]["enum"]) == {*outcomes.REASONS, None}


def test_the_schema_holds_the_rule_too() -> None:
    data = json.loads(json.dumps(export.ledger([FIG1], {("nfa_tiny", "paper"): record()}, "nfa")))
    jsonschema.validate(data, SCHEMA)
    (claim,) = [c for row in data["papers"][0]["places"] for c in row["claims"]]
    claim |= {"outcome": "contradicted", "challenge": "falsified"}
    with pytest.raises(jsonschema.ValidationError, match="None is not of type 'string'"):
        jsonschema.validate(data, SCHEMA)


@pytest.mark.parametrize(("outcome", "protocol", "word"), [
    ("reproduced", "exact", "verified"), ("reproduced after correction", "exact", "verified"),
    ("reproduced", "unstated", "verified"), ("reproduced", "reduced", "toy"),
    ("reproduced", "stand-in", "toy"), ("partly reproduced", "exact", "toy"),
    ("contradicted", "exact", "falsified"), ("undecided", "exact", "inconclusive"), ("direction only", "exact", "inconclusive"),
    ("not run", "exact", None)])
def test_the_words_of_the_challenge(outcome: str, protocol: str, word: str | None) -> None:
    line = ledger.LedgerLine("s", False, {}, outcome, protocol, "", outcomes.Meaning("specific"), "")
    assert export.challenge(line) == word


def test_the_command_writes_one_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ledger", "--paper", "escape"]) == 0
    text = capsys.readouterr().out
    assert "## `escape`" in text
    assert "## `nfa`" not in text
    assert cli.main(["ledger", "--paper", "escape", "--json", "-o", str(tmp_path / "ledger.json")]) == 0
    data = json.loads((tmp_path / "ledger.json").read_text(encoding="utf-8"))
    assert [p["name"] for p in data["papers"]] == ["escape"]
    jsonschema.validate(data, SCHEMA)
    assert cli.main(["ledger", "--paper", "escpae"]) == 2
    assert "Close to it: 'escape'" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------------- the queue

def test_the_queue_has_most_claims_per_minute_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    slow, quick, done = (dataclasses.replace(tiny.EXPERIMENT, name=f"nfa_{name}") for name in ("slow", "quick", "done"))
    kept: dict[Any, Any] = {}
    def keep(e: Experiment, **changes: Any) -> None:
        claims = [{**record(text=c.text)["claims"][0]} for c in e.claims]
        kept[e.name, "paper"] = {**record(), "experiment": e.name, "modules": e.modules, "claims": claims, **changes}
    keep(slow, cpu_minutes=10.0, modules={})
    keep(done)
    kept["nfa_quick", "smoke"] = {**record("smoke"), "experiment": "nfa_quick", "cpu_minutes": 0.1}
    waiting = ledger.queue([slow, quick, done], kept)
    assert [(w.experiment.name, w.why.partition(";")[0], w.claims, w.minutes) for w in waiting] == [
        ("nfa_quick", "no record", 2, 1.0), ("nfa_slow", "stale", 2, 10.0)]
    bare = [{k: v for k, v in c.items() if k != "controls"} for c in kept["nfa_done", "paper"]["claims"]]
    keep(done, claims=bare)
    assert [w.why for w in ledger.queue([done], kept)] == ["no controls"]
    found = {e.name: e for e in (slow, quick)}
    monkeypatch.setattr("richter.experiments.names", lambda: list(found))
    monkeypatch.setattr("richter.experiments.get", found.get)
    monkeypatch.setattr(ledger, "records", lambda: kept)
    assert cli.main(["check", "--queue", "--store", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.index("nfa_quick  [") < shown.index("nfa_slow  [")
    assert shown.count("paper scale, 3 tasks") == 2
    keep(quick)
    assert cli.main(["check", "nfa_quick", "--queue", "--store", str(tmp_path)]) == 0
    assert "Every record at the paper's scale is as the code is" in capsys.readouterr().out
