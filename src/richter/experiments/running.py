"""Running experiments: tasks through the engine, claims against their intervals, controls that must fail, and a record of it
all."""

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
    """Error of an experiment with an unfinished task; finished tasks are kept."""


@dataclass(frozen=True)
class Finding:
    """A claim and the number that a run gives for it, or the number of a run of one of its controls. A claim over seeds also
    has the number of each seed, and the interval of their median or mean."""

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
        """Return the finding that summarises the numbers of all seeds."""
        whole = summary(list(values.values()), claim.by, claim.expect)
        return cls(claim, whole.value, scale, control, values, whole.interval, whole.coverage)

    @property
    def holds(self) -> bool:
        """Return whether the number is in the bar; for a claim about each seed, whether nine of ten are."""
        if self.claim.over and self.claim.by == "each":
            return self.value >= SHARE
        return math.isfinite(self.value) and self.value in self.claim.expect

    @property
    def enough(self) -> bool:
        """Return whether there are enough seeds to decide. A claim about one number needs none."""
        return not self.claim.over or len(self.values) >= ENOUGH

    @property
    def sure(self) -> bool:
        """Return whether the whole interval over seeds is in the bar."""
        if not self.claim.over or self.claim.by == "each":
            return True
        return self.interval is not None and self.interval.low in self.claim.expect and self.interval.high in self.claim.expect

    @property
    def verdict(self) -> str:
        """Verdict on the claim: holds, holds on average, too few seeds, differs, or does not hold."""
        if self.holds:
            return TOO_FEW if not self.enough else "holds" if self.sure else ON_AVERAGE
        return "differs" if self.claim.differs_at(self.scale) else "does not hold"

    @property
    def failure(self) -> str:
        """Reason why the check of this claim fails; empty if it passes."""
        if self.unread:
            return ""
        if self.verdict in ("holds", ON_AVERAGE) and (why := self.claim.differs_at(self.scale)):
            return f"holds, but is marked as differing ({why}): remove differs=... from the claim"
        return "does not hold" if self.verdict == "does not hold" else ""

    @property
    def invalid(self) -> bool:
        """Return whether a control proves nothing. NaN lies in no bar, and infinity outside the bar fails only because it is
        infinite."""
        numbers = [*self.values.values(), self.value]
        return any(math.isnan(v) or (math.isinf(v) and v in self.claim.expect) for v in numbers)

    @property
    def record(self) -> dict[str, Any]:
        """Entry of the claim in the record of its experiment."""
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
        """Outcome of a control. It fails when no part of its interval over seeds is in the bar (without an interval: none of
        its numbers; for a claim about each seed: fewer than half). It fails on average when only its median or mean is
        outside."""
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
        """Entry of a control in the record of its claim."""
        return {"text": self.control.text if self.control else "", "value": _finite(self.value), "outcome": self.outcome}


@dataclass(frozen=True)
class Checked:
    """An experiment after its run: its results, the number of each claim, and a record for the ledger. After its controls
    were run too, it has the number of each claim on each of them."""

    experiment: Experiment
    scale: Scale
    results: Results
    findings: tuple[Finding, ...]
    record: dict[str, Any]
    seconds: Mapping[Path, float]  # of the processor, by task
    against: tuple[Finding, ...] = ()

    @property
    def failed(self) -> bool:
        """Return whether a claim fails the check, or a control holds or is invalid."""
        return any(f.failure for f in self.findings) or any(f.outcome in ("holds", "invalid") for f in self.against)

    @property
    def minutes(self) -> float:
        """Processor minutes of all tasks, including those of the controls."""
        return sum(self.seconds.values()) / 60


def run(e: Experiment, settings: Any, store: str | Path, workers: int = 1, fresh: bool = False) -> Results:
    """Run all tasks and return their results. Finished tasks are not run again, unless ``fresh``."""
    return _finished(e, settings, store, workers, fresh)[0]


class CheckSummary(NamedTuple):
    """Folder of the summary of an experiment, and the faults of its drawings."""

    folder: Path
    faults: list[str]


