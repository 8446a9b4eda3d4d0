"""Running experiments: tasks through the engine, claims against their intervals, controls that must fail, a record of it."""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from richter.core import Interval, RichterError, SelectionError
from richter.engine import Outcome, sweep
from richter.engine.sweep import name_of
from richter.experiments.frame import Claim, Control, Experiment, Results, Scale
from richter.experiments.seeds import ENOUGH, ON_AVERAGE, SHARE, TOO_FEW, summary
from richter.runs import Run, create
from richter.runs.format import hardware, plain, revision, versions


class ExperimentError(RichterError, RuntimeError):
    """A task of an experiment did not finish; what did is kept."""


@dataclass(frozen=True)
class Finding:
    """A claim and the number that our run gives for it, or a run of one of its controls; of a claim over seeds also the numbers
    of each, and the interval in which their median or mean is known to lie."""

    claim: Claim
    value: float
    scale: Scale = "smoke"
    control: Control | None = None
    values: Mapping[Any, float] = field(default_factory=dict)
    interval: Interval | None = None
    coverage: float = 0.0
    unread: str = ""  # why it has no number, if changed settings leave nothing to read it from

    @classmethod
    def over(cls, claim: Claim, values: Mapping[Any, float], scale: Scale = "smoke", control: Control | None = None) -> Finding:
        """From the number of each seed."""
        whole = summary(list(values.values()), claim.by, claim.expect)
        return cls(claim, whole.value, scale, control, values, whole.interval, whole.coverage)

    @property
    def holds(self) -> bool:
        """Is the number in the bar? Of a claim about each seed: are nine of ten?"""
        if self.claim.over and self.claim.by == "each":
            return self.value >= SHARE
        return math.isfinite(self.value) and self.value in self.claim.expect

    @property
    def enough(self) -> bool:
        """Are there seeds enough to decide anything? One number that is over everything has none."""
        return not self.claim.over or len(self.values) >= ENOUGH

    @property
    def sure(self) -> bool:
        """Is the whole interval over seeds in the bar?"""
        if not self.claim.over or self.claim.by == "each":
            return True
        return self.interval is not None and self.interval.low in self.claim.expect and self.interval.high in self.claim.expect

    @property
    def verdict(self) -> str:
        if self.holds:
            return TOO_FEW if not self.enough else "holds" if self.sure else ON_AVERAGE
        return "differs" if self.claim.differs_at(self.scale) else "does not hold"

    @property
    def failure(self) -> str:
        """Why a check of this claim fails; empty if it does not."""
        if self.unread:
            return ""
        if self.verdict in ("holds", ON_AVERAGE) and (why := self.claim.differs_at(self.scale)):
            return f"holds, but is marked as differing ({why}): remove differs=... from the claim"
        return "does not hold" if self.verdict == "does not hold" else ""

    @property
    def invalid(self) -> bool:
        """Does a control prove nothing? NaN lies in no bar, and infinity in the bar fails only because it is infinite."""
        numbers = [*self.values.values(), self.value]
        return any(math.isnan(v) or (math.isinf(v) and v in self.claim.expect) for v in numbers)

    @property
    def record(self) -> dict[str, Any]:
        c, differs = self.claim, self.claim.differs_at(self.scale)
        given = {"differs": differs, "places": list(c.places), "was": c.was}
        seeds = {"over": c.over, "by": c.by, "n": len(self.values),
                 "values": {str(seed): _finite(v) for seed, v in self.values.items()},
                 "interval": self.interval.to_json() if self.interval else None, "coverage": self.coverage}
        return {"text": c.text, "paper": c.paper, "source": c.source, "expect": c.expect.to_json(), "value": _finite(self.value),
                "holds": self.holds, "verdict": self.verdict, **{k: v for k, v in given.items() if v},
                **(seeds if c.over else {})}

    @property
    def outcome(self) -> str:
        """Of a control: it fails when no part of its interval over seeds is in the bar (with fewer seeds than give one: none of
        its numbers; of a claim about each: fewer than half of them), and on average when only its median or mean is outside."""
        if self.invalid or self.holds:
            return "invalid" if self.invalid else "holds"
        expect = self.claim.expect
        if self.claim.over and self.claim.by == "each":
            apart = self.value < 0.5
        elif self.claim.over and self.enough and self.interval is not None:
            apart = self.interval.high < expect.low or self.interval.low > expect.high
        else:
            apart = not any(v in expect for v in self.values.values())
        return "fails" if apart else "fails on average"

    @property
    def as_control(self) -> dict[str, Any]:
        """As the record of its claim keeps it."""
        return {"text": self.control.text if self.control else "", "value": _finite(self.value), "outcome": self.outcome}


