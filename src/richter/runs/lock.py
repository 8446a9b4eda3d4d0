"""One writer for each run: a lock that the system lets go when the process ends, however it ends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock

try:
    import fcntl
except ImportError:  # not on Windows: there the last writer's session tells what is known
    fcntl = None  # type: ignore[assignment]

PATIENCE = 0.15  # seconds; it may be a reader that asks whether somebody writes
FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # nor wait for a named pipe


def take(path: Path) -> BaseFileLock | None:
    """The lock, or None if another writer holds it. A child that is forked (a worker that loads data) does not hold it with us,
    so that it is free when we are killed; filelock sees to that, from 3.30 on."""
    from filelock import FileLock, Timeout
    # any thread may let it go; a lock that is a file of its own would outlive a killed process
    lock = FileLock(path, timeout=PATIENCE, poll_interval=0.01, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


def held(path: Path) -> bool:
    """Is somebody writing? Asked by a shared lock, which filelock does not have: readers must not take each other for a writer,
    and may be allowed to read the file only."""
    if fcntl is None:
        return False
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | FLAGS)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
    return False
