"""Outputs with kernels of their own, and kernels that leave the one they started as: measures, their errors, their matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import oracles
import richter
from richter import kernels
from richter.core import WHOLE, Mark, SelectionError
from richter.instrument.snapshot import Snapshot
from richter.instrument.statistics import MATRIX, Previous
from richter.instrument.statistics import per_output as own
from richter.instrument.statistics.kernels import Tangents
from richter.measures.alignment import specialisation, specialisation_matrix
from richter.measures.evolution import distance, norm, rotation, velocity
from richter.measures.measure import Measure
from richter.models import mlp
from richter.report import figures, html

EVOLUTION = ["kernel_norm", "kernel_rotation", "kernel_distance", "kernel_velocity", "effective_gamma"]
EVERY = ["specialisation", *EVOLUTION]
SEEDS = st.integers(0, 10_000)
law = settings(deadline=None, max_examples=15, derandomize=True, database=None)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stack(seed: int, k: int = 3, n: int = 9) -> Tensor:
    A = normal(seed, k, n, n)
    return A @ A.mT


def example(n: int = 18, k: int = 3) -> tuple[nn.Module, richter.Probe]:
    return mlp([5, 7, k], seed=0).double(), richter.Probe(normal(1, n, 5), torch.arange(n) % k)


def train(model: nn.Module, probe: richter.Probe, steps: int = 5, lr: float = 0.5) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(probe.x), probe.y).backward()
        optimiser.step()


def targets(probe: richter.Probe, k: int) -> Tensor:
    return nn.functional.one_hot(probe.y, k).double()


# ------------------------------------------------------------------------------------------------------- specialisation


def test_it_is_the_diagonal_of_the_matrix_over_the_rest() -> None:
    model, probe = example()
    train(model, probe)
    snap = richter.measure(model, probe, ["specialisation"], matrices=4)
    layers = kernels.ntk(model, probe.x, form="diagonal", per_layer=True)
    for layer, K in {**layers, WHOLE: sum(layers.values())}.items():
        KSM = kernels.specialisation(K, targets(probe, 3))
        assert snap.arrays[layer, "ksm"] == pytest.approx(KSM.numpy(), rel=1e-6)
        off = (KSM.sum() - KSM.trace()) / 6
        assert snap.value("specialisation", layer) == pytest.approx((KSM.trace() / 3 / off).item(), rel=1e-10)
        assert snap.arrays[layer, "ksm"].mean(0) == pytest.approx(np.ones(3), rel=1e-6)


def test_a_kernel_and_a_column_of_labels_for_each_output() -> None:
    with pytest.raises(SelectionError, match=r"kernels \(3, 9, 9\) and labels \(9, 2\): .* a kernel and a column of labels"):
        kernels.specialisation(stack(0), normal(0, 9, 2))


def test_an_error_that_cannot_be_had_says_why() -> None:
    """The one example of a class leaves with its group."""
    model, _ = example()
    probe = richter.Probe(normal(1, 18, 5), torch.tensor([2, *[0, 1] * 8, 0]))
    (row,) = [r for r in richter.measure(model, probe, ["specialisation"]).rows if r.layer == "0"]
    assert math.isfinite(row.value)
    assert math.isnan(row.error)
    assert row.note.startswith("no standard error: without one of ")
    assert "groups of examples it is 0/0 (outputs with labels of zeros (2) have no alignment" in row.note
    assert row.mark is Mark.EXACT


def test_a_read_out_shares_one_kernel_and_says_so() -> None:
    model, probe = example()
    train(model, probe)
    snap = richter.measure(model, probe, ["specialisation"], matrices=4)
    readout, hidden = (next(r for r in snap.rows if r.layer == k) for k in ("2", "0"))
    assert readout.value == pytest.approx(1.0, abs=1e-12)
    assert readout.mark is Mark.TRIVIAL
    assert readout.note == "all outputs share one kernel here, as in any read-out: 1 whatever was learned"
    assert snap.arrays["2", "ksm"] == pytest.approx(np.ones((3, 3)), abs=1e-6)
    assert hidden.mark is Mark.EXACT
    assert hidden.value != pytest.approx(1.0, abs=1e-3)
    assert hidden.error > 0


@pytest.mark.parametrize(("outputs", "y", "sentence"), [
    (1, normal(0, 12, 1), "there is only one output, and this measure compares the kernels of several outputs"),
    (3, torch.arange(12) % 2, "outputs with labels of zeros (2) have no alignment: take examples of every class")])
def test_where_it_is_undefined_it_says_why(outputs: int, y: Tensor, sentence: str) -> None:
    model = mlp([5, 7, outputs], seed=0).double()
    snap = richter.measure(model, richter.Probe(normal(1, 12, 5), y), ["specialisation"], matrices=8)
    for row in snap.rows:
        assert math.isnan(row.value)
        assert row.mark is Mark.UNDEFINED
        assert sentence in row.note
    assert not snap.arrays


def test_an_output_without_a_kernel_has_none() -> None:
    class Half(nn.Module):
        """Its second output is constant."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * torch.tensor([1.0, 0.0], dtype=torch.float64)

    snap = richter.measure(Half(), richter.Probe(normal(1, 12, 5), torch.arange(12) % 2), ["specialisation"])
    assert "outputs with a kernel of zeros (1) have no alignment" in snap.note("specialisation", WHOLE)


