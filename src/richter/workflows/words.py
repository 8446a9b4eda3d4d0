"""Concepts of a corpus in the order in which word embeddings learn them. ``words(files)`` counts how often words occur together,
and solves the quadratic model of word2vec: which concepts there are, when each is learned, and the vectors that training ends
with.

    seen = richter.workflows.words("reviews.txt", lines=True)
    print(seen)                                # concepts, times, words
    print(seen.follow("actor"))                # when the meaning of one word is resolved, and by which concepts
    seen.plot().savefig("words.png")           # the spectrum and the growth of each concept
    seen.save("vectors.txt")                   # in word2vec's text format
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from richter.core import SelectionError
from richter.core.values import few_of, table, visible
from richter.tasks.cooccurrence import Counts, Path_, count
from richter.theory import word_embeddings
from richter.theory.arrays import above_zero, whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE = 1e-4  # standard deviation of initial embeddings
SHOWN = 20  # concepts of a table
TOP = 8  # words of a concept
CURVES = 12  # concepts of a figure
POLE = 0.5  # the other side of a concept is named if its words have so much of the largest entry
RESOLVED = (0.1, 0.5, 0.9)  # shares of a word's final squared length


@dataclass(frozen=True, eq=False)
class CorpusConcepts:
    """Leading concepts of a corpus: eigenvectors [V, d] of the target matrix, with eigenvalues [d], and the predicted times [d]
    at which training from embeddings of size ``scale`` has learned half of each."""

    counts: Counts
    eigenvalues: Float[np.ndarray, " d"]
    vectors: Float[np.ndarray, "V d"]
    square: float  # |M|^2
    scale: float

    @property
    def start(self) -> Float[np.ndarray, " d"]:
        """Typical s_k(0) of random embeddings: by the QR rule a chi variable with d - k + 1 degrees of freedom."""
        d = len(self.eigenvalues)
        return self.scale * np.sqrt(d - np.arange(d) - 0.5)

    @property
    def times(self) -> Float[np.ndarray, " d"]:
        """Times of half rise, in units of the flow dW / dt = (M - W W^T) W / 2."""
        return np.asarray(word_embeddings.rise_times(self.eigenvalues, self.start))

    @property
    def embeddings(self) -> Float[np.ndarray, "V d"]:
        """The vectors that training ends with."""
        return self.vectors * np.sqrt(self.eigenvalues)

    def growth(self, t: Float[np.ndarray, " t"]) -> Float[np.ndarray, "d t"]:
        """Squared size of each concept at times ``t``."""
        return np.asarray(word_embeddings.growth(self.eigenvalues, self.start, t))

    def poles(self, concept: int, top: int = TOP) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Words with the largest entries of a concept, and those on its other side, if they have entries of that size too."""
        v = self.vectors[:, concept]
        order = np.argsort(-v, kind="stable")
        ahead = tuple(self.counts.words[i] for i in order[:top] if v[i] > 0)
        behind = tuple(self.counts.words[i] for i in order[::-1][:top] if v[i] < 0)
        return ahead, behind if -v.min() >= POLE * v.max() else ()

    @cached_property
    def order(self) -> list[int]:
        """Concepts in the order in which they are learned."""
        return [int(k) for k in np.argsort(self.times, kind="stable")]

    def __str__(self) -> str:
        return self.shown(SHOWN)

    def shown(self, concepts: int = SHOWN, top: int = TOP) -> str:
        """Return the table of the first ``concepts``. Times are in units of the first one."""
        first, rows = self.times[self.order[0]], [["concept", "time", "eigenvalue", "loss", "words"]]
        levels = np.asarray(word_embeddings.plateaus(self.eigenvalues[self.order], self.square)) / (self.square / 4)
        for number, k in enumerate(self.order[:concepts]):
            ahead, behind = self.poles(k, top)
            words = visible(", ".join(ahead) + (f"  |  {', '.join(behind)}" if behind else ""), lines=False)
            rows.append([str(number + 1), f"{self.times[k] / first:.2f}", f"{self.eigenvalues[k]:.4g}",
                         f"{levels[number + 1]:.3f}", words])
        c = self.counts
        head = (f"{int(c.frequency.sum()) + c.left_out:,} words, {len(c.words):,} different ones in the vocabulary "
                f"({c.left_out / (c.frequency.sum() + c.left_out):.1%} of the text outside it), {c.pairs.nnz:,} different pairs "
                f"within {c.window} words")
        return f"{head}\n\n{table(rows, right=(0, 1, 2, 3))}"

    def follow(self, word: str) -> FollowedWord:
        """Return when the meaning of a word is resolved: how its vector grows, concept by concept."""
        return FollowedWord(self, self.counts.index(word.lower()))

    def plot(self) -> Figure:
        """Draw the spectrum, and the predicted growth of the first concepts."""
        from richter.report.drawing import COLOURS, caption, label, panels, styled

        @styled
        def draw() -> Figure:
            figure, (left, right) = panels(2, across=2, width=4.6, height=3.3)
            ranks = np.arange(1, len(self.eigenvalues) + 1)
            left.plot(ranks, self.eigenvalues, "o-", color=COLOURS[0], markersize=2.5, linewidth=1)
            label(left, "rank", "eigenvalue of the target matrix", log="xy")
            shown = self.order[:CURVES]
            t = np.linspace(0, 1.25 * self.times[shown].max(), 600)
            unit = self.times[self.order[0]]
            for i, (k, curve) in enumerate(zip(shown, self.growth(t)[shown], strict=True)):
                names = ", ".join(self.poles(k, 2)[0])
                right.plot(t / unit, curve, color=COLOURS[i % len(COLOURS)], linewidth=1.2,
                           label=visible(f"{i + 1}: {names}", lines=False).replace("$", r"\$"))
            label(right, "time / time of the first concept", "squared size of a concept")
            right.legend(frameon=False, fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.02))
            caption(figure, "Concepts are learned one after the other, those with the largest eigenvalues first; the text alone "
                            "says which, and when.")
            return figure

        return draw()

    def save(self, path: Path_) -> None:
        """Write the vectors in word2vec's text format, which gensim reads (KeyedVectors.load_word2vec_format)."""
        save_vectors(path, self.counts.words, self.embeddings)

    def to_json(self) -> dict[str, Any]:
        """Return concepts and their words for machines."""
        return {"words": len(self.counts.words), "pairs": int(self.counts.pairs.nnz), "left_out": self.counts.left_out,
                "scale": self.scale, "concepts": [
                    {"time": float(self.times[k]), "eigenvalue": float(self.eigenvalues[k]), "words": self.poles(k)[0],
                     "against": self.poles(k)[1]} for k in self.order]}


