"""Kernel machines that learn features: against definitions, brute force, other libraries and their laws."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
import re
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import scipy.sparse
import scipy.special
import sklearn.base
import sklearn.datasets
import sklearn.exceptions
import sklearn.kernel_ridge
import sklearn.linear_model
import sklearn.metrics
import sklearn.model_selection
import sklearn.pipeline
import sklearn.preprocessing
import sklearn.utils.estimator_checks
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import oracles
from richter.core import MemoryBudgetError, SelectionError, parse_bytes
from richter.learners import (
    NNGP,
    NTK,
    Exponential,
    Gaussian,
    Kernel,
    KernelRidge,
    Laplace,
    LaplaceL1,
    Quadratic,
    RFMClassifier,
    RFMRegressor,
    agop,
    fact,
    tabular,
)
from richter.learners.distances import squared_distances
from richter.learners.features import FEATURES, next_metric
from richter.learners.fit import Rows
from richter.learners.logistic import solve_logistic
from richter.learners.problem import Problem, problem
from richter.learners.solvers import SingularKernelError, solve, solve_blocks

KERNELS: list[Any] = [
    Laplace(1.7), LaplaceL1(2.3), Gaussian(1.4), Quadratic(), Exponential(1.9), NTK(), NTK(3, weight_var=1.6, bias_var=0.2),
    NTK(2, "erf", 1.5, 0.1), NNGP(2), NNGP(1, "erf", bias_var=0.3)]
SHIFT = KERNELS[:3]
INVARIANT = [k for k in KERNELS if not isinstance(k, LaplaceL1)]
METRICS = ("identity", "full", "diagonal")
NAMED: dict[str, Any] = {"ids": repr}




def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng((seed, *shape)).standard_normal(shape))


def metric(kind: str, d: int) -> Tensor | None:
    """A positive definite metric of unequal eigenvalues."""
    B = normal(d, d + 1, seed=3)
    return None if kind == "identity" else B @ B.T / d if kind == "full" else 0.2 + torch.arange(d).double()


def full(M: Tensor | None, d: int) -> Tensor:
    return torch.eye(d, dtype=torch.float64) if M is None else M.diag() if M.dim() == 1 else M


def assert_close(a: Any, b: Any, tolerance: float) -> None:
    """|a - b| <= tolerance |b|, in the Frobenius norm; the shapes are the same."""
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    assert a.shape == b.shape
    error = ((a - b).norm() / b.norm()).item() if b.norm() > 0 else a.norm().item()
    assert error <= tolerance, f"relative error {error:.2g}"


def apart(a: Any, b: Any) -> float:
    """|a - b| / |b|."""
    a, b = torch.as_tensor(np.asarray(a)).double(), torch.as_tensor(np.asarray(b)).double()
    return ((a - b).norm() / b.norm()).item()


# ------------------------------------------------------------------------------------------------ kernels


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


@pytest.mark.parametrize("weights", [[1.0] * 3, [1.0], [-1.0] * 4, [0.0] * 4], ids=["short", "one", "negative", "zero"])
def test_bad_weights_of_agop(weights: list[float]) -> None:
    with pytest.raises(SelectionError, match="weights"):
        agop(Laplace(1.0), normal(4, 3), normal(4, 1), weights=torch.tensor(weights))


# ------------------------------------------------------------------------------------------------ AGOP and FACT

SIZES = [(6, 2, 4), (11, 1, 3), (11, 3, 2)]  # n < c d; n > c d with one output and several


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize(("n", "c", "d"), SIZES)
@pytest.mark.parametrize("kernel", KERNELS, **NAMED)
def test_agop_and_fact_by_autograd(kernel: Kernel, n: int, c: int, d: int, kind: str) -> None:
    x, A, M = normal(n, d), normal(n, c, seed=1), metric(kind, d)
    x[-1] = x[0]  # a copy: its distance is 0, where some kernels have a kink
    G = oracles.machine_gradients(kernel, x, A, M)
    w = torch.arange(1, n + 1).double() / 3
    for memory in ("1GiB", 1000):  # one block, and many
        assert_close(fact(kernel, x, A, M, memory=memory), oracles.residual_outer(G, A, x), 1e-8)
    for weights, centred, memory in (
            (None, False, "1GiB"), (w, False, 1000), (None, True, 1000), (w, True, "1GiB"), (w, True, 1000)):
        found = agop(kernel, x, A, M, weights=weights, centred=centred, memory=memory)
        assert_close(found, oracles.gradient_outer(G, weights, centred), 1e-8)


def test_both_routes_to_agop_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from richter.learners import features
    taken = []
    for name, route in [(name, getattr(features, name)) for name in ("_by_rows", "_by_pairs")]:
        def spy(*args: Any, name: str = name, route: Any = route, **options: Any) -> Tensor:
            taken.append(name)
            return route(*args, **options)
        monkeypatch.setattr(features, name, spy)
    for n, c, d in SIZES:
        agop(Laplace(1.0), normal(n, d), normal(n, c))
    assert set(taken) == {"_by_rows", "_by_pairs"}


def test_less_memory_means_more_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    geometry = Laplace.geometry

    def spy(self: Laplace, x: Tensor, z: Tensor) -> Tensor:
        sizes.append(len(x))
        return geometry(self, x, z)

    monkeypatch.setattr(Laplace, "geometry", spy)
    x, A = normal(60, 4), normal(60, 2)
    for feature in (agop, fact):
        found = []
        for memory in ("1GiB", "20KiB"):
            sizes.clear()
            feature(Laplace(1.0), x, A, memory=memory)
            found.append(list(sizes))
        assert len(found[1]) > len(found[0])
        assert max(found[1]) < max(found[0])


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kernel", KERNELS, **NAMED)
def test_a_weight_in_agop_is_a_number_of_copies(kernel: Kernel, centred: bool) -> None:
    """The same function: copies share the coefficient of their point."""
    x, A, M = normal(8, 3), normal(8, 2), metric("full", 3)
    w = torch.tensor([1, 2, 1, 3, 1, 1, 4, 2])
    copies = agop(kernel, x.repeat_interleave(w, 0), (A / w[:, None]).repeat_interleave(w, 0), M, centred=centred)
    assert_close(agop(kernel, x, A, M, weights=w, centred=centred), copies, 1e-9)
    assert apart(agop(kernel, x, A, M, centred=centred), copies) > 1e-2


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("kernel", KERNELS, **NAMED)
def test_laws_of_agop_and_fact(kernel: Kernel, kind: str) -> None:
    n, d = 11, 4
    x, A, M = normal(n, d), normal(n, 3), metric(kind, d)
    G, F = torch.as_tensor(agop(kernel, x, A, M)), torch.as_tensor(fact(kernel, x, A, M))
    assert_close(G, G.T, 1e-14)
    assert torch.linalg.eigvalsh(G).min() > -1e-12 * G.trace()
    assert torch.linalg.eigvalsh(G - torch.as_tensor(agop(kernel, x, A, M, centred=True))).min() > -1e-12 * G.trace()
    for f, whole in ((agop, G), (fact, F)):  # a sum over outputs, quadratic in coefficients, blind to the order of rows
        assert_close(sum(torch.as_tensor(f(kernel, x, A[:, i : i + 1], M)) for i in range(3)), whole, 1e-9)
        assert_close(f(kernel, x, 3 * A, M), 9 * whole, 1e-9)
        turned = torch.linalg.qr(normal(3, 3, seed=5))[0]
        assert_close(f(kernel, x, A @ turned, M), whole, 1e-9)
        assert_close(f(kernel, x.flip(0), A.flip(0), M), whole, 1e-9)
    if not isinstance(kernel, LaplaceL1):
        FM = F @ full(M, d)
        assert (FM - FM.T).norm() < 1e-9 * FM.norm()


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("kernel", INVARIANT, **NAMED)
def test_rotated_inputs_have_rotated_features(kernel: Kernel, kind: str) -> None:
    x, A, M = normal(10, 4), normal(10, 2), full(metric(kind, 4), 4)
    Q = torch.linalg.qr(normal(4, 4, seed=9))[0]
    for f in (agop, fact):
        turned = Q.T @ torch.as_tensor(f(kernel, x, A, M)) @ Q
        assert_close(f(kernel, x @ Q, A, (Q.T @ M @ Q + (Q.T @ M @ Q).T) / 2), turned, 1e-8)


def test_the_l1_kernel_is_not_rotation_invariant() -> None:
    x, A = normal(10, 4), normal(10, 2)
    Q = torch.linalg.qr(normal(4, 4, seed=9))[0]
    assert apart(agop(LaplaceL1(1.0), x @ Q, A), Q.T @ torch.as_tensor(agop(LaplaceL1(1.0), x, A)) @ Q) > 1e-2


@pytest.mark.parametrize("ridge", [0.01, 1.0])
@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("kernel", KERNELS, **NAMED)
def test_fact_is_the_gradient_of_the_loss_at_a_fit(kernel: Kernel, kind: str, ridge: float) -> None:
    """The ridge is in the coefficients alone: residuals are ridge A.  [theory/FACT 1.3]"""
    x, y, M = normal(9, 3), normal(9, 2, seed=1), metric(kind, 3)
    A, _ = oracles.kernel_ridge(oracles.kernel_values(kernel, x, x, M), y, ridge)
    assert_close(fact(kernel, x, A, M), oracles.fact_by_loss(kernel, x, y, A, M, ridge), 1e-8)


# ------------------------------------------------------------------------------------------------ updates of the metric


def updated(rule: Any, kernel: Kernel, x: Tensor, A: Tensor, M: Tensor | None, **options: Any) -> Tensor:
    R = None if M is None else oracles.metric_root(M) if M.dim() == 2 else M.sqrt()
    u = x if R is None else x * R if R.dim() == 1 else x @ R
    w = torch.ones(len(x), dtype=torch.float64)
    return next_metric(rule, kernel, u, x, R, A, w, lambda rows: kernel.geometry(u[rows], u), **options)


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize(("rule", "exponent"), [
    ("agop", 1.0), ("agop", 0.5), ("agop_centred", 0.5), ("fact", 1.0), ("fact_geometric", 1.0)])
@pytest.mark.parametrize("kernel", KERNELS, **NAMED)
def test_updates_by_matrix_functions(kernel: Kernel, rule: Any, exponent: float, kind: str) -> None:
    x, A, M = normal(12, 3), normal(12, 2), metric(kind, 3)
    expected = oracles.next_metric(rule, kernel, x, A, full(M, 3), exponent)
    assert_close(updated(rule, kernel, x, A, M, exponent=exponent), expected, 1e-7)


@pytest.mark.parametrize("kind", ["identity", "diagonal"])
@pytest.mark.parametrize("rule", FEATURES)
@pytest.mark.parametrize("kernel", KERNELS, **NAMED)
def test_updates_of_a_diagonal_metric(kernel: Kernel, rule: Any, kind: str) -> None:
    """The same rules for W = diag(v): of AGOP, and of FACT, which M = W^2 equals at a fixed point, the diagonal alone."""
    x, A, M = normal(12, 3), normal(12, 2), metric(kind, 3)
    G = oracles.machine_gradients(kernel, x, A, M)
    F = oracles.residual_outer(G, A, x).diagonal()
    expected = {"agop": oracles.gradient_outer(G).diagonal(), "agop_centred": oracles.gradient_outer(G, centred=True).diagonal(),
                "fact": F.abs(), "fact_geometric": (F * full(M, 3).diagonal()).abs().sqrt()}[rule]
    assert_close(updated(rule, kernel, x, A, M, diagonal=True), expected, 1e-8)
    assert_close(updated(rule, kernel, x, A, M, diagonal=True, exponent=0.5), expected.sqrt(), 1e-8)


def regression(n: int = 30, d: int = 3, c: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x, y [n,c] of unequal columns, and new points."""
    x = normal(n, d)
    y = torch.stack([torch.sin(x[:, 0] * (i + 1)) + x[:, 1] ** 2 - 0.5 * x[:, 2] for i in range(c)], 1)
    return x, y + 0.1 * normal(n, c, seed=2), normal(8, d, seed=4)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(("rule", "power"), [(rule, 1.0) for rule in FEATURES] + [("agop", 0.5), ("fact", 0.5)])
