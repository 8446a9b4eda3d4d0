"""One kind of progress bar: it appears after two seconds, on a terminal, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

DELAY = 2  # seconds


def progress(over: Iterable[Any] | None = None, *, title: str, total: float | None = None, unit: str = "it", **more: Any) -> Any:
    """A bar over ``over``, or one of ``total`` units to be moved by ``.update()`` and closed (it is a context manager)."""
    from tqdm import tqdm
    return tqdm(over, desc=title, total=total, unit=unit, delay=DELAY, leave=False, disable=None, **more)
