"""Number of directions that the weights of a layer use. From small initial weights a network goes from saddle to saddle, and at
each saddle its layers have low rank; ``measures.saddles`` reads these numbers on the plateaus of a loss.  [escape]

    rank([3.0, 1.0, 0.2])      # 2: the third is less than a tenth of the first

A numerical rank needs a threshold, because no singular value is exactly zero in floating point and with random initial weights.
It is a tenth of the largest singular value, so an ignored direction has less than a hundredth of the first one's square. The
threshold is relative, because weights near a saddle differ by orders of magnitude in size but not in direction. The stable rank
needs no threshold and is not an integer: a second direction of half the size adds a quarter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor

from richter.core import Card, Ref, SelectionError
from richter.instrument.statistics import MATRIX, Derived
from richter.linalg import quotient
from richter.measures.cards import COUNT, RANKS
from richter.measures.measure import Measure

SHARE = 0.1  # relative to the largest singular value; smaller ones do not count


def rank(values: ArrayLike, share: float = SHARE) -> Any:
    """Count the singular values [..., r] that are at least ``share`` of the largest; 0 if all are zero."""
    s = np.asarray(values, dtype=np.float64)
    if not 0 < share <= 1:
        raise SelectionError(f"share={share!r}: give a share of the largest singular value, above 0 and at most 1.")
    if s.ndim == 0 or not s.shape[-1] or not np.isfinite(s).all() or (s < 0).any():
        raise SelectionError(f"values of shape {s.shape}: give one or more singular values [..., r], finite and not "
                             f"negative.")
    return ((s >= share * s.max(-1, keepdims=True)) & (s > 0)).sum(-1)


def singular_values(W: Float[Tensor, "o i"]) -> Float[Tensor, " r"]:
    """Singular values of W, largest first, in units of W's largest entry so that squares neither overflow nor underflow, from the
    smaller of W W^T and W^T W. Values below 1e-8 of the largest are rounding errors, far below the threshold of a rank."""
    A = W.double()
    size = A.abs().max()
    A = A / size if size else A
    A = A if A.shape[0] <= A.shape[1] else A.T
    return torch.linalg.eigvalsh(A @ A.T).clamp(min=0).sqrt().flip(0)


def stable_rank_of_weights(s: Float[Tensor, " r"]) -> float:
    """Return |W|_F^2 / |W|_2^2 = 1 / (1 - the share of squares outside the first singular value).  [escape, Thm. 3.1]"""
    return quotient(s.square().sum().item(), s[0].square().item())


def rank_of_weights(s: Float[Tensor, " r"]) -> float:
    """Count the singular values that are at least a tenth of the largest; NaN if all are zero."""
    return float(rank(s.cpu().numpy())) or float("nan")


SINGULAR_VALUES = Derived("singular_values", singular_values, (MATRIX,))
MEASURES = (
    Measure("stable_rank_of_weights", stable_rank_of_weights, (SINGULAR_VALUES,), card=Card(
        "stable rank of the weights",
        "The effective number of directions of a layer's weights, each weighted by its square relative to the largest: 1 if "
        "there is one.",
        rich="down", panel=RANKS, bounds=COUNT, ref=Ref("escape", "Thm. 3.1"))),
    Measure("rank_of_weights", rank_of_weights, (SINGULAR_VALUES,), card=Card(
        "rank of the weights", "The number of singular values of a layer's weights that are at least a tenth of the largest.",
        rich="down", panel=RANKS, bounds=COUNT, ref=Ref("escape", "Thm. 3.1"))),
)
