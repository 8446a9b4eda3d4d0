"""Richter measures how rich training is: which layers of a PyTorch model learn features, how fast, and toward what.

    probe = richter.Probe(x, y)
    watch = richter.Observer(model, probe, when=50)      # then watch(step, loss=loss) in the training loop
    print(richter.diagnose(watch))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "Probe": "richter.probe", "Snapshot": "richter.snapshot", "Observer": "richter.observe", "measure": "richter.observe",
    "every": "richter.observe", "epochs": "richter.observe", "log_spaced": "richter.observe",
    "diagnose": "richter.verdict", "RichterError": "richter.core", "RichterWarning": "richter.evaluate",
}
_PARTS = ("controls", "core", "cotangents", "engine", "experiments", "kernels", "layers", "learners", "measures", "models",
          "report", "runs", "statistics", "tasks", "testing", "theory", "workflows")

__all__ = [*_WHERE, *_PARTS]

if TYPE_CHECKING:
    from richter.core import RichterError
    from richter.evaluate import RichterWarning
    from richter.observe import Observer, epochs, every, log_spaced, measure
    from richter.probe import Probe
    from richter.snapshot import Snapshot
    from richter.verdict import diagnose


def __getattr__(name: str) -> Any:
    """Everything is imported when it is first used, so that ``import richter`` is immediate."""
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _PARTS:
        return importlib.import_module(f"richter.{name}")
    raise AttributeError(f"module 'richter' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
