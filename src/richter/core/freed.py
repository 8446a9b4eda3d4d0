"""Memory that was freed, given back to the system: the C library keeps what it thinks will soon be wanted again, in pieces that
do not serve larger arrays, and a bound of memory counts them."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable

from richter.core.sizes import SMALL


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """What glibc has for it; None elsewhere."""
    try:
        return ctypes.CDLL(None).malloc_trim  # type: ignore[no-any-return]
    except (OSError, AttributeError, TypeError):
        return None


def trim(size: int) -> None:
    """To be called where so many bytes were let go: if they are many, because it takes some milliseconds."""
    if size > SMALL and (call := _trim()) is not None:
        call(0)


def give_back(size: int) -> None:
    """The same where what was let go hangs together in circles, which are undone first."""
    if size > SMALL:
        gc.collect()
    trim(size)
