"""Rows as bytes and back: all rows of one write (a block, of many curves) or a piece of one curve (a chunk), column after column.

A body is its flags, the number of rows, the steps (first and stride, where they are even), the curves (not in a chunk), values,
and only where there are any: errors, numbers of notes, marks. NaN is NaN; no note is 0; the marks are numbered as in ``MARKS``.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from richter.core import StoreError

SERIES, EVEN, ERRORS, NOTES, MARKED = 1, 2, 4, 8, 16  # flags
HEAD = struct.Struct("<BI")
MARKS = ("exact", "trivial", "estimated", "bound", "undefined", "refused", "idle", "failed")  # a new one goes to the end


class Columns(NamedTuple):
    """Rows: curve (None: all of one), step, value, error, note and mark (None: no row has one)."""

    series: NDArray[np.int64] | None
    step: NDArray[np.int64]
    value: NDArray[np.float64]
    error: NDArray[np.float64]
    note: NDArray[np.int64] | None = None
    mark: NDArray[np.int64] | None = None

    def taken(self, which: Any) -> Columns:
        columns: list[Any] = [None if column is None else column[which] for column in self]
        return Columns(*columns)


NONE = Columns(None, np.empty(0, np.int64), np.empty(0), np.empty(0))


def pack(c: Columns) -> bytes:
    n = len(c.step)
    differences = np.diff(c.step)  # modulo 2^64, as they are added again
    even = bool((differences == differences[:1]).all())
    steps = np.append(c.step[:1], differences[:1] if n > 1 else 0) if even else c.step
    error = None if np.isnan(c.error).all() else c.error
    note, mark = (column if column is not None and column.any() else None for column in (c.note, c.mark))
    flags = sum(flag for flag, given in ((SERIES, c.series is not None), (EVEN, even), (ERRORS, error is not None),
                                         (NOTES, note is not None), (MARKED, mark is not None)) if given)
    parts = (steps, "<i8"), (c.series, "<u4"), (c.value, "<f8"), (error, "<f8"), (note, "<u4"), (mark, "u1")
    return HEAD.pack(flags, n) + b"".join(column.astype(kind).tobytes() for column, kind in parts if column is not None)


@lru_cache(64)
def _form(count: int) -> struct.Struct:
    return struct.Struct(f"<BIqq{count}I{count}d")


def pack_step(step: int, series: Sequence[int], values: Iterable[float]) -> bytes:
    """The same as ``pack`` of values at one step, without an array for each column."""
    return _form(len(series)).pack(SERIES | EVEN, len(series), step, 0, *series, *values)


def head(body: bytes) -> tuple[int, int]:
    """Flags and number of rows."""
    if len(body) < HEAD.size:
        raise StoreError("a block of its rows is cut off")
    flags, n = HEAD.unpack_from(body)
    return flags, n


def unpack(body: bytes) -> Columns:
    """Refuses what is not the body of rows, before anything is made of it."""
    flags, n = head(body)
    given = [bool(flags & flag) for flag in (SERIES, ERRORS, NOTES, MARKED)]
    widths = [("<i8", 2 if flags & EVEN else n), ("<u4", n * given[0]), ("<f8", n), ("<f8", n * given[1]), ("<u4", n * given[2]),
              ("u1", n * given[3])]
    if not n or flags >= 32 or len(body) != HEAD.size + sum(np.dtype(kind).itemsize * count for kind, count in widths):
        raise StoreError("a block of its rows has another size than it says")
    columns, place = [], HEAD.size
    for kind, count in widths:
        columns.append(np.frombuffer(body, kind, count, place))
        place += columns[-1].nbytes
    step, series, value, error, note, mark = columns
    if flags & EVEN:
        step = step[0] + step[1] * np.arange(n)
    return Columns(_whole(series), step.astype(np.int64), value.astype(np.float64),
                   error.astype(np.float64) if len(error) else np.full(n, np.nan), _whole(note), _whole(mark))


def _whole(column: NDArray[Any]) -> NDArray[np.int64] | None:
    return column.astype(np.int64) if len(column) else None


def unpack_all(bodies: Sequence[bytes]) -> Columns:
    """Blocks one after the other. Those of the same form (the scalars of each step) are read together."""
    pieces = []
    for (flags, n, _), group in itertools.groupby(bodies, key=lambda body: (*head(body), len(body))):
        alike = list(group)
        if len(alike) > 2 and flags == SERIES | EVEN and len(alike[0]) == HEAD.size + 16 + 12 * n:
            kind = np.dtype([("head", "u1", HEAD.size), ("step", "<i8", 2), ("series", "<u4", (n,)), ("value", "<f8", (n,))])
            rows = np.frombuffer(b"".join(alike), kind)
            if not rows["step"][:, 1].any():
                pieces.append(Columns(rows["series"].astype(np.int64).reshape(-1), np.repeat(rows["step"][:, 0], n),
                                      rows["value"].astype(np.float64).reshape(-1), np.full(n * len(alike), np.nan)))
                continue
        pieces += map(unpack, alike)
    return joined(pieces)


def joined(pieces: Sequence[Columns]) -> Columns:
    """One after the other."""
    if len(pieces) == 1:
        return pieces[0]
    if not pieces:
        return NONE

    def column(i: int) -> Any:
        if all(piece[i] is None for piece in pieces):
            return None
        return np.concatenate([np.zeros(len(piece.step), np.int64) if piece[i] is None else piece[i] for piece in pieces])

    return Columns(*(column(i) for i in range(6)))


def latest(c: Columns) -> Columns:
    """Of one curve in the order of writing: by step, and of rows for the same step the last."""
    if (c.step[1:] > c.step[:-1]).all():
        return c
    order = np.argsort(c.step, kind="stable")
    step = c.step[order]
    return c.taken(order[np.append(step[1:] != step[:-1], True)])


def by_curve(c: Columns) -> dict[int, Columns]:
    """The rows of each curve, in the order of writing."""
    if c.series is None or not len(c.series):
        return {}
    order = np.argsort(c.series, kind="stable")
    series = c.series[order]
    starts = np.flatnonzero(np.append(True, series[1:] != series[:-1]))
    rest = c._replace(series=None)
    return {int(series[a]): rest.taken(order[a:b]) for a, b in itertools.pairwise([*starts.tolist(), len(series)])}


# ---------------------------------------------------------------------------------------------------------------- sums
# Checksums of what a run holds, so that a bit that flips on a disk is an error and never another number.
#
# Every row of a small table has a sum of its own, every block of numbers one over its bytes, and the ledger says of each table
# how
# many rows it has and what their sums add up to (modulo 2^64, so that a change of one row is one addition): a row that a damaged
# tree hides, shows twice or shows as it once was is noticed as well. Sums guard against accidents; whoever makes a file to do
# harm
# can compute them, so nothing else is trusted for their sake.

TABLES = ("meta", "sessions", "series", "notes", "snapshots", "arrays", "claims", "figures")  # those in the ledger
LEDGER = struct.Struct(f"<{2 * len(TABLES)}Qq")
SUM_TAIL = struct.Struct("<qq8s")
WRAP = 2 ** 64


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()


def data_sum(data: bytes) -> int:
    """Of bytes, as a number that SQLite can hold."""
    return int.from_bytes(digest(data), "little", signed=True)


def row_sum(table: str, *values: int | float | str | None) -> int:
    """Of one row: the values as SQLite gives them back."""
    return data_sum(repr((table, *values)).encode("utf-8", "backslashreplace"))


class Tally(NamedTuple):
    """How many rows, and what their sums add up to."""

    number: int = 0
    total: int = 0

    def plus(self, row: int) -> Tally:
        return Tally(self.number + 1, (self.total + row) % WRAP)

    def minus(self, row: int) -> Tally:
        return Tally(self.number - 1, (self.total - row) % WRAP)


class Ledger(NamedTuple):
    """The tally of each table, and the last block of rows there was when it was written."""

    tallies: Mapping[str, Tally]
    last: int

    def packed(self) -> bytes:
        flat = [n for table in TABLES for n in self.tallies[table]]
        data = LEDGER.pack(*flat, self.last)
        return data + digest(data)

    @classmethod
    def unpacked(cls, data: bytes) -> Ledger:
        body = data[:-8]
        if len(body) != LEDGER.size or digest(body) != data[-8:]:
            raise StoreError("its ledger is not what was written")
        *flat, last = LEDGER.unpack(body)
        return cls({table: Tally(*flat[2 * i:2 * i + 2]) for i, table in enumerate(TABLES)}, last)


class Tail(NamedTuple):
    """The end of the blocks that were appended: the number of the block before the first, of the last, and the sum of the last,
    into which go those of all before it."""

    base: int
    last: int
    sum: bytes

    @classmethod
    def empty(cls, base: int) -> Tail:
        return cls(base, base, digest(base.to_bytes(8, "little", signed=True)))

    def after(self, body: bytes) -> Tail:
        """When one more block is appended."""
        return Tail(self.base, self.last + 1, digest(self.sum + body))

    def packed(self) -> bytes:
        return SUM_TAIL.pack(*self)

    @classmethod
    def unpacked(cls, data: bytes) -> Tail:
        if len(data) != SUM_TAIL.size:
            raise StoreError("the end of its rows is not what was written")
        return cls(*SUM_TAIL.unpack(data))
