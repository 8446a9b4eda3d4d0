"""Theory against its definitions, against simulation, and against its laws."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import install_import_hook
from torch import Tensor

import oracles
import richter
from pairwise import all_pairs
from richter import tasks
from richter.core import Prediction, Ref, SelectionError
from richter.tasks import synthetic
from richter.testing import check_theory

with install_import_hook("richter.theory", "checker.typechecked"):
    from richter.theory import Theory, early_time, freeprob

ROOT = Path(__file__).parents[2]
ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "quadratic": torch.square}
BALANCES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
DECAYS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng((seed, *shape)).standard_normal(shape))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def small_network(c: int, seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
    """Weights of widths 4, 5, 6, c, inputs and labels."""
    sizes = (4, 5, 6, c)
    weights = [normal(o, i, seed=seed) / math.sqrt(i) for i, o in itertools.pairwise(sizes)]
    return weights, normal(7, 4, seed=seed + 1), normal(7, c, seed=seed + 2)


def captured(weights: list[Tensor], x: Tensor, y: Tensor, phi: Callable[[Tensor], Tensor],
             layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the layer reads, J[n,c,d_out] and f - y."""
    h = x
    for W in weights[:layer]:
        h = phi(h @ W.T)
    z = (h @ weights[layer].T).requires_grad_()
    f = oracles.network(weights[layer + 1:], phi(z), phi) if weights[layer + 1:] else z * 1
    J = torch.stack([torch.autograd.grad(f[:, k].sum(), z, retain_graph=True)[0] for k in range(f.shape[1])], 1)
    return h, J, f.detach() - y


# ------------------------------------------------------------------------------------------------ early times


@pytest.mark.parametrize(("name", "c", "layer"), all_pairs(list(ACTIVATIONS), [1, 3], [0, 1, 2]))
def test_second_derivatives_of_gradient_flow(name: str, c: int, layer: int) -> None:
    weights, x, y = small_network(c)
    exact = oracles.centred_second_derivatives(weights, x, y, ACTIVATIONS[name], layer)
    closed = early_time.second_derivatives(*captured(weights, x, y, ACTIVATIONS[name], layer))
    flow = early_time.simulate(weights, x, y, ACTIVATIONS[name], layer)
    for a, b, e in zip(closed, flow, exact, strict=True):
        assert relative(a, e) < 1e-12
        assert relative(b, e) < 1e-8
        torch.testing.assert_close(a, a.T)


def test_the_kernel_form_of_one_output() -> None:
    """2 X^T L P L X and 2 X^T L P^2 L X."""
    weights, x, y = small_network(1)
    h, J, dL = captured(weights, x, y, torch.relu, 0)
    P, L = J[:, 0] @ J[:, 0].T, torch.diag(dL[:, 0])
    F, G = early_time.second_derivatives(h, J, dL)
    assert relative(F, 2 * h.T @ L @ P @ L @ h) < 1e-13
    assert relative(G, 2 * h.T @ L @ P @ P @ L @ h) < 1e-13
    assert abs(early_time.correlation(h, J, dL) - float((F * G).sum() / (F.norm() * G.norm()))) < 1e-13


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_the_centred_nfc_starts_at_the_correlation(name: str) -> None:
    """Some tiny steps of plain descent on all layers, then the correlation by its definition."""
    weights, x, y = small_network(2)
    phi, now = ACTIVATIONS[name], [W.clone() for W in weights]
    for _ in range(5):
        live = [W.requires_grad_() for W in now]
        loss = (oracles.network(live, x, phi) - y).square().sum() / 2
        now = [W.detach() - 1e-7 * g for W, g in zip(live, torch.autograd.grad(loss, live), strict=True)]
    for layer in (0, 1):
        V = now[layer] - weights[layer]
        J = captured(now, x, y, phi, layer)[1].flatten(0, 1)
        F, G = V.T @ V, V.T @ (J.T @ J) @ V
        seen = float((F * G).sum() / (F.norm() * G.norm()))
        assert abs(seen - early_time.correlation(*captured(weights, x, y, phi, layer))) < 1e-5


def test_positions_are_rows() -> None:
    """A weight used at three positions of each example: (n s) in place of n, dL repeated."""
    W, a, x, y = normal(4, 3), normal(3, 4, seed=1), normal(6, 3, 3, seed=2), normal(6, 1, seed=3)
    z = torch.einsum("nsi,oi->nso", x, W.requires_grad_())
    f = (torch.tanh(z) * a).sum((1, 2))
    g = torch.autograd.grad(f.sum(), z, retain_graph=True)[0]
    W_dot = -torch.autograd.grad((f - y[:, 0]).square().sum() / 2, W)[0]
    dL = (f.detach()[:, None] - y).repeat_interleave(3, 0)
    F, G = early_time.second_derivatives(x.flatten(0, 1), g.flatten(0, 1)[:, None], dL)
    K = torch.einsum("nso,nsp->op", g, g)
    assert relative(F, 2 * W_dot.T @ W_dot) < 1e-13
    assert relative(G, 2 * W_dot.T @ K @ W_dot) < 1e-13


