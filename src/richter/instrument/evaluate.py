"""From a model and a probe to rows: one stream over the probe serves all moments and the kernels' examples; then each
measure is evaluated on each layer, and again with parts of what it rests on left out."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from richter.core import WHOLE, MemoryBudgetError, Row, show_bytes
from richter.instrument.cotangents import Cotangents, RandomOutputs, every_output, loss_gradient, random_outputs
from richter.instrument.estimates import free, least_of_estimates, operations, sketch
from richter.instrument.moments import GROUPS, Halves, Kept, Stream, Sums
from richter.instrument.statistics import (
    AGOP,
    LABELS,
    NFM,
    WEIGHT_DECAY,
    Derived,
    Gram,
    Moment,
    OfProbe,
    OfWeight,
    Statistic,
    block_diagonal,
    leaves,
)
from richter.instrument.subject import Subject
from richter.instrument.tangents import SMALL, Estimate, Tangents
from richter.measures import Measure
from richter.measures.alignment import CENTRED_KERNEL, SAME_OUTPUT, CentredKernel, Labels

KERNEL_OUTPUTS = 64  # more than these, and kernels are sketched
MOMENT_OUTPUTS = 512  # more than these, and moments are
SKETCH = 64  # random outputs


class RichterWarning(UserWarning):
    """Something was left out of a measurement; the snapshot's notes say what and why."""


class Missing(Exception):
    """A statistic does not exist for this layer; the text says why."""


