"""Which positions of a layer are the tokens of a mask: looked at, and refused where it cannot be told."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import oracles
import richter
from observing import draw, lengths
from richter.core import Mark
from richter.instrument.statistics import FEATURES, Moment, Operator
from richter.measures.measure import Measure

N, T = 12, 4
Build = Callable[[], nn.Module]
MASK = lengths(N, T)
READ = Moment("read", lambda c: c.h.sum((0, 1)))


def built(build: Build) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return build().double()


def data() -> tuple[Tensor, Tensor]:
    return draw(N, T, 5, seed=4), torch.arange(N * T).reshape(N, T) * 7 % 3


def nfc_by_hand(model: nn.Module, x: Tensor, name: str, keep: Tensor) -> float:
    """K = sum of g g^T over the outputs of real tokens, and over the positions ``keep`` [n,s] of the layer."""
    W, _, J = oracles.layer_io(model, x, name)  # n k s o
    n, k, s, o = J.shape
    J = J * MASK.repeat_interleave(k // T, 1)[:, :, None, None] * keep[:, None, :, None]
    J = J.reshape(n * k * s, o)
    return oracles.cosine(W.T @ W, W.T @ J.T @ J @ W)


def check(model: nn.Module, name: str, keep: Tensor, note: str = "") -> None:
    """The number of the definition, which is another one without a mask of positions, or with that of today's."""
    x, y = data()
    snap = richter.measure(model, richter.Probe(x, y, mask=MASK), ["nfc"])
    assert snap.value("nfc", name) == pytest.approx(nfc_by_hand(model, x, name, keep), rel=1e-9)
    assert note in snap.notes.get(name, "")
    assert bool(note) == (name in snap.notes)


def read(queries: Tensor, tokens: Tensor) -> Tensor:
    """Attention without weights of its own."""
    return (queries @ tokens.mT).softmax(-1) @ tokens


class Latents(nn.Module):
    """As many latents as there are tokens read them, work among themselves, and are read by the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.work, self.readout = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.latents = nn.Parameter(torch.randn(T, 6))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.tanh(self.embed(x))
        z = torch.tanh(self.work(read(self.latents.expand(len(x), -1, -1), tokens)))
        return self.readout(tokens + read(tokens, z))


def test_latents_are_no_tokens_however_many_they_are() -> None:
    model = built(Latents)
    check(model, "work", torch.ones(N, T))
    check(model, "embed", MASK)
    off = nfc_by_hand(model, data()[0], "work", MASK)  # as if the latents were tokens
    assert abs(off - nfc_by_hand(model, data()[0], "work", torch.ones(N, T))) > 1e-4


class Arranged(nn.Module):
    """`work` reads every token in T heads, and sees the axes of examples, tokens and heads in another order, or as one."""

    def __init__(self, there: Callable[[Tensor], Tensor], back: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.embed, self.work, self.readout = nn.Linear(5, 3 * T), nn.Linear(3, 3), nn.Linear(3 * T, 3)
        self.there, self.back = there, back

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.embed(x)).cumsum(1).unflatten(-1, (T, 3))
        return self.readout(self.back(torch.tanh(self.work(self.there(z))), len(x)).flatten(2))


OUTSIDE, INSIDE = torch.arange(T).repeat_interleave(T), torch.arange(T).repeat(T)
ARRANGED: dict[str, tuple[Build, Tensor]] = {
    "heads last": (lambda: Arranged(lambda z: z, lambda z, n: z), OUTSIDE),
    "heads first": (lambda: Arranged(lambda z: z.transpose(1, 2), lambda z, n: z.transpose(1, 2)), INSIDE),
    "tokens first": (lambda: Arranged(lambda z: z.transpose(0, 1), lambda z, n: z.transpose(0, 1)), OUTSIDE),
    "examples and tokens as one": (lambda: Arranged(lambda z: z.flatten(0, 1), lambda z, n: z.unflatten(0, (n, -1))), OUTSIDE),
    "tokens and heads as one": (lambda: Arranged(lambda z: z.flatten(1, 2), lambda z, n: z.unflatten(1, (-1, T))), OUTSIDE),
    "heads and tokens as one": (lambda: Arranged(lambda z: z.transpose(1, 2).flatten(1, 2),
                                                 lambda z, n: z.unflatten(1, (T, -1)).transpose(1, 2)), INSIDE),
    "all as one": (lambda: Arranged(lambda z: z.flatten(0, 2), lambda z, n: z.reshape(n, -1, T, 3)), OUTSIDE),
    "all as one, heads first": (lambda: Arranged(lambda z: z.transpose(1, 2).flatten(0, 2),
                                                 lambda z, n: z.reshape(n, T, -1, 3).transpose(1, 2)), INSIDE),
}


@pytest.mark.parametrize("name", ARRANGED)
def test_tokens_are_found_on_the_axis_that_shrinks(name: str) -> None:
    """As many heads as tokens: sizes say nothing."""
    build, tokens = ARRANGED[name]
    check(built(build), "work", MASK[:, tokens])


def by_size(z: Tensor) -> Tensor:
    """The order of tokens by a number of their own."""
    return z.flatten(2)[..., :1].argsort(1)


class Reordered(nn.Module):
    """`work` reads tokens from the last to the first, or sorted."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.embed, self.work, self.readout, self.back = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3), back

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.embed(x))
        order = torch.arange(x.shape[1]).flip(0).expand(len(x), -1)[..., None] if self.back else by_size(x)
        z = torch.tanh(self.work(z.gather(1, order.expand_as(z))))
        return self.readout(z.gather(1, order.argsort(1).expand_as(z)))


