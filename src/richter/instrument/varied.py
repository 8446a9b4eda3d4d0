"""Passes of a few examples with fewer tokens, or with other contents of some, and what the calls of maps look like in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from richter.instrument.capture import Call, Inputs
from richter.instrument.survey import Bench, Layout, Survey, by_example, grouped

SUFFIXES = 16  # how many changes of tokens a model is asked about


@dataclass(frozen=True)
class Seen:
    """The calls of one map in one pass, and where the examples are in each."""

    n: int
    calls: Sequence[Call]
    layouts: Sequence[Layout]

    def arranged(self, i: int, t: Tensor) -> Tensor:
        """What a call read or wrote as the layer saw it "b s ..." -> "n p ..."."""
        return by_example(t, self.n, self.layouts[i])

    def read(self, i: int) -> Tensor:
        """"n p d_in" of a call."""
        h = self.arranged(i, self.calls[i].inputs())
        return h[..., None] if h.dim() == 2 else h.flatten(2)

    @property
    def reads(self) -> Tensor:
        """"n s d_in" of all calls."""
        return torch.cat([self.read(i) for i in range(len(self.calls))], 1)

    def moved(self, other: Seen) -> Tensor:
        """Where what is read is not what the same calls of another pass read, "n s"."""
        return (self.reads != other.reads).any(-1)

    def alike(self, other: Seen) -> bool:
        """Are there the same calls?"""
        return bool(self.calls) and [c.shape for c in self.calls] == [c.shape for c in other.calls]

    def numbers(self, i: int, axis: int, along: Tensor) -> Tensor | None:
        """Numbers along an axis of what a call wrote, as numbers of its positions "p"; None where it is no axis of positions."""
        call = self.calls[i]
        shape = [1] * len(call.shape)
        shape[axis] = -1
        spread = along.reshape(shape).expand(call.shape)
        mine = self.arranged(i, call.map.outputs(call.module, spread)).flatten(2)
        return mine[0, :, 0] if bool((mine == mine[:1, :, :1]).all()) else None

    def candidates(self, i: int, axis: int, T: int) -> list[Tensor]:
        """The tokens "p" of the positions of a call, if they are on this axis: alone, or folded with examples and heads."""
        size, layout = self.calls[i].shape[axis], self.layouts[i]
        folded = axis == (1 if layout == "second" else 0)
        rows = size // self.n if folded else size
        if rows % T or (folded and size % self.n):
            return []
        index = torch.arange(size, device=self.calls[i].weight.device)
        index = index % rows if layout != "minor" or not folded else index // self.n
        heads = rows // T
        splits = [inner for inner in range(1, heads + 1) if heads % inner == 0]
        guesses = [self.numbers(i, axis, index // inner % T) for inner in splits]
        return [g for g in guesses if g is not None]


@dataclass(frozen=True)
class Look:
    """Passes of a few examples, and the calls of some maps in them."""

    bench: Bench
    survey: Survey
    maps: Sequence[str]
    T: int

    def seen(self, x: Inputs, tokens: int | None = None) -> dict[str, list[Seen]] | None:
        """Of each map, the calls in a pass of all examples, or in one for each where only single ones can be read. None if the
        outputs are not of so many ``tokens``."""
        infos, n = self.survey.maps, self.bench.n
        bench = replace(self.bench, x=x)
        run = bench.run(expand=dict.fromkeys(self.survey.expand, n))
        if tokens is not None and (run.f.dim() < 2 or run.f.shape[1] != tokens):
            return None
        calls = grouped(run.calls)
        seen = {k: [Seen(n, calls.get(k, []), infos[k].layouts)] for k in self.maps if infos[k].layouts}
        if any(len(s.calls) != len(s.layouts) for own in seen.values() for s in own):  # by tokens: a layout for each
            seen = {k: [Seen(n, s.calls, _stretched(s)) for s in own] for k, own in seen.items()}
        alone = [k for k in self.maps if not infos[k].layouts]
        for i in range(n if alone else 0):
            calls = grouped(bench.alone(i, expand=dict.fromkeys(self.survey.expand, 1)).calls)
            for k in alone:
                mine = calls.get(k, [])
                seen.setdefault(k, []).append(Seen(1, mine, ["major"] * len(mine)))
        return seen

    def shortened(self) -> tuple[Sequence[Any], list[tuple[int, dict[str, list[Seen]]]]]:
        """The same with fewer tokens: of which inputs, and (how many, calls); nothing if the model takes T only."""
        for names, cut in _cuts(self.bench.x, self.T):
            try:
                shorter = [(t, self.seen(cut(t), t)) for t in dict.fromkeys((self.T - 1, max(1, self.T // 2)))]
            except Exception:  # a model may refuse a length in whatever way it likes
                continue
            if all(seen is not None for _, seen in shorter):
                return names, [(t, seen) for t, seen in shorter if seen is not None]
        return [], []

    def texts(self) -> Sequence[Any]:
        """Of several inputs of T tokens, those whose last token is seen by the last outputs alone: the others are other texts."""
        x, T = self.bench.x, self.T
        names = contents(x, T)
        if len(names) < 2:
            return names
        f = self.bench.run(record=False).f
        moved = {k: (self._outputs(_with_others(x, [k], T - 1, T)) != f).transpose(0, 1).flatten(1).any(1) for k in names}
        return [k for k in names if not bool(moved[k][:-1].any())]

    def _outputs(self, x: Inputs) -> Tensor:
        return replace(self.bench, x=x).run(record=False).f

    def changed(self, names: Sequence[Any], alone: bool = False) -> Iterator[tuple[int, dict[str, list[Seen]]]]:
        """The same with other contents of these inputs at the tokens from the k-th on, or at the k-th ``alone``: (k, calls)."""
        first = 0 if alone else 1
        for k in sorted({first + i * (self.T - first) // SUFFIXES for i in range(SUFFIXES)} | {self.T - 1}) if names else ():
            try:
                seen = self.seen(_with_others(self.bench.x, names, k, k + 1 if alone else self.T))
            except Exception:
                continue
            if seen is not None:
                yield k, seen


def _stretched(seen: Seen) -> list[Layout]:
    """A step of a loop over tokens is laid out as the others are."""
    return [seen.layouts[min(i, len(seen.layouts) - 1)] for i in range(len(seen.calls))]


def _parts(x: Inputs) -> dict[Any, Tensor]:
    return x if isinstance(x, dict) else dict(enumerate(x)) if isinstance(x, (tuple, list)) else {0: x}


def _rebuilt(x: Inputs, parts: dict[Any, Tensor]) -> Inputs:
    return parts if isinstance(x, dict) else tuple(parts.values()) if isinstance(x, (tuple, list)) else parts[0]


def _cuts(x: Inputs, T: int) -> Iterator[tuple[Sequence[Any], Callable[[int], Inputs]]]:
    """Ways of leaving tokens out: of one input (a decoder's, say), of all that have T on their second axis, or on any axis; (of
    which inputs of tokens, inputs for so many)."""
    parts = _parts(x)
    own = [k for k, t in parts.items() if isinstance(t, Tensor) and t.dim() > 1 and t.shape[1] == T]

    def along(names: Sequence[Any], everywhere: bool) -> Callable[[int], Inputs]:
        def cut(t: int) -> Inputs:
            return _rebuilt(x, {k: _shorter(v, T, t, everywhere) if k in names else v for k, v in parts.items()})
        return cut

    for name in own if len(own) > 1 else []:
        yield [name], along([name], False)
    yield own, along(own, False)
    yield own, along(list(parts), True)


def _shorter(v: Tensor, T: int, t: int, everywhere: bool) -> Tensor:
    for axis in range(1, v.dim() if everywhere else 2):
        if v.shape[axis] == T:
            v = v.narrow(axis, 0, t)
    return v


def contents(x: Inputs, T: int) -> Sequence[Any]:
    """Which inputs are of T tokens; no masks of ones and zeros, if there is more."""
    own = {name: v for name, v in _parts(x).items() if v.dim() > 1 and v.shape[1] == T and v.dtype != torch.bool}
    return [name for name, v in own.items() if bool(((v != 0) & (v != 1)).any())] or list(own)


def _with_others(x: Inputs, names: Sequence[Any], start: int, stop: int) -> Inputs:
    """Other contents of these inputs at some tokens, of the kind that is there."""
    parts = {name: v.clone() if name in names else v for name, v in _parts(x).items()}
    for name in names:
        parts[name][:, start:stop] = _other(parts[name])[:, start:stop]
    return _rebuilt(x, parts)


def _other(v: Tensor) -> Tensor:
    """Ids among those that occur, each another one; numbers moved by their spread."""
    if v.is_floating_point():
        return v + v.std() + 1
    return (v - v.min() + 1) % (v.max() - v.min() + 1) + v.min()
