"""Optimal feature evolution: the closed form against the flow, the equations it solves, its phases, its limits and its laws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import install_import_hook
from torch import Tensor

from machines import Largest
from richter import kernels
from richter.core import SelectionError
from richter.kernels import dynamics

with install_import_hook(["richter.theory.ofe", "richter.theory.gofe"], "checker.typechecked"):
    from richter.theory import gofe, ofe

TIMES = [0.0, 0.05, 0.3, 1.0, 3.0, 10.0]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng((seed, *shape)).standard_normal(shape))


def gram(n: int = 6, p: int = 12, seed: int = 0) -> Tensor:
    J = normal(p, n, seed=seed)
    return J.T @ J / p


def alignment(K: Tensor, y: Tensor) -> float:
    return float(y @ K @ y / (K.norm() * (y @ y)))


@pytest.mark.parametrize("p", [12, 6, 4])
@pytest.mark.parametrize("f0", [None, normal(6, seed=3)])
def test_every_number_is_that_of_the_flow(p: int, f0: Tensor | None) -> None:
    K0, y = gram(p=p), normal(6, seed=1)
    evolution = ofe.OptimalFeatureEvolution(K0, y, 0.8, 0.5, f0)
    D, K = evolution.simulate(TIMES)
    torch.testing.assert_close(evolution.residual(TIMES), D, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(evolution.kernel(TIMES), K, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(evolution.loss(TIMES), D.square().sum(1), rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(evolution.alignment(TIMES), [alignment(k, y) for k in K], rtol=1e-8)
    C = evolution.conserved
    for d, k in zip(D, K, strict=True):  # conserved along the simulated flow
        torch.testing.assert_close(k + 0.8 * torch.outer(d, d), C, rtol=1e-8, atol=1e-9)
    last = evolution.final_residual
    assert abs(evolution.final_alignment - alignment(C - 0.8 * torch.outer(last, last), y)) < 1e-12
    if p >= 6:
        assert last.norm() == 0
        assert abs(evolution.final_alignment - alignment(C, y)) < 1e-12
    assert abs(float(evolution.alignment([1e6])[0]) - evolution.final_alignment) < 1e-8
    torch.testing.assert_close(evolution.residual([1e6])[0], last, atol=1e-7, rtol=1e-7)


def test_the_form_of_the_definitions() -> None:
    """K(t) = [C^-1 + e^{-Ct} (K0^-1 - C^-1) e^{-Ct}]^-1, and the alignment may pass above its end."""
    K0, y = gram(), normal(6, seed=1)
    evolution = ofe.OptimalFeatureEvolution(K0, y, 1.5)
    C = K0 + 1.5 * torch.outer(y, y)
    for t in TIMES:
        E = torch.linalg.matrix_exp(-C * t)
        K = torch.linalg.inv(torch.linalg.inv(C) + E @ (torch.linalg.inv(K0) - torch.linalg.inv(C)) @ E)
        torch.testing.assert_close(evolution.kernel([t])[0], K, rtol=1e-8, atol=1e-8)
    y2 = (y @ y) ** 2
    eq7 = (1.5 * y2 + y @ K0 @ y) / (C.norm() * (y @ y))
    assert abs(evolution.final_alignment - float(eq7)) < 1e-12
    assert evolution.alignment([1.0])[0] > evolution.final_alignment + 1e-4  # "monotone" is not true


def test_features_that_look_one_step_ahead() -> None:
    """Eq. 5 as printed, with a small rate, follows the flow with 4 gamma: the loss it descends on has no half."""
    Psi, y, gamma, lr, steps = normal(12, 5) / math.sqrt(12), normal(5, seed=1), 0.05, 1e-4, 4000
    K0, D = Psi.T @ Psi, -y
    for _ in range(steps):
        live = Psi.clone().requires_grad_()
        ahead = (D - lr * live.T @ (live @ D)).square().sum()
        (g,) = torch.autograd.grad(ahead, live)
        D, Psi = D - lr * Psi.T @ (Psi @ D), Psi - gamma * g
    right, wrong = (ofe.OptimalFeatureEvolution(K0, y, factor * gamma, lr).kernel([float(steps)])[0] for factor in (4, 1))
    K = Psi.T @ Psi
    assert (K - right).norm() / (K - K0).norm() < 1e-3
    assert (K - wrong).norm() / (K - K0).norm() > 0.5


def test_a_frozen_kernel_is_the_case_gamma_0() -> None:
    K0, y = gram(p=4), normal(6, seed=1)
    evolution = ofe.OptimalFeatureEvolution(K0, y, 0.0, 0.5)
    flow = dynamics.kernel_gradient_flow(K0, y, 0.5, TIMES)
    torch.testing.assert_close(evolution.residual(TIMES), flow.residual)
    torch.testing.assert_close(evolution.early_loss(TIMES), flow.loss)
    torch.testing.assert_close(evolution.kernel([3.0])[0], K0)
    torch.testing.assert_close(evolution.final_residual, evolution.residual([1e9])[0])


@given(st.integers(2, 7), st.integers(1, 9), st.floats(0.01, 30), st.floats(0.01, 5))
@settings(max_examples=40, deadline=None)
def test_laws(n: int, p: int, gamma: float, lr: float) -> None:
    """Time is in units of 1/lr; labels by s and gamma by 1/s^2 scale the residual alone; examples may be turned; the loss
    falls."""
    K0, y, t = gram(n, p, seed=p), normal(n, seed=1), np.array([0.0, 0.1, 1.0, 20.0])
    one = ofe.OptimalFeatureEvolution(K0, y, gamma, lr)
    D, K = one.predict(t)
    same = ofe.OptimalFeatureEvolution(K0, 3 * y, gamma / 9).predict(t * lr)
    torch.testing.assert_close(same[0], 3 * D, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(same[1], K, rtol=1e-6, atol=1e-7)
    Q = torch.linalg.qr(normal(n, n))[0]
    turned = ofe.OptimalFeatureEvolution(Q @ K0 @ Q.T, Q @ y, gamma, lr)
    torch.testing.assert_close(turned.residual(t), D @ Q.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(turned.alignment(t), one.alignment(t), rtol=1e-6)
    assert (np.diff(one.loss(t)) <= 1e-10 * float(y @ y)).all()
    assert torch.isfinite(one.loss([1e300])).all()
    assert float(torch.linalg.eigvalsh(K).min()) > -1e-9 * float(K[-1].norm())  # K(t) stays a kernel


def test_what_a_singular_kernel_leaves() -> None:
    """K has one rank less than C for ever, so that the slowest direction of C stays, with |D|^2 = c / gamma."""
    K0, y = gram(p=4), normal(6, seed=1)
    evolution = ofe.OptimalFeatureEvolution(K0, y, 2.0)
    D, K = (Z[0] for Z in evolution.simulate([60.0]))
    torch.testing.assert_close(evolution.final_residual, D, rtol=1e-6, atol=1e-7)
    c = torch.linalg.eigvalsh(evolution.conserved)
    assert abs(float(D @ D) - float(c[c > 1e-10].min()) / 2) < 1e-7
    assert int((torch.linalg.eigvalsh(K) > 1e-8).sum()) == 4
    with pytest.raises(SelectionError, match="K0 is singular, and the residual at the start has a part in its null space"):
        evolution.late_loss([1.0])
    inside = ofe.OptimalFeatureEvolution(K0, K0 @ y, 2.0)  # labels that a singular kernel reaches
    assert inside.final_residual.norm() == 0
    assert float(inside.loss([1e5])[0]) < 1e-9
    assert inside.late_loss([1.0])[0] > 0


def test_phases() -> None:
    K0, y = gram(8, 20), normal(8, seed=1)
    evolution = ofe.OptimalFeatureEvolution(K0, y, 1.0, 0.7)
    e = 1e-6
    slope = (evolution.alignment([e]) - evolution.alignment([0.0])) / e
    assert abs(float(slope) / evolution.alignment_speed - 1) < 1e-4
    small = torch.tensor([1e-5, 2e-5], dtype=torch.float64)
    gap = evolution.early_loss(small) - evolution.loss(small)  # the kernel moves at order t, the loss feels it at order t^2
    assert abs(float(gap[1] / gap[0]) - 4) < 1e-2
    late = torch.tensor([20.0, 40.0], dtype=torch.float64)
    torch.testing.assert_close(evolution.late_loss(late), evolution.loss(late), rtol=1e-2, atol=0)
    assert evolution.late_loss(late)[1] / evolution.loss(late)[1] - 1 < evolution.late_loss(late)[0] / evolution.loss(late)[0] - 1
    c, v = torch.linalg.eigh(evolution.conserved)
    remaining = (v.T @ y).square() * torch.exp(-2 * 0.7 * evolution.turning_time * c)
    assert abs(float(remaining[-1] / remaining[:-1].sum()) - 1) < 1e-9
    assert ofe.OptimalFeatureEvolution(torch.diag(torch.tensor([1.0, 2.0, 3.0])), [1.0, 1.0, 0.1], 0.0).turning_time == 0
    assert ofe.OptimalFeatureEvolution([[1.0]], [1.0], 1.0).turning_time == math.inf


def test_the_threshold() -> None:
    """A spectrum with a spike, labels in its tail: the top eigenvector turns to the labels at gamma*."""
    values = torch.linspace(0.5, 1.5, 300, dtype=torch.float64)
    values[-1] = 20.0
    y = normal(300, seed=2)
    y[-1] = 0.3
    threshold = ofe.OptimalFeatureEvolution(torch.diag(values), y, 1.0).threshold
    assert abs(threshold - float((20 - (y * values * y).sum() / (y @ y)) / (y @ y))) < 1e-12
    below, above = (ofe.OptimalFeatureEvolution(torch.diag(values), y, s * threshold).top_overlap for s in (0.9, 1.1))
    assert below < 0.1
    assert above > 0.9


def test_one_example() -> None:
    """Eq. 27 with the 1/gamma that it misses."""
    psi0, delta0, gamma, lr = 0.7, -1.3, 0.4, 0.9
    u, v = ofe.scalar(psi0, delta0, gamma, np.array(TIMES), lr)
    evolution = ofe.OptimalFeatureEvolution([[psi0**2]], [-delta0], gamma, lr)
    D, K = evolution.simulate(TIMES)
    np.testing.assert_allclose(u, D[:, 0] ** 2, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(v, K[:, 0, 0], rtol=1e-8)
    np.testing.assert_allclose(gamma * u + v, psi0**2 + gamma * delta0**2, rtol=1e-12)
    printed, _ = ofe.scalar(psi0, delta0, gamma, np.array(TIMES), lr, prefactor=1.0)
    assert abs(printed[0] - delta0**2) > 0.5
    assert np.isfinite(ofe.scalar(psi0, delta0, gamma, [1e6])[0]).all()
    with pytest.raises(SelectionError, match=r"gamma=-1: a finite number is needed, not 0; for gamma and lr above 0"):
        ofe.scalar(psi0, delta0, -1, [0.0])


def test_the_diagonal_approximation() -> None:
    """Eqs. 32 and 35, written out; exact in the end, and at the start where K0 and y y^T commute."""
    K0, y, gamma = gram(), normal(6, seed=1), 0.7
    evolution = ofe.OptimalFeatureEvolution(K0, y, gamma)
    c, v = torch.linalg.eigh(evolution.conserved)
    start = (v.T @ K0 @ v).diagonal()
    B = start / (c - start)
    for t in TIMES:
        A = B * c / (B + torch.exp(-2 * c * t))
        size = (K0.norm() ** 2 - 2 * (c * start).sum() + (c * c).sum()).sqrt()
        exact = float(((c - start) * A).sum() / (A.norm() * size))
        assert abs(float(evolution.diagonal_alignment([t])[0]) / exact - 1) < 1e-10
        assert abs(float(size / (gamma * (y @ y))) - 1) < 1e-12  # it is |gamma y y^T|
    assert abs(float(evolution.diagonal_alignment([1e5])[0]) - evolution.final_alignment) < 1e-10
    assert abs(float(evolution.diagonal_alignment([0.0]) - evolution.alignment([0.0]))) > 0.01
    commuting = ofe.OptimalFeatureEvolution(torch.diag(torch.tensor([1.0, 2.0, 3.0])), [0.0, 1.0, 0.0], gamma)
    torch.testing.assert_close(commuting.diagonal_alignment(TIMES), commuting.alignment(TIMES))


def test_kernels_are_formed_on_demand() -> None:
    n, t = 50, torch.linspace(0, 5, 40)
    with Largest() as largest:
        evolution = ofe.OptimalFeatureEvolution(gram(n, 80), normal(n, seed=1), 1.0)
        shapes = [z.shape for z in (evolution.residual(t), evolution.loss(t), evolution.alignment(t))]
    assert shapes == [(40, n), (40,), (40,)]
    assert largest.most == 8 * 80 * n  # the features of this test
    with Largest() as largest:
        evolution.kernel(t)
    assert largest.most == 8 * 40 * n * n


def test_effective_gamma_is_one_function() -> None:
    assert ofe.effective_gamma is dynamics.effective_gamma
    K0, y = gram(), normal(6, seed=1)
    evolution = ofe.OptimalFeatureEvolution(K0, y, 0.37)
    assert abs(ofe.effective_gamma(K0, evolution.conserved, y) - 0.37) < 1e-10
    assert abs(kernels.alignment(evolution.conserved, y) - evolution.final_alignment) < 1e-12


def test_the_kind_that_goes_in_comes_out() -> None:
    K0, y = gram().numpy(), normal(6, seed=1).numpy()
    evolution = ofe.OptimalFeatureEvolution(K0.tolist(), y[:, None], 0.5)
    there = ofe.OptimalFeatureEvolution(torch.tensor(K0), y, 0.5)
    for a, b in zip((*evolution.predict(TIMES), evolution.alignment(TIMES), evolution.conserved),
                    (*there.predict(torch.tensor(TIMES)), there.alignment(TIMES), there.conserved), strict=True):
        assert isinstance(a, np.ndarray)
        assert isinstance(b, Tensor)
        np.testing.assert_allclose(a, b, atol=1e-13)


OFE, GOFE = ofe.OptimalFeatureEvolution, gofe.GeneralisedFeatureEvolution


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: OFE(gram(), normal(6), -0.1), r"gamma=-0\.1: the feature learning rate is 0 \(a frozen kernel\) or more"),
    (lambda: OFE(gram(), torch.zeros(6), 0.1), "y is zero: no kernel is aligned with it"),
    (lambda: OFE(gram(), normal(6), 0.1, f0=normal(6)), "f0 equals y: the residual is zero"),
    (lambda: OFE(gram(), normal(7), 0.1), "so n = 7; but n = 6 in K0"),
    (lambda: OFE(gram() - 2 * torch.eye(6), normal(6), 0.1), "K0 is indefinite"),
    (lambda: OFE(gram() + torch.ones(6, 6).triu(), normal(6), 0.1), "K0 is not symmetric"),
    (lambda: OFE(torch.zeros(6, 6), normal(6), 0.1), "K0 is zero"),
    (lambda: OFE(gram() * math.nan, normal(6), 0.1), "K0 contains NaN or Inf"),
    (lambda: OFE(gram(), normal(6), 0.1, lr=0.0), "lr=0.0: a rate above 0"),
    (lambda: OFE(gram(), normal(6), 0.1).loss([-1.0]), "t contains -1: the flow starts at 0"),
    (lambda: GOFE(normal(4, 3), torch.eye(3), lambda F: F.sum()), r"velocity has shape \(3, 3\) for 4 features"),
    (lambda: GOFE(normal(4, 3), 1.0, lambda F: 1.0), r"loss\(F\) must be one number that autograd"),
    (lambda: GOFE(normal(4, 3), 1.0, lambda F: F.sum(), lr=-1), "lr=-1: a rate above 0"),
    (lambda: gofe.descent_velocity(torch.eye(3), torch.zeros(2)), "w = dL/dF is zero"),
])
def test_bad_input(call: Any, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        call()


@pytest.mark.parametrize("one", [2.0, 2, torch.tensor(2.0), np.float64(2.0)])
def test_one_number_is_one_time(one: Any) -> None:
    theory = OFE(gram(), normal(6), 0.1)
    np.testing.assert_array_equal(theory.loss(one), theory.loss([2.0]))
    np.testing.assert_array_equal(ofe.simulate(gram(), normal(6), 0.1, one)[0], ofe.simulate(gram(), normal(6), 0.1, [2.0])[0])


# ------------------------------------------------------------------------------------------------ generalised


def squared(y: Tensor) -> Any:
    return lambda F: (F - y).square().sum() / 2


@pytest.mark.parametrize("velocity", [0.3, 0.3 * torch.eye(12, dtype=torch.float64),
                                      lambda state: 0.3 * torch.eye(12, dtype=torch.float64)])
def test_a_multiple_of_the_identity_is_optimal_feature_evolution(velocity: Any) -> None:
    Psi, y, f0 = normal(12, 6) / 3, normal(6, seed=1), normal(6, seed=2)
    F, Psis = gofe.GeneralisedFeatureEvolution(Psi, velocity, squared(y), f0, lr=0.5).simulate(TIMES[:5])
    D, K = ofe.predict(Psi.T @ Psi, y, 0.3, TIMES[:5], 0.5, f0)
    torch.testing.assert_close(F - y, D, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(Psis.mT @ Psis, K, rtol=1e-7, atol=1e-8)


def test_another_loss_and_a_matrix() -> None:
    """By hand, in many small steps: logistic loss, a velocity matrix and an adjustment."""
    Psi, labels = normal(5, 4), torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    V, A = normal(5, 5, seed=3) / 5, torch.diag(torch.linspace(0.5, 1.5, 5, dtype=torch.float64))
    evolution = gofe.GeneralisedFeatureEvolution(Psi, V, lambda F: torch.nn.functional.softplus(-labels * F).sum(), None, 0.5, A)
    F_end, Psi_end = (z[0] for z in evolution.simulate([1.0]))
    errors = []
    for steps in (1000, 2000):
        F, P = torch.zeros(4, dtype=torch.float64), Psi.clone()
        for _ in range(steps):
            w = -labels * torch.sigmoid(-labels * F)
            F, P = F - 0.5 / steps * P.T @ A @ P @ w, P + 0.5 / steps * torch.outer(V @ P @ w, w)
        errors.append(float((F - F_end).norm() + (P - Psi_end).norm()))
    assert errors[0] < 0.01
    assert abs(errors[0] / errors[1] - 2) < 0.05  # what is left is the steps' own error


def test_the_velocity_of_gradient_descent() -> None:
    """V = -H_w A / |w|^2 moves the gradient as training with the adjustment A does: both sides by autograd in a tanh network."""
    x, y, sizes = normal(3, 2), normal(3, seed=1), [(4, 2), (4,)]
    theta = torch.cat([normal(math.prod(s), seed=i) for i, s in enumerate(sizes)])

    def network(theta: Tensor) -> Tensor:
        W, v = (part.reshape(s) for part, s in zip(theta.split([8, 4]), sizes, strict=True))
        return torch.tanh(x @ W.T) @ v

    loss = squared(y)
    A = normal(12, 12, seed=4)
    Psi = torch.autograd.functional.jacobian(network, theta).T
    w = (network(theta) - y).detach()
    H_w = torch.autograd.functional.hessian(lambda th: network(th) @ w, theta)
    H = torch.autograd.functional.hessian(lambda th: loss(network(th)), theta)
    evolution = gofe.GeneralisedFeatureEvolution(Psi, gofe.descent_velocity(H_w, w, A), loss, network(theta).detach(), 0.3, A)
    state = gofe.EvolutionState(network(theta).detach(), Psi, torch.zeros(12, dtype=torch.float64), w)
    Psi_dot, theta_dot = evolution.slopes(state)
    torch.testing.assert_close(theta_dot, -0.3 * A @ Psi @ w)
    torch.testing.assert_close(Psi_dot @ w + Psi @ (Psi.T @ theta_dot), H @ theta_dot, rtol=1e-10, atol=1e-10)
