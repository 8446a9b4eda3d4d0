"""Structures of published models on which numbers were wrong: caches, rare examples, batches of one, gradients of zero."""

from __future__ import annotations

import copy
import gc
import importlib.util
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import oracles
import richter
from richter.core import CaptureError, Mark, MixingError
from richter.instrument.capture import forward, quiet, state_of
from richter.instrument.survey import amended
from richter.models import GPT
from zoo_architectures import CachedBias, ConvolutionalStem, Decoder, StandardisedConv, standardised

DOCS = Path(__file__).parents[2] / "docs"
DRAW = torch.Generator().manual_seed(0)


def brute_ntk(model: nn.Module, x: Tensor) -> Tensor:
    """Tangent kernel summed over outputs, from gradients of single examples; each goes through the model twice, in a batch of
    two, because torch differentiates some batches of one wrongly."""
    model = copy.deepcopy(model).eval()
    params = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(x)):
        f = model(x[[i, i]])
        rows.append(torch.stack([torch.cat([(torch.zeros_like(p) if d is None else d).flatten() for p, d in zip(
            params, torch.autograd.grad(f[:, k].sum() / 2, params, retain_graph=True, allow_unused=True), strict=True)])
            for k in range(f.shape[1])]))
        for module in model.modules():  # each example computes what is cached again
            if hasattr(module, "cache"):
                module.cache = type(module.cache)() if isinstance(module.cache, dict) else None
    J = torch.stack(rows)
    return torch.einsum("nkp,mkp->nm", J, J)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


# --------------------------------------------------------------------------------------------------------- caches in eval mode


@pytest.mark.parametrize("where", ["attribute", "dict"])
def test_a_tensor_that_is_cached_in_eval_mode(where: str) -> None:
    torch.manual_seed(0)
    model, x = CachedBias(where).double().eval(), torch.randn(12, 4, 4, generator=DRAW, dtype=torch.float64)
    empty = copy.copy(model.cache)
    assert relative(richter.kernels.ntk(model, x), brute_ntk(model, x)) < 1e-10
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=DRAW)
    snap = richter.measure(model, richter.Probe(x, torch.arange(12) % 3), initial=before)
    now, then = CachedBias("no cache").double().eval(), CachedBias("no cache").double().eval()
    now.load_state_dict(model.state_dict())
    then.load_state_dict(before)
    assert snap.value("linearisation_gap") == pytest.approx(oracles.linearisation_gap(now, then, x), rel=1e-9)
    watch = richter.Observer(model, richter.Probe(x, torch.arange(12) % 3), when=1, budget=None, on_error="raise")
    assert watch(0) is not None
    assert model.cache == empty


class CachedBuffer(nn.Module):
    """Keeps what it computes in a buffer that is None at first."""

    def __init__(self, caches: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out, self.caches = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 3), caches
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.caches:
            return self.out(torch.tanh(x @ self.table.exp()))  # type: ignore[no-any-return]
        if self.cache is None:
            self.cache = self.table.exp()
        return self.out(torch.tanh(x @ self.cache))  # type: ignore[no-any-return]


def test_a_tensor_that_is_cached_in_a_buffer() -> None:
    model, x = CachedBuffer().double().eval(), torch.randn(12, 4, generator=DRAW, dtype=torch.float64)
    expected = brute_ntk(CachedBuffer(caches=False).double(), x)
    assert relative(richter.kernels.ntk(model, x), expected) < 1e-10
    snap = richter.measure(model, richter.Probe(x, torch.arange(12) % 3), ["tangent_cka"])
    plain = richter.measure(CachedBuffer(caches=False).double(), richter.Probe(x, torch.arange(12) % 3), ["tangent_cka"])
    assert snap.value("tangent_cka") == pytest.approx(plain.value("tangent_cka"), rel=1e-10)
    assert model.cache is None


class CachedInside(nn.Module):
    """Keeps what it computes in a container inside a container."""

    def __init__(self, caches: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out, self.caches = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 3), caches

    def forward(self, x: Tensor) -> Tensor:
        if self.caches is None:
            return self.out(torch.tanh(x @ self.table.exp()))  # type: ignore[no-any-return]
        cache = self.caches if isinstance(self.caches, deque) else self.caches["bias"]
        if not cache:
            (cache.setdefault(x.device, []) if isinstance(cache, dict) else cache).append(self.table.exp())
        first = next(iter(cache.values())) if isinstance(cache, dict) else cache
        return self.out(torch.tanh(x @ first[0]))  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [lambda: {"bias": []}, lambda: {"bias": {}, "scale": 1.0}, lambda: deque(maxlen=1)],
                         ids=["list in dict", "lists in dict in dict", "deque"])
