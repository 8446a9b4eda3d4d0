"""Linear networks of two layers, f(x) = A W x, from small weights: which modes they learn at each jump, and when.  [agf, Sec. 4]

S = E[x x^T] and C = E[y x^T] decide. Neurons that are awake turn until they are the best function of rank k; but none turns out
of its *block*, a subspace of the inputs that neither S nor C^T C leads out of. So every block learns as if it were alone. Where S
and C^T C commute a block is one mode, learned after log(1 / alpha) / s, with s its singular value in C, however little it
explains of the loss.
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

LINKED = 1e-10  # of the size of a matrix: what lies below is rounding, and links no two directions
NOTHING = 1e-12  # of what the first mode explains: a mode that explains less is none
MIXTURES = (0.6180339887498949, 1.3247179572447460)  # two, should eigenvalues of the first sum fall together by chance
ASTRAY = 0.5  # of the direction in which a neuron wakes along that to which it has to turn: with less, turning takes its time
SMALL = "log(1 / alpha) of an alpha below 1"


class Modes(NamedTuple):
    """Of all modes, in the order in which they are learned."""

    times: Float[Tensor, " m"]  # in units of log(1 / alpha)
    explained: Float[Tensor, " m"]  # twice what the loss falls by
    strengths: Float[Tensor, " m"]  # the largest singular value of what was left of C in the mode's block
    along: Float[Tensor, " m"]  # how far the direction in which a neuron wakes is that of the mode, from 0 to 1


def linear(Sxx: ArrayLike, Syx: ArrayLike, *, threshold: float = 1.0) -> Staircase:
    """f(x) = A W x, from the moments E[x x^T] [d, d] and E[y x^T] [c, d]; times in units of log(1 / alpha), levels without what
    no linear function can fit. Exact where blocks have one mode each, so that moments commute; in larger blocks a conjecture,
    within some per cent.  [agf, Sec. 4]

    In a block: tau_k = tau_{k-1} + (1 - sum_{i < k-1} s^(i)_{k-i} (tau_{i+1} - tau_i)) / s^(k-1)_1, with s^(i)_j the singular
    values of (1 - P_i) E[y x^T] and P_i on the first i eigenvectors of E[y x^T] E[x x^T]^-1 E[x y^T].
    """
    return _staircase(modes(Sxx, Syx, threshold=threshold), Sxx)


def _staircase(learned: Modes, kind: ArrayLike) -> Staircase:
    left = torch.cat([learned.explained.flip(0).cumsum(0).flip(0), learned.explained.new_zeros(1)]) / 2
    return Staircase(like(learned.times, kind), like(left, kind))


def modes(Sxx: ArrayLike, Syx: ArrayLike, *, threshold: float = 1.0) -> Modes:
    """Those of all blocks together."""
    S, C = moments(Sxx, Syx)
    above_zero("a threshold", threshold=threshold)
    learned = [_modes_of_block(V.T @ S @ V, C @ V, threshold) for V in blocks(S, C)]
    every = Modes(*(torch.cat(parts) for parts in zip(*learned, strict=True)))
    kept = (every.explained > NOTHING * every.explained.max()).nonzero()[:, 0]
    order = kept[every.times[kept].argsort(stable=True)]
    chosen = Modes(*(part[order] for part in every))
    if (least := float(chosen.along.min())) < ASTRAY:
        warnings.warn(f"a neuron wakes in a direction that has a share of {least:.2g} of the mode that it is to learn: moments "
                      f"nearly commute. Until it has turned, which takes the longer the smaller the share, the network rests at "
                      f"another level. The staircase is that of the limit of small weights.", stacklevel=3)
    return chosen


def blocks(S: Float[Tensor, "d d"], C: Float[Tensor, "c d"]) -> list[Float[Tensor, "d m"]]:
    """Orthonormal bases of the smallest subspaces of inputs that vary which S and C^T C map into themselves. They are spanned by
    eigenvectors of any sum of the two whose eigenvalues differ; eigenvectors that S or C^T C links are of one block."""
    _, s, Vh = torch.linalg.svd(C, full_matrices=False)
    S, B = S / S.norm(), (Vh.T * s) @ Vh / s.norm()  # the root of C^T C: of the same subspaces, and small modes are less small
    bases = [varying(S)]
    for mixture in MIXTURES:
        bases = [V @ part for V in bases for part in _linked(V.T @ S @ V, V.T @ B @ V, mixture)]
    return bases


def _linked(S: Float[Tensor, "m m"], B: Float[Tensor, "m m"], mixture: float) -> list[Float[Tensor, "m k"]]:
    from scipy.sparse.csgraph import connected_components
    V = torch.linalg.eigh(S + mixture * B).eigenvectors
    links = torch.maximum(*((V.T @ matrix @ V).abs() for matrix in (S, B))) > LINKED
    count, label = connected_components(links.cpu().numpy(), directed=False)
    return [V[:, torch.from_numpy(label == k).to(V.device)] for k in range(count)]


def _modes_of_block(S: Float[Tensor, "m m"], C: Float[Tensor, "c m"], threshold: float) -> Modes:
    """Those of one block, the one that explains most first."""
    mu, U = (a.flip(-1) for a in torch.linalg.eigh(C @ torch.linalg.pinv(S, hermitian=True) @ C.T))
    rank = int((mu > NOTHING * mu[0]).sum())
    values, steps, along = list[Tensor](), list[float](), list[float]()  # singular values without the first k modes; waits
    for k in range(rank):
        left, s, _ = torch.linalg.svd(C - U[:, :k] @ U[:, :k].T @ C, full_matrices=False)
        values.append(s)
        along.append(float(left[:, s > (1 - LINKED) * s[0]].T.mv(U[:, k]).norm()))
        earlier = sum(float(values[i][k - i]) * steps[i] for i in range(k))
        steps.append((threshold - earlier) / float(values[k][0]))
    return Modes(mu.new_tensor(steps).cumsum(0), mu[:rank], *map(mu.new_tensor, ([float(v[0]) for v in values], along)))


def predict_linear(Sxx: ArrayLike, Syx: ArrayLike, width: int, log_inverse: float, t: Times, *, threshold: float = 1.0) -> Array:
    """The loss at times ``t``, in units of ``log_inverse`` = log(1 / alpha): the staircase, at any width that holds all modes."""
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
    """The loss of the gradient flow of A and W from N(0, alpha^2 / width) at these times, less what nothing linear can fit."""
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
    pull = C - A @ W @ S
    return [pull @ W.T, A.T @ pull]
