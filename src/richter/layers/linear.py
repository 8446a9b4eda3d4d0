"""``nn.Linear``: z = W h + b at every leading index; a fused q, k, v projection becomes three maps."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from richter.layers import LinearMap, View, register, view_of

FUSED = ("c_attn", "qkv", "in_proj_qkv")  # attribute names under which q, k, v are often stacked


def positions(x: Tensor) -> Tensor:
    """[n, d] -> [n, 1, d];  [n, a, b, d] -> [n, a b, d];  [d] -> [1, 1, d]."""
    if x.dim() < 2:
        return x.reshape(1, 1, -1)
    return x.reshape(x.shape[0], x.shape[1:-1].numel(), x.shape[-1])


def is_fused(name: str, module: nn.Module) -> bool:
    """Whether a module has the name and width of a joint projection to queries, keys and values. Whether it is one, and which
    outputs are which, follows from the model's computation (richter.instrument.survey.survey)."""
    if name.rpartition(".")[2] not in FUSED:
        return False
    m, parameters = view_of(name, module).get(""), dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")  # not a weight that is computed on access
    if m is None or m.kind != "dense" or weight is None:
        return False
    d_out, d_in = m.matrix(module, weight.detach()).shape
    return bool(d_out == 3 * d_in)


def rows_of(m: LinearMap, rows: Tensor) -> LinearMap:
    """Return the map to some of the outputs; a view if they are adjacent."""
    first, last = int(rows[0]), int(rows[-1])
    chosen = slice(first, last + 1) if last - first + 1 == len(rows) else rows
    return replace(m, matrix=lambda module, w: m.matrix(module, w)[chosen],
                   outputs=lambda module, z: m.outputs(module, z)[..., chosen], apply=None)


PLAIN: View = {"": LinearMap(matrix=lambda m, w: w, inputs=lambda m, x: positions(x),
                             outputs=lambda m, z: positions(z))}
register(nn.Linear, PLAIN)
