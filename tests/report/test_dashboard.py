"""The dashboard: what the server reads and refuses, and what a browser shows while a run is being written."""

from __future__ import annotations

import base64
import csv
import json
import math
import os
import platform
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.parse import quote, urlencode
from urllib.request import urlopen
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from judged import Training
from richter.core import Card, Mark, RichterError, Row, SelectionError, StoreError
from richter.instrument.snapshot import Snapshot
from richter.instrument.verdict import diagnose
from richter.measures.cards import CARDS, panels
from richter.report import listing, server, shelf, sweep, views
from richter.report.answers import answers
from richter.report.guard import chosen_token
from richter.report.query import Query
from richter.report.server import application, serve
from richter.report.thin import numbers, shrink, thin
from richter.runs import Run, Series, create
from richter.runs import reader as runs_reader
from runs_helpers import sealed

if TYPE_CHECKING:
    from browser import Browser

pytest_plugins = ["browser"]
LAYERS, MEASURES = ("0", "2"), ("nfc", "c_uc_ratio", "weight_change")


def snapshot(step: int, layers: tuple[str, ...] = LAYERS, measures: tuple[str, ...] = MEASURES) -> Snapshot:
    remark = {"2": ("trivial: by definition", Mark.TRIVIAL)}
    return Snapshot(tuple(Row(step, k, m, 0.1 * i + step / 1000, 0.01, *remark.get(k, ("", Mark.EXACT)))
                          for k in layers for i, m in enumerate(measures)), step=step)


def make(path: Path, steps: int = 5, finish: str | None = "finished", settings: object = None) -> Path:
    """A small run with rows, scalars and matrices."""
    writer = create(path, settings or {"lr": 0.1, "model": {"width": 8}})
    for step in range(steps):
        writer.snapshot(snapshot(step))
        writer.scalars(step, loss=2.0 / (1 + step))
        writer.array("nfm", np.diag(np.arange(1.0, 7)) * (1 + step), layer="0", step=step, eigen=0.9999)
    writer.close(finish)
    return path


# ------------------------------------------------------------------------------------------------------------ the reader

def test_curves_are_the_series_one_by_one(tmp_path: Path) -> None:
    def check(run: Run) -> None:
        found = run.curves([*MEASURES, "nonsense"], [*LAYERS, "nonsense"])
        assert set(found) == {(m, k) for m in MEASURES for k in LAYERS}
        for (m, k), (series, remark) in found.items():
            for mine, theirs in zip(series, run.series(m, k), strict=True):
                np.testing.assert_array_equal(mine, theirs)
            assert remark == ((Mark.TRIVIAL, "trivial: by definition") if k == "2" else (Mark.EXACT, ""))
        assert list(run.scalar_curves(["loss", "nonsense"])["loss"].step) == [0, 3, 5]

    with create(tmp_path / "run") as writer:
        for step in (0, 5, 3, 5):  # out of order, and one twice
            writer.snapshot(snapshot(step))
            writer.scalars(step, loss=step)
        writer.rows([Row(3, "0", "nfc", math.nan)])
        check(writer.run)
    check(Run(tmp_path / "run"))  # closed, its rows have been moved to their place
    assert Run(tmp_path / "run").curves([], []) == {}


def test_the_verdict_needs_only_the_ends(tmp_path: Path) -> None:
    run = Run(make(tmp_path / "run", steps=7))
    assert [s.step for s in run.ends] == [0, 6]
    assert [s.rows for s in run.ends] == [run.snapshots[0].rows, run.snapshots[-1].rows]
    logged = {name: getattr(run, name) for name in ("scalar_names", "scalars", "last", "failures")}
    assert diagnose(SimpleNamespace(snapshots=run.ends, **logged)) == diagnose(run)
    assert Run(make(tmp_path / "empty", steps=0)).ends == []
    with create(tmp_path / "rows") as writer:  # written without snapshots
        for step in (3, 1, 2):
            writer.rows(snapshot(step).rows)
            writer.scalars(step + 5, loss=1.0)
        assert [s.step for s in writer.run.ends] == [1, 3]
    assert [s.step for s in Run(tmp_path / "rows").ends] == [1, 3]


def test_the_shape_of_an_array_is_known_before_it_is_read(tmp_path: Path) -> None:
    assert Run(make(tmp_path / "run")).shape("nfm", "0", 3) == (6, 6)


def test_a_folder_that_goes_away_does_not_end_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a" / "run")
    (tmp_path / "gone").mkdir()
    real = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: real(self / "nothing" if self.name == "gone" else self))
    assert [p.name for p in runs_reader.paths(tmp_path, 3)] == ["run"]


# ---------------------------------------------------------------------------------------------------------- fewer points

VALUES = st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=300)


@given(VALUES, st.integers(4, 60))
def test_thinning_keeps_ends_and_extremes_and_invents_nothing(values: list[float], points: int) -> None:
    value = np.array(values, dtype=np.float64)
    series = Series(np.arange(len(value)) * 3, value, value / 2)
    small = thin(series, points)
    assert len(small.step) <= max(points, 4)
    assert small.step[0] == series.step[0]
    assert small.step[-1] == series.step[-1]
    assert (np.diff(small.step) > 0).all()
    for mine, theirs in zip(small, series, strict=True):  # each kept point is one of the given ones, whole
        np.testing.assert_array_equal(mine, theirs[small.step // 3])
    if not np.isnan(value).all():
        assert np.nanmin(small.value) == np.nanmin(value)
        assert np.nanmax(small.value) == np.nanmax(value)
    if len(value) <= points:
        assert len(small.step) == len(value)


def test_thinning_keeps_a_spike_and_refuses_too_few_points() -> None:
    value = np.zeros(100_000)
    value[54_321] = 1.0
    assert thin(Series(np.arange(100_000), value, value), 100).value.max() == 1.0
    with pytest.raises(SelectionError, match="at least 4 points"):
        thin(Series(np.arange(9), np.zeros(9), np.zeros(9)), 3)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.integers(0, 9))
def test_a_smaller_matrix_has_the_largest_entries(rows: int, columns: int, size: int, seed: int) -> None:
    a = np.random.default_rng(seed).normal(size=(rows, columns))
    small = shrink(a, size)
    assert small.shape[0] <= size
    assert small.shape[1] <= size
    assert np.isin(small, a).all()
    assert np.abs(small).max() == np.abs(a).max()
    assert shrink(a, 40) is a


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20))
def test_numbers_are_short_and_close(values: list[float]) -> None:
    for given_, said in zip(values, numbers(np.array(values, dtype=np.float64)), strict=True):
        assert (said is None) == (not math.isfinite(given_))
        assert said is None or said == pytest.approx(given_, rel=1e-6, abs=0)


# ---------------------------------------------------------------------------------------------------------------- server

