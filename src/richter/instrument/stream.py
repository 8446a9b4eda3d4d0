"""The one loop over chunks of examples: their size, their order, which rank has which, progress, and one forward pass for each
that can be asked any number of times.

    for chunk in chunks(network, x, size=256, maps=["0", "2"], cotangents=V, title="measuring"):
        chunk.captures(slice(0, 4))       # what each map read, and what the first four cotangents ask of it
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from richter.core import CaptureError, DivergedError, MemoryBudgetError, SelectionError, show_bytes
from richter.core.modules import unwrapped_name
from richter.core.values import SMALL, progress, trim
from richter.instrument.capture import (
    ByExample,
    Call,
    Inputs,
    Pass,
    by_vmap,
    check_finite,
    count,
    select,
    to_device,
    weight_bytes,
)
from richter.instrument.survey import (
    Check,
    Layout,
    MapInfo,
    Network,
    Rebuilt,
    by_example,
    check_calls,
    coarsest,
    grouped,
    note_called,
    passed,
    rounding,
    tolerance,
    with_siblings,
)
from richter.layers import Kind

# ------------------------------------------------------------------------------------------------------------ captures
# What one batch says about each linear map: captures with the examples first.

@dataclass(frozen=True)
class LayerCapture:
    """Capture of one linear map on one batch. Axes: n examples, s positions, v cotangents; the last axes depend on
    the kind of map, see richter.layers.LinearMap."""

    kind: Kind
    W: Tensor  # the matrix now
    h: Tensor  # "n s d_in": what it read
    g: Tensor  # "v n s d_out": the gradients of the outputs in what it wrote, d <V_v, f(x_n)> / dz
    W0: Tensor | None = None  # the same at initialisation
    h0: Tensor | None = None
    g0: Tensor | None = None
    f: Tensor | None = None  # "n k"

    def take(self, rows: slice | Tensor) -> LayerCapture:
        """Return the capture of some of the examples."""
        return replace(self, h=self.h[rows], g=self.g[:, rows], f=None if self.f is None else self.f[rows],
                       h0=None if self.h0 is None else self.h0[rows], g0=None if self.g0 is None else self.g0[:, rows])


RowCotangents = Callable[[Tensor, slice], Tensor]  # f "n k" of the examples `rows` of a probe -> V "v n k"


@contextlib.contextmanager
def timed(device: torch.device) -> Iterator[Callable[[], float]]:
    """Around work on a device: how long it took, in seconds, afterwards."""
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    begun, ended = now(), [math.nan]
    yield lambda: ended[0] - begun
    ended[0] = now()


def as_read(info: MapInfo, calls: Sequence[Call], n: int) -> tuple[Tensor, bool] | None:
    """Return what a map read of n examples, each number once: "n s d" with its positions (True), or, of a convolution, whole
    pictures "n 1 d" and not its patches (False). None where it is lost: not called as the survey says, or written over since."""
    if len(calls) != len(info.layouts) or any(c.read._version != c.version for c in calls):
        return None
    if info.unfolded > 0 and info.layouts == ("major",) and len(calls[0].read) == n:
        return calls[0].read.flatten(1)[:, None], False
    return _joined([by_example(c.inputs(), n, layout).flatten(2) for c, layout in zip(calls, info.layouts, strict=True)], 1), True


def room_for(g: Tensor, v: int, shape: Sequence[int] | None = None) -> Tensor:
    """Empty "v ..." of which each part lies in memory as ``g`` does: a transposed view is filled without transposing."""
    shape = g.shape if shape is None else shape
    order = sorted(range(g.dim()), key=g.stride, reverse=True)
    store = g.new_empty(v, *(shape[i] for i in order))
    return store.permute(0, *(1 + order.index(i) for i in range(g.dim())))


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    """The calls of one map side by side along its positions; most maps are called once."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)


def ready(c: LayerCapture, wide: bool = False) -> LayerCapture:
    """Give h and g one precision in which to compute: float32 for half precision, float64 if ``wide``."""
    dtype = torch.float64 if wide or c.g.dtype == torch.float64 else torch.float32
    h = c.h.to(dtype) if c.h.is_floating_point() else c.h
    return c if c.g.dtype == dtype and h is c.h else replace(c, W=c.W.to(dtype), h=h, g=c.g.to(dtype))


