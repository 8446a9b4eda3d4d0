"""Kernels of linear networks against Jacobians, training, and the bound that keeps them from specialising."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import install_import_hook
from torch import Tensor

from richter import kernels
from richter.core import SelectionError
from richter.theory.flows import flow

with install_import_hook("richter.theory.linear_kernels", "checker.typechecked"):
    from richter.theory import linear_kernels


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng((seed, *shape)).standard_normal(shape))


def deep(sizes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    return [normal(o, i, seed=seed + j) for j, (i, o) in enumerate(itertools.pairwise(sizes))]


@pytest.mark.parametrize(("h", "d"), [(5, 5), (8, 3)])
def test_the_parts_of_a_kernel(h: int, d: int) -> None:
    W, V, X = normal(h, d), normal(h, seed=1), normal(7, d, seed=2)
    parts = linear_kernels.decompose(W, V, X)
    torch.testing.assert_close(parts.outputs, X @ W.T @ V / math.sqrt(h * d))
    K = (X @ W.T @ W @ X.T + V @ V * X @ X.T) / (h * d)
    torch.testing.assert_close(parts.kernel, K, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(linear_kernels.two_layer(W, V, X), K, rtol=1e-12, atol=1e-12)
    assert torch.linalg.matrix_rank(parts.task) == 1
    W_p = (torch.eye(h, dtype=torch.float64) - torch.outer(V, V) / (V @ V)) @ W
    torch.testing.assert_close(parts.rest, X @ W_p.T @ W_p @ X.T / (h * d), rtol=1e-12, atol=1e-12)
    if h == d:  # as printed, with W W^T, it is another matrix
        wrong = (X @ W @ W.T @ X.T + V @ V * X @ X.T) / (h * d)
        assert (wrong - K).norm() / K.norm() > 0.1
    with pytest.raises(SelectionError, match="V is zero: no part of W lies along it"):
        linear_kernels.decompose(W, 0 * V, X)


def trained(sigma: float, N: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W, V at the end of gradient flow, with X and s."""
    X, s = normal(18, N, seed=2), normal(N, seed=3)
    y = X @ s

    def velocity(state: list[Tensor]) -> list[Tensor]:
        W, V = state
        e = X.T @ (X @ W.T @ V / N - y) / N
        return [-torch.outer(V, e), -W @ e]

    W, V = flow(velocity, [sigma * normal(N, N, seed=4), sigma * normal(N, seed=5)], [60.0], rtol=1e-8, atol=1e-10)[0]
    return W, V, X, s


def test_what_training_makes_of_it() -> None:
    """From a small start W_p vanishes, Eq. 14 becomes exact, and |V|^2 goes to N |s|."""
    errors, sizes = [], []
    for sigma in (1.0, 0.1, 0.01):
        W, V, X, s = trained(sigma)
        y, size = X @ s, float(V @ V)
        parts = linear_kernels.decompose(W, V, X)
        torch.testing.assert_close(parts.outputs, y, rtol=1e-5, atol=1e-5)
        approximate = linear_kernels.final_kernel(y, X, size, 6)
        torch.testing.assert_close(approximate, torch.outer(y, y) / size + size * X @ X.T / 36)
        errors.append(float((approximate - parts.kernel).norm() / parts.kernel.norm()))
        sizes.append(abs(size / linear_kernels.rich_size(s, 6) - 1))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-3
    assert sizes[2] < 1e-3 < sizes[0]


def test_the_bulk_at_the_start() -> None:
    """alpha_K is 2 sigma^2 h on average, nearer to it in wider networks."""
    apart = []
    for h in (20, 320):
        X = normal(10, 20, seed=7)
        ratios = []
        for seed in range(20):
            W, V = 0.5 * normal(h, 20, seed=seed), 0.5 * normal(h, seed=seed)
            alpha = linear_kernels.bulk_coefficient(linear_kernels.decompose(W, V, X).kernel, X, h)
            ratios.append(alpha / (2 * 0.25 * h))
        apart.append(abs(np.mean(ratios) - 1))
    assert apart[1] < 0.05
    with pytest.raises(SelectionError, match=r"size=0: \|V\|\^2 at the end of training is needed, above 0"):
        linear_kernels.final_kernel(normal(3), normal(3, 2), 0, 2)


