"""Data: what the papers' experiments and the demo are run on."""

from __future__ import annotations

from richter.tasks.digits import digits

__all__ = ["digits"]
