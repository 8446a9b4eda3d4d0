"""Probe, measure, Snapshot and Observer as a user meets them: what may be given, what comes back, what options do."""

from __future__ import annotations

import contextlib
import inspect
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import oracles
import richter
import richter.instrument.observe
from richter.core import Mark, MemoryBudgetError, RichterError, Row, SelectionError
from richter.instrument.cotangents import random_outputs
from richter.measures import DEFAULT
from zoo import CASES

FEW = ("nfc", "tangent_cka")  # one moment, one kernel


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64, outputs: int = 3) -> nn.Sequential:
    """5 -> 8 -> 6 -> outputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)


def examples(n: int = 24, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return draw(n, 5, seed=1, dtype=dtype), torch.arange(n) % 3


def probe(n: int = 24, **options: Any) -> richter.Probe:
    return richter.Probe(*examples(n), **options)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def numbers(snap: richter.Snapshot) -> dict[tuple[str, str], float]:
    return {(r.measure, r.layer): r.value for r in snap.rows}


def assert_close(a: richter.Snapshot, b: richter.Snapshot, rel: float = 1e-10, errors: bool = True) -> None:
    """The same rows with the same values and standard errors; NaN where the other is NaN."""
    assert [(r.measure, r.layer) for r in a.rows] == [(r.measure, r.layer) for r in b.rows]
    assert a.rows
    assert any(math.isfinite(r.value) for r in a.rows)
    for p, q in zip(a.rows, b.rows, strict=True):
        assert p.value == pytest.approx(q.value, rel=rel, abs=rel, nan_ok=True), (p, q)
        if errors:
            assert p.error == pytest.approx(q.error, rel=max(rel, 1e-6), abs=max(rel, 1e-8), nan_ok=True), (p, q)


@contextlib.contextmanager
def streams_untouched() -> Iterator[None]:
    def now() -> tuple[Any, ...]:
        _, keys, *rest = np.random.get_state()  # noqa: NPY002
        return torch.get_rng_state().tolist(), keys.tolist(), rest, random.getstate()

    before = now()
    yield
    assert now() == before


@pytest.fixture
def own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """beartype draws the items it checks from Python's global stream; here `random` is another one."""
    fresh = random.Random(0)
    for name in random.__all__:
        if getattr(getattr(random, name), "__self__", None) is not None:
            monkeypatch.setattr(random, name, getattr(fresh, name))


# --------------------------------------------------------------------------------------------------- when it measures


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Measuring is replaced by counting: the steps at which it was asked for."""
    steps: list[int] = []

    def measure(model: Any, probe: Any, measures: Any, *, initial: Any, step: int, **options: Any) -> richter.Snapshot:
        steps.append(step)
        return richter.Snapshot((Row(step, "*", "nfc", 0.5),), step, seconds=0.001)

    monkeypatch.setattr(richter.instrument.observe, "measure", measure)
    return steps


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


# ------------------------------------------------------------------------------------------------------------ budget


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def watched(monkeypatch: pytest.MonkeyPatch, budget: float | None, first: float = 1.0, cost: float = 1.0,
            steps: int = 400, when: Any = 1) -> tuple[richter.Observer, Clock]:
    """Training steps of one second, measurements of `cost` seconds (the first one of `first`), due at every step."""
    clock = Clock()
    watch = richter.Observer(mlp(), probe(), when=when, budget=budget)

    def measure(*args: Any, step: int, **options: Any) -> richter.Snapshot:
        seconds = cost if watch.snapshots else first
        clock.now += seconds
        return richter.Snapshot((), step, seconds=seconds)

    with monkeypatch.context() as patch:
        patch.setattr(richter.instrument.observe, "measure", measure)
        patch.setattr(richter.instrument.observe, "time", clock)
        for step in range(steps):
            clock.now += 1.0
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
    spent, elapsed = len(watch.snapshots) - 1.0, clock.now - 101.0 - 1.0  # the first one does not count
    assert 0.8 * budget < spent / elapsed <= budget
    assert (spent + 1) / (elapsed + 1) <= budget  # there is room for one more, of now()
    assert sorted([*watch.put_off, *(s.step for s in watch.snapshots)]) == list(range(400))


def test_a_tiny_budget_leaves_the_first_measurement_only(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = watched(monkeypatch, 1e-6)
    assert [s.step for s in watch.snapshots] == [0]
    assert watch.put_off == list(range(1, 400))


def test_a_slow_start_is_not_held_against_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first measurement, with its start-up costs, is not optional: it does not use up the budget of the others."""
    watch, _ = watched(monkeypatch, 0.1, first=100.0, steps=1500)
    assert len(watch.snapshots) > 50


def test_a_step_put_off_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of steps: what is due and has no budget is measured at the first call that has."""
    watch, _ = watched(monkeypatch, 0.1, first=10.0, when=[5, 300], steps=350)
    steps = [s.step for s in watch.snapshots]
    assert watch.put_off == [5]
    assert steps[0] == 0
    assert 5 < steps[1] < 40
    assert steps[2:] == [300]


def test_now_measures_whatever_the_schedule_says(counted: list[int]) -> None:
    watch = richter.Observer(mlp(), probe(), when=[0], budget=1e-9)
    for step in range(4):
        watch(step)
    assert watch.now(3).step == 3
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


# ---------------------------------------------------------------------------------------------- what an Observer keeps


def moved(model: nn.Module, size: float = 0.1) -> nn.Module:
    """The model after a step of training."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(size * draw(*p.shape, seed=100 + i).to(p))
    return model


def test_rows_of_all_measurements() -> None:
    model = mlp()
    watch = richter.Observer(model, probe(), when=10, budget=None, measures=["nfc", "weight_change", "tangent_cka"])
    assert list(watch.frame.columns) == ["step", "layer", "measure", "value", "error", "note", "mark"]
    assert watch.frame.empty
    for step in range(0, 30, 5):
        watch(step)
        moved(model)
    frame = watch.frame
    assert list(frame.columns) == ["step", "layer", "measure", "value", "error", "note", "mark"]
    assert frame.step.unique().tolist() == [0, 10, 20]
    assert frame.layer.unique().tolist() == ["0", "2", "4", "*"]
    assert len(frame) == 3 * (2 * 3 + 4)
    assert frame.value.dtype == frame.error.dtype == np.float64
    row = frame[(frame.step == 20) & (frame.layer == "2") & (frame.measure == "nfc")].iloc[0]
    snap = watch.snapshots[-1]
    assert (row.value, row.error) == (snap.value("nfc", "2"), snap.error("nfc", "2"))


def test_curves() -> None:
    model = mlp()
    watch = richter.Observer(model, probe(), when=1, budget=None, measures=["weight_change", "tangent_cka"])
    for step in (3, 4, 8):
        watch(step)
        moved(model)
    steps, values = watch.curve("weight_change", "2")
    assert steps == [3, 4, 8]
    assert values == [s.value("weight_change", "2") for s in watch.snapshots]
    assert values[0] == 0.0 < values[1] < values[2]
    assert watch.curve("tangent_cka") == ([3, 4, 8], [s.value("tangent_cka", "*") for s in watch.snapshots])
    with pytest.raises(SelectionError, match="no layer '9'"):
        watch.curve("weight_change", "9")


def test_scalars_are_kept_at_every_call(counted: list[int]) -> None:
    watch = richter.Observer(mlp(), probe(), when=3, budget=None)
    loss = (torch.ones(2, requires_grad=True) * 1.5).mean()
    watch(0, loss=loss)
    watch(1, loss=np.float32(0.5), accuracy=0.25)
    watch(2)
    watch(3, loss=1)
    assert counted == [0, 3]
    expected = pd.DataFrame({"step": [0, 1, 3], "loss": [1.5, 0.5, 1.0], "accuracy": [math.nan, 0.25, math.nan]})
    pd.testing.assert_frame_equal(watch.scalars, expected)


