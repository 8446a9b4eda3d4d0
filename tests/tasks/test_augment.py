"""Augmentation does what it says, on any device."""

from __future__ import annotations

import pytest
import torch

from richter.core import SelectionError
from richter.tasks import augment


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_crop_takes_windows(device: str) -> None:
    x = torch.rand(40, 2, 5, 6, generator=draws()).to(device)
    found = augment.crop(x, 2, draws(1), value=-1.0)
    padded = augment.pad(x, 2, value=-1.0)
    assert padded.shape == (40, 2, 9, 10)
    assert (padded[:, :, 0] == -1).all()
    places = set()
    for image, whole in zip(found, padded, strict=True):
        at = [(i, j) for i in range(5) for j in range(5) if torch.equal(image, whole[:, i:i + 5, j:j + 6])]
        assert at
        places.add(at[0])
    assert len(places) > 12  # of 25
    assert found.device == x.device
    assert torch.equal(found, augment.crop(x, 2, draws(1), value=-1.0))
    assert not torch.equal(found, augment.crop(x, 2, draws(2), value=-1.0))
    assert torch.equal(augment.crop(x, 0, draws()), x)


def test_flip_mirrors_some(device: str) -> None:
    x = torch.rand(400, 1, 2, 3, generator=draws()).to(device)
    found = augment.flip(x, draws(), share=0.25)
    mirrored = (found == x.flip(3)).flatten(1).all(1)
    same = (found == x).flatten(1).all(1)
    assert bool((mirrored ^ same).all())
    assert 60 < int(mirrored.sum()) < 140
    assert torch.equal(augment.flip(x, draws(), share=1.0), x.flip(3))
    assert torch.equal(augment.flip(x, draws(), share=0.0), x)


def test_jitter_scales_what_it_says(device: str) -> None:
    x = (0.4 + 0.2 * torch.rand(30, 3, 4, 4, generator=draws(), dtype=torch.float64)).to(device)  # nothing is cut off
    grey = (x * torch.tensor([0.299, 0.587, 0.114], dtype=x.dtype, device=x.device)[:, None, None]).sum(1, keepdim=True)
    middle = grey.mean((1, 2, 3), keepdim=True)
    for name, origin in (("brightness", torch.zeros_like(x)), ("contrast", middle), ("saturation", grey)):
        found = augment.jitter(x, draws(), **{name: 0.3})
        factor = ((found - origin) * (x - origin)).sum((1, 2, 3)) / ((x - origin) ** 2).sum((1, 2, 3))
        torch.testing.assert_close(found, origin + factor[:, None, None, None] * (x - origin))
        assert factor.min() >= 0.7
        assert factor.max() <= 1.3
        assert factor.std() > 0.1
    torch.testing.assert_close(augment.jitter(x, draws()), x)
    assert augment.jitter(x, draws(), brightness=1.0).max() <= 1
    shifted = augment.jitter(x - 0.5, draws(), brightness=0.3, limits=(-0.5, 0.5))
    torch.testing.assert_close(shifted + 0.5, augment.jitter(x, draws(), brightness=0.3))


def test_augmentation_refuses(device: str) -> None:
    x = torch.rand(3, 1, 4, 4, device=device)
    for call, message in ((lambda: augment.crop(x[0], 1, draws()), r"x is \(1, 4, 4\)"),
                          (lambda: augment.flip((x * 255).byte(), draws()), "real numbers"),
                          (lambda: augment.pad(x, -1), "-1 pixels"), (lambda: augment.flip(x, draws(), 2), "share=2"),
                          (lambda: augment.jitter(x, draws(), brightness=2), "brightness=2"),
                          (lambda: augment.jitter(x, draws(), saturation=0.5), "have 1 channels"),
                          (lambda: augment.jitter(x - 3, draws(), 0.5), "outside of limits")):
        with pytest.raises(SelectionError, match=message):
            call()
