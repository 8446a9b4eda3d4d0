"""A survey of the first examples cannot know what a model does with the others: what was captured is checked throughout the
probe, against single examples. Every model here is exact on its first eight examples, and was measured wrongly, or ended
in a raw error."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import oracles
import richter
from richter.core import MixingError
from richter.instrument.statistics import FEATURES, HeldOut, Operator, per_output
from richter.instrument.statistics import frame as passes
from richter.instrument.statistics import sketches as estimates
from richter.instrument.subject import Subject
from richter.instrument.survey import amended
from richter.measures.measure import Measure

DRAW = torch.Generator().manual_seed(3)
X = torch.randn(40, 6, generator=DRAW, dtype=torch.float64)
X[:8, 0] = X[:8, 0].abs().sort().values  # the first eight are in order, and of one kind
Y = torch.arange(40) % 3


class Two(nn.Module):
    """Two layers, and a third for those who need it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 8)
        self.double()


class Sorted(Two):
    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.b(torch.tanh(self.c(self.a(x[order]))))[order.argsort()]


class Swapped(Two):
    """Neighbours stand in each other's place."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(len(x))
        even = len(x) // 2 * 2
        order[:even] = order[:even].view(-1, 2).flip(1).reshape(-1)
        return self.b(torch.tanh(self.c(self.a(x[order]))))[order.argsort()]


class SwappedLate(Two):
    """Two examples of the probe stand in each other's place, where they meet in a batch."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(len(x))
        if len(x) > 20:
            order[[10, 20]] = order[[20, 10]]
        return self.b(torch.tanh(self.c(self.a(x[order]))))[order.argsort()]


class EarlyExit(Two):
    """Some examples skip a layer: all of the first eight pass through it."""

    def forward(self, x: Tensor) -> Tensor:
        h, on = torch.tanh(self.a(x)), (x[:, 0] > 0).nonzero()[:, 0]
        return self.b(h.index_copy(0, on, torch.tanh(self.c(h[on]))))


class Again(Two):
    """Some examples pass through a layer twice: none of the first eight."""

    def forward(self, x: Tensor) -> Tensor:
        h, on = torch.tanh(self.c(self.a(x))), (x[:, 0] < 0).nonzero()[:, 0]
        return self.b(h.index_copy(0, on, torch.tanh(self.c(h[on]))) if len(on) else h)


class Later(Two):
    """A layer that none of the first eight examples reaches."""

    def forward(self, x: Tensor) -> Tensor:
        h, on = torch.tanh(self.a(x)), (x[:, 0] < 0).nonzero()[:, 0]
        return self.b(h.index_copy(0, on, torch.tanh(self.c(h[on]))) if len(on) else h)


class Unpadded(Two):
    """Tokens of all examples behind one another, without padding; the first eight examples are equally long."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.where(x[:, 0] > 0, 2, 1).tolist()
        tokens = torch.cat([x[i].expand(k, -1) * torch.arange(1, k + 1)[:, None] for i, k in enumerate(lengths)])
        h = torch.tanh(self.c(self.a(tokens)))
        return self.b(torch.stack([part.sum(0) for part in h.split(lengths)]))


class Elsewhere(Two):
    """The weight of a layer is used once more, and not as a matrix: for none of the first eight examples."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.c(self.a(x)))
        return self.b(h) * torch.where(x[:, :1] < 0, 1 + self.c.weight.square().sum(), torch.ones_like(x[:, :1]))


class InLaterOutputs(Two):
    """The same, and the first outputs have nothing of it."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.b = nn.Linear(8, outputs).double()

    def forward(self, x: Tensor) -> Tensor:
        z = self.b(torch.tanh(self.c(self.a(x))))
        more = torch.where(x[:, :1] < 0, 1 + self.c.weight.square().sum(), torch.ones_like(x[:, :1]))
        half = z.shape[1] // 2
        return torch.cat([z[:, :half], z[:, half:] * more], 1)


class Recomputed(torch.autograd.Function):
    """A block of a reversible network: it runs again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), g)
        return x.grad, None


