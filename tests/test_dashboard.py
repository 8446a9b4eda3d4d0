"""The dashboard: what the server reads and refuses, and what a browser shows while a run is being written."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from richter.core import Row
from richter.runs import Run, create
from richter.runs import reader as runs_reader
from richter.snapshot import Snapshot
from richter.verdict import diagnose

LAYERS, MEASURES = ("0", "2"), ("nfc", "c_uc_ratio", "weight_change")


def snapshot(step: int, layers: tuple[str, ...] = LAYERS, measures: tuple[str, ...] = MEASURES) -> Snapshot:
    return Snapshot(tuple(Row(step, k, m, 0.1 * i + step / 1000, 0.01, "trivial: by definition" if k == "2" else "")
                          for k in layers for i, m in enumerate(measures)), step=step)


def make(path: Path, steps: int = 5, finish: str | None = "finished", settings: object = None) -> Path:
    """A small run with rows, scalars and matrices."""
    writer = create(path, settings or {"lr": 0.1, "model": {"width": 8}})
    for step in range(steps):
        writer.snapshot(snapshot(step))
        writer.scalars(step, loss=2.0 / (1 + step))
        writer.array("nfm", np.diag(np.arange(1.0, 7)) * (1 + step), layer="0", step=step, eigen=0.9999)
    writer.close(finish)
    return path


# ------------------------------------------------------------------------------------------------------------ the reader

def test_curves_are_the_series_one_by_one(tmp_path: Path) -> None:
    with create(tmp_path / "run") as writer:
        for step in (0, 5, 3, 5):  # out of order, and one twice
            writer.snapshot(snapshot(step))
            writer.scalars(step, loss=step)
        writer.rows([Row(3, "0", "nfc", math.nan)])
        for _ in range(2):  # before and after the rows are moved to their place
            found = writer.run.curves([*MEASURES, "nonsense"], [*LAYERS, "nonsense"])
            assert set(found) == {(m, k) for m in MEASURES for k in LAYERS}
            for (m, k), (series, note) in found.items():
                for mine, theirs in zip(series, writer.run.series(m, k), strict=True):
                    np.testing.assert_array_equal(mine, theirs)
                assert note.startswith("trivial") == (k == "2")
            assert list(writer.run.scalar_curves(["loss", "nonsense"])["loss"].step) == [0, 3, 5]
            with writer._transaction("settled") as db:
                writer._settle(db)
    assert Run(tmp_path / "run").curves([], []) == {}


def test_the_verdict_needs_only_the_ends(tmp_path: Path) -> None:
    run = Run(make(tmp_path / "run", steps=7))
    assert [s.step for s in run.ends] == [0, 6]
    assert [s.rows for s in run.ends] == [run.snapshots[0].rows, run.snapshots[-1].rows]
    assert diagnose(SimpleNamespace(snapshots=run.ends)) == diagnose(run)
    assert Run(make(tmp_path / "empty", steps=0)).ends == []


def test_the_shape_of_an_array_is_known_before_it_is_read(tmp_path: Path) -> None:
    assert Run(make(tmp_path / "run")).shape("nfm", "0", 3) == (6, 6)


def test_a_folder_that_goes_away_does_not_end_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a" / "run")
    (tmp_path / "gone").mkdir()
    real = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: real(self / "nothing" if self.name == "gone" else self))
    assert [p.name for p in runs_reader.paths(tmp_path, 3)] == ["run"]
