"""Products with tangent kernels that are never formed: J (J^T Z), chunk by chunk and output by output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from richter.core import WHOLE
from richter.instrument.captures import LayerCapture
from richter.instrument.statistics.grams import Tangents
from richter.instrument.stream import chunks
from richter.kernels.contract import Room, bias_gradients, gradient_tiles
from richter.kernels.ntk import Job, shared_gradients
from richter.kernels.planning import Unit, make_plan


def centred(t: Tangents, z: Tensor) -> Tensor:
    """z - mean over the outputs that count, zero at the others."""
    counted = t.subject.counted
    if counted is None:
        return z - z.mean()
    keep = counted[t.rows].to(z)
    return (z - (z * keep).sum() / keep.sum()) * keep


def parameters(t: Tangents, units: Sequence[Unit]) -> list[str]:
    """Those of their modules."""
    modules = {u.module for u in units}
    return [name for module, name in t.parameters if module in modules]


def parameter_groups(t: Tangents, vectors: int) -> Iterator[list[Unit]]:
    """Modules whose gradients of so many vectors fit side by side."""
    subject, memory = t.subject, t.subject.memory
    group: list[Unit] = []
    held = 0
    for units in t.by_module.values():
        size = vectors * subject.itemsize * sum(subject.state[p].numel() for p in parameters(t, units))
        if group and held + size > memory // 3:
            yield group
            group, held = [], 0
        group, held = [*group, *units], held + size
    if group:
        yield group


def products(t: Tangents, Z: Mapping[str, Tensor], used: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """({name: K Z "q n v"} of the first ``used`` vectors of each module and of the whole, {name: |J^T z|^2} of the
    last): over the examples once for J^T Z and once for J (J^T Z), with nothing but a chunk held."""
    subject, whole = t.subject, Z.get(WHOLE)
    KZ = {name: torch.zeros(used, t.n, t.v, dtype=torch.float64, device=subject.home) for name in Z}
    squares = dict.fromkeys(Z, 0.0)
    vectors = max(len(z) for z in Z.values()) * (2 if whole is not None else 1)
    for units in parameter_groups(t, 2 * vectors):
        job = t.job(units, "trace")
        mine = {name: Z[name] if whole is None else torch.cat([Z[name], whole]) for name in job.modules}
        room = Room()
        pulls = {u: Pull(u, job, mine[u.module].to(subject.device, job.source.dtype), room) for u in units}
        size = make_plan(t.request(units, "trace", same=False, chunk=subject.probe.chunk), subject.memory // 3).chunk
        for back in (False, True):
            for chunk in chunks(job.source, t.x, size, maps=job.maps, cotangents=job.cotangents, parameters=job.loose,
                                title="kernels"):
                for c in range(t.v):
                    captures = chunk.captures(slice(c, c + 1))
                    for u, pull in pulls.items():
                        if not back:
                            pull.add(captures, chunk.gradients, chunk.rows, c)
                            continue
                        pushed = pull.push(captures, chunk.gradients, c).to(subject.home, torch.float64)
                        KZ[u.module][:, chunk.rows, c] += pushed[:used]
                        if whole is not None:
                            KZ[WHOLE][:, chunk.rows, c] += pushed[len(Z[u.module]):][:used]
                for pull in pulls.values():
                    pull.end_of_chunk()
        for u, pull in pulls.items():
            squares[u.module] += pull.square()
    if whole is not None:
        squares[WHOLE] = sum(v for name, v in squares.items() if name != WHOLE)
    return {name: P.cpu() for name, P in KZ.items()}, squares


class Pull:
    """J^T Z of one unit, then J (J^T Z): added up chunk by chunk, output by output."""

    def __init__(self, unit: Unit, job: Job, Z: Tensor, room: Room) -> None:
        self.unit, self.job, self.Z, self.room = unit, job, Z, room
        self.B: Tensor | None = None  # "q p" of what is multiplied by gradients, tile after tile
        self.b: Tensor | None = None  # "q p" of a bias
        self.asked: Tensor | None = None  # sum_c z_c g_c of a chunk, "q n o", for one position
        self.h: Tensor | None = None
        self.moved: Tensor | None = None

    def _one_position(self, c: LayerCapture) -> bool:
        return c.kind == "dense" and c.g.shape[2] == 1

    def _own(self, asked: dict[str, LayerCapture]) -> LayerCapture | None:
        """What is asked of the map, if the unit is one."""
        return None if self.unit.parameter else asked[self.unit.maps[0]]

    def _features(self, asked: dict[str, LayerCapture], whole: dict[str, Tensor], c: int) -> Iterator[Tensor]:
        """Gradients "n p" of output c, some parameters at a time."""
        u = self.unit
        if u.parameter:
            yield shared_gradients(self.job, u, asked)[0] if u.maps else whole[u.parameter][c]
        elif u.weight:
            for A in gradient_tiles(asked[u.maps[0]], self.room):
                yield A[0]

    def add(self, asked: dict[str, LayerCapture], whole: dict[str, Tensor], rows: slice, c: int) -> None:
        u, z = self.unit, self.Z[:, rows, c]
        mine = self._own(asked)
        if mine is not None and u.bias:
            b = z @ bias_gradients(mine)[0]
            self.b = b if self.b is None else self.b.add_(b)
        if mine is not None and u.weight and self._one_position(mine):
            part = z[:, :, None] * mine.g[0, :, 0]
            self.asked, self.h = part if self.asked is None else self.asked.add_(part), mine.h[:, 0]
            return
        found = [z @ A for A in self._features(asked, whole, c)]
        if found:
            B = torch.cat(found, 1)
            self.B = B if self.B is None else self.B.add_(B)

    def end_of_chunk(self) -> None:
        self.moved = None
        if self.asked is not None and self.h is not None:
            B = torch.matmul(self.asked.mT, self.h).flatten(1)  # "q o i"
            self.B = B if self.B is None else self.B.add_(B)
            self.asked = self.h = None

    def push(self, asked: dict[str, LayerCapture], whole: dict[str, Tensor], c: int) -> Tensor:
        """J B of one output of a chunk, "q n"."""
        u, q = self.unit, len(self.Z)
        mine = self._own(asked)
        found: Tensor | float = 0.0
        if mine is not None and u.bias:
            assert self.b is not None
            found = self.b @ bias_gradients(mine)[0].T
        if mine is not None and u.weight and self._one_position(mine):
            assert self.B is not None
            if self.moved is None:
                self.moved = torch.matmul(mine.h[:, 0], self.B.view(q, *mine.W.shape).mT)  # "q n o"
            return found + (self.moved * mine.g[0, :, 0]).sum(2)
        start = 0
        for A in self._features(asked, whole, c):
            assert self.B is not None
            found = found + self.B[:, start:start + A.shape[1]] @ A.T
            start += A.shape[1]
        return found  # type: ignore[return-value]

    def square(self) -> float:
        """|J^T y~|^2 of the last vector."""
        return sum(t[-1].double().square().sum().item() for t in (self.B, self.b) if t is not None)
