"""Outputs of the model on the probe: how far its outputs differ from example to example (SPREAD), and all of them beside the
labels (OUTPUTS).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from richter.core import Mark, ProbeError, Remark, show_bytes
from richter.core.values import FEW_BATCHES, NO_DATA, SMALL
from richter.instrument.capture import running_norms
from richter.instrument.cotangents import Cotangents
from richter.instrument.probe import Objective
from richter.instrument.statistics.frame import (
    NO_LABELS,
    Gathering,
    Group,
    Missing,
    Place,
    Reading,
    Simple,
    Stack,
    Statistic,
    Wants,
)
from richter.instrument.stream import steps
from richter.instrument.subject import Subject

COPIES = 3  # of all outputs, for their loss
TEMPORARY = 6  # arrays of an example's outputs in double precision while it is added


SETTLED = 0.01  # the share of what a norm was made with, mean 0 and variance 1, in what it keeps


def settling(subject: Subject) -> Remark:
    """Remark on outputs in eval mode: norms that have seen no data normalise nothing, and after few batches their running
    statistics are still in part those that they were made with."""
    fresh, batches = 0, []
    for norm, names in running_norms(subject.model):
        kept = {k.rpartition(".")[2]: subject.state[k] for k in names}
        if "running_var" in kept and not kept["running_mean"].any() and bool((kept["running_var"] == 1).all()):
            fresh += 1
        elif (seen := int(kept.get("num_batches_tracked", 0))) and norm.momentum is not None \
                and (1 - norm.momentum) ** seen > SETTLED:
            batches.append(seen)
    texts = [*([f"{fresh} {NO_DATA} yet, and do not normalise"] if fresh else []),
             *([f"{len(batches)} {FEW_BATCHES} ({min(batches)}), and still use part of their initial statistics"]
               if batches else [])]
    return Remark(text="; ".join(texts))


@dataclass(frozen=True)
class Sizes:
    """Sizes of outputs: the mean square of an example's distance from the mean example, and of a single number."""

    spread: Any  # a number, or one for each group that is left out
    square: Any


