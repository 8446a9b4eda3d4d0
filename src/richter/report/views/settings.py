"""Settings of the chosen runs side by side, with their seeds, software and hardware."""

from __future__ import annotations

from typing import Any

from richter.report.plotdata import flat
from richter.report.query import Query
from richter.report.shelf import Chosen
from richter.report.views import View


def settings(runs: Chosen, query: Query) -> Any:
    """Return settings, seeds and provenance of each run, as names and texts."""
    return {"runs": [{"run": name, "settings": flat(run.settings), "seeds": flat(run.seeds),
                      "where": flat(sessions[-1].provenance) if sessions else {}}
                     for name, run in runs for sessions in [run.sessions]]}


VIEW = View("settings", "Settings", settings, script="view-settings.js", place=6)