class Reversible(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(Recomputed.apply(self.a(x), self.c)))


class WithParameters(torch.autograd.Function):
    """The same, with gradients of the parameters as they were given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            return_x, *gradients = torch.autograd.grad(ctx.block(x), [x, *ctx.block.parameters()], g)
        return return_x, None, *gradients


class ReversibleWithParameters(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(WithParameters.apply(self.a(x), self.c, *self.c.parameters())))


class ReversibleLater(Two):
    """A reversible block of its own graph, that none of the first eight examples reaches."""

    def forward(self, x: Tensor) -> Tensor:
        h, on = torch.tanh(self.a(x)), (x[:, 0] < 0).nonzero()[:, 0]
        z = self.b(h)
        if not len(on):
            return z
        start = torch.tanh(x[on, :1] * torch.arange(1, 9)).requires_grad_()
        return z.index_add(0, on, self.b(Recomputed.apply(start, self.c)))


EXACT: list[Callable[[], nn.Module]] = [Sorted, Swapped, SwappedLate, EarlyExit, Again, Later, Unpadded, Elsewhere,
                                        InLaterOutputs, Reversible, ReversibleWithParameters, ReversibleLater]


def by_backward(model: nn.Module) -> dict[str, Tensor]:
    """Kernels from what backward passes of single outputs leave in .grad: also what a model adds there itself."""
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_children()}
    for i in range(len(X)):
        of_outputs: dict[str, list[Tensor]] = {name: [] for name in rows}
        for output in model(X[i:i + 1])[0]:
            model.zero_grad(set_to_none=True)
            output.backward(retain_graph=True)
            for name, layer in model.named_children():
                of_outputs[name].append(torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                                                   for p in layer.parameters()]))
        for name, gradients in of_outputs.items():
            rows[name].append(torch.cat(gradients))
    model.zero_grad(set_to_none=True)
    return {name: torch.stack(r) @ torch.stack(r).T for name, r in rows.items()}


@pytest.mark.filterwarnings("ignore:layer .c.*")
@pytest.mark.parametrize("make", EXACT)
def test_kernels_and_correlations_of_all_examples(make: Callable[[], nn.Module]) -> None:
    model = make()
    exact = by_backward(model)
    for name, K in richter.kernels.ntk(model, X, per_layer=True).items():
        torch.testing.assert_close(K, exact[name], rtol=1e-8, atol=1e-12)
    snap = richter.measure(model, richter.Probe(X, Y, chunk=32), ["nfc", "tangent_cka"])
    assert all(p.grad is None for p in model.parameters())
    for name in ("a", "b", "c"):
        row = next((r for r in snap.rows if (r.layer, r.measure) == (name, "nfc")), None)
        if row is None or math.isnan(row.value):
            assert name == "c"
            assert name in snap.notes or (row is not None and row.note)
            continue
        W, _, J = oracles.layer_io(model, X, name)
        assert row.value == pytest.approx(oracles.cosine(oracles.nfm(W), oracles.agop(W, J)), rel=1e-8)


@pytest.mark.filterwarnings("ignore:layer .c.*")
@pytest.mark.parametrize("make", EXACT)
def test_the_linearisation_of_all_examples(make: Callable[[], nn.Module]) -> None:
    """|df - J0 dw| / (|df| + |J0 dw|), beside central differences."""
    model, draw = make(), torch.Generator().manual_seed(1)
    initial = {k: v.clone() for k, v in model.state_dict().items()}
    change = {k: 0.3 * torch.randn(v.shape, generator=draw, dtype=v.dtype) for k, v in initial.items()}

    def outputs(t: float) -> Tensor:
        model.load_state_dict({k: initial[k] + t * change[k] for k in initial})
        return model(X).detach()

    linear, whole = (outputs(1e-5) - outputs(-1e-5)) / 2e-5, outputs(1.0) - outputs(0.0)
    outputs(1.0)
    snap = richter.measure(model, richter.Probe(X, Y, chunk=16), ["linearisation_gap"], initial=initial)
    expected = (whole - linear).norm() / (whole.norm() + linear.norm())
    assert snap.value("linearisation_gap") == pytest.approx(float(expected), rel=1e-7)


def test_training_a_reversible_network_is_not_disturbed() -> None:
    trained = []
    for watched in (False, True):
        model = Reversible()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        watch = richter.Observer(model, richter.Probe(X, Y), when=1, budget=None)
        for step in range(6):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(X), Y).backward()
            if watched:
                watch(step)
            optimiser.step()
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*trained)


class Hooked(Two):
    """Gradients are normalised over the batch, in the backward pass alone."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if h.requires_grad:
            h.register_hook(lambda g: g / g.norm())
        return self.b(h)


