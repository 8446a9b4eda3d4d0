"""Which positions of a layer are which tokens of a probe's mask: looked at, not guessed from sizes that happen to agree.

The few examples of the survey go through the model with all T tokens and with fewer. What a layer writes then shrinks along
the axis on which the tokens are; a layer whose positions stay as many (latents, queries) does not work on tokens. A model that
takes T tokens only is asked in another way: the contents of the last tokens are changed, and which positions see it is compared
with where the tokens would be. Where neither decides, nothing is claimed, and the layer is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from richter.instrument.capture import Call, Inputs, count
from richter.instrument.survey import Layout, Network, by_example, grouped, tolerance

# -------------------------------------------------------------------------------------------------------------- varied
# Passes of a few examples with fewer tokens, or with other contents of some, and what the calls of maps look like in them.

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

    network: Network
    x: Inputs
    maps: Sequence[str]
    T: int

    def seen(self, x: Inputs, tokens: int | None = None) -> dict[str, list[Seen]] | None:
        """Of each map, the calls in a pass of all examples, or in one for each where only single ones can be read. None if the
        outputs are not of so many ``tokens``."""
        survey, n = self.network.survey, count(self.x)
        infos = survey.maps
        run = self.network.run(x, expand=dict.fromkeys(survey.expand, n))
        if tokens is not None and (run.f.dim() < 2 or run.f.shape[1] != tokens):
            return None
        calls = grouped(run.calls)
        seen = {k: [Seen(n, calls.get(k, []), infos[k].layouts)] for k in self.maps if infos[k].layouts}
        if any(len(s.calls) != len(s.layouts) for own in seen.values() for s in own):  # by tokens: a layout for each
            seen = {k: [Seen(n, s.calls, _stretched(s)) for s in own] for k, own in seen.items()}
        alone = [k for k in self.maps if not infos[k].layouts]
        for i in range(n if alone else 0):
            calls = grouped(self.network.alone(x, i, expand=dict.fromkeys(survey.expand, 1)).calls)
            for k in alone:
                mine = calls.get(k, [])
                seen.setdefault(k, []).append(Seen(1, mine, ["major"] * len(mine)))
        return seen

    def shortened(self) -> tuple[Sequence[Any], list[tuple[int, dict[str, list[Seen]]]]]:
        """The same with fewer tokens: of which inputs, and (how many, calls); nothing if the model takes T only."""
        for names, cut in _cuts(self.x, self.T):
            try:
                shorter = [(t, self.seen(cut(t), t)) for t in dict.fromkeys((self.T - 1, max(1, self.T // 2)))]
            except Exception:  # a model may refuse a length in whatever way it likes
                continue
            if all(seen is not None for _, seen in shorter):
                return names, [(t, seen) for t, seen in shorter if seen is not None]
        return [], []

    def texts(self) -> Sequence[Any]:
        """Of several inputs of T tokens, those whose last token is seen by the last outputs alone: the others are other texts."""
        x, T = self.x, self.T
        names = contents(x, T)
        if len(names) < 2:
            return names
        f = self._outputs(x)
        moved = {k: (self._outputs(_with_others(x, [k], T - 1, T)) != f).transpose(0, 1).flatten(1).any(1) for k in names}
        return [k for k in names if not bool(moved[k][:-1].any())]

    def _outputs(self, x: Inputs) -> Tensor:
        return self.network.run(x, record=False).f

    def changed(self, names: Sequence[Any], alone: bool = False) -> Iterator[tuple[int, dict[str, list[Seen]]]]:
        """The same with other contents of these inputs at the tokens from the k-th on, or at the k-th ``alone``: (k, calls)."""
        first = 0 if alone else 1
        for k in sorted({first + i * (self.T - first) // SUFFIXES for i in range(SUFFIXES)} | {self.T - 1}) if names else ():
            try:
                seen = self.seen(_with_others(self.x, names, k, k + 1 if alone else self.T))
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


# -------------------------------------------------------------------------------------------------------------- tokens

EVERYWHERE = -1  # the token of a position that is none


@dataclass(frozen=True)
class Positions:
    """What the positions of one map are, over all its calls."""

    tokens: Int[Tensor, "s a"] | None = None  # the tokens of each (two for a pair of them), or EVERYWHERE; None: it works on none
    note: str = ""  # what a user should know of it
    refused: str = ""  # why its masked positions cannot be told

    def real(self, mask: Bool[Tensor, "n T"], s: int) -> Bool[Tensor, "n s"] | None:
        """Which of ``s`` positions count; None: all. Of an example without a real token none does."""
        some = mask.any(1, keepdim=True)
        if self.tokens is None:
            return None if bool(some.all()) else some.expand(-1, s)
        tokens = self.tokens.to(mask.device)
        return torch.where(tokens >= 0, mask[:, tokens.clamp(min=0)], some[..., None]).all(-1)


Tokens = Tensor | None  # "p a" of one call; None: undecided


class Irregular(Exception):
    """Positions that are neither tokens nor independent of them: windows, strides, routed tokens."""


def positions_of(network: Network, x: Inputs, maps: Sequence[str], T: int) -> dict[str, Positions]:
    """What the positions of these maps are, for a mask of T tokens."""
    if T == 1:  # an example is real or it is not
        return {name: Positions() for name in maps}
    look = Look(network, x, maps, T)
    whole = look.seen(x)
    assert whole is not None
    names, shorter = look.shortened()
    known: dict[str, Positions | None] = {}  # None: nothing is known of it yet
    for name in maps:
        known[name] = _by_length(whole[name], [(t, cut[name]) for t, cut in shorter], T) if shorter else None
    fixed = [name for name in maps if (known[name] is None or known[name] == Positions()) and _divides(whole[name], T)]
    names = [k for k in contents(x, T) if k in (names if shorter else look.texts())]
    answers = _by_content(look, whole, fixed, names) if fixed else {}
    tells = any(p.tokens is not None for p in answers.values())  # tokens, in layers that have as many positions for fewer of them
    for name, answer in answers.items():
        if answer.tokens is not None or known[name] is None or tells:
            known[name] = answer
    doubtful = {name: p.tokens for name, p in known.items() if p is not None and p.tokens is not None and name not in answers
                and not all(_same_so_far(whole[name], cut[name], p.tokens, t) for t, cut in shorter)}
    known |= _in_order(look, whole, doubtful, names)
    return {name: _uncounted(whole[name], T) if p is None else p for name, p in known.items()}


def _uncounted(seen: Sequence[Seen], T: int) -> Positions:
    """Of a model that takes T tokens only: these are too few or too many."""
    several = any(s.read(i).shape[1] > 1 for s in seen for i in range(len(s.calls)))
    return Positions(note=_irregular(T) if several else "")


def _irregular(T: int) -> str:
    return f"its positions are not the {T} tokens of the mask one by one, so all of them count, masked ones too"


def _divides(seen: Sequence[Seen], T: int) -> bool:
    """Could these be tokens, by their number?"""
    return any(len(s.calls) % T == 0 or any(s.read(i).shape[1] % T == 0 for i in range(len(s.calls))) for s in seen if s.calls)


# --------------------------------------------------------------------------------------------------------- fewer tokens

def _by_length(whole: Sequence[Seen], shorter: Sequence[tuple[int, Sequence[Seen]]], T: int) -> Positions | None:
    """From passes with fewer tokens: what the positions of a map are."""
    answers: list[Tokens] = []
    try:
        for t, cut in shorter:
            answers += [_tokens(s, c, T, t) for s, c in zip(whole, cut, strict=True) if s.calls or c.calls]
    except Irregular:
        return Positions(note=_irregular(T))
    if any(a is None for a in answers):
        return _undecided(T)
    tokens = [a for a in answers if a is not None]
    shown = [a for a in tokens if bool((a >= 0).any())]
    if any(a.shape != tokens[0].shape for a in tokens) or any(not torch.equal(a, shown[0]) for a in shown):
        return Positions(note=f"how many positions it has depends on the data, and not on the {T} tokens of the mask alone: all "
                              f"of them count, masked ones too")
    return Positions(shown[0]) if shown else Positions()


def _tokens(whole: Seen, cut: Seen, T: int, t: int) -> Tokens:
    """Of all calls of a pass, "s a", compared with one of t tokens; None if they cannot be told. Raises Irregular."""
    if len(whole.calls) != len(cut.calls):
        return _steps(whole, cut, T, t)
    parts = [_of_call(whole, cut, i, T, t) for i in range(len(whole.calls))]
    return None if any(p is None for p in parts) else _joined([p for p in parts if p is not None])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Calls side by side; where some positions are pairs of tokens, a single token is a pair with itself."""
    pair = max(p.shape[1] for p in parts)
    return torch.cat([torch.cat([p, p[:, :1].expand(-1, pair - p.shape[1])], 1) for p in parts])


