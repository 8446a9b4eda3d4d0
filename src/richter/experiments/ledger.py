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

if TYPE_CHECKING:  # `richter list` reads the records, and starts at once
    from richter.experiments.frame import Experiment

FOLDER = Path(__file__).parent / "records"
VERDICTS = {"reproduced": "reproduced", "reduced": "reproduced at reduced size", "differs": "differs",
            "absent": "not run here", "unwritten": "no experiment yet"}


class Place(NamedTuple):
    """A figure or table, or another result that has an experiment, and what is known of it."""

    paper: str
    place: str
    title: str
    verdict: str  # a key of VERDICTS
    said: str


def records(folder: Path = FOLDER) -> dict[tuple[str, str], dict[str, Any]]:
    """What was found, by (experiment, scale)."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found[record["experiment"], record["scale"]] = record
    return found


def keep(record: Mapping[str, Any], folder: Path = FOLDER) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{record['experiment']}.{record['scale']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def catalogue() -> list[dict[str, Any]]:
    """Every figure and table of the source papers."""
    return list(json.loads((FOLDER.parent / "catalogue.json").read_text(encoding="utf-8")))


def places(experiments: Iterable[Experiment], found: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[Place]:
    of: dict[tuple[str, str], Experiment] = {(e.ref.paper, place): e for e in experiments for place in e.covers}
    listed = [(c["paper"], c["place"], c["title"]) for c in catalogue()]
    extra = [(paper, place, f"{e.title[0].upper()}{e.title[1:]}.") for (paper, place), e in of.items()
             if (paper, place) not in {(p, q) for p, q, _ in listed}]
    order = list(dict.fromkeys(p for p, _, _ in [*listed, *extra]))
    everything = sorted([*listed, *extra], key=lambda entry: order.index(entry[0]))
    return [_judged(paper, place, title, of.get((paper, place)), found) for paper, place, title in everything]


def _judged(paper: str, place: str, title: str, e: Experiment | None,
            found: Mapping[tuple[str, str], Mapping[str, Any]]) -> Place:
    if e is None:
        return Place(paper, place, title, "unwritten", "")
    record = next((found[e.name, scale] for scale in ("paper", "smoke") if (e.name, scale) in found), None)
    if record is None:
        return Place(paper, place, title, "absent", f"{e.absent or 'not yet run'}: `richter run {e.name} --scale paper`")
    claims = [c for c in record["claims"] if place in c.get("places", [place])]
    numbers = "; ".join(_number(c) for c in claims)
    if not all(c["holds"] for c in claims):
        why = "; ".join(c.get("differs") or "not explained yet" for c in claims if not c["holds"])
        return Place(paper, place, title, "differs", f"{numbers}. {why}")
    if record["scale"] == "smoke" and e.reduced:
        return Place(paper, place, title, "reduced", f"{numbers} ({e.reduced})")
    return Place(paper, place, title, "reproduced", numbers)


def _number(c: Mapping[str, Any]) -> str:
    low, high = c["expect"]
    bar = Interval(-math.inf if low is None else low, math.inf if high is None else high)
    mark = "" if c["holds"] else ", **not so**"
    return f"{c['text']}: {shown(c['value'])} (bar {bar}{'; paper: ' + c['paper'] if c['paper'] else ''}){mark}"


def shown(value: float | None) -> str:
    return "no number" if value is None else f"{value:.3g}"


def page(experiments: Iterable[Experiment], found: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    """docs/claims.md."""
    experiments = list(experiments)
    all_places = places(experiments, found)
    counts = Counter(p.verdict for p in all_places)
    lines = ["# What the papers claim, and what was found", "",
             "Made by `make claims` from the records in `src/richter/experiments/records/`; nothing here is written by hand.",
             "`richter check` runs the experiments at the small scale and compares every number with its bar; `richter check "
             "--controls` runs the cases on which each claim must fail.", "",
             "| verdict | figures, tables and results |", "|---|---|",
             *(f"| {words} | {counts[key]} |" for key, words in VERDICTS.items()),
             "", f"CPU-minutes spent on the records: {sum(r['cpu_minutes'] for r in found.values()):.1f}.", ""]
    for paper in dict.fromkeys(p.paper for p in all_places):
        entry = reference(paper)
        lines += [f"## `{paper}`: {entry['title']}", "", "| place | what it shows | verdict | numbers |", "|---|---|---|---|"]
        lines += [f"| {p.place} | {_cell(p.title)} | {VERDICTS[p.verdict]} | {_cell(p.said)} |"
                  for p in all_places if p.paper == paper]
        lines.append("")
    lines += ["## The records", "", "| experiment | scale | tasks | CPU-minutes | memory | date | revision | hardware |",
              "|---|---|---|---|---|---|---|---|"]
    lines += [f"| `{r['experiment']}` | {r['scale']} | {r['tasks']} | {r['cpu_minutes']:.2f} | {show_bytes(r['memory'])} "
              f"| {r['date']} | `{(r['revision'] or 'none')[:10]}` "
              f"| {r['hardware'].get('processor', '')}, {r['hardware'].get('cores', '?')} cores |" for r in found.values()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
