"""What measures of alignment read of a tangent kernel after one centring over all outputs of all examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from richter.core import WHOLE, Remark, show_bytes
from richter.core.progress import progress
from richter.instrument.capture import to_device
from richter.instrument.cotangents import MOST, Cotangents
from richter.instrument.statistics import frame
from richter.instrument.statistics.frame import (
    GROUPS,
    NO_LABELS,
    Gathering,
    Group,
    Missing,
    OfKernels,
    Simple,
    Statistic,
    Wants,
    audit_bytes,
)
from richter.instrument.statistics.moments import remark_of
from richter.instrument.stream import Chunk, LayerCapture, ready, room_for, select
from richter.kernels.contract import Outputs, Plan, Request, Unit, least, make_plan, mirror
from richter.kernels.ntk import Block, Job, kernels
from richter.linalg import Leading, Rough, centre, leading, rough, top_of_each, without_each

if TYPE_CHECKING:
    from richter.instrument.statistics.frame import Reading
    from richter.instrument.subject import Subject

# ------------------------------------------------------------------------------------------------------------ sampling
# Some of very many outputs, and what each counts in a mean over all of them. What an output's own kernel says of its labels
# grows with the number of examples that have it as their label: outputs are drawn with chances in proportion to that number,
# those
# that have a large share of all labels are never missed, and each counts as the inverse of its chance (Horvitz and Thompson
# 1952),
# which is right on the average whatever the values are.

Weights = NDArray[np.float64]  # "v"


@dataclass(frozen=True)
class Sample:
    """Outputs ``picked`` of so many. ``chosen``: places among them of those that were drawn by chance, each of which may be left
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
        return len(self.picked) < self.among


def uniform(outputs: Int[Tensor, " m"], number: int, draw: torch.Generator) -> Sample:
    """Each with the same chance."""
    picked = outputs[torch.randperm(len(outputs), generator=draw)[:number]].sort().values
    return Sample(picked, len(outputs), range(len(picked)))


def by_labels(outputs: Int[Tensor, " m"], labels: Float[Tensor, "m g"], number: int, draw: torch.Generator) -> Sample:
    """With chances in proportion to the number of labels, which is known for every group of examples."""
    if len(outputs) <= number:
        return Sample(outputs, len(outputs), range(len(outputs)))
    counts = labels.numpy().astype(np.float64)
    chances = inclusion(counts.sum(1), number)
    places = np.sort(np.concatenate([np.flatnonzero(chances == 1), _systematic(chances, draw)]))
    sure, m = chances[places] == 1, len(outputs)
    weights, free = 1 / (chances[places] * m), int((~sure).sum())
    chosen = np.flatnonzero(~sure).tolist()
    more = np.where(sure, weights, weights * free / max(1, free - 1))
    return Sample(outputs[torch.from_numpy(places)], m, chosen, weights, [np.delete(more, i) for i in chosen],
                  [_without(counts, g, places, chances) for g in range(counts.shape[1])])


def inclusion(sizes: Weights, number: int) -> Weights:
    """Chances in proportion to sizes, ``number`` in all; 1 where they would be more."""
    chances = np.zeros(len(sizes))
    while True:
        rest = chances < 1
        shares = (number - int((~rest).sum())) * sizes / sizes[rest].sum()
        beyond = rest & (shares >= 1 - 1e-9)
        if not beyond.any():
            return np.where(rest, shares, 1.0)
        chances[beyond] = 1.0


def _systematic(chances: Weights, draw: torch.Generator) -> NDArray[np.int64]:
    """Of those whose chance is below 1, in random order: where the sum of chances passes a random number, and every whole one
    after it."""
    rest = np.flatnonzero(chances < 1)
    order = rest[torch.randperm(len(rest), generator=draw).numpy()]
    sums = np.cumsum(chances[order])
    points = torch.rand(1, generator=draw, dtype=torch.float64).item() + np.arange(round(float(sums[-1])))
    return np.asarray(order[np.minimum(np.searchsorted(sums, points, side="right"), len(order) - 1)])


