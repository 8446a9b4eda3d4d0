"""Moments over the examples of a probe: one stream of chunks serves every moment, and hands on the captures of the examples
that kernels are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from tqdm import tqdm

from richter.instrument.capture import to_device
from richter.instrument.captures import LayerCapture, Recording, record, room_for, select
from richter.instrument.cotangents import Cotangents, RandomOutputs
from richter.instrument.statistics import Moment, Sketched, block_diagonal
from richter.instrument.subject import MAP_KINDS, Subject
from richter.kernels.ntk import widened

GROUPS = 8  # of the jackknife
AT_ONCE = 2 ** 26  # bytes of what is asked: more cotangents at a time than fill these are only copied about


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Their sum, in a tensor of its own."""
    first = tensors[0].clone()
    for t in tensors[1:]:
        first += t
    return first


@dataclass
class Sums:
    """A moment in groups of examples: sums and numbers of positions."""

    sums: list[Tensor | None] = field(default_factory=lambda: [None] * GROUPS)
    counts: list[int] = field(default_factory=lambda: [0] * GROUPS)
    chunk: list[Tensor | None] = field(default_factory=lambda: [None] * GROUPS)  # of the chunk in hand, in its own precision

    def add(self, group: int, value: Tensor, number: int) -> None:
        before = self.chunk[group]
        self.chunk[group] = value.clone() if before is None else before.add_(value)
        self.counts[group] += number

    def settle(self) -> None:
        """The chunk is done: chunks are added up in float64."""
        for g, value in enumerate(self.chunk):
            if value is not None:
                value, before = value.cpu() if value.device.type == "mps" else value, self.sums[g]
                self.sums[g] = value.double() if before is None else before.add_(value)
        self.chunk = [None] * GROUPS

    def mean(self, without: int | None = None) -> Tensor | None:
        chosen = [s for g, s in enumerate(self.sums) if g != without and s is not None]
        number = sum(c for g, c in enumerate(self.counts) if g != without)
        return total(chosen) / number if number and chosen else None


@dataclass
class Halves:
    """The same from even and from odd random outputs."""

    even: Sums = field(default_factory=Sums)
    odd: Sums = field(default_factory=Sums)

    def settle(self) -> None:
        self.even.settle()
        self.odd.settle()

    def mean(self, without: int | None = None) -> Sketched | None:
        first, second = self.even.mean(without), self.odd.mean(without)
        return None if first is None or second is None else Sketched((first + second) / 2, first, second)


Found = dict[tuple[str, str], Sums | Halves]  # (moment, map) -> its sums


@dataclass
class Kept:
    """Captures of some examples of the probe, picked out of the stream."""

    rows: Tensor  # their numbers, in the order wanted
    v: int
    captures: dict[str, LayerCapture] = field(default_factory=dict)

    def add(self, name: str, c: LayerCapture, seen: Recording, rows: slice, block: slice) -> None:
        inside = (self.rows >= rows.start) & (self.rows < rows.stop)
        if not inside.any():
            return
        there, here = inside.nonzero().flatten().to(c.g.device), (self.rows[inside] - rows.start).to(c.g.device)
        h = widened(replace(c, h=seen.reads_of(name, here))).h if block.start == 0 else None
        if name not in self.captures:
            assert h is not None
            g = room_for(c.g[0], self.v, (len(self.rows), *c.g.shape[2:]))
            self.captures[name] = replace(c, h=room_for(h, 1, (len(self.rows), *h.shape[1:]))[0], g=g, f=None)
        mine = self.captures[name]
        for v, g in enumerate(c.g, block.start):
            mine.g[v][there] = g[here]
        if h is not None:
            mine.h[there] = h


