"""Features of a layer: the strength of each, the share of the target it contains, and its use by the network.

    a = analyse(Phi, targets, outputs)           # Phi "n p": inputs of the last layer; numpy or torch, and the same kind out
    a.intensity, a.quality, a.utilisation        # of each diagonalised feature, strongest first
    a.deff_utilisation, a.kappa_cka, a.regime    # number of used features, and the distance from the smallest possible number

The features are diagonalised: e_k(x) = u_k^T Phi(x) / sqrt(rho_k) are the eigenfunctions of the kernel <Phi(x), Phi(x')> on the
sample, with eigenvalues rho_k (the intensities).  [layerwise, Algorithm 1 with rho_k = s_k^2/n]

    quality      Q_k = (1/C) sum_j <e_k|f*_j>^2 / (|f*_j|^2 |e_k|^2)            of the targets f*
    utilisation  U_k = <e_k|P e_k> / (|e_k|^2 dim),  P onto the span of the outputs: Eq. 2.5 without the extra square
    kappa_cka    1 - CKA(K, P), both centred: 0 if the features are exactly the outputs. The same quantity is published elsewhere
                 as dynamical richness. It measures how few features there are, not how good they are: a network that memorised
                 random labels can have the smallest possible value.

The functions e_k of a model: FeatureMap.fit(model, x).transform(x2).
Everything is computed from means and products of features, targets and outputs (p x p, p x C, C x C), never from n x n matrices.
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
from richter.instrument.statistics import SAMPLE, FeatureMoments, OfLayer, SampleRows
from richter.instrument.statistics.features import one_hot, paired
from richter.measures.cards import COUNT, FEATURE_COUNTS, MINIMUM, POSITIVE, UNIT
from richter.measures.feature_map import FeatureMap as FeatureMap  # public under this name
from richter.measures.measure import Measure

MANY = 10  # held-out examples per feature above which its quality and utilisation are not inflated
SMALLEST = 1e-140  # relative to the largest number of an array; its square does not underflow
KEPT = 256  # features whose numbers are stored with a row; a run stores matrices of this size by default
UNBALANCED = 1.5  # ratio of the class sizes (largest to smallest) above which classes count as unbalanced


class Note(NamedTuple):
    """A remark, and the numbers that it refers to."""

    text: str
    about: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class FeatureAnalysis:
    """The features of a layer on a sample, strongest first. Features without intensity have no quality and no utilisation."""

    intensity: Array  # rho_k [p], on the fitting sample
    quality: Array  # Q_k [p], on the evaluation sample if there is one, like everything below
    utilisation: Array
    directions: Array  # u_k, the columns of [p, r]; r features have an intensity
    # number of strong features; 1 + D_eff(rho_2, ...) for one-hot targets, where the first feature is nearly constant
    deff_intensity: float
    deff_quality: float  # number of features over which the targets are spread
    deff_utilisation: float  # number of features over which the outputs are spread
    quality_top: float  # share of the targets in the first C features
    utilisation_top: float  # share of the outputs' space in the first C features
    kappa_cka: float
    constant: float  # |<e_1|1>|; 1 if the strongest feature is constant
    outputs: int  # C
    dimension: int  # dimension of the span of the outputs
    spanned: bool  # whether this span contains every function of the examples
    one_hot: bool  # whether the targets are classes
    remarks: tuple[Note, ...]  # remarks on these numbers

    @property
    def notes(self) -> tuple[str, ...]:
        """Texts of the remarks."""
        return tuple(note.text for note in self.remarks)

    @property
    def rank(self) -> int:
        """Number of features with positive intensity."""
        return self.directions.shape[1]

    @property
    def cumulative_quality(self) -> Array:
        """Cumulative quality Pi*(k) of the first k features, k = 1 to p."""
        return self.quality.cumsum(0)

    @property
    def cumulative_utilisation(self) -> Array:
        """Return Pi^(k), k = 1 to p; it ends at 1 if the outputs are linear in the features (no bias) on the fitting sample."""
        return self.utilisation.cumsum(0)

    @property
    def regime(self) -> str:
        """"minimum" (kappa_cka < 0.1), "extended" (above) or "undefined".  [layerwise, Def. 2]"""
        return "undefined" if self.kappa_cka != self.kappa_cka else "minimum" if self.kappa_cka < MINIMUM else "extended"

    @property
    def margin(self) -> float:
        """Distance of kappa_cka from the border of the minimum feature regime; positive below the border."""
        return MINIMUM - self.kappa_cka


def analyse(Phi: ArrayLike, targets: ArrayLike, outputs: ArrayLike, Phi_eval: ArrayLike | None = None,
            targets_eval: ArrayLike | None = None, outputs_eval: ArrayLike | None = None) -> FeatureAnalysis:
    """Analyse features ``Phi`` [n, p], targets [n, C] (or class ids [n]) and outputs [n, C]. With ``*_eval`` features are fitted
    on the first sample and evaluated on the second: the intensity is that of the first, everything else of the second."""
    fitting = _read(Phi, targets, outputs)
    evaluation_arrays = (Phi_eval, targets_eval, outputs_eval)
    aside = None
    if any(t is not None for t in evaluation_arrays):
        if any(t is None for t in evaluation_arrays):
            raise SelectionError("Phi_eval, targets_eval and outputs_eval belong together: give all three arrays of one sample, "
                                 "or none.")
        aside = _read(*evaluation_arrays, suffix="_eval")
        if [t.shape[1:] for t in aside] != [t.shape[1:] for t in fitting]:
            raise SelectionError(f"the evaluation sample has {aside[0].shape[1]} features and {aside[2].shape[1]} outputs, the "
                                 f"fitting sample {fitting[0].shape[1]} and {fitting[2].shape[1]}: both must come from one "
                                 f"network.")
    hot, rounding = one_hot(fitting[1]), _rounding(Phi, outputs)
    samples = [SampleRows(torch.cat(s, 1), s[0].shape[1], hot, rounding) for s in (fitting, aside) if s is not None]
    analysis = DiagonalisedFeatures(*paired(*samples)).whole
    arrays: dict[str, Any] = {k: like(v, Phi) for k, v in vars(analysis).items() if isinstance(v, Tensor)}
    return replace(analysis, **arrays)


@dataclass(frozen=True, eq=False)
class DiagonalisedFeatures:
    """Moments of the samples. Features are diagonalised only on demand: kappa_cka alone needs no eigenvectors."""

    fit: FeatureMoments
    evaluation: FeatureMoments

    @cached_property
    def kappa_cka(self) -> float:
        """CKA of the features with the targets."""
        return kappa(self.evaluation)

    @cached_property
    def whole(self) -> FeatureAnalysis:
        """Intensity, quality and utilisation of all features."""
        return _analysed(self)


def _analysed(d: DiagonalisedFeatures) -> FeatureAnalysis:
    """Intensity, quality, utilisation and their effective numbers."""
    fit, e = d.fit, d.evaluation
    rho, U = fit.spectrum
    size = rho[:U.shape[1]] if e is fit else ((e.second("Phi", "Phi") @ U) * U).sum(0)  # rho_k |e_k|^2
    sizes = torch.where(size > 0, size, torch.inf)
    power, B, C = e.second("Y", "Y").diagonal(), e.whitening, fit.C
    taught = power > 0
    quality = ((U.T @ e.second("Phi", "Y"))[:, taught].square() / power[taught]).sum(1) / (sizes * max(1, int(taught.sum())))
    utilisation = (U.T @ e.second("Phi", "F") @ B).square().sum(1) / (sizes * max(1, B.shape[1]))
    rho, Q, used = (torch.cat([v, v.new_zeros(fit.features - len(v))]) for v in (rho, quality, utilisation))
    strong = bool(rho.any())
    return FeatureAnalysis(
        intensity=rho, quality=Q, utilisation=used, directions=U if fit.basis is None else fit.basis @ U,
        deff_intensity=(1 + deff(rho[1:], empty=0.0) if strong else math.nan) if fit.one_hot else deff(rho),
        deff_quality=deff(Q), deff_utilisation=deff(used),
        quality_top=Q[:C].sum().item() if strong and taught.any() else math.nan,
        utilisation_top=used[:C].sum().item() if strong and B.shape[1] else math.nan,
        kappa_cka=d.kappa_cka,
        constant=((e.mean("Phi") @ U[:, 0]).abs() / sizes[0].sqrt()).item() if strong else math.nan,
        outputs=C, dimension=B.shape[1], spanned=B.shape[1] >= e.n, one_hot=fit.one_hot,
        remarks=(*_notes(d), *_notes_of_rank(d, used)))


def kappa(s: FeatureMoments) -> float:
    """Return 1 - Tr(HKH HPH) / (|HKH| |HPH|), K = Phi Phi^T / n, and P onto the span of the outputs F.  [layerwise, Def. 2]

    P = F B B^T F^T / n with <FB|FB> = 1. So Tr(HKH HPH) = |<Phi_c|F B>|^2, |HKH| = |<Phi_c|Phi_c>| and |HPH| = |<F_c B|F_c B>|,
    where the index c means that the mean is subtracted."""
    B = s.whitening
    P = B.T @ s.covariance("F", "F") @ B
    if B.shape[1] >= s.n or not s.varied or not P.norm() > 1e-12:
        return math.nan
    cka = (s.covariance("Phi", "F") @ B).square().sum() / (s.covariance("Phi", "Phi").norm() * P.norm())
    return 1.0 - min(1.0, cka.item())


def deff(v: Float[Tensor, " k"], empty: float = math.nan) -> float:
    """Effective number of entries over which v is spread: exp of the entropy of v / sum v. ``empty``: the value for v = 0.
    [layerwise, Eq. 1.16]"""
    total = v.sum()
    if not total > 0:
        return empty
    share = v / total
    return max(1.0, (-torch.special.xlogy(share, share).sum()).exp().item())


# ------------------------------------------------------------------------------------------------------- remarks


TAUGHT, USED = ("deff_quality", "quality_top"), ("deff_utilisation", "utilisation_top")
STRONG, APART = ("deff_intensity",), ("kappa_cka",)
ALL = (*APART, *STRONG, *USED, *TAUGHT)


def _notes(d: DiagonalisedFeatures) -> Iterator[Note]:
    """Yield remarks that need no eigenvectors."""
    fit, evaluation = d.fit, d.evaluation
    span = evaluation.whitening.shape[1]
    if not fit.second("Phi", "Phi").any():
        yield Note("the features are zero on every example, so nothing can be measured", ALL)
        return
    if fit.features > fit.n:
        yield Note(f"{fit.features} features of {fit.n} examples: at most {fit.n} of them can be linearly independent, and on "
                   f"these examples they fit any target", ALL)
    yield from _of_targets(evaluation)
    if not span:
        yield Note("the outputs are zero on every example, so that no feature is used", (*USED, *APART))
    elif span >= evaluation.n:
        yield Note(f"the outputs span {span} dimensions on {evaluation.n} examples, i.e. every function of these examples, so "
                   f"kappa_cka is undefined. Give more examples than outputs", (*USED, *APART))
    elif not evaluation.varied:
        yield Note("the features are equal for all examples: kappa_cka is undefined", APART)
    elif math.isnan(d.kappa_cka):
        yield Note("the outputs are equal for all examples: kappa_cka is undefined", APART)


def _notes_of_rank(d: DiagonalisedFeatures, used: Float[Tensor, " p"]) -> Iterator[Note]:
    """Yield notes about dependent features and too few examples."""
    rank, p = d.fit.spectrum[1].shape[1], d.fit.features
    if 0 < rank < p <= d.fit.n:
        yield Note(f"only {rank} of the {p} features are linearly independent (the others are dead or duplicated)", STRONG)
    if d.evaluation is not d.fit and d.evaluation.n < MANY * rank:
        yield Note(f"{d.evaluation.n} examples are too few to evaluate {rank} features: their quality and utilisation are "
                   f"overestimated, and so are deff_quality and deff_utilisation (the utilisation sums up to "
                   f"{used.sum().item():.3g}). Evaluate on the fitting sample, or on {MANY * rank} examples or more",
                   (*USED, *TAUGHT))


def _of_targets(s: FeatureMoments) -> Iterator[Note]:
    """Yield notes about targets that are zero or classes without an example."""
    if not s.second("Y", "Y").diagonal().any():
        yield Note("the targets are zero on every example, so that no feature has a quality", TAUGHT)
    elif s.one_hot:
        shares = s.mean("Y") / s.mean("Y").sum() * s.n
        present = shares[shares > 0]
        if len(present) < s.C:
            yield Note(f"{s.C - len(present)} of {s.C} classes have no example: the quality refers to the other {len(present)}",
                       TAUGHT)
        if present.max() > UNBALANCED * present.min():
            yield Note(f"classes are unbalanced ({present.min().item():.0f} to {present.max().item():.0f} examples): each class "
                       f"counts equally in the quality, and the minimum feature regime is defined for balanced classes",
                       (*TAUGHT, *APART))


# ----------------------------------------------------------------------------------------------------------- reading arrays


def _read(Phi: ArrayLike, targets: ArrayLike, outputs: ArrayLike, suffix: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """Read features, targets and outputs as float64, [n, ...] each; class ids become one-hot."""
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
        raise SelectionError(f"targets{suffix} have shape {tuple(Y.shape)} and outputs{suffix} {tuple(F.shape)}: give one target "
                             f"per output.")
    return P, Y.to(P.device), F.to(P.device)


def numbers(a: ArrayLike, name: str) -> Tensor:
    """Read an array in float64; check that its numbers and their squares are finite."""
    try:
        t = to_tensor(a, name)
        size = t.abs().max().item() if t.numel() else 0.0
        if size and not SMALLEST < size < 1 / SMALLEST:
            raise SelectionError(f"the largest number of {name} is {size:.1e}, and its square leaves the range of floating "
                                 f"point numbers. Divide by it: only intensities and nc1_trace depend on the scale.")
        return t
    except SelectionError as why:
        if "NaN" not in str(why):
            raise
        bad = ~torch.isfinite(torch.as_tensor(a))
        first = int(bad.nonzero()[0, 0]) if bad.dim() else 0
        raise SelectionError(f"{name} contains NaN or Inf ({int(bad.sum())} of {bad.numel()} numbers, the first in example "
                             f"{first}): every average over the examples would be NaN. Has the training diverged, or does a "
                             f"layer divide by zero? Leave out such examples, or fix the model.") from why


def _rounding(*given: ArrayLike) -> float:
    """Machine epsilon of the coarsest precision among the arrays."""
    kinds = [t.dtype for t in (g if isinstance(g, Tensor) else torch.as_tensor(np.asarray(g)) for g in given)]
    return max(torch.finfo(k).eps if k.is_floating_point else 0.0 for k in [*kinds, torch.float64])


# ------------------------------------------------------------------------------------------------------- in the instrument


def _said(name: str, notes: Iterable[Note], mark: Mark = Mark.EXACT) -> Remark:
    """Remark with the notes that concern a number."""
    return Remark(mark, "; ".join(note.text for note in notes if name in note.about))


def _measure(name: str, card: Card) -> Measure:
    """Make the measure of one number of the diagonalised features, with the remarks on it."""
    def said(d: DiagonalisedFeatures) -> Remark:
        trivial = d.whole.spanned and name in USED  # if the outputs span every function of the examples, each feature is used
        return _said(name, d.whole.remarks, Mark.TRIVIAL if trivial else Mark.EXACT)
    return Measure(name, attrgetter(f"whole.{name}"), (ANALYSIS,), remark=said, card=card)


def _kept(d: DiagonalisedFeatures) -> dict[str, Tensor]:
    """Return intensity, quality and utilisation of the first features, one row each."""
    whole = d.whole
    return {"features": torch.stack([torch.as_tensor(v)[:KEPT] for v in (whole.intensity, whole.quality, whole.utilisation)])}


ANALYSIS = OfLayer("feature_analysis", lambda *samples: DiagonalisedFeatures(*paired(*samples)), (SAMPLE,), held_out=True)
MEASURES = (
    Measure("kappa_cka", attrgetter("kappa_cka"), (ANALYSIS,), arrays=_kept,
            remark=lambda d: _said("kappa_cka", _notes(d)), card=Card(
        "distance from minimum features (kappa)",
        "How far the features are from containing only the outputs: below 0.1 the network has as few as it needs.",
        rich="down", panel=FEATURE_COUNTS, bounds=UNIT, ref=Ref("layerwise", "Def. 2"))),
    _measure("deff_intensity", card=Card(
        "strong features (deff_intensity)",
        "The number of strong features: near the number of classes if there are as few as possible.",
        rich="down", panel=FEATURE_COUNTS, bounds=COUNT, ref=Ref("layerwise", "Eq. 2.6"))),
    _measure("deff_utilisation", card=Card(
        "used features (deff_utilisation)", "The number of features over which the outputs are spread.",
        rich="down", panel=FEATURE_COUNTS, bounds=COUNT, ref=Ref("layerwise", "Eq. 2.5"))),
    _measure("deff_quality", card=Card(
        "features of the target (deff_quality)", "The number of features over which the targets are spread.",
        rich="down", panel=FEATURE_COUNTS, bounds=COUNT, ref=Ref("layerwise", "Eq. 2.3"))),
    _measure("quality_top", card=Card(
        "targets in the first features",
        "The share of the targets in the strongest features, as many features as outputs.",
        panel=FEATURE_COUNTS, bounds=POSITIVE, ref=Ref("layerwise", "Eq. 2.4"))),
    _measure("utilisation_top", card=Card(
        "outputs in the first features",
        "The share of the outputs' space in the strongest features, as many features as outputs.",
        rich="up", panel=FEATURE_COUNTS, bounds=POSITIVE, ref=Ref("layerwise", "Eq. 2.5"))),
)
