"""Write the ledger: outcome and protocol of every claim of the papers, one line each, from the stored records."""

from __future__ import annotations

import argparse
from pathlib import Path

from richter.commands import options
from richter.commands.frame import Command, as_json


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--paper", default="", help="only this paper, e.g. nfa")
    p.add_argument("-o", "--output", type=Path, help="the file, or the folder of the pages (default: print, or ledger/)")
    form = p.add_mutually_exclusive_group()
    form.add_argument("--html", action="store_true", help="pages with the figures of your own runs; the first is index.html")
    form.add_argument("--json", action="store_true", help="one document, described by ledger.schema.json")
    p.add_argument("--store", type=Path, help="folder of these runs (default: RICHTER_RUNS, or runs)")


def do(args: argparse.Namespace) -> int:
    from richter import experiments
    from richter.experiments.ledger import records
    everything = [experiments.get(name) for name in experiments.names()]
    if args.html:
        from richter.experiments.html import html
        folder = args.output or Path("ledger")
        for name, text in html(everything, records(), options.chosen_store(args), args.paper).items():
            _write(folder / name, text)
        print(folder / "index.html")
        return 0
    if args.json:
        from richter.experiments.export import ledger
        text = as_json(ledger(everything, records(), args.paper)) + "\n"
    else:
        from richter.experiments.page import page
        text = page(everything, records(), args.paper)
    if args.output is None:
        print(text, end="")
    else:
        _write(args.output, text)
        print(args.output)
    return 0


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


COMMAND = Command("ledger", __doc__, do, arguments, group="reproduce papers", place=33, examples=(
    "richter ledger -o docs/claims.md", "richter ledger --paper nfa", "richter ledger --html -o ledger",
    "richter ledger --json -o ledger.json"))
