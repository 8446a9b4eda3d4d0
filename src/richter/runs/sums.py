"""Checksums of what a run holds, so that a bit that flips on a disk is an error and never another number.

Every row of a small table has a sum of its own, every block of numbers one over its bytes, and the ledger says of each table how
many rows it has and what their sums add up to (modulo 2^64, so that a change of one row is one addition): a row that a damaged
tree hides, shows twice or shows as it once was is noticed as well. Sums guard against accidents; whoever makes a file to do harm
can compute them, so nothing else is trusted for their sake.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

from richter.core import StoreError

TABLES = ("meta", "sessions", "series", "notes", "snapshots", "arrays", "claims", "figures")  # those in the ledger
LEDGER = struct.Struct(f"<{2 * len(TABLES)}Qq")
TAIL = struct.Struct("<qq8s")
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
        return TAIL.pack(*self)

    @classmethod
    def unpacked(cls, data: bytes) -> Tail:
        if len(data) != TAIL.size:
            raise StoreError("the end of its rows is not what was written")
        return cls(*TAIL.unpack(data))
