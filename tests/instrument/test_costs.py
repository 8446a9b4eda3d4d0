"""Cheap and bounded: every contraction gives the same kernel, plans say what is done, and estimates are unbiased, carry an
error and become exact where they have nothing left to estimate."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import oracles
import richter
import richter.instrument.survey.examine
import richter.instrument.survey.memo
import richter.kernels.contract
import zoo
from richter import kernels
from richter.core import WHOLE, DivergedError, Mark, MemoryBudgetError, Remark, parse_bytes
from richter.instrument.capture import check_finite, forward, quiet, state_of
from richter.instrument.cotangents import every_output, random_outputs
from richter.instrument.evaluate import RichterWarning
from richter.instrument.observe import Measurement
from richter.instrument.statistics import Operator, per_output
from richter.instrument.statistics import kernels as tangents
from richter.instrument.statistics import output_sketch as drawn
from richter.instrument.statistics import sketches as estimates
from richter.instrument.statistics.kernels import Tangents
from richter.instrument.stream import LayerCapture
from richter.instrument.subject import Subject
from richter.instrument.survey import Audit, Survey, SurveyMemo, surveyed
from richter.kernels import contract
from richter.kernels import contract as operations
from richter.kernels.contract import Size, Sum, mirror
from richter.measures.measure import Measure
from richter.models import GPT, mlp, vgg11

TANGENT = ["tangent_alignment", "tangent_cka", "tangent_stable_rank", "tangent_correlation"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(A: Tensor, B: Tensor, relative: float = 1e-9) -> None:
    assert A.shape == B.shape
    assert (A - B).norm() <= relative * B.norm()


# ------------------------------------------------------------------------------------------------------- contractions


def capture(kind: str, n: int, s: int, v: int, seed: int) -> LayerCapture:
    """Random h and g of a map with 5 outputs (6 for a grouped one) and 4 inputs."""
    if kind == "grouped":
        return LayerCapture("grouped", draw(2, 3, 4), draw(n, s, 2, 4, seed=seed), draw(v, n, s, 2, 3, seed=seed + 1))
    if kind == "diagonal":
        return LayerCapture("diagonal", draw(5), draw(n, s, 5, seed=seed), draw(v, n, s, 5, seed=seed + 1))
    if kind == "lookup":
        h = torch.randint(-1, 4, (n, s), generator=torch.Generator().manual_seed(seed))
        return LayerCapture("lookup", draw(5, 4), h, draw(v, n, s, 5, seed=seed + 1))
    return LayerCapture("dense", draw(5, 4), draw(n, s, 4, seed=seed), draw(v, n, s, 5, seed=seed + 1))


def by_definition(c: LayerCapture, weight: bool, bias: bool) -> Tensor:
    """Gradients "v n p" in matrix and bias, position by position."""
    v, n, s = c.g.shape[:3]
    rows = []
    for k in range(v):
        for i in range(n):
            J, b = torch.zeros(c.W.shape, dtype=c.g.dtype), torch.zeros(c.g.shape[3:], dtype=c.g.dtype)
            for p in range(s):
                g, h = c.g[k, i, p], c.h[i, p]
                b += g
                if c.kind == "diagonal":
                    J += g * h
                elif c.kind == "grouped":
                    J += torch.stack([torch.outer(a, x) for a, x in zip(g, h, strict=True)])
                elif c.kind == "lookup":
                    J += torch.outer(g, F.one_hot(h, 4).to(g)) if h >= 0 else 0
                else:
                    J += torch.outer(g, h)
            rows.append(torch.cat([J.flatten() if weight else J.flatten()[:0], b.flatten() if bias else b.flatten()[:0]]))
    return torch.stack(rows).view(v, n, -1)


SHAPES = {"trace": "vnp,vmp->nm", "diagonal": "vnp,vmp->vnm", "full": "vnp,wmp->vnwm"}


@pytest.mark.parametrize("outputs", SHAPES)
@pytest.mark.parametrize("same", [True, False], ids=["one batch", "two batches"])
@pytest.mark.parametrize(("kind", "s"), [("dense", 1), ("dense", 3), ("lookup", 1), ("lookup", 3), ("grouped", 2),
                                         ("diagonal", 2)])
@pytest.mark.parametrize("way", ["pairs", "gradients"])
@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True)])
def test_every_contraction_is_the_product_of_gradients(outputs: str, same: bool, kind: str, s: int, way: str, weight: bool,
                                                       bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles so small that every loop has several turns; traces in blocks of cotangents."""
    monkeypatch.setattr(operations, "ROWS", 2)
    monkeypatch.setattr(operations, "NUMBERS", 30)
    monkeypatch.setattr(contract, "cheapest", lambda z, o: way if kind in ("dense", "lookup") else "features")
    a = capture(kind, 5, s, 4, seed=0)
    b = a if same else capture(kind, 3, s, 4, seed=7)
    expected = torch.einsum(SHAPES[outputs], by_definition(a, weight, bias), by_definition(b, weight, bias))
    K = torch.zeros(expected.shape, dtype=torch.float64)
    total = Sum(K, outputs, weight, bias, 4, contract.Scratch())
    for block in [slice(0, 1), slice(1, 4)] if outputs == "trace" else [slice(0, 4)]:
        mine = LayerCapture(a.kind, a.W, a.h, a.g[block])
        total.add(mine, mine if same else LayerCapture(b.kind, b.W, b.h, b.g[block]))
    total.close()
    close(mirror(K, outputs) if same else K, expected)


@pytest.mark.parametrize("same", [True, False], ids=["one batch", "two batches"])
@pytest.mark.parametrize("kind", ["dense", "lookup"])
@pytest.mark.parametrize("way", ["pairs", "gradients"])
def test_kernels_of_single_outputs_leave_silent_positions_out(same: bool, kind: str, way: str,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each output and of each batch its own; an output that asks nothing has a kernel of zeros."""
    sizes = []
    monkeypatch.setattr(contract, "cheapest", lambda z, o: sizes.append((o, z.s, z.t)) or way)
    a = capture(kind, 5, 6, 4, seed=0)
    b = a if same else capture(kind, 3, 6, 4, seed=7)
    for c, shift in ((a, 0), (b, 0 if same else 1)):
        c.g[0, :, 2 + shift:] = 0
        c.g[1] = 0
        c.g[2, 1:, :3] = 0  # one example is heard there
    expected = torch.einsum(SHAPES["diagonal"], by_definition(a, True, True), by_definition(b, True, True))
    K = torch.zeros(expected.shape, dtype=torch.float64)
    Sum(K, "diagonal", True, True, 4, contract.Scratch()).add(a, b)
    close(mirror(K, "diagonal") if same else K, expected)
    assert expected[0].any()
    assert not expected[1].any()
    assert sizes == [("trace", 2, 2 if same else 3), ("trace", 1, 1), ("trace", 6, 6), ("trace", 6, 6)]


def pooled(activation: nn.Module = nn.ReLU()) -> nn.Module:  # noqa: B008
    """Convolutions before a pooled linear read-out: all outputs ask the same of the last one, up to a weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), activation, nn.Conv2d(4, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(5, 3)).double()
    with torch.no_grad():
        model[6].weight[2, 1] = 0.0  # an output that asks nothing of a unit
        model[2].bias[4] = -1e3  # a unit that is dead
    return model


