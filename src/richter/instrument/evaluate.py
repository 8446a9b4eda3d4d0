"""Plan a measurement, gather its statistics, and evaluate its measures and their standard errors.

    >>> print(richter.plan(model, probe))       # which measures share a pass, in how many passes and bytes
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

from richter.core import WHOLE, Mark, MemoryBudgetError, Remark, RichterError, RichterWarning, Row, show_bytes
from richter.core.values import REFERENCE_COPY, SMALL, ZERO_START, table
from richter.instrument.capture import count, outputs_of, select, to_device, weight_bytes
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
    ProbePass,
    Stack,
    Wants,
    check_memory,
    due_of,
    gather,
    joined,
    leaves,
    leaving_at,
    needed,
    place_of,
    streamed,
    survey_bytes,
    together,
    values_at,
    wants_of,
)
from richter.instrument.subject import Subject
from richter.instrument.survey import Noise, rounding_errors
from richter.measures.measure import Measure

BESIDE = 16  # the sums of a large model may hold 1/16 of memory= beside work that takes all of it
SHARE = 2 / 3  # of memory= for sums where they do not fit, the rest for examples: fewer passes are worth smaller chunks
UNDEFINED = "0/0: undefined here (a kernel, gradient or label of zeros)"
NOT_A_NUMBER = ("the gradient of the outputs is NaN here, though the outputs are finite. The backward pass divides 0 by 0 or "
                "multiplies 0 by infinity: look for a square root or a norm at 0, or for a softmax or log whose inputs are all "
                "masked with -inf")
COARSE = 1e-5  # a number from passes whose rounding error is larger than this is marked as estimated
ROUNDING = ("the gradient of the outputs is zero here, up to rounding error: it changes by more than 10 % when every weight "
            "moves by one unit in its last place")


# ---------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class MeasurePlan:
    """A measure with its statistics as they can be had, or the reason why it has no value."""

    measure: Measure
    keys: tuple[Key, ...] = ()
    reason: str = ""
    zero: str = UNDEFINED  # what 0/0 means
    passes: bool = False  # does it rest on passes through the network?
    gradients: bool = False  # does it rest on gradients of the outputs?
    of_kernels: bool = False

    @property
    def place(self) -> str:
        """Kind of place that has a value of this measure: a map, a module or the whole model."""
        place = place_of(self.measure.needs)
        return "map" if place == "any" else place


@dataclass(frozen=True)
class Stage:
    """Measures whose statistics are gathered together: in one pass, and in passes that statistics make themselves."""

    maps: tuple[str, ...] | None  # only these maps; None: all of them
    wants: Mapping[Key, Wants]  # of every statistic, each after those it is made of
    due: Mapping[Key, Wants]  # those that the pass gathers
    families: tuple[tuple[list[str], list[MeasurePlan]], ...]  # places, and the measures that are evaluated together there

    def subject(self, whole: Subject) -> Subject:
        """Subject of this stage: the whole one, or only some of its maps."""
        return whole if self.maps is None else whole.narrowed(self.maps)


@dataclass(frozen=True)
class Plan:
    """The steps of a measurement; they hold for an architecture, whatever its weights."""

    stages: tuple[Stage, ...]
    order: list[tuple[str, str]]  # of rows, by layer and measure


def plan(subject: Subject, measures: Sequence[Measure], cotangents: Cotangents | None) -> Plan:
    """Plan a measurement within the memory limit; ``cotangents`` replace those of the measures."""
    chosen = [_planned(subject, m, cotangents) for m in measures]
    try:
        stages = _stages(subject, chosen)
    except MemoryBudgetError:  # gradient checkpointing may make room
        if not subject.lighten():
            raise
        chosen = [_planned(subject, m, cotangents) for m in measures]
        stages = _stages(subject, chosen)
    layers = _ordered(subject, {place for stage in stages for places, _ in stage.families for place in places})
    return Plan(stages, [(layer, m.name) for layer in layers for m in measures])


def _planned(subject: Subject, m: Measure, given: Cotangents | None) -> MeasurePlan:
    """Choose each statistic's form: through affordable cotangents if possible, else through the measure's own."""
    reason, zero = "", next((s.zero for s in leaves(m.needs) if s.zero), UNDEFINED)
    if len({s.place for s in leaves(m.needs)} - {"any"}) > 1 and any(s.place == "model" for s in leaves(m.needs)):
        return MeasurePlan(m, reason=WHOLE_ONLY)
    affordable = [m.cotangents.chosen(given, subject.survey.outputs, s.use) for s in m.needs]
    for chosen in [affordable, [m.cotangents] * len(m.needs)] if given is None else [affordable]:
        plans = [(s.planned(subject, c), c) for s, c in zip(m.needs, chosen, strict=True)]
        reason = next((s for s, _ in plans if isinstance(s, str)), "")
        if not reason:
            keys = tuple((s, c) for s, c in plans if not isinstance(s, str))
            wants = wants_of(subject, keys).values()
            kernels = m.of_kernels
            return MeasurePlan(m, keys, "", zero, kernels or any(w.takes_part or w.passes for w in wants),
                               kernels or any(w.maps and w.backward for w in wants), kernels)
    return MeasurePlan(m, reason=reason, zero=zero)


def _stages(subject: Subject, plans: Sequence[MeasurePlan]) -> tuple[Stage, ...]:
    """Put all into one stage if there is memory for it, else into several; an error names the least memory that would do."""
    everything = wants_of(subject, _keys(plans))
    parts: list[tuple[Sequence[MeasurePlan], tuple[str, ...] | None]] = [(plans, None)]
    if needed(subject, everything) > subject.memory or _crowded(subject, everything):
        parts = _apart(subject, plans)
    narrow = [subject if maps is None else subject.narrowed(maps) for _, maps in parts]
    wants = [wants_of(s, _keys(members)) for s, (members, _) in zip(narrow, parts, strict=True)]
    check_memory(subject, list(zip(narrow, wants, strict=True)))
    return tuple(Stage(maps, w, streamed(s, w), _families(s, members))
                 for s, w, (members, maps) in zip(narrow, wants, parts, strict=True))


def _keys(plans: Iterable[MeasurePlan]) -> list[Key]:
    """(statistic, cotangents) pairs of some plans, in order."""
    return [key for p in plans for key in p.keys]


def _crowded(subject: Subject, wants: Mapping[Key, Wants]) -> bool:
    """Would the sums of a large model take room from work that takes all that is allowed?"""
    due = due_of(wants)
    held, alone = sum(w.held for w in due.values()), any(w.alone for key, w in wants.items() if key not in due)
    return alone and held > subject.memory // BESIDE and weight_bytes(subject.model) > SMALL


def _apart(subject: Subject, plans: Sequence[MeasurePlan]) -> list[tuple[Sequence[MeasurePlan], tuple[str, ...] | None]]:
    """Split a measurement into stages: sums of as many maps as fit, then sums of the whole model in a pass, then work without a
    pass. Passes come first, because they verify the captures."""
    by_map: list[MeasurePlan] = []
    whole: list[MeasurePlan] = []
    alone: dict[tuple[str, ...], list[MeasurePlan]] = {}
    for p in plans:
        wants = wants_of(subject, p.keys)
        due = due_of(wants)
        if not due:
            alone.setdefault(tuple(dict.fromkeys(w.what for w in wants.values() if w.what)), []).append(p)
        else:
            (by_map if all(statistic.place == "map" for statistic, _ in due) else whole).append(p)
    parts: list[tuple[Sequence[MeasurePlan], tuple[str, ...] | None]] = [
        (by_map, group) for group in (_groups(subject, _keys(by_map)) if by_map else [])]
    return parts + [(members, None) for members in (whole, *alone.values()) if members]


def _groups(subject: Subject, keys: Sequence[Key]) -> list[tuple[str, ...]]:
    """Group neighbouring maps, those nearest the outputs first: their backward passes are the shortest."""
    groups: list[tuple[str, ...]] = []
    for name in reversed(subject.maps):
        if groups and _fit(subject.narrowed(wider := (name, *groups[-1])), keys):
            groups[-1] = wider
        else:
            groups.append((name,))
    return groups


def _fit(subject: Subject, keys: Sequence[Key]) -> bool:
    """Have the sums of these maps their share of memory, and an example room beside them?"""
    wants = wants_of(subject, keys)
    return sum(w.held for w in due_of(wants).values()) <= SHARE * subject.memory and needed(subject, wants) <= subject.memory


def _families(subject: Subject, plans: Sequence[MeasurePlan]) -> tuple[tuple[list[str], list[MeasurePlan]], ...]:
    """Group measures by places and cotangents, so that shared values are held once."""
    families: dict[tuple[Any, ...], list[MeasurePlan]] = {}
    for p in plans:
        families.setdefault((p.place, *dict.fromkeys(c for _, c in p.keys)), []).append(p)
    return tuple((subject.places(key[0]), members) for key, members in families.items())


def _ordered(subject: Subject, layers: set[str]) -> list[str]:
    """Sort layers as in named_modules, the maps of a module behind it, the whole model last."""
    position = {name: i for i, (name, _) in enumerate(subject.model.named_modules())}
    maps = {name: i for i, name in enumerate(subject.survey.maps)}

    def key(name: str) -> tuple[float, int]:
        stem = name
        while stem and stem not in position:
            stem = stem.rpartition(".")[0]
        return (math.inf if name == WHOLE else position.get(stem, -1), maps.get(name, -1))

    return sorted(layers, key=key)


# ------------------------------------------------------------------------------------------------------------ evaluate


@dataclass
class Evaluation:
    """One measurement in the making. ``rows()`` does the work."""

    subject: Subject
    plan: Plan
    step: int | None = None
    matrices: int = 0  # keep the arrays of layers with at most so many inputs
    notes: dict[str, str] = field(default_factory=dict)
    arrays: dict[tuple[str, str], NDArray[np.float32]] = field(default_factory=dict)
    _rounded: tuple[list[str], Noise] | None = None  # of these faint maps

    def rows(self) -> list[Row]:
        """Rows of all measures and places, in the order of the plan."""
        rows = [row for stage in self.plan.stages for row in self._stage(stage)]
        self._remark()
        rank = {name: i for i, name in enumerate(self.plan.order)}
        return sorted(rows, key=lambda r: rank[r.layer, r.measure])

    def _stage(self, stage: Stage) -> list[Row]:
        """Gather the statistics of one stage, and return the rows of its measures."""
        subject = stage.subject(self.subject)
        statistics = gather(subject, stage.wants, stage.due)
        rows: list[Row] = []
        for i, (places, plans) in enumerate(stage.families):
            rows += [row for place in places for row in self._at(place, plans, statistics)]
            later = {c for _, others in stage.families[i + 1:] for p in others for _, c in p.keys}
            statistics = {key: g for key, g in statistics.items() if key[1] in later}  # the others are let go
        subject.let_go()
        return rows

    def _at(self, place: str, plans: Sequence[MeasurePlan], statistics: Mapping[Key, Gathering]) -> list[Row]:
        """Rows of the measures at one layer or of the whole model."""
        gatherings = [[statistics[key] for key in p.keys] for p in plans]
        known = values_at(place, {key: statistics[key] for p in plans if not p.reason for key in p.keys})
        values = [_values(p, known) for p in plans]
        audit = self.subject.audit
        noise = self._noise([] if audit is None else audit.faint) if any(p.gradients for p in plans) else Noise()
        rounded = (place in noise.maps, place in noise.modules)
        return [self._row(p, place, of_measure, arguments, rounded[p.of_kernels] and p.gradients)
                for p, of_measure, arguments in zip(plans, gatherings, values, strict=True)]

    def _row(self, p: MeasurePlan, place: str, statistics: Sequence[Gathering], arguments: Sequence[Any] | Missing,
             rounded: bool) -> Row:
        """``arguments``: the values of the statistics, or why there are none; ``rounded``: gradients are rounding errors here."""
        m = p.measure
        try:
            if isinstance(arguments, Missing):
                raise arguments
            if rounded:
                raise Missing(ROUNDING)
            value, remark = self._computed(p, place, arguments)
        except Missing as why:
            if isinstance(why, Beyond) and self.subject.single:
                raise OutOfRange from why
            text = NOT_A_NUMBER if isinstance(why, Beyond) and self._undefined(place) else why.remark.text
            return Row(self.step, place, m.name, math.nan, note=text, mark=why.remark.mark)
        if math.isnan(value):
            remark = Remark(Mark.UNDEFINED, remark.text or p.zero)
        said: tuple[Remark, ...] = (remark,)  # a number that has its value by definition is no estimate
        if remark.mark is not Mark.TRIVIAL:
            said = (remark, *(s.remark for s in statistics), self._precision if p.passes else Remark())
        remarks = [r for r in said if r != Remark()]
        error = math.nan
        if self.subject.errors and math.isfinite(value):
            try:
                errors = _errors(m, place, statistics, arguments)
            except NoError as why:
                remarks.append(Remark(text=why.remark.text))
            else:
                error = _combined(errors)
                remarks += [] if remark.mark is Mark.TRIVIAL else _of_sketch(errors)
        remark = joined(remarks) if remarks else Remark()
        return Row(self.step, place, m.name, value, error, remark.text, remark.mark)

    def _noise(self, faint: list[str]) -> Noise:
        """Maps and modules whose gradients are nothing but rounding errors, on a few examples."""
        if self._rounded is None or self._rounded[0] != faint:
            known = self.subject.gradients
            noise = rounding_errors(self.subject.network, self.subject.few, faint, self._without_maps, known)
            known.update({*noise.shares, *noise.tried} - noise.maps - noise.modules)
            self._rounded = faint, noise
        return self._rounded[1]

    @cached_property
    def _without_maps(self) -> list[str]:
        """Modules without maps whose kernels are measured."""
        with_maps = {info.module for info in self.subject.survey.maps.values()}
        families = [family for stage in self.plan.stages for family in stage.families]
        return list(dict.fromkeys(place for places, plans in families if any(p.of_kernels and p.gradients for p in plans)
                                  for place in places if place not in with_maps))

    @cached_property
    def _precision(self) -> Remark:
        """Remark on numbers from a network that computes in a coarser precision than its weights have."""
        coarsest = self.subject.state.precision
        eps = torch.finfo(coarsest).eps
        if eps <= torch.finfo(self.subject.network.dtype).eps:
            return Remark()
        text = f"the network computes in {str(coarsest).removeprefix('torch.')}: relative rounding error {eps:.0e}"
        return Remark(Mark.ESTIMATED if eps > COARSE else Mark.EXACT, text)

    def _undefined(self, place: str) -> bool:
        """Return whether the gradient at this place is NaN."""
        undefined = self.subject.audit.undefined if self.subject.audit is not None else set()
        modules = {self.subject.survey.maps[k].module for k in undefined}
        return place in undefined | modules or (place == WHOLE and bool(undefined))

    def _computed(self, p: MeasurePlan, place: str, arguments: Sequence[Any]) -> tuple[float, Remark]:
        """Compute a measure, its remark and its arrays; a measure that fails gives a row that says so."""
        m = p.measure
        try:
            value, remark = float(m.compute(*arguments)), m.remark(*arguments) if m.remark else Remark()
            if m.arrays is not None and self._keeps(p, place):
                for name, M in m.arrays(*arguments).items():
                    if max(M.shape) <= self.matrices:
                        self.arrays[place, name] = _symmetric(M).float().cpu().numpy()
        except (Missing, RichterError):
            raise
        except Exception as why:
            raise Missing(f"the measure failed ({type(why).__name__}: {why})", Mark.FAILED) from why
        return value, remark

    def _keeps(self, p: MeasurePlan, place: str) -> bool:
        """Return whether the arrays of this place are kept. Arrays of maps with many inputs are not made."""
        W = self.subject.survey.matrices.get(place)
        return self.matrices > 0 and (p.of_kernels or W is None or W.shape[-1] <= self.matrices)

    def _remark(self) -> None:
        """Add notes about layers that have no rows, or only some of them."""
        subject = self.subject
        notes = subject.survey.notes
        self.notes.update({k: remark.text for k, remark in notes.items() if subject.layers is None or k in subject.selected([k])})
        self.notes.update(subject.remarks)
        frozen = {name.rpartition(".")[0] for name, p in subject.model.named_parameters() if not p.requires_grad}
        copies = _copies(subject)
        for name in subject.selected(sorted(frozen - {u.module for u in subject.units})):
            self.notes[name] = (f"{REFERENCE_COPY} {copies[name]}" if name in copies else
                                "frozen (requires_grad=False): it has no tangent kernel and its weights do not move")
        for name in subject.selected(_began_at_zero(subject)):
            self.notes.setdefault(name, ZERO_START)
        blind = [remark.text for remark in notes.values() if remark.mark is Mark.REFUSED]
        if blind:
            warnings.warn(blind[0] + (f" ({len(blind)} layers in all.)" if len(blind) > 1 else ""), RichterWarning, stacklevel=5)


def _values(p: MeasurePlan, known: Mapping[Key, Any]) -> list[Any] | Missing:
    """Values of the statistics of a measure, or why there are none."""
    values = [Missing(p.reason)] if p.reason else [known[key] for key in p.keys]
    return next((v for v in values if isinstance(v, Missing)), values)


def _symmetric(M: Tensor) -> Tensor:
    """Make a matrix that is symmetric up to rounding symmetric to the last bit, because half of it is kept."""
    return (M + M.T) / 2 if M.shape[0] == M.shape[-1] and (M - M.T).norm() <= 1e-5 * M.norm() else M


def _copies(subject: Subject) -> dict[str, str]:
    """Frozen modules whose weight is the initial one of a module that trains, and the names of these."""
    initial = subject.initial or {}
    trains = {name: initial[name] for name, p in subject.model.named_parameters()
              if p.requires_grad and p.dim() > 1 and name in initial}
    found: dict[str, str] = {}
    for name, p in subject.model.named_parameters():
        if not p.requires_grad and p.dim() > 1 and bool(p.any()):
            other = next((k for k, W in trains.items() if W.shape == p.shape and torch.equal(W, p.detach().to(W))), None)
            if other is not None:
                found[name.rpartition(".")[0]] = other.rpartition(".")[0]
    return found


def _began_at_zero(subject: Subject) -> list[str]:
    """Modules that train and whose weight (not a bias) began at zero: they close a residual branch, or are a zero read-out."""
    initial = subject.initial or {}
    names = [name for name, p in subject.model.named_parameters()
             if p.requires_grad and name in initial and name.rpartition(".")[2] in ("weight", "gamma")]
    return [name.rpartition(".")[0] for name in names if not bool(initial[name].any())]


# -------------------------------------------------------------------------------------------------------------- errors


def _errors(m: Measure, place: str, statistics: Sequence[Gathering], values: Sequence[Any]) -> dict[str, float]:
    """Jackknife errors by kind of group, NaN where there is none. Raises NoError where it is known why there is none at all."""
    errors: dict[str, float] = {}
    reason: NoError | None = None
    for kind in dict.fromkeys(kind for s in statistics for kind in s.groups):
        try:
            errors[kind] = _error(m, kind, leaving_at(place, kind, statistics, values))
        except NoError as why:
            errors[kind], reason = math.nan, reason or why
        except (Missing, ArithmeticError, TypeError, ValueError):  # e.g. only examples of one group reach this layer
            errors[kind] = math.nan
    if reason is not None and not any(map(math.isfinite, errors.values())):
        raise reason
    return errors


def _error(m: Measure, kind: str, left_out: Sequence[Sequence[Any]]) -> float:
    """Jackknife error over one kind of group, from each statistic with one group left out: one call of the measure for all groups
    if it takes numbers with a leading axis, else one for each."""
    stacks = [s for s in left_out if isinstance(s, Stack) and s.whole is not None]
    if m.batched and len(stacks) == len(left_out) and len({s.groups for s in stacks}) == 1:
        values = m.compute(*(s.whole for s in stacks)).tolist()  # type: ignore[attr-defined]
    else:
        values = [float(m.compute(*arguments)) for arguments in together(left_out, kind)]
    if any(map(math.isnan, values)):
        arguments = tuple(statistic[[*map(math.isnan, values)].index(True)] for statistic in left_out)
        why = m.remark(*arguments).text if m.remark else ""
        raise NoError(f"no standard error: without one of {len(values)} groups of {kind} it is 0/0{why and f' ({why})'}")
    return jackknife(values)


def _combined(errors: Mapping[str, float]) -> float:
    """Add the variances of all kinds that are known. Groups within examples are part of the error of few examples already; both
    are uncertain, and the whole is not smaller than a part."""
    finite = {kind: error for kind, error in errors.items() if math.isfinite(error)}
    if not finite:
        return math.nan
    within = finite.pop(WITHIN, 0.0)
    return max(math.hypot(*finite.values()), within)


def _of_sketch(errors: Mapping[str, float]) -> list[Remark]:
    """Remark on the sketch's own share of an error, and on whether it is all that is known of it."""
    sketched = [error for kind, error in errors.items() if kind not in OF_PROBE]
    finite = [error for error in sketched if math.isfinite(error)]
    size = math.hypot(*finite)
    sampled = any(math.isfinite(errors.get(kind, math.nan)) for kind in OF_PROBE)
    alone = "" if sampled else " (sampling error over examples not included)"
    if len(finite) < len(sketched):
        return [Remark(text=f"sketch error {size:.2g} or more{alone}" if size else "sketch error unknown")]
    return [Remark(text=f"sketch error {size:.2g}{alone}")] if size > 0 else []


