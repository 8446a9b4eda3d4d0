"""How many dimensions an embedding uses: for joint-embedding self-supervised learning, which learns one dimension at a time, and
for any model whose outputs are an embedding. ``output=`` picks it from what the model returns.

    richter.measure(encoder, richter.Probe(x, None), ["embedding_rank", "embedding_collapse"])
    analyse(Z).rank, analyse(Z).eigenvalues            # the same of a matrix of embeddings [n, d]

RankMe is exp(-sum_k p_k log p_k) of p_k = s_k / sum_j s_j, with s_k the singular values of Z [n, d], which is not centred
[rankme, Eq. 1]; here without the 1e-7 that the paper adds to each p_k, whose effect is below 2e-6 for each dimension.
An embedding of n examples has at most n singular values, so with n <= d the rank of any network is underestimated. Compare it
with the rank before training (``embedding_rank_initial``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Card, Mark, Ref, Remark, SelectionError
from richter.core.arrays import Array, ArrayLike, like, to_tensor
from richter.instrument.statistics import Initial
from richter.instrument.statistics.embedding import EMBEDDING
from richter.instrument.statistics.features import Scatter
from richter.linalg import eigh
from richter.measures.cards import COUNT, EMBEDDINGS, UNIT
from richter.measures.measure import Measure

COLLAPSED = 1e-3  # relative to the largest eigenvalue of the covariance; a direction with less variance has collapsed
KEPT = 512  # eigenvalues that are stored with a number
EQUAL = "the embedding is the same for every example, so no direction has any variance"
NOTHING = "the embedding is zero for every example"


@dataclass(frozen=True)
class EmbeddingSpectrum:
    """Spectrum of an embedding Z [n, d]."""

    n: int
    eigenvalues: Array  # of the covariance [d], largest first
    rank: float  # RankMe
    collapse: float  # share of the directions that examples could span, min(d, n - 1), that have collapsed
    notes: tuple[str, ...]


def analyse(Z: ArrayLike) -> EmbeddingSpectrum:
    """Analyse embeddings ``Z`` [n, d] of n examples."""
    rows = to_tensor(Z, "Z")
    if rows.dim() != 2 or len(rows) < 2 or not rows.shape[1]:
        raise SelectionError(f"Z has shape {tuple(rows.shape)}: embeddings [n, d] of at least two examples are needed. One "
                             f"example has no variance.")
    s = Scatter.of(rows)
    return EmbeddingSpectrum(len(rows), like(eigenvalues(s), Z), rank(s), collapse(s), tuple(notes(s)))


def eigenvalues(s: Scatter) -> Float[Tensor, " d"]:
    """Eigenvalues of the covariance, largest first; zero where they are rounding errors."""
    values = eigh(s.covariance)[0].flip(0)
    return torch.where(values > len(values) * torch.finfo(values.dtype).eps * values[0], values, 0.0)


def rank(s: Scatter) -> float:
    """RankMe: exp of the entropy of the singular values.  [rankme, Eq. 1]"""
    values = eigh(s.second)[0].flip(0)
    singular = torch.where(values > len(values) * torch.finfo(values.dtype).eps * values[0], values, 0.0).sqrt()
    if not singular.any():
        return math.nan
    return math.exp(torch.special.entr(singular / singular.sum()).sum().item())


def collapse(s: Scatter) -> float:
    """Share of the directions that the examples could span whose variance is below 1e-3 of the largest."""
    values = eigenvalues(s)
    possible = min(len(values), s.n - 1)
    if not values[0] > 0 or not possible:
        return math.nan
    return 1 - min(possible, int((values >= COLLAPSED * values[0]).sum())) / possible


def notes(s: Scatter) -> list[str]:
    """Notes on the numbers of a spectrum."""
    if not s.second.diagonal().any():
        return [NOTHING]
    few = [f"{s.n} examples in {len(s.mean)} dimensions: the rank is at most {s.n}, and too low for any network; compare it with "
           f"the initial one"] if s.n <= len(s.mean) else []
    return few + ([] if s.covariance.trace() > 0 else [EQUAL])


def _remark(s: Scatter) -> Remark:
    texts = notes(s)
    return Remark(Mark.UNDEFINED if NOTHING in texts else Mark.EXACT, "; ".join(texts))


def _remark_of_variance(s: Scatter) -> Remark:
    texts = notes(s)
    return Remark(Mark.UNDEFINED if NOTHING in texts or EQUAL in texts else Mark.EXACT, "; ".join(texts))


def _kept(s: Scatter) -> dict[str, Tensor]:
    """Return the eigenvalues as an array to be stored."""
    return {"embedding_eigenvalues": eigenvalues(s)[None, :KEPT]}


MEASURES = (
    Measure("embedding_rank", rank, (EMBEDDING,), remark=_remark, arrays=_kept, card=Card(
        "rank of the embedding (RankMe)",
        "How many dimensions the model's outputs use, each weighted by its singular value.",
        rich="up", panel=EMBEDDINGS, bounds=COUNT, ref=Ref("rankme", "Eq. 1"))),
    Measure("embedding_rank_initial", rank, (Initial(EMBEDDING),), remark=_remark, card=Card(
        "rank of the initial embedding", "RankMe of the network with its initial weights, on the same examples.",
        panel=EMBEDDINGS, bounds=COUNT, ref=Ref("rankme", "Eq. 1"))),
    Measure("embedding_collapse", collapse, (EMBEDDING,), remark=_remark_of_variance, card=Card(
        "dimensional collapse",
        "The share of the embedding's directions that have hardly any variance: below 0.001 of the largest.",
        rich="down", panel=EMBEDDINGS, bounds=UNIT, whole=True, ref=Ref("ssl", "Sec. 5"))),
)
