"""Train a small network on digits, measure it, print which layers learned, and write a report."""

from __future__ import annotations

import argparse
from pathlib import Path

from richter.commands.frame import Command


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--run", type=Path, help="folder of the run (default: runs/demo, or runs/demo-2, ... if that exists)")
    p.add_argument("--steps", type=int, default=10000)
    p.add_argument("--scale", type=float, default=0.5, help="scale of the initial weights: small is rich, large is lazy")
    p.add_argument("--seed", type=int, default=0)


def do(args: argparse.Namespace) -> int:
    from richter.core import SelectionError
    if args.steps < 2 or args.scale <= 0:
        raise SelectionError("--steps must be at least 2 and --scale positive.")
    import torch

    from richter.runs import default_store
    from richter.workflows.demo import demo
    torch.set_num_threads(1)  # the matrices are small, so more threads would mostly wait for each other
    demo(args.run or _free(default_store() / "demo"), args.steps, args.scale, args.seed)
    return 0


def _free(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3, ... that does not exist."""
    candidate, i = path, 1
    while candidate.exists():
        i += 1
        candidate = path.with_name(f"{path.name}-{i}")
    return candidate


COMMAND = Command("demo", __doc__, do, arguments, group="start", place=10, examples=(
    "richter demo", "richter demo --scale 3          # large initial weights: lazier",
    "richter demo --steps 2000 --run runs/short"))
