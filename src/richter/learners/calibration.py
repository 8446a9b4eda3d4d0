"""Calibrated probabilities from the outputs of a classifier, fitted on held-out rows."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize_scalar
from torch import Tensor

from richter.learners.scores import classes, logits, temperature


def probabilities(f: Float[Tensor, "n c"], temperature: float, doubt: float,
                  frequencies: Float[Tensor, " k"]) -> Float[Tensor, "n k"]:
    """Return P = (1 - doubt) softmax(T f) + doubt q, with class frequencies q.

    The doubt limits how certain a probability can be, because finitely many rows cannot show that a model is never wrong. At
    doubt 1 the outputs add nothing to the frequencies. If the class of the largest output is not the most frequent one, q is
    averaged over it and all more frequent classes, so that it stays the most probable."""
    z = logits(f)
    return torch.lerp(torch.softmax(temperature * z, 1), levelled(frequencies.to(z), z.argmax(1)), doubt)


def levelled(frequencies: Float[Tensor, " k"], top: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
    """Return the class frequencies for each row, averaged over its top class and all more frequent classes."""
    level = frequencies[None, :] >= frequencies[top][:, None]
    mean = (level * frequencies).sum(1, keepdim=True) / level.sum(1, keepdim=True)
    return torch.where(level, mean, frequencies)


def calibrate(f: Float[Tensor, "r c"], y: Float[Tensor, "r c"], w: Float[Tensor, " r"],
              frequencies: Float[Tensor, " k"]) -> tuple[float, float]:
    """Fit temperature and doubt by the likelihood of held-out rows (outputs f, targets y, weights w) and of one additional row
    that resembles none of them. For the temperature, the class of this row is known by the frequencies only; for the doubt, it is
    explained by them only. Without it, rows that are all correct would give an infinite temperature and no doubt."""
    n, q = rows(w), frequencies.to(f)
    T = temperature(f, y, w, blurred=(1 / (n + 1), q))[0]
    target = classes(y)[:, None]
    likely = torch.softmax(T * logits(f), 1).gather(1, target)[:, 0]
    known = levelled(q, classes(f)).gather(1, target)[:, 0]
    share = w / w.sum()

    def loss(s: float) -> float:
        doubt = torch.sigmoid(f.new_tensor(s))
        return -(n * (share @ torch.lerp(likely, known, doubt).clamp_min(1e-300).log()) + doubt.log()).item()

    s = minimize_scalar(loss, bounds=(-20.0, 7.0), method="bounded", options={"xatol": 1e-6}).x
    return T, torch.sigmoid(torch.tensor(s, dtype=torch.float64)).item()


def rows(w: Float[Tensor, " r"]) -> float:
    """Effective number of rows. Integer weights are numbers of copies; other weights have no unit, and their spread counts."""
    total = w.sum()
    return (total if torch.equal(w, w.round()) else total.square() / w.square().sum()).item()
