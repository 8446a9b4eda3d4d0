"""``nn.MultiheadAttention`` passes its weights to one function; this call is split into four linear maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from richter.layers import LinearMap, takes_apart
from richter.layers.linear import positions

Apply = Callable[[str, Tensor, Tensor, Tensor | None], Tensor]  # (which, input, weight, bias) -> output


def split(which: str) -> LinearMap:
    """Make the map q, k or v inside ``in_proj_weight`` (three stacked blocks)."""
    i = "qkv".index(which)
    return LinearMap(matrix=lambda m, w: w.chunk(3, dim=0)[i], inputs=lambda m, x: positions(x),
                     outputs=lambda m, z: positions(z), weight="in_proj_weight")


def whole(weight: str) -> LinearMap:
    """Make a map whose weight is a whole parameter (``q_proj_weight``, ``out_proj.weight``)."""
    return LinearMap(matrix=lambda m, w: w, inputs=lambda m, x: positions(x), outputs=lambda m, z: positions(z),
                     weight=weight)


def attention_in_parts(apply: Apply, query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int,
                       in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, bias_k: Tensor | None,
                       bias_v: Tensor | None, add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor,
                       out_proj_bias: Tensor | None, training: bool = True, key_padding_mask: Tensor | None = None,
                       need_weights: bool = True, attn_mask: Tensor | None = None,
                       use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None,
                       k_proj_weight: Tensor | None = None, v_proj_weight: Tensor | None = None,
                       **rest: Any) -> tuple[Tensor, Tensor | None]:
    """Compute F.multi_head_attention_forward with its four projections done by ``apply``. The attention between them is torch's
    own, called with identity projections, so that masks, zero attention and extra keys work as usual."""
    biases: Sequence[Tensor | None] = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    if use_separate_proj_weight:
        assert q_proj_weight is not None and k_proj_weight is not None and v_proj_weight is not None
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)  # type: ignore[assignment]
    q, k, v = (apply(w, x, W, b) for w, x, W, b in zip("qkv", (query, key, value), weights, biases, strict=True))
    same = torch.eye(embed_dim, dtype=q.dtype, device=q.device)
    mixed, attention = F.multi_head_attention_forward(
        q, k, v, embed_dim, num_heads, None, None, bias_k, bias_v, add_zero_attn, dropout_p, same, None,
        training=training, key_padding_mask=key_padding_mask, need_weights=need_weights, attn_mask=attn_mask,
        use_separate_proj_weight=True, q_proj_weight=same, k_proj_weight=same, v_proj_weight=same, **rest)
    return apply("out_proj", mixed, out_proj_weight, out_proj_bias), attention


@takes_apart(F.multi_head_attention_forward)
def attend(recorder: Any, func: Any, args: Sequence[Any], kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Replace the call of nn.MultiheadAttention. With need_weights, torch does not use a fused kernel."""
    if not recorder.plain or kwargs.get("need_weights", True):
        return attention_in_parts(recorder.projected, *args, **kwargs)
    return attention_in_parts(recorder.projected, *args, **{**kwargs, "need_weights": True})[0], None
