"""Neural collapse: whether the features of a class become one point, the points a simplex, and the last layer aligned with them.

    c = analyse(Phi, labels, weight=model.head.weight, bias=model.head.bias)
    c.nc1, c.nc2_angle, c.nc3, c.nc4                     # all 0 at complete collapse

mu_i is the mean of the features of class i, mu the mean of the class means, m_i = mu_i - mu, S_W the mean over the examples of
(Phi - mu_i)(Phi - mu_i)^T, and S_b = (1/C) sum_i m_i m_i^T.  [layerwise, App. D]

    nc1        tr(S_W S_b^+) / C                         variance within classes, relative to between classes
    nc1_trace  tr(S_W S_b)                               as printed in the text; its unit is that of Phi^4
    nc2_angle  | cos(m_i, m_j) - (C delta_ij - 1)/(C - 1) |_F           distance from the angles of a simplex
    nc2_norm   std_i |m_i| / mean_i |m_i|                spread of the lengths
    nc3        mean_i | w_i/|w_i| - m_i/|m_i| |          distance of the last layer's rows from the class means
    nc4        share of examples for which the last layer and the nearest class mean predict different classes

Unbalanced classes: each class has the mean of its own examples and counts once in mu, S_b and the angles; each example counts
once in S_W. Classes without examples are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Card, Interval, Ref, Remark, SelectionError
from richter.core.arrays import ArrayLike
from richter.instrument.statistics import CLASSES, Classes, OfLayer
from richter.instrument.statistics.features import ROWS
from richter.measures.cards import NEURAL_COLLAPSE, POSITIVE, UNIT
from richter.measures.features import UNBALANCED, numbers
from richter.measures.measure import Measure

NO_WEIGHT = "nc3 is defined for the last layer: it compares its rows, one per class, with the class means"


@dataclass(frozen=True)
class Collapse:
    """Measures of neural collapse; each is 0 at complete collapse."""

    nc1: float = math.nan
    nc1_trace: float = math.nan
    nc2_angle: float = math.nan
    nc2_norm: float = math.nan
    nc3: float = math.nan  # NaN without a last layer
    nc4: float = math.nan
    classes: int = 0  # number of classes with examples
    notes: tuple[str, ...] = ()


def analyse(Phi: ArrayLike, labels: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None) -> Collapse:
    """Measure the collapse of features ``Phi`` [n, p] with class ids [n], and of the last layer [C, p] that reads them."""
    P, ids, W, b = _read(Phi, labels, weight, bias)
    present, class_index = ids.unique(return_inverse=True)
    means = torch.stack([_mean(P[class_index == c]) for c in range(len(present))])
    classes = Classes(present, class_index.bincount(), means, int(ids.max()) + 1 if W is None else len(W), W)
    for rows, chunk_ids in zip(P.split(ROWS), ids.split(ROWS), strict=True):  # second pass
        classes.add(rows, chunk_ids, chunk_ids if W is None else (rows @ W.T + (0 if b is None else b)).argmax(1))
    collapse = of_classes(classes)
    return collapse if W is not None else replace(collapse, nc4=math.nan)


def of_classes(c: Classes) -> Collapse:
    """Measure collapse from the sums over classes."""
    C, s, notes = len(c.means), c.s, tuple(_notes(c))
    if C < 2 or not len(s):
        return Collapse(classes=C, notes=notes)
    alone = bool((c.counts == 1).all())
    nc1 = math.nan if alone else (c.within / s.square()).sum().item()  # S_b^+ contains C/s^2, and nc1 has a factor 1/C
    trace = math.nan if alone else (c.within * s.square()).sum().item() / C
    size, angle, nc3 = c.norms, math.nan, math.nan
    if size.all():
        unit = c.m / size[:, None]
        frame = (C * torch.eye(C).to(unit) - 1) / (C - 1)
        angle = (unit @ unit.T - frame).norm().item()
        W = None if c.weight is None else c.weight[c.present]
        if W is not None and (W.norm(dim=1) > 0).all():
            nc3 = (W / W.norm(dim=1, keepdim=True) - unit).norm(dim=1).mean().item()
    return Collapse(nc1, trace, angle, (size.std(correction=0) / size.mean()).item(), nc3, c.others / c.n, classes=C, notes=notes)


def _mean(rows: Float[Tensor, "n p"]) -> Float[Tensor, " p"]:
    """Mean of rows, without rounding error if all rows are equal."""
    return rows[0] + (rows - rows[0]).mean(0)


def _notes(c: Classes) -> Iterator[str]:
    """Yield notes about classes that are missing or too small."""
    counts, norms, C = c.counts, c.norms, len(c.counts)
    if c.classes > C:
        yield f"{c.classes - C} of {c.classes} classes have no example: the numbers refer to the other {C}"
    if C < 2:
        yield "all examples belong to one class, so there is no variance between classes"
        return
    if (counts == 1).all():
        yield "every class has one example, which is the class mean: nc1 and nc1_trace are undefined. Give more examples"
    elif (counts == 1).any():
        yield (f"{int((counts == 1).sum())} of {C} classes have one example, which is the class mean: nc1 and nc1_trace are "
               f"underestimated")
    if counts.max() > UNBALANCED * counts.min():
        yield (f"classes are not balanced ({int(counts.min())} to {int(counts.max())} examples): each class counts once in the "
               f"numbers between classes, each example once in those within classes")
    if not norms.any():
        yield "all class means are equal (features are zero, or equal for all examples), so nothing can be compared"
    elif not norms.all():
        yield "the mean of one class equals the mean of all classes, so it has no direction: nc2_angle and nc3 are undefined"


def _read(Phi: ArrayLike, labels: ArrayLike, weight: ArrayLike | None,
          bias: ArrayLike | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Features, class ids, weight and bias as tensors, checked."""
    P, ids = numbers(Phi, "Phi"), numbers(labels, "labels")
    if P.dim() != 2 or ids.dim() != 1 or not 0 < len(P) == len(ids) or not P.shape[1]:
        raise SelectionError(f"Phi {tuple(P.shape)} and labels {tuple(ids.shape)} are not features [n, p] and class ids [n] of "
                             f"the same n examples.")
    if not (ids == ids.round()).all() or (ids < 0).any():
        raise SelectionError(f"labels are class ids, whole numbers from 0 on; these go from {ids.min().item():g} to "
                             f"{ids.max().item():g}. Neural collapse is defined for classes, not for regression.")
    if weight is None:
        if bias is not None:
            raise SelectionError("bias= needs weight=: give weight= [C, p] too.")
        return P, ids.long().to(P.device), None, None
    W = numbers(weight, "weight").to(P.device)
    if W.dim() != 2 or W.shape[1] != P.shape[1] or ids.max() >= len(W):
        raise SelectionError(f"weight has shape {tuple(W.shape)}; the last layer must be [C, p], with p = {P.shape[1]} features "
                             f"and a row for every class up to {int(ids.max())}.")
    b = None if bias is None else numbers(bias, "bias").to(P.device)
    if b is not None and b.shape != W.shape[:1]:
        raise SelectionError(f"bias has shape {tuple(b.shape)}, and weight {tuple(W.shape)}: bias needs one number for each of "
                             f"the {len(W)} classes.")
    return P, ids.long().to(P.device), W, b


