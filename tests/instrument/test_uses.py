"""Parameters that are used as matrices in other ways than by a module that is known: what is seen of them, what they are called,
and what is said of those that are not seen."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracles
import richter
import zoo
from richter import kernels
from richter.instrument.evaluate import RichterWarning
from richter.instrument.survey import SurveyMemo, surveyed

UNKNOWN = "used, but not as a linear map that Richter knows"


class Net(nn.Module):
    """z = C tanh(B' tanh(A x)), where B' is what a test makes of B."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def middle(self, h: Tensor) -> Tensor:
        return self.b(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.middle(torch.tanh(self.a(x)))))


def measured(model: nn.Module, x: Any, measures: tuple[str, ...] = ("nfc",), output: Any = None) -> richter.Snapshot:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RichterWarning)
        return richter.measure(model, richter.Probe(x, torch.arange(oracles.size(x)) % 3), list(measures), output=output)


def built(factory: Callable[[], nn.Module], gain: float = 2.0) -> nn.Module:
    return zoo.seeded(factory, gain)()


def kernel_error(model: nn.Module, x: Any, output: Any = None) -> float:
    """How far the whole tangent kernel is from products of Jacobians."""
    expected = torch.stack(list(oracles.tangent_kernels(model, x, output=output).values())).sum(0)
    K = kernels.ntk(model, x, form="full", output=output)
    return float((K - expected).norm() / expected.norm())


# ------------------------------------------------------------------------------------------------------ transformers


class Scaled(nn.Module):
    """Gemma's table, which scales what it looks up, and a read-out. (Gemma's norms compute in float32 in any model.)"""

    def __init__(self) -> None:
        from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

        super().__init__()
        self.embed_tokens = GemmaTextScaledWordEmbedding(7, 4, padding_idx=0, embed_scale=2.0)
        self.lm_head = nn.Linear(4, 7)

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.lm_head(torch.tanh(self.embed_tokens(input_ids)).cumsum(1)))


def gemma() -> tuple[nn.Module, dict[str, Tensor]]:
    return Scaled(), ids()


def opt() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(OPTConfig(vocab_size=7, hidden_size=4, ffn_dim=6, num_hidden_layers=1, num_attention_heads=2,
                                    max_position_embeddings=6, word_embed_proj_dim=4, use_cache=False, init_std=0.4)), ids()


def bart() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(vocab_size=7, d_model=4, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=6,
                        decoder_attention_heads=2, decoder_ffn_dim=6, max_position_embeddings=6, use_cache=False, init_std=0.4,
                        scale_embedding=True, forced_eos_token_id=None)
    return BartForConditionalGeneration(config), {**ids(), "decoder_input_ids": ids(stream=1)["input_ids"]}


def whisper() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(vocab_size=7, d_model=4, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                           encoder_ffn_dim=6, decoder_attention_heads=2, decoder_ffn_dim=6, num_mel_bins=3,
                           max_source_positions=3, max_target_positions=6, use_cache=False, init_std=0.4, pad_token_id=0,
                           bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    x = torch.stack([zoo.normal(i, 3, 6) for i in range(5)])
    return WhisperForConditionalGeneration(config), {"input_features": x, "decoder_input_ids": ids()["input_ids"]}


def mamba() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=7, hidden_size=4, state_size=3, num_hidden_layers=1, conv_kernel=3, expand=2,
                                        time_step_rank=2, use_cache=False, initializer_range=0.4)), ids()


def ids(stream: int = 0) -> dict[str, Tensor]:
    return {"input_ids": torch.stack([zoo.tokens(i, 4, 3, 7, stream) for i in range(5)])}


def last_token(result: Any) -> Tensor:
    return result.logits[:, -1, :3]