@dataclass(frozen=True)
class Checked:
    """An experiment that was run: its results, the number of each claim, and a record of both for the ledger. After its controls
    were run too, the number of each claim on each of them."""

    experiment: Experiment
    scale: Scale
    results: Results
    findings: tuple[Finding, ...]
    record: dict[str, Any]
    seconds: Mapping[Path, float]  # of the processor, by task
    against: tuple[Finding, ...] = ()

    @property
    def failed(self) -> bool:
        return any(f.failure for f in self.findings) or any(f.outcome in ("holds", "invalid") for f in self.against)

    @property
    def minutes(self) -> float:
        """Of the processor, for all tasks, those of the controls too."""
        return sum(self.seconds.values()) / 60


def run(e: Experiment, settings: Any, store: str | Path, workers: int = 1, fresh: bool = False) -> Results:
    """All tasks; what was finished before is not run again, unless it is to be fresh."""
    return _finished(e, settings, store, workers, fresh)[0]


class Summary(NamedTuple):
    """Where the run of a whole experiment lies, and what its drawings lack."""

    folder: Path
    faults: list[str]


def summarise(c: Checked, store: str | Path) -> Summary:
    """A run of its own for the whole experiment: settings, claims and figures, also as files beside it."""
    from richter.report.drawing import faults
    from richter.report.figures import save
    lacking = list[str]()
    e, settings = c.experiment, c.results.settings
    folder = Path(store) / "experiments" / e.name / f"{c.scale}-{name_of(e.work, settings)[-8:]}"
    with create(folder, settings, resume=True) as run:
        run.clear()
        for claim in c.record["claims"]:
            run.claim(claim["text"], claim)
        for name, draw in e.figures.items():
            try:
                figure = draw(c.results)
            except Exception as why:
                if settings == e.settings(c.scale):
                    raise
                lacking.append(f"{name} cannot be drawn with these settings ({_named(why)})")
                continue
            lacking += [f"{name}: {fault}" for fault in faults(figure)]
            for path in save(figure, folder / name):
                run.figure(name, path.suffix[1:], path.read_bytes())
    return Summary(folder, lacking)


def check(e: Experiment, scale: Scale, store: str | Path, *, workers: int = 1, fresh: bool = False,
          changes: Mapping[str, Any] | None = None) -> Checked:
    """Run it and hold each claim against its interval."""
    results, runs = _finished(e, e.settings(scale, **(changes or {})), store, workers, fresh)
    findings = tuple(_read(c, results, scale, lenient=bool(changes)) for c in e.claims)
    about, seconds = [run.about for run in runs], _seconds(runs)
    begun = datetime.datetime.fromtimestamp(max(run.sessions[-1].begun for run in runs), datetime.UTC)
    return Checked(e, scale, results, findings, {
        "experiment": e.name, "scale": scale, "paper": e.ref.paper, "place": e.ref.place, "settings": plain(results.settings),
        "claims": [f.record for f in findings], "tasks": len(runs), **({"tried": e.tried} if e.tried else {}),
        "cpu_minutes": round(sum(seconds.values()) / 60, 3),
        "minutes": round(sum(a.get("seconds", 0.0) for a in about) / 60, 3),
        "memory": max((a.get("memory", 0) for a in about), default=0),
        "date": begun.date().isoformat(),
        "revision": revision(Path(__file__).parent.parent, ".", ":(exclude)experiments/records"),
        "versions": versions(), "hardware": _hardware(), "key": e.key, "modules": e.modules}, seconds)


