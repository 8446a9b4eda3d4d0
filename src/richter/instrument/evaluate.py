"""From a subject and measures to rows: plan which statistics are needed and how they can be had, gather them in one pass over the
probe, compute each measure at each place, and again with groups of examples left out for its error.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from richter.core import WHOLE, Mark, MemoryBudgetError, Remark, RichterError, Row, show_bytes
from richter.core.values import SMALL, table
from richter.instrument.capture import count, outputs_of, weight_bytes
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import (
    OF_PROBE,
    WHOLE_ONLY,
    WITHIN,
    Beyond,
    Gathering,
    Key,
    Missing,
    NoError,
    OutOfRange,
    Pass,
    StatisticsPlan,
    Wants,
    check_memory,
    due_of,
    gather,
    joined,
    leaves,
    needed,
    place_of,
    planned,
    survey_bytes,
    together,
    wants_of,
)
from richter.instrument.subject import Subject
from richter.measures.measure import Measure

# -------------------------------------------------------------------------------------------------------------- stages
# What is gathered together, and what after it: one pass over the probe where everything has room beside everything else; else
# the sums of some layers after those of others, each group in a pass of its own, and then what needs no pass. The numbers are the
# same.

BESIDE = 16  # of memory=, one part in so many may be held while other work takes all of it
SHARE = 2 / 3  # of memory=, for sums where they do not fit, the rest for examples: fewer passes are worth smaller chunks


@dataclass(frozen=True)
class Stage:
    """Some measures whose statistics are had together."""

    members: tuple[int, ...]  # their numbers
    maps: tuple[str, ...] | None  # of these maps alone; None: of all
    statistics: StatisticsPlan

    def subject(self, whole: Subject) -> Subject:
        return whole if self.maps is None else whole.narrowed(self.maps)


def staged(subject: Subject, wanted: Sequence[tuple[Key, ...]]) -> list[Stage]:
    """How the statistics of some measures are had, within memory; an error that says the least that would do."""
    every = wants_of(subject, _keys(wanted, range(len(wanted))))
    parts: list[tuple[tuple[int, ...], tuple[str, ...] | None]] = [(tuple(range(len(wanted))), None)]
    if needed(subject, every) > subject.memory or _crowded(subject, every):
        parts = _apart(subject, wanted)
    narrow = [(subject if maps is None else subject.narrowed(maps)) for _, maps in parts]
    wants = [wants_of(s, _keys(wanted, members)) for s, (members, _) in zip(narrow, parts, strict=True)]
    check_memory(subject, list(zip(narrow, wants, strict=True)))
    return [Stage(members, maps, planned(s, (), w)) for s, w, (members, maps) in zip(narrow, wants, parts, strict=True)]


def _crowded(subject: Subject, every: Mapping[Key, Wants]) -> bool:
    """Would the sums of a large model take room from work that takes all that is allowed?"""
    due = due_of(every)
    held, alone = sum(w.held for w in due.values()), any(w.alone for key, w in every.items() if key not in due)
    return alone and held > subject.memory // BESIDE and weight_bytes(subject.model) > SMALL


def _keys(wanted: Sequence[tuple[Key, ...]], members: Iterable[int]) -> list[Key]:
    return [key for i in members for key in wanted[i]]


def _apart(subject: Subject, wanted: Sequence[tuple[Key, ...]]) -> list[tuple[tuple[int, ...], tuple[str, ...] | None]]:
    """Sums of maps, as many in a pass as have room; what a pass gathers of the whole model; and what needs no pass, each kind of
    work by itself, because what it keeps is let go at the end of a stage. Passes come first: they look at what is captured."""
    every = [wants_of(subject, keys) for keys in wanted]
    due = [due_of(wants) for wants in every]
    by_map = tuple(i for i, d in enumerate(due) if d and all(statistic.place == "map" for statistic, _ in d))
    alone: dict[tuple[str, ...], tuple[int, ...]] = {}
    for i in (i for i, d in enumerate(due) if not d):
        work = tuple(dict.fromkeys(w.what for w in every[i].values() if w.what))
        alone[work] = (*alone.get(work, ()), i)
    rest = tuple(i for i, d in enumerate(due) if d and i not in by_map)
    parts: list[tuple[tuple[int, ...], tuple[str, ...] | None]] = [
        (by_map, group) for group in (_groups(subject, _keys(wanted, by_map)) if by_map else [])]
    return parts + [(members, None) for members in (rest, *alone.values()) if members]


def _groups(subject: Subject, keys: Sequence[Key]) -> list[tuple[str, ...]]:
    """Neighbours in the order of the forward pass, those nearest the outputs first: their backward passes are the shortest."""
    groups: list[tuple[str, ...]] = []
    for name in reversed(subject.maps):
        if groups and _fit(subject.narrowed(wider := (name, *groups[-1])), keys):
            groups[-1] = wider
        else:
            groups.append((name,))
    return groups


def _fit(subject: Subject, keys: Sequence[Key]) -> bool:
    """Have the sums of these maps their share of memory, and an example room beside them?"""
    every = wants_of(subject, keys)
    return sum(w.held for w in due_of(every).values()) <= SHARE * subject.memory and needed(subject, every) <= subject.memory


# ------------------------------------------------------------------------------------------------------------ evaluate

UNDEFINED = "0/0: undefined here (a kernel, gradient or label of zeros)"
NOT_A_NUMBER = ("the gradient of the outputs is NaN here, though the outputs are finite. The backward pass divides 0 by 0 or "
                "multiplies 0 by infinity: look for a square root or a norm at 0, or for a softmax or log whose inputs are all "
                "masked with -inf")
HALF = 1e-5  # numbers from passes in a coarser precision than this are no longer exact
ROUNDING = ("the gradient of the outputs is zero here, up to rounding error: it changes by more than 10 % when every weight "
            "moves by one unit in its last place")


class RichterWarning(UserWarning):
    """Something was left out of a measurement; the snapshot's notes say what and why."""