@pytest.mark.parametrize("name", list(ACTIVATIONS))
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_prediction_of_a_network(name: str, layer: int) -> None:
    """By the chain rule, what autograd says; and the factor in front."""
    weights, x, y = small_network(3)
    at = captured(weights, x, y, ACTIVATIONS[name], layer)
    for a, b, c in zip(early_time.predict(weights, x, y, ACTIVATIONS[name], layer), early_time.second_derivatives(*at),
                       early_time.second_derivatives(*at, factor=1.0), strict=True):
        assert relative(a, b) < 1e-13
        torch.testing.assert_close(b, 2 * c)


@given(seed=st.integers(0, 1000), n=st.integers(1, 6), c=st.integers(1, 3), s=st.floats(0.1, 10), t=st.floats(0.1, 10),
       u=st.floats(0.1, 10))
@settings(max_examples=25, deadline=None)
def test_laws_of_second_derivatives(seed: int, n: int, c: int, s: float, t: float, u: float) -> None:
    X, J, dL = normal(n, 4, seed=seed), normal(n, c, 5, seed=seed), normal(n, c, seed=seed)
    F, G = early_time.second_derivatives(X, J, dL)
    rho = early_time.correlation(X, J, dL)
    assert -1e-12 <= rho <= 1 + 1e-12
    F2, G2 = early_time.second_derivatives(s * X, t * J, u * dL)
    torch.testing.assert_close(F2, (s * t * u) ** 2 * F)
    torch.testing.assert_close(G2, (s * t * u) ** 2 * t**2 * G)
    assert abs(early_time.correlation(s * X, t * J, u * dL) - rho) < 1e-9
    order = torch.from_numpy(np.random.default_rng(seed).permutation(n))
    torch.testing.assert_close(early_time.second_derivatives(X[order], J[order], dL[order])[1], G)
    Q, U = (torch.linalg.qr(normal(k, k, seed=seed))[0] for k in (4, 5))  # rotations of what is read, and of what is written
    turned = early_time.second_derivatives(X @ Q, J @ U, dL)
    torch.testing.assert_close(turned[0], Q.T @ F @ Q)
    torch.testing.assert_close(turned[1], Q.T @ G @ Q)
    torch.testing.assert_close(early_time.second_derivatives(X.repeat(2, 1), J.repeat(2, 1, 1), dL.repeat(2, 1))[1], 8 * G)


def test_one_example_is_fully_aligned() -> None:
    assert abs(early_time.correlation(normal(1, 4), normal(1, 1, 5), normal(1, 1)) - 1) < 1e-12
    assert abs(early_time.predicted_correlation(normal(1, 4), normal(1), "relu") - 1) < 1e-12
    assert abs(freeprob.simulate(normal(1, 4), normal(1), 5).value - 1) < 1e-12
    with pytest.raises(SelectionError, match="does not start to move"):
        early_time.correlation(normal(3, 4), normal(3, 1, 5), torch.zeros(3, 1))


# ------------------------------------------------------------------------------------------------ expected kernels


@pytest.mark.parametrize("name", ["quadratic", "relu"])
def test_expected_kernel_by_the_textbook(name: str) -> None:
    X = normal(9, 5)
    K = early_time.expected_kernel(X, name)
    slow = torch.tensor(oracles.expected_kernel(X, name), dtype=torch.float64)
    assert relative(K / K[0, 0], slow / slow[0, 0]) < 1e-10
    torch.testing.assert_close(K, K.T)
    assert bool((torch.linalg.eigvalsh(K) > -1e-12 * K.norm()).all())
    near = early_time.expected_kernel(torch.stack([X[0], X[0] + 1e-9 * X[1], 0 * X[0], -X[0]]), "relu")
    assert abs(near[0, 1] / near[0, 0] - 1) < 1e-8  # close inputs keep their digits
    assert float(near[2].norm()) == 0  # an input of zero asks nothing
    assert float(near[0, 3]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ["quadratic", "relu"])
def test_predicted_correlation_by_its_definition(name: str) -> None:
    X, y = normal(9, 5), normal(9, seed=1)
    E, D = torch.tensor(oracles.expected_kernel(X, name), dtype=torch.float64), torch.diag(y)
    F, G = X.T @ D @ E @ D @ X, X.T @ D @ E @ E @ D @ X
    assert early_time.predicted_correlation(X, y, name) == pytest.approx(float((F * G).sum() / (F.norm() * G.norm())), abs=1e-10)


@pytest.mark.parametrize(("name", "depth"), [("quadratic", 1), ("quadratic", 2), ("relu", 1), ("relu", 2), ("relu", 3)])
def test_expected_kernel_of_wide_networks(name: str, depth: int) -> None:
    X = normal(4, 6) / (2 if name == "quadratic" else 1)
    width, total = 300, torch.zeros(4, 4, dtype=torch.float64)
    draw, sizes = np.random.default_rng(1), [6, *[width] * depth, 1]
    networks = 160 if name == "relu" else 150
    for _ in range(networks):
        weights = [torch.from_numpy(draw.standard_normal((o, i))) / math.sqrt(i) for i, o in itertools.pairwise(sizes)]
        J = captured(weights, X, X[:, :1], ACTIVATIONS[name], 0)[1][:, 0]
        total += J @ J.T / networks
    assert relative(total, early_time.expected_kernel(X, name, depth)) < (0.02 if depth < 3 else 0.04)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_expected_kernel_by_quadrature(depth: int) -> None:
    X = normal(4, 6)
    assert relative(early_time.expected_kernel(X, "quadratic", depth), oracles.deep_quadratic_kernel(X, depth)) < 1e-10


