"""The ledger as one HTML page: every result of the papers with its verdict, its numbers, and the figures of the user's own runs.

The page needs no other file and no network. Figures are those that `richter run` and `richter check` have stored. If there is
none, the page names the command that draws it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from richter.core.values import reference
from richter.experiments.ledger import UNSURE, VERDICTS, LedgerRow, Records, changed, changes, figures_at, number, places
from richter.experiments.outcomes import bar_of
from richter.experiments.page import out_of_date
from richter.report.markup import Markup, joined, table, tag
from richter.report.svg import STATIC, stored_picture
from richter.runs import Run, find
from richter.runs.format import plain

if TYPE_CHECKING:
    from richter.experiments.frame import Experiment

CHIPS = {"reproduced": "finished", "reproduced in part": "running", "holds on average": "running",
         "too few seeds": "running", "differs": "trouble"}
OUTCOMES = {"fails": "fails, as it must", "fails on average": "fails on average only", "holds": "holds, and must not",
            "invalid": "no number: proves nothing"}


def html(experiments: Iterable[Experiment], stored: Records, store: Path) -> str:
    """Return the page, with the figures of the runs in this store."""
    by_name = {e.name: e for e in experiments}
    rows = places(by_name.values(), stored)
    shelf = {name: newest(e, store) for name, e in by_name.items()}
    papers = list(dict.fromkeys(p.paper for p in rows))
    body = joined([
        tag("header", tag("h1", "What the papers claim, and what was found"), tag("p", _counted(rows)),
            tag("nav", *(tag("a", paper, href=f"#{paper}") for paper in papers),
                tag("a", "verdicts that changed", href="#changed"))),
        tag("main", tag("section", _legend(rows), tag("p", out_of_date(by_name, stored))),
            *(_paper(paper, [p for p in rows if p.paper == paper], by_name, shelf) for paper in papers), _changes(rows)),
        tag("footer", "Made by `richter ledger --html` from the records of the experiments, and from the figures of your "
                      "own runs. The file needs no network.")], "\n")
    page = Template((STATIC / "report.html").read_text(encoding="utf-8"))
    return page.substitute(title="What the papers claim: Richter", body=body,
                           style=(STATIC / "report.css").read_text(encoding="utf-8"))


def newest(e: Experiment, store: Path) -> tuple[str, Run] | None:
    """Return the scale and the last summary of an experiment in this store with unchanged settings, at the paper's scale if
    there is one."""
    for scale in ("paper", "smoke"):
        wanted = json.loads(json.dumps(plain(e.settings(scale))))
        runs = [run for run in find(Path(store) / "experiments" / e.name, depth=1)
                if run.path.name.startswith(f"{scale}-") and run.settings == wanted and run.figures]
        if runs:
            return scale, max(runs, key=lambda run: run.sessions[-1].begun if run.sessions else 0.0)
    return None


def _counted(rows: Iterable[LedgerRow]) -> str:
    """Return the number of results for each verdict, in words."""
    counts = Counter(p.verdict for p in rows)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])


def _legend(rows: list[LedgerRow]) -> Markup:
    """Return a table that explains the verdicts."""
    counts = Counter(p.verdict for p in rows)
    return table(["verdict", "which says", "results"], [[verdict, words, counts[verdict]] for verdict, words in VERDICTS.items()])


def _paper(paper: str, rows: list[LedgerRow], by_name: Mapping[str, Experiment],
           shelf: Mapping[str, tuple[str, Run] | None]) -> Markup:
    """Return a paper's section: results with an experiment one by one, the others in a list."""
    open_ = [p for p in rows if p.verdict == "no experiment yet"]
    done = [p for p in rows if p not in open_]
    rest = tag("details", tag("summary", f"{len(open_)} results without an experiment yet"),
               table(["place", "what it shows"], [[p.place, p.title] for p in open_])) if open_ else ""
    return tag("section", tag("h2", f"{paper}: {reference(paper)['title']}"),
               *(_place(p, [by_name[name] for name in p.experiments], shelf) for p in done), rest, id=paper)


def _place(p: LedgerRow, experiments: list[Experiment], shelf: Mapping[str, tuple[str, Run] | None]) -> Markup:
    """Return the section of one result: verdict, figures, claims and remarks."""
    heads = ["claim", "ours", "bar", "in the paper", "verdict"]
    chip = tag("span", p.verdict, class_=f"chip {CHIPS.get(p.verdict, '')}".strip())
    return joined([tag("h3", p.place, chip), tag("p", p.title),
                   *(_figures(p.place, e, shelf[e.name]) for e in experiments),
                   table(heads, [_claim(c) for c in p.claims]) if p.claims else "",
                   *(tag("p", remark, class_="soft") for remark in p.remarks),
                   tag("p", f"Numbers from the record of {'; '.join(p.sources)}.", class_="soft") if p.sources else "",
                   *(tag("p", f"The record is {state}.", class_="soft trouble") for state in p.stale)])


def _figures(place: str, e: Experiment, stored: tuple[str, Run] | None) -> Markup:
    """Return the stored drawings of a place, or the command that makes them."""
    names = figures_at(place, e)
    if not names:
        return tag("p", "No drawing of its own.", class_="soft")
    if stored is None:
        command = f"richter run {e.name}"
        return tag("p", "Not drawn on this machine yet: ", tag("code", command), " takes a minute or two; ",
                   tag("code", f"{command} --scale paper"), " has the paper's sizes.", class_="soft")
    scale, run = stored
    drawn = [name for name, kind in run.figures if kind == "svg" and name in names]
    lacking = [tag("p", f"{name}: not among the drawings of this run; run it again.", class_="soft")
               for name in names if name not in drawn]
    words = f"{e.ref.paper} {place}, {scale} scale, from your run {run.path.name} of {e.name}"
    return joined([*(stored_picture(run, name, "svg", f"{name}: {words}") for name in drawn), *lacking])


def _claim(c: Mapping[str, Any]) -> list[object]:
    """Return the table row of one claim."""
    notes = [f"Differs: {c.get('differs') or 'not explained yet'}"] if not c["holds"] else []
    notes += [f"Once: {c['was']}"] if c.get("was") else []
    notes += [f"On {rival['text']}: {'no number' if rival['value'] is None else format(rival['value'], '.3g')}, "
              f"{OUTCOMES.get(rival['outcome'], rival['outcome'])}" for rival in c.get("controls", ())]
    text = joined([c["text"], *(part for note in notes for part in (tag("br"), tag("span", note, class_="soft")))])
    look = "trouble" if not c["holds"] else "between" if c["verdict"] in UNSURE else "rich"
    return [text, number(c), str(bar_of(c)), c["paper"], tag("span", c["verdict"], class_=look)]


def _changes(rows: Iterable[LedgerRow]) -> Markup:
    """Return a table of the verdicts that changed since the earlier ledger."""
    lines = [[f"{row.paper} {row.place}", was, row.verdict, why or "not explained yet"] for row, was, why in changed(rows)]
    since = f"Since the ledger of {changes()['date']}. {changes()['words']}"
    return tag("section", tag("h2", "Verdicts that changed"), tag("p", since),
               table(["place", "was", "is", "why"], lines), id="changed")
