"""Fully connected networks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn


def mlp(widths: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU, bias: bool = True, scale: float = 1.0,
        seed: int | None = None) -> nn.Sequential:
    """Make linear layers of the given widths with an activation between them: ``mlp([64, 128, 10])``.

    The initialisation is torch's own, drawn from ``seed`` (None: the global stream), with every weight multiplied by ``scale``:
    small scales learn features, large ones stay close to their initial kernel.
    """
    if len(widths) < 2:
        raise ValueError(f"mlp({list(widths)}): at least an input and an output width are needed.")
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for d_in, d_out in itertools.pairwise(widths):
            layers += [nn.Linear(d_in, d_out, bias=bias), activation()]
    model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    return model
