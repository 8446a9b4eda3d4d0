"""The ledger as one HTML page: whole, safe, and with the figures of the reader's own runs."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import tiny
from richter import cli
from richter.core import Ref
from richter.experiments import html, ledger, running

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


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    store = tmp_path_factory.mktemp("store")
    checked = running.with_controls(running.check(E, "smoke", store), store)
    assert running.summarise(checked, store).faults == []
    return json.loads(json.dumps(checked.record)), store


def test_the_page_is_whole(checked: tuple[dict[str, Any], Path]) -> None:
    record, store = checked
    text = html.html([E], {("nfa_tiny", "smoke"): record}, store)
    elements = Elements(text)
    assert "script" not in elements.names
    assert [link[:26] for link in elements.links if not link.startswith("#")] == ["data:image/svg+xml;base64,"]
    assert "nfa_fig1: nfa Fig. 1, smoke scale, from your run smoke-" in text
    assert str(store) not in text  # a page may be given to others
    assert '<span class="chip running">reproduced in part</span>' in text
    assert "Small scale only: steps 30 for 60" in text
    assert "On a wrong sum: 1, fails, as it must" in text
    assert "Records at smoke scale: 1, stale: 0." in text
    assert f"Numbers from the record of nfa_tiny at smoke scale, {record['date']}, " in text
    assert "The record is stale" not in text
    old = {**record, "modules": {}}
    assert "The record is stale; changed since: tiny.py." in html.html([E], {("nfa_tiny", "smoke"): old}, store)
    diagrams = [c for c in ledger.catalogue() if "nothing" in c]
    assert f"{len(ledger.catalogue()) - len(diagrams) - 1} no experiment yet" in text
    assert f"{len(diagrams)} nothing to measure" in text
    assert all(c["nothing"] in text for c in diagrams)
    assert text.count("results without an experiment yet") == len({c["paper"] for c in ledger.catalogue()})
    for paper in ("nfa", "rapid", "signal", "layerwise"):
        assert f'<section id="{paper}">' in text


def test_what_was_not_drawn_says_how(checked: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    text = html.html([E], {("nfa_tiny", "smoke"): checked[0]}, tmp_path)
    assert "<img" not in text
    assert "<code>richter run nfa_tiny --scale paper</code>" in text
    assert "not run" in html.html([E], {}, tmp_path)
    more = dataclasses.replace(E, figures={"nfa_fig1": tiny.draw, "nfa_fig1_b": tiny.draw})
    assert "nfa_fig1_b: not among the drawings of this run" in html.html([more], {("nfa_tiny", "smoke"): checked[0]}, checked[1])
    bare = dataclasses.replace(E, figures={})
    assert "No drawing of its own." in html.html([bare], {("nfa_tiny", "smoke"): checked[0]}, checked[1])


def test_runs_of_other_settings_are_not_shown(checked: tuple[dict[str, Any], Path]) -> None:
    other = dataclasses.replace(E, smoke=tiny.Settings(steps=29))
    assert html.newest(E, checked[1]) is not None
    assert html.newest(other, checked[1]) is None


def test_nothing_on_the_page_runs(checked: tuple[dict[str, Any], Path]) -> None:
    """Whatever a record says is text."""
    record, store = checked
    claim = {**record["claims"][0], "text": EVIL, "paper": EVIL, "was": EVIL, "verdict": EVIL, "differs": EVIL, "holds": False,
             "controls": [{"text": EVIL, "value": None, "outcome": EVIL}]}
    evil = dataclasses.replace(E, missing={"Fig. 1": EVIL}, reduced=EVIL)
    text = html.html([evil], {("nfa_tiny", "smoke"): {**record, "claims": [claim], "tried": EVIL}}, store)
    assert "script" not in Elements(text).names
    assert text.count("&lt;script&gt;alert(&#x27;7&#x27;)&lt;/script&gt;&quot;&amp;|$body") >= 8


def test_the_command_writes_the_page(checked: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("richter.experiments.names", lambda: ["nfa_tiny"])
    monkeypatch.setattr("richter.experiments.get", lambda name: E)
    monkeypatch.setattr(ledger, "records", lambda: {("nfa_tiny", "smoke"): checked[0]})
    path = tmp_path / "new" / "page.html"
    assert cli.main(["ledger", "--html", "-o", str(path), "--store", str(checked[1])]) == 0
    assert capsys.readouterr().out.strip() == str(path)
    assert path.read_text(encoding="utf-8") == html.html([E], {("nfa_tiny", "smoke"): checked[0]}, checked[1])


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
