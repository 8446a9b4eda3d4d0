"""When an Observer measures: its schedule, and the share of time that it may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import richter
import richter.instrument.observe
from observing import examples, mlp, probe
from richter.core import Row, SelectionError
from richter.instrument.evaluate import RichterWarning

LOADER = DataLoader(TensorDataset(torch.zeros(12, 1)), batch_size=2)  # six batches

SCHEDULES: dict[str, tuple[Any, list[int]]] = {
    "every seven": (7, [0, 7, 14, 21, 28]), "every step": (1, list(range(30))),
    "a list": ([3, 4, 29], [0, 3, 4, 29]), "a tuple": ((5,), [0, 5]), "a set": ({2, 9}, [0, 2, 9]),
    "a range": (range(10, 30, 9), [0, 10, 19, 28]), "a generator": ((i * i for i in range(6)), [0, 1, 4, 9, 16, 25]),
    "an empty list": ([], [0]), "a callable": (lambda step: step > 27, [0, 28, 29]),
    "numpy steps": (np.array([3, 11]), [0, 3, 11]), "a whole number of numpy": (np.int64(10), [0, 10, 20]),
    "richter.every": (richter.every(12), [0, 12, 24]), "logarithmic": (richter.log_spaced(27, 4), [0, 1, 3, 9, 27]),
    "epochs": (richter.epochs(8), [0, 8, 16, 24]), "epochs of a loader": (richter.epochs(LOADER), [0, 6, 12, 18, 24]),
    "every second epoch": (richter.epochs(LOADER, 2), [0, 12, 24]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_when(name: str, counted: list[int]) -> None:
    when, expected = SCHEDULES[name]
    watch = richter.Observer(mlp(), probe(), when=when, budget=None)
    returned = [step for step in range(30) if watch(step) is not None]
    assert counted == returned == expected
    assert [s.step for s in watch.snapshots] == expected


@pytest.mark.parametrize("when", [7, [100], lambda step: False, richter.log_spaced(100)],
                         ids=["every", "list", "callable", "logarithmic"])
def test_the_first_call_always_measures(when: Any, counted: list[int]) -> None:
    watch = richter.Observer(mlp(), probe(), when=when, budget=1e-9)
    assert watch(5) is not None
    assert watch(6) is None
    assert counted == [5]


def test_logarithmic_schedules_begin_at_zero_and_end_at_the_last_step() -> None:
    chosen = [step for step in range(2001) if richter.log_spaced(1000)(step)]
    assert chosen[:2] == [0, 1]
    assert chosen[-1] == 1000
    assert 15 <= len(chosen) <= 21
    late = [b / a for a, b in zip(chosen[-8:], chosen[-7:], strict=False)]
    assert max(late) / min(late) < 1.05  # steps of equal size in the logarithm


@pytest.mark.parametrize("make", [lambda: richter.every(0), lambda: richter.log_spaced(0),
                                  lambda: richter.log_spaced(9, 1), lambda: richter.Observer(mlp(), probe(), when=-3)])
def test_schedules_that_mean_nothing(make: Callable[[], Any]) -> None:
    with pytest.raises(SelectionError, match="needed"):
        make()


# ----------------------------------------------------------------------------------------------------------- the budget

class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def watched(monkeypatch: pytest.MonkeyPatch, budget: float | None, first: float = 1.0, cost: float = 1.0,
            steps: int = 400, when: Any = 1, measures: Any = ("nfc",), brief: float = 0.0,
            known: int | None = None, pace: float = 1.0,
            numbers: Sequence[int] | None = None, free: float = 0.0) -> tuple[richter.Observer, Clock]:
    """Training steps of one second, measurements of `cost` seconds (the first one of `first`, of what is cheap alone `brief`),
    due at every step."""
    clock = Clock()
    watch = richter.Observer(mlp(), probe(), when=when, budget=budget, free_seconds=free, measures=measures, steps=known)

    def take(self: Any, step: int, matrices: int, only: Any = None) -> richter.Snapshot:
        assert only is None or set(only) == set(richter.measures.LIGHT)
        seconds = brief if only else cost if watch.snapshots else first
        clock.now += seconds
        return richter.Snapshot((), step, {"what": "brief" if only else "whole"}, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(richter.instrument.observe.Measurement, "take", take)
        for module in (richter.instrument.observe, richter.instrument.observe):
            patch.setattr(module, "time", clock)
        for step in numbers or range(steps):
            clock.now += pace
            watch(step)
    return watch, clock


def test_without_a_budget_nothing_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = watched(monkeypatch, None, cost=1000.0)
    assert len(watch.snapshots) == 400
    assert watch.put_off == []


@pytest.mark.parametrize("budget", [0.05, 0.2, 0.5])
def test_a_budget_bounds_the_share_of_time(monkeypatch: pytest.MonkeyPatch, budget: float) -> None:
    """Measurements that are due are put off until their share of wall time fits, and not longer."""
    watch, clock = watched(monkeypatch, budget)
    spent, elapsed = float(len(watch.snapshots)), clock.now - 101.0  # with the first one
    assert 0.8 * budget < spent / elapsed <= budget
    assert (spent + 1) / (elapsed + 1) <= budget  # there is room for one more, of now()
    assert sorted([*watch.put_off, *(s.step for s in watch.snapshots)]) == list(range(400))


def test_a_tiny_budget_leaves_the_first_measurement_only(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = watched(monkeypatch, 1e-6)
    assert [s.step for s in watch.snapshots] == [0]
    assert watch.put_off == list(range(1, 400))


def kinds(watch: richter.Observer) -> list[str]:
    return [s.notes["what"] for s in watch.snapshots]


def test_what_is_cheap_leaves_room_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, clock = watched(monkeypatch, 0.1, cost=5.0, first=5.0, brief=0.2, measures=None, steps=1000)
    assert kinds(watch).count("whole") > 5
    assert kinds(watch).count("brief") > 50
    spent, elapsed = sum(s.seconds for s in watch.snapshots), clock.now - 101.0
    assert spent / elapsed <= 0.1
    assert (spent + 5) / (elapsed + 5) <= 0.1  # there is room for one more, of now()


def test_a_step_with_what_is_cheap_is_measured_whole_later(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = watched(monkeypatch, 0.1, first=2.0, brief=0.1, when=[100, 300], steps=350, cost=4.0, measures=None)
    assert [(s.step, s.notes["what"]) for s in watch.snapshots][:2] == [(0, "whole"), (100, "whole")]
    watch, _ = watched(monkeypatch, 0.1, first=10.0, brief=0.1, when=[105, 1300], steps=1350, cost=4.0, measures=None)
    steps = [(s.step, s.notes["what"]) for s in watch.snapshots]
    assert steps[:2] == [(0, "whole"), (105, "brief")]
    assert steps[2][1] == "whole"
    assert 100 < steps[2][0] < 200
    assert watch.put_off == []


def test_curves_skip_what_was_not_measured() -> None:
    model = mlp()
    watch = richter.Observer(model, probe(), when=1, budget=None)
    watch(0)
    rows = watch.measurement.take(1, 0, ("output_rms",))
    watch.snapshots = [*watch.snapshots, rows]
    assert {r.measure for r in rows.rows} == {"output_rms"}
    assert watch.series("nfc", "0").step.tolist() == [0]
    assert watch.series("output_rms").step.tolist() == [0, 1]
    assert watch.series("output_rms").value[0] == watch.series("output_rms").value[1]


def test_the_first_measurement_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it took is paid back first; that the next ones take as long is not expected."""
    watch, _ = watched(monkeypatch, 0.1, first=100.0, steps=1500)
    assert 900 < watch.snapshots[1].step < 1400
    assert len(watch.snapshots) > 30


