"""Lanczos, left-out groups, rows in parts and random rotations, against dense linear algebra."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from richter import linalg
from richter.instrument.evaluate import jackknife
from richter.instrument.statistics.features import Scatter, scatter_without_each
from richter.linalg import EXACT, anywhere, haar, lanczos, largest_eigenpairs, leading, top_eigenvalue, top_of_each, without_each


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def semidefinite(seed: int, n: int, rank: int | None = None) -> Tensor:
    A = normal(seed, n, rank or n)
    return A @ A.T / n


# ------------------------------------------------------------------------------------------------ largest eigenvalues


@cache
def directions(n: int) -> Tensor:
    """A random orthogonal matrix."""
    return torch.linalg.qr(normal(0, n, n))[0]


def with_spectrum(spectrum: Tensor) -> Tensor:
    """A symmetric matrix of these eigenvalues in random directions."""
    Q = directions(len(spectrum))
    K = (Q * spectrum) @ Q.T
    return (K + K.T) / 2


def uniform(seed: int, n: int) -> Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SIZE = 620
SPECTRA = {
    "power law": torch.arange(1, SIZE + 1).double() ** -1,
    "exponential": torch.exp(-torch.arange(SIZE).double()),
    "uniform": torch.linspace(0, 1, SIZE).double(),
    "crowded at the top": torch.linspace(0, 1, SIZE).double() ** 0.1,
    "twenty within 1e-2": torch.cat([1 - 1e-2 * uniform(1, 20), 0.9 * uniform(2, SIZE - 20)]),
    "twenty within 1e-6": torch.cat([1 - 1e-6 * uniform(1, 20), 0.9 * uniform(2, SIZE - 20)]),
    "two within 1e-9": torch.cat([torch.tensor([1.0, 1 - 1e-9]).double(), 0.5 * uniform(2, SIZE - 2)]),
    "five equal": torch.cat([torch.ones(5).double(), 0.99 * uniform(3, SIZE - 5)]),
    "all equal": torch.full((SIZE,), 2.5).double(),
    "rank one": torch.cat([torch.tensor([3.0]).double(), torch.zeros(SIZE - 1).double()]),
    "rank two": torch.cat([torch.tensor([3.0, 1e-5]).double(), torch.zeros(SIZE - 2).double()]),
    "zero": torch.zeros(SIZE).double(),
    "tiny": 1e-30 * torch.arange(1, SIZE + 1).double() ** -1,
    "huge": 1e30 * torch.arange(1, SIZE + 1).double() ** -1,
}


@pytest.mark.parametrize("name", SPECTRA)
def test_the_largest_eigenvalue(name: str) -> None:
    K = with_spectrum(SPECTRA[name])
    assert top_eigenvalue(K) == pytest.approx(SPECTRA[name].max().item(), rel=1e-10, abs=0)


def test_the_largest_eigenvalue_of_a_matrix_in_single_precision() -> None:
    K = with_spectrum(SPECTRA["power law"]).float()
    assert top_eigenvalue(K) == pytest.approx(torch.linalg.eigvalsh(K.double())[-1].item(), rel=1e-10)


@settings(deadline=None, max_examples=25, derandomize=True, database=None)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 12), rank=st.integers(1, 12))
def test_the_largest_eigenvalue_of_small_matrices(seed: int, n: int, rank: int) -> None:
    K = semidefinite(seed, n, rank)
    assert top_eigenvalue(K) == pytest.approx(torch.linalg.eigvalsh(K)[-1].item(), rel=1e-10)


def test_the_vector_of_the_largest_eigenvalue() -> None:
    K = with_spectrum(SPECTRA["power law"]).numpy()
    found = lanczos(lambda q: K @ q, anywhere(SIZE, torch.empty(0).double()).numpy())
    assert np.linalg.norm(found.vector) == pytest.approx(1, abs=1e-12)
    assert np.linalg.norm(K @ found.vector - found.value * found.vector) < 1e-10 * found.value
    np.testing.assert_allclose(found.basis @ found.basis.T, np.eye(len(found.basis)), atol=1e-12)
    np.testing.assert_allclose((found.basis @ found.vector) @ found.basis, found.vector, atol=1e-12)
    rough = lanczos(lambda q: K @ q, anywhere(SIZE, torch.empty(0).double()).numpy(), 1e-1)
    assert len(rough.basis) < len(found.basis)  # a larger tolerance needs fewer products


# ------------------------------------------------------------------------------------------------ with groups left out


@pytest.mark.parametrize(("n", "groups"), [(40, 5), (37, 8), (300, 3), (500, 8)])
def test_the_largest_eigenvalue_of_each_set_of_rows(n: int, groups: int) -> None:
    K = semidefinite(n, n, n // 2) + 3 * torch.ones(n, n, dtype=torch.float64)  # centring matters
    keep = torch.stack([(torch.arange(n) % groups != g).double() for g in range(groups)])
    values, exact = top_of_each(K, keep.numpy()), []
    for rows in keep.bool():
        part = K[rows][:, rows]
        C = torch.eye(len(part), dtype=torch.float64) - 1 / len(part)
        exact.append(torch.linalg.eigvalsh(C @ part @ C)[-1].item())
    assert values == pytest.approx(exact, rel=1e-12 if n <= EXACT else 0.05 * jackknife(exact) / max(exact))
    assert jackknife(values) == pytest.approx(jackknife(exact), rel=0.05)


MILDER = ("exponential", "uniform", "twenty within 1e-2", "five equal", "rank two")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] if name in MILDER else [])
                                  for name in SPECTRA if name not in ("zero", "all equal")])
def test_standard_errors_of_the_largest_eigenvalue_of_any_spectrum(name: str) -> None:
    """Within 5 %, from vectors of the whole matrix: of crowded spectra, too, and of one set's own largest eigenvalue."""
    K, groups = with_spectrum(SPECTRA[name]), 8
    keep = torch.stack([(torch.arange(SIZE) % groups != g).double() for g in range(groups)])
    for centred in (True, False):
        C = [torch.diag(k) - torch.outer(k, k) / k.sum() * centred for k in keep]
        exact = [torch.linalg.eigvalsh(c @ K @ c)[-1].item() for c in C]
        assert jackknife(top_of_each(K, keep.numpy(), leading(K, centred), centred)) == pytest.approx(jackknife(exact), rel=0.05)


