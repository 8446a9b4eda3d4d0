"""Linear models with and without a hidden layer: closed forms against equations, definitions and flows; times, stages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import install_import_hook

from richter.core import SelectionError
from richter.linalg import haar
from richter.theory.scalar_network import ScalarNetwork

with install_import_hook(["richter.theory.growth", "richter.theory.linear_networks", "richter.theory.two_layers"],
                         "checker.typechecked"):
    from richter.theory import linear_networks, two_layers
    from richter.theory.linear_networks import DeepModes, DiagonalNetwork, LinearModel, LinearNetwork

TIMES = [0.0, 0.2, 1.0, 4.0]
VARIANCES = np.array([4.0, 2.0, 1.0, 0.25])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def sigmoid(S: Any, v: Any, start: Any, t: np.ndarray) -> np.ndarray:
    """Eq. 3.9 as printed, times S."""
    return S / (1 + (S / start - 1) * np.exp(-2 * S * v * t))


# ------------------------------------------------------------------------------------------------ against the definitions


def whitened(n: int, d: int, seed: int) -> np.ndarray:
    """Inputs [n, d] whose mean of x x^T is the identity, exactly."""
    return np.sqrt(n) * haar(n, np.random.default_rng(seed))[:, :d]


def test_flows_are_those_of_the_loss_over_examples() -> None:
    """One short step of each flow is one step down autograd's gradient of the mean of |f - y|^2 / 2 over explicit examples."""
    X, step = torch.from_numpy(whitened(12, 4, 0)), 1e-3
    y = torch.from_numpy(normal(12, 3, seed=1))
    W1, W2 = (torch.from_numpy(normal(*s, seed=2)).requires_grad_() for s in ((4, 5), (5, 3)))
    slopes = torch.autograd.grad((X @ W1 @ W2 - y).square().sum(1).mean() / 2, (W1, W2))
    moved = [w.detach() - step * g for w, g in zip((W1, W2), slopes, strict=True)]
    once = LinearNetwork(W1, W2, X.T @ y / 12).simulate(step, method="descent", lr=step)[0]
    torch.testing.assert_close(once, moved[0] @ moved[1], rtol=1e-12, atol=1e-12)

    uneven = X * torch.tensor([2.0, 1.0, 0.5, 0.1], dtype=torch.float64)  # uncorrelated, with variances 4, 1, .25, .01
    S = torch.from_numpy(normal(4, seed=3))
    a, b = (torch.from_numpy(normal(4, seed=k)).requires_grad_() for k in (4, 5))
    slopes = torch.autograd.grad((uneven @ (a * b) - uneven @ S).square().mean() / 2, (a, b))
    moved = [w.detach() - step * g for w, g in zip((a, b), slopes, strict=True)]
    once = DiagonalNetwork(S, uneven.square().mean(0), a, b).simulate(step, method="descent", lr=step)[:, 0]
    torch.testing.assert_close(once, moved[0] * moved[1], rtol=1e-12, atol=1e-12)
    theta = torch.from_numpy(normal(4, seed=6)).requires_grad_()
    (slope,) = torch.autograd.grad((uneven @ theta - uneven @ S).square().mean() / 2, (theta,))
    once = LinearModel(S, uneven.square().mean(0), theta).simulate(step, method="descent", lr=step)[:, 0]
    torch.testing.assert_close(once, (theta - step * slope).detach(), rtol=1e-12, atol=1e-12)


def test_inputs_that_are_not_white() -> None:
    """Their covariance is in the flow; no closed form is given, and the loss is that over examples, less what no line fits."""
    X, y = normal(30, 4) * [2.0, 1.0, 0.5, 0.1], normal(30, 2, seed=1)
    network = LinearNetwork(normal(4, 3, seed=2), normal(3, 2, seed=3), X.T @ y / 30, X.T @ X / 30)
    assert network.solution == "integrated"
    P = np.asarray(network.predict(TIMES))
    np.testing.assert_allclose(P, network.simulate(TIMES), rtol=1e-10)
    losses = np.array([((X @ p - y) ** 2).sum(1).mean() / 2 for p in P])
    best = X @ np.linalg.lstsq(X, y, rcond=None)[0]
    np.testing.assert_allclose(np.asarray(network.loss(TIMES)), losses - ((best - y) ** 2).sum(1).mean() / 2, rtol=1e-9)
    white = replace(network, covariance=np.eye(4))
    np.testing.assert_allclose(white.predict(TIMES), replace(network, covariance=None).predict(TIMES), rtol=1e-10)


