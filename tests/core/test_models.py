"""The papers' networks: as many parameters as they are known to have, the width that was asked for, drawn by their seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from richter.models import modular_transformer, resnet18, vgg11, vgg16, vgg19
from richter.tasks import modular_arithmetic


@pytest.mark.parametrize(("make", "convolutions", "parameters"), [  # as published for CIFAR-10
    (vgg11, 8, 9_225_610), (vgg16, 13, 14_728_266), (vgg19, 16, 20_040_522), (resnet18, 20, 11_173_962)])
def test_sizes_are_the_published_ones(make: Callable[..., nn.Module], convolutions: int, parameters: int) -> None:
    model = make()
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == convolutions
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("make", [vgg11, vgg16, vgg19, resnet18])
def test_width_classes_channels_and_seed(make: Callable[..., nn.Module]) -> None:
    x = torch.randn(4, 1, 32, 32)
    before = torch.get_rng_state()
    a, b, c = (make(classes=7, channels=1, width=1 / 16, seed=seed).eval() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert a(x).shape == (4, 7)
    assert torch.equal(a(x), b(x))
    assert not torch.equal(a(x), c(x))
    wide = make(classes=7, channels=1, width=1 / 8)
    assert sum(p.numel() for p in wide.parameters()) > 3 * sum(p.numel() for p in a.parameters())


def test_the_transformer_of_modular_arithmetic() -> None:
    data = modular_arithmetic(7, operation="divide")
    before = torch.get_rng_state()
    a, b, c = (modular_transformer(7, 32, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert a(data.tokens).shape == (len(data.tokens), 7)
    assert torch.equal(a(data.tokens), b(data.tokens))
    assert not torch.equal(a(data.tokens), c(data.tokens))
    d, depth = 96, 2  # by hand: embeddings, four matrices and two norms a block, a norm and the read-out
    block = 3 * d * d + 3 * d + d * d + d + 2 * (4 * d * d) + 5 * d + 4 * d
    assert sum(p.numel() for p in modular_transformer(23, d).parameters()) == (23 + 2 + 4) * d + depth * block + 2 * d + d * 23
    swapped = data.tokens[:, [2, 1, 0, 3]]
    assert not torch.allclose(a(data.tokens), a(swapped))  # positions count: a / b is not b / a
    for wrong in ({"p": 1}, {"d": 30}, {"heads": 0}, {"depth": 0}):
        with pytest.raises(ValueError, match="d divided by the number of heads"):
            modular_transformer(**{"p": 7, "d": 32} | wrong)


def test_vgg16_without_normalisation() -> None:
    with_norm, without = vgg16(width=1 / 16), vgg16(width=1 / 16, norm=False)
    assert any(isinstance(m, nn.BatchNorm2d) for m in with_norm)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in without)
    assert torch.equal(with_norm[0].weight, without[0].weight)