def finding(c: Claim, results: Results, scale: Scale = "smoke", control: Control | None = None) -> Finding:
    """The number of a claim: one of all results, or one for each seed."""
    if not c.over:
        return Finding(c, float(c.value(results)), scale, control)
    values = {v: float(c.value(results.where(**{c.over: v}))) for v in results.distinct(c.over)}
    return Finding.over(c, values, scale, control)


def _read(c: Claim, results: Results, scale: Scale, *, lenient: bool) -> Finding:
    """Its finding. Under changed settings there may be nothing to read a number from, such as one width of a claim about two."""
    try:
        return finding(c, results, scale)
    except Exception as why:
        if not lenient:
            raise
        return Finding(c, math.nan, scale, unread=_named(why))


def _named(why: Exception) -> str:
    return f"{type(why).__name__}: {why}"


def with_controls(checked: Checked, store: str | Path, *, workers: int = 1) -> Checked:
    """And each claim on its controls, where it must not hold."""
    e, scale = checked.experiment, checked.scale
    against, seconds = list[Finding](), dict(checked.seconds)
    for c in e.claims:
        for control in c.rivals:
            results, runs = _finished(e, e.settings(scale, **control.changes), store, workers, False)
            against.append(finding(c, results, scale, control))
            seconds |= _seconds(runs)
    claims = [_weighed(f, [a.as_control for a in against if a.claim is f.claim]) for f in checked.findings]
    return replace(checked, against=tuple(against), seconds=seconds, record={**checked.record, "claims": claims})


def _weighed(f: Finding, controls: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of a claim with its controls. It holds on average only when one of them fails on average only."""
    close = f.verdict == "holds" and any(c["outcome"] == "fails on average" for c in controls)
    return {**f.record, **({"verdict": ON_AVERAGE} if close else {}), "controls": controls}


def start(e: Experiment, store: str | Path) -> None:
    """One step of the first task at the paper's scale: does it start?"""
    first = _tasks(e, e.settings("paper", **e.start))[:1]
    _raise(e, sweep(e.work, first, Path(store) / "experiments" / e.name, key=e.task_key, title=f"{e.name} (first step)",
                    fresh=True))


def _tasks(e: Experiment, settings: Any) -> list[Any]:
    try:
        tasks = list(e.tasks(settings))
    except ValueError as why:
        raise SelectionError(f"{e.name}: these settings do not fit together ({why}).") from why
    if not tasks:
        raise SelectionError(f"{e.name}: with these settings there is nothing to do.")
    return tasks


def _finished(e: Experiment, settings: Any, store: str | Path, workers: int, fresh: bool) -> tuple[Results, list[Run]]:
    """All tasks through the engine: what they returned, and their runs on disk."""
    outcomes = sweep(e.work, _tasks(e, settings), Path(store) / "experiments" / e.name, workers=workers, fresh=fresh,
                     key=e.task_key, title=e.name)
    _raise(e, outcomes)
    runs = [o.run for o in outcomes]
    return Results.read(settings, [o.settings for o in outcomes], runs), runs


def _raise(e: Experiment, outcomes: Iterable[Outcome]) -> None:
    broken = [o for o in outcomes if o.error]
    if broken:
        raise ExperimentError(f"{e.name}: {len(broken)} of {len(list(outcomes))} tasks did not finish. The first, "
                              f"{broken[0].path}: {broken[0].error}. What finished is kept; the same command goes on.")


def _seconds(runs: Iterable[Run]) -> dict[Path, float]:
    return {run.path: run.about.get("cpu_seconds", 0.0) for run in runs}


def _finite(v: float) -> float | None:
    return v if math.isfinite(v) else None


def _hardware() -> dict[str, Any]:
    """What numbers and costs depend on besides the code."""
    torch, machine = sys.modules.get("torch"), hardware()
    return {**{k: machine[k] for k in ("processor", "cores") if k in machine},
            **({"threads": torch.get_num_threads()} if torch is not None else {})}
