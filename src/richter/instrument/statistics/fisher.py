"""The Fisher information of cross-entropy, layer by layer: I_l = Psi_l H Psi_l^T with H = blockdiag(diag(p) - p p^T), where Psi_l
are the gradients of the outputs and p = softmax(f). It is the mean over examples of E_{y ~ p}[s s^T] with the scores
s = grad log p(y | x): the model's own Fisher information on the probe's inputs, which no label enters.  [signal, App. G]

* few outputs: its spectrum is that of H^1/2 K_l H^1/2, a tangent kernel whose cotangents are the rows of the root (ROOT);
* many outputs: the Gram matrix of some random combinations B z of each example's outputs, B B^T = H, has the same Fisher
  information in the mean; what is made of it is freed of the first order of its bias and has an error over the draws;
* products with I itself, over all parameters (FISHER_MATRIX).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from richter import linalg
from richter.core import Mark, Remark, SelectionError
from richter.instrument.cotangents import MOST, Cotangents, RandomOutputs, Use
from richter.instrument.statistics.frame import WITHIN, Derived, Gathering, OfKernels, Place, Statistic, Wants, finite
from richter.instrument.statistics.kernels import LABELS, TANGENT_KERNEL, Estimate, Estimates, KernelTargets, Tangents, flat, left
from richter.instrument.statistics.operators import Operator
from richter.instrument.subject import Subject

DRAWS = 16  # random combinations of an example's outputs
STEP, REACH = 0.5, 60.0  # of the quadrature of the root: its error is exp(-2 pi^2 / STEP) and exp(-REACH / 2)
ROUGH_STEP, ROUGH_REACH = 1.2, 32.0  # and where there are many outputs, 1e-7: the draws are less exact by far
NO_CLASSES = ("the Fisher information of cross-entropy needs outputs that are logits of classes: give class or token ids as "
              "labels, or one-hot targets")
ONE_CLASS = "one class: the softmax of a single output is 1 whatever the network does, so its Fisher information is 0"


# ------------------------------------------------------------------------------------------- the metric of cross-entropy


def shifted(p: Float[Tensor, "... c"], v: Tensor) -> Tensor:
    """v minus its entry where p is largest. H does not see it, and where that p is nearly 1 nothing cancels any more."""
    most = p.argmax(-1, keepdim=True).expand(*v.shape[:-1], 1)
    return v - v.gather(-1, most)


def metric_times(p: Float[Tensor, "... c"], v: Tensor) -> Tensor:
    """Product H v with the metric H = diag(p) - p p^T of cross-entropy."""
    v = shifted(p, v)
    return p * (v - (p * v).sum(-1, keepdim=True))


def root_times(p: Float[Tensor, "... c"], v: Tensor, step: float = STEP, reach: float = REACH) -> Tensor:
    """H^1/2 v, without eigenvectors: H^1/2 = 1/pi int H (H + s)^-1 s^-1/2 ds by the trapezoid rule in log s, whose error falls
    like exp(-2 pi^2 / step). H + s is a diagonal and one rank more, and what Sherman and Morrison give for H (H + s)^-1 v is
    w (v - <w, v> / sum w) with w = p / (p + s), because the p add up to 1."""
    v = shifted(p, v)
    scale = metric_trace(p)[..., None].clamp(min=1e-270)  # of the eigenvalues; the smallest s is far below it, and not 0
    total = torch.zeros_like(v)
    for j in range(math.ceil(2 * reach / step) + 1):
        s = scale * math.exp(j * step - reach)
        w = p / (p + s)
        total += s.sqrt() * w * (v - (w * v).sum(-1, keepdim=True) / w.sum(-1, keepdim=True))
    return total * step / math.pi


def metric_trace(p: Float[Tensor, "... c"]) -> Tensor:
    """tr H = sum p (1 - p); of the largest p, 1 - p is the sum of the others."""
    top, most = p.max(-1, keepdim=True)
    rest = p.scatter(-1, most, 0.0)
    return (top * rest.sum(-1, keepdim=True)).squeeze(-1) + (rest * (1 - rest)).sum(-1)


def factor_times(p: Float[Tensor, "... c"], z: Tensor) -> Tensor:
    """B z with B = diag(q) (I - q q^T) and q = p^1/2, for which B B^T = H."""
    q = p.sqrt()
    z = q * shifted(p, z / q.clamp(min=1e-300))  # less a multiple of q, which I - q q^T does not see
    return q * (z - q * (q * z).sum(-1, keepdim=True))


def probabilities(f: Float[Tensor, "n k"], classes: int) -> Float[Tensor, "n t c"]:
    """Probabilities of the classes for every token or example, in float64."""
    return f.detach().double().reshape(len(f), -1, classes).softmax(-1)


@dataclass(frozen=True)
class FisherRoot(Cotangents):
    """The rows of H^1/2, the symmetric root: a kernel seen through them is H^1/2 K H^1/2. The labels beside it are the labels."""

    classes: int = field(default=0, compare=False)  # prepared: how many outputs have a softmax together

    def chosen(self, given: Cotangents | None, outputs: int, use: Use) -> Cotangents:
        """Return these cotangents, whatever others were given."""
        return self  # the metric of cross-entropy is not a choice among outputs

    def prepare(self, subject: Any) -> Cotangents:
        """Return a copy with the number of classes."""
        return replace(self, classes=subject.survey.shape[-1])

    def count(self, outputs: int, use: Use, Y: Tensor | None = None) -> int:
        return outputs

    def rows(self, f: Float[Tensor, "n k"], Y: Tensor | None, examples: Sequence[int], block: slice,
             use: Use) -> Float[Tensor, "v n k"]:
        """Rows of the symmetric square root of the metric of cross-entropy, for each token."""
        n, k, c = *f.shape, self.classes
        p = probabilities(f, c)
        eye = torch.eye(c, dtype=p.dtype, device=p.device)
        S = root_times(p[:, :, None], eye.expand(n, k // c, c, c))  # "n t c c", symmetric
        V = torch.diag_embed(S.permute(0, 2, 3, 1)).permute(3, 1, 0, 4, 2)  # "t c n t c", zero between tokens
        return V.reshape(k, n, k)[block].to(f)

    def labels(self, Y: Float[Tensor, "n k"], keep: Tensor | None,
               V: Callable[[], Float[Tensor, "v n k"]]) -> tuple[Float[Tensor, "n v"], Tensor | None]:
        return Y, keep


ROOT = FisherRoot()


@dataclass(frozen=True)
class SampledRoot(Cotangents):
    """Random combinations B z / sqrt(draws) of each example's outputs, B B^T = H, with z of random signs: on the average
    over z their outer products are H. The last one is H^1/2 y itself, for y^T H^1/2 K H^1/2 y."""

    signs_of: RandomOutputs
    classes: int = field(default=0, compare=False)
    exact = False

    def prepare(self, subject: Any) -> Cotangents:
        """Return a copy with the number of classes."""
        return replace(self, classes=subject.survey.shape[-1])

    def count(self, outputs: int, use: Use, Y: Tensor | None = None) -> int:
        return self.signs_of.v + 1

    def rows(self, f: Float[Tensor, "n k"], Y: Tensor | None, examples: Sequence[int], block: slice,
             use: Use) -> Float[Tensor, "v n k"]:
        """Random combinations of the columns of a root of the metric, and last the direction of the labels."""
        p, (n, k), m = probabilities(f, self.classes), f.shape, self.signs_of.v
        V = torch.empty(block.indices(m + 1)[1] - block.indices(m + 1)[0], n, k, dtype=f.dtype, device=f.device)
        for i, v in enumerate(range(*block.indices(m + 1))):
            if v < m:
                z = self.signs_of.signs(examples, k, [v])[0].to(p.device, torch.float64).view_as(p)
                V[i] = (factor_times(p, z) / m ** 0.5).reshape(n, k)
            else:
                assert Y is not None
                V[i] = torch.stack([root_times(q, y, ROUGH_STEP, ROUGH_REACH)
                                    for q, y in zip(p, Y.to(p).view_as(p), strict=True)]).reshape(n, k)
        return V


# --------------------------------------------------------------------------------------------- what is known of the Fisher


@dataclass(frozen=True)
class FisherKernel:
    """Sums over H^1/2 K_l H^1/2 and the labels: ``norm`` and largest eigenvalue ``top``, ``quadratic`` y~^T H^1/2 K_l H^1/2 y~
    and ``energy`` |y~|^2 of the labels minus their mean over all examples and outputs."""

    norm: float
    top: float
    quadratic: float
    energy: float
    leading: linalg.Leading | None = None  # from whose vectors the values with groups left out are made


def fisher_kernel(K: Float[Tensor, "n v n v"], labels: KernelTargets) -> FisherKernel:
    """Norm, leading eigenvalue, and alignment with centred labels of a Fisher kernel."""
    K, y, _ = flat(K, labels)
    assert y is not None
    y = y - y.mean()
    size, leading = finite(K.norm().item()), linalg.leading(K)
    return FisherKernel(size, leading.value if size else 0.0, (y @ (K @ y)).item(), (y @ y).item(), leading)


def fisher_kernel_leaving(whole: FisherKernel, K: Float[Tensor, "n v n v"], labels: KernelTargets,
                          groups: int) -> list[FisherKernel]:
    """Compute the sums with each group of examples left out, from sums over blocks of the whole."""
    K, y, example = flat(K, labels)
    assert y is not None
    inside = torch.nn.functional.one_hot(example % groups, groups).to(K)
    keep = 1 - inside.T
    norms = linalg.without_each((inside.T @ (K * K) @ inside)[None])[0].clamp(min=0).sqrt()
    tops = linalg.top_of_each(K, keep.cpu().numpy(), whole.leading, centred=False)
    Y = (y - ((keep @ y) / keep.sum(1))[:, None]) * keep
    quadratics, energies = (Y * (Y @ K)).sum(1), Y.square().sum(1)
    return [FisherKernel(*values) for values in zip(norms.tolist(), tops, quadratics.tolist(), energies.tolist(), strict=True)]


@dataclass(frozen=True)
class Fisher(Derived):
    """Exact where there are few outputs and the kernel fits, else from random combinations of each example's outputs."""

    most: int = MOST["kernel"]  # outputs, for the exact one
    draws: int = DRAWS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draws < 3:
            raise SelectionError(f"draws={self.draws}: give 3 or more. The standard error of a Fisher information comes from "
                                 "leaving draws out.")

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        if subject.targets.objective is None or subject.targets.objective.classes is None:
            return ONE_CLASS if subject.survey.shape[-1:] == (1,) and subject.targets.objective is not None else NO_CLASSES
        if subject.survey.shape[-1] < 2:
            return ONE_CLASS
        t = Tangents(subject, cotangents)
        if t.v <= self.most and cotangents.exact and t.fits:
            return super().planned(subject, cotangents)
        return FisherSketch(f"{self.name} of {self.draws} draws", self.draws, self.seed)


