"""``nn.EmbeddingBag`` on a matrix of indices: rows are looked up one by one, and then summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from richter.layers import takes_apart

Lookup = Callable[[Tensor, Tensor], Tensor]  # F.embedding of indices "n s" with a weight


def bag_of(args: Any, kwargs: Any) -> dict[str, Any] | None:
    """Return the arguments of a call of F.embedding_bag by name, if it is a plain sum, mean or maximum over the rows of a matrix
    of indices; otherwise None."""
    names = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse",
             "per_sample_weights", "include_last_offset", "padding_idx")
    bag = {"offsets": None, "max_norm": None, "scale_grad_by_freq": False, "mode": "mean", "per_sample_weights": None,
           "padding_idx": None} | dict(zip(names, args, strict=False)) | kwargs
    plain = bag["offsets"] is None and bag["max_norm"] is None and not bag["scale_grad_by_freq"]
    return bag if plain and bag["input"].dim() == 2 and bag["input"].numel() else None


def bag_in_parts(lookup: Lookup, bag: dict[str, Any]) -> Tensor:
    """Compute F.embedding_bag. Entries at the padding index are left out, and a bag without other entries is zero."""
    index, weight, padding = bag["input"], bag["weight"], bag["padding_idx"]
    padding = padding + len(weight) if padding is not None and padding < 0 else padding
    real = torch.ones_like(index, dtype=torch.bool) if padding is None else index != padding
    rows = lookup(index, weight)
    keep = real.unsqueeze(-1)
    if bag["mode"] == "max":
        return rows.masked_fill(~keep, -torch.inf).max(1).values.masked_fill(~keep.any(1), 0)
    if bag["per_sample_weights"] is not None:
        rows = rows * bag["per_sample_weights"].unsqueeze(-1)
    z = rows.masked_fill(~keep, 0).sum(1)
    return z / keep.sum(1).clamp(min=1) if bag["mode"] == "mean" else z


@takes_apart(F.embedding_bag)
def look_up(recorder: Any, func: Any, args: Any, kwargs: Any) -> Any:
    bag = bag_of(args, kwargs)
    if bag is None:
        return recorder.called(func, args, kwargs)
    return bag_in_parts(lambda *lookup: recorder.handled(F.embedding, lookup, {}), bag)
