"""FeatureMap: the features of a layer as functions, diagonalised on some examples and evaluated on any others.

    features = FeatureMap.fit(model, x)            # inputs of the last layer; layer="2" for another; x may be a DataLoader
    features.transform(x_test)                     # e_k(x) "n r": normalised and uncorrelated on the examples of the fit
    features.intensity                             # rho_k, strongest first
    features.strongest(x_test, k=2, n=9)           # indices of the inputs that activate feature 2 most
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
from richter.instrument.statistics.features import NOT_FINITE, FeatureMoments, FeatureSums, SampleRows, features_of, paired
from richter.instrument.stream import check_weights, chunks, fitting
from richter.instrument.subject import Subject
from richter.instrument.survey import until_certain

COPIES = 5  # copies of the accumulated matrix (p x p, or rows x rows if these are fewer) held while it is diagonalised
Result = TypeVar("Result")
# errors that numpy raises for files of other kinds
NOT_OURS = (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, IndexError, BadZipFile)


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """The diagonalised features of a layer; made by ``fit``. They use the model's weights at the time of the call, and the
    directions of the fit."""

    model: nn.Module
    layer: str
    directions: Float[Tensor, "p r"]  # u_k, as columns
    intensity: Float[Tensor, " r"]  # rho_k, largest first
    output: Output | None = None
    memory: str | float = "2GiB"

    @classmethod
    def fit(cls, model: nn.Module, data: Any, layer: str | None = None, *, output: Output | None = None,
            memory: str | float = "2GiB") -> FeatureMap:
        """Diagonalise the features of a layer on ``data``: model inputs, a Probe (masked positions do not count), or a
        DataLoader, which is read completely, one batch at a time. ``layer``: a name as in a snapshot; default: the last one.
        Features without intensity (dead or duplicated ones) are left out."""
        model, name, room = unwrap(model), layer, parse_bytes(memory)
        sums, examples = FeatureSums(), 0
        with closing(_parts(data)) as parts:
            for probe, n in parts:
                use = partial(_summed, room=room, examples=examples, n=n)
                name, more = _visited(model, probe, name, output, memory, use)
                sums.merge(more)
                examples += n
        if examples < 2:
            raise ProbeError(f"FeatureMap.fit: {('no', 'one')[examples]} example was given, but features are differences between "
                             f"examples. Give several for each feature of the layer.")
        assert name is not None  # at least one part was visited
        rho, U = _diagonalised(sums)
        if not U.shape[1]:
            raise SelectionError(f"layer {name!r} reads zeros on every example, so it has no features. Is it dead, or is it not "
                                 f"reached by these examples?")
        # choose the sign of e so that the largest entry of u is positive
        signs = U.gather(0, U.abs().argmax(0, keepdim=True)).sign()
        return cls(model, name, U * signs, rho, output, memory)

    def transform(self, data: Any) -> Array:
        """Return e_k(x) "n r" of some inputs or of a DataLoader; "n s r" if the layer reads s positions, with 0 at positions that
        a Probe masks. numpy in, numpy out."""
        def features(subject: Subject, name: str) -> Tensor:
            return torch.cat([self._along(h, real) for h, real in _read(subject, name)])

        with closing(_parts(data)) as parts:
            e = torch.cat([_visited(self.model, probe, self.layer, self.output, self.memory, features)[1][:n]
                           for probe, n in parts])
        x = data.x if isinstance(data, Probe) else e if isinstance(data, DataLoader) else data
        return like(e[:, 0] if e.shape[1] == 1 else e, x)

    def _along(self, h: Float[Tensor, "n s p"], real: Bool[Tensor, "n s"] | None) -> Float[Tensor, "n s r"]:
        """Features e_k of the inputs of the layer; zero at masked positions."""
        if h.shape[-1] != len(self.directions):
            raise DataError(f"layer {self.layer!r} of this model reads {h.shape[-1]} features, but the map was fitted to "
                            f"{len(self.directions)}: it belongs to another network. Fit a map to this model.")
        e = h @ self.directions.to(h) / self.intensity.to(h).sqrt()
        return e if real is None else e * real.to(e)[..., None]

    def strongest(self, data: Any, k: int = 0, n: int = 9) -> list[int]:
        """Return indices of the ``n`` inputs with the largest |e_k| (at any position), largest first. ``k`` counts from 0."""
        if not 0 <= k < len(self.intensity):
            raise SelectionError(f"feature {k} of {len(self.intensity)} does not exist: features count from 0, strongest first.")
        if n < 1:
            raise SelectionError(f"n={n}: the number of inputs must be at least 1.")
        e = torch.as_tensor(self.transform(data))[..., k].abs()
        return e.reshape(len(e), -1).amax(1).argsort(descending=True, stable=True)[:n].tolist()

    def save(self, path: str | Path) -> None:
        """Save directions and intensities as numpy arrays, without the model."""
        with Path(path).open("wb") as file:
            np.savez(file, layer=np.array(self.layer), directions=self.directions.cpu().numpy(),
                     intensity=self.intensity.cpu().numpy())

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, *, output: Output | None = None,
             memory: str | float = "2GiB") -> FeatureMap:
        """Load a file written by ``save``, for the model that it was fitted to."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                layer, directions, intensity = str(arrays["layer"]), arrays["directions"], arrays["intensity"]
        except NOT_OURS as why:
            raise DataError(f"{path} contains no feature map ({why}): give a file written by FeatureMap.save.") from why
        if directions.ndim != 2 or intensity.shape != directions.shape[1:] or not (intensity > 0).all():
            raise DataError(f"{path} contains directions {directions.shape} and intensities {intensity.shape}: each direction "
                            f"needs one positive intensity.")
        U, rho = (torch.from_numpy(a).double() for a in (directions, intensity))
        return cls(unwrap(model), layer, U, rho, output, memory)


