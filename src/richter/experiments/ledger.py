"""The ledger: the verdict on every figure, table, theorem and algorithm of the source papers, from stored records."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from richter.experiments.outcomes import bar_of
from richter.experiments.seeds import ENOUGH, ON_AVERAGE, TOO_FEW
from richter.experiments.staleness import Record, Standing, for_comparison, standing

if TYPE_CHECKING:  # `richter list` reads the records, and starts at once
    from richter.experiments.frame import Experiment

FOLDER = Path(__file__).parent / "records"
VERDICTS = {  # and what they say; only the first is said of the paper's data, panels and sizes, all of them
    "reproduced": "every claim holds, on the paper's data, panels and sizes",
    "reproduced in part": "every claim holds; panels, data or sizes are missing, and named",
    ON_AVERAGE: "every claim holds for the median or mean of the seeds, not for the whole interval over them, its own or "
                "that of a rival",
    TOO_FEW: f"every number is in its bar, from fewer than {ENOUGH} seeds, which decide nothing",
    "differs": "a claim does not hold",
    "not run": "there is an experiment, but no record of it, or no claim of this place's own",
    "nothing to measure": "a diagram, a plan or a list: there is nothing that could be true or false of a network",
    "no experiment yet": ""}


UNSURE = (TOO_FEW, ON_AVERAGE)  # of claims and places, the weaker one first


class LedgerRow(NamedTuple):
    """Verdict on a figure, a table or another result of a paper, with its numbers."""

    paper: str
    place: str
    title: str
    verdict: str  # a key of VERDICTS
    claims: tuple[Mapping[str, Any], ...] = ()  # their records
    remarks: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()  # how records that it is judged by stand to the code, if they are stale
    sources: tuple[str, ...] = ()  # these records: scale, date and cost
    experiments: tuple[str, ...] = ()

    @property
    def numbers(self) -> str:
        """The numbers with their bars, and the remarks."""
        why = "; ".join(c.get("differs") or "not explained yet" for c in self.claims if not c["holds"])
        stale = "**The record is stale**, see below" if self.stale else ""
        return ". ".join(part for part in ("; ".join(map(_number, self.claims)), why, *self.remarks, stale) if part)


Records = Mapping[tuple[str, str], Record]  # by (experiment, scale)


def records(folder: Path = FOLDER) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the stored records by (experiment, scale)."""
    stored = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return {(record["experiment"], record["scale"]): record for record in stored}


def keep(record: Record, folder: Path = FOLDER) -> Path:
    """Write a record and return its path. A record of the paper's scale also stores the numbers of smoke, if both come from
    the same modules: when smoke gives other numbers later, the paper's numbers can no longer be trusted either."""
    smoke = records(folder).get((record["experiment"], "smoke"))
    if record["scale"] == "paper" and smoke is not None and smoke["key"] == record["key"]:
        record = {**record, "smoke": for_comparison(smoke)}
    folder.mkdir(exist_ok=True)
    path = folder / f"{record['experiment']}.{record['scale']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def compared(e: Experiment, again: Record, stored: Records | None = None) -> str:
    """Return a sentence that compares the stored record of an experiment and scale with the code, and with the numbers of a
    run just now."""
    record = (records() if stored is None else stored).get((e.name, again["scale"]))
    if record is None:
        return f"no record at {again['scale']} scale yet"
    state = standing(e, record, again)
    return f"record of {record['date']}: {state}{'' if state.moved else '; the same numbers'}"


def catalogue() -> list[dict[str, Any]]:
    """Return every figure, table, theorem, proposition and algorithm of the source papers."""
    return list(json.loads((FOLDER.parent / "catalogue.json").read_text(encoding="utf-8")))


def changes() -> dict[str, Any]:
    """Return the verdicts of an earlier ledger, and why some have changed."""
    return dict(json.loads((FOLDER.parent / "changes.json").read_text(encoding="utf-8")))


def places(experiments: Iterable[Experiment], stored: Records) -> list[LedgerRow]:
    """Return one row for each result of the papers; several experiments may cover one place."""
    owners: dict[tuple[str, str], list[Experiment]] = {}
    for e in experiments:
        for place in e.covers:
            owners.setdefault((e.ref.paper, place), []).append(e)
    entries = catalogue()
    listed = [(c["paper"], c["place"], c["title"]) for c in entries]
    nothing = {(c["paper"], c["place"]): c["nothing"] for c in entries if "nothing" in c}
    extra = [(paper, place, f"{covering[0].title[0].upper()}{covering[0].title[1:]}.") for (paper, place),
             covering in owners.items()
             if (paper, place) not in {(p, q) for p, q, _ in listed}]
    order = list(dict.fromkeys(p for p, _, _ in [*listed, *extra]))
    everything = sorted([*listed, *extra], key=lambda entry: order.index(entry[0]))
    return [LedgerRow(paper, place, title, "nothing to measure", remarks=(nothing[paper, place],)) if (paper,
                                                                                                       place) in nothing else
            _judged(paper, place, title, owners.get((paper, place), []), stored) for paper, place, title in everything]


def changed(rows: Iterable[LedgerRow]) -> list[tuple[LedgerRow, str, str]]:
    """Return the places whose verdict changed since the earlier ledger, each with its earlier verdict and the reason."""
    earlier = changes()
    return [(row, was, earlier["why"].get(row.paper, {}).get(row.place, "")) for row in rows
            if (was := earlier["verdicts"].get(row.paper, {}).get(row.place, row.verdict)) != row.verdict]


