"""Fully connected networks whose tangent kernels are recorded during training: full-batch descent in float64. Kernels are
computed in closed form from layer inputs and backward signals.

    f(x) = W_L phi(... phi(W_1 x / sqrt(D)) / sqrt(N) ...),   W ~ N(0, sigma^2),   K = sum_l K_l,
    K_l^cc' = (B_l^c B_l^c'^T) o (H_l H_l^T) / fan_in_l,   H_l the inputs of layer l, B_l^c = df_c / dz_l.  [rapid, Sec. 12]

Training moves W_1 only within the span of the inputs. So the first layer is kept as its output, Z = X W_1^T / sqrt(D), and is
moved by the Gram matrix of the inputs: the same numbers, several times sooner when there are fewer examples than inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from richter import tasks

IMAGES = {"mnist": tasks.mnist, "fashion_mnist": tasks.fashion_mnist}


def images(name: str, n: int, seed: int) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n 10"]]:
    """n images as vectors, standardised over all pixels, equally many of each class, and one-hot labels."""
    data = IMAGES[name](n, 10, seed=seed, flat=True, dtype=torch.float64)
    return data.x, torch.nn.functional.one_hot(data.y, 10).double()


@dataclass
class EvolvingNetwork:
    """Bias-free network with the Gram matrix of its inputs. ``relu=False`` makes it linear."""

    gram: Float[Tensor, "n n"]  # X X^T / D
    first: Float[Tensor, "n d"]  # X W_1^T / sqrt(D)
    weights: list[Tensor]  # "o i", of the other layers
    relu: bool = True

    @classmethod
    def drawn(cls, x: Float[Tensor, "n d"], widths: Sequence[int], sigma: float, seed: int, relu: bool = True) -> EvolvingNetwork:
        """Make a network with random weights of standard deviation sigma on inputs x."""
        draw = torch.Generator().manual_seed(seed)
        shapes = list(zip(widths[1:], [x.shape[1], *widths[1:-1]], strict=True))
        W = [sigma * torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
        return cls(x @ x.T / x.shape[1], x @ W[0].T / math.sqrt(x.shape[1]), W[1:], relu)

    def layers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the inputs of each layer after the first, with f as last entry, and the slopes of the activations there."""
        reads, slopes, z = [], [], self.first
        for W in self.weights:
            slope = (z > 0).to(z.dtype) if self.relu else torch.ones_like(z)
            slopes.append(slope)
            reads.append(z * slope)
            z = reads[-1] @ W.T / math.sqrt(W.shape[1])
        return [*reads, z], slopes

    @property
    def f(self) -> Float[Tensor, "n k"]:
        """Outputs of the network."""
        return self.layers()[0][-1]

    def step(self, y: Float[Tensor, "n k"], lr: float) -> float:
        """Do one step of descent on sum (f - y)^2 / 2; return sum (f - y)^2 before it."""
        (*reads, f), slopes = self.layers()
        back = f - y
        loss = back.square().sum().item()
        for i in reversed(range(len(self.weights))):
            W, scale = self.weights[i], 1 / math.sqrt(self.weights[i].shape[1])
            below = (back @ W) * (slopes[i] * scale)
            W -= (lr * scale) * (back.T @ reads[i])
            back = below
        self.first -= lr * (self.gram @ back)
        return loss

    def factors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the Gram matrix of each layer's inputs over its fan-in, and its backward signals B "k n d", from the first
        layer on."""
        (*reads, f), slopes = self.layers()
        k = f.shape[1]
        back = torch.eye(k, dtype=f.dtype)[:, None].expand(k, len(f), k)
        B = [back]
        for W, slope in zip(reversed(self.weights), reversed(slopes), strict=True):
            back = (back @ W) * (slope / math.sqrt(W.shape[1]))
            B.insert(0, back)
        return [self.gram, *(h @ h.T / h.shape[1] for h in reads)], B

    def layer_kernels(self) -> list[Float[Tensor, "k n n"]]:
        """Kernels K_l^cc of each layer."""
        return [H * (B @ B.mT) for H, B in zip(*self.factors(), strict=True)]

    def sub_kernels(self) -> Float[Tensor, "k n n"]:
        """Kernels K^cc, summed over layers."""
        return torch.stack(self.layer_kernels()).sum(0)

    def kernel(self) -> Float[Tensor, "n k n k"]:
        """Tangent kernel over all pairs of outputs."""
        n, k = len(self.first), self.weights[-1].shape[0]
        K = torch.zeros(n, k, n, k, dtype=self.first.dtype)
        for H, B in zip(*self.factors(), strict=True):
            flat = B.transpose(0, 1).reshape(n * k, -1)
            K += (flat @ flat.T).view(n, k, n, k) * H[:, None, :, None]
        return K


def descend(network: EvolvingNetwork, y: Float[Tensor, "n k"], lr: float, steps: int, due: Container[int],
            look: Callable[[int, float], None], until: float = 0.0) -> int:
    """Train by full-batch descent; return the number of steps. ``look(step, loss)`` is called at the steps in ``due`` and at
    the end. Training ends early once the loss is below ``until``."""
    for step in range(steps + 1):
        loss = (network.f - y).square().sum().item() if step in due or step == steps or (until and step % 50 == 0) else math.nan
        if step == steps or loss < until:
            look(step, loss)
            return step
        if step in due:
            look(step, loss)
        network.step(y, lr)
    return steps


def alignments(K: Float[Tensor, "k n n"], Y: Float[Tensor, "n c"]) -> Float[Tensor, "k c"]:
    """Alignments A(K^cc, y_a): a row for each kernel, a column for each label."""
    quadratic = torch.stack([((Kc @ Y) * Y).sum(0) for Kc in K])
    return quadratic / (K.flatten(1).norm(dim=1)[:, None] * (Y * Y).sum(0))
