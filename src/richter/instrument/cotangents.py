"""What is back-propagated: the metric on outputs. ``cotangents(f[n,k], y) -> V[v,n,k]``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import SelectionError

Cotangents = Callable[[Float[Tensor, "n k"], Tensor | None], Float[Tensor, "v n k"]]


def every_output(f: Float[Tensor, "n k"], y: Tensor | None = None) -> Float[Tensor, "v n k"]:
    """Each output by itself, V_v = e_v: the exact sums over outputs."""
    n, k = f.shape
    return torch.eye(k, dtype=f.dtype, device=f.device)[:, None].expand(k, n, k)


NEIGHBOURS = 8  # examples that share v random outputs in an average


@dataclass(frozen=True)
class RandomOutputs:
    """Random combinations of the outputs; see ``random_outputs``."""

    v: int
    seed: int = 0

    @property
    def __name__(self) -> str:
        return f"random_outputs({self.v}, seed={self.seed})"

    def __call__(self, f: Float[Tensor, "n k"], y: Tensor | None = None) -> Float[Tensor, "v n k"]:
        """The same combinations for every example, Gaussian."""
        n, k = f.shape
        draw = torch.Generator().manual_seed(self.seed)
        R = torch.randn(self.v, k, generator=draw, dtype=torch.float64) / self.v ** 0.5
        return R.to(f.device, f.dtype)[:, None].expand(self.v, n, k)

    @property
    def each(self) -> int:
        """How many combinations of its own an example gets in an average over examples: neighbours share the work."""
        return math.ceil(self.v / NEIGHBOURS)

    @property
    def vectors(self) -> int:
        """How many random vectors of all examples and outputs the norm of a kernel is estimated from."""
        return max(4, self.v // 2)

    def signs(self, examples: Sequence[int], k: int, drawn: Sequence[int]) -> Tensor:
        """Random signs "v n k" of its own for each example, as int8; drawn from its number, so that chunks change nothing."""
        found = np.empty((len(drawn), len(examples), k), dtype=np.int8)
        for j, v in enumerate(drawn):
            for n, i in enumerate(examples):  # counter-based streams: those of a Mersenne twister with near seeds are alike
                draw = np.random.Generator(np.random.Philox(key=[self.seed % 2 ** 64, i << 24 | v]))
                found[j, n] = draw.integers(0, 2, k, dtype=np.int8)
        return torch.from_numpy(found).mul_(2).sub_(1)

    def own(self, f: Float[Tensor, "n k"], examples: Sequence[int], block: slice = slice(None)) -> Float[Tensor, "v n k"]:
        """Combinations of its own for each example, v over a few neighbours: an average over examples averages over all."""
        drawn = range(self.each)[block]
        return self.signs(examples, f.shape[1], drawn).to(f.device, f.dtype) / self.each ** 0.5


@functools.cache  # the same combinations are the same object: measures that ask for them share one computation
def random_outputs(v: int, seed: int = 0) -> RandomOutputs:
    """``v`` random combinations of the outputs with E[sum_v V_v V_v^T] = I: unbiased sketches of every sum over outputs.
    ``ntk`` uses the same ones for all examples. Averages over examples draw v of them anew for every 8 examples (so an
    example costs v / 8 backward passes), norms of kernels v / 2 vectors of all examples and outputs."""
    if v < 1:
        raise SelectionError(f"random_outputs({v}): at least one random output is needed.")
    return RandomOutputs(v, seed)


def loss_gradient(f: Float[Tensor, "n k"], y: Tensor | None = None) -> Float[Tensor, "v n k"]:
    """n dL/df of the probe's loss L, one cotangent: what it asks of a weight is, on average over examples, dL/dW. The loss is
    the probe's and is of all examples at once, so a measurement fills it in; see objective.py."""
    raise SelectionError("loss_gradient stands for the loss of a probe, and is known to richter.measure and to Observers alone: "
                         "richter.measure(model, richter.Probe(x, y, loss=...), cotangents=loss_gradient).")
