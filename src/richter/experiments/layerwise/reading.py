"""What claims and drawings of chapter 7 of [layerwise] read out of trainings (`evolution.work`): numbers, correlations; and the
controls of these claims, which read something else out of the same trainings."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import spearmanr

from richter.experiments.frame import Control, Results
from richter.experiments.layerwise.evolution import CLASSES

UNTRAINED = Control("untrained networks", {"subject": "untrained"})
SHIFTED = Control("kappa of another training beside each error", {"subject": "shifted"})
TRAINING = Control("the training loss in the place of kappa", {"subject": "training"})


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


def following(r: Results, name: str = "kappa_cka") -> float:
    """The rank correlation over trainings of kappa, or of another number, with the test error."""
    last = when(r)
    values = last["loss_fit" if r.settings.subject == "training" else name]
    return rank_correlation(np.roll(values, 1) if r.settings.subject == "shifted" else values, 1 - last["accuracy"])


def better(r: Results) -> float:
    """Kappa's rank correlation with the test error, less the larger of two rivals': training loss and norm of the weights."""
    return following(r) - max(following(r, "loss_fit"), following(r, "norm"))


def of_the_tightest(r: Results) -> float:
    """The test accuracy of the training with the smallest kappa, less that of the one with the largest."""
    kappa, accuracy = read_at(r, "kappa_cka"), read_at(r, "accuracy")
    if r.settings.subject == "shifted":
        kappa = np.roll(kappa, 1)
    return float(accuracy[kappa.argmin()] - accuracy[kappa.argmax()])


def flatness(r: Results) -> NDArray[np.float64]:
    """Over how many of the features 2 to C the intensity is spread, as a share of them: 1 if they are all as strong."""
    rho = read_at(r, "intensity")[:, 1:CLASSES]
    share = rho / rho.sum(1, keepdims=True)
    return np.exp(-(share * np.log(share)).sum(1)) / (CLASSES - 1)


def strength_top(r: Results) -> NDArray[np.float64]:
    """The share of the first C features in all intensity but that of the first, which is nearly constant."""
    rho = read_at(r, "intensity")[:, 1:]
    return rho[:, :CLASSES - 1].sum(1) / rho.sum(1)