def jackknife(values: Sequence[float]) -> float:
    """Standard error from values with one group left out each: sqrt((G-1)/G sum (v - mean)^2)."""
    G = len(values)
    if G < 2 or not all(map(math.isfinite, values)):
        return math.nan
    mean = sum(values) / G
    return math.sqrt((G - 1) / G * sum((v - mean) ** 2 for v in values))


# ---------------------------------------------------------------------------------------------------------- cost plan

FORWARD = 1 / 3  # of a forward-backward pass
TIMED = 32  # examples on which a pass is timed
AUDIT = 3 * FORWARD  # a forward pass in another order, and one backward pass with gradients of weights


@dataclass(frozen=True)
class Cost:
    """The cost of one step of a measurement, or of one measure by itself."""

    measures: tuple[str, ...]
    layers: int | None  # of some layers alone; None: of all
    passes: float
    bytes: int  # of the smallest pieces of work, with all that is held meanwhile
    note: str = ""  # why there will be no number, or that it shares a pass

    @property
    def measure(self) -> str:
        """First of the measures that share this cost."""
        return self.measures[0]

    def __str__(self) -> str:
        of = "" if self.layers is None else f" of {self.layers} layers"
        return f"{', '.join(self.measures)}{of}: {self.passes:.1f} passes, {show_bytes(self.bytes)} at least"


