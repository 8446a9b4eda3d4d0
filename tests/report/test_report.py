"""The report and its figures: the run's own numbers, names shown as they are, nothing loaded, the same bytes every time."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

import richter
from judged import Training
from richter import runs
from richter.core import Card, Interval, Mark, Ref, Row, SelectionError
from richter.core.likeness import cosine
from richter.experiments.frame import Claim, Control
from richter.experiments.running import Finding
from richter.instrument.snapshot import Snapshot
from richter.measures.cards import CARDS, OTHER, PANELS, SHOWN_FIRST, panels
from richter.measures.cards import card as measure_card
from richter.report import axes, figures, names, plotdata
from richter.report.cards import cards_of, cards_of_all
from richter.report.claims import KEYS, told
from richter.report.html import Album, card, report
from richter.report.markup import Markup, table, tag
from richter.report.svg import svg_text
from richter.report.thin import shrink, thin
from richter.runs import Run

if TYPE_CHECKING:
    from browser import Browser

pytest_plugins = ["browser"]
STEPS = (0, 10, 100, 1000)
MEASURES = ("nfc", "c_uc_ratio", "tangent_cka")
VERDICT = "Unknown: linearisation_gap was not measured and feature_change_cka was not measured."
EVIL = ("<script>alert(1)</script>", "$x_1$ \"onload='&' y", "_hidden", "a.very." + "long." * 20 + "name", "")


def value(step: int, i: int, j: int) -> float:
    return 0.1 + 0.2 * i + 0.05 * j + 0.05 * math.log10(1 + step)


def matrix(layer: int, step: int, shift: float = 0.0) -> np.ndarray[Any, Any]:
    A = np.random.default_rng(layer + step).standard_normal((6, 9))
    return A @ A.T + shift * np.eye(6)


def make(path: Path, layers: tuple[str, ...] = ("fc1", "fc2"), steps: tuple[int, ...] = STEPS,
         measures: tuple[str, ...] = MEASURES, arrays: bool = True, **settings: Any) -> Run:
    """A small run whose numbers are known by formulas."""
    with runs.create(path, {"task": "digits", "optimiser": {"lr": 0.1}, **settings}, seeds={"data": 11}) as w:
        for s in steps:
            rows = [Row(s, k, m, value(s, i, j), 0.01 * (i + 1)) for i, k in enumerate(layers) for j, m in enumerate(measures)]
            rows += [Row(s, "readout", "nfc", 1.0, 0.0, "trivial: by definition", Mark.TRIVIAL)]
            rows += [Row(s, "*", "tangent_cka", value(s, 2, 2), 0.02)]
            w.snapshot(Snapshot(tuple(rows), s, seconds=0.25, examples=64, passes=12.0))
            w.scalars(s, loss=2.0 / (1 + s))
            for i, k in enumerate(layers if arrays else ()):
                w.arrays({"nfm": matrix(i, s), "agop": matrix(i, s, 1.0)}, layer=k, step=s)
        if arrays:
            w.array("egop", np.eye(6), step=steps[-1])
    return w.run


def finding(text: str, value: float, expect: Interval, **more: str) -> Finding:
    return Finding(Claim(text, lambda r: value, expect, Control("none", {}), **more), value)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    found = make(tmp_path_factory.mktemp("runs") / "first", scale=0.5)
    with runs.create(found.path, resume=True) as w:
        for f in (finding("the correlation rises", 0.35, Interval(0.2, 1.0)),
                  finding("nothing moves", 0.5, Interval(high=0.01), paper="0.005")):
            w.claim(f.claim.text, f.record)
        w.claim("my own", {"loss": {"at most": 2}})
    return found


@pytest.fixture(scope="module")
def page(run: Run, tmp_path_factory: pytest.TempPathFactory) -> str:
    return report([run], tmp_path_factory.mktemp("out") / "report.html").read_text(encoding="utf-8")


class Seen(HTMLParser):
    """Elements, attributes and text of a page and of the pictures in it, with every open element closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text, self.stack = "", []
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, k, v or "") for k, v in attrs]
        self.text += "".join(pictured(v or "") for k, v in attrs if tag == "img" and k == "src")
        if tag not in ("meta", "br", "img", "hr"):
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, k, v or "") for k, v in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.stack[-1:] != ["style"] else ""


def pictured(address: str) -> str:
    """The texts in a picture whose address holds it."""
    kind, _, data = address.partition(";base64,")
    assert kind == "data:image/svg+xml"
    return written(base64.b64decode(data).decode())


def written(svg: str) -> str:
    return "\n".join(ElementTree.fromstring(svg.encode()).itertext())


def check_safe(page: str) -> Seen:
    """Nothing can run and nothing is fetched."""
    seen = Seen(page)
    assert not {"script", "iframe", "object", "embed", "link", "base", "form", "foreignobject"} & set(seen.tags)
    assert not [k for _, k, _ in seen.attributes if k.startswith("on")]
    for element, k, v in seen.attributes:
        if k in ("src", "href", "xlink:href", "action", "srcset", "data"):
            assert v.startswith(("#", "data:image/")), (element, k, v[:80])
        assert not re.search(r"url\((?!['\"]?#)", v), v
    assert "url(" not in page[page.index("<style>"):page.index("</style>")]
    assert "@import" not in page
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "img-src data:;" in policy[1]
    assert "script-src" not in policy[1]
    return seen


# ------------------------------------------------------------------------------------------------------------ the page

