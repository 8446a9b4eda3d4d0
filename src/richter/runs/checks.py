"""What may be written to a run: whole steps, names of text, arrays of numbers. The rest is refused in a sentence."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.core import StoreError


def whole_step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise StoreError(f"step={step!r}: what is written to a run has a whole number as its step.") from None
    if not -2 ** 63 <= number < 2 ** 63:
        raise StoreError(f"step={step!r}: a step has at most 64 bits.")
    return number


def plain_text(text: Any) -> str:
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError):
        raise StoreError(f"{text!r}: names and notes of a run are text, of characters that UTF-8 has.") from None
    return str(text)


def array_of_numbers(values: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as why:
        raise StoreError(f"a {type(values).__name__} that is no array of numbers cannot be stored as one: {why}.") from why