@dataclass(frozen=True)
class Planned:
    """A measure, and how its statistics will be had; or why they cannot be."""

    measure: Measure
    keys: tuple[Key, ...] = ()
    reason: str = ""
    zero: str = UNDEFINED  # what 0/0 means
    passes: bool = False  # does it rest on passes through the network?
    gradients: bool = False  # and on gradients of the outputs?

    @property
    def place(self) -> str:
        """Where it has rows: at linear maps, at these or at modules with parameters and the whole model, or there alone."""
        place = place_of(self.measure.needs)
        return "map" if place == "any" else place


Families = tuple[tuple[list[str], list[Planned]], ...]  # places, and the measures that are evaluated together there


@dataclass(frozen=True)
class Plan:
    """What a measurement will do; it holds for one architecture, whatever its weights."""

    stages: tuple[tuple[Stage, Families], ...]  # what is gathered together, and who looks at it
    order: list[tuple[str, str]]  # of rows, by layer and measure


def plan(subject: Subject, measures: Sequence[Measure], cotangents: Cotangents | None) -> Plan:
    """``cotangents``: in the place of those of the measures."""
    chosen = [_planned(subject, m, cotangents) for m in measures]
    try:
        parts = staged(subject, [p.keys for p in chosen])
    except MemoryBudgetError:  # with blocks computed again for every backward pass it may have room
        if not subject.lighten():
            raise
        chosen = [_planned(subject, m, cotangents) for m in measures]
        parts = staged(subject, [p.keys for p in chosen])
    stages = tuple((stage, _families(stage.subject(subject), [chosen[i] for i in stage.members])) for stage in parts)
    layers = _ordered(subject, {place for _, families in stages for places, _ in families for place in places})
    return Plan(stages, [(layer, m.name) for layer in layers for m in measures])


def _families(subject: Subject, chosen: Sequence[Planned]) -> Families:
    """Of one family, what is shared is held once."""
    families: dict[tuple[Any, ...], list[Planned]] = {}
    for p in chosen:
        families.setdefault((p.place, *dict.fromkeys(c for _, c in p.keys)), []).append(p)
    return tuple((subject.places(key[0]), mine) for key, mine in families.items())


