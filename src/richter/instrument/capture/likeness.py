"""Whether tensors that are computed a second time are those of the first, which are let go: a few numbers of each are kept."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

AT_ONCE = 2 ** 14  # numbers that are looked at together, in double precision
WITHIN = 100  # roundings, on devices that add up in any order


class Likeness(NamedTuple):
    """What is remembered of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    numbers: Tensor | None  # a random combination of its entries, and their norm squared; None where they are not looked at


def likeness(t: Tensor, stays: bool = False) -> Likeness:
    """``stays``: it is known to have the same numbers the second time."""
    return Likeness(t.shape, t.dtype, None if stays or _scratch(t) else _numbers(t))


def _scratch(t: Tensor) -> bool:
    """Bytes that a kernel keeps for itself (an LSTM of oneDNN or cuDNN), and seeds of fused attention on a GPU that draws
    nothing: parts of them are never written."""
    seed = t.device.type != "cpu" and t.numel() <= 2 and not (t.dtype.is_floating_point or t.dtype.is_complex)
    return t.dtype in (torch.uint8, torch.uint64) or seed


def alike(first: list[Likeness], second: list[Likeness]) -> bool:
    """Are these the same tensors, one after another, up to rounding?"""
    if [like[:2] for like in first] != [like[:2] for like in second]:
        return False
    if [like.numbers is None for like in first] != [like.numbers is None for like in second]:
        return False
    a, b = (_together(likes) for likes in (first, second))
    within = torch.tensor([_tolerance(like.dtype) for like in first if like.numbers is not None], dtype=torch.float64)
    return bool(((a[:, 0] == b[:, 0]) | ((a[:, 0] - b[:, 0]).abs() <= within * a[:, 1].sqrt())).all())


def _together(likes: list[Likeness]) -> Tensor:
    numbers = [like.numbers.cpu() for like in likes if like.numbers is not None]
    return torch.stack(numbers) if numbers else torch.zeros(0, 2, dtype=torch.float64)


def _tolerance(dtype: torch.dtype) -> float:
    """Of a difference, relative to the norm. What is rounded coarsely is rounded otherwise in few places."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    eps, single = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    return WITHIN * eps if eps <= single else math.sqrt(single)


@torch.no_grad()
def _numbers(t: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        t = t.detach()
        if t.layout is not torch.strided:
            t = t.coalesce().values() if t.layout is torch.sparse_coo else t.values()
        if t.is_complex():
            t = torch.view_as_real(t.resolve_conj())
        flat = _as_it_lies(t)
        if t.dtype in (torch.float32, torch.float64) and t.device.type != "mps":  # which has no float64
            numbers = _read(flat)
            if bool(numbers.isfinite().all()):
                return numbers
        parts = [_read(_tamed(part)) * (1 + 1 / (i + 1)) for i, part in enumerate(flat.split(AT_ONCE))]
        return torch.stack(parts).sum(0) if parts else torch.zeros(2, dtype=torch.float64)


def _tamed(part: Tensor) -> Tensor:
    """In double precision, with numbers for what is none."""
    part = (part.cpu() if part.device.type == "mps" else part).to(torch.float64)
    return part.nan_to_num(nan=math.pi, posinf=1e100, neginf=-1e100).clamp(-1e100, 1e100)


def _read(flat: Tensor) -> Tensor:
    """Two numbers of these, without a copy of them."""
    cut = len(flat) // AT_ONCE * AT_ONCE
    drawn = _drawn(flat.device, flat.dtype)
    rest = flat[cut:].dot(drawn[:len(flat) - cut]).double()
    sums = (flat[:cut].view(-1, AT_ONCE) @ drawn).double()
    places = 1 + 1 / torch.arange(2, len(sums) + 2, dtype=torch.float64, device=flat.device)
    return torch.stack([rest + sums.dot(places), torch.linalg.vector_norm(flat).double() ** 2])


def _as_it_lies(t: Tensor) -> Tensor:
    """Its entries in the order in which they lie in memory, so that nothing is copied; those that are repeated once."""
    strides = t.stride()
    t = t.permute(sorted(range(t.dim()), key=lambda axis: -strides[axis]))
    for axis in range(t.dim()):
        t = t.narrow(axis, 0, min(t.shape[axis], 1)) if t.stride(axis) == 0 else t
    return t.reshape(-1)


@functools.cache
def _drawn(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(AT_ONCE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
