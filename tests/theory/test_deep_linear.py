"""Deep linear networks and unconstrained features: the time integral, delays, balance, roots of the AGOP, collapse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import install_import_hook
from scipy.integrate import quad

import richter
from richter.core import SelectionError
from richter.measures import collapse, nfc_power

with install_import_hook(["richter.theory.growth", "richter.theory.deep_linear", "richter.theory.unconstrained"],
                         "checker.typechecked"):
    from richter.theory.deep_linear import DeepLinearNetwork, DeepModes, simulate_layers
    from richter.theory.unconstrained import UnconstrainedFeatures

TIMES = [0.0, 0.2, 1.0, 4.0]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


# ------------------------------------------------------------------------------------------------ one mode


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 7), st.floats(0.2, 5.0), st.floats(0.001, 3.0), st.floats(0.01, 10.0))
def test_the_time_to_a_strength_is_the_integral(depth: int, s: float, share: float, t: float) -> None:
    """t = integral of du / (L u^(2-2/L) (s - u)) from u(0) to u(t), by quadrature."""
    u0 = share * s
    if abs(share - 1) < 1e-3:
        return
    modes = DeepModes([s], u0, depth)
    u = float(np.asarray(modes.predict(t))[0, 0])
    assert (u0 <= u <= s) if share < 1 else (s <= u <= u0)
    if abs(u / s - 1) < 1e-6:
        return  # the integrand has a pole at s
    whole, _ = quad(lambda z: 1 / (depth * z ** (2 - 2 / depth) * (s - z)), u0, u, epsabs=1e-13, epsrel=1e-12, limit=200)
    assert whole == pytest.approx(t, rel=1e-8)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 6), st.floats(0.3, 3.0), st.floats(0.001, 0.04), st.floats(0.05, 0.45))
def test_laws_of_a_mode(depth: int, s: float, share: float, eps: float) -> None:
    modes = DeepModes([s], share * s, depth)
    u = np.asarray(modes.predict(TIMES))[0]
    assert u[0] == share * s
    assert (np.diff(u) >= 0).all()
    assert float(np.asarray(modes.predict(1e9))[0, 0]) == pytest.approx(s, rel=1e-12)
    when, takes = float(modes.emergent_time(eps)[0]), float(modes.saturation_time(eps)[0])
    ends = np.asarray(modes.predict([when, when + takes]))[0] / s
    np.testing.assert_allclose(ends, [eps, 1 - eps], rtol=1e-9)
    middle = float(np.asarray(modes.predict(0.7))[0, 0])  # from there on, the same
    np.testing.assert_allclose(DeepModes([s], middle, depth).predict(0.5), modes.predict(1.2), rtol=1e-9)
    c = 1.7  # targets times c: the same in c^(2/L - 2) of the time
    np.testing.assert_allclose(DeepModes([c * s], c * share * s, depth).predict(np.array(TIMES) * c ** (2 / depth - 2)),
                               c * u[None], rtol=1e-9)


def test_depth_delays_and_parts_the_modes() -> None:
    """From one size of weights, w = 0.1: deeper networks wait longer, by a power of 1/w, and their stages overlap less."""
    networks = [DeepModes([2.0, 1.0], 0.1**depth, depth) for depth in (2, 3, 4)]
    waits = [float(np.asarray(m.emergent_time(0.5))[1]) for m in networks]
    assert waits[0] < waits[1] < waits[2]
    eps = [float(np.asarray(m.stage_eps)[0]) for m in networks]
    assert eps[0] > eps[1] > eps[2]
    halves = [float(np.asarray(DeepModes([1.0], w**4, 4).emergent_time(0.5))[0]) for w in (0.02, 0.01)]
    assert halves[1] / halves[0] == pytest.approx(2 ** (4 - 2), rel=1e-3)  # w^(2 - L)
    pair = [float(np.asarray(DeepModes([1.0], w**2, 2).emergent_time(0.5))[0]) for w in (1e-2, 1e-4, 1e-6)]
    assert pair[1] - pair[0] == pytest.approx(pair[2] - pair[1], rel=1e-4)  # a logarithm


# ------------------------------------------------------------------------------------------------ whole networks


def test_a_deep_network_follows_its_modes_and_keeps_its_balance() -> None:
    C = torch.from_numpy(normal(5, 4))
    network = DeepLinearNetwork.aligned(C, 3, 6, 0.5)
    assert network.solution == "modes"
    s = torch.linalg.svdvals(C)
    np.testing.assert_allclose(network.modes(TIMES), DeepModes(s, 0.125, 3).predict(TIMES), rtol=1e-9)
    np.testing.assert_allclose(network.emergent_time(0.5), DeepModes(s, 0.125, 3).emergent_time(0.5), rtol=1e-9)
    np.testing.assert_allclose(network.saturation_time(0.2), DeepModes(s, 0.125, 3).saturation_time(0.2), rtol=1e-9)
    np.testing.assert_allclose(network.stage_eps, DeepModes(s, 0.125, 3).stage_eps, rtol=1e-9)
    drawn = [torch.from_numpy(0.5 * normal(*shape, seed=1)) for shape in ((5, 6), (6, 3), (3, 4))]
    off = DeepLinearNetwork(drawn, C)
    assert off.solution == "integrated"
    np.testing.assert_allclose(off.predict(TIMES), off.simulate(TIMES), rtol=1e-12)
    (end,) = simulate_layers(drawn, C, torch.tensor([3.0], dtype=torch.float64))
    for was, now in zip(off.conserved, DeepLinearNetwork(end, C).conserved, strict=True):
        np.testing.assert_allclose(now, was, atol=1e-10)
    errors = [np.abs(np.asarray(network.simulate(1.0, method="descent", lr=lr)) - np.asarray(network.predict(1.0))).max()
              for lr in (2e-3, 1e-3)]
    assert abs(errors[0] / errors[1] - 2) < 0.1
    single = DeepLinearNetwork([normal(3, 2)], normal(3, 2, seed=1))
    np.testing.assert_allclose(single.predict(1.0), single.simulate(1.0), rtol=1e-9)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_the_feature_matrix_of_balanced_layers_is_a_root_of_the_agop(depth: int) -> None:
    """W^T W = AGOP^(1/L) in the first layer, AGOP^(1/(L-1)) in the second, ...: to 1e-8, scale included, and nfc_power is 1."""
    C = torch.from_numpy(normal(4, 3, seed=depth))
    network = DeepLinearNetwork.aligned(C, depth, 5, 0.6)
    (W,) = simulate_layers(list(network.weights), C, torch.tensor([0.6], dtype=torch.float64))  # modes now differ
    model = torch.nn.Sequential(*(torch.nn.Linear(*w.shape, bias=False) for w in W)).double()
    for layer, w in zip(model, W, strict=True):
        layer.weight.data = w.T.clone()
    x = torch.from_numpy(normal(9, 4))
    powers = {f"{i}": nfc_power(1 / (depth - i)) for i in range(depth)}
    snap = richter.measure(model, richter.Probe(x, x @ C), ["nfc", "nfc_sqrt", *powers.values()])
    for i, (layer, measure) in enumerate(powers.items()):
        nfm, J = W[i] @ W[i].T, torch.linalg.multi_dot([*W[i:], torch.eye(3, dtype=C.dtype)])
        agop = J @ J.T  # a linear map has one Jacobian
        values, vectors = torch.linalg.eigh(agop)
        live = values > 1e-13 * values[-1]  # three outputs: the other eigenvalues are zero, and rounding has large roots
        root = vectors[:, live] * values[live].pow(1 / (depth - i)) @ vectors[:, live].T
        assert (nfm - root).norm() < 1e-8 * nfm.norm()
        assert snap.value(measure.name, layer) == pytest.approx(1.0, abs=1e-8)
        assert i == depth - 1 or snap.value("nfc", layer) < 0.999
    if depth > 2:
        assert snap.value("nfc_sqrt", "0") < 1 - 1e-4
    if depth == 2:
        assert snap.value("nfc_sqrt", "0") == pytest.approx(snap.value("nfc_power_0.5", "0"), abs=1e-15)


# ------------------------------------------------------------------------------------------------ unconstrained features


def test_unconstrained_features_collapse() -> None:
    """NC1 and NC2 go to zero with the scale of the weights, whatever the examples are; of balanced ones at once."""
    y = np.arange(24) % 4
    found = {}
    for scale in (0.3, 0.03):
        drawn = UnconstrainedFeatures.drawn(y, 8, scale)
        assert drawn.network.solution == "integrated"
        found[scale] = collapse.analyse(np.asarray(drawn.features(20.0))[0], y)
    assert found[0.03].nc1 < 1e-2 * found[0.3].nc1
    assert found[0.03].nc2_angle < 0.1 * found[0.3].nc2_angle
    assert found[0.03].nc2_norm < 0.1 * found[0.3].nc2_norm
    even = drawn.balanced()
    assert even.network.solution == "balanced"
    H = np.asarray(even.features([0.0, 20.0]))
    before, after = (collapse.analyse(h, y) for h in H)
    assert before.nc1 > 0.1
    assert max(after.nc1, after.nc2_angle, after.nc2_norm) < 1e-8
    end = collapse.analyse(np.asarray(even.collapsed), y)
    assert max(end.nc1, end.nc2_angle, end.nc2_norm) < 1e-12
    np.testing.assert_allclose(H[1] @ H[1].T, np.asarray(even.collapsed) @ np.asarray(even.collapsed).T, atol=1e-8)
    np.testing.assert_allclose(even.predict(20.0)[0][0], np.eye(4)[y], atol=1e-8)


def test_classes_of_other_sizes_collapse_to_other_lengths() -> None:
    y = np.array([0] * 16 + [1] * 4 + [2])
    model = UnconstrainedFeatures.drawn(y, 6, 1e-3).balanced()
    H = np.asarray(model.features(60.0))[0]
    np.testing.assert_allclose(H @ H.T, np.asarray(model.collapsed) @ np.asarray(model.collapsed).T, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(H[[0, 16, 20]], axis=1), [0.5, 4**-0.25, 1.0], rtol=1e-6)
    times = np.asarray(model.network.emergent_time(0.5))
    assert (np.diff(times) > 0).all()  # large classes first
    outputs, _ = model.simulate(1.0, method="descent", lr=1e-3)
    np.testing.assert_allclose(outputs, model.predict(1.0)[0], atol=1e-4)
    assert isinstance(UnconstrainedFeatures.drawn(torch.from_numpy(y), 6, 0.1).features(0.0), torch.Tensor)


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: DeepModes([1.0], 0.0, 3), "u0 contains 0: with hidden layers the solution needs a start above 0"),
    (lambda: DeepModes([1.0], -0.1, 3), "u0 contains -0.1"),
    (lambda: DeepModes([-1.0], 0.1, 3), "s contains -1: singular values are 0 or more"),
    (lambda: DeepModes([1.0, math.nan], 0.1, 3), "s contains NaN"),
    (lambda: DeepModes([1.0], 0.1, 0), "depth=0; a whole number"),
    (lambda: DeepLinearNetwork([normal(3, 2), normal(3, 2)], normal(3, 2)), "do not make a network"),
    (lambda: DeepLinearNetwork([], normal(3, 2)), "do not make a network"),
    (lambda: DeepLinearNetwork([0 * normal(3, 2), 0 * normal(2, 2), normal(2, 2)], normal(3, 2)), "two layers or more are zero"),
    (lambda: DeepLinearNetwork.aligned(normal(3, 2), 3, 1, 0.1), "width=1: 2 modes need as many"),
    (lambda: DeepLinearNetwork.aligned(normal(3, 2), 3, 4, -0.1), "scale=-0.1: weights of a size above 0"),
    (lambda: DeepLinearNetwork([-np.eye(2), np.eye(2)], np.eye(2)).emergent_time(0.5), "has -1 along mode 0"),
    (lambda: UnconstrainedFeatures.drawn([0, 2], 3, 0.1), "class ids 0, 1, 2, ... are needed, each once at least"),
    (lambda: UnconstrainedFeatures.drawn([0.5, 1.0], 3, 0.1), "class ids"),
    (lambda: UnconstrainedFeatures([0, 1], normal(3, 2), normal(2, 2)), "do not make a network"),
    (lambda: nfc_power(0), "exponent=0: the power of the AGOP must be above 0"),
    (lambda: nfc_power(math.nan), "exponent=nan: the power of the AGOP must be above 0"),
])
def test_what_is_refused(make: Any, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        make()
