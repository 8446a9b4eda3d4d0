"""A training is not ended by what fails while it is watched: the loop goes on, the failure is kept with its reason, measuring and
writing resume when they can."""

from __future__ import annotations

import errno
import html
import math
import resource
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import richter
from observing import FEW, assert_close, examples, mlp, moved, probe, state
from richter.core import Failure, MemoryBudgetError, MixingError, SelectionError, StoreError
from richter.instrument import record
from richter.instrument.observe import Measurement
from richter.instrument.record import MOST, OTHERS, note_failure

OPTIONS: dict[str, Any] = {"when": 1, "budget": None, "measures": FEW}


def spoil(model: nn.Sequential) -> Callable[[], None]:
    """Make a weight NaN; returns what puts it back."""
    good = model[2].weight.detach().clone()

    def put_back() -> None:
        with torch.no_grad():
            model[2].weight.copy_(good)

    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
    return put_back


class Moody(nn.Module):
    """A model whose forward pass fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mood = mlp(), None

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.mood, BaseException):
            raise self.mood
        return self.inner(x - x.mean(0)) if self.mood == "mixing" else self.inner(x)


@contextmanager
def quietly() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


# --------------------------------------------------------------------------------------------------------------- measuring


def test_a_training_survives_weights_that_are_nan(tmp_path: Path) -> None:
    model = mlp()
    with richter.Observer(model, probe(), run=tmp_path, **OPTIONS) as watch, quietly() as caught:
        watch(0, loss=1.0)
        put_back = spoil(model)
        assert [watch(step, loss=math.nan) for step in (1, 2, 3)] == [None] * 3
        assert watch.now(4) is None
        assert watch.writer is not None
        assert watch.writer.run.failures == watch.failures  # at once, not at the end
        put_back()
        after = watch(5, loss=0.9)
    assert len(caught) == 1
    assert caught[0].category is richter.RichterWarning
    assert caught[0].filename == __file__
    words = str(caught[0].message)
    assert "step 1: not measured (DivergedError: parameter '2.weight' contains NaN" in words
    assert "on_error='raise'" in words
    assert after is not None
    assert_close(after, watch.snapshots[0])
    (failure,) = watch.failures
    assert (failure.first, failure.last, failure.times) == (1, 4, 4)
    assert str(failure).startswith("steps 1 to 4 (4 times): not measured (DivergedError: ")
    run = richter.runs.load(tmp_path)
    assert run.failures == [failure]
    assert run.steps == [0, 5]
    assert run.scalars("loss").step.tolist() == [0, 1, 2, 3, 5]
    assert run.status == "finished"


MOODS = [ValueError("the probe does not fit"), torch.cuda.OutOfMemoryError("CUDA out of memory"), OSError(errno.EIO, "disk"),
         RuntimeError("CUDA error"), MemoryError(), "mixing"]


@pytest.mark.parametrize("mood", MOODS, ids=repr)
def test_what_the_model_does_later_is_no_error(mood: Any) -> None:
    model = Moody()
    watch = richter.Observer(model, probe(), **OPTIONS)
    first = watch(0)
    before = state(model)
    model.mood = mood
    with pytest.warns(richter.RichterWarning, match="step 1: not measured"):
        assert watch(1) is None
    model.mood = None
    again = watch(2)
    assert first is not None
    assert again is not None
    assert_close(again, first)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert watch.failures[0].first == 1
    expected = MixingError.__name__ if mood == "mixing" else type(mood).__name__
    assert f"({expected}: " in watch.failures[0].reason


@pytest.mark.parametrize("mood", MOODS, ids=repr)
def test_with_raise_every_failure_is_an_error(mood: Any) -> None:
    model = Moody()
    watch = richter.Observer(model, probe(), on_error="raise", **OPTIONS)
    watch(0)
    model.mood = mood
    with pytest.raises(MixingError if mood == "mixing" else type(mood)):
        watch(1)
    with pytest.raises(MixingError if mood == "mixing" else type(mood)):
        watch.now(1)


@pytest.mark.parametrize("mood", [MOODS[0], MOODS[3], "mixing"], ids=repr)
def test_what_is_wrong_from_the_first_call_on_is_an_error(mood: Any) -> None:
    model = Moody()
    model.mood = mood
    with pytest.raises(MixingError if mood == "mixing" else type(mood)):
        richter.Observer(model, probe(), **OPTIONS)(0)


def test_wrong_arguments_are_errors_at_once() -> None:
    with pytest.raises(SelectionError, match="on_error='ignore': 'warn'"):
        richter.Observer(mlp(), probe(), on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match="matches nothing"):
        richter.Observer(mlp(), probe(), layers="9", **OPTIONS)(0)
    with pytest.raises(SelectionError, match="nf"):
        richter.Observer(mlp(), probe(), measures=["nf"])
    with pytest.raises(MemoryBudgetError):
        richter.Observer(mlp(), probe(), memory=1, **OPTIONS)(0)
    with pytest.raises(ZeroDivisionError):
        richter.Observer(mlp(), probe(), measures=FEW, when=lambda step: 1 / 0)(0)


@pytest.mark.parametrize("mood", [torch.cuda.OutOfMemoryError("CUDA out of memory"), OSError(errno.ENOSPC, "full"),
                                  RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "nan"], ids=repr)
def test_a_first_call_at_a_bad_moment_is_no_error(mood: Any) -> None:
    model = Moody()
    watch = richter.Observer(model, probe(), **OPTIONS)
    put_back = spoil(model.inner) if mood == "nan" else lambda: None
    model.mood = None if mood == "nan" else mood
    with pytest.warns(richter.RichterWarning, match="step 0: not measured"):
        assert watch(0) is None
    put_back()
    model.mood = None
    assert watch(1) is not None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_passes(kind: type[BaseException]) -> None:
    model = Moody()
    watch = richter.Observer(model, probe(), **OPTIONS)
    watch(0)
    model.mood = kind()
    with pytest.raises(kind):
        watch(1)
    model.mood = None
    assert watch(2) is not None
    assert watch.failures == []


def test_a_schedule_that_fails_later() -> None:
    watch = richter.Observer(mlp(), probe(), measures=FEW, when=lambda step: bool(1 / (2 - step)))
    watch(0)
    with pytest.warns(richter.RichterWarning, match="ZeroDivisionError"):
        assert watch(2, loss=1.0) is None
    assert watch.scalar_frame.loss.tolist() == [1.0]


def test_failed_attempts_count_as_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep to the budget like measurements, also when none has ever succeeded, and are not tried at every step."""
    now, tried = [100.0], []

    class Clock:
        perf_counter = staticmethod(lambda: now[0])

    def take(self: Measurement, step: int, matrices: int, only: Any = None) -> richter.Snapshot:
        now[0] += 1.0
        tried.append(step)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    watch = richter.Observer(mlp(), probe(), when=1, budget=0.1, measures=FEW)
    monkeypatch.setattr(Measurement, "take", take)
    monkeypatch.setattr(richter.instrument.observe, "time", Clock)
    monkeypatch.setattr(richter.instrument.observe, "time", Clock)
    with quietly() as caught:
        for step in range(400):
            now[0] += 1.0
            watch(step)
        assert len(caught) == 1
        assert 20 < len(tried) < 50
        assert watch.share <= 0.1
        assert tried[0] == 0
    assert watch.failures[0].times == len(tried)
    assert sorted([*tried, *watch.put_off]) == list(range(400))


