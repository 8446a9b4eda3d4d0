"""What a broken line of the instrument once went through with: each test here was written because a mutation of
``tests/mutations.py`` survived all the others."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.overrides import TorchFunctionMode

import oracles
import richter
import zoo
from richter import kernels
from richter.core import CaptureError, Mark, MixingError
from richter.instrument import stream, tokens
from richter.instrument.capture import quiet, state_of
from richter.instrument.survey import Network, Survey, SurveyMemo, audit, survey, surveyed
from richter.instrument.survey.memo import Amendments, amended
from richter.layers.recurrent import recurrent_in_parts, weights_of
from richter.testing import check_layer

X = torch.stack([zoo.normal(i, 4) for i in range(12)])
UNKNOWN = "used, but not as a linear map that Richter knows"


class Net(nn.Module):
    """c(tanh(middle(tanh(a x)))), where the middle is what a test makes of W."""

    def __init__(self, middle: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.middle = middle
        self.a, self.c = nn.Linear(4, 6), nn.LazyLinear(3)
        for name, part in parts.items():
            setattr(self, name, copy.deepcopy(part))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.middle(self, torch.tanh(self.a(x)))).flatten(1))


def built(middle: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> nn.Module:
    model = Net(middle, **parts).double()
    model(X[:2])
    return model


def matrix(*shape: int) -> nn.Parameter:
    draw = torch.Generator().manual_seed(1)
    return nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64) / math.sqrt(shape[-1]))


def measured(model: nn.Module, x: Any = X) -> richter.Snapshot:
    return richter.measure(model, richter.Probe(x, torch.arange(oracles.size(x)) % 3), ["nfc"])


def kernel_error(model: nn.Module, x: Any = X) -> float:
    expected = torch.stack(list(oracles.tangent_kernels(model, x).values())).sum(0)
    return float((kernels.ntk(model, x, form="full") - expected).norm() / expected.norm())


def correlations(model: nn.Module) -> dict[str, float]:
    return {row.layer: row.value for row in measured(model).rows if math.isfinite(row.value)}


# ----------------------------------------------------------------------------------------- one map, written in two ways


@pytest.mark.parametrize(("W", "way", "plainly"), [
    # the axes of the result stand in an order that is not its own inverse
    (matrix(6, 5),
     lambda m, h: torch.einsum("ntd,do->otn", h.view(-1, 1, 6).expand(-1, 3, -1), m.W).permute(2, 1, 0).contiguous(),
     lambda m, h: h.view(-1, 1, 6).expand(-1, 3, -1) @ m.W),
    (matrix(6, 5),
     lambda m, h: torch.einsum("ntd,do->ont", h.view(-1, 1, 6).expand(-1, 3, -1), m.W).permute(1, 2, 0).contiguous(),
     lambda m, h: h.view(-1, 1, 6).expand(-1, 3, -1) @ m.W),
    # without an arrow the letters of the result are sorted
    (matrix(6, 5), lambda m, h: torch.einsum("ntd,do", h.view(-1, 1, 6).expand(-1, 3, -1), m.W).mT.contiguous(),
     lambda m, h: h.view(-1, 1, 6).expand(-1, 3, -1) @ m.W),
    # ellipses and leading axes are matched from behind
    (matrix(3, 2, 5), lambda m, h: torch.einsum("...td,...do->...to", h.view(-1, 3, 1, 2), m.W),
     lambda m, h: torch.einsum("nhtd,hdo->nhto", h.view(-1, 3, 1, 2), m.W)),
    (matrix(3, 2, 5), lambda m, h: h.view(-1, 3, 1, 2) @ m.W,
     lambda m, h: torch.einsum("nhtd,hdo->nhto", h.view(-1, 3, 1, 2), m.W)),
    # a padding index that is counted from the end
    (matrix(7, 5), lambda m, h: h[:, :5] + F.embedding((h[:, :5] * 3).long().abs() + 4, m.W, padding_idx=-1).sum(1),
     lambda m, h: h[:, :5] + F.embedding((h[:, :5] * 3).long().abs() + 4, m.W, padding_idx=6).sum(1)),
    (matrix(7, 5), lambda m, h: h[:, :5] + F.embedding_bag((h[:, :5] * 3).long().abs() + 4, m.W, padding_idx=-1),
     lambda m, h: h[:, :5] + F.embedding_bag((h[:, :5] * 3).long().abs() + 4, m.W, padding_idx=6)),
    # as many zeros on the sides of an axis as are asked for, not on those of another
    (matrix(4, 1, 2, 3), lambda m, h: F.conv2d(h.view(-1, 1, 2, 3), m.W, padding=(0, 2)),
     lambda m, h: F.conv2d(F.pad(h.view(-1, 1, 2, 3), (2, 2, 0, 0)), m.W)),
], ids=["turned back", "turned around", "no arrow", "dots", "leading axes", "padding index", "padding index of a bag", "padding"])
def test_one_map_in_two_ways(W: nn.Parameter, way: Any, plainly: Any) -> None:
    values = correlations(built(way, W=W))
    assert "W" in values
    assert values == pytest.approx(correlations(built(plainly, W=W)), rel=1e-9)
    assert kernel_error(built(way, W=W)) < 1e-12


def test_a_parameter_in_the_middle_of_a_larger_memory() -> None:
    flat = torch.cat([torch.full((7,), 1e3, dtype=torch.float64), matrix(6, 5).detach().flatten(), torch.ones(9).double()])
    model, plain = built(lambda m, h: h @ m.W, W=matrix(6, 5)), built(lambda m, h: h @ m.W, W=matrix(6, 5))
    model.W = nn.Parameter(flat[7:37].view(6, 5))
    assert model.W.storage_offset() == 7
    assert correlations(model) == pytest.approx(correlations(plain), rel=1e-9)


def test_a_view_that_a_module_returns_and_that_is_changed_in_place() -> None:
    conv = zoo.hf_conv1d(5, 6)
    model = built(lambda m, h: m.conv(h).relu_(), conv=conv)
    assert correlations(model) == pytest.approx(correlations(built(lambda m, h: m.conv(h).relu(), conv=conv)), rel=1e-9)


def test_an_input_that_is_changed_in_place_after_it_was_read() -> None:
    """Where autograd itself has kept a padded copy, and has nothing to say of it."""
    def middle(m: Any, h: Tensor) -> Tensor:
        h = h.view(-1, 2, 3) * 1.0
        z = m.conv(h)
        h.mul_(2)
        return z + h

    model = built(middle, conv=nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"))
    with pytest.raises(CaptureError, match="its input was changed in place after it was read"):
        measured(model)


# ------------------------------------------------------------------------------------------ what is no linear map is not one


def doubled(m: Any, h: Tensor) -> Tensor:
    W = m.W.clone()
    W.mul_(2)
    return h @ W


@pytest.mark.parametrize("middle", [
    doubled,  # a copy that was written into
    lambda m, h: torch.addmm(h.new_zeros(5), h, m.W, alpha=2.0),
    lambda m, h: (h.float() @ m.W.float()).double(),  # a copy that rounds
], ids=["a copy that is changed", "alpha", "a copy that rounds"])
def test_what_is_multiplied_or_rounded_is_not_the_weight(middle: Any) -> None:
    snap = measured(built(middle, W=matrix(6, 5)))
    assert snap.notes["W"].startswith(UNKNOWN)


def test_a_column_that_is_repeated_is_no_matrix() -> None:
    snap = measured(built(lambda m, h: h @ m.W[:, :1].expand(6, 3), W=matrix(6, 5)))
    assert {"a", "c"} == {row.layer for row in snap.rows if math.isfinite(row.value)} - {"*"}


def test_parts_that_do_not_lie_side_by_side_are_not_those_that_do() -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        z = torch.einsum("nd,hkd->nhk", h, m.W[:2]).mT + torch.einsum("nd,hkd->nhk", h, m.W[:, :2])
        return z.flatten(1)

    assert {"a", "c", "W.0:2", "W.:,0:2"} == correlations(built(middle, W=matrix(3, 3, 6))).keys() - {"*"}


def test_a_matrix_with_its_outputs_on_two_axes_or_on_one_is_one_map() -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        return torch.einsum("nd,hkd->nkh", h, m.W).mT.flatten(1) + torch.tanh(F.linear(h, m.W.flatten(0, 1)))

    assert {"a", "c", "W"} == correlations(built(middle, W=matrix(3, 2, 6))).keys() - {"*"}


def test_a_third_of_a_fused_projection_that_is_used_once_more() -> None:
    """It is the same map."""
    def attention(m: Any, h: Tensor) -> Tensor:
        h = h.view(-1, 3, 2)
        q, k, v = m.qkv(h).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v + F.linear(h, m.qkv.weight[2:4])

    values = correlations(built(attention, qkv=nn.Linear(2, 6)))
    assert {"qkv.q", "qkv.k", "qkv.v"} == {name for name in values if name.startswith("qkv")}


def test_a_projection_that_is_not_three_times_as_wide_is_one_map() -> None:
    def attention(m: Any, h: Tensor) -> Tensor:
        q, k, v = m.qkv(h.view(-1, 2, 3)).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v

    assert {"a", "c", "qkv"} == correlations(built(attention, qkv=nn.Linear(3, 6))).keys() - {"*"}


def test_a_projection_some_of_whose_outputs_are_not_used_is_one_map() -> None:
    def attention(m: Any, h: Tensor) -> Tensor:
        q, k, v = m.qkv(h.view(-1, 3, 2)).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v[..., :1]

    assert {"a", "c", "qkv"} == correlations(built(attention, qkv=nn.Linear(2, 6))).keys() - {"*"}


@pytest.mark.filterwarnings("ignore:layer 'b'")
def test_a_model_that_differentiates_in_between() -> None:
    """What it does afterwards does not hide it: second derivatives reach the layer before."""
    def force(m: Any, h: Tensor) -> Tensor:
        return F.gelu(m.b(torch.autograd.grad(F.gelu(m.b(h)).sum(), h, create_graph=True)[0]))

    model = built(force, b=nn.Linear(6, 6))
    assert kernel_error(model) < 1e-12
    W, _, J = oracles.layer_io(model, X, "a")
    assert measured(model).value("nfc", "a") == pytest.approx(oracles.nfa_measures(W, W, J, J)["nfc"], rel=1e-9)


def test_a_narrow_layer_that_is_silent_at_most_positions() -> None:
    """What is asked of its one output is negative for some examples."""
    def last(m: Any, h: Tensor) -> Tensor:
        return m.narrow(torch.tanh(m.b(h.view(-1, 3, 2))))[:, -1]

    model = built(last, b=nn.Linear(2, 2), narrow=nn.Linear(2, 1))
    assert kernel_error(model) < 1e-12
    W, _, J = oracles.layer_io(model, X, "b")
    assert measured(model).value("nfc", "b") == pytest.approx(oracles.nfa_measures(W, W, J, J)["nfc"], rel=1e-9)


# ------------------------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize(("layer", "x"), [
    (nn.LayerNorm(5, eps=0.5), torch.stack([zoo.normal(i, 5) for i in range(3)])),
    (nn.ConvTranspose2d(2, 3, (2, 3), padding=(1, 0)), torch.stack([zoo.normal(i, 2, 3, 4) for i in range(3)])),
], ids=["epsilon", "padding"])
def test_views(layer: nn.Module, x: Tensor) -> None:
    check_layer(layer.double().eval(), x)


def test_a_transposed_convolution_with_room_that_no_input_writes() -> None:
    conv = nn.ConvTranspose1d(2, 2, 1, stride=1, dilation=3, output_padding=1)
    model = built(lambda m, h: m.conv(h.view(-1, 2, 3)), conv=conv)
    assert measured(model).notes["conv"].startswith(UNKNOWN)
    assert kernel_error(model) < 1e-12


def test_the_mask_of_an_attention() -> None:
    mask = torch.ones(3, 3, dtype=torch.bool).triu(1)

    def middle(m: Any, h: Tensor) -> Tensor:
        h = h.view(-1, 3, 2)
        return m.attention(h, h, h, attn_mask=mask, need_weights=False)[0]

    assert kernel_error(built(middle, attention=nn.MultiheadAttention(2, 1, batch_first=True))) < 1e-12


class InParts(TorchFunctionMode):
    """Every recurrent function is taken apart."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if weights_of(func, args, kwargs):
            return recurrent_in_parts(lambda *_: None, func, args)
        return func(*args, **(kwargs or {}))


