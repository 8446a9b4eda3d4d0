"""Running experiments: tasks through the engine, claims against their intervals, controls that must fail, a record of it."""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from richter.core import RichterError, SelectionError
from richter.engine import Outcome, sweep
from richter.engine.sweep import name_of
from richter.experiments.frame import Claim, Experiment, Results, Scale
from richter.runs import Run, create
from richter.runs.provenance import hardware, plain, revision, versions


class ExperimentError(RichterError, RuntimeError):
    """A task of an experiment did not finish; what did is kept."""


@dataclass(frozen=True)
class Finding:
    """A claim and the number that our run gives for it."""

    claim: Claim
    value: float

    @property
    def holds(self) -> bool:
        return math.isfinite(self.value) and self.value in self.claim.expect

    @property
    def verdict(self) -> str:
        return "reproduced" if self.holds else "differs" if self.claim.differs else "FAILED"

    @property
    def record(self) -> dict[str, Any]:
        low, high = (v if math.isfinite(v) else None for v in (self.claim.expect.low, self.claim.expect.high))
        return {"text": self.claim.text, "paper": self.claim.paper, "source": self.claim.source, "expect": [low, high],
                "value": self.value if math.isfinite(self.value) else None, "holds": self.holds, "verdict": self.verdict,
                **({"differs": self.claim.differs} if self.claim.differs else {}),
                **({"places": list(self.claim.places)} if self.claim.places else {})}


@dataclass(frozen=True)
class Checked:
    """An experiment that was run: its results, the number of each claim, and a record of both for the ledger."""

    experiment: Experiment
    scale: Scale
    results: Results
    findings: tuple[Finding, ...]
    record: dict[str, Any]

    @property
    def failed(self) -> bool:
        return any(f.verdict == "FAILED" for f in self.findings)


def run(e: Experiment, settings: Any, store: str | Path, workers: int = 1, fresh: bool = False) -> Results:
    """All tasks; what was finished before is not run again, unless it is to be fresh."""
    return _finished(e, settings, store, workers, fresh)[0]


def summarise(c: Checked, store: str | Path) -> Path:
    """A run of its own for the whole experiment: settings, claims and figures, also as files beside it. Returns its folder."""
    from richter.report.figures import save
    e, settings = c.experiment, c.results.settings
    folder = Path(store) / "experiments" / e.name / f"{c.scale}-{name_of(e.work, settings)[-8:]}"
    with create(folder, settings, resume=True) as run:
        run.clear()
        for f in c.findings:
            run.claim(f.claim.text, f.record)
        for name, draw in e.figures.items():
            for path in save(draw(c.results), folder / name):
                run.figure(name, path.suffix[1:], path.read_bytes())
    return folder


def check(e: Experiment, scale: Scale, store: str | Path, *, workers: int = 1, fresh: bool = False,
          changes: Mapping[str, Any] | None = None) -> Checked:
    """Run it and hold each claim against its interval."""
    results, runs = _finished(e, e.settings(scale, **(changes or {})), store, workers, fresh)
    findings = tuple(Finding(c, float(c.value(results))) for c in e.claims)
    about = [run.about for run in runs]
    begun = datetime.datetime.fromtimestamp(max(run.sessions[-1].begun for run in runs), datetime.UTC)
    return Checked(e, scale, results, findings, {
        "experiment": e.name, "scale": scale, "paper": e.ref.paper, "place": e.ref.place, "settings": plain(results.settings),
        "claims": [f.record for f in findings], "tasks": len(runs),
        "cpu_minutes": round(sum(a.get("cpu_seconds", 0.0) for a in about) / 60, 3),
        "minutes": round(sum(a.get("seconds", 0.0) for a in about) / 60, 3),
        "memory": max((a.get("memory", 0) for a in about), default=0),
        "date": begun.date().isoformat(),
        "revision": revision(Path(__file__).parent.parent, ".", ":(exclude)experiments/records"),
        "versions": versions(), "hardware": _hardware(), "key": e.key, "modules": e.modules})


def controls(e: Experiment, scale: Scale, store: str | Path, *, workers: int = 1) -> list[Finding]:
    """Each claim on its control, where it must not hold."""
    return [Finding(c, float(c.value(run(e, e.settings(scale, **c.control.changes), store, workers)))) for c in e.claims]


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


def _hardware() -> dict[str, Any]:
    """What numbers and costs depend on besides the code."""
    torch, machine = sys.modules.get("torch"), hardware()
    return {**{k: machine[k] for k in ("processor", "cores") if k in machine},
            **({"threads": torch.get_num_threads()} if torch is not None else {})}
