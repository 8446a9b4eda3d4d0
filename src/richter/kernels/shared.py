"""Kernels of a parameter that is several maps (a vocabulary's matrix that reads tokens and writes logits), without its gradients:
of sums over positions of outer products a b^T, <A, A'> is the sum over pairs of positions of <a, a'> <b, b'>."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from richter.instrument.capture import State
from richter.instrument.captures import LayerCapture, Survey
from richter.instrument.stream import steps
from richter.kernels.operations import NUMBERS, Outputs

MOST = 2 ** 25  # numbers of gradients that are formed


def by_pairs(survey: Survey, state: State, maps: tuple[str, ...], parameter: str, examples: int, outputs: Outputs) -> bool:
    """Are pairs of positions multiplied? Where the gradients of all examples, of one cotangent, are too many numbers: of all, and
    not of a chunk, because smaller chunks must not take more room."""
    numbers = state[parameter].numel()
    whole = all(survey.maps[k].kind in ("dense", "lookup") and survey.maps[k].entries == numbers for k in maps)
    return outputs != "full" and state[parameter].dim() == 2 and whole and examples * numbers > MOST


@dataclass(frozen=True)
class Side:
    """One factor of the outer products of one map: what is asked "v n s d", what is read "n s d", or indices "n s"."""

    numbers: Tensor
    asked: bool

    def of(self, v: int, rows: slice) -> Tensor:
        t = self.numbers[v] if self.asked else self.numbers
        return t[rows].flatten(0, 1)


def oriented(c: LayerCapture, parameter: Tensor) -> tuple[Side, Side] | None:
    """The factors along the rows and the columns of the parameter; None if the map's matrix is neither it nor its transpose."""
    g, h, W = Side(c.g, True), Side(c.h, False), c.W
    if W.data_ptr() != parameter.data_ptr():
        return None
    if W.shape == parameter.shape and W.stride() == parameter.stride():
        return g, h
    return (h, g) if W.T.shape == parameter.shape and W.T.stride() == parameter.stride() else None


def _products(a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    """Inner products of two factors at all pairs of positions; an index stands for a unit vector, -1 for nothing."""
    if a.dim() == 2 and b.dim() == 2:
        return a @ b.T
    if a.dim() == 1 and b.dim() == 1:
        return ((a[:, None] == b) & (a >= 0)[:, None]).to(like)
    if a.dim() == 1:
        return _products(b, a, like).T
    return a[:, b.clamp(min=0)] * (b >= 0).to(a)


def add_shared(K: Tensor, maps: tuple[str, ...], a: Mapping[str, LayerCapture], b: Mapping[str, LayerCapture], parameter: Tensor,
               outputs: Outputs) -> bool:
    """K "n m" or "v n m" += the kernel of a parameter that is these maps; False if some of them is only a part of it."""
    left, right = ({k: oriented(c[k], parameter) for k in maps} for c in (a, b))
    n, m, v = a[maps[0]].g.shape[1], b[maps[0]].g.shape[1], len(a[maps[0]].g)
    pairs = [(p, q) for p in left.values() for q in right.values()]
    if any(p is None or q is None for p, q in pairs):
        return False
    for p, q in pairs:
        assert p is not None and q is not None
        s, t = (side[0].numbers.shape[2 if side[0].asked else 1] for side in (p, q))
        for rows in steps(n, max(1, NUMBERS // (s * m * t))):
            for i in range(v):
                first, second = (_products(p[j].of(i, rows), q[j].of(i, slice(0, m)), a[maps[0]].g) for j in range(2))
                summed = (first * second).unflatten(1, (m, t)).sum(2).unflatten(0, (-1, s)).sum(1)
                (K if outputs == "trace" else K[i])[rows] += summed.to(K.dtype)
    return True