@pytest.mark.parametrize("make", [
    lambda: LinearModel([1.0, -0.5], [2.0, 0.3]), lambda: DiagonalNetwork([1.0, -0.5], [2.0, 0.3], [0.1, 0.2], [0.1, -0.3]),
    lambda: LinearNetwork.aligned(normal(3, 2), 4, 0.3)])
def test_descent_with_small_steps_tends_to_them(make: Any) -> None:
    model = make()
    end = np.asarray(model.predict(1.5))
    errors = [np.abs(np.asarray(model.simulate(1.5, method="descent", lr=lr)) - end).max() for lr in (2e-3, 1e-3)]
    assert 0 < errors[0] < 5e-3
    assert abs(errors[0] / errors[1] - 2) < 0.1  # first order: half the step, half the error


# ------------------------------------------------------------------------------------------------ modes, times, stages


def test_printed_equations() -> None:
    t = np.array(TIMES)
    for S in (1.0, 3.0):
        np.testing.assert_allclose(LinearModel(S, VARIANCES).predict(t), S * (1 - np.exp(-VARIANCES[:, None] * t)), rtol=1e-12)
        network = DiagonalNetwork(S, VARIANCES, 0.05, 0.05)
        np.testing.assert_allclose(network.predict(t), sigmoid(S, VARIANCES[:, None], 0.0025, t), rtol=1e-12)
        for eps in (0.05, 0.3):
            odds = (S / 0.0025 - 1) / (1 / eps - 1)
            np.testing.assert_allclose(network.emergent_time(eps), np.log(odds) / (2 * VARIANCES * S), rtol=1e-13)
            np.testing.assert_allclose(network.saturation_time(eps), np.log(1 / eps - 1) / (VARIANCES * S), rtol=1e-12)


def test_the_stage_condition_as_corrected_and_as_printed() -> None:
    """Eq. 3.13: an exponent was lost, and its sign turned."""
    S, start = 2.0, 1e-4
    network = DiagonalNetwork(S, VARIANCES, 0.01, 0.01)
    one, two = VARIANCES[:-1], VARIANCES[1:]
    odds, share = S / start - 1, (one - two) / (one + two)
    eps = np.asarray(network.stage_eps)
    np.testing.assert_allclose(eps, 1 / (1 + odds**share), rtol=1e-12)
    literal, turned = 1 / (1 + odds * -share), 1 / (1 + odds**-share)
    assert (literal < 0).all()
    assert (turned > 0.9).all()
    for i, e in enumerate(eps.tolist()):
        emergence = np.asarray(network.emergent_time(e))
        assert abs(network.saturation_time(e)[i] / (emergence[i + 1] - emergence[i]) - 1) < 1e-11
    np.testing.assert_array_equal(network.stage_like(0.05), eps < 0.05)
    smaller = DiagonalNetwork(S, VARIANCES, 1e-4, 1e-4).stage_eps
    assert (np.asarray(smaller) < eps).all()  # stages part as weights shrink
    np.testing.assert_allclose(LinearModel(1.0, VARIANCES, 1e-6).stage_eps, LinearModel(1.0, VARIANCES).stage_eps, rtol=1e-4)
    assert DiagonalNetwork(1.0, 1.0, 0.1, 0.1).stage_eps.shape == (0,)


