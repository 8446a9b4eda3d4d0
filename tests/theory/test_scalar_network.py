"""The scalar linear network: Theorem 1 against the flow and the printed equations, its ends, its regimes, its laws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import install_import_hook

from richter.core import SelectionError

with install_import_hook(["richter.theory.scalar_network"], "checker.typechecked"):
    from richter.theory import scalar_network

TIMES = [0.0, 0.2, 1.0, 4.0]


def weights(p: int = 5, size: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    a, b = size * np.random.default_rng(seed).standard_normal((2, p))
    return a, b


def euler(a: np.ndarray, b: np.ndarray, S: float, Z: float, v: float, end: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Gradient descent by the definition, with small steps: E over x = -sqrt(v) and sqrt(v) of (f(x) - S x)^2 / 2."""
    for _ in range(steps):
        da, db = np.zeros_like(a), np.zeros_like(b)
        for x in (-math.sqrt(v), math.sqrt(v)):
            wrong = x / Z * (a * b).sum() - S * x
            da, db = da + wrong * x / Z * b / 2, db + wrong * x / Z * a / 2
        a, b = a - end / steps * da, b - end / steps * db
    return a, b


def printed(a: np.ndarray, b: np.ndarray, S: float, Z: float, t: np.ndarray, exponent: float) -> np.ndarray:
    """Eq. 6.12 as it stands in the text, with its exponent."""
    S0, size = (a * b).sum() / Z, (a**2 + b**2).sum() / (2 * Z)
    R = math.sqrt(size**2 - S0**2 + S**2)
    E = np.exp(-exponent * R / Z * t)
    return (size - S0 + S + R + (-size + S0 - S + R) * E) / (size + S0 - S + R + (-size - S0 + S + R) * E)


@pytest.mark.parametrize(("S", "Z", "v"), [(2.0, 1.0, 1.0), (-1.0, 3.0, 0.5), (0.4, 2.0, 2.0)])
def test_descent_with_small_steps_tends_to_it(S: float, Z: float, v: float) -> None:
    a0, b0 = weights()
    a, b, _ = (np.asarray(z) for z in scalar_network.ScalarNetwork(a0, b0, S, Z, v).predict([1.5]))
    errors = [max(np.abs(x - y[:, 0]).max() for x, y in zip(euler(a0, b0, S, Z, v, 1.5, steps), (a, b), strict=True))
              for steps in (2000, 4000)]
    assert errors[0] < 5e-3
    assert abs(errors[0] / errors[1] - 2) < 0.1  # first order: half the step, half the error


def test_the_printed_time_constant_is_twice_too_fast() -> None:
    a, b = weights()
    t = np.array(TIMES)
    gamma = scalar_network.ScalarNetwork(a, b, 1.3, 2.0).predict(t)[2]
    np.testing.assert_allclose(gamma, printed(a, b, 1.3, 2.0, t, 2.0), rtol=1e-12)
    assert np.abs(gamma - printed(a, b, 1.3, 2.0, t, 4.0)).max() > 0.05
    np.testing.assert_allclose(scalar_network.ScalarNetwork(a, b, 1.3, 2.0, 0.5).predict(2 * t)[2], gamma, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 100), st.sampled_from([0.01, 0.3, 1.0, 4.0]), st.sampled_from([-2.0, -0.1, 0.0, 0.3, 5.0]),
       st.sampled_from([0.5, 1.0, 7.0]))
