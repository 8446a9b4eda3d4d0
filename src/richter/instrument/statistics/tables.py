"""Gradients of a vocabulary's matrix for random vectors of all examples and outputs, without compression: in the read-out it is
asked for the vector itself, and where tokens are looked up few of its rows are read. So what it read, and what is asked of the
tokens, is kept, and the gradients are made some rows at a time. (Sketches of such gradients say little: there are as many
directions in them as tokens times positions.)"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from richter.instrument.capture import Call, Pass, select, to_device
from richter.instrument.captures import by_example
from richter.instrument.statistics.grams import Tangents
from richter.instrument.stream import steps
from richter.instrument.survey import passed

if TYPE_CHECKING:
    from richter.instrument.statistics.compressed import Vectors
    from richter.instrument.subject import Subject

SHARE = 6  # of memory, one part in so many is for rows of gradients
LARGE = 2 ** 16  # entries of a matrix that is worth it
SAME = 1e-5  # relative


class NotItself(Exception):
    """What is asked of a read-out is not what is asked of the outputs: tokens are masked behind it, or logits clipped."""

    def __init__(self, parameter: str) -> None:
        super().__init__(parameter)
        self.parameter = parameter


@dataclass
class Table:
    """A parameter "tokens d" that is the read-out, or looks tokens up, or both."""

    parameter: str
    readout: str  # the map that writes the logits; empty if there is none
    lookups: tuple[str, ...]
    d: int
    read: list[Tensor] = field(default_factory=list)  # by the read-out, "n s d"
    tokens: list[Tensor] = field(default_factory=list)  # that are looked up, " m", by chunk
    asked: list[list[Tensor]] = field(default_factory=list)  # of them, "m d", for each vector, by chunk

    @property
    def maps(self) -> tuple[str, ...]:
        return self.lookups + ((self.readout,) if self.readout else ())

    def add(self, v: int, subject: Subject, calls: Sequence[Call], g: Sequence[Tensor], n: int) -> None:
        """What one vector asks of the tokens of a chunk; at the first one, what was read."""
        parts: list[Tensor] = []
        tokens: list[Tensor] = []
        for k in self.maps:
            mine = [(c, d) for c, d in zip(calls, g, strict=True) if c.name == k]
            for (c, d), layout in zip(mine, subject.survey.maps[k].layouts, strict=True):
                if k != self.readout:
                    parts.append(by_example(c.map.outputs(c.module, d), n, layout).flatten(0, 1).to(subject.source.dtype))
                if v == 0:
                    h = by_example(c.inputs(), n, layout).detach()
                    (self.read if k == self.readout else tokens).append(h.clone() if k == self.readout else h.flatten())
        if v == 0 and self.lookups:
            self.tokens.append(torch.cat(tokens))
        while len(self.asked) <= v:
            self.asked.append([])
        if parts:
            self.asked[v].append(torch.cat(parts).clone())

    def itself(self, subject: Subject, run: Pass, g: Sequence[Tensor], z: Float[Tensor, "n k"]) -> bool:
        """Is what a vector asks of the read-out, of every example, the vector itself?"""
        for c, d in zip(run.calls, g, strict=True):
            if c.name == self.readout:
                layout = subject.survey.maps[c.name].layouts[0]
                z = z.to(run.f.dtype).to(d)
                off = by_example(c.map.outputs(c.module, d), len(z), layout).reshape(len(z), -1) - z
                return bool((off.norm(dim=1) <= SAME * z.norm(dim=1)).all())
        return not self.readout

    def gram(self, subject: Subject, vectors: Vectors) -> Float[Tensor, "q q"]:
        """Inner products of the gradients of all vectors, some rows at a time."""
        rows_in_all = subject.state[self.parameter].numel() // self.d
        dtype, device = subject.source.dtype, subject.device
        T = torch.zeros(len(vectors), len(vectors), dtype=torch.float64, device=subject.home)
        H = torch.cat(self.read).flatten(0, 1).to(dtype) if self.read else None
        tokens = torch.cat(self.tokens) if self.tokens else None
        asked = [torch.cat(self.asked.pop(0)) for _ in range(len(self.asked))] if tokens is not None else []
        for rows in steps(rows_in_all, tile_rows(subject, self.d, len(vectors))):
            width = rows.stop - rows.start
            B = torch.zeros(len(vectors), width, self.d, dtype=dtype, device=device)
            inside = None if tokens is None else ((tokens >= rows.start) & (tokens < rows.stop)).nonzero().flatten()
            for v in range(len(vectors)):
                if H is not None:
                    z = vectors.columns(v, rows_in_all, rows).to(device, dtype)
                    torch.mm(z.T, H, out=B[v])
                if tokens is not None and inside is not None:
                    B[v].index_add_(0, tokens[inside] - rows.start, asked[v][inside])
            flat = B.flatten(1)
            T += (flat @ flat.T).to(T)
        return T


def tile_rows(subject: Subject, d: int, vectors: int) -> int:
    return int(max(1, subject.memory // SHARE // (vectors * d * subject.itemsize)))


def table_bytes(t: Tangents, table: Table, vectors: int) -> int:
    """Of what is kept: what is read, what is asked of tokens, and the signs as bits."""
    subject, maps = t.subject, t.subject.survey.maps
    kept = sum((vectors * maps[k].width + maps[k].positions * 2) * t.n for k in table.lookups)
    kept += t.n * maps[table.readout].positions * table.d if table.readout else 0
    return subject.itemsize * kept + t.n * subject.survey.outputs // 8 * vectors


def rows_bytes(subject: Subject, table: Table, vectors: int) -> int:
    """Of some rows of gradients."""
    return tile_rows(subject, table.d, vectors) * vectors * table.d * subject.itemsize


def tables_of(t: Tangents, names: Sequence[str]) -> list[Table]:
    """Those among these parameters that are large, and used in no other way; looked at once, on an example."""
    kept = t.subject.kept
    if ("tables", *names) not in kept:
        kept["tables", *names] = [(table.parameter, table.readout, table.lookups, table.d) for table in _seen(t, names)]
    return [Table(*known) for known in kept["tables", *names]]


def no_table(t: Tangents, parameter: str) -> None:
    """It was taken for one, and is used in another way for some examples."""
    for key, known in t.subject.kept.items():
        if isinstance(key, tuple) and key[0] == "tables":
            known[:] = [table for table in known if table[0] != parameter]


def _seen(t: Tangents, names: Sequence[str]) -> Iterator[Table]:
    subject, survey = t.subject, t.subject.survey
    for name in names:
        maps = survey.structured.get(name, ())
        infos = [survey.maps[k] for k in maps]
        numbers = subject.state[name].numel()
        whole = all(m.entries == numbers and m.layouts for m in infos)
        if not maps or numbers < LARGE or subject.state[name].dim() != 2 or not whole:
            continue
        lookups = tuple(k for k in maps if survey.maps[k].kind == "lookup")
        others = [k for k in maps if k not in lookups]
        d = survey.maps[lookups[0]].shape[0] if lookups else survey.maps[others[0]].shape[-1]
        table = Table(name, others[0] if others else "", lookups, d)
        if len(others) <= 1 and (not others or _writes_all(subject, others[0])) and _as_said(t, table):
            yield table


def _writes_all(subject: Subject, name: str) -> bool:
    """Does a map write all outputs, a token's side by side?"""
    survey = subject.survey
    info, tokens = survey.maps[name], survey.outputs // survey.shape[-1]
    return name in survey.readouts and info.kind == "dense" and len(info.layouts) == 1 and info.shape[0] == survey.shape[-1] \
        and info.positions == tokens and info.width == survey.outputs


def _as_said(t: Tangents, table: Table) -> bool:
    """Is what the outputs ask of the read-out what is asked of the outputs, and are all uses one matrix?"""
    subject = t.subject
    run = recorded(subject, to_device(select(t.x, slice(0, 1)), subject.device), int(t.rows[0]), table.maps)
    W = {c.name: c.map.matrix(c.module, c.weight.detach()) for c in run.calls}
    tall = [W[k].T if k in table.lookups else W[k] for k in table.maps if k in W]
    if len(tall) != len(table.maps) or any(M.data_ptr() != tall[0].data_ptr() or M.stride() != tall[0].stride() for M in tall):
        return False
    if not table.readout:
        return True
    V = torch.randn(run.f.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(run.f)
    return table.itself(subject, run, run.backward(V)[0], V.reshape(1, -1))


def recorded(subject: Subject, x: object, seed: int, maps: Sequence[str]) -> Pass:
    """A pass with gradients of weights, that remembers these maps alone; derivatives of activations are computed once."""
    survey = subject.survey
    run = passed(subject.source.bench(x), survey, seed, None if survey.differentiates else ())
    return replace(run, calls=[c for c in run.calls if c.name in maps])