@law
@given(seed=SEEDS, scale=st.sampled_from([1e-3, 0.5, 7.0]))
def test_scales_and_the_order_of_outputs_and_examples_change_nothing(seed: int, scale: float) -> None:
    K, Y = stack(seed), normal(seed + 1, 9, 3)
    value = specialisation(own.crossed(K, Y))
    outputs, examples = (torch.randperm(size, generator=torch.Generator().manual_seed(seed)) for size in (3, 9))
    assert specialisation(own.crossed(K * scale, Y * torch.tensor([scale, 1.0, -2.0]))) == pytest.approx(value, rel=1e-10)
    assert specialisation(own.crossed(K[outputs], Y[:, outputs])) == pytest.approx(value, rel=1e-10)
    assert specialisation(own.crossed(K[:, examples][:, :, examples], Y[examples])) == pytest.approx(value, rel=1e-10)
    assert specialisation_matrix(own.crossed(K, Y)).mean(0).numpy() == pytest.approx(np.ones(3), rel=1e-12)


@law
@given(seed=SEEDS)
def test_a_kernel_along_its_own_labels_specialises_and_along_others_does_not(seed: int) -> None:
    Y = normal(seed, 9, 3)
    own_labels = torch.stack([torch.outer(y, y) for y in Y.T]) + 0.1 * torch.eye(9)
    assert specialisation(own.crossed(own_labels, Y)) > 1
    assert specialisation(own.crossed(own_labels[[1, 2, 0]], Y)) < 1
    assert specialisation(own.crossed(own_labels.sum(0).expand(3, 9, 9), Y)) == pytest.approx(1.0, rel=1e-12)


# ------------------------------------------------------------------------------------------- what is left without a group


def left(n: int, group: int, groups: int = 4) -> Tensor:
    return torch.arange(n) % groups != group


@law
@given(seed=SEEDS)
def test_sums_over_groups_are_those_of_the_rest(seed: int) -> None:
    K, K0, Y = stack(seed), stack(seed + 1), normal(seed + 2, 9, 3)
    crossed, evolved = own.crossed_leaving(K, Y, 4), own.evolved_leaving(own.evolved(K, K0), K, K0, 4)
    for g in range(4):
        rest = left(9, g)
        part, first = K[:, rest][:, :, rest], K0[:, rest][:, :, rest]
        assert specialisation(crossed[g]) == pytest.approx(specialisation(own.crossed(part, Y[rest])), rel=1e-9)
        alone = own.evolved(part, first)
        assert astuple(evolved[g]) == pytest.approx(astuple(alone), rel=1e-9)


def test_errors_are_those_of_a_jackknife_by_hand() -> None:
    model, probe = example()
    first = {k: v.clone() for k, v in model.state_dict().items()}
    train(model, probe)
    snap = richter.measure(model, probe, EVERY, initial=first)
    then = mlp([5, 7, 3], seed=0).double()
    K, K0 = (kernels.ntk(m, probe.x, form="full") for m in (model, then))
    Y = targets(probe, 3)
    varied: dict[str, list[float]] = {}
    for g in range(8):
        rest = left(18, g, 8)
        part, before = (Z[rest][:, :, rest] for Z in (K, K0))
        values = {**oracles.kernel_evolution(before, part), "specialisation": oracles.specialisation_ratio(part, Y[rest]),
                  "effective_gamma": oracles.effective_gamma(before, part, Y[rest])}
        for name, value in values.items():
            varied.setdefault(name, []).append(value)
    for name in ("specialisation", "kernel_norm", "kernel_rotation", "kernel_distance", "effective_gamma"):
        error = math.sqrt(7 / 8 * ((np.array(varied[name]) - np.mean(varied[name])) ** 2).sum())
        assert snap.error(name, WHOLE) == pytest.approx(error, rel=1e-6), name


# ----------------------------------------------------------------------------------------------------- evolution


