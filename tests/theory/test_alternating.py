"""Alternating flows of any network: very small weights, targets of any scale, minima at kinks, and what is refused."""

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
from richter.theory import agf, alternating, neurons
from richter.theory.alternating import alternating_flows, layers
from richter.theory.stepping import LinearGrowth

AXES = math.sqrt(2) * np.eye(2)  # two examples, whose second moments are the identity
SLOPED = np.random.default_rng(3)
X = SLOPED.normal(size=(40, 3))
Y = np.stack([np.maximum(X @ [1.0, 0.5, 0], 0) - 1.5 * np.maximum(-X[:, 0], 0), np.abs(X[:, 1])], 1)
KINKED = 1e-6 * SLOPED.normal(size=(6, 5))


def starts(alpha: float, *shape: int, seed: int = 0) -> np.ndarray:
    """Neurons of norm ``alpha``."""
    theta = np.random.default_rng(seed).normal(size=shape)
    return alpha * theta / np.linalg.norm(theta, axis=1, keepdims=True)


def relu_neuron(theta: Tensor, x: Tensor) -> Tensor:
    return (x @ theta[:x.shape[1]]).relu()[:, None] * theta[x.shape[1]:]


# ------------------------------------------------------------------------------------------------ very small weights


@pytest.mark.parametrize("second", [0.5, 0.1])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("alpha", [1e-2, 1e-6, 1e-10, 1e-14])
def test_both_modes_are_learned_however_small_the_weights(alpha: float, turned: bool, second: float) -> None:
    """Behind the first jump all directions are at a saddle of the utility, with remnants of the second mode of order alpha.
    Times are log(1 / alpha) / strength, up to about 1 / strength: it depends on what each neuron has of the second mode."""
    rng = np.random.default_rng(1)
    Q, P = (np.linalg.qr(rng.normal(size=(2, 2)))[0] if turned else np.eye(2) for _ in range(2))
    x, C = AXES @ Q, P @ np.diag([3.0, second])
    neuron, data = layers("linear", starts(alpha, 4, 4), x, x @ C.T)
    learned, exact = alternating_flows(neuron, *data), agf.linear(np.eye(2), C)
    np.testing.assert_allclose(learned.staircase.levels, exact.levels, atol=1e-10)
    delays = learned.staircase.times.numpy() / exact.times + math.log(alpha)
    assert (np.abs(delays) < 2.0).all(), delays
    assert delays[0] > 0


@pytest.mark.parametrize("alpha", [1e-4, 1e-10, 1e-14])
def test_relu_leaves_the_saddle_behind_its_first_jump(alpha: float) -> None:
    """Inputs along the axes: neurons are linear where they are awake, but this is not known to the algorithm."""
    neuron, data = layers("relu", starts(alpha, 6, 4), AXES, AXES * [3.0, 0.5])
    learned = alternating_flows(neuron, *data)
    np.testing.assert_allclose(learned.staircase.levels, [4.625, 0.125, 0.0], atol=1e-8)
    np.testing.assert_allclose(learned.staircase.times.numpy() / -math.log(alpha), [1 / 3, 2], rtol=0.2)


def test_what_rounding_hides_is_warned_of() -> None:
    neuron, data = layers("linear", starts(1e-17, 4, 4), AXES, AXES * [3.0, 0.5])
    with pytest.warns(UserWarning, match=r"norms down to 1e-17, and log\(1 / norm\) is above 36: what dormant directions keep"):
        alternating_flows(neuron, *data)


