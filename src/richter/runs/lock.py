"""One writer for each run: a lock that the system lets go when the process ends, however it ends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows: there the last writer's session tells what is known
    fcntl = None  # type: ignore[assignment]


def take(path: Path) -> int | None:
    """The open lock, or None if another writer holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0), 0o644)
    if fcntl is None:
        return handle
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def held(path: Path) -> bool:
    """Is somebody writing?"""
    if fcntl is None:
        return False
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(handle)
    return False
