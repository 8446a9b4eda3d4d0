"""What is gathered together, and what after it: one pass over the probe where everything has room beside everything else; else
the sums of some layers after those of others, each group in a pass of its own, and then what needs no pass. The numbers are the
same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from richter.core.sizes import SMALL
from richter.instrument.capture import weight_bytes
from richter.instrument.statistics.frame import Wants
from richter.instrument.statistics.passes import Key, StatisticsPlan, check_memory, due_of, needed, planned, wants_of

if TYPE_CHECKING:
    from richter.instrument.subject import Subject

BESIDE = 16  # of memory=, one part in so many may be held while other work takes all of it
SHARE = 2 / 3  # of memory=, for sums where they do not fit, the rest for examples: fewer passes are worth smaller chunks


@dataclass(frozen=True)
class Stage:
    """Some measures whose statistics are had together."""

    members: tuple[int, ...]  # their numbers
    maps: tuple[str, ...] | None  # of these maps alone; None: of all
    statistics: StatisticsPlan

    def subject(self, whole: Subject) -> Subject:
        return whole if self.maps is None else whole.narrowed(self.maps)


def staged(subject: Subject, wanted: Sequence[tuple[Key, ...]]) -> list[Stage]:
    """How the statistics of some measures are had, within memory; an error that says the least that would do."""
    every = wants_of(subject, _keys(wanted, range(len(wanted))))
    parts: list[tuple[tuple[int, ...], tuple[str, ...] | None]] = [(tuple(range(len(wanted))), None)]
    if needed(subject, every) > subject.memory or _crowded(subject, every):
        parts = _apart(subject, wanted)
    narrow = [(subject if maps is None else subject.narrowed(maps)) for _, maps in parts]
    wants = [wants_of(s, _keys(wanted, members)) for s, (members, _) in zip(narrow, parts, strict=True)]
    check_memory(subject, list(zip(narrow, wants, strict=True)))
    return [Stage(members, maps, planned(s, (), w)) for s, w, (members, maps) in zip(narrow, wants, parts, strict=True)]


def _crowded(subject: Subject, every: Mapping[Key, Wants]) -> bool:
    """Would the sums of a large model take room from work that takes all that is allowed?"""
    due = due_of(every)
    held, alone = sum(w.held for w in due.values()), any(w.alone for key, w in every.items() if key not in due)
    return alone and held > subject.memory // BESIDE and weight_bytes(subject.model) > SMALL


def _keys(wanted: Sequence[tuple[Key, ...]], members: Iterable[int]) -> list[Key]:
    return [key for i in members for key in wanted[i]]


def _apart(subject: Subject, wanted: Sequence[tuple[Key, ...]]) -> list[tuple[tuple[int, ...], tuple[str, ...] | None]]:
    """Sums of maps, as many in a pass as have room; what a pass gathers of the whole model; and what needs no pass, each kind of
    work by itself, because what it keeps is let go at the end of a stage. Passes come first: they look at what is captured."""
    every = [wants_of(subject, keys) for keys in wanted]
    due = [due_of(wants) for wants in every]
    by_map = tuple(i for i, d in enumerate(due) if d and all(statistic.place == "map" for statistic, _ in d))
    alone: dict[tuple[str, ...], tuple[int, ...]] = {}
    for i in (i for i, d in enumerate(due) if not d):
        work = tuple(dict.fromkeys(w.what for w in every[i].values() if w.what))
        alone[work] = (*alone.get(work, ()), i)
    rest = tuple(i for i, d in enumerate(due) if d and i not in by_map)
    parts: list[tuple[tuple[int, ...], tuple[str, ...] | None]] = [
        (by_map, group) for group in (_groups(subject, _keys(wanted, by_map)) if by_map else [])]
    return parts + [(members, None) for members in (rest, *alone.values()) if members]


def _groups(subject: Subject, keys: Sequence[Key]) -> list[tuple[str, ...]]:
    """Neighbours in the order of the forward pass, those nearest the outputs first: their backward passes are the shortest."""
    groups: list[tuple[str, ...]] = []
    for name in reversed(subject.maps):
        if groups and _fit(subject.narrowed(wider := (name, *groups[-1])), keys):
            groups[-1] = wider
        else:
            groups.append((name,))
    return groups


def _fit(subject: Subject, keys: Sequence[Key]) -> bool:
    """Have the sums of these maps their share of memory, and an example room beside them?"""
    every = wants_of(subject, keys)
    return sum(w.held for w in due_of(every).values()) <= SHARE * subject.memory and needed(subject, every) <= subject.memory
