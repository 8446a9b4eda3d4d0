"""The cards of the measures, which people read about each of them, and the panels in which reports show them. None needs torch.

A card is written in the call of its measure, ``Measure(..., card=Card("my title"))``. It is kept with the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from richter.core import Card, Interval
from richter.measures import CATALOGUE, DEFAULT

# bounds
UNIT = Interval(0.0, 1.0)
COSINE = Interval(-1.0, 1.0)
POSITIVE = Interval(low=0.0)
COUNT = Interval(low=1.0)
MINIMUM = 0.1  # kappa_cka below which a network is in the minimum feature regime: "eps = 0.1 works well in practice"  [Def. 2]

# headings of panels
MOVEMENT = "How far the network has gone"
CORRELATIONS = "Feature correlations"
LEARNED = "What was learned, and how far the weights moved"
TANGENT = "Tangent kernel and labels"
EVOLUTION = "How the tangent kernel evolved"
CONVERGENCE = "Features at convergence"
FEATURE_COUNTS = "How many features there are"
NEURAL_COLLAPSE = "Neural collapse"
RANKS = "How many directions the weights use"
ANSWERS = "What the network answers on the probe"
PANELS: dict[str, str] = {  # heading -> what to look for
    MOVEMENT:
        "Has the network left its linearisation at initialisation, and have its features turned? Both near 0: lazy; both large: "
        "rich. The magnitude is the first of them on a logarithmic scale: 0 where half of what the network did is not in its "
        "linearisation.",
    CORRELATIONS:
        "Do the weights of a layer amplify the directions that the outputs use? 1: exactly those. Random weights already give a "
        "value that depends on the layer's shape, so look at the change.",
    LEARNED:
        "The share of the correlation that the change of the weights carries: near 0 it is that of the initial weights, near 1 "
        "what was learned. Whether a network is lazy or rich it does not say by itself. Beside it, the distance from the initial "
        "weights relative to their norm now.",
    TANGENT:
        "How far the kernel by which training moves the outputs points along the labels, and how many directions it has: its "
        "alignment grows and its rank falls when features specialise.",
    EVOLUTION:
        "Has the network left the kernel it started with? One that only grows learns as that kernel does, only faster; one that "
        "turns learns what its first kernel could not. The effective gamma says in one number how far it turned to the labels.",
    CONVERGENCE:
        "With weight decay, a network that has converged has W'W = FACT in every layer, on the examples it was trained on: the "
        "correlation goes to 1 and the relative error to 0 as the gradient comes to balance the decay. Before, they say little.",
    FEATURE_COUNTS:
        "How many features a layer reads that are strong, used by the outputs, or hold the targets; and how far they are from as "
        "few as the outputs need (kappa near 0). Few is not good: a network that knows random labels by heart can have as few.",
    NEURAL_COLLAPSE:
        "Have the examples of a class become one point, are the points a simplex, and does the last layer point to them? All go "
        "to 0 where collapse is complete, on the examples that were trained on.",
    RANKS:
        "From small initial weights a network goes from saddle to saddle: it leaves the origin along directions in which deep "
        "layers have rank one, and gains others later, each at a drop of the loss. Initial weights and those of a lazy network "
        "have many.",
    ANSWERS:
        "Whether there is a training to speak of: a loss that falls, an accuracy above chance, outputs that differ between "
        "examples.",
}
OTHER, OTHER_WORDS = "Other measures", "Measures of your own, and those of other families."

# By name, read from the text of the files of measures, so that torch is not needed. Within a panel, reports show them in this
# order: those of the default set first.
CARDS: dict[str, Card] = {name: CATALOGUE.facts()[name]["card"]
                          for name in sorted(CATALOGUE.files(), key=lambda name: name not in DEFAULT)}
# by figures and dashboard, until somebody chooses
SHOWN_FIRST = ("magnitude", "nfc", "cnfc", "c_uc_ratio", "weight_change", "tangent_cka")


def card(measure: str, kept: Mapping[str, Card] | None = None) -> Card:
    """The card of a measure: that which was kept with a run, ours, or one with its bare name."""
    return (kept or {}).get(measure) or CARDS.get(measure) or Card(measure)


def panels(measures: Iterable[str], kept: Mapping[str, Card] | None = None) -> list[tuple[str, str, list[str]]]:
    """(heading, what to look for, measures) of the panels that these measures fill, each measure in one of them."""
    filled: dict[str, list[str]] = {heading: [] for heading in PANELS}
    for m in dict.fromkeys(measures):
        filled.setdefault(card(m, kept).panel or OTHER, []).append(m)
    order = {name: i for i, name in enumerate(CARDS)}
    last = filled.pop(OTHER, [])
    known = [(heading, PANELS.get(heading, ""), sorted(mine, key=lambda m: order.get(m, len(order))))
             for heading, mine in filled.items() if mine]
    return known + ([(OTHER, OTHER_WORDS, last)] if last else [])
