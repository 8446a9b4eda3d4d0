"""A limit of the dashboard's connections that keeps nobody out: where there are too many, the oldest unused ones are closed.

uvicorn's own limit (``limit_concurrency``) refuses everybody instead, for as long as somebody keeps connections open, and it has
no limit of time for a request that is never finished.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 256  # connections at a time: files that are open, of which a process may have 1,024


class Limited(H11Protocol):
    """uvicorn's connection; a new one closes those of too many that have waited the longest for their other side."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        waiting = [c for c in self.connections if isinstance(c, Limited) and not c.answering]
        for connection in sorted(waiting, key=lambda c: c.since)[:max(0, len(self.connections) - MOST)]:
            connection.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.since = self.loop.time()

    @property
    def answering(self) -> bool:
        """Tell whether it is our turn: there is a whole request, and no part of an answer waits to be taken."""
        return self.cycle is not None and not self.cycle.response_complete and not self.flow.write_paused
