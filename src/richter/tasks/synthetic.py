"""Tasks whose right features are known in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import SelectionError


@dataclass(frozen=True, eq=False)
class ChainMonomial:
    """Examples of the chain monomial, and the expected gradient outer product E[grad f grad f^T] of its target."""

    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n 1"]
    x_test: Float[Tensor, "m d"]
    y_test: Float[Tensor, "m 1"]
    egop: Float[Tensor, "d d"]


def chain_monomial(n: int, d: int, rank: int, seed: int = 0, *, n_test: int = 1000, standardise: bool = False,
                   dtype: torch.dtype = torch.float32) -> ChainMonomial:
    """f(x) = sum_k x_{k mod r} x_{(k+1) mod r} over k = 0..r-1, x ~ N(0, I_d).  [nfa, Eq. (2)]

    ``standardise`` divides f by its deviation sqrt(r), and so the EGOP by r. Test examples do not depend on ``n``.
    """
    if not 3 <= rank <= d or n < 1 or n_test < 1 or seed < 0:
        raise SelectionError(f"chain_monomial(n={n}, d={d}, rank={rank}, seed={seed}, n_test={n_test}): 3 <= rank <= d is needed "
                             f"(fewer variables make no chain), one example at least, and a seed from 0 on.")
    scale = math.sqrt(rank) if standardise else 1.0  # r uncorrelated monomials of variance 1
    x, x_test = (torch.from_numpy(np.random.default_rng((seed, part)).standard_normal((m, d)))
                 for part, m in enumerate((n, n_test)))
    y, y_test = ((chain(z, rank) / scale)[:, None].to(dtype) for z in (x, x_test))
    return ChainMonomial(x.to(dtype), y, x_test.to(dtype), y_test, (chain_egop(d, rank) / scale**2).to(dtype))


def chain(x: Float[Tensor, "n d"], rank: int) -> Float[Tensor, " n"]:
    """f(x) of each row."""
    used = x[:, :rank]
    return (used * used.roll(-1, 1)).sum(1)


def chain_egop(d: int, rank: int) -> Float[Tensor, "d d"]:
    """grad f = B x with B = P + P^T, P the cyclic shift of the first r variables; so E[grad f grad f^T] = B B^T.

    The diagonal is 2; the entries two apart are 1, and 2 if r = 4, where i+2 = i-2. Its rank is r, or r-2 if 4 divides r.
    """
    P = torch.eye(rank, dtype=torch.float64).roll(1, 1)
    B = P + P.T
    egop = torch.zeros(d, d, dtype=torch.float64)
    egop[:rank, :rank] = B @ B.T
    return egop
