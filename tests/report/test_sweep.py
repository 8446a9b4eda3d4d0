"""The table of many runs: against a slow table from the frames of the runs, its order, its text, and the places that show it."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from judged import Training
from richter.cli import main
from richter.core import SelectionError
from richter.engine import sweep as run_sweep
from richter.instrument.verdict import diagnose
from richter.report import sweep
from richter.report.sweep import RunRow, SweepTable
from richter.runs import Run, Writer, create, find

LAZY = {"linearisation_gap": 0.01, "magnitude": -2.0, "feature_change_cka": 0.001}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    worse = {"probe_accuracy": 0.1, "probe_loss": 50.0}
    for name, now, lr, seed in (("a", {}, 0.1, 0), ("b", LAZY, 0.001, 0), ("c", worse, 10.0, 1)):
        settings = {"lr": lr, "model": {"width": 8}, "seed": seed, "loss": "mse"}
        Training(now, loss=[2.3, 2.0 if name == "c" else 0.3]).keep(tmp_path / name, settings)
    return tmp_path


def slow(runs: dict[str, Run]) -> list[dict[str, Any]]:
    """Compute it from whole frames, one cell after the other."""
    rows = []
    for name, run in runs.items():
        frame, scalars, d = run.frame, run.scalar_frame, diagnose(run)
        last = frame[(frame.step == max(frame.step)) & (frame.layer == "*") & frame.value.notna()]
        cells = {r.measure: r.value for r in last.itertuples()}
        cells |= {n: scalars[n].dropna().iloc[-1] for n in scalars.columns if n != "step"}
        if d.magnitude is None:
            cells.pop("magnitude")
        rows.append({"run": name, "settings": run.settings, "finals": cells, "verdict": d.word})
    return rows


def test_the_table_is_what_frames_and_verdicts_say(store: Path) -> None:
    runs = {run.name: run for run in find(store)}
    table = sweep.table(runs)
    for r, s in zip(table.rows, slow(runs), strict=True):
        assert (r.run, r.verdict, r.finals) == (s["run"], s["verdict"], s["finals"])
        assert r.settings["lr"] == str(s["settings"]["lr"])
        assert r.settings["model.width"] == "8"
    assert [r.verdict for r in table.rows] == ["rich", "lazy", "diverged"]
    assert table.settings == ["lr", "seed"]  # width and loss are the same in all
    assert table.columns == ["run", "status", "step", "lr", "seed", "loss", "probe_accuracy", "magnitude", "verdict"]
    assert [sweep.read(name, run.path) for name, run in runs.items()] == list(table.rows)


def test_a_setting_that_is_a_final_value_too_has_a_name_of_its_own() -> None:
    table = SweepTable((RunRow("a", "finished", settings={"lr": "0.1"}, finals={"lr": 0.01}),
                        RunRow("b", "finished", settings={"lr": "0.3"}, finals={"lr": 0.02})))
    assert table.settings == ["settings.lr"]
    assert table.points("lr", "settings.lr") == [(0.1, 0.01, "a"), (0.3, 0.02, "b")]


def test_the_accuracy_is_that_which_most_runs_have() -> None:
    both = {"test_accuracy": 0.9, "probe_accuracy": 1.0}
    assert SweepTable((RunRow("a", "", finals=both), RunRow("b", "", finals=both))).accuracy == "test_accuracy"
    some = SweepTable((RunRow("a", "", finals=both), RunRow("b", "", finals={"probe_accuracy": 0.5})))
    assert some.accuracy == "probe_accuracy"
    assert SweepTable((RunRow("a", ""),)).accuracy is None


VALUE = st.one_of(st.none(), st.floats(width=32), st.sampled_from(["adam", "sgd", "10", "9.5"]))


@given(st.lists(VALUE, max_size=12), st.booleans(), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_rows_are_sorted_numbers_first_and_gaps_last(values: list[float | str | None], reverse: bool, seed: int) -> None:
    rows = [RunRow(f"r{i}", "finished", settings={"x": v} if isinstance(v, str) else {},
                   finals={"x": v} if isinstance(v, float) else {}) for i, v in enumerate(values)]
    random.Random(seed).shuffle(rows)
    table = SweepTable((*rows, RunRow("last", "finished", settings={"x": "0"})))
    order = [table.value(r, "x") for r in table.by("x", reverse).rows]
    have = [v for v in order if v is not None]
    assert order[len(have):] == [None] * (len(order) - len(have))
    have = have[::-1] if reverse else have
    numbers = [v for v in have if not isinstance(v, str)]
    assert have[:len(numbers)] == numbers or any(map(math.isnan, numbers))
    finite = [v for v in numbers if not math.isnan(v)]
    assert finite == sorted(finite)
    words = [v for v in have if isinstance(v, str)]
    assert words == sorted(words)


def test_what_cannot_be_sorted_or_plotted_is_said(store: Path) -> None:
    table = sweep.table({run.name: run for run in find(store)})
    with pytest.raises(SelectionError, match=r"this table has no column 'magnitud'\. Close to it: 'magnitude'"):
        table.by("magnitud")
    with pytest.raises(SelectionError, match=r"this table has no column 'depth'"):
        table.plot("magnitude", "depth")


def test_runs_without_settings_are_told_to_have_some(store: Path) -> None:
    table = sweep.table({run.name: run for run in list(find(store))[:1]})  # of one run no setting differs
    with pytest.raises(SelectionError, match=r"differ in no setting: give each its own, Observer\(.*settings="):
        table.plot("magnitude", "depth")


def test_a_value_is_plotted_against_a_setting(store: Path) -> None:
    table = sweep.table({run.name: run for run in find(store)})
    points = table.points("magnitude", "lr")
    assert [(x, run) for x, _, run in points] == [(0.001, "b"), (0.1, "a")]  # the diverged run has no magnitude
    ax, = table.plot("magnitude", "lr").axes
    assert ax.get_xscale() == "log"
    assert ax.get_lines()[1].get_xydata().tolist() == [[x, y] for x, y, _ in points]
    median = SweepTable(tuple(RunRow(str(i), "", settings={"o": "ab"[i // 3]}, finals={"y": float(i * i)}) for i in range(6)))
    ax, = median.plot("y", "o").axes
    assert ax.get_lines()[0].get_xydata().tolist() == [[0, 1], [1, 16]]


def test_a_narrow_terminal_leaves_out_settings_and_names_them(store: Path) -> None:
    table = sweep.table({run.name: run for run in find(store)})
    narrow = table.text(max(map(len, table.text().splitlines())) - 1)
    assert "Settings that differ too: seed (a wider terminal or --json shows them)." in narrow
    assert "lr" in narrow.splitlines()[0].split()
    assert "Settings" not in table.text(1000)


@dataclass(frozen=True)
class Width:
    width: int


def work(s: Width, run: Writer) -> dict[str, Any]:
    run.scalars(0, loss=1.0 / s.width)
    return {"test_error": s.width / 100, "solved": s.width > 8, "kernel": [[1.0, 0.0], [0.0, 1.0]]}


def test_numbers_that_the_task_of_a_sweep_returns_are_columns_to_choose(tmp_path: Path) -> None:
    run_sweep(work, [Width(8), Width(16)], tmp_path)
    table = sweep.table({run.name: run for run in find(tmp_path)})
    assert table.values == ["loss", "test_error", "solved"]  # the kernel is no number
    assert [(x, y) for x, y, _ in table.points("test_error", "width")] == [(8.0, 0.08), (16.0, 0.16)]
    assert [r.finals["solved"] for r in table.by("width", reverse=True).rows] == [1.0, 0.0]


def test_the_commands_print_it(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                               monkeypatch: pytest.MonkeyPatch) -> None:
    (store / "bad").mkdir()
    (store / "bad" / "run.db").write_bytes(b"nothing of use" * 100)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["runs", str(store), "--sort", "lr", "--reverse"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == sweep.table({run.name: run for run in find(store)}).columns
    assert [line.split()[0] for line in lines[:4]] == ["c", "a", "b", "bad"]
    assert main(["doctor", str(store)]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[1:5]] == ["b", "a", "bad", "c"]  # lazy to rich, then those without
    assert "c: diverged" in shown
    assert main(["doctor", str(store), "--json"]) == 0
    assert {r["run"]: r.get("verdict") for r in json.loads(capsys.readouterr().out)}["b"] == "lazy"
    assert main(["runs", str(store), "--plot", "magnitude", "lr", "-o", str(tmp_path / "plot")]) == 0
    assert (tmp_path / "plot.svg").is_file()


def test_a_folder_without_runs_has_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) != 0
    assert "is neither a run nor a folder with runs" in capsys.readouterr().err


def test_a_run_without_measurements_has_a_row(tmp_path: Path) -> None:
    create(tmp_path / "new").close("finished")
    r = sweep.read("new", tmp_path / "new")
    assert (r.verdict, r.magnitude, r.finals) == ("", "", {})
