"""Write one HTML file with the verdict, curves, matrices and settings of one or more runs.

A folder of runs stands for all of them, and its report lies in the folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from richter.commands.frame import Command
from richter.core.values import visible

MOST = 12  # runs in the report of a folder


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", nargs="+", type=Path, help="runs, or folders of runs")
    p.add_argument("-o", "--output", type=Path, help="the file (default: report.html in the first folder)")
    p.add_argument("--figures", type=Path, help="also save every figure as SVG and PDF in this folder")


def do(args: argparse.Namespace) -> int:
    from richter.report.html import report
    from richter.runs import Run
    runs = [Run(path) for given in args.run for path in _runs(given)]
    print(visible(str(report(runs, args.output or args.run[0] / "report.html", figures=args.figures))))
    return 0


def _runs(folder: Path) -> list[Path]:
    """Return a run, or all runs in a folder."""
    from richter.core import SelectionError
    from richter.runs.place import DATABASE
    from richter.runs.reader import paths
    if (folder / DATABASE).is_file() or not folder.is_dir():
        return [folder]
    inside = list(paths(folder, 3))
    if not inside:
        raise SelectionError(f"{folder} is neither a run nor a folder with runs. `richter runs` lists those of a folder.")
    if len(inside) > MOST:
        raise SelectionError(f"{folder} has {len(inside)} runs, and a report of more than {MOST} shows none of them well. Name "
                             f"some of them, or compare all in a table: richter doctor {folder}.")
    return inside


COMMAND = Command("report", __doc__, do, arguments, group="look at runs", place=21, examples=(
    "richter report runs/demo/rich", "richter report runs/demo", "richter report runs/a runs/b -o both.html --figures figures/"))
