"""Predict the learning curve of a kernel on a table: would more data help, another kernel, a larger ridge, or learned features?

The table is a .csv file with names of columns in its first line and numbers below; the target may be numbers or classes. Prints
predicted test errors beside measured ones by the number of examples, what is expected beyond the data, and a verdict."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from richter.commands import options
from richter.commands.frame import Command, as_json


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("table", type=Path, help="a .csv file with names of columns in the first line")
    p.add_argument("--target", required=True, help="the column to predict")
    p.add_argument("--drop", nargs="+", default=[], metavar="COLUMN", help="columns to leave out")
    p.add_argument("--kernel", choices=("laplace", "gaussian", "nngp", "ntk"), default="laplace",
                   help="the kernel, on standardised columns (default: laplace)")
    p.add_argument("--ridge", type=float, default=0.0, help="ridge, added to the Gram matrix (default: 0)")
    p.add_argument("--most", type=int, default=4000, help="use at most this many rows, drawn at random (default: 4000)")
    p.add_argument("--seed", type=int, default=0, help="which rows and subsamples are drawn (default: 0)")
    p.add_argument("--figures", type=Path, help="also save the figure as SVG and PDF in this folder")
    options.machine(p)


def do(args: argparse.Namespace) -> int:
    from richter.learners import NNGP, NTK, Gaussian, Laplace
    from richter.workflows import learning_curve
    kernel = {"laplace": Laplace(), "gaussian": Gaussian(), "nngp": NNGP(depth=2, bias_var=0.1),
              "ntk": NTK(depth=2, bias_var=0.1)}[args.kernel]
    X, y = _columns(args.table, args.target, args.drop, args.most, args.seed)
    curve = learning_curve(kernel, X, y, ridge=args.ridge, seed=args.seed)
    print(as_json(curve.to_json()) if args.json else curve)
    if args.figures:
        from richter.report.figures import save
        save(curve.plot(), args.figures / "curve")
    return 0


def _columns(path: Path, target: str, drop: list[str], most: int, seed: int) -> tuple[Any, Any]:
    """Return standardised inputs and the target of a table, of at most so many rows."""
    import numpy as np
    import pandas as pd

    from richter.core import DataError, SelectionError, unknown
    from richter.core.values import few_of
    if path.exists() and not path.is_file():  # opening a named pipe would wait for a writer
        raise DataError(f"{path} is not a regular file. Give a .csv file.")
    try:
        frame = pd.read_csv(path)
    except (OSError, UnicodeDecodeError, ValueError) as why:
        reason = getattr(why, "strerror", None) or why  # without the number of the error
        raise DataError(f"{path} cannot be read as a table: {reason}. Give a .csv file with names of columns in its first "
                        f"line.") from why
    for name in (target, *drop):
        if name not in frame.columns:
            raise unknown(f"the table {path.name}", "column", name, [str(c) for c in frame.columns])
    frame = frame.drop(columns=drop)
    missing = frame.columns[frame.isna().any()].tolist()
    if missing:
        rows = int(frame.isna().any(axis=1).sum())
        raise DataError(f"{path.name}: {rows} of {len(frame)} rows have no value (NaN or an empty cell) in {few_of(missing)}. A "
                        f"kernel compares all columns of two rows: fill the values in, leave the rows out, or leave the columns "
                        f"out with --drop.")
    inputs = frame.drop(columns=target)
    text = inputs.columns[[not pd.api.types.is_numeric_dtype(kind) for kind in inputs.dtypes]].tolist()
    if text:
        raise DataError(f"{path.name}: the columns {few_of(text)} hold words, between which no kernel knows a distance. Leave "
                        f"them out with --drop, or write one column of 0 and 1 for each value.")
    if inputs.shape[1] == 0:
        raise SelectionError(f"{path.name}: no column is left besides the target {target!r}: there is nothing to predict it "
                             f"from.")
    drawn = np.random.default_rng(seed).permutation(len(frame))[:most]
    X = inputs.to_numpy(np.float64)[drawn]
    varying = np.ptp(X, axis=0) > 0
    X, y = (X[:, varying] - X[:, varying].mean(0)) / X[:, varying].std(0), frame[target].to_numpy()[drawn]
    classes = not pd.api.types.is_float_dtype(y) and len(np.unique(y.astype(str))) <= max(20, len(y) // 50)
    return X, y if classes or y.dtype == object else y.astype(np.float64)


COMMAND = Command("curve", __doc__, do, arguments, group="look at runs", place=27, examples=(
    "richter curve houses.csv --target price", "richter curve iris.csv --target species --drop id --kernel nngp --ridge 0.1",
    "richter curve houses.csv --target price --figures pictures/ --json"))
