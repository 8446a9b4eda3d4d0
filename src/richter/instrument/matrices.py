"""What a large model is held in: the matrices of maps in the precision in which they are computed with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

KEPT = 2 ** 22  # entries of all matrices that are kept in double precision


class Widened(Mapping[str, Tensor]):
    """Matrices in the precision in which they are computed with: of small ones all are kept, of large ones none, because they
    would be several times the model."""

    def __init__(self, matrices: Mapping[str, Tensor], wide: Callable[[Tensor], Tensor]) -> None:
        self.matrices, self.wide = matrices, wide
        self.kept: dict[str, Tensor] | None = {} if sum(W.numel() for W in matrices.values()) <= KEPT else None

    def __getitem__(self, name: str) -> Tensor:
        if self.kept is None:
            return self.wide(self.matrices[name])
        if name not in self.kept:
            self.kept[name] = self.wide(self.matrices[name])
        return self.kept[name]

    def __contains__(self, name: object) -> bool:
        return name in self.matrices

    def __iter__(self) -> Iterator[str]:
        return iter(self.matrices)

    def __len__(self) -> int:
        return len(self.matrices)