@pytest.mark.parametrize("apart", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_measurement_that_failed_anywhere_leaves_the_next_one_right(apart: int) -> None:
    """An error at the n-th forward pass, for each third n, or for each: the next measurement is that of an Observer that has seen
    no error."""
    model, calls, fail_at = mlp(), 0, 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise RuntimeError("not now")

    model[0].register_forward_pre_hook(count)
    options: dict[str, Any] = {**OPTIONS, "measures": None, "initial": state(mlp(seed=5))}
    plain = richter.Observer(mlp(), probe(chunk=8), **options)
    watch = richter.Observer(model, probe(chunk=8), **options)
    with quietly():
        watch(0), plain(0)
        moved(model), moved(plain.model)
        expected, came = plain(1), 0
        for step in range(1, 40, apart):  # an audit goes on without a pass that fails
            calls, fail_at = 0, step
            came += watch(step) is None
            calls = fail_at = 0
            snap = watch(step)
            assert snap is not None
            assert expected is not None
            assert_close(snap, expected)
    assert came > 3


# ------------------------------------------------------------------------------------------------------------------ scalars


class Bad:
    def __float__(self) -> float:
        raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize("value", [torch.ones(2), "high", None, Bad()], ids=["two", "text", "none", "lost"])
def test_a_scalar_that_is_no_number(tmp_path: Path, value: Any) -> None:
    """In the first call it is an error; later it is a failure, and the scalars beside it are kept."""
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        richter.Observer(mlp(), probe(), **OPTIONS)(0, loss=value)
    with richter.Observer(mlp(), probe(), run=tmp_path, **OPTIONS) as watch:
        watch(0, loss=1.0)
        with pytest.warns(richter.RichterWarning, match="the scalar 'accuracy' was not kept"):
            assert watch(1, loss=2.0, accuracy=value) is not None
    run = richter.runs.load(tmp_path)
    assert run.scalars("loss").value.tolist() == [1.0, 2.0]
    assert run.failures[0].first == 1


def test_a_step_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match=r"watch\(1\.5\): the step is a float"), \
            richter.Observer(mlp(), probe(), run=tmp_path / "a", measures=FEW, when=[0]) as watch:
        watch(1.5, loss=1.0)  # type: ignore[arg-type]
    with richter.Observer(mlp(), probe(), run=tmp_path / "b", measures=FEW, when=[0]) as watch:
        watch(0, loss=1.0)
        with pytest.warns(richter.RichterWarning, match=r"watch\(1\.5\): the step is a float"):
            watch(1.5, loss=2.0)  # type: ignore[arg-type]
        watch(2, loss=3.0)
    assert richter.runs.load(tmp_path / "b").scalars("loss").value.tolist() == [1.0, 3.0]
    assert richter.runs.load(tmp_path / "b").failures[0].first is None


