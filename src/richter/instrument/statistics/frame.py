"""What a statistic is. It knows everything about itself: what it asks of a pass over the examples, how chunks and ranks add up,
what it costs, what stands in for it where it does not fit (or why nothing does), and its value with a group left out.
``evaluate`` only plans and asks.

    chosen = statistic.planned(subject, cotangents)      # itself, an estimate in its place, or why there is no number
    gathering = chosen.begin(subject, cotangents, needs)
    for chunk in the pass: gathering.add(chunk)          # what ``wants`` says: captures of some maps
    gathering.value("0"), gathering.value("0", without=("examples", 3))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from richter.core import Mark, Remark
from richter.instrument.cotangents import Cotangents, Use

if TYPE_CHECKING:
    from richter.instrument.statistics.passes import Reading
    from richter.instrument.subject import Subject

GROUPS = 8  # of examples, for the jackknife
# a linear map; the same, and the whole model for what its last layer reads; a module with parameters; the whole model; anywhere
Place = Literal["map", "read", "module", "model", "any"]
Group = tuple[str, int]  # what is left out: the kind of group, and which
WITHIN = "halves"  # of what is drawn anew for each example: the error of examples has theirs already
OF_PROBE = ("examples", "held_out")  # kinds of groups whose error is that of few examples; of others it is that of a sketch

LESS_AND_LESS_EXACT = [Mark.EXACT, Mark.TRIVIAL, Mark.ESTIMATED, Mark.BOUND, Mark.IDLE, Mark.UNDEFINED, Mark.REFUSED, Mark.FAILED]
WHOLE_ONLY = "a matrix over all parameters belongs to the whole model, the rest to layers: one measure cannot use both"
APART = "kernels belong to modules, weights and moments to linear maps: one measure cannot use both"
TINY = 1e-140  # products of products below lose digits in double precision, whose smallest number is 1e-308
SMALL = 1e-30  # products below lose digits in single precision, whose smallest number is 1e-38
NO_LABELS = "the probe has no labels"
NO_INITIAL = "needs the initial weights: pass initial=state_dict, or use an Observer from the first step"


class Missing(Exception):
    """A statistic has no value here; the remark says why."""

    def __init__(self, text: str, mark: Mark = Mark.UNDEFINED) -> None:
        super().__init__(text)
        self.remark = Remark(mark, text)


class NoError(Missing):
    """There is a value, and no standard error of it; the remark says why."""


def together(varied: Sequence[Sequence[Any]], kind: str) -> list[tuple[Any, ...]]:
    """The values of several statistics with the same group left out of each."""
    sizes = sorted({len(values) for values in varied})
    if len(sizes) > 1:
        raise NoError(f"no standard error: what it is made of is in {' and '.join(map(str, sizes))} groups of {kind}, and none "
                     f"can be left out of all at once; give them as many")
    return list(zip(*varied, strict=True))


def every(values: Iterable[Callable[[], Any]]) -> list[Any]:
    """All of them; or the first Missing, after all were asked: what Previous() keeps of each is kept for the next time."""
    known: list[Any] = []
    missing: Missing | None = None
    for value in values:
        try:
            known.append(value())
        except Missing as why:
            missing = missing or why
    if missing is not None:
        raise missing
    return known


class Beyond(Missing):
    """Products have left the range of floating point numbers."""

    def __init__(self) -> None:
        super().__init__("weights, activations or gradients are too large here: products of them are beyond the range of "
                         "floating point numbers")


class Below(Missing):
    """Products have become so small that they lose digits in double precision."""

    def __init__(self) -> None:
        super().__init__("weights, activations or gradients are too small here: products of them are below the range of "
                         "floating point numbers")


class OutOfRange(Exception):
    """Products of single precision have left its range; in double precision they may be had."""


def in_range(numbers: Tensor, subject: Subject, vanished: bool = False) -> Tensor:
    """Sums of products, if one can compute with them and with their products. ``vanished``: they are zero, and should not be."""
    size = numbers.norm().item() / math.sqrt(max(1, numbers.numel()))  # the largest is at least that, and this is quicker
    if not SMALL <= size < math.inf and numbers.numel():
        low, high = (bound.item() for bound in numbers.aminmax())
        size = max(-low, high) if math.isfinite(low) and math.isfinite(high) else math.inf
    if subject.single and (size == math.inf or 0 < size < SMALL or vanished):
        raise OutOfRange
    if 0 < size < TINY:
        raise Below
    finite(size)
    return numbers


def finite(number: float) -> float:
    """A size by which something is divided: by one that is infinite, a wrong 0 would come out."""
    if not math.isfinite(number):
        raise Beyond
    return number


@contextmanager
def decomposed() -> Iterator[None]:
    """A matrix without eigenvalues is a row that says so, not the end of the measurement."""
    try:
        yield
    except (torch.linalg.LinAlgError, np.linalg.LinAlgError) as why:
        raise Missing(f"the eigenvalues of a matrix could not be computed ({why})", Mark.FAILED) from why


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
    passes: float = 0.0  # forward-backward passes of the probe that it makes by itself, about; a third of one is a forward pass
    optional: bool = False  # if there is no room in the pass it can do without, and makes passes of its own

    @property
    def takes_part(self) -> bool:
        return bool(self.maps) or self.outputs


class Gathering(Protocol):
    """A statistic in the making. ``class Mine(Gathering)`` needs groups, a remark and ``value``; ``add`` if it is gathered."""

    groups: Mapping[str, int]  # what can be left out: kinds ("examples", "held_out", "vectors") and how many groups of each
    remark: Remark  # what is to be said beside every number that is made of it

    def add(self, reading: Reading) -> None:
        """Some examples of the probe, and what some cotangents ask of them."""
        raise AssertionError(f"{type(self).__name__} takes no part in a pass")

    def merge(self, other: Any) -> None:
        """What another rank has gathered of other chunks. What is not gathered every rank has."""
        return

    def again(self) -> bool:
        """After a pass: is another one needed? (Class means first, then what is centred on them.)"""
        return False

    def value(self, place: str, without: Group | None = None) -> Any:
        """Raises Missing where there is none. A group of a kind that it does not have changes nothing."""
        ...

    def leaving(self, place: str, kind: str) -> Sequence[Any]:
        """All values with one group of a kind left out, where there is a quicker way than one after another."""
        return [self.value(place, (kind, i)) for i in range(self.groups[kind])]


class Statistic(Protocol):
    """What measures are made of. Everything but ``begin`` has a sensible answer already: ``class Mine(Statistic)``."""

    name: str
    needs: tuple[Statistic, ...] = ()  # of a function of other statistics
    use: Use = "mean"
    place: Place = "map"
    zero: str = ""  # what 0/0 means, if more can be said than that
    of_examples: bool = True  # is it another one with other examples in the probe?

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        """Itself; an estimate with a label of its own where it is too large; or why neither can be had."""
        return self

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        return Wants()

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering: ...


@dataclass(frozen=True)
class OfKernels(Statistic):
    """What is to be known of tangent kernels, those of each module and that of the whole model."""

    name: str
    use = "kernel"
    place = "module"


@dataclass
class Simple(Gathering):
    """What is not gathered in a pass: subclasses have a ``value``."""

    groups: Mapping[str, int] = field(default_factory=dict)
    remark: Remark = field(default_factory=Remark)


class Remembered(Gathering):
    """A gathering whose values are computed once for all measures; those of one place at a time are held."""

    def __init__(self, gathering: Gathering, everywhere: bool = False) -> None:
        self.gathering = gathering
        self.everywhere = everywhere  # hold the values of all places
        self.place: str | None = None
        self.values: dict[str, Any] = {}
        self.left_out: dict[tuple[str, str], Sequence[Any]] = {}

        self.groups, self.remark = gathering.groups, gathering.remark
        self.add, self.merge, self.again = gathering.add, gathering.merge, gathering.again  # type: ignore[method-assign]

    def _at(self, place: str) -> None:
        if place != self.place and not self.everywhere:
            self.values, self.left_out, self.place = {}, {}, place

    def value(self, place: str, without: Group | None = None) -> Any:
        if without is not None and without[0] in self.groups:
            return self.leaving(place, without[0])[without[1]]
        self._at(place)
        if place not in self.values:
            with decomposed():
                self.values[place] = self.gathering.value(place)
        return self.values[place]

    def leaving(self, place: str, kind: str) -> Sequence[Any]:
        """One value for each group of a kind that it has."""
        self._at(place)
        if (place, kind) not in self.left_out:
            with decomposed():
                self.left_out[place, kind] = self.gathering.leaving(place, kind)
        return self.left_out[place, kind]


# (subject, cotangents, why the exact form cannot be had or "") -> what stands in for it; None: nothing has to
Estimate = Callable[["Subject", Cotangents, str], Statistic | None]


@dataclass(frozen=True)
class Derived(Statistic):
    """``compute(*needs)``; ``leaving(value, *needs, groups)``, if there is a quicker way, all values with one group of examples
    left out at once; ``estimate`` says what stands in for it."""

    name: str
    compute: Callable[..., Any]
    needs: tuple[Statistic, ...]
    leaving: Callable[..., Sequence[Any]] | None = None
    estimate: Estimate | None = None

    @property
    def use(self) -> Use:  # type: ignore[override]
        return "kernel" if any(s.use == "kernel" for s in leaves(self.needs)) else "mean"

    @property
    def place(self) -> Place:  # type: ignore[override]
        return place_of(self.needs)

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        plans = [s.planned(subject, cotangents) for s in self.needs]
        reason = next((p for p in plans if isinstance(p, str)), "")
        stand_in = self.estimate(subject, cotangents, reason) if self.estimate is not None else None
        return stand_in or reason or replace(self, needs=tuple(s for s in plans if not isinstance(s, str)))

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return DerivedGathering(self, needs)


class DerivedGathering(Simple):
    def __init__(self, statistic: Derived, needs: tuple[Gathering, ...]) -> None:
        super().__init__({kind: n for g in needs for kind, n in g.groups.items()}, joined([g.remark for g in needs]))
        self.statistic, self.needs = statistic, needs
        self.last: tuple[str | None, Any] = (None, None)  # the place that was asked last, and its value

    def value(self, place: str, without: Group | None = None) -> Any:
        value = self.statistic.compute(*every(partial(g.value, place, without) for g in self.needs))
        self.last = (place, value) if without is None else self.last
        return value

    def leaving(self, place: str, kind: str) -> Sequence[Any]:
        s, groups = self.statistic, self.groups[kind]
        if s.leaving is not None and kind == "examples":
            if self.last[0] != place:
                self.value(place)
            return s.leaving(self.last[1], *(g.value(place) for g in self.needs), groups)
        varied = [g.leaving(place, kind) if kind in g.groups else [g.value(place)] * groups for g in self.needs]
        return [s.compute(*values) for values in together(varied, kind)]


def joined(remarks: Sequence[Remark]) -> Remark:
    """What is to be said of a number that is made of several: the least exact mark, and every text once."""
    mark = max((r.mark for r in remarks), key=LESS_AND_LESS_EXACT.index, default=Mark.EXACT)
    return Remark(mark, "; ".join(dict.fromkeys(r.text for r in remarks if r.text)))


def place_of(needs: Sequence[Statistic]) -> Place:
    """Where a function of these has values: at modules, at linear maps, of the whole model alone, or wherever it is asked."""
    places = {s.place for s in leaves(needs)}
    return next((place for place in ("module", "read", "map", "model") if place in places), "any")  # type: ignore[return-value]


def leaves(needs: Sequence[Statistic]) -> list[Statistic]:
    """The statistics that touch data or weights, without repetition."""
    known: dict[str, Statistic] = {}
    for s in needs:
        for leaf in leaves(s.needs) if s.needs else [s]:
            known[leaf.name] = leaf
    return list(known.values())