@functools.cache
def decaying(decay: float, n: int = 128) -> tuple[Tensor, dict[str, Tensor]]:
    """Inputs of a spectrum 1/(1+k^decay), and labels of low and of high rank."""
    x = tasks.power_law_gaussian(n, n, decay, dtype=torch.float64).x
    spectrum = 1 / (1 + np.arange(1, n + 1.0) ** decay)
    high = tasks.quadratic(n, n, spectrum=spectrum, standardise=True, dtype=torch.float64)
    torch.testing.assert_close(high.x, x)
    low = synthetic.chain(x, 5)
    return x, {"low": low / low.std(), "high": high.y[:, 0]}


def depth_errors(width: int, decays: tuple[float, ...]) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """{(activation, task): (predicted, observed)} over decays."""
    curves = {}
    for name, task in itertools.product(("quadratic", "relu"), ("low", "high")):
        pairs = [(decaying(a)[0], decaying(a)[1][task]) for a in decays]
        curves[name, task] = ([early_time.predicted_correlation(x, y, name) for x, y in pairs],
                             [early_time.simulate_correlation(x, y, name, width) for x, y in pairs])
    return curves


def mean_error(pair: tuple[list[float], list[float]]) -> float:
    return float(np.mean(np.abs(np.subtract(*pair))))


def test_correlation_with_depth_at_width_128() -> None:
    for (name, task), pair in depth_errors(128, DECAYS).items():
        assert mean_error(pair) <= 0.05, (name, task)
        if task == "low":
            for curve in pair:
                assert 0 < int(np.argmin(curve)) < len(DECAYS) - 1


@pytest.mark.long
def test_correlation_with_depth_at_width_1024() -> None:
    for (name, task), pair in depth_errors(1024, DECAYS).items():
        assert mean_error(pair) <= 0.02, (name, task)


def test_the_theory_of_depth() -> None:
    cases = [(decaying(a)[0][:48], decaying(a)[1]["low"][:48], name) for a in (1.0, 1.5) for name in ("quadratic", "relu")]
    check_theory(replace(richter.theory.get("early_time.predicted_correlation"), cases=lambda: cases,
                         simulate=functools.partial(early_time.simulate_correlation, width=512)))


@given(seed=st.integers(0, 1000), n=st.integers(2, 6), s=st.floats(0.1, 10), name=st.sampled_from(["quadratic", "relu"]))
@settings(max_examples=15, deadline=None)
def test_laws_of_the_predicted_correlation(seed: int, n: int, s: float, name: str) -> None:
    X, y = normal(n, 4, seed=seed), normal(n, seed=seed)
    rho = early_time.predicted_correlation(X, y, name)
    assert -1e-12 <= rho <= 1 + 1e-12
    order, Q = torch.from_numpy(np.random.default_rng(seed).permutation(n)), torch.linalg.qr(normal(4, 4, seed=seed))[0]
    for X2, y2 in ((X[order], y[order]), (X @ Q, y), (s * X, y), (X, -s * y), (X, y[:, None])):
        assert abs(early_time.predicted_correlation(X2, y2, name) - rho) < 1e-8
    power = 0 if name == "relu" else 6
    torch.testing.assert_close(early_time.expected_kernel(s * X, name), s**power * early_time.expected_kernel(X, name))


# ------------------------------------------------------------------------------------------------ words


def centred(Z: Tensor) -> Tensor:
    return Z - Z.trace() / len(Z) * torch.eye(len(Z), dtype=Z.dtype)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_alternating_words_by_non_crossing_partitions(length: int) -> None:
    C = [centred(normal(3, 3, seed=i)) for i in range(length)]
    R = [normal(4, 4, seed=10 + i) for i in range(length)]
    letters = [letter for c, r in zip(C, R, strict=True) for letter in (("C", c), ("R", r))]
    assert freeprob.alternating_word(C, R) == pytest.approx(oracles.free_word(letters), rel=1e-10, abs=1e-10)


def free_parts(A: Tensor, B: Tensor, R: Tensor) -> list[float]:
    """The three words, by non-crossing partitions."""
    matrices = {"A": ("data", A), "B": ("data", B), "R": ("network", R)}
    return [oracles.free_word([matrices[k] for k in word]) for word in ("ARARBR", "ARAR", "ARBRARBR")]


def word_parts(A: Tensor, B: Tensor, m: Any) -> list[float]:
    return [freeprob.numerator(A, B, m), freeprob.denominator1(A, m), freeprob.denominator2(A, B, m)]


