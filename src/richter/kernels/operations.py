"""How many operations each contraction of a kernel takes, and how large its tiles are; the cheapest one is chosen by counting."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Outputs = Literal["trace", "diagonal", "full"]
Way = Literal["pairs", "gradients", "features"]
OUTPUTS = ("trace", "diagonal", "full")
ROWS = 1024  # of a tile of products
SQUARE, PARTS = 96, 6  # rows of a block of a symmetric product of short rows, and blocks at most: more gain less than they cost
SHORT = 2  # the short products of pairs of positions and outputs take so many times as long as others of as many operations
NUMBERS = 2 ** 21  # in a tile of gradients: it should stay in the cache between being made and being used


@dataclass(frozen=True)
class Size:
    """What the cost of one map's kernel depends on: n examples of s positions against m of t, v cotangents."""

    kind: str
    n: int
    m: int
    s: int
    t: int
    v: int
    d_in: int
    d_out: int
    groups: int = 1
    same: bool = True

    @property
    def p(self) -> int:
        return self.d_out * (1 if self.kind == "diagonal" else self.d_in // self.groups)


def costs(z: Size, outputs: Outputs) -> dict[Way, tuple[float, int]]:
    """For each exact contraction of one map: (operations, numbers held while it runs)."""
    half, sides = (0.5, z.n * z.s) if z.same else (1.0, z.n * z.s + z.m * z.t)
    v2 = z.v * z.v if outputs == "full" else z.v
    width = min(z.d_in, sides) * z.d_out if z.kind == "lookup" else z.p
    making = 2 * z.v * sides * (z.d_out if z.kind in ("lookup", "diagonal") else z.p)
    by_gradients = making + half * 2 * v2 * z.n * z.m * width
    tile = 2 * min(max(NUMBERS, (z.v if outputs == "full" else 1) * max(z.n, z.m) * 8 * max(1, width // z.d_out)),
                   (z.v if outputs == "full" else 1) * max(z.n, z.m) * width)
    product = _product(z, outputs)
    if z.kind not in ("dense", "lookup"):
        return {"features": (by_gradients, tile + product)}
    reading = 1 if z.kind == "lookup" else z.d_in
    if outputs != "full" or z.s == z.t == 1:
        by_pairs = half * 2 * z.n * z.m * z.s * z.t * (reading + v2 * z.d_out)
        held = (2 * z.v + 1 if outputs == "diagonal" else 2) * z.n * z.m * z.s * z.t
    else:
        by_pairs = half * 2 * z.n * z.m * z.s * (z.t * reading + z.t * z.v * z.d_out + v2 * z.d_out)
        held = z.v * z.v * z.n * z.m + 2 * z.v * z.m * z.s * z.d_out * examples_at_once(z.n, z.v * z.m * z.s * z.d_out)
    return {"pairs": (by_pairs, held + (product if outputs == "full" else 0)), "gradients": (by_gradients, tile + product)}


def _product(z: Size, outputs: Outputs) -> int:
    """Numbers of the largest product that ``add_products`` makes at a time."""
    if outputs == "full":
        return min(tile_rows(z.v * z.n), z.v * z.n) * min(max(4 * ROWS, z.m), z.v * z.m)
    return (z.v if outputs == "diagonal" else 1) * min(tile_rows(z.n) if z.same else ROWS, z.n) * min(max(4 * ROWS, z.n), z.m)


def widths(kind: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """(d_in, d_out, groups) of a map with a matrix of this shape."""
    if kind == "grouped":
        return shape[0] * shape[2], shape[0] * shape[1], shape[0]
    return (1 if kind == "diagonal" else shape[-1]), shape[0], 1


@functools.lru_cache(maxsize=1024)
def cheapest(z: Size, outputs: Outputs) -> Way:
    found = costs(z, outputs)
    short = SHORT if outputs == "full" and z.s * z.t > 1 else 1
    return min(found, key=lambda way: found[way][0] * (short if way == "pairs" else 1))


def examples_at_once(n: int, each: int) -> int:
    """So many examples at a time when each of them takes ``each`` numbers."""
    return min(n, max(1, NUMBERS // each))


def tile_rows(n: int) -> int:
    """Rows of a tile of a symmetric product of n rows: few enough that little of it is computed twice, and enough for a product
    at full speed."""
    return min(ROWS, max(64, n // 5))
