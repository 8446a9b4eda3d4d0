"""Parts of the experiments on escape: the network of rank two, layers put in, the two laws, ranks at rests."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from richter.experiments.escape import circle, depth, growth, images, saddles
from richter.experiments.kit import Results, Task
from richter.theory import escape


def test_the_circle_and_its_scan() -> None:
    X, G = circle.circle()
    scan = circle.scan(X, G, 721)
    rows = np.linspace(0, 2 * np.pi, 721)[:40]
    slow = [abs(sum(max(0.0, math.cos(a) * x[0] + math.sin(a) * x[1]) * g for x, (g,) in zip(X, G, strict=True))) for a in rows]
    np.testing.assert_allclose(scan[:40], slow, atol=1e-12)
    assert abs(escape.speed(circle.two_rows(), X, G)) == pytest.approx(0.5, rel=1e-12)
    assert [np.linalg.norm(W) for W in circle.two_rows()] == pytest.approx([1, 1, 1])


def test_layers_put_in() -> None:
    ring = circle.circle()
    for L in (3, 5):
        for where in ("behind", "before"):
            weights = depth.appended(L, where)
            assert len(weights) == L
            assert [np.linalg.norm(W) for W in weights] == pytest.approx([1] * L)
        assert abs(escape.speed(depth.appended(L, "behind"), *ring)) == pytest.approx(0.5, rel=1e-12)
    assert abs(escape.speed(depth.appended(5, "before"), *ring)) == pytest.approx(0.5 / 4, rel=1e-12)
    np.testing.assert_allclose(depth.ratios([np.diag([4.0, 2.0]), np.ones((1, 2)), np.outer([1, 2], [1, 1])], 4),
                               [2, np.nan, depth.LARGEST, np.nan])


@pytest.mark.parametrize("L", [2, 3, 5])
def test_both_laws_are_one(L: int) -> None:
    """c = |theta| / sqrt(L) with the speed on the one sphere, |theta| with that on the other."""
    t = np.linspace(0, 0.4 / 2.0, 5)
    c = np.asarray(escape.growth(0.9, 2.0, L, 0.3 * t))
    np.testing.assert_allclose(growth.law(0.9 * math.sqrt(L), L ** (-L / 2) * 2.0, L, 0.3 * t), math.sqrt(L) * c, rtol=1e-12)
    assert growth.times_until(growth.EscapeGrowthSettings(), 1.0, L)[-1] > 0


def test_a_network_is_followed() -> None:
    """Of one unit in each of two layers with one example the flow of L_0 is exponential."""
    W, X, y = [torch.ones(1, 1).double()] * 2, torch.ones(1, 1).double(), torch.full((1, 1), 2.0).double()
    t = np.linspace(0, 0.5, 4)
    norms = growth.norms_along_flow(W, X, y, 0.1, t, own=False)
    np.testing.assert_allclose(norms, 0.1 * math.sqrt(2) * np.exp(2 * t), rtol=1e-6)
    assert growth.norms_along_flow(W, X, y, 0.1, t, own=True)[-1] < norms[-1]


def test_images_are_of_a_seed() -> None:
    (x, y), (other, _) = (images.images("digits", 50, seed) for seed in (0, 1))
    assert x.shape == (50, 64)
    assert float(y.sum(1).abs().max()) < 1e-12
    assert not torch.equal(x, other)
    W = images.initial([64, 300, 10], 0.01, 0)
    assert [tuple(w.shape) for w in W] == [(300, 64), (10, 300)]
    assert W[0].std().item() == pytest.approx(0.01 / 8, rel=0.02)


def test_ranks_at_rests() -> None:
    nan = np.nan
    s = saddles.EscapeSaddlesSettings()
    first = [[100, 200, 0.4, 3, 1, 1, 1, nan, nan], [300, 500, 0.3, 9, 2, 3, 3, nan, nan]]
    rests = np.full((2, saddles.MOST, 9), nan)
    rests[0, :2] = first
    rests[1, 0] = [100, 500, 0.4, 8, 1, 1, 1, 1, 1]
    start = np.array([[60, 50, 50, 10, nan, nan], [60, 50, 50, 50, 50, 10]])
    both = [Task(s, depth=L, seed=0) for L in (4, 6)]

    def results(rests: np.ndarray, at: str = "plateaus") -> Results:
        rows = [{"rests": a, "start": b} for a, b in zip(rests, start, strict=True)]
        return Results(saddles.EscapeSaddlesSettings(at=at), both, rows)  # type: ignore[arg-type]

    r = results(rests)
    assert (saddles.first_rank(r), saddles.growth(r)) == (1, 1)
    assert saddles.first_rank(results(rests, "start")) == 50
    assert saddles.growth(results(rests, "start")) == 0
    none = results(np.full_like(rests, nan))
    assert (saddles.first_rank(none), saddles.growth(none)) == (50, 0)