@dataclass(frozen=True)
class Stream:
    """One run over the probe: what is summed, for which maps, and what is kept for kernels."""

    subject: Subject
    chosen: Cotangents
    moments: Sequence[Moment]
    kernel_maps: Sequence[str] = ()

    @property
    def number(self) -> int:
        """Backward passes for each example."""
        return self.chosen.each if isinstance(self.chosen, RandomOutputs) else self.subject.number(self.chosen)

    @property
    def halved(self) -> bool:
        return isinstance(self.chosen, RandomOutputs) and self.number > 1

    @property
    def whole(self) -> list[str]:
        """Maps whose gradients are wanted: those that are asked for, and other uses of the same parameters."""
        maps = self.subject.found.maps
        weights = {maps[k].weight for k in self.subject.maps} - {None}
        return [k for k, m in maps.items() if k in self.subject.maps or (m.weight in weights and m.kind in MAP_KINDS)]

    @property
    def names(self) -> list[str]:
        """Maps that are captured."""
        sums = self.subject.maps if self.moments else []
        return list(dict.fromkeys([*sums, *(self.whole if any(s.gradient for s in self.moments) else []), *self.kernel_maps]))

    def sizes(self) -> tuple[int, int, int]:
        """Bytes of all sums, of one example's graph, and of one cotangent of one example."""
        of, item = self.subject, self.subject.itemsize
        copies = 2 if any(s.initial for s in self.moments) else 1
        names = dict.fromkeys([*of.maps, *self.names])
        graph = item * copies * (of.found.graph + sum(of.found.maps[k].unfolded for k in names
                                                      if k in self.kernel_maps or any(s.reads for s in self.moments)))
        each = item * copies * 3 * sum(of.found.maps[k].width for k in names)
        gradients = sum(s.gradient for s in self.moments)
        held = 8 * (GROUPS + 2) * (len(self.moments) - gradients) * (1 + self.halved) * sum(
            (Q.shape[1] if (Q := of.bases[k]) is not None else of.pair(k)[0].shape[0]) ** 2 for k in of.maps)
        if gradients:  # sums, those of the chunk in hand, and what is made of them
            held += gradients * (8 * (GROUPS + 4) + item * GROUPS) * sum(of.found.maps[k].index.numel() for k in self.whole)
        return held, graph, each

    def kept_bytes(self, n: int, v: int) -> int:
        """Of the captures of n examples that are handed on."""
        of = self.subject
        return n * of.itemsize * sum(v * of.found.maps[k].width + max(of.found.maps[k].unfolded, of.found.maps[k].width)
                                     for k in self.kernel_maps)

    def chunks(self, v: int) -> tuple[int, int]:
        """(examples, cotangents) at a time, so that what is captured stays within memory."""
        of = self.subject
        held, graph, each = self.sizes()
        room = of.memory - held - self.kept_bytes(len(of.probe.kernel_rows()), v)
        chunk = 1 if of.found.drawn else int(max(1, min(of.probe.chunk, of.probe.n, room // (graph + each))))
        return chunk, int(max(1, min(v, (room // chunk - graph) // each, AT_ONCE // (chunk * each))))

    def run(self) -> tuple[Found, Kept | None]:
        """Sums of all moments over the probe, chunk by chunk, a block of cotangents at a time."""
        of, v = self.subject, self.number
        n = of.probe.n
        sums: Found = {(s.name, k): Halves() if s.halves and self.halved else Sums()
                       for s in self.moments if not s.gradient for k in of.maps}
        sizes = [len(range(g, n, min(GROUPS, n))) if g < n else 0 for g in range(GROUPS)]
        sums.update({(s.name, k): Sums(counts=list(sizes)) for s in self.moments if s.gradient for k in self.whole})
        kept = Kept(of.probe.kernel_rows(), v) if self.kernel_maps else None
        chunk, block = self.chunks(v)
        batched = [k for k in self.names if k in of.found.batched]
        single = [k for k in self.names if k not in of.found.batched]
        work = [(slice(i, min(i + chunk, n)), batched) for i in range(0, n, chunk)] if batched else []
        work += [(slice(i, i + 1), single) for i in range(n)] if single else []
        bar = tqdm(total=len(work) * math.ceil(v / block), desc="measuring", delay=2, leave=False, disable=None)
        for rows, some in work:
            x = to_device(select(of.x, rows), of.device)
            states = [of.state, *([of.then] if of.then is not None and any(s.initial for s in self.moments) else [])]
            seen = []
            for state in states:
                with of.timed(rows.stop - rows.start):
                    seen.append(record(of.model, x, rows, state, of.found, some, of.output))
            for start in range(0, v, block):
                self._block(sums, kept, seen, rows, slice(start, min(start + block, v)))
                bar.update()
            for into in sums.values():
                into.settle()
        bar.close()
        return sums, kept

    def _block(self, sums: Found, kept: Kept | None, seen: Sequence[Recording], rows: slice,
               block: slice) -> None:
        """Some backward passes of a chunk (and the same of the initial network, if it is needed)."""
        of, reads = self.subject, any(s.reads for s in self.moments)
        V = of.rowwise(self.chosen, block, own=True)
        captured, *before = (s.captures(V(s.f, rows), reads) for s in seen)
        for name, c in captured.items():
            c = widened(c)
            if kept is not None and name in self.kernel_maps:
                kept.add(name, c, seen[0], rows, block)
            self._add_gradients(sums, name, c, rows)
            if name in of.maps and not all(s.gradient for s in self.moments):
                self._add(sums, name, c, before[0].get(name) if before else None, rows, block.start)

    def _add_gradients(self, sums: Found, name: str, c: LayerCapture, rows: slice) -> None:
        """Positions add up, and an example that does not reach the map counts as well: it asks for nothing."""
        groups = min(GROUPS, self.subject.probe.n)
        for s in self.moments:
            into = sums.get((s.name, name))
            if not s.gradient or not isinstance(into, Sums):
                continue
            for g in range(groups):
                part = c.take(slice((g - rows.start) % groups, None, groups))
                if part.g.shape[1]:
                    into.add(g, s.block(part), 0)

    def _add(self, sums: Found, name: str, c: LayerCapture, before: LayerCapture | None, rows: slice,
             start: int) -> None:
        of, groups = self.subject, min(GROUPS, self.subject.probe.n)
        c = flat(c)
        if before is not None:
            b = flat(widened(before))
            c = replace(c, W0=b.W, h0=b.h, g0=b.g)
        keep = self._kept(c, rows)
        if keep is not None:
            c = replace(c, g=c.g * keep[None, ..., None], g0=None if c.g0 is None else c.g0 * keep[None, ..., None])
        moments = [s for s in self.moments if not s.gradient]
        for project in dict.fromkeys(s.project for s in moments):
            Q = of.bases[name] if project else None
            d = c if Q is None else replace(c, g=c.g @ Q.to(c.g), g0=None if c.g0 is None else c.g0 @ Q.to(c.g))
            for g in range(groups):
                mine = slice((g - rows.start) % groups, None, groups)  # every example belongs to the group of its number
                part = d.take(mine)
                if not part.g.shape[1]:
                    continue
                number = int(keep[mine].sum()) if keep is not None else part.g.shape[1] * part.g.shape[2]
                for s in moments:
                    if s.project == project:
                        self._sum(sums[s.name, name], s, part, g, number, start)

    def _sum(self, into: Sums | Halves, s: Moment, part: LayerCapture, group: int, number: int, start: int) -> None:
        """Positions are counted once, not once a block of cotangents."""
        if isinstance(into, Sums):
            into.add(group, s.block(part), number if start == 0 else 0)
            return
        for half, sums in enumerate((into.even, into.odd)):
            some = slice((half - start) % 2, None, 2)
            mine = replace(part, g=part.g[some], g0=None if part.g0 is None else part.g0[some])
            share = self.number / len(range(half, self.number, 2))  # each half stands for all
            sums.add(group, s.block(mine) * share, number if start == 0 else 0)

    def _kept(self, c: LayerCapture, rows: slice) -> Tensor | None:
        """Real tokens "n s" of a layer that works on the tokens of the mask."""
        mask = self.subject.probe.mask
        if mask is None or any(s % mask.shape[1] for s in c.calls):
            return None
        real = mask[rows].to(c.g.device)
        n, T = real.shape
        parts = []
        for s, shape in zip(c.calls, c.shapes, strict=True):
            outer = shape[0] == n and len(shape) > 2 and shape[1] == T  # [n, T, heads, d]; else [n, heads, T, d] and the like
            parts.append(real.repeat_interleave(s // T, 1) if outer else real.repeat(1, s // T))
        return torch.cat(parts, 1)


def flat(c: LayerCapture) -> LayerCapture:
    """Grouped maps as one block-diagonal matrix on the whole input."""
    if c.kind != "grouped":
        return c
    h = c.h.flatten(2) if c.h.dim() > 2 else c.h
    return replace(c, kind="dense", W=block_diagonal(c.W), h=h, g=c.g.flatten(3))