def test_as_a_context_manager(counted: list[int]) -> None:
    with richter.Observer(mlp(), probe(), when=1, budget=None) as watch:
        assert isinstance(watch, richter.Observer)
        watch(0)
    assert len(watch.frame) == 1


def test_an_exception_in_the_loop_passes_and_rows_stay(counted: list[int]) -> None:
    watch = richter.Observer(mlp(), probe(), when=1, budget=None)

    def loop() -> None:
        with watch:
            for step in range(5):
                watch(step, loss=1 / (3 - step))

    with pytest.raises(ZeroDivisionError):
        loop()
    assert watch.frame.step.tolist() == [0, 1, 2]
    assert watch.scalars.loss.tolist() == [1 / 3, 1 / 2, 1.0]


def test_a_failed_measurement_keeps_rows_and_scalars() -> None:
    """A diverged step raises; what was seen before and what comes after it is kept."""
    model = mlp()
    watch = richter.Observer(model, probe(), when=1, budget=None, measures=["nfc"])
    watch(0, loss=1.0)
    good = model[2].weight.detach().clone()
    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
    with pytest.raises(RichterError, match=r"'2.weight' contains NaN"):
        watch(1, loss=math.nan)
    with torch.no_grad():
        model[2].weight.copy_(good)
    watch(2, loss=0.9)
    assert watch.frame.step.unique().tolist() == [0, 2]
    assert watch.scalars.step.tolist() == [0, 1, 2]
    assert watch.snapshots[0].value("nfc", "2") == watch.snapshots[1].value("nfc", "2")


def test_the_initial_weights_are_those_at_its_making_or_those_given() -> None:
    model = mlp()
    start, other = state(model), state(mlp(seed=5))
    watch = richter.Observer(model, probe(), when=1, budget=None)
    moved(model)
    own = watch(0)
    given = richter.Observer(model, probe(), initial=other)(0)
    assert own is not None
    assert given is not None
    assert_close(own, richter.measure(model, probe(), initial=start))
    assert_close(given, richter.measure(model, probe(), initial=other))
    change = (model[0].weight - other["0.weight"]).norm() / model[0].weight.norm()
    assert given.value("weight_change", "0") == pytest.approx(change.item(), rel=1e-12)
    assert own.value("weight_change", "0") < 0.5 * given.value("weight_change", "0")


def test_initial_weights_do_not_move_with_the_model() -> None:
    """model.state_dict() shares its memory with the model: what is given is what was meant when it was given."""
    model = mlp()
    watch = richter.Observer(model, probe(), initial=model.state_dict(), when=1, budget=None)
    watch(0)
    moved(model)
    snap = watch(1)
    assert snap is not None
    assert snap.value("weight_change", "0") > 0.01


def trained(watch: richter.Observer, steps: range) -> None:
    model = watch.model
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        loss = F.cross_entropy(model(examples()[0]), examples()[1])
        watch(step, loss=loss)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def test_a_run_holds_what_the_observer_saw(tmp_path: Path) -> None:
    with richter.Observer(mlp(), probe(), run=tmp_path, when=2, budget=None, settings={"lr": 0.05}) as watch:
        trained(watch, range(5))
        assert watch.writer is not None
        assert watch.writer.run.status == "running"
    run = richter.runs.open(tmp_path)
    assert run.status == "finished"
    assert run.settings == {"lr": 0.05}
    assert run.about["parameters"] == sum(p.numel() for p in mlp().parameters())
    pd.testing.assert_frame_equal(run.frame, watch.frame)
    pd.testing.assert_frame_equal(run.scalars, watch.scalars)
    assert repr(run.snapshots) == repr(watch.snapshots)  # NaN and all
    assert [str(s) for s in run.snapshots] == [str(s) for s in watch.snapshots]
    assert richter.diagnose(run) == richter.diagnose(watch)
    W = mlp()[0].weight.detach()
    assert np.allclose(run.array("nfm", "0", 0), W.T @ W, atol=1e-6)
    F_, G = (run.array(name, "0", 4).astype(float) for name in ("nfm", "agop"))
    assert (F_ * G).sum() / np.linalg.norm(F_) / np.linalg.norm(G) == pytest.approx(run.series("nfc", "0").value[-1], abs=1e-4)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_resumed_run_goes_on_from_its_own_initial_weights(tmp_path: Path, lost: int) -> None:
    """As if it had never stopped, also when training goes back to an earlier checkpoint."""
    straight = richter.Observer(mlp(), probe(), when=1, budget=None)
    trained(straight, range(6))
    first = richter.Observer(mlp(), probe(), run=tmp_path, when=1, budget=None)
    trained(first, range(3))
    first.close()
    model = mlp(seed=5)  # not what the run began with: the weights come from a checkpoint
    with torch.no_grad():
        model.load_state_dict({k: v.clone() for k, v in mlp().state_dict().items()})
    trained(richter.Observer(model, probe(), when=99), range(3 - lost))
    second = richter.Observer(model, probe(), run=tmp_path, when=1, budget=None, resume=True)
    assert len(second.snapshots) == 3
    trained(second, range(3 - lost, 6))
    second.close()
    assert second.curve("weight_change", "0") == straight.curve("weight_change", "0")
    pd.testing.assert_frame_equal(richter.runs.open(tmp_path).frame, straight.frame)
    assert len(richter.runs.open(tmp_path).sessions) == 2


def test_what_a_run_refuses(tmp_path: Path) -> None:
    richter.Observer(mlp(), probe(), run=tmp_path / "a").close()
    with pytest.raises(RichterError, match=r"there is already a run in .*resume=True"):
        richter.Observer(mlp(), probe(), run=tmp_path / "a")
    with pytest.raises(RichterError, match=r"another architecture: '4\.weight' has shape \(2, 6\) in this model and \(3, 6\)"):
        richter.Observer(mlp(outputs=2), probe(), run=tmp_path / "a", resume=True)
    with pytest.raises(RichterError, match="initial weights of its own; leave initial= out"):
        richter.Observer(mlp(), probe(), run=tmp_path / "a", resume=True, initial=state(mlp()))
    with pytest.raises(RichterError, match="settings= and resume= are of a run on disk"):
        richter.Observer(mlp(), probe(), resume=True)
    with pytest.raises(RichterError, match="matrices=-1"):
        richter.Observer(mlp(), probe(), run=tmp_path / "b", matrices=-1)
    with richter.Observer(mlp(), probe(), run=tmp_path / "a", resume=True), \
            pytest.raises(RichterError, match="this process is already writing the run"):
        richter.Observer(mlp(), probe(), run=tmp_path / "a", resume=True)


def test_an_observer_is_told_early(tmp_path: Path) -> None:
    with pytest.raises(RichterError, match="an Observer has no option 'every'"):
        richter.Observer(mlp(), probe(), run=tmp_path / "a", every=10)
    assert not (tmp_path / "a").exists()
    watch = richter.Observer(mlp(), probe(), run=tmp_path / "a", measures=FEW)
    watch(0)
    watch.close()
    with pytest.raises(RichterError, match="was closed: nothing more is measured into it"):
        watch.now(1)
    assert len(watch.snapshots) == 1


def test_matrices_are_kept_as_steps_grow_by_a_tenth(tmp_path: Path) -> None:
    with richter.Observer(mlp(), probe(), run=tmp_path, measures=["nfc"], when=1, budget=None) as watch:
        for step in [*range(30), 100, 101, 112]:
            watch(step)
        watch.now(113)
    kept = sorted({step for _, _, step in richter.runs.open(tmp_path).arrays})
    assert kept == [*range(12), 13, 15, 17, 19, 21, 24, 27, 100, 112, 113]
    assert len(watch.snapshots) == 34


