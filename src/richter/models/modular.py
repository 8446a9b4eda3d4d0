"""The small transformer on which grokking was first observed: it reads "a o b =" and predicts the number that follows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from richter.models.gpt import TransformerBlock


class ReluBlock(TransformerBlock):
    """The block of ``GPT`` with a ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        n, T, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, T, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, T, d))
        return x + self.out(F.relu(self.fc(self.norm2(x))))


class ModularTransformer(nn.Module):
    """Map token ids [n, 4] to logits [n, p] at the equality sign. The classes are the numbers from 0 to p - 1. The vocabulary
    also contains the operation and the equality sign (``tasks.modular_arithmetic(p).tokens``).

    It is a decoder with pre-norm blocks, causal attention and learned positions. The read-out has no bias and reads only the last
    position, so ``head`` reads one vector of d features per pair.
    """

    def __init__(self, p: int, d: int, depth: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(p + 2, d), nn.Embedding(4, d)
        for table in (self.token, self.position):
            # vectors of length 1; torch's default length sqrt(d) would dominate the output of the blocks
            nn.init.normal_(table.weight, std=d ** -0.5)
        self.blocks = nn.Sequential(*(ReluBlock(d, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, p, bias=False)

    def features(self, ids: Int[Tensor, "n T"]) -> Float[Tensor, "n d"]:
        """Return the input of the read-out."""
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        return self.norm(self.blocks(x)[:, -1])

    def forward(self, ids: Int[Tensor, "n T"]) -> Float[Tensor, "n p"]:
        return self.head(self.features(ids))


def modular_transformer(p: int, d: int = 128, depth: int = 2, heads: int = 4, seed: int = 0) -> ModularTransformer:
    """Make the transformer for numbers modulo ``p``, drawn from ``seed``: two blocks of four heads, as in Power et al. (2022)."""
    if p < 2 or d < 1 or heads < 1 or depth < 1 or d % heads:
        raise ValueError(f"modular_transformer(p={p}, d={d}, depth={depth}, heads={heads}): two numbers, a block and a head at "
                         f"least are needed, and d divided by the number of heads.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ModularTransformer(p, d, depth, heads)
