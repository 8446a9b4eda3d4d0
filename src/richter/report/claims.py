"""The claims of a run as report and dashboard show them: texts, read from what an experiment writes (Finding.record)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from richter.report.plotdata import flat

KEYS = {"text", "paper", "source", "expect", "value", "holds", "verdict"}  # and "differs", where there is an explanation


class Told(NamedTuple):
    """A claim in words. ``holds`` is None, and everything is in the remark, if the record is none of ours."""

    text: str
    bar: str  # the interval in which the value must lie
    value: str
    paper: str
    verdict: str
    remark: str
    holds: bool | None


def told(name: str, record: Mapping[str, Any]) -> Told:
    if not _ours(record):
        return Told(name, "", "", "", "", "; ".join(f"{k}: {v}" for k, v in flat(record).items()), None)
    low, high = record["expect"]
    value = "" if record["value"] is None else f"{record['value']:.4g}"
    return Told(record["text"], _bar(low, high), value, record["paper"], record["verdict"], record.get("differs", ""),
                record["holds"])


def _ours(record: Mapping[str, Any]) -> bool:
    """Does it have the keys and kinds that Finding.record has?"""
    if set(record) - {"differs"} != KEYS or not isinstance(record["expect"], list) or len(record["expect"]) != 2:
        return False
    return (all(v is None or _finite(v) for v in (*record["expect"], record["value"])) and isinstance(record["holds"], bool)
            and all(isinstance(record.get(k, ""), str) for k in ("text", "paper", "source", "verdict", "differs")))


def _finite(v: object) -> bool:
    return isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) <= sys.float_info.max


def _bar(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return f"at least {low:g}" if low is not None else f"at most {high:g}" if high is not None else "any"
    return f"{low:g} to {high:g}"
