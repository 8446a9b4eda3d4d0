"""Sweeps and experiments: what is finished is never run again, what is killed goes on, what fails says so."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tiny
from richter import experiments
from richter.core import Interval, Ref, SelectionError
from richter.engine import sweep
from richter.engine.sweep import name_of
from richter.experiments import Task, ledger, running
from richter.experiments.frame import Claim, Control, Results
from richter.experiments.page import page
from richter.runs import Writer, find
from richter.runs.format import plain
from richter.testing import check_experiment

TASKS = tiny.EXPERIMENT.tasks(tiny.EXPERIMENT.smoke)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The seeds that were worked on, one line each."""
    monkeypatch.setenv("TINY_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sweep_runs_each_task_once(tmp_path: Path, log: Path, workers: int) -> None:
    first = sweep(tiny.work, TASKS, tmp_path / "store", workers=workers)
    assert [o.error for o in first] == [None] * 3
    assert [float(o.run.array("total")) for o in first] == [435.0, 870.0, 1305.0]
    assert sorted(log.read_text().split()) == ["0", "1", "2"]
    again = sweep(tiny.work, TASKS, tmp_path / "store", workers=workers)
    assert [o.path for o in again] == [o.path for o in first]
    assert len(log.read_text().split()) == 3
    sweep(tiny.work, TASKS[:1], tmp_path / "store", workers=workers, fresh=True)
    assert log.read_text().split()[3:] == ["0"]
    assert first[0].run.about["cpu_seconds"] > 0
    assert first[0].path.name.startswith("seed0-")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_that_fails_stops_no_other(tmp_path: Path, workers: int) -> None:
    settings = dataclasses.replace(tiny.EXPERIMENT.smoke, broken=1)
    outcomes = sweep(tiny.work, tiny.EXPERIMENT.tasks(settings), tmp_path, workers=workers)
    assert [bool(o.error) for o in outcomes] == [False, True, False]
    assert "ValueError: seed 1 is broken" in (outcomes[1].error or "")
    assert outcomes[1].run.status == "failed: ValueError: seed 1 is broken"
    with pytest.raises(running.ExperimentError, match=r"1 of 3 tasks did not finish.*seed 1 is broken"):
        running.check(tiny.EXPERIMENT, "smoke", tmp_path, changes={"broken": 1})


def test_a_worker_that_is_killed_loses_its_own_task_only(tmp_path: Path) -> None:
    outcomes = sweep(tiny.killed, TASKS, tmp_path / "store", workers=2)
    assert [o.error for o in outcomes] == [None, "its process ended (killed by signal 9); run it again to resume", None]
    assert outcomes[1].run.status == "interrupted"
    (tmp_path / "again").touch()
    assert [o.error for o in sweep(tiny.killed, TASKS, tmp_path / "store", workers=2)] == [None] * 3


def observed(task: Task[tiny.Settings], run: Writer) -> dict[str, Any]:
    """An Observer in a task leaves the run to the sweep. The network is another each time."""
    import torch

    import richter
    from richter.models import mlp
    probe = richter.Probe(torch.eye(4), torch.arange(4) % 3)
    with richter.Observer(mlp([4, 3], seed=time.time_ns() % 1000), probe, run=run, measures=["weight_change"]) as watch:
        watch(0, loss=1.0)
    watch.close()
    with pytest.raises(SelectionError, match="another Observer writes to the run"):
        richter.Observer(mlp([4, 3], seed=0), probe, run=run)
    return {"moved": watch.snapshots[-1].value("weight_change", "0")}


def test_an_observer_in_a_task_does_not_end_its_run(tmp_path: Path) -> None:
    for fresh in (False, True):  # anew with initial weights of its own
        (outcome,) = sweep(observed, TASKS[:1], tmp_path, fresh=fresh)
        assert outcome.error is None
        assert float(outcome.run.array("moved")) == 0.0


def closing(task: Task[tiny.Settings], run: Writer) -> dict[str, Any]:
    run.finish()
    return {"total": 1.0}


def test_a_run_that_was_closed_is_no_result(tmp_path: Path) -> None:
    for _ in range(2):
        (outcome,) = sweep(closing, TASKS[:1], tmp_path)
        assert "was closed" in (outcome.error or "")


def test_work_that_other_processes_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="work is a partial; use a function of a module"):
        sweep(functools.partial(tiny.work), TASKS, tmp_path)
    with pytest.raises(SelectionError, match="cannot be handed to another process"):
        sweep(lambda task, run: {}, TASKS, tmp_path, workers=2)
    with pytest.raises(SelectionError, match="no task"):
        sweep(tiny.work, [], tmp_path)


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("from richter.engine import sweep\ndef work(s, run): return {}\n"
                                        "sweep(work, [{'a': 1}, {'a': 2}], 'store', workers=2)\n")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "if __name__ == '__main__':" in done.stderr.splitlines()[-1]


