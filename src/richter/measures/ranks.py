"""How many directions the weights of a layer use. From small initial weights a network goes from saddle to saddle, and at each of
them its layers are of low rank; ``measures.saddles`` reads these numbers on the plateaus of a loss.  [escape]

    rank([3.0, 1.0, 0.2])      # 2: the third is less than a tenth of the first

A rank needs a border: in floating point, and beside what is left of random initial weights, no singular value is zero. It is a
tenth of the largest, so that a direction that is left out carries less than a hundredth of the squares of the first one. The
border is a share, because weights near a saddle differ by orders of magnitude in their size, and not in their directions. The
stable rank has no border, and is no whole number: a second direction of half the size adds a quarter.
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

SHARE = 0.1  # of the largest singular value: a smaller one does not count


def rank(values: ArrayLike, share: float = SHARE) -> Any:
    """How many singular values [..., r] are at least ``share`` of the largest; 0 where all are zero."""
    s = np.asarray(values, dtype=np.float64)
    if not 0 < share <= 1:
        raise SelectionError(f"share={share!r}: a share of the largest singular value, above 0 and at most 1, is needed.")
    if s.ndim == 0 or not s.shape[-1] or not np.isfinite(s).all() or (s < 0).any():
        raise SelectionError(f"values of shape {s.shape}: singular values [..., r] are needed, one or more, finite and not "
                             f"negative.")
    return ((s >= share * s.max(-1, keepdims=True)) & (s > 0)).sum(-1)


def singular_values(W: Float[Tensor, "o i"]) -> Float[Tensor, " r"]:
    """Of W, the largest first, in units of W's largest entry, so that neither huge nor tiny weights lose them; by the smaller of
    W W^T and W^T W. Below 1e-8 of the largest they are rounding, which is far from the border of a rank."""
    A = W.double()
    size = A.abs().max()
    A = A / size if size else A
    A = A if A.shape[0] <= A.shape[1] else A.T
    return torch.linalg.eigvalsh(A @ A.T).clamp(min=0).sqrt().flip(0)


def stable_rank_of_weights(s: Float[Tensor, " r"]) -> float:
    """|W|_F^2 / |W|_2^2 = 1 / (1 - the share of squares besides the first singular value).  [escape, Thm. 3.1]"""
    return quotient(s.square().sum().item(), s[0].square().item())


def rank_of_weights(s: Float[Tensor, " r"]) -> float:
    """How many singular values are at least a tenth of the largest; NaN where all are zero."""
    return float(rank(s.cpu().numpy())) or float("nan")


SINGULAR_VALUES = Derived("singular_values", singular_values, (MATRIX,))
MEASURES = (
    Measure("stable_rank_of_weights", stable_rank_of_weights, (SINGULAR_VALUES,), card=Card(
        "stable rank of the weights",
        "Over how many directions the weights of a layer are spread, each counted by its square relative to the largest: 1 if "
        "they have one.",
        rich="down", panel=RANKS, bounds=COUNT, ref=Ref("escape", "Thm. 3.1"))),
    Measure("rank_of_weights", rank_of_weights, (SINGULAR_VALUES,), card=Card(
        "rank of the weights", "How many singular values of a layer's weights are at least a tenth of the largest.",
        rich="down", panel=RANKS, bounds=COUNT, ref=Ref("escape", "Thm. 3.1"))),
)