def test_the_report_of_a_run_says_what_was_found(page: str, run: Run) -> None:
    seen = check_safe(page)
    assert seen.text.index(VERDICT) < seen.text.rindex("Measures over training")
    for words in ("first", "finished", "c_uc_ratio 0.3", "feature correlation (nfc)", "tangent kernel x labels (cka)",
                  "optimiser.lr", "0.1", "digits", "data 11", "the correlation rises", "0.2 to 1", "0.35", "holds",
                  "at most 0.01", "does not hold", "0.005", "numpy", "1 s", "64", "cores", "Feature learning as alignment",
                  "my own", "loss.at most: 2",
                  "@article{nfa", "signal", "nfc of readout: trivial: by definition", "cosine with NFM", "Layers and time"):
        assert words in seen.text, words
    assert "rapid" not in seen.text  # its measure was not taken
    assert seen.tags.count("figure") == 1 + 3 + 1 + 2 * 2 + 1  # loss, panels, heat maps, matrices and spectra, scalars
    assert seen.tags.count("img") == seen.tags.count("figure")
    assert "path" not in seen.tags  # every drawing is an image
    last = run.snapshots[-1]
    assert richter.instrument.snapshot.shown(last.row("nfc", "fc2")) in seen.text
    assert str(run.path.parent) not in page


def test_the_same_run_gives_the_same_bytes(page: str, run: Run, tmp_path: Path) -> None:
    assert report([Run(run.path)], tmp_path / "below" / "again.html").read_text(encoding="utf-8") == page


def test_identifiers_of_a_page_are_unique(page: str) -> None:
    identifiers = re.findall(r' id="([^"]+)"', page)
    assert len(identifiers) == len(set(identifiers)) > 8
    assert {v[1:] for v in re.findall(r'href="(#[^"]+)"', page)} <= set(identifiers)


def test_several_runs_stand_side_by_side(run: Run, tmp_path: Path) -> None:
    other = make(tmp_path / "second", scale=2.0, arrays=False, extra=[1, 2])
    seen = check_safe(report([run, other], tmp_path / "r.html").read_text(encoding="utf-8"))
    assert seen.text.count(VERDICT) == 2
    differs = seen.text[seen.text.rindex("What differs"):seen.text.rindex("Measures over training")]
    for words in ("scale", "0.5", "2.0", "extra", "[1, 2]", "second"):
        assert words in differs
    assert "task" not in differs
    figure = figures.compare([run, other], "nfc")
    lines = figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["first", "second"]
    assert len({to_hex(line.get_color()) for line in lines}) == 2
    np.testing.assert_array_equal(lines[1].get_ydata(), other.series("nfc", "fc1").value)


def test_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "<b>run</b> & $y$"
    image = "<img src=x onerror=alert(2)>"
    found = make(path, EVIL, measures=("nfc", "<i>mine</i>"), arrays=False, **{"<u>key</u>": image})
    with runs.create(path, resume=True) as w:
        w.scalars(0, {"<b>loss</b> $a$": 1.0})
        w.array("nfm", np.eye(3), layer=EVIL[0])
        w.claim("</td><script>", {"text": "<script>3</script>", "value": "<script>", "verdict": "<script>", "differs": "<b>"})
        w.figure("<img>", "svg", b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(4)</script></svg>")
        w.close("failed: <script>5</script>")
    seen = check_safe(report([found], tmp_path / "r.html").read_text(encoding="utf-8"))
    assert seen.tags.count("img") == seen.tags.count("figure")
    assert not {"b", "i", "u"} & set(seen.tags)
    for words in (*EVIL[:3], image, "<b>loss</b> $a$", "<i>mine</i>", "failed: <script>5</script>", "(root)"):
        assert words in seen.text, words
    for figure in (figures.curves(found), figures.heat_map(found, "nfc"), figures.compare([found], "nfc")):
        shown = written(svg_text(figure))
        assert all(words in shown for words in EVIL[:3])  # also a name that begins with _


INJECTED = [text.replace("HIT", f"top.hit={i}") for i, text in enumerate([
    "<script>HIT</script>", "<img src=x onerror=HIT>", "\"><script>HIT</script>", "'><svg onload=HIT>",
    "</style><script>HIT</script>", "</title><script>HIT</script>", "]]><script>HIT</script>", "--><script>HIT</script>",
    "<svg/onload=HIT>", "javascript:HIT", "<iframe srcdoc='<script>HIT</script>'>", "<a href='javascript:HIT'>x</a>",
    "<math><mtext></mtext><script>HIT</script></math>",
    "<style>*{display:none}</style>", "<link rel=stylesheet href='data:text/css,*{display:none}'>",
    "<body onload=HIT>", "</svg><foreignObject><body onload=HIT>", "\" onload=\"HIT\" x=\"", "&lt;script&gt;HIT&lt;/script&gt;",
    "<meta http-equiv=refresh content='0;url=javascript:HIT'>", "$HIT ${HIT} %(HIT)s {HIT}"])]
SVG = "<svg xmlns='http://www.w3.org/2000/svg' xmlns:xlink='http://www.w3.org/1999/xlink' width='9' height='9' {}>{}</svg>"
PICTURES = [SVG.format("", "<script>top.hit=1</script>"), SVG.format("onload='top.hit=1'", ""),
            SVG.format("", "<foreignObject><body xmlns='http://www.w3.org/1999/xhtml' onload='top.hit=1'/></foreignObject>"),
            SVG.format("", "<image href='https://example.org/x.png' onerror='top.hit=1'/>"),
            SVG.format("", "<set attributeName='x' onbegin='top.hit=1' dur='1s'/>"),
            SVG.format("", "<a xlink:href='javascript:top.hit=1'><rect width='9' height='9'/></a>")]


def test_whatever_names_and_pictures_hold_nothing_runs_in_a_browser(tmp_path: Path, browser: Browser) -> None:
    with runs.create(tmp_path / "run", {text: text for text in INJECTED}) as w:
        for i, text in enumerate(INJECTED):
            w.rows([Row(s, text, m, 0.1 * s, 0.01, text) for s in (0, 1) for m in ("nfc", text)])
            w.scalars(0, {text: 1.0 + i})
            w.claim(text, {"text": text})
        for i, data in enumerate(PICTURES):
            w.figure(f"{i}", "svg", data.encode())
        w.describe(cards={text: Card(text, text, unit=text, panel=text).to_json() for text in INJECTED})
        w.close(f"failed: {INJECTED[0]}")
    page = report([w.run], tmp_path / "r.html")
    seen = check_safe(page.read_text(encoding="utf-8"))
    assert all(text in seen.text for text in INJECTED)
    browser.open(page.as_uri())
    browser.until("document.readyState === 'complete' && [...document.images].every(i => i.complete && i.naturalWidth)")
    assert browser.run("return document.images.length") == len(INJECTED) + 4 + len(PICTURES)  # nfc, heat maps, profiles, scalars
    assert browser.run("return window.hit") is None
    assert not browser.run("return document.querySelectorAll('script, iframe, link, a:not([href^=\"#\"])').length")
    assert browser.run("return performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length") == 0


def test_no_figure_is_saved_outside_its_folder() -> None:
    album = Album(Path("folder"))
    assert [album._own(n) for n in ("../../x", "x", "/etc/x", "..", "")] == ["x", "x-2", "etc_x", "figure", "figure-2"]


@pytest.mark.parametrize("kind", ["empty", "running", "one", "missing", "nan"])
def test_a_run_with_little_in_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    with runs.create(path) as w:
        words = "Nothing was measured in this run."
        if kind == "running":
            words = "Nothing has been measured yet."
            check = report([w.run], tmp_path / "r.html").read_text(encoding="utf-8")
        if kind == "one":
            words = "only"
            w.snapshot(Snapshot((Row(7, "only", "nfc", 0.5, 0.1), Row(7, "only", "mine", -3.0)), 7))
            w.array("agop", np.eye(3), layer="only", step=7)
            w.array("ntk", [3.0, 2.0, 1.0], step=7)
        if kind == "missing":
            words = "Not drawn"
            w.snapshot(Snapshot((Row(0, "a", "nfc", 0.5),), 0))
            w.array("agop", np.arange(6.0).reshape(2, 3), layer="a")
        if kind == "nan":
            words = "no value: needs the initial"
            w.snapshot(Snapshot(tuple(Row(0, k, "cnfc", math.nan, note="needs the initial weights") for k in "ab"), 0))
            w.scalars(0, loss=math.nan)
            w.scalars(1, loss=math.inf)
    if kind != "running":
        check = report([Run(path)], tmp_path / "r.html").read_text(encoding="utf-8")
    assert words in check_safe(check).text


def test_a_report_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="needs at least one run"):
        report([], tmp_path / "r.html")


