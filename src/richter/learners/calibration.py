"""Probabilities from the outputs of a classifier, by rows that it has not seen."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize_scalar
from torch import Tensor

from richter.learners.scores import classes, logits, temperature


def probabilities(f: Float[Tensor, "n c"], temperature: float, doubt: float,
                  frequencies: Float[Tensor, " k"]) -> Float[Tensor, "n k"]:
    """P = (1 - doubt) softmax(T f) + doubt q, where q are the class frequencies.

    The doubt bounds how sure a probability can be, as no number of rows can show that a model is never wrong; at 1 the outputs
    say nothing that the frequencies do not. Where the class of the largest output is not the most frequent one, q is levelled
    among it and those that are more frequent, so that it stays the most probable."""
    z = logits(f)
    return torch.lerp(torch.softmax(temperature * z, 1), levelled(frequencies.to(z), z.argmax(1)), doubt)


def levelled(frequencies: Float[Tensor, " k"], top: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
    """The class frequencies for each row, levelled among its top class and those that are more frequent."""
    level = frequencies[None, :] >= frequencies[top][:, None]
    mean = (level * frequencies).sum(1, keepdim=True) / level.sum(1, keepdim=True)
    return torch.where(level, mean, frequencies)


def calibrate(f: Float[Tensor, "r c"], y: Float[Tensor, "r c"], w: Float[Tensor, " r"],
              frequencies: Float[Tensor, " k"]) -> tuple[float, float]:
    """Temperature and doubt by the likelihood of rows left out (outputs f, targets y, weights w) and of one row more, which
    resembles none of them: for the temperature its class is known by the frequencies alone, and for the doubt it is explained by
    them alone. Without it, rows that all come out right would ask for an infinite temperature and for no doubt."""
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
    """How many rows the weights stand for. Whole numbers are numbers of copies; others have no unit, and count by spread."""
    total = w.sum()
    return (total if torch.equal(w, w.round()) else total.square() / w.square().sum()).item()
