"""What a kernel will cost before it is computed: which contraction, how many passes, how many operations and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from richter.core import MemoryBudgetError, show_bytes
from richter.core.text import table
from richter.instrument.capture import State
from richter.instrument.captures import MapInfo, Survey
from richter.kernels.operations import NUMBERS, Outputs, Size, cheapest, costs, widths
from richter.kernels.shared import by_pairs


@dataclass(frozen=True)
class Unit:
    """What one contraction covers: a map's matrix with its bias, several maps of one parameter, or a parameter that has no
    map and is differentiated one example at a time."""

    module: str
    maps: tuple[str, ...] = ()
    weight: bool = True
    bias: bool = False
    parameter: str = ""  # of a unit that is not one map


def units_of(model: nn.Module, survey: Survey) -> list[Unit]:
    """All trainable parameters, each in one unit; a shared one belongs to the first module that has it."""
    units: dict[tuple[str, str], Unit] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad or not p.is_floating_point():
            continue
        module = name.rpartition(".")[0]
        maps = survey.structured.get(name, ())
        if maps and _in_parts([survey.maps[k] for k in maps], p.numel()):
            for k in maps:
                units[module, k] = Unit(module, (k,), bias=(module, k) in units)
        elif maps:  # their gradients are added before the product
            units[module, name] = Unit(module, maps, parameter=name)
        elif name in survey.biases:
            for k in survey.biases[name]:
                known = units.get((module, k))
                units[module, k] = Unit(module, (k,), weight=known is not None and known.weight, bias=True)
        else:
            units[module, name] = Unit(module, parameter=name)
    return list(units.values())


def _in_parts(maps: Sequence[MapInfo], entries: int) -> bool:
    """Do maps hold every entry of their parameter once? Two that share some, and leave others out, can be as large as it."""
    if sum(info.entries for info in maps) != entries or len(maps) == 1:
        return len(maps) == 1 and maps[0].entries == entries
    held = torch.zeros(entries, dtype=torch.bool, device=maps[0].index.device)
    for info in maps:
        held[info.index] = True
    return bool(held.all())


@dataclass(frozen=True)
class Line:
    """One unit's share of a plan."""

    module: str
    unit: str
    way: str
    positions: int
    operations: float


@dataclass(frozen=True)
class Plan:
    """How a kernel will be computed. ``print(plan)`` shows it."""

    examples: tuple[int, int]
    outputs: int
    kind: Outputs
    chunk: int  # examples at a time on each side
    block: int  # cotangents at a time
    passes: int  # forward passes of a chunk
    backward: int  # backward passes of a chunk, to the layers' outputs
    bytes: int  # at most, beyond the kernels themselves
    result: int  # bytes of the kernels
    operations: float
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        n, m = self.examples
        rows = [HEAD, *((u.unit, u.way, str(u.positions), f"{u.operations / 1e9:.3g}") for u in self.lines)]
        return "\n".join([
            f"{self.kind} kernel of {n} x {m} examples, {self.outputs} outputs: {self.operations / 1e9:.3g} GFLOP, "
            f"{show_bytes(self.bytes)} beside {show_bytes(self.result)} of kernels",
            f"{self.passes} forward and {self.backward} backward passes of {self.chunk} examples, to the layers' outputs; what "
            f"{self.block} of them ask is held at a time", table(rows)])


HEAD = ("layer", "contraction", "positions", "GFLOP")


def positions(info: MapInfo) -> int:
    """Those that a contraction goes over: the live ones where they are at most half (see Recording.trimmed)."""
    return info.live if info.silent else info.positions


def size(info: MapInfo, n: int, m: int, v: int, same: bool) -> Size:
    s = positions(info)
    return Size(info.kind, n, m, s, s, v, *widths(info.kind, info.shape), same)


