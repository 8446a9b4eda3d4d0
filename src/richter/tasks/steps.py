"""A step on a line: a task whose features can be plotted."""

from __future__ import annotations

import numpy as np
import torch

from richter.core import SelectionError
from richter.tasks.images import Split


def heaviside(n: int = 1000, seed: int = 0, *, n_test: int = 1000, dtype: torch.dtype = torch.float32) -> Split:
    """Make examples of f*(x) = 1 for x > 0, otherwise 0, with x uniform on [-1, 1]; x and targets are [n, 1].  [layerwise, Fig.
    2.2]

    Test examples do not depend on ``n``.
    """
    if n < 1 or n_test < 1 or seed < 0:
        raise SelectionError(f"heaviside(n={n}, seed={seed}, n_test={n_test}): one example at least is needed to train and to "
                             f"test on, and a seed from 0 on.")
    parts = []
    for part, m in enumerate((n, n_test)):
        x = torch.from_numpy(np.random.default_rng((seed, part, 6)).uniform(-1, 1, (m, 1))).to(dtype)
        parts += [x, (x > 0).to(dtype)]
    return Split(*parts)


TASKS: tuple = (heaviside,)
