"""The one loop over chunks of examples: their size, their order, which rank has which, progress, and one forward pass for each
that can be asked any number of times.

    for chunk in chunks(source, x, size=256, maps=["0", "2"], cotangents=V, title="measuring"):
        chunk.captures(slice(0, 4))       # what each map read, and what the first four cotangents ask of it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from richter.core.progress import progress
from richter.instrument.capture import Inputs, Output, Pass, State, device_of, to_device
from richter.instrument.captures import (
    Forwards,
    LayerCapture,
    Recording,
    RowCotangents,
    Survey,
    check_finite,
    count,
    example_gradients,
    record,
    select,
    timed,
    widened,
)
from richter.instrument.survey import Audit, Bench


@dataclass(frozen=True)
class Source:
    """A network as it is measured: what a pass needs besides the examples."""

    model: nn.Module
    state: State
    survey: Survey
    output: Output | None = None
    audit: Audit | None = None  # what is looked at again in this measurement
    wide: bool = False  # compute in float64 with what it reads and asks: products of single precision leave its range
    forwards: Forwards = field(default_factory=Forwards)  # that were made

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """Half precision is read as it is and computed with in float32."""
        kind = next((t.dtype for t in self.state.values() if t.is_floating_point()), torch.float32)
        return torch.float64 if self.wide or kind == torch.float64 else torch.float32

    def ready(self, c: LayerCapture) -> LayerCapture:
        """A capture in the precision in which it is computed with."""
        c = widened(c)
        if not self.wide or c.g.dtype == torch.float64:
            return c
        return replace(c, W=c.W.double(), h=c.h.double() if c.h.is_floating_point() else c.h, g=c.g.double())

    def bench(self, x: Inputs) -> Bench:
        """The network with these examples, as a survey looks at them."""
        return Bench(self.model, x, self.state, self.output, self.survey.splits, self.survey.anew)

    def record(self, x: Inputs, rows: slice, maps: Sequence[str]) -> Recording:
        recording = record(self.bench(x), rows, self.survey, maps, self.audit)
        self.forwards.add(recording.n, recording.seconds)
        return recording

    def run(self, x: Inputs, seed: int) -> Pass:
        """A forward pass with its graph, remembering no map."""
        with timed(self.device) as seconds:
            run = self.bench(x).run(record=False, seed=seed)
        self.forwards.add(count(x), seconds())
        return run


class Share(NamedTuple):
    """Of several processes that measure together each takes whole chunks, so that their number changes only the order of sums."""

    rank: int = 0
    ranks: int = 1

    def has(self, chunk: int) -> bool:
        return chunk % self.ranks == self.rank


ALONE = Share()


@dataclass(frozen=True)
class Chunk:
    """Some examples of those streamed over, on the model's device."""

    source: Source
    x: Inputs
    rows: slice  # where they stand
    maps: Sequence[str] = ()
    cotangents: RowCotangents | None = None
    parameters: Sequence[str] = ()  # that have no map: differentiated one example at a time

    @property
    def n(self) -> int:
        return self.rows.stop - self.rows.start

    @cached_property
    def recording(self) -> Recording:
        return self.source.record(self.x, self.rows, self.maps)

    @cached_property
    def outputs(self) -> Tensor:
        """f "n ...", without a graph."""
        f = self.graph.f.detach()
        check_finite(f)
        return f

    @cached_property
    def graph(self) -> Pass:
        """A pass from which anything can be differentiated in the weights."""
        return self.source.run(self.x, self.rows.start)

    @cached_property
    def V(self) -> Tensor:
        assert self.cotangents is not None
        return self.cotangents(self.recording.f, self.rows)

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """Of the parameters without a map, "v n p"."""
        if not self.parameters:
            return {}
        assert self.cotangents is not None
        gradients = example_gradients(self.source.bench(self.x), self.rows, self.cotangents, self.parameters)
        return {k: J.to(self.source.dtype) for k, J in gradients.items()}

    def captures(self, block: slice) -> dict[str, LayerCapture]:
        """What every map read, and what some of the cotangents ask of it; without positions of which nothing is asked. Blocks
        come in order, and all of them: with the last one they are looked at."""
        if not self.maps:
            return {}
        if self._alone:
            return beside([chunk._whole(block) for chunk in self._alone])
        return {k: self.recording.trimmed(k, c) for k, c in self._whole(block).items()}

    def _whole(self, block: slice) -> dict[str, LayerCapture]:
        more = block.stop < len(self.V)
        return {k: self.source.ready(c) for k, c in self.recording.captures(self.V[block], more=more).items()}

    @cached_property
    def _alone(self) -> list[Chunk]:
        """Its examples one by one, where the model draws: each has a seed of its own. Every one goes through it once."""
        if not self.source.survey.drawn or self.n == 1:
            return []
        first = self.rows.start
        return [replace(self, x=select(self.x, r), rows=slice(first + r.start, first + r.stop)) for r in steps(self.n, 1)]