def test_sets_without_variation_have_no_eigenvalue() -> None:
    K = torch.ones(6, 6, dtype=torch.float64)
    assert max(map(abs, top_of_each(K, 1 - np.eye(6)))) < 1e-12


def test_sums_without_each_group() -> None:
    blocks = normal(0, 3, 5, 5)
    for g in range(5):
        others = [i for i in range(5) if i != g]
        torch.testing.assert_close(without_each(blocks)[:, g], blocks[:, others][:, :, others].sum((1, 2)))


# ------------------------------------------------------------------------------------------------ many eigenpairs


@pytest.mark.parametrize(("spectrum", "k", "basis"), [
    (torch.cat([torch.linspace(-3, 3, 60), torch.full((40,), 0.1)]), 6, 20),  # crowded: restarts
    (torch.linspace(-1, 1, 40), 39, 40),  # the basis is all there is
    (torch.cat([torch.tensor([5.0, -4.0, 3.0]), torch.zeros(50)]), 8, 20),  # fewer than were asked for
    (torch.tensor([2.0] * 5 + [1.0] * 5 + [0.5] * 40), 7, 20),  # several of the same size
], ids=["crowded", "all", "few", "multiple"])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_eigenpairs_are_those_of_dense_algebra(spectrum: Tensor, k: int, basis: int, kind: torch.dtype) -> None:
    A, fine = with_spectrum(spectrum.double()), kind == torch.float64
    pairs = largest_eigenpairs(lambda v: (A @ v.double()).to(kind), normal(1, len(A)).to(kind), k, basis, 1e-10 if fine else 1e-4)
    close = 1e-8 if fine else 1e-5
    sizes = spectrum.double().abs().sort(descending=True).values[:k]
    torch.testing.assert_close(pairs.values.abs(), sizes, rtol=0, atol=close * sizes[0])
    X, values = pairs.vectors.double(), pairs.values
    torch.testing.assert_close(X @ X.T, torch.eye(k, dtype=torch.float64), rtol=0, atol=close)
    residuals = (X @ A - values[:, None] * X).norm(dim=1)
    torch.testing.assert_close(pairs.residuals, residuals, rtol=0.1, atol=close * sizes[0])
    assert residuals.max() <= (1e-8 if fine else 1e-4) * sizes[0]


