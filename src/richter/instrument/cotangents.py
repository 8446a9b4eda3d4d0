"""Vectors that are back-propagated: the metric on outputs. Cotangents are objects that know how many they are, their rows for any
examples, the labels seen through them, and their name beside a number.

    every_output                     each output by itself: the exact sums over outputs
    random_outputs(64)               random combinations: unbiased sketches of those sums
    loss_gradient                    the gradient of the probe's loss
    lambda f, y: ...                 anything else: V[v,n,k] from the outputs f[n,k] and the labels
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import SelectionError

Use = Literal["mean", "kernel"]  # an average over examples, or products between pairs of them
Function = Callable[[Float[Tensor, "n k"], Tensor | None], Float[Tensor, "v n k"]]
MOST: dict[Use, int] = {"mean": 512, "kernel": 64}  # outputs; where there are more, they are sketched
SKETCH = 64  # random outputs
NEIGHBOURS = 8  # examples that share v random outputs in an average


class Cotangents(Protocol):
    """Interface of every kind; nobody outside asks which one it is. ``class Mine(Cotangents)`` needs ``count`` and ``rows``."""

    exact: bool = True  # are sums over outputs exact, or estimates?
    whole: bool = False  # are they all outputs, each by itself?
    looks: bool = True  # do they look at the labels? Those of a vocabulary are not made for nothing
    seed: int = 0  # of what is drawn in the place of all outputs

    def label(self, outputs: int) -> str:
        """Their name beside a number; empty for what everybody expects."""
        return ""

    def chosen(self, given: Cotangents | None, outputs: int, use: Use) -> Cotangents:
        """Cotangents to use instead of these: the ``given`` ones, or these if none were given."""
        return self if given is None else given

    def prepare(self, subject: Any) -> Cotangents:
        """Copy with what it needs from the whole probe; shared objects keep no state."""
        return self

    def lacking(self, subject: Any) -> str:
        """Name what the cotangents need and the probe does not have; empty if nothing is missing."""
        return ""

    def count(self, outputs: int, use: Use, Y: Tensor | None = None) -> int:
        """Backward passes for each example; ``Y``: the labels of one."""
        ...

    def rows(self, f: Float[Tensor, "n k"], Y: Tensor | None, examples: Sequence[int], block: slice,
             use: Use) -> Float[Tensor, "v n k"]:
        """V of these examples of the probe, some of the cotangents."""
        ...

    def __call__(self, f: Float[Tensor, "n k"], Y: Tensor | None = None) -> Float[Tensor, "v n k"]:
        """V of all examples."""
        return self.rows(f, Y, range(len(f)), slice(None), "kernel")

    def labels(self, Y: Float[Tensor, "n k"], keep: Tensor | None,
               V: Callable[[], Float[Tensor, "v n k"]]) -> tuple[Float[Tensor, "n v"], Tensor | None]:
        """Labels seen through these cotangents (``V()`` gives their rows), and which of them count (None: all)."""
        return torch.einsum("vnk,nk->nv", V(), Y), None

    @property
    def vectors(self) -> int:
        """Random vectors of all examples and outputs, from which norms of kernels are estimated; 0: they are not."""
        return 0

    def signs(self, examples: Sequence[int], k: int, drawn: Sequence[int]) -> Tensor:
        """Some of the random vectors, "v n k"."""
        raise AssertionError("no random vectors are drawn where all outputs are there")


@dataclass(frozen=True)
class EveryOutput(Cotangents):
    """Each output by itself, V_v = e_v: the exact sums over outputs."""

    whole = True
    looks = False

    def chosen(self, given: Cotangents | None, outputs: int, use: Use) -> Cotangents:
        """Return the given cotangents; by default all outputs, or random combinations of them if there are many."""
        if given is not None:
            return given
        return random_outputs(SKETCH) if outputs > MOST[use] else self

    def count(self, outputs: int, use: Use, Y: Tensor | None = None) -> int:
        return outputs

    def rows(self, f: Float[Tensor, "n k"], Y: Tensor | None, examples: Sequence[int], block: slice,
             use: Use) -> Float[Tensor, "v n k"]:
        """Standard basis of the output space, equal for all examples."""
        n, k = f.shape
        return torch.eye(k, dtype=f.dtype, device=f.device)[:, None].expand(k, n, k)[block]

    def labels(self, Y: Float[Tensor, "n k"], keep: Tensor | None,
               V: Callable[[], Float[Tensor, "v n k"]]) -> tuple[Float[Tensor, "n v"], Tensor | None]:
        """Return labels and mask unchanged."""
        return Y, keep


every_output = EveryOutput()


@dataclass(frozen=True)
class SomeOutputs(Cotangents):
    """Some outputs, each by itself."""

    picked: tuple[int, ...]
    looks = False

    def count(self, outputs: int, use: Use, Y: Tensor | None = None) -> int:
        return len(self.picked)

    def rows(self, f: Float[Tensor, "n k"], Y: Tensor | None, examples: Sequence[int], block: slice,
             use: Use) -> Float[Tensor, "v n k"]:
        """Basis vectors of the picked outputs, equal for all examples."""
        V = torch.zeros(len(self.picked), f.shape[1], dtype=f.dtype, device=f.device)
        V[torch.arange(len(self.picked)), torch.tensor(self.picked, device=f.device)] = 1
        return V[:, None].expand(-1, len(f), -1)[block]


@dataclass(frozen=True)
class RandomOutputs(Cotangents):
    """Random combinations of the outputs; see ``random_outputs``."""

    v: int
    seed: int = 0
    exact = False
    looks = False

    def label(self, outputs: int) -> str:
        return f"{self.v} random outputs of {outputs}"

    def count(self, outputs: int, use: Use, Y: Tensor | None = None) -> int:
        """Number of random combinations; fewer for means over examples."""
        return math.ceil(self.v / NEIGHBOURS) if use == "mean" else self.v

    def rows(self, f: Float[Tensor, "n k"], Y: Tensor | None, examples: Sequence[int], block: slice,
             use: Use) -> Float[Tensor, "v n k"]:
        """Random combinations: own signs for each example in averages over examples, common Gaussian ones in a kernel."""
        n, k = f.shape
        if use == "mean":
            each = self.count(k, use)
            return self.signs(examples, k, range(each)[block]).to(f.device, f.dtype) / each ** 0.5
        draw = torch.Generator().manual_seed(self.seed)
        R = torch.randn(self.v, k, generator=draw, dtype=torch.float64) / self.v ** 0.5
        return R.to(f.device, f.dtype)[:, None].expand(self.v, n, k)[block]

    @property
    def vectors(self) -> int:
        """Number of random vectors in a sketch of the tangent kernel."""
        return max(4, self.v // 2)

    def signs(self, examples: Sequence[int], k: int, drawn: Sequence[int]) -> Tensor:
        """Random signs "v n k" for each example, as int8. They depend on the example's number, so chunks do not change them. They
        equal Generator.integers(0, 2): the first bit of each octet of a stream."""
        signs = np.empty((len(drawn), len(examples), k), dtype=np.int8)
        draw = np.random.Philox(key=0)  # counter-based streams: those of a Mersenne twister with near seeds are alike
        fresh = draw.state
        for j, v in enumerate(drawn):
            for n, i in enumerate(examples):
                fresh["state"]["key"][:] = self.seed % 2 ** 64, i << 24 | v
                draw.state = fresh
                octets = draw.random_raw(-(-k // 8)).astype("<u8", copy=False).view(np.uint8)
                np.right_shift(octets[:k], 7, out=signs[j, n].view(np.uint8))
        return torch.from_numpy(signs).mul_(2).sub_(1)


@functools.cache  # the same combinations are the same object: measures that ask for them share one computation
def random_outputs(v: int, seed: int = 0) -> RandomOutputs:
    """``v`` random combinations of the outputs with E[sum_v V_v V_v^T] = I: unbiased sketches of every sum over outputs.
    ``ntk`` uses the same ones for all examples. Averages over examples draw v of them anew for every 8 examples (so an
    example costs v / 8 backward passes), norms of kernels v / 2 vectors of all examples and outputs."""
    if v < 1:
        raise SelectionError(f"random_outputs({v}): at least one random output is needed.")
    return RandomOutputs(v, seed)


@dataclass(frozen=True)
class LossGradient(Cotangents):
    """One cotangent, n dL/df of the probe's loss L: the mean of its weight gradients over examples is dL/dW. The loss is of all
    examples at once, so ``prepare`` computes it."""

    gradient: Float[Tensor, "n k"] | None = field(default=None, compare=False, repr=False)  # filled in, it is still the same

    def chosen(self, given: Cotangents | None, outputs: int, use: Use) -> Cotangents:
        """Return these cotangents, whatever others were given."""
        return self  # the loss is not a choice among outputs

    def lacking(self, subject: Any) -> str:
        """Reason why there is no loss; empty if there is one."""
        return "" if subject.targets.objective is not None else "the probe has no labels"

    def prepare(self, subject: Any) -> Cotangents:
        """Return a copy with the gradient of the subject's loss."""
        return replace(self, gradient=subject.loss_gradient)

    def count(self, outputs: int, use: Use, Y: Tensor | None = None) -> int:
        return 1

    def rows(self, f: Float[Tensor, "n k"], Y: Tensor | None, examples: Sequence[int], block: slice,
             use: Use) -> Float[Tensor, "v n k"]:
        """Gradient of the loss with respect to the outputs of each example."""
        if self.gradient is None:
            raise SelectionError("loss_gradient stands for the loss of a probe, and is known to richter.measure and to Observers "
                                 "alone: richter.measure(model, richter.Probe(x, y, loss=...), cotangents=loss_gradient).")
        return self.gradient[None, torch.as_tensor(examples, device=self.gradient.device)].to(f)[block]


loss_gradient = LossGradient()


@dataclass(frozen=True)
class OfFunction(Cotangents):
    """A user's own function V(f, y) of the outputs and the labels."""

    function: Function

    def __repr__(self) -> str:
        return f"OfFunction({self.label(0)})"

    def label(self, outputs: int) -> str:
        """Name of the user's function."""
        return getattr(self.function, "__name__", "custom cotangents")

    def count(self, outputs: int, use: Use, Y: Tensor | None = None) -> int:
        """Number of cotangents that the user's function returns."""
        return len(self.function(torch.zeros(1, outputs), Y))

    def rows(self, f: Float[Tensor, "n k"], Y: Tensor | None, examples: Sequence[int], block: slice,
             use: Use) -> Float[Tensor, "v n k"]:
        """Cotangents that the user's function returns for these outputs and labels."""
        return self.function(f, Y)[block]


def as_cotangents(given: Cotangents | Function | None) -> Cotangents | None:
    """Return cotangents; a plain function of (f, y) is wrapped."""
    return given if given is None or hasattr(given, "chosen") else OfFunction(given)  # type: ignore[return-value, arg-type]
