"""What measures of alignment read of a tangent kernel after one centring over all outputs of all examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from richter.instrument.statistics import frame
from richter.instrument.statistics.frame import NO_LABELS, Missing
from richter.instrument.statistics.grams import Labels
from richter.kernels.spectra import centre
from richter.linalg import Leading, leading, top_of_each, without_each


class CentredKernel:
    """What one global centring C = I - 11^T/(n k) leaves to be known of a kernel and its labels: ``norm`` |C K C|_F, ``top`` its
    largest eigenvalue, ``quadratic`` y~^T K y~ and ``energy`` |y~|^2. Asking for what is not known raises Missing.

    ``top``: a function is called when somebody asks, because eigenvalues cost more than all the rest, and ``tangent_cka`` does
    without them; of one that gives vectors too, these are kept for the values with groups left out."""

    def __init__(self, norm: float, labelled: tuple[float, float] | None, top: float | Callable[[], float | Leading],
                 lacking: str = "") -> None:
        self.norm, self.lacking = norm, lacking  # why ``top`` is NaN
        self._top: Callable[[], float | Leading] = top if callable(top) else lambda: top
        self._known: float | Leading | None = None
        if labelled is not None:
            self.quadratic, self.energy = labelled

    @property
    def leading(self) -> float | Leading:
        if self._known is None:
            with frame.decomposed():
                self._known = self._top()
        return self._known

    @property
    def top(self) -> float:
        top = self.leading
        top = top.value if isinstance(top, Leading) else top
        if math.isnan(top):
            raise Missing(self.lacking)
        return top

    def __getattr__(self, name: str) -> float:
        if name in ("quadratic", "energy"):
            raise Missing(NO_LABELS)
        raise AttributeError(f"a CentredKernel has no {name!r}")


def flat(K: Float[Tensor, "n v n v"], labels: Labels) -> tuple[Tensor, Tensor | None, Tensor]:
    """The kernel as a matrix, the labels as a vector, and the example each row belongs to; without padding. Outputs come
    first, as kernels lie in memory."""
    n, v = K.shape[:2]
    K = K.permute(1, 0, 3, 2).reshape(n * v, n * v)
    y = None if labels.given is None else labels.given.T.reshape(-1)
    example = torch.arange(n, device=K.device).repeat(v)
    if labels.keep is None:
        return K, y, example
    keep = labels.keep.T.reshape(-1)
    return K[keep][:, keep], None if y is None else y[keep], example[keep]


REMAINING = 1e-4  # of |K|^2: where centring leaves less, the sums lose digits and the centred kernel is formed


def centred_kernel(kernel: Float[Tensor, "n v n v"], labels: Labels) -> CentredKernel:
    """From sums over rows, where they keep enough digits: then no centred copy is made."""
    K, y, _ = flat(kernel, labels)
    y = None if y is None else y - y.mean()
    whole, rows = K.norm().item(), K.mean(0)
    square = whole ** 2 - 2 * len(K) * (rows @ rows).item() + (rows.sum() ** 2).item()
    C = K if square > REMAINING * whole ** 2 else centre(K)
    size = math.sqrt(square) if C is K else C.norm().item()
    if size <= 1e-13 * whole:  # a constant kernel: what is left is rounding
        return CentredKernel(0.0, None if y is None else (0.0, (y @ y).item()), 0.0)
    labelled = None if y is None else ((y @ (C @ y)).item(), (y @ y).item())
    return CentredKernel(frame.finite(size), labelled, lambda: leading(C, centred=True))


def centred_kernel_leaving(whole: CentredKernel, kernel: Float[Tensor, "n v n v"], labels: Labels,
                           groups: int) -> list[CentredKernel]:
    """The same with each group of examples left out, from sums over blocks of the whole kernel: no submatrix is copied."""
    K, y, example = flat(kernel, labels)
    inside = torch.nn.functional.one_hot(example % groups, groups).to(K)  # row, group
    keep = 1 - inside.T
    squares = without_each((inside.T @ (K * K) @ inside)[None])[0]
    size = keep.sum(1)
    K1 = (keep @ K) * keep
    norms = (squares - 2 * K1.square().sum(1) / size + (K1.sum(1) / size) ** 2).clamp(min=0).sqrt().tolist()
    labelled: list[tuple[float, float] | None] = [None] * groups
    if y is not None:
        Y = (y - ((keep @ y) / size)[:, None]) * keep
        labelled = [*zip((Y * (Y @ K)).sum(1).tolist(), Y.square().sum(1).tolist(), strict=True)]

    @cache
    def tops() -> list[float]:
        known = whole.leading
        return top_of_each(K, keep, known if isinstance(known, Leading) else None).tolist()  # type: ignore[no-any-return]

    return [CentredKernel(norms[g], labelled[g], lambda g=g: tops()[g]) for g in range(groups)]  # type: ignore[misc]
