"""Definition of a statistic. It knows everything about itself: what it asks of a pass over the examples, how chunks and ranks add
up, what it costs, what stands in for it where it does not fit (or why nothing does), and its value with a group left out.
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
from functools import cached_property, partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from richter.core import Mark, MemoryBudgetError, Remark, show_bytes
from richter.core.values import SMALL, give_back
from richter.instrument.capture import TOGETHER, count, weight_bytes
from richter.instrument.cotangents import Cotangents, Use
from richter.instrument.stream import ALONE, Chunk, LayerCapture, Share, chunks, fitting, ready, steps, with_siblings
from richter.instrument.subject import GROUPS as GROUPS
from richter.instrument.subject import Subject
from richter.instrument.survey import PIECES, Network, looked

# a linear map; the same, and the whole model for what its last layer reads; a module with parameters; the whole model; anywhere
Place = Literal["map", "read", "module", "model", "any"]
Group = tuple[str, int]  # what is left out: the kind of group, and which
WITHIN = "halves"  # of what is drawn anew for each example: the error of examples has theirs already
OF_PROBE = ("examples", "held_out")  # kinds of groups whose error is that of few examples; of others it is that of a sketch

LESS_AND_LESS_EXACT = [Mark.EXACT, Mark.TRIVIAL, Mark.ESTIMATED, Mark.BOUND, Mark.IDLE, Mark.UNDEFINED, Mark.REFUSED, Mark.FAILED]
WHOLE_ONLY = "a matrix over all parameters belongs to the whole model, the rest to layers: one measure cannot use both"
APART = "kernels belong to modules, weights and moments to linear maps: one measure cannot use both"
TINY = 1e-140  # products of products below lose digits in double precision, whose smallest number is 1e-308
SMALLEST_SINGLE = 1e-30  # products below lose digits in single precision, whose smallest number is 1e-38
NO_LABELS = "the probe has no labels"
NO_INITIAL = "needs the initial weights: pass initial=state_dict, or use an Observer from the first step"


class Missing(Exception):
    """A statistic has no value here; the remark says why."""

    def __init__(self, text: str, mark: Mark = Mark.UNDEFINED) -> None:
        super().__init__(text)
        self.remark = Remark(mark, text)


class NoError(Missing):
    """There is a value, and no standard error of it; the remark says why."""


class Stack(Sequence[Any]):
    """Values of a statistic with one group left out each. ``whole`` holds all of them, its numbers with a leading axis of groups
    (None: they are too large to hold together); ``take`` makes one."""

    def __init__(self, whole: Any, groups: int, take: Callable[[int], Any]) -> None:
        self.whole, self.groups, self.take = whole, groups, take

    def __len__(self) -> int:
        return self.groups

    def __getitem__(self, group: Any) -> Any:
        if not 0 <= group < self.groups:
            raise IndexError(group)
        return self.take(group)


def together(varied: Sequence[Sequence[Any]], kind: str) -> list[tuple[Any, ...]]:
    """Values of several statistics, each without the same group."""
    sizes = sorted({len(values) for values in varied})
    if len(sizes) > 1:
        raise NoError(f"no standard error: the statistics behind this number have {' and '.join(map(str, sizes))} groups of "
                      f"{kind}, so none can be left out of all at once; give them equal numbers of groups")
    return list(zip(*varied, strict=True))


def leaving_at(place: str, kind: str, gatherings: Sequence[Gathering], values: Sequence[Any]) -> list[Sequence[Any]]:
    """The values of each with one group of a kind left out; of one without such groups its value."""
    groups = next(g.groups[kind] for g in gatherings if kind in g.groups)
    return [g.leaving(place, kind) if kind in g.groups else [value] * groups for g, value in zip(gatherings, values, strict=True)]


def values_at(place: str, gatherings: Mapping[Key, Gathering]) -> dict[Key, Any]:
    """The values of all these at one place, or a Missing that says why there is none."""
    values: dict[Key, Any] = {}
    for key, gathering in gatherings.items():
        try:
            values[key] = gathering.value(place)
        except Missing as why:
            values[key] = why.with_traceback(None)  # which would hold what was gathered
    return values


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
    if not SMALLEST_SINGLE <= size < math.inf and numbers.numel():
        low, high = (bound.item() for bound in numbers.aminmax())
        size = max(-low, high) if math.isfinite(low) and math.isfinite(high) else math.inf
    if (size == math.inf or 0 < size < SMALLEST_SINGLE or vanished) and subject.single:
        raise OutOfRange
    if 0 < size < TINY:
        raise Below
    finite(size)
    return numbers


def finite(number: float) -> float:
    """Return a size that is a divisor; raise an error if it is infinite, because the quotient would be a wrong 0."""
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
    """Requirements of a statistic: captures and passes that it needs, and the memory that it holds."""

    maps: tuple[str, ...] = ()  # captures of these; without backward and reads, only their calls
    outputs: bool = False  # does it look at what the network returns? Without maps and outputs it takes no part in a pass
    backward: bool = True  # does it look at g?
    reads: bool = False  # does it look at h? Patches of convolutions need not be unfolded otherwise
    initial: bool = False  # does it also look at the initial network?
    held: int = 0  # bytes that it keeps until it is asked
    alone: int = 0  # bytes of the smallest piece of work that it does by itself, when it is asked
    what: str = ""  # that takes those bytes
    passes: float = 0.0  # forward-backward passes of the probe that it makes by itself, about; a third of one is a forward pass
    optional: bool = False  # if there is no room in the pass it can do without, and makes passes of its own
    beside: int = 0  # bytes for each example of a chunk: of other networks, to which the pass is compared
    adds: float = 0.0  # passes of those other networks

    @property
    def takes_part(self) -> bool:
        """Return whether a statistic reads anything of the pass."""
        return bool(self.maps) or self.outputs

    @property
    def hears(self) -> bool:
        """Whether it looks at the calls of its maps alone."""
        return not self.backward and not self.reads


@dataclass(frozen=True, eq=False)
class Sweep:
    """A network that the stream runs in place of the network now, for statistics that measure another one."""

    network: Network
    rows: tuple[slice, ...] = ()  # examples that go through it together; (): chunks of any size


class Gathering(Protocol):
    """A statistic in the making. ``class Mine(Gathering)`` needs groups, a remark and ``value``; ``add`` if it is gathered."""

    groups: Mapping[str, int]  # what can be left out: kinds ("examples", "held_out", "vectors") and how many groups of each
    remark: Remark  # what is to be said beside every number that is made of it
    sweep: Sweep | None = None  # the network that it wants; None: the network now

    def add(self, reading: Reading) -> None:
        """Some examples of the probe, and what some cotangents ask of them."""
        raise AssertionError(f"{type(self).__name__} takes no part in a pass")

    def merge(self, other: Any) -> None:
        """Add what another rank has gathered from other chunks."""
        return

    def again(self) -> bool:
        """Return whether another pass is needed, e.g. first class means, then scatter about them."""
        return False

    def value(self, place: str, without: Group | None = None) -> Any:
        """Raises Missing where there is none. A group of a kind that it does not have changes nothing."""
        ...

    def leaving(self, place: str, kind: str) -> Sequence[Any]:
        """All values with one group of a kind left out, where there is a quicker way than one after another."""
        return [self.value(place, (kind, i)) for i in range(self.groups[kind])]


class Statistic(Protocol):
    """Base class of statistics. Everything but ``begin`` has a sensible answer already: ``class Mine(Statistic)``."""

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

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        """Return an empty Gathering for this subject; ``needs`` are the gatherings of the statistics that it builds on."""
        ...


@dataclass(frozen=True)
class OfKernels(Statistic):
    """Statistics of tangent kernels: of each module and of the whole model."""

    name: str
    use = "kernel"
    place = "module"


@dataclass
class Simple(Gathering):
    """A gathering without a pass: subclasses have a ``value``."""

    groups: Mapping[str, int] = field(default_factory=dict)
    remark: Remark = field(default_factory=Remark)


class Remembered(Gathering):
    """A gathering whose values are computed once for all measures; it holds the values of one place at a time."""

    def __init__(self, gathering: Gathering, everywhere: bool = False) -> None:
        self.gathering = gathering
        self.everywhere = everywhere  # hold the values of all places
        self.place: str | None = None
        self.values: dict[str, Any] = {}
        self.missing: dict[str, Missing] = {}
        self.left_out: dict[tuple[str, str], Sequence[Any]] = {}
        self.groups, self.remark = gathering.groups, gathering.remark
        self.add, self.merge, self.again = gathering.add, gathering.merge, gathering.again  # type: ignore[method-assign]

    @property
    def sweep(self) -> Sweep | None:  # type: ignore[override]
        """Network on which the remembered gathering runs."""
        return self.gathering.sweep

    def _at(self, place: str) -> None:
        """Forget the values of other places."""
        if place != self.place and not self.everywhere:
            self.values, self.missing, self.left_out, self.place = {}, {}, {}, place

    def value(self, place: str, without: Group | None = None) -> Any:
        if without is not None and without[0] in self.groups:
            return self.leaving(place, without[0])[without[1]]
        self._at(place)
        if place in self.missing:
            raise self.missing[place]
        if place not in self.values:
            try:
                with decomposed():
                    self.values[place] = self.gathering.value(place)
            except Missing as why:
                self.missing[place] = why.with_traceback(None)  # which would hold what was gathered
                raise
        return self.values[place]

    def leaving(self, place: str, kind: str) -> Sequence[Any]:
        """Values at a place with each group of this kind left out in turn."""
        self._at(place)
        if (place, kind) not in self.left_out:
            with decomposed():
                self.left_out[place, kind] = self.gathering.leaving(place, kind)
        return self.left_out[place, kind]


@dataclass(frozen=True)
class Derived(Statistic):
    """``compute(*needs)``; ``leaving(value, *needs, groups)``, if there is a quicker way, all values with one group of examples
    left out at once."""

    name: str
    compute: Callable[..., Any]
    needs: tuple[Statistic, ...]
    leaving: Callable[..., Sequence[Any]] | None = None

    @property
    def use(self) -> Use:  # type: ignore[override]
        """Whether the statistics behind it are of kernels or means."""
        return "kernel" if any(s.use == "kernel" for s in leaves(self.needs)) else "mean"

    @property
    def place(self) -> Place:  # type: ignore[override]
        """Kind of place of the statistics behind it."""
        return place_of(self.needs)

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        plans = [s.planned(subject, cotangents) for s in self.needs]
        reason = next((p for p in plans if isinstance(p, str)), "")
        return reason or replace(self, needs=tuple(s for s in plans if not isinstance(s, str)))

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
    """Remark on a number that is made of several: the least exact mark, and every text once."""
    mark = max((r.mark for r in remarks), key=LESS_AND_LESS_EXACT.index, default=Mark.EXACT)
    return Remark(mark, "; ".join(dict.fromkeys(r.text for r in remarks if r.text)))


def place_of(needs: Sequence[Statistic]) -> Place:
    """Place where a function of these statistics has values: at modules, at linear maps, for the whole model, or anywhere."""
    places = {s.place for s in leaves(needs)}
    return next((place for place in ("module", "read", "map", "model") if place in places), "any")  # type: ignore[return-value]


def leaves(needs: Sequence[Statistic]) -> list[Statistic]:
    """The statistics that touch data or weights, without repetition."""
    known: dict[str, Statistic] = {}
    for s in needs:
        for leaf in leaves(s.needs) if s.needs else [s]:
            known[leaf.name] = leaf
    return list(known.values())


# --------------------------------------------------------------------------------------------------------------- sizes
# Bytes that measuring a large model takes, whatever is measured, and that looking at it takes. Those of a small one are not what
# a bound of memory is about.

def survey_bytes(subject: Subject) -> int:
    """Bytes that a survey of a large model takes."""
    survey, asked = subject.survey, sum(info.width for info in subject.survey.maps.values())
    need = subject.itemsize * looked(subject.model, count(subject.few), survey.graph, asked, survey.outputs)
    return need if weight_bytes(subject.model) > SMALL else 0


def audit_bytes(subject: Subject, maps: Iterable[str]) -> int:
    """Bytes of the gradients with which captures of these maps are compared, some maps at a time; parts of one weight are added
    up."""
    survey, item = subject.survey, subject.itemsize
    weights = {name: subject.state[name].numel() for k in maps if (name := survey.maps[k].weight) is not None}
    largest = item * max(weights.values(), default=0)
    need = max(min(item * sum(weights.values()), TOGETHER) + largest, 3 * largest)
    return need if need > SMALL and subject.audit is not None else 0


# -------------------------------------------------------------------------------------------------------------- passes
# One pass over the probe serves every statistic that is gathered: each chunk goes forward once, backward once for each
# cotangent, and every gathering adds what it wants.

Key = tuple[Statistic, Cotangents]  # a statistic, seen through these cotangents
OUTPUTS, AUDITED = 4, 8  # arrays of an example's outputs: themselves, products with cotangents, their gradients; with an audit's
BLOCK_BYTES = 2 ** 26  # of what is asked at a time; larger blocks were slower, because they leave the cache


@dataclass
class Reading:
    """Some examples of the probe after their forward pass, with the backward signals of a block of cotangents."""

    subject: Subject
    rows: slice  # which examples of the probe
    block: slice  # which cotangents
    last: bool  # is this the last block of these examples?
    chunk: Chunk
    captures: dict[str, LayerCapture]
    before: dict[str, LayerCapture] | None  # of the initial network; None if it is not wanted
    _plain: dict[str, LayerCapture] = field(default_factory=dict)
    _ready: dict[tuple[str, bool], LayerCapture] = field(default_factory=dict)
    _kept: dict[tuple[str, int], Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first = self.block.start == 0
        self.f = self.chunk.f  # outputs "n k"

    @property
    def examples(self) -> range:
        """Numbers of the examples in the probe."""
        return range(self.rows.start, self.rows.stop)

    @cached_property
    def then(self) -> Chunk:
        """Chunk of these examples in the initial network; it runs when it is first looked at, and nothing of it is captured."""
        network = replace(self.subject.initial_network, norms=self.chunk.network.norms, audit=None)
        return replace(self.chunk, network=network, maps=())

    @property
    def Y(self) -> Tensor | None:
        """Targets "n k"; None if the probe has none."""
        return None if self.subject.targets.Y is None else self.subject.targets.Y[self.rows]

    def groups(self) -> list[tuple[int, slice]]:
        """Jackknife groups of these examples, by their numbers in the probe: (group, slice) pairs."""
        return self._groups

    @cached_property
    def _groups(self) -> list[tuple[int, slice]]:
        """Group number and slice of the examples of each jackknife group."""
        groups = self.subject.groups
        return [(g, slice((g - self.rows.start) % groups, None, groups)) for g in range(groups)]

    def counts(self, name: str, positions: int) -> list[tuple[int, slice, int]]:
        """(group, its examples, how many of their positions in a map count), of groups with examples. Positions that only the
        initial network reaches are not counted: the number is that of the other averages of this map."""
        keep, n = self.kept(name, positions), len(self.examples)
        return [(g, mine, 0 if name not in self.captures else len(range(n)[mine]) * positions if keep is None
                 else int(keep[mine].sum())) for g, mine in self.groups() if range(n)[mine]]

    def read(self, name: str) -> Tensor | None:
        """Inputs of a map, "n s d_in", zero at masked positions; None if these examples do not reach it."""
        if not self.chunk.reaches(name):
            return None
        h = self.chunk.reads(name)
        return _masked_read(h, self.kept(name, h.shape[1]))

    def plain(self, name: str) -> LayerCapture | None:
        """Capture of a map without masking; grouped maps stay in groups. None if these examples do not reach it."""
        if name in self.captures and name not in self._plain:
            self._plain[name] = ready(self.captures[name], self.subject.wide)
        return self._plain.get(name)

    def capture(self, name: str, bases: Any = None, initial: bool = False) -> LayerCapture | None:
        """A map as one matrix, masked positions zero, beside the initial network; ``bases``: g as it is asked through these
        matrices, by map, where it is kept so; ``initial``: also where only the initial network reaches it. A network that does
        not reach a map reads nothing there and asks nothing of it: h and g, or h0 and g0, are zero."""
        key = (name, bases is not None)
        if name not in self.captures and not (initial and self.before is not None and name in self.before):
            return None
        if key not in self._ready:
            self._ready[key] = self._whole(name) if bases is None else self._projected(name, bases[name])
        return self._ready[key]

    def _whole(self, name: str) -> LayerCapture:
        """Capture of a map now, with the initial one beside it if the pass has it."""
        plain = self.plain(name)
        before = None if self.before is None or name not in self.before else flat(ready(self.before[name], self.subject.wide))
        if plain is not None:
            c = flat(plain)
        else:
            assert before is not None
            W = self.subject.matrices.pair(name)[0].to(before.W)
            c = replace(before, W=W, h=_nothing(before.h), g=torch.zeros_like(before.g))
        if before is not None:
            c = replace(c, W0=before.W, h0=before.h, g0=before.g)
        elif self.before is not None:
            c = replace(c, W0=self.subject.matrices.pair(name)[1], h0=_nothing(c.h), g0=torch.zeros_like(c.g))
        return _masked(c, self.kept(name, c.g.shape[2]))

    def _projected(self, name: str, Q: Any) -> LayerCapture:
        """Capture with signals projected by Q; as it is if Q is None."""
        c = self.capture(name, initial=True)
        assert c is not None
        return c if Q is None else replace(c, g=Q.rows(c.g), g0=None if c.g0 is None else Q.rows(c.g0))

    def kept(self, name: str, positions: int) -> Tensor | None:
        """Positions of a map that count, "n s"; None: all."""
        if (name, positions) not in self._kept:
            self._kept[name, positions] = self.subject.masks.real(name, self.rows, positions)
        return self._kept[name, positions]


def _masked(c: LayerCapture, keep: Tensor | None) -> LayerCapture:
    """Capture with zeros at positions that do not count."""
    if keep is None:
        return c
    g0, h0 = c.g0, c.h0
    real = keep.to(c.g.device)[None, ..., None]
    return replace(c, g=c.g * real, h=_masked_read(c.h, keep), g0=g0 if g0 is None or g0.shape != c.g.shape else g0 * real,
                   h0=h0 if h0 is None else _masked_read(h0, keep))


def _masked_read(h: Tensor, keep: Tensor | None) -> Tensor:
    """Inputs with masked positions zero; a lookup that reads nothing has the index -1."""
    if keep is None or h.shape[:2] != keep.shape:
        return h
    keep = keep.to(h.device).reshape(*keep.shape, *[1] * (h.dim() - 2))
    return h * keep if h.is_floating_point() else torch.where(keep, h, -1)


def _nothing(h: Tensor) -> Tensor:
    """Inputs that stand for no input: zeros, or the index -1."""
    return torch.zeros_like(h) if h.is_floating_point() else torch.full_like(h, -1)


def flat(c: LayerCapture) -> LayerCapture:
    """Grouped maps as one block-diagonal matrix on the whole input."""
    if c.kind != "grouped":
        return c
    h = c.h.flatten(2) if c.h.dim() > 2 else c.h
    return replace(c, kind="dense", W=torch.block_diag(*c.W), h=h, g=c.g.flatten(3))


@dataclass(frozen=True)
class Entry:
    """A gathering that takes part in a pass."""

    gathering: Gathering
    wants: Wants
    cotangents: Cotangents  # prepared


@dataclass(frozen=True)
class ProbePass:
    """One pass over the probe: the statistics that it gathers, its sizes, and its loop."""

    subject: Subject
    wants: Sequence[Wants]

    @property
    def maps(self) -> list[str]:
        """Names of all maps that some gathering wants."""
        return list(dict.fromkeys(k for w in self.wants for k in w.maps))

    @property
    def initial(self) -> bool:
        """Return whether the initial network runs beside the current one."""
        return any(w.initial for w in self.wants) and self.subject.start is not None

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of all that is held, of one example's graph and of what is made of its outputs, and of one cotangent of one
        example. Where captures are audited, the gradients of a large model's weights are held too."""
        survey, item = self.subject.survey, self.subject.itemsize * (2 if self.initial else 1)
        names = list(dict.fromkeys([*self.subject.maps, *self.maps]))
        names = names if self.subject.audit is None else with_siblings(survey.maps, names)
        optional = {k for w in self.wants if w.optional and not w.hears for k in w.maps}
        reads = any(w.reads for w in self.wants if not w.optional)
        audit = self.subject.audit
        unfolded = sum(survey.maps[k].unfolded for k in names if reads or k in optional)
        outputs = (OUTPUTS if audit is None else AUDITED) * survey.outputs
        compared = max((survey.maps[k].reads + survey.maps[k].width for k in names), default=0) if audit is not None else 0
        apart = survey.graph // PIECES if audit is not None else 0  # what is compared in another order
        graph = item * (survey.graph + apart + compared + unfolded + outputs) + max((w.beside for w in self.wants), default=0)
        held = sum(w.held for w in self.wants) + audit_bytes(self.subject, self.maps)
        return held, graph, item * (3 * sum(survey.maps[k].width for k in names) + 2 * survey.outputs)

    @property
    def least(self) -> int:
        """Bytes that the pass needs with chunks of one example."""
        held = sum(w.held for w in self.wants)
        return max(sum(self.sizes) if self.wants else 0, held + max((w.alone for w in self.wants), default=0))

    def chunk(self) -> int:
        """Number of examples per chunk that fits the memory limit."""
        held, graph, each = self.sizes
        subject = self.subject
        return fitting(subject.memory - held, graph + each, min(subject.probe.chunk, subject.probe.n), subject.survey.drawn)

    def block(self, number: int, chunk: int) -> int:
        """Number of cotangents at a time, so that captures stay within the memory limit."""
        held, graph, each = self.sizes
        room = (self.subject.memory - held) // chunk
        return int(max(1, min(number, (room - graph) // each, BLOCK_BYTES // (chunk * each))))

    def run(self, entries: Sequence[Entry], share: Share = ALONE) -> None:
        """All examples once, and again for those that ask for it."""
        while entries:
            sweeps: dict[Sweep | None, list[Entry]] = {None: []}  # the network now comes first
            for e in entries:
                sweeps.setdefault(e.gathering.sweep, []).append(e)
            for sweep, members in sweeps.items():
                if members:
                    replace(self, wants=[e.wants for e in members])._once(members, share, sweep)
            entries = [e for e in entries if e.gathering.again()]

    def _once(self, entries: Sequence[Entry], share: Share, sweep: Sweep | None = None) -> None:
        """Maps whose calls alone are wanted are captured too if no pass of this measurement has checked them."""
        subject, audit, families = self.subject, self.subject.audit, self._families(entries)
        network, fixed = (subject.network, ()) if sweep is None else (sweep.network, sweep.rows)
        names, readable = self.maps, subject.survey.batched
        captured, heard = ({k for w in self.wants if w.hears is hears for k in w.maps} for hears in (False, True))
        if audit is not None and not audit.done and not captured:
            captured = {k for k in names if k in readable}
            for chunk in chunks(subject.network, subject.x, self.chunk(), maps=list(captured), share=share) if fixed else ():
                chunk.look()  # where norms mix examples, nothing can be checked
        batched, single = [k for k in names if k in readable], [k for k in names if k not in readable]
        if batched or any(not set(single) & set(e.wants.maps) for e in entries):
            self._round(network, families, fixed or self.chunk(), [k for k in batched if k in captured], share,
                        [k for k in batched if k in heard])
        asked, calls = [k for k in single if k in captured], [k for k in single if k in heard and not fixed]
        if asked:  # examples have no axis in these: by torch.func.vmap where the model allows it, else one by one
            families = self._families([e for e in entries if e.wants.maps and not e.wants.hears])
            together = subject.survey.vectorised and all(e.wants.backward for family in families.values() for e in family)
            number = max(subject.targets.number(c, "mean") for c in families)
            self._round(network, families, self.side_by_side(asked, number) if together else 1, asked, share)
        if calls:
            families = self._families([e for e in entries if e.wants.hears and set(calls) & set(e.wants.maps)])
            self._round(network, families, 1, [], share, calls)

    def _families(self, entries: Sequence[Entry]) -> dict[Cotangents, list[Entry]]:
        """Entries by their cotangents."""
        families: dict[Cotangents, list[Entry]] = {}
        for e in entries:
            families.setdefault(e.cotangents, []).append(e)
        return families

    def _round(self, network: Network, families: Mapping[Cotangents, Sequence[Entry]], size: int | Sequence[slice],
               maps: Sequence[str], share: Share, hears: Sequence[str] = ()) -> None:
        """All examples once, ``size`` at a time or these rows together, for these maps."""
        subject, at_once = self.subject, size if isinstance(size, int) else self.chunk()
        shared = at_once > 1 and any(k not in subject.survey.batched for k in maps)  # all cotangents go through vmap together
        blocks = {}
        for c, family in families.items():
            number = subject.targets.number(c, "mean")
            whole = shared or not any(e.wants.backward for e in family)
            blocks[c] = steps(number, number if whole else self.block(number, at_once))
        for chunk in chunks(network, subject.x, size, maps=maps, hears=hears, share=share, title="measuring"):
            self._add(chunk, families, blocks)

    def side_by_side(self, maps: Sequence[str], number: int) -> int:
        """Number of examples whose derivatives in several cotangents are computed together: a quarter of a chunk, and of the
        memory."""
        held, graph, _ = self.sizes
        each = graph + self.subject.itemsize * 3 * number * sum(self.subject.survey.maps[k].width for k in maps)
        return fitting((self.subject.memory - held) // 4, each, math.ceil(self.chunk() / 4), self.subject.survey.drawn)

    def _add(self, chunk: Chunk, families: Mapping[Cotangents, Sequence[Entry]],
             blocks: Mapping[Cotangents, Sequence[slice]]) -> None:
        """Add a chunk to all gatherings; nothing of it is held when the next one begins."""
        networks = [chunk, replace(chunk, network=self.subject.initial_network)] if self.initial else [chunk]
        asking = [c for c, family in families.items() if any(e.wants.backward for e in family)]
        for cotangents, family in families.items():
            for block in blocks[cotangents]:
                last = block is blocks[cotangents][-1]
                more = bool(asking) and not (last and cotangents is asking[-1])
                reading = self._reading(networks, block, last, more, cotangents, family)
                for e in family:
                    if e.wants.backward or reading.first:
                        e.gathering.add(reading)

    def _reading(self, networks: Sequence[Chunk], block: slice, last: bool, more: bool, cotangents: Cotangents,
                 family: Sequence[Entry]) -> Reading:
        """``networks``: the chunk, and the same examples in the initial network if it is wanted; ``more``: do other cotangents
        follow?"""
        rows = networks[0].rows
        if not any(e.wants.backward for e in family):
            for chunk in networks if last and not more else ():
                chunk.look()
            return Reading(self.subject, rows, block, last, networks[0], {}, None)
        reads = any(e.wants.reads and not e.wants.optional for e in family)
        V = self.subject.targets.rowwise(cotangents, "mean", block)
        now, *before = (chunk.ask(V(chunk.f, rows), reads, more) for chunk in networks)
        return Reading(self.subject, rows, block, last, networks[0], now, before[0] if before else None)


def wants_of(subject: Subject, keys: Iterable[Key]) -> dict[Key, Wants]:
    """All statistics behind these, each after those that it is made of."""
    every: dict[Key, Wants] = {}

    def visit(key: Key) -> None:
        for need in key[0].needs:
            visit((need, key[1]))
        every.setdefault(key, key[0].wants(subject, key[1]))

    for key in keys:
        visit(key)
    return every


def due_of(every: Mapping[Key, Wants]) -> dict[Key, Wants]:
    """Wants that a pass must serve: those that take part in it and are not optional."""
    return {key: w for key, w in every.items() if w.takes_part and not w.optional}


def streamed(subject: Subject, wants: Mapping[Key, Wants]) -> dict[Key, Wants]:
    """Choose what one pass gathers: all that is required, one optional statistic if it fits, and comparisons with other networks
    if they do not make chunks smaller. Those that add more passes come first, because they serve the others."""
    due = due_of(wants)
    compared = {key: w for key, w in sorted(wants.items(), key=lambda item: -item[1].adds) if w.beside}
    for key, w in wants.items():
        if not w.takes_part or not w.optional or key in compared:
            continue
        more = ProbePass(subject, (*due.values(), w))
        shares = key[1] in {c for _, c in due} or subject.kernel_rows.numel() == subject.probe.n
        if shares and sum(more.sizes) + w.alone <= subject.memory:
            due[key] = w
            break
    if compared and due:
        alone, more = (ProbePass(subject, tuple(some.values())) for some in (due, due | compared))
        own = max(w.alone for w in more.wants)
        if more.chunk() < alone.chunk() or sum(more.sizes) + own > subject.memory:
            return due
    return due | compared


def needed(subject: Subject, every: Mapping[Key, Wants]) -> int:
    """Bytes of the smallest pieces of work, those that are held meanwhile with them."""
    gathered = ProbePass(subject, tuple(due_of(every).values()))
    held, own = sum(w.held for w in gathered.wants), max((w.alone for w in gathered.wants), default=0)
    others = max((w.alone for w in every.values() if not (w.takes_part and not w.optional)), default=0)
    return max(gathered.least, held + own + others)  # sums that are made of rows are multiplied by weights, side by side


def check_memory(subject: Subject, stages: Sequence[tuple[Subject, Mapping[Key, Wants]]]) -> None:
    """Before any work: can every piece of it be done within memory? If not, say the least that can."""
    need = max([survey_bytes(subject), *(needed(narrow, every) for narrow, every in stages)])
    if need + subject.fixed <= subject.allowed:
        return
    gathered = [ProbePass(narrow, tuple(due.values())) for narrow, every in stages if (due := due_of(every))]
    alone = [w for _, every in stages for w in every.values() if w.alone and not (w.takes_part and not w.optional)]
    pieces = list(dict.fromkeys(w.what for w in alone))
    if gathered:
        sums = " and ".join(dict.fromkeys(w.what for p in gathered for w in p.wants if w.what))
        pieces.insert(0, f"{sums} ({show_bytes(max(p.sizes[0] for p in gathered))}) and one example")
    raise MemoryBudgetError(
        f"memory={show_bytes(subject.allowed)} cannot hold {', then '.join(pieces)}. The smallest that works here is "
        f"memory='{show_bytes(need + subject.fixed)}'; fewer layers (layers=...), kernel examples "
        f"(Probe(kernel_examples=...)) or outputs (output=...) need less.")


def gather(subject: Subject, every: Mapping[Key, Wants], due: Mapping[Key, Wants], share: Share = ALONE) -> dict[Key, Gathering]:
    """Begin every statistic after those it is made of, and gather those that are ``due`` in one pass; comparisons with other
    networks that are not have one of their own."""
    prepared: dict[Cotangents, Cotangents] = {}
    begun: dict[Key, Gathering] = {}
    for statistic, cotangents in every:
        if cotangents not in prepared:
            prepared[cotangents] = cotangents.prepare(subject)
        needs = tuple(begun[s, cotangents] for s in statistic.needs)
        begun[statistic, cotangents] = Remembered(statistic.begin(subject, prepared[cotangents], needs))
    for members in (due, {key: w for key, w in every.items() if w.beside and key not in due}):
        entries = [Entry(begun[key], wants, prepared[key[1]]) for key, wants in members.items()]
        ProbePass(subject, tuple(members.values())).run(entries, share)
    if due:
        give_back(weight_bytes(subject.model))  # graphs, before there are sums
    return begun


def gathered(subject: Subject, statistic: Statistic, cotangents: Cotangents, share: Share = ALONE) -> Gathering:
    """Gather one statistic in a pass of its own."""
    key = statistic, cotangents
    wants = wants_of(subject, [key])
    check_memory(subject, [(subject, wants)])
    return gather(subject, wants, streamed(subject, wants), share)[key]