def test_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neurons, "STEPS", 3)
    neuron, data = layers("relu", starts(1e-4, 4, 4), AXES, AXES)
    with pytest.warns(UserWarning, match="after 3 steps no dormant neuron has woken: the largest utility is"), \
            pytest.raises(SelectionError, match="no neuron has a direction of positive utility"):
        alternating_flows(neuron, *data)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_growth_is_the_exponential_of_the_matrix(seed: int) -> None:
    rng = np.random.default_rng(seed)
    A, d = torch.from_numpy(rng.normal(size=(4, 4))), torch.from_numpy(starts(1.0, 3, 4, seed=seed))
    M = A + A.T
    growth, gains = LinearGrowth.under(M, d), torch.tensor([0.5, 3.0, 20.0], dtype=torch.float64)
    t = growth.reach(gains, least=1e-8)
    if float(torch.linalg.eigvalsh(M)[-1]) <= 0:
        assert t.isinf().all()
        return
    for i, time in enumerate(t.tolist()):
        grown = torch.linalg.matrix_exp(M * time) @ d[i]
        assert float(grown.norm().log()) == pytest.approx(float(gains[i]), rel=1e-8)
        torch.testing.assert_close(growth.directions(time)[i], grown / grown.norm(), rtol=0, atol=1e-8)


# ------------------------------------------------------------------------------------------------ scales


@pytest.mark.parametrize(("activation", "degree", "c"), [("linear", 2, 1e-20), ("linear", 2, 1e6), ("square", 3, 1e-20),
                                                         ("square", 3, 1e6), ("relu", 2, 1e-6)])
def test_units_of_targets_change_units_of_times_and_levels_alone(activation: Any, degree: int, c: float) -> None:
    """f(c^(1/k) theta) = c f(theta): with y times c, levels are c^2 times higher and times c^(2 - 2/k) times shorter."""
    y = {"linear": X @ [[1.0, 0], [0, 2], [1, 1]], "relu": Y, "square": np.stack([X[:, 0]**2, 0.6 * X[:, 1]**2], 1)}[activation]
    theta, s = starts(1e-3, 4, 5), c ** (1 / degree)
    learned, other = (alternating_flows(neuron, *data, unit=unit, jumps=2) for unit, (neuron, data) in (
        (1.0, layers(activation, theta, X, y)), (s, layers(activation, s * theta, X, c * y))))
    assert learned.order == other.order
    torch.testing.assert_close(other.staircase.times * c ** (2 - 2 / degree), learned.staircase.times, rtol=1e-9, atol=0)
    torch.testing.assert_close(other.staircase.levels / c**2, learned.staircase.levels, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("c", [1e-5, 1e-6])
def test_small_targets_are_learned_and_the_unit_that_suits_them_is_said(c: float) -> None:
    neuron, data = layers("linear", starts(1e-4, 4, 4), AXES, c * AXES * [3.0, 0.5])
    with pytest.warns(UserWarning, match=r"to wake at norm 1, and the first comes to 0.0\d+: .*Give unit=0.0\d+, or y in units"):
        learned = alternating_flows(neuron, *data)
    np.testing.assert_allclose(learned.staircase.levels / c**2, [4.625, 0.125, 0.0], atol=1e-8)
    assert not any(learned.again)


def test_starts_that_are_not_small_against_what_is_learned() -> None:
    with pytest.raises(SelectionError, match=r"norms up to 0.01, and the first that wakes comes to 0.0024: none sleeps"):
        alternating_flows(*_linear(1e-2, 1e-6))
    with pytest.warns(UserWarning, match=r"norms up to 0.001, and the first that wakes comes to 0.0024: they hardly sleep"):
        alternating_flows(*_linear(1e-3, 1e-6))


def _linear(alpha: float, c: float) -> tuple[Any, ...]:
    neuron, data = layers("linear", starts(alpha, 4, 4), AXES, c * AXES * [3.0, 0.5])
    return neuron, *data


# ------------------------------------------------------------------------------------------------ minima


def downhill(theta: np.ndarray) -> tuple[float, np.ndarray]:
    z = X @ theta[:, :3].T
    r = Y - np.maximum(z, 0) @ theta[:, 3:]
    return (r**2).sum() / 80, -np.concatenate([((z > 0) * (r @ theta[:, 3:].T)).T @ X, np.maximum(z, 0).T @ r], 1) / 40


def test_levels_of_relu_are_minima_to_the_tolerance() -> None:
    """The third is at a kink, where L-BFGS fails and gradients do not vanish: long descent from there finds nothing lower."""
    neuron, data = layers("relu", KINKED, X, Y)
    learned = alternating_flows(neuron, *data, jumps=3)
    levels = learned.staircase.levels.numpy()
    assert len(learned.left) == 3
    assert learned.left[2] > 1e-4
    for j, theta in enumerate(learned.parameters):
        own = theta.numpy()[learned.order[:j + 1]]
        loss, slope = downhill(own)
        assert loss == pytest.approx(levels[j + 1], rel=1e-12)
        for _ in range(4_000):
            own = own - 0.02 * slope
            loss, slope = downhill(own)
        assert loss > levels[j + 1] - 1e-5 * levels[0]


def test_a_level_that_is_no_minimum_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neurons, "ROUNDS", 1 - len(KINKED))
    neuron, data = layers("relu", KINKED, X, Y)
    with pytest.warns(UserWarning, match=r"not at a minimum of the loss: a gradient of 0.\d+ is left"):
        alternating_flows(neuron, *data, jumps=1)


