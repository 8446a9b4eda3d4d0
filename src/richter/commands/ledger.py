"""Write the ledger: one page with the verdict of every figure, table and theorem, from the stored records."""

from __future__ import annotations

import argparse
from pathlib import Path

from richter.commands import options
from richter.commands.frame import Command


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("-o", "--output", type=Path, help="the file (default: print)")
    p.add_argument("--html", action="store_true", help="one page with verdicts, numbers, and the figures of your own runs")
    p.add_argument("--store", type=Path, help="folder of these runs (default: RICHTER_RUNS, or runs)")


def do(args: argparse.Namespace) -> int:
    from richter import experiments
    from richter.experiments.ledger import records
    everything = [experiments.get(name) for name in experiments.names()]
    if args.html:
        from richter.experiments.html import html
        text = html(everything, records(), options.chosen_store(args))
    else:
        from richter.experiments.page import page
        text = page(everything, records())
    if args.output is None:
        print(text, end="")
    else:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text, encoding="utf-8")
        print(args.output)
    return 0


COMMAND = Command("ledger", __doc__, do, arguments, group="reproduce papers", place=33,
                  examples=("richter ledger -o docs/claims.md", "richter ledger --html -o claims.html"))
