"""Blocks that are computed again for every backward pass give the numbers of those that are kept, to the last bit."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from test_exactness import LARGE, examples
from test_memory import KEPT, nothing_is_small, peak, smallest  # noqa: F401
from torch import Tensor, nn

import richter
import zoo
from richter.core import CaptureError
from richter.instrument.capture import Pass, Scale, Weight, forward, quiet, state_of
from richter.instrument.capture import recompute as anew
from richter.instrument.survey import examine, survey


def gradients(run: Pass, seed: int) -> list[Tensor]:
    """Of a random combination of the outputs: in what every call wrote, and in the weights where none are skipped."""
    V = torch.randn(run.f.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(run.f)
    g, exact = run.backward(V, list(run.aliases.values()))
    return [*g, *exact]


def outermost(model: nn.Module) -> list[str]:
    """The parts of a model that are called, as large as they come; without those that write into what they are given."""
    parts = {name: part for name, part in model.named_children() if not isinstance(part, (nn.ModuleList, nn.ModuleDict))}
    lists = {name: part for name, part in model.named_children() if name not in parts}
    parts |= {f"{name}.{k}": part for name, parts in lists.items() for k, part in parts.named_children()}
    return [name for name, part in parts.items() if not getattr(part, "inplace", False)]


@pytest.mark.parametrize("name", zoo.CASES)
def test_passes_are_the_same_to_the_bit(name: str) -> None:
    case = zoo.CASES[name]
    model, (x, _) = case.build(), case.batch(examples(name))
    with quiet(model):
        state = state_of(model)
        for silent in (None, set()):
            usual = forward(model, x, state, output=case.output, silent=silent)
            if usual.differentiates or state.parametrised:
                pytest.skip("is never computed again")
            again = forward(model, x, state, output=case.output, silent=silent, anew=outermost(model))
            assert torch.equal(usual.f, again.f)
            assert [c.name for c in usual.calls] == [c.name for c in again.calls]
            for seed in (0, 1):
                assert all(map(torch.equal, gradients(usual, seed), gradients(again, seed)))


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """No graph has room; the blocks that are computed again."""
    seen: list[tuple[str, ...]] = []
    real = survey

    def watched(*args: object) -> object:
        found = real(*args)
        seen.append(found.anew)
        return found

    monkeypatch.setattr(examine, "looked", lambda *_: float("inf"))
    monkeypatch.setattr(anew, "PAYS", 10.0)  # in so small a model it never does
    monkeypatch.setattr(examine, "survey", watched)
    return seen


@pytest.mark.parametrize("name", ["gpt", "hf_gpt2", "encoder", *(pytest.param(k, marks=pytest.mark.long) for k in LARGE)])
def test_all_measures_are_the_same(name: str, request: pytest.FixtureRequest) -> None:
    case = zoo.CASES[name]
    x, y = case.batch(examples(name))

    def rows() -> list[tuple[str, str, float, float]]:
        snap = richter.measure(case.build(), richter.Probe(x, y), list(richter.measures.catalogue()),
                               initial=zoo.initial(case), output=case.output)
        return [(r.layer, r.measure, r.value, r.error) for r in snap.rows]

    usual = rows()
    blocks = request.getfixturevalue("crowded")
    again = rows()
    assert all(blocks)
    torch.testing.assert_close(torch.tensor([r[2:] for r in again]), torch.tensor([r[2:] for r in usual]), rtol=1e-10, atol=1e-12,
                               equal_nan=True)
    assert [r[:2] for r in again] == [r[:2] for r in usual]


class Block(nn.Module):
    """With a hidden layer that is far wider than what goes from block to block."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8 * width), nn.Linear(8 * width, width)
        self.act, self.drop = nn.Tanh(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        z = self.up(self.norm(x))
        return x + self.down(self.drop(self.act(z) * torch.sigmoid(z) + torch.sin(z)))


class Deep(nn.Module):
    """Its graph is far larger than its weights."""

    def __init__(self, depth: int = 12, block: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([block() for _ in range(depth)]), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, -1])