def beside(parts: Sequence[Mapping[str, LayerCapture]]) -> dict[str, LayerCapture]:
    """Captures of some examples after those of others. Where one has fewer positions than another, or does not reach a map, it
    reads nothing there and nothing is asked."""
    names = dict.fromkeys(k for part in parts for k in part)
    return {k: _after_one_another([part.get(k) for part in parts]) for k in names}


def _after_one_another(captures: Sequence[LayerCapture | None]) -> LayerCapture:
    known = [c for c in captures if c is not None]
    longest = max(known, key=lambda c: c.g.shape[2])
    silent = replace(longest, h=longest.h[:1], g=longest.g[:, :1], f=None)

    def padded(t: Tensor, axis: int, nothing: float) -> Tensor:
        shape = list(t.shape)
        shape[axis] = longest.g.shape[2] - t.shape[axis]
        return torch.cat([t, t.new_full(shape, nothing)], axis) if shape[axis] else t

    empty = 0.0 if longest.h.is_floating_point() else -1  # a lookup that reads nothing has the index -1
    whole = [c if c is not None else replace(silent, h=torch.full_like(silent.h, empty), g=torch.zeros_like(silent.g))
             for c in captures]
    return replace(longest, h=torch.cat([padded(c.h, 1, empty) for c in whole]),
                   g=torch.cat([padded(c.g, 2, 0.0) for c in whole], 1), f=None)


def steps(n: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def fitting(room: int, each: int, most: int, drawn: bool = False) -> int:
    """Examples at a time: as many as have room; one where the model draws, because each example has a seed of its own."""
    return 1 if drawn else int(max(1, min(most, room // max(1, each))))


def chunks(source: Source, x: Inputs, size: int, *, maps: Sequence[str] = (), cotangents: RowCotangents | None = None,
           parameters: Sequence[str] = (), share: Share = ALONE, title: str = "") -> Iterator[Chunk]:
    """All examples of ``x``, some at a time."""
    rows = steps(count(x), size)
    with _bar(title, sum(share.has(i) for i in range(len(rows)))) as bar:
        for i, r in enumerate(rows):
            if share.has(i):
                yield Chunk(source, to_device(select(x, r), source.device), r, maps, cotangents, parameters)
                bar.update()


def pairs(source: Source, x: Inputs, x2: Inputs | None, size: int, *, maps: Sequence[str] = (),
          cotangents: RowCotangents | None = None, parameters: Sequence[str] = (), title: str = ""
          ) -> Iterator[tuple[Chunk, Chunk]]:
    """All pairs of chunks of ``x`` and ``x2``; of ``x`` with itself (None) those on and below the diagonal, where both are one
    object."""
    other = source if x2 is None else replace(source, audit=source.audit and source.audit.part("x2"))

    def chunk(y: Inputs, r: slice) -> Chunk:
        return Chunk(other if y is x2 else source, to_device(select(y, r), source.device), r, maps, cotangents, parameters)

    rows, columns = steps(count(x), size), steps(count(x if x2 is None else x2), size)
    with _bar(title, len(rows) * (len(rows) + 1) // 2 if x2 is None else len(rows) * len(columns)) as bar:
        for r in rows:
            a = chunk(x, r)
            for c in columns:
                if x2 is None and c.start > r.start:
                    continue
                yield a, a if x2 is None and c == r else chunk(x if x2 is None else x2, c)
                bar.update()


def _bar(title: str, total: int) -> AbstractContextManager[Any]:
    return progress(title=title, total=total) if title else nullcontext(_NoBar())


class _NoBar:
    def update(self, n: int = 1) -> None:
        """Nothing is shown of what has no title."""
