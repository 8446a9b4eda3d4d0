"""How rich each layer is now, as a function to be asked again and again: what adaptive controls steer by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from richter.core import parse_bytes
from richter.instrument.capture import Call, Output, device_of, quiet, state_of, to_device, unwrap
from richter.instrument.captures import Recording, Survey, record, select
from richter.instrument.cotangents import every_output
from richter.instrument.evaluate import MOMENT_OUTPUTS
from richter.instrument.moments import AT_ONCE
from richter.instrument.observe import measure
from richter.instrument.probe import Probe
from richter.instrument.survey import SURVEYED, surveyed
from richter.measures import quotient

Layers = str | Sequence[str] | Callable[[str], bool] | None


def nfc_by_layer(model: nn.Module, probe: Probe, *, layers: Layers = None, output: Output | None = None,
                 memory: str | float = "2GiB") -> Callable[[], dict[str, float]]:
    """A function that returns the ``nfc`` of each layer of ``model`` as it is then, without those that are 1 by definition.

    >>> rich = nfc_by_layer(model, richter.Probe(x[:128], y[:128]))
    >>> optimiser = AdaptiveSLO(slo_groups(model), lr=0.05, richness=rich, every=20)

    The numbers are those of ``richter.measure(model, probe, ["nfc"])``, without their standard errors. The first call goes
    through it, with all that it verifies about the model; later calls trust that the same modules work in the same way. Models
    that need more than plain chunks of examples (masks, grouped maps, random outputs) are measured anew every time.
    """
    model, bytes_ = unwrap(model), parse_bytes(memory)
    seen: list[Any] = []  # the modules that were verified
    quick: _Quick | None = None

    def nfc() -> dict[str, float]:
        nonlocal quick
        modules = list(model.named_modules())
        if quick is not None and modules == seen:
            return quick()
        snap = measure(model, probe, ["nfc"], layers=layers, memory=memory, output=output)
        found = {r.layer: r.value for r in snap.rows if not r.note.startswith("trivial")}
        quick, seen[:] = _quick(model, probe, list(found), output, bytes_), modules
        return found

    return nfc


def _quick(model: nn.Module, probe: Probe, names: list[str], output: Output | None, memory: int) -> _Quick | None:
    """The short way for what has just been measured, if there is one."""
    x = probe.inputs(next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32))
    with quiet(model):
        copied, _, found = surveyed(model, to_device(select(x, slice(0, SURVEYED)), device_of(model)), output)
    masked = probe.targets(torch.Size((probe.n, *found.shape)))[1] is not None
    plain = all(k in found.batched and found.maps[k].kind != "grouped" for k in names)
    if masked or found.drawn or found.outputs > MOMENT_OUTPUTS or not plain:
        return None
    return _Quick(model, x, probe, names, found, copied, output, memory)


class _Quick:
    """nfc of verified layers: one forward pass for each chunk, one backward pass for each output, and little else."""

    def __init__(self, model: nn.Module, x: Any, probe: Probe, names: list[str], found: Survey, copied: set[str],
                 output: Output | None, memory: int) -> None:
        self.model, self.x, self.n, self.names, self.found = model, x, probe.n, names, found
        self.copied, self.output = copied, output
        asked = 4 * 3 * sum(found.maps[k].width for k in names)  # bytes of one cotangent of one example
        self.chunk = max(1, min(probe.chunk, probe.n, memory // (4 * found.graph + asked)))
        self.block = max(1, min(found.outputs, AT_ONCE // (self.chunk * asked + 1)))

    def __call__(self) -> dict[str, float]:
        W: dict[str, Tensor] = {}
        sums: dict[str, Tensor] = {}
        with quiet(self.model):
            state = state_of(self.model, copied=self.copied)
            for start in range(0, self.n, self.chunk):
                rows = slice(start, min(start + self.chunk, self.n))
                x = to_device(select(self.x, rows), device_of(self.model))
                seen = record(self.model, x, rows, state, self.found, self.names, self.output)
                V = every_output(seen.f)
                for i in range(0, len(V), self.block):
                    for c, g in _asked(seen, V[i:i + self.block]):
                        if c.name not in W:
                            W[c.name] = _wide(c.map.matrix(c.module, c.weight.detach()))
                        d_out, d_in = W[c.name].shape
                        A = g @ W[c.name] if d_in < d_out else g
                        sums[c.name] = sums[c.name].addmm_(A.T, A) if c.name in sums else A.T @ A
        return {name: _nfc(W[name], sums[name]) for name in self.names}


def _asked(seen: Recording, V: Float[Tensor, "v n k"]) -> Iterator[tuple[Call, Float[Tensor, "m o"]]]:
    """What the outputs ask of each call of each map, all cotangents, examples and positions in one column: sums over them are
    wanted, so whose they are does not matter."""
    found = [seen.seen.backward(v)[0] for v in V.unbind()]
    for c, *g in zip(seen.seen.calls, *found, strict=True):
        yield c, _wide(c.map.outputs(c.module, torch.cat(g)).flatten(0, 1))


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _nfc(W: Float[Tensor, "o i"], K: Float[Tensor, "r r"]) -> float:
    """The cosine of F = W^T W and G = W^T K W, or G itself in the place of K, where the inputs are fewer than the outputs.

    With M = W W^T: <F, G> = Tr(M K M), |F| = |M| and |G|^2 = Tr(K M K M), so that nothing of the inputs' size is formed.
    """
    d_out, d_in = W.shape
    if d_in < d_out:
        F = W.T @ W
        inner, square, norm = (F * K).sum(), K.square().sum(), F.norm()
    else:
        M = W @ W.T
        KM = K @ M
        inner, square, norm = (KM * M).sum(), (KM * KM.T).sum(), M.norm()
    inner, size = torch.stack([inner, square.clamp(min=0).sqrt() * norm]).tolist()
    return quotient(inner, size)
