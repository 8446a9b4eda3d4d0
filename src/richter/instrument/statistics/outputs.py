"""What the model answers on the probe: how far its outputs differ from example to example (SPREAD), and all of them beside the
labels (OUTPUTS)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Mark, ProbeError, Remark, show_bytes
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import NO_LABELS, Gathering, Group, Missing, Place, Statistic, Wants
from richter.instrument.statistics.norms import settling

if TYPE_CHECKING:
    from richter.instrument.objective import Objective
    from richter.instrument.statistics.passes import Reading
    from richter.instrument.subject import Subject

SMALL = 2 ** 26  # bytes: smaller arrays are not what a bound of memory is about


@dataclass(frozen=True)
class Sizes:
    """Of outputs: the mean square of an example's distance from the mean example, and of a single number."""

    spread: float
    square: float


@dataclass(frozen=True)
class Spread(Statistic):
    """First and second moments of the outputs over examples."""

    name: str
    place: Place = "model"

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        return Wants(outputs=True, backward=False)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Spread(subject, {"examples": subject.groups}, settling(subject))


@dataclass(frozen=True, eq=False)
class Moments:
    """Of some examples, output by output: how many count, their mean, squares about it, and squares."""

    numbers: Float[Tensor, " k"]
    mean: Float[Tensor, " k"]
    scatter: Float[Tensor, " k"]
    squares: Float[Tensor, " k"]
    examples: int

    @classmethod
    def of(cls, f: Float[Tensor, "n k"], real: Float[Tensor, "n k"]) -> Moments:
        numbers = real.sum(0)
        mean = (f * real).sum(0) / numbers.clamp(min=1)
        return cls(numbers, mean, ((f - mean).square() * real).sum(0), (f.square() * real).sum(0), len(f))

    def __add__(self, other: Moments) -> Moments:
        """Without subtracting large sums from each other: outputs that are nearly the same have a small scatter."""
        numbers = self.numbers + other.numbers
        step = (other.mean - self.mean) * other.numbers / numbers.clamp(min=1)
        scatter = self.scatter + other.scatter + (other.mean - self.mean) * self.numbers * step
        return Moments(numbers, self.mean + step, scatter, self.squares + other.squares, self.examples + other.examples)


@dataclass
class _Spread(Gathering):
    subject: Subject
    groups: Mapping[str, int]
    remark: Remark
    parts: dict[int, Moments] = field(default_factory=dict)  # by group

    def add(self, reading: Reading) -> None:
        f = reading.f.to(self.subject.home, torch.float64)
        real = torch.ones_like(f) if self.subject.counted is None else self.subject.counted[reading.rows].to(f)
        for g, mine in reading.groups():
            if len(f[mine]):
                self._put(g, Moments.of(f[mine], real[mine]))

    def _put(self, group: int, part: Moments) -> None:
        self.parts[group] = self.parts[group] + part if group in self.parts else part

    def merge(self, other: _Spread) -> None:
        for g, part in other.parts.items():
            self._put(g, part)

    def value(self, place: str, without: Group | None = None) -> Sizes:
        first, *others = (part for g, part in sorted(self.parts.items()) if without is None or g != without[1])
        whole = sum(others, start=first)
        return Sizes((whole.scatter.sum() / whole.examples).item(), (whole.squares.sum() / whole.numbers.sum()).item())


@dataclass(frozen=True)
class Outputs(Statistic):
    """All outputs, with the labels and the loss of the probe."""

    name: str
    place: Place = "model"

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        if subject.objective is None:
            return NO_LABELS
        need = self._bytes(subject)
        return self if need <= max(SMALL, subject.memory // 4) else f"memory= cannot hold all outputs ({show_bytes(need)})"

    def _bytes(self, subject: Subject) -> int:
        return subject.itemsize * subject.probe.n * subject.survey.outputs

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        need = self._bytes(subject)
        return Wants(outputs=True, backward=False, held=need if need > SMALL else 0, what="all outputs")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Outputs(subject, {"examples": subject.groups}, settling(subject))


@dataclass(frozen=True, eq=False)
class Answers:
    """Outputs f [n, ...] of some examples, and what they should be."""

    f: Tensor
    objective: Objective

    @property
    def loss(self) -> float:
        """The probe's loss of these examples."""
        try:
            return self.objective.mean(self.f.detach().requires_grad_()).item()
        except ProbeError as why:
            raise Missing(str(why), Mark.FAILED) from why

    @property
    def right(self) -> float:
        """The share of labels that have the largest output."""
        ids = self.objective.classes
        if ids is None or self.f.shape[-1] < 2:
            raise Missing("the labels are no classes: targets of which one is 1 and the others 0, or class or token ids")
        ids = ids.to(self.f.device)
        real = ids >= 0
        if not real.any():
            raise Missing("none of these examples has a label")
        return (self.f.argmax(-1) == ids)[real].double().mean().item()


@dataclass
class _Outputs(Gathering):
    subject: Subject
    groups: Mapping[str, int]
    remark: Remark
    rows: dict[int, Tensor] = field(default_factory=dict)  # by the first example of a chunk

    def add(self, reading: Reading) -> None:
        self.rows[reading.rows.start] = reading.f

    def merge(self, other: _Outputs) -> None:
        self.rows.update(other.rows)

    def value(self, place: str, without: Group | None = None) -> Answers:
        objective = self.subject.objective
        assert objective is not None
        f = torch.cat([self.rows[i] for i in sorted(self.rows)])
        f = f.view(len(f), *self.subject.survey.shape).to(torch.promote_types(f.dtype, torch.float32))
        if without is None:
            return Answers(f, objective)
        keep = torch.arange(len(f)) % self.groups["examples"] != without[1]
        return Answers(f[keep.to(f.device)], objective.of_rows(keep))


SPREAD = Spread("spread")
OUTPUTS = Outputs("outputs")
