"""What the documents show runs, and what they list exists."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import richter
import richter.commands
import richter.report.views
from richter.layers import _VIEWS
from richter.models import mlp
from richter.testing import check_experiment

ROOT = Path(__file__).parent.parent


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


@pytest.mark.long
def test_the_examples_of_extending_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page of it, one after another, as a module of its own; then what was added is taken back."""
    monkeypatch.chdir(tmp_path)
    known = dict(_VIEWS)
    (tmp_path / "extending_examples.py").write_text("\n".join(blocks("docs/extending.md")))
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        names = vars(importlib.import_module("extending_examples"))
        assert richter.measure(names["model"], names["probe"], [names["POWER"]]).value("input_power", "0") > 0
    finally:
        _VIEWS.clear()
        _VIEWS.update(known)
        for catalogue, name in ((richter.theory.CATALOGUE, "stone"), (richter.experiments.CATALOGUE, "nfa_coin"),
                                (richter.tasks.CATALOGUE, "spirals"), (richter.commands.CATALOGUE, "steps"),
                                (richter.report.views.VIEWS, "losses"), (richter.measures.CATALOGUE, "agop_rank")):
            catalogue.remove(name)


def train_step(model: torch.nn.Module, xb: torch.Tensor, yb: torch.Tensor) -> torch.Tensor:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    optimiser.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(xb), yb)
    loss.backward()
    optimiser.step()
    return loss


@dataclass(frozen=True)
class Settings:
    lr: float = 0.1
    seed: int = 0


def test_the_examples_of_runs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = torch.randn(300, 5), torch.arange(300) % 3
    names: dict[str, Any] = {
        "richter": richter, "model": mlp([5, 6, 3], seed=0), "probe": richter.Probe(x[:24], y[:24]), "settings": {"lr": 0.1},
        "loader": [(x[:32], y[:32])] * 101, "train_step": train_step, "schedule": lambda step: 0.1, "K": np.eye(3),
        "Settings": Settings, "accuracy": 0.5}
    observer, failing, reading, writing, sweeping, tabulating = blocks("docs/runs.md")
    exec(observer, names)
    names["watch"].now(100)
    names["watch"].close()
    exec(reading, names)
    exec(failing, names)
    assert names["run"].failures == names["watch"].failures == []
    assert names["run"].status == "finished"
    exec(writing, names)
    assert richter.runs.load("runs/own").series("my_measure", "layer").value.tolist() == [0.5]
    exec(sweeping.replace("    ...\n", "").replace(", workers=2", ""), names)  # a function of this test is of no module
    assert len(list(richter.runs.find("runs/sweep"))) == 6
    exec(tabulating, names)
    assert names["table"].points("accuracy", "lr") == [(s.lr, 0.5, run) for _, _, run in names["table"].points("accuracy", "lr")
                                                       for s in [Settings(**richter.runs.load(f"runs/sweep/{run}").settings)]]


