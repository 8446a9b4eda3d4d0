"""Sections of a report that are text and tables: verdict, last values, claims, settings, cost, sessions, references."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import numpy as np

from richter.core import WHOLE, Card, Failure
from richter.instrument.snapshot import Snapshot, shown
from richter.instrument.verdict import LAYER_BANDS, MOVED, Diagnosis, LayerVerdict
from richter.measures.cards import card
from richter.report import plotdata
from richter.report.claims import told
from richter.report.markup import Markup, joined, table, tag
from richter.report.names import called
from richter.runs import Run


class Named(Protocol):
    """A run as a report shows it."""

    @property
    def name(self) -> str: ...
    @property
    def run(self) -> Run: ...
    @property
    def colour(self) -> str: ...
    @property
    def snapshots(self) -> list[Snapshot]: ...
    @property
    def cards(self) -> Mapping[str, Card]: ...
    @property
    def failures(self) -> list[Failure]: ...
    @property
    def diagnosis(self) -> Diagnosis | None: ...


BAR = (0.01, 10.0)  # ends of the scale of the bars


# ------------------------------------------------------------------------------------------------------------ verdict

def evidence(s: Named, several: bool = False) -> Markup:
    """Write what the verdict rests on: step and margin, evidence, caveats, advice, and the numbers of each layer."""
    line = tag("h3", tag("span", class_="swatch", style=f"border-color:{s.colour}"), s.name) if several else ""
    d = s.diagnosis
    if d is None:
        failures = [tag("li", str(failure)) for failure in s.failures]
        return tag("div", line, tag("ul", *failures) if failures else "", class_="evidence")
    measured = tag("p", d.measured[:1].upper() + d.measured[1:] + ".")
    lines = [tag("li", line) for line in d.lines]
    return tag("div", line, measured, tag("ul", *lines) if lines else "",
               tag("div", _layers(d.layers), class_="scroll") if d.layers else "", class_="evidence")


def brief(s: Named) -> Markup:
    """Write the verdict in a few lines, for notebooks."""
    d = s.diagnosis
    line = tag("h3", s.name, tag("span", s.run.status, class_="chip"))
    if d is None:
        return tag("div", line, tag("p", "Nothing has been measured yet."))
    number = tag("span", f"magnitude {d.magnitude}", class_="magnitude") if d.magnitude else ""
    return tag("div", line, tag("p", number, d.verdict[:1].upper() + d.verdict[1:]),
               tag("div", d.measured[:1].upper() + d.measured[1:], class_="soft"))


def _layers(layers: Sequence[LayerVerdict]) -> Markup:
    rows = [[called(v.layer), tag("span", v.words, class_=v.verdict.replace(" ", "-")), _bar(v.evidence.get(MOVED, math.nan)),
             tag("span", v.numbers, class_="soft")] for v in layers]
    return table(["layer", "verdict", MOVED, "evidence"], rows, class_="layers")


def _bar(change: float) -> Markup:
    """Draw a change on a logarithmic scale, with marks where a layer stops to be lazy and where it is rich."""
    if not math.isfinite(change):
        return Markup("")
    place = [_share(v) for v in (change, LAYER_BANDS[0][0], LAYER_BANDS[-1][0])]
    marks = [tag("rect", x=f"{120 * x:.1f}", y="-3", width="1", height="14", class_="mark") for x in place[1:]]
    picture = tag("svg", tag("rect", width="120", height="8", class_="track"),
                  tag("rect", width=f"{120 * place[0]:.1f}", height="8", class_="fill"), *marks,
                  class_="bar", width="120", height="18", viewBox="0 -6 120 18", role="img", aria_label=f"{change:.2g}")
    return tag("span", picture, f"{change:.2g}", class_="measured")


def _share(change: float) -> float:
    low, high = BAR
    return min(max(math.log(max(change, low) / low) / math.log(high / low), 0.0), 1.0)


# -------------------------------------------------------------------------------------------------------- last values

def last_values(s: Named, several: bool = False) -> Markup:
    """Write the last measurement as a table, with the reasons for missing numbers."""
    if not s.snapshots:
        return Markup("")
    last = s.snapshots[-1]
    cells = {(r.layer, r.measure): r for r in last.rows}
    layers = [k for k in last.layers if k != WHOLE] + [WHOLE] * (WHOLE in last.layers)
    rows = [[called(k), *(shown(cells.get((k, m))) for m in last.measures)] for k in layers]
    remarks: dict[str, list[str]] = {}
    for r in last.rows:
        if r.note:
            remarks.setdefault(r.note, []).append(f"{r.measure} of {called(r.layer)}")
    notes = [f"{_few(places)}: {note}" for note, places in remarks.items()]
    notes += [f"{called(k)}: {note}" for k, note in last.notes.items()]
    heads = [tag("span", m, title=f"{card(m, s.cards).heading}. {card(m, s.cards).sentence}".strip()) for m in last.measures]
    words = f"Step {last.step}. 0.823(12) is 0.823 ± 0.012 over probe examples; a dot marks a trivial value (true by definition)."
    return joined([tag("h3", s.name) if several else "", tag("p", words, class_="soft"),
                   tag("div", table(["layer", *heads], rows, class_="numbers"), class_="scroll"),
                   tag("ul", *(tag("li", n) for n in notes), class_="soft") if notes else ""])


def _few(places: Sequence[str], most: int = 4) -> str:
    return ", ".join(places[:most]) + (f" and {len(places) - most} more" if len(places) > most else "")


# ------------------------------------------------------------------------------------------------------------- claims

def claims(name: str, records: Mapping[str, Mapping[str, Any]], several: bool = False) -> Markup:
    """Write a table of claims: the claim, its bar, the value, and whether it holds."""
    if not records:
        return Markup("")
    rows = []
    for c in (told(key, record) for key, record in records.items()):
        remark = [tag("br"), tag("span", c.remark, class_="soft")] if c.remark else []
        rows.append([joined([c.text, *remark]), c.bar, c.value, c.paper,
                     tag("span", c.verdict, class_=None if c.holds is None else "rich" if c.holds else "trouble")])
    return joined([tag("h3", name) if several else "", table(["claim", "expected", "value", "in the paper", "verdict"], rows)])


# -------------------------------------------------------------------------------------------- settings, cost, sessions

def settings(runs: Sequence[tuple[str, Any]], differing: bool = False) -> Markup:
    """Write settings: all settings of one run; for several runs those that differ, or those that they have in common."""
    differ, common = plotdata.differences([plotdata.flat(s) for _, s in runs])
    if differing:
        return _differing(differ, [name for name, _ in runs], [name for name, s in runs if not plotdata.flat(s)])
    if not common:
        return Markup("") if differ or len(runs) > 1 else tag("p", "None were recorded.", class_="soft")
    words = tag("p", "Settings in common; those that differ are above.", class_="soft") if len(runs) > 1 else ""
    return joined([words, table(["setting", "value"], list(common.items()))])


def _differing(differ: Mapping[str, Sequence[str]], names: Sequence[str], bare: Sequence[str]) -> Markup:
    """``bare``: runs without recorded settings."""
    if len(bare) == len(names):
        return tag("p", "The runs have no settings, so nothing is known of what differs. Give each its own: "
                        "Observer(..., run=..., settings=...).")
    words = tag("p", f"Without settings: {_few(bare)}.", class_="soft") if bare else ""
    if not differ:
        return tag("p", "The settings are the same.")
    return joined([table(["setting", *names], [[k, *values] for k, values in differ.items()]), words])


def cost(runs: Sequence[Named]) -> Markup:
    """Write a table of the cost of measuring, and its share of the run's time."""
    rows = []
    for s in runs:
        seconds = np.array([x.seconds for x in s.snapshots if math.isfinite(x.seconds)])
        passes = [x.passes for x in s.snapshots if math.isfinite(x.passes)]
        spans = [x.ended - x.begun if x.ended is not None else math.nan for x in s.run.sessions]
        whole = math.fsum(spans)
        rows.append([s.name, len(s.snapshots), max((x.examples for x in s.snapshots), default=0) or "",
                     f"{seconds.sum():.3g} s" if len(seconds) else "", f"{np.median(seconds):.3g} s" if len(seconds) else "",
                     f"{np.median(passes):.3g}" if passes else "",
                     f"{seconds.sum() / whole:.1%}" if len(seconds) and math.isfinite(whole) and whole > 0 else ""])
    heads = ["run", "measurements", "probe examples", "total time", "median", "passes each", "share of the run's time"]
    return table(heads, rows)


