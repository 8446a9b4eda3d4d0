"""Solvable theory: what a measurement should be. Pure functions of arrays (numpy or torch in, the same kind out, float64).

Each module offers a closed form and a ``simulate`` that builds the actual system and never calls the closed form, so that
their agreement is evidence (``richter.testing.check_theory``). Theory imports no instrument, and no instrument theory.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["early_time", "freeprob"]


def __getattr__(name: str) -> Any:
    """Imported when first used."""
    if name in __all__:
        return importlib.import_module(f"richter.theory.{name}")
    raise AttributeError(f"module 'richter.theory' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