def test_a_tensor_that_is_cached_in_containers_of_containers(make: Callable[[], Any]) -> None:
    model, x = CachedInside(make()).double().eval(), torch.randn(12, 4, generator=DRAW, dtype=torch.float64)
    assert relative(richter.kernels.ntk(model, x), brute_ntk(CachedInside(None).double(), x)) < 1e-10
    before = {k: v + 0.3 for k, v in model.state_dict().items()}
    snap, plain = (richter.measure(m, richter.Probe(x, torch.arange(12) % 3), ["linearisation_gap"], initial=before)
                   for m in (model, CachedInside(None).double()))
    assert snap.value("linearisation_gap") == pytest.approx(plain.value("linearisation_gap"), rel=1e-10)
    assert model.caches == make()


def test_a_cache_that_was_filled_without_a_graph_is_a_constant_and_said_to_be() -> None:
    model, x = CachedBuffer().double().eval(), torch.randn(12, 4, generator=DRAW, dtype=torch.float64)
    with torch.no_grad():
        model(x)
    assert relative(richter.kernels.ntk(model, x), brute_ntk(model.out, torch.tanh(x @ model.cache))) < 1e-10
    snap = richter.measure(model, richter.Probe(x, torch.arange(12) % 3), ["tangent_cka"])
    assert "never used" in snap.notes["table"]
    assert "cached by an earlier call, it is a constant" in snap.notes["table"]


class HiddenCache(nn.Module):
    """Keeps what it computes where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(4, 4, generator=DRAW)), nn.Linear(4, 3)
        kept: dict[int, Tensor] = {}
        self.remember = lambda: kept.setdefault(0, self.table.exp())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x @ self.remember()))  # type: ignore[no-any-return]


def test_no_internal_exception_escapes_from_a_hidden_cache() -> None:
    model, x = HiddenCache(), torch.randn(9, 4, generator=DRAW)
    with pytest.raises(CaptureError, match="the model uses a tensor that an earlier forward pass computed from its weights"):
        richter.kernels.ntk(model, x)


class Counts(nn.Module):
    """Its outputs change from call to call, in eval mode too."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.where, self.calls = nn.Linear(4, 3), where, 0
        self.register_buffer("count", torch.zeros(()))
        box = [0]

        def step() -> int:
            box[0] += 1
            return box[0]
        self.step = Opaque(step)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "attribute":
            self.calls += 1
            return self.inner(x) * self.calls  # type: ignore[no-any-return]
        if self.where == "buffer":
            self.count += 1
            return self.inner(x) * self.count  # type: ignore[no-any-return]
        return self.inner(x) * self.step()  # type: ignore[no-any-return]


class Opaque:
    """A function in an object that cannot be looked into."""

    __slots__ = ("call",)

    def __init__(self, call: Any) -> None:
        self.call = call

    def __call__(self) -> Any:
        return self.call()


@pytest.mark.parametrize("where", ["attribute", "buffer"])
def test_a_state_that_changes_from_call_to_call_is_the_same_in_every_pass(where: str) -> None:
    model, x = Counts(where).double().eval(), torch.randn(9, 4, generator=DRAW, dtype=torch.float64)
    K = richter.kernels.ntk(model, x)
    expected = 3 * (x @ x.T + 1)
    assert relative(K, expected) < 1e-12
    assert (model.calls, model.count.item()) == (0, 0.0)


def test_a_hidden_state_is_named() -> None:
    model, x = Counts("hidden").eval(), torch.randn(9, 4, generator=DRAW)
    with pytest.raises(CaptureError, match=r"outputs change by .* from one call to the next, with the same inputs"):
        richter.kernels.ntk(model, x)


