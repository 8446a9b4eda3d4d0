"""Neural collapse: every number is that of its definition, and zero where collapse is complete."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_features import drawn, hot, minimum, normal
from torch import Tensor

import oracles
from richter.core import SelectionError
from richter.measures import collapse
from richter.measures.collapse import analyse

NAMES = ("nc1", "nc1_trace", "nc2_angle", "nc2_norm", "nc3", "nc4")


def last_layer(p: int = 7, C: int = 3) -> tuple[Tensor, Tensor]:
    return normal(C, p, seed=30), normal(C, seed=31)


@pytest.mark.parametrize("kind", ["balanced", "unbalanced", "wide", "two classes"])
def test_analyse_is_the_definition(kind: str) -> None:
    Phi, ids, _ = drawn(*((12, 30) if kind == "wide" else (60, 7)), C=2 if kind == "two classes" else 3)
    if kind == "unbalanced":
        ids = (torch.arange(60) % 9).clamp(max=2)
    W, b = last_layer(Phi.shape[1], int(ids.max()) + 1)
    c, expected = analyse(Phi, ids, W, b), oracles.collapse_measures(Phi, ids, W, b)
    for name in NAMES:
        assert getattr(c, name) == pytest.approx(expected[name], rel=1e-8, abs=1e-12), name
    assert bool(c.notes) == (kind == "unbalanced")


def test_without_a_last_layer_there_is_no_nc3_and_no_nc4() -> None:
    Phi, ids, _ = drawn()
    c, whole = analyse(Phi.numpy(), ids.numpy()), analyse(Phi, ids, *last_layer())
    assert math.isnan(c.nc3)
    assert math.isnan(c.nc4)
    assert (c.nc1, c.nc2_angle) == (whole.nc1, whole.nc2_angle)
    assert analyse(Phi, ids, last_layer()[0]).nc4 != whole.nc4  # the bias counts


@pytest.mark.parametrize(("a1", "a2"), [(1.0, 1.0), (5.0, 0.2), (1e-6, 3.0)])
def test_features_of_the_minimum_projection_operator_have_collapsed(a1: float, a2: float) -> None:
    """NC1 and NC2 hold; NC3 and NC4 for the classifier of least norm whose bias costs nothing, not for the one without a bias."""
    Phi, ids = minimum(a1, a2)
    Y, mean = hot(ids, 4), Phi.mean(0)
    W = (Y - 0.25).T @ torch.linalg.pinv(Phi - mean, rtol=1e-10).T
    c = analyse(Phi, ids, W, 0.25 - W @ mean)
    for name in NAMES:
        assert getattr(c, name) < 1e-12, name
    plain = analyse(Phi, ids, Y.T @ torch.linalg.pinv(Phi, rtol=1e-10).T)
    assert plain.nc4 == 0
    assert (plain.nc3 > 0.05 or a1 > 1)


def test_random_features_have_not_collapsed() -> None:
    """Two unit vectors that know nothing of each other are sqrt(2) apart."""
    c = analyse(normal(300, 200), torch.arange(300) % 10, normal(10, 200, seed=1))
    assert c.nc1 > 1
    assert c.nc3 == pytest.approx(math.sqrt(2), abs=0.05)
    assert c.nc4 > 0.7


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10 ** 6), st.sampled_from([0.01, 300.0]))
def test_laws(seed: int, scale: float) -> None:
    """Shift, rotation, scale and order of the examples change nothing, but the trace, which goes with the fourth power."""
    Phi, ids, _ = drawn(45, 6, 3, seed)
    W, b = normal(3, 6, seed=seed + 5), normal(3, seed=seed + 6)
    a = analyse(Phi, ids, W, b)
    turn, shift = torch.linalg.qr(normal(6, 6, seed=seed + 7))[0], normal(6, seed=seed + 8)
    order = torch.randperm(45, generator=torch.Generator().manual_seed(seed))
    moved = (scale * (Phi @ turn + shift))[order]
    c = analyse(moved, ids[order], W @ turn, scale * (b - W @ turn @ shift))
    for name in NAMES:
        factor = scale ** 4 if name == "nc1_trace" else 1
        assert getattr(c, name) == pytest.approx(factor * getattr(a, name), rel=1e-7, abs=1e-9 * factor), name


def test_classes_that_have_nearly_collapsed_keep_their_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second pass subtracts the means: a difference of second moments would be lost beside them."""
    ids = torch.arange(60) % 3
    near = normal(3, 7, seed=1)[ids] * 1e3 + 1e-6 * normal(60, 7, seed=2)
    within = analyse(near, ids).nc1
    monkeypatch.setattr(collapse, "ROWS", 7)
    assert analyse(near, ids).nc1 == pytest.approx(within, rel=1e-9)
    larger = normal(3, 7, seed=1)[ids] * 1e3 + 1e-3 * normal(60, 7, seed=2)
    assert within == pytest.approx(1e-6 * analyse(larger, ids).nc1, rel=1e-3)
    assert 0 < within < 1e-15