FISHER = Fisher("fisher_kernel", fisher_kernel, (TANGENT_KERNEL, LABELS), fisher_kernel_leaving)


# ---------------------------------------------------------------------------------------------------------- many outputs


@dataclass(frozen=True)
class FisherSketch(OfKernels):
    """From the Gram matrix of random combinations of each example's outputs."""

    draws: int
    seed: int = 0

    def sampled(self, subject: Subject) -> Tangents:
        """Tangents whose cotangents are random combinations of the Fisher metric's root."""
        return Tangents(subject, SampledRoot(RandomOutputs(self.draws, self.seed)).prepare(subject))

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        t = self.sampled(subject)
        return Wants(alone=t.bytes() + t.least(), what=f"the kernel of one layer over {t.n} examples and {self.draws} draws",
                     passes=(1 + t.v) / 3 * t.n / subject.probe.n)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        label = f"from {self.draws} random combinations of the {subject.survey.outputs} outputs of each example"
        remark = Remark(Mark.ESTIMATED, label)
        t = self.sampled(subject)
        return Estimates(lambda: _sketched(t), {WITHIN: self.draws, **t.groups}, remark)


def _sketched(t: Tangents) -> Iterator[tuple[str, Estimate]]:
    """Yield the estimate of each module from random combinations, with all groups of examples left out in turn."""
    subject = t.subject
    assert subject.targets.Y is not None
    Y, counted = subject.targets.Y[t.rows].double(), None if subject.targets.counted is None else subject.targets.counted[t.rows]
    without = [left(t.n, ("examples", g)) for g in range(t.groups["examples"])]
    sets = [(keep, _energy(Y[keep], None if counted is None else counted[keep]))
            for keep in (torch.ones(t.n, dtype=torch.bool), *without)]
    for name, K in t.summed((name, K.to(subject.home, torch.float64)) for name, K in t.anew("full")):  # "v n v n"
        yield name, _estimate(K, *sets)


