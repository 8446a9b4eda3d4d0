"""Feature matrices from random outputs, with what their two halves differ by added in one group of examples: the sketch's own
error is the jackknife of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from richter.instrument.statistics.moments import shares, total

if TYPE_CHECKING:
    from richter.instrument.statistics.weights import Factor, Seen


def formed_with_each_moved(factor: Seen, parts: Sequence[tuple[Tensor, Tensor, int]]) -> list[tuple[float, float]]:
    """<F, G> and |F| |G| with a share of half the difference of both halves added in one group."""
    F = factor.formed(None).flatten()
    A, B = (factor.formed(total([part[half] for part in parts]).to(F)).flatten() for half in (0, 1))  # type: ignore[misc]
    steps = torch.stack([factor.formed((a - b).to(F) / 2).flatten() for a, b, _ in parts])
    return _moved(parts, F.norm().item(), ((A + B) @ F / 2).item(), (A @ B).item(), steps @ F, steps @ (A + B))


def with_each_moved(factor: Factor, parts: Sequence[tuple[Tensor, Tensor, int]]) -> list[tuple[float, float]]:
    """The same on the side of the outputs."""
    M, M2 = factor.M, (factor.M @ factor.M).flatten()
    A, B = (total([part[half] for part in parts]).to(M) for half in (0, 1))  # type: ignore[misc]
    MA, MB = M @ A, M @ B
    square = (MA * MB.T).sum().item()
    both = ((MA + MB) @ M).flatten()
    steps = torch.stack([(a - b).to(M).flatten() / 2 for a, b, _ in parts])
    return _moved(parts, factor.square ** 0.5, ((A + B).flatten() @ M2 / 2).item(), square, steps @ M2, steps @ both)


def _moved(parts: Sequence[tuple[Tensor, Tensor, int]], norm: float, inner: float, square: float, along: Tensor,
           across: Tensor) -> list[tuple[float, float]]:
    """From sums over all groups and what each step adds to them, in first order: there and back, the second cancels."""
    number = sum(n for _, _, n in parts)
    return [((inner + share * along[g].item()) / number,
             norm * max(square + share * across[g].item(), 0.0) ** 0.5 / number) for g, share in shares(len(parts))]
