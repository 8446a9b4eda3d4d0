"""Figures 5.1 and 5.2 and Table 5.1 of [layerwise]: one skill predicts when the others appear, in time, data and width.
Networks of two layers learn multitask sparse parity, while time, data or width is scarce. [layerwise, App. C.3]"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.models import mlp
from richter.report.drawing import COLOURS, band, caption, label, line, panels, points, styled
from richter.tasks.parity import MultitaskParity, multitask_parity
from richter.theory.emergence import Emergence, Form, crossing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Kind = Literal["time", "data", "width"]
KINDS: tuple[Kind, ...] = ("time", "data", "width")
Law = Literal["own", "equal", "rank", "frequency"]
Vector = NDArray[np.float64]
LEARNED = 0.9  # once every skill has so much, the training may end


@dataclass(frozen=True)
class LayerwiseFig5_1Settings:
    """App. C.3 with its table's deviation of 0.01 (its text has 0.001). ``one_*`` belongs to the network with a single skill.
    Claims choose ``law``, ``form``, ``late``, ``early``, ``few``, ``many``, ``narrow``, ``wide``, ``table`` and ``turned``."""

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
    kinds: ClassVar = KINDS


LOOKED_AT = ("law", "form", "late", "early", "few", "many", "narrow", "wide", "table", "turned")


def parity(s: LayerwiseFig5_1Settings, skills: int, seed: int) -> MultitaskParity:
    """Multitask parity data of the settings."""
    return multitask_parity(skills, s.bits, 3, s.alpha, seed, target=s.target)


def work(t: Task[LayerwiseFig5_1Settings], run: Writer) -> Mapping[str, ArrayLike]:
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
    """Network with all weights and biases N(0, deviation^2)."""
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


INITIAL = 1e-3  # R(0) / S that B^2 is told for; what is predicted does not depend on it


# ------------------------------------------------------------------------------------------------ claims


def axis(s: LayerwiseFig5_1Settings, kind: Kind, one: bool = False) -> Vector:
    """Values of the resource: steps, amounts of data or widths."""
    if kind == "time":
        return np.arange(0, (s.one_steps if one else s.steps) + 1, s.every, dtype=float)
    values = {"data": (s.one_examples, s.examples), "width": (s.one_widths, s.widths)}[kind]
    return np.array(values[0 if one else 1], dtype=float)


def curves(r: Results, kind: Kind, one: bool = False) -> Vector:
    """R / S [x], or [skills, x], of one seed; of more, the median at each x."""
    return np.asarray(np.median(r.where(kind=kind)[f"one_{kind}" if one else kind], 0))


def half_point(x: Vector, strength: Vector) -> float:
    """Value of x at which a strength reaches one half. Twice the last x for a curve that never does, half the first x for one
    that begins above."""
    if strength[0] >= 0.5:
        return float(x[0]) / 2
    return crossing(x, strength) if strength.max() >= 0.5 else 2 * float(x[-1])


def calibrated(r: Results, kind: Kind, s: LayerwiseFig5_1Settings) -> Emergence:
    """Model of emergence, calibrated on the single skill of the same seed."""
    x = axis(s, kind, one=True)
    at = half_point(x, curves(r, kind, one=True))
    curve = (np.array([at / 2, at]), np.array([0.0, 0.5]))
    return Emergence.calibrated(s.target, s.lr, INITIAL, s.form, **{kind: curve})


def predicted(r: Results, kind: Kind) -> Vector:
    """Values of x at which each skill is expected to be half learned, from the network that learns one skill, or by a rival
    law."""
    s = r.settings
    model, P = calibrated(r, kind, s), np.arange(1, s.skills + 1) ** -(1 + s.alpha)
    P = P / P.sum()
    own = {"time": lambda: model.time(P), "data": lambda: model.data(P), "width": lambda: model.width(s.skills)}[kind]()
    by = {"own": own / own[0], "equal": np.ones(s.skills), "rank": np.arange(1.0, s.skills + 1), "frequency": P[0] / P}
    return np.asarray(own[0] * by[s.law])


def measured(r: Results, kind: Kind) -> Vector:
    """Half points of the measured learning curves, one per skill."""
    s = r.settings
    values = np.array([half_point(axis(s, kind), row) for row in curves(r, kind)])
    return values[::-1] if s.turned else values


def apart(r: Results, kind: Kind) -> float:
    """The largest distance between where a skill appears and where it was expected, in decades."""
    return float(np.abs(np.log10(measured(r, kind) / predicted(r, kind))).max())


def step_up(r: Results) -> float:
    """The smallest ratio of the times of two neighbouring skills."""
    times = measured(r, "time")
    return float((times[1:] / times[:-1]).min())


def at_step(r: Results, step: int) -> float:
    """Strength of the calibrated skill at a step."""
    s = r.settings
    return float(np.interp(step, axis(s, "time", True), curves(r, "time", True)))


def extreme_of_single_skill(r: Results, kind: Kind, x: int, worst: Callable[[Vector], float]) -> float:
    """Largest strength of a single skill up to x (``np.max``), or the smallest from x on (``np.min``)."""
    values, where = curves(r, kind, True), axis(r.settings, kind, True)
    return float(worst(values[where <= x] if worst is np.max else values[where >= x]))


def in_table(r: Results, k: int) -> float:
    """Strength R_k / S of a skill at the width of Table 5.1."""
    s = r.settings
    order = np.arange(s.skills)[::-1] if s.turned else np.arange(s.skills)
    return float(curves(r, "width")[order[k - 1], list(s.widths).index(s.table)])


CHECK = "independent check of the recipe"
DECADES = "independent check: networks are up to 40 % slower for rare skills, log10 1.4 = .15; asked of data and width too"
EQUAL = Control("every skill where the first appears", {"law": "equal"})
RANK = Control("by rank: k times the first", {"law": "rank"})
INVERSE = Control("by the inverse of the frequency", {"law": "frequency"})
EXCHANGED = Control("few and many exchanged", {"few": 1500, "many": 300})
NARROWED = Control("narrow and wide exchanged", {"narrow": 8, "wide": 1})
FEWER = Control("with 2 units", {"table": 2})
TURNED = Control("the rarest skill in the place of the first", {"turned": True})

FIG_5_2, FIG_5_1, TABLE, SETTINGS = ("Fig. 5.2",), ("Fig. 5.1",), ("Table 5.1",), ("App. C.3, table",)
CLAIMS = (
    Claim("time: R / S of a single skill at step 400", lambda r: at_step(r, r.settings.early), Interval(high=0.5),
          Control("at step 900", {"early": 900}), source=f"{CHECK}: half of it between steps 400 and 900", over="seed",
          places=("Fig. 5.2", "App. C.3, table"), own=True),
    Claim("time: R / S of a single skill at step 900", lambda r: at_step(r, r.settings.late), Interval(low=0.5),
          Control("at step 100", {"late": 100}), source=f"{CHECK}: half of it between steps 400 and 900", over="seed",
          places=("Fig. 5.2", "App. C.3, table"), own=True),
    Claim("data: largest R / S of a single skill with 300 examples or fewer",
          lambda r: extreme_of_single_skill(r, "data", r.settings.few, np.max), Interval(high=0.3), EXCHANGED, paper="D_c = 800",
          source=CHECK,
          over="seed", places=FIG_5_2, says="A single skill is not learned from few examples (D_c = 800): here 300 or fewer."),
    Claim("data: smallest R / S of a single skill with 1,500 examples or more",
          lambda r: extreme_of_single_skill(r, "data", r.settings.many, np.min), Interval(low=0.9), EXCHANGED, paper="D_c = 800",
          source=CHECK,
          over="seed", places=FIG_5_2, says="A single skill is learned from many examples (D_c = 800): here 1,500 or more."),
    Claim("width: R / S of a single skill with one unit", lambda r: extreme_of_single_skill(r, "width", r.settings.narrow,
                                                                                            np.max),
          Interval(high=0.35), NARROWED, paper="N_c = 4", source=CHECK, over="seed", places=FIG_5_2,
          says="A single skill needs N_c = 4 hidden units: one unit does not learn it."),
    Claim("width: smallest R / S of a single skill with 8 units or more",
          lambda r: extreme_of_single_skill(r, "width", r.settings.wide, np.min), Interval(low=0.9), NARROWED, paper="N_c = 4",
          source=CHECK,
          over="seed", places=FIG_5_2, says="A single skill needs N_c = 4 hidden units: with 8 or more it is learned."),
    Claim("time: smallest ratio of the half-times of a skill and of the one before it", step_up, Interval(low=1.0001), TURNED,
          paper="in the order of frequency", source=CHECK, over="seed", places=FIG_5_1,
          says="Skills emerge in the order of their frequency."),
    Claim("time: largest distance of a skill's half-time from what one skill predicts, in decades", lambda r: apart(r, "time"),
          Interval(high=0.15), (EQUAL, RANK), paper="predicted by B^2 = 1/22", source=DECADES, over="seed", places=FIG_5_1,
          says="Calibrated on one skill (B^2 = 1/22), the model predicts when the other skills emerge in time."),
    Claim("data: largest distance of a skill's half-way amount of data from what one skill predicts, in decades",
          lambda r: apart(r, "data"), Interval(high=0.15), (EQUAL, RANK), paper="predicted by D_c = 800", source=DECADES,
          over="seed", places=FIG_5_1,
          says="Calibrated on one skill (D_c = 800), the model predicts from how many examples the other skills emerge."),
    Claim("width: largest distance of a skill's half-way width from what one skill predicts, in decades",
          lambda r: apart(r, "width"), Interval(high=0.15), (EQUAL, INVERSE), paper="predicted by N_c = 4", source=DECADES,
          over="seed", places=FIG_5_1,
          differs={"smoke": "0.22: one network of each of four widths, 2, 4, 10 and 24",
                   "paper": "0.49, and 0.45 by the inverse of the frequency: the fifth skill is not learned by up to 32 units in "
                            "12,000 steps in four of five seeds, and stands at 64, twice the widest; one network skips a skill "
                            "that a narrower one has. In the median network the first three skills are half learned within 0.11 "
                            "decades of what is expected (2.8, 8.8, 13.5 units for 2.3, 6.9, 11.5)"},
          says="Calibrated on one skill (N_c = 4), the model predicts at which width the other skills emerge."),
    Claim("R / S of the first skill with 10 units", lambda r: in_table(r, 1), Interval(low=0.9), FEWER, paper="0.98",
          source="Table 5.1", over="seed", places=TABLE, says="With 10 hidden units the first skill is learned: R / S = 0.98."),
    Claim("R / S of the last skill with 10 units", lambda r: in_table(r, r.settings.skills), Interval(high=0.1), TURNED,
          paper="0.0", source="Table 5.1", over="seed", places=TABLE,
          differs={"smoke": "there are but two skills, and ten units are enough for both"},
          says="With 10 hidden units the last skill is not learned: R / S = 0.0."),
    Claim("R / S of the second skill with 10 units", lambda r: in_table(r, 2), Interval(low=0.9),
          FEWER, paper="0.95 in the median of ten runs", source="Table 5.1", over="seed",
          places=TABLE, says="With 10 hidden units the second skill is learned: R / S = 0.95 in the median of ten runs."),
)


# ------------------------------------------------------------------------------------------------ pictures

AXES = {"time": "steps", "data": "examples D", "width": "units N"}


def draw_with_model(ax: Axes, results: Results, kind: Kind, one: bool, letter: str) -> None:
    """Draw networks as a band over seeds or as points, and the calibrated model as lines."""
    s, x = results.settings, axis(results.settings, kind, one)
    rows = results.where(kind=kind)[f"one_{kind}" if one else kind]
    rows = rows[:, None] if one else rows
    models = [calibrated(results.where(seed=seed), kind, s) for seed in results.distinct("seed")]
    P = np.arange(1, (1 if one else s.skills) + 1) ** -(1 + s.alpha)
    fine = np.linspace(x[0], x[-1], 300) if kind == "width" else np.geomspace(max(x[0], s.every), x[-1], 300)
    for k in range(rows.shape[1]):
        if kind == "time":
            band(ax, x[1:], rows[:, k, 1:], COLOURS[k], f"skill {k + 1}")
        else:
            points(ax, x, rows[:, k], COLOURS[k], f"skill {k + 1}")
        lines = {"time": lambda m, k=k: m.in_time(fine, P / P.sum())[k], "data": lambda m, k=k: m.in_data(fine, P / P.sum())[k],
                 "width": lambda m, k=k: m.in_width(fine, len(P))[k]}[kind]
        line(ax, fine, np.median([lines(m) for m in models], 0), COLOURS[k], style="--")  # type: ignore[no-untyped-call]
    label(ax, AXES[kind], "R / S", f"{letter}: {kind}", log="" if kind == "width" else "x", legend=kind == "time")


@styled
def draw_calibration(results: Results) -> Figure:
    """Figure of the single skill on which the model is calibrated."""
    figure, axes = panels(3, across=3)
    for ax, kind, letter in zip(axes, KINDS, "abc", strict=True):
        draw_with_model(ax, results, kind, True, letter)
    s, seeds = results.settings, results.distinct("seed")
    B, D, N = (np.median([getattr(calibrated(results.where(seed=seed), kind, s), name) for seed in seeds])
               for kind, name in zip(KINDS, ("speed", "shots", "units"), strict=True))
    caption(figure, f"A single skill fixes one constant for each resource (dashed): B² = 1/{1 / B:.0f} (for R(0) / S = "
                    f"{INITIAL:g}), D_c = {D:.0f}, N_c = {N:.1f}. The network turns more sharply in data than the model.")
    return figure


@styled
def draw_prediction(results: Results) -> Figure:
    """Figure of several skills and their prediction."""
    figure, axes = panels(3, across=3)
    for ax, kind, letter in zip(axes, KINDS, "abc", strict=True):
        draw_with_model(ax, results, kind, False, letter)
    each = {kind: np.median([apart(results.where(seed=seed), kind) for seed in results.distinct("seed")]) for kind in KINDS}
    caption(figure, "Skills of a network (solid, points) appear one after the other where the model says that was calibrated on "
                    "one skill alone (dashed). Worst skill, median over seeds: "
                    + ", ".join(f"{kind} {value:.2f}" for kind, value in each.items()) + " decades off.")
    return figure


EXPERIMENT = Experiment(
    name="layerwise_fig5_1", ref=Ref("layerwise", "Fig. 5.1"), title="one skill says when the others appear",
    places=(*FIG_5_1, *FIG_5_2, *TABLE, *SETTINGS), smoke=LayerwiseFig5_1Settings(), work=work, over=("kind", "seed"),
    analysis=LOOKED_AT,
    protocol={"Fig. 5.1": "reduced: width 500 of 1,000, batches of 1,000 of 4,000, fewer steps",
              "Fig. 5.2": "reduced: width 500 of 1,000, batches of 1,000 of 4,000, fewer steps",
              "Table 5.1": "reduced: five of ten runs, 12,000 steps at a tenfold rate for 500,000",
              "App. C.3, table": "reduced: width 500 of 1,000, batches of 1,000 of 4,000, 20,000 of 500,000 steps"},
    claims=CLAIMS,
    paper=LayerwiseFig5_1Settings(skills=5, width=500, batch=1000, one_steps=1200, steps=16_000, every=50, one_data_steps=3000,
                   data_steps=20_000, one_examples=(100, 200, 300, 450, 600, 800, 1100, 1500, 3000),
                   examples=(500, 1000, 2000, 4000, 8000, 16_000, 32_000), width_batch=1000, one_width_steps=4000,
                   width_steps=12_000, one_widths=(1, 2, 3, 4, 5, 6, 8, 10),
                   widths=(2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32), seeds=tuple(range(5))),
    start={"one_steps": 50, "steps": 50, "one_data_steps": 1, "data_steps": 1, "one_width_steps": 1, "width_steps": 1,
           "seeds": (0,)},
    figures={"layerwise_fig5_2": draw_calibration, "layerwise_fig5_1": draw_prediction},
    reduced="two skills of five, one seed of 5, width 400 of 1,000, fewer amounts of data and widths, shorter training",
    missing={"Fig. 5.1": "time: width 500 of 1,000, batches of 1,000 of 4,000, 16,000 steps of 30,000; data: width 128, batches "
                         "of 250, 20,000 steps of 500,000; width: Adam at 0.01 for 12,000 steps in the place of 0.001 for "
                         "500,000, weights of deviation 0.1",
             "Fig. 5.2": "the sizes are those said of Fig. 5.1",
             "Table 5.1": "five of ten runs, and Adam at 0.01 for 12,000 steps in the place of 0.001 for 500,000",
             "App. C.3, table": "width 500 of 1,000, batches of 1,000 of 4,000, 20,000 steps of 500,000 at most"})