def test_names_of_tasks_tell_settings_apart(tmp_path: Path) -> None:
    names = {name_of(tiny.work, t, key) for t in TASKS for key in ("", "other code")} | {name_of(tiny.killed, TASKS[0])}
    assert len(names) == 7
    odd = name_of(tiny.work, {"name": "../../etc <script>"})
    assert "/" not in odd
    assert "<" not in odd
    with pytest.raises(SelectionError, match="the same settings"):
        sweep(tiny.work, [*TASKS, TASKS[0]], tmp_path)
    with pytest.raises(SelectionError, match="workers=0"):
        sweep(tiny.work, TASKS, tmp_path, workers=0)


def killed_until_done(store: Path, kills: int, seed: int) -> tuple[list[float], int]:
    """Start the experiment again and again, kill it at random moments of its work; in the end let it finish."""
    draw, done, changes = random.Random(seed), 0, json.dumps({"pause": 0.004})
    command = [sys.executable, str(Path(tiny.__file__)), str(store), changes]
    for _ in range(kills):
        moment = [str(draw.randrange(1, 50)), str(draw.uniform(0, 0.01))]  # of 90 writes; those of finished tasks are not made
        process = subprocess.run([*command, *moment], capture_output=True, check=False)
        done += process.returncode == -signal.SIGKILL
        for run in find(store):  # it opens, and its rows are whole
            curve = run.series("sum", "a").value if run.has("sum", "a") else []
            assert list(curve) == sorted(curve)
            run.close()
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(found.stdout), done


@pytest.mark.parametrize(("rounds", "kills"), [(1, 4), pytest.param(50, 4, marks=pytest.mark.long)])
def test_a_killed_experiment_ends_with_the_same_claims(tmp_path: Path, rounds: int, kills: int) -> None:
    whole = running.check(tiny.EXPERIMENT, "smoke", tmp_path / "straight", changes={"pause": 0.004})
    straight = [f.value for f in whole.findings]
    ended = 0
    for i in range(rounds):
        found, done = killed_until_done(tmp_path / f"{i}", kills, seed=i)
        assert found == straight
        ended += done
    assert ended > 0


def test_an_experiment_is_whole(tmp_path: Path) -> None:
    check_experiment(tiny.EXPERIMENT, tmp_path)


def bare(figure: Any) -> Any:
    figure.axes[0].set_ylabel("")
    return figure