@pytest.mark.parametrize("symmetric", [True, False])
def test_words_by_non_crossing_partitions(symmetric: bool) -> None:
    """Eqs. (18), (20) and the corrected (26); the printed (26) is another number."""
    A, B, R = normal(3, 3), normal(3, 3, seed=1) + torch.eye(3), normal(4, 4, seed=2)
    if symmetric:
        A, B, R = (Z @ Z.T for Z in (A, B, R))
    m = [float(torch.linalg.matrix_power(R, p).trace()) / 4 for p in (1, 2, 3, 4)]
    exact = free_parts(A, B, R)
    for part, wanted in zip(word_parts(A, B, m), exact, strict=True):
        assert part == pytest.approx(wanted, rel=1e-10)
    lost = (float(B.trace()) / 3) ** 2 * float((centred(A) @ centred(A)).trace()) / 3 * m[1] ** 2
    printed = freeprob.denominator2(A, B, m) - lost
    assert abs(printed / exact[2] - 1) > 0.01


def generic(d: int) -> tuple[Tensor, Tensor]:
    """Generic data, in which every term of the words counts."""
    return normal(d, d) * torch.linspace(0.2, 2, d, dtype=torch.float64) / math.sqrt(d), normal(d, seed=2) + 0.5


def test_words_of_large_matrices() -> None:
    """d = 512, the mean over 12 networks within 5 %; the printed Eq. (26) is not."""
    d = 512
    X, y = generic(d)
    M, B = X.T @ (y[:, None] * X), X.T @ X
    A = M @ M
    seen, m = torch.zeros(3, dtype=torch.float64), np.zeros(4)
    draw = np.random.default_rng(5)
    for _ in range(12):
        V = torch.from_numpy(draw.standard_normal((d, d)) * draw.standard_normal((d, 1))) / math.sqrt(d)
        R = V.T @ V
        AR, BR = A @ R, B @ R
        ARBR, R2 = AR @ BR, R @ R
        seen += torch.stack([(AR * ARBR.T).sum(), (AR * AR.T).sum(), (ARBR * ARBR.T).sum()]) / d / 12
        m += np.array([R.trace(), R2.trace(), (R * R2).sum(), (R2 * R2).sum()]) / d / 12
    for part, wanted in zip(word_parts(A, B, m), seen.tolist(), strict=True):
        assert part == pytest.approx(wanted, rel=0.05)
    lost = (float(B.trace()) / d) ** 2 * float((centred(A) ** 2).sum()) / d * m[1] ** 2
    assert (freeprob.denominator2(A, B, m) - lost) / float(seen[2]) < 0.95


# ------------------------------------------------------------------------------------------------ moments


def test_moments_by_non_crossing_partitions() -> None:
    assert freeprob.moments(7, 7).tolist() == [1, 4, 25, 202]
    assert freeprob.moments(1024, 256).tolist() == [1, 1.75, 4.1875, 12.015625]
    for width, d in ((3, 5), (8, 2), (6, 6)):
        slow = [oracles.compound_poisson_moment(p, d / width) for p in range(1, 7)]
        np.testing.assert_allclose(freeprob.moments(width, d, order=6), slow, rtol=1e-12)


def test_sampled_moments_at_512() -> None:
    m = freeprob.sampled_moments(512, 512)
    assert (np.abs(m / [1, 4, 25, 202] - 1) < [0.03, 0.03, 0.08, 0.20]).all()


def test_sampled_moments_settings() -> None:
    m = freeprob.sampled_moments(30, 20, networks=4)
    assert np.array_equal(m, freeprob.sampled_moments(30, 20, networks=4))
    for other in (freeprob.sampled_moments(30, 20, 4, seed=1), freeprob.sampled_moments(30, 20, 5),
                  freeprob.sampled_moments(31, 20, 4), freeprob.sampled_moments(30, 21, 4)):
        assert not np.array_equal(m, other)
    for width, d in ((300, 100), (100, 300)):  # both sides of d = width
        np.testing.assert_allclose(freeprob.sampled_moments(width, d, 60)[:3], freeprob.moments(width, d)[:3], rtol=0.12)


# ------------------------------------------------------------------------------------------------ Prop. 8


@pytest.mark.parametrize(("width", "d"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)])
def test_expected_second_derivatives_exactly(width: int, d: int) -> None:
    X, y = normal(3, d), normal(3, seed=1)
    for predicted, wanted in zip(freeprob.expected_second_derivatives(X, y, width),
                             oracles.quadratic_expectations(X, y, width), strict=True):
        assert relative(predicted, wanted) < 1e-10
    M, B = X.T @ torch.diag(y) @ X, X.T @ X
    printed = 3 * B.trace() * M @ M + 6 * M @ B @ M
    right = freeprob.expected_second_derivatives(X, y, width)[1]
    assert (relative(printed, right) < 1e-12) == (width == 1)  # the printed proposition holds at width 1 only


