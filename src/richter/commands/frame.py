"""The class ``Command``, and the parser that is built from all commands."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from richter import __version__
from richter.commands import CATALOGUE


@dataclass(frozen=True)
class Command:
    """One command of the command line.

    ``text`` describes it, usually with the docstring of its file. Its first line, one sentence, is shown in the table of
    contents, and all of it in the command's own help. ``arguments(parser)`` adds the arguments. ``do(args)`` runs the command
    with the parsed arguments and returns the exit code. A command with ``parts`` is a family: `richter data fetch`. The table of
    contents is sorted by ``group`` and ``place``, smallest first.
    """

    name: str
    text: str | None
    do: Callable[[argparse.Namespace], int] | None = None
    arguments: Callable[[argparse.ArgumentParser], None] | None = None
    examples: tuple[str, ...] = ()
    group: str = ""
    place: int = 100
    parts: tuple[Command, ...] = ()

    @property
    def summary(self) -> str:
        """Return the first sentence as shown in a list: "fetch, list and locate the data sets"."""
        first = (self.text or "").strip().partition("\n")[0].removesuffix(".")
        return first[:1].lower() + first[1:]


def parser(listed: bool = False) -> argparse.ArgumentParser:
    """Build the parser of the whole command line. ``listed``: argparse lists the commands too, as shell completion needs."""
    commands = sorted(CATALOGUE.all().values(), key=lambda c: (not c.group, c.place))
    top = argparse.ArgumentParser(prog="richter", usage="richter COMMAND ...", epilog=contents(commands),
                                  description="Richter measures how rich training is.",
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--version", action="version", version=f"richter {__version__}")
    below = top.add_subparsers(prog="richter", dest="command", required=True, metavar="COMMAND",
                               help=None if listed else argparse.SUPPRESS)
    for command in commands:
        _add(below, command)
    return top


def contents(commands: Iterable[Command]) -> str:
    """Return the table of contents: each command with its summary, by groups."""
    groups: dict[str, list[str]] = {}
    for c in commands:
        groups.setdefault(c.group, []).append(f"  {c.name:<10}  {c.summary}")
    blocks = ["\n".join([*([group] if group else []), *lines]) for group, lines in groups.items()]
    return "\n\n".join([*blocks, "`richter COMMAND --help` shows the options and examples of each."])


def _add(below: Any, command: Command) -> None:  # the return type of add_subparsers is private to argparse
    """Add the parser of a command with its examples, and the parsers of its parts."""
    examples = "\n".join(["examples:", *(f"  {line}" for line in command.examples)])
    own: argparse.ArgumentParser = below.add_parser(
        command.name, help=command.summary, description=command.text, epilog=examples if command.examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    own.set_defaults(do=command.do)
    if command.arguments:
        command.arguments(own)
    if command.parts:
        inside = own.add_subparsers(dest="what", required=True, metavar="|".join(part.name for part in command.parts))
        for part in command.parts:
            _add(inside, part)


def as_json(value: Any) -> str:
    """Encode as JSON, with null for NaN and infinities."""
    return json.dumps(_finite(value), indent=1)


def _finite(v: Any) -> Any:
    """Replace NaN and infinities by None, also inside lists and dicts, because JSON has none."""
    if isinstance(v, dict):
        return {k: _finite(w) for k, w in v.items()}
    if isinstance(v, (list, tuple)):
        return [_finite(w) for w in v]
    return None if isinstance(v, float) and (v != v or v in (float("inf"), float("-inf"))) else v
