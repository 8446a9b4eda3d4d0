"""List the runs of a folder in one table: settings that differ, loss, accuracy, magnitude and verdict."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from richter.commands import options
from richter.commands.frame import Command, as_json
from richter.core.values import progress, visible

if TYPE_CHECKING:
    from richter.report.sweep import SweepTable


def arguments(p: argparse.ArgumentParser) -> None:
    options.store(p)
    options.machine(p)
    p.add_argument("--sort", metavar="COLUMN", default="run", help="a column, another final value or setting (default: run)")
    p.add_argument("--reverse", action="store_true", help="largest first")
    p.add_argument("--plot", nargs=2, metavar=("VALUE", "SETTING"), help="draw a final value of all runs against a setting")
    p.add_argument("-o", "--output", type=Path, default=Path("sweep"), help="the plot, as NAME.svg and NAME.pdf (default: sweep)")


def do(args: argparse.Namespace) -> int:
    store = options.chosen_store(args)
    runs = table_of(store)
    if args.json:
        print(as_json([r.to_json() for r in runs.rows]))
    elif not runs.rows:
        print(f"no runs in {store} yet. Create runs with Observer(run='{store}/...') and by `richter demo`.")
    else:
        print(runs.by(args.sort, args.reverse).text(shutil.get_terminal_size((120, 40)).columns))
        for r in runs.rows:
            for failure in r.failures:
                print(visible(f"{r.run}: {failure}", lines=False))
    if args.plot:
        from richter.report.figures import save
        print(*save(runs.plot(*args.plot), args.output), sep="\n")
    return 0


def table_of(store: Path) -> SweepTable:
    """Return the table of all runs below a folder."""
    from richter.core import StoreError
    from richter.report import sweep
    from richter.runs.reader import paths
    if not store.is_dir():
        raise StoreError(f"there is no folder {store}. Create runs with Observer(run='{store}/...') or `richter demo`.")
    folders = {path.relative_to(store).as_posix() if path != store else path.name: path for path in paths(store, 3)}
    reading = progress(folders.items(), title="reading", unit="run")
    return sweep.SweepTable(tuple(sweep.read(name, path) for name, path in reading))


COMMAND = Command("runs", __doc__, do, arguments, group="look at runs", place=20, examples=(
    "richter runs", "richter runs runs/sweep --sort magnitude", "richter runs runs/sweep --plot magnitude lr -o magnitude",
    "richter runs runs/sweep --json"))
