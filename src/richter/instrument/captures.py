"""What one batch says about each linear map: captures with the examples first."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core.freed import trim
from richter.instrument.capture import Call, Pass, check_finite, count, device_of, select, weight_bytes
from richter.instrument.survey import (
    Audit,
    Bench,
    Check,
    Layout,
    MapInfo,
    Survey,
    by_example,
    check_calls,
    grouped,
    map_gradient,
    note_called,
    passed,
    with_siblings,
)
from richter.layers import Kind

__all__ = ["Forwards", "LayerCapture", "Layout", "MapInfo", "Recording", "RowCotangents", "Survey", "as_read",
           "by_example", "check_finite", "count", "covariance", "example_gradients", "grouped", "map_gradient", "record",
           "room_for", "select", "widened", "with_siblings"]


@dataclass(frozen=True)
class LayerCapture:
    """What one batch says about one linear map. Axes: n examples, s positions, v cotangents; the last axes depend on
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
        """The same for some of the examples."""
        return replace(self, h=self.h[rows], g=self.g[:, rows], f=None if self.f is None else self.f[rows],
                       h0=None if self.h0 is None else self.h0[rows], g0=None if self.g0 is None else self.g0[:, rows])


RowCotangents = Callable[[Tensor, slice], Tensor]  # f "n k" of the examples `rows` of a probe -> V "v n k"


@dataclass
class Recording:
    """One forward pass of some examples: ``g`` for any cotangents, any number of times, and ``h`` once."""

    survey: Survey
    n: int
    f: Float[Tensor, "n k"]  # detached
    run: Pass  # with the calls of the chosen maps alone
    where: dict[str, list[tuple[int, Layout]]]  # for each map, its calls among run.calls and where their examples are
    seconds: float  # that its forward pass took
    check: Check | None = None  # of the first captures
    _reads: dict[str, Tensor] = field(default_factory=dict)
    _live: dict[str, tuple[Tensor, Tensor, Tensor] | None] = field(default_factory=dict)  # live, silent, what the live ones read

    def gradients(self, V: Float[Tensor, "n k"]) -> dict[str, Tensor]:
        """d <V, f> / dz of each map, "n s d_out", by one backward pass; views where the layout allows."""
        g, calls = self.run.backward(V)[0], self.run.calls
        return {name: _joined([by_example(calls[i].map.outputs(calls[i].module, g[i]), self.n, k) for i, k in own], 1)
                for name, own in self.where.items()}

    def reads(self, name: str) -> Tensor:
        """What a map read, "n s d_in"; computed once."""
        if name not in self._reads:
            self._reads[name] = _joined([by_example(self.run.calls[i].inputs(), self.n, k) for i, k in self.where[name]], 1)
        return self._reads[name]

    def reads_of(self, name: str, rows: Tensor) -> Tensor:
        """The same of some examples; only their patches are unfolded where the layout allows."""
        calls = [self.run.calls[i] for i, _ in self.where[name]]
        if len(calls) > 1 or name in self._reads or self.where[name][0][1] != "major" or len(calls[0].read) != self.n:
            return self.reads(name)[rows]
        return calls[0].inputs(rows).flatten(0, 1).unflatten(0, (len(rows), -1))

    def captures(self, V: Float[Tensor, "v n k"], reads: bool = True, more: bool = False) -> dict[str, LayerCapture]:
        """The gradients for a stack of cotangents, with what was read and the matrices. ``more``: other cotangents follow, and
        what was captured is looked at when the last have come."""
        stacked: dict[str, Tensor] = {}
        for v in range(len(V)):
            for name, g in self.gradients(V[v]).items():
                if len(V) == 1:
                    stacked[name] = g[None]
                    continue
                if v == 0:
                    stacked[name] = room_for(g, len(V))
                stacked[name][v] = g
        if self.check is not None:
            self.check.add(V, stacked)
            if not more:
                self._finish(self.check)
        return {name: self._capture(name, stacked[name], reads) for name in self.where}

    def look(self) -> None:
        """Check by one backward pass, of random cotangents, that the maps read what they should; where nothing is asked of
        them."""
        if self.check is not None:
            draw = torch.Generator().manual_seed(0)
            self.captures(torch.randn(self.f.shape, generator=draw, dtype=torch.float64).to(self.f)[None], reads=False)

    def _finish(self, check: Check) -> None:
        """Compare all that was captured with autograd's gradients; a Doubt if it differs."""
        self.check = None
        trim(weight_bytes(check.bench.model))  # what the backward passes left
        check.finish(self.gradients)

    def _capture(self, name: str, g: Tensor, reads: bool) -> LayerCapture:
        first = self.run.calls[self.where[name][0][0]]
        return LayerCapture(first.map.kind, first.map.matrix(first.module, first.weight.detach()),
                            self.reads(name) if reads else self.f[:, :0], g, f=self.f)

    def trimmed(self, name: str, c: LayerCapture) -> LayerCapture:
        """Without the positions from which no output can be reached (those before the last token, say). They are found in
        the first cotangents and looked at again in all others: what is dropped is zero."""
        if c.g.shape[2] < 2:
            return c
        if name not in self._live:
            reached = c.g[0].flatten(2).abs().sum((0, 2)) > 0
            live, silent = reached.nonzero()[:, 0], (~reached).nonzero()[:, 0]
            self._live[name] = (live, silent, c.h[:, live]) if 0 < len(live) <= len(silent) else None
        known = self._live[name]
        if known is None:
            return c
        live, silent, h = known
        if c.g.index_select(2, silent).any():
            self._live[name] = None
            return c
        return replace(c, g=c.g.index_select(2, live), h=h)


