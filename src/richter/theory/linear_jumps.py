"""Two-layer linear networks f(x) = A W x from small weights: which modes they learn at each jump, and when.  [agf, Sec. 4]

The moments S = E[x x^T] and C = E[y x^T] determine both. Active neurons turn until they form the best function of rank k, but no
neuron leaves its *block*, a subspace of the inputs that S and C^T C map into itself. So every block learns independently. If S
and C^T C commute, a block is one mode. It is learned after log(1 / alpha) / s, with s its singular value in C, even if it
explains little of the loss.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import SelectionError
from richter.core.arrays import Array, ArrayLike, to_tensor
from richter.theory.alternating import FINEST as FINEST
from richter.theory.alternating import Staircase, separations, warn_of_merging
from richter.theory.arrays import Times, above_zero, like, moments, normal, times_from_zero, varying, whole
from richter.theory.flows import flow

LINKED = 1e-10  # relative to the size of a matrix; smaller entries are rounding and do not link two directions
NOTHING = 1e-12  # relative to what the first mode explains; a mode that explains less is ignored
MIXTURES = (0.6180339887498949, 1.3247179572447460)  # two values, in case eigenvalues of the first sum coincide by chance
ASTRAY = 0.5  # alignment of a neuron's initial direction with its final one; below it the time to turn is not negligible
SMALL = "log(1 / alpha) of an alpha below 1"


class JumpModes(NamedTuple):
    """All modes, in the order in which they are learned."""

    times: Float[Tensor, " m"]  # in units of log(1 / alpha)
    explained: Float[Tensor, " m"]  # twice the fall of the loss
    strengths: Float[Tensor, " m"]  # largest singular value of the remaining C in the mode's block
    along: Float[Tensor, " m"]  # alignment of the direction in which a neuron becomes active with the mode, from 0 to 1


def linear(Sxx: ArrayLike, Syx: ArrayLike, *, threshold: float = 1.0) -> Staircase:
    """Staircase of f(x) = A W x from the moments E[x x^T] [d, d] and E[y x^T] [c, d]. Times are in units of log(1 / alpha);
    levels exclude the part that no linear function can fit. It is exact if each block has one mode, i.e. if moments commute. For
    larger blocks it is a conjecture, accurate to a few per cent.  [agf, Sec. 4]
    In a block: tau_k = tau_{k-1} + (1 - sum_{i < k-1} s^(i)_{k-i} (tau_{i+1} - tau_i)) / s^(k-1)_1, with s^(i)_j the singular
    values of (1 - P_i) E[y x^T] and P_i on the first i eigenvectors of E[y x^T] E[x x^T]^-1 E[x y^T].
    """
    return _staircase(modes(Sxx, Syx, threshold=threshold), Sxx)


def _staircase(learned: JumpModes, kind: ArrayLike) -> Staircase:
    """Times and losses of the jumps."""
    left = torch.cat([learned.explained.flip(0).cumsum(0).flip(0), learned.explained.new_zeros(1)]) / 2
    return Staircase(like(learned.times, kind), like(left, kind))


def modes(Sxx: ArrayLike, Syx: ArrayLike, *, threshold: float = 1.0) -> JumpModes:
    """Modes of all blocks together."""
    S, C = moments(Sxx, Syx)
    above_zero("a threshold", threshold=threshold)
    learned = [_modes_of_block(V.T @ S @ V, C @ V, threshold) for V in blocks(S, C)]
    every = JumpModes(*(torch.cat(parts) for parts in zip(*learned, strict=True)))
    kept = (every.explained > NOTHING * every.explained.max()).nonzero()[:, 0]
    order = kept[every.times[kept].argsort(stable=True)]
    chosen = JumpModes(*(part[order] for part in every))
    if (least := float(chosen.along.min())) < ASTRAY:
        warnings.warn(f"a neuron wakes in a direction that has a share of {least:.2g} of the mode that it is to learn: moments "
                      f"nearly commute. Until it has turned, which takes the longer the smaller the share, the network rests at "
                      f"another level. The staircase is that of the limit of small weights.", stacklevel=3)
    return chosen


def blocks(S: Float[Tensor, "d d"], C: Float[Tensor, "c d"]) -> list[Float[Tensor, "d m"]]:
    """Orthonormal bases of the smallest subspaces (of inputs with variance) that S and C^T C map into themselves. They are
    spanned by eigenvectors of a generic sum of the two. Eigenvectors that S or C^T C links belong to one block."""
    _, s, Vh = torch.linalg.svd(C, full_matrices=False)
    # the square root of C^T C has the same invariant subspaces, and small modes are less small
    S, B = S / S.norm(), (Vh.T * s) @ Vh / s.norm()
    bases = [varying(S)]
    for mixture in MIXTURES:
        bases = [V @ part for V in bases for part in _linked(V.T @ S @ V, V.T @ B @ V, mixture)]
    return bases


def _linked(S: Float[Tensor, "m m"], B: Float[Tensor, "m m"], mixture: float) -> list[Float[Tensor, "m k"]]:
    """Groups of directions that S and B couple, as bases."""
    from scipy.sparse.csgraph import connected_components
    V = torch.linalg.eigh(S + mixture * B).eigenvectors
    links = torch.maximum(*((V.T @ matrix @ V).abs() for matrix in (S, B))) > LINKED
    count, label = connected_components(links.cpu().numpy(), directed=False)
    return [V[:, torch.from_numpy(label == k).to(V.device)] for k in range(count)]


def _modes_of_block(S: Float[Tensor, "m m"], C: Float[Tensor, "c m"], threshold: float) -> JumpModes:
    """Modes of one block, the one that explains most first."""
    mu, U = (a.flip(-1) for a in torch.linalg.eigh(C @ torch.linalg.pinv(S, hermitian=True) @ C.T))
    rank = int((mu > NOTHING * mu[0]).sum())
    # singular values without the first k modes; waiting times
    values, steps, along = list[Tensor](), list[float](), list[float]()
    for k in range(rank):
        left, s, _ = torch.linalg.svd(C - U[:, :k] @ U[:, :k].T @ C, full_matrices=False)
        values.append(s)
        along.append(float(left[:, s > (1 - LINKED) * s[0]].T.mv(U[:, k]).norm()))
        earlier = sum(float(values[i][k - i]) * steps[i] for i in range(k))
        steps.append((threshold - earlier) / float(values[k][0]))
    return JumpModes(mu.new_tensor(steps).cumsum(0), mu[:rank], *map(mu.new_tensor, ([float(v[0]) for v in values], along)))


def predict_linear(Sxx: ArrayLike, Syx: ArrayLike, width: int, log_inverse: float, t: Times, *, threshold: float = 1.0) -> Array:
    """Return the loss at times ``t``, in units of ``log_inverse`` = log(1 / alpha), by the staircase; valid if width >= modes."""
    whole(width=width)
    above_zero(SMALL, log_inverse=log_inverse)
    learned = modes(Sxx, Syx, threshold=threshold)
    count, stairs = len(learned.times), _staircase(learned, Sxx)
    if width < count:
        raise SelectionError(f"width={width}, and there are {count} modes: a neuron holds one, so that the last ones are never "
                             f"learned, and what is learned may move on later. Take a width of {count} or more.")
    times, strengths, levels = (to_tensor(a).cpu().numpy() for a in (learned.times, learned.strengths, stairs.levels))
    warn_of_merging(log_inverse * times, levels, separations(log_inverse * times, strengths / 2, 2))
    return stairs.loss(times_from_zero(t))


def simulate_linear(Sxx: ArrayLike, Syx: ArrayLike, width: int, log_inverse: float, t: Times, seed: int = 0) -> Array:
    """Loss of the gradient flow of A and W from N(0, alpha^2 / width) at these times, minus the part that no linear map can
    fit."""
    whole(width=width)
    whole(0, seed=seed)
    above_zero(SMALL, log_inverse=log_inverse)
    given, L = moments(Sxx, Syx), float(log_inverse)
    S, C = (a.cpu() for a in given)
    if L > FINEST:
        warnings.warn(f"log_inverse={L:g} is above {FINEST:g}: rounding of float64, 1e-16 of what is awake, then seeds what "
                      f"sleeps, and late jumps come up to half too early. Take an alpha of 1e-15 or more.", stacklevel=2)
    A, W = (math.exp(-L) * normal(*shape, seed=seed) / math.sqrt(width) for shape in ((len(C), width), (width, len(S))))
    states = flow(lambda state: [L * g for g in _pulled(state[0], state[1], S, C)], [A, W], times_from_zero(t).tolist(),
                  rtol=1e-9, atol=1e-16)
    best = C @ torch.linalg.pinv(S, hermitian=True)
    off = [state[0] @ state[1] - best for state in states]
    return like(torch.stack([((B @ S) * B).sum() / 2 for B in off]).to(given[0].device), Sxx)


def _pulled(A: Tensor, W: Tensor, S: Tensor, C: Tensor) -> list[Tensor]:
    """Negative gradients of both layers."""
    pull = C - A @ W @ S
    return [pull @ W.T, A.T @ pull]
