"""Kernels of infinitely wide convolutional and residual networks: against neural-tangents, random networks, and their laws."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import richter
from richter.core import MemoryBudgetError, SelectionError
from richter.kernels import infinite
from richter.learners import ConvolutionalNTK, KernelRidge

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "convolutional_kernels.json").read_text())
RNG = np.random.default_rng(0)
X, X2 = RNG.standard_normal((3, 2, 5, 4)), RNG.standard_normal((2, 2, 5, 4))
X[2] = -0.5 * X[0] + 0.1 * X[1]
SETTINGS: dict[str, Any] = {"depth": 2, "weight_var": 1.44, "bias_var": 0.09}


def said(case: dict[str, Any]) -> str:
    return "-".join(str(case[k]) for k in ("activation", "depth", "width", "pool", "residual", "convolutional"))


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=said)
def test_neural_tangents(case: dict[str, Any]) -> None:
    """All values of neural-tangents, whose ReLU kernels lose half of the digits near equal inputs."""
    options = {"depth": case["depth"], "residual": case["residual"], "weight_var": case["weight_std"]**2,
               "bias_var": case["bias_std"]**2,
               "activation": infinite.LeakyRelu(0.1) if case["activation"] == "leaky_relu" else case["activation"]}
    for kind in ("ntk", "nngp"):
        for x2, name in ((None, kind), (X2, f"{kind}_across")):
            if case["convolutional"]:
                seen = infinite.convolutional(X, x2, kind=kind, width=case["width"], pool=case["pool"], **options)
            else:
                flat = None if x2 is None else x2.reshape(2, -1)
                seen = getattr(infinite, kind)(X.reshape(3, -1), flat, **options)
            np.testing.assert_allclose(seen, case[name], rtol=1e-6 if kind == "ntk" else 1e-9, atol=1e-9)


class Conv(nn.Module):
    """Convolution in the NTK parametrisation."""

    def __init__(self, c_in: int, c_out: int, draw: torch.Generator, width: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c_out, c_in, width, width, generator=draw, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(c_out, generator=draw, dtype=torch.float64))
        self.scale = math.sqrt(SETTINGS["weight_var"] / (c_in * width * width))

    def forward(self, h: Tensor) -> Tensor:
        bias = math.sqrt(SETTINGS["bias_var"]) * self.bias
        return F.conv2d(h, self.scale * self.weight, bias, padding=self.weight.shape[2] // 2)


class Wide(nn.Module):
    def __init__(self, pool: bool, residual: bool, seed: int, channels: int = 48) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.first, self.second = Conv(2, channels, draw), Conv(channels, channels, draw)
        self.last = Conv(channels * (1 if pool else 20), 1, draw, 1)
        self.pool, self.residual = pool, residual

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        z = self.second(torch.relu(z)) + (z if self.residual else 0)
        h = torch.relu(z)
        h = h.mean((2, 3)) if self.pool else h.flatten(1)
        return self.last(h[:, :, None, None]).flatten(1)


@pytest.mark.parametrize(("pool", "residual"), [(False, False), (True, True)])
def test_wide_networks(pool: bool, residual: bool) -> None:
    """The mean of measured kernels of random networks, within its spread over seeds."""
    x = torch.from_numpy(X)
    seen = torch.stack([richter.kernels.ntk(Wide(pool, residual, seed), x) for seed in range(24)])

    def error(**changed: Any) -> float:
        K = infinite.convolutional(x, pool=pool, residual=residual, **SETTINGS | changed)
        return float((seen.mean(0) - K).norm() / seen.std(0).norm()) * math.sqrt(len(seen))

    assert error() < 3
    for wrong in ({"bias_var": 0.0}, {"depth": 3}, {"width": 5}, {"kind": "nngp"}):
        assert error(**wrong) > 4


# ------------------------------------------------------------------------------------------------ laws


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("kind", ["ntk", "nngp"])
def test_laws(pool: bool, kind: Any) -> None:
    x = torch.from_numpy(np.concatenate([np.random.default_rng(1).standard_normal((5, 2, 5, 4)), X, 0 * X[:1], 2 * X[:1]]))
    options = {**SETTINGS, "pool": pool, "kind": kind}
    K = infinite.convolutional(x, **options)
    assert torch.equal(K, K.T)
    assert torch.linalg.eigvalsh(K)[0] > -1e-9 * K.trace()
    torch.testing.assert_close(infinite.convolutional(x, x[3:6], **options), K[:, 3:6], rtol=1e-9, atol=1e-12)
    turned = infinite.convolutional(x.flip(2), **options)  # mirror images of all
    torch.testing.assert_close(turned, K, rtol=1e-9, atol=1e-12)
    free = infinite.convolutional(x[:5], **options | {"bias_var": 0.0})
    torch.testing.assert_close(infinite.convolutional(3 * x[:5], **options | {"bias_var": 0.0}), 9 * free)
    assert isinstance(infinite.convolutional(x.numpy(), **options), np.ndarray)


def test_a_filter_of_one_pixel_reads_pixels_by_themselves() -> None:
    """With as much bias as zero padding leaves, the flattened kernel is the mean over pixels of fully connected ones."""
    K = infinite.convolutional(X, width=1, **SETTINGS)
    each = [infinite.ntk(X[:, :, i, j], **SETTINGS) for i in range(5) for j in range(4)]
    np.testing.assert_allclose(K, np.mean(each, 0), rtol=1e-9)


def test_images_of_one_pixel_are_fully_connected() -> None:
    x = X[:, :, :1, :1]
    for pool in (False, True):
        K = infinite.convolutional(x, width=1, pool=pool, **SETTINGS)
        np.testing.assert_allclose(K, infinite.ntk(x[:, :, 0, 0], **SETTINGS), rtol=1e-9)


def test_pooling_does_not_see_small_shifts() -> None:
    """A bright pixel that moves within a dark image: the pooled kernel hardly changes, the flattened one does."""
    x = np.zeros((2, 1, 9, 9))
    x[0, 0, 4, 4] = x[1, 0, 4, 6] = 9
    pooled, flat = (infinite.convolutional(x, pool=pool, depth=1, weight_var=2.0) for pool in (True, False))
    assert pooled[0, 1] == pytest.approx(pooled[0, 0], rel=1e-9)
    assert flat[0, 1] < 0.5 * flat[0, 0]


def test_every_setting_matters() -> None:
    plain = infinite.convolutional(X, **SETTINGS)
    for changed in ({"depth": 3}, {"kind": "nngp"}, {"activation": "erf"}, {"weight_var": 1.0}, {"bias_var": 0.0}, {"width": 5},
                    {"pool": True}, {"residual": True}):
        assert not np.allclose(infinite.convolutional(X, **SETTINGS | changed), plain, rtol=1e-3)
    assert np.allclose(infinite.ntk(X.reshape(3, -1), depth=1, residual=True), infinite.ntk(X.reshape(3, -1), depth=1))


@pytest.mark.parametrize("pool", [False, True])
def test_blocks_do_not_change_a_number_and_stay_within_memory(pool: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(1).standard_normal((30, 1, 6, 6))
    whole = infinite.convolutional(x, pool=pool, **SETTINGS)
    each = 36**2 if pool else 36
    small = 8 * (30 * 30 + infinite.HELD * each)
    np.testing.assert_allclose(infinite.convolutional(x, pool=pool, memory=small, **SETTINGS), whole, rtol=1e-12)
    with pytest.raises(MemoryBudgetError, match=r"cannot hold the kernel of 30 x 30 images.*The smallest that works is"):
        infinite.convolutional(x, pool=pool, memory=small - 1, **SETTINGS)
    monkeypatch.setattr(infinite, "BLOCK", 50)
    np.testing.assert_allclose(infinite.convolutional(x, x[:7], pool=pool, **SETTINGS), whole[:, :7], rtol=1e-12)
    rows = x.reshape(30, -1)
    np.testing.assert_allclose(infinite.ntk(rows, depth=2), infinite.ntk(rows, rows, depth=2), rtol=1e-12)


# ------------------------------------------------------------------------------------------------ for learners


def test_a_kernel_for_learners() -> None:
    draw = np.random.default_rng(1)
    x, y = draw.standard_normal((60, 36)), draw.standard_normal(60)
    kernel = ConvolutionalNTK(shape=(1, 6, 6), depth=2, pool=True)
    expected = infinite.convolutional(x.reshape(60, 1, 6, 6), depth=2, pool=True, weight_var=2.0)
    np.testing.assert_allclose(kernel(x), expected, rtol=1e-12)
    fitted = KernelRidge(kernel, ridge=1e-6, scale=False, intercept=False).fit(x[:40], y[:40])
    weights = np.linalg.solve(expected[:40, :40] + 1e-6 * np.eye(40), y[:40])
    np.testing.assert_allclose(fitted.predict(x[40:]), expected[40:, :40] @ weights, rtol=1e-6)


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: infinite.convolutional(X[0], **SETTINGS), r"x has shape \(2, 5, 4\).*\[n, channels, height, width\].*x\[None\]"),
    (lambda: infinite.convolutional(X, X2[:, :1], **SETTINGS), r"x has images of \(2, 5, 4\) and x2 of \(1, 5, 4\)"),
    (lambda: infinite.convolutional(X, depth=0), "depth=0: it counts convolutions, at least one"),
    (lambda: infinite.convolutional(X, width=2, **SETTINGS), "width=2: a filter is an odd number of pixels"),
    (lambda: infinite.convolutional(X * math.nan, **SETTINGS), "x contains NaN"),
    (lambda: infinite.convolutional(X, kind="gp", **SETTINGS), "no kind 'gp'"),
    (lambda: infinite.convolutional(X, memory="lots", **SETTINGS), "memory='lots' is not a size"),
    (lambda: infinite.convolutional(1e200 * X, activation="quadratic", **SETTINGS), "the kernel overflows at depth 2"),
    (lambda: ConvolutionalNTK(shape=(1, 6, 6))(np.ones((3, 35))), r"35 columns.*\(1, 6, 6\).*36"),
])
def test_bad_input(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        call()