@pytest.mark.parametrize("kernel", [Laplace(3.0), Gaussian(2.0), Quadratic()], **NAMED)
def test_rfm_is_the_loop_by_hand(kernel: Kernel, rule: str, power: float, outputs: int) -> None:
    x, y, new = regression(c=outputs)
    normalise = not (isinstance(kernel, Quadratic) and rule.startswith("fact"))
    stages = oracles.recursive_feature_machine(kernel, x, y, 0.3, 3, rule, power, normalise)
    expected = [oracles.kernel_values(kernel, new, x, M) @ A for M, A in stages]
    assert apart(expected[1], expected[0]) > 1e-3
    target = y.numpy() if outputs > 1 else y[:, 0].numpy()
    model = RFMRegressor(kernel, rule, 3, 0.3, power=power, early_stopping=False, keep="all").fit(x.numpy(), target)
    found = list(model.staged_predict(new.numpy()))
    assert len(found) == 4
    for stage, value in zip(found, expected, strict=True):
        assert_close(stage, value if outputs > 1 else value[:, 0], 1e-6)
    assert len(model.history_) == 4
    assert_close(model.predict(new.numpy()), found[model.best_iteration_], 1e-12)
    M, A = stages[model.best_iteration_]
    assert_close(model.feature_matrix_, M, 1e-6)
    slopes = oracles.gradient_outer(oracles.machine_gradients(kernel, x, A, M)).diagonal()
    assert_close(model.feature_importances_, slopes / slopes.sum(), 1e-6)


def test_classifier_is_the_loop_on_one_hot_labels() -> None:
    x, _, new = regression(40)
    labels = (x[:, 0] > 0.3).long() + (x[:, 1] > 0).long()
    y = torch.eye(3, dtype=torch.float64)[labels]
    stages = oracles.recursive_feature_machine(Laplace(3.0), x, y, 0.3, 2, "agop")
    model = RFMClassifier(Laplace(3.0), iterations=2, ridge=0.3, power=1.0, early_stopping=False,
                          keep="all").fit(x.numpy(), labels.numpy())
    expected = [oracles.kernel_values(Laplace(3.0), new, x, M) @ A for M, A in stages]
    assert_close(model.decision_function(new.numpy()), expected[model.best_iteration_], 1e-6)
    assert [p.tolist() for p in model.staged_predict(new.numpy())] == [f.argmax(1).tolist() for f in expected]


@pytest.mark.parametrize("kernel", KERNELS, **NAMED)
def test_without_iterations_it_is_kernel_ridge_regression(kernel: Any) -> None:
    x, y, new = (t.numpy() for t in regression(15, c=2))
    K = oracles.kernel_values(kernel, torch.from_numpy(x), torch.from_numpy(x)).numpy()
    k = oracles.kernel_values(kernel, torch.from_numpy(new), torch.from_numpy(x)).numpy()
    by_hand = k @ np.linalg.solve(K + 0.2 * np.eye(len(x)), y)

    def pair(a: Any, b: Any) -> float:
        return oracles.kernel_values(kernel, torch.from_numpy(a[None]), torch.from_numpy(b[None])).item()

    others = sklearn.kernel_ridge.KernelRidge(alpha=0.2, kernel=pair).fit(x, y).predict(new)
    for model in (RFMRegressor(kernel, iterations=0, ridge=0.2), KernelRidge(kernel, ridge=0.2)):
        model.fit(x, y)
        assert_close(model.predict(new), by_hand, 1e-8)
        assert_close(model.predict(new), others, 1e-8)
        assert_close(model.feature_matrix_, np.eye(3), 0)


def test_geometric_fact_ends_where_the_metric_is_fact() -> None:
    """M = FACT at a fixed point, for a kernel in which the metric sets its own scale.  [theory/FACT 1.4]"""
    x, y, _ = regression(40, c=2)
    A = y
    M = torch.eye(3, dtype=torch.float64)
    for _ in range(200):
        A, _ = oracles.kernel_ridge(oracles.kernel_values(Quadratic(), x, x, M), y, 0.1)
        M = updated("fact_geometric", Quadratic(), x, A, M)
    assert_close(fact(Quadratic(), x, A, M), M, 1e-6)
    assert_close(updated("fact", Quadratic(), x, A, M), M, 1e-6)


# ------------------------------------------------------------------------------------------------ what a stranger found


@pytest.mark.parametrize("given", ["copies", "weights", "tiny weights"])
def test_copies_and_the_scale_of_weights_choose_the_same_model(given: str) -> None:
    """A copy that stays in the fit would flatter the smallest ridge."""
    X, y = sklearn.datasets.make_friedman1(200, noise=3, random_state=0)
    plain = KernelRidge().fit(X[:100], y[:100])
    if given == "copies":
        model = KernelRidge().fit(np.repeat(X[:100], 3, 0), np.repeat(y[:100], 3))
    else:
        model = KernelRidge().fit(X[:100], y[:100], np.full(100, 3.0 if given == "weights" else 1e-6))
    assert model.loss_ == pytest.approx(plain.loss_, rel=1e-6)
    assert_close(torch.from_numpy(model.predict(X[100:])), torch.from_numpy(plain.predict(X[100:])), 1e-6)


def test_the_logistic_loss_is_never_replaced_by_another() -> None:
    X, y = sklearn.datasets.make_classification(400, 6, random_state=0)
    with pytest.raises(MemoryBudgetError, match=r'400 points that the logistic loss needs.*smallest.*loss="squared"'):
        RFMClassifier(Laplace(5.0), loss="logistic", ridge=0.3, iterations=0, memory="4MiB").fit(X, y)


