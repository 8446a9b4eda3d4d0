"""Tokens of a probe's mask at the positions of a layer: looked at, not guessed from sizes that happen to agree.

The few examples of the survey go through the model with all T tokens and with fewer. What a layer writes then shrinks along
the axis on which the tokens are; a layer whose positions stay as many (latents, queries) does not work on tokens. A model that
takes T tokens only is asked in another way: the contents of the last tokens are changed, and which positions see it is compared
with where the tokens would be. Where neither decides, nothing is claimed, and the layer is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from richter.instrument.capture import Call, Inputs, count
from richter.instrument.survey import Layout, Network, by_example, grouped, tolerance

SUFFIXES = 16  # how many changes of tokens a model is asked about
EVERYWHERE = -1  # the token of a position that is none


@dataclass(frozen=True)
class Positions:
    """Tokens at the positions of one map, over all its calls."""

    tokens: Int[Tensor, "s a"] | None = None  # the tokens of each (two for a pair of them), or EVERYWHERE; None: it works on none
    note: str = ""  # what a user should know of it
    refused: str = ""  # why its masked positions cannot be told

    def real(self, mask: Bool[Tensor, "n T"], s: int) -> Bool[Tensor, "n s"] | None:
        """Positions, of ``s``, that count; None: all. Of an example without a real token none does."""
        some = mask.any(1, keepdim=True)
        if self.tokens is None:
            return None if bool(some.all()) else some.expand(-1, s)
        tokens = self.tokens.to(mask.device)
        return torch.where(tokens >= 0, mask[:, tokens.clamp(min=0)], some[..., None]).all(-1)


def positions_of(network: Network, x: Inputs, maps: Sequence[str], T: int) -> dict[str, Positions]:
    """Find the tokens at the positions of these maps, for a mask of T tokens."""
    if T == 1:  # an example is real or it is not
        return {name: Positions() for name in maps}
    return Look(network, x, maps, T).positions()


# --------------------------------------------------------------------------------------------------------------- calls

@dataclass(frozen=True)
class Seen:
    """The calls of one map in one pass, and where the examples are in each."""

    n: int
    calls: Sequence[Call]
    layouts: Sequence[Layout]

    def read(self, i: int) -> Tensor:
        """Inputs of one call, "n p d_in"."""
        h = by_example(self.calls[i].inputs(), self.n, self.layouts[i])
        return h[..., None] if h.dim() == 2 else h.flatten(2)

    @property
    def reads(self) -> Tensor:
        """Inputs of all calls, "n s d_in"."""
        return torch.cat([self.read(i) for i in range(len(self.calls))], 1)

    def moved(self, other: Seen) -> Tensor:
        """Positions at which the same calls of another pass read something else, "n s"."""
        return (self.reads != other.reads).any(-1)

    def alike(self, other: Seen) -> bool:
        """Return whether another run has the same calls."""
        return bool(self.calls) and [c.shape for c in self.calls] == [c.shape for c in other.calls]

    def divides(self, T: int) -> bool:
        """Return whether the positions could be T tokens, by their number."""
        return bool(self.calls) and (len(self.calls) % T == 0 or any(self.read(i).shape[1] % T == 0
                                                                     for i in range(len(self.calls))))

    def guesses(self, T: int) -> list[Tensor]:
        """Candidates for the axis of the tokens "s 1" in all calls: on the same axis in each, or one in each call."""
        if not self.calls:
            return []
        p = [self.read(i).shape[1] for i in range(len(self.calls))]
        order = torch.arange(T, device=self.calls[0].weight.device)
        guesses = [o.repeat_interleave(p[0]) for o in (order, order.flip(0))] if p == [p[0]] * T else []
        for axis in range(len(self.calls[0].shape)):
            each = [self.candidates(i, axis, T) if axis < len(c.shape) else [] for i, c in enumerate(self.calls)]
            guesses += [torch.cat(list(parts)) for parts in zip(*each, strict=False)]
        return [g[:, None] for g in {tuple(g.tolist()): g for g in guesses}.values()]

    def numbers(self, i: int, axis: int, along: Tensor) -> Tensor | None:
        """Numbers along an axis of what a call wrote, as numbers of its positions "p"; None where it is no axis of positions."""
        call = self.calls[i]
        shape = [1] * len(call.shape)
        shape[axis] = -1
        spread = along.reshape(shape).expand(call.shape)
        numbers = by_example(call.map.outputs(call.module, spread), self.n, self.layouts[i]).flatten(2)
        return numbers[0, :, 0] if bool((numbers == numbers[:1, :, :1]).all()) else None

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
        guesses = [self.numbers(i, axis, index // inner % T) for inner in range(1, heads + 1) if heads % inner == 0]
        return [g for g in guesses if g is not None]


class Irregular(Exception):
    """Positions that are neither tokens nor independent of them: windows, strides, routed tokens."""


def _tokens(whole: Seen, cut: Seen, T: int, t: int) -> Tensor | None:
    """The tokens "s a" of all calls of a pass, compared with one of t tokens; None if they cannot be told. Raises Irregular."""
    if len(whole.calls) != len(cut.calls):
        return _steps(whole, cut, T, t)
    parts = [_of_call(whole, cut, i, T, t) for i in range(len(whole.calls))]
    told = [p for p in parts if p is not None]
    if len(told) < len(parts):
        return None
    pair = max(p.shape[1] for p in told)  # where some positions are pairs of tokens, a single token is a pair with itself
    return torch.cat([torch.cat([p, p[:, :1].expand(-1, pair - p.shape[1])], 1) for p in told])


def _of_call(whole: Seen, cut: Seen, i: int, T: int, t: int) -> Tensor | None:
    """Token of each position of a call, found by comparing it with a run on fewer tokens."""
    c, d = whole.calls[i].shape, cut.calls[i].shape
    if c == d:
        return torch.full((whole.read(i).shape[1], 1), EVERYWHERE, device=whole.calls[i].weight.device)
    if len(c) != len(d):
        raise Irregular
    columns = []
    for axis in (a for a in range(len(c)) if c[a] != d[a]):
        guesses = [] if c[axis] % T or c[axis] // T * t != d[axis] else whole.candidates(i, axis, T)
        if not guesses:
            raise Irregular
        if len(guesses) > 1:  # folded with heads: tokens outside, or inside?
            guesses = [g for g, s in zip(guesses, cut.candidates(i, axis, t), strict=True)
                       if _agree(whole.read(i)[:, g < t], cut.read(i))]
        if len(guesses) != 1:
            return None
        columns.append(guesses[0])
    return torch.stack(columns, 1)


def _steps(whole: Seen, cut: Seen, T: int, t: int) -> Tensor | None:
    """A loop over tokens calls the layer once for each, from the first to the last or back."""
    if len(whole.calls) != T or len(cut.calls) != t or len({c.shape for c in (*whole.calls, *cut.calls)}) > 1:
        raise Irregular
    reads, fewer = [whole.read(j) for j in range(T)], [cut.read(j) for j in range(t)]
    onward = all(map(_agree, reads[:t], fewer))
    back = all(map(_agree, reads[T - t:], fewer))
    if onward == back:
        return None
    order = torch.arange(T, device=reads[0].device) if onward else torch.arange(T, device=reads[0].device).flip(0)
    return order.repeat_interleave(reads[0].shape[1])[:, None]


def _agree(h: Tensor, other: Tensor) -> bool:
    """Return whether two inputs of a layer are equal up to rounding."""
    if h.shape != other.shape or not h.is_floating_point():
        return torch.equal(h, other)
    return bool((h - other).norm() <= 10 * tolerance(h.dtype) * h.norm())


# -------------------------------------------------------------------------------------------------------------- inputs

def _parts(x: Inputs) -> dict[Any, Tensor]:
    """Parts of a model's input by key or place."""
    return x if isinstance(x, dict) else dict(enumerate(x)) if isinstance(x, (tuple, list)) else {0: x}


