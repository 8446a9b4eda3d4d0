"""Figures 19 to 23 of [signal]: spectra of each layer's tangent kernel, its stable rank and its correlation with the labels,
and the same numbers of the Fisher information, for networks that generalise well, worse, and not at all. They are trained on
clean labels, some random ones, and random ones only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.signal.common import fit, he
from richter.experiments.training import accuracy, linears
from richter.instrument.observe import Measurement
from richter.instrument.probe import Probe
from richter.kernels import ntk
from richter.report.drawing import COLOURS, band, caption, label, panels, styled
from richter.tasks import fashion_mnist

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MEASURES = ("tangent_cka", "tangent_stable_rank", "tangent_correlation", "fisher_stable_rank", "fisher_correlation")
CONDITIONS: dict[str, tuple[float, float]] = {  # learning rate, share of random labels
    "fast": (0.01, 0.0), "slow": (0.001, 0.0), "noisy": (0.001, 0.2), "random": (0.01, 1.0)}


@dataclass(frozen=True)
class SignalFig20Settings:
    """Bias-free He networks of depth 8 and width 64 on standardised images; cross-entropy, SGD with momentum 0.9, batches of 128.
    Kernels are of 100 class-balanced training images, with the labels that were trained on."""

    n: int = 2_000
    depth: int = 8
    width: int = 64
    epochs: int = 40
    probe: int = 100
    eigenvalues: int = 200
    subject: Literal["trained", "untrained", "matrices"] = "trained"  # what claims are read from; matrices: random ones
    measure: Literal["own", "other"] = "own"  # the tangent kernel's correlation in the place of the Fisher's, or the other way
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    conditions: ClassVar = CONDITIONS


def partly_random(y: Tensor, share: float, seed: int) -> Tensor:
    """Labels, a share of them replaced by random ones."""
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.rand(len(y), generator=draw) < share
    return torch.where(chosen, torch.randint(10, y.shape, generator=draw), y)


def work(t: Task[SignalFig20Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    lr, share = CONDITIONS[t.condition]
    data = fashion_mnist(s.n, flat=True, seed=t.seed)
    rows = torch.cat([(data.y == c).nonzero()[:s.probe // 10, 0] for c in range(10)])  # the same in every condition
    data = data._replace(y=partly_random(data.y, share, t.seed + 1))
    model = he([784, *[s.width] * (s.depth - 1), 10], t.seed)
    before = layerwise(model, data.x[rows], data.y[rows], s)
    fit(model, data, lr, s.epochs, run, seed=t.seed)
    after = layerwise(model, data.x[rows], data.y[rows], s)
    with torch.no_grad():
        loss = F.cross_entropy(model(data.x), data.y).item()
    return {**{k: np.stack([before[k], after[k]]) for k in before}, "accuracy": accuracy(model, data.x_test, data.y_test),
            "loss": loss, "matrices": random_matrices(t.seed)}


def layerwise(model: nn.Module, x: Tensor, y: Tensor, s: SignalFig20Settings) -> dict[str, NDArray[np.float64]]:
    """Measures of every layer, and the leading eigenvalues of its centred kernel over the largest."""
    layers = linears(model)
    snap = Measurement(model, Probe(x, y, kernel_examples=None), MEASURES, errors=False).take()
    spectra = []
    for K in (ntk(model, x, form="full", per_layer=True)[k] for k in layers):
        K = torch.as_tensor(K).double().reshape(K.shape[0] * K.shape[1], -1)
        K = K - K.mean(0) - K.mean(1)[:, None] + K.mean()
        values = torch.linalg.eigvalsh(K).flip(0)[:s.eigenvalues]
        spectra.append((values / values[0]).clamp(min=1e-12).numpy())
    return {**{m: np.array([snap.value(m, k) for k in layers]) for m in MEASURES}, "spectra": np.array(spectra)}


def random_matrices(seed: int, draws: int = 300) -> NDArray[np.float64]:
    """Stable ranks of a tangent kernel and of the Fisher information, of Gaussian gradients and random probabilities."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(draws):
        Psi = torch.randn(4, 6, generator=draw, dtype=torch.float64)
        p = (3 * torch.randn(2, 3, generator=draw, dtype=torch.float64)).softmax(1)
        H = torch.block_diag(*(torch.diag(q) - torch.outer(q, q) for q in p))
        ranks = []
        for M in (Psi.T @ Psi, Psi @ H @ Psi.T):
            e = torch.linalg.eigvalsh(M)
            ranks.append((e.square().sum() / e[-1] ** 2).item())
        rows.append(ranks)
    return np.array(rows)


