"""Experiments of [signal] whose tasks differ in the seed alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

S = TypeVar("S")


@dataclass(frozen=True)
class Seeded(Generic[S]):
    """The settings, and one of their seeds."""

    settings: S
    seed: int


def each_seed(s: Any, **alike: Any) -> list[Seeded[Any]]:
    """A task for each seed. ``alike``: settings that only claims read, the same in all tasks, so that rivals run nothing anew."""
    return [Seeded(replace(s, seeds=(), **alike), seed) for seed in s.seeds]
