"""Figure 1 of [nfa]: on the chain monomial NFM and AGOP look like the EGOP, until the eigenvectors of K are drawn anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from richter.core.likeness import cosine
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.kernels import ptk_covariance
from richter.linalg import haar
from richter.models import mlp
from richter.report.drawing import caption, styled
from richter.report.figures import side_by_side
from richter.tasks import chain_monomial

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class NfaFig1Settings:
    """Full batch gradient descent on the mean squared error, labels of deviation 1. The paper gives no learning rate; between
    0.05 and 0.2 the result is the same."""

    n: int = 384
    d: int = 32
    rank: int = 5
    width: int = 128
    first: float = 0.01  # times torch's initial weights of the first layer
    lr: float = 0.05
    steps: int = 800
    draws: int = 20  # of Q
    rotate: bool = True  # Q has eigenvectors of its own
    shuffled: bool = False  # the labels
    seeds: tuple[int, ...] = (0, 1, 2)


def trained(s: NfaFig1Settings, seed: int, run: Writer) -> tuple[nn.Sequential, Tensor, NDArray[Any]]:
    """The network, its inputs, and the EGOP of its task."""
    data = chain_monomial(s.n, s.d, s.rank, seed=seed, standardise=True, dtype=torch.float64)
    y = data.y[torch.randperm(s.n, generator=torch.Generator().manual_seed(seed))] if s.shuffled else data.y
    model = mlp([s.d, s.width, s.width, 1], bias=False, seed=seed).double()
    with torch.no_grad():
        model[0].weight.mul_(s.first)  # type: ignore[operator]
    optimiser = torch.optim.SGD(model.parameters(), lr=s.lr)
    for step in range(s.steps):
        loss = (model(data.x) - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        run.progress(step / s.steps)
    with torch.no_grad():
        run.scalars(s.steps, train=(model(data.x) - y).square().mean().item(),
                    test=(model(data.x_test) - data.y_test).square().mean().item())
    return model, data.x, data.egop.numpy()


def work(task: Task[NfaFig1Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = task.settings
    model, x, egop = trained(s, task.seed, run)
    W = model[0].weight.detach().numpy()  # type: ignore[union-attr, operator]
    K = np.asarray(ptk_covariance(model, x, "0"))
    values, vectors = np.linalg.eigh(K)
    draw = np.random.default_rng((task.seed, 1))
    scrambled = [W.T @ _with(values, haar(len(K), draw) if s.rotate else vectors) @ W for _ in range(s.draws)]
    nfm, agop = W.T @ W, W.T @ K @ W
    return {"egop": egop, "nfm": nfm, "agop": agop, "scrambled": scrambled[0], "eigenvalues": values[::-1],
            "nfm_agop": cosine(nfm, agop), "nfm_scrambled": np.mean([cosine(nfm, Q) for Q in scrambled]),
            "nfm_egop": cosine(nfm, egop), "agop_egop": cosine(agop, egop), "spread": values.std() / values.mean()}


def _with(values: NDArray[Any], vectors: NDArray[Any]) -> NDArray[Any]:
    return (vectors * values) @ vectors.T


@styled
def draw(results: Results) -> Figure:
    """EGOP, NFM, AGOP and W^T Q W of the first seed, each on its own scale of colours."""
    middle = {name: np.median(results[name]) for name in ("nfm_egop", "nfm_agop", "nfm_scrambled")}
    titles = {"egop": "EGOP", "nfm": "NFM  $W^T W$", "agop": "AGOP  $W^T K W$", "scrambled": "$W^T Q W$"}
    figure = side_by_side({titles[name]: results[name][0] for name in titles})
    caption(figure, "NFM and AGOP show the EGOP's five coordinates; with other eigenvectors in K's place they are lost. "
                    "Cosine of the "
                    f"NFM with the EGOP {middle['nfm_egop']:.2f}, the AGOP {middle['nfm_agop']:.2f}, W'QW "
                    f"{middle['nfm_scrambled']:.2f} (medians of {len(results)} seeds; drawn is the first).")
    return figure


UNTRAINED = Control("an untrained network", {"steps": 0})
SHUFFLED = Control("a network trained on shuffled labels", {"shuffled": True})
OWN = Control("Q with K's own eigenvectors", {"rotate": False})
BAR = "independent check of the recipe, 5 learning rates and lengths, 3 to 5 seeds; for the mean"
DESCENT = "About weights that follow gradients, whatever the labels: its rivals are other eigenvectors and no training"
MEAN: dict[str, Any] = {"over": "seed", "by": "mean"}
EXPERIMENT = Experiment(
    name="nfa_fig1", ref=Ref("nfa", "Fig. 1"), title="NFM and AGOP agree on the chain monomial, and only with the right K",
    smoke=NfaFig1Settings(lr=0.1, steps=400), paper=NfaFig1Settings(steps=3000, seeds=tuple(range(10))), start={"steps": 1},
    quick=True,
    over=("seed",), work=work, figures={"nfa_fig1": draw},
    reduced="3 seeds in the place of 10, 400 steps at twice the learning rate in the place of 3,000",
    protocol="unstated: the learning rate and the number of steps",
    claims=(
        Claim("correlation of NFM and AGOP of the first layer", lambda r: r["nfm_agop"].mean(), Interval(0.92, 0.97),
              (UNTRAINED, SHUFFLED), paper="0.93", source=BAR, **MEAN,
              says="On the chain monomial the trained NFM and AGOP of the first layer have correlation 0.93."),
        Claim("correlation of NFM and W^T Q W, Q with K's spectrum", lambda r: r["nfm_scrambled"].mean(), Interval(0.48, 0.66),
              OWN, paper="0.53", source=BAR, **MEAN,
              says="With random eigenvectors in the place of K's, the correlation falls to 0.53."),
        Claim("what the right eigenvectors add (with shuffled labels too)",
              lambda r: (r["nfm_agop"] - r["nfm_scrambled"]).mean(), Interval(low=0.28), (OWN, UNTRAINED), paper="0.40",
              source=f"{BAR}. {DESCENT}", **MEAN, says="K's own eigenvectors add 0.40 to the correlation of NFM and AGOP."),
        Claim("deviation / mean of K's eigenvalues: K is far from the identity (with shuffled labels too)",
              lambda r: r["spread"].mean(), Interval(5.3, 6.8), UNTRAINED, paper="5.9", source=f"{BAR}. {DESCENT}", **MEAN,
              says="K is far from the identity: its eigenvalues have 5.9 times their mean as deviation."),
        Claim("correlation of NFM and EGOP, the smaller of NFM's and AGOP's",
              lambda r: np.minimum(r["nfm_egop"], r["agop_egop"]).mean(), Interval(low=0.88), (UNTRAINED, SHUFFLED),
              paper="similar", source="independent check: .927 and .952, less .05", **MEAN,
              says="NFM and AGOP resemble the EGOP of the task."),
    ))