def test_expected_second_derivatives_by_sampling() -> None:
    """4e5 networks of width 4, within 2 %."""
    k, n, d = 4, 6, 3
    X, y = normal(n, d).numpy(), normal(n, seed=1).numpy()
    M, B, draw = X.T @ (y[:, None] * X), X.T @ X, np.random.default_rng(3)
    F, G = np.zeros((d, d)), np.zeros((d, d))
    for _ in range(8):
        V = draw.standard_normal((50_000, k, d)) * (draw.standard_normal((50_000, k, 1)) / math.sqrt(k))
        R = np.swapaxes(V, 1, 2) @ V
        F += M @ R.mean(0) @ M / 8
        G += M @ (R @ B @ R).mean(0) @ M / 8
    for seen, predicted in zip((F, G), freeprob.expected_second_derivatives(X, y, k), strict=True):
        assert isinstance(predicted, np.ndarray)
        assert np.linalg.norm(seen - predicted) < 0.02 * np.linalg.norm(predicted)


@pytest.mark.parametrize(("width", "d"), [(1, 1), (1, 2), (2, 2)])
def test_the_simulated_expectations_by_their_definition(width: int, d: int) -> None:
    X, y = normal(3, d), normal(3, seed=1)
    for seen, wanted in zip(freeprob.simulate_second_derivatives(X, y, width), oracles.quadratic_expectations(X, y, width),
                            strict=True):
        assert relative(seen, wanted) < 1e-12


def test_other_readouts() -> None:
    """Read-outs of +-1: R is a Wishart matrix, with the moments of Marchenko and Pastur, and E a^4 = 1."""
    for width, d in ((7, 7), (1024, 256)):
        c = d / width
        wishart = [1, 1 + c, 1 + 3 * c + c**2, 1 + 6 * c + 6 * c**2 + c**3]
        np.testing.assert_allclose(freeprob.moments(width, d, readout=[1.0] * 4), wishart, rtol=1e-13)
    assert np.array_equal(freeprob.moments(9, 4, readout=freeprob.GAUSSIAN), freeprob.moments(9, 4))
    assert freeprob.moments(512, 512, readout=(1.0, 3.0, 15.0, 143.0)).tolist() == [1, 4, 25, 240]
    X, y = normal(6, 3), normal(6, seed=1)
    M, B = X.T @ torch.diag(y) @ X, X.T @ X
    W = normal(40_000, 2, 3) / math.sqrt(2)
    seen = (W.mT @ W @ B @ W.mT @ W).mean(0)
    assert relative(M @ seen @ M, freeprob.expected_second_derivatives(X, y, 2, fourth=1.0)[1]) < 0.03
    assert freeprob.predict(X, y, 4).value == freeprob.centred_nfc(X, y, freeprob.moments(4, 3)).value


# ------------------------------------------------------------------------------------------------ the centred NFC


def reversing(n: int, balance: float, seed: int, **options: Any) -> tuple[Tensor, Tensor]:
    data = tasks.alignment_reversing(n, n, balance, seed, dtype=torch.float64, **options)
    return data.x, data.y


def test_the_centred_nfc_of_its_parts() -> None:
    X, y = reversing(40, 0.3, 0, scale=1 / 40)
    m = freeprob.moments(40, 40)
    M, B = X.T @ (y * X), X.T @ X
    predicted = freeprob.centred_nfc(X, y, m)
    assert isinstance(predicted, Prediction)
    assert predicted.ref.paper == "nfa"
    top, low1, low2 = predicted.numerator, predicted.denominator1, predicted.denominator2
    for part, wanted in zip((top, low1, low2), word_parts(M @ M, B, m), strict=True):
        assert part == pytest.approx(wanted, rel=1e-9)
    assert predicted.value == pytest.approx(top / math.sqrt(low1 * low2), rel=1e-12)
    assert math.isnan(freeprob.centred_nfc(X, 0 * y, m).value)


def test_the_simulated_parts_are_the_words_of_one_network() -> None:
    """phi(ARARBR), phi(ARAR), phi(ARBRARBR) of the same draw, and Eq. (6) of the network with the true derivative 2 h."""
    X, y = normal(25, 30), normal(25, 1)
    draw = np.random.default_rng((4, 11))
    W = torch.from_numpy(draw.standard_normal((20, 30)) / math.sqrt(20))
    a = torch.from_numpy(draw.standard_normal(20))
    R, M, B = W.T @ torch.diag(a**2) @ W, X.T @ (y * X), X.T @ X
    A, simulated = M @ M, freeprob.simulate(X, y, 20, seed=4)
    words = [torch.linalg.multi_dot(w).trace().item() / 30 for w in ((A, R, A, R, B, R), (A, R, A, R), (A, R, B, R, A, R, B, R))]
    for part, wanted in zip((simulated.numerator, simulated.denominator1, simulated.denominator2), words, strict=True):
        assert part == pytest.approx(wanted, rel=1e-9)
    assert simulated.value == pytest.approx(early_time.correlation(X, (2 * a * (X @ W.T))[:, None], -y), abs=1e-10)
    assert simulated.value != freeprob.simulate(X, y, 20, seed=5).value


def nfc_errors(n: int, moments: Callable[[int], Any], balances: tuple[float, ...] = BALANCES, **options: Any) -> np.ndarray:
    """|predicted - observed| [balance, seed] over three data sets, each with one network."""
    errors = np.zeros((len(balances), 3))
    for (i, balance), seed in itertools.product(enumerate(balances), range(3)):
        X, y = reversing(n, balance, seed, **options)
        errors[i, seed] = abs(freeprob.centred_nfc(X, y, moments(seed)).value - freeprob.simulate(X, y, n, seed).value)
    return errors


