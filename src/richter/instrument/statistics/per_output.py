"""Each output's own tangent kernel K^cc: beside the labels of every output (CROSS_OUTPUT), and beside the same kernel of another
time (SINCE_INITIAL, SINCE_PREVIOUS). Sums over groups of examples say what is left without each: no submatrix is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import show_bytes
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics import frame
from richter.instrument.statistics.frame import Derived, Gathering, Group, Missing, OfKernels, Place, Simple, Statistic
from richter.instrument.statistics.kernels import LABELS, TANGENT_KERNEL, Labels, Tangents, left
from richter.instrument.statistics.sketches import SAMPLED, Diagonal, one_at_a_time
from richter.instrument.statistics.variants import Initial, Previous
from richter.linalg import without_each

if TYPE_CHECKING:
    from richter.instrument.subject import Subject

OTHER_KERNELS = ("kernels {now} now and {then} then (outputs, examples, examples) are not of the same outputs and examples, and "
                 "cannot be compared")


def own(K: Float[Tensor, "n v n v"]) -> Float[Tensor, "v n n"]:
    """K^cc of each output c, in memory of its own."""
    return K.diagonal(dim1=1, dim2=3).permute(2, 0, 1).contiguous().clone()


def members(n: int, groups: int, like: Tensor) -> Float[Tensor, "n g"]:
    """Which group each example belongs to, one-hot."""
    return torch.nn.functional.one_hot(torch.arange(n) % groups, groups).to(like)


# ------------------------------------------------------------------------------------------- the labels of every output


@dataclass(frozen=True)
class CrossOutput:
    """What is to be known of each output's kernel and of the labels of every output."""

    quadratic: Float[Tensor, "v v"]  # y_a^T K^cc y_a: kernels c, labels a
    norm: Float[Tensor, " v"]  # |K^cc|_F
    energy: Float[Tensor, " v"]  # |y_a|^2


def crossed(K: Float[Tensor, "v n n"], Y: Float[Tensor, "n v"]) -> CrossOutput:
    norms = torch.stack([Kc.norm() for Kc in K])
    frame.finite(norms.sum().item())
    return CrossOutput(torch.stack([((Kc @ Y) * Y).sum(0) for Kc in K]), norms, (Y * Y).sum(0))


def crossed_leaving(K: Float[Tensor, "v n n"], Y: Float[Tensor, "n v"], groups: int) -> list[CrossOutput]:
    """The same with each group of examples left out."""
    inside = members(len(Y), groups, Y)
    mine = inside[:, :, None] * Y[:, None]  # example, group, label
    quadratic = torch.stack([without_each(torch.einsum("nga,nm,mha->agh", mine, Kc, mine)) for Kc in K])
    square = without_each(torch.stack([inside.T @ (Kc * Kc) @ inside for Kc in K]))
    energy = (mine * mine).sum(0)  # group, label
    return [CrossOutput(quadratic[:, :, g], square[:, g].clamp(min=0).sqrt(), energy.sum(0) - energy[g]) for g in range(groups)]


def cross_output(K: Float[Tensor, "n v n v"], labels: Labels) -> CrossOutput:
    return crossed(own(K), labels.Y)


def cross_output_leaving(_: CrossOutput, K: Float[Tensor, "n v n v"], labels: Labels, groups: int) -> list[CrossOutput]:
    return crossed_leaving(own(K), labels.Y, groups)


CROSSED = Diagonal("kernels_of_single_outputs_and_all_labels", crossed, crossed_leaving, crossed_leaving)


def _cross_estimate(subject: Subject, cotangents: Cotangents, reason: str) -> Statistic | None:
    return CROSSED if one_at_a_time(subject, cotangents, reason) else None


CROSS_OUTPUT = Derived("cross_output", cross_output, (TANGENT_KERNEL, LABELS), cross_output_leaving, _cross_estimate)


# ------------------------------------------------------------------------------------------- the kernels of another time


class OwnKernels(OfKernels):
    """Each output's own kernel "v n n", of each module and of the whole model; of some outputs, where there are too many. Those
    of another time are kept, of all modules."""

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        t = Tangents(subject, cotangents)
        held = 2 * 8 * t.n ** 2 * (t.v if cotangents.exact else SAMPLED) * (len(t.by_module) + 1)
        if held > subject.memory:
            return (f"the kernels of all layers over {t.n} examples, now and at another time, need memory='{show_bytes(held)}': "
                    f"fewer examples, Probe(kernel=...), need less")
        inner = TANGENT_KERNEL.planned(subject, cotangents)
        if one_at_a_time(subject, cotangents, inner if isinstance(inner, str) else ""):
            return SINGLE
        return inner if isinstance(inner, str) else Derived(self.name, own, (inner,))

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        raise AssertionError("it is planned as another statistic")


def _kernels(K: Float[Tensor, "v n n"], Y: Float[Tensor, "n v"]) -> Float[Tensor, "v n n"]:
    return K.to(Y.device, torch.float64)


class _Fewer(Sequence[Tensor]):
    """Kernels with each group of examples left out, made when they are asked for."""

    def __init__(self, K: Float[Tensor, "v n n"], Y: Tensor, groups: int) -> None:
        self.K, self.groups = _kernels(K, Y), groups

    def __len__(self) -> int:
        return self.groups

    def __getitem__(self, group: Any) -> Any:
        rows = left(self.K.shape[1], ("examples", group)).to(self.K.device)
        return self.K[:, rows][:, :, rows]


SINGLE = Diagonal("own_kernels_of_single_outputs", _kernels, _Fewer, _Fewer, labelled=False)
OWN_KERNELS = OwnKernels("own_kernels")


@dataclass(frozen=True)
class Evolved:
    """What is to be known of kernels, all outputs together, now and then (K0)."""

    now: float  # |K|
    then: float  # |K0|
    apart: float  # |K - K0|


def evolved(K: Float[Tensor, "v n n"], K0: Float[Tensor, "a m m"]) -> Evolved:
    if K.shape != K0.shape:
        raise Missing(OTHER_KERNELS.format(now=tuple(K.shape), then=tuple(K0.shape)))
    return Evolved(*(frame.finite(M.norm().item()) for M in (K, K0, K - K0)))


def evolved_leaving(_: Evolved, K: Float[Tensor, "v n n"], K0: Float[Tensor, "v n n"], groups: int) -> list[Evolved]:
    """The same with each group of examples left out."""
    inside = members(K.shape[1], groups, K)
    blocks = torch.stack([inside.T @ M.square().sum(0) @ inside for M in (K, K0, K - K0)])
    return [Evolved(*sizes) for sizes in without_each(blocks).clamp(min=0).sqrt().T.tolist()]


@dataclass(frozen=True)
class Step(Statistic):
    """The step of training at which it is measured; NaN if nobody said."""

    name: str
    place: Place = "any"
    of_examples: bool = False

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Step(subject)


class _Step(Simple):
    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.subject = subject

    def value(self, place: str, without: Group | None = None) -> float:
        return math.nan if self.subject.step is None else float(self.subject.step)


STEP = Step("step")
SINCE_INITIAL = Derived("kernels_since_initial", evolved, (OWN_KERNELS, Initial(OWN_KERNELS)), evolved_leaving)
SINCE_PREVIOUS = Derived("kernels_since_previous", evolved, (OWN_KERNELS, Previous(OWN_KERNELS)), evolved_leaving)
