"""Hugging Face ``Conv1D`` (GPT-2): a Linear whose weight is stored transposed; ``c_attn`` holds q, k and v."""

from __future__ import annotations

from torch import Tensor, nn

from richter.layers import LinearMap, View, register
from richter.layers.linear import FUSED, positions, thirds

PLAIN: View = {"": LinearMap(matrix=lambda m, w: w.T, inputs=lambda m, x: positions(x),
                             outputs=lambda m, z: positions(z))}
FUSED_VIEW: View = thirds(lambda m, w: w.T)


def view(name: str, module: nn.Module) -> View:
    assert isinstance(module.weight, Tensor)
    d_in, d_out = module.weight.shape
    return FUSED_VIEW if name.rpartition(".")[2] in FUSED and d_out == 3 * d_in else PLAIN


register("transformers.pytorch_utils.Conv1D", view)
