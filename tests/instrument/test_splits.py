"""Which outputs of a fused projection are queries, keys and values is seen in what the model does with them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracles
import richter
import zoo
from richter.instrument.capture import quiet, state_of
from richter.instrument.survey import survey
from richter.workflows.nfc_by_layer import nfc_by_layer

MEASURES = ["nfc", "cnfc", "double_centred_nfc", "weight_change"]
D, HEADS = 6, 2
THIRDS = {part: list(range(i * D, (i + 1) * D)) for i, part in enumerate("qkv")}
BY_HEAD = {part: [head * 3 * 3 + i * 3 + j for head in range(HEADS) for j in range(3)] for i, part in enumerate("qkv")}
PAIRED = {part: [j * 3 + i for j in range(D)] for i, part in enumerate("qkv")}  # [heads, d, 3]
OTHER_ORDER = {"k": THIRDS["q"], "v": THIRDS["k"], "q": THIRDS["v"]}

Cut = Callable[[Tensor], tuple[Tensor, ...]]  # z[n,T,3 D] -> q, k, v [n,heads,T,d]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def heads(u: Tensor) -> Tensor:
    return u.unflatten(-1, (HEADS, -1)).transpose(1, 2)


CUTS: dict[str, tuple[Cut, dict[str, list[int]]]] = {
    "split": (lambda z: tuple(heads(u) for u in z.split(D, -1)), THIRDS),
    "stacked": (lambda z: tuple(z.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)), THIRDS),
    "by head": (lambda z: heads(z).chunk(3, -1), BY_HEAD),
    "by head, indexed": (lambda z: tuple(z.unflatten(-1, (HEADS, 3, -1))[..., i, :].transpose(1, 2) for i in range(3)), BY_HEAD),
    "paired": (lambda z: tuple(heads(u) for u in z.unflatten(-1, (-1, 3)).unbind(-1)), PAIRED),
    "k, v, q": (lambda z: (lambda k, v, q: (heads(q), heads(k), heads(v)))(*z.chunk(3, -1)), OTHER_ORDER),
}


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 2).softmax(-1) @ v


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries and keys are normalised, and some of their entries rotated by the position."""
    angle = torch.arange(q.shape[2], dtype=q.dtype)[:, None]
    q, k = (torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)
            for a, b, rest in (F.normalize(u, dim=-1).split(1, -1) for u in (q, k)))
    return F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True)


def batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shape, (q, k, v) = q.shape, (u.flatten(0, 1) for u in (q, k, v))
    bias = torch.arange(q.shape[1], dtype=q.dtype).expand(len(q), q.shape[1], -1)
    return torch.bmm(torch.baddbmm(bias, q, k.mT).softmax(-1), v).view(shape)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without a softmax over positions: q (k^T v)."""
    return torch.einsum("nhtd,nhde->nhte", q.sigmoid(), torch.einsum("nhtd,nhte->nhde", k.softmax(-1), v))


WAYS: dict[str, Attend] = {"sdpa": F.scaled_dot_product_attention, "by hand": by_hand, "turned": turned, "batched": batched,
                           "linear": linear}


class Attention(nn.Module):
    """Attention and a non-linear layer in one forward."""

    def __init__(self, cut: Cut, attend: Attend) -> None:
        super().__init__()
        self.embed, self.qkv, self.mlp, self.readout = nn.Linear(3, D), nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, 2)
        self.cut, self.attend = cut, attend

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.embed(x))
        z = z + self.attend(*self.cut(self.qkv(z))).transpose(1, 2).flatten(2)
        return self.readout(torch.tanh(self.mlp(z)).sum(1))


def built(factory: Callable[[], nn.Module], seed: int = 0, gain: float = 2.0) -> nn.Module:
    return zoo.seeded(factory, gain)(seed)


def assert_parts(factory: Callable[[], nn.Module], x: Any, name: str, rows: dict[str, list[int]], gain: float = 2.0,
                 output: Any = None) -> None:
    """The rows of each part give the numbers of the definition, from the whole of what the projection read and is asked for."""
    model, then = built(factory, gain=gain), built(factory, 1, gain)
    n = oracles.size(x)
    snap = richter.measure(model, richter.Probe(x, zoo.classes(n, 2)) if output is None else richter.Probe(x, None), MEASURES,
                           initial=then.state_dict(), output=output, layers=[name])
    (W, _, J), (W0, _, J0) = (oracles.layer_io(m, x, name, output) for m in (model, then))
    assert snap.layers == [f"{name}.{part}" if part else name for part in ("qkv" if len(rows) == 3 else rows)]
    for part, own in rows.items():
        expected = oracles.nfa_measures(W[own], W0[own], J[..., own], J0[..., own])
        for measure in MEASURES:
            value = snap.value(measure, f"{name}.{part}" if part else name)
            assert math.isclose(value, expected[measure], rel_tol=1e-8), (part, measure)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", CUTS)
def test_parts_are_those_that_the_model_multiplies(cut: str, way: str) -> None:
    """However the outputs are cut, and however the parts are turned before they meet."""
    taken, rows = CUTS[cut]
    model = built(lambda: Attention(taken, WAYS[way]))
    with quiet(model):
        splits = survey(model, zoo.gaussian(4, 3)(4)[0], state_of(model)).splits
    assert {part: own.tolist() for part, own in splits["qkv"].items()} == rows


@pytest.mark.parametrize("cut", ["split", "by head", "k, v, q"])
def test_numbers_of_the_parts_are_those_of_the_definition(cut: str) -> None:
    taken, rows = CUTS[cut]
    assert_parts(lambda: Attention(taken, F.scaled_dot_product_attention), zoo.gaussian(4, 3)(4)[0], "qkv", rows)


NO_ATTENTION: dict[str, Attend] = {
    "a gate": lambda q, k, v: torch.tanh(q) * k + v,
    "one product": lambda q, k, v: q @ k.mT @ torch.ones_like(v),
    "queries that are keys": lambda q, k, v: (q @ q.mT).softmax(-1) @ v + k,
    "mixed before": lambda q, k, v: by_hand(q + v, k, v),
    "no product": lambda q, k, v: (q + k + v).relu(),
}


@pytest.mark.parametrize("way", NO_ATTENTION)
def test_a_layer_that_is_only_named_so_is_one_map(way: str) -> None:
    assert_parts(lambda: Attention(CUTS["split"][0], NO_ATTENTION[way]), zoo.gaussian(4, 3)(4)[0], "qkv",
                 {"": list(range(3 * D))})


class Twice(Attention):
    """The same projection, cut in two ways."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.embed(x))
        for cut in ("split", "by head"):
            z = z + by_hand(*CUTS[cut][0](self.qkv(z))).transpose(1, 2).flatten(2)
        return self.readout(z.sum(1))


