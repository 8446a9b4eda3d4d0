"""Tangent kernels that are too large to be formed: estimates of what is asked of them, with a standard error.

* many outputs: combinations of each example's (drawn.py); where these have no room, y~^T K y~ is one backward pass of all layers
  and |C K C|_F^2 the mean of (z^T K z')^2 over independent random vectors z != z' of all outputs, which is unbiased (SKETCH);
* many examples: products of C K C with a few vectors, without K: the norm by Hutch++, the largest eigenvalue on the same
  subspace (FREE);
* each output's own kernels, of all outputs or of a few that are drawn (DIAGONAL).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from richter import linalg
from richter.core import WHOLE, Mark, Remark, show_bytes
from richter.instrument.captures import check_finite, timed
from richter.instrument.cotangents import Cotangents, SomeOutputs
from richter.instrument.statistics import stored
from richter.instrument.statistics.centred import CentredKernel, centred_kernel, centred_kernel_leaving
from richter.instrument.statistics.compressed import (
    SKETCHES,
    Compressed,
    Grams,
    Vectors,
    Whole,
    compressed_bytes,
    size,
    squared,
    summed,
)
from richter.instrument.statistics.drawn import DRAWN
from richter.instrument.statistics.frame import (
    GROUPS,
    NO_LABELS,
    Derived,
    Gathering,
    Group,
    Missing,
    OfKernels,
    Simple,
    Statistic,
    Wants,
    in_range,
)
from richter.instrument.statistics.grams import (
    KERNEL,
    LABELS,
    TANGENT_KERNEL,
    Tangents,
    of_diagonal,
    of_diagonal_leaving,
    of_drawn_leaving,
    same_output,
    same_output_leaving,
)
from richter.instrument.statistics.products import centred, parameter_groups, parameters, products
from richter.instrument.statistics.sampling import Sample, by_labels, uniform
from richter.instrument.statistics.tables import NotItself, no_table, recorded
from richter.instrument.stream import chunks, fitting
from richter.instrument.targets import columns, counts
from richter.instrument.targets import labelled as having_labels
from richter.kernels.planning import Unit, forward_operations, make_plan

if TYPE_CHECKING:
    from richter.instrument.subject import Subject

SMALL = 2 ** 26  # bytes: kernels below this size are never estimated
TURNS = 2  # over the probe in which the gradients of all vectors are had, some modules after others; else they are compressed
SAMPLED = 8  # outputs whose own kernels are looked at when there are too many
SKETCHED, CORRECTING = 32, 16  # vectors that span most of a kernel, and that sample what is left of it
UNRESOLVED = 0.03  # a largest eigenvalue is not reported when its vector is further than this from being one
UNRESOLVED_TOP = ("the largest eigenvalue of so large a kernel was not resolved: fewer examples (Probe(kernel=...)) give it "
                  "exactly")


@dataclass(frozen=True)
class Estimate:
    """A value, and the same with parts of what it rests on left out: the jackknife makes a standard error of them."""

    value: Any
    leaving: Mapping[str, Sequence[Any]]  # by kind of groups


class Estimates(Simple):
    """Estimates of all modules and of the whole model, made together when the first is asked for."""

    def __init__(self, make: Callable[[], Iterator[tuple[str, Estimate]]], groups: Mapping[str, int], remark: Remark) -> None:
        super().__init__(groups, remark)
        self.make = make

    @cached_property
    def known(self) -> dict[str, Estimate]:
        return dict(self.make())

    def value(self, place: str, without: Group | None = None) -> Any:
        if place not in self.known:
            raise Missing(KERNEL)
        known = self.known[place]
        return known.value if without is None else known.leaving[without[0]][without[1]]


# ------------------------------------------------------------------------------------------------ many outputs


class Sketch(OfKernels):
    """|C K C|_F from random vectors of all examples and outputs; y~^T K y~ exactly."""

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        t = Tangents(subject, cotangents)
        q = cotangents.vectors
        compresses = _compresses(t)
        alone = compressed_bytes(t, q) if compresses else 3 * _vectors_bytes(t, q + 1)
        turns = 1 if compresses else sum(1 for _ in parameter_groups(t, q + 1))
        passes = turns * (1 + 2 * (q + (subject.Y is not None))) / 3 * t.n / subject.probe.n
        return Wants(alone=alone, what=f"estimates of kernels over {t.n} examples", passes=passes)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        t, label = Tangents(subject, cotangents), cotangents.label(subject.survey.outputs)
        groups = {"vectors": min(GROUPS, cotangents.vectors)}
        if _compresses(t):
            m = size(subject, parameters(t, t.units), cotangents.vectors)
            label, groups = f"{label}, gradients compressed to {SKETCHES} x {m} numbers", groups | {"sketches": SKETCHES}
        return Estimates(lambda: _sketch(t), groups, Remark(Mark.ESTIMATED, label))


def _compresses(t: Tangents) -> bool:
    """Are gradients compressed? Where those of all vectors take more than two turns to be had."""
    vectors = t.cotangents.vectors + 1
    return _vectors_bytes(t, vectors) > t.subject.memory // 3 or sum(1 for _ in parameter_groups(t, vectors)) > TURNS


def _sketch(t: Tangents) -> Iterator[tuple[str, Estimate]]:
    vectors, every, lacking, compresses = Vectors(t), Grams(), DRAWN.why_not(t.subject, t.cotangents), _compresses(t)
    for units in [t.units] if compresses else parameter_groups(t, vectors.q + 1):
        gradients = _pulled(t, vectors, units, Compressed if compresses else Whole)
        mine = gradients.grams(vectors)
        every.products |= mine.products
        every.squares |= mine.squares
    if t.subject.layers is None and every.products:
        every.products[WHOLE] = summed(every.products)
        if vectors.labelled:
            every.squares[WHOLE] = summed(every.squares)
    energy = vectors.energy if vectors.labelled else math.nan
    for name, T in every.products.items():
        yield name, _of_products(T, (every.squares[name], energy) if vectors.labelled else None, lacking)


def _of_products(T: Float[Tensor, "r q q"], labelled: tuple[float, float] | None, lacking: str) -> Estimate:
    """From inner products of the gradients of random vectors: of all, without some of the vectors, without a sketch."""
    q = T.shape[1]
    group = torch.arange(q) % min(GROUPS, q)
    squares = squared(T)

    def value(P: Tensor) -> CentredKernel:
        return CentredKernel(max(_off_diagonal(P), 0.0) ** 0.5 if len(P) > 1 else math.nan, labelled, math.nan, lacking)
    fewer = [value(squared(T, torch.arange(len(T)) != r)) for r in range(len(T))] if len(T) > 1 else []
    leaving = [value(squares[group != g][:, group != g]) for g in range(int(group.max()) + 1)]
    return Estimate(value(squares), {"vectors": leaving, "sketches": fewer})


def _pulled(t: Tangents, vectors: Vectors, units: Sequence[Unit], kind: type[Whole | Compressed]) -> Whole | Compressed:
    """The gradients of all vectors. Where a vocabulary's matrix is used in another way for some examples than for the first, it
    is compressed as the others are, if there is room."""
    if kind is Compressed and (need := compressed_bytes(t, vectors.q)) > t.subject.memory:
        raise Missing(f"what is done with the outputs of a vocabulary's matrix differs between examples, and its gradients, "
                      f"compressed, take memory='{show_bytes(need + t.subject.fixed)}'")
    gradients = kind(t, units, len(vectors), vectors.labelled)
    try:
        _pull(t, vectors, gradients)
    except NotItself as why:
        no_table(t, why.parameter)
        return _pulled(t, vectors, units, kind)
    return gradients


def _pull(t: Tangents, vectors: Vectors, gradients: Whole | Compressed) -> None:
    """J^T z~ of each module for every vector (and for the labels, last): plain gradients."""
    subject = t.subject
    room = subject.memory - compressed_bytes(t, vectors.q) if isinstance(gradients, Compressed) else subject.memory // 3
    each = subject.itemsize * (2 * subject.survey.graph + 6 * subject.survey.outputs) + 1
    size = fitting(room + each, each, min(subject.probe.chunk, t.n), subject.survey.drawn)
    for chunk in chunks(subject.source, t.x, size, title="kernels"):
        with timed(subject.device) as seconds:
            run = recorded(subject, chunk.x, chunk.rows.start, gradients.maps)
        subject.forwards.add(chunk.n, seconds())
        check_finite(run.f)
        for v in range(len(vectors)):
            gradients.add(v, run, vectors(v, chunk.rows).to(run.f.device))


def _off_diagonal(squares: Float[Tensor, "q q"]) -> float:
    """Their mean over v != w."""
    q = len(squares)
    return ((squares.sum() - squares.diagonal().sum()) / (q * (q - 1))).item()


def _vectors_bytes(t: Tangents, vectors: int) -> int:
    """Of a module's products with so many vectors: all its parameters for each."""
    subject = t.subject
    return max((vectors * subject.itemsize * sum(subject.state[p].numel() for p in parameters(t, units))
                for units in t.by_module.values()), default=0)