class Averaged(Two):
    """A share of the batch's mean, which no gradient follows."""

    share = 0.3

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.dropout(torch.tanh(self.a(x)), 0.3, self.training)
        return self.b(h + self.share * h.detach().mean(0))


class Barely(Averaged):
    share = 1e-3


class Contrasted(Two):
    def forward(self, x: Tensor) -> Tensor:
        z = self.b(torch.tanh(self.a(x)))
        return z @ z.T


@pytest.mark.parametrize(("make", "mode", "dtype", "sentence"), [
    (Hooked, "eval", torch.float64, "do not add up"), (Averaged, "train", torch.float64, "mixes examples"),
    (Averaged, "eval", torch.float64, "mixes examples"), (Barely, "eval", torch.float32, "mixes examples"),
    (Contrasted, "eval", torch.float64, "how many others there are")])
def test_models_that_mix_examples_are_refused(make: Callable[[], nn.Module], mode: str, dtype: torch.dtype,
                                              sentence: str) -> None:
    with pytest.raises(MixingError, match=sentence):
        richter.measure(make().to(dtype), richter.Probe(X.to(dtype), Y), ["nfc", "tangent_cka"], mode=mode)


class Tables(nn.Module):
    """Tokens flattened, positions first or examples first, and a table that all examples share; its entries are tiny."""

    def __init__(self, minor: bool, tiny: float, alike: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.minor, self.tiny = minor, tiny
        self.embed, self.mix, self.out = nn.Embedding(9, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
        self.positions = nn.Embedding(4, 6)
        self.double()
        with torch.no_grad():
            self.embed.weight.mul_(tiny)
            self.positions.weight.mul_(tiny)
            if alike:
                self.embed.weight.copy_(self.embed.weight[:1].expand(9, 6))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        h = h.transpose(0, 1) if self.minor else h
        z = self.mix(h.reshape(-1, 6)).view(h.shape)
        z = z.transpose(0, 1) if self.minor else z
        return self.out(torch.tanh(z / self.tiny)).mean(1)


@pytest.mark.parametrize("minor", [True, False])
@pytest.mark.parametrize(("tiny", "alike"), [(1.0, False), (1e-5, False), (1e-7, False), (1e-5, True), (1.0, True)])
def test_tables_with_tiny_or_equal_entries(minor: bool, tiny: float, alike: bool) -> None:
    model = Tables(minor, tiny, alike)
    ids = torch.randint(0, 9, (20, 4), generator=torch.Generator().manual_seed(1))
    exact = {k: oracles.reduce_outputs(K, "trace") for k, K in oracles.tangent_kernels(model, ids).items()}
    for name, K in richter.kernels.ntk(model, ids, per_layer=True).items():
        torch.testing.assert_close(K, exact[name], rtol=1e-8, atol=1e-14)
    snap = richter.measure(model, richter.Probe(ids, Y[:20]), ["nfc"])
    for name in ("embed", "mix", "out", "positions"):
        W, _, J = oracles.layer_io(model, ids, name)
        assert snap.value("nfc", name) == pytest.approx(oracles.cosine(oracles.nfm(W), oracles.agop(W, J)), rel=1e-8), name


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def test_a_parametrised_weight_that_was_changed_behind_torchs_back() -> None:
    model = Two()
    model.forward = lambda x: model.b(torch.tanh(model.a(x)))  # type: ignore[method-assign]
    parametrize.register_parametrization(model.a, "weight", Doubled())
    watch = richter.Observer(model, richter.Probe(X, Y), when=1, budget=None, measures=["nfc", "weight_change"])
    watch(0)
    model.a.parametrizations.weight.original.data.mul_(1.7)
    snap, fresh = watch(1), richter.measure(model, richter.Probe(X, Y), ["nfc", "weight_change"], initial=watch.initial)
    assert snap is not None
    assert snap.value("weight_change", "a") == pytest.approx(fresh.value("weight_change", "a"), rel=1e-12)
    assert snap.value("weight_change", "a") == pytest.approx(0.7 / 1.0, rel=0.5)


def test_what_is_amended_is_known_the_next_time() -> None:
    """The second snapshot of a model that reads later examples in another way is as right as the first."""
    model = Later()
    watch = richter.Observer(model, richter.Probe(X, Y, chunk=32), when=1, budget=None, measures=["nfc", "tangent_cka"])
    first = watch(0)
    with torch.no_grad():
        model.c.weight.mul_(1.5)
    second, fresh = watch(1), richter.measure(model, richter.Probe(X, Y, chunk=32), ["nfc", "tangent_cka"])
    assert first is not None
    assert second is not None
    for row in fresh.rows:
        ours = second.value(row.measure, row.layer)
        assert ours == pytest.approx(row.value, rel=1e-10, nan_ok=True), (row.layer, row.measure)
    assert first.value("nfc", "c") != second.value("nfc", "c")


@pytest.mark.parametrize(("tiny", "alike"), [(1e-7, False), (1.0, True)])
def test_tables_with_tiny_or_equal_entries_do_not_mix_examples(tiny: float, alike: bool) -> None:
    """Rows that are alike may lie in either way: gradients tell which. With dropout, the wrong one was taken for mixing."""
    model = nn.Sequential(Tables(True, tiny, alike), nn.Dropout(0.5))
    ids = torch.randint(0, 9, (20, 4), generator=torch.Generator().manual_seed(1))
    snap = richter.measure(model, richter.Probe(ids, Y[:20]), ["nfc"], mode="train")
    assert 0 < snap.value("nfc", "0.mix") <= 1


class InLargeBatches(Two):
    """Batches of more than eight examples are mixed, where no gradient follows."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h + 0.3 * h.detach().mean(0) if len(x) > 8 else h)


class OnlyTogether(Two):
    """A layer that is used in large batches alone."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(self.c(h) if len(x) > 8 else h)


@pytest.mark.parametrize("make", [InLargeBatches, OnlyTogether])
def test_models_that_mix_large_batches_are_refused(make: Callable[[], nn.Module]) -> None:
    for work in (lambda model: richter.measure(model, richter.Probe(X, Y), ["nfc"]), lambda model: richter.kernels.ntk(model, X)):
        with pytest.raises(MixingError, match="mixes examples"):
            work(make())


def test_features_that_ask_nothing_of_a_layer_are_looked_at_too() -> None:
    """A measure of what layers read makes no backward pass of its own."""
    reads = Measure("mean_square", lambda Phi: float(Phi[::2].square().mean()), needs=(FEATURES,))
    for make in (Sorted, SwappedLate):
        model = make()
        exact = model.a(X)[::2].square().mean().item()
        assert richter.measure(model, richter.Probe(X, Y), [reads]).value("mean_square", "c") == pytest.approx(exact, rel=1e-10)


def test_a_layer_that_later_examples_call_out_of_sight_is_not_said_to_be_never_called() -> None:
    snap = richter.measure(ReversibleLater(), richter.Probe(X, Y, chunk=8), ["nfc"])
    assert snap.notes["c"].startswith("used, but not as a linear map")


def test_units_that_have_died_are_no_mixing() -> None:
    """In single precision they are turned on and off by rounding, so a batch and its examples have other gradients."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40, bias=False), nn.ReLU(), nn.Linear(40, 40, bias=False), nn.ReLU(),
                          nn.Linear(40, 3, bias=False))
    with torch.no_grad():
        for layer, scale in ((model[0], 0.3), (model[2], 0.3), (model[4], 3.0)):
            layer.weight.copy_(scale * torch.randn(layer.weight.shape, generator=draw))  # type: ignore[union-attr, operator]
        x = torch.randn(256, 20, generator=draw)
        alive = torch.relu(model[0](x))
        for unit in range(20):  # each at 0 for a tenth of the examples, up to rounding
            rows = alive[unit::10].double()
            null = torch.linalg.svd(rows)[2][-14:]
            model[2].weight[unit] = (null[torch.randint(14, (1,), generator=draw)[0]] * 2).float()  # type: ignore[union-attr, index]
    flips = [(model[2](alive[i:i + 1]) > 0) != (model[2](alive) > 0)[i] for i in range(64)]
    assert torch.cat(flips).any()
    probe = richter.Probe(x, torch.arange(256) % 3)
    for _ in range(3):
        assert math.isfinite(richter.measure(model, probe, ["nfc"]).value("nfc", "2"))


class ReversibleCheckpoint(Two):
    """A reversible block that checkpoints what it runs again."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(Recomputed.apply(self.a(x), lambda h: checkpoint(self.c, h, use_reentrant=True))))


class Prepared(Two):
    """A layer of which nothing is asked but by one example, beside a product that computes its weight."""

    def forward(self, x: Tensor) -> Tensor:
        h, on = torch.tanh(self.a(x)), (x[:, 0] < -1.5).nonzero()[:, 0]
        size = (F.linear(torch.ones(8, dtype=x.dtype), self.c.weight)).norm()
        return self.b(h.index_add(0, on, F.linear(h[on], self.c.weight.tanh() / size)))


def test_a_checkpoint_inside_a_reversible_block() -> None:
    model = ReversibleCheckpoint()
    exact = by_backward(model)
    for name, K in richter.kernels.ntk(model, X, per_layer=True).items():
        torch.testing.assert_close(K, exact[name], rtol=1e-8, atol=1e-12)


def test_gradients_that_are_zero_are_no_evidence() -> None:
    """None of the first examples, and few of those that are drawn, say anything of a layer: one that does is looked at."""
    x = X.abs()
    x[29, 0] = -2.0
    for number in range(8):
        with mock.patch("richter.instrument.survey.audit._measurements", iter(range(number, 1000))), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            snap = richter.measure(Prepared(), richter.Probe(x, Y, chunk=7), ["nfc"])
        assert not any(math.isfinite(row.value) for row in snap.rows if row.layer == "c")


def test_operators_of_models_that_add_to_grad_are_refused() -> None:
    def gauss_newton(f: Tensor, Y: Any, parameters: Any, vectors: Any) -> Any:
        return torch.autograd.grad(f.square().sum(), parameters, allow_unused=True)

    summed = Measure("summed", lambda A: float(A(torch.ones(A.size, dtype=torch.float64)).sum()),
                             needs=(Operator("gauss_newton", gauss_newton),))
    for make in (Reversible, ReversibleLater):
        row = richter.measure(make(), richter.Probe(X, Y), [summed]).row("summed")
        assert math.isnan(row.value)
        assert "adds to .grad" in row.note
    model = ReversibleWithParameters()
    gradients = torch.autograd.grad(model(X).square().sum() / len(X), list(model.parameters()))
    value = richter.measure(model, richter.Probe(X, Y), [summed]).value("summed")
    assert value == pytest.approx(sum(d.sum().item() for d in gradients), rel=1e-10)


class UpToThreeTimes(Two):
    """As many passes through a layer as the most patient example of a batch needs; the last of the probe needs one."""

    def forward(self, x: Tensor) -> Tensor:
        h, times = torch.tanh(self.a(x)), torch.where(x[:, 1] > 0, 3, 1)
        for i in range(int(times.max())):
            h = torch.where((times > i)[:, None], torch.tanh(self.c(h)), h)
        return self.b(h)


def test_a_last_chunk_of_one_example_may_use_a_layer_less_often() -> None:
    model, x = UpToThreeTimes(), X[:33].clone()
    x[:8, 1], x[-1, 1] = 1.0, -1.0
    snap = richter.measure(model, richter.Probe(x, Y[:33], chunk=32, kernel_examples=None), ["nfc", "tangent_cka"])
    K = torch.stack(list(oracles.tangent_kernels(model, x).values())).sum(0)
    exact = oracles.tangent_cka(K, torch.nn.functional.one_hot(Y[:33], 3).double())
    assert snap.value("tangent_cka", "*") == pytest.approx(exact, rel=1e-8)
    assert math.isfinite(snap.value("nfc", "c"))


class SortedWhereNegative(Two):
    """Sorted by a feature that is the same for all examples of one kind."""

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].clamp(max=0).argsort(stable=True)
        return self.b(torch.tanh(self.c(self.a(x[order]))))[order.argsort()]


def test_the_examples_of_the_other_side_of_a_kernel_are_looked_at() -> None:
    model, x = SortedWhereNegative(), X.abs()
    J, J2 = oracles.jacobian(model, x), oracles.jacobian(model, X)
    exact = sum(oracles.reduce_outputs(torch.einsum("iap,jbp->iajb", J[k].flatten(2), J2[k].flatten(2)), "trace") for k in J)
    torch.testing.assert_close(richter.kernels.ntk(model, x, X), exact, rtol=1e-8, atol=1e-12)


class ManyOfThem(nn.Module):
    """Sorted after the first eight, in many layers: kernels of few at a time have room."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        for layer in self.layers:
            x = torch.tanh(layer(x[order])[order.argsort()])
        return x


def test_kernels_of_few_layers_at_a_time_are_looked_at() -> None:
    model = ManyOfThem()
    K = oracles.tangent_kernels(model, X)
    Y6 = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for memory in ("2GiB", "4MiB"):
        snap = richter.measure(model, richter.Probe(X, Y6, chunk=16), ["tangent_cka"], memory=memory)
        for i in range(8):
            assert snap.value("tangent_cka", f"layers.{i}") == pytest.approx(oracles.tangent_cka(K[f"layers.{i}"], Y6), rel=1e-8)


@pytest.mark.filterwarnings("ignore:layer .c.*")
@pytest.mark.parametrize("chunk", [1, 64])
def test_maps_that_are_read_alone_are_looked_at_with_any_chunk(chunk: int) -> None:
    """The gradient of a weight that some examples also use in another way is not what its map says."""
    snap = richter.measure(Elsewhere(), richter.Probe(X, Y, chunk=chunk), ["fact"])
    assert all(math.isnan(r.value) for r in snap.rows if r.layer == "c")


def test_held_out_examples_have_an_audit_of_their_own() -> None:
    reads = Measure("mean_square", lambda Phi, other: float(Phi[::2].square().mean() + other[::2].square().mean()),
                    needs=(FEATURES, HeldOut(FEATURES)))
    model, order = Sorted(), torch.randperm(40, generator=torch.Generator().manual_seed(5))
    probe = richter.Probe(X, Y, held_out=(X[order], Y[order]))
    exact = model.a(X)[::2].square().mean().item() + model.a(X[order])[::2].square().mean().item()
    assert richter.measure(model, probe, [reads]).value("mean_square", "c") == pytest.approx(exact, rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_looked_at_too(dtype: torch.dtype) -> None:
    exact = richter.kernels.ntk(Swapped(), X)
    K = richter.kernels.ntk(Swapped().to(dtype), X.to(dtype)).double()
    assert (K - exact).norm() < 0.05 * exact.norm()


class AddedToAll(Two):
    """What is added to all logits alike, for later examples, by a weight and by a bias."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.tanh(self.c(self.a(x))))
        return y + (x[:, :1] < 0) * (self.c.weight.square().sum() + self.a.bias.sum())


class BiasElsewhere(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.c(self.a(x)))) + (x[:, :1] < 0) * self.a.bias.sum() * torch.tensor([1.0, 0.3, -0.5])