def test_nan_is_a_number(tmp_path: Path) -> None:
    with richter.Observer(mlp(), probe(), run=tmp_path, **OPTIONS) as watch:
        watch(0, loss=math.nan)
        watch(1, loss=torch.tensor(math.inf))
    assert watch.failures == []
    assert np.isnan(watch.scalar_frame.loss[0])


# ----------------------------------------------------------------------------------------------------------------- the disk


class Full:
    """A connection to a disk that has no room while ``full`` is set."""

    def __init__(self, connection: Any) -> None:
        self._connection, self.full = connection, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def _check(self, text: str) -> None:
        if self.full and not text.startswith("ROLLBACK"):
            raise sqlite3.OperationalError("database or disk is full")

    def execute(self, text: str, *values: Any) -> Any:
        self._check(text)
        return self._connection.execute(text, *values)

    def executemany(self, text: str, *values: Any) -> Any:
        self._check(text)
        return self._connection.executemany(text, *values)


def with_full_disk(tmp_path: Path, **options: Any) -> tuple[richter.Observer, Full]:
    watch = richter.Observer(mlp(), probe(), run=tmp_path, **{**OPTIONS, **options})
    assert watch.writer is not None
    watch.writer._database.connection = disk = Full(watch.writer._database.connection)  # type: ignore[attr-defined]
    return watch, disk


def test_what_a_full_disk_refuses_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "BLOCK", 3)
    straight = richter.Observer(mlp(), probe(), **OPTIONS)
    watch, disk = with_full_disk(tmp_path)
    with quietly() as caught, watch:
        for step in range(9):
            disk.full = 3 <= step < 6
            assert watch(step, loss=float(step), **({"late": 1.0} if step > 4 else {})) is not None
            straight(step, loss=float(step), **({"late": 1.0} if step > 4 else {}))
            pd.testing.assert_frame_equal(watch.scalar_frame, straight.scalar_frame)
            moved(watch.model), moved(straight.model)
            time.sleep(0.002)
    assert ["not written (StoreError" in str(w.message) for w in caught] == [True]
    run = richter.runs.load(tmp_path)
    pd.testing.assert_frame_equal(run.frame, straight.frame)
    pd.testing.assert_frame_equal(run.scalar_frame, straight.scalar_frame)
    assert run.status == "finished"
    assert run.failures == watch.failures
    assert {step for _, _, step in run.arrays} == {0, 1, 2, 6, 7, 8}  # matrices do not wait
    assert all("disk is full" in f.reason for f in run.failures)


