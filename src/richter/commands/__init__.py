"""The commands, by what they are about. Each module adds its parsers and imports what is heavy when it is called."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

Commands = Any  # argparse's own type for what add_subparsers returns is private


def command(commands: Commands, name: str, help: str, do: Callable[[argparse.Namespace], int],
            examples: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with examples."""
    text = "examples:\n" + "\n".join(f"  {line}" for line in examples)
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=f"{help[0].upper()}{help[1:]}.", epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(do=do)
    return parser


def as_json(found: Any) -> str:
    """For machines: NaN and infinities become null."""
    return json.dumps(_finite(found), indent=1)


def _finite(v: Any) -> Any:
    if isinstance(v, dict):
        return {k: _finite(w) for k, w in v.items()}
    if isinstance(v, (list, tuple)):
        return [_finite(w) for w in v]
    return None if isinstance(v, float) and (v != v or v in (float("inf"), float("-inf"))) else v