def test_the_verdict_is_headed_by_its_magnitude(tmp_path: Path) -> None:
    run = Training(start={"probe_accuracy": 0.5}, loss=[2.3, *[0.3] * 119], reached=119).keep(tmp_path / "rich", {"lr": 0.1})
    seen = check_safe(report([run], tmp_path / "r.html").read_text(encoding="utf-8"))
    top = seen.text[:seen.text.rindex("Measures over training")]
    for words in ("Rich, relative to the given start. The network no longer behaves like its linear", "magnitude 0.368(10)",
                  "the verdict would become 'uncertain' if linearisation_gap (0.7) fell below 0.5, 20 standard errors away",
                  "Cannot tell whether what was learned is good", "Advice: nothing to turn", "Measured at step 100; ",
                  "Evidence: the accuracy on the probe rose: 0.5 -> 0.95", "read-out: not judged", "function_change 1.2",
                  "Remark: fine-tuning", "learned features"):
        assert words in top, words
    assert "magnitude 0.368(10)" in card(run)
    failed = Training({"probe_accuracy": 0.1, "probe_loss": 2.3}).keep(tmp_path / "failed")
    text = check_safe(report([failed], tmp_path / "r.html").read_text(encoding="utf-8")).text
    top = text[:text.rindex("Measures over training")]
    assert "Not learning: " in top
    assert "magnitude" not in top


@pytest.mark.parametrize(("given", "words"), [
    ((None, None), "The runs have no settings, so nothing is known of what differs."),
    (({"lr": 1}, None), "Without settings: second."), (({"lr": 1}, {"lr": 1}), "The settings are the same.")])
def test_runs_without_settings_are_not_the_same(given: tuple[Any, Any], words: str, tmp_path: Path) -> None:
    both = [Training().keep(tmp_path / name, settings) for name, settings in zip(("first", "second"), given, strict=True)]
    text = check_safe(report(both, tmp_path / "r.html").read_text(encoding="utf-8")).text
    assert words in text
    assert ("The settings are the same." in text) is (given[1] is not None)


def test_a_card_for_notebooks(run: Run) -> None:
    shown = card(run)
    assert VERDICT in shown
    assert "feature correlation (nfc)" in Seen(shown).text
    assert "first" in run._repr_html_()
    assert "finished" in run._repr_html_()


# ------------------------------------------------------------------------------------------- figures show the numbers

def test_curves_are_the_run_s_numbers(run: Run) -> None:
    figure = figures.curves(run, run.scalar_frame, measures=["nfc", "tangent_cka"])
    for ax, m, layers in zip(figure.axes, ("nfc", "tangent_cka"), (["fc1", "fc2"], ["fc1", "fc2", "*"]), strict=False):
        lines = {str(line.get_label()): line for line in ax.get_lines()}
        assert list(lines) == layers
        bands = [c for c in ax.collections if isinstance(c, PolyCollection)]
        for (k, line), band in zip(lines.items(), bands, strict=True):
            s = run.series(m, k)
            np.testing.assert_array_equal(line.get_xdata(), s.step)
            np.testing.assert_array_equal(line.get_ydata(), s.value)
            edges = band.get_paths()[0].vertices
            assert set(edges[:, 1].round(12)) == {*(s.value - s.error).round(12), *(s.value + s.error).round(12)}
    np.testing.assert_allclose(figure.axes[2].get_lines()[0].get_ydata(), [2.0 / (1 + s) for s in STEPS])


