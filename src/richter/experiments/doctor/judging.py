"""The verdict on a run, the rules it is compared with, and which of them are right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from richter.core import WHOLE, Mark
from richter.experiments.doctor.cases import TrainingCase
from richter.experiments.kit import Results, Task
from richter.instrument.snapshot import Snapshot
from richter.instrument.verdict import Diagnosis

WORDS = ("diverged", "untrained", "collapsed", "not learning", "early", "stale", "lazy", "probably lazy", "uncertain",
         "amplified", "rich", "linear", "unknown", "memorised")
RULES = {"verdict": "the verdict", "share": "c_uc_ratio at 0.05 and 0.5", "constant": "always rich",
         "gap": "the linearisation gap alone"}


def in_scale_series(t: Task[Any]) -> bool:
    """Return whether a task is one of a series of output scales. Its scale then decides which verdict is right."""
    return bool(t.name.startswith("scale "))


def value(snap: Snapshot, measure: str, layer: str = WHOLE) -> float:
    """Number of a snapshot; NaN if it has none."""
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
    """Return the word of each rule for a run, as indices into WORDS."""
    gap = value(last, "linearisation_gap")
    spoken = {"verdict": diagnosis.word, "share": by_share(last), "constant": "rich", "gap": by_gap(gap)}
    return {f"says_{rule}": WORDS.index(word) for rule, word in spoken.items()}


def makes_remark(case: TrainingCase, diagnosis: Diagnosis) -> bool:
    """Return whether the verdict makes the remark that the case asks for."""
    return not case.remark or any(remark.startswith(case.remark) for remark in diagnosis.remarks)


def codes(allowed: Sequence[str]) -> list[bool]:
    """Return for each of WORDS whether it is correct."""
    return [word in allowed for word in WORDS]


def is_right(arrays: Mapping[str, Any], rule: str) -> bool:
    """Return whether a rule's word is one of the correct words. The verdict must make its remark too; rivals need none."""
    return bool(arrays["allowed"][int(arrays[f"says_{rule}"])]) and (rule != "verdict" or bool(arrays["remarked"]))


def with_known_truth(r: Results, network: str = "") -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Tasks whose truth is known, of one network or of all."""
    return ((t, arrays) for t, arrays in r if not in_scale_series(t) and network in ("", t.network))


def fewest_right(r: Results, *networks: str) -> float:
    """Smallest number of trainings that the chosen rule judges correctly, over networks and seeds."""
    counts: dict[tuple[str, int], int] = {}
    for t, arrays in with_known_truth(r):
        if t.network in networks:
            counts[t.network, t.seed] = counts.get((t.network, t.seed), 0) + is_right(arrays, r.settings.rule)
    return float(min(counts.values())) if counts else math.nan


def monotone(r: Results) -> float:
    """Smallest rank correlation of a number with minus the output scale, over networks and seeds."""
    from scipy.stats import spearmanr
    curves: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for t, arrays in r:
        if in_scale_series(t):
            curves.setdefault((t.network, t.seed), []).append((-t.case.alpha, float(arrays[r.settings.number])))
    ranks = [spearmanr(*np.transpose(curve)).statistic for curve in curves.values()]
    return float(min(ranks)) if ranks else math.nan
