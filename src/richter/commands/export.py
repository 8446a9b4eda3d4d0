"""Write the rows and scalars of a run as CSV or Parquet, or as CSV to standard output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from richter.commands.frame import Command


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", type=Path)
    p.add_argument("-o", "--output", default="-",
                   help="a name that ends in .csv or .parquet (default: -, standard output, as CSV)")


def do(args: argparse.Namespace) -> int:
    from richter.core import StoreError
    from richter.runs import Run
    run, output = Run(args.run), Path(args.output)
    if args.output == "-":
        run.to_csv(sys.stdout)
        return 0
    if output.suffix not in (".csv", ".parquet"):
        raise StoreError(f"{output}: the name must end in .csv or .parquet, which decides the format, or be - for standard "
                         f"output.")
    if not output.resolve().parent.is_dir():
        raise StoreError(f"the folder {output.parent} does not exist, so {output.name} cannot be written there.")
    (run.to_csv if output.suffix == ".csv" else run.to_parquet)(output)
    print(f"{output}: {len(run.table):,} rows", file=sys.stderr)
    return 0


COMMAND = Command("export", __doc__, do, arguments, group="look at runs", place=25, examples=(
    "richter export runs/demo/rich -o rich.csv", "richter export runs/demo/rich -o -",
    "richter export runs/demo/rich -o rich.parquet"))
