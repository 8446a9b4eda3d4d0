"""Tangent kernels that are too large to be formed: estimates of what is asked of them, with a standard error.

* many outputs: y~^T K y~ is one backward pass for all layers at once, and |C K C|_F^2 is the mean of (z^T K z')^2 over
  independent random vectors z != z' of all examples and outputs, which is unbiased;
* many examples: products of C K C with a few vectors, without K: the norm by Hutch++, the largest eigenvalue on the same
  subspace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from richter.core import WHOLE, MemoryBudgetError, show_bytes
from richter.instrument.capture import forward, to_device
from richter.instrument.captures import LayerCapture, check_finite, select
from richter.instrument.cotangents import RandomOutputs
from richter.instrument.moments import GROUPS
from richter.instrument.tangents import SMALL, Estimate, Tangents
from richter.kernels.contract import Room, bias_gradients, gradient_tiles, steps
from richter.kernels.ntk import Chunk, Job, shared_gradients
from richter.kernels.planning import Unit, least, make_plan
from richter.measures.alignment import CentredKernel

SKETCHED, CORRECTING = 32, 16  # vectors that span most of a kernel, and that sample what is left of it
UNRESOLVED = 0.03  # a largest eigenvalue is not reported when its vector is further than this from being one
NO_TOP = ("needs the largest eigenvalue of the kernel of all outputs, which no sketch of so many gives: pick at most 64 outputs "
          "with output=, e.g. lambda out: out[:, -1, :64]")
UNRESOLVED_TOP = ("the largest eigenvalue of so large a kernel was not resolved: fewer examples (Probe(kernel=...)) give it "
                  "exactly")


def sketch(t: Tangents, random: RandomOutputs) -> Iterator[tuple[str, Estimate]]:
    """Of |C K C|_F, from random vectors of all examples and outputs; y~^T K y~ exactly."""
    of, k, q = t.of, t.of.found.outputs, random.vectors
    need = t.n * k * q
    if need > max(of.memory, SMALL):
        raise MemoryBudgetError(f"memory={show_bytes(of.memory)} cannot hold {q} random vectors of {k:,} outputs for "
                                f"{t.n} examples. The smallest that works here is memory='{show_bytes(need)}'; pick fewer "
                                f"outputs, e.g. those of the last token: output=lambda out: out.logits[:, -1].")
    Z = random.signs(t.rows.tolist(), k, range(q))
    y = None if of.Y is None else of.Y[t.rows]
    said = f"{random.v} random outputs of {k}"
    gram: dict[str, Tensor] = {}
    quadratic: dict[str, float] = {}
    energy = math.nan if y is None else t.centred(y).square().sum().item()
    for units in t.parameter_groups(q + 1):
        for module, B in _pulled(t, units, Z, y).items():
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


def _pulled(t: Tangents, units: Sequence[Unit], Z: Tensor, y: Tensor | None) -> dict[str, Tensor]:
    """J^T z~ of each module for every vector (and for the labels, last): plain gradients, "v p"."""
    of, names = t.of, t.parameters(units)
    places = [of.state[k] for k in names]
    dtype = t.job(units).dtype
    B = [torch.zeros(len(Z) + 1, p.numel(), dtype=dtype, device=of.device) for p in places]
    fits = of.memory // 3 // (of.itemsize * 2 * of.found.graph + 1)
    chunk = 1 if of.found.drawn else max(1, min(of.probe.chunk, t.n, fits))
    targets = None if y is None else t.centred(y)
    bar = tqdm(total=math.ceil(t.n / chunk) * (len(Z) + 1), desc="kernels", delay=2, leave=False, disable=None)
    for r in steps(t.n, chunk):
        x = to_device(select(t.x, r), of.device)
        with of.timed(r.stop - r.start):
            seen = forward(of.model, x, of.state, output=of.output, record=False, seed=r.start)
        check_finite(seen.f)
        for v in range(len(Z) + (targets is not None)):
            z = targets if v == len(Z) else t.centred(Z[v].double())
            assert z is not None
            for total, d in zip(B, seen.backward(z[r].to(seen.f.device), places)[1], strict=True):
                total[v] += d.reshape(-1)
            bar.update()
    bar.close()
    found: dict[str, list[Tensor]] = {}
    for name, b in zip(names, B, strict=True):
        found.setdefault(name.rpartition(".")[0], []).append(b)
    return {module: torch.cat(parts, 1) for module, parts in found.items()}


def _off_diagonal(T: Tensor) -> float:
    """The mean of T_vw^2 over v != w."""
    q = len(T)
    return ((T.square().sum() - T.diagonal().square().sum()) / (q * (q - 1))).item() if q > 1 else math.nan


def least_of_estimates(t: Tangents) -> int:
    """The smallest memory for ``sketch`` or ``free``: a module's products with all vectors in a third of it, and (``free``) a
    pair of examples in another."""
    of = t.of
    random = t.chosen if isinstance(t.chosen, RandomOutputs) else None
    vectors = random.vectors + 1 if random else 2 * 2 * (SKETCHED + CORRECTING)
    modules = list(t.by_module().values())
    held = max((vectors * of.itemsize * sum(of.state[p].numel() for p in t.parameters(units)) for units in modules), default=0)
    example = 0 if random else max((least(of.found, units, of.state, t.v, "trace", of.itemsize) for units in modules), default=0)
    return 3 * max(held, example)


def operations(t: Tangents) -> tuple[float, float]:
    """(of the exact kernel, of its estimate)"""
    of = t.of
    q = SKETCHED + 2 * (SKETCHED + CORRECTING)
    exact = make_plan(of.found, of.wanted, of.state, t.n, t.n, t.v, "full", of.itemsize, 2 ** 62).operations
    maps = [of.found.maps[k] for u in of.wanted for k in u.maps]
    through = 2 * t.n * (1 + t.v) * sum(m.width * m.shape[-1] for m in of.found.maps.values() if m.kind == "dense")
    own = sum(2 * t.n * (m.width * m.shape[-1] * t.v + t.v * q * m.index.numel() if m.unfolded or
                            m.width > m.shape[0] else q * m.index.numel()) for m in maps)
    return exact, 4 * through + 2 * own


def free(t: Tangents) -> Iterator[tuple[str, Estimate]]:
    """|C K C|_F and its largest eigenvalue without K, y~^T K y~ exactly. Twice K~ times some vectors: the first products
    span where most of K~ acts, the second are exact there and sampled in what is left (Hutch++ for the trace of K~^2)."""
    of = t.of
    y = t.centred(of.Y[t.rows]) if of.Y is not None else torch.full((t.n, t.v), math.nan, dtype=torch.float64)
    energy = y.square().sum().item()
    draw = torch.Generator().manual_seed(0)
    first, second = (t.all_centred(torch.randn(q, t.n, t.v, generator=draw, dtype=torch.float64))
                     for q in (SKETCHED, CORRECTING))
    said = f"estimated by products with the kernel of {t.n} examples, which is not formed"
    names = [*t.by_module(), *([WHOLE] if of.layers is None else [])]
    start = dict.fromkeys(names, torch.cat([first, torch.nan_to_num(y)[None]]))
    once, quadratic = _products(t, start, len(first))
    spans = {name: torch.linalg.qr(Y.flatten(1).T)[0].T for name, Y in once.items()}  # orthonormal rows
    outside = {name: second.flatten(1) - (second.flatten(1) @ Q.T) @ Q for name, Q in spans.items()}
    again = {name: t.all_centred(torch.cat([Q, outside[name]]).view(-1, t.n, t.v)) for name, Q in spans.items()}
    twice, _ = _products(t, again, len(again[names[0]]))
    for name in names:
        known = quadratic[name] if math.isfinite(energy) else math.nan
        yield name, _hutch(spans[name], twice[name].flatten(1), known, energy, said)


def _products(t: Tangents, Z: Mapping[str, Tensor], used: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """({name: C K Z "q n v"} of the first ``used`` vectors of each module and of the whole, {name: |J^T z|^2} of the
    last): over the examples once for J^T Z and once for J (J^T Z), with nothing but a chunk held."""
    of, whole = t.of, Z.get(WHOLE)
    products = {name: torch.zeros(used, t.n, t.v, dtype=torch.float64, device=of.home) for name in Z}
    squares = dict.fromkeys(Z, 0.0)
    vectors = max(len(z) for z in Z.values()) * (2 if whole is not None else 1)
    for units in t.parameter_groups(2 * vectors):
        job = t.job(units, "trace")
        mine = {name: Z[name] if whole is None else torch.cat([Z[name], whole]) for name in job.modules}
        room = Room()
        pulls = {u: Pull(u, job, mine[u.module].to(of.device, job.dtype), room) for u in units}
        plan = make_plan(of.found, units, of.state, t.n, t.n, t.v, "trace", of.itemsize, of.memory // 3, same=False,
                         chunk=of.probe.chunk)
        bar = tqdm(total=2 * math.ceil(t.n / plan.chunk), desc="kernels", delay=2, leave=False, disable=None)
        for back in (False, True):
            for r in steps(t.n, plan.chunk):
                chunk = Chunk(job, to_device(select(t.x, r), of.device), r).begin()
                for c in range(t.v):
                    asked = chunk.asked(slice(c, c + 1))
                    for u, pull in pulls.items():
                        if not back:
                            pull.add(asked, chunk.whole, r, c)
                            continue
                        found = pull.push(asked, chunk.whole, c).to(of.home, torch.float64)
                        products[u.module][:, r, c] += found[:used]
                        if whole is not None:
                            products[WHOLE][:, r, c] += found[len(Z[u.module]):][:used]
                for pull in pulls.values():
                    pull.end_of_chunk()
                bar.update()
        bar.close()
        for u, pull in pulls.items():
            squares[u.module] += pull.square()
    if whole is not None:
        squares[WHOLE] = sum(v for name, v in squares.items() if name != WHOLE)
    return {name: t.all_centred(P.cpu()) for name, P in products.items()}, squares


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


class Pull:
    """J^T Z of one unit, then J (J^T Z): added up chunk by chunk, output by output."""

    def __init__(self, unit: Unit, job: Job, Z: Tensor, room: Room) -> None:
        self.unit, self.job, self.Z, self.room = unit, job, Z, room
        self.B: Tensor | None = None  # "q p" of what is multiplied by gradients, tile after tile
        self.b: Tensor | None = None  # "q p" of a bias
        self.asked: Tensor | None = None  # sum_c z_c g_c of a chunk, "q n o", for one position
        self.h: Tensor | None = None
        self.moved: Tensor | None = None

    def _one_position(self, c: LayerCapture) -> bool:
        return c.kind == "dense" and c.g.shape[2] == 1

    def _own(self, asked: dict[str, LayerCapture]) -> LayerCapture | None:
        """What is asked of the map, if the unit is one."""
        return None if self.unit.parameter else asked[self.unit.maps[0]]

    def _features(self, asked: dict[str, LayerCapture], whole: dict[str, Tensor], c: int) -> Iterator[Tensor]:
        """Gradients "n p" of output c, some parameters at a time."""
        u = self.unit
        if u.parameter:
            yield shared_gradients(self.job, u, asked)[0] if u.maps else whole[u.parameter][c]
        elif u.weight:
            for A in gradient_tiles(asked[u.maps[0]], self.room):
                yield A[0]

    def add(self, asked: dict[str, LayerCapture], whole: dict[str, Tensor], rows: slice, c: int) -> None:
        u, z = self.unit, self.Z[:, rows, c]
        mine = self._own(asked)
        if mine is not None and u.bias:
            b = z @ bias_gradients(mine)[0]
            self.b = b if self.b is None else self.b.add_(b)
        if mine is not None and u.weight and self._one_position(mine):
            part = z[:, :, None] * mine.g[0, :, 0]
            self.asked, self.h = part if self.asked is None else self.asked.add_(part), mine.h[:, 0]
            return
        found = [z @ A for A in self._features(asked, whole, c)]
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
        mine = self._own(asked)
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
        for A in self._features(asked, whole, c):
            assert self.B is not None
            found = found + self.B[:, start:start + A.shape[1]] @ A.T
            start += A.shape[1]
        return found  # type: ignore[return-value]

    def square(self) -> float:
        """|J^T y~|^2 of the last vector."""
        return sum(t[-1].double().square().sum().item() for t in (self.B, self.b) if t is not None)