@pytest.mark.parametrize("kernel", [Laplace(3.0), Gaussian(3.0)], **NAMED)
def test_logistic_regression_with_hardly_any_ridge_fits(kernel: Kernel) -> None:
    """Whether or not it converged, the function is that of the smallest loss found."""
    X, y = sklearn.datasets.make_classification(200, 6, n_informative=4, flip_y=0.1, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = RFMClassifier(kernel, loss="logistic", ridge=1e-6, iterations=0, select=3).fit(X, y)
    assert model.score(X, y) == 1


def test_logistic_regression_says_when_it_did_not_converge() -> None:
    X, y = sklearn.datasets.make_classification(200, 6, n_informative=4, flip_y=0.1, random_state=0)
    with pytest.warns(ConvergenceWarning, match=r"the logistic loss of 200 points with ridge=1e-06 was not minimised.*LIMIT"):
        RFMClassifier(Gaussian(3.0), loss="logistic", ridge=1e-6, iterations=0, select=3).fit(X, y)


@pytest.mark.parametrize("gap", [1e-2, 1e-5, 1e-8, 1e-11])
@pytest.mark.parametrize("kernel", [Laplace(5.0), NTK(1)], **NAMED)
def test_agop_of_rows_that_nearly_meet(kernel: Kernel, gap: float) -> None:
    """Slopes grow at a kink, and their squares must not be what cancels."""
    x, A = normal(60, 12), normal(60, 8, seed=1)
    x[1] = x[0] + gap * normal(1, 12, seed=2)[0]
    J = torch.einsum("jc,ijd->icd", A, torch.as_tensor(kernel.gradients(x)))
    expected = torch.einsum("icd,ice->de", J, J) / 60
    found = torch.as_tensor(agop(kernel, x, A))
    assert_close(found, expected, max(1e-9, 1e-15 / gap))
    assert (found.diagonal() > 0).all()


@pytest.mark.parametrize("kernel", [Gaussian(), Laplace()], **NAMED)
@pytest.mark.parametrize("n", [400, 1300])
def test_a_bandwidth_far_from_the_rule_of_thumb_is_found(kernel: Kernel, n: int) -> None:
    draw = np.random.default_rng(0)
    X = draw.uniform(-3, 3, (n + 500, 2))
    y = np.sin(3 * X[:, 0]) * np.sin(3 * X[:, 1]) > 0
    assert RFMClassifier(kernel, iterations=0).fit(X[:n], y[:n]).score(X[n:], y[n:]) > 0.8


def test_what_is_chosen_does_not_depend_on_the_order_of_the_rows_to_choose_by() -> None:
    X, y = sklearn.datasets.make_classification(1800, 8, n_informative=4, flip_y=0.05, random_state=1)
    model = RFMClassifier(Gaussian(), iterations=1)
    losses = []
    for order in (np.arange(1000), np.argsort(y[800:], kind="stable")):
        losses.append(model.fit(X[:800], y[:800], validation=(X[800:][order], y[800:][order])).loss_)
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.parametrize("model", [RFMRegressor(iterations=1), RFMClassifier(iterations=1)], ids=["regressor", "classifier"])
def test_a_fit_that_fails_leaves_the_model_that_was_there(model: Any) -> None:
    X, y = sklearn.datasets.make_classification(80, 5, random_state=0)
    model = sklearn.base.clone(model)
    with pytest.raises(MemoryBudgetError):
        model.set_params(memory="1KiB").fit(X, y)
    with pytest.raises(sklearn.exceptions.NotFittedError):
        model.predict(X)
    before = model.set_params(memory="1GiB").fit(X, y).predict(X)
    with pytest.raises(MemoryBudgetError):
        model.set_params(memory="1KiB").fit(100 * X[:, :3] + 7, 3 + y)
    assert (model.set_params(memory="1GiB").predict(X) == before).all()


@pytest.mark.parametrize(("kernel", "select"), [(Laplace(3.0), 5), (Laplace(3.0), 20), (NTK(3), 3), (NTK(1), 10)], **NAMED)
def test_memory_bounds_folds_and_kernels_of_several_arrays(kernel: Kernel, select: int) -> None:
    X, y, w, bound = normal(600, 5).numpy(), normal(600, 1, seed=1).numpy(), np.ones(600), 12 * 2 ** 20
    whole, random = problem(X, y, w, np.random.RandomState(0)), np.random.RandomState(0)
    views = Rows(X, y, w, folds=select).views(whole, [kernel], bound, random)
    for view in views:
        view.geometry(kernel), list(view.others(kernel))
    held = sum(g.untyped_storage().nbytes() for view in views for g in view._known.values())
    system = 8 * len(views[0].data) ** 2
    assert bound / 3 < held + 2 * system <= bound  # a kernel and its factor are needed besides


@pytest.mark.parametrize("kernel", [NTK(3), NNGP(2, "erf")], **NAMED)
def test_recursions_hold_some_rows_at_a_time(kernel: Kernel) -> None:
    x = normal(700, 3)
    with Largest() as held:
        K = torch.as_tensor(kernel(x))
    assert held.most <= 3 * 8 * 700 ** 2 + 1  # the geometry
    assert_close(K[5:7], torch.as_tensor(kernel(x[5:7], x)), 1e-12)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor made."""

    most = 0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = f(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor):
                self.most = max(self.most, t.untyped_storage().nbytes())
        return out


def test_many_rows_to_choose_by_are_judged_in_parts() -> None:
    X, y = normal(4000, 4).numpy(), normal(4000, 1)[:, 0].numpy()
    model = RFMRegressor(iterations=1)
    with Largest() as held:
        whole = model.fit(X[:100], y[:100], validation=(X[100:], y[100:]))
    assert held.most < 3900 * 100 * 8
    f = whole.predict(X[100:])
    assert whole.loss_ == pytest.approx(1 - sklearn.metrics.r2_score(y[100:], f), rel=1e-9)


def test_tables_with_all_kinds_of_columns() -> None:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"number": draw.standard_normal(60), "yes": draw.random(60) > 0.5,
                          "word": pd.array(["x", None, "y"] * 20, dtype="string"), "kind": pd.Categorical([1, 2, None] * 20),
                          "count": pd.array([1, None, 3] * 20, dtype="Int64")})
    y = frame.word.isna().to_numpy()  # a gap tells
    model = tabular(RFMClassifier(iterations=0)).fit(frame, y)
    assert model.score(frame, y) == 1
    assert list(model[:-1].get_feature_names_out()) == ["number", "yes", "count", "missingindicator_count", "word_(missing)",
                                                        "word_x", "word_y", "kind_(missing)", "kind_1", "kind_2"]
    tabular(RFMClassifier(iterations=0)).fit(frame[["yes"]], y)
    with pytest.raises(SelectionError, match=r"columns \['day'\] hold dates: turn them into numbers"):
        tabular(RFMClassifier()).fit(frame.assign(day=pd.Timestamp("2020-01-01")), y)


def test_choosing_by_groups_says_how() -> None:
    X, y = normal(40, 3).numpy(), normal(40, 1)[:, 0].numpy()
    with pytest.raises(SelectionError, match=r"select=GroupKFold.*needs groups.*select=list\(cv.split\(X, y, groups\)\)"):
        RFMRegressor(select=sklearn.model_selection.GroupKFold(4)).fit(X, y)
    RFMRegressor(iterations=1, select=list(sklearn.model_selection.GroupKFold(4).split(X, y, np.arange(40) // 5))).fit(X, y)


def test_a_set_to_choose_by_makes_select_irrelevant() -> None:
    X, y = sklearn.datasets.make_classification(80, 4, random_state=0)
    model = RFMClassifier(Laplace(3.0), iterations=0, loss="logistic", select="loo")
    model.fit(X[:40], y[:40], validation=(X[40:], y[40:, None]))
    assert model.score(X, y) > 0.6


def test_stages_that_were_not_kept_are_not_promised() -> None:
    X, y = sklearn.datasets.make_friedman1(60, random_state=0)
    model = RFMRegressor(iterations=2, early_stopping=False, ridge=0.1).fit(X, y).set_params(keep="all")
    with pytest.raises(SelectionError, match='only the best iteration was kept: fit with keep="all"'):
        list(model.staged_predict(X))


def test_a_model_in_a_file_holds_nothing_of_a_device() -> None:
    X, y = sklearn.datasets.make_friedman1(60, random_state=0)
    model = RFMRegressor(iterations=1).fit(X, y)
    before = model.predict(X)
    assert model._derived  # kept for the next prediction
    again = pickle.loads(pickle.dumps(model))
    assert not again._derived
    assert (again.predict(X) == before).all()


# ------------------------------------------------------------------------------------------------ solvers


def merged(x: Tensor, y: Tensor, copies: list[int] | Tensor) -> Problem:
    return problem(x.numpy(), y.numpy(), np.asarray(copies, dtype=float), np.random.RandomState(0))


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("case", ["plain", "duplicates", "weights", "both", "zero weights"])
@pytest.mark.parametrize("kernel", [Laplace(2.0), Quadratic()], **NAMED)
def test_leaving_out_by_fitting_again(kernel: Kernel, case: str, intercept: bool) -> None:
    x, y, copies = normal(12, 3), normal(12, 2, seed=1), [1] * 12
    if case in ("duplicates", "both"):
        x[7], x[9], x[10] = x[2], x[2], x[5]
    if case in ("weights", "both"):
        copies = [1, 3, 2, 1, 1, 4, 1, 1, 1, 2, 1, 1]
    if case == "zero weights":
        copies = [1, 0, 1, 1, 2, 0, 1, 1, 1, 0, 1, 1]
    kept = [r for r in range(12) if copies[r]]
    x, y, copies = x[kept], y[kept], [copies[r] for r in kept]
    expected = oracles.left_out(kernel, x, y, copies, 0.3, intercept)
    data = merged(x, y, copies)
    assert len(data) == len(torch.unique(x, dim=0))
    for judged in (len(data), 3, 1, 0):
        solution = solve(torch.as_tensor(kernel(data.x)), data, 0.3, intercept=intercept, judged=judged)
        rows = [r for r in range(len(x)) if data.point[r] >= len(data) - judged]
        if judged:
            assert solution.judged is not None
            assert solution.left_out is not None
            assert sorted(solution.judged.tolist()) == rows
            assert_close(solution.left_out, expected[solution.judged], 1e-9)
        again = [r for r in range(len(x)) for _ in range(copies[r])]
        A, b = oracles.kernel_ridge(oracles.kernel_values(kernel, x[again], x[again]), y[again], 0.3, intercept)
        new = normal(5, 3, seed=7)
        found = torch.as_tensor(kernel(new, data.x)) @ solution.A + solution.b
        assert_close(found, oracles.kernel_values(kernel, new, x[again]) @ A + b, 1e-9)


def test_a_row_is_left_out_with_its_whole_weight() -> None:
    x, y, w = normal(8, 2), normal(8, 1), torch.tensor([1.0, 0.5, 2.5, 0.25, 1, 1, 1, 1], dtype=torch.float64)
    data = merged(x, y, w)
    solution = solve(torch.as_tensor(Laplace(1.0)(data.x)), data, 0.3, intercept=False, judged=8)
    assert solution.left_out is not None
    assert solution.judged is not None
    K = oracles.kernel_values(Laplace(1.0), x, x)
    for r, found in zip(solution.judged.tolist(), solution.left_out, strict=True):
        kept = torch.arange(8) != r
        A = torch.linalg.solve(K[kept][:, kept] + 0.3 * (1 / w[kept]).diag(), y[kept])
        assert_close(found, K[r, kept] @ A, 1e-9)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("kernel", [Laplace(2.0), Gaussian(1.5), LaplaceL1(3.0), NTK(2)], **NAMED)
def test_conjugate_gradients_agree_with_the_dense_solution(kernel: Kernel, intercept: bool, outputs: int,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks kept, and with so little memory that they are computed again for each product."""
    x, y = normal(200, 4), normal(200, outputs, seed=1)
    copies = 1 + torch.arange(200) % 2
    again = torch.arange(200).repeat_interleave(copies)
    A, b = oracles.kernel_ridge(oracles.kernel_values(kernel, x[again], x[again]), y[again], 5.0, intercept)
    expected = oracles.kernel_values(kernel, x[:20], x[again]) @ A + b
    counted: list[int] = []
    geometry = type(kernel).geometry

    def spy(self: Any, u: Tensor, v: Tensor) -> Tensor:
        counted.append(len(u))
        return geometry(self, u, v)

    monkeypatch.setattr(type(kernel), "geometry", spy)
    data = merged(x, y, copies)
    calls = []
    for memory in (10_000_000, 440_000):
        counted.clear()
        solution = solve_blocks(kernel, data, data.x, 5.0, intercept=intercept, memory=memory, tolerance=1e-9)
        calls.append(len(counted))
        assert_close(torch.as_tensor(kernel(x[:20], data.x)) @ solution.A + solution.b, expected, 1e-6)
    assert calls[1] > 3 * calls[0]


def test_conjugate_gradients_stop_at_their_tolerance() -> None:
    x, y = normal(150, 4), normal(150, 1, seed=1)
    data = merged(x, y, torch.ones(150))
    exact, _ = oracles.kernel_ridge(oracles.kernel_values(Laplace(2.0), data.x, data.x), data.y, 0.01)
    errors = [apart(solve_blocks(Laplace(2.0), data, data.x, 0.01, intercept=False, memory=10_000_000, tolerance=t).A, exact)
              for t in (1e-1, 1e-3, 1e-6)]
    assert errors[0] >= errors[1] >= errors[2]
    assert errors[2] < 1e-3
    with pytest.raises(SingularKernelError, match=r"conjugate gradients left a residual of .* after 1 steps, with ridge=0.0001"):
        solve_blocks(Laplace(2.0), data, data.x, 1e-4, intercept=False, memory=10_000_000, tolerance=1e-12, most=1)
    with pytest.raises(SingularKernelError, match=r"150 distinct rows do not fit memory=.*iterative one needs a positive ridge"):
        solve_blocks(Laplace(2.0), data, data.x, 0.0, intercept=False, memory=10_000_000)


def test_the_smallest_memory_that_is_said_to_work_works() -> None:
    data = merged(normal(150, 4), normal(150, 1, seed=1), torch.ones(150))
    with pytest.raises(MemoryBudgetError, match=r"memory=1000B cannot hold one row of the kernel of 150 points") as error:
        solve_blocks(Laplace(2.0), data, data.x, 0.1, intercept=False, memory=1000)
    smallest = re.search(r"The smallest that works is ([\d.]+\w+)", str(error.value))
    assert smallest
    solve_blocks(Laplace(2.0), data, data.x, 0.1, intercept=False, memory=int(1.01 * parse_bytes(smallest[1])))


def cross_entropy(f: Tensor, labels: Tensor) -> Tensor:
    """Of each row; one output stands for the two of (-f, f)."""
    return torch.nn.functional.cross_entropy(torch.cat([-f, f], 1) if f.shape[1] == 1 else f, labels, reduction="none")


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("kernel", [Laplace(2.0), Quadratic()], **NAMED)
def test_logistic_regression_is_at_a_minimum(kernel: Kernel, classes: int, intercept: bool) -> None:
    """(K + ...) the gradient in the function vanishes: grad + ridge A = 0, and the sum of grad is 0 if there is a constant."""
    x, ridge = normal(25, 3), 0.2
    labels = ((x[:, 0] + normal(25, 1)[:, 0] > 0).long() + (classes - 2) * (x[:, 1] > 0).long())
    y = torch.eye(3, dtype=torch.float64)[labels] if classes == 3 else 2.0 * labels[:, None].double() - 1
    w = 1.0 + torch.arange(25).double() % 3
    data = merged(x, y, w)
    K = torch.as_tensor(kernel(data.x))
    solution = solve_logistic(K.clone(), data, ridge, intercept=intercept, final=True)
    f = (K @ solution.A + solution.b).requires_grad_()
    weights, order = torch.zeros(25, dtype=torch.float64), torch.zeros(25, dtype=torch.long)
    weights[data.point], order[data.point] = w, labels
    (g,) = torch.autograd.grad((weights * cross_entropy(f, order)).sum(), f)
    assert_close(solution.A, -g / ridge, 1e-4)
    if intercept:
        assert g.sum(0).abs().max() < 1e-4 * g.abs().sum()
    assert solution.b.abs().max() > 1e-3 if intercept else (solution.b == 0).all()


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("classes", [2, 3])
def test_logistic_regression_agrees_with_scikit_learn(classes: int, intercept: bool) -> None:
    """On (x . z)^2 = phi(x) . phi(z), phi the products of coordinates. With two classes sklearn's margin is 2 f, its norm four
    times that of f."""
    x, new, ridge = normal(60, 2), normal(9, 2, seed=1), 0.5
    labels = (x[:, 0] * x[:, 1] + 0.5 * normal(60, 1)[:, 0] > 0.2).long() + (classes - 2) * (x[:, 0] ** 2 > 1).long()
    y = torch.eye(3, dtype=torch.float64)[labels] if classes == 3 else 2.0 * labels[:, None].double() - 1

    def phi(a: Tensor) -> np.ndarray:
        return torch.stack([a[:, 0] ** 2, math.sqrt(2) * a[:, 0] * a[:, 1], a[:, 1] ** 2], 1).numpy()

    other = sklearn.linear_model.LogisticRegression(C=(4 if classes == 2 else 1) / ridge, fit_intercept=intercept, tol=1e-12,
                                                    max_iter=5000).fit(phi(x), labels.numpy())
    data = merged(x, y, torch.ones(60))
    solution = solve_logistic(torch.as_tensor(Quadratic()(data.x)), data, ridge, intercept=intercept, final=True)
    f = torch.as_tensor(Quadratic()(new, data.x)) @ solution.A + solution.b
    found = torch.softmax(torch.cat([-f, f], 1) if classes == 2 else f, 1)
    assert_close(found, other.predict_proba(phi(new)), 1e-4)


# ------------------------------------------------------------------------------------------------ scikit-learn

CHEAP = [
    RFMRegressor(iterations=1), RFMClassifier(iterations=1), KernelRidge(),
    RFMClassifier(Laplace(3.0), loss="logistic", iterations=1, ridge=0.1, select=2),
    RFMRegressor(Laplace(3.0), "fact", iterations=1, ridge=0.1),
    RFMClassifier(LaplaceL1(5.0), iterations=1, ridge=0.1, diagonal=True)]
WHOLE = [
    RFMRegressor(), RFMClassifier(), KernelRidge(), RFMClassifier(loss="logistic"), RFMRegressor(features="fact"),
    RFMClassifier(LaplaceL1(), diagonal=True)]


@sklearn.utils.estimator_checks.parametrize_with_checks(CHEAP)
def test_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.long
@sklearn.utils.estimator_checks.parametrize_with_checks(WHOLE)
def test_scikit_learn_with_defaults(estimator: Any, check: Any) -> None:
    check(estimator)


def table(n: int = 60, d: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """X with columns of unequal scale, a target of the first two, and three classes."""
    X = np.random.default_rng(seed).standard_normal((n, d)) * (1 + np.arange(d))
    y = np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.1 * np.random.default_rng(seed + 1).standard_normal(n)
    return X, y, np.digitize(y, [-0.5, 0.5])


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    X, y = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    return X[order[:300]], y[order[:300]], X[order[300:900]], y[order[300:900]]


def test_clone_and_pickle() -> None:
    X, y, labels = table()
    for model, target in ((RFMRegressor([Laplace(), Gaussian(2.0)], iterations=1), y), (KernelRidge(NTK(2)), y),
                          (RFMClassifier(iterations=1, keep="all"), labels)):
        twin = sklearn.base.clone(model)
        assert repr(twin) == repr(model)
        assert twin.get_params() == model.get_params()
        model.fit(X, target)
        again = pickle.loads(pickle.dumps(model))
        assert np.array_equal(again.predict(X), model.predict(X))
        assert np.array_equal(twin.fit(X, target).predict(X), model.predict(X))
        assert not hasattr(sklearn.base.clone(model), "feature_matrix_")


def test_kernels_are_compared_hashed_and_copied_by_value() -> None:
    for kernel in KERNELS:
        again = pickle.loads(pickle.dumps(kernel))
        assert again == kernel == sklearn.base.clone(kernel, safe=False)
        assert hash(again) == hash(kernel)
        assert eval(repr(kernel)) == kernel
    assert Laplace(1.0) != Laplace(2.0) != Gaussian(2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Laplace(1.0).bandwidth = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.long)])
