"""Errors of ridge regression from spectra: against two equations with sixty digits, against simulation, and their laws."""

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

import oracles
from richter.core import SelectionError
from richter.kernels import infinite
from richter.kernels.dynamics import kernel_gradient_descent

with install_import_hook("richter.theory", "checker.typechecked"):
    from richter.theory import eigenlearning as eigen

I = np.arange(1, 301.0)  # noqa: E741
LAM, V2 = I**-1.5, I**-1.3
FITS = ((1.17, 1.14), (1.22, 1.20), (1.12, 1.36))


# ------------------------------------------------------------------------------------------------ the equations


@pytest.mark.parametrize("k", [math.inf, 1e9, 700.0, 90.0, 60.0, 20.0])
@pytest.mark.parametrize("ridge", [1e-9, 1e-3, 0.3, 50.0])
def test_errors_by_the_two_equations(k: float, ridge: float) -> None:
    risk = eigen.random_features(LAM, V2, 60, k, ridge, 0.4)
    test, train, kappa = oracles.ridge_risk(LAM, V2, 60, k, ridge, 0.4)
    assert risk.test == pytest.approx(test, rel=1e-8 if ridge > 1e-6 or k != 60 else 1e-4)
    assert risk.train == pytest.approx(train, rel=1e-5, abs=1e-12)
    assert risk.kappa == pytest.approx(kappa, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("k", [math.inf, 700.0, 20.0])
def test_ridgeless_errors_by_the_two_equations(k: float) -> None:
    risk = eigen.random_features(LAM, V2, 60, k, 0.0, 0.4)
    assert risk.test == pytest.approx(oracles.ridge_risk(LAM, V2, 60, k, 0.0, 0.4)[0], rel=1e-9)
    assert risk.train == pytest.approx(0.0 if k > 60 else (1 - 20 / 60) ** 2 * risk.test, abs=1e-12)


def test_anchors() -> None:
    """Numbers of an independent script, of 2,000 modes."""
    i = np.arange(1, 2001.0)
    tests = [eigen.krr(i**-1.5, i**-1.5, 256, ridge, 0.5).test for ridge in (1e-3, 0.1, 1.0, 10.0)]
    assert tests == pytest.approx([1.0236, 0.8636, 0.8203, 1.0412], abs=6e-5)
    peak = [eigen.random_features(i**-1.5, i**-1.5, 256, k, 1e-3, 0.5).test for k in (64, 128, 256, 1024)]
    assert peak == pytest.approx([1.19, 1.51, 4.82, 1.24], abs=6e-3)


@pytest.mark.parametrize(("n", "k"), [(60, math.inf), (60, 150), (60, 30)])
def test_a_simulation_within_three_per_cent(n: int, k: float) -> None:
    for ridge in (0.05, 1.0):
        test, _, learned = eigen.simulate(LAM, V2, n, k, ridge, 0.3, trials=150, seed=3)
        risk = eigen.random_features(LAM, V2, n, k, ridge, 0.3)
        assert risk.test == pytest.approx(test, rel=0.03)
        assert np.abs(np.asarray(risk.learnability) - learned).max() < 0.03


def test_least_squares() -> None:
    """More examples than modes: n / (n - m) times the noise; and a target outside of the modes."""
    lam, v2 = np.r_[LAM[:20], 0.0], np.r_[V2[:20], 0.7]
    assert eigen.krr(lam[:20], v2[:20], 50, 0.0, 0.3).test == pytest.approx(0.3 * 50 / 30, rel=1e-12)
    assert eigen.krr(lam, v2, 50, 0.0, 0.3).test == pytest.approx(50 / 30, rel=1e-12)
    assert eigen.krr(lam, v2, 50, 0.0).train == pytest.approx((30 / 50) ** 2 * 0.7 * 50 / 30, rel=1e-12)
    assert math.isinf(eigen.krr(lam, v2, 20, 0.0, 0.3).test)
    assert eigen.krr(lam[:20], v2[:20], 20, 0.0).test == 0


# ------------------------------------------------------------------------------------------------ laws


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 200), k=st.sampled_from([math.inf, 1.0, 7.0, 60.0, 500.0]),
       ridge=st.sampled_from([0.0, 1e-6, 0.1, 3.0, 1e4]), m=st.integers(1, 80), decay=st.floats(0, 6))
