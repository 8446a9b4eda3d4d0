"""Kernel logistic regression: min_f sum_i w_i CE(f(x_i), y_i) + ridge / 2 |f|^2 with the softmax. For one output f, it is the
logistic function of 2 f, so that f has the same meaning as with two outputs."""

from __future__ import annotations

import warnings

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from richter.learners.problem import FitProblem
from richter.learners.scores import logits
from richter.learners.solvers import SingularKernelError, Solution


def likelihood(f: Float[Tensor, "n c"], y: Float[Tensor, "n c"], w: Float[Tensor, " n"]) -> tuple[float, Float[Tensor, "n c"]]:
    """Return the weighted cross-entropy and its gradient in f. y are mean targets: one-hot, or +-1 for one output."""
    z = logits(f)
    share = (1 + logits(y)) / 2 if f.shape[1] == 1 else y
    value = -(w @ (share * F.log_softmax(z, 1)).sum(1)).item()
    G = w[:, None] * (F.softmax(z, 1) - share)
    return value, (G[:, 1:] - G[:, :1] if f.shape[1] == 1 else G)


def solve_logistic(K: Float[Tensor, "n n"], data: FitProblem, ridge: float, *, intercept: bool, judged: int = 0,
                   final: bool = False) -> Solution:
    """Solve by L-BFGS in coordinates where the largest possible curvature of the loss plus the ridge is the identity. ``final``:
    to full precision, which a choice between settings does not need."""
    if judged:
        raise NotImplementedError("leaving rows out has no closed form for the logistic loss")
    if ridge <= 0:
        raise SingularKernelError("ridge=0: the logistic loss of separable classes has no minimum. Give a positive ridge.")
    n, c = data.y.shape
    K.diagonal().add_(1e-10 * K.diagonal().mean())
    L, info = torch.linalg.cholesky_ex(K)
    if info.item():
        K.diagonal().add_(1e-6 * K.diagonal().mean())
        L = torch.linalg.cholesky(K)
    H = L.T @ (data.w[:, None] * L)  # the curvature is at most 1 for one output, and 1/2 for several
    H.diagonal().add_(ridge)
    C = torch.linalg.cholesky(H)

    def unpack(v: np.ndarray) -> tuple[Tensor, Tensor]:
        t = torch.from_numpy(v).to(K)
        return t[:n * c].view(n, c), t[n * c:] if intercept else t.new_zeros(c)

    def objective(v: np.ndarray) -> tuple[float, np.ndarray]:
        phi, b = unpack(v)
        theta = torch.linalg.solve_triangular(C.T, phi, upper=True)
        value, G = likelihood(L @ theta + b, data.y, data.w)
        back = torch.linalg.solve_triangular(C, L.T @ G + ridge * theta, upper=False)
        gradient = torch.cat([back.flatten(), G.sum(0)]) if intercept else back.flatten()
        return value + ridge / 2 * theta.square().sum().item(), gradient.cpu().numpy()

    start = np.zeros(n * c + (c if intercept else 0))
    minimum = minimize(objective, start, jac=True, method="L-BFGS-B",
                       options={"maxiter": 1000, "maxfun": 2000, "gtol": (1e-8 if final else 1e-6) * float(data.w.sum()),
                                "ftol": 1e-14 if final else 1e-9})
    if final and not minimum.success:
        warnings.warn(f"the logistic loss of {n} points with ridge={ridge:g} was not minimised to the last digits "
                      f"({minimum.message}). A larger ridge makes it easier.", ConvergenceWarning, stacklevel=2)
    phi, b = unpack(minimum.x)
    theta = torch.linalg.solve_triangular(C.T, phi, upper=True)
    f = L @ theta  # = K A
    A = -likelihood(f + b, data.y, data.w)[1] / ridge  # holds at the minimum, and is well-conditioned even if K is singular
    if (L @ (L.T @ A) - f).norm() > 1e-3 * f.norm():  # dividing by a small ridge amplifies the remaining gradient
        A = torch.linalg.solve_triangular(L.T, theta, upper=True)
    return Solution(A, b.clone())