def test_sequences_of_several_lengths_with_states_of_their_own() -> None:
    layer, states = nn.GRU(4, 5, bidirectional=True).double(), torch.stack([zoo.normal(i, 3, 5) for i in range(2)])
    x = pack_padded_sequence(torch.stack([zoo.normal(i, 3, 4) for i in range(4)]), torch.tensor([4, 2, 1]))
    with InParts():
        ours = layer(x, states)
    torch.testing.assert_close((ours[0].data, ours[1]), (layer(x, states)[0].data, layer(x, states)[1]))


def test_a_bag_without_entries() -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        rows = torch.where(h[:, :1] > 0, 0, (h[:, :5] * 3).long().abs() + 1)
        return h[:, :5] + m.bag(rows)

    assert kernel_error(built(middle, bag=nn.EmbeddingBag(7, 5, mode="mean", padding_idx=0))) < 1e-12


def test_the_first_token_is_masked_like_any_other() -> None:
    mask = torch.tensor([[False, True, True], [True, True, False]])
    assert torch.equal(tokens.Positions(torch.arange(3)[:, None]).real(mask, 3), mask)


def test_weights_of_the_entries_of_a_bag() -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        return m.bag((h[:, :5] * 3).long().abs(), per_sample_weights=h[:, :5])

    assert kernel_error(built(middle, bag=nn.EmbeddingBag(7, 5, mode="sum"))) < 1e-12


