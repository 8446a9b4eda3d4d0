"""The cards that came with a run. ``richter.measures.cards.card(name, kept)`` then gives the card of any measure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from richter.core import Card


def cards_of(subject: object) -> dict[str, Card]:
    """Of a Run, which keeps them among its facts; of an Observer, whose measures have them; of a table, which has none."""
    facts = getattr(subject, "about", None)
    if isinstance(facts, Mapping):
        return _read(facts.get("cards"))
    if hasattr(subject, "cards"):  # a run of a report, read already
        return dict(subject.cards)
    measures = {m.name: getattr(m, "card", None) for m in getattr(subject, "measures", ())}
    return {name: card for name, card in measures.items() if isinstance(card, Card)}


def cards_of_all(subjects: Iterable[object]) -> dict[str, Card]:
    """Of several; where two describe a measure differently, the first."""
    return {name: card for kept in reversed([cards_of(s) for s in subjects]) for name, card in kept.items()}


def _read(records: Any) -> dict[str, Card]:
    """What a run says about its measures. A record that is no card is left out: a damaged one shall not end the report."""
    kept = {}
    for name, record in records.items() if isinstance(records, Mapping) else ():
        try:
            kept[str(name)] = Card.from_json(record)
        except ValueError:
            continue
    return kept
