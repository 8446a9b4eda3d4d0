"""What measures are called in pictures, which belong together, and which paper each comes from. No torch here, so the
catalogue of measures cannot be asked; a test holds the two together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from richter.core import WHOLE

TITLES = {
    "nfc": "feature correlation (nfc)", "cnfc": "centred feature correlation (cnfc)",
    "double_centred_nfc": "doubly centred (double_centred_nfc)", "ptk_centred_nfc": "gradient-centred (ptk_centred_nfc)",
    "nfc_pearson": "Pearson of entries (nfc_pearson)", "cnfc_pearson": "centred, Pearson (cnfc_pearson)",
    "nfc_diagonal": "correlation of diagonals (nfc_diagonal)", "cnfc_diagonal": "centred, diagonals (cnfc_diagonal)",
    "c_uc_ratio": "share learned (c_uc_ratio)", "dc_c_ratio": "doubly centred share (dc_c_ratio)",
    "weight_change": "weights moved |W-W0|/|W|",
    "tangent_cka": "tangent kernel x labels (cka)", "tangent_alignment": "tangent alignment",
    "tangent_stable_rank": "tangent stable rank", "tangent_correlation": "tangent correlation",
    "fact": "features at convergence (fact)", "fact_backward": "of the output side (fact_backward)",
    "nfc_sqrt": "with the root of the AGOP (nfc_sqrt)", "fact_error": "|W'W - FACT| / |W'W|",
    "fact_backward_error": "the same of WW' (fact_backward_error)", "fact_stationarity": "gradient off the decay (0: converged)",
}

# heading -> (what to look for, measures)
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Feature correlations": (
        "Do the weights of a layer amplify the directions that the outputs use? 1: exactly those. Random weights already give a "
        "value that depends on the layer's shape, so look at the change.",
        ("nfc", "cnfc", "double_centred_nfc", "ptk_centred_nfc", "nfc_pearson", "cnfc_pearson", "nfc_diagonal", "cnfc_diagonal",
         "nfc_sqrt")),
    "What was learned, and how far the weights moved": (
        "The share of the correlation that the change of the weights carries: near 0 the layer stayed lazy, near 1 it is rich. "
        "Beside it, the distance from the initial weights relative to their norm now.",
        ("c_uc_ratio", "dc_c_ratio", "weight_change")),
    "Tangent kernel and labels": (
        "How far the kernel by which training moves the outputs points along the labels, and how many directions it has: its "
        "alignment grows and its rank falls when features specialise.",
        ("tangent_cka", "tangent_alignment", "tangent_correlation", "tangent_stable_rank")),
    "Features at convergence": (
        "With weight decay, a network that has converged has W'W = FACT in every layer, on the examples it was trained on: the "
        "correlation goes to 1 and the relative error to 0 as the gradient comes to balance the decay. Before, they say little.",
        ("fact", "fact_backward", "fact_error", "fact_backward_error", "fact_stationarity")),
}
OTHER = ("Other measures", "Measures of your own, and those of other families.")

PAPERS = {
    "nfc": "nfa", "cnfc": "nfa", "double_centred_nfc": "nfa", "ptk_centred_nfc": "nfa", "nfc_pearson": "nfa",
    "cnfc_pearson": "nfa", "nfc_diagonal": "nfa", "cnfc_diagonal": "nfa", "c_uc_ratio": "nfa", "dc_c_ratio": "nfa",
    "weight_change": "nfa", "tangent_alignment": "rapid", "tangent_cka": "signal", "tangent_stable_rank": "signal",
    "tangent_correlation": "signal", "fact": "fact", "fact_backward": "fact", "fact_error": "fact", "fact_backward_error": "fact",
    "fact_stationarity": "fact", "nfc_sqrt": "fact",
}
UNIT = frozenset({"nfc", "cnfc", "double_centred_nfc", "ptk_centred_nfc", "nfc_sqrt"})  # drawn from 0 to 1


def called(layer: str) -> str:
    """A layer as people say it."""
    return "whole model" if layer == WHOLE else layer.strip() or "(no name)"


def shortened(name: str, most: int = 40) -> str:
    """The two ends of a long name, on one line."""
    name = " ".join(name.split())
    return name if len(name) <= most else f"{name[:most // 2 - 1]}…{name[-(most - most // 2):]}"


def short_names(layers: Sequence[str], most: int = 40) -> dict[str, str]:
    """Names that fit: where one is too long, without the beginning that all have in common (``…0.attn.q``)."""
    inner = [k for k in layers if k != WHOLE]
    cut = 0
    if len(inner) > 1 and max(map(len, inner)) > most:
        parts = [k.split(".")[:-1] for k in inner]
        same = next((i for i, words in enumerate(zip(*parts, strict=False)) if len(set(words)) > 1), min(map(len, parts)))
        cut = sum(len(word) + 1 for word in parts[0][:same])
    return {k: shortened(called(k) if k == WHOLE or not cut else f"…{k[cut:]}", most) for k in layers}


def families(measures: Iterable[str]) -> list[tuple[str, str, list[str]]]:
    """(heading, what to look for, measures) of those that are there, each once."""
    left = list(dict.fromkeys(measures))
    found = []
    for heading, (words, known) in FAMILIES.items():
        if mine := [m for m in known if m in left]:
            found.append((heading, words, mine))
            left = [m for m in left if m not in mine]
    return found + ([(*OTHER, left)] if left else [])


def papers(measures: Iterable[str]) -> list[str]:
    """Which papers to cite for these measures."""
    return list(dict.fromkeys(PAPERS[m] for m in measures if m in PAPERS))