class OnlyTrains(nn.Module):
    """Has an error in eval mode, for batches of more than so many examples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.inner, self.most = nn.Linear(4, 3), most

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and len(x) > self.most:
            raise KeyError("no eval")
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("most", "examples"), [(0, 8), (8, 9)])
def test_a_model_that_fails_in_eval_mode_says_how_it_was_called(most: int, examples: int) -> None:
    model, x = OnlyTrains(most), torch.randn(9, 4, generator=DRAW)
    watch = richter.Observer(model, richter.Probe(x, torch.arange(9) % 3), when=1, budget=None)
    with pytest.raises(KeyError, match="no eval") as caught:
        watch(0)
    assert f"called it on {examples} examples in eval mode" in caught.value.__notes__[0]
    assert len(caught.value.__notes__) == 1
    assert model.training


# ---------------------------------------------------------------------------------------------------------- one rare example


class Rare(nn.Module):
    """One of 256 examples uses a weight in a way that is not a linear map."""

    def __init__(self, at: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.at, self.a, self.b = at, nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        rare = (x[:, :1] > 5) * (self.b.weight ** 3).sum() * 50
        return self.b(torch.tanh(self.a(x))) + rare  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:layer .b.*")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk", [256, 100, 1])
def test_one_rare_example_among_many(dtype: torch.dtype, chunk: int) -> None:
    for at in (9, 130, 255):
        model, x = Rare(at).to(dtype), torch.randn(256, 6, generator=torch.Generator().manual_seed(1), dtype=dtype).clamp(-4, 4)
        x[at, 0] = 6.0
        assert relative(richter.kernels.ntk(model, x), brute_ntk(model, x)) < (1e-10 if dtype == torch.float64 else 1e-5)
        snap = richter.measure(model, richter.Probe(x, torch.arange(256) % 3, chunk=chunk), ["nfc"])
        assert not any(row.layer == "b" and row.value == row.value for row in snap.rows)
        assert snap.value("nfc", "a") > 0


def test_the_rare_example_is_named() -> None:
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(1)).clamp(-4, 4)
    x[130, 0] = 6.0
    with mock.patch("richter.kernels.ntk.amended", side_effect=amended) as amend:
        richter.kernels.ntk(Rare(0), x)
    assert [(call.args[1].maps, call.args[1].example) for call in amend.call_args_list] == [(("b",), 130)]


class Divided(nn.Module):
    """One weight is divided among three maps; a rare example uses the last of them once more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.out(self.qkv(x, x, x)[0]).mean(1)
        return h + (x[:, 0, :1] > 5) * (self.qkv.in_proj_weight[12:] ** 3).sum()  # type: ignore[no-any-return]


class Unused(Rare):
    """The rare example does not use the layer, but its weight."""

    def forward(self, x: Tensor) -> Tensor:
        rare = x[:, :1] > 5
        if len(x) > 1:
            return torch.cat([self.forward(row[None]) for row in x])
        if rare.all():
            return self.a(x)[:, :3] + (self.b.weight ** 3).sum() * torch.tensor([1.0, 0.5, 2.0])  # type: ignore[no-any-return]
        return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:layer")
@pytest.mark.parametrize("make", [Divided, lambda: Unused(0)], ids=["divided", "unused"])
def test_other_rare_uses_of_a_weight(make: Callable[[], nn.Module]) -> None:
    model = make().double()
    x = torch.randn(24, *([4, 6] if isinstance(model, Divided) else [6]), generator=torch.Generator().manual_seed(1)).clamp(-4, 4)
    x = x.double()
    x.view(24, -1)[17, 0] = 6.0
    assert relative(richter.kernels.ntk(model, x), brute_ntk(model, x)) < 1e-10


@pytest.mark.filterwarnings("ignore:layer .b.*")
@pytest.mark.parametrize("chunk", [24, 1])
def test_a_weight_that_a_rare_example_uses_without_its_layer_has_no_correlation(chunk: int) -> None:
    model, x = Unused(0).double(), torch.randn(24, 6, generator=torch.Generator().manual_seed(1)).double().clamp(-4, 4)
    x[17, 0] = 6.0
    snap = richter.measure(model, richter.Probe(x, torch.arange(24) % 3, chunk=chunk), ["nfc"])
    assert [row.layer for row in snap.rows if row.value == row.value] == ["a"]
    assert "do not rebuild its weight gradient" in snap.notes["b"]


def test_every_measurement_of_an_observer_is_checked() -> None:
    """The rare example comes with the weights of a later step, and errors are not asked for."""
    model = Rare(7).double()
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).clamp(-4, 4)
    probe = richter.Probe(x, torch.arange(40) % 3)
    watch = richter.Observer(model, probe, when=1, budget=None, measures=["nfc"])
    watch(0)
    x[30, 0] = 6.0
    probe.x[30, 0] = 6.0
    with pytest.warns(UserWarning, match="layer 'b'"):
        snap = watch(1)
    assert snap is not None
    assert not any(row.layer == "b" and row.value == row.value for row in snap.rows)


