"""Write the rows and scalars of a run as CSV or Parquet."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from richter.commands.frame import Command


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", type=Path)
    p.add_argument("-o", "--output", type=Path, required=True, help=".csv or .parquet")


def do(args: argparse.Namespace) -> int:
    from richter.core import StoreError
    from richter.runs import Run
    run, kind = Run(args.run), args.output.suffix
    if kind not in (".csv", ".parquet"):
        raise StoreError(f"{args.output}: the name must end in .csv or .parquet, which decides the format.")
    if not args.output.resolve().parent.is_dir():
        raise StoreError(f"the folder {args.output.parent} does not exist, so {args.output.name} cannot be written there.")
    (run.to_csv if kind == ".csv" else run.to_parquet)(args.output)
    print(f"{args.output}: {len(run.table):,} rows", file=sys.stderr)
    return 0


COMMAND = Command("export", __doc__, do, arguments, group="look at runs", place=25, examples=(
    "richter export runs/demo -o demo.csv", "richter export runs/demo -o demo.parquet"))
