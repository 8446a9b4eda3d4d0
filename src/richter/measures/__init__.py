"""The measures: pure functions of statistics, each with its reference and its bounds. One file per family.

    MINE = Measure("mine", lambda A, B: (A - B).norm().item(), needs=(NFM, AGOP))
    richter.measure(model, probe, measures=["nfc", MINE])
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from richter.core import Interval, Ref, SelectionError
from richter.instrument.cotangents import Cotangents, every_output
from richter.instrument.statistics import Gram, Statistic, leaves

ANYWHERE = Interval()


@dataclass(frozen=True)
class Measure:
    """A number for each layer (and for the whole model, when it is made of kernels)."""

    name: str
    compute: Callable[..., float]  # of the statistics in `needs`, in their order
    needs: tuple[Statistic, ...]
    cotangents: Cotangents = every_output
    ref: Ref | None = None
    bounds: Interval = ANYWHERE
    remark: Callable[..., str] | None = None  # of the same statistics: what must be said beside the value

    @property
    def of_kernels(self) -> bool:
        return any(isinstance(s, Gram) for s in leaves(self.needs))


DEFAULT = ("nfc", "cnfc", "c_uc_ratio", "weight_change",
           "tangent_alignment", "tangent_cka", "tangent_stable_rank", "tangent_correlation")


def catalogue() -> dict[str, Measure]:
    """Every measure that is shipped, by name."""
    from richter.measures import alignment, fact, nfa
    return {m.name: m for family in (nfa, alignment, fact) for m in family.MEASURES}


def resolve(asked: Iterable[str | Measure] | str | Measure | None) -> list[Measure]:
    """Names or measures -> measures; None is the default set."""
    known = catalogue()
    if isinstance(asked, (str, Measure)):
        asked = [asked]
    if asked is not None and not isinstance(asked, Iterable):
        raise SelectionError(f"measures= takes names or richter.measures.Measure objects, not {type(asked).__name__}. "
                             f"Known are: {', '.join(known)}.")
    found: dict[str, Measure] = {}
    for m in DEFAULT if asked is None else asked:
        if isinstance(m, str):
            if m not in known:
                near = difflib.get_close_matches(m, known, n=3)
                raise SelectionError(f"there is no measure {m!r}."
                                     + (f" Did you mean {', '.join(near)}?" if near else "")
                                     + f" Known are: {', '.join(known)}.")
            m = known[m]
        elif not isinstance(m, Measure):
            raise SelectionError(f"measures= takes names or richter.measures.Measure objects, not {type(m).__name__}.")
        found[m.name] = m
    if not found:
        raise SelectionError("measures= is empty: leave it out for the default set.")
    return list(found.values())


def quotient(a: float, b: float) -> float:
    """a / b, and NaN (not an error, not infinity) where it is 0/0 or b is 0."""
    return a / b if b else math.nan