def _without(counts: Float[NDArray, "m g"], group: int, places: NDArray[np.int64], chances: Weights) -> Weights:
    """Weights without one group of examples: as if chances had gone by the labels that are left, of the outputs that have some.
    One that has none stays as it was."""
    every = counts.sum(1)
    left, rest = every - counts[:, group], chances < 1
    number = int((left > 0).sum())
    if not number:
        return np.asarray(1 / (chances[places] * len(counts)))
    share = left[rest].sum() / every[rest].sum()
    fewer = np.where(left > 0, every / np.maximum(left, 1), 1.0)
    return np.asarray(np.where(rest, share * fewer, 1.0)[places] / (chances[places] * number))


# --------------------------------------------------------------------------------------------------------------- grams
# Tangent kernels of the probe's kernel examples: Gram, and the labels beside its rows. They are made of captures that the pass
# over the probe has already made, or by kernels.ntk. What is too large to be formed is in estimates.py.

KERNEL = "it has no tangent kernel"


@dataclass(frozen=True)
class Labels:
    """Targets "n v" beside a kernel's rows; ``keep`` is False where a row belongs to no real output (padding)."""

    given: Float[Tensor, "n v"] | None  # None: the probe has none
    keep: Tensor | None = None

    @property
    def Y(self) -> Float[Tensor, "n v"]:
        if self.given is None:
            raise Missing(NO_LABELS)
        return self.given

    def take(self, rows: Tensor) -> Labels:
        return Labels(None if self.given is None else self.given[rows], None if self.keep is None else self.keep[rows])