@pytest.mark.parametrize(("changes", "said"), [
    ({"claims": ()}, "without a claim"),
    ({"name": "tiny"}, "begins with its paper"),
    ({"paper": {"steps": 3}}, "one frozen dataclass"),
    ({"claims": (dataclasses.replace(tiny.EXPERIMENT.claims[0], expect=Interval()),)}, "cannot fail"),
    ({"claims": (dataclasses.replace(tiny.EXPERIMENT.claims[0], source=""),)}, "where its bar comes from"),
    ({"claims": (dataclasses.replace(tiny.EXPERIMENT.claims[0], control=Control("nothing", {})),)}, "changes nothing"),
    ({"claims": (dataclasses.replace(tiny.EXPERIMENT.claims[0], expect=Interval(low=1e-3)),)}, "is not >= 0.001"),
    ({"claims": (dataclasses.replace(tiny.EXPERIMENT.claims[0], control=Control("more steps", {"steps": 31})),)},
     "where it must fail"),
    ({"claims": (dataclasses.replace(tiny.EXPERIMENT.claims[0], control=()),)}, "has no control"),
    ({"claims": tiny.EXPERIMENT.claims[:1] * 2}, "the same text"),
    ({"claims": (dataclasses.replace(tiny.EXPERIMENT.claims[0], by="best"),)}, "known are median, mean, each"),
    ({"claims": (dataclasses.replace(tiny.EXPERIMENT.claims[0], places=("Fig. 98",)),)}, "does not cover"),
    ({"places": ("Fig. 98", "Fig. 99")}, "Fig. 98 has no claim of its own: give one places="),
    ({"places": ("Fig. 98", "Fig. 99"), "missing": {"Fig. 98": "all"}}, "Fig. 99 has no drawing of its own: add 'nfa_fig99'"),
    ({"missing": {"Fig. 98": "all"}}, "missing='Fig. 98' is not a place"),
    ({"figures": {"sums": lambda r: bare(tiny.draw(r))}}, "panel 1 (without a title) does not name its y axis"),
])
def test_an_experiment_that_is_not(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=re.escape(said)):
        check_experiment(dataclasses.replace(tiny.EXPERIMENT, **changes), tmp_path)


def test_results_are_arrays_over_tasks() -> None:
    found = Results(None, TASKS, [{"total": float(i)} for i in range(3)])
    assert found["total"].tolist() == [0.0, 1.0, 2.0]
    assert found.where(seed=1)["total"].tolist() == [1.0]
    assert len(found) == 3
    with pytest.raises(SelectionError, match=r"no array 'totl'\. Close to it: 'total'"):
        found["totl"]


@pytest.mark.parametrize(("text", "value"), [("steps=12", 12), ("seeds=1,2", (1, 2)), ("pause=0.5", 0.5), ("wrong=yes", True)])
def test_settings_from_the_command_line(text: str, value: Any) -> None:
    assert tiny.EXPERIMENT.parsed([text]) == {text.partition("=")[0]: value}


@pytest.mark.parametrize(("text", "said"), [("steps", "write key=value"), ("step=1", "Close to it: 'steps'"),
                                            ("steps=many", "not a value of type int"), ("wrong=7", "not a value of type bool")])
def test_settings_that_are_not(text: str, said: str) -> None:
    with pytest.raises(SelectionError, match=said):
        tiny.EXPERIMENT.parsed([text])


# ------------------------------------------------------------------------------------------------------------ the ledger

FIG1 = dataclasses.replace(tiny.EXPERIMENT, ref=Ref("nfa", "Fig. 1"), reduced="half the data")


def record(scale: str = "paper", **changes: Any) -> dict[str, Any]:
    claim = {"text": "a number", "paper": "0.93", "source": "definitions", "expect": [0.9, None], "value": 0.95, "holds": True,
             "verdict": "holds", "controls": []}
    return {"experiment": "nfa_tiny", "scale": scale, "place": "Fig. 1", "modules": FIG1.modules,
            "claims": [claim | changes], "tasks": 1, "cpu_minutes": 1.5, "memory": 2 ** 20,
            "date": "2026-01-01", "revision": "abc", "hardware": {"processor": "P", "cores": 2}}


