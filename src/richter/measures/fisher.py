"""Stable rank of the Fisher information of a layer, and its alignment with the labels.  [signal, App. G]"""

from __future__ import annotations

from richter.core import Card, Ref
from richter.instrument.statistics.fisher import FISHER, ROOT, FisherKernel
from richter.linalg import quotient
from richter.measures.cards import COUNT, TANGENT, UNIT
from richter.measures.measure import Measure


def fisher_stable_rank(c: FisherKernel) -> float:
    """|I_l|_F^2 / |I_l|_2^2.  [signal, App. G.4]"""
    return quotient(c.norm ** 2, c.top ** 2)


def fisher_correlation(c: FisherKernel) -> float:
    """Return sum_i (lambda_i / lambda_1) <mu_i, y~/|y~|>^2 with the left singular vectors mu_i of H^1/2 Psi_l^T; not centred.
    [signal, App. G.5]"""
    return quotient(c.quadratic, c.top * c.energy)


MEASURES = (
    Measure("fisher_stable_rank", fisher_stable_rank, (FISHER,), ROOT, card=Card(
        "stable rank of the Fisher information",
        "How many directions of a layer's weights change the predicted probabilities: smaller where the network generalises.",
        rich="down", panel=TANGENT, bounds=COUNT, ref=Ref("signal", "App. G.4"))),
    Measure("fisher_correlation", fisher_correlation, (FISHER,), ROOT, card=Card(
        "Fisher correlation",
        "How much of the labels lies along the largest directions of the Fisher information: small even in trained networks.",
        panel=TANGENT, bounds=UNIT, ref=Ref("signal", "App. G.5"))),
)
