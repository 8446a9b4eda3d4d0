"""Statistics in the making: each is begun once, after those it is made of, and one pass gathers all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from richter.core import MemoryBudgetError, show_bytes
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import Remembered, Statistic
from richter.instrument.statistics.passes import Entry, Pass

if TYPE_CHECKING:
    from richter.instrument.subject import Subject

Key = tuple[Statistic, Cotangents]  # a statistic, seen through these cotangents


@dataclass
class Gathered:
    """The statistics of one measurement."""

    subject: Subject
    known: dict[Key, Remembered] = field(default_factory=dict)
    prepared: dict[Cotangents, Cotangents] = field(default_factory=dict)

    def begin(self, key: Key) -> Remembered:
        statistic, cotangents = key
        if key not in self.known:
            if cotangents not in self.prepared:
                self.prepared[cotangents] = cotangents.prepare(self.subject)
            needs = tuple(self.begin((s, cotangents)) for s in statistic.needs)
            self.known[key] = Remembered(statistic.begin(self.subject, self.prepared[cotangents], needs))
        return self.known[key]

    def gather(self) -> None:
        """One pass for all that is gathered, and for what may come along if there is room for it."""
        subject = self.subject
        wants = {key: key[0].wants(subject, key[1]) for key in self.known}
        entries = {key: Entry(self.known[key], w, self.prepared[key[1]]) for key, w in wants.items() if w.takes_part}
        due = {key: e for key, e in entries.items() if not e.wants.optional}
        check_memory(Pass(subject, list(due.values())), [(w.alone, w.what) for w in wants.values() if w.alone])
        for key, e in entries.items():
            more = Pass(subject, [*due.values(), e])
            streamed = key[1] in {c for _, c in due} or subject.probe.kernel_rows().numel() == subject.probe.n
            if e.wants.optional and streamed and sum(more.sizes()) + e.wants.alone <= subject.memory:
                due[key] = e
                break
        if due:
            Pass(subject, list(due.values())).run()

    def let_go(self, but: set[Cotangents]) -> None:
        """What is seen through other cotangents is not needed any more."""
        self.known = {key: g for key, g in self.known.items() if key[1] in but}


def check_memory(gathered: Pass, alone: Sequence[tuple[int, str]]) -> None:
    """Before any work: can every piece of it be done within memory? If not, say the least that can."""
    memory = gathered.subject.memory
    pieces = list(dict.fromkeys(what for _, what in alone))
    needs = [need for need, _ in alone]
    if gathered.entries:
        sums = " and ".join(dict.fromkeys(e.wants.what for e in gathered.entries if e.wants.what))
        pieces.insert(0, f"{sums} ({show_bytes(gathered.sizes()[0])}) and one example")
        needs.append(sum(gathered.sizes()))
    if max(needs, default=0) > memory:
        raise MemoryBudgetError(
            f"memory={show_bytes(memory)} cannot hold {', then '.join(pieces)}. The smallest that works here is "
            f"memory='{show_bytes(max(needs))}'; fewer layers (layers=...), kernel examples (Probe(kernel=...)) or outputs "
            f"(output=...) need less.")


def gathered(subject: Subject, statistic: Statistic, cotangents: Cotangents) -> Remembered:
    """One statistic of a subject, in a pass of its own."""
    alone = Gathered(subject)
    made = alone.begin((statistic, cotangents))
    alone.gather()
    return made
