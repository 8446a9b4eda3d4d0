"""Signal propagation: the recursion against a hundred digits, its rates, the balanced layer, and what it refuses."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import install_import_hook

from richter.core import SelectionError

with install_import_hook("richter.theory", "checker.typechecked"):
    from richter.theory import signal

DEPTHS = (10, 20, 30, 50, 100, 300, 1000)
SUPREMUM, PAIR = (-1.0, 0.9), (0.0, 0.0)  # forward and backward correlations
TABLE = {SUPREMUM: (2.58, 4.62, 6.63, 10.43, 18.74, 43.86, 102.07), PAIR: (3.96, 6.92, 9.49, 13.94, 23.05, 49.13, 108.01)}


def precise(c1: float, depth: int) -> tuple[list[mpmath.mpf], list[mpmath.mpf]]:
    """1 - c_l and I^b_l by the textbook form, in a hundred digits."""
    with mpmath.workdps(100):
        c, kept = [mpmath.mpf(c1)], [mpmath.mpf(1)]
        while len(c) < depth:
            c.append((c[-1] * mpmath.asin(c[-1]) + mpmath.sqrt(1 - c[-1] ** 2)) / mpmath.pi + c[-1] / 2)
        for z in reversed(c[:-1]):
            kept.append(kept[-1] * (mpmath.mpf(1) / 2 + mpmath.asin(z) / mpmath.pi))
        return [1 - z for z in c], kept[::-1]


@pytest.mark.parametrize("c1", [-1.0, -0.4, 0.0, 0.5, 0.9])
def test_recursion_against_a_hundred_digits(c1: float) -> None:
    depth = 2000
    lost, kept = precise(c1, depth)
    c, alike = signal.correlations(c1, depth), signal.gradients(c1, depth)
    for layer in (1, 2, 3, 10, 100, depth):
        assert abs(2 * signal.forward_loss(c1, depth)[layer - 1] / float(lost[layer - 1]) - 1) < 1e-12
        assert abs(c[layer - 1] - float(1 - lost[layer - 1])) < 1e-15
        assert abs(alike[layer - 1] - float(kept[layer - 1])) <= 1e-12 * float(kept[layer - 1])
    many = signal.forward_loss(np.array([c1, 0.3]), depth)[:, 0]  # arrays go another way than single numbers
    np.testing.assert_allclose(many, signal.forward_loss(c1, depth), rtol=1e-13)


@pytest.mark.parametrize("pair", [SUPREMUM, PAIR], ids=["supremum", "pair"])
def test_balanced_layers_of_the_table(pair: tuple[float, float]) -> None:
    np.testing.assert_allclose(signal.balanced_layers(DEPTHS, *pair), TABLE[pair], atol=1e-2)
    assert signal.balanced_layer(30, *pair) == signal.balanced_layers([10, 30], *pair)[1]
    assert abs(signal.exponent(DEPTHS, *pair) - {SUPREMUM: 0.809, PAIR: 0.716}[pair]) < 0.01
    assert abs(signal.exponent(DEPTHS[:5], *pair) - {SUPREMUM: 0.871, PAIR: 0.765}[pair]) < 0.01


@pytest.mark.long
def test_rates_at_great_depth() -> None:
    """A million layers: the printed 3/5 is there, and only there."""
    L = 10**6
    for pair in (SUPREMUM, PAIR):
        assert 0.595 < signal.exponent((10**4, 10**5, L), *pair) < 0.615
    lost, alike = 2 * signal.forward_loss(0.0, L), signal.gradients(0.0, L)
    assert abs(lost[-1] * L**2 - 44.411) < 1e-3
    np.testing.assert_allclose([alike[k - 1] / (k / L) ** 3 for k in (10**3, 10**4, 10**5)], [1.040, 1.005, 1.0005], atol=5e-4)
    for alpha, ratio in ((0.3, 1.015), (0.5, 1.039)):
        first = signal.backward_expansion(alpha, L) - alpha**3
        assert abs((alike[int(alpha * L) - 1] - alpha**3) / first - ratio) < 1e-3
    ahead, slopes = 2 * signal.forward_loss(-1.0, L), []
    for low, high in ((10, 100), (100, 1000), (1000, 10**4), (10**5, L)):
        layers = np.unique((np.geomspace(low, high, 30) + 1e-9).astype(int))
        slopes.append(np.polyfit(np.log(layers), np.log(ahead[layers - 1]), 1)[0])
    # The curve bends: its slope at l is -2 + 3 log(l)/l + O(1/l), from -1.36 at 10 to -1.85 at 100, so that a line through it
    # depends on the layers it is drawn through, in the second digit. The check does not say which; these give its numbers.
    np.testing.assert_allclose(slopes, [-1.659, -1.936, -1.991, -1.9999], atol=1e-3)
    local = [np.log(ahead[k] / ahead[k - 2]) / np.log((k + 1) / (k - 1)) for k in (10**3, 10**4, 10**5)]
    rest = [(slope + 2 - 3 * np.log(k) / k) * k for slope, k in zip(local, (10**3, 10**4, 10**5), strict=True)]
    np.testing.assert_allclose(rest, rest[-1], atol=0.25)  # O(1/l): of 3 log(l), 21 to 35, nothing is left


@settings(max_examples=30, deadline=None)
@given(st.floats(-1, 1), st.integers(1, 40), st.floats(-0.9, 0.9))
def test_laws(c1: float, depth: int, slope: float) -> None:
    c, alike = signal.correlations(c1, depth, slope=slope), signal.gradients(c1, depth, slope=slope)
    assert c.shape == alike.shape == (depth,)
    assert (np.diff(c) >= -1e-15).all()  # inputs only become more alike
    assert (np.diff(alike) >= -1e-15).all()  # gradients are most alike at the output
    assert alike[-1] == 1
    assert (alike >= -1e-15).all() or slope < 0
    as_tensor = signal.correlations(torch.tensor([c1], dtype=torch.float64), depth, slope=slope)
    torch.testing.assert_close(as_tensor[:, 0], torch.from_numpy(c))
    np.testing.assert_allclose(signal.forward_loss(c1, depth, q1=3.0), 3 * signal.forward_loss(c1, depth), rtol=1e-14)
    if depth > 1:  # what holds of the first layers holds of a shorter network, and of one that begins later
        np.testing.assert_allclose(signal.correlations(c[1], depth - 1, slope=slope), c[1:], atol=1e-7)
        np.testing.assert_allclose(signal.correlations(c1, depth - 1, slope=slope), c[:-1], rtol=0, atol=0)


def test_a_linear_network_loses_nothing() -> None:
    assert (signal.correlations(0.3, 50, slope=1.0) - 0.3).max() < 1e-14
    assert (signal.gradients(0.3, 50, slope=1.0) == 1).all()


def test_leaky_slope_against_the_kernels_of_infinite_width() -> None:
    """Another file of ours, in another form: c_l from the Gaussian-process kernel of l - 1 hidden layers."""
    from richter.kernels import infinite
    X = np.array([[1.0, 0.0], [0.6, 0.8]])
    for hidden in (1, 4):
        K = infinite.nngp(X, depth=hidden, activation=infinite.LeakyRelu(0.2))
        assert abs(K[0, 1] / math.sqrt(K[0, 0] * K[1, 1]) - signal.correlations(0.6, hidden + 1, slope=0.2)[-1]) < 1e-12


def test_backward_loss_and_expansion() -> None:
    L = 400
    layers = np.arange(1, L + 1)
    np.testing.assert_allclose(signal.backward_loss(0.2, L), np.abs(signal.gradients(0.2, L) - (layers / L) ** 3), rtol=1e-12)
    printed = signal.backward_expansion(0.5, L, kappa=-signal.KAPPA)  # the sign of Lemma 2 as it is printed
    true = signal.gradients(0.0, L)[L // 2 - 1]
    assert abs(signal.backward_expansion(0.5, L) - true) < abs(printed - true) / 4


def test_the_expansion_at_both_ends() -> None:
    """Nothing comes back to the first layer, everything to the last, at whatever depth."""
    np.testing.assert_array_equal(signal.backward_expansion([0.0, 1.0], 50), [0.0, 1.0])


def test_the_smallest_network_with_a_balance() -> None:
    assert signal.balanced_layer(2) == 1.0  # (1 - 0) / 2 = g'(0) = 1/2
    assert abs(signal.balanced_layer(2, -1.0, -1.0) - 2) < 2e-3  # opposite inputs: nothing comes back to the first layer, g' = 0


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: signal.balanced_layer(1), "a network of one layer has no hidden layer, so nothing lies between"),
    (lambda: signal.balanced_layer(5, 1.0, 1.0), "so that no layer is balanced. Take a deeper network, or inputs further apart"),
    (lambda: signal.balanced_layer(3, 0.9, 0.9), "balanced_layer of 3 layers with forward=0.9 and backward=0.9: at the first"),
    (lambda: signal.correlations(1.5, 3), "c1 reaches 1.5: it is a correlation"),
    (lambda: signal.correlations([0.1, math.nan], 3), "c1 contains NaN or Inf"),
    (lambda: signal.gradients(0.0, 0), "depth=0; a whole number, at least 1, is needed"),
    (lambda: signal.exponent([10, 10]), "at least two different depths make a slope"),
    (lambda: signal.backward_expansion([0.5, 1.5], 10), "of alpha from 0.5 to 1.5 and depth from 10: alpha is"),
    (lambda: signal.backward_expansion(0.5, 0), "and depth from 0: alpha is a share of the layers, from 0 to 1"),
    (lambda: signal.correlations(0.0, 3, slope=math.inf), "slope=inf: a finite number is needed, 0 for ReLU"),
])
def test_what_is_refused(call: object, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence.replace("(", r"\(")):
        call()  # type: ignore[operator]


def test_networks_that_lose_nothing_have_no_balanced_layer() -> None:
    """slope 1 is a linear network: opposite inputs stay opposite, and gradients are alike everywhere."""
    with pytest.raises(SelectionError, match="so that no layer is balanced"):
        signal.balanced_layer(10, -1.0, 0.9, slope=1.0)
    with pytest.raises(SelectionError, match="depth=0; a whole number"):
        signal.simulate_correlations(0.1, 0)