# ------------------------------------------------------------------------------------------------------------ batches of one


def test_the_defect_of_torch_is_there() -> None:
    """docs/torch_batch_norm.py says what is wrong. When this fails, torch is right, and the detour around it can go."""
    spec = importlib.util.spec_from_file_location("torch_batch_norm", DOCS / "torch_batch_norm.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    errors = [relative(*script.weight_gradient(copies)) for copies in (1, 2)]
    assert errors[1] < 1e-8
    assert errors[0] > 0.1


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda n: nn.InstanceNorm2d(n, affine=True)], ids=["batch", "instance"])
@pytest.mark.parametrize("n", [1, 5, 17])
def test_single_examples_behind_a_batch_norm(norm: Callable[[int], nn.Module], n: int) -> None:
    model, x = ConvolutionalStem(norm).double(), torch.randn(n, 2, 6, 6, generator=DRAW, dtype=torch.float64)
    assert relative(richter.kernels.ntk(model, x), brute_ntk(model, x)) < 1e-10
    whole = richter.measure(model, richter.Probe(x, torch.arange(n) % 3), ["nfc"]) if n > 1 else None
    for chunk in (1, 16) if n > 1 else ():  # the last chunk of 17 has one example
        parts = richter.measure(model, richter.Probe(x, torch.arange(n) % 3, chunk=chunk), ["nfc"])
        for name in ("stem", "out"):
            assert whole is not None
            assert parts.value("nfc", name) == pytest.approx(whole.value("nfc", name), rel=1e-9)


# -------------------------------------------------------------------------------------------------------- gradients of rounding


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gradient_that_is_rounding_error_gives_no_number(dtype: torch.dtype) -> None:
    model, x = Decoder().to(dtype), torch.randn(20, 6, generator=DRAW, dtype=dtype)
    rows = {}
    for chunk in (20, 7):
        probe = richter.Probe(x, torch.arange(20) % 3, chunk=chunk)
        snap = richter.measure(model, probe, ["nfc", "tangent_cka", "tangent_alignment"])
        rows[chunk] = {(r.layer, r.measure): r for r in snap.rows}
    for (layer, measure), row in rows[20].items():
        assert row.note == rows[7][layer, measure].note
        if layer in ("q", "k", ""):  # the positions have an effect through queries and keys alone
            assert row.value != row.value
            assert row.mark is Mark.UNDEFINED
            assert "zero here, up to rounding error" in row.note
        elif layer != "v" or measure != "nfc":  # v reads zeros: its gradient product is 0/0
            assert row.value == pytest.approx(rows[7][layer, measure].value, rel=1e-9 if dtype == torch.float64 else 1e-3)


