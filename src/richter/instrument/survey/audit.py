"""What was captured is looked at again throughout the probe, in every measurement: a survey of a few examples cannot know what a
model does with the others.

In every chunk, the calls of each map are counted, and their rows compared with those of the same examples in another order. One
example in ``ONE_IN`` (another one in every measurement) and those whose rows differed go through the model alone: what was
captured of them must rebuild autograd's gradient. What does not is a ``Doubt``: it ends the measurement, the survey is amended
(richter.instrument.survey.amend), and the measurement begins again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from richter.core import CaptureError, Mark
from richter.instrument.capture import Call, Inputs, Pass, select
from richter.instrument.survey.layouts import Bench, by_example, grouped, tolerance
from richter.instrument.survey.maps import Survey
from richter.instrument.survey.verify import coarsest, map_gradient

ONE_IN = 32  # examples
FLIPPED = 0.03  # what a unit that is turned on or off by rounding may change a gradient by, relative
TOGETHER = 16  # examples of the first chunk whose gradients are looked at as one sum
SUSPECTS = 8  # examples of a chunk whose rows differ that are looked at, beside those drawn
_measurements = itertools.count()


class Doubt(CaptureError):
    """What was captured of some maps is not what single examples say."""

    def __init__(self, maps: Sequence[str], x: Inputs, example: int, why: str) -> None:
        names = ", ".join(map(repr, maps))
        super().__init__(f"what was captured of {names} is not what single examples say: {why}")
        self.maps, self.x, self.example = tuple(maps), x, example  # of these inputs, this one


@dataclass(frozen=True)
class Audit:
    """Which examples one measurement looks at; each recording once."""

    number: int = field(default_factory=lambda: next(_measurements))
    done: set[tuple[int, int, int]] = field(default_factory=set)  # state, and which examples
    parts: dict[str, Audit] = field(default_factory=dict)

    def part(self, name: str) -> Audit:
        """The same of other examples, which have numbers of their own."""
        return self.parts.setdefault(name, Audit(self.number))

    def due(self, state: object, rows: slice) -> bool:
        """Has this recording not been looked at yet?"""
        key = (id(state), rows.start, rows.stop)
        if key in self.done:
            return False
        self.done.add(key)
        return True

    def examples(self, rows: slice) -> list[int]:
        """One of every ``ONE_IN`` neighbours, among ``rows``: where they stand in it."""
        blocks = range(rows.start // ONE_IN, (rows.stop - 1) // ONE_IN + 1)
        drawn = [b * ONE_IN + _draw(self.number, b) for b in blocks]
        inside = [i - rows.start for i in drawn if rows.start <= i < rows.stop]
        return inside or ([_draw(self.number, rows.start) % (rows.stop - rows.start)] if rows.start == 0 else [])

    def order(self, n: int) -> Tensor:
        """Of n examples, another one."""
        return torch.randperm(n, generator=torch.Generator().manual_seed(self.number))


def _draw(number: int, block: int) -> int:
    return int(torch.randint(ONE_IN, (), generator=torch.Generator().manual_seed(1_000_003 * number + block)))


# ---------------------------------------------------------------------------------------------------------- rows of a chunk


def check_calls(survey: Survey, x: Inputs, calls: Sequence[Call], n: int) -> None:
    """Are these the calls that the survey knows, with as many rows for each example?"""
    seen = grouped(calls)
    new = [name for name in seen if name not in survey.maps and survey.note(name) in (None, Mark.IDLE)]
    if new:
        raise Doubt(new, x, 0, "they are used for some examples only, and not for the first ones")
    if n == 1:
        return
    other = [name for name, info in survey.batched.items() if not _as_surveyed(info.layouts, info.rows, seen.get(name, []), n)]
    if other:
        raise Doubt(other, x, 0, "how often or for how many examples they are used depends on the data")


def passed(bench: Bench, survey: Survey, seed: int, silent: Collection[str] | None) -> Pass:
    """A pass as the survey says it is made."""
    try:
        return bench.run(expand=dict.fromkeys(survey.expand, bench.n), silent=silent, seed=seed)
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        shared = [name for name, info in survey.maps.items() if info.module in survey.expand and info.layouts]
        if not shared:
            raise
        bench.run(record=False, seed=seed)  # whatever is wrong with the model itself is raised here
        raise Doubt(shared, bench.x, 0, "what they return is not shared by all examples of a batch") from None


def _as_surveyed(layouts: Sequence[str], rows: Sequence[int], calls: Sequence[Call], n: int) -> bool:
    return len(calls) == len(layouts) and all(c.shape[layout == "second"] == n * r
                                              for c, layout, r in zip(calls, layouts, rows, strict=True))


Prints = dict[str, list[Tensor]]  # of each map, for each call: a number "n" for each example


def prints(survey: Survey, calls: Sequence[Call], n: int) -> Prints:
    """What each map read, as one number for each example by which its rows are known again."""
    seen = grouped(calls)
    return {name: [_print(c, n, layout) for c, layout in zip(seen[name], info.layouts, strict=True)]
            for name, info in survey.batched.items()}


def _print(c: Call, n: int, layout: str) -> Tensor:
    axis = int(layout == "second")
    if c.read.dim() <= axis or c.read.shape[axis] % n or c.read.is_sparse:
        return torch.zeros(n)  # a broadcast or unusual input: its gradient is looked at
    read = c.read if c.read.dim() > 1 else c.read[:, None]
    rows = by_example(read if axis or read.dim() > 2 else read[:, None], n, layout).reshape(n, -1)  # type: ignore[arg-type]
    rows = rows if rows.is_floating_point() else rows.double()
    return (rows @ _weights(rows.shape[1], rows.device).to(rows.dtype)).detach()


def _weights(n: int, device: torch.device) -> Tensor:
    """Of a combination of n numbers: as good as random, and always the same."""
    return torch.arange(1, n + 1, device=device, dtype=torch.float32).mul_(0.754877).cos_()


def joined(parts: Sequence[Prints]) -> Prints:
    """Those of several passes, one behind the other."""
    return {name: [torch.cat(calls) for calls in zip(*(p[name] for p in parts), strict=True)] for name in parts[0]}


def suspects(before: Prints, after: Prints, order: Tensor, precision: torch.dtype) -> list[int]:
    """Examples whose rows are others when the chunk is in another ``order``."""
    off: set[int] = set()
    for name, own in before.items():
        for p, q in zip(own, after[name], strict=True):
            scale = p.abs().max()
            differs = (p[order.to(p.device)] - q).abs() > 10 * max(tolerance(p.dtype), tolerance(precision)) * scale
            off.update(order[differs.cpu()].tolist())
    return sorted(off)[::max(1, len(off) // SUSPECTS)]


# ------------------------------------------------------------------------------------------------------- single examples


# examples, weights of cotangents -> h, g "n s ..." by map
Captured = Callable[[Tensor, Tensor], dict[str, tuple[Tensor, Tensor]]]


@dataclass
class Check:
    """Of one recording, the examples that go through the model alone, and some that go together."""

    bench: Bench  # of the chunk
    survey: Survey
    calls: Mapping[str, Call]  # the first of each map
    examples: list[int]
    seed: int  # of the first example
    number: int

    def __call__(self, V: Tensor, captured: Captured) -> None:
        """Do these captures, for cotangents V "v n k", rebuild the gradients of single examples? A Doubt if not."""
        signs = torch.randint(0, 2, (len(V),), generator=torch.Generator().manual_seed(self.number)) * 2 - 1
        cotangents = torch.einsum("v,vnk->nk", signs.to(V), V)
        doubted: dict[str, int] = {}
        for rows in [*([self._together()] if self.bench.n > 1 else []), *([i] for i in self.examples)]:
            index = torch.tensor(rows, device=V.device)
            h_and_g = captured(index, signs.to(V))
            apart = self._wrong(self._run(rows), cotangents[index], h_and_g)
            if any(error < FLIPPED for error in apart.values()) and self.bench.n > 1:  # rounding may have turned a unit on:
                R = torch.zeros_like(cotangents)  # the same examples among all others have other gradients, which were captured
                R[index] = cotangents[index]
                among = self._wrong(self.bench.run(seed=self.seed, expand=self._expand(self.bench.n)), R, h_and_g)
                apart = {k: error for k, error in apart.items() if k in among or error >= FLIPPED}
            doubted.update(dict.fromkeys(apart, rows[0]))
        if doubted:
            raise Doubt(list(doubted), self.bench.x, next(iter(doubted.values())),
                        "they do not rebuild the gradients of single examples")

    def _together(self) -> list[int]:
        """Some examples whose gradients are looked at as one sum: it is cheaper, and sees what few of them do."""
        n = self.bench.n
        order = torch.randperm(n, generator=torch.Generator().manual_seed(self.number)).tolist()
        return order[:max(TOGETHER if self.seed == 0 else 1, n // 8)]  # the first chunk may be the only one

    def _expand(self, n: int) -> dict[str, int]:
        return dict.fromkeys(self.survey.expand, n) if self._computed else {}

    @property
    def _computed(self) -> bool:
        """Is some weight computed from parameters? Such weights are known from calls alone."""
        return any(self.survey.maps[k].weight is None for k in self.calls)

    def _run(self, rows: list[int]) -> Pass:
        """A pass of these examples."""
        x = select(self.bench.x, rows)
        try:
            return replace(self.bench, x=x).run(seed=self.seed + rows[0], record=self._computed, expand=self._expand(len(rows)))
        except (RuntimeError, ValueError, IndexError, AssertionError):
            if len(rows) > 1:
                raise
            twice = replace(self.bench, x=select(self.bench.x, rows * 2))  # it cannot run on one: of two copies one counts
            return twice.run(seed=self.seed + rows[0], record=self._computed, expand=self._expand(2))

    def _wrong(self, run: Pass, cotangent: Tensor, h_and_g: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Maps whose weight has another gradient than what was captured gives, and by how much."""
        maps, seen = self.survey.maps, {c.name: c for c in run.calls}
        weights = {k: run.state[w] if (w := maps[k].weight) else seen[k].weight for k in h_and_g if maps[k].weight or k in seen}
        users: dict[int, list[str]] = {}
        for k, weight in weights.items():
            users.setdefault(id(weight), []).append(k)
        distinct = {id(w): w for w in weights.values()}
        if len(cotangent) < len(run.f):
            cotangent = torch.cat([cotangent, torch.zeros_like(cotangent)])
        exact = dict(zip(distinct, run.backward(cotangent, list(distinct.values()))[1], strict=True))
        precision = coarsest(run.state, run.f)
        compared = {key: self._compared(own, exact[key], h_and_g) for key, own in users.items()}
        noise = 1e3 * torch.finfo(precision).eps * max((size for _, size in compared.values()), default=0.0)
        wrong: dict[str, float] = {}
        for key, (off, size) in compared.items():
            if off > tolerance(precision) * size + noise:  # not what rounding does, beside the gradients of other weights
                error = off / (size + _terms([h_and_g[k] for k in users[key]]) + 1e-300)
                wrong |= dict.fromkeys(users[key], error) if error > tolerance(precision) else {}
        return wrong

    def _compared(self, own: Sequence[str], exact: Tensor, h_and_g: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[float, float]:
        """How far what these maps add up to is from a weight's gradient, and how large that is. Of a weight that is one dense
        matrix, a random combination of the columns is compared."""
        maps = self.survey.maps
        c, (h, g) = self.calls[own[0]], h_and_g[own[0]]
        if len(own) == 1 and c.map.kind == "dense" and maps[own[0]].index.numel() == exact.numel():
            w = _weights(h.shape[-1], h.device).to(exact.dtype)
            columns = c.map.matrix(c.module, exact) @ w
            off = columns - torch.einsum("nso,ns->o", g, h.to(g.dtype) @ w.to(g.dtype)).to(columns)
            return float(off.norm()), float(columns.norm())
        rest = exact.clone(memory_format=torch.contiguous_format)
        for k in own:
            c, (h, g) = self.calls[k], h_and_g[k]
            matrix = c.map.matrix(c.module, rest)
            gradient = map_gradient(c.map.kind, h if c.map.kind == "lookup" else h.to(g.dtype), g, matrix.shape[-1]).to(matrix)
            if matrix.untyped_storage().data_ptr() == rest.untyped_storage().data_ptr():
                matrix -= gradient
            else:
                rest.view(-1).index_add_(0, maps[k].index, gradient.reshape(-1), alpha=-1)
        return float(rest.norm()), float(exact.norm())


def _terms(h_and_g: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The size of what was added up."""
    squares = 0.0
    for h, g in h_and_g:
        sizes = g.flatten(2).norm(dim=-1) * (h.flatten(2).norm(dim=-1) if h.is_floating_point() else 1.0)
        squares += sizes.square().sum().item()
    return squares ** 0.5
