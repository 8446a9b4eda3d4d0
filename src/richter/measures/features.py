"""What the features of a layer are: how strong each is, how much of the target it holds, how much of it the network uses.

    a = analyse(Phi, targets, outputs)           # Phi "n p": what the last layer reads; numpy or torch, and the same kind out
    a.intensity, a.quality, a.utilisation        # of each diagonalised feature, the strongest first
    a.deff_utilisation, a.kappa_cka, a.regime    # how many are used, and how far that is from as few as could be

The features are diagonalised: e_k(x) = u_k^T Phi(x) / sqrt(rho_k) are the eigenfunctions of the kernel <Phi(x), Phi(x')> on the
sample, with eigenvalues rho_k (the intensities).  [layerwise, Algorithm 1 with rho_k = s_k^2/n]

    quality      Q_k = (1/C) sum_j <e_k|f*_j>^2 / (|f*_j|^2 |e_k|^2)            of the targets f*
    utilisation  U_k = <e_k|P e_k> / (|e_k|^2 dim),  P onto the span of the outputs: Eq. 2.5 without the extra square
    kappa_cka    1 - CKA(K, P), both centred: 0 where the features are the outputs and nothing else; the same quantity is
                 published apart as dynamical richness. It says how few features there are, not whether they are good ones:
                 a network that has learned random labels by heart can have the smallest value there is.

The functions e_k themselves, of a model: FeatureMap.fit(model, x).transform(x2).

All of it comes from means and products of features, targets and outputs (p x p, p x C, C x C), never from n x n.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Card, Mark, Ref, Remark, SelectionError
from richter.core.arrays import Array, ArrayLike, like, to_tensor
from richter.instrument.statistics import SAMPLE, OfLayer, Rows, Sample
from richter.instrument.statistics.features import one_hot, paired
from richter.measures.cards import COUNT, FEATURE_COUNTS, MINIMUM, POSITIVE, UNIT
from richter.measures.feature_map import FeatureMap as FeatureMap  # its public place is here
from richter.measures.measure import Measure

MANY = 10  # held-out examples for each feature from which its quality and utilisation are not inflated
SMALLEST = 1e-140  # of the largest number of an array: its square can still be had
KEPT = 256  # features whose numbers are kept beside a row: what a run keeps of matrices by default
UNBALANCED = 1.5  # examples of the most frequent class for one of the rarest


class Note(NamedTuple):
    """What is to be said, and of which numbers."""

    text: str
    about: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class FeatureAnalysis:
    """The features of a layer on a sample, the strongest first. Features without intensity have no quality and no utilisation."""

    intensity: Array  # rho_k [p], of the sample on which they were fitted
    quality: Array  # Q_k [p], of the evaluation sample if there is one, as everything below
    utilisation: Array
    directions: Array  # u_k, the columns of [p, r]: r features have an intensity
    deff_intensity: float  # how many are strong: 1 + D_eff(rho_2, ...) for one-hot targets, where the first is nearly constant
    deff_quality: float  # over how many the targets are spread
    deff_utilisation: float  # over how many the outputs are spread
    quality_top: float  # the share of the targets in the first C
    utilisation_top: float  # the share of the outputs' space in the first C
    kappa_cka: float
    constant: float  # |<e_1|1>|: is the strongest feature a constant?
    outputs: int  # C
    dimension: int  # of the space that the outputs span
    spanned: bool  # is that every function of the examples?
    one_hot: bool  # are the targets classes?
    remarks: tuple[Note, ...]  # what is to be said of these numbers

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note.text for note in self.remarks)

    @property
    def rank(self) -> int:
        """How many features have an intensity."""
        return self.directions.shape[1]

    @property
    def cumulative_quality(self) -> Array:
        """Pi*(k), k = 1 to p."""
        return self.quality.cumsum(0)

    @property
    def cumulative_utilisation(self) -> Array:
        """Pi^(k), k = 1 to p: 1 at the end where the outputs are linear in the features (no bias) on the fitting sample."""
        return self.utilisation.cumsum(0)

    @property
    def regime(self) -> str:
        """ "minimum" (kappa_cka < 0.1), "extended" (all others) or "undefined".  [layerwise, Def. 2]"""
        return "undefined" if self.kappa_cka != self.kappa_cka else "minimum" if self.kappa_cka < MINIMUM else "extended"

    @property
    def margin(self) -> float:
        """How far kappa_cka is below the border of the minimum feature regime; negative above it."""
        return MINIMUM - self.kappa_cka


def analyse(Phi: ArrayLike, targets: ArrayLike, outputs: ArrayLike, Phi_eval: ArrayLike | None = None,
            targets_eval: ArrayLike | None = None, outputs_eval: ArrayLike | None = None) -> FeatureAnalysis:
    """Features of ``Phi`` [n, p], targets [n, C] (or class ids [n]) and outputs [n, C]. With ``*_eval`` the features are fitted
    on the first sample and evaluated on the second: intensity is of the first, all else of the second."""
    fitting = _read(Phi, targets, outputs)
    given = (Phi_eval, targets_eval, outputs_eval)
    aside = None
    if any(t is not None for t in given):
        if any(t is None for t in given):
            raise SelectionError("Phi_eval, targets_eval and outputs_eval are three arrays of one sample: give all of them, or "
                                 "none.")
        aside = _read(*given, suffix="_eval")
        if [t.shape[1:] for t in aside] != [t.shape[1:] for t in fitting]:
            raise SelectionError(f"the evaluation sample has {aside[0].shape[1]} features and {aside[2].shape[1]} outputs, the "
                                 f"fitting sample {fitting[0].shape[1]} and {fitting[2].shape[1]}: both come from one network.")
    hot, rounding = one_hot(fitting[1]), _rounding(Phi, outputs)
    samples = [Rows(torch.cat(s, 1), s[0].shape[1], hot, rounding) for s in (fitting, aside) if s is not None]
    analysis = Diagonal(*paired(*samples)).whole
    arrays: dict[str, Any] = {k: like(v, Phi) for k, v in vars(analysis).items() if isinstance(v, Tensor)}
    return replace(analysis, **arrays)


@dataclass(frozen=True, eq=False)
class Diagonal:
    """What is known of the samples. Features are diagonalised when they are asked for: kappa_cka alone needs no eigenvectors."""

    fit: Sample
    evaluation: Sample

    @cached_property
    def kappa_cka(self) -> float:
        return kappa(self.evaluation)

    @cached_property
    def whole(self) -> FeatureAnalysis:
        return _analysed(self)


def _analysed(d: Diagonal) -> FeatureAnalysis:
    fit, e = d.fit, d.evaluation
    rho, U = fit.spectrum
    size = rho[:U.shape[1]] if e is fit else ((e.second("Phi", "Phi") @ U) * U).sum(0)  # rho_k |e_k|^2
    seen = torch.where(size > 0, size, torch.inf)
    power, B, C = e.second("Y", "Y").diagonal(), e.whitening, fit.C
    taught = power > 0
    quality = ((U.T @ e.second("Phi", "Y"))[:, taught].square() / power[taught]).sum(1) / (seen * max(1, int(taught.sum())))
    utilisation = (U.T @ e.second("Phi", "F") @ B).square().sum(1) / (seen * max(1, B.shape[1]))
    rho, Q, used = (torch.cat([v, v.new_zeros(fit.features - len(v))]) for v in (rho, quality, utilisation))
    strong = bool(rho.any())
    return FeatureAnalysis(
        intensity=rho, quality=Q, utilisation=used, directions=U if fit.basis is None else fit.basis @ U,
        deff_intensity=(1 + deff(rho[1:], empty=0.0) if strong else math.nan) if fit.one_hot else deff(rho),
        deff_quality=deff(Q), deff_utilisation=deff(used),
        quality_top=Q[:C].sum().item() if strong and taught.any() else math.nan,
        utilisation_top=used[:C].sum().item() if strong and B.shape[1] else math.nan,
        kappa_cka=d.kappa_cka,
        constant=((e.mean("Phi") @ U[:, 0]).abs() / seen[0].sqrt()).item() if strong else math.nan,
        outputs=C, dimension=B.shape[1], spanned=B.shape[1] >= e.n, one_hot=fit.one_hot,
        remarks=(*_notes(d), *_notes_of_rank(d, used)))


def kappa(s: Sample) -> float:
    """1 - Tr(HKH HPH) / (|HKH| |HPH|), K = Phi Phi^T / n, and P onto the span of the outputs F.  [layerwise, Def. 2]

    P = F B B^T F^T / n with <FB|FB> = 1. So Tr(HKH HPH) = |<Phi_c|F B>|^2, |HKH| = |<Phi_c|Phi_c>| and |HPH| = |<F_c B|F_c B>|,
    where the index c says that the mean is subtracted."""
    B = s.whitening
    P = B.T @ s.covariance("F", "F") @ B
    if B.shape[1] >= s.n or not s.varied or not P.norm() > 1e-12:
        return math.nan
    cka = (s.covariance("Phi", "F") @ B).square().sum() / (s.covariance("Phi", "Phi").norm() * P.norm())
    return 1.0 - min(1.0, cka.item())


def deff(v: Float[Tensor, " k"], empty: float = math.nan) -> float:
    """exp of the entropy of v / sum v: over how many entries v is spread. ``empty``: if all are zero.  [layerwise, Eq. 1.16]"""
    total = v.sum()
    if not total > 0:
        return empty
    share = v / total
    return max(1.0, (-torch.special.xlogy(share, share).sum()).exp().item())


# ------------------------------------------------------------------------------------------------------- what is to be said


TAUGHT, USED = ("deff_quality", "quality_top"), ("deff_utilisation", "utilisation_top")
STRONG, APART = ("deff_intensity",), ("kappa_cka",)
ALL = (*APART, *STRONG, *USED, *TAUGHT)


def _notes(d: Diagonal) -> Iterator[Note]:
    """Those that need no eigenvectors."""
    fit, evaluation = d.fit, d.evaluation
    span = evaluation.whitening.shape[1]
    if not fit.second("Phi", "Phi").any():
        yield Note("the features are zero on every example: there is nothing to speak of", ALL)
        return
    if fit.features > fit.n:
        yield Note(f"{fit.features} features of {fit.n} examples: at most {fit.n} of them can be told apart, and on these "
                   f"examples they express any target", ALL)
    yield from _of_targets(evaluation)
    if not span:
        yield Note("the outputs are zero on every example, so that no feature is used", (*USED, *APART))
    elif span >= evaluation.n:
        yield Note(f"the outputs span {span} dimensions on {evaluation.n} examples: every function of these examples is one of "
                   f"them, and kappa_cka is undefined. More examples than outputs are needed", (*USED, *APART))
    elif not evaluation.varied:
        yield Note("the features are the same for every example: kappa_cka is undefined", APART)
    elif math.isnan(d.kappa_cka):
        yield Note("the outputs are the same for every example: kappa_cka is undefined", APART)


def _notes_of_rank(d: Diagonal, used: Float[Tensor, " p"]) -> Iterator[Note]:
    rank, p = d.fit.spectrum[1].shape[1], d.fit.features
    if 0 < rank < p <= d.fit.n:
        yield Note(f"only {rank} of the {p} features differ from combinations of the others (dead or duplicated ones)", STRONG)
    if d.evaluation is not d.fit and d.evaluation.n < MANY * rank:
        yield Note(f"{d.evaluation.n} examples are few to evaluate {rank} features on: their quality and utilisation are "
                   f"overestimated, and so are deff_quality and deff_utilisation (the utilisation sums up to "
                   f"{used.sum().item():.3g}). Evaluate on the fitting sample, or on {MANY * rank} examples or more",
                   (*USED, *TAUGHT))


def _of_targets(s: Sample) -> Iterator[Note]:
    if not s.second("Y", "Y").diagonal().any():
        yield Note("the targets are zero on every example, so that no feature has a quality", TAUGHT)
    elif s.one_hot:
        shares = s.mean("Y") / s.mean("Y").sum() * s.n
        present = shares[shares > 0]
        if len(present) < s.C:
            yield Note(f"{s.C - len(present)} of {s.C} classes have no example: the quality is that of the other {len(present)}",
                       TAUGHT)
        if present.max() > UNBALANCED * present.min():
            yield Note(f"classes are not balanced ({present.min().item():.0f} to {present.max().item():.0f} examples): each "
                       f"counts the same in the quality, and the minimum feature regime is defined for balanced ones",
                       (*TAUGHT, *APART))


# ----------------------------------------------------------------------------------------------------------- reading arrays


def _read(Phi: ArrayLike, targets: ArrayLike, outputs: ArrayLike, suffix: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """Features, targets and outputs as float64, [n, ...] each; class ids one-hot."""
    P, Y, F = (numbers(t, name + suffix) for t, name in ((Phi, "Phi"), (targets, "targets"), (outputs, "outputs")))
    F = F[:, None] if F.dim() == 1 else F
    if P.dim() != 2 or F.dim() != 2 or not 0 < len(P) == len(F) == len(Y) or not P.shape[1] or not F.shape[1]:
        raise SelectionError(f"Phi{suffix} {tuple(P.shape)}, targets{suffix} {tuple(Y.shape)} and outputs{suffix} "
                             f"{tuple(F.shape)} are not features [n, p], targets [n, C] (or class ids [n]) and outputs [n, C] of "
                             f"the same n examples.")
    if Y.dim() == 1 and F.shape[1] > 1:
        if (Y.round() - Y).any() or Y.min() < 0 or Y.max() >= F.shape[1]:
            raise SelectionError(f"targets{suffix} [n] for {F.shape[1]} outputs are class ids from 0 to {F.shape[1] - 1}; these "
                                 f"go from {Y.min().item():g} to {Y.max().item():g}. Targets of a regression are [n, C].")
        Y = torch.nn.functional.one_hot(Y.long(), F.shape[1]).double()
    Y = Y[:, None] if Y.dim() == 1 else Y
    if Y.shape != F.shape:
        raise SelectionError(f"targets{suffix} have shape {tuple(Y.shape)} and outputs{suffix} {tuple(F.shape)}: one target is "
                             f"needed for each output.")
    return P, Y.to(P.device), F.to(P.device)


def numbers(a: ArrayLike, name: str) -> Tensor:
    """In float64, finite, and so are their squares."""
    try:
        t = to_tensor(a, name)
        size = t.abs().max().item() if t.numel() else 0.0
        if size and not SMALLEST < size < 1 / SMALLEST:
            raise SelectionError(f"the largest number of {name} is {size:.1e}, and squares of that leave the range of floating "
                                 f"point numbers. Divide by it: nothing but intensities and nc1_trace depends on the scale.")
        return t
    except SelectionError as why:
        if "NaN" not in str(why):
            raise
        bad = ~torch.isfinite(torch.as_tensor(a))
        first = int(bad.nonzero()[0, 0]) if bad.dim() else 0
        raise SelectionError(f"{name} contains NaN or Inf ({int(bad.sum())} of {bad.numel()} numbers, the first in example "
                             f"{first}): every average over the examples would be NaN. Has the training diverged, or does a "
                             f"layer divide by zero? Leave such examples out, or mend the model.") from why


def _rounding(*given: ArrayLike) -> float:
    """The coarsest of their precisions."""
    kinds = [t.dtype for t in (g if isinstance(g, Tensor) else torch.as_tensor(np.asarray(g)) for g in given)]
    return max(torch.finfo(k).eps if k.is_floating_point else 0.0 for k in [*kinds, torch.float64])


# ------------------------------------------------------------------------------------------------------- in the instrument


def _said(name: str, notes: Iterable[Note], mark: Mark = Mark.EXACT) -> Remark:
    return Remark(mark, "; ".join(note.text for note in notes if name in note.about))


def _measure(name: str, card: Card) -> Measure:
    """A number of the diagonalised features, with what is to be said of it."""
    def said(d: Diagonal) -> Remark:
        trivial = d.whole.spanned and name in USED  # where the outputs are every function of the examples, each feature is used
        return _said(name, d.whole.remarks, Mark.TRIVIAL if trivial else Mark.EXACT)
    return Measure(name, attrgetter(f"whole.{name}"), (ANALYSIS,), remark=said, card=card)


def _kept(d: Diagonal) -> dict[str, Tensor]:
    """Intensity, quality and utilisation of the first features, a row each."""
    whole = d.whole
    return {"features": torch.stack([torch.as_tensor(v)[:KEPT] for v in (whole.intensity, whole.quality, whole.utilisation)])}


ANALYSIS = OfLayer("feature_analysis", lambda *samples: Diagonal(*paired(*samples)), (SAMPLE,), held_out=True)
MEASURES = (
    Measure("kappa_cka", attrgetter("kappa_cka"), (ANALYSIS,), arrays=_kept,
            remark=lambda d: _said("kappa_cka", _notes(d)), card=Card(
        "distance from minimum features (kappa)",
        "How far the features are from being the outputs and nothing else: below 0.1 the network has as few as it needs.",
        rich="down", panel=FEATURE_COUNTS, bounds=UNIT, ref=Ref("layerwise", "Def. 2"))),
    _measure("deff_intensity", card=Card(
        "strong features (deff_intensity)",
        "How many features are strong: near the number of classes where there are as few as can be.",
        rich="down", panel=FEATURE_COUNTS, bounds=COUNT, ref=Ref("layerwise", "Eq. 2.6"))),
    _measure("deff_utilisation", card=Card(
        "used features (deff_utilisation)", "Over how many features the outputs are spread.",
        rich="down", panel=FEATURE_COUNTS, bounds=COUNT, ref=Ref("layerwise", "Eq. 2.5"))),
    _measure("deff_quality", card=Card(
        "features of the target (deff_quality)", "Over how many features the targets are spread.",
        rich="down", panel=FEATURE_COUNTS, bounds=COUNT, ref=Ref("layerwise", "Eq. 2.3"))),
    _measure("quality_top", card=Card(
        "targets in the first features",
        "The share of the targets that the strongest features hold, as many as there are outputs.",
        panel=FEATURE_COUNTS, bounds=POSITIVE, ref=Ref("layerwise", "Eq. 2.4"))),
    _measure("utilisation_top", card=Card(
        "outputs in the first features",
        "The share of the outputs' space that the strongest features hold, as many as there are outputs.",
        rich="up", panel=FEATURE_COUNTS, bounds=POSITIVE, ref=Ref("layerwise", "Eq. 2.5"))),
)
