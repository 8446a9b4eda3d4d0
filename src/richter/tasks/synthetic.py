"""Synthetic tasks whose optimal features are known in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from richter.core import SelectionError, unknown
from richter.linalg import haar


@dataclass(frozen=True, eq=False)
class ChainMonomial:
    """Examples of the chain monomial, and the expected gradient outer product E[grad f grad f^T] of its target."""

    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n 1"]
    x_test: Float[Tensor, "m d"]
    y_test: Float[Tensor, "m 1"]
    egop: Float[Tensor, "d d"]


def chain_monomial(n: int, d: int, rank: int, seed: int = 0, *, n_test: int = 1000, standardise: bool = False,
                   dtype: torch.dtype = torch.float32) -> ChainMonomial:
    """Make examples of f(x) = sum_k x_{k mod r} x_{(k+1) mod r} over k = 0..r-1, x ~ N(0, I_d).  [nfa, Eq. (2)]

    ``standardise`` divides f by its deviation sqrt(r), and so the EGOP by r. Test examples do not depend on ``n``.
    """
    if not 3 <= rank <= d or n < 1 or n_test < 1 or seed < 0:
        raise SelectionError(f"chain_monomial(n={n}, d={d}, rank={rank}, seed={seed}, n_test={n_test}): 3 <= rank <= d is needed "
                             f"(fewer variables make no chain), one example at least, and a seed from 0 on.")
    scale = math.sqrt(rank) if standardise else 1.0  # r uncorrelated monomials of variance 1
    x, x_test = (torch.from_numpy(np.random.default_rng((seed, part)).standard_normal((m, d)))
                 for part, m in enumerate((n, n_test)))
    y, y_test = ((chain(z, rank) / scale)[:, None].to(dtype) for z in (x, x_test))
    return ChainMonomial(x.to(dtype), y, x_test.to(dtype), y_test, (chain_egop(d, rank) / scale**2).to(dtype))


def chain(x: Float[Tensor, "n d"], rank: int) -> Float[Tensor, " n"]:
    """Return f(x) of each row."""
    used = x[:, :rank]
    return (used * used.roll(-1, 1)).sum(1)


def chain_egop(d: int, rank: int) -> Float[Tensor, "d d"]:
    """Return E[grad f grad f^T] = B B^T, because grad f = B x with B = P + P^T and the cyclic shift P of the first r variables.

    The diagonal is 2; the entries two apart are 1, and 2 if r = 4, where i+2 = i-2. Its rank is r, or r-2 if 4 divides r.
    """
    P = torch.eye(rank, dtype=torch.float64).roll(1, 1)
    B = P + P.T
    egop = torch.zeros(d, d, dtype=torch.float64)
    egop[:rank, :rank] = B @ B.T
    return egop


@dataclass(frozen=True, eq=False)
class GaussianExamples:
    """Inputs without labels, and the covariance that they were drawn with."""

    x: Float[Tensor, "n d"]
    x_test: Float[Tensor, "m d"]
    covariance: Float[Tensor, "d d"]


def gaussian(n: int, d: int, spectrum: Sequence[float] | Tensor | np.ndarray, seed: int = 0, *, n_test: int = 1000,
             dtype: torch.dtype = torch.float32) -> GaussianExamples:
    """Draw x ~ N(0, O diag(spectrum) O^T) with an eigenbasis O from the Haar measure.  [nfa, App. D, G]

    Test examples and O do not depend on ``n``.
    """
    values = torch.as_tensor(np.asarray(spectrum), dtype=torch.float64)
    if tuple(values.shape) != (d,) or not bool((torch.isfinite(values) & (values >= 0)).all()) or n < 1 or n_test < 1 or seed < 0:
        raise SelectionError(f"gaussian(n={n}, d={d}, spectrum of shape {tuple(values.shape)}, seed={seed}, n_test={n_test}): d "
                             f"eigenvalues, finite and not negative, one example at least and a seed from 0 on are needed.")
    root = torch.from_numpy(haar(d, np.random.default_rng((seed, 2)))) * values.sqrt()
    x, x_test = (torch.from_numpy(np.random.default_rng((seed, part)).standard_normal((m, d))) @ root.T
                 for part, m in enumerate((n, n_test)))
    return GaussianExamples(x.to(dtype), x_test.to(dtype), (root @ root.T).to(dtype))


def power_law_gaussian(n: int, d: int, decay: float, seed: int = 0, *, n_test: int = 1000,
                       dtype: torch.dtype = torch.float32) -> GaussianExamples:
    """``gaussian`` with eigenvalues 1 / (1 + k^decay), k = 1..d: a multiple of the identity for decay 0 (all 1/2), of rank one as
    decay goes to infinity.  [nfa, App. D]"""
    if d < 1 or not math.isfinite(decay):
        raise SelectionError(f"power_law_gaussian(n={n}, d={d}, decay={decay}): one dimension at least and a finite decay are "
                             f"needed.")
    k = torch.arange(1, d + 1, dtype=torch.float64)
    return gaussian(n, d, 1 / (1 + k**decay), seed, n_test=n_test, dtype=dtype)


@dataclass(frozen=True, eq=False)
class QuadraticExamples:
    """Examples of the quadratic task, its matrix Q and the expected gradient outer product of its target."""

    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n 1"]
    x_test: Float[Tensor, "m d"]
    y_test: Float[Tensor, "m 1"]
    egop: Float[Tensor, "d d"]
    Q: Float[Tensor, "d d"]


def quadratic(n: int, d: int, seed: int = 0, *, spectrum: Sequence[float] | Tensor | np.ndarray | None = None,
              n_test: int = 1000, standardise: bool = False, dtype: torch.dtype = torch.float32) -> QuadraticExamples:
    """Make examples of f(x) = sum_i (Q x)_i^2 with standard normal entries of Q: every direction counts.  [nfa, App. I]

    x ~ N(0, I_d), or ``gaussian`` with a ``spectrum``. With S its covariance and M = Q^T Q, E[grad f grad f^T] = 4 M S M.
    ``standardise`` divides f by its deviation sqrt(2 Tr(M S M S)); the mean Tr(M S) is not subtracted.
    """
    if n < 1 or d < 1 or n_test < 1 or seed < 0:
        raise SelectionError(f"quadratic(n={n}, d={d}, seed={seed}, n_test={n_test}): one example, one dimension and a seed from "
                             f"0 on are needed.")
    z = gaussian(n, d, np.ones(d) if spectrum is None else spectrum, seed, n_test=n_test, dtype=torch.float64)
    Q = torch.from_numpy(np.random.default_rng((seed, 3)).standard_normal((d, d)))
    MS = Q.T @ Q @ z.covariance
    if standardise:
        Q = Q / (2 * (MS * MS.T).sum()) ** 0.25
    M = Q.T @ Q
    y, y_test = ((x @ Q.T).square().sum(1, keepdim=True).to(dtype) for x in (z.x, z.x_test))
    return QuadraticExamples(z.x.to(dtype), y, z.x_test.to(dtype), y_test, (4 * M @ z.covariance @ M).to(dtype), Q.to(dtype))


@dataclass(frozen=True, eq=False)
class AlignmentReversing:
    """Data in two halves, stacked along the rows."""

    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n 1"]


def alignment_reversing(n: int, d: int, balance: float, seed: int = 0, *, scale: float = 1.0, spread: float = 0.5,
                        noise: float = 1e-2, offset: float = 1e-5, raw: bool = False,
                        dtype: torch.dtype = torch.float32) -> AlignmentReversing:
    """Make data whose X^T X disagrees with X^T diag(y) X.  [nfa, App. F]

    A share ``balance`` of the rows, X1, is ``scale`` N(0, 11^T + spread I) with label 1. The others are X2 = V2 S1^-1 U1^T with
    label 0, where X1^T X1 = U1 S1 U1^T and V2 are the left singular vectors of another draw. Then ``noise`` N(0, I) is added to
    all inputs and ``offset`` to all labels. X1^T X1 is singular for fewer than d rows, so only the r = min(n1, n2, d) largest
    entries of S1 are inverted: X2^T X2 = ((X1^T X1)^+)^2 exactly for balance <= 1/2 and n1 <= d. ``raw`` inverts as many entries
    as V2 has columns, as printed; for balance below 1/2 it inverts rounding errors, which differ between machines. ``scale`` acts
    before the inversion (correlations do not depend on the scale of all of X).
    """
    n1 = round(balance * n) if math.isfinite(balance) else 0
    n2 = n - n1
    if not (min(d, n1, n2) >= 1 and seed >= 0 and scale > 0 and spread > 0 and noise >= 0
            and math.isfinite(scale + spread + noise + offset)):
        raise SelectionError(f"alignment_reversing(n={n}, d={d}, balance={balance}, seed={seed}, scale={scale}, spread={spread}, "
                             f"noise={noise}): both halves need a row (balance n between 1 and n - 1), scale and spread must be "
                             f"positive, noise not negative, the seed from 0 on.")
    draw = np.random.default_rng((seed, 4))
    X1, other = (scale * (draw.standard_normal((m, 1)) + math.sqrt(spread) * draw.standard_normal((m, d))) for m in (n1, n2))
    U1, S1, _ = np.linalg.svd(X1.T @ X1)
    V2 = np.linalg.svd(other, full_matrices=False)[0]
    r = min(n2, d) if raw else min(n1, n2, d)
    X2 = V2[:, :r] / S1[:r] @ U1[:, :r].T
    X = np.concatenate([X1, X2]) + noise * draw.standard_normal((n, d))
    y = np.concatenate([np.ones(n1), np.zeros(n2)]) + offset
    return AlignmentReversing(torch.from_numpy(X).to(dtype), torch.from_numpy(y)[:, None].to(dtype))


@dataclass(frozen=True, eq=False)
class SparseParity:
    """Examples of a parity, its coordinates, and the expected gradient outer product of its polynomial."""

    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n 1"]
    x_test: Float[Tensor, "m d"]
    y_test: Float[Tensor, "m 1"]
    egop: Float[Tensor, "d d"]
    support: tuple[int, ...]


def sparse_parity(n: int, d: int, k: int, seed: int = 0, *, support: Sequence[int] | None = None, n_test: int = 1000,
                  dtype: torch.dtype = torch.float32) -> SparseParity:
    """Make examples of f(x) = prod_{i in support} x_i with x uniform on {-1, 1}^d and |support| = k (default: drawn from
    ``seed``).

    As a polynomial, f has E[grad f grad f^T] = diag(1 on the support). Test examples and the support do not depend on ``n``.
    Examples are independent draws: for small d some occur twice, in training and in test.
    """
    if not 1 <= k <= d or n < 1 or n_test < 1 or seed < 0:
        raise SelectionError(f"sparse_parity(n={n}, d={d}, k={k}, seed={seed}, n_test={n_test}): 1 <= k <= d is needed, one "
                             f"example at least, and a seed from 0 on.")
    chosen = np.random.default_rng((seed, 2)).choice(d, k, replace=False) if support is None else support
    S = sorted(int(i) for i in chosen)
    if len(set(S)) != k or len(S) != k or S[0] < 0 or S[-1] >= d:
        raise SelectionError(f"sparse_parity(d={d}, k={k}, support={support}): the support is k different coordinates, from 0 to "
                             f"d - 1. Leave it out to have it drawn.")
    x, x_test = (torch.from_numpy(2.0 * np.random.default_rng((seed, part)).integers(0, 2, (m, d)) - 1)
                 for part, m in enumerate((n, n_test)))
    egop = torch.zeros(d, d, dtype=dtype)
    egop[S, S] = 1
    y, y_test = (z[:, S].prod(1, keepdim=True).to(dtype) for z in (x, x_test))
    return SparseParity(x.to(dtype), y, x_test.to(dtype), y_test, egop, tuple(S))


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "subtract": torch.subtract, "multiply": torch.multiply}


@dataclass(frozen=True, eq=False)
class ModularArithmetic:
    """Pairs (a, b) as two concatenated one-hot vectors; the results as one-hot targets and as class ids."""

    x: Float[Tensor, "n 2*p"]
    y: Float[Tensor, "n p"]
    labels: Int[Tensor, " n"]
    x_test: Float[Tensor, "m 2*p"]
    y_test: Float[Tensor, "m p"]
    labels_test: Int[Tensor, " m"]

    @property
    def tokens(self) -> Int[Tensor, "n 4"]:
        """Return the sequences "a o b =": numbers are their own ids, the operation is p, the equality sign p + 1."""
        return _sequences(self.x)

    @property
    def tokens_test(self) -> Int[Tensor, "m 4"]:
        """Test inputs as token sequences a + b =."""
        return _sequences(self.x_test)


def _sequences(x: Float[Tensor, "n 2*p"]) -> Int[Tensor, "n 4"]:
    """Token sequences a + b = of one-hot pairs."""
    p = x.shape[1] // 2
    a, b = x[:, :p].argmax(1), x[:, p:].argmax(1)
    return torch.stack([a, torch.full_like(a, p), b, torch.full_like(a, p + 1)], 1)


def modular_arithmetic(p: int, seed: int = 0, *, operation: Literal["add", "subtract", "multiply", "divide"] = "add",
                       share: float = 0.5, dtype: torch.dtype = torch.float32) -> ModularArithmetic:
    """Make all pairs (a, b) with (a o b) mod p. A share of them, drawn by ``seed``, is for training, the others for testing.

    x has a 1 at column a and one at column p + b; y has a 1 at column (a o b) mod p, which is also the label. ``divide`` needs a
    prime p, because otherwise most numbers have no inverse, and it leaves out the pairs with b = 0.
    """
    if operation != "divide" and operation not in OPERATIONS:
        raise unknown("modular_arithmetic", "operation", operation, (*OPERATIONS, "divide"))
    if operation == "divide" and not _prime(p):
        near = next(q for q in range(max(2, p), 2 * max(2, p)) if _prime(q))
        raise SelectionError(f"modular_arithmetic(p={p}, operation='divide'): p is no prime, and modulo p not every number has "
                             f"an inverse. Take a prime, such as {near}.")
    least = int(operation == "divide")  # smallest b
    pairs, width = p * (p - least), p - least
    n = round(share * pairs) if math.isfinite(share) else 0
    if p < 2 or not 1 <= n < pairs or seed < 0:
        raise SelectionError(f"modular_arithmetic(p={p}, seed={seed}, share={share}): p is at least 2, both parts need a pair "
                             f"(share times {pairs} pairs between 1 and {pairs - 1}), the seed is from 0 on.")
    order = torch.from_numpy(np.random.default_rng((seed, 5)).permutation(pairs))
    a, b = order // width, order % width + least
    inverses = torch.tensor([pow(i, -1, p) if i else 0 for i in range(p)]) if least else None
    labels = (OPERATIONS[operation](a, b) if inverses is None else a * inverses[b]) % p
    one = torch.eye(p, dtype=dtype)
    x, y = torch.cat([one[a], one[b]], 1), one[labels]
    return ModularArithmetic(x[:n], y[:n], labels[:n], x[n:], y[n:], labels[n:])


def _prime(p: int) -> bool:
    """Return whether p is a prime."""
    return p > 1 and all(p % k for k in range(2, math.isqrt(p) + 1))


TASKS: tuple = (chain_monomial, gaussian, power_law_gaussian, quadratic, alignment_reversing, sparse_parity, modular_arithmetic)
