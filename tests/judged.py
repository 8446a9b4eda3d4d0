"""Trainings made by hand, for tests of the verdict: two measurements, a logged loss, failures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from richter.core import Failure, Labels, Mark, Row
from richter.instrument.snapshot import Snapshot
from richter.instrument.verdict import Diagnosis
from richter.runs import Run, Series, create

TEN = Labels(256, 10, 0.1)  # chance .1, noise .01875: five of it are .09375
LOG = math.log(10)
START = {"probe_loss": LOG, "probe_accuracy": 0.1, "output_spread": 1.0, "output_rms": 1.0}
GOOD = {"linearisation_gap": 0.7, "magnitude": math.log10(0.7 / 0.3), "feature_change_cka": 0.4, "probe_loss": 0.2,
        "probe_accuracy": 0.95, "output_spread": 5.0, "output_rms": 4.0}


def snapshot(step: int, numbers: dict[str, float], layers: dict[str, tuple[float, float]], labels: Labels | None = TEN,
             error: float = 0.01) -> Snapshot:
    """``layers``: function_change and weight_change of each; the last is the read-out."""
    rows = [Row(step, "*", m, v, error) for m, v in numbers.items()]
    for k, (r, w) in layers.items():
        out = k == list(layers)[-1]
        rows += [Row(step, k, "function_change", r, error, mark=Mark.TRIVIAL if out else Mark.EXACT),
                 Row(step, k, "weight_change", w)]
    return Snapshot(tuple(rows), step, labels=labels)


STILL, MOVED = dict.fromkeys("acz", (0.0, 0.0)), {"a": (1.2, 0.5), "c": (0.3, 0.3), "z": (45.0, 0.9)}
NEARBY = {"a": (0.1, 0.1), "c": (0.05, 0.1), "z": (45.0, 0.9)}  # of a lazy training


class Training:
    """Something with two measurements and a logged loss, as an Observer or a Run has them."""

    def __init__(self, now: dict[str, float] | None = None, start: dict[str, float] | None = None, *, step: int = 100,
                 layers: dict[str, tuple[float, float]] | None = None, labels: Labels | None = TEN, error: float = 0.01,
                 loss: list[float] | None = None, reached: int | None = None, failures: tuple[Failure, ...] = ()) -> None:
        given = {**GOOD, **(now or {})}
        self.snapshots = [snapshot(0, {**START, **(start or {})}, STILL, labels),
                          snapshot(step, given, layers if layers is not None else NEARBY if given["linearisation_gap"] < 0.1
                                   else MOVED, labels, error)]
        self.loss, self.failures, self.last = loss, list(failures), reached
        self.scalar_names = [] if loss is None else ["loss"]

    def scalars(self, name: str) -> Series:
        assert name == "loss"
        values = np.array(self.loss, float)
        return Series(np.arange(len(values)), values, np.full(len(values), math.nan))

    def keep(self, path: Path, settings: Any = None) -> Run:
        """As a run on disk."""
        with create(path, settings) as writer:
            for s in self.snapshots:
                writer.snapshot(s)
            for step, loss in enumerate(self.loss or []):
                writer.scalars(step, loss=loss)
        return Run(path)


def assert_consistent(found: Diagnosis) -> None:
    """The word, the sign of the magnitude and the words of the layers agree."""
    learned = any(v.verdict in ("rich", "probably rich") for v in found.layers)
    if found.word in ("rich", "amplified"):
        assert found.magnitude is not None
        assert found.magnitude.value >= 0, str(found)
    if found.word == "rich":
        assert learned, str(found)
    if found.word in ("lazy", "probably lazy"):
        assert not learned, str(found)
        assert found.magnitude is None or found.magnitude.value < 0, str(found)
