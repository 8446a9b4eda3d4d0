"""The command line as a user meets it: what it prints, how it ends, what it says when something is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import richter
import tiny
from richter import cli
from richter.commands.list import WORDS
from richter.core import Row
from richter.experiments.outcomes import OUTCOMES
from richter.instrument.fitting import log_spaced
from richter.instrument.snapshot import Snapshot
from richter.workflows.demo import TIMES, DemoSettings

COMMANDS = ("demo", "runs", "report", "serve", "doctor", "compare", "export", "scaling", "curve", "list", "run", "check",
            "ledger", "cite", "data", "words", "completion")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli.main(list(arguments)) == code
    streams = capsys.readouterr()
    return streams.out if code == 0 else streams.out + streams.err


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two runs: one that learned, one that stayed lazy."""
    for name, share in (("rich", 0.9), ("lazy", 0.01)):
        with richter.runs.create(tmp_path / name, {"scale": share}) as run:
            for step in (0, 10):
                rows = [Row(step, k, m, v) for k in ("0", "2") for m, v in (
                    ("nfc", 0.5), ("function_change", share), ("weight_change", 0.3))]
                rows += [Row(step, "*", "linearisation_gap", share), Row(step, "*", "feature_change_cka", share)]
                rows += [Row(step, "*", "magnitude", math.log10(share / (1 - share)), 0.1)]
                run.snapshot(Snapshot(tuple(rows), step, seconds=0.1, examples=8))
                run.scalars(step, loss=1.0 / (step + 1))
    return tmp_path


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small experiment in the place of all."""
    monkeypatch.setattr("richter.experiments.names", lambda: ["nfa_tiny"])
    monkeypatch.setattr("richter.experiments.get", lambda name: tiny.EXPERIMENT)


def test_help_is_a_table_of_contents(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    first = [line.split()[0] for line in shown.splitlines() if line.startswith("  ")]
    assert [word for word in first if word in COMMANDS] == list(COMMANDS)
    assert set(COMMANDS) == set(cli.parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    shown = capsys.readouterr().out
    examples = [line.strip() for line in shown.partition("examples:")[2].splitlines() if "richter" in line]
    assert examples
    for line in examples:
        words = line.removeprefix("source <(").partition("richter ")[2].partition("#")[0].partition(">")[0].strip().rstrip(")")
        cli.parser().parse_args(words.replace("'", "").split())


def test_runs_are_listed(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store / "broken").mkdir()
    (store / "broken/run.db").write_bytes(b"not a database at all, but long enough to look at" * 10)
    shown = printed(capsys, "runs", str(store))
    assert [line.split()[:3] for line in shown.splitlines()[1:]] == [
        ["broken", "unreadable"], ["lazy", "finished", "10"], ["rich", "finished", "10"]]
    rows = json.loads(printed(capsys, "runs", str(store), "--json"))
    assert [r["run"] for r in rows] == ["broken", "lazy", "rich"]
    assert rows[1]["layers"] == 2
    (store / "empty").mkdir()
    assert "no runs in" in printed(capsys, "runs", str(store / "empty"))


def test_a_run_is_diagnosed(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Verdict: rich" in printed(capsys, "doctor", str(store / "rich"))
    rows = json.loads(printed(capsys, "doctor", str(store / "lazy"), "--json"))
    assert rows["layers"]["0"]["verdict"] == "lazy"
    assert (rows["word"], rows["step"], rows["magnitude"]["text"]) == ("lazy", 10, "-2.00(10)")
    assert rows["margin"]["number"] == "feature_change_cka"
    assert {"remarks", "unknown", "evidence", "advice"} <= set(rows)


def test_a_run_is_exported(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "export", str(store / "rich"), "-o", str(tmp_path / "rich.csv"))
    lines = (tmp_path / "rich.csv").read_text().splitlines()
    assert lines[0] == "step,layer,measure,value,error,note,mark"
    assert len(lines) == 1 + 18 + 2
    assert printed(capsys, "export", str(store / "rich"), "-o", "-").splitlines() == lines
    assert printed(capsys, "export", str(store / "rich")).splitlines() == lines
    pytest.importorskip("pyarrow")
    printed(capsys, "export", str(store / "rich"), "-o", str(tmp_path / "rich.parquet"))
    assert (tmp_path / "rich.parquet").stat().st_size > 0


def test_a_report_is_written(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "report", str(store / "rich"), str(store / "lazy"), "-o", str(tmp_path / "both.html"), "--figures",
                 str(tmp_path / "figures"))
    assert shown.strip() == str(tmp_path / "both.html")
    HTMLParser().feed((tmp_path / "both.html").read_text())
    assert {p.suffix for p in (tmp_path / "figures").iterdir()} == {".svg", ".pdf"}
    assert printed(capsys, "report", str(store / "rich")).strip() == str(store / "rich/report.html")
    assert printed(capsys, "report", str(store)).strip() == str(store / "report.html")  # of all runs in the folder
    text = (store / "report.html").read_text()
    assert all(run in text for run in ("rich", "lazy"))
    (tmp_path / "empty").mkdir()
    assert "is neither a run nor a folder with runs" in printed(capsys, "report", str(tmp_path / "empty"), code=2)


def test_experiments_measures_and_theories_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "list")
    catalogues = {"experiments": richter.experiments, "measures": richter.measures, "theories": richter.theory}
    for what, package in catalogues.items():
        assert all(name in shown for name in package.names())
        rows = json.loads(printed(capsys, "list", what, "--json"))
        assert {row["name"] for row in rows[what]} == set(package.names())
        assert [rows[other] for other in catalogues if other != what] == [[], []]
        only = printed(capsys, "list", what)
        assert only.strip() in shown
    e = richter.experiments.get("rfm_networks")
    row = next(r for r in json.loads(printed(capsys, "list", "--json"))["experiments"] if r["name"] == e.name)
    assert (row["title"], row["ref"], tuple(row["data"]), tuple(row["more_data"])) == (
        e.title, str(e.ref), e.data, e.more_data)
    assert "needs mnist_5k, mnist (paper)" in " ".join(shown.split())


@pytest.mark.parametrize("width", [80, 120, 200])
def test_lists_fit_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is cut off: what does not fit is wrapped. The words of the verdicts are explained below."""
    monkeypatch.setenv("COLUMNS", str(width))
    shown = printed(capsys, "list", "experiments")
    assert max(map(len, shown.splitlines())) <= width
    words = " ".join(shown.split())
    rows = json.loads(printed(capsys, "list", "experiments", "--json"))["experiments"]
    assert all(row["title"] in words for row in rows)
    meanings = WORDS | dict(OUTCOMES)
    for verdict in {verdict for row in rows for verdict in row["verdict"].values()}:
        assert f"{verdict} {meanings[verdict]}" in words
    for what in ("measures", "theories"):
        assert max(map(len, printed(capsys, "list", what).splitlines())) <= width


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys)
    assert shown.startswith("usage: richter COMMAND ...")
    assert "`richter COMMAND --help` shows the options and examples of each." in shown