def _planned(subject: Subject, m: Measure, given: Cotangents | None) -> Planned:
    """Each statistic as it can be had: through cotangents that are affordable, else through the measure's own."""
    reason, zero = "", next((s.zero for s in leaves(m.needs) if s.zero), UNDEFINED)
    if len({s.place for s in leaves(m.needs)} - {"any"}) > 1 and any(s.place == "model" for s in leaves(m.needs)):
        return Planned(m, reason=WHOLE_ONLY)
    affordable = [m.cotangents.chosen(given, subject.survey.outputs, s.use) for s in m.needs]
    for chosen in [affordable, [m.cotangents] * len(m.needs)] if given is None else [affordable]:
        plans = [(s.planned(subject, c), c) for s, c in zip(m.needs, chosen, strict=True)]
        reason = next((s for s, _ in plans if isinstance(s, str)), "")
        if not reason:
            keys = tuple((s, c) for s, c in plans if not isinstance(s, str))
            wants = wants_of(subject, keys).values()
            return Planned(m, keys, "", zero, m.of_kernels or any(w.takes_part or w.passes for w in wants),
                           m.of_kernels or any(w.maps and w.backward for w in wants))
    return Planned(m, reason=reason, zero=zero)


def _ordered(subject: Subject, layers: set[str]) -> list[str]:
    """In the order of named_modules, the maps of a module behind it, the whole model last."""
    position = {name: i for i, (name, _) in enumerate(subject.model.named_modules())}
    maps = {name: i for i, name in enumerate(subject.survey.maps)}

    def key(name: str) -> tuple[float, int]:
        stem = name
        while stem and stem not in position:
            stem = stem.rpartition(".")[0]
        return (math.inf if name == WHOLE else position.get(stem, -1), maps.get(name, -1))

    return sorted(layers, key=key)


class Known:
    """A statistic at one place, asked once for all measures."""

    def __init__(self, gathering: Gathering, place: str) -> None:
        self.gathering, self.place, self.groups, self.remark = gathering, place, gathering.groups, gathering.remark
        self.left_out: dict[str, Sequence[Any]] = {}
        self.missing: Missing | None = None

    @cached_property
    def value(self) -> Any:
        """None if there is none; ``missing`` then says why."""
        try:
            return self.gathering.value(self.place)
        except Missing as why:
            self.missing = why.with_traceback(None)  # which would hold what was gathered
            return None

    def leaving(self, kind: str, groups: int) -> Sequence[Any]:
        """Its values with one group left out; always the same if it has no groups of that kind."""
        if kind not in self.left_out:
            has = kind in self.groups
            self.left_out[kind] = self.gathering.leaving(self.place, kind) if has else [self.value] * groups
        return self.left_out[kind]


