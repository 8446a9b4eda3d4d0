"""The cosine of two matrices of numbers. Of tensors, and as a measure: richter.measures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def cosine(A: NDArray[Any], B: NDArray[Any]) -> float:
    """<A, B> / (|A| |B|) in the Frobenius inner product; NaN if one is zero or their shapes differ.  [nfa, Eq. NFC]"""
    if A.shape != B.shape:
        return float("nan")
    a, b = A.astype(np.float64).ravel(), B.astype(np.float64).ravel()
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size else float("nan")