def test_the_default_measures_are_marked_and_first(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "list", "measures")
    starred = [line.split()[1] for line in shown.splitlines() if line.startswith("* ") and "by default" not in line]
    assert starred == list(richter.measures.DEFAULT)
    rows = json.loads(printed(capsys, "list", "measures", "--json"))["measures"]
    assert [row["name"] for row in rows if row["default"]] == starred == [row["name"] for row in rows][:len(starred)]


def test_a_check_prints_a_table_and_exits_by_it(tmp_path: Path, experiment: None, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "check", "--store", str(tmp_path), "--controls")
    row = next(line for line in shown.splitlines() if line.startswith("distance to the closed form"))
    assert row.split()[-5:] == ["0", "0", "<=", "1e-09", "holds"]
    assert shown.count("fails, as it must") == 2
    summary = next(p for p in (tmp_path / "experiments/nfa_tiny").iterdir() if p.name.startswith("smoke-"))
    assert {p.suffix for p in summary.iterdir()} >= {".svg", ".pdf"}
    assert richter.runs.load(summary).claims["growth of the curve"]["verdict"] == "holds"
    rows = json.loads(printed(capsys, "check", "nfa_*", "--store", str(tmp_path), "--json"))
    assert rows[0]["claims"][0]["holds"] is True
    assert "starts" in printed(capsys, "check", "--scale", "paper", "--start", "--store", str(tmp_path))


def test_a_failed_claim_is_exit_code_one(tmp_path: Path, experiment: None, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "run", "nfa_tiny", "--set", "wrong=yes", "--store", str(tmp_path), code=1)
    assert "FAILED" in shown


