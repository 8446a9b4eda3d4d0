"""J0 v, the first-order effect of a change v of the weights on the outputs of the initial network, in the first way that a model
allows and that agrees with its backward pass: forward mode; backward twice; or what every linear map read and is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Mark, Remark, RichterError
from richter.instrument.capture import Pass, State, moved_in_last_place, pushed_forward, pushed_twice, select
from richter.instrument.cotangents import Cotangents, every_output
from richter.instrument.statistics.frame import Missing
from richter.instrument.stream import Chunk
from richter.instrument.survey import applied, tolerance

if TYPE_CHECKING:
    from richter.instrument.statistics.journey import Journey, Stretch

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
        f = chunk.recording.f
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