def test_laws(seed: int, size: float, S: float, Z: float) -> None:
    a0, b0 = weights(6, size, seed)
    network = scalar_network.ScalarNetwork(a0, b0, S, Z)
    a, b, gamma = (np.asarray(z) for z in network.predict(TIMES))
    np.testing.assert_allclose(a**2 - b**2, np.repeat((a0**2 - b0**2)[:, None], len(TIMES), 1), rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose((a * b).sum(0) / Z, network.slope(TIMES), rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(network.loss(TIMES), (np.asarray(network.slope(TIMES)) - S) ** 2 / 2, atol=1e-12)
    aligned, others = (np.asarray(z) for z in network.modes(TIMES))
    np.testing.assert_allclose(aligned + others, network.slope(TIMES), rtol=1e-9, atol=1e-10)
    assert gamma[0] == 1
    S0 = float((a0 * b0).sum() / Z)
    assert (np.diff(gamma) * np.sign(S - S0) >= -1e-12).all()  # monotone, in the direction that the text says
    late = network.predict([1e9])
    assert abs(float(late[2][0]) / network.gamma_plus - 1) < 1e-9
    assert abs(float(network.slope([1e9])[0]) - S) < 1e-9 * max(1, abs(S))
    if S > 0:
        assert network.gamma_plus >= network.bound
    mirror = scalar_network.ScalarNetwork(a0, -b0, -S, Z)  # the same network with the sign of b, and of the target, turned
    np.testing.assert_allclose(mirror.predict(TIMES)[2], 1 / gamma, rtol=1e-9)
    np.testing.assert_array_equal(mirror.aligned, network.aligned)
    c = 1.7  # weights times c and the target times c^2: the same in 1/c^2 of the time
    larger = scalar_network.ScalarNetwork(c * a0, c * b0, c**2 * S, Z)
    np.testing.assert_allclose(larger.predict(np.array(TIMES) / c**2)[2], gamma, rtol=1e-9)


def test_aligned_units_grow_and_others_shrink() -> None:
    """Of weights 1 and -1, as in Sec. 6.2: a_j^2 grows by gamma where a_j b_j > 0 and shrinks by it elsewhere (Eqs. 6.8, 6.9)."""
    a0, b0 = 0.1 * np.array([1.0, -1, 1, 1]), 0.1 * np.array([1.0, -1, -1, -1])
    network = scalar_network.ScalarNetwork(a0, b0, 1.0, 1.0)
    a, _, gamma = (np.asarray(z) for z in network.predict(TIMES))
    np.testing.assert_array_equal(network.aligned, [True, True, False, False])
    np.testing.assert_allclose(a[:2] ** 2, np.outer(a0[:2] ** 2, gamma), rtol=1e-12)
    np.testing.assert_allclose(a[2:] ** 2, np.outer(a0[2:] ** 2, 1 / gamma), rtol=1e-12)
    theta = np.asarray(network.slope(TIMES))
    parts = network.modes(TIMES)
    apart = np.asarray(parts.aligned) - np.asarray(parts.anti_aligned)
    np.testing.assert_allclose((theta + apart) / (theta + apart)[0], gamma, rtol=1e-12)
    assert parts.aligned[-1] > 0.5  # S = 1 is reached, slowly at first
    assert scalar_network.ScalarNetwork(a0, b0, -1.0, 1.0).aligned.tolist() == [False, False, True, True]


def test_three_regimes() -> None:
    """The numbers of an independent check, means over 20 seeds: 203, .995, 1.10, 1.008."""
    def gammas(**how: Any) -> list[float]:
        return [scalar_network.ScalarNetwork.drawn(seed=seed, **how).gamma_plus for seed in range(20)]

    assert abs(np.mean(gammas(width=100, weights=0.01)) - 203) < 30
    uncentred = gammas(width=100, target=1e-3)
    assert abs(np.mean(uncentred) - 0.995) < 0.06
    assert 0.06 < np.std(uncentred) < 0.18  # single ones are not 1: the function does not start at zero
    assert abs(np.mean(gammas(width=100, scale=10.0)) - 1.10) < 0.07
    assert abs(np.mean(gammas(width=10_000, scale=100.0)) - 1.008) < 0.006
    draw = scalar_network.ScalarNetwork.drawn
    assert abs(draw(100, target=1e-3).balanced().gamma_plus - 1) < 1e-4
    assert [draw(100, weights=0.01).regime, draw(100, target=1e-3).balanced().regime, draw(10_000, scale=100.0).regime,
            draw(100, weights=0.1).regime] == ["rich", "lazy", "lazy", "between"]
    assert scalar_network.ScalarNetwork([1.0], [1.0], -30.0, 1.0).regime == "rich"  # gamma falls to 0


def test_every_knob_of_table_6_1_raises_gamma() -> None:
    base = scalar_network.ScalarNetwork.drawn(100, target=3.0, scale=10.0, weights=5.0, seed=3)
    a, b = base.a0, base.b0
    richer = {"weights": scalar_network.ScalarNetwork(a / 5, b / 5, 3.0, 10.0),  # type: ignore[operator]
              "target": scalar_network.ScalarNetwork(a, b, 30.0, 10.0),
              "input": scalar_network.ScalarNetwork(a, b, 3.0 / 0.01, 10.0),  # S is the ratio of y and x
              "output": scalar_network.ScalarNetwork(a, b, 3.0, 100.0)}
    for knob, network in richer.items():
        assert network.gamma_plus > base.gamma_plus, knob


def test_what_no_growth_can_reach() -> None:
    a = np.array([1.0, -0.5])
    opposite = scalar_network.ScalarNetwork(a, -a, 1.0, 1.0)  # every a + b is zero, and S > 0
    assert opposite.gamma_plus == math.inf
    for z in opposite.predict([1e4])[:2]:
        np.testing.assert_allclose(z, 0, atol=1e-12)
    assert float(opposite.slope([1e4])[0]) == 0
    assert opposite.regime == "rich"
    equal = scalar_network.ScalarNetwork(a, a, -1.0, 1.0)
    assert equal.gamma_plus == 0
    np.testing.assert_allclose(equal.predict([1e4])[0], 0, atol=1e-12)


def test_it_keeps_its_digits_where_the_target_is_far_away() -> None:
    """R - S loses eight digits of sixteen by subtraction, and all of them for a target 1e10 times the weights."""
    a, b = weights(4, 1e-5)
    network = scalar_network.ScalarNetwork(a, b, 3.0, 1.0)
    assert abs(float(network.slope([1e3])[0]) - 3.0) < 1e-12
    assert abs(float(network.predict([1e3])[2][0]) / network.gamma_plus - 1) < 1e-12


def test_kinds_of_arrays() -> None:
    a, b = (torch.from_numpy(z) for z in weights())
    network = scalar_network.ScalarNetwork(a, b, 1.0, 1.0)
    assert all(isinstance(z, torch.Tensor) for z in (*network.predict(TIMES), *network.simulate(TIMES), *network.modes(TIMES)))
    assert isinstance(network.aligned, torch.Tensor)
    again = scalar_network.ScalarNetwork(a.numpy(), b.numpy(), 1.0, 1.0)
    for x, y in zip(network.predict(TIMES), again.predict(TIMES), strict=True):
        assert isinstance(y, np.ndarray)
        np.testing.assert_array_equal(x.numpy(), y)
    assert network.predict(TIMES)[0].shape == (5, 4)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"scale": 0.0}, r"scale=0.0: a number above 0 is needed; a network with a negative Z is the one with b0 negated"),
    ({"scale": -1.0}, "a number above 0 is needed"),
    ({"variance": 0.0}, r"variance=0.0: a number above 0 is needed; it is the mean of x\^2"),
    ({"target": math.nan}, "target=nan: the slope S of the target, a finite number, is needed"),
    ({"b0": [1.0, 2.0, 3.0]}, "p = 3; but p = 2 in a0"),
    ({"a0": [], "b0": []}, "it is empty along 'p'"),
    ({"a0": [0.0, 0.0], "b0": [0.0, 0.0]}, "a0 and b0 are all zero: no gradient reaches such weights, and they never move"),
    ({"a0": [1e-300, 0.0], "b0": [0.0, 0.0]}, "the largest weight is 1e-300; between 1e-290 and"),
    ({"a0": [1.0, math.inf]}, "a0 contains NaN or Inf")])
def test_bad_input(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        scalar_network.ScalarNetwork(**{"a0": [1.0, 2.0], "b0": [0.5, 0.5], "target": 1.0, "scale": 1.0} | change)
    with pytest.raises(SelectionError, match="the flow starts at 0"):
        scalar_network.ScalarNetwork([1.0], [1.0], 1.0, 1.0).predict([-1.0])
    with pytest.raises(SelectionError, match="width=0; a whole number, at least 1, is needed"):
        scalar_network.ScalarNetwork.drawn(0)
