"""demo, runs, report, serve, doctor, export: making runs and looking at them."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from richter.commands import Commands, as_json, command
from richter.core.text import table
from richter.runs.reader import default_store


def add(commands: Commands) -> None:
    p = command(commands, "demo", "train a small network on digits, watch it, and say which layers learned", _demo,
                ["richter demo", "richter demo --scale 3          # large initial weights: lazier",
                 "richter demo --steps 2000 --run runs/short"])
    p.add_argument("--run", type=Path, help="folder of the run (default: runs/demo, or runs/demo-2, ... if that exists)")
    p.add_argument("--steps", type=int, default=10000)
    p.add_argument("--scale", type=float, default=0.5, help="of the initial weights: small is rich, large is lazy")
    p.add_argument("--seed", type=int, default=0)
    p = command(commands, "runs", "list the runs of a store", _runs, ["richter runs", "richter runs runs/sweep --json"])
    p.add_argument("store", nargs="?", type=Path, default=default_store(), help="a folder (default: RICHTER_RUNS, or runs)")
    p.add_argument("--json", action="store_true", help="for machines")
    p = command(commands, "report", "write one HTML file about one or more runs", _report,
                ["richter report runs/demo", "richter report runs/a runs/b -o compare.html --figures figures/"])
    p.add_argument("run", nargs="+", type=Path)
    p.add_argument("-o", "--output", type=Path, help="the file (default: report.html in the folder of the run)")
    p.add_argument("--figures", type=Path, help="also save every figure as SVG and PDF in this folder")
    p = command(commands, "serve", "a live dashboard of a store, on this machine", _serve,
                ["richter serve", "richter serve runs --port 9000", "richter serve --host 0.0.0.0 --token SECRET"])
    p.add_argument("store", nargs="?", type=Path, default=default_store(), help="a folder (default: RICHTER_RUNS, or runs)")
    p.add_argument("--host", default="127.0.0.1", help="another address than this machine's own needs a token")
    p.add_argument("--port", type=int, default=8642, help="0: any free one")
    p.add_argument("--token", help="who may look (default: a new one, if needed)")
    p.add_argument("--open", action="store_true", help="open a browser")
    p = command(commands, "doctor", "say whether a run is lazy or rich, which layers learn, and what to turn", _doctor,
                ["richter doctor runs/demo", "richter doctor runs/demo --json"])
    p.add_argument("run", type=Path)
    p.add_argument("--json", action="store_true", help="for machines")
    p = command(commands, "export", "write the rows and scalars of a run as a table", _export,
                ["richter export runs/demo -o demo.csv", "richter export runs/demo -o demo.parquet"])
    p.add_argument("run", type=Path)
    p.add_argument("-o", "--output", type=Path, required=True, help=".csv or .parquet")


def _demo(given: argparse.Namespace) -> int:
    from richter.core import SelectionError
    if given.steps < 2 or given.scale <= 0:
        raise SelectionError("--steps must be at least 2 and --scale positive.")
    import torch

    from richter.workflows.demo import demo
    torch.set_num_threads(1)  # the matrices are small: more threads would mostly wait for each other
    demo(given.run or _free(default_store() / "demo"), given.steps, given.scale, given.seed)
    return 0


def _free(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... where nothing is."""
    found, i = path, 1
    while found.exists():
        i += 1
        found = path.with_name(f"{path.name}-{i}")
    return found


def _runs(given: argparse.Namespace) -> int:
    from richter.core import WHOLE, StoreError
    from richter.runs.reader import Run, paths
    store, rows, found = given.store, [("run", "status", "last step", "measured", "layers", "begun")], []
    if not store.is_dir():
        raise StoreError(f"there is no folder {store}. Runs are made by Observer(run='{store}/...') and by `richter demo`.")
    for path in paths(store, 3):
        name = path.relative_to(store).as_posix() if path != store else path.name
        try:
            run = Run(path)
            begun = run.sessions[0].begun
            found.append({"run": name, "status": run.status, "last": run.last, "measured": len(run.steps),
                          "layers": len([k for k in run.layers if k != WHOLE]), "begun": begun})
            run.close()
        except StoreError as why:
            found.append({"run": name, "status": f"unreadable: {why}"})
            rows.append((name, "unreadable", "", "", "", ""))
            continue
        last = found[-1]
        rows.append((name, str(last["status"])[:40], str(last["last"] if last["last"] is not None else ""), str(last["measured"]),
                     str(last["layers"]), time.strftime("%Y-%m-%d %H:%M", time.localtime(begun))))
    if given.json:
        print(as_json(found))
    elif not found:
        print(f"no runs in {store} yet. Runs are made by Observer(run='{store}/...') and by `richter demo`.")
    else:
        print(table(rows, right=(2, 3, 4)))
    return 0


def _report(given: argparse.Namespace) -> int:
    from richter.report.html import report
    from richter.runs import Run
    runs = [Run(path) for path in given.run]
    path = report(runs, given.output or given.run[0] / "report.html", figures=given.figures)
    print(path)
    return 0


def _serve(given: argparse.Namespace) -> int:
    from richter.report.server import serve
    serve(given.store, host=given.host, port=given.port, token=given.token, open_browser=given.open)
    return 0


def _doctor(given: argparse.Namespace) -> int:
    from richter.instrument.verdict import diagnose
    from richter.runs import Run
    found = diagnose(Run(given.run))
    if given.json:
        print(as_json({"verdict": found.verdict, "evidence": found.evidence, "advice": found.advice,
                       "layers": {v.layer: {"verdict": v.verdict, **v.evidence} for v in found.layers}}))
    else:
        print(found)
    return 0


def _export(given: argparse.Namespace) -> int:
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