def sessions(runs: Sequence[Named]) -> Markup:
    """Write tables of the seeds, and of each process that wrote the run: its times, how it ended, and its environment."""
    seeds = [[s.name, ", ".join(f"{k} {v}" for k, v in s.run.seeds.items()) or "none recorded"] for s in runs]
    rows = []
    for s in runs:
        for i, x in enumerate(s.run.sessions):
            p = x.provenance
            versions = {"python": p.get("python"), **_mapping(p.get("versions"))}
            command = p.get("command")
            rows.append([f"{s.name} ({i + 1})" if len(s.run.sessions) > 1 else s.name, _time(x.begun),
                         f"{_time(x.ended)} ({x.how})" if x.ended is not None else "not recorded",
                         tag("code", _revision(p.get("revision"))), ", ".join(f"{k} {v}" for k, v in versions.items() if v),
                         _hardware(_mapping(p.get("hardware"))),
                         tag("code", " ".join(map(str, command)) if isinstance(command, list) else "")])
    return joined([table(["run", "seeds"], seeds),
                   table(["session", "begun (UTC)", "ended (UTC)", "git revision", "versions", "hardware", "command"], rows)])


def _mapping(record: Any) -> dict[str, Any]:
    return dict(record) if isinstance(record, Mapping) else {}


def _revision(name: Any) -> str:
    if not isinstance(name, str):
        return "none"
    return name[:12] + (" and changes" if name.endswith("+") else "")


def _hardware(facts: Mapping[str, Any]) -> str:
    memory, cores = facts.get("memory"), facts.get("cores")
    parts = [facts.get("gpu"), facts.get("processor") or facts.get("machine"), f"{cores} cores" if cores else None,
             f"{memory / 2 ** 30:.0f} GiB" if isinstance(memory, (int, float)) else None]
    return ", ".join(str(p) for p in parts if p)


def _time(seconds: float | None) -> str:
    try:
        return datetime.fromtimestamp(float(seconds or 0), UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "unknown"


# --------------------------------------------------------------------------------------------------------- references

def references(runs: Iterable[Named]) -> Markup:
    """List the papers behind the measures of the runs, with BibTeX."""
    from richter.core.values import bibtex, reference
    from richter.core.values import references as known
    refs = [card(m, s.cards).ref for s in runs for m in s.run.measures]
    names = list(dict.fromkeys(ref.paper for ref in refs if ref is not None and ref.paper in known()))
    if not names:
        return Markup("")
    items = []
    for name in names:
        paper = reference(name)
        where = f". {paper['venue']}, {paper['year']}. "
        items.append(tag("li", f"{', '.join(paper['authors'])}. ", tag("em", paper["title"]), where, tag("code", name)))
    return joined([tag("ul", *items), tag("details", tag("summary", "BibTeX"), tag("pre", bibtex(names)))])
