"""Features in the report and the dashboard: the run's own numbers, the inputs that excite a feature, layers beside each other."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.image
import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from test_dashboard import serving

import richter
from richter.core import Row, SelectionError, StoreError, likeness
from richter.core.likeness import GRAM
from richter.instrument import keepsakes
from richter.measures.features import analyse
from richter.models import mlp
from richter.report import comparison, features
from richter.report.app import application
from richter.report.html import report
from richter.report.png import png
from richter.runs import Run, create

if TYPE_CHECKING:
    from browser import Browser

pytest_plugins = ["browser"]
N, STEPS, LAYERS = 12, (0, 10, 100), ("in", "last", "outputs")


def gram(layer: int, step: int, seed: int) -> np.ndarray[Any, Any]:
    """Of the last layer the strongest feature is largest on example 7, the second on example 3."""
    draw = np.random.default_rng([layer, 0 if layer == 0 else step, 0 if layer == 0 else seed])
    X = draw.standard_normal((N, 4))
    if layer == 1:
        X = 0.01 * X
        X[7, 0], X[3, 1] = -30.0, 10.0  # the sign of an eigenfunction says nothing
    return np.asarray(likeness.centred(X @ X.T), np.float32)


def analysis(step: int) -> np.ndarray[Any, Any]:
    k = np.arange(1, 31)
    return np.stack([3.0 / k ** (1 + step / 100), 0.9 ** k * 0.1, np.where(k <= 10, 0.1, 0.0)])


def make(path: Path, seed: int = 0, *, kept: bool = True, measured: bool = True, examples: str = "those") -> Path:
    writer = create(path, {"seed": seed})
    writer.describe(features={"examples": examples, "rows": N, "classes": [i % 3 for i in range(N)], "layers": list(LAYERS)})
    for step in STEPS:
        writer.scalars(step, loss=2.0 / (1 + step), test_accuracy=step / 200, accident=5.0)
        if measured:
            writer.rows([Row(step, "*", "kappa_cka", 0.5 - step / 250), Row(step, "*", "probe_accuracy", step / 100)])
            writer.array("features", analysis(step), step=step)
        for i, k in enumerate(LAYERS) if kept else ():
            writer.array("feature_gram", gram(i, step, seed), layer=k, step=step)
    if kept:
        pictures = np.zeros((N, 1, 4, 5), np.uint8) + np.arange(N, dtype=np.uint8)[:, None, None, None]
        writer.array("inputs", pictures, step=0)
    writer.finish()
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    make(folder / "one")
    make(folder / "two", seed=1)
    make(folder / "apart", examples="others")
    make(folder / "bare", kept=False, measured=False)
    return folder


@pytest.fixture
def run(store: Path) -> Run:
    return richter.runs.load(store / "one")


# ------------------------------------------------------------------------------------------------------------- numbers


def test_the_inputs_that_excite_a_feature_most(run: Run) -> None:
    first, second, *_ = features.excited(run)
    assert features.readout_layer(run) == "last"
    assert (first.number, first.examples[0], second.examples[0]) == (1, 7, 3)
    K = likeness.centred(run.array("feature_gram", "last", 100).astype(float))
    values, vectors = np.linalg.eigh(K)
    u = vectors[:, -1] * np.sqrt(N)
    assert first.share == pytest.approx(values[-1] / np.trace(K), rel=1e-5)
    assert first.values[0] == pytest.approx(np.abs(u).max(), rel=1e-4)
    assert first.values == sorted(first.values, reverse=True)
    assert len(first.examples) == features.EXAMPLES
    assert features.excited(run, "in", step=10, features=2, examples=3)[1].number == 2
    with pytest.raises(SelectionError, match=r"has kept no features of layer 'x' at step 100. It has: 'in', 'last', 'outputs'"):
        features.excited(run, "x")


def test_the_mosaic_has_the_pictures_and_white_between_them(run: Run) -> None:
    sheet = features.mosaic(run, [7, 3])
    assert sheet.shape == (4, 12, 3)
    assert sheet[0, :, 0].tolist() == [7] * 5 + [255] * 2 + [3] * 5
    np.testing.assert_array_equal((matplotlib.image.imread(io.BytesIO(png(sheet)), format="png")[..., :3] * 255).round(), sheet)


def test_how_far_layers_have_gone_from_their_first_features(run: Run) -> None:
    steps, curves = comparison.drift(run)
    assert steps == [*STEPS]
    assert curves["in"].tolist() == pytest.approx([1, 1, 1])
    for i, step in enumerate(STEPS):
        K, L = (likeness.centred(gram(2, s, 0).astype(float)) for s in (0, step))
        assert curves["outputs"][i] == pytest.approx(richter.kernels.cka(K, L, debiased=True), abs=1e-6)
    assert abs(curves["outputs"][2]) < 0.9


def test_how_far_they_have_gone_takes_no_eigenfunctions_and_few_large_matrices(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = comparison.drift(run)[1]
    monkeypatch.setattr(likeness, "leading", None)
    monkeypatch.setattr(comparison, "MOST", 3 * N * N + 1)  # the matrices of one step
    steps, curves = comparison.drift(run)
    assert steps == [STEPS[0], STEPS[-1]]
    assert curves["outputs"].tolist() == whole["outputs"][[0, -1]].tolist()


def test_features_of_very_many_examples_are_not_compared_while_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The eigenfunctions of a Gram matrix of 4,096 took half a minute of a core; an Observer keeps at most 1,024."""
    assert comparison.ROWS == keepsakes.MOST
    with create(tmp_path / "wide") as w:
        for step in (0, 1):
            w.array(GRAM, np.eye(comparison.ROWS + 1, dtype=np.float32), layer="in", step=step)
    monkeypatch.setattr(Run, "array", None)  # it is known before it is read
    with pytest.raises(StoreError, match=r"arrays of shape \(1025, 1025\); square ones of up to 1,024 rows are compared"):
        comparison.between(w.run, w.run, (0, 1))
    with pytest.raises(StoreError, match=r"up to 1,024 rows"):
        comparison.drift(w.run)


