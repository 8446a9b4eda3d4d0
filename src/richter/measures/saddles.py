"""Saddles of a training. From small initial weights a network rests at a saddle, leaves it along few directions, and rests at the
next: the loss has plateaus, and on each of them every layer has a rank. Numbers in, numbers out; needs no torch.

    with richter.Observer(model, probe, measures=["rank_of_weights", "stable_rank_of_weights"], when=50) as watch:
        ...                                    # train, and call watch(step, loss=loss)
    print(saddles_of(watch)["loss"])           # or for a run that was opened
    # saddle 0 (step 0 to 99, loss 0.45): ranks 57, 9; saddle 1 (step 420 to 900, loss 0.41): ranks 1, 1; now: saddle 1

Saddles are the plateaus of ``measures.stages``, numbered from 0 on. Saddle 0 of a training from small weights is the origin: its
ranks are first those of the initial weights, and at its end those of the direction in which the network leaves it. The median
over its snapshots is reported. A training from large weights has plateaus too, but their ranks are not low.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from richter.core import WHOLE, SelectionError
from richter.measures.inflections import Numbers
from richter.measures.stages import Plateau, Stages, is_loss, stages_in

RANK, STABLE, LOSS = "rank_of_weights", "stable_rank_of_weights", "probe_loss"


@dataclass(frozen=True)
class Saddle:
    """A plateau of the loss with the rank of each layer: the median over its snapshots, NaN if there are none."""

    number: int  # in order of time, from 0; two drops without a plateau between them lead to one saddle
    plateau: Plateau
    ranks: Mapping[str, float]
    stable: Mapping[str, float]  # stable ranks, if they were measured
    measured: int  # number of snapshots on it

    def __str__(self) -> str:
        place = f"saddle {self.number} (step {self.plateau.start:.0f} to {self.plateau.end:.0f}, loss {self.plateau.level:.3g})"
        if not self.measured:
            return f"{place}: no ranks were measured there"
        return f"{place}: ranks {', '.join('?' if np.isnan(r) else f'{r:g}' for r in self.ranks.values())}"


@dataclass(frozen=True)
class Saddles:
    """The saddles of a training in order of time."""

    saddles: tuple[Saddle, ...]
    stages: Stages

    def __len__(self) -> int:
        return len(self.saddles)

    def __getitem__(self, number: int) -> Saddle:
        return self.saddles[number]

    @property
    def now(self) -> Saddle | None:
        """Saddle at the end of the curve; None while the loss falls, and if there are no stages."""
        if not self.stages.drops or not self.stages.drops[-1].ended or not self.saddles:
            return None
        last = self.saddles[-1]
        return last if last.plateau.start >= self.stages.drops[-1].end else None

    def __str__(self) -> str:
        if not self.saddles:
            return f"no saddles: {self.stages}"
        where = f"now: saddle {self.now.number}" if self.now else "now: falling"
        return "; ".join([*map(str, self.saddles), where])


def saddles(stages: Stages, steps: ArrayLike, ranks: Mapping[str, ArrayLike], stable: Mapping[str, ArrayLike] | None = None
            ) -> Saddles:
    """Combine the ranks of layers, measured at ``steps``, with the plateaus of a curve.

    >>> saddles(find(t, loss), steps, {"0": [9, 9, 1, 1], "2": [8, 8, 1, 1]})
    """
    if not isinstance(stages, Stages):
        raise SelectionError(f"stages are a {type(stages).__name__}: give the stages of a curve, measures.stages.find(steps, "
                             f"loss).")
    t = _numbers("steps", steps)
    if t.ndim != 1 or not np.isfinite(t).all():
        raise SelectionError(f"steps have shape {t.shape}{' and are not all finite' * (t.ndim == 1)}: give a list of the steps "
                             f"at which ranks were measured, [t].")
    groups = [_columns(name, group, t) for name, group in (("ranks", ranks), ("stable", {} if stable is None else stable))]
    out = []
    for number, plateau in enumerate(stages.plateaus):
        on = (t >= plateau.start) & (t <= plateau.end)
        medians = [{layer: _median(values[on]) for layer, values in group.items()} for group in groups]
        out.append(Saddle(number, plateau, medians[0], medians[1], int(on.sum())))
    return Saddles(tuple(out), stages)


def _columns(name: str, group: Mapping[str, ArrayLike], t: Numbers) -> dict[str, Numbers]:
    """Read ranks by layer, one at each step."""
    if not isinstance(group, Mapping):
        raise SelectionError(f"{name} are a {type(group).__name__}: give the ranks of every layer by its name, "
                             f"{{\"0\": [9, 9, 1], ...}}.")
    columns = {layer: _numbers(f"{name}[{layer!r}]", values) for layer, values in group.items()}
    for layer, values in columns.items():
        if values.shape != t.shape:
            raise SelectionError(f"{name}[{layer!r}] has shape {values.shape}: give a rank for each of the {t.size} steps, "
                                 f"[t].")
    return columns


def _numbers(name: str, values: ArrayLike) -> Numbers:
    """Values as an array of floats; otherwise raise an error."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SelectionError(f"{name} cannot be read as numbers ({error}).") from error


def saddles_of(run: Any, **options: Any) -> dict[str, Saddles]:
    """Saddles of a run (``richter.runs.load``) or an Observer that measured ``rank_of_weights``, by the names of its losses, or
    of ``probe_loss`` if none was logged. ``options`` are those of ``stages.find``."""
    if not all(hasattr(run, name) for name in ("frame", "scalar_names", "scalars")):
        raise SelectionError(f"run is a {type(run).__name__}: give an Observer, or a run from richter.runs.load.")
    rows = run.frame
    steps = np.unique(rows["step"][rows["measure"] == RANK])
    if not len(steps):
        raise SelectionError(f"{RANK} was not measured, so no plateau has a rank: add it to the measures, "
                             f"Observer(..., measures=[{RANK!r}, {STABLE!r}]), or measure checkpoints.")
    logged = {name: run.scalars(name) for name in run.scalar_names if is_loss(name)}
    curves = logged or {LOSS: _measured(rows, LOSS).get(WHOLE, ((), ()))}
    ranks, stable = ({layer: _at(steps, *curve) for layer, curve in _measured(rows, m).items()} for m in (RANK, STABLE))
    stages_by_name = {name: stages_in(series, **options) for name, series in curves.items()}
    return {name: saddles(stages, steps, ranks, stable) for name, stages in stages_by_name.items() if stages is not None}


def _measured(rows: Any, measure: str) -> dict[str, tuple[Any, Any]]:
    """Return steps and values of a measure by layer, in measuring order."""
    chosen = rows[rows["measure"] == measure].sort_values("step", kind="stable")
    return {str(layer): (rows_of_layer["step"].to_numpy(), rows_of_layer["value"].to_numpy(np.float64))
            for layer, rows_of_layer in chosen.groupby("layer", sort=False)}


def _at(steps: Any, t: Any, values: Any) -> Any:
    """Return a curve at these steps, with NaN where it was not measured."""
    value_at = dict(zip(t.tolist(), values.tolist(), strict=True))
    return np.array([value_at.get(step, np.nan) for step in steps.tolist()])


def _median(values: Any) -> float:
    """Median of the finite values; NaN if there is none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")
