"""What an experiment is: settings at two scales, independent tasks, a function that does one, claims about the results,
figures. A reproduction ends in numbers inside intervals."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

import richter.experiments.keys as keys
from richter.core import Interval, Ref, SelectionError, unknown
from richter.experiments.seeds import By
from richter.runs import Run, Writer, default_store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale = Literal["smoke", "paper"]
SCALES: tuple[Scale, Scale] = ("smoke", "paper")


class Results:
    """What the tasks of an experiment returned: ``results["rho"]`` is an array with one row for each task."""

    def __init__(self, settings: Any, tasks: Sequence[Any], returned: Sequence[Mapping[str, NDArray[Any]]]) -> None:
        self.settings, self.tasks, self._returned = settings, list(tasks), list(returned)

    @classmethod
    def read(cls, settings: Any, tasks: Sequence[Any], runs: Sequence[Run]) -> Results:
        """From the runs of the tasks on disk."""
        return cls(settings, tasks, [{name: run.array(name, layer, step) for layer, name, step in run.arrays if layer == "*"}
                                     for run in runs])

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for arrays in self._returned for name in arrays))

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self.names:
            raise unknown("this experiment's results", "array", name, self.names)
        return np.stack([arrays[name] for arrays in self._returned])

    def distinct(self, name: str) -> list[Any]:
        """The values that a field of the tasks has, each once, in the order of the tasks."""
        for task in self.tasks:
            if not hasattr(task, name):
                fields = [f.name for f in dataclasses.fields(task)] if dataclasses.is_dataclass(task) else dir(task)
                raise unknown("a task of this experiment", "field", name, fields)
        return list(dict.fromkeys(getattr(task, name) for task in self.tasks))

    def where(self, **fields: Any) -> Results:
        """The tasks with these settings only: ``results.where(depth=10)["peak"]``."""
        for name in fields:
            self.distinct(name)
        kept = [i for i, t in enumerate(self.tasks) if all(getattr(t, k) == v for k, v in fields.items())]
        return Results(self.settings, [self.tasks[i] for i in kept], [self._returned[i] for i in kept])

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[tuple[Any, Mapping[str, NDArray[Any]]]]:
        return iter(zip(self.tasks, self._returned, strict=True))


@dataclass(frozen=True)
class Control:
    """A case on which a claim must fail: what it is, and the settings that make it."""

    text: str
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """A number read out of the results, the interval it must lie in, and the cases on which it must not.

    ``control``: one case or several, the rivals, and the claim must fail on each of them. ``paper`` is what the paper has;
    ``source`` where the interval comes from, never our own result. A claim that is known not to reproduce carries ``differs``,
    the explanation (or one for a scale, ``{"paper": "..."}``): it is recorded, and does not fail a check, unless it holds.

    ``over`` names a field of the tasks, usually "seed": ``value`` is then called for the results of each seed by itself, and the
    claim is about the median of these numbers, or the mean, or ``each`` of them, which says ``by``. With ``over=""`` the claim
    is about one number: an identity, or one that by its text is over everything. ``was``: another bar that it once had, with
    the number of that time, and why it changed."""

    text: str
    value: Callable[[Results], float]
    expect: Interval
    control: Control | tuple[Control, ...]
    paper: str = ""
    source: str = ""
    differs: str | Mapping[Scale, str] = ""
    places: tuple[str, ...] = ()  # the figures it is about, if not all that the experiment covers
    over: str = ""
    by: By = "median"
    was: str = ""

    @property
    def rivals(self) -> tuple[Control, ...]:
        return self.control if isinstance(self.control, tuple) else (self.control,)

    def differs_at(self, scale: Scale) -> str:
        """Why it is known not to hold at this scale."""
        return self.differs if isinstance(self.differs, str) else self.differs.get(scale, "")


@dataclass(frozen=True)
class Experiment:
    """One figure or table of a paper.

    ``smoke`` and ``paper`` are settings of one frozen dataclass; ``tasks(settings)`` are independent pieces (by default one:
    the settings); ``work(task, run)`` does one and returns named arrays; ``start`` are changes of the settings under which the
    paper's scale does one step, to see that it starts. ``data`` are the sets that it needs, ``more_data`` those that it needs
    at the paper's scale besides. ``reduced`` says how smoke falls short of the paper; empty if it does not. ``absent``: why it
    cannot be run where the records are made. ``places``: all figures it covers, if more than that of ``ref``. ``quick``: smoke
    takes seconds, and is run with the tests. ``missing``: what is not here of the panels, data and sizes that the paper has at a
    place, ``{"Fig. 13": "five of its six data sets"}``; its verdict is then at best "reproduced in part". ``tried``: the settings
    that were tried before these.
    """

    name: str
    ref: Ref
    title: str
    smoke: Any
    paper: Any
    work: Callable[[Any, Writer], Mapping[str, ArrayLike]]
    claims: tuple[Claim, ...]
    tasks: Callable[[Any], Sequence[Any]] = lambda settings: (settings,)
    figures: Mapping[str, Callable[[Results], Figure]] = field(default_factory=dict)
    data: tuple[str, ...] = ()
    more_data: tuple[str, ...] = ()
    start: Mapping[str, Any] = field(default_factory=dict)
    reduced: str = ""
    absent: str = ""
    places: tuple[str, ...] = ()
    quick: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)
    tried: str = ""

    @property
    def covers(self) -> tuple[str, ...]:
        return self.places or (self.ref.place,)

    def settings(self, scale: Scale = "smoke", **changes: Any) -> Any:
        """The settings of a scale, some changed."""
        if scale not in SCALES:
            raise SelectionError(f"scale={scale!r}: 'smoke' (a minute at most) or 'paper' (the paper's own sizes).")
        base = self.smoke if scale == "smoke" else self.paper
        known = {f.name for f in dataclasses.fields(base)}
        for name in changes:
            if name not in known:
                raise unknown(f"the experiment {self.name}", "setting", name, sorted(known))
        return dataclasses.replace(base, **changes)

    def run(self, scale: Scale = "smoke", *, store: str | Path | None = None, workers: int = 1, fresh: bool = False,
            **changes: Any) -> Results:
        """All tasks, and what they returned. What was finished before is not run again.

        >>> results = richter.experiments.get("nfa_fig1").run("smoke")
        """
        from richter.experiments.running import run
        return run(self, self.settings(scale, **changes), store or default_store(), workers, fresh)

    @cached_property
    def modules(self) -> dict[str, str]:
        """The modules that its numbers come from, with their digests (`richter.experiments.keys`)."""
        return keys.modules(self._files([self.work, self.tasks, *(claim.value for claim in self.claims)]))

    def _files(self, functions: Sequence[Callable[..., Any]]) -> list[Path]:
        files = sorted({Path(f.__code__.co_filename) for f in map(inspect.unwrap, functions) if inspect.isfunction(f)})
        for path in files:
            if not path.is_file():
                raise SelectionError(f"the experiment {self.name} was defined in {str(path)!r}, which is no file. Finished tasks "
                                     f"are known by the code that they came from: move it to a file.")
        return files

    @property
    def key(self) -> str:
        """One digest of these modules: other code, other results."""
        return keys.key(self.modules)

    @property
    def task_key(self) -> str:
        """A finished task with this key is not run again: a digest of what its work comes from, without claims and drawings, so
        that results are read again when these change; and of all that serves experiments alike, the instrument above all."""
        work = inspect.unwrap(self.work)
        return f"{keys.key(keys.modules(self._files([work]), wanted=work.__qualname__))} {keys.rest()}"

    def parsed(self, assignments: Sequence[str]) -> dict[str, Any]:
        """Settings from ``key=value`` texts, by the types of the dataclass."""
        hints = typing.get_type_hints(type(self.smoke))
        values = {}
        for text in assignments:
            name, sign, value = text.partition("=")
            if not sign:
                raise SelectionError(f"--set {text!r}: write key=value, e.g. --set steps=100.")
            if name not in hints:
                raise unknown(f"the experiment {self.name}", "setting", name, hints)
            values[name] = _parsed(name, value, hints[name])
        return values


def _parsed(name: str, text: str, kind: Any) -> Any:
    """A value of the type that the setting has; tuples are written 1,2,3."""
    if typing.get_origin(kind) is tuple:
        return tuple(_parsed(name, part, typing.get_args(kind)[0]) for part in text.split(",") if part)
    if typing.get_origin(kind) is Literal:
        if text not in typing.get_args(kind):
            raise SelectionError(f"{name}={text!r}: one of {', '.join(map(repr, typing.get_args(kind)))}.")
        return text
    if kind is bool and text.lower() in ("true", "false", "1", "0", "yes", "no"):
        return text.lower() in ("true", "1", "yes")
    try:
        if kind in (int, float, str):
            return kind(text)
    except ValueError:
        pass
    raise SelectionError(f"{name}={text!r} is not a value of type {getattr(kind, '__name__', kind)}.")