def test_tokens_in_another_order() -> None:
    check(built(lambda: Reordered(True)), "work", MASK.flip(1))
    x, y = data()
    snap = richter.measure(built(lambda: Reordered(False)), richter.Probe(x, y, mask=MASK), ["nfc"])
    assert snap.row("nfc", "work").mark is Mark.REFUSED


class Pairs(nn.Module):
    """`work` reads pairs of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.work, self.readout = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(torch.tanh(self.work(x[:, :, None] * x[:, None])).sum(2))


def test_a_pair_is_real_if_both_tokens_are() -> None:
    check(built(Pairs), "work", (MASK[:, :, None] & MASK[:, None]).flatten(1))


class Steps(nn.Module):
    """A loop over tokens, onward or back."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.work, self.state, self.readout, self.back = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3), back

    def forward(self, x: Tensor) -> Tensor:
        z, outputs = x.new_zeros(len(x), 6), []
        for t in reversed(range(x.shape[1])) if self.back else range(x.shape[1]):
            z = torch.tanh(self.work(x[:, t]) + self.state(z))
            outputs.append(self.readout(z))
        return torch.stack(outputs[::-1] if self.back else outputs, 1)


def test_a_loop_over_tokens() -> None:
    check(built(lambda: Steps(False)), "work", MASK)
    check(built(lambda: Steps(False)), "state", MASK)
    check(built(lambda: Steps(True)), "work", MASK.flip(1))


def test_a_loop_whose_steps_cannot_be_told_apart_is_refused() -> None:
    """From the last token back, the states of fewer tokens are others."""
    x, y = data()
    row = richter.measure(built(lambda: Steps(True)), richter.Probe(x, y, mask=MASK), ["nfc"]).row("nfc", "state")
    assert math.isnan(row.value)
    assert row.mark is Mark.REFUSED


