"""Every figure and table of the source papers as an experiment with claims: ``richter list``, ``richter check``.

>>> richter.experiments.get("nfa_fig1").run("smoke")["nfm_agop"].mean()
"""

from __future__ import annotations

import importlib
import pkgutil

from richter.citations import references
from richter.core import RichterError, unknown
from richter.experiments.frame import Claim, Control, Experiment, Results

__all__ = ["Claim", "Control", "Experiment", "Results", "get", "names"]


def names() -> list[str]:
    """Of all experiments, by their files: <paper>_<figure>.py."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name.partition("_")[0] in references())


def get(name: str) -> Experiment:
    if name not in names():
        raise unknown("Richter", "experiment", name, names())
    try:
        found = importlib.import_module(f"richter.experiments.{name}").EXPERIMENT
    except (ImportError, AttributeError, SyntaxError) as why:
        raise RichterError(f"the experiment {name} cannot be loaded: {type(why).__name__}: {why}.") from why
    assert isinstance(found, Experiment)
    assert found.name == name
    return found
