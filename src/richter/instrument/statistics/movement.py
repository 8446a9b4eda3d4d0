"""How far a network has gone from the initial one, on the same examples: what its outputs changed by, in all and to first order
(LINEARISATION); whether what its layers read is still the same (FEATURE_CHANGE); and what the change of a layer's weights does to
its output (FUNCTION_CHANGE). One journey over the probe serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Mark, Remark, RichterError
from richter.core.values import NO_HIDDEN
from richter.instrument.capture import Call, Pass, State, moved_in_last_place, pushed_forward, pushed_twice, select
from richter.instrument.cotangents import Cotangents, every_output
from richter.instrument.statistics.frame import APART, NO_INITIAL, Gathering, Group, Missing, Place, Simple, Statistic, Wants
from richter.instrument.stream import Chunk, Layout, MapInfo, as_read, by_example
from richter.instrument.survey import applied, remade, tolerance
from richter.linalg import Rows, debiased_cka

if TYPE_CHECKING:
    from richter.instrument.statistics.journey import Journey, Stretch
    from richter.instrument.subject import Subject

# ------------------------------------------------------------------------------------------------------------- pushing
# J0 v, the first-order effect of a change v of the weights on the outputs of the initial network, in the first way that a model
# allows and that agrees with its backward pass: forward mode; backward twice; or what every linear map read and is asked.

Plain = Callable[..., tuple[Pass, Tensor]]
WAYS: dict[str, Plain] = {"forward mode": pushed_forward, "two backward passes": pushed_twice}
MARGIN = 3  # rounding was seen to be 0.4 to 1.5 times its estimate
ONE_IN = 8  # examples are compared with a backward pass
CAPTURES = "captures"  # the way that is left
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError)  # of what has no such derivative


class Pushing:
    """The product in one journey; the way is found once for an architecture."""

    def __init__(self, journey: Journey) -> None:
        self.journey, self.subject = journey, journey.subject

    @cached_property
    def way(self) -> str:
        """That which works here; empty if none does."""
        return self._known[0]

    @property
    def reason(self) -> str:
        """Why there is none."""
        return self._known[1]

    @property
    def _known(self) -> tuple[str, str]:
        kept = self.subject.kept
        if "pushing" not in kept:
            kept["pushing"] = self._found()
        return kept["pushing"]  # type: ignore[no-any-return]

    def _found(self) -> tuple[str, str]:
        reasons = []
        for way, product in WAYS.items():
            try:
                if self._agrees(product):
                    return way, ""
                reasons.append(f"{way} is not what its backward pass says")
            except RichterError:
                raise
            except FAILURES as why:
                reasons.append(f"{way}: {type(why).__name__}: {str(why).splitlines()[0] if str(why) else ''}")
        if self.journey.mixes:
            return "", "; ".join([*reasons, "norms over batches leave no gradients of single examples"])
        return CAPTURES, ""

    def _agrees(self, product: Plain) -> bool:
        few = self.journey.few
        return self._as_backward(few, self._plain(product, few, 0)[1], 0)

    def _as_backward(self, x: Any, tangent: Tensor, seed: int) -> bool:
        """<V, J v> = <J^T V, v> for a random V on these examples?"""
        journey = self.journey
        journey.give_back()  # what the pass in forward mode has left
        run = journey.run(journey.first, x, seed, record=False)
        V = torch.randn(run.f.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(run.f)
        names = list(journey.direction)
        expected = size = 0.0
        for d, v in zip(run.in_turns(V, [journey.first[k] for k in names]), journey.direction.values(), strict=True):
            expected += self.journey.inner(d, v)
            size += d.norm().item() * v.norm().item()
        seen = self.journey.inner(V, tangent)
        return abs(seen - expected) <= tolerance(journey.first.precision) * size

    def _holds(self, stretch: Stretch, x: Any, tangent: Tensor) -> bool:
        """The same for one in eight of these examples, others in every measurement; where examples mix, for all, in one block."""
        audit, n = self.subject.audit, stretch.n
        if audit is None:
            return True
        if self.journey.mixes:
            return stretch.rows != self.journey.blocks[audit.number % len(self.journey.blocks)] or \
                self._as_backward(x, tangent, stretch.rows.start)
        if n == 1:
            return (stretch.rows.start + audit.number) % ONE_IN != 0 or self._as_backward(x, tangent, stretch.rows.start)
        some = audit.order(n)[:max(1, n // ONE_IN)]
        return self._as_backward(select(x, some), tangent[some.to(tangent.device)], stretch.rows.start)

    def _plain(self, product: Plain, x: Any, seed: int) -> tuple[Pass, Tensor]:
        journey = self.journey

        def forward(state: State) -> Pass:
            return journey.run(state, x, seed, plain=True)
        return product(forward, journey.first, journey.direction)

    def __call__(self, stretch: Stretch, x: Any) -> Stretch:
        """The examples with what their outputs changed by, and to first order."""
        if not self.way:
            return stretch
        if self.way == CAPTURES:
            return self._captured(stretch, x)
        then, tangent = self._plain(WAYS[self.way], x, stretch.rows.start)
        if not self._holds(stretch, x, tangent):
            if self.journey.mixes or not self.cotangents.exact:
                raise Missing(f"the product of the initial Jacobian with the change of the weights cannot be had: on some "
                              f"examples of the probe, {self.way} is not what the backward pass says")
            return self._captured(stretch, x)
        wide = self.journey.wide
        return replace(stretch, then=then, change=self._counted(wide(stretch.now.f) - wide(then.f), stretch),
                       linear=self._counted(wide(tangent), stretch))

    def _counted(self, f: Tensor, stretch: Stretch) -> Float[Tensor, "n k"]:
        """Zero at outputs that do not count."""
        f, counted = f.reshape(stretch.n, -1), self.subject.counted
        return f if counted is None else f * counted[stretch.rows].to(f)

    @cached_property
    def cotangents(self) -> Cotangents:
        """All outputs, or combinations of them, where these are captured."""
        return every_output.chosen(None, self.subject.survey.outputs, "mean")

    @property
    def remark(self) -> Remark:
        """What is to be said of a number that is made of it."""
        sampled = self.way == CAPTURES and not self.cotangents.exact
        return Remark(Mark.ESTIMATED, self.cotangents.label(self.subject.survey.outputs)) if sampled else Remark()

    def _captured(self, stretch: Stretch, x: Any) -> Stretch:
        """sum over maps of <g, dW h + db>, and of gradients of single examples for parameters without a map."""
        subject, survey, v = self.subject, self.subject.survey, self.journey.direction
        maps = {k: info for k, info in survey.batched.items() if info.weight in v and info.weight in survey.structured}
        biases = {b: own for b, own in survey.biases.items() if b in v}
        names = list(dict.fromkeys([*maps, *(k for own in biases.values() for k in own)]))
        loose = [k for k in v if k not in biases and k not in survey.structured]
        V = subject.rowwise(self.cotangents, "mean")
        chunk = Chunk(subject.initial_source, x, stretch.rows, names, V, loose)
        f = chunk.f
        linear = f.new_zeros(len(chunk.V), stretch.n)
        for i in range(len(chunk.V)):
            captures = chunk.captures(slice(i, i + 1))
            for k, info in maps.items():
                c, D = captures[k], v[str(info.weight)].flatten()[info.index].view(info.shape)
                linear[i] += (c.g[0] * applied(c.kind, D.to(c.g), c.h)).flatten(1).sum(1)
            for b, own in biases.items():
                asked = torch.cat([captures[k].g[0].flatten(2).sum(1) for k in own], 1)
                linear[i] += asked @ v[b].flatten().to(asked)
        for k in loose:
            linear += chunk.gradients[k] @ v[k].flatten().to(linear)
        wide = self.journey.wide
        change = wide(stretch.now.f).reshape(stretch.n, -1) - wide(f)
        return replace(stretch, change=torch.einsum("vnk,nk->nv", wide(chunk.V), change), linear=wide(linear.T))

    @cached_property
    def rounding(self) -> float:
        """The mean square, over a few examples, of what rounding may do to the change of an example's outputs: what it does to
        the outputs if every weight is moved in its last place, and that they are rounded themselves; twice because two networks
        are subtracted, and with a margin."""
        journey, few, eps = self.journey, self.journey.few, torch.finfo(self.journey.last.precision).eps
        moved = moved_in_last_place(journey.last, journey.parameters)
        f, g = (journey.wide(journey.run(s, few, 0, record=False).f) for s in (journey.last, moved))
        last_place = (eps * f).square().sum().item() / 12  # of a number that is rounded to the nearest
        return 2 * MARGIN ** 2 * ((f - g).square().sum().item() + last_place) / len(f)


# ------------------------------------------------------------------------------------------------------------ movement

KEPT = 2 ** 18  # entries of a matrix of which several copies are kept
JOURNEY = 2.0  # passes: both networks forward, what is pushed through one, and that it agrees with a backward pass
FEWEST, MOST_TOKENS = 64, 2048  # rows of features that are compared
UNTRAINED = "0/0: untrained, the weights are the initial ones"
READOUT = ("the read-out: its output is the model's, and moves as far where the network is still its linearisation, so this says "
           "nothing of features")
NOTHING_TO_SAY = Remark()
TOO_FEW = f"fewer than {FEWEST} rows to compare (examples, or real tokens where each has an output): give a larger probe"
NO_ROOM = f"memory= has no room for {FEWEST} rows of what the layers read; give more"
NOTHING_READ = ("no hidden layer reads as much of every example, or all that is read is constant, so there are no features to "
                "compare")


@dataclass(frozen=True)
class _Compared(Statistic):
    """Something of both networks."""

    name: str
    place: Place = "model"

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        return NO_INITIAL if subject.then is None else self

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        return Wants(alone=subject.journey.least(), what="one example in both networks", passes=JOURNEY)


# ---------------------------------------------------------------------------------------------------------- the outputs


@dataclass(frozen=True)
class Gap:
    """Norms over the probe: of df - J0 dw, of df, of J0 dw, and of what rounding does to df."""

    rest: float = 0.0
    change: float = 0.0
    linear: float = 0.0
    rounding: float = 0.0
    precision: str = ""  # that it was rounded in
    remark: Remark = NOTHING_TO_SAY


class Linearisation(_Compared):
    """What the outputs changed by, and what of it is J0 dw."""

    zero = UNTRAINED

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Linearisation(subject.journey)


class _Linearisation(Simple):
    then = push = True

    def __init__(self, journey: Journey) -> None:
        super().__init__({"examples": journey.groups}, journey.subject.drift)
        self.journey, self.pushing = journey, Pushing(journey)
        self.sums = torch.zeros(journey.groups, 3, dtype=torch.float64)
        self.counts = torch.zeros(journey.groups)
        journey.listeners.append(self)
        journey.push = self.pushing

    def take(self, stretch: Stretch) -> None:
        if stretch.change is None or stretch.linear is None:
            return
        parts = torch.stack([t.square().sum(1) for t in (stretch.change - stretch.linear, stretch.change, stretch.linear)], 1)
        self.sums.index_add_(0, stretch.group, parts.cpu())
        self.counts += torch.bincount(stretch.group, minlength=len(self.counts))

    def value(self, place: str, without: Group | None = None) -> Gap:
        self.journey.walk()
        if not self.journey.moved:
            return Gap()
        if not self.pushing.way:
            raise Missing(f"the product of the initial Jacobian with the change of the weights cannot be had ("
                          f"{self.pushing.reason})")
        keep = torch.ones(len(self.sums), dtype=torch.bool)
        if without is not None:
            keep[without[1]] = False
        rest, change, linear = self.sums[keep].sum(0).sqrt().tolist()
        precision = self.journey.last.precision
        rounding = (self.pushing.rounding * self.counts[keep].sum().item()) ** 0.5
        return Gap(rest, change, linear, rounding, str(precision).removeprefix("torch."), self.pushing.remark)


# ---------------------------------------------------------------------------------------------------- what layers read


@dataclass(frozen=True)
class Turned:
    """1 - CKA by layer, and what is to be said of it."""

    layers: Mapping[str, float]
    remark: Remark = NOTHING_TO_SAY


class FeatureChange(_Compared):
    """1 - CKA of what each hidden layer read then and reads now, by layer."""

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _FeatureChange(subject.journey)


class _FeatureChange(Simple):
    then, push = True, False

    def __init__(self, journey: Journey) -> None:
        super().__init__({"examples": journey.groups}, journey.subject.drift)
        self.journey, self.subject = journey, journey.subject
        survey = self.subject.survey
        self.hidden = {k: m for k, m in survey.batched.items() if m.kind in ("dense", "grouped") and k not in survey.given}
        self.partial = NOTHING_TO_SAY  # what is to be said if not all rows have room
        self.examples = self.tokens = torch.zeros(0, dtype=torch.bool)  # which of them are compared
        self.rows: dict[str, list[tuple[Tensor, Tensor, Tensor]]] | None = None  # now, then, groups, by map
        journey.listeners.append(self)

    def take(self, stretch: Stretch) -> None:
        assert stretch.then is not None
        if self.rows is None:
            self.rows = self._chosen(stretch)
        for name, parts in self.rows.items():
            now, then = (self._read(name, run, stretch) for run in (stretch.now, stretch.then))
            if now is not None and then is not None and now[0].shape == then[0].shape:
                parts.append((now[0], then[0], now[1]))

    def _per_token(self, info: MapInfo) -> bool:
        """Has each position of the map an output of its own?"""
        shape = self.subject.survey.shape
        return len(shape) == 2 and shape[0] > 1 and info.positions == shape[0]

    def _chosen(self, stretch: Stretch) -> dict[str, list[tuple[Tensor, Tensor, Tensor]]]:
        """The maps that read different things, and as many rows of them as memory allows, evenly spaced."""
        subject, calls = self.subject, stretch.calls(stretch.now)
        alike: dict[Any, str] = {}
        for k in self.hidden:
            alike.setdefault(tuple((c.read.data_ptr(), c.read.shape, c.read.stride()) for c in calls.get(k, ())), k)
        names = [k for k in alike.values() if k in calls]
        mask, shape = subject.probe.mask, subject.survey.shape
        length = shape[0] if any(self._per_token(self.hidden[k]) for k in names) else 1
        real = mask if mask is not None and mask.shape[1] == length else torch.ones(subject.probe.n, length, dtype=torch.bool)
        tokens = min(MOST_TOKENS, int(real.sum()))
        held = sum(2 * sum(c.read.numel() for c in calls[k]) // stretch.n * subject.itemsize * (
            tokens // length if self._per_token(self.hidden[k]) else subject.probe.n) for k in names)
        share = min(1.0, subject.memory / 2 / max(1, held))
        self.examples = _evenly(torch.ones(subject.probe.n, dtype=torch.bool), int(subject.probe.n * share))
        self.tokens = _evenly(real.cpu(), int(tokens * share))
        if share < 1:
            self.partial = Remark(Mark.ESTIMATED, f"from {share:.0%} of the rows: memory= holds no more")
        return {k: [] for k in names if k not in subject.refused}

    def _read(self, name: str, run: Pass, stretch: Stretch) -> tuple[Tensor, Tensor] | None:
        """What a map read, "rows d", and the groups of the rows."""
        info = self.hidden[name]
        reading = as_read(info, stretch.calls(run).get(name, []), stretch.n)
        if reading is None:
            return None
        h, positions = reading
        keep = self.subject.real(name, stretch.rows, h.shape[1]) if positions else None
        if name in self.subject.refused:
            return None
        if self._per_token(info) and h.shape[1] == self.tokens.shape[1]:
            chosen = self.tokens[stretch.rows].to(h.device)
            chosen = chosen if keep is None else chosen & keep.to(h.device)
            return h[chosen].to(self.subject.source.dtype), stretch.group[:, None].expand(chosen.shape)[chosen.cpu()]
        h = h if keep is None else h * keep.to(h)[..., None]
        mine = self.examples[stretch.rows]
        return h[mine.to(h.device)].flatten(1).to(self.subject.source.dtype), stretch.group[mine]

    @cached_property
    def known(self) -> list[dict[str, float]]:
        """1 - CKA by layer: of all rows, and without each group."""
        self.journey.walk()
        survey = self.subject.survey
        if all(k in survey.given for k in survey.maps):
            alone = all(k in survey.structured or k in survey.biases for k in self.journey.parameters)
            raise Missing(NO_HIDDEN if alone else NOTHING_READ)
        changes: list[dict[str, float]] = [{} for _ in range(1 + self.journey.groups)]
        few = False
        for name in list(self.rows or ()):
            assert self.rows is not None
            parts = self.rows.pop(name)  # they are let go
            if not parts or len({now.shape[1] for now, _, _ in parts}) > 1:
                continue
            now, then, group = (torch.cat([part[i] for part in parts]) for i in range(3))
            if len(now) < FEWEST:
                few = True
                continue
            for change, cka in zip(changes, self._compared(name, now, then, group), strict=True):
                change[name] = 1.0 - min(1.0, cka) if cka == cka else cka
        changes = [{k: v for k, v in change.items() if v == v} for change in changes]
        if not changes[0]:
            raise Missing(NO_ROOM if few and self.partial.text else TOO_FEW if few else NOTHING_READ)
        return changes

    def _compared(self, name: str, now: Tensor, then: Tensor, group: Tensor) -> list[float]:
        """CKA of all rows, and without each group. The features of the initial network are those of the last measurement, and so
        is their size."""
        a, b = (Rows(X, group, self.journey.groups) for X in (now, then))
        sizes = self.subject.kept.setdefault("initial features", {})
        key = (name, self.journey.groups, tuple(map(id, self.journey.norms)), len(now))
        if key not in sizes:
            sizes[key] = b.hsic(b)
        return debiased_cka(a, b, sizes[key])

    def value(self, place: str, without: Group | None = None) -> Turned:
        return Turned(self.known[0 if without is None else 1 + without[1]], self.partial)


def _evenly(real: Tensor, number: int) -> Tensor:
    """So many of those that are True, evenly spaced."""
    index = real.flatten().nonzero()[:, 0]
    chosen = index[torch.linspace(0, len(index) - 1, min(number, len(index)), dtype=torch.float64).round().long()]
    return torch.zeros(real.numel(), dtype=torch.bool).index_fill_(0, chosen, True).view(real.shape)


# ------------------------------------------------------------------------------------------- what a layer's weights do


class Moved(NamedTuple):
    """Norms of dW h + db and of W0 h + b0, and the factor that brought a scale-invariant W to its initial norm."""

    change: float
    first: float
    scale: float = 1.0


@dataclass(frozen=True)
class FunctionChange(_Compared):
    """Norms of dW h + db and of W0 h + b0 over what each map reads now."""

    place: Place = "map"
    zero = "0/0: the initial weights of this layer make nothing of what it reads"

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _FunctionChange(subject.journey)


class _FunctionChange(Simple):
    then = push = False

    def __init__(self, journey: Journey) -> None:
        super().__init__({"examples": journey.groups})
        self.journey, self.subject = journey, journey.subject
        survey = self.subject.survey
        self.maps = [k for k in self.subject.maps if k not in survey.readouts and k in self.subject.W0]
        self.sums = {k: torch.zeros(journey.groups, 2, dtype=torch.float64) for k in self.maps}
        self.reached: set[str] = set()
        self.kept: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
        journey.listeners.append(self)

    def weights(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """W - W0 and W0 of a map, and both of its bias; of a small one they are kept."""
        if name in self.kept:
            return self.kept[name]
        info = self.subject.survey.maps[name]
        large = info.entries > KEPT and info.kind != "grouped"  # a difference of near numbers is exact in any precision
        W, W0 = self.subject.plain(name) if large else (self.subject.W[name], self.subject.W0[name])
        assert W0 is not None
        scale = self.journey.scales.get(str(info.weight), 1.0)
        W = W if scale == 1 else W * scale
        now, then = (self._bias(name, state) for state in (self.journey.last, self.journey.first))
        bias = None if now is None or then is None else torch.stack([now - then, then])
        known = (W.detach() - W0.detach(), W0.detach(), bias)
        if not large:
            self.kept[name] = known
        return known

    def _bias(self, name: str, state: Mapping[str, Tensor]) -> Tensor | None:
        """What is added to the map's output, if anything is; not a multiple of a bias, whose size is not known."""
        maps, module = self.subject.survey.maps, self.subject.survey.maps[name].module
        known = dict(self.subject.survey.biases)
        alone = f"{module}.bias" if module else "bias"
        if not maps[name].layouts and [k for k, info in maps.items() if info.module == module] == [name]:
            known.setdefault(alone, (name,))  # of a layer that is read one example at a time
        for bias, own in known.items():
            sizes = [torch.Size(maps[k].shape[:-1]).numel() for k in own]
            if name in own and bias in state and state[bias].numel() == sum(sizes):
                dtype = torch.float64 if self.subject.errors or self.subject.wide else self.subject.source.dtype
                return state[bias].detach().flatten().to(self.subject.home, dtype).split(sizes)[own.index(name)]
        return None

    def take(self, stretch: Stretch) -> None:
        batched = self.subject.survey.batched
        for name in self.maps:
            calls = stretch.calls(stretch.now).get(name, [])
            if name not in batched or not calls:
                continue
            for c, layout in zip(calls, batched[name].layouts, strict=True):
                self._add(c, layout, stretch.rows, stretch.group)

    def _add(self, c: Call, layout: Layout, rows: slice, group: Tensor) -> None:
        """What a call would have written with the change of the weights, and with the initial ones."""
        name, n = c.name, len(group)
        *matrices, bias = self.weights(name)
        squares = []
        for i, W in enumerate(matrices):
            z = by_example(remade(c, W, self.subject.source.dtype), n, layout).flatten(2)
            keep = self.subject.real(name, rows, z.shape[1])
            z = z if bias is None else z.add_(bias[i].to(z))  # it was made here
            z = z if keep is None else z.mul_(keep.to(z)[..., None])
            squares.append(torch.linalg.vector_norm(z.flatten(1), dim=1).cpu().double().square())
        self.sums[name].index_add_(0, group, torch.stack(squares, 1))
        self.reached.add(name)

    def _one_by_one(self) -> None:
        """Maps that can only be read of single examples."""
        journey, subject = self.journey, self.subject
        single = [k for k in self.maps if k not in subject.survey.batched]
        if journey.mixes or not single:
            return
        for i in range(subject.probe.n):
            rows = slice(i, i + 1)
            run = journey.run(journey.last, journey.examples(rows), i)
            for c in run.calls:
                if c.name in single:
                    self._add(c, "major", rows, torch.tensor([i % journey.groups]))

    @cached_property
    def known(self) -> dict[str, Tensor]:
        self.journey.walk()
        self._one_by_one()
        return self.sums

    def value(self, place: str, without: Group | None = None) -> Moved:
        if place not in self.subject.maps:
            raise Missing(APART)
        if place in self.subject.survey.readouts:
            raise Missing(READOUT, Mark.TRIVIAL)
        if place not in self.known or place not in self.reached:
            raise Missing("no example of the probe reached this layer", Mark.IDLE)
        if place in self.subject.refused:
            raise Missing(self.subject.refused[place], Mark.REFUSED)
        sums = self.known[place]
        keep = [g for g in range(len(sums)) if without is None or g != without[1]]
        change, first = sums[keep].sum(0).sqrt().tolist()
        return Moved(change, first, self.journey.scales.get(str(self.subject.survey.maps[place].weight), 1.0))


LINEARISATION = Linearisation("linearisation")
FEATURE_CHANGE = FeatureChange("feature_change_by_layer")
FUNCTION_CHANGE = FunctionChange("function_change_by_map")