def _parts(data: Any) -> Generator[tuple[Probe, int], None, None]:
    """Yield probes of the data, one batch at a time, and how many of their examples count. On close, a loader and all random
    streams are restored. A probe needs two examples, so a single one is given twice."""
    if isinstance(data, Probe):
        yield data, data.n
        return
    for x in inputs_of(data) if isinstance(data, DataLoader) else (data,):
        twice = _twice(x)
        probe = Probe(x if twice is None else twice, None)
        yield probe, probe.n if twice is None else 1


def _twice(x: Any) -> Any:
    """Repeat a single example; None if there are more or none, or if it is not an array."""
    if isinstance(x, (dict, tuple)):
        parts = [_twice(v) for v in (x.values() if isinstance(x, dict) else x)]
        if not parts or any(v is None for v in parts):
            return None
        return dict(zip(x, parts, strict=True)) if isinstance(x, dict) else tuple(parts)
    if not isinstance(x, (Tensor, np.ndarray)) or x.ndim == 0 or len(x) != 1:
        return None
    return torch.cat([x, x]) if isinstance(x, Tensor) else np.concatenate([x, x])


def _summed(subject: Subject, name: str, room: int, examples: int, n: int) -> FeatureSums:
    """Accumulate the rows of the first ``n`` examples that count. There must be memory for these and ``examples`` before them."""
    info = subject.survey.maps[name]
    p, rows = features_of(info), info.positions * (examples + n)
    need = 8 * COPIES * p * min(p, rows)
    if need > room:
        raise MemoryBudgetError(f"memory={show_bytes(room)} is too small for the {p:,} features of layer {name!r} on {rows:,} "
                                f"rows: it needs {show_bytes(need)}. Give fewer examples, another layer, or "
                                f"memory={show_bytes(need)!r}.")
    sums, rows_done = FeatureSums(), 0
    for h, real in _read(subject, name):
        h, rows_done = h[:n - rows_done], rows_done + len(h)
        if len(h):
            sums.add(h.flatten(0, 1) if real is None else h[real[:len(h)]])
    return sums


def _diagonalised(sums: FeatureSums) -> tuple[Float[Tensor, " r"], Float[Tensor, "p r"]]:
    """Return intensities and directions; with fewer rows than features, in the span of the rows."""
    if sums.settled is None:
        Z = torch.cat(sums.waiting)
        sample, _ = paired(SampleRows(Z, Z.shape[1], one_hot=False))
    else:
        sample = FeatureMoments(sums.total, len(sums.total.mean), one_hot=False)
    rho, U = sample.spectrum
    return rho[:U.shape[1]], U if sample.basis is None else sample.basis @ U


def _visited(model: nn.Module, probe: Probe, layer: str | None, output: Output | None, memory: str | float,
             use: Callable[[Subject, str], Result]) -> tuple[str, Result]:
    """Call ``use`` on a model with some examples; return its result and the name of the layer. Captures are audited as in a
    measurement."""
    check_weights(model)
    subject = Subject(model, probe, None, None, parse_bytes(memory), output)
    with quiet(model):
        subject.renew()
        return until_certain(lambda: (name := _layer(subject, layer), use(subject, name)), subject.amend)


def _layer(subject: Subject, layer: str | None) -> str:
    """Return the name of the layer to analyse."""
    maps = [k for k in subject.maps if subject.survey.maps[k].kind != "lookup"]
    last = sorted(subject.survey.readouts & set(maps))
    if layer is None and len(last) != 1:
        raise SelectionError(f"{len(last)} layers write the outputs ({', '.join(last) or 'none is a linear map'}): choose one "
                             f"with layer=. Layers: {', '.join(maps)}.")
    name = last[0] if layer is None else layer
    if name not in maps:
        raise SelectionError(f"layer={name!r} reads no features. Layers that do: {', '.join(maps)}.")
    return name


def _read(subject: Subject, name: str) -> Iterator[tuple[Float[Tensor, "n s p"], Bool[Tensor, "n s"] | None]]:
    """Yield a map's inputs in float64, some examples at a time, and which positions count (None: all)."""
    survey, item = subject.survey, subject.itemsize
    each = item * (survey.graph + survey.maps[name].unfolded) + 8 * survey.maps[name].positions * survey.maps[name].shape[-1]
    size = fitting(subject.memory, each, min(subject.probe.chunk, subject.probe.n), survey.drawn) if name in survey.batched else 1
    for chunk in chunks(subject.network, subject.x, size, maps=[name], title="reading features"):
        if not chunk.reaches(name):
            raise SelectionError(f"some examples do not reach layer {name!r}, so their features are undefined.")
        h = chunk.reads(name).detach().flatten(2).to(subject.home, torch.float64)
        chunk.look()
        if not torch.isfinite(h).all():
            raise SelectionError(f"layer {name!r}: {NOT_FINITE}. Has the training diverged?")
        real = subject.masks.real(name, chunk.rows, h.shape[1])
        if name in subject.masks.refused:
            raise SelectionError(f"layer {name!r}: {subject.masks.refused[name]}")
        yield h, None if real is None else real.bool().to(h.device)
