"""AGOP and FACT of kernel machines: against autograd, by every route, and their laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import oracles
from machines import KERNELS, METRICS, NAMED, apart, assert_close, full, metric, normal
from pairwise import all_pairs
from richter.core import SelectionError
from richter.learners import NTK, Kernel, Laplace, LaplaceL1, agop, fact

INVARIANT = [k for k in KERNELS if not isinstance(k, LaplaceL1)]


@pytest.mark.parametrize("weights", [[1.0] * 3, [1.0], [-1.0] * 4, [0.0] * 4], ids=["short", "one", "negative", "zero"])
def test_bad_weights_of_agop(weights: list[float]) -> None:
    with pytest.raises(SelectionError, match="weights"):
        agop(Laplace(1.0), normal(4, 3), normal(4, 1), weights=torch.tensor(weights))


SIZES = [(6, 2, 4), (11, 1, 3), (11, 3, 2)]  # n < c d; n > c d with one output and several


@pytest.mark.parametrize(("kernel", "n", "c", "d", "kind"), all_pairs(KERNELS, SIZES, METRICS), **NAMED)
def test_agop_and_fact_by_autograd(kernel: Kernel, n: int, c: int, d: int, kind: str) -> None:
    x, A, M = normal(n, d), normal(n, c, seed=1), metric(kind, d)
    x[-1] = x[0]  # a copy: its distance is 0, where some kernels have a kink
    G = oracles.machine_gradients(kernel, x, A, M)
    w = torch.arange(1, n + 1).double() / 3
    for memory in ("1GiB", 1000):  # one block, and many
        assert_close(fact(kernel, x, A, M, memory=memory), oracles.residual_outer(G, A, x), 1e-8)
    for weights, centred, memory in (
            (None, False, "1GiB"), (w, False, 1000), (None, True, 1000), (w, True, "1GiB"), (w, True, 1000)):
        found = agop(kernel, x, A, M, weights=weights, centred=centred, memory=memory)
        assert_close(found, oracles.gradient_outer(G, weights, centred), 1e-8)


def test_both_routes_to_agop_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from richter.learners import features
    taken = []
    for name, route in [(name, getattr(features, name)) for name in ("_by_rows", "_by_pairs")]:
        def spy(*args: Any, name: str = name, route: Any = route, **options: Any) -> Tensor:
            taken.append(name)
            return route(*args, **options)
        monkeypatch.setattr(features, name, spy)
    for n, c, d in SIZES:
        agop(Laplace(1.0), normal(n, d), normal(n, c))
    assert set(taken) == {"_by_rows", "_by_pairs"}


def test_less_memory_means_more_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    geometry = Laplace.geometry

    def spy(self: Laplace, x: Tensor, z: Tensor) -> Tensor:
        sizes.append(len(x))
        return geometry(self, x, z)

    monkeypatch.setattr(Laplace, "geometry", spy)
    x, A = normal(60, 4), normal(60, 2)
    for feature in (agop, fact):
        found = []
        for memory in ("1GiB", "20KiB"):
            sizes.clear()
            feature(Laplace(1.0), x, A, memory=memory)
            found.append(list(sizes))
        assert len(found[1]) > len(found[0])
        assert max(found[1]) < max(found[0])


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kernel", KERNELS, **NAMED)
def test_a_weight_in_agop_is_a_number_of_copies(kernel: Kernel, centred: bool) -> None:
    """The same function: copies share the coefficient of their point."""
    x, A, M = normal(8, 3), normal(8, 2), metric("full", 3)
    w = torch.tensor([1, 2, 1, 3, 1, 1, 4, 2])
    copies = agop(kernel, x.repeat_interleave(w, 0), (A / w[:, None]).repeat_interleave(w, 0), M, centred=centred)
    assert_close(agop(kernel, x, A, M, weights=w, centred=centred), copies, 1e-9)
    assert apart(agop(kernel, x, A, M, centred=centred), copies) > 1e-2


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("kernel", KERNELS, **NAMED)
def test_laws_of_agop_and_fact(kernel: Kernel, kind: str) -> None:
    n, d = 11, 4
    x, A, M = normal(n, d), normal(n, 3), metric(kind, d)
    G, F = torch.as_tensor(agop(kernel, x, A, M)), torch.as_tensor(fact(kernel, x, A, M))
    assert_close(G, G.T, 1e-14)
    assert torch.linalg.eigvalsh(G).min() > -1e-12 * G.trace()
    assert torch.linalg.eigvalsh(G - torch.as_tensor(agop(kernel, x, A, M, centred=True))).min() > -1e-12 * G.trace()
    for f, whole in ((agop, G), (fact, F)):  # a sum over outputs, quadratic in coefficients, blind to the order of rows
        assert_close(sum(torch.as_tensor(f(kernel, x, A[:, i : i + 1], M)) for i in range(3)), whole, 1e-9)
        assert_close(f(kernel, x, 3 * A, M), 9 * whole, 1e-9)
        turned = torch.linalg.qr(normal(3, 3, seed=5))[0]
        assert_close(f(kernel, x, A @ turned, M), whole, 1e-9)
        assert_close(f(kernel, x.flip(0), A.flip(0), M), whole, 1e-9)
    if not isinstance(kernel, LaplaceL1):
        FM = F @ full(M, d)
        assert (FM - FM.T).norm() < 1e-9 * FM.norm()


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("kernel", INVARIANT, **NAMED)
def test_rotated_inputs_have_rotated_features(kernel: Kernel, kind: str) -> None:
    x, A, M = normal(10, 4), normal(10, 2), full(metric(kind, 4), 4)
    Q = torch.linalg.qr(normal(4, 4, seed=9))[0]
    for f in (agop, fact):
        turned = Q.T @ torch.as_tensor(f(kernel, x, A, M)) @ Q
        assert_close(f(kernel, x @ Q, A, (Q.T @ M @ Q + (Q.T @ M @ Q).T) / 2), turned, 1e-8)


def test_the_l1_kernel_is_not_rotation_invariant() -> None:
    x, A = normal(10, 4), normal(10, 2)
    Q = torch.linalg.qr(normal(4, 4, seed=9))[0]
    assert apart(agop(LaplaceL1(1.0), x @ Q, A), Q.T @ torch.as_tensor(agop(LaplaceL1(1.0), x, A)) @ Q) > 1e-2


@pytest.mark.parametrize(("kernel", "kind", "ridge"), all_pairs(KERNELS, METRICS, [0.01, 1.0]), **NAMED)
def test_fact_is_the_gradient_of_the_loss_at_a_fit(kernel: Kernel, kind: str, ridge: float) -> None:
    """The ridge is in the coefficients alone: residuals are ridge A.  [theory/FACT 1.3]"""
    x, y, M = normal(9, 3), normal(9, 2, seed=1), metric(kind, 3)
    A, _ = oracles.kernel_ridge(oracles.kernel_values(kernel, x, x, M), y, ridge)
    assert_close(fact(kernel, x, A, M), oracles.fact_by_loss(kernel, x, y, A, M, ridge), 1e-8)


@pytest.mark.parametrize("gap", [1e-2, 1e-5, 1e-8, 1e-11])
@pytest.mark.parametrize("kernel", [Laplace(5.0), NTK(1)], **NAMED)
def test_agop_of_rows_that_nearly_meet(kernel: Kernel, gap: float) -> None:
    """Slopes grow at a kink, and their squares must not be what cancels."""
    x, A = normal(60, 12), normal(60, 8, seed=1)
    x[1] = x[0] + gap * normal(1, 12, seed=2)[0]
    J = torch.einsum("jc,ijd->icd", A, torch.as_tensor(kernel.gradients(x)))
    expected = torch.einsum("icd,ice->de", J, J) / 60
    found = torch.as_tensor(agop(kernel, x, A))
    assert_close(found, expected, max(1e-9, 1e-15 / gap))
    assert (found.diagonal() > 0).all()
