"""What a theory is: a closed form, an actual system that it speaks of, and the cases in which the two are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from richter.core import Ref


@dataclass(frozen=True)
class Theory:
    """One closed form and its test, ``richter.testing.check_theory``.

    ``predict`` is the closed form; ``simulate`` builds, integrates or trains the actual system, takes the same arguments, returns
    the same kind of result (numbers, arrays, tuples of them, or a Prediction), and runs nothing that ``predict`` runs.
    ``cases()`` makes the arguments of both, a tuple for each case. Where ``simulate`` draws at random it takes ``seed=`` too, and
    the prediction must hold for each of ``seeds``. In every case they agree within ``tolerance``, relative to the simulation.
    ``perturb``: keywords of ``predict``, constants of the theory, each with a wrong value under which some case must miss.
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
