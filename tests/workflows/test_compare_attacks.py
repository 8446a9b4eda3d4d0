"""Comparisons of networks under attack: rounding that passes for features, 1 that is not 1, files and options of the command
line, runs that are resumed with other examples."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import richter
from richter.cli import main
from richter.core import SelectionError, StoreError
from richter.models import mlp
from richter.report.comparison import about, between, steps_of
from richter.report.query import Query
from richter.report.shelf import Chosen, Shelf
from richter.report.views import Words, tabs
from richter.workflows import checkpoints, compare


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def probe(n: int, dtype: torch.dtype = torch.float64) -> richter.Probe:
    return richter.Probe(normal(n, 12, dtype=dtype), None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [40, 400])  # by Gram matrices, and by products of features
def test_rounding_is_no_feature(n: int, dtype: torch.dtype) -> None:
    """Behind a layer without weights all examples are the same, but for the order in which a product of matrices sums."""
    dead = mlp([12, 37, 41, 4], seed=1).to(dtype)
    with torch.no_grad():
        dead[0].weight.zero_()
        dead[0].bias.fill_(0.7)
        dead[2].weight += 0.01
    seen = compare(mlp([12, 16, 16, 4]).to(dtype), dead, probe(n, dtype))
    assert np.isfinite(seen.cka[:, 0]).all()
    assert np.isnan(seen.cka[:, 1:]).all()
    assert np.isnan(seen.overlap[:, 1:]).all()


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("n", [5, 10, 40, 200])
def test_a_network_is_like_itself_exactly(n: int, debiased: bool) -> None:
    model = mlp([12, 16, 16, 4]).double()
    permuted, order = copy.deepcopy(model), torch.randperm(16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in (permuted[0].weight, permuted[0].bias):
            p.copy_(p[order])
        permuted[2].weight.copy_(permuted[2].weight[:, order])
    for other in (model, permuted):
        seen = compare(model, other, probe(n), debiased=debiased)
        assert (np.diag(seen.cka) == 1).all()
        assert (np.diag(seen.overlap) == 1).all()
        assert (seen.overlap <= 1).all()


def test_numpy_inputs_are_kept_in_the_precision_of_the_model(tmp_path: Path) -> None:
    x, model = normal(30, 12).numpy(), mlp([12, 8, 4])
    with richter.Observer(model, richter.Probe(x, np.arange(30) % 4), run=tmp_path / "run", when=1, measures=["probe_loss"],
                          keep_features=16, budget=None, on_error="raise") as watch:
        watch(0)
    assert steps_of(richter.runs.load(tmp_path / "run")) == [0]


def watched(folder: Path, steps: range, keep: int, resume: bool = False) -> Any:
    with richter.Observer(mlp([12, 8, 4]), richter.Probe(normal(30, 12, dtype=torch.float32), torch.arange(30) % 4), run=folder,
                          when=1, measures=["probe_loss"], keep_features=keep, budget=None, resume=resume) as watch:
        for step in steps:
            watch(step)
    return richter.runs.load(folder)


def test_a_run_keeps_features_of_the_same_examples_when_it_is_resumed(tmp_path: Path) -> None:
    watched(tmp_path / "run", range(2), 16)
    with pytest.raises(SelectionError, match=r"has kept features of 16 rows, and not of the same examples as this Observer.* "
                                             r"Resume with the keep_features= and the Probe that it began with"):
        watched(tmp_path / "run", range(2, 4), 24, resume=True)
    run = watched(tmp_path / "run", range(2, 4), 16, resume=True)
    assert steps_of(run) == [0, 1, 2, 3]
    assert about(run)["rows"] == 16
    with pytest.raises(SelectionError, match=r"keep_inputs=\(3, 2, 2\): pictures are kept of the examples whose features"):
        richter.Observer(mlp([12, 8, 4]), probe(5), keep_inputs=(3, 2, 2))
    with pytest.raises(SelectionError, match=r"keep_inputs=rows: the inputs are a tensor \[5, 12\], which are no pictures"):
        richter.Observer(mlp([12, 8, 4]), probe(5), keep_features=5, keep_inputs="rows")  # type: ignore[arg-type]


def test_too_few_kept_examples_are_said_in_the_dashboard(tmp_path: Path) -> None:
    """They have no debiased alignment."""
    watched(tmp_path / "run", range(3), 3)
    shelf = Shelf(tmp_path)
    (view,) = (tab for tab in tabs() if tab.name == "compare")
    (panel,) = view.answer(Chosen(shelf, ["run"]), Query(""))
    assert isinstance(panel, Words)
    assert "3 examples are too few for the debiased alignment" in str(panel)


def test_the_layers_of_runs_can_be_chosen(tmp_path: Path) -> None:
    run = watched(tmp_path / "run", range(2), 16)
    seen = between(run, run, (0, 1), layers=["2"])
    assert seen.layers == (("2", "outputs"),) * 2
    with pytest.raises(SelectionError, match="run has no layer 'dogs'"):
        between(run, run, (0, 1), layers=["dogs"])
    with pytest.raises(SelectionError, match="features=0: the number of leading eigenfunctions to compare must be at least 1"):
        between(run, run, (0, 1), features=0)


def test_runs_with_other_examples_still_show_their_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched(tmp_path / "a", range(2), 16)
    watched(tmp_path / "b", range(2), 12)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    text = capsys.readouterr().out
    assert "probe_loss" in text
    assert "Features cannot be compared: they belong to different examples, so they have no rows in common" in text
    assert main(["compare", str(tmp_path / "a"), "--steps", "0", "1", "--layers", "2"]) == 0
    assert "\n0 " not in capsys.readouterr().out.split("CKA of what")[1]


def test_files_of_double_precision_and_bad_numbers_of_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "made_single.py").write_text("from richter.models import mlp\ndef make():\n    return mlp([12, 8, 4])\n")
    torch.save(mlp([12, 8, 4]).state_dict(), "a.pt")
    np.save("x.npy", normal(30, 12).numpy())  # as numpy makes them
    words = ["compare", "a.pt", "a.pt", "--model", "made_single:make", "--data", "x.npy"]
    assert main(words) == 0
    assert "on 30 examples" in capsys.readouterr().out
    assert main([*words, "--examples", "-5"]) != 0
    assert "--examples -5: give the number of examples" in capsys.readouterr().err


def test_a_file_that_is_refused_is_not_explained_in_the_words_of_torch(tmp_path: Path) -> None:
    """Which are how to execute it."""
    (tmp_path / "none.pt").touch()
    with pytest.raises(StoreError, match=r"none.pt could not be read as weights \(it is empty\)"):
        checkpoints.load(tmp_path / "none.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(StoreError, match=r"holds Python objects besides tensors: a whole model, or worse\)") as why:
        checkpoints.load(tmp_path / "model.pt")
    assert "weights_only" not in str(why.value)


def test_rows_that_are_tokens_are_called_tokens(tmp_path: Path) -> None:
    """Of a run as of a model."""
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7))
    ids = torch.randint(7, (20, 4), generator=torch.Generator().manual_seed(0))
    with richter.Observer(model, richter.Probe(ids, ids.flip(0)), run=tmp_path / "run", when=1, measures=["probe_loss"],
                          keep_features=16, budget=None) as watch:
        watch(0)
    run = richter.runs.load(tmp_path / "run")
    assert "on 16 tokens" in str(between(run, run))
    assert "on 80 tokens" in str(compare(model, model, richter.Probe(ids, None)))