def test_laws(seed: int, n: int, k: float, ridge: float, m: int, decay: float) -> None:
    draw = np.random.default_rng(seed)
    lam = np.arange(1, m + 1.0) ** -decay * draw.uniform(0.5, 1, m)
    v2, order = draw.random(m), draw.permutation(m)
    risk = eigen.random_features(lam, v2, n, k, ridge, 0.2)
    L = np.asarray(risk.learnability)
    assert (L >= 0).all()
    assert (L <= 1).all()
    assert risk.test >= 0.2
    assert risk.train >= 0
    assert risk.overfitting >= 1 - 1e-12
    if math.isfinite(risk.test):
        assert risk.train <= risk.test * (1 + 1e-12)
    if math.isinf(k) and risk.kappa > 0:  # conservation
        assert L.sum() == pytest.approx(n - ridge / risk.kappa, rel=1e-8)
    if ridge == 0:
        assert L.sum() == pytest.approx(min(n, k, m), rel=1e-8)
    again = eigen.random_features(lam[order], v2[order], n, k, ridge, 0.2)  # the order of modes does not matter
    assert again.test == pytest.approx(risk.test, rel=1e-6)
    scaled = eigen.random_features(7 * lam, v2, n, k, 7 * ridge, 0.2)  # nor does the scale of the kernel
    assert scaled.test == pytest.approx(risk.test, rel=1e-6)
    doubled = eigen.random_features(lam, v2, n, k, ridge, 0.2, multiplicity=np.full(m, 2.0))
    listed = eigen.random_features(np.r_[lam, lam], np.r_[v2, v2] / 2, n, k, ridge, 0.2)
    assert doubled.test == pytest.approx(listed.test, rel=1e-6)


def test_conservation_holds_for_each_data_set() -> None:
    """sum_i L_i = Tr K (K + ridge)^-1, L_i being the diagonal of the map from coefficients to learned ones."""
    draw = np.random.default_rng(0)
    phi = draw.standard_normal((30, 300))
    K = (phi * LAM) @ phi.T
    for ridge in (0.0, 0.2):
        inverse = np.linalg.inv(K + ridge * np.eye(30))
        learned = np.einsum("m,nm,nj,jm->m", LAM, phi, inverse, phi)
        assert learned.sum() == pytest.approx(np.trace(K @ inverse), rel=1e-9)
        assert ridge or learned.sum() == pytest.approx(30, rel=1e-8)


def test_gradient_flow_from_zero_is_ridgeless_regression() -> None:
    draw = np.random.default_rng(1)
    x, y = draw.standard_normal((12, 4)), draw.standard_normal(12)
    K = infinite.ntk(x, depth=1, weight_var=2.0)
    top = np.linalg.eigvalsh(K)[-1]
    left = kernel_gradient_descent(K, y, 1 / top, 10**6, record=[10**6]).residual[-1]
    new = infinite.ntk(draw.standard_normal((5, 4)), x, depth=1, weight_var=2.0)
    flow = new @ np.linalg.solve(K, y + np.asarray(left))  # f = K a on the examples, so a = K^-1 f
    np.testing.assert_allclose(flow, new @ np.linalg.solve(K, y), rtol=1e-8)


def test_more_is_better_at_the_best_ridge() -> None:
    """Strictly less error with more examples and with more features; not so at a fixed ridge."""
    sizes = (16, 48, 128, 384)
    grid = np.array([[eigen.random_features(LAM, V2, n, k, min(eigen.optimal_ridge(LAM, V2, n, 0.5, k), 1e9), 0.5).test
                      for k in (*sizes, math.inf)] for n in sizes])
    assert np.diff(grid, axis=0).max() < -1e-4
    assert np.diff(grid, axis=1).max() < -1e-5
    fixed = [eigen.random_features(LAM, V2, 128, k, 1e-4, 0.5).test for k in sizes]
    assert max(fixed) == fixed[2] > 3 * fixed[3]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(5, 150), k=st.sampled_from([math.inf, 30.0, 400.0]),
       noise=st.sampled_from([0.0, 0.1, 2.0]))
def test_the_best_ridge_is_best(seed: int, n: int, k: float, noise: float) -> None:
    draw = np.random.default_rng(seed)
    lam, v2 = np.arange(1, 201.0) ** -draw.uniform(1, 3), draw.random(200) ** 4
    best = eigen.optimal_ridge(lam, v2, n, noise, k)
    least = eigen.random_features(lam, v2, n, k, best, noise).test if math.isfinite(best) else v2.sum() + noise
    others = [eigen.random_features(lam, v2, n, k, ridge, noise).test for ridge in (0.0, *np.geomspace(1e-8, 1e3, 60))]
    assert least <= min(others) * (1 + 1e-7)