@pytest.mark.parametrize(("found", "verdict", "said"), [
    ([], "not run", "not yet run: `richter run nfa_tiny --scale paper`"),
    ([record()], "reproduced", "a number: 0.95 (bar >= 0.9; paper: 0.93)"),
    ([record("smoke")], "reproduced in part", "Small scale only: half the data"),
    ([record("smoke", holds=False), record()], "reproduced", "0.95"),
    ([record(holds=False, value=0.5, differs="the paper's lr is not given")], "differs", "the paper's lr is not given"),
    ([record(holds=False, value=None)], "differs", "no number"),
    ([record(verdict="holds on average")], "holds on average", "*holds on average*"),
    ([record(verdict="too few seeds")], "too few seeds", "*too few seeds*"),
    ([record(verdict="holds on average"), record("smoke")], "holds on average", "0.95"),
    ([record(was="0.99 for 0.95, of one seed")], "reproduced", "(bar >= 0.9; paper: 0.93; once: 0.99 for 0.95, of one seed)"),
    ([{**record(), "tried": "lr 0.1, 0.3"}], "reproduced", "Tried before: lr 0.1, 0.3"),
    ([{**record(), "modules": {}}], "reproduced", "**The record is stale**"),
])
def test_the_verdict_on_a_figure(found: list[dict[str, Any]], verdict: str, said: str) -> None:
    known = {(r["experiment"], r["scale"]): r for r in found}
    place = next(p for p in ledger.places([FIG1], known) if (p.paper, p.place) == ("nfa", "Fig. 1"))
    assert place.verdict == verdict
    assert said in place.numbers


def row(e: experiments.Experiment | list[experiments.Experiment], kept: dict[str, Any],
        place: str = "Fig. 1") -> ledger.LedgerRow:
    known = {("nfa_tiny", "paper"): kept} if "scale" in kept else kept
    rows = ledger.places(e if isinstance(e, list) else [e], known)
    return next(p for p in rows if (p.paper, p.place) == ("nfa", place))


def test_a_claim_is_about_its_own_figures_only() -> None:
    both = dataclasses.replace(FIG1, places=("Fig. 1", "Fig. 8"))
    first, second = record()["claims"][0], record(holds=False, places=["Fig. 8"], text="another")["claims"][0]
    kept = {**record(), "claims": [first, second]}
    assert (row(both, kept).verdict, row(both, kept, "Fig. 8").verdict) == ("reproduced", "differs")
    assert "another" not in row(both, kept).numbers
    alone = {**record(), "claims": [first]}
    assert (row(both, alone, "Fig. 8").verdict, row(both, alone, "Fig. 8").numbers) == ("not run", "no claim of its own")


def test_what_is_missing_is_named() -> None:
    lacking = dataclasses.replace(FIG1, missing={"Fig. 1": "two of its four panels"})
    assert row(lacking, record()).verdict == "reproduced in part"
    assert row(lacking, record()).numbers.endswith("Missing: two of its four panels")
    assert row(lacking, record(holds=False)).verdict == "differs"
    small = dataclasses.replace(FIG1, reduced="")
    assert row(small, {("nfa_tiny", "smoke"): record("smoke")}).numbers.endswith("Small scale only: steps 30 for 60")
    alone = record()
    del alone["claims"][0]["controls"]
    assert row(FIG1, alone).numbers.endswith("Its controls were not run at this scale")
    same = dataclasses.replace(small, paper=small.smoke)
    assert row(same, {("nfa_tiny", "smoke"): record("smoke")}).verdict == "reproduced"


def test_two_experiments_may_cover_one_place() -> None:
    other = dataclasses.replace(FIG1, name="nfa_other")
    kept = {("nfa_tiny", "paper"): record()}
    assert row([FIG1, other], kept).verdict == "not run"
    kept["nfa_other", "paper"] = {**record(verdict="holds on average", text="another"), "experiment": "nfa_other"}
    both = row([FIG1, other], kept)
    assert (both.verdict, both.experiments, len(both.claims)) == ("holds on average", ("nfa_tiny", "nfa_other"), 2)


