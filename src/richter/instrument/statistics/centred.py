"""What measures of alignment read of a tangent kernel after one centring over all outputs of all examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from richter.instrument.statistics import frame
from richter.instrument.statistics.frame import NO_LABELS, Missing
from richter.instrument.statistics.grams import Labels
from richter.kernels.spectra import centre
from richter.linalg import Leading, Rough, leading, rough, top_of_each, without_each


class CentredKernel:
    """What one global centring C = I - 11^T/(n k) leaves to be known of a kernel and its labels: ``norm`` |C K C|_F, ``top`` its
    largest eigenvalue, ``quadratic`` y~^T K y~ and ``energy`` |y~|^2. Asking for what is not known raises Missing.

    ``top``: a function is called when somebody asks, because eigenvalues cost more than all the rest, and ``tangent_cka`` does
    without them; of one that gives vectors too, these are kept for the values with groups left out."""

    def __init__(self, norm: float, labelled: tuple[float, float] | None, top: float | Callable[[], float | Leading],
                 lacking: str = "", matrix: Float[Tensor, "r r"] | None = None,
                 roughly: Callable[[], Rough | None] | None = None) -> None:
        self.norm, self.lacking = norm, lacking  # why ``top`` is NaN
        self.matrix, self.roughly = matrix, roughly  # of all rows that count, for the values with groups left out
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
    y, example = rows(labels, n, v, K.device)
    K = K.permute(1, 0, 3, 2).reshape(n * v, n * v)
    if labels.keep is not None:
        keep = labels.keep.T.reshape(-1)
        K = K[keep][:, keep]
    return K, y, example


def rows(labels: Labels, n: int, v: int, device: torch.device) -> tuple[Tensor | None, Tensor]:
    """The labels as a vector, and the example each belongs to."""
    y = None if labels.given is None else labels.given.T.reshape(-1)
    example = torch.arange(n, device=device).repeat(v)
    if labels.keep is None:
        return y, example
    keep = labels.keep.T.reshape(-1)
    return None if y is None else y[keep], example[keep]


REMAINING = 1e-2  # of |K|^2: where centring leaves less, the sums lose digits and the centred kernel is formed


def centred_kernel(kernel: Float[Tensor, "n v n v"], labels: Labels) -> CentredKernel:
    """From sums over rows, where they keep enough digits: then no centred copy is made."""
    K, y, _ = flat(kernel, labels)
    y = None if y is None else y - y.mean()
    whole, means = K.norm().item(), K.mean(0)
    square = whole ** 2 - 2 * len(K) * (means @ means).item() + (means.sum() ** 2).item()
    C = K if square > REMAINING * whole ** 2 else centre(K)
    size = math.sqrt(square) if C is K else C.norm().item()
    if size <= 1e-13 * whole:  # a constant kernel: what is left is rounding
        return CentredKernel(0.0, None if y is None else (0.0, (y @ y).item()), 0.0, matrix=C)
    labelled = None if y is None else ((y @ (C @ y)).item(), (y @ y).item())
    roughly = cache(partial(rough, C))
    return CentredKernel(frame.finite(size), labelled, lambda: leading(C, centred=True, roughly=roughly()), matrix=C,
                         roughly=roughly)


FEW = 128  # rows of which everything is computed in double precision
TOLD = 1e-3  # of a number: groups whose leaving out changes it by less are not told apart in single precision


def centred_kernel_leaving(whole: CentredKernel, kernel: Float[Tensor, "n v n v"], labels: Labels,
                           groups: int) -> list[CentredKernel]:
    """The same with each group of examples left out, from sums over blocks of the whole kernel: no submatrix is copied. Standard
    errors need few digits: single precision, if it tells the groups apart."""
    targets, example = rows(labels, len(kernel), kernel.shape[1], kernel.device)
    C = whole.matrix
    assert C is not None
    keep = np.not_equal.outer(np.arange(groups), example.cpu().numpy() % groups).astype(np.float64)  # group, row
    Y = sizes = None
    if targets is not None:
        y = targets.cpu().numpy()
        Y = (y - ((keep @ y) / keep.sum(1))[:, None]) * keep
    if len(C) > FEW and whole.roughly is not None and (known := whole.roughly()) is not None:
        sizes = known.scale * _sizes_without_each(known.matrix, keep, Y)
        sizes = sizes if all(np.ptp(size) > TOLD * np.abs(size).max() for size in sizes) else None
    norms, quadratics = _sizes_without_each(C.cpu().numpy(), keep, Y) if sizes is None else sizes
    labelled: list[tuple[float, float] | None] = [None] * groups
    if Y is not None:
        labelled = [*zip(quadratics.tolist(), np.square(Y).sum(1).tolist(), strict=True)]

    @cache
    def tops() -> list[float]:
        known = whole.leading
        return top_of_each(C, keep, known if isinstance(known, Leading) else None)

    return [CentredKernel(norm, labelled[g], lambda g=g: tops()[g]) for g, norm in enumerate(norms.tolist())]  # type: ignore[misc]


def _sizes_without_each(K: NDArray[Any], keep: NDArray[Any], Y: NDArray[Any] | None) -> NDArray[np.float64]:
    """"2 g": |C K C| on each set of rows, and Y^T K Y of its own Y (without labels something that nobody reads)."""
    factors = torch.from_numpy(np.concatenate([1 - keep] if Y is None else [1 - keep, Y]).astype(K.dtype))
    matrix, groups, number = torch.from_numpy(K), len(keep), keep.sum(1)  # in torch's threads: see linalg.product
    products = (factors @ matrix).double().numpy()
    inside, K1 = factors[:groups], products[:groups]  # of one group each
    K1 = (K1.sum(0) - K1) * keep
    squares = without_each((inside @ matrix.square() @ inside.T).double()[None])[0].numpy()
    square = squares - 2 * np.square(K1).sum(1) / number + (K1.sum(1) / number) ** 2
    return np.stack([np.sqrt(np.maximum(square, 0)), number if Y is None else (Y * products[groups:]).sum(1)])
