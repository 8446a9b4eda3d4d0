"""The ledger as HTML pages: a first page with a line for each claim, folded under its place, and a page for each place.

The pages need no network. Figures are those that `richter run` and `richter check` have stored. If there is none, the page of the
place names the command that draws it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from richter.core.values import reference
from richter.experiments.ledger import LedgerLine, LedgerPlace, Records, counted, figure_name, figures_at, places
from richter.experiments.outcomes import OUTCOMES, PROTOCOLS, bar_of
from richter.experiments.page import REPLICATIONS, TITLE, glossary, meaning_of, ours, out_of_date, protocol_of, shortened, summary
from richter.report.markup import Markup, joined, table, tag
from richter.report.svg import STATIC, stored_picture
from richter.runs import Run, find
from richter.runs.format import plain

if TYPE_CHECKING:
    from richter.experiments.frame import Experiment

LOOKS = {"reproduced": "finished", "reproduced after correction": "finished", "partly reproduced": "running",
         "direction only": "running", "contradicted": "trouble", "does not hold": "trouble", "holds": "finished"}
CONTROLS = {"fails": "fails, as it must", "fails on average": "fails on average only", "holds": "passes too",
            "invalid": "no number: proves nothing"}
Shelf = Mapping[str, "tuple[str, Run] | None"]


def html(experiments: Iterable[Experiment], stored: Records, store: Path, paper: str = "") -> dict[str, str]:
    """Return the pages by the names of their files, with the figures of the runs in this store."""
    by_name = {e.name: e for e in experiments}
    rows = places(by_name.values(), stored, paper)
    shelf = {e.name: newest(e, store) for e in by_name.values() if not paper or e.ref.paper == paper}
    pages = {file_of(row): _shell(f"{row.paper} {row.place}", _place_page(row, by_name, stored, shelf)) for row in rows}
    return {"index.html": _shell(TITLE, _first(rows, by_name, stored)), **pages}


def file_of(row: LedgerPlace) -> str:
    """Return the name of a place's page."""
    return f"{figure_name(row.paper, row.place)}.html"


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


def _shell(title: str, body: Markup) -> str:
    """Return a whole page."""
    style = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in ("report.css", "ledger.css"))
    return Template((STATIC / "report.html").read_text(encoding="utf-8")).substitute(title=f"{title}: Richter", body=body,
                                                                                    style=style)


# ------------------------------------------------------------------------------------------------------------ the first page

def _first(rows: Sequence[LedgerPlace], by_name: Mapping[str, Experiment], stored: Records) -> Markup:
    """Return the body of the first page."""
    papers = list(dict.fromkeys(row.paper for row in rows))
    lines = [line for row in rows for line in row.lines]
    words = joined(tag("details", tag("summary", f"the words of the {axis}"), table(["word", "which says"], entries))
                   for axis, entries in glossary())
    return joined([
        tag("header", tag("h1", TITLE), tag("p", summary(rows)),
            tag("nav", *(tag("a", name, href=f"#{name}") for name in papers))),
        tag("main", tag("section", _matrix(lines), tag("p", REPLICATIONS), words,
                        tag("p", out_of_date(by_name, stored), class_="soft")),
            *(_paper(name, [row for row in rows if row.paper == name]) for name in papers)),
        tag("footer", "Made by `richter ledger --html` from the records of the experiments. The pages need no network.")], "\n")


def _matrix(lines: Iterable[LedgerLine]) -> Markup:
    """Return a table of the papers' claims: outcomes down, protocols across."""
    counts = counted(lines)
    rows = [(word, [counts.get((word, kind), 0) for kind in PROTOCOLS]) for word in OUTCOMES]
    return table(["claims", *PROTOCOLS, "all"], [[word, *(n or "" for n in row), sum(row)] for word, row in rows if sum(row)],
                 class_="matrix")


def _paper(name: str, rows: list[LedgerPlace]) -> Markup:
    """Return the section of a paper: its matrix, and its places."""
    lines = [line for row in rows for line in row.lines]
    return tag("section", tag("h2", f"{name}: {reference(name)['title']}"), _matrix(lines) if counted(lines) else "",
               *(_folded(row) for row in rows), id=name)


def _folded(row: LedgerPlace) -> Markup:
    """Return a place on one line, under which its claims are folded."""
    count = f"{row.reproduced} reproduced" if row.reproduced else ""
    head = tag("summary", tag("b", row.place), row.title, chip(row.outcome or "claims of our own"),
               tag("span", count, class_="soft"))
    claims, own = row.claims, [line for line in row.lines if line.own]
    notes = [row.nothing, row.absent, *(f"Run: {words}" for words in row.partial)]
    return tag("details", head, *(tag("p", note, class_="soft") for note in notes if note),
               _claims(claims) if claims else "", *([tag("p", "Claims of our own", class_="soft"), _claims(own)] if own else []),
               tag("p", tag("a", "figure, settings and details", href=file_of(row))), class_="place")


