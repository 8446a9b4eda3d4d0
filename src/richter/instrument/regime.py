"""Lazy or rich: the bands of two numbers, and how near the edges of these bands are.

``linearisation_gap`` (G) says whether the network still is its linearisation at the start, ``feature_change_cka`` (F) whether its
features turned. Both are in [0, 1]. A layer by itself is judged by its ``function_change``.

    lazy            G < .05 and F < .02          rich             G >= .1 and F >= .15
    probably lazy   G < .1  and F < .05          uncertain        the rest
    amplified       G >= .3 and F < .05
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

GAP, TURN, MOVED = "linearisation_gap", "feature_change_cka", "function_change"
GAP_EDGES, TURN_EDGES = (0.05, 0.1, 0.3), (0.02, 0.05, 0.15)
LAYER_BANDS = ((0.15, "lazy"), (0.5, "uncertain"), (1.0, "probably rich"))  # below so much; from the last edge on it is rich


@dataclass(frozen=True)
class Margin:
    """How far a number is from the nearest edge at which the verdict would be another."""

    number: str  # its name
    value: float
    edge: float
    other: str  # the verdict beyond the edge
    error: float | None = None  # standard error of the number

    @property
    def distance(self) -> float:
        return abs(self.value - self.edge)

    @property
    def errors(self) -> float | None:
        """The distance in standard errors; None where there is no error bar."""
        return None if not self.error else self.distance / self.error

    def __str__(self) -> str:
        unit = "" if self.errors is None else f", {self.errors:.2g} standard errors,"
        return f"{self.number} {self.value:.3g} is {self.distance:.2g}{unit} from {self.edge:g}; beyond: {self.other}"


def regime(G: float, F: float) -> str:
    """The word for a training whose linearisation gap is G and whose features turned by F."""
    if G < 0.05 and F < 0.02:
        return "lazy"
    if G < 0.1 and F < 0.05:
        return "probably lazy"
    if G >= 0.3 and F < 0.05:
        return "amplified"
    return "rich" if G >= 0.1 and F >= 0.15 else "uncertain"


def regime_margin(G: float, F: float, G_error: float = math.nan, F_error: float = math.nan) -> Margin:
    """The smallest change of one of the two numbers, the other as it is, that gives another word: in standard errors where both
    have them, else in the numbers."""
    word = regime(G, F)
    margins = []
    for name, value, edges, error in ((GAP, G, GAP_EDGES, G_error), (TURN, F, TURN_EDGES, F_error)):
        for edge in edges:
            beyond = edge if value < edge else math.nextafter(edge, -math.inf)
            other = regime(beyond, F) if name == GAP else regime(G, beyond)
            if other != word:
                margins.append(Margin(name, value, edge, other, error if math.isfinite(error) else None))
    return nearest(margins)


def nearest(margins: Sequence[Margin]) -> Margin:
    comparable = all(m.errors is not None for m in margins)
    return min(margins, key=lambda m: m.errors or 0.0 if comparable else m.distance)


def layer_regime(r: float) -> str:
    """The word for a layer whose function changed by r, relative to what it was."""
    if math.isnan(r):
        return "unknown"
    if r == 0:
        return "frozen"
    return next((word for edge, word in LAYER_BANDS if r < edge), "rich")
