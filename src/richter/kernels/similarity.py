"""How alike two sets of features are: the centred kernel alignment of their linear kernels by the debiased estimator, of all rows
and with each group of rows left out.

HSIC is estimated without bias by the inner product of Gram matrices without their diagonals that are centred accordingly
[Song et al. 2012, Eq. 5]. That is an inner product still, so the cosine is at most 1; no shift of the features changes it. Where
there are fewer rows than features the Gram matrices are formed, else products of features: |X^T Y|^2 = sum_ij K_ij L_ij.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Features of some rows, and the group that each row belongs to."""

    X: Float[Tensor, "n d"]
    group: Int[Tensor, " n"]
    groups: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "X", self.X - self.X.mean(0))  # changes nothing but the rounding

    @cached_property
    def member(self) -> Float[Tensor, "n groups"]:
        return torch.nn.functional.one_hot(self.group, self.groups).to(self.X.device, torch.float64)

    @cached_property
    def wide(self) -> bool:
        """Are there more features than rows? Counted in multiplications of one alignment."""
        n, d = self.X.shape
        return 2 * n <= 3 * d

    @cached_property
    def squares(self) -> Float[Tensor, " n"]:
        return self.X.double().square().sum(1)

    @cached_property
    def gram(self) -> Float[Tensor, "n n"]:
        return (self.X @ self.X.T).double().fill_diagonal_(0)

    @cached_property
    def sums(self) -> Float[Tensor, "n groups"]:
        """sum over j of a group, j != i, of K_ij."""
        if self.wide:
            return self.gram @ self.member
        X = self.X.double()
        return X @ (X.T @ self.member) - self.squares[:, None] * self.member

    def products(self, other: Rows) -> Float[Tensor, " left"]:
        """sum over i != j of K_ij L_ij: of all rows, then without each group."""
        if self.wide:
            table = self.member.T @ (self.gram * other.gram) @ self.member
            whole = table.sum()
            return torch.cat([whole[None], whole - table.sum(0) - table.sum(1) + table.diagonal()])
        parts = [(self.X[self.group == g].T @ other.X[self.group == g]).double() for g in range(self.groups)]
        total = torch.stack(parts).sum(0)
        diagonal = self.member.T @ (self.squares * other.squares)
        entries = [total.square().sum(), *((total - part).square().sum() for part in parts)]
        return torch.stack(entries) - torch.cat([diagonal.sum()[None], diagonal.sum() - diagonal])

    def hsic(self, other: Rows) -> Float[Tensor, " left"]:
        """The debiased estimate, up to the factor 1/(n (n - 3)): of all rows, then without each group."""
        keep = torch.cat([torch.ones_like(self.member[:, :1]), 1 - self.member], 1)
        nothing = torch.zeros_like(self.sums[:, :1])
        k, l = (keep * (r.sums.sum(1, keepdim=True) - torch.cat([nothing, r.sums], 1)) for r in (self, other))  # noqa: E741
        n = keep.sum(0)
        return self.products(other) + k.sum(0) * l.sum(0) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k * l).sum(0)


def debiased_cka(a: Rows, b: Rows, own: Float[Tensor, " left"] | None = None) -> list[float]:
    """CKA of two sets of features of the same rows: of all rows, then without each group of them. NaN where one is constant.
    ``own``: b.hsic(b), if it is known already.  [Kornblith et al. 2019]"""
    if a.wide != b.wide:
        raise ValueError(f"features of {a.X.shape[1]} and {b.X.shape[1]} numbers are compared in two ways; give them one")
    size = a.hsic(a) * (b.hsic(b) if own is None else own)
    scale = (a.squares.sum() * b.squares.sum()).item() ** 2
    return [v / math.sqrt(s) if s > 1e-24 * scale else math.nan for v, s in zip(a.hsic(b).tolist(), size.tolist(), strict=True)]