def test_the_example_of_experiments_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("docs/experiments.md")
    (tmp_path / "nfa_coin.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    check_experiment(importlib.import_module("nfa_coin").EXPERIMENT, tmp_path / "store")


def test_the_example_of_learners_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("docs/learners.md")
    exec(code, {})
    said = re.findall(r"```\n(R2 .*?)```", (ROOT / "docs/learners.md").read_text(), re.DOTALL)[0]
    numbers = [[float(v) for v in re.findall(r"0\.\d*", text)] for text in (capsys.readouterr().out, said)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.011)


def test_the_examples_of_spectra_print_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    curve, theory, sines, images = blocks("docs/spectra.md")
    names: dict[str, Any] = {}
    exec(curve, names)
    said = re.findall(r"```\n(examples .*?)```", (ROOT / "docs/spectra.md").read_text(), re.DOTALL)[0].splitlines()
    shown = capsys.readouterr().out.splitlines()
    for row in (3, 8):  # predicted and measured errors
        seen, told = ([float(v) for v in lines[row].split()[1:5:3]] for lines in (shown, said))
        assert seen == pytest.approx(told, rel=0.03)
    assert shown[-1].split(" would ")[0] == said[-1].split(" would ")[0]
    assert (tmp_path / "spectra.png").exists()
    exec(theory, names)
    text = capsys.readouterr().out
    assert "test 0.8636, train 0.0879; the best ridge is 0.50" in text
    assert "4.82" in text
    assert "tempered" in text
    exec(sines, names)
    errors = [float(v) for v in re.findall(r"error ([.0-9]+)", capsys.readouterr().out)]
    assert errors[0] < 0.05
    assert errors[1] > 0.4
    exec(images, names)


def test_the_example_of_alignment_over_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """The profile has its peak inside after training, and the network has left the picture of infinite width."""
    names: dict[str, Any] = {}
    for code in blocks("docs/signal.md"):
        exec(code, names)
    shown = capsys.readouterr().out
    assert "infinite width describes the network" in shown
    assert "differ from those of a random network, by training or by another initialisation" in shown
    assert names["peak"]([names["after"].value("tangent_cka", k) for k in names["layers"]]).layer < 10
    assert names["right"] > 0.9


@pytest.mark.long
def test_the_example_of_late_generalisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    """Large weights are late, small ones are not; what the page shows is what comes out, up to the machine."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in blocks("docs/grokking.md"):
        exec(code, names)
    late, rich = (names["delay_of"](names[name]) for name in ("late", "rich"))
    assert (late.state, rich.state) == ("ended", "together")
    assert late.delay > 1000
    shown, written = capsys.readouterr().out, (ROOT / "docs/grokking.md").read_text()
    assert all(line in written for line in shown.splitlines()[-4:])  # theory: the same everywhere


def test_the_example_of_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """Three modes, three stages, in the order of the modes; what the page shows is what comes out, up to the machine."""
    names: dict[str, Any] = {}
    for code in blocks("docs/stages.md"):
        exec(code, names)
    assert len(names["seen"]) == 3
    assert all(drop.interval[0] < drop.time < drop.interval[1] for drop in names["seen"].drops)
    shown, written = capsys.readouterr().out, (ROOT / "docs/stages.md").read_text()
    assert shown.splitlines()[0][:9] == "3 stages:"
    assert shown.splitlines()[1].endswith("order as predicted")
    assert re.sub(r"[\d.]+", "#", shown) in re.sub(r"[\d.]+", "#", written)


@pytest.mark.long
def test_the_examples_of_saddles(capsys: pytest.CaptureFixture[str]) -> None:
    """Each saddle has a rank of deep layers, and it grows; what the page shows is what comes out, up to the machine."""
    names: dict[str, Any] = {}
    for code in blocks("docs/escape.md"):
        exec(code, names)
    deep = [list(s.ranks.values())[1:] for s in names["seen"].saddles]
    assert min(deep[0]) >= 9
    assert [min(ranks) for ranks in deep[1:]] == sorted(min(ranks) for ranks in deep[1:])
    assert min(deep[1]) <= 2 < 3 <= min(deep[-1]) <= max(deep[-1]) < 9
    shown, written = capsys.readouterr().out, (ROOT / "docs/escape.md").read_text()
    assert re.sub(r"[\d.]+", "#", shown.splitlines()[0]) in re.sub(r"[\d.]+", "#", written)
    assert "above 20: True" in shown
    assert all(float(v) > 15 for v in re.findall(r"\d+", shown.splitlines()[-1].partition("[")[2])[1:])


@pytest.mark.long
def test_the_example_of_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What the page shows is what comes out: laws, their order, and the sentence. What a network does with more images than were
    fitted lies where it is expected."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    first, second, third = blocks("docs/scaling.md")
    exec(first, names)
    shown, written = capsys.readouterr().out.splitlines(), (ROOT / "docs/scaling.md").read_text()
    assert [line[:60] for line in shown if line[:60] not in written] == []
    assert (tmp_path / "scaling.png").exists()
    exec(second, names)
    assert names["low"] < names["measured"] < names["high"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("with 1,400 images ")
    exec(third, names)
    for last, low, high in zip((800, 4000), *names["seen"].predict([800, 4000], confidence=0.9)[1:], strict=True):
        assert low < np.mean(names["losses"][int(0.95 * last):int(1.05 * last)]) < high
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if re.sub(r"[\d.]+", "#", line) not in re.sub(r"[\d.]+", "#", written)] == []


def test_the_example_of_the_order_of_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    """What the page shows is what comes out, up to the machine; trained times are within a tenth of those predicted."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in blocks("docs/agf.md"):
        exec(code, names)
    shown, written = capsys.readouterr().out, (ROOT / "docs/agf.md").read_text()
    words = re.sub(r"[\d.]+", "#", shown).split()
    assert words == re.sub(r"[\d.]+", "#", written[written.index("feature  "):]).split()[:len(words)]
    assert np.asarray(names["seen"].learned.staircase.times) == pytest.approx(names["seen"].seen, rel=0.1)
    assert (tmp_path / "agf.png").exists()


def test_the_example_of_self_supervised_learning(capsys: pytest.CaptureFixture[str]) -> None:
    """The embedding grows in steps, and the tangent kernel at the end predicts it better than the initial one."""
    names: dict[str, Any] = {}
    for code in blocks("docs/self_supervised.md"):
        exec(code, names)
    assert len(names["find"](range(3000), names["losses"])) >= 6
    assert names["overlap"]["end"] > max(0.9, names["overlap"]["start"])
    ranks = names["watch"].series("embedding_rank", "*").value
    assert ranks[-1] > 7 > 3 > ranks.min()


def test_the_example_of_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The manual of this Python may be another one; its tables have the same form, and words near "exception" handle one."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in blocks("docs/words.md"):
        exec(code, names)
    shown, written = capsys.readouterr().out, (ROOT / "docs/words.md").read_text()
    heads = [line.split() for line in shown.splitlines() if line.startswith(("concept", "resolved", "its largest"))]
    assert len(heads) == 4
    assert [head for head in heads if head not in [line.split() for line in written.splitlines()]] == []
    assert shown.count("\n") == written[written.index("65,420 words"):written.index("```\n\n![the spectrum")].count("\n")
    assert {"exceptions", "handler", "except", "raised", "caught"} & set(names["seen"].follow("exception").neighbours(1.0, 20))
    assert (tmp_path / "words.png").exists()
    assert (tmp_path / "vectors.txt").read_text().splitlines()[0] == f"{len(names['seen'].counts.words)} 40"


def test_the_example_of_features(capsys: pytest.CaptureFixture[str]) -> None:
    """As few features as classes with all layers, many with the last alone; and both answer right."""
    names: dict[str, Any] = {}
    for code in blocks("docs/features.md"):
        exec(code, names)
    shown = capsys.readouterr().out.splitlines()
    said = re.findall(r"^\{'kappa.*$", (ROOT / "docs/features.md").read_text(), re.MULTILINE)
    for seen, written in zip(shown, said, strict=False):
        a, b = (ast.literal_eval(text) for text in (seen, written))
        assert {k: pytest.approx(v, rel=0.05, abs=0.02) for k, v in b.items()} == a
    assert names["a"].regime == "minimum"
    assert names["a"].cumulative_utilisation[9] > 0.99
    assert names["e"].shape == (len(names["data"].x_test), 128)
    assert "359 examples are too few to evaluate 128 features" in shown[-1]


def test_the_examples_of_rapid_print_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"```\n\n```\n(.*?)```", (ROOT / "docs/rapid.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    for code in blocks("docs/rapid.md")[:len(shown)]:
        exec(code, names)
    numbers = [[float(v) for v in re.findall(r"\d+\.\d*", text)] for text in (capsys.readouterr().out, "".join(shown))]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.011)
    assert (tmp_path / "evolution.png").stat().st_size > 10_000


def test_the_examples_of_linear_networks_print_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/linear_networks.md").read_text()
    shown, names = re.findall(r"```\n\n```\n(.*?)```", text, re.DOTALL), dict[str, Any]()
    examples = blocks("docs/linear_networks.md")
    assert len(shown) == len(examples)
    for code in examples:
        exec(code, names)
    printed = capsys.readouterr().out
    assert re.sub(r"\d[\d.e+-]*", "#", printed).split() == re.sub(r"\d[\d.e+-]*", "#", "".join(shown)).split()
    numbers = [[float(v) for v in re.findall(r"\d+\.\d*", text)] for text in (printed, "".join(shown))]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.11)


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = torch.randn(300, 5), torch.arange(300) % 3
    for code in blocks("README.md"):
        exec(code, {"model": mlp([5, 6, 3], seed=0), "x": x, "y": y, "train_step": train_step, "loader": [(x[:32], y[:32])] * 30})
    assert "Verdict: " in capsys.readouterr().out
    assert richter.runs.load("runs/first").status == "finished"


