"""What the layers of a network read on a probe, and its outputs, as matrices of features: some examples at a time.

    with reading(model):
        reader = Reader(model, probe)
        for rows, features in reader.blocks(64):      # features[name]: "n p"
            ...

Features of a layer are what it reads: of a convolution the whole picture, each number once. Where every layer reads tokens, each
of which has an output of its own, the rows are tokens (those that are not masked); else they are examples, with their positions
side by side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from richter.core import CaptureError, DivergedError, SelectionError, parse_bytes
from richter.instrument.capture import Output, Pass, check_finite, count, quiet, select, state_of, to_device, unwrap
from richter.instrument.captures import MapInfo, as_read, grouped
from richter.instrument.checks import check_state, check_weights, finite
from richter.instrument.probe import Probe
from richter.instrument.statistics.samples import DIGITS
from richter.instrument.stream import steps
from richter.instrument.subject import Subject
from richter.instrument.survey import Doubt, check_calls, passed

OUTPUTS = "outputs"  # the name of what the whole network says
FEATURED = ("dense", "grouped")  # kinds of maps that read features; a lookup reads indices
Layers = str | Sequence[str] | Callable[[str], bool] | None


@contextlib.contextmanager
def reading(*models: nn.Module) -> Iterator[None]:
    """Around all reading of these models, some of which may be one: they are afterwards as they were."""
    with contextlib.ExitStack() as stack:
        for model in {id(m): m for m in map(unwrap, models)}.values():
            stack.enter_context(quiet(model))
        yield


class Reader:
    """One network on a probe: ``weights``, a state_dict, in the place of the model's own. To be used inside ``reading``."""

    def __init__(self, model: nn.Module, probe: Probe, *, weights: Mapping[str, Tensor] | None = None, layers: Layers = None,
                 memory: str | float = "2GiB", output: Output | None = None) -> None:
        model = unwrap(model)
        check_weights(model)
        self.weights = None if weights is None else check_state(model, weights, "weights")
        chosen = [layers] if isinstance(layers, str) else layers
        self.subject = Subject(model, probe, None, chosen, parse_bytes(memory), output)
        self.notes: dict[str, str] = {}  # layers that have no features, and why
        self.renew()

    @property
    def names(self) -> list[str]:
        """In the order of the forward pass; of layers that read the same thing the first; the outputs last."""
        return list(self.widths)

    @property
    def each(self) -> int:
        """Bytes of one example: its graph, and its features in double precision."""
        positions = self.subject.survey.shape[0] if self.tokens else 1
        return self.subject.itemsize * self.subject.survey.graph + 8 * positions * sum(self.widths.values())

    def renew(self) -> None:
        """The model has other weights than before."""
        self.subject.renew()
        self._look()

    def amend(self, doubt: Doubt) -> None:
        """What a map reads on later examples is not what the first ones say: do without it."""
        self.subject.amend(doubt)
        self._look()

    def _look(self) -> None:
        """Which layers have features, and how many: a pass of the first examples."""
        subject = self.subject
        self.state = subject.state if self.weights is None else state_of(subject.model, self.weights, subject.copied)
        maps = {k: m for k, m in subject.survey.batched.items() if k in subject.maps and m.kind in FEATURED}
        self.tokens = self._by_token(maps)
        self.widths: dict[str, int] = {}
        few = subject.few
        calls = grouped(self._pass(few, 0).calls)
        alike: dict[Any, str] = {}
        for k in maps:
            alike.setdefault(tuple((c.read.data_ptr(), c.read.shape, c.read.stride()) for c in calls.get(k, ())), k)
        self.maps = {k: maps[k] for k in alike.values() if k in calls}
        self.output = OUTPUTS if OUTPUTS not in self.maps else f"{OUTPUTS} of the model"
        features = self._features(few, slice(0, count(few)))
        kinds = {k: subject.survey.maps[k].kind for k in subject.maps if k not in subject.survey.batched}
        self.notes = {k: "it can only be read one example at a time" for k, kind in kinds.items() if kind in FEATURED}
        self.notes |= {k: "what it reads differs in size between examples, or was written over" for k in self.maps
                       if k not in features} | subject.refused
        self.widths = {k: X.shape[1] for k, X in features.items()}
        if len(self.widths) == 1 and subject.layers is not None:
            raise SelectionError(f"layers={subject.layers!r}: none of them reads features. Lookups read indices; this model has: "
                                 f"{', '.join(subject.survey.maps)}.")

    def _by_token(self, maps: Mapping[str, MapInfo]) -> bool:
        """Has every layer as many positions as there are outputs side by side?"""
        shape = self.subject.survey.shape
        return len(shape) == 2 and shape[0] > 1 and bool(maps) and all(m.positions == shape[0] for m in maps.values())

    def blocks(self, size: int, rows: slice | None = None) -> Iterator[tuple[slice, dict[str, Float[Tensor, "n p"]]]]:
        """All examples of the probe (or those of ``rows``), so many at a time: where they stand, and their features in double
        precision. Raises Doubt, which ``amend`` is told of."""
        first, last = (0, self.subject.probe.n) if rows is None else (rows.start, rows.stop)
        for r in steps(last - first, size):
            mine = slice(first + r.start, first + r.stop)
            x = to_device(select(self.subject.x, mine), self.subject.device)
            yield mine, self._features(x, mine)

    def constant(self, spread: float, size: float) -> bool:
        """Are features whose squares sum to ``size``, and to ``spread`` when their means are subtracted, the same in every row
        but for the rounding of the numbers that the network computes with?"""
        return not spread > (DIGITS * torch.finfo(self.subject.source.dtype).eps) ** 2 * size

    def counts(self) -> list[int]:
        """Rows of features that each example has."""
        if not self.tokens:
            return [1] * self.subject.probe.n
        mask, length = self.subject.probe.mask, self.subject.survey.shape[0]
        return [length] * self.subject.probe.n if mask is None else [int(k) for k in mask.sum(1)]

    def _pass(self, x: Any, seed: int) -> Pass:
        bench = replace(self.subject.source, state=self.state).bench(x)
        run = passed(bench, self.subject.survey, seed, None)
        check_calls(self.subject.survey, x, run.calls, bench.n)
        check_finite(run.f)
        return run

    def _features(self, x: Any, rows: slice) -> dict[str, Tensor]:
        """Of some examples, by layer."""
        run = self._pass(x, rows.start)
        calls, n = grouped(run.calls), rows.stop - rows.start
        features = {}
        for name, info in self.maps.items():
            parts = as_read(info, calls.get(name, []), n)
            if parts is not None:
                h, positions = parts
                keep = self.subject.real(name, rows, h.shape[1]) if positions else None
                if name not in self.subject.refused:
                    features[name] = self._rows(h, keep)
            if name in features and not finite(features[name]):
                raise DivergedError(f"layer {name!r} reads NaN or Inf on some examples of the probe, so its features have no "
                                    f"inner products. Look for a diverged run or a division by zero, or leave it out with "
                                    f"layers=....")
            if name in self.widths and (name not in features or features[name].shape[1] != self.widths[name]):
                raise CaptureError(f"layer {name!r} reads {self.widths[name]} numbers of the first examples, and not as many of "
                                   f"later ones, or what it read was written over: its features are no matrix. Leave it out with "
                                   f"layers=....")
        f = run.f.detach()
        mask = self.subject.probe.mask
        keep = mask[rows].to(f.device) if mask is not None and self.tokens else None
        features[self.output] = self._rows(f.reshape(n, f.shape[1], -1) if self.tokens else f.reshape(n, 1, -1), keep)
        return features

    def _rows(self, h: Float[Tensor, "n s d"], keep: Tensor | None) -> Float[Tensor, "m p"]:
        h = h.detach().to(self.subject.home, torch.float64)
        keep = None if keep is None else keep.to(h.device)
        if self.tokens:
            return h.flatten(0, 1) if keep is None else h[keep.bool()]
        return (h if keep is None else h * keep.to(h)[..., None]).flatten(1)