@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    make(folder / "store" / "a")
    make(folder / "store" / "deep" / "b", settings={"lr": 0.2, "model": {"width": 8}})
    make(folder / "outside")
    return folder


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Path:
    """A store with the runs a and deep/b, beside a run that is none of its business."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return tmp_path / "store"


def client(store: Path, host: str = "127.0.0.1", token: str | None = None, at: str = "http://localhost:8642") -> TestClient:
    return TestClient(application(store, host, token), base_url=at)


def test_runs_are_listed_with_what_they_are(store: Path) -> None:
    make(store / "failed", finish="failed: ValueError: the loss is NaN")
    make(store / "killed", finish=None)
    with closing(create(store / "now", {})) as writer:
        writer.scalars(7, loss=1.0)
        found = {r["name"]: r for r in client(store).get("/api/runs").json()["runs"]}
    assert {k: r["status"] for k, r in found.items()} == {
        "a": "finished", "deep/b": "finished", "failed": "failed", "killed": "interrupted", "now": "running"}
    assert found["failed"]["reason"] == "ValueError: the loss is NaN"
    assert found["a"]["last"] == 4
    assert found["now"]["last"] == 7
    assert abs(found["a"]["updated"] - time.time()) < 60


@pytest.mark.parametrize(("said", "share"), [(0.25, 0.25), (1, 1.0), (math.nan, None), (1.5, None), ("half", None), (None, None)])
def test_a_running_run_says_how_much_is_done(tmp_path: Path, said: object, share: float | None) -> None:
    with create(tmp_path / "run") as writer:
        writer.describe(progress=said)
        assert client(tmp_path).get("/api/runs").json()["runs"][0]["progress"] == share
    (line,) = client(tmp_path).get("/api/runs").json()["runs"]
    assert (line["status"], line["progress"]) == ("finished", None)


def test_measures_stand_in_the_order_of_the_report(tmp_path: Path) -> None:
    measures = ("tangent_cka", "nfc", "mine", "weight_change", "magnitude")
    with create(tmp_path / "run") as writer:
        writer.snapshot(snapshot(0, measures=measures))
    held = client(tmp_path).get("/api/run", params={"run": "run"}).json()["measures"]
    assert held[0] == "magnitude"
    assert held == [m for *_, mine in panels(measures) for m in mine]


def test_a_run_says_what_it_holds(store: Path) -> None:
    found = client(store).get("/api/run", params={"run": "deep/b"}).json()
    assert found["measures"] == found["first"] == list(MEASURES)
    assert found["layers"] == list(LAYERS)
    assert found["scalars"] == ["loss"]
    assert found["cards"]["nfc"] == {"title": CARDS["nfc"].title, "sentence": CARDS["nfc"].sentence}
    (found,) = client(store).get("/api/settings", params={"run": "deep/b"}).json()["runs"]
    assert found["seeds"] == {}
    assert found["settings"] == {"lr": "0.2", "model.width": "8"}
    assert found["where"]["python"] == platform.python_version()


def test_curves_of_several_runs_come_in_one_answer(store: Path) -> None:
    ask = {"run": ["a", "deep/b"], "measure": ["nfc", "nonsense"], "layer": ["0", "2", "nonsense"], "scalar": "loss"}
    found = client(store).get("/api/curves", params=ask).json()["curves"]
    assert [(c["run"], c["measure"], c["layer"]) for c in found] == [
        (run, *rest) for run in ("a", "deep/b") for rest in (("nfc", "0"), ("nfc", "2"), ("loss", None))]
    assert found[0]["step"] == [0, 1, 2, 3, 4]
    assert found[0]["value"] == pytest.approx([0.0, 0.001, 0.002, 0.003, 0.004])
    assert [c["mark"] for c in found[:3]] == ["exact", "trivial", "exact"]
    assert found[1]["note"] == "trivial: by definition"
    assert found[2]["error"] == [None] * 5
    few = client(store).get("/api/curves", params=ask | {"points": 4}).json()["curves"]
    assert all(len(c["step"]) <= 4 and c["count"] == 5 for c in few)
    table = client(store).get("/api/curves.csv", params=ask)
    assert "attachment" in table.headers["content-disposition"]
    lines = list(csv.DictReader(table.text.splitlines()))
    assert len(lines) == 30
    assert lines[1] == {"run": "a", "step": "1", "layer": "0", "measure": "nfc", "value": "0.001", "error": "0.01", "note": "",
                        "mark": "exact"}


def test_a_measure_of_one_s_own_has_its_title(store: Path) -> None:
    with create(store / "mine") as writer:
        writer.rows([Row(0, "0", m, 0.5) for m in ("dead", "nfc", "plain")])
        writer.describe(cards={"dead": Card("share of dead units", "How many are never active.", unit="%").to_json(), "plain": 3})
    found = client(store).get("/api/run", params={"run": "mine"}).json()
    assert found["cards"] == {"dead": {"title": "share of dead units [%]", "sentence": "How many are never active."},
                              "nfc": {"title": CARDS["nfc"].title, "sentence": CARDS["nfc"].sentence},
                              "plain": {"title": "plain", "sentence": ""}}
    assert found["first"] == ["nfc"]


def test_the_verdict_is_in_words(store: Path) -> None:
    found = client(store).get("/api/verdict", params={"run": "a"}).json()
    assert found["verdict"] == diagnose(Run(store / "a")).verdict
    assert found["step"] == 4
    assert [v["layer"] for v in found["layers"]] == list(LAYERS)
    make(store / "new", steps=0)
    assert "Nothing has been measured" in client(store).get("/api/verdict", params={"run": "new"}).json()["verdict"]


def test_a_run_is_listed_and_shown_with_its_magnitude(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Training().keep(tmp_path / "rich")
    c = client(tmp_path)
    found = c.get("/api/verdict", params={"run": "rich"}).json()
    assert (found["word"], found["step"], found["magnitude"]["text"]) == ("rich", 100, "0.368(10)")
    assert found["margin"]["text"] in found["measured"]
    assert found["unknown"]
    make(tmp_path / "new", steps=0)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.db").write_bytes(b"nothing of use" * 100)
    assert {r["name"]: r["verdict"] for r in c.get("/api/runs").json()["runs"]} == {
        "rich": "rich, magnitude 0.368(10)", "new": "", "bad": ""}
    monkeypatch.setattr("richter.report.listing.Listing._judged", lambda self, s: s)  # no time is left
    assert [r["verdict"] for r in client(tmp_path).get("/api/runs").json()["runs"]] == [None, None, None]


CLAIM = {"text": "it rises", "paper": "0.9", "source": "a check", "expect": [0.2, None], "value": 0.5, "holds": True,
         "verdict": "reproduced"}
SCRIPT = b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'><script>alert(4)</script></svg>"


def test_claims_and_pictures_come_with_the_verdict(store: Path) -> None:
    with create(store / "a", resume=True) as writer:
        writer.claim("it rises", CLAIM)
        writer.claim("mine", {"a": 1})
        for kind in ("svg", "pdf"):
            writer.figure("fig", kind, SCRIPT)
    c = client(store)
    found = c.get("/api/verdict", params={"run": "a"}).json()
    assert [list(c.values()) for c in found["claims"]] == [
        ["it rises", "at least 0.2", "0.5", "0.9", "reproduced", "", True], ["mine", "", "", "", "", "a: 1", None]]
    assert found["figures"] == [{"name": "fig", "kind": "svg"}]
    picture = c.get("/api/figure", params={"run": "a", "name": "fig", "kind": "svg"})
    assert picture.content == SCRIPT
    assert picture.headers["content-type"] == "image/svg+xml"
    assert picture.headers["x-content-type-options"] == "nosniff"
    policy = picture.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert policy.endswith("sandbox")
    assert "script" not in policy
    assert c.get("/api/figure", params={"run": "a", "name": "fig", "kind": "pdf"}).status_code == 400
    assert c.get("/api/figure", params={"run": "a", "name": "other", "kind": "svg"}).status_code == 400


def test_a_matrix_comes_with_its_spectrum(store: Path) -> None:
    c = client(store)
    (array,) = c.get("/api/matrices", params={"run": "a"}).json()["arrays"]
    assert array == {"name": "nfm", "layer": "0", "steps": [0, 1, 2, 3, 4]}
    ask = {"run": "a", "name": "nfm", "layer": "0", "step": 2}
    found = c.get("/api/matrix", params=ask).json()
    entries = np.frombuffer(base64.b64decode(found["data"]), "<f4").reshape(found["shown"])
    np.testing.assert_allclose(entries, 3 * np.diag(np.arange(1.0, 7)), atol=1e-6)
    assert found["spectrum"] == pytest.approx([18, 15, 12, 9, 6, 3])
    assert c.get("/api/matrix", params=ask | {"size": 4}).json()["shown"] == [3, 3]
    assert c.get("/api/matrix.csv", params=ask).text.splitlines()[1] == "3.0,0.0,0.0,0.0,0.0,0.0"


@pytest.mark.parametrize(("array", "words"), [
    (np.arange(12.0).reshape(3, 4), "singular values"), (np.array([[0.0, 1], [1, 0]]), "eigenvalues"),
    (np.array([[math.nan, 1], [1, 0]]), "not finite"), (np.arange(5), ""), (np.array([[1j, 2]]), "singular values")])
def test_any_array_of_numbers_is_shown(tmp_path: Path, array: np.ndarray, words: str) -> None:
    with create(tmp_path / "run") as writer:
        writer.array("x", array, layer="0", step=0)
    found = client(tmp_path).get("/api/matrix", params={"run": "run", "name": "x", "layer": "0"}).json()
    assert tuple(found["shape"]) == array.shape
    assert words in found["spectrum_words"]


def test_an_array_that_announces_too_much_is_not_put_together(tmp_path: Path) -> None:
    with create(tmp_path / "run") as writer:
        writer.array("x", np.eye(3), layer="0", step=0)
        writer.array("cube", np.zeros((2, 2, 2)), layer="0", step=0)
    with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as other:
        other.execute("UPDATE arrays SET shape = '[100000, 100000]', form = 'eigen' WHERE name = 'x'")
        other.commit()
    sealed(tmp_path / "run" / "run.db")
    for name in ("x", "cube"):
        reply = client(tmp_path).get("/api/matrix", params={"run": "run", "name": name, "layer": "0"})
        assert reply.status_code == 400
        assert "can be shown" in reply.json()["error"]


# ----------------------------------------------------------------------------------------------------------------- views

def losses(runs: shelf.Chosen, query: Query) -> list[views.Curves | views.Table | views.Words]:
    """A view of a user's own."""
    series = {name: run.scalars("loss") for name, run in runs}
    return [views.Curves("Losses", series, "As they were logged."), views.Curves("Halves", {"a": ([0, 1], [2.0, math.nan])}),
            views.Table("Last", ("run", "loss"), [(name, s.value[-1]) for name, s in series.items()] + [("none", math.inf)]),
            views.Words("Note", f"Asked for {query.several('more')}.")]


