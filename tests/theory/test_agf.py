"""Alternating gradient flows: closed forms against the flow of the network, and the algorithm against the closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from richter.core import SelectionError
from richter.theory import agf, alternating

TURN = np.array([[math.cos(1 / 3), -math.sin(1 / 3)], [math.sin(1 / 3), math.cos(1 / 3)]])
ALIKE = np.diag([5.0, 1.0]) @ TURN.T  # two rows; second moments 12.5 and .5, along axes that are turned by 19.1 degrees


def linear_neuron(theta: Tensor, x: Tensor) -> Tensor:
    return (x @ theta[:x.shape[1]])[:, None] * theta[x.shape[1]:]


def relu_neuron(theta: Tensor, x: Tensor) -> Tensor:
    return (x @ theta[:-1]).relu()[:, None] * theta[-1]


def square_neuron(theta: Tensor, x: Tensor) -> Tensor:
    u, w = theta[:x.shape[1]], theta[x.shape[1]:]
    return (x @ u).square()[:, None] * w


def white(n: int, d: int, seed: int = 0) -> Tensor:
    """Rows whose second moments are exactly the identity."""
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((n, d)))
    return x @ torch.linalg.inv(torch.linalg.cholesky(x.T @ x / n)).T


def diagonal_neuron(theta: Tensor, x: Tensor) -> Tensor:
    """u and v of one coordinate, beside zeros for the others."""
    u, v = theta.chunk(2)
    return (x * u * v).sum(1, keepdim=True)


# ------------------------------------------------------------------------------------------------ diagonal


def test_a_coordinate_that_sleeps_again() -> None:
    """The worked example of two alike inputs."""
    stairs, coefficients = agf.diagonal(ALIKE, ALIKE @ np.array([-0.2, 2.0]))
    np.testing.assert_allclose(stairs.times, [0.193, 0.600, 3.457], atol=2e-3)
    np.testing.assert_allclose(coefficients, [[0, 0], [0.462, 0], [0, 1.584], [-0.2, 2.0]], atol=1e-3)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), d=st.integers(1, 5))
def test_laws_of_the_diagonal_staircase(seed: int, d: int) -> None:
    """Levels fall to the least squares, the first coordinate is the one of the largest pull, after 1 / its pull; with whitened
    inputs every coordinate wakes after 1 / its own."""
    rng = np.random.default_rng(seed)
    X, beta = rng.standard_normal((30, d)), rng.standard_normal(d)
    y = X @ beta
    stairs, path = agf.diagonal(X, y)
    g = X.T @ y / 30
    assert (np.diff(stairs.levels) < 0).all()
    assert stairs.levels[-1] < 1e-20
    np.testing.assert_allclose(path[-1], beta, atol=1e-8)
    np.testing.assert_allclose(stairs.times[0], 1 / np.abs(g).max(), rtol=1e-10)
    assert np.flatnonzero(path[1]).tolist() == [int(np.abs(g).argmax())]
    x = np.asarray(white(30, d, seed))
    np.testing.assert_allclose(agf.diagonal(x, x @ beta).staircase.times, np.sort(1 / np.abs(beta)), rtol=1e-6)


def test_jump_times_come_true_as_weights_become_smaller() -> None:
    """Half the error for twice the logarithm, and 1 or 2 % at 128. A jump is where the loss has fallen half way."""
    rng = np.random.default_rng(5)
    X = rng.standard_normal((40, 6))
    y = X @ rng.standard_normal(6)
    stairs = agf.diagonal(X, y).staircase
    errors = []
    for L in (32.0, 64.0, 128.0):
        near = [np.linspace(0.8, 1.2, 800) * time for time in stairs.times]
        t = np.unique(np.concatenate([np.linspace(0, 1.3 * stairs.times[-1], 2000), *near]))
        loss = np.asarray(agf.simulate_diagonal(X, y, L, t))
        half = (stairs.levels[:-1] + stairs.levels[1:]) / 2
        seen = np.array([t[np.argmax(loss < level)] for level in half])
        errors.append(np.abs(seen / stairs.times - 1).max())
    assert errors[-1] < 0.02
    assert 0.3 < errors[1] / errors[0] < 0.7
    assert 0.3 < errors[2] / errors[1] < 0.7


# ------------------------------------------------------------------------------------------------ the algorithm


def test_the_algorithm_finds_the_staircase_of_linear_networks() -> None:
    """At a finite alpha directions must turn first, so that times are some per cent late; levels are exact."""
    x, strengths = white(60, 3), torch.tensor([3.0, 1.5, 0.6], dtype=torch.float64)
    rng = np.random.default_rng(1)
    theta = math.exp(-20) * torch.from_numpy(rng.standard_normal((8, 6))) / math.sqrt(6)
    learned = agf.alternating_flows(linear_neuron, theta, x, x * strengths)
    exact = agf.linear(torch.eye(3), torch.diag(strengths))
    assert learned.degree == pytest.approx(2)
    assert len(set(learned.order)) == 3
    torch.testing.assert_close(learned.staircase.levels, exact.levels, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(learned.staircase.times / 20, exact.times, rtol=0.1, atol=0)
    assert learned.utilities[0] == pytest.approx(1.5, rel=1e-3)  # half the largest singular value


def test_the_algorithm_predicts_the_flow_of_a_network_without_closed_form() -> None:
    """Squares of random features: levels and times against the gradient flow of the very same neurons."""
    x = white(50, 3, seed=2)
    y = (x[:, :1] ** 2) * 2.0
    rng = np.random.default_rng(3)
    theta = 1e-3 * torch.from_numpy(rng.standard_normal((5, 4)))
    learned = agf.alternating_flows(square_neuron, theta, x, y, jumps=1)
    assert learned.degree == pytest.approx(3)
    t = float(learned.staircase.times[0])
    from richter.theory.flows import flow

    def velocity(state: Tensor) -> Tensor:
        own = state.clone().requires_grad_()
        f = sum(square_neuron(row, x) for row in own)
        return -torch.autograd.grad((f - y).square().sum() / (2 * len(y)), own)[0]

    states = flow(velocity, theta, [0.9 * t, 1.1 * t, 1.5 * t], rtol=1e-7, atol=1e-10)
    losses = [float((sum(square_neuron(row, x) for row in s) - y).square().sum() / (2 * len(y))) for s in states]
    levels = learned.staircase.levels
    assert losses[0] == pytest.approx(float(levels[0]), rel=0.01)
    assert losses[1] < 0.5 * float(levels[0])


def test_who_does_not_wake_keeps_what_it_has_accumulated() -> None:
    """The second neuron has had half of what it needs when the first wakes: it does not begin again."""
    x = white(40, 2)
    y = torch.stack([2 * x[:, 0], x[:, 1]], 1)
    first, second = torch.tensor([1.0, 0, 1.0, 0]).double(), torch.tensor([0, 1.0, 0, 1.0]).double()
    theta = torch.stack([1e-4 * first, 1e-4 * second]) / math.sqrt(2)
    learned = agf.alternating_flows(linear_neuron, theta, x, y)
    wait = -math.log(1e-4)
    np.testing.assert_allclose(learned.staircase.times, [wait / 2, wait], rtol=1e-5)  # utilities 1 and 1/2, degree 2
    assert learned.order == [0, 1]


@pytest.mark.parametrize("log_inverse", [6.0, 12.0])
def test_a_neuron_that_is_driven_to_zero_sleeps_again_and_wakes_with_another_sign(log_inverse: float) -> None:
    """The algorithm on the network of two alike inputs whose closed form is known: coordinate 0 wakes, vanishes when coordinate 1
    wakes, and comes back negative, after its accumulated pull has gone all the way from 1 to -1."""
    theta = torch.zeros(2, 4, dtype=torch.float64)
    theta[0, 0] = theta[1, 1] = math.sqrt(2) * math.exp(-log_inverse)
    beta = np.array([-0.2, 2.0])
    learned = agf.alternating_flows(diagonal_neuron, theta, ALIKE, (ALIKE @ beta)[:, None])
    stairs, path = agf.diagonal(ALIKE, ALIKE @ beta)
    assert learned.order == [0, 1, 0]
    assert learned.again == [(), (0,), ()]
    np.testing.assert_allclose(np.asarray(learned.staircase.times) / log_inverse, stairs.times, rtol=0.02)
    np.testing.assert_allclose(learned.staircase.levels, stairs.levels, atol=1e-6)
    last = np.asarray(learned.parameters[-1])
    np.testing.assert_allclose((last[:, :2] * last[:, 2:]).sum(0), path[-1], atol=1e-4)


def test_times_go_with_the_rate() -> None:
    x = white(40, 2)
    theta = 1e-3 * torch.from_numpy(np.random.default_rng(0).standard_normal((3, 3)))
    slow, fast = (agf.alternating_flows(linear_neuron, theta, x, x[:, :1], lr=lr) for lr in (1.0, 4.0))
    np.testing.assert_allclose(np.asarray(slow.staircase.times) / 4, fast.staircase.times, rtol=1e-6)
    np.testing.assert_allclose(slow.separations, fast.separations, rtol=1e-6)


def test_jumps_are_fewer_where_fewer_are_asked_for() -> None:
    x = white(40, 2)
    theta = 1e-3 * torch.from_numpy(np.random.default_rng(0).standard_normal((4, 4)))
    y = torch.stack([2 * x[:, 0], x[:, 1]], 1)
    every, one = (agf.alternating_flows(linear_neuron, theta, x, y, jumps=jumps) for jumps in (None, 1))
    assert len(one.staircase.times) == 1
    assert one.staircase.times[0] == every.staircase.times[0]
    rough = agf.alternating_flows(linear_neuron, theta, x, y, tolerance=0.5)
    assert len(rough.staircase.times) < len(every.staircase.times)


def test_separations_are_gaps_over_what_jumps_take() -> None:
    """1 / (k U): 1/2 and 1/4 at rate 1, for a gap of 3."""
    np.testing.assert_allclose(alternating.separations(np.array([1.0, 4.0]), np.array([1.0, 2.0]), 2), [4.0])
    np.testing.assert_allclose(alternating.separations(np.array([1.0, 4.0]), np.array([1.0, 2.0]), 2, lr=0.5), [2.0])


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: agf.simulate_linear(np.eye(2), np.diag([2.0, 1.0]), 3, 40.0, [0.1]), "log_inverse=40 is above 36: rounding of"),
    (lambda: agf.predict_linear(np.eye(2), np.diag([2.0, 1.9]), 3, 8.0, [0.1]), "jumps 1 and 2 come at 4 and 4.211, within"),
    (lambda: agf.predict_diagonal(np.eye(2), [2.0, 1.9], 8.0, [0.1]), "too large for a plateau between them"),
    (lambda: agf.attention_flow([1.0, 0.5], 8, 3, 0.5, [0.0, 0.01]), "alpha=0.5: heads start with norms up to"),
    (lambda: agf.alternating_flows(linear_neuron, 0.1 * torch.from_numpy(np.random.default_rng(0).standard_normal((6, 4))),
                                   white(40, 2), white(40, 2) * torch.tensor([2.0, 1.9])), "jumps 1 and 2 come at"),
])
def test_what_is_warned_of(call: Any, sentence: str) -> None:
    with pytest.warns(UserWarning, match=sentence):
        call()


@pytest.mark.parametrize("call", [
    lambda: agf.simulate_linear(np.eye(2), np.diag([2.0, 1.0]), 3, 36.0, [0.1]),
    lambda: agf.predict_linear(np.eye(2), np.diag([2.0, 1.0]), 3, 32.0, [0.1]),
    lambda: agf.predict_diagonal(np.eye(2), [2.0, 1.0], 32.0, [0.1]),
    lambda: agf.attention_flow([1.0, 0.5], 8, 3, 1e-3, [0.0, 0.01])])
def test_small_weights_bring_no_warning(call: Any, recwarn: pytest.WarningsRecorder) -> None:
    call()
    assert not recwarn.list


def test_utilities_that_are_forgotten_at_each_jump_are_a_rival() -> None:
    """Two neurons on two features: the second then waits its whole time after the first."""
    x = white(40, 2)
    y = torch.stack([2 * x[:, 0], x[:, 1]], 1)
    first, second = torch.tensor([1.0, 0, 1.0, 0]).double(), torch.tensor([0, 1.0, 0, 1.0]).double()
    theta = torch.stack([1e-4 * first, 1e-4 * second]) / math.sqrt(2)
    learned = agf.alternating_flows(linear_neuron, theta, x, y, keep=False)
    wait = -math.log(1e-4)
    np.testing.assert_allclose(learned.staircase.times, [wait / 2, wait / 2 + wait], rtol=1e-5)


@pytest.mark.parametrize(("neuron", "degree"), [(linear_neuron, 2), (relu_neuron, 2), (square_neuron, 3)])
def test_degrees(neuron: Any, degree: float) -> None:
    theta, x = torch.randn(6, dtype=torch.float64), torch.randn(9, 5 if neuron is not linear_neuron else 3, dtype=torch.float64)
    assert agf.degree_of(neuron, theta, x) == pytest.approx(degree, abs=1e-9)


X, Y = white(10, 3), white(10, 3, 1)[:, :1]
THETA = 1e-3 * torch.from_numpy(np.random.default_rng(0).standard_normal((3, 4)))


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: agf.alternating_flows(lambda t, x: (x @ t[:3] + 1).tanh()[:, None] * t[3], THETA, X, Y), "is not homogeneous: with"),
    (lambda: agf.alternating_flows(lambda t, x: (x @ t[:3])[:, None], THETA, X, Y), "the neuron has degree 1: with less than 2"),
    (lambda: agf.alternating_flows(lambda t, x: 0 * (x @ t[:3])[:, None], THETA, X, Y), "outputs are zero on these data"),
    (lambda: agf.alternating_flows(relu_neuron, THETA, 0 * X, Y), "x is zero: nothing is to be learned"),
    (lambda: agf.alternating_flows(relu_neuron, THETA, X, 0 * Y), "y is zero: nothing is to be learned"),
    (lambda: agf.alternating_flows(relu_neuron, 1e4 * THETA, X, Y), "they sleep where they are above 0 and well below 1"),
    (lambda: agf.alternating_flows(lambda t, x: t.square().sum() * torch.ones(len(x), 1).double(), THETA, X, -Y.abs()),
     "no neuron has a direction of positive utility"),
    (lambda: agf.alternating_flows(relu_neuron, THETA, X, Y, jumps=0), "jumps=0; a whole number, at least 1, is needed"),
    (lambda: agf.alternating_flows(relu_neuron, THETA, X, Y, lr=0.0), "lr=0.0: a number above 0 is needed"),
    (lambda: alternating.predict("relu", THETA, X[:, :2], Y, [1.0]), "theta has 4 numbers for each neuron; 2 weights of inputs"),
    (lambda: alternating.predict("tanh", THETA, X, Y, [1.0]), "tanh"),  # type: ignore[arg-type]
    (lambda: agf.diagonal(X, 0 * Y), "y is zero, or no input goes with it"),
    (lambda: agf.linear(np.eye(2), np.zeros((2, 2))), r"E\[y x\^T\] is zero"),
    (lambda: agf.attention([1.0, -1.0], 8), "eigenvalues reach -1: those of a covariance"),
    (lambda: agf.modular([1.0, 2.0, 3.0]), "the template has mean 2: take its mean off"),
    (lambda: agf.simulate_diagonal(ALIKE, [1.0, 2.0], -1.0, [1.0]), r"log_inverse=-1.0: log\(1 / alpha\) of an alpha below 1"),
])
def test_what_is_refused(call: Any, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        call()


# ------------------------------------------------------------------------------------------------ linear, attention, modular


def test_commuting_moments_give_one_over_each_strength() -> None:
    stairs = agf.linear(np.diag([2.0, 1.0, 0.5]), np.diag([3.0, 2.0, 1.0]))
    np.testing.assert_allclose(stairs.times, [1 / 3, 1 / 2, 1], rtol=1e-10)
    np.testing.assert_allclose(stairs.levels, np.array([4.5 + 4 + 2, 4 + 2, 2, 0]) / 2, rtol=1e-10)
    np.testing.assert_allclose(stairs.loss([0.0, 0.4, 0.7, 2.0]), stairs.levels)


def test_attention_at_the_setting_of_the_paper() -> None:
    lam = np.array([0.96, 0.48, 0.32, 0.24])
    found = agf.attention(lam, 32)
    np.testing.assert_allclose(found.levels, [1, 0.5622, 0.3555, 0.2251, 0.1322], atol=5e-5)
    np.testing.assert_allclose(found.values, [0.02969, 0.05605, 0.07962, 0.10081], atol=5e-6)
    assert found.utilities[0] == pytest.approx(5.675584, abs=1e-6)
    k, q = np.eye(4)[0], np.eye(4)[0]  # the head that has it: v, k, q of equal norms along the first component
    assert 3**-1.5 * 32 * (k @ np.diag(lam**2) @ q) == pytest.approx(found.utilities[0], rel=1e-12)
    assert (found.waits(1e-2) > 0).all()


def test_utilities_of_modular_addition_are_the_largest_on_the_sphere() -> None:
    """By gradient ascent from several starts: none is above, and the first is reached."""
    p = 8
    template = 2 / p * (6 * np.cos(2 * np.pi * np.arange(p) / p) + 3 * np.cos(4 * np.pi * np.arange(p) / p + 1))
    found = agf.modular(template)
    assert found.frequencies.tolist() == [1, 2]
    np.testing.assert_allclose(found.levels, [2 * (36 + 9) / p**2, 2 * 9 / p**2, 0], atol=1e-12)
    inputs, targets = (torch.from_numpy(np.asarray(a)) for a in agf.modular_pairs(template))
    assert inputs.shape == (p * p, 2 * p)
    theta = torch.from_numpy(np.random.default_rng(0).standard_normal((12, 3 * p)))
    for _ in range(400):
        theta = (theta / theta.norm(dim=1, keepdim=True)).requires_grad_()
        U = torch.einsum("nh,nc,hc->h", (inputs @ theta[:, :2 * p].T).square(), targets, theta[:, 2 * p:]) / p**2
        theta = theta.detach() + 0.05 * torch.autograd.grad(U.sum(), theta)[0]
    assert U.max().item() == pytest.approx(float(found.utilities[0]), rel=1e-6)
