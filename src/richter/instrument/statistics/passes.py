"""One pass over the probe serves every statistic that is gathered: each chunk goes forward once, backward once for each
cotangent, and every gathering adds what it wants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from richter.core import MemoryBudgetError, show_bytes
from richter.instrument.captures import LayerCapture, Recording
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import Gathering, Remembered, Statistic, Wants
from richter.instrument.statistics.weights import block_diagonal
from richter.instrument.stream import ALONE, Chunk, Share, chunks, fitting, steps

if TYPE_CHECKING:
    from richter.instrument.subject import Subject

Key = tuple[Statistic, Cotangents]  # a statistic, seen through these cotangents
BLOCK_BYTES = 2 ** 26  # of what is asked at a time; larger blocks were slower, because they leave the cache


@dataclass
class Reading:
    """Some examples of the probe after their forward pass, and what a block of cotangents asks of every map."""

    subject: Subject
    rows: slice  # which examples of the probe
    block: slice  # which cotangents
    last: bool  # is this the last block of these examples?
    recording: Recording
    captures: dict[str, LayerCapture]
    before: dict[str, LayerCapture]  # of the initial network, if it is wanted
    _plain: dict[str, LayerCapture] = field(default_factory=dict)
    _ready: dict[tuple[str, bool], LayerCapture] = field(default_factory=dict)
    _kept: dict[str, Tensor | None] = field(default_factory=dict)

    @property
    def first(self) -> bool:
        return self.block.start == 0

    @property
    def examples(self) -> range:
        """Their numbers in the probe."""
        return range(self.rows.start, self.rows.stop)

    @property
    def f(self) -> Tensor:
        """Outputs "n k"."""
        return self.recording.f

    @property
    def Y(self) -> Tensor | None:
        """Targets "n k"; None if the probe has none."""
        return None if self.subject.Y is None else self.subject.Y[self.rows]

    def groups(self) -> list[tuple[int, slice]]:
        """Every example belongs to the group of its number."""
        groups = self.subject.groups
        return [(g, slice((g - self.rows.start) % groups, None, groups)) for g in range(groups)]

    def parts(self, name: str, project: bool = False) -> list[tuple[int, LayerCapture, int]]:
        """(group, its share of ``capture``, how many positions of it count)."""
        c = self.capture(name, project)
        if c is None:
            return []
        keep = self.kept(name)
        parts = [(g, mine, c.take(mine)) for g, mine in self.groups()]
        return [(g, part, part.g.shape[1] * part.g.shape[2] if keep is None else int(keep[mine].sum()))
                for g, mine, part in parts if part.g.shape[1]]

    def read(self, name: str) -> Tensor | None:
        """What a map read, "n s d_in"; None if these examples do not reach it."""
        return self.recording.reads(name) if name in self.recording.where else None

    def plain(self, name: str) -> LayerCapture | None:
        """A map as it is: grouped ones in groups, masked positions included. None if these examples do not reach it."""
        if name in self.captures and name not in self._plain:
            self._plain[name] = self.subject.source.ready(self.captures[name])
        return self._plain.get(name)

    def capture(self, name: str, project: bool = False) -> LayerCapture | None:
        """A map as one matrix, masked positions zero, beside the initial network; ``project``: g in the basis of W's columns."""
        key = (name, project)
        if key not in self._ready and name in self.captures:
            self._ready[key] = self._projected(name) if project else self._whole(name)
        return self._ready.get(key)

    def _whole(self, name: str) -> LayerCapture:
        plain = self.plain(name)
        assert plain is not None
        c = flat(plain)
        if name in self.before:
            b = flat(self.subject.source.ready(self.before[name]))
            c = replace(c, W0=b.W, h0=b.h, g0=b.g)
        keep = self.kept(name)
        if keep is not None:
            c = replace(c, g=c.g * keep[None, ..., None], g0=None if c.g0 is None else c.g0 * keep[None, ..., None])
        return c

    def _projected(self, name: str) -> LayerCapture:
        c, Q = self.capture(name), self.subject.bases[name]
        assert c is not None
        return c if Q is None else replace(c, g=c.g @ Q.to(c.g), g0=None if c.g0 is None else c.g0 @ Q.to(c.g))

    def kept(self, name: str) -> Tensor | None:
        """Real tokens "n s" of a layer that works on the tokens of the mask; None: every position counts."""
        if name not in self._kept:
            self._kept[name] = self._tokens(self.captures[name])
        return self._kept[name]

    def _tokens(self, c: LayerCapture) -> Tensor | None:
        mask = self.subject.probe.mask
        if mask is None or any(s % mask.shape[1] for s in c.calls):
            return None
        real = mask[self.rows].to(c.g.device)
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


