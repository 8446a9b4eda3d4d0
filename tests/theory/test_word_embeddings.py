"""Quadratic word embeddings: closed forms against loops over pairs, dense eigenvalues and the integrated flow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from richter.core import SelectionError
from richter.testing import check_theory
from richter.theory import word_embeddings as we


def counts(V: int, seed: int, empty: float = 0.5) -> np.ndarray:
    """A symmetric matrix of whole numbers, with zeros; no word is without pairs."""
    draw = np.random.default_rng(seed)
    C = draw.integers(1, 50, (V, V)) * (draw.random((V, V)) > empty)
    return (C + C.T + np.diag(np.ones(V, dtype=int))).astype(float)


def joint(V: int, seed: int, empty: float = 0.5) -> np.ndarray:
    C = counts(V, seed, empty)
    return C / C.sum()


def slow_target(P: np.ndarray, p: np.ndarray) -> np.ndarray:
    """The definition, pair by pair, from the mutual information."""
    M = np.full(P.shape, -2.0)
    for i, j in np.argwhere(P > 0):
        M[i, j] = 2 * math.tanh(math.log(P[i, j] / p[i] / p[j]) / 2)
    return M


def slow_flow(M: np.ndarray, W: np.ndarray, end: float, steps: int) -> np.ndarray:
    """Runge-Kutta of order four with fixed steps."""
    def f(W: np.ndarray) -> np.ndarray:
        return (M - W @ W.T) @ W / 2
    h = end / steps
    for _ in range(steps):
        a = f(W)
        b = f(W + h / 2 * a)
        c = f(W + h / 2 * b)
        W = W + h / 6 * (a + 2 * b + 2 * c + f(W + h * c))
    return W


@pytest.mark.parametrize("theory", we.THEORIES, ids=lambda t: t.name)
def test_closed_forms_agree_with_the_flow(theory: Any) -> None:
    check_theory(theory)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), V=st.integers(2, 12), empty=st.sampled_from([0.0, 0.5, 0.9]))
def test_the_target_is_that_of_the_mutual_information(seed: int, V: int, empty: float) -> None:
    """Dense, sparse and in torch, to 1e-12."""
    P = joint(V, seed, empty)
    p = P.sum(1)
    M = slow_target(P, p)
    np.testing.assert_allclose(we.target_matrix(P, p), M, atol=1e-12)
    operator = we.target_matrix(sparse.coo_array(P), p)
    np.testing.assert_allclose(operator.toarray(), M, atol=1e-12)
    x = np.random.default_rng(seed).standard_normal((V, 3))
    np.testing.assert_allclose(operator @ x, M @ x, atol=1e-11)
    np.testing.assert_allclose(operator @ x[:, 0], M @ x[:, 0], atol=1e-11)
    assert operator.square == pytest.approx((M**2).sum(), rel=1e-12)
    in_torch = we.target_matrix(torch.from_numpy(P), torch.from_numpy(p))
    assert isinstance(in_torch, torch.Tensor)
    np.testing.assert_allclose(in_torch, M, atol=1e-12)


def test_counts_need_no_normalising() -> None:
    C = counts(6, 0)
    np.testing.assert_allclose(we.target_matrix(C, C.sum(1)), we.target_matrix(C / C.sum(), C.sum(1) / C.sum()), atol=1e-14)
    np.testing.assert_allclose(we.target_matrix(sparse.csr_array(C), C.sum(1)).toarray(), we.target_matrix(C, C.sum(1)),
                               atol=1e-14)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), d=st.integers(1, 5))
def test_the_loss_is_a_matrix_factorisation(seed: int, d: int) -> None:
    """L - |W W^T - M|^2 / 4 is the same number for all W, also for other reweightings with the same G; a loop over pairs
    agrees."""
    draw = np.random.default_rng(seed)
    P = joint(7, seed, 0.3)
    p = P.sum(1)
    M = slow_target(P, p)
    for W in draw.standard_normal((4, 7, d)):
        S, total = W @ W.T, 0.0
        for i in range(7):
            for j in range(7):
                psi = 1 / (P[i, j] + p[i] * p[j])
                total += psi * P[i, j] * (S[i, j] ** 2 / 4 - S[i, j]) + psi * p[i] * p[j] * (S[i, j] ** 2 / 4 + S[i, j])
        assert we.loss(W, P, p) == pytest.approx(total, rel=1e-11, abs=1e-11)
        assert we.loss(W, P, p) - ((S - M) ** 2).sum() / 4 == pytest.approx(-(M**2).sum() / 4, abs=1e-9)
    # another Psi+ and Psi- with Psi+ P + Psi- p p = 3 everywhere
    share = draw.uniform(0.2, 0.8, (7, 7)) * (P > 0)
    share = (share + share.T) / 2
    plus, minus = np.divide(3 * share, P, out=np.zeros_like(P), where=P > 0), 3 * (1 - share) / np.outer(p, p)
    other = 2 * (2 * share - 1)
    gaps = [we.loss(W, P, p, plus, minus) - 3 / 4 * ((W @ W.T - other) ** 2).sum() for W in draw.standard_normal((4, 7, d))]
    assert np.ptp(gaps) < 1e-9


def test_an_operator_has_the_modes_of_the_dense_matrix() -> None:
    P = joint(300, 1, 0.9)
    p = P.sum(1)
    M = slow_target(P, p)
    values, vectors = np.linalg.eigh(M)
    modes = we.leading(we.target_matrix(sparse.csr_array(P), p), 12)
    np.testing.assert_allclose(modes.eigenvalues, values[::-1][:12], rtol=1e-10)
    np.testing.assert_allclose(np.abs((modes.vectors * vectors[:, ::-1][:, :12]).sum(0)), 1, rtol=1e-9)
    dense = we.leading(M, 12)
    np.testing.assert_allclose(dense.eigenvalues, values[::-1][:12], rtol=1e-12)
    np.testing.assert_allclose(dense.vectors, modes.vectors, atol=1e-7)
    assert (np.take_along_axis(modes.vectors, np.abs(modes.vectors).argmax(0)[None], 0) > 0).all()
    np.testing.assert_allclose(we.embed(M, 5), we.embed(we.target_matrix(sparse.csr_array(P), p), 5), atol=1e-7)
    again = we.leading(we.target_matrix(sparse.csr_array(P), p), 12)
    assert np.array_equal(again.vectors, modes.vectors)


@pytest.mark.long
def test_an_operator_of_5000_words_has_the_modes_of_the_dense_matrix() -> None:
    P = joint(5_000, 2, 0.97)
    p = P.sum(1)
    operator = we.target_matrix(sparse.csr_array(P), p)
    values = np.linalg.eigvalsh(operator.toarray())[::-1][:50]
    np.testing.assert_allclose(we.leading(operator, 50).eigenvalues, values, rtol=1e-8)


def test_embeddings_are_the_best_of_their_rank() -> None:
    """The closed form is a stationary point, lower than its neighbours, and the loss there is the last plateau."""
    P = we.planted(25, 4)
    M = slow_target(P, P.sum(1))
    W = we.embed(M, 3)
    values = np.linalg.eigvalsh(M)[::-1]
    np.testing.assert_allclose((M - W @ W.T) @ W, 0, atol=1e-9)
    np.testing.assert_allclose(np.linalg.svd(W)[1] ** 2, values[:3], rtol=1e-10)
    levels = we.plateaus(values[:3], (M**2).sum())
    np.testing.assert_allclose(levels[-1], ((W @ W.T - M) ** 2).sum() / 4, rtol=1e-10)
    np.testing.assert_allclose(levels[0], (M**2).sum() / 4, rtol=1e-12)
    assert (np.diff(levels) < 0).all()


def test_trajectories_of_any_initialisation_follow_the_flow() -> None:
    """Aligned ones to 1e-8 against Runge-Kutta; small random ones rise when the QR rule says, larger ones roughly."""
    P = we.planted(25, 4)
    M = slow_target(P, P.sum(1))
    vectors = np.linalg.eigh(M)[1][:, ::-1][:, :3]
    W0 = vectors * np.array([0.1, 0.2, 0.3]) @ np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    W = slow_flow(M, W0, 0.8, 2_000)
    np.testing.assert_allclose(we.trajectory(M, W0, 0.8)[:, 0], ((vectors.T @ W) ** 2).sum(1), rtol=1e-8)
    np.testing.assert_allclose(we.trajectory(M, W0, [0.0])[:, 0], [0.01, 0.04, 0.09], rtol=1e-10)
    small = 1e-5 * np.random.default_rng(1).standard_normal((25, 4))
    modes = we.leading(M, 4)
    times = we.rise_times(modes.eigenvalues, we.starts(modes.vectors, small))
    for k, time in enumerate(times):
        W = np.asarray(we.gradient_flow(M, small, [time]))[0]
        assert ((modes.vectors[:, k] @ W) ** 2).sum() == pytest.approx(modes.eigenvalues[k] / 2, rel=0.01)
    np.testing.assert_array_equal(we.effective_rank(we.trajectory(M, small, times * 1.0001), modes.eigenvalues), [1, 2, 3, 4])


def test_the_time_of_half_rise_is_where_half_is_reached() -> None:
    lam, start = np.array([5.0, 2.0, 1.0]), np.array([1e-3, 1e-2, 0.9])
    times = we.rise_times(lam, start)
    half = [we.growth(lam, start, [t])[k, 0] / lam[k] for k, t in enumerate(times)]
    np.testing.assert_allclose(half, [0.5, 0.5, 0.81], rtol=1e-10)  # the last one begins beyond half
    assert times[2] == 0
    assert we.rise_times(lam, np.array([1e-3, 0.0, 0.1]))[1] == math.inf
    np.testing.assert_allclose(we.growth(lam, start, [0.0, 1e4])[:, 1], lam)  # no overflow


def test_other_weights_of_pairs_change_the_flow() -> None:
    P = we.planted(12, 3)
    M = slow_target(P, P.sum(1))
    W0 = 0.1 * np.random.default_rng(0).standard_normal((12, 2))
    plain = np.asarray(we.gradient_flow(M, W0, [0.3]))
    np.testing.assert_allclose(we.gradient_flow(M, W0, [0.3], np.ones((12, 12))), plain, rtol=1e-9)
    assert np.abs(np.asarray(we.gradient_flow(M, W0, [0.3], P / P.mean())) - plain).max() > 1e-3
    np.testing.assert_allclose(plain[0], slow_flow(M, W0, 0.3, 300), rtol=1e-8)


def test_bad_input_says_what_to_do() -> None:
    P = we.planted(10, 3)
    p = P.sum(1)
    M = we.target_matrix(P, p)
    for bad, unigram, words in ((P + np.triu(P), p, "differs from its transpose"),
                                (P, np.roll(np.arange(1.0, 11.0) ** 4, 3), "do not come from one text"),
                                (P, p * (np.arange(10) > 0), "a word that never occurs has no target"),
                                (-P, p, "entries from 0 on")):
        for kind in (np.asarray, sparse.csr_array):
            with pytest.raises(SelectionError, match=words):
                we.target_matrix(kind(bad), unigram)
    with pytest.raises(SelectionError, match=r"\[V, V\] and \[V\] are needed"):
        we.target_matrix(sparse.csr_array(P), p[:-1])
    positive = int((np.linalg.eigvalsh(M) > 1e-9).sum())
    assert positive < 9
    we.embed(M, positive)
    with pytest.raises(SelectionError, match=f"9 dimensions .* M has {positive} eigenvalues above 0.*Take d={positive} or less"):
        we.embed(M, 9)
    with pytest.raises(SelectionError, match="nothing can be learned from this text"):
        we.embed(we.target_matrix(np.full((4, 4), 1 / 16), np.full(4, 0.25)), 1)
    with pytest.raises(SelectionError, match="take 10 or fewer"):
        we.leading(M, 11)
    with pytest.raises(SelectionError, match="M is not symmetric"):
        we.leading(np.triu(M), 1)
    with pytest.raises(SelectionError, match="it learns as many as it has dimensions"):
        we.starts(np.eye(10)[:, :3], np.ones((10, 2)))


def test_descent_on_sampled_pairs_rises_when_predicted() -> None:
    """From random small embeddings, within 6 % for each mode; another seed draws other pairs."""
    P = we.planted(300, 5)
    M = we.target_matrix(P, P.sum(1))
    modes = we.leading(M, 4)
    W0 = 1e-3 * np.random.default_rng(0).standard_normal((300, 6))
    times = np.asarray(we.rise_times(modes.eigenvalues, we.starts(modes.vectors, W0)))
    t = np.linspace(0, 1.3 * times[-1], 400)
    squares = np.stack([((modes.vectors.T @ W.double().numpy()) ** 2).sum(1)
                        for W in we.sgd(M, W0, t, lr=2e-4, words=100, seed=1)], 1)
    seen = [t[np.argmax(squares[k] >= modes.eigenvalues[k] / 2)] for k in range(4)]
    np.testing.assert_allclose(seen, times, rtol=0.06)
    first, again, other = (next(iter(we.sgd(M, W0, [0.002], lr=2e-4, words=100, seed=s))) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_step_of_descent_is_the_gradient_on_average() -> None:
    """The mean of many single steps, against the gradient of the loss; each step changes only the words that it draws."""
    P = we.planted(8, 3)
    M = we.target_matrix(P, P.sum(1))
    W0 = np.random.default_rng(0).standard_normal((8, 2))
    ends = [next(iter(we.sgd(M, W0, [1e-3], lr=1e-3, words=3, seed=s))) for s in range(4_000)]
    steps = torch.stack(ends).double() - torch.from_numpy(W0)
    mean, error = steps.mean(0).numpy() / 1e-3, steps.std(0).numpy() / 1e-3 / 4_000**0.5
    expected = (M - W0 @ W0.T) @ W0 / 2
    assert (np.abs(mean - expected) < 5 * error).all()
    assert np.abs(expected).max() > 20 * error.max()
    assert int((steps.abs().sum(-1) > 1e-6).sum(-1).max()) <= 6
    with pytest.raises(SelectionError, match="words=9 in a step, and the vocabulary has 8"):
        next(iter(we.sgd(M, W0, [1.0], lr=0.1, words=9)))
    with pytest.raises(ArithmeticError, match="lr=3 is too large"):
        list(we.sgd(M, 100 * W0, [300.0], lr=3.0, words=3))