class Leaking(nn.Module):
    """Queries and keys have hardly any effect: the values are all alike, but for a small part of the inputs."""

    def __init__(self, leak: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.leak, self.pos = leak, nn.Parameter(torch.randn(5, 8))
        self.read, self.q, self.k, self.v, self.head = nn.Linear(6, 8), *(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(x)
        target = self.leak * h
        q, k, v = self.q(target + self.pos), self.k(target + self.pos), self.v(target)
        return self.head(torch.tanh(h + torch.softmax(q @ k.mT / 8 ** 0.5, -1) @ v)).mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("dtype", "leak"), [(torch.float64, 0.0), (torch.float32, 0.0), (torch.float32, 1e-7)])
def test_rounding_errors_are_no_numbers_whatever_the_chunk(dtype: torch.dtype, leak: float) -> None:
    """A chunk of one example has so few rounding errors that they may come back when the weights move."""
    model, x = Leaking(leak).to(dtype), torch.randn(24, 5, 6, generator=torch.Generator().manual_seed(1), dtype=dtype)
    for chunk in (1, 24):
        snap = richter.measure(model, richter.Probe(x, torch.arange(24) % 3, chunk=chunk), ["nfc", "tangent_cka"])
        for name in ("q", "k"):
            assert [snap.row(m, name).mark for m in ("nfc", "tangent_cka")] == [Mark.UNDEFINED] * 2


def test_a_rounding_error_that_comes_back_when_the_weights_move_is_one_all_the_same() -> None:
    torch.manual_seed(6)
    model, x = Decoder().double(), torch.randn(12, 6, dtype=torch.float64)
    snap = richter.measure(model, richter.Probe(x, torch.arange(12) % 3, chunk=1), ["nfc"])
    assert [snap.row("nfc", name).mark for name in ("q", "k")] == [Mark.UNDEFINED] * 2


class ByHand(nn.Module):
    """Reads its weight in a way that is no linear map of what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(8, 8) / 8 ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x[..., None] * torch.tanh(self.W)).sum(-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rounding_errors_of_a_module_without_maps(dtype: torch.dtype) -> None:
    model = Leaking(0.0)
    model.q, model.k = ByHand(), ByHand()  # type: ignore[assignment]
    x = torch.randn(24, 5, 6, generator=torch.Generator().manual_seed(1), dtype=dtype)
    snap = richter.measure(model.to(dtype), richter.Probe(x, torch.arange(24) % 3), ["tangent_cka"])
    for name in ("q", "k"):
        assert "zero here, up to rounding error" in snap.row("tangent_cka", name).note
    assert snap.row("tangent_cka", "v").mark is Mark.EXACT


class ShiftedSoftmax(nn.Module):
    """The first layer adds the same number to all logits of a softmax: it has no effect, and the gradient of one example is one
    number, a small multiple of the rounding error of 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(6, 1), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.softmax(self.b(x) + self.a(x), -1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("chunk", [1, 24])
def test_a_rounding_error_of_a_single_number(chunk: int) -> None:
    model, x = ShiftedSoftmax().double(), torch.randn(24, 6, generator=torch.Generator().manual_seed(1)).double()
    snap = richter.measure(model, richter.Probe(x, torch.arange(24) % 3, chunk=chunk), ["nfc", "tangent_cka"])
    assert [snap.row(measure, "a").mark for measure in ("nfc", "tangent_cka")] == [Mark.UNDEFINED] * 2


def test_a_small_gradient_keeps_its_maps_in_single_precision() -> None:
    """Two computations of it differ by more than those of other gradients, and the map is read as it is all the same."""
    model, x = Leaking(1e-5), torch.randn(24, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact, coarse = (richter.measure(copy.deepcopy(model).to(dtype), richter.Probe(x.to(dtype), torch.arange(24) % 3), ["nfc"])
                     for dtype in (torch.float64, torch.float32))
    for name in ("q", "k"):
        assert coarse.value("nfc", name) == pytest.approx(exact.value("nfc", name), rel=1e-3)


def test_a_gradient_that_vanishes_in_depth_is_no_rounding_error() -> None:
    """|df/dW| of the first layer is 1e-13 of that of the last one, and exact."""
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(9) for m in (nn.Linear(6, 6), nn.Sigmoid())], nn.Linear(6, 3))
    with torch.no_grad():
        for m in model[::2]:
            m.weight.mul_(0.15)
    x = torch.randn(20, 6, generator=DRAW)
    snap = richter.measure(model, richter.Probe(x, torch.arange(20) % 3), ["nfc", "tangent_cka"])
    exact = richter.measure(model.double(), richter.Probe(x.double(), torch.arange(20) % 3), ["nfc", "tangent_cka"])
    sizes = richter.kernels.ntk(model, x.double(), per_layer=True)
    assert float(sizes["0"].trace() / sizes["18"].trace()) ** 0.5 < 1e-7
    for row in exact.rows:
        assert snap.value(row.measure, row.layer) == pytest.approx(row.value, rel=1e-3)


# ------------------------------------------------------------------------------------------------ gradients without numbers


class NormAtZero(nn.Module):
    """The norm of a difference that is zero has a gradient of NaN, as a softmax of nothing but -inf has in Longformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.b(torch.tanh(self.a(x)))
        return self.c(z + (z - z).square().sum(1, keepdim=True).sqrt())  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_of_nan_say_so(dtype: torch.dtype) -> None:
    model, x = NormAtZero().to(dtype), torch.randn(12, 4, generator=DRAW, dtype=dtype)
    snap = richter.measure(model, richter.Probe(x, torch.arange(12) % 3), ["nfc", "tangent_cka", "fact"])
    for row in snap.rows:
        assert (row.value != row.value) == (row.layer != "c")
        assert ("the gradient of the outputs is NaN here" in row.note) == (row.layer != "c")
    with pytest.warns(RuntimeWarning, match=r"the tangent kernel of 'a', 'b' has NaN"):
        kernels = richter.kernels.ntk(model, x, per_layer=True)
    assert kernels["c"].isfinite().all()


class Capped(nn.Module):
    """A language model whose logits ``head`` writes, and then a function of them."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gpt, self.after = GPT(70, 8, d=16, depth=1, seed=0), after

    def forward(self, ids: Tensor) -> Tensor:
        return self.after(self.gpt(ids))


@pytest.mark.parametrize(("after", "known"), [
    (lambda f: f, True), (lambda f: f.flip(-1) / 3, True), (lambda f: f * f, False),
    (lambda f: 3 * (f / 3).tanh(), False), (lambda f: f[..., :-3], False), (lambda f: f + f.roll(1, -1), False)],
    ids=["logits", "in another order", "squares", "a soft cap", "some of them", "sums of neighbours"])
def test_the_read_out_of_a_large_vocabulary_is_trivial(after: Callable[[Tensor], Tensor], known: bool) -> None:
    """560 outputs are sketched. Where the units are the outputs, the value is 1 by definition and not an estimate of it;
    where they are not, it is estimated."""
    model, ids = Capped(after), torch.randint(70, (24, 8), generator=torch.Generator().manual_seed(0))
    initial = {k: v + 0.05 * torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
               for k, v in model.state_dict().items()}
    snap = richter.measure(model, richter.Probe(ids, None), ["nfc", "cnfc", "c_uc_ratio"], initial=initial)
    for name in ("nfc", "cnfc"):
        row = snap.row(name, "gpt.head")
        assert (row.mark is Mark.TRIVIAL) == known, row
        assert row.note.startswith("trivial: the outputs read this layer directly" if known else "64 random outputs"), row
        if known:
            assert row.value == pytest.approx(1, abs=1e-12)
            assert row.error < 1e-12
        assert snap.row(name, "gpt.blocks.0.out").mark is Mark.ESTIMATED
    W, W0 = model.state_dict()["gpt.head.weight"].double(), initial["gpt.head.weight"].double()
    if known:  # K is a multiple of the identity, and drops out
        exact = ((W - W0) @ (W - W0).T).square().sum() / (W @ W.T).square().sum()
        assert snap.value("c_uc_ratio", "gpt.head") == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-105, 1e-160, 1e-200])