@pytest.fixture
def added() -> Iterator[views.View]:
    yield views.add(views.View("losses", "Losses", losses))
    views.VIEWS.remove("losses")


def test_the_folder_is_the_list_of_views(store: Path) -> None:
    listed = client(store).get("/api/views").json()["views"]
    assert [v["title"] for v in listed] == [
        "Curves", "Runs", "Profiles", "Matrices", "Features", "Compare", "Verdict", "Settings"]
    assert {v["name"] for v in listed} == {p.stem for p in Path(views.__file__).parent.glob("[!_]*.py")}
    for v in listed:
        assert client(store).get(f"/static/{v['script']}").status_code == 200


def test_a_view_from_outside_is_answered_like_the_others(store: Path, added: views.View) -> None:
    c = client(store)
    assert c.get("/api/views").json()["views"][-1] == {"name": "losses", "title": "Losses", "script": "view-panels.js"}
    found = c.get("/api/losses", params={"run": ["a", "deep/b"], "more": "x"})
    curves, halves, table, words = found.json()["panels"]
    assert [line["label"] for line in curves["curves"]] == ["a", "deep/b"]
    assert curves["curves"][0]["value"] == pytest.approx([2.0 / (1 + s) for s in range(5)])
    assert (curves["title"], curves["sentence"]) == ("Losses", "As they were logged.")
    assert halves["curves"] == [{"label": "a", "step": [0, 1], "value": [2, None], "error": [None, None]}]
    assert table["rows"] == [["a", 0.4], ["deep/b", 0.4], ["none", None]]
    assert words == {"kind": "words", "title": "Note", "sentence": "Asked for ['x']."}
    again = c.get("/api/losses", params={"run": ["a", "deep/b"], "more": "x"}, headers={"If-None-Match": found.headers["etag"]})
    assert again.status_code in (200, 304)  # 304, unless the store changed just now
    assert client(store).get("/api/losses", params={"run": "nothing"}).status_code == 404


def test_the_example_of_the_document_is_a_view(store: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "dashboard.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    try:
        exec(code, {})
        curves, table = client(store).get("/api/losses", params={"run": ["a", "deep/b"]}).json()["panels"]
    finally:
        views.VIEWS.remove("losses")
    assert [line["label"] for line in curves["curves"]] == ["a", "deep/b"]
    assert table["rows"] == [["a", 0.4], ["deep/b", 0.4]]


@pytest.mark.parametrize(("answer", "words"), [
    (lambda runs, query: [run.last + "x" for _, run in runs], r"the view 'losses' cannot show the run 'deep/b'.*TypeError"),
    (lambda runs, query: {"value": math.nan}, r"cannot be written as JSON.*Curves, Table, Words"),
    (lambda runs, query: runs.one(), "given 2 times"),
    (lambda runs, query: query.whole("more", 0, 1, 0), "not a whole number")])
def test_a_view_that_fails_says_so(store: Path, added: views.View, answer: views.Answer, words: str) -> None:
    views.add(replace(added, answer=answer))
    reply = client(store).get("/api/losses", params={"run": ["deep/b", "a"], "more": "x"})
    assert reply.status_code in (400, 404)
    assert re.search(words, reply.json()["error"])


def test_names_of_views_are_their_own(store: Path, added: views.View) -> None:
    with pytest.raises(SelectionError, match="is a built-in view"):
        views.add(views.View("curves", "Mine", losses))
    views.add(replace(added, more={"matrix": losses}))
    reply = client(store).get("/api/run", params={"run": "a"})
    assert reply.status_code == 400
    assert "'losses' answers to 'matrix', and so does another" in reply.json()["error"]


def test_runs_are_open_one_at_a_time(store: Path) -> None:
    mine = shelf.Shelf(store, most=0)
    with shelf.Chosen(mine, ["a", "deep/b"]) as chosen:
        for name, run in chosen:
            assert (chosen.current, run.last) == (name, 4)
            assert len(mine._open) == 1
    assert all(not entry.users for entry in mine._open.values())


# ------------------------------------------------------------------------------------------------- polling and many runs

def test_an_idle_poll_is_answered_with_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "SETTLED", 0.0)
    c, ask = client(store), {"run": "a", "measure": "nfc", "layer": "0"}
    for path, query in (("/api/runs", {}), ("/api/run", {"run": "a"}), ("/api/verdict", {"run": "a"}), ("/api/curves", ask),
                        ("/plotly.js", {})):
        tag = c.get(path, params=query).headers["etag"]
        again = c.get(path, params=query, headers={"If-None-Match": tag})
        assert again.status_code == 304
        assert again.content == b""
        assert c.get(path, params={**query, "more": "1"}, headers={"If-None-Match": tag}).status_code in (200, 304)
    tags = [c.get(p, params=q).headers["etag"] for p, q in (("/api/runs", {}), ("/api/curves", ask))]
    with create(store / "a", resume=True) as writer:
        writer.snapshot(snapshot(5))
        assert [c.get(p, params=q, headers={"If-None-Match": t}).status_code
                for (p, q), t in zip((("/api/runs", {}), ("/api/curves", ask)), tags, strict=True)] == [200, 200]
    assert c.get("/api/curves", params=ask).json()["curves"][0]["step"] == [0, 1, 2, 3, 4, 5]