# -------------------------------------------------------------------------------------------------------------- biases


def test_a_bias_that_is_used_elsewhere_too() -> None:
    model = built(lambda m, h: m.b(h) * m.b.bias.sin(), b=nn.Linear(6, 5))
    assert kernel_error(model) < 1e-12
    assert of_first(model).biases.keys() == {"a.bias", "c.bias"}


def test_a_bias_whose_first_owner_is_never_called() -> None:
    model = built(lambda m, h: m.late(h), early=nn.Linear(6, 5), late=nn.Linear(6, 5))
    model.late.bias = model.early.bias
    assert kernel_error(model) < 1e-12


# --------------------------------------------------------------------------------------------------------------- audit


def test_columns_are_known_by_more_than_their_sum() -> None:
    assert len(set(audit._vector(50, torch.device("cpu")).tolist())) == 50


MANY = torch.stack([zoo.normal(i, 4) for i in range(40)])
MANY[:, 0] = MANY[:, 0].abs() * torch.where(torch.arange(40) % 4 == 3, -1, 1)
MANY[:8, 0] = MANY[:8, 0].abs()


class Two(nn.Module):
    """Two layers; ``between`` may do something with what the first one writes."""

    between: Callable[[Tensor], Tensor] = staticmethod(torch.tanh)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


