"""Learning curves: predictions beside what is measured, verdicts of planted cases, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from richter import cli
from richter.core import RichterError
from richter.learners import NNGP, Gaussian, Laplace
from richter.models import mlp
from richter.report.drawing import faults
from richter.tasks import digits
from richter.theory import eigenlearning
from richter.workflows import learning_curve

DATA = digits(seed=0)
X, Y = torch.cat([DATA.x, DATA.x_test]).double(), torch.cat([DATA.y, DATA.y_test])
SMALL, IDS = X[:200], Y[:200]


def table(n: int = 240, noise: float = 0.3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A product of two of six columns, with noise."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((n, 6))
    return x, x[:, 0] * x[:, 1] + noise * draw.standard_normal(n)


def test_predictions_are_measured() -> None:
    """Up to a fifth of the examples within a tenth; the band holds the others; and more data than was given is foreseen."""
    curve = learning_curve(Laplace(), X[:800], Y[:800], sizes=(32, 64, 128, 256, 400))
    ratio = curve.measured.mean(0) / curve.predicted
    assert np.abs(ratio[:3] - 1).max() < 0.1
    assert (np.abs(np.log(ratio)) < 2.5 * curve.error).all()
    x, ids = X[:1697], Y[:1697]
    K = np.asarray(Laplace().fitted(X[:800])(x))
    T = np.eye(10)[ids.numpy()] - np.eye(10)[Y[:800].numpy()].mean(0)
    errors = []
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(1697)
        rows, rest = order[:1600], order[1600:]
        f = K[np.ix_(rest, rows)] @ np.linalg.solve(K[np.ix_(rows, rows)] + 1e-9 * np.eye(1600), T[rows])
        errors.append(((f - T[rest]) ** 2).sum(1).mean() / 0.9)
    low, _, high = curve.ahead[1600]
    assert low < np.mean(errors) < high
    assert not (curve.ahead[800][0] < np.mean(errors) / 2)


def test_the_verdict_names_what_was_planted() -> None:
    x, y = table()
    assert learning_curve(Laplace(), x, y, trials=2).verdict.startswith("Learned features (RFM) would lower the test error")
    draw = np.random.default_rng(0)
    linear = draw.standard_normal((200, 20))
    target = linear @ draw.standard_normal(20) + 8 * draw.standard_normal(200)
    noisy = learning_curve(linear @ linear.T + 1e-3 * np.eye(200), None, target, trials=4, sizes=(12, 26, 30))
    assert noisy.verdict.startswith("A larger ridge (")
    assert noisy.best[-1] < 0.8 * noisy.predicted[-1]
    assert noisy.measured_best[:, -1].mean() < noisy.measured[:, -1].mean()
    nothing = learning_curve(Laplace(), x, draw.standard_normal(240), ridge=1e4, trials=2)
    assert nothing.verdict.startswith("Nothing that was tried lowers the error by 10% or more")


def test_a_gram_matrix_is_its_kernel() -> None:
    kernel = Laplace(bandwidth=8.0)
    a = learning_curve(kernel, SMALL, IDS, trials=1)
    b = learning_curve(kernel(SMALL), None, IDS, trials=1)
    np.testing.assert_allclose(a.predicted, b.predicted)
    np.testing.assert_allclose(a.measured, b.measured)
    assert len(b.remedies) == 2
    assert len(a.sizes) == 12
    other = learning_curve(kernel, SMALL, IDS, trials=1, ridge=0.5, seed=1)
    assert not np.allclose(other.predicted, a.predicted)
    assert not np.allclose(other.measured_best, a.measured_best)


def test_a_model_in_its_lazy_limit() -> None:
    """The tangent kernel of an untrained network, from its own outputs on."""
    model = mlp([64, 64, 10], seed=0).double()
    curve = learning_curve(model, SMALL, IDS, trials=2, sizes=(20, 40, 60))
    assert (np.diff(curve.measured.mean(0)) < 0).all()
    assert np.abs(np.log(curve.measured.mean(0) / curve.predicted)).max() < 0.35


def test_at_most_three_large_eigendecompositions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve sizes: one of all examples for each of two kernels, and four of half of them, which cost an eighth each."""
    sizes = []
    real = eigenlearning.modes
    monkeypatch.setattr(eigenlearning, "modes", lambda K, y: sizes.append(len(K)) or real(K, y))
    assert len(learning_curve(Laplace(), SMALL, IDS, trials=1).sizes) == 12
    assert sum((n / 200) ** 3 for n in sizes) <= 3


