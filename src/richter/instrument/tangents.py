"""Tangent kernels of a probe's kernel examples, for measures: from captures that the moments have already made, or by
kernels.ntk; each output's own kernels, of all outputs or of some. What is too large to be formed is in estimates.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from richter.core import WHOLE
from richter.instrument.capture import forward, to_device
from richter.instrument.captures import select
from richter.instrument.cotangents import Cotangents, RandomOutputs, every_output
from richter.instrument.moments import GROUPS, Kept
from richter.instrument.subject import Subject
from richter.kernels.contract import Outputs, mirror, steps
from richter.kernels.ntk import Block, Chunk, Job, kernels
from richter.kernels.planning import Unit, least
from richter.measures.alignment import CentredKernel, Labels, SameOutput, of_diagonal, of_diagonal_leaving

SAMPLED = 8  # outputs whose own kernels are looked at when there are too many
SMALL = 2 ** 26  # bytes: kernels below this size are never estimated


@dataclass(frozen=True)
class Estimate:
    """A statistic, and the same with parts of what it rests on left out: the jackknife makes a standard error of them."""

    value: CentredKernel | SameOutput
    leaving: Sequence[CentredKernel | SameOutput] = ()
    said: str = ""
    lacking: str = ""  # why a measure of it may have no number


@dataclass(eq=False)
class Tangents:
    """The kernel examples of a subject, and the questions that can be asked of their kernels."""

    of: Subject
    chosen: Cotangents
    rows: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.of.probe.kernel_rows()
        self.n, self.v = len(self.rows), self.of.number(self.chosen)

    @property
    def x(self) -> object:
        return select(self.of.x, self.rows)

    def job(self, units: Sequence[Unit], outputs: Outputs = "full", chosen: Cotangents | None = None) -> Job:
        of = self.of
        V = of.rowwise(chosen or self.chosen, among=self.rows)
        return Job(of.model, of.state, of.found, units, V, of.output, outputs)

    def by_module(self) -> dict[str, list[Unit]]:
        found: dict[str, list[Unit]] = {}
        for u in self.of.wanted:
            found.setdefault(u.module, []).append(u)
        return found

    # -------------------------------------------------------------------------------------------------------- exact

    def bytes(self) -> int:
        """Of one module's kernel and of what is made of it."""
        return (32 + self.of.itemsize) * (self.n * self.v) ** 2

    def least(self) -> int:
        """The smallest memory in which every module's kernel can be had exactly."""
        return self.bytes() + max((least(self.of.found, units, self.of.state, self.v, "full", self.of.itemsize)
                                   for units in self.by_module().values()), default=0)

    def least_single(self) -> int:
        """The smallest memory for the kernels of single outputs: all of them, or those that are drawn."""
        v = SAMPLED if isinstance(self.chosen, RandomOutputs) else self.v
        return 8 * v * self.n ** 2 + max((least(self.of.found, units, self.of.state, v, "diagonal", self.of.itemsize)
                                          for units in self.by_module().values()), default=0)

    def exact(self, kept: Kept | None = None) -> Iterator[tuple[str, Tensor]]:
        """(module, K "n v n v" in float64), from captures that are there or made for the purpose; the whole model last."""
        whole: Tensor | None = None
        for name, K in self._from(kept) if kept is not None else self._anew("full"):
            K = K.to(self.of.home, torch.float64).permute(1, 0, 3, 2)
            if self.of.layers is None:
                whole = K.clone() if whole is None else whole.add_(K)
            yield name, K
        if whole is not None:
            yield WHOLE, whole

    def _from(self, kept: Kept) -> Iterator[tuple[str, Tensor]]:
        for module, units in self.by_module().items():
            job = self.job(units)
            K = torch.zeros(self.v, self.n, self.v, self.n, dtype=job.dtype, device=self.of.device)
            block = Block(job, {module: K}, self.v)
            block.add(kept.captures, kept.captures)
            if job.loose:
                J = Chunk(self.job([u for u in units if not u.maps]), to_device(self.x, self.of.device), slice(0, self.n)).begin()
                block.add_whole(J.whole, J.whole)
            block.close()
            yield module, mirror(K, "full")

    def _anew(self, outputs: Outputs, chosen: Cotangents | None = None) -> Iterator[tuple[str, Tensor]]:
        """Parts of as many modules at a time as have room for their kernels."""
        v = self.v if chosen is None else self.of.number(chosen)
        of = self.of
        each = 8 * self.n ** 2 * (v * v if outputs == "full" else v)
        groups: list[list[Unit]] = []
        held = 0
        for units in self.by_module().values():
            together = [*groups[-1], *units] if groups else []
            if groups and held + each + 4 * least(of.found, together, of.state, v, outputs, of.itemsize) <= of.memory:
                groups[-1] += units
                held += each
            else:
                groups.append(list(units))
                held = each
        for units in tqdm(groups, desc="kernels", delay=2, leave=False, disable=None):
            job = self.job(units, outputs, chosen)
            yield from kernels(job, self.x, None, of.memory - each * len(job.modules), True, of.probe.chunk).items()

    def targets(self) -> Tensor:
        """Labels "n k" of every output; NaN when the probe has none."""
        of = self.of
        Y = torch.full((self.n, of.found.outputs), math.nan, dtype=torch.float64) if of.Y is None else of.Y[self.rows]
        return Y.to(of.home)

    def labels(self) -> Labels:
        """Targets beside the kernel's rows: the labels themselves, or the same combinations of them."""
        of, k = self.of, self.of.found.outputs
        Y = self.targets()
        if self.chosen is every_output:
            return Labels(Y, None if of.counted is None else of.counted[self.rows].to(of.home))
        f = torch.cat([forward(of.model, to_device(select(self.x, r), of.device), of.state, output=of.output, record=False,
                               seed=r.start).f.detach().reshape(r.stop - r.start, k)
                       for r in steps(self.n, 1 if of.found.drawn else of.probe.chunk)])  # cotangents may depend on it
        V = of.rowwise(self.chosen, among=self.rows)(f, slice(0, self.n)).to(of.home, torch.float64)
        return Labels(torch.einsum("vnk,nk->nv", V, Y))

    # ----------------------------------------------------------------------------------- what estimates are made of

    def centred(self, z: Tensor) -> Tensor:
        """z - mean over the outputs that count, zero at the others."""
        counted = self.of.counted
        if counted is None:
            return z - z.mean()
        keep = counted[self.rows].to(z)
        return (z - (z * keep).sum() / keep.sum()) * keep

    def all_centred(self, Z: Tensor) -> Tensor:
        return torch.stack([self.centred(z) for z in Z])

    def parameter_groups(self, vectors: int) -> Iterator[list[Unit]]:
        """Modules whose gradients of so many vectors fit side by side."""
        of = self.of
        group: list[Unit] = []
        held = 0
        for units in self.by_module().values():
            size = vectors * of.itemsize * sum(of.state[p].numel() for p in self.parameters(units))
            if group and held + size > of.memory // 3:
                yield group
                group, held = [], 0
            group, held = [*group, *units], held + size
        if group:
            yield group

    def parameters(self, units: Sequence[Unit]) -> list[str]:
        """A shared one belongs to the first module that has it."""
        modules = {u.module for u in units}
        return [name for name, p in self.of.model.named_parameters()
                if p.requires_grad and p.is_floating_point() and name.rpartition(".")[0] in modules]

    # --------------------------------------------------------------------------------------------- one output at a time

    def same_output(self, sample: bool) -> Iterator[tuple[str, Estimate]]:
        """Each output's own kernels: of all outputs, or of some drawn from those that have labels."""
        of, k, said = self.of, self.of.found.outputs, ""
        Y, chosen = self.targets(), self.chosen
        picked = torch.arange(k)
        if sample:
            known = torch.arange(k) if of.Y is None else (Y != 0).any(0).nonzero().flatten().cpu()
            draw = torch.Generator().manual_seed(0)
            picked = known[torch.randperm(len(known), generator=draw)[:SAMPLED]].sort().values
            said = f"{len(picked)} outputs drawn of {len(known)} that have labels" if len(picked) < len(known) else ""
            chosen = _single(picked)
        if not len(picked):
            return
        Y = Y[:, picked.to(Y.device)]
        total: Tensor | None = None
        for name, K in self._anew("diagonal", chosen):
            if of.layers is None:
                total = K.clone() if total is None else total.add_(K)
            yield name, self._same(K, Y, said)
        if total is not None:
            yield WHOLE, self._same(total, Y, said)

    def _same(self, K: Tensor, Y: Tensor, said: str) -> Estimate:
        value = of_diagonal(K, Y)
        if not said:
            return Estimate(value, of_diagonal_leaving(K, Y, min(GROUPS, self.n)), said)
        parts = (value.quadratic, value.norm, value.energy)
        rest = [torch.arange(len(K), device=K.device) != i for i in range(len(K))]
        return Estimate(value, [SameOutput(*(t[r] for t in parts)) for r in rest], said)


def _single(picked: Tensor) -> Cotangents:
    """These outputs, each by itself."""
    def chosen(f: Tensor, y: Tensor | None = None) -> Tensor:
        V = torch.zeros(len(picked), f.shape[1], dtype=f.dtype, device=f.device)
        V[torch.arange(len(picked)), picked.to(f.device)] = 1
        return V[:, None].expand(-1, len(f), -1)
    return chosen
