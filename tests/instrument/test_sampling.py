"""Outputs that are drawn of very many: every one with its chance, and means over all of them that are right on the average."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import oracles
import richter
from richter.instrument.cotangents import random_outputs
from richter.instrument.evaluate import jackknife
from richter.instrument.probe import OneHot, counts
from richter.instrument.statistics.per_output import OWN_KERNELS, SampledOutputs, by_labels, inclusion, uniform
from richter.measures.measure import Measure

SIZES = st.lists(st.integers(1, 200), min_size=9, max_size=40)
POPULATIONS = {"one each": [1] * 30, "one of them has most": [90] + [1] * 38, "two heavy ones": [60, 60] + [1] * 38,
               "as words": [max(1, 100 // i) for i in range(1, 60)], "alike": [3, 4, 5] * 12}


def grouped(sizes: list[int]) -> Tensor:
    """Labels of each output in every group of examples."""
    return torch.stack([torch.bincount(torch.arange(i, i + size) % 8, minlength=8) for i, size in enumerate(sizes)]).double()


def sample(labels: Tensor, seed: int) -> SampledOutputs:
    return by_labels(torch.arange(len(labels)) * 3, labels, 8, torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(sizes=SIZES)
def test_chances(sizes: list[int]) -> None:
    chances = inclusion(np.array(sizes, dtype=float), 8)
    assert chances == pytest.approx(oracles.chances(sizes, 8), rel=1e-9)
    assert chances.sum() == pytest.approx(8)
    assert ((chances > 0) & (chances <= 1)).all()


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(sizes=SIZES, seed=st.integers(0, 1000))
def test_what_is_in_proportion_to_the_labels_has_no_error(sizes: list[int], seed: int) -> None:
    """But for those that are never missed, which count as what they are."""
    drawn, values = sample(grouped(sizes), seed), np.array(sizes, dtype=float)
    mine = values[drawn.picked.numpy() // 3]
    assert len(set(drawn.picked.tolist())) == 8
    assert drawn.weights is not None
    assert drawn.weights @ mine == pytest.approx(values.mean(), rel=1e-9)
    for i, weights in zip(drawn.chosen, drawn.without_chosen, strict=True):
        if len(drawn.chosen) > 1:
            assert weights @ np.delete(mine, i) == pytest.approx(values.mean(), rel=1e-9)


@pytest.mark.parametrize("name", POPULATIONS)
def test_each_is_drawn_with_its_chance_and_the_mean_is_right_on_the_average(name: str) -> None:
    sizes, draw, seeds = POPULATIONS[name], np.random.default_rng(0), 1000
    labels = grouped(sizes)
    values = (0.3 + np.array(sizes)) * np.exp(0.3 * draw.standard_normal(len(sizes)))
    often, means, within = np.zeros(len(sizes)), [], []
    for seed in range(seeds):
        drawn = sample(labels, seed)
        places = drawn.picked.numpy() // 3
        often[places] += 1
        assert drawn.weights is not None
        means.append(drawn.weights @ values[places])
        error = jackknife([w @ np.delete(values[places], i) for i, w in zip(drawn.chosen, drawn.without_chosen, strict=True)])
        within.append(abs(means[-1] - values.mean()) <= error)
    chances = np.array(oracles.chances(sizes, 8))
    assert (np.abs(often / seeds - chances) <= 5 * np.sqrt(chances * (1 - chances) / seeds) + 1e-12).all()
    assert np.mean(means) == pytest.approx(values.mean(), abs=5 * np.std(means) / math.sqrt(seeds))
    assert 0.58 <= np.mean(within) <= 0.78  # of a normal one: 0.68


def test_each_with_the_same_chance() -> None:
    often = np.zeros(20)
    for seed in range(2000):
        drawn = uniform(torch.arange(20), 8, torch.Generator().manual_seed(seed))
        assert (drawn.weights, drawn.among, list(drawn.chosen)) == (None, 20, list(range(8)))
        often[drawn.picked.numpy()] += 1
    assert (np.abs(often / 2000 - 0.4) < 5 * math.sqrt(0.24 / 2000)).all()


def test_few_outputs_are_all_taken() -> None:
    drawn = by_labels(torch.arange(5), torch.ones(5, 8, dtype=torch.float64), 8, torch.Generator())
    assert (drawn.drawn, drawn.weights, drawn.picked.tolist()) == (False, None, [0, 1, 2, 3, 4])


def test_labels_are_counted() -> None:
    ids = torch.tensor([[1, 0, 2], [2, 2, 1], [1, 0, 2], [3, 3, 3]])
    real = torch.tensor([[True, False, True], [True, True, True], [True, True, True], [False, True, True]])
    Y, rows = OneHot(ids, real, 4), torch.tensor([3, 0, 2])
    dense = Y[rows]
    for targets in (Y, Y[torch.arange(4)]):
        found = counts(targets, rows, 2)
        assert found is not None
        outputs, labels = found
        assert outputs.tolist() == dense.any(0).nonzero().flatten().tolist()
        torch.testing.assert_close(labels, torch.stack([dense[::2, outputs].sum(0), dense[1::2, outputs].sum(0)], 1))
    assert counts(torch.cat([Y[torch.arange(4)], torch.full((4, 1), 0.5)], 1), rows, 2) is None


# --------------------------------------------------------------------------------------------------------- in a measurement


def exact(model: nn.Module, x: Tensor, Y: Tensor) -> dict[str, float]:
    return {k: oracles.tangent_alignment(K, Y) for k, K in oracles.tangent_kernels(model, x).items()}


def averaged(model: nn.Module, x: Tensor, y: Tensor, seeds: int, **options: Any) -> dict[str, tuple[float, float]]:
    """Means over seeds and their standard errors, by layer."""
    values: dict[str, list[float]] = {}
    for seed in range(seeds):
        snap = richter.measure(model, richter.Probe(x, y, kernel_examples=None), ["tangent_alignment"],
                               cotangents=random_outputs(64, seed), **options)
        for r in snap.rows:
            values.setdefault(r.layer, []).append(r.value)
    return {k: (float(np.mean(v)), float(np.std(v) / math.sqrt(seeds))) for k, v in values.items()}


class Heads(nn.Module):
    """Two heads: what is beyond the trunk is asked by one of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.fine, self.coarse = nn.Linear(5, 8), nn.Linear(8, 70), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.trunk(x))
        return torch.cat([self.fine(h), self.coarse(h)], 1)


