"""Which layers read features, a row for each example: the last layer, or any other that reads one position. Tokens count as
examples where each has outputs of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from richter.core import WHOLE, Mark, show_bytes
from richter.instrument.statistics.frame import APART, NO_LABELS, Missing

if TYPE_CHECKING:
    from richter.instrument.statistics.passes import Reading
    from richter.instrument.subject import Subject
    from richter.instrument.survey.maps import MapInfo

SHARE = 4  # of memory=, one part in so many is for features
SEVERAL = ("{number} layers write the outputs ({names}), so that there is no last layer whose features could be meant: ask for "
           "one, layers=")
POSITIONS = ("it reads {positions} position{s} of each example, and the outputs are [{shape}]: features are what is read for one "
             "row of outputs. A layer behind Flatten(), or behind a mean over positions, reads some")
UNREACHED = "{rows} of {all} examples reach this layer, so that it has no features of the others"
PARTLY = "some outputs of an example count and others do not, so that its outputs span no space with those of the others"
NOT_FINITE = "it reads NaN or Inf, of which no average can be made"


class Part(NamedTuple):
    """Some rows of one map, beside the outputs and targets."""

    Phi: Float[Tensor, "m p"]
    F: Float[Tensor, "m k"]
    Y: Float[Tensor, "m k"]
    group: Int[Tensor, " m"]


def one_hot(Y: Float[Tensor, "n k"]) -> bool:
    """Is one target of each example the same positive number, and are the others 0?"""
    if not Y.numel() or Y.shape[1] < 2:
        return False
    top = Y.max()
    return bool(top > 0) and bool(((Y == 0) | (top == Y)).all()) and bool(((Y != 0).sum(1) == 1).all())


def features_of(info: MapInfo) -> int:
    """p: how many numbers a map reads at a position."""
    return info.shape[0] * info.shape[2] if info.kind == "grouped" else info.shape[-1]


@dataclass(frozen=True, eq=False)
class Layers:
    """The maps of a model that read features, on a probe."""

    subject: Subject
    held: Callable[[int, int, int], int]  # bytes that are kept of a map: of features, outputs and rows

    @property
    def tokens(self) -> int:
        """How many outputs of an example stand for tokens of their own; 1: the example has one."""
        shape = self.subject.survey.shape
        return shape[0] if len(shape) == 2 else 1

    @property
    def C(self) -> int:
        return self.subject.survey.outputs // self.tokens

    @cached_property
    def targets(self) -> Float[Tensor, "m k"]:
        """Of all rows that count."""
        Y = self.subject.Y
        assert Y is not None  # or it would not be planned
        return Y.reshape(-1, self.C)[self.counted.flatten().to(Y.device)]

    @cached_property
    def one_hot(self) -> bool:
        return one_hot(self.targets)

    @property
    def whole(self) -> Bool[Tensor, "n t k"]:
        """Which outputs count."""
        shape, counted = (self.subject.probe.n, self.tokens, self.C), self.subject.counted
        return torch.ones(1, dtype=torch.bool).expand(shape) if counted is None else counted.reshape(shape).cpu()

    @cached_property
    def counted(self) -> Bool[Tensor, "n t"]:
        """Which examples, or tokens of them, have a label and are not masked."""
        return self.whole.all(2)

    @cached_property
    def reasons(self) -> dict[str, str]:
        """Why a map has no features, by its name; "" if it has."""
        room, reasons = self.subject.memory // SHARE, {}
        for name in sorted(self.subject.maps, key=lambda k: k not in self.subject.survey.readouts):  # the last layer first
            reasons[name] = self._reason(name)
            need = 0 if reasons[name] else self.bytes(name)
            if need > room:
                reasons[name] = (f"memory= has no room for the products of its {self.width(name)} features ({show_bytes(need)}; "
                                 f"one part in {SHARE} is for features)")
            room -= 0 if reasons[name] else need
        return reasons

    def _reason(self, name: str) -> str:
        info = self.subject.survey.maps[name]
        if info.kind == "lookup":
            return "it reads indices, which are no features"
        if info.positions != self.tokens:
            shape = ", ".join(map(str, ("n", *self.subject.survey.shape)))
            return POSITIONS.format(positions=info.positions, s="s" * (info.positions > 1), shape=shape)
        return ""

    @property
    def names(self) -> list[str]:
        return [k for k in self.subject.maps if not self.reasons[k]]

    def width(self, name: str) -> int:
        return features_of(self.subject.survey.maps[name])

    def bytes(self, name: str) -> int:
        return self.held(self.width(name), self.C, self.subject.probe.n * self.tokens)

    def named(self, place: str) -> str:
        """The map that is meant; the whole model stands for its last layer."""
        subject = self.subject
        if place == WHOLE:
            last = sorted(subject.survey.readouts & set(subject.survey.maps))
            if len(last) != 1:
                raise Missing(SEVERAL.format(number=len(last), names=", ".join(last) or "none is a linear map"))
            place = last[0]
        if place not in subject.maps:
            raise Missing(APART)
        if self.reasons[place]:
            raise Missing(self.reasons[place])
        if place in subject.refused:
            raise Missing(subject.refused[place], Mark.REFUSED)
        return place

    def parts(self, reading: Reading) -> Iterator[tuple[str, Part]]:
        """What each map reads of these examples, in float64; maps that they do not reach are left out."""
        subject, keep = self.subject, self.counted[reading.rows].flatten()
        assert reading.Y is not None
        group = torch.tensor(reading.examples).repeat_interleave(self.tokens)[keep] % subject.groups
        F, Y = (t.reshape(-1, self.C)[keep.to(t.device)].to(subject.home, torch.float64) for t in (reading.f, reading.Y))
        for name in self.names:
            h = reading.read(name)
            if h is not None and h.shape[1] == self.tokens:
                Phi = h.detach().reshape(len(keep), -1)[keep.to(h.device)].to(subject.home, torch.float64)
                yield name, Part(Phi, F, Y, group)


def lacking(subject: Subject) -> str:
    """Why no layer has features beside outputs and targets; "" if some may."""
    if subject.Y is None:
        return NO_LABELS
    whole = Layers(subject, lambda p, C, rows: 0).whole
    return PARTLY if bool((whole.any(2) != whole.all(2)).any()) else ""
