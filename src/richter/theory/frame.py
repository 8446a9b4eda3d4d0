"""The class ``Theory``: a closed form, a simulation of the system that it describes, and the cases in which they are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from richter.core import Ref


@dataclass(frozen=True)
class Theory:
    """One closed form and its test, ``richter.testing.check_theory``.

    ``predict`` is the closed form. ``simulate`` builds, integrates or trains the actual system. It takes the same arguments,
    returns the same kind of result (numbers, arrays, tuples of them, or a Prediction), and shares no code with ``predict``.
    ``cases()`` makes the arguments of both, a tuple for each case. A random ``simulate`` also takes ``seed=``, and the prediction
    must hold for each of ``seeds``. In every case the two agree within ``tolerance``, relative to the simulation.
    ``perturb``: keywords of ``predict`` (constants of the theory), each with a wrong value that must fail in some case.
    """

    name: str
    ref: Ref
    title: str
    predict: Callable[..., Any]
    simulate: Callable[..., Any]
    cases: Callable[[], Sequence[tuple[Any, ...]]]
    tolerance: float
    perturb: Mapping[str, Any]
    seeds: tuple[int, ...] = ()