def test_a_disk_that_is_full_to_the_end(tmp_path: Path) -> None:
    """The loop ends well, what was written before is intact, and what was not is still in the Observer."""
    watch, disk = with_full_disk(tmp_path)
    with quietly() as caught, watch:
        for step in range(6):
            disk.full = step >= 3
            assert watch(step, loss=float(step)) is not None
    assert any("the end of the run was not written" in str(w.message) for w in caught)
    assert watch.scalar_frame.loss.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [s.step for s in watch.snapshots] == list(range(6))
    run = richter.runs.load(tmp_path)
    assert run.steps == [0, 1, 2]
    assert run.status == "interrupted"
    again = richter.Observer(mlp(), probe(), run=tmp_path, resume=True, **OPTIONS)
    assert len(again.snapshots) == 3
    again.close()


def test_an_error_of_the_loop_is_not_hidden_by_one_of_the_disk(tmp_path: Path) -> None:
    watch, disk = with_full_disk(tmp_path)

    def loop() -> None:
        with quietly(), watch:
            watch(0)
            disk.full = True
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        loop()


def test_with_raise_a_full_disk_is_an_error(tmp_path: Path) -> None:
    watch, disk = with_full_disk(tmp_path, on_error="raise")
    watch(0, loss=1.0)
    disk.full = True
    with pytest.raises(StoreError, match="disk is full"):
        watch(1, loss=1.0)
    with pytest.raises(StoreError, match="disk is full"):
        watch.now(1)
    with pytest.raises(StoreError, match="disk is full"):
        watch.close()


