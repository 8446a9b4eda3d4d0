"""Word embeddings with a solution: what a quadratic word2vec learns from co-occurrence statistics, and when.  [qwem]

A word i has the unigram probability P_i, and a pair the joint probability P_ij (symmetric). Tied embeddings W [V, d] minimise

    L = sum_ij Psi_ij [P_ij (-S_ij + S_ij^2 / 4) + P_i P_j (S_ij + S_ij^2 / 4)],   S = W W^T,

which is word2vec's loss to second order in S. With Psi_ij = 1 / (P_ij + P_i P_j) it is |W W^T - M|^2 / 4 up to a constant, for
the target matrix M_ij = 2 (P_ij - P_i P_j) / (P_ij + P_i P_j) = 2 tanh(PMI_ij / 2). In the time of dW / dt = (M - W W^T) W / 2
each eigenvalue of M is learned along its own sigmoid, the largest first:

    s_k^2(t) = lambda_k / (1 + (lambda_k / s_k^2(0) - 1) exp(-lambda_k t)).

From small random weights s_k(0) is |R_kk|, where W(0)^T V = Q R for the leading eigenvectors V (the QR rule). A pair that was
never counted has M_ij = -2, so M is a sparse matrix minus 2 in every entry: ``target_matrix`` of a sparse P is such an operator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike
from richter.core.values import progress
from richter.theory.arrays import Times, above_zero, like, normal, read, times_from_zero, whole
from richter.theory.flows import FlowError, flow
from richter.theory.frame import Theory

NEVER = -2.0  # M of a pair that does not occur
MARGINALS = 0.5  # largest relative distance of the marginals of P from the unigram probabilities
SYMMETRY = 1e-9  # largest asymmetry of P or M, relative to the largest entry


class TargetOperator(LinearOperator):
    """The target matrix of a large vocabulary: ``offsets`` [V, V] (sparse, M + 2 for pairs that occur) minus 2 in every entry."""

    def __init__(self, offsets: sparse.csr_array) -> None:
        super().__init__(np.dtype(np.float64), offsets.shape)
        self.offsets = offsets

    def _matmat(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Product with the columns of x."""
        return np.asarray(self.offsets @ x) + NEVER * x.sum(0)

    def _matvec(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Product with one vector."""
        return np.asarray(self._matmat(x.reshape(-1, 1))[:, 0])

    def _adjoint(self) -> TargetOperator:
        """Return the operator itself, which is symmetric."""
        return self

    @property
    def square(self) -> float:
        """Squared Frobenius norm |M|_F^2."""
        rest = math.prod(self.shape) - self.offsets.nnz
        return float(((self.offsets.data + NEVER) ** 2).sum() + NEVER**2 * rest)

    def toarray(self) -> NDArray[np.float64]:
        """Return the dense matrix."""
        return np.asarray(self.offsets.toarray()) + NEVER


Matrix = ArrayLike | TargetOperator


class TargetModes(NamedTuple):
    """Leading eigenvalues of a target matrix, largest first, and their eigenvectors. The largest entry of each is above 0."""

    eigenvalues: Array  # [d]
    vectors: Array  # [V, d]


def target_matrix(P: ArrayLike, unigram: ArrayLike) -> Any:
    """Return M [V, V] of the joint probabilities of pairs ``P`` [V, V] and the probabilities of words [V]: what W W^T approaches.

    A sparse ``P`` of scipy gives a ``TargetOperator``, for vocabularies whose matrices have no room.  [qwem, Eq. 5]

    >>> M = target_matrix(P, P.sum(1))
    """
    if sparse.issparse(P):
        return _operator(sparse.csr_array(P).astype(np.float64), np.asarray(unigram, np.float64))
    joint, p = read(P=(P, "V V"), unigram=(unigram, "V"))
    _probabilities(p.cpu().numpy(), joint.sum(1).cpu().numpy(), float(joint.min()), float((joint - joint.T).abs().max()),
                   float(joint.max()))
    joint, p = joint / joint.sum(), p / p.sum()
    free = torch.outer(p, p)
    return like(2 * (joint - free) / (joint + free), P)


def _operator(P: sparse.csr_array, p: NDArray[np.float64]) -> TargetOperator:
    """Target matrix as an operator that is never formed, from sparse pair probabilities."""
    if P.shape != (len(p), len(p)):
        raise SelectionError(f"P has shape {P.shape} for {len(p)} unigram probabilities; [V, V] and [V] are needed.")
    P = sparse.csr_array((P.data, P.indices, P.indptr), P.shape)  # never changes the matrix of the caller
    P.eliminate_zeros()
    ends = (P.data.min(), P.data.max()) if P.nnz else (0.0, 0.0)
    _probabilities(p, np.asarray(P.sum(1)).reshape(-1), float(ends[0]), float(abs(P - P.T).max()) if P.nnz else 0.0,
                   float(ends[1]))
    total, p = P.data.sum(), p / p.sum()
    free = np.repeat(p, np.diff(P.indptr)) * p[P.indices]
    joint = P.data / total
    return TargetOperator(sparse.csr_array((4 * joint / (joint + free), P.indices, P.indptr), P.shape))


def _probabilities(p: NDArray[np.float64], marginals: NDArray[np.float64], least: float, asymmetry: float, most: float) -> None:
    """Raise an error unless these are joint and unigram probabilities of one text."""
    if not np.isfinite(p).all() or not (p > 0).all() or not math.isfinite(most) or least < 0 or not most > 0:
        raise SelectionError("P must have entries from 0 on, and unigram only entries above 0: a word that never occurs has no "
                             "target. Leave such words out of the vocabulary.")
    if asymmetry > SYMMETRY * most:
        raise SelectionError(f"P differs from its transpose by up to {asymmetry / most:.2g} of its largest entry. Tied "
                             f"embeddings learn a symmetric P: count both sides of each word, or take P + P.T.")
    distance = np.abs(marginals / marginals.sum() - p / p.sum()).sum()
    if distance > MARGINALS:
        raise SelectionError(f"the rows of P and the unigram probabilities differ by {distance:.2g} in sum: they do not come "
                             f"from one text, and M would have a large mode that no meaning belongs to. Pass P.sum(1).")


# ------------------------------------------------------------------------------------------------ modes and embeddings


def leading(M: Matrix, d: int) -> TargetModes:
    """Return the ``d`` largest eigenvalues of M and their eigenvectors: dense for an array, iterative for a ``TargetOperator``.
    Both have the precision of float64."""
    whole(d=d)
    size = M.shape[0] if isinstance(M, TargetOperator) else len(M)
    if d > size:
        raise SelectionError(f"d={d} modes of a vocabulary of {size} words: take {size} or fewer.")
    if isinstance(M, TargetOperator):
        return _iterative(M, d)
    (dense,) = read(M=(M, "V V"))
    if (dense - dense.T).abs().max() > SYMMETRY * dense.abs().max():
        raise SelectionError("M is not symmetric: take the one that target_matrix returns.")
    values, vectors = torch.linalg.eigh(dense)
    top = torch.arange(size - 1, size - 1 - d, -1, device=dense.device)
    return TargetModes(like(values[top], M), like(_oriented(vectors[:, top]), M))


def _iterative(M: TargetOperator, d: int) -> TargetModes:
    """Leading eigenvalues and vectors by Lanczos."""
    size = M.shape[0]
    if d >= size - 1:
        return leading(M.toarray(), d)  # Lanczos finds all but one eigenvalue at most
    start = np.random.default_rng(0).standard_normal(size)  # fixed: one corpus has one answer
    values, vectors = eigsh(M, k=d, which="LA", v0=start, ncv=min(size, max(2 * d + 1, 40)), tol=0)
    order = np.argsort(-values)
    return TargetModes(values[order], _oriented(torch.from_numpy(vectors[:, order].copy())).numpy())


def _oriented(vectors: Float[Tensor, "V d"]) -> Float[Tensor, "V d"]:
    """Columns with the sign that makes their largest entry positive."""
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0)


def learnable(M: Matrix, d: int) -> TargetModes:
    """Return the leading modes like ``leading``; raise an error if some are not above 0, because W W^T has no negative
    eigenvalues."""
    modes = leading(M, d)
    values = np.asarray(read(eigenvalues=(modes.eigenvalues, "d"))[0].cpu())
    positive = int((values > 1e-10 * np.abs(values).max()).sum())
    if positive < d:
        raise SelectionError(f"{d} dimensions were asked for, and M has {positive} eigenvalues above 0: W W^T cannot have "
                             f"others, so the rest of the dimensions stay empty. Take d={positive} or less"
                             + (", or a larger corpus or vocabulary." if positive else
                                ": nothing can be learned from this text, whose words occur together as often as by chance."))
    return modes


def embed(M: Matrix, d: int) -> Array:
    """Return the embeddings W [V, d] that training ends with, up to a rotation: V sqrt(Lambda) of the leading modes.
    [qwem, Thm. 1]"""
    modes = learnable(M, d)
    return modes.vectors * modes.eigenvalues**0.5


def starts(vectors: ArrayLike, W0: ArrayLike) -> Array:
    """Return s_k(0) [d] of the leading eigenvectors [V, d] by the QR rule: |R_kk| of W(0)^T V = Q R. Each mode counts
    only what it has outside the directions of the modes before it.  [qwem, Result 3, with |R_kk| in place of the limit]"""
    V, W = read(vectors=(vectors, "V d"), W0=(W0, "V p"))
    if W.shape[1] < V.shape[1]:
        raise SelectionError(f"W0 has {W.shape[1]} dimensions, and {V.shape[1]} modes were asked for: it learns as many as it "
                             f"has dimensions.")
    return like(torch.linalg.qr(W.T @ V)[1].diagonal().abs(), vectors)


def trajectory(M: Matrix, W0: ArrayLike, t: Times) -> Array:
    """Return the squared singular values of W(t) [d, t], one row for each mode in the order of eigenvalues, by the QR rule.

    Exact if the columns of ``W0`` [V, d] are multiples of eigenvectors; right to 0.1 % in time for small random ones.
    [qwem, Lemma]
    """
    modes = learnable(M, _width(W0))
    return growth(modes.eigenvalues, starts(modes.vectors, W0), t)


def _width(W0: ArrayLike) -> int:
    """Number of columns of W0."""
    return int(read(W0=(W0, "V d"))[0].shape[1])


def growth(eigenvalues: ArrayLike, start: ArrayLike, t: Times, *, rate: float = 1.0) -> Array:
    """Return s_k^2 [d, t] of modes that begin at s_k(0) = ``start`` [d]. ``rate`` is 1 in the time of the flow; tests
    perturb it."""
    lam, s0 = read(eigenvalues=(eigenvalues, "d"), start=(start, "d"))
    times = times_from_zero(t).to(lam.device)
    ratio = lam / s0.square()
    return like(lam[:, None] / (1 + (ratio - 1)[:, None] * torch.exp(-rate * lam[:, None] * times)), eigenvalues)


def rise_times(eigenvalues: ArrayLike, start: ArrayLike, *, rate: float = 1.0) -> Array:
    """Return the times [d] at which modes have half of their final s_k^2 = lambda_k; 0 if they begin with more, infinite if they
    begin at 0."""
    lam, s0 = read(eigenvalues=(eigenvalues, "d"), start=(start, "d"))
    return like(torch.log((lam / s0.square() - 1).clamp(min=1)) / (rate * lam), eigenvalues)


def effective_rank(squares: ArrayLike, eigenvalues: ArrayLike) -> Array:
    """Number of modes past half of their eigenvalue, at each time [t], of s_k^2 [d, t]."""
    s, lam = read(squares=(squares, "d t"), eigenvalues=(eigenvalues, "d"))
    return like((s >= lam[:, None] / 2).sum(0).double(), squares)


def plateaus(eigenvalues: ArrayLike, square: float) -> Array:
    """Return the losses [d + 1] at which training rests with 0, ..., d modes learned: (|M|^2 - sum_k lambda_k^2) / 4, where
    ``square`` = |M|^2."""
    (lam,) = read(eigenvalues=(eigenvalues, "d"))
    return like((square - torch.cat([lam.new_zeros(1), lam.square().cumsum(0)])) / 4, eigenvalues)


def loss(W: ArrayLike, P: ArrayLike, unigram: ArrayLike, positive: ArrayLike | None = None, negative: ArrayLike | None = None
         ) -> float:
    """Quadratic loss of the embeddings ``W`` [V, d], summed over pairs. ``positive`` and ``negative``: the weights Psi+ and Psi-
    [V, V]; by default both are 1 / (P_ij + P_i P_j).  [qwem, Eq. 3]"""
    W_, P_, p = read(W=(W, "V d"), P=(P, "V V"), unigram=(unigram, "V"))
    free, S = torch.outer(p, p), W_ @ W_.T
    plus, minus = (1 / (P_ + free) if a is None else read(P=(P_, "V V"), Psi=(a, "V V"))[1] for a in (positive, negative))
    return float((plus * P_ * (-S + S * S / 4) + minus * free * (S + S * S / 4)).sum())


# ------------------------------------------------------------------------------------------------ the flow itself


def gradient_flow(M: ArrayLike, W0: ArrayLike, t: Times, weights: ArrayLike | None = None) -> Array:
    """Return W [t, V, d] along dW / dt = (M - W W^T) W / 2, integrated. ``weights`` [V, V]: G_ij, by which each pair counts; by
    default all are 1, where the closed form holds."""
    M_, W_ = read(M=(M, "V V"), W0=(W0, "V d"))
    G = None if weights is None else read(M=(M_, "V V"), weights=(weights, "V V"))[1]

    def velocity(W: Tensor) -> Tensor:
        if G is None:
            return (M_ @ W - W @ (W.T @ W)) / 2
        return (G * (M_ - W @ W.T)) @ W / 2

    # weights may be as small as 1e-8, and their relative error is that of the times
    small = float(W_.abs().max())
    states = flow(velocity, W_, times_from_zero(t).tolist(), rtol=1e-12, atol=1e-12 * small)
    return like(torch.stack(states), M)


def sgd(M: ArrayLike, W0: ArrayLike, t: Times, *, lr: float, words: int, seed: int = 0) -> Iterator[Tensor]:
    """Train by stochastic gradient descent, and yield W [V, d] at each of the increasing times ``t`` (steps times ``lr``).

    A step draws ``words`` rows and as many columns, and labels each of their pairs as one of the text with probability
    P_ij / (P_ij + P_i P_j) = (M_ij + 2) / 4, otherwise as one of independent words: pairs of both kinds count so often with the
    weights 1 / (P_ij + P_i P_j). The loss is that of word2vec to second order, in the precision of float32."""
    target, W = (torch.as_tensor(a).to(torch.float32) for a in (M, W0))
    W, size = W.clone(), len(target)
    whole(words=words)
    whole(0, seed=seed)
    above_zero("a rate", lr=lr)
    if words > size:
        raise SelectionError(f"words={words} in a step, and the vocabulary has {size}: take {size} or fewer.")
    draw = torch.Generator(W.device).manual_seed(seed)
    steps = (times_from_zero(t) / lr).round().long().tolist()
    weight, done = lr / 4 * (size / words) ** 2, 0
    for last in progress(steps, title="training", unit="time"):
        for _ in range(last - done):
            i, j = (torch.randperm(size, generator=draw, device=W.device)[:words] for _ in range(2))
            labels = torch.rand(words, words, generator=draw, device=W.device) * 4 < target[i][:, j] + 2
            a, b = W[i], W[j]
            residual = (a @ b.T).add_(2).sub_(labels.to(a), alpha=4)  # S - T with T = 2 or -2
            W.index_add_(0, i, residual @ b, alpha=-weight)
            W.index_add_(0, j, residual.T @ a, alpha=-weight)
        done = max(done, last)
        if not torch.isfinite(W).all():
            raise FlowError(f"training left the finite numbers before step {done}: lr={lr:g} is too large for {words} words in a "
                            f"step of {size}. Take a smaller one, or more words.")
        yield W.clone()


def predict_aligned(P: ArrayLike, start: ArrayLike, t: Times, *, rate: float = 1.0) -> Array:
    """Return s_k^2 [d, t] from embeddings along eigenvectors, by the closed form."""
    modes = learnable(target_matrix(P, read(P=(P, "V V"))[0].sum(1)), len(start))
    return growth(modes.eigenvalues, start, t, rate=rate)


def simulate_aligned(P: ArrayLike, start: ArrayLike, t: Times) -> Array:
    """Return s_k^2 [d, t] along the integrated flow; targets from the mutual information."""
    (joint,) = read(P=(P, "V V"))
    p = joint.sum(1)
    M = 2 * torch.tanh(torch.log(joint / p / p[:, None]) / 2)
    vectors = torch.linalg.svd(M + 4 * len(M) * torch.eye(len(M), dtype=M.dtype))[0][:, :len(start)]
    W = gradient_flow(M, vectors * read(start=(start, "d"))[0], t)
    return like((vectors.T @ W).square().sum(-1).T, P)


def predict_rises(P: ArrayLike, scale: float, d: int, *, rate: float = 1.0) -> Array:
    """Return half-rise times [d] from small random embeddings, by the QR rule."""
    modes = learnable(target_matrix(P, read(P=(P, "V V"))[0].sum(1)), d)
    return rise_times(modes.eigenvalues, starts(modes.vectors, scale * normal(len(P), d, seed=3)), rate=rate)


def simulate_rises(P: ArrayLike, scale: float, d: int) -> Array:
    """Return the times [d] at which the singular values of the integrated embeddings have half of their final squares."""
    (joint,) = read(P=(P, "V V"))
    p = joint.sum(1)
    M = 2 * torch.tanh(torch.log(joint / p / p[:, None]) / 2)
    lam = torch.linalg.svdvals(M + 4 * len(M) * torch.eye(len(M), dtype=M.dtype))[:d] - 4 * len(M)
    times = np.linspace(0, 1.3 * float(torch.log(lam / scale**2).max() / lam.min()), 4_000)
    squares = torch.linalg.svdvals(gradient_flow(M, scale * normal(len(P), d, seed=3), times)).square()
    return like(torch.stack([_crossing(times, squares[:, k].numpy(), float(lam[k]) / 2) for k in range(d)]), P)


def _crossing(times: NDArray[np.float64], values: NDArray[np.float64], level: float) -> Tensor:
    """Time at which values reach a level, on the straight line between two points in their logarithm."""
    i = int(np.argmax(values >= level))
    a, b = np.log(values[i - 1:i + 1])
    return torch.tensor(times[i - 1] + (times[i] - times[i - 1]) * (math.log(level) - a) / (b - a), dtype=torch.float64)


def planted(V: int, topics: int, seed: int = 0) -> Array:
    """Draw joint probabilities [V, V] of a text with ``topics``: most words of a pair belong to one topic, and topics have sizes
    that fall by a third from one to the next, so that eigenvalues are apart."""
    draw = np.random.default_rng((seed, 46))
    sizes = 1.5 ** -np.arange(topics)
    home = np.repeat(np.arange(topics), np.diff(np.rint(V * np.cumsum([0, *sizes]) / sizes.sum()).astype(int)))
    words = np.where(home == np.arange(topics)[:, None], 1.0, 0.05) * draw.uniform(0.5, 1.5, (topics, V))
    P = words.T @ (draw.uniform(0.5, 1.5, topics)[:, None] * words)
    return np.asarray(P / P.sum())


def _aligned_cases() -> list[tuple[Any, ...]]:
    """Cases (targets and initial singular values) on which theory and simulation are compared."""
    return [(planted(20, 4), np.array([1e-3, 2e-3, 1e-2]), np.linspace(0, 2, 9)),
            (torch.from_numpy(planted(16, 5, 1)), torch.tensor([1e-4, 0.3], dtype=torch.float64), np.linspace(0, 2, 7))]


def _rise_cases() -> list[tuple[Any, ...]]:
    """Cases (targets, small starts) on which theory and simulation are compared."""
    return [(planted(30, 6, seed), 1e-4, 5) for seed in (0, 1)]


THEORIES = (
    Theory("word_embeddings.aligned", ref=Ref("qwem", "Lemma"), title="how word embeddings along eigenvectors grow",
           predict=predict_aligned, simulate=simulate_aligned, cases=_aligned_cases, tolerance=1e-6, perturb={"rate": 1.05}),
    Theory("word_embeddings.rises", ref=Ref("qwem", "Result 3"), title="when small random word embeddings learn each mode",
           predict=predict_rises, simulate=simulate_rises, cases=_rise_cases, tolerance=2e-3, perturb={"rate": 1.02}),
)