def test_of_very_many_steps_some_are_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "TIMES", 2)
    steps, table = features.through_time(run)
    assert steps == [STEPS[0], STEPS[-1]]
    assert table["quality"].shape[0] == 2


# ------------------------------------------------------------------------------------------------------------- figures


def test_the_thesis_figure_has_the_run_s_numbers(run: Run) -> None:
    quality, utilisation, intensity = features.spectrum(run).axes
    for step, line in zip((0, 100), quality.lines, strict=True):
        np.testing.assert_allclose(line.get_ydata(), analysis(step)[1].cumsum())
    np.testing.assert_allclose(utilisation.lines[1].get_ydata(), analysis(100)[2].cumsum())
    strength = analysis(100)[0] / analysis(100)[0, 0]
    np.testing.assert_allclose(intensity.lines[1].get_ydata(), np.where(strength > 1e-6, strength, np.nan))
    assert [ax.get_title() for ax in (quality, utilisation)] == ["cumulative quality", "cumulative utilisation"]


def test_the_first_features_through_time(run: Run) -> None:
    quality, _, intensity, bar = features.evolution(run).axes
    assert len(quality.lines) == 20
    assert quality.lines[3].get_xdata().tolist() == [*STEPS]
    np.testing.assert_allclose(intensity.lines[2].get_ydata(), [analysis(s)[0, 2] / analysis(s)[0, 0] for s in STEPS])
    assert "strongest" in bar.get_ylabel()
    assert len(features.evolution(run, first=5).axes[0].lines) == 5


def test_kappa_beside_the_learning_curve(run: Run) -> None:
    shares, losses = features.learning(run).axes
    assert [ax.get_title() for ax in (shares, losses)] == ["kappa and accuracy", "loss"]
    drawn = [line.get_ydata() for line in shares.lines]
    assert len(drawn) == 4  # with the border; an accident is no accuracy
    np.testing.assert_allclose(drawn[0], [0.5, 0.46, 0.1])
    assert list(drawn[-1]) == [features.MINIMUM] * 2