@dataclass(eq=False)
class Tangents:
    """The kernel examples of a subject, and what computations of their kernels need."""

    subject: Subject
    cotangents: Cotangents

    def __post_init__(self) -> None:
        subject = self.subject
        self.rows = subject.kernel_rows
        self.n, self.v = len(self.rows), subject.number(self.cotangents, "kernel")
        self.units = subject.wanted
        self.maps = list(dict.fromkeys(k for u in self.units for k in u.maps))

    @property
    def x(self) -> object:
        return select(self.subject.x, self.rows)

    def job(self, units: Sequence[Unit], outputs: Outputs = "full", cotangents: Cotangents | None = None) -> Job:
        chosen = cotangents or self.cotangents
        V = self.subject.rowwise(chosen, "kernel", among=self.rows)
        source = self.subject.source
        source = replace(source, audit=source.audit and source.audit.part("kernels"))
        return Job(source, units, V, self.subject.number(chosen, "kernel"), outputs)

    def request(self, units: Sequence[Unit], outputs: Outputs, v: int | None = None, **more: Any) -> Request:
        s, v = self.subject, self.v if v is None else v
        return Request(s.survey, units, s.state, self.n, self.n, v, outputs, s.itemsize, **more)

    @cached_property
    def by_module(self) -> dict[str, list[Unit]]:
        units: dict[str, list[Unit]] = {}
        for u in self.units:
            units.setdefault(u.module, []).append(u)
        return units

    @cached_property
    def parameters(self) -> list[tuple[str, str]]:
        """(module, name) of what is trained; a shared one belongs to the first module that has it."""
        return [(name.rpartition(".")[0], name) for name, p in self.subject.model.named_parameters()
                if p.requires_grad and p.is_floating_point()]

    @property
    def groups(self) -> dict[str, int]:
        return {"examples": min(self.subject.groups, self.n)}

    # -------------------------------------------------------------------------------------------------------- sizes

    @property
    def audited(self) -> int:
        """Of looking at captures."""
        return audit_bytes(self.subject, self.maps)

    @property
    def memory(self) -> int:
        """What is left beside that."""
        return max(0, self.subject.memory - self.audited)

    def bytes(self) -> int:
        """Of one module's kernel and of what is made of it."""
        return (40 + self.subject.itemsize) * (self.n * self.v) ** 2

    def least(self, outputs: Outputs = "full", v: int | None = None) -> int:
        """The smallest memory in which every module's kernel can be had, beside the kernel itself."""
        return max((least(self.request(units, outputs, v)) for units in self.by_module.values()), default=0)

    def kept_bytes(self) -> int:
        """Of the captures of all examples, if they are kept from another pass."""
        maps = self.subject.survey.maps
        return self.n * self.subject.itemsize * sum(self.v * maps[k].width + max(maps[k].unfolded, maps[k].width)
                                                    for k in self.maps)

    # ------------------------------------------------------------------------------------------------------ kernels

    def turns(self, outputs: Outputs, v: int) -> list[tuple[list[Unit], int]]:
        """As many modules at a time as have room for their kernels, and what is left of memory beside these."""
        each = 8 * self.n ** 2 * (v * v if outputs == "full" else v)
        groups: list[list[Unit]] = []
        held = 0
        for units in self.by_module.values():
            together = [*groups[-1], *units] if groups else []
            if groups and held + each + 4 * least(self.request(together, outputs, v)) <= self.memory:
                groups[-1] += units
                held += each
            else:
                groups.append(list(units))
                held = each
        return [(units, self.memory - each * len({u.module for u in units})) for units in groups]

    def plans(self, outputs: Outputs, v: int) -> list[Plan]:
        """What ``anew`` will do; where there is no room, as if there were some for the smallest piece of work."""
        requests = [(self.request(units, outputs, v, same=True, chunk=self.subject.probe.chunk), room)
                    for units, room in self.turns(outputs, v)]
        return [make_plan(request, max(room, least(request))) for request, room in requests]

    def passes(self, outputs: Outputs, v: int) -> float:
        """Of the kernel examples, forward and backward: a pair of chunks goes once more than its chunks would."""
        return sum(plan.chunk * (plan.passes + plan.backward) for plan in self.plans(outputs, v)) / 3 / max(1, self.n)

    def anew(self, outputs: Outputs, cotangents: Cotangents | None = None) -> Iterator[tuple[str, Tensor]]:
        """Kernels by module, of as many modules at a time as have room for them."""
        v = self.v if cotangents is None else self.subject.number(cotangents, "kernel")
        for units, room in progress(self.turns(outputs, v), title="kernels"):
            yield from kernels(self.job(units, outputs, cotangents), self.x, None, room, True, self.subject.probe.chunk).items()

    def from_captures(self, captures: Mapping[str, LayerCapture]) -> Iterator[tuple[str, Tensor]]:
        """The same from captures of all examples and cotangents."""
        device = self.subject.device
        for module, units in self.by_module.items():
            job = self.job(units)
            K = torch.zeros(self.v, self.n, self.v, self.n, dtype=job.source.dtype, device=device)
            block = Block(job, {module: K}, self.v, self.n)
            block.add(captures, captures)
            if job.loose:
                alone = Chunk(job.source, to_device(self.x, device), slice(0, self.n), (), job.cotangents, job.loose)
                block.add_whole(alone.gradients, alone.gradients)
            block.close()
            yield module, mirror(K, "full")

    def labels(self) -> Labels:
        """Targets beside the kernel's rows: the labels themselves, or the same combinations of them."""
        subject = self.subject

        def V() -> Tensor:
            f = subject.outputs(self.x).reshape(self.n, -1)  # cotangents may depend on it
            rows = subject.rowwise(self.cotangents, "kernel", among=self.rows)
            return rows(f, slice(0, self.n)).to(subject.home, torch.float64)

        keep = None if subject.counted is None else subject.counted[self.rows].to(subject.home)
        if subject.Y is None:
            nothing = torch.full((self.n, subject.survey.outputs), math.nan, dtype=torch.float64, device=subject.home)
            return Labels(None, self.cotangents.labels(nothing, keep, V)[1])
        return Labels(*self.cotangents.labels(subject.Y[self.rows].to(subject.home), keep, V))


