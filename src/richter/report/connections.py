"""A limit on the dashboard's connections that refuses nobody: above the limit, the oldest idle connections are closed.

uvicorn's own limit (``limit_concurrency``) refuses every new client instead, for as long as the open connections last. It also
has no timeout for a request that is never completed.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 256  # connections at a time; each is an open file, and a process may have 1,024


class Limited(H11Protocol):
    """uvicorn's connection. When there are too many, a new one closes those that have been idle the longest."""

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
        """Whether the server must act: a request is complete, and the client is not waited for to read the answer."""
        return self.cycle is not None and not self.cycle.response_complete and not self.flow.write_paused
