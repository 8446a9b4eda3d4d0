"""Words of the ledger: outcome, protocol, meaning and reason of a claim, computed from its record wherever that is possible.

>>> outcome({"value": 0.93, "expect": [0.9, None], "over": "seed", "by": "mean", "n": 10, "interval": [0.92, 0.94]}, "exact")
'reproduced'

Outcome and meaning follow from numbers: the interval over seeds against the bar, and the controls. Protocol, reason and the
sentence of the paper are declared by claims and experiments. A reason that is not declared follows from outcome and protocol."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from richter.core import Interval
from richter.experiments.seeds import ENOUGH, SHARE

Reason = Literal["misprint", "unstated setting", "seed spread", "scale", "data not available", "metric defined otherwise",
                 "optimiser detail", "ours may be wrong"]
PROTOCOLS: Mapping[str, str] = {
    "exact": "the paper's data, model and sizes",
    "reduced": "the same data and model, but fewer examples, units, steps or panels",
    "stand-in": "other data or another model",
    "unstated": "the paper does not give a setting that matters"}
OUTCOMES: Mapping[str, str] = {  # the best first
    "reproduced": "the number and its whole interval over seeds lie in the bar",
    "reproduced after correction": "the same of a formula that is corrected here, because the printed one is wrong",
    "partly reproduced": "the number lies in the bar, for the part of the claim that was run; the rest is named",
    "direction only": "the sign or the order is right, the size is outside the bar",
    "not run": "there is no number yet",
    "undecided": "the interval crosses the bar, there are too few seeds, or a number outside the bar does not decide",
    "contradicted": f"exact protocol, {ENOUGH} seeds or more, the whole interval outside the bar, controls as they must be, "
                    "and a second route to the number",
    "nothing to measure": "a diagram, a plan or a list"}
MEANINGS: Mapping[str, str] = {
    "specific": "every rival fails the same test", "shared": "a rival passes too, at least for some seeds",
    "not tested": "no rival was run at this scale"}
REASONS: tuple[str, ...] = get_args(Reason)
WORST = ("contradicted", "undecided", "not run", "direction only", "partly reproduced", "reproduced after correction",
         "reproduced", "nothing to measure")  # the order by which a place is judged


class Meaning(NamedTuple):
    """Whether a claim says something that its rivals do not: a key of MEANINGS, and the rivals that pass too."""

    word: str
    rivals: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.word}: {', '.join(self.rivals)}" if self.rivals else self.word


def kind_of(protocol: str) -> tuple[str, str]:
    """Return the word of a protocol and its details: "reduced: 400 of 4,000 images" -> ("reduced", "400 of 4,000 images")."""
    word, _, details = protocol.partition(":")
    return word.strip(), details.strip()


def outcome(c: Mapping[str, Any], protocol: str, *, reason: str = "", partial: bool = False, direction: Interval | None = None,
            second: str = "") -> str:
    """Outcome of a claim of a paper, from the record ``c`` of its number. ``partial``: only a part of the claim was run."""
    if inside(c):
        return "reproduced after correction" if reason == "misprint" else "partly reproduced" if partial else "reproduced"
    if not lacking(c, protocol, second):
        return "contradicted"
    return "direction only" if direction is not None and inside(c, direction) else "undecided"


def lacking(c: Mapping[str, Any], protocol: str, second: str) -> list[str]:
    """Return the conditions of "contradicted" that a claim does not meet, in words; an empty list if it is contradicted."""
    controls = c.get("controls", ())
    fail = bool(controls) and all(control["outcome"].startswith("fails") for control in controls)
    return [words for met, words in (
        (kind_of(protocol)[0] == "exact", f"the protocol is {kind_of(protocol)[0]}"),
        (enough(c), f"fewer than {ENOUGH} seeds"),
        (outside(c), "the interval is not outside the bar as a whole"),
        (fail, "its controls were not run, or one passes"),
        (second, "no second route to the number")) if not met]


def bar_of(c: Mapping[str, Any]) -> Interval:
    """Return the bar of a claim's record."""
    low, high = c["expect"]
    return Interval(-math.inf if low is None else low, math.inf if high is None else high)


def enough(c: Mapping[str, Any]) -> bool:
    """Return whether a number comes from enough seeds to decide."""
    return "over" in c and c["n"] >= ENOUGH


def inside(c: Mapping[str, Any], bar: Interval | None = None) -> bool:
    """Return whether the number lies in the bar as a whole: with its interval over seeds, from enough of them. A number that is
    not over seeds, such as the error of an identity, has no interval."""
    bar = bar or bar_of(c)
    if c["value"] is None:
        return False
    if "over" not in c:
        return c["value"] in bar
    if c["by"] == "each":
        return enough(c) and c["value"] >= SHARE
    return enough(c) and c["interval"] is not None and c["interval"][0] in bar and c["interval"][1] in bar


def outside(c: Mapping[str, Any]) -> bool:
    """Return whether the number lies outside the bar as a whole, with its interval over seeds."""
    bar = bar_of(c)
    if c["value"] is None or "over" not in c or c["interval"] is None:
        return False
    low, high = c["interval"]
    return high < SHARE if c["by"] == "each" else high < bar.low or low > bar.high


def meaning(c: Mapping[str, Any], beaten: Iterable[str] = ()) -> Meaning:
    """Meaning of a claim. ``beaten``: rivals that other claims of the same place could not tell from it."""
    controls = [control for control in c.get("controls", ()) if control["outcome"] != "invalid"]
    passing = (*(control["text"] for control in controls if control["outcome"] != "fails"), *beaten)
    return Meaning("shared", passing) if passing else Meaning("specific" if controls else "not tested")


def reason(c: Mapping[str, Any], word: str, protocol: str, declared: str = "") -> str:
    """Reason why a claim is not simply reproduced: the declared one, or the one that outcome and protocol imply."""
    if word in ("reproduced", "not run"):
        return ""
    if declared:
        return declared
    kind = kind_of(protocol)[0]
    if word == "partly reproduced" and kind == "exact":
        return "data not available"
    if word == "undecided" and "over" in c and c["value"] is not None and not outside(c):
        return "seed spread"
    if kind != "exact":
        return {"reduced": "scale", "stand-in": "data not available", "unstated": "unstated setting"}[kind]
    return "ours may be wrong"
