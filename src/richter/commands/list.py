"""List experiments with their verdicts at each scale, and measures and theories with their references.

Lines are as wide as the terminal. --json has everything, such as the memory that an experiment takes."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from richter.commands import options
from richter.commands.frame import Command, as_json
from richter.core.values import table

KINDS = ("experiments", "measures", "theories")
SCALES = ("smoke", "paper")
NARROW = 30  # columns: a last column that would be narrower has lines of its own
WORDS = {"holds": "every number lies in its bar, with the whole interval over seeds",
         "holds on average": "the number lies in its bar, but its interval over seeds, or that of a rival, crosses it",
         "too few seeds": "numbers lie in their bars, but there are fewer than five seeds, which decide nothing",
         "differs": "a number lies outside its bar; `richter check` shows both numbers and the reason",
         "not run": "there is no record yet"}


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
    """Table of experiments for a terminal, and the meaning of its verdicts."""
    from richter.experiments.outcomes import OUTCOMES
    words = list(dict.fromkeys(e["verdict"][scale] for e in rows for scale in SCALES))
    meanings = [(word, (WORDS | dict(OUTCOMES)).get(word, "")) for word in words]
    lines = fitted([("experiment", *SCALES, "what"), *(
        (e["name"], *(_outcome(e, scale) for scale in SCALES), f"{e['title']} ({e['ref']}{_needs(e)})") for e in rows)])
    return f"{lines}\n\n{fitted([(word, text) for word, text in meanings if text])}"


def _outcome(e: Mapping[str, Any], scale: str) -> str:
    """Verdict of an experiment's claims at a scale, with the minutes of processor time that it takes."""
    cost = e["cost"].get(scale)
    return f"{e['verdict'][scale]}, {cost['cpu_minutes']:.2g} min" if cost else str(e["verdict"][scale])


def _needs(e: Mapping[str, Any]) -> str:
    """Data sets that an experiment needs."""
    data = ", ".join([*e["data"], *(f"{name} (paper)" for name in e["more_data"])])
    return f"; needs {data}" if data else ""


def _measure_table(rows: list[dict[str, Any]]) -> str:
    """Table of measures for a terminal."""
    lines = fitted([("  measure", "where", "what"),
                    *((f"{'*' if m['default'] else ' '} {m['name']}", m["ref"], m["sentence"] or m["title"]) for m in rows)])
    return f"{lines}\n\n* measured by default"


def _theory_table(rows: list[dict[str, Any]]) -> str:
    """Table of theories for a terminal."""
    return fitted([("theory", "where", "what"), *((t["name"], t["ref"], t["title"]) for t in rows)])


def fitted(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Align columns in lines of at most ``width`` columns (None: those of the terminal). The last column is wrapped; where it
    would be narrow, it has indented lines of its own."""
    if not rows:
        return ""
    width = shutil.get_terminal_size((120, 40)).columns if width is None else width
    *firsts, lasts = zip(*rows, strict=True)
    lines = table(list(zip(*firsts, strict=True))).split("\n")
    start = max(map(len, lines)) + 2
    apart = width - start < NARROW
    blocks = []
    for line, last in zip(lines, lasts, strict=True):
        room = max(NARROW, width - 4) if apart else width - start
        parts = textwrap.wrap(last, room, break_on_hyphens=False) or [""]
        if apart:
            blocks.append("\n".join([line, *(f"    {part}" for part in parts)]))
        else:
            blocks.append(f"\n{' ' * start}".join([f"{line.ljust(start)}{parts[0]}".rstrip(), *parts[1:]]))
    return "\n".join(blocks)


_LISTS = {"experiments": _experiments, "measures": _measures, "theories": _theories}
_TABLES = {"experiments": _experiment_table, "measures": _measure_table, "theories": _theory_table}

COMMAND = Command("list", __doc__, do, arguments, group="reproduce papers", place=30, examples=(
    "richter list", "richter list measures", "richter list theories", "richter list experiments --json"))
