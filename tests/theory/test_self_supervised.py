"""Linearised Barlow Twins: closed forms against autograd on explicit pairs, integrated flows, and kernel PCA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import install_import_hook
from scipy.integrate import solve_ivp

from richter import theory
from richter.core import SelectionError
from richter.testing import check_theory

with install_import_hook(["richter.theory.self_supervised"], "checker.typechecked"):
    from richter.theory.self_supervised import KernelBarlowTwins, LinearBarlowTwins, pair_covariance

GAMMAS = np.array([1.048, 0.385, 0.190, 0.149, 0.097, 0.076, 0.01, -0.02])


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def orthogonal(n: int, seed: int) -> np.ndarray:
    return np.linalg.qr(draw(n, n, seed=seed))[0]


def pairs(n: int = 60, m: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x = draw(n, m, seed=seed) * np.array([1.5, 1.0, 0.7, 0.5, 0.3][:m])
    return x + 0.2 * draw(n, m, seed=seed + 1), x + 0.2 * draw(n, m, seed=seed + 2)


def loss_of_pairs(W: torch.Tensor, x: np.ndarray, x2: np.ndarray) -> torch.Tensor:
    """|C - 1|^2 with C summed pair by pair, as the loss is defined."""
    C = torch.zeros(len(W), len(W), dtype=torch.float64)
    for a, b in zip(torch.from_numpy(x), torch.from_numpy(x2), strict=True):
        C = C + torch.outer(W @ a, W @ b) + torch.outer(W @ b, W @ a)
    return (C / (2 * len(x)) - torch.eye(len(W))).square().sum()


def test_the_theory_agrees_with_its_simulation() -> None:
    check_theory(theory.get("self_supervised.linear_barlow_twins"))


def test_the_flow_goes_down_the_loss_of_the_pairs() -> None:
    x, x2 = pairs()
    W = torch.from_numpy(0.3 * draw(3, 5, seed=9)).requires_grad_()
    (slope,) = torch.autograd.grad(loss_of_pairs(W, x, x2), W)
    model, step = LinearBarlowTwins(pair_covariance(x, x2), W.detach().numpy()), 1e-4
    V = np.linalg.eigh(pair_covariance(x, x2))[1][:, ::-1][:, :3]
    after = np.abs(np.diag(np.linalg.qr((W.detach().numpy() - step * slope.numpy()) @ V)[1]))
    np.testing.assert_allclose(model.simulate([step], method="descent", lr=step)[:, 0], after, rtol=1e-10)
    aligned = np.linalg.qr(draw(3, 3))[0] * [0.2, 0.5, 0.9] @ V.T
    assert LinearBarlowTwins(pair_covariance(x, x2), aligned).loss(0.0)[0] == pytest.approx(
        float(loss_of_pairs(torch.from_numpy(aligned), x, x2)), rel=1e-12)


def test_small_random_weights_follow_the_curves_of_their_triangular_factor() -> None:
    """Half-rise times of the eigenvalues of C in an independent integration are within 2 % of step_times; the losses between them
    are whole numbers nearly."""
    d, V = 6, orthogonal(8, 1)
    Gamma, W0 = (V * GAMMAS) @ V.T, 1e-7 * draw(6, 8, seed=3)
    model = LinearBarlowTwins(Gamma, W0)

    def velocity(_: float, w: np.ndarray) -> np.ndarray:
        W = w.reshape(d, 8)
        return (-4 * (W @ Gamma @ W.T - np.eye(d)) @ W @ Gamma).ravel()

    t = np.linspace(0, 1.6 * model.step_times.max(), 4000)
    done = solve_ivp(velocity, (0, t[-1]), W0.ravel(), t_eval=t, method="LSODA", rtol=1e-9, atol=1e-16)
    C = [np.linalg.eigvalsh(W @ Gamma @ W.T)[::-1] for W in done.y.T.reshape(-1, d, 8)]
    half = [t[np.argmax(np.array(C)[:, k] > 0.5)] for k in range(d)]
    np.testing.assert_allclose(half, np.sort(model.step_times), rtol=0.02)
    assert np.abs(np.array(C) - np.sort(model.eigenvalues(t), 0)[::-1].T).max() < 0.05
    middle = (np.sort(model.step_times)[:3] + np.sort(model.step_times)[1:4]) / 2
    np.testing.assert_allclose(model.loss(middle), [5, 4, 3], atol=0.05)
    W = done.y[:, -1].reshape(d, 8)
    np.testing.assert_allclose(W @ Gamma @ W.T, np.eye(d), atol=1e-4)


def test_the_final_weights_are_the_smallest_without_loss() -> None:
    V = orthogonal(8, 1)
    Gamma = (V * GAMMAS) @ V.T
    model = LinearBarlowTwins(Gamma, 1e-4 * draw(4, 8))
    W = model.final
    np.testing.assert_allclose(W @ Gamma @ W.T, np.eye(4), atol=1e-12)
    assert np.square(W).sum() == pytest.approx((1 / GAMMAS[:4]).sum(), rel=1e-12)
    np.testing.assert_allclose(model.predict([1e9])[:, 0], GAMMAS[:4] ** -0.5, rtol=1e-12)
    for k in range(200):  # other solutions: any W with W Gamma W^T = 1, from random directions
        B = draw(4, 8, seed=k)
        values, vectors = np.linalg.eigh(B @ Gamma @ B.T)
        if values[0] > 0:
            other = (vectors / np.sqrt(values)) @ vectors.T @ B
            assert np.square(other).sum() >= np.square(W).sum()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 99), st.floats(1e-6, 3.0))
def test_units_of_inputs_are_units_of_time(seed: int, scale: float) -> None:
    """Inputs a times as large are learned a^2 times as fast from weights 1/a times as large."""
    x, x2 = pairs(seed=seed)
    W0, t = 0.1 * draw(3, 5, seed=seed), np.array([0.0, 0.5, 3.0])
    here = LinearBarlowTwins(pair_covariance(x, x2), W0)
    there = LinearBarlowTwins(pair_covariance(scale * x, scale * x2), W0 / scale)
    np.testing.assert_allclose(there.eigenvalues(t / scale ** 2), here.eigenvalues(t), rtol=1e-7, atol=1e-12)


def test_the_kernel_form_is_the_linear_one() -> None:
    x, x2 = pairs(n=20)
    both = np.concatenate([x, x2])
    model, Gamma = KernelBarlowTwins(both @ both.T), pair_covariance(x, x2)
    np.testing.assert_allclose(model.eigenvalues[:5], np.linalg.eigvalsh(Gamma)[::-1], atol=1e-10)
    new = draw(7, 5, seed=4)
    E, F = model.embed(new @ both.T, 3), new @ LinearBarlowTwins(Gamma, draw(3, 5)).final.T
    np.testing.assert_allclose(E @ E.T, F @ F.T, atol=1e-8)
    W0 = 1e-3 * draw(3, 5, seed=5)
    U, _, Vt = np.linalg.svd(both, full_matrices=False)
    lifted = W0 @ Vt.T @ U.T  # the same function in coordinates K^(-1/2) k(X, x), as (x x^T)^(-1/2) x = U V^T
    np.testing.assert_allclose(model.linear(lifted).predict([0.0, 1.0, 9.0]),
                               LinearBarlowTwins(Gamma, W0).predict([0.0, 1.0, 9.0]), rtol=1e-7)


def test_equal_views_give_kernel_pca() -> None:
    x = draw(15, 3)
    K = np.exp(-np.square(x[:, None] - x[None]).sum(-1) / 4)
    E = KernelBarlowTwins(np.block([[K, K], [K, K]])).embed(np.concatenate([K, K], 1), 4)
    vectors = np.linalg.eigh(K / 15)[1]
    scores = np.sqrt(15) * vectors[:, ::-1][:, :4]  # principal components over the sample, each of variance one
    np.testing.assert_allclose(E @ E.T, scores @ scores.T, atol=1e-8)


def test_torch_in_torch_out() -> None:
    x, x2 = map(torch.from_numpy, pairs())
    model = LinearBarlowTwins(pair_covariance(x, x2), torch.from_numpy(draw(2, 5)))
    assert all(isinstance(z, torch.Tensor) for z in (model.predict(1.0), model.step_times, model.final, model.loss([1.0])))
    assert isinstance(KernelBarlowTwins(torch.eye(4, dtype=torch.float64) + 1).components(1), torch.Tensor)


@pytest.mark.parametrize(("make", "says"), [
    (lambda: LinearBarlowTwins(-np.eye(3), draw(1, 3)), "nothing in common"),
    (lambda: LinearBarlowTwins(np.diag([1.0, 0.5, 0.0]), draw(3, 3)), "only 2 eigenvalues are positive"),
    (lambda: LinearBarlowTwins(np.diag([1.0, 0.5, 0.0]), np.zeros((2, 3))), "starts at a saddle"),
    (lambda: LinearBarlowTwins(np.diag([1.0, 0.5, 0.1]), [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]), "never learns it"),
    (lambda: LinearBarlowTwins(np.triu(np.ones((3, 3))), draw(2, 3)), "not symmetric"),
    (lambda: LinearBarlowTwins(np.eye(2), draw(3, 2)), "with d at most m"),
    (lambda: pair_covariance(draw(1, 3), draw(1, 3)), "one positive pair"),
    (lambda: KernelBarlowTwins(np.eye(3)), "an even number"),
    (lambda: KernelBarlowTwins(np.diag([1.0, -1.0])), "no negative eigenvalue"),
    (lambda: KernelBarlowTwins(np.eye(4) + 1).embed(np.ones((2, 3)), 1), "3 columns for 4 views"),
    (lambda: KernelBarlowTwins([[1.0, -1.0], [-1.0, 1.0]]).components(1), "nothing in common"),
])
def test_what_cannot_be_solved_is_refused(make: Any, says: str) -> None:
    with pytest.raises(SelectionError, match=says):
        make()
