"""The handwritten digits that come with scikit-learn: 1,797 images of 8 x 8, nothing to download."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Split(NamedTuple):
    """Standardised inputs [n,d] and class ids [n], for training and for testing."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def digits(test: float = 0.2, seed: int = 0, dtype: torch.dtype = torch.float32) -> Split:
    """Pixels standardised by one global mean and deviation, shuffled by ``seed``."""
    from sklearn.datasets import load_digits
    if not 0 < test < 1:
        raise ValueError(f"digits(test={test}): a share between 0 and 1 is needed.")
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = (x[order] - x.mean()) / x.std(), y[order]
    cut = round(len(x) * (1 - test))
    inputs, labels = torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=torch.long)
    return Split(inputs[:cut], labels[:cut], inputs[cut:], labels[cut:])
