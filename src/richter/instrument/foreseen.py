"""What a measurement will cost before it runs: which measures are had together, in how many passes over the probe, and in how
many bytes.

    >>> print(richter.plan(model, probe))
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from richter.core import show_bytes
from richter.core.text import table
from richter.instrument.capture import count, outputs_of
from richter.instrument.evaluate import Plan, Planned
from richter.instrument.statistics.frame import Wants
from richter.instrument.statistics.passes import Key, Pass, due_of, needed, wants_of
from richter.instrument.statistics.sizes import survey_bytes
from richter.instrument.subject import Subject

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

