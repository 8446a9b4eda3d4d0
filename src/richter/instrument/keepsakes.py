"""What a run keeps of its probe besides numbers, if it is asked to: Gram matrices of what each layer reads, from which steps and
runs are compared afterwards, and small pictures of the inputs, to show what excites a feature.

Both are bounded: Gram matrices of ``keep_features`` rows (at most MOST), pictures of at most PICTURES examples and SIDE pixels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from richter.core import WHOLE, SelectionError
from richter.core.arrays import fingerprint
from richter.core.likeness import GRAM, INPUTS
from richter.instrument.capture import Output, select
from richter.instrument.probe import Probe
from richter.instrument.reading import Layers, Reader, reading
from richter.instrument.stream import fitting
from richter.instrument.survey import MOST_DOUBTS, Doubt
from richter.runs import Run

MOST = 1024  # rows of a Gram matrix: 2 MiB for each layer and step
PICTURES, SIDE = 256, 64  # examples, and pixels of a side
Arrays = dict[tuple[str, str], NDArray[Any]]


class Keepsakes:
    """Of a model on some examples of a probe. ``take()`` reads the model as it is now."""

    def __init__(self, model: nn.Module, probe: Probe, features: int, inputs: bool | tuple[int, ...] = False,
                 layers: Layers = None, memory: int = 2**31, output: Output | None = None) -> None:
        if inputs and not features:
            raise SelectionError(f"keep_inputs={inputs}: pictures are kept of the examples whose features are kept, to show "
                                 f"which of them excite one. Say of how many: keep_features=64.")
        if not isinstance(features, int) or isinstance(features, bool) or not 2 <= features <= MOST:
            raise SelectionError(f"keep_features={features}: how many examples of the probe the kept Gram matrices are of, from "
                                 f"2 to {MOST}. 64 say most, and take 8 KiB for each layer and step.")
        self.model, self.whole, self.layers, self.memory, self.output = model, probe, layers, memory, output
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
        self.rows = replace(probe, kernel=features).kernel_rows()
        self.pictures = _pictures(select(probe.x, self.rows[:PICTURES]), inputs) if inputs else None
        self._reader: Reader | None = None

    def about(self) -> dict[str, Any]:
        """What the run says of them: which examples, as a digest, how many rows and whether these are examples or tokens, their
        classes, if they have some, and the layers by depth."""
        assert self._reader is not None
        y = self.whole.y
        classes = None if y is None or y.dim() != 1 or y.is_floating_point() else y[self.rows].tolist()
        return {"examples": fingerprint(select(self.whole.x, self.rows))[:32], "rows": sum(self._reader.counts()),
                "kind": "tokens" if self._reader.tokens else "examples", "classes": classes, "layers": self._reader.names}

    def news(self, run: Run) -> dict[str, Any] | None:
        """What a run has to be told of them; None if it knows. What it says is true of all of them: those of a run that is
        resumed are of the same examples."""
        known, facts = run.about.get("features"), self.about()
        if known is not None and known.get("examples") != facts["examples"]:
            raise SelectionError(f"the run {run.path} has kept features of {known.get('rows')} rows, and not of the same "
                                 f"examples as this Observer, so that they could not be compared. Resume with the keep_features= "
                                 f"and the Probe that it began with.")
        return facts if known is None else None

    def take(self, known: Collection[str] = ()) -> Arrays:
        """Centred Gram matrices by layer; the inputs too, if no array of their name is ``known``."""
        kept: dict[str, Tensor] = {}
        with reading(self.model):
            for left in range(MOST_DOUBTS, -1, -1):
                try:
                    kept = self._grams()
                    break
                except Doubt as doubt:
                    if not left or self._reader is None:
                        raise
                    self._reader.amend(doubt)
        arrays: Arrays = {(k, GRAM): _symmetric(K).float().cpu().numpy() for k, K in kept.items()}
        if self.pictures is not None and INPUTS not in known:
            arrays[WHOLE, INPUTS] = self.pictures
        return arrays

    def _grams(self) -> dict[str, Tensor]:
        """From pairs of blocks, of which there is one where all have room."""
        reader = self._opened()
        n = reader.subject.probe.n
        size = fitting(self.memory // 2, 2 * reader.each, n, reader.subject.survey.drawn)
        return dict(zip(reader.names, grams(reader, size), strict=True))

    def _opened(self) -> Reader:
        """The reader, made anew for the weights of now; of tokens fewer examples have as many rows."""
        if self._reader is None:
            reader = self._made()
            if reader.tokens:
                self.rows = self.rows[:max(1, len(self.rows) // reader.subject.survey.shape[0])]
                reader = self._made()
            self._reader = reader
        else:
            self._reader.renew()
        return self._reader

    def _made(self) -> Reader:
        mask = None if self.whole.mask is None else self.whole.mask[self.rows]
        x = select(self.whole.inputs(self.dtype), self.rows)
        probe = Probe(x, None, mask=mask, chunk=self.whole.chunk)
        return Reader(self.model, probe, layers=self.layers, memory=self.memory, output=self.output)


def grams(reader: Reader, size: int, over: Any = None) -> Float[Tensor, "layer n n"]:
    """Centred Gram matrices of every layer, from pairs of blocks of ``size`` examples; ``over``: a bar around the blocks. Zero
    for a layer that reads the same of every example. Features are shifted by their mean over the first block, which changes
    nothing but the rounding."""
    n, ends = reader.subject.probe.n, np.cumsum([0, *reader.counts()])
    rows = int(ends[-1])
    whole = torch.zeros(len(reader.names), rows, rows, dtype=torch.float64, device=reader.subject.home)
    shift: dict[str, Tensor] = {}
    sizes = dict.fromkeys(reader.names, 0.0)  # sums of squares, as they are read
    starts = range(0, n, size)
    for i in starts if over is None else over(starts):
        ((here, X),) = reader.blocks(size, slice(i, min(i + size, n)))
        shift = shift or {k: x.mean(0) for k, x in X.items()}
        sizes = {k: size + X[k].square().sum().item() for k, size in sizes.items()}
        X = {k: x - shift[k] for k, x in X.items()}
        later = reader.blocks(size, slice(here.stop, n)) if here.stop < n else ()
        for there, Y in itertools.chain(((here, None),), later):
            a, b = slice(ends[here.start], ends[here.stop]), slice(ends[there.start], ends[there.stop])
            for K, k in zip(whole, reader.names, strict=True):
                block = X[k] @ (X[k] if Y is None else Y[k] - shift[k]).T
                K[a, b], K[b, a] = block, block.T
    for k, K in zip(reader.names, whole, strict=True):  # in place
        means = K.mean(0)
        K += means.mean() - means - means[:, None]
        if reader.constant(K.trace().item(), sizes[k]):
            K.zero_()
    return whole


def _symmetric(K: Tensor) -> Tensor:
    """To the last bit: half of it is kept."""
    return (K + K.T) / 2


def _pictures(x: Any, shape: bool | tuple[int, ...]) -> NDArray[np.uint8]:
    """Inputs as small pictures "n c h w" of bytes; ``shape`` of one picture, where the inputs are flat."""
    flat = isinstance(x, Tensor) and x.dim() > 1 and isinstance(shape, (tuple, list))
    if flat and x[0].numel() == math.prod(shape):  # type: ignore[arg-type]
        x = x.reshape(len(x), *shape)  # type: ignore[misc]
    real = isinstance(x, Tensor) and x.is_floating_point()
    if not real or x.dim() not in (3, 4) or (x.dim() == 4 and x.shape[1] not in (1, 3)):
        seen = f"a tensor {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise SelectionError(f"keep_inputs={shape}: the inputs are {seen}, which are no pictures [n, 1 or 3, height, width] or "
                             f"[n, height, width]. Say the shape of one, where they are flat: keep_inputs=(1, 28, 28).")
    x = (x if x.dim() == 4 else x[:, None]).detach().float().cpu()
    if max(x.shape[2:]) > SIDE:
        factor = SIDE / max(x.shape[2:])
        x = F.interpolate(x, size=[max(1, round(factor * k)) for k in x.shape[2:]], mode="area")
    low, high = x.min(), x.max()
    return ((x - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8).numpy()
