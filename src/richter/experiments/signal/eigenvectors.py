"""The networks of Figure 5 of [signal]: the largest eigenvectors of H_w before, during and after the time at which alignment
rises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn

from richter.experiments.signal.networks import balanced, fit, he, images, profile
from richter.experiments.signal.seeded import Seeded, each_seed
from richter.instrument.probe import Probe
from richter.measures.curvature import early_step, hessian
from richter.runs import Writer

SHOWN = (1, 7, 10)  # layers of the paper's panels


@dataclass(frozen=True)
class Settings:
    """Ten layers, bias-free He networks on standardised images, SGD with momentum 0.9 and weight decay 1e-4, batches of 128."""

    n: int = 2_000
    width: int = 64
    epochs: int = 15
    lr: float = 0.005  # Table 1
    vectors: int = 100  # of largest absolute eigenvalue
    examples: int = 200  # of H_w
    steps: tuple[float, ...] = (1e-6, 1e-4, 0.005)  # rates of single steps, with all examples
    read: Literal["own", "first", "random"] = "own"  # the rivals: the network before training, random directions
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def tasks(s: Settings) -> list[Seeded[Settings]]:
    return each_seed(s, read="own")


def work(t: Seeded[Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = images("cifar10", s.n, t.seed)
    model = he([data.x.shape[1], *[s.width] * 9, 10], t.seed)
    probe, few = balanced(data.x, data.y, s.examples), balanced(data.x, data.y, 50)
    states, heights = list[dict[str, torch.Tensor]](), list[float]()

    def after(epoch: int) -> None:
        states.append({k: v.clone() for k, v in model.state_dict().items()})
        heights.append(profile(model, few, errors=False)[0].max())

    fit(model, data, s.lr, s.epochs, run, seed=t.seed, after=after)
    rise = int(np.diff(heights).argmax()) if s.epochs else 0
    rows = [second_order(model, state, probe, s, t.seed) for state in (states[0], states[rise], states[-1])]
    return {"heights": heights, "rise": rise, **{k: np.array([row[k] for row in rows]) for k in rows[0]}}


def second_order(model: nn.Module, state: Mapping[str, torch.Tensor], probe: Probe, s: Settings,
                 seed: int) -> dict[str, ArrayLike]:
    """The largest eigenpairs of H_w, their energy in every layer, and how steps look in their span and in a random one."""
    model.load_state_dict(state)
    H = hessian(model, probe)
    pairs = H.top(s.vectors, seed=seed)
    energy = torch.stack(list(H.energy(pairs.vectors).values()))  # layer, vector
    draw = torch.Generator().manual_seed(seed)
    other = torch.linalg.qr(torch.randn(H.size, s.vectors, generator=draw, dtype=torch.float64))[0].T
    steps = [early_step(model, probe, lr) for lr in s.steps]
    return {"values": pairs.values.numpy(), "energy": energy.mean(1).numpy(), "each": energy[[k - 1 for k in SHOWN]].numpy(),
            "projected": [e.projected(pairs.vectors) for e in steps], "random": [e.projected(other) for e in steps],
            "flips": [e.flips / e.units for e in steps]}