class Elsewhere(Two):
    """Some examples, and none of the first eight, use the weight of a layer once more, and not as a matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.where(x[:, :1] < 0, 1 + self.a.weight.square().sum(), 1.0)


@pytest.mark.filterwarnings("ignore:layer 'a'")
def test_what_few_examples_do_is_seen_in_a_sum_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sum(oracles.tangent_kernels(Elsewhere(), MANY).values())
    for number in range(6):
        monkeypatch.setattr(audit, "_measurements", itertools.repeat(number))
        torch.testing.assert_close(kernels.ntk(Elsewhere(), MANY, form="full"), expected, rtol=1e-9, atol=1e-12)


class Later(Two):
    """A layer that none of the first eight examples reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h, on = torch.tanh(self.a(x)), (x[:, 0] < 0).nonzero()[:, 0]
        return self.b(h.index_copy(0, on, torch.tanh(self.c(h[on]))) if len(on) else h)


def test_a_layer_that_appears_later_is_seen_one_example_at_a_time_too() -> None:
    values = [richter.measure(Later(), richter.Probe(MANY, torch.arange(40) % 3, chunk=chunk), ["nfc"]).value("nfc", "c")
              for chunk in (1, 40)]
    assert 0 < values[0] == pytest.approx(values[1], rel=1e-9)


def amended_survey(model: nn.Module, singly: bool) -> Survey:
    """Of a doubt about layer a, at an example that is not among the first."""
    with quiet(model):
        state = state_of(model, copied=())
        known = survey(model, MANY[:8], state)
        if singly:
            known.maps["a"] = dataclasses.replace(known.maps["a"], layouts=(), rows=())
        return amended(Network(model, state, known), audit.Doubt(["a"], MANY, 11, "of a test"), Amendments())