def test_heat_maps_are_the_run_s_numbers(run: Run) -> None:
    ax = figures.heat_map(run, "nfc").axes[0]
    shown = ax.get_images()[0].get_array()
    np.testing.assert_array_equal(np.asarray(shown), [run.series("nfc", k).value for k in ("fc1", "fc2")])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["fc1", "fc2"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0", "10", "100", "1000"]
    assert ax.get_images()[0].get_clim() == (0.0, 1.0)
    with pytest.raises(SelectionError, match="no measure 'nfd'"):
        figures.heat_map(run, "nfd")


def test_a_heat_map_has_gaps_where_nothing_was_found() -> None:
    rows = [(0, "a", "m", 1.0, 0.0, "", "exact"), (5, "a", "m", 2.0, 0.0, "trivial in words only", "estimated"),
            (5, "b", "m", 3.0, 0.0, "", "bound"), (0, "b", "m", 9.0, 0.0, "", "trivial")]
    frame = pd.DataFrame(rows, columns=["step", "layer", "measure", "value", "error", "note", "mark"])
    grid = plotdata.grid(frame, "m")
    assert (grid.layers, grid.steps) == (["a", "b"], [0, 5])
    np.testing.assert_array_equal(grid.values, [[1.0, 2.0], [math.nan, 3.0]])
    assert plotdata.grid(frame.drop(columns="mark"), "m").values[1, 0] == 9.0  # a table of one's own need not have marks


def test_spectra_are_those_of_the_stored_matrices(run: Run) -> None:
    figure = figures.spectra(run, "fc1")
    assert [a.get_title() for a in figure.axes] == ["NFM: eigenvalues", "AGOP: eigenvalues"]
    for ax, shift in zip(figure.axes, (0.0, 1.0), strict=True):
        for line, step in zip(ax.get_lines(), (0, 1000), strict=True):
            assert line.get_label() == f"step {step}"
            np.testing.assert_allclose(line.get_ydata(), np.linalg.eigvalsh(matrix(0, step, shift))[::-1], rtol=1e-9)
    with pytest.raises(SelectionError, match=r"no matrix of layer 'readout'.*'fc1', 'fc2'"):
        figures.spectra(run, "readout")


def test_matrices_with_their_cosines(run: Run) -> None:
    A, B, C = matrix(0, 1000), matrix(0, 1000, 1.0), np.eye(6)
    axes = figures.matrices(run, "fc1", 1000).axes
    assert [a.get_title() for a in axes] == ["NFM, 6 x 6", "AGOP, 6 x 6", "EGOP, 6 x 6"]
    np.testing.assert_array_equal(np.asarray(axes[1].get_images()[0].get_array()), B)
    assert f"cosine with NFM: {(A * B).sum() / np.linalg.norm(A) / np.linalg.norm(B):.3f}" in axes[1].get_xlabel()
    assert f"cosine with AGOP: {(B * C).sum() / np.linalg.norm(B) / np.linalg.norm(C):.3f}" in axes[2].get_xlabel()
    assert len(figures.matrices(run, "fc1").axes) == 6  # first and last
    assert len(figures.matrices(run, "fc2", 10).axes) == 2  # the EGOP is of the input, which fc2 does not read
    with pytest.raises(SelectionError, match=r"at step 5\. It has matrices at: 0, 10, 100, 1000"):
        figures.matrices(run, "fc1", 5)
    with pytest.raises(SelectionError, match="Layers that have them: 'fc1', 'fc2'"):
        figures.matrices(run, "readout")


def test_a_cosine_of_what_has_none() -> None:
    large = np.random.default_rng(0).standard_normal((2, 300, 1000)).astype(np.float32)  # in several blocks
    double = large.astype(np.float64)
    norms = np.linalg.norm(double[0]) * np.linalg.norm(double[1])
    assert cosine(*large) == pytest.approx((double[0] * double[1]).sum() / norms, rel=1e-12)
    A = np.arange(4.0).reshape(2, 2)
    assert cosine(A, -2 * A) == pytest.approx(-1)
    assert math.isnan(cosine(A, 0 * A))
    assert math.isnan(cosine(A, A[:1]))


def test_of_a_wide_matrix_the_largest_entry_of_each_block_is_seen() -> None:
    A = np.zeros((300, 100))
    A[299, 7], A[0, 0] = -5.0, 1.0
    (ax,) = figures.side_by_side({"A": A}).axes
    shown = np.asarray(ax.get_images()[0].get_array())
    assert shown.shape == (100, 100)
    assert (shown[99, 7], shown[0, 0]) == (-5.0, 1.0)
    assert ax.get_aspect() == 3.0  # as tall as the matrix is


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[Any, ...]]:
    """What a method of Run is asked from now on."""
    asked, real = list[tuple[Any, ...]](), getattr(Run, name)

    def method(self: Run, *given: Any) -> Any:
        asked.append(given)
        return real(self, *given)

    monkeypatch.setattr(Run, name, method)
    return asked


def test_of_wide_matrices_few_are_read_and_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty of 4096 x 4096 take seconds, not minutes. Here two layers' worth of the six that are shown of small ones."""
    run = make(tmp_path / "run", tuple(f"fc{i}" for i in range(9)), (0, 5, 10))
    monkeypatch.setattr(plotdata, "SPECTRUM", 5)  # wider ones have no spectra
    read = counted(monkeypatch, "array")
    report([run], tmp_path / "report.html")
    assert len({layer for _, layer, _ in read} - {"*"}) == 6
    assert len(read) == len(set(read)) + 1 == 6 * 2 * 2 + 2  # first and last step of NFM and AGOP, and the EGOP beside both
    read.clear()
    monkeypatch.setattr("richter.report.html.ENTRIES", 2 * 2 * 2 * 36)
    assert "2 of 9 layers are shown" in report([run], tmp_path / "report.html").read_text()
    assert [layer for _, layer, _ in read] == ["fc0", "fc0", "*"] * 2 + ["fc8"] * 4