class OfFixedLength(nn.Module):
    """Positions are a parameter [T, 6]; tokens read earlier ones, or all."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.embed, self.work, self.readout = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.places, self.causal = nn.Parameter(torch.randn(T, 6)), causal

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x) + self.places
        scores = z @ z.mT
        if self.causal:
            scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
        return self.readout(torch.tanh(self.work(z + scores.softmax(-1) @ z)))


def test_a_model_of_fixed_length_is_asked_by_contents() -> None:
    check(built(lambda: OfFixedLength(True)), "embed", MASK)
    check(built(lambda: OfFixedLength(True)), "work", MASK)


def test_what_cannot_be_told_is_refused_and_says_why() -> None:
    """Every token reads every other: whether these T positions are the tokens is not seen."""
    x, y = data()
    model = built(lambda: OfFixedLength(False))
    snap = richter.measure(model, richter.Probe(x, y, mask=MASK), ["nfc", "weight_change"], initial=model.state_dict())
    assert snap.value("nfc", "embed") == pytest.approx(nfc_by_hand(model, x, "embed", MASK), rel=1e-9)
    row = snap.row("nfc", "work")
    assert math.isnan(row.value)
    assert row.mark is Mark.REFUSED
    assert "multiple of the 4 tokens" in row.note
    assert "Let the model take shorter inputs" in row.note
    assert snap.value("weight_change", "work") == 0  # that of the weights needs no positions
    full = richter.measure(model, richter.Probe(x, y, mask=torch.ones_like(MASK)), ["nfc"])  # nothing is masked
    assert full.value("nfc", "work") == pytest.approx(richter.measure(model, richter.Probe(x, y), ["nfc"]).value("nfc", "work"))


class InBlocks(nn.Module):
    """Inside, tokens are filled up to whole blocks."""

    def __init__(self, block: int, mixing: bool) -> None:
        super().__init__()
        self.embed, self.work, self.readout = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.block, self.mixing = block, mixing

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.embed(nn.functional.pad(x, (0, 0, 0, -x.shape[1] % self.block))))
        z = torch.tanh(self.work(z + read(z, z) if self.mixing else z))
        return self.readout(z)[:, :x.shape[1]]


def test_tokens_filled_up_to_blocks() -> None:
    """One token fewer changes no size; half of them do, or contents tell."""
    for block in (2, 4):
        for name in ("embed", "work"):
            check(built(lambda block=block: InBlocks(block, False)), name, MASK)
    check(built(lambda: InBlocks(2, True)), "work", MASK)
    x, y = data()
    snap = richter.measure(built(lambda: InBlocks(4, True)), richter.Probe(x, y, mask=MASK), ["nfc"])
    assert snap.row("nfc", "work").mark is Mark.REFUSED  # not: no tokens


class Prefixed(nn.Module):
    """A token of the model's own before those of the probe."""

    def __init__(self) -> None:
        super().__init__()
        self.work, self.readout, self.prefix = nn.Linear(5, 6), nn.Linear(6, 3), nn.Parameter(torch.randn(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.work(torch.cat([self.prefix.expand(len(x), 1, 5), x], 1)))
        return self.readout(z[:, 1:] + z[:, :1])


def test_positions_that_are_tokens_and_more_all_count_and_say_so() -> None:
    check(built(Prefixed), "work", torch.ones(N, T + 1), note="not the 4 tokens of the mask one by one")


class TwoTexts(nn.Module):
    """An encoder of as many tokens as the decoder has; the mask is the decoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.readout = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        z = torch.tanh(self.decode(x))
        return self.readout(z + read(z, torch.tanh(self.encode(other))))


def test_the_tokens_of_another_text_are_not_those_of_the_mask() -> None:
    model, (x, y) = built(TwoTexts), data()
    snap = richter.measure(model, richter.Probe((x, x.roll(1, 0)), y, mask=MASK), ["nfc"])

    class One(nn.Module):
        def forward(self, both: Tensor) -> Tensor:
            return model(both[..., :5], both[..., 5:])

    one, both = One(), torch.cat([x, x.roll(1, 0)], -1)
    one.inner = model
    for name, keep in (("encode", torch.ones(N, T)), ("decode", MASK)):
        expected = nfc_by_hand(one, both, f"inner.{name}", keep)
        assert snap.value("nfc", name) == pytest.approx(expected, rel=1e-9)


# ------------------------------------------------------------------------------------------------- what is read at them

class Ids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.work, self.readout = nn.Embedding(7, 5), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.readout(torch.tanh(self.work(self.embed(ids))))


def test_what_is_read_at_masked_positions_enters_no_average() -> None:
    model, ids, y = built(Ids), torch.arange(N * T).reshape(N, T) * 5 % 7, data()[1]
    at = Measure("read", lambda m: m.norm().item(), (READ,))
    seen = Measure("ids", lambda m: m.item(), (Moment("ids", lambda c: (c.h >= 0).sum() + 0.0),))
    snap = richter.measure(model, richter.Probe(ids, y, mask=MASK), [at, seen])
    assert snap.value("read", "work") == pytest.approx(model.embed(ids)[MASK].mean(0).norm().item(), rel=1e-9)
    assert snap.value("ids", "embed") == 1  # of every position that counts, and of no other


def test_an_example_without_a_real_token_counts_nowhere() -> None:
    model, (x, y), mask = built(Latents), data(), MASK.clone()
    mask[5] = False
    at = Measure("read", lambda m: m.norm().item(), (READ,))
    some = torch.arange(N) != 5
    snap = richter.measure(model, richter.Probe(x, y, mask=mask), [at])
    cut = richter.measure(model, richter.Probe(x[some], y[some], mask=mask[some]), [at])
    for name in ("embed", "work"):
        assert snap.value("read", name) == pytest.approx(cut.value("read", name), rel=1e-9)


def test_features_of_masked_positions_are_zero() -> None:
    model, (x, y) = built(Latents), data()
    kernel = Measure("kernel", lambda Phi: Phi.norm().item(), (FEATURES,))
    snap = richter.measure(model, richter.Probe(x, y, mask=MASK), [kernel])
    assert snap.value("kernel", "embed") == pytest.approx((x * MASK[..., None]).norm().item(), rel=1e-9)
    latents = oracles.layer_io(model, x, "work")[1]
    assert snap.value("kernel", "work") == pytest.approx(latents.norm().item(), rel=1e-9)


def test_operators_leave_out_what_does_not_count() -> None:
    """By the definition: the Hessian of the squared error of real tokens."""
    model, (x, y) = built(Ids), data()
    ids, along = x[..., 0].abs().mul(10).long() % 7, draw(sum(p.numel() for p in model.parameters()), seed=6)

    def product(f: Tensor, Y: Tensor | None, places: list[Tensor], vectors: list[Tensor]) -> tuple[Tensor, ...]:
        assert Y is not None
        g = torch.autograd.grad(((f - Y) ** 2 + f.exp()).sum(), places, create_graph=True)
        return torch.autograd.grad(sum((a * v).sum() for a, v in zip(g, vectors, strict=True)), places)

    sharp = Measure("sharp", lambda H: float(along @ H(along)), (Operator("hessian", product),))
    snap = richter.measure(model, richter.Probe(ids, torch.where(MASK, y, -100), mask=MASK), [sharp])

    def loss(flat: Tensor) -> Tensor:
        state, start = {}, 0
        for name, p in model.named_parameters():
            state[name] = flat[start:start + p.numel()].view_as(p)
            start += p.numel()
        f = torch.func.functional_call(model, state, (ids,))[MASK]
        return ((f - nn.functional.one_hot(y[MASK], 3)) ** 2 + f.exp()).sum() / N

    H = torch.func.hessian(loss)(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert snap.value("sharp") == pytest.approx((along @ H @ along).item(), rel=1e-9)