@dataclass
class Evaluation:
    """One measurement in the making. ``rows()`` does the work."""

    subject: Subject
    plan: Plan
    step: int | None = None
    matrices: int = 0  # keep the arrays of layers with at most so many inputs
    notes: dict[str, str] = field(default_factory=dict)
    arrays: dict[tuple[str, str], NDArray[np.float32]] = field(default_factory=dict)
    here: dict[Key, Known] = field(default_factory=dict)  # the statistics of the place in hand

    def rows(self) -> list[Row]:
        rows: list[Row] = []
        for stage, families in self.plan.stages:
            rows += self._stage(stage, families)
        self._remark()
        rank = {name: i for i, name in enumerate(self.plan.order)}
        return sorted(rows, key=lambda r: rank[r.layer, r.measure])

    def _stage(self, stage: Stage, families: Families) -> list[Row]:
        subject = stage.subject(self.subject)
        known = gather(subject, stage.statistics)
        rows: list[Row] = []
        for i, (places, measures) in enumerate(families):
            for place in places:
                self.here = {key: Known(known[key], place) for p in measures for key in p.keys}
                rows += [self._row(p, place) for p in measures]
            later = {c for _, others in families[i + 1:] for p in others for _, c in p.keys}
            known = {key: g for key, g in known.items() if key[1] in later}  # what no other family looks at is let go
        self.here = {}
        subject.let_go()
        return rows

    def _row(self, p: Planned, place: str) -> Row:
        m = p.measure
        try:
            if p.reason:
                raise Missing(p.reason)
            known = [self.here[key] for key in p.keys]
            arguments = [k.value for k in known]  # all are asked: what Previous() keeps of each is kept for the next time
            for k in known:
                if k.missing is not None:
                    raise k.missing
            if p.gradients and place in (self.subject.noise.modules if m.of_kernels else self.subject.noise.maps):
                raise Missing(ROUNDING)
            value, remark = self._computed(m, place, arguments)
        except Missing as why:
            if isinstance(why, Beyond) and self.subject.single:
                raise OutOfRange from why
            text = NOT_A_NUMBER if isinstance(why, Beyond) and self._undefined(place) else why.remark.text
            return Row(self.step, place, m.name, math.nan, note=text, mark=why.remark.mark)
        if math.isnan(value):
            remark = Remark(Mark.UNDEFINED, remark.text or p.zero)
        remarks = [r for r in (remark, *(k.remark for k in known), self._precision if p.passes else Remark()) if r != Remark()]
        remark = joined(remarks) if remarks else Remark()
        error = math.nan
        if self.subject.errors and math.isfinite(value):
            try:
                errors = _errors(m, known)
            except NoError as why:
                remark = joined([remark, Remark(text=why.remark.text)])
            else:
                error = _in_all(errors)
                remark = joined([remark, *_of_sketch(errors)])
        return Row(self.step, place, m.name, value, error, remark.text, remark.mark)

    @cached_property
    def _precision(self) -> Remark:
        """What is to be said of a number that rests on passes through a network that computes in a coarser precision."""
        coarsest = self.subject.state.precision
        eps = torch.finfo(coarsest).eps
        if eps <= torch.finfo(self.subject.source.dtype).eps:
            return Remark()
        text = f"the network computes in {str(coarsest).removeprefix('torch.')}: relative rounding error {eps:.0e}"
        return Remark(Mark.ESTIMATED if eps > HALF else Mark.EXACT, text)

    def _undefined(self, place: str) -> bool:
        """Is the gradient NaN here?"""
        undefined = self.subject.audit.undefined if self.subject.audit is not None else set()
        modules = {self.subject.survey.maps[k].module for k in undefined}
        return place in undefined | modules or (place == WHOLE and bool(undefined))

    def _computed(self, m: Measure, place: str, arguments: Sequence[Any]) -> tuple[float, Remark]:
        """The number, and what its measure says of it; a measure that fails does not end the training that it looks at."""
        try:
            value, remark = float(m.compute(*arguments)), m.remark(*arguments) if m.remark else Remark()
            if m.arrays is not None and self._keeps(m, place):
                for name, M in m.arrays(*arguments).items():
                    if max(M.shape) <= self.matrices:
                        self.arrays[place, name] = _symmetric(M).float().cpu().numpy()
        except (Missing, RichterError):
            raise
        except Exception as why:
            raise Missing(f"the measure failed ({type(why).__name__}: {why})", Mark.FAILED) from why
        return value, remark

    def _keeps(self, m: Measure, place: str) -> bool:
        """Are its arrays kept? A map's are as wide as what it reads, and are not made where that is too wide."""
        W = self.subject.survey.matrices.get(place)
        return self.matrices > 0 and (m.of_kernels or W is None or W.shape[-1] <= self.matrices)

    def _remark(self) -> None:
        """What a user should know of layers that have no or half a row."""
        subject = self.subject
        notes = subject.survey.notes
        self.notes.update({k: remark.text for k, remark in notes.items() if subject.layers is None or k in subject.selected([k])})
        self.notes.update(subject.remarks)
        frozen = {name.rpartition(".")[0] for name, p in subject.model.named_parameters() if not p.requires_grad}
        for name in subject.selected(sorted(frozen - {u.module for u in subject.units})):
            self.notes[name] = "frozen (requires_grad=False): it has no tangent kernel and its weights do not move"
        blind = [remark.text for remark in notes.values() if remark.mark is Mark.REFUSED]
        if blind:
            warnings.warn(blind[0] + (f" ({len(blind)} layers in all.)" if len(blind) > 1 else ""), RichterWarning, stacklevel=5)


def _symmetric(M: Tensor) -> Tensor:
    """A matrix that is symmetric but for rounding is so to the last bit: half of it is kept."""
    return (M + M.T) / 2 if M.shape[0] == M.shape[-1] and (M - M.T).norm() <= 1e-5 * M.norm() else M


