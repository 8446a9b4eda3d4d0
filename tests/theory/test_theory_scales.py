"""Theories at extreme scales, against the same formulas in many digits or against plain sums."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from richter.core import SelectionError
from richter.theory import early_time, ofe, powerlaw, rank_one
from richter.theory.multilinear import Multilinear
from richter.theory.scalar_network import ScalarNetwork, simulate

Vector = NDArray[np.float64]


def normal(*shape: int, seed: int = 0) -> Vector:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def gram(n: int = 5, p: int = 12) -> Vector:
    J = normal(p, n)
    return J.T @ J / p


def floats(numbers: Any) -> Vector:
    return np.array([float(number) for number in numbers])


# ------------------------------------------------------------------------------------------------ optimal feature evolution


def evolved(K0: Vector, y: Vector, gamma: float, t: Sequence[float], f0: Vector | None = None, digits: int = 900
            ) -> tuple[Vector, Vector, Vector]:
    """(residual, kernel, alignment) by the formulas of the module's docstring."""
    n = len(y)
    with mpmath.workdps(digits):
        K, labels = mpmath.matrix(K0.tolist()), mpmath.matrix(y.tolist())
        D0 = mpmath.matrix((np.zeros(n) if f0 is None else f0).tolist()) - labels
        C = K + mpmath.mpf(gamma) * D0 * D0.T
        c, v = mpmath.eigsy(C)
        d = v.T * D0
        residuals, kernels, alignments = [], [], []
        for time in t:
            left = [mpmath.exp(-c[k] * time) for k in range(n)]
            N = 1 - mpmath.mpf(gamma) * sum(d[k] ** 2 * (1 - left[k] ** 2) / c[k] for k in range(n))
            D = v * mpmath.matrix([left[k] * d[k] for k in range(n)]) / mpmath.sqrt(N)
            now = C - mpmath.mpf(gamma) * D * D.T
            norm = mpmath.sqrt(sum(entry**2 for entry in now))
            residuals.append(floats(D))
            kernels.append(floats(now).reshape(n, n))
            alignments.append(float((labels.T * now * labels)[0] / (norm * (labels.T * labels)[0])))
        return np.array(residuals), np.array(kernels), np.array(alignments)


@pytest.mark.parametrize("with_f0", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-12, 1e-40, 1e-140])
def test_a_kernel_far_below_the_labels_keeps_its_digits(scale: float, with_f0: bool) -> None:
    y, f0 = normal(5, seed=1), normal(5, seed=2) if with_f0 else None
    fast = float(np.sum((y if f0 is None else f0 - y) ** 2))
    turn = max(0.1, -math.log(scale) / 2) / fast  # where gamma D D^T takes over
    t = [0.0, 1e-3 / fast, 0.3 * turn, 0.9 * turn, turn, 1.1 * turn, 3 * turn, 1e3]
    evolution = ofe.OptimalFeatureEvolution(scale * gram(), y, 1.0, f0=f0)
    D, K, A = evolved(scale * gram(), y, 1.0, t, f0)
    np.testing.assert_allclose(evolution.alignment(t), A, rtol=1e-13)
    for values, expected in ((evolution.residual(t), D), (evolution.kernel(t), K)):
        for value, truth in zip(np.asarray(values), expected, strict=True):
            assert np.abs(value - truth).max() <= 2e-12 * np.abs(truth).max()
    np.testing.assert_allclose(evolution.loss(t), (D**2).sum(1), rtol=1e-11)
    step = 1e-7 / fast
    early = evolved(scale * gram(), y, 1.0, [0.0, step], f0)[2]
    assert evolution.alignment_speed == pytest.approx((early[1] - early[0]) / step, rel=1e-4)


