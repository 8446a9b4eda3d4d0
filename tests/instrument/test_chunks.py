"""Some layers only, less memory, smaller chunks: the numbers stay the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import richter
from observing import FEW, assert_close, draw, dropout, gpt, mlp, probe, state
from richter.core import MemoryBudgetError, SelectionError
from richter.instrument.stream import LayerCapture, beside
from richter.layers import Kind
from zoo import CASES


def test_some_layers_only() -> None:
    model, p = mlp(), probe()
    whole = richter.measure(model, p)

    def layers(chosen: Any) -> list[str]:
        snap = richter.measure(model, p, layers=chosen)
        for r in snap.rows:
            assert r.value == pytest.approx(whole.value(r.measure, r.layer), rel=1e-10, nan_ok=True)
        assert {r.measure for r in snap.rows if r.layer == "*"} <= set(richter.measures.MOVEMENT)  # of the model
        return [k for k in snap.layers if k != "*"]

    assert layers("2") == ["2"]
    assert layers(["4", "0"]) == ["0", "4"]
    assert layers("[02]") == ["0", "2"]
    assert layers("*") == ["0", "2", "4"]
    assert layers(lambda name: name != "2") == ["0", "4"]
    for nothing in ("7", ["0", "7"], lambda name: False, []):
        with pytest.raises(SelectionError, match=r"0, 2, 4"):
            richter.measure(model, p, layers=nothing)


def test_patterns_of_nested_names() -> None:
    model, x, y = gpt()
    p = richter.Probe(x, y)

    def layers(chosen: Any) -> list[str]:
        return richter.measure(model, p, ["nfc"], layers=chosen).layers

    fused = [f"transformer.h.1.attn.c_attn.{part}" for part in "qkv"]
    assert layers("transformer.h.1.attn.c_attn") == fused  # a module by its name: all maps in it
    assert layers("transformer.h.1.attn.c_attn.q") == fused[:1]
    assert layers("transformer.h.*.mlp.c_fc") == ["transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_fc"]
    others = [f"transformer.h.1.{k}" for k in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert layers("transformer.h.1") == [*fused, *others]
    assert layers(["lm_head", "*.wpe"]) == ["transformer.wpe", "lm_head"]
    assert layers(lambda name: name.endswith("attn.c_proj")) == [f"transformer.h.{i}.attn.c_proj" for i in (0, 1)]


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", "lstm"])
@pytest.mark.parametrize("chunk", [1, 4])
def test_the_size_of_chunks_changes_no_number(name: str, chunk: int) -> None:
    case = CASES[name]
    model, (x, y), start = case.build(), case.batch(11), state(case.build(seed=1))
    whole, parts = (richter.measure(model, richter.Probe(x, y, chunk=c, kernel_examples=5), [*FEW, "double_centred_nfc"],
                                    initial=start, output=case.output) for c in (256, chunk))  # fmt: skip
    assert_close(parts, whole)


class Scaled(nn.Module):
    """W (g * dropout(x)) with W = [I I]: the kernels of W and of g, which is read by no linear map, are both x . x'."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.readout = nn.Dropout(0.5), nn.Linear(6, 3, bias=False)
        self.gain = nn.Parameter(torch.ones(6))
        with torch.no_grad():
            self.readout.weight.copy_(torch.eye(3).repeat(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.gain * self.dropout(x))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_all_layers_are_of_one_draw(mode: str) -> None:
    """In train mode, too, the kernels of all layers are kernels of one function: one draw of dropout."""
    K = richter.kernels.ntk(Scaled().double(), draw(12, 6), per_layer=True, mode=mode)
    torch.testing.assert_close(K["readout"].diagonal() / 3, K[""].diagonal())


@pytest.mark.parametrize("chunk", [1, 7])
def test_the_size_of_chunks_changes_no_draw(chunk: int) -> None:
    """What dropout draws for an example does not depend on the examples it is measured with."""
    whole, parts = (richter.measure(dropout(), probe(chunk=c), FEW, mode="train") for c in (256, chunk))
    assert_close(parts, whole)


class Uneven(nn.Module):
    """An example is read in as many steps as it says itself, a second layer only where it has a large number."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.second = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.dropout, self.readout = nn.Dropout(0.4), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        outputs = []
        for row, h in zip(ids, self.dropout(self.words(ids)), strict=True):
            z = torch.tanh(self.first(h[:2 + int(row[0])]))
            outputs.append((z + torch.tanh(self.second(z)) if row[1] > 3 else z).mean(0))
        return self.readout(torch.stack(outputs))


def wordy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.LSTM(6, 5, num_layers=2, dropout=0.4, batch_first=True), Last(),
                         nn.Linear(5, 3)).double()


class Last(nn.Module):
    def forward(self, states: tuple[Tensor, Any]) -> Tensor:
        return states[0][:, -1]


@pytest.mark.parametrize("make", [wordy, lambda: Uneven().double()])
def test_a_model_that_draws_is_run_once_for_each_example_of_a_kernel(make: Callable[[], nn.Module]) -> None:
    """Not once for each pair of them. The kernel is that of the gradients of single examples, each with its own draw."""
    model, n = make(), 12
    ids = torch.randint(0, 7, (n, 9), generator=torch.Generator().manual_seed(1))
    calls: list[int] = []
    handle = model.register_forward_hook(lambda m, args, f: calls.append(1))
    one = kernels_ntk(model, ids)
    few, calls[:] = len(calls), []
    kernels_ntk(model, torch.cat([ids, ids]))
    handle.remove()
    assert len(calls) < 2.5 * few  # of n^2 there would be four times as many
    J = []
    model.train()
    for i in range(n):
        torch.manual_seed(i)
        f = model(ids[i:i + 1])
        J.append(torch.stack([torch.cat([d.flatten() for d in torch.autograd.grad(
            f[0, k], list(model.parameters()), retain_graph=True, materialize_grads=True)]) for k in range(3)]))
    G = torch.stack(J)
    torch.testing.assert_close(one, torch.einsum("nkp,mkp->nm", G, G), rtol=1e-10, atol=1e-12)


def test_what_single_examples_read_is_put_one_after_another() -> None:
    """One has fewer positions, one does not reach the map: it reads nothing there, and nothing is asked."""
    def capture(positions: int, kind: Kind) -> LayerCapture:
        h = torch.randn(1, positions, 4) if kind == "dense" else torch.randint(0, 4, (1, positions))
        return LayerCapture(kind, torch.eye(5, 4), h, torch.randn(2, 1, positions, 5))

    for kind in ("dense", "lookup"):
        torch.manual_seed(0)
        long, short = capture(3, kind), capture(2, kind)  # type: ignore[arg-type]
        whole = beside([{"a": short, "b": short}, {"a": long}])
        a, b = whole["a"], whole["b"]
        assert (a.h.shape[:2], a.g.shape, b.g.shape) == ((2, 3), (2, 2, 3, 5), (2, 2, 2, 5))
        torch.testing.assert_close(a.h[0, :2], short.h[0])
        torch.testing.assert_close(a.g[:, 1], long.g[:, 0])
        nothing = 0 if kind == "dense" else -1
        assert bool((a.h[0, 2] == nothing).all())
        assert bool((b.h[1] == nothing).all())
        assert not a.g[:, 0, 2].any()
        assert not b.g[:, 1].any()


def kernels_ntk(model: nn.Module, ids: Tensor) -> Tensor:
    K = richter.kernels.ntk(model, ids, mode="train")
    assert isinstance(K, Tensor)
    return K


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_little_memory_changes_no_number(name: str) -> None:
    """The least that works, and a few sizes above it, give what plenty gives."""
    case = CASES[name]
    model, p = case.build(), richter.Probe(*case.batch(10), kernel_examples=4)
    plenty, worked = richter.measure(model, p, FEW, output=case.output), 0
    for power in range(12, 24, 2):
        with contextlib.suppress(MemoryBudgetError):
            assert_close(richter.measure(model, p, FEW, output=case.output, memory=2**power), plenty)
            worked += 1
    assert 1 < worked < 6


def test_little_memory_means_small_chunks() -> None:
    sizes: list[int] = []
    model = mlp()
    model[0].register_forward_hook(lambda m, args, z: sizes.append(len(z)))
    p = probe(200, kernel_examples=2)
    richter.measure(model, p, ["nfc"], memory="1GiB")
    assert max(sizes) == 200
    sizes.clear()
    richter.measure(model, p, ["nfc"], memory="20KiB")
    assert max(sizes) < 50
