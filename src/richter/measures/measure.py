"""The class ``Measure``, and ``resolve``, which turns names into measures."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from richter.core import Card, Remark, SelectionError
from richter.instrument.cotangents import Cotangents, as_cotangents, every_output
from richter.instrument.statistics import Statistic, leaves
from richter.linalg import quotient as quotient
from richter.measures import DEFAULT, catalogue

UNTITLED = Card("")


@dataclass(frozen=True)
class Measure:
    """A pure function of statistics: one number per layer (and for the whole model, if it is computed from kernels)."""

    name: str
    compute: Callable[..., float]  # takes the statistics in `needs`, in their order
    needs: tuple[Statistic, ...]
    cotangents: Cotangents = every_output
    remark: Callable[..., Remark] | None = None  # takes the same statistics and returns the note and mark of the value
    card: Card = UNTITLED  # description: title (default: its name), sentence, reference, bounds
    # takes the same statistics and returns matrices that are stored with the number
    arrays: Callable[..., Mapping[str, Tensor]] | None = None
    batched: bool = False  # whether ``compute`` also takes statistics with a leading axis of groups

    def __post_init__(self) -> None:
        object.__setattr__(self, "cotangents", as_cotangents(self.cotangents))  # a plain function of (f, y) is accepted too
        if not self.card.title:
            object.__setattr__(self, "card", replace(self.card, title=self.name))

    @property
    def of_kernels(self) -> bool:
        """Return whether it needs a tangent kernel."""
        return any(s.use == "kernel" for s in leaves(self.needs))


def resolve(wanted: Iterable[str | Measure] | str | Measure | None) -> list[Measure]:
    """Turn names and measures into measures; None gives the default set."""
    measures_by_name = catalogue()
    if isinstance(wanted, (str, Measure)):
        wanted = [wanted]
    if wanted is not None and not isinstance(wanted, Iterable):
        raise SelectionError(f"measures= takes names or richter.measures.Measure objects, not {type(wanted).__name__}. "
                             f"Known measures: {', '.join(measures_by_name)}.")
    chosen: dict[str, Measure] = {}
    for m in DEFAULT if wanted is None else wanted:
        if isinstance(m, str):
            if m not in measures_by_name:
                near = difflib.get_close_matches(m, measures_by_name, n=3)
                raise SelectionError(f"there is no measure {m!r}."
                                     + (f" Did you mean {', '.join(near)}?" if near else "")
                                     + f" Known measures: {', '.join(measures_by_name)}.")
            m = measures_by_name[m]
        elif not isinstance(m, Measure):
            raise SelectionError(f"measures= takes names or richter.measures.Measure objects, not {type(m).__name__}.")
        chosen[m.name] = m
    if not chosen:
        raise SelectionError("measures= is empty: leave it out for the default set.")
    return list(chosen.values())