@pytest.mark.parametrize("outputs", SHAPES)
@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "in chunks"])
def test_pooled_readouts_are_factored(outputs: str, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "cheapest", lambda z, o: "gradients" if z.s > 1 else "pairs")
    monkeypatch.setattr(operations, "NUMBERS", 60)
    made: list[tuple[int, ...]] = []
    real = contract.gradient_tiles

    def spy(c: LayerCapture, *args: object, **options: object) -> Iterator[Tensor]:
        for i, tile in enumerate(real(c, *args, **options)):
            if i == 0:
                made.append(tuple(c.W.shape))
            yield tile

    monkeypatch.setattr(contract, "gradient_tiles", spy)
    model, x = pooled(), draw(5, 2, 6, 6)
    memory = 0.4 * kernels.plan(model, x, form=outputs).bytes if pieces else "2GiB"
    close(kernels.ntk(model, x, form=outputs, memory=memory), oracles.ntk(model, x, form=outputs))
    if not pieces and outputs != "diagonal":
        # gradients of the last convolution are made once; of the first, once for each output in a trace, once for all otherwise
        assert (made.count((5, 36)), made.count((4, 18))) == (1, 3 if outputs == "trace" else 1)


class Two(nn.Module):
    """Two linear layers that a function puts together."""

    def __init__(self, together: Callable[[nn.Linear, nn.Linear, Tensor], Tensor], *widths: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(a, b) for a, b in pairwise(widths))
        self.together = together

    def forward(self, x: Tensor) -> Tensor:
        return self.together(self.first, self.second, x)


def last_and_mean(first: nn.Linear, second: nn.Linear, x: Tensor) -> Tensor:
    """The first outputs depend on the last position alone, the others on all: positions that are silent for some outputs."""
    z = second(torch.tanh(first(x)))
    return torch.cat([z[:, -1], z.mean(1)], 1)


@pytest.mark.parametrize("outputs", SHAPES)
@pytest.mark.parametrize("way", ["pairs", "gradients"])
def test_positions_that_speak_up_late_are_heard(outputs: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "cheapest", lambda z, o: way)
    torch.manual_seed(0)
    model, x = Two(last_and_mean, 3, 4, 2).double(), draw(4, 6, 3)
    close(kernels.ntk(model, x, form=outputs), oracles.ntk(model, x, form=outputs))


