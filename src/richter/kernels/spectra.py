"""What can be read off any kernel matrix: alignment with labels, CKA, stable rank, power laws, specialisation."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import SelectionError
from richter.core.arrays import Array, ArrayLike, like, to_tensor


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


def cka(K: ArrayLike, L: ArrayLike) -> float:
    """<CKC, CLC> / (|CKC| |CLC|): centred kernel alignment."""
    A, B = centre(_square(to_tensor(K, "K"))), centre(_square(to_tensor(L, "L"), "L"))
    if A.shape != B.shape:
        raise SelectionError(f"kernels of {len(A)} and {len(B)} examples cannot be compared.")
    return ((A * B.to(A.device)).sum() / (A.norm() * B.norm().to(A.device))).item()


def stable_rank(K: ArrayLike) -> float:
    """R(K) = |K|_F^2 / |K|_2^2 = sum lambda^2 / lambda_1^2, on the kernel as it is given.  [signal, Sec. 4]"""
    K = _square(to_tensor(K, "K"))
    symmetric = (K - K.T).norm() <= 1e-12 * K.norm()
    top = torch.linalg.eigvalsh(K).abs().max().item() if symmetric else torch.linalg.matrix_norm(K, 2).item()
    return ((K / top).norm() ** 2).item() if top else float("nan")


def power_law(values: ArrayLike, first: int = 5, last: int | None = None) -> float:
    """The exponent b of values_k ~ k^-b: minus the log-log slope over ranks first..last (1-based; default 0.6 of all).
    [rapid, Sec. 12]"""
    v = to_tensor(values, "values").flatten().sort(descending=True).values
    last = int(0.6 * len(v)) if last is None else last
    v = v[first - 1:last]
    k = torch.arange(first, first + len(v), dtype=v.dtype, device=v.device)
    keep = v > 0
    if first < 1 or keep.sum() < 2:
        raise SelectionError(f"a power law needs two positive values among ranks {first} to {last}; {int(keep.sum())} found.")
    x, y = k[keep].log(), v[keep].log()
    x = x - x.mean()
    return -((x * y).sum() / (x * x).sum()).item()


def specialisation(K_diagonal: ArrayLike, Y: ArrayLike) -> Array:
    """KSM[c, c'] = A(K^cc, y^c') / mean over c'' of A(K^c''c'', y^c'): rows are kernels [k,n,n], columns labels [n,k].
    Each column has mean 1.  [rapid, Sec. 15]"""
    K = to_tensor(K_diagonal, "K_diagonal")
    y = to_tensor(Y, "Y").to(K.device)
    if K.dim() != 3 or y.dim() != 2 or K.shape[1] != K.shape[2] or y.shape[0] != K.shape[1]:
        raise SelectionError(f"kernels {tuple(K.shape)} and labels {tuple(y.shape)}: [k, n, n] and [n, k] are needed.")
    A = torch.einsum("na,cnm,ma->ca", y, K, y) / (K.flatten(1).norm(dim=1)[:, None] * (y * y).sum(0))
    return like(A / A.mean(0), K_diagonal, Y)
