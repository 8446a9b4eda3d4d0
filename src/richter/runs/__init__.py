"""Runs on disk: measurements that outlive the process that made them. There is nothing to start or to configure.

>>> watch = richter.Observer(model, probe, run="runs/demo")    # writes as it measures; resume=True continues after a crash
>>> run = richter.runs.load("runs/demo")                       # reads, also while it is being written
>>> [r.name for r in richter.runs.find("runs")]
"""

from __future__ import annotations

from richter.runs.reader import Run, Series, default_store, find, inside
from richter.runs.reader import Run as load
from richter.runs.writer import Writer, create

__all__ = ["Run", "Series", "Writer", "create", "default_store", "find", "inside", "load"]
