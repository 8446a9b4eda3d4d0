"""Answers to the requests of the dashboard's page, by the path after ``api/``: the contents of runs, and their views."""

from __future__ import annotations

from typing import Any

from richter.core import RichterError, SelectionError, StoreError
from richter.measures.cards import SHOWN_FIRST, card, panels
from richter.report.cards import cards_of
from richter.report.query import Query
from richter.report.shelf import DAMAGE, Chosen
from richter.report.views import Answer, Panel, tabs

FIRST = ("magnitude", "linearisation_gap", "feature_change_cka", *SHOWN_FIRST[1:])  # measures that the page shows first


def run(runs: Chosen, query: Query) -> Any:
    """Return the contents of one run: measures in the order of the report with the texts of their cards, layers, scalars, and
    the measures that the page shows first."""
    name, opened = runs.one()
    run_cards = cards_of(opened)
    measures = [m for *_, panel in panels(opened.measures, run_cards) for m in panel]
    cards = {m: card(m, run_cards) for m in measures}
    return {"run": name, "measures": measures, "layers": opened.layers, "scalars": opened.scalar_names,
            "cards": {m: {"title": c.heading, "sentence": c.sentence} for m, c in cards.items()},
            "first": [m for m in FIRST if m in measures] or measures[:len(FIRST)]}


def views(runs: Chosen, query: Query) -> Any:
    """Return the tabs, in their order, with the script that draws each of them."""
    return {"views": [{"name": v.name, "title": v.title, "script": v.script} for v in tabs()]}


def answers() -> dict[str, Answer]:
    """Map each path after ``api/`` to the function that answers it."""
    handlers: dict[str, Answer] = {"run": run, "views": views}
    for view in tabs():
        for path, answer in ((view.name, view.answer), *view.more.items()):
            if path in handlers or path == "runs":
                raise SelectionError(f"the view {view.name!r} answers to {path!r}, and so does another. Choose another name.")
            handlers[path] = answer
    return handlers


def answered(path: str, answer: Answer, runs: Chosen, query: Query) -> Any:
    """Return the answer about these runs. An error while reading a file of unknown origin becomes one sentence."""
    try:
        with runs:
            reply = answer(runs, query)
            return {"panels": [panel.to_json() for panel in reply]} if _are_panels(reply) else reply
    except RichterError:
        raise
    except DAMAGE as why:
        raise StoreError(f"the view {path!r} cannot show the run {runs.current!r}: {type(why).__name__}: {why}. Either the run "
                         f"is damaged, or the view expects other contents.") from why


def _are_panels(reply: Any) -> bool:
    """Return whether a reply is a list of panels."""
    return isinstance(reply, list) and all(isinstance(panel, Panel) for panel in reply)
