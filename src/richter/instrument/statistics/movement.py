"""How far a network has gone from the initial one, on the same examples: the change of its outputs, in all and to first order
(LINEARISATION); whether its layers still read the same features (FEATURE_CHANGE); and what the change of a layer's weights does
to its output (FUNCTION_CHANGE). All are gathered in the one pass over the probe; beside each chunk of it, the same examples go
through the initial network once.

A network is compared as it was trained. Norms that were trained with the statistics of their batches use those of fixed blocks of
examples, because running statistics of initialisation are those of no data. A scale-invariant layer (before a norm) is taken at
its initial norm, because its scale has no effect on the outputs. Where either is so, the network that is compared is not the
network now, and the stream runs it in a sweep of its own. This is the one exception to the rule that a probe runs in eval mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from richter.core import DivergedError, Mark, Remark, RichterError
from richter.core.values import NO_HIDDEN, SMALL, give_back
from richter.instrument.capture import (
    Call,
    Pass,
    State,
    check_finite,
    moved_in_last_place,
    pushed_forward,
    pushed_twice,
    running_norms,
    same_bits,
    select,
    to_device,
)
from richter.instrument.cotangents import Cotangents, every_output
from richter.instrument.statistics.frame import (
    APART,
    NO_INITIAL,
    Gathering,
    Group,
    Missing,
    Place,
    Reading,
    Simple,
    Stack,
    Statistic,
    Sweep,
    Wants,
)
from richter.instrument.stream import Chunk, Layout, MapInfo, as_read, by_example, fitting, grouped
from richter.instrument.subject import Subject
from richter.instrument.survey import Network, applied, check_calls, passed, remade, tolerance
from richter.linalg import Rows, debiased_cka

GRAPHS = 5  # of an example, besides that of the pass: in the initial network, with tangents, and of the backward pass
OUTPUTS = 7  # arrays of outputs in double precision
TILE = 2 ** 20  # entries that are multiplied in double precision at a time
BLOCK = 64  # examples whose statistics a norm uses
SCALE_CANDIDATE = 1e-4  # a layer may be scale-invariant if |<W, df/dW>| is below this share of |W| |df/dW|
SCALE_TOLERANCE = 1e-3  # share of a layer's contribution to the outputs that the eps of a norm behind it may change
EPS_EFFECT = 0.4  # share of the effect of a norm's eps that is left, at most, when its layer is doubled: about 1/4
SCALE_ROUNDING = 16  # machine epsilons of the outputs: their rounding error when a layer is multiplied by a power of two
FEW, FEWEST = 16, 4  # examples on which a way to J0 dw is tried, and scale invariance is tested: one in 16
COTANGENTS = 3  # random cotangents of the test for candidates
CLEARLY = 10  # one cotangent is enough if no layer is within this factor of SCALE_CANDIDATE


# -------------------------------------------------------------------------------------------------------- two networks


class NetworkPair:
    """The network now and the initial one as they are compared, for all gatherings of a measurement."""

    def __init__(self, subject: Subject) -> None:
        assert subject.start is not None
        self.subject, self.start, self.first = subject, subject.start, subject.start.state
        self._few_runs: dict[bool, Pass] = {}  # initially?

    # ------------------------------------------------------------------------------------------------- the networks

    @cached_property
    def parameters(self) -> list[str]:
        """Names of the parameters, the first one of a shared parameter."""
        return [name for name, p in self.subject.model.named_parameters() if p.is_floating_point()]

    @cached_property
    def norms(self) -> list[nn.Module]:
        """Norms that were trained with statistics of batches: their running statistics have moved."""
        now = self.subject.state
        return [norm for norm, buffers in running_norms(self.subject.model)
                if any(not same_bits(now[k], self.first[k].to(now[k])) for k in buffers)]

    @cached_property
    def network(self) -> Network:
        """The network now, with norms as it was trained."""
        return replace(self.subject.network, norms=self.norms)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The precision in which it is computed with."""
        return self.network.dtype

    @cached_property
    def last(self) -> State:
        """The weights now, with scale-invariant layers at their initial norm."""
        return _scaled(self.subject.state, self.scales) if self.scales else self.subject.state

    @cached_property
    def direction(self) -> dict[str, Tensor]:
        """W - W0 of the parameters that have moved."""
        changes = {k: self.last[k].detach() - self.first[k].detach() for k in self.parameters}
        return {k: d for k, d in changes.items() if bool(d.any())}

    @cached_property
    def sweep(self) -> Sweep | None:
        """The network that is compared, where it is not the network now. Nothing is checked where norms mix examples."""
        network = replace(self.network, state=self.last)
        if self.norms:
            return Sweep(replace(network, audit=None), tuple(self.blocks))
        return Sweep(network) if self.scales else None

    @cached_property
    def few(self) -> Any:
        """Some examples from all over the probe; of a large model as many as have room."""
        n, (each, change, _) = self.subject.probe.n, self.sizes
        number = min(n, max(FEWEST, min(FEW, n // 16)))
        number = fitting(self.subject.memory - change, each, number) if change else number
        return to_device(select(self.subject.x, torch.linspace(0, n - 1, number).long()), self.subject.device)

    # --------------------------------------------------------------------------------------------- scale invariance

    @cached_property
    def scales(self) -> dict[str, float]:
        """|W0| / |W| for the weights of scale-invariant layers and for their biases."""
        sizes = {k: (self.first[k].norm().item(), self.subject.state[k].norm().item()) for k in self.layers}
        grown = {k: before / size for k, (before, size) in sizes.items() if before and size and before != size}
        candidates, with_effect = list(grown), set()
        for state in (self.subject.state, self.first):
            chosen, without = self._scale_candidates(state) if candidates else (set(), set())
            candidates = [k for k in candidates if k in chosen | without]
            with_effect |= chosen
        candidates = [k for k in candidates if k in with_effect]
        scales = {name: grown[k] for k in self._scale_invariant(candidates) for name in self.layers[k]}
        if False in self._few_runs and not scales:
            self.few_outputs = self._few_runs[False].f.detach()
        self._few_runs.clear()
        return scales

    @cached_property
    def layers(self) -> dict[str, list[str]]:
        """Each weight matrix with its bias, if it has one."""
        layers = {}
        for k in self.parameters:
            owner, dot, attribute = k.rpartition(".")
            bias = f"{owner}{dot}{attribute.replace('weight', 'bias')}"
            if self.first[k].dim() > 1:
                layers[k] = [k, bias] if bias != k and bias in self.parameters else [k]
        return layers

    def _few_run(self, state: State) -> Pass:
        """A few examples in the network now, or in the initial one; kept while scale invariance is tested."""
        initial = state is self.first
        if initial not in self._few_runs:
            self._few_runs[initial] = self.run(state, self.few, 0, record=False)
        return self._few_runs[initial]

    @cached_property
    def few_outputs(self) -> Tensor:
        """Outputs of the network now on a few examples."""
        return self.run(self.last, self.few, 0, record=False).f.detach()

    def _scale_candidates(self, state: State) -> tuple[set[str], set[str]]:
        """Weights for which <W, df/dW> + <b, df/db> is nearly zero beside |W| |df/dW| + |b| |df/db|, for random combinations of
        the outputs of a few examples; and weights without any gradient, as in a branch that ends in zeros. These say nothing of
        their scale, so the other network decides. The first combination is enough where every weight has a clear effect."""
        run = self._few_run(state)
        names = list(dict.fromkeys([*self.layers, *(k for own in self.layers.values() for k in own)]))
        draw, share = torch.Generator().manual_seed(0), SCALE_CANDIDATE + 8 * torch.finfo(state.precision).eps
        effects: dict[str, float] = dict.fromkeys(self.layers, 0.0)
        bounds: dict[str, float] = dict.fromkeys(self.layers, 0.0)

        def candidates(share: float) -> set[str]:
            return {k for k, effect in effects.items() if bounds[k] > 0 and effect <= share ** 2 * bounds[k]}

        for combination in range(COTANGENTS):
            V = torch.randn(run.f.shape, generator=draw, dtype=torch.float64).to(run.f)
            products = {k: (self.inner(state[k], d), state[k].detach().norm().item() * d.norm().item())
                        for k, d in zip(names, run.in_turns(V, [state[k] for k in names]), strict=True)}
            for weight, own in self.layers.items():
                effects[weight] += sum(products[k][0] for k in own) ** 2
                bounds[weight] += sum(products[k][1] for k in own) ** 2
            if not combination and not candidates(CLEARLY * share):
                break
        return candidates(share), {k for k, bound in bounds.items() if bound == 0}

    def _scale_invariant(self, layers: Sequence[str]) -> Sequence[str]:
        """The layers that may be multiplied by any large number without effect, in both networks. All of them are tested
        together; if that fails, one after another."""
        def invariant(some: Sequence[str]) -> bool:
            names = [name for k in some for name in self.layers[k]]
            return all(self._unchanged(state, names, self._few_run(state).f) for state in (self.subject.state, self.first))

        if not layers or invariant(layers):
            return layers
        return [k for k in layers if invariant([k])] if len(layers) > 1 else []

    def _unchanged(self, state: State, names: list[str], f: Tensor) -> bool:
        """Do the outputs stay the same if these weights are multiplied by t and by 2t?

        For a large t the eps of a norm is negligible, so f(2t W) = f(t W) up to rounding error; a power of two adds no rounding
        error of its own. f(t W) - f(W) shows what eps, or saturation, does at the scale of now. It must be small beside the
        layer's contribution to the outputs, f(W) - f(0), not beside the outputs: a branch may contribute little. The effect of
        eps falls as 1/t^2, to a quarter for 2 W; a small effect of another kind, such as saturation, does not fall so fast.
        """
        def outputs(factor: float) -> Tensor:
            return self.wide(self.run(_scaled(state, dict.fromkeys(names, factor)), self.few, 0, record=False).f)

        eps = torch.finfo(state.precision).eps
        t = 2.0 ** round(-math.log2(eps) / 2)
        try:
            twice, near, far = map(outputs, (2.0, t, 2 * t))
        except DivergedError:  # the products overflow: they grow with the weights
            return False
        rounding = SCALE_ROUNDING * eps * near.norm()
        if (far - near).norm() > rounding or (twice - near).norm() > EPS_EFFECT * (near - self.wide(f)).norm() + rounding:
            return False
        try:
            contribution = self.wide(f) - outputs(0.0)
        except DivergedError:  # a norm without eps divides by zero: without the layer there are no outputs
            contribution = self.wide(f)
        return bool((near - self.wide(f)).norm() <= SCALE_TOLERANCE * contribution.norm())

    # ------------------------------------------------------------------------------------------------- sizes, groups

    @cached_property
    def blocks(self) -> list[slice]:
        """Examples that go through the networks together where norms mix them: fixed blocks, whatever the size of chunks. A rest
        of less than half a block joins the last one."""
        n = self.subject.probe.n
        starts = [i for i in range(0, n, BLOCK) if i == 0 or n - i >= BLOCK // 2]
        return [slice(a, b) for a, b in zip(starts, [*starts[1:], n], strict=True)]

    @cached_property
    def groups(self) -> int:
        """Groups of examples for the jackknife: blocks where norms mix examples."""
        if not self.norms:
            return self.subject.groups
        return len(self.blocks) if self.subject.errors else 1

    def group(self, rows: slice) -> Int[Tensor, " n"]:
        """Jackknife group of each of these examples."""
        if self.norms:
            return torch.full((rows.stop - rows.start,), self.blocks.index(rows) % self.groups)
        return torch.arange(rows.start, rows.stop) % self.groups

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of one example, besides its pass (graphs in the initial network, what is pushed through it, what a layer reads,
        and outputs in double precision); of the change of a large model's weights, with gradients of some (of one that is used
        twice, three); and of the smallest piece of work: of one example, or of weights that are moved in their last place."""
        subject, survey = self.subject, self.subject.survey
        numbers, outputs = [self.first[k].numel() for k in self.parameters], 8 * OUTPUTS * survey.outputs
        each = subject.itemsize * (GRAPHS * survey.graph + max((m.unfolded for m in survey.maps.values()), default=0)) + outputs
        change = subject.itemsize * (sum(numbers) + 3 * max(numbers, default=0))
        change = change if change > SMALL else 0
        moved = 2 * subject.itemsize * (sum(numbers) + survey.graph) + outputs if change else 0
        whole = each + subject.itemsize * survey.graph
        return each, change, max(whole * (min(BLOCK, subject.probe.n) if self.norms else 1) + change, moved)

    def give_back(self) -> None:
        """Give back to the system what a large model has let go."""
        give_back(self.sizes[1])

    # ---------------------------------------------------------------------------------------------------- the passes

    def wide(self, t: Tensor) -> Tensor:
        """A tensor in float64, which differences of near numbers take."""
        return t.detach().to(self.subject.home, torch.float64)

    def inner(self, a: Tensor, b: Tensor) -> float:
        """<a, b> in double precision, some entries at a time."""
        return sum((self.wide(p) * self.wide(q)).sum().item()
                   for p, q in zip(a.detach().reshape(-1).split(TILE), b.detach().reshape(-1).split(TILE), strict=True))

    def run(self, state: State, x: Any, seed: int, record: bool = True, plain: bool = False) -> Pass:
        """A pass of some examples, as the survey says that it is made; ``record=False``: remembering no map."""
        network = replace(self.network, state=state)
        run = passed(network, x, seed, None, plain) if record else network.run(x, record=False, seed=seed)
        if record:
            check_calls(network, x, run.calls)
        check_finite(run.f)
        return run


def _scaled(state: State, factors: Mapping[str, float]) -> State:
    """Return the same weights, with some multiplied by a number."""
    return state.exchanged({id(state[k]): (state[k].detach() * s).requires_grad_() for k, s in factors.items()})


def network_pair(subject: Subject) -> NetworkPair:
    """Current and initial network of this measurement, made once."""
    if NetworkPair not in subject.shared:
        subject.shared[NetworkPair] = NetworkPair(subject)
    return subject.shared[NetworkPair]  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------------ movement

FORWARD, PUSHED = 1 / 3, 5 / 3  # passes: of the network now; of the initial one, what is pushed through it, and a backward pass
NOTHING_TO_SAY = Remark()


class PairGathering(Simple):
    """A gathering that compares the two networks."""

    def __init__(self, subject: Subject, remark: Remark = NOTHING_TO_SAY) -> None:
        self.subject, self.pair = subject, network_pair(subject)
        super().__init__({"examples": self.pair.groups}, remark)

    @property
    def sweep(self) -> Sweep | None:  # type: ignore[override]
        """Network that is compared with the initial one."""
        return self.pair.sweep


@dataclass(frozen=True)
class OfNetworkPair(Statistic):
    """A statistic of both networks. It ``holds`` the change of the weights, or features in half of the memory."""

    name: str
    gathering: Callable[[Subject], PairGathering]
    place: Place = "model"
    zero: str = ""
    adds: float = 0.0  # passes
    holds: Literal["", "change", "features"] = ""

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        return NO_INITIAL if subject.start is None else self

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        (each, change, least), batched = network_pair(subject).sizes, subject.survey.batched
        held = {"": 0, "change": change, "features": max(0, subject.memory // 2 - change)}[self.holds]
        single = [k for k in subject.maps if k not in batched] if self.place == "map" else []
        return Wants((*batched, *single), outputs=True, backward=False, held=held, alone=least, beside=each, optional=True,
                     what="one example in both networks", passes=FORWARD + PUSHED, adds=self.adds)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return self.gathering(subject)


# ---------------------------------------------------------------------------------------------------------- the outputs

WAYS: dict[str, Callable[..., tuple[Pass, Tensor]]] = {"forward mode": pushed_forward, "two backward passes": pushed_twice}
CAPTURES = "captures"  # the way that is left: what every linear map read and is asked
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError)  # of what has no such derivative
ONE_IN = 8  # examples are compared with a backward pass
MARGIN = 3  # rounding was seen to be 0.4 to 1.5 times its estimate
NO_WAY = "the product of the initial Jacobian with the change of the weights cannot be had"


@dataclass(frozen=True)
class Gap:
    """Norms over the probe: of df - J0 dw, of df, of J0 dw, and of what rounding does to df."""

    rest: Any = 0.0  # a number, or one for each group that is left out
    change: Any = 0.0
    linear: Any = 0.0
    rounding: Any = 0.0
    precision: str = ""  # that it was rounded in
    remark: Remark = NOTHING_TO_SAY


class Linearisation(PairGathering):
    """The change of the outputs, and the part of it that is J0 dw, the first-order effect of the change of the weights on the
    outputs of the initial network. It comes in the first way that a model allows and that agrees with its backward pass: forward
    mode; backward twice; or what every linear map read and is asked."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject, network_pair(subject).start.drift)
        self.sums = torch.zeros(self.pair.groups, 3, dtype=torch.float64)
        self.counts = torch.zeros(self.pair.groups)
        self.moved, self.failure = False, ""

    @cached_property
    def way(self) -> tuple[str, str]:
        """The way that works here, found once for an architecture; or "" and the reason why there is none."""
        kept = self.subject.kept
        if Linearisation not in kept:
            kept[Linearisation] = self._found()
        return kept[Linearisation]  # type: ignore[no-any-return]

    def _found(self) -> tuple[str, str]:
        """Return the first way of computing J0 dw that agrees with a backward pass, or the reasons why none does."""
        reasons, few = [], self.pair.few
        for way, product in WAYS.items():
            try:
                if self._agrees(few, self._product(product, few, 0)[1], 0):
                    return way, ""
                reasons.append(f"{way} is not what its backward pass says")
            except RichterError:
                raise
            except FAILURES as why:
                reasons.append(f"{way}: {type(why).__name__}: {str(why).splitlines()[0] if str(why) else ''}")
        if self.pair.norms:
            return "", "; ".join([*reasons, "norms over batches leave no gradients of single examples"])
        return CAPTURES, ""

    def _product(self, product: Callable[..., tuple[Pass, Tensor]], x: Any, seed: int) -> tuple[Pass, Tensor]:
        """Outputs of the initial network, and J0 dw, computed in one way."""
        pair = self.pair
        return product(lambda state: pair.run(state, x, seed, plain=True), pair.first, pair.direction)

    def _agrees(self, x: Any, tangent: Tensor, seed: int) -> bool:
        """<V, J v> = <J^T V, v> for a random V on these examples?"""
        pair = self.pair
        pair.give_back()  # what the pass in forward mode has left
        run = pair.run(pair.first, x, seed, record=False)
        V = torch.randn(run.f.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(run.f)
        expected = size = 0.0
        gradients = run.in_turns(V, [pair.first[k] for k in pair.direction])
        for d, v in zip(gradients, pair.direction.values(), strict=True):
            expected += pair.inner(d, v)
            size += d.norm().item() * v.norm().item()
        return abs(pair.inner(V, tangent) - expected) <= tolerance(pair.first.precision) * size

    def _holds(self, chunk: Chunk, tangent: Tensor) -> bool:
        """Does it agree on one in eight of these examples, others in every measurement; where norms mix them, on one block?"""
        audit, n, first = self.subject.audit, chunk.n, chunk.rows.start
        if audit is None:
            return True
        if self.pair.norms:
            due = self.pair.blocks[audit.number % len(self.pair.blocks)] == chunk.rows
            return not due or self._agrees(chunk.x, tangent, first)
        if n == 1:
            return (first + audit.number) % ONE_IN != 0 or self._agrees(chunk.x, tangent, first)
        some = audit.order(n)[:max(1, n // ONE_IN)]
        return self._agrees(select(chunk.x, some), tangent[some.to(tangent.device)], first)

    def add(self, reading: Reading) -> None:
        self.moved = bool(self.pair.direction)
        if not self.moved or not self.way[0] or self.failure:
            return
        self.pair.give_back()  # what the chunk before has left
        pushed = self._captured(reading.chunk) if self.way[0] == CAPTURES else self._pushed(reading)
        if pushed is not None:
            change, linear = pushed
            group = self.pair.group(reading.rows)
            parts = torch.stack([t.square().sum(1) for t in (change - linear, change, linear)], 1)
            self.sums.index_add_(0, group, parts.cpu())
            self.counts += torch.bincount(group, minlength=len(self.counts))

    def merge(self, other: Linearisation) -> None:
        self.sums, self.counts = self.sums + other.sums, self.counts + other.counts
        self.moved, self.failure = self.moved or other.moved, self.failure or other.failure

    def again(self) -> bool:
        self.pair.__dict__.pop("direction", None)  # as large as the model, and nobody looks at it again
        return False

    def _pushed(self, reading: Reading) -> tuple[Tensor, Tensor] | None:
        """The change of the outputs "n k", and J0 dw; zero at outputs that do not count. The pass of the initial network serves
        the others."""
        way, wide, counted, chunk = self.way[0], self.pair.wide, self.subject.targets.counted, reading.chunk
        then, tangent = self._product(WAYS[way], chunk.x, chunk.rows.start)
        if not self._holds(chunk, tangent):
            if not self.pair.norms and self.cotangents.exact:
                return self._captured(chunk)
            self.failure = f"{NO_WAY}: on some examples of the probe, {way} disagrees with the backward pass"
            return None
        reading.then.run = replace(then, heard=grouped(then.calls))
        change, linear = (t.reshape(chunk.n, -1) for t in (wide(chunk.f) - wide(then.f.reshape(chunk.n, -1)), wide(tangent)))
        real = 1 if counted is None else counted[chunk.rows].to(change)
        return change * real, linear * real

    def _captured(self, now: Chunk) -> tuple[Tensor, Tensor]:
        """The change of (combinations of) the outputs "n v", and sum over maps of <g, dW h + db>, with gradients of single
        examples for parameters without a map."""
        subject, survey, v, wide = self.subject, self.subject.survey, self.pair.direction, self.pair.wide
        maps = {k: info for k, info in survey.batched.items() if info.weight in v and info.weight in survey.structured}
        biases = {b: own for b, own in survey.biases.items() if b in v}
        names = list(dict.fromkeys([*maps, *(k for own in biases.values() for k in own)]))
        loose = [k for k in v if k not in biases and k not in survey.structured]
        chunk = Chunk(subject.initial_network, now.x, now.rows, names, subject.targets.rowwise(self.cotangents, "mean"), loose)
        f = chunk.f
        linear = f.new_zeros(len(chunk.V), now.n)
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
        change = wide(now.f) - wide(f)
        return torch.einsum("vnk,nk->nv", wide(chunk.V), change), wide(linear.T)

    @cached_property
    def cotangents(self) -> Cotangents:
        """All outputs, or combinations of them, where these are captured."""
        return every_output.chosen(None, self.subject.survey.outputs, "mean")

    def value(self, place: str, without: Group | None = None) -> Gap:
        if not self.moved:
            return Gap()
        way, reason = self.way
        if self.failure or not way:
            raise Missing(self.failure or f"{NO_WAY} ({reason})")
        keep = torch.ones(len(self.sums), dtype=torch.bool)
        if without is not None:
            keep[without[1]] = False
        rest, change, linear = self.sums[keep].sum(0).sqrt().tolist()
        rounding = (self._rounding * self.counts[keep].sum().item()) ** 0.5
        sampled = way == CAPTURES and not self.cotangents.exact
        remark = Remark(Mark.ESTIMATED, self.cotangents.label(self.subject.survey.outputs)) if sampled else NOTHING_TO_SAY
        return Gap(rest, change, linear, rounding, str(self.pair.last.precision).removeprefix("torch."), remark)

    def leaving(self, place: str, kind: str) -> Stack:
        whole, keep = self.value(place), 1 - torch.eye(len(self.sums), dtype=self.sums.dtype)
        rest, change, linear = (keep @ self.sums.cpu()).sqrt().T.numpy()
        rounding = (self._rounding * (keep @ self.counts.cpu().to(keep))).sqrt().numpy()
        without = replace(whole, rest=rest, change=change, linear=linear, rounding=rounding)
        return Stack(without, len(keep), lambda g: self.value(place, (kind, g)))

    @cached_property
    def _rounding(self) -> float:
        """The mean square, over a few examples, of what rounding may do to the change of an example's outputs: what it does to
        the outputs if every weight is moved in its last place, and that they are rounded themselves; twice because two networks
        are subtracted, and with a margin."""
        pair, few, eps = self.pair, self.pair.few, torch.finfo(self.pair.last.precision).eps
        moved = moved_in_last_place(pair.last, pair.parameters)
        f, g = pair.wide(pair.few_outputs), pair.wide(pair.run(moved, few, 0, record=False).f)
        last_place = (eps * f).square().sum().item() / 12  # of a number that is rounded to the nearest
        return 2 * MARGIN ** 2 * ((f - g).square().sum().item() + last_place) / len(f)


# ---------------------------------------------------------------------------------------------------- what layers read

FEWEST_ROWS, MOST_TOKENS = 32, 2048  # rows of features that are compared
TOO_FEW = (f"fewer than {FEWEST_ROWS} rows to compare (examples, or real tokens where each has an output): give a larger probe")
NO_ROOM = f"memory= has no room for {FEWEST_ROWS} rows of what the layers read; give more"
NOTHING_READ = ("no hidden layer reads as much of every example, or all that is read is constant, so there are no features to "
                "compare")


@dataclass(frozen=True)
class Turned:
    """1 - CKA by layer, and what is to be said of it."""

    layers: Mapping[str, Any]  # a number, or one for each group that is left out
    remark: Remark = NOTHING_TO_SAY


def reading_apart(calls: Mapping[str, Sequence[Call]], names: Iterable[str]) -> list[str]:
    """The maps of ``names`` that are called, and of those that read the same tensors the first."""
    alike: dict[Any, str] = {}
    for k in names:
        alike.setdefault(tuple((c.read.data_ptr(), c.read.shape, c.read.stride()) for c in calls.get(k, ())), k)
    return [k for k in alike.values() if k in calls]


def masked_read(subject: Subject, name: str, calls: Sequence[Call], rows: slice) -> tuple[Tensor, Tensor | None] | None:
    """Return what a map read of some examples, "n s d", and which positions count (None: all). None where it is lost, or where
    masked positions cannot be told."""
    reading = as_read(subject.survey.maps[name], calls, rows.stop - rows.start)
    if reading is None:
        return None
    h, positions = reading
    keep = subject.masks.real(name, rows, h.shape[1]) if positions else None
    return None if name in subject.masks.refused else (h, keep)


class FeatureChange(PairGathering):
    """1 - CKA of what each hidden layer read then and reads now, by layer."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject, network_pair(subject).start.drift)
        survey = subject.survey
        self.hidden = {k: m for k, m in survey.batched.items() if m.kind in ("dense", "grouped") and k not in survey.given}
        self.partial = NOTHING_TO_SAY  # what is to be said if not all rows have room
        self.examples = self.tokens = torch.zeros(0, dtype=torch.bool)  # which of them are compared
        self.rows: dict[str, list[tuple[Tensor, Tensor, Tensor]]] | None = None  # now, then, groups, by map

    def add(self, reading: Reading) -> None:
        if self.rows is None:
            self.rows = self._chosen(reading.chunk)
        group = self.pair.group(reading.rows)
        for name, parts in self.rows.items():
            now, then = (self._read(name, c.run.heard, reading.rows, group) for c in (reading.chunk, reading.then))
            if now is not None and then is not None and now[0].shape == then[0].shape:
                parts.append((now[0], then[0], now[1]))

    def merge(self, other: FeatureChange) -> None:
        self.rows = self.rows or {}
        for name, parts in (other.rows or {}).items():
            self.rows.setdefault(name, []).extend(parts)

    def _per_token(self, info: MapInfo) -> bool:
        """Has each position of the map an output of its own?"""
        shape = self.subject.survey.shape
        return len(shape) == 2 and shape[0] > 1 and info.positions == shape[0]

    def _chosen(self, chunk: Chunk) -> dict[str, list[tuple[Tensor, Tensor, Tensor]]]:
        """The maps that read different things, and as many rows of them as memory allows, evenly spaced."""
        subject, calls, n = self.subject, chunk.run.heard, self.subject.probe.n
        names = reading_apart(calls, self.hidden)
        mask, shape = subject.probe.mask, subject.survey.shape
        length = shape[0] if any(self._per_token(self.hidden[k]) for k in names) else 1
        real = mask if mask is not None and mask.shape[1] == length else torch.ones(n, length, dtype=torch.bool)
        tokens = min(MOST_TOKENS, int(real.sum()))
        held = sum(2 * sum(c.read.numel() for c in calls[k]) // chunk.n * subject.itemsize * (
            tokens // length if self._per_token(self.hidden[k]) else n) for k in names)
        share = min(1.0, subject.memory / 2 / max(1, held))
        self.examples = _evenly(torch.ones(n, dtype=torch.bool), int(n * share))
        self.tokens = _evenly(real.cpu(), int(tokens * share))
        if share < 1:
            self.partial = Remark(Mark.ESTIMATED, f"from {share:.0%} of the rows: memory= holds no more")
        return {k: [] for k in names if k not in subject.masks.refused}

    def _read(self, name: str, calls: Mapping[str, Sequence[Call]], rows: slice, group: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return what a map read, "rows d", and the groups of the rows."""
        reading = masked_read(self.subject, name, calls.get(name, []), rows)
        if reading is None:
            return None
        h, keep = reading
        if self._per_token(self.hidden[name]) and h.shape[1] == self.tokens.shape[1]:
            chosen = self.tokens[rows].to(h.device)
            chosen = chosen if keep is None else chosen & keep.to(h.device)
            return h[chosen].to(self.pair.dtype), group[:, None].expand(chosen.shape)[chosen.cpu()]
        h = h if keep is None else h * keep.to(h)[..., None]
        chosen = self.examples[rows]
        return h[chosen.to(h.device)].flatten(1).to(self.pair.dtype), group[chosen]

    @cached_property
    def changes(self) -> list[dict[str, float]]:
        """1 - CKA by layer: of all rows, and without each group."""
        survey = self.subject.survey
        if all(k in survey.given for k in survey.maps):
            alone = all(k in survey.structured or k in survey.biases for k in self.pair.parameters)
            raise Missing(NO_HIDDEN if alone else NOTHING_READ)
        changes: list[dict[str, float]] = [{} for _ in range(1 + self.pair.groups)]
        few, rows = False, self.rows or {}
        sizes = self.subject.kept.setdefault(FeatureChange, {})  # of the initial features, the same as in the last measurement
        for name in list(rows):
            parts = rows.pop(name)  # they are let go
            if not parts or len({now.shape[1] for now, _, _ in parts}) > 1:
                continue
            now, then, group = (torch.cat([part[i] for part in parts]) for i in range(3))
            if len(now) < FEWEST_ROWS:
                few = True
                continue
            a, b = (Rows(X, group, self.pair.groups) for X in (now, then))
            key = (name, self.pair.groups, tuple(map(id, self.pair.norms)), len(now))
            if key not in sizes:
                sizes[key] = b.hsic(b)
            for change, cka in zip(changes, debiased_cka(a, b, sizes[key]), strict=True):
                if not math.isnan(cka):
                    change[name] = 1.0 - min(1.0, cka)
        if not changes[0]:
            raise Missing(NO_ROOM if few and self.partial.text else TOO_FEW if few else NOTHING_READ)
        return changes

    def value(self, place: str, without: Group | None = None) -> Turned:
        return Turned(self.changes[0 if without is None else 1 + without[1]], self.partial)

    def leaving(self, place: str, kind: str) -> Sequence[Any]:
        left = self.changes[1:]
        layers = {name: np.array([change.get(name, math.nan) for change in left]) for name in self.changes[0]}
        return Stack(Turned(layers, self.partial), len(left), lambda g: Turned(left[g], self.partial))


def _evenly(real: Tensor, number: int) -> Tensor:
    """So many of those that are True, evenly spaced."""
    index = real.flatten().nonzero()[:, 0]
    chosen = index[torch.linspace(0, len(index) - 1, min(number, len(index)), dtype=torch.float64).round().long()]
    return torch.zeros(real.numel(), dtype=torch.bool).index_fill_(0, chosen, True).view(real.shape)


# ------------------------------------------------------------------------------------------- what a layer's weights do

KEPT = 2 ** 18  # entries of a matrix of which several copies are kept
READOUT = ("the read-out: its output is the model's, and moves as far where the network is still its linearisation, so this says "
           "nothing of features")


class Moved(NamedTuple):
    """Norms of dW h + db and of W0 h + b0, and the factor that brought a scale-invariant W to its initial norm."""

    change: Any  # a number, or one for each group that is left out
    first: Any
    scale: float = 1.0


class FunctionChange(PairGathering):
    """Norms of dW h + db and of W0 h + b0 over what each map reads now."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.maps = [k for k in subject.maps if k not in subject.survey.readouts and k in subject.matrices.W0]
        self.sums: dict[str, Tensor] = {}  # squares "groups 2" of the norms, of maps that examples reach
        self.kept: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}

    def _weights(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """W - W0 and W0 of a map, and both of its bias; of a small one they are kept."""
        if name in self.kept:
            return self.kept[name]
        subject, info = self.subject, self.subject.survey.maps[name]
        large = info.entries > KEPT and info.kind != "grouped"  # a difference of near numbers is exact in any precision
        W, W0 = subject.matrices.plain(name) if large else (subject.matrices.W[name], subject.matrices.W0[name])
        assert W0 is not None
        scale = self.pair.scales.get(str(info.weight), 1.0)
        W = W if scale == 1 else W * scale
        now, then = (self._bias(name, state) for state in (self.pair.last, self.pair.first))
        bias = None if now is None or then is None else torch.stack([now - then, then])
        weights = (W.detach() - W0.detach(), W0.detach(), bias)
        if not large:
            self.kept[name] = weights
        return weights

    def _bias(self, name: str, state: State) -> Tensor | None:
        """Bias that is added to the map's output, if any; not a multiple of a bias, whose size is not known."""
        subject, maps = self.subject, self.subject.survey.maps
        module = maps[name].module
        biases = dict(subject.survey.biases)
        if not maps[name].layouts and [k for k, info in maps.items() if info.module == module] == [name]:
            biases.setdefault(f"{module}.bias" if module else "bias", (name,))  # of a layer that is read one example at a time
        for bias, own in biases.items():
            if name not in own or bias not in state:
                continue
            sizes = [torch.Size(maps[k].shape[:-1]).numel() for k in own]
            if state[bias].numel() == sum(sizes):
                dtype = torch.float64 if subject.errors or subject.wide else subject.network.dtype
                return state[bias].detach().flatten().to(subject.home, dtype).split(sizes)[own.index(name)]
        return None

    def add(self, reading: Reading) -> None:
        group, maps = self.pair.group(reading.rows), self.subject.survey.maps
        for name, calls in reading.chunk.run.heard.items():
            layouts: Sequence[Layout] = maps[name].layouts or ["major"] * len(calls)  # a single example: everything is its own
            for c, layout in zip(calls, layouts, strict=True) if name in self.maps else ():
                self._add(c, layout, reading.rows, group)

    def merge(self, other: FunctionChange) -> None:
        for name, sums in other.sums.items():
            self.sums[name] = self.sums[name] + sums if name in self.sums else sums

    def _add(self, c: Call, layout: Layout, rows: slice, group: Tensor) -> None:
        """Add what a call would have written with the change of the weights, and with the initial ones."""
        name, n = c.name, len(group)
        *matrices, bias = self._weights(name)
        squares, keep = list[Tensor](), None
        for i, written in enumerate(remade(c, matrices, self.pair.dtype)):
            z = by_example(written, n, layout).flatten(2)
            keep = self.subject.masks.real(name, rows, z.shape[1]) if i == 0 else keep
            z = z if bias is None else z.add_(bias[i].to(z))  # it was made here
            z = z if keep is None else z.mul_(keep.to(z)[..., None])
            squares.append(torch.linalg.vector_norm(z.flatten(1), dim=1).cpu().double().square())
        sums = self.sums.setdefault(name, torch.zeros(self.pair.groups, 2, dtype=torch.float64))
        sums.index_add_(0, group, torch.stack(squares, 1))

    def value(self, place: str, without: Group | None = None) -> Moved:
        subject = self.subject
        if place not in subject.maps:
            raise Missing(APART)
        if place in subject.survey.readouts:
            raise Missing(READOUT, Mark.TRIVIAL)
        if place not in self.sums:
            raise Missing("no example of the probe reached this layer", Mark.IDLE)
        if place in subject.masks.refused:
            raise Missing(subject.masks.refused[place], Mark.REFUSED)
        squares = self.sums[place]
        keep = [g for g in range(len(squares)) if without is None or g != without[1]]
        change, first = squares[keep].sum(0).sqrt().tolist()
        return Moved(change, first, self.pair.scales.get(str(subject.survey.maps[place].weight), 1.0))

    def leaving(self, place: str, kind: str) -> Stack:
        whole, squares = self.value(place), self.sums[place].cpu()
        change, first = ((1 - torch.eye(len(squares), dtype=squares.dtype)) @ squares).sqrt().T.numpy()
        return Stack(whole._replace(change=change, first=first), len(squares), lambda g: self.value(place, (kind, g)))


LINEARISATION = OfNetworkPair(
    "linearisation", Linearisation, zero="0/0: untrained, the weights are the initial ones", adds=PUSHED, holds="change")
FEATURE_CHANGE = OfNetworkPair("feature_change_by_layer", FeatureChange, adds=FORWARD, holds="features")
FUNCTION_CHANGE = OfNetworkPair("function_change_by_map", FunctionChange, "map",
                                "0/0: the output of this layer's initial weights is zero")
