"""What was captured is looked at again throughout the probe, in every measurement: a survey of a few examples cannot know what a
model does with the others.

In every chunk, the calls of each map are counted, and their rows compared with those of the same examples in another order. One
example in ``ONE_IN`` (another one in every measurement) and those whose rows differed go through the model alone: what was
captured of them must rebuild autograd's gradient. What does not is a ``Doubt``: it ends the measurement, the survey is amended
(richter.instrument.survey.amend), and the measurement begins again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from richter.core import CaptureError, Mark, RichterError
from richter.instrument.capture import Call, Inputs, Pass, doubled, in_double, select
from richter.instrument.survey.layouts import UNABLE, Bench, by_example, grouped, rounding, tolerance
from richter.instrument.survey.maps import Survey
from richter.instrument.survey.verify import coarsest, map_gradient

ONE_IN = 32  # examples
UNTRUSTED = 16  # of measurements that are not looked at every time (without errors, or of outputs alone), one in so many is
EXACT = 1e-6  # the same in double precision, where it hardly happens
FLIPPED = 0.03  # what a unit that is turned on or off by rounding may change a gradient by, relative
TOGETHER = 16  # examples at least of a probe whose gradients are looked at as one sum
MOST_DOUBTS = 100  # about one model: each time less of it is taken for granted
LARGE = 2 ** 16  # entries of a matrix that several maps use of which a gradient is not written down
SUSPECTS = 8  # examples of a chunk whose rows differ that are looked at, beside those drawn
_measurements = itertools.count()


class Doubt(CaptureError):
    """What was captured of some maps is not what single examples say."""

    def __init__(self, maps: Sequence[str], x: Inputs, example: int, why: str, biases: Sequence[str] = ()) -> None:
        names = ", ".join(map(repr, [*maps, *biases]))
        super().__init__(f"what was captured of {names} is not what single examples say: {why}")
        self.maps, self.biases, self.x, self.example = tuple(maps), tuple(biases), x, example  # of these inputs, this one


@dataclass(frozen=True)
class Audit:
    """Which examples one measurement looks at; each recording once."""

    number: int = field(default_factory=lambda: next(_measurements))
    n: int = 0  # examples in all
    done: set[tuple[Any, ...]] = field(default_factory=set)  # state, which examples, which maps
    parts: dict[str, Audit] = field(default_factory=dict)
    seen: set[tuple[int, str]] = field(default_factory=set)  # state and map: some gradient that is not zero was compared

    def part(self, name: str) -> Audit:
        """The same of other examples, which have numbers of their own."""
        return self.parts.setdefault(name, Audit(self.number, self.n))

    def due(self, state: object, rows: slice, maps: Sequence[str]) -> bool:
        """Have these maps not been looked at yet on these examples?"""
        key = (id(state), rows.start, rows.stop, frozenset(maps))
        if key in self.done:
            return False
        self.done.add(key)
        return True

    def turns(self, state: object, rows: slice) -> bool:
        """Have these examples not been in another order yet? All maps are looked at there, whichever are asked for."""
        return self.due(state, rows, ())

    def unseen(self, state: object, maps: Iterable[str]) -> list[str]:
        """Those of these maps of which no gradient but zeros was compared in this measurement."""
        return [name for name in maps if (id(state), name) not in self.seen]

    def examples(self, rows: slice) -> list[int]:
        """One of every ``ONE_IN`` neighbours among ``rows``, of single examples four: where they stand in it."""
        one_in = ONE_IN if rows.stop - rows.start > 1 else ONE_IN // 4
        blocks = range(rows.start // one_in, (rows.stop - 1) // one_in + 1)
        last = max(self.n, rows.stop)  # of the last neighbours there are fewer
        drawn = [b * one_in + _draw(self.number, b, min(one_in, last - b * one_in)) for b in blocks]
        inside = [i - rows.start for i in drawn if rows.start <= i < rows.stop]
        return inside or ([_draw(self.number, 0, rows.stop)] if rows.start == 0 else [])

    def together(self, n: int) -> int:
        """How many of n examples are looked at as one sum: of a small probe a few at least."""
        return min(n, max(1, n // 8, TOGETHER * n // max(n, self.n)))

    def order(self, n: int) -> Tensor:
        """Of n examples, another one."""
        return torch.randperm(n, generator=torch.Generator().manual_seed(self.number))


def _draw(number: int, block: int, most: int) -> int:
    return int(torch.randint(most, (), generator=torch.Generator().manual_seed(1_000_003 * number + block)))


# ---------------------------------------------------------------------------------------------------------- rows of a chunk


def check_calls(survey: Survey, x: Inputs, calls: Sequence[Call], n: int) -> None:
    """Are these the calls that the survey knows, with as many rows for each example?"""
    seen = grouped(calls)
    new = [name for name in seen if name not in survey.maps and survey.note(name) in (None, Mark.IDLE)]
    if new:
        raise Doubt(new, x, 0, "they are used for some examples only, and not for the first ones")
    other = [name for name, info in survey.batched.items() if not _as_surveyed(info.layouts, info.rows, seen.get(name, []), n)]
    if other:
        raise Doubt(other, x, 0, "how often or for how many examples they are used depends on the data")


def passed(bench: Bench, survey: Survey, seed: int, silent: Collection[str] | None, plain: bool = False) -> Pass:
    """A pass as the survey says it is made."""
    try:
        return bench.run(expand=dict.fromkeys(survey.expand, bench.n), silent=silent, seed=seed, plain=plain)
    except (*UNABLE, TypeError):
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


# examples -> h, and g of a combination of all cotangents, "n s ..." by map
Captured = Callable[[Tensor], dict[str, tuple[Tensor, Tensor]]]


@dataclass
class Check:
    """Of one recording, the examples that go through the model alone, and some that go together."""

    bench: Bench  # of the chunk
    survey: Survey
    calls: Mapping[str, Call]  # the first of each map
    examples: list[int]
    seed: int  # of the first example
    audit: Audit

    @cached_property
    def rows(self) -> list[int]:
        """The examples that will be looked at, whatever these say."""
        return sorted({*self.examples, *(self._together() if self.bench.n > 1 else ())})

    def __call__(self, cotangents: Tensor, captured: Captured) -> None:
        """Do these captures, for a combination "n k" of all cotangents, rebuild the gradients of single examples? A Doubt if
        not."""
        doubted: dict[str, int] = {}
        together = [self._together()] if self.bench.n > 1 else []
        for rows in [*together, *([] if self._one_by_one(cotangents, captured) else ([i] for i in self.examples))]:
            doubted |= self._doubted(rows, cotangents, captured)
        unseen = self.audit.unseen(self.bench.state, self.calls)  # a gradient of zero is no evidence
        everything = captured(torch.arange(self.bench.n, device=cotangents.device)) if unseen else {}
        for name in unseen:
            sizes = everything[name][1].flatten(1).norm(dim=1)
            if sizes.max() > 0 and self.audit.unseen(self.bench.state, [name]):  # not seen with another one meanwhile
                doubted |= self._doubted([int(sizes.argmax())], cotangents, captured)
        if doubted:
            biases = [k for k in doubted if k in self.survey.biases]
            raise Doubt([k for k in doubted if k not in biases], self.bench.x, next(iter(doubted.values())),
                        "they do not rebuild the gradients of single examples", biases)

    def _one_by_one(self, cotangents: Tensor, captured: Captured) -> bool:
        """Is nothing wrong with any of the examples, each in a pass of its own? One backward pass through all of these says so,
        for a random combination of them; if it does not, or cannot, they are looked at one after the other."""
        if len(self.examples) < 2 or self._computed or self.bench.n == 1:
            return False
        index = torch.tensor(self.examples, device=cotangents.device)
        weights = torch.randn(len(index), generator=torch.Generator().manual_seed(self.audit.number)).to(cotangents)
        runs = [self._run([i]) for i in self.examples]
        passes = [run for run in runs if run is not None]
        if len(passes) < len(runs) or len({run.f.shape for run in passes}) > 1:
            return False
        both = replace(passes[0], f=torch.cat([run.f.reshape(1, -1) for run in passes]))
        shares = {k: (h, g * weights.to(g).reshape(-1, *[1] * (g.dim() - 1))) for k, (h, g) in captured(index).items()}
        return not self._wrong(both, cotangents[index] * weights[:, None], shares)

    def _doubted(self, rows: list[int], cotangents: Tensor, captured: Captured) -> dict[str, int]:
        """Maps (and biases) that do not rebuild the gradient of these examples, and one of these by which they do not."""
        flipped = EXACT if self.bench.state.precision == torch.float64 else FLIPPED
        index = torch.tensor(rows, device=cotangents.device)
        h_and_g = captured(index)
        run = self._run(rows)
        apart = self._among(index, cotangents, h_and_g) if run is None else self._wrong(run, cotangents[index], h_and_g)
        if run is not None and self.bench.n > 1 and any(error < flipped for error in apart.values()):
            among = self._among(index, cotangents, h_and_g)  # rounding may have turned a unit on when they were apart
            apart = {k: error for k, error in apart.items() if k in among or error >= flipped}
        if apart and self.bench.n > 1 and self._rounded(rows, cotangents) and not self._among(index, cotangents, h_and_g):
            return {}
        return dict.fromkeys(apart, self._culprit(rows, apart, cotangents, captured) if apart else rows[0])

    def _among(self, index: Tensor, cotangents: Tensor, h_and_g: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
        """The same for examples that stay among the others, of which nothing is asked."""
        R = torch.zeros_like(cotangents)
        R[index] = cotangents[index]
        return self._wrong(self.bench.run(seed=self.seed, expand=self._expand(self.bench.n)), R, h_and_g)

    def _rounded(self, rows: list[int], cotangents: Tensor) -> bool:
        """Is it rounding that sets these examples apart from themselves among the others, however much it does (units that have
        died sit at 0)? In double precision their gradients are then the same."""
        bench, index = self.bench, torch.tensor(rows, device=cotangents.device)
        if bench.state.precision == torch.float64:
            return False
        R = torch.zeros_like(cotangents, dtype=torch.float64)
        R[index] = cotangents[index].double()
        wide = replace(bench, x=doubled(bench.x), state=in_double(bench.state))
        try:
            among, apart = wide.run(record=False, seed=self.seed), replace(wide, x=select(wide.x, rows)).run(
                record=False, seed=self.seed + rows[0])
        except UNABLE:  # parts of it are of one precision
            return False
        weights = [w for w in {id(w): w for w in among.aliases.values()}.values() if w.is_floating_point()]
        gradients = zip(among.backward(R, weights)[1], apart.backward(R[index], weights)[1], strict=True)
        off, size = zip(*((float((a - b).norm()), float(a.norm())) for a, b in gradients), strict=True)
        return among.f.dtype == torch.float64 and max(off) <= EXACT * max(size)

    def _culprit(self, rows: list[int], maps: Mapping[str, float], cotangents: Tensor, captured: Captured) -> int:
        """Of several examples, one by which a map is in doubt."""
        for i in rows if len(rows) > 1 else ():
            index = torch.tensor([i], device=cotangents.device)
            run = self._run([i])
            if run is not None and self._wrong(run, cotangents[index], captured(index)).keys() & maps.keys():
                return i
        return rows[0]

    def _together(self) -> list[int]:
        """Some examples whose gradients are looked at as one sum: it is cheaper, and sees what few of them do."""
        n = self.bench.n
        order = torch.randperm(n, generator=torch.Generator().manual_seed(self.audit.number)).tolist()
        return order[:self.audit.together(n)]

    def _expand(self, n: int) -> dict[str, int]:
        return dict.fromkeys(self.survey.expand, n) if self._computed else {}

    @property
    def _computed(self) -> bool:
        """Is some weight computed from parameters? Such weights are known from calls alone."""
        return any(self.survey.maps[k].weight is None for k in self.calls)

    def _run(self, rows: list[int]) -> Pass | None:
        """A pass of these examples; None if the model does not run on so few."""
        x = select(self.bench.x, rows)
        try:
            return replace(self.bench, x=x).run(seed=self.seed + rows[0], record=self._computed, expand=self._expand(len(rows)))
        except RichterError:
            raise
        except UNABLE:
            return None

    def _wrong(self, run: Pass, cotangent: Tensor, h_and_g: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Maps whose weight has another gradient than what was captured gives, and by how much."""
        maps, seen = self.survey.maps, {c.name: c for c in run.calls}
        weights = {k: run.state[w] if (w := maps[k].weight) else seen[k].weight for k in h_and_g if maps[k].weight or k in seen}
        users: dict[int, list[str]] = {}
        for k, weight in weights.items():
            users.setdefault(id(weight), []).append(k)
        biases = {id(run.state[k]): k for k, own in self.survey.biases.items() if all(name in h_and_g for name in own)}
        distinct = {id(w): w for w in weights.values()} | {key: run.state[k] for key, k in biases.items()}
        precision = coarsest(run.state, run.f)
        compared: dict[int, tuple[float, float]] = {}
        for key, exact in zip(distinct, run.in_turns(cotangent, list(distinct.values())), strict=True):
            if key not in biases:
                compared[key] = self._compared(users[key], exact, h_and_g)
                continue
            g = [h_and_g[name][1] for name in self.survey.biases[biases[key]]]
            rest = torch.cat([part.flatten(2).sum((0, 1)) for part in g]).to(exact) - exact.reshape(-1)
            compared[key], users[key] = (float(rest.norm()), float(exact.norm())), [biases[key]]
        self.audit.seen.update((id(run.state), k) for key, own in users.items() if compared[key][1] > 0 for k in own)
        noise = rounding(precision) * max((size for _, size in compared.values()), default=0.0)
        wrong: dict[str, float] = {}
        for key, (off, size) in compared.items():
            if off > tolerance(precision) * size + noise:  # not what rounding does, beside the gradients of other weights
                own = self.survey.biases[biases[key]] if key in biases else users[key]
                error = off / (size + _terms([h_and_g[k] for k in own], key in biases) + 1e-300)
                wrong |= dict.fromkeys(users[key], error) if error > tolerance(precision) else {}
        return wrong

    def _compared(self, own: Sequence[str], exact: Tensor, h_and_g: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[float, float]:
        """How far what these maps add up to is from a weight's gradient, and how large that is. Of a weight that is one dense
        matrix, or a large one that is the matrix of several maps, a random combination of the columns is compared."""
        maps = self.survey.maps
        c, (h, g) = self.calls[own[0]], h_and_g[own[0]]
        if len(own) == 1 and c.map.kind == "dense" and maps[own[0]].entries == exact.numel():
            w = _weights(h.shape[-1], h.device).to(exact.dtype)
            columns = c.map.matrix(c.module, exact) @ w
            off = columns - torch.einsum("nso,ns->o", g, h.to(g.dtype) @ w.to(g.dtype)).to(columns)
            return float(off.norm()), float(columns.norm())
        if exact.numel() > LARGE and (compared := self._columns(own, exact, h_and_g)) is not None:
            return compared
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

    def _columns(self, own: Sequence[str], exact: Tensor,
                 h_and_g: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[float, float] | None:
        """The same of a random combination of the columns of a matrix that all these maps use, some its transpose: what they add
        up to is never written down. None where some of them use it in another way."""
        w = _weights(exact.shape[-1], exact.device).to(exact.dtype)
        size = float((rest := exact @ w).norm()) if exact.dim() == 2 else math.nan
        for k in own:
            c, (h, g) = self.calls[k], h_and_g[k]
            matrix = c.map.matrix(c.module, exact)
            turned = matrix.shape != exact.shape
            if exact.dim() != 2 or c.map.kind not in ("dense", "lookup") or not _same(matrix.T if turned else matrix, exact):
                return None
            if c.map.kind == "lookup":
                keep = h.reshape(-1) >= 0
                if not turned:
                    return None
                rest.index_add_(0, h.reshape(-1)[keep], (g @ w.to(g)).reshape(-1)[keep].to(rest), alpha=-1)
            else:
                along, across = (g, h) if turned else (h, g)
                rest -= torch.einsum("nso,ns->o", across.to(g.dtype), along.to(g.dtype) @ w.to(g)).to(rest)
        return float(rest.norm()), size


def _same(a: Tensor, b: Tensor) -> bool:
    """One array?"""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _terms(h_and_g: Sequence[tuple[Tensor, Tensor]], bias: bool = False) -> float:
    """The size of what was added up."""
    squares = 0.0
    for h, g in h_and_g:
        sizes = g.flatten(2).norm(dim=-1) * (1.0 if bias or not h.is_floating_point() else h.flatten(2).norm(dim=-1))
        squares += sizes.square().sum().item()
    return squares ** 0.5
