"""The verdict on a run, the rules it is compared with, and which of them are right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from richter.core import WHOLE, Mark
from richter.experiments.doctor.cases import Case
from richter.experiments.frame import Results
from richter.instrument.snapshot import Snapshot
from richter.instrument.verdict import Diagnosis

WORDS = ("diverged", "untrained", "collapsed", "not learning", "early", "stale", "lazy", "probably lazy", "uncertain",
         "amplified", "rich", "linear", "unknown")
RULES = {"verdict": "the verdict", "share": "c_uc_ratio at 0.05 and 0.5", "constant": "always rich",
         "gap": "the linearisation gap alone"}


def value(snap: Snapshot, measure: str, layer: str = WHOLE) -> float:
    """A number of a snapshot; NaN if it has none."""
    return next((r.value for r in snap.rows if r.measure == measure and r.layer == layer), math.nan)


def by_share(snap: Snapshot) -> str:
    """The rule in use before: every layer lazy below a share learned of 0.05, rich from 0.5 on."""
    still = {r.layer for r in snap.rows if r.measure == "weight_change" and r.value == 0}
    shares = [0.0 if r.layer in still else r.value for r in snap.rows
              if r.measure == "c_uc_ratio" and (math.isfinite(r.value) or r.layer in still) and r.mark is not Mark.TRIVIAL]
    if not shares:
        return "unknown"
    return "lazy" if max(shares) < 0.05 else "rich" if min(shares) >= 0.5 else "uncertain"


def by_gap(gap: float) -> str:
    """The edges of the verdict for the gap, without the change of features and without rules for failures."""
    if not math.isfinite(gap):
        return "unknown"
    return "lazy" if gap < 0.05 else "probably lazy" if gap < 0.1 else "uncertain" if gap < 0.3 else "rich"


def words(diagnosis: Diagnosis, last: Snapshot) -> dict[str, int]:
    """What each rule says of a run, as numbers of WORDS."""
    gap = value(last, "linearisation_gap")
    spoken = {"verdict": diagnosis.word, "share": by_share(last), "constant": "rich", "gap": by_gap(gap)}
    return {f"says_{rule}": WORDS.index(word) for rule, word in spoken.items()}


def remarked(case: Case, diagnosis: Diagnosis) -> bool:
    """Does the verdict make the remark that the case asks for?"""
    return not case.remark or any(remark.startswith(case.remark) for remark in diagnosis.remarks)


def codes(allowed: Sequence[str]) -> list[bool]:
    return [word in allowed for word in WORDS]


def is_right(arrays: Mapping[str, Any], rule: str) -> bool:
    """Is a rule's word among those that are right? The verdict must make its remark too; of rivals none is asked."""
    return bool(arrays["allowed"][int(arrays[f"says_{rule}"])]) and (rule != "verdict" or bool(arrays["remarked"]))


def judged(r: Results, network: str = "") -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """The tasks whose truth is known, of one network or of all."""
    return ((t, arrays) for t, arrays in r if not t.scale and network in ("", t.network))


def fewest_right(r: Results, *networks: str) -> float:
    """The smallest number of trainings that the rule of the settings judges rightly, over networks and seeds."""
    counts: dict[tuple[str, int], int] = {}
    for t, arrays in judged(r):
        if t.network in networks:
            counts[t.network, t.seed] = counts.get((t.network, t.seed), 0) + is_right(arrays, r.settings.rule)
    return float(min(counts.values())) if counts else math.nan


def monotone(r: Results) -> float:
    """The smallest rank correlation, over networks and seeds, of a number with minus the output scale."""
    from scipy.stats import spearmanr
    curves: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for t, arrays in r:
        if t.scale:
            curves.setdefault((t.network, t.seed), []).append((-t.case.alpha, float(arrays[r.settings.number])))
    ranks = [spearmanr(*np.transpose(curve)).statistic for curve in curves.values()]
    return float(min(ranks)) if ranks else math.nan