def claims_at(place: str, record: Record) -> list[Mapping[str, Any]]:
    """Return the claims of a record that are about this place. A claim that names no place is about that of the experiment's
    reference."""
    return [c for c in record["claims"] if place in c.get("places", [record["place"]])]


def figure_name(paper: str, place: str) -> str:
    """Return the name of a place's drawing: nfa_fig13 for Fig. 13, layerwise_fig1_2 for Fig. 1.2, nfa_prop4 for Prop. 4."""
    words = re.sub(r"[^a-z0-9]+", "_", place.lower()).strip("_")
    kind, _, rest = words.partition("_")
    return f"{paper}_{kind}{rest}" if rest[:1].isdigit() else f"{paper}_{words}"


def figures_at(place: str, e: Experiment) -> list[str]:
    """Return the names of a place's drawings: its own name, or names that begin with it. An experiment of one place gives all
    of them."""
    own = figure_name(e.ref.paper, place)
    return [name for name in e.figures if len(e.covers) == 1 or name == own or name.startswith(f"{own}_")]


def _judged(paper: str, place: str, title: str, owners: list[Experiment], stored: Records) -> LedgerRow:
    """Return the row of a place; its verdict is the worst of those of its experiments, in this order."""
    if not owners:
        return LedgerRow(paper, place, title, "no experiment yet")
    rows = [_judged_by(e, LedgerRow(paper, place, title, "not run", experiments=(e.name,)), stored) for e in owners]
    order = ("differs", "not run", *UNSURE, "reproduced in part", "reproduced")
    return LedgerRow(paper, place, title, min((row.verdict for row in rows), key=order.index),
                 tuple(c for row in rows for c in row.claims), *(
                     tuple(dict.fromkeys(word for row in rows for word in words(row)))
                     for words in (lambda r: r.remarks, lambda r: r.stale, lambda r: r.sources, lambda r: r.experiments)))


def _judged_by(e: Experiment, row: LedgerRow, stored: Records) -> LedgerRow:
    """Return the row as judged by one experiment, from its record at the paper's scale if there is one."""
    record = next((stored[e.name, scale] for scale in ("paper", "smoke") if (e.name, scale) in stored), None)
    if record is None:
        return row._replace(remarks=(f"{e.absent or 'not yet run'}: `richter run {e.name} --scale paper`",))
    claims = claims_at(row.place, record)
    missing = [f"Missing: {e.missing[row.place]}"] if row.place in e.missing else []
    if not claims:
        return row._replace(remarks=(*missing,) or ("no claim of its own",))
    smaller = [f"Small scale only: {fewer}"] if record["scale"] == "smoke" and (fewer := e.reduced or _smaller(e)) else []
    tried = [f"Tried before: {record['tried']}"] if record.get("tried") else []
    alone = ["Its controls were not run at this scale"] if not all("controls" in c for c in claims) else []
    state = state_of(record, e, stored)
    verdict = _of_claims(claims)
    if verdict == "holds":
        verdict = "reproduced in part" if missing or smaller else "reproduced"
    return row._replace(
        verdict=verdict, claims=tuple(claims), remarks=(*missing, *smaller, *tried, *alone),
        stale=(str(state),) if state.stale else (),
        sources=(f"{e.name} at {record['scale']} scale, {record['date']}, {record['cpu_minutes']:.3g} CPU-minutes",))


def _smaller(e: Experiment) -> str:
    """Return the settings of smoke that differ from the paper's, as text."""
    from richter.runs.format import plain
    small, full = plain(e.smoke), plain(e.paper)
    return ", ".join(f"{name} {_short(value)} for {_short(full[name])}" for name, value in small.items() if value != full[name])


def _short(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 40 else f"{len(value)} values" if isinstance(value, list) else f"{text[:37]}..."


def verdict_of(record: Record | None) -> str:
    """Return one verdict on all claims of an experiment: holds, holds on average, too few seeds, differs, or not run."""
    return "not run" if record is None else _of_claims(record["claims"])


def _of_claims(claims: Iterable[Mapping[str, Any]]) -> str:
    """Return the weakest verdict of several claims."""
    verdicts = {c["verdict"] if c["holds"] else "differs" for c in claims}
    return next((weak for weak in ("differs", *UNSURE) if weak in verdicts), "holds")


def state_of(record: Record, e: Experiment, stored: Records) -> Standing:
    """Compare a stored record with the code; a record of the paper's scale also with the stored numbers of smoke."""
    return standing(e, record, stored.get((e.name, "smoke")) if record["scale"] == "paper" else None)


def _number(c: Mapping[str, Any]) -> str:
    bar = f"bar {bar_of(c)}{'; paper: ' + c['paper'] if c['paper'] else ''}{'; once: ' + c['was'] if c.get('was') else ''}"
    mark = ", **not so**" if not c["holds"] else f", *{c['verdict']}*" if c["verdict"] in UNSURE else ""
    return f"{c['text']}: {number(c)} ({bar}){mark}"


def number(c: Mapping[str, Any]) -> str:
    """Return the number of a claim's record as text, with its interval if it is over seeds."""
    from richter.report.claims import over_seeds
    return "no number" if c["value"] is None else f"{c['value']:.3g}{over_seeds(c)}"