def test_a_curve_is_shown(tmp_path: Path) -> None:
    curve = learning_curve(NNGP(depth=1), SMALL, IDS, trials=2)
    text = str(curve)
    assert curve.verdict in text
    assert "with 400 examples" in text
    assert faults(curve.plot()) == []
    record = curve.to_json()
    assert record["sizes"] == list(curve.sizes)
    assert json.loads(json.dumps(record))["verdict"] == curve.verdict


def test_equal_examples_are_no_obstacle() -> None:
    x, ids = torch.cat([SMALL[:100], SMALL[:100]]), torch.cat([IDS[:100], IDS[:100]])
    assert np.isfinite(learning_curve(Laplace(), x, ids, trials=1).measured).all()


# ------------------------------------------------------------------------------------------------ the command


def written(path: Path, **changed: Any) -> str:
    x, y = table(120)
    frame = pd.DataFrame({**{f"x{i}": x[:, i] for i in range(6)}, "y": y, "kind": np.where(y > 0, "up", "down")} | changed)
    frame.to_csv(path, index=False)
    return str(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "t.csv")
    assert cli.main(["curve", path, "--target", "y", "--drop", "kind", "--figures", str(tmp_path)]) == 0
    assert "would lower the test error" in capsys.readouterr().out
    assert (tmp_path / "curve.svg").exists()
    assert cli.main(["curve", path, "--target", "kind", "--drop", "y", "--kernel", "nngp", "--ridge", "0.1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ridge"] == 0.1
    assert cli.main(["curve", path, "--target", "kind", "--drop", "y", "--most", "60", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 60


@pytest.mark.parametrize(("changed", "arguments", "sentence"), [
    ({"x0": np.r_[np.nan, np.zeros(119)]}, ["--target", "y", "--drop", "kind"], "1 of 120 rows have no value.*x0.*--drop"),
    ({}, ["--target", "y"], "the columns kind hold words.*--drop"),
    ({}, ["--target", "z"], "no column 'z'"),
    ({"kind": "same"}, ["--target", "kind", "--drop", "y"], "all labels are equal .one class"),
    ({}, ["--target", "y", "--drop", "kind", *(f"x{i}" for i in range(6))], "no column is left besides the target 'y'"),
    ({}, ["--target", "y", "--drop", "kind", "--most", "30"], "30 examples.*at least 40 examples are needed"),
])
def test_bad_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], arguments: list[str],
                    sentence: str) -> None:
    assert cli.main(["curve", written(tmp_path / "t.csv", **changed), *arguments]) != 0
    said = capsys.readouterr()
    assert re.search(sentence, (said.err + said.out).replace("\n", " "))


def test_files_that_are_no_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00\x01")
    for path in (tmp_path / "no.csv", tmp_path / "b.csv", tmp_path):
        assert cli.main(["curve", str(path), "--target", "y"]) != 0
        assert "Give a .csv file" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: learning_curve(Laplace(), SMALL, IDS[:-1]), "X has 200 rows and y has 199"),
    (lambda: learning_curve(np.ones((200, 3)), None, IDS), r"an array of shape \(200, 3\) and y has 200 rows"),
    (lambda: learning_curve(Laplace(), SMALL, 0 * IDS), "all labels are equal"),
    (lambda: learning_curve(Laplace(), SMALL, torch.arange(200)), "200 classes in 200 examples.*astype"),
    (lambda: learning_curve(Laplace(), SMALL * float("nan"), IDS), "X contains NaN"),
    (lambda: learning_curve(Laplace(), SMALL, IDS, sizes=(40, 20)), r"sizes=\(40, 20\).*increasing sizes"),
    (lambda: learning_curve(Laplace(), SMALL, IDS, sizes=(40, 200)), "left to test on"),
    (lambda: learning_curve(np.eye(200) - 0.1, None, IDS), "eigenvalue -19.*positive semi-definite"),
    (lambda: learning_curve(mlp([64, 8, 3], seed=0).double(), SMALL, IDS), "3 outputs for each example and y has 10 columns"),
    (lambda: learning_curve(Gaussian(), SMALL, IDS[:, None, None]), r"y has shape \(200, 1, 1\)"),
])
def test_bad_input(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(RichterError, match=sentence):
        call()


