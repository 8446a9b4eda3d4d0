"""Lemmas 1 to 3, Corollaries and Propositions B.1.1-2 of [layerwise]: what the multilinear model and its extension learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.tasks.parity import multitask_parity
from richter.theory import emergence
from richter.theory.multilinear import Multilinear

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Vector = NDArray[np.float64]
Form = Literal["own", "frequencies", "rate", "two", "more", "fewer", "sum", "text", "start", "all"]
TINY = 1e-10  # R(0) of what is followed to the end of time


@dataclass(frozen=True)
class LayerwiseLemma1Settings:
    """``form`` chooses the wrong form of a statement in controls."""

    skills: int = 6
    examples: int = 20
    target: float = 5.0
    shots: int = 40
    draws: int = 400
    seeds: tuple[int, ...] = tuple(range(10))
    form: Form = "own"


def work(t: Task[LayerwiseLemma1Settings], run: Writer) -> Mapping[str, ArrayLike]:
    return {**multilinear(t), **extended(t), **by_examples(t), **by_units(t)}


def multilinear(t: Task[LayerwiseLemma1Settings]) -> dict[str, ArrayLike]:
    """Lemma 1 and its corollaries on a drawn data set: strengths by the flow, beside closed forms right and wrong."""
    s = t.settings
    task = multitask_parity(s.skills, 3 * s.skills, 3, 0.6, t.seed, target=s.target)
    d = task.counts(task.sample(s.examples, t.seed).skill).numpy()
    T = np.array([0.0, 0.5, 2.0, 8.0])
    model = Multilinear(0.6, s.skills, s.target, 0.5, 0.01)
    R = model.simulate(T, d)
    closed = {"own": model.skill_strength(T, d), "frequencies": model.skill_strength(T),
              "rate": replace(model, rate=1.0).skill_strength(T, d)}
    late = [60 * s.examples / s.target]
    end = np.asarray(Multilinear(0.6, s.skills, s.target, 1.0, TINY).simulate(late, d))[:, 0] / s.target
    N = 1 + t.seed % (s.skills - 1)  # basis functions; the others' strengths stay 0
    ends = np.concatenate([np.asarray(Multilinear(0.6, s.skills, s.target, 1.0, TINY).simulate([400.0]))[:N, 0] / s.target,
                           np.zeros(s.skills - N)])
    return {**{f"lemma1_{name}": np.abs(v - R).max() / s.target for name, v in closed.items()},
            "one_own": np.abs(end - (d > 0)).max(), "one_two": np.abs(end - (d > 1)).max() if (d == 1).any() else 1.0,
            "basis_own": np.abs(ends - (np.arange(s.skills) < N)).max(),
            "basis_more": np.abs(ends - (np.arange(s.skills) <= N)).max()}


def extended(t: Task[LayerwiseLemma1Settings]) -> dict[str, ArrayLike]:
    """Lemmas 2 and 3 and Eqs. B.37-B.41 along the flow from one start."""
    rng = np.random.default_rng((t.seed, 4))
    Phi, B0 = rng.standard_normal((8, 3)), 0.05 * rng.standard_normal(8)
    model = emergence.Extended(Phi, t.settings.target, 0.3, B0)
    a, B = (np.asarray(v) for v in model.simulate([0.0, 0.3, 1.0, 60.0]))
    moved, out = B - B[:, :1], {}
    for name, columns in (("own", Phi), ("fewer", Phi[:, :-1])):
        U = np.linalg.qr(columns)[0]
        out[f"span_{name}"] = np.linalg.norm(moved - U @ (U.T @ moved)) / np.linalg.norm(moved)
    for name, sign in (("own", -1), ("sum", 1)):
        kept = a**2 + sign * (B**2).sum(0)
        out[f"kept_{name}"] = np.abs(kept - kept[0]).max() / (a**2).max()
    U = np.linalg.qr(Phi)[0]
    outside = (np.eye(8) - U @ U.T) @ np.stack([B0 * np.asarray(model.limit[0]), B0 * 0.3, B[:, -1] * a[-1]], 1)
    size = np.linalg.norm(outside[:, 2])
    return {**out, "limit_own": np.linalg.norm(outside[:, 0] - outside[:, 2]) / size,
            "limit_start": np.linalg.norm(outside[:, 1] - outside[:, 2]) / size}


def by_examples(t: Task[LayerwiseLemma1Settings]) -> dict[str, ArrayLike]:
    """Prop. B.1.1 over Gaussian features: mean strengths, and how strength and loss belong together in each draw."""
    s, rng = t.settings, np.random.default_rng((t.seed, 5))
    counts = np.array([round(share * s.shots) for share in (0.1, 0.25, 0.5, 0.75, 0.95)])
    own, text = [], []
    for d in counts:
        R, L = emergence.projected(rng.standard_normal((s.shots, int(d))), s.target)
        own.append(abs(L - s.target**2 / 2 * (1 - R / s.target)) / s.target**2)
        text.append(abs(L - (s.target - R) ** 2 / 2) / s.target**2)
    return {"counts": counts, "mean": emergence.simulate_shots(counts.tolist(), s.shots, t.seed, s.draws),
            "relation_own": max(own), "relation_text": max(text)}


def by_units(t: Task[LayerwiseLemma1Settings]) -> dict[str, ArrayLike]:
    """Prop. B.1.2: the flow with N functions beside Eq. 5.9, and beside all or nothing."""
    units, N = 2 + t.seed % 4, [1, 3, 5, 8]
    flow = emergence.simulate_width(N, units, 3)
    return {"units_own": np.abs(flow - emergence.width_strength(N, units, 3)).max(),
            "units_all": np.abs(flow - emergence.width_strength(N, units, 3, partial=False)).max()}


def worst(name: str, other: Form, r: Results) -> float:
    return float(r[f"{name}_{other if r.settings.form == other else 'own'}"].max())


def shape(r: Results) -> float:
    """Largest |mean strength - law| over S."""
    law = emergence.data_strength(r["counts"][0], r.settings.shots, "text" if r.settings.form == "text" else "corrected")
    return float(np.abs(r["mean"].mean(0) - law).max())


@styled
def draw(results: Results) -> Figure:
    figure, (ax,) = panels(1, across=1)
    s = results.settings
    x = np.linspace(0, 1.2, 200)
    points(ax, results["counts"][0] / s.shots, results["mean"], COLOURS[0], "least squares, mean over draws")
    line(ax, x, emergence.data_strength(x, 1.0), label="R / S = d / D_c (B.42)")
    line(ax, x, emergence.data_strength(x, 1.0, "text"), COLOURS[1], "as printed (Eq. 5.5)", "--")
    label(ax, "examples over D_c", "R / S", "a D_c-shot learner", legend=True)
    caption(figure, "The strength of a skill grows in proportion to its examples; the printed square root lies below.")
    return figure


EXACT = "an identity; what is left is the integration of the flow"
PLACES = ("Lemma 1", "Cor. B.1.1", "Cor. B.1.2", "Lemma 2", "Lemma 3", "Prop. B.1.1", "Prop. B.1.2")
EXPERIMENT = Experiment(
    name="layerwise_lemma1", ref=Ref("layerwise", "Lemma 1"), title="what the multilinear model and its extension learn",
    places=PLACES, smoke=LayerwiseLemma1Settings(), paper=LayerwiseLemma1Settings(draws=2000, shots=100), work=work,
    over=("seed",), analysis=("form",),
    start={"seeds": (0,), "draws": 2}, figures={"layerwise_prop_b_1_1": draw},
    protocol="exact",
    claims=(
        Claim("largest |Eq. B.1 - integrated flow| over S, on drawn data sets", lambda r: max(
            worst("lemma1", "frequencies", r), worst("lemma1", "rate", r)), Interval(high=1e-8),
              (Control("frequencies in the place of shares", {"form": "frequencies"}),
               Control("an exponent without its 2", {"form": "rate"})), paper="exact", source=EXACT, places=("Lemma 1",),
              says="Lemma 1: Eq. B.1 solves the flow of the multilinear model on any data set."),
        Claim("largest |R / S - 1 if the skill was seen, else 0| after a long time", lambda r: worst("one", "two", r),
              Interval(high=1e-8), Control("seen twice", {"form": "two"}), paper="exact", source=EXACT, places=("Cor. B.1.1",),
              says="Corollary B.1.1: after a long time a skill is learned if it was seen once, and not at all otherwise."),
        Claim("largest |R / S - 1 for k <= N, else 0| after a long time, endless data", lambda r: worst("basis", "more", r),
              Interval(high=1e-8), Control("one basis function more", {"form": "more"}), paper="exact", source=EXACT,
              places=("Cor. B.1.2",), says="Corollary B.1.2: with endless data the first N skills are learned and no others."),
        Claim("part of the movement of B outside the span of the data, relative", lambda r: worst("span", "fewer", r),
              Interval(high=1e-8), Control("the span of all examples but one", {"form": "fewer"}), paper="0", source=EXACT,
              places=("Lemma 2",), says="Lemma 2: the weights move within the span of the data only."),
        Claim("drift of a^2 - |B|^2, over a^2 at the end", lambda r: worst("kept", "sum", r), Interval(high=1e-8),
              Control("a^2 + |B|^2", {"form": "sum"}), paper="conserved", source=EXACT, places=("Lemma 3",),
              says="Lemma 3: a^2 - |B|^2 is conserved."),
        Claim("largest |L - (S^2 / 2)(1 - R / S)| over S^2, draw by draw", lambda r: worst("relation", "text", r),
              Interval(high=1e-8), Control("L = (S - R)^2 / 2, by which Eq. 5.5 was had", {"form": "text"}), paper="Eq. 4.10",
              source=EXACT, places=("Prop. B.1.1",),
              says="Prop. B.1.1: the loss of a skill is L = (S^2 / 2)(1 - R / S), Eq. 4.10."),
        Claim("largest |mean of R / S over draws - d / D_c|", shape, Interval(high=0.02),
              Control("as printed, 1 - sqrt(1 - d / D_c)", {"form": "text"}), paper="1 - sqrt(1 - d / D_c)",
              source="independent check: .1003 to .9503 for .1 to .95", places=("Prop. B.1.1",),
              says="Eq. 5.5: with d of D_c examples a skill has strength 1 - sqrt(1 - d / D_c) on average (corrected: d / "
                   "D_c).", reason="misprint"),
        Claim("relative error of B.41 with a at the end", lambda r: worst("limit", "start", r), Interval(high=1e-8),
              Control("as printed, with a at the start", {"form": "start"}), paper="a at the start", source=EXACT,
              places=("Prop. B.1.1",),
              says="Eq. B.41 gives the strength of a skill from the weight a at the start (corrected: a at the end).",
              reason="misprint"),
        Claim("largest |R / S - Eq. 5.9|, N functions, endless data", lambda r: worst("units", "all", r), Interval(high=1e-8),
              Control("all functions of a skill or nothing", {"form": "all"}), paper="exact", source=EXACT,
              places=("Prop. B.1.2",), says="Prop. B.1.2: N basis functions of N_c learn a skill up to Eq. 5.9."),
    ))
