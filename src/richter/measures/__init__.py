"""The measures: pure functions of statistics, each with its reference and its bounds. One file per family.

    MINE = Measure("mine", lambda A, B: (A - B).norm().item(), needs=(NFM, AGOP))
    richter.measure(model, probe, measures=["nfc", MINE])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from richter.core.lazy import lazy_names

if TYPE_CHECKING:
    from richter.measures.measure import Measure, quotient, resolve  # noqa: F401

DEFAULT = ("nfc", "cnfc", "c_uc_ratio", "weight_change",
           "tangent_alignment", "tangent_cka", "tangent_stable_rank", "tangent_correlation")


def catalogue() -> dict[str, Measure]:
    """Every measure that is shipped, by name."""
    from richter.measures import alignment, fact, nfa
    return {m.name: m for family in (nfa, alignment, fact) for m in family.MEASURES}


__getattr__, __dir__, __all__ = lazy_names(__name__, dict.fromkeys(("Measure", "quotient", "resolve"), "measure"),
                                           ("alignment", "fact", "nfa"))
