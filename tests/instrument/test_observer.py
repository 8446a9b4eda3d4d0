"""What an Observer keeps: rows, curves, scalars, initial weights, and a run on disk that it may be resumed from."""

from __future__ import annotations

import contextlib
import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import richter
from observing import FEW, assert_close, draw, examples, mlp, moved, probe, state
from richter.core import RichterError, SelectionError
from richter.instrument.cotangents import random_outputs


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
    steps, values, errors = (column.tolist() for column in watch.series("weight_change", "2"))
    assert steps == [3, 4, 8]
    assert values == [s.value("weight_change", "2") for s in watch.snapshots]
    assert len(errors) == 3
    assert values[0] == 0.0 < values[1] < values[2]
    assert watch.series("tangent_cka").value.tolist() == [s.value("tangent_cka", "*") for s in watch.snapshots]
    assert watch.series("tangent_cka").error.tolist() == [s.error("tangent_cka", "*") for s in watch.snapshots]


def readers(folder: Path) -> dict[str, Any]:
    """Return a Snapshot, an Observer with and without a run, and its Run, all of the same last step."""
    subjects: dict[str, Any] = {}
    for name, run in (("in memory", None), ("with a run", folder)):
        model = mlp()
        with richter.Observer(model, probe(), run=run, when=1, budget=None, measures=["weight_change", "tangent_cka"]) as watch:
            for step in (3, 4, 8):
                watch(step, loss=1 / step)
                moved(model)
        subjects[name] = watch
    return {"snapshot": watch.snapshots[-1], **subjects, "run": richter.runs.load(folder)}


def test_a_snapshot_an_observer_and_a_run_are_read_alike(tmp_path: Path) -> None:
    subjects = readers(tmp_path / "run")
    snap = subjects["snapshot"]
    for name, subject in subjects.items():
        for measure, layer in (("weight_change", "2"), ("tangent_cka", "*")):
            series = subject.series(measure, layer)
            assert series.step.tolist() == ([8] if name == "snapshot" else [3, 4, 8])
            assert (series.step.dtype, series.value.dtype, series.error.dtype) == (np.int64, np.float64, np.float64)
            assert subject.value(measure, layer) == series.value[-1] == snap.value(measure, layer)
            np.testing.assert_equal(series.error[-1], snap.error(measure, layer))
        assert subject.value("tangent_cka") == snap.value("tangent_cka")  # the whole model is the default
        assert {"weight_change", "tangent_cka"} <= {*subject.frame.columns, *subject.frame.get("measure", ())}
        with pytest.raises(SelectionError, match=r"no measure 'weight_chance'. Close to it: 'weight_change'"):
            subject.value("weight_chance", "2")
        with pytest.raises(SelectionError, match=r"no layer '9' for 'weight_change'. It has: '0', '2'"):
            subject.series("weight_change", "9")
        if name == "snapshot":
            assert subject.scalar_names == []
        else:
            assert subject.scalar_names == ["loss"]
            assert subject.scalars("loss").value.tolist() == [1 / 3, 1 / 4, 1 / 8]
        with pytest.raises(SelectionError, match="has no scalar 'lost'"):
            subject.scalars("lost")
    kinds = [type(subject) for subject in subjects.values()]
    for reader in ("value", "series", "scalars"):
        assert len({str([*inspect.signature(getattr(kind, reader)).parameters.values()]) for kind in kinds}) == 1


def test_a_snapshot_has_no_scalars() -> None:
    snap = richter.measure(mlp(), probe(), ["nfc"])
    assert snap.series("nfc", "0").step.tolist() == [0]  # it has no step
    with pytest.raises(SelectionError, match=r"no scalar 'loss': scalars are logged by an Observer or a run"):
        snap.scalars("loss")


def test_an_observer_that_has_not_measured_has_no_measures() -> None:
    watch = richter.Observer(mlp(), probe())
    with pytest.raises(SelectionError, match=r"this Observer has no measure 'nfc'. It has: none"):
        watch.value("nfc", "0")


def test_scalars_are_kept_at_every_call(counted: list[int]) -> None:
    watch = richter.Observer(mlp(), probe(), when=3, budget=None)
    loss = (torch.ones(2, requires_grad=True) * 1.5).mean()
    watch(0, loss=loss)
    watch(1, loss=np.float32(0.5), accuracy=0.25)
    watch(2)
    watch(3, loss=1)
    assert counted == [0, 3]
    expected = pd.DataFrame({"step": [0, 1, 3], "loss": [1.5, 0.5, 1.0], "accuracy": [math.nan, 0.25, math.nan]})
    pd.testing.assert_frame_equal(watch.scalar_frame, expected)


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
    assert watch.scalar_frame.loss.tolist() == [1 / 3, 1 / 2, 1.0]