def _energy(Y: Float[Tensor, "n k"], counted: Tensor | None) -> float:
    """Squared norm |y~|^2 of the centred labels that count."""
    real = Y if counted is None else Y[counted]
    return (real - real.mean()).square().sum().item()


def _estimate(K: Float[Tensor, "v n v n"], everything: tuple[Tensor, float], *fewer: tuple[Tensor, float]) -> Estimate:
    """Estimate from all draws, and without each group of draws or examples. ``sets`` are the examples with the labels' norm. The
    metric takes constants to zero, so labels need no new centring."""
    m = len(K) - 1
    every = torch.arange(m)

    def value(keep: Tensor, examples: Tensor, energy: float) -> FisherKernel:
        draws, rows = keep.nonzero().flatten().to(K.device), examples.nonzero().flatten().to(K.device)
        part = K[draws][:, rows][:, :, draws][..., rows] * (m / len(draws))
        return FisherKernel(_norm(part), _top(part), K[m, :, m][rows][:, rows].sum().item(), energy)
    return Estimate(value(every >= 0, *everything), {WITHIN: [value(every != j, *everything) for j in range(m)],
                                                     "examples": [value(every >= 0, *some) for some in fewer]})


def _norm(K: Float[Tensor, "v n v n"]) -> float:
    """Norm |I|_F; its square is unbiased: from products of different examples, and of different draws of one example."""
    m = len(K)
    blocks = K.square().sum((0, 2))  # "n n"
    same = K.diagonal(dim1=1, dim2=3)  # "v v n"
    within = (same.square().sum() - same.diagonal(dim1=0, dim2=1).square().sum()) * (m / (m - 1))
    return finite((blocks.sum() - blocks.diagonal().sum() + within).clamp(min=0).sqrt().item())