def forward_operations(survey: Survey) -> int:
    """Of a forward pass of one example through all maps: a lookup multiplies nothing, a norm each number once."""
    number = 0
    for info in survey.maps.values():
        d_in, _, groups = widths(info.kind, info.shape)
        number += 0 if info.kind == "lookup" else 2 * info.width * (d_in // groups)
    return number


@dataclass(frozen=True)
class Request:
    """A kernel that is asked for: of which units, between how many examples, of how many cotangents."""

    survey: Survey
    units: Sequence[Unit]
    state: State
    n: int
    m: int
    v: int
    outputs: Outputs
    itemsize: int
    per_layer: bool = True
    same: bool = True  # are both sides the same examples?
    chunk: int | None = None  # at most so many examples at a time

    def numbers(self, n: int, m: int, same: bool) -> int:
        """Held at once for a pair of chunks: graphs, what was asked and read, sums over pairs, a tile."""
        return _numbers(self, n, m, 1 if self.outputs == "trace" else self.v, same)


def make_plan(r: Request, memory: int) -> Plan:
    """The largest chunks that fit; an error that says the least that would do."""
    n, m, v = r.n, r.m, r.v
    modules = len({u.module for u in r.units})
    pairs = n * m * {"trace": 1, "diagonal": v, "full": v * v}[r.outputs]
    result = (modules if r.per_layer else 1) * pairs * (r.itemsize if r.outputs == "full" else 8)

    def need(c: int) -> int:
        return r.itemsize * r.numbers(c, min(c, m), r.same and c >= n)

    smallest = least(r)
    if smallest > memory:
        raise MemoryBudgetError(
            f"memory={show_bytes(memory)} cannot hold one pair of examples of {modules} layers ({show_bytes(smallest)}) beside "
            f"their kernels. The smallest that works here is memory='{show_bytes(smallest)}'; "
            f"fewer examples (Probe(kernel=...)), fewer outputs (output=...) or fewer layers (layers=...) need less.")
    c = min(max(n, m), r.chunk or max(n, m))
    while c > 1 and need(c) > memory:
        c = min(c - 1, math.ceil(c / 1.25))
    chunks = (math.ceil(n / c), math.ceil(m / c))
    passes = chunks[0] * (chunks[0] + 1) // 2 if r.same else chunks[0] * (1 + chunks[1])
    backward = v * (chunks[0] ** 2 if r.same else 2 * chunks[0] * chunks[1])  # both sides of every pair of chunks
    lines = tuple(_line(r, u) for u in r.units)
    operations = c * (passes + backward) * forward_operations(r.survey) + sum(u.operations for u in lines)
    block = 1 if r.outputs == "trace" else v
    return Plan((n, m), v, r.outputs, c, block, passes, backward, need(c), result, operations, lines)


def least(r: Request) -> int:
    """Bytes of the smallest piece of work: a pair of examples."""
    return r.itemsize * r.numbers(1, 1, False)


def _line(r: Request, u: Unit) -> Line:
    name = u.parameter or u.maps[0]
    v2 = r.v * r.v if r.outputs == "full" else r.v
    if u.parameter:
        s = max((positions(r.survey.maps[k]) for k in u.maps), default=1)
        return Line(u.module, name, "shared gradients" if u.maps else "one example at a time", s,
                    (0.5 if r.same else 1) * 2 * v2 * r.n * r.m * r.state[u.parameter].numel())
    z = size(r.survey.maps[u.maps[0]], r.n, r.m, r.v, r.same)
    way = cheapest(z, r.outputs) if u.weight else "features"
    return Line(u.module, name, way, z.s, costs(z, r.outputs)[way][0] if u.weight else 2 * v2 * r.n * r.m * z.d_out)


def _numbers(r: Request, n: int, m: int, block: int, same: bool) -> int:
    sides = n if same else n + m
    maps = dict.fromkeys(k for u in r.units for k in u.maps)
    asked = sum(r.survey.maps[k].width for k in maps)
    read = sum(r.survey.maps[k].unfolded for k in maps)
    blocks = block + 1  # one on its way to the others; in a trace, the first one (see Sum.pooled)
    held = sides * (r.survey.graph + read + blocks * asked) * 5 // 4  # a quarter for what passes through a backward pass
    moment: dict[str, int] = {}  # contraction -> what it holds while it runs, and keeps for the next map (see Room)
    sums = 0
    for u in r.units:
        if u.parameter:
            number = (block if u.maps else r.v) * r.state[u.parameter].numel()
            held += 0 if u.maps else sides * number
            pairs = u.maps and by_pairs(r.survey, r.state, u.maps, u.parameter, max(r.n, r.m), r.outputs)
            moment["shared"] = max(moment.get("shared", 0), 3 * NUMBERS if pairs else 2 * sides * number)
        elif u.weight:
            z = size(r.survey.maps[u.maps[0]], n, m, r.v, same)
            way = cheapest(z, r.outputs)
            here = costs(z, r.outputs)[way][1]
            if way == "pairs" and r.outputs == "trace":  # half of it is a sum that stays until the last cotangent
                here //= 2
                sums += here
            moment[way] = max(moment.get(way, 0), here)
            if r.outputs == "full" and z.kind == "dense" and z.s > 1:  # a pooled read-out may be in front of it
                moment["gradients"] = max(moment.get("gradients", 0), costs(z, r.outputs)["gradients"][1])
    return held + sums + sum(moment.values())
