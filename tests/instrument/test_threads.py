"""Threads that measure different models at the same time, while others train theirs, do not notice each other. If a thread trains
the very model that is measured, the measurement is an error or has the right numbers, and what was trained stays.

A measurement is held in the middle of a forward pass, and another thread works in the meantime; or all run at once, switched
between as often as Python allows.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import richter
from richter.core import CaptureError, DisturbedError
from richter.instrument.capture.quiet import Detour

quiet_file = sys.modules["richter.instrument.capture.quiet"]  # the package has a function of that name
FEW = ("nfc", "double_centred_nfc", "tangent_cka")
PATIENCE = 120  # seconds, until a thread that hangs is given up


class Checkpointed(nn.Module):
    """Blocks that are recomputed in the backward pass, in both of torch's ways; it counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.readout = nn.Linear(5, 6), nn.Linear(6, 3)
        self.first = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 6))
        self.second = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 7)), nn.Tanh(), nn.Linear(7, 6))
        self.computed: dict[str, int] = {"first": 0, "second": 0}

    def block(self, name: str) -> Callable[[Tensor], Tensor]:
        def run(z: Tensor) -> Tensor:
            self.computed[name] += 1
            return getattr(self, name)(z)
        return run

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x)
        z = z + torch.utils.checkpoint.checkpoint(self.block("first"), z, use_reentrant=False)
        z = z + torch.utils.checkpoint.checkpoint(self.block("second"), z, use_reentrant=True)
        return self.readout(torch.tanh(z))


def parametrised() -> nn.Module:
    p = parametrizations
    return nn.Sequential(p.spectral_norm(nn.Linear(5, 8)), nn.Tanh(), p.weight_norm(nn.Linear(8, 6)), nn.Tanh(),
                         p.orthogonal(nn.Linear(6, 6)), nn.Linear(6, 3))  # fmt: skip


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 6), nn.Dropout(0.3), nn.Linear(6, 3))