def test_units_of_kernels_and_labels_change_no_alignment() -> None:
    t, y = np.array([0.0, 0.5, 2.0, 10.0]), normal(5, seed=1)
    plain = ofe.OptimalFeatureEvolution(gram(), y, 0.7)
    for kernels, labels in ((1e-250, 1.0), (1e250, 1.0), (1.0, 1e-120), (1e-40, 1e120)):
        other = ofe.OptimalFeatureEvolution(kernels * gram(), labels * y, 0.7 * kernels / labels / labels, lr=1 / kernels)
        np.testing.assert_allclose(other.alignment(t), plain.alignment(t), rtol=1e-12)
        np.testing.assert_allclose(other.diagonal_alignment(t), plain.diagonal_alignment(t), rtol=1e-12)
        assert other.alignment_speed == pytest.approx(plain.alignment_speed, rel=1e-12)
        assert other.turning_time == pytest.approx(plain.turning_time, rel=1e-12)
        assert other.threshold * labels * labels / kernels == pytest.approx(plain.threshold, rel=1e-12)
    with pytest.raises(SelectionError, match=r"leaves the range of float64\. Give labels in other units"):
        ofe.OptimalFeatureEvolution(gram(), 1e200 * y, 1.0)
    for size in (1e-310, 1e-320):
        with pytest.raises(SelectionError, match="K0 is so far below gamma"):
            ofe.OptimalFeatureEvolution(size * gram(), y, 1.0)


def test_the_integrated_flow_of_a_small_kernel() -> None:
    K0, y, t = 1e-12 * gram(), normal(5, seed=1), [0.0, 1.0, 3.0]
    for value, truth in zip(ofe.simulate(K0, y, 1.0, t), evolved(K0, y, 1.0, t), strict=False):
        assert all(np.abs(a - b).max() <= 1e-7 * np.abs(b).max() for a, b in zip(np.asarray(value), truth, strict=True))


@pytest.mark.parametrize(("psi0", "delta0"), [(1e-170, 1.0), (1.0, 1e-170), (1e-100, -3.0), (0.7, -1.3)])
def test_one_example_of_any_size(psi0: float, delta0: float) -> None:
    t = [0.0, 1.0, 100.0, 400.0]
    u, v = ofe.scalar(psi0, delta0, 0.9, t)
    with mpmath.workdps(60):
        p, q = mpmath.mpf(psi0) ** 2, mpmath.mpf(0.9) * mpmath.mpf(delta0) ** 2
        decay = [q * mpmath.exp(-2 * (p + q) * time) for time in t]
        np.testing.assert_allclose(u, floats((p + q) / mpmath.mpf(0.9) * x / (x + p) for x in decay), rtol=1e-11)
        np.testing.assert_allclose(v, floats((p + q) * p / (x + p) for x in decay), rtol=1e-11)


@pytest.mark.parametrize(("p", "z"), [
    ([0.0, 1e-40, 2e-40, 1.0], [0.5, 0.5, -0.5, 0.5]), ([1e-30, 1e-30, 1e-30, 1e-30], [0.1, -0.2, 0.3, 0.4]),
    ([1e-8, 1e-8, 1.0, 1.0 + 2.0**-52], [0.3, 0.0, 0.4, -1e-9]), ([1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 1e-200, 0.0])])
def test_a_change_of_rank_one_to_full_relative_precision(p: list[float], z: list[float]) -> None:
    values, change = (torch.tensor(numbers, dtype=torch.float64) for numbers in (p, z))
    c, v, d, share = (x.numpy() for x in rank_one.eigensystem(values, change, 0.8))
    with mpmath.workdps(300):
        exact = mpmath.eigsy(mpmath.diag(p) + mpmath.mpf(0.8) * mpmath.matrix(z) * mpmath.matrix(z).T, eigvals_only=True)
        np.testing.assert_allclose(c, floats(exact), rtol=1e-13, atol=1e-290)
    np.testing.assert_allclose(v.T @ v, np.eye(4), atol=1e-14)
    np.testing.assert_allclose((v * c) @ v.T, np.diag(p) + 0.8 * np.outer(z, z), atol=1e-14)
    np.testing.assert_allclose(d, v.T @ z, atol=1e-14)
    np.testing.assert_allclose(share * c, 0.8 * d**2, rtol=1e-12, atol=1e-290)