def _with(x: Inputs, names: Sequence[Any], change: Callable[[Tensor], Tensor]) -> Inputs:
    """Inputs of which those of these names are changed."""
    parts = {name: change(v) if name in names else v for name, v in _parts(x).items()}
    return parts if isinstance(x, dict) else tuple(parts.values()) if isinstance(x, (tuple, list)) else parts[0]


def contents(x: Inputs, T: int) -> Sequence[Any]:
    """Inputs of T tokens; no masks of ones and zeros, if there is more."""
    own = {name: v for name, v in _parts(x).items() if v.dim() > 1 and v.shape[1] == T and v.dtype != torch.bool}
    return [name for name, v in own.items() if bool(((v != 0) & (v != 1)).any())] or list(own)


def _shorter(v: Tensor, T: int, t: int, axes: int | None) -> Tensor:
    """The first t of T tokens, along the second axis or along all but the first."""
    for axis in range(1, v.dim() if axes is None else axes):
        v = v.narrow(axis, 0, t) if v.shape[axis] == T else v
    return v


def _other(v: Tensor, start: int, stop: int) -> Tensor:
    """Other contents at some tokens, of the kind that is there: ids among those that occur, each another one; numbers moved by
    their spread."""
    other = v + v.std() + 1 if v.is_floating_point() else (v - v.min() + 1) % (v.max() - v.min() + 1) + v.min()
    v = v.clone()
    v[:, start:stop] = other[:, start:stop]
    return v


# ---------------------------------------------------------------------------------------------------------------- look


