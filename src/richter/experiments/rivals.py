"""Rivals of claims about correlations: shuffled labels, random movements, and K with random eigenvectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from richter.kernels import ptk_covariance
from richter.linalg import haar

Matrix = NDArray[np.float64]


def shuffled(y: Tensor, seed: int) -> Tensor:
    """Labels in a random order."""
    return y[torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))]


def milestones(last: int, count: int) -> set[int]:
    """Return the first step, the last, and steps between them that are evenly spaced in their logarithm."""
    return {0, last} | ({round(v) for v in np.geomspace(1, last, count)} if last else set())


def weight(model: nn.Module, layer: str) -> Matrix:
    """Weight matrix W [d_out,d_in] of a dense layer or, by patches, of a convolution."""
    module: Any = model.get_submodule(layer)
    return np.array(module.weight.detach().flatten(1).double().cpu().numpy())


def rotated(K: Matrix, draw: np.random.Generator) -> Matrix:
    """Q with the spectrum of K and random eigenvectors. [nfa, Sec. 2]"""
    U = haar(len(K), draw)
    return (U * np.linalg.eigvalsh(K)) @ U.T


def centred_correlation(moved: Matrix, K: Matrix) -> float:
    """cos(D^T D, D^T K D) of a movement D [d_out,d_in], computed from G = D D^T, which is the smaller matrix in a
    convolution."""
    G = moved @ moved.T
    KG = K @ G
    return float(np.sum(G * KG) / (np.linalg.norm(G) * np.sqrt(np.sum(KG * KG.T))))


class Rivals:
    """Chance levels of the centred correlation of layers: ``rotated`` with another K of the same spectrum, ``gaussian`` with a
    movement of independent entries. A movement of few directions is correlated with any K.

    ``covariance(layer)``: K of a layer on the probe, if not that of all outputs at once."""

    def __init__(self, model: nn.Module, x: Tensor, layers: Sequence[str], seed: int,
                 covariance: Callable[[str], Matrix] | None = None) -> None:
        self.model, self.layers, self.draw = model, layers, np.random.default_rng((seed, 1))
        self.covariance = covariance or (lambda layer: np.asarray(ptk_covariance(model, x, layer), dtype=float))
        self.initial = {layer: self.weight(layer) for layer in layers}
        self.rows = list[list[tuple[float, float]]]()

    def weight(self, layer: str) -> Matrix:
        """Weight of a layer."""
        return weight(self.model, layer)

    def at(self, step: int) -> None:
        """Append the rivals at a step. Before the first step nothing has moved, and the numbers are NaN."""
        self.rows.append([self._by_chance(layer) if step else (np.nan, np.nan) for layer in self.layers])

    def _by_chance(self, layer: str) -> tuple[float, float]:
        """Centred correlations by chance: of the layer's movement with a rotated covariance, and of a Gaussian movement with its
        own."""
        K, moved = self.covariance(layer), self.weight(layer) - self.initial[layer]
        Q, Z = rotated(K, self.draw), self.draw.standard_normal(moved.shape)
        return centred_correlation(moved, Q), centred_correlation(Z, K)

    def arrays(self) -> dict[str, Matrix]:
        """Return the recorded rivals by name, each [steps, layers]."""
        values = np.array(self.rows)
        return {"rotated": values[..., 0], "gaussian": values[..., 1]}
