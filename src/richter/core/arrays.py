"""numpy or torch in, the same kind out; arithmetic in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from richter.core.errors import SelectionError

Array = Tensor | np.ndarray


def to_tensor(a: Any, name: str = "the array") -> Tensor:
    """A float64 tensor of anything array-like, real and finite (on the CPU where the device has no float64)."""
    try:
        t = a.detach() if isinstance(a, Tensor) else torch.as_tensor(np.asarray(a))
    except (TypeError, ValueError) as error:
        raise SelectionError(f"{name} is a {type(a).__name__} that cannot be read as numbers ({error}).") from error
    if t.is_complex() or not torch.isfinite(t).all():
        raise SelectionError(f"{name} is complex." if t.is_complex() else f"{name} contains NaN or Inf.")
    return (t.cpu() if t.device.type == "mps" else t).double()


def like(result: Tensor, *given: Any) -> Array:
    """``result`` as numpy when what was given is (a tuple or dict of) numpy."""
    found = given[0]
    while isinstance(found, (tuple, list, dict)) and len(found):
        found = next(iter(found.values() if isinstance(found, dict) else found))
    return result.cpu().numpy() if isinstance(found, np.ndarray) else result


def as_tensors(x: Any, dtype: torch.dtype) -> Any:
    """numpy arrays inside ``x`` as tensors; floating point ones in the given dtype."""
    if isinstance(x, np.ndarray):
        t = torch.from_numpy(x)
        return t.to(dtype) if t.is_floating_point() else t
    if isinstance(x, dict):
        return {k: as_tensors(v, dtype) for k, v in x.items()}
    return tuple(as_tensors(v, dtype) for v in x) if isinstance(x, (tuple, list)) else x