@pytest.mark.parametrize(("place", "name"), [
    ("Fig. 13", "nfa_fig13"), ("Fig. 2C", "nfa_fig2c"), ("Fig. 1.2", "nfa_fig1_2"), ("Prop. B.1.1", "nfa_prop_b_1_1"),
    ("Theorem (FACT)", "nfa_theorem_fact"), ("MNIST", "nfa_mnist"), ("Sec. 5", "nfa_sec5")])
def test_drawings_are_named_by_their_places(place: str, name: str) -> None:
    assert ledger.figure_name("nfa", place) == name


def test_a_place_has_the_weakest_verdict_of_its_claims() -> None:
    def judged(*verdicts: str) -> str:
        claims = [record(verdict=v, text=v, holds=v != "differs")["claims"][0] for v in verdicts]
        return row(FIG1, {**record(), "claims": claims}).verdict
    assert judged("holds", "holds on average") == "holds on average"
    assert judged("holds on average", "too few seeds") == "too few seeds"
    assert judged("too few seeds", "differs", "holds") == "differs"


def test_what_looks_like_a_tag_is_none() -> None:
    e = dataclasses.replace(FIG1, missing={"Fig. 1": "<b>all</b> of `a < b`"})
    assert "&lt;b>all&lt;/b> of `a < b`" in page([e], {("nfa_tiny", "paper"): record()})


def test_every_changed_verdict_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = {"date": "2026-01-01", "words": "Rules are stricter.", "verdicts": {"nfa": {"Fig. 1": "reproduced"}},
               "why": {"nfa": {"Fig. 1": "one | seed"}}}
    monkeypatch.setattr(ledger, "changes", lambda: earlier)
    monkeypatch.setattr("richter.experiments.page.changes", lambda: earlier)
    assert "Verdicts that changed" not in page([FIG1], {("nfa_tiny", "paper"): record()})
    kept = {("nfa_tiny", "paper"): record(holds=False)}
    assert "Since the ledger of 2026-01-01. Rules are stricter." in page([FIG1], kept)
    assert "| nfa Fig. 1 | reproduced | differs | one \\| seed |" in page([FIG1], kept)
    earlier["why"] = {}
    assert "| nfa Fig. 1 | reproduced | differs | not explained yet |" in page([FIG1], kept)


def test_the_earlier_verdicts_are_of_places_that_there_are() -> None:
    rows = {(p.paper, p.place) for p in ledger.places(ALL, {})}
    earlier = ledger.changes()
    for part in ("verdicts", "why"):
        assert {(paper, place) for paper, mine in earlier[part].items() for place in mine} <= rows


def test_every_changed_verdict_is_explained() -> None:
    assert [f"{row.paper} {row.place}" for row, _, why in ledger.changed(ledger.places(ALL, RECORDS)) if not why] == []


def test_the_page_counts_everything() -> None:
    text = page([FIG1], {("nfa_tiny", "paper"): record()})
    assert f"| reproduced | {ledger.VERDICTS['reproduced']} | 1 |" in text
    diagrams = [c for c in ledger.catalogue() if "nothing" in c]
    assert f"| no experiment yet |  | {len(ledger.catalogue()) - len(diagrams) - 1} |" in text
    assert f"| nothing to measure | {ledger.VERDICTS['nothing to measure']} | {len(diagrams)} |" in text
    for c in diagrams:
        assert f"| {c['place']} | {c['title']} | nothing to measure | {c['nothing']} |" in text
    assert "CPU-minutes spent on the records: 1.5." in text
    extra = page([tiny.EXPERIMENT], {})
    assert "| Fig. 99 | Sums of whole numbers. |" in extra


ALL, RECORDS = [experiments.get(name) for name in experiments.names()], ledger.records()


def test_the_ledger_in_the_documents_is_what_the_records_say() -> None:
    kept = Path(__file__).parents[2] / "docs/claims.md"
    assert kept.read_text(encoding="utf-8") == page(ALL, RECORDS), "run `make claims`"