def test_tiny_outputs_are_not_called_trivial(scale: float) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3, bias=False)).double()
    x = torch.randn(12, 4, generator=DRAW, dtype=torch.float64)
    expected = richter.measure(model, richter.Probe(x, torch.arange(12) % 3), ["nfc"])
    with torch.no_grad():
        model[3].weight.mul_(scale)
    snap = richter.measure(model, richter.Probe(x, torch.arange(12) % 3), ["nfc"])
    for name in ("0", "2"):
        row = snap.row("nfc", name)
        assert row.mark is Mark.UNDEFINED
        assert "too small here" in row.note
    with torch.no_grad():
        model[3].weight.mul_(1e-50 / scale)
    snap = richter.measure(model, richter.Probe(x, torch.arange(12) % 3), ["nfc"])
    for name in ("0", "2"):
        assert snap.value("nfc", name) == pytest.approx(expected.value("nfc", name), rel=1e-10)


class SingleInside(nn.Module):
    """Parameters in double precision, and a softmax in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.softmax(self.a(x).float(), -1).to(x))  # type: ignore[no-any-return]


def test_numbers_of_a_coarser_precision_say_so() -> None:
    x, y = torch.randn(12, 4, generator=DRAW), torch.arange(12) % 3
    snap = richter.measure(SingleInside().double(), richter.Probe(x.double(), y, weight_decay=0.1), ["fact", "nfc"])
    assert "the network computes in float32: relative rounding error 1e-07" in snap.note("fact", "a")
    assert snap.row("nfc", "a").mark is Mark.EXACT
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).bfloat16()
    start = {k: v + 0.1 for k, v in model.state_dict().items()}
    snap = richter.measure(model, richter.Probe(x.bfloat16(), y), ["tangent_cka", "nfc", "weight_change"], initial=start)
    for measure in ("tangent_cka", "nfc"):
        assert snap.row(measure, "0").mark is Mark.ESTIMATED
        assert "the network computes in bfloat16: relative rounding error 8e-03" in snap.note(measure, "0")
    assert snap.row("weight_change", "0").mark is Mark.EXACT


# ---------------------------------------------------------------------------------------- convolutions with computed weights


class Standardise(nn.Module):
    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(gain.detach().clone())

    def forward(self, w: Tensor) -> Tensor:
        return standardised(w, self.gain)


class ModulatedConv(StandardisedConv):
    """A weight that depends on what is read is no linear map."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.style = nn.Linear(2, self.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        rows = [F.conv2d(row[None], standardised(self.weight, self.gain * self.style(row.mean((1, 2)))[:, None, None, None]))
                for row in x]
        return torch.cat(rows)