def test_what_is_in_doubt_is_looked_at_alone() -> None:
    assert "rebuild its weight gradient only up to" in amended_survey(Elsewhere(), singly=False).notes["a"].text


def test_what_is_in_doubt_and_was_read_alone_already_is_refused() -> None:
    """A doubt that changes nothing would come again, for ever."""
    assert "on some examples of the probe" in amended_survey(Two(), singly=True).notes["a"].text


# -------------------------------------------------------------------------------------------- what a survey itself must see


def of_first(model: nn.Module) -> Survey:
    with quiet(model):
        return survey(model, MANY[:8], state_of(model, copied=()))


class Swapped(Two):
    """Neighbours stand in each other's place."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(len(x))
        order[:len(x) // 2 * 2] = order[:len(x) // 2 * 2].view(-1, 2).flip(1).reshape(-1)
        return super().forward(x[order])[order.argsort()]


def test_neighbours_that_are_swapped_are_not_read_together() -> None:
    assert not of_first(Swapped()).batched


class Leaking(torch.autograd.Function):
    """What is asked of the second example is asked of the first one too, in the backward pass alone."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.cat([g[:1] + g[1:2].sum(0), g[1:]])


class OneWay(Two):
    between = staticmethod(Leaking.apply)


def test_what_reaches_one_half_of_the_examples_from_the_other_is_seen() -> None:
    with pytest.raises(MixingError):
        of_first(OneWay())


class Shared(Two):
    """All examples share what is looked up, and its sum over all of it: with an axis of examples that is another number."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size, self.table = size, nn.Embedding(3, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.size * self.b(torch.tanh(self.a(x) + self.table(torch.arange(3, device=x.device)).sum()))


@pytest.mark.parametrize("size", [1.0, 1e-13])
def test_no_example_axis_where_it_changes_the_output(size: float) -> None:
    assert not of_first(Shared(size)).expand


class Flattened(Two):
    """Three positions of every example: those of one stand as far apart as there are examples."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.stack([x, 2 * x, -x]).flatten(0, 1)
        return self.b(torch.tanh(self.a(rows)).view(3, len(x), -1).sum(0))


def test_rows_that_stand_apart_are_read_together() -> None:
    assert of_first(Flattened()).maps["a"].layouts == ("minor",)


class Always(Two):
    """The weight of the first layer is used once more, and not as a matrix."""

    share = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.share * self.a.weight.square().sum())


class Slightly(Always):
    share = 1e-5


@pytest.mark.parametrize("make", [Always, Slightly])
def test_a_gradient_that_is_not_rebuilt_is_refused_at_once(make: Callable[[], nn.Module]) -> None:
    assert of_first(make()).note("a") is Mark.REFUSED


def test_what_a_pass_keeps_is_counted_without_the_weights() -> None:
    assert of_first(Two()).graph == 4 + 6  # what the first layer read, and what the second one did


@pytest.mark.parametrize("look", [False, True])
def test_a_survey_in_train_mode_is_not_that_in_eval_mode(look: bool) -> None:
    model, memo = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double(), SurveyMemo()
    drawn = []
    for mode in ("eval", "train", "eval"):
        with quiet(model, mode):
            drawn.append(surveyed(model, X[:8], memo=memo, look=look)[2].drawn)
    assert drawn == [False, True, False]


def test_a_survey_is_of_its_examples() -> None:
    model, memo = Two(), SurveyMemo()
    with quiet(model):
        for x in (X[:8], X[:8], MANY[:8]):
            surveyed(model, x, memo=memo, look=False)
    assert memo.surveys == 2


def test_weights_that_have_changed_places() -> None:
    model, memo = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), SurveyMemo()
    for _ in range(2):
        with quiet(model):
            matrices = surveyed(model, X[:8], memo=memo, look=False)[2].matrices
        assert torch.equal(matrices["0"], model[0].weight)
        model[0].weight.data, model[2].weight.data = model[2].weight.data, model[0].weight.data


