"""Tangent kernels of the probe's kernel examples, and the sums that measures of alignment read from them.

A kernel is formed where it fits into memory: from captures that the pass over the probe has made already, or by kernels.ntk
(TANGENT_KERNEL). Where it does not fit, the sums are computed block by block, and products with it by J (J^T z) (BLOCKS).
Sketches of kernels of many outputs are in sketches.py and output_sketch.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from richter.core import WHOLE, Remark, show_bytes
from richter.core.values import progress
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
    Reading,
    Simple,
    Stack,
    Statistic,
    Wants,
    audit_bytes,
)
from richter.instrument.statistics.moments import remark_of
from richter.instrument.stream import Chunk, LayerCapture, chunks, fitting, ready, room_for, select
from richter.instrument.subject import Subject
from richter.instrument.survey import Network
from richter.kernels.contract import Form, Job, KernelBlock, KernelPlan, Scratch, Unit, mirror, unit_gradients
from richter.kernels.ntk import full_blocks, kernels
from richter.linalg import EACH, Leading, Rough, anywhere, centre, leading, ritz, rough, top_of_each, without_each

KERNEL = "it has no tangent kernel"

# ------------------------------------------------------------------------------------------------------ kernel examples


@dataclass(frozen=True)
class KernelTargets:
    """Targets "n v" beside a kernel's rows; ``keep`` is False where a row belongs to no real output (padding)."""

    given: Float[Tensor, "n v"] | None  # None: the probe has none
    keep: Tensor | None = None

    @property
    def Y(self) -> Float[Tensor, "n v"]:
        """Labels of the kernel examples; raise ``Missing`` if there are none."""
        if self.given is None:
            raise Missing(NO_LABELS)
        return self.given

    def take(self, rows: Tensor) -> KernelTargets:
        """Targets of some rows."""
        return KernelTargets(None if self.given is None else self.given[rows], None if self.keep is None else self.keep[rows])


