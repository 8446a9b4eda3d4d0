"""A Snapshot as a user meets it: values, errors, notes, as a table, as text, as HTML."""

from __future__ import annotations

import math

import numpy as np
import pytest

import richter
from observing import mlp, moved, probe, state
from richter.core import Mark, Row, SelectionError
from richter.measures import DEFAULT


@pytest.fixture(scope="module")
def snap() -> richter.Snapshot:
    return richter.measure(moved(mlp()), probe(), initial=state(mlp()), step=7)


def test_values_errors_and_notes(snap: richter.Snapshot) -> None:
    assert snap.step == 7
    assert snap.examples == 24
    assert snap.seconds > 0
    assert snap.layers == ["0", "2", "4", "*"]
    assert tuple(snap.measures) == DEFAULT
    assert 0 < snap.value("nfc", "0") < 1
    assert 0 < snap.error("nfc", "0") < 0.2
    assert snap.note("nfc", "0") == ""
    assert snap.value("nfc", "4") == pytest.approx(1.0)
    assert snap.note("nfc", "4").startswith("trivial")
    assert snap.note("cnfc", "4").startswith("trivial")
    assert math.isnan(snap.error("weight_change", "0"))  # of weights alone
    assert snap.value("tangent_cka") == snap.value("tangent_cka", "*") == snap.row("tangent_cka", "*").value


def test_names_that_are_not_there(snap: richter.Snapshot) -> None:
    with pytest.raises(SelectionError, match=r"no measure 'nfk'.*Close to it: 'nfc'"):
        snap.value("nfk", "0")
    with pytest.raises(SelectionError, match=r"no layer '\*' for 'nfc'.*It has: '0', '2', '4'"):
        snap.value("nfc")


def test_frame(snap: richter.Snapshot) -> None:
    frame = snap.frame
    assert frame.index.tolist() == ["0", "2", "4", "*"]
    assert frame.index.name == "layer"
    assert list(frame.columns) == [*DEFAULT, *(f"{m}_se" for m in DEFAULT), "note"]
    for m in DEFAULT:
        assert frame[m].dtype == frame[f"{m}_se"].dtype == np.float64
    assert frame.loc["2", "nfc"] == snap.value("nfc", "2")
    assert frame.loc["2", "nfc_se"] == snap.error("nfc", "2")
    assert frame.loc["*", "tangent_alignment"] == snap.value("tangent_alignment")
    assert math.isnan(frame.loc["*", "nfc"])
    assert "trivial" in frame.loc["4", "note"]
    assert frame.loc["0", "note"] == ""


def test_the_row_of_the_whole_model_is_always_there() -> None:
    frame = richter.measure(mlp(), probe(), ["nfc"]).frame
    assert frame.index.tolist() == ["0", "2", "4", "*"]
    assert math.isnan(frame.loc["*", "nfc"])


def test_as_text() -> None:
    rows = (Row(0, "first", "nfc", 0.82345, 0.0123), Row(0, "first", "change", 0.5),
            Row(0, "last", "nfc", 1.0, 0.0, "trivial: ...", Mark.TRIVIAL), Row(0, "last", "change", math.nan, note="0/0"),
            Row(0, "*", "change", 12.3456, 2.0))  # fmt: skip
    text = str(richter.Snapshot(rows, 0, {"spare": "never called"})).splitlines()
    assert text[0].split() == ["layer", "nfc", "change"]
    assert text[1].split() == ["first", "0.823(12)", "0.500"]
    assert text[2].split() == ["last", "1.000."]  # the dot marks a trivial value
    assert text[3].split() == ["*", "12.3(20)"]
    assert text[4] == "spare: never called"
    assert len({len(line) for line in text[:2]}) == 1


def test_as_html() -> None:
    snap = richter.Snapshot((Row(0, "<script>alert(1)</script>", "a<b", 0.5), Row(0, "*", "a<b", math.nan)), 0)
    html = snap._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "a&lt;b" in html
    assert "0.500" in html
    assert "nan" not in html.lower()