@pytest.mark.parametrize(("steps", "cost"), [(400, 0.5), (2000, 1.0)])
def test_with_the_number_of_steps_the_budget_is_spent_early(monkeypatch: pytest.MonkeyPatch, steps: int, cost: float) -> None:
    """Half of it evenly in the logarithm of the step; the share is kept in the end, with room for now()."""
    budget = 0.05
    watch, clock = watched(monkeypatch, budget, first=2 * cost, cost=cost, steps=steps, when=None, known=steps)
    taken = [s.step for s in watch.snapshots]
    spent = cost * (len(taken) + 1)
    assert (spent + cost) / (clock.now - 101.0 + cost) <= 1.01 * budget
    assert spent / (clock.now - 101.0) > 0.8 * budget
    assert sum(step < steps / 10 for step in taken) / len(taken) > 0.25  # evenly it would be a tenth
    assert max(b - a for a, b in pairwise(taken)) <= steps / 5  # and it goes on to the end


def test_without_it_seconds_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = watched(monkeypatch, 0.05, first=0.1, cost=0.05, steps=1000, when=None, pace=1e-3, free=1.0)
    steps = [s.step for s in watch.snapshots]
    assert sum(step < 100 for step in steps) >= 7  # 5 ms are earned by then
    assert 0.6 < watch._schedule.spent <= 1.0


