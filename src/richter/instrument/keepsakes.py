"""Data on the probe that a run keeps besides numbers, on request: Gram matrices of what each layer reads, from which steps and
runs are compared afterwards, and small pictures of the inputs, to show what excites a feature.

Both are bounded: Gram matrices of ``keep_features`` rows (at most MOST), pictures of at most PICTURES examples and SIDE pixels.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from richter.core import WHOLE, CaptureError, DivergedError, SelectionError, parse_bytes
from richter.core.arrays import fingerprint
from richter.core.likeness import GRAM, INPUTS
from richter.instrument.capture import Output, Pass, check_finite, count, quiet, select, state_of, to_device, unwrap
from richter.instrument.probe import Probe
from richter.instrument.statistics.features import DIGITS
from richter.instrument.statistics.movement import masked_read, reading_apart
from richter.instrument.stream import check_state, check_weights, finite, fitting, grouped, steps
from richter.instrument.subject import Subject
from richter.instrument.survey import Doubt, check_calls, passed, until_certain
from richter.runs import Run

# ------------------------------------------------------------------------------------------------------------- reading
# What the layers of a network read on a probe, and its outputs, as matrices of features: some examples at a time.
#
#     with reading(model):
#         reader = Reader(model, probe)
#         for rows, features in reader.blocks(64):      # features[name]: "n p"
#             ...
#
# Features of a layer are what it reads: of a convolution the whole picture, each number once. Where every layer reads tokens,
# each of which has an output of its own, the rows are tokens (those that are not masked); else they are examples, with their
# positions side by side.

OUTPUTS = "outputs"  # the name of what the whole network says
FEATURED = ("dense", "grouped")  # kinds of maps that read features; a lookup reads indices
Layers = str | Sequence[str] | Callable[[str], bool] | None


@contextlib.contextmanager
def reading(*models: nn.Module) -> Iterator[None]:
    """Context in which features of these models are read; the models are restored. Two of them may be the same object."""
    with contextlib.ExitStack() as stack:
        for model in {id(m): m for m in map(unwrap, models)}.values():
            stack.enter_context(quiet(model))
        yield


class Reader:
    """One network on a probe; ``weights``, a state_dict, replace the model's own. It is used inside ``reading``."""

    def __init__(self, model: nn.Module, probe: Probe, *, weights: Mapping[str, Tensor] | None = None, layers: Layers = None,
                 memory: str | float = "2GiB", output: Output | None = None) -> None:
        model = unwrap(model)
        check_weights(model)
        self.weights = None if weights is None else check_state(model, weights, "weights")
        chosen = [layers] if isinstance(layers, str) else layers
        self.subject = Subject(model, probe, None, chosen, parse_bytes(memory), output)
        self.renew()

    def renew(self) -> None:
        """Read the weights again after training steps."""
        self.subject.renew()
        self._look()

    def amend(self, doubt: Doubt) -> None:
        """Leave out a map that reads later examples in another way than the first ones."""
        self.subject.amend(doubt)
        self._look()

    def _look(self) -> None:
        """Find the layers that have features, and how many, by a pass of the first examples."""
        subject, survey, few = self.subject, self.subject.survey, self.subject.few
        self.state = subject.state if self.weights is None else state_of(subject.model, self.weights, subject.copied)
        featured = [k for k in subject.maps if survey.maps[k].kind in FEATURED]
        maps, shape = [k for k in survey.batched if k in featured], survey.shape
        self.tokens = len(shape) == 2 and shape[0] > 1 and bool(maps) and all(
            survey.maps[k].positions == shape[0] for k in maps)  # every layer has as many positions as there are outputs in a row
        self.widths: dict[str, int] = {}
        self.maps = reading_apart(grouped(self._pass(few, 0).calls), maps)
        self.output = OUTPUTS if OUTPUTS not in self.maps else f"{OUTPUTS} of the model"
        self.widths = {k: X.shape[1] for k, X in self._features(few, slice(0, count(few))).items()}
        self.names = list(self.widths)  # in the order of the forward pass; of layers that read the same the first; outputs last
        self.notes = {k: "it can only be read one example at a time" for k in featured if k not in maps}  # no features, and why
        self.notes |= {k: "its inputs differ in size between examples, or were overwritten" for k in self.maps
                       if k not in self.widths} | subject.masks.refused
        if len(self.widths) == 1 and subject.layers is not None:
            raise SelectionError(f"layers={subject.layers!r}: none of them reads features. Lookups read indices; this model has: "
                                 f"{', '.join(survey.maps)}.")

    @property
    def each(self) -> int:
        """Bytes of one example: its graph, and its features in double precision."""
        positions = self.subject.survey.shape[0] if self.tokens else 1
        return self.subject.itemsize * self.subject.survey.graph + 8 * positions * sum(self.widths.values())

    def counts(self) -> list[int]:
        """Number of feature rows of each example."""
        mask, shape = self.subject.probe.mask, self.subject.survey.shape
        if self.tokens and mask is not None:
            return [int(k) for k in mask.sum(1)]
        return [shape[0] if self.tokens else 1] * self.subject.probe.n

    def constant(self, spread: float, size: float) -> bool:
        """Return whether features with sum of squares ``size``, and ``spread`` after centring, are equal in all rows up to
        rounding."""
        return not spread > (DIGITS * torch.finfo(self.subject.network.dtype).eps) ** 2 * size

    def blocks(self, size: int, rows: slice | None = None) -> Iterator[tuple[slice, dict[str, Float[Tensor, "n p"]]]]:
        """Yield blocks of the examples (or of ``rows``): their slice, and their features in double precision. A ``Doubt`` is
        raised to be passed to ``amend``."""
        first, last = (0, self.subject.probe.n) if rows is None else (rows.start, rows.stop)
        for r in steps(last - first, size):
            here = slice(first + r.start, first + r.stop)
            yield here, self._features(to_device(select(self.subject.x, here), self.subject.device), here)

    def _pass(self, x: Any, seed: int) -> Pass:
        """Run the network on some inputs, and check its calls and outputs."""
        network = replace(self.subject.network, state=self.state)
        run = passed(network, x, seed, None)
        check_calls(network, x, run.calls)
        check_finite(run.f)
        return run

    def _features(self, x: Any, rows: slice) -> dict[str, Tensor]:
        """Features of some examples, by layer."""
        run, features = self._pass(x, rows.start), {}
        calls, n, mask = grouped(run.calls), rows.stop - rows.start, self.subject.probe.mask
        for name in self.maps:
            read = masked_read(self.subject, name, calls.get(name, []), rows)
            if read is not None:
                features[name] = self._rows(*read)
                if not finite(features[name]):
                    raise DivergedError(f"layer {name!r} reads NaN or Inf on some examples of the probe, so its features have no "
                                        f"inner products. Look for a diverged run or a division by zero, or leave it out with "
                                        f"layers=....")
            if name in self.widths and (name not in features or features[name].shape[1] != self.widths[name]):
                raise CaptureError(f"layer {name!r} reads {self.widths[name]} numbers per example of the first examples and "
                                   "another count of later ones, or its inputs were overwritten: its features do not form a "
                                   "matrix. Leave it out with layers=....")
        f = run.f.detach()
        keep = mask[rows].to(f.device) if mask is not None and self.tokens else None
        features[self.output] = self._rows(f.reshape(n, f.shape[1] if self.tokens else 1, -1), keep)
        return features

    def _rows(self, h: Float[Tensor, "n s d"], keep: Tensor | None) -> Float[Tensor, "m p"]:
        """Features of some examples (or of their tokens) as rows, without masked positions."""
        h = h.detach().to(self.subject.home, torch.float64)
        if self.tokens:
            return h.flatten(0, 1) if keep is None else h[keep.to(h.device).bool()]
        return (h if keep is None else h * keep.to(h)[..., None]).flatten(1)


