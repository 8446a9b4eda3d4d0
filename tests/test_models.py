"""The papers' networks: as many parameters as they are known to have, the width that was asked for, drawn by their seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from richter.models import resnet18, vgg11, vgg19


@pytest.mark.parametrize(("make", "convolutions", "parameters"), [
    (vgg11, 8, 9_225_610), (vgg19, 16, 20_040_522), (resnet18, 20, 11_173_962)])  # as published for CIFAR-10
def test_sizes_are_the_published_ones(make: Callable[..., nn.Module], convolutions: int, parameters: int) -> None:
    model = make()
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == convolutions
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("make", [vgg11, vgg19, resnet18])
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
