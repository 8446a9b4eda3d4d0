"""Runs on disk: measurements that survive the process that made them. Nothing to start, nothing to configure.

>>> watch = richter.Observer(model, probe, run="runs/demo")    # writes as it measures; resume=True goes on after a crash
>>> run = richter.runs.open("runs/demo")                       # reads, also while it is being written
>>> [r.name for r in richter.runs.find("runs")]
"""

from __future__ import annotations

from richter.runs.reader import Run, Series, default_store, find, inside
from richter.runs.reader import Run as open
from richter.runs.writer import Writer, create

__all__ = ["Run", "Series", "Writer", "create", "default_store", "find", "inside", "open"]