STARTS = st.floats(0.01, 1.5).flatmap(lambda size: st.sampled_from([size, -size]))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([-2.0, -0.1, 0.4, 5.0]), st.floats(0.1, 3.0), STARTS, STARTS), min_size=1, max_size=4))
def test_laws_of_a_diagonal_network(modes: list[tuple[float, ...]]) -> None:
    S, v, a0, b0 = (np.array(z) for z in zip(*modes, strict=True))
    network = DiagonalNetwork(S, v, a0, b0)
    strength = np.asarray(network.predict(TIMES))
    a, b = (np.asarray(z) for z in network.weights(TIMES))
    np.testing.assert_allclose(a * b, strength, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(a**2 - b**2, np.repeat(np.asarray(network.conserved)[:, None], len(TIMES), 1), atol=1e-9)
    np.testing.assert_allclose(strength[:, 0], a0 * b0, rtol=1e-12)
    assert (np.diff(strength) * np.sign(S - a0 * b0)[:, None] >= -1e-12).all()  # toward the target
    assert (np.diff(np.asarray(network.loss(TIMES))) <= 1e-12).all()
    escapes = np.where(S > 0, a0 + b0, a0 - b0) != 0  # the others end at the saddle
    late = np.asarray(network.predict(1e9))[:, 0]
    np.testing.assert_allclose(late, np.where(escapes, S, 0), atol=1e-9)
    for i in range(len(S)):  # the same as one unit of the scalar network, in v t
        alone = ScalarNetwork(a0[i:i + 1], b0[i:i + 1], float(S[i]), 1.0, float(v[i]))
        np.testing.assert_allclose(alone.slope(TIMES), strength[i], rtol=1e-9, atol=1e-12)
    eps = 0.3
    when = np.asarray(network.emergent_time(eps))
    beyond = a0 * b0 / S >= eps
    assert ((when == 0) == beyond).all()
    for i in np.flatnonzero(~beyond & np.isfinite(when)):
        assert abs(network.predict(when[i])[i, 0] / S[i] - eps) < 1e-9
        if a0[i] * b0[i] / S[i] < 1:
            assert abs(network.predict(when[i] + network.saturation_time(eps)[i])[i, 0] / S[i] - (1 - eps)) < 1e-9
    assert (np.isinf(when) == ~escapes).all()


@settings(max_examples=15, deadline=None)
@given(st.floats(1e-4, 0.5), st.floats(0.3, 4.0), st.floats(0.5, 1.5))
def test_equal_starts_are_the_same_in_every_class(start: float, S: float, ratio: float) -> None:
    """A diagonal network, an aligned one with hidden units, and two balanced layers; with no hidden layer, a linear model."""
    t = np.array(TIMES)
    diagonal = np.asarray(DiagonalNetwork([S, ratio * S], 1.0, start, start).predict(t))
    C = np.diag([S, ratio * S])
    aligned = LinearNetwork(start * np.eye(2, 3), start * np.eye(3, 2), C)
    assert aligned.solution == "modes"
    np.testing.assert_allclose(np.einsum("tii->it", aligned.predict(t)), diagonal, rtol=1e-10)
    np.testing.assert_allclose(np.sort(aligned.modes(t), 0), np.sort(diagonal, 0), rtol=1e-10)
    np.testing.assert_allclose(DeepModes([S, ratio * S], start**2, 2).predict(t), diagonal, rtol=1e-9)
    np.testing.assert_allclose(DeepModes([S], start, 1).predict(t), LinearModel([S], 1.0, start).predict(t), rtol=1e-12)
    np.testing.assert_allclose(DiagonalNetwork(S, [1.0], start, start).emergent_time(0.7),
                               DeepModes([S], start**2, 2).emergent_time(0.7), rtol=1e-9, atol=1e-12)
    times = np.sort(np.asarray(aligned.emergent_time(0.7)))
    np.testing.assert_allclose(times, np.sort(DiagonalNetwork([S, ratio * S], 1.0, start, start).emergent_time(0.7)), rtol=1e-9,
                               atol=1e-12)


def test_unequal_stages_are_found_too() -> None:
    network = DiagonalNetwork([1.0, 2.0, -0.5], [3.0, 1.0, 0.4], [0.1, 0.01, 0.2], [0.02, 0.01, -0.1])
    for i, e in enumerate(np.asarray(network.stage_eps).tolist()):
        emergence = np.asarray(network.emergent_time(e))
        assert abs(network.saturation_time(e)[i] / (emergence[i + 1] - emergence[i]) - 1) < 1e-9


def test_what_is_never_learned_and_what_is_there_already() -> None:
    opposite = DiagonalNetwork(1.0, 1.0, [0.3], [-0.3])  # a + b = 0: it falls into the saddle
    assert np.isinf(opposite.emergent_time(0.1)).all()
    assert np.isinf(opposite.saturation_time(0.1)).all()
    assert abs(float(np.asarray(opposite.predict(1e6))[0, 0])) < 1e-12
    without = DiagonalNetwork([0.0], 1.0, 0.3, 0.3)
    assert np.isinf(without.emergent_time(0.1)).all()
    assert np.isinf(LinearModel([0.0], 1.0).emergent_time(0.1)).all()
    assert float(LinearModel([1.0], 1.0, 2.0).emergent_time(0.1)[0]) == 0.0
    assert float(DiagonalNetwork([1.0], 1.0, 2.0, 2.0).emergent_time(0.1)[0]) == 0.0


@pytest.mark.parametrize("make", [
    lambda S, start: LinearModel(S, [2.0, 1.0], start), lambda S, start: DiagonalNetwork(S, [2.0, 1.0], *[np.sqrt(start)] * 2),
    lambda S, start: DeepModes([2 * S[0], S[1]], start, 3)])
def test_times_and_stages_of_every_kind_of_mode(make: Any) -> None:
    """All have them from one place: nothing beyond its target comes from eps to 1 - eps, what never comes has no overlap, and
    what follows something that never ends is apart."""
    both = make(np.array([1.0, 1.0]), np.array([1e-4, 1e-4]))
    assert 0 < float(both.stage_eps[0]) < 0.5
    assert both.stage_like(np.float32(0.49)).tolist() == [True]
    beyond = make(np.array([1.0, 1.0]), np.array([3.0, 3.0]))
    assert beyond.emergent_time(0.5).tolist() == [0.0, 0.0]
    assert np.isinf(beyond.saturation_time(0.05)).all()
    assert np.isnan(beyond.stage_eps).all()
    assert beyond.stage_like().tolist() == [False]
    assert np.isnan(make(np.array([0.0, 1.0]), np.array([1e-4, 1e-4])).stage_eps).all()
    assert float(make(np.array([1.0, 0.0]), np.array([1e-4, 1e-4])).stage_eps[0]) < 1e-100
    for eps in (0.5, 0.7):
        with pytest.raises(SelectionError, match=r"a share of the target between 0 and 0\.5 is needed"):
            both.saturation_time(eps)
        with pytest.raises(SelectionError, match=r"a share of the target between 0 and 0\.5 is needed"):
            both.stage_like(eps)


# ------------------------------------------------------------------------------------------------ a hidden layer


def test_kinds_of_solutions() -> None:
    C = normal(5, 3)
    aligned = LinearNetwork.aligned(C, 4, 0.1)
    drawn = LinearNetwork.drawn(C, 4, 0.1)
    assert [aligned.solution, replace(aligned, W1=2 * np.asarray(aligned.W1)).solution, drawn.solution,
            drawn.balanced().solution] == ["modes", "modes", "integrated", "balanced"]
    np.testing.assert_allclose(drawn.balanced().predict(0.0), drawn.predict(0.0), atol=1e-14)
    np.testing.assert_allclose(drawn.balanced().conserved, 0, atol=1e-15)
    np.testing.assert_allclose(drawn.predict(TIMES), drawn.simulate(TIMES), rtol=1e-12)
    turned = haar(3, np.random.default_rng(1))  # equal singular values: the vectors of W1 W2 are among those of C
    same = LinearNetwork(0.1 * turned * [1.0, 2.0, 3.0], 0.1 * turned.T, np.eye(3))
    assert same.solution == "modes"
    np.testing.assert_allclose(same.predict(TIMES), same.simulate(TIMES), atol=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 100), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.floats(0.05, 1.0))
