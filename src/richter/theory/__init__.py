"""Solvable theory: what a measurement should be. Pure functions of arrays (numpy or torch in, the same kind out, float64).

Each module offers a closed form and a ``simulate`` that builds the actual system and never calls the closed form, so that
their agreement is evidence (``richter.testing.check_theory``). Theory imports no instrument, and no instrument theory.
"""

from __future__ import annotations

from richter.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, {}, ("early_time", "freeprob"))