@dataclass(frozen=True)
class CostPlan:
    """The cost of a measurement before it runs; ``print(plan)`` shows it. Passes are forward-backward passes of the probe, about.
    The first look at a model, and work that does not grow with examples, come on top: ``other_seconds``."""

    examples: int
    outputs: int  # of each example
    memory: int  # that is allowed
    steps: tuple[Cost, ...]  # one after another
    lines: tuple[Cost, ...]  # one for each measure, as if it were taken by itself
    pass_seconds: float  # of one pass, timed on some examples
    look: int = 0  # bytes of the first look at a large model
    checkpoints: int = 0  # blocks of the model that are computed again for every backward pass
    other_seconds: float = 0.0  # of the survey and of work that does not grow with examples, from a measurement of a few

    @property
    def passes(self) -> float:
        """Total cost in forward-backward passes of the probe."""
        return sum(step.passes for step in self.steps)

    @property
    def bytes(self) -> int:
        """The smallest memory= that works for these steps."""
        return max([self.look, *(step.bytes for step in self.steps)])

    @property
    def seconds(self) -> float:
        """Total cost in seconds."""
        return self.other_seconds + self.passes * self.pass_seconds

    def __str__(self) -> str:
        return "\n".join([
            f"{len(self.lines)} measures of {self.examples} examples with {self.outputs:,} outputs: {self.passes:.1f} passes of "
            f"{self.pass_seconds:.2g} s and {self.other_seconds:.2g} s besides, {self.seconds:.2g} s in all, within "
            f"memory='{show_bytes(self.memory)}'",
            *([f"a look at the model: {show_bytes(self.look)}"] if self.look else []),
            *([f"{self.checkpoints} blocks of the model are computed again for every backward pass: its graph has no room"]
              if self.checkpoints else []),
            *(f"{i}. {step}" for i, step in enumerate(self.steps, 1)),
            table([("measure", "passes", "bytes", ""), *((line.measure, f"{line.passes:.1f}", show_bytes(line.bytes), line.note)
                                                         for line in self.lines)])])