def test_positions_without_an_output_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the outputs of the last token, the last block works on one position."""
    torch.manual_seed(0)
    model, x = GPT(7, 5, d=8, depth=2, heads=2).double(), torch.randint(0, 7, (4, 5))
    last = lambda logits: logits[:, -1, :3]  # noqa: E731
    seen: dict[int, set[int]] = {}
    add = Sum.add

    def spy(self: Sum, a: LayerCapture, b: LayerCapture) -> None:
        seen.setdefault(a.W.shape[0], set()).add(a.g.shape[2])
        add(self, a, b)

    monkeypatch.setattr(Sum, "add", spy)
    close(kernels.ntk(model, x, output=last), oracles.ntk(model, x, output=last))
    assert seen[32] == {1, 5}  # the MLPs: one position in the last block, all five in the first
    lines = {u.unit: u.positions for u in kernels.plan(model, x, output=last).lines}
    assert (lines["blocks.1.fc"], lines["blocks.0.fc"], lines["blocks.1.qkv.v"]) == (1, 5, 5)


class Operations(TorchDispatchMode):
    """Names of the operations that run, backward passes included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.multiplied = 0  # rows of the left factors of matrix products

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name] += 1
        if func is torch.ops.aten.mm.default:
            self.multiplied += args[0].shape[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("outputs", SHAPES)
def test_silent_positions_are_skipped_in_backward_passes(outputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they would have given, zeros, is what is found without."""
    torch.manual_seed(0)
    model, x = GPT(7, 16, d=8, depth=2, heads=2).double(), torch.randint(0, 7, (4, 16))
    last = lambda logits: logits[:, -1, :3]  # noqa: E731
    found = {}
    remembering(monkeypatch)
    for skipping in (True, False):
        if not skipping:
            monkeypatch.setattr(Survey, "silent", set())
        kernels.ntk(model, x, output=last)  # the survey
        with Operations() as count:
            found[skipping] = kernels.ntk(model, x, output=last, form=outputs), count.multiplied
    close(found[True][0], found[False][0], 1e-12)
    close(found[True][0], oracles.ntk(model, x, output=last, form=outputs))
    # three backward passes through four layers (the last block's MLP and projection, the head): 4 examples, 16 positions or one
    assert found[False][1] - found[True][1] == 3 * 4 * (4 * 16 - 4)


def test_a_layer_that_is_silent_no_more_is_heard() -> None:
    """Of the first examples, on which a model is surveyed, one position speaks; of another all do."""
    def switch(first: nn.Linear, second: nn.Linear, x: Tensor) -> Tensor:
        z = second(torch.tanh(first(x)))
        return torch.where(x[:, 0, :1] > 0, z.mean(1), z[:, -1])

    torch.manual_seed(0)
    x = draw(12, 8, 3)
    x[:, 0, 0] = -1.0
    x[9:, 0, 0] = 1.0
    model = Two(switch, 3, 4, 2).double()
    for outputs in SHAPES:
        close(kernels.ntk(model, x, form=outputs), oracles.ntk(model, x, form=outputs))


@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Softplus(), nn.Softplus(beta=2.0),
                                        nn.LogSigmoid()], ids=repr)
def test_derivatives_of_activations_are_computed_once(activation: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    remembering(monkeypatch)
    model, x = nn.Sequential(nn.Linear(3, 5), activation, nn.Linear(5, 4)).double(), draw(6, 3)
    close(kernels.ntk(model, x, form="full"), oracles.ntk(model, x, form="full"))
    with Operations() as count:
        kernels.ntk(model, x)
    curved = [n for name, n in count.seen.items() if "_backward" in name and "threshold" not in name]
    assert curved == [1]  # with four outputs


def test_derivatives_of_activations_are_computed_once_for_all_vectors_of_a_sketch() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 4)).double(), draw(12, 3)
    found = {}
    for v in (8, 64):  # 4 and 32 vectors
        with Operations() as count:
            richter.measure(model, richter.Probe(x, torch.arange(12) % 4), ["tangent_cka"], cotangents=random_outputs(v))
        found[v] = sum(n for name, n in count.seen.items() if "gelu_backward" in name)
    assert found[8] == found[64] > 0


def test_what_is_asked_of_the_read_out_is_no_view_of_the_cotangents() -> None:
    """And outputs are multiplied by nothing on the way."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 4).double(), draw(6, 3)
    with quiet(model):
        run = forward(model, x, state_of(model))
        V = draw(6, 4, seed=1)
        with Operations() as count:
            (g,), _ = run.backward(V)
        close(g, V)
        g.zero_()
        assert V.any()
        weights = [run.state["weight"], run.state["bias"]]
        close(replace(run, calls=[]).backward(V, weights)[1][0], V.T @ x)
        close(run.backward(V, weights)[1][1], V.sum(0))
    assert count.seen["aten::mul"] == 1


def test_outputs_whose_sum_overflows_are_finite() -> None:
    check_finite(torch.full((4,), 3e38))
    for wrong in (math.nan, math.inf):
        with pytest.raises(DivergedError, match="NaN or Inf"):
            check_finite(torch.tensor([1.0, wrong, -wrong]))


class Added(nn.Module):
    """W + A B, a weight that is computed: B is a map of its own, which is asked through the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = nn.Parameter(draw(5, 5)), nn.Parameter(draw(5, 5, seed=1))

    def forward(self, W: Tensor) -> Tensor:
        return W + self.A @ self.B


class Tuned(nn.Module):
    """Everything but the last position is silent in the last two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        parametrize.register_parametrization(self.b, "weight", Added(), unsafe=True)

    def forward(self, x: Tensor) -> Tensor:
        own = self.b.parametrizations.weight[0].B
        return self.c(torch.tanh(self.b(torch.tanh(torch.tanh(self.a(x)) @ own).cumsum(1))))[:, -1]


def test_a_weight_that_is_computed_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, probe = Tuned().double(), richter.Probe(draw(6, 8, 3), draw(6, 2))
    with_skips = richter.measure(model, probe, ["nfc"])
    monkeypatch.setattr(Survey, "silent", set())
    model.a.weight.data.mul_(1.0)
    without = richter.measure(model, probe, ["nfc"])
    layers = [r.layer for r in without.rows]
    assert "b.parametrizations.weight.0.B" in layers
    assert [with_skips.value("nfc", k) for k in layers] == pytest.approx([without.value("nfc", k) for k in layers], rel=1e-9)


def test_silent_positions_in_another_precision() -> None:
    def cast(first: nn.Linear, second: nn.Linear, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return second(torch.relu(first(x)))[:, -1]

    torch.manual_seed(0)
    model, x = Two(cast, 3, 5, 2), torch.randn(6, 8, 3)
    close(kernels.ntk(model, x).double(), oracles.ntk(model, x).double(), 5e-2)


def test_an_activation_outside_the_graph() -> None:
    def aside(first: nn.Linear, second: nn.Linear, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = F.softplus(second.bias, 2.0)
        return second(torch.tanh(first(x))) * scale.clone()

    torch.manual_seed(0)
    model, x = Two(aside, 3, 5, 2).double(), draw(6, 3)
    close(kernels.ntk(model, x), oracles.ntk(model, x))


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.GELU()], ids=repr)
@pytest.mark.parametrize("outputs", SHAPES)
def test_a_model_that_differentiates(activation: nn.Module, outputs: str) -> None:
    """A force is the gradient of an energy: second derivatives go through everything, and nothing is skipped."""
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(3, 6), activation, nn.Linear(6, 1))

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(self.energy(x)[:, -1].sum(), x, create_graph=True)[0][:, -1]

    torch.manual_seed(0)
    model, x = Force().double(), draw(6, 4, 3)
    close(kernels.ntk(model, x, form=outputs), oracles.ntk(model, x, form=outputs))


def test_room_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest strip of products comes first; the others lie in its place."""
    made: list[int] = []
    take = contract.Scratch.take

    def spy(self: contract.Scratch, what: str, like: Tensor, *shape: int) -> Tensor:
        before = self.kept.get(what)
        found = take(self, what, like, *shape)
        if self.kept[what] is not before:
            made.append(self.kept[what].numel())
        return found

    monkeypatch.setattr(contract.Scratch, "take", spy)
    model, x = mlp([4, 6, 20], seed=0), torch.randn(50, 4)
    kernels.ntk(model, x, form="full")
    assert made == [200 * 1000]  # a fifth of the rows, all columns


def test_an_activation_in_place_stays_in_place() -> None:
    def in_place(first: nn.Linear, second: nn.Linear, x: Tensor) -> Tensor:
        return second(F.mish(F.silu(first(x), True), inplace=True))

    torch.manual_seed(0)
    model, x = Two(in_place, 3, 5, 4).double(), draw(6, 3)
    close(kernels.ntk(model, x, form="full"), oracles.ntk(model, x, form="full"))


@pytest.mark.parametrize("size", [Size("dense", 9, 9, 4, 4, 3, 50, 20), Size("dense", 2, 2, 40, 40, 3, 5, 6),
                                  Size("dense", 9, 4, 1, 1, 3, 50, 20, same=False), Size("lookup", 9, 9, 6, 6, 2, 900, 20)])
@pytest.mark.parametrize("outputs", SHAPES)
def test_operations_are_counted(size: Size, outputs: str) -> None:
    """By a count that walks through the loops: multiplications and additions of each inner product."""
    z, half = size, 0.5 if size.same else 1.0
    v2 = z.v ** 2 if outputs == "full" else z.v
    sides = z.n * z.s + (0 if z.same else z.m * z.t)
    used = min(z.d_in, sides) if z.kind == "lookup" else z.d_in
    made = sum(2 * z.v * z.d_out * (1 if z.kind == "lookup" else z.d_in) for _ in range(sides))
    multiplied = sum(half * 2 * v2 * used * z.d_out for _ in range(z.n * z.m))
    counted = operations.costs(z, outputs)
    assert counted["gradients"][0] == made + multiplied
    read = 1 if z.kind == "lookup" else z.d_in
    if outputs != "full" or z.s == 1:
        pairs = sum(half * 2 * (read + v2 * z.d_out) for _ in range(z.n * z.m * z.s * z.t))
    else:
        pairs = z.n * z.m * half * 2 * (z.s * z.t * read + z.s * z.t * z.v * z.d_out + z.s * v2 * z.d_out)
    assert counted["pairs"][0] == pytest.approx(pairs)
    assert operations.cheapest(z, outputs) == min(counted, key=lambda way: counted[way][0])


# --------------------------------------------------------------------------------------------------------------- plans


def test_a_plan_says_what_is_done() -> None:
    model, x = mlp([30, 20, 10], seed=0), torch.randn(50, 30)
    plan = kernels.plan(model, x, form="full")
    assert (plan.examples, plan.outputs, plan.chunk, plan.passes, plan.result) == ((50, 50), 10, 50, 1, 4 * 500 ** 2)
    by_hand = sum(50 ** 2 * (d_in + 100 * d_out) for d_in, d_out in ((30, 20), (20, 10)))  # symmetric: half of two operations
    assert plan.operations == by_hand + 11 * 2 * 50 * (30 * 20 + 20 * 10)
    assert plan.backward == 10
    shown = str(plan)
    for word in ("full kernel of 50 x 50 examples, 10 outputs", "GFLOP", "contraction", "pairs", "976.57KiB of kernels"):
        assert word in shown


def test_the_operations_of_a_pass_are_those_of_its_products() -> None:
    """A lookup has none; a norm multiplies each number once; a grouped convolution has the inputs of a group."""
    def counted(model: nn.Module, x: Tensor) -> int:
        with quiet(model, "eval"):
            return richter.kernels.contract.forward_operations(surveyed(model, x)[2])
    words = nn.Sequential(nn.Embedding(50, 6), nn.LayerNorm(6), nn.Linear(6, 5))
    assert counted(words, torch.arange(12).reshape(4, 3)) == 3 * 2 * (6 + 6 * 5)
    pictures = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(6 * 16, 2))
    assert counted(pictures, torch.randn(4, 4, 6, 6)) == 2 * (16 * 6 * 2 * 9 + 96 * 2)


@pytest.mark.parametrize("outputs", SHAPES)
def test_a_plan_keeps_within_memory(outputs: str) -> None:
    model, x = vgg11(width=0.1, seed=0), torch.randn(12, 3, 32, 32)
    plenty = kernels.plan(model, x, form=outputs)
    assert plenty.chunk == 12
    tight = kernels.plan(model, x, form=outputs, memory=plenty.bytes // 2)
    assert tight.bytes <= plenty.bytes // 2
    assert tight.chunk < 12
    chunks = math.ceil(12 / tight.chunk)
    assert (tight.passes, tight.backward) == (chunks * (chunks + 1) // 2, 10 * chunks ** 2)
    frugal = kernels.ntk(model, x, form=outputs, memory=plenty.bytes // 2)
    close(frugal.double(), kernels.ntk(model, x, form=outputs).double(), 1e-5)
    with pytest.raises(MemoryBudgetError, match="The smallest that works here") as caught:
        kernels.plan(model, x, form=outputs, memory=1000)
    least = parse_bytes(re.findall(r"works here is memory='([^']+)'", str(caught.value))[0])
    assert kernels.plan(model, x, form=outputs, memory=1.01 * least).chunk >= 1


def test_whole_kernels_need_no_room_for_layers() -> None:
    """One [n, k, n, k] array is made, not one for each layer."""
    model, x = mlp([5, 6, 6, 6, 4], seed=0), torch.randn(10, 5)
    assert kernels.plan(model, x, form="full", per_layer=True).result == 4 * kernels.plan(model, x, form="full").result


# -------------------------------------------------------------------------------------------------------------- survey


def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on kernels share a memo, as the measurements of one Observer do, and nothing is audited."""
    monkeypatch.setattr(Audit, "due", lambda *_: False)
    module = importlib.import_module("richter.kernels.ntk")
    monkeypatch.setattr(module, "surveyed", functools.partial(surveyed, memo=SurveyMemo()))


@pytest.fixture
def surveys(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each survey that is made."""
    runs: list[int] = []
    real = richter.instrument.survey.examine.survey
    monkeypatch.setattr(richter.instrument.survey.examine, "survey", lambda *a: runs.append(1) or real(*a))
    return runs


def test_without_a_memo_every_measurement_is_surveyed(surveys: list[int]) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), draw(9, 3)
    for number in (1, 2):
        with quiet(model):
            surveyed(model, x)
        assert len(surveys) == number


def test_a_memo_tells_models_apart(surveys: list[int]) -> None:
    """Also two of the same shapes with the same weights, and one that takes the place of another that is gone."""
    memo, x = SurveyMemo(), draw(9, 3)
    model = nn.Linear(3, 2).double()
    twin = copy.deepcopy(model)
    first = surveyed(model, x, memo=memo)
    assert surveyed(model, x, memo=memo)[2].maps.keys() == first[2].maps.keys()
    assert len(surveys) == 1
    state = surveyed(twin, x, memo=memo)[1]
    assert len(surveys) == 2
    assert state["weight"].data_ptr() == twin.weight.data_ptr()
    surveyed(twin, x, memo=SurveyMemo())
    assert len(surveys) == 3  # what one remembers another does not know


def test_an_observer_has_its_survey_made_once(surveys: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With other weights it is seen to hold when it is looked at; where it does not, it is made anew."""
    monkeypatch.setattr(Subject, "renew", functools.partialmethod(Subject.renew, look=True))
    model, probe = mlp([6, 8, 3], seed=0), richter.Probe(torch.randn(20, 6), torch.arange(20) % 3)
    watch = richter.Observer(model, probe, when=1, budget=None, measures=["nfc"])
    for step in range(3):
        watch(step)
    assert len(surveys) == 1
    for step, number in ((3, 1), (4, 2)):
        with torch.no_grad():
            model[0].weight.mul_(1.0)
        watch(step)
        assert len(surveys) == number
        monkeypatch.setattr(richter.instrument.survey.memo, "renewed", lambda *_: None)


def test_a_survey_is_looked_at_from_time_to_time_and_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a plain model still works in the same way is trusted; what is captured is audited, and says when it does not."""
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.twice = nn.Linear(6, 8), nn.Linear(8, 3), False

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            return self.b(h) * (self.a.weight.square().sum() if self.twice else 1)

    looks, real = [], richter.instrument.survey.memo.renewed
    monkeypatch.setattr(richter.instrument.survey.memo, "renewed", lambda *args: looks.append(step) or real(*args))
    torch.manual_seed(0)
    model, probe = Turning().double(), richter.Probe(torch.randn(20, 6).double(), torch.arange(20) % 3)
    watch = richter.Observer(model, probe, when=1, budget=None, measures=["nfc", "tangent_cka"])
    for step in range(18):
        with torch.no_grad():
            model.a.weight.mul_(1.001)
        watch(step)
    assert looks == [16]
    model.twice = True
    with torch.no_grad():
        model.a.weight.mul_(1.001)
    step, said = 18, "in a way that is not a linear map"
    with pytest.warns(RichterWarning, match=said):
        snap = watch.now(step)
    with pytest.warns(RichterWarning, match=said):
        alone = richter.measure(model, probe, ["tangent_cka"])
    assert looks == [16, 18]
    assert [r.layer for r in snap.rows if r.measure == "nfc"] == ["b"]
    assert snap.value("tangent_cka", "a") == pytest.approx(alone.value("tangent_cka", "a"), rel=1e-9)


def test_notes_are_not_kept_in_a_memo() -> None:
    """What a measurement adds to the notes of a survey belongs to that measurement."""
    memo, x, model = SurveyMemo(), draw(9, 3), nn.Linear(3, 2).double()
    for _ in range(3):
        found = surveyed(model, x, memo=memo)[2]
        assert found.notes == {}
        found.notes[""] = Remark(Mark.IDLE, "mine")


def test_the_same_weights_are_surveyed_once(monkeypatch: pytest.MonkeyPatch, surveys: list[int]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), draw(9, 3)
    remembering(monkeypatch)

    def kernel() -> Tensor:
        return kernels.ntk(model, x)

    first, again = kernel(), kernel()
    assert len(surveys) == 1
    assert torch.equal(first, again)
    for number, change in enumerate([lambda: model[0].weight.data_ptr() and model[0].weight.detach().add_(0.1),  # looked at again
                                     lambda: model[0].register_forward_hook(lambda m, i, z: 2 * z),
                                     lambda: model[2].bias.requires_grad_(False)], 1):
        change()
        close(kernel(), sum(K.diagonal(dim1=1, dim2=3).sum(2) for K in oracles.tangent_kernels(model, x).values()))
        assert len(surveys) == number
    kernels.ntk(model, x + 1)
    assert len(surveys) == 4
    outputs = [2]
    some = lambda f: f[:, :outputs[0]]  # noqa: E731
    assert kernels.ntk(model, x, form="full", output=some).shape == (9, 2, 9, 2)
    outputs[0] = 1  # the same function object gives other outputs now
    assert kernels.ntk(model, x, form="full", output=some).shape == (9, 1, 9, 1)
    before = kernels.ntk(model, x)
    model[0].weight.data.mul_(2)  # which autograd does not count
    assert not torch.equal(kernels.ntk(model, x), before)


# ------------------------------------------------------------------------------------------------------------- sketches


def talker() -> tuple[nn.Module, Tensor, Tensor]:
    """3 tokens of 30 classes: 90 outputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 30)).double(), draw(10, 3, 5), torch.arange(30).reshape(10, 3)


