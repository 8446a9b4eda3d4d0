"""Compare two runs, or two steps of one run, as text: the settings that differ, and the numbers of every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from richter.core import SelectionError
from richter.core.values import table
from richter.instrument.snapshot import Snapshot, shown
from richter.measures.cards import SHOWN_FIRST
from richter.report.plotdata import differences, flat
from richter.runs import Run


class NumberPair(NamedTuple):
    """One number in both runs."""

    measure: str
    layer: str
    a: float
    b: float
    words: tuple[str, str]  # the two numbers with their errors, as text


def rows(a: Snapshot, b: Snapshot, measures: Sequence[str] | None = None) -> list[NumberPair]:
    """Return the numbers that both runs have, by measure. ``measures=None``: the measures that are shown first."""
    common = [m for m in a.measures if m in b.measures]
    wanted = [m for m in SHOWN_FIRST if m in common] or common if measures is None else measures
    for m in wanted:
        if m not in common:
            raise SelectionError(f"{m!r} has not been measured in both. Both have: {', '.join(common) or 'nothing'}.")
    here = [{(r.measure, r.layer): r for r in s.rows} for s in (a, b)]
    keys = [(m, r.layer) for m in wanted for r in a.rows if r.measure == m and (m, r.layer) in here[1]]
    return [NumberPair(*key, here[0][key].value, here[1][key].value, (shown(here[0][key]), shown(here[1][key]))) for key in keys
            if not (math.isnan(here[0][key].value) and math.isnan(here[1][key].value))]


def snapshot(run: Run, step: int | None) -> Snapshot:
    """Return the last measurement at or before a step; ``None``: the last measurement of all."""
    steps = [s for s in run.steps if step is None or s <= step]
    if not steps:
        first = f"; the first was at step {run.steps[0]}" if run.steps else ""
        raise SelectionError(f"the run {run.name} has no measurement" + (f" at or before step {step}{first}." if step is not None
                                                                         else "."))
    return run.at([steps[-1]])[0]


def told(names: tuple[str, str], pairs: Sequence[NumberPair]) -> str:
    """Write the pairs as a table."""
    lines = [("measure", "layer", *names), *((p.measure, p.layer, *(w or "none" for w in p.words)) for p in pairs)]
    return table(lines, right=(2, 3))


def settings(a: Run, b: Run) -> str:
    """List the settings that differ, one per line."""
    other, _ = differences([flat(run.settings) for run in (a, b)])
    return "\n".join(f"{name}: {first or 'none'}, {second or 'none'}" for name, (first, second) in other.items())