# ------------------------------------------------------------------------------------------------ a scalar linear network


def grown(a0: Vector, b0: Vector, S: float, Z: float, t: Sequence[float] | Vector) -> tuple[Vector, Vector, Vector, Vector]:
    """(a, b, log gamma, slope) by Eq. 6.12, corrected, as it is printed."""
    with mpmath.workdps(1000):
        a, b, scale, target = mpmath.matrix(a0.tolist()), mpmath.matrix(b0.tolist()), mpmath.mpf(Z), mpmath.mpf(S)
        S0 = sum(x * y for x, y in zip(a, b, strict=True)) / scale
        size = sum(x * x + y * y for x, y in zip(a, b, strict=True)) / (2 * scale)
        R = mpmath.sqrt(size**2 - S0**2 + target**2)
        E = [mpmath.exp(-2 * R / scale * mpmath.mpf(time)) for time in t]
        gamma = [(size - S0 + S + R + (S0 - size - S + R) * e) / (size + S0 - S + R + (S - S0 - size + R) * e) for e in E]
        plus, minus = ([[(x + s * y) / 2 * mpmath.sqrt(g**s) for g in gamma] for x, y in zip(a, b, strict=True)] for s in (1, -1))
        slope = [((size + S0) * g - (size - S0) / g) / 2 for g in gamma]
        return (np.array([floats(p + m for p, m in zip(ps, ms, strict=True)) for ps, ms in zip(plus, minus, strict=True)]),
                np.array([floats(p - m for p, m in zip(ps, ms, strict=True)) for ps, ms in zip(plus, minus, strict=True)]),
                floats(mpmath.log(g) for g in gamma), floats(slope))


@pytest.mark.parametrize("S", [1.5, -1.5])
@pytest.mark.parametrize(("size", "Z"), [(1e-155, 1.0), (1e-200, 3.0), (1e-80, 1e-100), (1e200, 1e300), (1.0, 1.0),
                                         (1e-30, 1e30)])
def test_weights_of_any_size(size: float, Z: float, S: float) -> None:
    a0, b0 = size * normal(2, 4)
    turn = (max(1.0, math.log(Z) - 2 * math.log(size)) / 2 + 0.1) * Z / 2 / 1.5
    if size > 1:  # Sigma_0 is far above S
        turn = Z / size / (size / Z)
    t = np.array([0.0, 0.1, 0.5, 0.9, 1.0, 1.1, 3.0]) * turn
    a, b, log_gamma, slope = grown(a0, b0, S, Z, t)
    network = ScalarNetwork(a0, b0, S, Z)
    np.testing.assert_allclose(network.log_gamma(t), log_gamma, rtol=1e-11, atol=1e-13)
    for values, expected in zip(network.weights(t), (a, b), strict=True):
        assert (np.abs(np.asarray(values) - expected) <= 1e-10 * np.abs(expected).max(0)).all()
    np.testing.assert_allclose(network.slope(t), slope, rtol=1e-9, atol=1e-11 * np.abs(slope).max())
    np.testing.assert_allclose(network.loss(t), (slope - S) ** 2 / 2, rtol=1e-8, atol=1e-11 * float(slope @ slope))
    np.testing.assert_allclose(np.sum(network.modes(t), 0), slope, rtol=1e-9, atol=1e-11 * np.abs(slope).max())
    assert network.aligned.tolist() == ((a0 / size) * (b0 / size) * S > 0).tolist()
    assert network.regime == ("rich" if size < 1 else "between")