@dataclass(frozen=True)
class Entry:
    """A gathering that takes part in a pass."""

    gathering: Gathering
    wants: Wants
    cotangents: Cotangents  # prepared


@dataclass(frozen=True)
class Pass:
    """What is gathered together: sizes, and the loop."""

    subject: Subject
    wants: Sequence[Wants]

    @property
    def maps(self) -> list[str]:
        return list(dict.fromkeys(k for w in self.wants for k in w.maps))

    @property
    def initial(self) -> bool:
        return any(w.initial for w in self.wants) and self.subject.then is not None

    def sizes(self) -> tuple[int, int, int]:
        """Bytes of all that is held, of one example's graph, and of one cotangent of one example."""
        survey, item = self.subject.survey, self.subject.itemsize * (2 if self.initial else 1)
        names = dict.fromkeys([*self.subject.maps, *self.maps])
        optional = {k for w in self.wants if w.optional for k in w.maps}
        reads = any(w.reads for w in self.wants if not w.optional)
        graph = item * (survey.graph + sum(survey.maps[k].unfolded for k in names if reads or k in optional))
        return sum(w.held for w in self.wants), graph, item * 3 * sum(survey.maps[k].width for k in names)

    def chunk(self) -> int:
        held, graph, each = self.sizes()
        subject = self.subject
        return fitting(subject.memory - held, graph + each, min(subject.probe.chunk, subject.probe.n), subject.survey.drawn)

    def block(self, number: int, chunk: int) -> int:
        """Cotangents at a time, so that what is captured stays within memory."""
        held, graph, each = self.sizes()
        room = (self.subject.memory - held) // chunk
        return int(max(1, min(number, (room - graph) // each, BLOCK_BYTES // (chunk * each))))

    def run(self, entries: Sequence[Entry], share: Share = ALONE) -> None:
        """All examples once, and again for those that ask for it."""
        while entries:
            replace(self, wants=[e.wants for e in entries])._once(entries, share)
            entries = [e for e in entries if e.gathering.again()]

    def _once(self, entries: Sequence[Entry], share: Share) -> None:
        subject = self.subject
        families: dict[Cotangents, list[Entry]] = {}
        for e in entries:
            families.setdefault(e.cotangents, []).append(e)
        size = self.chunk()
        numbers = {c: subject.number(c, "mean") for c in families}
        blocks = {c: steps(v, self.block(v, size)) if any(e.wants.backward for e in families[c]) else [slice(0, v)]
                  for c, v in numbers.items()}
        batched = [k for k in self.maps if k in subject.survey.batched]
        single = [k for k in self.maps if k not in subject.survey.batched]
        rounds = [(size, batched)] if batched or not self.maps else []
        for at_once, maps in [*rounds, *([(1, single)] if single else [])]:
            for chunk in chunks(subject.source, subject.x, at_once, maps=maps, share=share, title="measuring"):
                recordings = self._recorded(chunk)
                for cotangents, family in families.items():
                    for block in blocks[cotangents]:
                        last = block.stop >= numbers[cotangents]
                        reading = self._reading(recordings, chunk.rows, block, last, cotangents, family)
                        for e in family:
                            if e.wants.backward or reading.first:
                                e.gathering.add(reading)

    def _recorded(self, chunk: Chunk) -> list[Recording]:
        """One forward pass, and one of the initial network if it is wanted."""
        networks = [chunk, replace(chunk, source=self.subject.initial_source)] if self.initial else [chunk]
        recordings = []
        for network in networks:
            with self.subject.timed(chunk.n):
                recordings.append(network.recording)
        return recordings

    def _reading(self, recordings: Sequence[Recording], rows: slice, block: slice, last: bool, cotangents: Cotangents,
                 family: Sequence[Entry]) -> Reading:
        if not any(e.wants.backward for e in family):
            return Reading(self.subject, rows, block, last, recordings[0], {}, {})
        reads = any(e.wants.reads and not e.wants.optional for e in family)
        V = self.subject.rowwise(cotangents, "mean", block)
        now, *before = (r.captures(V(r.f, rows), reads) for r in recordings)
        return Reading(self.subject, rows, block, last, recordings[0], now, before[0] if before else {})


@dataclass(frozen=True)
class StatisticsPlan:
    """How the statistics of a measurement will be had; it holds for one architecture, whatever its weights."""

    keys: tuple[Key, ...]  # each after those it is made of
    due: tuple[tuple[Key, Wants], ...]  # those that the pass gathers


def planned(subject: Subject, keys: Iterable[Key]) -> StatisticsPlan:
    """All that these are made of, and one pass for what is gathered, and for what may come along if there is room for it."""
    every: dict[Key, Wants] = {}

    def visit(key: Key) -> None:
        for need in key[0].needs:
            visit((need, key[1]))
        every.setdefault(key, key[0].wants(subject, key[1]))

    for key in keys:
        visit(key)
    due = {key: w for key, w in every.items() if w.takes_part and not w.optional}
    check_memory(Pass(subject, tuple(due.values())), [w for w in every.values() if w.alone])
    for key, w in every.items():
        more = Pass(subject, (*due.values(), w))
        streamed = key[1] in {c for _, c in due} or subject.kernel_rows.numel() == subject.probe.n
        if w.takes_part and w.optional and streamed and sum(more.sizes()) + w.alone <= subject.memory:
            due[key] = w
            break
    return StatisticsPlan(tuple(every), tuple(due.items()))


def check_memory(gathered: Pass, alone: Sequence[Wants]) -> None:
    """Before any work: can every piece of it be done within memory? If not, say the least that can."""
    memory = gathered.subject.memory
    needs = [w.alone for w in alone] + ([sum(gathered.sizes())] if gathered.wants else [])
    if max(needs, default=0) <= memory:
        return
    pieces = list(dict.fromkeys(w.what for w in alone))
    if gathered.wants:
        sums = " and ".join(dict.fromkeys(w.what for w in gathered.wants if w.what))
        pieces.insert(0, f"{sums} ({show_bytes(gathered.sizes()[0])}) and one example")
    raise MemoryBudgetError(
        f"memory={show_bytes(memory)} cannot hold {', then '.join(pieces)}. The smallest that works here is "
        f"memory='{show_bytes(max(needs))}'; fewer layers (layers=...), kernel examples (Probe(kernel=...)) or outputs "
        f"(output=...) need less.")


def gather(subject: Subject, plan: StatisticsPlan, share: Share = ALONE) -> dict[Key, Gathering]:
    """Statistics in the making: each is begun once, after those it is made of, and one pass gathers all of them."""
    prepared: dict[Cotangents, Cotangents] = {}
    known: dict[Key, Gathering] = {}
    for key in plan.keys:
        statistic, cotangents = key
        if cotangents not in prepared:
            prepared[cotangents] = cotangents.prepare(subject)
        needs = tuple(known[s, cotangents] for s in statistic.needs)
        known[key] = Remembered(statistic.begin(subject, prepared[cotangents], needs))
    entries = [Entry(known[key], wants, prepared[key[1]]) for key, wants in plan.due]
    if entries:
        Pass(subject, tuple(wants for _, wants in plan.due)).run(entries, share)
    return known


def gathered(subject: Subject, statistic: Statistic, cotangents: Cotangents) -> Gathering:
    """One statistic of a subject, in a pass of its own."""
    return gather(subject, planned(subject, [(statistic, cotangents)]))[statistic, cotangents]