def test_pipelines_and_grids(jobs: int) -> None:
    """The best of a grid of kernels and ridges, also in two processes."""
    X, y, _ = table()
    pipe = sklearn.pipeline.make_pipeline(sklearn.preprocessing.StandardScaler(), RFMRegressor(iterations=1))
    grid = {"rfmregressor__kernel": [Laplace(3.0), Gaussian(0.01)], "rfmregressor__ridge": [0.1, 100.0]}
    found = sklearn.model_selection.GridSearchCV(pipe, grid, cv=3, n_jobs=jobs, error_score="raise").fit(X, y)
    assert found.best_params_ == {"rfmregressor__kernel": Laplace(3.0), "rfmregressor__ridge": 0.1}
    assert found.predict(X).shape == (60,)


def test_labels_are_given_back_as_they_came() -> None:
    X, _, labels = table()
    for names in (np.array(["low", "middle", "high"]), np.array([7, 3, 5]), np.array([2.0, 1.0, 4.0]),
                  np.array(["a", "b", "c"], dtype=object)):
        model = RFMClassifier(Laplace(4.0), ridge=0.1, iterations=1, keep="all").fit(X, names[labels])
        assert np.array_equal(model.classes_, np.unique(names))
        assert model.predict(X).dtype == names.dtype
        assert (model.predict(X) == names[labels]).mean() > 0.9
        assert all(set(p) <= set(names) for p in model.staged_predict(X))
    two = RFMClassifier(Laplace(4.0), ridge=0.1, iterations=0).fit(X, np.array([True, False])[labels % 2])
    assert two.predict(X).dtype == bool


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("classes", [2, 3])
def test_probabilities(classes: int, loss: str) -> None:
    X, _, labels = table()
    labels = np.minimum(labels, classes - 1)
    model = RFMClassifier(Laplace(4.0), ridge=0.1, iterations=1, loss=loss).fit(X, labels)
    new = table(seed=5)[0]
    P, f = model.predict_proba(new), model.decision_function(new)
    assert P.shape == (60, classes)
    assert np.allclose(P.sum(1), 1, atol=1e-12)
    assert (P >= 0).all()
    assert np.array_equal(model.classes_[P.argmax(1)], model.predict(new))
    assert f.shape == ((60,) if classes == 2 else (60, 3))
    assert np.array_equal(model.predict(new), (f > 0) if classes == 2 else f.argmax(1))
    Z = model.temperature_ * (np.stack([-f, f], 1) if classes == 2 else f)
    assert_close(P, scipy.special.softmax(Z, axis=1), 1e-12)


