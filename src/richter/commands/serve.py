"""Serve a live dashboard of a store, on this machine."""

from __future__ import annotations

import argparse

from richter.commands import options
from richter.commands.frame import Command


def arguments(p: argparse.ArgumentParser) -> None:
    options.store(p)
    p.add_argument("--host", default="127.0.0.1", help="another address than this machine's own needs a token")
    p.add_argument("--port", type=int, default=8642, help="0: any free one")
    p.add_argument("--token", help="who may look (default: a new one, if needed)")
    p.add_argument("--open", action="store_true", help="open a browser")


def do(given: argparse.Namespace) -> int:
    from richter.core import StoreError
    from richter.report.server import serve
    if given.store is not None and not given.store.exists():
        raise StoreError(f"there is no folder {given.store}. Name the folder in which runs are, or none for the default, which "
                         f"may be made later.")
    serve(options.chosen_store(given), host=given.host, port=given.port, token=given.token, open_browser=given.open)
    return 0


COMMAND = Command("serve", __doc__, do, arguments, group="look at runs", place=22, examples=(
    "richter serve", "richter serve runs --port 9000",
    "richter serve --host 0.0.0.0    # for other machines, with a token that is made and printed"))
