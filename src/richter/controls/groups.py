"""Parameter groups by layer: one per module that owns parameters, named as in ``named_modules()``."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from richter.core import SelectionError, matches, unknown
from richter.core.modules import unwrap


def slo_groups(model: nn.Module, speeds: Mapping[str, float] | None = None, default: float = 1.0) -> list[dict[str, Any]]:
    """Make parameter groups for ``SLO``, one per layer, with its ``speed`` and its name under ``layer``.

    >>> SLO(slo_groups(model, {"0": 500.0}, default=0.002), lr=0.03)
    >>> SLO(slo_groups(model, {"h.*.attn": 2.0, "h.0.attn.c_proj": 5.0}), lr=0.1)
    ``speeds``: by names or patterns, as in ``layers=`` of ``richter.measure``: "h.0" includes everything below it. The exact name
    of a layer takes precedence over patterns, and the last matching pattern over earlier ones. ``default``: the speed of all
    other layers. A group contains the parameters that its module owns, weight and bias. A shared parameter belongs to the first
    of its owners. """
    if speeds is not None and not isinstance(speeds, Mapping):
        raise SelectionError(f"speeds={speeds!r}: a mapping from layers to speeds is needed, e.g. {{'0': 500.0, '2': 0.002}}.")
    by_pattern = dict(speeds or {})
    for pattern, speed in [*by_pattern.items(), ("default", default)]:
        number(speed, f"slo_groups: the speed of {pattern!r}")
    layers = owners(model)
    for pattern in by_pattern:
        if not any(matches(name, pattern) for name in layers):
            raise unknown("the model", "layer", str(pattern), layers)
    return [{"params": params, "layer": name, "speed": _speed(name, by_pattern, default)} for name, params in layers.items()]


def _speed(name: str, by_pattern: dict[str, float], default: float) -> float:
    """Speed of a layer: by its name, by the last matching pattern, or the default."""
    if name in by_pattern:
        return by_pattern[name]
    return next((speed for pattern, speed in reversed(by_pattern.items()) if matches(name, pattern)), default)


def owners(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return the parameters that each module owns itself; a shared one belongs to the first of its owners."""
    seen: set[Tensor] = set()
    layers: dict[str, list[Tensor]] = {}
    for name, module in unwrap(model).named_modules():
        own = [p for p in module.parameters(recurse=False) if p not in seen]
        seen.update(own)
        if own:
            layers[name] = own
    if not layers:
        raise SelectionError("the model has no parameters, so there is no layer to give a speed.")
    return layers


def owner(name: str, layers: Iterable[str]) -> str | None:
    """Return the layer that a map belongs to: its own name, or the longest prefix of its dotted name ("attn.q" belongs to
    "attn")."""
    known = set(layers)
    stem = name
    while stem not in known:
        if not stem:
            return None
        stem = stem.rpartition(".")[0]
    return stem


def number(value: Any, what: str) -> None:
    """Check that a number is real, finite and not negative. A one-element tensor is not read, because that would synchronise its
    device."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise SelectionError(f"{what} is {value!r}: a finite number from 0 on is needed.")
