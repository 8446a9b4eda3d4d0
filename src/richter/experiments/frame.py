"""Experiments: settings at two scales, a function that does one task, claims about the results, and figures. A reproduction ends
in numbers inside intervals."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import typing
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

import richter.experiments.keys as keys
from richter.core import Interval, Ref, SelectionError, unknown
from richter.experiments.outcomes import Reason
from richter.experiments.seeds import By
from richter.runs import Run, Writer, default_store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale = Literal["smoke", "paper"]
SCALES: tuple[Scale, Scale] = ("smoke", "paper")
S = TypeVar("S")


class Task(SimpleNamespace, Generic[S]):
    """One independent piece of an experiment: its settings and the value of each field it runs over, ``task.seed``. Read-only."""

    settings: S

    def __init__(self, settings: S, **values: Any) -> None:
        super().__init__(settings=settings, **values)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a task is read-only: make another one, Task(settings, {name}=...)")

    def __hash__(self) -> int:  # type: ignore[override]  # namespaces that can change have none
        return hash(tuple(vars(self).items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **vars(self)), ()


class Results:
    """Arrays that the tasks of an experiment returned: ``results["rho"]`` has one row for each task."""

    def __init__(self, settings: Any, tasks: Sequence[Any], returned: Sequence[Mapping[str, NDArray[Any]]]) -> None:
        self.settings, self.tasks, self._returned = settings, list(tasks), list(returned)

    @classmethod
    def read(cls, settings: Any, tasks: Sequence[Any], runs: Sequence[Run]) -> Results:
        """Read the results from the runs of the tasks on disk."""
        return cls(settings, tasks, [{name: run.array(name, layer, step) for layer, name, step in run.arrays if layer == "*"}
                                     for run in runs])

    @property
    def names(self) -> list[str]:
        """Names of the arrays, each once."""
        return list(dict.fromkeys(name for arrays in self._returned for name in arrays))

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self.names:
            raise unknown("this experiment's results", "array", name, self.names)
        return np.stack([arrays[name] for arrays in self._returned])

    def distinct(self, name: str) -> list[Any]:
        """Return the values of a field of the tasks, each once, in the order of the tasks."""
        for task in self.tasks:
            if not hasattr(task, name):
                fields = [f.name for f in dataclasses.fields(task)] if dataclasses.is_dataclass(task) else list(vars(task))
                raise unknown("a task of this experiment", "field", name, fields)
        return list(dict.fromkeys(getattr(task, name) for task in self.tasks))

    def where(self, **fields: Any) -> Results:
        """Return the results of the tasks with these values only: ``results.where(depth=10)["peak"]``."""
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
    """A case on which a claim must fail: its description, and the settings that make it."""

    text: str
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """A number read out of the results, the interval it must lie in, and the controls on which it must not.

    ``control``: one control or several, the rivals; the claim must fail on each of them. ``paper`` is the paper's number,
    ``source`` says where the interval comes from, never from our own result. A claim that is known not to reproduce has
    ``differs``, the explanation (or one for a scale, ``{"paper": "..."}``). It is recorded, and does not fail a check unless it
    holds.

    ``over`` names a field of the tasks, usually "seed". Then ``value`` is called for the results of each seed, and ``by``
    says whether the claim is about the median of these numbers, their mean, or ``each`` of them. With ``over=""`` the claim
    is about one number: an identity, or a number that is over everything by its text. ``was``: an earlier bar, with the
    number of that time, and why it changed.

    The ledger reads the rest (`richter.experiments.outcomes`). ``says``: the paper's claim in one sentence, with its number. A
    claim of ours, which the paper does not make, has ``own=True``. ``protocol``: as in `Experiment`, for this claim alone.
    ``reason``: why the claim is not simply reproduced, if it does not follow from the numbers; "misprint" says that the number
    is about a formula that was corrected. ``direction``: a wider interval, in which the sign or the order is right at least.
    ``second``: the test or derivation that gives the number by another route, without which nothing is contradicted. ``rival``:
    the rival with which a claim of ours compares; if the claim fails, the rival shares what the place claims."""

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
    says: str = ""
    own: bool = False
    protocol: str = ""
    reason: Reason | Literal[""] = ""
    direction: Interval | None = None
    second: str = ""
    rival: str = ""

    @property
    def rivals(self) -> tuple[Control, ...]:
        """Controls of the claim as a tuple."""
        return self.control if isinstance(self.control, tuple) else (self.control,)

    def differs_at(self, scale: Scale) -> str:
        """Return why the claim is known not to hold at this scale."""
        return self.differs if isinstance(self.differs, str) else self.differs.get(scale, "")


@dataclass(frozen=True)
class Experiment:
    """One figure or table of a paper.

    ``smoke`` and ``paper`` are settings of one frozen dataclass. ``over`` names what the tasks run over: ``over=("depth",
    "seed")`` makes a task for each pair of ``settings.depths`` and ``settings.seeds``, the last one changing first; ``(("width",
    "rate"), "seed")`` takes width and rate together; a function of the settings lists tasks that are no product. Without
    ``over`` the settings are the only task. ``analysis`` names settings that only claims and figures read: tasks have their
    defaults, so that controls which change them run nothing again.

    ``work(task, run)`` does one task and returns named arrays. ``start`` are changes of the settings under which the paper's
    scale does one step, to check that it starts. ``data`` are the data sets that it needs, ``more_data`` those that it needs
    at the paper's scale besides. ``reduced`` says how smoke falls short of the paper; it is empty if smoke does not.
    ``absent`` says why it cannot be run where the records are made. ``places``: all figures it covers, if more than that of
    ``ref``. ``quick``: smoke takes seconds, and is run with the tests. ``missing``: panels, data and sizes of the paper that
    are not here, by place: ``{"Fig. 13": "five of its six data sets"}``. ``tried``: the settings that were tried before these.
    ``protocol`` compares the paper's scale with the paper, for all claims or by place: "exact", or "reduced: 400 of 4,000
    images", "stand-in: MNIST for SVHN", "unstated: the learning rate". ``partial``: the part of the paper's claim that was
    run, by place, if not all of it: ``{"Fig. 13": "two of six data sets"}``."""

    name: str
    ref: Ref
    title: str
    smoke: Any
    paper: Any
    work: Callable[[Any, Writer], Mapping[str, ArrayLike]]
    claims: tuple[Claim, ...]
    over: Sequence[str | tuple[str, ...]] | Callable[[Any], Sequence[Any]] = ()
    analysis: tuple[str, ...] = ()
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
    protocol: str | Mapping[str, str] = ""
    partial: Mapping[str, str] = field(default_factory=dict)

    def protocol_of(self, c: Claim, place: str) -> str:
        """Return the protocol of a claim about a place at the paper's scale."""
        return c.protocol or (self.protocol if isinstance(self.protocol, str) else self.protocol.get(place, ""))

    @property
    def covers(self) -> tuple[str, ...]:
        """Places of the paper that the experiment covers."""
        return self.places or (self.ref.place,)

    def settings(self, scale: Scale = "smoke", **changes: Any) -> Any:
        """Return the settings of a scale, with these changes."""
        if scale not in SCALES:
            raise SelectionError(f"scale={scale!r}: choose 'smoke' (a minute at most) or 'paper' (the sizes of the paper).")
        base = self.smoke if scale == "smoke" else self.paper
        known = {f.name for f in dataclasses.fields(base)}
        for name in changes:
            if name not in known:
                raise unknown(f"the experiment {self.name}", "setting", name, sorted(known))
        return dataclasses.replace(base, **changes)

    def tasks(self, settings: Any) -> list[Any]:
        """Return the independent tasks of its work under these settings."""
        defaults = {f.name: f.default for f in dataclasses.fields(settings)}
        for name in self.analysis:
            if defaults.get(name, dataclasses.MISSING) is dataclasses.MISSING:
                raise SelectionError(f"the experiment {self.name} has analysis={self.analysis!r}, but its settings have no "
                                     f"default for {name!r}, which tasks need. Give it a default, or take it out of analysis.")
        settings = dataclasses.replace(settings, **{name: defaults[name] for name in self.analysis})
        if callable(self.over):
            return list(self.over(settings))
        return self._product(settings, defaults) if self.over else [settings]

    def _product(self, settings: Any, known: Container[str]) -> list[Task[Any]]:
        """Return a task for each combination of the values of ``over``; its settings hold none of these values."""
        assert not callable(self.over)
        groups = [(group,) if isinstance(group, str) else group for group in self.over]
        plurals = {name: self._plural(settings, name) for group in groups for name in group}
        rows = [list(zip(*(getattr(settings, plurals[name]) for name in group), strict=True)) for group in groups]
        rest = dataclasses.replace(settings, **{plural: () for plural in plurals.values() if plural in known})
        return [Task(rest, **dict(zip(plurals, itertools.chain(*row), strict=True))) for row in itertools.product(*rows)]

    def _plural(self, settings: Any, name: str) -> str:
        """Return the settings' own name for the values of a field: seeds of seed, spectra of spectrum, data of data."""
        for plural in (f"{name}s", f"{name.removesuffix('um')}a", name):
            if hasattr(settings, plural):
                return plural
        raise unknown(f"the experiment {self.name}, over={self.over!r}", "setting", f"{name}s",
                      [f.name for f in dataclasses.fields(settings)])

    def run(self, scale: Scale = "smoke", *, store: str | Path | None = None, workers: int = 1, fresh: bool = False,
            **changes: Any) -> Results:
        """Run all tasks and return their results. Finished tasks are not run again.

        >>> results = richter.experiments.get("nfa_fig1").run("smoke")
        """
        from richter.experiments.running import run
        return run(self, self.settings(scale, **changes), store or default_store(), workers, fresh)

    @cached_property
    def modules(self) -> dict[str, str]:
        """Modules that its numbers come from, with their digests (`richter.experiments.keys`)."""
        lists = [self.over] if callable(self.over) else []
        return keys.modules(self._files([self.work, *lists, *(claim.value for claim in self.claims)]))

    def _files(self, functions: Sequence[Callable[..., Any]]) -> list[Path]:
        """Return the files that define these functions."""
        files = sorted({Path(f.__code__.co_filename) for f in map(inspect.unwrap, functions) if inspect.isfunction(f)})
        for path in files:
            if not path.is_file():
                raise SelectionError(f"the experiment {self.name} was defined in {str(path)!r}, which is no file. Finished tasks "
                                     f"are identified by the code that they came from: move it to a file.")
        return files

    @property
    def key(self) -> str:
        """One digest of these modules: other code, another key."""
        return keys.key(self.modules)

    @property
    def task_key(self) -> str:
        """Key of finished tasks, which are not run again: a digest of the code behind ``work``, without claims and drawings,
        and of the code that serves all experiments, the instrument above all. When claims and drawings change, results are
        only read again."""
        work = inspect.unwrap(self.work)
        return f"{keys.key(keys.modules(self._files([work]), wanted=work.__qualname__))} {keys.rest()}"

    def parsed(self, assignments: Sequence[str]) -> dict[str, Any]:
        """Return settings from ``key=value`` texts, by the types of the dataclass."""
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
    """Return a value of the type that the setting has; tuples are written 1,2,3."""
    if typing.get_origin(kind) is tuple:
        return tuple(_parsed(name, part, typing.get_args(kind)[0]) for part in text.split(",") if part)
    if typing.get_origin(kind) is Literal:
        if text not in typing.get_args(kind):
            raise SelectionError(f"{name}={text!r}: choose one of {', '.join(map(repr, typing.get_args(kind)))}.")
        return text
    if kind is bool and text.lower() in ("true", "false", "1", "0", "yes", "no"):
        return text.lower() in ("true", "1", "yes")
    try:
        if kind in (int, float, str):
            return kind(text)
    except ValueError:
        pass
    raise SelectionError(f"{name}={text!r} is not a value of type {getattr(kind, '__name__', kind)}.")
