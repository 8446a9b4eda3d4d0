"""The cosine of two matrices of numbers. Of tensors, and as a measure: richter.measures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 2 ** 17  # entries at a time


def cosine(A: NDArray[Any], B: NDArray[Any]) -> float:
    """<A, B> / (|A| |B|) in the Frobenius inner product; NaN if one is zero or their shapes differ.  [nfa, Eq. NFC]"""
    if A.shape != B.shape:
        return float("nan")
    sums, rows = np.zeros(3), max(1, BLOCK // max(1, math.prod(A.shape[1:])))
    for i in range(0, len(A), rows):  # no copy of all in double precision
        a, b = (M[i:i + rows].astype(np.float64).ravel() for M in (A, B))
        sums += a @ b, a @ a, b @ b
    size = math.sqrt(sums[1]) * math.sqrt(sums[2])
    return float(sums[0]) / size if size else float("nan")