def test_random_signs_are_their_examples_own() -> None:
    R = random_outputs(16, 3)
    signs = R.signs(range(40), 70, range(16)).double()
    assert signs.abs().eq(1).all()
    assert torch.equal(R.signs([7, 31], 70, range(2, 5)).double(), signs[2:5, [7, 31]])
    rows = signs.flatten(0, 1)
    correlations = (rows @ rows.T / 70)[~torch.eye(640, dtype=torch.bool)]
    assert correlations.mean().abs() < 4 / 70 ** 0.5 / 640  # independent, across examples, outputs and neighbouring seeds
    assert correlations.square().mean() == pytest.approx(1 / 70, rel=0.02)
    for k in (1, 7, 70, 1041):
        stream = np.random.Generator(np.random.Philox(key=np.array([3, 31 << 24 | 5], dtype=np.uint64)))
        assert R.signs([7, 31], k, [2, 5])[1, 1].tolist() == (2 * stream.integers(0, 2, k, dtype=np.int8) - 1).tolist()
    other = random_outputs(16, 4).signs(range(40), 70, range(16)).double().flatten(0, 1)
    assert (rows * other).mean().abs() < 4 / (640 * 70) ** 0.5


def test_an_average_over_random_outputs_is_that_over_all() -> None:
    """E[V^T V] = I, for shared combinations and for each example's own."""
    f = torch.zeros(50, 6, dtype=torch.float64)
    own = torch.stack([random_outputs(16, seed).rows(f, None, range(50), slice(None), "mean") for seed in range(40)])
    assert own.shape == (40, 2, 50, 6)
    close(torch.einsum("rvna,rvnb->ab", own, own) / (40 * 50), torch.eye(6, dtype=torch.float64), 0.05)
    shared = torch.stack([random_outputs(64, seed)(f)[:, 0] for seed in range(40)])
    close(torch.einsum("rva,rvb->ab", shared, shared) / 40, torch.eye(6, dtype=torch.float64), 0.1)