def covariance(g: Float[Tensor, "v n s o"]) -> Float[Tensor, "o o"]:
    """Sum over v, n, s of the outer products g g^T."""
    if g.shape[2] > g.shape[3]:
        g = g.flatten(0, 1)
        return torch.bmm(g.mT, g).sum(0)
    g = g.reshape(-1, g.shape[-1])
    return g.T @ g


def covariances(g: Float[Tensor, "v n s o"], groups: int, first: int) -> list[Float[Tensor, "o o"]]:
    """``covariance`` of each group of examples, of at least one each: example i is in the group (first + i) % groups."""
    (_, n, s, o), order = g.shape, [(k - first) % groups for k in range(groups)]
    if n % groups or s > o:
        return [covariance(g[:, k::groups]) for k in order]
    parts = g.unflatten(1, (-1, groups)).movedim(2, 0).reshape(groups, -1, o)
    products = torch.bmm(parts.mT, parts)
    return [products[k] for k in order]


# -------------------------------------------------------------------------------------------------------------- stream

class Share(NamedTuple):
    """Share of one of several processes that measure together. Each takes whole chunks, so that their number changes only the
    order of sums."""

    rank: int = 0
    ranks: int = 1

    def has(self, chunk: int) -> bool:
        """Return whether this process has this chunk."""
        return chunk % self.ranks == self.rank


ALONE = Share()