def _errors(m: Measure, known: Sequence[Known]) -> dict[str, float]:
    """The jackknife over each kind of group that can be left out, NaN where it cannot be had; their variances add. Raises NoError
    where it is known why there is none at all."""
    errors: dict[str, float] = {}
    reason: NoError | None = None
    for kind, groups in {kind: n for k in known for kind, n in k.groups.items()}.items():
        try:
            errors[kind] = _error(m, known, kind, groups)
        except NoError as why:
            errors[kind], reason = math.nan, reason or why
        except (Missing, ArithmeticError, TypeError, ValueError):  # e.g. only examples of one group reach this layer
            errors[kind] = math.nan
    if reason is not None and not any(map(math.isfinite, errors.values())):
        raise reason
    return errors


def _error(m: Measure, known: Sequence[Known], kind: str, groups: int) -> float:
    """The jackknife over one kind of group."""
    cases = together([k.leaving(kind, groups) for k in known], kind)
    values = [float(m.compute(*arguments)) for arguments in cases]
    if any(map(math.isnan, values)):
        why = m.remark(*cases[[*map(math.isnan, values)].index(True)]).text if m.remark else ""
        raise NoError(f"no standard error: without one of {len(values)} groups of {kind} it is 0/0{why and f' ({why})'}")
    return jackknife(values)


def _in_all(errors: Mapping[str, float]) -> float:
    """Variances of kinds add, as far as they are known. That of few examples has what is drawn for each of them already; but both
    are uncertain, and the whole is not said to be less than a part."""
    known = {kind: error for kind, error in errors.items() if math.isfinite(error)}
    if not known:
        return math.nan
    within = known.pop(WITHIN, 0.0)
    return max(math.hypot(*known.values()), within)


def _of_sketch(errors: Mapping[str, float]) -> list[Remark]:
    """The sketch's own share of an error, and whether it is all that is known of it."""
    own = [error for kind, error in errors.items() if kind not in OF_PROBE]
    known = [error for error in own if math.isfinite(error)]
    size = math.hypot(*known)
    alone = "" if any(math.isfinite(errors.get(kind, math.nan)) for kind in OF_PROBE) else ", that of few examples not among it"
    if len(known) < len(own):
        return [Remark(text=f"sketch error {size:.2g} or more{alone}" if size else "sketch error unknown")]
    return [Remark(text=f"sketch error {size:.2g}{alone}")] if size > 0 else []  # nor of what has none


def jackknife(values: Sequence[float]) -> float:
    """The standard error from values with one group left out each: sqrt((G-1)/G sum (v - mean)^2)."""
    G = len(values)
    if G < 2 or not all(map(math.isfinite, values)):
        return math.nan
    mean = sum(values) / G
    return math.sqrt((G - 1) / G * sum((v - mean) ** 2 for v in values))


# ------------------------------------------------------------------------------------------------------------ foreseen
# What a measurement will cost before it runs: which measures are had together, in how many passes over the probe, and in how
# many bytes.
#
#     >>> print(richter.plan(model, probe))

FORWARD = 1 / 3  # of a forward-backward pass
AUDIT = 3 * FORWARD  # another order, and one backward pass with gradients of weights
HEAD = ("measure", "passes", "bytes", "")


@dataclass(frozen=True)
class Line:
    """One measure's share: what it would take by itself."""

    measure: str
    passes: float
    bytes: int
    note: str  # why there will be no number, or that it shares a pass

    @property
    def cells(self) -> tuple[str, str, str, str]:
        return self.measure, f"{self.passes:.1f}", show_bytes(self.bytes), self.note


@dataclass(frozen=True)
class Step:
    """What is gathered together."""

    measures: tuple[str, ...]
    layers: int | None  # of some layers alone; None: of all
    passes: float
    bytes: int  # of the smallest pieces of work, with all that is held meanwhile

    def __str__(self) -> str:
        of = "" if self.layers is None else f" of {self.layers} layers"
        return f"{', '.join(self.measures)}{of}: {self.passes:.1f} passes, {show_bytes(self.bytes)} at least"