def built(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(11)
    return factory()


def probe() -> richter.Probe:
    return richter.Probe(torch.randn(9, 5, generator=torch.Generator().manual_seed(7)), torch.arange(9) % 3, kernel_examples=4)


def rows(snap: richter.Snapshot) -> list[str]:
    return [repr((r.layer, r.measure, r.value, r.error, r.note)) for r in snap.rows]


def measured(model: nn.Module, mode: str = "eval") -> list[str]:
    start = {k: v + 0.1 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    return rows(richter.measure(model, probe(), FEW, initial=start, mode=mode))


def trained(model: nn.Module, steps: int) -> dict[str, Tensor]:
    """Weights and buffers after some steps of training that draw nothing."""
    draw = torch.Generator().manual_seed(5)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(model(torch.randn(8, 5, generator=draw)), torch.arange(8) % 3).backward()
        optimiser.step()
    return model.state_dict()


def assert_same(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert expected.keys() == found.keys()
    assert [k for k in expected if not torch.equal(expected[k], found[k])] == []


def globals_of_torch() -> dict[str, Any]:
    checkpointing = {k: id(v) for k, v in vars(torch.utils.checkpoint).items() if callable(v)}
    return {**checkpointing, "cache": (parametrize._cache_enabled, sorted(parametrize._cache)),
            "stance": id(torch._dynamo.eval_frame._stance)}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = globals_of_torch()
    yield
    assert globals_of_torch() == before


@contextlib.contextmanager
def held(factory: Callable[[], nn.Module]) -> Iterator[Callable[[], None]]:
    """Another thread measures a model and is held in the middle of a forward pass, until the block ends or what it is given is
    called; its numbers are those of a measurement that nobody holds."""
    model = built(factory)
    expected = measured(model)
    inside, go = threading.Event(), threading.Event()

    def wait(module: nn.Module, args: Any) -> None:
        inside.set()
        assert go.wait(PATIENCE)

    with ThreadPoolExecutor(1) as threads:
        handle = [m for m in model.modules() if isinstance(m, nn.Linear)][-1].register_forward_pre_hook(wait)
        result = threads.submit(measured, model)

        def release() -> None:
            go.set()
            assert result.result(PATIENCE) == expected

        try:
            assert inside.wait(PATIENCE)
            yield release
        finally:
            go.set()
        release()
        handle.remove()


# ------------------------------------------------------------------------------------ while a measurement is under way


@pytest.mark.parametrize("measuring", [Checkpointed, parametrised])
@pytest.mark.parametrize("training", [Checkpointed, parametrised])
def test_training_is_not_disturbed(measuring: Callable[[], nn.Module], training: Callable[[], nn.Module]) -> None:
    alone = trained(built(training), 6)
    model = built(training)
    with held(measuring):
        assert_same(alone, trained(model, 6))
    if isinstance(model, Checkpointed):
        assert model.computed == {"first": 12, "second": 12}  # once in the forward and once in the backward pass


def test_a_copy_of_the_measured_model_is_trained_undisturbed() -> None:
    """Copies of a parametrised module share its class."""
    alone = trained(built(parametrised), 6)
    model = built(parametrised)
    copies: list[nn.Module] = []

    def factory() -> nn.Module:
        copies.append(copy.deepcopy(model))
        return copies[-1]

    with held(factory):
        assert type(copies[0][0]) is not type(model[0])
        assert_same(alone, trained(model, 6))
    assert type(copies[0][0]) is type(model[0])


def test_weights_that_a_user_caches_stay_cached() -> None:
    model, x = built(parametrised), torch.ones(2, 5)
    with held(parametrised) as release, parametrize.cached():
        before = model[0].weight
        model(x)
        release()
        assert model[0].weight is before
    assert model[0].weight is not before


def test_compiled_code_runs_compiled() -> None:
    """Also where torch insists that something is compiled."""
    runs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph.forward(*args)
        return run

    torch._dynamo.reset()
    model = nn.Linear(5, 3)
    function = torch.compile(lambda x: torch.tanh(model(x)), backend=backend, fullgraph=True)
    function(torch.ones(2, 5))
    with held(lambda: Calls(function)) as release:
        runs.clear()
        function(torch.ones(2, 5))
        assert len(runs) == 1
        release()
        assert len(runs) == 1  # the other thread's was not compiled
        function(torch.ones(2, 5))
        assert len(runs) == 2
    torch._dynamo.reset()


class Calls(nn.Module):
    """A compiled function of no module's own, behind a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.readout, self.function = nn.Linear(5, 5), nn.Linear(3, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.function(self.first(x)))


def casts(z: Tensor) -> set[Any]:
    """The nodes of its graph that cast something."""
    nodes, left = set(), [z.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            left += [n for n, _ in node.next_functions]
    return {n for n in nodes if "ToCopy" in n.name()}


def test_weights_that_autocast_has_cast_stay_cast() -> None:
    """The cache is that of all threads; a weight that is cast twice would collect its gradient in another precision."""
    W, x = torch.randn(5, 3, requires_grad=True), torch.ones(2, 5)
    with held(parametrised) as release, torch.autocast("cpu", torch.bfloat16):
        a = x @ W
        release()
        b = x @ W
    assert casts(a) == casts(b) != set()


# ---------------------------------------------------------------------------------------- threads that share one model


class Holding(nn.Module):
    """A model that can be held in the middle of a forward pass, whichever thread runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.readout = nn.Linear(5, 6), nn.Dropout(0.0), nn.Linear(6, 3)
        self.W = nn.Parameter(torch.eye(6))
        self.hold: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x))
        self.hold()
        z = self.dropout(z) @ (self.W if self.training else self.W.detach())
        return self.readout(z)


class Hold:
    """The first thread that comes is held until it is let go, in its first forward pass or after so many."""

    def __init__(self) -> None:
        self.inside, self.go, self.thread = threading.Event(), threading.Event(), 0
        self.passes = 0

    def __call__(self) -> None:
        self.passes -= 1
        if not self.inside.is_set() and self.passes < 0:
            self.thread = threading.get_ident()
            self.inside.set()
        if threading.get_ident() == self.thread:
            assert self.go.wait(PATIENCE)


@pytest.fixture
def model_held() -> Iterator[tuple[Holding, Hold]]:
    torch.manual_seed(11)
    model, hold = Holding().train(), Hold()
    yield model, hold
    hold.go.set()
    assert quiet_file._MEASURED == {}
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("how", ["optimiser", "by hand", "gradients", "buffer"])
def test_a_step_of_training_in_the_middle_of_a_measurement_stays(how: str, model_held: tuple[Holding, Hold]) -> None:
    """The measurement is refused, and the other thread's weights and gradients are not put back."""
    model, hold = model_held
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model.register_buffer("steps", torch.zeros(()))
    loss = model(torch.ones(2, 5)).square().sum()
    loss.backward(retain_graph=True)
    weights, steps, twin = list(model.parameters()), model.steps, copy.deepcopy(model)
    for p, q in zip(weights, twin.parameters(), strict=True):
        q.grad = p.grad.clone()
    model.hold = hold
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(measured, model)
        assert hold.inside.wait(PATIENCE)
        if how == "optimiser":
            optimiser.step()
        elif how == "by hand":
            for p in weights:
                p.data.add_(p.grad, alpha=-0.1)
        elif how == "buffer":
            steps.add_(1.0)
        else:
            loss.backward()
        hold.go.set()
        with pytest.raises(DisturbedError) as caught:
            result.result(PATIENCE)
        assert "changed while the model was measured, and other threads run" in str(caught.value)
        assert "Measure in the thread that trains, or a copy" in str(caught.value)
    if how in ("optimiser", "by hand"):
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for p, q in zip(weights, twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p.grad, 2 * q.grad if how == "gradients" else q.grad)
    assert steps.item() == (how == "buffer")


def test_training_of_a_measured_model_gives_no_wrong_number(model_held: tuple[Holding, Hold]) -> None:
    """Whole steps of training, from a forward pass on, in the middle of a measurement. Their forward passes run with what the
    measurement has put into the model; they end in an error of the measurement, and the model is whole afterwards."""
    model, hold = model_held
    weights = list(model.parameters())
    before = [p.detach().clone() for p in weights]
    model.hold = hold
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(measured, model)
        assert hold.inside.wait(PATIENCE)
        optimiser = torch.optim.SGD(weights, lr=0.1, weight_decay=0.1)
        for _ in range(3):
            F.cross_entropy(model(torch.ones(2, 5)), torch.zeros(2, dtype=torch.long)).backward()
            for p in weights:
                p.grad = torch.ones_like(p)
            optimiser.step()
        trained_to = [p.detach().clone() for p in weights]
        hold.go.set()
        with pytest.raises(CaptureError):
            result.result(PATIENCE)
    assert model.training
    assert all(p is q for p, q in zip(model.parameters(), weights, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(weights, trained_to, strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(weights, before, strict=True))
    model.hold = lambda: None
    assert measured(model) == measured(copy.deepcopy(model))


@pytest.mark.parametrize("passes", range(4))
def test_calls_by_another_thread_are_not_captured(passes: int, model_held: tuple[Holding, Hold]) -> None:
    """They change no weight, and no number of the measurement. In its first pass nothing is captured yet."""
    model, hold = model_held
    expected = measured(model)
    model.hold, hold.passes = hold, passes
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(measured, model)
        assert hold.inside.wait(PATIENCE)
        model(torch.ones(2, 5))
        hold.go.set()
        assert result.result(PATIENCE) == expected


def test_two_threads_that_measure_one_model_take_turns(model_held: tuple[Holding, Hold]) -> None:
    model, hold = model_held
    expected = measured(model)
    model.hold = hold
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(measured, model)
        assert hold.inside.wait(PATIENCE)
        second = threads.submit(measured, model)
        hold.go.set()
        assert first.result(PATIENCE) == second.result(PATIENCE) == expected


class Pooled(nn.Module):
    """Its forward pass has threads of its own, which were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.branches, self.readout = nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 4)]), nn.Linear(8, 3)
        self.pool = ThreadPoolExecutor(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(torch.tanh(torch.cat(list(self.pool.map(lambda branch: branch(x), self.branches)), 1)))


def test_threads_of_the_forward_pass_are_let_through() -> None:
    """What they call is not captured; tangent kernels are made of gradients of single examples."""
    model = built(Pooled)
    with model.pool:
        model(torch.ones(2, 5))
        found = richter.measure(model, probe(), FEW)
        model.pool = SimpleNamespace(map=map)  # type: ignore[assignment]
        expected = richter.measure(model, probe(), FEW)
    for layer in ("branches.0", "branches.1", "readout", "*"):
        assert found.value("tangent_cka", layer) == pytest.approx(expected.value("tangent_cka", layer), rel=1e-5)


# -------------------------------------------------------------------------------------------------------------- detours


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of somebody else's, with a function that says "usual"."""
    module = ModuleType("elsewhere")
    module.answer = lambda: "usual"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    return module


def around(name: str = "answer") -> Detour:
    return Detour("elsewhere", name, lambda usual, taken: lambda: "another" if taken() else usual())


def test_a_detour_is_taken_by_some_threads_only(elsewhere: Any) -> None:
    """It ends for each of them when that thread ends it, and the last one puts back what was there."""
    usual, detour = elsewhere.answer, around()
    inside, go = threading.Event(), threading.Event()

    def other() -> list[str]:
        with detour.taken():
            inside.set()
            answers = [elsewhere.answer()]
            assert go.wait(PATIENCE)
            return [*answers, elsewhere.answer()]

    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(other)
        assert inside.wait(PATIENCE)
        assert elsewhere.answer() == "usual"
        with detour.taken():
            assert elsewhere.answer() == "another"
        assert elsewhere.answer() == "usual"
        go.set()
        assert result.result(PATIENCE) == ["another", "another"]
    assert elsewhere.answer is usual


def test_a_detour_leaves_alone_what_somebody_else_put_there(elsewhere: Any) -> None:
    detour, theirs = around(), lambda: "theirs"
    with detour.taken():
        elsewhere.answer = theirs
    assert elsewhere.answer is theirs
    with detour.taken():
        assert elsewhere.answer() == "another"
    assert elsewhere.answer is theirs


def test_a_detour_around_nothing(elsewhere: Any) -> None:
    """torch may rename what is its own."""
    with around("missing").taken():
        assert not hasattr(elsewhere, "missing")
    with Detour("never.imported", "answer", lambda usual, taken: None).taken():
        assert "never.imported" not in sys.modules


# --------------------------------------------------------------------------------------------------------- all at once


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns after a few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def streams() -> list[Any]:
    """Without Python's, from which the type checker of these tests draws."""
    _, keys, *rest = np.random.get_state()  # noqa: NPY002  the global stream is what may not move
    return [torch.get_rng_state().tolist(), keys.tolist(), rest]


@pytest.mark.usefixtures("hurried")
def test_two_threads_measure_and_a_third_trains() -> None:
    """As often as it takes the third one; the measured numbers are those of one thread, to the last digit."""
    alone = trained(built(Checkpointed), 60)
    factories = (Checkpointed, parametrised)
    expected = [measured(built(f)) for f in factories]
    models, training = [built(f) for f in factories], built(Checkpointed)
    together, done = threading.Barrier(3), threading.Event()

    def measure(model: nn.Module) -> list[list[str]]:
        together.wait(PATIENCE)
        results = [measured(model)]
        while not done.is_set() or len(results) < 5:
            results.append(measured(model))
        return results

    def train() -> dict[str, Tensor]:
        together.wait(PATIENCE)
        try:
            return trained(training, 60)
        finally:
            done.set()

    with ThreadPoolExecutor(3) as threads:
        measurements = [threads.submit(measure, model) for model in models]
        weights = threads.submit(train).result(PATIENCE)
        for numbers, m in zip(expected, measurements, strict=True):
            assert all(result == numbers for result in m.result(PATIENCE))
    assert_same(alone, weights)
    assert training.computed == {"first": 120, "second": 120}


@pytest.mark.usefixtures("hurried")
def test_threads_that_draw_draw_what_they_would_draw_alone() -> None:
    """Dropout is kept on, of two models at the same time, and the streams are as they were."""
    expected = measured(built(dropping), "train")
    models, before = [built(dropping) for _ in range(3)], streams()
    with ThreadPoolExecutor(3) as threads:
        results = [threads.submit(lambda m: [measured(m, "train") for _ in range(4)], model) for model in models]
        assert all(numbers == expected for r in results for numbers in r.result(PATIENCE))
    assert streams() == before
    assert measured(models[0]) != expected