def test_a_failed_measurement_keeps_rows_and_scalars() -> None:
    """A diverged step raises; what was seen before and what comes after it is kept."""
    model = mlp()
    watch = richter.Observer(model, probe(), when=1, budget=None, measures=["nfc"], on_error="raise")
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
    assert watch.scalar_frame.step.tolist() == [0, 1, 2]
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
    run = richter.runs.load(tmp_path)
    assert run.status == "finished"
    assert run.settings == {"lr": 0.05}
    assert run.about["parameters"] == sum(p.numel() for p in mlp().parameters())
    pd.testing.assert_frame_equal(run.frame, watch.frame)
    pd.testing.assert_frame_equal(run.scalar_frame, watch.scalar_frame)
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
    back = pytest.warns(richter.RichterWarning, match="step 1 comes after step 2, with which")
    with back if lost else contextlib.nullcontext():
        trained(second, range(3 - lost, 6))
    second.close()
    for resumed, whole in zip(second.series("weight_change", "0"), straight.series("weight_change", "0"), strict=True):
        np.testing.assert_array_equal(resumed, whole)
    pd.testing.assert_frame_equal(richter.runs.load(tmp_path).frame, straight.frame)
    assert len(richter.runs.load(tmp_path).sessions) == 2


def test_what_a_run_refuses(tmp_path: Path) -> None:
    richter.Observer(mlp(), probe(), run=tmp_path / "a").close()
    with pytest.raises(RichterError, match=r"another architecture: '4\.weight' has shape \(2, 6\) in this model and \(3, 6\)"):
        richter.Observer(mlp(outputs=2), probe(), run=tmp_path / "a", resume=True)
    with pytest.raises(RichterError, match="initial weights of its own; leave initial= out"):
        richter.Observer(mlp(), probe(), run=tmp_path / "a", resume=True, initial=state(mlp()))
    with pytest.raises(RichterError, match="settings=, resume= and overwrite= need a run on disk"):
        richter.Observer(mlp(), probe(), resume=True)
    with pytest.raises(RichterError, match="matrices=-1"):
        richter.Observer(mlp(), probe(), run=tmp_path / "b", matrices=-1)
    with richter.Observer(mlp(), probe(), run=tmp_path / "a", resume=True), \
            pytest.raises(RichterError, match="this process is already writing the run"):
        richter.Observer(mlp(), probe(), run=tmp_path / "a", resume=True)


@pytest.mark.parametrize(("step", "scalars", "words"), [
    ("a", {}, r"watch\('a'\): the step is a str, and a whole number is needed, .*: watch\(step, loss=loss\)"),
    (None, {}, r"watch\(None\): the step is a NoneType"), (0.5, {}, r"watch\(0.5\): the step is a float"),
    (0, {"loss": "a"}, r"watch\(step, loss=...\) is 'a', a str, and one number is needed, .* text belongs into settings="),
    (0, {"loss": torch.ones(3)}, r"loss=...\) is a tensor of shape \(3,\), and one number is needed, .* Give loss.mean\(\)"),
    (0, {"accuracy": None}, r"accuracy=...\) is None, a NoneType")])
def test_wrong_steps_and_scalars_are_one_sentence(step: Any, scalars: dict[str, Any], words: str) -> None:
    """In the first call; later they are a warning, and the training goes on."""
    watch = richter.Observer(mlp(), probe(), measures=FEW)
    with pytest.raises(SelectionError, match=words):
        watch(step, **scalars)
    watch(0, loss=1.0)
    with pytest.warns(richter.RichterWarning, match=words):
        watch(step, **scalars)
    watch(torch.tensor(3), loss=torch.tensor(2.0))
    assert watch.scalars("loss").value.tolist()[-1] == 2.0


def test_a_cell_that_runs_twice_gets_a_run_of_its_own(tmp_path: Path) -> None:
    """In a notebook the first Observer was never closed: the second run gets the next number, or the place of the first."""
    first = richter.Observer(mlp(), probe(), run=tmp_path / "first", measures=FEW)
    first(0, loss=1.0)
    with pytest.warns(richter.RichterWarning, match=r"already a run in .*first: this one is written to .*first-2") as seen:
        second = richter.Observer(mlp(), probe(), run=tmp_path / "first", measures=FEW)
    assert seen[0].filename == __file__  # the line of the user is shown
    assert "resume=True to continue the earlier run, or overwrite=True to delete it" in str(seen[0].message)
    second(0, loss=2.0)
    second.close()
    third = richter.Observer(mlp(), probe(), run=tmp_path / "first", measures=FEW, overwrite=True)
    third(0, loss=3.0)
    third.close()
    losses = {run.name: run.scalars("loss").value.tolist() for run in richter.runs.find(tmp_path)}
    assert losses == {"first": [3.0], "first-2": [2.0]}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "first-2"]  # nothing is left of what was deleted
    (tmp_path / "first" / "notes.txt").write_text("mine")
    with pytest.raises(RichterError, match=r"holds other files beside its run \(notes.txt\), which overwrite=True would delete"):
        richter.Observer(mlp(), probe(), run=tmp_path / "first", overwrite=True)
    with pytest.raises(RichterError, match=r"resume=True continues the run .*, and overwrite=True deletes it"):
        richter.Observer(mlp(), probe(), run=tmp_path / "first-2", overwrite=True, resume=True)
    assert len(list(richter.runs.find(tmp_path))) == 2


def test_an_observer_is_told_early(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'every'"):
        richter.Observer(mlp(), probe(), run=tmp_path / "a", every=10)
    assert not (tmp_path / "a").exists()
    watch = richter.Observer(mlp(), probe(), run=tmp_path / "a", measures=FEW, on_error="raise")
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
    kept = sorted({step for _, _, step in richter.runs.load(tmp_path).arrays})
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
