"""Batches from whatever gives examples (a DataLoader, a Dataset, a Hugging Face dataset, a list), random streams left alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


@contextlib.contextmanager
def undisturbed(loader: Any, seed: int) -> Iterator[None]:
    """Iterating may draw: from the global streams of torch, numpy and Python, and from the loader's own generators."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners = (loader, sampler, batches, getattr(batches, "sampler", None))
    own = [g for g in (getattr(owner, "generator", None) for owner in owners) if isinstance(g, torch.Generator)]
    states = [(g, g.get_state()) for g in own]
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device
            np.random.seed(seed)  # noqa: NPY002
            random.seed(seed)
            yield
    finally:
        for g, state in states:
            g.set_state(state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)


def batches(loader: Any, seed: int) -> Iterable[Any]:
    """A DataLoader, or any iterable of batches, is iterated as it is; a dataset is shuffled with a seed of its own."""
    indexed = hasattr(loader, "__getitem__") and hasattr(loader, "__len__")
    in_batches = isinstance(loader, (list, tuple)) and len(loader) and _is_batch(loader[0])
    if isinstance(loader, torch.utils.data.DataLoader) or not indexed or not len(loader) or in_batches:
        return loader
    draw = torch.Generator().manual_seed(seed)
    return torch.utils.data.DataLoader(loader, batch_size=64, shuffle=True, generator=draw, collate_fn=_collate)


def _is_batch(item: Any) -> bool:
    """Is this a batch, or one example? A batch has inputs of two axes or more, and as many labels as inputs."""
    if isinstance(item, (Tensor, np.ndarray)):
        return False
    x, y = pair(item)
    arrays = list(x.values() if isinstance(x, Mapping) else x if isinstance(x, (tuple, list)) else [x])
    if not arrays or not all(isinstance(t, (Tensor, np.ndarray)) and t.ndim >= 2 for t in arrays):
        return False
    return y is None or (isinstance(y, (Tensor, np.ndarray)) and y.ndim >= 1 and len(y) == len(arrays[0]))


def _collate(rows: list[Any]) -> Any:
    """Examples side by side, lists of numbers (as a plain Hugging Face dataset has them) as arrays."""
    first = rows[0]
    if isinstance(first, Mapping):
        return {k: _collate([row[k] for row in rows]) for k in first}
    if isinstance(first, tuple) or (isinstance(first, list) and first and isinstance(first[0], (Tensor, np.ndarray))):
        return tuple(_collate([row[i] for row in rows]) for i in range(len(first)))
    return torch.stack(rows) if isinstance(first, Tensor) else np.stack([np.asarray(row) for row in rows])


def pair(batch: Any) -> tuple[Any, Any]:
    """(x, y) of one batch: a pair, or a dict with its labels under a usual name."""
    if isinstance(batch, Mapping):
        batch = {k: _stacked(v) for k, v in batch.items()}
        label = next((k for k in ("labels", "label", "y", "target", "targets") if k in batch), None)
        rest = {k: v for k, v in batch.items() if k != label}
        if len(rest) == 1 and "input_ids" not in rest:
            rest = next(iter(rest.values()))
        return rest, None if label is None else batch[label]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, (tuple, list)) and len(batch) > 2:
        return tuple(batch[:-1]), batch[-1]
    return (batch[0] if isinstance(batch, (tuple, list)) else batch), None


def _stacked(v: Any) -> Any:
    """torch's default collation turns n lists of d numbers into d tensors of n: put them together again."""
    columns = isinstance(v, (list, tuple)) and len(v) and all(isinstance(t, Tensor) and t.dim() == 1 for t in v)
    return torch.stack(list(v), 1) if columns else v