def test_half_precision_and_tied_weights_survive_the_disk(tmp_path: Path) -> None:
    model = mlp().bfloat16()
    model[2].weight = nn.Parameter(draw(6, 8).bfloat16().T.contiguous().T)  # not contiguous in memory
    model[4] = nn.Linear(6, 3, dtype=torch.bfloat16)
    model.register_parameter("again", model[0].weight)
    richter.Observer(model, probe(), run=tmp_path).close()
    kept = richter.Observer(model, probe(), run=tmp_path, resume=True).initial
    assert all(torch.equal(kept[k], v) and kept[k].dtype == v.dtype for k, v in model.state_dict().items())


def test_an_observer_measures_what_measure_measures() -> None:
    """Every option of measure is an option of an Observer."""
    model = moved(mlp())
    options: dict[str, Any] = {"layers": "2", "memory": "1GiB", "cotangents": random_outputs(2, seed=3),
                               "output": lambda f: f[:, :2]}  # fmt: skip
    target = richter.Probe(examples()[0], examples()[0][:, :2])
    snap = richter.Observer(model, target, initial=state(mlp()), measures=FEW, **options)(4)
    assert snap is not None
    expected = richter.measure(model, target, FEW, initial=state(mlp()), step=4, **options)
    assert_close(snap, expected)
    assert snap.step == 4
    assert snap.layers == ["2"]


# ---------------------------------------------------------------------------------------------------------- snapshots


@pytest.fixture(scope="module")
def snap() -> richter.Snapshot:
    return richter.measure(moved(mlp()), probe(), initial=state(mlp()), step=7)


def test_values_errors_and_notes(snap: richter.Snapshot) -> None:
    assert snap.step == 7
    assert snap.examples == 24
    assert snap.seconds > 0
    assert snap.layers == ["0", "2", "4", "*"]
    assert tuple(snap.measures) == DEFAULT
    assert 0 < snap.value("nfc", "0") < 1
    assert 0 < snap.error("nfc", "0") < 0.2
    assert snap.note("nfc", "0") == ""
    assert snap.value("nfc", "4") == pytest.approx(1.0)
    assert snap.note("nfc", "4").startswith("trivial")
    assert snap.note("cnfc", "4").startswith("trivial")
    assert math.isnan(snap.error("weight_change", "0"))  # of weights alone
    assert snap.value("tangent_cka") == snap.value("tangent_cka", "*") == snap.row("tangent_cka", "*").value


def test_names_that_are_not_there(snap: richter.Snapshot) -> None:
    with pytest.raises(SelectionError, match=r"no measure 'nfk'.*Close to it: 'nfc'"):
        snap.value("nfk", "0")
    with pytest.raises(SelectionError, match=r"no layer '\*' for 'nfc'.*It has: '0', '2', '4'"):
        snap.value("nfc")


def test_frame(snap: richter.Snapshot) -> None:
    frame = snap.frame
    assert frame.index.tolist() == ["0", "2", "4", "*"]
    assert frame.index.name == "layer"
    assert list(frame.columns) == [*DEFAULT, *(f"{m}_se" for m in DEFAULT), "note"]
    for m in DEFAULT:
        assert frame[m].dtype == frame[f"{m}_se"].dtype == np.float64
    assert frame.loc["2", "nfc"] == snap.value("nfc", "2")
    assert frame.loc["2", "nfc_se"] == snap.error("nfc", "2")
    assert frame.loc["*", "tangent_alignment"] == snap.value("tangent_alignment")
    assert math.isnan(frame.loc["*", "nfc"])
    assert "trivial" in frame.loc["4", "note"]
    assert frame.loc["0", "note"] == ""


def test_the_row_of_the_whole_model_is_always_there() -> None:
    frame = richter.measure(mlp(), probe(), ["nfc"]).frame
    assert frame.index.tolist() == ["0", "2", "4", "*"]
    assert math.isnan(frame.loc["*", "nfc"])


def test_as_text() -> None:
    rows = (Row(0, "first", "nfc", 0.82345, 0.0123), Row(0, "first", "change", 0.5),
            Row(0, "last", "nfc", 1.0, 0.0, "trivial: ...", Mark.TRIVIAL), Row(0, "last", "change", math.nan, note="0/0"),
            Row(0, "*", "change", 12.3456, 2.0))  # fmt: skip
    text = str(richter.Snapshot(rows, 0, {"spare": "never called"})).splitlines()
    assert text[0].split() == ["layer", "nfc", "change"]
    assert text[1].split() == ["first", "0.823(12)", "0.500"]
    assert text[2].split() == ["last", "1.000."]  # the dot marks a trivial value
    assert text[3].split() == ["*", "12.3(20)"]
    assert text[4] == "spare: never called"
    assert len({len(line) for line in text[:2]}) == 1


def test_as_html() -> None:
    snap = richter.Snapshot((Row(0, "<script>alert(1)</script>", "a<b", 0.5), Row(0, "*", "a<b", math.nan)), 0)
    html = snap._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "a&lt;b" in html
    assert "0.500" in html
    assert "nan" not in html.lower()


# -------------------------------------------------------------------------------------------------- what a probe takes


def test_arrays_are_as_good_as_tensors() -> None:
    x, y = examples()
    model = mlp()
    expected = richter.measure(model, richter.Probe(x, y))
    assert_close(richter.measure(model, richter.Probe(x.numpy(), y.numpy())), expected)
    assert_close(richter.measure(model, richter.Probe(x.tolist(), y.tolist())), expected)
    assert_close(richter.measure(model, richter.Probe(pd.DataFrame(x.numpy()), pd.Series(y.numpy()))), expected)
    assert_close(richter.measure(model, richter.Probe(x, y.to(torch.int32))), expected)


def test_arrays_of_numpy_fit_a_model_of_torch() -> None:
    """numpy's usual number is float64, torch's float32: the probe is read in the model's own precision."""
    x, y = examples()
    model = mlp(dtype=torch.float32)
    expected = richter.measure(model, richter.Probe(x.float(), y), FEW)
    assert_close(richter.measure(model, richter.Probe(x.numpy(), y.numpy()), FEW), expected, rel=1e-5)


@pytest.mark.parametrize("name", ["multi_input", "dict_io"])
def test_tuples_and_dicts_of_inputs(name: str) -> None:
    """By position and by name, as tensors or arrays; the definition says what the number is."""
    case = CASES[name]
    model, (x, y) = case.build(), case.batch(12)
    given = {k: v.numpy() for k, v in x.items()} if isinstance(x, dict) else tuple(v.numpy() for v in x)
    snap = richter.measure(model, richter.Probe(x, y), FEW, output=case.output)
    assert_close(snap, richter.measure(model, richter.Probe(given, y), FEW, output=case.output))
    W, _, J = oracles.layer_io(model, x, "left", case.output)
    assert snap.value("nfc", "left") == pytest.approx(oracles.cosine(oracles.nfm(W), oracles.agop(W, J)), rel=1e-9)


def test_class_ids_are_one_hot_targets() -> None:
    x, y = examples()
    model = mlp()
    expected = richter.measure(model, richter.Probe(x, y))
    assert_close(richter.measure(model, richter.Probe(x, F.one_hot(y, 3).double())), expected)
    assert_close(richter.measure(model, richter.Probe(x, F.one_hot(y, 3))), expected)  # whole numbers, outputs' shape
    other = richter.measure(model, richter.Probe(x, draw(24, 3)))
    assert other.value("tangent_cka") != pytest.approx(expected.value("tangent_cka"), rel=1e-3)
    assert other.value("nfc", "0") == expected.value("nfc", "0")


def test_targets_of_one_output() -> None:
    """[n] or [n,1], numbers or two classes; by the definition."""
    x, _ = examples()
    model, y = mlp(outputs=1), draw(24, seed=9)
    snap = richter.measure(model, richter.Probe(x, y))
    assert_close(snap, richter.measure(model, richter.Probe(x, y[:, None])))
    K = oracles.tangent_kernels(model, x)["2"]
    assert snap.value("tangent_cka", "2") == pytest.approx(oracles.tangent_cka(K, y[:, None]), rel=1e-9)
    two = (y > 0).long()
    snap = richter.measure(model, richter.Probe(x, two))
    assert snap.value("tangent_cka", "2") == pytest.approx(oracles.tangent_cka(K, two.double()[:, None]), rel=1e-9)
    assert_close(snap, richter.measure(model, richter.Probe(x, y > 0)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int64])
