"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="richter", description="Measure how rich training is.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train a small network on digits, watch it, and say which layers learned")
    demo.add_argument("--picture", type=Path, default=Path("richter-demo.png"), help="where the curves are drawn")
    demo.add_argument("--steps", type=int, default=10000)
    demo.add_argument("--scale", type=float, default=0.5, help="of the initial weights: small is rich, large is lazy")
    demo.add_argument("--seed", type=int, default=0)
    commands.add_parser("list", help="the measures, what they say, and where they come from")
    given = parser.parse_args(arguments)
    try:
        return _demo(given) if given.command == "demo" else _list()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _demo(given: argparse.Namespace) -> int:
    if given.steps < 2 or given.scale <= 0:
        print("richter demo: --steps must be at least 2 and --scale positive.", file=sys.stderr)
        return 2
    if not given.picture.parent.is_dir():
        print(f"richter demo: the folder {given.picture.parent} does not exist; --picture cannot be written there.",
              file=sys.stderr)
        return 2
    import torch

    from richter.workflows.demo import demo
    torch.set_num_threads(1)  # the matrices are small: more threads would mostly wait for each other
    demo(given.picture, given.steps, given.scale, given.seed)
    return 0


def _list() -> int:
    from richter.measures import DEFAULT, catalogue
    for name, m in catalogue().items():
        mark = "*" if name in DEFAULT else " "
        said = (m.compute.__doc__ or "").split("  [")[0].split("\n")[0]
        print(f"{mark} {name:22} {m.ref!s:22} {said}")
    print("\n* measured by default")
    return 0


if __name__ == "__main__":
    sys.exit(main())
