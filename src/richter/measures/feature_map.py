"""The features of a layer as functions: FeatureMap. What it reads, diagonalised on some examples, for any others.

    features = FeatureMap.fit(model, x)            # of what the last layer reads; layer="2" for another
    features.transform(x_test)                     # e_k(x) "n r": of size 1 and uncorrelated on the examples of the fit
    features.intensity                             # rho_k, the strongest first
    features.strongest(x_test, k=2, n=9)           # the numbers of the inputs that excite feature 2 most
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from richter.core import DataError, SelectionError, parse_bytes
from richter.core.arrays import Array, like
from richter.instrument.capture import Output, quiet, unwrap
from richter.instrument.checks import check_weights
from richter.instrument.probe import Probe
from richter.instrument.statistics.rows import NOT_FINITE
from richter.instrument.statistics.samples import Sample
from richter.instrument.stream import chunks, fitting
from richter.instrument.subject import Subject
from richter.instrument.survey import MOST_DOUBTS, Doubt
from richter.linalg import Scatter

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
        """Of the examples ``data``: inputs as the model takes them, or a Probe. ``layer``: a name as in a snapshot; the last one
        if it is left out. Features without intensity (dead or duplicated ones) are left out."""
        model = unwrap(model)

        def scatter(subject: Subject, name: str) -> Scatter:
            parts = (Scatter.of(h.flatten(0, -2)) for h in _read(subject, name))
            total = next(parts)
            for part in parts:
                total = total + part
            return total

        name, total = _visited(model, data, layer, output, memory, scatter)
        rho, U = Sample(total, len(total.mean), one_hot=False).spectrum
        if not U.shape[1]:
            raise SelectionError(f"layer {name!r} reads zeros on every example: it has no features. Has it died, or is it not "
                                 f"reached by these examples?")
        signs = U.gather(0, U.abs().argmax(0, keepdim=True)).sign()  # which of e and -e: the largest entry of u is positive
        return cls(model, name, U * signs, rho[:U.shape[1]], output, memory)

    def transform(self, data: Any) -> Array:
        """e_k(x) "n r" of some inputs; "n s r" of a layer that reads s positions. numpy in, numpy out."""
        def features(subject: Subject, name: str) -> Tensor:
            return torch.cat([h @ self.directions.to(h) / self.intensity.to(h).sqrt() for h in _read(subject, name)])

        x = data.x if isinstance(data, Probe) else data
        e = _visited(self.model, data, self.layer, self.output, self.memory, features)[1]
        return like(e[:, 0] if e.shape[1] == 1 else e, x)

    def strongest(self, data: Any, k: int = 0, n: int = 9) -> list[int]:
        """The numbers of the ``n`` inputs in which |e_k| is largest (at any position), the largest first. ``k`` counts from 0."""
        if not 0 <= k < len(self.intensity):
            raise SelectionError(f"feature {k} of {len(self.intensity)}: they count from 0, the strongest first.")
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


def _visited(model: nn.Module, data: Any, layer: str | None, output: Output | None, memory: str | float,
             use: Callable[[Subject, str], Result]) -> tuple[str, Result]:
    """``use`` of a model on some examples, and the name of the layer. What is captured is looked at as in a measurement."""
    probe = data if isinstance(data, Probe) else Probe(data, None)
    check_weights(model)
    subject = Subject(model, probe, None, None, parse_bytes(memory), output)
    with quiet(model):
        subject.renew()
        for left in range(MOST_DOUBTS, -1, -1):
            name = _layer(subject, layer)
            try:
                return name, use(subject, name)
            except Doubt as doubt:
                if not left:
                    raise
                subject.amend(doubt)
    raise AssertionError("the last doubt is raised")


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


def _read(subject: Subject, name: str) -> Iterator[Float[Tensor, "n s p"]]:
    """What a map reads, in float64, some examples at a time."""
    survey, item = subject.survey, subject.itemsize
    each = item * (survey.graph + survey.maps[name].unfolded) + 8 * survey.maps[name].positions * survey.maps[name].shape[-1]
    size = fitting(subject.memory, each, min(subject.probe.chunk, subject.probe.n), survey.drawn) if name in survey.batched else 1
    for chunk in chunks(subject.source, subject.x, size, maps=[name], title="reading features"):
        recording = chunk.recording
        if name not in recording.where:
            raise SelectionError(f"not every example reaches layer {name!r}, so that it has no features of the others.")
        h = recording.reads(name).detach().flatten(2).to(subject.home, torch.float64)
        recording.look()
        if not torch.isfinite(h).all():
            raise SelectionError(f"layer {name!r}: {NOT_FINITE}. Has the training diverged?")
        yield h
