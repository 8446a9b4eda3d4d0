"""Kernels of infinitely wide networks: against integrals, against wide networks, and against their laws."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import oracles
import richter
from richter.core import SelectionError
from richter.kernels import infinite

ROOT = Path(__file__).parents[2]
LEAKY = infinite.LeakyRelu(0.1)
PHI: dict[Any, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu, LEAKY: lambda u: F.leaky_relu(u, 0.1), "leaky_relu": F.leaky_relu, "abs": torch.abs,
    "linear": lambda u: 1 * u, "erf": torch.erf, "gelu": F.gelu, "quadratic": torch.square}
KINKED = ("relu", LEAKY, "leaky_relu", "abs")
ONE_SIDED = (-49 / 20, 6.0, -15 / 2, 20 / 3, -15 / 4, 6 / 5, -1 / 6)  # a slope from values at 0, h, ..., 6h
SMOOTH = ("linear", "erf", "gelu", "quadratic")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng((seed, *shape)).standard_normal(shape))


def dual(activation: Any) -> infinite.Dual:
    return infinite.ACTIVATIONS[activation] if isinstance(activation, str) else activation


def options(activation: Any, **changed: Any) -> dict[str, Any]:
    return {"activation": activation, "weight_var": 0.36 if activation == "quadratic" else 1.44, "bias_var": 0.09} | changed


def products(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """c, q1 and q2, all [n,n]."""
    c = x @ x.T / x.shape[1]
    c = (c + c.T) / 2
    q = c.diagonal()
    return c, q[:, None].expand_as(c).clone(), q[None].expand_as(c).clone()


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(("activation", "one", "three"), [
    ("relu", 0.621009, 0.817655), (LEAKY, 0.635928, 0.859406), ("abs", 1.055924, 4.162770), ("erf", 0.695888, 1.311654),
    ("gelu", 0.515088, 0.469048), ("quadratic", 0.173561, 0.130802), ("linear", 1.248111, 5.711990)])
def test_anchors(activation: Any, one: float, three: float) -> None:
    """Numbers that neural-tangents 0.6.5 gave."""
    X = np.random.default_rng(0).standard_normal((6, 5))
    for depth, value in ((1, one), (3, three)):
        assert abs(infinite.ntk(X, depth=depth, **options(activation))[0, 1] - value) < 6e-7


@pytest.mark.parametrize("activation", PHI, ids=str)
@pytest.mark.parametrize(("c", "q1", "q2"), [(0.3, 1.0, 0.7), (-0.6, 0.5, 2.0), (0.0, 1.3, 0.4), (0.99, 1.0, 1.0),
                                             (-1.995, 1.0, 4.0), (1e-3, 1e-2, 1e-3), (2.0, 1.0, 4.0), (-0.5, 0.5, 0.5),
                                             (3.0, 3.0, 3.0)])
def test_duals_are_integrals(activation: Any, c: float, q1: float, q2: float) -> None:
    k, k_dot = dual(activation)(*(torch.tensor(z, dtype=torch.float64) for z in (c, q1, q2)))
    assert (k.item(), k_dot.item()) == pytest.approx(oracles.duals(PHI[activation], c, q1, q2), rel=1e-11, abs=1e-13)


@pytest.mark.parametrize("activation", PHI, ids=str)
@pytest.mark.parametrize("q", [1e-3, 0.7, 9.0])
def test_the_diagonal_is_an_integral_over_the_line(activation: Any, q: float) -> None:
    z = torch.tensor(q, dtype=torch.float64)
    assert dual(activation)(z, z, z)[0].item() == pytest.approx(oracles.second_moment(PHI[activation], q), rel=1e-12)


@pytest.mark.parametrize("activation", PHI, ids=str)
def test_the_recursion_by_its_definition(activation: Any) -> None:
    """Of generic, equal, opposite and parallel inputs."""
    x = normal(3, 4)
    x2 = torch.stack([x[0], -x[1], 2 * x[2], normal(4, seed=1)])
    tangent, process = oracles.infinite_kernels(x, x2, PHI[activation], 2, **{k: v for k, v in options(activation).items()
                                                                             if k != "activation"})
    torch.testing.assert_close(infinite.ntk(x, x2, depth=2, **options(activation)), tangent, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(infinite.nngp(x, x2, depth=2, **options(activation)), process, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernel", [infinite.ntk, infinite.nngp])
def test_depth_0_is_a_linear_model(kernel: Callable[..., Tensor]) -> None:
    x = normal(5, 3)
    torch.testing.assert_close(kernel(x, depth=0, weight_var=1.5, bias_var=0.2), 0.5 * x @ x.T + 0.2)


class NTKLinear(nn.Module):
    """z = sigma_w / sqrt(d_in) W h + sigma_b b, all of W and b N(0, 1)."""

    def __init__(self, d_in: int, d_out: int, draw: torch.Generator, weight_var: float, bias_var: float) -> None:
        super().__init__()
        self.W = nn.Linear(d_in, d_out, bias=False)
        self.W.weight.data = torch.randn(d_out, d_in, generator=draw)
        self.b = nn.Parameter(torch.randn(d_out, generator=draw))
        self.w, self.s = math.sqrt(weight_var / d_in), math.sqrt(bias_var)

    def forward(self, h: Tensor) -> Tensor:
        return self.w * self.W(h) + self.s * self.b


class Apply(nn.Module):
    def __init__(self, phi: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.phi = phi

    def forward(self, u: Tensor) -> Tensor:
        return self.phi(u)


def wide(activation: Any, width: int, seed: int) -> nn.Module:
    draw, given = torch.Generator().manual_seed(seed), options(activation)
    layer = [NTKLinear(i, o, draw, given["weight_var"], given["bias_var"]) for i, o in ((5, width), (width, width), (width, 1))]
    return nn.Sequential(layer[0], Apply(PHI[activation]), layer[1], Apply(PHI[activation]), layer[2])


@pytest.mark.parametrize("activation", ["relu", pytest.param("gelu", marks=pytest.mark.long), "erf"])
def test_wide_networks(activation: str) -> None:
    """The mean of the measured kernels of networks of width 1024, within its spread over seeds."""
    x = normal(4, 5).float()
    seen = torch.stack([richter.kernels.ntk(wide(activation, 1024, seed), x).double() for seed in range(32)])

    def error(**changed: Any) -> float:
        """In units of the spread of the mean."""
        K = infinite.ntk(x, **options(activation, depth=2) | changed)
        return float((seen.mean(0) - K).norm() / seen.std(0).norm()) * math.sqrt(len(seen))

    assert error() < 3
    for wrong in ({"bias_var": 0.0}, {"depth": 3}, {"weight_var": 1.3}, {"activation": "linear"}):
        assert error(**wrong) > 4


# ------------------------------------------------------------------------------------------------ laws


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(1, 6), d=st.integers(1, 5), depth=st.integers(0, 4),
       activation=st.sampled_from(list(PHI)), bias_var=st.sampled_from([0.0, 0.3]))
def test_laws(seed: int, n: int, d: int, depth: int, activation: Any, bias_var: float) -> None:
    x = normal(n, d, seed=seed) / 2
    x = torch.cat([x, x[:1], -x[:1], 3 * x[:1], 0 * x[:1]])  # equal, opposite, parallel, zero
    given = options(activation, bias_var=bias_var, depth=depth)
    for kernel in (infinite.ntk, infinite.nngp):
        K = kernel(x, **given)
        assert torch.isfinite(K).all()
        assert torch.equal(K, K.T)
        assert torch.linalg.eigvalsh(K)[0] > -1e-7 * K.trace()
        assert torch.equal(K[n, n], K[0, 0])
        torch.testing.assert_close(K[0, n], K[0, 0], rtol=1e-15, atol=0)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(x)))
        torch.testing.assert_close(kernel(x[order], x, **given), K[order], rtol=1e-12, atol=1e-14)
    assert (infinite.ntk(x, **given).diagonal() >= infinite.nngp(x, **given).diagonal()).all()


def test_the_diagonal_is_exact() -> None:
    """With weight_var 2, relu keeps q, and the tangent kernel of x with itself is (depth + 1) 2 q: no rounding of an angle; nor
    of products, however they are summed for inputs that are equal."""
    x = normal(40, 5000)
    x = torch.cat([x, x[:7]])
    K, across = (infinite.ntk(x, x2, depth=9, weight_var=2.0) for x2 in (None, x.clone()))
    torch.testing.assert_close(K.diagonal(), 20 * x.square().sum(1) / 5000, rtol=1e-14, atol=0)
    for same in (K[range(40, 47), range(7)], across[range(7), range(40, 47)], across.diagonal()[:7], across.diagonal()[40:]):
        assert torch.equal(same, K.diagonal()[:7])


@pytest.mark.parametrize("activation", KINKED, ids=str)
def test_the_relu_family_is_homogeneous(activation: Any) -> None:
    x, s = normal(6, 3), torch.tensor([1e-3, 0.1, 1, 2, 30, 1e3]).double()
    for kernel in (infinite.ntk, infinite.nngp):
        given = options(activation, bias_var=0.0, depth=3)
        torch.testing.assert_close(kernel(s[:, None] * x, **given), s[:, None] * s * kernel(x, **given), rtol=1e-9, atol=0)


def test_one_family() -> None:
    x = normal(5, 3)
    for slope, activation in ((0.0, "relu"), (1.0, "linear"), (-1.0, "abs"), (0.01, "leaky_relu")):
        K = infinite.ntk(x, depth=2, activation=infinite.LeakyRelu(slope))
        assert torch.equal(K, infinite.ntk(x, depth=2, activation=activation))
    own = infinite.ntk(x, depth=2, activation=lambda c, q1, q2: (c, torch.ones_like(c)))
    torch.testing.assert_close(own, infinite.ntk(x, depth=2, activation="linear"))


def test_every_setting_matters() -> None:
    x = normal(4, 3)
    plain = {"depth": 2, "activation": "relu", "weight_var": 1.0, "bias_var": 0.0}
    for kernel in (infinite.ntk, infinite.nngp):
        assert torch.equal(kernel(x, depth=2), kernel(x, **plain))
        for changed in ({"depth": 3}, {"activation": "erf"}, {"weight_var": 1.1}, {"bias_var": 0.1}, {"activation": LEAKY}):
            assert not torch.allclose(kernel(x, **plain), kernel(x, **plain | changed), rtol=1e-3)
    assert not torch.allclose(infinite.ntk(x, **plain), infinite.nngp(x, **plain), rtol=1e-3)


def test_the_kind_of_array_comes_back() -> None:
    x, x2 = normal(4, 3), normal(2, 3, seed=1)
    K = infinite.ntk(x, x2, depth=2)
    assert K.shape == (4, 2)
    assert K.dtype == torch.float64
    seen = infinite.ntk(x.numpy(), x2.numpy(), depth=2)
    assert isinstance(seen, np.ndarray)
    np.testing.assert_array_equal(seen, K.numpy())
    single = infinite.nngp(x.float(), depth=1)
    assert single.dtype == torch.float64
    assert torch.equal(single, infinite.nngp(x.float().double(), depth=1))
    assert richter.kernels.infinite is infinite


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("kind", ["ntk", "nngp"])
@pytest.mark.parametrize("activation", PHI, ids=str)
def test_gradients_are_differences(activation: Any, kind: Any) -> None:
    """In c, q1 and q2, off the diagonal; on it where the kernel is smooth. One-sided: c^2 does not exceed q1 q2."""
    at = products(normal(5, 4) / 2)
    off = torch.ones(5, 5, dtype=torch.bool) if activation in SMOOTH else ~torch.eye(5, dtype=torch.bool)
    live = [z.clone().requires_grad_() for z in at]
    given = options(activation, depth=3, kind=kind)
    gradients = torch.autograd.grad(infinite.recursion(*live, **given).sum(), live)
    for i, gradient in enumerate(gradients):
        def value(s: float, i: int = i) -> Tensor:
            return infinite.recursion(*(z + s * (i == j) for j, z in enumerate(at)), **given)
        h = 1e-3 * (1 if i else -1)
        difference = sum(w * value(s * h) for s, w in enumerate(ONE_SIDED)) / h
        torch.testing.assert_close(gradient[off], difference[off], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", PHI, ids=str)
@pytest.mark.parametrize("bias_var", [0.0, 0.1])
def test_gradients_are_finite_everywhere(activation: Any, bias_var: float, dtype: torch.dtype) -> None:
    x = normal(5, 4).to(dtype) / 2
    x = torch.cat([x, x[:1], -x[:1], 3 * x[:1], 0 * x[:1], x[:1] * (1 + 1e-6), x[:1] + 1e-9, 1e-9 * x[:1]])
    live = [z.requires_grad_() for z in products(x)]
    K = infinite.recursion(*live, **options(activation, bias_var=bias_var, depth=3))
    assert K.dtype == dtype
    assert all(torch.isfinite(z).all() for z in (K, *torch.autograd.grad(K.sum(), live)))


@pytest.mark.parametrize("activation", KINKED, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_kink_counts_as_zero(activation: Any, sign: int) -> None:
    """At parallel inputs dk/dc = k' and dk/dq = 0 exactly, dk' = 0; so the gradient of the kernel is that with k' held still."""
    q1, q2 = (torch.tensor([[z]], dtype=torch.float64, requires_grad=True) for z in (0.7, 2.8))
    c = torch.tensor([[sign * 1.4]], dtype=torch.float64, requires_grad=True)
    k, k_dot = dual(activation)(c, q1, q2)
    assert [z.item() for z in torch.autograd.grad(k, (c, q1, q2), retain_graph=True)] == [k_dot.item(), 0, 0]
    assert [z.item() for z in torch.autograd.grad(k_dot, (c, q1, q2), allow_unused=True, materialize_grads=True)] == [0, 0, 0]
    a = 0.1 if activation is LEAKY else {"relu": 0.0, "leaky_relu": 0.01, "abs": -1.0}[activation]
    assert k_dot.item() == pytest.approx((1 + a * a) / 2 if sign > 0 else a, rel=1e-15, abs=1e-16)
    K = infinite.recursion(c, q1, q2, depth=1, activation=activation, weight_var=1.5)
    assert torch.autograd.grad(K, c)[0].item() == pytest.approx(1.5**2 * 2 * k_dot.item(), rel=1e-14, abs=1e-15)


