"""How rich each layer is now, as a function to be asked again and again: what adaptive controls steer by."""

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
    """A function that returns the ``nfc`` of each layer of ``model`` as it is then, without those that are 1 by definition.

    >>> rich = nfc_by_layer(model, richter.Probe(x[:128], y[:128]))
    >>> optimiser = AdaptiveSLO(slo_groups(model), lr=0.05, richness=rich, every=20)

    The numbers are those of ``richter.measure(model, probe, ["nfc"])``, in the model's own precision and without their standard
    errors. The first call verifies all that ``measure`` does; later ones trust that the same modules work in the same way.
    """
    measurement = Measurement(model, probe, ["nfc"], layers=layers, output=output, memory=memory, errors=False)
    return lambda: {r.layer: r.value for r in measurement.take().rows if r.mark is not Mark.TRIVIAL}