def test_pure_noise_is_best_left_alone() -> None:
    """Also where it is drawn from a population, of which the drawn examples would be fitted."""
    assert eigen.optimal_ridge(LAM, 0 * V2, 50, 1.0) == math.inf
    assert eigen.optimal_ridge(LAM, np.full(300, 1 / 300), 50) < 1e3
    assert eigen.optimal_ridge(LAM, np.full(300, 1 / 300), 50, population=300) > 1e4


# ------------------------------------------------------------------------------------------------ power laws


@pytest.mark.parametrize(("alpha", "beta"), FITS)
@pytest.mark.parametrize("noise", [0.0, 1.0, 5.0])
def test_the_fitting_ratio_of_the_optimum(alpha: float, beta: float, noise: float) -> None:
    """The root, the minimum of the closed form, and the optimum of the exact sums."""
    root = eigen.fitting_ratio(alpha, beta, noise)
    r = np.linspace(0, 0.999, 20_001)
    assert root == pytest.approx(r[eigen.risk_at_ratio(r**2, 2000, alpha, beta, noise).argmin()] ** 2, abs=1e-3)
    lam, v2, count = eigen.power_law(alpha, beta)
    base = eigen.krr(lam, v2, 2000, 0.0, multiplicity=count).test
    ridge = eigen.optimal_ridge(lam, v2, 2000, noise * base, multiplicity=count)
    risk = eigen.krr(lam, v2, 2000, ridge, noise * base, multiplicity=count)
    assert root == pytest.approx(risk.fitting_ratio, abs=1e-3)
    assert risk.test == pytest.approx(eigen.risk_at_ratio([risk.fitting_ratio], 2000, alpha, beta, noise)[0], rel=5e-3)
    assert (root == 0) == eigen.interpolation_is_optimal(alpha, beta, noise) == (ridge == 0)


def test_published_ratios() -> None:
    seen = [[eigen.fitting_ratio(a, b, s) for s in (0.0, 1.0, 5.0)] for a, b in FITS]
    np.testing.assert_allclose(seen, [[0.0240, 0.3121, 0.6905], [0.0057, 0.2590, 0.6437], [0, 0, 0.1875]], atol=1e-4)
    assert eigen.fitting_ratio(1.5, 1.2) == pytest.approx(((1.5 - 1.2) / (0.5 * 1.2)) ** 2)  # without noise


def test_the_threshold_of_interpolation() -> None:
    edge = (1.9 - 1.5) / (1.5 * 0.5)
    assert eigen.interpolation_is_optimal(1.5, 1.9, edge * (1 - 1e-9))
    assert not eigen.interpolation_is_optimal(1.5, 1.9, edge * (1 + 1e-9))


def test_power_laws_have_no_end() -> None:
    """A million modes one by one, with integrals for the rest, beside a few thousand points."""
    i = np.arange(1, 10**6 + 1.0)
    tail = [(10**6 + 0.5) ** (1 - e) / (e - 1) for e in (1.2, 1.14)]
    lam, v2, count = np.r_[i**-1.2, 1e-7], np.r_[i**-1.14, tail[1]], np.r_[np.ones(10**6), tail[0] / 1e-7]
    plain = eigen.krr(lam, v2, 300, 0.1, multiplicity=count)
    few = eigen.power_law(1.2, 1.14)
    assert len(few.eigenvalues) < 10_000
    assert eigen.krr(few[0], few[1], 300, 0.1, multiplicity=few[2]).test == pytest.approx(plain.test, rel=1e-4)


def test_exponents_of_planted_power_laws() -> None:
    """From Gram matrices of Gaussian features; fits to the eigenvalues themselves would be off."""
    draw, i = np.random.default_rng(0), np.arange(1, 8001.0)
    phi = draw.standard_normal((500, 8000))
    seen = eigen.exponents((phi * i**-1.5) @ phi.T, phi @ np.sqrt(i**-1.6), trials=4)
    assert seen.alpha == pytest.approx(1.5, abs=0.08)
    assert seen.beta == pytest.approx(1.6, abs=0.12)
    assert 0 < seen.alpha_error < 0.05
    assert 0 < seen.beta_error < 0.1
    assert seen.errors.shape == (4, 6)
    again = eigen.exponents((phi * i**-1.5) @ phi.T, phi @ np.sqrt(i**-1.6), sizes=(20, 200), trials=2, seed=1)
    assert again.alpha != seen.alpha


# ------------------------------------------------------------------------------------------------ data