# ------------------------------------------------------------------------------------------------------- in the instrument


def _said(c: Collapse) -> Remark:
    """Notes as a remark."""
    return Remark(text="; ".join(c.notes))


def _said_of_last(c: Collapse) -> Remark:
    """Add a note on the last layer: nc3 is missing although class means have directions."""
    return Remark(text="; ".join([*([NO_WEIGHT] if math.isnan(c.nc3) and not math.isnan(c.nc2_angle) else []), *c.notes]))


COLLAPSE = OfLayer("collapse", of_classes, (CLASSES,))
MEASURES = (
    Measure("nc1", lambda c: c.nc1, (COLLAPSE,), remark=_said, card=Card(
        "NC1: within / between classes", "How far examples of a class lie apart, relative to the distances between classes.",
        rich="down", panel=NEURAL_COLLAPSE, bounds=POSITIVE, ref=Ref("layerwise", "Eq. D.6"))),
    Measure("nc1_trace", lambda c: c.nc1_trace, (COLLAPSE,), remark=_said, card=Card(
        "NC1 as a product of covariances",
        "The product of the covariances within and between classes: 0 if they have no direction in common.",
        panel=NEURAL_COLLAPSE, bounds=POSITIVE, ref=Ref("layerwise", "Prop. 2.5.1"))),
    Measure("nc2_angle", lambda c: c.nc2_angle, (COLLAPSE,), remark=_said, card=Card(
        "NC2: angles of class means", "How far the angles between class means are from those of a simplex.",
        rich="down", panel=NEURAL_COLLAPSE, bounds=POSITIVE, ref=Ref("layerwise", "Eq. D.7"))),
    Measure("nc2_norm", lambda c: c.nc2_norm, (COLLAPSE,), remark=_said, card=Card(
        "NC2: lengths of class means", "Spread of the distances of class means from their common mean.",
        rich="down", panel=NEURAL_COLLAPSE, bounds=POSITIVE, ref=Ref("layerwise", "Eq. D.7"))),
    Measure("nc3", lambda c: c.nc3, (COLLAPSE,), remark=_said_of_last, card=Card(
        "NC3: last layer and class means", "Distance between the directions of the last layer's rows and of the class means.",
        rich="down", panel=NEURAL_COLLAPSE, bounds=Interval(0.0, 2.0), ref=Ref("layerwise", "Eq. D.8"))),
    Measure("nc4", lambda c: c.nc4, (COLLAPSE,), remark=_said, card=Card(
        "NC4: nearest class mean",
        "The share of examples whose nearest class mean belongs to another class than the network predicts.",
        rich="down", panel=NEURAL_COLLAPSE, bounds=UNIT, ref=Ref("layerwise", "Eq. D.9"))),
)
