"""Parameters, gradients and short trainings that the tests of the controls share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from richter.models import mlp

MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, betas=(0.8, 0.9), eps=1e-3)
SHAPES = ((4, 3), (4,), (2, 3, 2), ())


def draw(seed: int = 0, shapes: tuple[tuple[int, ...], ...] = SHAPES, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def parameters(seed: int = 0, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(t.to(device)) for t in draw(seed, dtype=dtype)]


def give(params: list[nn.Parameter], seed: int) -> list[Tensor]:
    gradients = draw(seed, dtype=params[0].dtype)
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.to(p.device)
    return gradients


def close(found: Any, expected: Any, tol: float = 1e-12) -> None:
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p.detach().cpu().double(), q.detach().cpu().double(), rtol=tol, atol=tol)


def same(found: Any, expected: Any) -> None:
    assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))


def small(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return mlp([5, 6, 6, 3], seed=seed).to(dtype)


def batch(seed: int = 0, n: int = 24, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype), torch.arange(n) % 3


def train(model: nn.Module, optimiser: torch.optim.Optimizer, steps: int, begin: int = 0,
          each: Callable[[int], object] = lambda step: None) -> None:
    for step in range(begin, begin + steps):
        x, y = batch(step, dtype=next(model.parameters()).dtype)
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        each(step)
        optimiser.step()


def richness_of(model: nn.Module) -> Callable[[], dict[str, float]]:
    """A stand-in for a measurement: it depends on the weights alone."""
    return lambda: {name: float(m.weight.detach().norm()) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
