"""Questions to a database of unknown origin: each comes to an end, and each answer is of the types that it should be of."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from richter.core import SelectionError, StoreError
from richter.runs.format import DATABASE, Stamp, bound, explained, stamp

ROW = 8  # bytes of a row at least
OFTEN = 2  # times that a page may be read in one state of a file: only the ledger is, more than once
# what a column must hold, by a letter: a file of unknown origin can hold anything anywhere
TYPES: Mapping[str, set[type]] = {"i": {int}, "s": {int, type(None)}, "n": {int, float, type(None)}, "t": {str},
                                  "?": {str, type(None)}, "b": {bytes}, "o": {bytes, type(None)}}


def typed(folder: Path, rows: list[Any], kinds: str) -> list[Any]:
    """``kinds``: a letter of TYPES for each column."""
    for column, kind in enumerate(kinds):
        if other := {type(row[column]) for row in rows} - TYPES[kind]:
            raise StoreError(f"the run {folder} holds {other.pop().__name__} where something else belongs. It is damaged.")
    return rows


class Account:
    """What has been read of one state of a file. Every page belongs to one row, so that all answers together hold no more than
    the file does; in one that was made to do harm many rows lead to the same pages, and a small file to more than there is
    memory."""

    def __init__(self) -> None:
        self.read = 0

    def fetched(self, cursor: sqlite3.Cursor, size: int) -> list[Any]:
        """All rows of an answer; ``size``: that of the file."""
        rows = []
        for row in cursor:
            rows.append(row)
            self.read += ROW + sum(len(value) for value in row if isinstance(value, (str, bytes)))
            if self.read > OFTEN * size:
                raise sqlite3.DatabaseError("interrupted, more was read than the file can hold")
        return rows


class Questions:
    """``opened(folder)`` gives the connection. It is opened at once, so that an error comes where it belongs, and again by the
    first question after ``close``, or after the file has changed in a way that SQLite does not see."""

    def __init__(self, folder: Path, opened: Callable[[Path], sqlite3.Connection]) -> None:
        self.folder, self.guard, self._opened = folder, threading.RLock(), opened
        self._connection: sqlite3.Connection | None = None
        self.times = 0  # that it was opened
        self._account = Account()
        self._stamp: Stamp = []
        self._version = 0
        self._connected()

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            with explained(self.folder, "read"):
                self._stamp = stamp(self.folder / DATABASE)
                connection = self._opened(self.folder)
                self._connection, self._version = connection, _version(connection)
            self.times += 1
        return self._connection

    def look(self) -> None:
        """Before a transaction. SQLite sees what its own writers do. What else is done to the file (cut, replaced, written by
        other programs) would be hidden by what is known of it already, so that it is opened anew; so is a copy that others went
        on behind."""
        with self.guard, explained(self.folder, "read"):
            now = stamp(self.folder / DATABASE)
            if self._connection is not None and now != self._stamp:
                version = _version(self._connection)
                if version == self._version:
                    self.close()
                self._stamp, self._version = now, version

    @property
    def asking(self) -> bool:
        """Is a transaction open?"""
        return self._connection is not None and self._connection.in_transaction

    def close(self) -> None:
        with self.guard:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def ask(self, question: str, values: Sequence[Any] = (), kinds: str = "") -> list[Any]:
        """``kinds``: a letter of TYPES for each column."""
        with self.guard, explained(self.folder, "read"):
            connection = self._connected()
            size = bound(connection)
            if not connection.in_transaction:
                self._account = Account()
            try:
                rows = self._account.fetched(connection.execute(question, values), size)
            except (OverflowError, UnicodeEncodeError) as why:
                raise SelectionError(f"no run can hold what was asked for ({', '.join(map(repr, values))}): {why}.") from why
        return typed(self.folder, rows, kinds)


def _version(connection: sqlite3.Connection) -> int:
    """Differs when another connection has written to the file."""
    return int(connection.execute("PRAGMA data_version").fetchone()[0])
