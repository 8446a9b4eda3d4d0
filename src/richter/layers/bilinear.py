"""``nn.Bilinear``: z_o = x^T W_o y is linear in the products of all entries of its two inputs."""

from __future__ import annotations

from torch import Tensor, nn

from richter.layers import LinearMap, register
from richter.layers.linear import positions


def products(input1: Tensor, input2: Tensor) -> Tensor:
    """Map [..., d_1], [..., d_2] to [..., d_1 d_2]; the arguments have torch's names."""
    return (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)


register(nn.Bilinear, {"": LinearMap(matrix=lambda m, w: w.flatten(1), inputs=lambda m, x: positions(x),
                                     outputs=lambda m, z: positions(z), reads=products)})