@dataclass
class Kept:
    """Captures of the kernel examples, picked out of a pass over the probe."""

    rows: Tensor  # their numbers, in the order wanted
    v: int
    captures: dict[str, LayerCapture] = field(default_factory=dict)

    def add(self, name: str, reading: Reading) -> None:
        c, rows, block = reading.plain(name), reading.rows, reading.block
        inside = (self.rows >= rows.start) & (self.rows < rows.stop)
        if c is None or not inside.any():
            return
        into, out_of = inside.nonzero().flatten().to(c.g.device), (self.rows[inside] - rows.start).to(c.g.device)
        h = ready(replace(c, h=reading.chunk.reads_of(name, out_of))).h if reading.first else None
        if name not in self.captures:
            assert h is not None
            g = room_for(c.g[0], self.v, (len(self.rows), *c.g.shape[2:]))
            self.captures[name] = replace(c, h=room_for(h, 1, (len(self.rows), *h.shape[1:]))[0], g=g, f=None)
        mine = self.captures[name]
        for v, g in enumerate(c.g, block.start):
            mine.g[v][into] = g[out_of]
        if h is not None:
            mine.h[into] = h


class Gram(OfKernels):
    """The tangent kernel "n v n v" over the probe's kernel examples, of each module and of the whole model."""

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        if not cotangents.exact:
            return (f"needs the kernel itself, and {cotangents.label(subject.survey.outputs)} give another one: pick at most "
                    f"{MOST['kernel']} outputs with output=, e.g. lambda out: out[:, -1, :64]")
        t = Tangents(subject, cotangents)
        need = t.bytes() + t.least()
        if t.v > MOST["kernel"] and need > subject.memory:
            return (f"the kernel of {t.v} outputs and {t.n} examples needs memory='{show_bytes(need)}', and nothing stands in "
                    f"for it here: pick outputs with output=, fewer examples with Probe(kernel=...), or give more memory")
        return self

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        t = Tangents(subject, cotangents)
        batched = not subject.survey.drawn and all(k in subject.survey.batched for k in t.maps)
        return Wants(tuple(t.maps) if batched else (), held=t.kept_bytes(), alone=t.bytes() + t.least(),
                     optional=True, what=f"the kernel of one layer over {t.n} examples and {t.v} outputs",
                     passes=(1 + t.v) / 3 * t.n / subject.probe.n)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Gram(Tangents(subject, cotangents), remark_of(subject, cotangents))


class _Gram(Simple):
    """One module's kernel at a time, in the order of the modules; their sum is the whole model's."""

    def __init__(self, t: Tangents, remark: Remark) -> None:
        super().__init__(t.groups, remark)
        self.t, self.kept = t, Kept(t.rows, t.v)
        self.kernels: Iterator[tuple[str, Tensor]] | None = None
        self.place: str | None = None
        self.K = torch.empty(0)

    def add(self, reading: Reading) -> None:
        for name in self.t.maps:
            self.kept.add(name, reading)

    def _all(self) -> Iterator[tuple[str, Tensor]]:
        subject = self.t.subject
        whole: Tensor | None = None
        captures = self.kept.captures
        for name, K in self.t.from_captures(captures) if captures else self.t.anew("full"):
            K = K.to(subject.home, torch.float64).permute(1, 0, 3, 2)
            if subject.layers is None:
                whole = K.clone() if whole is None else whole.add_(K)
            yield name, K
        if whole is not None:
            yield WHOLE, whole

    def _go_to(self, place: str) -> bool:
        """Is it among the kernels that are still to come? If not, the next look begins with the first of them again."""
        self.kernels = self._all() if self.kernels is None else self.kernels
        for name, K in self.kernels:
            self.place, self.K = name, K
            if name == place:
                return True
        self.kernels, self.place, self.K = None, None, torch.empty(0)
        return False

    def _vanished(self, place: str) -> bool:
        """Is something read and asked that its products do not show? Known where captures were kept."""
        if not self.kept.captures or self.K.diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1).any():  # no larger entry than there
            return False
        captures = [self.kept.captures[k] for u in self.t.by_module.get(place, []) for k in u.maps]
        return any(bool(c.g.any()) and bool(c.h.any()) for c in captures)

    def value(self, place: str, without: Group | None = None) -> Float[Tensor, "n v n v"]:
        if place != self.place and not any(self._go_to(place) for _ in range(2)):
            raise Missing(KERNEL)
        if without is None:
            return frame.in_range(self.K, self.t.subject, vanished=self._vanished(place))
        rows = left(self.t.n, without).to(self.K.device)
        return self.K[rows][:, :, rows]


