"""Losses for choosing between settings, weighted by the rows' weights; smaller is better."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def unexplained(f: Float[Tensor, "r c"], y: Float[Tensor, "r c"], w: Float[Tensor, " r"]) -> float:
    """Squared error over variance, 1 - R^2, averaged over outputs with variance."""
    centred = y - (w[:, None] * y).sum(0) / w.sum()
    variance = (w[:, None] * centred.square()).sum(0)
    error = (w[:, None] * (y - f).square()).sum(0)
    varies = variance > 1e-12 * (w[:, None] * y.square()).sum(0)
    return (error[varies] / variance[varies]).mean().item() if varies.any() else (error.sum() / w.sum()).item()


def logits(f: Float[Tensor, "r c"]) -> Float[Tensor, "r k"]:
    """Return logits; a single output stands for two classes."""
    return torch.cat([-f, f], 1) if f.shape[1] == 1 else f


def classes(y: Float[Tensor, "r c"]) -> Tensor:
    """Class with the largest logit."""
    return logits(y).argmax(1)


def temperature(f: Float[Tensor, "r c"], y: Float[Tensor, "r c"], w: Float[Tensor, " r"],
                blurred: tuple[float, Float[Tensor, " k"]] | None = None) -> tuple[float, float]:
    """Fit the temperature T > 0 that minimises the mean negative log likelihood of softmax(T f) on these rows; return T and the
    mean log likelihood. The problem is convex in T and solved by Newton's method. ``blurred=(e, q)``: for a share e of each row,
    the class is only known to be drawn from q."""
    z, T = logits(f), 5.0
    target = F.one_hot(classes(y), z.shape[1]).to(z)
    if blurred is not None:
        target = torch.lerp(target, blurred[1].expand_as(target), blurred[0])
    w = w / w.sum()

    def value(T: float) -> float:
        return (w @ (target * F.log_softmax(T * z, 1)).sum(1)).item()

    best = value(T)
    for _ in range(30):
        p = F.softmax(T * z, 1)
        mean = (p * z).sum(1)
        slope = (w @ ((target * z).sum(1) - mean)).item()
        curve = (w @ ((p * z.square()).sum(1) - mean.square())).item()
        step = min(max(slope / max(curve, 1e-12), -0.5 * T), 2 * T)
        while (new := value(T + step)) < best and abs(step) > 1e-6 * T:
            step /= 2
        if abs(step) <= 1e-6 * T or T + step > 1e6:
            break
        T, best = T + step, max(new, best)
    return T, best


def cross_entropy(f: Float[Tensor, "r c"], y: Float[Tensor, "r c"], w: Float[Tensor, " r"]) -> float:
    """Negative mean log likelihood of softmax(T f) at the best T."""
    return -temperature(f, y, w)[1]
