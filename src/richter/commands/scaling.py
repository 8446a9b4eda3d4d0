"""Fit and extrapolate a loss against time, data, parameters or compute: power laws and the multilinear model of skills.

The source is a .csv file (a column of x, a column of losses, and optionally their standard errors, or learning rates if the third
column is called lr) or a curve logged by a run, against its steps. Prints which law fits best, which others the data cannot tell
from it, and the extrapolated loss. A training curve (time) is extrapolated by its trend, up to ten times the last step."""

from __future__ import annotations

import argparse
from pathlib import Path

from richter.commands import options
from richter.commands.frame import Command, as_json


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("source", type=Path, help="a .csv file, or a run")
    p.add_argument("--resource", choices=("time", "data", "parameters", "compute"), default="time",
                   help="the resource on the x axis (default: time)")
    p.add_argument("--name", default="loss", help="runs only: the curve to fit (default: loss)")
    p.add_argument("--start", type=float, default=0.0, help="leave out smaller x, because laws hold late")
    p.add_argument("--at", type=float, nargs="+", metavar="X",
                   help="x of predicted losses (default: 10 and 100 times the last; of time 2 and 10 times)")
    p.add_argument("--initial", type=float, default=1e-3,
                   help="multilinear model in time: initial strength of a skill over its final strength (default: 0.001)")
    p.add_argument("--figures", type=Path, help="also save the figure as SVG and PDF in this folder")
    options.machine(p)


def do(args: argparse.Namespace) -> int:
    from richter.workflows import scaling
    x, loss, errors, rates = _of_run(args.source, args.name) if args.source.is_dir() else _of_file(args.source)
    seen = scaling(x, loss, errors=errors, rates=rates, resource=args.resource, start=args.start, at=args.at,
                   initial=args.initial)
    print(as_json(seen.to_json()) if args.json else seen)
    if args.figures:
        from richter.report.figures import save
        save(seen.plot(), args.figures / "scaling")
    return 0


Columns = tuple[list[float], list[float], list[float] | None, list[float] | None]  # x, losses, their errors, learning rates
RATES = ("lr", "learning_rate", "learning rate")  # names of a curve or column of learning rates


def _of_run(path: Path, name: str) -> Columns:
    """Columns of a logged curve of a run, against its steps."""
    import math

    import numpy as np

    from richter.core import unknown
    from richter.runs import Run
    run = Run(path)
    if name not in run.scalar_names:
        raise unknown(f"the run {run.name}", "curve", name, run.scalar_names)
    series = run.scalars(name)
    known = [(float(s), float(v)) for s, v in zip(series.step, series.value, strict=True) if s > 0 and math.isfinite(v)]
    steps, rates = [s for s, _ in known], None
    if (rate := next((key for key in run.scalar_names if key.lower() in RATES), None)) is not None:
        logged = run.scalars(rate)
        finite = np.isfinite(logged.value)
        rates = np.interp(steps, logged.step[finite], logged.value[finite]).tolist() if finite.any() else None
    return steps, [v for _, v in known], None, rates


def _of_file(path: Path) -> Columns:
    """Columns of a .csv file."""
    import csv

    from richter.core import DataError
    if path.exists() and not path.is_file():  # opening a named pipe would wait for a writer
        raise DataError(f"{path} is not a regular file. Give a .csv file or a run. Save the output of a pipe first: "
                        f"command > table.csv.")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if any(cell.strip() for cell in line)]
    except (OSError, UnicodeDecodeError, csv.Error) as why:
        reason = getattr(why, "strerror", None) or why  # without the number of the error
        raise DataError(f"{path} cannot be read as a table: {reason}. Give a .csv file or a run.") from why
    rows = []
    for i, line in enumerate(lines):
        try:
            rows.append([float(cell) for cell in line])
        except ValueError as why:
            if i or any(map(_is_number, line)):  # the first line may hold the names of the columns
                raise DataError(f"{path}, line {i + 1}: {','.join(line)[:60]!r} is not a list of numbers with commas between. "
                                f"Each line has x, a loss, and optionally its standard error.") from why
    if not rows or len({len(row) for row in rows}) > 1 or len(rows[0]) not in (2, 3):
        raise DataError(f"{path} has {len(rows)} lines of numbers with {sorted({len(row) for row in rows})} columns. Every line "
                        f"needs two columns, x and the loss, and may have a third, its standard error.")
    rows.sort(key=lambda row: row[0])
    x, loss, *others = [list(column) for column in zip(*rows, strict=True)]
    third = others[0] if others else None
    return (x, loss, None, third) if lines[0][-1].strip().lower() in RATES else (x, loss, third, None)


def _is_number(cell: str) -> bool:
    """Return whether a cell is a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


COMMAND = Command("scaling", __doc__, do, arguments, group="look at runs", place=26, examples=(
    "richter scaling sizes.csv --resource data --at 1e6 1e7", "richter scaling runs/demo/rich --name loss --start 100",
    "richter scaling flops.csv --resource compute --figures pictures/ --json"))
