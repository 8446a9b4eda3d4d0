"""From a model and a probe to rows: stream the probe through the model once for all moments and once for all kernels,
then evaluate each measure on each layer, and again with each group of examples left out."""

from __future__ import annotations

import fnmatch
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from richter.capture import Output, State, device_of, forward, state_of, to_device, written
from richter.core import WHOLE, CaptureError, MemoryBudgetError, Row, SelectionError, show_bytes
from richter.cotangents import Cotangents, every_output, random_outputs
from richter.kernels.ntk import Job, Part, kernels, least, parts_of, total, widened
from richter.layercapture import LayerCapture, Survey, layer_captures, matrices, select
from richter.measures import Measure
from richter.measures.alignment import Labels
from richter.probe import Probe
from richter.statistics import Derived, Gram, Moment, OfProbe, OfWeight, Statistic, basis, block_diagonal, leaves
from richter.survey import SURVEYED, survey

GROUPS = 8  # of the jackknife
KERNEL_OUTPUTS = 64  # more than these, and kernels are of random combinations of outputs
MOMENT_OUTPUTS = 4096  # more than these, and moments are
SKETCH = 64
MAP_KINDS = ("dense", "grouped", "lookup")


class RichterWarning(UserWarning):
    """Something was left out of a measurement; the snapshot's notes say what and why."""


@dataclass
class Sums:
    """A moment in groups of examples: sums and numbers of positions."""

    sums: list[Tensor | None] = field(default_factory=lambda: [None] * GROUPS)
    counts: list[int] = field(default_factory=lambda: [0] * GROUPS)

    def add(self, group: int, value: Tensor, number: int) -> None:
        value = (value.cpu() if value.device.type == "mps" else value).double()
        before = self.sums[group]
        self.sums[group] = value if before is None else before + value
        self.counts[group] += number

    def mean(self, without: int | None = None) -> Tensor | None:
        chosen = [s for g, s in enumerate(self.sums) if g != without and s is not None]
        number = sum(c for g, c in enumerate(self.counts) if g != without)
        return total(chosen) / number if number else None


class Missing(Exception):
    """A statistic does not exist for this layer; the text says why."""


