"""List the runs of a store: status, last step, number of measurements and of measured layers."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from richter.commands import options
from richter.commands.frame import Command, as_json
from richter.core.values import table, visible


def arguments(p: argparse.ArgumentParser) -> None:
    options.store(p)
    options.machine(p)


def do(args: argparse.Namespace) -> int:
    from richter.core import StoreError
    from richter.runs.reader import paths
    store = options.chosen_store(args)
    if not store.is_dir():
        raise StoreError(f"there is no folder {store}. Create runs with Observer(run='{store}/...') or `richter demo`.")
    runs = [_about(path, path.relative_to(store).as_posix() if path != store else path.name) for path in paths(store, 3)]
    if args.json:
        print(as_json(runs))
    elif not runs:
        print(f"no runs in {store} yet. Create runs with Observer(run='{store}/...') and by `richter demo`.")
    else:
        rows = [[visible(cell, lines=False) for cell in _row(about)] for about in runs]
        print(table([("run", "status", "last step", "measured", "layers", "begun"), *rows], right=(2, 3, 4)))
        for about in runs:
            for failure in about.get("failures", []):
                print(visible(f"{about['run']}: {failure['text']}", lines=False))
    return 0


def _about(path: Path, name: str) -> dict[str, Any]:
    from richter.core import WHOLE, StoreError
    from richter.runs.reader import Run
    try:
        run = Run(path)
        about = {"run": name, "status": run.status, "last": run.last, "measured": len(run.steps),
                 "layers": len([k for k in run.layers if k != WHOLE]), "begun": run.sessions[0].begun,
                 "failures": [{**failure.to_json(), "text": str(failure)} for failure in run.failures]}
        run.close()
    except StoreError as why:
        return {"run": name, "status": f"unreadable: {why}"}
    return about


def _row(about: dict[str, Any]) -> tuple[str, ...]:
    if "begun" not in about:
        return (about["run"], "unreadable", "", "", "", "")
    return (about["run"], about["status"][:40], str(about["last"] if about["last"] is not None else ""), str(about["measured"]),
            str(about["layers"]), time.strftime("%Y-%m-%d %H:%M", time.localtime(about["begun"])))


COMMAND = Command("runs", __doc__, do, arguments, group="look at runs", place=20,
                  examples=("richter runs", "richter runs runs/sweep --json"))