def test_spectra_go_by_the_widest_matrix_that_is_drawn(tmp_path: Path) -> None:
    with runs.create(tmp_path / "run") as w:
        w.rows([Row(0, "0", "nfc", 0.5)])
        w.array("kernel", np.eye(plotdata.SPECTRUM + 1, dtype=np.float32), step=0)
        w.array("kernel", np.eye(2), step=1)
    assert "wider than 1024" in report([w.run], tmp_path / "report.html").read_text()
    with runs.create(tmp_path / "many") as w:
        w.rows([Row(0, "0", "nfc", 0.5)])
        w.arrays({f"kernel{i}": np.eye(3) for i in range(25)})
    assert "layers with more than 24 arrays" in report([w.run], tmp_path / "report.html").read_text()


@pytest.mark.parametrize("dtype", ["complex128", "bool", "int8", "float16", "longdouble"])
def test_arrays_of_any_numbers_are_drawn(tmp_path: Path, dtype: str) -> None:
    values = np.where(np.eye(200, dtype=bool), 3, 0).astype(dtype)
    with runs.create(tmp_path / "run") as w:
        w.rows([Row(0, "0", "nfc", 0.5)])
        for step in (0, 1):
            w.arrays(dict.fromkeys(("nfm", "agop", "ksm", "feature_gram"), values), layer="0", step=step)
    report([w.run], tmp_path / "report.html")
    image = figures.matrices(w.run, "0", 0).axes[0].get_images()[0]
    assert float(np.asarray(image.get_array())[0, 0]) == abs(complex(values[0, 0]))


