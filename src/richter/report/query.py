"""Parameters of a request to the dashboard: the part of an address after the ``?``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from richter.core import SelectionError

Default = TypeVar("Default", int, None)


class Query:
    """Keys and values; a key may occur several times. Invalid values are refused with one sentence."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self.pairs = tuple(pairs)

    def several(self, key: str) -> list[str]:
        """Return every value of a key, without repetitions."""
        return list(dict.fromkeys(v for k, v in self.pairs if k == key))

    def one(self, key: str) -> str:
        """Value of a parameter that must be given once."""
        values = self.several(key)
        if len(values) != 1:
            raise SelectionError(f"{key}= was given {len(values)} times; this address needs it once.")
        return values[0]

    def whole(self, key: str, low: int, high: int, default: Default) -> int | Default:
        """Read an integer between ``low`` and ``high``, both included."""
        text = next((v for k, v in reversed(self.pairs) if k == key), None)
        if text is None:
            return default
        try:
            number = int(text[:30])
        except ValueError:
            raise SelectionError(f"{key}={text[:100]!r} is not a whole number.") from None
        if not low <= number <= high:
            raise SelectionError(f"{key}={number} is not between {low} and {high}.")
        return number
