"""Similarity of two sets of features of the same examples, from inner products of their centred Gram matrices, squared lengths of
their rows, and their eigenfunctions.

With centred features X [n, p] and Y [n, q], |X^T Y|^2 = sum_ij K_ij L_ij is n^2 times the plain estimate of HSIC. Song's debiased
estimate leaves out the diagonals and centres accordingly. For centred features this is the same number plus a correction that
needs only the squared lengths of the rows, because the other entries of a row of K sum to minus its diagonal entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
GRAM, INPUTS = "feature_gram", "inputs"  # arrays of a run: a centred Gram matrix of a layer's inputs; images of the examples
FEWEST = 4  # smallest number of rows for the debiased estimate
NOISE = 1e-12  # relative to the largest eigenvalue; a smaller one is a rounding error, and its eigenfunction is meaningless
SINGLE = 1e-6  # the same limit for a Gram matrix stored in single precision
ROUNDING = 1e-12  # a value this close to 1 is set to 1
BLOCK = 2 ** 17  # number of entries at a time


def cosine(A: NDArray[Any], B: NDArray[Any]) -> float:
    """Return <A, B> / (|A| |B|) in the Frobenius inner product; NaN if one is zero or the shapes differ.  [nfa, Eq. NFC]"""
    if A.shape != B.shape:
        return float("nan")
    sums, rows = np.zeros(3), max(1, BLOCK // max(1, math.prod(A.shape[1:])))
    for i in range(0, len(A), rows):  # in chunks, to avoid a full copy in double precision
        a, b = (M[i:i + rows].astype(np.float64).ravel() for M in (A, B))
        sums += a @ b, a @ a, b @ b
    size = math.sqrt(sums[1]) * math.sqrt(sums[2])
    return float(sums[0]) / size if size else float("nan")


def hsic(products: Any, a: Any, b: Any, debiased: bool = False) -> Any:
    """HSIC of centred features from their ``products`` |X_i^T Y_j|^2 [i, j] and the squared lengths of their rows, ``a`` [i, n]
    and ``b`` [j, n]. It is not divided by n^2, or, if debiased, by n (n - 3).  [Song et al. 2012, Eq. 5]"""
    if not debiased:
        return products
    n = a.shape[-1]
    return products - n / (n - 2) * (a @ b.T) + a.sum(-1)[:, None] * b.sum(-1) / ((n - 1) * (n - 2))


def cka(products: Numbers, own_a: Numbers, own_b: Numbers, a: Numbers, b: Numbers, debiased: bool = False) -> Numbers:
    """Return HSIC(X_i, Y_j) / sqrt(HSIC(X_i, X_i) HSIC(Y_j, Y_j)) [i, j]; ``own_a`` is |X_i^T X_i|^2 [i]. NaN if features are
    constant, or if their own debiased estimate is not positive in a small sample. If debiased, values may be below 0, and above 1
    for few rows.
    [Kornblith et al. 2019]"""
    sizes = [np.array([hsic(own[i:i + 1, None], rows[i:i + 1], rows[i:i + 1], debiased)[0, 0] for i in range(len(own))])
             for own, rows in ((own_a, a), (own_b, b))]
    sizes = [np.where(size > NOISE * rows.sum(-1) ** 2, size, np.nan) for size, rows in zip(sizes, (a, b), strict=True)]
    return _whole(np.asarray(hsic(products, a, b, debiased) / np.sqrt(sizes[0][:, None] * sizes[1]), np.float64))


def _whole(values: Numbers) -> Numbers:
    """Set values to 1 that equal 1 up to rounding errors."""
    return np.where(np.abs(values - 1) < ROUNDING, 1.0, values)


def overlap(matches: Numbers) -> float:
    """Mean squared cosine of the principal angles of two subspaces, from squared cosines between their eigenfunctions [r, s]. It
    is 1 if one contains the other, r / (n - 1) for random ones of dimension r, and NaN if one is empty."""
    return float(_whole(matches.sum() / min(matches.shape))) if min(matches.shape) else float("nan")


def angles(cosines: Numbers) -> Numbers:
    """Principal angles in degrees, smallest first, from cosines of all pairs of orthonormal functions [r, s]."""
    return np.degrees(np.arccos(np.linalg.svd(cosines, compute_uv=False).clip(0, 1)))


def leading(gram: Numbers, features: int, noise: float = NOISE) -> tuple[Numbers, Numbers]:
    """Largest eigenvalues [r] of a centred Gram matrix and their eigenfunctions on its examples [n, r]. An eigenvalue below
    ``noise`` times the largest counts as a rounding error."""
    from scipy.linalg import eigh
    n = len(gram)
    values, functions = eigh(gram, subset_by_index=(max(0, n - features), n - 1))
    values, functions = values[::-1], functions[:, ::-1]
    keep = values > noise * max(values[:1].sum(), 0.0)
    return values[keep], functions[:, keep]


def centred(gram: Any) -> Any:
    """Centred Gram matrix, C K C with C = I - 11^T/n."""
    rows = gram.mean(0)
    return gram - rows - rows[:, None] + rows.mean()


def padded(cosines: Sequence[Sequence[Numbers]], most: int) -> Numbers:
    """Join arrays [r, s] of all pairs [i][j] into one array [i, j, most, most], with NaN where a layer has fewer features."""
    whole = np.full((len(cosines), len(cosines[0]), most, most), np.nan)
    for i, row in enumerate(cosines):
        for j, c in enumerate(row):
            whole[i, j, :c.shape[0], :c.shape[1]] = c
    return whole


def padded_rows(rows: Sequence[Numbers], most: int) -> Numbers:
    """Join rows of different lengths into one array [i, most], with NaN at their ends."""
    return np.stack([np.pad(row, (0, most - len(row)), constant_values=np.nan) for row in rows])