@dataclass(frozen=True)
class MeasurementPlan:
    """How a measurement will be made. ``print(plan)`` shows it. Passes are forward-backward passes of the probe, about: what is
    multiplied afterwards, and the first look at a model, come on top."""

    examples: int
    outputs: int  # of each example
    memory: int  # that is allowed
    steps: tuple[Step, ...]  # one after another
    lines: tuple[Line, ...]
    pass_seconds: float  # of one pass, from a forward pass of a few examples
    look: int = 0  # bytes of the first look at a large model
    anew: int = 0  # blocks of the model that are computed again for every backward pass

    @property
    def passes(self) -> float:
        return sum(step.passes for step in self.steps)

    @property
    def bytes(self) -> int:
        """The smallest memory= that works for these steps."""
        return max([self.look, *(step.bytes for step in self.steps)])

    @property
    def seconds(self) -> float:
        return self.passes * self.pass_seconds

    def __str__(self) -> str:
        return "\n".join([
            f"{len(self.lines)} measures of {self.examples} examples with {self.outputs:,} outputs: {self.passes:.1f} passes of "
            f"{self.pass_seconds:.2g} s, within memory='{show_bytes(self.memory)}'",
            *([f"a look at the model: {show_bytes(self.look)}"] if self.look else []),
            *([f"{self.anew} blocks of the model are computed again for every backward pass: its graph has no room"]
              if self.anew else []),
            *(f"{i}. {step}" for i, step in enumerate(self.steps, 1)),
            table([HEAD, *(line.cells for line in self.lines)])])


def foreseen(subject: Subject, plan: Plan) -> MeasurementPlan:
    """What a plan says, in numbers."""
    steps: list[Step] = []
    lines: dict[str, Line] = {}
    for stage, families in plan.stages:
        narrow = stage.subject(subject)
        measures = [p for _, mine in families for p in mine]
        every = wants_of(narrow, [key for p in measures for key in p.keys])
        steps.append(Step(tuple(p.measure.name for p in measures), None if stage.maps is None else len(stage.maps),
                          _passes(narrow, every, dict(stage.statistics.due)), needed(narrow, every) + subject.fixed))
        for p in measures:
            lines[p.measure.name] = _line(narrow, p, lines.get(p.measure.name), len(measures) > 1, subject.fixed)
    order = dict.fromkeys(name for _, name in plan.order)
    return MeasurementPlan(subject.probe.n, subject.survey.outputs, subject.allowed, tuple(steps),
                           tuple(lines[name] for name in order if name in lines), _seconds(subject), _look(subject),
                           len(subject.survey.anew))


def _look(subject: Subject) -> int:
    need = survey_bytes(subject)
    return need + subject.fixed if need else 0


def _passes(subject: Subject, every: Mapping[Key, Wants], due: Mapping[Key, Wants]) -> float:
    """One forward pass for all that is gathered, a backward pass for each cotangent; and passes that statistics make by
    themselves, those that share a journey once."""
    backward = {c: subject.number(c, "mean") for (_, c), w in due.items() if w.backward}
    pass_itself = Pass(subject, tuple(due.values()))
    networks = 2 if pass_itself.initial else 1
    again = FORWARD if subject.survey.anew else 0.0  # blocks go forward once more for every backward pass
    audit = AUDIT if subject.audit is not None else 0.0
    gathered = networks * (FORWARD + (FORWARD + again) * sum(backward.values())) + audit if due else 0.0
    own = {(w.what, w.passes) for key, w in every.items() if key not in due}
    return gathered + (1 + again) * sum(passes for _, passes in own)


def _line(subject: Subject, p: Planned, before: Line | None, several: bool, fixed: int) -> Line:
    every = wants_of(subject, p.keys)
    due = due_of(every)
    note = p.reason or ("shares a pass" if due and several else "")
    passes, size = _passes(subject, every, due), needed(subject, every) + fixed if every else 0
    if before is not None:
        passes, size = passes + before.passes, max(size, before.bytes)
    return Line(p.measure.name, passes, size, note)


def _seconds(subject: Subject) -> float:
    """Of a forward-backward pass of the probe: three times a forward pass of the examples that were looked at, as many as there
    are of them. The first time warms up."""
    n = count(subject.few)
    outputs_of(subject.model, subject.few, subject.output)
    begun = time.perf_counter()
    outputs_of(subject.model, subject.few, subject.output)
    taken = time.perf_counter() - begun
    return 3 * taken * subject.probe.n / n if n else math.nan
