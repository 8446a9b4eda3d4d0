"""Kernels of each output by itself where not all examples fit at once: what some modules read and are asked is kept of all kernel
examples, in passes of some examples each, and multiplied afterwards. No example goes through the model more than once for the
same modules, as it would if pairs of chunks were captured, and for as many outputs as have room."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from richter.core.values import trim
from richter.instrument.capture import TOGETHER, to_device, weight_bytes
from richter.instrument.cotangents import SomeOutputs
from richter.instrument.statistics.kernels import Tangents
from richter.instrument.stream import Chunk, LayerCapture, beside, chunks, fitting, steps
from richter.kernels.contract import NUMBERS, Unit, at_places, mirror, places
from richter.kernels.ntk import Block

MANY = 2 ** 62  # examples: so many that the gradients of a parameter that is several maps are never formed
OUTPUTS = 8  # arrays of an example's outputs on their way: see passes.AUDITED


def can_be_kept(t: Tangents) -> bool:
    survey = t.subject.survey
    return not survey.drawn and all(k in survey.batched for k in t.maps) and loose_bytes(t) <= t.memory // 4


def loose_bytes(t: Tangents) -> int:
    """Of the gradients of all kernel examples in a module's parameters that are no maps, and of their products."""
    numbers = [sum(t.subject.state[u.parameter].numel() for u in units if not u.maps) for units in t.by_module.values()]
    return 2 * t.n * t.subject.itemsize * max(numbers, default=0)


