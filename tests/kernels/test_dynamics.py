"""Training under a frozen kernel, spectra, and how kernels evolve: against loops, dense algebra and laws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import install_import_hook
from scipy.linalg import expm
from scipy.optimize import brentq

from richter import kernels
from richter.core import SelectionError
from richter.linalg import power_law_interval

with install_import_hook("richter.kernels.dynamics", "checker.typechecked"):
    from richter.kernels import dynamics

N, K_OUT = 9, 3


def gram(n: int = N, p: int = 14, seed: int = 0) -> np.ndarray[Any, Any]:
    J = np.random.default_rng((seed, n, p)).standard_normal((p, n))
    return J.T @ J / p


def labels(*shape: int, seed: int = 5) -> np.ndarray[Any, Any]:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def looped(K: np.ndarray[Any, Any], D: np.ndarray[Any, Any], lr: float, steps: int) -> np.ndarray[Any, Any]:
    """D <- D - lr K D, step by step; K [n, k, n, k] and D [n, k]."""
    rows = [D]
    for _ in range(steps):
        rows.append(rows[-1] - lr * np.einsum("ncmb,mb->nc", K, rows[-1]))
    return np.array(rows)


def full_kernel() -> np.ndarray[Any, Any]:
    return gram(N * K_OUT, 40).reshape(N, K_OUT, N, K_OUT)


FORMS = {
    "shared": (gram(), np.einsum("nm,cb->ncmb", gram(), np.eye(K_OUT))),
    "each": (np.stack([gram(seed=s) for s in range(K_OUT)]),
             np.einsum("cnm,cb->ncmb", np.stack([gram(seed=s) for s in range(K_OUT)]), np.eye(K_OUT))),
    "pairs": (full_kernel(), full_kernel()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("speed", [0.3, 1.0, 1.95])
def test_descent_is_the_loop(form: str, speed: float) -> None:
    """Also where lr lambda passes 1, and residuals change their sign at every step."""
    K, whole = FORMS[form]
    y, f0 = labels(N, K_OUT), labels(N, K_OUT, seed=6)
    lr = speed / np.linalg.eigvalsh(whole.reshape(N * K_OUT, -1))[-1]
    expected = looped(whole, f0 - y, lr, 40)
    descent = dynamics.kernel_gradient_descent(K, y, lr, 40, f0)
    assert descent.kind == "descent"
    np.testing.assert_allclose(descent.residual, expected, atol=1e-12)
    np.testing.assert_allclose(descent.loss, (expected**2).sum((1, 2)), rtol=1e-10)
    some = dynamics.kernel_gradient_descent(K, y, lr, 40, f0, record=[40, 3])
    np.testing.assert_allclose(some.residual, expected[[40, 3]], atol=1e-12)
    assert some.times.tolist() == [40, 3]
    times = [0.0, 0.7, 5.0]
    flow = dynamics.kernel_gradient_flow(K, y, lr, times, f0)
    exact = [(expm(-lr * t * whole.reshape(N * K_OUT, -1)) @ (f0 - y).ravel()).reshape(N, K_OUT) for t in times]
    np.testing.assert_allclose(flow.residual, exact, atol=1e-11)
    np.testing.assert_allclose(flow.loss, [(D**2).sum() for D in exact], rtol=1e-9)


def test_one_output_has_no_axis_for_it() -> None:
    descent = dynamics.kernel_gradient_descent(gram(), labels(N), 0.1, 5)
    assert descent.residual.shape == (6, N)
    assert descent.loss.shape == (6,)
    np.testing.assert_allclose(descent.residual[0], -labels(N), atol=1e-14)
    assert dynamics.kernel_gradient_descent(gram(), labels(N)[:, None], 0.1, 5).residual.shape == (6, N, 1)
    there = dynamics.kernel_gradient_descent(torch.tensor(gram()), torch.tensor(labels(N)), 0.1, 5)
    assert isinstance(there.residual, torch.Tensor)
    assert isinstance(there.loss, torch.Tensor)
    np.testing.assert_allclose(there.residual, descent.residual, atol=1e-14)


def test_digits_survive_a_million_steps() -> None:
    """(1 - r)^t with r = 1e-7: as a power of the rounded 1 - r it would be wrong in the tenth digit."""
    from decimal import Decimal
    descent = dynamics.kernel_gradient_descent(np.diag([1.0, 1e-7]), np.ones(2), 1.0, 10**6, record=[0, 10**6])
    exact = float((1 - Decimal.from_float(1e-7)) ** 10**6)
    assert abs(-descent.residual[1, 1] / exact - 1) < 1e-14
    assert descent.residual[1, 0] == 0
    np.testing.assert_array_equal(descent.residual[0], [-1, -1])


def test_recorded_steps_alone_are_kept() -> None:
    descent = dynamics.kernel_gradient_descent(gram(), labels(N), 0.1, 10**9, record=range(0, 10**9, 5 * 10**6))
    assert descent.residual.shape == (200, N)
    assert (np.diff(descent.loss) <= 0).all()


@given(st.integers(1, 8), st.floats(0.01, 0.99), st.integers(0, 30))
@settings(max_examples=30, deadline=None)
def test_laws_of_descent(n: int, speed: float, steps: int) -> None:
    """Linear in the residual, the loss never rises, an orthogonal change of examples changes nothing."""
    K, y = gram(n, n + 2, seed=n), labels(n, seed=n)
    lr = speed / np.linalg.eigvalsh(K)[-1]
    one = dynamics.kernel_gradient_descent(K, y, lr, steps)
    assert (np.diff(one.loss) <= 1e-12 * one.loss[0]).all()
    np.testing.assert_allclose(dynamics.kernel_gradient_descent(K, 3 * y, lr, steps).residual, 3 * one.residual, atol=1e-11)
    Q = np.linalg.qr(labels(n, n, seed=1))[0]
    turned = dynamics.kernel_gradient_descent(Q @ K @ Q.T, Q @ y, lr, steps)
    np.testing.assert_allclose(turned.residual, one.residual @ Q.T, atol=1e-10)
    np.testing.assert_allclose(dynamics.kernel_gradient_descent(2 * K, y, lr / 2, steps).loss, one.loss, rtol=1e-9, atol=1e-12)


def test_rescaled_descent() -> None:
    K0, K, y = gram(), 2.5 * gram(seed=3), labels(N)
    top, ratio = np.linalg.eigvalsh(K0)[-1], np.linalg.norm(K) / np.linalg.norm(K0)
    lr = 0.5 / top / ratio
    rescaled = dynamics.rescaled_gradient_descent(K0, K, y, lr, 20)
    assert rescaled.kind == "descent"
    assert abs(rescaled.lr / (lr * ratio) - 1) < 1e-12
    np.testing.assert_allclose(rescaled.loss, dynamics.kernel_gradient_descent(K0, y, lr * ratio, 20).loss, rtol=1e-10)
    beyond = dynamics.rescaled_gradient_descent(K0, K, y, 1.9 / top, 20, record=[0, 20])
    assert beyond.kind == "flow"
    np.testing.assert_allclose(beyond.loss, dynamics.kernel_gradient_flow(K0, y, 1.9 / top * ratio, [0, 20]).loss, rtol=1e-10)


# ------------------------------------------------------------------------------------------------ spectra


def test_spectrum_and_its_exponents() -> None:
    """A kernel and labels made with b = 1.2 and a = 1.8; the loss they predict is the loss of the flow."""
    n, k = 400, np.arange(1, 401)
    Q = np.linalg.qr(labels(n, n))[0]
    K = (Q * k**-1.2) @ Q.T
    y = Q @ (k**-0.9 * np.sign(labels(n)))
    s = dynamics.spectrum(K, y)
    np.testing.assert_allclose(s.eigenvalues, k**-1.2, rtol=1e-9)
    np.testing.assert_allclose(s.power, k**-1.8, rtol=1e-6)
    assert abs(s.b.exponent - 1.2) < 1e-6
    assert abs(s.b.exponent - kernels.power_law(s.eigenvalues)) < 1e-14
    tail = [s.power[j:].sum() for j in range(2, n // 2)]
    assert abs(s.a.exponent - 1 + np.polyfit(np.log(k[2:n // 2]), np.log(tail), 1)[0]) < 1e-9
    assert s.a.low < s.a.exponent < s.a.high
    e = s.loss_exponent
    assert abs(e.exponent - (s.a.exponent - 1) / s.b.exponent) < 1e-12
    assert e.low < e.exponent < e.high
    t = np.geomspace(1, 10, 20)  # later the end of the spectrum is felt
    slope = -np.polyfit(np.log(t), np.log(dynamics.kernel_gradient_flow(K, y, 1.0, t).loss), 1)[0]
    assert abs(slope - 0.8 / 1.2) < 0.05


def test_spectra_of_several_outputs() -> None:
    K, Y = FORMS["each"][0], labels(N, K_OUT)
    s = dynamics.spectrum(K, Y)
    assert s.eigenvalues.shape == (K_OUT, N)
    assert s.power.shape == (N, K_OUT)
    for c in range(K_OUT):
        values, vectors = np.linalg.eigh(K[c])
        np.testing.assert_allclose(s.eigenvalues[c], values[::-1], rtol=1e-9)
        np.testing.assert_allclose(s.power[:, c], (vectors.T @ Y[:, c])[::-1] ** 2, rtol=1e-8, atol=1e-12)
    shared = dynamics.spectrum(gram(40, 60), labels(40, 3))
    alone = [dynamics.spectrum(gram(40, 60), labels(40, 3)[:, c]).a.exponent for c in range(3)]
    assert abs(shared.a.exponent - np.mean(alone)) < 1e-12
    assert shared.b == dynamics.spectrum(gram(40, 60), labels(40)).b


def test_the_interval_of_an_exponent_covers() -> None:
    """Spectra with noise that neighbours share: an interval for independent errors covers three in ten, this one most."""
    draw, covered, naive = np.random.default_rng(0), 0, 0
    k = np.arange(1, 301)
    for _ in range(100):
        noise = np.convolve(draw.standard_normal(320), np.ones(21) / 21, "valid") * 0.5
        values = k**-1.3 * np.exp(noise)
        law = power_law_interval(values, first=1, last=300)
        covered += law.low <= 1.3 <= law.high
        fit, cov = np.polyfit(np.log(k), np.log(np.sort(values)[::-1]), 1, cov=True)
        naive += abs(fit[0] + 1.3) < 1.96 * math.sqrt(cov[0, 0])
    assert covered >= 70
    assert naive < covered - 20


# ------------------------------------------------------------------------------------------------ evolution


def test_how_kernels_evolve() -> None:
    K0, K = gram(), gram() + 0.3 * gram(seed=4)
    cosine = (K0 * K).sum() / np.linalg.norm(K0) / np.linalg.norm(K)
    assert abs(dynamics.norm_ratio(K0, K) - np.linalg.norm(K) / np.linalg.norm(K0)) < 1e-14
    assert abs(dynamics.rotation(K0, K) - (1 - cosine)) < 1e-13
    assert abs(dynamics.distance(K0, K) - np.linalg.norm(K - K0) / np.linalg.norm(K0)) < 1e-14
    assert abs(dynamics.velocity(K0, K, 0.5) - 2 * dynamics.distance(K0, K)) < 1e-14
    assert dynamics.rotation(K0, 7 * K0) < 1e-15
    assert dynamics.distance(K0, 3 * K0) == pytest.approx(2)
    U0, U = (np.linalg.eigh(Z)[1][:, -2:] for Z in (K0, K))
    assert abs(dynamics.overlap(K0, K, top=2) - np.linalg.norm(U0.T @ U) ** 2 / 2) < 1e-12
    assert dynamics.overlap(K0, 2 * K0) == pytest.approx(1)
    assert dynamics.norm_ratio(FORMS["pairs"][0], 2 * FORMS["pairs"][0]) == pytest.approx(2)
    tiny = K0 + 1e-7 * gram(seed=4)
    a, b = K0.astype(np.longdouble), tiny.astype(np.longdouble)
    exact = float(1 - (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))
    assert abs(dynamics.rotation(K0, tiny) / exact - 1) < 0.01  # 1 - cosine in float64 has no digit here


@pytest.mark.parametrize("gamma", [1e-4, 0.3, 50.0, -0.02])
def test_effective_gamma_is_the_gamma(gamma: float) -> None:
    K0, y = gram(), labels(N)
    K = K0 + gamma * np.outer(y, y)
    assert abs(dynamics.effective_gamma(K0, 3.7 * K, y) / gamma - 1) < 1e-10
    a, A = kernels.alignment(K0, y), kernels.alignment(K, y)
    closed = np.linalg.norm(K0) / (y @ y) * (-a + A * math.sqrt((1 - a * a) / (1 - A * A)))
    assert abs(dynamics.effective_gamma(K0, K, y) / closed - 1) < 1e-8
    root = brentq(lambda g: kernels.alignment(K0 + g * np.outer(y, y), y) - A, -0.021, 60, xtol=1e-14)
    assert abs(root - gamma) < 1e-6 * max(abs(gamma), 1)
    assert abs(dynamics.effective_gamma(K0, K, y, normalised=True) * np.linalg.norm(K0) / gamma - 1) < 1e-10


def test_effective_gamma_of_several_outputs() -> None:
    K0, Y, gammas = FORMS["each"][0], labels(N, K_OUT), np.array([0.1, 0.5, 2.0])
    K = K0 + np.einsum("c,nc,mc->cnm", gammas, Y, Y)
    np.testing.assert_allclose(dynamics.effective_gammas(K0, K, Y), gammas, rtol=1e-10)
    assert abs(dynamics.effective_gamma(K0, K, Y) - gammas.mean()) < 1e-10
    shared = dynamics.effective_gammas(K0[0], K[0], Y)
    assert shared[0] == pytest.approx(0.1)
    assert shared[1] == pytest.approx(dynamics.effective_gamma(K0[0], K[0], Y[:, 1]))


# ------------------------------------------------------------------------------------------------ bad input

UNEVEN = gram() + np.triu(np.ones((N, N)))
INDEFINITE = gram() - 2 * np.eye(N)
DESCENDS = dynamics.kernel_gradient_descent


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: DESCENDS(UNEVEN, labels(N), 0.1, 5), r"K is not symmetric: \|K - K\^T\| = 0.87 \|K\|. The kernel of one set"),
    (lambda: DESCENDS(INDEFINITE, labels(N), 0.1, 5), r"K is indefinite: it has the eigenvalue -1\.\d+ beside"),
    (lambda: DESCENDS(np.zeros((N, N)), labels(N), 0.1, 5), "K is zero: nothing can be learned"),
    (lambda: DESCENDS(gram(), labels(N + 1), 0.1, 5), r"K has shape \(9, 9\) and y is of 10 examples and 1 output: they must"),
    (lambda: DESCENDS(gram(), labels(N), 0.1, 5, labels(N + 1)), r"f0 has shape \(10, 1\) and y \(9, 1\)"),
    (lambda: DESCENDS(np.full((N, N), np.nan), labels(N), 0.1, 5), "K contains NaN or Inf"),
    (lambda: DESCENDS(gram(), np.full(N, np.nan), 0.1, 5), "y contains NaN or Inf"),
    (lambda: DESCENDS(gram(), labels(N), 0.0, 5), "lr=0.0: a rate above 0"),
    (lambda: DESCENDS(gram(), labels(N), 0.1, -1), "steps=-1: a number of steps"),
    (lambda: DESCENDS(gram(), labels(N), 0.1, 5, record=[6]), "record contains 6: .* from 0 to steps=5"),
    (lambda: DESCENDS(gram(), labels(2, 2, 2), 0.1, 5), r"y has shape \(2, 2, 2\); \[n\] or \[n, k\]"),
    (lambda: dynamics.kernel_gradient_flow(gram(), labels(N), 0.1, [-1.0]), "negative entries; times .* 0 or later"),
    (lambda: dynamics.spectrum(gram(), np.zeros(N)), "y is zero: it has no power"),
    (lambda: dynamics.spectrum(full_kernel(), labels(N, K_OUT)), "form='diagonal'"),
    (lambda: dynamics.distance(gram(), gram(N + 1)), "cannot be compared: the same examples"),
    (lambda: dynamics.distance(np.zeros((N, N)), gram()), "the first kernel is zero"),
    (lambda: dynamics.velocity(gram(), gram(), 0.0), "dt=0.0: the time between two kernels"),
    (lambda: dynamics.overlap(gram(), gram(), top=10), "top=10: .* 1 to n eigenvectors"),
    (lambda: dynamics.effective_gamma(gram(), gram(), np.zeros(N)), "y is zero in 1 of 1 outputs"),
    (lambda: dynamics.effective_gamma(gram(), gram(), labels(N + 1)), "they must be of the same examples"),
    (lambda: dynamics.effective_gamma(gram(), UNEVEN, labels(N)), "K_final is not symmetric"),
])
def test_bad_input(call: Any, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        call()


def test_a_rate_beyond_stability_says_the_largest_stable_one() -> None:
    K, y = gram(), labels(N)
    stable = 2 / np.linalg.eigvalsh(K)[-1]
    with pytest.raises(SelectionError, match=r"beyond stability: .* descent diverges\. The largest stable lr is") as refusal:
        DESCENDS(K, y, 1.01 * stable, 5)
    told = float(str(refusal.value).split("largest stable lr is ")[1].split(";")[0])
    assert abs(told / stable - 1) < 1e-12
    assert DESCENDS(K, y, told, 100).loss[-1] <= y @ y  # what it says is taken


def test_rounding_of_single_precision_is_no_offence() -> None:
    K = gram(40, 20).astype(np.float32) + 1e-7 * labels(40, 40).astype(np.float32)  # singular: eigenvalues of both signs near 0
    assert np.linalg.eigvalsh(K.astype(float)).min() < 0
    descent = DESCENDS(K, labels(40), 0.1, 10**6, record=[0, 10**6])
    assert descent.loss[1] < descent.loss[0]
