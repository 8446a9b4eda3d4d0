"""Second-order analysis: the Hessians of the outputs and steps of training.  [signal, App. B.4, B.5, D]

    H = hessian(model, probe)                    # products with H_w, never formed: hessian.py
    theorem_a(model, probe).error                # H_w (D theta) = (L - D) grad L: exact for homogeneous networks
    early_step(model, probe, lr=1e-4)            # the change of Psi y~ in one step, its first order, and the units that flip
    predicted_alignment(A, H.moments(), lr)      # tangent_cka after that step by the corrected Eq. (25), for each layer

H_w = sum_i w_i d^2 f_i / dtheta^2 with w = dL/df. Psi are the gradients of the outputs, y~ the labels minus their mean over all
examples and outputs. The loss's own Hessian is H_w + Psi L_ff Psi^T.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from richter.core import Card, Ref, SelectionError
from richter.instrument.capture import forward, quiet, to_device, unwrap
from richter.instrument.probe import Probe
from richter.instrument.statistics.frame import NO_LABELS, Missing
from richter.instrument.statistics.outputs import OUTPUTS, Answers
from richter.linalg import quotient
from richter.measures.cards import ANSWERS, COSINE
from richter.measures.hessian import Eigenpairs, Hessian, TraceMoment, hessian
from richter.measures.measure import Measure

__all__ = [
    "EarlyStep",
    "Eigenpairs",
    "Hessian",
    "TheoremA",
    "TraceMoment",
    "early_step",
    "hessian",
    "label_gradient_correlation",
    "natural",
    "predicted_alignment",
    "theorem_a",
]

HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Flatten, nn.Dropout)  # phi(a z) = a phi(z) for a > 0, in eval mode


def centred(Y: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return y~: subtract the mean over all outputs that count, and set the others to zero."""
    if counted is None:
        return Y - Y.mean()
    keep = counted.to(Y)
    return (Y - (Y * keep).sum() / keep.sum()) * keep


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two tensors; NaN if one is zero."""
    return quotient(float((a * b).sum()), float(a.norm() * b.norm()))


# --------------------------------------------------------------------------------------------------- labels and gradient


def label_gradient_correlation(a: Answers) -> float:
    """Return corr(y~, dL/df) over all outputs of all examples; -1 while all examples have the same outputs.  [signal, Approx.
    1]"""
    o = a.objective
    if o.Y is None:
        raise Missing(NO_LABELS)
    w = o.gradient(a.f).double()
    return cosine(centred(o.Y.to(w), o.counted), centred(w, o.counted))


MEASURES = (
    Measure("label_gradient_correlation", label_gradient_correlation, (OUTPUTS,), card=Card(
        "labels and loss gradient",
        "The correlation of the centred labels and the loss gradient with respect to the outputs: -1 while all outputs are "
        "equal.",
        panel=ANSWERS, bounds=COSINE, ref=Ref("signal", "Approx. 1"))),
)


# ----------------------------------------------------------------------------------------------------------- Theorem A


@dataclass(frozen=True)
class TheoremA:
    """The two sides H_w (D theta) and (L - D) grad L of Theorem A; D is 1 for weights and l for the bias of layer l."""

    left: Float[Tensor, " p"]
    right: Float[Tensor, " p"]
    depth: int  # L, number of weight matrices
    biases: bool

    @property
    def error(self) -> float:
        """Relative difference of both sides, |left - right| / |right|."""
        return quotient(float((self.left - self.right).norm()), float(self.right.norm()))


def theorem_a(model: nn.Module, probe: Probe, weights: Tensor | None = None, biases: bool = True) -> TheoremA:
    """Return both sides of Theorem A for a chain of linear layers and homogeneous activations: H_w (D theta) = (L - D) Psi w.
    Without biases D = 1, so Psi w = H_w theta / (L - 1) and gradient descent is theta - lr/(L - 1) H_w theta. ``biases=False``
    uses D = 1 for biases too, as printed in the paper; the identity then fails.  [signal, Theorem A]"""
    degrees, depth = homogeneity(model)
    H = hessian(model, probe, weights)
    scale = torch.cat([torch.full((p.numel(),), float(degrees[name] if biases else 1), dtype=torch.float64)
                       for name, p in zip(H.names, H.places, strict=True)]).to(H.theta.device)
    return TheoremA(H(scale * H.theta), (depth - scale) * H.gradient, depth, any(d > 1 for d in degrees.values()))


def homogeneity(model: nn.Module) -> tuple[dict[str, int], int]:
    """Return ({parameter: degree}, number of layers): scaling each parameter by a^degree scales the outputs by a^layers."""
    model = unwrap(model)
    degrees: dict[str, int] = {}
    depth = 0
    if frozen := [name for name, p in model.named_parameters() if not p.requires_grad]:
        raise SelectionError(f"{frozen[0]} is frozen (requires_grad=False), but H_w covers trainable parameters only, and "
                             f"Theorem A needs all of them.")
    weighted = [m for _, m in model.named_modules(remove_duplicate=False) if any(True for _ in m.parameters(recurse=False))]
    if len(set(weighted)) < len(weighted):
        raise SelectionError("a layer with weights occurs twice in the model, so its bias would belong to two depths. Theorem A "
                             "applies to chains of layers: give each place a layer of its own.")
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            depth += 1
            degrees[f"{name}.weight" if name else "weight"] = 1
            if module.bias is not None:
                degrees[f"{name}.bias" if name else "bias"] = depth
        elif not isinstance(module, (nn.Sequential, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, *HOMOGENEOUS)):
            raise SelectionError(f"{name or 'the model'} is a {type(module).__name__}: Theorem A applies to chains of linear "
                                 f"layers with positively homogeneous activations, phi(a z) = a phi(z) (ReLU, leaky ReLU, none), "
                                 f"in an nn.Sequential. H_w itself works for any model: hessian(model, probe).")
    if depth < 2:
        has = "one weight matrix" if depth else "no weights"
        raise SelectionError(f"the model has {has}: without a hidden layer its outputs are linear in the weights, H_w is 0, and "
                             f"Theorem A reads 0 = 0.")
    return degrees, depth


# --------------------------------------------------------------------------------------------------- early in training


@dataclass(frozen=True)
class EarlyStep:
    """One step of gradient descent: the change of Psi y~, and its approximations, as vectors over parameters."""

    change: Float[Tensor, " p"]  # Psi(t+1) y~ - Psi(t) y~
    first: Float[Tensor, " p"]  # -lr H_y~ Psi w, the first order in lr  [Approx. 2]
    collinear: Float[Tensor, " p"]  # -lr H_w Psi y~, with w in place of -y~  [Approx. 1]
    correlation: float  # corr(y~, w)
    flips: int  # hidden units that switched between zero and non-zero in the step, over all examples
    units: int

    @property
    def first_order(self) -> float:
        """Return corr(change, first); 1 if the network is smooth over the step."""
        return cosine(self.change, self.first)

    @property
    def approximation(self) -> float:
        """Correlation of the change with its collinear approximation."""
        return cosine(self.change, self.collinear)

    def projected(self, vectors: Float[Tensor, "k p"]) -> float:
        """Return corr(U change, U collinear) on the span of some vectors.  [signal, Fig. 5a]"""
        return cosine(vectors @ self.change, vectors @ self.collinear)


def early_step(model: nn.Module, probe: Probe, lr: float) -> EarlyStep:
    """Take one step theta - lr grad L with a copy of the model, and compare. The model itself does not change."""
    if not (math.isfinite(lr) and lr > 0):
        raise SelectionError(f"lr={lr!r}: the learning rate of a step must be above 0.")
    H = hessian(model, probe)
    subject = H.subject
    if subject.targets.Y is None:
        raise SelectionError(f"{NO_LABELS}, but a step is compared along the labels. Give class ids or targets.")
    y = centred(subject.targets.Y.double(), subject.targets.counted)
    then = copy.deepcopy(subject.model)
    with torch.no_grad():
        moved = H.parts(H.theta - lr * H.gradient)
        for name, p in then.named_parameters():
            if name in moved:
                p.copy_(moved[name])
    after = hessian(then, probe, y)
    before = H.weighted(y)
    flips, units = _flips(H, after)
    w = subject.loss_gradient.double()
    return EarlyStep(after.gradient - before.gradient, -lr * before(H.gradient), -lr * H(before.gradient),
                     cosine(y, centred(w, subject.targets.counted)), flips, units)


def _flips(*networks: Hessian) -> tuple[int, int]:
    """Count the units that are zero in exactly one of the two networks, and all units that layers read."""
    silent = []
    for s in (H.subject for H in networks):
        with quiet(s.model):
            calls = forward(s.model, to_device(s.x, s.device), s.state, output=s.output, splits=s.survey.splits,
                            anew=s.survey.anew).calls
            silent.append([c.inputs().detach() == 0 for c in calls if not c.given])
    return sum(int((a != b).sum()) for a, b in zip(*silent, strict=True)), sum(a.numel() for a in silent[0])


# ---------------------------------------------------------------------------------------------- one step of the alignment


def predicted_alignment(A: Mapping[str, float], moments: Mapping[str, Mapping[int, TraceMoment]], lr: float) -> dict[str, float]:
    """Predict {layer: tangent_cka after one step of gradient descent}: A_l (1 - 2 lr tr(M_l H^3) / tr(M_l H^2) + lr^2 tr(M_l H^4)
    / tr(M_l H^2)), from its current value and the moments of H_w. It assumes w = -y~, a constant norm of the kernel, and random
    directions: an estimate of the sign of a layer's change.  [signal, Eq. (25), corrected]"""
    if missing := [k for k in A if k not in moments]:
        raise SelectionError(f"there are no moments of layer {missing[0]!r}. Moments are of: {', '.join(moments)}.")
    return {layer: value * (1 - 2 * lr * quotient(m[3].value, m[2].value) + lr ** 2 * quotient(m[4].value, m[2].value))
            for layer, value in A.items() for m in [moments[layer]]}


