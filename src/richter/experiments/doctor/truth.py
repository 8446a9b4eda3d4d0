"""Correct verdict on a training, found by means that the verdict may not use: the linearised network trained on the same
batches, ridge regression on the features before and after, and examples that neither network was trained on."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int
from sklearn.linear_model import RidgeCV
from torch import Tensor

from richter.experiments.doctor.cases import FAILED

LAZY, RICH, AMPLIFIED = 0.06, 0.15, 0.2  # edges of D
TURNED, KEPT = 0.2, 0.1  # edges of the gain
DEVIATIONS = 5.0  # by which an accuracy is above that of guessing


def departure(f: Float[Tensor, ...], f_lin: Float[Tensor, ...]) -> float:
    """D = |f - f_lin| / (|f| + |f_lin|) of the outputs on test examples."""
    f, f_lin = f.double(), f_lin.double()
    return ((f - f_lin).norm() / (f.norm() + f_lin.norm())).item()


def ridge_error(h: Float[Tensor, "n d"], y: Int[Tensor, " n"], h_test: Float[Tensor, "m d"], y_test: Int[Tensor, " m"],
                classes: int) -> float:
    """The squared test error of ridge regression from features to one-hot labels, its penalty chosen by leaving one out."""
    a, b = (v.double().cpu().numpy() for v in (h, h_test))
    scale = math.sqrt(float(a.var(0).mean())) or 1.0
    labels = np.eye(classes)
    fit = RidgeCV(alphas=np.logspace(-8, 2, 11) * len(a)).fit(a / scale, labels[y.cpu().numpy()])
    return float(np.square(fit.predict(b / scale) - labels[y_test.cpu().numpy()]).mean())


def above_chance(correct: float, n: int, classes: int) -> bool:
    """Return whether the share of n test examples that are classified correctly is above chance."""
    chance = 1 / classes
    return correct > chance + DEVIATIONS * math.sqrt(chance * (1 - chance) / n)


def correct_words(D: float, gain: float, learned: bool) -> tuple[str, ...]:
    """Words that are correct: decided by whether anything was learned, then by D and the gain. Between two regions the words
    of both are correct."""
    if not learned:
        return FAILED
    if D < LAZY:
        return "lazy", "probably lazy"
    if D <= RICH:
        return "lazy", "probably lazy", "uncertain", "rich"
    if gain >= TURNED:
        return ("rich",)
    return ("uncertain", "amplified") if D > AMPLIFIED and gain < KEPT else ("uncertain", "amplified", "rich")
