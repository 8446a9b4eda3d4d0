"""Solvable theory: predictions of what a measurement should give. Pure functions of arrays (numpy or torch in, the same kind
out, float64).

Each file defines ``THEORIES``: closed forms, each with a simulation that builds the actual system and never calls the closed
form, so that their agreement is evidence (``richter.testing.check_theory``). Theory and instrument do not import each other.

    richter.theory.names()                                    # names of all theories, without importing one
    richter.theory.get("freeprob.centred_nfc").predict        # the closed form
    richter.theory.add(Theory("mine", ...))                   # add your own; `list` and `cite` then know it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from richter.core.catalogue import Catalogue, lazy_names, parts

if TYPE_CHECKING:
    from richter.theory.frame import Theory

CATALOGUE: Catalogue[Theory] = Catalogue(__name__, "THEORIES", "theory")
names, get, add = CATALOGUE.names, CATALOGUE.get, CATALOGUE.add

__getattr__, __dir__, __all__ = lazy_names(__name__, {"Theory": "frame"}, parts(__name__))
