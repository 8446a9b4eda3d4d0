"""Random augmentations of images [n,c,h,w] that preserve their class: whole batches at once, on any device, with a generator.

    draw = torch.Generator().manual_seed(0)
    x = augment.flip(augment.crop(x, 4, draw), draw)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from richter.core import SelectionError

Images = Float[Tensor, "n c h w"]


def pad(x: Images, width: int, value: float = 0.0) -> Float[Tensor, "n c h2 w2"]:
    """Add a border of ``width`` pixels of one value; in standardised images 0 is the mean, not black."""
    _check(x)
    if width < 0:
        raise SelectionError(f"a border of {width} pixels was asked for; 0 or more are needed.")
    return F.pad(x, (width,) * 4, value=value)


def crop(x: Images, padding: int, draw: torch.Generator, value: float = 0.0) -> Images:
    """Cut a window of the images' own size at a random place of the padded image, independently for each image."""
    n, _, h, w = _check(x)
    padded = pad(x, padding, value)
    top, left = (torch.randint(2 * padding + 1, (n, 1), generator=draw, device=draw.device).to(x.device) for _ in range(2))
    rows = top + torch.arange(h, device=x.device)
    columns = left + torch.arange(w, device=x.device)
    each = torch.arange(n, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def flip(x: Images, draw: torch.Generator, share: float = 0.5) -> Images:
    """Mirror a random ``share`` of the images horizontally."""
    _check(x)
    if not 0 <= share <= 1:
        raise SelectionError(f"share={share}: between 0 and 1 is needed.")
    chosen = torch.rand(len(x), 1, 1, 1, generator=draw, device=draw.device).to(x.device) < share
    return torch.where(chosen, x.flip(3), x)


def jitter(x: Images, draw: torch.Generator, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0,
           limits: tuple[float, float] = (0.0, 1.0)) -> Images:
    """Multiply brightness, then contrast, then saturation by a random factor from [1 - a, 1 + a], independently for each image.

    ``limits`` are black and white: (0, 1) for raw images. Brightness scales the distance from black, contrast that from the
    image's mean grey, saturation that from each pixel's grey.
    """
    n, c, _, _ = _check(x)
    low, high = limits
    for name, amount in (("brightness", brightness), ("contrast", contrast), ("saturation", saturation)):
        if not 0 <= amount <= 1:
            raise SelectionError(f"{name}={amount}: between 0 and 1 is needed, so that factors are not negative.")
    if saturation and c != 3:
        raise SelectionError(f"saturation={saturation}: the images have {c} channels, and only colours (3) have a saturation.")
    slack = 1e-3 * (high - low)
    if n and not bool((x.amin() >= low - slack) & (x.amax() <= high + slack)):
        raise SelectionError(f"values from {x.amin().item():.3g} to {x.amax().item():.3g} are outside of limits={limits}: black "
                             f"is not where it is thought to be. Jitter raw images (standardise=False), or give their black and "
                             f"white.")
    drawn = 2 * torch.rand(3, n, 1, 1, 1, generator=draw, device=draw.device).to(x) - 1  # between -1 and 1
    b, k, s = (1 + a * u for a, u in zip((brightness, contrast, saturation), drawn, strict=True))
    x = (low + b * (x - low)).clamp(low, high)
    middle = _grey(x).mean((1, 2, 3), keepdim=True)
    x = (middle + k * (x - middle)).clamp(low, high)
    return (_grey(x) + s * (x - _grey(x))).clamp(low, high) if saturation else x


def _grey(x: Images) -> Float[Tensor, "n 1 h w"]:
    """Luma of colour images (weights of ITU-R BT.601), the mean for other channels."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    return (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)


def _check(x: Tensor) -> tuple[int, int, int, int]:
    if x.ndim != 4 or not x.dtype.is_floating_point:
        raise SelectionError(f"images [n,c,h,w] of real numbers are needed, and x is {tuple(x.shape)} of {x.dtype}. Load with "
                             f"flat=False.")
    n, c, h, w = x.shape
    return n, c, h, w
