"""Pictures of measurements. Reads tables, never imports torch.

>>> richter.report.html.report(runs, "report.html"); richter.report.server.serve("runs"); richter.report.figures.curves(run)
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["figures", "html", "server"]


def __getattr__(name: str) -> Any:
    """Each part is imported when it is first used."""
    if name in __all__:
        return importlib.import_module(f"richter.report.{name}")
    raise AttributeError(f"module 'richter.report' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
