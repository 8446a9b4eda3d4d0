"""Networks of two layers that learn multitask sparse parity, while time, data or width is scarce.  [layerwise, App. C.3]"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from richter.models import mlp
from richter.runs import Writer
from richter.tasks.parity import MultitaskParity, multitask_parity
from richter.theory.emergence import Form

Kind = Literal["time", "data", "width"]
KINDS: tuple[Kind, ...] = ("time", "data", "width")
Law = Literal["own", "equal", "rank", "frequency"]
Vector = NDArray[np.float64]
LEARNED = 0.9  # once every skill has so much, the training may end


@dataclass(frozen=True)
class Settings:
    """App. C.3 with its table's deviation of 0.01 (its text has 0.001). ``one_*`` is of the network with a single skill. ``law``,
    ``form``, ``late``, ``early``, ``few``, ``many``, ``narrow``, ``wide``, ``table`` and ``turned`` are what claims look at."""

    skills: int = 2
    bits: int = 32
    alpha: float = 0.6
    target: float = 5.0
    lr: float = 0.05
    deviation: float = 0.01
    width: int = 400
    batch: int = 500
    one_steps: int = 1000
    steps: int = 4000
    every: int = 25
    data_width: int = 128
    data_batch: int = 250
    one_data_steps: int = 2000
    data_steps: int = 7000
    one_examples: tuple[int, ...] = (200, 300, 600, 1500)
    examples: tuple[int, ...] = (300, 1200, 5000)
    adam: float = 0.01
    decay: float = 5e-5
    width_deviation: float = 0.1
    width_batch: int = 500
    one_width_steps: int = 2000
    width_steps: int = 4000
    one_widths: tuple[int, ...] = (1, 2, 4, 8)
    widths: tuple[int, ...] = (2, 4, 10, 24)
    seeds: tuple[int, ...] = (0,)
    law: Law = "own"  # where skills appear: as their frequency says, all with the first, by their rank, by the inverse frequency
    form: Form = "corrected"
    late: int = 900
    early: int = 400
    few: int = 300
    many: int = 1500
    narrow: int = 1
    wide: int = 8
    table: int = 10
    turned: bool = False  # skills in the order of the rarest first


LOOKED_AT = ("law", "form", "late", "early", "few", "many", "narrow", "wide", "table", "turned")


@dataclass(frozen=True)
class Task:
    settings: Settings
    kind: Kind
    seed: int


def tasks(s: Settings) -> list[Task]:
    plain = Settings()
    alone = replace(s, seeds=(), **{name: getattr(plain, name) for name in LOOKED_AT})
    return [Task(alone, kind, seed) for seed in s.seeds for kind in KINDS]


def parity(s: Settings, skills: int, seed: int) -> MultitaskParity:
    return multitask_parity(skills, s.bits, 3, s.alpha, seed, target=s.target)


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    """R / S of a single skill, and of all [skills, ...], along the steps, the amounts of data or the widths."""
    s = t.settings
    one, many = parity(s, 1, t.seed), parity(s, s.skills, t.seed)
    if t.kind == "time":
        return {"one_time": in_time(one, s.width, s.deviation, s.lr, s.batch, s.one_steps, s.every, t.seed, run)[0],
                "time": in_time(many, s.width, s.deviation, s.lr, s.batch, s.steps, s.every, t.seed, run)}
    if t.kind == "data":
        options = s.data_width, s.deviation, s.lr, s.data_batch
        single = [in_data(one, D, *options, s.one_data_steps, t.seed)[0] for D in s.one_examples]
        rows = []
        for i, D in enumerate(s.examples):
            rows.append(in_data(many, D, *options, s.data_steps, t.seed))
            run.progress((i + 1) / len(s.examples))
        return {"one_data": np.array(single), "data": np.stack(rows, 1)}
    options_w = s.width_deviation, s.adam, s.decay, s.width_batch
    return {"one_width": in_width(one, s.one_widths, *options_w, s.one_width_steps, t.seed, run)[0],
            "width": in_width(many, s.widths, *options_w, s.width_steps, t.seed, run)}


# ------------------------------------------------------------------------------------------------ networks


def network(task: MultitaskParity, width: int, deviation: float, seed: int) -> nn.Sequential:
    """All weights and biases N(0, deviation^2)."""
    model, draw = mlp([task.inputs, width, 1], seed=seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(deviation * torch.randn(p.shape, generator=draw))
    return model


def descend(model: nn.Module, batches: Callable[[], tuple[Tensor, Tensor]], lr: float, steps: int,
            ended: Callable[[int, float], bool]) -> None:
    """Plain stochastic descent on the mean of (f - y)^2 / 2 until ``ended(step, loss)``, which is asked before each step."""
    optimiser, loss = torch.optim.SGD(model.parameters(), lr=lr), torch.tensor(np.inf)
    for step in range(steps + 1):
        if ended(step, float(loss.detach())) or step == steps:
            return
        x, y = batches()
        loss = (model(x) - y).square().mean() / 2
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def in_time(task: MultitaskParity, width: int, deviation: float, lr: float, batch: int, steps: int, every: int, seed: int,
            run: Writer) -> Vector:
    """R_k / S [skills, times] at steps 0, every, ..., from endless data. When all skills are learned the training ends, and the
    last strengths are told for later steps."""
    model, stream = network(task, width, deviation, seed), task.stream(batch, seed)
    rows: list[Vector] = []

    def ended(step: int, _: float) -> bool:
        if step % every:
            return False
        rows.append((task.skill_strength(model, n=1024).strength / task.target).numpy())
        run.progress(step / steps)
        return bool((rows[-1] > LEARNED).all())

    def batches() -> tuple[Tensor, Tensor]:
        x, y, _ = next(stream)
        return x, y

    descend(model, batches, lr, steps, ended)
    rows += [rows[-1]] * (steps // every + 1 - len(rows))
    return np.stack(rows, 1)


def in_data(task: MultitaskParity, examples: int, width: int, deviation: float, lr: float, batch: int, steps: int,
            seed: int) -> Vector:
    """R_k / S [skills] after training on so many examples; it ends where their mean loss is a thousandth of what it was."""
    model, data = network(task, width, deviation, seed), task.sample(examples, seed)
    draw, mean = torch.Generator().manual_seed(seed), 1.0

    def batches() -> tuple[Tensor, Tensor]:
        rows = torch.randint(examples, (min(batch, examples),), generator=draw)
        return data.x[rows], data.y[rows]

    def ended(step: int, loss: float) -> bool:
        nonlocal mean
        if step:
            mean += 0.02 * (loss / (task.target**2 / 2) - mean)
        return mean < 1e-3

    descend(model, batches, lr, steps, ended)
    return np.asarray((task.skill_strength(model, n=4096).strength / task.target).numpy())


def in_width(task: MultitaskParity, widths: Sequence[int], deviation: float, lr: float, decay: float, batch: int, steps: int,
             seed: int, run: Writer) -> Vector:
    """R_k / S [skills, widths] of networks of several widths, trained by Adam on the same endless data: side by side, in one
    first layer, each with a read-out of its own units, so that none sees another."""
    owner = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths))
    own, draw = nn.functional.one_hot(owner, len(widths)).float(), torch.Generator().manual_seed(seed)
    shapes = (task.inputs, len(owner)), (len(owner),), (len(owner), 1), (len(widths),)
    W, b, w, c = ((deviation * torch.randn(shape, generator=draw)).requires_grad_(True) for shape in shapes)
    optimiser, stream = torch.optim.Adam([W, b, w, c], lr=lr, weight_decay=decay), task.stream(batch, seed)

    def outputs(x: Tensor) -> Tensor:
        return torch.relu(x @ W + b) @ (w * own) + c

    for step in range(steps):
        x, y, _ = next(stream)
        loss = (outputs(x) - y).square().mean(0).sum() / 2
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        run.progress(step / steps)
    columns = [task.skill_strength(lambda x, i=i: outputs(x)[:, i], n=4096).strength for i in range(len(widths))]  # type: ignore[misc]
    return np.asarray((torch.stack(columns, 1) / task.target).numpy())

