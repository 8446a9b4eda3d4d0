"""Measure how rich training is: which layers of a PyTorch model learn features, how fast, and toward what.

    probe = richter.Probe(x, y)
    watch = richter.Observer(model, probe, when=50)      # then watch(step, loss=loss) in the training loop
    print(richter.diagnose(watch))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from richter.core.catalogue import lazy_names

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(__name__, {
    "Probe": "instrument.probe", "Snapshot": "instrument.snapshot", "Observer": "instrument.observe",
    "measure": "instrument.observe", "every": "instrument.observe", "epochs": "instrument.fitting",
    "log_spaced": "instrument.fitting", "plan": "instrument.observe", "diagnose": "instrument.verdict",
    "RichterError": "core", "RichterWarning": "core",
}, ("controls", "core", "engine", "experiments", "instrument", "kernels", "layers", "learners", "measures", "models", "report",
    "runs", "tasks", "testing", "theory", "workflows"))

if TYPE_CHECKING:
    from richter.core import RichterError, RichterWarning
    from richter.instrument.fitting import epochs, log_spaced
    from richter.instrument.observe import Observer, every, measure, plan
    from richter.instrument.probe import Probe
    from richter.instrument.snapshot import Snapshot
    from richter.instrument.verdict import diagnose
