"""Training of Figure 6.4 of [layerwise]: a transformer on division modulo a prime, and what its features are between steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from richter.measures.features import FeatureAnalysis, analyse
from richter.models import modular_transformer
from richter.models.modular import ModularTransformer
from richter.runs import Writer
from richter.tasks import modular_arithmetic

SOLVED = 0.99  # of accuracies
NUMBERS = ("kappa_cka", "deff_intensity", "deff_utilisation", "quality_top", "utilisation_top", "constant")
CURVES = ("quality", "utilisation", "intensity")


@dataclass(frozen=True)
class Settings:
    """AdamW on cross-entropy, batches of ``batch`` pairs, no more than there are. Every so many steps accuracies and features are
    looked at, on the training pairs, on which they are fitted; kappa and quality on all pairs too, kappa on the test pairs, which
    are hardly more than the features. Training stops ``more`` steps after the test is solved. ``exchanged``: claims take what is
    before generalisation for what is after it, and the other way round."""

    p: int = 23
    d: int = 96
    share: float = 0.75
    lr: float = 1e-3
    decay: float = 2.0
    batch: int = 512
    steps: int = 3000
    more: int = 0
    every: int = 50
    seeds: tuple[int, ...] = (0,)
    exchanged: bool = False


@dataclass(frozen=True)
class Task:
    settings: Settings
    seed: int


def tasks(s: Settings) -> list[Task]:
    return [Task(replace(s, seeds=(), exchanged=False), seed) for seed in s.seeds]


@torch.no_grad()
def features(model: ModularTransformer, x: Tensor, y: Tensor, p: int) -> FeatureAnalysis:
    h = model.features(x)
    return analyse(h, F.one_hot(y, p).float(), model.head(h))


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    """Arrays by look."""
    s = t.settings
    data = modular_arithmetic(s.p, t.seed, operation="divide", share=s.share)
    fitted, held = (data.tokens, data.labels), (data.tokens_test, data.labels_test)
    model, draw = modular_transformer(s.p, s.d, seed=t.seed), torch.Generator().manual_seed(t.seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=s.lr, betas=(0.9, 0.98), weight_decay=s.decay, fused=True)
    looks, last = list[dict[str, Any]](), s.steps
    for step in range(s.steps + 1):
        if step % s.every == 0:
            now = look(model, fitted, held, s.p)
            run.scalars(step, train_accuracy=now["train"], test_accuracy=now["test"])
            looks.append({"step": step, **now})
            before, after = moments([row["train"] for row in looks], [row["test"] for row in looks])
            if before < after and now["test"] >= SOLVED:
                last = min(last, step + s.more)
        if step >= last:
            break
        rows = torch.randperm(len(fitted[1]), generator=draw)[:s.batch]
        loss = F.cross_entropy(model(fitted[0][rows]), fitted[1][rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        run.progress(step / s.steps)
    return {name: np.stack([np.asarray(row[name]) for row in looks]) for name in looks[0]}


def look(model: ModularTransformer, fitted: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor], p: int) -> dict[str, Any]:
    with torch.no_grad():
        train, test = ((model(x).argmax(1) == y).double().mean().item() for x, y in (fitted, held))
    everything = torch.cat([fitted[0], held[0]]), torch.cat([fitted[1], held[1]])
    now, whole, apart = (features(model, *pairs, p) for pairs in (fitted, everything, held))
    return {"train": train, "test": test, **{name: getattr(now, name) for name in (*NUMBERS, *CURVES)},
            "kappa_all": whole.kappa_cka, "quality_all": whole.quality_top, "kappa_test": apart.kappa_cka}


def moments(train: ArrayLike, test: ArrayLike) -> tuple[int, int]:
    """The looks at which training is solved, and from then on the test; the last one where it is not."""
    solved = np.asarray(train) >= SOLVED
    before = int(np.argmax(solved)) if solved.any() else len(solved) - 1
    known = np.asarray(test)[before:] >= SOLVED
    return before, before + int(np.argmax(known)) if known.any() else len(solved) - 1
