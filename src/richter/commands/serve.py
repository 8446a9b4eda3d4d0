"""Serve a live dashboard of a store from this machine."""

from __future__ import annotations

import argparse

from richter.commands import options
from richter.commands.frame import Command


def arguments(p: argparse.ArgumentParser) -> None:
    options.store(p)
    p.add_argument("--host", default="127.0.0.1", help="address to listen at; any other than this machine's own needs a token")
    p.add_argument("--port", type=int, default=8642, help="port (0: any free one)")
    p.add_argument("--token", help="access token (default: a new one, if needed)")
    p.add_argument("--open", action="store_true", help="open a browser")


def do(args: argparse.Namespace) -> int:
    from richter.core import StoreError
    from richter.report.server import serve
    if args.store is not None and not args.store.exists():
        raise StoreError(f"there is no folder {args.store}. Name the folder of your runs, or none for the default folder, which "
                         f"may be created later.")
    serve(options.chosen_store(args), host=args.host, port=args.port, token=args.token, open_browser=args.open)
    return 0


COMMAND = Command("serve", __doc__, do, arguments, group="look at runs", place=22, examples=(
    "richter serve", "richter serve runs --port 9000",
    "richter serve --host 0.0.0.0    # for other machines, with a new token, which is printed"))