def test_laws_of_a_balanced_network(seed: int, d: int, c: int, p: int, scale: float) -> None:
    C = normal(d, c, seed=seed)
    network = LinearNetwork.drawn(C, p, scale, seed).balanced()
    t = [0.0, 0.5, 2.0]
    P = np.asarray(network.predict(t))
    W1, W2 = (np.asarray(z) for z in network.layers(t))
    np.testing.assert_allclose(W1 @ W2, P, atol=1e-12)
    np.testing.assert_allclose(W1.transpose(0, 2, 1) @ W1, W2 @ W2.transpose(0, 2, 1), atol=1e-10)  # still balanced
    assert (np.diff(np.asarray(network.loss(t))) <= 1e-12).all()
    np.testing.assert_allclose(network.loss(t), ((P - C) ** 2).sum((1, 2)) / 2, atol=1e-12)
    np.testing.assert_allclose(network.spectrum(t), np.linalg.svd(W1, compute_uv=False), atol=1e-10)
    U, V = (haar(k, np.random.default_rng(k + seed)) for k in (d, c))  # other axes, the same function
    turned = LinearNetwork(U @ network.W1, network.W2 @ V, U @ C @ V)
    np.testing.assert_allclose(turned.predict(t), U @ P @ V, atol=1e-9)
    half = LinearNetwork(*(np.asarray(z)[1] for z in network.layers([0.0, 1.2])), C)  # from the middle on, the same
    np.testing.assert_allclose(half.predict(0.8)[0], P[2], atol=1e-9)
    if p >= min(d, c) and (d != c or np.linalg.det(P[0]) * np.linalg.det(C) > 0):  # balanced layers keep the sign of det(W1 W2)
        np.testing.assert_allclose(network.predict(1e7)[0], C, atol=1e-7)