X, Y = torch.randn(8, 40, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


def weighed(model: nn.Module, x: Tensor = X) -> Weight:
    with quiet(model):
        state = state_of(model)
        with Scale(model, state) as scale:
            run = forward(model, x, state)
        return scale.weight(c.read for c in run.calls)


def test_what_is_kept_is_weighed() -> None:
    model = Deep().double()
    x = X.double()
    found = weighed(model, x)
    assert found.blocks == tuple(sorted(f"blocks.{i}" for i in range(12)))
    places: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(t: Tensor) -> Tensor:
        places[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        f = model.eval()(x)
    usual = sum(size for place, size in places.items() if place not in own)
    assert f.requires_grad
    assert 0 <= found.kept - usual <= 12 * x.nbytes + 8 * 40 * 8  # what norms multiply with is copied
    assert 12 * (2 + 8) * x.nbytes < found.light < found.kept / 2  # given to each block, normalised, and the hidden layer


def test_a_scale_holds_nothing() -> None:
    """Outputs that an operation keeps of itself, through a hook that hands them on as they are, would stay for good."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    for hold in (False, True):
        with quiet(model), Scale(model, state_of(model), hold) as scale:
            f = model[1](model[0](torch.randn(6, 4)))
            watched = weakref.ref(f)
            total = f.sum()
        assert scale.weight([]).kept > 0
        del f, total
        gc.collect()
        assert watched() is None


def test_a_graph_is_let_go() -> None:
    model = Deep()
    with quiet(model):
        run = forward(model, X, state_of(model), silent=set(), products=[], anew=[f"blocks.{i}" for i in range(12)])
        watched = [weakref.ref(run.f), *(weakref.ref(c.read) for c in run.calls)]
        gradients(run, 0)
        gc.disable()
        try:
            del run
            assert not any(ref() is not None for ref in watched)
        finally:
            gc.enable()


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize("measures", [["nfc"], ["tangent_alignment", "tangent_cka"], ["linearisation_gap"], ["probe_loss"]])
def test_a_graph_without_room_takes_less(monkeypatch: pytest.MonkeyPatch, measures: list[str]) -> None:
    n = 2 if "tangent_cka" in measures else 4  # pairs of examples, one by one
    model, probe = Deep().eval(), richter.Probe(X[:n], Y[:n])
    initial = {k: v + 0.1 * torch.randn_like(v) for k, v in model.state_dict().items()}
    usual = richter.measure(model, probe, measures, initial=initial)
    least = smallest(model, probe, measures, initial=initial)
    found: list[richter.Snapshot] = []
    taken = peak(lambda: found.append(richter.measure(model, probe, measures, initial=initial, memory=least)))
    assert taken <= KEPT * least
    for a, b in zip(found[0].rows, usual.rows, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-5, nan_ok=True)  # in other chunks, single precision
    plans = [richter.plan(model, probe, measures, initial=initial, memory=memory) for memory in (least, "1GiB")]
    assert [plan.checkpoints for plan in plans] == [12, 0]
    assert ["12 blocks of the model are computed again for every backward pass" in str(plan) for plan in plans] == [True, False]
    assert (plans[0].passes > plans[1].passes) == (measures in (["nfc"], ["linearisation_gap"]))  # kernels are had otherwise
    monkeypatch.setattr(anew, "PAYS", 0.0)
    assert smallest(model, probe, measures, initial=initial) > 1.5 * least


def test_kernels_without_room_take_less() -> None:
    model = Deep().double().eval()
    usual = richter.kernels.ntk(model, X.double(), form="full")
    plan = richter.kernels.plan(model, X.double(), form="full")
    little = richter.kernels.ntk(model, X.double(), form="full", memory=0.3 * plan.bytes)
    torch.testing.assert_close(little, usual, rtol=1e-12, atol=1e-12)


def test_what_was_drawn_is_drawn_again() -> None:
    model = Deep()
    with quiet(model, "train"):
        state = state_of(model)
        usual, again = forward(model, X, state), forward(model, X, state, anew=[f"blocks.{i}" for i in range(12)])
        before = torch.get_rng_state()
        assert all(map(torch.equal, gradients(usual, 0), gradients(again, 0)))
        assert torch.equal(before, torch.get_rng_state())


def test_blocks_run_again_with_the_weights_of_their_pass() -> None:
    """Whoever differentiates, and whatever stands in the model meanwhile."""
    model = Deep()
    with quiet(model):
        state = state_of(model, {k: v + 0.1 * torch.randn_like(v) for k, v in model.state_dict().items()})
        usual, again = (forward(model, X, state, record=False, anew=some) for some in ((), [f"blocks.{i}" for i in range(12)]))
        first, second = (torch.autograd.grad(run.f.sum(), list(state.values())) for run in (usual, again))
    assert all(map(torch.equal, first, second))


class Counting(Block):
    """Computes something else every time."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(torch.sin(x * type(self).calls))


class Shrinking(Block):
    """Takes fewer steps every time."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        for _ in range(max(1, 4 - type(self).calls)):
            x = super().forward(x)
        return x


class Writing(Block):
    """Writes into what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


@pytest.mark.parametrize(("block", "said"), [
    (Counting, "module 'blocks.1' cannot be run again: it computes something else than the first time.*Allow more memory"),
    (Shrinking, "module 'blocks.1' cannot be run again: it computes something else than the first time"),
    (Writing, "module 'blocks.1' cannot be run again: its inputs were changed in place since")])
def test_a_block_that_differs_is_an_error(block: type[Block], said: str) -> None:
    model = Deep(2, block)
    with quiet(model):
        run = forward(model, X.clone(), state_of(model), anew=["blocks.0", "blocks.1"])
        with pytest.raises(CaptureError, match=said):
            gradients(run, 0)


def test_blocks_that_write_into_what_they_are_given_are_kept() -> None:
    assert weighed(Deep(12, Writing), X.clone()).blocks == ()


def test_an_error_leaves_nothing_behind() -> None:
    class Failing(Block):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("broken")

    model = Deep(2, Failing)
    with quiet(model), pytest.raises(ValueError, match="broken"):
        forward(model, X, state_of(model), anew=["blocks.0"])
    assert not model.blocks[0]._forward_hooks
    x = torch.ones(2, requires_grad=True)
    (x * x).sum().backward()  # no hook keeps what this does
    assert x.grad is not None


def test_a_cache_is_neither_asked_for_nor_lost() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=30, n_positions=8)).eval()
    assert model.config.use_cache
    ids = torch.randint(30, (4, 8), generator=torch.Generator().manual_seed(0))
    with quiet(model):
        state = state_of(model)
        usual, again = (forward(model, ids, state, output=lambda out: out.logits, anew=some)
                        for some in ((), [f"transformer.h.{i}" for i in range(3)]))
        assert all(map(torch.equal, gradients(usual, 0), gradients(again, 0)))
    assert model.config.use_cache
