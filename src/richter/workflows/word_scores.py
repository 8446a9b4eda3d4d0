"""Scores of word vectors: analogies, similarity to human ratings, and the signal in the differences of pairs.

    scores = analogies(vectors, counts.words, richter.tasks.analogies().questions)
    scores.accuracy, scores.sections["family"]            # share of right answers, of the questions whose words are known
    similarity(vectors, counts.words, richter.tasks.analogies().wordsim353)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from richter.core import SelectionError
from richter.core.values import progress

BATCH = 512  # questions whose answers are compared at a time
Vectors = Float[np.ndarray, "V d"]


@dataclass(frozen=True)
class AnalogyScores:
    """Right answers and answered questions by section; questions with unknown words are left out."""

    sections: Mapping[str, tuple[int, int]]
    left_out: int

    @property
    def answered(self) -> int:
        """Number of questions whose four words are in the vocabulary."""
        return sum(n for _, n in self.sections.values())

    @property
    def accuracy(self) -> float:
        """Share of right answers; NaN if there is no question."""
        return sum(right for right, _ in self.sections.values()) / self.answered if self.answered else float("nan")


def analogies(vectors: Vectors, words: Sequence[str], questions: Iterable[tuple[str, str, str, str, str]]) -> AnalogyScores:
    """Answer questions (section, a, b, c, d): the word whose vector has the largest cosine with b - a + c, of unit vectors,
    except a, b and c themselves, should be d. Questions are read in lower case."""
    unit, number = _unit(vectors, words)
    known: dict[str, list[list[int]]] = {}
    left_out = 0
    for section, *four in questions:
        rows = [number.get(w.lower(), -1) for w in four]
        known.setdefault(section, [])
        if min(rows) < 0:
            left_out += 1
        else:
            known[section].append(rows)
    sections = {}
    for section, rows in progress(known.items(), title="analogies", unit="section"):
        right = 0
        for start in range(0, len(rows), BATCH):
            a, b, c, d = np.array(rows[start:start + BATCH]).T
            likeness = (unit[b] - unit[a] + unit[c]) @ unit.T
            for used in (a, b, c):
                likeness[np.arange(len(a)), used] = -np.inf
            right += int((likeness.argmax(1) == d).sum())
        sections[section] = (right, len(rows))
    return AnalogyScores(sections, left_out)


def similarity(vectors: Vectors, words: Sequence[str], pairs: Iterable[tuple[str, str, float]]) -> float:
    """Rank correlation (Spearman) of cosines with human ratings, over pairs whose words are known; NaN for fewer than three."""
    from scipy.stats import spearmanr
    unit, number = _unit(vectors, words)
    known = [(number[a.lower()], number[b.lower()], rating) for a, b, rating in pairs
             if a.lower() in number and b.lower() in number]
    if len(known) < 3:
        return float("nan")
    a, b, ratings = (np.array(column) for column in zip(*known, strict=True))
    return float(spearmanr((unit[a] * unit[b]).sum(1), ratings).statistic)


def signal(vectors: Vectors, pairs: Sequence[tuple[int, int]]) -> float:
    """Signal-to-noise ratio of task vectors w_b - w_a of pairs (a, b): largest eigenvalue of their Gram matrix over the mean of
    its nonzero eigenvalues. It is 1 if the vectors have no common direction, and their number if they are parallel."""
    if len(pairs) < 2:
        raise SelectionError(f"{len(pairs)} pairs: two or more are needed to see what they have in common.")
    a, b = np.array(pairs).T
    R = np.asarray(vectors)[b] - np.asarray(vectors)[a]
    squares = np.linalg.svd(R, compute_uv=False) ** 2
    rank = int((squares > squares[0] * len(R) * np.finfo(float).eps).sum())
    return float(squares[0] * min(rank, *R.shape) / squares.sum())


def _unit(vectors: Vectors, words: Sequence[str]) -> tuple[NDArray[np.float64], dict[str, int]]:
    W = np.asarray(vectors, np.float64)
    if W.ndim != 2 or len(W) != len(words):
        raise SelectionError(f"vectors of shape {W.shape} for {len(words)} words: give one row for each word.")
    lengths = np.linalg.norm(W, axis=1, keepdims=True)
    return W / np.where(lengths > 0, lengths, 1), {word: i for i, word in enumerate(words)}
