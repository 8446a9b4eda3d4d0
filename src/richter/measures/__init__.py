"""The measures: pure functions of statistics, each with its card: title, reference, bounds. One file per family.

    MINE = Measure("mine", lambda A, B: (A - B).norm().item(), needs=(NFM, AGOP))
    richter.measure(model, probe, measures=["nfc", MINE])
    richter.measures.add(MINE)                             # now known by its name, to `list` and to `cite`
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
            "probe_loss", "probe_accuracy", "output_spread", "output_rms")  # cheap: what a verdict rests on
DEFAULT = ("nfc", "cnfc", "c_uc_ratio", "weight_change", "function_change", "tangent_alignment", "tangent_cka",
           "linearisation_gap", "magnitude", "feature_change_cka", "probe_loss", "probe_accuracy", "output_spread", "output_rms")


def catalogue() -> dict[str, Measure]:
    """Every measure by its name; those of the default set first."""
    measures = CATALOGUE.all()
    return {**{name: measures[name] for name in DEFAULT}, **measures}


def facts() -> dict[str, Facts]:
    """What people read about every measure, in the same order; above all its card. No measure is imported."""
    known = CATALOGUE.facts()
    return {name: {**known[name], "ref": known[name]["card"].ref} for name in {**dict.fromkeys(DEFAULT), **known}}


__getattr__, __dir__, __all__ = lazy_names(
    __name__, {**dict.fromkeys(("Measure", "quotient", "resolve"), "measure"), "nfc_power": "fact"}, parts(__name__))
