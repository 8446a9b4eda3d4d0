"""Cards of the measures, which describe them in reports, and the panels of reports. This file does not need torch.

A card is written in the call of its measure, ``Measure(..., card=Card("my title"))``. It is stored with the run.
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
EMBEDDINGS = "How many dimensions the embedding uses"
ANSWERS = "What the network answers on the probe"
PANELS: dict[str, str] = {  # heading -> guide for reading the panel
    MOVEMENT:
        "Has the network left its linearisation at initialisation, and have its features turned? Both near 0: lazy; both large: "
        "rich. The magnitude is the first of these numbers on a logarithmic scale: 0 where half of the change of the outputs is "
        "not in the linearisation.",
    CORRELATIONS:
        "Do the weights of a layer amplify the directions that the outputs use? 1: exactly those. Random weights already give a "
        "value that depends on the layer's shape, so look at the change.",
    LEARNED:
        "The share of the correlation that the change of the weights carries: near 0 it comes from the initial weights, near 1 "
        "from what was learned. It does not decide alone whether a network is lazy or rich. The panel also shows the distance "
        "from the initial weights relative to the current norm.",
    TANGENT:
        "How far the kernel by which training moves the outputs points along the labels, and how many directions it has: its "
        "alignment grows and its rank falls when features specialise.",
    EVOLUTION:
        "Has the tangent kernel left its initial value? A kernel that only grows learns the same functions faster; one that "
        "rotates learns what the initial kernel could not. The effective gamma says how far it rotated to the labels.",
    CONVERGENCE:
        "With weight decay, a converged network has W'W = FACT in every layer, on its training examples: the correlation goes "
        "to 1 and the relative error to 0 as the gradient balances the decay. Before convergence they say little.",
    FEATURE_COUNTS:
        "How many features of a layer are strong, used by the outputs, or aligned with the targets; and how far the layer is "
        "from using as few features as the outputs need (kappa near 0). Few features are not always good: a network that "
        "memorises random labels can have few too.",
    NEURAL_COLLAPSE:
        "Have the examples of a class become one point, do these points form a simplex, and does the last layer point to them? "
        "All numbers are 0 at complete collapse, on the training examples.",
    RANKS:
        "From small initial weights a network goes from saddle to saddle: it leaves the origin along directions in which deep "
        "layers have rank one, and each drop of the loss adds directions. Random initial weights, and those of a lazy network, "
        "have many directions.",
    EMBEDDINGS:
        "Joint-embedding methods learn their embedding one dimension at a time: the rank rises by one with each step of the "
        "loss. An embedding that stays in few directions has collapsed.",
    ANSWERS:
        "Whether the network is training at all: a loss that falls, an accuracy above chance, outputs that differ between "
        "examples.",
}
OTHER, OTHER_WORDS = "Other measures", "Your own measures, and measures of other families."

# By name, read from the text of the measures' files, so that torch is not needed. Reports show the measures of a panel in this
# order, the default set first.
CARDS: dict[str, Card] = {name: CATALOGUE.facts()[name]["card"]
                          for name in sorted(CATALOGUE.files(), key=lambda name: name not in DEFAULT)}
# Measures that figures and the dashboard show first.
SHOWN_FIRST = ("magnitude", "nfc", "cnfc", "c_uc_ratio", "weight_change", "tangent_cka")


def card(measure: str, kept: Mapping[str, Card] | None = None) -> Card:
    """Return the card of a measure: the one stored with a run, the built-in one, or one with the bare name."""
    return (kept or {}).get(measure) or CARDS.get(measure) or Card(measure)


def panels(measures: Iterable[str], kept: Mapping[str, Card] | None = None) -> list[tuple[str, str, list[str]]]:
    """Return (heading, reading guide, measures) of the panels that these measures fill, each measure in one panel."""
    filled: dict[str, list[str]] = {heading: [] for heading in PANELS}
    for m in dict.fromkeys(measures):
        filled.setdefault(card(m, kept).panel or OTHER, []).append(m)
    order = {name: i for i, name in enumerate(CARDS)}
    last = filled.pop(OTHER, [])
    filled_panels = [(heading, PANELS.get(heading, ""), sorted(panel_measures, key=lambda m: order.get(m, len(order))))
             for heading, panel_measures in filled.items() if panel_measures]
    return filled_panels + ([(OTHER, OTHER_WORDS, last)] if last else [])
