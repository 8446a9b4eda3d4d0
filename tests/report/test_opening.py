"""The first screen of a report: what stands above the fold, the scale, the strip, dark mode and narrow screens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from judged import Training
from richter.instrument.verdict import LAYER_BANDS, diagnose
from richter.report import opening, record
from richter.report.html import report
from richter.runs import Run

if TYPE_CHECKING:
    from browser import Browser

pytest_plugins = ["browser"]
LAZY = {"linearisation_gap": 0.01, "magnitude": -2.0, "feature_change_cka": 0.001}


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    many = {f"transformer.h.{i}.attention.{k}": (10.0 ** (i - 1), 0.3) for i in range(3) for k in "qkv"} | {"head": (45.0, 0.9)}
    return [Training(layers=many, loss=[2.3, 0.3]).keep(tmp_path / "rich", {"lr": 0.1}),
            Training(LAZY, loss=[2.3, 0.5]).keep(tmp_path / "lazy", {"lr": 0.01})]


def test_the_first_screen_comes_first(runs: list[Run], tmp_path: Path) -> None:
    page = report(runs[:1], tmp_path / "page.html").read_text()
    order = [page.index(words, page.index("<main>")) for words in (
        'class="scale"', "this run", "The network no longer behaves", 'class="strip"', 'class="trio"', "Evidence and caveats",
        "Cannot tell", "Measures over training")]
    assert order == sorted(order)
    trio = page[page.index('class="trio"'):page.index("Evidence and caveats</h2>")]
    assert trio.count("<img") == 3
    assert "prefers-color-scheme: dark" in page
    assert 'name="color-scheme" content="light dark"' in page


def test_runs_stand_on_the_scale_where_their_magnitudes_are() -> None:
    verdicts = [(name, "#0072B2", diagnose(Training({"linearisation_gap": 0.5, "magnitude": m}))) for name, m in (
        ("middle", 0.0), ("lazier", -3.0), ("richer", 1.5), ("beyond", 9.0))]
    markup = opening.scale(verdicts)
    places = [float(v) for v in re.findall(r'class="pointer" style="left:([\d.]+)%', markup)]
    assert places == [50.0, 0.0, 75.0, 100.0]
    assert re.findall(r'class="reference" style="left:([\d.]+)%', markup) == [
        f"{100 * (m + 3) / 6:.1f}" for _, m in opening.REFERENCES]
    failed = diagnose(Training({"probe_accuracy": 0.1, "probe_loss": 50.0}))
    absent = "Not on the scale: bad. There is no magnitude where the verdict finds no training to judge."
    assert absent in opening.scale([*verdicts, ("bad", "#000", failed)])


def test_many_runs_are_dots_in_one_row() -> None:
    d = diagnose(Training())
    markup = opening.scale([(f"run {i}", "#0072B2", d) for i in range(opening.NAMED + 1)])
    assert markup.count('class="row"') == 1
    assert markup.count('class="pointer"') == opening.NAMED + 1


def test_the_strip_has_a_cell_for_each_layer(runs: list[Run]) -> None:
    d = diagnose(runs[0])
    markup = opening.strip(d)
    assert markup.count("<li") == len(d.layers) == 10
    assert "3 learned features" not in markup
    counts = {word: sum(v.words == word for v in d.layers) for word in {v.words for v in d.layers}}
    assert all(f"{n} {word}" in markup for word, n in counts.items())


@pytest.mark.long
@pytest.mark.parametrize("scale", [100.0, 1.0])
def test_a_reference_is_trained_again(scale: float, tmp_path: Path) -> None:
    from richter.experiments.doctor.trainings import DoctorSettings, trainings, work
    from richter.runs import create
    settings = DoctorSettings(networks=(), scaled=("MLP",), seeds=(100,))
    task = next(t for t in trainings(settings) if t.name == f"scale {scale:g}")
    with create(tmp_path / "run") as writer:
        magnitude = float(work(task, writer)["magnitude"])  # type: ignore[arg-type]
    assert magnitude == pytest.approx(dict(opening.REFERENCES)[scale], abs=0.1)  # seeds differ by up to 0.1


@pytest.mark.parametrize(("change", "share"), [(0.001, 0.0), (0.01, 0.0), (0.1, 1 / 3), (1.0, 2 / 3), (4.7, 0.891), (10.0, 1.0)])
def test_bars_show_values_above_one(change: float, share: float) -> None:
    markup = record._bar(change)
    width = re.search(r'<rect width="([\d.]+)" height="8" class="fill">', markup)
    assert width is not None
    assert float(width[1]) == pytest.approx(120 * share, abs=0.1)
    assert f"{change:.2g}" in re.sub("<[^>]+>", "", markup)
    marks = [float(x) for x in re.findall(r'<rect x="([\d.]+)"', markup)]
    assert marks == pytest.approx([120 * record._share(LAYER_BANDS[0][0]), 80.0], abs=0.1)


def test_a_report_fits_a_narrow_screen_and_its_first_screen_a_wide_one(runs: list[Run], tmp_path: Path, browser: Browser) -> None:
    for name, chosen in (("one", runs[:1]), ("two", runs)):
        report(chosen, tmp_path / f"{name}.html")
        browser.open((tmp_path / f"{name}.html").as_uri())
        bottom = "document.querySelector('.trio').getBoundingClientRect().bottom"
        assert browser.run(f"return {bottom}") <= 800, name
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": 500, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    try:
        for name in ("one", "two"):
            browser.open((tmp_path / f"{name}.html").as_uri())
            parts = "[...document.querySelectorAll('table.layers, .scale, .strip')]"
            widths = browser.run(f"return {parts}.map(n => n.getBoundingClientRect().right)")
            assert widths
            assert max(widths) <= 500
            assert browser.run("return document.documentElement.scrollWidth") <= 500
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
