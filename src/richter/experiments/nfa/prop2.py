"""Proposition 2 of [nfa]: the AGOP of a layer is W^T K W, so that its correlation with the NFM is one of W with K."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor, nn

from richter.core.likeness import cosine
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.training import descend
from richter.instrument.observe import measure
from richter.instrument.probe import Probe
from richter.linalg import haar
from richter.models import mlp
from richter.report.drawing import COLOURS, band, caption, label, panels, points, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Inner = Literal["K", "sum", "rotated", "identity"]


@dataclass(frozen=True)
class NfaProp2Settings:
    """A network with three hidden layers and three outputs, trained for some steps."""

    n: int = 48
    d: int = 16
    width: int = 32
    outputs: int = 3
    hidden: int = 3
    lr: float = 0.2
    steps: int = 100
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    inner: Inner = "K"  # the matrix between the weights: sum, without 1/n as displayed; rotated, with other eigenvectors


def derivatives(model: nn.Sequential, x: Tensor, index: int) -> tuple[Float[Tensor, "c n d_in"], Float[Tensor, "c n d_out"]]:
    """df_c(x_n) in what a layer reads and in what it gives, by plain autograd."""
    h = model[:index](x).detach().requires_grad_()
    z = model[index](h)
    f = model[index + 1:](z)
    pairs = [torch.autograd.grad(f[:, c].sum(), [h, z], retain_graph=True) for c in range(f.shape[1])]
    return torch.stack([p for p, _ in pairs]), torch.stack([q for _, q in pairs])


def work(t: Task[NfaProp2Settings], run: Writer) -> Mapping[str, ArrayLike]:
    """Both sides of the proposition for every layer, with K and with what may be mistaken for it, and the measured ``nfc``."""
    s = t.settings
    draw = np.random.default_rng((t.seed, 9))
    x, y = (torch.from_numpy(draw.standard_normal((s.n, k))) for k in (s.d, s.outputs))
    model = mlp([s.d, *[s.width] * s.hidden, s.outputs], bias=False, seed=t.seed).double()
    descend(model, x, y, torch.optim.SGD(model.parameters(), lr=s.lr), s.steps, run)
    rows: dict[str, list[Any]] = {"rho": [], "nfc": [], **{f"{kind}_{name}": [] for kind in ("error", "rho") for name in
                                                          ("K", "sum", "rotated", "identity")}}
    snap = measure(model, Probe(x, y), ["nfc"])
    for index, layer in enumerate(model):
        if not isinstance(layer, nn.Linear):
            continue
        W = layer.weight.detach().numpy()
        asked, passed = (g.numpy() for g in derivatives(model, x, index))
        agop = np.einsum("cni,cnj->ij", asked, asked) / s.n
        K = np.einsum("cno,cnp->op", passed, passed) / s.n
        U = haar(len(K), draw)
        inner = {"K": K, "sum": K * s.n, "rotated": (U * np.linalg.eigvalsh(K)) @ U.T, "identity": np.eye(len(K))}
        for name, Q in inner.items():
            rows[f"error_{name}"].append(np.linalg.norm(agop - W.T @ Q @ W) / np.linalg.norm(agop))
            rows[f"rho_{name}"].append(cosine(W.T @ W, W.T @ Q @ W))
        rows["rho"].append(cosine(W.T @ W, agop))
        rows["nfc"].append(snap.value("nfc", str(index)))
    return {name: np.array(values) for name, values in rows.items()}


def error(r: Results) -> float:
    """Largest relative error of the identity, with the inner product of the settings."""
    return float(r[f"error_{r.settings.inner}"].max())


def apart(r: Results, name: str) -> float:
    """Largest difference from the correlation of W^T W with W^T K W over layers."""
    return float(np.abs(r[name] - r[f"rho_{r.settings.inner}"]).max())


@styled
def draw(results: Results) -> Figure:
    figure, (ax,) = panels(1, across=1, width=4.5, height=3.0)
    layers = np.arange(1, results["rho"].shape[1] + 1)
    band(ax, layers, results["rho_K"], COLOURS[0], "W'W with W'KW")
    band(ax, layers, results["rho_rotated"], COLOURS[2], "W'W with W'QW")
    points(ax, layers, results["rho"], COLOURS[1], "NFM with AGOP")
    points(ax, layers, results["nfc"], COLOURS[3], "measured nfc", "x")
    label(ax, "layer", "cosine", "", legend=True)
    ax.set_xticks(layers)
    caption(figure, "The correlation of NFM and AGOP (points) is that of W'W and W'KW (line) at every layer, and not that "
                    "with another K "
                    f"of the same spectrum. Median and range of {len(results)} networks.")
    return figure


SUM = Control("K without 1/n, as its display has it", {"inner": "sum"})
ROTATED = Control("a matrix with the eigenvalues of K and other eigenvectors", {"inner": "rotated"})
IDENTITY = Control("the identity in the place of K", {"inner": "identity"})
EXACT = "an identity; rounding in float64"
EXPERIMENT = Experiment(
    name="nfa_prop2", ref=Ref("nfa", "Prop. 2"), title="the correlation of NFM and AGOP is one of the weights with K",
    smoke=NfaProp2Settings(), paper=NfaProp2Settings(n=128, width=128, seeds=tuple(range(10))), work=work,
    figures={"nfa_prop2": draw},
    over=("seed",), analysis=("inner",), start={"n": 4, "steps": 1}, quick=True,
    protocol="exact",
    claims=(
        Claim("largest |AGOP - W^T K W| / |AGOP| over layers and networks", error, Interval(high=1e-8), (SUM, ROTATED, IDENTITY),
              paper="exact", source=EXACT, says="Prop. 2: the AGOP is W^T K W (the display of K has lost its 1/n).",
              reason="misprint"),
        Claim("largest difference of the two correlations over layers and networks", lambda r: apart(r, "rho"),
              Interval(high=1e-8), (ROTATED, IDENTITY), paper="exact", source=EXACT,
              says="Prop. 2: the correlation of NFM and AGOP is that of W^T W and W^T K W."),
        Claim("largest difference of the measured nfc from the right-hand side", lambda r: apart(r, "nfc"), Interval(high=1e-8),
              (ROTATED, IDENTITY), paper="exact", source=EXACT,
              says="Prop. 2: the correlation of NFM and AGOP is that of W^T W and W^T K W, also as measured by this library."),
    ))
