"""Parameters of a test in which every pair of values occurs, in place of all their combinations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any


def all_pairs(*axes: Iterable[Any]) -> list[Any]:
    """Rows of one value of each axis, such that any two values of two axes stand together in a row. A value that is a tuple is
    spread over several arguments.

    >>> @pytest.mark.parametrize(("kernel", "n", "c", "kind"), all_pairs(KERNELS, [(6, 2), (11, 1)], METRICS))
    """
    values = [list(axis) for axis in axes]
    missing = {(i, a, j, b) for i, j in itertools.combinations(range(len(values)), 2)
               for a in range(len(values[i])) for b in range(len(values[j]))}
    rows = []
    while missing:
        row = max(_candidates(values, missing), key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(row)
        rows.append(row)
    return [_spread(values[i][k] for i, k in enumerate(row)) for row in rows]


def _candidates(values: list[list[Any]], missing: set[tuple[int, int, int, int]]) -> Iterable[tuple[int, ...]]:
    """Rows around the first missing pair; every other axis has the value that is in most missing pairs with those before it."""
    for i, a, j, b in sorted(missing)[:20]:
        row = {i: a, j: b}
        for axis in range(len(values)):
            if axis not in row:
                row[axis] = max(range(len(values[axis])), key=lambda k, axis=axis, row=row: sum(
                    ((axis, k, o, v) if axis < o else (o, v, axis, k)) in missing for o, v in row.items()))
        yield tuple(row[axis] for axis in range(len(values)))


def _pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def _spread(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(part for value in values for part in (value if isinstance(value, tuple) else (value,)))