def test_a_convolution_with_a_standardised_weight_is_measured_as_a_parametrised_one() -> None:
    torch.manual_seed(0)
    own = nn.Sequential(StandardisedConv(2, 4, 3), nn.Tanh(), StandardisedConv(4, 4, 3, groups=2), nn.Tanh(), nn.Flatten(),
                        nn.Linear(16, 3)).double()
    usual = copy.deepcopy(own)
    for i in (0, 2):
        conv, gain = nn.Conv2d(2 + i, 4, 3, groups=1 + i // 2).double(), own[i].gain
        conv.load_state_dict({k: v for k, v in own[i].state_dict().items() if k != "gain"})
        usual[i] = conv
        parametrize.register_parametrization(conv, "weight", Standardise(gain), unsafe=True)
    x, rows = torch.randn(12, 2, 6, 6, generator=DRAW, dtype=torch.float64), []
    for model in (own, usual):
        start = {k: v + 0.1 * torch.arange(v.numel(), dtype=v.dtype).cos().view(v.shape) for k, v in model.state_dict().items()}
        snap = richter.measure(model, richter.Probe(x, torch.arange(12) % 3),
                               ["nfc", "cnfc", "weight_change", "function_change"], initial=start)
        rows.append({(r.layer, r.measure): r.value for r in snap.rows})
    for layer in "02":
        for measure in ("nfc", "cnfc", "weight_change", "function_change"):
            # function_change: the weight is scale-invariant up to 1e-6, and brought to its initial norm
            rel = 1e-5 if measure == "function_change" else 1e-9
            assert rows[0][layer, measure] == pytest.approx(rows[1][layer, measure], rel=rel), (layer, measure)
    assert relative(richter.kernels.ntk(own, x), brute_ntk(own, x)) < 1e-10


def test_a_convolution_whose_weight_depends_on_the_data_has_no_correlations() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ModulatedConv(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).double()
    x = torch.randn(10, 2, 6, 6, generator=DRAW, dtype=torch.float64)
    for n in (2, 10):
        snap = richter.measure(model, richter.Probe(x[:n], torch.arange(n) % 3), ["nfc"])
        assert not any(r.layer == "0" and r.value == r.value for r in snap.rows)
    assert relative(richter.kernels.ntk(model, x), brute_ntk(model, x)) < 1e-10


class TwoWeights(StandardisedConv):
    """Two convolutions with two weights, both computed from the module's own, as in DetectoRS."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.difference = nn.Parameter(torch.randn_like(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        near = F.conv2d(x, standardised(self.weight, self.gain), None, 1, 1, 1)
        return near + F.conv2d(x, standardised(self.weight + self.difference, self.gain), None, 1, 2, 2)


def test_a_module_with_two_computed_weights_has_no_correlations() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(TwoWeights(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3)).double()
    x = torch.randn(10, 2, 6, 6, generator=DRAW, dtype=torch.float64)
    snap = richter.measure(model, richter.Probe(x, torch.arange(10) % 3), ["nfc"])
    assert not any(r.layer == "0" and r.value == r.value for r in snap.rows)
    assert "its weight is computed in every call" in snap.notes["0"]
    assert relative(richter.kernels.ntk(model, x), brute_ntk(model, x)) < 1e-10


class FusedOverOneToken(nn.Module):
    """Attention over one token, with a fused projection, as in MobileViT on small images: queries and keys have no effect."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.out, self.head = nn.Linear(6, 32), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x)).reshape(-1, 1, 8)
        q, k, v = self.qkv(h).reshape(-1, 1, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 1, 8)
        return self.head(torch.tanh(self.out(z)).reshape(len(x), 32))  # type: ignore[no-any-return]


def test_rounding_errors_of_some_rows_of_a_fused_projection() -> None:
    model, x = FusedOverOneToken().double(), torch.randn(20, 6, generator=DRAW, dtype=torch.float64)
    snap = richter.measure(model, richter.Probe(x, torch.arange(20) % 3), ["nfc", "tangent_cka"])
    assert [snap.row("nfc", f"qkv.{part}").mark for part in "qkv"] == [Mark.UNDEFINED, Mark.UNDEFINED, Mark.EXACT]
    assert snap.row("tangent_cka", "qkv").mark is Mark.EXACT


# ------------------------------------------------------------------------------------------------------- what an attack found


class BackwardMixes(nn.Module):
    """One example changes the gradients of its whole batch, and no outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if (x.abs() > 5).any():
            h = h * 2 - h.detach()
        return self.b(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("at", [3, 29])
def test_a_backward_pass_that_depends_on_the_batch_is_no_kernel(at: int) -> None:
    model, x = BackwardMixes().double(), torch.randn(30, 4, generator=DRAW, dtype=torch.float64)
    x[at, 0] = 6.0
    if at < 8:  # among the examples of the survey
        with pytest.raises(MixingError, match="do not add up"):
            richter.kernels.ntk(model, x)
    else:
        assert relative(richter.kernels.ntk(model, x), brute_ntk(model, x)) < 1e-10


@pytest.mark.parametrize("scale", [1e-2, 1e-6])
def test_a_rare_example_of_a_layer_with_small_gradients(scale: float) -> None:
    """In single precision, where a gradient that is so small beside others may be rounding error."""
    class Small(Rare):
        def forward(self, x: Tensor) -> Tensor:
            rare = (x[:, :1] > 5) * (self.a.weight ** 3).sum() * 5
            small = torch.tanh(self.a(x)).sum(1, keepdim=True) + rare
            return self.b(x.repeat(1, 3)[:, :16]) + scale * small  # type: ignore[no-any-return]

    model, x = Small(0), torch.randn(60, 6, generator=torch.Generator().manual_seed(1)).clamp(-4, 4)
    x[40, 0] = 6.0
    K = richter.kernels.ntk(model, x, per_layer=True)["a"]
    exact = richter.kernels.ntk(copy.deepcopy(model).double(), x.double(), per_layer=True)["a"]
    assert relative(K.double(), exact) < 1e-4


class RegistersLater(nn.Module):
    """Registers a buffer in its forward pass, computed from a weight, and keeps a number beside it."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.out, self.computed = nn.Linear(4, 4), nn.Linear(4, 3), computed

    def forward(self, x: Tensor) -> Tensor:
        if "w" not in self._buffers:
            self.register_buffer("w", self.a.weight.tanh() if self.computed else None)
            self.version = 1.0
        w = self.a.weight.tanh() if self.w is None else self.w
        return self.out(torch.tanh(x @ w)) * self.version  # type: ignore[no-any-return]


@pytest.mark.parametrize("computed", [True, False])
def test_a_buffer_that_a_forward_pass_registers(computed: bool) -> None:
    model, x = RegistersLater(computed).double(), torch.randn(9, 4, generator=DRAW, dtype=torch.float64)
    K = richter.kernels.ntk(model, x, per_layer=True)
    assert not model._buffers
    W = model.a.weight
    rows = [torch.stack([torch.autograd.grad(f, W, retain_graph=True)[0].flatten()
                         for f in model.out(torch.tanh(row[None] @ W.tanh()))[0]]) for row in x]
    J = torch.stack(rows)
    assert relative(K["a"], torch.einsum("nkp,mkp->nm", J, J)) < 1e-10


def test_multiples_of_a_weight_hold_no_blocks() -> None:
    """Blocks that are computed again are let go with their graph."""
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.register_buffer("scale", torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(F.linear(x, self.a.weight * self.scale))
            return torch.tanh(F.linear(h, self.b.weight / self.b.weight.norm().detach()))

    model, x = nn.Sequential(*[Scaled() for _ in range(4)]), torch.randn(4, 6, generator=DRAW)
    with quiet(model):
        run = forward(model, x, state_of(model), silent=set(), products=[], anew=[str(i) for i in range(4)])
        watched = [weakref.ref(run.f), *(weakref.ref(c.read) for c in run.calls)]
        gc.disable()
        try:
            del run
            assert not any(ref() is not None for ref in watched)
        finally:
            gc.enable()
