"""Current richness of each layer as a function to be called repeatedly, for adaptive controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from richter.core import Mark
from richter.instrument.capture import Output
from richter.instrument.observe import Measurement
from richter.instrument.probe import Probe

Layers = str | Sequence[str] | Callable[[str], bool] | None


def nfc_by_layer(model: nn.Module, probe: Probe, *, layers: Layers = None, output: Output | None = None,
                 memory: str | float = "2GiB") -> Callable[[], dict[str, float]]:
    """Return a function that measures the ``nfc`` of each layer of ``model`` in its current state, without trivial values.

    >>> rich = nfc_by_layer(model, richter.Probe(x[:128], y[:128]))
    >>> optimiser = AdaptiveSLO(slo_groups(model), lr=0.05, richness=rich, every=20)
    The numbers equal those of ``richter.measure(model, probe, ["nfc"])``, in the model's own precision and without standard
    errors. The first call makes all checks of ``measure``; later calls assume that the same modules work in the same way.
    """
    measurement = Measurement(model, probe, ["nfc"], layers=layers, output=output, memory=memory, errors=False)
    return lambda: {r.layer: r.value for r in measurement.take().rows if r.mark is not Mark.TRIVIAL}