def test_calls_that_do_not_agree_are_one_map() -> None:
    assert_parts(lambda: Twice(*[lambda z: z] * 2), zoo.gaussian(4, 3)(4)[0], "qkv", {"": list(range(3 * D))})


def bigcode(many: bool) -> nn.Module:
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    return GPTBigCodeForCausalLM(GPTBigCodeConfig(
        n_layer=1, n_head=2, n_embd=D, n_inner=8, vocab_size=5, n_positions=8, multi_query=not many, initializer_range=0.4,
        use_cache=False, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0))


def neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                                            vocab_size=5, max_position_embeddings=8, use_cache=False, initializer_range=0.4))


def bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=5, use_cache=False, initializer_range=0.4))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=D, n_inner=8, vocab_size=5, n_positions=8, use_cache=False,
                                      initializer_range=0.4, bos_token_id=0, eos_token_id=0))


def eager(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = factory()
        model.set_attn_implementation("eager")
        return model
    return build


@pytest.mark.parametrize(("factory", "name", "rows"), [
    (lambda: bigcode(True), "transformer.h.0.attn.c_attn", BY_HEAD),
    (lambda: bigcode(False), "transformer.h.0.attn.c_attn", {"": list(range(D + 6))}),
    (gpt2, "transformer.h.0.attn.c_attn", THIRDS), (eager(gpt2), "transformer.h.0.attn.c_attn", THIRDS),
    (neox, "gpt_neox.layers.0.attention.query_key_value", {"": list(range(24))}),
], ids=["bigcode", "bigcode multi-query", "gpt2", "gpt2 eager", "neox"])
def test_parts_in_models_of_transformers(factory: Callable[[], nn.Module], name: str, rows: dict[str, list[int]]) -> None:
    ids = zoo.language(4, vocabulary=5, length=3)[0]
    assert_parts(factory, {"input_ids": ids}, name, rows, gain=1.0, output=lambda result: result["logits"][:, -1])


@pytest.mark.parametrize(("factory", "splits"), [
    (eager(lambda: bigcode(True)), {"transformer.h.0.attn.c_attn": BY_HEAD}), (bloom, {}),
], ids=["bigcode eager", "bloom"])
def test_parts_in_models_that_compute_attention_in_float32(factory: Callable[[], nn.Module], splits: dict[str, Any]) -> None:
    model = built(factory, gain=1.0)
    with quiet(model):
        x = {"input_ids": zoo.language(4, vocabulary=5, length=3)[0]}
        seen = survey(model, x, state_of(model), lambda result: result["logits"][:, -1]).splits
    assert {name: {part: rows.tolist() for part, rows in split.items()} for name, split in seen.items()} == splits


@pytest.mark.parametrize("build", [
    lambda: Attention(CUTS["by head"][0], by_hand),
    lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=torch.channels_last),
], ids=["interleaved heads", "channels last"])
def test_matrices_that_are_copies_follow_the_weights(build: Callable[[], nn.Module]) -> None:
    """An Observer that knows the architecture reads the weights as they are now."""
    model = built(build)
    x = zoo.gaussian(4, 3)(4)[0] if isinstance(model, Attention) else zoo.gaussian(2, 4, 4)(4)[0]
    probe, start = richter.Probe(x, zoo.classes(4, 2)), copy.deepcopy(model.state_dict())
    watch = richter.Observer(model, probe, measures=["nfc", "weight_change"], when=1, budget=None, initial=start)
    watch(0)
    rich = nfc_by_layer(model, probe)
    rich()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype))
    snap, fresh = watch.now(1), richter.measure(model, probe, ["nfc", "weight_change"], initial=start)
    assert len(snap.rows) > 3
    for r in fresh.rows:
        assert snap.value(r.measure, r.layer) == pytest.approx(r.value, rel=1e-9)
    for layer, value in rich().items():
        assert value == pytest.approx(fresh.value("nfc", layer), rel=1e-9)