@pytest.mark.parametrize("key", list(RECORDS), ids="-".join)
def test_a_record_is_of_the_claims_as_they_are(key: tuple[str, str]) -> None:
    """Other claims or bars than the experiment has today: run it again with --record."""
    e, kept = experiments.get(key[0]), RECORDS[key]
    assert kept["settings"] == json.loads(json.dumps(plain(e.settings(key[1]))))
    assert [(c["text"], c["paper"], c["source"]) for c in kept["claims"]] == [(c.text, c.paper, c.source) for c in e.claims]
    for c, claim in zip(kept["claims"], e.claims, strict=True):
        value = float("nan") if c["value"] is None else c["value"]
        f = running.Finding(claim, value, kept["scale"])
        if claim.over:
            f = running.Finding.over(claim, {k: float("nan") if v is None else v for k, v in c["values"].items()}, kept["scale"])
            assert f.value == pytest.approx(value, nan_ok=True)
        weighed = running._weighed(f, c.get("controls", []))  # a control that fails on average only is in the verdict
        assert (c["expect"], c["holds"], c["verdict"]) == (weighed["expect"], f.holds, weighed["verdict"])
        assert (c.get("over", ""), c.get("was", ""), c.get("places", [])) == (claim.over, claim.was, list(claim.places))
    assert not str(kept["revision"]).endswith("+"), "recorded from files that were not committed"


@pytest.mark.parametrize("e", ALL, ids=lambda e: e.name)
def test_every_experiment_is_whole(e: experiments.Experiment, tmp_path: Path) -> None:
    check_experiment(e, tmp_path, run=False)


QUICKEST = {"layerwise_alg1", "layerwise_fig3_4", "layerwise_fig_c_2", "layerwise_table4_2", "nfa_prop2", "nfa_prop3",
            "nfa_prop4"}


@pytest.mark.parametrize("e", [pytest.param(e, id=e.name, marks=() if e.name in QUICKEST else pytest.mark.long)
                               for e in ALL if e.quick])
def test_its_claims_hold_and_its_controls_fail(e: experiments.Experiment, tmp_path: Path) -> None:
    check_experiment(e, tmp_path)


def test_a_claim_that_is_known_to_differ_does_not_fail() -> None:
    claim = Claim("x", lambda r: 2.0, Interval(high=1.0), Control("y", {}), differs="because")
    assert running.Finding(claim, 2.0).verdict == "differs"
    assert running.Finding(claim, float("nan")).verdict == "differs"
    assert not running.Finding(claim, 2.0).failure
    assert running.Finding(dataclasses.replace(claim, differs=""), 2.0).verdict == "does not hold"
    assert running.Finding(dataclasses.replace(claim, differs=""), 2.0).failure == "does not hold"


def test_a_claim_that_is_said_to_differ_and_holds_fails(tmp_path: Path) -> None:
    claim = Claim("x", lambda r: 2.0, Interval(high=1.0), Control("y", {}), differs="because")
    assert running.Finding(claim, 0.5).verdict == "holds"
    assert "remove differs=" in running.Finding(claim, 0.5).failure
    at_paper = dataclasses.replace(claim, differs={"paper": "it is larger there"})
    assert not running.Finding(at_paper, 0.5, "smoke").failure
    assert "it is larger there" in running.Finding(at_paper, 0.5, "paper").failure
    assert running.Finding(at_paper, 2.0, "paper").verdict == "differs"
    assert running.Finding(at_paper, 2.0, "smoke").failure == "does not hold"
    marked = dataclasses.replace(tiny.EXPERIMENT, claims=(dataclasses.replace(tiny.EXPERIMENT.claims[0], differs="it was so"),))
    with pytest.raises(AssertionError, match=r"holds, but is marked as differing \(it was so\): remove differs"):
        check_experiment(marked, tmp_path)