@pytest.mark.parametrize("p", [2, 5])
def test_modes_that_grow_by_ten_thousand_orders_leave_slow_ones_their_digits(p: int) -> None:
    """Singular values from 10 to 0.01: at t = 1000 the first mode would have grown by e^20000, the last is half there."""
    U, V = (haar(k, np.random.default_rng(k)) for k in (6, 4))
    C = U[:, :4] * [10, 3, 0.5, 0.01] @ V.T
    network = LinearNetwork.drawn(C, p, 1e-4, seed=1).balanced()
    t = [500.0, 1000.0]
    half = LinearNetwork(*(np.asarray(z)[0] for z in network.layers(t)), C)
    np.testing.assert_allclose(half.predict(500.0)[0], network.predict(t)[1], atol=1e-12)
    np.testing.assert_allclose(network.predict([30.0]), network.simulate([30.0]), atol=1e-9)
    last = np.asarray(network.modes([*t, 1e6]))
    if p == 5:
        assert last[3, 0] < 1e-3 < last[3, 1] < 1e-2
        np.testing.assert_allclose(last[:, 2], [10, 3, 0.5, 0.01], rtol=1e-9)
    else:  # two hidden units learn the first two modes
        np.testing.assert_allclose(last[:, 2], [10, 3, 0, 0], atol=1e-9)


def test_each_mode_alone_is_right_up_to_shared_directions() -> None:
    """From small random weights, the wider the network the better; as printed, with u_i^T W1 W2 v_i for alpha_i^2, half of the
    modes would start below zero and never come."""
    C = np.zeros((8, 3))
    np.fill_diagonal(C, [3.85, 2.32, 0.65])
    errors = []
    for width in (10, 200):
        worst = []
        for seed in range(4):
            network = LinearNetwork.drawn(C, width, 0.001, seed)
            alone = np.asarray(network.emergent_time(0.5))
            modes = np.asarray(network.modes(alone))  # at the time at which mode i should be half there
            worst.append(np.abs(modes.diagonal() / [3.85, 2.32, 0.65] - 0.5).max())
        errors.append(np.median(worst))
    assert errors[1] < errors[0]
    assert errors[1] < 0.03
    np.testing.assert_allclose(np.diag(LinearNetwork.aligned(C, 5, 0.1).independent(2.0)[:, 0]),
                               LinearNetwork.aligned(C, 5, 0.1).predict(2.0)[0, :3], atol=1e-12)
    below = [np.asarray(LinearNetwork.drawn(C, 50, 0.01, seed).modes(0.0)) < 0 for seed in range(20)]
    assert 0.3 < np.mean(below) < 0.7


def test_greedy_dynamics_leave_the_rest_of_a_layer_small() -> None:
    C = np.zeros((8, 3))
    np.fill_diagonal(C, [3.85, 2.32, 0.65])
    fourth = [np.asarray(LinearNetwork.drawn(C, 10, scale, 3).spectrum([30.0]))[0, 3] for scale in (0.1, 0.01, 0.001)]
    assert fourth[0] > 5 * fourth[1] > 25 * fourth[2]
    assert fourth[2] < 0.01


# ------------------------------------------------------------------------------------------------ arrays, and what is refused


def test_kinds_of_arrays_and_times() -> None:
    v = torch.tensor([1.0, 2.0])
    for model in (LinearModel(1.0, v), DiagonalNetwork(1.0, v, 0.1, 0.1)):
        out = model.predict(torch.tensor(TIMES))
        assert isinstance(out, torch.Tensor)
        assert out.dtype == torch.float64
        assert out.shape == (2, 4)
        assert model.predict(0.5).shape == (2, 1)  # one number is one time
        assert isinstance(model.stage_eps, torch.Tensor)
    C = torch.from_numpy(normal(3, 2))
    network = LinearNetwork.aligned(C, 2, 0.1)
    assert isinstance(network.predict(1.0), torch.Tensor)
    assert network.predict(1.0).shape == network.simulate(1.0).shape == (1, 3, 2)
    assert isinstance(LinearNetwork.drawn(C.numpy(), 2, 0.1).modes(0.0), np.ndarray)
    assert isinstance(DiagonalNetwork([1.0], [1.0], [0.1], [0.1]).predict([0.0]), np.ndarray)


