"""Write the page that says what became of every figure and table, from the stored records."""

from __future__ import annotations

import argparse
from pathlib import Path

from richter.commands.frame import Command


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("-o", "--output", type=Path, help="the file (default: print)")


def do(given: argparse.Namespace) -> int:
    from richter import experiments
    from richter.experiments.ledger import page, records
    text = page([experiments.get(name) for name in experiments.names()], records())
    if given.output is None:
        print(text, end="")
    else:
        given.output.write_text(text, encoding="utf-8")
        print(given.output)
    return 0


COMMAND = Command("ledger", __doc__, do, arguments, group="reproduce papers", place=33,
                  examples=("richter ledger -o docs/claims.md",))
