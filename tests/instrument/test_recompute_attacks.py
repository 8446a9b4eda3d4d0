"""Blocks that do more than compute, and are run again: the same numbers, or an error."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from test_recompute import Block, Counting, Deep, X, gradients, weighed
from torch import Tensor, nn

from richter.core import CaptureError
from richter.instrument.capture import forward, quiet, state_of
from richter.instrument.capture.recompute import alike, likeness


class Late(Block):
    """Remembers how often it was called, and does something with it that no map reads."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x) * torch.sin(x + type(self).calls)


class Averaging(Block):
    """Changes what it has from outside its arguments (a running mean), by little."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(1 + 1e-4)
        return super().forward(x) * self.mean


class Overwriting(Block):
    """No model that is trained: what its backward pass needs is gone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(super().forward(x)).mul_(2).sin()


class Exhausted(Block):
    """Has something for one call."""

    def __init__(self) -> None:
        super().__init__()
        self.left = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.left.pop()


class Differentiating(Block):
    """Looks at its own derivative."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        return super().forward(x) + torch.autograd.grad(super().forward(y).sum(), y)[0]


@pytest.mark.parametrize(("block", "said"), [
    (Late, "module 'blocks.1' cannot be run again: it computes something else than the first time"),
    (Averaging, "module 'blocks.1' cannot be run again: it computes something else than the first time"),
    (Overwriting, "module 'blocks.1' cannot be run again: it changes in place what its own backward pass needs"),
    (Differentiating, "module 'blocks.0' cannot be run again: it differentiates inside its forward pass")])
def test_a_block_that_keeps_other_numbers_is_an_error(block: type[Block], said: str) -> None:
    model = Deep(2, block)
    with quiet(model), pytest.raises(CaptureError, match=said):
        gradients(forward(model, X.clone(), state_of(model), anew=["blocks.0", "blocks.1"]), 0)


def test_a_block_is_run_again_with_the_attributes_that_it_had() -> None:
    model = Deep(2, Exhausted)
    with quiet(model):
        plain, again = (forward(model, X.clone(), state_of(model), anew=names) for names in ([], ["blocks.0", "blocks.1"]))
        for expected, got in zip(gradients(plain, 0), gradients(again, 0), strict=True):
            assert torch.equal(got, expected)
        assert model.blocks[0].left == [1.0]


def test_a_block_that_differs_is_an_error_where_no_maps_are_recorded() -> None:
    model = Deep(2, Counting)
    with quiet(model):
        run = forward(model, X, state_of(model), record=False, anew=["blocks.0", "blocks.1"])
        with pytest.raises(CaptureError, match="it computes something else than the first time"):
            gradients(run, 0)


def test_weights_that_a_hook_computes_are_those_of_the_pass() -> None:
    """Two passes with other weights, before either goes backward."""
    class Attention(Block):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.utils.weight_norm(nn.MultiheadAttention(6, 2, batch_first=True), "in_proj_weight")

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    with pytest.warns(FutureWarning):
        model = Deep(1, Attention)
    other = {k: v + 0.1 * torch.randn_like(v) for k, v in model.state_dict().items()}
    with quiet(model):
        plain, first, second = (forward(model, X, state_of(model, values), record=False, anew=names) for values, names in (
            (None, []), (None, ["blocks.0.attention"]), (other, ["blocks.0.attention"])))
        gradients(second, 0)
        for expected, got in zip(gradients(plain, 0), gradients(first, 0), strict=True):
            assert torch.equal(got, expected)


class Among(nn.Module):
    """Hands a list from block to block, which each adds to."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([block() for _ in range(3)]), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for block in self.blocks:
            x = block(x, seen=seen)
        assert len(seen) == 3
        return self.head(x[:, -1])


class Adding(Block):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x)
        return super().forward(x) * torch.cos(sum(seen))


class Failing(Adding):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        raise ValueError("broken", super().forward(x, seen))


