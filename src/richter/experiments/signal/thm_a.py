"""Theorem A of [signal], appendices C and D, and Eqs 25 to 27: second derivatives and a step of training, as identities. If
the paper prints one with an error, that form is the rival."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.training import linears
from richter.instrument.observe import measure
from richter.instrument.probe import Probe
from richter.measures.curvature import Hessian, centred, hessian, predicted_alignment, theorem_a
from richter.models import mlp
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.theory.gofe import descent_velocity

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Formula = Literal["own", "rival"]


@dataclass(frozen=True)
class SignalThmASettings:
    """Gaussian inputs with labels of a random linear rule, so that there is something to learn."""

    n: int = 30
    d: int = 6
    classes: int = 3
    hidden: tuple[int, ...] = (10, 10, 10)
    lr: float = 0.05
    steps: int = 400  # of gradient descent, before Eqs 26 and 27 are looked at
    draws: int = 4000  # perturbations of a layer
    formula: Formula = "own"  # or the rival: as the paper prints it, or something simple in its place
    trained: bool = True  # is the network of Eqs 26 and 27?
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def example(s: SignalThmASettings, seed: int, bias: bool = False) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network with He weights (and random biases) in float64, inputs and classes, equally many of each."""
    draw = torch.Generator().manual_seed(seed)
    model = mlp([s.d, *s.hidden, s.classes], bias=bias, seed=seed).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=p.dtype) * ((2 / p.shape[1]) ** 0.5 if p.dim() > 1 else 0.3))
    x = torch.randn(20 * s.n, s.d, generator=draw, dtype=torch.float64)
    rule = (x @ torch.randn(s.d, s.classes, generator=draw, dtype=torch.float64)).argmax(1)
    rows = torch.cat([(rule == c).nonzero()[:s.n // s.classes, 0] for c in range(s.classes)])
    return model, x[rows], rule[rows]


def work(t: Task[SignalThmASettings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    plain, x, y = example(s, t.seed)
    biased = example(s, t.seed, bias=True)[0]
    probe = Probe(x, y)
    H = hessian(plain, probe)
    run.progress(0.2)
    return {**theorem(plain, biased, probe, H, s.lr), **appendices(H, plain, x, y), **alignment(H, plain, probe, s.lr),
            **perturbations(plain, x, y, s, t.seed)}


def theorem(plain: nn.Module, biased: nn.Module, probe: Probe, H: Hessian, lr: float) -> dict[str, float]:
    """Theorem A without and with biases, and as it is printed: with lr in the gradient, and with D = 1 whatever the biases."""
    a = theorem_a(plain, probe)
    printed = float((lr * a.left - a.right).norm() / a.right.norm())
    v = torch.ones(H.size, dtype=torch.float64)
    whole, other = _loss_product(plain, probe, v), H.fisher(v) / probe.n
    return {"theorem": a.error, "theorem_rival": printed,
            "biases": theorem_a(biased, probe).error, "biases_rival": theorem_a(biased, probe, biases=False).error,
            "hessian": float((H(v) + other - whole).norm() / whole.norm()),
            "hessian_rival": float((other - whole).norm() / whole.norm())}


def _loss_product(model: nn.Module, probe: Probe, v: Tensor) -> Tensor:
    """The product with the Hessian of the loss itself."""
    assert probe.y is not None
    places = list(model.parameters())
    loss = F.cross_entropy(model(probe.x), probe.y)
    g = torch.cat([a.reshape(-1) for a in torch.autograd.grad(loss, places, create_graph=True)])
    return torch.cat([a.reshape(-1) for a in torch.autograd.grad(g @ v, places)])


def features(model: nn.Module, x: Tensor) -> Tensor:
    """Psi [p, n k] by one backward pass for each output of each example."""
    places, f = list(model.parameters()), model(x)
    return torch.stack([torch.cat([g.reshape(-1) for g in torch.autograd.grad(one, places, retain_graph=True)])
                        for one in f.reshape(-1)], 1)


def appendices(H: Hessian, model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """App. C: outputs move by -K_l w when all layers but one are frozen. App. D: with V = -H_w A / |w|^2 the gradient Psi w moves
    in feature evolution as in training, for A = 1 and for natural gradients."""
    Psi, w, Y = features(model, x), H.w.reshape(-1), centred(F.one_hot(y).double()).reshape(-1)
    errors, labels = [], []
    for mine in H.layers.values():
        K, direction = Psi[mine].T @ Psi[mine], torch.zeros(H.size, dtype=torch.float64)
        direction[mine] = -H.gradient[mine]
        moved = _pushed(model, x, H.parts(direction)).reshape(-1)
        errors.append(float((moved + K @ w).norm() / moved.norm()))
        KY = K @ Y  # the labels in the place of -w, at the best scale
        labels.append(float((moved - KY * (KY @ moved) / (KY @ KY)).norm() / moved.norm()))
    metric = torch.block_diag(*(torch.diag(p) - torch.outer(p, p) for p in model(x).softmax(1).detach())) / len(x)
    eye = torch.eye(H.size, dtype=torch.float64)
    both = [_evolution(H, Psi, metric, A) for A in (eye, torch.linalg.inv(Psi @ metric @ Psi.T + 0.1 * eye))]
    return {"frozen": max(errors), "frozen_rival": min(labels), "evolution": max(own for own, _ in both),
            "evolution_rival": min(constant for _, constant in both)}


def _pushed(model: nn.Module, x: Tensor, direction: Mapping[str, Tensor]) -> Tensor:
    """Product J v with the Jacobian, in forward mode."""
    state = {k: v.detach() for k, v in model.named_parameters()}
    return torch.func.jvp(lambda s: torch.func.functional_call(model, s, (x,)), (state,), (dict(direction),))[1]


def _evolution(H: Hessian, Psi: Tensor, metric: Tensor, A: Tensor) -> tuple[float, float]:
    """Errors of Eq. 18 against Eq. 19, with V of Eq. 21 and with the best multiple of the identity."""
    w = H.w.reshape(-1)
    g = Psi @ w
    rest = -Psi @ metric @ Psi.T @ A @ g
    trained = -H(A @ g) + rest
    bent = trained - rest
    own = torch.as_tensor(descent_velocity(H.dense(), w, A)) @ g * (w @ w) + rest
    constant = g * (bent @ g) / (g @ g) + rest
    return float((own - trained).norm() / bent.norm()), float((constant - trained).norm() / bent.norm())


def alignment(H: Hessian, model: nn.Module, probe: Probe, lr: float) -> dict[str, ArrayLike]:
    """Eq. 25 corrected and as printed, against the traces that it is made of, and beside the measured change."""
    layers, M = linears(model), H.dense()
    A = {k: measure(model, probe, "tangent_cka").value("tangent_cka", k) for k in layers}
    step = torch.eye(H.size, dtype=torch.float64) - lr * M
    moments = H.moments()
    own = predicted_alignment(A, moments, lr)
    traced = {k: A[k] * float((step @ M @ M @ step).diagonal()[mine].sum() / (M @ M).diagonal()[mine].sum())
              for k, mine in H.layers.items()}
    printed = {k: A[k] - 2 * lr * m[3].value / m[2].value + lr ** 2 * m[4].value / m[2].value for k, m in moments.items()}
    with torch.no_grad():
        nn.utils.vector_to_parameters(H.theta - lr * H.gradient, model.parameters())
        after = measure(model, probe, "tangent_cka")
        nn.utils.vector_to_parameters(H.theta, model.parameters())
    return {"traces": max(abs(own[k] / traced[k] - 1) for k in layers),
            "traces_rival": max(abs(printed[k] / traced[k] - 1) for k in layers),
            "predicted": [own[k] / A[k] - 1 for k in layers],
            "measured": [after.value("tangent_cka", k) / A[k] - 1 for k in layers]}


def perturbations(model: nn.Module, x: Tensor, y: Tensor, s: SignalThmASettings, seed: int) -> dict[str, ArrayLike]:
    """Eqs 26 and 27, before and after training: how much of the layer's gradients is one direction times the labels, and which
    share of the outputs' change lies along them when the layer is moved at random, beside y~^T K y~ / (|y~|^2 tr C K C)."""
    rows: dict[str, list[list[float]]] = {"rank_one": [], "share": [], "predicted_share": [], "correlation": []}
    Y = centred(F.one_hot(y).double()).reshape(-1)
    unit = Y / Y.norm()
    draw = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for steps in (0, s.steps):
        for _ in range(steps):
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()
        Psi, H = features(model, x), hessian(model, Probe(x, y))
        found: dict[str, list[float]] = {name: [] for name in rows}
        for mine in H.layers.values():
            P = Psi[mine] - Psi[mine].mean(1, keepdim=True)  # Psi C
            top = float(torch.linalg.svdvals(P)[0] ** 2)
            change = torch.randn(s.draws, len(mine), generator=draw, dtype=torch.float64) @ P
            found["share"].append(float((change @ unit).square().sum() / change.square().sum()))
            found["predicted_share"].append(float((P @ unit).square().sum() / P.square().sum()))
            found["correlation"].append(float((P @ unit).square().sum() / top))
            found["rank_one"].append(float((P - torch.outer(P @ unit, unit)).norm() / P.norm()))
        for name, values in found.items():
            rows[name].append(values)
    return {name: np.array(values) for name, values in rows.items()}


def largest(name: str) -> Callable[[Results], float]:
    """The largest error of a formula, or the smallest of its rival."""
    return lambda r: float(r[name].max() if r.settings.formula == "own" else r[f"{name}_rival"].min())


def share_error(r: Results) -> float:
    """Largest |share / predicted - 1| over layers and both networks; of the rival, with one share in every layer: the best."""
    predicted = r["predicted_share"] if r.settings.formula == "own" else np.full_like(r["share"], np.median(r["share"]))
    return float(np.abs(r["share"] / predicted - 1).max())


def best_share(r: Results) -> float:
    """Share along the labels, in the layer where it is largest."""
    return float(r["share"][:, 1 if r.settings.trained else 0].max())


def rank_one(r: Results) -> float:
    """|Psi C - v y~^T| / |Psi C| of the layer where it is smallest, with the best v."""
    return float(r["rank_one"][:, 1 if r.settings.trained else 0].min())


def same_direction(r: Results) -> float:
    """The correlation over layers of predicted and measured relative changes; of the rival, of the layers in another order."""
    predicted = r["predicted"] if r.settings.formula == "own" else r["predicted"][:, ::-1]
    return float(np.corrcoef(predicted.ravel(), r["measured"].ravel())[0, 1])


@styled
def draw(results: Results) -> Figure:
    figure, (left, right) = panels(2, across=2)
    layers = np.arange(1, results["predicted"].shape[1] + 1)
    points(left, layers, results["measured"], COLOURS[0], "measured")
    points(left, layers, results["predicted"], COLOURS[1], "Eq. 25, corrected", marker="s")
    label(left, "layer", "change of tangent_cka", "one step, relative", legend=True)
    for when, name in enumerate(("before training", "after")):
        points(right, layers, results["share"][:, when], COLOURS[when], f"{name}: moved at random")
        line(right, layers, np.median(results["predicted_share"][:, when], 0), COLOURS[when],
             "" if when else "y~'Ky~ / |y~|^2 tr K")
    label(right, "layer", "share along the labels", "Eq. 27: of the outputs' change", legend=True)
    caption(figure, "Left: what a step does to each layer's alignment, and the corrected Eq. 25. Right: when a layer is moved at "
                    "random, more of the outputs' change is along the labels after training, as the kernel says.")
    return figure


UNTRAINED = Control("an untrained network", {"trained": False})
NOT_25 = ("the formula takes w for -y~, the norm of the kernel for constant and directions for random: the changes it gives are "
          "a few per cent, those measured are up to ten times as large and of both signs")
NOT_26 = ("of the gradients' square 1 to 13 % lies along the labels, for a correlation of .1 to .4 with the largest direction. "
          "The paper's approximation needs a correlation near 1, which it finds in VGG19")
IDENTITY = "an identity; what is left is rounding"


def rival(text: str) -> Control:
    """Control in which a rival takes the place of the formula."""
    return Control(text, {"formula": "rival"})


EXPERIMENT = Experiment(
    name="signal_thm_a", ref=Ref("signal", "Thm. A"), title="Hessians of the outputs and steps of training, as identities",
    smoke=SignalThmASettings(), paper=SignalThmASettings(seeds=tuple(range(10))), work=work, over=("seed",),
    analysis=("formula", "trained"), figures={"signal_thm_a": draw},
    start={"seeds": (0,), "steps": 1}, places=("Thm. A", "App. C", "App. D", "Eq. 25", "Eqs 26, 27"), quick=True,
    protocol="exact",
    claims=(
        Claim("Theorem A: largest relative error of grad L = H_w theta / (L - 1), without biases", largest("theorem"),
              Interval(high=1e-10), rival("with the learning rate in it, as it is printed"), paper="exact", source=IDENTITY,
              says="Theorem A: grad L = H_w theta / (L - 1) (printed with the learning rate in it).", reason="misprint"),
        Claim("Theorem A with biases: largest relative error of H_w (D theta) = (L - D) grad L", largest("biases"),
              Interval(high=1e-10), rival("D = 1 whatever biases there are, as it is printed"), source=IDENTITY,
              says="Theorem A with biases: H_w (D theta) = (L - D) grad L (printed for D = 1 alone).", reason="misprint"),
        Claim("largest relative error of K_l w as the outputs' movement with the other layers frozen", largest("frozen"),
              Interval(high=1e-10), rival("the labels in the place of w, at the best scale"), paper="exact", source=IDENTITY,
              places=("App. C",), says="App. C: K_l w is the movement of the outputs when the other layers are frozen."),
        Claim("largest relative error of H_w + Psi L_ff Psi^T as the loss's Hessian", largest("hessian"), Interval(high=1e-10),
              rival("without H_w"), paper="exact", source=IDENTITY, places=("App. D",),
              says="App. D: the Hessian of the loss is H_w + Psi L_ff Psi'."),
        Claim("largest relative error of d(Psi w)/dt by feature evolution with V = -H_w A / |w|^2", largest("evolution"),
              Interval(high=1e-10), rival("the best multiple of the identity for V"), paper="exact", source=IDENTITY,
              places=("App. D",), says="App. D: training is feature evolution with V = -H_w A / |w|^2."),
        Claim("largest relative error of the corrected last line of Eq. 25 against the line above it", largest("traces"),
              Interval(high=1e-10), rival("as it is printed, without A_l in two terms"), paper="exact", source=IDENTITY,
              places=("Eq. 25",), says="Eq. 25: its last line follows from the one above (printed without A_l in two terms).",
              reason="misprint"),
        Claim("correlation over layers of the relative change of tangent_cka by Eq. 25 and the measured one", same_direction,
              Interval(low=0.5), rival("the layers in the opposite order"), paper="approximately equal", places=("Eq. 25",),
              source="the text takes them for equal: at least more right than wrong",
              differs=NOT_25, says="Eq. 25 gives the relative change of the alignment of each layer, approximately."),
        Claim("largest relative error of the share of the outputs' change along the labels, over layers", share_error,
              Interval(high=0.15), rival("the same share in every layer"), places=("Eqs 26, 27",),
              source="4,000 draws of a share between .003 and .2: five standard errors",
              says="Eqs 26, 27: the share of the outputs' change along the labels in each layer."),
        Claim("|Psi C - v y~^T| / |Psi C| in the layer where it is smallest, after training", rank_one, Interval(high=0.5),
              UNTRAINED, paper="approximately 0 where the correlation is large", places=("Eqs 26, 27",),
              source="the text: the gradients are one direction times the labels", differs=NOT_26, over="seed",
              says="Eqs 26, 27: Psi C is one direction times the labels where the correlation is large."),
    ))