@dataclass(frozen=True, eq=False)
class FollowedWord:
    """Growth of the vector of one word: sum_k v_k^2 s_k^2(t) for its entries v_k of the concepts."""

    seen: CorpusConcepts
    number: int

    @property
    def shares(self) -> Float[np.ndarray, " d"]:
        """Share of each concept in the final squared length of the vector."""
        parts = self.seen.vectors[self.number] ** 2 * self.seen.eigenvalues
        return np.asarray(parts / parts.sum())

    def resolved(self, share: float) -> float:
        """Time at which the vector has this share of its final squared length."""
        def grown(t: float) -> float:
            squares = self.seen.growth(np.array([t]))[:, 0]
            return float((self.shares * squares / self.seen.eigenvalues).sum())
        low, high = 0.0, float(self.seen.times.max() * 4)
        for _ in range(80):
            low, high = ((low + high) / 2, high) if grown((low + high) / 2) < share else (low, (low + high) / 2)
        return high

    def neighbours(self, t: float, top: int = 5) -> list[str]:
        """Return the words whose vectors point in the most similar directions at a time."""
        W = self.seen.vectors * np.sqrt(self.seen.growth(np.array([t]))[:, 0])
        lengths = np.linalg.norm(W, axis=1)
        likeness = W @ W[self.number] / np.where(lengths > 0, lengths, math.inf)
        likeness[self.number] = -math.inf
        return [self.seen.counts.words[i] for i in np.argsort(-likeness, kind="stable")[:top]]

    def __str__(self) -> str:
        seen, unit = self.seen, self.seen.times[self.seen.order[0]]
        word, place = visible(seen.counts.words[self.number], lines=False), {k: i + 1 for i, k in enumerate(seen.order)}
        rows = [["resolved", "time", "neighbours then"]]
        for share in RESOLVED:
            t = self.resolved(share)
            rows.append([f"{share:.0%}", f"{t / unit:.2f}", visible(", ".join(self.neighbours(t)), lines=False)])
        parts = [["concept", "time", "share", "words"]]
        for k in sorted(np.argsort(-self.shares, kind="stable")[:5], key=lambda k: place[int(k)]):
            k = int(k)
            side = seen.poles(k, 5)[0] if seen.vectors[self.number, k] > 0 else tuple(
                seen.counts.words[i] for i in np.argsort(seen.vectors[:, k], kind="stable")[:5])
            parts.append([str(place[k]), f"{seen.times[k] / unit:.2f}", f"{self.shares[k]:.0%}",
                          visible(", ".join(side), lines=False)])
        return (f"{word!r} occurs {int(seen.counts.frequency[self.number]):,} times\n\n{table(rows, right=(0, 1))}\n\n"
                f"its largest concepts:\n{table(parts, right=(0, 1, 2))}")


