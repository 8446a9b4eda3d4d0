"""What the dashboard's page asks for, by the word after ``api/``: what the runs hold, and what its views show of them."""

from __future__ import annotations

from typing import Any

from richter.core import RichterError, SelectionError, StoreError
from richter.measures.cards import SHOWN_FIRST, card, panels
from richter.report.cards import cards_of
from richter.report.query import Query
from richter.report.shelf import DAMAGE, Chosen
from richter.report.views import Answer, Panel, tabs


def run(runs: Chosen, query: Query) -> Any:
    """What one run holds: its measures in the order of the report, with what their cards say, layers and scalars, and which
    measures to show first."""
    name, opened = runs.one()
    kept = cards_of(opened)
    measures = [m for *_, mine in panels(opened.measures, kept) for m in mine]
    cards = {m: card(m, kept) for m in measures}
    return {"run": name, "measures": measures, "layers": opened.layers, "scalars": opened.names,
            "cards": {m: {"title": c.heading, "sentence": c.sentence} for m, c in cards.items()},
            "first": [m for m in SHOWN_FIRST if m in measures] or measures[:len(SHOWN_FIRST)]}


def views(runs: Chosen, query: Query) -> Any:
    """The tabs, in their order, and the script that draws each."""
    return {"views": [{"name": v.name, "title": v.title, "script": v.script} for v in tabs()]}


def answers() -> dict[str, Answer]:
    """By the word after ``api/``."""
    known: dict[str, Answer] = {"run": run, "views": views}
    for view in tabs():
        for path, answer in ((view.name, view.answer), *view.more.items()):
            if path in known or path == "runs":
                raise SelectionError(f"the view {view.name!r} answers to {path!r}, and so does another. Choose another name.")
            known[path] = answer
    return known


def answered(path: str, answer: Answer, runs: Chosen, query: Query) -> Any:
    """The answer about these runs. What goes wrong in reading a file of unknown origin is said in a sentence."""
    try:
        with runs:
            reply = answer(runs, query)
            return {"panels": [panel.to_json() for panel in reply]} if _are_panels(reply) else reply
    except RichterError:
        raise
    except DAMAGE as why:
        raise StoreError(f"{path!r} cannot be shown of the run {runs.current!r}: {type(why).__name__}: {why}. Either the run is "
                         f"damaged, or the view does not expect what it holds.") from why


def _are_panels(reply: Any) -> bool:
    return isinstance(reply, list) and all(isinstance(panel, Panel) for panel in reply)
