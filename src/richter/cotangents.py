"""What is back-propagated: the metric on outputs. ``cotangents(f[n,k], y) -> V[v,n,k]``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import SelectionError

Cotangents = Callable[[Float[Tensor, "n k"], Tensor | None], Float[Tensor, "v n k"]]


def every_output(f: Float[Tensor, "n k"], y: Tensor | None = None) -> Float[Tensor, "v n k"]:
    """Each output by itself, V_v = e_v: the exact sums over outputs."""
    n, k = f.shape
    return torch.eye(k, dtype=f.dtype, device=f.device)[:, None].expand(k, n, k)


@functools.cache  # the same combinations are the same object: measures that ask for them share one computation
def random_outputs(v: int, seed: int = 0) -> Cotangents:
    """``v`` Gaussian combinations of the outputs with E[sum_v V_v V_v^T] = I, the same for every example."""
    if v < 1:
        raise SelectionError(f"random_outputs({v}): at least one random output is needed.")

    def random(f: Float[Tensor, "n k"], y: Tensor | None = None) -> Float[Tensor, "v n k"]:
        n, k = f.shape
        draw = torch.Generator().manual_seed(seed)
        R = torch.randn(v, k, generator=draw, dtype=torch.float64) / v ** 0.5
        return R.to(f.device, f.dtype)[:, None].expand(v, n, k)

    random.__name__ = f"random_outputs({v}, seed={seed})"
    return random
