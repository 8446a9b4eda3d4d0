"""The next metric from a fit, and the loop of fits and metrics by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sklearn.kernel_ridge
import torch
from torch import Tensor

import oracles
from machines import KERNELS, METRICS, NAMED, apart, assert_close, full, metric, normal
from pairwise import all_pairs
from richter.learners import Gaussian, Kernel, KernelRidge, Laplace, Quadratic, RFMClassifier, RFMRegressor, fact
from richter.learners.features import FEATURES, next_metric


def updated(rule: Any, kernel: Kernel, x: Tensor, A: Tensor, M: Tensor | None, **options: Any) -> Tensor:
    R = None if M is None else oracles.metric_root(M) if M.dim() == 2 else M.sqrt()
    u = x if R is None else x * R if R.dim() == 1 else x @ R
    w = torch.ones(len(x), dtype=torch.float64)
    return next_metric(rule, kernel, u, x, R, A, w, lambda rows: kernel.geometry(u[rows], u), **options)


@pytest.mark.parametrize(("kernel", "rule", "exponent", "kind"), all_pairs(
    KERNELS, [("agop", 1.0), ("agop", 0.5), ("agop_centred", 0.5), ("fact", 1.0), ("fact_geometric", 1.0)], METRICS), **NAMED)
def test_updates_by_matrix_functions(kernel: Kernel, rule: Any, exponent: float, kind: str) -> None:
    x, A, M = normal(12, 3), normal(12, 2), metric(kind, 3)
    expected = oracles.next_metric(rule, kernel, x, A, full(M, 3), exponent)
    assert_close(updated(rule, kernel, x, A, M, exponent=exponent), expected, 1e-7)


@pytest.mark.parametrize(("kernel", "rule", "kind"), all_pairs(KERNELS, FEATURES, ["identity", "diagonal"]), **NAMED)
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


@pytest.mark.parametrize(("kernel", "rule", "power", "outputs"), all_pairs(
    [Laplace(3.0), Gaussian(2.0), Quadratic()], [(rule, 1.0) for rule in FEATURES] + [("agop", 0.5), ("fact", 0.5)],
    [1, 2]), **NAMED)
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
