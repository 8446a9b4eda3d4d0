"""Run one experiment, at the small or at the paper's scale, and show its claims and figures."""

from __future__ import annotations

import argparse

from richter.commands import checking
from richter.commands.frame import Command


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("name")
    checking.arguments(p)
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting; may be repeated")
    p.add_argument("--record", action="store_true", help="write the result into the ledger (for developers)")


def do(args: argparse.Namespace) -> int:
    from richter.core import SelectionError
    from richter.experiments import get
    e = get(args.name)
    changes = e.parsed(args.set)
    if args.record and changes:
        raise SelectionError("the ledger holds results of the default settings only: leave out --set or --record.")
    return checking.check_all([e], args, changes, lenient=False)


COMMAND = Command("run", __doc__, do, arguments, group="reproduce papers", place=31, examples=(
    "richter run nfa_fig1", "richter run nfa_fig1 --scale paper --workers 2",
    "richter run nfa_fig1 --set steps=400 --set seeds=0,1"))
