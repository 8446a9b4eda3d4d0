"""What a survey learns: about each linear map, and about the model as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from richter.core import Mark, Remark
from richter.layers import Kind

Layout = Literal["major", "minor", "second"]  # where the examples are in a layer's own [b, s, ...]: see by_example


@dataclass(frozen=True)
class MapInfo:
    """What the survey learned about one linear map."""

    name: str
    kind: Kind
    layouts: tuple[Layout, ...]  # one for each call; empty when only one example at a time can be read
    rows: tuple[int, ...]  # of each call, for one example on the axis that holds the examples
    module: str
    weight: str | None  # the parameter behind it; None for a weight computed from parameters
    shape: tuple[int, ...]  # of the matrix
    width: int  # numbers written per example, over all calls
    placed: Callable[[], Tensor]  # makes ``index``: for a large matrix it takes more memory than the matrix
    unfolded: int = 0  # numbers per example that reading it copies (patches of a convolution); 0 for a view
    live: int = 0  # positions from which an output can be reached

    @property
    def index(self) -> Tensor:
        """Where each entry of the matrix stands in the flattened weight."""
        return self.placed().reshape(-1)

    @property
    def entries(self) -> int:
        """Of the matrix."""
        return math.prod(self.shape)

    @property
    def writes(self) -> int:
        """Numbers that it writes at one position."""
        return self.shape[0] if self.kind == "diagonal" else math.prod(self.shape[:-1])

    @property
    def positions(self) -> int:
        """Of one example, over all calls."""
        return max(1, self.width // self.writes)

    @property
    def reads(self) -> int:
        """Numbers of one example that it reads; a lookup one at each position."""
        return self.positions * (1 if self.kind == "lookup" else self.shape[-1])

    @property
    def silent(self) -> bool:
        """Is no output reached from most positions?"""
        return 0 < 2 * self.live <= self.positions


@dataclass
class Survey:
    """What can be measured, and how; ``notes`` says what cannot."""

    maps: dict[str, MapInfo] = field(default_factory=dict)
    expand: set[str] = field(default_factory=set)  # modules whose output all examples share
    splits: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # modules that are several maps
    structured: dict[str, tuple[str, ...]] = field(default_factory=dict)  # parameter -> maps that rebuild its gradient
    biases: dict[str, tuple[str, ...]] = field(default_factory=dict)  # bias -> maps whose summed g is its gradient
    notes: dict[str, Remark] = field(default_factory=dict)  # layer -> why it has no number
    outputs: int = 0
    shape: tuple[int, ...] = ()  # of one example's output
    matrices: dict[str, Tensor] = field(default_factory=dict)  # of every map that is called
    graph: int = 0  # numbers per example that a forward pass keeps for its backward passes
    blocks: tuple[str, ...] = ()  # that could be computed again for every backward pass, where it has no room
    light: int = 0  # numbers per example that would be kept then
    anew: tuple[str, ...] = ()  # those that are
    differentiates: bool = False  # the model itself does, inside its forward pass
    accumulates: bool = False  # the model adds to .grad in its backward pass
    given: frozenset[str] = frozenset()  # maps that read the model's input, as it is or in a form that depends on no weight
    readouts: frozenset[str] = frozenset()  # maps whose output is the model's
    examples: int = 0  # that were looked at
    drawn: bool = False  # the forward pass draws (dropout): examples go one by one, each with a seed of its own

    def note(self, name: str) -> Mark | None:
        """What kind of remark there is on a layer."""
        return self.notes[name].mark if name in self.notes else None

    def lightened(self) -> Survey:
        """The same with blocks computed again for every backward pass."""
        return replace(self, anew=self.blocks, graph=self.light) if self.blocks else self

    @property
    def silent(self) -> set[str] | None:
        """Modules all of whose maps are silent; None if the model differentiates: then nothing may be skipped."""
        if self.differentiates:
            return None
        return {m.module for m in self.maps.values()} - {m.module for m in self.maps.values() if not m.silent}

    @property
    def batched(self) -> dict[str, MapInfo]:
        """Maps that can be read for many examples at a time."""
        return {name: m for name, m in self.maps.items() if m.layouts}


def with_siblings(maps: Mapping[str, MapInfo], names: Collection[str]) -> list[str]:
    """These maps, and then the other uses of the same parameters, of whatever kind: together they make a gradient."""
    weights = {maps[k].weight for k in names if k in maps} - {None}
    return [*names, *(k for k, info in maps.items() if info.weight in weights and k not in names)]
