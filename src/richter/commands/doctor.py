"""Diagnose a run: whether it learned, whether it is lazy or rich, which layers learn, and what to change.

Of a folder of runs it prints one table, from lazy to rich.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from richter.commands import options
from richter.commands.frame import Command, as_json
from richter.core.values import visible


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", type=Path, help="a run, or a folder of runs")
    options.machine(p)


def do(args: argparse.Namespace) -> int:
    from richter.instrument.verdict import diagnose
    from richter.runs import Run
    from richter.runs.place import DATABASE
    if args.run.is_dir() and not (args.run / DATABASE).is_file():
        return _folder(args)
    verdict = diagnose(Run(args.run))
    print(as_json(verdict.to_json()) if args.json else visible(str(verdict)))
    return 0


def _folder(args: argparse.Namespace) -> int:
    """Print the runs of a folder from lazy to rich, then the verdicts without a magnitude in full."""
    from richter.commands.runs import table_of
    from richter.core import SelectionError
    runs = table_of(args.run).by("magnitude")
    if not runs.rows:
        raise SelectionError(f"{args.run} is neither a run nor a folder with runs. `richter runs` lists those of a folder.")
    if args.json:
        print(as_json([r.to_json() for r in runs.rows]))
        return 0
    print(runs.text(shutil.get_terminal_size((120, 40)).columns))
    for r in runs.rows:
        if r.sentence and not r.magnitude:
            print(visible(f"{r.run}: {r.sentence}", lines=False))
    return 0


COMMAND = Command("doctor", __doc__, do, arguments, group="look at runs", place=23,
                  examples=("richter doctor runs/demo", "richter doctor runs/demo/rich --json"))
