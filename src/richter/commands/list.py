"""List experiments with their verdicts and their cost at each scale, and measures and theories with their references."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from richter.commands import options
from richter.commands.frame import Command, as_json
from richter.core.values import table

KINDS = ("experiments", "measures", "theories")
SCALES = ("smoke", "paper")


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("what", nargs="?", choices=KINDS, help="only these")
    options.machine(p)


def do(args: argparse.Namespace) -> int:
    """Print a list, read from the text of the files and the stored records without importing them."""
    wanted = [args.what] if args.what else KINDS
    rows = {kind: _LISTS[kind]() if kind in wanted else [] for kind in KINDS}
    if args.json:
        print(as_json(rows))
    else:
        print("\n\n".join(_TABLES[kind](rows[kind]) for kind in wanted))
    return 0


def _experiments() -> list[dict[str, Any]]:
    """Facts about all experiments, with verdicts and costs from their records."""
    from richter.experiments import CATALOGUE
    from richter.experiments.ledger import records, verdict_of
    kept = records()
    return [{"name": name, "ref": str(e["ref"]), "title": e["title"],
             "verdict": {scale: verdict_of(kept.get((name, scale))) for scale in SCALES},
             "data": e.get("data", ()), "more_data": e.get("more_data", ()),
             "cost": {scale: {k: kept[name, scale][k] for k in ("cpu_minutes", "memory")}
                      for scale in SCALES if (name, scale) in kept}} for name, e in CATALOGUE.facts().items()]


def _measures() -> list[dict[str, Any]]:
    """Facts about all measures."""
    from richter.measures import DEFAULT, facts
    return [{"name": name, "ref": str(m["ref"] or ""), "default": name in DEFAULT, "title": m["card"].title,
             "sentence": m["card"].sentence} for name, m in facts().items()]


def _theories() -> list[dict[str, Any]]:
    """Facts about all theories."""
    from richter.theory import CATALOGUE
    return [{"name": name, "ref": str(t["ref"]), "title": t["title"]} for name, t in CATALOGUE.facts().items()]


def _experiment_table(rows: list[dict[str, Any]]) -> str:
    """Table of experiments for a terminal."""
    return table([("experiment", "where", *SCALES, "data", "what"), *(
        (e["name"], e["ref"], *(_outcome(e, scale) for scale in SCALES), _needs(e), e["title"]) for e in rows)])


def _outcome(e: Mapping[str, Any], scale: str) -> str:
    """Verdict of an experiment's claims at a scale, with its cost."""
    from richter.core import show_bytes
    cost = e["cost"].get(scale)
    return f"{e['verdict'][scale]}; {cost['cpu_minutes']:.1f} min, {show_bytes(cost['memory'])}" if cost else e["verdict"][scale]


def _needs(e: Mapping[str, Any]) -> str:
    """Data sets that an experiment needs."""
    return ", ".join([*e["data"], *(f"{name} (paper)" for name in e["more_data"])]) or "none needed"


def _measure_table(rows: list[dict[str, Any]]) -> str:
    """Table of measures for a terminal."""
    lines = table([("  measure", "where", "what"),
                   *((f"{'*' if m['default'] else ' '} {m['name']}", m["ref"], m["sentence"] or m["title"]) for m in rows)])
    return f"{lines}\n\n* measured by default"


def _theory_table(rows: list[dict[str, Any]]) -> str:
    """Table of theories for a terminal."""
    return table([("theory", "where", "what"), *((t["name"], t["ref"], t["title"]) for t in rows)])


_LISTS = {"experiments": _experiments, "measures": _measures, "theories": _theories}
_TABLES = {"experiments": _experiment_table, "measures": _measure_table, "theories": _theory_table}

COMMAND = Command("list", __doc__, do, arguments, group="reproduce papers", place=30, examples=(
    "richter list", "richter list measures", "richter list theories", "richter list experiments --json"))