@pytest.mark.parametrize("two", [False, True])
def test_probabilities_are_calibrated(digits: tuple[np.ndarray, ...], two: bool) -> None:
    """Nearer to the truth on new digits than with the outputs as they are, and within a tenth of the best temperature."""
    X, y, new, truth = digits
    y, truth = (y % 2, truth % 2) if two else (y, truth)
    model = RFMClassifier(Laplace(), iterations=1).fit(X, y)
    f = model.decision_function(new)
    Z = np.stack([-f, f], 1) if two else f

    def loss(T: float) -> float:
        return sklearn.metrics.log_loss(truth, scipy.special.softmax(T * Z, axis=1))

    found = sklearn.metrics.log_loss(truth, model.predict_proba(new))
    assert found == pytest.approx(loss(model.temperature_), rel=1e-9)
    assert found < loss(1.0)
    assert found < 1.1 * min(loss(T) for T in np.geomspace(0.1, 100, 100))
    assert model.score(new, truth) > 0.9


def test_several_targets() -> None:
    """Without a choice to make, each is what it would be alone; a column of one target keeps its shape."""
    X, y, _ = table()
    Y = np.stack([y, y**2, X[:, 2]], 1)
    together = KernelRidge(Laplace(4.0), ridge=0.1).fit(X, Y).predict(X)
    for i in range(3):
        assert_close(together[:, i], KernelRidge(Laplace(4.0), ridge=0.1).fit(X, Y[:, i]).predict(X), 1e-10)
    model = RFMRegressor(iterations=1, keep="all").fit(X, Y)
    assert model.predict(X).shape == (60, 3)
    assert model.score(X, Y) > 0.7
    assert [p.shape for p in model.staged_predict(X)] == [(60, 3)] * len(model.history_)
    assert RFMRegressor(iterations=0).fit(X, Y[:, :1]).predict(X).shape == (60, 1)


def frame() -> tuple[pd.DataFrame, np.ndarray]:
    r = np.random.default_rng(0)
    n = 80
    data = pd.DataFrame({
        "size": r.standard_normal(n), "age": r.integers(20, 60, n), "city": r.choice(["Bonn", "Oslo", "Rome"], n),
        "grade": pd.Categorical(r.choice(["a", "b"], n)), "new": r.random(n) > 0.5})
    y = data["size"] + (data["city"] == "Oslo") * 2.0 - (data["grade"] == "a") * 1.0
    data.loc[3, "size"], data.loc[5, "city"], data.loc[7, "grade"] = np.nan, None, None
    return data, y.to_numpy()


def test_tables_with_words_and_gaps() -> None:
    data, y = frame()
    model = tabular(RFMRegressor(iterations=1)).fit(data, y)
    assert model.score(data, y) > 0.8
    other = data.copy()
    other.loc[0, "city"] = "Ulm"  # a word never seen
    other.loc[1, "size"] = np.nan
    assert np.isfinite(model.predict(other)).all()
    assert apart(model.predict(other)[:2], model.predict(data)[:2]) > 1e-3
    sorts = np.where(y > 1, "much", "little")
    assert tabular(RFMClassifier(iterations=1)).fit(data, sorts).score(data, sorts) > 0.9
    assert sklearn.base.clone(model).fit(data, y).predict(data) == pytest.approx(model.predict(data))
    names = model[:-1].get_feature_names_out()
    assert {"size", "age", "city_Bonn", "city_Oslo", "city_Rome"} <= set(names)
    assert len(model[-1].feature_importances_) == len(names)


@pytest.mark.parametrize("model", [
    RFMRegressor(Laplace(3.0), ridge=0.3, iterations=2), RFMRegressor(iterations=1), KernelRidge(),
    RFMRegressor(iterations=1, select=3), RFMRegressor(Laplace(3.0), "fact", 2, 0.3),
    RFMRegressor(Laplace(3.0), "agop_centred", 2, 0.3),
    RFMClassifier(Laplace(3.0), ridge=0.3, iterations=2), RFMClassifier(iterations=1),
    RFMClassifier(Laplace(3.0), ridge=0.3, iterations=1, loss="logistic")], **NAMED)
