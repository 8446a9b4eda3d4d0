"""Products with the Jacobian of a network, J v: forward, or backward twice; and norms that use the statistics of their batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from richter.instrument.capture.calls import Pass
from richter.instrument.capture.state import State

Direction = Mapping[str, Tensor]  # a change of weights, by their names
Forward = Callable[[State], Pass]  # a pass with these weights


@contextlib.contextmanager
def batch_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
    """These norms use the mean and variance of the examples in hand, and do not write them down."""
    before = [(norm, norm.training, norm.track_running_stats) for norm in norms]
    try:
        for norm in norms:
            norm.training, norm.track_running_stats = True, False  # type: ignore[assignment]
        yield
    finally:
        for norm, training, tracking in before:
            norm.training, norm.track_running_stats = training, tracking


def pushed_forward(forward: Forward, state: State, v: Direction) -> tuple[Pass, Tensor]:
    """A pass, and J v of its outputs in the shape of f, by forward mode. `forward_ad.make_dual` would first compile derivatives
    of derivatives, which half a second is spent on and none is used of."""
    with forward_ad.dual_level() as level:
        duals: dict[int, Tensor] = {}  # one for each parameter, under however many names
        for name, weight in state.items():
            if name in v and id(weight) not in duals:
                duals[id(weight)] = torch._make_dual(weight, v[name].to(weight), level=level)
        run = forward(state.exchanged(duals))
        f, tangent = forward_ad.unpack_dual(run.f)
        tangent = torch.zeros_like(f) if tangent is None else tangent.detach().clone()
    return run, tangent


def pushed_twice(forward: Forward, state: State, v: Direction) -> tuple[Pass, Tensor]:
    """The same by two backward passes: J^T u is linear in u, and its derivative in u is J."""
    run = forward(state)
    names = list({id(state[name]): name for name in v}.values())
    u = torch.zeros_like(run.f, requires_grad=True)
    with state.in_place():
        pulled = torch.autograd.grad(run.f, [state[name] for name in names], u, create_graph=True, allow_unused=True)
        terms = [(d * v[name].to(d)).sum() for name, d in zip(names, pulled, strict=True) if d is not None and d.requires_grad]
        tangent = torch.autograd.grad(torch.stack(terms).sum(), u, allow_unused=True)[0] if terms else None
    return run, torch.zeros_like(run.f) if tangent is None else tangent.detach()