NAMES = {"fast": "lr 0.01", "slow": "lr 0.001", "noisy": "lr 0.001, 20 % random labels", "random": "lr 0.01, random labels"}


def mean(r: Results, name: str, condition: str) -> float:
    """Mean over layers, of the trained networks (or the untrained ones, for a rival)."""
    return float(r.where(condition=condition)[name][:, 0 if r.settings.subject == "untrained" else 1].mean())


def ratio(name: str, a: str, b: str) -> Callable[[Results], float]:
    """Claim's number: the ratio of a quantity in two settings."""
    return lambda r: mean(r, name, a) / mean(r, name, b)


def decay(r: Results) -> float:
    """Extra decay of the eigenvalues without random labels: mean over layers and ranks of log10 of noisy over clean."""
    when = 0 if r.settings.subject == "untrained" else 1
    clean, noisy = (np.log10(r.where(condition=c)["spectra"][:, when]).mean() for c in ("slow", "noisy"))
    return float(noisy - clean)


def bound(r: Results) -> float:
    """The smallest R(tangent kernel) / R(Fisher) over layers and conditions, or over random matrices."""
    if r.settings.subject == "matrices":
        return float((r["matrices"][..., 0] / r["matrices"][..., 1]).min())
    return float((r["tangent_stable_rank"] / r["fisher_stable_rank"])[:, 1].min())


def apart(r: Results) -> float:
    """The mean Fisher correlation of the best network over that with some random labels; of the rival, tangent correlations."""
    return ratio("fisher_correlation" if r.settings.measure == "own" else "tangent_correlation", "fast", "noisy")(r)


def told(r: Results) -> float:
    """The mean tangent correlation with clean labels over that with random ones; of the rival, Fisher correlations."""
    return ratio("tangent_correlation" if r.settings.measure == "own" else "fisher_correlation", "fast", "random")(r)


def fewer(*others: str) -> Callable[[Results], float]:
    """Mean stable rank of the Fisher information in the best of the other networks, less that in the best network."""
    return lambda r: min(mean(r, "fisher_stable_rank", c) for c in others) - mean(r, "fisher_stable_rank", "fast")


def by_layer(*shown: tuple[str, str], sentence: str) -> Callable[[Results], Figure]:
    """A panel for each measure: its values over the layers in every condition."""
    @styled
    def draw(results: Results) -> Figure:
        figure, axes = panels(len(shown), across=max(2, len(shown)))
        for ax, (name, words) in zip(axes, shown, strict=True):
            for k, condition in enumerate(CONDITIONS):
                values = results.where(condition=condition)[name][:, 1]
                band(ax, np.arange(1, values.shape[1] + 1), values, COLOURS[k], NAMES[condition])
            label(ax, "layer", words, legend=ax is axes[0])
        caption(figure, sentence)
        return figure
    return draw


@styled
def draw_spectra(results: Results) -> Figure:
    """Figure of the eigenvalues of each layer's centred kernel, by condition."""
    figure, axes = panels(2, across=2)
    for ax, condition in zip(axes, ("noisy", "slow"), strict=True):
        spectra = np.median(results.where(condition=condition)["spectra"][:, 1], 0)
        for layer, values in enumerate(spectra):
            ax.plot(np.arange(1, len(values) + 1), values, color=COLOURS[layer % len(COLOURS)], label=f"layer {layer + 1}",
                    linestyle="-" if layer < len(COLOURS) else "--")
        label(ax, "rank", "eigenvalue over the largest", NAMES[condition], log="xy", legend=ax is axes[0])
    caption(figure, "Eigenvalues of each layer's centred kernel fall over decades, with random labels among them and without.")
    return figure


@styled
def draw_bound(results: Results) -> Figure:
    """Figure of the stable ranks of the Fisher information and of the tangent kernel, by layer."""
    figure, (ax,) = panels(1, across=1, width=5.0, height=3.0)
    for k, condition in enumerate(CONDITIONS):
        chosen = results.where(condition=condition)
        layers = np.arange(1, chosen["tangent_stable_rank"].shape[-1] + 1)
        band(ax, layers, chosen["tangent_stable_rank"][:, 1], COLOURS[k], NAMES[condition])
        band(ax, layers, chosen["fisher_stable_rank"][:, 1], COLOURS[k], "", "--")
    label(ax, "layer", "stable rank", legend=True)
    caption(figure, "The Fisher information (dashed) has fewer directions than the tangent kernel in most layers, not in all.")
    return figure


