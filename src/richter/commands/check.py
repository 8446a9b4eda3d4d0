"""Run experiments and compare every claim with its bar; exit 1 if one fails."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Iterable
from typing import TYPE_CHECKING

from richter.commands import checking, options
from richter.commands.frame import Command

if TYPE_CHECKING:
    from richter.experiments.frame import Experiment


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("pattern", nargs="?", default="*", help="names of experiments, e.g. 'nfa_*' (default: all)")
    checking.arguments(p)
    p.add_argument("--controls", action="store_true", help="also run the case on which each claim must fail")
    p.add_argument("--start", action="store_true", help="only test that each starts at the paper's scale: one step")
    p.add_argument("--queue", action="store_true", help="at the paper's scale: what is missing, stale or without controls, most "
                                                        "claims per minute first; the same command resumes")
    p.add_argument("--record", action="store_true", help="write the results into the ledger (for developers)")


def do(args: argparse.Namespace) -> int:
    from richter.core import unknown
    from richter.experiments import get, names
    chosen = fnmatch.filter(names(), args.pattern)
    if not chosen:
        raise unknown("Richter", "experiment", args.pattern, names())
    experiments = [get(name) for name in chosen]
    if args.start:
        return _start(experiments, args)
    if args.queue:
        return _queue(experiments, args)
    return checking.check_all(experiments, args, {}, lenient=True, with_controls=args.controls)


def _queue(experiments: Iterable[Experiment], args: argparse.Namespace) -> int:
    """Run what a record at the paper's scale lacks, with its controls, in the order of claims decided per minute."""
    from richter.core.values import table
    from richter.experiments.ledger import queue, records
    waiting = queue(experiments, records())
    if not waiting:
        print("Every record at the paper's scale is as the code is, with its controls.")
        return 0
    print(table([("experiment", "claims", "CPU-minutes", "why"),
                 *((w.experiment.name, str(w.claims), f"{w.minutes:.1f}", w.why[:60]) for w in waiting)]), flush=True)
    args.scale = "paper"
    return max(checking.check_all([w.experiment], args, {}, lenient=True, with_controls=True) for w in waiting)


def _start(experiments: Iterable[Experiment], args: argparse.Namespace) -> int:
    """Run one step of each experiment at the paper's scale."""
    from richter.core import RichterError
    from richter.experiments.running import start
    failed = False
    for e in experiments:
        if (missing := checking.lacking(e, "paper")):
            print(f"{e.name}: skipped, {missing}")
            continue
        try:
            start(e, options.chosen_store(args))
            print(f"{e.name}: starts at the paper's scale")
        except RichterError as why:
            failed = True
            print(f"{e.name}: does not start. {why}")
    return int(failed)


COMMAND = Command("check", __doc__, do, arguments, group="reproduce papers", place=32, examples=(
    "richter check", "richter check 'nfa_*' --controls",
    "richter check --start                 # one step of each at the paper's scale",
    "richter check --queue --record        # renew what is stale at the paper's scale, most claims per minute first"))