def test_what_new_weights_refuse_is_said() -> None:
    class Gated(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gate", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + self.gate * self.a.weight.square().sum())

    model, memo, notes = Gated(), SurveyMemo(), []
    for gate in (0.0, 1.0):
        model.gate.fill_(gate)
        with quiet(model):
            notes.append(surveyed(model, X[:8], memo=memo)[2].note("a"))
    assert notes == [None, Mark.REFUSED]


# --------------------------------------------------------------------------------------------------------------- inputs


def test_a_dict_that_is_one_argument() -> None:
    class OfBatch(Net):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return super().forward(batch["first"] - batch["second"])

    model, plain = OfBatch(lambda m, h: h).double(), Net(lambda m, h: h).double()
    plain(X[:2])
    model({"first": X[:2], "second": 0 * X[:2]})
    model.load_state_dict(plain.state_dict())
    values = {row.layer: row.value for row in measured(model, {"first": 2 * X, "second": X}).rows}
    assert values == pytest.approx(correlations(plain), rel=1e-9)


# ---------------------------------------------------------------------------------------------------------------- draws


def test_examples_that_are_differentiated_alone_draw_what_is_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double()

    def gradients(first: int, stop: int) -> Tensor:
        rows = slice(first, stop)
        chunk = stream.Chunk(Network(model, state), X[rows], rows, (), lambda f, _: f.new_ones(1, *f.shape), ["0.weight"])
        return chunk.gradients["0.weight"]

    with quiet(model, "train"):
        state = state_of(model, copied=())
        assert torch.equal(gradients(5, 9), torch.cat([gradients(i, i + 1) for i in range(5, 9)], 1))


def test_all_passes_of_a_chunk_draw_the_same() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    with quiet(model, "train"):
        _, state, known = surveyed(model, X[:8])
        for chunk in stream.chunks(Network(model, state, known), X, 1, maps=["0"]):
            assert torch.equal(chunk.outputs, chunk.f)


# ---------------------------------------------------------------------------------------------------------------- tokens


def steps_of(reads: list[Tensor]) -> Any:
    return SimpleNamespace(calls=[SimpleNamespace(shape=(2, 3))] * len(reads), read=lambda j: reads[j])


def test_a_loop_over_tokens_from_the_last_to_the_first() -> None:
    seen = [zoo.normal(i, 2, 1, 3) for i in range(5)]
    assert tokens._steps(steps_of(seen), steps_of(seen[:3]), 5, 3)[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert tokens._steps(steps_of(seen[::-1]), steps_of(seen[:3][::-1]), 5, 3)[:, 0].tolist() == [4, 3, 2, 1, 0]


def test_a_loop_whose_steps_are_alike_or_all_different_says_nothing() -> None:
    seen, others = [zoo.normal(i, 2, 1, 3) for i in range(5)], [zoo.normal(i, 2, 1, 3) for i in range(5, 8)]
    assert tokens._steps(steps_of(seen[:1] * 5), steps_of(seen[:1] * 3), 5, 3) is None
    assert tokens._steps(steps_of(seen), steps_of(others), 5, 3) is None


# ---------------------------------------------------------------------------------------------------- what a model keeps


def test_a_tensor_in_a_long_list_is_put_back() -> None:
    def counting(m: Any, h: Tensor) -> Tensor:
        m.counts[1234] += len(h)
        return h

    model = Net(counting).double()
    counts = model.counts = [torch.zeros(()) for _ in range(1500)]
    model(X[:2])
    assert counts[1234] == 2
    measured(model)
    assert sum(counts) == counts[1234] == 2


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(torch.tanh(self.a(x)))))


def test_kernel_examples_of_a_layer_that_is_called_twice() -> None:
    """Some examples of the probe enter kernels: what both calls read of them is selected."""
    model, x, y = CalledTwice().double(), torch.randn(16, 6, dtype=torch.float64), torch.arange(16) % 3
    probe = richter.Probe(x, y, kernel_examples=8)
    value = richter.measure(model, probe, ["nfc", "tangent_cka"]).value("tangent_cka", "a")
    rows = probe.kernel_rows()
    expected = oracles.tangent_cka(oracles.tangent_kernels(model, x[rows])["a"], F.one_hot(y[rows], 3).double())
    assert value == pytest.approx(expected, rel=1e-10)
