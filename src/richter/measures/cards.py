"""The cards of the measures: what people read about each of them. This is the only place where these facts are written, and
it needs no torch. A measure of a user's own has a card too, ``Measure(..., card=Card("my title"))``; it is kept with the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from richter.core import Card, Interval, Ref

UNIT, COSINE, POSITIVE, COUNT = Interval(0.0, 1.0), Interval(-1.0, 1.0), Interval(low=0.0), Interval(low=1.0)
MINIMUM = 0.1  # kappa_cka below which a network is in the minimum feature regime: "eps = 0.1 works well in practice"  [Def. 2]

# heading -> what to look for
MOVEMENT, CORRELATIONS, LEARNED, TANGENT, EVOLUTION, CONVERGENCE, MANY, COLLAPSE, RANKS, ANSWERS = (
    "How far the network has gone", "Feature correlations", "What was learned, and how far the weights moved",
    "Tangent kernel and labels", "How the tangent kernel evolved", "Features at convergence", "How many features there are",
    "Neural collapse", "How many directions the weights use", "What the network answers on the probe")
PANELS: dict[str, str] = {
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
    MANY:
        "How many features a layer reads that are strong, used by the outputs, or hold the targets; and how far they are from as "
        "few as the outputs need (kappa near 0). Few is not good: a network that knows random labels by heart can have as few.",
    COLLAPSE:
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

# by name; within a panel, reports show them in this order
CARDS: dict[str, Card] = {
    "magnitude": Card(
        "magnitude",
        "log10(G / (1 - G)) of the linearisation gap G: positive when richer, negative when lazier, a unit for a factor of about "
        "ten in the scale of the outputs.",
        rich="up", panel=MOVEMENT, range=Interval(-3.0, 3.0), ref=Ref("lazy", "Sec. 1")),
    "linearisation_gap": Card(
        "linearisation gap (G)",
        "The share of what the network did that is not in its linearisation: 0 exactly lazy, towards 1 rich.",
        rich="up", panel=MOVEMENT, range=UNIT, whole=True, ref=Ref("lazy", "Sec. 1")),
    "feature_change_cka": Card(
        "feature change (F)", "How far what the layers read has turned since initialisation, in the layer where it turned most.",
        rich="up", panel=MOVEMENT, range=Interval(0.0, 2.0), ref=Ref("cka", "Sec. 3")),
    "function_change": Card(
        "change of a layer's function",
        "What the change of a layer's weights does to its output, relative to what its initial weights do: 0 if it is frozen.",
        rich="up", typical=Interval(0.15, 1.0), panel=MOVEMENT, range=POSITIVE, ref=Ref("lazy", "Sec. 1")),
    "nfc": Card(
        "feature correlation (nfc)", "How far the weights amplify the directions that the outputs use; 1: exactly those.",
        rich="up", panel=CORRELATIONS, range=UNIT, whole=True, ref=Ref("nfa", "Eq. (NFC)")),
    "cnfc": Card(
        "centred feature correlation (cnfc)", "How far what training added to the weights points where the outputs look.",
        rich="up", panel=CORRELATIONS, range=UNIT, whole=True, ref=Ref("nfa", "Eq. (C-NFC)")),
    "double_centred_nfc": Card(
        "doubly centred (double_centred_nfc)",
        "How far the change of the weights aligns with the change of what the outputs ask of the layer.",
        panel=CORRELATIONS, range=UNIT, whole=True, ref=Ref("nfa", "App. D")),
    "ptk_centred_nfc": Card(
        "gradient-centred (ptk_centred_nfc)", "How the initial weights stand to what the outputs newly ask of the layer.",
        panel=CORRELATIONS, range=UNIT, whole=True, ref=Ref("nfa", "App. D")),
    "nfc_pearson": Card(
        "Pearson of entries (nfc_pearson)",
        "The feature correlation after subtracting the mean of all entries, the convention of some published code.",
        rich="up", panel=CORRELATIONS, range=COSINE, ref=Ref("nfa", "App. L")),
    "cnfc_pearson": Card(
        "centred, Pearson (cnfc_pearson)", "The centred feature correlation after subtracting the mean of all entries.",
        rich="up", panel=CORRELATIONS, range=COSINE, ref=Ref("nfa", "App. L")),
    "nfc_diagonal": Card(
        "correlation of diagonals (nfc_diagonal)", "Whether the weights and the outputs weigh the input coordinates alike.",
        rich="up", panel=CORRELATIONS, range=COSINE, ref=Ref("nfa", "Fig. 16")),
    "cnfc_diagonal": Card(
        "centred, diagonals (cnfc_diagonal)",
        "Whether what training added to the weights and the outputs weigh the input coordinates alike.",
        rich="up", panel=CORRELATIONS, range=COSINE, ref=Ref("nfa", "Fig. 16")),
    "nfc_sqrt": Card(
        "with the root of the AGOP (nfc_sqrt)",
        "The feature correlation with the root of the AGOP, the other power of the ansatz, with which FACT is compared.",
        rich="up", panel=CORRELATIONS, range=UNIT, whole=True, ref=Ref("fact", "the ansatz with s = 1/2")),
    "c_uc_ratio": Card(
        "share learned (c_uc_ratio)",
        "The share of the correlation that the learned part of the weights carries: near 0 it is that of the initial ones.",
        rich="up", panel=LEARNED, range=POSITIVE, ref=Ref("nfa", "Fig. 4")),
    "dc_c_ratio": Card(
        "doubly centred share (dc_c_ratio)",
        "The share of the centred correlation that the change of what is asked carries: small early, relevant late.",
        panel=LEARNED, range=POSITIVE, ref=Ref("nfa", "Fig. 5")),
    "weight_change": Card(
        "weights moved |W-W0|/|W|", "How far the weights have moved, relative to their norm now.",
        rich="up", panel=LEARNED, range=POSITIVE, ref=Ref("nfa", "Fig. 14")),
    "tangent_cka": Card(
        "tangent kernel x labels (cka)",
        "How far the tangent kernel points along the labels, all outputs at once and centred: grows several times over when "
        "features are learned, interior layers most.",
        rich="up", panel=TANGENT, range=UNIT, ref=Ref("signal", "Eq. 6")),
    "tangent_alignment": Card(
        "tangent alignment",
        "How far the large directions of the tangent kernel are the labels, output by output and not centred.",
        rich="up", panel=TANGENT, range=UNIT, ref=Ref("rapid", "Sec. 2")),
    "tangent_correlation": Card(
        "tangent correlation", "How much of the labels lies along the largest directions of the tangent kernel.",
        panel=TANGENT, range=UNIT, ref=Ref("signal", "Sec. 4")),
    "tangent_stable_rank": Card(
        "tangent stable rank", "How many directions the tangent kernel has: falls as features specialise.",
        rich="down", panel=TANGENT, range=COUNT, ref=Ref("signal", "Sec. 4")),
    "specialisation": Card(
        "specialisation",
        "Whether each output's kernel points along its own labels more than along those of others: 1 where outputs share one "
        "kernel.",
        rich="up", panel=TANGENT, range=POSITIVE, ref=Ref("rapid", "Eq. 16")),
    "kernel_norm": Card(
        "kernel norm |K|/|K0|", "How many times the tangent kernel has grown since initialisation.",
        panel=EVOLUTION, range=POSITIVE, ref=Ref("rapid", "Fig. 1")),
    "kernel_rotation": Card(
        "kernel rotation",
        "How far the tangent kernel has turned since initialisation, whatever it has grown: 0 if it is frozen.",
        rich="up", panel=EVOLUTION, range=UNIT, ref=Ref("rapid", "Fig. 1")),
    "kernel_distance": Card(
        "kernel distance |K-K0|/|K0|", "How far the tangent kernel is from the one it started as: 0 if it is frozen.",
        rich="up", panel=EVOLUTION, range=POSITIVE, ref=Ref("rapid", "Fig. 1")),
    "kernel_velocity": Card(
        "kernel velocity per step", "How fast the tangent kernel changes: relative, and per step since the last snapshot.",
        panel=EVOLUTION, range=POSITIVE, ref=Ref("rapid", "Sec. 2")),
    "effective_gamma": Card(
        "effective gamma",
        "How strongly features were learned: the rate with which optimal feature evolution would have made this alignment.",
        rich="up", panel=EVOLUTION, ref=Ref("rapid", "Eq. 20")),
    "fisher_stable_rank": Card(
        "stable rank of the Fisher information",
        "How many directions of a layer's weights change the predicted probabilities: smaller where the network generalises.",
        rich="down", panel=TANGENT, range=COUNT, ref=Ref("signal", "App. G.4")),
    "fisher_correlation": Card(
        "Fisher correlation",
        "How much of the labels lies along the largest directions of the Fisher information: small even in trained networks.",
        panel=TANGENT, range=UNIT, ref=Ref("signal", "App. G.5")),
    "fact": Card(
        "features at convergence (fact)",
        "How far W'W has the direction that the examples and the loss ask for: 1 at convergence.",
        panel=CONVERGENCE, range=COSINE, ref=Ref("fact", "Theorem (FACT)")),
    "fact_backward": Card(
        "of the output side (fact_backward)",
        "How far WW', the output side, has the direction that the examples and the loss ask for: 1 at convergence.",
        panel=CONVERGENCE, range=COSINE, ref=Ref("fact", "Theorem (FACT), backward")),
    "fact_error": Card(
        "|W'W - FACT| / |W'W|",
        "How far W'W is from what the examples and the loss ask for, its scale included: 0 at convergence.",
        panel=CONVERGENCE, range=POSITIVE, ref=Ref("fact", "Theorem (FACT)")),
    "fact_backward_error": Card(
        "output side: |WW' - FACT| / |WW'|",
        "How far WW', the output side, is from what the examples and the loss ask for, its scale included: 0 at convergence.",
        panel=CONVERGENCE, range=POSITIVE, ref=Ref("fact", "Theorem (FACT), backward")),
    "fact_stationarity": Card(
        "gradient off the decay (0: converged)",
        "How far the gradient is from balancing the weight decay: 0 at convergence, often 10 to 1000 before.",
        panel=CONVERGENCE, range=POSITIVE, ref=Ref("fact", "Theorem (FACT)")),
    "kappa_cka": Card(
        "distance from minimum features (kappa)",
        "How far the features are from being the outputs and nothing else: below 0.1 the network has as few as it needs.",
        rich="down", panel=MANY, range=UNIT, ref=Ref("layerwise", "Def. 2")),
    "deff_intensity": Card(
        "strong features (deff_intensity)",
        "How many features are strong: near the number of classes where there are as few as can be.",
        rich="down", panel=MANY, range=COUNT, ref=Ref("layerwise", "Eq. 2.6")),
    "deff_utilisation": Card(
        "used features (deff_utilisation)", "Over how many features the outputs are spread.",
        rich="down", panel=MANY, range=COUNT, ref=Ref("layerwise", "Eq. 2.5")),
    "deff_quality": Card(
        "features of the target (deff_quality)", "Over how many features the targets are spread.",
        rich="down", panel=MANY, range=COUNT, ref=Ref("layerwise", "Eq. 2.3")),
    "quality_top": Card(
        "targets in the first features",
        "The share of the targets that the strongest features hold, as many as there are outputs.",
        panel=MANY, range=POSITIVE, ref=Ref("layerwise", "Eq. 2.4")),
    "utilisation_top": Card(
        "outputs in the first features",
        "The share of the outputs' space that the strongest features hold, as many as there are outputs.",
        rich="up", panel=MANY, range=POSITIVE, ref=Ref("layerwise", "Eq. 2.5")),
    "nc1": Card(
        "NC1: within / between classes", "How far examples of a class lie apart, relative to the distances of the classes.",
        rich="down", panel=COLLAPSE, range=POSITIVE, ref=Ref("layerwise", "Eq. D.6")),
    "nc1_trace": Card(
        "NC1 as a product of covariances",
        "The product of the covariances within and between classes: 0 where one of them vanishes along the other.",
        panel=COLLAPSE, range=POSITIVE, ref=Ref("layerwise", "Prop. 2.5.1")),
    "nc2_angle": Card(
        "NC2: angles of class means", "How far the angles between class means are from those of a simplex.",
        rich="down", panel=COLLAPSE, range=POSITIVE, ref=Ref("layerwise", "Eq. D.7")),
    "nc2_norm": Card(
        "NC2: lengths of class means", "How far class means are from lying equally far from their middle.",
        rich="down", panel=COLLAPSE, range=POSITIVE, ref=Ref("layerwise", "Eq. D.7")),
    "nc3": Card(
        "NC3: last layer and class means", "How far the rows of the last layer point away from the class means.",
        rich="down", panel=COLLAPSE, range=Interval(0.0, 2.0), ref=Ref("layerwise", "Eq. D.8")),
    "nc4": Card(
        "NC4: nearest class mean", "The share of examples whose nearest class mean is of another class than the network says.",
        rich="down", panel=COLLAPSE, range=UNIT, ref=Ref("layerwise", "Eq. D.9")),
    "stable_rank_of_weights": Card(
        "stable rank of the weights",
        "Over how many directions the weights of a layer are spread, each counted by its square relative to the largest: 1 if "
        "they have one.",
        rich="down", panel=RANKS, range=COUNT, ref=Ref("escape", "Thm. 3.1")),
    "rank_of_weights": Card(
        "rank of the weights", "How many singular values of a layer's weights are at least a tenth of the largest.",
        rich="down", panel=RANKS, range=COUNT, ref=Ref("escape", "Thm. 3.1")),
    "probe_loss": Card("loss on the probe", "The loss of the probe's examples.", panel=ANSWERS, ref=Ref("lazy", "Sec. 1")),
    "probe_accuracy": Card(
        "accuracy on the probe", "The share of the probe's labels that have the largest output.", panel=ANSWERS, range=UNIT,
        whole=True, ref=Ref("lazy", "Sec. 1")),
    "label_gradient_correlation": Card(
        "labels and loss gradient",
        "The correlation of the centred labels and the loss's gradient in the outputs: -1 while the network answers alike.",
        panel=ANSWERS, range=COSINE, ref=Ref("signal", "Approx. 1")),
    "output_spread": Card(
        "spread of outputs", "How far outputs differ from example to example: near 0 the network has collapsed.", panel=ANSWERS,
        range=POSITIVE, ref=Ref("lazy", "Sec. 1")),
    "output_rms": Card(
        "size of outputs", "The root mean square of the outputs.", panel=ANSWERS, range=POSITIVE, ref=Ref("lazy", "Sec. 1")),
}
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
