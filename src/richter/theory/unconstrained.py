"""The unconstrained feature model: only features and a last layer, and classes collapse.  [layerwise, Sec. 3.5.2]

    outputs = H W,   loss = |H W - Y|^2 / 2,   H [n, p] one row per example, W [p, c], Y [n, c] the one-hot labels.

It is a linear network that reads one-hot examples: ``LinearNetwork(H, W, Y)``, whose modes are the classes, with singular values
sqrt(n_c). From small weights H^T H = W W^T (nearly), and every example of class c ends at n_c^(-1/4) r_c with orthonormal r_c.
There is no variance within classes, and for balanced classes the means form a simplex. The model uses only the labels of the
data. """

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike
from richter.theory.arrays import Times, like, normal, read, times_from_zero
from richter.theory.flows import Method
from richter.theory.frame import Theory
from richter.theory.two_layers import LinearNetwork, simulate_layers


@dataclass(frozen=True)
class UnconstrainedFeatures:
    """Gradient flow from features ``H0`` [n, p] and a last layer ``W0`` [p, c] to the one-hot ``labels`` [n], ids 0 to c - 1.

    ``rate`` is the 2 of ``LinearNetwork``; tests perturb it.

    >>> model = UnconstrainedFeatures.drawn(labels, width=20, scale=1e-3)
    >>> richter.measures.collapse.analyse(model.features([30.0])[0], labels).nc1
    """

    labels: ArrayLike = field(repr=False)
    H0: ArrayLike = field(repr=False)
    W0: ArrayLike = field(repr=False)
    rate: float = field(default=2.0, kw_only=True)

    def __post_init__(self) -> None:
        self.network  # noqa: B018  raises an error if the arrays are invalid

    @classmethod
    def drawn(cls, labels: ArrayLike, width: int, scale: float, seed: int = 0) -> UnconstrainedFeatures:
        """Draw features and weights from N(0, ``scale``^2), determined by the seed and the width."""
        start = LinearNetwork.drawn(_one_hot(labels), width, scale, seed)
        return cls(labels, *(like(torch.as_tensor(w), labels) for w in (start.W1, start.W2)))

    def balanced(self) -> UnconstrainedFeatures:
        """Return the model with the same outputs and H^T H = W W^T, whose features have a closed form."""
        even = self.network.balanced()
        return UnconstrainedFeatures(self.labels, even.W1, even.W2, rate=self.rate)

    @cached_property
    def network(self) -> LinearNetwork:
        """The equivalent linear network."""
        Y = _one_hot(self.labels)
        return LinearNetwork(self.H0, self.W0, Y, rate=self.rate)

    def predict(self, t: Times) -> tuple[Array, Array]:
        """Return (outputs H W [t, n, c], H H^T [t, n, n]), in closed form if ``network.solution`` has one."""
        H, W = (torch.as_tensor(z) for z in self.network.layers(t))
        return like(H @ W, self.H0), like(H @ H.mT, self.H0)

    def features(self, t: Times) -> Array:
        """Return H [t, n, p], up to a rotation of its p directions, which changes neither outputs nor any measure of collapse."""
        return self.network.layers(t)[0]

    @cached_property
    def collapsed(self) -> Array:
        """Return n_c^(-1/4) e_c for every example of class c [n, c]: the limit of the features as the initial weights go to zero,
        up to a rotation."""
        Y = _one_hot(self.labels)
        return like(Y * Y.sum(0).pow(-0.25), self.H0)

    def simulate(self, t: Times, method: Method = "flow", lr: float | None = None) -> tuple[Array, Array]:
        """Return (outputs [t, n, c], H H^T [t, n, n]) by integrating the flow of H and W, or by gradient descent with steps of
        ``lr``."""
        return simulate(self.labels, self.H0, self.W0, t, method=method, lr=lr)


def _one_hot(labels: ArrayLike) -> Float[Tensor, "n c"]:
    """One-hot rows of class ids."""
    (y,) = read(labels=(labels, "n"))
    ids: Int[Tensor, " n"] = y.long()
    classes = int(ids.max()) + 1
    if (y != ids).any() or (ids < 0).any() or len(ids.unique()) < classes:
        raise SelectionError(f"labels {sorted(set(y.tolist()))[:5]} ...: class ids 0, 1, 2, ... are needed, each once at least.")
    return torch.nn.functional.one_hot(ids, classes).to(y)


def predict(labels: ArrayLike, H0: ArrayLike, W0: ArrayLike, t: Times, *, rate: float = 2.0) -> tuple[Array, Array]:
    """Return (outputs H W [t, n, c], H H^T [t, n, n]) of ``UnconstrainedFeatures``."""
    return UnconstrainedFeatures(labels, H0, W0, rate=rate).predict(t)


def simulate(labels: ArrayLike, H0: ArrayLike, W0: ArrayLike, t: Times, *, method: Method = "flow", lr: float | None = None
             ) -> tuple[Array, Array]:
    """Return both by integrating H' = (Y - H W) W^T and W' = H^T (Y - H W), or by gradient descent with steps of ``lr``."""
    H, W, y = read(H0=(H0, "n p"), W0=(W0, "p c"), labels=(labels, "n"))
    Y = torch.eye(W.shape[1], dtype=H.dtype, device=H.device)[y.long()]
    states = simulate_layers([H, W], Y, times_from_zero(t), None, method, lr)
    outputs, grams = (torch.stack(z) for z in zip(*((h @ w, h @ h.T) for h, w in states), strict=True))
    return like(outputs, H0), like(grams, H0)


def _cases() -> list[tuple[Any, ...]]:
    """Balanced and unbalanced classes, with more and with fewer features than classes."""
    cases = []
    for labels, width in (([0, 1, 2] * 3, 5), ([0, 0, 0, 0, 1, 1, 2], 4), ([0, 1, 2, 0, 1, 2], 2)):
        y = np.array(labels)
        start = LinearNetwork(0.3 * normal(len(y), width), 0.3 * normal(width, 3, seed=1), np.eye(3)[y]).balanced()
        cases.append((y, start.W1, start.W2, [0.0, 0.5, 2.0, 8.0]))
    return cases


THEORIES = (
    Theory("unconstrained.features", ref=Ref("layerwise", "Sec. 3.5.2"),
           title="features that are free parameters collapse: outputs and the features' kernel at all times",
           predict=predict, simulate=simulate, cases=_cases, tolerance=1e-8, perturb={"rate": 2.001}),
)
