"""Cost of overfitting: its bound, effective ranks, and the class of a spectrum."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import install_import_hook
from scipy.optimize import bisect

from richter.core import SelectionError

with install_import_hook("richter.theory", "checker.typechecked"):
    from richter.theory import eigenlearning as eigen
    from richter.theory import overfitting as over

I = np.arange(1, 1501.0)  # noqa: E741


def by_bisection(lam: np.ndarray, n: int) -> float:
    """E_0 with kappa found by halving, without logarithms."""
    kappa = bisect(lambda c: (lam / (lam + c)).sum() - n, 1e-18, lam.sum(), xtol=1e-18, rtol=1e-14, maxiter=500)
    return float(n / (n - ((lam / (lam + kappa)) ** 2).sum()))


def test_anchors() -> None:
    """Numbers of an independent script."""
    assert over.bound(I**-1.3, 50) == pytest.approx(1.4246, abs=5e-5)
    assert over.bound(I**-2, 50) == pytest.approx(2.0084, abs=5e-5)
    assert over.cost(I**-2, I**-1.5, 50, 0.0) == pytest.approx(1.0585, abs=5e-5)
    assert over.cost(I**-1.3, I**-1.5, 50, 0.0) == 1.0
    spiked = np.r_[np.ones(10), np.full(10**5, 1e-5)]
    assert over.bound(np.exp(-np.sqrt(np.arange(1, 20_001.0))), 100) == pytest.approx(5.071, abs=1e-3)
    assert over.bound(spiked, 400) == pytest.approx(by_bisection(spiked, 400), rel=1e-9)


@pytest.mark.parametrize(("alpha", "limit"), [(1.2, 1.1994), (1.5, 1.4992), (2.0, 1.9990), (3.0, 2.9985)])
def test_power_laws_have_their_exponent_as_bound(alpha: float, limit: float) -> None:
    lam, _, count = eigen.power_law(alpha, 1.5)
    assert over.bound(lam, 1000, multiplicity=count) == pytest.approx(limit, abs=6e-5)


def test_exponential_spectra_cost_n() -> None:
    assert [over.bound(np.exp(-np.arange(1, 400.0)), n) for n in (10, 40, 160)] == pytest.approx([10, 40, 160], rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 120), decay=st.floats(0, 3), noise=st.sampled_from([0.0, 0.1, 3.0]))
def test_the_cost_is_bounded_and_bounds_enclose(seed: int, n: int, decay: float, noise: float) -> None:
    draw = np.random.default_rng(seed)
    lam = np.sort(np.arange(1, 301.0) ** -decay * draw.uniform(0.3, 1, 300))[::-1]
    target = draw.random(300) ** 6
    bound = over.bound(lam, n)
    assert bound == pytest.approx(by_bisection(lam, n), rel=1e-7)
    assert 1 <= over.cost(lam, target, n, noise) <= bound * (1 + 1e-9)
    assert over.cost(lam, 0 * target, n, 1.0) == pytest.approx(bound, rel=1e-9)
    low, high = over.bounds(lam, n)
    assert 1 <= low <= bound * (1 + 1e-12)
    assert high >= bound * (1 - 1e-12)


def test_effective_ranks_by_their_definition() -> None:
    lam = torch.from_numpy(np.sort(np.random.default_rng(0).random(30))[::-1].copy())
    r, R = over.effective_ranks(lam)
    assert isinstance(r, torch.Tensor)
    for k in range(30):
        tail = lam[k:]
        assert r[k].item() == pytest.approx((tail.sum() / tail[0]).item(), rel=1e-12)
        assert R[k].item() == pytest.approx((tail.sum() ** 2 / tail.square().sum()).item(), rel=1e-12)
    assert (r <= R * (1 + 1e-12)).all()
    assert (r**2 * (1 + 1e-12) >= R).all()


LONG = np.arange(1, 10**5 + 1.0)


@pytest.mark.parametrize(("lam", "kind", "limit"), [
    (LONG**-1.2, "tempered", 1.2), (LONG**-2, "tempered", 2.0), (LONG[:5000] ** -3, "tempered", 3.0),
    (LONG[:2000] ** -1.5, "tempered", 1.5), (LONG**-1.01, "benign", None), (LONG**-0.9, "benign", None),
    (1 / ((LONG + 1) * np.log(LONG + 1) ** 2), "benign", None), (np.exp(-LONG[:400]), "catastrophic", None),
    (np.exp(-LONG[:3000] / 100), "catastrophic", None), (np.exp(-np.sqrt(LONG[:20_000])), "catastrophic", None)])
def test_classes(lam: np.ndarray, kind: str, limit: float | None) -> None:
    seen = over.classify(lam)
    assert seen.kind == kind
    assert str(seen).startswith(f"{kind}: ")
    assert "if those beyond" in str(seen)
    if limit is not None:
        assert seen.limit == pytest.approx(limit, rel=0.02)
        assert seen.ratio_cut > seen.ratio  # a cut tail looks less benign


def test_a_cut_tail_would_mislead() -> None:
    """Without the continuation the effective ranks of i^-1.2 are those of a spectrum three times as bad."""
    seen = over.classify(LONG[:2000] ** -1.2)
    assert seen.ratio == pytest.approx(0.2, rel=0.03)
    assert seen.ratio_cut > 0.5


def test_trusted_ranks_matter() -> None:
    """A spectrum that changes its exponent at rank 100."""
    lam = np.where(LONG[:5000] < 100, LONG[:5000] ** -1.3, 100**0.7 * LONG[:5000] ** -2.0)
    assert over.classify(lam, trusted=90).limit < 1.9
    assert over.classify(lam, trusted=2000).limit == pytest.approx(2, rel=0.05)


def test_the_class_of_data() -> None:
    """The Laplace kernel on a line has eigenvalues i^-2."""
    x = np.sort(np.random.default_rng(0).random(800))
    K = np.exp(-np.abs(x[:, None] - x))
    seen = over.classify(eigen.modes(K, np.sin(6 * x)).eigenvalues)
    assert seen.kind == "tempered"
    assert 1.9 < seen.limit < 2.3


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: over.bound(I**-1.3, 1500), "n=1500 examples and 1500 eigenvalues.*interpolates fewer than 1500"),
    (lambda: over.bound(np.r_[1.0, 0.5, 0, 0], 2), "n=2 examples and 2 eigenvalues above 0"),
    (lambda: over.cost(I**-1.3, 0 * I, 50, 0.0), "the target is zero, and so is the noise"),
    (lambda: over.bound(-I, 3), "eigenvalues reach -1.5e\\+03: those of a kernel are not negative"),
    (lambda: over.effective_ranks(I), "eigenvalues are not sorted.*flip"),
    (lambda: over.bounds(I**-1.0, 0), "n=0; a whole number, at least 1"),
    (lambda: over.classify(I[:12] ** -1.0), "12 eigenvalues above rounding errors, of which 1 are to be trusted.*at least 20"),
    (lambda: over.classify(I**-1.0, trusted=1500), "of which 1500 are to be trusted"),
    (lambda: over.classify(I * math.nan), "eigenvalues contains NaN"),
])
def test_bad_input(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        call()
