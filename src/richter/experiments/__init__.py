"""Every figure and table of the source papers as an experiment with claims: ``richter list``, ``richter check``.

>>> richter.experiments.get("nfa_fig1").run("smoke")["nfm_agop"].mean()

A folder for each paper, a file for each figure or table, which offers ``EXPERIMENT``: nfa/fig1.py is "nfa_fig1". One of your own
is made known by ``richter.experiments.add(EXPERIMENT)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from richter.core.catalogue import Catalogue, lazy_names, parts

if TYPE_CHECKING:
    from richter.experiments.frame import Claim, Control, Experiment, Results, Task  # noqa: F401

CATALOGUE: Catalogue[Experiment] = Catalogue(__name__, "EXPERIMENT", "experiment", until="claims")
names, get, add = CATALOGUE.names, CATALOGUE.get, CATALOGUE.add

__getattr__, __dir__, __all__ = lazy_names(
    __name__, dict.fromkeys(("Claim", "Control", "Experiment", "Results", "Task"), "frame"), parts(__name__))
