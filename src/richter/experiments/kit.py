"""Names that every experiment imports: ``from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref``."""

from __future__ import annotations

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results, Scale, Task
from richter.runs import Writer

__all__ = ["Claim", "Control", "Experiment", "Interval", "Ref", "Results", "Scale", "Task", "Writer"]
