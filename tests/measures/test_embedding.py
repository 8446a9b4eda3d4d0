"""Rank and collapse of embeddings: against the definition by singular values, in the instrument and on arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import richter
from richter.core import Mark, SelectionError
from richter.measures.embedding import MEASURES, analyse
from richter.models import mlp
from richter.testing import check_measure

NAMES = [m.name for m in MEASURES]


def rankme(Z: np.ndarray) -> float:
    """The definition, as published but for its epsilon."""
    s = np.linalg.svd(Z, compute_uv=False)
    p = s / s.sum()
    return math.exp(-sum(x * math.log(x) for x in p if x > 0))


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def test_measures_obey_the_laws() -> None:
    check_measure(*MEASURES)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 30), st.integers(1, 12), st.integers(0, 50), st.floats(-3, 3))
def test_arrays_have_the_rank_of_the_definition(n: int, d: int, seed: int, shift: float) -> None:
    Z = draw(n, d, seed=seed) * np.logspace(0, -2, d) + shift
    a = analyse(Z)
    assert a.rank == pytest.approx(rankme(Z), rel=1e-6)
    covariance = np.cov(Z.T, bias=True).reshape(d, d)
    np.testing.assert_allclose(a.eigenvalues, np.linalg.eigvalsh(covariance)[::-1], atol=1e-10)
    rotated = analyse(Z @ np.linalg.qr(draw(d, d))[0])
    assert (rotated.rank, rotated.collapse) == (pytest.approx(a.rank, rel=1e-6), pytest.approx(a.collapse))


def test_known_spectra() -> None:
    Z = np.linalg.qr(draw(64, 8))[0]
    assert analyse(Z).rank == pytest.approx(8)
    flat = draw(500, 3) @ draw(3, 10)
    assert analyse(flat).collapse == pytest.approx(0.7)
    assert analyse(flat).rank < 3
    assert "the rank is at most 5" in analyse(draw(5, 9)).notes[0]
    assert analyse(torch.from_numpy(Z)).eigenvalues.dtype == torch.float64  # type: ignore[union-attr]


def test_a_model_in_training_is_measured_on_what_it_returns() -> None:
    model = mlp([6, 20, 4], seed=0).double()
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = {k: 0.01 * v for k, v in model.state_dict().items()}
    snap = richter.measure(model, richter.Probe(x, None), NAMES, initial=start)
    assert snap.value("embedding_rank", "*") == pytest.approx(rankme(model(x).detach().numpy()), rel=1e-8)
    first = mlp([6, 20, 4], seed=0).double()
    first.load_state_dict(start)
    assert snap.value("embedding_rank_initial", "*") == pytest.approx(rankme(first(x).detach().numpy()), rel=1e-8)
    row = next(r for r in snap.rows if r.measure == "embedding_rank")
    assert row.error > 0
    without = [rankme(np.delete(model(x).detach().numpy(), np.arange(g, 40, 8), 0)) for g in range(8)]
    assert row.error == pytest.approx(math.sqrt(7 / 8 * np.square(np.array(without) - np.mean(without)).sum()), rel=1e-6)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp([6, 20, 8], seed=0)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.body(x)
        return {"h": h, "z": 0 * h + 3}


def test_what_has_no_spectrum_says_so() -> None:
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    snap = richter.measure(Both(), richter.Probe(x, None), ["embedding_rank", "embedding_collapse"], output=lambda out: out["z"])
    rows = {r.measure: r for r in snap.rows if r.layer == "*"}
    assert rows["embedding_rank"].value == pytest.approx(1)
    assert math.isnan(rows["embedding_collapse"].value)
    assert rows["embedding_collapse"].mark is Mark.UNDEFINED
    assert "same for every example" in rows["embedding_collapse"].note
    with pytest.raises(SelectionError, match="One example has no variance"):
        analyse(draw(1, 4))