def test_a_gamma_beyond_the_numbers_is_said_to_be_so() -> None:
    network, t = ScalarNetwork([1e-155], [2e-155], 1.0, 1.0), [0.0, 1.0, 1e3]
    for call in (lambda: network.predict(t), lambda: network.gamma_plus):
        with pytest.raises(SelectionError, match=r"gamma, of which the logarithm comes to 71[0-9.]*, leaves the range of"):
            call()
    assert np.isfinite(np.concatenate([np.ravel(z) for z in network.predict(t[:2])])).all()
    np.testing.assert_allclose(network.slope(t)[-1], 1.0, rtol=1e-12)
    with pytest.raises(SelectionError, match="S / Sigma_0 leaves the range of float64"):
        assert network.bound
    large = ScalarNetwork([1e200], [2e200], 1.0, 1.0)
    assert large.gamma_plus == pytest.approx(1 / 3, rel=1e-12)
    a, b = (np.asarray(z) for z in large.weights([0.0, 1.0]))  # toward a b = 1 with a^2 - b^2 as it was
    np.testing.assert_allclose(b, [[2e200, 3**0.5 * 1e200]], rtol=1e-12)
    assert abs(a[0, 1]) < 1e186
    with pytest.raises(SelectionError, match="the slope leaves the range of float64, because the weights are so"):
        large.slope([0.0])


def test_the_integrated_flow_of_small_weights() -> None:
    a0, b0 = 1e-60 * normal(2, 4)
    t = [0.0, 10.0, 60.0, 100.0]
    for values, expected in zip(simulate(a0, b0, 1.5, 1.0, t)[:2], grown(a0, b0, 1.5, 1.0, t)[:2], strict=True):
        assert (np.abs(np.asarray(values) - expected) <= 1e-8 * np.abs(expected).max(0)).all()
    with pytest.raises(SelectionError, match="a0 and b0 are all zero"):
        simulate([0.0], [0.0], 1.0, 1.0, t)


# ------------------------------------------------------------------------------------------------ the first moments of training


def small_data() -> tuple[Vector, Vector, Vector, Vector]:
    """X [n, d_in], J [n, c, d_out], dL [n, c] and y [n]."""
    X = normal(10, 6)
    return X, normal(10, 3, 4, seed=2), normal(10, 3, seed=3), X[:, 0] * X[:, 1]


@pytest.mark.parametrize("scale", [1e80, 1e160, 1e-80, 1e-160, 1e250])
def test_early_correlations_know_no_scale(scale: float) -> None:
    X, J, dL, y = small_data()
    plain = early_time.correlation(X, J, dL)
    for given in ((scale * X, J, dL), (X, scale * J, dL), (X, J, scale * dL)):
        assert early_time.correlation(*given) == pytest.approx(plain, rel=1e-12)
    for activation in ("quadratic", "relu"):
        plain = early_time.predicted_correlation(X, y, activation)
        assert early_time.predicted_correlation(scale * X, y, activation) == pytest.approx(plain, rel=1e-12)
        assert early_time.predicted_correlation(X, scale * y, activation) == pytest.approx(plain, rel=1e-12)
        drawn = early_time.simulate_correlation(X, y, activation, 32)
        assert early_time.simulate_correlation(scale * X, scale * y, activation, 32) == pytest.approx(drawn, rel=1e-6)
    np.testing.assert_allclose(early_time.expected_kernel(scale * X, "relu"), early_time.expected_kernel(X, "relu"), rtol=1e-12)
    rows = X * np.array([scale, *[1.0] * 9])[:, None]  # the angles are the same
    np.testing.assert_allclose(early_time.expected_kernel(rows, "relu"), early_time.expected_kernel(X, "relu"), rtol=1e-12)