def record(bench: Bench, rows: slice, survey: Survey, names: Sequence[str], audit: Audit | None = None) -> Recording:
    """One forward pass of the examples ``rows`` of a probe, remembering the maps ``names``. A map that is not batched can
    only be read from a single example, whose every call it then is; it is left out if it is not called. What ``audit`` says is
    looked at: a Doubt, if this is not what the survey says."""
    n = bench.n
    examined = audit is not None and bool(names) and audit.due(bench.state, rows, names)
    with timed(device_of(bench.model)) as seconds:
        run = passed(bench, survey, rows.start, survey.silent)
    if run.differentiates and not survey.differentiates:  # on later examples only: then nothing may be skipped
        survey.differentiates = True
        run = passed(bench, survey, rows.start, None)
    check_calls(survey, bench.x, run.calls, n)
    note_called(bench, survey, run)
    groups = grouped(run.calls)
    where: dict[str, list[tuple[int, Layout]]] = {}
    calls: list[Call] = []
    for name in with_siblings(survey.maps, names) if examined else names:
        own = groups.get(name, [])
        if n == 1 and not own:
            continue
        alone: list[Layout] = ["major"] * len(own)  # a single example: everything is its own
        where[name] = list(enumerate(tuple(alone) if n == 1 else survey.maps[name].layouts, len(calls)))
        calls += own
    f = run.f.detach().reshape(n, -1)
    check_finite(f)
    recording = Recording(survey, n, f, replace(run, calls=calls), where, seconds())
    if examined and audit is not None:
        recording.check = Check(bench, survey, recording.run, where, with_siblings(survey.maps, names), audit, rows.start,
                                audit.turns(bench.state, rows))
    return recording


@dataclass
class Forwards:
    """Forward passes that were made: of how many examples, and in how many seconds."""

    examples: int = 0
    seconds: float = 0.0

    def add(self, examples: int, seconds: float) -> None:
        self.examples, self.seconds = self.examples + examples, self.seconds + seconds


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
    """What a map read of n examples, each number once: "n s d" with its positions (True), or, of a convolution, whole pictures
    "n 1 d" and not its patches (False). None where it is lost: not called as the survey says, or written over since."""
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


def example_gradients(bench: Bench, rows: slice, cotangents: RowCotangents, names: Sequence[str]) -> dict[str, Tensor]:
    """d <V_v, f(x_n)> / d parameter, "v n p", by plain autograd on one example after another: always right."""
    gathered: dict[str, list[Tensor]] = {name: [] for name in names}
    for i in range(bench.n):
        run = bench.alone(i, record=False, seed=rows.start + i)
        check_finite(run.f)
        V = cotangents(run.f.detach().reshape(1, -1), slice(rows.start + i, rows.start + i + 1))
        places = [bench.state[name] for name in names]
        gradients = [run.backward(V[v], places)[1] for v in range(len(V))]
        for j, name in enumerate(names):
            gathered[name].append(torch.stack([d[j].reshape(-1) for d in gradients]))
    return {name: torch.stack(r, 1) for name, r in gathered.items()}


def widened(c: LayerCapture) -> LayerCapture:
    """Half precision is read as it is and summed in float32; h and g have one precision."""
    dtype = c.g.dtype if c.g.dtype in (torch.float32, torch.float64) else torch.float32
    h = c.h.to(dtype) if c.h.is_floating_point() else c.h
    return c if c.g.dtype == dtype and h is c.h else replace(c, W=c.W.to(dtype), h=h, g=c.g.to(dtype))


def covariance(g: Float[Tensor, "v n s o"]) -> Float[Tensor, "o o"]:
    """sum over v, n, s of g g^T."""
    if g.shape[2] > g.shape[3]:
        g = g.flatten(0, 1)
        return torch.bmm(g.mT, g).sum(0)
    g = g.reshape(-1, g.shape[-1])
    return g.T @ g
