"""Train one network on digits twice, lazily and richly; measure both, compare them, and write a report."""

from __future__ import annotations

import argparse
from pathlib import Path

from richter.commands.frame import Command


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--folder", type=Path, help="folder of the two runs (default: runs/demo, or runs/demo-2, ... if that exists)")
    p.add_argument("--steps", type=int, default=2000)
    p.add_argument("--seed", type=int, default=0)


def do(args: argparse.Namespace) -> int:
    from richter.core import SelectionError
    if args.steps < 2:
        raise SelectionError(f"--steps {args.steps}: a training needs at least 2 steps.")
    import torch

    from richter.runs import default_store
    from richter.workflows.demo import demo
    torch.set_num_threads(1)  # the matrices are small, so more threads would mostly wait for each other
    demo(args.folder or _free(default_store() / "demo"), args.steps, args.seed)
    return 0


def _free(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3, ... that does not exist."""
    candidate, i = path, 1
    while candidate.exists():
        i += 1
        candidate = path.with_name(f"{path.name}-{i}")
    return candidate


COMMAND = Command("demo", __doc__, do, arguments, group="start", place=10, examples=(
    "richter demo", "richter demo --steps 500 --folder runs/short"))
