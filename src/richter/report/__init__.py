"""Reports, figures and the dashboard. This package reads tables and never imports torch.

>>> richter.report.html.report(runs, "report.html"); richter.report.server.serve("runs"); richter.report.figures.curves(run)
"""

from __future__ import annotations

from richter.core.catalogue import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, {}, ("figures", "html", "server", "sweep", "views"))
