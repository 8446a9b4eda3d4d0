"""The systems behind a fit: leaving rows out, conjugate gradients in blocks, the logistic loss."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import sklearn.datasets
import sklearn.exceptions
import sklearn.linear_model
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

import oracles
from machines import NAMED, apart, assert_close, normal
from pairwise import all_pairs
from richter.core import MemoryBudgetError, parse_bytes
from richter.learners import NTK, Gaussian, Kernel, Laplace, LaplaceL1, Quadratic, RFMClassifier
from richter.learners.logistic import solve_logistic
from richter.learners.problem import FitProblem, problem
from richter.learners.solvers import SingularKernelError, solve, solve_blocks


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


def merged(x: Tensor, y: Tensor, copies: list[int] | Tensor) -> FitProblem:
    return problem(x.numpy(), y.numpy(), np.asarray(copies, dtype=float), np.random.RandomState(0))


@pytest.mark.parametrize(("kernel", "case", "intercept"), all_pairs(
    [Laplace(2.0), Quadratic()], ["plain", "duplicates", "weights", "both", "zero weights"], [False, True]), **NAMED)
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


@pytest.mark.parametrize(("kernel", "intercept", "outputs"), all_pairs(
    [Laplace(2.0), Gaussian(1.5), LaplaceL1(3.0), NTK(2)], [False, True], [1, 3]), **NAMED)
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
