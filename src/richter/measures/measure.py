"""What a measure is, and which ones a name or a list of names means."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from richter.core import Card, Interval, Ref, Remark, SelectionError
from richter.instrument.cotangents import Cotangents, as_cotangents, every_output
from richter.instrument.statistics import Statistic, leaves
from richter.measures import DEFAULT, catalogue

ANYWHERE = Interval()


@dataclass(frozen=True)
class Measure:
    """A pure function of statistics: a number for each layer (and for the whole model, when it is made of kernels)."""

    name: str
    compute: Callable[..., float]  # of the statistics in `needs`, in their order
    needs: tuple[Statistic, ...]
    cotangents: Cotangents = every_output
    ref: Ref | None = None
    bounds: Interval = ANYWHERE
    remark: Callable[..., Remark] | None = None  # of the same statistics: what must be said beside the value
    card: Card | None = None  # what people read about it; a shipped one's is in cards.py
    arrays: Callable[..., Mapping[str, Tensor]] | None = None  # of the same statistics: matrices kept beside the number
    batched: bool = False  # does ``compute`` also take statistics whose numbers have a leading axis of groups?

    def __post_init__(self) -> None:
        object.__setattr__(self, "cotangents", as_cotangents(self.cotangents))  # a plain function of (f, y) is some too

    @property
    def of_kernels(self) -> bool:
        return any(s.use == "kernel" for s in leaves(self.needs))


def resolve(wanted: Iterable[str | Measure] | str | Measure | None) -> list[Measure]:
    """Names or measures -> measures; None is the default set."""
    known = catalogue()
    if isinstance(wanted, (str, Measure)):
        wanted = [wanted]
    if wanted is not None and not isinstance(wanted, Iterable):
        raise SelectionError(f"measures= takes names or richter.measures.Measure objects, not {type(wanted).__name__}. "
                             f"Known are: {', '.join(known)}.")
    chosen: dict[str, Measure] = {}
    for m in DEFAULT if wanted is None else wanted:
        if isinstance(m, str):
            if m not in known:
                near = difflib.get_close_matches(m, known, n=3)
                raise SelectionError(f"there is no measure {m!r}."
                                     + (f" Did you mean {', '.join(near)}?" if near else "")
                                     + f" Known are: {', '.join(known)}.")
            m = known[m]
        elif not isinstance(m, Measure):
            raise SelectionError(f"measures= takes names or richter.measures.Measure objects, not {type(m).__name__}.")
        chosen[m.name] = m
    if not chosen:
        raise SelectionError("measures= is empty: leave it out for the default set.")
    return list(chosen.values())


def quotient(a: float, b: float) -> float:
    """a / b, and NaN (not an error, not infinity, not 0) where it is 0/0 or b is 0 or infinite."""
    return a / b if b and math.isfinite(b) else math.nan