def test_a_weight_is_a_number_of_copies_and_none_is_removal(model: Any) -> None:
    X, y, labels = table(40)
    target = labels if isinstance(model, RFMClassifier) else y
    w = np.arange(40) % 4
    copies = np.repeat(np.arange(40), w)
    new = table(seed=5)[0]
    kept = w > 0

    def outputs(*fit: Any) -> np.ndarray:
        fitted = sklearn.base.clone(model).fit(*fit)
        return fitted.predict_proba(new) if isinstance(model, RFMClassifier) else fitted.predict(new)

    weighted = outputs(X, target, w)
    assert_close(weighted, outputs(X[copies], target[copies]), 1e-6)
    assert_close(weighted, outputs(X[kept], target[kept], w[kept]), 1e-6)
    assert apart(weighted, outputs(X, target)) > 1e-3


def global_state() -> tuple[Any, ...]:
    numbers: Any = np.random.get_state()[1]  # type: ignore[index]  # noqa: NPY002
    return (numbers.tolist(), torch.get_rng_state().tolist(), torch.is_grad_enabled(), torch.get_num_threads(),
            torch.get_default_dtype())


def test_fitting_again_gives_the_same_and_leaves_no_trace() -> None:
    X, y, labels = table()
    state = global_state()
    copies = X.copy(), y.copy()
    for make in (lambda: RFMRegressor(iterations=1).fit(X, y), lambda: RFMClassifier(iterations=1).fit(X, labels),
                 lambda: RFMClassifier(Laplace(3.0), iterations=1, loss="logistic", ridge=0.1).fit(X, labels),
                 lambda: KernelRidge(NTK(2)).fit(X, y), lambda: RFMRegressor(NTK(1), ridge=0.1, iterations=1).fit(X, y)):
        first = make()
        assert np.array_equal(first.predict(X), make().predict(X))
        assert np.array_equal(first.predict(X), sklearn.base.clone(first).fit(X, labels).fit(
            X, labels if isinstance(first, RFMClassifier) else y).predict(X))
        with torch.no_grad():
            assert np.array_equal(make().predict(X), first.predict(X))
    assert state == global_state()
    assert np.array_equal(X, copies[0])
    assert np.array_equal(y, copies[1])


@pytest.mark.parametrize("kernel", [Laplace(3.0), NTK(1)], **NAMED)
def test_fitting_without_gradients_of_torch(kernel: Kernel) -> None:
    X, y, _ = table()
    model = RFMRegressor(kernel, ridge=0.1, iterations=1).fit(X, y)
    with torch.inference_mode():
        assert np.array_equal(model.predict(X), RFMRegressor(kernel, ridge=0.1, iterations=1).fit(X, y).predict(X))


