"""Token labels beside the outputs that predict them: moved where a model moves them itself, asked about elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import oracles
import richter
from observing import assert_close, gpt, lengths
from richter.core import ProbeError
from richter.instrument.capture import quiet
from richter.instrument.cotangents import loss_gradient
from richter.instrument.statistics import WEIGHT_GRADIENT
from richter.instrument.statistics.frame import gathered
from richter.instrument.subject import Subject

transformers = pytest.importorskip("transformers")
VOCABULARY, SIZES = 7, {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
IDS = torch.randint(0, VOCABULARY, (6, 5), generator=torch.Generator().manual_seed(0))


def built(kind: str, config: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return getattr(transformers, kind)(config).double().eval()


def gpt2() -> nn.Module:
    return built("GPT2LMHeadModel", transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=VOCABULARY, n_positions=8, initializer_range=0.4, attn_pdrop=0.0,
        embd_pdrop=0.0, resid_pdrop=0.0))


def bert(kind: str, **options: Any) -> nn.Module:
    return built(kind, transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=8, initializer_range=0.4, **SIZES,
                                               **options))


def gradients(model: nn.Module, probe: richter.Probe, maps: list[str]) -> dict[str, Tensor]:
    with quiet(model):
        subject = Subject(model, probe, None, maps, 2 ** 30, None)
        subject.renew()
        known = gathered(subject, WEIGHT_GRADIENT, loss_gradient)
        return {name: known.value(name) for name in maps}


def own_gradients(model: nn.Module, maps: list[str], **inputs: Tensor) -> dict[str, Tensor]:
    """Of the loss that the model computes itself, which would round the logits to float32."""
    weights = [model.get_submodule(name).weight for name in maps]
    with mock.patch.object(Tensor, "float", Tensor.double):
        found = torch.autograd.grad(model(**inputs).loss, weights)
    return {name: d.T for name, d in zip(maps, found, strict=True)}  # Conv1D keeps its weight transposed


MAPS = ["transformer.h.0.attn.c_proj", "transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"]


@pytest.mark.parametrize("shift", [True, None])
def test_the_loss_is_that_of_the_model_itself(shift: bool | None) -> None:
    model = gpt2()
    mine = gradients(model, richter.Probe({"input_ids": IDS}, IDS, shift=shift), MAPS)
    for name, expected in own_gradients(model, MAPS, input_ids=IDS, labels=IDS).items():
        assert torch.allclose(mine[name], expected, rtol=1e-10, atol=1e-12)


def test_padded_texts_too() -> None:
    """Without a mask and with one: the label of a masked token belongs to nobody."""
    model, real = gpt2(), lengths(6, 5)
    real[:, :2] = True
    labels = torch.where(real, IDS, -100)
    expected = own_gradients(model, MAPS, input_ids=IDS, attention_mask=real.long(), labels=labels)
    x = {"input_ids": IDS, "attention_mask": real.long()}
    for probe in (richter.Probe(x, labels), richter.Probe(x, IDS, mask=real, shift=True), richter.Probe(x, IDS, mask=real)):
        mine = gradients(model, probe, MAPS)
        for name in MAPS:
            assert torch.allclose(mine[name], expected[name], rtol=1e-10, atol=1e-12)


def test_labels_are_moved_once_and_the_snapshot_says_so() -> None:
    model, after = gpt2(), torch.cat([IDS[:, 1:], torch.full((6, 1), -100)], 1)
    probe = richter.Probe({"input_ids": IDS}, IDS, shift=True)
    assert torch.equal(probe.y, after)
    assert torch.equal(replace(probe, chunk=2).y, after)
    assert torch.equal(richter.Probe({"input_ids": IDS}, IDS, held_out=({"input_ids": IDS}, IDS), shift=True).held_out.y, after)
    said = richter.measure(model, probe, ["tangent_cka"])
    assert "*" not in said.notes
    seen = richter.measure(model, richter.Probe({"input_ids": IDS}, IDS), ["tangent_cka"])
    assert "moves them by one in its own loss" in seen.notes["*"]
    assert_close(seen, said)
    assert_close(richter.measure(model, richter.Probe({"input_ids": IDS}, after), ["tangent_cka"]), said)
    left = richter.measure(model, richter.Probe({"input_ids": IDS}, IDS, shift=False), ["tangent_cka"])
    assert abs(left.value("tangent_cka") - said.value("tangent_cka")) > 1e-3


def test_an_observer_moves_labels_at_every_step() -> None:
    model = gpt2()
    watch = richter.Observer(model, richter.Probe(IDS, IDS), measures=["tangent_cka"], when=1, budget=None)
    expected = richter.measure(model, richter.Probe(IDS, IDS, shift=True), ["tangent_cka"])
    for step in range(2):
        assert_close(watch(step), expected)


def test_a_masked_language_model_has_its_labels_in_place() -> None:
    model, labels = bert("BertForMaskedLM"), torch.where(torch.arange(5) % 2 == 0, IDS, -100)
    seen = richter.measure(model, richter.Probe({"input_ids": IDS}, labels), ["tangent_cka"])
    assert "*" not in seen.notes
    assert_close(seen, richter.measure(model, richter.Probe({"input_ids": IDS}, labels, shift=False), ["tangent_cka"]))


def test_the_loss_is_looked_at_and_not_the_name() -> None:
    """A language model that is not called one, and one whose own loss moves nothing."""
    class Other(transformers.GPT2LMHeadModel):
        pass

    class InPlace(transformers.GPT2LMHeadModel):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            logits = super().forward(input_ids).logits
            loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}
            return {"logits": logits, **loss}

    config = gpt2().config
    for kind, note in ((Other, True), (InPlace, False)):
        snap = richter.measure(kind(config).double(), richter.Probe({"input_ids": IDS}, IDS), ["tangent_cka"])
        assert ("moves them by one" in snap.notes.get("*", "")) == note


def test_where_the_model_cannot_be_asked_you_are() -> None:
    model, x, y = gpt()

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(ids).logits if hasattr(self.inner(ids), "logits") else self.inner(ids)

    plain = Plain()
    with pytest.raises(ProbeError, match=r"(?s)labels y equal the input ids.*shift=True.*shift=False"):
        richter.measure(plain, richter.Probe(x, x), ["tangent_cka"])
    for shift in (True, False):
        assert richter.measure(plain, richter.Probe(x, x, shift=shift), ["tangent_cka"]).value("tangent_cka") > 0
    assert richter.measure(plain, richter.Probe(x, y), ["tangent_cka"]).value("tangent_cka") > 0  # no question


@pytest.mark.parametrize(("y", "words"), [(torch.arange(6) % 3, r"has shape \(6,\)"), (None, "y is None"),
                                          (torch.rand(6, 5), "float32"), (IDS[:, :1], r"\(6, 1\)")])
def test_only_token_ids_can_be_moved(y: Tensor | None, words: str) -> None:
    with pytest.raises(ProbeError, match=words):
        richter.Probe(IDS, y, shift=True)


def test_shift_is_a_truth_value() -> None:
    with pytest.raises(ProbeError, match="shift='yes'"):
        richter.Probe(IDS, IDS, shift="yes")  # type: ignore[arg-type]


def test_from_a_loader() -> None:
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    probe = richter.Probe.from_loader(rows, n=6, shift=True)
    assert torch.equal(probe.y[:, :-1], probe.x["input_ids"][:, 1:])


def test_the_definition_sees_the_difference() -> None:
    """tangent_cka of moved labels, by hand."""
    model = gpt2()
    snap = richter.measure(model, richter.Probe({"input_ids": IDS}, IDS), ["tangent_cka"])
    K = torch.stack(list(oracles.tangent_kernels(model, {"input_ids": IDS}, output=lambda out: out.logits).values())).sum(0)
    n, k = K.shape[:2]
    keep = (torch.arange(k) // VOCABULARY < 4).expand(n, k).flatten()
    Y = nn.functional.one_hot(torch.cat([IDS[:, 1:], IDS[:, :1]], 1), VOCABULARY).double().flatten()[keep]
    C = oracles.centring(len(Y))
    Kc, Yc = C @ K.reshape(n * k, n * k)[keep][:, keep] @ C, C @ Y
    assert snap.value("tangent_cka") == pytest.approx(float(Yc @ Kc @ Yc / (Kc.norm() * (Yc @ Yc))), rel=1e-8)
