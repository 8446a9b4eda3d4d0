"""Kernels, metrics and data that the tests of the learners share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from richter.learners import NNGP, NTK, Exponential, Gaussian, Laplace, LaplaceL1, Quadratic

KERNELS: list[Any] = [
    Laplace(1.7), LaplaceL1(2.3), Gaussian(1.4), Quadratic(), Exponential(1.9), NTK(), NTK(3, weight_var=1.6, bias_var=0.2),
    NTK(2, "erf", 1.5, 0.1), NNGP(2), NNGP(1, "erf", bias_var=0.3)]
METRICS = ("identity", "full", "diagonal")
NAMED: dict[str, Any] = {"ids": repr}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng((seed, *shape)).standard_normal(shape))


def metric(kind: str, d: int) -> Tensor | None:
    """A positive definite metric of unequal eigenvalues."""
    B = normal(d, d + 1, seed=3)
    return None if kind == "identity" else B @ B.T / d if kind == "full" else 0.2 + torch.arange(d).double()


def full(M: Tensor | None, d: int) -> Tensor:
    return torch.eye(d, dtype=torch.float64) if M is None else M.diag() if M.dim() == 1 else M


def assert_close(a: Any, b: Any, tolerance: float) -> None:
    """|a - b| <= tolerance |b|, in the Frobenius norm; the shapes are the same."""
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    assert a.shape == b.shape
    error = ((a - b).norm() / b.norm()).item() if b.norm() > 0 else a.norm().item()
    assert error <= tolerance, f"relative error {error:.2g}"


def apart(a: Any, b: Any) -> float:
    """|a - b| / |b|."""
    a, b = torch.as_tensor(np.asarray(a)).double(), torch.as_tensor(np.asarray(b)).double()
    return ((a - b).norm() / b.norm()).item()


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor made."""

    most = 0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = f(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor):
                self.most = max(self.most, t.untyped_storage().nbytes())
        return out


def table(n: int = 60, d: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """X with columns of unequal scale, a target of the first two, and three classes."""
    X = np.random.default_rng(seed).standard_normal((n, d)) * (1 + np.arange(d))
    y = np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.1 * np.random.default_rng(seed + 1).standard_normal(n)
    return X, y, np.digitize(y, [-0.5, 0.5])


def losses(model: Any) -> list[float]:
    return [h["loss"] for h in model.history_]


BASE: dict[str, Any] = {"kernel": Laplace(3.0), "ridge": 0.1, "iterations": 2, "early_stopping": False, "keep": "all"}