class Evaluation:
    """One measurement in the making. ``rows()`` does the work."""

    def __init__(self, subject: Subject, measures: Sequence[Measure], cotangents: Cotangents | None, step: int | None,
                 matrices: int = 0) -> None:
        self.of, self.measures, self.cotangents, self.step, self.matrices = subject, measures, cotangents, step, matrices
        self.notes: dict[str, str] = {}
        self.arrays: dict[tuple[str, str], NDArray[np.float32]] = {}
        self.exact: dict[Cotangents, bool] = {}  # is the kernel of these cotangents formed?

    def rows(self) -> list[Row]:
        kernels_of = _families([m for m in self.measures if m.of_kernels], lambda m: self._chosen(m, KERNEL_OUTPUTS))
        moments_of = _families([m for m in self.measures if not m.of_kernels], lambda m: self._chosen(m, MOMENT_OUTPUTS))
        streams = {chosen: Stream(self.of, chosen, self._moments(family)) for chosen, family in moments_of.items()}
        tangents = {chosen: Tangents(self.of, chosen) for chosen in kernels_of if self.of.modules}
        self.exact = {chosen: self._is_exact(t, kernels_of[chosen]) for chosen, t in tangents.items()}
        self._check_memory(list(streams.values()), {tangents[c]: family for c, family in kernels_of.items() if c in tangents})
        shared = self._shared(streams, tangents)
        if shared is not None:  # the captures of the kernels' examples come out of the same stream
            streams[shared] = Stream(self.of, shared, streams[shared].moments if shared in streams else (),
                                     [k for u in self.of.wanted for k in u.maps])
        rows: list[Row] = []
        kept: Kept | None = None
        for chosen, stream in streams.items():
            sums, found = stream.run() if (stream.moments and self.of.maps) or stream.kernel_maps else ({}, None)
            kept = found or kept
            for name in self.of.maps:
                values = _Values(self.of, name, sums)
                rows += [self._row(m, name, values, min(GROUPS, self.of.probe.n), self._said(chosen))
                         for m in moments_of.get(chosen, [])]
                self._keep(name, values)
        for chosen, of_kernels in tangents.items():
            rows += self._kernel_rows(of_kernels, kernels_of[chosen], kept if chosen is shared else None)
        order = {name: i for i, name in enumerate(self._ordered({r.layer for r in rows}))}
        rank = {m.name: i for i, m in enumerate(self.measures)}
        self._remark()
        return sorted(rows, key=lambda r: (order[r.layer], rank[r.measure]))

    def _ordered(self, names: set[str]) -> list[str]:
        """In the order of named_modules, the maps of a module behind it; the whole model last."""
        place = {name: i for i, (name, _) in enumerate(self.of.model.named_modules())}
        maps = self.of.found.maps

        def key(name: str) -> tuple[float, int]:
            stem, rank = name, list(maps).index(name) if name in maps else -1
            while stem and stem not in place:
                stem = stem.rpartition(".")[0]
            return (math.inf if name == WHOLE else place.get(stem, -1), rank)

        return sorted(names, key=key)

    def _remark(self) -> None:
        """What a user should know of layers that have no or half a row."""
        of = self.of
        self.notes.update({k: why for k, why in of.found.notes.items() if of.layers is None or k in of.selected([k])})
        frozen = {name.rpartition(".")[0] for name, p in of.model.named_parameters() if not p.requires_grad}
        for name in of.selected(sorted(frozen - {u.module for u in of.units})):
            self.notes[name] = "frozen (requires_grad=False): it has no tangent kernel and its weights do not move"
        blind = [k for k, why in of.found.notes.items() if why.startswith("layer ")]
        if blind:
            warnings.warn(of.found.notes[blind[0]] + (f" ({len(blind)} layers in all.)" if len(blind) > 1 else ""),
                          RichterWarning, stacklevel=5)

    # ----------------------------------------------------------------------------------------------------- planning

    def _chosen(self, m: Measure, limit: int) -> Cotangents:
        """The cotangents to use: those that are asked for, or random ones in the place of very many."""
        if m.cotangents is loss_gradient:
            return loss_gradient  # the loss is not a choice among outputs
        chosen = self.cotangents or m.cotangents
        if self.cotangents is None and chosen is every_output and self.of.found.outputs > limit:
            return random_outputs(SKETCH)
        return chosen

    def _said(self, chosen: Cotangents) -> str:
        if isinstance(chosen, RandomOutputs):
            return f"{chosen.v} random outputs of {self.of.found.outputs}"
        return "" if chosen is every_output or chosen is loss_gradient else getattr(chosen, "__name__", "custom cotangents")

    def _moments(self, measures: Sequence[Measure]) -> list[Moment]:
        """Those that measures need and that can be had."""
        wanted = {s.name: s for m in measures for s in leaves(m.needs) if isinstance(s, Moment)}
        return [s for s in wanted.values() if (self.of.then is not None or not s.initial)
                and (self.of.objective is not None or not s.gradient)]

    def _is_exact(self, t: Tangents, family: Sequence[Measure]) -> bool:
        """Is the kernel formed? When it fits and is not dearer than its estimate, or a measure needs the kernel itself."""
        if isinstance(t.chosen, RandomOutputs):
            return False
        if t.chosen is not every_output or any(_needs_kernel(m) for m in family) or t.bytes() <= SMALL:
            return True
        exact, estimate = operations(t)
        return t.least() <= self.of.memory and exact <= estimate

    def _shared(self, streams: Mapping[Cotangents, Stream], tangents: Mapping[Cotangents, Tangents]) -> Cotangents | None:
        """The cotangents whose captures serve moments and kernels alike, if there is room to hand them on."""
        of = self.of
        for chosen, t in tangents.items():
            maps = [k for u in of.wanted for k in u.maps]
            if not (chosen in streams or t.n == of.probe.n) or of.found.drawn or not self.exact[chosen] \
                    or not all(k in of.found.batched for k in maps):
                continue
            moments = streams[chosen].moments if chosen in streams else ()
            stream = Stream(of, chosen, moments, maps)
            held, graph, each = stream.sizes()
            if held + graph + each + stream.kept_bytes(t.n, t.v) + t.least() <= of.memory:
                return chosen
        return None

    def _check_memory(self, streams: Sequence[Stream], tangents: Mapping[Tangents, Sequence[Measure]]) -> None:
        """Before any work: can every piece of it be done within memory? If not, say the least that can."""
        needs, what = [0], ""
        for stream in streams:
            if stream.moments and self.of.maps:
                needs.append(sum(stream.sizes()))
                what = f"the sums of {len(self.of.maps)} layers ({show_bytes(stream.sizes()[0])}) and one example"
        for t, family in tangents.items():
            if self.exact[t.chosen] or any(_needs_kernel(m) for m in family):
                needs.append(t.least())
                what += (", then " if what else "") + f"the kernel of one layer over {t.n} examples and {t.v} outputs"
            if not self.exact[t.chosen]:
                needs += [least_of_estimates(t)] if any(CENTRED_KERNEL in m.needs for m in family) else []
                needs += [t.least_single()] if any(SAME_OUTPUT in m.needs for m in family) else []
                what += (", then " if what else "") + f"estimates of kernels over {t.n} examples"
        if max(needs) > self.of.memory:
            raise MemoryBudgetError(
                f"memory={show_bytes(self.of.memory)} cannot hold {what}. The smallest that works here is "
                f"memory='{show_bytes(max(needs))}'; fewer layers (layers=...), kernel examples (Probe(kernel=...)) or outputs "
                f"(output=...) need less.")

    # ------------------------------------------------------------------------------------------------------ kernels

    def _kernel_rows(self, t: Tangents, family: Sequence[Measure], kept: Kept | None) -> Iterator[Row]:
        random = t.chosen if isinstance(t.chosen, RandomOutputs) else None
        centred, single = ([] if self.exact[t.chosen] else [m for m in family if m.needs == (s,)]
                           for s in (CENTRED_KERNEL, SAME_OUTPUT))
        if centred:
            for name, found in sketch(t, random) if random else free(t):
                yield from (self._estimated(m, name, CENTRED_KERNEL, found) for m in centred)
        if single:
            for name, found in t.same_output(sample=random is not None):
                yield from (self._estimated(m, name, SAME_OUTPUT, found) for m in single)
        rest = [m for m in family if m not in centred and m not in single]
        if rest:
            labels = t.labels()
            for name, K in t.exact(kept):
                values = _Values(self.of, name, {}, K, labels)
                yield from (self._row(m, name, values, min(GROUPS, t.n), self._said(t.chosen)) for m in rest)

    def _estimated(self, m: Measure, name: str, s: Statistic, found: Estimate) -> Row:
        values = _Values(self.of, name, {})
        values.known = {(s.name, None): found.value, **{(s.name, g): v for g, v in enumerate(found.leaving)}}
        row = self._row(m, name, values, len(found.leaving), found.said)
        c = found.value
        lacks = math.isnan(row.value) and isinstance(c, CentredKernel) and math.isnan(c.top) \
            and math.isfinite(m.compute(replace(c, top=1.0)))  # it is the eigenvalue that it lacks
        return replace(row, note=found.lacking) if lacks else row

    # ---------------------------------------------------------------------------------------------------- evaluating

    def _keep(self, name: str, values: _Values) -> None:
        """The feature matrices themselves, of layers with at most ``matrices`` inputs."""
        if self.of.W[name].shape[-1] <= self.matrices:
            for s in (NFM, AGOP):
                with contextlib.suppress(Missing):
                    M = values.get(s).dense().float()
                    self.arrays[name, s.name] = ((M + M.T) / 2).cpu().numpy()  # to the last bit: half of it is kept

    def _row(self, m: Measure, name: str, values: _Values, groups: int, said: str) -> Row:
        try:
            arguments = [values.get(s) for s in m.needs]
        except Missing as why:
            return Row(self.step, name, m.name, math.nan, note=str(why))
        value, note = float(m.compute(*arguments)), m.remark(*arguments) if m.remark else ""
        if math.isnan(value):
            unlabelled = self.of.Y is None and LABELS in leaves(m.needs)
            note = note or (NO_LABELS if unlabelled else _undefined(m, self.of.then is not None))
        error = math.nan
        if math.isfinite(value) and any(isinstance(s, (Moment, Gram)) for s in leaves(m.needs)):
            with contextlib.suppress(Missing):  # only examples of one group reach this layer: there is nothing without them
                error = _jackknife([float(m.compute(*(values.get(s, g) for s in m.needs))) for g in range(groups)])
        if any(isinstance(s, (Moment, Gram)) for s in leaves(m.needs)):
            note = "; ".join(t for t in (note, said) if t)
        return Row(self.step, name, m.name, value, error, note)