def _claims(lines: Sequence[LedgerLine]) -> Markup:
    """Return a table of claims, one line each. On a narrow screen each cell has its heading before it."""
    heads = ("claim", "ours", "outcome", "protocol: this run / the paper's", "meaning", "reason", "record")
    rows = []
    for line in lines:
        mark = tag("span", line.outcome, class_=LOOKS.get(line.outcome, "between").replace("finished", "rich").replace(
            "running", "between"))
        cells = (ours(line), mark, "" if line.own else protocol_of(line), meaning_of(line), line.reason, line.source)
        rows.append(tag("tr", tag("th", shortened(line.says), scope="row"),
                        *(tag("td", cell, data_head=head.partition(":")[0])
                          for head, cell in zip(heads[1:], cells, strict=True))))
    return tag("table", tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads))), tag("tbody", *rows),
               class_="claims")


def chip(word: str) -> Markup:
    return tag("span", word, class_=f"chip {LOOKS.get(word, '')}".strip())


# ---------------------------------------------------------------------------------------------------------- a place's own page

def _place_page(row: LedgerPlace, by_name: Mapping[str, Experiment], stored: Records, shelf: Shelf) -> Markup:
    """Return the body of a place's page: figures, settings, what was tried, and every claim in detail."""
    notes = [row.nothing, row.absent, *(f"Run: {words}." for words in row.partial),
             *(f"Not here: {words}." for words in row.missing), *(f"Tried before: {words}." for words in row.tried)]
    return joined([
        tag("header", tag("h1", f"{row.paper}, {row.place}", chip(row.outcome or "claims of our own")), tag("p", row.title),
            tag("nav", tag("a", "all places", href=f"index.html#{row.paper}"), tag("span", reference(row.paper)["title"]))),
        tag("main", tag("section", *(_figures(row.place, by_name[name], shelf[name]) for name in row.experiments),
                        *(tag("p", note) for note in notes if note),
                        *(tag("p", f"Numbers from the record of {source}.", class_="soft") for source in row.sources),
                        *(tag("p", f"The record is out of date. {state}.", class_="soft trouble") for state in row.stale)),
            tag("section", *(_details(line) for line in row.lines)),
            *(_settings(name, stored) for name in row.experiments))], "\n")


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


def _details(line: LedgerLine) -> Markup:
    """Return all that is known of a claim."""
    c = line.record
    about: list[tuple[str, object]] = [("whose", "ours" if line.own else "the paper's"), ("we measure", line.measured),
                                       ("our number", line.number)]
    if c:
        values = c.get("values", {})
        about += [("the paper's number", c["paper"]), ("bar", bar_of(c)), ("the bar comes from", c["source"]),
                  (f"each {c.get('over', '')}", ", ".join("none" if v is None else f"{v:.3g}" for v in values.values())),
                  ("why it differs", c.get("differs", "")), ("earlier", c.get("was", ""))]
    about += [("protocol", "" if line.own else protocol_of(line)), ("meaning", str(line.meaning)), ("reason", line.reason),
              ("second route", line.second), ("not called contradicted, because", "; ".join(line.undecided)),
              ("record", line.source)]
    rivals = [[control["text"], "no number" if control["value"] is None else f"{control['value']:.3g}",
               CONTROLS.get(control["outcome"], control["outcome"])] for control in c.get("controls", ())]
    return tag("div", tag("h3", line.says, chip(line.outcome)),
               tag("dl", *(joined([tag("dt", word), tag("dd", text)]) for word, text in about if str(text)), class_="settings"),
               table(["the same test on", "number", ""], rivals) if rivals else "", class_="claim")


def _settings(name: str, stored: Records) -> Markup:
    """Return the settings of an experiment's record."""
    record = next((stored[name, scale] for scale in ("paper", "smoke") if (name, scale) in stored), None)
    if record is None:
        return Markup("")
    pairs = [(key, json.dumps(value)) for key, value in record.get("settings", {}).items()]
    return tag("section", tag("details", tag("summary", f"settings of {name} at {record['scale']} scale"),
                              tag("dl", *(joined([tag("dt", key), tag("dd", shortened(value))]) for key, value in pairs),
                                  class_="settings")))
