"""Constants of the scaling laws of models with independent skills: loss = c x^exponent, with c from an integral.

For infinitely many skills, the sum over them becomes an integral over k from 0 on, which scales. With y = P(k) T,
    sum_k P(k) left(P(k) T)^2  ->  (A / alpha) (A T)^(-alpha / (alpha + 1))  int_0^inf left(v^((alpha + 1) / alpha))^2 dv.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from richter.theory.powerlaw import Fraction, PowerLaw


class Prefactors(NamedTuple):
    """Prefactors of the loss in each scarce resource, and of the optimal time and size in compute, in the order of
    ``Exponents``."""

    time: float
    data: float
    parameters: float
    compute: float
    optimal_time: float
    optimal_parameters: float


def prefactors(law: PowerLaw, left: Fraction, target: float, scale: float) -> Prefactors:
    """Compute the prefactors. ``scale``: the share times time at which a skill is about half learned."""
    from scipy.optimize import minimize_scalar
    from scipy.special import gamma
    A, alpha, S2 = law.A, law.alpha, target**2 / 2
    power = alpha / (alpha + 1)
    inside = A / alpha * A**-power

    def over(v0: float) -> float:
        return _integral(left, alpha, scale, v0)

    def lost(log_y: float) -> float:
        """Return tau^(alpha / (alpha + 2)) times the loss of N skills at the time tau N^(alpha + 1), over N^-alpha; y = A tau."""
        tau = math.exp(log_y) / A
        loss = inside * tau**-power * over(math.exp(log_y) ** power) + A / alpha
        return tau ** (alpha / (alpha + 2)) * loss

    best = minimize_scalar(lost, bounds=(math.log(scale) - 7, math.log(scale) + 7), method="bounded", options={"xatol": 1e-10})
    tau = math.exp(best.x) / A
    return Prefactors(S2 * inside * over(0.0), S2 * A ** (1 - power) / (alpha + 1) * float(gamma(power)), S2 * A / alpha,
                      S2 * float(best.fun), tau ** (1 / (alpha + 2)), tau ** (-1 / (alpha + 2)))


def _integral(left: Fraction, alpha: float, scale: float, v0: float, pieces: int = 64, nodes: int = 20) -> float:
    """Return int_v0^inf left(v^((alpha + 1) / alpha))^2 dv, by Gauss quadrature in pieces up to where the integrand vanishes."""
    power = alpha / (alpha + 1)
    end = scale
    while float(left(torch.tensor(end, dtype=torch.float64))) > 1e-12:
        end *= 1.5
    cuts = np.linspace(0.0, end, pieces + 1) ** power  # evenly spaced in share times time, where the curve bends
    cuts = np.concatenate([[v0], cuts[cuts > v0]])
    s, w = np.polynomial.legendre.leggauss(nodes)
    half, middle = np.diff(cuts)[:, None] / 2, (cuts[1:] + cuts[:-1])[:, None] / 2
    y = torch.from_numpy((middle + half * s) ** (1 / power))
    return float((half * w * left(y).numpy() ** 2).sum())
