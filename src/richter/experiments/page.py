"""The ledger as docs/claims.md, made from stored records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from richter.core import show_bytes
from richter.core.values import reference
from richter.experiments.ledger import VERDICTS, LedgerRow, Records, changed, changes, places, state_of
from richter.experiments.staleness import ABSOLUTE, RELATIVE, Record

if TYPE_CHECKING:
    from richter.experiments.frame import Experiment

HEAD = (
    "Made by `make claims` from the records in `src/richter/experiments/records/`; nothing here is written by hand.\n"
    "`richter check` runs the experiments at the small scale and compares every number with its bar, and with the record; "
    "`richter check --controls` runs the cases on which each claim must fail; `richter ledger --html -o claims.html` shows all "
    "of it with the figures that were drawn on your machine.")
STATES = (
    "A record names the modules that its numbers came from: the experiment's file, and what it imports of experiments, tasks, "
    "models, theory, learners and controls. Its state is\n\n"
    "- *as the code is* when these are what they were, comments and layout apart;\n"
    "- **stale** when one of them has changed since, or when something else has, such as the instrument, so that the experiment "
    "gives other numbers at smoke scale than it did when the record was made (by more than "
    f"{RELATIVE:g} of the number and {ABSOLUTE:g}), or when it was made before records named their modules.")


def page(experiments: Iterable[Experiment], stored: Records) -> str:
    """Return the text of docs/claims.md."""
    by_name = {e.name: e for e in experiments}
    rows = places(by_name.values(), stored)
    counts = Counter(p.verdict for p in rows)
    lines = ["# What the papers claim, and what was found", "", HEAD, "",
             "| verdict | which says | figures, tables and results |", "|---|---|---|",
             *(f"| {verdict} | {words} | {counts[verdict]} |" for verdict, words in VERDICTS.items()),
             "", f"CPU-minutes spent on the records: {sum(r['cpu_minutes'] for r in stored.values()):.1f}.",
             out_of_date(by_name, stored), ""]
    for paper in dict.fromkeys(p.paper for p in rows):
        lines += [f"## `{paper}`: {reference(paper)['title']}", "",
                  "| place | what it shows | verdict | numbers |", "|---|---|---|---|",
                  *(f"| {p.place} | {_cell(p.title)} | {p.verdict} | {_cell(p.numbers)} |" for p in rows if p.paper == paper), ""]
    lines += _changes(rows)
    lines += ["## The records", "", STATES, "",
              "| experiment | scale | tasks | CPU-minutes | memory | date | revision | hardware | state |",
              "|---|---|---|---|---|---|---|---|---|"]
    lines += [f"| `{r['experiment']}` | {r['scale']} | {r['tasks']} | {r['cpu_minutes']:.2f} | {show_bytes(r['memory'])} "
              f"| {r['date']} | `{(r['revision'] or 'none')[:10]}` "
              f"| {r['hardware'].get('processor', '')}, {r['hardware'].get('cores', '?')} cores "
              f"| {_cell(_state(r, by_name.get(r['experiment']), stored))} |" for r in stored.values()]
    return "\n".join(lines) + "\n"


def _changes(rows: Iterable[LedgerRow]) -> list[str]:
    """Return a table row for every verdict that changed since the earlier ledger, with the reason."""
    lines = [f"| {row.paper} {row.place} | {was} | {row.verdict} | {_cell(why or 'not explained yet')} |"
             for row, was, why in changed(rows)]
    if not lines:
        return []
    return ["## Verdicts that changed", "", f"Since the ledger of {changes()['date']}. {changes()['words']}", "",
            "| place | was | is | why |", "|---|---|---|---|", *lines, ""]


def out_of_date(by_name: Mapping[str, Experiment], stored: Records) -> str:
    """Return how many records of each scale are stale."""
    counts = []
    for scale in ("smoke", "paper"):
        states = [state_of(r, by_name[r["experiment"]], stored) for r in stored.values()
                  if r["scale"] == scale and r["experiment"] in by_name]
        counts.append(f"Records at {scale} scale: {len(states)}, stale: {sum(s.stale for s in states)}.")
    return " ".join(counts)


def _state(record: Record, e: Experiment | None, stored: Records) -> str:
    """Return the state of a record for the table of records."""
    if e is None:
        return "its experiment is no more"
    return str(state_of(record, e, stored)).replace("stale", "**stale**", 1)


def _cell(text: str) -> str:
    """Escape a text for a Markdown table; only code may contain a literal <."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))
