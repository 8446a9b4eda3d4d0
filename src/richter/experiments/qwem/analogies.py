"""How and when analogies are learned: the signal of task vectors by rank, and the order of categories.  [qwem, analogies]

A planted text has categories of entities in two roles (king, queen; duke, duchess; ...). A word of an entity occurs with the
context of the entity, which both roles share, and with that of its role. The larger the contexts of entities are, the earlier
their category should be learned; frequencies are drawn independently of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import spearmanr

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, band, caption, label, panels, points, styled
from richter.theory import word_embeddings as we
from richter.workflows.word_scores import analogies, signal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Question = tuple[str, str, str, str, str]
ROLE = 12  # words of the context of a role


@dataclass(frozen=True)
class QwemAnalogiesSettings:
    """``background``: share of pairs of independent words; ``noise``: of the logarithm of each probability. ``by`` and
    ``vectors`` are read by claims."""

    categories: int = 6
    entities: int = 8
    background: float = 0.3
    noise: float = 0.3
    scale: float = 1e-3
    steps: int = 2_000
    words: int = 150
    by: Literal["theory", "frequency"] = "theory"
    vectors: Literal["closed", "random"] = "closed"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def text(s: QwemAnalogiesSettings, seed: int) -> tuple[NDArray[np.float64], list[str], list[Question], NDArray[np.float64]]:
    """Joint probabilities, words, questions, and the frequency of each category."""
    draw = np.random.default_rng((seed, 52))
    contexts = draw.permutation(np.arange(2, 2 + s.categories)) * 2
    frequency = draw.permutation(1.6 ** np.arange(s.categories))
    number: dict[str, int] = {}
    pairs: list[tuple[str, str, float]] = []
    for c in range(s.categories):
        for e in range(s.entities):
            own = [f"c{c}e{e}x{j}" for j in range(contexts[c])]
            pairs += [(f"c{c}e{e}r{r}", x, 1 / len(own)) for r in (0, 1) for x in own]
            pairs += [(x, y, 1 / len(own) ** 2) for x in own for y in own if x < y]
            pairs += [(f"c{c}e{e}r{r}", f"c{c}r{r}y{j}", 1 / ROLE) for r in (0, 1) for j in range(ROLE)]
    for a, b, _ in pairs:
        number.setdefault(a, len(number))
        number.setdefault(b, len(number))
    P = np.zeros((len(number), len(number)))
    for a, b, share in pairs:
        P[number[a], number[b]] += share * frequency[int(a[1:a.index("e")])]
    P = (P + P.T) / (2 * P.sum())
    p = P.sum(1)
    N = draw.standard_normal(P.shape)
    P = ((1 - s.background) * P + s.background * np.outer(p, p)) * np.exp(s.noise * (N + N.T) / np.sqrt(2))
    asked = [(f"c{c}", f"c{c}e{e}r0", f"c{c}e{e}r1", f"c{c}e{f}r0", f"c{c}e{f}r1")
             for c in range(s.categories) for e in range(s.entities) for f in range(s.entities) if e != f]
    return P / P.sum(), list(number), asked, frequency


def work(t: Task[QwemAnalogiesSettings], run: Writer) -> Mapping[str, ArrayLike]:
    """Accuracy and signal of categories by rank, and along descent on sampled pairs."""
    s, draw = t.settings, np.random.default_rng((t.seed, 53))
    P, names, asked, frequency = text(s, t.seed)
    M = np.asarray(we.target_matrix(P, P.sum(1)))
    d = s.categories * (s.entities + 2) - 1  # of entities, roles and categories, without their common mean
    modes = we.leading(M, d)
    lam, vectors = np.asarray(modes.eigenvalues), np.asarray(modes.vectors)
    tasks = [[(names.index(f"c{c}e{e}r0"), names.index(f"c{c}e{e}r1")) for e in range(s.entities)] for c in range(s.categories)]
    W = {"closed": vectors * np.sqrt(lam), "random": draw.standard_normal(vectors.shape)}
    ranks = range(1, d + 1)
    signals = {name: np.array([[signal(w[:, :k], pairs) for pairs in tasks] for k in ranks]) for name, w in W.items()}
    by_rank = np.array([_shares(W["closed"][:, :k], names, asked) for k in ranks])
    W0 = s.scale * draw.standard_normal((len(names), d))
    rises = np.sort(np.asarray(we.rise_times(lam, we.starts(vectors, W0))))
    times = np.linspace(0, 1.2 * rises[-1], 100)
    run.progress(0.3)
    trained = np.array([_shares(np.asarray(w.double()), names, asked)
                        for w in we.sgd(M, W0, times, lr=float(rises[-1] / s.steps), words=s.words, seed=t.seed)])
    learned = [min(d - 1, _late(by_rank[:, c])) for c in range(s.categories)]
    return {"theory": rises[learned], "frequency": 1 / frequency,
            "seen": [times[min(len(times) - 1, _late(trained[:, c]))] for c in range(s.categories)],
            **{f"signal_{name}": value for name, value in signals.items()}, "accuracy": by_rank, "trained": trained, "t": times}


def _shares(W: NDArray[np.float64], names: Sequence[str], asked: Sequence[Question]) -> list[float]:
    return [right / n for right, n in analogies(W, names, asked).sections.values()]


def _late(accuracy: NDArray[np.float64]) -> int:
    """Number of the first entry from which on half of the questions are answered."""
    below = np.flatnonzero(accuracy < 0.5)
    return int(below[-1]) + 1 if len(below) else 0


def order(r: Results) -> float:
    """Mean rank correlation of the times of categories with those that are predicted."""
    return float(np.mean([spearmanr(a, b).statistic for a, b in zip(r[r.settings.by], r["seen"], strict=True)]))


def fall(r: Results) -> float:
    """Highest signal over the last one; 0 if the highest is the first or the last, or not above half of its bound, the number of
    pairs."""
    mean = r["signal_" + r.settings.vectors].mean((0, 2))
    top = int(mean.argmax())
    return float(mean[top] / mean[-1]) if 0 < top < len(mean) - 1 and mean[top] > r.settings.entities / 2 else 0.0


@styled
def draw(results: Results) -> Figure:
    figure, (left, middle, right) = panels(3, across=3)
    ranks = np.arange(1, results["accuracy"].shape[1] + 1)
    for i, name in enumerate(("closed", "random")):
        words = {"closed": "closed form", "random": "random vectors"}[name]
        band(left, ranks, results[f"signal_{name}"].mean(2), COLOURS[i], words)
    label(left, "dimensions", "signal-to-noise ratio of task vectors", legend=True)
    _, one = next(iter(results))
    for c, curve in enumerate(one["trained"].T):
        middle.plot(one["t"], curve, color=COLOURS[c % len(COLOURS)], linewidth=1.2)
    label(middle, "time (steps x rate)", "share of right answers", "categories along descent, one seed")
    for i, name in enumerate(results.distinct("seed")):
        one_seed = results.where(seed=name)
        points(right, one_seed["theory"][0], one_seed["seen"], COLOURS[i % len(COLOURS)])
    label(right, "predicted time of a category", "time in descent")
    caption(figure, "The signal of task vectors rises with the dimensions, and falls after its peak; categories are learned "
                    "about when the rank that they need is predicted.")
    return figure


EXPERIMENT = Experiment(
    name="qwem_analogies", ref=Ref("qwem", "Analogies"), title="how and when analogies are learned",
    smoke=QwemAnalogiesSettings(), paper=QwemAnalogiesSettings(categories=8, entities=12, steps=4_000, words=250),
    over=("seed",), analysis=("by", "vectors"), work=work, figures={"qwem_analogies": draw},
    start={"seeds": (0,), "categories": 2, "entities": 3, "steps": 100, "words": 30}, reduced="six categories of eight pairs",
    protocol="stand-in: a planted text for Wikipedia and Google's analogies",
    claims=(
        Claim("signal-to-noise ratio of task vectors: its peak over its value at the largest rank", fall, Interval(low=1.01),
              Control("random vectors", {"vectors": "random"}), source="11.5 / 10.9 in an independent check", over="seed",
              says="With the dimensions the signal of task vectors rises, and then falls."),
        Claim("order in which categories are learned: rank correlation of predicted and observed times", order, Interval(low=0.5),
              Control("more frequent categories first", {"by": "frequency"}), source="more than half way from chance to perfect",
              over="seed", own=True),
    ))
