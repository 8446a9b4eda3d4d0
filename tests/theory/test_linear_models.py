"""Linear models in diagonalised features: against eigenvectors, integrated flows and drawn designs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import install_import_hook

from richter.core import SelectionError

with install_import_hook("richter.theory", "checker.typechecked"):
    from richter.theory import linear_models as linear

DRAW = np.random.default_rng(0)
PHI = DRAW.standard_normal((40, 6)) @ DRAW.standard_normal((6, 6))


def test_diagonalised_features() -> None:
    """Orthonormal on the sample, eigenvectors of the second moments, and the features rebuilt (Eq. 1.27); T e = rho e."""
    seen = linear.diagonalise(PHI)
    np.testing.assert_allclose(seen.values.T @ seen.values / 40, np.eye(6), atol=1e-12)
    np.testing.assert_allclose(seen.intensity, np.linalg.eigvalsh(PHI.T @ PHI / 40)[::-1], rtol=1e-10)
    np.testing.assert_allclose(PHI @ PHI.T @ seen.values / 40, seen.values * seen.intensity, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(seen(PHI), seen.values, rtol=1e-9, atol=1e-10)
    new = DRAW.standard_normal((5, 6))
    np.testing.assert_allclose((seen(new) * np.sqrt(seen.intensity)) @ seen.directions.T, new, rtol=1e-9, atol=1e-10)


def test_the_case_of_the_text() -> None:
    """Gaussian features of covariance [[1.5, .5], [.5, 1.5]] have the intensities 2 and 1."""
    root = np.linalg.cholesky([[1.5, 0.5], [0.5, 1.5]])
    seen = linear.diagonalise(np.random.default_rng(1).standard_normal((200_000, 2)) @ root.T)
    np.testing.assert_allclose(seen.intensity, [2, 1], rtol=0.01)


def test_shares_are_those_of_a_function_in_the_span() -> None:
    seen = linear.diagonalise(torch.from_numpy(PHI))
    share = seen.shares(torch.from_numpy(PHI) @ torch.arange(6.0).double())
    assert share.sum().item() == pytest.approx(1, rel=1e-12)
    one = seen.shares(3 * seen.values[:, 2])
    torch.testing.assert_close(one, torch.eye(6).double()[2], atol=1e-12, rtol=0)
    assert linear.diagonalise(np.c_[PHI, PHI]).values.shape == (40, 6)


def test_modes_learn_at_the_rate_of_their_intensity() -> None:
    rho = np.array([2.0, 0.5])
    seen = linear.learned(rho, [1.0, 3.0], [0.0, 1.0])
    np.testing.assert_allclose(seen, [[0, 1 - math.exp(-2)], [0, 3 * (1 - math.exp(-0.5))]])


def test_a_fit_until_time_t_is_gradient_flow() -> None:
    """By small steps of descent; at t = inf the interpolation of least norm."""
    model = linear.SineModel(np.arange(1, 31.0) ** -1.0)
    x, y = DRAW.random(8), DRAW.standard_normal(8)
    k = np.arange(1, 31.0)
    psi = math.sqrt(2) * np.sin(2 * np.pi * k * x[:, None]) * k**-0.5
    w = np.zeros(30)
    for _ in range(20_000):
        w -= 1e-4 * psi.T @ (psi @ w - y) / 8
    np.testing.assert_allclose(model.fit(x, y, 2.0), k**-0.5 * w, atol=1e-3)
    least = k**-0.5 * (np.linalg.pinv(psi) @ y)
    np.testing.assert_allclose(model.fit(x, y), least, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(model(model.fit(x, y), x), y, rtol=1e-8)
    grid = (np.arange(10_000) + 0.5) / 10_000
    difference = np.asarray(model(least, grid)) - np.asarray(model(np.eye(30)[0], grid))
    assert model.error(least, np.eye(30)[0]) == pytest.approx((difference**2).mean(), rel=1e-6)


def test_learnability_of_the_spiked_model() -> None:
    """The text's tail leaves the preferred features at one half; a tail of 1 / (p - d) gives what the text says."""
    for tail, kappa, head, rest in ((100 / 1995, 0.97584, 0.50611, None), (1 / 1995, 0.010020, 0.99008, 95 / 1995)):
        L, seen = linear.learnability(linear.spiked(5, 2000, tail), 100)
        assert seen == pytest.approx(kappa, abs=1e-5)
        assert L[0] == pytest.approx(head, abs=1e-5)
        assert np.sum(L) == pytest.approx(100, rel=1e-10)
        assert rest is None or L[-1] == pytest.approx(rest, rel=1e-3)


@pytest.mark.parametrize(("tail", "benign", "malignant"), [(1 / 1995, 0.05, (0.45, 0.7)), (100 / 1995, 0.3, (0.42, 0.7))])
def test_benign_and_malignant_overfitting(tail: float, benign: float, malignant: tuple[float, float]) -> None:
    model, errors = linear.SineModel(linear.spiked(5, 2000, tail)), []
    for seed in range(5):
        draw = np.random.default_rng(seed)
        x, noise = draw.random(100), 0.3 * draw.standard_normal(100)
        targets = [math.sqrt(0.5) * np.eye(1, 2000, k)[0] for k in (0, 9)]
        errors.append([model.error(model.fit(x, np.asarray(model(v, x)) + noise), v) for v in targets])
    well, badly = np.median(errors, 0)
    assert well < benign
    assert malignant[0] < badly < malignant[1]


def test_noise_is_fitted_at_its_time() -> None:
    """Half of the noise is fitted at log 2 of this time, before and after which little is."""
    rho = linear.spiked(5, 2000, 1 / 1995)
    model, draw = linear.SineModel(rho), np.random.default_rng(0)
    x, y, T = draw.random(100), draw.standard_normal(100), linear.noise_time(rho, 5, 100)
    assert pytest.approx(100) == T
    left = [np.square(np.asarray(model(model.fit(x, y, t), x)) - y).mean() for t in (0.1 * T, 3 * T)]
    assert left[0] > 0.6
    assert left[1] < 0.1


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: linear.diagonalise(np.zeros((3, 2))), "the features are zero on the whole sample"),
    (lambda: linear.diagonalise(PHI).shares(np.zeros(40)), "the function is zero on the sample"),
    (lambda: linear.learnability(np.ones(5), 5), "n=5 examples and 5 features.*nothing is preferred"),
    (lambda: linear.spiked(5, 5, 0.1), "d=5 of p=5 features are preferred"),
    (lambda: linear.SineModel([-1.0, 1.0]).fit([0.1], [1.0]), "intensity reaches -1"),
    (lambda: linear.SineModel([1.0]).fit([0.1, 0.2], [1.0]), "n = 1; but n = 2 in x"),
])
def test_bad_input(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        call()