@dataclass
class Evaluation:
    """One measurement in the making. ``rows()`` does the work."""

    model: nn.Module
    probe: Probe
    measures: Sequence[Measure]
    initial: Mapping[str, Tensor] | None
    cotangents: Cotangents | None
    layers: Sequence[str] | Callable[[str], bool] | None
    memory: int
    output: Output | None
    step: int | None = None

    def __post_init__(self) -> None:
        self.device = device_of(self.model)
        self.notes: dict[str, str] = {}
        self.x = self.probe.inputs(next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32))
        few = to_device(select(self.x, slice(0, SURVEYED)), self.device)
        copied = written(self.model, few, self.output)
        self.state = state_of(self.model, copied=copied)
        self.found: Survey = survey(self.model, few, self.state, self.output)
        self._shape = self._output_shape(few)
        self._check_outputs()
        self.Y, self.counted = self.probe.targets(self._shape)
        self.W = {k: W.double() for k, W in matrices(self.model, few, self.state, self.output).items()}
        self.then: State | None = None
        self.W0: dict[str, Tensor] = {}
        if self.initial is not None:
            self.then = state_of(self.model, self.initial, copied)
            self._check_start(few)
            self.W0 = {k: W.double() for k, W in matrices(self.model, few, self.then, self.output).items()}
        self.maps = self._selected([k for k, m in self.found.maps.items() if m.kind in MAP_KINDS])
        self.modules = self._selected(list(dict.fromkeys(p.module for p in parts_of(self.model, self.found))))
        self._check_selection()
        self.bases = {k: basis(*self._pair(k)) for k in self.maps}

    def _check_outputs(self) -> None:
        """Labels of every output, and random combinations of them, are whole arrays: a vocabulary times a text is not small."""
        n, k = self.probe.n, self.found.outputs
        need = 8 * k * max(n, SKETCH if k > KERNEL_OUTPUTS else 0)
        if need > max(self.memory, 2 ** 26):  # smaller arrays are not what a bound is about
            raise MemoryBudgetError(
                f"memory={show_bytes(self.memory)} cannot hold the labels of {k:,} outputs for {n} examples. The smallest that "
                f"works here is above memory='{show_bytes(need)}'; pick fewer outputs, e.g. those of the last token: "
                f"output=lambda out: out.logits[:, -1].")

    def _check_start(self, few: Any) -> None:
        assert self.then is not None
        if not torch.isfinite(forward(self.model, few, self.then, output=self.output, record=False).f).all():
            raise CaptureError("the network with the initial= weights gives NaN or Inf on the probe, so nothing can be centred "
                               "on it. Is this the state at initialisation?")

    def _output_shape(self, few: Any) -> torch.Size:
        f = forward(self.model, select(few, slice(0, 2)), self.state, output=self.output, record=False).f
        return torch.Size((self.probe.n, *f.shape[1:]))

    # -------------------------------------------------------------------------------------------------- selection

    def _selected(self, names: list[str]) -> list[str]:
        if self.layers is None:
            return names
        if callable(self.layers):
            return [k for k in names if self.layers(k)]
        return [k for k in names if any(_matches(k, pattern) for pattern in self.layers)]

    def _check_selection(self) -> None:
        known = list(dict.fromkeys([*self.found.maps, *self.modules]))
        if not self.found.maps and not self.modules:
            raise SelectionError("no weight layer was found: the model has no parameter that a linear map, a norm or a plain "
                                 "operation of its forward pass uses. Is it an empty container, or are its weights buffers?")
        if self.layers is None or callable(self.layers) or not len(self.layers):
            if not self.maps and not self.modules:
                raise SelectionError(f"layers= selects none of: {', '.join(known)}.")
            return
        for pattern in self.layers:
            idle = {k for k, why in self.found.notes.items() if not why.startswith("layer ")}
            if any(_matches(k, pattern) and k not in idle for k in [*self.maps, *self.modules]):
                continue
            for name, why in self.found.notes.items():
                if _matches(name, pattern):
                    raise CaptureError(f"layer {name!r} cannot be measured: {why}.")
            raise SelectionError(f"layers={pattern!r} matches nothing. This model has: {', '.join(known)}. "
                                 f"Patterns like 'h.*.attn.*' work too.")

    # ----------------------------------------------------------------------------------------------------- working

    def rows(self) -> list[Row]:
        kernels_of = [m for m in self.measures if m.of_kernels]
        moments_of = [m for m in self.measures if not m.of_kernels]
        self._check_memory(moments_of, kernels_of)
        rows = [*self._moment_rows(moments_of), *self._kernel_rows(kernels_of)]
        order = {name: i for i, name in enumerate(self._ordered({r.layer for r in rows}))}
        rank = {m.name: i for i, m in enumerate(self.measures)}
        self._remark()
        return sorted(rows, key=lambda r: (order[r.layer], rank[r.measure]))

    def _ordered(self, names: set[str]) -> list[str]:
        """In the order of named_modules, the maps of a module behind it; the whole model last."""
        place = {name: i for i, (name, _) in enumerate(self.model.named_modules())}

        def key(name: str) -> tuple[float, int]:
            stem, rank = name, list(self.found.maps).index(name) if name in self.found.maps else -1
            while stem and stem not in place:
                stem = stem.rpartition(".")[0]
            return (math.inf if name == WHOLE else place.get(stem, -1), rank)

        return sorted(names, key=key)

    def _remark(self) -> None:
        """What a user should know of layers that have no or half a row."""
        self.notes.update({k: why for k, why in self.found.notes.items()
                           if self.layers is None or k in self._selected([k])})
        frozen = {name.rpartition(".")[0] for name, p in self.model.named_parameters() if not p.requires_grad}
        trained = {p.module for p in parts_of(self.model, self.found)}
        for name in self._selected(sorted(frozen - trained)):
            self.notes[name] = "frozen (requires_grad=False): it has no tangent kernel and its weights do not move"
        blind = [k for k, why in self.found.notes.items() if why.startswith("layer ")]
        if blind:
            warnings.warn(self.found.notes[blind[0]] + (f" ({len(blind)} layers in all.)" if len(blind) > 1 else ""),
                          RichterWarning, stacklevel=5)

    def _groups(self, n: int) -> int:
        return min(GROUPS, n)

    def _choose(self, asked: Cotangents, limit: int) -> tuple[Cotangents, str]:
        """The cotangents to use, and what is to be said of them."""
        chosen = self.cotangents or asked
        k = self.found.outputs
        if chosen is every_output and k > limit:
            return random_outputs(SKETCH), f"{SKETCH} random outputs of {k}"
        return chosen, "" if chosen is every_output else getattr(chosen, "__name__", "custom cotangents")

    # ----------------------------------------------------------------------------------------------------- moments

    def _moment_rows(self, measures: Sequence[Measure]) -> Iterator[Row]:
        if not measures or not self.maps:
            return
        by_cotangents: dict[Cotangents, list[Measure]] = {}
        for m in measures:
            by_cotangents.setdefault(self._choose(m.cotangents, MOMENT_OUTPUTS)[0], []).append(m)
        for chosen, family in by_cotangents.items():
            said = self._choose(family[0].cotangents, MOMENT_OUTPUTS)[1]
            moments = self._moments(family)
            sums = self._stream(chosen, moments) if moments else {}
            for name in self.maps:
                values = _Values(self, name, sums)
                for m in family:
                    yield self._row(m, name, values, self._groups(self.probe.n), said)

    def _moments(self, measures: Sequence[Measure]) -> list[Moment]:
        """Those that measures need and that can be had."""
        wanted = {s.name: s for m in measures for s in leaves(m.needs) if isinstance(s, Moment)}
        return [s for s in wanted.values() if self.then is not None or not s.initial]

    def _stream(self, chosen: Cotangents, moments: Sequence[Moment]) -> dict[tuple[str, str], Sums]:
        """Sums of all moments over the probe, chunk by chunk, a block of cotangents at a time."""
        sums = {(s.name, k): Sums() for s in moments for k in self.maps}
        v = len(chosen(torch.zeros(1, self.found.outputs), None if self.Y is None else self.Y[:1]))
        chunk, block = self._chunk(v, moments)
        batched = [k for k in self.maps if k in self.found.batched]
        single = [k for k in self.maps if k not in self.found.batched]
        n = self.probe.n
        work = [(slice(i, min(i + chunk, n)), batched) for i in range(0, n, chunk)] if batched else []
        work += [(slice(i, i + 1), single) for i in range(n)] if single else []
        bar = tqdm(total=len(work) * math.ceil(v / block), desc="measuring", delay=2, leave=False, disable=None)
        for rows, names in work:
            x = to_device(select(self.x, rows), self.device)
            for start in range(0, v, block):
                self._add_chunk(sums, moments, chosen, x, rows, names, slice(start, start + block))
                bar.update()
        bar.close()
        return sums

    def _add_chunk(self, sums: dict[tuple[str, str], Sums], moments: Sequence[Moment], chosen: Cotangents, x: Any,
                   rows: slice, names: Sequence[str], block: slice) -> None:
        """One forward pass and one block of backward passes (and the same of the initial network, if it is needed)."""
        reads, now = any(s.reads for s in moments), self._rowwise(chosen, block)
        captured = layer_captures(self.model, x, rows, now, self.state, self.found, names, self.output, reads)
        before: dict[str, LayerCapture] = {}
        if any(s.initial for s in moments):
            assert self.then is not None
            before = layer_captures(self.model, x, rows, now, self.then, self.found, names, self.output, reads)
        groups = self._groups(self.probe.n)
        for name, c in captured.items():
            c = self._flat(widened(c), name)
            if name in before:
                b = self._flat(widened(before[name]), name)
                c = replace(c, W0=b.W, h0=b.h, g0=b.g)
            keep = self._kept(c, rows)
            if keep is not None:
                c = replace(c, g=c.g * keep[None, ..., None], g0=None if c.g0 is None else c.g0 * keep[None, ..., None])
            member = torch.arange(rows.start, rows.stop) % groups
            for s in moments:
                Q = self.bases[name] if s.project else None
                d = c if Q is None else replace(c, g=c.g @ Q.to(c.g), g0=None if c.g0 is None else c.g0 @ Q.to(c.g))
                for g in member.unique().tolist():
                    mine = member == g
                    number = int(keep[mine].sum()) if keep is not None else int(mine.sum()) * c.g.shape[2]
                    number = number if block.start == 0 else 0  # positions are counted once, not once a block
                    sums[s.name, name].add(g, s.block(d.take(mine.to(d.g.device))), number)

    def _rowwise(self, chosen: Cotangents, block: slice, among: Tensor | None = None) -> Callable[[Tensor, slice], Tensor]:
        """Cotangents for some rows of the probe (or of those ``among`` it), zero at outputs that do not count."""
        def V(f: Tensor, rows: slice) -> Tensor:
            mine = rows if among is None else among[rows]
            y = None if self.Y is None else self.Y[mine].to(f.device)
            found = chosen(f, y)[block]
            return found if self.counted is None else found * self.counted[mine].to(found)
        return V

    def _flat(self, c: LayerCapture, name: str) -> LayerCapture:
        """Grouped maps as one block-diagonal matrix on the whole input."""
        if c.kind != "grouped":
            return c
        h = c.h.flatten(2) if c.h.dim() > 2 else c.h
        return replace(c, kind="dense", W=block_diagonal(c.W), h=h, g=c.g.flatten(3))

    def _kept(self, c: LayerCapture, rows: slice) -> Tensor | None:
        """Real tokens "n s" of a layer that works on the tokens of the mask."""
        mask = self.probe.mask
        if mask is None or any(s % mask.shape[1] for s in c.calls):
            return None
        real = mask[rows].to(c.g.device)
        return torch.cat([real.repeat_interleave(s // mask.shape[1], 1) for s in c.calls], 1)

    def _pair(self, name: str) -> tuple[Tensor, Tensor | None]:
        """The matrix now and then, grouped ones as one block-diagonal matrix."""
        grouped = self.found.maps[name].kind == "grouped"
        W, W0 = self.W[name], self.W0.get(name)
        return (block_diagonal(W), None if W0 is None else block_diagonal(W0)) if grouped else (W, W0)

    def _sizes(self, moments: Sequence[Moment]) -> tuple[int, int, int]:
        """Bytes of all sums, of one example's graph, and of one cotangent of one example."""
        item = max(4, next((p.element_size() for p in self.model.parameters() if p.is_floating_point()), 4))
        copies = 2 if any(s.initial for s in moments) else 1
        graph = item * copies * 3 * sum(m.width for m in self.found.maps.values())
        if any(s.reads for s in moments):
            graph += item * copies * sum(m.width * m.shape[-1] for m in self.found.maps.values() if m.name in self.maps)
        each = item * copies * 3 * sum(self.found.maps[k].width for k in self.maps)
        held = 8 * (GROUPS + 2) * len(moments) * sum(
            (Q.shape[1] if (Q := self.bases[k]) is not None else self._pair(k)[0].shape[0]) ** 2 for k in self.maps)
        return held, graph, each

    def _check_memory(self, moments_of: Sequence[Measure], kernels_of: Sequence[Measure]) -> None:
        """Before any work: can every piece of it be done within memory? If not, say the least that can."""
        needs, what = [0], ""
        moments = self._moments(moments_of)
        if moments and self.maps:
            needs.append(sum(self._sizes(moments)))
            what = f"the sums of {len(self.maps)} layers ({show_bytes(self._sizes(moments)[0])}) and one example"
        if kernels_of and self.modules:
            n, v = len(self.probe.kernel_rows()), min(self.found.outputs, KERNEL_OUTPUTS)
            parts = self._wanted_parts()
            for module in dict.fromkeys(p.module for p in parts):
                needs.append(sum(self._least([p for p in parts if p.module == module], n, v)))
            what += (", then " if what else "") + f"the kernel of one layer over {n} examples and {v} outputs"
        if max(needs) > self.memory:
            raise MemoryBudgetError(
                f"memory={show_bytes(self.memory)} cannot hold {what}. The smallest that works here is "
                f"memory='{show_bytes(max(needs))}'; fewer layers (layers=...), kernel examples (Probe(kernel=...)) or outputs "
                f"(output=...) need less.")

    def _chunk(self, v: int, moments: Sequence[Moment]) -> tuple[int, int]:
        """(examples, cotangents) at a time, so that what is captured stays within memory."""
        held, graph, each = self._sizes(moments)
        room = self.memory - held
        chunk = 1 if self.found.drawn else int(max(1, min(self.probe.chunk, self.probe.n, room // (graph + each))))
        return chunk, int(max(1, min(v, (room // chunk - graph) // each)))

    # ----------------------------------------------------------------------------------------------------- kernels

    def _kernel_rows(self, measures: Sequence[Measure]) -> Iterator[Row]:
        if not measures or not self.modules:
            return
        by_cotangents: dict[Cotangents, list[Measure]] = {}
        for m in measures:
            by_cotangents.setdefault(self._choose(m.cotangents, KERNEL_OUTPUTS)[0], []).append(m)
        for chosen, family in by_cotangents.items():
            yield from self._kernel_family(chosen, family, self._choose(family[0].cotangents, KERNEL_OUTPUTS)[1])

    def _kernel_family(self, chosen: Cotangents, family: Sequence[Measure], said: str) -> Iterator[Row]:
        rows = self.probe.kernel_rows()
        x, n = select(self.x, rows), len(rows)
        V = chosen(torch.zeros(n, self.found.outputs, dtype=torch.float64), None if self.Y is None else self.Y[rows])
        labels = self._labels(V, rows, chosen)

        rowwise = self._rowwise(chosen, slice(None), rows)
        whole: Tensor | None = None
        groups = list(self._module_groups(n, len(V)))
        bar = tqdm(groups, desc="kernels", delay=2, leave=False, disable=None)
        for group in bar:
            job = Job(self.model, self.state, self.found, group, rowwise, self.output, "full")
            for name, K in kernels(job, x, None, self.memory, self.probe.chunk).items():
                if self.layers is None:
                    whole = K.clone() if whole is None else whole.add_(K)
                if name in self.modules:
                    yield from self._kernel_values(family, name, K, labels, said)
        if whole is not None:
            yield from self._kernel_values(family, WHOLE, whole, labels, said)

    def _kernel_values(self, family: Sequence[Measure], name: str, K: Tensor, labels: Labels,
                       said: str) -> Iterator[Row]:
        values = _Values(self, name, {}, K, labels)
        for m in family:
            yield self._row(m, name, values, self._groups(len(K)), said)

    def _labels(self, V: Tensor, rows: Tensor, chosen: Cotangents) -> Labels:
        """Targets beside the kernel's rows: the labels themselves, or the same combinations of them."""
        unknown = torch.full((len(rows), self.found.outputs), math.nan, dtype=torch.float64)
        Y, keep = unknown if self.Y is None else self.Y[rows], None if self.counted is None else self.counted[rows]
        home = torch.device("cpu") if self.device.type == "mps" else self.device
        if chosen is every_output:
            return Labels(Y.to(home), None if keep is None else keep.to(home))
        return Labels(torch.einsum("vnk,nk->nv", V.to(Y), Y).to(home))

    def _wanted_parts(self) -> list[Part]:
        return [p for p in parts_of(self.model, self.found) if self.layers is None or p.module in self.modules]

    def _least(self, parts: Sequence[Part], n: int, v: int) -> tuple[int, int]:
        item = max(4, next((p.element_size() for p in self.model.parameters() if p.is_floating_point()), 4))
        job = Job(self.model, self.state, self.found, parts, lambda f, rows: f[None], self.output, "full")
        return least(job, n, n, v, item)

    def _module_groups(self, n: int, v: int) -> Iterator[list[Part]]:
        """Parts of as many modules at a time as have room for their kernels."""
        group: list[Part] = []
        by_module: dict[str, list[Part]] = {}
        for p in self._wanted_parts():
            by_module.setdefault(p.module, []).append(p)
        for parts in by_module.values():
            if group and self._least([*group, *parts], n, v)[0] + 4 * self._least([*group, *parts], n, v)[1] > self.memory:
                yield group
                group = []
            group = [*group, *parts]
        if group:
            yield group

    # ---------------------------------------------------------------------------------------------------- evaluating

    def _row(self, m: Measure, name: str, values: _Values, groups: int, said: str) -> Row:
        try:
            arguments = [values.get(s) for s in m.needs]
        except Missing as why:
            return Row(self.step, name, m.name, math.nan, note=str(why))
        value, note = float(m.compute(*arguments)), m.remark(*arguments) if m.remark else ""
        if math.isnan(value):
            unlabelled = self.Y is None and any(isinstance(s, OfProbe) for s in leaves(m.needs))
            note = note or ("the probe has no labels" if unlabelled else _undefined(m, self.initial is not None))
        error = math.nan
        if math.isfinite(value) and any(isinstance(s, (Moment, Gram)) for s in leaves(m.needs)):
            error = _jackknife([float(m.compute(*(values.get(s, g) for s in m.needs))) for g in range(groups)])
        if any(isinstance(s, (Moment, Gram)) for s in leaves(m.needs)):
            note = "; ".join(t for t in (note, said) if t)
        return Row(self.step, name, m.name, value, error, note)


class _Values:
    """The statistics of one layer, each computed once, with any one group of examples left out."""

    def __init__(self, of: Evaluation, name: str, sums: Mapping[tuple[str, str], Sums], K: Tensor | None = None,
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
            found = self.sums[s.name, self.name].mean(without)
            if found is None:
                raise Missing("no example of the probe reached this layer")
            return found
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

    def _of_weight(self, s: OfWeight) -> Any:
        W, W0 = self.of._pair(self.name)
        if s.initial and W0 is None:
            raise Missing(NO_INITIAL)
        Q = self.of.bases[self.name] if s.project else None
        if Q is not None:
            W, W0 = Q.T @ W, None if W0 is None else Q.T @ W0
        return s.compute(W, W0)


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


def _matches(name: str, pattern: str) -> bool:
    """A layer by its name, by its module's name, or by a pattern."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
