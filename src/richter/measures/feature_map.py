"""The features of a layer as functions: FeatureMap. What it reads, diagonalised on some examples, for any others.

    features = FeatureMap.fit(model, x)            # of what the last layer reads; layer="2" for another; x may be a DataLoader
    features.transform(x_test)                     # e_k(x) "n r": of size 1 and uncorrelated on the examples of the fit
    features.intensity                             # rho_k, the strongest first
    features.strongest(x_test, k=2, n=9)           # the numbers of the inputs that excite feature 2 most
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.data import DataLoader

from richter.core import DataError, MemoryBudgetError, ProbeError, SelectionError, parse_bytes, show_bytes
from richter.core.arrays import Array, like
from richter.instrument.capture import Output, quiet, unwrap
from richter.instrument.probe import Probe, inputs_of
from richter.instrument.statistics.features import NOT_FINITE, Rows, Sample, Sums, features_of, paired
from richter.instrument.stream import check_weights, chunks, fitting
from richter.instrument.subject import Subject
from richter.instrument.survey import until_certain

COPIES = 5  # of what is added up (p x p, or the rows where these are fewer), when it is diagonalised
Result = TypeVar("Result")
NOT_OURS = (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, IndexError, BadZipFile)  # what numpy raises


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """The diagonalised features of a layer; made by ``fit``. They are those of the model as it is when it is asked, along the
    directions of the fit."""

    model: nn.Module
    layer: str
    directions: Float[Tensor, "p r"]  # u_k, the columns
    intensity: Float[Tensor, " r"]  # rho_k, the largest first
    output: Output | None = None
    memory: str | float = "2GiB"

    @classmethod
    def fit(cls, model: nn.Module, data: Any, layer: str | None = None, *, output: Output | None = None,
            memory: str | float = "2GiB") -> FeatureMap:
        """Of the examples ``data``: inputs as the model takes them, a Probe (masked positions do not count), or a DataLoader, of
        which all batches are read, one at a time. ``layer``: a name as in a snapshot; the last one if it is left out. Features
        without intensity (dead or duplicated ones) are left out."""
        model, name, room = unwrap(model), layer, parse_bytes(memory)
        sums, examples = Sums(), 0
        with closing(_parts(data)) as parts:
            for probe, n in parts:
                use = partial(_summed, room=room, examples=examples, n=n)
                name, more = _visited(model, probe, name, output, memory, use)
                sums.merge(more)
                examples += n
        if examples < 2:
            raise ProbeError(f"FeatureMap.fit: {('no', 'one')[examples]} example was given, and features are told apart by how "
                             f"they differ between examples. Give some for each feature of the layer.")
        assert name is not None  # some part was visited
        rho, U = _diagonalised(sums)
        if not U.shape[1]:
            raise SelectionError(f"layer {name!r} reads zeros on every example: it has no features. Has it died, or is it not "
                                 f"reached by these examples?")
        signs = U.gather(0, U.abs().argmax(0, keepdim=True)).sign()  # which of e and -e: the largest entry of u is positive
        return cls(model, name, U * signs, rho, output, memory)

    def transform(self, data: Any) -> Array:
        """e_k(x) "n r" of some inputs, or of a DataLoader; "n s r" of a layer that reads s positions, 0 at those that a Probe
        masks. numpy in, numpy out."""
        def features(subject: Subject, name: str) -> Tensor:
            return torch.cat([self._along(h, real) for h, real in _read(subject, name)])

        with closing(_parts(data)) as parts:
            e = torch.cat([_visited(self.model, probe, self.layer, self.output, self.memory, features)[1][:n]
                           for probe, n in parts])
        x = data.x if isinstance(data, Probe) else e if isinstance(data, DataLoader) else data
        return like(e[:, 0] if e.shape[1] == 1 else e, x)

    def _along(self, h: Float[Tensor, "n s p"], real: Bool[Tensor, "n s"] | None) -> Float[Tensor, "n s r"]:
        if h.shape[-1] != len(self.directions):
            raise DataError(f"layer {self.layer!r} of this model reads {h.shape[-1]} features, and the map was fitted to "
                            f"{len(self.directions)}: it is of another network. Fit one of this model.")
        e = h @ self.directions.to(h) / self.intensity.to(h).sqrt()
        return e if real is None else e * real.to(e)[..., None]

    def strongest(self, data: Any, k: int = 0, n: int = 9) -> list[int]:
        """The numbers of the ``n`` inputs in which |e_k| is largest (at any position), the largest first. ``k`` counts from 0."""
        if not 0 <= k < len(self.intensity):
            raise SelectionError(f"feature {k} of {len(self.intensity)}: they count from 0, the strongest first.")
        if n < 1:
            raise SelectionError(f"n={n}: how many inputs are wanted, one at least.")
        e = torch.as_tensor(self.transform(data))[..., k].abs()
        return e.reshape(len(e), -1).amax(1).argsort(descending=True, stable=True)[:n].tolist()

    def save(self, path: str | Path) -> None:
        """Directions and intensities, without the model: numbers, as numpy keeps them."""
        with Path(path).open("wb") as file:
            np.savez(file, layer=np.array(self.layer), directions=self.directions.cpu().numpy(),
                     intensity=self.intensity.cpu().numpy())

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, *, output: Output | None = None,
             memory: str | float = "2GiB") -> FeatureMap:
        """What ``save`` has written, for the model it is of."""
        try:
            with np.load(path, allow_pickle=False) as kept:
                layer, directions, intensity = str(kept["layer"]), kept["directions"], kept["intensity"]
        except NOT_OURS as why:
            raise DataError(f"{path} holds no feature map ({why}): give a file that FeatureMap.save has written.") from why
        if directions.ndim != 2 or intensity.shape != directions.shape[1:] or not (intensity > 0).all():
            raise DataError(f"{path} holds directions {directions.shape} and intensities {intensity.shape}: one positive "
                            f"intensity is needed for each direction.")
        U, rho = (torch.from_numpy(a).double() for a in (directions, intensity))
        return cls(unwrap(model), layer, U, rho, output, memory)


def _parts(data: Any) -> Generator[tuple[Probe, int], None, None]:
    """Probes of the examples that are meant, a batch at a time, and how many of their examples count. Closed, it leaves a loader
    and all random streams as they were. A probe has two examples at least: one alone is given twice."""
    if isinstance(data, Probe):
        yield data, data.n
        return
    for x in inputs_of(data) if isinstance(data, DataLoader) else (data,):
        twice = _twice(x)
        probe = Probe(x if twice is None else twice, None)
        yield probe, probe.n if twice is None else 1


def _twice(x: Any) -> Any:
    """One example, two times; None where there are more or none, or where it is no array."""
    if isinstance(x, (dict, tuple)):
        parts = [_twice(v) for v in (x.values() if isinstance(x, dict) else x)]
        if not parts or any(v is None for v in parts):
            return None
        return dict(zip(x, parts, strict=True)) if isinstance(x, dict) else tuple(parts)
    if not isinstance(x, (Tensor, np.ndarray)) or x.ndim == 0 or len(x) != 1:
        return None
    return torch.cat([x, x]) if isinstance(x, Tensor) else np.concatenate([x, x])


def _summed(subject: Subject, name: str, room: int, examples: int, n: int) -> Sums:
    """Of the first ``n`` examples, the rows that count; what is added up of them and of ``examples`` before must have room."""
    info = subject.survey.maps[name]
    p, rows = features_of(info), info.positions * (examples + n)
    need = 8 * COPIES * p * min(p, rows)
    if need > room:
        raise MemoryBudgetError(f"memory={show_bytes(room)} has no room for the {p:,} features of layer {name!r} on {rows:,} "
                                f"rows: {show_bytes(need)} are needed. Give fewer examples, another layer, or "
                                f"memory={show_bytes(need)!r}.")
    sums, seen = Sums(), 0
    for h, real in _read(subject, name):
        h, seen = h[:n - seen], seen + len(h)
        if len(h):
            sums.add(h.flatten(0, 1) if real is None else h[real[:len(h)]])
    return sums


def _diagonalised(sums: Sums) -> tuple[Float[Tensor, " r"], Float[Tensor, "p r"]]:
    """Intensities and directions; of fewer rows than features in the span of the rows."""
    if sums.settled is None:
        Z = torch.cat(sums.waiting)
        sample, _ = paired(Rows(Z, Z.shape[1], one_hot=False))
    else:
        sample = Sample(sums.total, len(sums.total.mean), one_hot=False)
    rho, U = sample.spectrum
    return rho[:U.shape[1]], U if sample.basis is None else sample.basis @ U


def _visited(model: nn.Module, probe: Probe, layer: str | None, output: Output | None, memory: str | float,
             use: Callable[[Subject, str], Result]) -> tuple[str, Result]:
    """``use`` of a model on some examples, and the name of the layer. Captures are audited as in a measurement."""
    check_weights(model)
    subject = Subject(model, probe, None, None, parse_bytes(memory), output)
    with quiet(model):
        subject.renew()
        return until_certain(lambda: (name := _layer(subject, layer), use(subject, name)), subject.amend)


def _layer(subject: Subject, layer: str | None) -> str:
    """The map that is meant."""
    maps = [k for k in subject.maps if subject.survey.maps[k].kind != "lookup"]
    last = sorted(subject.survey.readouts & set(maps))
    if layer is None and len(last) != 1:
        raise SelectionError(f"{len(last)} layers write the outputs ({', '.join(last) or 'none is a linear map'}): say which "
                             f"one's features are meant, layer=. There are {', '.join(maps)}.")
    name = last[0] if layer is None else layer
    if name not in maps:
        raise SelectionError(f"layer={name!r} reads no features. Layers that do: {', '.join(maps)}.")
    return name


def _read(subject: Subject, name: str) -> Iterator[tuple[Float[Tensor, "n s p"], Bool[Tensor, "n s"] | None]]:
    """What a map reads, in float64, some examples at a time, and which positions count; None: all of them."""
    survey, item = subject.survey, subject.itemsize
    each = item * (survey.graph + survey.maps[name].unfolded) + 8 * survey.maps[name].positions * survey.maps[name].shape[-1]
    size = fitting(subject.memory, each, min(subject.probe.chunk, subject.probe.n), survey.drawn) if name in survey.batched else 1
    for chunk in chunks(subject.network, subject.x, size, maps=[name], title="reading features"):
        if not chunk.reaches(name):
            raise SelectionError(f"not every example reaches layer {name!r}, so that it has no features of the others.")
        h = chunk.reads(name).detach().flatten(2).to(subject.home, torch.float64)
        chunk.look()
        if not torch.isfinite(h).all():
            raise SelectionError(f"layer {name!r}: {NOT_FINITE}. Has the training diverged?")
        real = subject.real(name, chunk.rows, h.shape[1])
        if name in subject.refused:
            raise SelectionError(f"layer {name!r}: {subject.refused[name]}")
        yield h, None if real is None else real.bool().to(h.device)