def test_the_readme_comes_to_the_point() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    first = lines.index("```python")
    end = lines.index("```", first)
    assert first < 24
    assert sum(len(re.sub(r"\]\([^)]*\)", "]", line).split()) for line in lines[:first]) <= 150
    assert len([line for line in lines[first + 1:end] if line]) <= 7
    output = lines.index("```", end + 1)
    assert lines.index("```", output + 1) - output <= 7
    assert len(lines) <= 120
    order = [next(i for i, line in enumerate(lines) if word in line) for word in (
        "**Richter", "docs/claims.md", "![", "pip install", "make demo", "make test", "```python",
        "## Use it to", "**Lazy**", "**Rich**",
        "| question | call | page |", "## What it promises", "## Limits", "## Cite")]
    assert order == sorted(order)


def test_first_steps_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = torch.randn(300, 5), torch.arange(300) % 3
    names = {"model": mlp([5, 6, 3], seed=0), "x": x, "y": y, "train_step": train_step, "loader": [(x[:32], y[:32])] * 3}
    loop, once, hugging_face, kernels = blocks("docs/start.md")
    exec(loop, names)
    assert set(names["watch"].frame.columns) == {"step", "layer", "measure", "value", "error", "note", "mark"}
    exec(once, names)
    exec(kernels, names | {"x": x[:8]})
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 7, (6, 4))
    names = {"transformers": transformers, "config": transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=7, n_positions=4), "ids": ids, "labels": ids.roll(-1, 1),
        "attention_mask": torch.ones_like(ids), "richter": richter}
    exec(hugging_face, names)


