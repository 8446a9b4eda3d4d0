"""Optimal feature evolution for any twice differentiable loss, with a velocity matrix.  [signal, App. D.2]

Outputs F [n], w = dL/dF and features Psi = dF/dtheta [p, n] follow
    Psi' = lr V Psi w w^T,    theta' = -lr A Psi w,    F' = Psi^T theta'    (so that w' = L_FF F').
V = gamma I, A = I and L = |F - y|^2 / 2 give ``ofe.OptimalFeatureEvolution``. V = -H_w A / |w|^2, with the Hessians of the
outputs in H_w = sum_i w_i d^2 F_i / dtheta^2, moves the gradient Psi w like gradient descent with the adjustment A.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import SelectionError
from richter.core.arrays import Array, ArrayLike
from richter.theory.arrays import Times, like, read, times_from_zero
from richter.theory.flows import flow


@dataclass(frozen=True)
class EvolutionState:
    """Outputs F [n], features Psi [p, n], the movement of the parameters [p], and w = dL/dF [n]."""

    F: Float[Tensor, " n"]
    Psi: Float[Tensor, "p n"]
    moved: Float[Tensor, " p"]
    w: Float[Tensor, " n"]


Operator = float | ArrayLike | Callable[[EvolutionState], Tensor]  # a number times I, a matrix [p, p], or a function of the state


@dataclass(frozen=True)
class GeneralisedFeatureEvolution:
    """Feature evolution from features ``Psi0`` [p, n] and outputs ``F0`` [n] (default zero; several outputs are flattened into
    n), under ``loss``, a function of a tensor F that autograd differentiates. ``velocity`` V and ``adjustment`` A (I: gradient
    descent; the inverse Fisher matrix: natural gradient) are numbers, matrices [p, p], or functions of the ``EvolutionState``.

    >>> GeneralisedFeatureEvolution(Psi0, 0.5, lambda F: (F - y).square().sum() / 2).simulate([0.0, 1.0])
    """

    Psi0: ArrayLike
    velocity: Operator
    loss: Callable[[Tensor], Tensor]
    F0: ArrayLike | None = None
    lr: float = 1.0
    adjustment: Operator = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise SelectionError(f"lr={self.lr!r}: a rate above 0 is needed.")
        start = self._start()
        for name, operator in (("velocity", self.velocity), ("adjustment", self.adjustment)):
            _product(operator, name, start, start.Psi)

    def simulate(self, t: Times) -> tuple[Array, Array]:
        """Return (F [t, n], Psi [t, p, n]) by integrating the flow."""
        start = self._start()

        def velocity(state: list[Tensor]) -> list[Tensor]:
            Psi_dot, moved_dot = self.slopes(self._state(*state))
            return [state[1].T @ moved_dot, Psi_dot, moved_dot]

        states = flow(velocity, [start.F, start.Psi, start.moved], times_from_zero(t).tolist())
        return like(torch.stack([s[0] for s in states]), self.Psi0), like(torch.stack([s[1] for s in states]), self.Psi0)

    def slopes(self, state: EvolutionState) -> tuple[Float[Tensor, "p n"], Float[Tensor, " p"]]:
        """Time derivatives Psi' and theta' at a state."""
        gradient = state.Psi @ state.w
        Psi_dot = self.lr * torch.outer(_product(self.velocity, "velocity", state, gradient), state.w)
        return Psi_dot, -self.lr * _product(self.adjustment, "adjustment", state, gradient)

    def _start(self) -> EvolutionState:
        """State at time 0."""
        (Psi,) = read(Psi0=(self.Psi0, "p n"))
        F = torch.zeros_like(Psi[0]) if self.F0 is None else read(Psi0=(Psi, "p n"), F0=(self.F0, "n"))[1]
        return self._state(F, Psi, torch.zeros_like(Psi[:, 0]))

    def _state(self, F: Float[Tensor, " n"], Psi: Float[Tensor, "p n"], moved: Float[Tensor, " p"]) -> EvolutionState:
        """State with the gradient of the loss at these outputs."""
        with torch.enable_grad():
            live = F.detach().requires_grad_()
            loss = self.loss(live)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise SelectionError("loss(F) must be one number that autograd can differentiate with respect to F: compute it "
                                     "with torch, from F itself, and sum it up.")
            (w,) = torch.autograd.grad(loss.sum(), live)
        return EvolutionState(F, Psi, moved, w)


def descent_velocity(H_w: ArrayLike, w: ArrayLike, A: ArrayLike | None = None) -> Array:
    """V = -H_w A / |w|^2 [p, p]: with it, d(Psi w)/dt = -lr (H_w + Psi L_FF Psi^T) A Psi w, that of training.
    [signal, Eq. (21)]"""
    H, w_ = read(H_w=(H_w, "p p"), w=(w, "n"))
    if not w_.any():
        raise SelectionError("w = dL/dF is zero: the loss is at its minimum, and no velocity is defined.")
    A_ = torch.eye(len(H), dtype=H.dtype, device=H.device) if A is None else read(H_w=(H, "p p"), A=(A, "p p"))[1]
    return like(-H @ A_ / w_.square().sum(), H_w)


def _product(operator: Operator, name: str, state: EvolutionState, x: Tensor) -> Tensor:
    """Product of the user's operator V or A with x."""
    value = operator(state) if callable(operator) else operator
    if isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0:
        return float(value) * x
    (M,) = read(**{name: (value, "p p")})
    if len(M) != len(x):
        raise SelectionError(f"{name} has shape {tuple(M.shape)} for {len(x)} features: a number, a matrix [{len(x)}, {len(x)}], "
                             f"or a function of the state that gives one is needed.")
    return M.to(x.device) @ x
