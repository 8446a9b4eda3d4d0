"""Connections to a dashboard that nobody uses do not keep others out: a request that is begun is finished soon, or its connection
is closed; of more connections than there may be, those that have asked for nothing the longest are closed."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 10.0  # seconds from the first byte, or from the connection, to the end of a request's head
MOST = 256  # connections at a time: files that are open, of which a process may have 1,024


class Patient(H11Protocol):
    """uvicorn's connection, with a limit of time for requests and a limit of number for connections. uvicorn itself has a limit
    of time between requests (``timeout_keep_alive``), and refuses everybody where there are too many (``limit_concurrency``)."""

    begun: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        others: list[Any] = [c for c in self.connections if isinstance(c, Patient) and c is not self and c.idle]
        for connection in sorted(others, key=lambda c: c.since)[:max(0, len(self.connections) - MOST)]:
            connection.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.idle:
            if self.begun is None and self.timeout_keep_alive_task is None:
                self._wait()
        else:
            self._done()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._done()
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Is no request being answered?"""
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        self.since = self.loop.time()
        self.begun = self.loop.call_later(PATIENCE, self._give_up)

    def _done(self) -> None:
        if self.begun is not None:
            self.begun.cancel()
            self.begun = None

    def _give_up(self) -> None:
        self.begun = None
        if self.idle and not self.transport.is_closing():
            self.transport.abort()