# ------------------------------------------------------------------------------------------------ what goes in


class OnDevice(Tensor):
    """Not to be read by numpy, as those of a device are."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def test_tensors_of_a_device_are_read_through_the_processor() -> None:
    stairs = alternating.Staircase(*(torch.tensor(a).as_subclass(OnDevice) for a in ([1.0, 2.0], [3.0, 1.0, 0.0])))
    assert torch.equal(torch.as_tensor(stairs.loss(torch.tensor([0.0, 1.5, 9.0]).as_subclass(OnDevice))).as_subclass(Tensor),
                       torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64))
    learned = alternating.Learned(stairs, [0, 1], [1.0, 1.0], [], 2.0, [(), ()], [0.0, 0.0])
    np.testing.assert_allclose(learned.separations, [1.0])
    neuron, data = layers("linear", starts(1e-4, 4, 4), AXES, AXES * [3.0, 0.5])
    learned = alternating_flows(neuron, data[0].as_subclass(OnDevice), *data[1:])
    assert isinstance(learned.staircase.times, Tensor)


def test_whole_numbers_of_numpy_count_jumps() -> None:
    neuron, data = layers("linear", starts(1e-4, 4, 4), AXES, AXES * [3.0, 0.5])
    assert len(alternating_flows(neuron, *data, jumps=np.int64(1)).order) == 1  # type: ignore[arg-type]


THETA = starts(1e-3, 4, 4)


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: alternating_flows(lambda t, x: (x @ t[:2]).relu() * t[2], THETA, AXES, AXES[:, :1]),
     r"the neuron returns \[2\] and y has shape \[2, 1\]: .* A single output is a column"),
    (lambda: alternating_flows(relu_neuron, THETA, AXES, AXES[:, :1]), r"the neuron returns \[2, 2\] and y has shape \[2, 1\]"),
    (lambda: alternating_flows(lambda t, x: 3.0, THETA, AXES, AXES), "the neuron returns float and y has shape"),  # type: ignore
    (lambda: alternating_flows(3, THETA, AXES, AXES), r"neuron=3: a function of \(parameters"),  # type: ignore[arg-type]
    (lambda: alternating_flows(lambda t, x: relu_neuron(t, x) * math.nan, THETA, AXES, AXES), "outputs contain NaN or Inf"),
    (lambda: alternating_flows(relu_neuron, THETA, AXES, 1e200 * AXES), "the loss without any neuron is inf: y has entries"),
    (lambda: alternating_flows(relu_neuron, THETA, AXES, 1e-200 * AXES), "the loss without any neuron is 0: y has entries"),
    (lambda: alternating_flows(relu_neuron, THETA, AXES, AXES, jumps=True), "jumps=True; a whole number"),
    (lambda: alternating_flows(relu_neuron, THETA, AXES, AXES, lr=math.inf), "lr=inf: a number above 0 is needed"),
    (lambda: alternating_flows(relu_neuron, THETA, AXES, AXES, lr="a"), "lr='a': a number"),  # type: ignore[arg-type]
    (lambda: alternating_flows(relu_neuron, THETA, AXES, AXES, tolerance=math.nan), "tolerance=nan: a number above 0"),
    (lambda: alternating_flows(relu_neuron, THETA, AXES, AXES, unit=0.0), "unit=0.0: a number above 0"),
    (lambda: alternating_flows(relu_neuron, THETA, AXES, AXES, unit=1e-4), "above 0 and well below 0.0001"),
    (lambda: alternating.simulate("gelu", THETA, AXES, AXES, [1.0]), "has no activation 'gelu'"),  # type: ignore[arg-type]
    (lambda: alternating.simulate("relu", THETA[:, :3], AXES, AXES, [1.0]), "theta has 3 numbers for each neuron"),
    (lambda: alternating.simulate("relu", THETA, AXES, AXES[:1], [1.0]), "so n = 1; but n = 2 in x"),
    (lambda: alternating.simulate("relu", THETA, AXES, AXES, [1.0], lr=0.0), "lr=0.0: the length of a step"),
])
def test_what_is_refused(call: Any, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        call()


# ------------------------------------------------------------------------------------------------ inputs that are not white


def correlated(spread: float, seed: int, d: int = 3, n: int = 60) -> tuple[Any, Any]:
    """Inputs whose variances differ by ``spread`` along directions of their own, and a linear target."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((n, d))
    x = x @ np.linalg.cholesky(np.linalg.inv(x.T @ x / n))
    Q = np.linalg.qr(draw.standard_normal((d, d)))[0]
    x = x @ (Q * np.sqrt(np.geomspace(spread, 1, d))) @ Q.T
    return x, x @ draw.standard_normal((d, d)).T


