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
    p.add_argument("--start", action="store_true", help="only see that the paper's scale of each starts: one step")
    p.add_argument("--record", action="store_true", help="keep the results in the ledger (for developers)")


def do(given: argparse.Namespace) -> int:
    from richter.core import unknown
    from richter.experiments import get, names
    chosen = fnmatch.filter(names(), given.pattern)
    if not chosen:
        raise unknown("Richter", "experiment", given.pattern, names())
    experiments = [get(name) for name in chosen]
    if given.start:
        return _start(experiments, given)
    return checking.check_all(experiments, given, {}, lenient=True, with_controls=given.controls)


def _start(experiments: Iterable[Experiment], given: argparse.Namespace) -> int:
    """One step of each at the paper's scale."""
    from richter.core import RichterError
    from richter.experiments.running import start
    failed = False
    for e in experiments:
        if (missing := checking.lacking(e, "paper")):
            print(f"{e.name}: skipped, {missing}")
            continue
        try:
            start(e, options.chosen_store(given))
            print(f"{e.name}: starts at the paper's scale")
        except RichterError as why:
            failed = True
            print(f"{e.name}: does not start. {why}")
    return int(failed)


COMMAND = Command("check", __doc__, do, arguments, group="reproduce papers", place=32, examples=(
    "richter check", "richter check 'nfa_*' --controls",
    "richter check --start                 # one step of each at the paper's scale"))