@dataclass(frozen=True)
class Spread(Statistic):
    """First and second moments of the outputs over examples."""

    name: str
    place: Place = "model"

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        k, arrays = subject.survey.outputs, 1 if subject.targets.counted is None else 2
        held = 8 * k * (subject.groups * arrays + TEMPORARY)
        return Wants(outputs=True, backward=False, held=held if held > SMALL else 0, what="the mean outputs of some groups")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Spread(subject, {"examples": subject.groups}, settling(subject))


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of some examples: for each output how many count and their mean; for all, squares about the mean, and squares. In
    numpy, whose overhead is less: with groups left out these are added up many times."""

    numbers: NDArray[np.float64]  # "k", or one for all outputs where all count
    mean: NDArray[np.float64]  # "k"
    scatter: float
    squares: float
    examples: int

    @classmethod
    def of(cls, f: Float[Tensor, "n k"], real: Float[Tensor, "n k"] | None) -> Moments:
        """Count, mean, scatter and squares of outputs; ``real`` is 1 where an output counts."""
        if real is None:
            mean = f.mean(0)
            numbers, scatter, squares = f.new_tensor(len(f)), (f - mean).square().sum(), f.square().sum()
        else:
            numbers, kept = real.sum(0), f * real
            mean = kept.sum(0) / numbers.clamp(min=1)
            squares = kept.square_().sum()
            scatter = torch.sub(f, mean, out=kept).mul_(real).square_().sum()
        return cls(numbers.cpu().numpy(), mean.cpu().numpy(), scatter.item(), squares.item(), len(f))

    @property
    def counted(self) -> float:
        """Number of all outputs that count."""
        return float(np.broadcast_to(self.numbers, self.mean.shape).sum())

    def __add__(self, other: Moments) -> Moments:
        """Without subtracting large sums from each other: outputs that are nearly the same have a small scatter."""
        numbers, apart = self.numbers + other.numbers, other.mean - self.mean
        step = apart * other.numbers / np.maximum(numbers, 1)
        scatter = self.scatter + other.scatter + float((apart * self.numbers * step).sum())
        return Moments(numbers, self.mean + step, scatter, self.squares + other.squares, self.examples + other.examples)


@dataclass
class _Spread(Gathering):
    subject: Subject
    groups: Mapping[str, int]
    remark: Remark
    parts: dict[int, Moments] = field(default_factory=dict)  # by group

    def add(self, reading: Reading) -> None:
        home, counted = self.subject.home, self.subject.targets.counted
        groups, most = reading.groups(), max(1, SMALL // (8 * TEMPORARY * self.subject.survey.outputs))  # examples at a time
        real = None if counted is None else counted[reading.rows]
        for some in steps(-(-reading.chunk.n // len(groups)), most):
            for g, mine in groups:
                f = reading.f[mine][some].to(home, torch.float64)
                if len(f):
                    self._put(g, Moments.of(f, None if real is None else real[mine][some].to(f)))

    def _put(self, group: int, part: Moments) -> None:
        """Add the moments of some examples to a group."""
        self.parts[group] = self.parts[group] + part if group in self.parts else part

    def merge(self, other: _Spread) -> None:
        for g, part in other.parts.items():
            self._put(g, part)

    def value(self, place: str, without: Group | None = None) -> Sizes:
        first, *others = (part for g, part in sorted(self.parts.items()) if without is None or g != without[1])
        whole = sum(others, start=first)
        return Sizes(whole.scatter / whole.examples, whole.squares / whole.counted)

    def leaving(self, place: str, kind: str) -> Stack:
        each = [self.value(place, (kind, g)) for g in range(self.groups[kind])]
        whole = Sizes(np.array([s.spread for s in each]), np.array([s.square for s in each]))
        return Stack(whole, len(each), each.__getitem__)


@dataclass(frozen=True)
class Outputs(Statistic):
    """All outputs, with the labels and the loss of the probe."""

    name: str
    place: Place = "model"

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        if subject.targets.objective is None:
            return NO_LABELS
        need, beside = self._bytes(subject), SPREAD.wants(subject, cotangents).held
        room = need <= SMALL or (1 + COPIES) * need + beside <= subject.memory * 3 // 4  # the rest is for an example
        return self if room else f"memory= cannot hold all outputs ({show_bytes(need)})"

    def _bytes(self, subject: Subject) -> int:
        """Bytes of all outputs of the probe."""
        return subject.itemsize * subject.probe.n * subject.survey.outputs

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        need = self._bytes(subject)
        return Wants(outputs=True, backward=False, held=need if need > SMALL else 0,
                     alone=COPIES * need if need > SMALL else 0, what="all outputs, and their loss")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Outputs(subject, {"examples": subject.groups}, settling(subject))


@dataclass(frozen=True, eq=False)
class Answers:
    """Outputs of some examples, and what they should be: copies of them are made when they are asked for."""

    every: Tensor  # [n, ...]
    objectives: Objective
    classes: Tensor | None  # of all examples, negative where there is none; None: the labels are no classes
    keep: Tensor | None = None  # which examples; None: all

    @property
    def f(self) -> Tensor:
        """Outputs, without a group if one is left out."""
        return self.every if self.keep is None else self.every[self.keep.to(self.every.device)]

    @property
    def objective(self) -> Objective:
        """Loss and labels of these outputs."""
        return self.objectives if self.keep is None else self.objectives.of_rows(self.keep)

    @property
    def loss(self) -> float:
        """Loss of the probe on these examples."""
        try:
            return self.objectives.mean(self.f.detach().requires_grad_(), self.keep).item()
        except ProbeError as why:
            raise Missing(str(why), Mark.FAILED) from why

    @property
    def right(self) -> float:
        """The share of labels that have the largest output."""
        ids, f = self.classes, self.f
        if ids is None or f.shape[-1] < 2:
            raise Missing("the labels are not classes: give class or token ids, or one-hot targets")
        ids = (ids if self.keep is None else ids[self.keep.to(ids.device)]).to(f.device)
        real = ids >= 0
        if not real.any():
            raise Missing("none of these examples has a label")
        return (f.argmax(-1) == ids)[real].double().mean().item()


@dataclass(frozen=True)
class EachAnswers:
    """The loss and the accuracy with one group of examples left out each."""

    each: Sequence[Answers]

    @property
    def loss(self) -> NDArray[np.float64]:
        """Losses, with each group left out in turn."""
        return np.array([answers.loss for answers in self.each])

    @property
    def right(self) -> NDArray[np.float64]:
        """Accuracies, with each group left out in turn."""
        return np.array([answers.right for answers in self.each])


@dataclass
class _Outputs(Gathering):
    subject: Subject
    groups: Mapping[str, int]
    remark: Remark
    rows: dict[int, Tensor] = field(default_factory=dict)  # by the first example of a chunk; one, when all are there

    def add(self, reading: Reading) -> None:
        self.rows[reading.rows.start] = reading.f

    def merge(self, other: _Outputs) -> None:
        self.rows.update(other.rows)

    @cached_property
    def classes(self) -> Tensor | None:
        """Class ids of the labels; None if the loss has no classes."""
        return None if self.subject.targets.objective is None else self.subject.targets.objective.classes

    def value(self, place: str, without: Group | None = None) -> Answers:
        objective = self.subject.targets.objective
        assert objective is not None
        if len(self.rows) > 1:
            self.rows = {0: torch.cat([self.rows[i] for i in sorted(self.rows)])}
        (f,) = self.rows.values()
        f = f.view(len(f), *self.subject.survey.shape).to(torch.promote_types(f.dtype, torch.float32))
        keep = None if without is None else torch.arange(len(f)) % self.groups["examples"] != without[1]
        return Answers(f, objective, self.classes, keep)

    def leaving(self, place: str, kind: str) -> Stack:
        each = [self.value(place, (kind, g)) for g in range(self.groups[kind])]
        return Stack(EachAnswers(each), len(each), each.__getitem__)


SPREAD = Spread("spread")
OUTPUTS = Outputs("outputs")


# -------------------------------------------------------------------------------------------------------------- probes
# What is known of the probe alone: OfProbe.

@dataclass(frozen=True)
class OfProbe(Statistic):
    """Something of the probe, the same for every layer: read(subject)."""

    name: str
    read: Callable[[Any], Any]
    place: Place = "any"

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _OfProbe(self, subject)


class _OfProbe(Simple):
    def __init__(self, statistic: OfProbe, subject: Subject) -> None:
        super().__init__()
        self.statistic, self.subject = statistic, subject

    def value(self, place: str, without: Group | None = None) -> Any:
        return self.statistic.read(self.subject)


WEIGHT_DECAY = OfProbe("weight_decay", lambda subject: float(subject.probe.weight_decay))