@pytest.mark.parametrize("make", [AddedToAll, BiasElsewhere])
def test_what_is_used_elsewhere_by_later_examples_is_always_seen(make: Callable[[], nn.Module]) -> None:
    exact = by_backward(make())
    for _ in range(12):  # another audit each time
        for name, K in richter.kernels.ntk(make(), X, per_layer=True).items():
            torch.testing.assert_close(K, exact[name], rtol=1e-8, atol=1e-12)


@pytest.mark.filterwarnings("ignore:layer .c.*")
@pytest.mark.parametrize(("measure", "outputs", "place", "value"), [
    ("nfc", 3, (passes, "BLOCK_BYTES"), 0), ("nfc", 40, (passes, "BLOCK_BYTES"), 0),
    ("tangent_alignment", 80, (per_output.KeptCaptures, "fewer_passes"), lambda *_: True),
    ("tangent_cka", 3, (estimates, "way"), lambda *_: "blocks")],
    ids=["moments", "moments, in many blocks", "kernels of single outputs", "products with kernels"])
def test_outputs_that_share_a_forward_pass_are_all_looked_at(measure: str, outputs: int, place: tuple[Any, str], value: Any,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked one after another, of one recording: what is wrong of a later one only is seen as well."""
    model = InLaterOutputs(outputs)
    monkeypatch.setattr(*place, value)
    with mock.patch.object(Subject, "amend", autospec=True, side_effect=Subject.amend) as amend:
        richter.measure(model, richter.Probe(X, torch.arange(40) * 2 % outputs), [measure])
    doubted = {k for call in amend.call_args_list for k in call.args[1].maps}
    assert doubted == {"c"}


def test_however_many_outputs_share_a_forward_pass_the_last_are_looked_at() -> None:
    """And nothing is in doubt where nothing is wrong."""
    model, plain = InLaterOutputs(40), Plain()
    plain.b = model.b
    for m, doubted in ((model, {"c"}), (plain, set[str]())):
        exact = by_backward(m)
        with mock.patch("richter.kernels.ntk.amended", side_effect=amended) as amend:
            K = richter.kernels.ntk(m, X, per_layer=True)
        assert {k for call in amend.call_args_list for k in call.args[1].maps} == doubted
        for name in exact:
            torch.testing.assert_close(K[name], exact[name], rtol=1e-8, atol=1e-12)


@pytest.mark.filterwarnings("ignore:layer .c.*")
def test_every_family_of_cotangents_is_looked_at() -> None:
    """Of the loss, which later outputs have none of, and then of all outputs."""
    model = InLaterOutputs()
    y = model(X).detach() + torch.tensor([1.0, 0.0, 0.0])
    for names in (["fact", "nfc"], ["nfc", "fact"]):
        with mock.patch.object(Subject, "amend", autospec=True, side_effect=Subject.amend) as amend:
            richter.measure(model, richter.Probe(X, y), names)
        assert {k for call in amend.call_args_list for k in call.args[1].maps} == {"c"}


class Plain(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.c(self.a(x))))


class OnlyInEights(Two):
    """A model that runs on so many examples at a time and no others."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in (6, 8, 40):
            raise RuntimeError("not so many")
        return self.b(torch.tanh(self.c(self.a(x))))


class SwappedInEights(OnlyInEights):
    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(len(x)).roll(0 if len(x) < 40 else 1)
        return super().forward(x[order])[order.argsort()]


def test_models_that_do_not_run_on_few_examples() -> None:
    exact = richter.kernels.ntk(Plain(), X)
    torch.testing.assert_close(richter.kernels.ntk(OnlyInEights(), X), exact, rtol=1e-8, atol=1e-12)
    with pytest.raises(Exception, match="not so many"):  # they would have to go alone
        richter.kernels.ntk(SwappedInEights(), X)