def test_many_outputs_are_sketched_and_the_row_says_so() -> None:
    model, x, y = talker()
    snap = richter.measure(model, richter.Probe(x, y))
    assert snap.note("tangent_cka", "0").startswith("32 random combinations of the 90 outputs of each example; sketch error ")
    assert snap.note("tangent_alignment", "0").startswith("8 outputs drawn of 30 that have labels; sketch error ")
    assert snap.note("nfc", "0") == ""  # 90 backward passes are no reason to estimate
    W, _, J = oracles.layer_io(model, x, "0")
    assert snap.value("nfc", "0") == pytest.approx(oracles.cosine(W.T @ W, oracles.agop(W, J)), rel=1e-9)


def of_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if combinations of each example's outputs had no room: from vectors of all outputs of all examples."""
    monkeypatch.setattr(drawn.OutputSketch, "least", lambda *_: 2 ** 62)


def test_sketched_kernels_are_unbiased_and_their_error_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old way, kernels of random combinations, gave .015 for an exact .0044 here."""
    of_vectors(monkeypatch)
    model, x, y = talker()
    K, Y = oracles.tangent_kernels(model, x), F.one_hot(y, 30).double().flatten(1)
    K[WHOLE] = sum(K.values())
    probe = richter.Probe(x, y)
    snaps = [richter.measure(model, probe, ["tangent_cka"], cotangents=random_outputs(64, seed)) for seed in range(40)]
    for name, kernel in K.items():
        values, errors = (torch.tensor([getattr(s, what)("tangent_cka", name) for s in snaps]) for what in ("value", "error"))
        exact = oracles.tangent_cka(kernel, Y)
        squares = values.pow(-2)  # |C K C|^2 is what is unbiased
        assert squares.mean() == pytest.approx(exact ** -2, abs=4 * squares.std().item() / 40 ** 0.5)
        assert 0.7 < errors.mean() / values.std() < 1.8
        assert ((values - exact).abs() <= 2 * errors).double().mean() >= 0.85


def test_sampled_outputs_give_the_mean_over_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = talker()
    K, Y = oracles.tangent_kernels(model, x), F.one_hot(y, 30).double().flatten(1)
    found = richter.measure(model, richter.Probe(x, y), ["tangent_alignment"])
    off = found.value("tangent_alignment", "0") - oracles.tangent_alignment(K["0"], Y)
    assert abs(off) < 4 * float(found.note("tangent_alignment", "0").rpartition("sketch error ")[2])
    monkeypatch.setattr(per_output, "SAMPLED", 90)
    every = richter.measure(model, richter.Probe(x, y), ["tangent_alignment"])
    assert every.value("tangent_alignment", "0") == pytest.approx(oracles.tangent_alignment(K["0"], Y), rel=1e-9)
    assert every.note("tangent_alignment", "0") == ""


def jackknife(values: list[float]) -> float:
    v = torch.tensor(values, dtype=torch.float64)
    return math.sqrt((len(v) - 1) / len(v) * (v - v.mean()).square().sum().item())


@pytest.mark.parametrize("labels", ["one example each", "several examples each", "one to five examples each", "numbers",
                                    "classes beside numbers"])
def test_drawn_outputs_have_the_error_of_few_examples_too(labels: str) -> None:
    """Each output left out, and each group of examples; an output that then has no label stays as it was. Of classes, those that
    more examples have are drawn more often, and count less."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 70)).double(), draw(24, 5)
    y = {"one example each": torch.arange(24) * 2, "several examples each": torch.arange(24) % 9, "numbers": draw(24, 70),
         "one to five examples each": torch.tensor([0] * 5 + [1] * 4 + [2] * 3 + [3] * 2 + [*range(4, 14)]),
         "classes beside numbers": torch.cat([100 * draw(24, 1), (draw(24, 69) > 0).double()], 1)}[labels]
    Y = y if y.dim() == 2 else F.one_hot(y, 70).double()
    row = richter.measure(model, richter.Probe(x, y, kernel_examples=None), ["tangent_alignment"]).row("tangent_alignment", "0")
    there = (Y.norm(dim=0) > 0).nonzero().flatten()
    numbers, seeded, group = "numbers" in labels, torch.Generator().manual_seed(0), torch.arange(24) % 8
    by_group = torch.stack([Y[group == g][:, there].sum(0) for g in range(8)], 1)
    sample = per_output.uniform(there, 8, seeded) if numbers else per_output.by_labels(there, by_group, 8, seeded)
    chosen = sample.picked.tolist()
    chances = dict.fromkeys(there.tolist(), 8 / len(there)) if numbers else dict(
        zip(there.tolist(), oracles.chances(Y[:, there].sum(0).tolist(), 8), strict=True))
    K = oracles.tangent_kernels(model, x)["0"]

    def aligned(c: int, keep: Tensor) -> float:
        keep = keep if Y[keep, c].norm() > 0 else torch.ones(24, dtype=torch.bool)
        return oracles.alignment(K[keep][:, c][:, keep][..., c], Y[keep, c])

    def mean(outputs: list[int], keep: Tensor) -> float:
        """sum a_c / chance_c / N; without some examples as if the chances had gone by the labels that are left."""
        if numbers:
            return sum(aligned(c, keep) for c in outputs) / len(outputs)
        left = {c: int(Y[keep, c].sum()) for c in there.tolist()}
        every = {c: int(Y[:, c].sum()) for c in there.tolist()}
        rest = [c for c in there.tolist() if chances[c] < 1]
        share = sum(left[c] for c in rest) / sum(every[c] for c in rest)
        free, drawn = sum(chances[c] < 1 for c in chosen), sum(chances[c] < 1 for c in outputs)
        total = 0.0
        for c in outputs:
            weight = 1 / chances[c]
            if chances[c] < 1:
                weight *= free / drawn * share * (every[c] / left[c] if left[c] else 1)
            total += weight * aligned(c, keep)
        return total / sum(number > 0 for number in left.values())
    everything = torch.ones(24, dtype=torch.bool)
    free = [c for c in chosen if numbers or chances[c] < 1]
    own = jackknife([mean([c for c in chosen if c != out], everything) for out in free])
    few = jackknife([mean(chosen, group != g) for g in range(8)])
    assert row.value == pytest.approx(mean(chosen, everything), rel=1e-8)
    assert row.error == pytest.approx(math.hypot(own, few), rel=1e-6)
    assert row.note == f"8 outputs drawn of {len(there)} that have labels; sketch error {own:.2g}"