def test_pair_kernels_are_those_of_the_model() -> None:
    """Against richter.kernels.ntk, which knows nothing of linear networks."""
    weights, X = deep((4, 6, 5, 3)), normal(5, 4, seed=9)
    model = torch.nn.Sequential(*(torch.nn.Linear(w.shape[1], len(w), bias=False, dtype=torch.float64) for w in weights))
    with torch.no_grad():
        for layer, w in zip(model, weights, strict=True):
            layer.weight.copy_(w)
    plain = kernels.ntk(model, X, form="full")  # without 1/sqrt(fan_in)
    torch.testing.assert_close(linear_kernels.pair_kernels(weights, X) * math.prod(w.shape[1] for w in weights), plain,
                               rtol=1e-10, atol=1e-10)
    printed = linear_kernels.pair_kernels(deep((4, 4, 4, 3)), X, shift=1)
    right = linear_kernels.pair_kernels(deep((4, 4, 4, 3)), X)
    assert (printed - right).norm() / right.norm() > 0.3


@given(st.integers(1, 4), st.integers(2, 4), st.integers(0, 10))
@settings(max_examples=30, deadline=None)
def test_linear_networks_specialise_no_further_than_their_layers_let_them(depth: int, k: int, seed: int) -> None:
    weights = deep((5, *[6] * depth, k), seed=seed)
    X, Y = normal(8, 5, seed=seed), normal(8, k, seed=seed + 1)
    K = linear_kernels.pair_kernels(weights, X)
    ksm = kernels.specialisation(torch.stack([K[:, c, :, c] for c in range(k)]), Y)
    rho = linear_kernels.specialisation_bound(weights)
    assert rho >= 1
    assert float(ksm.max()) <= rho * (1 + 1e-9)
    assert float(ksm.min()) >= (1 - 1e-9) / rho


def test_the_bound_is_the_largest_factor_between_two_outputs() -> None:
    """Written out: with m the smallest and M the largest ratio of alpha over layers, K^cc is between m K^bb and M K^bb."""
    _, W2, V = weights = deep((5, 6, 6, 3))
    X, rho = normal(8, 5), 1.0
    K = linear_kernels.pair_kernels(weights, X)
    for c, b in itertools.permutations(range(3), 2):
        ratios = [float((V[c] @ W2).norm() ** 2 / (V[b] @ W2).norm() ** 2), float(V[c] @ V[c] / (V[b] @ V[b])), 1.0]
        for factor, sign in ((max(ratios), 1), (min(ratios), -1)):
            assert float(torch.linalg.eigvalsh(sign * (factor * K[:, b, :, b] - K[:, c, :, c])).min()) > -1e-10
        rho = max(rho, max(ratios) / min(ratios))
    assert linear_kernels.specialisation_bound(weights) == pytest.approx(rho, rel=1e-12)


def test_symmetric_outputs_share_one_kernel() -> None:
    """Rows of the read-out that are one another's mirror images have the same norms all the way down: rho is 1, and so is every
    entry of the matrix, whatever the labels. A hidden ReLU breaks it, although its read-out is the same."""
    weights = deep((5, 6, 6, 1))
    v = weights[-1][0]
    readout = torch.stack([v, -v])
    X, Y = normal(8, 5, seed=3), normal(8, 2, seed=4)
    assert linear_kernels.specialisation_bound([*weights[:-1], readout]) == pytest.approx(1, abs=1e-12)
    K = linear_kernels.pair_kernels([*weights[:-1], readout], X)
    torch.testing.assert_close(K[:, 0, :, 0], K[:, 1, :, 1])
    torch.testing.assert_close(kernels.specialisation(torch.stack([K[:, 0, :, 0], K[:, 1, :, 1]]), Y),
                               torch.ones(2, 2, dtype=torch.float64))
    dead = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert linear_kernels.specialisation_bound([torch.eye(2), dead]) == math.inf


def test_bad_network() -> None:
    with pytest.raises(SelectionError, match="do not make a network: each layer reads what the one before it writes"):
        linear_kernels.pair_kernels([normal(3, 4), normal(2, 4)], normal(5, 4))