def _of_call(whole: Seen, cut: Seen, i: int, T: int, t: int) -> Tokens:
    c, d = whole.calls[i].shape, cut.calls[i].shape
    if c == d:
        return torch.full((whole.read(i).shape[1], 1), EVERYWHERE, device=whole.calls[i].weight.device)
    if len(c) != len(d):
        raise Irregular
    columns = []
    for axis in (a for a in range(len(c)) if c[a] != d[a]):
        if c[axis] % T or c[axis] // T * t != d[axis]:
            raise Irregular
        guesses = whole.candidates(i, axis, T)
        if not guesses:
            raise Irregular
        if len(guesses) > 1:  # folded with heads: tokens outside, or inside?
            short = cut.candidates(i, axis, t)
            agreeing = [g for g, s in zip(guesses, short, strict=True) if _agree(whole.read(i)[:, g < t], cut.read(i))]
            guesses = agreeing if len(agreeing) == 1 else []
        if not guesses:
            return None
        columns.append(guesses[0])
    return torch.stack(columns, 1)


def _steps(whole: Seen, cut: Seen, T: int, t: int) -> Tokens:
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
    if h.shape != other.shape or not h.is_floating_point():
        return torch.equal(h, other)
    return bool((h - other).norm() <= 10 * tolerance(h.dtype) * h.norm())


