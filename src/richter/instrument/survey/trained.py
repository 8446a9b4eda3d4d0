"""Is the network that is measured the one that is trained? Passes are made with aliases in the place of the model's parameters. A
model may ask what they are, look them up in a table or wrap them anew, and then do something else with an alias."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from richter.core import CaptureError
from richter.instrument.capture import Own, Pass
from richter.instrument.survey.layouts import Bench, rounding, tolerance
from richter.instrument.survey.verify import Verified, coarsest


def check_trained(bench: Bench, f: Tensor, verified: Verified) -> None:
    """The outputs of a few examples, and the gradients of a random combination of them, must be those that the model has with its
    own parameters, called as in training."""
    if verified.accumulates:  # its backward pass would add to the user's .grad
        return
    own = Own(bench.state)
    names = [name for name, p in bench.model.named_parameters() if p.requires_grad and p.is_floating_point()]
    weights = [bench.state[name] for name in names]
    plain = replace(bench, state=own).run(record=False)
    largest = max((float(verified.exact[id(w)].norm()) for w in weights), default=0.0)
    others = plain.in_turns(verified.R, [own[name] for name in names])
    if _agree(plain.f, f) and all(_first_apart(plain, [d], [verified.exact[id(w)]], largest) is None
                                  for d, w in zip(others, weights, strict=True)):
        return
    gradients = plain.backward(verified.R, [own[name] for name in names])[1]
    again = bench.run(record=False)  # as plainly: what still differs is no rounding
    exact = again.backward(verified.R, weights)[1]
    if not _agree(plain.f, again.f):
        raise _other("the model's outputs differ", _relative(plain.f, again.f))
    apart = _first_apart(plain, gradients, exact)
    if apart is not None:
        raise _other(f"the gradient of parameter {names[apart]!r} differs", _relative(exact[apart], gradients[apart]))


def _agree(f: Tensor, other: Tensor) -> bool:
    eps = max(torch.finfo(t.dtype).eps for t in (f, other))
    return f.shape == other.shape and _relative(other, f) <= math.sqrt(eps)


def _relative(f: Tensor, other: Tensor) -> float:
    """|f - other| / |other|, for numbers of any size; 0 where both are the same, also NaN or infinite."""
    f, other = f.detach(), other.detach()
    same = (f == other) | (f.isnan() & other.isnan())
    apart, size = torch.where(same, 0, f - other), float(other.abs().max()) if other.numel() else 0.0
    if bool(same.all()):
        return 0.0
    return float((apart / size).norm() / (other / size).norm()) if size else math.inf


def _first_apart(plain: Pass, gradients: list[Tensor], others: list[Tensor], largest: float = 0.0) -> int | None:
    """Which of these gradients are not the same, beyond the rounding of the ``largest``: the first."""
    precision = coarsest(plain.state, plain.f)
    noise = rounding(precision) * max([largest, *(float(d.norm()) for d in gradients)])
    return next((i for i, (d, e) in enumerate(zip(gradients, others, strict=True))
                 if (d - e).norm() > 10 * tolerance(precision) * (d.norm() + e.norm()) + noise), None)


def _other(what: str, off: float) -> CaptureError:
    return CaptureError(f"{what} by {off:.2g} (relative) between training and measuring: for a measurement, aliases with the "
                        f"same numbers stand in the place of the model's parameters, and what it computes depends on which "
                        f"objects they are (it asks for their type, or looks them up in a table). Numbers would be those of "
                        f"another network. Use parameters as tensors in forward(), and keep tables by their names.")
