"""Comparison of a record with the code. A record is stale when its modules have changed (`richter.experiments.keys`), when it
does not name them, or when the experiment, run again, gives other numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from richter.experiments.frame import Experiment

# Run twice on one machine with as many threads, 19 experiments gave the same 101 numbers to the last digit. What is left is what
# another order of summation may do: the instrument promises 1e-5 in single precision. Claims such as "the identity holds up to
# 1e-13" are rounding errors themselves; the absolute part is for them.
RELATIVE, ABSOLUTE = 1e-5, 1e-9

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Standing:
    """Result of comparing a record with the code."""

    names_modules: bool = True  # False: it was made before records did
    changed: tuple[str, ...] = ()  # modules that are not what they were
    moved: tuple[str, ...] = ()  # claims whose number is another one, each with both numbers
    recorded_on: str = ""  # the record's own machine, if the numbers were compared with those of another one

    @property
    def stale(self) -> bool:
        """Return whether the record can no longer be trusted."""
        return bool(self.changed or self.moved) or not self.names_modules

    def __str__(self) -> str:
        parts = ["stale"] if self.stale else ["as the code is"]
        if self.changed:
            parts.append(f"changed since: {', '.join(self.changed)}")
        if self.moved:
            parts.append(f"other numbers: {', '.join(self.moved)}")
        if self.moved and self.recorded_on:
            parts.append(f"made on another machine, which rounds differently ({self.recorded_on})")
        if not self.names_modules:
            parts.append("made before records named their modules: it is not known whether they have changed")
        return "; ".join(parts)


def standing(e: Experiment, record: Record, again: Record | None = None) -> Standing:
    """Compare ``record`` with the experiment as it is defined now and, if given, with a record ``again`` of a new run. A
    record of the paper's scale keeps the numbers of smoke at its time, so that it can be compared with a new record of smoke."""
    then = record
    if again is not None and again["scale"] != record["scale"]:
        then = record.get("smoke", {"claims": []})
    return Standing("modules" in record, changed_modules(record.get("modules", e.modules), e.modules),
                    moved_numbers(then, again) if again is not None else (),
                    machine(then) if again is not None and machine(then) != machine(again) else "")


def changed_modules(then: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules with another digest, and those that are only in one of the two."""
    return tuple(name for name in sorted({*then, *now}) if then.get(name) != now.get(name))


def moved_numbers(then: Record, now: Record) -> tuple[str, ...]:
    """Return the claims of both records whose numbers differ by more than rounding."""
    values = {claim["text"]: claim["value"] for claim in now["claims"]}
    return tuple(f"{claim['text']}: was {claim['value']!r}, is {values[claim['text']]!r}" for claim in then["claims"]
                 if claim["text"] in values and not same(claim["value"], values[claim["text"]]))


def same(a: float | None, b: float | None) -> bool:
    """Return whether two numbers agree up to rounding. None is a claim without a number."""
    return a is b if a is None or b is None else math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def machine(record: Record) -> str:
    """Return the hardware and versions that numbers depend on besides the code."""
    hardware, versions = record.get("hardware", {}), record.get("versions", {})
    parts = [hardware.get("processor", ""), *(f"{hardware[k]} {k}" for k in ("cores", "threads") if k in hardware),
             *(f"{name} {versions[name]}" for name in ("torch", "numpy") if name in versions)]
    return ", ".join(part for part in parts if part)


def for_comparison(smoke: Record) -> dict[str, Any]:
    """Return the part of a smoke record that is stored in the record of the paper's scale."""
    return {"date": smoke["date"], "claims": [{"text": claim["text"], "value": claim["value"]} for claim in smoke["claims"]],
            "versions": smoke["versions"], "hardware": smoke["hardware"]}
