"""Text: tables for a terminal, and what is written in one place and read in another."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

ASSUMED_LOSS = "squared error: whether it is the training's loss is not known"  # beside such a number
# beside what a network answers in eval mode while its norms normalise by numbers that are not the data's
NO_DATA, FEW_BATCHES = "of its norms have seen no data", "of its norms have seen few batches"
NO_HIDDEN = "no hidden layer: every linear map reads the model's input"  # in the place of a change of features
NO_MAP = "used, but not as a linear map that Richter knows"  # beside a weight
MOVED_BUFFERS = "buffers moved besides the weights"  # beside a comparison with the initial network


def few_of(names: Sequence[str], most: int = 4) -> str:
    """The first of them, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, lines: bool = True) -> str:
    """What a stranger may have written, for a terminal: characters that steer it, turn the direction of writing or are none at
    all are shown by their numbers. Without ``lines`` it stays one line."""
    seen = HIDDEN.sub(lambda c: c[0].encode("unicode_escape", "backslashreplace").decode(), text)
    return seen if lines else seen.replace("\n", "\\n").replace("\t", "\\t")


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Columns as wide as they need to be; those in ``right`` flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) if i in right else cell.ljust(w)
                               for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows)
