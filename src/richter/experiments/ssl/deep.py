"""Nonlinear networks trained by joint-embedding losses on noisy digits: do embeddings grow one dimension at a time, and does the
tangent kernel predict what is learned?  [ssl, Sec. 5]"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.kernels.ntk import ntk
from richter.measures.stages import find
from richter.models import mlp
from richter.models.joint_embedding import barlow_twins, simclr, vicreg
from richter.report.drawing import COLOURS, caption, label, line, panels, styled
from richter.tasks import digits
from richter.theory.self_supervised import KernelBarlowTwins

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Numbers = NDArray[np.float64]
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"barlow twins": barlow_twins, "vicreg": vicreg, "simclr": simclr}
GRID = tuple(("simclr", scale, rate) for scale in (0.1, 0.3, 1.0) for rate in (1e-3, 1e-2, 1e-1))
KINDS = (("barlow twins", 0.6, 0.01), ("vicreg", 0.6, 0.001), *GRID)


@dataclass(frozen=True)
class SslDeepSettings:
    """An MLP with two hidden layers, trained on one batch of pairs by gradient descent. ``scale`` multiplies its weights."""

    n: int = 256
    width: int = 256
    d: int = 8
    noise: float = 0.35
    steps: int = 4_000
    every: int = 5
    methods: tuple[str, ...] = tuple(k[0] for k in KINDS)
    scales: tuple[float, ...] = tuple(k[1] for k in KINDS)
    rates: tuple[float, ...] = tuple(k[2] for k in KINDS)
    larger: float = 1.0  # a factor of every scale
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    kernel: Literal["end", "start", "random"] = "end"


def work(t: Task[SslDeepSettings], run: Writer) -> Mapping[str, ArrayLike]:
    s, loss_of = t.settings, LOSSES[t.method]
    x = digits(seed=t.seed).x[:s.n]
    draw = torch.Generator().manual_seed(t.seed)
    x1, x2 = (x + s.noise * torch.randn(x.shape, generator=draw) for _ in range(2))
    model = mlp([x.shape[1], s.width, s.width, s.d], bias=False, scale=t.scale * s.larger, seed=t.seed)
    views = torch.cat([x1, x2])
    first = ntk(model, views)
    optimiser = torch.optim.SGD(model.parameters(), t.rate)
    losses, spectra = list[float](), list[Numbers]()
    for step in range(s.steps):
        z1, z2 = model(x1), model(x2)
        loss = loss_of(z1, z2)
        if not torch.isfinite(loss):
            break
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % s.every == 0:
            losses.append(loss.item())
            spectra.append(spectrum(torch.cat([z1, z2]).detach()))
            run.progress(step / s.steps)
    Z = model(views).detach().double().numpy()
    count = 1 + (s.steps - 1) // s.every
    finished = len(losses) == count and np.isfinite(Z).all()  # it did not diverge
    kernels = {"start": first, "end": ntk(model, views)} if finished else {}
    overlaps = {k: overlap(KernelBarlowTwins(K.double().numpy()).embed(K.double().numpy(), s.d), Z) for k, K in kernels.items()
                if torch.isfinite(K).all()}
    random = overlap(np.random.default_rng(t.seed).standard_normal(Z.shape), Z)
    return {"stages": len(find(s.every * np.arange(count), losses)) if finished else 0,
            "losses": losses if finished else np.full(count, np.nan),
            "spectra": np.array(spectra) if finished else np.full((count, s.d), np.nan),
            "overlap_end": overlaps.get("end", np.nan), "overlap_start": overlaps.get("start", np.nan), "overlap_random": random}


def spectrum(Z: Tensor) -> Numbers:
    """Eigenvalues of the embedding's covariance, largest first."""
    Z = Z.double() - Z.double().mean(0)
    return torch.linalg.eigvalsh(Z.T @ Z / len(Z)).flip(0).clamp(min=0).numpy()


def overlap(A: ArrayLike, B: Numbers) -> float:
    """Share of the span of B's columns that lies in the span of A's: |Q_A^T Q_B|^2 / d."""
    Q, R = (np.linalg.qr(np.asarray(M, np.float64))[0] for M in (A, B))
    return float(np.square(Q.T @ R).sum() / B.shape[1])