def _families(measures: Sequence[Measure], chosen: Any) -> dict[Cotangents, list[Measure]]:
    found: dict[Cotangents, list[Measure]] = {}
    for m in measures:
        found.setdefault(chosen(m), []).append(m)
    return found


def _needs_kernel(m: Measure) -> bool:
    """Does it look at the kernel in another way than through what can be estimated?"""
    return m.needs not in ((CENTRED_KERNEL,), (SAME_OUTPUT,))


class _Values:
    """The statistics of one layer, each computed once, with any one group of examples left out."""

    def __init__(self, of: Subject, name: str, sums: Mapping[tuple[str, str], Sums | Halves], K: Tensor | None = None,
                 labels: Labels | None = None) -> None:
        self.of, self.name, self.sums, self.K, self.labels = of, name, sums, K, labels
        self.known: dict[tuple[str, int | None], Any] = {}

    def get(self, s: Statistic, without: int | None = None) -> Any:
        if isinstance(s, OfWeight) or (isinstance(s, Derived) and all(isinstance(k, OfWeight) for k in leaves(s.needs))):
            without = None
        if (s.name, without) not in self.known:
            self.known[s.name, without] = self._compute(s, without)
        return self.known[s.name, without]

    def _compute(self, s: Statistic, without: int | None) -> Any:
        if isinstance(s, Derived) and s.leaving is not None and without is not None:
            assert self.K is not None
            for g, value in enumerate(s.leaving(*(self.get(k) for k in s.needs), min(GROUPS, len(self.K)))):
                self.known[s.name, g] = value
            return self.known[s.name, without]
        if isinstance(s, Derived):
            return s.compute(*(self.get(k, without) for k in s.needs))
        if isinstance(s, OfWeight):
            return self._of_weight(s)
        if isinstance(s, Moment):
            if s.initial and self.of.then is None:
                raise Missing(NO_INITIAL)
            if s.gradient and self.of.objective is None:
                raise Missing(NO_LABELS)
            if (s.name, self.name) not in self.sums:
                raise Missing(APART)
            if s.gradient:
                return self._gradient(s, without)
            found = self.sums[s.name, self.name].mean(without)
            if found is None:
                raise Missing("no example of the probe reached this layer")
            return found
        if s is WEIGHT_DECAY:
            return float(self.of.probe.weight_decay)
        if self.K is None:
            raise Missing("it has no tangent kernel")
        rows = torch.arange(len(self.K)) % min(GROUPS, len(self.K)) != (-1 if without is None else without)
        rows = rows.to(self.K.device)
        if isinstance(s, Gram):
            return self.K if without is None else self.K[rows][:, :, rows]
        assert isinstance(s, OfProbe)
        assert self.labels is not None
        keep = self.labels.keep
        return self.labels if without is None else Labels(self.labels.Y[rows], None if keep is None else keep[rows])

    def _gradient(self, s: Moment, without: int | None) -> Tensor:
        """In the layout of the map's matrix, summed over all uses of its parameter; that of grouped maps block-diagonal."""
        maps = self.of.found.maps
        mine, W = maps[self.name], self.of.W[self.name]
        users = [self.name] if mine.weight is None else [k for k, m in maps.items()
                                                         if m.weight == mine.weight and (s.name, k) in self.sums]
        whole = W.new_zeros(int(max(maps[k].index.max() for k in users)) + 1)  # of the parameter
        for k in users:
            found = self.sums[s.name, k].mean(without)
            if isinstance(found, Tensor):  # an example reached it
                whole.index_add_(0, maps[k].index.to(W.device), found.reshape(-1).to(W.device))
        G = whole[mine.index.to(W.device)].reshape(W.shape)
        return block_diagonal(G) if mine.kind == "grouped" else G

    def _of_weight(self, s: OfWeight) -> Any:
        if self.name not in self.of.maps:
            raise Missing(APART)
        W, W0 = self.of.pair(self.name)
        if s.initial and W0 is None:
            raise Missing(NO_INITIAL)
        Q = self.of.bases[self.name] if s.project else None
        if Q is not None:
            W, W0 = Q.T @ W, None if W0 is None else Q.T @ W0
        return s.compute(W, W0)


APART = "kernels belong to modules, weights and moments to linear maps: one measure cannot use both"
NO_LABELS = "the probe has no labels"
NO_INITIAL = "needs the initial weights: pass initial=state_dict, or use an Observer from the first step"


def _undefined(m: Measure, initial: bool) -> str:
    moved = any(isinstance(s, OfWeight) and s.initial for s in leaves(m.needs))
    return "0/0: the weights (or what is asked of them) have not moved from the initial ones" if moved and initial \
        else "0/0: undefined here (a kernel, gradient or label of zeros)"


def _jackknife(values: Sequence[float]) -> float:
    """The standard error from values with one group left out each: sqrt((G-1)/G sum (v - mean)^2)."""
    G = len(values)
    if G < 2 or not all(map(math.isfinite, values)):
        return math.nan
    mean = sum(values) / G
    return math.sqrt((G - 1) / G * sum((v - mean) ** 2 for v in values))