@pytest.mark.parametrize("labels", ["two heads", "one class has most"])
def test_the_mean_over_seeds_is_that_over_all_outputs(labels: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 5, dtype=torch.float64)
    if labels == "two heads":
        model: nn.Module = Heads().double()
        y = torch.cat([F.one_hot(torch.arange(60) * 7 % 53, 70), F.one_hot(torch.arange(60) % 3, 3)], 1).double()
        Y = y
    else:
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 70)).double()
        y = torch.cat([torch.zeros(40), torch.arange(1, 21)]).long()
        Y = F.one_hot(y, 70).double()
    known = averaged(model, x, y, 24)
    for layer, truth in exact(model, x, Y).items():
        mean, error = known[layer]
        assert mean == pytest.approx(truth, abs=4 * error + 1e-12), layer


def test_kernels_of_single_outputs_are_had_without_each_group() -> None:
    """By a measure of one's own."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 80)).double(), torch.randn(24, 5, dtype=torch.float64)
    size = Measure("size", lambda K: K.diagonal(dim1=1, dim2=2).mean().item(), (OWN_KERNELS,))
    row = richter.measure(model, richter.Probe(x, None, kernel_examples=None), [size]).row("size", "0")
    assert row.mark is richter.core.Mark.ESTIMATED
    K = oracles.tangent_kernels(model, x)["0"].diagonal(dim1=1, dim2=3)  # "n n k"
    chosen = uniform(torch.arange(80), 8, torch.Generator().manual_seed(0)).picked
    own = K.diagonal(dim1=0, dim2=1)[chosen]  # "v n"
    assert row.value == pytest.approx(own.mean().item(), rel=1e-10)
    few = jackknife([own[:, torch.arange(24) % 8 != g].mean().item() for g in range(8)])
    drawn = jackknife([own[torch.arange(8) != i].mean().item() for i in range(8)])
    assert row.error == pytest.approx(math.hypot(few, drawn), rel=1e-8)


def test_a_group_that_is_nearly_all_there_is_can_be_left_out() -> None:
    """Its share is not taken away from sums, in which nothing else is seen."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 4)).double(), torch.randn(24, 5).double()
    x[3] *= 1e6
    y = torch.arange(24) % 4
    row = richter.measure(model, richter.Probe(x, y, kernel_examples=None), ["tangent_alignment"]).row("tangent_alignment", "0")
    Y = F.one_hot(y, 4).double()
    fewer = [oracles.tangent_alignment(oracles.tangent_kernels(model, x[keep])["0"], Y[keep])
             for keep in (torch.arange(24) % 8 != g for g in range(8))]
    assert row.error == pytest.approx(jackknife(fewer), rel=1e-6)


def test_products_below_single_precision_are_made_in_double() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 70)), torch.randn(24, 5)
    with torch.no_grad():
        model[2].weight *= 3e-22
    y = torch.arange(24) % 20
    values = [richter.measure(m, richter.Probe(inputs, y, kernel_examples=None),
                              ["tangent_alignment"]).value("tangent_alignment", "0")
              for m, inputs in ((model, x), (copy.deepcopy(model).double(), x.double()))]
    assert values[0] == pytest.approx(values[1], rel=1e-4)
