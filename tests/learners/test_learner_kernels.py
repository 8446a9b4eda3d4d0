"""Kernels as objects: values and gradients against their formulas, autograd and their laws."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
import sklearn.base
import torch
from torch import Tensor

import oracles
import richter
from machines import KERNELS, METRICS, NAMED, Largest, apart, assert_close, metric, normal
from richter.core import SelectionError
from richter.learners import NNGP, NTK, Exponential, Gaussian, Kernel, Laplace, LaplaceL1, agop, fact
from richter.learners.distances import squared_distances

SHIFT = KERNELS[:3]


def points(d: int = 4) -> tuple[Tensor, Tensor]:
    """x [7,d] with a row that occurs twice, and z [5,d] with a row of x."""
    x, z = normal(7, d), normal(5, d, seed=1)
    x[5], z[2] = x[1], x[3]
    return x, z


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("kernel", KERNELS, **NAMED)
def test_kernels_by_their_formulas(kernel: Kernel, kind: str) -> None:
    x, z = points()
    M = metric(kind, 4)
    assert_close(kernel(x, z, metric=M), oracles.kernel_values(kernel, x, z, M), 1e-12)
    assert_close(kernel(x, metric=M), oracles.kernel_values(kernel, x, x, M), 1e-12)
    assert_close(kernel(x, metric=M), kernel(x, x, metric=M), 1e-14)


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("kernel", KERNELS, **NAMED)
def test_gradients_of_kernels_by_autograd(kernel: Kernel, kind: str) -> None:
    x, z = points()
    M = metric(kind, 4)
    assert_close(kernel.gradients(x, z, metric=M), oracles.kernel_gradients(kernel, x, z, M), 1e-10)
    assert_close(kernel.gradients(x, metric=M), oracles.kernel_gradients(kernel, x, x, M), 1e-10)


@pytest.mark.parametrize("kernel", [NTK(2, weight_var=1.7, bias_var=0.3), NNGP(2, weight_var=1.7, bias_var=0.3)], **NAMED)
def test_kernels_of_networks_by_integrals(kernel: NTK) -> None:
    x, z = points()
    tangent, process = oracles.infinite_kernels(x[:2], z[:2], torch.relu, 2, 1.7, 0.3)
    assert_close(kernel(x[:2], z[:2]), process if isinstance(kernel, NNGP) else tangent, 1e-8)


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("kernel", KERNELS, **NAMED)
def test_kernels_are_symmetric_and_positive(kernel: Kernel, kind: str) -> None:
    x, z = points()
    M = metric(kind, 4)
    K = torch.as_tensor(kernel(x, metric=M))
    assert_close(K, K.T, 1e-14)
    assert_close(kernel(x, z, metric=M), torch.as_tensor(kernel(z, x, metric=M)).T, 1e-14)
    assert torch.linalg.eigvalsh(K).min() > -1e-12 * K.trace()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shift", [0.0, 1e4])
@pytest.mark.parametrize("kernel", SHIFT, **NAMED)
def test_a_point_is_at_distance_zero_of_its_copy(kernel: Any, shift: float, dtype: torch.dtype) -> None:
    """Also far from the origin; in float32, the way large problems are solved, as in float64."""
    x, z = ((t + shift).to(dtype) for t in points())
    copies = torch.tensor([[(a == b).all() for b in z] for a in x])
    own = torch.tensor([[(a == b).all() for b in x] for a in x])
    assert copies.any()
    assert own.sum() == len(x) + 2
    for found, same, other in ((kernel.values(kernel.geometry(x, x)), own, x), (kernel.values(kernel.geometry(x, z)), copies, z)):
        assert (found[same] == 1).all()
        assert (found[~same] < 1).all()
        expected = oracles.kernel_values(kernel, x.double(), other.double())
        assert_close(found.double(), expected, 1e-10 if dtype is torch.float64 else 1e-5)


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("kernel", KERNELS, **NAMED)
def test_copies_have_the_same_row_and_no_gradient_between_them(kernel: Kernel, kind: str) -> None:
    x = normal(30, 6) + (1e4 if kernel in SHIFT else 0)
    x[20:] = x[:10]
    M = metric(kind, 6)
    K, G = torch.as_tensor(kernel(x, metric=M)), torch.as_tensor(kernel.gradients(x, metric=M))
    assert_close(K[20:], K[:10], 1e-13)
    assert G.isfinite().all()
    if kernel in SHIFT:
        assert (K.diagonal() == 1).all()
        assert (K[20:, :10].diagonal() == 1).all()
        assert (G[range(30), range(30)] == 0).all()
        assert (G[range(20, 30), range(10)] == 0).all()


def test_squared_distances_far_from_the_origin_and_at_all_scales() -> None:
    """Pairs as close as 1e-6 and as far as 1e3, about a point at 1e4: eleven digits of each."""
    x = torch.cat([normal(6, 3) * 10.0 ** s for s in range(-6, 4)]) + 1e4
    exact = (x[:, None] - x[None]).square().sum(-1)
    D = squared_distances(x, x)
    assert ((D - exact).abs() <= 1e-10 * exact).all()


@pytest.mark.parametrize("kernel", KERNELS, **NAMED)
def test_a_metric_of_low_rank_ignores_its_null_space(kernel: Kernel) -> None:
    x, z = points(3)
    v = torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64) / math.sqrt(6)
    M = torch.eye(3, dtype=torch.float64) - v.T @ v
    assert_close(kernel(x + 5 * v, z, metric=M), kernel(x, z, metric=M), 1e-7)
    along = torch.as_tensor(kernel.gradients(x, z, metric=M)) @ v[0]
    assert along.abs().max() < 1e-7 * torch.as_tensor(kernel.gradients(x, z, metric=M)).abs().max()


@pytest.mark.parametrize("kernel", KERNELS, **NAMED)
def test_numpy_in_numpy_out(kernel: Kernel) -> None:
    x, z = points()
    M = metric("full", 4)
    assert M is not None
    for f in (kernel, kernel.gradients):
        given = f(x, z, metric=M)
        assert isinstance(given, Tensor)
        for kind in (np.float64, np.float32):
            found = f(x.numpy().astype(kind), z.numpy().astype(kind), metric=M.numpy())
            assert isinstance(found, np.ndarray)
            assert found.dtype == np.float64
            assert_close(found, given, 1e-12 if kind is np.float64 else 1e-4)
    A = normal(7, 2)
    for feature in (agop, fact):
        assert isinstance(feature(kernel, x, A, M), Tensor)
        assert isinstance(feature(kernel, x.numpy(), A.numpy(), M.numpy()), np.ndarray)
        assert_close(feature(kernel, x.numpy(), A.numpy(), M.numpy()), feature(kernel, x, A, M), 1e-12)


@pytest.mark.parametrize("kernel", [Laplace(), LaplaceL1(), Gaussian(), Exponential()], **NAMED)
def test_rules_of_thumb(kernel: Any) -> None:
    """The median distance, or the root mean square norm; a bandwidth that was set stays."""
    x = normal(10, 3)
    pairs = [(x[i] - x[j]) for i in range(10) for j in range(i)]
    median, median_l1 = (np.median([p.norm(p=order).item() for p in pairs]) for order in (2, 1))
    length = x.square().sum(1).mean().sqrt().item()
    expected = {"Laplace": median, "LaplaceL1": median_l1, "Gaussian": median, "Exponential": length}
    assert kernel.fitted(x).bandwidth == pytest.approx(expected[type(kernel).__name__], rel=1e-12)
    assert type(kernel)(2.5).fitted(x) == type(kernel)(2.5)
    assert kernel.fitted(x).at(4.0) == type(kernel)(4.0)


def test_bad_input_of_kernels() -> None:
    x = normal(4, 3)
    for call, sentence in (
            (lambda: Laplace(1.0)(x, normal(4, 2)),
             r"z has shape \(4, 2\); inputs \[n, d\] with as many columns each are needed"),
            (lambda: Laplace(1.0)(x[0]), r"x has shape \(3,\); inputs \[n, d\]"),
            (lambda: Laplace(1.0)(x[:0]), r"x has shape \(0, 3\)"),
            (lambda: Laplace(1.0)(x, metric=torch.eye(2)),
             r"metric has shape \(2, 2\) for inputs of 3 columns; \[3\] or \[3, 3\]"),
            (lambda: Laplace(1.0)(x, metric=torch.ones(4)), r"metric has shape \(4,\) for inputs of 3 columns"),
            (lambda: Laplace(1.0)(x, metric=torch.ones(3, 3, 3)), r"metric has shape \(3, 3, 3\)"),
            (lambda: Laplace(1.0)(x, metric=torch.ones(3, 3).triu()), "metric is not symmetric: .* Give \\(M \\+ M\\^T\\) / 2"),
            (lambda: Laplace(1.0).gradients(x, metric=torch.ones(3, 3).triu()), "metric is not symmetric"),
            (lambda: Laplace(1.0)(x, metric=torch.full((3,), math.nan)), "metric contains NaN or Inf"),
            (lambda: Laplace(1.0)(x / 0), "x contains NaN or Inf"),
            (lambda: Gaussian(0.0), r"Gaussian\(bandwidth=0.0\): a positive number is needed, or None"),
            (lambda: LaplaceL1(-2), r"LaplaceL1\(bandwidth=-2\): a positive number is needed"),
            (lambda: Laplace(math.nan), r"Laplace\(bandwidth=nan\): a positive number"),
            (lambda: Laplace(math.inf), r"Laplace\(bandwidth=inf\): a positive number"),
            (lambda: Exponential("wide"), r"Exponential\(bandwidth='wide'\): a positive number"),  # type: ignore[arg-type]
            (lambda: Laplace()(x), r"Laplace\(\): its bandwidth is not set.*Laplace\(\).fitted\(x\)"),
            (lambda: Exponential().gradients(x), r"Exponential\(\): its bandwidth is not set"),
            (lambda: agop(Laplace(1.0), x, normal(5, 1)),
             r"x has shape \(4, 3\) and coefficients \(5, 1\); \[n, d\] and \[n, c\]"),
            (lambda: fact(Laplace(1.0), x, normal(5, 1)), r"x has shape \(4, 3\) and coefficients \(5, 1\)"),
            (lambda: agop(Laplace(1.0), x, normal(4, 1), torch.ones(2)), r"metric has shape \(2,\) for inputs of 3 columns")):
        with pytest.raises(SelectionError, match=f"(?s){sentence}"):
            call()


@pytest.mark.parametrize("kernel", [NTK(3), NNGP(2, "erf")], **NAMED)
def test_recursions_hold_some_rows_at_a_time(kernel: Kernel) -> None:
    x = normal(700, 3)
    with Largest() as held:
        K = torch.as_tensor(kernel(x))
    assert held.most <= 3 * 8 * 700 ** 2 + 1  # the geometry
    assert_close(K[5:7], torch.as_tensor(kernel(x[5:7], x)), 1e-12)


def test_kernels_are_compared_hashed_and_copied_by_value() -> None:
    for kernel in KERNELS:
        again = pickle.loads(pickle.dumps(kernel))
        assert again == kernel == sklearn.base.clone(kernel, safe=False)
        assert hash(again) == hash(kernel)
        assert eval(repr(kernel), vars(richter.learners)) == kernel
    assert Laplace(1.0) != Laplace(2.0) != Gaussian(2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Laplace(1.0).bandwidth = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(("kernel", "changed"), [
    (Laplace(1.0), Laplace(2.0)), (LaplaceL1(1.0), LaplaceL1(2.0)), (Gaussian(1.0), Gaussian(2.0)),
    (Exponential(1.0), Exponential(2.0)), (NTK(1), NNGP(1)), (NTK(1), NTK(2)), (NTK(1), NTK(1, "erf")),
    (NTK(1), NTK(1, weight_var=1.0)), (NTK(1), NTK(1, bias_var=1.0)), (NNGP(1), NNGP(2)), (NNGP(1), NNGP(1, "gelu")),
    (NNGP(1), NNGP(1, weight_var=1.0)), (NNGP(1), NNGP(1, bias_var=1.0))], **NAMED)
def test_a_knob_of_a_kernel_does_something(kernel: Kernel, changed: Kernel) -> None:
    x, z = points()
    assert apart(changed(x, z), kernel(x, z)) > 1e-2
    assert apart(changed.gradients(x, z), kernel.gradients(x, z)) > 1e-2
