"""A run that is resumed is as it was until something new is written to it; how a run is let go; and what cannot be copied."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_runs_crash import interrupted_at
from torch import nn

import richter
from observing import FEW, mlp, moved, probe
from richter import cli
from richter.core import RichterError
from richter.report.svg import put

OPTIONS: dict[str, Any] = {"when": 1, "budget": None, "measures": [*FEW, "weight_change"]}
pytestmark = pytest.mark.filterwarnings("error::richter.RichterWarning")


def trained(watch: richter.Observer, steps: range) -> None:
    for step in steps:
        watch(step, loss=float(step))
        moved(watch.model)


@pytest.fixture(params=["finished", "failed: ZeroDivisionError: the loop"])
def before(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    """A run that has ended, and what is there of it."""
    with richter.Observer(mlp(), probe(), run=tmp_path / "run", **OPTIONS) as watch:
        trained(watch, range(3))
    if request.param != "finished":
        with pytest.raises(ZeroDivisionError), richter.runs.create(tmp_path / "run", resume=True):
            raise ZeroDivisionError("the loop")
    assert richter.runs.load(tmp_path / "run").status == request.param
    return tmp_path / "run", contents(tmp_path / "run")


def contents(folder: Path) -> dict[str, Any]:
    run = richter.runs.load(folder)
    try:
        return {"status": run.status, "sessions": run.sessions, "about": run.about, "failures": run.failures,
                "names": run.scalar_names,
                "rows": run.table.to_json(), "arrays": run.arrays, "objects": sorted(os.listdir(folder / "objects"))}
    finally:
        run.close()


def other_architecture(folder: Path) -> None:
    richter.Observer(nn.Linear(6, 3), probe(), run=folder, resume=True, **OPTIONS)


def initial_of_its_own(folder: Path) -> None:
    richter.Observer(mlp(), probe(), run=folder, resume=True, initial=mlp().state_dict(), **OPTIONS)


def damaged_object(folder: Path) -> None:
    kept = richter.runs.load(folder).initial
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        richter.Observer(mlp(), probe(), run=folder, resume=True, **OPTIONS)
    finally:
        kept.write_bytes(whole)


def other_settings(folder: Path) -> None:
    richter.Observer(mlp(), probe(), run=folder, resume=True, settings={"other": 1}, **OPTIONS)


@pytest.mark.parametrize("refused", [other_architecture, initial_of_its_own, damaged_object, other_settings])
def test_a_refused_resume_changes_nothing(before: tuple[Path, dict[str, Any]], refused: Callable[[Path], None]) -> None:
    folder, was = before
    with pytest.raises(RichterError, match=r"other architecture|of its own|damaged|other settings|another"):
        refused(folder)
    assert contents(folder) == was


FIRST = {"the probe does not fit": ({"probe": richter.Probe(torch.randn(8, 5), torch.randint(0, 3, (8,)))}, {}),
         "too little memory": ({"memory": 10}, {}),
         "a scalar that is no number": ({}, {"loss": "much"}),
         "layers that match nothing": ({"layers": ["zzz"]}, {})}


@pytest.mark.parametrize("end", ["close", "with", "with and error"])
@pytest.mark.parametrize("mistake", FIRST)
def test_a_first_call_that_fails_changes_nothing(before: tuple[Path, dict[str, Any]], mistake: str, end: str) -> None:
    folder, was = before
    options, scalars = FIRST[mistake]
    rest = {k: v for k, v in options.items() if k != "probe"}

    def first() -> richter.Observer:
        return richter.Observer(mlp(), options.get("probe", probe()), run=folder, resume=True, **OPTIONS, **rest)

    def called(watch: richter.Observer) -> None:
        watch(3, **{"loss": 3.0, "new": 1.0, **scalars})

    if end == "with and error":
        with pytest.raises((RichterError, ValueError, RuntimeError)), first() as watch:
            called(watch)
    else:
        watch = first()
        with pytest.raises((RichterError, ValueError, RuntimeError)):
            called(watch)
        watch.close() if end == "close" else watch.__exit__(None, None, None)
    assert contents(folder) == was


def test_a_resumed_run_to_which_nothing_is_written_ends_as_it_did(before: tuple[Path, dict[str, Any]]) -> None:
    folder, was = before
    richter.Observer(mlp(), probe(), run=folder, resume=True, **OPTIONS).close()
    assert contents(folder) == was


def test_a_resumed_run_goes_on_with_its_first_write(before: tuple[Path, dict[str, Any]]) -> None:
    folder, was = before
    model = mlp()
    for _ in range(3):
        moved(model)
    with richter.Observer(model, probe(), run=folder, resume=True, **OPTIONS) as watch:
        assert len(watch.writer.run.sessions) == len(was["sessions"])
        trained(watch, range(3, 5))
        assert watch.writer.run.status == "running"
    run = richter.runs.load(folder)
    assert run.status == "finished"
    assert [s.how for s in run.sessions] == [*(s.how for s in was["sessions"]), "finished"]
    assert run.scalars("loss").value.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert run.steps == [0, 1, 2, 3, 4]


def test_layers_that_match_nothing() -> None:
    with pytest.raises(RichterError, match="layers='zzz' matches nothing"):
        richter.Observer(mlp(), probe(), layers=["zzz"], **OPTIONS)(0)


# ---------------------------------------------------------------------------------------------------- what is said of a training


def test_steps_that_go_back_are_reported_once(tmp_path: Path) -> None:
    watch = richter.Observer(mlp(), probe(), run=tmp_path, **OPTIONS)
    trained(watch, range(10))
    watch(9)  # once more
    with pytest.warns(richter.RichterWarning, match="step 4 comes after step 9: do steps begin again in every epoch"):
        watch(4)
    watch(2)
    watch.close()


@pytest.mark.parametrize("measures", [OPTIONS["measures"], FEW])
def test_a_resumed_run_with_its_initial_weights_is_reported(tmp_path: Path, measures: list[str]) -> None:
    options = {**OPTIONS, "measures": measures}
    with richter.Observer(mlp(), probe(), run=tmp_path, **options) as watch:
        trained(watch, range(5))
    with richter.Observer(mlp(), probe(), run=tmp_path, resume=True, **options) as watch:
        with pytest.warns(richter.RichterWarning, match="resumed after step 4, but the model looks newly initialised"):
            watch(5)
        watch(6)


def test_a_resumed_run_with_other_random_weights_is_reported(tmp_path: Path) -> None:
    with richter.Observer(mlp(), probe(), run=tmp_path, **OPTIONS) as watch:
        trained(watch, range(5))
    with richter.Observer(mlp(seed=7), probe(), run=tmp_path, resume=True, **OPTIONS) as watch, \
            pytest.warns(richter.RichterWarning, match="looks newly initialised"):
        watch(5)


def test_a_checkpoint_and_a_training_that_has_not_moved_are_not_reported(tmp_path: Path) -> None:
    model = mlp()
    with richter.Observer(model, probe(), run=tmp_path / "moved", **OPTIONS) as watch:
        trained(watch, range(5))
    with richter.Observer(copy.deepcopy(model), probe(), run=tmp_path / "moved", resume=True, **OPTIONS) as watch:
        watch(5)
    with richter.Observer(mlp(), probe(), run=tmp_path / "still", **OPTIONS) as watch:
        watch(0), watch(1)
    with richter.Observer(mlp(), probe(), run=tmp_path / "still", resume=True, **OPTIONS) as watch:
        watch(2)


# --------------------------------------------------------------------------------------------------------------------- letting go


@pytest.mark.parametrize("who", ["writer", "observer"])
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.long)])
def test_an_interrupt_of_close_leaves_no_run_locked(tmp_path: Path, who: str, stride: int) -> None:
    """Whenever it comes after the first calls of ``close``: the run can be resumed by this process at once."""
    event, came = 8, True
    while came:
        folder = tmp_path / str(event)
        if who == "writer":
            run = richter.runs.create(folder)
            run.scalars(0, loss=1.0)
            came = interrupted_at(event, run.finish)
        else:
            watch = richter.Observer(mlp(), probe(), run=folder, **OPTIONS)
            watch._record.scalars(0, {"loss": 1.0})
            came = interrupted_at(event, watch.close)
        with richter.runs.create(folder, resume=True) as again:
            again.scalars(1, loss=2.0)
        assert richter.runs.load(folder).scalars("loss").value.tolist() == [1.0, 2.0], event
        event += stride
    assert event > 50


def test_a_writer_that_nobody_can_reach_leaves_no_run_locked(tmp_path: Path) -> None:
    """An interrupt of the constructor of an Observer may leave one, in a cycle of references."""
    watch = richter.Observer(mlp(), probe(), run=tmp_path, **OPTIONS)
    with pytest.raises(RichterError, match="this process is already writing the run"):
        richter.runs.create(tmp_path, resume=True)
    assert watch.writer.observer is watch
    del watch
    richter.runs.create(tmp_path, resume=True).finish()


def test_an_interrupt_of_a_reader_that_closes_leaves_no_closed_connection(tmp_path: Path) -> None:
    with richter.runs.create(tmp_path) as writer:
        writer.scalars(0, loss=1.0)
    run = richter.runs.load(tmp_path)

    class Interrupted:
        def __init__(self, connection: Any) -> None:
            self.connection = connection

        def close(self) -> None:
            self.connection.close()
            raise KeyboardInterrupt

    run._database._connection = Interrupted(run._database._connection)
    with pytest.raises(KeyboardInterrupt):
        run.close()
    assert run.scalars("loss").value.tolist() == [1.0]


@pytest.mark.parametrize("take", [copy.deepcopy, copy.copy, pickle.dumps])
def test_an_observer_and_a_writer_are_not_copied(tmp_path: Path, take: Callable[[Any], Any]) -> None:
    watch = richter.Observer(mlp(), probe(), run=tmp_path, **OPTIONS)
    with pytest.raises(RichterError, match=r"cannot be copied or pickled.*leave the Observer out"):
        take(watch)
    with pytest.raises(RichterError, match=r"cannot be copied or pickled.*one writer"):
        take(watch.writer)
    with pytest.raises(RichterError, match="cannot be copied or pickled"):
        take({"of a trainer": [watch]} if take is not copy.copy else watch)
    watch(0)
    watch.close()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_named_pipe_keeps_no_command_waiting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert cli.main(["scaling", str(tmp_path / "pipe")]) != 0
    assert "pipe is not a regular file" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="there is no umask")
@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path, mask: int) -> None:
    old = os.umask(mask)
    try:
        watch = richter.Observer(mlp(), probe(), run=tmp_path / "run", **OPTIONS)
        watch(0, loss=1.0)
        watch.writer.array("noise", torch.randn(400, 400, dtype=torch.float64).numpy())
        put(tmp_path / "run" / "report.html", b"report")
        files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
        assert {"run.db", "run.db-wal", "run.db-shm", "writer.lock", "report.html"} < {path.name for path in files}
        assert len(list((tmp_path / "run" / "objects").iterdir())) >= 2
        assert {path.name: path.stat().st_mode & 0o777 for path in files} == {path.name: 0o666 & ~mask for path in files}
        watch.close()
        assert (tmp_path / "run" / "run.db").stat().st_mode & 0o777 == 0o666 & ~mask
    finally:
        os.umask(old)


