"""Say whether a run is lazy or rich, which layers learn, and what to turn."""

from __future__ import annotations

import argparse
from pathlib import Path

from richter.commands import options
from richter.commands.frame import Command, as_json


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", type=Path)
    options.machine(p)


def do(given: argparse.Namespace) -> int:
    from richter.instrument.verdict import diagnose
    from richter.runs import Run
    verdict = diagnose(Run(given.run))
    if given.json:
        print(as_json({"verdict": verdict.verdict, "evidence": verdict.evidence, "advice": verdict.advice,
                       "layers": {v.layer: {"verdict": v.verdict, **v.evidence} for v in verdict.layers}}))
    else:
        print(verdict)
    return 0


COMMAND = Command("doctor", __doc__, do, arguments, group="look at runs", place=23,
                  examples=("richter doctor runs/demo", "richter doctor runs/demo --json"))