def test_one_that_fails_stops_no_other(tmp_path: Path, experiment: None, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    broken = dataclasses.replace(tiny.EXPERIMENT, smoke=dataclasses.replace(tiny.EXPERIMENT.smoke, broken=1))
    monkeypatch.setattr("richter.experiments.names", lambda: ["nfa_broken", "nfa_tiny"])
    monkeypatch.setattr("richter.experiments.get", lambda name: broken if name == "nfa_broken" else tiny.EXPERIMENT)
    assert cli.main(["check", "--store", str(tmp_path), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert "seed 1 is broken" in rows[0]["error"]
    assert rows[1]["claims"][0]["holds"]
    assert "leave out --set or --record" in printed(capsys, "run", "nfa_tiny", "--set", "steps=3", "--record", code=2)
    assert "nothing to do" in printed(capsys, "run", "nfa_tiny", "--set", "seeds=", "--store", str(tmp_path), code=2)


def test_an_experiment_without_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RICHTER_DATA", str(tmp_path))
    assert cli.main(["check", "signal_fig7", "--store", str(tmp_path / "store")]) == 1
    assert "signal_fig7: skipped, it needs `richter data fetch fashion_mnist`" in capsys.readouterr().err
    shown = printed(capsys, "run", "signal_fig7", "--store", str(tmp_path / "store"), code=2)
    assert "richter data fetch fashion_mnist" in shown


def test_citations(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "cite", "nfa_fig1", "nfc", "nfa").count("@") == 1
    assert printed(capsys, "cite", "tangent_cka").startswith("@")
    assert printed(capsys, "cite", "freeprob.centred_nfc") == printed(capsys, "cite", "nfa")


def test_the_data_sets_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RICHTER_DATA", str(tmp_path))
    rows = json.loads(printed(capsys, "data", "list", "--json"))
    assert {"mnist", "fashion_mnist", "cifar10", "shakespeare"} <= {e["name"] for e in rows}
    assert not any(e["cached"] for e in rows)
    shown = printed(capsys, "data", "where", "mnist", code=2)  # what is not here has no place
    assert "run `richter data fetch mnist` once" in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "doctor" in printed(capsys, "completion", shell)


def test_the_demo_measures_often() -> None:
    due = log_spaced(DemoSettings(1.0).steps, TIMES)
    steps = [s for s in range(DemoSettings(1.0).steps) if due(s)]
    assert len(steps) + 1 >= 40  # and the last step
    assert len([s for s in steps if s < 1000]) >= 15


def test_the_demo_ends_with_a_report_of_both_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "store/demo"
    shown = printed(capsys, "demo", "--steps", "30", "--folder", str(folder))
    assert f"Report:       {folder / 'report.html'}" in shown
    assert f"Dashboard:    richter serve {folder}" in shown
    assert (folder / "report.html").stat().st_size > 20_000
    for name, scale in (("lazy", 1000.0), ("rich", 1.0)):
        assert f"{name}: " in shown
        run = richter.runs.load(folder / name)
        assert run.status == "finished"
        assert (run.settings["steps"], run.settings["scale"]) == (30, scale)
        layers = [f"body.{i}" for i in (0, 2, 4, 6)]
        stored = {(k, n) for k, n, _ in run.arrays}
        assert {(k, n) for k in layers for n in ("nfm", "agop", "feature_gram")} <= stored  # for the tabs Matrices and Compare
        assert run.has("kappa_cka")  # Features
        assert {"loss", "train_accuracy", "test_accuracy"} <= set(run.scalar_names)


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["demo", "--steps", "1"], "richter demo: --steps 1: a training needs at least 2 steps"),
    (["runs", "/nonexistent"], "richter runs: there is no folder /nonexistent"),
    (["doctor", "/nonexistent"], "richter doctor: /nonexistent contains no run"),
    (["report", "/nonexistent"], "richter report: /nonexistent contains no run"),
    (["run", "nfa_fi"], "Close to it: 'nfa_fig"),
    (["check", "zzz"], "no experiment 'zzz'"),
    (["run", "nfa_fig1", "--set", "step=3"], "Close to it: 'steps'"),
    (["cite", "nobody"], "no paper, experiment, measure or theory 'nobody'"),
    (["data", "fetch", "imagenet"], "imagenet"),
    (["report", "/nonexistent", "-o", "/"], "contains no run"),
    (["serve", __file__], "is a file; a store is a folder of runs"),
])
def test_errors_are_one_sentence_with_what_to_do(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    streams = capsys.readouterr()
    assert sentence in streams.err
    assert "Traceback" not in streams.err
    assert len(streams.err.strip().splitlines()) == 1


def test_export_needs_a_known_ending(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "must end in .csv or .parquet" in printed(capsys, "export", str(store / "rich"), "-o", "x.xlsx", code=2)
    assert "does not exist" in printed(capsys, "export", str(store / "rich"), "-o", "/nonexistent/x.csv", code=2)


def test_a_closed_pipe_is_no_error(store: Path) -> None:
    done = subprocess.run(f"{sys.executable} -m richter.cli runs {store} | true", shell=True, capture_output=True, text=True,
                          check=False)
    assert "Traceback" not in done.stderr


def test_the_package_is_a_command() -> None:
    out = subprocess.run([sys.executable, "-m", "richter", "--help"], capture_output=True, text=True, check=True).stdout
    assert "richter COMMAND" in out
