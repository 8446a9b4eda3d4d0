"""Tangent kernels of a probe, for measures: exact where they fit, and estimates with a standard error where they do not.

* exact: K "n v n v" of each module, from captures that the moments have already made, or by kernels.ntk;
* many outputs: y~^T K y~ is one backward pass for all layers at once, and |C K C|_F^2 is the mean of (z^T K z')^2 over
  independent random vectors z != z' of all examples and outputs, which is unbiased;
* many examples: products of C K C with a few vectors, without K: the norm by Hutch++, the largest eigenvalue on the same
  subspace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from richter.capture import forward, to_device
from richter.core import WHOLE, MemoryBudgetError, show_bytes
from richter.cotangents import Cotangents, RandomOutputs, every_output
from richter.kernels.contract import Outputs, bias_gradients, gradient_tiles, mirror, steps
from richter.kernels.ntk import Block, Chunk, Job, kernels, shared_gradients
from richter.kernels.planning import Unit, least, make_plan
from richter.layercapture import LayerCapture, check_finite, select
from richter.measures.alignment import CentredKernel, Labels, SameOutput, of_diagonal, of_diagonal_leaving
from richter.moments import GROUPS, Kept
from richter.subject import Subject

SKETCHED, CORRECTING = 32, 16  # vectors that make the approximation, and that estimate what it lacks
SAMPLED = 8  # outputs whose own kernels are looked at when there are too many
UNRESOLVED = 0.03  # a largest eigenvalue is not reported when its vector is further than this from being one
SMALL = 2 ** 26  # bytes: kernels below this size are never estimated


@dataclass(frozen=True)
class Estimate:
    """A statistic, and the same with parts of what it rests on left out: the jackknife makes a standard error of them."""

    value: CentredKernel | SameOutput
    leaving: Sequence[CentredKernel | SameOutput] = ()
    said: str = ""
    lacking: str = ""  # why a measure of it may have no number


NO_TOP = ("needs the largest eigenvalue of the kernel of all outputs, which no sketch of so many gives: pick at most 64 outputs "
          "with output=, e.g. lambda out: out[:, -1, :64]")
UNRESOLVED_TOP = ("the largest eigenvalue of so large a kernel was not resolved: fewer examples (Probe(kernel=...)) give it "
                  "exactly")


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

    def labels(self) -> Labels:
        """Targets beside the kernel's rows: the labels themselves, or the same combinations of them."""
        of, k = self.of, self.of.found.outputs
        unknown = torch.full((self.n, k), math.nan, dtype=torch.float64)
        Y, keep = unknown if of.Y is None else of.Y[self.rows], None if of.counted is None else of.counted[self.rows]
        if self.chosen is every_output:
            return Labels(Y.to(of.home), None if keep is None else keep.to(of.home))
        V = self.chosen(torch.zeros(self.n, k, dtype=torch.float64), None if of.Y is None else Y)
        return Labels(torch.einsum("vnk,nk->nv", V.to(Y), Y).to(of.home))

    # --------------------------------------------------------------------------------------------- one output at a time

    def same_output(self, sample: bool) -> Iterator[tuple[str, Estimate]]:
        """Each output's own kernels: of all outputs, or of some drawn from those that have labels."""
        of, k, said = self.of, self.of.found.outputs, ""
        Y = self.labels().Y if self.chosen is every_output or of.Y is None else of.Y[self.rows].to(of.home)
        chosen = self.chosen
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
            yield name, self._same(K, Y, sample, said)
        if total is not None:
            yield WHOLE, self._same(total, Y, sample, said)

    def _same(self, K: Tensor, Y: Tensor, sample: bool, said: str) -> Estimate:
        value = of_diagonal(K, Y)
        if not said:
            return Estimate(value, of_diagonal_leaving(K, Y, min(GROUPS, self.n)), said)
        parts = (value.quadratic, value.norm, value.energy)
        rest = [torch.arange(len(K), device=K.device) != i for i in range(len(K))]
        return Estimate(value, [SameOutput(*(t[r] for t in parts)) for r in rest], said)

    # ------------------------------------------------------------------------------------------------- many outputs

    def sketch(self, random: RandomOutputs) -> Iterator[tuple[str, Estimate]]:
        """Of |C K C|_F, from random vectors of all examples and outputs; y~^T K y~ exactly."""
        of, k, q = self.of, self.of.found.outputs, max(4, random.v // 2)
        need = self.n * k * q
        if need > max(of.memory, SMALL):
            raise MemoryBudgetError(f"memory={show_bytes(of.memory)} cannot hold {q} random vectors of {k:,} outputs for "
                                    f"{self.n} examples. The smallest that works here is memory='{show_bytes(need)}'; pick fewer "
                                    f"outputs, e.g. those of the last token: output=lambda out: out.logits[:, -1].")
        Z = random.signs(self.rows.tolist(), k, range(q))
        y = None if of.Y is None else of.Y[self.rows]
        said = f"{random.v} random outputs of {k}"
        gram: dict[str, Tensor] = {}
        quadratic: dict[str, float] = {}
        energy = math.nan if y is None else self._centred(y).square().sum().item()
        for units in self._parameter_groups(q + 1):
            for module, B in self._pulled(units, Z, y).items():
                T = (B @ B.T).double()
                gram[module], quadratic[module] = T[:q, :q], T[-1, -1].item() if y is not None else math.nan
        if of.layers is None and gram:
            gram[WHOLE] = torch.stack(list(gram.values())).sum(0)
            quadratic[WHOLE] = sum(quadratic.values())
        group = torch.arange(q) % min(GROUPS, q)
        for name, T in gram.items():
            def found(keep: Tensor, T: Tensor = T, name: str = name) -> CentredKernel:
                return CentredKernel(quadratic[name], _off_diagonal(T[keep][:, keep]) ** 0.5, math.nan, energy)
            leaving = [found(group != g) for g in range(int(group.max()) + 1)]
            yield name, Estimate(found(group >= 0), leaving, said, NO_TOP)

    def _centred(self, z: Tensor) -> Tensor:
        """z - mean over the outputs that count, zero at the others."""
        counted = self.of.counted
        if counted is None:
            return z - z.mean()
        keep = counted[self.rows].to(z)
        return (z - (z * keep).sum() / keep.sum()) * keep

    def _all_centred(self, Z: Tensor) -> Tensor:
        return torch.stack([self._centred(z) for z in Z])

    def _parameter_groups(self, vectors: int) -> Iterator[list[Unit]]:
        """Modules whose gradients of so many vectors fit side by side."""
        of = self.of
        group: list[Unit] = []
        held = 0
        for units in self.by_module().values():
            size = vectors * of.itemsize * sum(of.state[p].numel() for p in self._parameters(units))
            if group and held + size > of.memory // 3:
                yield group
                group, held = [], 0
            group, held = [*group, *units], held + size
        if group:
            yield group

    def _parameters(self, units: Sequence[Unit]) -> list[str]:
        modules = {u.module for u in units}
        shared: set[int] = set()
        names = []
        for name, p in self.of.model.named_parameters():  # a shared one belongs to the first module that has it
            if p.requires_grad and p.is_floating_point() and name.rpartition(".")[0] in modules and id(p) not in shared:
                names.append(name)
            shared.add(id(p))
        return names

    def _pulled(self, units: Sequence[Unit], Z: Tensor, y: Tensor | None) -> dict[str, Tensor]:
        """J^T z~ of each module for every vector (and for the labels, last): plain gradients, "v p"."""
        of, names = self.of, self._parameters(units)
        places = [of.state[k] for k in names]
        dtype = self.job(units).dtype
        B = [torch.zeros(len(Z) + 1, t.numel(), dtype=dtype, device=of.device) for t in places]
        fits = of.memory // 3 // (of.itemsize * 2 * of.found.graph + 1)
        chunk = 1 if of.found.drawn else max(1, min(of.probe.chunk, self.n, fits))
        targets = None if y is None else self._centred(y)
        bar = tqdm(total=math.ceil(self.n / chunk) * (len(Z) + 1), desc="kernels", delay=2, leave=False, disable=None)
        for r in steps(self.n, chunk):
            x = to_device(select(self.x, r), of.device)
            with of.timed(r.stop - r.start):
                seen = forward(of.model, x, of.state, output=of.output, record=False, seed=r.start)
            check_finite(seen.f)
            for v in range(len(Z) + (targets is not None)):
                z = targets if v == len(Z) else self._centred(Z[v].double())
                assert z is not None
                for total, d in zip(B, seen.backward(z[r].to(seen.f.device), places)[1], strict=True):
                    total[v] += d.reshape(-1)
                bar.update()
        bar.close()
        found: dict[str, list[Tensor]] = {}
        for name, b in zip(names, B, strict=True):
            found.setdefault(name.rpartition(".")[0], []).append(b)
        return {module: torch.cat(parts, 1) for module, parts in found.items()}

    # ------------------------------------------------------------------------------------------------ many examples

    def operations(self) -> tuple[float, float]:
        """(of the exact kernel, of its estimate)"""
        of = self.of
        q = SKETCHED + 2 * (SKETCHED + CORRECTING)
        exact = make_plan(of.found, of.wanted, of.state, self.n, self.n, self.v, "full", of.itemsize, 2 ** 62).operations
        maps = [of.found.maps[k] for u in of.wanted for k in u.maps]
        through = 2 * self.n * (1 + self.v) * sum(m.width * m.shape[-1] for m in of.found.maps.values() if m.kind == "dense")
        own = sum(2 * self.n * (m.width * m.shape[-1] * self.v + self.v * q * m.index.numel() if m.unfolded or
                                m.width > m.shape[0] else q * m.index.numel()) for m in maps)
        return exact, 4 * through + 2 * own

    def free(self) -> Iterator[tuple[str, Estimate]]:
        """|C K C|_F and its largest eigenvalue without K, y~^T K y~ exactly. Twice K~ times some vectors: the first products
        span where most of K~ acts, the second are exact there and sampled in what is left (Hutch++ for the trace of K~^2)."""
        of = self.of
        y = self._centred(of.Y[self.rows]) if of.Y is not None else torch.full((self.n, self.v), math.nan, dtype=torch.float64)
        energy = y.square().sum().item()
        draw = torch.Generator().manual_seed(0)
        first, second = (self._all_centred(torch.randn(q, self.n, self.v, generator=draw, dtype=torch.float64))
                         for q in (SKETCHED, CORRECTING))
        said = f"estimated by products with the kernel of {self.n} examples, which is not formed"
        names = [*self.by_module(), *([WHOLE] if of.layers is None else [])]
        start = dict.fromkeys(names, torch.cat([first, torch.nan_to_num(y)[None]]))
        once, quadratic = self._products(start, len(first))
        spans = {name: torch.linalg.qr(Y.flatten(1).T)[0].T for name, Y in once.items()}  # orthonormal rows
        outside = {name: second.flatten(1) - (second.flatten(1) @ Q.T) @ Q for name, Q in spans.items()}
        again = {name: self._all_centred(torch.cat([Q, outside[name]]).view(-1, self.n, self.v)) for name, Q in spans.items()}
        twice, _ = self._products(again, len(again[names[0]]))
        for name in names:
            known = quadratic[name] if math.isfinite(energy) else math.nan
            yield name, _hutch(spans[name], twice[name].flatten(1), known, energy, said)

    def _products(self, Z: Mapping[str, Tensor], used: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """({name: C K Z "q n v"} of the first ``used`` vectors of each module and of the whole, {name: |J^T z|^2} of the
        last): over the examples once for J^T Z and once for J (J^T Z), with nothing but a chunk held."""
        of, whole = self.of, Z.get(WHOLE)
        products = {name: torch.zeros(used, self.n, self.v, dtype=torch.float64, device=of.home) for name in Z}
        squares = dict.fromkeys(Z, 0.0)
        vectors = max(len(z) for z in Z.values()) * (2 if whole is not None else 1)
        for units in self._parameter_groups(2 * vectors):
            job = self.job(units, "trace")
            mine = {name: Z[name] if whole is None else torch.cat([Z[name], whole]) for name in job.modules}
            pulls = {u: Pull(u, job, mine[u.module].to(of.device, job.dtype)) for u in units}
            plan = make_plan(of.found, units, of.state, self.n, self.n, self.v, "trace", of.itemsize, of.memory // 3, same=False,
                             chunk=of.probe.chunk)
            bar = tqdm(total=2 * math.ceil(self.n / plan.chunk), desc="kernels", delay=2, leave=False, disable=None)
            for back in (False, True):
                for r in steps(self.n, plan.chunk):
                    chunk = Chunk(job, to_device(select(self.x, r), of.device), r).begin()
                    for c in range(self.v):
                        asked = chunk.asked(slice(c, c + 1))
                        for u, pull in pulls.items():
                            if not back:
                                pull.add(asked, chunk.whole, r, c)
                                continue
                            found = pull.push(asked, chunk.whole, c).to(of.home, torch.float64)
                            products[u.module][:, r, c] += found[:used]
                            if whole is not None:
                                products[WHOLE][:, r, c] += found[len(whole):len(whole) + used]
                    for pull in pulls.values():
                        pull.end_of_chunk()
                    bar.update()
            bar.close()
            for u, pull in pulls.items():
                squares[u.module] += pull.square()
        if whole is not None:
            squares[WHOLE] = sum(v for name, v in squares.items() if name != WHOLE)
        return {name: self._all_centred(P.cpu()) for name, P in products.items()}, squares


def _hutch(Q: Tensor, Y: Tensor, quadratic: float, energy: float, said: str) -> Estimate:
    """From orthonormal rows Q and Y = K [Q; z - Q Q^T z]: |K|_F^2 = |K Q|^2 + E |K (z - Q Q^T z)|^2, and the largest
    eigenvalue that K has on the span of Q, which is at most that of K."""
    inside, beyond = Y[:len(Q)], Y[len(Q):].square().sum(1)
    T = Q @ inside.T
    values, vectors = torch.linalg.eigh((T + T.T) / 2)
    top, u = values[-1].item(), vectors[:, -1]
    off = (u @ inside - top * (u @ Q)).norm().item()  # |K u - top u|: how far it is from being an eigenvector
    top = top if off <= UNRESOLVED * top else math.nan
    group = torch.arange(len(beyond)) % GROUPS

    def found(keep: Tensor) -> CentredKernel:
        return CentredKernel(quadratic, (inside.square().sum() + beyond[keep].mean()).sqrt().item(), top, energy)
    return Estimate(found(group >= 0), [found(group != g) for g in range(GROUPS)], said, UNRESOLVED_TOP)


def _single(picked: Tensor) -> Cotangents:
    """These outputs, each by itself."""
    def chosen(f: Tensor, y: Tensor | None = None) -> Tensor:
        V = torch.zeros(len(picked), f.shape[1], dtype=f.dtype, device=f.device)
        V[torch.arange(len(picked)), picked.to(f.device)] = 1
        return V[:, None].expand(-1, len(f), -1)
    return chosen


def _off_diagonal(T: Tensor) -> float:
    """The mean of T_vw^2 over v != w."""
    q = len(T)
    return ((T.square().sum() - T.diagonal().square().sum()) / (q * (q - 1))).item() if q > 1 else math.nan


class Pull:
    """J^T Z of one unit, then J (J^T Z): added up chunk by chunk, output by output."""

    def __init__(self, unit: Unit, job: Job, Z: Tensor) -> None:
        self.unit, self.job, self.Z = unit, job, Z
        self.B: Tensor | None = None  # "q p" of what is multiplied by gradients, tile after tile
        self.b: Tensor | None = None  # "q p" of a bias
        self.asked: Tensor | None = None  # sum_c z_c g_c of a chunk, "q n o", for one position
        self.h: Tensor | None = None
        self.moved: Tensor | None = None

    def _one_position(self, c: LayerCapture) -> bool:
        return c.kind == "dense" and c.g.shape[2] == 1

    def _features(self, asked: dict[str, LayerCapture], whole: dict[str, Tensor]) -> Iterator[Tensor]:
        """Gradients "n p" of one cotangent, some parameters at a time."""
        u = self.unit
        if u.parameter:
            yield (shared_gradients(self.job, u, asked) if u.maps else whole[u.parameter])[0]
        elif u.weight:
            for A in gradient_tiles(asked[u.maps[0]]):
                yield A[0]

    def add(self, asked: dict[str, LayerCapture], whole: dict[str, Tensor], rows: slice, c: int) -> None:
        u, z = self.unit, self.Z[:, rows, c]
        mine = asked.get(u.maps[0]) if u.maps and not u.parameter else None
        if u.parameter and not u.maps:
            whole = {u.parameter: whole[u.parameter][c:c + 1]}
        if mine is not None and u.bias:
            b = z @ bias_gradients(mine)[0]
            self.b = b if self.b is None else self.b.add_(b)
        if mine is not None and u.weight and self._one_position(mine):
            part = z[:, :, None] * mine.g[0, :, 0]
            self.asked, self.h = part if self.asked is None else self.asked.add_(part), mine.h[:, 0]
            return
        found = [z @ A for A in self._features(asked, whole)]
        if found:
            B = torch.cat(found, 1)
            self.B = B if self.B is None else self.B.add_(B)

    def end_of_chunk(self) -> None:
        self.moved = None
        if self.asked is not None and self.h is not None:
            B = torch.matmul(self.asked.mT, self.h).flatten(1)  # "q o i"
            self.B = B if self.B is None else self.B.add_(B)
            self.asked = self.h = None

    def push(self, asked: dict[str, LayerCapture], whole: dict[str, Tensor], c: int) -> Tensor:
        """J B of one output of a chunk, "q n"."""
        u, q = self.unit, len(self.Z)
        mine = asked.get(u.maps[0]) if u.maps and not u.parameter else None
        if u.parameter and not u.maps:
            whole = {u.parameter: whole[u.parameter][c:c + 1]}
        found: Tensor | float = 0.0
        if mine is not None and u.bias:
            assert self.b is not None
            found = self.b @ bias_gradients(mine)[0].T
        if mine is not None and u.weight and self._one_position(mine):
            assert self.B is not None
            if self.moved is None:
                self.moved = torch.matmul(mine.h[:, 0], self.B.view(q, *mine.W.shape).mT)  # "q n o"
            return found + (self.moved * mine.g[0, :, 0]).sum(2)
        start = 0
        for A in self._features(asked, whole):
            assert self.B is not None
            found = found + self.B[:, start:start + A.shape[1]] @ A.T
            start += A.shape[1]
        return found  # type: ignore[return-value]

    def square(self) -> float:
        """|J^T y~|^2 of the last vector."""
        return sum(t[-1].double().square().sum().item() for t in (self.B, self.b) if t is not None)