@pytest.mark.parametrize("still", ["inputs", "signals", "labels"])
def test_a_layer_that_does_not_start_to_move_has_no_correlation(still: str) -> None:
    X, J, dL, y = small_data()
    moving = still != "labels"
    X, J, dL, y = X * (still != "inputs"), J * (still != "signals"), dL * moving, y * moving
    with pytest.raises(SelectionError, match="does not start to move, so its early correlation is 0/0"):
        early_time.correlation(X, J, dL)
    for activation in ("quadratic", "relu") if still != "signals" else ():
        for correlation in (early_time.predicted_correlation, functools.partial(early_time.simulate_correlation, width=8)):
            with pytest.raises(SelectionError, match="does not start to move"):
                correlation(X, y, activation)


def test_moments_of_large_data_are_numbers_or_refused() -> None:
    X, J, dL, y = small_data()
    plain = early_time.second_derivatives(X, J, dL)
    for size in (2.0**300, 2.0**-300):  # X and dL of sizes that together are near 1
        for value, expected in zip(early_time.second_derivatives(size**2 * X, J, dL / size**2), plain, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(early_time.expected_kernel(2.0**100 * X, "quadratic")) / 2.0**600,
                               early_time.expected_kernel(X, "quadratic"), rtol=1e-12)
    W = [normal(5, 6), normal(4, 5), normal(1, 4)]
    for call in (lambda: early_time.expected_kernel(1e80 * X, "quadratic"),
                 lambda: early_time.second_derivatives(1e160 * X, J, dL),
                 lambda: early_time.second_derivatives(1e-170 * X, J, dL), lambda: early_time.predict(W, 1e80 * X, y[:, None]),
                 lambda: early_time.predict(W, 1e-80 * X, y[:, None], torch.square),
                 lambda: early_time.simulate(W, 1e80 * X, y[:, None])):
        with pytest.raises(SelectionError, match="from data of such a size leave the range of float64"):
            call()


# ------------------------------------------------------------------------------------------------ very many skills


@pytest.mark.parametrize("alpha", [1e-9, 0.6])
def test_losses_of_many_skills_against_the_plain_sum(alpha: float) -> None:
    """In extended precision, skill by skill; also where all but few skills are taken together."""
    skills = 10**6
    k = np.arange(1, skills + 1, dtype=np.longdouble)
    P = k ** -(1 + np.longdouble(alpha))
    P /= P.sum()
    model = Multilinear(alpha, skills)
    for T, N in ((1.0, skills), (1e4, skills), (1e8, skills), (math.inf, skills - 1), (math.inf, skills // 2), (1e3, 999_000)):
        left = 1 / (1 + np.exp(np.minimum(10 * P * np.longdouble(T), 11000)) / np.longdouble(499))
        left[N:] = 1
        assert model.loss(T=T, N=N) == pytest.approx(float((P * left**2).sum()) * 12.5, rel=1e-12)


def test_the_cost_does_not_grow_with_the_number_of_skills(monkeypatch: pytest.MonkeyPatch) -> None:
    """10^12 skills are a few thousand points, and nothing that is made on the way is larger."""
    longest, arange = [0], np.arange

    def watched(*args: Any, **options: Any) -> Any:
        longest.append(len(made := arange(*args, **options)))
        return made

    monkeypatch.setattr(powerlaw.np, "arange", watched)
    powerlaw.grouped.cache_clear()
    powerlaw._block.cache_clear()
    model = Multilinear(0.6, 10**12)
    losses = [model.loss(T=1e4), model.loss(D=1e5), model.loss(N=10**9)]
    assert max(longest) <= powerlaw.FIRST
    assert len(powerlaw.grouped(10**12)[0]) < 12_000
    fewer, tail = Multilinear(0.6, 10**8), model.finite_size(10**8) - model.finite_size()  # nothing of the tail is learned
    np.testing.assert_allclose(np.array(losses[:2]), np.array([fewer.loss(T=1e4), fewer.loss(D=1e5)]) + tail, rtol=1e-4)
    assert losses[2] == pytest.approx(model.finite_size(10**9) - model.finite_size(), rel=1e-8)