# ------------------------------------------------------------------------------------------ generalised feature evolution


def natural(H: Hessian, damping: float = 1e-3) -> Callable[[Tensor], Tensor]:
    """v -> (F + damping)^-1 v with the Fisher matrix F of the mean loss, by conjugate gradients. This is the adjustment A of
    natural gradient descent (A is the identity for gradient descent). ``theory.gofe.descent_velocity(H.dense(), H.w.flatten(),
    A)`` makes it the velocity with which feature evolution moves the gradient like training.  [signal, Eqs (16), (21)]"""
    from scipy.sparse.linalg import LinearOperator, cg
    if not damping > 0:
        raise SelectionError(f"damping={damping!r}: give a number above 0, because the Fisher matrix is singular.")

    def product(v: Tensor) -> Tensor:
        v = torch.as_tensor(v, dtype=torch.float64).to(H.subject.home)
        return H.fisher(v) / H.softmaxes + damping * v

    def solve(v: Tensor) -> Tensor:
        M = LinearOperator((H.size, H.size), matvec=lambda x: product(torch.from_numpy(x)).cpu().numpy(), dtype=float)
        x, failed = cg(M, v.cpu().numpy(), rtol=1e-10, maxiter=10 * H.size)
        if failed:
            raise SelectionError(f"(F + {damping:g})^-1 v did not converge in {10 * H.size} products: take a larger damping.")
        return torch.from_numpy(x).to(v)
    return solve