@contextmanager
def heard(parameter: Tensor, uses: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """A zero is added to whatever is looked up in the parameter, convolved with it or multiplied by it from the left; W and the
    zero are kept, with the outputs of the map as its last axis."""
    embedding, conv1d, matmul, index = F.embedding, F.conv1d, Tensor.__matmul__, Tensor.__getitem__
    place = parameter.data_ptr()

    def keep(W: Tensor, z: Tensor) -> Tensor:
        delta = torch.zeros_like(z, requires_grad=True)
        uses.append((W.detach().clone(), delta))
        return z + delta

    def own_embedding(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        z = embedding(x, weight, *args, **kwargs)
        return keep(weight.T, z) if weight is parameter else z

    def own_conv1d(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        z = conv1d(x, weight, *args, **kwargs)
        return keep(torch.block_diag(*weight), z.mT).mT if weight.data_ptr() == place else z

    def own_matmul(a: Tensor, b: Tensor) -> Tensor:
        z = matmul(a, b)
        return keep(a, z.mT).mT if a is parameter else z

    def own_index(a: Tensor, i: Any) -> Tensor:
        z = index(a, i)
        return keep(a.T, z) if a is parameter else z

    with mock.patch.object(F, "embedding", own_embedding), mock.patch.object(F, "conv1d", own_conv1d), \
            mock.patch.object(Tensor, "__matmul__", own_matmul), mock.patch.object(Tensor, "__getitem__", own_index):
        yield


def nfc_by_definition(model: nn.Module, x: Any, module: str) -> float:
    """cos(W^T W, W^T K W) of the weight of a module whose forward is its own, one example and one output at a time."""
    parameter = dict(model.named_modules())[module].weight
    jacobians, W = [], None
    for i in range(oracles.size(x)):
        uses: list[tuple[Tensor, Tensor]] = []
        with heard(parameter, uses):
            f = last_token(model(**zoo.select(x, slice(i, i + 1))))[0]
        (W, delta), = uses
        jacobians.append(torch.stack([torch.autograd.grad(o, delta, retain_graph=True)[0].reshape(-1, len(W)) for o in f]))
    assert W is not None
    K = oracles.ptk_covariance(torch.stack(jacobians))
    return oracles.cosine(W.T @ W, W.T @ K @ W)


@pytest.mark.parametrize(("factory", "layers"), [
    (gemma, "embed_tokens"),
    (opt, "model.decoder.embed_positions"),
    (whisper, "model.decoder.embed_positions"),
    (mamba, "backbone.layers.0.mixer.conv1d backbone.layers.0.mixer.dt_proj"),
], ids=["gemma", "opt", "whisper", "mamba"])
def test_layers_of_transformers_with_a_forward_of_their_own_are_measured(factory: Any, layers: str) -> None:
    """A scaled table, tables of positions, and weights that their module is never asked to apply."""
    model, x = factory()
    model = model.double().eval()
    snap = measured(model, x, output=last_token)
    for layer in layers.split():
        assert snap.value("nfc", layer) == pytest.approx(nfc_by_definition(model, x, layer), rel=1e-9)
    matrices = {k for k, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding, nn.Conv1d))}
    assert matrices == {row.layer for row in snap.rows if math.isfinite(row.value)}
    assert not [text for text in snap.notes.values() if "never called" in text]
    assert kernel_error(model, x, last_token) < 1e-12


def test_a_table_shared_by_two_scaled_ones_and_the_read_out_has_a_row_for_each() -> None:
    model, x = bart()
    model = model.double().eval()
    snap = measured(model, x, output=last_token)
    for layer in ("model.encoder.embed_tokens", "model.decoder.embed_tokens"):
        of_one = nfc_of_one_lookup(model, x, layer)
        assert snap.value("nfc", layer) == pytest.approx(of_one, rel=1e-9)
    W, _, J = oracles.layer_io(model, x, "lm_head", last_token)
    assert snap.value("nfc", "lm_head") == pytest.approx(oracles.nfa_measures(W, W, J, J)["nfc"], rel=1e-9)
    assert kernel_error(model, x, last_token) < 1e-12


def nfc_of_one_lookup(model: nn.Module, x: Any, layer: str) -> float:
    """The same where several modules share the table: only what this one looks up is heard."""
    module = dict(model.named_modules())[layer]
    shared, module.weight = module.weight, nn.Parameter(module.weight.detach().clone())
    try:
        return nfc_by_definition(model, x, layer)
    finally:
        module.weight = shared


# ------------------------------------------------------------------------------------------------------ names and notes


class Residual(nn.Module):
    """A block that uses the weight of its own layer once more, outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(5, 5)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.map(h)) + torch.tanh(F.linear(h, self.map.weight))


class TiedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.first, self.second, self.c = nn.Linear(4, 5), nn.Linear(5, 5), Residual(), nn.Linear(5, 3)
        self.second.map.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.second(torch.tanh(self.first(torch.tanh(self.a(x))))))


def test_a_use_of_a_tied_weight_belongs_to_the_block_that_uses_it() -> None:
    """Not to the module that has it by its first name: that of ``second`` counts what ``second`` reads, in both places."""
    model, x = built(TiedBlocks), zoo.normal(0, 6, 4)
    snap = measured(model, x)
    assert {row.layer for row in snap.rows} >= {"first", "second.map"}
    with torch.no_grad():
        h = torch.tanh(model.first(torch.tanh(model.a(x))))  # type: ignore[operator]
    W, tail = model.first.weight.detach(), model.c  # type: ignore[union-attr]
    gradients = []
    for row in h:
        u = row.clone().requires_grad_()  # what the first and the second read, each with its own leaf
        v = row.clone().requires_grad_()
        z = torch.tanh(F.linear(u, W, model.second.map.bias)) + torch.tanh(F.linear(v, W))  # type: ignore[union-attr, arg-type]
        f = tail(z)  # type: ignore[operator]
        gradients += [torch.autograd.grad(f[k], (u, v), retain_graph=True) for k in range(3)]
    agop = sum(torch.outer(g, g) for pair in gradients for g in pair)
    nfm = W.T @ W
    assert snap.value("nfc", "second.map") == pytest.approx(float((nfm * agop).sum() / nfm.norm() / agop.norm()), rel=1e-10)  # type: ignore[union-attr]


def test_a_use_that_is_not_seen_is_told_and_the_kernel_stays_exact() -> None:
    """W is a matrix here, and added up there: the matrix alone does not rebuild its gradient."""

    class Summed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.W = zoo.matrix(5, 5)

        def middle(self, h: Tensor) -> Tensor:
            return h @ self.W + torch.tanh(self.W.T @ h.T).T + self.W.square().sum(0)

    model, x = built(Summed), torch.stack([zoo.normal(i, 4) for i in range(12)])
    snap = measured(model, x)
    assert not [row for row in snap.rows if row.layer.startswith("W")]
    assert "also used in a way that is not a linear map" in snap.notes["W"]
    assert kernel_error(model, x) < 1e-12


class Sign(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Binary(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Sign.apply(self.weight), self.bias)


def test_what_is_used_without_being_a_linear_map_is_not_called_unused() -> None:
    class Straight(Net):
        def __init__(self) -> None:
            super().__init__()
            self.b = Binary(5, 5)
            self.bias_table = nn.Parameter(torch.randn(3, 5))
            self.spare, self.raw_spare = nn.Linear(5, 5), zoo.matrix(5, 5)

        def middle(self, h: Tensor) -> Tensor:
            return self.b(h) + self.bias_table.sum(0)

    model, x = built(Straight), torch.stack([zoo.normal(i, 4) for i in range(6)])
    notes = measured(model, x, ("nfc", "tangent_cka")).notes
    assert notes["b"].startswith(UNKNOWN)
    assert notes["bias_table"].startswith(UNKNOWN)
    assert notes["spare"] == "never called on the probe"
    assert notes["raw_spare"] == ("never used: no gradient reaches it from the output on the probe (read by .data, detached, "
                                  "wrapped in a new Parameter or cached by an earlier call, it is a constant)")
    assert kernel_error(model, x) < 1e-12
    value = richter.measure(model, richter.Probe(x, torch.arange(6) % 3), ["tangent_cka"], layers=["b"]).value("tangent_cka", "b")
    assert math.isfinite(value)  # it is used, and its kernel is known


def test_a_table_without_any_effect_does_not_look_like_mixing_of_examples() -> None:
    """A shift before a softmax: its gradient is nothing but rounding, which is another one for another batch."""

    class Shifted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 1)

        def middle(self, h: Tensor) -> Tensor:
            shift = self.table(torch.arange(3, device=h.device)).view(3, 1)
            return (self.b(h)[:, None] + shift).softmax(-1).sum(1)

    model, x = built(Shifted), torch.stack([zoo.normal(i, 4) for i in range(12)])
    snap = measured(model, x)
    assert {"a", "b", "c"} <= {row.layer for row in snap.rows if math.isfinite(row.value)}
    assert kernel_error(model, x) < 1e-12


def test_a_gradient_that_autograd_returns_transposed_is_compared() -> None:
    class Copied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.W = zoo.matrix(5, 5)

        def middle(self, h: Tensor) -> Tensor:
            return h @ self.W.clone() + torch.tanh(h @ self.W.T.contiguous())

    model, x = built(Copied), torch.stack([zoo.normal(i, 4) for i in range(12)])
    assert {"W", "W.T"} <= {row.layer for row in measured(model, x).rows if math.isfinite(row.value)}


def test_matrices_that_are_copies_are_read_anew_where_weights_are_trusted_to_stay() -> None:
    """Heads that are put one behind the other are no view of their parameter."""
    case = zoo.CASES["every_product"]
    model, (x, _) = case.build(), case.batch(4)
    memo = SurveyMemo()
    surveyed(model, x, None, memo)
    with torch.no_grad():
        model.heads.mul_(2.0)
    matrices = surveyed(model, x, None, memo, look=False)[2].matrices
    assert torch.equal(matrices["heads"], model.heads.permute(0, 2, 1).reshape(6, 4))


# ------------------------------------------------------------------------------------------- forward passes of another kind


class SparseProduct(Net):
    def middle(self, h: Tensor) -> Tensor:
        A = torch.eye(5, dtype=h.dtype, device=h.device).roll(1, 0)
        return self.b(torch.sparse.mm(A.to_sparse(), h.T).T + (A.to_sparse_csr() @ h.T).T)


class SparseState(Net):
    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.eye(5).to_sparse())
        self.register_buffer("shift", torch.eye(5).roll(1, 0).to_sparse())

    def middle(self, h: Tensor) -> Tensor:
        return self.b(torch.sparse.mm(self.A, torch.sparse.mm(self.shift, h.T)).T)


class OfGradients(Net):
    def middle(self, h: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda u: F.gelu(self.b(u)).sum()))(h)


class OfTangents(Net):
    def middle(self, h: Tensor) -> Tensor:
        return sum(torch.func.jvp(lambda u: F.gelu(self.b(u)), (h,), (torch.ones_like(h),)))


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.jit.script(nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double())


class Traced(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.jit.trace(nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double(), torch.zeros(2, 5, dtype=torch.float64))


class Conditional(Net):
    def middle(self, h: Tensor) -> Tensor:
        return torch.cond(torch.tensor(True), lambda u: self.b(u), lambda u: 2 * u, (h,))


@pytest.mark.filterwarnings("ignore:.*(CSR|torch.jit|sparse).*")
@pytest.mark.parametrize(("factory", "seen"), [
    (SparseProduct, True), (SparseState, True), (OfGradients, False), (OfTangents, False), (Scripted, False), (Traced, False),
    (Conditional, True)], ids=lambda value: getattr(value, "__name__", None))
def test_forward_passes_of_another_kind_are_measured(factory: Callable[[], nn.Module], seen: bool) -> None:
    """Sparse matrices, functions of torch.func, compiled scripts: nothing stops, and what is not seen is said."""
    model, x = built(factory, 1.0), torch.stack([zoo.normal(i, 4) for i in range(6)])
    probe = richter.Probe(x, torch.arange(6) % 3)
    watch = richter.Observer(model, probe, when=1, measures=["nfc", "tangent_cka"], budget=None)
    watch(0)
    snap = watch(1)
    assert snap is not None
    expected = {"a", "c"} | ({"b"} if seen else set())
    assert expected == {row.layer for row in snap.rows if row.measure == "nfc" and math.isfinite(row.value)}
    unseen = [text for layer, text in snap.notes.items() if layer.startswith("b")]
    assert seen or (unseen and all(text.startswith(UNKNOWN) for text in unseen))
    if factory is not SparseState:  # the oracle has no sparse Jacobians
        assert kernel_error(model, x) < 1e-12


class Tries(Net):
    def middle(self, h: Tensor) -> Tensor:
        try:
            return self.b(h[:, :-1])
        except RuntimeError:
            return F.linear(h, self.b.weight, self.b.bias)


def test_a_layer_whose_error_the_model_catches_is_not_taken_for_running() -> None:
    """What follows used its weight unseen: it had no row."""
    x = torch.stack([zoo.normal(i, 4) for i in range(6)])
    probe = richter.Probe(x, torch.arange(6) % 3)
    plain, tries = (richter.measure(built(factory, 1.0), probe, ["nfc"]).rows for factory in (Net, Tries))
    assert [(r.layer, r.value) for r in tries] == [(r.layer, pytest.approx(r.value, rel=1e-12)) for r in plain]
