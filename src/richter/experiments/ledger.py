"""The ledger: outcome and protocol of every claim of the source papers, from stored records."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from richter.core import unknown
from richter.experiments.outcomes import WORST, Meaning, inside, kind_of, lacking, meaning, outcome, outside, reason
from richter.experiments.seeds import ON_AVERAGE, TOO_FEW
from richter.experiments.staleness import Record, Standing, for_comparison, standing

if TYPE_CHECKING:  # `richter list` reads the records, and starts at once
    from richter.experiments.frame import Claim, Experiment

FOLDER = Path(__file__).parent / "records"


class LedgerLine(NamedTuple):
    """One claim about one place: what the paper says, our number, and what follows."""

    says: str  # the paper's claim in one sentence, or our own one
    own: bool  # whether the claim is ours alone
    record: Mapping[str, Any]  # of the claim; empty if it was not run
    outcome: str  # a key of OUTCOMES; of our own claims the verdict, such as "holds"
    protocol: str  # a key of PROTOCOLS
    settings: str  # what differs from the paper, in words
    meaning: Meaning
    reason: str
    undecided: tuple[str, ...] = ()  # conditions of "contradicted" that a number outside its bar does not meet
    second: str = ""  # the second route to the number
    source: str = ""  # the record: experiment, scale and date
    stale: bool = False

    @property
    def measured(self) -> str:
        """Name of the number."""
        return str(self.record.get("text", ""))

    @property
    def number(self) -> str:
        """The number with its interval over seeds."""
        return number_of(self.record) if self.record else "no number yet"


class LedgerPlace(NamedTuple):
    """A figure, a table or another result of a paper, with a line for each claim about it."""

    paper: str
    place: str
    title: str
    lines: tuple[LedgerLine, ...] = ()
    nothing: str = ""  # why there is nothing to measure
    missing: tuple[str, ...] = ()  # panels, data and sizes of the paper that are not here
    partial: tuple[str, ...] = ()  # the part of the place that was run, if not all of it
    tried: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()  # how records that it is judged by stand to the code, if they are stale
    sources: tuple[str, ...] = ()  # these records: scale, date and cost
    experiments: tuple[str, ...] = ()
    absent: str = ""  # why there is no record, or no claim of the place's own

    @property
    def claims(self) -> list[LedgerLine]:
        """Lines of the paper's claims."""
        return [line for line in self.lines if not line.own]

    @property
    def outcome(self) -> str:
        """Worst outcome of the paper's claims. A printed formula that is contradicted is settled where its corrected form is
        reproduced. Empty if all claims are ours."""
        if self.nothing:
            return "nothing to measure"
        words = {line.outcome for line in self.claims}
        settled = "reproduced after correction" in words
        words = {line.outcome for line in self.claims
                 if not (settled and line.outcome == "contradicted" and line.reason == "misprint")}
        return next((word for word in WORST if word in words), "" if self.lines else "not run")

    @property
    def protocol(self) -> str:
        """Weakest protocol of the paper's claims; empty if there is none."""
        words = {line.protocol for line in self.claims if line.protocol}
        return next((word for word in ("stand-in", "unstated", "reduced", "exact") if word in words), "")

    @property
    def reproduced(self) -> str:
        """How many of the paper's claims are reproduced: "4 of 5"."""
        whole = sum(line.outcome in WHOLE for line in self.claims)
        return f"{whole} of {len(self.claims)}" if self.claims else ""


WHOLE = ("reproduced", "reproduced after correction")
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


def places(experiments: Iterable[Experiment], stored: Records, paper: str = "") -> list[LedgerPlace]:
    """Return each result of the papers with its claims, or those of one paper; several experiments may cover one place."""
    owners: dict[tuple[str, str], list[Experiment]] = {}
    for e in experiments:
        for place in e.covers:
            owners.setdefault((e.ref.paper, place), []).append(e)
    entries = catalogue()
    listed = {(c["paper"], c["place"]): (c["title"], c.get("nothing", "")) for c in entries}
    extra = {key: (f"{covering[0].title[0].upper()}{covering[0].title[1:]}.", "") for key, covering in owners.items()
             if key not in listed}
    order = list(dict.fromkeys(name for name, _ in [*listed, *extra]))
    if paper and paper not in order:
        raise unknown("the ledger", "paper", paper, order)
    everything = sorted((listed | extra).items(), key=lambda entry: order.index(entry[0][0]))
    return [_judged(LedgerPlace(*key, title, nothing=nothing), owners.get(key, []), stored)
            for key, (title, nothing) in everything if paper in ("", key[0])]


def counted(lines: Iterable[LedgerLine]) -> dict[tuple[str, str], int]:
    """Return the number of claims of the papers for each outcome and protocol."""
    return dict(Counter((line.outcome, line.protocol) for line in lines if not line.own))


