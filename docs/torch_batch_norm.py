"""A defect of torch 2.13 on the CPU: the gradients of a batch norm are wrong for a single example.

    python docs/torch_batch_norm.py

The batch norm is followed by a layer norm over channels, as in vision transformers with a convolutional stem. The gradient that
comes back lies channels last. With one example in the batch, the backward pass of torch.batch_norm reads it in another order. Two
copies of the example give the right gradient, and finite differences confirm it. torch.instance_norm calls the same code.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def weight_gradient(copies: int) -> tuple[Tensor, Tensor]:
    """(gradient in the scale of the batch norm by autograd, and by central differences), for one example, copied."""
    draw = torch.Generator().manual_seed(0)
    x, v = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((1, 3, 4, 4), (1, 16, 3)))
    mean, var, weight = (torch.rand(3, generator=draw, dtype=torch.float64) + 0.5 for _ in range(3))

    def loss(w: Tensor) -> Tensor:
        z = F.batch_norm(x.expand(copies, -1, -1, -1).contiguous(), mean, var, w)
        z = z.flatten(2).transpose(1, 2)
        return (F.layer_norm(z, (3,)) * v).sum() / copies

    exact = torch.autograd.grad(loss(weight.requires_grad_()), weight)[0]
    h = 1e-6
    steps = h * torch.eye(3, dtype=torch.float64)
    with torch.no_grad():
        differences = torch.stack([(loss(weight + e) - loss(weight - e)) / (2 * h) for e in steps])
    return exact, differences


if __name__ == "__main__":
    for copies in (1, 2):
        autograd, differences = weight_gradient(copies)
        print(f"{copies} in the batch: autograd {autograd.tolist()}, central differences {differences.tolist()}, "
              f"relative error {float((autograd - differences).norm() / differences.norm()):.1e}")
