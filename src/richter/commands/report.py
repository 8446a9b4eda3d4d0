"""Write one HTML file with the verdict, curves, matrices and settings of one or more runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from richter.commands.frame import Command
from richter.core.values import visible


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", nargs="+", type=Path)
    p.add_argument("-o", "--output", type=Path, help="the file (default: report.html in the folder of the run)")
    p.add_argument("--figures", type=Path, help="also save every figure as SVG and PDF in this folder")


def do(args: argparse.Namespace) -> int:
    from richter.report.html import report
    from richter.runs import Run
    runs = [Run(path) for path in args.run]
    print(visible(str(report(runs, args.output or args.run[0] / "report.html", figures=args.figures))))
    return 0


COMMAND = Command("report", __doc__, do, arguments, group="look at runs", place=21, examples=(
    "richter report runs/demo", "richter report runs/a runs/b -o compare.html --figures figures/"))
