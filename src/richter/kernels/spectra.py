"""What can be read off any kernel matrix: alignment with labels, CKA, stable rank, power laws, specialisation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from richter.core import SelectionError, likeness
from richter.core.arrays import Array, ArrayLike, like, to_tensor

BLOCKS = 10  # of ranks, for errors of exponents


def _square(K: Tensor, name: str = "K") -> Tensor:
    if K.dim() != 2 or K.shape[0] != K.shape[1] or K.shape[0] == 0:
        raise SelectionError(f"{name} has shape {tuple(K.shape)}; a square kernel matrix [n, n] is needed.")
    return K


def alignment(K: ArrayLike, y: ArrayLike) -> float:
    """A(K, y) = y^T K y / (|K|_F |y|^2), uncentred; for y [n,k] the mean over its columns that are not zero.
    [rapid, Sec. 2]"""
    K = _square(to_tensor(K, "K"))
    y = to_tensor(y, "y").to(K.device)
    y = y[:, None] if y.dim() == 1 else y
    if y.dim() != 2 or y.shape[0] != K.shape[0]:
        raise SelectionError(f"y has shape {tuple(y.shape)} for a kernel of {K.shape[0]} examples; [n] or [n, k] is needed.")
    energy = (y * y).sum(0)
    A = (y * (K @ y)).sum(0) / (K.norm() * energy)
    return A[energy > 0].mean().item()  # the mean of nothing is NaN


def centre(K: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """C K C with C = I - 11^T/n."""
    rows = K.mean(0, keepdim=True)
    centred = K - rows
    centred -= K.mean(1, keepdim=True) - rows.mean()
    return centred


def cka(K: ArrayLike, L: ArrayLike, debiased: bool = False) -> float:
    """<CKC, CLC> / (|CKC| |CLC|): centred kernel alignment. Of few examples this is far from 0 for kernels that have nothing to
    do with each other; ``debiased`` estimates each inner product without bias, from symmetric kernels, and is then about 0 (also
    below). NaN where a kernel is constant.  [Kornblith et al. 2019; Song et al. 2012]"""
    A, B = centre(_square(to_tensor(K, "K"))), centre(_square(to_tensor(L, "L"), "L"))
    if A.shape != B.shape:
        raise SelectionError(f"kernels of {len(A)} and {len(B)} examples cannot be compared.")
    B = B.to(A.device)
    if not debiased:
        return ((A * B).sum() / (A.norm() * B.norm())).item()
    if len(A) < likeness.FEWEST:
        raise SelectionError(f"kernels of {len(A)} examples have no debiased alignment: it takes {likeness.FEWEST}. Give more.")
    a, b = (X.diagonal().cpu().numpy()[None] for X in (A, B))
    both, own_a, own_b = (np.array([(X * Y).sum().item()]) for X, Y in ((A, B), (A, A), (B, B)))
    return float(likeness.cka(both[None], own_a, own_b, a, b, debiased=True)[0, 0])


def stable_rank(K: ArrayLike) -> float:
    """R(K) = |K|_F^2 / |K|_2^2 = sum lambda^2 / lambda_1^2, on the kernel as it is given.  [signal, Sec. 4]"""
    K = _square(to_tensor(K, "K"))
    symmetric = (K - K.T).norm() <= 1e-12 * K.norm()
    top = torch.linalg.eigvalsh(K).abs().max().item() if symmetric else torch.linalg.matrix_norm(K, 2).item()
    return ((K / top).norm() ** 2).item() if top else float("nan")


@dataclass(frozen=True)
class PowerLaw:
    """An exponent with its 95 % interval."""

    exponent: float
    low: float
    high: float


def power_law(values: ArrayLike, first: int = 5, last: int | None = None) -> float:
    """The exponent b of values_k ~ k^-b: minus the log-log slope over ranks first..last (1-based; default 0.6 of all).
    [rapid, Sec. 12]"""
    return power_law_interval(values, first, last).exponent


def power_law_interval(values: ArrayLike, first: int = 5, last: int | None = None) -> PowerLaw:
    """``power_law`` with its 95 % interval; values [c, ranks] are c spectra, and the exponent is the mean over them.

    Neighbours in a spectrum are not independent, so the error is that of a jackknife over BLOCKS blocks of neighbouring values:
    it tells how far the slope hangs on a part of the spectrum. Of fewer values each is a block; fewer than three have no
    interval (NaN)."""
    from scipy.special import stdtrit
    v = to_tensor(values, "values")
    v = (v if v.dim() == 2 else v.flatten()[None]).sort(dim=1, descending=True).values
    last = int(0.6 * v.shape[1]) if last is None else last
    v = v[:, max(first, 1) - 1:last]
    k = torch.arange(first, first + v.shape[1], dtype=v.dtype, device=v.device)
    keep = v > 0
    fewest = int(keep.sum(1).min()) if len(v) else 0
    if first < 1 or fewest < 2:
        raise SelectionError(f"a power law needs two positive values among ranks {first} to {last}; {fewest} found.")
    x, y = k.clamp(min=1).log().expand_as(v), torch.where(keep, v, 1.0).log()
    used = keep.any(0)
    number = (used.cumsum(0) - 1) * BLOCKS // used.sum()
    blocks = number[used].unique().tolist()
    slopes = torch.stack([_slopes(x, y, keep & (number != block)) for block in (-1, *blocks)]).mean(1)
    whole, without, g = -slopes[0].item(), -slopes[1:], len(blocks)
    half = ((g - 1) / g * (without - without.mean()).square().sum()).sqrt().item() * float(stdtrit(g - 1, 0.975))  # 95 %
    return PowerLaw(whole, whole - half, whole + half)


def _slopes(x: Float[Tensor, "c r"], y: Float[Tensor, "c r"], keep: Bool[Tensor, "c r"]) -> Float[Tensor, " c"]:
    """Least-squares slopes over the kept ranks; NaN where fewer than two are left."""
    few = keep.sum(1, keepdim=True)
    x = (x - (x * keep).sum(1, keepdim=True) / few) * keep
    return torch.where(few[:, 0] < 2, float("nan"), (x * y).sum(1) / (x * x).sum(1))


def specialisation(K_diagonal: ArrayLike, Y: ArrayLike) -> Array:
    """KSM[c, c'] = A(K^cc, y^c') / mean over c'' of A(K^c''c'', y^c'): rows are kernels [k,n,n], columns labels [n,k].
    Each column has mean 1.  [rapid, Sec. 15]"""
    K = to_tensor(K_diagonal, "K_diagonal")
    y = to_tensor(Y, "Y").to(K.device)
    if K.dim() != 3 or y.dim() != 2 or K.shape[1] != K.shape[2] or y.shape != K.shape[1::-1]:
        raise SelectionError(f"kernels {tuple(K.shape)} and labels {tuple(y.shape)}: [k, n, n] and [n, k] are needed, "
                             f"a kernel and a column of labels for each output.")
    A = torch.einsum("na,cnm,ma->ca", y, K, y) / (K.flatten(1).norm(dim=1)[:, None] * (y * y).sum(0))
    return like(A / A.mean(0), K_diagonal, Y)
