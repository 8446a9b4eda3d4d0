"""Statistics of the weights alone, now and at initialisation: OfWeight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import APART, NO_INITIAL, Gathering, Group, Missing, Simple, Statistic

if TYPE_CHECKING:
    from richter.instrument.subject import Subject

NOT_MOVED = "0/0: the weights (or what is asked of them) have not moved from the initial ones"


class Factor:
    """A weight matrix W [r, d_in] and what is asked of it again and again: M = W W^T and M^2."""

    def __init__(self, W: Float[Tensor, "r d_in"]) -> None:
        self.W = W

    @cached_property
    def M(self) -> Float[Tensor, "r r"]:
        return self.W @ self.W.T

    @cached_property
    def M2(self) -> Float[Tensor, "r r"]:
        return self.M @ self.M


@dataclass(frozen=True)
class OfWeight(Statistic):
    """A statistic of the matrices now and then: compute(W, W0). ``initial``: it needs W0; ``project``: W and W0 arrive in an
    orthonormal basis of their columns, as moments with ``project`` do."""

    name: str
    compute: Callable[[Tensor, Any], Any]
    initial: bool = False
    project: bool = False

    @property
    def zero(self) -> str:  # type: ignore[override]
        return NOT_MOVED if self.initial else ""

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _OfWeight(self, subject)


class _OfWeight(Simple):
    def __init__(self, statistic: OfWeight, subject: Subject) -> None:
        super().__init__()
        self.statistic, self.subject = statistic, subject

    def value(self, place: str, without: Group | None = None) -> Any:
        if place not in self.subject.maps:
            raise Missing(APART)
        W, W0 = self.subject.pair(place)
        if self.statistic.initial and W0 is None:
            raise Missing(NO_INITIAL)
        Q = self.subject.bases[place] if self.statistic.project else None
        if Q is not None:
            W, W0 = Q.T @ W, None if W0 is None else Q.T @ W0
        return self.statistic.compute(W, W0)


def block_diagonal(W: Float[Tensor, "r o i"]) -> Tensor:
    """Grouped maps as one matrix on the whole input."""
    return torch.block_diag(*W)


def basis(W: Float[Tensor, "o i"], W0: Float[Tensor, "o i"] | None) -> Float[Tensor, "o r"] | None:
    """An orthonormal basis of the columns of W (and W0), where to go there, d r + r^2 operations for each g, is less than d^2."""
    columns = W if W0 is None else torch.cat([W, W0], 1)
    d, r = columns.shape
    return torch.linalg.qr(columns)[0] if r * (d + r) < d * d else None


MATRIX = OfWeight("matrix", lambda W, W0: W)
WEIGHT = OfWeight("weight", lambda W, W0: Factor(W), project=True)
INITIAL_WEIGHT = OfWeight("initial_weight", lambda W, W0: Factor(W0), initial=True, project=True)
CHANGE = OfWeight("change", lambda W, W0: Factor(W - W0), initial=True, project=True)