UNTRAINED = Control("untrained networks", {"subject": "untrained"})
BAR = "definitions, section 4"
NOT = ("in networks trained with the smaller learning rate some layers inside have a Fisher information of more directions (2.0 "
       "to 2.6) than their tangent kernel (1.7 to 2.3), which one large direction dominates. With the larger rate the bound "
       "holds in most layers; it is no theorem, and Gaussian gradients break it as well")
EXPERIMENT = Experiment(
    name="signal_fig20", ref=Ref("signal", "Fig. 20"), title="ranks and correlations of kernels and of Fisher information",
    smoke=SignalFig20Settings(n=1_000, epochs=20, probe=50), paper=SignalFig20Settings(seeds=tuple(range(10))),
    over=("condition", "seed"), analysis=("subject", "measure"), work=work,
    data=("fashion_mnist",),
    places=("Fig. 19", "Fig. 20", "Fig. 21", "Fig. 22", "Fig. 23"),
    figures={"signal_fig19": draw_spectra, "signal_fig20": by_layer(
        ("tangent_cka", "alignment (tangent_cka)"), ("tangent_stable_rank", "stable rank"),
        ("tangent_correlation", "correlation"),
        sentence="Networks that generalise have a larger alignment, which is more a larger correlation than a smaller rank."),
        "signal_fig21": draw_bound,
        "signal_fig22": by_layer(("fisher_stable_rank", "stable rank of Fisher"),
                                 sentence="Fewer directions of the Fisher information where the labels could be learned."),
        "signal_fig23": by_layer(("fisher_correlation", "Fisher correlation"),
                                 sentence="The Fisher information's correlation with the labels is small in every network.")},
    start={"n": 200, "epochs": 1, "probe": 20, "eigenvalues": 20, "seeds": (0,)},
    reduced="1,000 images, 20 epochs, kernels of 50 images",
    missing=dict.fromkeys(("Fig. 19", "Fig. 20", "Fig. 21", "Fig. 22", "Fig. 23"),
                          "VGG19 on CIFAR-10; here fully connected networks of depth 8 on 2,000 images of Fashion-MNIST, and "
                          "random labels throughout beside 20 %"),
    protocol="stand-in: fully connected networks on 2,000 images of Fashion-MNIST for VGG-19 on CIFAR-10",
    claims=(
        Claim("mean correlation with the labels, clean labels over random ones", told, Interval(low=2.0),
              Control("the Fisher information's correlation", {"measure": "other"}), source=BAR, over="seed", own=True),
        Claim("mean alignment of the best network over that with 20 % random labels", ratio("tangent_cka", "fast", "noisy"),
              Interval(low=1.5), UNTRAINED, paper="larger where the test accuracy is", over="seed",
              source="the text: larger; random labels alone would take 1/.82^2 = 1.49 from any kernel that was aligned",
              says="The alignment is larger where the test accuracy is."),
        Claim("log10 by which eigenvalues fall faster without the 20 % random labels", decay, Interval(low=1e-6), UNTRAINED,
              paper="faster on average", source="the text: faster", over="seed", places=("Fig. 19",),
              says="Eigenvalues of the tangent kernel fall faster without random labels."),
        Claim("smallest R(tangent kernel) / R(Fisher) over layers and networks", bound, Interval(low=1.0),
              Control("Gaussian gradients and random probabilities", {"subject": "matrices"}), paper="above 1 in every layer",
              source="the text: observed, though no theorem", over="seed", places=("Fig. 21",), differs=NOT,
              says="The stable rank of the tangent kernel is above that of the Fisher information in every layer."),
        Claim("mean R(Fisher) with random labels minus that with clean ones", fewer("random"), Interval(low=1e-6), UNTRAINED,
              source=BAR, over="seed", places=("Fig. 22",), own=True),
        Claim("mean R(Fisher) of the better of the two other networks minus that of the best", fewer("slow", "noisy"),
              Interval(low=1e-6), UNTRAINED, paper="smaller where the test accuracy is larger", over="seed", places=("Fig. 22",),
              source="the text: smaller",
              says="A higher test accuracy goes with a smaller stable rank of the Fisher information."),
        Claim("mean Fisher correlation of the best network over that with 20 % random labels", apart, Interval(0.5, 2.0),
              Control("the tangent kernel's correlation", {"measure": "other"}), paper="nothing is told apart", over="seed",
              source="the text: no relation; a factor of 2", places=("Fig. 23",),
              says="The correlation of the Fisher information with the labels tells nothing apart."),
    ))