def test_a_mean_far_away_leaves_no_direction_of_rounding() -> None:
    """C class means about their own mean span C - 1 dimensions, whatever is left of the last one."""
    Phi, ids, _ = drawn()
    assert analyse(Phi + 1e7, ids).nc1 == pytest.approx(analyse(Phi, ids).nc1, rel=1e-6)


@pytest.mark.parametrize(("labels", "sentence", "undefined"), [
    (torch.arange(60) % 2, "1 of 3 classes have no example: the numbers refer to the other 2", ()),
    (torch.zeros(60).long(), "all examples belong to one class", NAMES),
    ((torch.arange(60) == 7).long() + 2 * (torch.arange(60) > 30).long(), "1 of 3 classes have one example", ()),
    ((torch.arange(60) % 9).clamp(max=2), r"classes are not balanced \(7 to 46 examples\)", ()),
])
def test_what_is_to_be_said(labels: Tensor, sentence: str, undefined: tuple[str, ...]) -> None:
    Phi, *_ = drawn()
    c = analyse(Phi, labels, *last_layer())
    assert [n for n in c.notes if re.search(sentence, n)], c.notes
    assert tuple(name for name in NAMES if math.isnan(getattr(c, name))) == undefined


def test_fewer_examples_than_classes() -> None:
    """Each class is its own mean: nothing is within classes, which is no collapse."""
    c = analyse(normal(3, 7), torch.tensor([0, 2, 5]), *last_layer(7, 6))
    assert math.isnan(c.nc1)
    assert math.isnan(c.nc1_trace)
    assert not math.isnan(c.nc2_angle)
    assert "every class has one example, which is the class mean" in c.notes[1]
    assert "3 of 6 classes" in c.notes[0]


def test_features_that_are_zero_have_no_collapse() -> None:
    c = analyse(torch.zeros(60, 7), torch.arange(60) % 3, *last_layer())
    assert all(math.isnan(getattr(c, name)) for name in NAMES)
    assert "all class means are equal" in c.notes[0]


def test_a_class_in_the_middle_points_nowhere() -> None:
    means = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    c = analyse(means[torch.arange(6) % 3] + 0, torch.arange(6) % 3)
    assert math.isnan(c.nc2_angle)
    assert c.nc1 == 0
    assert "so it has no direction" in c.notes[-1]


@pytest.mark.parametrize(("change", "sentence"), [
    ({"Phi": torch.full((60, 7), math.nan)}, "Phi contains NaN or Inf.*diverged"),
    ({"labels": torch.rand(60)}, "not for regression"),
    ({"labels": torch.arange(59) % 3}, "of the same n examples"), ({"labels": -torch.arange(60)}, "whole numbers from 0 on"),
    ({"weight": torch.ones(3, 6)}, "with p = 7 features"), ({"weight": torch.ones(2, 7), "bias": None}, "every class up to 2"),
    ({"bias": torch.ones(2)}, "bias needs one number for each of the 3 classes"), ({"weight": None}, "bias= needs weight="),
])
def test_bad_input_is_refused(change: dict[str, Tensor], sentence: str) -> None:
    Phi, ids, _ = drawn()
    given_ = {"Phi": Phi, "labels": ids, "weight": last_layer()[0], "bias": last_layer()[1], **change}
    with pytest.raises(SelectionError, match=sentence):
        analyse(**given_)


def test_lists_and_single_precision() -> None:
    Phi, ids, _ = drawn()
    assert analyse(Phi.float().numpy(), ids.tolist()).nc1 == pytest.approx(analyse(Phi, ids).nc1, rel=1e-4)
    assert isinstance(analyse(np.asarray(Phi), ids).nc1, float)