def own_moments(n: int, seed: int) -> list[float]:
    """m_1..m_4 of the R of the one network that ``simulate`` draws."""
    draw = np.random.default_rng((seed, 11))
    W = draw.standard_normal((n, n)) / math.sqrt(n)
    R = W.T @ (draw.standard_normal(n)[:, None] ** 2 * W)
    return [float(np.trace(np.linalg.matrix_power(R, p))) / n for p in (1, 2, 3, 4)]


def test_alignment_reversing_data_at_192() -> None:
    errors = nfc_errors(192, lambda seed: freeprob.moments(192, 192), (0.1, 0.35, 0.65), scale=1 / 192)
    assert errors.mean() <= 0.02


@pytest.mark.long
@pytest.mark.parametrize("options", [{"scale": 1 / 512}, {}], ids=["scaled", "literal"])
def test_alignment_reversing_data_at_512(options: dict[str, Any]) -> None:
    m = freeprob.sampled_moments(512, 512)
    errors = nfc_errors(512, lambda seed: m, **options)
    assert errors.mean() <= 0.01
    assert errors.max() <= 0.03


@pytest.mark.long
def test_raw_alignment_reversing_data_at_512() -> None:
    """What misses here is that one network is not the mean (m_4 has heavy tails, its median is a tenth lower), not the words."""
    errors = nfc_errors(512, functools.cache(functools.partial(own_moments, 512)), raw=True)
    assert errors.mean() <= 0.005
    assert errors.max() <= 0.01
    errors = nfc_errors(512, lambda seed: freeprob.moments(512, 512), raw=True)
    assert errors.mean() <= 0.015
    assert errors.max() <= 0.05


@given(seed=st.integers(0, 1000), n=st.integers(2, 7), s=st.floats(0.1, 10), r=st.floats(0.1, 10), width=st.integers(1, 9))
@settings(max_examples=12, deadline=None)
def test_laws_of_the_centred_nfc(seed: int, n: int, s: float, r: float, width: int) -> None:
    X, y, m = normal(n, 4, seed=seed), normal(n, seed=seed), freeprob.moments(width, 4)
    predicted = freeprob.centred_nfc(X, y, m)
    assert 0 <= predicted.value <= 1 + 1e-9
    order, Q = torch.from_numpy(np.random.default_rng(seed).permutation(n)), torch.linalg.qr(normal(4, 4, seed=seed))[0]
    for X2, y2, m2 in ((X[order], y[order], m), (X @ Q, y, m), (s * X, -r * y, m), (X, y[:, None], m),
                       (X, y, m * r ** np.arange(1, 5))):
        assert freeprob.centred_nfc(X2, y2, m2).value == pytest.approx(predicted.value, rel=1e-8)
    assert freeprob.centred_nfc(s * X, r * y, m).numerator == pytest.approx(s**10 * r**4 * predicted.numerator, rel=1e-8)
    F, G = freeprob.expected_second_derivatives(X, y, width)
    F2, G2 = freeprob.expected_second_derivatives(s * X[order] @ Q, r * y[order], width)
    torch.testing.assert_close(F2, s**4 * r**2 * Q.T @ F @ Q)
    torch.testing.assert_close(G2, s**6 * r**2 * Q.T @ G @ Q)


# ------------------------------------------------------------------------------------------------ kinds and bad input


def test_the_kind_of_array_comes_back() -> None:
    X, J, dL, y = normal(5, 3), normal(5, 2, 4), normal(5, 2), normal(5)
    for F in (*early_time.second_derivatives(X, J, dL), early_time.expected_kernel(X, "relu"),
              *freeprob.expected_second_derivatives(X.float(), y, 3)):
        assert isinstance(F, Tensor)
        assert F.dtype == torch.float64
    for G in (*early_time.second_derivatives(X.numpy(), J.numpy(), dL.numpy()), early_time.expected_kernel(X.numpy(), "relu"),
              *freeprob.expected_second_derivatives(X.numpy(), y, 3),
              *early_time.simulate([normal(2, 3).numpy()], X.numpy(), dL.numpy())):
        assert isinstance(G, np.ndarray)
    assert richter.theory.freeprob.moments is richter.theory.freeprob.moments
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = richter.theory.nonsense