def test_sketched_correlations_are_unbiased_and_their_error_is_stated() -> None:
    """Also of the squares: |AGOP|^2 leaves the noise of the sketch out."""
    model, x, y = talker()
    probe = richter.Probe(x, y)
    exact = richter.measure(model, probe, ["nfc"], cotangents=lambda f, t: every_output(f)).value("nfc", "0")
    snaps = [richter.measure(model, probe, ["nfc"], cotangents=random_outputs(64, seed)) for seed in range(60)]
    values, errors = (torch.tensor([getattr(s, what)("nfc", "0") for s in snaps]) for what in ("value", "error"))
    assert snaps[0].note("nfc", "0").startswith("64 random outputs of 90; sketch error ")
    assert values.mean() == pytest.approx(exact, abs=4 * values.std().item() / 60 ** 0.5)
    assert ((values - exact).abs() <= 2 * errors).double().mean() >= 0.85


@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_chunks_change_no_sketch(chunk: int) -> None:
    model, x, y = talker()
    names = ["nfc", "tangent_cka", "tangent_alignment"]
    random = random_outputs(32, 1)
    whole, pieces = (richter.measure(model, richter.Probe(x, y, chunk=c), names, cotangents=random) for c in (10, chunk))
    for a, b in zip(whole.rows, pieces.rows, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-9, nan_ok=True)
        assert a.error == pytest.approx(b.error, rel=1e-6, nan_ok=True)


def test_padding_enters_no_sketch() -> None:
    """Outputs of masked tokens are as if they were not: two texts that differ there give one number."""
    model, x, y = talker()
    mask = torch.ones(10, 3, dtype=torch.bool)
    mask[::2, 2] = False
    other = x.clone()
    other[::2, 2] = 9.0
    a, b = (richter.measure(model, richter.Probe(t, y, mask=mask), ["nfc", "tangent_cka"], cotangents=random_outputs(32))
            for t in (x, other))
    for name in ("nfc", "tangent_cka"):
        assert a.value(name, "0") == pytest.approx(b.value(name, "0"), rel=1e-9)


# ------------------------------------------------------------------------------------------------------- in blocks


def unformed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is formed."""
    monkeypatch.setattr(Tangents, "fits", False)


@pytest.mark.parametrize("name", ["mlp", "cnn", "groupnorm", "twice", "tied", "lstm", "embedding_bag_of_words", "raw", "encoder"])
def test_a_kernel_in_blocks_is_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are exact, and errors are those of examples left out, in blocks of any size."""
    case = zoo.CASES[name]
    model, (x, y) = case.build(), case.batch(9)
    formed = richter.measure(model, richter.Probe(x, y), TANGENT, output=case.output)
    unformed(monkeypatch)
    for chunk in (9, 4, 1):
        blocks = richter.measure(model, richter.Probe(x, y, chunk=chunk), TANGENT, output=case.output)
        assert [(r.layer, r.measure, r.mark, r.note) for r in blocks.rows] == [(r.layer, r.measure, r.mark, r.note)
                                                                               for r in formed.rows]
        for a, b in zip(blocks.rows, formed.rows, strict=True):
            assert a.value == pytest.approx(b.value, rel=1e-7, nan_ok=True), a
            assert a.error == pytest.approx(b.error, rel=1e-7 if a.measure in TANGENT[:2] else 0.05, abs=1e-9, nan_ok=True), a


def test_kernels_are_computed_in_blocks_where_they_do_not_fit_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = mlp([10, 12, 5], seed=0), torch.randn(120, 10)
    probe = richter.Probe(x, torch.arange(120) % 5, kernel_examples=None)
    blocks: list[int] = []
    real = tangents.full_blocks
    monkeypatch.setattr(tangents, "full_blocks", lambda job, x, memory: blocks.append(job.chunk) or real(job, x, memory))
    plenty = richter.measure(model, probe, TANGENT, memory="1GiB")
    assert not blocks
    tight = richter.measure(model, probe, TANGENT, memory="5MiB")  # the kernel of 600 rows takes 16 MB
    assert 0 < blocks[0] < 120
    for a, b in zip(tight.rows, plenty.rows, strict=True):
        assert (a.value, a.mark, a.note) == (pytest.approx(b.value, rel=1e-5), Mark.EXACT, "")
        assert a.error == pytest.approx(b.error, rel=0.05)


def test_an_eigenvalue_of_blocks_that_is_not_resolved_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    unformed(monkeypatch)
    monkeypatch.setattr(tangents, "STEPS", 2)
    model, x = mlp([20, 40, 5], seed=0), draw(40, 20).float()
    probe = richter.Probe(x, torch.arange(40) % 5, kernel_examples=None)
    snap = richter.measure(model, probe, ["tangent_cka", "tangent_stable_rank"])
    assert math.isfinite(snap.value("tangent_cka", "0"))
    assert math.isnan(snap.value("tangent_stable_rank", "0"))
    assert "was not resolved" in snap.note("tangent_stable_rank", "0")


