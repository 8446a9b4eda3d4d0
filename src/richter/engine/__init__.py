"""Where work runs: this process, or local workers. A sweep is a list of settings; what is finished is never run again."""

from __future__ import annotations

from richter.engine.sweep import Outcome, Work, sweep

__all__ = ["Outcome", "Work", "sweep"]
