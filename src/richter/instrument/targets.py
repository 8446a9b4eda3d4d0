"""Targets of class or token ids where there are too many to be written down: rows of them are made when they are asked for."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

WRITTEN = 2 ** 26  # bytes: smaller targets are plain tensors


class OneHot:
    """The tensor "n k" that has a 1 where each token's class is, and 0 elsewhere. ``Y[rows]`` is a tensor, in double precision;
    whatever else is asked of a tensor is asked of the whole, which is then made."""

    def __init__(self, ids: Int[Tensor, "n t"], real: Bool[Tensor, "n t"], classes: int) -> None:
        self.ids, self.real, self.classes = ids, real, classes
        self.shape = torch.Size((len(ids), ids.shape[1] * classes))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Any) -> Float[Tensor, "m k"]:
        ids, real = self.ids[rows], self.real[rows]
        hot = torch.zeros(*ids.shape, self.classes, dtype=torch.float64, device=ids.device)
        return hot.scatter_(-1, ids[..., None], real[..., None].double()).flatten(1)

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def take(self, rows: Any) -> OneHot:
        """The same of some examples."""
        return OneHot(self.ids[rows], self.real[rows], self.classes)

    def labelled(self, rows: Any) -> Bool[Tensor, " k"]:
        """Which outputs are the label of some of these examples."""
        some = torch.zeros(self.ids.shape[1], self.classes, dtype=torch.bool, device=self.ids.device)
        ids, real = self.ids[rows], self.real[rows]
        some[torch.arange(ids.shape[1], device=ids.device).expand_as(ids)[real], ids[real]] = True
        return some.flatten()

    def counts(self, rows: Any, groups: int) -> tuple[Int[Tensor, " m"], Float[Tensor, "m g"]]:
        """Outputs that are the label of some of these examples, and of how many in each group."""
        ids, real = self.ids[rows].cpu(), self.real[rows].cpu()
        outputs = (torch.arange(ids.shape[1]) * self.classes + ids)[real]
        group = (torch.arange(len(ids)) % groups)[:, None].expand_as(ids)[real]
        known, place = torch.unique(outputs, return_inverse=True)
        labels = torch.zeros(len(known), groups, dtype=torch.float64)
        return known, labels.index_put_((place, group), torch.ones((), dtype=torch.float64), accumulate=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("ids", "real", "classes", "shape"):  # while it is copied it has none of them yet
            raise AttributeError(name)
        return getattr(self[:], name)


def labelled(Y: Tensor | OneHot, rows: Tensor) -> Bool[Tensor, " k"]:
    """Which outputs are not 0 in some of these rows."""
    return Y.labelled(rows) if isinstance(Y, OneHot) else (Y[rows] != 0).any(0)


def counts(Y: Tensor | OneHot, rows: Tensor, groups: int) -> tuple[Int[Tensor, " m"], Float[Tensor, "m g"]] | None:
    """Outputs that are the label of some of these rows, and of how many in each group of them; None where labels are numbers and
    not classes, of which a row has 1 or 0."""
    if isinstance(Y, OneHot):
        return Y.counts(rows, groups)
    y = Y[rows].cpu().double()
    if not bool(((y == 0) | (y == 1)).all()):
        return None
    known = y.any(0).nonzero().flatten()
    return known, torch.stack([y[g::groups, known].sum(0) for g in range(groups)], 1)


def columns(Y: Any, rows: Int[Tensor, " n"], outputs: Int[Tensor, " v"]) -> Float[Tensor, "n v"]:
    """Of some rows some outputs; ones where there are no labels. Rows are made one after another where there are too many to be
    written down."""
    if Y is None:
        return torch.ones(len(rows), len(outputs), dtype=torch.float64)
    return torch.cat([(row := Y[rows[i:i + 1]])[:, outputs.to(row.device)] for i in range(len(rows))])