def summarise(c: Checked, store: str | Path) -> CheckSummary:
    """Write a run of its own for the whole experiment: settings, claims and figures, and the figures as files beside it."""
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
    return CheckSummary(folder, lacking)


def check(e: Experiment, scale: Scale, store: str | Path, *, workers: int = 1, fresh: bool = False,
          changes: Mapping[str, Any] | None = None) -> Checked:
    """Run an experiment and compare each claim with its interval."""
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
    """Return the number of a claim: one of all results, or one for each seed."""
    if not c.over:
        return Finding(c, float(c.value(results)), scale, control)
    values = {v: float(c.value(results.where(**{c.over: v}))) for v in results.distinct(c.over)}
    return Finding.over(c, values, scale, control)


def _read(c: Claim, results: Results, scale: Scale, *, lenient: bool) -> Finding:
    """Return the finding of a claim. Changed settings may leave nothing to read a number from, such as one width for a claim
    about two."""
    try:
        return finding(c, results, scale)
    except Exception as why:
        if not lenient:
            raise
        return Finding(c, math.nan, scale, unread=_named(why))


def _named(why: Exception) -> str:
    """Type and text of an error."""
    return f"{type(why).__name__}: {why}"


def with_controls(checked: Checked, store: str | Path, *, workers: int = 1) -> Checked:
    """Run the controls of each claim, on which it must not hold, and add their findings."""
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
    """Return the record of a claim with its controls. The claim holds on average only if one of them fails on average only."""
    close = f.verdict == "holds" and any(c["outcome"] == "fails on average" for c in controls)
    return {**f.record, **({"verdict": ON_AVERAGE} if close else {}), "controls": controls}


def start(e: Experiment, store: str | Path) -> None:
    """Do one step of the first task at the paper's scale, to check that it starts."""
    first = _tasks(e, e.settings("paper", **e.start))[:1]
    _raise(e, sweep(e.work, first, Path(store) / "experiments" / e.name, key=e.task_key, title=f"{e.name} (first step)",
                    fresh=True))


def _tasks(e: Experiment, settings: Any) -> list[Any]:
    """Return the tasks under these settings, or raise if there are none."""
    try:
        tasks = list(e.tasks(settings))
    except ValueError as why:
        raise SelectionError(f"{e.name}: these settings do not fit together ({why}).") from why
    if not tasks:
        raise SelectionError(f"{e.name}: with these settings there is nothing to do: a list that tasks run over is empty.")
    return tasks


def _finished(e: Experiment, settings: Any, store: str | Path, workers: int, fresh: bool) -> tuple[Results, list[Run]]:
    """Run all tasks through the engine; return their results and their runs on disk."""
    outcomes = sweep(e.work, _tasks(e, settings), Path(store) / "experiments" / e.name, workers=workers, fresh=fresh,
                     key=e.task_key, title=e.name)
    _raise(e, outcomes)
    runs = [o.run for o in outcomes]
    return Results.read(settings, [o.settings for o in outcomes], runs), runs


def _raise(e: Experiment, outcomes: Iterable[Outcome]) -> None:
    """Raise if a task did not finish."""
    broken = [o for o in outcomes if o.error]
    if broken:
        raise ExperimentError(f"{e.name}: {len(broken)} of {len(list(outcomes))} tasks did not finish. The first, "
                              f"{broken[0].path}: {broken[0].error}. Finished tasks are kept; the same command resumes "
                              f"the others.")


def _seconds(runs: Iterable[Run]) -> dict[Path, float]:
    """Return the processor seconds of each run."""
    return {run.path: run.about.get("cpu_seconds", 0.0) for run in runs}


def _finite(v: float) -> float | None:
    """Return a number, or None if it is not finite: JSON has no NaN."""
    return v if math.isfinite(v) else None


def _hardware() -> dict[str, Any]:
    """Return the hardware and number of threads that numbers and costs depend on."""
    torch, machine = sys.modules.get("torch"), hardware()
    return {**{k: machine[k] for k in ("processor", "cores") if k in machine},
            **({"threads": torch.get_num_threads()} if torch is not None else {})}
