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
from richter.core import Interval, SelectionError
from richter.engine import sweep
from richter.engine.sweep import name_of
from richter.experiments import Task, ledger, running
from richter.experiments.frame import Claim, Control, Results
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


# ------------------------------------------------------------------------------------------------------------ the experiments

ALL, RECORDS = [experiments.get(name) for name in experiments.names()], ledger.records()


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