def cost_plan(subject: Subject, plan: Plan) -> CostPlan:
    """The cost of each step of a plan, and of each measure by itself."""
    steps: list[Cost] = []
    lines: dict[str, Cost] = {}
    for stage in plan.stages:
        narrow = stage.subject(subject)
        plans = [p for _, members in stage.families for p in members]
        steps.append(Cost(tuple(p.measure.name for p in plans), None if stage.maps is None else len(stage.maps),
                          _passes(narrow, stage.wants, stage.due), needed(narrow, stage.wants) + subject.fixed))
        for p in plans:
            wants = wants_of(narrow, p.keys)
            due = due_of(wants)
            passes, size = _passes(narrow, wants, due), needed(narrow, wants) + subject.fixed if wants else 0
            if (before := lines.get(p.measure.name)) is not None:  # of other layers, in a stage before
                passes, size = passes + before.passes, max(size, before.bytes)
            note = p.reason or ("shares a pass" if due and len(plans) > 1 else "")
            lines[p.measure.name] = Cost((p.measure.name,), None, passes, size, note)
    order = dict.fromkeys(name for _, name in plan.order)
    look = survey_bytes(subject)
    return CostPlan(subject.probe.n, subject.survey.outputs, subject.allowed, tuple(steps),
                    tuple(lines[name] for name in order if name in lines), pass_seconds(subject), look and look + subject.fixed,
                    len(subject.survey.anew))