def test_knobs_change_what_they_say() -> None:
    C = normal(3, 2)
    assert not np.allclose(LinearNetwork.drawn(C, 4, 0.1, 0).W1, LinearNetwork.drawn(C, 4, 0.1, 1).W1)
    assert not np.allclose(LinearNetwork.aligned(C, 4, 0.1, 0).W1, LinearNetwork.aligned(C, 4, 0.1, 1).W1)
    assert not np.allclose(LinearModel(1.0, 1.0).predict(1.0), LinearModel(1.0, 1.0, 0.5).predict(1.0))
    assert linear_networks.LinearNetwork is two_layers.LinearNetwork


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: DiagonalNetwork([1.0, 1.0], 1.0, [0.1, 0.0], [0.1, 0.0]), "both 0 in mode 1: there the flow starts at a saddle"),
    (lambda: DiagonalNetwork([1.0], [0.0], 0.1, 0.1), r"variance contains 0: E\[x_i\^2\] is above 0"),
    (lambda: LinearModel([1.0], [-1.0]), "variance contains -1"),
    (lambda: DiagonalNetwork([1.0, math.nan], 1.0, 0.1, 0.1), "S contains NaN or Inf"),
    (lambda: DiagonalNetwork([1.0, 2.0], [1.0, 2.0, 3.0], 0.1, 0.1), "m = 3; but m = 2 in S"),
    (lambda: LinearModel([[1.0]], 1.0), r"S has shape \(1, 1\); \[m\] is needed"),
    (lambda: DiagonalNetwork(1.0, 1.0, 0.1, 0.1).emergent_time(1.0), r"eps=1.0: a share of the target between 0 and 1"),
    (lambda: DiagonalNetwork(1.0, 1.0, 0.1, 0.1).predict(-1.0), "the flow starts at 0"),
    (lambda: DiagonalNetwork(1.0, 1.0, 0.1, 0.1).simulate(1.0, method="descent"), "descent takes steps of lr"),
    (lambda: DiagonalNetwork(1.0, 1.0, 0.1, 0.1).simulate(1.0, lr=0.1), "the flow chooses its own"),
    (lambda: DiagonalNetwork(1.0, 1.0, 0.1, 0.1).simulate(1.0, method="euler"),  # type: ignore[arg-type]
     "method='euler': \"flow\""),
    (lambda: LinearNetwork(np.zeros((3, 2)), np.zeros((2, 2)), normal(3, 2)), "the flow starts at a saddle"),
    (lambda: LinearNetwork(normal(3, 2), normal(3, 2), normal(3, 2)), r"do not make a network x\^T W_1 ... W_L"),
    (lambda: LinearNetwork(normal(3, 2), normal(2, 2), normal(4, 2)), r"do not make a network x\^T W_1 ... W_L"),
    (lambda: LinearNetwork(np.full((3, 2), math.inf), normal(2, 2), normal(3, 2)), "W1 contains NaN or Inf"),
    (lambda: LinearNetwork(normal(3, 2), normal(2, 2), normal(3, 2), -np.eye(3)), "covariance is not symmetric, or has an eige"),
    (lambda: LinearNetwork(normal(3, 2), normal(2, 2), np.eye(3)[:, :2], np.diag([1.0, 0.0, 1.0])),
     "correlation has a part along inputs whose variance is 0"),
    (lambda: DiagonalNetwork(1.0, 1.0, 1e-160, 1e-160), "a0 or b0 has weights of size 1e-160: their squares are no numbers"),
    (lambda: DiagonalNetwork(1.0, 1.0, [0.1, 1e160], 0.1), r"a0 or b0 has weights of size 1e\+160: their squares"),
    (lambda: LinearNetwork.aligned(normal(3, 2), 4, 1e-165), r"W1 has weights of size .*e-166: their squares"),
    (lambda: LinearNetwork.drawn(normal(3, 2), 4, 0.0), "scale=0.0: weights of a size above 0"),
    (lambda: LinearNetwork.drawn(normal(3, 2), 0, 0.1), "width=0; a whole number"),
    (lambda: LinearNetwork.aligned(normal(3, 2), 1, 0.1), "width=1: 2 modes need as many hidden units"),
])
def test_what_is_refused(make: Any, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        make()