class Waiting(NamedTuple):
    """An experiment whose record at the paper's scale is missing, stale, or without controls."""

    experiment: Experiment
    why: str
    claims: int  # that a run would decide
    minutes: float  # of the processor, by the last record at this scale, or ten times that of smoke; NaN if there is neither

    @property
    def rate(self) -> float:
        """Claims decided per minute; those of unknown cost come last."""
        return self.claims / max(self.minutes, 1e-3) if self.minutes == self.minutes else 0.0


def queue(experiments: Iterable[Experiment], stored: Records) -> list[Waiting]:
    """Return the experiments that a run at the paper's scale would bring up to date, most claims per minute first."""
    waiting = []
    for e in experiments:
        record, smoke = stored.get((e.name, "paper")), stored.get((e.name, "smoke"))
        open_claims = len(e.claims)
        if record is None:
            why = "no record"
        elif (state := state_of(record, e, stored)).stale:
            why = str(state)
        elif open_claims := sum("controls" not in c for c in record["claims"]):
            why = "no controls"
        else:
            continue
        minutes = record["cpu_minutes"] if record else 10 * smoke["cpu_minutes"] if smoke else math.nan
        waiting.append(Waiting(e, why, open_claims, minutes))
    return sorted(waiting, key=lambda w: -w.rate)


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


def _judged(p: LedgerPlace, owners: list[Experiment], stored: Records) -> LedgerPlace:
    """Add what the experiments of a place found."""
    parts = [_judged_by(e, p, stored) for e in owners]
    merged: dict[str, Any] = {name: tuple(dict.fromkeys(word for part in parts for word in getattr(part, name)))
                              for name in ("missing", "partial", "tried", "stale", "sources")}
    return p._replace(lines=tuple(line for part in parts for line in part.lines), experiments=tuple(e.name for e in owners),
                      absent="; ".join(part.absent for part in parts if part.absent) if owners or p.nothing else
                      "no experiment yet", **merged)


def _judged_by(e: Experiment, p: LedgerPlace, stored: Records) -> LedgerPlace:
    """Return the place as one experiment shows it, from its record at the paper's scale if there is one."""
    claims = {c.text: c for c in e.claims if p.place in (c.places or (e.ref.place,))}
    p = p._replace(missing=(e.missing[p.place],) if p.place in e.missing else (),
                   partial=(e.partial[p.place],) if p.place in e.partial else ())
    record = next((stored[e.name, scale] for scale in ("paper", "smoke") if (e.name, scale) in stored), None)
    if record is None:
        nothing = Meaning("not tested")
        lines = [LedgerLine(c.says or c.text, c.own, {}, "not run", *kind_of(e.protocol_of(c, p.place)), nothing, "")
                 for c in claims.values()]
        return p._replace(lines=tuple(lines), absent=f"{e.absent or 'not yet run'}: `richter run {e.name} --scale paper`")
    if not claims:
        return p._replace(absent=f"no claim of its own in {e.name}")
    state = state_of(record, e, stored)
    smaller = "" if record["scale"] == "paper" else e.reduced or _smaller(e)
    kept = {c["text"]: c for c in record["claims"]}
    beaten = [c.rival for text, c in claims.items() if c.rival and text in kept and not inside(kept[text])]
    lines = [_line(c, kept[text], f"reduced: {smaller}" if smaller else e.protocol_of(c, p.place), bool(p.partial), beaten)
             for text, c in claims.items() if text in kept]
    source = f"{e.name} at {record['scale']} scale, {record['date']}"
    return p._replace(
        lines=tuple(line._replace(source=source, stale=state.stale) for line in lines),
        tried=(record["tried"],) if record.get("tried") else (), stale=(f"{e.name}: {state}",) if state.stale else (),
        sources=(f"{source}, {record['cpu_minutes']:.3g} CPU-minutes",))


def _line(c: Claim, kept: Mapping[str, Any], protocol: str, partial: bool, beaten: Sequence[str]) -> LedgerLine:
    """Return the line of a claim from the record of its number."""
    own = kept["verdict"] if kept["holds"] else "does not hold"
    word = own if c.own else outcome(kept, protocol, reason=c.reason, partial=partial, direction=c.direction,
                                                 second=c.second)
    kind, settings = kind_of(protocol)
    return LedgerLine(c.says or c.text, c.own, kept, word, kind, settings, meaning(kept, () if c.own else beaten),
                      "" if c.own else reason(kept, word, protocol, c.reason),
                      tuple(lacking(kept, protocol, c.second)) if word == "undecided" and outside(kept) else (), c.second)


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
    return next((weak for weak in ("differs", TOO_FEW, ON_AVERAGE) if weak in verdicts), "holds")


def state_of(record: Record, e: Experiment, stored: Records) -> Standing:
    """Compare a stored record with the code; a record of the paper's scale also with the stored numbers of smoke."""
    return standing(e, record, stored.get((e.name, "smoke")) if record["scale"] == "paper" else None)


def number_of(c: Mapping[str, Any]) -> str:
    """Return the number of a claim's record as text, with its interval if it is over seeds."""
    from richter.report.claims import over_seeds
    return "no number" if c["value"] is None else f"{c['value']:.3g}{over_seeds(c)}"
