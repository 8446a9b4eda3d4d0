"""The neural feature matrix and the gradient outer product of one W side by side, and with each group of examples left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import WITHIN, Derived, DerivedGathering, Gathering, Remembered, finite
from richter.instrument.statistics.moments import PROJECTED_PTK_COVARIANCE, PTK_CHANGE, MomentGathering, Sketched, total
from richter.instrument.statistics.moved import formed_with_each_moved, with_each_moved
from richter.instrument.statistics.weights import CHANGE, INITIAL_WEIGHT, WEIGHT, Factor, FeatureMatrix, Seen, feature_matrix
from richter.linalg import MODEST

if TYPE_CHECKING:
    from richter.instrument.subject import Subject


class Pair:
    """The neural feature matrix F = W^T W and the gradient outer product G = W^T K W of one W, and how they stand to each other:
    what several measures ask is computed once. ``known``: <F, G> and |F| |G|, where somebody has them already."""

    def __init__(self, factor: Factor | Seen, K: Tensor | Sketched | Callable[[], Any],
                 known: tuple[float, float] | None = None) -> None:
        self._factor, self._K = factor, K
        if known is None:
            known = self.F.inner(self.G), finite(self.F.norm * self.G.norm)
        self.inner, self.size = known  # <F, G> and |F| |G|

    @cached_property
    def F(self) -> FeatureMatrix:
        return feature_matrix(self._factor)

    @cached_property
    def G(self) -> FeatureMatrix:
        return feature_matrix(self._factor, self._K() if callable(self._K) else self._K)


@dataclass(frozen=True)
class OfPair(Derived):
    """A pair of a factor and a moment."""

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _OfPair(self, needs)


class _OfPair(DerivedGathering):
    def leaving(self, place: str, kind: str) -> Sequence[Any]:
        factor, moment = self.needs
        made = moment.gathering if isinstance(moment, Remembered) else moment
        parts = made.parts(place) if kind in ("examples", WITHIN) and isinstance(made, MomentGathering) else None
        if parts is None or len(parts) < 2:
            return super().leaving(place, kind)
        of = factor.value(place)
        known: Sequence[tuple[float, float]] | None
        if kind == WITHIN:
            known = formed_with_each_moved(of, parts) if isinstance(of, Seen) else with_each_moved(of, parts)
        else:
            known = formed_without_each(of, parts) if isinstance(of, Seen) else without_each_group(of, parts)
        if known is None:
            return super().leaving(place, kind)
        finite(sum(abs(inner) + size for inner, size in known))
        return [Pair(of, partial(moment.value, place, (kind, i)), sizes) for i, sizes in enumerate(known)]


def formed_without_each(factor: Seen, parts: Sequence[tuple[Tensor, Tensor, int]]) -> list[tuple[float, float]]:
    """<F, G> and |F| |G| with each group left out, from the inner products of the groups' own matrices."""
    F, halved = factor.formed(None).flatten(), parts[0][0] is not parts[0][1]
    first = torch.stack([factor.formed(A.to(F)).flatten() for A, _, _ in parts])
    second = torch.stack([factor.formed(B.to(F)).flatten() for _, B, _ in parts]) if halved else first
    inner, squares, norm = ((first + second) @ F / 2 if halved else first @ F).cpu(), (first @ second.T).cpu(), F.norm().item()
    number, left = sum(n for _, _, n in parts), 1 - torch.eye(len(parts), dtype=squares.dtype)
    return [((keep @ inner).item() / (number - n), norm * max((keep @ squares @ keep).item(), 0.0) ** 0.5 / (number - n))
            for keep, (_, _, n) in zip(left, parts, strict=True)]


SINGLE = 128  # rows up to which double precision costs nothing
REMAINING = 1e-6  # of |G|^2: where leaving a group out leaves less, too many digits are lost
TOLD = 1e-4  # of <F, G> / (|F| |G|): groups whose leaving out changes it by less are not told apart in single precision


def without_each_group(factor: Factor, parts: Sequence[tuple[Tensor, Tensor, int]]) -> list[tuple[float, float]] | None:
    """<F, G> and |F| |G| with each group left out of K = (sum of all groups) / (positions). Standard errors need few digits:
    single precision, if it tells the groups apart. None where a group is nearly all there is."""
    single = factor.M.dtype == torch.float64 and len(factor.M) > SINGLE
    known = _without_each_group(factor, parts, torch.float32) if single else None
    if known is not None:
        cosines = [inner / size for inner, size in known]
        known = known if max(cosines) - min(cosines) > TOLD * max(map(abs, cosines)) else None
    return known or _without_each_group(factor, parts, factor.M.dtype)


def _without_each_group(factor: Factor, parts: Sequence[tuple[Tensor, Tensor, int]],
                        dtype: torch.dtype) -> list[tuple[float, float]] | None:
    """From K_g M of every group g: <F, G> = <K M, M>, and |G|^2 = Tr(K M K M). The two halves of a sketch stand for the two K."""
    M, halved = factor.M, parts[0][0] is not parts[0][1]
    by = math.sqrt(factor.square)  # |M| = |F|
    scale = max(A.diagonal().max().item() for A, _, _ in parts)  # no entry is larger
    if not (0 < by < math.inf and 0 < scale < math.inf):
        return None
    scale = scale if not 1 / MODEST < scale < MODEST else 1.0
    unit = (M / by).to(dtype)

    def products(sums: Iterable[Tensor]) -> tuple[list[Tensor], Tensor]:
        mine = [(A if scale == 1 else A.to(M) / scale).to(unit) @ unit for A in sums]
        return mine, total(mine)

    first, whole = products(A for A, _, _ in parts)
    second, other = products(B for _, B, _ in parts) if halved else (first, whole)
    square = whole.flatten().dot(other.T.flatten()).item()
    number, flat = sum(n for _, _, n in parts), unit.flatten()
    known = []
    for a, b, (_, _, n) in zip(first, second, parts, strict=True):
        left = whole - a
        right = other - b if halved else left
        rest = left.flatten().dot(right.T.flatten()).item()
        if rest <= REMAINING * abs(square):
            return None
        inner = left.flatten().dot(flat).item()
        inner = (inner + right.flatten().dot(flat).item()) / 2 if halved else inner
        size = by * by * scale / (number - n)
        known.append((inner * size, rest ** 0.5 * size))
    return known


NFM_AND_AGOP = OfPair("nfm_and_agop", Pair, (WEIGHT, PROJECTED_PTK_COVARIANCE))
CENTRED_PAIR = OfPair("centred_nfm_and_agop", Pair, (CHANGE, PROJECTED_PTK_COVARIANCE))
DOUBLE_CENTRED_PAIR = OfPair("double_centred_nfm_and_agop", Pair, (CHANGE, PTK_CHANGE))
PTK_CENTRED_PAIR = OfPair("ptk_centred_nfm_and_agop", Pair, (INITIAL_WEIGHT, PTK_CHANGE))