@dataclass(frozen=True)
class Look:
    """Passes of a few examples with fewer tokens, or with other contents of some, and the calls of some maps in them."""

    network: Network
    x: Inputs
    maps: Sequence[str]
    T: int

    def seen(self, x: Inputs, tokens: int | None = None) -> dict[str, list[Seen]] | None:
        """Calls of each map in a pass of all examples, or in one for each where only single ones can be read. None if the
        outputs are not of so many ``tokens``."""
        network, n, expand = self.network, count(self.x), self.network.survey.expand
        infos = network.survey.maps
        run = network.run(x, expand=dict.fromkeys(expand, n))
        if tokens is not None and (run.f.dim() < 2 or run.f.shape[1] != tokens):
            return None
        calls = grouped(run.calls)
        seen = {k: [Seen(n, calls.get(k, []), infos[k].layouts)] for k in self.maps if infos[k].layouts}
        if any(len(s.calls) != len(s.layouts) for (s,) in seen.values()):  # another step of a loop is laid out as the last one
            seen = {k: [replace(s, layouts=[s.layouts[min(i, len(s.layouts) - 1)] for i in range(len(s.calls))])]
                    for k, (s,) in seen.items()}
        alone = [k for k in self.maps if not infos[k].layouts]
        for i in range(n if alone else 0):
            calls = grouped(network.alone(x, i, expand=dict.fromkeys(expand, 1)).calls)
            for k in alone:
                seen.setdefault(k, []).append(Seen(1, calls.get(k, []), ["major"] * len(calls.get(k, []))))
        return seen

    def shortened(self) -> tuple[Sequence[Any], list[tuple[int, dict[str, list[Seen]]]]]:
        """Return inputs with fewer tokens of one input (a decoder's, say), of all that have T on their second axis, or on any
        axis: of which inputs, and (how many, calls); nothing if the model takes T only."""
        x, T, parts = self.x, self.T, _parts(self.x)
        own = [k for k, t in parts.items() if isinstance(t, Tensor) and t.dim() > 1 and t.shape[1] == T]
        ways = [*(([k], [k], 2) for k in own if len(own) > 1), (own, own, 2), (own, list(parts), None)]
        for names, changed, axes in ways:
            try:
                shorter = [(t, self.seen(_with(x, changed, partial(_shorter, T=T, t=t, axes=axes)), t))
                           for t in dict.fromkeys((T - 1, max(1, T // 2)))]
            except Exception:  # a model may refuse a length in whatever way it likes
                continue
            if all(seen is not None for _, seen in shorter):
                return names, [(t, seen) for t, seen in shorter if seen is not None]
        return [], []

    def texts(self) -> Sequence[Any]:
        """Select the inputs of T tokens whose last token is seen by the last outputs alone: the others are other texts."""
        def outputs(x: Inputs) -> Tensor:
            return self.network.run(x, record=False).f

        x, T = self.x, self.T
        names = contents(x, T)
        if len(names) < 2:
            return names
        f = outputs(x)
        moved = {k: (outputs(_with(x, [k], lambda v: _other(v, T - 1, T))) != f).transpose(0, 1).flatten(1).any(1) for k in names}
        return [k for k in names if not bool(moved[k][:-1].any())]

    def changed(self, names: Sequence[Any], alone: bool = False) -> Iterator[tuple[int, dict[str, list[Seen]]]]:
        """Yield inputs with other contents of these inputs at the tokens from the k-th on, or at the k-th ``alone``: (k, calls).
        """
        first, T = 0 if alone else 1, self.T
        for k in sorted({first + i * (T - first) // SUFFIXES for i in range(SUFFIXES)} | {T - 1}) if names else ():
            try:
                seen = self.seen(_with(self.x, names, partial(_other, start=k, stop=k + 1 if alone else T)))
            except Exception:
                continue
            if seen is not None:
                yield k, seen

    def positions(self) -> dict[str, Positions]:
        """Tokens at the positions of all maps: by length, by contents where it is not told, and whether they stand in order."""
        T, whole = self.T, self.seen(self.x)
        assert whole is not None
        names, shorter = self.shortened()
        known = {k: self._by_length(whole[k], [(t, cut[k]) for t, cut in shorter]) if shorter else None for k in self.maps}
        fixed = [k for k in self.maps if (known[k] is None or known[k] == Positions()) and any(s.divides(T) for s in whole[k])]
        names = names if shorter else self.texts()
        names = [k for k in contents(self.x, T) if k in names]
        answers = self._by_content(whole, fixed, names) if fixed else {}
        tells = any(p.tokens is not None for p in answers.values())  # tokens, in layers that have as many positions for fewer
        known |= {k: p for k, p in answers.items() if p.tokens is not None or known[k] is None or tells}
        tokens = {k: p.tokens for k, p in known.items() if p is not None and p.tokens is not None and k not in answers}
        known |= self._in_order(whole, shorter, tokens, names)
        return {k: self._of_one_length(whole[k]) if p is None else p for k, p in known.items()}

    def _of_one_length(self, seen: Sequence[Seen]) -> Positions:
        """Find the positions in a model that takes T tokens only: fewer or more are an error."""
        several = any(s.read(i).shape[1] > 1 for s in seen for i in range(len(s.calls)))
        return self._irregular() if several else Positions()

    def _irregular(self) -> Positions:
        """Result for positions that are not the tokens of the mask: all of them count."""
        return Positions(note=f"its positions are not the {self.T} tokens of the mask one by one, so all of them count, masked "
                              f"ones too")

    def _undecided(self) -> Positions:
        """Refusal for positions that cannot be matched with tokens of the mask."""
        return Positions(refused=(
            f"its positions are a multiple of the {self.T} tokens of the mask, and cannot be matched with them: the model "
            "takes no fewer tokens, or too much else changes with them. Masked positions must not enter any sum, so it has no "
            "number. Let the model take shorter inputs, or replace mask= by labels of ignore_index at masked tokens: all "
            "positions then count"))

    def _by_length(self, whole: Sequence[Seen], shorter: Sequence[tuple[int, Sequence[Seen]]]) -> Positions:
        """Find the tokens at the positions of a map, from passes with fewer tokens."""
        try:
            answers = [_tokens(s, c, self.T, t) for t, cut in shorter for s, c in zip(whole, cut, strict=True)
                       if s.calls or c.calls]
        except Irregular:
            return self._irregular()
        tokens = [a for a in answers if a is not None]
        if len(tokens) < len(answers):
            return self._undecided()
        shown = [a for a in tokens if bool((a >= 0).any())]
        if any(a.shape != tokens[0].shape for a in tokens) or any(not torch.equal(a, shown[0]) for a in shown):
            return Positions(note=f"how many positions it has depends on the data, and not on the {self.T} tokens of the mask "
                                  f"alone: all of them count, masked ones too")
        return Positions(shown[0]) if shown else Positions()

    def _by_content(self, whole: dict[str, list[Seen]], names: Sequence[str], inputs: Sequence[Any]) -> dict[str, Positions]:
        """Positions at which the contents of tokens from the k-th on are seen, and those alone, for every k, are these tokens."""
        left = {name: [s.guesses(self.T) for s in whole[name]] for name in names}
        looked = False
        for k, other in self.changed(inputs):
            looked = True
            for name in names:
                for s, o, guesses in zip(whole[name], other[name], left[name], strict=True):
                    guesses[:] = [tokens for tokens in guesses
                                  if s.alike(o) and torch.equal(s.moved(o).any(0), tokens[:, 0] >= k)]
        answers = {}
        for name in names:
            called = [guesses for s, guesses in zip(whole[name], left[name], strict=True) if s.calls]
            told = looked and all(len(guesses) == 1 and torch.equal(guesses[0], called[0][0]) for guesses in called)
            answers[name] = Positions(called[0][0]) if told else self._undecided()
        return answers

    def _in_order(self, whole: dict[str, list[Seen]], shorter: Sequence[tuple[int, dict[str, list[Seen]]]],
                  tokens: dict[str, Tensor], inputs: Sequence[Any]) -> dict[str, Positions]:
        """Tokens may stand in another order on their axis. They do not where the first t tokens read the same with and without
        the others. Else other contents of one are seen at its own positions, if anywhere; tokens that are not where they should
        be are looked for from the end, and else nothing is claimed."""
        doubtful = {name: mine for name, mine in tokens.items() if not all(
            _agree(s.reads[:, (mine < t).all(-1)], c.reads)
            for t, cut in shorter for s, c in zip(whole[name], cut[name], strict=True) if s.calls)}
        left = {name: [mine, torch.where(mine >= 0, self.T - 1 - mine, mine)] for name, mine in doubtful.items()}
        for k, other in self.changed(inputs, alone=True) if doubtful else ():
            for name, guesses in left.items():
                guesses[:] = [g for g in guesses if not _elsewhere(whole[name], other[name], g, k)]
        return {name: Positions(guesses[0]) if guesses else self._undecided() for name, guesses in left.items()}


def _elsewhere(whole: Sequence[Seen], other: Sequence[Seen], tokens: Tensor, k: int) -> bool:
    """In most examples in which a change of the k-th token is seen, is it seen at positions of other tokens only?"""
    own = (tokens == k).any(-1)
    moved = [s.moved(o) for s, o in zip(whole, other, strict=True) if s.alike(o)]
    astray = sum(int((m.any(1) & ~m[:, own].any(1)).sum()) for m in moved)
    return 2 * astray > sum(int(m.any(1).sum()) for m in moved)