@pytest.mark.filterwarnings("ignore:.*do steps begin again")
@pytest.mark.parametrize("epoch", [2, 30, 400])
def test_steps_that_begin_again_are_counted_as_they_come(monkeypatch: pytest.MonkeyPatch, epoch: int) -> None:
    """Each epoch counts from zero: the pace was taken for that of the steps of one, and all of them for what they earn."""
    watch, clock = watched(monkeypatch, 0.05, steps=2000, when=1, known=2000, numbers=[i % epoch for i in range(2000)])
    assert 0.04 < watch._schedule.spent / (clock.now - 101.0) <= 0.05
    plain, _ = watched(monkeypatch, 0.05, steps=2000, when=1, known=2000)
    assert watch._schedule.spent == pytest.approx(plain._schedule.spent, rel=0.05)


def test_a_snapshot_that_replaces_that_of_an_earlier_epoch_is_warned_of_once() -> None:
    watch = richter.Observer(mlp(), probe(), when=1, budget=None, measures=["nfc"])
    for step in (0, 1, 2):
        watch(step)
    watch.now(2)  # once more, and nothing was measured behind it
    with pytest.warns(RichterWarning, match="do steps begin again") as seen:
        watch(0)
    assert len(seen) == 1
    watch(1)
    assert [s.step for s in watch.snapshots] == [0, 1, 2]


def test_a_snapshot_that_now_replaces_is_warned_of() -> None:
    watch = richter.Observer(mlp(), probe(), measures=["nfc"])
    for step in (0, 5, 5, 3):
        watch.now(step)
    with pytest.warns(RichterWarning, match="step 0 comes after step 5: do steps begin again"):
        watch.now(0)
    assert [s.step for s in watch.snapshots] == [0, 3, 5]


@pytest.mark.parametrize(("first", "known"), [(1500, 2000), (5000, 500)])
def test_a_training_that_goes_on_ends_at_its_last_step(monkeypatch: pytest.MonkeyPatch, first: int, known: int) -> None:
    """``steps`` is that of the training; where it begins behind that, it is what is to come."""
    watch, clock = watched(monkeypatch, 0.05, steps=500, when=1, known=known, numbers=range(first, first + 500))
    assert 0.04 < watch._schedule.spent / (clock.now - 101.0) <= 0.05


