"""The largest stable learning rate at the initial weights, from the curvature of the loss on a probe."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from richter.instrument.capture import Output, device_of, outputs_of, to_device
from richter.instrument.probe import Probe

POWER_STEPS = 20  # products with the Hessian


def stable_rate(model: nn.Module, initial: Mapping[str, Tensor], probe: Probe, output: Output | None = None) -> float | None:
    """Return 2 over the largest eigenvalue (by size) of the Hessian of the mean loss, by power iteration: gradient descent with
    all examples and without momentum is unstable beyond it. None if the loss cannot be differentiated twice."""
    if probe.y is None:
        return None
    model = copy.deepcopy(model).eval()
    model.load_state_dict(initial, strict=False)
    weights = [p for p in model.parameters() if p.requires_grad]
    try:
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            f = outputs_of(model, to_device(probe.x, device_of(model)), output, graph=True)
            gradient = torch.autograd.grad(_loss(f, probe), weights, create_graph=True, allow_unused=True)
            used = [(g, p) for g, p in zip(gradient, weights, strict=True) if g is not None and g.requires_grad]
            draw, top = torch.Generator().manual_seed(0), 0.0
            v = [torch.randn(p.shape, generator=draw).to(p) for _, p in used]
            for _ in range(POWER_STEPS):
                size = math.sqrt(sum(float(t.square().sum()) for t in v))
                v = [t / size for t in v]
                product = torch.stack([(g * t).sum() for (g, _), t in zip(used, v, strict=True)]).sum()
                after = torch.autograd.grad(product, [p for _, p in used], retain_graph=True, allow_unused=True)
                v = [torch.zeros_like(t) if a is None else a for a, t in zip(after, v, strict=True)]
                top = math.sqrt(sum(float(t.square().sum()) for t in v))
    except (RuntimeError, ValueError, TypeError, ZeroDivisionError):
        return None
    return 2 / top if top > 0 and math.isfinite(top) else None


def _loss(f: Tensor, probe: Probe) -> Tensor:
    """The mean loss of the probe: its own, or cross-entropy of ids and squared error of targets."""
    assert probe.y is not None
    y = probe.y.to(f.device)
    if probe.loss is not None:
        return torch.as_tensor(probe.loss(f, y)).mean()
    if y.is_floating_point():
        return F.mse_loss(f, y)
    return F.cross_entropy(f.flatten(0, -2), y.flatten(), ignore_index=probe.ignore_index)
