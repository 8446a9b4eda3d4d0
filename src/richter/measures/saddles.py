"""At which saddle is a network? From small initial weights it rests at a saddle, leaves it along few directions, and rests at the
next: the loss has plateaus, and on each of them every layer has a rank. Numbers in, numbers out; needs no torch.

    with richter.Observer(model, probe, measures=["rank_of_weights", "stable_rank_of_weights"], when=50) as watch:
        ...                                    # train, and say watch(step, loss=loss)
    print(saddles_of(watch)["loss"])           # or of a run that was opened
    # saddle 0 (step 0 to 99, loss 0.45): ranks 57, 9; saddle 1 (step 420 to 900, loss 0.41): ranks 1, 1; now: saddle 1

Saddles are the plateaus of ``measures.stages``, numbered from 0 on. Saddle 0 of a training from small weights is the
origin: its ranks are those of the initial weights first, and of the direction in which it is left at its end; the median of
what was measured there is told. A network that was not started from small weights has plateaus as well, of ranks that are not
low.
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
    """A plateau of the loss, and the rank of each layer there: the median of what was measured on it, NaN where nothing was."""

    number: int  # in the order of time, from 0; two drops without a rest between them lead to one saddle
    plateau: Plateau
    ranks: Mapping[str, float]
    stable: Mapping[str, float]  # stable ranks, if they were measured
    measured: int  # how many snapshots lie on it

    def __str__(self) -> str:
        place = f"saddle {self.number} (step {self.plateau.start:.0f} to {self.plateau.end:.0f}, loss {self.plateau.level:.3g})"
        if not self.measured:
            return f"{place}: no ranks were measured there"
        return f"{place}: ranks {', '.join('?' if np.isnan(r) else f'{r:g}' for r in self.ranks.values())}"


@dataclass(frozen=True)
class Saddles:
    """The saddles of a training in the order of time."""

    saddles: tuple[Saddle, ...]
    stages: Stages

    def __len__(self) -> int:
        return len(self.saddles)

    def __getitem__(self, number: int) -> Saddle:
        return self.saddles[number]

    @property
    def now(self) -> Saddle | None:
        """Where the network is at the end of the curve; None while it falls, and where there are no stages."""
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
    """The ranks of layers, measured at ``steps``, on the plateaus of a curve.

    >>> saddles(find(t, loss), steps, {"0": [9, 9, 1, 1], "2": [8, 8, 1, 1]})
    """
    if not isinstance(stages, Stages):
        raise SelectionError(f"stages are a {type(stages).__name__}: those of a curve are needed, as measures.stages.find(steps, "
                             f"loss) gives them.")
    t = _numbers("steps", steps)
    if t.ndim != 1 or not np.isfinite(t).all():
        raise SelectionError(f"steps have shape {t.shape}{' and are not all finite' * (t.ndim == 1)}: a list of steps, at which "
                             f"ranks were measured, is needed, [t].")
    groups = [_columns(name, group, t) for name, group in (("ranks", ranks), ("stable", {} if stable is None else stable))]
    out = []
    for number, plateau in enumerate(stages.plateaus):
        on = (t >= plateau.start) & (t <= plateau.end)
        medians = [{layer: _median(values[on]) for layer, values in group.items()} for group in groups]
        out.append(Saddle(number, plateau, medians[0], medians[1], int(on.sum())))
    return Saddles(tuple(out), stages)


def _columns(name: str, group: Mapping[str, ArrayLike], t: Numbers) -> dict[str, Numbers]:
    """Ranks by layer, one at each step."""
    if not isinstance(group, Mapping):
        raise SelectionError(f"{name} are a {type(group).__name__}: the ranks of every layer by its name are needed, "
                             f"{{\"0\": [9, 9, 1], ...}}.")
    columns = {layer: _numbers(f"{name}[{layer!r}]", values) for layer, values in group.items()}
    for layer, values in columns.items():
        if values.shape != t.shape:
            raise SelectionError(f"{name}[{layer!r}] has shape {values.shape}: a rank for each of the {t.size} steps is needed, "
                                 f"[t].")
    return columns


def _numbers(name: str, values: ArrayLike) -> Numbers:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SelectionError(f"{name} cannot be read as numbers ({error}).") from error


def saddles_of(run: Any, **options: Any) -> dict[str, Saddles]:
    """Of a run (``richter.runs.open``) or an Observer that measured ``rank_of_weights``: by the names of its losses, or of
    ``probe_loss`` where none was logged. ``options`` are those of ``stages.find``."""
    if not all(hasattr(run, name) for name in ("frame", "names", "scalar")):
        raise SelectionError(f"run is a {type(run).__name__}: an Observer, or a run as richter.runs.open gives it, is needed.")
    rows = run.frame
    steps = np.unique(rows["step"][rows["measure"] == RANK])
    if not len(steps):
        raise SelectionError(f"{RANK} was not measured, so that no rank is known on any plateau: add it to the measures, "
                             f"Observer(..., measures=[{RANK!r}, {STABLE!r}]), or measure checkpoints.")
    curves = {name: run.scalar(name) for name in run.names if is_loss(name)} or {LOSS: _measured(rows, LOSS).get(WHOLE, ((), ()))}
    ranks, stable = ({layer: _at(steps, *curve) for layer, curve in _measured(rows, m).items()} for m in (RANK, STABLE))
    seen = {name: stages_in(series, **options) for name, series in curves.items()}
    return {name: saddles(stages, steps, ranks, stable) for name, stages in seen.items() if stages is not None}


def _measured(rows: Any, measure: str) -> dict[str, tuple[Any, Any]]:
    """Steps and values of a measure by layer, in the order in which layers were measured."""
    chosen = rows[rows["measure"] == measure].sort_values("step", kind="stable")
    return {str(layer): (mine["step"].to_numpy(), mine["value"].to_numpy(np.float64))
            for layer, mine in chosen.groupby("layer", sort=False)}


def _at(steps: Any, t: Any, values: Any) -> Any:
    """A curve at these steps, NaN where it was not measured."""
    known = dict(zip(t.tolist(), values.tolist(), strict=True))
    return np.array([known.get(step, np.nan) for step in steps.tolist()])


def _median(values: Any) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")