def test_rounding_does_not_reach_the_kink() -> None:
    """Norms summed in another way than products: the gradient at equal inputs is still that of a parallel pair."""
    for dtype, d in ((torch.float32, 3000), (torch.float64, 20_000)):
        x = normal(20, d).to(dtype)
        c = (x @ x.T / d).requires_grad_()
        q = x.square().sum(1) / d
        g = torch.autograd.grad(infinite.recursion(c, q[:, None], q[None], depth=2, weight_var=2.0).sum(), c)[0].diagonal()
        torch.testing.assert_close(g, torch.full_like(g, 6.0), rtol=1e-6, atol=0)


def test_the_document_says_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = (ROOT / "docs/theory.md").read_text().split("```python\n")
    (code,) = (block for block in blocks if "from richter.kernels import infinite" in block)
    code = code.split("```")[0]
    exec(code, {})
    assert capsys.readouterr().out.split() == ["0" + number for number in re.findall(r"[ ](\.\d+)", code.split("#")[-1])]


# ------------------------------------------------------------------------------------------------ what is refused


X = normal(5, 3)
C = products(X)


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: infinite.ntk(X[:0], depth=1), r"x has shape \(0, 3\).*at least one.*Flatten"),
    (lambda: infinite.ntk(X[:, :0], depth=1), r"x has shape \(5, 0\)"),
    (lambda: infinite.nngp(X[0], depth=1), r"x has shape \(3,\).*x\[None\]"),
    (lambda: infinite.nngp(X, X[None], depth=1), r"x2 has shape \(1, 5, 3\)"),
    (lambda: infinite.ntk(X, X[:, :2], depth=1), "x has 3 columns and x2 has 2.*same columns"),
    (lambda: infinite.ntk(X * float("nan"), depth=1), "x contains NaN or Inf"),
    (lambda: infinite.ntk(X, X * float("inf"), depth=1), "x2 contains NaN or Inf"),
    (lambda: infinite.ntk(X * 1j, depth=1), "x is complex"),
    (lambda: infinite.ntk(X, depth=-1), "depth=-1: it counts hidden layers.*0 for a linear model"),
    (lambda: infinite.ntk(X, depth=1.5), r"depth=1\.5"),
    (lambda: infinite.ntk(X, depth=True), "depth=True"),
    (lambda: infinite.ntk(X, depth=1, activation="rely"), "no activation 'rely'. Close to it: 'relu'.*'quadratic'"),
    (lambda: infinite.nngp(X, depth=1, weight_var=-1.0), r"weight_var=-1\.0 is a variance.*0 or larger"),
    (lambda: infinite.nngp(X, depth=1, bias_var=float("nan")), "bias_var=nan is a variance"),
    (lambda: infinite.ntk(X, depth=12, activation="quadratic", weight_var=9.0), r"overflows at depth 12 with weight_var=9\.0"),
    (lambda: infinite.recursion(*C, depth=1, kind="ntkk"), "no kind 'ntkk'. Close to it: 'ntk'"),
    (lambda: infinite.recursion(*C, depth=-1), "depth=-1"),
])
def test_bad_input(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        call()