def test_modes_of_data() -> None:
    """Two routes to one number: the population of M examples as a spectrum, and M draws of n of them."""
    draw = np.random.default_rng(0)
    phi, i = torch.from_numpy(draw.standard_normal((300, 600))), torch.arange(1, 601.0).double()
    K, y = (phi * i**-1.4) @ phi.T, phi @ i[:, None] ** -0.7
    seen = eigen.modes(K, y)
    assert isinstance(seen.power, torch.Tensor)
    assert seen.power.sum().item() == pytest.approx(y.square().mean().item(), rel=1e-10)
    assert seen.eigenvalues.sum().item() == pytest.approx(K.diagonal().mean().item(), rel=1e-10)
    errors = []
    for _ in range(60):
        rows, rest = torch.from_numpy(draw.permutation(300)).split([60, 240])
        f = K[rest][:, rows] @ torch.linalg.solve(K[rows][:, rows] + 0.1 * torch.eye(60), y[rows])
        errors.append((f - y[rest]).square().mean().item())
    risk = eigen.krr(*seen[:2], 60, 0.1)
    assert eigen.unseen(risk, 60, 300) == pytest.approx(np.mean(errors), rel=0.06)
    assert abs(risk.test / np.mean(errors) - 1) > 0.1  # without the correction for the examples that were drawn


def test_the_kind_of_array_comes_back() -> None:
    assert isinstance(eigen.krr(torch.from_numpy(LAM), torch.from_numpy(V2), 20, 0.1).learnability, torch.Tensor)
    assert isinstance(eigen.krr(LAM.tolist(), V2, 20, 0.1).learnability, np.ndarray)


# ------------------------------------------------------------------------------------------------ what is refused


K = np.eye(6)


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: eigen.krr(-LAM, V2, 10, 0.1), "eigenvalues reach -1.*not negative. Set rounding errors to 0"),
    (lambda: eigen.krr(0 * LAM, V2, 10, 0.1), "all eigenvalues are 0.*predicts zero"),
    (lambda: eigen.krr(LAM, -V2, 10, 0.1), "power reaches -1.*Square the coefficients"),
    (lambda: eigen.krr(LAM, V2[:5], 10, 0.1), r"m = 5; but m = 300 in eigenvalues"),
    (lambda: eigen.krr(LAM * math.nan, V2, 10, 0.1), "eigenvalues contains NaN"),
    (lambda: eigen.krr(LAM, V2, 0, 0.1), "n=0: a number of examples above 0"),
    (lambda: eigen.krr(LAM, V2, math.inf, 0.1), "n=inf: a number of examples"),
    (lambda: eigen.random_features(LAM, V2, 10, 0, 0.1), "k=0: a number of random features above 0.*math.inf"),
    (lambda: eigen.krr(LAM, V2, 10, -0.1), r"ridge=-0\.1: a finite number, 0 or larger.*nothing about negative ridges"),
    (lambda: eigen.krr(LAM, V2, 10, 0.1, noise=-1.0), r"noise=-1\.0 is the variance"),
    (lambda: eigen.krr(LAM, V2, 10, 0.1, multiplicity=0 * LAM), "multiplicity has shape .300,. and a smallest entry of 0"),
    (lambda: eigen.fitting_ratio(0.9, 1.2), r"alpha=0\.9 and beta=1\.2: eigenvalues i\^-alpha have a finite sum"),
    (lambda: eigen.power_law(1.5, 4.5), "beta between 1 and 2 alpha \\+ 1"),
    (lambda: eigen.risk_at_ratio([1.0], 10, 1.5, 1.2), "ratio reaches 1: train error over test error"),
    (lambda: eigen.modes(K, np.zeros(6)), "y is zero: there is nothing to be learned.*one class"),
    (lambda: eigen.modes(K - 2 * np.ones((6, 6)), np.ones(6)), "K has the eigenvalue -11.*no kernel.*positive semi-definite"),
    (lambda: eigen.modes(np.triu(np.ones((6, 6))), np.ones(6)), "K is not symmetric"),
    (lambda: eigen.modes(K, np.ones(5)), "n = 5; but n = 6 in K"),
    (lambda: eigen.unseen(eigen.krr(LAM, V2, 10, 0.1), 10, 10), "n=10 of a population of 10"),
    (lambda: eigen.exponents(K, np.ones(6), sizes=(3,)), r"sizes=\(3,\) of 6 examples: at least two different sizes"),
    (lambda: eigen.exponents(np.ones((8, 8)), np.ones(8), sizes=(2, 4), jitter=0.0), "examples is not positive definite"),
])
def test_bad_input(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        call()