def test_a_slow_refusal_is_not_tried_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A locked database keeps its writer waiting for half a minute; that may not happen at every step."""
    watch, disk = with_full_disk(tmp_path, when=[0])
    now, tries = [100.0], []

    class Clock:
        monotonic = staticmethod(lambda: now[0])

    def refuse(text: str) -> None:
        if disk.full:
            tries.append(now[0])
            now[0] += 30.0
            raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(record, "time", Clock)
    monkeypatch.setattr(disk, "_check", refuse)
    with quietly():
        watch(0, loss=0.0)
        disk.full = True
        for step in range(1, 2000):
            now[0] += 1.0
            watch(step, loss=float(step))
        assert 2 <= len(tries) <= 5
        disk.full = False
        watch.close()
    assert richter.runs.load(tmp_path).scalars("loss").value.tolist() == [float(step) for step in range(2000)]


def test_files_that_may_not_grow(tmp_path: Path, counted: list[int]) -> None:
    """The same by the system itself: a limit on the size of files."""
    now, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with quietly(), richter.Observer(mlp(), probe(), run=tmp_path, **OPTIONS) as watch:
        watch(0, loss=0.0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, most))
        try:
            for step in range(1, 400):
                watch(step, loss=float(step))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (now, most))
        assert "not written" in watch.failures[0].reason
        watch(400, loss=400.0)
    run = richter.runs.load(tmp_path)
    assert run.scalars("loss").value.tolist() == [float(step) for step in range(401)]
    assert run.steps == list(range(401))
    assert run.failures == watch.failures


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_that_was_moved_away(tmp_path: Path, replaced: bool) -> None:
    """SQLite would go on writing to a file that nobody can find. What is refused is written when the run is back."""
    with quietly() as caught, richter.Observer(mlp(), probe(), run=tmp_path / "run", **OPTIONS) as watch:
        for step in range(6):
            if step == 2:
                (tmp_path / "run").rename(tmp_path / "away")
                if replaced:
                    richter.runs.create(tmp_path / "run").finish()
            if step == 4:
                if replaced:
                    (tmp_path / "run").rename(tmp_path / "other")
                (tmp_path / "away").rename(tmp_path / "run")
            assert watch(step, loss=float(step)) is not None
            time.sleep(0.002)
    assert any("deleted or moved" in str(w.message) for w in caught)
    run = richter.runs.load(tmp_path / "run")
    assert run.steps == list(range(6))
    assert run.scalars("loss").value.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert run.status == "finished"


def test_after_its_end_an_observer_does_not_end_the_training(tmp_path: Path) -> None:
    watch = richter.Observer(mlp(), probe(), run=tmp_path, **OPTIONS)
    watch(0, loss=0.0)
    watch.close()
    with pytest.warns(richter.RichterWarning, match="was closed"):
        assert watch(1, loss=1.0) is None
    with quietly():
        assert watch.now(2) is None
    assert watch.scalar_frame.loss.tolist() == [0.0, 1.0]


# --------------------------------------------------------------------------------------------------------------- failures


def test_reasons_that_differ_in_numbers_are_one() -> None:
    failures: list[Failure] = []
    for step in range(5):
        note_failure(failures, step, f"not measured (CaptureError: layer '{step % 2}' is off by {10 ** -step:.2g} at 0x{step:x})")
    assert [(f.first, f.last, f.times) for f in failures] == [(0, 4, 3), (1, 3, 2)]
    for step in range(3 * MOST):
        note_failure(failures, step, f"'{step}'")
    assert len(failures) == MOST + 1
    assert failures[-1].reason == OTHERS
    assert sum(f.times for f in failures) == 5 + 3 * MOST
    assert [Failure.from_json(f.to_json()) for f in failures] == failures
    note_failure(failures, 0, "\ud800" * 5000)


@pytest.mark.parametrize("record", ["x", {}, {"reason": 3, "first": 0, "last": 0, "times": 1},
                                    {"reason": "a", "first": 0.5, "last": 0, "times": 1}])
def test_failures_of_strangers(tmp_path: Path, record: Any) -> None:
    with richter.runs.create(tmp_path / "run") as run, run._transaction("written"):
        run._put_meta("failures", [record])
    with pytest.raises(StoreError, match="a failure is a record"):
        _ = richter.runs.load(tmp_path / "run").failures


def test_failures_of_a_run_go_on_and_are_forgotten(tmp_path: Path) -> None:
    failures = [Failure("a", 1, 5, 3), Failure("b", 4, 9, 2), Failure("c", 8, 8)]
    with richter.runs.create(tmp_path / "run") as run:
        run.failures(failures)
        run.forget(5)
        assert run.run.failures == [Failure("a", 1, 5, 3), Failure("b", 4, 5, 2)]
        run.clear()
        assert run.run.failures == []
        run.failures(failures)
    model = mlp()
    with richter.Observer(model, probe(), run=tmp_path / "run", resume=True, **OPTIONS) as watch:
        watch(10)
        spoil(model)
        with pytest.warns(richter.RichterWarning):
            watch(11)
    assert [f.reason for f in watch.failures][:3] == ["a", "b", "c"]
    assert richter.runs.load(tmp_path / "run").failures == watch.failures


# ----------------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("on_disk", [False, True])
def test_threads_share_an_observer(tmp_path: Path, on_disk: bool) -> None:
    """No scalar is lost, one thread measures at a time, and each step is measured once or put off."""
    measuring, most, errors = 0, 0, []
    watch = richter.Observer(mlp(), probe(), when=10, budget=None, measures=FEW, run=tmp_path if on_disk else None)
    take = watch.measurement.take

    def counted(step: int, matrices: int, only: Any = None) -> richter.Snapshot:
        nonlocal measuring, most
        measuring += 1
        most = max(most, measuring)
        try:
            return take(step, matrices, only)
        finally:
            measuring -= 1

    watch.measurement.take = counted  # type: ignore[method-assign]

    def work(number: int) -> None:
        try:
            for i in range(60):
                watch(4 * i + number, **{f"loss {number}": float(i), "all": float(4 * i + number)})
        except BaseException as why:
            errors.append(why)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert most == 1
    table = watch.scalar_frame
    assert sorted(table["all"].tolist()) == [float(k) for k in range(240)]
    for k in range(4):
        assert sorted(table[f"loss {k}"].dropna().tolist()) == [float(i) for i in range(60)]
    steps = [s.step for s in watch.snapshots]
    assert steps == sorted(set(steps))
    assert set(range(0, 240, 10)) <= {*steps, *watch.put_off}
    assert watch.failures == []
    watch.close()


def test_scalars_do_not_wait_for_a_measurement() -> None:
    """While one thread measures, another's scalars are kept; what is due then is put off and made up for."""
    watch = richter.Observer(mlp(), probe(), **OPTIONS)
    watch(0)
    take, inside, go_on = watch.measurement.take, threading.Event(), threading.Event()

    def slow(step: int, matrices: int, only: Any = None) -> richter.Snapshot:
        inside.set()
        assert go_on.wait(60)
        return take(step, matrices, only)

    watch.measurement.take = slow  # type: ignore[method-assign]
    other = threading.Thread(target=watch, args=(1,))
    other.start()
    assert inside.wait(60)
    assert watch(2, loss=0.5) is None
    assert watch(1, loss=0.4) is None  # the very step that is being measured
    assert watch.scalar_frame.loss.tolist() == [0.5, 0.4]
    assert watch.put_off == [2]
    waiting = threading.Thread(target=watch.now, args=(9,))
    waiting.start()
    go_on.set()
    other.join(60)
    waiting.join(60)
    assert [s.step for s in watch.snapshots] == [0, 1, 9]


