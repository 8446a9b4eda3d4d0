"""Theories at extreme scales, against the same formulas in many digits or against plain sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from richter.core import SelectionError
from richter.theory import ofe, rank_one

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
    given = [torch.tensor(numbers, dtype=torch.float64) for numbers in (p, z)]
    c, v, d, share = (x.numpy() for x in rank_one.eigensystem(*given, 0.8))
    with mpmath.workdps(300):
        exact = mpmath.eigsy(mpmath.diag(p) + mpmath.mpf(0.8) * mpmath.matrix(z) * mpmath.matrix(z).T, eigvals_only=True)
        np.testing.assert_allclose(c, floats(exact), rtol=1e-13, atol=1e-290)
    np.testing.assert_allclose(v.T @ v, np.eye(4), atol=1e-14)
    np.testing.assert_allclose((v * c) @ v.T, np.diag(p) + 0.8 * np.outer(z, z), atol=1e-14)
    np.testing.assert_allclose(d, v.T @ z, atol=1e-14)
    np.testing.assert_allclose(share * c, 0.8 * d**2, rtol=1e-12, atol=1e-290)
