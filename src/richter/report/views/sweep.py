"""All runs of the store in one table: settings that differ, final values, verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from richter.report.opening import colour_class
from richter.report.query import Query
from richter.report.shelf import Chosen
from richter.report.sweep import RunRow, SweepTable
from richter.report.views import View


def sweep(runs: Chosen, query: Query) -> Any:
    """Return the columns and the rows of the chosen runs; of all runs if none is named."""
    t = SweepTable(tuple(runs.rows()))
    return {"columns": t.columns, "settings": t.settings, "values": t.values, "total": runs.total,
            "rows": [_row(r) for r in t.rows]}


def _row(r: RunRow) -> dict[str, Any]:
    return {"run": r.run, "status": r.status, "verdict": r.verdict, "sentence": r.sentence, "magnitude": r.magnitude,
            "style": colour_class(r.verdict) if r.verdict else "", "settings": dict(r.settings), "finals": _finite(r.finals),
            "cells": {"run": r.run, "status": r.status.partition(":")[0], "step": r.last, "verdict": r.verdict or None}}


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: v if math.isfinite(v) else None for name, v in values.items()}


VIEW = View("sweep", "Runs", sweep, script="view-sweep.js", place=0)
