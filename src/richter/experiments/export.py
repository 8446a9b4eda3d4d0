"""The ledger as data: one JSON document with a schema (ledger.schema.json), from stored records alone.

Beside our outcome each claim has the word of the reproduction challenge of Hugging Face at ICML 2026: verified, falsified, toy
(reduced scale) or inconclusive. A claim that was not run has none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from richter.core.values import reference
from richter.experiments.ledger import LedgerLine, LedgerPlace, Records, counted, places

if TYPE_CHECKING:
    from richter.experiments.frame import Experiment

SCHEMA = "ledger.schema.json"


def challenge(line: LedgerLine) -> str | None:
    """Return the challenge's word for a claim: a reproduction at a reduced scale, with other data or of a part is a toy."""
    if line.outcome == "not run":
        return None
    if line.outcome == "contradicted":
        return "falsified"
    if line.outcome == "partly reproduced":
        return "toy"
    if line.outcome.startswith("reproduced"):
        return "toy" if line.protocol in ("reduced", "stand-in") else "verified"
    return "inconclusive"


def ledger(experiments: Iterable[Experiment], stored: Records, paper: str = "") -> dict[str, Any]:
    """Return the ledger, or the part of one paper, as values that JSON can hold."""
    rows = places(experiments, stored, paper)
    papers = list(dict.fromkeys(row.paper for row in rows))
    return {"schema": SCHEMA, "kind": "replication",
            "papers": [_paper(name, [row for row in rows if row.paper == name]) for name in papers]}


def _paper(name: str, rows: list[LedgerPlace]) -> dict[str, Any]:
    about = reference(name)
    counts = counted(line for row in rows for line in row.lines)
    return {"name": name, "title": about["title"], "authors": about["authors"], "year": about["year"],
            **({"arxiv": about["arxiv"]} if "arxiv" in about else {}),
            "counts": [{"outcome": word, "protocol": kind, "claims": n} for (word, kind), n in sorted(counts.items())],
            "places": [_place(row) for row in rows]}


def _place(row: LedgerPlace) -> dict[str, Any]:
    return {"place": row.place, "title": row.title, "outcome": row.outcome or None, "protocol": row.protocol or None,
            "reproduced": row.reproduced, "missing": list(row.missing), "partial": list(row.partial), "tried": list(row.tried),
            "experiments": list(row.experiments), "records": list(row.sources), "stale": list(row.stale),
            "claims": [_line(line) for line in row.lines]}


def _line(line: LedgerLine) -> dict[str, Any]:
    c = line.record
    numbers = {} if not c else {
        "measured": line.measured, "value": c["value"], "interval": c.get("interval"), "over": c.get("over"), "n": c.get("n"),
        "by": c.get("by"), "bar": c["expect"], "source_of_bar": c["source"],
        "earlier": c.get("was") or None, "remark": c.get("differs") or None, "controls": c.get("controls", [])}
    return {"says": line.says, "own": line.own, "outcome": line.outcome, "protocol": line.protocol or None,
            "settings": line.settings, "meaning": line.meaning.word, "rivals_that_pass": list(line.meaning.rivals),
            "reason": line.reason or None, "second_route": line.second or None, "record": line.source or None,
            "stale": line.stale, "challenge": None if line.own else challenge(line), **numbers}