# ----------------------------------------------------------------------------------------------- many examples


class Free(OfKernels):
    """|C K C|_F and its largest eigenvalue without K, y~^T K y~ exactly."""

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        t = Tangents(subject, cotangents)  # a module's products in a third of the memory, a pair of examples in another
        held = max(_vectors_bytes(t, 2 * 2 * (SKETCHED + CORRECTING)), t.least("trace"))
        turns = sum(1 for _ in parameter_groups(t, 2 * 2 * (SKETCHED + CORRECTING)))
        return Wants(alone=3 * held, what=f"estimates of kernels over {t.n} examples",
                     passes=turns * 4 * (1 + t.v) / 3 * t.n / subject.probe.n)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        t = Tangents(subject, cotangents)
        label = f"estimated by products with the kernel of {t.n} examples, which is not formed"
        return Estimates(lambda: _free(t), {"vectors": GROUPS}, Remark(Mark.ESTIMATED, label))


def operations(t: Tangents) -> tuple[float, float]:
    """(of the exact kernel, of its estimate)"""
    subject, survey = t.subject, t.subject.survey
    q = SKETCHED + 2 * (SKETCHED + CORRECTING)
    exact = make_plan(t.request(subject.wanted, "full"), 2 ** 62).operations
    maps = [survey.maps[k] for u in subject.wanted for k in u.maps]
    through = t.n * (1 + t.v) * forward_operations(survey)
    own = sum(2 * t.n * (m.width * m.shape[-1] * t.v + t.v * q * m.entries if m.unfolded or
                         m.width > m.shape[0] else q * m.entries) for m in maps)
    return exact, 4 * through + 2 * own