def words(files: Sequence[Path_] | Path_ | Counts, *, dimensions: int = 100, scale: float = SCALE, vocabulary: int = 10_000,
          window: int = 16, least: int = 5, lines: bool = False, folder: Path_ | None = None, workers: int = 1) -> CorpusConcepts:
    """Count the words of text files (or take ``Counts``) and predict what embeddings with ``dimensions`` learn, in which order.

    ``scale``: standard deviation of the initial embeddings; the smaller it is, the clearer concepts are apart in time. The other
    arguments are those of ``richter.tasks.cooccurrence.count``."""
    whole(dimensions=dimensions)
    above_zero("the size of initial embeddings", scale=scale)
    if scale >= 0.1:
        raise SelectionError(f"scale={scale:g}: from embeddings of this size concepts are learned at once, and have no order. "
                             f"Take 0.01 or less.")
    counts = files if isinstance(files, Counts) else count(files, vocabulary=vocabulary, window=window, least=least, lines=lines,
                                                           folder=folder, workers=workers)
    if dimensions > len(counts.words):
        raise SelectionError(f"{dimensions} dimensions for a vocabulary of {len(counts.words)} words (those that occur {least} "
                             f"times or more): take {len(counts.words)} or fewer, or more text.")
    M = word_embeddings.target_matrix(counts.joint, counts.unigram)
    modes = word_embeddings.learnable(M, dimensions)
    return CorpusConcepts(counts, np.asarray(modes.eigenvalues), np.asarray(modes.vectors), M.square, float(scale))


def save_vectors(path: Path_, names: Sequence[str], vectors: Float[np.ndarray, "V d"]) -> None:
    """Write vectors in word2vec's text format: a line with their number and length, then a word and its numbers in each line."""
    if spaced := [name for name in names if len(name.split()) != 1]:
        raise SelectionError(f"the words {few_of([repr(name) for name in spaced])} hold spaces or nothing, and in this format a "
                             f"space ends a word.")
    with Path(path).open("w", encoding="utf-8", newline="\n") as out:
        out.write(f"{len(names)} {vectors.shape[1]}\n")
        for name, row in zip(names, vectors.tolist(), strict=True):
            out.write(f"{name} {' '.join(map('{:.6g}'.format, row))}\n")