def test_the_room_of_the_end_is_kept_though_the_first_was_no_dearer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was guessed that the next takes a fifth of the first, and what is cheap alone took what the end needs."""
    watch, clock = watched(monkeypatch, 0.05, first=24.0, cost=20.0, brief=4.0, steps=1000, known=1000, measures=None, when=None)
    assert kinds(watch) == ["whole", "brief", "brief"]  # there were four
    assert (watch._schedule.spent + 20) / (clock.now - 101.0 + 20) <= 1.05 * 0.05


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_numbers_of_numpy_are_numbers(kind: Any) -> None:
    watch = richter.Observer(mlp(), probe(), steps=np.int64(100), budget=kind(0.5))
    watch(0)
    assert watch.budget == 0.5


@pytest.mark.parametrize("steps", [0, -1, 2.5, "many"])
def test_steps_that_are_no_number(steps: Any) -> None:
    with pytest.raises(SelectionError, match="the number of steps of the training"):
        richter.Observer(mlp(), probe(), steps=steps)


def test_what_is_due_by_default() -> None:
    due = [step for step in range(10_001) if richter.Observer(mlp(), probe(), steps=10_000).when(step)]
    assert due[:8] == list(range(8))
    assert sum(step < 1000 for step in due) >= 50
    assert {*range(0, 10_001, 100)} <= {*due}
    without = richter.Observer(mlp(), probe()).when
    assert all(without(step) for step in (0, 1, 2, 10, 100, 700, 123_400))


def test_a_step_put_off_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of steps: what is due and has no budget is measured at the first call that has."""
    watch, _ = watched(monkeypatch, 0.1, first=10.0, when=[5, 300], steps=350)
    steps = [s.step for s in watch.snapshots]
    assert watch.put_off == [5]
    assert steps[0] == 0
    assert 5 < steps[1] < 150
    assert steps[2:] == [300]


# ------------------------------------------------------------------------------- the README's snippet by a scripted clock
# Seconds of a step, of the light and the full set on 16, 32, ... examples, and of the first look, as measured once for each model
# (processor time of one thread; benchmarks/snippet.py).

class Price(NamedTuple):
    step: float
    fixed: float  # of a light measurement
    each: float  # and of each example
    ratio: float  # of a full measurement
    look: float


PRICES = {"ViT": Price(0.04, 0.12, 0.0040, 4.3, 0.15), "ResNet-10": Price(0.016, 0.15, 0.0030, 3.0, 0.15),
          "GPT-2": Price(0.021, 0.08, 0.0080, 4.5, 0.2), "CNN": Price(0.010, 0.025, 0.0006, 4.1, 0.1),
          "MLP": Price(0.0011, 0.011, 0.00003, 6.5, 0.1)}
LENGTHS = [("ViT", 60), ("ResNet-10", 200), ("GPT-2", 300), ("CNN", 250), ("MLP", 200), ("MLP", 1000), ("MLP", 3000),
           ("MLP", 10_000)]


def snippet(monkeypatch: pytest.MonkeyPatch, price: Price, length: int, **options: Any) -> tuple[richter.Observer, float]:
    """The README's loop with 256 examples, by a clock that measuring and training move; and the wall time that passed."""
    clock = Clock()
    x, y = examples(256)
    tokens = price is PRICES["GPT-2"]  # texts have rows enough in fewer examples
    watch = richter.Observer(mlp(), richter.Probe(x, y[:, None].expand(256, 4) if tokens else y), **options)
    new: list[Any] = []

    def take(self: Any, step: int, matrices: int = 0, only: Any = None) -> richter.Snapshot:
        light = price.fixed + price.each * self.probe.n
        self.work_seconds = light * (1.0 if only else price.ratio)
        seconds = self.work_seconds + (0.0 if self in new else price.look)
        new.append(self)
        clock.now += seconds
        rows = tuple(Row(step, "*", name, 0.5) for name in only or richter.measures.DEFAULT)
        return richter.Snapshot(rows, step, {}, seconds)

    def passes(self: Any, only: Any = None) -> float:
        return 3.0 if only else 7.0

    for name, value in {"take": take, "passes": passes,
                        "pass_seconds": property(lambda self: price.each / 3 * self.probe.n)}.items():
        monkeypatch.setattr(richter.instrument.observe.Measurement, name, value)
    monkeypatch.setattr(richter.instrument.observe, "time", clock)
    for step in range(length):
        clock.now += price.step
        watch(step)
    watch.catch_up()
    return watch, clock.now - 100.0


