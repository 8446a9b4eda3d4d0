"""VGG-11 and VGG-19 for images of 32 x 32 pixels: convolutions of 3 x 3 with five poolings, and one linear read-out."""

from __future__ import annotations

import torch
from torch import nn

ELEVEN = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")
NINETEEN = (64, 64, "pool", 128, 128, "pool", *[256] * 4, "pool", *[512] * 4, "pool", *[512] * 4, "pool")


def vgg11(classes: int = 10, channels: int = 3, width: float = 1.0, seed: int = 0) -> nn.Sequential:
    """Eight convolutions, no normalisation. ``width`` multiplies the number of channels of every layer."""
    return _vgg(ELEVEN, classes, channels, width, seed, norm=False)


def vgg19(classes: int = 10, channels: int = 3, width: float = 1.0, seed: int = 0) -> nn.Sequential:
    """Sixteen convolutions, each followed by batch normalisation. ``width`` multiplies the number of channels."""
    return _vgg(NINETEEN, classes, channels, width, seed, norm=True)  # type: ignore[arg-type]  # unpacked lists


def _vgg(plan: tuple[int | str, ...], classes: int, channels: int, width: float, seed: int, norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for w in plan:
            if w == "pool":
                layers.append(nn.MaxPool2d(2))
                continue
            wide = max(1, round(int(w) * width))
            layers += [nn.Conv2d(channels, wide, 3, padding=1), *([nn.BatchNorm2d(wide)] if norm else []), nn.ReLU()]
            channels = wide
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes))
