"""What a run asks of the database that holds it: one class that appends, one that reads, and nothing else.

``sql.py`` has both for SQLite, with the tables and their version. Another database (PostgreSQL) is one more file like it:
``begun(place)``, ``Appender(place)`` and ``Reader(place)``. All that a user calls (``Writer``, ``Run``) is written against
the two protocols of this file, and so knows no SQL. Whatever goes wrong in a database leaves these classes as a ``StoreError``
that says what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from richter.core import Row
from richter.runs.blocks import Columns
from richter.runs.place import Place

Kind = Literal["row", "scalar"]  # a number that was measured, or one of the user's own


class Rows(NamedTuple):
    """A table, column by column, with the words of notes and marks."""

    step: NDArray[np.int64] | list[int]
    layer: list[str]
    name: list[str]
    value: NDArray[np.float64] | list[float]
    error: NDArray[np.float64] | list[float]
    note: list[str]
    mark: list[str]


class Appending(Protocol):
    """The one writer of a run. It is made if there is none, and brought to today's format if it is older."""

    place: Place

    def check(self) -> None:
        """Refuse (``StoreError``) if what is written now would be lost, or go into another run."""

    def transaction(self, done: str) -> AbstractContextManager[None]:
        """What is appended inside is kept whole, or (whatever is raised inside) not at all; ``done`` is a word for errors, e.g.
        "written". All the calls below are made inside of one, except ``scalars`` and ``close``."""

    def begin(self, meta: Mapping[str, str], when: float, provenance: str) -> int:
        """A session of a process that writes, and (of a new run) what the run is; returns the number of the session."""

    def end(self, session: int, when: float, how: str) -> None: ...

    def describe(self, meta: Mapping[str, str]) -> None:
        """JSON by key; what there was under a key is replaced."""

    def rows(self, kind: Kind, rows: Sequence[Row]) -> None:
        """Refuses (``StoreError``) what is no number, before anything is kept."""

    def scalars(self, step: int, values: Mapping[str, float]) -> bool:
        """The same for scalars whose names are known, as fast as can be and in a transaction of its own; False if that cannot
        be done, and nothing was written."""

    def snapshot(self, step: int, when: float, seconds: float, passes: float, examples: int, notes: str) -> None: ...

    def array(self, layer: str, name: str, step: int, form: str, dtype: str, shape: str, data: bytes | None,
              stored: str | None) -> None:
        """``data``, or ``stored``: the name of the object that holds them."""

    def claim(self, name: str, record: str) -> None: ...

    def figure(self, name: str, kind: str, data: bytes) -> None: ...

    def settle(self) -> None:
        """Put what was appended where it is read fastest; done by itself from time to time, and at the end."""

    def clear(self) -> None:
        """Forget everything but settings, seeds and sessions."""

    def forget(self, after: int) -> None:
        """Forget what was written for later steps."""

    def close(self) -> None:
        """May be called again, and touches no file of a run that is in the place of this one by now."""


class Reading(Protocol):
    """Any number of them, also while the run is written. Answers are of the types that are announced here, and what was
    written: what a file of unknown origin holds in their place, or a damaged one, is refused (``StoreError``)."""

    def close(self) -> None:
        """The next question opens it again."""

    def moment(self) -> AbstractContextManager[None]:
        """Several questions about one state of a run that is being written."""

    def meta(self, key: str) -> str | None: ...

    def sessions(self) -> list[tuple[float, float | None, str | None, str]]:
        """When each began and ended, how, and its provenance."""

    def series(self, kind: Kind) -> list[tuple[int, str, str]]:
        """Number, layer and name of each curve, in the order in which they were first written."""

    def number(self, kind: Kind, layer: str, name: str) -> int | None:
        """Of one curve, if it is there."""

    def rows(self, kinds: Iterable[Kind], steps: Sequence[int] = ()) -> Rows:
        """By kind, step and curve; ``steps``: of one or two steps only."""

    def curve(self, number: int, after: int | None = None) -> Columns:
        """By step, the latest for each; ``after``: of later ones only."""

    def curves(self, numbers: Iterable[int]) -> dict[int, Columns]:
        """The same of several."""

    def marked(self, c: Columns) -> list[str]:
        """The words of marks."""

    def notes(self) -> dict[int, str]: ...

    def steps(self) -> list[int]:
        """Of the snapshots."""

    def last(self) -> int | None:
        """The last step that anything was written for."""

    def ends(self) -> tuple[int, int] | None:
        """The first and last step that has rows."""

    def costs(self, steps: Sequence[int] = ()) -> list[tuple[int, float, float, int, str]]:
        """Step, seconds, passes, examples and notes of the snapshots (of these steps only)."""

    def arrays(self) -> list[tuple[str, str, int]]:
        """Layer, name and step."""

    def array(self, layer: str, name: str, step: int | None, data: bool = True) -> tuple[Any, Any, Any, Any, Any] | None:
        """Form, dtype, shape, bytes (None unless ``data``) and object, as they were appended; of the last step if none is
        given."""

    def claims(self) -> list[tuple[str, str]]: ...

    def figures(self) -> list[tuple[str, str]]: ...

    def figure(self, name: str, kind: str) -> bytes | None: ...
