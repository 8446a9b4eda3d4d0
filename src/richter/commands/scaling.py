"""Fit and extrapolate a loss against time, data, parameters or compute: power laws and the multilinear model of skills.

Of a file .csv with a column of what grows, a column of losses and perhaps one of their standard errors; or of a curve that a run
logged, against its steps. Says which law fits best, which others the data cannot tell from it, and the loss further on."""

from __future__ import annotations

import argparse
from pathlib import Path

from richter.commands import options
from richter.commands.frame import Command, as_json


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("source", type=Path, help="a file .csv, or a run")
    p.add_argument("--resource", choices=("time", "data", "parameters", "compute"), default="time",
                   help="what grows (default: time)")
    p.add_argument("--name", default="loss", help="of a run: which of its curves (default: loss)")
    p.add_argument("--start", type=float, default=0.0, help="leave out what is below: laws hold late")
    p.add_argument("--at", type=float, nargs="+", metavar="X", help="where to say the loss (default: 10 and 100 times the last)")
    p.add_argument("--initial", type=float, default=1e-3,
                   help="of the multilinear model in time: a skill's strength at the start over that at the end (default: 0.001)")
    p.add_argument("--figures", type=Path, help="also save the picture as SVG and PDF in this folder")
    options.machine(p)


def do(given: argparse.Namespace) -> int:
    from richter.workflows import scaling
    x, loss, errors = _of_run(given.source, given.name) if given.source.is_dir() else _of_file(given.source)
    seen = scaling(x, loss, errors=errors, resource=given.resource, start=given.start, at=given.at, initial=given.initial)
    print(as_json(seen.to_json()) if given.json else seen)
    if given.figures:
        from richter.report.figures import save
        save(seen.plot(), given.figures / "scaling")
    return 0


def _of_run(path: Path, name: str) -> tuple[list[float], list[float], None]:
    import math

    from richter.core import unknown
    from richter.runs import Run
    run = Run(path)
    if name not in run.names:
        raise unknown(f"the run {run.name}", "curve", name, run.names)
    series = run.scalar(name)
    known = [(float(s), float(v)) for s, v in zip(series.step, series.value, strict=True) if s > 0 and math.isfinite(v)]
    return [s for s, _ in known], [v for _, v in known], None


def _of_file(path: Path) -> tuple[list[float], list[float], list[float] | None]:
    import csv

    from richter.core import DataError
    if path.exists() and not path.is_file():  # to open a named pipe waits for somebody who writes to it
        raise DataError(f"{path} is no regular file. A file .csv, or a run, is needed; what a pipe gives is read from a file: "
                        f"command > table.csv.")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if any(cell.strip() for cell in line)]
    except (OSError, UnicodeDecodeError, csv.Error) as why:
        raise DataError(f"{path} cannot be read as a table: {why}. A file .csv, or a run, is needed.") from why
    rows = []
    for i, line in enumerate(lines):
        try:
            rows.append([float(cell) for cell in line])
        except ValueError as why:
            if i or any(map(_is_number, line)):  # the first may be the names of the columns
                raise DataError(f"{path}, line {i + 1}: {','.join(line)[:60]!r} are no numbers with commas between. Each line "
                                f"has what grows, a loss, and perhaps its standard error.") from why
    if not rows or len({len(row) for row in rows}) > 1 or len(rows[0]) not in (2, 3):
        raise DataError(f"{path} has {len(rows)} lines of numbers with {sorted({len(row) for row in rows})} columns: two of them "
                        f"are needed in every line, what grows and the loss, and perhaps its standard error; no others.")
    rows.sort(key=lambda row: row[0])
    columns = [list(column) for column in zip(*rows, strict=True)]
    return columns[0], columns[1], columns[2] if len(columns) > 2 else None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


COMMAND = Command("scaling", __doc__, do, arguments, group="look at runs", place=26, examples=(
    "richter scaling sizes.csv --resource data --at 1e6 1e7", "richter scaling runs/demo --name loss --start 100",
    "richter scaling flops.csv --resource compute --figures pictures/ --json"))