@law
@given(seed=SEEDS, scale=st.sampled_from([0.3, 1.0, 4.0]))
def test_a_kernel_that_only_grows_does_not_turn(seed: int, scale: float) -> None:
    K = stack(seed)
    grown = own.evolved(scale * K, K)
    assert rotation(grown) == pytest.approx(0.0, abs=1e-14)
    assert norm(grown) == pytest.approx(scale)
    assert distance(grown) == pytest.approx(abs(scale - 1), abs=1e-14)
    assert velocity(grown, 14, 10) == pytest.approx(abs(scale - 1) / 4, abs=1e-14)
    turned = own.evolved(stack(seed + 1), K)
    assert 0 < rotation(turned) <= 1
    assert rotation(own.evolved(scale * stack(seed + 1), K)) == pytest.approx(rotation(turned), rel=1e-10)


def observed(path: Path, resume: bool = False, when: Sequence[int] = (0, 3, 10)) -> tuple[Snapshot, Tensor, Tensor]:
    """The last snapshot of a training, and the kernels at the two last ones."""
    model, probe = example()
    known: list[Tensor] = []
    watch = richter.Observer(model, probe, measures=EVERY, when=list(when), budget=None, on_error="raise", run=path)
    snap = None
    for step in range(max(when) + 1):
        if step in when:
            known.append(kernels.ntk(model, probe.x, form="full"))
            if resume and step == max(when):
                watch.close()
                watch = richter.Observer(model, probe, measures=EVERY, when=list(when), budget=None, on_error="raise", run=path,
                                         resume=True)
            snap = watch(step)
        train(model, probe, 1)
    watch.close()
    assert snap is not None
    return snap, known[-2], known[-1]


@pytest.mark.parametrize("resume", [False, True], ids=["in one go", "resumed"])
def test_the_velocity_is_per_step_since_the_last_snapshot(resume: bool, tmp_path: Path) -> None:
    snap, before, K = observed(tmp_path / "run", resume)
    expected = oracles.kernel_evolution(before, K, steps=7)["kernel_velocity"]
    assert snap.value("kernel_velocity", WHOLE) == pytest.approx(expected, rel=1e-8)
    assert snap.error("kernel_velocity", WHOLE) > 0


def test_kernels_of_another_probe_are_not_compared(tmp_path: Path) -> None:
    """The same shape, other examples. What no example enters is compared all the same."""
    moved = Measure("moved", lambda W, before: (W - before).norm().item(), (MATRIX, Previous(MATRIX)))
    model, probe = example()
    measures = ["kernel_velocity", moved]
    with richter.Observer(model, probe, run=tmp_path / "run", when=1, measures=measures, budget=None) as watch:
        watch(0)
    train(model, probe)
    other = richter.Probe(normal(2, 18, 5), probe.y)
    with richter.Observer(model, other, run=tmp_path / "run", when=1, measures=measures, budget=None, resume=True) as watch:
        first = watch(1)
        train(model, probe)
        second = watch(2)
    assert first is not None
    assert second is not None
    row = next(r for r in first.rows if r.measure == "kernel_velocity" and r.layer == WHOLE)
    assert math.isnan(row.value)
    assert row.mark is Mark.UNDEFINED
    assert "the last snapshot is of other examples: the run was resumed with another probe" in row.note
    assert first.value("moved", "0") > 0
    assert second.value("kernel_velocity", WHOLE) > 0


def test_without_an_earlier_snapshot_or_initial_weights_there_is_a_reason() -> None:
    model, probe = example()
    snap = richter.measure(model, probe, EVERY, step=3)
    assert "no earlier snapshot is known to compare with" in snap.note("kernel_velocity", WHOLE)
    for name in ("kernel_norm", "kernel_rotation", "kernel_distance", "effective_gamma"):
        assert "needs the initial weights" in snap.note(name, WHOLE)


def test_the_second_snapshot_has_a_velocity(tmp_path: Path) -> None:
    """Of the kernels and of the step something is kept at the first, though neither has anything to compare with there."""
    assert math.isfinite(observed(tmp_path / "run", when=(0, 3))[0].value("kernel_velocity", WHOLE))


def test_at_the_first_step_nothing_has_moved() -> None:
    model, probe = example()
    snap = richter.measure(model, probe, EVERY, initial=model.state_dict())
    for layer in snap.layers:
        assert [snap.value(m, layer) for m in ("kernel_norm", "kernel_rotation", "kernel_distance")] == pytest.approx([1, 0, 0])
        assert snap.value("effective_gamma", layer) == pytest.approx(0.0, abs=1e-15)


