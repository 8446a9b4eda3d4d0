"""VGG-11 for images of 32 x 32 pixels: eight convolutions, five poolings, one linear read-out, no normalisation."""

from __future__ import annotations

import torch
from torch import nn

WIDTHS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def vgg11(classes: int = 10, channels: int = 3, width: float = 1.0, seed: int = 0) -> nn.Sequential:
    """Make a VGG-11. ``width`` multiplies the number of channels of every layer."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for w in WIDTHS:
            if w == "pool":
                layers.append(nn.MaxPool2d(2))
            else:
                wide = max(1, round(int(w) * width))
                layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.ReLU()]
                channels = wide
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes))
