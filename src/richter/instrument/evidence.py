"""What speaks for a verdict: losses, accuracies, kernels and features at convergence, each in a line."""

from __future__ import annotations

import math

from richter.core import Row
from richter.instrument.regime import GAP, TURN, regime
from richter.instrument.snapshot import Snapshot
from richter.instrument.training import Course, Failed, row_of, value
from richter.measures.cards import CARDS, MINIMUM


def numbers(c: Course, failure: Failed | None) -> list[str]:
    """What the rules have read; of a training that failed, also what its numbers would say: they do not count."""
    lines = []
    first, now = c.before("probe_loss"), c.now("probe_loss")
    if math.isfinite(now):
        lines.append(f"loss of the probe: {f'{first:.3g} -> ' if math.isfinite(first) else ''}{now:.3g}")
    first, now = c.before("probe_accuracy"), c.now("probe_accuracy")
    if math.isfinite(now):
        guess = "" if c.labels is None else f" (guessing: {c.labels.chance:.3g})"
        lines.append(f"accuracy on the probe: {f'{first:.3g} -> ' if math.isfinite(first) else ''}{now:.3g}{guess}")
    if c.loss is not None and c.loss.lost is None:
        lines.append(f"{c.loss.name} as logged: {c.loss.first:.3g} -> {c.loss.smoothed:.3g} (smoothed)")
    G, F = value(c.last, GAP), value(c.last, TURN)
    if failure is not None and failure.word in ("early", "stale") and math.isfinite(G) and math.isfinite(F):
        so_far = "so far" if failure.word == "early" else f"then, at step {c.last.step}"
        lines.append(f"{so_far}: {regime(G, F)} ({GAP} {G:.3g}, {TURN} {F:.3g})")
    return lines


def changes(c: Course) -> list[str]:
    """What the kernel of the whole model did between the first and the last measurement."""
    changes = []
    for measure in ("tangent_cka", "tangent_stable_rank"):
        a, b = (None if snap is None else row_of(snap, measure) for snap in (c.first, c.last))
        if a is not None and b is not None and math.isfinite(a.value) and math.isfinite(b.value):
            factor = f" (x{b.value / a.value:.1f})" if a.value else ""
            changes.append(f"{CARDS[measure].title}: {a.value:.3g} -> {b.value:.3g}{factor}, {_against_noise(a, b)}")
    return changes


def _against_noise(a: Row, b: Row) -> str:
    """Is the difference more than two standard errors? Where one of these is missing, nobody knows."""
    noise = math.hypot(a.error, b.error)
    if not math.isfinite(noise):
        return "no error bar"
    return "beyond probe noise" if abs(b.value - a.value) > 2 * noise else f"within probe noise ({noise:.2g})"


def counted(last: Snapshot) -> list[str]:
    """How many features the last layer reads, where that was measured. Few is no praise."""
    kappa = value(last, "kappa_cka")
    known = [f"{v:.3g} {word}" for measure, word in (("deff_intensity", "strong"), ("deff_utilisation", "used"))
             if math.isfinite(v := value(last, measure))]
    lines = []
    if math.isfinite(kappa):
        few = f"as few as the outputs need (below {MINIMUM:g})" if kappa < MINIMUM else "more than the outputs need"
        lines.append(f"features of the last layer: kappa_cka {kappa:.3g}, {few}{''.join(f', {k}' for k in known)}. Whether they "
                     f"are good ones this does not say: a network that knows random labels by heart may have as few")
    elif known:
        lines.append(f"features of the last layer: {', '.join(known)}")
    nc1 = value(last, "nc1")
    if math.isfinite(nc1):
        lines.append(f"{CARDS['nc1'].title}: {nc1:.3g} (0 where the examples of a class have become one point)")
    return lines


def converged(last: Snapshot) -> list[str]:
    """What features at convergence say, where they were measured, and whether there is convergence."""
    rows = [r for r in last.rows if r.measure == "fact"]
    known = [r for r in rows if math.isfinite(r.value)]
    if not known:
        return [f"features at convergence: {rows[0].note}"] if rows else []
    low, high = min(known, key=lambda r: r.value), max(known, key=lambda r: r.value)
    words = f"correlation of W^T W with FACT: {low.value:.3g} ({low.layer}) to {high.value:.3g} ({high.layer})"
    doubtful = [r for r in known if r.note]
    if doubtful:
        worst = next((r for r in doubtful if r is low), doubtful[0])
        words += f"; in {len(doubtful)} of {len(known)} layers it says little ({worst.layer}: {worst.note})"
    return [words]
