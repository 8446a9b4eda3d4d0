"""Adaptive SLO: speed up the layer that learns features least, and slow down all others."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from richter.controls.direction import Base
from richter.controls.groups import owner
from richter.controls.slo import SLO
from richter.core import SelectionError, matches, unknown

LayerRichness = Callable[[], Mapping[str, float]]  # returns the richness of each layer now, by name, e.g. its nfc


class AdaptiveSLO(SLO):
    """SLO with speeds that follow a measurement: s for the layer with the smallest ``richness``, 1/s for all others.  [nfa, App.
    J]

    >>> rich = richter.workflows.nfc_by_layer(model, probe)
    >>> AdaptiveSLO(slo_groups(model), lr=0.05, richness=rich, s=20.0, every=20)
    Before every ``every``-th step, including the first, ``richness()`` returns one number per layer. The layer with the smallest
    is chosen; ties go to the first in the mapping's order. Layers that are NaN or match ``exclude`` (the read-out, whose nfc is 1
    by definition) are never chosen. If no layer is left, speeds do not change. All other layers, in the mapping or not, have
    speed 1/s. A map of a fused layer ("attn.q") counts for its module. ``history`` contains (step, chosen layer or None).
    Everything else is as in ``SLO``; a copy of this optimiser shares ``richness``.
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, richness: LayerRichness, *, s: float = 20.0, every: int = 1,
                 exclude: str | Sequence[str] = (), eps: float = 0.01, base: Base | None = None, weight_decay: float = 0.0,
                 maximize: bool = False, foreach: bool = True) -> None:
        if not callable(richness):
            raise SelectionError(f"richness={richness!r}: a function is needed that returns a number for each layer, e.g. "
                                 f"richter.workflows.nfc_by_layer(model, probe).")
        if not isinstance(s, (int, float)) or not (math.isfinite(s) and s >= 1):
            raise SelectionError(f"s={s!r}: the speed of the chosen layer, all others having 1/s, is a finite number from 1 on.")
        self.richness, self.s, self.every = richness, float(s), _positive(every)
        self.exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self.steps = 0
        self.history: list[tuple[int, str | None]] = []
        super().__init__(params, lr, eps=eps, base=base, weight_decay=weight_decay, maximize=maximize, foreach=foreach)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, which must name its layer."""
        if not isinstance(param_group.get("layer"), str):
            raise SelectionError("AdaptiveSLO: a parameter group does not say which layer it is, so it cannot be chosen. "
                                 "Pass slo_groups(model), or groups with a name under 'layer'.")
        if param_group.get("speed", 1.0) != 1.0:
            raise SelectionError(f"AdaptiveSLO: the group of layer {param_group['layer']!r} has speed={param_group['speed']!r}, "
                                 f"which would do nothing: speeds are chosen by richness. Leave it out, or use SLO.")
        super().add_param_group({**param_group, "speed": 1 / self.s})

    def _choose(self) -> None:
        """Choose the layer with the smallest richness, if it is time, and set all speeds."""
        if self.steps % self.every == 0:
            with torch.enable_grad():
                values = self.richness()
            chosen = self._poorest(values)
            self.history.append((self.steps, chosen))
            if chosen is not None:
                mine = owner(chosen, self._layers())
                for group in self.param_groups:
                    group["speed"] = self.s if group["layer"] == mine else 1 / self.s
        self.steps += 1

    def _poorest(self, values: Mapping[str, float]) -> str | None:
        """Layer with the smallest richness; None if none may be chosen."""
        if not isinstance(values, Mapping) or not values:
            raise SelectionError(f"richness() returned {values!r}; a number for each layer is needed, e.g. {{'0': 0.3}}.")
        for name in values:
            if owner(name, self._layers()) is None:
                raise unknown("the optimiser", "layer", name, self._layers())
        left = {k: v for k, v in values.items() if not (math.isnan(v) or any(matches(k, e) for e in self.exclude))}
        return min(left, key=left.__getitem__, default=None)

    def _layers(self) -> list[str]:
        """Names of the layers of all groups."""
        return [group["layer"] for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """State of SLO (with the current speeds in the groups), plus the steps and choices so far under ``adaptive``."""
        return {**super().state_dict(), "adaptive": {"steps": self.steps, "history": list(self.history)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an AdaptiveSLO, with its steps and choices."""
        if "adaptive" not in state_dict:
            raise SelectionError("load_state_dict: this is not the state of an AdaptiveSLO: it has no steps and choices.")
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "adaptive"})
        self.steps = state_dict["adaptive"]["steps"]
        self.history = [(step, layer) for step, layer in state_dict["adaptive"]["history"]]

    def __getstate__(self) -> dict[str, Any]:
        own = ("richness", "s", "every", "exclude", "steps", "history")
        return {**super().__getstate__(), **{k: getattr(self, k) for k in own}}


def _positive(every: Any) -> int:
    """Return a positive whole number; otherwise raise an error."""
    try:
        steps = operator.index(every)
    except TypeError:
        steps = 0
    if steps < 1:
        raise SelectionError(f"every={every!r}: a positive number of steps is needed.")
    return steps