def test_class_ids_of_every_width(dtype: torch.dtype) -> None:
    """A byte has no -100: 156 is a class like any other."""
    y = torch.tensor([0, 100, 3, 0, 100, 3], dtype=dtype) if dtype is torch.int8 else \
        torch.tensor([0, 156, 3, 0, 156, 3]).to(dtype)
    Y, keep = richter.Probe(draw(6, 5), y).targets(torch.Size((6, 200)))
    assert keep is None
    assert Y is not None
    assert torch.equal(Y.argmax(1), y.long())


def test_without_labels() -> None:
    x, y = examples()
    model, start = moved(mlp()), state(mlp())
    blind, seeing = (richter.measure(model, richter.Probe(x, labels), initial=start) for labels in (None, y))
    for m in ("nfc", "cnfc", "c_uc_ratio", "weight_change"):
        for layer in ("0", "2"):
            assert blind.value(m, layer) == seeing.value(m, layer)
            assert math.isfinite(blind.value(m, layer))
    for m in ("tangent_alignment", "tangent_cka", "tangent_correlation"):
        for layer in ("0", "2", "4", "*"):
            assert math.isnan(blind.value(m, layer))
            assert "no labels" in blind.note(m, layer)
            assert math.isnan(blind.error(m, layer))
    assert blind.frame.tangent_cka.isna().all()


def test_a_rank_needs_no_labels() -> None:
    """tangent_stable_rank is a number of the kernel alone."""
    x, y = examples()
    blind, seeing = (richter.measure(mlp(), richter.Probe(x, labels), ["tangent_stable_rank"]) for labels in (None, y))
    assert_close(blind, seeing)


# ---------------------------------------------------------------------------------------------- the kernel's examples


