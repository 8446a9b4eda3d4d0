"""What is known of the features, targets and outputs of some examples: Sample, their means and products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from richter.linalg import Scatter

DIGITS = 32  # what differs by less than so many roundings of its own numbers is the same


@dataclass(frozen=True, eq=False)
class Sample:
    """Means and products of features Phi [n, p], targets [n, C] and outputs F [n, C], side by side. Brackets <a|b> are means over
    the examples."""

    scatter: Scatter  # of [Phi, targets, F]
    p: int
    one_hot: bool  # are the targets classes?
    rounding: float = torch.finfo(torch.float64).eps  # of one number of features and outputs
    basis: Float[Tensor, "all p"] | None = None  # orthonormal columns in which Phi is written, where all would be too many

    @property
    def n(self) -> int:
        return self.scatter.n

    @property
    def C(self) -> int:
        return (len(self.scatter.mean) - self.p) // 2

    @property
    def features(self) -> int:
        return self.p if self.basis is None else len(self.basis)

    @property
    def _phi(self) -> slice:
        return slice(self.p)

    @property
    def _targets(self) -> slice:
        return slice(self.p, self.p + self.C)

    @property
    def _outputs(self) -> slice:
        return slice(self.p + self.C, None)

    @cached_property
    def second(self) -> Float[Tensor, "d d"]:
        return self.scatter.second

    @property
    def phi_phi(self) -> Float[Tensor, "p p"]:
        return self.second[self._phi, self._phi]

    @property
    def phi_targets(self) -> Float[Tensor, "p C"]:
        return self.second[self._phi, self._targets]

    @property
    def phi_outputs(self) -> Float[Tensor, "p C"]:
        return self.second[self._phi, self._outputs]

    @property
    def target_power(self) -> Float[Tensor, " C"]:
        """|f*_j|^2."""
        return self.second.diagonal()[self._targets]

    @property
    def phi_mean(self) -> Float[Tensor, " p"]:
        return self.scatter.mean[self._phi]

    @property
    def phi_covariance(self) -> Float[Tensor, "p p"]:
        return self.scatter.covariance[self._phi, self._phi]

    @property
    def phi_output_covariance(self) -> Float[Tensor, "p C"]:
        return self.scatter.covariance[self._phi, self._outputs]

    @property
    def output_covariance(self) -> Float[Tensor, "C C"]:
        return self.scatter.covariance[self._outputs, self._outputs]

    @property
    def class_shares(self) -> Float[Tensor, " C"]:
        """Of all examples, the share of each class."""
        means = self.scatter.mean[self._targets]
        return means / means.sum()

    @property
    def varied(self) -> bool:
        """Do the features differ from example to example?"""
        return bool(self.phi_covariance.trace() > (DIGITS * self.rounding) ** 2 * self.phi_phi.trace())

    @cached_property
    def whitening(self) -> Float[Tensor, "C r"]:
        """B with <FB|FB> = 1: r outputs FB that span what the outputs span. Columns of any scale count alike; what is left of an
        output that the others give but for rounding is none."""
        G = self.second[self._outputs, self._outputs]
        size = G.diagonal().sqrt()
        scale = torch.where(size > 0, 1 / torch.where(size > 0, size, 1.0), 0.0)
        values, vectors = torch.linalg.eigh(scale[:, None] * G * scale)
        least = max(DIGITS * len(G) * torch.finfo(torch.float64).eps, (DIGITS * self.rounding) ** 2) * values[-1]
        real = (values > least) & (values > 0)
        return scale[:, None] * vectors[:, real] / values[real].sqrt()

    @cached_property
    def spectrum(self) -> tuple[Float[Tensor, " p"], Float[Tensor, "p r"]]:
        """Eigenvalues of <Phi|Phi>, the largest first, zero where they are rounding, and the vectors of the others."""
        values, vectors = (t.flip(-1) for t in torch.linalg.eigh(self.phi_phi))
        real = values > self.p * torch.finfo(torch.float64).eps * values[:1].clamp(min=0)
        return torch.where(real, values, 0.0), vectors[:, real]
