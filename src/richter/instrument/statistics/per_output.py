"""Each output's own tangent kernel K^cc: beside its labels (SAME_OUTPUT), beside the labels of every output (CROSS_OUTPUT), and
beside the kernel of another time (SINCE_INITIAL, SINCE_PREVIOUS). It is a part of the whole kernel where that is formed; else
outputs have passes of their own (Diagonal), and of too many outputs some are sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from richter.core import Mark, Remark, show_bytes
from richter.core.values import trim
from richter.instrument.capture import TOGETHER, weight_bytes
from richter.instrument.cotangents import Cotangents, SomeOutputs
from richter.instrument.probe import columns, counts, labelled
from richter.instrument.statistics.frame import (
    NO_LABELS,
    Derived,
    Gathering,
    Group,
    Missing,
    OfKernels,
    Place,
    Simple,
    Stack,
    Statistic,
    Wants,
    finite,
    in_range,
)
from richter.instrument.statistics.kernels import LABELS, TANGENT_KERNEL, Estimate, Estimates, KernelTargets, Tangents, left
from richter.instrument.statistics.sketches import way
from richter.instrument.statistics.variants import Initial, Previous
from richter.instrument.stream import LayerCapture, beside, chunks, fitting, steps
from richter.instrument.subject import Subject
from richter.kernels.contract import NUMBERS, Unit, at_positions, live_positions
from richter.linalg import quotient, without_each

# ------------------------------------------------------------------------------------------------------------- sampling
# The number that an output's own kernel gives with its labels grows with the number of examples that have it as their label. So
# outputs are sampled with probabilities in proportion to that number; those with a large share of all labels are always taken,
# and each counts as the inverse of its probability (Horvitz and Thompson 1952), which is unbiased whatever the values are.

Weights = NDArray[np.float64]  # "v"
SAMPLED = 8  # outputs whose own kernels are computed when there are too many


@dataclass(frozen=True)
class SampledOutputs:
    """Outputs ``picked`` of so many. ``chosen``: places among them of those that were picked at random, each of which may be left
    out. Weights in a mean over all outputs: of all, without each of the chosen ones, without each group of examples; None where
    all are alike."""

    picked: Int[Tensor, " v"]
    among: int
    chosen: Sequence[int]
    weights: Weights | None = None
    without_chosen: Sequence[Weights] = ()
    without_examples: Sequence[Weights] = ()

    @property
    def drawn(self) -> bool:
        """Return whether only some of the outputs are in the sample."""
        return len(self.picked) < self.among


def uniform(outputs: Int[Tensor, " m"], number: int, draw: torch.Generator) -> SampledOutputs:
    """SampledOutputs all outputs with the same probability."""
    picked = outputs[torch.randperm(len(outputs), generator=draw)[:number]].sort().values
    return SampledOutputs(picked, len(outputs), range(len(picked)))


def by_labels(outputs: Int[Tensor, " m"], labels: Float[Tensor, "m g"], number: int, draw: torch.Generator) -> SampledOutputs:
    """SampledOutputs with probabilities in proportion to the number of labels, which is known for every group of examples."""
    if len(outputs) <= number:
        return SampledOutputs(outputs, len(outputs), range(len(outputs)))
    counts = labels.numpy().astype(np.float64)
    chances = inclusion(counts.sum(1), number)
    places = np.sort(np.concatenate([np.flatnonzero(chances == 1), _systematic(chances, draw)]))
    sure, m = chances[places] == 1, len(outputs)
    weights, free = 1 / (chances[places] * m), int((~sure).sum())
    chosen = np.flatnonzero(~sure).tolist()
    more = np.where(sure, weights, weights * free / max(1, free - 1))
    return SampledOutputs(outputs[torch.from_numpy(places)], m, chosen, weights, [np.delete(more, i) for i in chosen],
                  [_without(counts, g, places, chances) for g in range(counts.shape[1])])


def inclusion(sizes: Weights, number: int) -> Weights:
    """Inclusion probabilities in proportion to sizes, ``number`` in all; 1 where they would be larger."""
    chances = np.zeros(len(sizes))
    while True:
        rest = chances < 1
        shares = (number - int((~rest).sum())) * sizes / sizes[rest].sum()
        beyond = rest & (shares >= 1 - 1e-9)
        if not beyond.any():
            return np.where(rest, shares, 1.0)
        chances[beyond] = 1.0


def _systematic(chances: Weights, draw: torch.Generator) -> NDArray[np.int64]:
    """Systematic sampling in random order: those where the sum of probabilities passes a random number plus an integer."""
    rest = np.flatnonzero(chances < 1)
    order = rest[torch.randperm(len(rest), generator=draw).numpy()]
    sums = np.cumsum(chances[order])
    points = torch.rand(1, generator=draw, dtype=torch.float64).item() + np.arange(round(float(sums[-1])))
    return np.asarray(order[np.minimum(np.searchsorted(sums, points, side="right"), len(order) - 1)])


def _without(counts: Float[NDArray, "m g"], group: int, places: NDArray[np.int64], chances: Weights) -> Weights:
    """Weights without one group of examples, as if the probabilities came from the labels that are left, of outputs that have
    some. An output without labels keeps its probability."""
    every = counts.sum(1)
    rest_of_labels, rest = every - counts[:, group], chances < 1
    number = int((rest_of_labels > 0).sum())
    if not number:
        return np.asarray(1 / (chances[places] * len(counts)))
    share = rest_of_labels[rest].sum() / every[rest].sum()
    fewer = np.where(rest_of_labels > 0, every / np.maximum(rest_of_labels, 1), 1.0)
    return np.asarray(np.where(rest, share * fewer, 1.0)[places] / (chances[places] * number))


# ----------------------------------------------------------------------------------------- passes for single outputs


@dataclass(frozen=True)
class Diagonal(OfKernels):
    """The own kernels of all outputs, or of some that are sampled from those that have labels. ``sums``: the statistic of kernels
    "v n n" and labels "n v"; ``leaving``: the same with each group of examples left out."""

    sums: Callable[[Tensor, Tensor], Any]
    leaving: Callable[[Tensor, Tensor, int], Sequence[Any]]
    of_sampled: Callable[[Tensor, Tensor, int], Sequence[Any]]  # ``leaving`` where outputs are sampled
    labelled: bool = True  # are labels needed?
    by_labels: bool = False  # does it grow with the number of examples that have an output as their label?

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        t = Tangents(subject, cotangents)
        v, kept = t.v if cotangents.exact else SAMPLED, KeptCaptures(t)
        least = t.least("diagonal", v)
        least = min(least, kept.least) if not cotangents.exact and kept.possible else least
        passes = kept.passes(v) if not cotangents.exact and kept.fewer_passes(v) else t.passes("diagonal", v)
        return Wants(alone=8 * v * t.n ** 2 + least + t.audited, passes=passes * t.n / subject.probe.n,
                     what=f"estimates of kernels over {t.n} examples")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        t = Tangents(subject, cotangents)
        sample = self._sample(t)
        among = f"{sample.among} that have labels" if subject.targets.Y is not None else str(sample.among)
        remark = Remark(Mark.ESTIMATED, f"{len(sample.picked)} outputs drawn of {among}") if sample.drawn else Remark()
        groups = {**({"outputs": len(sample.chosen)} if sample.drawn else {}), **t.groups}
        return Estimates(lambda: self._estimates(t, sample), groups, remark)

    def _sample(self, t: Tangents) -> SampledOutputs:
        """All outputs through exact cotangents, else some of those that have labels; if no labels are needed, some of all."""
        Y, draw, outputs = t.subject.targets.Y, torch.Generator().manual_seed(t.cotangents.seed), t.subject.survey.outputs
        if t.cotangents.exact or (Y is None and self.labelled):
            outputs = 0 if Y is None and self.labelled else t.v
            return SampledOutputs(torch.arange(outputs), outputs, ())
        known = counts(Y, t.rows, t.groups["examples"]) if self.by_labels and Y is not None else None
        if known is not None:
            return by_labels(*known, SAMPLED, draw)
        return uniform(torch.arange(outputs) if Y is None else labelled(Y, t.rows).nonzero().flatten().cpu(), SAMPLED, draw)

    def _estimates(self, t: Tangents, sample: SampledOutputs) -> Iterator[tuple[str, Estimate]]:
        """Yield the estimate of each module from the kernels of the sampled outputs."""
        if not len(sample.picked):
            raise Missing(NO_LABELS)
        labels = t.labels().given if t.cotangents.exact else None
        Y = labels if labels is not None else columns(t.subject.targets.Y, t.rows, sample.picked).to(t.subject.home)
        kernels = ((name, in_range(K, t.subject)) for name, K in self._kernels(t, tuple(sample.picked.tolist())))
        for name, K in t.summed(kernels):
            yield name, self._estimate(t, K, Y, sample)

    def _kernels(self, t: Tangents, picked: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
        """Yield (module, kernels of all outputs or of the sampled ones)."""
        if t.cotangents.exact:
            return t.anew("diagonal")
        kept = KeptCaptures(t)
        return kept.kernels(picked) if kept.fewer_passes(len(picked)) else t.anew("diagonal", SomeOutputs(picked))

    def _estimate(self, t: Tangents, K: Tensor, Y: Tensor, sample: SampledOutputs) -> Estimate:
        """Sampled outputs and examples are left out separately: their variances add."""
        value, outputs = self.sums(K, Y), torch.arange(len(K), device=K.device)
        if not sample.drawn:
            return Estimate(value, {"examples": self.leaving(K, Y, t.groups["examples"])})
        groups = {"outputs": [self.sums(K[outputs != i], Y[:, outputs != i]) for i in sample.chosen],
                  "examples": self.of_sampled(K, Y, t.groups["examples"])}
        if sample.weights is None:
            return Estimate(value, groups)
        weights = {"outputs": sample.without_chosen, "examples": sample.without_examples}
        weighted = {kind: [replace(part, weights=w) for part, w in zip(parts, weights[kind], strict=True)]
                    for kind, parts in groups.items()}
        return Estimate(replace(value, weights=sample.weights), weighted)


MANY = 2 ** 62  # examples: so many that the gradients of a shared parameter are never formed
OUTPUTS = 8  # arrays of an example's outputs that are held for one example: see frame.AUDITED


@dataclass
class KeptCaptures:
    """Kernels of single outputs where not all examples fit at once: the captures of some modules are kept for all kernel
    examples, from passes of some examples each, and multiplied afterwards. No example goes through the model more than once for
    the same modules, as it would for pairs of chunks, and for as many outputs as fit."""

    t: Tangents

    @property
    def possible(self) -> bool:
        """Return whether the captures of all maps can be held, and the model draws nothing at random."""
        t, survey = self.t, self.t.subject.survey
        return not survey.drawn and all(k in survey.batched for k in t.maps) and self.loose_bytes <= t.memory // 4

    @property
    def loose_bytes(self) -> int:
        """Bytes of the gradients of all kernel examples in a module's parameters that are no maps, and of their products."""
        t = self.t
        numbers = [sum(t.subject.state[u.parameter].numel() for u in units if not u.maps) for units in t.by_module.values()]
        return 2 * t.n * t.subject.itemsize * max(numbers, default=0)

    def kept_bytes(self, units: Sequence[Unit], outputs: int) -> int:
        """Bytes of the captures of all kernel examples for so many outputs, at the positions from which these are reached."""
        maps, readouts = self.t.subject.survey.maps, self.t.subject.survey.readouts
        names = dict.fromkeys(k for u in units for k in u.maps)
        numbers = sum(maps[k].width + maps[k].reads for k in names if k not in readouts)
        last = sum(maps[k].width // maps[k].positions for k in names if k in readouts)  # one position
        return self.t.n * self.t.subject.itemsize * outputs * (numbers + last)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one example in a pass."""
        survey = self.t.subject.survey
        signals = 2 * sum(survey.maps[k].width for k in self.t.maps)
        return self.t.subject.itemsize * (2 * survey.graph + signals + OUTPUTS * survey.outputs)

    @property
    def products_bytes(self) -> int:
        """Bytes of the products of two captures."""
        positions = max((self.t.subject.survey.maps[k].positions for k in self.t.maps), default=1)
        return 6 * self.t.subject.itemsize * min(NUMBERS, (self.t.n * positions) ** 2) + self.loose_bytes

    @property
    def least(self) -> int:
        """The smallest memory in which every module's kernels can be computed."""
        captures = max((self.kept_bytes(units, 1) for units in self.t.by_module.values()), default=0)
        return captures + self.chunk_bytes + self.products_bytes

    def turns(self) -> list[list[Unit]]:
        """Modules whose captures, of one output, fit side by side with one example in a pass: every turn takes a pass."""
        room = self.t.memory - self.chunk_bytes - self.products_bytes
        return self.t.side_by_side(lambda units: self.kept_bytes(units, 1) <= room)

    def fewer_passes(self, outputs: int) -> bool:
        """Does this take fewer passes than pairs of chunks? Not where all examples fit at once."""
        t = self.t
        if not self.possible:
            return False
        at_once = t.job(t.units, "diagonal", v=outputs).bytes(t.n, t.n, True)
        return at_once > t.memory - 8 * outputs * t.n ** 2 * len(t.by_module)

    def together(self, units: Sequence[Unit], outputs: int) -> int:
        """The number of outputs whose captures fit, with their cotangents and an example in a pass."""
        room = self.t.memory - self.chunk_bytes - self.products_bytes
        each = self.kept_bytes(units, 1) + self.t.subject.itemsize * self.t.subject.survey.outputs
        return int(max(1, min(outputs, room // max(1, each))))

    def passes(self, outputs: int) -> float:
        """Forward-backward passes of the kernel examples: a third for one forward pass, and for each output."""
        return sum(math.ceil(outputs / self.together(units, outputs)) + outputs for units in self.turns()) / 3

    def kernels(self, picked: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """Yield (module, kernels "v n n" of these outputs)."""
        t = self.t
        for units in self.turns():
            modules = dict.fromkeys(u.module for u in units)
            K = {name: torch.zeros(len(picked), t.n, t.n, dtype=torch.float64, device=t.subject.home) for name in modules}
            at_once = self.together(units, len(picked))
            room = t.memory - self.kept_bytes(units, at_once) - self.products_bytes
            size = fitting(room, self.chunk_bytes, min(t.subject.probe.chunk, t.n))
            for some in steps(len(picked), at_once):
                for c, captures in enumerate(self._captures(units, picked[some], size), some.start):
                    for name in modules:
                        part = t.contract(t.by_module[name], captures, "diagonal", SomeOutputs((picked[c],)), MANY)
                        K[name][c:c + 1] += part.to(K[name])
            yield from K.items()

    def _captures(self, units: Sequence[Unit], outputs: Sequence[int], size: int) -> Iterator[dict[str, LayerCapture]]:
        """Yield the captures of all examples for each of these outputs, from one forward pass of each example."""
        t = self.t
        job = t.job(units, "diagonal", SomeOutputs(tuple(outputs)))
        parts: list[list[dict[str, LayerCapture]]] = [[] for _ in outputs]
        for chunk in chunks(job.network, t.x, size, maps=job.maps, cotangents=job.cotangents, title="kernels"):
            for c, part in enumerate(parts):
                part.append({k: _compact(capture) for k, capture in chunk.captures(slice(c, c + 1)).items()})
            del chunk  # with its graph, which malloc keeps
            trim(weight_bytes(t.subject.model))
        for c in range(len(outputs)):
            part, parts[c] = parts[c], []
            yield _joined(part, weight_bytes(t.subject.model))


def _joined(parts: Sequence[dict[str, LayerCapture]], size: int) -> dict[str, LayerCapture]:
    """All examples of each map side by side. The parts are given back to the system for a model of this ``size``: they are too
    small for malloc to put the next map there."""
    whole: dict[str, LayerCapture] = {}
    freed = 0
    for k in dict.fromkeys(k for part in parts for k in part):
        whole[k] = beside([{k: part.pop(k)} if k in part else {} for part in parts])[k]
        freed += whole[k].h.nbytes + whole[k].g.nbytes
        if freed > TOGETHER:
            freed = 0
            trim(size)
    trim(size)
    return whole


def _compact(c: LayerCapture) -> LayerCapture:
    """A capture of one output at the positions from which it is reached, without the graph and without what it is a view of."""
    live = live_positions(c)[0]
    if c.kind in ("dense", "lookup") and not bool(live.all()):
        c = at_positions(c, 0, live)
    h, g = (t.clone() if t.untyped_storage().nbytes() > math.prod(t.shape) * t.element_size() else t
            for t in (c.h.detach(), c.g.detach()))
    return replace(c, h=h, g=g, f=None)


@dataclass(frozen=True)
class OutputByOutput(OfKernels):
    """A statistic of each output's own kernel, in the form that is computed: from the whole kernel, or from single outputs."""

    formed: Statistic
    single: Statistic

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        # captures for a whole kernel of another network would be kept for good
        whole = way(Tangents(subject, cotangents)) == "formed" and not (subject.origin and cotangents.whole)
        return (self.formed if whole else self.single).planned(subject, cotangents)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        raise AssertionError("it is planned as one of its forms")


def output_by_output(name: str, single: Diagonal) -> OutputByOutput:
    """Statistic of the kernels of single outputs: from the whole kernel where it is formed, otherwise output by output."""
    def sums(K: Float[Tensor, "n v n v"], labels: KernelTargets) -> Any:
        return single.sums(diagonal(K), labels.Y)

    def leaving(_: Any, K: Float[Tensor, "n v n v"], labels: KernelTargets, groups: int) -> Sequence[Any]:
        return single.leaving(diagonal(K), labels.Y, groups)
    return OutputByOutput(name, Derived(name, sums, (TANGENT_KERNEL, LABELS), leaving), single)


def diagonal(K: Float[Tensor, "n v n v"]) -> Float[Tensor, "v n n"]:
    """Kernel K^cc of each output c with itself."""
    return K.diagonal(dim1=1, dim2=3).permute(2, 0, 1).contiguous()


def members(n: int, groups: int, like: Tensor) -> Float[Tensor, "n g"]:
    """Jackknife group of each example, one-hot."""
    return torch.nn.functional.one_hot(torch.arange(n) % groups, groups).to(like)


# ------------------------------------------------------------------------------------------------------- its own labels

SQUARED = 2 ** 20  # entries that are squared at a time
LOST = 1e-8  # share of the square of a kernel: with less left, subtracting a group loses too many digits


@dataclass(frozen=True)
class SameOutput:
    """Sums over the kernel of each output c and its labels."""

    quadratic: Float[Tensor, "*g v"]  # y_c^T K^cc y_c; with groups left out, "g v"
    norm: Float[Tensor, "*g v"]  # |K^cc|_F
    energy: Float[Tensor, "*g v"]  # |y_c|^2
    weights: Weights | None = None  # in a mean over all outputs, where some were sampled; None: all alike

    def mean(self, values: Weights, defined: NDArray[np.bool_]) -> Any:
        """Mean over the outputs for which a number is ``defined`` (it is 0 elsewhere), estimated from the sampled ones; NaN where
        it is defined for none."""
        if self.weights is None:
            return quotient(values.sum(-1), defined.sum(-1))
        weights = self.weights * defined
        return quotient((weights * values).sum(-1) * self.weights.sum(-1), weights.sum(-1))


def of_diagonal(K: Float[Tensor, "v n n"], Y: Float[Tensor, "n v"]) -> SameOutput:
    """y^T K y and |K| of each output's kernel, and |y|^2."""
    y = Y.T[:, :, None]
    norms = torch.linalg.vector_norm(K, dim=(1, 2))
    finite(norms.sum().item())
    return SameOutput((y.mT @ K @ y)[:, 0, 0], norms, (Y * Y).sum(0))


def of_diagonal_leaving(K: Float[Tensor, "v n n"], Y: Float[Tensor, "n v"], groups: int) -> Stack:
    """The sums with each group of examples left out, from sums over blocks. A submatrix is copied only where one group is nearly
    the whole kernel."""
    n = len(Y)
    inside = np.equal.outer(np.arange(groups), np.arange(n) % groups).astype(np.float64)  # group, row
    grouped = Y.T.cpu().numpy()[:, None] * inside  # output, group, row
    matrices, y, rows = K.cpu().double(), torch.from_numpy(grouped), torch.from_numpy(inside)
    quadratic = without_each(y @ matrices @ y.mT)
    few = max(1, SQUARED // n ** 2)
    blocks = torch.cat([rows @ part.square() @ rows.T for part in matrices.split(few)])
    square = without_each(blocks)
    energies = np.square(grouped).sum(2)
    sizes = quadratic, square.clamp(min=0).sqrt(), torch.from_numpy(energies.sum(1, keepdims=True) - energies)
    quadratic, norm, energy = (size.to(K).T.contiguous() for size in sizes)  # group, output
    for g in (square < LOST * blocks.sum((1, 2))[:, None]).any(0).nonzero().flatten().tolist():
        keep = left(n, ("examples", g)).to(K.device)
        part = of_diagonal(K[:, keep][:, :, keep], Y[keep])
        quadratic[g], norm[g], energy[g] = part.quadratic, part.norm, part.energy
    return Stack(SameOutput(quadratic, norm, energy), groups, lambda g: SameOutput(quadratic[g], norm[g], energy[g]))


def of_sampled_leaving(K: Float[Tensor, "v n n"], Y: Float[Tensor, "n v"], groups: int) -> list[SameOutput]:
    """The sums for sampled outputs, which are left out separately. An output that has no label left stays as it was, or the
    choice of outputs would count twice."""
    whole = of_diagonal(K, Y)

    def kept(part: SameOutput) -> SameOutput:
        has = part.energy > 0
        return SameOutput(torch.where(has, part.quadratic, whole.quadratic), torch.where(has, part.norm, whole.norm),
                          torch.where(has, part.energy, whole.energy))
    return [kept(part) for part in of_diagonal_leaving(K, Y, groups)]


SAME_OUTPUT = output_by_output("same_output", Diagonal("kernels_of_single_outputs", of_diagonal, of_diagonal_leaving,
                                                       of_sampled_leaving, by_labels=True))


# -------------------------------------------------------------------------------------------- the labels of every output


@dataclass(frozen=True)
class CrossOutput:
    """Sums over each output's kernel and the labels of every output."""

    quadratic: Float[Tensor, "v v"]  # y_a^T K^cc y_a: kernels c, labels a
    norm: Float[Tensor, " v"]  # |K^cc|_F
    energy: Float[Tensor, " v"]  # |y_a|^2


def crossed(K: Float[Tensor, "v n n"], Y: Float[Tensor, "n v"]) -> CrossOutput:
    """y^T K y of each output's kernel with each output's labels, and the norms."""
    norms = torch.stack([Kc.norm() for Kc in K])
    finite(norms.sum().item())
    return CrossOutput(torch.stack([((Kc @ Y) * Y).sum(0) for Kc in K]), norms, (Y * Y).sum(0))


def crossed_leaving(K: Float[Tensor, "v n n"], Y: Float[Tensor, "n v"], groups: int) -> list[CrossOutput]:
    """The sums with each group of examples left out."""
    inside = members(len(Y), groups, Y)
    grouped = inside[:, :, None] * Y[:, None]  # example, group, label
    quadratic = torch.stack([without_each(torch.einsum("nga,nm,mha->agh", grouped, Kc, grouped)) for Kc in K])
    square = without_each(torch.stack([inside.T @ (Kc * Kc) @ inside for Kc in K]))
    energy = (grouped * grouped).sum(0)  # group, label
    return [CrossOutput(quadratic[:, :, g], square[:, g].clamp(min=0).sqrt(), energy.sum(0) - energy[g]) for g in range(groups)]


CROSS_OUTPUT = output_by_output("cross_output", Diagonal("kernels_of_single_outputs_and_all_labels", crossed, crossed_leaving,
                                                         crossed_leaving))


# ------------------------------------------------------------------------------------------- the kernels of another time

OTHER_KERNELS = ("kernels {now} now and {then} before (outputs, examples, examples) belong to different outputs or examples, "
                 "and cannot be compared")


class OwnKernels(OutputByOutput):
    """Each output's own kernel "v n n", of each module and of the whole model; of some outputs, where there are too many. Those
    of another time are kept, of all modules."""

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        t = Tangents(subject, cotangents)
        held = 2 * 8 * t.n ** 2 * (t.v if cotangents.exact else SAMPLED) * (len(t.by_module) + 1)
        if held > subject.memory:
            return (f"the kernels of all layers over {t.n} examples, now and at another time, need memory='{show_bytes(held)}': "
                    f"fewer examples, Probe(kernel_examples=...), need less")
        return super().planned(subject, cotangents)


def _kernels(K: Float[Tensor, "v n n"], Y: Float[Tensor, "n v"]) -> Float[Tensor, "v n n"]:
    """Kernels on the device of the labels, in float64."""
    return K.to(Y.device, torch.float64)


def _kernels_leaving(K: Float[Tensor, "v n n"], Y: Tensor, groups: int) -> Stack:
    """Kernels with each group of examples left out, made when they are read."""
    K = _kernels(K, Y)

    def take(group: int) -> Tensor:
        rows = left(K.shape[1], ("examples", group)).to(K.device)
        return K[:, rows][:, :, rows]

    return Stack(None, groups, take)


OWN_KERNELS = OwnKernels(
    "layer_kernels", Derived("layer_kernels", lambda K: diagonal(K).clone(), (TANGENT_KERNEL,)),  # in memory of its own
    Diagonal("own_kernels_of_single_outputs", _kernels, _kernels_leaving, _kernels_leaving, labelled=False))


@dataclass(frozen=True)
class Evolved:
    """Norms of kernels, all outputs together, now and then (K0)."""

    now: float  # |K|
    then: float  # |K0|
    apart: float  # |K - K0|


def evolved(K: Float[Tensor, "v n n"], K0: Float[Tensor, "a m m"]) -> Evolved:
    """Norms of the kernels now, at initialisation, and of their difference."""
    if K.shape != K0.shape:
        raise Missing(OTHER_KERNELS.format(now=tuple(K.shape), then=tuple(K0.shape)))
    return Evolved(*(finite(M.norm().item()) for M in (K, K0, K - K0)))


def evolved_leaving(_: Evolved, K: Float[Tensor, "v n n"], K0: Float[Tensor, "v n n"], groups: int) -> list[Evolved]:
    """The norms with each group of examples left out."""
    inside = members(K.shape[1], groups, K)
    blocks = torch.stack([inside.T @ M.square().sum(0) @ inside for M in (K, K0, K - K0)])
    return [Evolved(*sizes) for sizes in without_each(blocks).clamp(min=0).sqrt().T.tolist()]


@dataclass(frozen=True)
class Step(Statistic):
    """The step of training at which it is measured; NaN if it is not known."""

    name: str
    place: Place = "any"
    of_examples: bool = False

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Step(subject)


class _Step(Simple):
    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.subject = subject

    def value(self, place: str, without: Group | None = None) -> float:
        return math.nan if self.subject.step is None else float(self.subject.step)


STEP = Step("step")
SINCE_INITIAL = Derived("kernels_since_initial", evolved, (OWN_KERNELS, Initial(OWN_KERNELS)), evolved_leaving)
SINCE_PREVIOUS = Derived("kernels_since_previous", evolved, (OWN_KERNELS, Previous(OWN_KERNELS)), evolved_leaving)
