"""The measures: pure functions of statistics, each with its card: title, reference, bounds. One file per family.

    MINE = Measure("mine", lambda A, B: (A - B).norm().item(), needs=(NFM, AGOP))
    richter.measure(model, probe, measures=["nfc", MINE])
    richter.measures.add(MINE)                             # register it, so that `list` and `cite` know its name
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from richter.core.catalogue import Catalogue, Facts, lazy_names, parts

if TYPE_CHECKING:
    from richter.linalg import quotient  # noqa: F401
    from richter.measures.fact import nfc_power  # noqa: F401
    from richter.measures.measure import Measure, resolve  # noqa: F401

CATALOGUE: Catalogue[Measure] = Catalogue(__name__, "MEASURES", "measure")
names, get, add = CATALOGUE.names, CATALOGUE.get, CATALOGUE.add

MOVEMENT = ("linearisation_gap", "magnitude", "feature_change_cka", "function_change",
            "probe_loss", "probe_accuracy", "output_spread", "output_rms")  # cheap; the verdict is based on these
LIGHT = (*MOVEMENT, "weight_change")  # what an Observer measures most often
DEFAULT = ("nfc", "cnfc", "c_uc_ratio", "weight_change", "function_change", "tangent_alignment", "tangent_cka",
           "linearisation_gap", "magnitude", "feature_change_cka", "probe_loss", "probe_accuracy", "output_spread", "output_rms")


def catalogue() -> dict[str, Measure]:
    """Return every measure by its name, with the default set first."""
    measures = CATALOGUE.all()
    return {**{name: measures[name] for name in DEFAULT}, **measures}


def facts() -> dict[str, Facts]:
    """Return the texts about every measure, in the same order, above all its card. No measure is imported."""
    entries = CATALOGUE.facts()
    return {name: {**entries[name], "ref": entries[name]["card"].ref} for name in {**dict.fromkeys(DEFAULT), **entries}}


__getattr__, __dir__, __all__ = lazy_names(
    __name__, {**dict.fromkeys(("Measure", "quotient", "resolve"), "measure"), "nfc_power": "fact"}, parts(__name__))
