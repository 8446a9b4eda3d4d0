"""The ledger: for every figure and table of the source papers what became of it here, made from stored records alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from richter.core import Interval, show_bytes
from richter.core.citations import reference
from richter.experiments.staleness import ABSOLUTE, RELATIVE, Record, Standing, for_comparison, standing
from richter.report.claims import over_seeds

if TYPE_CHECKING:  # `richter list` reads the records, and starts at once
    from richter.experiments.frame import Experiment

FOLDER = Path(__file__).parent / "records"
VERDICTS = {"reproduced": "reproduced", "reduced": "reproduced at reduced size", "differs": "differs",
            "absent": "not run here", "unwritten": "no experiment yet"}
HEAD = (
    "Made by `make claims` from the records in `src/richter/experiments/records/`; nothing here is written by hand.\n"
    "`richter check` runs the experiments at the small scale and compares every number with its bar, and with the record; "
    "`richter check --controls` runs the cases on which each claim must fail.")
STATES = (
    "A record names the modules that its numbers came from: the experiment's file, and what it imports of experiments, tasks, "
    "models, theory, learners and controls. Its state is\n\n"
    "- *as the code is* when these are what they were, comments and layout apart;\n"
    "- **stale** when one of them has changed since, or when something else has, such as the instrument, so that the experiment "
    "gives other numbers at smoke scale than it did when the record was made (by more than "
    f"{RELATIVE:g} of the number and {ABSOLUTE:g});\n"
    "- *not known* when it was made before records named their modules. What can be told is when the same experiment was run at "
    "smoke scale with the code as it is.")


class Place(NamedTuple):
    """A figure or table, or another result that has an experiment, and what is known of it."""

    paper: str
    place: str
    title: str
    verdict: str  # a key of VERDICTS
    numbers: str  # each with its bar, and what else has to be told


Records = Mapping[tuple[str, str], Record]  # by (experiment, scale)


def records(folder: Path = FOLDER) -> dict[tuple[str, str], dict[str, Any]]:
    """What was measured and kept, by (experiment, scale)."""
    kept = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return {(record["experiment"], record["scale"]): record for record in kept}


def keep(record: Record, folder: Path = FOLDER) -> Path:
    """Write a record. One of the paper's scale keeps the numbers of smoke beside its own, if these come from the same modules:
    when smoke gives other numbers later, its own can no longer be trusted either."""
    smoke = records(folder).get((record["experiment"], "smoke"))
    if record["scale"] == "paper" and smoke is not None and smoke["key"] == record["key"]:
        record = {**record, "smoke": for_comparison(smoke)}
    folder.mkdir(exist_ok=True)
    path = folder / f"{record['experiment']}.{record['scale']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def compared(e: Experiment, again: Record, kept: Records | None = None) -> str:
    """A sentence on how the kept record of this experiment and scale stands to the code, and to the numbers of a run just now."""
    record = (records() if kept is None else kept).get((e.name, again["scale"]))
    if record is None:
        return f"no record at {again['scale']} scale yet"
    state = standing(e, record, again)
    return f"record of {record['date']}: {state}{'' if state.moved else '; the same numbers'}"


def catalogue() -> list[dict[str, Any]]:
    """Every figure and table of the source papers."""
    return list(json.loads((FOLDER.parent / "catalogue.json").read_text(encoding="utf-8")))


def places(experiments: Iterable[Experiment], kept: Records) -> list[Place]:
    owners: dict[tuple[str, str], Experiment] = {(e.ref.paper, place): e for e in experiments for place in e.covers}
    listed = [(c["paper"], c["place"], c["title"]) for c in catalogue()]
    extra = [(paper, place, f"{e.title[0].upper()}{e.title[1:]}.") for (paper, place), e in owners.items()
             if (paper, place) not in {(p, q) for p, q, _ in listed}]
    order = list(dict.fromkeys(p for p, _, _ in [*listed, *extra]))
    everything = sorted([*listed, *extra], key=lambda entry: order.index(entry[0]))
    return [_judged(paper, place, title, owners.get((paper, place)), kept) for paper, place, title in everything]


def _judged(paper: str, place: str, title: str, e: Experiment | None, kept: Records) -> Place:
    if e is None:
        return Place(paper, place, title, "unwritten", "")
    record = next((kept[e.name, scale] for scale in ("paper", "smoke") if (e.name, scale) in kept), None)
    if record is None:
        return Place(paper, place, title, "absent", f"{e.absent or 'not yet run'}: `richter run {e.name} --scale paper`")
    claims = [c for c in record["claims"] if place in c.get("places", [place])]
    stale = ". **The record is stale**, see below" if state_of(record, e, kept).stale else ""
    numbers = "; ".join(_number(c) for c in claims)
    if not all(c["holds"] for c in claims):
        why = "; ".join(c.get("differs") or "not explained yet" for c in claims if not c["holds"])
        return Place(paper, place, title, "differs", f"{numbers}. {why}{stale}")
    if record["scale"] == "smoke" and e.reduced:
        return Place(paper, place, title, "reduced", f"{numbers} ({e.reduced}){stale}")
    return Place(paper, place, title, "reproduced", f"{numbers}{stale}")


def state_of(record: Record, e: Experiment, kept: Records) -> Standing:
    """A kept record against the code; one of the paper's scale also against the kept numbers of smoke."""
    return standing(e, record, kept.get((e.name, "smoke")) if record["scale"] == "paper" else None)