def test_kernels_use_balanced_examples_always_the_same() -> None:
    y = torch.tensor([0] * 70 + [1] * 20 + [2] * 10)
    p = richter.Probe(draw(100, 5), y, kernel=24)
    rows = p.kernel_rows()
    assert y[rows].bincount().tolist() == [8, 8, 8]
    assert len(rows.unique()) == 24
    assert torch.equal(rows, rows.sort().values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        assert torch.equal(rows, p.kernel_rows())
    assert torch.equal(rows, richter.Probe(draw(100, 5), y, kernel=24).kernel_rows())
    scarce = richter.Probe(draw(100, 5), y, kernel=64).kernel_rows()
    assert y[scarce].bincount().tolist() == [34, 20, 10]  # all of the rare ones, the rest from the others


@pytest.mark.parametrize("options", [{"kernel": 24}, {"kernel": 64}, {"kernel": None}, {}])
def test_a_small_probe_is_used_whole_balanced_or_not(options: dict[str, Any]) -> None:
    y = torch.tensor([0] * 20 + [1] * 3 + [2])
    assert torch.equal(richter.Probe(draw(24, 5), y, **options).kernel_rows(), torch.arange(24))


def test_all_examples_or_the_first_ones_where_there_are_no_classes() -> None:
    assert len(richter.Probe(draw(100, 5), torch.arange(100) % 3, kernel=None).kernel_rows()) == 100
    for y in (None, draw(100, 3)):
        assert torch.equal(richter.Probe(draw(100, 5), y, kernel=10).kernel_rows(), torch.arange(10))


def test_examples_without_a_label_are_no_class() -> None:
    y = torch.tensor([0, 1, 2, -100] * 10)
    rows = richter.Probe(draw(40, 5), y, kernel=9).kernel_rows()
    assert (y[rows] >= 0).all()


def test_kernel_measures_are_of_the_kernel_examples() -> None:
    x, y = examples(30)
    p = richter.Probe(x, y, kernel=12)
    rows = p.kernel_rows()
    snap, part = richter.measure(mlp(), p), richter.measure(mlp(), richter.Probe(x[rows], y[rows]))
    for layer in ("0", "2", "4", "*"):
        assert snap.value("tangent_cka", layer) == pytest.approx(part.value("tangent_cka", layer), rel=1e-10)
        assert snap.error("tangent_cka", layer) == pytest.approx(part.error("tangent_cka", layer), rel=1e-6)
    whole = richter.measure(mlp(), richter.Probe(x, y, kernel=None))
    assert snap.value("nfc", "0") == whole.value("nfc", "0") != part.value("nfc", "0")
    assert abs(snap.value("tangent_cka") / whole.value("tangent_cka") - 1) > 1e-3


# ------------------------------------------------------------------------------------------------------- from_loader

MANY = draw(400, 5, seed=3)
CLASSES = torch.tensor([0] * 300 + [1] * 60 + [2] * 40)  # sorted and unbalanced: the first examples are of one class


def hugging_face(**columns: Any) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({k: v.tolist() for k, v in columns.items()})


class Drawn(Dataset):
    """Augmentations that draw from every global stream."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        noise = torch.rand(1).item() + np.random.rand() + random.random()  # noqa: NPY002
        return MANY[i] + 1e-9 * noise, int(CLASSES[i])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(MANY, CLASSES, strict=True)


def in_batches(*columns: Any) -> list[Any]:
    return [tuple(c[i:i + 50] for c in columns) for i in range(0, 400, 50)]


SOURCES: dict[str, Callable[[], Any]] = {
    "loader": lambda: DataLoader(TensorDataset(MANY, CLASSES), batch_size=32),
    "shuffling loader": lambda: DataLoader(TensorDataset(MANY, CLASSES), batch_size=32, shuffle=True),
    "tensor dataset": lambda: TensorDataset(MANY, CLASSES),
    "dataset": lambda: [(x, int(y)) for x, y in zip(MANY, CLASSES, strict=True)],
    "stream": lambda: DataLoader(Stream(), batch_size=32),
    "list of batches": lambda: in_batches(MANY, CLASSES),
    "list of numpy batches": lambda: in_batches(MANY.numpy(), CLASSES.numpy()),
    "generator of batches": lambda: iter(in_batches(MANY, CLASSES)),
    "list of dicts": lambda: [{"x": x, "labels": y} for x, y in in_batches(MANY, CLASSES)],
    "loader of dicts": lambda: DataLoader([{"x": x, "label": y} for x, y in zip(MANY, CLASSES, strict=True)], 32),
    "hugging face": lambda: hugging_face(x=MANY, label=CLASSES).with_format("torch"),
    "hugging face without a format": lambda: hugging_face(x=MANY, label=CLASSES),
    "loader of hugging face": lambda: DataLoader(hugging_face(x=MANY, label=CLASSES).with_format("torch"), 32),
}  # fmt: skip


def indices(p: richter.Probe) -> list[int]:
    """Which of MANY the examples of a probe are."""
    found = torch.cdist(p.x.double(), MANY).min(1)
    assert found.values.max() < 1e-6
    return found.indices.tolist()


@pytest.mark.parametrize("name", SOURCES)
def test_from_everything_that_gives_batches(name: str) -> None:
    """As many of each class, no example twice, each with its own label."""
    p = richter.Probe.from_loader(SOURCES[name](), n=30)
    assert isinstance(p.x, Tensor)
    assert p.x.shape == (30, 5)
    assert p.y is not None
    rows = indices(p)
    assert len(set(rows)) == 30
    assert torch.equal(CLASSES[rows], p.y)
    assert p.y.bincount().tolist() == [10, 10, 10]
    assert math.isfinite(richter.measure(mlp(dtype=p.x.dtype), p, ["tangent_cka"]).value("tangent_cka"))


def test_scarce_classes_are_filled_up_from_the_others() -> None:
    p = richter.Probe.from_loader(TensorDataset(MANY, CLASSES), n=150)
    assert p.y is not None
    assert p.y.bincount().tolist() == [55, 55, 40]
    everything = richter.Probe.from_loader(TensorDataset(MANY, CLASSES), n=1000)
    assert everything.n == 400


def test_unbalanced() -> None:
    """The examples as they come: the first of a loader, a random draw of a dataset."""
    first = richter.Probe.from_loader(SOURCES["loader"](), n=310, balanced=False)
    assert indices(first) == list(range(310))
    drawn = richter.Probe.from_loader(SOURCES["tensor dataset"](), n=200, balanced=False)
    assert drawn.y is not None
    assert 120 < drawn.y.bincount()[0] < 180  # three quarters are of class 0


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("name", ["shuffling loader", "tensor dataset", "hugging face"])
def test_a_seed_owns_the_draw(name: str, balanced: bool) -> None:
    def drawn(seed: int) -> list[int]:
        return indices(richter.Probe.from_loader(SOURCES[name](), n=20, balanced=balanced, seed=seed))

    first = drawn(0)
    torch.rand(3)
    assert first == drawn(0) != drawn(1)


@pytest.mark.parametrize("name", [*SOURCES, "augmented", "workers"])
@pytest.mark.usefixtures("own_stream")
def test_no_random_stream_is_touched(name: str) -> None:
    more = {"augmented": Drawn, "workers": lambda: DataLoader(Drawn(), batch_size=100, shuffle=True, num_workers=1)}
    source = (SOURCES | more)[name]()
    with streams_untouched():
        richter.Probe.from_loader(source, n=20)


@pytest.mark.parametrize("where", ["loader", "sampler", "batch sampler"])
def test_the_loader_shuffles_as_if_it_had_not_been_asked(where: str) -> None:
    """A loader with a generator of its own: this stream is the training's, too."""
    def order(asked: bool) -> list[int]:
        data, own = TensorDataset(MANY, torch.arange(400)), torch.Generator().manual_seed(4)
        sampler = RandomSampler(data, generator=own)
        loader: Any = {
            "loader": lambda: DataLoader(data, batch_size=100, shuffle=True, generator=own),
            "sampler": lambda: DataLoader(data, batch_size=100, sampler=sampler),
            "batch sampler": lambda: DataLoader(data, batch_sampler=BatchSampler(sampler, 100, drop_last=False)),
        }[where]()  # fmt: skip
        if asked:
            richter.Probe.from_loader(loader, n=20, balanced=False)
        return torch.cat([y for _, y in loader]).tolist()

    assert order(True) == order(False)


def test_options_of_a_probe_pass_through() -> None:
    p = richter.Probe.from_loader(SOURCES["loader"](), n=30, chunk=7, kernel=9)
    assert (p.chunk, p.kernel, len(p.kernel_rows())) == (7, 9, 9)


def test_inputs_without_labels_and_of_several_parts() -> None:
    for source in (DataLoader(TensorDataset(MANY), 50), list(DataLoader(TensorDataset(MANY), 50)), TensorDataset(MANY)):
        p = richter.Probe.from_loader(source, n=20)
        assert p.y is None
        assert p.x.shape == (20, 5)
        assert len(set(indices(p))) == 20
    p = richter.Probe.from_loader(DataLoader(TensorDataset(MANY, 2 * MANY, CLASSES), 50), n=20)
    assert p.y is not None
    assert isinstance(p.x, tuple)
    assert torch.equal(2 * p.x[0], p.x[1])
    assert torch.equal(CLASSES[[int((row == MANY).all(1).nonzero()[0, 0]) for row in p.x[0]]], p.y)


def test_examples_with_targets_are_not_batches() -> None:
    """A list of (x[5], target[3]) is a data set of examples, though targets are tensors with an axis."""
    targets = draw(400, 3, seed=8)
    p = richter.Probe.from_loader(list(zip(MANY, targets, strict=True)), n=20)
    assert p.x.shape == (20, 5)
    assert p.y is not None
    assert torch.equal(targets[indices(p)], p.y)


SEQUENCES, TAGS = draw(60, 4, 5, seed=6), torch.arange(240).reshape(60, 4) % 3


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("kind", ["dataset", "loader", "hugging face"])
def test_examples_that_look_like_batches(kind: str, labelled: bool) -> None:
    """One example of a data set has axes of its own, and perhaps a label for each position: it is one example."""
    columns = {"x": SEQUENCES, "labels": TAGS} if labelled else {"x": SEQUENCES}
    data: Any = TensorDataset(*columns.values())
    if kind == "hugging face":
        data = hugging_face(**columns).with_format("torch")
    p = richter.Probe.from_loader(DataLoader(data, batch_size=8) if kind == "loader" else data, n=20)
    assert p.x.shape == (20, 4, 5)
    rows = torch.cdist(p.x.double().flatten(1), SEQUENCES.flatten(1)).argmin(1)
    assert len(rows.unique()) == 20
    assert (p.y is not None and torch.equal(p.y, TAGS[rows])) if labelled else p.y is None


@pytest.mark.parametrize("name", ["list of numpy batches", "hugging face without a format"])
def test_numbers_without_a_precision_take_the_models(name: str) -> None:
    """numpy arrays and lists of floats, drawn from a loader, fit a float32 model as they do when given directly."""
    p = richter.Probe.from_loader(SOURCES[name](), n=30)
    assert math.isfinite(richter.measure(mlp(dtype=torch.float32), p, ["nfc"]).value("nfc", "0"))


@pytest.mark.parametrize("formatted", [True, False])
def test_tokens_of_hugging_face(formatted: bool) -> None:
    """Dicts with input_ids, an attention mask and token labels stay dicts."""
    ids = torch.randint(0, 9, (60, 6), generator=torch.Generator().manual_seed(0))
    data = hugging_face(input_ids=ids, attention_mask=(ids > 0).long(), labels=ids.roll(-1, 1))
    p = richter.Probe.from_loader(data.with_format("torch") if formatted else data, n=16)
    assert set(p.x) == {"input_ids", "attention_mask"}
    assert p.x["input_ids"].shape == (16, 6)
    assert p.y is not None
    assert torch.equal(p.x["input_ids"].roll(-1, 1), p.y)


# ------------------------------------------------------------------------------------------------- tokens and masks


class Heads(nn.Module):
    """Position by position; `head` works on [n, T, 2, 4]: two heads of every token, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.readout = nn.Linear(5, 8), nn.Linear(4, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x))
        z = torch.tanh(self.head(z.unflatten(-1, (2, 4)))).flatten(-2)
        return self.readout(z)


def heads(n: int = 12, T: int = 4) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = Heads().double()
    return model, draw(n, T, 5, seed=4), torch.arange(n * T).reshape(n, T) * 7 % 3


def gpt(n: int = 8) -> tuple[nn.Module, Tensor, Tensor]:
    case = CASES["gpt"]
    return case.build(), *case.batch(n)


def lengths(n: int, T: int, left: bool = False) -> Tensor:
    """Masks of T, T-1, ... real tokens (at least one), the others behind them, or before them."""
    mask = torch.arange(T)[None] < T - (torch.arange(n) % T)[:, None]
    return mask.flip(1) if left else mask


def nfc_by_hand(model: nn.Module, x: Tensor, name: str, outputs: Tensor, positions: Tensor) -> float:
    """rho(W^T W, W^T K W), K = sum of g g^T over real outputs [n,T] and over real positions [n,T] of the layer."""
    W, _, J = oracles.layer_io(model, x, name)
    (n, k, s, _), T = J.shape, outputs.shape[1]
    K = torch.zeros(len(W), len(W), dtype=torch.float64)
    for i in range(n):
        for o in range(k):
            for p in range(s):
                if outputs[i, o // (k // T)] and positions[i, p // (s // T)]:
                    K += torch.outer(J[i, o, p], J[i, o, p])
    return oracles.cosine(W.T @ W, W.T @ K @ W)


def tangent_by_hand(K: Tensor, y: Tensor, real: Tensor) -> dict[str, float]:
    """tangent_cka, tangent_alignment of K[n,k,n,k] from the outputs of real tokens alone."""
    (n, k), T = K.shape[:2], real.shape[1]
    Y = torch.zeros(n, T, k // T, dtype=torch.float64)
    for i, t in real.nonzero().tolist():
        Y[i, t, y[i, t]] = 1.0
    keep = real[..., None].expand(Y.shape).flatten()
    y_kept = Y.flatten()[keep]
    C = oracles.centring(len(y_kept))
    Kc, yc = C @ K.reshape(n * k, n * k)[keep][:, keep] @ C, C @ y_kept
    values = []
    for c in range(k):
        rows = real[:, c // (k // T)]
        label = Y.reshape(n, k)[rows, c]
        if label.norm() > 0:
            values.append(oracles.alignment(K[rows, c][:, rows, c], label))
    cka = float(yc @ Kc @ yc / (Kc.norm() * (yc @ yc)))
    return {"tangent_cka": cka, "tangent_alignment": sum(values) / len(values)}


@pytest.mark.parametrize("name", ["first", "head", "readout"])
def test_masked_positions_enter_no_sum(name: str) -> None:
    """A model that works on each token: real tokens alone, whatever stands in the others."""
    model, x, y = heads()
    mask = lengths(12, 4)
    snap = richter.measure(model, richter.Probe(x, y, mask=mask))
    assert snap.value("nfc", name) == pytest.approx(nfc_by_hand(model, x, name, mask, mask), rel=1e-9)
    by_hand = tangent_by_hand(oracles.tangent_kernels(model, x)[name], y, mask)
    for m, value in by_hand.items():
        assert snap.value(m, name) == pytest.approx(value, rel=1e-9)
    garbage, labels = torch.where(mask[..., None], x, 1.5 * x.roll(1, 0) + 0.5), torch.where(mask, y, 2)
    padded = richter.measure(model, richter.Probe(garbage, labels, mask=mask))
    unmasked = richter.measure(model, richter.Probe(garbage, labels))
    for m in (*FEW, "tangent_alignment"):
        assert padded.value(m, name) == pytest.approx(snap.value(m, name), rel=1e-9)
        assert padded.error(m, name) == pytest.approx(snap.error(m, name), rel=1e-6, abs=1e-12)
        if name != "readout" or m != "nfc":
            assert abs(unmasked.value(m, name) - snap.value(m, name)) > 1e-4


@pytest.mark.parametrize("name", ["first", "head", "readout"])
def test_masking_the_end_is_cutting_it_off(name: str) -> None:
    model, x, y = heads()
    mask = (torch.arange(4) < 2).expand(12, 4)
    masked = richter.measure(model, richter.Probe(x, y, mask=mask))
    cut = richter.measure(model, richter.Probe(x[:, :2], y[:, :2]))
    for m in (*FEW, "tangent_alignment", "tangent_stable_rank"):
        assert masked.value(m, name) == pytest.approx(cut.value(m, name), rel=1e-9)
        assert masked.error(m, name) == pytest.approx(cut.error(m, name), rel=1e-5, abs=1e-12)


GPT_LAYERS = ["transformer.h.0.attn.c_attn.v", "transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_proj"]


def test_a_causal_model_padded_at_the_end() -> None:
    """Padding behind the text reaches no real output: garbage there changes nothing."""
    model, x, y = gpt()
    mask = lengths(8, 4)
    ids = torch.where(mask, x, (x + 3) % 7)
    snap, other = (richter.measure(model, richter.Probe(i, y, mask=mask)) for i in (x, ids))
    for name in GPT_LAYERS:
        assert snap.value("nfc", name) == pytest.approx(nfc_by_hand(model, x, name, mask, mask), rel=1e-8)
    K = oracles.tangent_kernels(model, x)
    for name in ("transformer.h.0.mlp.c_fc", "transformer.ln_f"):
        for m, value in tangent_by_hand(K[name], y, mask).items():
            assert snap.value(m, name) == pytest.approx(value, rel=1e-8)
    for m, value in tangent_by_hand(torch.stack(list(K.values())).sum(0), y, mask).items():
        assert snap.value(m) == pytest.approx(value, rel=1e-8)
    assert_close(snap, other, rel=1e-8)


def test_a_causal_model_padded_at_the_front() -> None:
    """Padding before the text is read by real tokens; what is asked of it enters no feature matrix."""
    model, x, y = gpt()
    mask = lengths(8, 4, left=True)
    snap = richter.measure(model, richter.Probe(x, y, mask=mask), ["nfc"])
    for name in GPT_LAYERS:
        expected = nfc_by_hand(model, x, name, mask, mask)
        assert snap.value("nfc", name) == pytest.approx(expected, rel=1e-8)
    name = "transformer.h.0.attn.c_attn.v"
    everywhere = nfc_by_hand(model, x, name, mask, torch.ones_like(mask))
    assert abs(everywhere - snap.value("nfc", name)) > 1e-6  # here it makes a difference


@pytest.mark.parametrize("ignore_index", [-100, -1])
def test_tokens_without_a_label(ignore_index: int) -> None:
    """Their outputs count neither for features nor for kernels."""
    model, x, y = heads()
    real = lengths(12, 4).roll(1, 1)
    labels = torch.where(real, y, ignore_index)
    snap = richter.measure(model, richter.Probe(x, labels, ignore_index=ignore_index))
    K = oracles.tangent_kernels(model, x)
    for name in ("first", "head", "readout"):
        expected = nfc_by_hand(model, x, name, real, torch.ones_like(real))
        assert snap.value("nfc", name) == pytest.approx(expected, rel=1e-9)
        for m, value in tangent_by_hand(K[name], y, real).items():
            assert snap.value(m, name) == pytest.approx(value, rel=1e-9)


def test_a_mask_and_missing_labels_together() -> None:
    model, x, y = heads()
    mask, labelled = lengths(12, 4), torch.ones(12, 4, dtype=torch.bool)
    labelled[::2, 0] = False
    both = richter.measure(model, richter.Probe(x, torch.where(labelled, y, -100), mask=mask))
    K = oracles.tangent_kernels(model, x)
    for m, value in tangent_by_hand(K["first"], y, mask & labelled).items():
        assert both.value(m, "first") == pytest.approx(value, rel=1e-9)


# ---------------------------------------------------------------------------------------------- precision and wrappers


def test_single_precision_agrees_with_double(device: str) -> None:
    x, y = examples()
    model, start = moved(mlp()).to(device), state(mlp())
    double = richter.measure(model, richter.Probe(x, y), initial=start)
    single = richter.measure(model.float(), richter.Probe(x.float(), y), initial=start)
    assert_close(single, double, rel=1e-4, errors=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_numbers(dtype: torch.dtype, device: str) -> None:
    x, y = examples()
    model = moved(mlp()).to(device)
    double = richter.measure(model, richter.Probe(x, y), initial=state(mlp()))
    half = richter.measure(model.to(dtype), richter.Probe(x.to(dtype), y), initial=state(mlp()))
    for r in half.rows:
        assert math.isfinite(r.value), r
        assert r.value == pytest.approx(double.value(r.measure, r.layer), rel=0.2, abs=0.05), r


@contextlib.contextmanager
def one_process(folder: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["compile", "compile in place", "DataParallel", "DistributedDataParallel", "both"])
def test_wrapped_models_are_measured_like_their_inner_ones(wrapper: str, tmp_path: Path) -> None:
    model, start = moved(mlp()), state(mlp())
    expected = richter.measure(model, probe(), initial=start)
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        if wrapper in ("DistributedDataParallel", "both"):
            stack.enter_context(one_process(tmp_path))
        wrapped: Any = model
        if wrapper == "compile in place":
            model.compile(backend="eager")
        elif wrapper == "compile":
            wrapped = torch.compile(model, backend="eager")
        elif wrapper == "DataParallel":
            wrapped = nn.DataParallel(model)
        elif wrapper == "DistributedDataParallel":
            wrapped = nn.parallel.DistributedDataParallel(model)
        else:
            wrapped = nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))
        wrapped(examples()[0]).sum().backward()
        prefix = next(iter(wrapped.state_dict())).removesuffix("0.weight")
        for names in (start, {f"{prefix}{k}": v for k, v in start.items()}):
            snap = richter.measure(wrapped, probe(), initial=names)
            assert snap.layers == ["0", "2", "4", "*"]
            assert_close(snap, expected)
        watch = richter.Observer(wrapped, probe(), when=1, budget=None)
        watch(0)
        moved(model)
        late = watch(1)
        assert late is not None
        assert late.value("weight_change", "0") > 0
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------- layers, memory and chunks


def test_some_layers_only() -> None:
    model, p = mlp(), probe()
    whole = richter.measure(model, p)

    def layers(chosen: Any) -> list[str]:
        snap = richter.measure(model, p, layers=chosen)
        for r in snap.rows:
            assert r.value == pytest.approx(whole.value(r.measure, r.layer), rel=1e-10, nan_ok=True)
        return snap.layers

    assert layers("2") == ["2"]
    assert layers(["4", "0"]) == ["0", "4"]
    assert layers("[02]") == ["0", "2"]
    assert layers("*") == ["0", "2", "4"]
    assert layers(lambda name: name != "2") == ["0", "4"]
    for nothing in ("7", ["0", "7"], lambda name: False, []):
        with pytest.raises(SelectionError, match=r"0, 2, 4"):
            richter.measure(model, p, layers=nothing)


def test_patterns_of_nested_names() -> None:
    model, x, y = gpt()
    p = richter.Probe(x, y)

    def layers(chosen: Any) -> list[str]:
        return richter.measure(model, p, ["nfc"], layers=chosen).layers

    fused = [f"transformer.h.1.attn.c_attn.{part}" for part in "qkv"]
    assert layers("transformer.h.1.attn.c_attn") == fused  # a module by its name: all maps in it
    assert layers("transformer.h.1.attn.c_attn.q") == fused[:1]
    assert layers("transformer.h.*.mlp.c_fc") == ["transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_fc"]
    others = [f"transformer.h.1.{k}" for k in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert layers("transformer.h.1") == [*fused, *others]
    assert layers(["lm_head", "*.wpe"]) == ["transformer.wpe", "lm_head"]
    assert layers(lambda name: name.endswith("attn.c_proj")) == [f"transformer.h.{i}.attn.c_proj" for i in (0, 1)]


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", "lstm"])
@pytest.mark.parametrize("chunk", [1, 4])
def test_the_size_of_chunks_changes_no_number(name: str, chunk: int) -> None:
    case = CASES[name]
    model, (x, y), start = case.build(), case.batch(11), state(case.build(seed=1))
    whole, parts = (richter.measure(model, richter.Probe(x, y, chunk=c, kernel=5), [*FEW, "double_centred_nfc"],
                                    initial=start, output=case.output) for c in (256, chunk))  # fmt: skip
    assert_close(parts, whole)


class Scaled(nn.Module):
    """W (g * dropout(x)) with W = [I I]: the kernels of W and of g, which is read by no linear map, are both x . x'."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.readout = nn.Dropout(0.5), nn.Linear(6, 3, bias=False)
        self.gain = nn.Parameter(torch.ones(6))
        with torch.no_grad():
            self.readout.weight.copy_(torch.eye(3).repeat(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.gain * self.dropout(x))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_all_layers_are_of_one_draw(mode: str) -> None:
    """In train mode, too, the kernels of all layers are kernels of one function: one draw of dropout."""
    K = richter.kernels.ntk(Scaled().double(), draw(12, 6), per_layer=True, mode=mode)
    torch.testing.assert_close(K["readout"].diagonal() / 3, K[""].diagonal())


@pytest.mark.parametrize("chunk", [1, 7])
def test_the_size_of_chunks_changes_no_draw(chunk: int) -> None:
    """What dropout draws for an example does not depend on the examples it is measured with."""
    whole, parts = (richter.measure(dropout(), probe(chunk=c), FEW, mode="train") for c in (256, chunk))
    assert_close(parts, whole)


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_little_memory_changes_no_number(name: str) -> None:
    """The least that works, and a few sizes above it, give what plenty gives."""
    case = CASES[name]
    model, p = case.build(), richter.Probe(*case.batch(10), kernel=4)
    plenty, worked = richter.measure(model, p, FEW, output=case.output), 0
    for power in range(12, 24, 2):
        with contextlib.suppress(MemoryBudgetError):
            assert_close(richter.measure(model, p, FEW, output=case.output, memory=2**power), plenty)
            worked += 1
    assert 1 < worked < 6


def test_little_memory_means_small_chunks() -> None:
    sizes: list[int] = []
    model = mlp()
    model[0].register_forward_hook(lambda m, args, z: sizes.append(len(z)))
    p = probe(200, kernel=2)
    richter.measure(model, p, ["nfc"], memory="1GiB")
    assert max(sizes) == 200
    sizes.clear()
    richter.measure(model, p, ["nfc"], memory="20KiB")
    assert max(sizes) < 50


# ------------------------------------------------------------------------------------------------------ standard errors


def left_out(values: list[float]) -> float:
    """sqrt((G-1)/G sum (v - mean)^2) over G values with one group left out each."""
    G, mean = len(values), sum(values) / len(values)
    return math.sqrt((G - 1) / G * sum((v - mean) ** 2 for v in values))


@pytest.mark.parametrize("n", [24, 21, 8, 5])
def test_errors_are_those_of_measuring_again_without_each_group(n: int) -> None:
    """Example i belongs to group i mod 8; nfc is left out over all examples, the kernel over its own."""
    x, y = examples(n)
    model, start, groups = moved(mlp()), state(mlp()), min(8, n)
    measures = ["nfc", "cnfc", "c_uc_ratio", "tangent_cka", "tangent_alignment", "tangent_stable_rank"]
    snap = richter.measure(model, richter.Probe(x, y), measures, initial=start)
    without = []
    for g in range(groups):
        rows = torch.arange(n) % groups != g
        without.append(richter.measure(model, richter.Probe(x[rows], y[rows]), measures, initial=start))
    for r in snap.rows:
        expected = left_out([s.value(r.measure, r.layer) for s in without])
        assert r.error == pytest.approx(expected, rel=1e-5, abs=1e-12), r
        assert r.error > 1e-6 or r.layer == "4"  # the read-out's K is the same for all examples


def test_errors_over_kernel_examples_leave_out_kernel_examples() -> None:
    x, y = examples(40)
    p = richter.Probe(x, y, kernel=19)
    rows = p.kernel_rows()
    without = []
    for g in range(8):
        keep = rows[torch.arange(19) % 8 != g]
        without.append(richter.measure(mlp(), richter.Probe(x[keep], y[keep]), ["tangent_cka"]))
    snap = richter.measure(mlp(), p, ["tangent_cka"])
    for layer in ("0", "2", "4", "*"):
        expected = left_out([s.value("tangent_cka", layer) for s in without])
        assert snap.error("tangent_cka", layer) == pytest.approx(expected, rel=1e-6)


def test_errors_of_masked_tokens_leave_out_examples() -> None:
    model, x, y = heads(n=16)
    mask = lengths(16, 4)
    snap, without = richter.measure(model, richter.Probe(x, y, mask=mask), FEW), []
    for g in range(8):
        rows = torch.arange(16) % 8 != g
        without.append(richter.measure(model, richter.Probe(x[rows], y[rows], mask=mask[rows]), FEW))
    for m in FEW:
        expected = left_out([s.value(m, "first") for s in without])
        assert snap.error(m, "first") == pytest.approx(expected, rel=1e-6)


def test_errors_shrink_with_examples() -> None:
    small, large = (richter.measure(mlp(), probe(n, kernel=2), ["nfc"]).error("nfc", "0") for n in (32, 2048))
    assert large < small / 3


# ------------------------------------------------------------------------------------------------ a knob does something


def passes(model: nn.Module, run: Callable[[], Any]) -> list[int]:
    """Sizes of the batches that go through the model's first layer."""
    sizes: list[int] = []
    handle = model[0].register_forward_hook(lambda m, args, z: sizes.append(len(z)))
    run()
    handle.remove()
    return sizes


def both(a: Any, b: Any) -> tuple[Any, Any]:
    return a, b


def dropout() -> nn.Module:
    model = mlp()
    model[1] = nn.Dropout(0.5)
    return model.train()


def value(snap: richter.Snapshot | None, m: str = "nfc", layer: str = "0") -> float:
    assert snap is not None
    return snap.value(m, layer)


def within(memory: str) -> str:
    try:
        return str(value(richter.measure(mlp(), probe(), memory=memory)))
    except MemoryBudgetError as error:
        return type(error).__name__


# each entry gives two results that differ in one parameter only
MEASURE_KNOBS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "model": lambda: both(*(value(richter.measure(mlp(seed), probe())) for seed in (0, 1))),
    "probe": lambda: both(*(value(richter.measure(mlp(), probe(n))) for n in (20, 24))),
    "measures": lambda: both(*(richter.measure(mlp(), probe(), m).measures for m in (None, ["nfc"]))),
    "initial": lambda: both(*(value(richter.measure(mlp(), probe(), initial=state(mlp(seed))), "weight_change")
                              for seed in (1, 2))),
    "cotangents": lambda: both(*(value(richter.measure(mlp(), probe(), cotangents=c))
                                 for c in (None, random_outputs(2)))),
    "layers": lambda: both(*(richter.measure(mlp(), probe(), layers=k).layers for k in (None, "0"))),
    "memory": lambda: both(*map(within, ("1GiB", "1KiB"))),
    "output": lambda: both(*(value(richter.measure(mlp(), richter.Probe(examples()[0], None), output=o))
                             for o in (None, lambda f: f[:, :1]))),
    "mode": lambda: both(*(value(richter.measure(dropout(), probe(), mode=m)) for m in ("eval", "train"))),
    "seed": lambda: both(*(value(richter.measure(dropout(), probe(), mode="train", seed=s)) for s in (0, 1))),
    "step": lambda: both(*(richter.measure(mlp(), probe(), ["nfc"], step=s).rows[0].step for s in (None, 3))),
    "matrices": lambda: both(*(set(richter.measure(mlp(), probe(), ["nfc"], matrices=m).arrays) for m in (0, 5))),
}  # fmt: skip


def seen(**options: Any) -> list[int]:
    watch = richter.Observer(mlp(), probe(), **{"measures": ["weight_change"], "budget": None, **options})
    for step in range(6):
        watch(step)
    return watch.frame.step.unique().tolist()


def stored(times: int = 1, **options: Any) -> SimpleNamespace:
    """A run on disk, opened so many times."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(times):
            watch = richter.Observer(mlp(), probe(), run=folder, **options)
            watch(0)
            watch.close()
        run = richter.runs.open(folder)
        return SimpleNamespace(settings=run.settings, arrays=run.arrays, sessions=len(run.sessions))


def refused_twice(resume: bool) -> bool:
    try:
        return stored(2, resume=resume).sessions == 2
    except RichterError:
        return False


OBSERVER_KNOBS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "model": lambda: both(*(value(richter.Observer(mlp(seed), probe())(0)) for seed in (0, 1))),
    "probe": lambda: both(*(value(richter.Observer(mlp(), probe(n))(0)) for n in (20, 24))),
    "run": lambda: both(0 if richter.Observer(mlp(), probe()).writer is None else 1, stored().sessions),
    "settings": lambda: both(*(stored(settings={"lr": lr}).settings for lr in (0.1, 0.2))),
    "resume": lambda: both(*map(refused_twice, (False, True))),
    "matrices": lambda: both(*(len(stored(matrices=m).arrays) for m in (5, 6))),
    "when": lambda: both(seen(when=2), seen(when=3)),
    "measures": lambda: both(*(richter.Observer(mlp(), probe(), measures=m)(0).measures for m in (None, ["nfc"]))),
    "initial": lambda: both(*(value(richter.Observer(mlp(), probe(), initial=i)(0), "weight_change")
                              for i in (None, state(mlp(1))))),
    "budget": lambda: both(seen(when=1), seen(when=1, budget=1e-12)),
    "options": lambda: both(*(richter.Observer(mlp(), probe(), **o)(0).layers for o in ({}, {"layers": "2"}))),
}  # fmt: skip


def token_value(**options: Any) -> float:
    model, x, y = heads()
    return value(richter.measure(model, richter.Probe(x, **{"y": y, **options}), ["nfc"]), layer="first")


PROBE_KNOBS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "x": lambda: both(*(value(richter.measure(mlp(), richter.Probe(draw(24, 5, seed=s), examples()[1])))
                        for s in (1, 2))),
    "y": lambda: both(*(value(richter.measure(mlp(), richter.Probe(examples()[0], y)), "tangent_cka")
                        for y in (examples()[1], examples()[1].flip(0)))),
    "chunk": lambda: both(*(max(passes(m := mlp(), lambda m=m, c=c: richter.measure(m, probe(40, chunk=c))))
                            for c in (256, 10))),
    "kernel": lambda: both(*(value(richter.measure(mlp(), probe(kernel=k)), "tangent_cka") for k in (10, None))),
    "mask": lambda: both(token_value(), token_value(mask=lengths(12, 4))),
    "ignore_index": lambda: both(*(token_value(ignore_index=i) for i in (-100, 2))),
    "loss": lambda: both(*(value(richter.measure(mlp(), probe(loss=f), ["fact"]), "fact") for f in (None, nn.MSELoss()))),
    "weight_decay": lambda: both(*(value(richter.measure(mlp(), probe(weight_decay=w), ["fact_error"]), "fact_error")
                                   for w in (0.1, 0.2))),
}  # fmt: skip

LOADER_KNOBS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "loader": lambda: both(*(indices(richter.Probe.from_loader(TensorDataset(MANY, y), n=20))
                             for y in (CLASSES, CLASSES.flip(0)))),
    "n": lambda: both(*(richter.Probe.from_loader(SOURCES["loader"](), n=n).n for n in (20, 30))),
    "balanced": lambda: both(*(richter.Probe.from_loader(SOURCES["loader"](), n=310, balanced=b).y.bincount().tolist()
                               for b in (True, False))),
    "seed": lambda: both(*(indices(richter.Probe.from_loader(SOURCES["loader"](), n=30, seed=s)) for s in (0, 1))),
    "options": lambda: both(*(richter.Probe.from_loader(SOURCES["loader"](), n=30, **o).chunk
                              for o in ({}, {"chunk": 3}))),
}  # fmt: skip

KNOBS = {"measure": (richter.measure, MEASURE_KNOBS), "Observer": (richter.Observer, OBSERVER_KNOBS),
         "Probe": (richter.Probe, PROBE_KNOBS), "from_loader": (richter.Probe.from_loader, LOADER_KNOBS)}  # fmt: skip


@pytest.mark.parametrize(("of", "knob"), [(of, knob) for of, (_, table) in KNOBS.items() for knob in table])
def test_a_knob_does_something(of: str, knob: str) -> None:
    a, b = KNOBS[of][1][knob]()
    assert a == a  # NaN is no result
    assert a != b


@pytest.mark.parametrize("of", KNOBS)
def test_every_parameter_has_such_a_test(of: str) -> None:
    function, table = KNOBS[of]
    assert list(table) == list(inspect.signature(function).parameters)