def _free(t: Tangents) -> Iterator[tuple[str, Estimate]]:
    """Twice K~ times some vectors: the first products span where most of K~ acts, the second are exact there and sampled in what
    is left (Hutch++ for the trace of K~^2)."""
    subject = t.subject
    y = None if subject.Y is None else centred(t, subject.Y[t.rows])
    draw = torch.Generator().manual_seed(0)
    first, second = (_all_centred(t, torch.randn(q, t.n, t.v, generator=draw, dtype=torch.float64))
                     for q in (SKETCHED, CORRECTING))
    names = [*t.by_module, *([WHOLE] if subject.layers is None else [])]
    last = torch.zeros(t.n, t.v, dtype=torch.float64) if y is None else y
    once, quadratic = _centred_products(t, dict.fromkeys(names, torch.cat([first, last[None]])), len(first))
    spans = {name: linalg.span_and_rest(Y.flatten(1), second.flatten(1)) for name, Y in once.items()}
    again = {name: _all_centred(t, torch.cat([Q, Z]).view(-1, t.n, t.v)) for name, (Q, Z) in spans.items()}
    twice, _ = _centred_products(t, again, len(again[names[0]]))
    for name in names:
        labelled = None if y is None else (quadratic[name], y.square().sum().item())
        (Q, Z), K = spans[name], twice[name].flatten(1)
        yield name, _hutch(linalg.Sketch(Q, Z, K[:len(Q)], K[len(Q):]), labelled)


