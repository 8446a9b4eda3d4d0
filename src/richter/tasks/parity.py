"""Multitask sparse parity: many parities, each with a frequency, a control bit that selects it, and its own relevant bits.

A skill k is the function g_k: the parity (-1 or 1) of its relevant bits if the control bit selects k, otherwise 0. The skill
strength of a network is the correlation of its outputs with g_k.  [layerwise, Sec. 4.2]
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from richter.core import SelectionError
from richter.core.values import progress

EXACT_BITS = 14  # up to this number of bits a skill strength is the mean over every input
CHUNK = 2**16  # inputs per batch for a network


class Strengths(NamedTuple):
    """Strength of each skill [skills]: R_k = E[g_k f | k], its standard error (0 if every input was used), and its loss L_k."""

    strength: Float[Tensor, " skills"]
    error: Float[Tensor, " skills"]
    loss: Float[Tensor, " skills"]


class Examples(NamedTuple):
    """Inputs of 0 and 1 with the control bits first; targets S g_k; the skill of each input."""

    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n 1"]
    skill: Int[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class MultitaskParity:
    """The task: ``stream`` yields infinitely many examples, ``sample`` a finite set, and ``skill_strength`` measures a network.

    >>> task = multitask_parity(skills=5, bits=32, relevant=3, alpha=0.6)
    >>> for x, y, skill in task.stream(4000, seed=0): ...        # always new examples
    >>> data = task.sample(10_000, seed=0)                       # a fixed set of 10,000
    >>> task.skill_strength(model).strength / task.target        # 1 if a skill is learned
    """

    skills: int
    bits: int
    relevant: int
    alpha: float
    target: float
    positions: Int[Tensor, "skills relevant"]  # relevant bits of each skill, among the skill bits
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default=torch.device("cpu"))

    @functools.cached_property
    def frequencies(self) -> Float[Tensor, " skills"]:
        """Return P(k) = A k^-(alpha + 1), most frequent first.  [Eq. 4.1]"""
        k = torch.arange(1, self.skills + 1, dtype=torch.float64, device=self.device)
        powers = k ** -(self.alpha + 1)
        return powers / powers.sum()

    @property
    def inputs(self) -> int:
        """Width of an input: control bits and skill bits."""
        return self.skills + self.bits

    def to(self, device: torch.device | str) -> MultitaskParity:
        """Return the task with its examples on another device."""
        return MultitaskParity(self.skills, self.bits, self.relevant, self.alpha, self.target, self.positions.to(device),
                               self.dtype, torch.device(device))

    # -------------------------------------------------------------------------------------------- examples

    def batch(self, n: int, draw: torch.Generator) -> Examples:
        """``n`` independent examples."""
        if not isinstance(n, int) or n < 1:
            raise SelectionError(f"a batch of {n} examples: one at least is needed, and a whole number.")
        skill = torch.searchsorted(self._steps, torch.rand(n, generator=draw, device=self.device, dtype=torch.float64))
        skill.clamp_(max=self.skills - 1)
        return self._examples(skill, self._random_bits(n, draw))

    def stream(self, batch: int, seed: int = 0) -> Iterator[Examples]:
        """Yield batches without end, one stream for each seed."""
        draw = _generator(seed, 0, self.device)
        while True:
            yield self.batch(batch, draw)

    def sample(self, n: int, seed: int = 0) -> Examples:
        """Return a finite set of ``n`` independent examples, different from those of the stream of this seed."""
        return self.batch(n, _generator(seed, 1, self.device))

    def counts(self, skill: Int[Tensor, " n"]) -> Int[Tensor, " skills"]:
        """Return d_k, the number of examples of each skill."""
        return torch.bincount(skill, minlength=self.skills)

    # -------------------------------------------------------------------------------------------- skills

    def skill(self, k: int) -> Callable[[Tensor], Tensor]:
        """Return the function g_k, k from 1 on, which maps inputs [n, d] to -1, 0 and 1 [n].  [Eq. 4.2]"""
        if not 1 <= k <= self.skills:
            raise SelectionError(f"skill {k}: they are counted from 1 to {self.skills}, the most frequent first.")
        where = self.positions[k - 1] + self.skills

        def g(x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
            return x[:, k - 1] * _parity(x[:, where.to(x.device)])
        return g

    def functions(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n skills"]:
        """Return g_k of every input, for every skill."""
        bits = x[:, (self.positions + self.skills).to(x.device)]
        return x[:, :self.skills] * _parity(bits)

    def skill_strength(self, model: nn.Module | Callable[[Tensor], Tensor], n: int = 20_000, seed: int = 0) -> Strengths:
        """Measure how much of each skill a network has learned: R_k = E[g_k(x) f(x)] over inputs of skill k.  [Eq. 4.7]

        With up to 14 skill bits the mean is exact, over every input. With more bits, ``n`` inputs are used for each skill:
        irrelevant bits are drawn, and each draw is combined with all 2^m patterns of the relevant bits, so that contributions
        that do not depend on all of these cancel. ``error`` is the standard error of the mean over draws. A model is evaluated in
        ``eval`` mode, and its mode is restored.
        """
        home = next((p.device for p in model.parameters()), self.device) if isinstance(model, nn.Module) else self.device
        patterns = self._patterns(home)
        exact = self.bits <= EXACT_BITS
        draws = 2 ** (self.bits - self.relevant) if exact else math.ceil(n / len(patterns))
        if n < 1 or (not exact and draws < 2):
            raise SelectionError(f"skill_strength(n={n}): with {self.bits} bits a strength is a mean over draws of the bits that "
                                 f"do not matter; n={2 * len(patterns)} inputs at least are needed for an error.")
        rows = []
        with _at_rest(model) as asked:
            for k in progress(range(self.skills), title="skills", unit="skill"):
                bits = self._others(k, home) if exact else self._random_bits(draws, _generator(seed, 2 + k, home))
                rows.append(self._strength(asked, k, bits, patterns, exact))
        return Strengths(*(torch.stack(column) for column in zip(*rows, strict=True)))

    # -------------------------------------------------------------------------------------------- inside

    @functools.cached_property
    def _steps(self) -> Float[Tensor, " skills"]:
        """Cumulative frequencies of the skills."""
        return self.frequencies.cumsum(0)

    def _random_bits(self, n: int, draw: torch.Generator) -> Float[Tensor, "n bits"]:
        """Draw random bits: one random byte gives eight bits, by a table."""
        words = torch.randint(256, (n, -(-self.bits // 8)), generator=draw, device=draw.device, dtype=torch.uint8)
        return nn.functional.embedding(words.int(), _table(self.dtype, draw.device)).view(n, -1)[:, :self.bits]

    def _examples(self, skill: Int[Tensor, " n"], bits: Float[Tensor, "n bits"]) -> Examples:
        """Inputs and targets of these skills and bits."""
        relevant = bits.gather(1, self.positions[skill])
        x = torch.cat([nn.functional.one_hot(skill, self.skills).to(self.dtype), bits], 1)
        return Examples(x, self.target * _parity(relevant)[:, None], skill)

    def _patterns(self, device: torch.device) -> Float[Tensor, "p relevant"]:
        """All patterns of the relevant bits."""
        return _all_bits(self.relevant, self.dtype, device)

    def _others(self, k: int, device: torch.device) -> Float[Tensor, "draws bits"]:
        """Return every pattern of the irrelevant bits of skill k; the relevant bits are 0."""
        kept = [i for i in range(self.bits) if i not in self.positions[k].tolist()]
        every = _all_bits(len(kept), self.dtype, device)
        bits = torch.zeros(len(every), self.bits, dtype=self.dtype, device=device)
        bits[:, kept] = every
        return bits

    def _strength(self, model: Callable[[Tensor], Tensor], k: int, bits: Float[Tensor, "draws bits"],
                  patterns: Float[Tensor, "p relevant"], exact: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return strength, error and loss of skill k (from 0 on)."""
        g, where = _parity(patterns).double(), self.positions[k].to(bits.device)
        sums, losses = [], []
        for part in bits.split(max(1, CHUNK // len(patterns))):
            x = torch.zeros(len(part), len(patterns), self.inputs, dtype=self.dtype, device=bits.device)
            x[..., k] = 1
            x[..., self.skills:] = part[:, None]
            x[..., self.skills + where] = patterns
            with torch.no_grad():
                f = model(x.view(-1, self.inputs))
            if f.numel() != len(part) * len(patterns):
                raise SelectionError(f"the network gives {tuple(f.shape)} for {x.shape[0] * x.shape[1]} inputs; the skill "
                                     f"strength is of one output for each input.")
            f = f.view(len(part), -1).double()
            sums.append((f * g).mean(1))
            losses.append((f - self.target * g).square().mean(1) / 2)
        r = torch.cat(sums)
        error = torch.zeros((), dtype=r.dtype, device=r.device) if exact else r.std() / math.sqrt(len(r))
        return r.mean(), error, torch.cat(losses).mean()


@contextlib.contextmanager
def _at_rest(model: nn.Module | Callable[[Tensor], Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield the model in eval mode, with inputs converted to its own precision; its mode is restored."""
    if not isinstance(model, nn.Module):
        yield model
        return
    modes = [(module, module.training) for module in model.modules()]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    try:
        for module, _ in modes:
            module.training = False
        yield lambda x: model(x if dtype is None else x.to(dtype))
    finally:
        for module, mode in modes:
            module.training = mode


def multitask_parity(skills: int = 5, bits: int = 32, relevant: int = 3, alpha: float = 0.6, seed: int = 0, *,
                     target: float = 5.0, exclusive: bool = True, dtype: torch.dtype = torch.float32) -> MultitaskParity:
    """Make ``skills`` parities of ``relevant`` bits out of ``bits``, the k-th with frequency A k^-(alpha + 1), and targets -S and
    S.

    ``seed`` draws the relevant bits of each skill. No two skills share a bit (App. C.3), or, with ``exclusive=False``, no two
    skills have the same bits.  [layerwise, Eq. 4.1-4.4; Table 4.2]
    """
    given = f"multitask_parity(skills={skills}, bits={bits}, relevant={relevant}, alpha={alpha}, seed={seed}, target={target})"
    if any(not isinstance(k, int) for k in (skills, bits, relevant, seed)) or min(skills, bits, relevant) < 1 or relevant > bits \
            or seed < 0:
        raise SelectionError(f"{given}: a skill, a bit and a relevant bit at least are needed, no more relevant bits than bits, "
                             f"and a seed from 0 on, all whole numbers.")
    if not (math.isfinite(alpha) and alpha > 0):
        raise SelectionError(f"{given}: the frequencies fall like k^-(alpha + 1), and a law of scaling needs alpha above 0.")
    if not (math.isfinite(target) and target > 0):
        raise SelectionError(f"{given}: the target is S or -S with S above 0.")
    room = bits // relevant if exclusive else math.comb(bits, relevant)
    if skills > room:
        raise SelectionError(f"{given}: {bits} bits have room for {room} skills of {relevant} bits "
                             + (f"that share none. Take {skills * relevant} bits, or exclusive=False." if exclusive else
                                "that are not the same. Take more bits."))
    draw = np.random.default_rng((seed, 7))
    if exclusive:
        rows = draw.permutation(bits)[:skills * relevant].reshape(skills, relevant)
    else:
        rows = _distinct_subsets(skills, bits, relevant, draw)
    return MultitaskParity(skills, bits, relevant, float(alpha), float(target), torch.from_numpy(np.sort(rows, 1)), dtype)


def _distinct_subsets(count: int, bits: int, relevant: int, draw: np.random.Generator) -> np.ndarray:
    """Return different sets of relevant bits: all sets are listed if there are few, otherwise sets are drawn until there are
    enough."""
    total = math.comb(bits, relevant)
    if total <= 4 * count:
        every = np.array(list(itertools.combinations(range(bits), relevant)))
        return every[draw.permutation(total)[:count]]
    chosen: dict[tuple[int, ...], None] = {}
    while len(chosen) < count:
        chosen[tuple(sorted(draw.choice(bits, relevant, replace=False).tolist()))] = None
    return np.array(list(chosen))


def _parity(bits: Tensor) -> Tensor:
    """Return (-1)^(sum of the last axis)."""
    return 1 - 2 * (bits.sum(-1) % 2)


def _generator(seed: int, part: int, device: torch.device) -> torch.Generator:
    """Random generator of one part of the data."""
    if seed < 0:
        raise SelectionError(f"seed={seed}: a seed from 0 on is needed.")
    return torch.Generator(device).manual_seed(int(np.random.SeedSequence((seed, part, 8)).generate_state(1, np.uint64)[0] >> 1))


def _all_bits(count: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "p bits"]:
    """Return every pattern of ``count`` bits, in counting order."""
    numbers = torch.arange(2**count, device=device)
    return ((numbers[:, None] >> torch.arange(count, device=device).flip(0)) & 1).to(dtype)


@functools.cache
def _table(dtype: torch.dtype, device: torch.device) -> Float[Tensor, "256 8"]:
    """Bits of all bytes."""
    return _all_bits(8, dtype, device)


TASKS: tuple = (multitask_parity,)