def test_a_run_whose_process_has_gone_is_no_longer_running(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "SETTLED", 0.0)
    c = client(store)
    code = f"""
from richter.runs import create
writer = create({str(store / 'c')!r}, {{}})
writer.scalars(0, loss=1.0)
print("written", flush=True)
input()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert {r["name"]: r["status"] for r in c.get("/api/runs").json()["runs"]}["c"] == "running"
    finally:
        process.kill()
        process.communicate()
    assert {r["name"]: r["status"] for r in c.get("/api/runs").json()["runs"]}["c"] == "interrupted"


def test_a_file_that_changed_just_now_is_read_again(store: Path) -> None:
    """Two writes can fall into one tick of the file system's clock."""
    c = client(store)
    os.utime(store / "a" / "run.db")
    tag = c.get("/api/curves", params={"run": "a"}).headers["etag"]
    assert c.get("/api/curves", params={"run": "a"}, headers={"If-None-Match": tag}).status_code == 200


def test_a_file_of_another_clock_is_not_read_again_and_again(store: Path) -> None:
    for at in (time.time() + 3600, time.time() - 3600):
        os.utime(store / "a" / "run.db", (at, at))
        assert shelf.Shelf(store).mark("a") == shelf.Shelf(store).mark("a")


def test_a_run_that_was_replaced_is_opened_anew(store: Path) -> None:
    c, ask = client(store), {"run": "a", "measure": "nfc", "layer": "0"}
    assert len(c.get("/api/curves", params=ask).json()["curves"][0]["step"]) == 5
    shutil.rmtree(store / "a")
    assert c.get("/api/curves", params=ask).status_code == 404
    make(store / "a", steps=3)
    assert len(c.get("/api/curves", params=ask).json()["curves"][0]["step"]) == 3


def test_few_runs_stay_open_and_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    for i in range(12):
        make(tmp_path / f"r{i}", steps=i + 1)
    mine = shelf.Shelf(tmp_path, most=3)

    def read(i: int) -> bool:
        with mine.open(f"r{i % 12}") as run:
            return run.last == i % 12 and len(run.curves(["nfc"], ["0"])["nfc", "0"][0].step) == i % 12 + 1

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(200)))
    with mine.open("r0"):
        pass
    assert len(mine._open) == 3
    mine.close()
    assert not mine._open


# ------------------------------------------------------------------------------------------------------- what is refused

@pytest.mark.parametrize(("host", "ok"), [
    ("localhost:8642", True), ("127.0.0.1:8642", True), ("127.0.0.1", True), ("[::1]:8642", True), ("LOCALHOST", True),
    ("evil.example", False), ("evil.example:8642", False), ("127.0.0.1.evil.example", False), ("localhost.evil.example", False),
    ("192.168.1.7:8642", False), ("", False), ("[::2]:8642", False), ("localhost:8642@evil.example", False)])
def test_only_its_own_host_names_are_answered(store: Path, host: str, ok: bool) -> None:
    for path in ("/", "/api/runs", "/plotly.js", "/static/dashboard.js"):
        reply = client(store).get(path, headers={"Host": host})
        assert reply.status_code == (200 if ok else 403)
        if not ok:
            assert "does not answer to this host name" in reply.text


@pytest.mark.parametrize(("site", "mode", "ok"), [
    ("cross-site", "no-cors", False), ("cross-site", "cors", False), ("same-site", "no-cors", False),
    ("same-site", "cors", False),
    ("cross-site", "navigate", True), ("same-origin", "cors", True), ("none", "navigate", True)])
def test_pages_elsewhere_ask_for_nothing(store: Path, site: str, mode: str, ok: bool) -> None:
    """But may have a link to it. Another port of this machine is another page on the same site."""
    reply = client(store).get("/api/runs", headers={"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode})
    assert reply.status_code == (200 if ok else 403)
    assert ok or "Another web page sent this request" in reply.text


def test_bound_to_every_address_it_answers_to_addresses_but_not_to_names(store: Path) -> None:
    c = client(store, "0.0.0.0", TOKEN)
    c.headers["Cookie"] = f"richter-token-8642={TOKEN}"
    assert [c.get("/api/runs", headers={"Host": h}).status_code for h in ("192.168.1.7:8642", "evil.example")] == [200, 403]


TOKEN = "a-token-that-is-long-enough"


def test_a_token_is_asked_for_and_kept_in_a_cookie(store: Path) -> None:
    for path in ("/", "/api/runs", "/static/dashboard.js", "/plotly.js", "/nothing"):
        reply = client(store, token=TOKEN).get(path)
        assert reply.status_code == 401
        assert "needs its token" in reply.text
    c = client(store, token=TOKEN)
    for wrong in (TOKEN[:-1], TOKEN + "x", "", "\xe9", "%ff", "a\x00b"):
        assert c.get("/api/runs", params={"token": wrong}).status_code == 401
        assert c.get("/api/runs", headers={"Cookie": f"richter-token-8642={quote(wrong)}"}).status_code == 401
    assert "set-cookie" not in c.get("/", params={"token": "wrong"}).headers
    cookie = c.get("/", params={"token": TOKEN}).headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert c.get("/api/runs").status_code == 200  # with the cookie


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "example.org"])
def test_other_machines_need_a_token(host: str) -> None:
    made = chosen_token(host, None)
    assert made is not None
    assert len(made) > 30
    assert chosen_token(host, TOKEN) == TOKEN
    assert made != chosen_token(host, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_this_machine_needs_none(host: str) -> None:
    assert chosen_token(host, None) is None
    assert chosen_token(host, TOKEN) == TOKEN


@pytest.mark.parametrize("token", ["", "short", "with a blank in it", "semicolon;and=more-text", "new\nline-and-more-text"])
def test_a_token_that_can_be_guessed_is_refused(token: str) -> None:
    with pytest.raises(SelectionError, match="at least 16"):
        chosen_token("127.0.0.1", token)


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/run", "/static/dashboard.css", "/plotly.js", "/nothing"])
def test_every_answer_tells_the_browser_to_be_careful(store: Path, path: str) -> None:
    h = client(store).get(path, headers={"Origin": "http://evil.example"}).headers
    policy = h["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-eval" not in policy
    assert h["x-content-type-options"] == "nosniff"
    assert h["referrer-policy"] == "no-referrer"
    assert not [k for k in h if k.startswith("access-control")]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_it_only_reads(store: Path, method: str) -> None:
    before = {p: p.stat().st_mtime_ns for p in store.rglob("run.db")}
    for path in ("/", "/api/runs", "/api/run?run=a", "/static/dashboard.js"):
        reply = client(store).request(method, path)
        assert reply.status_code == 405
        assert "only reads" in reply.text
    assert before == {p: p.stat().st_mtime_ns for p in store.rglob("run.db")}


ESCAPES = ["..", "../outside", "a/../../outside", "/etc", "../store/../outside", "a/../..", "link", "deep/link", "\x00", "a\x00",
           "x" * 5000, "x/" * 3000, "nothing", "", "deep", "C:\\", "..\\outside", "%2e%2e/outside", "linked", "\ud800", "<b>"]


@pytest.mark.parametrize("name", ESCAPES, ids=range(len(ESCAPES)))
def test_names_and_links_do_not_lead_out_of_the_store(store: Path, name: str) -> None:
    (store / "link").symlink_to(store.parent / "outside")
    (store / "deep" / "link").symlink_to("../../outside")
    (store / "linked").mkdir()
    (store / "linked" / "run.db").symlink_to(store.parent / "outside" / "run.db")
    c = client(store)
    for path in (path for path in answers() if path != "views"):
        query = {"run": name, "name": "nfm", "layer": "0", "measure": "nfc", "kind": "svg"}
        reply = c.get(f"/api/{path}?{urlencode(query, errors='replace')}")
        assert reply.status_code in (400, 404), (path, name)
        assert len(reply.json()["error"]) > 20
    listed = {r["name"]: r["status"] for r in c.get("/api/runs").json()["runs"]}
    assert listed == {"a": "finished", "deep/b": "finished", "linked": "unreadable"}


@pytest.mark.parametrize("path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd",
                                  "/static/..%2fserver.py", "/static/", "/static", "/server.py", "/api", "/api/", "/api/nothing",
                                  "/api/runs/curves"])
def test_nothing_else_is_served(store: Path, path: str) -> None:
    assert client(store).get(path, follow_redirects=False).status_code in (400, 404)


def test_damaged_runs_are_listed_with_the_reason(store: Path) -> None:
    for name, content in (("text", b"no database at all, but long enough to look like something" * 40), ("empty", b"")):
        (store / name).mkdir()
        (store / name / "run.db").write_bytes(content)
    make(store / "strange")
    other = sqlite3.connect(store / "strange" / "run.db")
    other.execute("UPDATE sessions SET begun = 'yesterday'")
    other.commit()
    other.close()
    shutil.copytree(store / "a", store / "cut")
    (store / "cut" / "run.db").write_bytes((store / "a" / "run.db").read_bytes()[:5000])
    found = {r["name"]: r for r in client(store).get("/api/runs").json()["runs"]}
    for name in ("text", "empty", "strange", "cut"):
        assert found[name]["status"] == "unreadable", name
        assert len(found[name]["reason"]) > 20
    assert found["a"]["status"] == "finished"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=40), st.integers(0, 60_000), st.data())