def test_centring_in_blocks_keeps_its_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of a last bias and of nearly equal inputs is nearly constant; one of a bias alone is."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    probe = richter.Probe(1 + 1e-3 * draw(20, 4), draw(20, 1), kernel_examples=None)
    formed = richter.measure(model, probe, TANGENT)
    unformed(monkeypatch)
    blocks = richter.measure(model, probe, TANGENT)
    for a, b in zip(blocks.rows, formed.rows, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-7), a
    alone = nn.Linear(4, 1).double()
    alone.weight.requires_grad_(False)
    assert all(math.isnan(r.value) for r in richter.measure(alone, probe, TANGENT[1:]).rows)


def test_no_labels_and_masked_outputs_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs labels says that it has none; the rest is there."""
    model, x, y = talker()
    snap = richter.measure(model, richter.Probe(x, None), ["tangent_alignment", "tangent_cka", "tangent_stable_rank", "nfc"])
    assert math.isfinite(snap.value("nfc", "0"))
    for name in ("tangent_alignment", "tangent_cka"):
        assert math.isnan(snap.value(name, "0"))
        assert "the probe has no labels" in snap.note(name, "0")
    assert snap.value("tangent_stable_rank", "0") > 1
    few = lambda f: f[:, :, :4]  # noqa: E731
    mask = torch.ones(10, 3, dtype=torch.bool)
    mask[::2, 2] = False
    probe = richter.Probe(x, y % 4, mask=mask)
    exact = richter.measure(model, probe, TANGENT, output=few, layers=["0"])
    unlabelled = richter.measure(model, richter.Probe(x, None, mask=mask), ["tangent_stable_rank"], output=few)
    unformed(monkeypatch)
    for chunk in (10, 3):
        found = richter.measure(model, replace(probe, chunk=chunk), TANGENT, output=few, layers=["0"])
        for a, b in zip(found.rows, exact.rows, strict=True):
            assert a.value == pytest.approx(b.value, rel=1e-7), a
    found = richter.measure(model, richter.Probe(x, None, mask=mask), ["tangent_stable_rank"], output=few)
    assert found.value("tangent_stable_rank", "0") == pytest.approx(unlabelled.value("tangent_stable_rank", "0"), rel=1e-7)


@pytest.mark.parametrize(("cotangents", "says"), [
    (None, "blocks of the kernels of 20 examples and 5 outputs, then estimates of kernels over 20 examples"),
    (random_outputs(64), "estimates of kernels over 20 examples")], ids=["in blocks", "sketched"])
def test_the_smallest_memory_of_kernels_is_stated_and_works(cotangents: object, says: str,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    of_vectors(monkeypatch)
    model, x = mlp([10, 12, 5], seed=0), torch.randn(20, 10)
    probe = richter.Probe(x, torch.arange(20) % 5)
    with pytest.raises(MemoryBudgetError) as caught:
        richter.measure(model, probe, TANGENT, memory=100, cotangents=cotangents)
    assert all(part in str(caught.value) for part in says.split(", then "))
    least = re.findall(r"works here is memory='([^']+)'", str(caught.value))[0]
    frugal, plenty = (richter.measure(model, probe, TANGENT, memory=m, cotangents=cotangents) for m in (least, "2GiB"))
    for a, b in zip(frugal.rows, plenty.rows, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-3, nan_ok=True)


def test_cotangents_that_depend_on_the_outputs_meet_their_labels() -> None:
    """The labels of combinations V(f) are <V(f), y>."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), draw(8, 4), torch.arange(8) % 3

    def weighted(f: Tensor, t: Tensor | None = None) -> Tensor:
        return (f.softmax(1) * torch.tensor([1.0, 2.0, 3.0], dtype=f.dtype))[None]

    V = weighted(model(x).detach())
    K = torch.einsum("vna,namb,wmb->nvmw", V, oracles.tangent_kernels(model, x)["0"], V)
    Y = torch.einsum("vna,na->nv", V, F.one_hot(y, 3).double())
    found = richter.measure(model, richter.Probe(x, y), ["tangent_cka"], cotangents=weighted)
    assert found.value("tangent_cka", "0") == pytest.approx(oracles.tangent_cka(K, Y), rel=1e-9)


def test_a_measure_of_kernels_and_weights_is_told_apart() -> None:
    from richter.instrument.statistics import WEIGHT
    from richter.measures import Measure
    from richter.measures.alignment import CENTRED_KERNEL, SAME_OUTPUT
    model, x, y = talker()
    mixed = Measure("mixed", lambda c, w: 1.0, (CENTRED_KERNEL, WEIGHT))
    both = Measure("both", lambda c, s: c.norm + s.norm.sum().item(), (CENTRED_KERNEL, SAME_OUTPUT))
    snap = richter.measure(model, richter.Probe(x, y), [mixed, both])
    assert "one measure cannot use both" in snap.note("mixed", WHOLE)
    assert snap.value("both", "0") > 0
    assert len([r for r in snap.rows if r.measure == "both"]) == 3


class Heads(nn.Module):
    """One linear map on [n, T, heads, d] or on [n, heads, T, d]: the same function."""

    def __init__(self, inner: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.first, self.map, self.read = inner, nn.Linear(3, 8), nn.Linear(4, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x)).unflatten(2, (2, 4))
        z = self.map(z.transpose(1, 2)).transpose(1, 2) if self.inner else self.map(z)
        return self.read(torch.tanh(z).flatten(2))


def test_a_mask_finds_its_tokens_among_heads() -> None:
    x, mask = draw(6, 5, 3), torch.arange(5).expand(6, 5) < 3
    probe = richter.Probe(x, torch.arange(30).reshape(6, 5) % 2, mask=mask)
    a, b = (richter.measure(Heads(inner).double(), probe, ["nfc"]) for inner in (False, True))
    assert a.value("nfc", "map") == pytest.approx(b.value("nfc", "map"), rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_convolutions_have_kernels(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    x, y = torch.randn(12, 2, 5, 5), torch.arange(12) % 3
    single = richter.measure(model, richter.Probe(x, y))
    half = richter.measure(model.to(dtype), richter.Probe(x.to(dtype), y))
    for a, b in zip(half.rows, single.rows, strict=True):
        assert a.value == pytest.approx(b.value, rel=0.05, abs=0.02, nan_ok=True)


class Mixed(nn.Module):
    """Half-precision layers, a norm and an output in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.read = nn.Linear(6, 8).bfloat16(), nn.LayerNorm(8), nn.Linear(8, 3).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.read(torch.relu(self.norm(self.first(x.bfloat16()).float())).bfloat16()).float()


def test_layers_of_several_precisions() -> None:
    snap = richter.measure(Mixed(), richter.Probe(torch.randn(12, 6), torch.arange(12) % 3))
    assert all(math.isfinite(snap.value("nfc", k)) for k in ("first", "read"))
    assert all(math.isfinite(snap.value("tangent_cka", k)) for k in ("first", "norm", "read", WHOLE))


# ------------------------------------------------------------------------------------------------------------ snapshots


def test_no_activation_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments and kernels of the default set: one forward pass of each example, beside the survey of a few. What
    compares with the initial network has passes of its own."""
    torch.manual_seed(0)
    measures = [m for m in richter.measures.DEFAULT if m not in richter.measures.MOVEMENT]
    model, x = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)), torch.randn(40, 1, 6, 6)
    start = {k: v + 0.1 for k, v in model.state_dict().items()}
    seen: list[int] = []
    model.register_forward_pre_hook(lambda m, args: seen.append(len(args[0])))
    probe = richter.Probe(x, torch.arange(40) % 3, chunk=16, kernel_examples=8)
    monkeypatch.setattr(richter.instrument.survey.audit, "_measurements", itertools.repeat(3))
    richter.measure(model, probe, measures, initial=start)
    audited = Counter(seen)
    monkeypatch.setattr(Audit, "due", lambda *_: False)
    seen.clear()
    richter.measure(model, probe, measures, initial=start)
    assert [n for n in seen if n > richter.instrument.survey.SURVEYED] == [16, 16]
    assert sum(seen[-3:]) == 40
    audited -= Counter(seen)  # chunks of 16, 16 and 8, in another order and in halves
    assert audited == {8: 4, 4: 2}
    passes: list[int] = []
    real = torch.autograd.grad
    measurement = Measurement(model, richter.Probe(x, torch.arange(40) % 3, chunk=40, kernel_examples=8), measures, initial=start)
    measurement.take()
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: passes.append(1) or real(*a, **k))
    measurement.take()
    assert len(passes) == 3  # one backward pass for each output; the survey is known


