"""The claims of a run as text for report and dashboard, read from the records of an experiment (Finding.record)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from richter.report.plotdata import flat

KEYS = {"text", "paper", "source", "expect", "value", "holds", "verdict"}
SEEDS = {"over", "by", "n", "values", "interval", "coverage"}  # keys of a claim over seeds, all of them required
MORE = {"differs", "places", "was", "controls"}  # optional keys


class Told(NamedTuple):
    """A claim in words. If Richter did not write the record, ``holds`` is None and the remark contains everything."""

    text: str
    bar: str  # the interval in which the value must lie
    value: str
    paper: str
    verdict: str
    remark: str
    holds: bool | None


def told(name: str, record: Mapping[str, Any]) -> Told:
    """A claim of a run as texts: bar, value, paper, verdict, reason."""
    if not _ours(record):
        return Told(name, "", "", "", "", "; ".join(f"{k}: {v}" for k, v in flat(record).items()), None)
    low, high = record["expect"]
    value = "" if record["value"] is None else f"{record['value']:.4g}{over_seeds(record)}"
    was = f"Earlier: {record['was']}" if record.get("was") else ""
    return Told(record["text"], _bar(low, high), value, record["paper"], record["verdict"],
                ". ".join(part for part in (record.get("differs", ""), was) if part), record["holds"])


def over_seeds(record: Mapping[str, Any]) -> str:
    """Text after the number of a claim over seeds: " [0.91, 0.95], median of 5 seeds". Empty for other claims."""
    if "over" not in record:
        return ""
    several = f"{record['n']} {record['over']}{'s' * (record['n'] != 1)}"
    span = "" if record["interval"] is None else f" [{record['interval'][0]:.3g}, {record['interval'][1]:.3g}]"
    return f" of {several} in the bar,{span} of all" if record["by"] == "each" else f"{span}, {record['by']} of {several}"


def _ours(record: Mapping[str, Any]) -> bool:
    """Whether the record has the keys and types that Finding.record writes."""
    if set(record) - MORE not in (KEYS, KEYS | SEEDS) or not _ends(record["expect"]):
        return False
    return ((record["value"] is None or _finite(record["value"])) and isinstance(record["holds"], bool)
            and all(isinstance(record.get(k, ""), str) for k in ("text", "paper", "source", "verdict", "differs", "was"))
            and ("over" not in record or _of_seeds(record)))


def _of_seeds(record: Mapping[str, Any]) -> bool:
    """Return whether the record is of a claim over seeds."""
    interval = record["interval"]
    return (isinstance(record["over"], str) and isinstance(record["by"], str) and isinstance(record["n"], int)
            and (interval is None or (_ends(interval) and None not in interval)))


def _ends(interval: object) -> bool:
    """Return whether a value is an interval."""
    return isinstance(interval, list) and len(interval) == 2 and all(v is None or _finite(v) for v in interval)


def _finite(v: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) <= sys.float_info.max


def _bar(low: float | None, high: float | None) -> str:
    """Interval of a claim as text."""
    if low is None or high is None:
        return f"at least {low:g}" if low is not None else f"at most {high:g}" if high is not None else "any"
    return f"{low:g} to {high:g}"