def test_the_default_type_of_torch_does_not_matter() -> None:
    X, y, _ = table()
    expected = RFMRegressor(iterations=1).fit(X, y).predict(X)
    try:
        torch.set_default_dtype(torch.float16)
        assert np.array_equal(RFMRegressor(iterations=1).fit(X, y).predict(X), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def losses(model: Any) -> list[float]:
    return [h["loss"] for h in model.history_]


def test_what_was_chosen_is_written_down() -> None:
    X, y, _ = table()
    model = RFMRegressor([Laplace(), Gaussian()], iterations=2, early_stopping=False).fit(X, y)
    assert [h["iteration"] for h in model.history_] == [0, 1, 2]
    assert model.kernel_ == model.history_[model.best_iteration_]["kernel"]
    assert model.ridge_ == model.history_[model.best_iteration_]["ridge"]
    assert isinstance(model.kernel_, Laplace | Gaussian)
    assert model.kernel_.bandwidth
    assert model.best_iteration_ == int(np.argmin(losses(model)))
    assert model.loss_ == min(losses(model))


def test_leave_one_out_of_the_learner_by_fitting_again() -> None:
    """The loss in the history is 1 - R^2 of predictions for rows that were left out."""
    X, y, _ = table(25)
    model = RFMRegressor(Laplace(3.0), ridge=0.3, iterations=0, select="loo").fit(X, y)
    f = [KernelRidge(Laplace(3.0), ridge=0.3).fit(np.delete(X, i, 0), np.delete(y, i)).predict(X[[i]])[0] for i in range(25)]
    assert model.history_[0]["loss"] == pytest.approx(1 - sklearn.metrics.r2_score(y, f), rel=1e-8)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_loss_and_the_temperature_of_a_classifier_by_fitting_again(classes: int) -> None:
    """The least mean log loss of softmax(T f) over T, where f are outputs for rows that were left out."""
    X, y, _ = table(25)
    labels = np.digitize(y, [0] if classes == 2 else [-0.5, 0.5])
    Y = np.where(labels, 1.0, -1.0)[:, None] if classes == 2 else np.eye(3)[labels]
    model = RFMClassifier(Laplace(3.0), ridge=0.3, iterations=0, select="loo").fit(X, labels)
    f = np.concatenate([KernelRidge(Laplace(3.0), ridge=0.3).fit(np.delete(X, i, 0), np.delete(Y, i, 0)).predict(X[[i]])
                        for i in range(25)])
    Z = np.concatenate([-f, f], 1) if classes == 2 else f
    best = scipy.optimize.minimize_scalar(lambda T: sklearn.metrics.log_loss(labels, scipy.special.softmax(T * Z, axis=1)),
                                          bounds=(0.01, 100), method="bounded", options={"xatol": 1e-9})
    assert losses(model)[0] == pytest.approx(best.fun, rel=1e-7)
    assert model.temperature_ == pytest.approx(best.x, rel=1e-3)


def test_a_validation_set_is_what_is_chosen_by() -> None:
    X, y, _ = table()
    new, truth, _ = table(seed=3)
    model = RFMRegressor(**BASE).fit(X, y, validation=(new, truth))
    for h, p in zip(model.history_, model.staged_predict(new), strict=True):
        assert h["loss"] == pytest.approx(1 - sklearn.metrics.r2_score(truth, p), rel=1e-8)
    assert model.best_iteration_ == int(np.argmin(losses(model)))


# ------------------------------------------------------------------------------------------------ bad input


def with_value(X: np.ndarray, value: float) -> np.ndarray:
    X = X.copy()
    X[3, 1] = value
    return X


X20, Y20, C20 = table(20, 3)
EDGE = KernelRidge(Laplace(1.0), ridge=0.1)
BAD: dict[str, tuple[Any, str]] = {
    "NaN": (lambda: RFMRegressor().fit(with_value(X20, np.nan), Y20), "Input X contains NaN"),
    "Inf": (lambda: RFMClassifier().fit(with_value(X20, np.inf), C20), "Input X contains infinity"),
    "NaN target": (lambda: RFMRegressor().fit(X20, np.where(Y20 > 0, np.nan, Y20)), "Input y contains NaN"),
    "NaN in predict": (lambda: sklearn.base.clone(EDGE).fit(X20, Y20).predict(with_value(X20, np.nan)), "Input X contains NaN"),
    "all constant": (lambda: RFMRegressor().fit(np.ones((20, 3)), Y20),
                     "all 20 rows have the same inputs: there is nothing to learn"),
    "all constant, with a ridge": (lambda: sklearn.base.clone(EDGE).fit(np.ones((20, 3)), Y20),
                                   "all 20 rows have the same inputs"),
    "one class": (lambda: RFMClassifier().fit(X20, np.zeros(20)), "y has one class only, .*nothing to tell apart"),
    "one class of weight": (lambda: RFMClassifier().fit(X20, C20, (C20 == 1) * 1.0), "y has one class only, .*1"),
    "one class, by its name": (lambda: RFMClassifier().fit(X20, np.full(20, 4)), "y has one class only, 4:"),
    "one row": (lambda: RFMRegressor().fit(X20[:1], Y20[:1]), "1 sample.*a minimum of 2 is required"),
    "one row of weight": (lambda: RFMRegressor().fit(X20, Y20, np.eye(20)[0]),
                          "only 1 rows have a positive sample_weight: at least 2"),
    "sparse": (lambda: RFMRegressor().fit(scipy.sparse.csr_matrix(X20), Y20), "Sparse data was passed.*dense data is required"),
    "singular": (lambda: KernelRidge(Quadratic(), ridge=0).fit(X20[:, :2], Y20),
                 "kernel matrix of 20 distinct rows is singular to working precision with ridge=0:.*Give a larger ridge"),
    "singular but for rounding": (lambda: KernelRidge(Quadratic(), ridge=1e-15).fit(X20[:, :2], Y20),
                                  "singular to working precision"),
    "singular, and hidden by rounding": (lambda: KernelRidge(Quadratic(), ridge=3e-13).fit(X20[:, :2], Y20),
                                         "singular to working precision"),
    "negative iterations": (lambda: RFMRegressor(iterations=-1).fit(X20, Y20),
                            "iterations=-1: a whole number is needed; 0 is plain"),
    "part of an iteration": (lambda: RFMRegressor(iterations=1.5).fit(X20, Y20),  # type: ignore[arg-type]
                             "iterations=1.5: a whole number is needed"),
    "negative ridge": (lambda: RFMRegressor(ridge=-1).fit(X20, Y20), "ridge=-1: a number of at least 0 is needed, or None"),
    "ridge NaN": (lambda: RFMRegressor(ridge=np.nan).fit(X20, Y20), "ridge=nan: a number of at least 0"),
    "ridge in words": (lambda: KernelRidge(ridge="auto").fit(X20, Y20),  # type: ignore[arg-type]
                       "ridge='auto': a number of at least 0"),
    "unknown features": (lambda: RFMRegressor(features="agopp").fit(X20, Y20), "no rule features= 'agopp'. Close to it: 'agop'"),
    "kernel in words": (lambda: RFMRegressor("laplace").fit(X20, Y20), "kernel='laplace': a kernel object .* is needed, e.g."),
    "kernel of another type": (lambda: RFMRegressor(3).fit(X20, Y20), "kernel=3: a kernel object"),
    "kernel's class": (lambda: RFMRegressor(Laplace).fit(X20, Y20), "kernel=.*Laplace.*: a kernel object"),
    "no kernel": (lambda: RFMRegressor([]).fit(X20, Y20), r"kernel=\[\]: a kernel object"),
    "unknown loss": (lambda: RFMClassifier(loss="hinge").fit(X20, C20),
                     "RFMClassifier has no loss 'hinge'. It has: 'squared', 'logistic'"),
    "unknown selection": (lambda: RFMRegressor(select="cv").fit(X20, Y20), "no way select= 'cv'. It has: .*'loo'"),
    "one fold": (lambda: RFMRegressor(select=1).fit(X20, Y20), "select=1: from 2 to 20 folds"),
    "more folds than rows": (lambda: RFMRegressor(select=21).fit(X20, Y20), "select=21: from 2 to 20 folds"),
    "logistic leave-one-out": (lambda: RFMClassifier(loss="logistic", select="loo").fit(X20, C20),
                               "leaving rows out has no closed form for the logistic loss. Give a number of folds"),
    "logistic without ridge": (lambda: RFMClassifier(loss="logistic", ridge=0).fit(X20, C20), "Give a positive ridge"),
    "no power": (lambda: RFMRegressor(power=0).fit(X20, Y20), "power=0: a positive exponent"),
    "unknown keep": (lambda: RFMRegressor(keep="some").fit(X20, Y20), "keep='some': 'best' .* or 'all'"),
    "stages not kept": (lambda: list(RFMRegressor(Laplace(3.0), ridge=0.1).fit(X20, Y20).staged_predict(X20)),
                        'fit with keep="all"'),
    "huge inputs": (lambda: RFMRegressor().fit(1e200 * X20, Y20), "1e\\+?200|too large|overflow"),
    "huge inputs, with a ridge": (lambda: RFMRegressor(Laplace(1.0), ridge=0.1).fit(1e200 * X20, Y20),
                                  "1e\\+?200|too large|overflow"),
    "one huge input": (lambda: RFMRegressor().fit(with_value(X20, 1e200), Y20), "1e\\+?200|too large|overflow"),
    "huge targets": (lambda: RFMRegressor(Laplace(3.0), ridge=0.1).fit(X20, 1e200 * Y20), "1e\\+?200|too large|overflow"),
    "huge inputs in predict": (lambda: sklearn.base.clone(EDGE).fit(X20, Y20).predict(1e200 * X20),
                               "1e\\+?200|too large|overflow"),
    "empty": (lambda: RFMRegressor().fit(X20[:0], Y20[:0]), "0 sample.*a minimum of 2 is required"),
    "no columns": (lambda: RFMRegressor().fit(X20[:, :0], Y20), "0 feature.*a minimum of 1 is required"),
    "three axes": (lambda: RFMRegressor().fit(X20[None], Y20), "dim 3"),
    "one axis": (lambda: RFMRegressor().fit(Y20, Y20), "Expected 2D array, got 1D array"),
    "other columns in predict": (lambda: sklearn.base.clone(EDGE).fit(X20, Y20).predict(X20[:, :2]),
                                 "X has 2 features, but .* expecting 3"),
    "validation of wrong width": (lambda: RFMRegressor().fit(X20, Y20, validation=(X20[:, :2], Y20)),
                                  "X has 2 features, but .* expecting 3"),
    "validation of wrong length": (lambda: RFMRegressor().fit(X20, Y20, validation=(X20, Y20[:3])),
                                   "validation has 20 rows and 3 targets"),
    "validation alone": (lambda: RFMRegressor().fit(X20, Y20, validation=X20),  # type: ignore[arg-type]
                         r"validation= is a ndarray; a pair \(X, y\) is needed"),
    "validation of more targets": (lambda: RFMRegressor().fit(X20, Y20, validation=(X20, np.stack([Y20, Y20], 1))), "validation"),
    "validation targets NaN": (lambda: RFMRegressor().fit(X20, Y20, validation=(X20, np.nan * Y20)), "NaN"),
    "validation of other classes": (lambda: RFMClassifier().fit(X20, C20, validation=(X20, C20 + 5)),
                                    r"validation has classes that the training rows have not: \[5, 6, 7\]|\[3, 4|\[5, 6"),
    "memory too small": (lambda: RFMRegressor(memory=100).fit(X20, Y20), "memory=100B?"),
    "memory in words": (lambda: RFMRegressor(memory="lots").fit(X20, Y20),
                        "memory='lots' is not a size. Write a number of bytes, or e.g."),
    "no memory": (lambda: RFMRegressor(memory=0).fit(X20, Y20), "memory=0 must be positive"),
    "negative weight": (lambda: RFMRegressor().fit(X20, Y20, -np.ones(20)), "Negative values in data passed to `sample_weight`"),
    "weights of wrong length": (lambda: RFMRegressor().fit(X20, Y20, np.ones(3)), r"sample_weight.shape == \(3,\)"),
    "numbers as classes": (lambda: RFMClassifier().fit(X20, Y20), "Unknown label type: continuous"),
    "words as numbers": (lambda: RFMRegressor().fit(X20, np.array(["a", "b"] * 10)), "could not convert string to float"),
    "words in the table": (lambda: RFMRegressor().fit(pd.DataFrame({"a": ["x"] * 20}), Y20), "could not convert string to float"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, sentence = BAD[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an error, and no riddle before it
        with pytest.raises((ValueError, TypeError, MemoryError), match=f"(?s){sentence}"):
            call()


def test_unusual_input_that_works() -> None:
    def fits(X: np.ndarray, y: np.ndarray, model: Any = None) -> Any:
        model = (RFMRegressor(iterations=1) if model is None else model).fit(X, y)
        assert np.isfinite(model.predict(X)).all()
        return model

    X, y, labels = table(20, 3)
    with pytest.warns(UserWarning, match=r"1 of 4 columns are constant \(3\): they are kept, and say nothing"):
        constant = fits(np.c_[X, np.full(20, 7.0)], y)
    assert constant.feature_importances_[3] == 0
    assert np.allclose(fits(X, y).predict(X), constant.predict(np.c_[X, np.full(20, 7.0)]), rtol=0.2, atol=0.2)
    fits(np.concatenate([X, X, X]), np.concatenate([y, y + 0.1, y - 0.1]))
    fits(np.concatenate([X, X]), np.concatenate([y, y]), KernelRidge(Laplace(1.0), ridge=0))  # copies do not make it singular
    fits(np.random.default_rng(0).standard_normal((10, 50)), y[:10])  # d > n
    fits(X[:3], y[:3])
    fits(X[:2], y[:2], KernelRidge())
    assert np.allclose(fits(X, np.full(20, 3.0), KernelRidge()).predict(X), 3)
    fits(X.astype(np.float32), y.astype(np.float32))
    fits((X * 10).astype(int), labels)
    assert len(fits(X, y, RFMRegressor(iterations=0)).history_) == 1
    few = RFMClassifier(iterations=1).fit(X[:5], [0, 1, 2, 2, 2])  # classes of one row
    assert set(few.predict(X)) <= {0, 1, 2}
    copies = np.array([0, 1] * 10)  # equal inputs with both labels
    both = RFMClassifier(Laplace(1.0), ridge=0.1, iterations=0).fit(X[np.arange(20) // 2], copies)
    assert np.allclose(both.predict_proba(X[:10]), 0.5, atol=1e-6)


def test_two_rows_are_enough() -> None:
    model = RFMRegressor(Laplace(3.0), ridge=0.1, iterations=1).fit(X20[:2], Y20[:2])
    assert np.isfinite(model.predict(X20)).all()
    assert set(RFMClassifier(iterations=1).fit(X20[:2], [0, 1]).predict(X20)) <= {0, 1}


def test_constant_targets_are_predicted() -> None:
    assert np.allclose(RFMRegressor().fit(X20, np.full(20, 3.0)).predict(X20), 3)
    assert np.allclose(RFMRegressor(Laplace(3.0), ridge=0.1).fit(X20, np.zeros(20)).predict(X20), 0)
    assert np.allclose(RFMRegressor(Laplace(3.0), ridge=1e300).fit(X20, Y20).predict(X20), 0)  # nothing is fitted


# ------------------------------------------------------------------------------------------------ knobs

BASE: dict[str, Any] = {"kernel": Laplace(3.0), "ridge": 0.1, "iterations": 2, "early_stopping": False, "keep": "all"}
KNOBS: dict[str, Any] = {
    "kernel": Gaussian(3.0), "features": "fact", "iterations": 1, "ridge": 1.0, "power": 0.3, "diagonal": True,
    "normalise": False, "scale": True, "intercept": True}


def last(model: Any, X: np.ndarray) -> np.ndarray:
    """Outputs of the last iteration."""
    return model._outputs(X, len(model.stages_) - 1)


@pytest.mark.parametrize("knob", [*KNOBS, "loss"])
@pytest.mark.parametrize("learner", [RFMRegressor, RFMClassifier])
def test_a_knob_does_something(learner: Any, knob: str) -> None:
    if knob == "loss" and learner is RFMRegressor:
        assert "loss" not in RFMRegressor().get_params()
        return
    X, y, labels = table()
    target = labels if learner is RFMClassifier else y
    new = table(seed=5)[0]
    before = learner(**BASE).fit(X, target)
    after = learner(**BASE | {knob: "logistic" if knob == "loss" else KNOBS[knob]}).fit(X, target)
    assert apart(last(after, new), last(before, new)) > 1e-3


def test_the_better_of_several_kernels_and_metrics_is_taken() -> None:
    X, y, _ = table()
    model = RFMRegressor(**BASE | {"kernel": [Gaussian(0.01), Laplace(3.0)]}).fit(X, y)
    assert model.kernel_ == Laplace(3.0)
    assert_close(model.predict(X), RFMRegressor(**BASE).fit(X, y).predict(X), 1e-9)
    each = {diagonal: RFMRegressor(**BASE | {"diagonal": diagonal}).fit(X, y) for diagonal in (False, True, None)}
    least = {diagonal: min(losses(m)) for diagonal, m in each.items()}
    assert least[None] == pytest.approx(min(least[False], least[True]), rel=1e-9)
    assert_close(each[None].predict(X), each[least[True] < least[False]].predict(X), 1e-9)


@pytest.mark.parametrize("features", FEATURES)
def test_every_rule_for_features_is_another(features: str) -> None:
    X, y, _ = table()
    found: dict[str, Any] = {rule: last(RFMRegressor(**BASE | {"features": rule}).fit(X, y), X) for rule in FEATURES}
    assert all(apart(found[features], found[rule]) > 1e-3 for rule in FEATURES if rule != features)


@pytest.mark.parametrize("knob", ["kernel", "ridge", "scale", "intercept"])
def test_a_knob_of_kernel_ridge_does_something(knob: str) -> None:
    X, y, _ = table()
    base: dict[str, Any] = {"kernel": Laplace(3.0), "ridge": 0.1}
    before = KernelRidge(**base).fit(X, y).predict(X)
    assert apart(KernelRidge(**base | {knob: KNOBS[knob]}).fit(X, y).predict(X), before) > 1e-3


def test_standardising_and_the_constant_are_on_when_the_ridge_is_chosen() -> None:
    X, y, _ = table()
    chosen = KernelRidge().fit(X, y)
    same = KernelRidge(chosen.kernel_, chosen.ridge_, scale=True, intercept=True).fit(X, y)
    assert_close(chosen.predict(X), same.predict(X), 1e-9)
    Z = (X - X.mean(0)) / X.std(0)
    K = chosen.kernel_(Z)
    A, b = oracles.kernel_ridge(torch.from_numpy(K), torch.from_numpy(y)[:, None], chosen.ridge_, intercept=True)
    assert_close(chosen.predict(X), (K @ A.numpy() + b.numpy())[:, 0], 1e-8)


def test_select_chooses_how_to_judge() -> None:
    X, y, _ = table()
    ways: list[Any] = ["loo", 2, 5, sklearn.model_selection.ShuffleSplit(3, random_state=0)]
    assert len({losses(KernelRidge(Laplace(3.0), ridge=0.1, select=by).fit(X, y))[0] for by in ways}) == 4
    folds = sklearn.model_selection.KFold(4, shuffle=True, random_state=1)
    f = sklearn.model_selection.cross_val_predict(KernelRidge(Laplace(3.0), ridge=0.1), X, y, cv=folds)
    model = KernelRidge(Laplace(3.0), ridge=0.1, select=folds).fit(X, y)
    assert model.history_[0]["loss"] == pytest.approx(1 - sklearn.metrics.r2_score(y, f), rel=1e-8)


def test_the_last_iteration_if_asked_for() -> None:
    X, y, _ = table()
    found = {by: RFMRegressor(**BASE | {"iterations": 4}, power=2.0, select=by).fit(X, y) for by in ("loo", "last")}
    assert losses(found["last"]) == losses(found["loo"])
    assert found["last"].best_iteration_ == 4 != int(np.argmin(losses(found["last"])))
    assert np.array_equal(found["last"].predict(X), list(found["loo"].staged_predict(X))[-1])


def test_early_stopping_stops() -> None:
    X, _, _ = table()
    noise = np.random.default_rng(3).standard_normal(60)
    models = [RFMRegressor(Laplace(3.0), ridge=1.0, iterations=9, early_stopping=early).fit(X, noise) for early in (True, False)]
    lengths = [len(model.history_) for model in models]
    assert lengths[1] == 10
    assert lengths[0] < 10


def test_keep_keeps() -> None:
    X, y, _ = table()
    models = {keep: RFMRegressor(**BASE | {"keep": keep}).fit(X, y) for keep in ("best", "all")}
    assert len(models["best"].stages_) == 1
    assert len(models["all"].stages_) == 3
    assert np.array_equal(models["best"].predict(X), models["all"].predict(X))


@pytest.mark.parametrize("learner", [RFMRegressor, RFMClassifier])
def test_little_memory_takes_the_other_route(learner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conjugate gradients on all rows, to nearly the same function."""
    X, y, labels = table(400)
    target = labels if learner is RFMClassifier else y
    taken: list[int] = []

    def spy(*args: Any, **options: Any) -> Any:
        taken.append(1)
        return solve_blocks(*args, **options)

    monkeypatch.setattr("richter.learners.fit.solve_blocks", spy)
    options = {"kernel": Laplace(5.0), "ridge": 1.0, "iterations": 1}
    enough = learner(**options).fit(X, target)
    assert not taken
    little = learner(**options, memory="2MiB").fit(X, target)
    assert taken
    new = table(seed=5)[0]
    assert little.best_iteration_ == enough.best_iteration_
    assert_close(little._outputs(new), enough._outputs(new), 1e-2)


def test_random_state_draws_the_rows_that_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y, _ = table()
    monkeypatch.setattr("richter.learners.fit.JUDGED", 10)
    models = [KernelRidge(Laplace(3.0), ridge=0.1, select="loo", random_state=seed).fit(X, y) for seed in (0, 0, 1)]
    found = [losses(m)[0] for m in models]
    assert found[0] == found[1] != found[2]
    assert_close(models[0].predict(X), models[2].predict(X), 1e-10)


def test_device_is_where_it_computes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y, _ = table()
    seen: list[Any] = []

    def spy(*args: Any, **options: Any) -> Problem:
        found = problem(*args, **options)
        seen.append(found.x.device)
        return found

    monkeypatch.setattr("richter.learners.fit.problem", spy)
    model = RFMRegressor(**BASE, device=device).fit(X, y)
    assert {d.type for d in seen} == {device}
    assert_close(model.predict(X), RFMRegressor(**BASE).fit(X, y).predict(X), 1e-6)
    with pytest.raises(RuntimeError, match="device"):
        RFMRegressor(**BASE, device="gpu").fit(X, y)


def test_every_parameter_has_its_test() -> None:
    tested = {*KNOBS, "loss", "select", "early_stopping", "keep", "memory", "device", "random_state"}
    assert set(RFMClassifier().get_params()) == tested
    assert set(RFMRegressor().get_params()) == tested - {"loss"}
    assert set(KernelRidge().get_params()) == {
        "kernel", "ridge", "scale", "intercept", "select", "memory", "device", "random_state"}
    assert list(inspect.signature(RFMRegressor.fit).parameters) == ["self", "X", "y", "sample_weight", "validation"]


@pytest.mark.parametrize(("kernel", "changed"), [
    (Laplace(1.0), Laplace(2.0)), (LaplaceL1(1.0), LaplaceL1(2.0)), (Gaussian(1.0), Gaussian(2.0)),
    (Exponential(1.0), Exponential(2.0)), (NTK(1), NNGP(1)), (NTK(1), NTK(2)), (NTK(1), NTK(1, "erf")),
    (NTK(1), NTK(1, weight_var=1.0)), (NTK(1), NTK(1, bias_var=1.0)), (NNGP(1), NNGP(2)), (NNGP(1), NNGP(1, "gelu")),
    (NNGP(1), NNGP(1, weight_var=1.0)), (NNGP(1), NNGP(1, bias_var=1.0))], **NAMED)
def test_a_knob_of_a_kernel_does_something(kernel: Kernel, changed: Kernel) -> None:
    x, z = points()
    assert apart(changed(x, z), kernel(x, z)) > 1e-2
    assert apart(changed.gradients(x, z), kernel.gradients(x, z)) > 1e-2