def left(n: int, without: Group) -> Tensor:
    """Which of n examples are left when one group is out."""
    return torch.arange(n) % min(GROUPS, n) != without[1]


class KernelLabels(OfKernels):
    """The labels of the kernel examples, in the order of a Gram's rows and seen through the same cotangents."""

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _KernelLabels(Tangents(subject, cotangents))


class _KernelLabels(Simple):
    def __init__(self, t: Tangents) -> None:
        super().__init__(t.groups)
        self.t = t

    @cached_property
    def labels(self) -> Labels:
        return self.t.labels()

    def value(self, place: str, without: Group | None = None) -> Labels:
        return self.labels if without is None else self.labels.take(left(self.t.n, without).to(self.t.subject.home))


TANGENT_KERNEL = Gram("tangent_kernel")
LABELS = KernelLabels("labels")

# ---------------------------------------------------------------------------- what is to be known of a kernel


@dataclass(frozen=True)
class SameOutput:
    """What is to be known of the kernels of each output c with itself and of its labels."""

    quadratic: Float[Tensor, " v"]  # y_c^T K^cc y_c
    norm: Float[Tensor, " v"]  # |K^cc|_F
    energy: Float[Tensor, " v"]  # |y_c|^2
    weights: Weights | None = None  # of each in a mean over all outputs, where some were drawn; None: all alike

    def mean(self, values: Weights, there: NDArray[np.bool_]) -> float:
        """Over all outputs that are there, of a number for each drawn one that is; how many are, the drawn ones say."""
        if self.weights is None:
            return float(values.mean())
        mine = self.weights[there]
        return float(mine @ values * (self.weights.sum() / mine.sum()))


def same_output(K: Float[Tensor, "n v n v"], labels: Labels) -> SameOutput:
    return of_diagonal(_same(K), labels.Y)


def same_output_leaving(_: SameOutput, K: Float[Tensor, "n v n v"], labels: Labels, groups: int) -> list[SameOutput]:
    return of_diagonal_leaving(_same(K), labels.Y, groups)


def _same(K: Float[Tensor, "n v n v"]) -> Float[Tensor, "v n n"]:
    return K.diagonal(dim1=1, dim2=3).permute(2, 0, 1).contiguous()


def of_diagonal(K: Float[Tensor, "v n n"], Y: Float[Tensor, "n v"]) -> SameOutput:
    y = Y.T[:, :, None]
    norms = torch.linalg.vector_norm(K, dim=(1, 2))
    frame.finite(norms.sum().item())
    return SameOutput((y.mT @ K @ y)[:, 0, 0], norms, (Y * Y).sum(0))


TOGETHER = 2 ** 20  # numbers that are squared at a time
LOST = 1e-8  # of the square of a kernel: where less is left without a group, too many digits are lost by taking the group away