@dataclass(eq=False)
class Tangents:
    """The kernel examples of a subject, and how their kernels are computed."""

    subject: Subject
    cotangents: Cotangents
    held: int = 0  # bytes of kernels of all modules that are held meanwhile

    def __post_init__(self) -> None:
        subject = self.subject
        self.whole_gradients: dict[Any, Mapping[str, Tensor]] = {}
        self.rows = subject.kernel_rows
        self.n, self.v = len(self.rows), subject.targets.number(self.cotangents, "kernel")
        self.units = subject.wanted
        self.maps = list(dict.fromkeys(k for u in self.units for k in u.maps))

    @property
    def x(self) -> object:
        """Inputs of the kernel examples."""
        return select(self.subject.x, self.rows)

    def job(self, units: Sequence[Unit], outputs: Form = "full", cotangents: Cotangents | None = None,
            v: int | None = None) -> Job:
        """Kernel computation of some units on the kernel examples."""
        subject, chosen = self.subject, cotangents or self.cotangents
        V = subject.targets.rowwise(chosen, "kernel", among=self.rows)
        network = replace(subject.network, audit=subject.audit and subject.audit.part("kernels"))
        v = v or subject.targets.number(chosen, "kernel")
        return Job(network, units, V, v, outputs, self.n, self.n, chunk=subject.probe.chunk)

    @cached_property
    def by_module(self) -> dict[str, list[Unit]]:
        """Units by the module that owns them."""
        units: dict[str, list[Unit]] = {}
        for u in self.units:
            units.setdefault(u.module, []).append(u)
        return units

    def side_by_side(self, fit: Callable[[list[Unit]], bool], units: Sequence[Unit] | None = None) -> list[list[Unit]]:
        """Units of as many modules at a time as ``fit``."""
        groups: list[list[Unit]] = []
        for module in dict.fromkeys(u.module for u in units or self.units):
            more = [u for u in units or self.units if u.module == module]
            if groups and fit([*groups[-1], *more]):
                groups[-1] += more
            else:
                groups.append(more)
        return groups

    @cached_property
    def _trained(self) -> list[str]:
        """The trained parameters; a shared one belongs to the first module that has it."""
        return [name for name, p in self.subject.model.named_parameters() if p.requires_grad and p.is_floating_point()]

    def parameters(self, units: Sequence[Unit]) -> list[str]:
        """The trained parameters of the units' modules."""
        modules = {u.module for u in units}
        return [name for name in self._trained if name.rpartition(".")[0] in modules]

    @property
    def groups(self) -> dict[str, int]:
        """Number of jackknife groups of the kernel examples."""
        return {"examples": min(self.subject.groups, self.n)}

    # -------------------------------------------------------------------------------------------------------- sizes

    @property
    def audited(self) -> int:
        """Bytes that the audit of captures takes."""
        return audit_bytes(self.subject, self.maps)

    @property
    def memory(self) -> int:
        """Bytes that are left beside the audit and what is held."""
        return max(0, self.subject.memory - self.audited - self.held)

    def bytes(self) -> int:
        """Bytes of one module's kernel and of what is made of it."""
        return (40 + self.subject.itemsize) * (self.n * self.v) ** 2

    def least(self, outputs: Form = "full", v: int | None = None) -> int:
        """The smallest memory in which every module's kernel can be computed, beside the kernel itself."""
        return max((self.job(units, outputs, v=v).least for units in self.by_module.values()), default=0)

    @property
    def fits(self) -> bool:
        """Can the kernel of a module be formed within memory?"""
        return self.bytes() + self.least() <= self.subject.memory

    def kept_bytes(self) -> int:
        """Bytes of the captures of all examples, if they are kept from another pass."""
        maps = self.subject.survey.maps
        return self.n * self.subject.itemsize * sum(self.v * maps[k].width + max(maps[k].unfolded, maps[k].width)
                                                    for k in self.maps)

    def gradient_bytes(self, units: Sequence[Unit]) -> int:
        """Bytes of a gradient in the parameters of the units' modules."""
        return self.subject.itemsize * sum(self.subject.state[p].numel() for p in self.parameters(units))

    @property
    def largest_gradient(self) -> int:
        """Bytes of a gradient in the parameters of the largest module."""
        return max(map(self.gradient_bytes, self.by_module.values()), default=0)

    def parameter_groups(self, vectors: int, units: Sequence[Unit] | None = None) -> list[list[Unit]]:
        """The units of modules whose gradients of so many vectors fit side by side."""
        return self.side_by_side(lambda group: vectors * self.gradient_bytes(group) <= self.subject.memory // 3, units)

    # ------------------------------------------------------------------------------------------------------ kernels

    def turns(self, outputs: Form, v: int) -> list[tuple[list[Unit], int]]:
        """(units of as many modules as have room for their kernels, bytes that are left beside these)."""
        def kernels_bytes(units: Sequence[Unit]) -> int:
            return 8 * self.n ** 2 * (v * v if outputs == "full" else v) * len({u.module for u in units})

        groups = self.side_by_side(lambda units: kernels_bytes(units) + 4 * self.job(units, outputs, v=v).least <= self.memory)
        return [(units, self.memory - kernels_bytes(units)) for units in groups]

    def plans(self, outputs: Form, v: int) -> list[KernelPlan]:
        """The plans of ``anew``; where there is no room, as if there were some for the smallest piece of work."""
        jobs = [(self.job(units, outputs, v=v), room) for units, room in self.turns(outputs, v)]
        return [job.plan(max(room, job.least)) for job, room in jobs]

    def passes(self, outputs: Form, v: int) -> float:
        """Forward-backward passes of the kernel examples; a pair of chunks needs one more than its chunks would."""
        return sum(plan.chunk * (plan.passes + plan.backward) for plan in self.plans(outputs, v)) / 3 / max(1, self.n)

    def anew(self, outputs: Form, cotangents: Cotangents | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (module, kernel), computed for as many modules at a time as have room."""
        v = self.v if cotangents is None else self.subject.targets.number(cotangents, "kernel")
        for units, room in progress(self.turns(outputs, v), title="kernels"):
            yield from kernels(self.job(units, outputs, cotangents), self.x, None, room).items()

    def contract(self, units: Sequence[Unit], captures: Mapping[str, LayerCapture], outputs: Form = "full",
                 cotangents: Cotangents | None = None, n: int | None = None) -> Tensor:
        """The kernel of the units of one module from captures of all examples and cotangents. ``n``: plan as for so many
        examples."""
        job = self.job(units, outputs, cotangents)
        job = job if n is None else replace(job, n=n)
        (module,), device = job.modules, self.subject.device
        shape, dtype = ((job.v, self.n, job.v, self.n), job.network.dtype) if job.outputs == "full" else (
            (job.v, self.n, self.n), torch.float64)
        K = torch.zeros(shape, dtype=dtype, device=device)
        block = KernelBlock(job, {module: K})
        block.add(captures, captures)
        if job.loose:
            whole = self._gradients(job, cotangents or self.cotangents)
            block.add_whole(whole, whole)
        block.close()
        return mirror(K, job.outputs)

    def _gradients(self, job: Job, cotangents: Cotangents) -> Mapping[str, Tensor]:
        """Gradients of the kernel examples in parameters without a map: of all modules at once, where there is room."""
        loose = [u.parameter for u in self.units if not u.maps]
        numbers, room = sum(self.subject.state[name].numel() for name in loose), self.memory // 4
        if self.n * job.v * numbers * self.subject.itemsize > room:
            loose = job.loose
        key = cotangents, tuple(loose)
        if key not in self.whole_gradients:
            at_once = fitting(room, self.subject.itemsize * self.subject.survey.graph, self.n)
            x = to_device(self.x, self.subject.device)
            chunk = Chunk(job.network, x, slice(0, self.n), (), job.cotangents, loose, at_once)
            self.whole_gradients = {key: chunk.gradients}
        return self.whole_gradients[key]

    def labels(self) -> KernelTargets:
        """Targets beside the kernel's rows: the labels themselves, or their combinations through the cotangents."""
        subject = self.subject

        def V() -> Tensor:
            f = subject.outputs(self.x).reshape(self.n, -1)  # cotangents may depend on it
            rows = subject.targets.rowwise(self.cotangents, "kernel", among=self.rows)
            return rows(f, slice(0, self.n)).to(subject.home, torch.float64)

        keep = None if subject.targets.counted is None else subject.targets.counted[self.rows].to(subject.home)
        if subject.targets.Y is None:
            nothing = torch.full((self.n, subject.survey.outputs), math.nan, dtype=torch.float64, device=subject.home)
            return KernelTargets(None, self.cotangents.labels(nothing, keep, V)[1])
        return KernelTargets(*self.cotangents.labels(subject.targets.Y[self.rows].to(subject.home), keep, V))

    def summed(self, parts: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the kernels of modules, then their sum as that of the whole model, if all modules are measured."""
        whole: Tensor | None = None
        for name, K in parts:
            if self.subject.layers is None:
                whole = K.clone() if whole is None else whole.add_(K)
            yield name, K
        if whole is not None:
            yield WHOLE, whole


@dataclass(frozen=True)
class Estimate:
    """A value, and the values with one group left out each: the jackknife makes a standard error of them."""

    value: Any
    leaving: Mapping[str, Sequence[Any]]  # by kind of groups


class Estimates(Simple):
    """Values of all modules and of the whole model, computed together when the first is read."""

    def __init__(self, make: Callable[[], Iterator[tuple[str, Estimate]]], groups: Mapping[str, int], remark: Remark) -> None:
        super().__init__(groups, remark)
        self.make = make

    @cached_property
    def known(self) -> dict[str, Estimate]:
        """Estimates by module, computed once."""
        return dict(self.make())

    def value(self, place: str, without: Group | None = None) -> Any:
        if place not in self.known:
            raise Missing(KERNEL)
        known = self.known[place]
        return known.value if without is None else known.leaving[without[0]][without[1]]

    def leaving(self, place: str, kind: str) -> Sequence[Any]:
        self.value(place)
        return self.known[place].leaving[kind]


# ------------------------------------------------------------------------------------------------------ formed kernels


@dataclass
class KernelCaptures:
    """Captures of the kernel examples, selected from a pass over the probe."""

    rows: Tensor  # their numbers in the probe, in the order of the kernel
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
        kept = self.captures[name]
        for v, g in enumerate(c.g, block.start):
            kept.g[v][into] = g[out_of]
        if h is not None:
            kept.h[into] = h


class Gram(OfKernels):
    """The tangent kernel "n v n v" over the probe's kernel examples, of each module and of the whole model."""

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        if not cotangents.exact:
            return (f"needs the kernel itself, and {cotangents.label(subject.survey.outputs)} give another one: pick at most "
                    f"{MOST['kernel']} outputs with output=, e.g. lambda out: out[:, -1, :64]")
        t = Tangents(subject, cotangents)
        if t.v > MOST["kernel"] and not t.fits:
            return (f"the kernel of {t.v} outputs and {t.n} examples needs memory='{show_bytes(t.bytes() + t.least())}', and "
                    "cannot be estimated here: pick outputs with output=, fewer examples with Probe(kernel_examples=...), or "
                    "give more memory")
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
        self.t, self.kept = t, KernelCaptures(t.rows, t.v)
        self.kernels: Iterator[tuple[str, Tensor]] | None = None
        self.place: str | None = None
        self.K = torch.empty(0)

    def add(self, reading: Reading) -> None:
        for name in self.t.maps:
            self.kept.add(name, reading)

    def _all(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the kernel of each module, then the whole one, in float64."""
        t, captures = self.t, self.kept.captures
        parts = ((module, t.contract(units, captures)) for module, units in t.by_module.items()) if captures else \
            t.anew("full")
        return t.summed((name, K.to(t.subject.home, torch.float64).permute(1, 0, 3, 2)) for name, K in parts)

    def _go_to(self, place: str) -> bool:
        """Advance to the kernel of ``place``; False if it is not among those that follow, and the next call starts again."""
        self.kernels = self._all() if self.kernels is None else self.kernels
        for name, K in self.kernels:
            self.place, self.K = name, K
            if name == place:
                return True
        self.kernels, self.place, self.K = None, None, torch.empty(0)
        return False

    def _vanished(self, place: str) -> bool:
        """Are there captures whose products are all zero? Known where captures were kept."""
        if not self.kept.captures or self.K.diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1).any():  # the largest entries
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
    """Mask of the examples that remain when one group is left out."""
    return torch.arange(n) % min(GROUPS, n) != without[1]


class KernelLabels(OfKernels):
    """The labels of the kernel examples, in the order of a Gram's rows and through the same cotangents."""

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _KernelLabels(Tangents(subject, cotangents))


class _KernelLabels(Simple):
    def __init__(self, t: Tangents) -> None:
        super().__init__(t.groups)
        self.t = t

    @cached_property
    def labels(self) -> KernelTargets:
        """Labels of the kernel examples in the space of the cotangents."""
        return self.t.labels()

    def value(self, place: str, without: Group | None = None) -> KernelTargets:
        return self.labels if without is None else self.labels.take(left(self.t.n, without).to(self.t.subject.home))


TANGENT_KERNEL = Gram("tangent_kernel")
LABELS = KernelLabels("labels")

# ------------------------------------------------------------------------------------------------------ centred kernels

REMAINING = 1e-2  # share of |K|^2: where centring leaves less, the sums lose digits and the centred kernel is formed
FEW = 128  # rows up to which everything is computed in double precision
TOLD = 1e-3  # groups whose removal changes a number by a smaller share are not told apart in single precision


class CentredKernel:
    """Sums over a kernel and its labels after one global centring C = I - 11^T/(n k): ``norm`` |C K C|_F, ``top`` its largest
    eigenvalue, ``quadratic`` y~^T K y~ and ``energy`` |y~|^2. Reading what is not known raises Missing.

    ``top`` is computed when it is read first, because eigenvalues cost more than all the rest and ``tangent_cka`` does not need
    them: by ``find_top``, or from the ``matrix`` C K C. NaN: there is none, because of ``lacking``."""

    top: float
    quadratic: Any
    energy: Any

    def __init__(self, norm: Any, labelled: tuple[Any, Any] | None, find_top: Callable[[], float] | None = None,
                 lacking: str = "", matrix: Float[Tensor, "r r"] | None = None) -> None:
        self.norm, self.find_top, self.lacking = norm, find_top, lacking
        self.matrix = matrix  # of all rows that count, for the values with groups left out
        if labelled is not None:
            self.quadratic, self.energy = labelled

    @cached_property
    def rough(self) -> Rough | None:
        """The centred matrix in single precision."""
        return None if self.matrix is None else rough(self.matrix)

    @cached_property
    def leading(self) -> Leading:
        """The largest eigenvalue of the centred matrix, and vectors from which those with groups left out are computed."""
        assert self.matrix is not None
        with frame.decomposed():
            return leading(self.matrix, centred=True, roughly=self.rough)

    def __getattr__(self, name: str) -> float:
        if name in ("quadratic", "energy"):
            raise Missing(NO_LABELS)
        if name != "top":
            raise AttributeError(f"a CentredKernel has no {name!r}")
        with frame.decomposed():
            top = self.leading.value if self.find_top is None else self.find_top()
        if math.isnan(top):
            raise Missing(self.lacking)
        self.top = top
        return top


def flat(K: Float[Tensor, "n v n v"], labels: KernelTargets) -> tuple[Tensor, Tensor | None, Tensor]:
    """The kernel as a matrix, the labels as a vector, and the example each row belongs to, without padding. Form come
    first, as kernels lie in memory."""
    n, v = K.shape[:2]
    y, example = rows(labels, n, v, K.device)
    K = K.permute(1, 0, 3, 2).reshape(n * v, n * v)
    if labels.keep is not None:
        keep = labels.keep.T.reshape(-1)
        K = K[keep][:, keep]
    return K, y, example


def rows(labels: KernelTargets, n: int, v: int, device: torch.device) -> tuple[Tensor | None, Tensor]:
    """The labels as a vector, and the example each belongs to, without padding."""
    y = None if labels.given is None else labels.given.T.reshape(-1)
    example = torch.arange(n, device=device).repeat(v)
    if labels.keep is None:
        return y, example
    keep = labels.keep.T.reshape(-1)
    return None if y is None else y[keep], example[keep]


def centred_kernel(kernel: Float[Tensor, "n v n v"], labels: KernelTargets) -> CentredKernel:
    """The sums over all rows; a centred copy is made only where they would lose digits."""
    K, y, _ = flat(kernel, labels)
    y = None if y is None else y - y.mean()
    whole, means = K.norm().item(), K.mean(0)
    square = whole ** 2 - 2 * len(K) * (means @ means).item() + (means.sum() ** 2).item()
    C = K if square > REMAINING * whole ** 2 else centre(K)
    size = math.sqrt(square) if C is K else C.norm().item()
    if size <= 1e-13 * whole:  # a constant kernel: the rest is rounding error
        return CentredKernel(0.0, None if y is None else (0.0, (y @ y).item()), lambda: 0.0, matrix=C)
    labelled = None if y is None else ((y @ (C @ y)).item(), (y @ y).item())
    return CentredKernel(frame.finite(size), labelled, matrix=C)


def centred_kernel_leaving(whole: CentredKernel, kernel: Float[Tensor, "n v n v"], labels: KernelTargets,
                           groups: int) -> Stack:
    """The sums with each group of examples left out, from sums over blocks of the whole kernel: no submatrix is copied. Standard
    errors need few digits: they are computed in single precision, if it tells the groups apart."""
    targets, example = rows(labels, len(kernel), kernel.shape[1], kernel.device)
    C = whole.matrix
    assert C is not None
    keep = np.not_equal.outer(np.arange(groups), example.cpu().numpy() % groups).astype(np.float64)  # group, row
    Y = None if targets is None else _centred_labels(targets.cpu().numpy(), keep)
    sizes = None
    if len(C) > FEW and whole.norm and whole.rough is not None:
        sizes = whole.rough.scale * _sizes_without_each(whole.rough.matrix, keep, Y)
        sizes = sizes if all(np.ptp(size) > TOLD * np.abs(size).max() for size in sizes) else None
    norms, quadratics = _sizes_without_each(C.cpu().numpy(), keep, Y) if sizes is None else sizes
    return _without_each(norms, quadratics, Y, lambda: top_of_each(C, keep, whole.leading if whole.norm else None))


def _without_each(norms: NDArray[Any], quadratics: NDArray[Any], Y: NDArray[Any] | None, find_tops: Callable[[], Sequence[float]],
                  lacking: str = "") -> Stack:
    """A CentredKernel for each set of rows; the largest eigenvalues of all are computed when the first is read."""
    tops, energies = cache(find_tops), None if Y is None else np.square(Y).sum(1)

    def take(g: int) -> CentredKernel:
        labelled = None if energies is None else (float(quadratics[g]), float(energies[g]))
        return CentredKernel(float(norms[g]), labelled, lambda: tops()[g], lacking)

    return Stack(CentredKernel(norms, None if energies is None else (quadratics, energies)), len(norms), take)


def _centred_labels(y: NDArray[Any], keep: Float[NDArray, "g r"]) -> NDArray[Any]:
    """Targets minus their mean over each set of rows, zero on the other rows."""
    return (y - ((keep @ y) / keep.sum(1))[:, None]) * keep


def _sizes_without_each(K: NDArray[Any], keep: NDArray[Any], Y: NDArray[Any] | None) -> NDArray[np.float64]:
    """"2 g": |C K C| on each set of rows, and Y^T K Y of its labels Y (without labels something that nobody reads)."""
    factors = torch.from_numpy(np.concatenate([1 - keep] if Y is None else [1 - keep, Y]).astype(K.dtype))
    matrix, groups = torch.from_numpy(K), len(keep)  # in torch's threads: see linalg.product
    products = (factors @ matrix).double().numpy()
    inside = factors[:groups]
    norms = _centred_norms((inside @ matrix.square() @ inside.T).double(), products[:groups], keep)
    return np.stack([norms, keep.sum(1) if Y is None else (Y * products[groups:]).sum(1)])


def _centred_norms(squares: Float[Tensor, "g g"], K1: Float[NDArray, "g r"], keep: Float[NDArray, "g r"]) -> NDArray[np.float64]:
    """|C K C| on each set of rows, from sums of squares over blocks and the sums of columns over the rows of each group."""
    number, K1 = keep.sum(1), (K1.sum(0) - K1) * keep
    square = without_each(squares[None])[0].numpy() - 2 * np.square(K1).sum(1) / number + (K1.sum(1) / number) ** 2
    return np.sqrt(np.maximum(square, 0))


# ------------------------------------------------------------------------------------------ kernels that are not formed


class Pull:
    """J^T Z of one unit, added up output by output, and then J (J^T Z). A matrix that is read at one position needs no
    per-example gradients: J^T z of a chunk is the product of sum_c z_c g_c with what it read."""

    def __init__(self, network: Network, unit: Unit) -> None:
        self.network, self.unit, self.room = network, unit, Scratch()
        info = network.survey.maps[unit.maps[0]] if unit.maps and not unit.parameter else None
        self.factored = info is not None and info.kind == "dense" and info.positions == 1
        self.B: Tensor | None = None  # J^T Z "q p"
        self.signal: Tensor | None = None  # sum_c z_c g_c of a chunk, "q n o"
        self.h = torch.empty(0)  # what it read, and 1 for a bias, "n i"
        self.moved: Tensor | None = None  # h B^T of a chunk, "q n o"

    def _read(self, c: LayerCapture) -> Tensor:
        """Inputs of a map as rows, with a column of ones for the bias."""
        ones = [c.h.new_ones(len(c.h), 1)] if self.unit.bias else []
        return torch.cat([c.h[:, 0], *ones] if self.unit.weight else ones, 1)

    def add(self, z: Float[Tensor, "q n"], captures: Mapping[str, LayerCapture], whole: Mapping[str, Tensor],
            output: int) -> None:
        if self.factored:
            c = captures[self.unit.maps[0]]
            self.h = self._read(c) if self.signal is None else self.h
            part = z[:, :, None] * c.g[0, :, 0]
            self.signal = part if self.signal is None else self.signal.add_(part)
        else:
            tiles = unit_gradients(self.network, self.unit, captures, whole, output, self.room)
            self._add(torch.cat([z @ A for A in tiles], 1))

    def _add(self, B: Tensor) -> None:
        """Add to the sum over chunks."""
        self.B = B if self.B is None else self.B.add_(B)

    def push(self, captures: Mapping[str, LayerCapture], whole: Mapping[str, Tensor], output: int) -> Float[Tensor, "q n"]:
        """Product J B of the Jacobian of one output with the pulled vectors, for a chunk."""
        assert self.B is not None
        if self.factored:
            c = captures[self.unit.maps[0]]
            if self.moved is None:
                self.moved = torch.matmul(self._read(c), self.B.view(len(self.B), c.g.shape[3], -1).mT)
            return (self.moved * c.g[0, :, 0]).sum(2)
        start, pushed = 0, self.B.new_zeros(())
        for A in unit_gradients(self.network, self.unit, captures, whole, output, self.room):
            pushed = pushed + self.B[:, start:start + A.shape[1]] @ A.T
            start += A.shape[1]
        return pushed

    def end_of_chunk(self) -> None:
        """Multiply the signals of the chunk by its inputs, and add them to the sum."""
        if self.signal is not None:
            self._add(torch.matmul(self.signal.mT, self.h).flatten(1))
        self.signal = self.moved = None


def products(t: Tangents, units: Sequence[Unit], Z: Float[Tensor, "q n v"]) -> Float[Tensor, "q n v"]:
    """K Z = J (J^T Z) with the kernel of these units: over the examples twice, output by output, holding one chunk; for as many
    vectors at a time as have room for their gradients."""
    third, each = t.subject.memory // 3, max(1, 2 * t.largest_gradient)
    return torch.cat([_products(t, units, some, third) for some in Z.split(max(1, third // each))])


def _products(t: Tangents, units: Sequence[Unit], Z: Float[Tensor, "q n v"], room: int) -> Float[Tensor, "q n v"]:
    """Products of the kernel with some vectors, K Z, by pulling them back to the weights and pushing forward."""
    subject, KZ = t.subject, torch.zeros(Z.shape, dtype=torch.float64, device=t.subject.home)
    for some in t.parameter_groups(2 * len(Z), units):
        job = replace(t.job(some, "trace"), same=False)
        pulls, z = [Pull(job.network, u) for u in some], Z.to(subject.device, job.network.dtype)
        signals = 2 * len(Z) * subject.itemsize * sum(subject.survey.maps[k].width for k in job.maps)
        size = min(job.plan(max(room, job.least)).chunk, max(1, room // max(1, signals)))
        for back in (False, True):
            for chunk in chunks(job.network, t.x, size, maps=job.maps, cotangents=job.cotangents, parameters=job.loose,
                                title="kernels"):
                for c in range(t.v):
                    captures = chunk.captures(slice(c, c + 1))
                    for pull in pulls:
                        if back:
                            KZ[:, chunk.rows, c] += pull.push(captures, chunk.gradients, c).to(KZ)
                        else:
                            pull.add(z[:, chunk.rows, c], captures, chunk.gradients, c)
                for pull in pulls:
                    pull.end_of_chunk()
    return KZ


STEPS, LATER = 60, 20  # at most so many products for a largest eigenvalue, and for those with groups left out
TOP_VECTORS = 6  # of the whole kernel, from which those with groups left out are computed
UNRESOLVED = ("the largest eigenvalue of so large a kernel was not resolved: fewer examples (Probe(kernel_examples=...)) "
              "give it exactly")


class BlockSums(OfKernels):
    """The sums of a kernel that does not fit into memory: exact, from its blocks; its largest eigenvalue by products."""

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        t = Tangents(subject, cotangents)
        job, room, held = _block_job(t)
        plan, each = job.plan(room), 2 * (1 + t.v) / 3 * t.n  # of a product; without those for eigenvalues
        passes = len(job.modules) * each + plan.chunk * (plan.passes + plan.backward) / 3
        vectors = 16 * t.n * t.v * max(STEPS, t.groups["examples"] * (TOP_VECTORS + LATER))  # see ritz
        return Wants(alone=t.audited + held + max(2 * job.least, 2 * _block_bytes(job), 6 * t.largest_gradient + vectors),
                     what=f"blocks of the kernels of {t.n} examples and {t.v} outputs", passes=passes / subject.probe.n)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        t = Tangents(subject, cotangents)
        return Estimates(lambda: _BlockSums(t).estimates(), t.groups, Remark())


BLOCKS = BlockSums("blocks_of_the_kernel")


def _block_job(t: Tangents) -> tuple[Job, int, int]:
    """The job that computes blocks of all modules' kernels, the memory for its passes, and the bytes that are held meanwhile."""
    job, sets = t.job(t.units), t.groups["examples"] + 1
    held = 8 * t.n * t.v * (4 * sets + (len(job.modules) + 1) * (sets + 1))
    room = max(job.least, (t.memory - held) // 2)
    return replace(job, chunk=max(1, min(t.subject.probe.chunk, math.isqrt(room // _block_bytes(job))))), room, held


def _block_bytes(job: Job) -> int:
    """Bytes of the block of a pair of examples, of all modules, and of what is made of the rows of one output."""
    return len(job.modules) * job.network.dtype.itemsize * job.v ** 2 + 40 * job.v


class _BlockSums:
    """Sums over the blocks of the kernels of all modules, for all rows and with each group of examples left out. Rows "v n" of
    padding are in no set."""

    def __init__(self, t: Tangents) -> None:
        self.t, labels, (n, v), home = t, t.labels(), (t.n, t.v), t.subject.home
        y, example = rows(replace(labels, keep=None), n, v, torch.device("cpu"))
        self.mask = np.ones(n * v) if labels.keep is None else labels.keep.T.reshape(-1).cpu().numpy().astype(np.float64)
        groups = np.arange(t.groups["examples"] if t.subject.errors else 0)
        others = np.not_equal.outer(groups, example.numpy() % max(1, len(groups)))
        self.sets = self.mask * np.concatenate([np.ones((1, n * v)), others])
        self.Y = None if y is None else _centred_labels(np.where(self.mask > 0, y.cpu().numpy(), 0.0), self.sets)
        self.inside = torch.from_numpy(self.mask - self.sets).view(-1, v, n).to(home)
        self.y = None if self.Y is None else torch.from_numpy(self.Y).view(-1, v, n).to(home)
        names = [*t.by_module, *([WHOLE] if t.subject.layers is None else [])]
        sizes = ((len(self.sets), len(self.sets)), (len(self.sets),), self.inside.shape)
        self.squares, self.quadratics, self.columns = (
            {name: torch.zeros(size, dtype=torch.float64, device=home) for name in names} for size in sizes)

    def estimates(self) -> Iterator[tuple[str, Estimate]]:
        t, number = self.t, self.mask.sum()
        ones = torch.from_numpy(self.mask).view(1, t.v, t.n).mT
        means = dict(t.summed((name, products(t, units, ones)[0].T / number) for name, units in t.by_module.items()))  # "v n"
        job, room, _ = _block_job(t)
        for rows, columns, blocks in full_blocks(job, t.x, room):
            for c in range(t.v):  # smaller arrays are quicker
                for name, K in t.summed((name, K[c].flatten(1).to(means[name])) for name, K in blocks.items()):
                    a = means[name]  # without them, the sums would lose digits
                    self._add(name, c, rows, columns, K - a[c, rows, None] - a[:, columns].reshape(-1) + a.sum() / number)
        for name, a in means.items():
            norms = _centred_norms(self.squares[name].cpu(), self.columns[name].flatten(1).cpu().numpy(), self.sets)
            scale = a.abs().max().item()
            frame.in_range(torch.tensor([norms[0] / number, scale]), t.subject)
            find_tops: Callable[[], Sequence[float]] = partial(self._tops, name)
            if norms[0] <= 1e-13 * number * scale:  # a constant kernel: the rest is rounding error
                norms, self.quadratics[name][:], find_tops = np.zeros(len(norms)), 0.0, lambda: [0.0] * len(self.sets)
            whole, *fewer = _without_each(norms, self.quadratics[name].cpu().numpy(), self.Y, find_tops, UNRESOLVED)
            yield name, Estimate(whole, {"examples": fewer})

    def _add(self, name: str, c: int, rows: slice, columns: slice, K: Float[Tensor, "a b"]) -> None:
        """Add the rows of output c of a centred block, and their transpose if the block is not on the diagonal."""
        left, right, twice = self.inside[:, c, rows], self.inside[:, :, columns].flatten(1), rows != columns
        squares = left @ K.square() @ right.T
        self.squares[name] += squares + squares.T if twice else squares
        self.columns[name][:, :, columns] += (left @ K).view(len(left), -1, columns.stop - columns.start)
        if twice:
            self.columns[name][:, c, rows] += right @ K.T
        if self.y is not None:
            self.quadratics[name] += (2 if twice else 1) * ((self.y[:, c, rows] @ K) * self.y[:, :, columns].flatten(1)).sum(1)

    def _tops(self, name: str) -> list[float]:
        """The largest eigenvalue on each set of rows; NaN where it is not resolved."""
        t, units = self.t, self.t.by_module.get(name, self.t.units)

        def times(X: Float[NDArray, "g p r"]) -> Float[NDArray, "g p r"]:
            Z = torch.from_numpy(X).view(-1, t.v, t.n).mT
            return products(t, units, Z).mT.reshape(X.shape).cpu().numpy()

        start = anywhere(len(self.mask), torch.empty(0, dtype=torch.float64)).numpy()[None, None]
        digits = 1e-6 if t.subject.network.dtype == torch.float32 else 1e-10
        whole = ritz(times, self.sets[:1], start, steps=STEPS, tolerance=digits, kept=TOP_VECTORS)
        if not whole.close or len(self.sets) == 1:
            return [whole.values[0] if whole.close else math.nan] * len(self.sets)
        return [*whole.values, *ritz(times, self.sets[1:], whole.vectors, steps=LATER, each=EACH / 10).values]