def test_the_figure_of_exciting_inputs(run: Run) -> None:
    figure = features.exciting(run)
    first = figure.axes[0]
    np.testing.assert_array_equal(first.images[0].get_array(), features.mosaic(run, features.excited(run)[0].examples))
    assert first.get_xticklabels()[0].get_text() == "1"  # the class of example 7
    assert first.get_ylabel().startswith("feature 1\n")


# -------------------------------------------------------------------------------------------------------------- report


def sections(path: Path) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", path.read_text(encoding="utf-8"))


def test_a_report_shows_features_wherever_there_are_some(store: Path, tmp_path: Path) -> None:
    page = report([richter.runs.load(store / "one")], tmp_path / "one.html", figures=tmp_path / "pictures")
    assert {"Features", "Are layers alike?"} <= set(sections(page))
    text = page.read_text(encoding="utf-8")
    assert "Are the layers of the first and the last step alike? On 12 examples: debiased CKA" in text
    assert "most, at step 100" in text
    assert len(list((tmp_path / "pictures").glob("*.svg"))) >= 5
    bare = report([richter.runs.load(store / "bare")], tmp_path / "bare.html")
    assert not {"Features", "Are layers alike?"} & set(sections(bare))


def test_a_report_of_several_runs_compares_them(store: Path, tmp_path: Path) -> None:
    page = report([richter.runs.load(store / k) for k in ("one", "bare", "two", "apart")], tmp_path / "report.html")
    text = page.read_text(encoding="utf-8")
    assert "Are the layers of one and two alike? On 12 examples" in text
    assert "one and apart are not compared: the runs one and apart have kept features of different examples" in text
    assert "two: features" in text


