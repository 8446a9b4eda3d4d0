"""An Observer measures what training left when it is closed or its context ends."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import richter
from richter.core import DivergedError, SelectionError

X, Y = torch.randn(16, 3, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2
FEW: dict[str, Any] = {"measures": ["weight_change"], "when": 100, "budget": None}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def observer(model: nn.Module | None = None, **more: Any) -> richter.Observer:
    return richter.Observer(model or network(), richter.Probe(X, Y), **{**FEW, **more})


def moved(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1


@pytest.mark.parametrize("kept", [False, True])
def test_what_training_left_is_measured(kept: bool, tmp_path: Path) -> None:
    model = network()
    with observer(model, run=tmp_path if kept else None) as watch:
        for step in range(5):
            watch(step, loss=1.0)
            moved(model)
        assert [s.step for s in watch.snapshots] == [0]
    assert [s.step for s in watch.snapshots] == [0, 4]
    assert watch.snapshots[-1].value("weight_change", "0") > 0
    watch.close()
    assert len(watch.snapshots) == 2  # once
    if kept:
        run = richter.runs.load(tmp_path)
        assert (run.steps, run.status) == ([0, 4], "finished")


@pytest.mark.parametrize("options", [{}, {"steps": 40}], ids=["", "steps="])
def test_a_verdict_on_an_observer_is_of_its_last_step(options: dict[str, Any]) -> None:
    """It was "stale" for most lengths: everything had been measured at the first steps only."""
    model = network()
    watch = richter.Observer(model, richter.Probe(X, Y), **options)
    for step in range(40):
        moved(model)
        watch(step, loss=1.0)
    watch.snapshots = watch.snapshots[:1]
    watch._unmeasured = True
    found = richter.diagnose(watch)
    assert (found.word != "stale", found.step) == (True, 39)
    assert "nfc" in watch.snapshots[-1].measures
    n = len(watch.snapshots)
    assert (richter.diagnose(watch), len(watch.snapshots)) == (found, n)  # not again


def test_what_was_measured_after_the_last_step_is_not_measured_again_under_an_older_one() -> None:
    model = network()
    watch = observer(model)
    for step in range(3):
        watch(step)
        moved(model)
    watch.now(3)
    watch.close()
    assert [s.step for s in watch.snapshots] == [0, 3]
    with pytest.warns(richter.RichterWarning, match="step 1 comes after step 2: do steps begin again in every epoch"):
        watch(1)
    watch.close()
    assert sorted(s.step for s in watch.snapshots) == [0, 1, 3]


def test_close_does_so_too_and_not_what_was_measured() -> None:
    watch = observer()
    watch.close()
    assert watch.snapshots == []  # nothing was seen
    watch(0)
    watch.close()
    assert [s.step for s in watch.snapshots] == [0]
    watch = observer(when=2)
    for step in range(4):
        watch(step)
    watch.now(3)
    last = watch.snapshots[-1]
    watch.close()
    assert watch.snapshots[-1] is last


def test_what_was_put_off_is_measured_at_the_end() -> None:
    watch = observer(budget=1e-9, free_seconds=0.0, when=1)
    for step in range(4):
        watch(step)
    assert watch.put_off == [1, 2, 3]
    watch.close()
    assert [s.step for s in watch.snapshots] == [0, 3]


@pytest.mark.parametrize(("error", "steps"), [
    (ValueError("the data ended"), [0, 1]), (KeyboardInterrupt(), [0, 1]), (MemoryError(), [0]), (SystemExit(1), [0]),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), [0]), (RuntimeError("shapes differ"), [0, 1]),
    (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), [0])])
def test_a_loop_that_ended_with_an_error(error: BaseException, steps: list[int]) -> None:
    """It is measured where a measurement can survive what happened, and the error is the loop's own."""
    watch = observer()

    def loop() -> None:
        with watch:
            watch(0)
            watch(1)
            raise error

    with pytest.raises(type(error)) as seen:
        loop()
    assert seen.value is error
    assert [s.step for s in watch.snapshots] == steps


def spoil(watch: richter.Observer) -> None:
    with torch.no_grad():
        next(watch.model.parameters()).fill_(torch.nan)


def test_a_failure_there_warns_and_names_the_line_that_closed() -> None:
    watch = observer()
    watch(0)
    watch(1)
    spoil(watch)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        watch.close()
    assert [w.filename for w in seen] == [__file__]
    assert "DivergedError" in str(seen[0].message)
    assert [(f.first, f.times) for f in watch.failures] == [(1, 1)]
    watch.close()
    assert watch.failures[0].times == 1
    assert richter.diagnose(watch).word == "diverged"


def test_on_error_raise_raises_there_and_does_not_hide_the_loop_s_own_error() -> None:
    watch = observer(on_error="raise")
    watch(0)
    watch(1)
    spoil(watch)
    with pytest.raises(DivergedError):
        watch.close()
    watch = observer(on_error="raise")

    def loop() -> None:
        with watch:
            watch(0)
            watch(1)
            spoil(watch)
            raise ValueError("mine")

    with pytest.warns(richter.RichterWarning), pytest.raises(ValueError, match="mine"):
        loop()
    assert watch.on_error == "raise"


def test_a_step_that_failed_is_not_tried_again() -> None:
    with observer(when=1) as watch:
        watch(0)
        spoil(watch)
        with pytest.warns(richter.RichterWarning):
            watch(1)
    assert watch.failures[0].times == 1


def test_the_run_ends_although_the_measurement_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = observer(run=tmp_path)
    watch(0)
    watch(1)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.measurement, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        watch.close()
    assert watch.writer is not None
    assert watch.writer.closed


@pytest.mark.parametrize("kept", [False, True])
def test_scalars_are_read_one_by_one(kept: bool, tmp_path: Path) -> None:
    watch = observer(run=tmp_path if kept else None)
    for step, loss in ((0, 3.0), (1, 2.0), (1, 1.5)):
        watch(step, loss=loss, lr=0.1)
    assert watch.scalar_names == ["loss", "lr"]
    series = watch.scalars("loss")
    assert (series.step.tolist(), series.value.tolist()) == ([0, 1], [3.0, 1.5])
    assert np.isnan(series.error).all()
    assert watch.last == 1
    with pytest.raises(SelectionError, match="this Observer has no scalar 'los'"):
        watch.scalars("los")


@pytest.mark.parametrize(("y", "labels"), [
    (Y, (16, 2, 0.5)), (torch.zeros(16, 2), None), (torch.eye(2)[Y], (16, 2, 0.5)), (None, None),
    (torch.where(torch.arange(16) < 4, -100, (torch.arange(16) > 9).long()), (12, 2, 0.5))])
def test_a_snapshot_knows_what_guessing_gives(y: torch.Tensor | None, labels: tuple[int, int, float] | None) -> None:
    snap = richter.measure(network(), richter.Probe(X, y), ["nfc"])
    assert (None if snap.labels is None else (snap.labels.count, snap.labels.classes, snap.labels.frequent)) == labels