def _state(record: Record, e: Experiment | None, kept: Records) -> str:
    """For the table of records."""
    if e is None:
        return "its experiment is no more"
    state = state_of(record, e, kept)
    if state.stale or state.names_modules:
        return str(state).replace("stale", "**stale**", 1)
    smoke = kept.get((e.name, "smoke"), record)
    at_smoke = state_of(smoke, e, kept)
    return "not known" if at_smoke.stale or not at_smoke.names_modules else f"not known; smoke run again on {smoke['date']}"


def _number(c: Mapping[str, Any]) -> str:
    low, high = c["expect"]
    bar = Interval(-math.inf if low is None else low, math.inf if high is None else high)
    mark = "" if c["holds"] else ", **not so**"
    return f"{c['text']}: {number(c)} (bar {bar}{'; paper: ' + c['paper'] if c['paper'] else ''}){mark}"


def number(c: Mapping[str, Any]) -> str:
    """The number of a claim's record; of one over seeds with its interval."""
    return "no number" if c["value"] is None else f"{c['value']:.3g}{over_seeds(c)}"


def page(experiments: Iterable[Experiment], kept: Records) -> str:
    """docs/claims.md."""
    known = {e.name: e for e in experiments}
    all_places = places(known.values(), kept)
    counts = Counter(p.verdict for p in all_places)
    lines = ["# What the papers claim, and what was found", "", HEAD, "",
             "| verdict | figures, tables and results |", "|---|---|",
             *(f"| {words} | {counts[verdict]} |" for verdict, words in VERDICTS.items()),
             "", f"CPU-minutes spent on the records: {sum(r['cpu_minutes'] for r in kept.values()):.1f}.", ""]
    for paper in dict.fromkeys(p.paper for p in all_places):
        entry = reference(paper)
        lines += [f"## `{paper}`: {entry['title']}", "", "| place | what it shows | verdict | numbers |", "|---|---|---|---|"]
        lines += [f"| {p.place} | {_cell(p.title)} | {VERDICTS[p.verdict]} | {_cell(p.numbers)} |"
                  for p in all_places if p.paper == paper]
        lines.append("")
    lines += ["## The records", "", STATES, "",
              "| experiment | scale | tasks | CPU-minutes | memory | date | revision | hardware | state |",
              "|---|---|---|---|---|---|---|---|---|"]
    lines += [f"| `{r['experiment']}` | {r['scale']} | {r['tasks']} | {r['cpu_minutes']:.2f} | {show_bytes(r['memory'])} "
              f"| {r['date']} | `{(r['revision'] or 'none')[:10]}` "
              f"| {r['hardware'].get('processor', '')}, {r['hardware'].get('cores', '?')} cores "
              f"| {_cell(_state(r, known.get(r['experiment']), kept))} |" for r in kept.values()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
