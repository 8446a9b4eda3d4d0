"""What a statistic is. It knows everything about itself: what it asks of a pass over the examples, how chunks and ranks add up,
what it costs, what stands in for it where it does not fit (or why nothing does), and its value with a group left out.
``evaluate`` only plans and asks.

    chosen = statistic.planned(subject, cotangents)      # itself, an estimate in its place, or why there is no number
    gathering = chosen.begin(subject, cotangents, needs)
    for chunk in the pass: gathering.add(chunk)          # what ``wants`` says: captures of some maps
    gathering.value("0"), gathering.value("0", without=("examples", 3))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from richter.core import Mark, Remark
from richter.instrument.cotangents import Cotangents, Use

if TYPE_CHECKING:
    from richter.instrument.statistics.passes import Reading
    from richter.instrument.subject import Subject

GROUPS = 8  # of examples, for the jackknife
Place = Literal["map", "module", "model", "any"]  # a linear map, a module with parameters, the whole model, or anywhere
Group = tuple[str, int]  # what is left out: the kind of group, and which

APART = "kernels belong to modules, weights and moments to linear maps: one measure cannot use both"
NO_LABELS = "the probe has no labels"
NO_INITIAL = "needs the initial weights: pass initial=state_dict, or use an Observer from the first step"


class Missing(Exception):
    """A statistic has no value here; the remark says why."""

    def __init__(self, text: str, mark: Mark = Mark.UNDEFINED) -> None:
        super().__init__(text)
        self.remark = Remark(mark, text)


@dataclass(frozen=True)
class Wants:
    """What a statistic asks of a pass over the examples, and what it holds in memory."""

    maps: tuple[str, ...] = ()  # captures of these
    outputs: bool = False  # does it look at what the network returns? Without maps and outputs it takes no part in a pass
    backward: bool = True  # does it look at g?
    reads: bool = False  # does it look at h? Patches of convolutions need not be unfolded otherwise
    initial: bool = False  # does it also look at the initial network?
    held: int = 0  # bytes that it keeps until it is asked
    alone: int = 0  # bytes of the smallest piece of work that it does by itself, when it is asked
    what: str = ""  # that takes those bytes
    optional: bool = False  # if there is no room in the pass it can do without, and makes passes of its own

    @property
    def takes_part(self) -> bool:
        return bool(self.maps) or self.outputs


class Gathering(Protocol):
    """A statistic in the making."""

    @property
    def groups(self) -> Mapping[str, int]:
        """What can be left out: kinds ("examples", "held_out", "vectors") and how many groups of each."""

    @property
    def remark(self) -> Remark:
        """What is to be said beside every number that is made of it."""

    def add(self, reading: Reading) -> None:
        """Some examples of the probe, and what some cotangents ask of them."""

    def merge(self, other: Any) -> None:
        """What another rank has gathered of other chunks."""

    def again(self) -> bool:
        """After a pass: is another one needed? (Class means first, then what is centred on them.)"""

    def value(self, place: str, without: Group | None = None) -> Any:
        """Raises Missing where there is none. A group of a kind that it does not have changes nothing."""


class Statistic(Protocol):
    """What measures are made of. Everything but ``begin`` has a sensible answer already: ``class Mine(Statistic)``."""

    name: str
    needs: tuple[Statistic, ...] = ()  # of a function of other statistics
    use: Use = "mean"
    place: Place = "map"
    zero: str = ""  # what 0/0 means, if more can be said than that

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        """Itself; an estimate with a label of its own where it is too large; or why neither can be had."""
        return self

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        return Wants()

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering: ...


@dataclass
class Simple:
    """The rest of a Gathering for what is not gathered in a pass: subclasses have a ``value``."""

    groups: Mapping[str, int] = field(default_factory=dict)
    remark: Remark = field(default_factory=Remark)

    def add(self, reading: Reading) -> None:
        raise AssertionError(f"{type(self).__name__} takes no part in a pass")

    def merge(self, other: Any) -> None:
        """Every rank has all of it."""

    def again(self) -> bool:
        return False


class Remembered:
    """A gathering whose values are computed once for all measures; those of one place at a time are held."""

    def __init__(self, gathering: Gathering, everywhere: bool = False) -> None:
        self.gathering, self.groups, self.remark = gathering, gathering.groups, gathering.remark
        self.add, self.merge, self.again = gathering.add, gathering.merge, gathering.again
        self.everywhere = everywhere  # hold the values of all places
        self.place: str | None = None
        self.values: dict[tuple[str, Group | None], Any] = {}

    def value(self, place: str, without: Group | None = None) -> Any:
        if place != self.place and not self.everywhere:
            self.values, self.place = {}, place
        key = (place, without if without is not None and without[0] in self.groups else None)
        if key not in self.values:
            self.values[key] = self.gathering.value(place, key[1])
        return self.values[key]


def leaves(needs: Sequence[Statistic]) -> list[Statistic]:
    """The statistics that touch data or weights, without repetition."""
    known: dict[str, Statistic] = {}
    for s in needs:
        for leaf in leaves(s.needs) if s.needs else [s]:
            known[leaf.name] = leaf
    return list(known.values())
