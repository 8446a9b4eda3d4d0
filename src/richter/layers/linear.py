"""``nn.Linear``: z = W h + b at every leading index; a fused q, k, v projection is three maps."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from richter.layers import LinearMap, View, register

FUSED = ("c_attn", "qkv", "in_proj_qkv")  # attribute names under which q, k, v are stacked in thirds of the outputs


def positions(x: Tensor) -> Tensor:
    """[n, d] -> [n, 1, d];  [n, a, b, d] -> [n, a b, d];  [d] -> [1, 1, d]."""
    if x.dim() < 2:
        return x.reshape(1, 1, -1)
    return x.reshape(x.shape[0], x.shape[1:-1].numel(), x.shape[-1])


def thirds(matrix: Callable[[nn.Module, Tensor], Tensor]) -> View:
    """Three maps q, k, v that read the same input and write one third of the outputs each."""
    def third(i: int) -> LinearMap:
        return LinearMap(matrix=lambda m, w: matrix(m, w).chunk(3, dim=0)[i],
                         inputs=lambda m, x: positions(x),
                         outputs=lambda m, z: positions(z).chunk(3, dim=-1)[i])
    return {"q": third(0), "k": third(1), "v": third(2)}


PLAIN: View = {"": LinearMap(matrix=lambda m, w: w, inputs=lambda m, x: positions(x),
                             outputs=lambda m, z: positions(z))}
FUSED_VIEW: View = thirds(lambda m, w: w)


def view(name: str, module: nn.Module) -> View:
    assert isinstance(module, nn.Linear)
    fused = name.rpartition(".")[2] in FUSED and module.out_features == 3 * module.in_features
    return FUSED_VIEW if fused else PLAIN


register(nn.Linear, view)
