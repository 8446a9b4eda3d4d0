"""Text: tables for a terminal, and what is written in one place and read in another."""

from __future__ import annotations

from collections.abc import Collection, Sequence

ASSUMED_LOSS = "squared error: whether it is the training's loss is not known"  # beside such a number


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Columns as wide as they need to be; those in ``right`` flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) if i in right else cell.ljust(w)
                               for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows)