def passes(subject: Subject, plan: Plan) -> float:
    """Count the forward-backward passes of the probe in all stages of a plan."""
    return sum(_passes(stage.subject(subject), stage.wants, stage.due) for stage in plan.stages)


def _passes(subject: Subject, wants: Mapping[Key, Wants], due: Mapping[Key, Wants]) -> float:
    """Count passes: one forward pass for all that is gathered, a backward pass for each cotangent, and those that statistics make
    by themselves, shared ones once."""
    backward = {c: subject.targets.number(c, "mean") for (_, c), w in due.items() if w.backward}
    networks = 2 if ProbePass(subject, tuple(due.values())).initial else 1
    again = FORWARD if subject.survey.anew else 0.0  # checkpointed blocks go forward once more for every backward pass
    audit = AUDIT if subject.audit is not None else 0.0
    shared = networks * (FORWARD + (FORWARD + again) * sum(backward.values())) + audit if due else 0.0
    shared += (1 + again) * max((w.adds for w in due.values()), default=0.0)
    alone = {(w.what, w.passes) for key, w in wants.items() if key not in due}
    return shared + (1 + again) * sum(passes for _, passes in alone)


def pass_seconds(subject: Subject) -> float:
    """Return the seconds of a forward-backward pass of the probe, timed on some examples after a warm-up."""
    some = TIMED if weight_bytes(subject.model) <= SMALL else count(subject.few)
    x = to_device(select(subject.x, slice(0, some)), subject.device)
    weights = [p for p in subject.model.parameters() if p.requires_grad]

    def run() -> float:
        begun = time.perf_counter()
        f = outputs_of(subject.model, x, subject.output, graph=True)
        if f.requires_grad and weights:
            torch.autograd.grad(f.sum(), weights, allow_unused=True)
        return time.perf_counter() - begun

    run()
    return min(run(), run()) * subject.probe.n / count(x)
