"""Command-line arguments shared by several commands."""

from __future__ import annotations

import argparse
from pathlib import Path


def machine(parser: argparse.ArgumentParser) -> None:
    """Add the option --json."""
    parser.add_argument("--json", action="store_true", help="for machines")


def store(parser: argparse.ArgumentParser) -> None:
    """Add the argument for a folder of runs."""
    parser.add_argument("store", nargs="?", type=Path, help="a folder (default: RICHTER_RUNS, or runs)")


def chosen_store(args: argparse.Namespace) -> Path:
    """Return the store named by the user, or the default."""
    from richter.runs import default_store
    return args.store or default_store()