def test_the_cost_of_a_snapshot_is_told() -> None:
    model, x = mlp([6, 8, 3], seed=0), torch.randn(20, 6)
    probe = richter.Probe(x, torch.arange(20) % 3)
    snap = richter.measure(model, probe)
    assert snap.passes > 1
    assert math.isfinite(snap.passes)
    start = {k: v + 0.1 for k, v in model.state_dict().items()}
    assert math.isnan(richter.measure(model, probe, ["weight_change"], initial=start).passes)  # no pass of the probe was made


class Clock:
    """Ticks once for every example that goes through a model."""

    def __init__(self, model: nn.Module) -> None:
        self.now = 0
        model.register_forward_hook(lambda m, args, z: self.tick(len(z)))

    def tick(self, examples: int) -> None:
        self.now += examples

    def perf_counter(self) -> float:
        return float(self.now)


def product(f: Tensor, Y: Any, parameters: Any, vectors: Any) -> Any:
    return torch.autograd.grad(f.square().sum(), parameters, allow_unused=True)


SUMMED = Measure("summed", lambda A: float(A(torch.ones(A.size, dtype=torch.float64)).sum()), needs=(Operator("A", product),))
OF_WEIGHTS = ("weight_change", "stable_rank_of_weights", "rank_of_weights")
ALONE = [SUMMED, *(name for name in richter.measures.names() if name not in OF_WEIGHTS)]


@pytest.mark.parametrize("words", [3, 80], ids=["few outputs", "many"])
@pytest.mark.parametrize("measure", ALONE, ids=lambda m: getattr(m, "name", m))
def test_a_pass_is_as_long_as_three_forward_passes_whatever_is_measured(measure: str | Measure, words: int,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are drawn or made anew make passes of their own; what movement looks at first is none of its passes."""
    model, x = mlp([6, 8, words], seed=0).double(), draw(20, 6)
    start = {k: v + 0.1 * draw(*v.shape) for k, v in model.state_dict().items()}
    monkeypatch.setattr(richter.instrument.stream, "time", Clock(model))
    y = torch.arange(20) % words
    held_out = (draw(20, 6, seed=1), y) if measure == "held_out_accuracy" else None
    measurement = Measurement(model, richter.Probe(x, y, held_out=held_out), [measure], initial=start)
    assert math.isfinite(measurement.take().passes)
    assert measurement.subject.pass_seconds == 3 * 20


@pytest.mark.parametrize(("measure", "words", "place", "says"), [
    ("tangent_cka", 80, (drawn.OutputSketch, "why_not"), "they are dear"),
    ("tangent_alignment", 80, (per_output.KeptCaptures, "fewer_passes"), True),
    ("tangent_cka", 3, (estimates, "way"), "blocks")], ids=["gradients of vectors", "captures that are kept", "products"])
def test_passes_of_kernels_that_are_had_otherwise_are_counted(measure: str, words: int, place: tuple[Any, str], says: Any,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp([6, 8, words], seed=0).double(), draw(20, 6)
    monkeypatch.setattr(*place, lambda *a: says)
    monkeypatch.setattr(richter.instrument.stream, "time", Clock(model))
    measurement = Measurement(model, richter.Probe(x, torch.arange(20) % words), [measure])
    assert math.isfinite(measurement.take().passes)
    assert measurement.subject.pass_seconds == 3 * 20


@pytest.mark.parametrize(("n", "k"), [(1, 3), (5, 1), (1, 1)], ids=["one example", "one output", "both"])
@pytest.mark.parametrize("outputs", SHAPES)
def test_one_of_a_kind(n: int, k: int, outputs: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, k)).double(), draw(n, 4)
    close(kernels.ntk(model, x, form=outputs), oracles.ntk(model, x, form=outputs))


@pytest.mark.parametrize("outputs", SHAPES)
def test_zero_gradients_give_a_kernel_of_zeros(outputs: str) -> None:
    """Dead units before a read-out without a bias: nothing is asked of any layer, and nothing breaks."""
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3, bias=False)).double()
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
    layers = kernels.ntk(model, draw(6, 4), form=outputs, per_layer=True)
    assert not any(K.any() for K in layers.values())
    snap = richter.measure(model, richter.Probe(draw(6, 4), torch.arange(6) % 3), TANGENT)
    assert all(math.isnan(r.value) and r.note for r in snap.rows)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")
def test_memory_is_kept_as_the_system_counts_it() -> None:
    """Peak resident size beyond the result, at a memory, a half and a quarter of it; the numbers stay."""
    script = Path(__file__).parents[2] / "benchmarks" / "memory.py"
    done = subprocess.run([sys.executable, str(script), "--small"], check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    for line in lines:
        assert "kernels: kept" in line
        assert float(line.rpartition(" ")[2]) < 1e-5


DEAR = """
import sys
import torch, richter
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
watch = richter.Observer(model, richter.Probe(torch.randn(16, 3), torch.arange(16) % 2), when=1, budget=None, on_error="raise")
watch(0)
with torch.no_grad():
    for p in model.parameters():
        p += 0.1 * torch.randn_like(p)
watch(1)
assert watch.snapshots[-1].value("linearisation_gap", "*") > 0
print(*(name for name in ("sympy", "torch._dynamo", "torch._decomp.decompositions_for_jvp", "sklearn") if name in sys.modules))
"""


def test_the_first_snapshots_load_nothing_dear() -> None:
    """Each of these takes half a second or more, which a small training pays for by half of its measurements."""
    done = subprocess.run([sys.executable, "-c", DEAR], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""
