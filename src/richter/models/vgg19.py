"""VGG-19 for images of 32 x 32 pixels: sixteen convolutions with batch normalisation, five poolings, one linear read-out."""

from __future__ import annotations

import torch
from torch import nn

STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # channels, convolutions; a pooling after each


def vgg19(classes: int = 10, channels: int = 3, width: float = 1.0, seed: int = 0) -> nn.Sequential:
    """Make a VGG-19. ``width`` multiplies the number of channels of every layer."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for w, convolutions in STAGES:
            wide = max(1, round(w * width))
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU()]
                channels = wide
            layers.append(nn.MaxPool2d(2))
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes))
