"""ResNet-18 for images of 32 x 32 pixels: a convolution, eight blocks of two, and one linear read-out."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """The block x + f(x) with two convolutions in f; if sizes change, x passes a 1 x 1 convolution."""

    def __init__(self, d_in: int, d_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(d_in, d_out, 3, stride, 1, bias=False), nn.BatchNorm2d(d_out)
        self.conv2, self.norm2 = nn.Conv2d(d_out, d_out, 3, 1, 1, bias=False), nn.BatchNorm2d(d_out)
        same = stride == 1 and d_in == d_out
        self.skip: nn.Module = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(d_in, d_out, 1, stride, bias=False), nn.BatchNorm2d(d_out))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(h)) + self.skip(x))


class ResNet(nn.Module):
    """A convolution, residual blocks, the mean over positions, and a read-out."""

    def __init__(self, widths: tuple[int, ...], classes: int, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0])
        before = (widths[0], *widths[:-1])
        self.blocks = nn.Sequential(*(block for i, (a, b) in enumerate(zip(before, widths, strict=True))
                                      for block in (ResidualBlock(a, b, 2 if i else 1), ResidualBlock(b, b, 1))))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(torch.relu(self.norm(self.conv(x)))).mean((2, 3)))


def resnet18(classes: int = 10, channels: int = 3, width: float = 1.0, seed: int = 0) -> ResNet:
    """Make a ResNet-18. ``width`` multiplies the number of channels of every layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ResNet(tuple(max(1, round(w * width)) for w in (64, 128, 256, 512)), classes, channels)
