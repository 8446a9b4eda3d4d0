"""Leading subspaces of a real text are concepts: agreement of single dimensions with lists of words.  [qwem, concepts]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.qwem.common import counts_of
from richter.linalg import haar
from richter.report.drawing import COLOURS, caption, label, panels, points, styled
from richter.theory import word_embeddings as we

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LISTS = {
    "numbers": "one two three four five six seven eight nine ten twelve twenty thirty forty fifty hundred thousand",
    "kin": "father mother son daughter brother sister wife husband sons daughters brethren children",
    "metals": "gold silver brass iron tin lead",
    "body": "head hand foot eyes ears mouth face arm feet hands tongue lips knees",
    "tribes": "judah benjamin levi reuben gad dan asher naphtali simeon manasseh ephraim zebulun issachar",
    "food": "bread wine oil wheat corn fruit flesh flour honey milk meat",
    "beasts": "sheep goats ox oxen asses horses camels lamb rams bullock lion bear",
    "places": "jerusalem babylon egypt samaria zion galilee damascus moab edom assyria bethlehem",
}


@dataclass(frozen=True)
class QwemConceptsSettings:
    """The first ``dimensions`` of the closed form, against ``rotations`` of them; ``by`` is read by claims."""

    text: str = "kjv"
    vocabulary: int = 3_000
    dimensions: int = 50
    rotations: int = 20
    by: Literal["modes", "rotated"] = "modes"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def work(t: Task[QwemConceptsSettings], run: Writer) -> Mapping[str, ArrayLike]:
    """Agreement with each list: of the modes, and of embeddings after random rotations, the last of which is the rival."""
    s, draw = t.settings, np.random.default_rng((t.seed, 54))
    counts = counts_of(s.text, s.vocabulary)
    W = np.asarray(we.embed(we.target_matrix(counts.joint, counts.unigram), s.dimensions))
    lists = [np.isin(counts.words, words.split()) for words in LISTS.values()]
    turned = np.array([_agreement(W @ haar(s.dimensions, draw), lists) for _ in range(s.rotations + 1)])
    return {"modes": _agreement(W, lists), "rotated": turned[-1], "rotations": turned[:-1], "size": [m.sum() for m in lists]}


def _agreement(W: NDArray[np.float64], lists: list[NDArray[np.bool_]]) -> list[float]:
    """Largest share of a list among the top words of one dimension, up to its sign: twice as many as the list has."""
    order = np.argsort(W, axis=0)
    best = []
    for inside in lists:
        n = int(inside.sum())
        ends = inside[order[:2 * n]].sum(0), inside[order[-2 * n:]].sum(0)
        best.append(float(np.maximum(*ends).max() / n))
    return best


def excess(r: Results) -> float:
    """Mean over lists of the agreement, in standard deviations from its mean over random rotations."""
    seen, turned = r[r.settings.by].mean(1), r["rotations"].mean(2)
    return float(((seen - turned.mean(1)) / turned.std(1, ddof=1)).mean())


@styled
def draw(results: Results) -> Figure:
    figure, (ax,) = panels(1, across=1, width=5.6, height=3.2)
    points(ax, np.arange(len(LISTS)), results["rotations"].reshape(-1, len(LISTS)), COLOURS[5], "random rotations")
    points(ax, np.arange(len(LISTS)), results["modes"][:1], COLOURS[0], "modes of M", "s")
    label(ax, "list of words", "share among top words", legend=True)
    ax.set_xticks(range(len(LISTS)), LISTS, rotation=40)
    caption(figure, "Share of a list among the top words of the dimension that has most of it.")
    return figure


EXPERIMENT = Experiment(
    name="qwem_concepts", ref=Ref("qwem", "Concepts"), title="leading modes of a real text are concepts",
    smoke=QwemConceptsSettings(), paper=QwemConceptsSettings(vocabulary=8_000, rotations=50), over=("seed",), analysis=("by",),
    work=work, figures={"qwem_concepts": draw}, data=("kjv",), start={"seeds": (0,), "vocabulary": 500, "dimensions": 5},
    reduced="3,000 of 8,000 words", protocol="stand-in: the King James Bible for Wikipedia",
    tried="largest area under the ROC curve of one dimension, in which few top words count little: 0.57 standard deviations",
    missing={"Concepts": "Wikipedia: 2 billion words"},
    claims=(
        Claim("eight lists of words: agreement of the best dimension, in standard deviations above random rotations", excess,
              Interval(low=2.0), Control("one more random rotation", {"by": "rotated"}), source="two standard deviations",
              over="seed", says="The leading eigenvectors of M are interpretable concepts.",
              differs="no single eigenvector holds a list of words better than a random direction of the leading subspace does: "
                      "neighbouring eigenvalues of this text are close, and eigenvectors probably mix concepts"),
    ))