def _top(K: Float[Tensor, "v n v n"]) -> float:
    """Largest eigenvalue, without the bias c / draws: twice that of all draws, minus the mean of both halves."""
    m, n = K.shape[:2]

    def top(draws: slice) -> float:
        part = K[draws][:, :, draws]
        return linalg.top_eigenvalue(part.reshape(len(part) * n, -1)) * (m / len(part))
    return 2 * top(slice(None)) - (top(slice(0, None, 2)) + top(slice(1, None, 2))) / 2


# -------------------------------------------------------------------------------------------------------------- products


@dataclass(frozen=True)
class FisherMatrix(Statistic):
    """The mean over examples of J^T (diag(p) - p p^T) J, over all trainable parameters: products, and their parts by layer."""

    name: str
    place: Place = "model"

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        classes = subject.survey.shape[-1] if subject.survey.shape else 0
        if classes == 1:
            return ONE_CLASS
        if no_classes(subject):
            return NO_CLASSES
        return Operator(self.name, lambda f, Y, places, vectors: fisher_times(f, places, vectors, classes)).planned(
            subject, cotangents)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        raise AssertionError("it is planned as an Operator")


def no_classes(subject: Subject) -> bool:
    """Return whether there are labels that are not classes. Without labels, outputs may be logits: no label enters the matrix."""
    return subject.targets.objective is not None and subject.targets.objective.classes is None


def fisher_times(f: Float[Tensor, "n k"], places: Sequence[Tensor], vectors: Sequence[Tensor], classes: int
                 ) -> Sequence[Tensor | None]:
    """J^T H J v, summed over these examples. J v by a gradient of the gradient: J^T u is linear in u."""
    u = torch.zeros_like(f, requires_grad=True)
    pulled = torch.autograd.grad(f, places, u, create_graph=True, allow_unused=True)
    along = [(g * v).sum() for g, v in zip(pulled, vectors, strict=True) if g is not None]
    (Jv,) = torch.autograd.grad(torch.stack(along).sum(), u) if along else (torch.zeros_like(f),)
    p = probabilities(f, classes)
    HJv = metric_times(p, Jv.double().view_as(p)).reshape(f.shape).to(f)
    return torch.autograd.grad(f, places, HJv, allow_unused=True)


FISHER_MATRIX = FisherMatrix("fisher_matrix")
