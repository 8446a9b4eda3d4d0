"""The ledger as HTML pages: whole, safe, and with the figures of the reader's own runs."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import tiny
from richter import cli, experiments
from richter.core import Ref
from richter.experiments import html, ledger, running
from richter.experiments.page import CELL

E = dataclasses.replace(tiny.EXPERIMENT, ref=Ref("nfa", "Fig. 1"), figures={"nfa_fig1": tiny.draw})
EVIL = "<script>alert('7')</script>\"&|$body"


class Elements(HTMLParser):
    """The elements of a page and where they point."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names, self.links = list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.append(name)
        self.links += [str(v) for k, v in attributes if k in ("src", "href")]
        assert not [k for k, _ in attributes if k.startswith("on")]


class Cells(HTMLParser):
    """The texts of the cells of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts, self.inside = list[str](), False
        self.feed(text)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        if name in ("td", "th"):
            self.texts.append("")
            self.inside = True

    def handle_endtag(self, name: str) -> None:
        self.inside = self.inside and name not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[-1] += data


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    store = tmp_path_factory.mktemp("store")
    checked = running.with_controls(running.check(E, "smoke", store), store)
    assert running.summarise(checked, store).faults == []
    return json.loads(json.dumps(checked.record)), store


def pages(e: Any, found: dict[Any, Any], store: Path) -> dict[str, str]:
    return html.html([e], found, store)


def test_the_pages_are_whole(checked: tuple[dict[str, Any], Path]) -> None:
    record, store = checked
    files = pages(E, {("nfa_tiny", "smoke"): record}, store)
    assert len(files) == len(ledger.catalogue()) + 1
    for name, text in files.items():
        elements = Elements(text)
        assert "script" not in elements.names
        assert str(store) not in text  # a page may be given to others
        for link in elements.links:
            assert link.startswith(("#", "data:")) or link.partition("#")[0] in files, name
    first, place = files["index.html"], files["nfa_fig1.html"]
    assert "<img" not in first
    assert [link[:26] for link in Elements(place).links if link.startswith("data")] == ["data:image/svg+xml;base64,"]
    assert "nfa_fig1: nfa Fig. 1, smoke scale, from your run smoke-" in place
    assert '<span class="chip finished">reproduced</span>' in place
    assert "reduced: steps 30 for 60" in place
    assert "reduced: steps 30 for 60" in first
    assert "fails, as it must" in place
    assert "Records at smoke scale: 1, stale: 0." in first
    assert first.count("these are replications") == 1
    assert f"Numbers from the record of nfa_tiny at smoke scale, {record['date']}, " in place
    assert "out of date" not in place
    old = {**record, "modules": {}}
    assert "stale; changed since: tiny.py." in pages(E, {("nfa_tiny", "smoke"): old}, store)["nfa_fig1.html"]
    diagrams = [c for c in ledger.catalogue() if "nothing" in c]
    assert all(c["nothing"] in first for c in diagrams)
    for paper in ("nfa", "rapid", "signal", "layerwise"):
        assert f'<section id="{paper}">' in first


def test_what_was_not_drawn_says_how(checked: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    def place(e: Any, store: Path) -> str:
        return pages(e, {("nfa_tiny", "smoke"): checked[0]}, store)["nfa_fig1.html"]
    text = place(E, tmp_path)
    assert "<img" not in text
    assert "<code>richter run nfa_tiny --scale paper</code>" in text
    assert "not run" in pages(E, {}, tmp_path)["nfa_fig1.html"]
    more = dataclasses.replace(E, figures={"nfa_fig1": tiny.draw, "nfa_fig1_b": tiny.draw})
    assert "nfa_fig1_b: not among the drawings of this run" in place(more, checked[1])
    assert "No drawing of its own." in place(dataclasses.replace(E, figures={}), checked[1])


def test_runs_of_other_settings_are_not_shown(checked: tuple[dict[str, Any], Path]) -> None:
    other = dataclasses.replace(E, smoke=tiny.Settings(steps=29))
    assert html.newest(E, checked[1]) is not None
    assert html.newest(other, checked[1]) is None


def test_nothing_on_the_pages_runs(checked: tuple[dict[str, Any], Path]) -> None:
    """Whatever a record says is text."""
    record, store = checked
    claim = {**record["claims"][0], "paper": EVIL, "was": EVIL, "source": EVIL, "differs": EVIL,
             "controls": [{"text": EVIL, "value": None, "outcome": EVIL}]}
    told = dataclasses.replace(E.claims[0], says=EVIL, second=EVIL)
    evil = dataclasses.replace(E, missing={"Fig. 1": EVIL}, reduced=EVIL, partial={"Fig. 1": EVIL}, claims=(told,))
    files = pages(evil, {("nfa_tiny", "smoke"): {**record, "claims": [claim], "tried": EVIL}}, store)
    for text in files.values():
        assert "script" not in Elements(text).names
    assert files["nfa_fig1.html"].count("&lt;script&gt;alert(&#x27;7&#x27;)&lt;/script&gt;&quot;&amp;|$body") >= 10


def test_no_cell_of_the_first_page_is_long(tmp_path: Path) -> None:
    cells = Cells(html.html([experiments.get(name) for name in experiments.names()], ledger.records(), tmp_path)["index.html"])
    assert len(cells.texts) > 4_000
    assert [text for text in cells.texts if len(text) > CELL] == []


def test_the_command_writes_the_pages(checked: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("richter.experiments.names", lambda: ["nfa_tiny"])
    monkeypatch.setattr("richter.experiments.get", lambda name: E)
    monkeypatch.setattr(ledger, "records", lambda: {("nfa_tiny", "smoke"): checked[0]})
    folder = tmp_path / "new"
    assert cli.main(["ledger", "--html", "--paper", "nfa", "-o", str(folder), "--store", str(checked[1])]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "index.html")
    files = html.html([E], {("nfa_tiny", "smoke"): checked[0]}, checked[1], "nfa")
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == files


def test_a_check_tells_what_drawings_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    def draw(r: Any) -> Any:
        figure = tiny.draw(r)
        figure.axes[0].set_xlabel("")
        return figure
    monkeypatch.setattr("richter.experiments.names", lambda: ["nfa_tiny"])
    monkeypatch.setattr("richter.experiments.get", lambda name: dataclasses.replace(E, figures={"nfa_fig1": draw}))
    assert cli.main(["check", "--store", str(tmp_path)]) == 1
    assert "incomplete drawing: nfa_fig1: panel 1 (without a title) does not name its x axis" in capsys.readouterr().out