# ----------------------------------------------------------------------------------------------------------- keepsakes

MOST = 1024  # rows of a Gram matrix: 2 MiB for each layer and step
PICTURES, SIDE = 256, 64  # examples, and pixels of a side
Arrays = dict[tuple[str, str], NDArray[Any]]


class Keepsakes:
    """Features of a model on some examples of a probe; ``take()`` reads the current model."""

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
        self.rows = replace(probe, kernel_examples=features).kernel_rows()
        self.pictures = _pictures(select(probe.x, self.rows[:PICTURES]), inputs) if inputs else None
        self._reader: Reader | None = None

    def about(self) -> dict[str, Any]:
        """Describe them for the run: which examples, as a digest, how many rows and whether these are examples or tokens, their
        classes, if they have some, and the layers by depth."""
        assert self._reader is not None
        y = self.whole.y
        classes = None if y is None or y.dim() != 1 or y.is_floating_point() else y[self.rows].tolist()
        return {"examples": fingerprint(select(self.whole.x, self.rows))[:32], "rows": sum(self._reader.counts()),
                "kind": "tokens" if self._reader.tokens else "examples", "classes": classes, "layers": self._reader.names}

    def news(self, run: Run) -> dict[str, Any] | None:
        """Facts about the kept features that the run does not have yet; None if it has all. Raise an error if the run has
        features of other examples."""
        known, facts = run.about.get("features"), self.about()
        if known is not None and known.get("examples") != facts["examples"]:
            raise SelectionError(f"the run {run.path} has kept features of {known.get('rows')} rows, and not of the same "
                                 f"examples as this Observer, so that they could not be compared. Resume with the keep_features= "
                                 f"and the Probe that it began with.")
        return facts if known is None else None

    def take(self, known: Collection[str] = ()) -> Arrays:
        """Centred Gram matrices by layer; the inputs too, if no array of their name is ``known``."""
        with reading(self.model):
            kept = until_certain(self._grams, self._amend)
        arrays: Arrays = {(k, GRAM): ((K + K.T) / 2).float().cpu().numpy() for k, K in kept.items()}  # symmetric to the last bit
        if self.pictures is not None and INPUTS not in known:
            arrays[WHOLE, INPUTS] = self.pictures
        return arrays

    def _amend(self, doubt: Doubt) -> None:
        """Amend the survey after a doubt; raise it if there is no reader yet."""
        if self._reader is None:
            raise doubt
        self._reader.amend(doubt)

    def _grams(self) -> dict[str, Tensor]:
        """Gram matrices by layer, from pairs of blocks (one block, where all have room). Fewer examples have as many tokens."""
        if self._reader is None:
            reader = self._made()
            if reader.tokens:
                self.rows = self.rows[:max(1, len(self.rows) // reader.subject.survey.shape[0])]
                reader = self._made()
            self._reader = reader
        else:
            self._reader.renew()
        reader = self._reader
        size = fitting(self.memory // 2, 2 * reader.each, reader.subject.probe.n, reader.subject.survey.drawn)
        return dict(zip(reader.names, grams(reader, size), strict=True))

    def _made(self) -> Reader:
        """Make the reader of the examples whose features are kept."""
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