@pytest.mark.parametrize(("spread", "seed"), [(3.0, 50), (10.0, 50), (10.0, 51)])
def test_dormant_neurons_turn_with_active_ones(spread: float, seed: int) -> None:
    """Frozen while the first settles, they would be in its old direction, and wake 2 to 10 times too early."""
    x, y = correlated(spread, seed)
    theta = np.random.default_rng(seed).standard_normal((6, 6))
    theta = math.exp(-32) * theta / np.linalg.norm(theta, axis=1)[:, None]
    neuron, given = alternating.layers("linear", theta, x, y)
    learned, closed = alternating.alternating_flows(neuron, *given), agf.linear(x.T @ x / len(x), y.T @ x / len(x))
    np.testing.assert_allclose(learned.staircase.levels, closed.levels, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(np.asarray(learned.staircase.times) / 32, closed.times, rtol=0.06)


def test_relu_neurons_of_one_cone_turn_together() -> None:
    """Inputs that are all positive; the second jump of descent is at 43.5, and was predicted at 13.8."""
    draw = np.random.default_rng(61)
    x = np.abs(draw.standard_normal((80, 3))) + 0.1
    y = np.stack([x[:, 0] - 0.6 * x[:, 1], x[:, 1] + 0.5 * x[:, 2]], 1)
    theta = np.random.default_rng(1).standard_normal((8, 5))
    theta = 1e-12 * theta / np.linalg.norm(theta, axis=1)[:, None]
    neuron, given = alternating.layers("relu", theta, x, y)
    stairs = alternating.alternating_flows(neuron, *given, jumps=2).staircase
    middle = (float(stairs.levels[1]) + float(stairs.levels[2])) / 2
    t = np.linspace(30, 60, 301)
    loss = np.asarray(alternating.simulate("relu", theta, x, y, t, lr=0.02))
    assert float(stairs.times[1]) == pytest.approx(t[(loss < middle).argmax()], rel=0.05)


def test_a_neuron_that_sleeps_again_below_rounding_is_warned_of() -> None:
    alike = np.linalg.cholesky([[11.2145, 3.7097], [3.7097, 1.7855]]).T * math.sqrt(2)
    y = (alike @ np.array([-0.2, 2.0]))[:, None]

    def neuron(theta: Tensor, x: Tensor) -> Tensor:
        return (x * (theta[:2] * theta[2:])).sum(1, keepdim=True)

    theta = np.eye(2, 4)
    with pytest.warns(UserWarning, match="sleeps again, and started with a norm below 1e-8"):
        alternating.alternating_flows(neuron, math.exp(-24) * theta, alike, y)