def test_a_model_that_calls_its_own_observer() -> None:
    """Also while it is measured, which neither measures again nor waits for itself."""
    class Telling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            watch(1, size=float(len(x)))
            watch.now(1)
            return self.inner(x)

    watch = richter.Observer(Telling(), probe(), **OPTIONS)
    snap = watch(1)
    assert snap is not None
    assert [r.value for r in snap.rows] == [r.value for r in richter.measure(mlp(), probe(), FEW).rows]


# --------------------------------------------------------------------------------------------------------- the run says so


def test_the_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from richter.cli import main
    from richter.report.html import report
    from richter.report.shelf import Chosen, Shelf
    from richter.report.views.verdict import verdict
    model = mlp()
    with richter.Observer(model, probe(), run=tmp_path / "some", **OPTIONS) as watch:
        watch(0)
        spoil(model)
        with pytest.warns(richter.RichterWarning):
            watch(1)
    words = "step 1: not measured (DivergedError: parameter '2.weight' contains NaN or Inf"
    with richter.Observer(mlp(), probe(), run=tmp_path / "none", **OPTIONS) as watch:
        spoil(watch.model)  # type: ignore[arg-type]
        with pytest.warns(richter.RichterWarning):
            watch(1)
    assert any(words in line for line in richter.diagnose(richter.runs.load(tmp_path / "some")).evidence)
    with pytest.raises(SelectionError, match=r"nothing has been measured yet.*\. step 1: not measured \(DivergedError"):
        richter.diagnose(richter.runs.load(tmp_path / "none"))
    for name in ("some", "none"):
        run = richter.runs.load(tmp_path / name)
        page = report([run], tmp_path / "report.html").read_text()
        assert html.escape(words[1:]) in html.escape(html.unescape(page))
        answer = verdict(Chosen(Shelf(tmp_path), [name]), None)  # type: ignore[arg-type]
        assert any(words in line for line in answer["evidence"])
    assert main(["runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count(words) == 2
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert words.partition(": ")[2] in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "some")]) == 0
    assert words in capsys.readouterr().out


def test_when_all_is_well_nothing_is_said(tmp_path: Path) -> None:
    x, y = examples()
    with richter.Observer(mlp(), richter.Probe(x, y), run=tmp_path, **OPTIONS) as watch:
        watch(0, loss=1.0)
    assert watch.failures == []
    assert richter.runs.load(tmp_path).failures == []
    assert not any("not measured" in e for e in richter.diagnose(watch).evidence)