@pytest.mark.parametrize("name", list(richter.measures.catalogue()))
def test_every_measure_is_explained(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs/measures.md").read_text()


def test_every_dependency_has_a_reason() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"\ndependencies = \[(.*?)\]", settings, re.DOTALL)
    assert listed is not None
    reasons = (ROOT / "docs/dependencies.md").read_text()
    for package in re.findall(r'"([a-z-]+)', listed[1]):
        assert re.search(rf"\| ([a-z-]+, )*{package}\b", reasons), package


@pytest.mark.parametrize("name", richter.__all__)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    if isinstance(getattr(richter, name), ModuleType) and name != "instrument":  # whose names are those of richter itself
        assert any(entry == f"richter.{name}" or entry.startswith(f"richter.{name}.") for entry in listed)
    elif name != "instrument":
        assert f"richter.{name}" in listed


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built as `make docs` builds them: warnings, e.g. of dead links, are errors."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    built = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=ROOT,
                           env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_the_pages_are_built(site: Path) -> None:
    pages = {page.stem for page in site.glob("*.html")}
    assert {"index", "CHANGELOG", "CONTRIBUTING", *(p.stem for p in (ROOT / "docs").glob("*.md"))} <= pages
    assert not list(site.rglob("*.py"))
    reference = (site / "reference.html").read_text()
    for name in ("richter.Probe", "richter.measure", "richter.Observer", "richter.kernels.cka", "richter.learners.RFMClassifier"):
        assert f'id="{name}"' in reference
    assert "&lt;CKC, CLC&gt; / (|CKC| |CLC|)" in reference  # an inner product is no tag


def test_the_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*?\bsrc=[\"']?([^\s\"'>]+)", text)
        loaded += re.findall(r"<link\b(?![^>]*\brel=[\"']?(?:next|prev|canonical))[^>]*?\bhref=[\"']?([^\s\"'>]+)", text)
        assert loaded
        assert not [address for address in loaded if "//" in address], page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\([\"']?|@import\s+[\"'])https?:", sheet.read_text()), sheet


CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")


@pytest.mark.long
@pytest.mark.skipif(not (CHROMIUM and DRIVER and importlib.util.find_spec("selenium")),
                    reason="needs a browser: apt-get install chromium chromium-driver, and pip install selenium")
def test_the_search_works_without_a_server(site: Path) -> None:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--proxy-server=127.0.0.1:1"):
        options.add_argument(word)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.get(f"file://{site}/index.html")
        driver.execute_script("document.querySelector('label[for=__search]').click()")
        driver.find_element("css selector", "input.md-search__input").send_keys("stable rank")
        end = time.monotonic() + 300  # by then it hangs, however slow the machine is
        while not (results := driver.find_elements("css selector", ".md-search-result__item a")):
            assert time.monotonic() < end, "nothing was found"
            time.sleep(0.1)
        assert any("reference.html" in str(link.get_attribute("href")) for link in results)
    finally:
        driver.quit()


def test_contributing_and_the_makefile_say_the_same() -> None:
    listed = dict(re.findall(r"^make (\w+) +# (.*)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    targets = dict(re.findall(r"^(\w+):.*?## (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert listed == {name: text for name, text in targets.items() if name != "demo"}


def test_the_walk_is_as_long_as_the_architecture_page_says() -> None:
    """Files and calls between files of one ``watch(step)``; without the shape checks of the tests, which are calls too."""
    walk = subprocess.run([sys.executable, ROOT / "docs" / "walk.py"], capture_output=True, text=True, check=True).stdout
    assert walk.splitlines()[0] in (ROOT / "docs" / "architecture.md").read_text()
    files, _, calls = map(int, re.findall(r"\d+", walk.splitlines()[0]))
    assert files <= 35
    assert calls <= 900  # both may only fall