def test_a_run_with_any_bytes_changed_never_breaks_the_server(store: Path, noise: bytes, at: int, data: st.DataObject) -> None:
    whole = (store / "a" / "run.db").read_bytes()
    shutil.rmtree(store / "bad", ignore_errors=True)
    (store / "bad").mkdir()
    at = 100 + at % (len(whole) - 200)
    (store / "bad" / "run.db").write_bytes(whole[:at] + noise + whole[at + len(noise):])
    c = client(store)
    assert [r["name"] for r in c.get("/api/runs").json()["runs"]] == ["a", "bad", "deep/b"]
    path = data.draw(st.sampled_from(["run", "verdict", "settings", "matrices", "curves", "curves.csv", "matrix"]))
    query = {"run": "bad", "measure": list(MEASURES), "layer": "0", "scalar": "loss", "name": "nfm"}
    reply = c.get(f"/api/{path}", params=query)
    assert reply.status_code in (200, 400, 404), reply.text
    assert reply.status_code == 200 or len(reply.json()["error"]) > 20


KEYS = st.sampled_from(["run", "measure", "layer", "scalar", "name", "step", "points", "size", "token"])
WORDS = st.one_of(st.text(max_size=30), st.sampled_from(
    ["a", "deep/b", "nfc", "0", "nfm", "loss", "1e9", "-1", "9" * 40, "\x00", "../outside"]))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["runs", *answers()]), st.lists(st.tuples(KEYS, WORDS), max_size=8))
def test_any_question_gets_an_answer_or_a_sentence(store: Path, path: str, query: list[tuple[str, str]]) -> None:
    reply = client(store).get(f"/api/{path}?{urlencode(query, errors='replace')}")
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        sentence = reply.json()["error"]
        assert sentence.endswith(".")
        assert len(sentence) > 20


@pytest.mark.parametrize("raw", [
    "run=%ff%fe", "run=%00", "&&&=", "run", "run=a&run=a;b", "%", "run=" + "a" * 20_000, "run=a&points=%F0%9F%98%80",
    "run=a&" + "&".join(f"layer={i}" for i in range(3000)) + "&measure=nfc&measure=cnfc"], ids=range(9))
def test_broken_queries_are_refused_with_a_sentence(store: Path, raw: str) -> None:
    for path in ("runs", *answers()):
        assert client(store).get(f"/api/{path}?{raw}").status_code in (200, 400, 404)


def test_names_in_a_table_are_no_formulas(tmp_path: Path) -> None:
    with create(tmp_path / "=cmd()") as writer:
        writer.rows([Row(0, "@sum", "+nfc", 1.0)])
    table = client(tmp_path).get("/api/curves.csv", params={"run": "=cmd()", "measure": "+nfc", "layer": "@sum"})
    assert table.text.splitlines()[1].startswith("'=cmd(),0,'@sum,'+nfc,1.0")


# ----------------------------------------------------------------------------------------------------------------- serve

@contextmanager
def serving(store: Path, before: str = "", **more: object) -> Iterator[str]:
    """The address of a server in a process of its own, in which something may be done ``before``."""
    code = f"{before}\nfrom richter.report.server import serve; serve({str(store)!r}, port=0, **{more!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found[0]
    finally:
        process.terminate()
        process.wait(10)


def test_it_starts_at_once_without_torch_and_pandas(store: Path) -> None:
    begun = time.monotonic()
    with serving(store) as address:
        assert b"Richter" in urlopen(address).read()
        assert time.monotonic() - begun < 5  # half a second on an idle machine
        assert b"Plotly" in urlopen(address + "plotly.js").read()
    check = ("import sys; from starlette.testclient import TestClient; from richter.report.server import application\n"
             f"c = TestClient(application({str(store)!r}), base_url='http://localhost')\n"
             "for p in ('', 'plotly.js', 'api/runs', 'api/verdict?run=a', 'api/curves?run=a&measure=nfc&layer=0', "
             "'api/matrix?run=a&name=nfm&layer=0', 'api/views', 'api/settings?run=a'):\n"
             "    assert c.get('/' + p).status_code == 200, p\n"
             "assert not [m for m in ('torch', 'pandas', 'matplotlib', 'sklearn', 'plotly') if m in sys.modules]")
    subprocess.run([sys.executable, "-c", check], check=True)


def without_the_extra(code: str) -> subprocess.CompletedProcess[str]:
    """Python as it is after ``pip install richter``."""
    hidden = "import sys\nfor name in ('starlette', 'uvicorn', 'plotly'): sys.modules[name] = None\n"
    return subprocess.run([sys.executable, "-c", hidden + code], capture_output=True, text=True)


def test_without_the_extra_the_dashboard_says_how_to_get_it(store: Path) -> None:
    done = without_the_extra(f"from richter.cli import main\nsys.exit(main(['serve', {str(store)!r}, '--port', '0']))")
    assert done.returncode == 2
    assert "the dashboard needs starlette, uvicorn, plotly" in done.stderr
    assert "pip install 'richter[dashboard]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("missing", server.NEEDS)
