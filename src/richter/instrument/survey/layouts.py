"""The few examples on which a model is surveyed, and how they lie in what a layer reads and writes: on the axis that shrinks when
there are fewer of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from richter.instrument.capture import Call, Inputs, Output, Pass, State, count, forward, select, unkept
from richter.instrument.survey.maps import Layout

Candidates = tuple[str, ...]  # how examples may lie in a call; none: in no way that is known; SHARED: not at all
Layouts = dict[str, list[Candidates]]  # of each map, for each of its calls
UNABLE = (RuntimeError, ValueError, IndexError, AssertionError)  # what models raise that do not run on so few examples, or so
SHARED: Candidates = ("shared",)  # what all examples have in common


@dataclass(frozen=True)
class Bench:
    """A model, examples and weights: what every part of a survey starts from."""

    model: nn.Module
    x: Inputs
    state: State
    output: Output | None = None
    splits: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # modules that are several maps
    anew: Collection[str] = ()  # blocks that are computed again for every backward pass

    @cached_property
    def n(self) -> int:
        """The number of examples."""
        return count(self.x)

    @property
    def inner(self) -> slice:
        """Examples without their neighbours on both sides, which must not matter to them."""
        return slice(1, self.n - 1) if self.n > 2 else slice(1, 2)

    @cached_property
    def modules(self) -> dict[int, str]:
        """id of a module -> its name."""
        return {id(module): name for name, module in self.model.named_modules()}

    def run(self, rows: slice = slice(None), **options: Any) -> Pass:
        """A forward pass of some of the examples; ``options`` as in richter.instrument.capture.forward."""
        x = self.x if rows == slice(None) else select(self.x, rows)
        return forward(self.model, x, self.state, output=self.output, splits=self.splits, anew=self.anew, **options)

    def glance(self, rows: slice = slice(None), **options: Any) -> Pass:
        """The same without a graph: for what was read, and for outputs."""
        return unkept(lambda: self.run(rows, **options))

    def alone(self, i: int, **options: Any) -> Pass:
        """A forward pass of one example."""
        return self.run(slice(i, i + 1), **options)


def by_example(t: Shaped[Tensor, "b s *rest"], n: int, layout: Layout) -> Shaped[Tensor, "n p *rest"]:
    """What a layer saw on its own axes b, s -> the examples first, and each one's positions."""
    b, s, rest = t.shape[0], t.shape[1], t.shape[2:]
    if layout == "second":  # examples along the second axis, as in recurrent layers
        return t.reshape(b, n, s // n, *rest).movedim(1, 0).reshape(n, -1, *rest)
    if layout == "minor":  # b counts examples fastest
        return t.reshape(b // n, n, s, *rest).movedim(1, 0).reshape(n, -1, *rest)
    return t.reshape(n, -1, *rest)  # b counts examples slowest


def grouped(calls: Sequence[Call]) -> dict[str, list[Call]]:
    """The calls of each map, in their order."""
    groups: dict[str, list[Call]] = {}
    for c in calls:
        groups.setdefault(c.name, []).append(c)
    return groups


def layouts_of(whole: Pass, part: Pass, n: int, m: int) -> Layouts:
    """Where the examples may be in each call of each map: a pass of n of them is compared with one of m (the second to the last
    but one)."""
    fewer = grouped(part.calls)
    return {name: [_candidates(c, d, n, m, whole.state.precision) for c, d in zip(calls, fewer[name], strict=True)]
            if len(calls) == len(fewer.get(name, [])) else [()] * len(calls)
            for name, calls in grouped(whole.calls).items()}


def _candidates(c: Call, d: Call, n: int, m: int, precision: torch.dtype) -> Candidates:
    """Of one call, on n examples and on m. Rows that are alike leave several: which of them it is, gradients tell."""
    if c.shape == d.shape:
        return SHARED if c.shape.numel() else ()  # of no example: nothing is known
    if len(c.shape) != len(d.shape):
        return ()
    axes = [i for i, (p, q) in enumerate(zip(c.shape, d.shape, strict=True)) if p != q]
    axis = axes[0]
    if len(axes) > 1 or axis > 1 or c.shape[axis] % n or c.shape[axis] // n * m != d.shape[axis]:
        return ()
    if axis == 1:
        return ("second",) if len(c.shape) > 2 else ()
    if c.shape[0] == n:
        return ("major",)
    r, x, y = c.shape[0] // n, c.read, d.read  # r rows for each example: side by side, or n apart?
    if x.shape[0] != c.shape[0] or y.shape[1:] != x.shape[1:]:
        return ()
    apart = x.reshape(r, n, *x.shape[1:])[:, 1:1 + m].reshape(y.shape)
    return tuple(layout for layout, rows in (("major", x[r:r + r * m]), ("minor", apart)) if close(rows, y, precision))


def tolerance(dtype: torch.dtype) -> float:
    """How far two right computations of one gradient may differ."""
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2 if dtype.is_floating_point else 0.0)


def rounding(dtype: torch.dtype) -> float:
    """How large a gradient that should be zero may be, beside those of other weights."""
    return min(64 * torch.finfo(dtype).eps, tolerance(dtype))


def close(x: Tensor, y: Tensor, precision: torch.dtype) -> bool:
    """The same numbers, up to the rounding of two right computations of this precision; relative to the largest of them, however
    small that is."""
    x, y = x.detach(), y.detach()
    tol = max(tolerance(x.dtype), tolerance(precision)) if x.is_floating_point() else 0.0
    return x.shape == y.shape and (not x.numel() or bool((x - y).abs().max() <= tol * x.abs().max()))


def expanded(bench: Bench, whole: Pass, layouts: Layouts) -> tuple[Pass, Layouts, set[str]]:
    """Give outputs that all examples share (a position embedding) an example axis, wherever that leaves the model's output as it
    was: (the pass with it, its layouts, the modules that got one)."""
    shared = {bench.modules[id(c.module)] for c in whole.calls if c.name in layouts and SHARED in layouts[c.name]}
    accepted: set[str] = set()
    for module in sorted(shared):
        try:
            trial = bench.glance(expand=dict.fromkeys({*accepted, module}, bench.n))
        except (*UNABLE, TypeError):
            continue  # the model does not broadcast there: one example at a time, then
        if close(trial.f, whole.f, whole.state.precision):
            accepted.add(module)
            whole = trial
    if accepted:
        m = bench.inner.stop - 1
        part = bench.glance(bench.inner, expand=dict.fromkeys(accepted, m))
        layouts = layouts_of(whole, part, bench.n, m)
    return whole, layouts, accepted