@dataclass(eq=False)
class Chunk:
    """Some of the examples streamed over, on the model's device. Their forward pass is made when it is first asked for; then
    ``g`` for any cotangents, any number of times, and ``h`` once."""

    network: Network
    x: Inputs
    rows: slice  # where they stand
    maps: Sequence[str] = ()
    cotangents: RowCotangents | None = None
    parameters: Sequence[str] = ()  # those without a map, whose gradients are computed by example
    vectorised: int | None = None  # examples whose gradients are computed side by side; None: a quarter of all
    hears: Sequence[str] = ()  # maps whose calls are kept in ``run.heard``, captured or not

    def __post_init__(self) -> None:
        self._calls: dict[str, list[tuple[int, Layout]]] = {}  # calls of each map in ``run``, and their layouts
        self._check: Check | None = None  # of the first captures
        self._reads: dict[str, Tensor] = {}
        self._live: dict[str, tuple[Tensor, Tensor, Tensor] | None] = {}  # live positions, silent ones, what live ones read
        self._shapes: dict[int, torch.Size] = {}  # of calls whose gradients lie in memory as they are captured
        survey = self.network.survey
        self._shared = [k for k in self.maps if k not in survey.batched] if self.n > 1 and not survey.drawn else []

    @property
    def n(self) -> int:
        """Number of examples."""
        return self.rows.stop - self.rows.start

    @cached_property
    def run(self) -> Pass:
        """Make the forward pass that remembers the maps. A map that is not batched can only be read from a single example, whose
        every call it then is; it is left out if it is not called. A Doubt, if this is not what the survey says."""
        network, survey, audit, n = self.network, self.network.survey, self.network.audit, self.n
        examined = audit is not None and len(self.maps) > len(self._shared) and audit.due(network.state, self.rows, self.maps)
        with timed(network.device) as seconds:
            run = passed(network, self.x, self.rows.start, survey.silent)
        if run.differentiates and not survey.differentiates:  # on later examples only: then nothing may be skipped
            survey.differentiates = True
            run = passed(network, self.x, self.rows.start, None)
        check_calls(network, self.x, run.calls)
        note_called(network, self.x, run)
        groups, calls = grouped(run.calls), list[Call]()
        maps = [k for k in self.maps if k not in self._shared]
        names = with_siblings(survey.maps, maps) if examined else maps
        for name in names:
            group = groups.get(name, [])
            if n == 1 and not group:
                continue
            alone: list[Layout] = ["major"] * len(group)  # a single example: everything is its own
            self._calls[name] = list(enumerate(alone if n == 1 else survey.maps[name].layouts, len(calls)))
            calls += group
        check_finite(run.f)
        run = replace(run, calls=calls, heard={k: groups[k] for k in self.hears if k in groups})
        if examined:
            self._check = Check(network, self.x, self.rows, run, self._calls, names)
        network.forwards.add(n, seconds())
        return run

    @cached_property
    def graph(self) -> Pass:
        """A pass that remembers no map, from which anything can be differentiated in the weights."""
        with timed(self.network.device) as seconds:
            run = self.network.run(self.x, record=False, seed=self.rows.start)
        self.network.forwards.add(self.n, seconds())
        return run

    @cached_property
    def outputs(self) -> Tensor:
        """Outputs f "n ...", detached."""
        f = self.graph.f.detach()
        check_finite(f)
        return f

    @cached_property
    def f(self) -> Float[Tensor, "n k"]:
        """Outputs as a matrix [n, k], detached."""
        return self.run.f.detach().reshape(self.n, -1)

    @cached_property
    def V(self) -> Tensor:
        """Cotangents of the chunk's examples, [v, n, k]."""
        assert self.cotangents is not None
        return self.cotangents(self.f, self.rows)

    def reaches(self, name: str) -> bool:
        """Return whether a map is called for these examples."""
        return any(call.name == name for call in self.run.calls)

    def backward(self, V: Float[Tensor, "n k"]) -> dict[str, Tensor]:
        """d <V, f> / dz of each map, "n s d_out", by one backward pass; views where the layout allows."""
        g, calls = self.run.backward(V)[0], self.run.calls
        return {name: _joined([self._placed(i, calls[i], g[i], layout) for i, layout in where], 1)
                for name, where in self._calls.items()}

    def _placed(self, i: int, c: Call, g: Tensor, layout: Layout) -> Tensor:
        """The gradient of a call with the examples first. Most layouts are views of all numbers in their order: then the first
        backward pass has the shape of all others."""
        if i in self._shapes and g.is_contiguous():
            return g.view(self._shapes[i])
        placed = by_example(c.map.outputs(c.module, g), self.n, layout)
        if placed.data_ptr() == g.data_ptr() and placed.numel() == g.numel() and placed.is_contiguous() and g.is_contiguous():
            self._shapes[i] = placed.shape
        return placed

    def reads(self, name: str) -> Tensor:
        """Return what a map read, "n s d_in"; computed once."""
        if name not in self._reads:
            calls = self.run.calls
            self._reads[name] = _joined([by_example(calls[i].inputs(), self.n, k) for i, k in self._calls[name]], 1)
        return self._reads[name]

    def reads_of(self, name: str, rows: Tensor) -> Tensor:
        """Return what a map read of some examples; only their patches are unfolded where the layout allows."""
        calls, layouts = zip(*((self.run.calls[i], layout) for i, layout in self._calls[name]), strict=True)
        if len(calls) > 1 or name in self._reads or layouts[0] != "major" or len(calls[0].read) != self.n:
            return self.reads(name)[rows]
        return calls[0].inputs(rows).flatten(0, 1).unflatten(0, (len(rows), -1))

    def ask(self, V: Float[Tensor, "v n k"], reads: bool = True, more: bool = False) -> dict[str, LayerCapture]:
        """Captures of all maps for a stack of cotangents. ``more``: other cotangents follow; with the last ones the captures are
        checked."""
        shared = self._ask_shared(V, reads, more) if self._shared else {}
        stacked: dict[str, Tensor] = {}
        for v, row in enumerate(V) if len(self.maps) > len(self._shared) else ():
            for name, g in self.backward(row).items():
                if len(V) == 1:
                    stacked[name] = g[None]
                    continue
                if v == 0:
                    stacked[name] = room_for(g, len(V))
                stacked[name][v] = g
        if self._check is not None:
            self._check.add(V, stacked, last=not more)
            if not more:
                check, self._check = self._check, None
                trim(weight_bytes(self.network.model))  # what the backward passes left
                check.finish(self.backward)
        return {name: self._capture(name, stacked[name], reads) for name in self._calls} | shared

    def _ask_shared(self, V: Float[Tensor, "v n k"], reads: bool, more: bool) -> dict[str, LayerCapture]:
        """Captures of maps whose outputs have no axis of examples (a table of relative positions, say): by torch.func.vmap, or
        from passes of single examples."""
        captures = self._shared_by_vmap(V, reads) if self._vectorisable else None
        if captures is None:
            self.network.survey.vectorised = False
            captures = beside([chunk.ask(V[:, i:i + 1], reads, more) for i, chunk in enumerate(self._examples)])
        return {name: replace(c, f=self.f) for name, c in captures.items()}

    @cached_property
    def _examples(self) -> list[Chunk]:
        """Chunks of the single examples."""
        first = self.rows.start
        return [replace(self, x=select(self.x, r), rows=slice(first + r.start, first + r.stop)) for r in steps(self.n, 1)]

    def _shared_by_vmap(self, V: Float[Tensor, "v n k"], reads: bool) -> dict[str, LayerCapture] | None:
        """None if the model cannot run under vmap, or if the captures do not rebuild autograd's gradients."""
        network, draw = self.network, torch.Generator().manual_seed(self.rows.start)
        names = with_siblings(network.survey.maps, self._shared)  # all that the gradients of their weights consist of
        calls = [c for c in network.glance(self.x, slice(0, 1), seed=self.rows.start).calls if c.name in names]
        R = torch.randn(V.shape[:2], generator=draw, dtype=torch.float64).to(V)
        if not calls:  # the first example does not use them
            return None
        weights = list({id(c.weight): c.weight for c in calls}.values())
        exact = self.run.backward(torch.einsum("vn,vnk->nk", R, V), weights)[1]
        found = self._tried(self.x, V, calls=calls)
        if found is None:
            return None
        h = [t.flatten(1, 2) for t in found.h]
        g = [t.flatten(2, 3) for t in found.g]
        if not self._rebuilt(calls, h, [torch.einsum("vn,vn...->n...", R.to(t), t) for t in g], weights, exact):
            return None
        captures = {}
        for name in self._shared:
            own = [i for i, c in enumerate(calls) if c.name == name]
            if own:
                first = calls[own[0]]
                captures[name] = LayerCapture(first.map.kind, first.map.matrix(first.module, first.weight.detach()),
                                              _joined([h[i] for i in own], 1) if reads else self.f[:, :0],
                                              _joined([g[i] for i in own], 2))
        return captures

    def _rebuilt(self, calls: Sequence[Call], h: Sequence[Tensor], g: Sequence[Tensor], weights: Sequence[Tensor],
                 exact: Sequence[Tensor]) -> bool:
        """Do captures of all examples add up to autograd's gradients?"""
        rebuilt, precision = Rebuilt(weights, exact), coarsest(self.network.state, self.f)
        for c, read, asked in zip(calls, h, g, strict=True):
            rebuilt.add(c, read, asked)
        if self.network.audit is not None:
            noise = rounding(precision) * max(float(e.norm()) for e in exact) + 1e-300
            self.network.audit.compared({c.name: float(rebuilt.exact[id(c.weight)].norm()) / noise for c in calls})
        return all(rebuilt.error(w) <= tolerance(precision) for w in weights)

    def look(self) -> None:
        """Check by one backward pass, of random cotangents, that the maps read what they should; where no statistic asks for
        gradients."""
        R = torch.randn(self.f.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(self.f)
        if self._check is not None:
            self.ask(R[None], reads=False)

    def captures(self, block: slice) -> dict[str, LayerCapture]:
        """Captures of all maps for a block of the cotangents, without positions from which no output is reached. Blocks come in
        order, and all of them: with the last one the captures are checked."""
        if not self.maps:
            return {}
        if self._alone:
            return beside([chunk._whole(block) for chunk in self._alone])
        return {k: self.trimmed(k, c) for k, c in self._whole(block).items()}

    def trimmed(self, name: str, c: LayerCapture) -> LayerCapture:
        """Drop the positions from which no output is reached (those before the last token, say). They are found in the first
        cotangents and looked at again in all others: what is dropped is zero."""
        if c.g.shape[2] < 2:
            return c
        if name not in self._live:
            reached = c.g[0].flatten(2).abs().sum((0, 2)) > 0
            live, silent = reached.nonzero()[:, 0], (~reached).nonzero()[:, 0]
            self._live[name] = (live, silent, c.h[:, live]) if 0 < len(live) <= len(silent) else None
        parts = self._live[name]
        if parts is None:
            return c
        live, silent, h = parts
        if c.g.index_select(2, silent).any():
            self._live[name] = None
            return c
        return replace(c, g=c.g.index_select(2, live), h=h)

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """d <V_v, f(x_n)> / d parameter, "v n p", of the parameters without a map."""
        if not self.parameters:
            return {}
        J = self._vectorised() if self._vectorisable else None
        if J is None:
            self.network.survey.vectorised = False  # do not try again with the next examples
            J = self._one_by_one()
        return {name: J[name].to(self.network.dtype) for name in self.parameters}

    def _one_by_one(self) -> dict[str, Tensor]:
        """Gradients by plain autograd, one example after another."""
        gathered: dict[str, list[Tensor]] = {name: [] for name in self.parameters}
        for i in range(self.n):
            run = self.network.alone(self.x, i, record=False, seed=self.rows.start + i)
            check_finite(run.f)
            assert self.cotangents is not None
            V = self.cotangents(run.f.detach().reshape(1, -1), slice(self.rows.start + i, self.rows.start + i + 1))
            places = [self.network.state[name] for name in self.parameters]
            gradients = [run.backward(v, places)[1] for v in V]
            for j, name in enumerate(self.parameters):
                gathered[name].append(torch.stack([d[j].reshape(-1) for d in gradients]))
        return {name: torch.stack(J, 1) for name, J in gathered.items()}

    @property
    def _vectorisable(self) -> bool:
        """Return whether several cotangents can go through one backward pass of ``torch.func.vmap``."""
        survey = self.network.survey
        return survey.vectorised and self.n > 1 and self.vectorised != 1 and not (
            survey.drawn or survey.anew or survey.differentiates or survey.accumulates)

    def _vectorised(self) -> dict[str, Tensor] | None:
        """Gradients by torch.func.vmap, some examples at a time; None if the model cannot run under vmap, or if a random
        combination of the gradients differs from one backward pass through all these examples."""
        network, names, parts = self.network, list(self.parameters), list[dict[str, Tensor]]()
        assert self.cotangents is not None
        for rows in steps(self.n, self.vectorised or math.ceil(self.n / 4)):
            x, first = select(self.x, rows), self.rows.start + rows.start
            run = network.run(x, record=False, seed=first)
            check_finite(run.f)
            V = self.cotangents(run.f.detach().reshape(rows.stop - rows.start, -1), slice(first, self.rows.start + rows.stop))
            R = torch.randn(V.shape[:2], generator=torch.Generator().manual_seed(first), dtype=torch.float64).to(V)
            combined = run.backward(torch.einsum("vn,vnk->nk", R, V), [network.state[name] for name in names])[1]
            del run
            found = self._tried(x, V, names)
            if found is None:
                return None
            J = found.J
            tolerated = tolerance(network.state.precision)
            for name, whole in zip(names, combined, strict=True):
                G = J[name].to(R.dtype)
                error = (torch.einsum("vn,vnp->p", R, G) - whole.reshape(-1)).norm()
                if not error <= tolerated * torch.einsum("vn,vnp->p", R.abs(), G.abs()).norm():
                    return None
            parts.append(J)
        return {name: torch.cat([part[name] for part in parts], 1) for name in names}

    def _tried(self, x: Inputs, V: Float[Tensor, "v n k"], names: Sequence[str] = (), calls: Sequence[Call] = ()
               ) -> ByExample | None:
        """Derivatives by vmap; None if the model cannot run under it."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch tells which of its functions vmap runs one by one
                return by_vmap(self.network, x, V, names, calls)
        except Exception:  # a model may refuse vmap in whatever way it likes; plain autograd has the last word
            return None

    def _capture(self, name: str, g: Tensor, reads: bool) -> LayerCapture:
        """Capture of a map from its backward signals; with ``reads`` its inputs too."""
        first = self.run.calls[self._calls[name][0][0]]
        return LayerCapture(first.map.kind, first.map.matrix(first.module, first.weight.detach()),
                            self.reads(name) if reads else self.f[:, :0], g, f=self.f)

    def _whole(self, block: slice) -> dict[str, LayerCapture]:
        """Captures of all maps for a block of cotangents."""
        captures = self.ask(self.V[block], more=block.stop < len(self.V))
        return {k: ready(c, self.network.wide) for k, c in captures.items()}

    @cached_property
    def _alone(self) -> list[Chunk]:
        """Its examples one by one, where the model draws: each has a seed of its own. Every one goes through it once."""
        if not self.network.survey.drawn or self.n == 1:
            return []
        first = self.rows.start
        return [Chunk(self.network, select(self.x, r), slice(first + r.start, first + r.stop), self.maps, self.cotangents,
                      self.parameters) for r in steps(self.n, 1)]


def beside(parts: Sequence[Mapping[str, LayerCapture]]) -> dict[str, LayerCapture]:
    """Captures of some examples after those of others. Where one has fewer positions than another, or does not reach a map, it
    reads nothing there and nothing is asked."""
    names = dict.fromkeys(k for part in parts for k in part)
    return {k: _after_one_another([part.get(k) for part in parts]) for k in names}


def _after_one_another(captures: Sequence[LayerCapture | None]) -> LayerCapture:
    """Concatenate captures along the positions, and pad examples with fewer positions."""
    known = [c for c in captures if c is not None]
    longest = max(known, key=lambda c: c.g.shape[2])
    silent = replace(longest, h=longest.h[:1], g=longest.g[:, :1], f=None)

    def padded(t: Tensor, axis: int, nothing: float) -> Tensor:
        shape = list(t.shape)
        shape[axis] = longest.g.shape[2] - t.shape[axis]
        return torch.cat([t, t.new_full(shape, nothing)], axis) if shape[axis] else t

    empty = 0.0 if longest.h.is_floating_point() else -1  # a lookup that reads nothing has the index -1
    whole = [c if c is not None else replace(silent, h=torch.full_like(silent.h, empty), g=torch.zeros_like(silent.g))
             for c in captures]
    return replace(longest, h=torch.cat([padded(c.h, 1, empty) for c in whole]),
                   g=torch.cat([padded(c.g, 2, 0.0) for c in whole], 1), f=None)


def steps(n: int, size: int) -> list[slice]:
    """Slices of ``size`` that cover n; the last one may be shorter."""
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def fitting(room: int, each: int, most: int, drawn: bool = False) -> int:
    """Examples at a time: as many as have room; one where the model draws, because each example has a seed of its own."""
    return 1 if drawn else int(max(1, min(most, room // max(1, each))))


def chunks(network: Network, x: Inputs, size: int | Sequence[slice], *, maps: Sequence[str] = (), hears: Sequence[str] = (),
           cotangents: RowCotangents | None = None, parameters: Sequence[str] = (), share: Share = ALONE, title: str = ""
           ) -> Iterator[Chunk]:
    """All examples of ``x``, some at a time: so many, or these rows."""
    rows = steps(count(x), size) if isinstance(size, int) else size
    with _bar(title, sum(share.has(i) for i in range(len(rows)))) as bar:
        for i, r in enumerate(rows):
            if share.has(i):
                yield Chunk(network, to_device(select(x, r), network.device), r, maps, cotangents, parameters, hears=hears)
                bar.update()


def pairs(network: Network, x: Inputs, x2: Inputs | None, size: int, *, maps: Sequence[str] = (),
          cotangents: RowCotangents | None = None, parameters: Sequence[str] = (), title: str = ""
          ) -> Iterator[tuple[Chunk, Chunk]]:
    """All pairs of chunks of ``x`` and ``x2``; of ``x`` with itself (None) those on and below the diagonal, where both are one
    object."""
    other = network if x2 is None else replace(network, audit=network.audit and network.audit.part("x2"))

    def chunk(y: Inputs, r: slice) -> Chunk:
        return Chunk(other if y is x2 else network, to_device(select(y, r), network.device), r, maps, cotangents, parameters)

    rows, columns = steps(count(x), size), steps(count(x if x2 is None else x2), size)
    with _bar(title, len(rows) * (len(rows) + 1) // 2 if x2 is None else len(rows) * len(columns)) as bar:
        for r in rows:
            a = chunk(x, r)
            for c in columns:
                if x2 is None and c.start > r.start:
                    continue
                yield a, a if x2 is None and c == r else chunk(x if x2 is None else x2, c)
                bar.update()


def _bar(title: str, total: int) -> AbstractContextManager[Any]:
    """Progress bar with a title; without a title, one that shows nothing."""
    return progress(title=title, total=total) if title else nullcontext(_NoBar())


class _NoBar:
    def update(self, n: int = 1) -> None:
        """Do nothing: a pass without a title shows no progress."""


# -------------------------------------------------------------------------------------------------------------- checks
# What a model, its initial state and its inputs must be before anything is measured; errors say what to do.

def finite(t: Tensor) -> bool:
    """A sum is finite only if all its terms are, and is quicker than to look at each."""
    return bool(torch.isfinite(t.sum())) or bool(torch.isfinite(t).all())


def check_weights(model: nn.Module) -> None:
    """A model that can be measured has real, finite, initialised weights."""
    parameters = dict(model.named_parameters())
    tensors = {**parameters, **dict(model.named_buffers())}
    if not parameters:
        raise SelectionError("the model has no parameters, so there is no layer to measure.")
    for name, p in tensors.items():
        name = f"{'parameter' if isinstance(p, nn.Parameter) else 'buffer'} {name!r}"
        if isinstance(p, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise CaptureError(f"{name} is not initialised yet (a lazy module): run one batch through the model first.")
        if p.device.type == "meta":
            raise CaptureError(f"{name} is on the meta device: it has a shape but no numbers. Move the model to a real device "
                               f"(model.to_empty(device=...) and load weights) first.")
        if p.is_complex():
            raise CaptureError(f"{name} has complex dtype {p.dtype}. Feature matrices of complex weights have no settled "
                               f"definition; split real and imaginary parts.")
    for name, p in parameters.items():
        if p.is_floating_point() and not finite(p.detach()):
            raise DivergedError(f"parameter {name!r} contains NaN or Inf: the run has diverged, and every number would be NaN. "
                                f"Look at the steps before, or lower the learning rate.")


def check_initial(model: nn.Module, initial: Any) -> dict[str, Tensor]:
    """A state_dict at initialisation that fits the (unwrapped) model."""
    if not isinstance(initial, Mapping):
        raise SelectionError(f"initial= is a {type(initial).__name__}; a state_dict of this model is needed: "
                             f"initial=copy.deepcopy(model.state_dict()), taken before training.")
    return check_state(model, initial, "initial", ", taken before training")


def check_state(model: nn.Module, state: Mapping[str, Any], called: str, when: str = "") -> dict[str, Tensor]:
    """Check any state_dict; errors name it as the caller does."""
    own = model.state_dict()
    state = {k if k in own else unwrapped_name(k, own): v for k, v in state.items()}
    needed = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    for name, p in needed.items():
        if name not in state:
            if name in own:
                raise SelectionError(f"{called}= has no entry {name!r}. Pass a state_dict of this very model{when}.")
            continue  # a buffer that is not saved
        if not isinstance(state[name], Tensor):
            raise SelectionError(f"{called}[{name!r}] is a {type(state[name]).__name__}, not a tensor.")
        if state[name].shape != p.shape:
            raise SelectionError(f"{called}[{name!r}] has shape {tuple(state[name].shape)}, the model's is {tuple(p.shape)}: "
                                 f"it is the state of another architecture.")
        if state[name].is_floating_point() and not finite(state[name]):
            raise SelectionError(f"{called}[{name!r}] contains NaN or Inf.")
    return state


def check_inputs(x: Any, name: str = "x") -> None:
    """Tensors with as many examples each, real and finite."""
    parts = list(x.items()) if isinstance(x, Mapping) else list(enumerate(x)) if isinstance(x, (tuple, list)) else []
    for key, part in parts:
        check_inputs(part, f"{name}[{key!r}]")
    sizes = {p.shape[0] if isinstance(p, Tensor) and p.dim() else -1 for _, p in parts}
    if len(sizes) > 1:
        raise SelectionError(f"the parts of {name} have different numbers of examples ({sorted(sizes)}).")
    if isinstance(x, Tensor):
        if x.is_complex():
            raise SelectionError(f"{name} has complex dtype {x.dtype}; give real and imaginary parts as two channels.")
        if x.is_floating_point() and not finite(x):
            raise SelectionError(f"{name} contains NaN or Inf: every kernel with that example would too. Remove it.")


def check_labels(n: int, outputs: int, memory: int, allowed: int) -> None:
    """Labels of every output, and random combinations of them, are large arrays: a vocabulary times a text is not small."""
    need = 8 * outputs * n
    if need > max(memory, SMALL):
        raise MemoryBudgetError(
            f"memory={show_bytes(allowed)} cannot hold the labels of {outputs:,} outputs for {n} examples. The smallest that "
            f"works here is above memory='{show_bytes(need)}'; pick fewer outputs, e.g. those of the last token: "
            f"output=lambda out: out.logits[:, -1].")