def test_no_finite_rate_makes_a_kernel_of_the_labels_own() -> None:
    """A bias alone has the kernel 1 1^T, and so have labels that are all 1."""

    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.b.expand(len(x), 1)

    model = Bias()
    probe = richter.Probe(normal(0, 9, 2), torch.ones(9, 1))
    snap = richter.measure(model, probe, ["effective_gamma"], initial=model.state_dict())
    row = next(r for r in snap.rows if r.layer == WHOLE)
    assert math.isnan(row.value)
    assert row.mark is Mark.UNDEFINED
    assert row.note == "the kernel equals y y^T, which no finite rate reaches"


# --------------------------------------------------------------------------------- many outputs, much memory, little memory


def test_one_output_after_another_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, probe = example()
    first = {k: v.clone() for k, v in model.state_dict().items()}
    train(model, probe)
    formed = richter.measure(model, probe, EVERY, initial=first)
    monkeypatch.setattr(Tangents, "fits", False)
    apart = richter.measure(model, probe, EVERY, initial=first)
    for a, b in zip(formed.rows, apart.rows, strict=True):
        assert (b.value, b.error) == pytest.approx((a.value, a.error), rel=1e-8, nan_ok=True), (a, b)
        assert (b.note, b.mark) == (a.note, a.mark)


def test_of_many_outputs_some_are_drawn_and_the_row_says_so() -> None:
    model = mlp([5, 7, 80], seed=0).double()
    x = normal(1, 90, 5)
    for y, among in ((torch.arange(90) % 80, "20 that have labels"), (None, "80")):
        probe = richter.Probe(x, y, kernel_examples=20)
        watch = richter.Observer(model, probe, measures=EVERY, when=1, budget=None, on_error="raise")
        watch(0)
        snap = watch(1)
        assert snap is not None
        for name in ("kernel_norm", "kernel_rotation", "kernel_distance", "kernel_velocity"):
            drawn = snap.note(name, "0")
            assert drawn.startswith("8 outputs drawn of ")
            unknown = "; sketch error unknown" if name == "kernel_velocity" else ""  # of the last time no output is left out
            assert drawn == f"8 outputs drawn of {among}{unknown}"
            assert math.isfinite(snap.value(name, "0"))
        assert math.isfinite(snap.value("specialisation", "0")) == (y is not None)


def test_kernels_of_another_time_that_do_not_fit_are_refused() -> None:
    _, probe = example()
    model = mlp([5, *[7] * 12, 3], seed=0).double()
    snap = richter.measure(model, probe, ["kernel_norm", "specialisation"], initial=model.state_dict(), memory=170_000)
    assert "the kernels of all layers over 18 examples, now and at another time, need memory=" in snap.note("kernel_norm", WHOLE)
    assert math.isfinite(snap.value("specialisation", WHOLE))


def test_kernels_of_other_outputs_are_not_compared() -> None:
    with pytest.raises(own.Missing, match=r"kernels \(3, 9, 9\) now and \(2, 9, 9\) before .* cannot be compared"):
        own.evolved(stack(0), stack(0, k=2))


# ------------------------------------------------------------------------------------------------------------ what is kept


def test_matrices_are_kept_as_they_are_and_symmetric_ones_to_the_last_bit() -> None:
    model, probe = example()
    train(model, probe)
    snap = richter.measure(model, probe, ["nfc", "specialisation"], matrices=5)
    assert {name for layer, name in snap.arrays if layer == "0"} == {"nfm", "agop", "ksm"}
    assert np.array_equal(snap.arrays["0", "nfm"], snap.arrays["0", "nfm"].T)
    assert not np.allclose(snap.arrays["0", "ksm"], snap.arrays["0", "ksm"].T)
    few = richter.measure(model, probe, ["nfc", "specialisation"], matrices=3).arrays
    assert set(few) == {(k, "ksm") for k in ("0", "2", WHOLE)}
    assert not richter.measure(model, probe, ["specialisation"], matrices=2).arrays


def test_a_report_shows_them(tmp_path: Path) -> None:
    observed(tmp_path / "run")
    run = richter.runs.load(tmp_path / "run")
    figure: Any = figures.specialisation(run)
    assert [ax.get_title() for ax in figure.axes if ax.get_title()] == ["0", "2", "whole model"]
    assert [ax.get_ylabel() for ax in figure.axes if ax.get_ylabel()] == ["kernels, step 0", "kernels, step 10"]
    page = html.report([run], tmp_path / "r.html").read_text(encoding="utf-8")
    assert "specialisation of the outputs" in page
    assert "How the tangent kernel evolved" in page
    assert "Not drawn" not in page


def test_a_run_without_them_is_told(tmp_path: Path) -> None:
    with richter.runs.create(tmp_path / "run") as writer:
        writer.arrays({"ksm": np.ones(3)}, layer="0", step=0)
    with pytest.raises(SelectionError, match="has no specialisation matrix: observe the measure 'specialisation'"):
        figures.specialisation(richter.runs.load(tmp_path / "run"))
