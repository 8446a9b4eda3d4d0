"""One writer for each run: a lock that the system lets go when the process ends, however it ends."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows: there the last writer's session tells what is known
    fcntl = None  # type: ignore[assignment]

FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # nor wait for a named pipe
_taken: set[int] = set()


def take(path: Path) -> int | None:
    """The open lock, or None if another writer holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | FLAGS, 0o644)
    try:
        for wait in (0.01, 0.03, 0.1, None) if fcntl is not None else ():
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if wait is None:
                    os.close(handle)
                    return None
                time.sleep(wait)  # it may be a reader that asks whether somebody writes
    except BaseException:
        os.close(handle)
        raise
    _taken.add(handle)
    return handle


def let_go(handle: int) -> None:
    _taken.discard(handle)
    os.close(handle)


def _forked() -> None:
    """A child (a worker that loads data) does not keep the lock when its parent is killed."""
    while _taken:
        os.close(_taken.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def held(path: Path) -> bool:
    """Is somebody writing?"""
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
