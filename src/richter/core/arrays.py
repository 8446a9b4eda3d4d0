"""Conversion rule for functions of arrays: torch in, torch out, on the device of the first array; any other array-like (numpy,
lists, data frames) in, numpy out. Arithmetic is in float64."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from richter.core.values import SelectionError

Array = Tensor | np.ndarray  # type of results
ArrayLike = Any  # type of arguments: a tensor, or anything that numpy converts to an array


def to_tensor(a: ArrayLike, name: str = "the array") -> Tensor:
    """Make a float64 tensor of anything array-like that is real and finite (on the CPU where the device has no float64)."""
    try:
        t = a.detach() if isinstance(a, Tensor) else torch.as_tensor(writable(np.asarray(a)))
    except (TypeError, ValueError, RuntimeError) as error:
        raise SelectionError(f"{name} is a {type(a).__name__} that cannot be read as numbers ({error}).") from error
    if t.is_complex() or not torch.isfinite(t).all():
        raise SelectionError(f"{name} is complex." if t.is_complex() else f"{name} contains NaN or Inf.")
    return (t.cpu() if t.device.type == "mps" else t).double()


def writable(a: np.ndarray) -> np.ndarray:
    """Return an array that torch can share: a copy of one that is read-only or runs backwards."""
    return a if a.flags.writeable and all(stride >= 0 for stride in a.strides) else a.copy()


def like(result: Tensor, *given: ArrayLike) -> Array:
    """Return ``result`` as the kind of the first array of the first argument, which may lie in tuples, lists or dicts."""
    first = given[0]
    while isinstance(first, (tuple, list, Mapping)) and len(first):
        first = next(iter(first.values() if isinstance(first, Mapping) else first))
    return result if isinstance(first, Tensor) else result.cpu().numpy()


def as_tensors(x: Any, dtype: torch.dtype) -> Any:
    """Turn numpy arrays inside ``x`` into tensors; floating point ones get the given dtype."""
    if isinstance(x, np.ndarray):
        t = torch.from_numpy(x)
        return t.to(dtype) if t.is_floating_point() else t
    if isinstance(x, dict):
        return {k: as_tensors(v, dtype) for k, v in x.items()}
    return tuple(as_tensors(v, dtype) for v in x) if isinstance(x, (tuple, list)) else x


def fingerprint(x: Any) -> str:
    """Digest of the tensors inside ``x``, of their bytes, shapes and dtypes, in hexadecimal."""
    digest = hashlib.sha256()
    for t in _tensors(x):
        digest.update(repr((t.shape, t.dtype)).encode())
        digest.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors(x: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples, lists and mappings."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list, Mapping)):
        for part in x.values() if isinstance(x, Mapping) else x:
            yield from _tensors(part)