def kept_bytes(t: Tangents, units: Sequence[Unit], outputs: int) -> int:
    """Of all kernel examples: what these maps read where so many outputs are reached from, and what these ask of them."""
    maps, item = t.subject.survey.maps, t.subject.itemsize
    names = dict.fromkeys(k for u in units for k in u.maps)
    numbers = sum(maps[k].width + maps[k].reads for k in names if k not in t.subject.survey.readouts)
    last = sum(maps[k].width // maps[k].positions for k in names if k in t.subject.survey.readouts)  # one position
    return t.n * item * outputs * (numbers + last)


def chunk_bytes(t: Tangents) -> int:
    """Of one example on its way, and of the products of some."""
    survey = t.subject.survey
    asked = 2 * sum(survey.maps[k].width for k in t.maps)
    return t.subject.itemsize * (2 * survey.graph + asked + OUTPUTS * survey.outputs)


def products_bytes(t: Tangents) -> int:
    positions = max((t.subject.survey.maps[k].positions for k in t.maps), default=1)
    return 6 * t.subject.itemsize * min(NUMBERS, (t.n * positions) ** 2) + loose_bytes(t)


def least(t: Tangents) -> int:
    """The smallest memory in which every module's kernels can be had."""
    own = max((kept_bytes(t, units, 1) for units in t.by_module.values()), default=0)
    return own + chunk_bytes(t) + products_bytes(t)


def turns(t: Tangents) -> list[list[Unit]]:
    """Modules whose captures, of one output, have room side by side, with one example on its way: every turn takes a pass."""
    room = t.memory - chunk_bytes(t) - products_bytes(t)
    groups: list[list[Unit]] = []
    for units in t.by_module.values():
        if groups and kept_bytes(t, [*groups[-1], *units], 1) <= room:
            groups[-1] += units
        else:
            groups.append(list(units))
    return groups


def fewer_passes(t: Tangents, outputs: int) -> bool:
    """Than pairs of chunks take? They do where all examples fit at once."""
    request = t.request(t.units, "diagonal", outputs)
    if not can_be_kept(t):
        return False
    least_of_all = request.itemsize * request.numbers(t.n, t.n, True)
    return least_of_all > t.memory - 8 * outputs * t.n ** 2 * len(t.by_module)


def together(t: Tangents, units: Sequence[Unit], outputs: int) -> int:
    """Of how many outputs what is captured has room, with their cotangents and an example on its way."""
    room = t.memory - chunk_bytes(t) - products_bytes(t)
    each = kept_bytes(t, units, 1) + t.subject.itemsize * t.subject.survey.outputs
    return int(max(1, min(outputs, room // max(1, each))))


def passes(t: Tangents, outputs: int) -> float:
    """Of the kernel examples, in forward-backward passes: a third of one forward, and for each output."""
    return sum(math.ceil(outputs / together(t, units, outputs)) + outputs for units in turns(t)) / 3


def one_at_a_time(t: Tangents, picked: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Kernels "v n n" of these outputs, by module."""
    for units in turns(t):
        modules = dict.fromkeys(u.module for u in units)
        K = {name: torch.zeros(len(picked), t.n, t.n, dtype=torch.float64, device=t.subject.home) for name in modules}
        at_once = together(t, units, len(picked))
        room = t.memory - kept_bytes(t, units, at_once) - products_bytes(t)
        size = fitting(room, chunk_bytes(t), min(t.subject.probe.chunk, t.n))
        for some in steps(len(picked), at_once):
            for c, captures in enumerate(_kept(t, units, picked[some], size), some.start):
                _add(t, picked[c], captures, {name: kernel[c:c + 1] for name, kernel in K.items()})
        yield from K.items()


def _kept(t: Tangents, units: Sequence[Unit], outputs: Sequence[int], size: int) -> Iterator[dict[str, LayerCapture]]:
    """Of each of these outputs what is captured of all examples, from one forward pass of each."""
    job = t.job(units, "diagonal", SomeOutputs(tuple(outputs)))
    parts: list[list[dict[str, LayerCapture]]] = [[] for _ in outputs]
    for chunk in chunks(job.source, t.x, size, maps=job.maps, cotangents=job.cotangents, title="kernels"):
        for c, mine in enumerate(parts):
            mine.append({k: _own(capture) for k, capture in chunk.captures(slice(c, c + 1)).items()})
        del chunk  # with its graph, which malloc keeps
        trim(weight_bytes(t.subject.model))
    for c in range(len(outputs)):
        mine, parts[c] = parts[c], []
        yield _joined(mine, weight_bytes(t.subject.model))


def _joined(parts: Sequence[dict[str, LayerCapture]], size: int) -> dict[str, LayerCapture]:
    """All examples of each map side by side. Their parts are let go, of a model of this ``size`` to the system: they are too
    small for malloc to put the next map there."""
    whole: dict[str, LayerCapture] = {}
    left = 0
    for k in dict.fromkeys(k for part in parts for k in part):
        whole[k] = beside([{k: part.pop(k)} if k in part else {} for part in parts])[k]
        left += whole[k].h.nbytes + whole[k].g.nbytes
        if left > TOGETHER:
            left = 0
            trim(size)
    trim(size)
    return whole


def _add(t: Tangents, output: int, captures: dict[str, LayerCapture], K: dict[str, Tensor]) -> None:
    """One output's kernels of some modules."""
    for module in list(K):
        mine = t.job(t.by_module[module], "diagonal", SomeOutputs((output,)))
        part = torch.zeros(1, t.n, t.n, dtype=torch.float64, device=t.subject.device)
        block = Block(mine, {module: part}, 1, MANY)
        if mine.maps:
            block.add(captures, captures)
        if mine.loose:
            alone = Chunk(mine.source, to_device(t.x, t.subject.device), slice(0, t.n), (), mine.cotangents, mine.loose)
            block.add_whole(alone.gradients, alone.gradients)
        block.close()
        K[module] += mirror(part, "diagonal").to(K[module])


def _own(c: LayerCapture) -> LayerCapture:
    """Without the graph: of what it read and is asked, only that, at the positions that the output is reached from."""
    live = places(c)[0]
    if c.kind in ("dense", "lookup") and not bool(live.all()):
        c = at_places(c, 0, live)
    return replace(c, h=_compact(c.h), g=_compact(c.g), f=None)


def _compact(t: Tensor) -> Tensor:
    """A view keeps all of what it is a view of."""
    t = t.detach()
    return t.clone() if t.untyped_storage().nbytes() > math.prod(t.shape) * t.element_size() else t
