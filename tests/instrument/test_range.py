"""Weights of any size: correlations do not depend on it. Products that leave the range of single precision are made in double,
and what leaves that as well is a row that says so."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import richter
from richter.core import Mark
from richter.instrument.observe import Measurement
from richter.measures import alignment, fact, nfa, ranks

MEASURES = [m for family in (nfa, fact, alignment, ranks) for m in family.MEASURES
            if not m.name.startswith("fact")]  # which compare weights with gradients: a number of its own at every scale
X = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
Y = torch.arange(24) % 3


def network(exponent: int, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    """A homogeneous network with weights times 2^exponent, which loses no bit, and its initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.ReLU(), nn.Linear(8, 6, bias=False), nn.ReLU(),
                              nn.Linear(6, 3, bias=False)).to(dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2.0 ** exponent)
        return model, {k: v * (1 - torch.rand(v.shape, dtype=dtype) / 2) for k, v in model.state_dict().items()}


def values(exponent: int, dtype: torch.dtype, errors: bool = True) -> dict[tuple[str, str], richter.core.Row]:
    model, initial = network(exponent, dtype)
    snap = Measurement(model, richter.Probe(X.to(dtype), Y), MEASURES, initial=initial, errors=errors).take()
    return {(r.layer, r.measure): r for r in snap.rows}


@pytest.mark.parametrize("errors", [True, False])
@pytest.mark.parametrize("exponent", [-60, -40, -33, -25, 25, 40, 42])
def test_correlations_of_single_precision_do_not_depend_on_the_scale(exponent: int, errors: bool) -> None:
    """2^40 is 1e12: the squares of its gradients, 1e24, are beyond single precision; at 2^-40 they vanish."""
    plain, scaled = values(0, torch.float32, errors), values(exponent, torch.float32, errors)
    assert plain.keys() == scaled.keys()
    for key, row in plain.items():
        assert scaled[key].value == pytest.approx(row.value, rel=1e-4, abs=1e-5, nan_ok=True), key
        assert scaled[key].mark is row.mark, key


@pytest.mark.parametrize("exponent", [-300, -120, -90, -80, 60, 100, 150, 250])
def test_double_precision_is_right_or_says_why_not(exponent: int) -> None:
    plain, scaled = values(0, torch.float64), values(exponent, torch.float64)
    for key, row in scaled.items():
        if math.isnan(row.value):
            assert row.mark in (Mark.UNDEFINED, Mark.FAILED)
            assert row.note
        else:
            assert row.value == pytest.approx(plain[key].value, rel=1e-8), key
    if exponent > 200:
        assert "beyond the range of floating point numbers" in scaled["0", "nfc"].note


@pytest.mark.parametrize("scale", [1e12, 1e-12, 1e-30, 1e-37])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_no_size_of_weights_is_an_error(scale: float, activation: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(5, 8), activation(), nn.Linear(8, 6), activation(), nn.Linear(6, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    snap = richter.measure(model, richter.Probe(X, Y))
    assert all(math.isfinite(r.value) or r.note for r in snap.rows)


def test_a_matrix_without_eigenvalues_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(K: Tensor, centred: bool, **_: object) -> float:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr("richter.instrument.statistics.kernels.leading", fail)
    model, initial = network(0, torch.float32)
    snap = richter.measure(model, richter.Probe(X, Y), ["tangent_stable_rank", "nfc"], initial=initial)
    assert snap.row("tangent_stable_rank").mark is Mark.FAILED
    assert "did not converge" in snap.note("tangent_stable_rank")
    assert math.isfinite(snap.value("nfc", "0"))


def test_an_observer_goes_on_in_double_precision() -> None:
    """Weights that grow out of the range and come back."""
    model, _ = network(0, torch.float32)
    watch = richter.Observer(model, richter.Probe(X, Y), when=1, budget=None, measures=["nfc", "tangent_cka"])
    for step, factor in enumerate((1.0, 2.0 ** 40, 1.0, 2.0 ** -80)):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(factor)
        watch(step)
    steps, cka, _ = watch.series("tangent_cka")
    assert steps.tolist() == [0, 1, 2, 3]
    assert cka == pytest.approx([cka[0]] * 4, rel=1e-5)
    assert watch.failures == []
