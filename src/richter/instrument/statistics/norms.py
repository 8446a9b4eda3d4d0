"""Norms with running statistics (BatchNorm and its kin): which there are, and whether what they keep is of data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList

from richter.core import Remark
from richter.core.text import FEW_BATCHES, NO_DATA

if TYPE_CHECKING:
    from richter.instrument.subject import Subject

SETTLED = 0.01  # the share of what a norm was made with, mean 0 and variance 1, in what it keeps


def tracking(model: nn.Module) -> dict[str, _NormBase]:
    """Norms that keep running statistics, by name."""
    return {name: m for name, m in model.named_modules()
            if isinstance(m, _NormBase) and m.track_running_stats and m.running_mean is not None}


def buffers(name: str, norm: nn.Module) -> list[str]:
    """The names of what a norm keeps."""
    return [f"{name}.{k}" if name else k for k, _ in norm.named_buffers(recurse=False)]


def understood(model: nn.Module) -> set[str]:
    """Names of buffers whose initial values are those of the initial network: what norms keep, which use statistics of batches
    where they have moved (see Journey), and those of parametrisations, which make a weight."""
    parts = [f"{name}." for name, m in model.named_modules() if isinstance(m, ParametrizationList)]
    return {k for name, m in tracking(model).items() for k in buffers(name, m)} | {
        k for k, _ in model.named_buffers(remove_duplicate=False) if any(k.startswith(part) for part in parts)}


def settling(subject: Subject) -> Remark:
    """What is to be said of outputs in eval mode: norms that have seen no data normalise nothing, and after few batches what they
    keep is still in part what they were made with."""
    fresh, batches = 0, []
    for name, norm in tracking(subject.model).items():
        kept = {k.rpartition(".")[2]: subject.state[k] for k in buffers(name, norm)}
        if _untouched(kept):
            fresh += 1
        elif (seen := int(kept.get("num_batches_tracked", 0))) and norm.momentum is not None \
                and (1 - norm.momentum) ** seen > SETTLED:
            batches.append(seen)
    texts = [*([f"{fresh} {NO_DATA} yet, and normalise nothing"] if fresh else []),
             *([f"{len(batches)} {FEW_BATCHES} ({min(batches)}), and normalise in part by what they were made with"]
               if batches else [])]
    return Remark(text="; ".join(texts))


def _untouched(kept: Mapping[str, Tensor]) -> bool:
    mean, variance = kept.get("running_mean"), kept.get("running_var")
    return mean is not None and variance is not None and not mean.any() and bool((variance == 1).all())