class Caught(nn.Module):
    """A block fails inside it, which does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = Failing(), Adding()

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        try:
            return self.inner(x, seen)
        except ValueError:
            return self.other(x.sin(), seen[:-1]) * x.cos()


class Balanced(Block):
    """Counts how deep it is, and is not when it has ended."""

    depth = 0

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x)
        type(self).depth += 1
        x = self.down(x[..., :1] * self.up(x * type(self).depth))
        type(self).depth -= 1
        return x


@pytest.mark.parametrize(("block", "inside"), [(Adding, ""), (Caught, ".inner"), (Balanced, "")])
@pytest.mark.parametrize("record", [True, False])
def test_blocks_that_do_more_than_compute(block: type[nn.Module], inside: str, record: bool) -> None:
    model = Among(block)
    with quiet(model):
        state = state_of(model)
        usual, again = (forward(model, X, state, record=record, anew=some)
                        for some in ((), [f"blocks.{i}{inside}" for i in range(3)]))
        for seed in (0, 1):
            assert all(map(torch.equal, gradients(usual, seed), gradients(again, seed)))


class Copies(Deep):
    """Goes through copies of its blocks too, which have the same hooks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + copy.deepcopy(block)(x).detach()
        return self.head(x[:, -1])


@pytest.mark.parametrize("record", [True, False])
def test_a_model_may_copy_its_blocks(record: bool) -> None:
    model = Copies(3, Block)
    with quiet(model):
        state = state_of(model)
        usual, again = (forward(model, X, state, record=record, anew=some) for some in ((), [f"blocks.{i}" for i in range(3)]))
        assert all(map(torch.equal, gradients(usual, 0), gradients(again, 0)))
    assert weighed(model).kept > 0
    gc.collect()
    assert not model.blocks[0]._forward_hooks


def test_an_lstm_keeps_bytes_that_nobody_wrote() -> None:
    class Recurrent(Block):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 6, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.lstm(x)[0])

    model = Deep(2, Recurrent)
    with quiet(model):
        state = state_of(model)
        usual, again = (forward(model, X, state, record=False, anew=some) for some in ((), ["blocks.0", "blocks.1"]))
        assert all(map(torch.equal, gradients(usual, 0), gradients(again, 0)))


def test_copies_of_weights_are_let_go_after_each_backward_pass() -> None:
    made: list[weakref.ref[Tensor]] = []

    class Copying(Block):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.up.weight.clone()
            made.append(weakref.ref(weight))
            return x + self.down(nn.functional.linear(x, weight))

    model = Deep(2, Copying)
    with quiet(model):
        run = forward(model, X, state_of(model), anew=["blocks.0", "blocks.1"])
        made.clear()
        for seed in range(3):
            gradients(run, seed)
        assert len(made) == 6
        assert all(ref() is None for ref in made[:-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_likeness(dtype: torch.dtype) -> None:
    """One number of many that differs is seen, and so is another order; not how a tensor lies in memory, nor infinities."""
    t = torch.randn(7, 5000, generator=torch.Generator().manual_seed(0)).mul(3).round().to(dtype)
    other = t.clone()
    other[3, 777] = other[3, 777] == 0
    assert alike([likeness(t)], [likeness(t.clone())])
    assert not alike([likeness(t)], [likeness(other)])
    assert not alike([likeness(t)], [likeness(t.flip(0))])
    assert not alike([likeness(t)], [likeness(t.reshape(5000, 7))])
    assert alike([likeness(t[:1].expand(7, 5000))], [likeness(t[:1].clone().expand(7, 5000))])
    assert alike([likeness(t[:, ::2])], [likeness(t.clone()[:, ::2])])
    if dtype.is_floating_point:
        endless, others = t.clone(), other.clone()
        endless[0, :9], others[0, :9] = -torch.inf, -torch.inf
        assert alike([likeness(endless)], [likeness(endless.clone())])
        assert not alike([likeness(endless)], [likeness(t)])


def test_a_block_that_fails_inside_another_is_weighed_as_what_it_is() -> None:
    class Guarded(Block):
        def __init__(self) -> None:
            super().__init__()
            self.wrong = nn.Sequential(nn.Linear(6, 6), nn.Linear(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(RuntimeError):
                return self.wrong(x)
            return super().forward(x)

    assert weighed(Deep(12, Guarded)).blocks == tuple(sorted(f"blocks.{i}" for i in range(12)))


def test_a_block_whose_input_is_written_into_after_all_blocks_is_kept() -> None:
    class Doubling(Deep):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks[:-1]:
                x = block(x)
            y = self.blocks[-1](x)
            return self.head((y + x.mul_(2))[:, -1])

    class Scaling(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 1.5)

    assert weighed(Doubling(4, Scaling)).blocks == ("blocks.0", "blocks.1", "blocks.2")
