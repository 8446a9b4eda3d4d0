"""Rivals of claims about correlations, and the experiments on images and text that use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import richter
from richter import experiments
from richter.core.likeness import cosine
from richter.experiments.frame import Results
from richter.experiments.ledger import figures_at
from richter.experiments.nfa.fig2d import MapRivals, pair_entropy
from richter.experiments.rivals import Rivals, centred_correlation, milestones, rotated, shuffled, weight
from richter.experiments.running import finding
from richter.instrument.probe import Probe
from richter.kernels import ptk_covariance
from richter.models import GPT, mlp

IMAGES = ("nfa_fig2", "nfa_fig2c", "nfa_fig2d", "nfa_fig17", "nfa_slo")


def covariance(n: int, draw: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
    A = draw.standard_normal((n, n + 2))
    return A @ A.T


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (1, 4)])
def test_the_centred_correlation_is_its_definition(shape: tuple[int, int]) -> None:
    draw = np.random.default_rng(0)
    D, K = draw.standard_normal(shape), covariance(shape[0], draw)
    assert centred_correlation(D, K) == pytest.approx(cosine(D.T @ D, D.T @ K @ D), rel=1e-12)


def test_another_covariance_has_the_same_spectrum_and_other_eigenvectors() -> None:
    draw = np.random.default_rng(1)
    K = covariance(12, draw)
    Q = rotated(K, draw)
    np.testing.assert_allclose(np.linalg.eigvalsh(Q), np.linalg.eigvalsh(K))
    assert abs(cosine(Q - np.trace(Q) / 12 * np.eye(12), K - np.trace(K) / 12 * np.eye(12))) < 0.5


def test_shuffled_labels_are_the_same_labels_elsewhere() -> None:
    y = torch.arange(50)
    assert torch.equal(shuffled(y, 0).sort().values, y)
    assert not torch.equal(shuffled(y, 0), y)
    assert not torch.equal(shuffled(y, 0), shuffled(y, 1))


def test_milestones_have_start_and_end() -> None:
    assert milestones(40, 2) == {0, 1, 40}
    assert milestones(0, 5) == {0}


def moved_in_one_direction(model: nn.Module, layer: str) -> None:
    W = model.get_parameter(f"{layer}.weight")
    with torch.no_grad():
        W += torch.outer(torch.ones(W.shape[0]), torch.ones(W.shape[1]))


def test_a_movement_in_one_direction_is_correlated_with_any_covariance_and_a_gaussian_one_is_not() -> None:
    model = mlp([6, 20, 20, 3], bias=False, seed=0)
    rivals = Rivals(model, torch.randn(30, 6, generator=torch.Generator().manual_seed(0)), ["0", "2"], seed=0)
    rivals.at(0)
    moved_in_one_direction(model, "0")
    moved_in_one_direction(model, "2")
    rivals.at(1)
    arrays = rivals.arrays()
    assert np.isnan(arrays["rotated"][0]).all()
    np.testing.assert_allclose(arrays["rotated"][1], 1.0)
    assert (arrays["gaussian"][1] < 0.9).all()


def test_the_maps_of_a_fused_layer_are_those_that_the_instrument_measures() -> None:
    """K of all logits: the correlations of the maps' own movement are then those of the measure."""
    model, ids = GPT(7, 4, 12, 2, 2, seed=0), torch.randint(7, (5, 4), generator=torch.Generator().manual_seed(0))
    initial = {k: v.clone() for k, v in model.state_dict().items()}
    rivals = MapRivals(model, ids, seed=0)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    snap = richter.measure(model, Probe(ids, (ids + 1) % 7), ["cnfc"], initial=initial, layers=["blocks.*.qkv.*"])
    assert rivals.layers == [k for k in snap.layers if k != "*"]
    for layer in rivals.layers:
        K = np.asarray(ptk_covariance(model, ids, layer), dtype=float)
        moved = rivals.weight(layer) - rivals.initial[layer]
        assert centred_correlation(moved, K) == pytest.approx(snap.value("cnfc", layer), rel=1e-4)


def test_the_weight_of_a_convolution_is_read_by_patches() -> None:
    conv = nn.Conv2d(2, 3, 3)
    assert weight(nn.Sequential(conv), "0").shape == (3, 18)


def test_a_table_of_pairs_knows_what_follows() -> None:
    assert pair_entropy(np.array([0, 1] * 50)) == pytest.approx(0.0)
    draw = np.random.default_rng(0)
    assert pair_entropy(draw.integers(4, size=40_000)) == pytest.approx(np.log(4), rel=1e-3)


@pytest.mark.parametrize("name", IMAGES)
def test_every_place_has_claims_and_a_drawing_of_its_own(name: str) -> None:
    """Also where something is missing of what the paper has."""
    e = experiments.get(name)
    for place in e.covers:
        assert [c for c in e.claims if place in (c.places or (e.ref.place,))], f"{place} has no claim of its own"
        assert figures_at(place, e), f"{place} is not drawn"
    assert all(c.over == "seed" for c in e.claims)


def same(e: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Results:
    """All tasks of the smoke scale returned the same."""
    tasks = e.tasks(e.smoke)
    return Results(e.smoke, tasks, [arrays] * len(tasks))


def test_figure_2_asks_for_more_than_shuffled_labels_give() -> None:
    """Where true labels and shuffled ones give the same, what is said of labels fails."""
    e = experiments.get("nfa_fig2")
    layers = np.full((4, 5), 0.9)
    results = same(e, {"steps": np.array([0, 1, 5, 40]), "nfc": layers / 3, "cnfc": layers, "rotated": layers,
                       "gaussian": layers / 3, "c_uc_ratio": layers, "weight_change": layers, "loss": np.zeros(41),
                       "accuracy": np.array(0.99)})
    failing = {c.text for c in e.claims if not finding(c, results).holds}
    assert {c.text for c in e.claims if "less shuffled" in c.text} <= failing
    assert {c.text for c in e.claims if "drawn anew" in c.text} <= failing
    assert len(failing) >= 5


def test_figure_17_asks_for_more_than_equal_speeds_give() -> None:
    e = experiments.get("nfa_fig17")
    tasks = e.tasks(e.smoke)
    good, bad = ({name: np.full((3, 1), level) for name in ("nfc", "cnfc", "c_uc_ratio")}
                 | {"nfm": np.arange(4.0), "agop": np.array([0, 1, 2, 3 - 4 * (1 - level)])} for level in (0.9, 0.2))
    results = Results(e.smoke, tasks, [bad if t.method == "gd" else good for t in tasks])
    holding = {c.text for c in e.claims if finding(c, results).holds}
    assert holding == {c.text for c in e.claims if "SLO less descent" in c.text}