X, J, DL, Y = normal(5, 3), normal(5, 2, 4), normal(5, 2), normal(5)
ONES = [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: early_time.second_derivatives(X, J, DL[:4]), r"dL has shape \(4, 2\) for \[n, c\], so n = 4; but n = 5 in X"),
    (lambda: early_time.second_derivatives(X, J[:, 0], DL), r"J has shape \(5, 4\); \[n, c, d_out\] is needed"),
    (lambda: early_time.correlation(X[:0], J[:0], DL[:0]), r"X has shape \(0, 3\): it is empty along 'n'"),
    (lambda: early_time.correlation(X * float("nan"), J, DL), "X contains NaN or Inf"),
    (lambda: early_time.correlation(X * 1j, J, DL), "X is complex"),
    (lambda: early_time.expected_kernel(X, "sine"), "no activation 'sine'.*'quadratic', 'relu'"),
    (lambda: early_time.expected_kernel(X, "relu", 0), "depth=0; a whole number, at least 1"),
    (lambda: early_time.predicted_correlation(X, Y[:3], "relu"), "n = 3; but n = 5 in X"),
    (lambda: early_time.simulate_correlation(X, Y, "sine", 4), "no activation 'sine'"),
    (lambda: early_time.simulate_correlation(X, Y, "relu", 0), "width=0; a whole number"),
    (lambda: early_time.simulate([normal(4, 3), normal(1, 5)], X, Y[:, None]), "do not make a network"),
    (lambda: early_time.simulate([normal(4, 3), normal(1, 4)], X, Y[:, None], layer=2), "layer=2 do not make a network"),
    (lambda: freeprob.centred_nfc(X, DL, ONES), r"y has shape \(5, 2\); \[n\] is needed"),
    (lambda: freeprob.centred_nfc(X, Y, ONES[:3]), "moments has 3 entries; m_1 to m_4"),
    (lambda: freeprob.centred_nfc(X, Y, [1, 2, 3, float("inf")]), "moments contains NaN or Inf"),
    (lambda: freeprob.numerator(X, X, ONES), r"A has shape \(5, 3\) for \[d, d\], so d = 3; but d = 5 in A"),
    (lambda: freeprob.moments(0, 4), "width=0; a whole number"),
    (lambda: freeprob.sampled_moments(4, 4, 0), "networks=0; a whole number"),
    (lambda: freeprob.sampled_moments(4, 4, seed=-1), "seed=-1; a whole number, at least 0"),
    (lambda: freeprob.expected_second_derivatives(X, Y, True), "width=True; a whole number"),
    (lambda: freeprob.moments(4, 4, readout=[1.0, 3.0]), "readout has 2 entries; E a\\^2 to E a\\^8 are needed"),
    (lambda: freeprob.simulate_second_derivatives(X, Y, 3), r"width=3 and d=3 make 12 weights, and 3\^12 networks"),
    (lambda: early_time.predict([normal(4, 3), normal(1, 5)], X, Y[:, None]), "do not make a network"),
    (lambda: freeprob.alternating_word([torch.eye(3)], [torch.eye(3)]), "C1 has phi = 1; the identities are for centred"),
    (lambda: freeprob.alternating_word([torch.eye(3)], []), "of 1 C and 0 R"),
])
def test_bad_input(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        call()


# ------------------------------------------------------------------------------------------------ check_theory


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.long] if name == "agf.linear" else []) for name in richter.theory.names()])
def test_a_theory_agrees_with_its_simulation(name: str) -> None:
    theory = richter.theory.get(name)
    assert theory.name == name
    check_theory(theory)


def fall(x: float, g: float = 9.81) -> float:
    return g * x / 2


def fall_in_steps(x: float) -> float:
    return sum(9.81 * x * (i + 0.5) / 1000 for i in range(1000)) / 1000


def copied(x: float) -> float:
    return fall(x)


def drawn(x: float, seed: int) -> float:
    return fall_in_steps(x) * (1 + 0.1 * seed)


FALLING = Theory("falling", Ref("nfa"), "the mean speed of a fall", predict=fall, simulate=fall_in_steps,
                 cases=lambda: [(1.0,), (2.0,)], tolerance=1e-3, perturb={"g": 9.9})


