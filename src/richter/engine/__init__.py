"""Running tasks in this process or in local workers. A sweep does one function for a list of settings; a finished task is
never run again."""

from __future__ import annotations

from richter.engine.sweep import Outcome, Work, sweep

__all__ = ["Outcome", "Work", "sweep"]
