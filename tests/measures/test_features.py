"""Features: intensity, quality, utilisation, effective dimensions and kappa are those of their definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracles
from richter.core import SelectionError
from richter.instrument.statistics import features as samples
from richter.measures import features
from richter.measures.features import analyse, deff

NUMBERS = ("kappa_cka", "deff_intensity", "deff_utilisation", "deff_quality", "quality_top", "utilisation_top", "constant")
CURVES = ("intensity", "quality", "utilisation")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(n: int = 60, p: int = 7, C: int = 3, seed: int = 0, bias: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """Features with a mean and a class structure, class ids, and outputs of a last layer with a bias."""
    ids = torch.arange(n) % C
    Phi = normal(n, p, seed=seed) * torch.linspace(2, 0.3, p, dtype=torch.float64) + normal(C, p, seed=seed + 1)[ids] + 1
    return Phi, ids, Phi @ normal(p, C, seed=seed + 2) + bias * normal(C, seed=seed + 3)


def hot(ids: Tensor, C: int = 3) -> Tensor:
    return torch.nn.functional.one_hot(ids, C).double()


def agrees(a: features.FeatureAnalysis, expected: dict[str, Any]) -> None:
    for name in NUMBERS:
        assert getattr(a, name) == pytest.approx(expected[name], rel=1e-8, abs=1e-10), name
    for name in CURVES:
        r = len(expected[name])
        assert torch.allclose(getattr(a, name)[:r], expected[name], rtol=1e-8, atol=1e-10), name
        assert not getattr(a, name)[r:].any()


@pytest.mark.parametrize("kind", ["classes", "regression", "scalar", "unbalanced", "empty class", "wide"])
@pytest.mark.parametrize("held_out", [False, True])
def test_analyse_is_the_definition(kind: str, held_out: bool) -> None:
    C = 1 if kind == "scalar" else 3
    sizes = (5, 20) if kind == "wide" else (60, 7)
    Phi, ids, f = drawn(*sizes, C=C)
    if kind in ("unbalanced", "empty class"):
        ids = (torch.arange(len(Phi)) % 9 == 0).long() if kind == "empty class" else (torch.arange(len(Phi)) % 9).clamp(max=2)
    Y = f.sin() + 0.1 if kind in ("regression", "scalar") else hot(ids)
    other = drawn(4 if kind == "wide" else 45, sizes[1], C=C, seed=20)
    if held_out and kind == "wide":
        other = tuple(t[:, :2] if t.dim() == 2 and t is not other[0] else t for t in other)
        f, Y, ids = f[:, :2], hot(ids % 2, 2), ids % 2
    Z = other[2].cos() if kind in ("regression", "scalar") else hot(other[1] % Y.shape[1], Y.shape[1])
    aside = (other[0], Z, other[2]) if held_out else None
    a = analyse(Phi, Y, f, *(aside or ()))
    agrees(a, oracles.feature_measures(Phi, Y, f, kind not in ("regression", "scalar"), aside))
    assert a.one_hot == (kind not in ("regression", "scalar"))


def test_class_ids_and_one_hot_targets_of_any_size_are_the_same() -> None:
    Phi, ids, f = drawn()
    one, two, three = analyse(Phi, ids, f), analyse(Phi, hot(ids), f), analyse(Phi, 30 * hot(ids), f)
    for name in NUMBERS:
        assert getattr(one, name) == getattr(two, name) == pytest.approx(getattr(three, name), rel=1e-12)


def test_numpy_in_numpy_out_and_torch_in_torch_out() -> None:
    Phi, ids, f = drawn()
    a, b = analyse(Phi, ids, f), analyse(Phi.numpy(), ids.numpy(), f.numpy())
    for name in (*CURVES, "directions", "cumulative_quality", "cumulative_utilisation"):
        assert isinstance(getattr(a, name), Tensor)
        assert isinstance(getattr(b, name), np.ndarray)
        assert np.array_equal(getattr(a, name).numpy(), getattr(b, name))
    assert a.kappa_cka == b.kappa_cka
    assert isinstance(a.kappa_cka, float)


def test_the_eigenfunctions_are_those_of_the_kernel() -> None:
    """T e_k = rho_k e_k, |e_k| = 1, and the kernel is their sum."""
    Phi, ids, f = drawn()
    a = analyse(Phi, ids, f)
    e = Phi @ a.directions / a.intensity.sqrt()
    K = Phi @ Phi.T / len(Phi)
    assert torch.allclose(K @ e, e * a.intensity, rtol=0, atol=1e-12)
    assert torch.allclose(e.T @ e / len(Phi), torch.eye(7, dtype=torch.float64), atol=1e-12)


def test_outputs_without_a_bias_use_the_features_and_nothing_else() -> None:
    """The utilisation sums up to 1 on the fitting sample; with a bias it does not, because no feature is the constant."""
    Phi, ids, f = drawn(bias=0.0)
    assert analyse(Phi, ids, f).cumulative_utilisation[-1] == pytest.approx(1, abs=1e-12)
    assert analyse(Phi, ids, f + normal(3, seed=9)).cumulative_utilisation[-1] < 0.999


def minimum(a1: float, a2: float, C: int = 4, each: int = 10, p: int = 9) -> tuple[Tensor, Tensor]:
    """Features with the kernel a1 |1><1| + a2 P of indicator outputs, in a random basis; and class ids."""
    ids = torch.arange(C * each) % C
    Phi = torch.cat([math.sqrt(a1) * torch.ones(C * each, 1, dtype=torch.float64), math.sqrt(a2 * C) * hot(ids, C)], 1)
    return Phi @ torch.linalg.qr(normal(p, p))[0][:C + 1], ids


@pytest.mark.parametrize(("a1", "a2"), [(1.0, 1.0), (5.0, 0.2), (1e-6, 3.0)])
def test_the_minimum_projection_operator_has_kappa_zero(a1: float, a2: float) -> None:
    """Whatever a1 and a2 are: they drop out."""
    Phi, ids = minimum(a1, a2)
    a = analyse(Phi, ids, hot(ids, 4))
    assert a.kappa_cka == pytest.approx(0, abs=1e-12)
    assert a.regime == "minimum"
    assert a.margin == pytest.approx(0.1)
    assert a.deff_intensity == pytest.approx(4, rel=1e-9)
    assert a.deff_utilisation == pytest.approx(4, rel=1e-9)
    assert a.constant == pytest.approx(1, abs=1e-9)
    assert a.quality_top == pytest.approx(1, abs=1e-9)
    assert a.rank == 4  # P holds the constant


def test_kappa_centres_the_projector_not_the_outputs() -> None:
    """Centring the outputs first would give another number: a direction in which they are nearly constant would count whole."""
    Phi, ids, f = drawn()
    centred = f - f.mean(0)
    assert abs(analyse(Phi, ids, f).kappa_cka - analyse(Phi, ids, centred).kappa_cka) > 1e-3


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10 ** 6), st.sampled_from([0.01, 1.0, 300.0]), st.integers(1, 3))
def test_laws(seed: int, scale: float, C: int) -> None:
    """A rotation of the features, their scale, an invertible map of the outputs and the order of examples change nothing but the
    intensities, which go with the square of the scale."""
    Phi, _, f = drawn(40, 5, C, seed)
    Y = f.sin()
    a = analyse(Phi, Y, f)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    turn = torch.linalg.qr(normal(5, 5, seed=seed + 7))[0]
    M = normal(C, C, seed=seed + 8) + 3 * torch.eye(C, dtype=torch.float64)
    b = analyse((scale * Phi @ turn)[order], Y[order], (f @ M)[order])
    assert torch.allclose(b.intensity, scale ** 2 * a.intensity, rtol=1e-8)
    for name in NUMBERS:
        assert getattr(b, name) == pytest.approx(getattr(a, name), rel=1e-6, abs=1e-9), name
    for v in (a.kappa_cka, a.constant, a.quality_top, a.utilisation_top):
        assert -1e-12 <= v <= 1 + 1e-12
    assert 1 - 1e-9 <= a.deff_utilisation <= 5 + 1e-9
    assert 1 - 1e-9 <= a.deff_quality <= 5 + 1e-9


def test_many_examples_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    Phi, ids, f = drawn(200)
    Phi = Phi + 1e4  # products of such numbers lose the digits of what is centred
    whole = analyse(Phi, ids, f)
    monkeypatch.setattr(samples, "ROWS", 7)
    parts = analyse(Phi, ids, f)
    assert parts.kappa_cka == pytest.approx(whole.kappa_cka, rel=1e-9)
    assert parts.kappa_cka == pytest.approx(analyse(Phi - 1e4, ids, f).kappa_cka, rel=1e-7)


def test_single_precision_outputs_that_sum_to_zero_span_one_dimension_less() -> None:
    Phi, ids, f = drawn()
    f = (f - f.mean(1, keepdim=True)).float()
    assert analyse(Phi.float(), ids, f).dimension == 2
    assert analyse(Phi, ids, torch.cat([f[:, :2], f[:, :1]], 1)).dimension == 2


def test_outputs_of_half_precision_that_are_the_same_but_for_rounding_span_one_dimension() -> None:
    Phi, ids, f = drawn()
    same = torch.stack([f[:, 0], (f[:, 0] * (1 + 2e-3 * normal(60, seed=4).clamp(-1, 1)))], 1)
    assert analyse(Phi, ids % 2, same).dimension == 2
    assert analyse(Phi, ids % 2, same.bfloat16()).dimension == 1


def test_the_utilisation_is_relative_to_the_space_that_the_outputs_span() -> None:
    Phi, ids, f = drawn(bias=0.0)
    a = analyse(Phi, ids, torch.cat([f[:, :2], f[:, :1] - f[:, 1:2]], 1))
    assert a.dimension == 2
    assert a.cumulative_utilisation[-1] == pytest.approx(1, abs=1e-12)


def test_directions_of_few_examples_are_those_of_all_features() -> None:
    """They are found in a basis of what the examples span."""
    Phi, ids, f = drawn(5, 20)
    a = analyse(Phi, ids, f)
    assert a.directions.shape == (20, 5)
    e = Phi @ a.directions / a.intensity[:5].sqrt()
    assert torch.allclose(e.T @ e / 5, torch.eye(5, dtype=torch.float64), atol=1e-10)


def test_effective_dimension() -> None:
    assert deff(torch.ones(5)) == pytest.approx(5)
    assert deff(torch.tensor([3.0, 0.0])) == 1
    assert math.isnan(deff(torch.zeros(3)))
    assert deff(torch.zeros(3), empty=0.0) == 0


# ------------------------------------------------------------------------------------------------- what is said, and refused


def test_held_out_examples_that_are_few_are_warned_of() -> None:
    Phi, ids, f = drawn(400, 30, bias=0)
    few = drawn(50, 30, seed=5, bias=0)
    a = analyse(Phi, ids, f, *few)
    assert a.cumulative_utilisation[-1] > 1.05
    assert [n for n in a.notes if "50 examples are too few to evaluate 30 features" in n and "300 examples or more" in n]
    assert not analyse(Phi, ids, f, *drawn(301, 30, seed=5)).notes
    assert not analyse(Phi, ids, f).notes


@pytest.mark.parametrize(("change", "sentence"), [
    ("wide", "20 features of 6 examples: at most 6 of them can be linearly independent"),
    ("duplicated", "only 7 of the 9 features are linearly independent"),
    ("zero", "the features are zero on every example"),
    ("constant", "the features are equal for all examples: kappa_cka is undefined"),
    ("unbalanced", "classes are unbalanced"), ("empty", "1 of 3 classes have no example: the quality refers to the other 2"),
    ("still", "the outputs are equal for all examples: kappa_cka is undefined"),
    ("silent", "the outputs are zero on every example, so that no feature is used"),
    ("untaught", "the targets are zero on every example, so that no feature has a quality"),
    ("few", "the outputs span 3 dimensions on 3 examples, i.e. every function of these examples"),
])
def test_what_is_to_be_said(change: str, sentence: str) -> None:
    Phi, ids, f = drawn(6, 20) if change == "wide" else drawn(3 if change == "few" else 60)
    Y = hot(ids)
    match change:
        case "duplicated":
            Phi = torch.cat([Phi, Phi[:, :2]], 1)
        case "zero":
            Phi = 0 * Phi
        case "constant":
            Phi = Phi[:1].expand(60, 7)
        case "unbalanced":
            Y = hot((torch.arange(60) % 9).clamp(max=2))
        case "empty":
            Y = hot(ids % 2)
        case "still":
            f = f[:1].expand(60, 3)
        case "silent":
            f = 0 * f
        case "untaught":
            Y = 0 * Y
    a = analyse(Phi, Y, f)
    assert [n for n in a.notes if sentence in n], a.notes
    undefined = {"zero", "constant", "still", "silent", "few"}
    assert math.isnan(a.kappa_cka) == (change in undefined) == (a.regime == "undefined")
    assert math.isnan(a.deff_quality) == (change in ("zero", "untaught")) == math.isnan(a.quality_top)
    assert math.isnan(a.deff_utilisation) == (change in ("zero", "silent")) == math.isnan(a.utilisation_top)
    assert math.isnan(a.deff_intensity) == (change == "zero")


def test_duplicated_features_change_the_intensities_alone() -> None:
    Phi, ids, f = drawn()
    a, b = analyse(Phi, ids, f), analyse(torch.cat([Phi, Phi], 1), ids, f)
    assert torch.allclose(b.intensity[:7], 2 * a.intensity)
    assert not b.intensity[7:].any()
    assert b.deff_utilisation == pytest.approx(a.deff_utilisation)
    assert b.kappa_cka == pytest.approx(a.kappa_cka)


def broken(Phi: Tensor, ids: Tensor, f: Tensor, what: str) -> tuple[Any, ...]:
    bad = Phi.clone()
    bad[17, 3] = math.nan
    return {"nan": (bad, ids, f), "infinite outputs": (Phi, ids, f / 0), "lengths": (Phi[:9], ids, f), "3-d": (Phi[None], ids, f),
            "classes": (Phi, ids + 1, f), "targets": (Phi, Phi, f), "half": (Phi, ids, f, Phi),
            "other": (Phi, ids, f, Phi[:, :4], ids, f), "huge": (1e160 * Phi, ids, f),
            "tiny": (Phi, ids, 1e-170 * f), "nothing": (Phi[:0], ids[:0], f[:0])}[what]


@pytest.mark.parametrize(("what", "sentence"), [
    ("nan", r"Phi contains NaN or Inf \(1 of 420 numbers, the first in example 17\).*diverged"),
    ("infinite outputs", "outputs contains NaN or Inf"), ("lengths", "of the same n examples"), ("3-d", "of the same n examples"),
    ("classes", "class ids from 0 to 2; these go from 1 to 3"), ("targets", "give one target per output"),
    ("half", "give all three arrays of one sample, or none"), ("other", "the evaluation sample has 4 features and 3 outputs"),
    ("nothing", "of the same n examples"), ("huge", "largest number of Phi is .*e\\+160.*leaves the range"),
    ("tiny", "largest number of outputs is .*e-1"),
])
def test_bad_input_is_refused(what: str, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        analyse(*broken(*drawn(), what))
