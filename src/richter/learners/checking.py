"""A conformance test for your own kernels: ``richter.testing.check_kernel``."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import RichterError
from richter.core.arrays import ArrayLike, to_tensor
from richter.learners.features import agop, fact
from richter.learners.kernel import Kernel, Tunable
from richter.learners.rfm import RFMRegressor

EXACT, CLOSE = 1e-8, 1e-5  # relative tolerances: the same sum in another order; derivatives against finite differences


def check_kernel(kernel: Kernel, x: ArrayLike = None) -> None:
    """Check that the learners can use ``kernel``. Raises AssertionError with a sentence that names the fault.

    Checks on ``x`` [n, d] (default: 12 normal points with 4 columns; give others if the kernel has another scale): the kernel is
    a value; its geometry depends on the inputs alone and is not modified; it is symmetric and positive semi-definite; its
    gradients match finite differences, with and without a metric; its slopes and sums of gradients agree with them, also where
    two inputs nearly coincide; AGOP and FACT match its gradients; and a learner can be fitted with it.
    """
    if not isinstance(kernel, Kernel):
        raise AssertionError(f"{kernel!r} is not a kernel object: derive its class from richter.learners.Kernel.")
    X = _normal(12, 4) if x is None else to_tensor(x, "x")
    if X.dim() != 2 or len(X) < 8 or X.shape[1] < 2:
        raise AssertionError(f"x has shape {tuple(X.shape)}; at least [8, 2] is needed.")
    try:
        _Check(kernel, torch.cat([X, X[:1]])).run()  # a copy, whose distance is 0, where a kernel may have a kink
    except RichterError as error:
        raise AssertionError(str(error)) from error


def _normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _near(a: Tensor, b: Tensor, tolerance: float = EXACT) -> bool:
    """Return whether two tensors are equal up to a relative error."""
    return a.shape == b.shape and (a - b).norm().item() <= tolerance * b.norm().item()


class _Check:
    """Tests of one kernel on inputs x, the last of which is a copy of the first, and on other inputs z."""

    def __init__(self, kernel: Kernel, x: Float[Tensor, "n d"]) -> None:
        self.kernel, self.name = kernel, type(kernel).__name__
        self.x, self.z = x, x[::2] + 0.1 * x.std()

    def run(self) -> None:
        """Run all checks."""
        self.is_a_value()
        if isinstance(self.kernel, Tunable):
            self.kernel = self.with_a_bandwidth(self.kernel)
        self.nothing_is_written_into()
        self.geometry_is_of_inputs_alone()
        self.matrix_is_positive()
        for M in self.metrics():
            self.gradients_are_of_the_values(M)
            self.sums_are_of_the_gradients(M)
        self.close_inputs_leave_digits()
        self.scale_is_of_the_metric()
        if isinstance(self.kernel, Tunable):
            self.bandwidth_is_of_values_alone(self.kernel)
        self.learners_fit()

    def require(self, true: bool, sentence: str, M: Tensor | None = None) -> None:
        """Raise an AssertionError with this sentence unless a condition is true."""
        if not true:
            metric = "" if M is None else " with a diagonal metric" if M.dim() == 1 else " with a metric"
            raise AssertionError(f"{self.name}{metric}: {sentence}")

    def K(self, x: Tensor, z: Tensor, M: Tensor | None = None) -> Float[Tensor, "n m"]:
        """Kernel matrix as a tensor."""
        return torch.as_tensor(self.kernel(x, z, M))

    def G(self, x: Tensor, z: Tensor, M: Tensor | None = None) -> Float[Tensor, "n m d"]:
        """Gradients of the kernel as a tensor."""
        return torch.as_tensor(self.kernel.gradients(x, z, M))

    def metrics(self) -> tuple[Tensor | None, ...]:
        """Return None, and a full and a diagonal metric with unequal eigenvalues."""
        d = self.x.shape[1]
        B = _normal(d, d + 1, seed=1)
        return None, B @ B.T / d, 0.5 + torch.arange(d, dtype=torch.float64) / d

    def is_a_value(self) -> None:
        """Check equality and hash, because learners and their kernels are cloned and compared."""
        hidden = sorted(vars(self.kernel).keys() - {f.name for f in dataclasses.fields(self.kernel)})
        self.require(not hidden, f"{', '.join(hidden)} is not compared: two kernels that differ in it would be equal. Write "
                                 f"@dataclass(frozen=True) above the class, and its numbers as fields.")
        again = copy.deepcopy(self.kernel)
        self.require(again == self.kernel and hash(again) == hash(self.kernel), "a copy of the kernel is not equal to it.")

    def with_a_bandwidth(self, kernel: Tunable) -> Tunable:
        """Return the kernel with a bandwidth, from its own rule if none is set."""
        rule = kernel.typical(kernel.geometry(self.x, self.x))
        self.require(isinstance(rule, float) and 0 < rule < float("inf"), f"typical() gives {rule!r}, not a positive number.")
        return kernel.fitted(self.x)

    def bandwidth_is_of_values_alone(self, kernel: Tunable) -> None:
        """Check that the bandwidth changes values() and not geometry()."""
        other, g = kernel.at(2 * kernel.L), kernel.geometry(self.x, self.x)
        self.require(torch.equal(other.geometry(self.x, self.x), g),
                     "geometry() depends on the bandwidth. It is computed once for all bandwidths that are tried: leave the "
                     "bandwidth to values().")
        self.require(not _near(other.values(g), kernel.values(g)), "the bandwidth does not change the values.")

    def geometry_is_of_inputs_alone(self) -> None:
        """Check the shapes of geometry() and values(), and that geometry() depends on inputs alone."""
        kernel, x, z = self.kernel, self.x, self.z
        g = kernel.geometry(x, z)
        shape = (len(x), len(z)) if kernel.arrays == 1 else (kernel.arrays, len(x), len(z))
        self.require(tuple(g.shape) == shape,
                     f"geometry() of {len(x)} and {len(z)} inputs has shape {tuple(g.shape)}; {shape} is needed, for "
                     f"arrays={kernel.arrays}, by which memory is reckoned.")
        K = kernel.values(g)
        self.require(K.shape == shape[-2:], f"values() has shape {tuple(K.shape)}; {shape[-2:]} is needed.")
        part, alone = slice(2, 5), kernel.geometry(x[2:5], z)
        self.require(_near(kernel.values(g[..., part, :]), K[part]) and _near(kernel.values(alone), K[part]),
                     "the value of a pair depends on which other inputs are there. Learners compute rows of it at a time.")
        single = kernel.values(kernel.geometry(x.float(), z.float()))
        self.require(single.dtype == torch.float32 and _near(single.double(), K, 1e-3),
                     f"of inputs in float32 the values are {single.dtype}, or not those of float64 to 1e-3. Large systems are "
                     f"solved in float32.")

    def nothing_is_written_into(self) -> None:
        """Check that no method writes into the geometry."""
        kernel, x, z = self.kernel, self.x, self.z
        weights, C = torch.ones(len(x), 2, dtype=x.dtype), torch.ones(len(z), 2, dtype=x.dtype)
        g = kernel.geometry(x, z)
        before = g.clone()
        calls: dict[str, Callable[[], object]] = {
            "values": lambda: kernel.values(g), "nearest": lambda: kernel.nearest(g), "pull": lambda: kernel.pull(x, z, g, C),
            "pull_weighted": lambda: kernel.pull_weighted(x, z, g, weights, C)}
        if kernel.sloped:
            calls["slopes"] = lambda: kernel.slopes(g, x.shape[1])
        for method, call in calls.items():
            call()
            self.require(torch.equal(g, before), f"{method}() changes the geometry that it is given, which is used again. Write "
                                                 f"g * 2 and not g.mul_(2).")

    def matrix_is_positive(self) -> None:
        """Check that the kernel matrix is finite, symmetric and positive semi-definite."""
        x, z = self.x, self.z
        K = self.K(x, x)
        self.require(bool(K.isfinite().all()), "there are values of NaN or Inf.")
        others = K[~(x[:, None] == x).all(-1)]
        self.require(others.std().item() > 1e-6 * K.diagonal().mean().item(),
                     f"the values of different inputs are all the same ({others.mean().item():.2g}), and nothing can be seen of "
                     f"the kernel. Give x= in the units of its bandwidth.")
        self.require(_near(K, K.T) and _near(self.K(x, z), self.K(z, x).T), "k(x, z) and k(z, x) differ.")
        self.require(_near(K[-1], K[0]), "a copy of an input has another row than the input.")
        eigenvalues = torch.linalg.eigvalsh(K)
        least = (eigenvalues[0] / eigenvalues.abs().max()).item()
        self.require(least > -EXACT, f"the smallest eigenvalue is {least:.2g} of the largest: it is not positive semi-definite, "
                                     f"and the system that a learner solves need not have a solution.")

    def gradients_are_of_the_values(self, M: Tensor | None) -> None:
        """Compare gradients with finite differences of two widths. Where these differ there is a kink, and the entry is
        skipped."""
        x, z = self.x, self.z
        G = self.G(x, z, M)
        self.require(bool(self.G(x, x, M).isfinite().all()), "there are gradients of NaN or Inf. At a kink, as of a point with "
                                                             "itself, the gradient counts as 0.", M)
        fine, coarse = (self._differences(M, width) for width in (1e-4, 2e-4))
        size = fine.abs().max()
        smooth = (fine - coarse).abs() <= CLOSE * size
        self.require(smooth.double().mean().item() > 0.8, "its values are not smooth enough to be differentiated.", M)
        error = ((G - fine).abs()[smooth].max() / size).item()
        self.require(error <= CLOSE, f"the gradients differ from differences of the values by {error:.2g} (relative).", M)
        if self.kernel.sloped and M is None:
            a, b = self.kernel.slopes(self.kernel.geometry(x, z), x.shape[1])
            b = b if isinstance(b, Tensor) else b * a
            self.require(_near(a[..., None] * z + b[..., None] * x[:, None], G),
                         "slopes() gives an (a, b) for which a z + b x is not the gradient that pull() gives.")

    def _differences(self, M: Tensor | None, width: float) -> Float[Tensor, "n m d"]:
        """Return (k(x + h, z) - k(x - h, z)) / (2 |h|), for h along each coordinate."""
        h = width * self.x.std().item()
        steps = h * torch.eye(self.x.shape[1], dtype=self.x.dtype)
        return torch.stack([(self.K(self.x + e, self.z, M) - self.K(self.x - e, self.z, M)) / (2 * h) for e in steps], 2)

    def sums_are_of_the_gradients(self, M: Tensor | None) -> None:
        """Compare AGOP and FACT, computed in every way, with the gradients."""
        x, n = self.x, len(self.x)
        G = self.G(x, x, M)
        for outputs in (1, n):  # one output uses rows; n outputs use pairs, if the kernel has slopes
            A = _normal(n, outputs, seed=2)
            J = torch.einsum("jc,ijd->icd", A, G)
            for memory in ("1GiB", 400 * n):
                self.require(_near(torch.as_tensor(agop(self.kernel, x, A, M, memory=memory)), _outer(J)),
                             f"the AGOP of {outputs} outputs is not that of the gradients: pull() or slopes() adds them up "
                             f"wrongly.", M)
                self.require(_near(torch.as_tensor(fact(self.kernel, x, A, M, memory=memory)),
                                   torch.einsum("ic,icd,ie->de", A, J, x)),
                             f"the FACT matrix of {outputs} outputs is not that of the gradients: pull() or pull_weighted() adds "
                             f"them up wrongly.", M)

    def close_inputs_leave_digits(self) -> None:
        """Check that AGOP does not use squares of slopes where slopes are unbounded."""
        x = self.x.clone()
        x[1] = x[0] + 1e-9 * x.std()
        A = _normal(len(x), len(x), seed=2)
        J = torch.einsum("jc,ijd->icd", A, self.G(x, x))
        self.require(_near(torch.as_tensor(agop(self.kernel, x, A)), _outer(J), CLOSE),
                     "where two inputs nearly meet, its slopes are so large that their squares leave no digits. Write nearest(), "
                     "so that AGOP is then summed up row by row.")

    def scale_is_of_the_metric(self) -> None:
        """Check ``homogeneous``: a larger metric only scales the kernel."""
        if self.kernel.homogeneous:
            one = torch.ones(self.x.shape[1], dtype=self.x.dtype)
            K, wide = self.K(self.x, self.x, one), self.K(self.x, self.x, 4 * one)
            self.require(_near(wide / wide.norm(), K / K.norm()), "homogeneous=True, but a metric four times as large does more "
                                                                  "than scale the kernel.")

    def learners_fit(self) -> None:
        """Check that RFM fits and predicts finite numbers with this kernel."""
        X, y = self.x.numpy(), (self.x[:, 0] + self.x[:, 1].square() / self.x.std()).numpy()
        ridge = 0.1 * self.K(self.x, self.x).diagonal().mean().item()
        for features in ("agop", "fact"):
            fit = f'RFMRegressor(kernel, features="{features}")'
            try:
                model = RFMRegressor(self.kernel, features, 1, ridge, early_stopping=False).fit(X, y)
                finite = bool(torch.from_numpy(model.predict(X)).isfinite().all())
            except Exception as error:
                raise AssertionError(f"{self.name}: {fit} cannot be fitted: {error}") from error
            self.require(finite and len(model.history_) == 2, f"{fit} gives NaN or Inf, or no metric.")


def _outer(J: Float[Tensor, "n c d"]) -> Float[Tensor, "d d"]:
    """Mean outer product of gradients, summed over outputs."""
    return torch.einsum("icd,ice->de", J, J) / len(J)
