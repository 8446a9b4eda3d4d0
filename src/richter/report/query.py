"""What a page asks for beside the runs: the words after the ? of an address."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from richter.core import SelectionError

Default = TypeVar("Default", int, None)


class Query:
    """Keys and their values; a key may be given several times. What cannot be read as asked is refused with a sentence."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self.pairs = tuple(pairs)

    def several(self, key: str) -> list[str]:
        """Every value of a key, each once."""
        return list(dict.fromkeys(v for k, v in self.pairs if k == key))

    def one(self, key: str) -> str:
        values = self.several(key)
        if len(values) != 1:
            raise SelectionError(f"{key}= was given {len(values)} times; this address needs it once.")
        return values[0]

    def whole(self, key: str, low: int, high: int, default: Default) -> int | Default:
        """A whole number between these, ends included."""
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
