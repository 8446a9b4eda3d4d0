"""Ranks of weights, and the saddles of a training: ranks on the plateaus of its loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import richter
from richter.core import SelectionError
from richter.measures.ranks import rank
from richter.measures.saddles import Saddles, saddles, saddles_of
from richter.measures.stages import find
from richter.report.html import report

NAMES = ["rank_of_weights", "stable_rank_of_weights"]


def measured(W: np.ndarray) -> tuple[float, float]:
    """Both ranks of a single layer with these weights."""
    layer = nn.Linear(W.shape[1], W.shape[0], bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(W))
    snap = richter.measure(nn.Sequential(layer), richter.Probe(torch.ones(4, W.shape[1], dtype=torch.float64), None), NAMES)
    return snap.value(NAMES[0], "0"), snap.value(NAMES[1], "0")


def test_planted_singular_values() -> None:
    rng = np.random.default_rng(0)
    U, V = (np.linalg.qr(rng.standard_normal((d, 4)))[0] for d in (7, 5))
    assert measured(U * [3.0, 1.5, 0.31, 0.29] @ V.T) == pytest.approx((3, 1 + 0.25 + (0.31**2 + 0.29**2) / 9), rel=1e-10)
    assert measured(np.outer(U[:, 0], V[:, 0])) == pytest.approx((1, 1), rel=1e-10)
    assert all(map(math.isnan, measured(np.zeros((3, 2)))))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**20), rows=st.integers(1, 6), columns=st.integers(1, 6), exponent=st.integers(-100, 100))
def test_laws_of_ranks(seed: int, rows: int, columns: int, exponent: int) -> None:
    """1 <= stable rank <= rank of the matrix; neither depends on scale, rotations or transposition."""
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((rows, columns))
    first = measured(W)
    assert 1 <= first[1] <= min(W.shape) + 1e-9
    assert 1 <= first[0] <= min(W.shape)
    assert first[1] <= first[0] + 0.01 * min(W.shape)  # what is not counted has less than a hundredth of the squares of the first
    Q = np.linalg.qr(rng.standard_normal((rows, rows)))[0]
    for other in (2.0**exponent * W, W.T, Q @ W):
        assert measured(other)[1] == pytest.approx(first[1], rel=1e-9)
        assert measured(other)[0] == first[0]


def test_ranks_of_arrays() -> None:
    np.testing.assert_array_equal(rank([[3.0, 1.0, 0.2], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]), [2, 3, 0])
    assert rank([1.0, 0.1, 0.0999]) == 2
    assert rank([1.0, 0.04, 0.03], share=0.035) == 2


# ------------------------------------------------------------------------------------------------ saddles


def staircase() -> tuple[np.ndarray, np.ndarray]:
    """Two drops at 100 and 300, plateaus at 1, 0.6 and 0.2."""
    t = np.arange(500.0)
    rng = np.random.default_rng(0)
    return t, 1 - 0.4 / (1 + np.exp(-(t - 100) / 4)) - 0.4 / (1 + np.exp(-(t - 300) / 4)) + 1e-3 * rng.standard_normal(len(t))


def test_ranks_on_plateaus() -> None:
    t, loss = staircase()
    steps = np.arange(0, 500, 20)
    ranks = np.where(steps < 60, 9, np.where(steps < 280, 1, 2))
    seen = saddles(find(t, loss), steps, {"0": ranks, "2": ranks + 1.0}, {"0": ranks + 0.5})
    assert [s.number for s in seen.saddles] == [0, 1, 2]
    assert [dict(s.ranks) for s in seen.saddles] == [{"0": 9, "2": 10}, {"0": 1, "2": 2}, {"0": 2, "2": 3}]
    assert seen[1].stable == {"0": 1.5}
    assert seen.now is seen[2]
    assert seen[1].plateau.level == pytest.approx(0.6, abs=0.01)
    assert str(seen).endswith("ranks 2, 3; now: saddle 2")
    assert "saddle 1 (step 1" in str(seen)


def test_what_is_not_known_is_said() -> None:
    t, loss = staircase()
    seen = saddles(find(t, loss), [0, 10, 400], {"0": [3, 3, math.nan]})
    assert "loss 0.6): no ranks were measured there" in str(seen)
    assert "ranks ?; now: saddle 2" in str(seen)
    falling = saddles(find(t[:302], loss[:302]), [0, 10], {"0": [3, 3]})
    assert falling.now is None
    assert str(falling).endswith("now: falling")
    none = saddles(find(t, np.exp(-t / 100)), [0], {"0": [3]})
    assert len(none) == 0
    assert none.now is None
    assert str(none).startswith("no saddles: no stages: from step 0")


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: rank([1.0, math.nan]), "give one or more singular values .*, finite and not negative"),
    (lambda: rank(3.0), "values of shape ()"),
    (lambda: rank([1.0], share=0), "share=0: give a share of the largest singular value, above 0"),
    (lambda: saddles(find(*staircase()), [0, 1], {"0": [1.0]}), r"ranks\['0'\] has shape \(1,\): give a rank for each of the 2 "),
    (lambda: saddles(find(*staircase()), [[0, 1]], {}), r"steps have shape \(1, 2\)"),
    (lambda: saddles(find(*staircase()), [0, 1], {"0": [1.0]}, {"0": [1.0, 1.0]}), r"ranks\['0'\] has shape \(1,\)"),
    (lambda: saddles(find(*staircase()), [0, 1], {"0": [1.0, 1.0]}, {"0": [1.0]}), r"stable\['0'\] has shape \(1,\)"),
    (lambda: saddles(find(*staircase()), [0, math.nan], {"0": [1.0, 1.0]}), r"steps have shape \(2,\) and are not all finite"),
    (lambda: saddles(find(*staircase()), ["a"], {"0": [1.0]}), "steps cannot be read as numbers .could not convert string"),
    (lambda: saddles(find(*staircase()), [0], {"0": ["b"]}), r"ranks\['0'\] cannot be read as numbers"),
    (lambda: saddles(find(*staircase()), [0], [1.0]), "ranks are a list: give the ranks of every layer by its name"),  # type: ignore
    (lambda: saddles(find(*staircase()), [0], {}, np.ones(1)), "stable are a ndarray: give the ranks of"),  # type: ignore[arg-type]
    (lambda: saddles(3, [0], {}), "stages are a int: give the stages of a curve"),  # type: ignore[arg-type]
    (lambda: saddles_of(3), "run is a int: give an Observer, or a run from richter.runs.load"),
])
def test_what_is_refused(call: Any, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        call()


def small_training(run: Path | None, measures: list[str], logged: bool = True) -> richter.Observer:
    """A linear network of small weights on two modes: one direction, and then two."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=draw, dtype=torch.float64)
    y = x[:, :2] * torch.tensor([4.0, 1.0], dtype=torch.float64) + 0.5 * torch.randn(64, 2, generator=draw, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False)).double()
    for layer in model:
        nn.init.normal_(layer.weight, std=1e-4, generator=draw)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    with richter.Observer(model, richter.Probe(x, y), run=run, measures=measures, when=10, budget=None) as watch:
        for step in range(501):
            loss = (model(x) - y).square().sum(1).mean() / 2
            watch(step, **({"loss": loss.item()} if logged else {}))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return watch


def test_of_a_run_an_observer_and_in_a_report(tmp_path: Path) -> None:
    watch = small_training(tmp_path / "run", NAMES)
    run = richter.runs.load(tmp_path / "run")
    seen = saddles_of(watch)["loss"]
    assert [tuple(s.ranks.values()) for s in seen.saddles[1:]] == [(1, 1), (2, 2)]
    assert list(seen[1].ranks) == ["0", "1"]
    assert str(saddles_of(run)["loss"]) == str(seen)
    assert f"loss: {seen}." in report([run], tmp_path / "report.html").read_text(encoding="utf-8")


def test_without_a_logged_loss_that_of_the_probe_is_taken(tmp_path: Path) -> None:
    seen: dict[str, Saddles] = saddles_of(small_training(None, [*NAMES, "probe_loss"], logged=False))
    assert list(seen) == ["probe_loss"]
    assert saddles_of(small_training(None, NAMES, logged=False)) == {}
    with pytest.raises(SelectionError, match="rank_of_weights was not measured, so no plateau has a rank"):
        saddles_of(small_training(None, ["weight_change"]))