@pytest.mark.parametrize("known", [False, True], ids=["", "steps="])
@pytest.mark.parametrize(("name", "steps"), LENGTHS)
def test_the_snippet_keeps_its_budget_and_draws_a_curve(name: str, steps: int, known: bool, monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    """It took 7 to 85 % of the time of short trainings, and measured twice."""
    watch, seconds = snippet(monkeypatch, PRICES[name], steps, **({"steps": steps} if known else {}))
    assert watch._schedule.spent <= max(5.0, 0.05 * seconds)
    assert len(watch.series("magnitude").step) >= 10
    assert watch.snapshots[-1].step == steps - 1
    assert "nfc" in watch.snapshots[-1].measures
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert all(words in line for words in (f"measuring {watch.probe.n} examples takes about", "pays for about", "free_seconds="))
    assert ("The probe has 256" in line) is (watch.probe.n < 256)


def test_short_cheap_trainings_have_many_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = snippet(monkeypatch, PRICES["MLP"], 10_000, steps=10_000)
    steps = watch.series("magnitude").step
    assert len(steps) >= 40
    assert sum(step < 1000 for step in steps) >= 15
    assert watch.probe.n == 256


def test_the_knobs_of_the_budget(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    few, _ = snippet(monkeypatch, PRICES["ViT"], 60)
    more, _ = snippet(monkeypatch, PRICES["ViT"], 60, free_seconds=60.0)
    assert few.probe.n < more.probe.n == 256
    assert len(few.series("nfc").step) == 1 < len(more.series("nfc").step)
    capsys.readouterr()
    snippet(monkeypatch, PRICES["ViT"], 60, announce=False)
    unlimited, _ = snippet(monkeypatch, PRICES["ViT"], 60, budget=None)
    assert capsys.readouterr().err == ""
    assert unlimited.probe.n == 256
    with pytest.raises(SelectionError, match="free_seconds=-1: the seconds that measuring may take in a short training"):
        richter.Observer(mlp(), probe(), free_seconds=-1)


def test_a_long_training_is_measured_with_the_whole_probe_if_its_length_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert snippet(monkeypatch, PRICES["ViT"], 5, steps=100_000)[0].probe.n == 256


def test_part_of_a_probe_is_class_balanced_and_keeps_its_settings() -> None:
    given = richter.Probe(torch.arange(300).float()[:, None], torch.tensor([0] * 200 + [1] * 60 + [2] * 40), chunk=50,
                          held_out=(torch.zeros(99, 1), torch.arange(99) % 3))
    part = given.part(32, 8)
    assert (part.n, part.kernel_examples, part.chunk, part.held_out.n) == (32, 8, 50, 32)
    assert torch.bincount(part.y).tolist() == [11, 11, 10]
    assert all(given.y[int(i)] == label for i, label in zip(part.x[:, 0], part.y, strict=True))
    assert (given.n, given.held_out.n) == (300, 99)


def test_a_reduced_probe_is_that_of_the_run(tmp_path: Path) -> None:
    """A run that is resumed goes on with the examples that it was begun with."""
    options: dict[str, Any] = {"run": tmp_path, "free_seconds": 1e-6, "announce": False}
    with richter.Observer(mlp(), probe(64), **options) as watch:
        watch(0)
    assert watch.probe.n == 32
    assert watch.writer is not None
    assert watch.writer.run.about["examples"] == 32
    with richter.Observer(mlp(), probe(64), **{**options, "free_seconds": 60.0}, resume=True) as watch:
        assert watch.probe.n == 32


def test_now_measures_whatever_the_schedule_says(counted: list[int]) -> None:
    watch = richter.Observer(mlp(), probe(), when=[0], budget=1e-9)
    for step in range(4):
        watch(step)
    snap = watch.now(3)
    assert snap is not None
    assert snap.step == 3
    assert counted == [0, 3]
    assert watch.frame.step.tolist() == [0, 3]


def test_the_share_of_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert richter.Observer(mlp(), probe()).share == 0.0
    watch, clock = watched(monkeypatch, None, cost=3.0, first=3.0)
    monkeypatch.setattr(richter.instrument.observe, "time", clock)
    assert watch.share == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("budget", [0.0, -1.0, 1.5])
def test_budgets_that_are_no_share(budget: float) -> None:
    with pytest.raises(SelectionError, match=r"share of wall time in \(0, 1\], or None"):
        richter.Observer(mlp(), probe(), budget=budget)