def _undecided(T: int) -> Positions:
    return Positions(refused=(
        f"its positions are a multiple of the {T} tokens of the mask, and whether they are those tokens, and which is which, "
        f"cannot be told: the model takes no fewer tokens, or too much else changes with them. Masked positions must enter no "
        f"sum, so it has no number. Let the model take shorter inputs, or give labels of ignore_index at masked tokens in the "
        f"place of mask=: all positions then count"))


# ------------------------------------------------------------------------------------------------------- other contents

def _by_content(look: Look, whole: dict[str, list[Seen]], names: Sequence[str], inputs: Sequence[Any]) -> dict[str, Positions]:
    """Positions at which the contents of tokens from the k-th on are seen, and those alone, for every k, are these tokens."""
    left = {name: [_guesses(s, look.T) for s in whole[name]] for name in names}
    looked = 0
    for k, other in look.changed(inputs):
        looked += 1
        for name in names:
            for s, o, own in zip(whole[name], other[name], left[name], strict=True):
                own[:] = [g for g in own if _is_suffix(s, o, g, k)]
    answers = {}
    for name in names:
        tokens = [own[0] for s, own in zip(whole[name], left[name], strict=True) if s.calls and len(own) == 1]
        told = looked and len(tokens) == sum(bool(s.calls) for s in whole[name])
        same = told and all(torch.equal(t, tokens[0]) for t in tokens)
        answers[name] = Positions(tokens[0]) if same else _undecided(look.T)
    return answers


def _guesses(seen: Seen, T: int) -> list[Tensor]:
    """Where the tokens "s 1" of all calls could be: on the same axis in each, or one in each call."""
    if not seen.calls:
        return []
    p = [seen.read(i).shape[1] for i in range(len(seen.calls))]
    steps = torch.arange(T, device=seen.calls[0].weight.device)
    guesses = [order.repeat_interleave(p[0]) for order in (steps, steps.flip(0))] if p == [p[0]] * T else []
    for axis in range(len(seen.calls[0].shape)):
        each = [seen.candidates(i, axis, T) if axis < len(c.shape) else [] for i, c in enumerate(seen.calls)]
        guesses += [torch.cat(list(parts)) for parts in zip(*each, strict=False)]
    return [g[:, None] for g in {tuple(g.tolist()): g for g in guesses}.values()]


def _is_suffix(seen: Seen, other: Seen, tokens: Tensor, k: int) -> bool:
    """Did what is read change at the positions of the tokens from the k-th on, and nowhere else?"""
    return seen.alike(other) and torch.equal(seen.moved(other).any(0), tokens[:, 0] >= k)


# ---------------------------------------------------------------------------------------------------------- their order

def _same_so_far(whole: Sequence[Seen], cut: Sequence[Seen], tokens: Tensor, t: int) -> bool:
    """Do the first t tokens read the same with and without the others? Then they stand where they are thought to be."""
    first = (tokens < t).all(-1)
    return all(_agree(s.reads[:, first], c.reads) for s, c in zip(whole, cut, strict=True) if s.calls)


def _in_order(look: Look, whole: dict[str, list[Seen]], known: dict[str, Tensor], inputs: Sequence[Any]) -> dict[str, Positions]:
    """Tokens may stand in another order on their axis: other contents of one are seen at its own positions, if anywhere. Those
    that are not where they should be are looked for from the end, and else nothing is claimed."""
    left = {name: [tokens, torch.where(tokens >= 0, look.T - 1 - tokens, tokens)] for name, tokens in known.items()}
    for k, other in look.changed(inputs, alone=True) if known else ():
        for name, guesses in left.items():
            guesses[:] = [g for g in guesses if not _elsewhere(whole[name], other[name], g, k)]
    return {name: Positions(guesses[0]) if guesses else _undecided(look.T) for name, guesses in left.items()}


def _elsewhere(whole: Sequence[Seen], other: Sequence[Seen], tokens: Tensor, k: int) -> bool:
    """In most examples in which a change of the k-th token is seen, is it seen at positions of other tokens only?"""
    own = (tokens == k).any(-1)
    moved = [s.moved(o) for s, o in zip(whole, other, strict=True) if s.alike(o)]
    astray = sum(int((m.any(1) & ~m[:, own].any(1)).sum()) for m in moved)
    return 2 * astray > sum(int(m.any(1).sum()) for m in moved)
