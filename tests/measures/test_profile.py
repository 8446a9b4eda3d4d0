"""Profiles over layers: where a measure has its peak, how sure that is, and the panels that show it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from richter import runs
from richter.core import Mark, Row, SelectionError
from richter.instrument.snapshot import Snapshot
from richter.measures.profile import Peak, peak
from richter.report import figures, plotdata
from richter.report.html import report
from richter.report.query import Query
from richter.report.shelf import Chosen, Shelf
from richter.report.views.profiles import profiles
from richter.runs import Run

HILL = np.array([0.09, 0.12, 0.18, 0.15, 0.03])
LAYERS = tuple("abcde")


def made(path: Path, layers: tuple[str, ...] = LAYERS, error: float = 0.001) -> Run:
    """The hill grows with the steps and moves one layer on at the end."""
    with runs.create(path, {}) as w:
        for t, s in enumerate((0, 1, 2, 10, 50, 100, 1000)):
            values = np.roll(HILL, s == 1000)[:len(layers)] * (1 + t)
            rows = [Row(s, k, "tangent_cka", v, error) for k, v in zip(layers, values, strict=True)]
            rows += [Row(s, "*", "tangent_cka", 9.0), Row(s, "readout", "tangent_cka", 1.0, 0.0, "", Mark.TRIVIAL)]
            w.snapshot(Snapshot(tuple(rows), s, seconds=0.1, examples=8, passes=1.0))
    return w.run


def test_a_sharp_peak_is_one_layer() -> None:
    assert peak(HILL) == Peak(3, (3,), 0.18, 5)
    assert str(peak(HILL)) == "layer 3 of 5 (0.18)"
    assert peak(HILL).interior
    assert not peak(HILL).flat
    assert not peak(HILL[2:]).interior  # the first layer is the largest


def test_a_flat_top_says_so() -> None:
    top = peak([0.09, 0.14, 0.18, 0.17, 0.03])
    assert (top.layer, top.low, top.high, top.flat, top.interior) == (3, 3, 4, True, True)
    assert "on a flat top: layers 3 to 4 can hardly be told apart" in str(top)
    assert "no peak: it is flat from its first layer to its last" in str(peak([0.2] * 4))
    assert "layer 1 of 3 (1), not alone: layers 1, 3 can hardly be told apart" in str(peak([1.0, 0.0, 1.0]))


def test_errors_widen_the_top() -> None:
    """Layers 2 and 4 lie .06 and .03 below; two standard errors of a difference are 2 sqrt(2) e."""
    wide = [(peak(HILL, [e] * 5).low, peak(HILL, [e] * 5).high) for e in (0.0, 0.0106, 0.0107, 0.0212, 0.0213)]
    assert wide == [(3, 3), (3, 3), (3, 4), (3, 4), (2, 4)]
    assert peak(HILL, [0.0107] * 5, deviations=1.0).high == 3
    assert peak(HILL, flat=0.25).high == 4  # .03 of .15
    assert peak(HILL, [np.nan] * 5) == peak(HILL)


def test_layers_without_a_value_are_passed_over_and_counted() -> None:
    assert peak([np.nan, 0.1, 0.5, np.nan, 0.2]) == Peak(3, (3,), 0.5, 5)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.floats(0.1, 10), st.floats(-5, 5), st.floats(0, 1))
def test_the_peak_has_the_laws_of_a_place(values: list[float], scale: float, shift: float, error: float) -> None:
    v = np.round(np.array(values), 3)
    first = peak(v, np.full(len(v), error))
    assert first.low <= first.layer <= first.high
    assert v[first.layer - 1] == v.max() == first.value
    assert peak(v, np.full(len(v), error + 1)).low <= first.low  # less is known
    back = peak(v[::-1], np.full(len(v), error))
    assert (len(v) + 1 - back.high, len(v) + 1 - back.low) == (first.low, first.high)
    moved = peak(scale * v + shift, np.full(len(v), scale * error) + 1e-9)
    assert moved.low <= first.layer <= moved.high


@pytest.mark.parametrize(("values", "errors", "words"), [
    ([0.3], None, "needs values of at least two layers, and 1 of 1 layers has one: a network of one layer"),
    ([np.nan, np.nan], None, "0 of 2 layers have one"),
    ([[0.1, 0.2]], None, r"values of shape \(1, 2\)"),
    ([0.1, 0.2], [0.1], r"errors of shape \(1,\)"),
    ([0.1, np.inf], None, "infinite values or negative errors"),
    ([0.1, 0.2], [0.1, -0.1], "infinite values or negative errors")])
def test_what_is_no_profile_is_said(values: list[float], errors: list[float] | None, words: str) -> None:
    with pytest.raises(SelectionError, match=words):
        peak(values, errors)


def test_negative_widths_are_refused() -> None:
    with pytest.raises(SelectionError, match=r"flat=-0.1 and deviations=2.0 .*0 or more"):
        peak(HILL, flat=-0.1)


def test_a_report_draws_the_profiles_and_says_where_they_peak(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    layers, drawn = plotdata.profiles(plotdata.lines(run.frame, "tangent_cka"))
    assert (layers, [p.step for p in drawn]) == (list(LAYERS), [0, 2, 10, 50, 1000])  # without the whole and the read-out
    np.testing.assert_allclose(drawn[1].value, 3 * HILL)
    ax = figures.profiles(run, ["tangent_cka"]).axes[0]
    curves = [line for line in ax.lines if len(line.get_xdata()) == 5]
    np.testing.assert_allclose(curves[-1].get_ydata(), 7 * np.roll(HILL, 1))
    marks = [line.get_xdata()[0] for line in ax.lines if len(line.get_xdata()) == 1]
    assert marks == [3, 3, 3, 3, 4]
    assert [t.get_text() for t in ax.get_xticklabels()] == list(LAYERS)
    page = report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Profiles over layers" in page
    assert "layer 4 of 5 (1.26)" in page
    with pytest.raises(SelectionError, match="nonsense"):
        figures.profiles(run, ["nonsense"])


def test_a_flat_top_has_a_bar(tmp_path: Path) -> None:
    ax = figures.profiles(made(tmp_path / "run", error=0.3), ["tangent_cka"]).axes[0]
    (bar,) = [line for line in ax.lines if line.get_gid() == "flat"]
    assert list(bar.get_xdata()) == [2, 5]  # 1.26 - .63 is within 2 sqrt(2) .3, 1.26 - .21 is not


def test_two_layers_have_no_profile(tmp_path: Path) -> None:
    run = made(tmp_path / "run", LAYERS[:2])
    assert "Profiles over layers" not in report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    (words,) = figures.profiles(run, ["tangent_cka"]).axes[0].texts
    assert "needs three layers" in " ".join(words.get_text().split())


def test_the_dashboard_has_a_view_of_them(tmp_path: Path) -> None:
    made(tmp_path / "one")
    made(tmp_path / "two", LAYERS[:2])
    with Chosen(Shelf(tmp_path), ["one", "two"]) as chosen:
        curves, table = [panel.to_json() for panel in profiles(chosen, Query([("measure", "tangent_cka"), ("measure", "nfc")]))]
    assert (curves["axis"], curves["ticks"], len(curves["curves"])) == ("layer", list(LAYERS), 5)
    assert curves["curves"][0]["step"] == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(curves["curves"][0]["value"], HILL)
    assert table["rows"][-1] == ["one", curves["title"].removeprefix("one: "), 1000.0, "d", "layer 4 of 5 (1.26)"]
    with Chosen(Shelf(tmp_path), ["two"]) as chosen:
        (words,) = profiles(chosen, Query([("measure", "tangent_cka")]))
    assert re.search("three layers or more", words.to_json()["sentence"])


def test_layers_without_a_value_are_no_side_to_which_values_fall() -> None:
    nan = np.nan
    assert not peak([nan, 0.5, 0.3, 0.1]).interior  # the first value is the largest
    assert not peak([0.1, 0.3, 0.5, nan]).interior
    assert peak([nan, 0.1, 0.5, 0.1, nan]).interior
    assert "no peak: it is flat from its first layer to its last" in str(peak([nan, 0.2, 0.2, 0.2, nan]))
    assert "no peak" in str(peak([0.2, nan, 0.2]))


def test_an_infinite_error_says_that_nothing_is_known() -> None:
    assert peak([0.0, 1.0, 0.5], [np.inf, 0.0, 0.0]).could == (1, 2)
    assert peak([0.0, 1.0, 0.5], [0.0, np.inf, 0.0]).could == (1, 2, 3)


def test_a_report_names_the_layer_of_the_peak(tmp_path: Path) -> None:
    """Layers without a finding are not in the profile, so that its number alone is not the layer's place in the network."""
    with runs.create(tmp_path / "run", {}) as w:
        rows = [Row(0, k, "tangent_cka", v, 0.001) for k, v in zip("abcd", (np.nan, 0.1, 0.3, 0.2), strict=True)]
        w.snapshot(Snapshot(tuple(rows), 0, seconds=0.1, examples=8, passes=1.0))
    assert ": c, layer 2 of 3 (0.3)" in report([w.run], tmp_path / "report.html").read_text(encoding="utf-8")
