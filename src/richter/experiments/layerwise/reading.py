"""What claims and drawings of chapter 7 of [layerwise] read out of trainings (`evolution.work`): numbers, correlations."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import spearmanr

from richter.experiments.frame import Results
from richter.experiments.layerwise.evolution import CLASSES


def when(r: Results, look: int = -1) -> Results:
    """The same tasks at one look only, the last or another."""
    return Results(r.settings, r.tasks, [{name: rows[look] for name, rows in arrays.items()} for _, arrays in r])


def read_at(r: Results, name: str) -> NDArray[np.float64]:
    """A number of each task after training; before it, where untrained networks are the subject."""
    return when(r, 0 if r.settings.subject == "untrained" else -1)[name]


def rank_correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's; 0 where one of them does not vary, which says nothing of the other."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(spearmanr(a, b).statistic)


def flatness(r: Results) -> NDArray[np.float64]:
    """Over how many of the features 2 to C the intensity is spread, as a share of them: 1 if they are all as strong."""
    rho = read_at(r, "intensity")[:, 1:CLASSES]
    share = rho / rho.sum(1, keepdims=True)
    return np.exp(-(share * np.log(share)).sum(1)) / (CLASSES - 1)


def strength_top(r: Results) -> NDArray[np.float64]:
    """The share of the first C features in all intensity but that of the first, which is nearly constant."""
    rho = read_at(r, "intensity")[:, 1:]
    return rho[:, :CLASSES - 1].sum(1) / rho.sum(1)


def of_features(r: Results, a: str, b: str, seed: int = 0) -> float:
    """The rank correlation over the features of one network of two of quality, utilisation and intensity: after training, before
    it where untrained networks are the subject, with features in a random order of one of them where that is."""
    x, y = read_at(r, a)[0], read_at(r, b)[0]
    strong = read_at(r, "intensity")[0] > 0
    x, y = x[strong], y[strong]
    return rank_correlation(x, np.random.default_rng(seed).permutation(y) if r.settings.subject == "shuffled" else y)


def gained(r: Results, a: str, b: str) -> float:
    """What that correlation gained by training."""
    before, after = (of_features(when_only(r, look), a, b) for look in (0, 0 if r.settings.subject == "untrained" else -1))
    return after - before


def when_only(r: Results, look: int) -> Results:
    """One look, as if there were no other."""
    return Results(r.settings, r.tasks, [{name: rows[look][None] for name, rows in arrays.items()} for _, arrays in r])
