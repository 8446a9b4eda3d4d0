"""Diagnose a run: whether it learned, whether it is lazy or rich, which layers learn, and what to change."""

from __future__ import annotations

import argparse
from pathlib import Path

from richter.commands import options
from richter.commands.frame import Command, as_json
from richter.core.values import visible


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", type=Path)
    options.machine(p)


def do(args: argparse.Namespace) -> int:
    from richter.instrument.verdict import diagnose
    from richter.runs import Run
    verdict = diagnose(Run(args.run))
    print(as_json(verdict.to_json()) if args.json else visible(str(verdict)))
    return 0


COMMAND = Command("doctor", __doc__, do, arguments, group="look at runs", place=23,
                  examples=("richter doctor runs/demo", "richter doctor runs/demo --json"))