def test_check_theory_passes_what_is_right() -> None:
    check_theory(FALLING)
    check_theory(replace(FALLING, simulate=drawn, seeds=(0,)))
    check_theory(replace(FALLING, simulate=functools.partial(drawn, seed=0)))


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"predict": lambda x, g=9.9: 9.9 * x / 2}, r"falling, case 0: prediction and simulation differ by 0\.00"),
    ({"tolerance": 1e-2, "perturb": {"g": 9.82}}, r"falling: with g=9\.82 the prediction still agrees"),
    ({"simulate": copied}, r"simulate runs what predict runs \(fall\)"),
    ({"simulate": functools.partial(copied)}, r"simulate runs what predict runs \(fall\)"),
    ({"predict": lambda x, g=1: float("nan")}, "differ by nan"),
    ({"predict": lambda x, g=1: (fall_in_steps(x), float("nan")), "simulate": lambda x: (fall_in_steps(x), 1.0)},
     "differ by nan"),  # one NaN among good numbers
    ({"predict": lambda x, g=1: np.ones(2)}, "have shapes"),
    ({"perturb": {}}, "a constant of predict"),
    ({"cases": list}, "give at least one case"),
    ({"perturb": {"h": 1.0}}, "perturb names 'h', which is not a keyword of predict. It has x, g"),
    ({"simulate": drawn, "seeds": (0, 1)}, r"case 0: prediction and simulation differ by 0\.09"),
])
def test_check_theory_sees(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_theory(replace(FALLING, **changes))


# ------------------------------------------------------------------------------------------------ tasks


def test_alignment_reversing_by_its_construction() -> None:
    n, d = 40, 30
    for balance in (0.2, 0.5):
        data = tasks.alignment_reversing(n, d, balance, noise=0.0, dtype=torch.float64)
        n1 = round(balance * n)
        X1, X2 = data.x[:n1], data.x[n1:]
        torch.testing.assert_close(X2.T @ X2, torch.linalg.matrix_power(torch.linalg.pinv(X1.T @ X1, rtol=1e-10), 2))
        assert data.y[:n1, 0].tolist() == [1 + 1e-5] * n1
        assert data.y[n1:, 0].tolist() == [1e-5] * (n - n1)
    wide = tasks.alignment_reversing(4000, 6, 0.5, noise=0.0, dtype=torch.float64).x[:2000]
    torch.testing.assert_close(wide.T @ wide / 2000, torch.ones(6, 6) + 0.5 * torch.eye(6), atol=0.15, rtol=0, check_dtype=False)


def test_alignment_reversing_settings() -> None:
    make = functools.partial(tasks.alignment_reversing, 20, 16, 0.3, dtype=torch.float64)
    plain = make().x
    assert torch.equal(plain, make().x)
    assert tasks.alignment_reversing(20, 16, 0.3).x.dtype == torch.float32
    for changed in ({"seed": 1}, {"scale": 0.1}, {"spread": 1.0}, {"noise": 0.0}, {"raw": True}):
        assert not torch.equal(plain, make(**changed).x)
    assert float(make(offset=0.0).y.min()) == 0
    quiet, small = make(noise=0.0).x, make(noise=0.0, scale=0.1).x
    torch.testing.assert_close(small[:6], 0.1 * quiet[:6])
    torch.testing.assert_close(small[6:], 100 * quiet[6:])
    assert float(make(raw=True).x[6:].norm()) > 1e6 * float(plain[6:].norm())  # round-off, inverted
    for wrong in ({"balance": 0.0}, {"balance": 1.0}, {"balance": float("nan")}, {"scale": 0.0}, {"noise": -1.0}, {"d": 0},
                  {"seed": -1}):
        with pytest.raises(SelectionError, match="both halves need a row"):
            tasks.alignment_reversing(**{"n": 20, "d": 16, "balance": 0.3} | wrong)


def test_gaussian_has_its_spectrum() -> None:
    data = tasks.gaussian(60_000, 4, [4.0, 2.0, 1.0, 0.0], seed=3, n_test=7, dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.eigvalsh(data.covariance), torch.tensor([0.0, 1, 2, 4], dtype=torch.float64))
    torch.testing.assert_close(data.x.T @ data.x / 60_000, data.covariance, atol=0.06, rtol=0)
    again = tasks.gaussian(5, 4, [4.0, 2.0, 1.0, 0.0], seed=3, n_test=7, dtype=torch.float64)
    assert torch.equal(again.x_test, data.x_test)
    assert torch.equal(again.covariance, data.covariance)
    law = tasks.power_law_gaussian(5, 6, 1.5, dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.eigvalsh(law.covariance).flip(0), 1 / (1 + torch.arange(1.0, 7).double() ** 1.5))
    isotropic = tasks.power_law_gaussian(5, 6, 0.0, dtype=torch.float64).covariance
    torch.testing.assert_close(isotropic, torch.eye(6, dtype=torch.float64) / 2)
    for wrong in ([1.0, 2.0], [1.0, -1.0, 1.0, 1.0], [1.0, float("nan"), 1.0, 1.0]):
        with pytest.raises(SelectionError, match="finite and not negative"):
            tasks.gaussian(5, 4, wrong)
    with pytest.raises(SelectionError, match="a finite decay"):
        tasks.power_law_gaussian(5, 6, float("inf"))


@pytest.mark.parametrize("spectrum", [None, [2.0, 1.0, 0.5]])
def test_quadratic_by_its_definition(spectrum: list[float] | None) -> None:
    data = tasks.quadratic(40_000, 3, seed=1, spectrum=spectrum, n_test=5, dtype=torch.float64)
    for x, y in ((data.x[:9], data.y[:9]), (data.x_test, data.y_test)):
        torch.testing.assert_close(y[:, 0], torch.stack([sum((data.Q @ row)[i] ** 2 for i in range(3)) for row in x]))
    gradients = 2 * data.x @ data.Q.T @ data.Q
    assert relative(gradients.T @ gradients / len(data.x), data.egop) < 0.05
    scaled = tasks.quadratic(40_000, 3, seed=1, spectrum=spectrum, standardise=True, dtype=torch.float64)
    assert float(scaled.y.std()) == pytest.approx(1, rel=0.03)
    ratio = data.y[0, 0] / scaled.y[0, 0]
    torch.testing.assert_close(scaled.y * ratio, data.y)
    torch.testing.assert_close(scaled.egop * ratio**2, data.egop)
    with pytest.raises(SelectionError, match="one example, one dimension"):
        tasks.quadratic(0, 3)


def test_the_document_runs() -> None:
    names: dict[str, Any] = {}
    for code in (ROOT / "docs/theory.md").read_text().split("```python\n")[1:]:
        exec(code.split("```")[0], names)
    assert abs(names["predicted"].value - names["observed"].value) < 0.03
    assert richter.theory.get("stone") is names["STONE"]
    richter.theory.CATALOGUE.remove("stone")
