"""Shared parts of `run` and `check`: run experiments and compare every claim with its bar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from richter.commands import options
from richter.commands.frame import as_json
from richter.core.values import table

if TYPE_CHECKING:
    from richter.experiments.frame import Experiment
    from richter.experiments.running import Checked

SMOKE_MINUTES = 1.5  # CPU minutes, for one experiment and its controls; for all of them together:
SMOKE_MINUTES_OF_ALL = 90
OUTCOMES = {"fails": "fails, as it must", "fails on average": "fails on average only", "holds": "HOLDS, and must not",
            "invalid": "INVALID: no number, so it proves nothing"}


def arguments(p: argparse.ArgumentParser) -> None:
    """Add the options of commands that run experiments."""
    p.add_argument("--scale", choices=("smoke", "paper"), default="smoke", help="about a minute, or the paper's own sizes")
    p.add_argument("--store", type=Path, help="folder of the runs (default: RICHTER_RUNS, or runs)")
    p.add_argument("--workers", type=int, default=1, help="processes")
    p.add_argument("--fresh", action="store_true", help="repeat finished runs")
    options.machine(p)


def check_all(experiments: Iterable[Experiment], args: argparse.Namespace, changes: Mapping[str, Any], *, lenient: bool,
              with_controls: bool = False) -> int:
    """Run experiments, print their claims, and return the exit code. ``lenient``: skip an experiment without data, report one
    that raises an error, and continue."""
    from richter.core import RichterError
    failed, reports = False, list[dict[str, Any]]()
    for e in experiments:
        if lenient and (missing := lacking(e, args.scale)):
            print(f"{e.name}: skipped, {missing}", file=sys.stderr)
            reports.append({"experiment": e.name, "skipped": missing})
            continue
        try:
            holds, report = _checked(e, args, changes, with_controls)
        except RichterError as why:
            if not lenient:
                raise
            print(f"{e.name}: FAILED. {why}", file=sys.stderr)
            holds, report = False, {"experiment": e.name, "error": str(why)}
        failed |= not holds
        reports.append(report)
    if args.json:
        print(as_json(reports))
    elif with_controls:
        minutes = sum(report.get("cpu_minutes_with_controls", 0.0) for report in reports)
        print(f"{minutes:.1f} CPU-minutes with all controls" + (
            f" (at smoke scale at most {SMOKE_MINUTES_OF_ALL})" if args.scale == "smoke" else ""))
    return int(failed or all("skipped" in report for report in reports))  # a check in which everything was skipped has not passed


def _checked(e: Experiment, args: argparse.Namespace, changes: Mapping[str, Any], with_controls: bool
             ) -> tuple[bool, dict[str, Any]]:
    """Return whether every claim of one experiment holds (and fails on its control), and the record of the experiment."""
    from richter.experiments import running
    from richter.experiments.ledger import compared, keep
    store = options.chosen_store(args)
    checked = running.check(e, args.scale, store, workers=args.workers, fresh=args.fresh, changes=changes)
    if with_controls:
        checked = running.with_controls(checked, store, workers=args.workers)
    summary, ledger = running.summarise(checked, store), "" if changes else compared(e, checked.record)
    if not args.json:
        print(f"{_shown(checked)}\n{ledger}".rstrip())
        print(f"{summary.folder}: {', '.join(f'{k}.svg' for k in e.figures) or 'no figure'}")
        print("".join(f"incomplete drawing: {fault}\n" for fault in summary.faults))
    if args.record:
        keep(checked.record)
    lacking = bool(summary.faults) and not changes  # other settings may leave a drawing empty, which is no fault
    return not (checked.failed or lacking), {**checked.record, "cpu_minutes_with_controls": checked.minutes, "ledger": ledger,
                                "faults_of_drawings": summary.faults}


def lacking(e: Experiment, scale: str) -> str:
    """Return the command that fetches the missing data of an experiment; empty if none is missing."""
    from richter.tasks import store
    cached = {entry.name for entry in store.available() if entry.cached}
    missing = [name for name in (*e.data, *(e.more_data if scale == "paper" else ())) if name not in cached]
    return f"it needs `richter data fetch {' '.join(missing)}`" if missing else ""


def _shown(c: Checked) -> str:
    """Table of the claims of an experiment and their controls."""
    from richter.experiments.ledger import number_of
    rows = [("claim", "paper", "ours", "bar", "verdict")]
    for f in c.findings:
        rows.append((f.claim.text, f.claim.paper, number_of(f.record), str(f.claim.expect),
                     f"no number with these settings ({f.unread})" if f.unread else
                     f"FAILED: {f.failure}" if f.failure else f.verdict))
        rows += [(f"  control: {a.control.text}", "", number_of(a.record), str(f.claim.expect), OUTCOMES[a.outcome])
                 for a in c.against if a.claim is f.claim and a.control]
    head = f"{c.experiment.name}  [{c.experiment.ref}]  {c.experiment.title}"
    tasks = f"{c.record['tasks']} task{'s' * (c.record['tasks'] != 1)}"
    cost = f"{c.scale} scale, {tasks}, {c.record['cpu_minutes']:.2f} CPU-minutes"
    if c.against:
        over = c.scale == "smoke" and c.minutes > SMOKE_MINUTES
        cost += f", with its controls {c.minutes:.2f}" + f": ABOVE the {SMOKE_MINUTES:g} that smoke may take" * over
    return f"{head}\n{cost}\n{table(rows, right=(2,))}"