def test_a_damaged_array_does_not_end_a_report(store: Path, tmp_path: Path) -> None:
    with create(tmp_path / "run") as writer:
        writer.array("features", np.ones((2, 5)), step=0)
        writer.array("feature_gram", np.ones((3, 3)), layer="0", step=0)
        writer.array("inputs", np.ones(4, np.uint8), step=0)
        writer.describe(features={"layers": [["x"], 3], "classes": 5})
    text = report([richter.runs.load(tmp_path / "run")], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "has shape (2, 5): 3 rows are needed, intensity, quality, utilisation" in text


# ----------------------------------------------------------------------------------------------------------- dashboard


def panels(store: Path, view: str, *runs: str, **more: Any) -> list[dict[str, Any]]:
    reply = TestClient(application(store, "127.0.0.1", None), base_url="http://localhost:8642").get(
        f"/api/{view}", params={"run": runs, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()["panels"]


def test_the_view_of_layers_beside_each_other(store: Path) -> None:
    cka, overlap, drift = panels(store, "compare", "one")
    seen = comparison.between(Run(store / "one"), Run(store / "one"), (0, 100), debiased=True)
    np.testing.assert_allclose(np.array(cka["values"], float), seen.cka, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(np.array(overlap["values"], float), seen.overlap, rtol=1e-5, atol=1e-7)
    assert (cka["rows"], cka["axes"]) == ([*LAYERS], ["one, step 0", "one, step 100"])
    assert [c["label"] for c in drift["curves"]] == [*LAYERS]
    assert panels(store, "compare", "one", first=5, last=50)[0]["axes"] == ["one, step 0", "one, step 10"]
    pair, _ = panels(store, "compare", "one", "two")
    assert pair["axes"] == ["one, step 100", "two, step 100"]
    assert panels(store, "compare", "one", "bare")[0]["title"] == "Only one run has stored features"
    assert panels(store, "compare", "bare")[0]["title"] == "No features to compare"
    assert "different examples" in panels(store, "compare", "one", "apart")[0]["sentence"]


def test_the_view_of_features(store: Path) -> None:
    shown = panels(store, "features", "one")
    assert [p["title"] for p in shown] == [
        "Cumulative quality", "Cumulative utilisation", "Intensity, relative to the first", "Kappa and accuracy",
        "Quality of the first features", "Utilisation of the first features", "Intensity of the first features",
        "Inputs that activate each feature most"]
    np.testing.assert_allclose(shown[0]["curves"][-1]["value"], analysis(100)[1].cumsum(), rtol=1e-5)
    assert [c["label"] for c in shown[3]["curves"]] == ["kappa_cka", "probe_accuracy", "test_accuracy"]
    picture = shown[-1]["pictures"][0]
    client = TestClient(application(store, "127.0.0.1", None), base_url="http://localhost:8642")
    reply = client.get(f"/api/{picture['path']}", params=picture["query"])
    assert reply.headers["content-type"] == "image/png"
    pixels = matplotlib.image.imread(io.BytesIO(reply.content), format="png")
    assert round(pixels[0, 0, 0] * 255) == 7
    assert client.get("/api/exciting", params={"run": "one", "feature": 8}).status_code == 400
    assert [p["title"][:5] for p in panels(store, "features", "two", "one")][:1] == ["two: "]
    assert panels(store, "features", "bare")[0]["title"] == "No features"


def test_matrices_leave_pictures_out(store: Path) -> None:
    reply = TestClient(application(store, "127.0.0.1", None), base_url="http://localhost:8642").get(
        "/api/matrices", params={"run": "one"})
    assert {a["name"] for a in reply.json()["arrays"]} == {"feature_gram", "features"}


@pytest.fixture(scope="module")
def site(store: Path) -> Iterator[str]:
    with serving(store) as address:
        yield address


def test_numbers_stand_in_cells_of_their_colour(site: str, store: Path, browser: Browser) -> None:
    browser.open(f"{site}#run=one&view=compare")
    browser.until("document.querySelectorAll('.cells').length === 2")
    seen = comparison.between(Run(store / "one"), Run(store / "one"), (0, 100), debiased=True)
    cells = "[...document.querySelector('.cells tbody').querySelectorAll('td')]"
    assert browser.run(f"return {cells}.map(c => c.textContent)") == [f"{v:.2f}" for v in seen.cka.ravel()]
    colours = browser.run(f"return {cells}.map(c => c.style.background)")
    assert colours[0] == "rgb(253, 231, 37)"  # of 1
    assert len(set(colours)) > 3
    browser.until("document.querySelector('.panel .scatterlayer .trace')")


def test_pictures_are_shown_as_images(site: str, browser: Browser) -> None:
    browser.open(f"{site}#run=one&view=features")
    browser.until("document.querySelectorAll('.gallery img').length > 1")
    browser.run("document.querySelector('.gallery').scrollIntoView()")
    browser.until("document.querySelector('.gallery img').naturalWidth > 20")
    assert "feature 1, " in browser.text()
    assert browser.complaints() == []


def test_a_watched_run_has_them_all(tmp_path: Path) -> None:
    """What the measure keeps is what the figures read."""
    model = mlp([16, 12, 8, 3], seed=0)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 16, generator=draw), torch.arange(60) % 3
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = ["kappa_cka", "probe_accuracy", "probe_loss"]
    with richter.Observer(model, richter.Probe(x, y), run=tmp_path / "run", measures=wanted, when=2, budget=None,
                          keep_features=24, keep_inputs=(1, 4, 4)) as watch:
        for step in range(5):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            watch(step, loss=loss)
            with torch.no_grad():
                now = analyse(model[:-1](x), y, model(x))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    run = richter.runs.load(tmp_path / "run")
    assert features.layers(run)[0] == "*"
    assert features.steps(run) == [0, 2, 4]
    assert features.of_step(run, "*", 4)["intensity"].shape == now.intensity.shape
    np.testing.assert_allclose(features.of_step(run, "*", 4)["quality"], now.quality, rtol=1e-4, atol=1e-5)
    for draw_it in (features.spectrum, features.evolution, features.learning, features.exciting):
        assert draw_it(run).axes
    titles = {p["title"] for p in panels(tmp_path, "features", "run")}
    assert {"Cumulative quality", "Kappa and accuracy", "Inputs that activate each feature most"} <= titles
    text = report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "No spectra" not in text