def of_diagonal_leaving(K: Float[Tensor, "v n n"], Y: Float[Tensor, "n v"], groups: int) -> list[SameOutput]:
    """The same with each group of examples left out, from sums over blocks: a submatrix is copied only where a group is nearly
    all there is."""
    n = len(Y)
    inside = np.equal.outer(np.arange(groups), np.arange(n) % groups).astype(np.float64)  # group, row
    mine = Y.T.cpu().numpy()[:, None] * inside  # output, group, row
    matrices, groupwise, rows = K.cpu().double(), torch.from_numpy(mine), torch.from_numpy(inside)
    quadratic = without_each(groupwise @ matrices @ groupwise.mT)
    few = max(1, TOGETHER // n ** 2)
    blocks = torch.cat([rows @ part.square() @ rows.T for part in matrices.split(few)])
    square = without_each(blocks)
    energies = np.square(mine).sum(2)
    sizes = quadratic, square.clamp(min=0).sqrt(), torch.from_numpy(energies.sum(1, keepdims=True) - energies)
    known = [SameOutput(*without) for without in zip(*(size.to(K).unbind(1) for size in sizes), strict=True)]
    for g in (square < LOST * blocks.sum((1, 2))[:, None]).any(0).nonzero().flatten().tolist():
        keep = left(n, ("examples", g)).to(K.device)
        known[g] = of_diagonal(K[:, keep][:, :, keep], Y[keep])
    return known


def of_drawn_leaving(K: Float[Tensor, "v n n"], Y: Float[Tensor, "n v"], groups: int) -> list[SameOutput]:
    """The same of outputs that were drawn, and are left out by themselves: one that has no label left stays as it was, or what
    hangs on the choice of outputs would count twice."""
    whole = of_diagonal(K, Y)

    def kept(part: SameOutput) -> SameOutput:
        has = part.energy > 0
        return SameOutput(torch.where(has, part.quadratic, whole.quadratic), torch.where(has, part.norm, whole.norm),
                          torch.where(has, part.energy, whole.energy))
    return [kept(part) for part in of_diagonal_leaving(K, Y, groups)]


# ------------------------------------------------------------------------------------------------------------- centred

class CentredKernel:
    """What one global centring C = I - 11^T/(n k) leaves to be known of a kernel and its labels: ``norm`` |C K C|_F, ``top`` its
    largest eigenvalue, ``quadratic`` y~^T K y~ and ``energy`` |y~|^2. Asking for what is not known raises Missing.

    ``top``: a function is called when somebody asks, because eigenvalues cost more than all the rest, and ``tangent_cka`` does
    without them; of one that gives vectors too, these are kept for the values with groups left out."""

    def __init__(self, norm: float, labelled: tuple[float, float] | None, top: float | Callable[[], float | Leading],
                 lacking: str = "", matrix: Float[Tensor, "r r"] | None = None,
                 roughly: Callable[[], Rough | None] | None = None) -> None:
        self.norm, self.lacking = norm, lacking  # why ``top`` is NaN
        self.matrix, self.roughly = matrix, roughly  # of all rows that count, for the values with groups left out
        self._top: Callable[[], float | Leading] = top if callable(top) else lambda: top
        self._known: float | Leading | None = None
        if labelled is not None:
            self.quadratic, self.energy = labelled

    @property
    def leading(self) -> float | Leading:
        if self._known is None:
            with frame.decomposed():
                self._known = self._top()
        return self._known

    @property
    def top(self) -> float:
        top = self.leading
        top = top.value if isinstance(top, Leading) else top
        if math.isnan(top):
            raise Missing(self.lacking)
        return top

    def __getattr__(self, name: str) -> float:
        if name in ("quadratic", "energy"):
            raise Missing(NO_LABELS)
        raise AttributeError(f"a CentredKernel has no {name!r}")


def flat(K: Float[Tensor, "n v n v"], labels: Labels) -> tuple[Tensor, Tensor | None, Tensor]:
    """The kernel as a matrix, the labels as a vector, and the example each row belongs to; without padding. Outputs come
    first, as kernels lie in memory."""
    n, v = K.shape[:2]
    y, example = rows(labels, n, v, K.device)
    K = K.permute(1, 0, 3, 2).reshape(n * v, n * v)
    if labels.keep is not None:
        keep = labels.keep.T.reshape(-1)
        K = K[keep][:, keep]
    return K, y, example


def rows(labels: Labels, n: int, v: int, device: torch.device) -> tuple[Tensor | None, Tensor]:
    """The labels as a vector, and the example each belongs to."""
    y = None if labels.given is None else labels.given.T.reshape(-1)
    example = torch.arange(n, device=device).repeat(v)
    if labels.keep is None:
        return y, example
    keep = labels.keep.T.reshape(-1)
    return None if y is None else y[keep], example[keep]


REMAINING = 1e-2  # of |K|^2: where centring leaves less, the sums lose digits and the centred kernel is formed


def centred_kernel(kernel: Float[Tensor, "n v n v"], labels: Labels) -> CentredKernel:
    """From sums over rows, where they keep enough digits: then no centred copy is made."""
    K, y, _ = flat(kernel, labels)
    y = None if y is None else y - y.mean()
    whole, means = K.norm().item(), K.mean(0)
    square = whole ** 2 - 2 * len(K) * (means @ means).item() + (means.sum() ** 2).item()
    C = K if square > REMAINING * whole ** 2 else centre(K)
    size = math.sqrt(square) if C is K else C.norm().item()
    if size <= 1e-13 * whole:  # a constant kernel: what is left is rounding
        return CentredKernel(0.0, None if y is None else (0.0, (y @ y).item()), 0.0, matrix=C)
    labelled = None if y is None else ((y @ (C @ y)).item(), (y @ y).item())
    roughly = cache(partial(rough, C))
    return CentredKernel(frame.finite(size), labelled, lambda: leading(C, centred=True, roughly=roughly()), matrix=C,
                         roughly=roughly)


FEW = 128  # rows of which everything is computed in double precision
TOLD = 1e-3  # of a number: groups whose leaving out changes it by less are not told apart in single precision


def centred_kernel_leaving(whole: CentredKernel, kernel: Float[Tensor, "n v n v"], labels: Labels,
                           groups: int) -> list[CentredKernel]:
    """The same with each group of examples left out, from sums over blocks of the whole kernel: no submatrix is copied. Standard
    errors need few digits: single precision, if it tells the groups apart."""
    targets, example = rows(labels, len(kernel), kernel.shape[1], kernel.device)
    C = whole.matrix
    assert C is not None
    keep = np.not_equal.outer(np.arange(groups), example.cpu().numpy() % groups).astype(np.float64)  # group, row
    Y = sizes = None
    if targets is not None:
        y = targets.cpu().numpy()
        Y = (y - ((keep @ y) / keep.sum(1))[:, None]) * keep
    if len(C) > FEW and whole.roughly is not None and (known := whole.roughly()) is not None:
        sizes = known.scale * _sizes_without_each(known.matrix, keep, Y)
        sizes = sizes if all(np.ptp(size) > TOLD * np.abs(size).max() for size in sizes) else None
    norms, quadratics = _sizes_without_each(C.cpu().numpy(), keep, Y) if sizes is None else sizes
    labelled: list[tuple[float, float] | None] = [None] * groups
    if Y is not None:
        labelled = [*zip(quadratics.tolist(), np.square(Y).sum(1).tolist(), strict=True)]

    @cache
    def tops() -> list[float]:
        known = whole.leading
        return top_of_each(C, keep, known if isinstance(known, Leading) else None)

    return [CentredKernel(norm, labelled[g], lambda g=g: tops()[g]) for g, norm in enumerate(norms.tolist())]  # type: ignore[misc]


def _sizes_without_each(K: NDArray[Any], keep: NDArray[Any], Y: NDArray[Any] | None) -> NDArray[np.float64]:
    """"2 g": |C K C| on each set of rows, and Y^T K Y of its own Y (without labels something that nobody reads)."""
    factors = torch.from_numpy(np.concatenate([1 - keep] if Y is None else [1 - keep, Y]).astype(K.dtype))
    matrix, groups, number = torch.from_numpy(K), len(keep), keep.sum(1)  # in torch's threads: see linalg.product
    products = (factors @ matrix).double().numpy()
    inside, K1 = factors[:groups], products[:groups]  # of one group each
    K1 = (K1.sum(0) - K1) * keep
    squares = without_each((inside @ matrix.square() @ inside.T).double()[None])[0].numpy()
    square = squares - 2 * np.square(K1).sum(1) / number + (K1.sum(1) / number) ** 2
    return np.stack([np.sqrt(np.maximum(square, 0)), number if Y is None else (Y * products[groups:]).sum(1)])