def test_products_for_eigenpairs_are_counted() -> None:
    A = semidefinite(0, 300) - semidefinite(1, 300)
    values = torch.linalg.eigvalsh(A)
    values = values[values.abs().argsort(descending=True)[:12]].numpy()
    counts: list[int] = []
    pairs = largest_eigenpairs(lambda v: counts.append(1) or A @ v, normal(2, 300), 12, 30, 1e-11)  # type: ignore[func-returns-value]
    np.testing.assert_allclose(pairs.values.sort().values.numpy(), np.sort(values), rtol=1e-10)
    assert len(counts) == pairs.products + 12


def test_eigenpairs_that_do_not_come() -> None:
    A = with_spectrum(torch.linspace(0.99, 1, 200).double())
    with pytest.raises(ArithmeticError, match="products, and 0 of 5 eigenpairs found"):
        largest_eigenpairs(lambda v: A @ v, normal(0, 200), 5, 10, 1e-12, rounds=4)


# ------------------------------------------------------------------------------------------------ random rotations


@pytest.mark.parametrize("n", [1, 2, 7])
def test_rotations_are_orthogonal_and_uniform(n: int) -> None:
    draw = np.random.default_rng(0)
    Qs = np.stack([haar(n, draw) for _ in range(2000)])
    np.testing.assert_allclose(Qs @ Qs.transpose(0, 2, 1), np.broadcast_to(np.eye(n), Qs.shape), atol=1e-12)
    assert np.abs(Qs.mean(0)).max() < 4.5 / (2000 * n) ** 0.5  # the Q of a library has signs of its own
    np.testing.assert_allclose((Qs**2).mean(0), 1 / n, atol=0.05)
    assert {round(np.linalg.det(Q)) for Q in Qs} == {-1, 1}
    assert np.array_equal(haar(n, np.random.default_rng(3)), haar(n, np.random.default_rng(3)))


def test_rows_that_come_in_parts_have_the_scatter_of_all() -> None:
    """Also far away from zero, where products of the rows themselves would have lost what differs."""
    draw = torch.Generator().manual_seed(0)
    Z = torch.randn(30, 4, generator=draw, dtype=torch.float64) + 1e6
    parts = [Scatter.of(part) for part in Z.split([1, 4, 20, 5])]
    whole = sum(parts[1:], start=parts[0])
    centred = Z - Z.mean(0)
    assert whole.n == 30
    assert torch.allclose(whole.about, centred.T @ centred, rtol=1e-9)
    assert torch.allclose(whole.covariance, torch.cov(Z.T, correction=0), rtol=1e-9)
    assert torch.allclose(whole.second, Z.T @ Z / 30, rtol=1e-12)
    rows = torch.arange(30)
    ends = [(0, 1), (1, 5), (5, 25), (25, 30)]
    for (a, b), left in zip(ends, scatter_without_each(parts), strict=True):
        rest = Z[(rows < a) | (rows >= b)]
        assert left.n == len(rest)
        assert torch.allclose(left.about, Scatter.of(rest).about, rtol=1e-9)
        assert torch.allclose(left.mean, rest.mean(0), rtol=1e-12)
    assert scatter_without_each(parts[:2])[0].n == 4


@pytest.mark.parametrize("outlier", [1.0, 1e3, 1e8])
def test_scatter_without_each_part_keeps_its_digits(outlier: float) -> None:
    """Also where one part is nearly all there is, which a subtraction would not survive."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, 5, generator=draw, dtype=torch.float64) + 3 for n in (4, 1, 7, 3)]
    rows[2] = rows[2] * outlier
    for i, rest in enumerate(scatter_without_each([Scatter.of(Z) for Z in rows])):
        direct = Scatter.of(torch.cat([Z for k, Z in enumerate(rows) if k != i]))
        assert rest.n == direct.n
        assert torch.allclose(rest.mean, direct.mean, rtol=1e-9)
        assert (rest.about - direct.about).norm() <= 1e-9 * direct.about.norm()


def test_eigenvalues_where_torch_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feature matrix of 75 living units among 1,000 was seen to end divide and conquer; the other method goes on."""
    a = torch.randn(12, 3, dtype=torch.float64)
    K = torch.zeros(20, 20, dtype=torch.float64)
    K[:12, :12] = a @ a.T
    values, _ = linalg.eigh(K)

    def fails(*_: object, **__: object) -> None:
        raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    others, vectors = linalg.eigh(K)
    torch.testing.assert_close(others, values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(vectors @ others.diag() @ vectors.T, K, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(20, dtype=torch.float64), rtol=0, atol=1e-12)
    assert linalg.leading_eigenpairs(K, 3)[0].shape == (3,)
