"""Table 4.2 of [layerwise]: examples of multitask sparse parity, and the skill functions on them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.tasks.parity import multitask_parity


@dataclass(frozen=True)
class LayerwiseTable4_2Settings:
    """Claims choose ``basis``, ``expected`` and ``labelled``."""

    skills: int = 5
    bits: int = 32
    alpha: float = 0.6
    target: float = 5.0
    n: int = 50_000
    seeds: tuple[int, ...] = tuple(range(10))
    basis: Literal["skills", "parities"] = "skills"  # with the control bit, or the parities alone
    expected: Literal["law", "slower"] = "law"  # frequencies by alpha, or by half of it
    labelled: Literal["own", "next"] = "own"  # each example's skill, or the next one


def work(t: Task[LayerwiseTable4_2Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    task = multitask_parity(s.skills, s.bits, 3, s.alpha, t.seed, target=s.target)
    x, y, skill = task.sample(s.n, t.seed)
    g = task.functions(x).double().numpy()
    bits = x[:, s.skills:].double().numpy()
    parities = np.stack([np.prod(1 - 2 * bits[:, where], 1) for where in task.positions.tolist()], 1)
    out: dict[str, ArrayLike] = {"counts": np.bincount(skill.numpy(), minlength=s.skills)}
    for name, functions in (("skills", g), ("parities", parities)):
        gram = np.abs(functions[:, :, None] * functions[:, None, :]).max(0)
        out[f"overlap_{name}"] = max(gram[a, b] for a, b in itertools.permutations(range(s.skills), 2))
    for name, shift in (("own", 0), ("next", 1)):
        chosen = parities[np.arange(s.n), (skill.numpy() + shift) % s.skills]
        out[f"wrong_{name}"] = np.mean(y[:, 0].numpy() != s.target * chosen)
    return out


def surprise(r: Results) -> float:
    """The largest deviation of a skill's count from its expectation, in standard deviations."""
    s = r.settings
    P = np.arange(1, s.skills + 1) ** -(1 + s.alpha / (1 if s.expected == "law" else 2))
    P = P / P.sum()
    return float(np.abs((r["counts"].sum(0) / r["counts"].sum() - P) / np.sqrt(P * (1 - P) / r["counts"].sum())).max())


EXPERIMENT = Experiment(
    name="layerwise_table4_2", ref=Ref("layerwise", "Table 4.2"), title="multitask sparse parity and its skill functions",
    smoke=LayerwiseTable4_2Settings(), paper=LayerwiseTable4_2Settings(), work=work, over=("seed",),
    analysis=("basis", "expected", "labelled"), start={"n": 10, "seeds": (0,)}, quick=True,
    protocol="exact",
    claims=(
        Claim("largest |g_k g_k'| of two skills on any example", lambda r: float(r[f"overlap_{r.settings.basis}"].max()),
              Interval(high=0.0), Control("the parities without their control bit", {"basis": "parities"}),
              paper="0, Eq. 4.3", source="an identity",
              says="Eq. 4.3: two skill functions never both differ from 0 on an example."),
        Claim("share of examples whose target is not S times the parity of the bits of its skill",
              lambda r: float(r[f"wrong_{r.settings.labelled}"].max()), Interval(high=0.0),
              Control("the bits of the next skill", {"labelled": "next"}), paper="0, Eq. 4.4", source="an identity",
              says="Eq. 4.4: the target is S times the parity of the bits of the skill."),
        Claim("largest deviation of a skill's frequency from A k^-(alpha + 1), in standard deviations", surprise,
              Interval(high=4.0), Control("half of alpha", {"expected": "slower"}), paper="Eq. 4.1",
              source="five normal deviates: beyond 4 once in 3,000",
              says="Eq. 4.1: the k-th skill has frequency A k^-(alpha + 1)."),
    ))