def _all_centred(t: Tangents, Z: Tensor) -> Tensor:
    return torch.stack([centred(t, z) for z in Z])


def _centred_products(t: Tangents, Z: Mapping[str, Tensor], used: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    KZ, squares = products(t, Z, used)
    return {name: _all_centred(t, P) for name, P in KZ.items()}, squares


def _hutch(K: linalg.Sketch, labelled: tuple[float, float] | None) -> Estimate:
    """From products with vectors that span most of a kernel, and with others that sample the rest. The largest eigenvalue on
    their span is at most that of the kernel; it is reported where its vector is nearly one of the kernel's."""
    top, off = K.top()
    top = top if off <= UNRESOLVED * top else math.nan
    group = torch.arange(len(K.Z)) % GROUPS

    def value(keep: Tensor) -> CentredKernel:
        return CentredKernel(K.norm(keep), labelled, top, UNRESOLVED_TOP)
    return Estimate(value(group >= 0), {"vectors": [value(group != g) for g in range(GROUPS)]})


# ---------------------------------------------------------------------------------------- one output at a time


@dataclass(frozen=True)
class Diagonal(OfKernels):
    """Each output's own kernels: of all outputs, or of some drawn from those that have labels. ``sums``: what is to be known of
    them ("v n n") and of their labels ("n v"); ``leaving``: the same with each group of examples left out."""

    sums: Callable[[Tensor, Tensor], Any] = of_diagonal
    leaving: Callable[[Tensor, Tensor, int], Sequence[Any]] = of_diagonal_leaving
    of_drawn: Callable[[Tensor, Tensor, int], Sequence[Any]] = of_drawn_leaving  # the same where outputs are drawn
    labelled: bool = True  # are labels needed?
    by_labels: bool = False  # does it grow with the number of examples that have an output as their label?

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        t = Tangents(subject, cotangents)
        v = t.v if cotangents.exact else SAMPLED
        least = t.least("diagonal", v)
        least = min(least, stored.least(t)) if not cotangents.exact and stored.can_be_kept(t) else least
        passes = stored.passes(t, v) if not cotangents.exact and stored.fewer_passes(t, v) else t.passes("diagonal", v)
        return Wants(alone=8 * v * t.n ** 2 + least + t.audited, passes=passes * t.n / subject.probe.n,
                     what=f"estimates of kernels over {t.n} examples")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        t = Tangents(subject, cotangents)
        if subject.Y is None and self.labelled:
            return Estimates(_unlabelled, {"examples": 0}, Remark())
        k = subject.survey.outputs
        sample = Sample(torch.arange(k), k, ()) if cotangents.exact else self._drawn(t, k, cotangents.seed)
        among = f"{sample.among} that have labels" if subject.Y is not None else str(sample.among)
        remark = Remark(Mark.ESTIMATED, f"{len(sample.picked)} outputs drawn of {among}") if sample.drawn else Remark()
        groups = {**({"outputs": len(sample.chosen)} if sample.drawn else {}), **t.groups}
        return Estimates(lambda: self._estimates(t, sample), groups, remark)

    def _drawn(self, t: Tangents, outputs: int, seed: int) -> Sample:
        """Of those that have labels; without labels any output may be drawn."""
        Y, draw = t.subject.Y, torch.Generator().manual_seed(seed)
        known = counts(Y, t.rows, t.groups["examples"]) if self.by_labels and Y is not None else None
        if known is not None:
            return by_labels(*known, SAMPLED, draw)
        return uniform(torch.arange(outputs) if Y is None else having_labels(Y, t.rows).nonzero().flatten().cpu(), SAMPLED, draw)

    def _estimates(self, t: Tangents, sample: Sample) -> Iterator[tuple[str, Estimate]]:
        if not len(sample.picked):
            raise Missing(NO_LABELS)
        total: Tensor | None = None
        Y = columns(t.subject.Y, t.rows, sample.picked).to(t.subject.home)
        for name, kernel in self._kernels(t, sample.picked):
            K = in_range(kernel, t.subject)
            if t.subject.layers is None:
                total = K.clone() if total is None else total.add_(K)
            yield name, self._estimate(t, K, Y, sample)
        if total is not None:
            yield WHOLE, self._estimate(t, total, Y, sample)

    def _kernels(self, t: Tangents, picked: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Of each module, of all outputs or of some."""
        if t.cotangents.exact:
            return t.anew("diagonal")
        chosen = tuple(picked.tolist())
        if stored.fewer_passes(t, len(chosen)):
            return stored.one_at_a_time(t, chosen)
        return t.anew("diagonal", SomeOutputs(chosen))

    def _estimate(self, t: Tangents, K: Tensor, Y: Tensor, sample: Sample) -> Estimate:
        """Outputs that were drawn and examples are left out apart from each other: their variances add."""
        value, outputs = self.sums(K, Y), torch.arange(len(K), device=K.device)
        if not sample.drawn:
            return Estimate(value, {"examples": self.leaving(K, Y, t.groups["examples"])})
        groups = {"outputs": [self.sums(K[outputs != i], Y[:, outputs != i]) for i in sample.chosen],
                  "examples": self.of_drawn(K, Y, t.groups["examples"])}
        if sample.weights is None:
            return Estimate(value, groups)
        weights = {"outputs": sample.without_chosen, "examples": sample.without_examples}
        weighted = {kind: [replace(part, weights=w) for part, w in zip(parts, weights[kind], strict=True)]
                    for kind, parts in groups.items()}
        return Estimate(replace(value, weights=sample.weights), weighted)


def _unlabelled() -> Iterator[tuple[str, Estimate]]:
    raise Missing(NO_LABELS)
    yield


SKETCH, FREE, DIAGONAL = (Sketch("sketched_kernel"), Free("products_with_the_kernel"),
                          Diagonal("kernels_of_single_outputs", by_labels=True))

# -------------------------------------------------------------------------------- what they stand in for


def formed(t: Tangents, reason: str) -> bool:
    """Is the kernel itself formed? When it fits and is not dearer than its estimate."""
    if reason or not t.cotangents.whole or t.bytes() <= SMALL:
        return not reason
    exact, estimate = operations(t)
    return t.bytes() + t.least() <= t.subject.memory and exact <= estimate


def one_at_a_time(subject: Subject, cotangents: Cotangents, reason: str) -> bool:
    """Are each output's own kernels made one after another, in passes of their own? Where the whole kernel is not formed; and of
    the initial network, because captures that are kept for a whole kernel would be kept for good."""
    return not formed(Tangents(subject, cotangents), reason) or (bool(subject.origin) and cotangents.whole)


def _same_output_estimate(subject: Subject, cotangents: Cotangents, reason: str) -> Statistic | None:
    return DIAGONAL if one_at_a_time(subject, cotangents, reason) else None


def _centred_estimate(subject: Subject, cotangents: Cotangents, reason: str) -> Statistic | None:
    if not cotangents.exact:
        return SKETCH if DRAWN.why_not(subject, cotangents) else DRAWN
    return None if formed(Tangents(subject, cotangents), reason) else FREE


SAME_OUTPUT = Derived("same_output", same_output, (TANGENT_KERNEL, LABELS), same_output_leaving, _same_output_estimate)
CENTRED_KERNEL = Derived("centred_kernel", centred_kernel, (TANGENT_KERNEL, LABELS), centred_kernel_leaving, _centred_estimate)
