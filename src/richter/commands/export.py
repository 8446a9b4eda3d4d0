"""Write the rows and scalars of a run as CSV or Parquet."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from richter.commands.frame import Command


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", type=Path)
    p.add_argument("-o", "--output", type=Path, required=True, help=".csv or .parquet")


def do(given: argparse.Namespace) -> int:
    from richter.core import StoreError
    from richter.runs import Run
    run, kind = Run(given.run), given.output.suffix
    if kind not in (".csv", ".parquet"):
        raise StoreError(f"{given.output}: the name must end in .csv or .parquet, which says how it is written.")
    if not given.output.resolve().parent.is_dir():
        raise StoreError(f"the folder {given.output.parent} does not exist; {given.output.name} cannot be written there.")
    (run.to_csv if kind == ".csv" else run.to_parquet)(given.output)
    print(f"{given.output}: {len(run.table):,} rows", file=sys.stderr)
    return 0


COMMAND = Command("export", __doc__, do, arguments, group="look at runs", place=25, examples=(
    "richter export runs/demo -o demo.csv", "richter export runs/demo -o demo.parquet"))
