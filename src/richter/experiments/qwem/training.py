"""Word embeddings of a real text trained on sampled pairs: when modes rise, and what training ends with.  [qwem, Result 3]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.qwem.common import counts_of
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.theory import word_embeddings as we

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class QwemTrainingSettings:
    """Descent in steps of ``words`` rows and columns from normal embeddings of size ``scale``, until ``modes`` are learned and a
    part of that time longer. ``rule``, ``final`` and ``staircase`` are read by claims."""

    text: str = "kjv"
    vocabulary: int = 2_000
    dimensions: int = 25
    modes: int = 20
    scale: float = 1e-4
    words: int = 250
    lr: float = 1e-4
    longer: float = 2.0
    points: int = 250
    rule: Literal["qr", "svd", "evenly"] = "qr"
    final: Literal["trained", "random"] = "trained"
    staircase: Literal["theory", "line"] = "theory"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def work(t: Task[QwemTrainingSettings], run: Writer) -> Mapping[str, ArrayLike]:
    s, draw = t.settings, np.random.default_rng((t.seed, 49))
    counts = counts_of(s.text, s.vocabulary)
    M = we.target_matrix(counts.joint, counts.unigram)
    modes = we.learnable(M, s.dimensions)
    lam, vectors = np.asarray(modes.eigenvalues), np.asarray(modes.vectors)
    W0 = s.scale * draw.standard_normal((len(counts.words), s.dimensions))
    starts = np.asarray(we.starts(vectors, W0))
    qr = np.sort(np.asarray(we.rise_times(lam, starts)))
    svd = np.sort(np.asarray(we.rise_times(lam, np.linalg.svd(W0, compute_uv=False))))
    times = np.linspace(0, s.longer * qr[s.modes - 1], s.points)
    run.progress(0.1)
    squares: list[NDArray[np.float64]] = []
    for W in we.sgd(M.toarray(), W0, times, lr=s.lr, words=s.words, seed=t.seed):
        end = W.double().numpy()
        squares.append(np.linalg.eigvalsh(end.T @ end)[::-1])
    grown = np.stack(squares, 1)
    seen = np.array([_first(times, grown[k], lam[k] / 2) for k in range(s.dimensions)])
    predicted = np.asarray(we.growth(lam, starts, times))
    overlap = {name: _overlap(vectors[:, :s.modes], Q) for name, Q in (("trained", end), ("random", W0))}
    ranks = {"seen": np.asarray(we.effective_rank(grown, lam)), "theory": np.asarray(we.effective_rank(predicted, lam))}
    ranks["line"] = np.linspace(0, ranks["seen"][-1], len(times))
    return {"seen": seen, "qr": qr, "svd": svd, "evenly": np.linspace(seen[0], np.nanmax(seen[:s.modes]), s.dimensions),
            "eigenvalues": lam, "t": times, "squares": grown, "predicted": predicted,
            **{f"overlap_{name}": value for name, value in overlap.items()},
            **{f"rank_{name}": value for name, value in ranks.items()}}


def _first(t: NDArray[np.float64], values: NDArray[np.float64], level: float) -> float:
    i = int(np.argmax(values >= level))
    if not values[i] >= level:
        return float("nan")
    return float(t[i] - (t[i] - t[i - 1]) * (values[i] - level) / (values[i] - values[i - 1])) if i else float(t[0])


def _overlap(V: NDArray[np.float64], W: NDArray[np.float64]) -> float:
    """Mean squared length of the columns of ``V`` within the column space of ``W``."""
    return float(((np.linalg.qr(W)[0].T @ V) ** 2).sum() / V.shape[1])


def time_error(r: Results) -> float:
    """Largest relative error of a half-rise time of the first modes."""
    s = r.settings
    return float(np.abs(r[s.rule] / r["seen"] - 1)[:, :s.modes].max())


def rank_error(r: Results) -> float:
    """Mean distance of the predicted effective rank from the one of training, over time."""
    return float(np.abs(r["rank_" + r.settings.staircase] - r["rank_seen"]).mean())


@styled
def draw(results: Results) -> Figure:
    figure, (left, middle, right) = panels(3, across=3)
    _, one = next(iter(results))
    for i, k in enumerate((0, 1, 3, 7, 12, 18)):
        left.plot(one["t"], one["squares"][k], color=COLOURS[i], linewidth=1.6, label="descent" if not i else None)
        line(left, one["t"], np.sort(one["predicted"], 0)[::-1][k], label="predicted" if not i else "", style="--")
    label(left, "time (steps x rate)", "squared singular values", "modes 1, 2, 4, 8, 13, 19", legend=True)
    n = results.settings.modes
    top = float(np.nanmax(results["seen"][:, :n]))
    for i, (rule, words) in enumerate({"qr": "QR rule", "svd": "singular values of W(0)"}.items()):
        points(middle, np.median(results[rule][:, :n], 0), results["seen"][:, :n], COLOURS[i], words)
    line(middle, [0, top], [0, top])
    label(middle, "predicted half-rise time", "half-rise time of descent", legend=True)
    right.step(one["t"], one["rank_seen"], color=COLOURS[0], label="descent")
    line(right, one["t"], one["rank_theory"], label="predicted", style="--")
    label(right, "time (steps x rate)", "effective rank", legend=True)
    caption(figure, "Trained on sampled pairs of a real text, embeddings learn one mode after the other, at the predicted times.")
    return figure


EXPERIMENT = Experiment(
    name="qwem_training", ref=Ref("qwem", "Result 3"), title="word embeddings of a real text learn modes at predicted times",
    smoke=QwemTrainingSettings(),
    paper=QwemTrainingSettings(text="imdb", vocabulary=10_000, dimensions=200, words=1_000, lr=2e-5, seeds=(0, 1, 2)),
    over=("seed",), analysis=("rule", "final", "staircase"), work=work, places=("Result 3", "Steps of the rank"),
    figures={"qwem_training": draw}, data=("kjv",), more_data=("imdb",),
    start={"seeds": (0,), "vocabulary": 300, "dimensions": 10, "modes": 4, "words": 100, "text": "kjv"},
    reduced="the King James Bible with 2,000 words and 25 dimensions", protocol="stand-in: film reviews (IMDB) for Wikipedia",
    tried="training for 1.3 times as long as 20 modes take: overlap 0.89, of all modes at 0.9 of their eigenvalues",
    missing={"Result 3": "Wikipedia: 2 billion words; 4 million steps", "Steps of the rank": "Wikipedia: 2 billion words"},
    claims=(
        Claim("first 20 modes: largest relative error of a half-rise time", time_error, Interval(high=0.1),
              (Control("singular values of W(0) in place of |R_kk|", {"rule": "svd"}),
               Control("evenly from the first to the last", {"rule": "evenly"})), source="bar set with the task", over="seed",
              places=("Result 3",), says="Trained embeddings follow the predicted trajectories of their singular values."),
        Claim("first 20 modes: mean squared length within the column space of the trained embeddings",
              lambda r: float(r["overlap_" + r.settings.final].min()), Interval(low=0.9),
              Control("of the initial embeddings", {"final": "random"}), paper="1 in the limit", source="Theorem 1", over="seed",
              places=("Result 3",), says="Training ends in the span of the leading eigenvectors of M."),
        Claim("effective rank: mean distance of the predicted number of learned modes from that of training", rank_error,
              Interval(high=1.0), Control("a straight line in time, with the right end", {"staircase": "line"}),
              paper="steps of one", source="half of a step on either side", over="seed", places=("Steps of the rank",),
              says="Learning is a sequence of steps, each of which raises the effective rank by one."),
    ))
