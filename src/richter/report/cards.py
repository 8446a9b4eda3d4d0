"""The cards that are stored with a run. ``richter.measures.cards.card(name, kept)`` then gives the card of any measure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from richter.core import Card


def cards_of(subject: object) -> dict[str, Card]:
    """Return the cards of a Run (stored among its facts), of an Observer (from its measures), or of a table (none)."""
    facts = getattr(subject, "about", None)
    if isinstance(facts, Mapping):
        return _read(facts.get("cards"))
    if hasattr(subject, "cards"):  # a run of a report, which has been read already
        return dict(subject.cards)
    measures = {m.name: getattr(m, "card", None) for m in getattr(subject, "measures", ())}
    return {name: card for name, card in measures.items() if isinstance(card, Card)}


def cards_of_all(subjects: Iterable[object]) -> dict[str, Card]:
    """Merge the cards of several subjects. If two describe a measure differently, the first one counts."""
    return {name: card for cards in reversed([cards_of(s) for s in subjects]) for name, card in cards.items()}


def _read(records: Any) -> dict[str, Card]:
    """Read the cards stored in a run. Skip damaged records, so that they cannot stop the report."""
    cards = {}
    for name, record in records.items() if isinstance(records, Mapping) else ():
        try:
            cards[str(name)] = Card.from_json(record)
        except ValueError:
            continue
    return cards