def counted(r: Results, method: str) -> float:
    """Number of drops that measures.stages finds in the loss; with several settings, the median over them."""
    return float(np.median(r.where(method=method)["stages"]))


def predicted(r: Results) -> float:
    """Overlap of the embedding that Barlow Twins learned with the prediction."""
    return float(r.where(method="barlow twins")[f"overlap_{r.settings.kernel}"][0])


@styled
def draw(results: Results) -> Figure:
    figure, axes = panels(6, across=3)
    for above, below, method in zip(axes[:3], axes[3:], LOSSES, strict=True):
        one = results.where(method=method)
        t = results.settings.every * np.arange(one["losses"].shape[1])
        for k, eigenvalues in enumerate(one["spectra"][0].T):
            line(above, t, eigenvalues, COLOURS[k % len(COLOURS)])
        label(above, "step", "eigenvalues of the embedding", f"{method}: {int(one['stages'][0])} drops of the loss")
        line(below, t, one["losses"][0], COLOURS[0])
        label(below, "step", "loss", method)
    caption(figure, "With Barlow Twins the eigenvalues of the embedding rise one at a time, and the loss rests near whole "
                    "numbers.")
    return figure


START, RANDOM = Control("the initial tangent kernel", {"kernel": "start"}), Control("a random subspace", {"kernel": "random"})
LARGE = Control("initial weights twice as large", {"larger": 2.0})
SMOKE = SslDeepSettings(n=128, width=128, steps=3_000, methods=("barlow twins", "vicreg", "simclr"), scales=(0.6, 0.6, 0.3),
                        rates=(0.01, 0.001, 0.01), seeds=(0, 1, 2))
EXPERIMENT = Experiment(
    name="ssl_deep", ref=Ref("ssl", "Sec. 5"), title="deep networks learn their embedding one dimension at a time",
    smoke=SMOKE, paper=SslDeepSettings(), over=(("method", "scale", "rate"), "seed"), analysis=("kernel",), work=work,
    figures={"ssl_deep": draw}, places=("Sec. 5", "Sec. 6"), start={"seeds": (0,), "steps": 10, "n": 16, "width": 8},
    reduced="half the images and width, one setting of SimCLR instead of nine, three seeds",
    protocol="stand-in: an MLP on noisy digits for a ResNet-50 on augmented STL-10",
    tried="initial scales .5, .6 and 1 and rates .003 to .01 on seeds 100 and 101: steps are clearest at .6; VICReg at rates "
          ".0004 and .001; SimCLR at every scale and rate that is listed",
    claims=(
        Claim("Barlow Twins: drops of the loss that measures.stages finds", lambda r: counted(r, "barlow twins"), Interval(low=6),
              LARGE, places=("Sec. 5",),
              says="With Barlow Twins the embedding is learned in separate steps, one for each dimension.",
              source="eight dimensions, of which two pairs may be learned together", over="seed"),
        Claim("VICReg: drops of the loss that measures.stages finds", lambda r: counted(r, "vicreg"), Interval(low=4), LARGE,
              places=("Sec. 5",), says="With VICReg the embedding is learned in separate steps as well.",
              source="half of the eight dimensions", over="seed",
              differs="two or three drops: the later dimensions do not develop within these steps"),
        Claim("SimCLR: drops of the loss that measures.stages finds, median over settings", lambda r: counted(r, "simclr"),
              Interval(low=4), LARGE, places=("Sec. 5",), says="With SimCLR the embedding is learned in separate steps as well.",
              source="half of the eight dimensions", over="seed",
              differs="none or one: the gradient of the normalised loss grows as the embedding shrinks, so that small initial "
                      "weights make large steps"),
        Claim("Barlow Twins: overlap of the learned embedding with the prediction from the tangent kernel", predicted,
              Interval(low=0.95), (START, RANDOM), places=("Sec. 6",),
              says="The tangent kernel at the end of training predicts the subspace that was learned.",
              source="1 is the whole subspace; a random one has d / 2n", over="seed")))
