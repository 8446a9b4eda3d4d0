"""Pairwise parameters: every pair of values of two axes stands together in a row, in far fewer rows than all combinations."""

from __future__ import annotations

import itertools
import math

import pytest

from pairwise import all_pairs


@pytest.mark.parametrize("sizes", [(2,) * 2, (3, 2, 2), (3, 2, 6, 2, 3), (8, 4, 5), (2,) * 10])
def test_every_pair_of_values_stands_in_a_row(sizes: tuple[int, ...]) -> None:
    axes = [[f"{axis}{k}" for k in range(size)] for axis, size in enumerate(sizes)]
    rows = all_pairs(*axes)
    for i, j in itertools.combinations(range(len(axes)), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(axes[i], axes[j]))
    largest, second = sorted(sizes)[-1:-3:-1]
    assert largest * second <= len(rows) <= min(math.prod(sizes), 1.6 * largest * second + len(sizes))


def test_a_tuple_is_several_arguments() -> None:
    assert sorted(all_pairs([(1, 2), (3, 4)], ["a"])) == [(1, 2, "a"), (3, 4, "a")]