def test_each_part_of_the_extra_is_needed(store: Path, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    for start in (serve, application):
        with pytest.raises(RichterError, match=rf"needs {missing}, .*richter\[dashboard\]"):
            start(store)


def test_without_the_extra_reports_are_whole(store: Path) -> None:
    done = without_the_extra(f"import richter.report.views, richter.report.answers\nfrom richter.cli import main\n"
                             f"assert len(richter.report.views.tabs()) == 8\n"
                             f"sys.exit(main(['report', {str(store / 'a')!r}, '-o', {str(store / 'r.html')!r}]))")
    assert done.returncode == 0, done.stderr
    assert (store / "r.html").read_text(encoding="utf-8").count("<img ") >= 4


def test_the_printed_address_has_the_token(store: Path) -> None:
    with serving(store, host="0.0.0.0") as address:
        port, token = re.search(r":(\d+)/\?token=(.+)$", address).groups()  # type: ignore[union-attr]
        assert len(token) > 30
        assert urlopen(f"http://127.0.0.1:{port}/?token={token}").status == 200
        with pytest.raises(HTTPError, match="401"):
            urlopen(f"http://127.0.0.1:{port}/")


def test_what_cannot_be_served_is_said(store: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken, pytest.raises(SelectionError, match="0 for any free port"):
        serve(store, port=taken.getsockname()[1])
    with pytest.raises(SelectionError, match="is not a port"):
        serve(store, port=99999)
    with pytest.raises(SelectionError, match="cannot listen"):
        serve(store, host="no.such.host.invalid")
    with pytest.raises(StoreError, match="is a file"):
        serve(store / "a" / "run.db")


# ---------------------------------------------------------------------------------------------------------- in a browser

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
BOLD = "<b>bold</b> & <a href='javascript:alert(3)'>link</a> %{y}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server, and its store: two runs, one with names that are scripts, and one that is damaged."""
    folder = tmp_path_factory.mktemp("site")
    make(folder / "first", steps=9)
    make(folder / "second", steps=6, settings={"lr": 0.5, "model": {"width": 8}})
    with create(folder / "second", resume=True) as writer:
        writer.claim("it rises", CLAIM)
        writer.claim(EVIL, {"a": EVIL})
        writer.describe(cards={"weight_change": Card("distance <b>gone</b>", "How <i>far</i> it went.").to_json()})
        writer.figure("fig", "svg", SCRIPT)
    with create(folder / EVIL.replace("/", "|"), {EVIL: EVIL}) as writer:
        writer.describe(cards={"nfc": Card(EVIL + "!", EVIL, unit=BOLD).to_json()})
        for step in range(3):
            writer.rows([Row(step, layer, measure, 0.5, 0.1, EVIL) for layer in (EVIL, BOLD) for measure in ("nfc", EVIL, BOLD)])
            writer.scalars(step, {EVIL: 1.0, BOLD: 2.0})
            writer.arrays({EVIL: np.eye(3), BOLD: np.eye(3)}, layer=EVIL, step=step)
    (folder / "bad").mkdir()
    (folder / "bad" / "run.db").write_bytes(b"nothing of use" * 100)
    with serving(folder) as address:
        yield address, folder


DRAWN = "document.querySelectorAll('.panel .scatterlayer .trace').length"


def points(panel: str) -> str:
    """JavaScript: how many each curve of a panel has."""
    return f"document.querySelector('[data-panel={panel}] .plot')?.data?.filter(t => t.customdata).map(t => t.x.length).join()"


def test_the_page_lists_the_runs(site: tuple[str, Path], browser: Browser) -> None:
    browser.open(site[0])
    browser.until("document.querySelectorAll('#runs li').length === 4")
    text = browser.text()
    assert "✓ finished" in text
    assert "? unreadable" in text
    assert "file is not a database" in text
    browser.run("const f = document.getElementById('filter'); f.value = 'sec'; f.dispatchEvent(new Event('input'))")
    browser.until("document.querySelectorAll('#runs li').length === 1")


def test_choices_change_the_figure_and_the_address(site: tuple[str, Path], browser: Browser) -> None:
    browser.open(f"{site[0]}#run=first")
    browser.until(f"{points('nfc')} === '9,9'")
    assert browser.panels() == ["loss", "feature correlation (nfc)", "share learned (c_uc_ratio)", "weights moved |W-W0|/|W|"]
    browser.click("#measures label", "nfc")
    browser.until("document.querySelectorAll('.panel').length === 3")
    browser.click("#layers label", "2")
    browser.until(f"{points('c_uc_ratio')} === '9'")
    browser.click("#runs label", "second")
    browser.until(f"{points('c_uc_ratio')} === '9,6'")
    address = browser.run("return location.href")
    browser.open(address)  # shared, it shows the same
    browser.until(f"{points('c_uc_ratio')} === '9,6'")
    assert browser.panels() == ["loss", "share learned (c_uc_ratio)", "weights moved |W-W0|/|W|"]


def test_zoom_hover_and_axes(site: tuple[str, Path], browser: Browser) -> None:
    from selenium.webdriver import ActionChains
    browser.open(f"{site[0]}#run=first&linx")
    drag = browser.until("document.querySelector('[data-panel=nfc] .nsewdrag')")
    panel = browser.until("document.querySelector('[data-panel=nfc]')")
    ActionChains(browser.driver).move_to_element(drag).perform()
    browser.until("!document.getElementById('tip').hidden")
    tip = browser.run("return document.getElementById('tip').innerText")
    assert re.search(r"step 4\s[\s\S]*0\s+0.004 ± 0.010", tip), tip
    assert "by definition" in tip
    ranges = "[...document.querySelectorAll('.plot')].map(p => p.layout.xaxis.range.map(Math.round).join()).join(' ')"
    assert browser.run(f"return {ranges}") == "0,8 0,8 0,8 0,8"
    ActionChains(browser.driver).drag_and_drop_by_offset(drag, 60, 0).perform()
    browser.until("location.hash.includes('x=4')")
    browser.until(f"new Set({ranges}.split(' ')).size === 1 && !{ranges}.startsWith('0,')")  # all panels together
    browser.click("#tools button", "reset zoom")
    browser.until(f"{ranges} === '0,8 0,8 0,8 0,8'")
    panel.send_keys("+")
    browser.until("/x=/.test(location.hash)")
    panel.send_keys("0")
    panel.send_keys("l")
    browser.until("document.querySelector('[data-panel=nfc] .plot').layout.yaxis.type === 'log'")
    browser.click("#tools button", "log steps")
    browser.until("document.querySelector('[data-panel=nfc] .plot').layout.xaxis.type === 'log'")


def test_the_runs_are_sorted_and_plotted_in_one_table(site: tuple[str, Path], browser: Browser) -> None:
    folder = site[1] / "sweep"
    worse = {"probe_accuracy": 0.1, "probe_loss": 50.0, "feature_change_cka": 1e6}
    for name, lr, now in (("low", 0.01, {"magnitude": -1.0}), ("high", 0.5, {"magnitude": 1.5}), ("off", 10.0, worse)):
        Training(now, loss=[2.3, 2.0 if name == "off" else 0.3]).keep(folder / name, {"lr": lr})
    rows = "[...document.querySelectorAll('.sweep tbody tr')].map(r => [...r.children].map(c => c.textContent))"
    try:
        with serving(folder) as address:
            browser.open(f"{address}#view=sweep")
            browser.until(f"{rows}.length === 3")
            head = "[...document.querySelectorAll('.sweep thead th')].map(c => c.textContent.split(' ')[0])"
            assert browser.run(f"return {head}") == sweep.table({"": Run(folder / "low"), "b": Run(folder / "off")}).columns
            for order in ("ascending", "descending"):
                browser.click(".sweep thead button", "magnitude")
                browser.until(f"document.querySelector('.sweep [aria-sort={order}]')?.textContent.startsWith('magnitude')")
            assert "sort=-magnitude" in browser.run("return location.hash")
            assert [r[0] for r in browser.run(f"return {rows}")] == ["high", "low", "off"]  # largest first, gaps last
            plotted = "document.querySelector('.plot.tall').data[0]"
            browser.until(f"{plotted}.y.length === 2")
            assert browser.run(f"return [{plotted}.x.join(), {plotted}.y.join()]") == ["0.5,0.01", "1.5,-1"]
            browser.click("#runs-title ~ #some button", "none")
            browser.until("!document.querySelector('.sweep tr.on')")
            browser.click("#runs-title ~ #some button", "all")
            browser.until("document.querySelectorAll('.sweep tr.on').length === 3")
            browser.click("#views button", "Curves")
            panel = "document.querySelector('[data-panel=feature_change_cka] .plot')"
            browser.until(f"{panel}?.layout?.yaxis?.range?.[1] < 1")  # the run that diverged does not set the axis
            assert "off diverged; the axis shows the others." in browser.text()
            assert browser.panels()[:4] == ["loss", "magnitude", "linearisation gap (G)", "feature change (F)"]
            assert browser.run(f"return {panel}.data.filter(t => t.customdata).map(t => t.mode).join()").count("markers") == 3
            assert browser.run(f"return {panel}.layout.legend.x") > 1
            assert browser.run(f"return {panel}.layout.xaxis.type") == "log"
            browser.open("about:blank")
    finally:
        shutil.rmtree(folder)


def test_names_of_layers_are_short(site: tuple[str, Path], browser: Browser) -> None:
    folder = site[1] / "layers"
    with create(folder) as writer:
        names = ["transformer.h.0.q", "transformer.h.1.q", ""]
        writer.rows([Row(s, k, "nfc", 0.5 + s, 0.1) for s in (0, 100) for k in names])
    try:
        browser.open(f"{site[0]}#run=layers")
        browser.until(DRAWN)
        shown = "[...document.querySelectorAll('#layers .name')].map(n => n.textContent)"
        assert browser.run(f"return {shown}") == ["0.q", "1.q", "(root)"]
        assert browser.run("return document.querySelector('#layers label').title") == "transformer.h.0.q"
    finally:
        shutil.rmtree(folder)


def test_everything_is_reached_with_the_tab_key(site: tuple[str, Path], browser: Browser) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys
    browser.open(f"{site[0]}#run=first")
    browser.until(DRAWN)
    browser.run("window.reached = []; document.addEventListener('focusin', ({target: n}) => "
                "reached.push(n.id || n.dataset.key || n.dataset.panel || n.textContent))")
    ActionChains(browser.driver).send_keys(Keys.TAB * 45).perform()
    wanted = {"skip", "filter", "run first", "measures = nfc", "layers = 0", "scalars = loss", "curves", "logx", "nfc", "SVG"}
    assert wanted <= set(browser.run("return reached"))


def test_a_curve_grows_while_its_run_is_written(site: tuple[str, Path], browser: Browser) -> None:
    address, folder = site
    code = f"""
from test_dashboard import create, snapshot
with create({str(folder / 'growing')!r}, {{}}) as writer:
    writer.progress(0.5)
    for step in range(25):
        if step in (10, 20):
            input()
        writer.snapshot(snapshot(step))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent, stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        browser.open(address)
        browser.run("window.same = true")
        browser.until("/growing/.test(document.querySelector('#runs .on')?.innerText)", 20)  # what runs is shown at once
        browser.until(f"{points('nfc')} === '10,10' && document.getElementById('live').className === 'running'", 20)
        browser.until("/● running\\s+50 %/.test(document.body.innerText)")
        process.stdin.write(b"\n")
        process.stdin.flush()
        browser.until(f"{points('nfc')} === '20,20'", 20)
        assert browser.run("return window.same")  # it was never loaded again
        process.stdin.write(b"\n")
        process.stdin.close()
        browser.until(f"{points('nfc')} === '25,25' && document.getElementById('live').className === 'idle'", 20)
        assert "50 %" not in browser.text()
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder / "growing")


def test_a_matrix_opens_at_a_step(site: tuple[str, Path], browser: Browser) -> None:
    from selenium.webdriver.common.keys import Keys
    browser.open(f"{site[0]}#run=first")
    browser.until(DRAWN)
    browser.click("#views button", "Matrices")
    entry = "document.querySelector('[data-panel=\"m nfm\"] .plot')?.data?.[0]?.z?.[5]?.[5]"
    assert browser.until(entry) == 54
    assert browser.panels() == ["nfm of 0", "Spectra"]
    slider = browser.until("document.querySelector('#controls input[type=range]')")
    slider.send_keys(Keys.HOME)
    browser.until(f"{entry} === 6 && /step=0/.test(location.hash)")
    browser.run("document.querySelector('[data-key=later]').click()")
    browser.until(f"{entry} === 12")
    assert browser.run("return document.querySelector('[data-panel=spectra] .plot').data[0].y.length") == 6
    browser.click("[data-panel='m nfm'] button", "SVG")
    assert b"<svg" in browser.saved("*.svg")


def test_figures_and_tables_are_saved(site: tuple[str, Path], browser: Browser) -> None:
    browser.open(f"{site[0]}#run=first&run=second")
    browser.until(DRAWN)
    browser.run("document.querySelector('[data-panel=nfc]').focus()")
    browser.click("[data-panel=nfc] button", "SVG")
    picture = browser.saved("richter-nfc.svg").decode()
    assert picture.startswith("<svg")
    assert "feature correlation" in picture
    assert "second · 2" in picture
    browser.click("[data-panel=nfc] button", "PNG")
    assert browser.saved("richter-nfc.png").startswith(b"\x89PNG")
    browser.click("[data-panel=nfc] a", "CSV")
    assert browser.saved("richter-curves.csv").count(b"\n") == 1 + 2 * 9 + 2 * 6


def test_verdict_and_settings_are_shown(site: tuple[str, Path], browser: Browser) -> None:
    browser.open(f"{site[0]}#run=first&run=second&view=verdict")
    browser.until("document.querySelectorAll('.verdict').length === 2")
    assert "Unknown: linearisation_gap was not measured" in browser.text()
    rows = "[...document.querySelectorAll('.claims tbody tr')].map(r => [...r.children].map(c => c.textContent))"
    assert browser.run(f"return {rows}") == [
        ["it rises", "at least 0.2", "0.5", "0.9", "reproduced"], [f"{EVIL}a: {EVIL}", "", "", "", ""]]
    browser.until("document.querySelector('.picture img')?.naturalWidth === 9")
    browser.click("#views button", "Settings")
    browser.until("document.querySelector('.differs')")
    assert browser.run("return document.querySelector('.differs').innerText").split() == ["lr", "0.1", "0.5"]
    assert "1 of 2 differ" in browser.text()


def test_what_is_so_by_definition_is_dotted(site: tuple[str, Path], browser: Browser) -> None:
    """By its mark, whatever the note says."""
    folder = site[1] / "marks"
    with create(folder) as writer:
        writer.rows([Row(s, k, "nfc", s + i, 0.1, note, mark) for s in range(3) for i, (k, note, mark) in enumerate(
            [("a", "", Mark.TRIVIAL), ("b", "trivial in words only", Mark.ESTIMATED)])])
    try:
        browser.open(f"{site[0]}#run=marks")
        browser.until(f"{points('nfc')} === '3,3'")
        curves = "document.querySelector('[data-panel=nfc] .plot').data.filter(t => t.customdata).map(t => t.line.dash).join()"
        assert browser.run(f"return {curves}") == "dot,solid"
    finally:
        shutil.rmtree(folder)


def test_a_measure_of_one_s_own_is_drawn_under_its_title(site: tuple[str, Path], browser: Browser) -> None:
    browser.open(f"{site[0]}#run=second")
    browser.until(DRAWN)
    assert browser.panels()[3] == "distance <b>gone</b>"
    assert browser.run("return document.querySelector('[data-panel=weight_change] h3').title") == "How <i>far</i> it went."
    assert "distance <b>gone</b>" in browser.run("return document.getElementById('measures').innerText")


def test_a_view_comes_back_as_it_was(site: tuple[str, Path], browser: Browser) -> None:
    browser.open(f"{site[0]}#run=first&view=verdict")
    for view, sign in (("Verdict", ".headline"), ("Curves", ".panel"), ("Verdict", ".headline"), ("Settings", ".settings"),
                       ("Curves", ".panel")):
        browser.click("#views button", view)
        browser.until(f"document.querySelector('#view {sign}')")
        assert browser.run("return document.querySelector('#views [aria-current=page]').textContent") == view
    assert "view" not in browser.run("return location.hash")  # the first one needs no word


def test_a_view_from_outside_is_drawn_without_a_script_of_its_own(store: Path, browser: Browser) -> None:
    folders = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    before = (f"import sys; sys.path[:0] = {folders!r}\nfrom test_dashboard import losses, views\n"
              "views.add(views.View('losses', 'My losses', losses))")
    with serving(store, before) as address:
        browser.open(f"{address}#run=a&run=deep%2Fb")
        browser.click("#views button", "My losses")
        browser.until("document.querySelector('[data-panel=\"losses 1\"] .scatterlayer .trace')")
        assert browser.panels() == ["Losses", "Halves"]
        names = "document.querySelector('.panel .plot').data.filter(t => t.customdata).map(t => t.name)"
        assert browser.run(f"return {names}") == ["a", "deep/b"]
        rows = browser.run("return [...document.querySelectorAll('.card tr')].map(r => r.innerText.split(/\\s+/).join())")
        assert rows == ["run,loss", "a,0.4000", "deep/b,0.4000", "none,\u2013"]
        assert "Asked for []." in browser.text()
        browser.open(browser.run("return location.href"))  # shared, it shows the same
        browser.until("document.querySelectorAll('.panel').length === 2")
        browser.open("about:blank")  # it no longer asks the server, which ends now


def test_profiles_have_an_axis_of_layers(site: tuple[str, Path], browser: Browser) -> None:
    """Which neither the zoom of the steps nor their logarithm touches."""
    folder = site[1] / "profile"
    with create(folder) as writer:
        writer.rows([Row(s, k, "nfc", (i - 1) ** 2 + s, 0.1) for s in (0, 100) for i, k in enumerate(("in", "mid", "<b>out"))])
    try:
        browser.open(f"{site[0]}#run=profile&view=profiles&logx&x=20~50")
        browser.until("document.querySelector('.panel .scatterlayer .trace')")
        axis = "document.querySelector('.panel .plot').layout.xaxis"
        assert browser.run(f"return {axis}.ticktext") == ["in", "mid", "&lt;b&gt;out"]
        assert browser.run(f"return [{axis}.title.text, {axis}.type, {axis}.range.join()]") == ["layer", "linear", "0.7,3.3"]
        assert browser.run("return document.querySelector('.panel .plot').data.at(-1).x") == [1, 2, 3]
        assert "layer 1 of 3 (101), not alone: layers 1, 3 can hardly be told apart" in browser.text()
    finally:
        shutil.rmtree(folder)


def test_names_that_are_scripts_are_text(site: tuple[str, Path], browser: Browser) -> None:
    name = EVIL.replace("/", "|")
    browser.open(f"{site[0]}#" + urlencode({"run": name, "measure": ["nfc", EVIL, BOLD], "scalar": [EVIL, BOLD]}, doseq=True))
    browser.until("document.querySelectorAll('.panel').length === 5 && " + DRAWN)
    assert browser.panels() == [f"{EVIL}! [{BOLD}]", EVIL, BOLD, EVIL, BOLD]
    text = browser.text()
    assert name in text
    assert BOLD in text
    browser.run("document.querySelector('.panel').focus()")
    browser.click(".panel button", "SVG")
    picture = browser.saved("*.svg").decode()
    texts = {node.text for node in ElementTree.fromstring(picture).iter()}
    assert {EVIL, BOLD, f"{EVIL}! [{BOLD}]"} <= texts  # as text, in the title and the legend
    assert "<script" not in picture
    assert "<a " not in picture
    for view in ("Matrices", "Verdict", "Settings"):
        browser.click("#views button", view)
        browser.until(f"[...document.querySelectorAll('#view h3, #view th')].some(n => n.textContent.includes({EVIL[:9]!r}))")
        assert not browser.run("return document.querySelectorAll('#page img, #page script, #page b, [href^=javascript]').length")


def test_what_is_said_of_unreadable_runs_is_text(tmp_path: Path, browser: Browser) -> None:
    """Folders and errors of SQLite hold what a stranger has written."""
    evil = ["<img src=x onerror=pwned=1>", "\"onerror=\"pwned=2", "a\u2028pwned=3", "javascript:pwned=4",
            "<script>pwned=5<|script>"]
    for name in evil:
        make(tmp_path / name)
        with closing(sqlite3.connect(tmp_path / name / "run.db")) as database:
            database.execute("PRAGMA writable_schema=ON")
            database.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'notes'", (f"CREATE TABLE notes ({name}",))
            database.commit()
    with serving(tmp_path) as address:
        browser.open(address)
        browser.until("document.body.innerText.split('unreadable').length === 6")
        assert all(name in browser.run("return document.body.textContent") for name in evil)
        assert browser.run("return window.pwned === undefined")
        assert not browser.run("return document.querySelectorAll('[onerror], #page img, [href^=javascript]').length")
        with pytest.raises(HTTPError, match="404") as refused:
            urlopen(f"{address}api/run?{urlencode({'run': evil[0]})}")
        assert evil[0] in json.load(refused.value)["error"]
        assert refused.value.headers["Content-Type"] == "application/json"
        browser.open("about:blank")


def test_an_empty_store_says_what_to_do(tmp_path: Path, browser: Browser) -> None:
    with serving(tmp_path / "not-yet-made") as address:
        browser.open(address)
        browser.until("/No runs yet/.test(document.body.innerText)")
        assert "richter.Observer(model, probe, run=" in browser.text()
        make(tmp_path / "not-yet-made" / "first")
        browser.until(DRAWN)
        browser.open("about:blank")


def test_with_a_token_the_address_bar_forgets_it(site: tuple[str, Path], browser: Browser) -> None:
    with serving(site[1], token=TOKEN) as address:
        browser.open(f"{address}#run=first")
        browser.until(DRAWN)
        assert "token" not in browser.run("return location.href")
        assert browser.run("return document.cookie") == ""
        browser.driver.refresh()
        browser.until(DRAWN)
        browser.open("about:blank")


def test_it_fits_a_phone(site: tuple[str, Path], browser: Browser) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.open(f"{site[0]}#run=first")
        browser.until(DRAWN)
        assert browser.run("return document.documentElement.scrollWidth") == 390
        assert not browser.run("return document.getElementById('filter').checkVisibility()")
        browser.click("#choose")
        assert browser.run("return document.getElementById('filter').checkVisibility()")
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
