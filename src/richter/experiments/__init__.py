"""Every figure and table of the source papers as an experiment with claims: ``richter list``, ``richter check``.

>>> richter.experiments.get("nfa_fig1").run("smoke")["nfm_agop"].mean()
"""

from __future__ import annotations

import importlib
import pkgutil

from richter.core import RichterError, unknown
from richter.core.citations import references
from richter.experiments.frame import Claim, Control, Experiment, Results

__all__ = ["Claim", "Control", "Experiment", "Results", "get", "names"]


def names() -> list[str]:
    """Of all experiments, by their files: <paper>/<figure>.py is <paper>_<figure>."""
    papers = [m.name for m in pkgutil.iter_modules(__path__) if m.ispkg and m.name in references()]
    return sorted(f"{paper}_{m.name}" for paper in papers for m in pkgutil.iter_modules([f"{__path__[0]}/{paper}"]))


def get(name: str) -> Experiment:
    if name not in names():
        raise unknown("Richter", "experiment", name, names())
    try:
        found = importlib.import_module(f"richter.experiments.{name.replace('_', '.', 1)}").EXPERIMENT
    except (ImportError, AttributeError, SyntaxError) as why:
        raise RichterError(f"the experiment {name} cannot be loaded: {type(why).__name__}: {why}.") from why
    assert isinstance(found, Experiment)
    assert found.name == name
    return found