def test_only_what_is_drawn_of_many_arrays_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty thousand of them took minutes: each look went through all."""
    layers = tuple(f"fc{i}" for i in range(9))
    run = make(tmp_path / "run", layers, arrays=False)
    with runs.create(run.path, resume=True) as w:
        for step in range(50):
            for k in (*layers, "*"):
                w.array("ksm", np.eye(3) + step, layer=k, step=step)
    asked, read = counted(monkeypatch, "shape"), counted(monkeypatch, "array")
    report([w.run], tmp_path / "report.html")
    assert {step for _, _, step in (*asked, *read)} == {0, 49}
    assert len(asked) < 100
    assert sorted({layer for _, layer, _ in read}) == ["*", "fc0", "fc2", "fc4", "fc6", "fc8"]


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 9), st.integers(0, 99), st.sampled_from(["f4", "f8", "i1", "?"]))
def test_a_block_shows_its_largest_entry(rows: int, columns: int, size: int, seed: int, dtype: str) -> None:
    """What is no number is shown where a block has nothing else."""
    random = np.random.default_rng(seed)
    a = random.integers(-128, 128, (rows, columns)).astype(dtype)
    if dtype.startswith("f"):
        a[random.random(a.shape) < 0.3] = np.nan
        a[random.random(a.shape) < 0.05] = -np.inf
    small = shrink(a, size)
    assert small.dtype == a.dtype
    tall, wide = -(-rows // size), -(-columns // size)
    for (i, j), v in np.ndenumerate(small.astype(float)):
        sizes = np.abs(a[i * tall:(i + 1) * tall, j * wide:(j + 1) * wide].astype(float))
        largest = np.nan if np.isnan(sizes).all() else np.nanmax(sizes)
        assert np.array_equal(np.abs(v), largest, equal_nan=True)


def test_many_layers_are_coloured_along_depth() -> None:
    rows = [(s, f"h.{i}", "nfc", 0.1 + i / 100, 0.01, "") for i in range(60) for s in (0, 1, 10)]
    frame = pd.DataFrame(rows, columns=["step", "layer", "measure", "value", "error", "note"])
    figure = figures.curves(frame, measures=["nfc"])
    panel, bar = figure.axes
    assert len(panel.get_lines()) == 60
    assert len({to_hex(line.get_color()) for line in panel.get_lines()}) == 60
    assert not figure.legends
    names = [t.get_text() for t in bar.get_yticklabels()]
    assert (names[0], names[-1], len(names)) == ("h.0", "h.59", 9)
    few = figures.curves(frame[frame.layer.isin(["h.0", "h.1"])], measures=["nfc"])
    assert [t.get_text() for t in few.legends[0].get_texts()] == ["h.0", "h.1"]


def test_scalars_of_runs_and_frames(run: Run) -> None:
    ax = figures.scalars(run).axes[0]
    assert ax.get_title() == "loss"
    assert ax.get_yscale() == "log"
    np.testing.assert_array_equal(ax.get_lines()[0].get_ydata(), run.scalars("loss").value)
    assert figures.scalars(pd.DataFrame({"step": [1, 2], "a": [1.0, 2.0], "b": [3.0, 4.0]}), ["b"]).axes[0].get_title() == "b"
    with pytest.raises(SelectionError, match="at least one"):
        figures.scalars([])


def test_a_reader_s_own_style_does_not_matter(run: Run) -> None:
    usual = svg_text(figures.heat_map(run, "nfc"))
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "black", "figure.autolayout": True, "image.cmap": "jet"}):
        assert svg_text(figures.heat_map(run, "nfc")) == usual
        assert matplotlib.rcParams["font.size"] == 20


# --------------------------------------------------------------------------------------------------------- saved files

def test_figures_are_saved_as_svg_and_pdf(run: Run, tmp_path: Path) -> None:
    figure = figures.compare([run], "nfc")
    drawn, printed = figures.save(figure, tmp_path / "below" / "v1.2")
    assert (drawn.name, printed.name) == ("v1.2.svg", "v1.2.pdf")
    svg, pdf = drawn.read_text(encoding="utf-8"), printed.read_bytes()
    assert "feature correlation (nfc)</text>" in svg
    assert "<metadata>" not in svg
    assert not re.search(r'd="[^"]*\d\.\d{3}', svg)  # two digits are finer than paper
    assert pdf.startswith(b"%PDF")
    assert b"/CIDFontType2" in pdf or b"/TrueType" in pdf  # text, not outlines
    assert b"CreationDate" not in pdf
    again = figures.save(figure, tmp_path / "v1.2")
    assert (again[0].read_text(encoding="utf-8"), again[1].read_bytes()) == (svg, pdf)


def test_every_figure_of_a_report_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("richter.report.svg.pdf_bytes", lambda figure: b"%PDF")  # slow, and tested above
    found = make(tmp_path / "run", ("fc1",), measures=("nfc",), steps=(0,))
    page = report([found], tmp_path / "r.html", figures=tmp_path / "figures").read_text(encoding="utf-8")
    files = sorted(p.name for p in (tmp_path / "figures").iterdir())
    stems = {n.rpartition(".")[0] for n in files}
    assert files == sorted(f"{s}.{kind}" for s in stems for kind in ("pdf", "svg"))
    assert len(stems) == page.count("<figure>")
    assert {"scalars", "matrices-fc1", "spectra-fc1", "curves-Feature_correlations"} <= stems
    assert report([found], tmp_path / "r2.html").read_text(encoding="utf-8") == page


# -------------------------------------------------------------------------------------------------------------- pieces

def test_every_measure_has_a_card_that_agrees_with_it() -> None:
    known = richter.measures.catalogue()
    assert {name: measure.card for name, measure in known.items()} == CARDS  # as imported, and as read from the text of the files
    for c in CARDS.values():
        assert c.sentence.endswith(".")
        assert names.shortened(c.heading) == c.heading, "a title fits a panel"
        assert c.panel in PANELS
    assert len({c.title for c in CARDS.values()}) == len(CARDS)
    assert set(SHOWN_FIRST) <= set(CARDS)
    assert SHOWN_FIRST[0] == "magnitude"  # the one number to say
    assert [name for name, c in CARDS.items() if c.typical] == ["function_change"]  # by which the verdict judges layers


def test_the_tables_of_measures_say_what_the_cards_say() -> None:
    text = (Path(__file__).parents[2] / "docs" / "measures.md").read_text(encoding="utf-8")
    rows = {re.findall(r"`(\w+)`", cells[1])[0]: cells for line in text.splitlines() if line.startswith("| `")
            for cells in [re.split(r"(?<!\\)\|", line)] if len(cells) == 7}
    assert set(rows) == set(CARDS)
    for name, (_, first, _, reads, possible, rich, _) in rows.items():
        c = CARDS[name]
        assert ("*" in first) == (name in richter.measures.DEFAULT), name
        assert reads.strip().startswith(c.sentence), name
        ends = "any" if math.isinf(c.bounds.low) else f">= {c.bounds.low:g}" if math.isinf(c.bounds.high) else \
            f"{c.bounds.low:g} to {c.bounds.high:g}"
        assert (possible.strip(), rich.strip()) == (ends, c.rich or ""), name
        if c.typical:
            assert f"Below {c.typical.low:g} a layer is called lazy, from {c.typical.high:g} on rich" in reads
    words = text[text.index("## What kind of number"):text.index("## When there is no number")]
    assert re.findall(r"\| `(\w+)` \|", words) == [mark.value for mark in Mark]


def test_panels_hold_every_measure_once() -> None:
    mine = {"mine": Card("m", panel="My panel"), "third": Card("t", panel=CARDS["nfc"].panel)}
    filled = panels(["mine", "other", "third", *CARDS, "nfc"], mine)
    assert [heading for heading, *_ in filled] == [*PANELS, "My panel", OTHER]
    assert sorted(m for *_, measures in filled for m in measures) == sorted(["mine", "other", "third", *CARDS])
    correlations = next(measures for heading, _, measures in filled if heading == CARDS["nfc"].panel)
    assert correlations[0] == "nfc"
    assert correlations[-1] == "third"
    assert [words for _, words, _ in filled[:len(PANELS)]] == list(PANELS.values())
    assert panels(["cnfc", "nfc"]) == [(CARDS["nfc"].panel, PANELS[CARDS["nfc"].panel], ["nfc", "cnfc"])]


@pytest.mark.parametrize("c", [*CARDS.values(), Card("x"), Card(
    "x", "s", "bits", "down", Interval(high=3.0), "p", Interval(low=-1.0), True, Ref("mine", "1"))], ids=lambda c: c.title)
def test_a_card_is_kept_as_it_is(c: Card) -> None:
    record = json.loads(json.dumps(c.to_json(), allow_nan=False))
    assert Card.from_json(record) == c
    assert Card.from_json({**record, "of a later version": [1]}) == c


@pytest.mark.parametrize("record", [
    None, [], "nfc", {}, {"title": 3}, *({"title": "x", **wrong} for wrong in (
        {"sentence": None}, {"rich": "yes"}, {"whole": 1}, {"typical": [0]}, {"typical": ["0", 1]}, {"typical": [True, 1]},
        {"bounds": 3}, {"ref": "nfa"}, {"ref": ["nfa", 3]}))])
def test_what_is_no_card_is_refused_and_then_left_out(record: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"card|interval"):
        Card.from_json(record)
    with runs.create(tmp_path / "run") as w:
        w.rows([Row(0, "a", "mine", 0.5), Row(0, "a", "nfc", 0.5)])
        w.describe(cards={"mine": record, "nfc": Card("renamed").to_json()})
    assert cards_of(w.run) == {"nfc": Card("renamed")}
    assert "mine" in check_safe(report([w.run], tmp_path / "r.html").read_text(encoding="utf-8")).text
    with runs.create(tmp_path / "run", resume=True) as w:
        w.describe(cards=record)
    assert cards_of(w.run) == {}


def test_a_measure_of_one_s_own_is_shown_by_its_title(tmp_path: Path) -> None:
    mine = Card("share of dead units", "How many units are never active.", unit="%", rich="down", typical=Interval(0.2, 0.4),
                bounds=Interval(0.0, 1.0), panel="Activity", ref=Ref("rapid"))
    first = make(tmp_path / "first", measures=("nfc", "dead", "plain"), arrays=False)
    with runs.create(first.path, resume=True) as w:
        w.describe(cards={"dead": mine.to_json()})
    old = make(tmp_path / "old", measures=("nfc", "dead", "plain"), arrays=False)  # of a version that kept no cards
    for several in ([first], [first, old], [old, first]):
        seen = check_safe(report(several, tmp_path / "r.html").read_text(encoding="utf-8"))
        for words in ("share of dead units [%]", "How many units are never active.", "Activity", "plain", "Other measures",
                      "@article{rapid"):
            assert words in seen.text, words
    assert "share of dead units" not in check_safe(report([old], tmp_path / "r.html").read_text(encoding="utf-8")).text
    panel = figures.curves(first, measures=["dead"]).axes[0]
    assert panel.get_title() == "share of dead units [%]"
    assert {t.get_text(): t.get_position()[1] for t in panel.texts} == {"rich": 0.2, "lazy": 0.4}
    assert cards_of_all([old, first]) == {"dead": mine}
    assert measure_card("plain", cards_of(first)) == Card("plain")


def test_a_card_says_how_its_axis_is_drawn(tmp_path: Path) -> None:
    found = make(tmp_path / "run", measures=("nfc", "function_change", "mine"), arrays=False)
    frame = found.frame
    whole, levels, own = figures.curves(frame, measures=["nfc", "function_change", "mine"]).axes[:3]
    assert whole.get_ylim() == (0.0, 1.02)
    assert {t.get_text() for t in levels.texts} <= {"lazy", "rich"}
    assert own.get_ylim()[1] < 1
    typical = CARDS["function_change"].typical
    assert typical is not None
    low = frame.assign(value=frame.value / 3)
    assert [(t.get_text(), t.get_position()[1]) for t in figures.curves(low, measures=["function_change"]).axes[0].texts] == [
        ("lazy", typical.low)]
    own_card = Card("m", whole=True, bounds=Interval(-1.0, 3.0))
    watched = SimpleNamespace(frame=frame, measures=[SimpleNamespace(name="mine", card=own_card)])
    ax = figures.curves(watched, measures=["mine"]).axes[0]  # an Observer: its measures have their cards
    assert (ax.get_title(), ax.get_ylim()) == ("m", (-1.0, 3.08))
    assert figures.heat_map(watched, "mine").axes[0].get_images()[0].get_clim() == (-1.0, 3.0)


def test_thinning_keeps_the_picture() -> None:
    step = np.arange(20000.0)
    value = np.sin(step / 50)
    value[[3, 777, 15001]] = 9.0, -9.0, 5.0
    for linear in (None, 1.0):
        line = thin(plotdata.CurveData(step, value, np.full(20000, 0.1)), 400, linear)
        assert len(line.step) <= 400
        assert {3, 777, 15001, 0, 19999} <= set(line.step)
        np.testing.assert_array_equal(line.value, value[line.step.astype(int)])
        assert len(line.error) == len(line.step)
        assert (line.step < 200).sum() > (50 if linear else 3)  # a logarithmic axis shows more of the beginning
    assert thin(plotdata.CurveData(step[:9], value[:9], value[:9]), 9).step.tolist() == list(range(9))


@pytest.mark.parametrize("step", [
    np.r_[np.arange(10_000.0), 10_000 + 1000 * np.arange(1, 100)], np.r_[np.arange(10_000.0), 1e9]], ids=["sparse", "far"])
def test_thinning_of_uneven_steps(step: np.ndarray[Any, Any]) -> None:
    """No wide gap where there was none, and no crowd that is left to two points."""
    value = np.random.default_rng(0).standard_normal(len(step))
    line = thin(plotdata.CurveData(step, value, value), 400)
    assert len(line.step) <= 400
    assert (line.step < 10_000).sum() >= 150
    inner = step[step <= 110_000]
    assert np.diff(line.step[line.step <= inner[-1]]).max() <= 2 * max(np.diff(inner).max(), np.ptp(inner) / 99)


@pytest.mark.parametrize(("steps", "linear"), [
    ((0, 1, 1000), 1.0), ((0, 100, 5000), 100.0), ((500, 900), None), ((0,), None), ((), None)])
def test_a_step_axis_is_logarithmic_when_it_spans_decades(steps: tuple[int, ...], linear: float | None) -> None:
    assert plotdata.threshold(steps) == linear


def test_names_that_fit() -> None:
    layers = [f"transformer.blocks.{i}.attention.query" for i in range(3)]
    assert list(names.short_names([*layers, "*"], 26).values()) == [f"…{i}.attention.query" for i in range(3)] + ["whole model"]
    assert names.short_names(["a.b", "a.c"]) == {"a.b": "a.b", "a.c": "a.c"}
    assert names.short_names(["x" * 50], 11)["x" * 50] == "xxxx…xxxxxx"
    assert [axes.step_text(v) for v in (0, 2500, 12500, 3e6)] == ["0", "2500", "12.5k", "3M"]
    assert [axes.decade_text(v) for v in (1e-5, 0.01, 1.0, 2e6)] == ["10⁻⁵", "0.01", "1", "2·10⁶"]
    assert plotdata.chosen(range(10), 4) == [0, 3, 6, 9]
    assert plotdata.chosen(range(10), 1) == [0]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        make(tmp_path / folder / "run", measures=("nfc",), steps=(0,), arrays=False)
    a, b = Run(tmp_path / "a" / "run"), Run(tmp_path / "b" / "run")
    assert list(plotdata.labelled([a, b])) == ["a/run", "b/run"]
    assert list(plotdata.labelled([a, a])) == ["a/run (1)", "a/run (2)"]


def test_settings_that_differ() -> None:
    one, two = plotdata.flat({"a": 1, "b": {"c": [1, 2]}, "d": "x"}), plotdata.flat({"a": 1, "b": {"c": [1]}})
    assert plotdata.differences([one, two]) == ({"b.c": ["[1, 2]", "[1]"], "d": ["x", ""]}, {"a": "1"})
    assert plotdata.flat(None) == {}
    assert plotdata.flat(3) == {"settings": "3"}
    assert plotdata.flat([1, "ü"]) == {"settings": '[1, "ü"]'}
    assert plotdata.flat({}) == {}
    assert plotdata.flat({"m": {}, "n": {"k": None}, "": {"": 1}}) == {"m": "{}", "n.k": "null", ".": "1"}
    deep: Any = 1
    for _ in range(20):
        deep = {"a": deep}
    (name,) = plotdata.flat(deep)
    assert name == ".".join("a" * 8)


@pytest.mark.parametrize(("value", "expect", "words"), [
    (0.5, Interval(0.2, 1.0), ("0.2 to 1", "0.5", "holds", True)),
    (0.1, Interval(low=0.2), ("at least 0.2", "0.1", "does not hold", False)),
    (math.nan, Interval(high=0.2), ("at most 0.2", "", "does not hold", False)), (3, Interval(), ("any", "3", "holds", True))])
def test_claims_are_read_as_experiments_write_them(value: float, expect: Interval, words: tuple[Any, ...]) -> None:
    found = finding("it rises", value, expect, paper="0.9", source="a check")
    c = told("key", found.record)
    assert (c.text, c.paper, c.remark) == ("it rises", "0.9", "")
    assert (c.bar, c.value, c.verdict, c.holds) == words
    assert set(found.record) == KEYS


def test_a_claim_that_differs_says_why() -> None:
    c = told("key", finding("it rises", 0.0, Interval(low=1), differs="another data set").record)
    assert (c.verdict, c.remark, c.holds) == ("differs", "another data set", False)


def test_a_claim_about_some_figures_is_read_too() -> None:
    claim = dataclasses.replace(finding("it rises", 0.5, Interval(low=0.2)).claim, places=("Fig. 8",), was="0.1, a guess")
    c = told("key", Finding(claim, 0.5).record | {"controls": [{"text": "none", "value": 0.1, "outcome": "fails"}]})
    assert (c.text, c.value, c.verdict, c.holds, c.remark) == ("it rises", "0.5", "holds", True, "Earlier: 0.1, a guess")


OURS = finding("it rises", 0.5, Interval(0.2, 1.0)).record


@pytest.mark.parametrize("record", [
    {}, {"value": 1.0}, {k: v for k, v in OURS.items() if k != "holds"}, OURS | {"expect": {"low": 0}}, OURS | {"expect": [0]},
    OURS | {"value": 10 ** 400},
    OURS | {"value": "0.5"}, OURS | {"value": True}, OURS | {"holds": "yes"}, OURS | {"text": 3}, OURS | {"interval": [0, 1]}])
def test_other_records_of_claims_are_shown_as_text(record: dict[str, Any]) -> None:
    c = told("mine", record)
    assert (c.text, c.bar, c.value, c.verdict, c.holds) == ("mine", "", "", "", None)
    assert all(k in c.remark for k in record)


def test_markup_escapes_what_is_not_markup() -> None:
    assert tag("p", "1 < 2", Markup("<br>"), class_='"x"', title=None) == '<p class="&quot;x&quot;">1 &lt; 2<br></p>'
    assert "<th scope=\"row\">&lt;a&gt;</th><td>&amp;</td>" in table(["k"], [["<a>", "&"]])


def test_importing_the_report_is_light() -> None:
    check = ("import richter.report.html, sys\n"
             "assert not [m for m in ('torch', 'pandas', 'matplotlib', 'sklearn') if m in sys.modules]")
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)


@pytest.mark.parametrize("name", ["html.report", "html.card", "figures.curves", "server.serve"])
def test_parts_of_the_report_are_there_without_an_import(name: str) -> None:
    check = (f"import richter, sys\nassert 'richter.report' not in sys.modules\nassert callable(richter.report.{name})\n"
             "assert not [m for m in ('torch', 'pandas', 'matplotlib', 'sklearn') if m in sys.modules]")
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)


def test_a_part_that_is_not_there() -> None:
    assert {"figures", "html", "server", "views"} <= set(dir(richter.report))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = richter.report.nonsense


def test_figures_has_what_papers_and_experiments_use() -> None:
    assert set(figures.__all__) == {"COLOURS", "curves", "heat_map", "heat_maps", "compare", "compare_heat", "compare_whole",
                                    "scalars",
                                    "spectra", "matrices", "profiles", "specialisation", "side_by_side", "save", "against"}
    assert all(hasattr(figures, name) for name in figures.__all__)


def test_a_report_never_loads_torch(tmp_path: Path) -> None:
    run = make(tmp_path / "run", ("fc1",), measures=("nfc",), steps=(0,), arrays=False)
    check = (f"import sys, richter.runs\nfrom richter.report.html import report\n"
             f"report([richter.runs.load({str(run.path)!r})], {str(tmp_path / 'r.html')!r})\nassert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)


def test_ticks_of_logarithmic_axes_are_text(tmp_path: Path) -> None:
    from matplotlib.figure import Figure
    figure = Figure()
    ax = figure.add_subplot()
    ax.loglog([1, 1e6], [1e-5, 1])
    figure.add_axes((0.5, 0.5, 0.2, 0.2)).set_xscale("symlog")
    drawn, _ = figures.save(figure, tmp_path / "log")
    assert "math" not in drawn.read_text(encoding="utf-8")
    assert "10⁵" in drawn.read_text(encoding="utf-8")
