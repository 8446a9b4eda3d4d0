"""A kernel written outside the package: two methods are enough, more make it faster, and what is wrong is said."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import sklearn.base
import torch
from torch import Tensor

from machines import KERNELS, NAMED, assert_close, normal, table
from pairwise import all_pairs
from richter.core import SelectionError
from richter.learners import (
    Gaussian,
    Kernel,
    KernelRidge,
    Laplace,
    Radial,
    RFMClassifier,
    RFMRegressor,
    Tunable,
    agop,
    distances,
    fact,
    squared_distances,
)
from richter.learners.features import FEATURES
from richter.learners.problem import problem
from richter.learners.views import DataView
from richter.testing import check_kernel


@dataclass(frozen=True)
class Bell(Kernel):
    """The Gaussian kernel with the two methods that a kernel needs."""

    L: float = 2.0

    def geometry(self, x: Tensor, z: Tensor) -> Tensor:
        return squared_distances(x, z)

    def values(self, g: Tensor) -> Tensor:
        return torch.exp(-g / (2 * self.L ** 2))


@dataclass(frozen=True)
class Pulled(Bell):
    """With ``pull``, and nothing else: neither slopes nor pull_weighted."""

    def pull(self, x: Tensor, z: Tensor, g: Tensor, C: Tensor) -> Tensor:
        K = self.values(g) / self.L ** 2
        return torch.stack([K @ (C[:, c:c + 1] * z) - (K @ C[:, c:c + 1]) * x for c in range(C.shape[1])], 1)


@dataclass(frozen=True)
class Sloped(Bell):
    def slopes(self, g: Tensor, d: int) -> tuple[Tensor, float]:
        return self.values(g) / self.L ** 2, -1.0


@dataclass(frozen=True)
class Cusp(Radial):
    """The Laplace kernel, by one method; the distance, the rule for its bandwidth and the gradient at the cusp are there."""

    def values(self, g: Tensor) -> Tensor:
        return torch.exp(-g / self.L)


@dataclass(frozen=True)
class Linear(Kernel):
    """Whose values are the geometry itself, and whose pull is a view of few numbers."""

    def geometry(self, x: Tensor, z: Tensor) -> Tensor:
        return x @ z.T

    def values(self, g: Tensor) -> Tensor:
        return g

    def pull(self, x: Tensor, z: Tensor, g: Tensor, C: Tensor) -> Tensor:
        return (C.T @ z)[None].expand(len(x), -1, -1)


@dataclass(frozen=True)
class Half(Linear):
    """(x . z)^2 / 2, whose slope is the geometry itself."""

    homogeneous: ClassVar[bool] = True

    def values(self, g: Tensor) -> Tensor:
        return g ** 2 / 2

    def slopes(self, g: Tensor, d: int) -> tuple[Tensor, float]:
        return g, 0.0

    pull = Kernel.pull


@dataclass(frozen=True)
class Rational(Tunable):
    """With two arrays of geometry and a rule for its bandwidth."""

    arrays: ClassVar[int] = 2

    def geometry(self, x: Tensor, z: Tensor) -> Tensor:
        return torch.stack([x @ z.T, squared_distances(x, z)])

    def values(self, g: Tensor) -> Tensor:
        return (1 + g[0]) ** 2 / (1 + g[1] / self.L ** 2)

    def typical(self, g: Tensor) -> float:
        return g[1].median().sqrt().item()


OWN: list[Any] = [Bell(), Pulled(), Sloped(), Cusp(1.5), Cusp(), Linear(), Half(), Rational(), Rational(2.0)]
TWINS: list[tuple[Any, Any]] = [(Bell(2.0), Gaussian(2.0)), (Pulled(2.0), Gaussian(2.0)), (Sloped(2.0), Gaussian(2.0)),
                                (Cusp(1.5), Laplace(1.5))]


@pytest.mark.parametrize("kernel", [*KERNELS, *OWN], **NAMED)
def test_right_kernels_pass(kernel: Kernel) -> None:
    check_kernel(kernel)


@pytest.mark.parametrize(("own", "shipped"), TWINS, **NAMED)
def test_feature_matrices_are_those_of_the_shipped_twin(own: Kernel, shipped: Kernel) -> None:
    x, M = normal(11, 4), normal(4, 4, seed=2)
    M = M @ M.T
    x[-1] = x[0]
    assert_close(own.gradients(x, metric=M), shipped.gradients(x, metric=M), 1e-10)
    for outputs in (1, 2, 5):
        A = normal(11, outputs, seed=1)
        for memory in ("1GiB", 2000):
            assert_close(agop(own, x, A, M, memory=memory), agop(shipped, x, A, M), 1e-10)
            assert_close(fact(own, x, A, M, memory=memory), fact(shipped, x, A, M), 1e-10)


@pytest.mark.parametrize(("own", "shipped", "outputs", "features"), all_pairs(TWINS, [1, 3], FEATURES), **NAMED)
def test_learners_find_what_they_find_with_the_shipped_twin(own: Kernel, shipped: Kernel, outputs: int, features: str) -> None:
    X, y, _ = table()
    target = y if outputs == 1 else np.stack([y, y ** 2, X[:, 0]], 1)
    models = [RFMRegressor(k, features, 2, 0.1, early_stopping=False).fit(X, target) for k in (own, shipped)]
    assert_close(models[0].predict(X), models[1].predict(X), 1e-7)
    assert_close(models[0].feature_matrix_, models[1].feature_matrix_, 1e-7)
    assert_close(models[0].feature_importances_, models[1].feature_importances_, 1e-7)


@pytest.mark.parametrize("kernel", OWN, **NAMED)
def test_every_learner_takes_them(kernel: Kernel) -> None:
    X, y, labels = table()
    assert RFMClassifier(kernel, "fact", iterations=2).fit(X, labels).score(X, labels) > 0.4
    with torch.inference_mode():
        assert np.isfinite(RFMRegressor(kernel, iterations=1).fit(X, y).predict(X)).all()
    model = RFMRegressor([kernel, Laplace()], iterations=1, diagonal=None).fit(X, y)
    assert np.isfinite(sklearn.base.clone(model).fit(X, y).predict(X)).all()


def test_a_bandwidth_of_ones_own_kernel_is_chosen() -> None:
    X, y, _ = table()
    own, shipped = (KernelRidge(kernel).fit(X, y) for kernel in (Cusp(), Laplace()))
    assert own.kernel_.bandwidth == shipped.kernel_.bandwidth
    assert own.ridge_ == shipped.ridge_
    assert_close(own.predict(X), shipped.predict(X), 1e-12)


@dataclass(frozen=True)
class Copied(Linear):
    def values(self, g: Tensor) -> Tensor:
        return g.clone()


def test_values_that_are_the_geometry_are_not_written_into() -> None:
    """A solver writes into the kernel matrix, and the next ridge that is tried needs the geometry again."""
    X, y, _ = table(30)
    models = [KernelRidge(kernel).fit(X, y) for kernel in (Linear(), Copied())]
    assert models[0].ridge_ == models[1].ridge_
    assert models[0].loss_ == models[1].loss_
    assert np.array_equal(models[0].predict(X), models[1].predict(X))


def test_the_rule_for_a_bandwidth_sees_pairs_of_a_few_hundred_points() -> None:
    whole = problem(normal(600, 3).numpy(), np.ones((600, 1)), np.ones(600), np.random.RandomState(0))
    few = whole.x[:500]
    assert DataView(whole).typical(Rational()) == pytest.approx(Rational().typical(Rational().geometry(few, few)), rel=1e-12)


@pytest.mark.parametrize("little", [False, True])
def test_large_systems_are_solved_with_them(little: bool) -> None:
    X, y, _ = table(400)
    memory = {"memory": "2MiB"} if little else {}
    model = RFMRegressor(Bell(5.0), ridge=1.0, iterations=1, **memory).fit(X, y)
    assert_close(model.predict(X), RFMRegressor(Gaussian(5.0), ridge=1.0, iterations=1).fit(X, y).predict(X), 1e-2)


def test_the_gradient_of_a_distance_of_zero_counts_as_zero() -> None:
    x = normal(4, 3).requires_grad_()
    D = distances(x, x.detach())
    assert (D.diagonal() == 0).all()
    (g,) = torch.autograd.grad(D.diagonal().sum(), x, retain_graph=True)
    assert (g == 0).all()
    (g,) = torch.autograd.grad(D.sum(), x)
    expected = torch.stack([sum((x[i] - x[j]) / (x[i] - x[j]).norm() for j in range(4) if j != i) for i in range(4)])
    assert_close(g, expected.detach(), 1e-10)


# ------------------------------------------------------------------------------------------------ what is wrong is said


@dataclass(frozen=True)
class Root(Bell):
    def geometry(self, x: Tensor, z: Tensor) -> Tensor:
        return squared_distances(x, z).sqrt()


@dataclass(frozen=True)
class Numpy(Bell):
    def geometry(self, x: Tensor, z: Tensor) -> Tensor:
        return squared_distances(x.detach(), z.detach())


@dataclass(frozen=True)
class Written(Bell):
    def values(self, g: Tensor) -> Tensor:
        return g.div_(-8).exp_()


@dataclass(frozen=True)
class Distance(Bell):
    def values(self, g: Tensor) -> Tensor:
        return g


@dataclass(frozen=True)
class Askew(Linear):
    def geometry(self, x: Tensor, z: Tensor) -> Tensor:
        return x @ z.T + x.sum(1)[:, None]


@dataclass(frozen=True)
class Relative(Linear):
    """Divided by what all inputs together are."""

    def geometry(self, x: Tensor, z: Tensor) -> Tensor:
        return x @ z.T / x.square().mean()


@dataclass(frozen=True)
class Double(Bell):
    def values(self, g: Tensor) -> Tensor:
        return super().values(g.double())


@dataclass(frozen=True)
class Twice(Bell):
    def pull(self, x: Tensor, z: Tensor, g: Tensor, C: Tensor) -> Tensor:
        return 2 * super().pull(x, z, g, C)


@dataclass(frozen=True)
class Added(Pulled):
    def pull_weighted(self, x: Tensor, z: Tensor, g: Tensor, weights: Tensor, C: Tensor) -> Tensor:
        return 2 * super().pull_weighted(x, z, g, weights, C)


@dataclass(frozen=True)
class Inherited(Gaussian):
    """Another kernel than the Gaussian, whose slopes it still has."""

    def values(self, g: Tensor) -> Tensor:
        return 1 / (1 + g ** 2 / self.L ** 2)

    def pull(self, x: Tensor, z: Tensor, g: Tensor, C: Tensor) -> Tensor:
        a = 2 * self.values(g) ** 2 / self.L ** 2
        return torch.einsum("nm,mc,md->ncd", a, C, z) - (a @ C)[:, :, None] * x[:, None]


@dataclass(frozen=True)
class Smooth(Laplace):
    def nearest(self, g: Tensor) -> float:
        return math.inf


@dataclass(frozen=True)
class Growing(Gaussian):
    homogeneous: ClassVar[bool] = True


@dataclass(frozen=True)
class Tied(Tunable):
    """Its geometry is in units of its bandwidth."""

    def geometry(self, x: Tensor, z: Tensor) -> Tensor:
        return squared_distances(x, z) / (self.bandwidth or 1.0) ** 2

    def values(self, g: Tensor) -> Tensor:
        return torch.exp(-g)

    def typical(self, g: Tensor) -> float:
        return 2.0


@dataclass(frozen=True)
class Idle(Tied):
    def geometry(self, x: Tensor, z: Tensor) -> Tensor:
        return squared_distances(x, z) / 4


@dataclass(frozen=True)
class Ruleless(Idle):
    def typical(self, g: Tensor) -> float:
        return -1.0


@dataclass(frozen=True)
class Wide(Rational):
    arrays: ClassVar[int] = 3


class Hidden(Bell):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth


@dataclass(frozen=True)
class Drawn(Bell):
    """Two are never equal."""

    L: float = field(default=2.0, compare=False)
    tag: Any = field(default_factory=lambda: np.random.default_rng(0))


WRONG: list[tuple[Any, str]] = [
    (3, "3 is not a kernel object: derive its class from richter.learners.Kernel"),
    (Root(), "Root has neither slopes nor pull, and differentiating .* NaN or Inf: .*richter.learners.distances"),
    (Numpy(), r"Numpy has neither slopes nor pull, and its values cannot be differentiated: .*write pull\(\)"),
    (Written(), r"values\(\) changes the geometry that it is given"),
    (Distance(), "smallest eigenvalue is -0.* of the largest: it is not positive semi-definite"),
    (Askew(), r"k\(x, z\) and k\(z, x\) differ"),
    (Relative(), "the value of a pair depends on which other inputs are there"),
    (Double(), "of inputs in float32 the values are torch.float64"),
    (Twice(), r"the gradients differ from differences of the values by 1 \(relative\)"),
    (Added(), r"the FACT matrix of 13 outputs is not that of the gradients: pull\(\) or pull_weighted\(\)"),
    (Inherited(2.0), r"slopes\(\) gives an \(a, b\) for which a z \+ b x is not the gradient"),
    (Smooth(1.0), r"where two inputs nearly meet, its slopes are so large.*Write nearest\(\)"),
    (Growing(2.0), "homogeneous=True, but a metric four times as large does more than scale"),
    (Tied(), r"geometry\(\) depends on the bandwidth.*leave the bandwidth to values\(\)"),
    (Idle(), "the bandwidth does not change the values"),
    (Ruleless(), r"typical\(\) gives -1.0, not a positive number"),
    (Wide(), r"geometry\(\) of 13 and 7 inputs has shape \(2, 13, 7\); \(3, 13, 7\) is needed, for arrays=3"),
    (Hidden(3), r"depth is not compared: .*@dataclass\(frozen=True\) above the class"),
    (Drawn(), "a copy of the kernel is not equal to it"),
    (Gaussian(1e-3), r"the values of different inputs are all the same \(0\).*Give x= in the units of its bandwidth"),
]


@pytest.mark.parametrize(("kernel", "sentence"), WRONG, ids=[type(kernel).__name__ for kernel, _ in WRONG])
def test_a_wrong_kernel_is_caught(kernel: Any, sentence: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s){sentence}"):
        check_kernel(kernel)


def test_inputs_to_check_on() -> None:
    check_kernel(Gaussian(1e-3), 1e-3 * normal(9, 3).numpy())
    with pytest.raises(AssertionError, match=r"x has shape \(7, 3\); at least \[8, 2\]"):
        check_kernel(Gaussian(1.0), normal(7, 3))


@pytest.mark.parametrize("features", ["agop", "fact"])
@pytest.mark.parametrize("kernel", [Root(), Numpy()], **NAMED)
def test_a_learner_says_what_is_missing(kernel: Kernel, features: str) -> None:
    X, y, _ = table(20)
    assert np.isfinite(KernelRidge(kernel, ridge=0.1).fit(X, y).predict(X)).all()  # needs no gradient
    with pytest.raises(SelectionError, match="has neither slopes nor pull"):
        RFMRegressor(kernel, features, 1, 0.1).fit(X, y)
